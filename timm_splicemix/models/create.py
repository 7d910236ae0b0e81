""" timm's `create_model`, with global max pooling and multi-label heads for every family that has a feature map """
import difflib
from pathlib import Path
from typing import Any, Optional, Union
from urllib.error import URLError

import timm
from huggingface_hub.utils import LocalEntryNotFoundError, OfflineModeIsEnabled
from timm.models import (
    get_arch_pretrained_cfgs,
    load_state_dict,
    parse_model_name,
    split_model_name_tag,
)
from torch import nn

from ..errors import UsageError
from ..heads import stored_side_inputs
from .pooling import pool_by_max
from .with_head import HEAD_PREFIX, add_head


def check_model_name(name: str) -> None:
    """Raise an error for a name, or its tag, that timm does not have."""
    source, name = parse_model_name(name)
    if source is not None:
        return
    architecture, tag = split_model_name_tag(name)
    if not timm.is_model(architecture):
        nearest = difflib.get_close_matches(architecture, timm.list_models(), n=3, cutoff=0.5)
        way_out = f'did you mean {", ".join(nearest)}?' if nearest else 'timm.list_models() lists all models.'
        raise UsageError(f'Expected the name of a timm model, but got {name!r}: {way_out}')
    known = get_arch_pretrained_cfgs(architecture)
    if tag and known and name not in known:
        tags = ', '.join(split_model_name_tag(full_name)[1] for full_name in known)
        raise UsageError(f'Expected a tag of {architecture} ({tags}), but got {tag!r}.')


def create_model(
        model_name: str,
        pretrained: bool = False,
        num_classes: Optional[int] = None,
        global_pool: Optional[str] = None,
        head: str = '',
        head_kwargs: Optional[dict[str, Any]] = None,
        side_inputs: Optional[dict[str, Any]] = None,
        **timm_kwargs: Any,
) -> nn.Module:
    """ timm's `create_model`, with true global max pooling in all families that can have it, and multi-label heads.

    With `global_pool='max'`, the model is created with timm's default pooling, which is then replaced. The weights,
    including loaded ones, and their keys stay those of timm's default model, so the final norm of a pretrained ViT is
    kept and timm can load the checkpoint. (Only attention pooling, which 'max' replaces, leaves no keys.) A forward
    pass of one image verifies that the head takes the maximum.

    With a `head`, the model has no classifier of its own (timm's `num_classes=0`), and the head predicts the feature
    map. Keys of the head begin with `multilabel_head.`, all others are timm's.

    Args:
        model_name: Name of a timm model, with or without a tag, or 'hf-hub:...' or 'local-dir:...' as in timm.
        pretrained: Load pretrained weights.
        num_classes: Number of classes, None for the model's default.
        global_pool: 'max' for the true maximum, other values as in timm, None for the model's default.
        head: Name of a head, see `list_heads()`, or '' for the model's own pooling and classifier.
        head_kwargs: Options of the head.
        side_inputs: What the head needs beside feature maps, see `create_head`. With `checkpoint_path`, those of a
            checkpoint with a head are used instead.
        **timm_kwargs: Further arguments of `timm.create_model`.

    Raises:
        UsageError: If the model or the head does not exist, or the model has no feature map to pool.

    Example:
        >>> model = create_model('xcit_nano_12_p16_224', num_classes=20, global_pool='max')  # timm rejects this
        >>> is_max_pooled(model)
        True
    """
    check_model_name(model_name)
    if head:
        if global_pool is not None:
            raise UsageError(f"Expected a head or global_pool (--gp), but got head '{head}' and '{global_pool}'.")
        return _create_with_head(model_name, pretrained, num_classes, head, head_kwargs, side_inputs, timm_kwargs)
    if head_kwargs or side_inputs:
        raise UsageError('Expected a head with head_kwargs and side_inputs, but got none.')
    to_max = global_pool == 'max'
    model = _create_timm_model(
        model_name,
        pretrained=pretrained,
        num_classes=num_classes,
        global_pool=None if to_max else global_pool,
        **timm_kwargs,
    )
    if to_max:
        pool_by_max(model, timm_kwargs.get('img_size'))
    return model


def _create_timm_model(model_name: str, **kwargs: Any) -> nn.Module:
    try:
        return timm.create_model(model_name, **kwargs)
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, URLError) as error:
        raise UsageError(
            f"Cannot download '{model_name}': there is no connection to the Hugging Face Hub or to the site of the "
            'weights, and they are not in the cache. Connect to the Internet, set HF_HOME to a cache that has them, or '
            'give a file of weights (--pretrained-path in training, else --checkpoint).') from error


def _create_with_head(
        model_name: str,
        pretrained: bool,
        num_classes: Optional[int],
        head: str,
        head_kwargs: Optional[dict[str, Any]],
        side_inputs: Optional[dict[str, Any]],
        timm_kwargs: dict[str, Any],
) -> nn.Module:
    timm_kwargs = dict(timm_kwargs)
    checkpoint = timm_kwargs.pop('checkpoint_path', None)
    model = _create_timm_model(model_name, pretrained=pretrained, num_classes=0, **timm_kwargs)
    if num_classes is None:
        num_classes = (getattr(model, 'pretrained_cfg', None) or {}).get('num_classes') or 1000
    weights = load_state_dict(checkpoint) if checkpoint else {}
    if any(name.startswith(HEAD_PREFIX) for name in weights):
        side_inputs = stored_side_inputs(head, weights, HEAD_PREFIX)
    add_head(model, head, num_classes, head_kwargs, side_inputs, timm_kwargs.get('img_size'))
    if checkpoint:
        _load_weights(model, weights, checkpoint)
    return model


def _load_weights(model: nn.Module, weights: dict[str, Any], path: Union[str, Path]) -> None:
    """Load all weights of a file with a head; of another file, the weights of the backbone."""
    if not any(name.startswith(HEAD_PREFIX) for name in weights):
        own = {name: value for name, value in model.state_dict().items() if not name.startswith(HEAD_PREFIX)}
        missing = sorted(own.keys() - weights.keys())
        if missing:
            raise UsageError(f'Missing key {missing[0]} in checkpoint {path}: it is of another model.')
        weights = {**model.state_dict(), **{name: weights[name] for name in own}}
    model.load_state_dict(weights)
