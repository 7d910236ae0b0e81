""" Multi-label image classification for timm: SpliceMix, and what stands around it """
from .args import add_splicemix_args, splicemix_kwargs
from .data import create_dataset
from .mix import Grid, MixPlan, SpliceMix, SpliceRecord, parse_grids, sample_record, splice, split_cells

__version__ = '0.1.0'

__all__ = [
    'Grid',
    'MixPlan',
    'SpliceMix',
    'SpliceRecord',
    'add_splicemix_args',
    'create_dataset',
    'parse_grids',
    'sample_record',
    'splice',
    'splicemix_kwargs',
    'split_cells',
]
