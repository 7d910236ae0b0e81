import pytest
import torch
from PIL import Image

from tests.helpers import raises_error
from timm_splicemix.data.readers.list import ReaderList


def make_list(root, text, images=('a.jpg', 'b.jpg', 'c.jpg'), name='list.txt'):
    for image in images:
        (root / image).parent.mkdir(parents=True, exist_ok=True)
        Image.new('RGB', (8, 6)).save(root / image)
    file = root / name
    file.write_bytes(text.encode())
    return file


@pytest.mark.parametrize('text', [
    'a.jpg,0 2\nb.jpg,3\nc.jpg,\n',
    'a.jpg\t0 2\nb.jpg\t3\nc.jpg\t\n',
    'a.jpg,0,2\nb.jpg,3\nc.jpg',
    'a.jpg\t0\t2\nb.jpg\t3\nc.jpg',
    'a.jpg\t0,2\r\n\r\nb.jpg, 3 \r\nc.jpg\r\n\r\n',
    '\ufeffa.jpg,0 2 0\n\n  \nb.jpg,3\nc.jpg\n',
])
def test_each_separator_gives_the_same_labels(tmp_path, text):
    reader = ReaderList(tmp_path, make_list(tmp_path, text))
    assert reader.filenames() == ['a.jpg', 'b.jpg', 'c.jpg']
    assert reader.class_names == ['0', '1', '2', '3']
    assert reader.targets.dtype == torch.int8
    assert reader.targets.tolist() == [[1, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]]


def test_a_line_of_the_published_coco_lists_is_read(tmp_path):
    name = 'COCO_train2014_000000000009.jpg'
    reader = ReaderList(tmp_path, make_list(tmp_path, f'{name},0 52\n', images=[name]), num_classes=80)
    assert reader.targets.shape == (1, 80) and reader.targets[0].nonzero().flatten().tolist() == [0, 52]


def test_classes_are_the_given_names_or_their_number(tmp_path):
    file = make_list(tmp_path, 'a.jpg,1\nb.jpg\n')
    assert ReaderList(tmp_path, file, class_names=['cat', 'dog', 'cow']).class_names == ['cat', 'dog', 'cow']
    assert ReaderList(tmp_path, file, num_classes=3).class_names == ['0', '1', '2']
    assert ReaderList(tmp_path, file).class_names == ['0', '1']
    assert ReaderList(tmp_path, file, class_names=['cat', 'dog'], num_classes=2).targets.tolist() == [[0, 1], [0, 0]]


def test_names_may_hold_spaces_folders_commas_and_any_letters(tmp_path):
    images = ['my folder/é 1.JPG', 'a, b.jpg', '猫.png']
    file = make_list(tmp_path, 'my folder/é 1.JPG,0\na, b.jpg\t1\n猫.png,2\n', images)
    reader = ReaderList(tmp_path, file)
    assert reader.filenames() == images
    assert reader.targets.tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]


def test_images_are_relative_to_the_root_unless_absolute(tmp_path):
    file = make_list(tmp_path / 'images', '', images=['a.jpg', 'b.jpg'])
    file.write_text(f'a.jpg,0\n{tmp_path}/images/b.jpg,1\n')
    reader = ReaderList(tmp_path / 'images', file)
    assert reader.paths == [str(tmp_path / 'images' / name) for name in ('a.jpg', 'b.jpg')]


@pytest.mark.parametrize('classes', [{'class_names': ['cat', 'dog']}, {'num_classes': 2}])
def test_an_index_out_of_range_names_line_and_way_out(tmp_path, classes):
    file = make_list(tmp_path, 'a.jpg,1\nb.jpg,0 2\n')
    with raises_error(
            r'Expected class indices 0 to 1 in .*list.txt:2, but got 2. .*--class-map, or set --num-classes'):
        ReaderList(tmp_path, file, **classes)


@pytest.mark.parametrize('index', ['cat', '-1', '1.0', '1_0'])
def test_a_bad_index_is_refused(tmp_path, index):
    file = make_list(tmp_path, f'a.jpg,1\n\nb.jpg,0 {index}\n')
    with raises_error(rf"Expected class indices \(0, 1, ...\) in .*list.txt:3, but got '{index}'"):
        ReaderList(tmp_path, file)


def test_a_line_without_image_is_refused(tmp_path):
    with raises_error(r"Expected an image before the indices in .*list.txt:2, but got ',0'"):
        ReaderList(tmp_path, make_list(tmp_path, 'a.jpg,0\n,0\n'))


def test_names_and_number_of_classes_that_disagree_are_refused(tmp_path):
    with raises_error('--class-map has 1 classes, but --num-classes is 2'):
        ReaderList(tmp_path, make_list(tmp_path, 'a.jpg,0\n'), class_names=['cat'], num_classes=2)


def test_a_list_without_any_class_is_refused_unless_classes_are_given(tmp_path):
    file = make_list(tmp_path, 'a.jpg\nb.jpg\n')
    with raises_error(r'list.txt has no class indices'):
        ReaderList(tmp_path, file)
    assert ReaderList(tmp_path, file, num_classes=2).targets.tolist() == [[0, 0], [0, 0]]


def test_an_image_that_is_listed_twice_is_refused(tmp_path):
    with raises_error(r'list.txt lists .*a.jpg more than once'):
        ReaderList(tmp_path, make_list(tmp_path, 'a.jpg,0\nb.jpg,1\na.jpg,1\n'))


def test_a_missing_image_is_an_error_unless_allowed(tmp_path):
    file = make_list(tmp_path, 'a.jpg,0\nnone.jpg,1\n')
    with raises_error(r'1 of the 2 images listed in .*list.txt are missing, such as .*none.jpg'):
        ReaderList(tmp_path, file)
    assert len(ReaderList(tmp_path, file, images_must_exist=False)) == 2


def test_a_list_that_is_missing_empty_or_no_text_is_refused(tmp_path):
    with raises_error(r'Cannot read .*none.txt: No such file'):
        ReaderList(tmp_path, tmp_path / 'none.txt')
    with raises_error(r'list.txt is empty'):
        ReaderList(tmp_path, make_list(tmp_path, '\n \n'))
    (tmp_path / 'list.txt').write_bytes(b'\xff\xfe,0\n')
    with raises_error(r'Expected UTF-8 text in .*list.txt'):
        ReaderList(tmp_path, tmp_path / 'list.txt')
