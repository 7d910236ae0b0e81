""" The feature map of any timm model: its layout, and the head applied to a part of it

timm has no common attribute for the layout of `forward_features`, so a forward pass of one image determines it.
"""
import math
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Iterator, Optional, Union

import torch
from torch import nn

from ..errors import UsageError

__all__ = ['FeatureMap', 'check_consistency', 'describe_features']

# Exceptions that timm's models raise for an unsupported image size, pooling or part of the map
REFUSALS = (AssertionError, AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError,
            ValueError)


class NoFeatureMap(UsageError):
    """The model has no single feature map, for the given `reason`."""

    def __init__(self, model: nn.Module, reason: str):
        super().__init__(
            f'{model_name(model)} cannot be used for consistency learning: {reason}. '
            'Use plain SpliceMix without --splicemix-cl, or choose another model.')
        self.reason = reason


def model_name(model: nn.Module) -> str:
    """The timm name of a model, or else the name of its class."""
    return (getattr(model, 'pretrained_cfg', None) or {}).get('architecture') or type(model).__name__


@contextmanager
def probing(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without side effects on modes, running statistics and random generators."""
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
    """ The layout of the output of a model's `forward_features`.

    `split` turns features into maps that can be cut; `join` turns maps, or parts of them, into features for the head.
    Both support other image sizes than the one that was described, and decide nothing from values.

    Args:
        layout: 'NCHW', 'NHWC', or 'NLC' for tokens in row-major order.
        channels: Number of channels.
        grid: Height and width of the map at the image size that was described.
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
        >>> model.forward_head(feature_map.join(maps[..., :7], prefix)).shape  # predictions of the left halves
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
        """ Split features into maps and prefix tokens.

        Args:
            features: Output of `forward_features` for N images.
            image_size: Height and width of the images; needed for 'NLC' if their aspect ratio is another one than that
                of the described images.

        Returns:
            The (N, C, h, w) maps and the (N, num_prefix, C) prefix tokens, None if there are none.
        """
        if self.layout == 'NCHW':
            return features, None
        if self.layout == 'NHWC':
            return features.permute(0, 3, 1, 2), None
        height, width = _grid_of_tokens(features.shape[1] - self.num_prefix, image_size or self.grid)
        maps = features[:, self.num_prefix:].transpose(1, 2).unflatten(2, (height, width))  # (N, C, h, w)
        return maps, features[:, :self.num_prefix] if self.num_prefix else None

    def join(self, maps: torch.Tensor, prefix: Optional[torch.Tensor] = None) -> torch.Tensor:
        """ Join maps, or parts of them, to features for `forward_head`.

        Args:
            maps: (N * parts, C, h, w), ordered by image, as returned by `split_cells`.
            prefix: (N, num_prefix, C) as returned by `split`; each part gets the tokens of its image.
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
    """Rows and columns of tokens with an aspect ratio as close as possible to that of the image."""
    heights = [height for height in range(1, num_tokens + 1) if num_tokens % height == 0]
    height = min(heights, key=lambda height: _mismatch((height, num_tokens // height), image_size))
    return height, num_tokens // height


def _mismatch(grid: tuple[int, int], image_size: tuple[int, int]) -> float:
    return abs(math.log(grid[0] * image_size[1] / (grid[1] * image_size[0])))


def _num_prefix_tokens(model: nn.Module, num_tokens: int, image_size: tuple[int, int]) -> int:
    """The model's attribute, or else the smallest number with which the rest fits the image's aspect ratio best."""
    num_prefix = getattr(model, 'num_prefix_tokens', None)
    if num_prefix is not None:
        return num_prefix
    mismatches = [
        _mismatch(_grid_of_tokens(num_tokens - num_prefix, image_size), image_size)
        for num_prefix in range(min(3, num_tokens))
    ]
    if min(mismatches) > math.log(1.25):  # tolerance for the rounding of small grids
        raise NoFeatureMap(
            model, f'its {num_tokens} tokens do not form a grid over images of {image_size[0]} x {image_size[1]}')
    return mismatches.index(min(mismatches))


def full_input_size(model: nn.Module, input_size: Optional[Union[int, tuple[int, ...]]] = None) -> tuple[int, int, int]:
    """Channels, height and width; missing ones are those of the model."""
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


def random_image(model: nn.Module, input_size: Optional[Union[int, tuple[int, ...]]] = None) -> torch.Tensor:
    """(1, channels, height, width), always the same values."""
    like = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    return _randn((1, *full_input_size(model, input_size)), like)


def run_features(
        model: nn.Module,
        input_size: Optional[Union[int, tuple[int, ...]]] = None,
) -> tuple[FeatureMap, torch.Tensor]:
    """The layout of the features, and the features of one random image; to be called within `probing`."""
    image = random_image(model, input_size)
    _, channels, height, width = image.shape
    try:
        features = model.forward_features(image)
    except REFUSALS as error:
        raise UsageError(
            f'{model_name(model)} does not accept images of {channels} x {height} x {width}: {one_line(error)}'
        ) from error
    return _layout(model, features, (height, width)), features


def _layout(model: nn.Module, features: torch.Tensor, image_size: tuple[int, int]) -> FeatureMap:
    if not isinstance(features, torch.Tensor):
        raise NoFeatureMap(
            model, f'its head combines {len(features)} feature maps of several scales, branches or stages')
    if features.ndim == 3:
        num_tokens, channels = features.shape[1:]
        num_prefix = _num_prefix_tokens(model, num_tokens, image_size)
        if num_tokens - num_prefix <= 1:
            raise NoFeatureMap(
                model, 'its features are class tokens only, or the images are too small for more than one other token')
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


def one_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip('.') + '.'


class HeadProbe:
    """ Runs the head of a model on changed feature maps of two unrelated images.

    The maps are random, with the mean and the deviation of real features. Differences are measured relative to the
    difference between the two images.

    Args:
        model: The model, within `probing`.
        feature_map: Layout of its features.
        features: Features of an image.
        part: Use only the left or upper half of the maps.
    """

    def __init__(self, model: nn.Module, feature_map: FeatureMap, features: torch.Tensor, part: bool = False):
        self.model = model
        self.feature_map = feature_map
        self.dtype = features.dtype
        maps, prefix = feature_map.split(features)
        if maps.shape[2:] == (1, 1):
            maps = maps.expand(-1, -1, 2, 2)  # one position equals its average and its maximum
        self.maps = self._like(maps, dims=(2, 3))
        self.prefix = None if prefix is None else self._like(prefix, dims=(1, 2))
        if part:
            height, width = self.maps.shape[2:]
            self.maps = self.maps[..., :(width + 1) // 2] if width > 1 else self.maps[:, :, :(height + 1) // 2]
        self.outputs = self.run(self.maps, self.prefix)
        exchanged = self.run(self.maps.flip(0), None if self.prefix is None else self.prefix.flip(0))
        self.scales = [self._distance(a, b) for a, b in zip(exchanged, self.outputs)]

    @staticmethod
    def _like(values: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
        values = values.float()
        noise = _randn((2, *values.shape[1:]), values)
        return values.mean(dim=dims, keepdim=True) + (values.std() or 1.) * noise

    @staticmethod
    def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a.float() - b.float()).abs().max())

    def run(self, maps: torch.Tensor, prefix: Optional[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Input and output of the classifier; the output alone would be constant for a classifier of zeros."""
        features = self.feature_map.join(maps, prefix).to(self.dtype)
        return self.model.forward_head(features, pre_logits=True), self.model.forward_head(features)

    def same(self, maps: torch.Tensor, prefix: Optional[torch.Tensor]) -> bool:
        """Whether the head has the same output as for the unchanged maps."""
        tolerance = 1e-4 if self.dtype in (torch.float32, torch.float64) else 0.05
        rounding = 4 * torch.finfo(self.dtype).eps
        results = zip(self.run(maps, prefix), self.outputs, self.scales)
        return all(
            self._distance(a, b) <= tolerance * scale + rounding * float(b.abs().max()) for a, b, scale in results)

    def depends_on_maps_only(self) -> bool:
        """Whether the head depends on the maps and not on the prefix tokens."""
        return any(self.scales) and (self.prefix is None or self.same(self.maps, self.prefix.flip(0)))


def describe_features(model: nn.Module, input_size: Union[int, tuple[int, ...]]) -> FeatureMap:
    """ Determine the layout of a model's features, by a forward pass of one random image.

    The model and the random generators of torch do not change.

    Args:
        model: A model with timm's interface.
        input_size: Image size: one number, (height, width) or (channels, height, width).

    Raises:
        UsageError: If the model has no single feature map, or does not accept the image size.

    Example:
        >>> import timm
        >>> describe_features(timm.create_model('resnet18'), (224, 160))
        FeatureMap(layout='NCHW', channels=512, grid=(7, 5), num_prefix=0)
    """
    with probing(model):
        return run_features(model, input_size)[0]


def check_consistency(model: nn.Module, input_size: Union[int, tuple[int, ...]]) -> FeatureMap:
    """ Check that a model supports consistency learning.

    The head is applied to parts of the feature map, so it must accept them, depend on them, and depend on nothing else:
    a class token attends to all cells of a mixed image, so all of its cells would get the same prediction.

    Heads with BatchNorm (efficientvit, levit, lowformer, repvit, shvit, mobilenetv4, ...) normalise the cells with the
    statistics of the cells, and update the running statistics twice per step.

    Args:
        model: A model with timm's interface.
        input_size: Image size: one number, (height, width) or (channels, height, width).

    Returns:
        The layout of the features.

    Raises:
        UsageError: If the model does not support it, with the reason.

    Example:
        >>> import timm
        >>> check_consistency(timm.create_model('vit_tiny_patch16_224', global_pool='token'), 224)
        Traceback (most recent call last):
        timm_splicemix.errors.UsageError: ... its head reads the class token, ...
    """
    head = getattr(model, 'multilabel_head', None)
    if head is not None and not head.supports_cells:
        raise UsageError(
            f'Head {model.head_name} cannot be used for consistency learning: {head.cells_reason}. Use plain SpliceMix '
            'without --splicemix-cl, or another head.')
    with probing(model):
        feature_map, features = run_features(model, input_size)
        if feature_map.grid == (1, 1):
            raise NoFeatureMap(model, 'its feature map has a single position at this image size; use larger images')
        logits = model.forward_head(features)
        if not isinstance(logits, torch.Tensor) or logits.ndim != 2:
            raise _unsuitable(model, 'its head does not return logits of shape (N, classes)')
        again = model.forward_head(feature_map.join(*feature_map.split(features)))
        if not torch.allclose(again, logits, rtol=1e-2, atol=1e-2 * float(logits.abs().max())):
            raise _unsuitable(model, f'its features do not have the layout {feature_map}')
        try:
            is_suitable = HeadProbe(model, feature_map, features, part=True).depends_on_maps_only()
        except REFUSALS as error:
            raise _unsuitable(
                model, f'its head does not accept a part of the feature map ({one_line(error)[:-1]})') from error
        if not is_suitable:
            raise _unsuitable(model, 'its head reads the class token, which attends to all cells of a mixed image')
    return feature_map


def _unsuitable(model: nn.Module, reason: str) -> UsageError:
    return UsageError(
        f'{model_name(model)} cannot be used for consistency learning: {reason}. '
        'Use --gp max or --gp avg where the model supports it, or plain SpliceMix without --splicemix-cl.')
