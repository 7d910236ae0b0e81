""" Shards: tar files in webdataset's format """
import contextlib
import io
import json
import logging
import os
import re
import tarfile
from pathlib import Path
from typing import Any, BinaryIO, Optional, Sequence, Union

import numpy as np
import torch
from tqdm import tqdm

from ...errors import UsageError
from ...files import atomic_write, open_regular, read_json, read_text
from ..cache import lock_beside
from ..seeding import mix_seeds
from ..splits import split_names
from .base import MultiLabelReader, check_classes, class_index

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
_TAR_ERRORS = (tarfile.TarError, ArithmeticError, EOFError, LookupError, RecursionError, ValueError)  # of bad headers

Members = dict[str, tuple[str, bytes]]  # name and content of each member of a sample, by extension


class ReaderWds(MultiLabelReader):
    """ Images and labels in shards.

    A sample is the members of a tar file that share their name up to the first dot: an image and its labels, in
    `<key>.json` as {"labels": [names or indices]} or in `<key>.cls` as indices. An index of byte offsets, cached beside
    the shards, gives random access. Labels are read with their image; `targets` reads all of them on first use.

    Args:
        root: Folder of the shards.
        name: Subfolder of the shards, or a pattern ('train-{000..003}.tar', '*.tar').
        split: Split: the shards in the folder of that name or with that word in their name; or a pattern.
        class_names: Name of each class; None reads `classes.txt` beside the shards or in root, one class per line.
        label_key: Field of the JSON files. None is 'labels', else 'target' or 'multi_hot', whose value is the
            multi-hot list itself; 'FIELD:multi_hot' reads another field in that way.
        shuffle_size: In training, a sample moves by less than this many places after the shards are shuffled.
        num_samples: Number of samples to use, the first ones of the sorted shards; None uses all.
        drop_unknown_classes: Drop labels whose name is not among `class_names`.
    """

    def __init__(
            self,
            root: Union[str, Path],
            name: str = '',
            split: str = 'train',
            class_names: Optional[Sequence[str]] = None,
            label_key: Optional[str] = None,
            shuffle_size: int = 1000,
            num_samples: Optional[int] = None,
            drop_unknown_classes: bool = False,
    ):
        # The constructor of the base class is not called: it would keep a path and a target for each sample.
        if shuffle_size < 1:
            raise UsageError(f'Expected shuffle_size to be at least 1, but got {shuffle_size}.')
        self.label_key = label_key
        self.shuffle_size = shuffle_size
        self.drop_unknown_classes = drop_unknown_classes
        self.shards = find_shards(root, name, split)
        self._set_classes(_read_class_names(Path(root), name) if class_names is None else class_names, root)
        self._offsets = _first_samples(index_shards(root, self.shards), num_samples, split)
        self.shards = self.shards[:len(self._offsets)]
        self._counts = np.array([len(offsets) - 1 for offsets in self._offsets])
        self._ends = self._counts.cumsum()
        self._targets: Optional[torch.Tensor] = None

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> tuple[BinaryIO, torch.Tensor]:
        shard, members = self._read(index)
        target = self._parse_target(members, shard) if self._targets is None else self._targets[index].float()
        return io.BytesIO(_image(members)[1]), target

    @property
    def targets(self) -> torch.Tensor:
        if self._targets is None:
            targets = torch.empty(len(self), len(self.class_names), dtype=torch.int8)
            for index in tqdm(range(len(self)), desc='Reading labels', disable=None, leave=False):
                shard, members = self._read(index)
                targets[index] = self._parse_target(members, shard)
            self._targets = targets
        return self._targets

    @targets.setter
    def targets(self, targets: torch.Tensor) -> None:
        self._targets = targets

    def has_positives(self) -> bool:
        if self._targets is not None:
            return super().has_positives()
        samples = map(self._read, range(len(self)))  # read until one has a label
        return any(bool((self._parse_target(members, shard) == 1).any()) for shard, members in samples)

    def epoch_order(self, seed: int, epoch: int) -> torch.Tensor:
        return torch.from_numpy(shuffle_shards(self._counts, self.shuffle_size, seed, epoch))

    image_folder = None  # the images are in shards

    def locations(self) -> list[str]:
        shards = map(os.path.abspath, self.shards)
        return [f'{shard}:{row}' for shard, count in zip(shards, self._counts) for row in range(count)]

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        """Shard and row; the absolute name has the image's name in the shard, which is read from there, instead."""
        shard, row = self._find(index)
        name = str(row)
        if absolute:
            with contextlib.suppress(OSError, UsageError):
                name = _image(self._read(index)[1])[0]
        path = self.shards[shard]
        return f'{os.path.basename(path) if basename else path}:{name}'

    def _find(self, index: int) -> tuple[int, int]:
        """Shard and row of a sample."""
        shard = int(np.searchsorted(self._ends, index, side='right'))
        return shard, index - int(self._ends[shard] - self._counts[shard])

    def _read(self, index: int) -> tuple[str, Members]:
        shard, row = self._find(index)
        return self.shards[shard], _read_members(self.shards[shard], *self._offsets[shard][row:row + 2].tolist())

    def _parse_target(self, members: Members, shard: str) -> torch.Tensor:
        field = (self.label_key or '').removesuffix(_MULTI_HOT_SUFFIX)
        multi_hot_fields = _MULTI_HOT_FIELDS if field == (self.label_key or '') else (field,)
        fields = (field,) if field else ('labels', *_MULTI_HOT_FIELDS)
        content = {}
        where = shard
        if 'json' in members:
            where = f'{shard}:{members["json"][0]}'
            try:
                content = json.loads(members['json'][1])
            except (ValueError, RecursionError) as error:
                raise UsageError(f'Invalid JSON in {where}: {error}') from error
        found = next((name for name in fields if name in content), None) if isinstance(content, dict) else None
        if found is None and ('cls' not in members or field):
            raise UsageError(
                f"Expected the field {' or '.join(fields)} in {where}, but got {content!r:.200}. Set --target-key to "
                'the field of the labels.')
        if found in multi_hot_fields:
            return self._parse_multi_hot(content[found], where)
        if found is not None:
            return self._parse_labels(content[found], where)
        where = f'{shard}:{members["cls"][0]}'
        text = members['cls'][1].decode(errors='replace')
        try:
            labels = [int(label) for label in text.replace(',', ' ').split()]
        except ValueError as error:
            raise UsageError(f'Expected class indices in {where}, but got {text.strip()!r:.200}.') from error
        return self._parse_labels(labels, where)

    def _parse_labels(self, labels: Any, where: str) -> torch.Tensor:
        if not isinstance(labels, list):
            raise UsageError(f'Expected a list of labels in {where}, but got {labels!r:.200}.')
        number = len(self.class_names)
        target = torch.zeros(number)
        for label in labels:
            if self.drop_unknown_classes and isinstance(label, str) and label not in self.class_to_idx:
                continue
            if isinstance(label, str):
                label = class_index(label, self.class_to_idx, where)
            elif type(label) is not int or not 0 <= label < number:
                raise UsageError(
                    f'Expected names or indices of the {number} classes in {where}, but got {label!r:.200}.')
            target[label] = 1
        return target

    def _parse_multi_hot(self, values: Any, where: str) -> torch.Tensor:
        number = len(self.class_names)
        if (not isinstance(values, list) or len(values) != number
                or not all(isinstance(value, (int, float)) and value in (-1, 0, 1) for value in values)):
            raise UsageError(
                f'Expected a list of {number} values among 0, 1 and -1 in {where}, but got {values!r:.200}.')
        return torch.tensor(values, dtype=torch.float32)


def shuffle_shards(counts: Sequence[int], shuffle_size: int, seed: int, epoch: int) -> np.ndarray:
    """ Shuffle samples that are stored in shards so that consecutive ones come from few shards.

    Shards are permuted; then each sample moves by less than shuffle_size places.

    Args:
        counts: Number of samples in each shard.
        shuffle_size: Bound of the moves; 1 keeps the order within shards.
        seed: Random seed.
        epoch: Epoch.

    Returns:
        Indices of the samples, counted across all shards.
    """
    generator = np.random.RandomState(mix_seeds(seed, epoch))  # its stream is the same in every version of numpy
    ends = np.cumsum(counts)
    order = np.concatenate([np.arange(ends[i] - counts[i], ends[i]) for i in generator.permutation(len(counts))])
    places = np.arange(len(order)) + generator.random_sample(len(order)) * shuffle_size
    return order[np.argsort(places, kind='stable')]


def find_shards(root: Union[str, Path], name: str = '', split: str = 'train') -> list[str]:
    """Sorted paths of a split's shards; `name` is a folder in root or a pattern, `split` may be a pattern."""
    folder = Path(root)
    if not folder.is_dir():
        raise UsageError(f'The folder of the shards, {root}, does not exist.')
    if _SHARD.search(name):
        shards = _expand(folder, name)
    else:
        folder = folder / name
        shards = _expand(folder, split) if _SHARD.search(split) else _search(folder, split)
    if not shards:
        raise UsageError(
            f"No shards of split '{split}' in {folder}: expected {split}-*.tar, *{split}*.tar or {split}/*.tar. Rename "
            "them, or give a pattern such as 'data-{000..003}.tar' as data set name or split.")
    compressed = next((shard for shard in shards if not shard.lower().endswith('.tar')), None)
    if compressed:
        raise _compressed_error(compressed)
    return shards


def index_shards(root: Union[str, Path], shards: Sequence[str]) -> list[np.ndarray]:
    """ Find the samples of each shard.

    The index is cached in root if root is writable.

    Returns:
        Byte offset of each sample in its shard, and the end of the last one.
    """
    cache = Path(root) / _INDEX
    with lock_beside(cache):
        known = _read_index(cache)
        stats = {os.path.relpath(shard, root): os.stat(shard) for shard in shards}
        stamps = {shard: [stat.st_size, stat.st_mtime_ns] for shard, stat in stats.items()}
        new = [shard for shard, stamp in stamps.items() if not _is_index(known.get(shard), stamp)]
        for shard in tqdm(new, desc='Indexing shards', disable=None, leave=False):
            known[shard] = {'stamp': stamps[shard], 'offsets': _scan(os.path.join(root, shard))}
        if new:
            try:
                with atomic_write(cache) as temporary:
                    temporary.write_text(json.dumps(known, separators=(',', ':')))
            except (OSError, UsageError) as error:
                _logger.info(f'The index of the shards is not cached: {error}')
    return [np.array(known[shard]['offsets'], dtype=np.int64) for shard in stamps]


def _first_samples(offsets: list[np.ndarray], number: Optional[int], split: str) -> list[np.ndarray]:
    """Offsets of the first samples of the shards; shards without any of them are left out."""
    total = sum(len(part) - 1 for part in offsets)
    if number is None or number == total:
        return offsets
    if number > total:
        _logger.warning(f"Split '{split}' has {total:,} samples, fewer than the given {number:,}. All are used.")
        return offsets
    _logger.warning(f"Using the first {number:,} of the {total:,} samples of split '{split}'.")
    kept = []
    while number > 0:
        kept.append(offsets[len(kept)][:number + 1])
        number -= len(kept[-1]) - 1
    return kept


def _read_index(cache: Path) -> dict[str, Any]:
    try:
        index = read_json(cache)
    except UsageError:
        return {}
    return index if isinstance(index, dict) else {}


def _is_index(entry: Any, stamp: list[int]) -> bool:
    """Whether an entry of the cached index is that of a shard with this size and time."""
    if not isinstance(entry, dict) or entry.get('stamp') != stamp or not isinstance(entry.get('offsets'), list):
        return False
    offsets = entry['offsets']
    are_places = all(type(offset) is int and 0 <= offset <= stamp[0] for offset in offsets)
    return len(offsets) > 1 and are_places and offsets == sorted(offsets)


def _read_class_names(root: Path, name: str) -> list[str]:
    file = root / name / _CLASSES
    file = file if file.is_file() else root / _CLASSES
    if not file.is_file():
        raise UsageError(f'{file} does not exist. Write one class name per line to it, or set --class-map.')
    names = list(filter(None, map(str.strip, read_text(file).splitlines())))
    if not names:
        raise UsageError(f'{file} is empty. Write one class name per line to it.')
    check_classes(names, file)
    return names


def _expand_braces(pattern: str) -> list[str]:
    """Expand {000..003} and {a,b} as shells do."""
    match = _BRACES.search(pattern)
    if match is None:
        return [pattern]
    bounds = re.fullmatch(r'(\d+)\.\.(\d+)', match[1])
    if bounds:
        width = len(bounds[1]) if bounds[1].startswith('0') else 0
        parts = [f'{number:0{width}d}' for number in range(int(bounds[1]), int(bounds[2]) + 1)]
    else:
        parts = match[1].split(',')
    before, after = pattern[:match.start()], pattern[match.end():]
    return [text for part in parts for text in _expand_braces(before + part + after)]


def _expand(folder: Path, pattern: str) -> list[str]:
    shards = []
    for part in _expand_braces(pattern):
        found = [str(path) for path in folder.glob(part) if path.is_file()]
        if not found:
            raise UsageError(f"No shard {part} in {folder}, which the pattern '{pattern}' asks for.")
        shards += found
    return sorted(set(shards))


def _search(folder: Path, split: str) -> list[str]:
    """Shards of the first of the split's names that has any, the most specific place first."""
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
        f'{shard} is compressed and has no random access. Unpack it to .tar; compression does not shrink images.')


def _broken_error(shard: str, reason: str) -> UsageError:
    return UsageError(f'{shard} is not a complete tar file: {reason}. Copy or write it again.')


def _split_member(name: str) -> Optional[tuple[str, str]]:
    """Key and extension of a member; None if it is not part of a sample, such as hidden and __meta__ files."""
    folder, base = os.path.split(name)
    key, _, extension = base.partition('.')
    if not key or not extension or key.startswith('__'):
        return None
    return f'{folder}/{key}', extension.lower()


def _scan(shard: str) -> list[int]:
    """Offset of each sample, and the end of the last one."""
    offsets = []
    end = 0
    sample: Optional[tuple[str, list[str]]] = None
    with open_regular(shard) as file:
        if file.read(5).startswith(_COMPRESSED):
            raise _compressed_error(shard)
        file.seek(0)
        try:
            with tarfile.open(fileobj=file, mode='r:') as tar:
                while (member := tar.next()) is not None:
                    tar.members = []  # it would keep all of them in memory
                    _check_member(member, shard)
                    end = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
                    parts = _split_member(member.name) if member.isreg() else None
                    if parts is None:
                        continue
                    if sample is None or sample[0] != parts[0]:
                        _check_sample(sample, shard)
                        offsets.append(member.offset)
                        sample = parts[0], []
                    sample[1].append(parts[1])
        except _TAR_ERRORS as error:
            raise _broken_error(shard, str(error)) from error
        # tarfile mistakes a broken header, or the end of the file, for the end of the archive.
        file.seek(end)
        tail = file.read(1 << 20)
        if len(tail) < tarfile.BLOCKSIZE or any(tail):
            raise _broken_error(shard, 'truncated' if len(tail) < tarfile.BLOCKSIZE else f'unreadable from byte {end}')
    _check_sample(sample, shard)
    if not offsets:
        raise UsageError(f'{shard} has no samples.')
    return [*offsets, end]


def _check_member(member: tarfile.TarInfo, shard: str) -> None:
    if member.size < 0:  # tarfile would go back and never end
        raise _broken_error(shard, f'{member.name} has {member.size} bytes')
    if member.name.startswith('/') or '..' in member.name.split('/'):
        raise UsageError(f"{shard} has a member '{member.name}', and paths outside of the shard are refused.")


def _check_sample(sample: Optional[tuple[str, list[str]]], shard: str) -> None:
    if sample is None:
        return
    key, extensions = sample
    images = [extension for extension in extensions if extension in _IMAGES]
    if len(images) != 1 or not set(extensions) & set(_LABELS) or len(set(extensions)) < len(extensions):
        raise UsageError(
            f"Expected one image ({', '.join(_IMAGES)}) and its labels (json or cls) in a row for each key in {shard}, "
            f"but got '{key.lstrip('/')}' with {', '.join(extensions)}. Sort the members by name.")


def _read_members(shard: str, start: int, end: int) -> Members:
    with open_regular(shard) as file:
        file.seek(start)
        content = io.BytesIO(file.read(end - start))
    members: Members = {}
    try:
        with tarfile.open(fileobj=content, mode='r:') as tar:
            for member in tar:
                parts = _split_member(member.name) if member.isreg() else None
                if parts is not None:
                    members[parts[1]] = member.name, tar.extractfile(member).read()
    except _TAR_ERRORS as error:
        raise _broken_error(shard, f'{error} after it was indexed') from error
    if not set(members) & set(_IMAGES) or not set(members) & set(_LABELS):
        raise _broken_error(shard, 'it changed after it was indexed')
    return members


def _image(members: Members) -> tuple[str, bytes]:
    return next(members[extension] for extension in _IMAGES if extension in members)
