""" CSV and TSV files with one column of labels, or with a column of 0, 1 and -1 per class """
import csv
import io
import logging
import os
from pathlib import Path
from typing import NamedTuple, Optional, Sequence, Union

import torch

from ...errors import UsageError
from ...files import open_regular
from ..splits import TRAIN, VALIDATION, split_names
from .base import (
    Folders,
    MultiLabelReader,
    check_files_exist,
    check_unique,
    class_index,
)

_logger = logging.getLogger(__name__)
_IMAGE_COLUMNS = ('image', 'image_path', 'path', 'file', 'filename', 'file_name', 'filepath', 'img', 'image_id', 'id')
_LABEL_COLUMNS = ('labels', 'label', 'tags', 'tag', 'classes', 'class', 'categories', 'category')
_SPLIT_COLUMNS = ('split', 'subset', 'set', 'fold', 'partition')
_DELIMITERS = (';', '|', ',', ' ')
_VALUES = {'0': 0, '1': 1, '-1': -1, '0.0': 0, '1.0': 1, '-1.0': -1}
_EXTENSIONS = ('.jpg', '.jpeg', '.png', '.bmp', '.webp')


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
    table = _read_table(shared[0])
    if table.find_split(split_column, split) is None:
        raise UsageError(
            f"{shared[0]} has no column of splits to find '{split}'. Its columns: {table.listing}. Set "
            '--csv-split-column, or write a file for each split (train.csv, val.csv).')
    return shared[0]


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
        table = _read_table(Path(file))
        image = table.find(image_column, _IMAGE_COLUMNS, '--csv-image-column')
        if image is None:
            raise UsageError(f'{file} has no column of images. Its columns: {table.listing}. Set --csv-image-column.')
        part = table.find_split(split_column, split)
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
                column for column, name in enumerate(table.columns)
                if column not in (image, part) and (class_names is not None or name.lower() not in _IMAGE_COLUMNS)]
            class_names, targets = _read_class_columns(table, columns, class_names)

        kept = _rows_of_split(table, part, split)
        for row in kept:
            if not table.rows[row][image]:
                raise UsageError(f'{table.where(row)} has no image.')
        paths = _complete([os.path.normpath(os.path.join(root, table.rows[row][image])) for row in kept])
        check_unique(paths, str(file))
        if images_must_exist:
            check_files_exist(paths, str(file))
        super().__init__(paths, targets[kept], class_names, root=root)
        self.labels_file = file
        self.split_column = None if part is None else table.columns[part]


class _Table(NamedTuple):
    file: Path
    columns: list[str]
    lines: list[int]
    rows: list[list[str]]

    @property
    def listing(self) -> str:
        return ', '.join(self.columns)

    def where(self, row: int) -> str:
        return f'{self.file}:{self.lines[row]}'

    def find(self, given: Optional[str], usual: Sequence[str], flag: str) -> Optional[int]:
        """Index of the given column, or else of the first usual one."""
        if given is not None:
            if given not in self.columns:
                raise UsageError(f"{self.file} has no column '{given}' ({flag}). Its columns: {self.listing}.")
            return self.columns.index(given)
        lower = [column.lower() for column in self.columns]
        return next((lower.index(name) for name in usual if name in lower), None)

    def find_split(self, given: Optional[str], split: Optional[str] = None) -> Optional[int]:
        """Index of the column of splits: the given one, or a usual one whose values are names of splits."""
        column = self.find(given, _SPLIT_COLUMNS, '--csv-split-column')
        if column is None or given is not None:
            return column
        names = {*TRAIN, *VALIDATION, 'test', (split or '').lower()}
        return column if any(row[column].lower() in names for row in self.rows) else None


def _read_table(file: Path) -> _Table:
    lines, rows = [], []
    try:
        with io.TextIOWrapper(open_regular(file), encoding='utf-8-sig', newline='') as stream:
            reader = csv.reader(stream, delimiter='\t' if file.suffix.lower() == '.tsv' else ',', strict=True)
            for fields in reader:
                cells = [field.strip() for field in fields]
                if not any(cells):
                    continue
                if rows and len(cells) != len(rows[0]):
                    raise UsageError(
                        f'Expected {len(rows[0])} fields as in the header in {file}:{reader.line_num}, but got '
                        f'{len(cells)}. Quote fields that contain the separator.')
                lines.append(reader.line_num)
                rows.append(cells)
    except csv.Error as error:
        raise UsageError(f'Invalid CSV in {file}:{reader.line_num}: {error}.') from error
    except UnicodeDecodeError as error:
        raise UsageError(f'Expected UTF-8 text in {file}, but got: {error}') from error
    except OSError as error:
        raise UsageError(f'Cannot read {file}: {error.strerror or error}.') from error
    if len(rows) < 2:
        raise UsageError(f'Expected a header and rows in {file}, but got {"a header only" if rows else "nothing"}.')
    columns = rows[0]
    duplicate = next((name for name in columns if name and columns.count(name) > 1), None)
    if duplicate is not None:
        raise UsageError(f"{file} has two columns '{duplicate}'.")
    return _Table(file, columns, lines[1:], rows[1:])


def _read_labels(
        table: _Table,
        column: int,
        delimiter: Optional[str],
        class_names: Optional[Sequence[str]],
) -> tuple[list[str], torch.Tensor]:
    """Class names and (N, classes) targets of one column of labels."""
    whole = set(class_names or ())  # known names are not split: 'dining table' has a space
    cells = [row[column] for row in table.rows]
    if delimiter is None:
        delimiter = next((d for d in _DELIMITERS if any(d in cell for cell in cells if cell not in whole)), None)
        if delimiter == ' ':
            _logger.warning(f'Labels of {table.file} are split at spaces. Set --csv-delimiter if that is wrong.')
    labels = []
    for cell in cells:
        parts = [cell] if delimiter is None or cell in whole else cell.split(delimiter)
        labels.append([part.strip() for part in parts if part.strip()])
    distinct = {label for row in labels for label in row}
    integers = all(label.isascii() and label.isdigit() for label in distinct)
    if class_names is None:
        class_names = sorted(distinct, key=(lambda label: (int(label), label)) if integers else None)
        if not class_names:
            raise UsageError(
                f"Column '{table.columns[column]}' of {table.file} has no labels. Set --csv-label-column to another "
                'column, or --class-map to the classes.')
    class_to_idx = {name: index for index, name in enumerate(class_names)}
    if integers and not distinct <= class_to_idx.keys():
        class_to_idx = {label: int(label) for label in distinct}

    separated = '' if delimiter is None else f"; labels are split at '{delimiter}', see --csv-delimiter"
    hint = f'--class-map lists the classes{separated}'
    targets = torch.zeros(len(labels), len(class_names), dtype=torch.int8)
    for row, row_labels in enumerate(labels):
        for label in row_labels:
            index = class_index(label, class_to_idx, f'{table.where(row)} ({hint})')
            if index >= len(class_names):
                raise UsageError(
                    f'Expected class indices 0 to {len(class_names) - 1} (--class-map) in {table.where(row)}, but got '
                    f'{label}.')
            targets[row, index] = 1
    return list(class_names), targets


def _read_class_columns(
        table: _Table,
        columns: Sequence[int],
        class_names: Optional[Sequence[str]],
) -> tuple[list[str], torch.Tensor]:
    """Class names and (N, classes) targets of one column per class."""
    if class_names is not None:
        names = {table.columns[column]: column for column in columns}
        missing = [name for name in class_names if name not in names]
        if missing:
            raise UsageError(
                f"{table.file} has no column for class '{missing[0]}' of --class-map. Its columns: {table.listing}. "
                'Correct the class, or set --csv-label-column to a column of labels.')
        columns = [names[name] for name in class_names]
    columns = [column for column in columns if table.columns[column]]  # a column without a name is an index
    if not columns:
        raise UsageError(
            f'{table.file} has neither a column of labels nor columns of classes. Its columns: {table.listing}. Set '
            '--csv-label-column.')
    targets = torch.empty(len(table.rows), len(columns), dtype=torch.int8)
    for row, cells in enumerate(table.rows):
        values = [_VALUES.get(cells[column]) for column in columns]
        if None in values:
            column = columns[values.index(None)]
            got = f"'{cells[column]}'" if cells[column] else 'nothing'
            raise UsageError(
                f"Expected 1 (present), 0 (absent) or -1 (unknown) in column '{table.columns[column]}' of "
                f'{table.where(row)}, but got {got}. Set --csv-label-column to a column of labels, or --class-map to '
                'the columns of classes.')
        targets[row] = torch.tensor(values, dtype=torch.int8)
    return [table.columns[column] for column in columns], targets


def _rows_of_split(table: _Table, column: Optional[int], split: Optional[str]) -> list[int]:
    if column is None or split is None:
        return list(range(len(table.rows)))
    values = [row[column].lower() for row in table.rows]
    name = next((name for name in split_names(split.lower()) if name in values), None)
    if name is None:
        there = ', '.join(sorted({row[column] for row in table.rows}))
        raise UsageError(
            f"Column '{table.columns[column]}' of {table.file} has no split '{split}'. Its splits: {there}. Set "
            '--csv-split-column to another column.')
    return [row for row, value in enumerate(values) if value == name]


def _complete(paths: Sequence[str]) -> list[str]:
    """Add the extension of the existing file to names without one."""
    folders = Folders()
    completed = []
    for path in paths:
        if os.path.splitext(path)[1].lower() not in _EXTENSIONS:
            candidates = (path, *(path + e for ext in _EXTENSIONS for e in (ext, ext.upper())))
            path = next(filter(folders.has, candidates), path)
        completed.append(path)
    return completed
