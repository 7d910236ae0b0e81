""" Validation sets with other classes than the training set, in every format """
import json
import logging
import re

import pytest
from PIL import Image

from timm_splicemix.data import create_dataset
from timm_splicemix.run.evaluation import Evaluator
from timm_splicemix.validate import main as validate

from .helpers import raises_error
from .runs import train
from .test_train_flags_data import create_sets
from .test_wds import write_tar
from .train_flags import shows

TRAIN = [['ant', 'bee'], ['cow'], ['bee', 'cow'], ['ant']]
LACKING = [['cow'], ['ant', 'cow']]  # no bee
OTHER = [['cow'], ['ant', 'dog'], ['bee', 'elk', 'cow']]
CLASSES = ['ant', 'bee', 'cow']


def write_images(folder, split, number):
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(number):
        Image.new('RGB', (40, 40), (60 * index, 0, 0)).save(folder / f'{split}{index}.png')


def write_csv(root, split, rows):
    write_images(root, split, len(rows))
    lines = [f'{split}{index}.png,{";".join(labels)}' for index, labels in enumerate(rows)]
    (root / f'{split}.csv').write_text('image,labels\n' + '\n'.join(lines))


def write_columns(root, split, rows):
    write_images(root, split, len(rows))
    names = sorted({name for labels in rows for name in labels}, reverse=split == 'val')
    lines = [
        ','.join([f'{split}{index}.png', *(str(int(name in labels)) for name in names)])
        for index, labels in enumerate(rows)]
    (root / f'{split}.csv').write_text(f'image,{",".join(names)}\n' + '\n'.join(lines))


def write_coco(root, split, rows):
    write_images(root / split, split, len(rows))
    names = sorted({name for labels in rows for name in labels})
    content = {
        'images': [{'id': index, 'file_name': f'{split}{index}.png'} for index in range(len(rows))],
        'annotations': [
            {'id': 0, 'image_id': index, 'category_id': names.index(name), 'area': float(ord(name[0]))}
            for index, labels in enumerate(rows) for name in labels],
        'categories': [{'id': index, 'name': name} for index, name in enumerate(names)]}
    (root / 'annotations').mkdir(exist_ok=True)
    (root / 'annotations' / f'instances_{split}.json').write_text(json.dumps(content))


def write_json(root, split, rows):
    write_images(root, split, len(rows))
    records = [{'file_name': f'{split}{index}.png', 'labels': labels} for index, labels in enumerate(rows)]
    (root / f'{split}.json').write_text(json.dumps(records))


def write_wds(root, split, rows):
    write_images(root, split, len(rows))
    members = []
    for index, labels in enumerate(rows):
        members += [
            (f'{index}.png', (root / f'{split}{index}.png').read_bytes()),
            (f'{index}.json', json.dumps({'labels': labels}).encode())]
    write_tar(root / f'{split}-0.tar', members)


def write_hfds(root, split, rows):
    datasets = pytest.importorskip('datasets')
    write_images(root, split, len(rows))
    feature = datasets.Sequence(datasets.Value('string'))
    features = datasets.Features({'image': datasets.Image(), 'labels': feature})
    images = [str(root / f'{split}{index}.png') for index in range(len(rows))]
    dataset = datasets.Dataset.from_dict({'image': images, 'labels': rows}, features=features)
    dataset.save_to_disk(str(root / split))
    (root / 'dataset_dict.json').write_text(json.dumps({'splits': ['train', 'val']}))


FORMATS = {
    'csv': write_csv, 'columns': write_columns, 'coco': write_coco, 'json': write_json, 'hfds/': write_hfds,
    'wds/': write_wds}
NAMES = {'columns': 'csv'}


def write(root, kind, validation):
    FORMATS[kind](root, 'train', TRAIN)
    FORMATS[kind](root, 'val', validation)
    return '--dataset', NAMES.get(kind, kind), '--data-dir', root


def labels(dataset):
    return [
        [dataset.class_names[column] for column in row.nonzero().flatten().tolist()] for row in dataset.targets == 1]


@pytest.mark.parametrize('kind', ['csv', 'columns', 'coco', 'json'])
def test_a_class_that_the_validation_set_lacks_is_named_in_one_warning(tmp_path, caplog, kind):
    flags = write(tmp_path, kind, LACKING)
    with caplog.at_level(logging.WARNING):
        train_set, val_set = create_sets(*flags)
    assert train_set.class_names == val_set.class_names == CLASSES
    assert (labels(train_set), labels(val_set)) == (TRAIN, LACKING)
    assert caplog.messages == [
        'The validation set lacks 1 of the 3 classes of the training set, which count as absent in all its images: '
        'bee.']


@pytest.mark.parametrize('kind', ['csv', 'columns', 'coco', 'json'])
def test_classes_of_the_validation_set_alone_are_an_error_that_names_them(tmp_path, caplog, kind):
    flags = write(tmp_path, kind, OTHER)
    with raises_error(
            '2 of the 5 classes of .*validation.* are no classes of the training set: (dog, elk|elk, dog)\\..*'
            '--class-map.*--drop-unknown-classes'):
        create_sets(*flags)
    with caplog.at_level(logging.WARNING):
        train_set, val_set = create_sets(*flags, '--drop-unknown-classes')
    assert (train_set.class_names, val_set.class_names) == (CLASSES, CLASSES)
    assert labels(val_set) == [['cow'], ['ant'], ['bee', 'cow']]
    assert re.search('Dropped the labels of 2 classes of .*: (dog, elk|elk, dog)', caplog.text)
    (tmp_path / 'classes.txt').write_text('ant\nbee\ncow\ndog\nelk\n')
    train_set, val_set = create_sets(*flags, '--class-map', tmp_path / 'classes.txt')
    assert train_set.class_names == val_set.class_names == [*CLASSES, 'dog', 'elk']
    assert list(map(sorted, labels(val_set))) == list(map(sorted, OTHER))


@shows('drop_unknown_classes')
@pytest.mark.parametrize('kind', FORMATS)
def test_labels_that_the_class_map_does_not_list_can_be_dropped(tmp_path, kind):
    flags = [*write(tmp_path, kind, OTHER), '--class-map', tmp_path / 'classes.txt']
    (tmp_path / 'classes.txt').write_text('cow\nant\n')
    if kind != 'columns':  # a class map selects columns
        with raises_error("bee|'ant'|elk"):
            train_set, _ = create_sets(*flags)
            list(train_set)  # shards are read with their images
    train_set, val_set = create_sets(*flags, '--drop-unknown-classes')
    assert train_set.class_names == val_set.class_names == ['cow', 'ant']
    assert labels(train_set) == [['ant'], ['cow'], ['cow'], ['ant']]
    assert labels(val_set) == [['cow'], ['ant'], ['cow']]
    assert train_set[0][1].tolist() == [0, 1]


def test_indices_beyond_the_class_map_can_be_dropped(tmp_path):
    write_images(tmp_path, 'train', 2)
    write_images(tmp_path, 'val', 2)
    (tmp_path / 'train.txt').write_text('train0.png,0 2\ntrain1.png,1\n')
    (tmp_path / 'val.txt').write_text('val0.png,0 3\nval1.png,1\n')
    (tmp_path / 'classes.txt').write_text('ant\nbee\n')
    flags = ['--dataset', 'folder', '--data-dir', tmp_path, '--train-ann', 'train.txt', '--val-ann', 'val.txt']
    with raises_error('1 of the 4 classes of .* are no classes of the training set: 3'):
        create_sets(*flags)
    assert labels(create_sets(*flags, '--drop-unknown-classes')[1]) == [['0'], ['1']]
    train_set, val_set = create_sets(*flags, '--drop-unknown-classes', '--class-map', 'classes.txt')
    assert labels(train_set) == labels(val_set) == [['ant'], ['bee']]


def test_folders_of_one_class_each_keep_the_indices_of_training(tmp_path, caplog):
    for name in ('train/ant', 'train/bee', 'train/cow', 'val/bee', 'val/cow'):
        write_images(tmp_path / name, name[-3:], 2)
    train_set, val_set = create_sets(tmp_path)
    assert [val_set[index][1] for index in range(4)] == [1, 1, 2, 2]
    assert 'images: ant.' in caplog.text
    write_images(tmp_path / 'val' / 'Cow', 'x', 1)
    with raises_error("training set: Cow. Did you mean 'cow' by 'Cow'"):
        create_sets(tmp_path)
    train_set, val_set = create_sets(tmp_path, '--drop-unknown-classes')
    assert len(val_set) == 4 and val_set.class_names == train_set.class_names


def test_objects_of_other_classes_are_dropped_with_their_areas(tmp_path):
    write(tmp_path, 'coco', OTHER)
    reader = create_dataset(
        'coco', tmp_path, 'val', class_names=['elk', 'ant', 'fox'], drop_unknown_classes=True).reader
    assert sorted(reader.object_areas.tolist()) == [(1, 1, float(ord('a'))), (2, 0, float(ord('e')))]


def test_sets_without_a_common_class_are_an_error(tmp_path):
    flags = write(tmp_path, 'csv', [['dog'], ['elk']])
    with raises_error('have no class in common'):
        create_sets(*flags, '--drop-unknown-classes')


@pytest.mark.slow
def test_validation_uses_the_classes_of_the_run(tmp_path, monkeypatch, capsys):
    created = []
    evaluate = Evaluator.evaluate
    monkeypatch.setattr(Evaluator, 'evaluate', lambda self: created.append(self) or evaluate(self))
    data = tmp_path / 'data'
    write(data, 'columns', LACKING)
    run = train(data, tmp_path / 'out', '--epochs', 1, '-b', 2)
    flags = [str(flag) for flag in (
        '--dataset', 'csv', '--data-dir', data, '--checkpoint', run, '-j', 0, '--output', tmp_path / 'results')]
    validate(flags)
    assert created[0].class_names == tuple(CLASSES) and labels(created[0].dataset) == LACKING
    write_columns(data, 'val', OTHER)
    with pytest.raises(SystemExit):
        validate(flags)
    message = "2 of the 5 classes of split 'validation' are no classes of the model: elk, dog"
    assert message in capsys.readouterr().err
    validate([*flags, '--drop-unknown-classes'])
    assert labels(created[1].dataset) == [['cow'], ['ant'], ['bee', 'cow']]
