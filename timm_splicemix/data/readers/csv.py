""" CSV and TSV files with one column of labels, or with a column of 0, 1 and -1 per class """
import itertools
import logging
from collections import defaultdict
from pathlib import Path
from typing import Iterable, NamedTuple, Optional, Sequence, Union

import numpy as np
import torch

from ...errors import UsageError
from ..class_map import source_of
from ..splits import split_names
from .base import (
    EXTENSIONS,
    MultiLabelReader,
    check_files_exist,
    class_index,
    complete_extensions,
    has_splits,
    image_paths,
)
from .find import find_label_file
from .table import (
    IMAGE_COLUMNS,
    LABEL_COLUMNS,
    SPLIT_COLUMNS,
    Table,
    find_column,
    garbage_collector_paused,
    parse_lists,
    plain_name,
    read_rows,
    read_table,
)

_logger = logging.getLogger(__name__)
EMPTY = {'negative': 0, 'unknown': -1}  # target of empty cells
_DELIMITERS = (';', '|', ',', ' ')
_VALUES = {
    '0': 0, '1': 1, '-1': -1, '0.0': 0, '1.0': 1, '-1.0': -1, 'true': 1, 'false': 0, 'yes': 1, 'no': 0, 'y': 1, 'n': 0}
_NOTHING = ('', 'nan', 'na', 'n/a', 'null', 'none')  # what programs write to empty cells
_IN_LISTS = '\x1f'  # separates the labels of a list, which may contain any other character
_BLOCK = 1 << 13  # rows whose labels are split at once


def find_csv(
        root: Union[str, Path],
        split: str,
        split_column: Optional[str] = None,
        may_lack_splits: bool = False,
) -> Path:
    """ Find the file of a split: its own (train.csv, val.tsv, train/_classes.csv, ...), or the one of all splits.

    The latter must have a column of splits: without it, training and validation would use the same images. With
    `may_lack_splits`, the file is divided later.
    """
    file, is_shared = find_label_file(root, split, ('.csv', '.tsv'))
    if not is_shared:
        return file
    rows = (cells for _, cells in read_rows(file))
    header = next(rows, [])
    column = find_column(file, header, split_column, SPLIT_COLUMNS, '--csv-split-column')
    values = (cells[column] for cells in rows if len(cells) == len(header))
    if column is None or (split_column is None and not has_splits(values, split)):
        if may_lack_splits:
            return file
        raise UsageError(
            f"{file} has no column of splits to find '{split}'. Its columns: {', '.join(header)}. Set "
            '--csv-split-column, write a file for each split (train.csv, val.csv), let train.py --val-fraction 0.2 '
            'split the images, or give the split.json of a run by --split-file.')
    return file


class ReaderCsv(MultiLabelReader):
    """ Images and labels of a CSV (or, by its suffix, TSV) file with a header.

    Labels are either in one column (`cat;dog`; an empty cell is no label) or in one column per class (1, true or yes:
    present; 0, false or no: absent; -1: unknown). An image may have several rows with one label each, with a column
    Confidence of 1 (present) and 0 (absent) or without. Columns are recognised by their names. Without class_names, the
    classes are the columns in their order, or the sorted labels of the whole file, whatever their split.

    Args:
        root: Folder that the images are relative to; names without an extension get that of the existing file.
        file: The file.
        split: Rows to keep if there is a column of splits; None keeps all.
        class_names: Name of each class. Labels may then be indices, and other columns of classes are ignored.
        image_column: Column of the images.
        label_column: Column of the labels.
        split_column: Column of the splits.
        label_delimiter: Separator of labels; None is the first of ; | , and space that occurs.
        empty_cells: Target of empty cells, and of classes without a Confidence: 'negative' 0 or 'unknown' -1.
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
            empty_cells: str = 'negative',
            images_must_exist: bool = True,
    ):
        if label_delimiter == '':
            raise UsageError("Expected --csv-delimiter to be a character, but got ''.")
        if empty_cells not in EMPTY:
            raise UsageError(f"Expected empty_cells to be {' or '.join(EMPTY)}, but got '{empty_cells}'.")
        table = read_table(Path(file))
        image = _find_images(table, image_column)
        part = table.find(split_column, SPLIT_COLUMNS, '--csv-split-column')
        if part is not None and split_column is None and not has_splits(table.column(part), split):
            part = None
        rows = _find_rows(table, root, image, part, split)
        label = table.find(label_column, LABEL_COLUMNS, '--csv-label-column')
        if label is not None:
            labels = _read_labels(table, rows, label, label_delimiter, class_names)
            class_names, targets = labels.class_names, _to_targets(labels, rows, empty_cells)
        elif label_delimiter is not None:
            raise UsageError(
                f"{file} has no column of labels to split at '{label_delimiter}'. Its columns: {table.listing}. Set "
                '--csv-label-column, or leave --csv-delimiter out.')
        else:
            columns = [
                column for column, name in enumerate(table.header) if column not in (image, part)
                and (class_names is not None or plain_name(name) not in IMAGE_COLUMNS)]
            class_names, targets = _read_class_columns(table, columns, class_names, empty_cells)
            targets = _merge_rows(table, rows, targets)

        if images_must_exist:
            check_files_exist(rows.paths, str(file), root)
        self.labels_file = file
        super().__init__(rows.paths, targets, class_names, root=root)
        self.split_column = None if part is None else table.header[part]


class _Rows(NamedTuple):
    """Images of the rows of a table."""
    table: Table
    keys: Sequence  # image of each row, with its split if only one split is kept
    paths: list[str]  # distinct images of the kept rows
    images: np.ndarray  # number of each row's image in `paths`, -1 for rows of other splits

    @property
    def are_unique(self) -> bool:
        return len(self.paths) == len(self.images)


def _find_images(table: Table, given: Optional[str]) -> int:
    column = table.find(given, IMAGE_COLUMNS, '--csv-image-column')
    if column is not None:
        return column
    if any(name.endswith(EXTENSIONS) for name in table.header):
        raise UsageError(
            f'The first line of {table.file} names an image: {table.listing}. Write a header above it, such as '
            'image,labels.')
    raise UsageError(f'{table.file} has no column of images. Its columns: {table.listing}. Set --csv-image-column.')


def _find_rows(
        table: Table,
        root: Union[str, Path],
        image: int,
        part: Optional[int],
        split: Optional[str],
) -> _Rows:
    names = table.column(image)
    if '' in names:
        raise UsageError(f'{table.where(names.index(""))} has no image.')
    paths = complete_extensions(image_paths(root, names, str(table.file)))
    kept = _rows_of_split(table, part, split)
    if kept is None and len(set(paths)) == len(paths):
        return _Rows(table, paths, paths, np.arange(len(paths)))
    number_of: dict[str, int] = defaultdict(itertools.count().__next__)
    rows = np.arange(len(paths)) if kept is None else np.array(kept)
    images = np.full(len(paths), -1)
    images[rows] = [number_of[paths[row]] for row in rows.tolist()]
    keys = paths if kept is None else list(zip(paths, table.column(part)))
    return _Rows(table, keys, list(number_of), images)


class _Labels(NamedTuple):
    """Labels of a column: the row and the class of each, and whether it is present (1) or absent (0)."""
    class_names: list[str]
    rows: np.ndarray
    columns: np.ndarray
    values: Optional[np.ndarray]  # None: all are present


def _read_labels(
        table: Table,
        rows: _Rows,
        column: int,
        delimiter: Optional[str],
        class_names: Optional[Sequence[str]],
) -> _Labels:
    whole = set(class_names or ())  # known names are not split: 'dining table' has a space
    cells = table.column(column)
    confidences = _read_confidences(table)
    lists = None if delimiter is not None else parse_lists(cells)
    if lists is not None:
        _refuse_multi_hot(table, lists)
        delimiter, cells = _IN_LISTS, list(map(_IN_LISTS.join, lists))
    elif delimiter is None:
        delimiter = _find_delimiter(rows, cells, whole)
    if not rows.are_unique:
        _log_repeated_rows(rows, cells if confidences is None else zip(cells, confidences.tolist()))
    labels, label_rows, numbers = _split_labels(cells, delimiter, whole)
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

    separated = '' if delimiter in (None, _IN_LISTS) else f"; labels are split at '{delimiter}', see --csv-delimiter"
    source = source_of(class_names)
    hint = f'{source} lists the classes{separated}'
    for number, label in enumerate(labels):
        if class_to_idx.get(label, len(class_names)) >= len(class_names):
            where = table.where(label_rows[numbers == number][0])
            class_index(label, class_to_idx, f'{where} ({hint})')
            raise UsageError(
                f'Expected class indices 0 to {len(class_names) - 1} ({source}) in {where}, but got {label}.')
    columns = np.array([class_to_idx[label] for label in labels], dtype=int)[numbers]
    values = None if confidences is None else confidences[label_rows]
    return _Labels(list(class_names), label_rows, columns, values)


def _find_delimiter(rows: _Rows, cells: Sequence[str], whole: set[str]) -> Optional[str]:
    """Separator of the labels in a cell; None if each cell is one label."""
    file = rows.table.file
    found = next((d for d in _DELIMITERS if any(d in cell for cell in cells if cell not in whole)), None)
    if rows.are_unique or len(set(zip(rows.keys, cells))) == len(set(rows.keys)):
        if found == ' ':
            _logger.warning(f'Labels of {file} are split at spaces. Set --csv-delimiter if that is wrong.')
        return found
    if found not in (None, ' '):
        seen: dict = {}
        row = next(row for row, (key, cell) in enumerate(zip(rows.keys, cells)) if seen.setdefault(key, cell) != cell)
        raise UsageError(
            f"{rows.table.where(row)} lists an image again with other labels, and cells of the file contain '{found}'. "
            f"Set --csv-delimiter '{found}' to unite the labels of all rows of an image, or write one row per image.")
    _logger.info(f'{file} has one label per row: {len(rows.paths):,} images in {int((rows.images >= 0).sum()):,} rows.')
    return None


def _refuse_multi_hot(table: Table, lists: Sequence[Sequence[str]]) -> None:
    row, values = next(((row, values) for row, values in enumerate(lists) if len(set(values)) < len(values)), (0, ()))
    if values:
        raise UsageError(
            f"{table.where(row)} has the list [{', '.join(values)!s:.200}], in which a label occurs again. For lists "
            'of 0 and 1, write a column for each class, or read the lists from a JSON file (--dataset json).')


def _log_repeated_rows(rows: _Rows, cells: Iterable) -> None:
    kept = [pair for pair, image in zip(zip(rows.keys, cells), rows.images.tolist()) if image >= 0]
    repeated = len(kept) - len(set(kept))
    if repeated:
        _logger.info(f'{repeated:,} duplicate rows of {rows.table.file} were merged.')


def _read_confidences(table: Table) -> Optional[np.ndarray]:
    """Whether the label of each row is present (1) or absent (0); None without a column that tells it."""
    column = table.find(None, ('confidence',), '')
    if column is None:
        return None
    values = {cell: _VALUES.get(cell.strip().lower()) for cell in set(table.cells[column])}
    other = next((cell for cell, value in values.items() if value not in (0, 1)), None)
    if other is None:
        return np.fromiter(map(values.__getitem__, table.cells[column]), np.int8, len(table))
    _logger.warning(
        f"Column '{table.header[column]}' of {table.file} has other values than 0 and 1, such as {other!r:.80}. It is "
        'not used: every listed label counts as present.')
    return None


def _to_targets(labels: _Labels, rows: _Rows, empty_cells: str) -> torch.Tensor:
    """(images, classes) targets of a column of labels; the labels of an image's rows are united."""
    targets = torch.zeros(len(rows.paths), len(labels.class_names), dtype=torch.int8)
    images, columns, values = rows.images[labels.rows], labels.columns, labels.values
    if not rows.are_unique:
        kept = images >= 0
        images, columns, values = images[kept], columns[kept], None if values is None else values[kept]
    if values is not None:
        what = 'classes of images without a Confidence'
        listed = np.zeros(targets.shape, bool)
        listed[images, columns] = True
        targets.numpy()[~listed] = EMPTY[empty_cells]
        empty = listed.size - int(listed.sum())
        images, columns = images[values == 1], columns[values == 1]
    else:
        what = 'images without a label'
        labelled = np.zeros(len(rows.paths), bool)
        labelled[images] = True
        targets[torch.from_numpy(~labelled)] = EMPTY[empty_cells]
        empty = len(rows.paths) - int(labelled.sum())
    _log_empty(empty, what, rows.table.file, empty_cells)
    targets.numpy()[images, columns] = 1
    return targets


def _log_empty(number: int, what: str, file: Path, empty_cells: str) -> None:
    if number and empty_cells == 'negative':
        _logger.info(f'{number:,} {what} in {file} count as negative; --csv-empty unknown makes them unknown.')
    elif number:
        _logger.info(f'{number:,} {what} in {file} count as unknown (--csv-empty).')


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
        empty_cells: str,
) -> tuple[list[str], torch.Tensor]:
    """Class names and (N, classes) targets of one column per class."""
    if class_names is not None:
        names = {table.header[column]: column for column in columns}
        missing = [name for name in class_names if name not in names]
        if missing:
            raise UsageError(
                f"{table.file} has no column for class '{missing[0]}' of {source_of(class_names)}. Its columns: "
                f'{table.listing}. Correct the class, or set --csv-label-column to a column of labels.')
        columns = [names[name] for name in class_names]
    columns = [column for column in columns if table.header[column]]  # a column without a name is an index
    if not columns:
        raise UsageError(
            f'{table.file} has neither a column of labels nor columns of classes. Its columns: {table.listing}. Set '
            '--csv-label-column.')
    targets = torch.empty(len(table), len(columns), dtype=torch.int8)
    empty = 0
    for place, column in enumerate(columns):
        cells = table.cells[column]
        texts = {cell: cell.strip().lower() for cell in set(cells)}
        values = {cell: EMPTY[empty_cells] if text in _NOTHING else _VALUES.get(text) for cell, text in texts.items()}
        if None in values.values():
            row = next(row for row, cell in enumerate(cells) if values[cell] is None)
            raise UsageError(
                f"Expected 1 (present), 0 (absent) or -1 (unknown) in column '{table.header[column]}' of "
                f'{table.where(row)}, but got {cells[row].strip()!r:.200}. Set --csv-label-column to a column of '
                'labels, or --class-map to a file with the columns of classes.')
        targets.numpy()[:, place] = np.fromiter(map(values.__getitem__, cells), np.int8, len(cells))
        empty += sum(cells.count(cell) for cell, text in texts.items() if text in _NOTHING)
    _log_empty(empty, 'empty cells', table.file, empty_cells)
    if not empty and (targets == -1).any() and not (targets == 0).any():
        _logger.warning(
            f'{table.file} has 1 and -1, but no 0: -1 means unknown. Write 0 instead if it stands for absent classes.')
    return [table.header[column] for column in columns], targets


def _merge_rows(table: Table, rows: _Rows, targets: torch.Tensor) -> torch.Tensor:
    """(images, classes) targets of (rows, classes); rows of the same image must be equal."""
    if rows.are_unique:
        return targets
    kept = np.flatnonzero(rows.images >= 0)
    images, first = np.unique(rows.images[kept], return_index=True)
    merged = targets[kept[first]]
    different = (merged[rows.images[kept]] != targets[kept]).any(dim=1)
    if different.any():
        row = kept[int(different.nonzero()[0])]
        other = kept[first][rows.images[row]]
        raise UsageError(
            f'{table.where(row)} and {table.where(other)} list {rows.paths[rows.images[row]]} with different labels. '
            'Remove one of these rows.')
    if len(kept) > len(images):
        _logger.info(f'{len(kept) - len(images):,} duplicate rows of {table.file} were merged.')
    return merged


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
