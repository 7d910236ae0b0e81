""" What happens to a batch """
from .base import Mixer
from .grid import Grid, parse_grids
from .pairs import (
    Mixup,
    PairPlan,
    ResizeMix,
    SpliceWith,
)
from .record import MixPlan, SpliceRecord, sample_record
from .recursivemix import RecursiveMix, RecursivePlan
from .splicemix import SpliceMix, splice, split_cells

__all__ = [
    'Grid', 'MixPlan', 'Mixer', 'Mixup', 'PairPlan', 'RecursiveMix', 'RecursivePlan', 'ResizeMix', 'SpliceMix',
    'SpliceRecord', 'SpliceWith', 'parse_grids', 'sample_record', 'splice', 'split_cells']
