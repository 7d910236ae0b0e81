""" What happens to a batch """
from .splicemix import Grid, MixPlan, SpliceMix, SpliceRecord, parse_grids, sample_record, splice, split_cells

__all__ = ['Grid', 'MixPlan', 'SpliceMix', 'SpliceRecord', 'parse_grids', 'sample_record', 'splice', 'split_cells']
