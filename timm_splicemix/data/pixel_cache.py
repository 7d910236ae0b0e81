""" Decoded images in a memory-mapped file that the processes of a machine share """
import atexit
import contextlib
import hashlib
import logging
import mmap
import os
import shutil
import time
import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Callable, Iterator, Optional, Sequence, Union

import numpy as np
import torch
from filelock import FileLock
from PIL import Image, ImageMode
from torchvision.transforms import InterpolationMode

from ..errors import UsageError
from ..files import atomic_write, os_error_reason, write_text
from .decode import oriented_size
from .transforms import crop_and_resize

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_logger = logging.getLogger(__name__)
_VERSION = 1
_RAM = Path('/dev/shm')
_BOOT_ID = Path('/proc/sys/kernel/random/boot_id')
_GROUPS, _GROUP_ROOT = Path('/proc/self/cgroup'), Path('/sys/fs/cgroup')
_INDEX, _PIXELS, _USERS, _BOOT = 'index.npz', 'pixels', 'users', 'boot'
_PAGE = 4096
_SUGGESTED_SIZES = (1024, 768, 512, 384, 256, 128)

# States of an image in the file. An image that is written but not synced is lost if the machine, not the run, stops.
_ABSENT, _WRITTEN, _SYNCED = 0, 1, 2

OpenImage = Callable[[int], BinaryIO]


class PixelCache:
    """ The 8-bit pixels of all images of a data set, each written when it is first decoded.

    The file starts with a byte per image, its state, which is set after the pixels are written. So a run that is killed
    loses at most the image that it was writing, and an image that is half-written is never read.

    Args:
        folder: Folder of the cache, as `open_pixel_cache` creates it.
        lock: Lock file of processes that open or close the cache.
        channels: Number of channels of the images.
        size: Length of the shorter side, see `open_pixel_cache`.
    """

    def __init__(self, folder: Path, lock: Path, channels: int, size: Optional[int]):
        self.folder = folder
        self.lock = lock
        self.channels = channels
        self.size = size
        self.pid = os.getpid()
        with np.load(self.folder / _INDEX, allow_pickle=False) as index:
            self._shapes, self._offsets = index['shapes'], index['offsets']
        self._file = os.open(self.folder / _PIXELS, os.O_RDWR)
        self._users = os.open(self.folder / _USERS, os.O_RDWR | os.O_CREAT)
        fcntl.flock(self._users, fcntl.LOCK_SH)  # workers inherit it; it ends with the last process
        self._bytes = np.frombuffer(mmap.mmap(self._file, 0, prot=mmap.PROT_READ), np.uint8)
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # torch warns that the pixels are read-only, which is intended
            self._pixels = torch.from_numpy(self._bytes)

    def __getstate__(self) -> tuple:  # of workers that are not forked
        return self.folder, self.lock, self.channels, self.size

    def __setstate__(self, state: tuple) -> None:
        self.__init__(*state)

    def __len__(self) -> int:
        return len(self._shapes)

    @property
    def num_bytes(self) -> int:
        """Size of the pixels of all images."""
        return int(self._offsets[-1] - self._offsets[0])

    @property
    def num_written(self) -> int:
        return int(np.count_nonzero(self._bytes[:len(self)]))

    def read(self, index: int) -> Optional[torch.Tensor]:
        """The pixels (H, W, C) of an image, which must not be changed, or None if it is not in the cache yet."""
        if self._bytes[index] == _ABSENT:
            return None
        return self._pixels[self._offsets[index]:self._offsets[index + 1]].view(*self._shapes[index].tolist(), -1)

    def write(self, index: int, pixels: torch.Tensor) -> torch.Tensor:
        """Resize decoded pixels (H, W, C) to the cache's size and write them; returns them."""
        pixels = self._resize(pixels)
        start, end = self._offsets[index:index + 2].tolist()
        if list(pixels.shape) == [*self._shapes[index].tolist(), self.channels]:  # else the header lied
            data = memoryview(pixels.contiguous().view(-1).numpy())
            try:
                while start < end:
                    start += os.pwrite(self._file, data[start - end:], start)
                os.pwrite(self._file, bytes([_WRITTEN]), index)
            except OSError as error:  # the image itself is readable
                raise UsageError(
                    f'Cannot write cache {self.folder}: {os_error_reason(self.folder, error)}. Free space there, or '
                    'choose another folder for --cache.') from error
        return pixels

    def _resize(self, pixels: torch.Tensor) -> torch.Tensor:
        height, width = _resized(*pixels.shape[:2], self.size)
        image = crop_and_resize(pixels.permute(2, 0, 1), None, (height, width), InterpolationMode.BILINEAR)
        return image.permute(1, 2, 0)

    def sync(self) -> None:
        """Write all pixels to the disk, so that they stay valid if the machine stops."""
        written = np.flatnonzero(self._bytes[:len(self)] == _WRITTEN)
        if len(written):
            os.fsync(self._file)
            for index in written.tolist():
                os.pwrite(self._file, bytes([_SYNCED]), index)

    def forget_unsynced(self) -> None:
        for index in np.flatnonzero(self._bytes[:len(self)] == _WRITTEN).tolist():
            os.pwrite(self._file, bytes([_ABSENT]), index)

    def close(self) -> None:
        """Sync a cache on disk, or remove one in memory if no other process uses it; done when Python ends."""
        if os.getpid() != self.pid or self._users is None:  # a worker, or closed already
            return
        with FileLock(self.lock, is_singleton=True):
            if self.folder.parent != _RAM:
                self.sync()
            elif not self._is_replaced() and not self.is_used_by_others():
                shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._users)
        os.close(self._file)
        self._users = None

    def _is_replaced(self) -> bool:
        """Whether the folder is that of a later cache, of images that changed, or removed."""
        try:
            return not os.path.samestat(os.fstat(self._users), os.stat(self.folder / _USERS))
        except FileNotFoundError:
            return True

    def is_used_by_others(self) -> bool:
        """Whether another process has the cache open."""
        try:
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            fcntl.flock(self._users, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False


def open_pixel_cache(
        place: Union[str, Path],
        names: Sequence[str],
        stamps: np.ndarray,
        open_image: OpenImage,
        mode: str = 'RGB',
        exif: bool = True,
        size: Optional[int] = None,
) -> PixelCache:
    """ Open the cache of a data set, or create it and reserve its space.

    Args:
        place: 'ram' for a cache in memory, which ends with the last process that uses it, or a folder.
        names: Name of each image.
        stamps: (N, 2) size and time of modification of each image; the cache is valid while they stay the same.
        open_image: Opens the file of an image, to find its size.
        mode: PIL mode of the images.
        exif: Whether decoded images are rotated according to their EXIF orientation.
        size: Length of the shorter side that larger images are resized to; None keeps their pixels exactly.
    """
    if fcntl is None:
        raise UsageError('--cache needs file locks of Linux or macOS.')
    if ImageMode.getmode(mode).typestr != '|u1':
        raise UsageError(f'--cache stores images of 8 bits per channel, but got --input-img-mode {mode}.')
    channels = len(ImageMode.getmode(mode).bands)
    key = hashlib.sha256('\0'.join((str(_VERSION), mode, str(exif), str(size), *names)).encode()).hexdigest()[:16]
    if str(place) == 'ram':
        if not _RAM.is_dir():
            raise UsageError(f'--cache ram needs {_RAM}, which this system lacks. Use --cache DIR.')
        prefix = f'timm_splicemix-{os.getuid()}'
        folder = _RAM / f'{prefix}-{key}'
        lock = _RAM / f'{prefix}.lock'
    else:
        folder = Path(place) / key
        lock = Path(place) / f'{key}.lock'
        with _disk_errors(folder):
            lock.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock, is_singleton=True):
        if str(place) == 'ram':
            _remove_unused(prefix)
        if not _is_valid(folder, stamps):
            with _disk_errors(folder):
                _create(folder, stamps, _find_shapes(open_image, len(names), exif), channels, size)
        cache = PixelCache(folder, lock, channels, size)
        _check_machine(cache)
    atexit.register(cache.close)
    total, done = len(cache), cache.num_written
    _logger.info(f'Cache {folder}: {total} images, {_gigabytes(cache.num_bytes)}, {done} of them decoded already')
    return cache


def _resized(height: int, width: int, size: Optional[int]) -> tuple[int, int]:
    short = min(height, width)
    if size is None or short <= size:
        return height, width
    return round(height * size / short), round(width * size / short)


def _gigabytes(number: float) -> str:
    return f'{number / 1e9:.3g} GB'


def _find_shapes(open_image: OpenImage, number: int, exif: bool) -> np.ndarray:
    """(N, 2) height and width of each image from its header; 0 for unreadable images, which are never cached."""
    def find(index: int) -> tuple[int, int]:
        try:
            with open_image(index) as file, Image.open(file) as image:
                width, height = oriented_size(image) if exif else image.size
        except Exception:  # whatever is wrong with it, decoding will raise the error that names the file
            return 0, 0
        return height, width

    shapes = np.zeros((number, 2), np.int64)
    logged = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        for index, shape in enumerate(pool.map(find, range(number), chunksize=64)):
            shapes[index] = shape
            if time.monotonic() > logged + 10:
                logged = time.monotonic()
                _logger.info(f'Reading the sizes of images: {index + 1} of {number}')
    return shapes


def _create(folder: Path, stamps: np.ndarray, sources: np.ndarray, channels: int, size: Optional[int]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shapes = np.array([_resized(*shape, size) for shape in sources.tolist()], np.int64).reshape(-1, 2)
    lengths = shapes.prod(axis=1) * channels
    first = -(-len(shapes) // _PAGE) * _PAGE
    offsets = first + np.concatenate([[0], lengths.cumsum()])
    _check_space(folder, int(offsets[-1]), sources, channels)
    with open(folder / _PIXELS, 'wb') as file:
        if hasattr(os, 'posix_fallocate') and offsets[-1]:
            os.posix_fallocate(file.fileno(), 0, int(offsets[-1]))
        file.truncate(max(int(offsets[-1]), _PAGE))
    with atomic_write(folder / _INDEX) as temporary, open(temporary, 'wb') as file:  # last: it makes the cache valid
        np.savez(file, allow_pickle=False, stamps=stamps, shapes=shapes, offsets=offsets)


def _check_space(folder: Path, needed: int, sources: np.ndarray, channels: int) -> None:
    free = shutil.disk_usage(folder).free
    if folder.parent == _RAM:
        free = min(free, _available_memory())
    if needed <= free:
        return
    shutil.rmtree(folder, ignore_errors=True)
    fitting = (
        size for size in _SUGGESTED_SIZES
        if sum(np.prod(_resized(*shape, size)) for shape in sources.tolist()) * channels < 0.9 * free)
    smaller = next(fitting, None)
    hint = f'--cache-size {smaller} would need less' if smaller else 'Use --cache DIR on a larger disk'
    raise UsageError(
        f'The cache of {len(sources)} images needs {_gigabytes(needed)}, but {folder.parent} has {_gigabytes(free)} '
        f'free. {hint}.')


def _available_memory() -> int:
    """Bytes that the system and the limits of control groups (containers, Slurm) leave, less 10 %."""
    lines = Path('/proc/meminfo').read_text().splitlines()
    system = next(int(line.split()[1]) * 1024 for line in lines if line.startswith('MemAvailable:'))
    return int(0.9 * max(min((system, *_available_in_groups())), 0))


def _available_in_groups() -> Iterator[int]:
    """Bytes that each control group of this process, and each one that contains it, leaves."""
    with contextlib.suppress(FileNotFoundError):
        for line in _GROUPS.read_text().splitlines():
            _, controllers, group = line.split(':', 2)
            if 'memory' in controllers.split(','):  # version 1
                root, limit, usage = _GROUP_ROOT / 'memory', 'memory.limit_in_bytes', 'memory.usage_in_bytes'
            else:
                root, limit, usage = _GROUP_ROOT, 'memory.max', 'memory.current'
            own = root / group.lstrip('/')
            for folder in (own, *own.parents):
                with contextlib.suppress(OSError, ValueError):  # no such file, or 'max'
                    left = int((folder / limit).read_text()) - int((folder / usage).read_text())
                    numbers = dict(line.split() for line in (folder / 'memory.stat').read_text().splitlines())
                    # Linux drops the content of files that were read when it needs the memory.
                    yield left + int(numbers.get('total_inactive_file', numbers.get('inactive_file', 0)))


@contextlib.contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except UsageError:
        raise
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise UsageError(
            f'Cannot create the cache (--cache): {os_error_reason(folder.parent, error)}') from error


def _is_valid(folder: Path, stamps: np.ndarray) -> bool:
    try:
        with np.load(folder / _INDEX, allow_pickle=False) as index:
            same = np.array_equal(index['stamps'], stamps)
            whole = (folder / _PIXELS).stat().st_size >= index['offsets'][-1]
    except (OSError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile):
        return False
    if not same:
        _logger.info(f'Images have changed since cache {folder} was written; it is created again.')
    return same and whole


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ''


def _check_machine(cache: PixelCache) -> None:
    """Forget pixels that were not synced before the machine was restarted; refuse a cache that another one uses."""
    file = cache.folder / _BOOT
    before, now = file.read_text() if file.exists() else '', _boot_id()  # '' on macOS
    if cache.is_used_by_others():
        if before and now and before != now:
            cache.close()
            raise UsageError(
                f'Cache {cache.folder} is in use on another machine. Use a folder of this machine for --cache.')
    elif before != now or not now:
        cache.forget_unsynced()
        write_text(now, file)


def _remove_unused(prefix: str) -> None:
    """Remove the caches of killed runs from memory."""
    for folder in _RAM.glob(f'{prefix}-*'):
        try:
            with open(folder / _USERS) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            pass
        except OSError:
            continue
        shutil.rmtree(folder, ignore_errors=True)
