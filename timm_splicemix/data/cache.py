""" Parsed label files, which one process of a machine writes and the others read """
import contextlib
import hashlib
import logging
import os
import zipfile
from pathlib import Path
from typing import Callable, Optional

import numpy as np
from filelock import FileLock

from ..errors import UsageError
from ..files import atomic_write, open_regular

_logger = logging.getLogger(__name__)
_MIN_SIZE = 1 << 24  # smaller files are parsed in less than a second
_STAMP = 'stamp'

Arrays = dict[str, np.ndarray]


def cache_folder() -> Path:
    """The user's folder for files that can be created again."""
    return Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'timm_splicemix'


def cached_arrays(source: Path, version: int, parse: Callable[[], Arrays]) -> Arrays:
    """ Parse a label file, or read what another process parsed.

    The cache of a large file is beside it, or in the user's cache if that folder is read-only. It is valid while the
    file has the same size and time of modification.

    Args:
        source: The label file.
        version: Version of the arrays; caches of other versions are not read.
        parse: Parses the file to arrays without Python objects.
    """
    status = os.stat(source)
    if status.st_size < _MIN_SIZE:
        return parse()
    stamp = np.array([version, status.st_size, status.st_mtime_ns])
    cache = _place(source)
    with lock_beside(cache):
        arrays = _read(cache, stamp)
        if arrays is None:
            _logger.info(f'Reading {source} ({status.st_size / 1e6:.0f} MB)')
            arrays = parse()
            try:
                with atomic_write(cache) as temporary, open(temporary, 'wb') as file:
                    np.savez(file, allow_pickle=False, **{_STAMP: stamp}, **arrays)
            except UsageError as error:
                _logger.info(f'The labels are not cached: {error}')
    return arrays


@contextlib.contextmanager
def lock_beside(cache: Path):
    """Hold a lock while a cache is read or written, so that one process creates it; without locks all of them do."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, NotImplementedError):
            cache.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(cache.with_suffix('.lock')))
        yield


def _place(source: Path) -> Path:
    source = source.absolute()
    if os.access(source.parent, os.W_OK):
        return source.with_name(f'.{source.name}.npz')
    return cache_folder() / 'labels' / f'{hashlib.sha256(os.fsencode(source)).hexdigest()[:32]}.npz'


def _read(cache: Path, stamp: np.ndarray) -> Optional[Arrays]:
    try:
        with open_regular(cache) as file, np.load(file, allow_pickle=False) as content:
            arrays = {name: content[name] for name in content.files}
    except (OSError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile):  # absent or damaged
        return None
    return arrays if np.array_equal(arrays.pop(_STAMP, None), stamp) else None
