""" Flags become loaders, mixer, loss and task; data sets, models and optimizers are created in the files beside """
import argparse
import math
from pathlib import Path
from typing import Any, Optional, Sequence

import torch
from torch import nn

from ..args import splicemix_kwargs, uses_softmax
from ..args.ours import LOSS_PARAMETERS, losses_with
from ..data import (
    MultiLabelLoader,
    create_loader,
)
from ..errors import UsageError
from ..loss import (
    MultilabelLoss,
    create_loss,
    loss_parameters,
    positive_weights,
    union_cross_entropy,
)
from ..metrics import AccuracyMeter, MultilabelMeter
from ..mix import (
    Mixer,
    Mixup,
    RecursiveMix,
    ResizeMix,
    SpliceMix,
    SpliceWith,
)
from ..task import SpliceMixTask
from .engine import Step
from .machine import precision


def create_step(args: argparse.Namespace, device: torch.device, log_interval: int, **options: Any) -> Step:
    """ Create the settings of the loops over batches; those of training are left to `create_training_step`.

    Args:
        args: Flags, with those that `set_up_device` adds.
        device: Device of this process.
        log_interval: Number of updates or batches between log lines.
        **options: Further fields of `Step`.
    """
    autocast, scaler, dtype = precision(args, device)
    return Step(
        device, dtype, autocast, scaler, channels_last=args.channels_last, log_interval=log_interval,
        is_primary=args.rank == 0, distributed=args.distributed, **options)


def create_training_step(args: argparse.Namespace, device: torch.device) -> Step:
    return create_step(
        args, device, args.log_interval, accumulate=args.grad_accum_steps, clip_grad=args.clip_grad,
        clip_mode=args.clip_mode, synchronize=args.synchronize_step)


def create_eval_loader(
        args: argparse.Namespace,
        dataset: torch.utils.data.Dataset,
        data_config: dict[str, Any],
        step: Step,
        batch_size: int,
        **options: Any,
) -> MultiLabelLoader:
    """ Create a loader that returns each image once, resized and cropped as for evaluation.

    Args:
        args: Flags of train.py or validate.py.
        dataset: The data set.
        data_config: Size, normalisation, interpolation and crop of images.
        step: Device and type of the images.
        batch_size: Batch size of this process.
        **options: Further arguments of `create_loader`.
    """
    return create_loader(
        dataset, batch_size=batch_size, interpolation=data_config['interpolation'], crop_pct=data_config['crop_pct'],
        crop_mode=data_config['crop_mode'], **_loader_kwargs(args, data_config, step), **options)


def create_train_loader(
        args: argparse.Namespace,
        dataset: torch.utils.data.Dataset,
        data_config: dict[str, Any],
        step: Step,
) -> MultiLabelLoader:
    """Create the loader of the training set, with augmentation."""
    interpolation = args.train_interpolation
    if args.no_aug or not interpolation:
        interpolation = data_config['interpolation']
    try:
        return create_loader(
            dataset, batch_size=args.batch_size, is_training=True, no_aug=args.no_aug, re_prob=args.reprob,
            re_mode=args.remode, re_count=args.recount, re_split=args.resplit,
            num_aug_repeats=int(args.aug_repeats), batch_copies=args.batch_augment,
            train_crop_mode=args.train_crop_mode, scale=args.scale, ratio=args.ratio, hflip=args.hflip,
            vflip=args.vflip, color_jitter=args.color_jitter, color_jitter_prob=args.color_jitter_prob,
            grayscale_prob=args.grayscale_prob, gaussian_blur_prob=args.gaussian_blur_prob, auto_augment=args.aa,
            interpolation=interpolation, on_bad_image=args.on_bad_image, **_loader_kwargs(args, data_config, step))
    except AssertionError as error:  # raised by timm for an unknown policy
        raise UsageError(f"Expected a policy of timm for --aa, but got '{args.aa}': {error}") from error


def create_loaders(
        args: argparse.Namespace,
        train_set: torch.utils.data.Dataset,
        val_set: torch.utils.data.Dataset,
        data_config: dict[str, Any],
        step: Step,
) -> tuple[MultiLabelLoader, MultiLabelLoader]:
    """Create the loaders of the training set, with augmentation, and of the validation set."""
    train_loader = create_train_loader(args, train_set, data_config, step)
    val_batch_size = args.validation_batch_size or args.batch_size
    return train_loader, create_eval_loader(args, val_set, data_config, step, val_batch_size)


def _loader_kwargs(args: argparse.Namespace, data_config: dict[str, Any], step: Step) -> dict[str, Any]:
    return {
        'input_size': data_config['input_size'],
        'mean': data_config['mean'],
        'std': data_config['std'],
        'num_workers': args.workers,
        'pin_memory': args.pin_mem,
        'img_dtype': step.image_dtype,
        'device': step.device,
        'use_prefetcher': not args.no_prefetcher,
        'decoder': args.decoder,
        'scaled_decoding': args.scaled_decoding,
        'seed': args.seed,
    }


def _create_splicemix(args: argparse.Namespace, class_names: Optional[Sequence[str]], **kwargs: Any) -> Mixer:
    return SpliceMix(**splicemix_kwargs(args, class_names), **kwargs)


def _create_mixup(args: argparse.Namespace, **kwargs: Any) -> Mixer:
    return Mixup(
        args.mixup, args.cutmix, args.cutmix_minmax or None, args.mixup_prob, args.mixup_switch_prob, args.mixup_mode,
        **kwargs)


def _create_resizemix(args: argparse.Namespace, **kwargs: Any) -> Mixer:
    return ResizeMix(args.resizemix, prob=args.mixup_prob, **kwargs)


def _create_recursivemix(args: argparse.Namespace, **kwargs: Any) -> Mixer:
    return RecursiveMix(args.recursivemix, args.mixup_prob, **kwargs)


def _create_splice_with(args: argparse.Namespace, **kwargs: Any) -> Mixer:
    alpha = args.mixup if args.splice_with == 'mixup' else args.cutmix
    return SpliceWith(
        args.splice_with, args.splice_with_ratio, alpha or 1., args.cutmix_minmax or None, args.mixup_prob,
        args.mixup_mode, **kwargs)


# Each flag that selects a mixer, and the function that creates it.
_MIXERS = {
    '--splicemix-grids': _create_splicemix,
    '--mixup': _create_mixup,
    '--cutmix': _create_mixup,
    '--cutmix-minmax': _create_mixup,
    '--resizemix': _create_resizemix,
    '--recursivemix': _create_recursivemix,
    '--splice-with': _create_splice_with,
}


def create_mixer(
        args: argparse.Namespace,
        num_classes: Optional[int] = None,
        seed: int = 0,
        class_names: Optional[Sequence[str]] = None,
) -> Optional[Mixer]:
    """ Create the mixer that the flags select.

    Args:
        args: Flags of `add_mixer_args`, of `add_splicemix_args` and timm's of Mixup.
        num_classes: Number of classes, required for integer targets.
        seed: Seed of all draws.
        class_names: Names of the classes, which flags of SpliceMix refer to.

    Returns:
        The mixer, None if no flag selects one.
    """
    selected = [flag for flag in _MIXERS if getattr(args, flag[2:].replace('-', '_'))]
    if args.splice_with:  # these set its parameters
        selected = [flag for flag in selected if not flag.startswith(f'--{args.splice_with}')]
    makers = {_MIXERS[flag] for flag in selected}
    if len(makers) > 1:
        raise UsageError(f'Expected one way of mixing, but got {" and ".join(selected)}: leave out all but one.')
    if not makers:
        return None
    names = {'class_names': class_names} if makers == {_create_splicemix} else {}
    return makers.pop()(args, num_classes=num_classes, seed=seed, **names)


def create_criterion(
        args: argparse.Namespace,
        multi_label: bool,
        num_classes: int,
        dataset: torch.utils.data.Dataset,
) -> nn.Module:
    """Create the loss that the flags select."""
    if uses_softmax(args, multi_label):
        return MultilabelLoss(union_cross_entropy, smoothing=args.smoothing)
    name = args.loss or 'bce'
    kwargs = loss_kwargs(args, name)
    if name == 'bce':
        kwargs.update(
            smoothing=args.smoothing, target_threshold=args.bce_target_thresh, pos_weight=args.bce_pos_weight,
            sum_classes=args.bce_sum)
    if args.class_weights == 'auto':
        if getattr(dataset, 'targets', None) is None:
            raise UsageError('Expected a multi-label data set with known labels for --class-weights auto.')
        kwargs['pos_weight'] = positive_weights(dataset.targets)
    return create_loss(name, num_classes, **kwargs)


def _read_prior(path: str) -> torch.Tensor:
    """Read the number in the last field of each line; the first line may be a header."""
    try:
        lines = Path(path).read_text(encoding='utf-8').splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f'Cannot read --loss-prior {path}: {error}') from error
    fields = [line.rsplit(',', 1)[-1].strip() for line in lines if line.strip()]
    values = []
    for index, field in enumerate(fields):
        try:
            values.append(float(field))
        except ValueError:
            if index > 0:
                values.append(math.nan)
        if values and not 0 <= values[-1] <= 1:
            raise UsageError(
                f"Expected a number between 0 and 1 in each line of --loss-prior {path}, but got '{field}'.")
    if not values:
        raise UsageError(f'Expected a number for each class in --loss-prior {path}, but got none.')
    return torch.tensor(values)


def _flag(parameter: str) -> str:
    return f"--loss-{parameter.replace('_', '-')}"


def _one_of(names: Sequence[str]) -> str:
    return ' or '.join(filter(None, (', '.join(names[:-1]), names[-1])))


def _refuse_loss(flag: str, parameter: str, name: str) -> None:
    raise UsageError(f'Expected {flag} with --loss {_one_of(list(losses_with(parameter)))}, but got --loss {name}.')


def loss_kwargs(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """ Convert the given flags of `add_loss_args` to parameters of `create_loss`.

    With --class-weights auto the caller has to add pos_weight, which depends on the data.

    Args:
        args: Parsed flags.
        name: Name of the loss.
    """
    known = loss_parameters(name)
    given = {parameter: getattr(args, f'loss_{parameter}') for parameter in LOSS_PARAMETERS}
    given = {parameter: value for parameter, value in given.items() if value is not None}
    for parameter in given:
        if parameter not in known:
            _refuse_loss(_flag(parameter), parameter, name)
    if args.class_weights == 'auto' and 'pos_weight' not in known:
        _refuse_loss('--class-weights auto', 'pos_weight', name)
    partial = given.get('partial', known.get('partial'))
    for parameter, modes in (
            ('gamma_unknown', ('negative', 'selective')), ('topk', ('selective',)), ('prior', ('selective',)),
            ('prior_threshold', ('selective',))):
        if parameter in given and partial not in modes:
            raise UsageError(
                f'Expected {_flag(parameter)} with --loss-partial {_one_of(modes)}, but got --loss-partial {partial}.')
    if 'prior_threshold' in given and 'prior' not in given:
        raise UsageError('Expected --loss-prior-threshold with --loss-prior, but got it alone.')
    if 'prior' in given:
        given['prior'] = _read_prior(given['prior'])
    return given


def create_task(
        args: argparse.Namespace,
        model: nn.Module,
        criterion: nn.Module,
        mixer: Optional[Mixer],
        input_size: tuple[int, int, int],
        step: Step,
) -> SpliceMixTask:
    """Create the task that mixes a batch and computes its losses, with the moving average of the model."""
    varies = args.splicemix_prob < 1 or args.splicemix_mode != 'batch'
    if args.distributed and args.splicemix_batch == 'alternate' and varies:
        raise UsageError(
            'Expected --splicemix-prob 1 and --splicemix-mode batch for --splicemix-batch alternate with several '
            'processes, but got others: processes would make different numbers of updates.')
    task = SpliceMixTask(
        model, criterion, mixer,
        consistency_weight=args.splicemix_cl or (args.recursivemix_cl if args.recursivemix else 0.),
        detach=not args.splicemix_cl_no_detach, consistency_mean=args.splicemix_cl_mean, input_size=input_size,
        device=step.device, dtype=step.image_dtype, verbose=step.is_primary,
        mixed_weight=1. if args.splicemix_weight is None else args.splicemix_weight)
    task.to(step.device)
    if args.model_ema:
        task.setup_ema(
            decay=args.model_ema_decay, use_warmup=args.model_ema_warmup,
            device='cpu' if args.model_ema_force_cpu else None)
    return task


def wrap_task(task: SpliceMixTask, args: argparse.Namespace, device: torch.device) -> None:
    """Compile the task (--torchcompile) and distribute it over the processes; weights must be loaded before."""
    if args.torchcompile:
        task.compile(backend=args.torchcompile, mode=args.torchcompile_mode)
        task.compile_ema(backend=args.torchcompile, mode=args.torchcompile_mode)
    if args.distributed:
        device_ids = [device] if device.type != 'cpu' else None
        task.prepare_distributed(device_ids=device_ids, broadcast_buffers=not args.no_ddp_bb)


def create_meter(
        multi_label: bool,
        num_classes: int,
        device: torch.device,
        class_names: Sequence[str] = (),
        preset: str = 'paper',
) -> Any:
    """ Create the meter that computes the metrics of an evaluation.

    Args:
        multi_label: True if targets are multi-hot.
        num_classes: Number of classes.
        device: Device of the predictions.
        class_names: Names of the classes, for warnings.
        preset: Definition of the multi-label metrics.
    """
    if not multi_label:
        return AccuracyMeter(device)
    return MultilabelMeter(num_classes, preset=preset, class_names=class_names or None)
