""" Parts of a split, such as images to train on and images to validate on, and the file that lists them """
import copy
import logging
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Mapping, Union

import torch
from timm.data.readers.reader_image_folder import ReaderImageFolder

from ..errors import UsageError
from ..files import read_json, write_json
from .dataset import MultiLabelDataset, StrictImageDataset
from .readers.subset import ReaderSubset
from .splits import own_split
from .stratify import stratified_split

_logger = logging.getLogger(__name__)
PARTITION = 'split.json'  # in the folder of a run


@dataclass(frozen=True)
class Partition:
    """ The images of each part of a split.

    Args:
        source: Split of the data set that was divided.
        parts: Images of each part, by its name: train, val, ...
        origin: What the parts were made from, for people.
    """
    source: str
    parts: dict[str, list[str]]
    origin: dict[str, Any] = field(default_factory=dict)

    def has(self, split: str) -> bool:
        return own_split(split) in self.parts

    def select(self, dataset: torch.utils.data.Dataset, split: str, skip_missing: bool = False) -> StrictImageDataset:
        """Keep the images of one part, see `indices`; the data set of all images stays as it is."""
        return _subset(dataset, self.indices(dataset, split, skip_missing))

    def indices(self, dataset: torch.utils.data.Dataset, split: str, skip_missing: bool = False) -> list[int]:
        """ Find the images of one part.

        Args:
            dataset: Data set of all images.
            split: Name of the part, or timm's name of it ('validation').
            skip_missing: Leave out images that the data set lacks, with one line in the log; otherwise they are an
                error.
        """
        name = own_split(split)
        if name not in self.parts:
            raise UsageError(f"The file of the split has no part '{name}'. Its parts: {', '.join(self.parts)}.")
        check_divisible(dataset)
        places = {image: index for index, image in enumerate(_image_names(dataset))}
        missing = [image for image in self.parts[name] if image not in places]
        which = f"{len(missing):,} of the {len(self.parts[name]):,} images of part '{name}'"
        if missing and (not skip_missing or len(missing) == len(self.parts[name])):
            raise UsageError(
                f'{which} are not in the data set, or their files are missing, such as {missing[0]}. Use the data that '
                'was split (--data-dir, --train-ann, --train-images), or split it again.')
        if missing:
            _logger.warning(f'Skipped {which}, which are not in the data set, such as {missing[0]}.')
        unused = len(places) - sum(map(len, self.parts.values()))
        if unused > 0:
            _logger.warning(f'{unused:,} images of the data set are in no part of the split and are not used.')
        return sorted(places[image] for image in self.parts[name] if image in places)


def divide(
        dataset: torch.utils.data.Dataset,
        fractions: Mapping[str, float],
        source: str,
        seed: int = 0,
        origin: Mapping[str, Any] = (),
) -> Partition:
    """ Divide a data set into parts in which every class has its share, see `stratified_split`.

    Args:
        dataset: The data set.
        fractions: Name of each part and its size relative to the whole.
        source: Split that the data set is.
        seed: Random seed.
        origin: What to record about the data set.
    """
    check_divisible(dataset)
    names = _image_names(dataset)
    numbers = stratified_split(multi_hot_targets(dataset), list(fractions.values()), seed).tolist()
    parts: dict[str, list[str]] = {part: [] for part in fractions}
    for image, number in zip(names, numbers):
        parts[list(parts)[number]].append(image)
    return Partition(source, parts, {**dict(origin), 'seed': seed, 'fractions': dict(fractions)})


def check_divisible(dataset: torch.utils.data.Dataset) -> None:
    """Raise an error for a data set that can't be divided: its labels or images are known only while it is read."""
    reader = getattr(dataset, 'reader', None)
    if not isinstance(dataset, MultiLabelDataset) and not isinstance(reader, ReaderImageFolder):
        raise UsageError(
            f'Expected a multi-label data set or folders of classes to split, but got {type(dataset).__name__}: use '
            "the data set's own splits.")


def read_partition(path: Union[str, Path]) -> Partition:
    content = read_json(path)
    parts = content.get('parts') if isinstance(content, dict) else None
    if not isinstance(parts, dict) or not parts or not all(
            isinstance(images, list) and images and all(isinstance(image, str) for image in images)
            for images in parts.values()):
        raise UsageError(f'Expected a file of "parts", each with a list of images, but got {path}. Write it by '
                         "'timm-splicemix split'.")
    image, count = Counter(image for images in parts.values() for image in images).most_common(1)[0]
    if count > 1:
        raise UsageError(f'{path} lists {image} more than once: each image belongs to one part.')
    return Partition(str(content.get('source', 'train')), parts, dict(content.get('origin') or {}))


def write_partition(partition: Partition, path: Union[str, Path]) -> None:
    write_json({'source': partition.source, 'origin': partition.origin, 'parts': partition.parts}, path)


def _image_names(dataset: StrictImageDataset) -> list[str]:
    """A unique name of each image: its path in the data set, numbered if it occurs again."""
    root = os.path.join(str(dataset.reader.root), '')  # names of samples in shards begin with it
    names = [dataset.filename(index).removeprefix(root) for index in range(len(dataset))]
    if len(set(names)) == len(names):
        return names
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        unique.append(f'{name}#{seen[name]}' if seen[name] else name)
        seen[name] += 1
    return unique


def multi_hot_targets(dataset: StrictImageDataset) -> torch.Tensor:
    """(N, classes) labels of all images, also of folders of one class each."""
    if isinstance(dataset, MultiLabelDataset):
        return dataset.targets
    classes = torch.tensor([target for _, target in dataset.reader.samples])
    return torch.nn.functional.one_hot(classes)


def _subset(dataset: StrictImageDataset, indices: list[int]) -> StrictImageDataset:
    reader = dataset.reader
    if isinstance(dataset, MultiLabelDataset):
        return MultiLabelDataset(
            ReaderSubset(reader, indices), dataset.transform, dataset.target_transform, dataset.input_img_mode)
    part = copy.copy(dataset)
    part.reader = copy.copy(reader)
    part.reader.samples = [reader.samples[index] for index in indices]
    return part
