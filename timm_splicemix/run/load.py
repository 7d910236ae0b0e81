""" Models to evaluate, predict with and export: loaded as they were trained, and what is put around them """
import argparse
import dataclasses
import logging
from pathlib import Path
from typing import Any, Optional, Sequence, Union

import torch
from timm.data import resolve_data_config
from timm.models import get_pretrained_cfg
from torch import nn

from ..errors import UsageError
from ..models import create_model
from .checkpoint import CheckpointInfo, load_weights, read_checkpoint
from .export import is_safetensors, read_safetensors

_logger = logging.getLogger(__name__)
# What timm raises at a user: flags that a model does not take, files that are not there
_REFUSALS = (AssertionError, AttributeError, LookupError, NotImplementedError, OSError, RuntimeError, TypeError)
_EMA_KEYS = ('state_dict_ema', 'model_ema')  # of this project and timm, old and new


@dataclasses.dataclass(frozen=True)
class _Weights:
    values: Optional[dict[str, torch.Tensor]] = None
    info: Optional[CheckpointInfo] = None
    architecture: Optional[str] = None


def load_model(
        checkpoint: Union[str, Path] = '',
        model_name: Optional[str] = None,
        pretrained: bool = False,
        use_ema: bool = False,
        num_classes: Optional[int] = None,
        global_pool: Optional[str] = None,
        in_chans: Optional[int] = None,
        image_size: Optional[tuple[int, int]] = None,
        data_options: Optional[dict[str, Any]] = None,
        model_kwargs: Optional[dict[str, Any]] = None,
        use_test_size: bool = False,
        **build_kwargs: Any,
) -> tuple[nn.Module, CheckpointInfo]:
    """ A model in evaluation mode, with all that is known about it.

    A checkpoint of this project, or a file that it exported as safetensors, knows its model, pooling, image size,
    normalisation, crop and classes; arguments that are given win. Other checkpoints need a name. Without a checkpoint,
    timm's own weights are taken.

    Args:
        checkpoint: Checkpoint or safetensors file; '' for none.
        model_name: Name of the model in timm's registry or on a hub.
        pretrained: Take timm's weights; as without a checkpoint.
        use_ema: Take the moving average of the weights.
        num_classes: Size of the classifier.
        global_pool: Pooling.
        in_chans: Channels of images.
        image_size: (height, width) of images.
        data_options: What differs of crop_pct, crop_mode, mean, std and interpolation.
        model_kwargs: Further arguments of `create_model`.
        use_test_size: Take timm's size for testing where it has one; a checkpoint of this project is evaluated at the
            size that it was trained at.
        **build_kwargs: Arguments of `create_model` that are no property of the model, such as `scriptable`.

    Returns:
        The model, and what is known, with the data configuration that holds.
    """
    if checkpoint and pretrained:
        raise UsageError('Expected --checkpoint or --pretrained, but got both.')
    if not checkpoint and not model_name:
        raise UsageError('Expected --checkpoint, or --model for weights of timm, but got neither.')
    data_options = dict(data_options or {})
    weights = _read_weights(checkpoint, use_ema) if checkpoint else _Weights()
    if use_ema and not checkpoint:
        raise UsageError('Expected --checkpoint with --use-ema, but got none.')
    options = {'num_classes': num_classes, 'global_pool': global_pool, 'in_chans': in_chans, **(model_kwargs or {})}
    options = {name: value for name, value in options.items() if value is not None}
    saved = weights.info
    if saved is not None:
        _check_agrees(saved, model_name, num_classes, checkpoint)
        options = {**saved.model_kwargs, **options}
        name = saved.model_name
    else:
        name = model_name or weights.architecture
        if name is None:
            raise UsageError(f'Expected --model with {checkpoint}, which does not say what model it is, but got none.')
        if 'num_classes' not in options and weights.values is not None:
            options.update(_count_classes(name, weights.values))
        cfg = get_pretrained_cfg(name)
        if image_size and cfg is not None and cfg.fixed_input_size and image_size != tuple(cfg.input_size[1:]):
            options.setdefault('img_size', image_size)

    try:
        model = create_model(name, pretrained=weights.values is None, **build_kwargs, **options)
    except _REFUSALS as error:
        raise UsageError(f"Expected model '{name}' to load, but got: {error or repr(error)}") from error
    if weights.values is not None:
        load_weights(model, weights.values, checkpoint)
    if saved is None:
        options['num_classes'] = model.num_classes
        saved = CheckpointInfo(name, options)
        data_config = resolve_data_config({'in_chans': in_chans}, model=model, use_test_size=use_test_size)
    else:
        data_config = dict(saved.data_config)
    channels = options.get('in_chans', 3)
    trained_size = tuple(data_config['input_size'][1:])
    data_config['input_size'] = (channels, *(image_size or trained_size))
    for key in ('mean', 'std'):
        own = data_config[key]
        if len(own) not in (1, channels):  # those of colours
            own = (sum(own) / len(own),)
        data_config[key] = _per_channel(key, data_options.pop(key, own), channels)
    data_config.update(data_options)
    model.eval()
    made_for = options.get('img_size')
    if made_for is not None:
        trained_size = (made_for, made_for) if isinstance(made_for, int) else tuple(made_for)
    set_image_size(model, data_config['input_size'], trained_size)
    if hasattr(model, 'set_input_size') and trained_size != data_config['input_size'][1:]:
        options['img_size'] = data_config['input_size'][1:]
    return model, dataclasses.replace(saved, model_kwargs=options, data_config=data_config)


def _read_weights(checkpoint: Union[str, Path], use_ema: bool) -> _Weights:
    if is_safetensors(checkpoint):
        if use_ema:
            raise UsageError(f'Expected a checkpoint for --use-ema, but got {checkpoint}, which has no moving average.')
        return _Weights(*read_safetensors(checkpoint))
    state = read_checkpoint(checkpoint)
    ema = next((state[key] for key in _EMA_KEYS if state.get(key) is not None), None)
    if use_ema and ema is None:
        raise UsageError(f'Expected a moving average of the weights for --use-ema, but got none in {checkpoint}.')
    if ema is not None and not use_ema:
        _logger.info(f'Takes the plain weights of {checkpoint}; --use-ema takes their moving average.')
    values = ema if use_ema else state['state_dict']
    if 'timm_splicemix' not in state:
        return _Weights(values, architecture=state.get('arch'))
    saved = state['timm_splicemix']['info']
    names = saved['class_names'] and tuple(saved['class_names'])
    info = CheckpointInfo(
        **{**saved, 'class_names': names}, epoch=state.get('epoch'), metric=state.get('metric'),
        args=dict(state.get('args') or {}))
    return _Weights(values, info)


def _check_agrees(
        info: CheckpointInfo,
        model_name: Optional[str],
        num_classes: Optional[int],
        checkpoint: Union[str, Path],
) -> None:
    if model_name not in (None, info.model_name):
        raise UsageError(
            f'Expected --model {info.model_name}, as {checkpoint} says, but got {model_name}: leave it out.')
    saved = info.model_kwargs.get('num_classes')
    if None not in (num_classes, saved) and num_classes != saved:
        raise UsageError(f'Expected --num-classes {saved}, as {checkpoint} says, but got {num_classes}: leave it out.')


def _count_classes(name: str, weights: dict[str, torch.Tensor]) -> dict[str, int]:
    """Size of the classifier of weights that come without a description."""
    cfg = get_pretrained_cfg(name)
    layer = cfg.classifier if cfg is not None else None
    layer = layer[0] if isinstance(layer, (tuple, list)) else layer
    weight = next((weights[key] for key in (f'{layer}.weight', f'module.{layer}.weight') if key in weights), None)
    return {} if weight is None else {'num_classes': len(weight)}


def _per_channel(name: str, values: Sequence[float], channels: int) -> tuple[float, ...]:
    values = tuple(values)
    if len(values) == 1:
        values *= channels
    if len(values) != channels:
        raise UsageError(f'Expected --{name} with 1 number or {channels}, one for each channel, but got {len(values)}.')
    return values


def set_image_size(
        model: nn.Module,
        input_size: Sequence[int],
        current: Optional[Sequence[int]] = None,
) -> None:
    """ Make a model take images of a size, or say that it can't.

    Position embeddings and windows are made anew for the size, by timm; convolutions take any.

    Args:
        model: The model; changed.
        input_size: (channels, height, width).
        current: (height, width) that the model takes now, None if unknown.
    """
    size = tuple(input_size[1:])
    try:
        if size != current and hasattr(model, 'set_input_size'):
            model.set_input_size(img_size=size)
        parameter = next(model.parameters())
        with torch.inference_mode():
            model(torch.zeros(1, *input_size, device=parameter.device, dtype=parameter.dtype))
    except (*_REFUSALS, ValueError) as error:
        reason = (str(error) or repr(error)).splitlines()[0]
        raise UsageError(
            f'Expected an image size that {type(model).__name__} takes, but got {size[0]} x {size[1]} with '
            f'{input_size[0]} channels: {reason}') from error


_logger = logging.getLogger(__name__)


def model_options(args: argparse.Namespace, given: Optional[set[str]] = None) -> dict[str, Any]:
    """ Turn the flags that name a model into arguments of `load_model`.

    Args:
        args: What the parser of validate or predict returned.
        given: Flags that the user set; where there is a default model, it counts only if it is among them.
    """
    size = None
    if args.input_size:
        size = tuple(args.input_size[1:])
    elif args.img_size:
        size = (args.img_size, args.img_size)
    return {
        'checkpoint': args.checkpoint,
        'model_name': args.model if given is None or 'model' in given else None,
        'pretrained': args.pretrained,
        'use_ema': args.use_ema,
        'num_classes': args.num_classes,
        'global_pool': args.gp,
        'in_chans': args.input_size[0] if args.input_size else args.in_chans,
        'image_size': size,
        'data_options': {
            name: getattr(args, name) for name in ('crop_pct', 'crop_mode', 'mean', 'std', 'interpolation')
            if getattr(args, name)},
    }
