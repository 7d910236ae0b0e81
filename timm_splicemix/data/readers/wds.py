""" Data sets in shards, tar files in the format of webdataset, for more images than one disk holds """
import contextlib
import io
import json
import logging
import os
import re
import tarfile
import uuid
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterator, Optional, Sequence, Union

import numpy as np
import torch
import torch.distributed
import torch.utils.data
from filelock import FileLock
from tqdm import tqdm

from ...errors import UsageError
from ..dataset import BadImageError
from ..decode import decode_image
from ..sampler import distributed_place
from ..seeding import mix_seeds, seeded
from ..splits import split_names
from .base import class_index

_logger = logging.getLogger(__name__)
_IMAGES = ('jpg', 'jpeg', 'png', 'webp')
_LABELS = ('json', 'cls')
_SHARD = re.compile(r'\.(tar|tgz|tbz2?|txz|tar\.\w+)$', re.IGNORECASE)
_COMPRESSED = (b'\x1f\x8b', b'BZh', b'\xfd7zXZ', b'\x28\xb5\x2f\xfd')  # gzip, bzip2, xz, zstd
_BRACES = re.compile(r'\{([^{}]*(?:,|\.\.)[^{}]*)\}')
_MULTI_HOT_FIELDS = ('target', 'multi_hot')
_MULTI_HOT_SUFFIX = ':multi_hot'
_CLASSES = 'classes.txt'
_INDEX = '.tsm_index.json'


class WdsDataset(torch.utils.data.IterableDataset):
    """ Images and multi-hot targets from shards.

    A sample is the members of a tar file that share their name up to the first dot: an image and its labels, in
    `<key>.json` as {"labels": [names or indices]} or in `<key>.cls` as indices. Processes and workers share the samples
    of an epoch out: in training every process has the same number of full batches, no sample comes twice and those
    that are left over differ from epoch to epoch; in evaluation each sample comes exactly once. Batches do not depend
    on the number of workers, provided that the loader's batch size is `batch_size`.

    Args:
        root: Folder of the shards.
        name: Folder of the shards in root, or an expression for them ('train-{000..003}.tar', '*.tar').
        split: Split: shards in the folder of that name or with that word in their name; or an expression.
        class_names: Name of each class; None reads `classes.txt` beside the shards or in root, a class per line.
        transform: Applied to each image, seeded by (seed, epoch, sample).
        target_transform: Applied to each target.
        input_img_mode: Mode that images are converted to.
        is_training: Shuffle, and leave out what doesn't fill a batch on every process.
        batch_size: Samples in a batch of one process.
        seed: Seed of the shuffle and of the transforms.
        label_key: Field of the JSON files. None is 'labels', else 'target' or 'multi_hot', whose value is the
            multi-hot list itself; 'field:multi_hot' says the same of another field.
        shuffle_size: A sample moves by less than this many places after the shards were shuffled.
        rank: Index of this process; None asks torch.distributed.
        world_size: Number of processes; None asks torch.distributed.
    """
    decoder = 'pil'  # see `decode_image`
    exif = True

    def __init__(
            self,
            root: Union[str, Path],
            name: str = '',
            split: str = 'train',
            class_names: Optional[Sequence[str]] = None,
            transform: Optional[Callable[[Any], Any]] = None,
            target_transform: Optional[Callable[[torch.Tensor], Any]] = None,
            input_img_mode: str = 'RGB',
            is_training: bool = False,
            batch_size: int = 1,
            seed: int = 0,
            label_key: Optional[str] = None,
            shuffle_size: int = 1000,
            rank: Optional[int] = None,
            world_size: Optional[int] = None,
    ):
        super().__init__()
        if batch_size < 1 or shuffle_size < 1:
            raise UsageError(f'Expected batch_size and shuffle_size >= 1, but got {batch_size} and {shuffle_size}.')
        self.root = str(root)
        self.transform = transform
        self.target_transform = target_transform
        self.input_img_mode = input_img_mode
        self.label_key = label_key
        self.shuffle_size = shuffle_size
        self.shards = find_shards(root, name, split)
        self.class_names = _read_class_names(Path(root), name) if class_names is None else list(class_names)
        self.class_to_idx = {name: index for index, name in enumerate(self.class_names)}
        if len(self.class_to_idx) != len(self.class_names):
            double = next(name for name in self.class_names if self.class_names.count(name) > 1)
            raise UsageError(f"Expected each class once, but got '{double}' twice.")
        self._offsets = index_shards(root, self.shards)
        self._counts = np.array([len(offsets) - 1 for offsets in self._offsets])
        self._ends = self._counts.cumsum()
        self.num_samples = int(self._ends[-1])
        # Shared, so that it reaches workers that live on from the epoch before: (epoch, first batch).
        self._position = torch.zeros(2, dtype=torch.int64).share_memory_()
        self.set_batches(batch_size, is_training, seed, rank, world_size)

    def set_batches(
            self,
            batch_size: int,
            is_training: bool,
            seed: int,
            rank: Optional[int] = None,
            world_size: Optional[int] = None,
    ) -> None:
        """ Say how the samples are going to be batched, as processes and workers share whole batches out.

        Args:
            batch_size: Samples in a batch of one process.
            is_training: Shuffle, and leave out what doesn't fill a batch on every process.
            seed: Seed of the shuffle and of the transforms.
            rank: Index of this process; None asks torch.distributed.
            world_size: Number of processes; None asks torch.distributed.
        """
        self.batch_size, self.is_training, self.seed = batch_size, is_training, seed
        self.rank, self.world_size = distributed_place(rank, world_size)
        if is_training and self.num_samples < self.world_size * batch_size:
            raise UsageError(
                f'Expected at least one batch of {batch_size} for each of {self.world_size} processes, but got '
                f'{self.num_samples} samples in {self.root}: lower the batch size.')
        if self.remainder and self.rank == 0:
            _logger.info(
                f'{self.remainder} of {self.num_samples} samples fill no batch of {batch_size} on {self.world_size} '
                'processes and are left out, others in each epoch.')

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def remainder(self) -> int:
        """Samples that an epoch leaves out, over all processes."""
        return self.num_samples - self.world_size * len(self) if self.is_training else 0

    def __len__(self) -> int:
        """Samples of this process in an epoch."""
        start, end = self._range()
        return end - start

    def _range(self) -> tuple[int, int]:
        """The part of the epoch's order that is this process's."""
        if self.is_training:
            size = self.num_samples // self.world_size // self.batch_size * self.batch_size
            return self.rank * size, (self.rank + 1) * size
        return tuple(rank * self.num_samples // self.world_size for rank in (self.rank, self.rank + 1))

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        """ Choose what the next iteration gives.

        Args:
            epoch: Epoch, which decides order and augmentation.
            start_batch: Batches of this process to skip, to resume within an epoch.
        """
        self._position[0] = epoch
        self._position[1] = start_batch

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """After a `BadImageError` the iterator goes on with the next sample, if it is asked for it."""
        epoch, start_batch = self.position  # now: it may have moved on when the last sample is asked for
        return map(partial(self.load, epoch), self.indices(epoch, start_batch))

    @property
    def position(self) -> tuple[int, int]:
        """Epoch and first batch of the next iteration."""
        return tuple(self._position.tolist())

    def filename(self, index: int) -> str:
        """The shard of a sample, and its number there."""
        shard, row = self._find(index)
        return f'{self.shards[shard]}:{row}'

    def _find(self, index: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self._ends, index, side='right'))
        return shard, index - int(self._ends[shard] - self._counts[shard])

    def indices(self, epoch: int, start_batch: int) -> Iterator[int]:
        """The samples of this process and worker."""
        order = np.arange(self.num_samples)
        if self.is_training:
            order = epoch_order(self._counts, self.shuffle_size, self.seed, epoch)
        order = order[slice(*self._range())]
        worker = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        # A loader takes its i-th batch from worker i % step.
        for start in range((start_batch + first) * self.batch_size, len(order), step * self.batch_size):
            yield from order[start:start + self.batch_size].tolist()

    def load(self, epoch: int, index: int) -> tuple[Any, Any]:
        """One sample, with the transforms of an epoch."""
        shard, row = self._find(index)
        path = self.shards[shard]
        members = _read_members(path, *self._offsets[shard][row:row + 2].tolist())
        image_name, image = next(members[extension] for extension in _IMAGES if extension in members)
        target = self._target(members, path)
        try:
            image = decode_image(image, self.decoder, self.input_img_mode, exif=self.exif)
        except (OSError, ValueError) as error:
            raise BadImageError(f'{path}:{image_name}', error) from error
        with seeded(self.seed, epoch, index):
            image = image if self.transform is None else self.transform(image)
            target = target if self.target_transform is None else self.target_transform(target)
        return image, target

    def _target(self, members: dict[str, tuple[str, bytes]], shard: str) -> torch.Tensor:
        field = (self.label_key or '').removesuffix(_MULTI_HOT_SUFFIX)
        multi_hot_fields = _MULTI_HOT_FIELDS if field == (self.label_key or '') else (field,)
        fields = (field,) if field else ('labels', *_MULTI_HOT_FIELDS)
        content = {}
        where = shard
        if 'json' in members:
            where = f'{shard}:{members["json"][0]}'
            try:
                content = json.loads(members['json'][1])
            except ValueError as error:
                raise UsageError(f'Expected JSON, but got {where}: {error}') from error
        found = next((name for name in fields if name in content), None) if isinstance(content, dict) else None
        if found is None and ('cls' not in members or field):
            raise UsageError(
                f"Expected the field {' or '.join(fields)}, but got {content} in {where}: name the field as label_key.")
        if found in multi_hot_fields:
            return self._from_flags(content[found], where)
        if found is not None:
            return self._from_labels(content[found], where)
        where = f'{shard}:{members["cls"][0]}'
        text = members['cls'][1].decode(errors='replace')
        try:
            labels = [int(label) for label in text.replace(',', ' ').split()]
        except ValueError as error:
            raise UsageError(f"Expected indices of classes, but got '{text.strip()}' in {where}.") from error
        return self._from_labels(labels, where)

    def _from_labels(self, labels: Any, where: str) -> torch.Tensor:
        if not isinstance(labels, list):
            raise UsageError(f'Expected a list of labels, but got {labels!r} in {where}.')
        target = torch.zeros(self.num_classes)
        for label in labels:
            if isinstance(label, str):
                label = class_index(label, self.class_to_idx, where)
            elif type(label) is not int or not 0 <= label < self.num_classes:
                raise UsageError(
                    f'Expected names or indices of the {self.num_classes} classes, but got {label!r} in {where}.')
            target[label] = 1
        return target

    def _from_flags(self, flags: Any, where: str) -> torch.Tensor:
        if (not isinstance(flags, list) or len(flags) != self.num_classes
                or not all(isinstance(flag, (int, float)) and flag in (-1, 0, 1) for flag in flags)):
            raise UsageError(
                f'Expected a list of {self.num_classes} values among 0, 1 and -1, but got {flags!r} in {where}.')
        return torch.tensor(flags, dtype=torch.float32)


def epoch_order(counts: Sequence[int], shuffle_size: int, seed: int, epoch: int) -> np.ndarray:
    """ The order of an epoch's samples, numbered through all shards.

    Shards are permuted; then each sample moves by less than shuffle_size places, so that a process that reads a part
    of the order needs few shards at a time.

    Args:
        counts: Samples in each shard.
        shuffle_size: Bound of the moves; 1 keeps the order within shards.
        seed: Seed.
        epoch: Epoch.
    """
    generator = np.random.RandomState(mix_seeds(seed, epoch))  # its stream is the same in every version of numpy
    ends = np.cumsum(counts)
    order = np.concatenate([np.arange(ends[i] - counts[i], ends[i]) for i in generator.permutation(len(counts))])
    places = np.arange(len(order)) + generator.random_sample(len(order)) * shuffle_size
    return order[np.argsort(places, kind='stable')]


def find_shards(root: Union[str, Path], name: str = '', split: str = 'train') -> list[str]:
    """ The shards of a split, sorted.

    Args:
        root: Folder of the data set.
        name: Folder in root, or an expression with braces and wildcards.
        split: Name of the split, or an expression.
    """
    folder = Path(root)
    if not folder.is_dir():
        raise UsageError(f'Expected the folder of the shards, but got {root}, which does not exist.')
    if _SHARD.search(name):
        shards = _expand(folder, name)
    else:
        folder = folder / name
        shards = _expand(folder, split) if _SHARD.search(split) else _search(folder, split)
    if not shards:
        raise UsageError(
            f"Expected the shards of split '{split}' as {split}-*.tar, *{split}*.tar or {split}/*.tar in {folder}, but "
            "got none: rename them, or give an expression such as 'data-{000..003}.tar' as name or split.")
    compressed = next((shard for shard in shards if not shard.lower().endswith('.tar')), None)
    if compressed:
        raise _compressed_error(compressed)
    return shards


def index_shards(root: Union[str, Path], shards: Sequence[str]) -> list[np.ndarray]:
    """ Where the samples of each shard are, from an index that is kept in root if root can be written.

    Args:
        root: Folder of the data set.
        shards: Path of each shard.

    Returns:
        The offset of each sample in its shard, in bytes, and the end of the last one.
    """
    cache = Path(root) / _INDEX
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, NotImplementedError):
            # One process scans, the others wait and read.
            stack.enter_context(FileLock(Path(root) / '.tsm_index.lock'))
        known = _read_index(cache)
        stats = {os.path.relpath(shard, root): os.stat(shard) for shard in shards}
        stamps = {shard: [stat.st_size, stat.st_mtime_ns] for shard, stat in stats.items()}
        new = [shard for shard, stamp in stamps.items() if known.get(shard, {}).get('stamp') != stamp]
        for shard in tqdm(new, desc='Index shards', disable=None, leave=False):
            known[shard] = {'stamp': stamps[shard], 'offsets': _scan(os.path.join(root, shard))}
        if new:
            _write_index(cache, known)
    return [np.array(known[shard]['offsets'], dtype=np.int64) for shard in stamps]


def _read_class_names(root: Path, name: str) -> list[str]:
    file = root / name / _CLASSES
    file = file if file.is_file() else root / _CLASSES
    if not file.is_file():
        raise UsageError(
            f'Expected the name of each class on a line of {file}, but got no such file: write it, or give '
            'class_names.')
    names = [line.strip() for line in file.read_text(encoding='utf-8').splitlines()]
    names = [name for name in names if name]
    if not names:
        raise UsageError(f'Expected the name of each class on a line of {file}, but got an empty file.')
    return names


def _braces(expression: str) -> list[str]:
    """Expand {000..003} and {a,b} as shells do."""
    match = _BRACES.search(expression)
    if match is None:
        return [expression]
    bounds = re.fullmatch(r'(\d+)\.\.(\d+)', match[1])
    if bounds:
        width = len(bounds[1]) if bounds[1].startswith('0') else 0
        parts = [f'{number:0{width}d}' for number in range(int(bounds[1]), int(bounds[2]) + 1)]
    else:
        parts = match[1].split(',')
    return [text for part in parts for text in _braces(expression[:match.start()] + part + expression[match.end():])]


def _expand(folder: Path, expression: str) -> list[str]:
    shards = []
    for pattern in _braces(expression):
        found = sorted(str(path) for path in folder.glob(pattern) if path.is_file())
        if not found:
            raise UsageError(f"Expected shards for '{expression}', but got no {pattern} in {folder}.")
        shards += found
    return sorted(dict.fromkeys(shards))


def _search(folder: Path, split: str) -> list[str]:
    """The shards of the first of the split's names that has some, most specific place first."""
    def shards_in(place: Path) -> list[Path]:
        return sorted(p for p in place.iterdir() if p.is_file() and _SHARD.search(p.name)) if place.is_dir() else []

    here = shards_in(folder)
    for name in split_names(split):
        word = re.compile(rf'(?<![a-z]){re.escape(name)}(?![a-z])', re.IGNORECASE)  # not the train in pretrain
        found = (
            shards_in(folder / name)
            or [shard for shard in here if shard.name.startswith(f'{name}-')]
            or [shard for shard in here if word.search(_SHARD.sub('', shard.name))]
        )
        if found:
            return [str(shard) for shard in found]
    return []


def _compressed_error(shard: str) -> UsageError:
    return UsageError(
        f'Expected plain tar files, but got {shard}, which is compressed and cannot be read from the middle: unpack it '
        'to .tar (images gain nothing from it).')


def _split_member(name: str) -> Optional[tuple[str, str]]:
    """Key and extension of a member; None if it is not a part of a sample, as hidden and __meta__ files."""
    folder, base = os.path.split(name)
    key, _, extension = base.partition('.')
    if not key or not extension or key.startswith('__'):
        return None
    return f'{folder}/{key}', extension.lower()


def _scan(shard: str) -> list[int]:
    """The offset of each sample and the end of the last one."""
    offsets = []
    end = 0
    sample: Optional[tuple[str, list[str]]] = None
    with open(shard, 'rb') as file:
        if file.read(5).startswith(_COMPRESSED):
            raise _compressed_error(shard)
        file.seek(0)
        try:
            with tarfile.open(fileobj=file, mode='r:') as tar:
                while (member := tar.next()) is not None:
                    tar.members = []  # it would keep them all
                    end = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
                    parts = _split_member(member.name) if member.isreg() else None
                    if parts is None:
                        continue
                    if sample is None or sample[0] != parts[0]:
                        _check_sample(sample, shard)
                        offsets.append(member.offset)
                        sample = parts[0], []
                    sample[1].append(parts[1])
        except tarfile.TarError as error:
            raise _broken_error(shard, str(error)) from error
        # tarfile takes a broken header, or the end of the file, for the end of the archive.
        file.seek(end)
        tail = file.read(1 << 20)
        if len(tail) < tarfile.BLOCKSIZE or any(tail):
            raise _broken_error(shard, 'truncated' if len(tail) < tarfile.BLOCKSIZE else f'unreadable from byte {end}')
    _check_sample(sample, shard)
    if not offsets:
        raise UsageError(f'Expected samples in each shard, but got none in {shard}.')
    return [*offsets, end]


def _broken_error(shard: str, reason: str) -> UsageError:
    return UsageError(f'Expected a complete tar file, but got {shard}: {reason}. Copy or write it again.')


def _check_sample(sample: Optional[tuple[str, list[str]]], shard: str) -> None:
    if sample is None:
        return
    key, extensions = sample
    images = [extension for extension in extensions if extension in _IMAGES]
    if len(images) != 1 or not set(extensions) & set(_LABELS) or len(set(extensions)) < len(extensions):
        raise UsageError(
            f"Expected one image ({', '.join(_IMAGES)}) and its labels (json or cls) side by side for each key, but "
            f"got '{key.lstrip('/')}' with {', '.join(extensions)} in {shard}: sort the members by name.")


def _read_members(shard: str, start: int, end: int) -> dict[str, tuple[str, bytes]]:
    """Name and content of each member of a sample, by extension."""
    with open(shard, 'rb') as file:
        file.seek(start)
        content = io.BytesIO(file.read(end - start))
    members: dict[str, tuple[str, bytes]] = {}
    try:
        with tarfile.open(fileobj=content, mode='r:') as tar:
            for member in tar:
                parts = _split_member(member.name) if member.isreg() else None
                if parts is not None:
                    members[parts[1]] = member.name, tar.extractfile(member).read()
    except tarfile.TarError as error:
        raise _broken_error(shard, f'{error} after it was indexed') from error
    if not set(members) & set(_IMAGES) or not set(members) & set(_LABELS):
        raise _broken_error(shard, 'changed after it was indexed')
    return members


def _read_index(cache: Path) -> dict[str, dict]:
    try:
        index = json.loads(cache.read_text())
    except (OSError, ValueError):
        return {}
    return index if isinstance(index, dict) else {}


def _write_index(cache: Path, index: dict[str, dict]) -> None:
    """Whole or not at all; a folder that cannot be written costs a scan the next time."""
    temporary = cache.with_name(f'{cache.name}.{uuid.uuid4().hex}')
    try:
        temporary.write_text(json.dumps(index, separators=(',', ':')))
        os.replace(temporary, cache)
    except OSError as error:
        _logger.info(f'The index of the shards is not kept: {error}')
        with contextlib.suppress(OSError):
            temporary.unlink()
