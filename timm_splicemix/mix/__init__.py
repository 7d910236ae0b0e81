""" What happens to a batch """
from .grid import Grid, parse_grids
from .record import MixPlan, SpliceRecord, sample_record
from .splicemix import SpliceMix, splice, split_cells

__all__ = ['Grid', 'MixPlan', 'SpliceMix', 'SpliceRecord', 'parse_grids', 'sample_record', 'splice', 'split_cells']
