""" Images that are decoded when it is known which part of them is needed, at which size """
import io
from typing import Optional, Sequence, Union

import torch
from PIL import Image

from .decode import decode_image, oriented_size

Box = tuple[int, int, int, int]  # top, left, height, width


class UndecodableImage(Exception):
    """ An image whose header can be read, but not its pixels. """


class EncodedImage:
    """ The content of an image file.

    Args:
        data: Content of the file.
        decoder, mode, exif: Arguments of `decode_image`.
    """

    def __init__(self, data: bytes, decoder: str, mode: Optional[str], exif: bool):
        self.data = data
        self.options = {'decoder': decoder, 'mode': mode, 'exif': exif}
        with Image.open(io.BytesIO(data)) as image:
            self.width, self.height = oriented_size(image) if exif else image.size

    def decode(self, scale: float = 1.) -> Union[Image.Image, torch.Tensor]:
        """Decode the image at `scale` of its size, or at a larger one, see `decode_image`."""
        try:
            return decode_image(self.data, scale=scale, **self.options)
        except (OSError, ValueError) as error:
            raise UndecodableImage(str(error)) from error

    def decode_box(
            self,
            box: Optional[Box],
            size: Sequence[int],
    ) -> tuple[Union[Image.Image, torch.Tensor], Optional[Box]]:
        """Decode the image so that a box of it (None: all) has at least this height and width; returns both."""
        top, left, height, width = box or (0, 0, self.height, self.width)
        image = self.decode(max(size[0] / height, size[1] / width))
        new_width, new_height = image.size if isinstance(image, Image.Image) else image.shape[:0:-1]
        if box is None or (new_height, new_width) == (self.height, self.width):
            return image, box
        rows = [round(row * new_height / self.height) for row in (top, top + height)]
        columns = [round(column * new_width / self.width) for column in (left, left + width)]
        return image, (rows[0], columns[0], max(rows[1] - rows[0], 1), max(columns[1] - columns[0], 1))
