""" Command lines that a run prints, which work as they are in any folder """
import argparse
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any, Iterator, Optional

from ..args import CommandParser, add_label_args
from ..args.timm import add_source_args

_PROGRAM = 'timm-splicemix'
_PATHS = ('data_dir', 'train_ann', 'val_ann', 'train_images', 'val_images', 'class_map')
_TRAINING = ('train_ann', 'train_images')
_UNUSED = ('data', 'dataset_download')  # by an evaluation of data that are there


def program(command: str) -> str:
    """Return how to start a command: by its installed name, or by the script of the clone."""
    installed = shutil.which(_PROGRAM)
    if installed is not None and Path(installed).parent.samefile(Path(sys.executable).parent):
        return f'{_PROGRAM} {command}'
    script = Path(__file__).resolve().parents[2] / f'{command}.py'
    return shlex.join([sys.executable, str(script)] if script.is_file() else [
        sys.executable, '-m', f'timm_splicemix.{command}'])


def resume_command(folder: Path) -> str:
    return f'{program("train")} --resume {shlex.quote(str(folder.absolute()))}'


def validate_command(args: argparse.Namespace, checkpoint: Path, partition: Optional[Path] = None) -> str:
    """ Return the command that evaluates the best checkpoint of a run on its validation set.

    Args:
        args: Flags of the run.
        checkpoint: The checkpoint.
        partition: File of the run's own split of its training data.
    """
    flags = list(_data_flags(args, partition is not None))
    if partition is not None:
        flags += ['--split-file', str(partition.absolute())]
    if args.val_split != 'validation':
        flags += ['--split', args.val_split]
    if args.val_num_samples:
        flags += ['--num-samples', str(args.val_num_samples)]
    for name, default in (('metrics', 'paper'), ('decoder', 'pil')):
        if getattr(args, name) != default:
            flags += [f'--{name}', getattr(args, name)]
    return f'{program("validate")} {shlex.join([*flags, "--checkpoint", str(checkpoint.absolute())])}'


def _data_flags(args: argparse.Namespace, of_training_data: bool) -> Iterator[str]:
    """Yield the flags of the data set that are not at their default, with absolute paths."""
    parser = CommandParser()
    add_source_args(parser.add_argument)
    add_label_args(parser, training=False)
    for name, action in parser.flags.items():
        value: Any = getattr(args, name)
        if name in _UNUSED or (name in _TRAINING and not of_training_data) or value in (None, '', action.default):
            continue
        yield next(option for option in action.option_strings if option.startswith('--'))
        if action.nargs != 0:
            is_path = name in _PATHS and Path(value).exists()  # other files are relative to the data set
            yield str(Path(value).absolute()) if is_path else str(value)
