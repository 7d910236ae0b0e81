""" Files: atomic writes, CSV and JSON """
import contextlib
import csv
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any, Iterator, Sequence, Union


@contextlib.contextmanager
def atomic_write(path: Union[str, Path]) -> Iterator[Path]:
    """ Give a temporary file to write to, which becomes the file in one step if all goes well.

    Args:
        path: The file; its folder is made if missing.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f'.{path.stem}.', suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_csv(rows: Sequence[dict[str, Any]], path: Union[str, Path]) -> None:
    """ Write a CSV file.

    Args:
        rows: Rows with the same names.
        path: The file.
    """
    with atomic_write(path) as temporary, open(temporary, 'w', newline='', encoding='utf-8') as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_json(content: Any, path: Union[str, Path]) -> None:
    """Write a JSON file; what is not a number becomes null, as JSON has no NaN."""
    with atomic_write(path) as temporary:
        text = json.dumps(_without_nan(content), indent=2, ensure_ascii=False, allow_nan=False)
        temporary.write_text(text + '\n', encoding='utf-8')


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
