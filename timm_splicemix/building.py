""" From flags to the parts of a run: data sets, model, loss """
import argparse
from typing import Any, Optional, Sequence

import torch
from PIL import ImageMode
from timm.data import resolve_data_config
from timm.models import get_pretrained_cfg
from timm.task import TrainingTask
from timm.utils import freeze
from torch import nn

from .args import dataset_kwargs, loss_kwargs, uses_softmax
from .checkpoint import read_tensors
from .data import MultiLabelDataset, check_same_classes, create_dataset
from .loss import UnionCrossEntropy, create_loss, positive_weights
from .models import (
    classifier_parameters,
    create_model,
    freeze_batch_norm,
    init_classifier,
    mean_prior_bias,
    prior_bias,
)


def create_datasets(args: argparse.Namespace) -> tuple[torch.utils.data.Dataset, torch.utils.data.Dataset]:
    """ The training and the validation set.

    Args:
        args: Flags.
    """
    channels = args.input_size[0] if args.input_size else args.in_chans or 3
    options = {'input_img_mode': args.input_img_mode or ('L' if channels == 1 else 'RGB')}
    check_image_mode(options['input_img_mode'], channels)
    if args.dataset_trust_remote_code:
        options['trust_remote_code'] = True
    if args.dataset.startswith(('tfds/', 'wds/', 'hfids/')):
        options['seed'] = args.seed
    sets = []
    for is_training, split, number in (
            (True, args.train_split, args.train_num_samples), (False, args.val_split, args.val_num_samples)):
        repeats = args.epoch_repeats if is_training and args.epoch_repeats else None
        sets.append(create_dataset(
            **dataset_kwargs(args, is_training), split=split, num_samples=number, repeats=repeats, **options))
    check_same_classes(*sets)
    return sets[0], sets[1]


def check_image_mode(mode: str, channels: int) -> None:
    """ Refuse to read images in a mode of other channels than the model takes.

    Args:
        mode: Mode of Pillow's.
        channels: Number of channels.
    """
    try:
        bands = ImageMode.getmode(mode).bands
    except KeyError:
        raise ValueError(
            f"Expected a mode of Pillow's for --input-img-mode, such as RGB or L, but got '{mode}'.") from None
    if len(bands) != channels:
        raise ValueError(
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
        raise ValueError(
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
        raise ValueError(f"Expected model '{args.model}' to take the flags, but got: {reason[:300]}") from error
    if args.pretrained_path:
        check_weights_arrived(model, args.pretrained_path)
    if num_classes not in (None, model.num_classes):
        raise ValueError(f'Expected a model of {num_classes} classes, but got one of {model.num_classes}.')
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
        raise ValueError(
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
        raise ValueError(
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
            raise ValueError('Expected a multi-label data set that knows all its labels for --head-init-bias prior.')
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
        raise ValueError(
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
            raise ValueError(f"Expected --freeze to name modules of the model, such as {children}, but got '{name}'.")
    if names:
        freeze(model, list(names), include_bn_running_stats=False)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError('Expected --freeze to leave something to train, but got all of the model.')
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
    """ The loss that the flags name.

    Args:
        args: Flags.
        multi_label: Whether an image has any number of classes.
        num_classes: Number of classes.
        dataset: Training set.
    """
    if uses_softmax(args, multi_label):
        return UnionCrossEntropy(args.smoothing)
    name = args.loss or 'bce'
    kwargs = loss_kwargs(args, name)
    if name == 'bce':
        kwargs.update(
            smoothing=args.smoothing, target_threshold=args.bce_target_thresh, pos_weight=args.bce_pos_weight,
            sum_classes=args.bce_sum)
    if args.class_weights == 'auto':
        if getattr(dataset, 'targets', None) is None:
            raise ValueError('Expected a multi-label data set that knows all its labels for --class-weights auto.')
        kwargs['pos_weight'] = positive_weights(dataset.targets)
    return create_loss(name, num_classes, **kwargs)
