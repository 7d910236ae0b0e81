""" Paths in label files: which are opened, and which are refused """
import json
import logging
import os

import pytest

from timm_splicemix.data import (
    BadImageError,
    MultiLabelDataset,
    ReaderCoco,
    ReaderCsv,
    ReaderList,
    ReaderVoc,
    create_dataset,
)
from timm_splicemix.data.readers.base import image_paths

from .helpers import raises_error
from .test_coco import write_coco
from .test_csv import make_csv
from .test_list import make_list
from .test_voc import make_voc


def read_coco(root, name):
    file = write_coco(root, 'images', file='labels.json')
    content = json.loads(file.read_text())
    content['images'][0]['file_name'] = name
    file.write_text(json.dumps(content))
    return ReaderCoco(root / 'images', file)


def read_csv(root, name):
    return ReaderCsv(root / 'images', make_csv(root / 'images', f'image,cat\n{name},1\nb.jpg,0\n', name='labels.csv'))


def read_list(root, name):
    return ReaderList(root / 'images', make_list(root / 'images', f'{name},1\nb.jpg,0\n', name='labels.txt'))


def read_voc(root, name):
    folder = make_voc(root, class_files=False, xml=True)
    (folder / 'ImageSets' / 'Main' / 'labels.txt').write_text(f'{name.removesuffix(".jpg")}\n000005\n')
    return ReaderVoc(root, '2007', 'labels')


READERS = [read_coco, read_csv, read_list, read_voc]


@pytest.mark.parametrize('read', READERS)
@pytest.mark.parametrize('name', ['../a.jpg', 'x/../../a.jpg', 'x/../a.jpg'])
def test_paths_with_two_dots_are_refused(tmp_path, read, name):
    with raises_error(r"labels\.\w+ lists .*\.\..*, and '\.\.' is refused\. Set --data-dir"):
        read(tmp_path, name)


@pytest.mark.parametrize('read', [read_coco, read_csv, read_list])
def test_absolute_paths_are_read_and_logged_in_one_line(tmp_path, read, caplog):
    path = make_list(tmp_path / 'elsewhere', '').with_name('a.jpg')
    with caplog.at_level(logging.INFO):
        reader = read(tmp_path, str(path))
    assert str(path) in reader.paths and len(MultiLabelDataset(reader)[0]) == 2
    assert [message for message in caplog.messages if 'absolute' in message] == [
        f'1 images listed in {next(tmp_path.rglob("labels.*"))} have absolute paths, such as {path}.']


def test_links_are_followed(tmp_path):
    make_list(tmp_path / 'elsewhere', '')
    (tmp_path / 'images').mkdir()
    os.symlink(tmp_path / 'elsewhere', tmp_path / 'images' / 'x')
    assert len(MultiLabelDataset(read_csv(tmp_path, 'x/a.jpg'))[0]) == 2


def test_names_that_differ_in_their_spelling_are_the_same_image(tmp_path):
    assert image_paths('r', ['a.jpg', './b.jpg', 'x//c.jpg', 'd..jpg', '...'], 'f') == [
        'r/a.jpg', 'r/b.jpg', 'r/x/c.jpg', 'r/d..jpg', 'r/...']
    with raises_error(r'labels.csv:3 and .*labels.csv:2 list .*b.jpg with different labels'):
        read_csv(tmp_path, './b.jpg')


@pytest.mark.parametrize('read', [read_coco, read_csv, read_list])
@pytest.mark.parametrize('name', ['pipe.jpg', '/dev/zero'])
def test_pipes_and_devices_are_not_read(tmp_path, read, name):
    (tmp_path / 'images').mkdir()
    os.mkfifo(tmp_path / 'images' / 'pipe.jpg')
    dataset = MultiLabelDataset(read(tmp_path, name))
    index = [os.path.basename(path) for path in dataset.reader.paths].index(os.path.basename(name))
    with pytest.raises(BadImageError, match=f'Cannot read image .*{name}: Not a regular file'):
        dataset[index]


def test_pipes_in_folders_of_timm_are_not_read(tmp_path):
    make_list(tmp_path / 'cat', '')
    os.mkfifo(tmp_path / 'cat' / 'pipe.jpg')
    dataset = create_dataset('folder', tmp_path)
    assert len(dataset[0]) == 2
    with pytest.raises(BadImageError, match=r'Cannot read image .*pipe.jpg: Not a regular file'):
        dataset[3]
