""" Data sets in a plain list of images with the indices of their classes """
import os
from pathlib import Path
from typing import Optional, Sequence, Union

import torch

from ...errors import UsageError
from .base import MultiLabelReader, check_files_exist, check_unique


class ReaderList(MultiLabelReader):
    """ Images that stand in a list, each with the indices of its classes.

    A line is the image, a TAB or a comma, and the indices between spaces, commas or TABs, as in
    `COCO_train2014_000000000009.jpg,0 52`. It is cut at its first TAB, or without any at its first comma, so that names
    may hold spaces. An image without indices has no label.

    Args:
        root: Folder that the images are relative to.
        file: The list.
        class_names: Name of each class.
        num_classes: Number of classes where they have no names; None is the largest index of the list and one.
        images_must_exist: Refuse a list with images which are not there.
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
                f'Expected as many class names as classes, but got {len(class_names)} by --class-map and {num_classes} '
                'by --num-classes: leave one of them out.')
        rows = _read_rows(Path(file))
        if class_names is None:
            if num_classes is None:
                num_classes = max((index for _, _, indices in rows for index in indices), default=-1) + 1
            if num_classes < 1:
                raise UsageError(
                    f'Expected at least one class, but got none in {file}: give them by --class-map or --num-classes.')
            class_names = [str(index) for index in range(num_classes)]

        targets = torch.zeros(len(rows), len(class_names), dtype=torch.int8)
        for row, (line, _, indices) in enumerate(rows):
            for index in indices:
                if index >= len(class_names):
                    raise UsageError(
                        f'Expected indices of {len(class_names)} classes, 0 to {len(class_names) - 1}, but got {index} '
                        f'in {file}:{line}: give all classes by --class-map or --num-classes.')
                targets[row, index] = 1
        paths = [os.path.join(root, name) for _, name, _ in rows]
        check_unique(paths, str(file))
        if images_must_exist:
            check_files_exist(paths, str(file))
        super().__init__(paths, targets, class_names, root=root)


def _read_rows(file: Path) -> list[tuple[int, str, list[int]]]:
    """Line, image and indices of each row."""
    if not file.is_file():
        raise UsageError(f'Expected a list of images, but got {file}, which does not exist.')
    try:
        lines = file.read_text(encoding='utf-8-sig').split('\n')
    except UnicodeDecodeError as error:
        raise UsageError(f'Expected a list in UTF-8, but got {file}: {error}.') from error
    rows = []
    for line, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        name, _, rest = text.partition('\t' if '\t' in text else ',')
        if not name.strip():
            raise UsageError(f"Expected an image before the indices, but got '{text}' in {file}:{line}.")
        indices = rest.replace(',', ' ').split()
        for index in indices:
            if not (index.isascii() and index.isdigit()):
                raise UsageError(
                    f"Expected indices of classes (0, 1, ...), but got '{index}' in {file}:{line}: put a TAB behind an "
                    'image with a comma in its name; labels that are names belong into a CSV file.')
        rows.append((line, name.strip(), [int(index) for index in indices]))
    if not rows:
        raise UsageError(f'Expected a list of images, but got {file}, which is empty.')
    return rows
