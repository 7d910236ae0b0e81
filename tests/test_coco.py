import json
import math

import pytest
from PIL import Image

from timm_splicemix.data import ReaderCoco, create_dataset

from .helpers import raises_error

CATEGORIES = [{'id': 9, 'name': 'ant'}, {'id': 2, 'name': 'zebra'}, {'id': 5, 'name': 'dog'}]


def annotation(number, image, category, area=4., crowd=0):
    return {
        'id': number, 'image_id': image, 'category_id': category, 'bbox': [0, 0, 2, 2], 'area': area, 'iscrowd': crowd}


ANNOTATIONS = [annotation(1, 30, 9), annotation(2, 30, 2, area=7.), annotation(3, 30, 2), annotation(4, 4, 5, crowd=1)]


def write_coco(root, folder, annotations=ANNOTATIONS, categories=CATEGORIES, file=None, image_ids=(30, 4, 17)):
    """Images with ids out of order and gaps, the last of which has no object."""
    (root / folder).mkdir(parents=True, exist_ok=True)
    images = [{'id': i, 'file_name': f'{i:04d}.jpg', 'width': 8, 'height': 6} for i in image_ids]
    for image in images:
        Image.new('RGB', (8, 6)).save(root / folder / image['file_name'])
    file = root / (file or f'annotations/instances_{folder}.json')
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({'images': images, 'annotations': annotations, 'categories': categories}))
    return file


@pytest.mark.parametrize('order, names, targets', [
    ('id', ['zebra', 'dog', 'ant'], [[0, 1, 0], [1, 0, 1]]),
    ('name', ['ant', 'dog', 'zebra'], [[0, 1, 0], [1, 0, 1]]),
])
def test_classes_are_ordered_and_unlabelled_images_left_out(tmp_path, order, names, targets):
    reader = ReaderCoco(tmp_path / 'train', write_coco(tmp_path, 'train'), class_order=order)
    assert reader.class_names == names
    assert reader.filenames() == ['0004.jpg', '0030.jpg']
    assert reader.targets.tolist() == targets
    assert reader.image_ids == [4, 30]


def test_unlabelled_images_can_be_kept(tmp_path):
    reader = ReaderCoco(tmp_path / 'train', write_coco(tmp_path, 'train'), keep_unlabelled=True)
    assert reader.filenames() == ['0004.jpg', '0017.jpg', '0030.jpg']
    assert reader.targets[1].tolist() == [0, 0, 0]


def test_crowds_count_and_areas_are_kept(tmp_path):
    reader = ReaderCoco(tmp_path / 'train', write_coco(tmp_path, 'train'))
    assert sorted(reader.object_areas.tolist()) == [(0, 1, 4.), (1, 0, 4.), (1, 0, 7.), (1, 2, 4.)]


@pytest.mark.parametrize('name, split, folder', [
    ('coco/2014', 'train', 'train2014'), ('coco/2014', 'validation', 'val2014'), ('coco/2014', 'val', 'val2014'),
    ('coco/2014', 'train2014', 'train2014'), ('coco/2017', 'val2017', 'val2017'), ('coco', 'train2014', 'train2014'),
    ('coco/2014', 'valid', 'val2014'), ('coco/2017', 'train', 'train2017'), ('coco/2017', 'validation', 'val2017'),
    ('coco', 'train', 'train'),
    ('coco', 'validation', 'val'), ('coco', 'test', 'test')])
def test_timms_names_of_splits_find_those_of_coco(tmp_path, name, split, folder):
    write_coco(tmp_path, folder)
    dataset = create_dataset(name, tmp_path, split)
    assert len(dataset) == 2
    assert dataset[0][0].size == (8, 6)
    assert dataset.filename(0, absolute=True) == str(tmp_path / folder / '0004.jpg')


@pytest.mark.parametrize('given', ['instances_mine.json', 'annotations/instances_mine.json', 'absolute'])
@pytest.mark.parametrize('folder', ['mine', 'images/mine', 'images', '.'])
def test_any_annotation_file_can_be_given(tmp_path, given, folder):
    file = write_coco(tmp_path, folder, file='annotations/instances_mine.json')
    given = str(file) if given == 'absolute' else given
    dataset = create_dataset('coco', tmp_path, 'train', annotations=given)
    assert [image.size for image, _ in (dataset[0], dataset[1])] == [(8, 6)] * 2


def test_options_reach_the_reader(tmp_path):
    write_coco(tmp_path, 'train2014')
    dataset = create_dataset('coco/2014', tmp_path, 'train', class_order='name', keep_unlabelled=True)
    assert dataset.class_names == ['ant', 'dog', 'zebra'] and len(dataset) == 3


def test_reading_prints_nothing(tmp_path, capsys):
    ReaderCoco(tmp_path / 'train', write_coco(tmp_path, 'train'))
    assert capsys.readouterr().out == ''


@pytest.mark.parametrize('content', ['not json', '[]', '{"images": [', '{"images": []}', '{"annotations": [{}]}'])
def test_an_annotation_file_that_is_not_one_is_refused(tmp_path, content):
    file = tmp_path / 'instances.json'
    file.write_text(content)
    with raises_error(r"instances.json (is not in COCO format|has no image_id)"):
        ReaderCoco(tmp_path, file)


def test_a_missing_annotation_file_is_refused(tmp_path):
    write_coco(tmp_path, 'val2014')
    with raises_error(r'instances_train2014.json does not exist; found instances_val2014.json'):
        create_dataset('coco/2014', tmp_path, 'train')
    with raises_error(r'Annotation file other.json does not exist'):
        create_dataset('coco', tmp_path, 'train', annotations='other.json')


def test_an_image_that_is_listed_but_absent_is_refused(tmp_path):
    file = write_coco(tmp_path, 'train')
    (tmp_path / 'train' / '0030.jpg').unlink()
    with raises_error(r'1 of the 2 images listed in .* are missing, such as .*0030.jpg'):
        ReaderCoco(tmp_path / 'train', file)
    assert len(ReaderCoco(tmp_path / 'train', file, images_must_exist=False)) == 2


def test_areas_that_are_not_given_are_those_of_the_boxes(tmp_path):
    annotations = [annotation(1, 4, 9), annotation(2, 30, 9)]
    del annotations[0]['area'], annotations[1]['area'], annotations[1]['bbox']
    reader = ReaderCoco(tmp_path / 'train', write_coco(tmp_path, 'train', annotations))
    assert reader.object_areas[0].tolist() == (0, 2, 4.) and math.isnan(reader.object_areas['area'][1])


def test_files_that_contradict_themselves_are_refused(tmp_path):
    with raises_error(r"Two entries of 'images' in .* have the id 4"):
        ReaderCoco(tmp_path / 'a', write_coco(tmp_path, 'a', image_ids=(30, 4, 4)))
    with raises_error(r'Annotation 9 of .* has image_id 77, which the file does not list'):
        ReaderCoco(tmp_path / 'b', write_coco(tmp_path, 'b', [*ANNOTATIONS, annotation(9, 77, 5)]))
    with raises_error(r"An entry of 'categories' in .* has no name"):
        ReaderCoco(tmp_path / 'c', write_coco(tmp_path, 'c', categories=[{'id': 5}]))


def test_labels_are_hidden_in_splits_that_are_called_train(tmp_path):
    write_coco(tmp_path, 'train2014')
    assert create_dataset('coco', tmp_path, 'train2014', keep_labels='single').targets.sum(dim=1).tolist() == [1, 1]


def test_an_object_of_no_category_is_refused(tmp_path):
    file = write_coco(tmp_path, 'train', [annotation(7, 4, 77)])
    with raises_error(r'Annotation 7 of .* has category_id 77, which the file does not list'):
        ReaderCoco(tmp_path / 'train', file)


def test_an_unknown_order_of_classes_is_refused(tmp_path):
    with raises_error("Expected class_order to be id or name, but got 'size'"):
        ReaderCoco(tmp_path, tmp_path / 'x.json', class_order='size')


@pytest.mark.parametrize('part, change, message', [
    ('images', {'file_name': None}, "entry of 'images' in .* has no file_name, a text"),
    ('images', {'file_name': ['a.jpg']}, "entry of 'images' in .* has no file_name, a text"),
    ('images', {'file_name': ''}, "entry of 'images' in .* has no file_name, a text"),
    ('images', {'id': None}, "entry of 'images' in .* has no id"),
    ('images', {'id': [4]}, "entry of 'images' in .* has no id"),
    ('images', {'id': '30'}, "Expected ids of one type of 'images' in .*, but got both numbers and text"),
    ('categories', {'id': {}}, "entry of 'categories' in .* has no id"),
    ('categories', {'name': None}, "entry of 'categories' in .* has no name, a text"),
    ('categories', {'name': ['dog']}, "entry of 'categories' in .* has no name, a text"),
    ('categories', {'name': 'dog'}, "Duplicate class 'dog' in .*"),
    ('annotations', {'area': 'big'}, "Expected a number as the area of annotation 1 of .*, but got 'big'"),
    ('annotations', {'area': [2]}, r'Expected a number as the area of annotation 1 of .*, but got \[2\]'),
    ('annotations', {'area': 10**400}, 'Expected a number as the area of annotation 1 of'),
    ('annotations', {'area': None, 'bbox': [1, 2]}, 'or a bbox of 4 numbers'),
    ('annotations', {'image_id': None}, 'Annotation 1 of .* has image_id None, which the file does not list'),
    ('annotations', {'image_id': [30]}, r'Annotation 1 of .* has image_id \[30\], which the file does not list'),
    ('annotations', {'category_id': {}}, r'Annotation 1 of .* has category_id \{\}, which the file does not list'),
])
def test_an_entry_of_another_type_is_refused(tmp_path, part, change, message):
    file = write_coco(tmp_path, 'train')
    content = json.loads(file.read_text())
    content[part][0].update(change)
    file.write_text(json.dumps(content))
    with raises_error(message) as raised:
        ReaderCoco(tmp_path / 'train', file)
    assert 'instances_train.json' in str(raised.value)


@pytest.mark.parametrize('part', ['images', 'annotations', 'info'])
def test_deeply_nested_json_is_refused(tmp_path, part):
    file = tmp_path / 'instances.json'
    file.write_text(f'{{"{part}": {"[" * 100000}')
    with raises_error(r'instances.json is not in COCO format: it is nested too deeply'):
        ReaderCoco(tmp_path, file)


@pytest.mark.parametrize('change', [{'id': None}, {'area': None}, {'id': [3]}])
def test_ids_of_annotations_and_areas_may_be_missing(tmp_path, change):
    annotations = [{**annotation(1, 4, 9), **change}, annotation(2, 30, 9)]
    reader = ReaderCoco(tmp_path / 'train', write_coco(tmp_path, 'train', annotations))
    assert reader.object_areas.tolist() == [(0, 2, 4.), (1, 2, 4.)]


def test_ids_may_be_text_and_parts_in_any_order(tmp_path):
    file = write_coco(tmp_path, 'train')
    content = json.loads(file.read_text())
    for image in content['images']:
        image['id'] = f'i{image["id"]:02d}'
    for entry in content['annotations']:
        entry['image_id'] = f'i{entry["image_id"]:02d}'
    file.write_text(json.dumps({key: content[key] for key in ('annotations', 'categories', 'images')}, indent=1))
    reader = ReaderCoco(tmp_path / 'train', file)
    assert reader.image_ids == ['i04', 'i30'] and reader.targets.tolist() == [[0, 1, 0], [1, 0, 1]]
