""" A multi-label head on the feature map of any timm model

The class of the model gets a mixin, so it stays a timm model: the attributes, methods and keys of the backbone do not
change. Its own classifier is removed as by `num_classes=0`, and the head is one more module, `multilabel_head`.

Parameters that the head does not need, such as those of layers between pooling and classifier, keep their keys, but are
frozen. If one of them is the norm after pooling (convnext, beit, ...), it is applied to each position of the map, as
the maps of these models have no other norm.
"""
from typing import Any, Callable, Iterator, Optional, Sequence, Union

import torch
from timm.optim import auto_group_layers
from torch import nn

from ..errors import UsageError
from ..heads import Head, create_head, head_class
from .classifier import freeze_batch_norm
from .feature_map import (
    REFUSALS,
    FeatureMap,
    NoFeatureMap,
    model_name,
    one_line,
    probing,
    random_image,
    run_features,
)
from .mixin import ModelMixin, add_mixin, remove_mixin

HEAD = 'multilabel_head'  # name of the head in the model
HEAD_PREFIX = f'{HEAD}.'  # of its keys
Maps = Union[torch.Tensor, tuple[torch.Tensor, ...]]


class WithHead(ModelMixin):
    """ Mixin for the class of a model: predicts with `multilabel_head`, everything else is that of the model.

    For a head that needs two maps, `forward_features` returns a tuple of both.
    """
    multilabel_head: Head
    head_name: str
    head_kwargs: dict[str, Any]
    head_feature_map: FeatureMap  # of the last map
    head_levels: tuple[int, ...]  # of maps in `feature_info`; if there is one, the last map are the features
    head_norm: Optional[str]  # name of the norm that is applied to the last map

    def forward_features(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Maps:
        if not self.head_levels:
            return super().forward_features(x, *args, **kwargs)
        return _run_levels(self, x, self.head_levels)

    def head_maps(self, features: Maps, image_size: Optional[tuple[int, int]] = None) -> Maps:
        """ The feature map, or the two maps, that the head gets, (B, C, h, w).

        Args:
            features: Output of `forward_features`.
            image_size: Height and width of the images; needed for tokens if their aspect ratio is another one than
                that of the model's image size.
        """
        *levels, last = features if self.head_levels else (features,)
        maps, _ = self.head_feature_map.split(last, image_size)
        if self.head_norm is not None:
            maps = _apply_norm(self.get_submodule(self.head_norm), maps)
        return (*levels, maps) if levels else maps

    def forward_head(
            self,
            x: Maps,
            pre_logits: bool = False,
            image_size: Optional[tuple[int, int]] = None,
    ) -> torch.Tensor:
        """Predict features; with `pre_logits`, return the mean of the last map over its positions."""
        maps = self.head_maps(x, image_size)
        if pre_logits:
            return (maps[-1] if self.head_levels else maps).mean(dim=(2, 3))
        return self.multilabel_head(maps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward_head(self.forward_features(x), image_size=(x.shape[2], x.shape[3]))

    def forward_train(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Logits, and the auxiliary tensors of the head's own losses."""
        maps = self.head_maps(self.forward_features(x), (x.shape[2], x.shape[3]))
        return self.multilabel_head.forward_train(maps, self.multilabel_head.class_weights())

    def get_classifier(self, name_only: bool = False) -> Union[str, nn.Module]:
        return HEAD if name_only else self.multilabel_head

    def reset_classifier(
            self,
            num_classes: int,
            global_pool: Optional[str] = None,
            side_inputs: Optional[dict[str, Any]] = None,
            **kwargs: Any,
    ) -> None:
        """ Create a new head of the same kind, or return to the model's own classifier.

        Args:
            num_classes: Number of classes; 0 removes the head, and pooled features are returned.
            global_pool: Pooling of the model's own classifier, which then replaces the head.
            side_inputs: What the head needs beside feature maps, see `create_head`.
            **kwargs: Further arguments of the model's own `reset_classifier`.
        """
        if num_classes and global_pool is None:
            old = self.multilabel_head
            like = next(old.parameters())
            head = create_head(
                self.head_name, old.in_channels, num_classes, side_inputs=side_inputs, **self.head_kwargs)
            self.multilabel_head = head.to(like.device, like.dtype).train(old.training)
            self.num_classes = num_classes
            return None
        remove_mixin(self)
        for name in (HEAD, *(name for name in WithHead.__annotations__ if name != HEAD)):
            delattr(self, name)
        for parameter in self.parameters():
            parameter.requires_grad_(True)
        return self.reset_classifier(num_classes, *(() if global_pool is None else (global_pool,)), **kwargs)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Names of parameters without weight decay: those of the model and those of the head."""
        own = getattr(super(), 'no_weight_decay', set)()
        heads = getattr(self.multilabel_head, 'no_weight_decay', set)()
        return {*own, *(f'{HEAD_PREFIX}{name}' for name in heads)}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> Union[dict[str, Any], Callable]:
        """The model's layer groups; the head belongs to the last one."""
        parent = getattr(super(), 'group_matcher', None)
        matcher = auto_group_layers(self).get if parent is None else parent(coarse=coarse)
        if not callable(matcher):
            return matcher  # timm puts names without a match into the last group
        return lambda name: float('inf') if name.startswith(HEAD_PREFIX) else matcher(name)


def _apply_norm(norm: nn.Module, maps: torch.Tensor) -> torch.Tensor:
    if type(norm).__name__.endswith('2d'):  # timm's norms over channels of NCHW maps
        return norm(maps)
    return norm(maps.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def has_head(model: nn.Module) -> bool:
    """Whether a model has a multi-label head."""
    return isinstance(model, WithHead)


def add_head(
        model: nn.Module,
        name: str,
        num_classes: int,
        kwargs: Optional[dict[str, Any]] = None,
        side_inputs: Optional[dict[str, Any]] = None,
        input_size: Optional[Union[int, tuple[int, ...]]] = None,
) -> None:
    """ Add a head to a model without a classifier, in place.

    A forward pass of one image determines the layout of its features.

    Args:
        model: A timm model that was created with `num_classes=0`.
        name: Name of the head.
        num_classes: Number of classes.
        kwargs: Options of the head.
        side_inputs: What the head needs beside feature maps, see `create_head`.
        input_size: Image size of the model, None for that of its configuration.
    """
    with probing(model):
        try:
            feature_map, features = run_features(model, input_size)
        except NoFeatureMap as error:
            raise _no_head(model, name, error.reason) from error
        levels: tuple[int, ...] = ()
        if head_class(name).num_maps == 2:
            levels, feature_map = _find_levels(model, name, random_image(model, input_size), features, feature_map)
    model.head_name, model.head_kwargs = name, dict(kwargs or {})
    model.head_feature_map, model.head_levels, model.head_norm = feature_map, levels, None
    model.num_classes = num_classes
    add_mixin(model, WithHead)
    maps = _trace_maps(model, name, input_size)
    if len(levels) < 2:
        model.head_norm = _find_norm(model, maps, feature_map.channels)
    used = {id(parameter) for parameter in _used_parameters(maps)}
    for parameter_name, parameter in model.named_parameters():
        in_norm = model.head_norm is not None and parameter_name.startswith(f'{model.head_norm}.')
        if id(parameter) not in used and not in_norm:
            parameter.requires_grad_(False)  # DDP expects a gradient of every other parameter
    channels = tuple(level_maps.shape[1] for level_maps in maps)
    head = create_head(
        name, channels if levels else channels[0], num_classes, side_inputs=side_inputs, **model.head_kwargs)
    setattr(model, HEAD, head.to(maps[-1].device, maps[-1].dtype).train(model.training))


def _no_head(model: nn.Module, name: str, reason: str) -> UsageError:
    return UsageError(f'--head {name} is not possible for {model_name(model)}: {reason}. Choose another model.')


def _run_levels(model: nn.Module, images: torch.Tensor, levels: Sequence[int]) -> Maps:
    """The maps of two levels, or of one level and the features."""
    options = {'indices': list(levels), 'output_fmt': 'NCHW'}
    if len(levels) == 2:
        return tuple(model.forward_intermediates(images, **options, stop_early=True, intermediates_only=True))
    last, (first,) = model.forward_intermediates(images, **options, stop_early=False)
    return first, last


def _find_levels(
        model: nn.Module,
        name: str,
        image: torch.Tensor,
        features: torch.Tensor,
        feature_map: FeatureMap,
) -> tuple[tuple[int, ...], FeatureMap]:
    """ Find the feature maps of strides 16 and 32.

    The features of the model are the second map, unless they have another stride, or timm computes other ones beside
    intermediate maps.

    Returns:
        Indices in `feature_info`, and the layout of the second map.
    """
    needs = 'it needs feature maps of strides 16 and 32, and'
    try:
        strides = [entry['reduction'] for entry in model.feature_info]
        model.forward_intermediates  # noqa: B018 - not all models with feature_info have it
    except (AttributeError, KeyError, TypeError) as error:
        raise _no_head(model, name, f'{needs} timm offers no intermediate feature maps of this model') from error
    if not {16, 32} <= set(strides):
        found = ', '.join(map(str, sorted(set(strides))))
        raise _no_head(model, name, f'{needs} the maps of this model have strides {found}')
    first, second = (len(strides) - 1 - strides[::-1].index(stride) for stride in (16, 32))
    try:
        if strides[-1] == 32:
            maps, last = _run_levels(model, image, (first,))
            is_same = last.shape == features.shape and torch.allclose(last, features, rtol=1e-3, atol=1e-4)
            if is_same and feature_map.grid[0] < maps.shape[2]:  # mobilenetv5 ends with a map of stride 16
                return (first,), feature_map
        _, last = _run_levels(model, image, (first, second))
    except REFUSALS as error:
        raise _no_head(
            model, name, f'its intermediate feature maps cannot be computed ({one_line(error)[:-1]})') from error
    return (first, second), FeatureMap('NCHW', last.shape[1], tuple(last.shape[2:]))


def _trace_maps(
        model: nn.Module,
        name: str,
        input_size: Optional[Union[int, tuple[int, ...]]],
) -> Sequence[torch.Tensor]:
    """The maps of one image with their autograd graph."""
    with probing(model), torch.enable_grad():
        freeze_batch_norm(model.train())  # in evaluation mode, some models use cached values of parameters
        image = random_image(model, input_size)
        try:
            maps = model.head_maps(model.forward_features(image), tuple(image.shape[2:]))
        except REFUSALS as error:
            raise _no_head(model, name, f'its feature maps cannot be computed ({one_line(error)[:-1]})') from error
    return (maps,) if isinstance(maps, torch.Tensor) else maps


def _used_parameters(outputs: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The parameters that outputs depend on, by their autograd graph."""
    seen, stack = set(), [output.grad_fn for output in outputs]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, 'variable'):  # a leaf
            yield node.variable
        stack.extend(next_node for next_node, _ in node.next_functions)


def _find_norm(model: nn.Module, maps: Sequence[torch.Tensor], channels: int) -> Optional[str]:
    """The name of the only norm over the channels of the map that the map does not depend on."""
    used = {id(parameter) for parameter in _used_parameters(maps)}
    found = [
        name for name, module in model.named_modules()
        if tuple(getattr(module, 'normalized_shape', ())) == (channels,)
        and not any(id(parameter) in used for parameter in module.parameters())]
    return found[0] if len(found) == 1 else None
