""" --cache: decoded images that processes and later runs share """
import errno
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from timm_splicemix.data import dataset as datasets
from timm_splicemix.data import pixel_cache
from timm_splicemix.data.dataset import BadImageError, MultiLabelDataset
from timm_splicemix.data.readers.base import MultiLabelReader
from timm_splicemix.train import main
from timm_splicemix.validate import main as validate

from .conftest import REPOSITORY
from .helpers import raises_error
from .runs import assert_same_weights, flags_of, make_images, summary, train
from .test_full_disk import disk  # noqa: F401
from .test_stop import TORCHRUN

RAM = Path('/dev/shm')


def caches_in_memory():
    return sorted(RAM.glob('timm_splicemix-*-*'))


@pytest.fixture
def photos(tmp_path):
    """Files of many kinds: rotated, grey, with transparency, with a palette, of 16 bits."""
    draws = np.random.default_rng(0)
    folder = tmp_path / 'photos'
    folder.mkdir()
    rgb = Image.fromarray(draws.integers(0, 255, (60, 90, 3), np.uint8))
    for orientation in (1, 3, 6):
        exif = Image.Exif()
        exif[0x0112] = orientation
        rgb.save(folder / f'rotated-{orientation}.jpg', exif=exif)
    rgb.save(folder / 'plain.jpg')
    rgb.convert('L').save(folder / 'grey.jpg')
    rgb.convert('RGBA').save(folder / 'alpha.png')
    rgb.convert('P').save(folder / 'palette.png')
    rgb.save(folder / 'rotated.tif', exif=exif)
    Image.fromarray(draws.integers(0, 65535, (40, 40)).astype(np.uint16)).save(folder / '16-bit.png')
    return folder


def make_dataset(folder, decoder='torchvision', mode='RGB'):
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    dataset = MultiLabelDataset(
        MultiLabelReader(paths, torch.ones(len(paths), 1, dtype=torch.int8), ['a'], folder), input_img_mode=mode)
    dataset.decoder = decoder
    return dataset


def arrays(dataset):
    return [np.asarray(dataset[index][0]) for index in range(len(dataset))]


def assert_equal_images(images, others):
    for image, other in zip(images, others, strict=True):
        np.testing.assert_array_equal(image, other)


def spoil(folder):
    """Make all files unreadable without changing their sizes and times."""
    for path in folder.glob('*.[jpt][pni][gf]'):
        status = path.stat()
        path.write_bytes(bytes(status.st_size))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize('decoder', ['pil', 'torchvision'])
@pytest.mark.parametrize('mode', ['RGB', 'L', 'RGBA', 'CMYK'])
def test_pixels_are_exact_and_come_from_the_cache(photos, tmp_path, decoder, mode):
    expected = arrays(make_dataset(photos, decoder, mode))
    dataset = make_dataset(photos, decoder, mode)
    dataset.use_cache(tmp_path / 'cache')
    assert dataset.pixels.num_written == 0
    assert_equal_images(arrays(dataset), expected)
    assert dataset.pixels.num_written >= len(dataset) - 1  # Pillow may not tell the rotated size of a TIFF file
    spoil(photos)
    later = make_dataset(photos, decoder, mode)
    later.use_cache(tmp_path / 'cache')
    readable = [index for index in range(len(later)) if later.pixels.read(index) is not None]
    assert len(readable) == dataset.pixels.num_written
    assert_equal_images([np.asarray(later[index][0]) for index in readable], [expected[index] for index in readable])


def test_tensors_have_the_strides_of_decoded_files(photos, tmp_path):
    plain, cached = make_dataset(photos), make_dataset(photos)
    cached.use_cache(tmp_path / 'cache')
    for _ in range(2):
        assert [cached[i][0].stride() for i in range(len(cached))] == [plain[i][0].stride() for i in range(len(plain))]


def test_cache_size_is_the_shorter_side(photos, tmp_path):
    plain, cached = make_dataset(photos), make_dataset(photos)
    cached.use_cache(tmp_path / 'cache', size=48)
    first, second, exact = arrays(cached), arrays(cached), arrays(plain)
    assert_equal_images(first, second)
    assert {min(image.shape[1:]) for image in first} == {40, 48}  # smaller images keep their size
    means = [(image.mean(), other.mean()) for image, other in zip(first, exact)]
    np.testing.assert_allclose(*zip(*means), atol=1.5)
    by_pil = make_dataset(photos, 'pil')
    by_pil.use_cache(tmp_path / 'other', size=48)
    assert_equal_images([image.transpose(1, 2, 0) for image in first], arrays(by_pil))


def test_a_changed_image_creates_the_cache_again(photos, tmp_path):
    dataset = make_dataset(photos)
    dataset.use_cache(tmp_path / 'cache')
    arrays(dataset)
    Image.new('RGB', (30, 20), 'red').save(photos / 'plain.jpg')
    changed = make_dataset(photos)
    changed.use_cache(tmp_path / 'cache')
    assert changed.pixels.num_written == 0
    assert_equal_images(arrays(changed), arrays(make_dataset(photos)))
    assert len(list((tmp_path / 'cache').glob('*/index.npz'))) == 1


def test_a_changed_time_alone_creates_the_cache_again(photos, tmp_path):
    dataset = make_dataset(photos)
    dataset.use_cache(tmp_path / 'cache')
    arrays(dataset)
    os.utime(photos / 'plain.jpg', (1, 1))
    changed = make_dataset(photos)
    changed.use_cache(tmp_path / 'cache')
    assert changed.pixels.num_written == 0


def test_a_full_disk_is_no_unreadable_image(photos, tmp_path, monkeypatch):
    dataset = make_dataset(photos)
    dataset.use_cache(tmp_path / 'cache')

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, 'pwrite', fail)
    with raises_error(f'Cannot write cache {dataset.pixels.folder}: No space left .* another folder for') as caught:
        dataset[0]
    assert not isinstance(caught.value, BadImageError)


def test_a_half_written_image_is_not_read(photos, tmp_path):
    dataset = make_dataset(photos)
    dataset.use_cache(tmp_path / 'cache')
    child = os.fork()
    if not child:
        pwrite = os.pwrite

        def write_half(file, data, place):
            pwrite(file, data[:len(data) // 2], place)
            os._exit(9)  # killed in the middle

        os.pwrite = write_half
        dataset[0]
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert dataset.pixels.read(0) is None
    assert_equal_images(arrays(dataset), arrays(make_dataset(photos)))


def test_images_that_a_restart_may_have_lost_are_decoded_again(photos, tmp_path, monkeypatch):
    child = os.fork()
    if not child:
        dataset = make_dataset(photos)
        dataset.use_cache(tmp_path / 'cache')
        dataset[0]
        dataset.pixels.sync()
        dataset[1]
        os._exit(0)  # killed
    os.waitpid(child, 0)
    dataset = make_dataset(photos)
    dataset.use_cache(tmp_path / 'cache')
    assert dataset.pixels.read(0) is not None and dataset.pixels.read(1) is not None
    os.close(dataset.pixels._users)  # as if killed: closing would sync
    dataset.pixels._users = None
    monkeypatch.setattr(pixel_cache, '_boot_id', lambda: 'restarted')
    dataset = make_dataset(photos)
    dataset.use_cache(tmp_path / 'cache')
    assert dataset.pixels.read(0) is not None and dataset.pixels.read(1) is None
    monkeypatch.setattr(pixel_cache, '_boot_id', lambda: 'another machine')
    for _ in range(2):
        with raises_error('in use on another machine'):
            make_dataset(photos).use_cache(tmp_path / 'cache')
    dataset.pixels.close()
    make_dataset(photos).use_cache(tmp_path / 'cache')


def test_a_system_without_boot_id_shares_a_cache(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(pixel_cache, '_boot_id', lambda: '')  # macOS
    datasets = [make_dataset(photos) for _ in range(2)]
    for dataset in datasets:
        dataset.use_cache(tmp_path / 'cache')
    datasets[0][0]
    assert datasets[1].pixels.read(0) is not None


def test_other_processes_read_what_one_wrote(photos, tmp_path):
    dataset = make_dataset(photos)
    dataset.use_cache(tmp_path / 'cache')
    other = pickle.loads(pickle.dumps(dataset.pixels))
    dataset[3]
    assert torch.equal(other.read(3), dataset.pixels.read(3)) and other.read(4) is None


@pytest.mark.parametrize('decoder', [pytest.param('pil', marks=pytest.mark.slow), 'torchvision'])
def test_a_run_is_the_same_with_and_without_cache(tmp_path, decoder):
    data = make_images(tmp_path / 'data')
    flags = ('--splicemix-grids', '2x2', '--decoder', decoder)
    plain = train(data, tmp_path, *flags, name='plain')
    cached = train(data, tmp_path, *flags, '--cache', tmp_path / 'cache', '-j', 2, name='cached')
    spoil(data)
    again = train(data, tmp_path, *flags, '--cache', tmp_path / 'cache', name='again')
    for folder in (cached, again):
        assert summary(folder) == summary(plain)
        assert_same_weights(folder / 'last.pth.tar', plain / 'last.pth.tar')


@pytest.mark.slow
def test_two_processes_share_a_cache_in_memory_that_ends_with_them(tmp_path):
    data = make_images(tmp_path / 'data')
    runs = []
    for name, flags in (('plain', ()), ('cached', ('--cache', 'ram', '-j', 1))):
        command = [sys.executable, *TORCHRUN, 'train.py', *flags_of(data, tmp_path, *flags, name=name)]
        done = subprocess.run(
            command, env={**os.environ, 'OMP_NUM_THREADS': '1'}, cwd=REPOSITORY, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        runs.append(tmp_path / name)
    assert 'Cache /dev/shm' in done.stdout + done.stderr
    assert summary(runs[0]) == summary(runs[1])
    assert_same_weights(runs[0] / 'last.pth.tar', runs[1] / 'last.pth.tar')
    assert not caches_in_memory()


@pytest.mark.slow
def test_a_killed_run_leaves_no_cache_in_memory_for_ever(photos, tmp_path):
    code = [
        'from tests.test_pixel_cache import *', 'import os, signal',
        f'data = make_dataset(Path({str(photos)!r})); data.use_cache("ram"); data[0]',
        'print(data.pixels.folder, flush=True); os.kill(os.getpid(), signal.SIGKILL)']
    done = subprocess.run([sys.executable, '-c', '\n'.join(code)], cwd=REPOSITORY, capture_output=True, text=True)
    folder = Path(done.stdout.split()[-1])
    assert folder.is_dir()
    dataset = make_dataset(photos, mode='L')
    dataset.use_cache('ram')
    assert not folder.exists() and dataset.pixels.folder.is_dir()
    dataset.pixels.close()
    assert not dataset.pixels.folder.exists()


def test_closing_an_outdated_cache_in_memory_keeps_its_successor(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(pixel_cache, '_RAM', tmp_path)
    old, new = make_dataset(photos), make_dataset(photos)
    old.use_cache('ram')
    os.utime(photos / 'plain.jpg', (1, 1))
    new.use_cache('ram')
    old.pixels.close()
    assert new.pixels.folder.is_dir()
    new.pixels.close()
    assert not new.pixels.folder.exists()


@pytest.mark.parametrize('groups, limit, usage', [
    ('0::/job/step', 'job/memory.max', 'job/memory.current'),
    ('4:cpu,memory:/docker/1\n0::/', 'memory/memory.limit_in_bytes', 'memory/memory.usage_in_bytes')])
def test_memory_that_a_container_lacks_is_not_used(photos, tmp_path, monkeypatch, groups, limit, usage):
    (tmp_path / 'groups').write_text(groups)
    monkeypatch.setattr(pixel_cache, '_GROUPS', tmp_path / 'groups')
    monkeypatch.setattr(pixel_cache, '_GROUP_ROOT', tmp_path)
    unlimited = pixel_cache._available_memory()
    folder = (tmp_path / limit).parent
    folder.mkdir()
    (tmp_path / usage).write_text('900000\n')
    (folder / 'memory.stat').write_text('file 900\ninactive_file 1000\n')
    (tmp_path / limit).write_text('1000000\n')
    assert pixel_cache._available_memory() == 90900  # of 101,000
    with raises_error(r'needs 0.000\d+ GB, but /dev/shm has 9.09e-05 GB free'):
        make_dataset(photos).use_cache('ram')
    (tmp_path / limit).write_text('max\n')
    assert pixel_cache._available_memory() > unlimited / 2


def test_a_cache_that_does_not_fit_is_refused(photos, tmp_path, disk):  # noqa: F811
    folder = disk(40)
    with raises_error(r'needs 0.000\d+ GB, but .*disk has 4.1e-05 GB free'):
        make_dataset(photos).use_cache(folder)
    disk(400)
    make_dataset(photos).use_cache(folder)


def test_flags(data, tmp_path, capsys):
    for flags, message in (
            (('--cache-size', '8'), 'Expected --cache with --cache-size, but got none.'),
            (('--cache', tmp_path / 'cache', '--in-chans', '1', '--input-img-mode', 'F'), '8 bits per channel'),
    ):
        with pytest.raises(SystemExit):
            main(flags_of(data, tmp_path, *flags))
        assert message in capsys.readouterr().err


def test_validation_decodes_once_for_all_sizes_without_scaled_decoding(data, tmp_path, monkeypatch):
    run = train(data, tmp_path, '--epochs', 1)
    flags = [
        '--checkpoint', str(run), '--dataset', 'csv', '--data-dir', str(data), '-b', '4', '--eval-sizes', '32', '48']
    validate([*flags, '-j', '0', '--scaled-decoding', '--output', str(tmp_path / 'scaled')])
    assert (tmp_path / 'scaled' / 'size-32' / 'results.json').exists()
    calls = tmp_path / 'calls'  # of all workers
    decode = datasets.decode_image

    def count(*args, **kwargs):
        with open(calls, 'ab') as file:
            file.write(b'.')
        return decode(*args, **kwargs)

    monkeypatch.setattr(datasets, 'decode_image', count)
    validate([*flags, '-j', '2', '--output', str(tmp_path / 'results')])
    assert calls.stat().st_size == 9  # images of the split
