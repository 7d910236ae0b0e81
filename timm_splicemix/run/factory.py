""" Flags become data sets, loaders, mixer, loss and task; models and optimizers are created in the files beside """
import argparse
import logging
import math
from pathlib import Path
from typing import Any, Optional, Sequence

import torch
from PIL import ImageMode
from torch import nn

from ..args import splicemix_kwargs, uses_softmax
from ..args.ours import LOSS_PARAMETERS, losses_with
from ..data import (
    PARTITION,
    MultiLabelDataset,
    MultiLabelLoader,
    Partition,
    StrictImageDataset,
    align_classes,
    check_has_positives,
    create_dataset,
    create_loader,
    divide,
    is_training_split,
    read_partition,
)
from ..data.readers.csv import find_csv
from ..data.readers.json import find_json
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

_logger = logging.getLogger(__name__)


def create_dataset_from_flags(
        args: argparse.Namespace,
        split: str,
        is_training: bool = False,
        in_chans: Optional[int] = None,
        partition: Optional[Partition] = None,
        **options: Any,
) -> torch.utils.data.Dataset:
    """ Create one split of the data set that the flags of train.py or validate.py name.

    Args:
        args: Flags.
        split: Name of the split.
        is_training: True for the split to train on. Only then are labels hidden (--keep-labels), and annotations come
            from --train-ann.
        in_chans: Number of image channels of the model, by default that of the flags.
        partition: Parts of the split that it names; `split` is then one of them.
        **options: Further arguments of `create_dataset`; they override the flags.
    """
    if in_chans is None:
        in_chans = args.input_size[0] if args.input_size else args.in_chans or 3
    mode = image_mode(args, in_chans)
    kwargs = {**dataset_kwargs(args, is_training), 'split': split, 'input_img_mode': mode}
    if is_training or partition is not None:  # validate.py need not have all images of a partition
        kwargs['skip_missing_images'] = getattr(args, 'on_bad_image', 'skip') == 'skip'
    if partition is not None:
        kwargs.update(whole_split(args, partition.source))
    if args.dataset_trust_remote_code:
        kwargs['trust_remote_code'] = True
    if args.dataset.startswith(('tfds/', 'wds/', 'hfids/')):
        kwargs['seed'] = args.seed
    dataset = create_dataset(**{**kwargs, **options})
    if partition is not None:
        dataset = partition.select(dataset, split)
    check_has_positives(dataset, split)
    if args.cache:
        if not isinstance(dataset, StrictImageDataset):
            raise UsageError(f'--cache does not support data set {args.dataset}, which is read as a stream.')
        dataset.use_cache(args.cache, args.cache_size)
    return dataset


def create_datasets(args: argparse.Namespace) -> tuple[torch.utils.data.Dataset, torch.utils.data.Dataset]:
    """ Create the training set and the validation set.

    If both are parts of one split, by --val-fraction or --split-file, they have an attribute `partition`.
    """
    partition = _find_partition(args)
    options = {'num_samples': args.train_num_samples, 'repeats': args.epoch_repeats or None}
    train_set = create_dataset_from_flags(
        args, args.train_split if partition is None else 'train', is_training=True, partition=partition, **options)
    if partition is None:
        val_set = create_dataset_from_flags(args, args.val_split, num_samples=args.val_num_samples)
    else:
        val_set = create_dataset_from_flags(args, 'val', partition=partition, **options)
        train_set.partition = val_set.partition = partition
    names = getattr(train_set, 'class_names', None)
    if names:
        align_classes(val_set, names, 'the validation set', 'the training set', args.drop_unknown_classes)
        check_has_positives(val_set, args.val_split)
    return train_set, val_set


def _find_partition(args: argparse.Namespace) -> Optional[Partition]:
    """The parts of --val-fraction or --split-file; a resumed run has those that it wrote to its folder."""
    if not args.val_fraction and not args.split_file:
        return None
    resumed = Path(args.resume)
    own_file = (resumed if resumed.is_dir() else resumed.parent) / PARTITION
    if args.resume and own_file.is_file():
        return read_partition(own_file)
    if args.split_file:
        return read_partition(args.split_file)
    kwargs = {**dataset_kwargs(args, True), **whole_split(args, args.train_split), 'keep_labels': None}
    dataset = create_dataset(
        **kwargs, num_samples=args.train_num_samples, skip_missing_images=args.on_bad_image == 'skip')
    fractions = {'train': 1 - args.val_fraction, 'val': args.val_fraction}
    partition = divide(dataset, fractions, args.train_split, args.split_seed, {'dataset': args.dataset})
    sizes = ' and '.join(f'{len(images):,} ({part})' for part, images in partition.parts.items())
    _logger.info(f"Split the {len(dataset):,} images of '{args.train_split}' into {sizes}.")
    return partition


def whole_split(args: argparse.Namespace, split: str) -> dict[str, Any]:
    """Arguments of `create_dataset` that read a split to be divided, which a label file need not name."""
    source = dataset_kwargs(args, True)
    kwargs = {name: source[name] for name in ('annotations', 'images')}
    if kwargs['annotations'] is None and args.data_dir:
        if args.dataset == 'csv':
            kwargs['annotations'] = find_csv(args.data_dir, split, args.csv_split_column, may_lack_splits=True)
        elif args.dataset == 'json':
            kwargs['annotations'] = find_json(args.data_dir, split, may_lack_splits=True)
    return {**kwargs, 'split': split}


def split_kwargs(args: argparse.Namespace, split: str) -> dict[str, Any]:
    """Arguments of `create_dataset` that read a split to look at; a CSV file without splits is its training split."""
    is_training = is_training_split(split)
    return {**dataset_kwargs(args, is_training), **(whole_split(args, split) if is_training else {'split': split})}


def dataset_kwargs(args: argparse.Namespace, is_training: bool) -> dict[str, Any]:
    """ Turn the flags of `add_dataset_args` and `add_label_args` into arguments of `create_dataset`.

    Args:
        args: Flags.
        is_training: True for the split to train on. Only then are labels hidden (--keep-labels).
    """
    kwargs = {
        'name': args.dataset,
        'root': args.data_dir,
        'is_training': is_training,
        'download': args.dataset_download,
        'class_map': args.class_map or None,
        'drop_unknown_classes': args.drop_unknown_classes,
        'input_key': args.input_key,
        'target_key': args.target_key,
        'annotations': args.train_ann if is_training else args.val_ann,
        'images': args.train_images if is_training else args.val_images,
        'class_order': args.class_order,
        'keep_unlabelled': args.keep_unlabelled,
        'difficult': args.voc_difficult if is_training else args.voc_difficult_eval,
        'image_column': args.csv_image_column,
        'label_column': args.csv_label_column,
        'split_column': args.csv_split_column,
        'label_delimiter': args.csv_delimiter,
        'empty_cells': args.csv_empty,
    }
    if is_training and args.keep_labels is not None:
        kwargs.update(keep_labels=args.keep_labels, keep_labels_seed=args.keep_labels_seed)
    return kwargs


def image_mode(args: argparse.Namespace, in_chans: int) -> str:
    """Return the PIL mode of --input-img-mode, or that of `in_chans` channels; raise an error if it has others."""
    mode = args.input_img_mode or ('L' if in_chans == 1 else 'RGB')
    try:
        bands = ImageMode.getmode(mode).bands
    except KeyError:
        raise UsageError(
            f"Expected a mode of Pillow's for --input-img-mode, such as RGB or L, but got '{mode}'.") from None
    if len(bands) != in_chans:
        raise UsageError(
            f'Expected images of {in_chans} channels (--in-chans), but got {len(bands)} in mode {mode}: set '
            '--input-img-mode, such as L for 1, RGB for 3 or RGBA for 4.')
    return mode


def is_multi_label(dataset: torch.utils.data.Dataset) -> bool:
    """Return True if targets are multi-hot, False if they are class indices."""
    return isinstance(dataset, MultiLabelDataset)


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
        device=step.device, dtype=step.image_dtype, verbose=step.is_primary)
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
