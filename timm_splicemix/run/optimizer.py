""" Optimizer and learning rates from flags, with --backbone-lr-scale """
import argparse
from pathlib import Path
from typing import Any, Iterable, Optional, Union

import torch
from timm.optim import create_optimizer_v2, optimizer_kwargs
from timm.scheduler import create_scheduler_v2, scheduler_kwargs
from timm.scheduler.scheduler import Scheduler
from torch import nn

from ..errors import UsageError
from ..models import classifier_parameters


def learning_rate(args: argparse.Namespace, world_size: int) -> float:
    """Return --lr, or as in timm --lr-base scaled by the global batch size or its square root."""
    if args.lr is not None:
        return args.lr
    ratio = args.batch_size * args.grad_accum_steps * world_size / args.lr_base_size
    is_adaptive = any(name in args.opt.lower() for name in ('ada', 'lamb'))
    use_sqrt = args.lr_base_scale == 'sqrt' or (not args.lr_base_scale and is_adaptive)
    return args.lr_base * (ratio ** 0.5 if use_sqrt else ratio)


def create_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    """ Create timm's optimizer, with --backbone-lr-scale.

    Args:
        model: A timm model.
        args: Flags, with `lr` set.
    """
    optimizer = create_plain_optimizer(model, args)
    if args.backbone_lr_scale != 1.:
        scale_others(optimizer, classifier_parameters(model), args.backbone_lr_scale)
    return optimizer


def create_plain_optimizer(
        model: Union[nn.Module, list[nn.Parameter]],
        args: argparse.Namespace,
        **options: Any,
) -> torch.optim.Optimizer:
    """ Create timm's optimizer.

    Args:
        model: A timm model, or parameters, for which --layer-decay has no effect.
        args: Flags.
        **options: Arguments of timm's function that override the flags.
    """
    try:
        optimizer = create_optimizer_v2(model, **{**optimizer_kwargs(args), **options}, **args.opt_kwargs)
    except (AssertionError, IndexError, TypeError, ValueError) as error:
        raise UsageError(f"Expected an optimizer of timm for --opt, but got '{args.opt}': {error}") from error
    for name in ('eps', 'betas'):
        if getattr(args, f'opt_{name}') is not None and name not in optimizer.defaults:
            raise UsageError(f"Expected an optimizer that has {name} for --opt-{name}, but got '{args.opt}'.")
    return optimizer


def scale_others(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], scale: float) -> None:
    """ Scale the learning rate of all parameters except the given ones.

    timm's schedulers multiply the learning rate of a parameter group by its `lr_scale`, so groups are split and get
    one.

    Args:
        optimizer: An optimizer that has not made a step.
        parameters: Parameters that keep their learning rate.
        scale: Factor for all others.
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
    """Create timm's scheduler (None for constant learning rates); also returns its number of epochs."""
    if args.sched == 'plateau' and args.sched_on_updates:
        raise UsageError(
            'Expected --sched plateau without --sched-on-updates, but got both: it steps once per epoch.')
    decreasing = 'loss' in args.eval_metric
    scheduler, num_epochs = create_scheduler_v2(
        optimizer, **scheduler_kwargs(args, decreasing_metric=decreasing), updates_per_epoch=updates_per_epoch)
    if scheduler is None:
        apply_lr_scale(optimizer)
    return scheduler, num_epochs


def apply_lr_scale(optimizer: torch.optim.Optimizer) -> None:
    """Scale constant learning rates: timm applies `lr_scale` in its schedulers only."""
    for group in optimizer.param_groups:
        group['lr'] *= group.get('lr_scale', 1.)


def load_optimizer(
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        path: Path,
        keep_lr: bool = False,
) -> None:
    """ Load the optimizer state of a checkpoint.

    Args:
        optimizer: The optimizer.
        state: Its state in the checkpoint.
        path: Path of the checkpoint.
        keep_lr: Keep the current learning rates, which no scheduler will set.
    """
    rates = [group['lr'] for group in optimizer.param_groups]
    try:
        optimizer.load_state_dict(state)
    except (KeyError, ValueError) as error:
        raise UsageError(
            f'The optimizer state in {path} is of another optimizer ({error}). Use --no-resume-opt to resume without '
            'it.') from error
    if keep_lr:
        for group, rate in zip(optimizer.param_groups, rates):
            group['lr'] = rate


def scheduler_state(scheduler: Optional[Scheduler]) -> dict[str, Any]:
    """Return the state of a plateau scheduler; the others have none."""
    if not hasattr(scheduler, 'lr_scheduler'):
        return {}
    state = {name: value for name, value in vars(scheduler.lr_scheduler).items() if isinstance(value, (int, float))}
    return {'plateau': state, 'restore_lr': scheduler.restore_lr}


def load_scheduler_state(scheduler: Optional[Scheduler], state: dict[str, Any]) -> None:
    if state and hasattr(scheduler, 'lr_scheduler'):
        vars(scheduler.lr_scheduler).update(state['plateau'])
        scheduler.restore_lr = state['restore_lr']


def resume_scheduler(scheduler: Optional[Scheduler], epoch: int, num_updates: int) -> None:
    """ Set the learning rates of the epoch and update at which a run resumes.

    Args:
        scheduler: The scheduler; plateau schedulers are left alone, because their rates come with the optimizer state.
        epoch: Next epoch.
        num_updates: Number of updates before the next one.
    """
    if scheduler is not None and num_updates and not hasattr(scheduler, 'lr_scheduler'):
        scheduler.step(epoch)
        scheduler.step_update(num_updates)
