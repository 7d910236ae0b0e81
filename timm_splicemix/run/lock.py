""" The lock of an output folder, so that two runs never write to the same one """
import contextlib
import errno
import logging
import os
import socket
from pathlib import Path
from typing import Optional

from ..errors import UsageError
from ..files import os_error_reason

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_logger = logging.getLogger(__name__)
_NAME = '.lock'


class FolderInUse(UsageError):
    """Another process holds the lock of a folder."""


class FolderLock:
    """ A lock that a process holds until `release()` or its end, however it ends.

    It is a POSIX lock on a file with the host and the id of the process. The system releases it when the process ends,
    and forked workers do not inherit it.

    Args:
        folder: The folder; it is created.
    """

    def __init__(self, folder: Path):
        self.path = folder / _NAME
        self._file: Optional[int] = None
        if fcntl is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            while self._file is None:
                self._file = self._acquire()
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise UsageError(f'Cannot write {self.path}: {os_error_reason(self.path, error)}.') from error
            _logger.warning(f'{folder} is on a file system without locks: never start a second run there.')

    def _acquire(self) -> Optional[int]:
        """Return the open and locked file, None if its owner removed it meanwhile."""
        file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not self._is_current(file):
                os.close(file)
                return None
        except (BlockingIOError, PermissionError):
            owner = os.read(file, 500).decode(errors='replace') or 'another process'
            os.close(file)
            raise FolderInUse(
                f'{self.path.parent} is in use by a run ({owner}). Wait until it ends or stop it, or set --output or '
                '--experiment to write to another folder.') from None
        os.truncate(file, 0)
        os.write(file, f'process {os.getpid()} on {socket.gethostname()}'.encode())
        return file

    def _is_current(self, file: int) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(file), os.stat(self.path))
        return False

    def release(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()
            os.close(self._file)
            self._file = None
