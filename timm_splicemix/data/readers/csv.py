""" CSV and TSV files with one column of labels, or with a column of 0, 1 and -1 per class """
import itertools
import logging
from collections import defaultdict
from pathlib import Path
from typing import Iterable, Optional, Sequence, Union

import numpy as np
import torch

from ...errors import UsageError
from ..splits import TRAIN, VALIDATION, split_names
from .base import (
    Folders,
    MultiLabelReader,
    check_files_exist,
    check_unique,
    class_index,
    image_paths,
)
from .table import Table, find_column, garbage_collector_paused, read_rows, read_table

_logger = logging.getLogger(__name__)
_IMAGE_COLUMNS = ('image', 'image_path', 'path', 'file', 'filename', 'file_name', 'filepath', 'img', 'image_id', 'id')
_LABEL_COLUMNS = ('labels', 'label', 'tags', 'tag', 'classes', 'class', 'categories', 'category')
_SPLIT_COLUMNS = ('split', 'subset', 'set', 'fold', 'partition')
_DELIMITERS = (';', '|', ',', ' ')
_VALUES = {'0': 0, '1': 1, '-1': -1, '0.0': 0, '1.0': 1, '-1.0': -1}
_EXTENSIONS = tuple(e for ext in ('.jpg', '.jpeg', '.png', '.bmp', '.webp') for e in (ext, ext.upper()))
_BLOCK = 1 << 13  # rows whose labels are split at once


def find_csv(root: Union[str, Path], split: str, split_column: Optional[str] = None) -> Path:
    """ Find the file of a split: its own (train.csv, val.tsv, ...), or the one of all splits.

    The latter is the only file in root, or labels.csv, or annotations.csv, and must have a column of splits: without
    it, training and validation would use the same images.
    """
    root = Path(root)
    there = sorted(root.iterdir()) if root.is_dir() else []
    files = {file.name.lower(): file for file in there if file.suffix.lower() in ('.csv', '.tsv')}
    for name in split_names(split.lower()):
        for suffix in ('.csv', '.tsv'):
            if f'{name}{suffix}' in files:
                return files[f'{name}{suffix}']

    shared = [files[name] for name in ('labels.csv', 'annotations.csv') if name in files]
    if len(files) == 1:
        shared = [file for file in files.values() if file.stem.lower() not in (*TRAIN, *VALIDATION, 'test')]
    if not shared:
        listed = ', '.join(file.name for file in files.values()) or 'no .csv or .tsv file'
        raise UsageError(f'Expected {split}.csv or one file of all splits in {root}, but got {listed}.')
    rows = (cells for _, cells in read_rows(shared[0]))
    header = next(rows, [])
    column = find_column(shared[0], header, split_column, _SPLIT_COLUMNS, '--csv-split-column')
    values = (cells[column] for cells in rows if len(cells) == len(header))
    if column is None or (split_column is None and not _has_splits(values, split)):
        raise UsageError(
            f"{shared[0]} has no column of splits to find '{split}'. Its columns: {', '.join(header)}. Set "
            '--csv-split-column, or write a file for each split (train.csv, val.csv).')
    return shared[0]


def _has_splits(values: Iterable[str], split: Optional[str]) -> bool:
    """Whether a column with a usual name is one of splits."""
    names = {*TRAIN, *VALIDATION, 'test', (split or '').lower()}
    return any(value.lower() in names for value in values)


class ReaderCsv(MultiLabelReader):
    """ Images and labels of a CSV (or, by its suffix, TSV) file with a header.

    Labels are either in one column (`cat;dog`; an empty cell is no label) or in one column per class (1 present, 0
    absent, -1 unknown). Columns are recognised by their names. Without class_names, the classes are the columns in
    their order, or the sorted labels of the whole file, whatever their split.

    Args:
        root: Folder that the images are relative to; names without an extension get that of the existing file.
        file: The file.
        split: Rows to keep if there is a column of splits; None keeps all.
        class_names: Name of each class. Labels may then be indices, and other columns of classes are ignored.
        image_column: Column of the images.
        label_column: Column of the labels.
        split_column: Column of the splits.
        label_delimiter: Separator of labels; None is the first of ; | , and space that occurs.
        images_must_exist: Raise an error for listed images that are missing.
    """

    def __init__(
            self,
            root: Union[str, Path],
            file: Union[str, Path],
            split: Optional[str] = None,
            class_names: Optional[Sequence[str]] = None,
            image_column: Optional[str] = None,
            label_column: Optional[str] = None,
            split_column: Optional[str] = None,
            label_delimiter: Optional[str] = None,
            images_must_exist: bool = True,
    ):
        table = read_table(Path(file))
        image = table.find(image_column, _IMAGE_COLUMNS, '--csv-image-column')
        if image is None:
            raise UsageError(f'{file} has no column of images. Its columns: {table.listing}. Set --csv-image-column.')
        part = table.find(split_column, _SPLIT_COLUMNS, '--csv-split-column')
        if part is not None and split_column is None and not _has_splits(table.column(part), split):
            part = None
        if label_delimiter == '':
            raise UsageError("Expected --csv-delimiter to be a character, but got ''.")
        label = table.find(label_column, _LABEL_COLUMNS, '--csv-label-column')
        if label is not None:
            class_names, targets = _read_labels(table, label, label_delimiter, class_names)
        elif label_delimiter is not None:
            raise UsageError(
                f"{file} has no column of labels to split at '{label_delimiter}'. Its columns: {table.listing}. Set "
                '--csv-label-column, or leave --csv-delimiter out.')
        else:
            columns = [
                column for column, name in enumerate(table.header)
                if column not in (image, part) and (class_names is not None or name.lower() not in _IMAGE_COLUMNS)]
            class_names, targets = _read_class_columns(table, columns, class_names)

        kept = _rows_of_split(table, part, split)
        names = table.column(image)
        if kept is not None:
            names, targets = [names[row] for row in kept], targets[kept]
        if '' in names:
            row = names.index('')
            raise UsageError(f'{table.where(row if kept is None else kept[row])} has no image.')
        paths = _complete(image_paths(root, names, str(file)))
        check_unique(paths, str(file))
        if images_must_exist:
            check_files_exist(paths, str(file))
        super().__init__(paths, targets, class_names, root=root)
        self.labels_file = file
        self.split_column = None if part is None else table.header[part]


def _read_labels(
        table: Table,
        column: int,
        delimiter: Optional[str],
        class_names: Optional[Sequence[str]],
) -> tuple[list[str], torch.Tensor]:
    """Class names and (N, classes) targets of one column of labels."""
    whole = set(class_names or ())  # known names are not split: 'dining table' has a space
    cells = table.column(column)
    if delimiter is None:
        delimiter = next((d for d in _DELIMITERS if any(d in cell for cell in cells if cell not in whole)), None)
        if delimiter == ' ':
            _logger.warning(f'Labels of {table.file} are split at spaces. Set --csv-delimiter if that is wrong.')
    labels, rows, numbers = _split_labels(cells, delimiter, whole)
    integers = all(label.isascii() and label.isdigit() and len(label) < 10 for label in labels)
    if class_names is None:
        class_names = sorted(labels, key=(lambda label: (int(label), label)) if integers else None)
        if not class_names:
            raise UsageError(
                f"Column '{table.header[column]}' of {table.file} has no labels. Set --csv-label-column to another "
                'column, or --class-map to the classes.')
    class_to_idx = {name: index for index, name in enumerate(class_names)}
    if integers and not class_to_idx.keys() >= set(labels):
        class_to_idx = {label: int(label) for label in labels}

    separated = '' if delimiter is None else f"; labels are split at '{delimiter}', see --csv-delimiter"
    hint = f'--class-map lists the classes{separated}'
    for number, label in enumerate(labels):
        if class_to_idx.get(label, len(class_names)) >= len(class_names):
            where = table.where(rows[numbers == number][0])
            class_index(label, class_to_idx, f'{where} ({hint})')
            raise UsageError(
                f'Expected class indices 0 to {len(class_names) - 1} (--class-map) in {where}, but got {label}.')
    targets = torch.zeros(len(cells), len(class_names), dtype=torch.int8)
    targets.numpy()[rows, np.array([class_to_idx[label] for label in labels], dtype=int)[numbers]] = 1
    return list(class_names), targets


@garbage_collector_paused()
def _split_labels(
        cells: Sequence[str],
        delimiter: Optional[str],
        whole: set[str],
) -> tuple[list[str], np.ndarray, np.ndarray]:
    """The labels in the order of their first occurrence, and the row and the number of each label in the cells."""
    number_of: dict[str, int] = defaultdict(itertools.count().__next__)
    has_delimiter = delimiter is not None and any(delimiter in name for name in whole)
    counts, numbers = [], []
    for start in range(0, len(cells), _BLOCK):
        block = cells[start:start + _BLOCK]
        if has_delimiter:
            parts = [[cell] if cell in whole else cell.split(delimiter) for cell in block]
            counts.append([len(part) for part in parts])
            parts = itertools.chain.from_iterable(parts)
        elif delimiter is None:
            parts = block
            counts.append([1] * len(block))
        else:
            parts = delimiter.join(block).split(delimiter)
            counts.append([cell.count(delimiter) + 1 for cell in block])
        numbers.append(np.array([number_of[part] for part in parts], dtype=np.int32))
    labels = {label: number for number, label in enumerate(dict.fromkeys(filter(None, map(str.strip, number_of))))}
    numbers = np.array([labels.get(part.strip(), -1) for part in number_of])[np.concatenate(numbers)]
    rows = np.arange(len(cells)).repeat(np.concatenate(counts))
    return list(labels), rows[numbers >= 0], numbers[numbers >= 0]


def _read_class_columns(
        table: Table,
        columns: Sequence[int],
        class_names: Optional[Sequence[str]],
) -> tuple[list[str], torch.Tensor]:
    """Class names and (N, classes) targets of one column per class."""
    if class_names is not None:
        names = {table.header[column]: column for column in columns}
        missing = [name for name in class_names if name not in names]
        if missing:
            raise UsageError(
                f"{table.file} has no column for class '{missing[0]}' of --class-map. Its columns: {table.listing}. "
                'Correct the class, or set --csv-label-column to a column of labels.')
        columns = [names[name] for name in class_names]
    columns = [column for column in columns if table.header[column]]  # a column without a name is an index
    if not columns:
        raise UsageError(
            f'{table.file} has neither a column of labels nor columns of classes. Its columns: {table.listing}. Set '
            '--csv-label-column.')
    targets = torch.empty(len(table), len(columns), dtype=torch.int8)
    for place, column in enumerate(columns):
        cells = table.cells[column]
        values = {cell: _VALUES.get(cell.strip()) for cell in set(cells)}
        if None in values.values():
            row = next(row for row, cell in enumerate(cells) if values[cell] is None)
            got = f'{cells[row].strip()!r:.200}' if cells[row].strip() else 'nothing'
            raise UsageError(
                f"Expected 1 (present), 0 (absent) or -1 (unknown) in column '{table.header[column]}' of "
                f'{table.where(row)}, but got {got}. Set --csv-label-column to a column of labels, or --class-map to '
                'the columns of classes.')
        targets.numpy()[:, place] = np.fromiter(map(values.__getitem__, cells), np.int8, len(cells))
    return [table.header[column] for column in columns], targets


def _rows_of_split(table: Table, column: Optional[int], split: Optional[str]) -> Optional[list[int]]:
    """Rows of a split; None for all rows."""
    if column is None or split is None:
        return None
    values = [value.lower() for value in table.column(column)]
    name = next((name for name in split_names(split.lower()) if name in values), None)
    if name is None:
        there = ', '.join(sorted(set(table.column(column))))
        raise UsageError(
            f"Column '{table.header[column]}' of {table.file} has no split '{split}'. Its splits: {there}. Set "
            '--csv-split-column to another column.')
    return [row for row, value in enumerate(values) if value == name]


def _complete(paths: Sequence[str]) -> list[str]:
    """Add the extension of the existing file to names without one."""
    folders = Folders()

    def complete(path: str) -> str:
        return next(filter(folders.has, (path, *(path + extension for extension in _EXTENSIONS))), path)

    return [path if path.endswith(_EXTENSIONS) else complete(path) for path in paths]
