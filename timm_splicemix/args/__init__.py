from .command import CommandParser, command, setup_logging
from .config import dump_args, parse_with_config, uses_config
from .ours import (
    add_label_args,
    add_loss_args,
    add_mixer_args,
    add_our_train_args,
    add_our_validate_args,
    add_predict_model_args,
    add_prediction_args,
    add_splicemix_args,
    add_train_args,
    add_validate_args,
    splicemix_kwargs,
)
from .rules import (
    check_train_args,
    check_validate_args,
    map_defaults,
    map_label_defaults,
    uses_softmax,
)
from .script import ScriptFlags
from .timm import add_dataset_args

__all__ = [
    'CommandParser',
    'ScriptFlags',
    'add_dataset_args',
    'add_label_args',
    'add_loss_args',
    'add_mixer_args',
    'add_our_train_args',
    'add_our_validate_args',
    'add_predict_model_args',
    'add_prediction_args',
    'add_splicemix_args',
    'add_train_args',
    'add_validate_args',
    'check_train_args',
    'check_validate_args',
    'command',
    'dump_args',
    'map_defaults',
    'map_label_defaults',
    'parse_with_config',
    'setup_logging',
    'splicemix_kwargs',
    'uses_config',
    'uses_softmax',
]
