""" timm data sets that say which file is broken, and one whose targets are multi-hot """
from typing import Any, BinaryIO, Callable, Optional

import torch
from PIL import Image
from timm.data import ImageDataset

from .reader import MultiLabelReader


class StrictImageDataset(ImageDataset):
    """timm's `ImageDataset`, which names the file of an image that can't be read instead of giving another image."""

    def __getitem__(self, index: int):
        try:
            file, target, *features = self.reader[index]
            with file:
                image = file.read() if self.load_bytes else self._decode(file)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            path = self.reader.filename(index, absolute=True)
            raise OSError(f'Expected a readable image, but got {path}: {error}') from error
        if self.transform is not None:
            image = self.transform(image)
        if target is None:
            target = -1
        elif self.target_transform is not None:
            target = self.target_transform(target)
        return (image, target) if self.additional_features is None else (image, target, *features)

    def _decode(self, file: BinaryIO) -> Image.Image:
        with Image.open(file) as image:
            image.load()  # here, where what goes wrong can be told by the file's name
            return image.convert(self.input_img_mode) if self.input_img_mode else image


class MultiLabelDataset(StrictImageDataset):
    """ Images with multi-hot float targets.

    Args:
        reader: Gives files and targets.
        transform: Applied to each image.
        target_transform: Applied to each target.
        input_img_mode: Mode that PIL converts images to.
    """

    def __init__(
            self,
            reader: MultiLabelReader,
            transform: Optional[Callable[[Image.Image], Any]] = None,
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
    def class_names(self) -> list[str]:
        return self.reader.class_names

    @property
    def num_classes(self) -> int:
        return len(self.reader.class_names)

    @property
    def targets(self) -> torch.Tensor:
        """(N, classes) int8: 1 present, 0 absent, -1 unknown."""
        return self.reader.targets
