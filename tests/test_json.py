""" JSON files with a record for each image """
import json
import logging

import pytest
import torch
from PIL import Image

from timm_splicemix.data import ReaderJson, create_dataset
from timm_splicemix.data.readers.json import find_json

from .helpers import raises_error

IMAGES = ('a.jpg', 'b.jpg', 'c.jpg')


def make_json(root, content, name='labels.json', images=IMAGES):
    """Write images and a file: text as it is, other content as JSON, or as JSON Lines by the suffix."""
    root.mkdir(parents=True, exist_ok=True)
    for image in images:
        Image.new('RGB', (8, 6)).save(root / image)
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    if name.endswith('l'):
        content = '\n'.join(map(json.dumps, content))
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def read(root, content, *, name='labels.json', images=IMAGES, **options):
    return ReaderJson(root, make_json(root, content, name, images), **options)


def records(*labels, key='labels'):
    return [{'file_name': image, key: label} for image, label in zip(IMAGES, labels)]


@pytest.mark.parametrize('labels, names, targets', [
    ((['cat', 'dog'], [], ['cow']), ['cat', 'cow', 'dog'], [[1, 0, 1], [0, 0, 0], [0, 1, 0]]),
    (([0, 2], [], [1]), ['0', '1', '2'], [[1, 0, 1], [0, 0, 0], [0, 1, 0]]),
    (([1, 0, 1], [0, 0, 0], [0, -1, 0]), ['0', '1', '2'], [[1, 0, 1], [0, 0, 0], [0, -1, 0]]),
    (([True, False], [False, False]), ['0', '1'], [[1, 0], [0, 0]]),
    (([1., 0.], [0., 1.]), ['0', '1'], [[1, 0], [0, 1]]),
    (({'dog': 1, 'cat': 0}, {'dog': -1, 'cat': True}), ['cat', 'dog'], [[0, 1], [1, -1]]),
    (('cat', 'dining table'), ['cat', 'dining table'], [[1, 0], [0, 1]]),
    ((1, 0), ['0', '1'], [[0, 1], [1, 0]]),
    (([0, 1], [1, 0]), ['0', '1'], [[1, 1], [1, 1]]),
    ((['été', '猫'], ['猫']), ['été', '猫'], [[1, 1], [0, 1]]),
])
@pytest.mark.parametrize('name', ['labels.json', 'labels.jsonl', 'lines.json'])
def test_every_kind_of_labels_is_read(tmp_path, labels, names, targets, name):
    content = records(*labels)
    if name == 'lines.json':  # JSON Lines in a .json file
        content = '\ufeff' + '\r\n'.join(map(json.dumps, content)) + '\r\n'
    reader = read(tmp_path, content, name=name)
    assert reader.class_names == names and reader.filenames() == list(IMAGES[:len(labels)])
    assert reader.targets.dtype == torch.int8 and reader.targets.tolist() == targets


def test_a_list_of_0_and_1_can_be_called_multi_hot(tmp_path):
    content = records([0, 1], [1, 0])
    assert read(tmp_path, content, label_key='labels:multi_hot').targets.tolist() == [[0, 1], [1, 0]]
    assert read(tmp_path, records([0, 1], [1, 0], key='multi_hot')).targets.tolist() == [[0, 1], [1, 0]]


@pytest.mark.parametrize('image', ['file_name', 'image', 'img_path', 'ImageID', 'filename'])
@pytest.mark.parametrize('label', ['labels', 'gt_label', 'tags', 'classes', 'target', 'categories'])
def test_usual_keys_are_recognised(tmp_path, image, label):
    content = [{'width': 8, image: 'a', label: ['cat']}, {'width': 8, image: 'b.jpg', label: ['dog']}]
    reader = read(tmp_path, content)
    assert reader.filenames() == ['a.jpg', 'b.jpg'] and reader.targets.tolist() == [[1, 0], [0, 1]]


def test_other_keys_can_be_named(tmp_path):
    content = [{'photo': 'a.jpg', 'image': 'x', 'what': ['cat'], 'labels': 7}]
    make_json(tmp_path, content, 'train.json')
    dataset = create_dataset('json', tmp_path, 'train', input_key='photo', target_key='what')
    assert dataset.reader.filenames() == ['a.jpg'] and dataset.class_names == ['cat']


MMPRETRAIN = {
    'metainfo': {'classes': ['zebra', 'ant', 'dog']},
    'data_list': [
        {'img_path': 'a.jpg', 'gt_label': [0], 'gt_label_difficult': [1, 0]},
        {'img_path': 'b.jpg', 'gt_label': [1, 2], 'gt_label_difficult': []},
        {'img_path': 'c.jpg', 'gt_label': [2]}]}


@pytest.mark.parametrize('split, options, first', [
    ('train', {}, [1, 0, 0]), ('val', {}, [1, -1, 0]), ('train', {'difficult': 'positive'}, [1, 1, 0]),
    ('train', {'difficult': 'ignore'}, [1, -1, 0]), ('val', {'difficult': 'negative'}, [1, 0, 0])])
def test_the_format_of_mmpretrain_is_read(tmp_path, split, options, first):
    make_json(tmp_path, MMPRETRAIN, f'annotations/{split}.json')
    dataset = create_dataset('json', tmp_path, split, **options)
    assert dataset.class_names == ['zebra', 'ant', 'dog']
    assert dataset.targets.tolist() == [first, [0, 1, 1], [0, 0, 1]]
    assert len(dataset[0]) == 2


def test_given_classes_choose_the_order_and_indices_refer_to_the_files_own(tmp_path):
    names = ['dog', 'cow', 'zebra', 'ant']
    assert read(tmp_path, MMPRETRAIN, class_names=names).targets.tolist() == [
        [0, 0, 1, 0], [1, 0, 0, 1], [1, 0, 0, 0]]
    assert read(tmp_path, records([0], [1]), class_names=['x', 'y', 'z']).targets.tolist() == [[1, 0, 0], [0, 1, 0]]


@pytest.mark.parametrize('content', [
    {'a.jpg': ['cat'], 'b.jpg': []}, {'classes': ['cat'], 'data': [{'image': 'a.jpg', 'labels': [0]},
                                                                   {'image': 'b.jpg', 'labels': []}]},
    {'categories': [{'id': 1, 'name': 'cat'}], 'images': [{'file_name': 'a.jpg', 'labels': ['cat']},
                                                          {'file_name': 'b.jpg', 'labels': []}]}])
def test_objects_of_records_are_read(tmp_path, content):
    reader = read(tmp_path, content)
    assert reader.filenames() == ['a.jpg', 'b.jpg']
    assert reader.class_names == ['cat'] and reader.targets.tolist() == [[1], [0]]


def test_identical_records_are_merged(tmp_path, caplog):
    content = [*records(['cat'], ['dog']), {'file_name': './a.jpg', 'labels': ['cat']}]
    with caplog.at_level(logging.INFO):
        reader = read(tmp_path, content)
    assert reader.filenames() == ['a.jpg', 'b.jpg'] and reader.targets.tolist() == [[1, 0], [0, 1]]
    assert caplog.messages == [f'1 duplicate entries of {tmp_path}/labels.json were merged.']


@pytest.mark.parametrize('files, split, found', [
    (('train.json', 'val.json'), 'validation', 'val.json'), (('train.jsonl', 'test.jsonl'), 'train', 'train.jsonl'),
    (('annotations/train.json', 'annotations/val.json'), 'train', 'annotations/train.json'),
    (('train/metadata.jsonl', 'validation/metadata.jsonl'), 'val', 'validation/metadata.jsonl')])
def test_the_file_of_a_split_is_found(tmp_path, files, split, found):
    for name in files:
        folder, _, file = name.rpartition('/')
        if file == 'metadata.jsonl':  # the images are beside it
            make_json(tmp_path / folder, records(['cat']), file)
        else:
            make_json(tmp_path, records(['cat']), name)
    dataset = create_dataset('json', tmp_path, split)
    assert str(dataset.reader.labels_file) == str(tmp_path / found)


def test_one_file_may_hold_all_splits(tmp_path):
    content = [{'image': 'a.jpg', 'labels': ['cat'], 'split': 'train'},
               {'image': 'b.jpg', 'labels': ['dog'], 'split': 'val'}]
    make_json(tmp_path, content, 'all.jsonl')
    for split, name, targets in (('train', 'a.jpg', [[1, 0]]), ('validation', 'b.jpg', [[0, 1]])):
        dataset = create_dataset('json', tmp_path, split)
        assert dataset.reader.filenames() == [name] and dataset.targets.tolist() == targets
    make_json(tmp_path, records(['cat']), 'all.jsonl')
    with raises_error("all.jsonl have no key 'split' to find 'train'. Write a file for each .* --split-file"):
        create_dataset('json', tmp_path, 'train')


@pytest.mark.parametrize('content, options, message', [
    ('', {}, 'Expected JSON in .*labels.json, but got: '),
    ('[1, 2', {}, 'Expected JSON in .*labels.json, but got: '),
    ('[]', {}, r'Expected a list of records such as .* in .*labels.json, but got \[\]'),
    ('{}', {}, 'Expected a list of records in .*labels.json, or one with the key data_list'),
    ('[3]', {}, 'Expected a record such as .* in record 1 of .*labels.json, but got 3'),
    ('{"image": "a.jpg", "labels": []}\n{"image"\n', {}, 'Expected JSON in .*labels.json:2, but got'),
    ('{"images": [], "annotations": [], "categories": []}', {}, 'labels.json is in COCO format. .*--dataset coco'),
    ([{'labels': []}], {}, 'records of .*labels.json have no key of the image. Their keys: labels. Set --input-key'),
    ([{'image': 'a.jpg'}], {}, 'labels.json have no key of the labels. Their keys: image. Set --target-key'),
    (records([]), {'label_key': 'x'}, r"labels.json have no key 'x' \(--target-key\)"),
    ([*records(['cat']), {'file_name': 'b.jpg'}], {}, r"'labels' is missing in record 2 of .*labels.json. Write \[\]"),
    (records(None), {}, "The key 'labels' is missing in record 1 of .*labels.json"),
    ([{'image': [], 'labels': ['x']}], {}, r"name of an image as 'image' in record 1 of .*labels.json, but got \[\]"),
    (records(['cat', 1]), {}, "names or indices as labels of .*labels.json, but got both, such as 'cat' and 1"),
    (records(['cat', '']), {}, "Expected names or indices of classes in record 1 of .*labels.json, but got ''"),
    (records([-3]), {}, 'Expected names or indices of classes in record 1 of .*labels.json, but got -3'),
    (records([10 ** 30]), {}, 'Expected names or indices of classes in record 1 of .*labels.json'),
    (records([0.5, 0.2]), {}, 'Expected a list of 2 values among 0, 1 and -1 in record 1 of .*labels.json'),
    (records([1, 1, 0], [1, 0.]), {}, 'Expected a list of 3 values among 0, 1 and -1 in record 2 of .*labels.json'),
    (records({'cat': 0.7}), {}, r'Expected 1 \(present\), .* in record 1 of .*labels.json, but got .*Write the list'),
    (records([], []), {}, 'labels.json has no labels. Set --class-map'),
    (records([7]), {'class_names': ['cat']}, 'Expected class indices 0 to 0 in record 1 of .*labels.json, but got 7'),
    ([{'image': 'a.jpg', 'labels': 'cat'}, {'image': 'b.jpg', 'labels': 'cat, dog'}], {},
     r'record 2 of .*labels.json, but got .cat, dog.. Write \["cat", "dog"\], or set --class-map'),
    ([{'image': 'a.jpg', 'cat': 1, 'dog': 0}], {},
     'no key of the labels. Their keys: image, cat, dog. Set --target-key, or write them under one key'),
    (records([{'name': 'cat'}]), {},
     r'record 1 of .*labels.json, but got .*name.* Write labels such as \["cat", "dog"'),
    (records(['dgo']), {'class_names': ['dog']}, "Label 'dgo' in record 1 of .*labels.json .*did you mean 'dog'"),
    ({'classes': 7, 'data': records(['cat'])}, {}, 'a list of names as the classes of .*labels.json, but got 7'),
    (records([1, 0, 0], [0, 0, 1]), {'class_names': ['x', 'y'], 'label_key': 'labels:multi_hot'},
     'Expected a list of 2 values among 0, 1 and -1 in record 1 of .*labels.json'),
    ({'classes': ['a', 'a'], 'data': records([0])}, {}, "Duplicate class 'a' in .*labels.json"),
    (records(['a\nb']), {}, r"Class 'a\\nb' in .*labels.json has a line break"),
    ([*records(['cat']), *records(['dog'])], {}, 'labels.json lists .*a.jpg more than once, with different labels'),
    ([{'image': '../a.jpg', 'labels': ['cat']}], {}, r"labels.json lists ../a.jpg, and '..' is refused"),
    ([{'image': 'x.jpg', 'labels': ['cat']}], {}, r'1 of the 1 images .* missing, such as x.jpg \(relative to /.*\)'),
    (records(['cat']), {'difficult': 'maybe'}, 'Expected difficult to be one of'),
])
def test_each_error_names_the_place_and_the_fix(tmp_path, content, options, message):
    with raises_error(message):
        read(tmp_path, content, **options)


def test_labels_with_commas_are_names_if_no_part_is_a_label(tmp_path):
    content = [{'image': 'a.jpg', 'labels': 'tench, Tinca tinca'}, {'image': 'b.jpg', 'labels': 'goldfish'}]
    file = make_json(tmp_path, content)
    assert ReaderJson(tmp_path, file).class_names == ['goldfish', 'tench, Tinca tinca']


def test_an_object_of_splits_is_read_by_split(tmp_path):
    content = {'train': [{'image': 'a.jpg', 'labels': ['cat']}], 'val': [{'image': 'b.jpg', 'labels': ['dog']}]}
    file = make_json(tmp_path, content)
    assert find_json(tmp_path, 'train') == file
    for split, image in (('train', 'a.jpg'), ('validation', 'b.jpg')):
        reader = ReaderJson(tmp_path, file, split)
        assert reader.filenames() == [image] and reader.class_names == ['cat', 'dog']
