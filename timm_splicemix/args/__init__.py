from .check import (
    map_defaults,
    map_defaults_of_data,
    refuse_unsupported,
    uses_softmax,
)
from .command import CommandParser, command
from .config import dump_args, parse_with_config, uses_config
from .dataset import add_dataset_args, add_label_args
from .loss import add_loss_args
from .mixer import add_mixer_args
from .splicemix import add_splicemix_args, splicemix_kwargs
from .timm_train import add_timm_train_args
from .timm_validate import add_timm_validate_args
from .train import add_train_args
from .validate import (
    add_predict_model_args,
    add_prediction_args,
    add_validate_args,
    check_values,
    map_validation_defaults,
    refuse_in_validation,
)

__all__ = [
    'CommandParser',
    'add_dataset_args',
    'add_label_args',
    'add_loss_args',
    'add_mixer_args',
    'add_predict_model_args',
    'add_prediction_args',
    'add_splicemix_args',
    'add_timm_train_args',
    'add_timm_validate_args',
    'add_train_args',
    'add_validate_args',
    'check_values',
    'command',
    'dump_args',
    'map_defaults',
    'map_defaults_of_data',
    'map_validation_defaults',
    'parse_with_config',
    'refuse_in_validation',
    'refuse_unsupported',
    'splicemix_kwargs',
    'uses_config',
    'uses_softmax',
]
