""" Files and text: atomic writes, JSON, CSV and YAML, names of folders, text tables

A file that cannot be read or written raises a `UsageError` with its name.
"""
import codecs
import contextlib
import csv
import io
import json
import math
import os
import re
import stat
import tempfile
from pathlib import Path
from typing import Any, BinaryIO, Callable, Iterator, Optional, Sequence, Union

import yaml

from .errors import UsageError

_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
PathLike = Union[str, Path]
# Control characters, separators of lines, changes of the writing direction, and undecodable bytes of file names
_CONTROL = re.compile('[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]')
_FORMULA = re.compile(r"'*[=+\-@\t\r]")  # beginning of a cell that a spreadsheet computes, or of one escaped by `'`


@contextlib.contextmanager
def atomic_write(path: PathLike) -> Iterator[Path]:
    """Yield a temporary file, which replaces `path` if the block succeeds and is removed if it fails."""
    path, temporary = Path(path), None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f'.{path.stem[:80]}.', suffix=f'.tmp{path.suffix}')
        os.close(handle)
        temporary = Path(name)
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        os.replace(temporary, path)
    except Exception as error:
        reason = error if isinstance(error, (OSError, UnicodeEncodeError)) else temporary and _disk_error(temporary)
        if reason is None:
            raise
        raise UsageError(f'Cannot write {path}: {os_error_reason(path, reason)}.') from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def remove_temporary_files(folder: Path) -> None:
    """Remove what `atomic_write` left in a folder when its process was killed. Nobody else may write there."""
    for file in folder.glob('.*.tmp*'):
        if re.fullmatch(r'\..+\.\w{8}\.tmp(\.\w+)?', file.name):
            file.unlink(missing_ok=True)


def _disk_error(temporary: Path) -> Optional[OSError]:
    """Return the error of a write to a full disk, which torch and safetensors report as errors of their own."""
    try:
        with open(temporary, 'ab') as file:
            file.write(bytes(1 << 20))
    except OSError as error:
        return error
    return None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def os_error_reason(path: Path, error: Exception) -> str:
    """Say in a few words why a path cannot be read or written."""
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        return f'{next(parent for parent in path.parents if parent.exists())} is not a folder'
    return str(getattr(error, 'strerror', None) or error or type(error).__name__).rstrip('.')


def write_text(text: str, path: PathLike) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding='utf-8')


def write_csv(rows: Sequence[dict[str, Any]], path: PathLike) -> None:
    """Write rows that have the same keys. Text that a spreadsheet would compute gets a leading `'`, as in `'=1+1`."""
    with atomic_write(path) as temporary, open(temporary, 'w', newline='', encoding='utf-8') as file:
        writer = csv.DictWriter(file, list(rows[0]))
        header = {name: name for name in rows[0]}
        writer.writerows({name: _escape_cell(value) for name, value in row.items()} for row in (header, *rows))


def _escape_cell(value: Any) -> Any:
    if not isinstance(value, str) or not _FORMULA.match(value):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def unescape_cell(cell: str) -> str:
    """Remove the `'` that `write_csv` adds."""
    return cell[1:] if cell[:1] == "'" and _FORMULA.match(cell) else cell


def write_json(content: Any, path: PathLike) -> None:
    """Write JSON; NaN and infinity become null."""
    write_text(json.dumps(_without_nan(content), indent=2, ensure_ascii=False, allow_nan=False) + '\n', path)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def open_regular(path: PathLike) -> BinaryIO:
    """Open a regular file for reading; a pipe or a device, which may block, raises OSError."""
    non_blocking = getattr(os, 'O_NONBLOCK', 0)
    file = open(path, 'rb', opener=lambda name, flags: os.open(name, flags | non_blocking))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError('Not a regular file')
    return file


def read_bytes(path: PathLike) -> bytes:
    """Read a regular file."""
    try:
        with open_regular(path) as file:
            return file.read()
    except OSError as error:
        raise UsageError(f'Cannot read {path}: {os_error_reason(Path(path), error)}.') from error


def read_text(path: PathLike) -> str:
    """Read UTF-8 text, with or without a byte order mark, or UTF-16 text with one."""
    content = read_bytes(path)
    try:
        return content.decode('utf-16' if content.startswith(_UTF16_MARKS) else 'utf-8-sig')
    except UnicodeDecodeError as error:
        raise UsageError(
            f"Expected UTF-8 text in {path}, but got: {error}. Save it as UTF-8; Excel calls that 'CSV UTF-8'."
        ) from error


def read_json(path: PathLike) -> Any:
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f'Expected JSON in {path}, but got: {error}') from error


def read_yaml(path: PathLike) -> dict[str, Any]:
    """Read a YAML file that maps names to values."""
    text = read_text(path)
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: an impossible date
        raise UsageError(f'Expected YAML in {path}, but got: {error}') from error
    if not isinstance(content, dict):
        got = 'nothing' if content is None else type(content).__name__
        raise UsageError(f"Expected lines 'name: value' in {path}, but got {got}.")
    return {str(name): value for name, value in content.items()}


def read_rows(path: PathLike) -> list[list[str]]:
    """Read a CSV file as lists of cells, without empty lines and without the `'` that `write_csv` adds."""
    text = read_text(path)
    try:
        return [list(map(unescape_cell, row)) for row in csv.reader(io.StringIO(text, newline='')) if row]
    except csv.Error as error:
        raise UsageError(f'Expected CSV in {path}, but got: {error}') from error


def read_csv(path: PathLike, columns: Sequence[str] = ()) -> list[dict[str, str]]:
    """ Read a CSV file with a header; missing cells at the end of a row are empty.

    Args:
        path: The file.
        columns: Columns that the file must have.
    """
    header, *rows = read_rows(path) or [[]]
    missing = [name for name in columns if name not in header]
    if missing:
        raise UsageError(f"Expected a column '{missing[0]}' in {path}, but got {', '.join(header) or 'an empty file'}.")
    return [dict(zip(header, [*row, *[''] * (len(header) - len(row))])) for row in rows]


def free_folder(folder: PathLike, is_taken: Callable[[Path], bool] = Path.exists) -> Path:
    """Return `folder`, or the first of `folder`-2, `folder`-3, ... that is not taken."""
    first = folder = Path(folder)
    number = 1
    while is_taken(folder):
        number += 1
        folder = first.with_name(f'{first.name}-{number}')
    return folder


def short_names(paths: Sequence[PathLike], names: Optional[Sequence[str]] = None) -> list[str]:
    """Return the names that the user gave (--names), or else the shortest ends of the paths that differ."""
    parts = [Path(path).resolve().parts for path in paths]
    double = next((path for path, part in zip(paths, parts) if parts.count(part) > 1), None)
    if double is not None:
        raise UsageError(f'Expected different paths to compare, but got {double} twice.')
    if names is not None:
        if not len(names) == len(set(names)) == len(paths):
            raise UsageError(f'Expected {len(paths)} different --names, one for each path, but got {" ".join(names)}.')
        return list(names)
    lengths = range(1, max(map(len, parts)) + 1)
    candidates = (['/'.join(part[-length:]) for part in parts] for length in lengths)
    return next(names for names in candidates if len(set(names)) == len(names))


def printable(text: str, keep: str = '') -> str:
    """Escape control characters, which could change what a terminal shows, except for those in `keep`."""
    return _CONTROL.sub(
        lambda match: match[0] if match[0] in keep else match[0].encode('unicode_escape').decode(), text)


def format_table(rows: Sequence[dict[str, Any]], formats: Optional[dict[str, str]] = None) -> str:
    """ Format rows as a text table: text on the left, numbers on the right, - for None and NaN.

    Args:
        rows: Rows with the same keys.
        formats: Format of the numbers of a column, such as '+.2f'; a column of text with a format, be it empty, is on
            the right. By default floats have two digits, and integers a thousands separator.
    """
    formats = formats or {}
    columns = []
    for name in rows[0]:
        cells = [printable(name), *(_format_cell(row[name], formats.get(name)) for row in rows)]
        side = '<' if name not in formats and all(isinstance(row[name], str) for row in rows) else '>'
        width = max(map(len, cells))
        columns.append([f'{cell:{side}{width}}' for cell in cells])
    return '\n'.join('  '.join(line).rstrip() for line in zip(*columns))


def _format_cell(value: Any, spec: Optional[str]) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return '-'
    if isinstance(value, float):
        return format(value, spec or '.2f')
    return format(value, spec or ',') if isinstance(value, int) else printable(str(value))
