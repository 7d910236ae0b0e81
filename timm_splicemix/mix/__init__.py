""" Mixers: how the images and labels of a batch are combined """
from .auto import AUTO_GRIDS, AUTO_WEIGHT, GridChoice, cell_size, choose_grids, coarse_grids, is_auto
from .base import Mixer, Plan, as_mixer
from .grid import Grid, parse_grids
from .pairs import (
    Mixup,
    PairPlan,
    ResizeMix,
    SpliceWith,
)
from .record import SpliceRecord, sample_record
from .recursivemix import RecursiveMix, RecursivePlan
from .splicemix import (
    MixPlan,
    SpliceMix,
    splice,
    split_cells,
)
from .union import LabelUnion, find_classes

__all__ = [
    'AUTO_GRIDS', 'AUTO_WEIGHT', 'Grid', 'GridChoice', 'LabelUnion', 'MixPlan', 'Mixer', 'Mixup', 'PairPlan', 'Plan',
    'RecursiveMix', 'RecursivePlan', 'ResizeMix', 'SpliceMix', 'SpliceRecord', 'SpliceWith', 'as_mixer', 'cell_size',
    'choose_grids', 'coarse_grids', 'find_classes', 'is_auto', 'parse_grids', 'sample_record', 'splice',
    'split_cells']
