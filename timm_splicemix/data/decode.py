""" Image decoding by PIL or torchvision """
import io
import math
import struct
from typing import Optional, Union

import numpy as np
import torch
from PIL import ExifTags, Image, UnidentifiedImageError
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms.v2.functional import pil_to_tensor

from ..errors import UsageError

DECODERS = ('pil', 'torchvision')

# Errors of PIL's plugins for bad data, beside OSError and ValueError
_PIL_ERRORS = (
    ArithmeticError, EOFError, LookupError, RuntimeError, SyntaxError, TypeError, struct.error,
    Image.DecompressionBombError,
)

# Segments before the frame of a JPEG without orientation or colour space: JFIF, tables, comments
_PLAIN_SEGMENTS = (0xE0, 0xDB, 0xC4, 0xDD, 0xFE)

# EXIF orientation: the transpose of PIL, and the flips of (C, H, W), which is transposed before for those above 4
_ROTATIONS = {
    2: (Image.Transpose.FLIP_LEFT_RIGHT, (2,)),
    3: (Image.Transpose.ROTATE_180, (1, 2)),
    4: (Image.Transpose.FLIP_TOP_BOTTOM, (1,)),
    5: (Image.Transpose.TRANSPOSE, ()),
    6: (Image.Transpose.ROTATE_270, (2,)),
    7: (Image.Transpose.TRANSVERSE, (1, 2)),
    8: (Image.Transpose.ROTATE_90, (1,)),
}


def decode_image(
        data: bytes,
        decoder: str = 'pil',
        mode: Optional[str] = 'RGB',
        exif: bool = True,
        scale: float = 1.,
) -> Union[Image.Image, torch.Tensor]:
    """ Decode an image file of any format that PIL reads.

    Both decoders give the same pixels and fail on the same files. 'torchvision' decodes RGB and grayscale JPEG files,
    which is faster, and leaves those that it would decode differently or not at all to PIL. The values of 16-bit
    grayscale images are divided by 256 for modes of 8 bits, where PIL alone would clip them at 255.

    Args:
        data: Content of the file.
        decoder: 'pil' or 'torchvision'.
        mode: PIL mode to convert to; None keeps that of the file.
        exif: Rotate the image according to its EXIF orientation.
        scale: Decode a JPEG file at 1/2, 1/4 or 1/8 of its size, which is faster, if that is at least this fraction.

    Returns:
        A PIL image from 'pil', a tensor (C, H, W) from 'torchvision'; it is uint8 for modes of 8 bits, such as RGB.

    Raises:
        OSError, ValueError: The data is not an image, or is damaged.
    """
    if decoder not in DECODERS:
        raise UsageError(f"Expected decoder to be {' or '.join(DECODERS)}, but got '{decoder}'.")
    fast = decoder == 'torchvision' and mode == 'RGB' and scale > 0.5
    if fast and _is_plain_jpeg(data):
        pixels = _decode_jpeg(data)
        if pixels is not None:
            return pixels
    try:
        with Image.open(io.BytesIO(data)) as image:
            if fast and image.format == 'JPEG' and image.mode in ('RGB', 'L'):
                pixels = _decode_jpeg(data)
                if pixels is not None:
                    return _rotate(pixels, _orientation(image)) if exif else pixels
            if scale <= 0.5:  # other formats than JPEG ignore it
                image.draft(image.mode, tuple(math.ceil(scale * length) for length in image.size))
            image.load()
            file_format = image.format  # a rotated image has none
            if exif:
                image = _rotate(image, _orientation(image))  # after load(), which already rotates TIFF
            if mode:
                image = _to_8_bits(image, file_format, mode).convert(mode)
    except UnidentifiedImageError as error:
        raise OSError(f'its {len(data)} bytes are not in an image format that PIL reads') from error
    except _PIL_ERRORS as error:
        raise OSError(str(error)) from error
    return image if decoder == 'pil' else pil_to_tensor(image)


def convert_image(image: Image.Image, mode: str) -> Image.Image:
    """ Convert a PIL image as `decode_image` converts an image file.

    Args:
        image: The image; its EXIF orientation is applied.
        mode: PIL mode to convert to.
    """
    file_format = image.format
    return _to_8_bits(_rotate(image, _orientation(image)), file_format, mode).convert(mode)


def _to_8_bits(image: Image.Image, file_format: Optional[str], mode: str) -> Image.Image:
    """Divide a 16-bit grayscale image by 256 unless `mode` can hold its values; other images stay as they are."""
    is_16_bit = image.mode.startswith('I;16') or (image.mode == 'I' and file_format in ('PNG', 'PPM'))
    if not is_16_bit or mode[0] in 'IF':
        return image
    return Image.fromarray((np.asarray(image) // 256).astype(np.uint8))


def _is_plain_jpeg(data: bytes) -> bool:
    """ Whether a file is a JPEG that needs no check by PIL: RGB or grayscale, without EXIF.

    torchvision may decode other files as well, after such a check.
    """
    if data[:2] != b'\xff\xd8':
        return False
    place = 2
    while place + 10 <= len(data) and data[place] == 0xFF:
        marker = data[place + 1]
        if marker in (0xC0, 0xC1, 0xC2):  # baseline, extended or progressive frame
            bits, height, width, channels = struct.unpack_from('>BHHB', data, place + 4)
            limit = Image.MAX_IMAGE_PIXELS
            return bits == 8 and channels in (1, 3) and (limit is None or 0 < height * width <= limit)
        if marker not in _PLAIN_SEGMENTS:
            return False
        place += 2 + int.from_bytes(data[place + 2:place + 4], 'big')
    return False


def _decode_jpeg(data: bytes) -> Optional[torch.Tensor]:
    try:
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)  # a copy: torch needs it writable
        return decode_jpeg(buffer, ImageReadMode.RGB)
    except (AttributeError, RuntimeError):
        return None  # no image extension, or a damaged file, which PIL decides on with a readable reason


def _orientation(image: Image.Image) -> int:
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1)
    except (OSError, ValueError, *_PIL_ERRORS):
        return 1  # the pixels are valid even if the EXIF data are not


def _rotate(image: Union[Image.Image, torch.Tensor], orientation: int) -> Union[Image.Image, torch.Tensor]:
    if orientation not in _ROTATIONS:
        return image
    method, flips = _ROTATIONS[orientation]
    if isinstance(image, Image.Image):
        return image.transpose(method)
    if orientation > 4:
        image = image.transpose(1, 2)
    return _channels_first(image.flip(flips).permute(1, 2, 0).contiguous())


def oriented_size(image: Image.Image) -> tuple[int, int]:
    """Width and height of an opened image after the rotation that its EXIF orientation asks for."""
    return image.size[::-1] if _orientation(image) > 4 else image.size


def to_pixels(image: Union[Image.Image, torch.Tensor]) -> torch.Tensor:
    """The pixels (H, W, C) of a decoded image."""
    if isinstance(image, torch.Tensor):
        return image.permute(1, 2, 0)
    return pil_to_tensor(image).permute(1, 2, 0)


def from_pixels(pixels: torch.Tensor, decoder: str, mode: str) -> Union[Image.Image, torch.Tensor]:
    """The decoded image that `to_pixels` gives these pixels (H, W, C) for."""
    if decoder == 'torchvision':
        return _channels_first(pixels)
    height, width = pixels.shape[:2]
    return Image.frombytes(mode, (width, height), pixels.contiguous().numpy().tobytes())


def _channels_first(pixels: torch.Tensor) -> torch.Tensor:
    """(C, H, W) in the memory format of decoded JPEG files."""
    return pixels.permute(2, 0, 1)
