""" Helpers of the tests of flags of train.py: an untrained run, and the list of tested flags """
import itertools
from pathlib import Path
from typing import Any, Callable

import torch

from timm_splicemix.args import check_train_args, map_defaults, parse_with_config
from timm_splicemix.run.machine import set_up_device
from timm_splicemix.run.trainer import Trainer
from timm_splicemix.train import build_parser, create_run

from .runs import TINY

SHOWN: set[str] = set()  # flags whose effect or refusal is tested
_numbers = itertools.count()


def shows(*names: str) -> Callable:
    """Mark the flags that a test is about, by their names in the parsed arguments."""
    unknown = set(names) - build_parser().flags.keys()
    assert not unknown, unknown

    def note(test: Callable) -> Callable:
        SHOWN.update(names)
        return test

    return note


def build(data: Path, *flags: Any, before: Callable = lambda args: None) -> Trainer:
    """A run before its first epoch, as the command creates it; its folder is beside the data."""
    place = ['--data-dir', data, '--output', data.parent / 'output', '--experiment', f'run{next(_numbers)}']
    argv = [*TINY, *place, *flags]
    parser = build_parser()
    args, given = parse_with_config(parser, [str(part) for part in argv])
    check_train_args(args, parser)
    map_defaults(args, given)
    settings = dict(vars(args))
    device = set_up_device(args)
    before(args)
    return create_run(args, given, settings, device)


def batches(run: Trainer, epoch: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The batches of an epoch."""
    run.train_loader.set_epoch(epoch)
    return list(run.train_loader)


def images_of(run: Trainer, epoch: int = 0) -> torch.Tensor:
    return torch.cat([images for images, _ in batches(run, epoch)])


def model_of(run: Trainer) -> torch.nn.Module:
    return run.task.get_eval_model()
