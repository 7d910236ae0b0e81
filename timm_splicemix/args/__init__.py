from .command import CommandParser, command
from .dataset import add_dataset_args, add_label_args, dataset_kwargs
from .splicemix import add_splicemix_args, splicemix_kwargs

__all__ = [
    'CommandParser',
    'add_dataset_args',
    'add_label_args',
    'add_splicemix_args',
    'command',
    'dataset_kwargs',
    'splicemix_kwargs',
]
