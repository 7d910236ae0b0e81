""" The feature map of any timm model: how it is laid out, and the head applied to a part of it

timm has no single attribute for the layout of `forward_features`, so it is found by a forward pass of one image.
"""
import math
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Iterator, Optional, Union

import torch
from torch import nn

from ..errors import UsageError

__all__ = ['FeatureMap', 'check_consistency', 'describe_features']

# What timm's models raise at an image size, a pooling or a crop of the map that they can't take.
REFUSALS = (AssertionError, AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError,
            ValueError)


class NoFeatureMap(UsageError):
    """The model has no single feature map; `reason` says what it has."""

    def __init__(self, model: nn.Module, reason: str):
        super().__init__(
            f'Expected a model with one feature map before its head, but got {model_name(model)}: {reason}; '
            'train it with plain SpliceMix, without consistency learning, or choose another model.')
        self.reason = reason


def model_name(model: nn.Module) -> str:
    """The name that the model was created by, else that of its class."""
    return (getattr(model, 'pretrained_cfg', None) or {}).get('architecture') or type(model).__name__


@contextmanager
def probing(model: nn.Module) -> Iterator[None]:
    """Evaluate without a trace: the mode of each module, running statistics and random generators stay as they are."""
    training = {module: module.training for module in model.modules()}
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == 'cuda'}
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=sorted(devices, key=str)):
            yield
    finally:
        for module, mode in training.items():
            module.training = mode


def _randn(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(like.device, like.dtype)


@dataclass(frozen=True)
class FeatureMap:
    """ How the output of a model's `forward_features` is laid out.

    It takes the features apart, into maps that can be cut, and puts (parts of) maps together again for the head. Both
    work with other image sizes than the described one, and decide nothing from values.

    Args:
        layout: 'NCHW', 'NHWC' or 'NLC', the last for tokens, row by row.
        channels: Number of channels.
        grid: Height and width of the map at the described image size.
        num_prefix: Number of tokens before those of the map, such as class and register tokens.

    Example:
        >>> import timm, torch
        >>> model = timm.create_model('vit_tiny_patch16_224', num_classes=5, global_pool='max')
        >>> feature_map = check_consistency(model, 224)
        >>> feature_map
        FeatureMap(layout='NLC', channels=192, grid=(14, 14), num_prefix=1)
        >>> features = model.forward_features(torch.randn(2, 3, 224, 224))
        >>> maps, prefix = feature_map.split(features)
        >>> maps.shape, prefix.shape
        (torch.Size([2, 192, 14, 14]), torch.Size([2, 1, 192]))
        >>> model.forward_head(feature_map.join(maps[..., :7], prefix)).shape  # what the left halves predict
        torch.Size([2, 5])
    """
    layout: str
    channels: int
    grid: tuple[int, int]
    num_prefix: int = 0

    def split(
            self,
            features: torch.Tensor,
            image_size: Optional[tuple[int, int]] = None,
    ) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
        """ Take features apart.

        Args:
            features: What `forward_features` returned for N images.
            image_size: Height and width of the images, needed if their shape is not that of the described ones and
                the layout is 'NLC'.

        Returns:
            The (N, C, h, w) maps and the (N, num_prefix, C) prefix tokens, None if there are none.
        """
        if self.layout == 'NCHW':
            return features, None
        if self.layout == 'NHWC':
            return features.permute(0, 3, 1, 2), None
        height, width = _grid_of_tokens(features.shape[1] - self.num_prefix, image_size or self.grid)
        maps = features[:, self.num_prefix:].transpose(1, 2).reshape(len(features), -1, height, width)  # (N, C, h, w)
        return maps, features[:, :self.num_prefix] if self.num_prefix else None

    def join(self, maps: torch.Tensor, prefix: Optional[torch.Tensor] = None) -> torch.Tensor:
        """ Put maps, or parts of them, together to features for `forward_head`.

        Args:
            maps: (N * parts, C, h, w), the parts of each image side by side, as those of `split_cells`.
            prefix: (N, num_prefix, C) as given by `split`; each part gets those of its image.
        """
        if self.layout == 'NCHW':
            return maps
        if self.layout == 'NHWC':
            return maps.permute(0, 2, 3, 1).contiguous()
        tokens = maps.flatten(2).transpose(1, 2)  # (N * parts, h * w, C)
        if prefix is None:
            return tokens.contiguous()
        parts = len(maps) // max(1, len(prefix))
        return torch.cat([prefix.repeat_interleave(parts, dim=0), tokens], dim=1)


def _grid_of_tokens(num_tokens: int, image_size: tuple[int, int]) -> tuple[int, int]:
    """The rows and columns of tokens whose ratio is the nearest to that of the image."""
    heights = [height for height in range(1, num_tokens + 1) if num_tokens % height == 0]
    height = min(heights, key=lambda height: _mismatch((height, num_tokens // height), image_size))
    return height, num_tokens // height


def _mismatch(grid: tuple[int, int], image_size: tuple[int, int]) -> float:
    return abs(math.log(grid[0] * image_size[1] / (grid[1] * image_size[0])))


def _num_prefix_tokens(model: nn.Module, num_tokens: int, image_size: tuple[int, int]) -> int:
    """The model's own word, else the fewest tokens without which the others have nearest to the image's ratio."""
    num_prefix = getattr(model, 'num_prefix_tokens', None)
    if num_prefix is not None:
        return num_prefix
    mismatches = [
        _mismatch(_grid_of_tokens(num_tokens - num_prefix, image_size), image_size)
        for num_prefix in range(min(3, num_tokens))
    ]
    if min(mismatches) > math.log(1.25):  # sides of a few tokens, rounded, differ by as much
        raise NoFeatureMap(
            model, f'its {num_tokens} tokens are no grid over images of {image_size[0]} x {image_size[1]}')
    return mismatches.index(min(mismatches))


def full_input_size(model: nn.Module, input_size: Optional[Union[int, tuple[int, ...]]] = None) -> tuple[int, int, int]:
    """Channels, height and width, what is not given being what the model was built for."""
    size = (input_size, input_size) if isinstance(input_size, int) else tuple(input_size or ())
    if len(size) == 3:
        return size
    cfg = getattr(model, 'pretrained_cfg', None) or {}
    if not size:
        size = getattr(getattr(model, 'patch_embed', None), 'img_size', None)
        size = size or cfg.get('input_size', (3, 224, 224))[1:]
    channels = getattr(model, 'in_chans', None)
    if channels is None:
        channels = next((m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d)), 3)
    return channels, *size


def run_features(
        model: nn.Module,
        input_size: Optional[Union[int, tuple[int, ...]]] = None,
) -> tuple[FeatureMap, torch.Tensor]:
    """The layout of the features and the features of one random image; call it while `probing`."""
    channels, height, width = full_input_size(model, input_size)
    like = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    try:
        features = model.forward_features(_randn((1, channels, height, width), like))
    except REFUSALS as error:
        raise UsageError(
            f'Expected an input size that {model_name(model)} takes, but got {channels} x {height} x {width}: '
            f'{_one_line(error)}') from error
    return _layout(model, features, (height, width)), features


def _layout(model: nn.Module, features: torch.Tensor, image_size: tuple[int, int]) -> FeatureMap:
    if not isinstance(features, torch.Tensor):
        raise NoFeatureMap(
            model, f'its head combines {len(features)} outputs of several scales, branches or stages, none of which '
            'stands for the image alone')
    if features.ndim == 3:
        num_tokens, channels = features.shape[1:]
        num_prefix = _num_prefix_tokens(model, num_tokens, image_size)
        if num_tokens - num_prefix <= 1:
            raise NoFeatureMap(
                model, 'its features are class tokens alone, or images of this size leave a single other one')
        return FeatureMap('NLC', channels, _grid_of_tokens(num_tokens - num_prefix, image_size), num_prefix)
    if features.ndim != 4:
        raise NoFeatureMap(model, f'its features have the shape {tuple(features.shape)}')
    layout = getattr(model, 'output_fmt', None) or getattr(getattr(model, 'head', None), 'input_fmt', None)
    if layout is None:
        of_channels_last = features.shape[3] == model.num_features != features.shape[1]
        layout = 'NHWC' if of_channels_last else 'NCHW'
    layout = str(getattr(layout, 'value', layout))
    if layout == 'NHWC':
        return FeatureMap(layout, features.shape[3], tuple(features.shape[1:3]))
    return FeatureMap(layout, features.shape[1], tuple(features.shape[2:]))


def _one_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip('.') + '.'


class HeadProbe:
    """ A model's head on the feature maps of two images that have nothing in common.

    The maps are random, around the mean and as far from it as those of a real image. What the head makes of changed
    maps is compared in units of what exchanging the images changes.

    Args:
        model: The model, while `probing`.
        feature_map: Layout of its features.
        features: Features of an image.
        part: Look at the left or upper half of the maps only.
    """

    def __init__(self, model: nn.Module, feature_map: FeatureMap, features: torch.Tensor, part: bool = False):
        self.model = model
        self.feature_map = feature_map
        self.dtype = features.dtype
        maps, prefix = feature_map.split(features)
        if maps.shape[2:] == (1, 1):
            maps = maps.expand(-1, -1, 2, 2)  # a single position would be its own average and maximum
        self.maps = self._alike(maps, dims=(2, 3))
        self.prefix = None if prefix is None else self._alike(prefix, dims=(1, 2))
        if part:
            height, width = self.maps.shape[2:]
            self.maps = self.maps[..., :(width + 1) // 2] if width > 1 else self.maps[:, :, :(height + 1) // 2]
        self.seen = self.run(self.maps, self.prefix)
        exchanged = self.run(self.maps.flip(0), None if self.prefix is None else self.prefix.flip(0))
        self.scales = [self._distance(a, b) for a, b in zip(exchanged, self.seen)]

    @staticmethod
    def _alike(values: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
        values = values.float()
        noise = _randn((2, *values.shape[1:]), values)
        return values.mean(dim=dims, keepdim=True) + (values.std() or 1.) * noise

    @staticmethod
    def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a.float() - b.float()).abs().max())

    def run(self, maps: torch.Tensor, prefix: Optional[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """What goes into the classifier and what comes out of it, which says nothing while a new one is 0."""
        features = self.feature_map.join(maps, prefix).to(self.dtype)
        return self.model.forward_head(features, pre_logits=True), self.model.forward_head(features)

    def same(self, maps: torch.Tensor, prefix: Optional[torch.Tensor]) -> bool:
        """Whether the head makes of these what it makes of the probe's own."""
        tolerance = 1e-4 if self.dtype in (torch.float32, torch.float64) else 0.05
        rounding = 4 * torch.finfo(self.dtype).eps
        results = zip(self.run(maps, prefix), self.seen, self.scales)
        return all(
            self._distance(a, b) <= tolerance * scale + rounding * float(b.abs().max()) for a, b, scale in results)

    def sees_maps_alone(self) -> bool:
        """Whether the head follows the maps, and not the prefix tokens."""
        return any(self.scales) and (self.prefix is None or self.same(self.maps, self.prefix.flip(0)))


def describe_features(model: nn.Module, input_size: Union[int, tuple[int, ...]]) -> FeatureMap:
    """ Find out how a model's features are laid out, by a forward pass of one random image.

    Nothing of the model changes, nor do torch's random generators.

    Args:
        model: A model with timm's interface.
        input_size: Size of the images: one number, (height, width) or (channels, height, width).

    Raises:
        ValueError: If the model has no single feature map, or doesn't take the size.

    Example:
        >>> import timm
        >>> describe_features(timm.create_model('resnet18'), (224, 160))
        FeatureMap(layout='NCHW', channels=512, grid=(7, 5), num_prefix=0)
    """
    with probing(model):
        return run_features(model, input_size)[0]


def check_consistency(model: nn.Module, input_size: Union[int, tuple[int, ...]]) -> FeatureMap:
    """ Make sure that a model can do consistency learning, before it starts.

    The head is applied to a part of the feature map, so it must run on one, see it, and see nothing but it: a class
    token, which has looked at all cells of a mixed image, would make them predict the same.

    Heads with BatchNorm inside (efficientvit, levit, lowformer, repvit, shvit, mobilenetv4, ...) normalise the cells
    by the cells' own statistics, and update the running ones a second time. In training they need two cells or more,
    which any mixed image has.

    Args:
        model: A model with timm's interface.
        input_size: Size of the images: one number, (height, width) or (channels, height, width).

    Returns:
        The layout of the features, to take them apart with.

    Raises:
        ValueError: If the model can't, saying why.

    Example:
        >>> import timm
        >>> check_consistency(timm.create_model('vit_tiny_patch16_224', global_pool='token'), 224)
        Traceback (most recent call last):
        timm_splicemix.errors.UsageError: Expected a head that sees the feature map alone ...
    """
    with probing(model):
        feature_map, features = run_features(model, input_size)
        if feature_map.grid == (1, 1):
            raise NoFeatureMap(model, 'images of this size leave it a single position, larger ones are needed')
        logits = model.forward_head(features)
        if not isinstance(logits, torch.Tensor) or logits.ndim != 2:
            raise UsageError(
                'Expected a head that returns (N, classes) for consistency learning, '
                f'but got that of {model_name(model)}: use --gp max or --gp avg.')
        again = model.forward_head(feature_map.join(*feature_map.split(features)))
        if not torch.allclose(again, logits, rtol=1e-2, atol=1e-2 * float(logits.abs().max())):
            raise UsageError(f'Expected features laid out as {feature_map}, but got others of {model_name(model)}.')
        try:
            sees_maps_alone = HeadProbe(model, feature_map, features, part=True).sees_maps_alone()
        except REFUSALS as error:
            raise UsageError(
                'Expected a head that takes a part of the feature map for consistency learning, '
                f'but got that of {model_name(model)}: use --gp max or --gp avg ({_one_line(error)})') from error
        if not sees_maps_alone:
            raise UsageError(
                'Expected a head that sees the feature map alone for consistency learning, '
                f'but got that of {model_name(model)}: it reads the class token, which has seen all cells of a mixed '
                'image; use --gp max or --gp avg where the model takes them, else plain SpliceMix.')
    return feature_map
