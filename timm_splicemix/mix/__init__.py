""" What happens to a batch """
from .baselines import Mixup, PairPlan, RecursiveMix, RecursivePlan, ResizeMix, SpliceWith
from .drawing import Mixer
from .splicemix import Grid, MixPlan, SpliceMix, SpliceRecord, parse_grids, sample_record, splice, split_cells

__all__ = [
    'Grid', 'MixPlan', 'Mixer', 'Mixup', 'PairPlan', 'RecursiveMix', 'RecursivePlan', 'ResizeMix', 'SpliceMix',
    'SpliceRecord', 'SpliceWith', 'parse_grids', 'sample_record', 'splice', 'split_cells']
