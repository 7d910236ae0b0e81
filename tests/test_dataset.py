import json

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import ImageDataset, create_transform

import timm_splicemix as tsm
from timm_splicemix.data import create_loader, dataset_names, generate_shapes

from .helpers import raises_error


@pytest.fixture(scope='module')
def shapes_root(tmp_path_factory):
    images = {'train': 24, 'val': 8, 'val_unbiased': 8}
    return generate_shapes(tmp_path_factory.mktemp('data') / 'shapes', images=images)


@pytest.fixture
def small_shapes(shapes_root, monkeypatch):
    """create_dataset('shapes') on an existing data set."""
    monkeypatch.setattr('timm_splicemix.data.registry.generate_shapes', lambda root, seed: shapes_root)
    return shapes_root


def test_shapes_is_a_multi_label_data_set(small_shapes):
    dataset = tsm.create_dataset('shapes', root=small_shapes, split='train')
    assert isinstance(dataset, ImageDataset)
    assert len(dataset) == 24
    assert dataset.num_classes == len(dataset.class_names) >= 12
    image, target = dataset[0]
    assert isinstance(image, Image.Image) and image.mode == 'RGB'
    assert target.dtype == torch.float32 and target.shape == (dataset.num_classes,)
    assert set(target.tolist()) == {0., 1.}
    objects = json.loads((small_shapes / 'annotations' / 'instances_train.json').read_text())
    image_id = next(i['id'] for i in objects['images'] if i['file_name'] == dataset.filename(0))
    names = {c['id']: c['name'] for c in objects['categories']}
    expected = {names[a['category_id']] for a in objects['annotations'] if a['image_id'] == image_id}
    assert {name for name, value in zip(dataset.class_names, target) if value} == expected


@pytest.mark.parametrize('split, own', [
    ('train', 'train'), ('validation', 'val'), ('val', 'val'), ('eval', 'val'), ('val_unbiased', 'val_unbiased')])
def test_timms_names_of_splits_find_those_of_shapes(small_shapes, split, own):
    assert tsm.create_dataset('shapes', root=small_shapes, split=split).filename(0).startswith(f'{own}_')


def test_a_split_that_shapes_does_not_have_is_refused(small_shapes):
    with raises_error(r"Expected a split of shapes: .*, but got 'test'"):
        tsm.create_dataset('shapes', root=small_shapes, split='test')


def test_timms_transforms_and_loaders_work(small_shapes):
    transform = create_transform(32, is_training=True)
    dataset = tsm.create_dataset('shapes', root=small_shapes, split='train', transform=transform)
    images, targets = next(iter(torch.utils.data.DataLoader(dataset, batch_size=8, num_workers=2)))
    assert images.shape == (8, 3, 32, 32) and targets.shape == (8, dataset.num_classes)
    mixed_images, mixed_targets = tsm.SpliceMix()(images, targets)
    assert len(mixed_images) == len(mixed_targets) == 10


def test_target_transform_is_applied(small_shapes):
    dataset = tsm.create_dataset('shapes', root=small_shapes, target_transform=lambda target: target.sum().item())
    assert dataset[3][1] == dataset.targets[3].sum().item()


def test_an_image_that_cannot_be_read_is_named(small_shapes, tmp_path):
    bad = tmp_path / 'bad.jpg'
    bad.write_bytes((small_shapes / 'train' / 'train_000000.jpg').read_bytes()[:300])
    for path, reason in ((bad, '[Tt]runcated'), (tmp_path / 'missing.jpg', 'No such file')):
        dataset = tsm.create_dataset('shapes', root=small_shapes)
        dataset.reader.paths[5] = str(path)
        with pytest.raises(OSError, match=f'Cannot read image {path}: .*{reason}'):
            dataset[5]


def test_folders_with_a_class_each_work_as_in_timm(tmp_path):
    for name in ('cat', 'dog'):
        (tmp_path / name).mkdir()
        Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(tmp_path / name / 'a.png')
    for dataset_name in ('', 'folder'):
        dataset = tsm.create_dataset(dataset_name, root=tmp_path)
        assert [dataset[i][1] for i in range(2)] == [0, 1]
        assert dataset.class_names == ['cat', 'dog'] and dataset.num_classes == 2


def test_an_unknown_name_lists_the_known_ones(tmp_path):
    with raises_error(r"Unknown data set 'shape'. Known ones: .*, shapes, "):
        tsm.create_dataset('shape', root=tmp_path)
    assert 'shapes' in dataset_names()


@pytest.mark.parametrize('root', [None, 'nowhere'])
def test_a_folder_that_does_not_exist_is_refused(root):
    with raises_error('The folder of data set'):
        tsm.create_dataset('', root=root)


def test_an_error_of_a_transform_names_the_file(small_shapes):
    def fail(image):
        raise ZeroDivisionError('no such angle')

    dataset = tsm.create_dataset('shapes', root=small_shapes, split='val')
    loader = create_loader(dataset, 32, 4, num_workers=0, device=torch.device('cpu'))
    dataset.transform = fail
    file = small_shapes / 'val' / dataset.filename(0)
    with pytest.raises(RuntimeError, match=f'Cannot transform image {file}: no such angle'):
        next(iter(loader))
