""" Some of the images of another reader """
import logging
from typing import BinaryIO, Callable, Optional, Sequence

import torch

from ...errors import UsageError
from .base import Folders, MultiLabelReader

_logger = logging.getLogger(__name__)


class ReaderSubset(MultiLabelReader):
    """ Some of the images of a reader, in their order.

    Args:
        reader: The reader of all images.
        indices: Indices of the images to keep, increasing.
    """

    def __init__(self, reader: MultiLabelReader, indices: Sequence[int]):
        # The constructor of the base class is not called: not every reader has paths.
        self.reader = reader
        self.indices = torch.as_tensor(indices, dtype=torch.int64)
        self.targets = reader.targets[self.indices]
        self.labels_file = reader.labels_file
        self._set_classes(reader.class_names, reader.root)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[BinaryIO, torch.Tensor]:
        return self.reader[int(self.indices[index])][0], self.targets[index].float()

    @property
    def paths(self) -> list[str]:
        return [self.reader.paths[index] for index in self.indices.tolist()]

    @property
    def image_folder(self) -> Optional[str]:
        return self.reader.image_folder

    @property
    def epoch_order(self) -> Optional[Callable[[int, int], torch.Tensor]]:
        return None if self.reader.epoch_order is None else self._epoch_order

    def _epoch_order(self, seed: int, epoch: int) -> torch.Tensor:
        places = torch.full((len(self.reader),), -1)
        places[self.indices] = torch.arange(len(self))
        order = places[self.reader.epoch_order(seed, epoch)]
        return order[order >= 0]

    def locations(self) -> list[str]:
        locations = self.reader.locations()
        return [locations[index] for index in self.indices.tolist()]

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        return self.reader.filename(int(self.indices[index]), basename, absolute)


def without_missing_images(reader: MultiLabelReader) -> MultiLabelReader:
    """Leave out images whose files are missing, with one line in the log."""
    folders = Folders()
    indices = [index for index, path in enumerate(reader.paths) if folders.has(path)]
    missing = len(reader) - len(indices)
    if not missing:
        return reader
    first = next(path for path in reader.paths if not folders.has(path))
    where = reader.labels_file or reader.root
    if not indices:
        raise UsageError(
            f'All {missing:,} images listed in {where} are missing, such as {first}. Set --data-dir or --train-images '
            'to the folder of the images.')
    _logger.warning(
        f'Skipped {missing:,} of the {len(reader):,} images listed in {where}: their files are missing, such as '
        f'{first}.')
    return ReaderSubset(reader, indices)
