""" Text files that list images with class indices """
from pathlib import Path
from typing import Optional, Sequence, Union

import torch

from ...errors import UsageError
from ...files import read_text
from ..class_map import source_of
from .base import MultiLabelReader, check_files_exist, check_unique, image_paths

_DIGITS = 6  # of an index: there is a name and a column for each class


class ReaderList(MultiLabelReader):
    """ Images of a text file, each with the indices of its classes.

    A line is the image, a TAB or a comma, and the indices between spaces, commas or TABs, as in
    `COCO_train2014_000000000009.jpg,0 52`. It is split at its first TAB, or without a TAB at its first comma, so that
    names may contain spaces. An image without indices has no label.

    Args:
        root: Folder that the images are relative to.
        file: The text file.
        class_names: Name of each class.
        num_classes: Number of classes without names; None is the largest index plus one.
        images_must_exist: Raise an error for listed images that are missing.
    """

    def __init__(
            self,
            root: Union[str, Path],
            file: Union[str, Path],
            class_names: Optional[Sequence[str]] = None,
            num_classes: Optional[int] = None,
            images_must_exist: bool = True,
    ):
        if class_names is not None and num_classes is not None and len(class_names) != num_classes:
            raise UsageError(
                f'{source_of(class_names)} has {len(class_names)} classes, but --num-classes is {num_classes}. Leave '
                'one out.')
        rows = _read_rows(Path(file))
        if class_names is None:
            if num_classes is None:
                num_classes = max((index for _, _, indices in rows for index in indices), default=-1) + 1
            if num_classes < 1:
                raise UsageError(f'{file} has no class indices. Set --class-map or --num-classes.')
            class_names = [str(index) for index in range(num_classes)]

        targets = torch.zeros(len(rows), len(class_names), dtype=torch.int8)
        for row, (line, _, indices) in enumerate(rows):
            for index in indices:
                if index >= len(class_names):
                    raise UsageError(
                        f'Expected class indices 0 to {len(class_names) - 1} in {file}:{line}, but got {index}. List '
                        f'all of them in {source_of(class_names)}, or set --num-classes.')
                targets[row, index] = 1
        paths = image_paths(root, [name for _, name, _ in rows], str(file))
        check_unique(paths, str(file))
        if images_must_exist:
            check_files_exist(paths, str(file), root)
        self.labels_file = file
        super().__init__(paths, targets, class_names, root=root)


def _read_rows(file: Path) -> list[tuple[int, str, list[int]]]:
    """Line number, image and indices of each row."""
    rows = []
    for line, text in enumerate(read_text(file).split('\n'), start=1):
        if not text.strip():
            continue
        name, _, rest = text.partition('\t' if '\t' in text else ',')
        if not name.strip():
            raise UsageError(f"Expected an image before the indices in {file}:{line}, but got '{text}'.")
        indices = rest.replace(',', ' ').split()
        for index in indices:
            if not (index.isascii() and index.isdigit()):
                raise UsageError(
                    f"Expected class indices (0, 1, ...) in {file}:{line}, but got '{index}'. Put a TAB after an image "
                    'with a comma in its name; use a CSV file (--dataset csv) for class names.')
            if len(index) > _DIGITS:
                raise UsageError(
                    f"Expected class indices of at most {_DIGITS} digits in {file}:{line}, but got '{index:.80}'.")
        rows.append((line, name.strip(), [int(index) for index in indices]))
    if not rows:
        raise UsageError(f'{file} is empty.')
    return rows
