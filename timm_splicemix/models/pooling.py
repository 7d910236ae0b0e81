""" Global max pooling (GMP) for timm models

Of the 98 families of timm 1.0.31, 73 support max pooling themselves. In 19 others timm rejects `global_pool='max'`
(timm 1.0.30 accepts it in some of them and does something else). There the maximum is taken before the model's average
pooling, which leaves it unchanged: the average of one position is that position.
"""
import copy
import itertools
from typing import Any, Optional, Union

import torch
from timm.layers import SelectAdaptivePool2d
from torch import nn

from ..errors import UsageError
from .feature_map import (
    REFUSALS,
    FeatureMap,
    HeadProbe,
    NoFeatureMap,
    model_name,
    probing,
    run_features,
)
from .mixin import ModelMixin, add_mixin, remove_mixin


class MaxBeforeHead(ModelMixin):
    """ Mixin for the class of a model: takes the maximum over the feature map before the model's average pooling.

    It adds no parameters and no modules, so the state dict does not change.
    """
    max_feature_map: FeatureMap

    def forward_head(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        layout, num_prefix = self.max_feature_map.layout, self.max_feature_map.num_prefix
        if layout == 'NLC':
            prefix, tokens = x[:, :num_prefix], x[:, num_prefix:].amax(dim=1, keepdim=True)
            x = torch.cat([prefix, tokens], dim=1) if num_prefix else tokens
        else:
            x = x.amax(dim=(2, 3) if layout == 'NCHW' else (1, 2), keepdim=True)
        return super().forward_head(x, *args, **kwargs)

    def reset_classifier(self, num_classes: int, global_pool: Optional[str] = None, **kwargs: Any) -> None:
        """Reset the classifier; another pooling than 'max' removes this mixin."""
        if global_pool not in (None, 'max'):
            remove_mixin(self)
            del self.max_feature_map
            return self.reset_classifier(num_classes, global_pool, **kwargs)
        return super().reset_classifier(num_classes, **kwargs)


class _Structure:
    """ A snapshot of the modules and attributes of a model.

    timm's `reset_classifier` may fail after it has changed the model, and it always creates a new classifier, where a
    loaded one must be kept.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.cls = type(model)
        self.state = model.state_dict()
        self.attributes = {module: self._copied(vars(module)) for module in model.modules()}

    @staticmethod
    def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
        return {name: copy.copy(value) if isinstance(value, dict) else value for name, value in attributes.items()}

    def restore(self) -> None:
        self.model.__class__ = self.cls
        for module, attributes in self.attributes.items():
            vars(module).clear()
            vars(module).update(self._copied(attributes))

    def restore_values(self) -> None:
        self.model.load_state_dict(self.state, strict=False)

    def same_keys(self) -> bool:
        return self.state.keys() == self.model.state_dict().keys()


def _reset_to_max(model: nn.Module, *_: Any) -> None:
    model.reset_classifier(model.num_classes, 'max')


def _put_max_before(model: nn.Module, feature_map: FeatureMap, features: torch.Tensor) -> None:
    model.eval()  # a new classifier may be in training mode
    if not _pools_by_average(model, feature_map, features):
        raise UsageError('The head does not use average pooling.')
    model.max_feature_map = feature_map
    add_mixin(model, MaxBeforeHead)


def _put_max_before_average(model: nn.Module, feature_map: FeatureMap, features: torch.Tensor) -> None:
    model.reset_classifier(model.num_classes, 'avg')
    _put_max_before(model, feature_map, features)


_WAYS = (_reset_to_max, _put_max_before, _put_max_before_average)  # by preference


def _pools_by_average(model: nn.Module, feature_map: FeatureMap, features: torch.Tensor) -> bool:
    """Whether the output of the head stays the same if each map is replaced by its average."""
    probe = HeadProbe(model, feature_map, features)
    average = probe.maps.mean(dim=(2, 3), keepdim=True).expand_as(probe.maps)
    return probe.depends_on_maps_only() and probe.same(average, probe.prefix)


def _pools_by_max(model: nn.Module, feature_map: FeatureMap, features: torch.Tensor) -> bool:
    """ Whether the output of the head stays the same if each map is replaced by its maximum.

    The heads of vgg, efficientvit_mit and lowformer transform the map first; there, the pooling layer is tested.
    """
    channels: dict[SelectAdaptivePool2d, int] = {}

    def count(module: SelectAdaptivePool2d, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        channels[module] = output.flatten(1).shape[1]

    pools = [module for module in model.modules() if isinstance(module, SelectAdaptivePool2d)]
    hooks = [pool.register_forward_hook(count) for pool in pools]
    try:
        probe = HeadProbe(model, feature_map, features)
    finally:
        for hook in hooks:
            hook.remove()
    if not probe.depends_on_maps_only():
        return False
    maximum = probe.maps.amax(dim=(2, 3), keepdim=True).expand_as(probe.maps)
    return probe.same(maximum, probe.prefix) or (len(channels) == 1 and all(
        _is_max_pool(pool, num_channels, features) for pool, num_channels in channels.items()))


def _is_max_pool(pool: SelectAdaptivePool2d, channels: int, like: torch.Tensor) -> bool:
    positions = torch.arange(channels * 6, device=like.device).view(1, channels, 2, 3) % 7  # maxima at all places
    return torch.equal(pool(positions.to(like.dtype)).flatten(1), positions.amax(dim=(2, 3)).to(like.dtype))


def is_max_pooled(model: nn.Module, input_size: Optional[Union[int, tuple[int, ...]]] = None) -> bool:
    """ Whether the head of a model pools the feature map by its maximum, determined by a forward pass.

    Args:
        model: A model with timm's interface.
        input_size: Image size: one number, (height, width) or (channels, height, width); None for that of the model's
            configuration.

    Example:
        >>> import timm
        >>> is_max_pooled(timm.create_model('test_resnet', global_pool='max'))
        True
        >>> is_max_pooled(timm.create_model('test_resnet', global_pool='avgmax'))
        False
    """
    with probing(model):
        try:
            feature_map, features = run_features(model, input_size)
        except NoFeatureMap:
            return False
        try:
            return _pools_by_max(model, feature_map, features)
        except REFUSALS:
            return False


def pool_by_max(model: nn.Module, input_size: Optional[Union[int, tuple[int, ...]]]) -> None:
    """Change the pooling of a model to the maximum, in the first way that works and, if possible, keeps the keys."""
    structure = _Structure(model)
    with probing(model):
        try:
            feature_map, features = run_features(model, input_size)
        except NoFeatureMap as error:
            raise _no_max(model, error.reason) from error
        for keys_may_differ, way in itertools.product((False, True), _WAYS):
            try:
                way(model, feature_map, features)
                model.eval()  # a new classifier may be in training mode
                if (keys_may_differ or structure.same_keys()) and _pools_by_max(model, feature_map, features):
                    break
            except REFUSALS:
                pass
            structure.restore()
        else:
            raise _no_max(
                model, 'timm offers no maximum for it, and its head does not just average the map (it reads class '
                'tokens, or processes the map before or during pooling)')
        structure.restore_values()
    model.train(structure.attributes[model]['training'])


def _no_max(model: nn.Module, reason: str) -> UsageError:
    return UsageError(
        f'--gp max is not possible for {model_name(model)}: {reason}. Leave out --gp or choose another model.')
