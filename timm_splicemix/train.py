""" Train a timm model on multi-label images, with SpliceMix and timm's flags

    python train.py --dataset shapes --model resnet18 --img-size 128 --gp max --splicemix-grids 1x2,2x2 --splicemix-cl
    python train.py --data-dir coco --config configs/coco_resnet101_splicemix_cl.yaml
    torchrun --nproc-per-node 4 train.py --data-dir voc --dataset voc/2007 --model vit_base_patch16_384 --pretrained
    python train.py --resume output/train/RUN

A run writes checkpoints, args.yaml, classes.txt, summary.csv and curves.png to its output folder.
"""
import argparse
import logging
import sys
from pathlib import Path
from typing import Any, Optional, Sequence

import torch

from . import __version__
from .args import (
    CommandParser,
    add_train_args,
    check_train_args,
    command,
    map_defaults,
    map_label_defaults,
    parse_with_config,
    setup_logging,
    uses_config,
)
from .run.checkpoint import find_checkpoint
from .run.datasets import create_datasets, is_multi_label
from .run.factory import (
    create_criterion,
    create_loaders,
    create_mixer,
    create_task,
    create_training_step,
)
from .run.grids import set_auto_grids
from .run.machine import describe_machine, set_up_device
from .run.model import create_model_and_info, freeze_modules
from .run.optimizer import create_optimizer, learning_rate
from .run.options import check_train_options
from .run.read import read_checkpoint
from .run.trainer import Trainer


def build_parser() -> CommandParser:
    parser = CommandParser(prog='train.py', usage='%(prog)s [DIR] [-c FILE] [flags]', description=__doc__)
    add_train_args(parser)
    return parser


def parse_args(
        parser: CommandParser,
        argv: Optional[Sequence[str]] = None,
) -> tuple[argparse.Namespace, set[str]]:
    """ Parse the command line. With --resume, defaults come from the run's args.yaml; the command line wins.

    Args:
        parser: The parser of `build_parser`.
        argv: The command line, by default that of the process.

    Returns:
        The flags, and the names of those that the user set.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    args, given = parse_with_config(parser, argv)
    resumed = Path(args.resume)
    settings = (resumed if resumed.is_dir() else resumed.parent) / 'args.yaml'
    if not args.resume or uses_config(parser, argv) or not settings.is_file():
        return args, given
    args, all_given = parse_with_config(parser, [*argv, '--config', str(settings)])
    for name in {'output', 'experiment', 'start_epoch', 'no_resume_opt'} - given:  # these are not inherited
        setattr(args, name, parser.get_default(name))
    return args, all_given


def create_run(
        args: argparse.Namespace,
        given: set[str],
        settings: dict[str, Any],
        device: torch.device,
) -> Trainer:
    """ Create a run, ready for its first epoch.

    Args:
        args: Flags, with those that `set_up_device` adds.
        given: Names of the flags that the user set.
        settings: Flags to save, without machine-specific changes.
        device: Device of this process.
    """
    checkpoint = None
    if args.resume:  # first of all, because a wrong path should fail at once
        path = find_checkpoint(args.resume)
        checkpoint = path, read_checkpoint(path)

    # Data sets
    train_set, val_set = create_datasets(args)
    multi_label = is_multi_label(train_set)
    map_label_defaults(args, given, multi_label)
    settings.update(smoothing=args.smoothing, eval_metric=args.eval_metric)

    # Model with its head
    step = create_training_step(args, device)
    model, info = create_model_and_info(args, train_set, step, checkpoint and checkpoint[1])
    frozen = freeze_modules(model, args.freeze)

    # Loaders
    loaders = create_loaders(args, train_set, val_set, info.data_config, step)

    # Task: mix -> model -> head -> loss
    set_auto_grids(args, info.data_config['input_size'], model, checkpoint and checkpoint[1])
    settings.update(splicemix_grids=args.splicemix_grids, splicemix_weight=args.splicemix_weight)
    mixer = create_mixer(args, num_classes=model.num_classes, seed=args.seed, class_names=info.class_names)
    criterion = create_criterion(args, multi_label, model.num_classes, train_set)
    task = create_task(args, model, criterion, mixer, info.data_config['input_size'], step)

    # Optimizer
    args.lr = learning_rate(args, args.world_size)
    optimizer = create_optimizer(model, args)

    # Epochs
    run = Trainer(args, info, task, optimizer, loaders, step, frozen)
    run.start(settings, describe_machine(__version__), checkpoint)
    return run


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = build_parser()
    args, given = parse_args(parser, argv)
    setup_logging()
    check_train_args(args, parser)
    settings = dict(vars(args))  # saved before machine-specific changes
    map_defaults(args, given)
    check_train_options(args)
    device = set_up_device(args)
    if args.rank:
        logging.getLogger().setLevel(logging.WARNING)
    try:
        create_run(args, given, settings, device).train()
    finally:
        if args.distributed:
            torch.distributed.destroy_process_group()


if __name__ == '__main__':
    main()
