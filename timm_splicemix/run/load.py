""" Load models: rebuild the model of a checkpoint, and load its weights """
import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional, Sequence, Union

import torch
from timm.data import resolve_data_config
from timm.layers import apply_test_time_pool
from timm.models import clean_state_dict, get_pretrained_cfg
from timm.utils import reparameterize_model
from torch import nn

from ..errors import UsageError
from ..heads import stored_side_inputs
from ..models import HEAD_PREFIX, create_model, has_head, is_max_pooled
from .onnx import load_onnx
from .read import (
    CheckpointInfo,
    best_checkpoint,
    choose_weights,
    published_weights,
    read_checkpoint,
    read_info,
)

_SOURCES = ('hf-hub:', 'hf_hub:', 'local-dir:')
_DATA_ARGS = ('input_size', 'img_size', 'mean', 'std', 'interpolation', 'crop_pct', 'crop_mode')
# What timm raises for arguments that a model does not take and for missing files
_TIMM_ERRORS = (AssertionError, AttributeError, LookupError, NotImplementedError, OSError, RuntimeError, TypeError)


def load_weights(model: nn.Module, state_dict: dict[str, torch.Tensor], path: Union[str, Path]) -> None:
    """Load the weights that were read from `path`, or raise an error that names the first one that does not fit."""
    state_dict = clean_state_dict(state_dict)
    own = model.state_dict()
    missing, unexpected = sorted(own.keys() - state_dict.keys()), sorted(state_dict.keys() - own.keys())
    if missing or unexpected:
        what = f'Missing key {missing[0]}' if missing else f'Unexpected key {unexpected[0]}'
        raise UsageError(f'{what} in checkpoint {path}: it is of another model.')
    for name, value in own.items():
        if value.shape != state_dict[name].shape:
            raise UsageError(
                f'Expected {name} of shape {tuple(value.shape)}, but got {tuple(state_dict[name].shape)} in {path}: '
                'it is of another model, image size or number of classes.')
    model.load_state_dict(state_dict)


def load_checkpoint(
        path: Union[str, Path],
        use_ema: Optional[bool] = None,
        **overrides: Any,
) -> tuple[nn.Module, CheckpointInfo]:
    """ Rebuild the model of a checkpoint, with its pooling and weights.

        model, info = load_checkpoint('output/train/run')
        names = info.class_names

    Args:
        path: Folder of a run, whose best checkpoint is loaded; checkpoint of this package, also one exported as
            safetensors or ONNX; published model, 'hf-hub:USER/NAME' or 'local-dir:FOLDER'; or checkpoint of timm that
            names its model.
        use_ema: True for the EMA weights, False for the plain ones, None for those that the best metric was measured
            with: the EMA weights if the checkpoint has them.
        **overrides: Options of `load_model` and arguments of `create_model` that replace those of the checkpoint, such
            as `img_size`.

    Returns:
        The model in evaluation mode, and what the checkpoint records about it; `info.weights` is 'ema' or 'plain'.
    """
    return load_model(path, use_ema=use_ema, **overrides)


def load_model(
        path: Union[str, Path] = '',
        model_name: Optional[str] = None,
        use_ema: Optional[bool] = None,
        img_size: Optional[Union[int, tuple[int, int]]] = None,
        data_config: Optional[dict[str, Any]] = None,
        use_test_size: bool = False,
        scriptable: bool = False,
        **model_kwargs: Any,
) -> tuple[nn.Module, CheckpointInfo]:
    """ Load a model for evaluation from a checkpoint, or from timm's pretrained weights if there is none.

    Args:
        path: See `load_checkpoint`; '' for timm's weights.
        model_name: Name of the model, needed if the checkpoint does not contain it.
        use_ema: See `load_checkpoint`.
        img_size: Size of the images, (height, width) or one number.
        data_config: Entries that replace those of the checkpoint: crop_pct, crop_mode, mean, std, interpolation.
        use_test_size: Use timm's size for testing if the model has one and nothing else sets the size.
        scriptable: Build the model for TorchScript.
        **model_kwargs: Arguments of `create_model` that replace those of the checkpoint, such as `global_pool`.

    Returns:
        The model in evaluation mode, and its description with the arguments in effect.
    """
    size = (img_size, img_size) if isinstance(img_size, int) else img_size and tuple(img_size)
    overrides = {name: value for name, value in model_kwargs.items() if value is not None}
    saved, values, weights = None, None, 'pretrained'
    path, model_name = _locate(path, model_name)
    if path:
        path = best_checkpoint(path)
        if path.suffix == '.onnx':
            return load_onnx(path, use_ema, {**overrides, 'img_size': size, **(data_config or {})})
        state = read_checkpoint(path)
        saved = read_info(state, path)
        values, weights = choose_weights(state, saved, use_ema, path)
    elif use_ema is not None:
        raise UsageError('Expected a checkpoint with --use-ema or --no-ema, but got none.')
    elif not model_name:
        raise UsageError("Expected a checkpoint, or --model for timm's pretrained weights, but got neither.")
    is_ours = saved is not None and bool(saved.data_config)
    if is_ours:
        _check_agrees(saved, model_name, overrides.get('num_classes'), path)
    elif saved is None or model_name not in (None, saved.model_name):
        if model_name is None:
            raise UsageError(f'Expected --model, as {path} does not contain the name of its model.')
        saved = CheckpointInfo(model_name, multi_label=values is not None)  # timm's own weights are single-label
    options = {**saved.model_kwargs, **overrides}
    if not is_ours:
        options = _complete(saved, options, size, values)
    extra: dict[str, Any] = {'scriptable': True} if scriptable else {}
    if options.get('head') and values is not None:
        extra['side_inputs'] = stored_side_inputs(options['head'], clean_state_dict(values), HEAD_PREFIX)

    try:
        model = create_model(saved.model_name, pretrained=values is None, **extra, **options)
    except _TIMM_ERRORS as error:
        raise UsageError(f"Cannot create model '{saved.model_name}': {error or repr(error)}") from error
    if values is not None:
        load_weights(model, values, path)
    model.eval()
    options['num_classes'] = model.num_classes
    cfg = get_pretrained_cfg(saved.model_name)
    if not is_ours and cfg is not None and cfg.num_classes == model.num_classes:
        saved = replace(saved, multi_label=False)  # weights of timm in a file
    config = saved.data_config
    if not is_ours:
        settings = {name: saved.args.get(name) for name in _DATA_ARGS}
        config = resolve_data_config(
            {**settings, 'in_chans': options.get('in_chans')}, model=model, use_test_size=use_test_size)
    trained_size = tuple(config['input_size'][1:])
    config = _replace_config(config, data_config or {}, options.get('in_chans', 3), size or trained_size)

    built_size = options.get('img_size')
    if built_size is not None:
        trained_size = (built_size, built_size) if isinstance(built_size, int) else tuple(built_size)
    if not is_ours or overrides or config['input_size'][1:] != trained_size:
        set_image_size(model, config['input_size'], trained_size)
    if hasattr(model, 'set_input_size') and trained_size != config['input_size'][1:]:
        options['img_size'] = config['input_size'][1:]
    return model, replace(saved, model_kwargs=options, data_config=config, weights=weights)


def _locate(path: Union[str, Path], model_name: Optional[str]) -> tuple[Union[str, Path], Optional[str]]:
    """Return the file of a model that this package published, or the name of one that timm loads by itself."""
    published = published_weights(path or model_name or '')
    if published is not None:
        return published, None
    return ('', str(path)) if str(path).startswith(_SOURCES) else (path, model_name)


def _check_agrees(info: CheckpointInfo, model_name: Optional[str], num_classes: Optional[int], path: Path) -> None:
    for flag, given, saved in (
            ('--model', model_name, info.model_name),
            ('--num-classes', num_classes, info.model_kwargs.get('num_classes'))):
        if None not in (given, saved) and given != saved:
            raise UsageError(f'Expected {flag} {saved}, as in {path}, but got {given}. Omit {flag}.')


def _complete(
        info: CheckpointInfo,
        options: dict[str, Any],
        size: Optional[tuple[int, int]],
        weights: Optional[dict[str, torch.Tensor]],
) -> dict[str, Any]:
    """Add the number of classes and the image size that the weights of another program need."""
    options = dict(options)
    cfg = get_pretrained_cfg(info.model_name)
    if cfg is None:
        return options
    if weights is not None and 'num_classes' not in options:
        layer = cfg.classifier[0] if isinstance(cfg.classifier, (tuple, list)) else cfg.classifier
        key = next((key for key in (f'{layer}.weight', f'module.{layer}.weight') if key in weights), None)
        if key is not None:
            options['num_classes'] = len(weights[key])
    if info.args.get('input_size'):
        size = tuple(info.args['input_size'][1:])
    elif info.args.get('img_size'):
        size = (info.args['img_size'],) * 2
    if size and cfg.fixed_input_size and size != tuple(cfg.input_size[1:]):
        options.setdefault('img_size', size)
    return options


def _replace_config(
        config: dict[str, Any],
        changes: dict[str, Any],
        channels: int,
        size: tuple[int, int],
) -> dict[str, Any]:
    config = {**config, **changes, 'input_size': (channels, *size)}
    for name in ('mean', 'std'):
        values = tuple(config[name])
        if name not in changes and len(values) not in (1, channels):  # those of RGB images
            values = (sum(values) / len(values),)
        if len(values) not in (1, channels):
            raise UsageError(f'Expected --{name} with 1 or {channels} values (channels), but got {len(values)}.')
        config[name] = values * channels if len(values) == 1 else values
    return config


def set_image_size(model: nn.Module, input_size: Sequence[int], current: Optional[Sequence[int]] = None) -> None:
    """ Set the image size of a model in place, and check by a forward pass that it works.

    timm resamples position embeddings and windows; convolutions work with any size.

    Args:
        model: The model.
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
    except (*_TIMM_ERRORS, ValueError) as error:
        reason = (str(error) or repr(error)).splitlines()[0]
        raise UsageError(
            f'{type(model).__name__} does not take images of {size[0]} x {size[1]} with {input_size[0]} channels: '
            f'{reason}') from error


# Flags

def ema_flag(args: argparse.Namespace) -> Optional[bool]:
    """Return `use_ema` of `load_checkpoint` from --use-ema and --no-ema."""
    return True if args.use_ema else False if args.no_ema else None


def load_from_flags(
        args: argparse.Namespace,
        given: Optional[set[str]] = None,
        **options: Any,
) -> tuple[nn.Module, CheckpointInfo]:
    """ Load the model that the flags of validate, predict or export select.

    Args:
        args: Flags.
        given: Flags that the user set; with them, --model counts only if it is among them.
        **options: Further options of `load_model`.
    """
    if args.checkpoint and args.pretrained:
        raise UsageError('Expected --checkpoint or --pretrained, but got both.')
    config = {name: getattr(args, name) for name in ('crop_pct', 'crop_mode', 'mean', 'std', 'interpolation')}
    model_kwargs = {
        'num_classes': args.num_classes,
        'global_pool': args.gp or None,
        'in_chans': args.input_size[0] if args.input_size else args.in_chans,
        'img_size': tuple(args.input_size[1:]) if args.input_size else args.img_size,
        **getattr(args, 'model_kwargs', {}),
    }
    model, info = load_model(
        args.checkpoint,
        model_name=args.model if given is None or 'model' in given else None,
        use_ema=ema_flag(args),
        data_config={name: value for name, value in config.items() if value},
        **options,
        **model_kwargs,
    )
    return model, replace(info, image_mode=args.input_img_mode or info.image_mode)


def transform_model(model: nn.Module, info: CheckpointInfo, reparam: bool, test_pool: bool) -> nn.Module:
    """Fuse the branches of a model (--reparam), and average its classifier over larger images (--test-pool)."""
    if reparam:
        model = reparameterize_model(model)
    if not test_pool:
        return model
    input_size = info.data_config['input_size']
    if has_head(model):
        raise UsageError(
            f'Expected a model with a classifier of its own for --test-pool, but got head {model.head_name}.')
    if is_max_pooled(model, input_size):
        raise UsageError('Expected a model with average pooling for --test-pool, but got max pooling.')
    num_classes = model.num_classes
    try:
        model, changed = apply_test_time_pool(model, info.data_config)
    except (AttributeError, KeyError, RuntimeError, TypeError) as error:
        raise UsageError(f'{info.model_name} does not support --test-pool.') from error
    if not changed:
        raise UsageError(
            f'Expected images larger than in pre-training for --test-pool, but got {input_size[1]} x {input_size[2]}.')
    model.num_classes = num_classes
    model.eval()
    set_image_size(model, input_size, input_size[1:])
    return model
