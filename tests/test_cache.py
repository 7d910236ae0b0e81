""" Large label files: parsed once per machine, and little of them is kept in memory """
import multiprocessing
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from timm_splicemix.data import ReaderCoco, cache
from timm_splicemix.data.readers import coco

from .test_coco import ANNOTATIONS, annotation, write_coco


def read_slowly(file, log, results):
    """Each parse adds a line to a log and lasts long enough to overlap."""
    def slow_parse(file):
        with open(log, 'a') as stream:
            stream.write('parsed\n')
        time.sleep(1)
        return parse(file)

    cache._MIN_SIZE, parse, coco._parse = 0, coco._parse, slow_parse
    results.put(ReaderCoco(file.parent.parent / 'train', file).targets.tolist())


def resident():
    """Megabytes of this process in memory, without those of files."""
    return int(re.search(r'RssAnon:\s+(\d+) kB', Path('/proc/self/status').read_text())[1]) / 1e3


def measure(file, results):
    before = resident()
    reader = ReaderCoco('.', file, images_must_exist=False)
    results.put((len(reader), resident() - before))


@pytest.fixture
def parsed(monkeypatch):
    """Files that were parsed; all files are large enough for the cache."""
    files, parse = [], coco._parse
    monkeypatch.setattr(cache, '_MIN_SIZE', 0)
    monkeypatch.setattr(coco, '_parse', lambda file: files.append(file) or parse(file))
    return files


def cache_of(file):
    return file.with_name(f'.{file.name}.npz')


def assert_equal(reader, other):
    assert torch.equal(reader.targets, other.targets) and reader.paths == other.paths
    assert (reader.class_names, reader.image_ids) == (other.class_names, other.image_ids)
    assert reader.object_areas.tolist() == other.object_areas.tolist()


@pytest.mark.parametrize('options', [{}, {'class_order': 'name'}, {'keep_unlabelled': True}])
def test_a_cached_file_gives_the_same_data_set_and_is_not_parsed_again(tmp_path, parsed, options):
    file = write_coco(tmp_path, 'train')
    first = ReaderCoco(tmp_path / 'train', file)
    assert parsed == [file] and cache_of(file).is_file()
    assert_equal(ReaderCoco(tmp_path / 'train', file), first)
    again = ReaderCoco(tmp_path / 'train', file, **options)
    assert parsed == [file]
    cache_of(file).unlink()
    assert_equal(ReaderCoco(tmp_path / 'train', file, **options), again)
    assert len(parsed) == 2


def test_a_cache_has_no_pickles(tmp_path, parsed):
    file = write_coco(tmp_path, 'train')
    ReaderCoco(tmp_path / 'train', file)
    with np.load(cache_of(file), allow_pickle=False) as content:
        assert all(not content[name].dtype.hasobject for name in content.files)


def test_a_changed_file_is_parsed_again(tmp_path, parsed):
    file = write_coco(tmp_path, 'train')
    assert ReaderCoco(tmp_path / 'train', file).targets.sum() == 3
    write_coco(tmp_path, 'train', [*ANNOTATIONS, annotation(5, 4, 9)])
    assert ReaderCoco(tmp_path / 'train', file).targets.sum() == 4
    modified = os.stat(file).st_mtime_ns
    file.write_text(file.read_text().replace('"category_id": 9', '"category_id": 5'))  # of the same size
    os.utime(file, ns=(modified + 1, modified + 1))
    assert ReaderCoco(tmp_path / 'train', file).targets[0].tolist() == [0, 1, 0]
    assert len(parsed) == 3


@pytest.mark.parametrize('damage', [
    lambda content: b'', lambda content: content[:len(content) // 2], lambda content: b'\x80\x04K\x01.',
    lambda content: content.replace(b'stamp', b'stamq')])
def test_a_damaged_cache_is_replaced(tmp_path, parsed, damage):
    file = write_coco(tmp_path, 'train')
    first = ReaderCoco(tmp_path / 'train', file)
    cache_of(file).write_bytes(damage(cache_of(file).read_bytes()))
    for _ in range(2):
        assert_equal(ReaderCoco(tmp_path / 'train', file), first)
    assert len(parsed) == 2


def test_a_read_only_folder_has_its_cache_in_the_users_folder(tmp_path, parsed, monkeypatch):
    file = write_coco(tmp_path, 'train')
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'home'))
    monkeypatch.setattr(cache.os, 'access', lambda path, mode: False)  # root may write everywhere
    first = ReaderCoco(tmp_path / 'train', file)
    assert_equal(ReaderCoco(tmp_path / 'train', file), first)
    assert len(parsed) == 1 and not cache_of(file).exists()
    assert len(list((tmp_path / 'home' / 'timm_splicemix' / 'labels').glob('*.npz'))) == 1


def test_labels_are_read_where_nothing_can_be_written(tmp_path, parsed, monkeypatch):
    file = write_coco(tmp_path, 'train')
    (tmp_path / 'home').write_text('not a folder')
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'home'))
    monkeypatch.setattr(cache.os, 'access', lambda path, mode: False)
    assert [len(ReaderCoco(tmp_path / 'train', file)) for _ in range(2)] == [2, 2]
    assert len(parsed) == 2


def test_small_files_are_not_cached(tmp_path):
    file = write_coco(tmp_path, 'train')
    ReaderCoco(tmp_path / 'train', file)
    assert os.listdir(file.parent) == [file.name]


def run_processes(number, function, *args):
    """Run a function in several processes at once; returns what each put into the queue."""
    context = multiprocessing.get_context('fork')
    results = context.Queue()
    processes = [context.Process(target=function, args=(*args, results)) for _ in range(number)]
    for process in processes:
        process.start()
    values = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    return values


def test_one_of_several_processes_parses(tmp_path):
    file = write_coco(tmp_path, 'train')
    assert run_processes(3, read_slowly, file, tmp_path / 'log') == [[[0, 1, 0], [1, 0, 1]]] * 3
    assert (tmp_path / 'log').read_text() == 'parsed\n'


@pytest.mark.skipif(not os.path.exists('/proc/self/status'), reason='needs /proc')
def test_polygons_are_not_kept_in_memory(tmp_path):
    polygon = [[number / 7 for number in range(5000)]]
    annotations = [{**annotation(number, 4, 9), 'segmentation': polygon} for number in range(500)]
    file = write_coco(tmp_path, 'train', annotations)
    assert os.path.getsize(file) > 40e6  # json.load would keep 100 MB
    for _ in range(2):  # without and with the cache
        (number, grown), = run_processes(1, measure, file)
        assert number == 1 and grown < 20
        assert cache_of(file).is_file()
