""" Multi-label image classification for timm, with SpliceMix and SpliceMix-CL """
from . import models  # registers ShuffleNetV2 in timm
from .args import add_splicemix_args, splicemix_kwargs
from .data import create_dataset, multilabel_collate
from .heads import list_heads
from .loss import ConsistencyLoss, consistency_loss
from .metrics import MultilabelMeter, average_precision
from .mix import (
    Grid,
    MixPlan,
    SpliceMix,
    SpliceRecord,
    parse_grids,
    sample_record,
    splice,
    split_cells,
)
from .models import create_model
from .run.load import load_checkpoint
from .run.predictor import Predictor
from .task import SpliceMixModule, SpliceMixTask

__version__ = '0.2.0'

__all__ = [
    'ConsistencyLoss',
    'Grid',
    'MixPlan',
    'MultilabelMeter',
    'Predictor',
    'SpliceMix',
    'SpliceMixModule',
    'SpliceMixTask',
    'SpliceRecord',
    'add_splicemix_args',
    'average_precision',
    'consistency_loss',
    'create_dataset',
    'create_model',
    'list_heads',
    'load_checkpoint',
    'models',
    'multilabel_collate',
    'parse_grids',
    'sample_record',
    'splice',
    'splicemix_kwargs',
    'split_cells',
]
