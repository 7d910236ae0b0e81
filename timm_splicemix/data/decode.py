""" From the bytes of an image file to pixels, by PIL or by torchvision """
import io
import struct
from typing import Optional, Union

import torch
import torchvision
from PIL import ExifTags, Image, UnidentifiedImageError
from torchvision.transforms.v2.functional import pil_to_tensor

from ..errors import UsageError

DECODERS = ('pil', 'torchvision')

# What PIL's plugins raise at bad data beside OSError and ValueError
_PIL_ERRORS = (
    ArithmeticError, EOFError, LookupError, RuntimeError, SyntaxError, TypeError, struct.error,
    Image.DecompressionBombError,
)

# Segments before the frame of a JPEG that say nothing about orientation or colours: JFIF, tables, comments
_PLAIN_SEGMENTS = (0xE0, 0xDB, 0xC4, 0xDD, 0xFE)

# EXIF orientation: what makes an image upright in PIL, and as flips of (C, H, W), transposed before for those above 4
_TURNS = {
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
) -> Union[Image.Image, torch.Tensor]:
    """ Decode an image file of any format that PIL reads.

    Both decoders give the same pixels and fail on the same files. 'torchvision' decodes RGB and grayscale JPEG files
    itself, which is faster, and leaves to PIL what it would decode differently or not at all.

    Args:
        data: The bytes of the file.
        decoder: 'pil' or 'torchvision'.
        mode: PIL mode to convert to; None keeps that of the file.
        exif: Make the image upright if the file says how it was taken.

    Returns:
        A PIL image from 'pil', a tensor (C, H, W) from 'torchvision'; it is uint8 for modes of 8 bits, such as RGB.

    Raises:
        OSError, ValueError: The data is no image, or is damaged.
    """
    if decoder not in DECODERS:
        raise UsageError(f"Expected decoder to be {' or '.join(DECODERS)}, but got '{decoder}'.")
    if decoder == 'torchvision' and mode == 'RGB' and _is_plain_jpeg(data):
        pixels = _decode_jpeg(data)
        if pixels is not None:
            return pixels
    try:
        with Image.open(io.BytesIO(data)) as image:
            if decoder == 'torchvision' and mode == 'RGB' and image.format == 'JPEG' and image.mode in ('RGB', 'L'):
                pixels = _decode_jpeg(data)
                if pixels is not None:
                    return _turn(pixels, _orientation(image)) if exif else pixels
            image.load()
            if exif:
                image = _turn(image, _orientation(image))  # after load(), which already turns TIFF
            if mode:
                image = image.convert(mode)
    except UnidentifiedImageError as error:
        raise OSError(f'none of the formats that PIL knows fits its {len(data)} bytes') from error
    except _PIL_ERRORS as error:
        raise OSError(str(error)) from error
    return image if decoder == 'pil' else pil_to_tensor(image)


def _is_plain_jpeg(data: bytes) -> bool:
    """ Whether a file is, at a glance, a JPEG that PIL need not look at: RGB or grayscale, and upright.

    What is not so plain, a file with EXIF for example, may still be one that torchvision decodes.
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
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)  # of a copy: torch wants it writable
        # The function of torchvision.io around this operator takes a twentieth of its time, to warn in each call.
        return torch.ops.image.decode_jpeg(buffer, torchvision.io.ImageReadMode.RGB.value)
    except RuntimeError:
        return None  # truncated or damaged: PIL's verdict counts, and its reason is readable
    except AttributeError:
        return None  # a torchvision without this operator


def _orientation(image: Image.Image) -> int:
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1)
    except (OSError, ValueError, *_PIL_ERRORS):
        return 1  # pixels are good even where EXIF is garbage


def _turn(image: Union[Image.Image, torch.Tensor], orientation: int) -> Union[Image.Image, torch.Tensor]:
    if orientation not in _TURNS:
        return image
    method, flips = _TURNS[orientation]
    if isinstance(image, Image.Image):
        return image.transpose(method)
    if orientation > 4:
        image = image.transpose(1, 2)
    return image.flip(flips)
