""" Flags become the model to train """
import argparse
from typing import Any, Optional, Sequence

import torch
from timm.data import resolve_data_config
from timm.layers import convert_sync_batchnorm
from timm.models import get_pretrained_cfg
from timm.task import TrainingTask
from timm.utils import freeze
from torch import nn

from ..data import MultiLabelDataset, mix_seeds
from ..errors import UsageError
from ..models import (
    classifier_parameters,
    create_model,
    freeze_batch_norm,
    has_head,
    init_classifier,
    mean_prior_bias,
    prior_bias,
)
from .datasets import image_mode, is_multi_label
from .engine import Step
from .load import set_image_size
from .machine import set_seed
from .read import (
    CheckpointInfo,
    best_checkpoint,
    published_weights,
    read_checkpoint,
    read_info,
    read_tensors,
)
from .side_inputs import create_side_inputs


def create_model_and_info(
        args: argparse.Namespace,
        dataset: torch.utils.data.Dataset,
        step: Step,
        resumed: Optional[dict[str, Any]] = None,
) -> tuple[nn.Module, CheckpointInfo]:
    """ Create the model to train, on its device, and its description.

    Args:
        args: Flags.
        dataset: Training set, which determines the classes.
        step: Device and type of the weights.
        resumed: Content of the checkpoint to resume.
    """
    use_published(args)
    multi_label = is_multi_label(dataset)
    num_classes = count_classes(args, dataset)
    side_inputs = create_side_inputs(args, dataset, num_classes, resumed)
    set_seed(mix_seeds(args.seed))  # equal weights in all processes
    model, model_kwargs = build_model(args, num_classes, side_inputs)
    data_config = resolve_images(args, model, model_kwargs['in_chans'])
    start_classifier(model, args, dataset if multi_label else None)
    check_image_size(model, data_config['input_size'])
    if args.grad_checkpointing:
        checkpoint_gradients(model)
    model.to(device=step.device, dtype=step.image_dtype)
    if args.channels_last:
        model.to(memory_format=torch.channels_last)
    if args.distributed and args.sync_bn:
        model = convert_sync_batchnorm(model)
    class_names = getattr(dataset, 'class_names', None)
    info = CheckpointInfo(
        args.model, model_kwargs, data_config, class_names and tuple(class_names), multi_label,
        image_mode=image_mode(args, model_kwargs['in_chans']))
    return model, info


def use_published(args: argparse.Namespace) -> None:
    """ Replace --model hf-hub:USER/NAME by the architecture, weights and images of a model of `timm-splicemix push`.

    timm loads other models of the Hugging Face Hub by itself. Flags of the user win.
    """
    path = published_weights(args.model)
    if path is None:
        return
    info = read_info(read_checkpoint(path), path)
    own = dict(info.model_kwargs)
    own.pop('num_classes', None)
    own.pop('img_size', None)
    args.model = info.model_name
    pool, head, head_kwargs = (own.pop(name, None) for name in ('global_pool', 'head', 'head_kwargs'))
    if not args.head and not args.gp:
        args.gp, args.head, args.head_kwargs = pool, head or '', args.head_kwargs or head_kwargs or {}
    if args.pretrained and not args.pretrained_path:
        args.pretrained_path = str(path)
    if not (args.input_size or args.img_size or args.in_chans):
        args.input_size = list(info.data_config['input_size'])
    for name in ('mean', 'std', 'interpolation', 'crop_pct', 'crop_mode'):
        setattr(args, name, getattr(args, name) or info.data_config[name])
    args.model_kwargs = {**{name: own[name] for name in own if name != 'in_chans'}, **args.model_kwargs}


def count_classes(args: argparse.Namespace, dataset: torch.utils.data.Dataset) -> Optional[int]:
    """Return the number of classes of the data set or of --num-classes; None for the default of the model."""
    found = getattr(dataset, 'num_classes', None)
    if found is not None and args.num_classes not in (None, found):
        raise UsageError(
            f'Expected --num-classes {found}, as in the data set, but got {args.num_classes}: leave it out.')
    return found or args.num_classes


def build_model(
        args: argparse.Namespace,
        num_classes: Optional[int],
        side_inputs: Optional[dict[str, Any]] = None,
) -> tuple[nn.Module, dict[str, Any]]:
    """Create the model (None classes: its default number), and return the arguments that rebuild it, too."""
    size = tuple(args.input_size[1:]) if args.input_size else args.img_size and (args.img_size, args.img_size)
    in_chans = args.input_size[0] if args.input_size else args.in_chans or 3
    kwargs = {'in_chans': in_chans, 'num_classes': num_classes, 'global_pool': args.gp or None, **args.model_kwargs}
    if args.head:
        kwargs.update(head=args.head, head_kwargs=args.head_kwargs)
    cfg = get_pretrained_cfg(args.model)
    if size and cfg is not None and cfg.fixed_input_size and size != tuple(cfg.input_size[1:]):
        kwargs.setdefault('img_size', size)
    weights = {}
    pretrained, initial = (
        str(best_checkpoint(path)) if path else '' for path in (args.pretrained_path, args.initial_checkpoint))
    for path in filter(None, (pretrained, initial)):
        read_tensors(path)  # raises a clear error for a file that timm cannot read
    if pretrained:  # -1: the classifier is not loaded
        weights['pretrained_cfg_overlay'] = {'file': pretrained, 'num_classes': -1}
    try:
        model = create_model(
            args.model, pretrained=args.pretrained, drop_rate=args.drop, drop_path_rate=args.drop_path,
            drop_block_rate=args.drop_block, bn_momentum=args.bn_momentum, bn_eps=args.bn_eps,
            checkpoint_path=initial, side_inputs=side_inputs, **weights, **kwargs)
    except (AssertionError, FileNotFoundError, RuntimeError, TypeError) as error:  # raised by timm for bad arguments
        reason = ' '.join((str(error) or repr(error)).split())
        raise UsageError(f"Cannot create model '{args.model}' with these flags: {reason[:300]}") from error
    if pretrained:
        check_weights_arrived(model, pretrained)
    if num_classes not in (None, model.num_classes):
        raise UsageError(f'Expected a model of {num_classes} classes, but got one of {model.num_classes}.')
    kwargs.update(num_classes=model.num_classes)
    return model, {name: value for name, value in kwargs.items() if value is not None}


@torch.no_grad()
def check_weights_arrived(model: nn.Module, path: str) -> None:
    """ Raise an error if --pretrained-path holds weights of another model.

    timm loads the weights whose names match and leaves the others at random. Some weights may be renamed or adapted to
    another number of channels or image size, so at least half of them must be found.
    """
    tensors = read_tensors(path)
    if tensors is None:
        return
    saved = {(value.numel(), value.double().sum().item()) for value in tensors}
    head = {id(parameter) for parameter in classifier_parameters(model)}
    backbone = [parameter for parameter in model.parameters() if id(parameter) not in head]
    found = sum((parameter.numel(), parameter.double().sum().item()) in saved for parameter in backbone)
    if found < len(backbone) / 2:
        raise UsageError(
            f'Expected weights of {type(model).__name__} for --pretrained-path, but got {path}, which has {found} of '
            f'its {len(backbone)} weights.')


def resolve_images(args: argparse.Namespace, model: nn.Module, in_chans: int) -> dict[str, Any]:
    """Return size, normalisation, interpolation and crop of images: those of the flags, or those of the model."""
    config = resolve_data_config({**vars(args), 'in_chans': in_chans}, model=model)
    config['input_size'] = (in_chans, *config['input_size'][1:])
    for name in ('mean', 'std'):
        if len(config[name]) != in_chans:  # the values of the model are for RGB
            config[name] = (sum(config[name]) / len(config[name]),) * in_chans
    return config


def checkpoint_gradients(model: nn.Module) -> None:
    try:
        model.set_grad_checkpointing(enable=True)
    except (AssertionError, AttributeError) as error:
        raise UsageError(
            f'Expected a model that supports --grad-checkpointing, but got {type(model).__name__}.') from error


def start_classifier(model: nn.Module, args: argparse.Namespace, dataset: Optional[MultiLabelDataset]) -> None:
    """ Initialise a new classifier such that its logits are small and fit the mean frequency of labels.

    Args:
        model: The model.
        args: Flags.
        dataset: Training set if it is multi-label, else None.
    """
    if has_head(model):  # it is initialised as its authors do
        return
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
    """Raise an error if the model does not take images of (C, H, W)."""
    was_training = model.training
    set_image_size(model.eval(), input_size, current=input_size[1:])
    model.train(was_training)


def freeze_modules(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Freeze the modules with these names, and return them, because they have to stay in evaluation mode."""
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


def set_training(task: TrainingTask, frozen: Sequence[nn.Module], freeze_bn: bool) -> None:
    """Switch to training mode, except for `frozen` modules and, with `freeze_bn`, all BatchNorm layers."""
    task.train()
    for module in frozen:
        module.eval()
    if freeze_bn:
        freeze_batch_norm(task.get_trainable_module())
