""" timm's `ImageDataset` with strict errors, and its multi-label version """
import contextlib
import os
from pathlib import Path
from typing import Any, Callable, Iterator, Optional, Union

import numpy as np
import torch
import torch.utils.data
from PIL import Image
from timm.data import ImageDataset
from timm.data.readers.reader_image_folder import ReaderImageFolder

from ..errors import UsageError
from ..files import open_regular
from .decode import decode_image, from_pixels, to_pixels
from .encoded import EncodedImage, UndecodableImage
from .pixel_cache import PixelCache, open_pixel_cache
from .readers.base import MultiLabelReader


class BadImageError(UsageError, OSError):
    """ An unreadable image.

    Args:
        path: The file, or the whole message if there is no reason: torch rebuilds errors of workers from their message.
        reason: What went wrong.
    """

    def __init__(self, path: str, reason: Optional[object] = None):
        super().__init__(path if reason is None else f'Cannot read image {path}: {reason}')
        self.path = path
        self.reason = '' if reason is None else str(reason)

    def __reduce__(self):
        return type(self), (self.path, self.reason or None)


class StrictImageDataset(ImageDataset):
    """ timm's `ImageDataset`, which raises `BadImageError` where timm returns another image.

    The attribute `decoder` is that of `decode_image`; the transform must fit it.
    """
    decoder = 'pil'
    exif = False  # as in timm
    pixels: Optional[PixelCache] = None
    scaled_decoding = False  # give the transform an `EncodedImage`

    @property
    def class_names(self) -> Optional[list[str]]:
        """Names of the classes, None if the reader does not have them."""
        class_to_idx = getattr(self.reader, 'class_to_idx', None)
        return sorted(class_to_idx, key=class_to_idx.get) if class_to_idx else None

    @property
    def num_classes(self) -> Optional[int]:
        return None if self.class_names is None else len(self.class_names)

    def _open(self, index: int) -> tuple:
        if type(self.reader) is not ReaderImageFolder:
            return self.reader[index]
        path, target = self.reader.samples[index]
        return open_regular(path), target  # timm's reader would wait for a pipe

    def _transform(self, image: Any, index: int) -> Any:
        try:
            return self.transform(image)
        except UsageError:
            raise
        except UndecodableImage as error:
            raise BadImageError(self.reader.filename(index, absolute=True), error) from error
        except Exception as error:  # of any library; without the file, nobody could find the image
            name = self.reader.filename(index, absolute=True)
            raise RuntimeError(f'Cannot transform image {name}: {error or repr(error)}') from error

    def use_cache(self, place: Union[str, Path], size: Optional[int] = None) -> None:
        """ Keep decoded images in memory or in a file, see `open_pixel_cache`.

        Args:
            place: 'ram' or a folder.
            size: Length of the shorter side that larger images are resized to; None keeps their pixels exactly.
        """
        paths = self._paths()
        if paths is None:
            raise UsageError('--cache needs images in files of their own, which this data set lacks. Leave it out.')
        stamps = np.zeros((len(paths), 2), np.int64)
        for index, path in enumerate(paths):
            with contextlib.suppress(OSError):
                status = os.stat(path)
                stamps[index] = status.st_size, status.st_mtime_ns
        self.pixels = open_pixel_cache(
            place, [os.path.abspath(path) for path in paths], stamps, lambda index: open_regular(paths[index]),
            self.input_img_mode, self.exif, size)

    def _paths(self) -> Optional[list[str]]:
        if type(self.reader) is ReaderImageFolder:
            return [path for path, _ in self.reader.samples]
        return None if getattr(self.reader, 'image_folder', None) is None else self.reader.paths

    def _target(self, index: int) -> Any:
        if type(self.reader) is ReaderImageFolder:
            return self.reader.samples[index][1]
        return self.reader.targets[index].float()

    def _load(self, index: int) -> tuple:
        """Image and target, and more with `additional_features`."""
        cached = None if self.pixels is None else self.pixels.read(index)
        if cached is not None:
            return from_pixels(cached, self.decoder, self.input_img_mode), self._target(index)
        file, target, *features = self._open(index)
        with file:
            image = file.read()
        if self.scaled_decoding:
            image = EncodedImage(image, self.decoder, self.input_img_mode, self.exif)
        elif not self.load_bytes:
            image = decode_image(image, self.decoder, self.input_img_mode, exif=self.exif)
        if self.pixels is not None:
            image = from_pixels(self.pixels.write(index, to_pixels(image)), self.decoder, self.input_img_mode)
        return image, target, *features

    def __getitem__(self, index: int):
        try:
            image, target, *features = self._load(index)
        except UsageError:  # a bad label
            raise
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise BadImageError(self.reader.filename(index, absolute=True), error) from error
        if self.transform is not None:
            image = self._transform(image, index)
        if target is None:
            target = -1
        elif self.target_transform is not None:
            target = self.target_transform(target)
        return (image, target) if self.additional_features is None else (image, target, *features)


class MultiLabelDataset(StrictImageDataset):
    """ Images, rotated according to their EXIF orientation, with multi-hot float targets.

    Args:
        reader: Reader of files and targets.
        transform: Applied to each image.
        target_transform: Applied to each target.
        input_img_mode: PIL mode that images are converted to.
    """
    exif = True

    def __init__(
            self,
            reader: MultiLabelReader,
            transform: Optional[Callable[[Any], Any]] = None,
            target_transform: Optional[Callable[[torch.Tensor], Any]] = None,
            input_img_mode: str = 'RGB',
    ):
        super().__init__(
            reader.root,
            reader=reader,
            transform=transform,
            target_transform=target_transform,
            input_img_mode=input_img_mode,
        )

    @property
    def targets(self) -> torch.Tensor:
        """(N, classes) int8: 1 present, 0 absent, -1 unknown."""
        return self.reader.targets


class _Problems(torch.utils.data.Dataset):
    def __init__(self, dataset: StrictImageDataset):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Optional[str]:
        try:
            self.dataset[index]
        except BadImageError as error:
            return f'{error.path}: {error.reason}'
        except UsageError as error:  # a bad label in a shard
            return str(error)
        return None


def find_bad_images(dataset: StrictImageDataset, workers: int) -> Iterator[Optional[str]]:
    """Read every image in worker processes (0: in this one); yields None or the file and what is wrong with it."""
    loader = torch.utils.data.DataLoader(_Problems(dataset), batch_size=16, num_workers=workers, collate_fn=list)
    for problems in loader:
        yield from problems
