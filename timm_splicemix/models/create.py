""" timm's `create_model`, with global max pooling for every family that has a feature map """
import difflib
from typing import Any, Optional

import timm
from timm.models import get_arch_pretrained_cfgs, parse_model_name, split_model_name_tag
from torch import nn

from ..errors import UsageError
from .pooling import pool_by_max


def _check_name(name: str) -> None:
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
        **timm_kwargs: Any,
) -> nn.Module:
    """ timm's `create_model`, with true global max pooling in all families that can have it.

    With `global_pool='max'`, the model is created with timm's default pooling, which is then replaced. The weights,
    including loaded ones, and their keys stay those of timm's default model, so the final norm of a pretrained ViT is
    kept and timm can load the checkpoint. (Only attention pooling, which 'max' replaces, leaves no keys.) A forward
    pass of one image verifies that the head takes the maximum.

    Args:
        model_name: Name of a timm model, with or without a tag, or 'hf-hub:...' or 'local-dir:...' as in timm.
        pretrained: Load pretrained weights.
        num_classes: Number of classes, None for the model's default.
        global_pool: 'max' for the true maximum, other values as in timm, None for the model's default.
        **timm_kwargs: Further arguments of `timm.create_model`.

    Raises:
        UsageError: If the model does not exist, or has no feature map to pool.

    Example:
        >>> model = create_model('xcit_nano_12_p16_224', num_classes=20, global_pool='max')  # timm rejects this
        >>> is_max_pooled(model)
        True
    """
    _check_name(model_name)
    to_max = global_pool == 'max'
    model = timm.create_model(
        model_name,
        pretrained=pretrained,
        num_classes=num_classes,
        global_pool=None if to_max else global_pool,
        **timm_kwargs,
    )
    if to_max:
        pool_by_max(model, timm_kwargs.get('img_size'))
    return model
