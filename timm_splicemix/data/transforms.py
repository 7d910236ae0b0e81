""" timm's transforms for PIL images or for tensors, and the multi-scale crop of multi-label training """
import random
from typing import Any, Callable, Optional, Sequence, Union

import torch
from PIL import Image
from timm.data import create_transform as timm_create_transform
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import (
    CenterCropOrPad,
    MaybePILToTensor,
    MaybeToTensor,
    RandomResizedCropAndInterpolation,
    ResizeKeepRatio,
    TrimBorder,
    str_to_interp_mode,
)
from torch.nn.functional import interpolate
from torchvision import transforms
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from ..errors import UsageError
from .decode import DECODERS

TRAIN_CROP_MODES = ('rrc', 'rkrc', 'rkrr', 'multiscale')
CROP_MODES = ('center', 'squash', 'border')
# What a loader may hand on; the rest of timm's options it sets itself, or changes what a sample is.
TRANSFORM_OPTIONS = (
    'train_crop_mode', 'scale', 'ratio', 'hflip', 'vflip', 'color_jitter', 'color_jitter_prob', 'grayscale_prob',
    'gaussian_blur_prob', 'auto_augment', 'interpolation', 'crop_pct', 'crop_mode', 'crop_border_pixels',
    'tf_preprocessing')
TENSOR_INTERPOLATIONS = ('bilinear', 'bicubic', 'random')

PilOrTensor = Union[Image.Image, torch.Tensor]
Box = tuple[int, int, int, int]  # top, left, height, width

# Arguments that need PIL images, with their flags in timm's train.py
_PIL_ONLY_IN_TRAINING = {
    'auto_augment': '--aa',
    'color_jitter': '--color-jitter',
    'grayscale_prob': '--grayscale-prob',
    'gaussian_blur_prob': '--gaussian-blur-prob',
}
_PIL_ONLY = {'naflex': '--naflex-loader', 'tf_preprocessing': '--tf-preprocessing'}

# Stages of timm that treat tensors like PIL images, once the tensors are of the same size
_ANY_IMAGE = (
    MaybePILToTensor,
    RandomErasing,
    TrimBorder,
    transforms.CenterCrop,
    transforms.ColorJitter,  # without strength: it only draws
    transforms.Normalize,
    transforms.RandomApply,  # of ColorJitter
    transforms.RandomVerticalFlip,
)


def crop_and_resize(
        image: PilOrTensor,
        box: Optional[Box],
        size: Sequence[int],
        interpolation: InterpolationMode = InterpolationMode.BILINEAR,
) -> PilOrTensor:
    """ Cut a box out of an image and resize it, with antialias.

    Args:
        image: PIL image, or uint8 tensor (C, H, W).
        box: Top, left, height and width; None is the whole image.
        size: Height and width to resize to.
        interpolation: Of the resizing; tensors know bilinear and bicubic.
    """
    if isinstance(image, Image.Image):
        return F.resize(image if box is None else F.crop(image, *box), list(size), interpolation)
    if box is not None:
        top, left, height, width = box
        image = image[:, top:top + height, left:left + width]
    if image.shape[1:] == tuple(size):
        return image
    # Torch's fast kernel for uint8 wants pixels without gaps, channels last, which decoded JPEG files have. It's called
    # without torchvision, whose dispatch would take a twentieth of the time from the disk to here.
    pixels = image[None].contiguous(memory_format=torch.channels_last)
    return interpolate(pixels, tuple(size), mode=interpolation.value, antialias=True)[0]


def _draw_interpolation(modes: Union[InterpolationMode, Sequence[InterpolationMode]]) -> InterpolationMode:
    return modes if isinstance(modes, InterpolationMode) else random.choice(modes)


class MultiScaleCrop:
    """ The random crop that SpliceMix and the ML-GCN family train with.

    The image is squashed to 8/7 of the size. Height and width of the crop are fractions `scales` of the shorter side,
    at most `max_distort` steps apart in the list of scales, and a length that is less than 3 pixels off the size is
    the size. The crop is at one of 13 places: a regular 3 x 3 grid over the image and the 4 centres between its points.

    Args:
        size: Height and width of the result, or one number for both.
        scales: Fractions in descending order.
        max_distort: How far apart the scales of height and width may be.
        interpolation: 'bilinear', 'bicubic', another of timm's names, or 'random', which draws one of these two.
    """
    # (x, y) in quarters of the room that the crop leaves
    PLACES = (
        (0, 0), (4, 0), (0, 4), (4, 4), (2, 2), (0, 2), (4, 2), (2, 4), (2, 0), (1, 1), (3, 1), (1, 3), (3, 3),
    )

    def __init__(
            self,
            size: Union[int, Sequence[int]],
            scales: Sequence[float] = (1., 0.875, 0.75, 0.66, 0.5),
            max_distort: int = 2,
            interpolation: str = 'bilinear',
    ):
        self.size = (size, size) if isinstance(size, int) else tuple(size)
        self.squashed_size = tuple(round(8 / 7 * length) for length in self.size)
        self.scales = tuple(scales)
        self.max_distort = max_distort
        self.interpolation = (
            (InterpolationMode.BILINEAR, InterpolationMode.BICUBIC) if interpolation == 'random' else
            str_to_interp_mode(interpolation))

    def crop_sizes(self, height: int, width: int) -> list[tuple[int, int]]:
        """All (height, width) that a crop of an image of this size can have."""
        lengths = [int(min(height, width) * scale) for scale in self.scales]
        heights, widths = ([side if abs(x - side) < 3 else x for x in lengths] for side in self.size)
        return [
            (h, w)
            for i, h in enumerate(heights) for j, w in enumerate(widths)
            if abs(i - j) <= self.max_distort
        ]

    def make_params(self, height: int, width: int) -> Box:
        """Draw top, left, height and width of a crop of an image of this size, from Python's `random`."""
        crop_height, crop_width = random.choice(self.crop_sizes(height, width))
        x, y = random.choice(self.PLACES)
        return y * ((height - crop_height) // 4), x * ((width - crop_width) // 4), crop_height, crop_width

    def __call__(self, image: PilOrTensor) -> PilOrTensor:
        box = self.make_params(*self.squashed_size)
        interpolation = _draw_interpolation(self.interpolation)
        image = crop_and_resize(image, None, self.squashed_size, interpolation)
        return crop_and_resize(image, box, self.size, interpolation)

    def __repr__(self) -> str:
        return (
            f'{type(self).__name__}(size={self.size}, scales={self.scales}, max_distort={self.max_distort}, '
            f'interpolation={self.interpolation})')


class _OnTensor:
    """A stage of timm done on uint8 tensors (C, H, W), with the same draws and nearly the same pixels."""

    def __init__(self, stage: Callable):
        self.stage = stage

    def __repr__(self) -> str:
        return f'{type(self).__name__}({self.stage})'


class _RandomResizedCrop(_OnTensor):
    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        box = self.stage.get_params(image, self.stage.scale, self.stage.ratio)
        return crop_and_resize(image, box, self.stage.size, _draw_interpolation(self.stage.interpolation))


class _Resize(_OnTensor):
    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        size = self.stage.size
        if isinstance(size, int):  # of the shorter side
            short = min(image.shape[1:])
            size = [int(size * length / short) for length in image.shape[1:]]
        return crop_and_resize(image, None, size, self.stage.interpolation)


class _ResizeKeepRatio(_OnTensor):
    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        size = self.stage.get_params(image, self.stage.size, self.stage.longest)
        return crop_and_resize(image, None, size, _draw_interpolation(self.stage.interpolation))


class _CenterCropOrPad(_OnTensor):
    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        missing = [max(0, side - have) for side, have in zip(self.stage.size, image.shape[1:])]
        top, left = (x // 2 for x in missing)
        bottom, right = (x - x // 2 for x in missing)
        return F.center_crop(F.pad(image, [left, top, right, bottom], fill=self.stage.fill), list(self.stage.size))


class _HorizontalFlip(_OnTensor):
    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return image.flip(-1) if float(torch.rand(1)) < self.stage.p else image


class _ToFloat(_OnTensor):
    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return image.to(torch.float32, memory_format=torch.contiguous_format).div_(255)


_ON_TENSOR = {
    CenterCropOrPad: _CenterCropOrPad,
    MaybeToTensor: _ToFloat,
    RandomResizedCropAndInterpolation: _RandomResizedCrop,
    ResizeKeepRatio: _ResizeKeepRatio,
    transforms.RandomHorizontalFlip: _HorizontalFlip,
    transforms.Resize: _Resize,
}


def _to_tensor_stage(stage: Callable) -> Callable:
    if type(stage) in _ON_TENSOR:
        return _ON_TENSOR[type(stage)](stage)
    if isinstance(stage, _ANY_IMAGE):
        return stage
    raise UsageError(
        f"Expected transforms that work on tensors for decoder 'torchvision', but got {stage}; use --decoder pil.")


def _check_tensor_options(is_training: bool, train_crop_mode: Optional[str], timm_kwargs: dict[str, Any]) -> None:
    interpolation = timm_kwargs.get('interpolation', 'bilinear')
    if interpolation not in TENSOR_INTERPOLATIONS:
        raise UsageError(
            f"Expected interpolation to be one of {TENSOR_INTERPOLATIONS} for decoder 'torchvision', "
            f"but got '{interpolation}'; use --decoder pil.")
    augment = is_training and not timm_kwargs.get('no_aug')
    if augment and train_crop_mode in ('rkrc', 'rkrr'):
        raise UsageError(
            f"Expected train_crop_mode (--train-crop-mode) to be rrc or multiscale for decoder 'torchvision', "
            f"but got '{train_crop_mode}'; use --decoder pil.")
    kwargs = {'color_jitter': 0.4, **timm_kwargs}  # timm's default
    for name, flag in {**_PIL_ONLY, **(_PIL_ONLY_IN_TRAINING if augment else {})}.items():
        value = kwargs.get(name)
        if any(value) if isinstance(value, (tuple, list)) else value:
            raise UsageError(
                f"Expected {name} ({flag}) to be off for decoder 'torchvision', but got {value!r}; "
                f'set {name} to None or use --decoder pil.')


def _check_multiscale_options(timm_kwargs: dict[str, Any]) -> None:
    if timm_kwargs.get('naflex') or timm_kwargs.get('tf_preprocessing'):
        raise UsageError("Expected no naflex and no tf_preprocessing with train_crop_mode 'multiscale', but got one.")
    for name, default in (('scale', (0.08, 1.)), ('ratio', (3 / 4, 4 / 3))):
        value = timm_kwargs.get(name)
        if value is not None and tuple(value) != default:
            raise UsageError(
                f"Expected no {name} with train_crop_mode 'multiscale', whose crops are fixed, but got {value}; "
                f"leave --{name} out or use --train-crop-mode rrc.")


def create_transform(
        input_size: Union[int, tuple[int, int], tuple[int, int, int]],
        is_training: bool = False,
        decoder: str = 'pil',
        use_prefetcher: bool = False,
        train_crop_mode: Optional[str] = None,
        **timm_kwargs: Any,
) -> Union[transforms.Compose, tuple[transforms.Compose, ...]]:
    """ Create the transform of an image, with the names and defaults of timm's function.

    With equal seeds, both decoders crop and flip the same. Bilinear pixels differ by up to 2 of 255 levels, bicubic
    ones by more at sharp edges, since Pillow's order of rows and columns depends on the image's shape.

    Args:
        input_size: Size of the result, (channels, height, width), (height, width) or one number.
        is_training: Transform at random.
        decoder: What `decode_image` decodes with: 'pil' takes PIL images and is timm's transform, 'torchvision' takes
            uint8 tensors (C, H, W), is faster, and knows the crops, flips and erasing of timm.
        use_prefetcher: Give uint8 tensors, which the prefetcher will normalise, instead of normalised float tensors.
        train_crop_mode: timm's 'rrc' (default), 'rkrc' or 'rkrr', or 'multiscale', see `MultiScaleCrop`, which is
            without colour jitter unless that is given.
        **timm_kwargs: What timm's `create_transform` takes: no_aug, scale, hflip, color_jitter, crop_pct, mean, ...

    Returns:
        The transform, or three in a tuple if `separate=True`.
    """
    if decoder not in DECODERS:
        raise UsageError(f"Expected decoder to be {' or '.join(DECODERS)}, but got '{decoder}'.")
    if train_crop_mode is not None and train_crop_mode not in TRAIN_CROP_MODES:
        raise UsageError(f"Expected train_crop_mode to be one of {TRAIN_CROP_MODES}, but got '{train_crop_mode}'.")
    if timm_kwargs.get('crop_mode') not in (None, *CROP_MODES):
        raise UsageError(f"Expected crop_mode to be one of {CROP_MODES}, but got '{timm_kwargs['crop_mode']}'.")
    multiscale = train_crop_mode == 'multiscale' and is_training and not timm_kwargs.get('no_aug')
    if multiscale:
        _check_multiscale_options(timm_kwargs)
        timm_kwargs.setdefault('color_jitter', None)  # the paper's transform has none
    if decoder == 'torchvision':
        _check_tensor_options(is_training, train_crop_mode, timm_kwargs)

    transform = timm_create_transform(
        input_size,
        is_training=is_training,
        use_prefetcher=use_prefetcher,
        train_crop_mode=None if train_crop_mode == 'multiscale' else train_crop_mode,
        **timm_kwargs,
    )
    parts = transform if isinstance(transform, tuple) else (transform,)
    if multiscale:
        stages = parts[0].transforms
        assert isinstance(stages[0], RandomResizedCropAndInterpolation)
        stages[0] = MultiScaleCrop(stages[0].size, interpolation=timm_kwargs.get('interpolation', 'bilinear'))
    if decoder == 'torchvision':
        for part in parts:
            part.transforms = [
                stage if isinstance(stage, MultiScaleCrop) else _to_tensor_stage(stage) for stage in part.transforms]
    return transform
