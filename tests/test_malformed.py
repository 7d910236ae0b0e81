""" Malformed label files: each loads, or raises an error of one sentence that names a file of the data set """
import copy
import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from timm_splicemix.data import (
    BadImageError,
    MultiLabelDataset,
    ReaderCoco,
    ReaderCsv,
    ReaderJson,
    ReaderList,
    ReaderVoc,
    ReaderWds,
)
from timm_splicemix.errors import UsageError

from .test_coco import write_coco
from .test_csv import make_csv
from .test_json import MMPRETRAIN, make_json
from .test_list import make_list
from .test_voc import make_voc
from .test_wds import NAMES, png, write_tar

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
    | st.sampled_from(['', '..', '../a.jpg', '/a.jpg', './a.jpg', '\ud800', 'a\0.jpg', 'x' * 300, 'dog', 2, 10**400]),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(max_size=2), values, max_size=2),
    max_leaves=5)
PIECES = st.binary(max_size=4) | st.sampled_from([
    b'\n', b'\r', b',', b'\t', b'"', b';', b'..', b'/', b'../a.jpg', b'-1', b'9' * 30, b'9' * 5000, b'\xff', b'\0',
    b'[' * 3000, b'{"a":' * 3000, b'&a;', b'<object>', b'x' * 300, 'é'.encode()])
LABELS, INDICES = b'{"labels": ["cat", 1]}', b'2 0'


# Data sets: functions that write one and return the files to change and a function that reads it

def coco(root):
    file = write_coco(root, 'train')
    content = json.loads(file.read_text())
    del content['annotations'][0]['area']
    file.write_text(json.dumps(content))
    return [file], lambda exist: ReaderCoco(root / 'train', file, images_must_exist=exist)


def voc_classes(root):
    main = make_voc(root) / 'ImageSets' / 'Main'
    files = [main / 'train.txt', main / 'cat_train.txt']
    return files, lambda exist: ReaderVoc(root, '2007', 'train', images_must_exist=exist)


def voc_xml(root):
    folder = make_voc(root, class_files=False, xml=True)
    files = [folder / 'ImageSets' / 'Main' / 'train.txt', folder / 'Annotations' / '000012.xml']
    return files, lambda exist: ReaderVoc(root, '2007', 'train', images_must_exist=exist)


def csv_labels(root):
    file = make_csv(root, 'image,labels,split\na.jpg,cat;dog,train\nb.jpg,"cow, small",train\nc.jpg,,val\n')
    return [file], lambda exist: ReaderCsv(root, file, 'train', images_must_exist=exist)


def csv_classes(root):
    file = make_csv(root, 'image,cat,dog\na.jpg,1,0\nb.jpg,-1,1\n')
    return [file], lambda exist: ReaderCsv(root, file, images_must_exist=exist)


def csv_indices(root):
    file = make_csv(root, 'image,labels\na.jpg,0;1\nb.jpg,1\n')
    return [file], lambda exist: ReaderCsv(root, file, class_names=['cat', 'dog'], images_must_exist=exist)


def csv_rows(root):
    file = make_csv(root, 'ImageID,LabelName,Confidence\na,cat,1\na,dog,0\nb,cat,1\n')
    return [file], lambda exist: ReaderCsv(root, file, empty_cells='unknown', images_must_exist=exist)


def json_records(root):
    file = make_json(root, [
        {'image': 'a.jpg', 'labels': ['cat', 'dog'], 'split': 'train'}, {'image': 'b', 'labels': [], 'split': 'train'},
        {'image': 'c.jpg', 'labels': {'cat': 0, 'dog': -1}, 'split': 'val'}])
    return [file], lambda exist: ReaderJson(root, file, 'train', images_must_exist=exist)


def json_multi_hot(root):
    file = make_json(root, [{'image': 'a.jpg', 'labels': [1, 0, 0]}, {'image': 'b.jpg', 'labels': [0, -1, 1]}])
    return [file], lambda exist: ReaderJson(root, file, class_names=['x', 'y', 'z'], images_must_exist=exist)


def json_lines(root):
    file = make_json(root, [{'image': 'a.jpg', 'labels': [1, 0]}, {'image': 'b.jpg', 'labels': [2]}], 'labels.jsonl')
    return [file], lambda exist: ReaderJson(root, file, images_must_exist=exist)


def json_mmpretrain(root):
    file = make_json(root, MMPRETRAIN)
    return [file], lambda exist: ReaderJson(root, file, difficult='ignore', images_must_exist=exist)


def image_list(root):
    file = make_list(root, 'a.jpg,0 2\nb.jpg\t1\nc.jpg\n')
    return [file], lambda exist: ReaderList(root, file, images_must_exist=exist)


def shards(root):
    shard = write_shard(root)
    ReaderWds(root)  # writes the index
    return [shard, root / '.tsm_index.json', root / 'classes.txt'], lambda exist: ReaderWds(root)


def shard_labels(root):
    labels, indices = root / '0.json', root / '1.cls'
    labels.write_bytes(LABELS)
    indices.write_bytes(INDICES)

    def read(exist):
        write_shard(root, labels.read_bytes(), indices.read_bytes())
        return ReaderWds(root)

    return [labels, indices], read


def write_shard(root, labels=LABELS, indices=INDICES):
    (root / 'classes.txt').write_text('\n'.join(NAMES))
    members = [('0.png', png(0)), ('0.json', labels), ('1.png', png(1)), ('1.cls', indices)]
    return write_tar(root / 'train-0.tar', members)


def change_json(draw, content):
    """Replace, remove or repeat parts of JSON."""
    content = [json.loads(content)]
    for _ in range(draw(st.integers(1, 3))):
        *path, key = draw(st.sampled_from(list(places_in(content))[1:]))
        parent = content
        for step in path:
            parent = parent[step]
        action = draw(st.sampled_from(['replace', 'replace', 'remove', 'repeat'])) if path else 'replace'
        if action == 'replace':
            parent[key] = draw(VALUES)
        elif action == 'remove':
            del parent[key]
        elif isinstance(parent, list):
            parent.append(copy.deepcopy(parent[key]))
    return json.dumps(content[0]).encode()


def places_in(value, path=()):
    """Paths of all parts of a JSON value."""
    yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from places_in(part, (*path, key))


def change_bytes(draw, content):
    """Replace pieces of a file, or cut it."""
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(content)))
        end = draw(st.sampled_from([start, start + 1, start + 5, len(content)]))
        content = content[:start] + draw(PIECES) + content[end:]
    return content


def check(read, names):
    """Read all labels and images of a data set."""
    try:
        dataset = MultiLabelDataset(read())
        assert dataset.targets.shape == (len(dataset), dataset.num_classes)
        for index in range(len(dataset)):
            dataset[index]
    except BadImageError as error:  # names the image
        assert '\n' not in str(error)
    except UsageError as error:
        message = str(error)
        assert '\n' not in message and any(name in message for name in names), message


def run_examples(write, root, number, **options):
    files, read = write(root)
    contents = {file: file.read_bytes() for file in files}
    names = [file.name for file in files] + ['ImageSets/Main', 'train-0.tar']

    @settings(max_examples=number, deadline=None, database=None, suppress_health_check=list(HealthCheck), **options)
    @given(st.data())
    def example(data):
        for file, content in contents.items():
            file.write_bytes(content)
        file = data.draw(st.sampled_from(files))
        change = data.draw(st.sampled_from([change_json, change_bytes] if file.suffix == '.json' else [change_bytes]))
        file.write_bytes(change(data.draw, contents[file]))
        exist = data.draw(st.booleans())
        check(lambda: read(exist), names)

    example()


DATA_SETS = [
    coco, voc_classes, voc_xml, csv_labels, csv_classes, csv_indices, csv_rows, json_records, json_multi_hot,
    json_lines, json_mmpretrain, image_list, shards, shard_labels]


@pytest.mark.parametrize('write', DATA_SETS)
def test_a_changed_file_loads_or_is_named_in_one_sentence(tmp_path, write):
    run_examples(write, tmp_path, 40, derandomize=True)


@pytest.mark.slow
@pytest.mark.parametrize('write', DATA_SETS)
def test_many_changed_files_load_or_are_named_in_one_sentence(tmp_path, write):
    run_examples(write, tmp_path, 600, derandomize='CI' in os.environ)
