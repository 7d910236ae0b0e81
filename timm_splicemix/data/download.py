""" Download of VOC and COCO from their official sites

An archive is downloaded to <root>/.download, where an interrupted download resumes, and checked; it is unpacked to a
folder beside it, and its files are moved to their places in an order that completes a split last. Existing files are
never overwritten.

torchvision's `download_and_extract_archive` cannot replace this: it neither resumes nor retries, writes to the final
place, has no timeout, no check of free space and no lock between processes.
"""
import http.client
import json
import logging
import os
import shutil
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any, ContextManager, Mapping, Optional, Sequence, Union

from filelock import FileLock, Timeout
from torchvision.datasets.utils import calculate_md5
from tqdm import tqdm

from ..errors import UsageError
from ..files import write_json

_logger = logging.getLogger(__name__)

BASE_URL_VARIABLE = 'TSM_DOWNLOAD_BASE_URL'
_VOC = 'https://thor.robots.ox.ac.uk/pascal/VOC/'  # as in torchvision
_COCO = 'http://images.cocodataset.org/'
_ATTEMPTS = 4  # without progress
_BACKOFF = 1.  # seconds before the second attempt, doubled before each further one
_TIMEOUT = 60.  # seconds without a response
_LARGEST_RATIO = 20  # of the files in an archive to the archive
_ALWAYS_UNPACKED = 1 << 30  # bytes
_CHUNK = 1 << 16  # bytes; at most this much is lost when a connection breaks


@dataclass(frozen=True)
class Archive:
    """ A published archive.

    Attributes:
        site: Beginning of its URL, which a mirror replaces.
        path: Rest of its URL.
        splits: Splits that need it.
        folder: Folder that it unpacks to, below the root.
        last: Files that are moved last, so that they prove the rest to be complete. Such archives may share a folder;
            the folder of an archive without them is moved as a whole.
        md5: Published checksum, if any; a zip has a checksum of each file in any case.
    """
    site: str
    path: str
    splits: tuple[str, ...]
    folder: str
    last: tuple[str, ...] = ()
    md5: Optional[str] = None

    @property
    def name(self) -> str:
        return self.path.rsplit('/', 1)[-1]

    @property
    def proof(self) -> tuple[str, ...]:
        return self.last or (self.folder,)


def _voc(year: int, name: str, splits: tuple[str, ...], md5: str) -> Archive:
    folder = f'VOCdevkit/VOC{year}'
    last = (f'{folder}/ImageSets/Main/{splits[-1]}.txt',)
    return Archive(_VOC, f'voc{year}/{name}', splits, folder, last, md5)


def _coco(year: int) -> tuple[Archive, ...]:
    splits = ('train', 'val')
    instances = tuple(f'annotations/instances_{split}{year}.json' for split in splits)
    return (
        Archive(_COCO, f'annotations/annotations_trainval{year}.zip', splits, 'annotations', instances),
        *(Archive(_COCO, f'zips/{split}{year}.zip', (split,), f'{split}{year}') for split in splits),
    )


_TRAINVAL = ('train', 'val', 'trainval')
ARCHIVES: dict[str, tuple[Archive, ...]] = {
    'voc/2007': (
        _voc(2007, 'VOCtrainval_06-Nov-2007.tar', _TRAINVAL, 'c52e279531787c972589f7e41ab4ae64'),
        _voc(2007, 'VOCtest_06-Nov-2007.tar', ('test',), 'b6e924de25625d8de591ea690078ad9f'),
    ),
    'voc/2012': (
        _voc(2012, 'VOCtrainval_11-May-2012.tar', _TRAINVAL, '6cd6e144f989b92b3379bac3b3de84fd'),
    ),
    'coco/2014': _coco(2014),
    'coco/2017': _coco(2017),
}


def download_dataset(
        name: str,
        root: Union[str, os.PathLike],
        splits: Optional[Sequence[str]] = None,
        base_url: Optional[str] = None,
        progress: bool = True,
        keep_archives: bool = False,
) -> Path:
    """ Download and unpack the missing parts of a data set.

    If several processes ask for the same folder at once, one downloads and the others wait for it. If nothing is
    missing, nothing is requested or written.

    Args:
        name: 'voc/2007', 'voc/2012', 'coco/2014' or 'coco/2017'.
        root: Folder for VOCdevkit/VOC<year>/, or for annotations/ and <split><year>/ of COCO.
        splits: Splits to download, all if None: 'train', 'val', for VOC also 'trainval', for VOC 2007 also 'test'.
        base_url: URL of a mirror that has the same paths as the official site (voc2007/VOCtest_06-Nov-2007.tar,
            zips/train2017.zip, ...); by default the environment variable TSM_DOWNLOAD_BASE_URL.
        progress: Show progress bars, on a terminal.
        keep_archives: Keep unpacked archives in <root>/.download.

    Returns:
        The folder.
    """
    archives = choose_archives(name, splits)
    base_url = base_url or os.environ.get(BASE_URL_VARIABLE)
    if base_url and not base_url.startswith(('http://', 'https://')):
        raise UsageError(f"Expected the URL of a mirror to begin with http:// or https://, but got '{base_url}'.")
    installs = [_Install(archive, Path(root), base_url, progress, keep_archives) for archive in archives]
    for install in installs:
        if install.is_done() and not install.receipt.exists():
            _logger.info('%s already exists in %s and is not downloaded.', install.archive.folder, root)
    if not all(install.is_done() for install in installs):
        folder = installs[0].file.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _lock(folder / 'lock'):
                for install in installs:
                    if not install.is_done():
                        install.run()
        except OSError as error:
            raise UsageError(f"Cannot write data set '{name}' to {root}: {error}") from error
    return Path(root)


def choose_archives(name: str, splits: Optional[Sequence[str]]) -> list[Archive]:
    """Return the archives of some splits of a data set, None for all; an unknown split raises an error."""
    if name not in ARCHIVES:
        raise UsageError(f"Expected a data set to download: {', '.join(ARCHIVES)}, but got '{name}'.")
    known = list(dict.fromkeys(split for archive in ARCHIVES[name] for split in archive.splits))
    splits = known if splits is None else [splits] if isinstance(splits, str) else list(splits)
    unknown = [split for split in splits if split not in known]
    if unknown or not splits:
        raise UsageError(
            f"Expected splits of '{name}' among {', '.join(known)}, but got {', '.join(map(str, unknown)) or 'none'}.")
    return [archive for archive in ARCHIVES[name] if set(splits) & set(archive.splits)]


def _lock(path: Path) -> ContextManager:
    """Acquire a lock, and log that another process holds it, as the wait may take hours."""
    lock = FileLock(path)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        _logger.info('Waiting for another process, which is downloading to %s.', path.parent.parent)
        return lock.acquire()


class _Install:
    """Download, check and installation of one archive."""

    def __init__(self, archive: Archive, root: Path, base_url: Optional[str], progress: bool, keep: bool):
        self.archive = archive
        self.root = root
        self.url = f'{base_url.rstrip("/")}/{archive.path}' if base_url else archive.site + archive.path
        self.progress = progress
        self.keep = keep
        self.file = root / '.download' / archive.name  # complete and checked
        self.part = self.file.with_name(f'{archive.name}.part')
        self.temporary = self.file.with_name(f'{archive.name}.unpacked.tmp')
        self.receipt = self.file.with_name(f'{archive.name}.done')

    def is_done(self) -> bool:
        """Whether the data is complete, without leftovers of an interrupted process."""
        tidy = not self.temporary.exists() and (self.receipt.exists() or not self.file.exists())
        return tidy and self._is_complete(self.root)

    def _is_complete(self, folder: Path) -> bool:
        paths = [folder / path for path in self.archive.proof]
        return all(any(path.iterdir()) if path.is_dir() else path.exists() for path in paths)

    def run(self) -> None:
        try:
            if not self._is_complete(self.root):
                if not self.file.exists():
                    self._download()
                self._unpack()
                _move_into_place(self.archive, self.temporary, self.root)
            write_json({'folder': self.archive.folder, 'md5': self.archive.md5, 'url': self.url}, self.receipt)
            if not self.keep:
                self.file.unlink(missing_ok=True)
        finally:
            shutil.rmtree(self.temporary, ignore_errors=True)

    def _bar(self, what: str, **kwargs: Any) -> tqdm:
        return tqdm(desc=f'{what} {self.archive.name}', disable=None if self.progress else True, **kwargs)

    def _download(self) -> None:
        with self._bar('Downloading', unit='B', unit_scale=True) as bar:
            _fetch(self.url, self.part, bar)
        if self.archive.md5:
            md5 = calculate_md5(self.part)
            if md5 != self.archive.md5:
                _discard(self.part)
                raise UsageError(
                    f'Expected MD5 {self.archive.md5} of {self.url}, but got {md5}. The file was removed; try again.')
        os.replace(self.part, self.file)
        _discard(self.part)

    def _unpack(self) -> None:
        if self.temporary.exists():
            shutil.rmtree(self.temporary)
        self.temporary.mkdir()
        try:
            unpack = _unpack_tar if self.file.suffix == '.tar' else _unpack_zip
            with self._bar('Unpacking', unit='file') as bar:
                unpack(self.file, self.temporary, bar)
            if not self._is_complete(self.temporary):
                raise tarfile.ReadError(f'{" or ".join(self.archive.proof)} is missing')
        except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
            self.file.unlink()
            raise UsageError(
                f'The archive from {self.url} cannot be unpacked: {error}. It was removed; try again.') from error


def _fetch(url: str, part: Path, bar: tqdm) -> None:
    """Download a file, or the rest of it, in as many attempts as make progress."""
    most, failures = -1, 0
    while True:
        try:
            return _fetch_rest(url, part, bar)
        except _ConnectionLostError as error:
            size = part.stat().st_size if part.exists() else 0
            failures = 1 if size > most else failures + 1
            most = max(most, size)
            if failures == _ATTEMPTS:
                raise UsageError(
                    f'Cannot download {url}: {error}. Check the connection and try again, which resumes the download, '
                    f'or set {BASE_URL_VARIABLE} to the URL of a mirror.') from error
            time.sleep(_BACKOFF * 2 ** (failures - 1))


def _fetch_rest(url: str, part: Path, bar: tqdm) -> None:
    state = _read_state(part)
    start = part.stat().st_size if state else 0
    headers = {'User-Agent': 'timm_splicemix'}
    if start:
        headers.update({'Range': f'bytes={start}-', 'If-Range': state['validator']})
    with _open(url, headers) as response:
        if response.status == 416 and (_content_range(response.headers)[1] or state['size']) == start:
            return  # complete, but not checked before the process was killed
        restart = not start or response.status == 200
        if not restart and not _continues(response, start, state):
            _discard(part)
            return _fetch_rest(url, part, bar)
        if restart:
            start, length = 0, response.headers.get('Content-Length')
            size = None if length is None else int(length)
        else:
            size = state['size']  # of the whole file
        _check_space(url, part, size)
        with open(part, 'wb' if restart else 'ab') as file:
            if restart:  # after the file was emptied: the state never belongs to other content
                write_json({'validator': _validator(response.headers), 'size': size}, _state_file(part))
            bar.reset(total=size)
            bar.initial = bar.n = bar.last_print_n = start
            bar.refresh()
            while chunk := _read(response):
                file.write(chunk)
                bar.update(len(chunk))
            got = file.tell()
    if size is not None and got != size:
        raise _ConnectionLostError(f'got {got} of {size} bytes')


class _ConnectionLostError(Exception):
    """An error that another attempt may solve, unlike errors of the disk."""


def _open(url: str, headers: dict[str, str]) -> Any:
    try:
        return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416 and 'Range' in headers:
            return error  # it is the response too
        error.close()
        found = f'HTTP {error.code} ({error.reason})'
        if error.code >= 500 or error.code in (408, 429):
            raise _ConnectionLostError(found) from error
        raise UsageError(
            f'Cannot download {url}: {found}. Set {BASE_URL_VARIABLE} to the URL of a mirror.') from error
    except (OSError, http.client.HTTPException) as error:
        raise _ConnectionLostError(f'no connection ({getattr(error, "reason", error)})') from error


def _read(response: Any) -> bytes:
    try:
        return response.read(_CHUNK)
    except (OSError, http.client.HTTPException) as error:
        raise _ConnectionLostError(f'the connection broke ({error!r})') from error


def _continues(response: Any, start: int, state: Mapping[str, Any]) -> bool:
    """Whether a response is the rest of the same file; not all servers respect If-Range."""
    begin, size = _content_range(response.headers)
    same = _validator(response.headers) in (None, state['validator'])
    return response.status == 206 and begin == start and size in (None, state['size']) and same


def _content_range(headers: Mapping[str, str]) -> tuple[Optional[int], Optional[int]]:
    """First byte and size of the whole file: 'bytes 5-9/10' or 'bytes */10'."""
    span, _, size = headers.get('Content-Range', '').removeprefix('bytes ').partition('/')
    begin = span.partition('-')[0]
    return int(begin) if begin.isdecimal() else None, int(size) if size.isdecimal() else None


def _validator(headers: Mapping[str, str]) -> Optional[str]:
    """Value for If-Range, which changes with the file; weak ETags are not allowed."""
    etag = headers.get('ETag')
    return etag if etag and not etag.startswith('W/') else headers.get('Last-Modified')


def _state_file(part: Path) -> Path:
    return part.with_name(f'{part.name}.json')


def _read_state(part: Path) -> Optional[dict[str, Any]]:
    """Size and validator of the file that a part belongs to; None if unknown, so that the part is useless."""
    try:
        state = json.loads(_state_file(part).read_text(encoding='utf-8'))
    except (FileNotFoundError, ValueError):
        return None
    return state if part.exists() and state['validator'] else None


def _discard(part: Path) -> None:
    part.unlink(missing_ok=True)
    _state_file(part).unlink(missing_ok=True)


def _check_space(url: str, part: Path, size: Optional[int]) -> None:
    """Check the free space for an archive and its files, which are about as large, as images do not compress."""
    if size is None:
        return
    needed = 2 * size - (part.stat().st_size if part.exists() else 0)
    free = shutil.disk_usage(part.parent).free
    if free < needed:
        raise UsageError(
            f'{url} needs {needed / 1e9:.1f} GB of disk space in {part.parent.parent}, but only {free / 1e9:.1f} GB '
            'are free. Free some, or choose another folder.')


def _check_unpacked_size(file: Path, size: int) -> None:
    """Refuse archives whose files are far larger than they are; images and annotations compress by 5 at most."""
    limit = max(_LARGEST_RATIO * file.stat().st_size, _ALWAYS_UNPACKED)
    if size > limit:
        raise zipfile.BadZipFile(f'its files have {size / 1e9:.3g} GB, more than the {limit / 1e9:.3g} GB expected')


def _unpack_tar(file: Path, folder: Path, bar: tqdm) -> None:
    with tarfile.open(file, 'r:') as archive:  # not compressed
        members = archive.getmembers()
        _check_unpacked_size(file, sum(member.size for member in members))
        bar.reset(total=len(members))
        for member in members:
            archive.extract(member, folder, filter='data')
            bar.update()


def _unpack_zip(file: Path, folder: Path, bar: tqdm) -> None:
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        for member in members:
            path = PureWindowsPath(member.filename)  # knows both separators, and drives
            if path.anchor or '..' in path.parts:
                raise zipfile.BadZipFile(f"'{member.filename}' is outside of the folder")
        _check_unpacked_size(file, sum(member.file_size for member in members))
        bar.reset(total=len(members))
        for member in members:
            archive.extract(member, folder)  # checks the CRC and reads no more than the size
            bar.update()


def _move_into_place(archive: Archive, source: Path, root: Path) -> None:
    if not archive.last:
        target = root / archive.folder
        if target.is_dir():
            target.rmdir()  # empty; Windows would not replace it
        os.replace(source / archive.folder, target)
        return
    files = sorted(path.relative_to(source) for path in (source / archive.folder).rglob('*') if path.is_file())
    files.sort(key=lambda path: (path.as_posix() in archive.last, 'ImageSets' in path.parts))
    for path in files:
        target = root / path
        if not target.exists():  # it may, from an interrupted move or from the user
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(source / path, target)
