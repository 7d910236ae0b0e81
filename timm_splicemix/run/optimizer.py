""" Learning rates as timm sets them, and one of its own for the backbone """
import argparse
from pathlib import Path
from typing import Any, Iterable, Optional

import torch
from timm.optim import create_optimizer_v2, optimizer_kwargs
from timm.scheduler import create_scheduler_v2, scheduler_kwargs
from timm.scheduler.scheduler import Scheduler
from torch import nn

from ..args.check import SCHEDULES
from ..errors import UsageError
from ..models import classifier_parameters


def learning_rate(args: argparse.Namespace, world_size: int) -> float:
    """ The learning rate, or the one that follows from the base rate and the size of the global batch.

    The rate grows with the batch, or with its square root for adaptive optimizers, unless --lr-base-scale says which.

    Args:
        args: Flags of timm.
        world_size: Number of processes.
    """
    if args.lr is not None:
        return args.lr
    if args.lr_base_scale not in ('', 'linear', 'sqrt'):
        raise UsageError(f"Expected --lr-base-scale linear or sqrt, but got '{args.lr_base_scale}'.")
    ratio = args.batch_size * args.grad_accum_steps * world_size / args.lr_base_size
    adaptive = any(name in args.opt.lower() for name in ('ada', 'lamb'))
    by_root = args.lr_base_scale == 'sqrt' or (not args.lr_base_scale and adaptive)
    return args.lr_base * (ratio ** 0.5 if by_root else ratio)


def create_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    """ Create timm's optimizer, with --backbone-lr-scale.

    Args:
        model: A timm model.
        args: Flags of timm, with `lr` set.
    """
    try:
        optimizer = create_optimizer_v2(model, **optimizer_kwargs(args), **args.opt_kwargs)
    except (AssertionError, IndexError, TypeError, ValueError) as error:
        raise UsageError(f"Expected an optimizer of timm for --opt, but got '{args.opt}': {error}") from error
    for name in ('eps', 'betas'):
        if getattr(args, f'opt_{name}') is not None and name not in optimizer.defaults:
            raise UsageError(f"Expected an optimizer that has {name} for --opt-{name}, but got '{args.opt}'.")
    if args.backbone_lr_scale < 0:
        raise UsageError(f'Expected --backbone-lr-scale of at least 0, but got {args.backbone_lr_scale}.')
    if args.backbone_lr_scale != 1.:
        scale_others(optimizer, classifier_parameters(model), args.backbone_lr_scale)
    return optimizer


def scale_others(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], scale: float) -> None:
    """ Give all other parameters a learning rate of their own, as a part of the common one.

    timm's schedulers multiply what they set by `lr_scale` of a group, so groups are divided and get one.

    Args:
        optimizer: Optimizer that has not stepped yet.
        parameters: Those that keep their rate.
        scale: Factor for the others.
    """
    keep = {id(parameter) for parameter in parameters}
    groups = []
    for group in optimizer.param_groups:
        for kept in (False, True):
            members = [parameter for parameter in group['params'] if (id(parameter) in keep) == kept]
            if members:
                factor = group.get('lr_scale', 1.) * (1. if kept else scale)
                groups.append({**group, 'params': members, 'lr_scale': factor})
    optimizer.param_groups[:] = groups


def create_scheduler(
        optimizer: torch.optim.Optimizer,
        args: argparse.Namespace,
        updates_per_epoch: int,
) -> tuple[Optional[Scheduler], int]:
    """ Create timm's scheduler.

    Args:
        optimizer: Optimizer whose rates it sets.
        args: Flags of timm.
        updates_per_epoch: Number of steps of the optimizer in an epoch.

    Returns:
        The scheduler, None for constant rates, and the number of epochs that it wants.
    """
    if args.sched not in SCHEDULES:
        raise UsageError(f"Expected --sched to be one of {', '.join(SCHEDULES)}, but got '{args.sched}'.")
    if args.sched == 'plateau' and args.sched_on_updates:
        raise UsageError('Expected --sched plateau without --sched-on-updates, but got both: it looks at epochs.')
    decreasing = 'loss' in args.eval_metric
    scheduler, num_epochs = create_scheduler_v2(
        optimizer, **scheduler_kwargs(args, decreasing_metric=decreasing), updates_per_epoch=updates_per_epoch)
    if scheduler is None:  # nobody else applies it
        for group in optimizer.param_groups:
            group['lr'] *= group.get('lr_scale', 1.)
    return scheduler, num_epochs


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any], path: Path) -> None:
    """ Load the state of an optimizer, or say how to do without.

    Args:
        optimizer: The optimizer.
        state: Its state.
        path: Where it comes from.
    """
    try:
        optimizer.load_state_dict(state)
    except (KeyError, ValueError) as error:
        raise UsageError(
            f'Expected the state of the same optimizer in {path}, but got: {error}; use --no-resume-opt to start it '
            'anew.') from error


def scheduler_state(scheduler: Optional[Scheduler]) -> dict[str, Any]:
    """ What a scheduler remembers; most remember nothing.

    Args:
        scheduler: A scheduler of timm.
    """
    if not hasattr(scheduler, 'lr_scheduler'):  # only the plateau
        return {}
    state = {name: value for name, value in vars(scheduler.lr_scheduler).items() if isinstance(value, (int, float))}
    return {'plateau': state, 'restore_lr': scheduler.restore_lr}


def load_scheduler_state(scheduler: Optional[Scheduler], state: dict[str, Any]) -> None:
    """ Be as the scheduler was.

    Args:
        scheduler: A scheduler of timm.
        state: What `scheduler_state` returned.
    """
    if state and hasattr(scheduler, 'lr_scheduler'):
        vars(scheduler.lr_scheduler).update(state['plateau'])
        scheduler.restore_lr = state['restore_lr']
