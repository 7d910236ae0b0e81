""" From flags to the parts of a run: data sets, model, loss """
import argparse
import math
from pathlib import Path
from typing import Any, Optional, Sequence

import torch
from PIL import ImageMode
from timm.data import resolve_data_config
from timm.models import get_pretrained_cfg
from timm.task import TrainingTask
from timm.utils import freeze
from torch import nn

from ..args import uses_softmax
from ..args.loss import _PARAMETERS, _flag, _one_of, _refuse
from ..args.splicemix import splicemix_kwargs
from ..data import MultiLabelDataset, check_same_classes, create_dataset
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
from ..models import (
    classifier_parameters,
    create_model,
    freeze_batch_norm,
    init_classifier,
    mean_prior_bias,
    prior_bias,
)
from .checkpoint import read_tensors


def _create_splicemix(args: argparse.Namespace, **kwargs: Any) -> Mixer:
    return SpliceMix(**splicemix_kwargs(args), **kwargs)


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


def create_mixer(args: argparse.Namespace, num_classes: Optional[int] = None, seed: int = 0) -> Optional[Mixer]:
    """ Create the mixer that the flags select.

    Args:
        args: Flags of `add_mixer_args`, of `add_splicemix_args` and timm's of Mixup.
        num_classes: Number of classes, required for integer targets.
        seed: Seed of all draws.

    Returns:
        The mixer, None if no flag selects one.
    """
    selected = [flag for flag in _MIXERS if getattr(args, flag[2:].replace('-', '_'))]
    if args.splice_with:  # these set its parameters
        selected = [flag for flag in selected if not flag.startswith(f'--{args.splice_with}')]
    makers = {_MIXERS[flag] for flag in selected}
    if len(makers) > 1:
        raise UsageError(f'Expected one way of mixing, but got {" and ".join(selected)}: leave out all but one.')
    return makers.pop()(args, num_classes=num_classes, seed=seed) if makers else None


def create_dataset_from_flags(
        args: argparse.Namespace,
        split: str,
        is_training: bool = False,
        in_chans: Optional[int] = None,
        **options: Any,
) -> torch.utils.data.Dataset:
    """ Create one split of the data set that the flags of train.py or validate.py name.

    Args:
        args: Flags.
        split: Name of the split.
        is_training: True for the split to train on. Only then are labels hidden (--keep-labels), and annotations come
            from --train-ann.
        in_chans: Number of image channels of the model, by default that of the flags.
        **options: Further arguments of `create_dataset`; they override the flags.
    """
    if in_chans is None:
        in_chans = args.input_size[0] if args.input_size else args.in_chans or 3
    mode = args.input_img_mode or ('L' if in_chans == 1 else 'RGB')
    check_image_mode(mode, in_chans)
    kwargs = {**dataset_kwargs(args, is_training), 'split': split, 'input_img_mode': mode}
    if args.dataset_trust_remote_code:
        kwargs['trust_remote_code'] = True
    if args.dataset.startswith(('tfds/', 'wds/', 'hfids/')):
        kwargs['seed'] = args.seed
    return create_dataset(**{**kwargs, **options})


def create_datasets(args: argparse.Namespace) -> tuple[torch.utils.data.Dataset, torch.utils.data.Dataset]:
    """Create the training set and the validation set."""
    train_set = create_dataset_from_flags(
        args, args.train_split, is_training=True, num_samples=args.train_num_samples,
        repeats=args.epoch_repeats or None)
    val_set = create_dataset_from_flags(args, args.val_split, num_samples=args.val_num_samples)
    check_same_classes(train_set, val_set)
    return train_set, val_set


def check_image_mode(mode: str, channels: int) -> None:
    """ Refuse to read images in a mode of other channels than the model takes.

    Args:
        mode: Mode of Pillow's.
        channels: Number of channels.
    """
    try:
        bands = ImageMode.getmode(mode).bands
    except KeyError:
        raise UsageError(
            f"Expected a mode of Pillow's for --input-img-mode, such as RGB or L, but got '{mode}'.") from None
    if len(bands) != channels:
        raise UsageError(
            f'Expected images of {channels} channels (--in-chans), but got {len(bands)} in mode {mode}: set '
            '--input-img-mode, such as L for 1, RGB for 3 or RGBA for 4.')


def count_classes(args: argparse.Namespace, dataset: torch.utils.data.Dataset) -> Optional[int]:
    """ Number of classes, as the data set has it; None if only the model knows.

    Args:
        args: Flags.
        dataset: Training set.
    """
    found = getattr(dataset, 'num_classes', None)
    if found is not None and args.num_classes not in (None, found):
        raise UsageError(
            f'Expected --num-classes {found}, as the data set has, but got {args.num_classes}: leave it out.')
    return found or args.num_classes


def build_model(args: argparse.Namespace, num_classes: Optional[int]) -> tuple[nn.Module, dict[str, Any]]:
    """ The model, and the arguments that make it again.

    Args:
        args: Flags.
        num_classes: Number of classes, None for the model's own.
    """
    size = tuple(args.input_size[1:]) if args.input_size else args.img_size and (args.img_size, args.img_size)
    in_chans = args.input_size[0] if args.input_size else args.in_chans or 3
    kwargs = {'in_chans': in_chans, 'num_classes': num_classes, 'global_pool': args.gp, **args.model_kwargs}
    cfg = get_pretrained_cfg(args.model)
    if size and cfg is not None and cfg.fixed_input_size and size != tuple(cfg.input_size[1:]):
        kwargs.setdefault('img_size', size)
    weights = {}
    for path in filter(None, (args.pretrained_path, args.initial_checkpoint)):
        read_tensors(path)  # says in a sentence if it is none
    if args.pretrained_path:  # without its classifier, whatever that was for
        weights['pretrained_cfg_overlay'] = {'file': args.pretrained_path, 'num_classes': -1}
    try:
        model = create_model(
            args.model, pretrained=args.pretrained, drop_rate=args.drop, drop_path_rate=args.drop_path,
            drop_block_rate=args.drop_block, bn_momentum=args.bn_momentum, bn_eps=args.bn_eps,
            checkpoint_path=args.initial_checkpoint, **weights, **kwargs)
    except (AssertionError, FileNotFoundError, RuntimeError, TypeError) as error:  # what timm raises at a user
        reason = ' '.join((str(error) or repr(error)).split())
        raise UsageError(f"Expected model '{args.model}' to take the flags, but got: {reason[:300]}") from error
    if args.pretrained_path:
        check_weights_arrived(model, args.pretrained_path)
    if num_classes not in (None, model.num_classes):
        raise UsageError(f'Expected a model of {num_classes} classes, but got one of {model.num_classes}.')
    kwargs.update(num_classes=model.num_classes)
    return model, {name: value for name, value in kwargs.items() if value is not None}


@torch.no_grad()
def check_weights_arrived(model: nn.Module, path: str) -> None:
    """ Refuse weights of another model, of which timm takes what fits by name and leaves the rest at random.

    Some weights may be renamed or adapted to another number of channels or image size, so most have to be there.

    Args:
        model: Model that was created with the weights.
        path: File of weights.
    """
    tensors = read_tensors(path)
    if tensors is None:
        return
    there = {(value.numel(), value.double().sum().item()) for value in tensors}
    head = {id(parameter) for parameter in classifier_parameters(model)}
    backbone = [parameter for parameter in model.parameters() if id(parameter) not in head]
    found = sum((parameter.numel(), parameter.double().sum().item()) in there for parameter in backbone)
    if found < len(backbone) / 2:
        raise UsageError(
            f'Expected weights of {type(model).__name__} for --pretrained-path, but got {path}, which has {found} of '
            f'its {len(backbone)} weights.')


def resolve_images(args: argparse.Namespace, model: nn.Module, in_chans: int) -> dict[str, Any]:
    """ Size, normalisation, interpolation and crop of images, by the flags or as the model has them.

    Args:
        args: Flags.
        model: The model.
        in_chans: Number of channels.
    """
    config = resolve_data_config({**vars(args), 'in_chans': in_chans}, model=model)
    config['input_size'] = (in_chans, *config['input_size'][1:])
    for name in ('mean', 'std'):
        if len(config[name]) != in_chans:  # the model's own are for colours
            config[name] = (sum(config[name]) / len(config[name]),) * in_chans
    return config


def checkpoint_gradients(model: nn.Module) -> None:
    """ Let a model compute activations again in the backward pass, if it can.

    Args:
        model: The model.
    """
    try:
        model.set_grad_checkpointing(enable=True)
    except (AssertionError, AttributeError) as error:
        raise UsageError(
            f'Expected a model that can do --grad-checkpointing, but got {type(model).__name__}.') from error


def start_classifier(model: nn.Module, args: argparse.Namespace, dataset: Optional[MultiLabelDataset]) -> None:
    """ Give a new classifier small logits that are right on average.

    Args:
        model: The model.
        args: Flags.
        dataset: Training set if it is multi-label, else None.
    """
    cfg_classes = getattr(model, 'pretrained_cfg', {}).get('num_classes')
    is_new = not args.initial_checkpoint and not (args.pretrained and cfg_classes == model.num_classes)
    targets = getattr(dataset, 'targets', None)
    std, scale, bias = args.head_init_std, args.head_init_scale, args.head_init_bias
    if dataset is not None and is_new and scale is None and std is None:
        std = 0.01
        if bias is None:
            bias = -2.5 if targets is None else mean_prior_bias(targets)
    if bias == 'prior':
        if targets is None:
            raise UsageError('Expected a multi-label data set that knows all its labels for --head-init-bias prior.')
        bias = prior_bias(targets)
    init_classifier(model, std=std, scale=scale, bias=bias)


def check_image_size(model: nn.Module, input_size: tuple[int, int, int]) -> None:
    """ Refuse a size that the model can't take, before anything is trained.

    Args:
        model: The model, on the CPU.
        input_size: (C, H, W).
    """
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            model(torch.zeros(1, *input_size))
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else repr(error)
        raise UsageError(
            f'Expected an image size that {type(model).__name__} takes, but got {input_size[1]} x {input_size[2]} with '
            f'{input_size[0]} channels: {reason}') from error
    finally:
        model.train(was_training)


def freeze_modules(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """ Freeze parts of a model by their names; returns them, as their statistics have to be kept too.

    Args:
        model: The model.
        names: Names of modules.
    """
    known = dict(model.named_modules())
    for name in names:
        if name not in known or not name:
            children = ', '.join(child for child, _ in model.named_children())
            raise UsageError(f"Expected --freeze to name modules of the model, such as {children}, but got '{name}'.")
    if names:
        freeze(model, list(names), include_bn_running_stats=False)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise UsageError('Expected --freeze to leave something to train, but got all of the model.')
    return [known[name] for name in names]


def set_training(task: TrainingTask, frozen: Sequence[nn.Module], keep_statistics: bool) -> None:
    """ Go to training mode, apart from what is frozen.

    Args:
        task: The task.
        frozen: Modules that stay in evaluation mode.
        keep_statistics: Whether every BatchNorm keeps its statistics.
    """
    task.train()
    for module in frozen:
        module.eval()
    if keep_statistics:
        freeze_batch_norm(task.get_trainable_module())


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
            raise UsageError('Expected a multi-label data set that knows all its labels for --class-weights auto.')
        kwargs['pos_weight'] = positive_weights(dataset.targets)
    return create_loss(name, num_classes, **kwargs)


def create_meter(
        multi_label: bool,
        num_classes: int,
        device: torch.device,
        class_names: Sequence[str] = (),
        preset: str = 'paper',
) -> Any:
    """ What scores the predictions of a data set.

    Args:
        multi_label: Whether an image has any number of classes.
        num_classes: Number of classes.
        device: Where predictions are.
        class_names: Names of the classes, for warnings.
        preset: Definition of the multi-label metrics.
    """
    if not multi_label:
        return AccuracyMeter(device)
    return MultilabelMeter(num_classes, preset=preset, class_names=class_names or None)


def dataset_kwargs(args: argparse.Namespace, is_training: bool) -> dict[str, Any]:
    """ Turn the flags of `add_dataset_args` and `add_label_args` into arguments of `create_dataset`.

    Args:
        args: What the parser returned.
        is_training: Whether the split is trained on: only then labels are hidden.
    """
    kwargs = {
        'name': args.dataset,
        'root': args.data_dir,
        'is_training': is_training,
        'download': args.dataset_download,
        'class_map': args.class_map or None,
        'input_key': args.input_key,
        'target_key': args.target_key,
        'annotations': args.train_ann if is_training else args.val_ann,
        'class_order': args.class_order,
        'keep_unlabelled': args.keep_unlabelled,
        'difficult': args.voc_difficult if is_training else args.voc_difficult_eval,
        'image_column': args.csv_image_column,
        'label_column': args.csv_label_column,
        'split_column': args.csv_split_column,
        'label_delimiter': args.csv_delimiter,
    }
    if is_training and args.keep_labels is not None:
        kwargs.update(keep_labels=args.keep_labels, keep_labels_seed=args.keep_labels_seed)
    return kwargs


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


def loss_kwargs(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """ Convert the given flags of `add_loss_args` to parameters of `create_loss`.

    With --class-weights auto the caller has to add pos_weight, which depends on the data.

    Args:
        args: Parsed flags.
        name: Name of the loss.
    """
    known = loss_parameters(name)
    given = {parameter: getattr(args, f'loss_{parameter}') for parameter in _PARAMETERS}
    given = {parameter: value for parameter, value in given.items() if value is not None}
    for parameter in given:
        if parameter not in known:
            _refuse(_flag(parameter), parameter, name)
    if args.class_weights == 'auto' and 'pos_weight' not in known:
        _refuse('--class-weights auto', 'pos_weight', name)
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
