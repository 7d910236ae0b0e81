import gzip
import hashlib
import io
import json
import logging
import multiprocessing
import os
import re
import resource
import shutil
import sys
import tarfile
import threading
import time
import zipfile
from dataclasses import replace
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from timm_splicemix.data import download
from timm_splicemix.data.download import ARCHIVES, download_dataset
from timm_splicemix.errors import UsageError

from .helpers import raises_error

TRAINVAL = '/voc2007/VOCtrainval_06-Nov-2007.tar'
TEST = '/voc2007/VOCtest_06-Nov-2007.tar'
TRAIN, VAL = '/zips/train2017.zip', '/zips/val2017.zip'
ANNOTATIONS = '/annotations/annotations_trainval2017.zip'
NOISE = bytes(range(256)) * 1200  # 300 kB, so that a part of it fills some reads


def voc_files(splits: dict[str, list[str]]) -> dict[str, bytes]:
    """Files of an archive of VOC 2007, in another order than that of moving."""
    images = sorted({image for images in splits.values() for image in images})
    files = {f'ImageSets/Main/{split}.txt': '\n'.join(splits[split]).encode() for split in splits}
    files.update({f'ImageSets/Main/cat_{split}.txt': b'1' for split in splits})
    files.update({f'Annotations/{image}.xml': f'<of>{image}</of>'.encode() for image in images})
    files.update({f'JPEGImages/{image}.jpg': image.encode() * 100 for image in images})
    return {f'VOCdevkit/VOC2007/{path}': content for path, content in files.items()}


VOC_TRAINVAL = voc_files({'train': ['000005'], 'val': ['000007'], 'trainval': ['000005', '000007']})
VOC_TEST = voc_files({'test': ['000001', '000002']})
COCO = {
    ANNOTATIONS: {f'annotations/{kind}_{split}2017.json': f'{{"{kind}": "{split}"}}'.encode()
                  for split in ('train', 'val') for kind in ('captions', 'instances')},
    TRAIN: {f'train2017/{i:012d}.jpg': NOISE + b'%d' % i for i in range(3)},
    VAL: {f'val2017/{i:012d}.jpg': b'val %d' % i for i in range(3)},
}
COCO_FILES = {path: content for files in COCO.values() for path, content in files.items()}


def make_tar(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode='w') as archive:
        for path, content in files.items():
            info = tarfile.TarInfo(path)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def make_zip(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, 'w') as archive:
        for path, content in files.items():
            archive.writestr(path, content)
    return buffer.getvalue()


class Handler(BaseHTTPRequestHandler):
    """Serves `server.files`, as configured by other attributes of the server, and records requests."""

    def do_GET(self):
        server = self.server
        content = server.files.get(self.path)
        record = {'path': self.path, 'range': self.headers['Range'], 'status': 200}
        server.requests.append(record)
        start, validator = 0, self.validator(content or b'')
        if server.statuses or content is None:
            record['status'] = server.statuses.pop(0) if server.statuses else 404
        elif server.ranges and record['range'] and (
                self.headers['If-Range'] == validator[1] or not server.heeds_if_range):
            start = int(re.fullmatch(r'bytes=(\d+)-', record['range'])[1])
            record['status'] = 206 if start < len(content) else 416
        if record['status'] not in (200, 206):
            self.send_response(record['status'])
            if record['status'] == 416 and server.tells_size:
                self.send_header('Content-Range', f'bytes */{len(content)}')
            self.end_headers()
            return
        self.send_response(record['status'])
        self.send_header('Content-Length', str(len(content) - start))
        if validator[1]:
            self.send_header(*validator)
        if record['status'] == 206:
            self.send_header('Content-Range', f'bytes {start + server.shift}-{len(content) - 1}/{len(content)}')
        self.end_headers()
        end = len(content)
        if server.drops:
            end = start + server.drops.pop(0)
        self.wfile.write(content[start:end])
        record['sent'] = end - start
        if server.stalls and end < len(content):
            server.stalled.set()
            server.go_on.wait(10)

    def validator(self, content: bytes) -> tuple[str, str]:
        if self.server.validators == 'ETag':
            return 'ETag', f'"{hashlib.md5(content).hexdigest()}"'
        if self.server.validators == 'Last-Modified':
            return 'Last-Modified', formatdate(len(content), usegmt=True)
        return 'ETag', 'W/"weak"' if self.server.validators == 'weak' else ''

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    """A mirror with tiny data sets in the official layouts."""
    server = ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    server.files = {
        TRAINVAL: make_tar(VOC_TRAINVAL), TEST: make_tar(VOC_TEST),
        **{path: make_zip(files) for path, files in COCO.items()}}
    server.requests, server.statuses, server.drops = [], [], []
    server.ranges = server.tells_size = server.heeds_if_range = True
    server.validators, server.shift = 'ETag', 0
    server.stalls, server.stalled, server.go_on = False, threading.Event(), threading.Event()
    server.url = f'http://127.0.0.1:{server.server_port}'
    thread = threading.Thread(target=server.serve_forever, kwargs={'poll_interval': 0.01})
    thread.start()
    monkeypatch.setenv('no_proxy', '127.0.0.1')
    monkeypatch.setenv(download.BASE_URL_VARIABLE, server.url)
    monkeypatch.setattr(download, '_BACKOFF', 0.001)
    monkeypatch.setitem(ARCHIVES, 'voc/2007', tuple(
        replace(archive, md5=hashlib.md5(server.files[f'/{archive.path}']).hexdigest())
        for archive in ARCHIVES['voc/2007']))
    yield server
    server.go_on.set()
    server.shutdown()
    thread.join()
    server.server_close()


def asked(server, path: str) -> list[dict]:
    return [request for request in server.requests if request['path'] == path]


def read_data(root: Path) -> dict[str, bytes]:
    """All files outside of .download."""
    files = (path for path in root.rglob('*') if path.is_file() and '.download' not in path.parts)
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}


def leftovers(root: Path) -> set[str]:
    return {path.name for path in (root / '.download').iterdir()} - {'lock'}


def fork(target, *args) -> multiprocessing.Process:
    """Start a process that inherits patches and imports."""
    process = multiprocessing.get_context('fork').Process(target=target, args=args)
    process.start()
    return process


def wait_for(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_both_archives_of_voc_2007_are_merged(server, tmp_path):
    root = tmp_path / 'some' / 'where'
    assert download_dataset('voc/2007', str(root)) == root
    assert read_data(root) == {**VOC_TRAINVAL, **VOC_TEST}
    assert [request['path'] for request in server.requests] == [TRAINVAL, TEST]
    assert leftovers(root) == {'VOCtrainval_06-Nov-2007.tar.done', 'VOCtest_06-Nov-2007.tar.done'}


def test_coco_is_unpacked_into_its_official_layout(server, tmp_path):
    download_dataset('coco/2017', tmp_path)
    assert read_data(tmp_path) == COCO_FILES
    assert leftovers(tmp_path) == {f'{path.rsplit("/")[-1]}.done' for path in COCO}
    receipt = json.loads((tmp_path / '.download' / 'train2017.zip.done').read_text())
    assert receipt == {'folder': 'train2017', 'md5': None, 'url': server.url + TRAIN}


def test_data_set_of_another_year_joins_the_same_annotations_folder(server, tmp_path):
    for path, files in COCO.items():
        server.files[path.replace('2017', '2014')] = make_zip(
            {name.replace('2017', '2014'): content for name, content in files.items()})
    download_dataset('coco/2017', tmp_path)
    download_dataset('coco/2014', tmp_path)
    expected = {name.replace('2017', '2014'): content for name, content in COCO_FILES.items()}
    assert read_data(tmp_path) == {**COCO_FILES, **expected}


def test_official_addresses_are_those_of_the_publishers():
    urls = {name: [archive.site + archive.path for archive in archives] for name, archives in ARCHIVES.items()}
    voc, coco = 'https://thor.robots.ox.ac.uk/pascal/VOC', 'http://images.cocodataset.org'
    assert urls == {
        'voc/2007': [f'{voc}/voc2007/VOCtrainval_06-Nov-2007.tar', f'{voc}/voc2007/VOCtest_06-Nov-2007.tar'],
        'voc/2012': [f'{voc}/voc2012/VOCtrainval_11-May-2012.tar'],
        **{f'coco/{year}': [
            f'{coco}/annotations/annotations_trainval{year}.zip',
            f'{coco}/zips/train{year}.zip', f'{coco}/zips/val{year}.zip'] for year in (2014, 2017)},
    }
    assert ARCHIVES['voc/2012'][0].last == ('VOCdevkit/VOC2012/ImageSets/Main/trainval.txt',)


@pytest.mark.parametrize('name, splits, paths', [
    ('voc/2007', ('train',), [TRAINVAL]),
    ('voc/2007', ('trainval', 'val'), [TRAINVAL]),
    ('voc/2007', 'test', [TEST]),
    ('coco/2017', ['val'], [ANNOTATIONS, VAL]),
    ('coco/2017', None, [ANNOTATIONS, TRAIN, VAL]),
])
def test_only_what_the_splits_need_is_fetched(server, tmp_path, name, splits, paths):
    download_dataset(name, tmp_path, splits=splits)
    assert [request['path'] for request in server.requests] == paths


def test_mirror_may_be_given_as_argument_and_with_a_slash(server, tmp_path, monkeypatch):
    monkeypatch.setenv(download.BASE_URL_VARIABLE, 'http://127.0.0.1:9')
    download_dataset('coco/2017', tmp_path, base_url=server.url + '/')
    assert read_data(tmp_path) == COCO_FILES


def test_second_call_requests_and_locks_nothing(server, tmp_path, monkeypatch):
    def refuse(*args):
        raise AssertionError('locked')

    download_dataset('voc/2007', tmp_path)
    monkeypatch.setattr(download, 'FileLock', refuse)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob('*')}
    server.requests.clear()
    download_dataset('voc/2007', tmp_path)
    download_dataset('voc/2007', tmp_path, splits=('test',))
    assert not server.requests
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob('*')} == before


def test_data_that_was_deleted_is_fetched_again(server, tmp_path):
    download_dataset('coco/2017', tmp_path)
    shutil.rmtree(tmp_path / 'val2017')
    server.requests.clear()
    download_dataset('coco/2017', tmp_path)
    assert [request['path'] for request in server.requests] == [VAL]
    assert read_data(tmp_path) == COCO_FILES


def test_archives_are_kept_if_asked_for(server, tmp_path):
    download_dataset('coco/2017', tmp_path, splits=('val',), keep_archives=True)
    assert (tmp_path / '.download' / 'val2017.zip').read_bytes() == server.files[VAL]
    shutil.rmtree(tmp_path / 'val2017')
    server.requests.clear()
    download_dataset('coco/2017', tmp_path, splits=('val',))
    assert not server.requests and len(list((tmp_path / 'val2017').iterdir())) == 3


@pytest.mark.parametrize('settings, drops, expected', [
    ({}, [1000], [(None, 200), ('bytes=1000-', 206)]),
    ({'validators': 'Last-Modified'}, [1000], [(None, 200), ('bytes=1000-', 206)]),
    # attempts with progress are not counted
    ({}, [1000] * 8, [(None, 200), *((f'bytes={i}000-', 206) for i in range(1, 9))]),
    # a part is not used if the server sends the whole file, another range, or nothing to recognise the file by
    ({'ranges': False}, [5000], [(None, 200), ('bytes=5000-', 200)]),
    ({'shift': 7}, [1000], [(None, 200), ('bytes=1000-', 206), (None, 200)]),
    ({'validators': 'weak'}, [1000], [(None, 200), (None, 200)]),
    ({'validators': 'none'}, [1000], [(None, 200), (None, 200)]),
])
def test_dropped_connection_is_resumed_or_restarted(server, tmp_path, settings, drops, expected):
    vars(server).update(settings, drops=drops)
    download_dataset('voc/2007', tmp_path, splits=('test',))
    assert [(request['range'], request['status']) for request in server.requests] == expected
    assert read_data(tmp_path) == VOC_TEST


def test_download_resumes_in_the_next_call(server, tmp_path, monkeypatch):
    monkeypatch.setattr(download, '_ATTEMPTS', 1)
    server.drops = [1000]
    with raises_error(rf'Cannot download {server.url}{TRAINVAL}: got 1000 of \d+ bytes.*resumes'):
        download_dataset('voc/2007', tmp_path)
    assert leftovers(tmp_path) == {'VOCtrainval_06-Nov-2007.tar.part', 'VOCtrainval_06-Nov-2007.tar.part.json'}
    download_dataset('voc/2007', tmp_path)
    assert [request['range'] for request in asked(server, TRAINVAL)] == [None, 'bytes=1000-']
    assert read_data(tmp_path) == {**VOC_TRAINVAL, **VOC_TEST}


def test_attempts_without_progress_end(server, tmp_path):
    server.ranges = False
    server.drops = [1000] * 100
    with raises_error(r'got 1000 of \d+ bytes'):
        download_dataset('voc/2007', tmp_path)
    assert len(server.requests) == download._ATTEMPTS


@pytest.mark.parametrize('heeds_if_range', [True, False])
def test_changed_file_restarts(server, tmp_path, monkeypatch, heeds_if_range):
    server.heeds_if_range = heeds_if_range
    server.drops = [300]
    new = server.files[ANNOTATIONS]
    server.files[ANNOTATIONS] = make_zip({name: content.upper() for name, content in COCO[ANNOTATIONS].items()})
    assert len(server.files[ANNOTATIONS]) == len(new)  # so that it isn't the size that tells
    with monkeypatch.context() as patch, pytest.raises(UsageError):
        patch.setattr(download, '_ATTEMPTS', 1)
        download_dataset('coco/2017', tmp_path, splits=('val',))
    server.files[ANNOTATIONS] = new
    download_dataset('coco/2017', tmp_path, splits=('val',))
    assert read_data(tmp_path) == {**COCO[ANNOTATIONS], **COCO[VAL]}
    ranges = [request['range'] for request in asked(server, ANNOTATIONS)]
    assert ranges == [None, 'bytes=300-', *([] if heeds_if_range else [None])]


@pytest.mark.parametrize('tells_size', [True, False])
@pytest.mark.parametrize('surplus', [b'', b'more'])
def test_part_that_is_complete_is_used_and_a_longer_one_is_not(server, tmp_path, tells_size, surplus):
    server.tells_size = tells_size
    content = server.files[TEST]
    part = tmp_path / '.download' / 'VOCtest_06-Nov-2007.tar.part'
    part.parent.mkdir()
    part.write_bytes(content + surplus)
    state = {'validator': f'"{hashlib.md5(content).hexdigest()}"', 'size': len(content)}
    Path(f'{part}.json').write_text(json.dumps(state))
    download_dataset('voc/2007', tmp_path, splits=('test',))
    assert [request['status'] for request in server.requests] == [416] + [200] * bool(surplus)
    assert read_data(tmp_path) == VOC_TEST


def test_part_with_a_broken_state_restarts(server, tmp_path):
    part = tmp_path / '.download' / 'VOCtest_06-Nov-2007.tar.part'
    part.parent.mkdir()
    part.write_bytes(b'junk')
    Path(f'{part}.json').write_text('{"validator"')
    download_dataset('voc/2007', tmp_path, splits=('test',))
    assert [request['range'] for request in server.requests] == [None]
    assert read_data(tmp_path) == VOC_TEST


def test_wrong_checksum_is_an_error_and_removes_the_file(server, tmp_path):
    right = server.files[TRAINVAL]
    server.files[TRAINVAL] = wrong = right[:5000] + b'?' + right[5001:]
    found, expected = (hashlib.md5(content).hexdigest() for content in (wrong, right))
    with raises_error(f'Expected MD5 {expected} of .*{TRAINVAL}, but got {found}. The file was rem'):
        download_dataset('voc/2007', tmp_path)
    assert not read_data(tmp_path) and not leftovers(tmp_path)
    server.files[TRAINVAL] = right
    download_dataset('voc/2007', tmp_path)
    assert read_data(tmp_path) == {**VOC_TRAINVAL, **VOC_TEST}


def zip_bomb() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, 'w', zipfile.ZIP_DEFLATED) as archive:
        archive.writestr('annotations/instances_train2017.json', bytes(3_000_000))
    assert len(buffer.getvalue()) < 5000
    return buffer.getvalue()


def sparse_tar(size: int) -> bytes:
    """A tar of a file that consists of a hole, in GNU's format 1.0."""
    name, buffer = 'VOCdevkit/VOC2007/hole', io.BytesIO()
    with tarfile.open(fileobj=buffer, mode='w', format=tarfile.PAX_FORMAT) as archive:
        entry = tarfile.TarInfo(name)
        entry.size = 512  # the map of the data: it has no parts
        entry.pax_headers = {
            'GNU.sparse.major': '1', 'GNU.sparse.minor': '0', 'GNU.sparse.name': name, 'GNU.sparse.realsize': str(size)}
        archive.addfile(entry, io.BytesIO(b'0\n' + bytes(510)))
    return buffer.getvalue()


def flip(content: bytes) -> bytes:
    """A zip with a changed byte in the middle of a file."""
    middle = content.index(b'"instances"') + 2
    return content[:middle] + b'?' + content[middle + 1:]


@pytest.mark.parametrize('spoil, message', [
    (lambda content: content[:-200], 'not a zip file'),
    (flip, 'Bad CRC-32'),
    (lambda content: b'<html>Log in to use this network</html>', 'not a zip file'),
    (lambda content: make_zip({'annotations/../../evil.json': b'1'}), "'annotations/../../evil.json' is outside"),
    (lambda content: make_zip({'/evil.json': b'1'}), 'is outside'),
    (lambda content: make_zip({'..\\evil.json': b'1'}), 'is outside'),
    (lambda content: make_zip({'C:/evil.json': b'1'}), 'is outside'),
    (lambda content: make_zip({'instances_train2017.json': b'1'}), 'instances_train2017.json or .* missing'),
    (lambda content: zip_bomb(), 'its files have 0.003 GB, more than the 0.001 GB expected'),
])
def test_unsound_zip_is_refused_and_removed(server, tmp_path, monkeypatch, spoil, message):
    monkeypatch.setattr(download, '_ALWAYS_UNPACKED', 1_000_000)
    right = server.files[ANNOTATIONS]
    server.files[ANNOTATIONS] = spoil(right)
    root = tmp_path / 'deep' / 'root'
    with raises_error(f'The archive from .*{ANNOTATIONS} cannot be unpacked: .*{message}.*try ag'):
        download_dataset('coco/2017', root)
    assert not read_data(tmp_path) and not leftovers(root)
    server.files[ANNOTATIONS] = right
    download_dataset('coco/2017', root)
    assert read_data(root) == COCO_FILES


@pytest.mark.parametrize('spoil, message', [
    (lambda content: content[:2000], 'unexpected end of data'),
    (lambda content: make_tar({'../evil': b'1', **VOC_TRAINVAL}), 'would be extracted to .* outside'),
    (lambda content: make_tar(VOC_TEST), 'trainval.txt is missing'),
    (gzip.compress, 'header'),
    (lambda content: sparse_tar(5_000_000), 'its files have 0.005 GB, more than the 0.001 GB expected'),
])
def test_unsound_tar_is_refused_and_removed(server, tmp_path, monkeypatch, spoil, message):
    monkeypatch.setattr(download, '_ALWAYS_UNPACKED', 1_000_000)
    server.files[TRAINVAL] = spoil(server.files[TRAINVAL])
    monkeypatch.setitem(ARCHIVES, 'voc/2007', tuple(replace(archive, md5=None) for archive in ARCHIVES['voc/2007']))
    with raises_error(f'cannot be unpacked: .*{message}'):
        download_dataset('voc/2007', tmp_path / 'root')
    assert not read_data(tmp_path) and not leftovers(tmp_path / 'root')


@pytest.mark.parametrize('name, kind', [('voc/2007', tarfile.TarFile), ('coco/2017', zipfile.ZipFile)])
def test_interruption_while_unpacking_leaves_no_data(server, tmp_path, monkeypatch, name, kind):
    extracted = []

    def interrupted(*args, **kwargs):
        if len(extracted) == 3:
            raise KeyboardInterrupt
        extracted.append(args)
        return original(*args, **kwargs)

    original = kind.extract
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(kind, 'extract', interrupted)
        download_dataset(name, tmp_path)
    assert not read_data(tmp_path)
    archive = ARCHIVES[name][0]
    assert leftovers(tmp_path) == {archive.name}
    download_dataset(name, tmp_path)
    assert read_data(tmp_path) == ({**VOC_TRAINVAL, **VOC_TEST} if name == 'voc/2007' else COCO_FILES)
    assert len(asked(server, f'/{archive.path}')) == 1


def test_interruption_at_any_move_shows_no_split_before_its_files(server, tmp_path, monkeypatch):
    """Whichever move is the last one, a list of images exists only if all of its images do."""
    def interrupted(source, target):
        if moves[0] == 0:
            raise KeyboardInterrupt
        moves[0] -= 1
        original(source, target)

    original, shown, count = os.replace, set(), 0
    while True:
        root, moves = tmp_path / str(count), [count]
        with monkeypatch.context() as patch:
            patch.setattr(os, 'replace', interrupted)
            try:
                download_dataset('voc/2007', root)
                break
            except KeyboardInterrupt:
                pass
        found = read_data(root)
        for files, proof in ((VOC_TRAINVAL, 'trainval'), (VOC_TEST, 'test')):
            if any('ImageSets' in path and path in found for path in files):
                assert all(path in found for path in files if 'ImageSets' not in path)
            if f'VOCdevkit/VOC2007/ImageSets/Main/{proof}.txt' in found:
                assert files.items() <= found.items()
                shown.add(proof)
        download_dataset('voc/2007', root)
        assert read_data(root) == {**VOC_TRAINVAL, **VOC_TEST}
        assert all(name.endswith('.done') for name in leftovers(root)) and len(leftovers(root)) == 2
        count += 1
    assert count > len(VOC_TRAINVAL) + len(VOC_TEST)
    assert shown == {'trainval', 'test'}


@pytest.mark.parametrize('name, owner, attribute, calls', [
    ('coco/2017', zipfile.ZipFile, 'extract', 5),  # amid the images
    ('voc/2007', tarfile.TarFile, 'extract', 3),
    ('voc/2007', os, 'replace', 5),  # amid the move
])
def test_killed_process_leaves_nothing_that_looks_whole(
        server, tmp_path, monkeypatch, name, owner, attribute, calls):
    def stall(*args, **kwargs):
        if len(done) == calls:
            (tmp_path / 'stalled').touch()
            time.sleep(60)
        done.append(args)
        return original(*args, **kwargs)

    done, original, root = [], getattr(owner, attribute), tmp_path / 'root'
    with monkeypatch.context() as patch:
        patch.setattr(owner, attribute, stall)
        process = fork(download_dataset, name, root)
        wait_for((tmp_path / 'stalled').exists)
        process.kill()
        process.join()
    assert any(path.endswith('.unpacked.tmp') for path in leftovers(root))
    assert not (root / 'train2017').exists() and not (root / 'VOCdevkit' / 'VOC2007' / 'ImageSets').exists()
    download_dataset(name, root)
    assert read_data(root) == ({**VOC_TRAINVAL, **VOC_TEST} if name == 'voc/2007' else COCO_FILES)
    assert all(path.endswith('.done') for path in leftovers(root))


def test_killed_download_resumes(server, tmp_path):
    server.drops, server.stalls = [len(server.files[ANNOTATIONS]), 500_000], True
    process = fork(download_dataset, 'coco/2017', tmp_path, ('train',))
    part = tmp_path / '.download' / 'train2017.zip.part'
    wait_for(lambda: server.stalled.is_set() and part.exists() and part.stat().st_size > 400_000)
    process.kill()
    process.join()
    size = part.stat().st_size
    server.go_on.set()
    assert not (tmp_path / 'train2017').exists()
    download_dataset('coco/2017', tmp_path, splits=('train',))
    assert [request['range'] for request in asked(server, TRAIN)] == [None, f'bytes={size}-']
    assert read_data(tmp_path) == {**COCO[ANNOTATIONS], **COCO[TRAIN]}


def test_partial_file_is_kept_when_the_disk_is_full(server, tmp_path):
    def download_with_limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
        try:
            download_dataset('coco/2017', tmp_path)
        except UsageError as error:
            assert str(tmp_path) in str(error)
            os._exit(error.__cause__.errno)

    process = fork(download_with_limit)
    process.join(10)
    assert os.strerror(process.exitcode) == 'File too large'
    assert (tmp_path / '.download' / 'train2017.zip.part').stat().st_size == 200_000
    assert len(asked(server, TRAIN)) == 1  # as another attempt would not help
    download_dataset('coco/2017', tmp_path)
    assert asked(server, TRAIN)[1]['range'] == 'bytes=200000-'
    assert read_data(tmp_path) == COCO_FILES


def test_what_was_placed_by_hand_is_left_alone(server, tmp_path, caplog):
    for path in ('train2017/mine.jpg', 'annotations/captions_val2017.json'):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_bytes(b'mine')
    (tmp_path / 'val2017').mkdir()  # empty
    with caplog.at_level(logging.INFO, download.__name__):
        download_dataset('coco/2017', tmp_path)
    assert caplog.messages == [f'train2017 already exists in {tmp_path} and is not downloaded.']
    assert [request['path'] for request in server.requests] == [ANNOTATIONS, VAL]
    assert leftovers(tmp_path) == {'annotations_trainval2017.zip.done', 'val2017.zip.done'}
    assert read_data(tmp_path) == {
        **COCO[ANNOTATIONS], **COCO[VAL], 'train2017/mine.jpg': b'mine', 'annotations/captions_val2017.json': b'mine'}


def test_voc_that_was_placed_by_hand_is_completed_but_not_overwritten(server, tmp_path):
    for path in VOC_TRAINVAL:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b'mine')
    download_dataset('voc/2007', tmp_path)
    assert [request['path'] for request in server.requests] == [TEST]
    assert read_data(tmp_path) == {**dict.fromkeys(VOC_TRAINVAL, b'mine'), **VOC_TEST}


def test_nothing_is_written_if_all_was_placed_by_hand(server, tmp_path):
    for path in VOC_TEST:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b'mine')
    download_dataset('voc/2007', tmp_path, splits=('test',))
    assert [path.name for path in tmp_path.iterdir()] == ['VOCdevkit'] and not server.requests


def test_missing_file_names_its_address_and_is_not_tried_again(server, tmp_path):
    del server.files[VAL]
    with raises_error(rf'Cannot download {server.url}{VAL}: HTTP 404 \(Not Found\). Set TSM_'):
        download_dataset('coco/2017', tmp_path)
    assert len(asked(server, VAL)) == 1
    assert read_data(tmp_path) == {**COCO[ANNOTATIONS], **COCO[TRAIN]}


def test_server_in_trouble_is_tried_a_few_times(server, tmp_path):
    server.statuses = [503, 500, 429]
    download_dataset('voc/2007', tmp_path, splits=('test',))
    assert [request['status'] for request in server.requests] == [503, 500, 429, 200]
    server.statuses = [500] * 10
    with raises_error(rf'download {server.url}{TRAINVAL}: HTTP 500 \(Internal Server Error\)'):
        download_dataset('voc/2007', tmp_path)
    assert len(server.requests) == 4 + download._ATTEMPTS


def test_attempts_without_a_server_wait_longer_each_time(server, tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr(download, '_BACKOFF', 1.)
    monkeypatch.setattr(time, 'sleep', waits.append)
    with raises_error(r'Cannot download http://127.0.0.1:9/voc2007/.*: no connection'):
        download_dataset('voc/2007', tmp_path, base_url='http://127.0.0.1:9')
    assert waits == [1., 2., 4.]


@pytest.mark.parametrize('args, kwargs, message', [
    (('voc/2008',), {}, "Expected a data set to download: voc/2007, voc/2012, .*, but got 'voc/2008'"),
    (('voc/2012',), {'splits': ('test',)}, "Expected splits of 'voc/2012' among train, val, trainval, but got test"),
    (('coco/2014',), {'splits': ('train', 'minival')}, 'among train, val, but got minival'),
    (('coco/2014',), {'splits': ()}, 'but got none'),
    (('coco/2014',), {'base_url': 'mirror.org'}, "to begin with http:// or https://, but got 'mirror.org'"),
])
def test_wrong_arguments_are_refused_before_anything_is_written(tmp_path, args, kwargs, message):
    with raises_error(message):
        download_dataset(*args, tmp_path / 'root', **kwargs)
    assert not list(tmp_path.iterdir())


def test_too_little_disk_space_is_refused_beforehand(server, tmp_path, monkeypatch):
    size = len(server.files[TRAINVAL])
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: usage._replace(free=2 * size - 1))
    with raises_error(rf'{TRAINVAL} needs 0.0 GB of disk space in {tmp_path}, but only'):
        download_dataset('voc/2007', tmp_path, splits=('train',))
    assert not leftovers(tmp_path)
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: usage._replace(free=2 * size))
    download_dataset('voc/2007', tmp_path, splits=('train',))
    assert read_data(tmp_path) == VOC_TRAINVAL


def test_of_processes_that_start_together_one_downloads(server, tmp_path):
    barrier = multiprocessing.get_context('fork').Barrier(3)

    def start():
        barrier.wait(10)
        download_dataset('coco/2017', tmp_path)
        assert read_data(tmp_path) == COCO_FILES

    processes = [fork(start) for _ in range(3)]
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert sorted(request['path'] for request in server.requests) == sorted(COCO)


def test_waiting_for_another_process_is_logged(server, tmp_path, caplog):
    server.drops, server.stalls = [10], True
    process = fork(download_dataset, 'voc/2007', tmp_path)
    assert server.stalled.wait(10)
    release = threading.Timer(0.2, server.go_on.set)
    release.start()
    with caplog.at_level(logging.INFO, download.__name__):
        download_dataset('voc/2007', tmp_path)
    process.join(10)
    assert caplog.messages == [f'Waiting for another process, which is downloading to {tmp_path}.']
    assert [request['path'] for request in server.requests] == [TRAINVAL, TRAINVAL, TEST]


@pytest.mark.parametrize('terminal, progress, shown', [(True, True, True), (False, True, False), (True, False, False)])
def test_progress_is_shown_on_a_terminal_only(server, tmp_path, monkeypatch, terminal, progress, shown):
    stderr = io.StringIO()
    stderr.isatty = lambda: terminal
    monkeypatch.setattr(sys, 'stderr', stderr)
    server.drops = [10_000]
    download_dataset('voc/2007', tmp_path, splits=('train',), progress=progress)
    text = stderr.getvalue()
    size = f'{len(server.files[TRAINVAL]) / 1000:.1f}k'
    assert bool(re.search(rf'Downloading VOCtrainval.*10.0k/{size}.*100%.*{size}/{size}', text, re.DOTALL)) == shown
    assert (f'{len(VOC_TRAINVAL)}/{len(VOC_TRAINVAL)}' in text and 'Unpacking VOCtrainval' in text) == shown
    assert shown or not text
