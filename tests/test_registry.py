""" create_dataset: options of data sets and errors """
import io
import json
import logging
import os
import pickle
import tarfile
from functools import partial

import pytest
import torch
from PIL import Image

import timm_splicemix as tsm
from timm_splicemix.data import (
    create_dataset,
    create_loader,
    generate_shapes,
    read_class_map,
    registry,
)

from .helpers import raises_error

CPU = torch.device('cpu')


def write_images(folder, number, size=(9, 7)):
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(number):
        Image.new('RGB', size, (10 * index, 0, 0)).save(folder / f'{index}.jpg')


@pytest.fixture
def csv_root(tmp_path):
    write_images(tmp_path, 6)
    (tmp_path / 'train.csv').write_text('image,labels\n' + ''.join(f'{i}.jpg,cat;dog\n' for i in range(5)))
    (tmp_path / 'val.csv').write_text('image,labels\n5.jpg,cat;dog\n')
    return tmp_path


def test_labels_are_hidden_in_training_only(csv_root):
    assert create_dataset('csv', csv_root, 'train', keep_labels='single').targets.sum(dim=1).tolist() == [1] * 5
    assert create_dataset('csv', csv_root, 'train').targets.sum(dim=1).tolist() == [2] * 5
    seeds = [create_dataset('csv', csv_root, keep_labels='single', keep_labels_seed=s).targets for s in range(9)]
    assert any(not torch.equal(seeds[0], other) for other in seeds)
    with raises_error("keep_labels is for training splits, but got split 'validation'"):
        create_dataset('csv', csv_root, 'validation', keep_labels='single')
    assert create_dataset('csv', csv_root, 'validation', keep_labels='single', is_training=True).targets.sum() == 1


def create_as_timm(name, root, train_split='train', val_split='validation'):
    """The calls of timm's train script, with its defaults."""
    common = {
        'root': root, 'class_map': '', 'download': False, 'batch_size': 128, 'input_img_mode': 'RGB',
        'input_key': None, 'target_key': None, 'num_samples': None, 'trust_remote_code': False}
    train = create_dataset(name, split=train_split, is_training=True, seed=42, repeats=0., **common)
    return train, create_dataset(name, split=val_split, is_training=False, **common)


def test_the_calls_of_timms_train_script_are_accepted(csv_root, monkeypatch):
    # The seed of training must not generate other shapes than those of the validation set.
    monkeypatch.setattr(registry, 'generate_shapes', partial(generate_shapes, images={'train': 3, 'val': 2}))
    for name, root in (('csv', csv_root), ('shapes', csv_root / 'shapes')):
        train, validation = create_as_timm(name, root)
        assert torch.equal(train.targets, create_dataset(name, root).targets)
        assert torch.equal(validation.targets, create_dataset(name, root, 'val').targets)
    for name in ('train/a', 'train/b', 'val/a', 'val/b'):
        write_images(csv_root / 'folder' / name, 2)
    assert list(map(len, create_as_timm('', csv_root / 'folder'))) == [4, 4]
    for option in ({'repeats': 2.}, {'trust_remote_code': True}, {'num_samples': 3}):
        with raises_error(f"Data set 'csv' has no option {next(iter(option))}"):
            create_dataset('csv', csv_root, **option)


def test_a_class_without_any_positive_is_named(csv_root, caplog):
    with caplog.at_level(logging.WARNING):
        create_dataset('csv', csv_root, 'train', class_names=['bird', 'cat', 'dog', 'fish'])
    assert caplog.messages == ["No image of split 'train' has: bird, fish."]


def test_classes_can_be_listed_in_a_file(csv_root):
    (csv_root / 'classes.txt').write_text('dog\ncat\n')
    for given in ('classes.txt', str(csv_root / 'classes.txt')):
        assert create_dataset('csv', csv_root, 'train', class_map=given).class_names == ['dog', 'cat']
    assert create_dataset('csv', csv_root, 'train', class_map={'cat': 1, 'dog': 0}).class_names == ['dog', 'cat']
    with raises_error(rf'Cannot read the classes from none\.txt .*: .*no such file in {csv_root} or {os.getcwd()}'):
        create_dataset('csv', csv_root, 'train', class_map='none.txt')
    with raises_error(r'Cannot read the classes from /none/classes.txt \(--class-map\): there is no such file\.'):
        create_dataset('csv', csv_root, 'train', class_map='/none/classes.txt')
    with raises_error('Expected classes with the indices 0, 1, 2, ... in the class map'):
        create_dataset('csv', csv_root, 'train', class_map={'cat': 1, 'dog': 3})


def test_a_class_map_beside_the_data_comes_first(csv_root, tmp_path_factory, monkeypatch):
    elsewhere = tmp_path_factory.mktemp('elsewhere')
    (elsewhere / 'classes.txt').write_text('bird\nfish\n')
    monkeypatch.chdir(elsewhere)
    assert read_class_map('classes.txt') == ['bird', 'fish']
    assert read_class_map('classes.txt', csv_root) == ['bird', 'fish']
    (csv_root / 'classes.txt').write_bytes('\ufeffdog\r\ncat\r\n\r\n'.encode())
    assert read_class_map('classes.txt', csv_root) == ['dog', 'cat']
    assert create_dataset('csv', csv_root, 'train', class_map='classes.txt').class_names == ['dog', 'cat']


@pytest.mark.parametrize('labels, classes, message', [
    ('image,labels\n0.jpg,cow\n', 'cat\ndog\n', r"Label 'cow' in .*train.csv:2 \(--class-map {0} lists the classes"),
    ('image,labels\n0.jpg,7\n', 'cat\ndog\n', r'Expected class indices 0 to 1 \(--class-map {0}\) in .*train.csv:2'),
    ('image,cat\n0.jpg,1\n', 'cow\ndog\n', "train.csv has no column for class 'cow' of --class-map {0}. Its columns"),
])
def test_errors_about_classes_name_the_class_map(csv_root, labels, classes, message):
    (csv_root / 'classes.txt').write_text(classes)
    (csv_root / 'train.csv').write_text(labels)
    with raises_error(message.format(csv_root / 'classes.txt')):
        create_dataset('csv', csv_root, 'train', class_map='classes.txt')


def test_timm_reads_the_class_map_beside_the_data(tmp_path, monkeypatch):
    for index, name in enumerate(('cat', 'dog')):
        write_images(tmp_path / 'data' / name, index + 1)
    (tmp_path / 'data' / 'classes.txt').write_text('dog\ncat\n')
    (tmp_path / 'classes.txt').write_text('bird\nfish\n')
    monkeypatch.chdir(tmp_path)
    assert create_dataset('folder', tmp_path / 'data', class_map='classes.txt').class_names == ['dog', 'cat']


@pytest.mark.parametrize('name, content, message', [
    ('classes.txt', b'\x89PNG\r\n\x1a\n\0\0', 'Cannot read the classes from'),
    ('classes.pkl', b'\x89PNG\r\n\x1a\n\0\0', 'Cannot read the classes from'),
    ('classes.pkl', b'', 'Cannot read the classes from'),
    ('classes.pkl', pickle.dumps(['cat', 'dog']), 'Cannot read the classes from'),
    ('classes.pkl', pickle.dumps({'cat': 'a', 'dog': 1}), 'Expected a class in each line of'),
    ('classes.txt', b'cat\n\ndog\n', 'Expected a class in each line of'),
    ('classes.txt', b'', 'Expected classes with the indices'),
    ('classes.txt', b'cat\ndog\ncat\n', 'Cannot read the classes from'),
    ('classes.json', b'{}', 'Cannot read the classes from')])
def test_a_file_that_does_not_list_classes_is_named(csv_root, name, content, message):
    (csv_root / name).write_bytes(content)
    with raises_error(rf'{message} .*{name} \(--class-map\)|{message} .* in .*{name} \(--class-map\)'):
        create_dataset('csv', csv_root, 'train', class_map=name)


def test_a_pipe_is_no_class_map(csv_root):
    os.mkfifo(csv_root / 'pipe.txt')
    with raises_error(r'Cannot read the classes from pipe.txt \(--class-map\): there is no such file in'):
        create_dataset('csv', csv_root, 'train', class_map='pipe.txt')


def test_an_unknown_label_suggests_the_nearest_class(csv_root):
    with raises_error(r"Label 'dog' in .*train.csv:2 .*; did you mean 'dogs'\? Correct the label, .*with "
                      '--drop-unknown-classes'):
        create_dataset('csv', csv_root, 'train', class_names=['cat', 'dogs'])


@pytest.mark.parametrize('name, option', [
    ('csv', 'class_order'), ('voc/2007', 'annotations'), ('shapes', 'difficult'), ('coco', 'image_column')])
def test_an_option_that_a_data_set_does_not_have_is_refused(tmp_path, name, option):
    with raises_error(rf"Data set '{name}' has no option {option}\. Its options: "):
        create_dataset(name, tmp_path, 'train', **{option: 'x'})


def test_options_that_are_none_are_left_to_the_data_set(csv_root):
    assert len(create_dataset('csv', csv_root, 'train', class_order=None, difficult=None)) == 5


@pytest.mark.parametrize('name', ['coco/2014', 'voc/2007', 'csv', 'folder'])
def test_a_folder_that_does_not_exist_is_refused(tmp_path, name):
    options = {'annotations': 'list.txt'} if name == 'folder' else {}
    with raises_error(rf"The folder of data set '{name}' \(--data-dir\) does not exist"):
        create_dataset(name, tmp_path / 'nowhere', 'train', **options)


def test_a_folder_with_a_list_is_multi_label(tmp_path):
    write_images(tmp_path / 'images', 3)
    (tmp_path / 'images' / 'list.txt').write_text('0.jpg,0 2\n1.jpg\t1\n2.jpg,2\n')
    dataset = create_dataset('folder', tmp_path / 'images', annotations='list.txt', num_classes=4)
    assert dataset.num_classes == 4 and dataset.targets.tolist() == [[1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 1, 0]]


def test_voc_difficult_objects_differ_by_what_a_split_is_for(tmp_path):
    from timm_splicemix.data.readers.voc import VOC_CLASSES
    folder = tmp_path / 'VOCdevkit' / 'VOC2007'
    write_images(folder / 'JPEGImages', 2)
    main = folder / 'ImageSets' / 'Main'
    main.mkdir(parents=True)
    for split in ('trainval', 'test'):
        (main / f'{split}.txt').write_text('0\n1\n')
        for name in VOC_CLASSES:
            (main / f'{name}_{split}.txt').write_text('0  1\n1  0\n' if name == 'cat' else '0 -1\n1 -1\n')
    cat = VOC_CLASSES.index('cat')
    assert create_dataset('voc/2007', tmp_path, 'train').targets[:, cat].tolist() == [1, 0]
    assert create_dataset('voc/2007', tmp_path, 'validation').targets[:, cat].tolist() == [1, -1]
    assert create_dataset('voc/2007', tmp_path, 'train', difficult='positive').targets[:, cat].tolist() == [1, 1]


def test_missing_data_is_downloaded_on_request(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr('timm_splicemix.data.registry.download_dataset', lambda *args: calls.append(args))
    for download in (True, False):
        with pytest.raises(ValueError):
            create_dataset('voc/2007', tmp_path, download=download)
    assert calls == [('voc/2007', tmp_path)]
    with raises_error('Set the folder to download'):
        create_dataset('voc/2007', download=True)


def test_existing_data_is_not_downloaded(monkeypatch, tmp_path):
    monkeypatch.setattr('timm_splicemix.data.registry.download_dataset', lambda *args: pytest.fail('fetched'))
    write_images(tmp_path / 'train2014', 1)
    coco = {'images': [{'id': 1, 'file_name': '0.jpg'}], 'categories': [{'id': 1, 'name': 'cat'}],
            'annotations': [{'id': 1, 'image_id': 1, 'category_id': 1, 'bbox': [0, 0, 1, 1]}]}
    (tmp_path / 'annotations').mkdir()
    (tmp_path / 'annotations' / 'instances_train2014.json').write_text(json.dumps(coco))
    assert len(create_dataset('coco/2014', tmp_path, download=True)) == 1


@pytest.fixture
def shards(tmp_path):
    for shard in range(3):
        with tarfile.open(tmp_path / f'train-{shard:03d}.tar', 'w') as tar:
            for index in range(7):
                number = 7 * shard + index
                buffer = io.BytesIO()
                Image.new('RGB', (24, 20), (10 * number, 5 * index, 99)).save(buffer, 'PNG')
                labels = [bit for bit in range(5) if number >> bit & 1]
                for name, data in ((f'{number:04d}.png', buffer.getvalue()),
                                   (f'{number:04d}.json', json.dumps({'labels': labels}).encode())):
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    (tmp_path / 'classes.txt').write_text('\n'.join(f'bit{bit}' for bit in range(5)))
    return tmp_path


@pytest.mark.parametrize('workers', [0, 2])
def test_shards_are_loaded_and_resumed(shards, workers):
    dataset = create_dataset('wds/', shards, 'train')
    assert dataset.num_classes == 5
    loader = create_loader(
        dataset, 16, 4, is_training=True, num_workers=workers, device=CPU, color_jitter=None, seed=3)
    epochs = []
    for epoch, start in ((0, 0), (1, 0), (0, 2)):
        loader.set_epoch(epoch, start)
        batches = [(images.clone(), targets.clone()) for images, targets in loader]
        assert len(batches) == len(loader) == 5 - start
        epochs.append(batches)
    numbers = [int(n) for _, targets in epochs[0] for n in (targets * 2 ** torch.arange(5)).sum(dim=1)]
    assert len(set(numbers)) == 20 and set(numbers) <= set(range(21))
    assert not torch.equal(epochs[0][0][1], epochs[1][0][1])
    for left, right in zip(epochs[2], epochs[0][2:]):
        assert torch.equal(left[0], right[0]) and torch.equal(left[1], right[1])


def test_processes_share_the_samples_of_shards(shards):
    seen = []
    for rank in (0, 1):
        loader = create_loader(
            create_dataset('wds/', shards, 'train'), 16, 5, num_workers=0, device=CPU, rank=rank, world_size=2)
        for _ in loader:
            seen += loader.indices
            assert all('.tar:' in name for name in loader.filenames())
    assert sorted(seen) == list(range(21))


@pytest.mark.parametrize('workers', [0, 1])
def test_a_wrong_label_in_a_shard_is_one_sentence(shards, workers):
    (shards / 'classes.txt').write_text('bit0\nbit1\n')
    loader = create_loader(create_dataset('wds/', shards, 'train'), 16, 5, num_workers=workers, device=CPU)
    with raises_error(r'^Expected names or indices of the 2 classes in [^\n]*$'):
        list(loader)


def test_bad_images_in_shards_can_be_skipped(shards):
    with tarfile.open(shards / 'train-003.tar', 'w') as tar:
        for name, data in (('9.png', b'no image'), ('9.json', b'{"labels": [1]}')):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    dataset = create_dataset('wds/', shards, 'train')
    loader = create_loader(
        dataset, 16, 2, is_training=True, num_workers=0, device=CPU, color_jitter=None, on_bad_image='skip')
    loader.set_epoch(0)
    assert sum(len(images) for images, _ in loader) == 21 and loader.num_skipped == 1
    strict = create_loader(dataset, 16, 2, is_training=False, num_workers=0, device=CPU)
    with pytest.raises(OSError, match=r'Cannot read image .*train-003.tar:9.png'):
        list(strict)


def test_hugging_face_folders_are_read(tmp_path):
    datasets = pytest.importorskip('datasets')
    buffer = io.BytesIO()
    Image.new('RGB', (20, 20)).save(buffer, 'PNG')
    features = datasets.Features({
        'image': datasets.Image(), 'labels': datasets.Sequence(datasets.ClassLabel(names=['cat', 'dog', 'bird']))})
    rows = {'image': [{'bytes': buffer.getvalue(), 'path': None}] * 5, 'labels': [[0], [0, 2], [], [1], [1, 2]]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / 'mine')
    dataset = create_dataset('hfds/mine', tmp_path, 'train')
    assert dataset.class_names == ['cat', 'dog', 'bird']
    loader = create_loader(dataset, 16, 2, is_training=True, num_workers=2, device=CPU, color_jitter=None)
    images, targets = tsm.SpliceMix('1x2', ratio=0.5)(*next(iter(loader)))
    assert images.shape == (3, 3, 16, 16) and targets.shape == (3, 3)
