""" Label files as other programs write them: found, read and trained by the command """
import json
import os
import shutil

import pytest
from PIL import Image

from timm_splicemix.data import create_dataset

from .helpers import raises_error
from .runs import train, train_command
from .test_coco import annotation
from .test_csv import make_csv
from .test_json import make_json, records
from .test_list import make_list
from .test_train_flags_data import create_sets
from .test_voc import make_voc

NAMES = ('red', 'green', 'blue')


def read_labels(data):
    """Name, split and labels of each image of the shared folder of images."""
    header, *rows = [line.split(',') for line in (data / 'labels.csv').read_text().splitlines()]
    return [(row[0], row[1], [name for name, value in zip(header[2:], row[2:]) if value == '1']) for row in rows]


def roboflow_folder(split):
    return 'valid' if split == 'val' else split


def write_roboflow_coco(data, root):
    """Folders train and valid with _annotations.coco.json, whose first category is the group of the others."""
    categories = [{'id': 0, 'name': 'colours', 'supercategory': 'none'}]
    categories += [{'id': i, 'name': name, 'supercategory': 'colours'} for i, name in enumerate(NAMES, start=1)]
    for split in ('train', 'val'):
        folder = root / roboflow_folder(split)
        folder.mkdir(parents=True)
        images, annotations = [], []
        for number, (name, own, labels) in enumerate(read_labels(data)):
            if own == split:
                shutil.copy(data / name, folder)
                images.append({'id': number, 'file_name': name, 'width': 72, 'height': 72})
                annotations += [
                    annotation(10 * number + NAMES.index(label), number, 1 + NAMES.index(label)) for label in labels]
        content = {'info': {}, 'images': images, 'annotations': annotations, 'categories': categories}
        (folder / '_annotations.coco.json').write_text(json.dumps(content))


def write_roboflow_csv(data, root):
    for split in ('train', 'val'):
        folder = root / roboflow_folder(split)
        folder.mkdir(parents=True)
        lines = [f'filename, {", ".join(NAMES)}']
        for name, own, labels in read_labels(data):
            if own == split:
                shutil.copy(data / name, folder)
                lines.append(f'{name}, ' + ', '.join(str(int(each in labels)) for each in NAMES))
        (folder / '_classes.csv').write_text('\n'.join(lines) + '\n')


def write_open_images(data, root):
    shutil.copytree(data, root / 'images', ignore=shutil.ignore_patterns('*.csv'))
    for split in ('train', 'val'):
        lines = ['ImageID,Source,LabelName,Confidence']
        for name, own, labels in read_labels(data):
            if own == split:
                lines += [f'{name[:-4]},verification,{each},{int(each in labels)}' for each in NAMES]
        (root / f'{split}-annotations-human-imagelabels.csv').write_text('\r\n'.join(lines) + '\r\n')


def write_json_lines(data, root):
    shutil.copytree(data, root, ignore=shutil.ignore_patterns('*.csv'))
    for split in ('train', 'val'):
        rows = [{'file_name': name, 'labels': labels} for name, own, labels in read_labels(data) if own == split]
        (root / f'{split}.jsonl').write_text('\n'.join(map(json.dumps, rows)))


OPEN_IMAGES = ('--train-ann', 'train-annotations-human-imagelabels.csv', '--val-ann',
               'val-annotations-human-imagelabels.csv', '--train-images', 'images', '--val-images', 'images')


@pytest.mark.slow
@pytest.mark.parametrize('write, dataset, flags', [
    (write_roboflow_coco, 'coco', ()), (write_open_images, 'csv', OPEN_IMAGES), (write_json_lines, 'json', ()),
    (write_roboflow_csv, 'csv', ())])
def test_files_of_other_programs_are_trained(run, data, tmp_path, write, dataset, flags):
    root = tmp_path / 'own'
    write(data, root)
    done = run(*train_command(root, tmp_path, '--dataset', dataset, *flags, '--epochs', '1'))
    assert done.returncode == 0, done.stderr
    assert sorted((tmp_path / 'run' / 'classes.txt').read_text().split()) == sorted(NAMES)


@pytest.mark.parametrize('write, dataset, options', [
    (write_roboflow_coco, 'coco', {}), (write_roboflow_csv, 'csv', {}), (write_json_lines, 'json', {}),
    (write_open_images, 'csv', {'annotations': OPEN_IMAGES[1], 'images': 'images'})])
def test_files_of_other_programs_have_the_same_labels(data, tmp_path, write, dataset, options):
    write(data, tmp_path / 'own')
    found = create_dataset(dataset, tmp_path / 'own', 'train', **options)
    expected = {name: set(labels) for name, split, labels in read_labels(data) if split == 'train'}
    assert dict(zip(found.filenames(basename=True), (
        {name for name, value in zip(found.class_names, target) if value == 1} for target in found.targets.tolist()
    ))) == expected


def test_the_group_of_roboflow_is_no_class_unless_it_has_objects(tmp_path):
    Image.new('RGB', (8, 6)).save(tmp_path / 'a.jpg')
    content = {
        'images': [{'id': 1, 'file_name': 'a.jpg'}], 'annotations': [annotation(1, 1, 1)],
        'categories': [{'id': 0, 'name': 'pets', 'supercategory': 'none'},
                       {'id': 1, 'name': 'cat', 'supercategory': 'pets'},
                       {'id': 2, 'name': 'dog', 'supercategory': 'pets'}]}

    def names():
        (tmp_path / 'x.json').write_text(json.dumps(content))
        return create_dataset('coco', tmp_path, 'train', annotations='x.json').class_names

    assert names() == ['cat', 'dog']
    content['annotations'].append(annotation(2, 1, 0))
    assert names() == ['pets', 'cat', 'dog']
    content['annotations'].pop()
    content['categories'][2]['supercategory'] = 'animals'
    assert names() == ['pets', 'cat', 'dog']


@pytest.mark.parametrize('name, make, options', [
    ('csv', lambda root: make_csv(root, 'image,cat\na.jpg,1\n', images=(), name='train.csv'), {}),
    ('json', lambda root: make_json(root, records(['cat']), 'train.json', images=()), {}),
    ('folder', lambda root: make_list(root, 'a.jpg,0\n', images=()), {'annotations': 'list.txt'}),
    ('coco', lambda root: make_json(root, {
        'images': [{'id': 1, 'file_name': 'a.jpg'}], 'annotations': [annotation(1, 1, 1)],
        'categories': [{'id': 1, 'name': 'cat'}]}, 'x.json', images=()), {'annotations': 'x.json'}),
    ('voc/2007', lambda root: make_voc(root), {}),
])
@pytest.mark.parametrize('given', ['photos', 'absolute', 'current'])
def test_the_folder_of_the_images_can_be_given(tmp_path, monkeypatch, name, make, options, given):
    root, photos = tmp_path / 'data', tmp_path / ('data/photos' if given == 'photos' else 'photos')
    root.mkdir()
    make(root)
    photos.mkdir()
    jpegs = root / 'VOCdevkit' / 'VOC2007' / 'JPEGImages'
    if jpegs.is_dir():
        for image in jpegs.iterdir():
            image.rename(photos / image.name)
    else:
        Image.new('RGB', (8, 6)).save(photos / 'a.jpg')
    with raises_error(r'images listed in .* are missing, such as \w+\.jpg \(relative to /.*--train-images'):
        create_dataset(name, root, 'train', **options)
    if given == 'current':
        monkeypatch.chdir(tmp_path)
    dataset = create_dataset(
        name, root, 'train', images=str(photos) if given == 'absolute' else 'photos', **options)
    assert dataset.filename(0, absolute=True).startswith(str(photos)) and len(dataset[0]) == 2
    with raises_error(rf'The folder of images nowhere .* does not exist, neither in {root} nor in {os.getcwd()}'):
        create_dataset(name, root, 'train', images='nowhere', **options)


def test_a_data_set_without_label_files_has_no_folder_of_images(tmp_path):
    (tmp_path / 'cat').mkdir()
    with raises_error('--train-images and --val-images are for data sets with label files'):
        create_dataset('folder', tmp_path, images='x')
    with raises_error("Data set 'shapes' has no option images"):
        create_dataset('shapes', tmp_path, images='x')


def test_messages_say_what_a_path_is_relative_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'data').mkdir()
    for name in ('csv', 'json', 'coco'):
        with raises_error(rf'file x.csv does not exist, neither in {tmp_path} nor in {tmp_path}/data\.'):
            create_dataset(name, 'data', annotations='x.csv')
        with raises_error(rf'\(--data-dir\) does not exist: nowhere, which is relative to {tmp_path}\.'):
            create_dataset(name, 'nowhere')
        with raises_error(rf'{tmp_path}/data.*--train-ann and --val-ann'):
            create_dataset(name, 'data')


@pytest.mark.parametrize('name, make, options', [
    ('csv', lambda root: make_csv(root, 'image,cat\na.jpg,1\nx.jpg,1\nb.jpg,0\n', name='train.csv'), {}),
    ('json', lambda root: make_json(root, [
        {'image': 'a.jpg', 'labels': ['cat']}, {'image': 'x.jpg', 'labels': ['cat']}, {'image': 'b.jpg', 'labels': []},
    ], 'train.json'), {}),
    ('folder', lambda root: make_list(root, 'a.jpg,0\nx.jpg,0\nb.jpg\n'), {'annotations': 'list.txt'}),
    ('coco', lambda root: make_json(root, {
        'images': [{'id': i, 'file_name': n} for i, n in enumerate(('a.jpg', 'x.jpg', 'b.jpg'))],
        'annotations': [annotation(1, 0, 1), annotation(2, 1, 1, area=7.), annotation(3, 2, 2, area=9.)],
        'categories': [{'id': 1, 'name': 'cat'}, {'id': 2, 'name': 'dog'}]}, 'x.json'), {'annotations': 'x.json'}),
])
def test_missing_images_can_be_left_out(tmp_path, name, make, options, caplog):
    make(tmp_path)
    with raises_error(r'1 of the 3 images listed in .*, such as x.jpg .*--on-bad-image skip'):
        create_dataset(name, tmp_path, 'train', **options)
    dataset = create_dataset(name, tmp_path, 'train', skip_missing_images=True, **options)
    assert dataset.reader.filenames() == ['a.jpg', 'b.jpg']
    assert dataset.targets[:, 0].tolist() == [1, 0]
    assert 'Skipped 1 of the 3 images listed in' in caplog.text and 'x.jpg' in caplog.text
    for path in ('a.jpg', 'b.jpg', 'c.jpg'):
        (tmp_path / path).unlink()
    with raises_error('All 3 images listed in .* are missing, such as .*a.jpg. Set --data-dir'):
        create_dataset(name, tmp_path, 'train', skip_missing_images=True, **options)


def test_missing_images_of_voc_can_be_left_out(tmp_path):
    make_voc(tmp_path)
    full = create_dataset('voc/2007', tmp_path, 'train-only')
    os.unlink(full.reader.paths[1])
    rest = create_dataset('voc/2007', tmp_path, 'train-only', skip_missing_images=True)
    kept = [row for row in range(len(full)) if row != 1]
    assert rest.targets.tolist() == full.targets[kept].tolist()
    assert rest.filenames() == [full.filename(row) for row in kept]


def test_training_skips_missing_images_and_evaluation_does_not(data, tmp_path, caplog):
    own = tmp_path / 'own'
    shutil.copytree(data, own)
    (own / '3.png').unlink()
    with pytest.raises(SystemExit):
        train(own, tmp_path)
    train(own, tmp_path, '--epochs', '1', '--on-bad-image', 'skip')
    assert 'Skipped 1 of the 16 images' in caplog.text
    (own / '20.png').unlink()
    with pytest.raises(SystemExit):
        train(own, tmp_path, '--on-bad-image', 'skip')


@pytest.mark.parametrize('dataset', ['csv', 'json'])
def test_one_file_with_missing_images_is_divided(data, tmp_path, dataset):
    names = [f'{index}.png' for index in range(12)]
    for name in names[1:]:
        shutil.copy(data / name, tmp_path)
    if dataset == 'csv':
        make_csv(tmp_path, 'image,labels\n' + ''.join(f'{name},cat\n' for name in names), images=())
    else:
        make_json(tmp_path, [{'image': name, 'labels': ['cat']} for name in names], images=())
    flags = ['--dataset', dataset, '--data-dir', tmp_path, '--val-fraction', '0.25']
    with raises_error('1 of the 12 images .* missing, such as 0.png .*--on-bad-image skip'):
        create_sets(*flags)
    train_set, val_set = create_sets(*flags, '--on-bad-image', 'skip')
    assert sorted([*train_set.filenames(), *val_set.filenames()]) == sorted(names[1:]) and len(val_set) == 3


def test_a_table_of_roboflow_read_as_coco_names_the_right_reader(data, tmp_path):
    write_roboflow_csv(data, tmp_path / 'mine')
    with raises_error(f'nor does train/_annotations.coco.json; .*Read {tmp_path}/mine/train/_classes.csv with '
                      '--dataset csv'):
        create_dataset('coco', tmp_path / 'mine')
