""" CSV and TSV files with a header, as columns of text """
import contextlib
import csv
import gc
import io
import itertools
import json
import re
from pathlib import Path
from typing import Iterator, NamedTuple, Optional, Sequence

from ...errors import UsageError
from ...files import printable, read_text, unescape_cell
from .find import SAVE_AS_CSV, WORKBOOKS

# Usual names of columns, in lower case and without spaces, _ and -
IMAGE_COLUMNS = (
    'image', 'imagepath', 'imgpath', 'path', 'file', 'filename', 'filepath', 'imagename', 'imgname', 'imagefile',
    'imagefilename', 'imageindex', 'img', 'imageid', 'imgid', 'id')
LABEL_COLUMNS = (
    'labels', 'label', 'labelnames', 'labelname', 'tags', 'tag', 'classes', 'class', 'classnames', 'classname',
    'categories', 'category', 'findinglabels')
SPLIT_COLUMNS = ('split', 'subset', 'set', 'fold', 'partition')
# An item of a list as Python, NumPy or people write it: 'dining table', "cat", dog
_LIST_ITEM = re.compile(r"""'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)"|([^\s'",\[\]][^'",\[\]]*)""")
_BLOCK = 1 << 13  # rows that are split at once


@contextlib.contextmanager
def garbage_collector_paused() -> Iterator[None]:
    """Millions of new lists would make the collector scan all objects again and again; they have no cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Table(NamedTuple):
    file: Path
    header: list[str]
    cells: list[list[str]]  # of each column

    @property
    def listing(self) -> str:
        return printable(', '.join(self.header))

    def __len__(self) -> int:
        return len(self.cells[0])

    def where(self, row: int) -> str:
        """File and line of a row, for errors; reads the file once more."""
        return f'{self.file}:{next(itertools.islice(read_rows(self.file), row + 1, None))[0]}'

    def column(self, index: int) -> list[str]:
        return [cell.strip() for cell in self.cells[index]]

    def find(self, given: Optional[str], usual: Sequence[str], flag: str) -> Optional[int]:
        return find_column(self.file, self.header, given, usual, flag)


def find_column(
        file: Path,
        header: Sequence[str],
        given: Optional[str],
        usual: Sequence[str],
        flag: str,
) -> Optional[int]:
    """Index of the given column, or else of the first usual one."""
    if given is not None:
        if given not in header:
            raise UsageError(f"{file} has no column '{given}' ({flag}). Its columns: {', '.join(header)}.")
        return header.index(given)
    plain = list(map(plain_name, header))
    return next((plain.index(name) for name in usual if name in plain), None)


def plain_name(name: str) -> str:
    """A column's name in lower case, without spaces, _ and -: 'Image ID', 'image_id' and 'ImageID' are the same."""
    return re.sub(r'[\s_-]+', '', name).lower()


def parse_lists(cells: Sequence[str]) -> Optional[list[list[str]]]:
    """Items of cells that are lists, as in ['cat', 'dog']; None if a cell is neither a list nor empty."""
    if not any(cells) or not all(cell.startswith('[') and cell.endswith(']') for cell in cells if cell):
        return None
    items = {cell: _parse_list(cell) for cell in set(cells)}
    return [items[cell] for cell in cells]


def _parse_list(cell: str) -> list[str]:
    with contextlib.suppress(ValueError, RecursionError):
        content = json.loads(cell or '[]')
        if all(isinstance(item, (str, int, float)) for item in content):
            return [str(item).strip() for item in content]
    return [''.join(groups).strip() for groups in _LIST_ITEM.findall(cell)]


def read_rows(file: Path) -> Iterator[tuple[int, list[str]]]:
    """Line and cells of each row that is not blank, the header first."""
    text = _read_text(file)
    reader = csv.reader(io.StringIO(text, newline=''), delimiter=_delimiter(file, text), strict=True)
    try:
        for fields in reader:
            cells = [unescape_cell(field.strip()) for field in fields]
            if any(cells):
                yield reader.line_num, cells
    except csv.Error as error:
        raise UsageError(f'Invalid CSV in {file}:{reader.line_num}: {error}.') from error


@garbage_collector_paused()
def read_table(file: Path) -> Table:
    text = _read_text(file)
    delimiter = _delimiter(file, text)
    columns = _split_plain(text, delimiter)
    if columns is None:
        columns = _parse_columns(text, delimiter)
    if columns is None:
        _check_rows(file)
    if not columns or len(columns[0]) < 2:
        raise UsageError(f'Expected a header and rows in {file}, but got {"a header only" if columns else "nothing"}.')
    if "'" in text:  # a file that `write_csv` wrote
        columns = [list(map(unescape_cell, column)) for column in columns]
    header = [column.pop(0).strip() for column in columns]
    duplicate = next((name for name in header if name and header.count(name) > 1), None)
    if duplicate is not None:
        raise UsageError(f"{file} has two columns '{duplicate}'.")
    return Table(file, header, columns)


def _read_text(file: Path) -> str:
    """Read text as spreadsheets write it, maybe with a first line 'sep=;', which becomes blank."""
    refuse_workbook(file)
    text = read_text(file)
    return text[5:] if re.match(r'sep=[,;\t][\r\n]', text) else text


def refuse_workbook(file: Path) -> None:
    if file.suffix.lower() in WORKBOOKS:
        raise UsageError(f'{file} is a workbook. {SAVE_AS_CSV}')


def _delimiter(file: Path, text: str) -> str:
    """Separator of the cells: TAB in TSV files, else a comma, or what the header has instead of commas."""
    if file.suffix.lower() == '.tsv':
        return '\t'
    header = re.search(r'[^\r\n]*\S[^\r\n]*', text)
    return next((mark for mark in (',', ';', '\t') if header and mark in header[0]), ',')


def _split_plain(text: str, delimiter: str) -> Optional[list[list[str]]]:
    """Columns of text without quotes, blank rows and rows of another length; None for other text. Faster than csv."""
    text = text.replace('\r\n', '\n').rstrip('\n')
    if '"' in text or '\r' in text:
        return None
    lines = text.split('\n')
    number = lines[0].count(delimiter)
    columns: list[list[str]] = [[] for _ in range(number + 1)]
    for start in range(0, len(lines), _BLOCK):
        block = lines[start:start + _BLOCK]
        if {line.count(delimiter) for line in block} != {number} or delimiter * number in block:
            return None
        cells = delimiter.join(block).split(delimiter)
        for index, column in enumerate(columns):
            column += cells[index::number + 1]
    return columns


def _parse_columns(text: str, delimiter: str) -> Optional[list[list[str]]]:
    """Columns of any CSV text; None if it is invalid or has rows of another length."""
    rows = csv.reader(io.StringIO(text, newline=''), delimiter=delimiter, strict=True)
    columns: list[list[str]] = []
    try:
        while block := list(itertools.islice(rows, _BLOCK)):
            block = [row for row in block if row and (row[0].strip() or ''.join(row).strip())]
            columns = columns or [[] for _ in (block or [()])[0]]
            if not set(map(len, block)) <= {len(columns)}:
                return None
            for column, cells in zip(columns, zip(*block)):
                column.extend(cells)
    except csv.Error:
        return None
    return columns


def _check_rows(file: Path) -> None:
    """Raise an error that names the first invalid line."""
    header = None
    for line, cells in read_rows(file):
        header = header or cells
        if len(cells) != len(header):
            raise UsageError(
                f'Expected {len(header)} fields as in the header in {file}:{line}, but got {len(cells)}. Quote fields '
                'that contain the separator.')
