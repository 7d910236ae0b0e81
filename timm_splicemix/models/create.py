""" `create_model` with global max pooling on any family """
import difflib
from typing import Any, Optional

import timm
from timm.models import get_arch_pretrained_cfgs, parse_model_name, split_model_name_tag
from torch import nn

from ..errors import UsageError
from .pooling import _pool_by_max


def _check_name(name: str) -> None:
    source, name = parse_model_name(name)
    if source is not None:
        return
    architecture, tag = split_model_name_tag(name)
    if not timm.is_model(architecture):
        nearest = difflib.get_close_matches(architecture, timm.list_models(), n=3, cutoff=0.5)
        way_out = f'did you mean {", ".join(nearest)}?' if nearest else 'timm.list_models() names all there are.'
        raise UsageError(f'Expected the name of a timm model, but got {name!r}: {way_out}')
    known = get_arch_pretrained_cfgs(architecture)
    if tag and known and name not in known:
        tags = ', '.join(split_model_name_tag(full_name)[1] for full_name in known)
        raise UsageError(f'Expected a tag of {architecture}, but got {tag!r}: there are {tags}.')


def create_model(
        model_name: str,
        pretrained: bool = False,
        num_classes: Optional[int] = None,
        global_pool: Optional[str] = None,
        **timm_kwargs: Any,
) -> nn.Module:
    """ timm's `create_model`, with a real global max pooling head where one can exist.

    With `global_pool='max'` the model is created with timm's default pooling, which is then replaced. So the weights,
    loaded ones included, and their keys are those of timm's default model: the final norm of a pretrained ViT stays,
    and timm loads the checkpoint. (Attention pools that 'max' replaces leave no keys.) That the head pools by max is
    verified by a forward pass of one image.

    Args:
        model_name: A name of timm, with or without a tag, or 'hf-hub:' or 'local-dir:' with what timm expects there.
        pretrained: Load pretrained weights.
        num_classes: Number of classes, the model's default if None.
        global_pool: 'max' for a real maximum, others as in timm, None for the model's default.
        **timm_kwargs: What else `timm.create_model` takes.

    Raises:
        ValueError: If there is no such model, or it has no map to take the maximum of.

    Example:
        >>> model = create_model('xcit_nano_12_p16_224', num_classes=20, global_pool='max')  # timm refuses this one
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
        _pool_by_max(model, timm_kwargs.get('img_size'))
    return model
