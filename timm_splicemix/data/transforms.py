""" timm's transforms for PIL images or tensors, and the multi-scale crop of multi-label training """
import random
from typing import Any, Callable, Optional, Sequence, Union

import numpy as np
import torch
from PIL import Image
from timm.data import create_transform as timm_create_transform
from timm.data.auto_augment import AugmentOp
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
from .encoded import Box, EncodedImage

TRAIN_CROP_MODES = ('rrc', 'rkrc', 'rkrr', 'multiscale')
CROP_MODES = ('center', 'squash', 'border')
# Options that a loader passes on; it sets timm's other ones itself, or they change what a sample is.
TRANSFORM_OPTIONS = (
    'train_crop_mode', 'scale', 'ratio', 'hflip', 'vflip', 'color_jitter', 'color_jitter_prob', 'grayscale_prob',
    'gaussian_blur_prob', 'auto_augment', 'interpolation', 'crop_pct', 'crop_mode', 'crop_border_pixels',
    'tf_preprocessing')
TENSOR_INTERPOLATIONS = ('bilinear', 'bicubic', 'random')

PilOrTensor = Union[Image.Image, torch.Tensor]
AnyImage = Union[PilOrTensor, EncodedImage]

# Options that need PIL images, with their flags
_PIL_ONLY_IN_TRAINING = {
    'auto_augment': '--aa',
    'color_jitter': '--color-jitter',
    'grayscale_prob': '--grayscale-prob',
    'gaussian_blur_prob': '--gaussian-blur-prob',
}
_PIL_ONLY = {'naflex': '--naflex-loader', 'tf_preprocessing': '--tf-preprocessing'}

# Stages of timm that accept tensors of the final size as well as PIL images
_ANY_IMAGE = (
    MaybePILToTensor,
    RandomErasing,
    TrimBorder,
    transforms.CenterCrop,
    transforms.ColorJitter,  # of strength 0, it only draws
    transforms.Normalize,
    transforms.RandomApply,  # of ColorJitter
    transforms.RandomVerticalFlip,
)


def crop_and_resize(
        image: AnyImage,
        box: Optional[Box],
        size: Sequence[int],
        interpolation: InterpolationMode = InterpolationMode.BILINEAR,
        channels_last: bool = False,
) -> PilOrTensor:
    """ Crop a box of an image and resize it with antialiasing.

    Args:
        image: PIL image, or uint8 tensor (C, H, W), as decoders return it.
        box: The box; None is the whole image.
        size: Height and width of the result.
        interpolation: Bilinear or bicubic.
        channels_last: Return the pixels of a tensor channels-last, not planar, if they were whole rows. Models compute
            slightly different numbers from another memory format.
    """
    if isinstance(image, EncodedImage):
        image, box = image.decode_box(box, size)
    if isinstance(image, Image.Image):
        return F.resize(image if box is None else F.crop(image, *box), list(size), interpolation)
    if box is not None:
        top, left, height, width = box
        image = image[:, top:top + height, left:left + width]
    if image.shape[1:] == tuple(size):
        return image
    rows = image.permute(1, 2, 0)
    whole_rows = rows.is_contiguous()
    # torch's fast uint8 kernel needs contiguous channels-last pixels. It takes twice the time for image[None], whose
    # first stride is not that of a batch. NumPy copies rows faster than torch. The dispatch of torchvision.transforms
    # would take 5 % of the time from file to tensor.
    pixels = torch.from_numpy(np.ascontiguousarray(rows.numpy()))[None].permute(0, 3, 1, 2)
    resized = interpolate(pixels, tuple(size), mode=interpolation.value, antialias=True)[0]
    return resized.contiguous() if whole_rows and not channels_last else resized


def _draw_interpolation(modes: Union[InterpolationMode, Sequence[InterpolationMode]]) -> InterpolationMode:
    return modes if isinstance(modes, InterpolationMode) else random.choice(modes)


class MultiScaleCrop:
    """ The random crop of SpliceMix and the ML-GCN family.

    The image is resized to 8/7 of the size, ignoring its aspect ratio. Height and width of the crop are fractions
    `scales` of the shorter side, at most `max_distort` steps apart in the list of scales; a length within 2 pixels of
    the size is set to the size. The crop is at one of 13 places: a 3 x 3 grid and the 4 centres between its points.

    Args:
        size: Height and width of the result, or one number for both.
        scales: Fractions in descending order.
        max_distort: Largest distance of the scales of height and width in the list.
        interpolation: 'bilinear', 'bicubic', another name of timm, or 'random', which draws one of the first two.
    """
    # (x, y) in quarters of the margin
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
        """Draw top, left, height and width of a crop from Python's `random`."""
        crop_height, crop_width = random.choice(self.crop_sizes(height, width))
        x, y = random.choice(self.PLACES)
        return y * ((height - crop_height) // 4), x * ((width - crop_width) // 4), crop_height, crop_width

    def __call__(self, image: PilOrTensor) -> PilOrTensor:
        box = self.make_params(*self.squashed_size)
        interpolation = _draw_interpolation(self.interpolation)
        squashed = crop_and_resize(image, None, self.squashed_size, interpolation, channels_last=True)
        return crop_and_resize(squashed, box, self.size, interpolation, channels_last=squashed is not image)

    def __repr__(self) -> str:
        return (
            f'{type(self).__name__}(size={self.size}, scales={self.scales}, max_distort={self.max_distort}, '
            f'interpolation={self.interpolation})')


def _blank(image: AnyImage) -> PilOrTensor:
    """An image of the same size to draw a crop of, without pixels if the image is not decoded yet."""
    return torch.empty(3, image.height, image.width, device='meta') if isinstance(image, EncodedImage) else image


class _OnTensor:
    """A stage of timm for uint8 tensors (C, H, W), with the same draws and nearly the same pixels."""

    def __init__(self, stage: Callable):
        self.stage = stage

    def __repr__(self) -> str:
        return f'{type(self).__name__}({self.stage})'


class _RandomResizedCrop(_OnTensor):
    def __call__(self, image: AnyImage) -> PilOrTensor:
        box = self.stage.get_params(_blank(image), self.stage.scale, self.stage.ratio)
        return crop_and_resize(image, box, self.stage.size, _draw_interpolation(self.stage.interpolation))


class _Resize(_OnTensor):
    def __call__(self, image: AnyImage) -> PilOrTensor:
        size = self.stage.size
        if isinstance(size, int):  # of the shorter side
            height, width = F.get_size(_blank(image))
            size = [int(size * length / min(height, width)) for length in (height, width)]
        return crop_and_resize(image, None, size, self.stage.interpolation)


class _ResizeKeepRatio(_OnTensor):
    def __call__(self, image: AnyImage) -> PilOrTensor:
        size = self.stage.get_params(_blank(image), self.stage.size, self.stage.longest)
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


class _AtLeastOneBit:
    """timm's number of bits that posterization keeps, at least 1, because Pillow 13 refuses 0."""

    def __init__(self, level_fn: Callable):
        self.level_fn = level_fn

    def __call__(self, level: float, hparams: dict[str, Any]) -> tuple[int]:
        return max(1, self.level_fn(level, hparams)[0]),


def _limit_posterize(stage: Callable) -> None:
    """Limit the posterization of AutoAugment, RandAugment and AugMix, which timm keeps in `policy` or `ops`."""
    groups = getattr(stage, 'policy', None) or [getattr(stage, 'ops', ())]
    for operation in (operation for group in groups for operation in group):
        if isinstance(operation, AugmentOp) and operation.name.startswith('Posterize'):
            operation.level_fn = _AtLeastOneBit(operation.level_fn)


_ON_ENCODED = (RandomResizedCropAndInterpolation, ResizeKeepRatio, transforms.Resize)


def _decode(image: EncodedImage) -> PilOrTensor:
    return image.decode()


def _with_decoding(stages: list[Callable]) -> list[Callable]:
    """Stages that start from an `EncodedImage`."""
    first = stages[0]
    if isinstance(first, (MultiScaleCrop, _OnTensor)):
        return stages
    if type(first) in _ON_ENCODED and not getattr(first, 'random_scale_prob', 0):
        return [_ON_TENSOR[type(first)](first), *stages[1:]]
    return [_decode, *stages]


def _to_tensor_stage(stage: Callable) -> Callable:
    if type(stage) in _ON_TENSOR:
        return _ON_TENSOR[type(stage)](stage)
    if isinstance(stage, _ANY_IMAGE):
        return stage
    raise UsageError(
        f"Decoder 'torchvision' does not support the transform {stage}. Use --decoder pil.")


def _check_tensor_options(is_training: bool, train_crop_mode: Optional[str], timm_kwargs: dict[str, Any]) -> None:
    interpolation = timm_kwargs.get('interpolation', 'bilinear')
    if interpolation not in TENSOR_INTERPOLATIONS:
        raise UsageError(
            f"Expected interpolation to be one of {TENSOR_INTERPOLATIONS} for decoder 'torchvision', "
            f"but got '{interpolation}'. Use --decoder pil.")
    augment = is_training and not timm_kwargs.get('no_aug')
    if augment and train_crop_mode in ('rkrc', 'rkrr'):
        raise UsageError(
            f"Expected --train-crop-mode to be rrc or multiscale for decoder 'torchvision', but got "
            f"'{train_crop_mode}'. Use --decoder pil.")
    kwargs = {'color_jitter': 0.4, **timm_kwargs}  # timm's default
    for name, flag in {**_PIL_ONLY, **(_PIL_ONLY_IN_TRAINING if augment else {})}.items():
        value = kwargs.get(name)
        if any(value) if isinstance(value, (tuple, list)) else value:
            raise UsageError(
                f"Decoder 'torchvision' does not support {name} ({flag}), but got {value!r}. Turn it off or use "
                '--decoder pil.')


def _check_multiscale_options(timm_kwargs: dict[str, Any]) -> None:
    if timm_kwargs.get('naflex') or timm_kwargs.get('tf_preprocessing'):
        raise UsageError("train_crop_mode 'multiscale' supports neither naflex nor tf_preprocessing.")
    for name, default in (('scale', (0.08, 1.)), ('ratio', (3 / 4, 4 / 3))):
        value = timm_kwargs.get(name)
        if value is not None and tuple(value) != default:
            raise UsageError(
                f"train_crop_mode 'multiscale' has fixed scales and ratios, but got {name} {value}. Leave --{name} out "
                'or use --train-crop-mode rrc.')


def create_transform(
        input_size: Union[int, tuple[int, int], tuple[int, int, int]],
        is_training: bool = False,
        decoder: str = 'pil',
        use_prefetcher: bool = False,
        train_crop_mode: Optional[str] = None,
        scaled_decoding: bool = False,
        **timm_kwargs: Any,
) -> Union[transforms.Compose, tuple[transforms.Compose, ...]]:
    """ Create the transform of an image, with the names and defaults of timm's function.

    With equal seeds, both decoders crop and flip equally. Bilinear pixels differ by up to 2 of 255 levels, bicubic ones
    by more at sharp edges, because Pillow's order of rows and columns depends on the shape of the image.

    Args:
        input_size: Size of the result, (channels, height, width), (height, width) or one number.
        is_training: Transform at random.
        decoder: Decoder of `decode_image`: 'pil' is timm's transform of PIL images; 'torchvision' transforms uint8
            tensors (C, H, W), is faster, and supports the crops, flips and erasing of timm.
        use_prefetcher: Return uint8 tensors for the prefetcher instead of normalised float tensors.
        train_crop_mode: timm's 'rrc' (default), 'rkrc' or 'rkrr', or 'multiscale', see `MultiScaleCrop`, which has no
            colour jitter by default.
        scaled_decoding: Transform `EncodedImage`s, which are decoded at the size that the crop needs.
        **timm_kwargs: Arguments of timm's `create_transform`: no_aug, scale, hflip, color_jitter, crop_pct, mean, ...

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
    for stage in (stage for part in parts for stage in part.transforms):
        _limit_posterize(stage)
    if multiscale:
        stages = parts[0].transforms
        assert isinstance(stages[0], RandomResizedCropAndInterpolation)
        stages[0] = MultiScaleCrop(stages[0].size, interpolation=timm_kwargs.get('interpolation', 'bilinear'))
    if decoder == 'torchvision':
        for part in parts:
            part.transforms = [
                stage if isinstance(stage, MultiScaleCrop) else _to_tensor_stage(stage) for stage in part.transforms]
    if scaled_decoding:
        parts[0].transforms = _with_decoding(parts[0].transforms)
    return transform
