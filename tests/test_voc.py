import os
import re
import shutil
import tarfile
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.helpers import raises_error
from timm_splicemix.data.readers.voc import VOC_CLASSES, ReaderVoc, voc_split

CAT, DOG, PERSON, TRAIN = (VOC_CLASSES.index(name) for name in ('cat', 'dog', 'person', 'train'))

# image: [(class, difficult)], in an order that isn't alphabetical
OBJECTS = {
    '000012': [('cat', 0), ('cat', 1), ('person', 1)],
    '000005': [('dog', 1), ('dog', 1), ('train', 0)],
    '000009': [],
    '000007': [('person', 0), ('dog', None)],
}


def label(objects, name):
    marks = [difficult for other, difficult in objects if other == name]
    return -1 if not marks else 0 if all(marks) else 1


def write_class_files(folder, split, objects):
    for name in VOC_CLASSES:
        lines = [f'{image} {label(objects[image], name):2d}\n' for image in objects]
        (folder / 'ImageSets' / 'Main' / f'{name}_{split}.txt').write_text(''.join(lines))


def write_xml(folder, objects):
    for image, items in objects.items():
        annotation = ET.Element('annotation')
        for name, difficult in items:
            item = ET.SubElement(annotation, 'object')
            ET.SubElement(item, 'name').text = name
            if difficult is not None:
                ET.SubElement(item, 'difficult').text = str(difficult)
            ET.SubElement(ET.SubElement(item, 'part'), 'name').text = 'head'  # of the object, not one itself
        ET.ElementTree(annotation).write(folder / 'Annotations' / f'{image}.xml')


def make_voc(root, splits=('train', 'val', 'trainval'), class_files=True, xml=False, lists=True, year='2007'):
    folder = root / 'VOCdevkit' / f'VOC{year}'
    for name in ('JPEGImages', 'Annotations', 'ImageSets/Main'):
        (folder / name).mkdir(parents=True)
    for image in OBJECTS:
        Image.new('RGB', (8, 6)).save(folder / 'JPEGImages' / f'{image}.jpg')
    for split in splits:
        if lists:
            (folder / 'ImageSets' / 'Main' / f'{split}.txt').write_text(''.join(f'{image}\n' for image in OBJECTS))
        if class_files:
            write_class_files(folder, split, OBJECTS)
    if xml:
        write_xml(folder, OBJECTS)
    return folder


@pytest.mark.parametrize('class_files', [True, False])
def test_class_files_and_xml_tell_the_same(tmp_path, class_files):
    make_voc(tmp_path, class_files=class_files, xml=not class_files)
    reader = ReaderVoc(tmp_path, '2007', 'train')
    assert reader.source == ('class files' if class_files else 'xml')
    assert reader.split == 'train'
    assert reader.class_names == sorted(VOC_CLASSES) and len(reader.class_names) == 20
    assert reader.image_ids == list(OBJECTS)
    assert reader.filenames() == [f'{image}.jpg' for image in OBJECTS]
    assert reader.targets.dtype == torch.int8 and reader.difficult.dtype == torch.bool
    assert reader.targets.nonzero().tolist() == [[0, CAT], [1, TRAIN], [3, DOG], [3, PERSON]]
    assert reader.difficult.nonzero().tolist() == [[0, PERSON], [1, DOG]]


def test_class_files_are_preferred_to_xml_unless_one_is_missing(tmp_path):
    folder = make_voc(tmp_path, xml=True)
    assert ReaderVoc(tmp_path, '2007', 'val').source == 'class files'
    (folder / 'ImageSets' / 'Main' / 'sofa_val.txt').unlink()
    assert ReaderVoc(tmp_path, '2007', 'val').source == 'xml'
    assert ReaderVoc(tmp_path, '2007', 'train').source == 'class files'


def test_class_files_alone_give_images_and_their_order(tmp_path):
    make_voc(tmp_path, lists=False)
    assert ReaderVoc(tmp_path, '2007', 'train').image_ids == list(OBJECTS)


def test_the_list_gives_the_order_whatever_that_of_the_class_files(tmp_path):
    folder = make_voc(tmp_path)
    write_class_files(folder, 'train', dict(reversed(OBJECTS.items())))
    reader = ReaderVoc(tmp_path, '2007', 'train')
    assert reader.image_ids == list(OBJECTS)
    assert torch.equal(reader.targets, ReaderVoc(tmp_path, '2007', 'val').targets)


@pytest.mark.parametrize('difficult, value', [('ignore', -1), ('positive', 1), ('negative', 0)])
def test_difficult_classes_get_the_target_that_is_asked_for(tmp_path, difficult, value):
    make_voc(tmp_path)
    reader = ReaderVoc(tmp_path, '2007', 'train', difficult=difficult)
    assert reader.targets[0, PERSON] == reader.targets[1, DOG] == value
    assert reader.targets[0, CAT] == 1 and reader.targets[2].tolist() == [0] * 20
    assert reader.difficult.sum() == 2
    file, target = reader[1]
    file.close()
    assert target.dtype == torch.float32 and target[DOG] == value


@pytest.mark.parametrize('root', ['.', 'VOCdevkit', 'VOCdevkit/VOC2012'])
def test_each_folder_on_the_way_is_a_root(tmp_path, monkeypatch, root):
    make_voc(tmp_path, year='2012')
    assert len(ReaderVoc(tmp_path / root, '2012', 'train')) == 4
    monkeypatch.chdir(tmp_path / root)
    assert len(ReaderVoc('.', '2012', 'train')) == 4


@pytest.mark.parametrize('split, own_2007, own_2012', [
    ('train', 'trainval', 'train'), ('training', 'trainval', 'train'), ('train-only', 'train', 'train'),
    ('validation', 'test', 'val'), ('eval', 'test', 'val'), ('evaluation', 'test', 'val'),
    ('trainval', 'trainval', 'trainval'), ('val', 'val', 'val'), ('test', 'test', 'test')])
def test_timms_names_of_splits_follow_the_protocol_of_the_year(split, own_2007, own_2012):
    assert voc_split(split, '2007') == own_2007
    assert voc_split(split, '2012') == own_2012


def test_a_year_or_policy_that_voc_does_not_have_is_refused(tmp_path):
    for call in (lambda: voc_split('train', '2010'), lambda: ReaderVoc(tmp_path, '2010', 'train')):
        with raises_error("Expected the year of VOC to be '2007' or '2012', but got '2010'"):
            call()
    with raises_error("Expected difficult to be one of ignore, positive, negative, but got 'drop'"):
        ReaderVoc(tmp_path, '2007', 'train', difficult='drop')


def test_a_folder_without_voc_lists_the_places_looked_at(tmp_path):
    folder = make_voc(tmp_path)
    places = ', '.join(str(tmp_path / place) for place in ('VOCdevkit/VOC2012', 'VOC2012'))
    with raises_error(f'{tmp_path} has no VOC2012 with ImageSets/Main. Searched: {re.escape(places)}'):
        ReaderVoc(tmp_path, '2012', 'train')
    with raises_error('has no VOC2012'):
        ReaderVoc(folder, '2012', 'train')  # VOC2007 itself is no VOC2012


def test_a_missing_split_lists_those_that_are_there(tmp_path):
    make_voc(tmp_path)
    with raises_error(r"VOC 2007 in .*Main has no split 'test'. Its splits: train, trainval, val\."):
        ReaderVoc(tmp_path, '2007', voc_split('validation', '2007'))
    make_voc(tmp_path / 'lists', class_files=False, splits=('train',))
    with raises_error(r'Its splits: train\.'):
        ReaderVoc(tmp_path / 'lists', '2007', 'val')
    make_voc(tmp_path / 'labels', lists=False, splits=('val',))
    with raises_error(r'Its splits: val\.'):
        ReaderVoc(tmp_path / 'labels', '2007', 'train')


@pytest.mark.parametrize('line', ['000012', '000012 2', '000012 1 1', '\xff'])
def test_a_malformed_line_of_a_class_file_is_named(tmp_path, line):
    file = make_voc(tmp_path) / 'ImageSets' / 'Main' / 'cat_train.txt'
    file.write_bytes(f'000005 -1\n\n{line}\n'.encode('latin-1'))
    with raises_error(r"a line of the form '000012 -1' in .*cat_train.txt:3, but got|UTF-8 text in .*cat_train.txt"):
        ReaderVoc(tmp_path, '2007', 'train')


def test_a_malformed_list_is_named(tmp_path):
    file = make_voc(tmp_path) / 'ImageSets' / 'Main' / 'train.txt'
    file.write_text('000012\n000005 1\n')
    with raises_error(r"Expected a line of the form '000012' in .*train.txt:2, but got '000005 1'"):
        ReaderVoc(tmp_path, '2007', 'train')
    file.write_text('\n')
    with raises_error(r'train.txt, but it is empty'):
        ReaderVoc(tmp_path, '2007', 'train')


@pytest.mark.parametrize('lists', [True, False])
def test_class_files_that_disagree_are_named(tmp_path, lists):
    file = make_voc(tmp_path, lists=lists) / 'ImageSets' / 'Main' / 'sheep_train.txt'
    file.write_text(file.read_text().replace('000009', '000010'))
    first = '/train.txt' if lists else 'aeroplane_train.txt'
    with raises_error(rf'{first} and .*sheep_train.txt list different images: 2 .* such as 000009'):
        ReaderVoc(tmp_path, '2007', 'train')


def test_an_image_that_is_listed_twice_is_refused(tmp_path):
    main = make_voc(tmp_path, xml=True) / 'ImageSets' / 'Main'
    with (main / 'train.txt').open('a') as file:
        file.write('000009\n')
    with raises_error(r'train.txt lists .*000009.jpg more than once'):
        ReaderVoc(tmp_path, '2007', 'train')
    with (main / 'cat_val.txt').open('a') as file:
        file.write('000009 1\n')
    with raises_error(r'cat_val.txt lists 000009 more than once'):
        ReaderVoc(tmp_path, '2007', 'val')


@pytest.mark.parametrize('xml, message', [
    ('<annotation><object>', r'Cannot read .*000009.xml as XML: no element found: line 1'),
    ('<html/>', r'Expected an <annotation> in .*000009.xml, but got <html>'),
    ('<annotation><object/></annotation>', r"Expected objects with a <name> .*000009.xml, but got '' and '0'"),
    ('<annotation><object><name>cat</name><difficult>maybe</difficult></object></annotation>',
     r"Expected objects .*000009.xml, but got 'cat' and 'maybe'"),
    ('<annotation><object><name>catt</name></object></annotation>',
     r"Label 'catt' in .*000009.xml is not one of the 20 classes; did you mean 'cat'\?"),
])
def test_malformed_xml_is_named(tmp_path, xml, message):
    folder = make_voc(tmp_path, class_files=False, xml=True)
    (folder / 'Annotations' / '000009.xml').write_text(xml)
    with raises_error(message):
        ReaderVoc(tmp_path, '2007', 'train')


def test_a_split_without_any_labels_is_refused(tmp_path):
    make_voc(tmp_path, class_files=False)
    with raises_error(r'No labels: there are neither all class files in ImageSets/Main nor .*000012.xml'):
        ReaderVoc(tmp_path, '2007', 'train')


def test_a_missing_image_is_an_error_unless_allowed(tmp_path):
    folder = make_voc(tmp_path)
    (folder / 'JPEGImages' / '000005.jpg').unlink()
    with raises_error(r'1 of the 4 images listed in split train in .* are missing, such as .*000005.jpg'):
        ReaderVoc(tmp_path, '2007', 'train')
    assert len(ReaderVoc(tmp_path, '2007', 'train', images_must_exist=False)) == 4


def test_the_real_voc_2007_has_the_labels_that_a_plain_loop_counts(tmp_path):
    tar = os.environ.get('TSM_VOC_TAR')
    if not tar:
        pytest.skip('TSM_VOC_TAR does not name VOC2007-256px.tar, which this test reads')
    if not Path(tar).is_file():
        pytest.fail(f'TSM_VOC_TAR names {tar}, which is not there')
    with tarfile.open(tar) as archive:
        archive.extractall(tmp_path, filter='data')
    try:
        for split, images in (('train-only', 2500), ('val', 2508), ('train', 5008)):
            reader = ReaderVoc(tmp_path, '2007', voc_split(split, '2007'))
            assert (len(reader), len(reader.class_names), reader.source) == (images, 20, 'class files')
            for column, name in enumerate(reader.class_names):
                file = tmp_path / 'VOCdevkit' / 'VOC2007' / 'ImageSets' / 'Main' / f'{name}_{reader.split}.txt'
                positive = difficult = 0
                for line in file.read_text().splitlines():
                    positive += line.endswith(' 1')
                    difficult += line.endswith(' 0')
                assert reader.targets[:, column].sum() == positive > 0
                assert reader.difficult[:, column].sum() == difficult
            with Image.open(reader[0][0]) as image:
                assert max(image.size) == 256
    finally:
        shutil.rmtree(tmp_path / 'VOCdevkit')  # pytest would keep the images of its last three runs
