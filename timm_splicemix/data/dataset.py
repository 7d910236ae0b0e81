""" timm data sets that say which file is broken, and one whose targets are multi-hot """
from typing import Any, Callable, Optional

import torch
from PIL import Image
from timm.data import ImageDataset

from ..errors import UsageError
from .decode import decode_image
from .readers.base import MultiLabelReader


class BadImageError(UsageError, OSError):
    """ An image that can't be read.

    Args:
        path: The file; or, if there is no reason, the whole message, as torch makes anew what a worker raised.
        reason: What went wrong.
    """

    def __init__(self, path: str, reason: Optional[object] = None):
        super().__init__(path if reason is None else f'Expected a readable image, but got {path}: {reason}')
        self.path = path
        self.reason = '' if reason is None else str(reason)

    def __reduce__(self):
        return type(self), (self.path, self.reason or None)


class StrictImageDataset(ImageDataset):
    """ timm's `ImageDataset`, which raises `BadImageError` where timm gives another image.

    The attribute `decoder` chooses what decodes images, see `decode_image`; transforms must fit it.
    """
    decoder = 'pil'
    exif = False  # as in timm

    @property
    def class_names(self) -> Optional[list[str]]:
        """Names of the classes, None if the reader does not know them."""
        class_to_idx = getattr(self.reader, 'class_to_idx', None)
        return sorted(class_to_idx, key=class_to_idx.get) if class_to_idx else None

    @property
    def num_classes(self) -> Optional[int]:
        return None if self.class_names is None else len(self.class_names)

    def __getitem__(self, index: int):
        try:
            file, target, *features = self.reader[index]
            with file:
                image = file.read()
            if not self.load_bytes:
                image = decode_image(image, self.decoder, self.input_img_mode, exif=self.exif)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise BadImageError(self.reader.filename(index, absolute=True), error) from error
        if self.transform is not None:
            image = self.transform(image)
        if target is None:
            target = -1
        elif self.target_transform is not None:
            target = self.target_transform(target)
        return (image, target) if self.additional_features is None else (image, target, *features)


class MultiLabelDataset(StrictImageDataset):
    """ Images, upright if their EXIF says how, with multi-hot float targets.

    Args:
        reader: Gives files and targets.
        transform: Applied to each image.
        target_transform: Applied to each target.
        input_img_mode: Mode that images are converted to.
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
