""" What every reader of multi-label data shares: files, multi-hot targets, class names """
import difflib
import os
from pathlib import Path
from typing import BinaryIO, Sequence, Union

import torch
from timm.data.readers.reader import Reader

from ...errors import UsageError


class MultiLabelReader(Reader):
    """ Images on disk with multi-hot targets.

    Args:
        paths: Path of each image.
        targets: (N, classes) int8: 1 present, 0 absent, -1 unknown.
        class_names: Name of each class.
        root: What paths are relative to when they are shown.
    """

    def __init__(
            self,
            paths: Sequence[Union[str, Path]],
            targets: torch.Tensor,
            class_names: Sequence[str],
            root: Union[str, Path],
    ):
        super().__init__()
        self.root = str(root)
        self.paths = [str(path) for path in paths]
        self.targets = targets
        self.class_names = list(class_names)
        self.class_to_idx = {name: index for index, name in enumerate(self.class_names)}
        shape = (len(self.paths), len(self.class_names))
        if targets.shape != shape:
            raise UsageError(f'Expected targets of shape {shape}, but got {tuple(targets.shape)}.')
        if len(self.class_to_idx) != len(self.class_names):
            double = next(name for name in self.class_names if self.class_names.count(name) > 1)
            raise UsageError(f"Expected each class once, but got '{double}' twice.")

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[BinaryIO, torch.Tensor]:
        return open(self.paths[index], 'rb'), self.targets[index].float()

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        path = self.paths[index]
        if basename:
            return os.path.basename(path)
        return os.path.abspath(path) if absolute else os.path.relpath(path, self.root)


def class_index(label: str, class_to_idx: dict[str, int], where: str) -> int:
    """ The index of a class that a file names.

    Args:
        label: Name of the class.
        class_to_idx: Index of each known class.
        where: File and line, for the error.
    """
    index = class_to_idx.get(label)
    if index is None:
        near = difflib.get_close_matches(label, class_to_idx, n=1, cutoff=0.)
        hint = f", of which '{near[0]}' is the nearest" if near else ''
        raise UsageError(
            f"Expected one of the {len(class_to_idx)} classes{hint}, but got the label '{label}' in {where}.")
    return index


def check_unique(paths: Sequence[str], where: str) -> None:
    """ Refuse a list in which an image stands twice.

    Args:
        paths: Path of each image.
        where: The file that lists them, for the error.
    """
    seen = set()
    for path in paths:
        if path in seen:
            raise UsageError(f'Expected each image once, but got {path} twice in {where}: merge its rows.')
        seen.add(path)


def check_files_exist(paths: Sequence[str], where: str) -> None:
    """ Refuse a list with images that are not there, by looking into each folder once.

    Args:
        paths: Path of each image.
        where: What lists them, for the error.
    """
    folders: dict[str, set[str]] = {}
    missing = []
    for path in paths:
        folder, name = os.path.split(path)
        if folder not in folders:
            folders[folder] = set(os.listdir(folder or '.')) if os.path.isdir(folder or '.') else set()
        if name not in folders[folder]:
            missing.append(path)
    if missing:
        raise UsageError(
            f'Expected the {len(paths)} images listed in {where}, but got {missing[0]}'
            f'{f" and {len(missing) - 1} more" if len(missing) > 1 else ""}, which are not there.')
