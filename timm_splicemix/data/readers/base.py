""" Base class of the multi-label readers, and checks that they share """
import difflib
import logging
import os
from collections import Counter
from pathlib import Path
from typing import BinaryIO, Callable, Iterable, Optional, Sequence, Union

import torch
from timm.data.readers.reader import Reader

from ...errors import UsageError
from ...files import open_regular
from ..splits import TRAIN, VALIDATION

EXTENSIONS = tuple(e for ext in ('.jpg', '.jpeg', '.png', '.bmp', '.webp') for e in (ext, ext.upper()))
_logger = logging.getLogger(__name__)


class MultiLabelReader(Reader):
    """ Image files with multi-hot targets.

    Args:
        paths: Path of each image.
        targets: (N, classes) int8: 1 present, 0 absent, -1 unknown.
        class_names: Name of each class.
        root: Folder that displayed file names are relative to.
    """
    # Order of the training samples of an epoch as a function of (seed, epoch), where reads should be local
    epoch_order: Optional[Callable[[int, int], torch.Tensor]] = None
    labels_file: Union[str, Path, None] = None

    def __init__(
            self,
            paths: Sequence[Union[str, Path]],
            targets: torch.Tensor,
            class_names: Sequence[str],
            root: Union[str, Path],
    ):
        super().__init__()
        self._set_classes(class_names, root)
        self.paths = [str(path) for path in paths]
        self.targets = targets
        shape = (len(self.paths), len(self.class_names))
        if targets.shape != shape:
            raise UsageError(f'Expected targets of shape {shape}, but got {tuple(targets.shape)}.')

    def _set_classes(self, class_names: Sequence[str], root: Union[str, Path]) -> None:
        self.root = str(root)
        self.class_names = list(class_names)
        self.class_to_idx = {name: index for index, name in enumerate(self.class_names)}
        check_classes(self.class_names, self.labels_file or root)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[BinaryIO, torch.Tensor]:
        return open_regular(self.paths[index]), self.targets[index].float()

    @property
    def image_folder(self) -> Optional[str]:
        """Folder that file names are relative to; None if the images are not files."""
        return os.path.abspath(self.root)

    def select_classes(self, columns: Sequence[int], class_names: Sequence[str]) -> None:
        """ Replace the classes.

        Args:
            columns: Column of each new class in the present targets; -1 is a class that no image has.
            class_names: Name of each new class.
        """
        absent = self.targets.new_zeros(len(self), 1)
        self.targets = torch.cat([self.targets, absent], dim=1)[:, list(columns)]
        self._set_classes(class_names, self.root)

    def has_positives(self) -> bool:
        return bool((self.targets == 1).any())

    def locations(self) -> list[str]:
        """Where each image is stored, to find images that two splits share."""
        return list(map(os.path.abspath, self.paths))

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        path = self.paths[index]
        if basename:
            return os.path.basename(path)
        return os.path.abspath(path) if absolute else os.path.relpath(path, self.root)


def check_classes(names: Sequence[str], where: Union[str, Path]) -> None:
    """Raise an error for a class that `where` lists more than once, or that has a line break."""
    name, count = Counter(names).most_common(1)[0] if names else ('', 0)
    if count > 1:
        raise UsageError(f"Duplicate class '{name}' in {where}: class names must be unique.")
    broken = next((name for name in names if len(f'{name}.'.splitlines()) > 1), None)
    if broken is not None:  # classes.txt has a line for each class
        raise UsageError(f'Class {broken!r:.200} in {where} has a line break. Write its name in one line.')


def class_index(label: str, class_to_idx: dict[str, int], where: str, source: str = '') -> int:
    """Index of a class; `where` is the file and line of the label, `source` that of the classes, for the error."""
    index = class_to_idx.get(label)
    if index is None:
        near = difflib.get_close_matches(label[:200], class_to_idx, n=1, cutoff=0.6)
        of = f' of {source}' if source else ''
        hint = f"; did you mean '{near[0]}'?" if near else '.'
        raise UsageError(f"Label {label!r:.200} in {where} is not one of the {len(class_to_idx)} classes{of}{hint}")
    return index


def image_paths(root: Union[str, Path], names: Sequence[str], where: str) -> list[str]:
    """ Paths of the images that the file `where` lists.

    Names are relative to root or, which is logged, absolute; those with '..' are refused. The checks of each name are
    preceded by one for all of them, because a file may list millions.
    """
    text = '\n'.join(names)
    if '\\' in text and os.sep == '/':
        names = _with_slashes(root, names, where)
        text = '\n'.join(names)
    if '..' in text:
        refuse_parent_folders(names, where)
    if './' in text or '//' in text:
        names = [os.path.normpath(name) for name in names]
    folder = os.path.join(root, '')
    if os.name == 'posix' and not text.startswith('/') and '\n/' not in text:
        return [folder + name for name in names]
    absolute = [name for name in names if os.path.isabs(name)]
    if absolute:
        _logger.info(f'{len(absolute)} images listed in {where} have absolute paths, such as {absolute[0]}.')
    return [os.path.join(folder, name) for name in names]


def _with_slashes(root: Union[str, Path], names: Sequence[str], where: str) -> list[str]:
    """Turn the backslashes of Windows into slashes, except in names of files that exist."""
    folders = Folders()
    changed = [
        name.replace('\\', '/') if '\\' in name and not folders.has(os.path.join(root, name)) else name
        for name in names]
    pairs = [(old, new) for old, new in zip(names, changed) if old != new]
    if pairs:
        old, new = pairs[0]
        _logger.info(f'{len(pairs):,} images listed in {where} have backslashes: {old} is read as {new}.')
    return changed


def refuse_parent_folders(names: Sequence[str], where: str) -> None:
    """Raise an error if a path in `where` has '..'."""
    outside = next((name for name in names if '..' in name.replace(os.sep, '/').split('/')), None)
    if outside is not None:
        raise UsageError(
            f"{where} lists {outside}, and '..' is refused. Set --data-dir to a folder that contains all images, or "
            'write absolute paths.')


def check_unique(paths: Sequence[str], where: str) -> None:
    """Raise an error if the file `where` lists an image more than once."""
    if len(set(paths)) == len(paths):
        return
    path, _ = Counter(paths).most_common(1)[0]
    raise UsageError(f'{where} lists {path} more than once. Merge its rows.')


def merge_duplicates(paths: Sequence[str], targets: torch.Tensor, where: str) -> tuple[list[str], torch.Tensor]:
    """Keep one of several equal entries of an image in the file `where`; different ones are an error."""
    first: dict[str, int] = {}
    rows = [first.setdefault(path, row) for row, path in enumerate(paths)]
    if len(first) == len(paths):
        return list(paths), targets
    different = (targets != targets[rows]).any(dim=1)
    if different.any():
        path = paths[int(different.nonzero()[0])]
        raise UsageError(f'{where} lists {path} more than once, with different labels. Merge them.')
    _logger.info(f'{len(paths) - len(first):,} duplicate entries of {where} were merged.')
    return list(first), targets[list(first.values())]


def has_splits(values: Iterable[str], split: Optional[str]) -> bool:
    """Whether values of a column or key with a usual name are names of splits."""
    names = {*TRAIN, *VALIDATION, 'test', (split or '').lower()}
    return any(value.lower() in names for value in values)


def are_multi_hot(rows: Iterable[Sequence[float]], classes: Optional[int]) -> bool:
    """Whether rows have the same length and only 0, 1 and -1, and one of them cannot be a set of indices."""
    length = classes
    repeats = False
    for row in rows:
        length = len(row) if length is None else length
        values = set(row)
        if len(row) != length or not values <= {-1, 0, 1}:
            return False
        repeats = repeats or len(values) < len(row) or -1 in values
    return repeats


def complete_extensions(paths: Sequence[str]) -> list[str]:
    """Add the extension of the existing file to names without one."""
    folders = Folders()

    def complete(path: str) -> str:
        return next(filter(folders.has, (path, *(path + extension for extension in EXTENSIONS))), path)

    return [path if path.endswith(EXTENSIONS) else complete(path) for path in paths]


class Folders:
    """File names of folders, each of which is listed once."""

    def __init__(self):
        self._names: dict[str, set[str]] = {}

    def has(self, path: str) -> bool:
        folder, name = os.path.split(path)
        if folder not in self._names:
            self._names[folder] = set(os.listdir(folder or '.')) if os.path.isdir(folder or '.') else set()
        return name in self._names[folder]


def check_files_exist(paths: Sequence[str], where: str, root: Union[str, Path]) -> None:
    """Raise an error if images that `where` lists, relative to root, are missing."""
    folders = Folders()
    missing = [path for path in paths if not folders.has(path)]
    if missing:
        name = missing[0].removeprefix(os.path.join(root, ''))
        place = '' if name == missing[0] else f' (relative to {os.path.abspath(root)})'
        raise UsageError(
            f'{len(missing):,} of the {len(paths):,} images listed in {where} are missing, such as {name}{place}. Set '
            '--data-dir, --train-images or --val-images to the folder of the images, or train without the missing ones '
            'by --on-bad-image skip.')
