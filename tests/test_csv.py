import logging
import re
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.helpers import raises_error
from timm_splicemix.data.readers.csv import ReaderCsv, find_csv
from timm_splicemix.files import write_csv
from timm_splicemix.run.predictor import Prediction, write_predictions

IMAGES = ('a.jpg', 'b.jpg', 'c.jpg')


def make_csv(root, text, images=IMAGES, name='labels.csv'):
    for image in images:
        (root / image).parent.mkdir(parents=True, exist_ok=True)
        Image.new('RGB', (8, 6)).save(root / image)
    file = root / name
    file.write_bytes(text.encode())
    return file


def read(root, text, *, images=IMAGES, name='labels.csv', **kwargs):
    return ReaderCsv(root, make_csv(root, text, images, name), **kwargs)


@pytest.mark.parametrize('cell, options', [
    ('cat;dog', {}), ('cat|dog', {}), ('"cat,dog"', {}), ('cat dog', {}), ('"cat, dog"', {}), ('cat; dog;', {}),
    ('cat/dog', {'label_delimiter': '/'}), ('cat--dog', {'label_delimiter': '--'})])
def test_labels_in_one_column_are_cut_at_each_delimiter(tmp_path, cell, options):
    reader = read(tmp_path, f'image,labels\na.jpg,{cell}\nb.jpg,\nc.jpg,cow\n', **options)
    assert reader.class_names == ['cat', 'cow', 'dog']
    assert reader.filenames() == list(IMAGES)
    assert reader.targets.dtype == torch.int8
    assert reader.targets.tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]


@pytest.mark.parametrize('cells', [
    ("['cat, big', 'dog']", '[]', "['Bär']"), ('["cat, big", "dog"]', '[]', '["B\\u00e4r"]'),
    ("['cat, big' 'dog']", '', "['Bär']"), ("['dog', 'cat, big']", '[ ]', '["Bär"]')])
def test_lists_in_cells_are_labels(tmp_path, cells):
    file = tmp_path / 'labels.csv'
    write_csv([{'image': image, 'labels': cell} for image, cell in zip(IMAGES, cells)], file)
    reader = read(tmp_path, file.read_text())
    assert reader.class_names == ['Bär', 'cat, big', 'dog']
    assert reader.targets.tolist() == [[0, 1, 1], [0, 0, 0], [1, 0, 0]]


def test_lists_without_quotes_are_names_or_indices(tmp_path):
    text = 'image,labels\na.jpg,"[dining table, dog]"\nb.jpg,[dog]\n'
    assert read(tmp_path, text).class_names == ['dining table', 'dog']
    reader = read(tmp_path, 'image,labels\na.jpg,"[2, 0]"\nb.jpg,[1]\n', class_names=['cat', 'dog', 'cow'])
    assert reader.targets.tolist() == [[1, 0, 1], [0, 1, 0]]


def test_the_first_delimiter_that_occurs_leaves_the_others_to_the_names(tmp_path):
    reader = read(tmp_path, 'image,labels\na.jpg,dining table;wine glass\nb.jpg,"bird, small"\n')
    assert reader.class_names == ['bird, small', 'dining table', 'wine glass']


def test_a_file_without_any_delimiter_has_one_label_per_image(tmp_path):
    assert read(tmp_path, 'image,label\na.jpg,cat\nb.jpg,dog\n').targets.tolist() == [[1, 0], [0, 1]]


def test_known_names_with_a_space_are_not_cut(tmp_path):
    text = 'image,labels\na.jpg,dining table\nb.jpg,cat\n'
    assert read(tmp_path, text, class_names=['cat', 'dining table']).targets.tolist() == [[0, 1], [1, 0]]
    assert read(tmp_path, text, label_delimiter=';').class_names == ['cat', 'dining table']
    reader = read(tmp_path, text + 'c.jpg,cat dog\n', class_names=['cat', 'dining table', 'dog'])
    assert reader.targets.tolist() == [[0, 1, 0], [1, 0, 0], [1, 0, 1]]


def test_given_classes_set_the_order(tmp_path):
    reader = read(tmp_path, 'image,labels\na.jpg,cat;dog\n', class_names=['dog', 'cow', 'cat'])
    assert reader.class_names == ['dog', 'cow', 'cat'] and reader.targets.tolist() == [[1, 0, 1]]


def test_integers_are_indices_of_given_classes(tmp_path):
    reader = read(tmp_path, 'image,labels\na.jpg,0 2\nb.jpg,1\n', class_names=['dog', 'cow', 'cat'])
    assert reader.class_names == ['dog', 'cow', 'cat'] and reader.targets.tolist() == [[1, 0, 1], [0, 1, 0]]


def test_integers_are_names_where_the_classes_are_called_so(tmp_path):
    reader = read(tmp_path, 'image,labels\na.jpg,10;2\n', class_names=['2', '3', '10'])
    assert reader.targets.tolist() == [[1, 0, 1]]


def test_integers_without_classes_are_sorted_as_numbers(tmp_path):
    assert read(tmp_path, 'image,labels\na.jpg,10;2\nb.jpg,9\n').class_names == ['2', '9', '10']


def test_a_column_per_class_holds_present_absent_and_unknown(tmp_path):
    reader = read(tmp_path, 'image,dog,cat\na.jpg,1,0\nb.jpg,-1,1.0\nc.jpg,0.0, 1\n')
    assert reader.class_names == ['dog', 'cat']
    assert reader.targets.tolist() == [[1, 0], [-1, 1], [0, 1]]


@pytest.mark.parametrize('present, absent', [
    ('True', 'False'), ('TRUE', 'FALSE'), ('yes', 'No'), ('y', 'n'), ('1', '0')])
def test_truth_values_are_read_in_any_case(tmp_path, present, absent):
    reader = read(tmp_path, f'image,cat,dog\na.jpg,{present},{absent}\nb.jpg,{absent},{present}\n')
    assert reader.targets.tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize('cell', ['', ' ', 'nan', 'NA', 'null'])
def test_empty_cells_are_negative_or_unknown(tmp_path, cell, caplog):
    text = f'image,cat,dog\na.jpg,1,{cell}\nb.jpg,{cell},0\n'
    with caplog.at_level(logging.INFO):
        assert read(tmp_path, text).targets.tolist() == [[1, 0], [0, 0]]
    assert caplog.messages == [
        f'2 empty cells in {tmp_path}/labels.csv count as negative; --csv-empty unknown makes them unknown.']
    assert read(tmp_path, text, empty_cells='unknown').targets.tolist() == [[1, -1], [-1, 0]]


def test_an_image_without_labels_is_negative_or_unknown(tmp_path, caplog):
    text = 'image,labels\na.jpg,cat;dog\nb.jpg,\nc.jpg,cat\n'
    with caplog.at_level(logging.INFO):
        assert read(tmp_path, text).targets.tolist() == [[1, 1], [0, 0], [1, 0]]
    assert '1 images without a label in' in caplog.text and '--csv-empty unknown' in caplog.text
    assert read(tmp_path, text, empty_cells='unknown').targets.tolist() == [[1, 1], [-1, -1], [1, 0]]


def test_a_file_of_1_and_minus_1_logs_what_minus_1_means(tmp_path, caplog):
    assert read(tmp_path, 'image_id,Smiling,Male\na.jpg,1,-1\nb.jpg,-1,1\n').targets.tolist() == [[1, -1], [-1, 1]]
    assert 'has 1 and -1, but no 0: -1 means unknown. Write 0 instead' in caplog.text


@pytest.mark.parametrize('text, options', [
    ('image,cat,dog\na.jpg,1,0\nb.jpg,0,1\n./a.jpg,1,0\na.jpg,1.0,no\n', {}),
    ('image,labels\na.jpg,cat\nb.jpg,dog\na.jpg,cat\na.jpg,cat\n', {}),
    ('image,labels,split\na.jpg,cat,train\nb.jpg,dog,train\na.jpg,cat,train\na.jpg,cat,train\nc.jpg,cat,val\n',
     {'split': 'train'}),
])
def test_identical_rows_are_merged(tmp_path, text, options, caplog):
    with caplog.at_level(logging.INFO):
        reader = read(tmp_path, text, **options)
    assert reader.filenames() == ['a.jpg', 'b.jpg'] and reader.targets.tolist() == [[1, 0], [0, 1]]
    assert caplog.messages == [f'2 duplicate rows of {tmp_path}/labels.csv were merged.']


def test_a_duplicate_row_does_not_change_how_labels_are_split(tmp_path):
    assert read(tmp_path, 'image,labels\na.jpg,cat dog\nb.jpg,cow\na.jpg,cat dog\n').class_names == [
        'cat', 'cow', 'dog']


def test_one_label_per_row_is_united(tmp_path, caplog):
    text = 'ImageID,Source,LabelName\na,x,Human face\nb,x,Tree\na,y,Tree\na,y,Human face\n'
    with caplog.at_level(logging.INFO):
        reader = read(tmp_path, text)
    assert reader.filenames() == ['a.jpg', 'b.jpg']
    assert reader.class_names == ['Human face', 'Tree'] and reader.targets.tolist() == [[1, 1], [0, 1]]
    assert f'{tmp_path}/labels.csv has one label per row: 2 images in 4 rows.' in caplog.messages
    assert f'1 duplicate rows of {tmp_path}/labels.csv were merged.' in caplog.messages


def test_a_given_delimiter_unites_rows_of_several_labels(tmp_path):
    reader = read(tmp_path, 'image,labels\na.jpg,cat;dog\nb.jpg,dog\na.jpg,cow\n', label_delimiter=';')
    assert reader.class_names == ['cat', 'cow', 'dog'] and reader.targets.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_rows_of_another_split_are_not_united(tmp_path):
    text = 'image,label,split\na.jpg,cat,train\na.jpg,dog,train\na.jpg,cow,val\nb.jpg,dog,val\n'
    reader = read(tmp_path, text, split='train')
    assert reader.class_names == ['cat', 'cow', 'dog'] and reader.targets.tolist() == [[1, 0, 1]]
    assert read(tmp_path, text, split='val').targets.tolist() == [[0, 1, 0], [0, 0, 1]]


def test_a_confidence_of_0_is_an_absent_label(tmp_path, caplog):
    text = 'ImageID,Source,LabelName,Confidence\na,v,/m/1,1\na,v,/m/2,0\nb,v,/m/3,1\nb,v,/m/1,0\nb,c,/m/1,1\n'
    with caplog.at_level(logging.INFO):
        reader = read(tmp_path, text)
    assert reader.class_names == ['/m/1', '/m/2', '/m/3']
    assert reader.targets.tolist() == [[1, 0, 0], [1, 0, 1]]
    assert '2 classes of images without a Confidence in' in caplog.text and '--csv-empty unknown' in caplog.text
    assert read(tmp_path, text, empty_cells='unknown').targets.tolist() == [[1, 0, -1], [1, -1, 1]]


def test_other_confidences_are_reported_and_not_used(tmp_path, caplog):
    assert read(tmp_path, 'ImageID,LabelName,Confidence\na,cat,0.7\na,dog,0\n').targets.tolist() == [[1, 1]]
    assert "has other values than 0 and 1, such as '0.7'. It is not used" in caplog.text


@pytest.mark.parametrize('separator', [';', '\t'])
def test_the_header_tells_the_separator_of_columns(tmp_path, separator):
    reader = read(tmp_path, f'image{separator}labels\r\na.jpg{separator}cat,dog\r\nb.jpg{separator}cow\r\n')
    assert reader.class_names == ['cat', 'cow', 'dog']


def test_predictions_of_this_package_are_labels(tmp_path):
    predictions = [
        Prediction(Path('-a.jpg'), {'=1+1': 0.9, '@home': 0.8}, {'=1+1': 0.9, '@home': 0.8, 'dog': 0.1}),
        Prediction(Path('b.jpg'), {'dog': 0.7, '-3 dB': 0.6}, {'=1+1': 0.2, '@home': 0.1, 'dog': 0.7})]
    make_csv(tmp_path, '', images=['-a.jpg', 'b.jpg'])
    write_predictions(predictions, ['=1+1', '@home', 'dog', "'-x"], 'EMA', tmp_path / 'predictions.csv')
    assert "'-a.jpg,'=1+1;@home" in (tmp_path / 'predictions.csv').read_text()
    reader = ReaderCsv(tmp_path, tmp_path / 'predictions.csv')
    assert reader.filenames() == ['-a.jpg', 'b.jpg'] and reader.class_names == ['-3 dB', '=1+1', '@home', 'dog']
    assert reader.targets.tolist() == [[0, 1, 1, 0], [1, 0, 0, 1]]


def test_class_columns_that_this_package_wrote_keep_their_names(tmp_path):
    make_csv(tmp_path, '')
    write_csv([{'image': 'a.jpg', '=sum': 1, "'=x": 0, '@': -1}], tmp_path / 'table.csv')
    reader = ReaderCsv(tmp_path, tmp_path / 'table.csv')
    assert reader.class_names == ['=sum', "'=x", '@'] and reader.targets.tolist() == [[1, 0, -1]]


def test_given_classes_choose_and_order_the_columns(tmp_path):
    text = ',image,width,dog,cat\n0,a.jpg,640,1,0\n1,b.jpg,480,0,-1\n'
    reader = read(tmp_path, text, class_names=['cat', 'dog'])
    assert reader.class_names == ['cat', 'dog'] and reader.targets.tolist() == [[0, 1], [-1, 0]]


def test_a_column_without_name_is_no_class(tmp_path):
    assert read(tmp_path, ',image,dog\n0,a.jpg,1\n7,b.jpg,0\n').class_names == ['dog']


@pytest.mark.parametrize('column', [
    'image', 'Image_Path', 'path', 'FILE', 'filename', 'file_name', 'filepath', 'img', 'image_id', 'ID', 'ImageID',
    'Image Index', 'image-name', 'img_path', 'File Name'])
def test_usual_names_of_the_image_column_are_recognised(tmp_path, column):
    assert read(tmp_path, f'x,{column}\n1,a.jpg\n').class_names == ['x']


@pytest.mark.parametrize('column', [
    'labels', 'Label', 'tags', 'tag', 'CLASSES', 'class', 'categories', 'category', 'LabelName', 'class_name',
    'Finding Labels'])
def test_usual_names_of_the_label_column_are_recognised(tmp_path, column):
    assert read(tmp_path, f'width,{column},image\n8,cat,a.jpg\n').class_names == ['cat']


@pytest.mark.parametrize('column', ['split', 'Subset', 'set', 'fold', 'partition'])
def test_usual_names_of_the_split_column_are_recognised(tmp_path, column):
    reader = read(tmp_path, f'image,cat,{column}\na.jpg,1,train\nb.jpg,0,val\n', split='val')
    assert reader.filenames() == ['b.jpg'] and reader.class_names == ['cat'] and reader.split_column == column


def test_columns_of_any_name_can_be_named(tmp_path):
    text = 'image,photo,what,when\n1,a.jpg,cat,train\n2,b.jpg,dog,val\n'
    options = {'image_column': 'photo', 'label_column': 'what', 'split_column': 'when'}
    reader = read(tmp_path, text, split='train', **options)
    assert reader.filenames() == ['a.jpg'] and reader.class_names == ['cat', 'dog']


def test_splits_of_one_file_share_their_classes(tmp_path):
    text = 'image,labels,split\na.jpg,dog,train\nb.jpg,cat,val\nc.jpg,cow,train\n'
    for split, images, targets in (
            ('train', ['a.jpg', 'c.jpg'], [[0, 0, 1], [0, 1, 0]]),
            ('val', ['b.jpg'], [[1, 0, 0]]),
            (None, list(IMAGES), [[0, 0, 1], [1, 0, 0], [0, 1, 0]])):
        reader = read(tmp_path, text, split=split)
        assert reader.class_names == ['cat', 'cow', 'dog']
        assert reader.filenames() == images and reader.targets.tolist() == targets


@pytest.mark.parametrize('present, split, found', [
    (('train', 'val', 'test'), 'validation', 'val'), (('train', 'val', 'test'), 'test', 'test'),
    (('train', 'val', 'validation'), 'validation', 'validation'), (('train', 'valid', 'test'), 'eval', 'valid'),
    (('train', 'eval', 'test'), 'val', 'eval'), (('training', 'test'), 'train', 'training'),
    (('train', 'test'), 'validation', 'test'), (('Train', 'VAL'), 'train', 'Train'), (('train', 'b'), 'b', 'b')])
def test_a_split_is_found_by_its_name_or_else_a_synonym(tmp_path, present, split, found):
    rows = ''.join(f'{name}.jpg,1,{name}\n' for name in present)
    reader = read(tmp_path, f'image,cat,split\n{rows}', images=[f'{name}.jpg' for name in present], split=split)
    assert reader.filenames() == [f'{found}.jpg']


@pytest.mark.parametrize('split', ['train', 'test'])
def test_a_missing_split_lists_the_existing_ones(tmp_path, split):
    with raises_error(
            rf"Column 'split' of .*labels.csv has no split '{split}'. Its splits: dev, val. .*"
            '--csv-split-column'):
        read(tmp_path, 'image,cat,split\na.jpg,1,val\nb.jpg,1,dev\n', split=split)


def test_a_file_without_split_column_is_the_split(tmp_path):
    reader = read(tmp_path, 'image,cat\na.jpg,1\nb.jpg,0\n', split='train')
    assert len(reader) == 2 and reader.split_column is None


def test_tsv_bom_quotes_and_blank_lines_are_read(tmp_path):
    assert read(tmp_path, 'image\tlabels\na.jpg\tcat,dog\n', name='labels.tsv').class_names == ['cat', 'dog']
    reader = read(
        tmp_path, '\ufeffimage,labels\r\n\r\n"a, ""1"".jpg","cat;dog"\r\n,\r\n', images=['a, "1".jpg'])
    assert reader.filenames() == ['a, "1".jpg'] and reader.class_names == ['cat', 'dog']


def test_names_and_paths_may_hold_any_letters_spaces_and_uppercase_extensions(tmp_path):
    images = ['my folder/é 1.JPG', '猫/写真.PNG']
    reader = read(tmp_path, f'image,labels\n{images[0]},猫;chien été\n{images[1]},猫\n', images=images)
    assert reader.filenames() == images
    assert reader.class_names == ['chien été', '猫'] and reader.targets.tolist() == [[1, 1], [0, 1]]


def test_backslashes_of_windows_are_slashes(tmp_path, caplog):
    text = 'image,labels\nphotos\\a.jpg,cat\nb\\1.jpg,dog\n'  # the second file has a backslash in its name
    with caplog.at_level(logging.INFO):
        reader = read(tmp_path, text, images=('photos/a.jpg', 'b\\1.jpg'))
    assert reader.filenames() == ['photos/a.jpg', 'b\\1.jpg']
    assert 'photos\\a.jpg is read as photos/a.jpg' in caplog.text
    with raises_error(r"lists ../a.jpg, and '..' is refused"):
        read(tmp_path, 'image,labels\n..\\a.jpg,cat\n')


def test_absolute_paths_are_kept(tmp_path):
    make_csv(tmp_path / 'elsewhere', '')
    path = str(tmp_path / 'elsewhere' / 'a.jpg')
    assert read(tmp_path / 'root', f'image,cat\n{path},1\nb.jpg,0\n').paths == [path, str(tmp_path / 'root' / 'b.jpg')]


@pytest.mark.parametrize('extension', ['.jpg', '.jpeg', '.png', '.bmp', '.webp', '.JPG', '.JPEG', '.PNG'])
def test_a_missing_extension_is_found(tmp_path, extension):
    reader = read(tmp_path, 'id,cat\nx/12,1\nx/v1.2,0\n', images=[f'x/12{extension}', f'x/v1.2{extension}'])
    assert reader.filenames() == [f'x/12{extension}', f'x/v1.2{extension}']


def test_a_file_that_has_no_extension_itself_is_taken(tmp_path):
    file = make_csv(tmp_path, 'id,cat\n12,1\n', images=['12.jpg'])
    (tmp_path / '12').write_bytes((tmp_path / '12.jpg').read_bytes())
    assert ReaderCsv(tmp_path, file).filenames() == ['12']


@pytest.mark.parametrize('text, options, message', [
    ('image,labels\na.jpg,"[1, 0, 1]"\nb.jpg,"[0, 0, 1]"\n', {},
     r"labels.csv:2 .*\[1, 0, 1\].*a column for each class, or read the lists from a JSON file"),
    ('', {}, r'Expected a header and rows in .*labels.csv, but got nothing'),
    ('image,labels\n\n', {}, r'Expected a header and rows in .*labels.csv, but got a header only'),
    ('photo,labels\na.jpg,cat\n', {},
     r'labels.csv has no column of images. Its columns: photo, labels. Set --csv-image-column'),
    ('"pho\nto",labels\na.jpg,cat\n', {}, r'Its columns: pho\\nto, labels. Set --csv-image-column'),
    ('image,labels\na.jpg,cat\n', {'image_column': 'x'},
     r"has no column 'x' \(--csv-image-column\). Its columns: image, labels\."),
    ('image,labels\na.jpg,cat\n', {'label_column': 'x'}, r"has no column 'x' \(--csv-label-column\)"),
    ('image,labels\na.jpg,cat\n', {'split_column': 'x'}, r"has no column 'x' \(--csv-split-column\)"),
    ('image,split\na.jpg,train\n', {},
     r'labels.csv has neither a column of labels nor .* Its columns: image, split. Set --csv-label-column'),
    ('image,cat,cat\na.jpg,1,1\n', {}, r"labels.csv has two columns 'cat'"),
    ('a.jpg,cat\nb.jpg,dog\n', {}, r'The first line of .*labels.csv names an image: a.jpg, cat. Write a header'),
    ('image,cat,dog\na.jpg,1,1\nb.jpg,1,maybe\n', {},
     r"in column 'dog' of .*labels.csv:3, but got 'maybe'. .*--csv-label-column .* --class-map"),
    ('image,cat,dog\na.jpg,1,1\nb.jpg,1,0.5\n', {},
     r"Expected 1 .*, 0 .* or -1 \(unknown\) in column 'dog' of .*labels.csv:3, but got '0.5'"),
    ('image,cat\na.jpg,1\n', {'empty_cells': 'absent'}, "Expected empty_cells to be negative or unknown"),
    ('image,cat\na.jpg,1\n', {'label_delimiter': ';'}, r"has no column of labels to split at ';'.*--csv-delim"),
    ('image,cat\na.jpg,1\n', {'class_names': ['cat', 'dog']},
     r"labels.csv has no column for class 'dog' of --class-map. Its columns: image, cat"),
    ('image,labels\na.jpg,cat\nb.jpg,cat;dgo\n', {'class_names': ['cat', 'dog']},
     r"Label 'dgo' in .*labels.csv:3 \(--class-map .*--csv-delimiter\) is not .*did you mean 'dog'"),
    ('image,labels\na.jpg,0\nb.jpg,2\n', {'class_names': ['cat', 'dog']},
     r'Expected class indices 0 to 1 \(--class-map\) in .*labels.csv:3, but got 2'),
    ('image,labels\na.jpg,\n', {}, r"Column 'labels' of .*labels.csv has no labels"),
    ('image,labels\na.jpg,cat,dog\n', {}, r'Expected 2 fields .*labels.csv:2, but got 3. Quote'),
    ('image,labels\na.jpg,cat\nb.jpg\n', {}, r'Expected 2 fields .*labels.csv:3, but got 1'),
    ('image,labels\n"a.jpg,cat\n', {}, r'Invalid CSV in .*labels.csv:2: unexpected end of data'),
    ('image,labels\na.jpg,cat\n,dog\n', {}, r'labels.csv:3 has no image'),
    ('image,cat\na.jpg,1\nb.jpg,1\na.jpg,0\n', {},
     r'labels.csv:4 and .*labels.csv:2 list .*a.jpg with different labels. Remove one'),
    ('image,labels\na.jpg,cat;dog\nb.jpg,dog\na.jpg,dog\n', {},
     r"labels.csv:4 lists an image again with other labels, and .* contain ';'. Set --csv-delimiter ';'"),
    ('image,labels\na.jpg,"cat\ndog"\n', {}, r"Class 'cat\\ndog' in .*labels.csv has a line break. Write its"),
    ('image,"cat\u2028dog"\na.jpg,1\n', {}, r'has a line break'),
    ('image,labels\na.jpg,cat\nx.jpg,dog\ny,cat\n', {},
     r'2 of the 3 images listed in .*labels.csv are missing, such as x.jpg \(relative to /.*\). Set --data-dir, '
     r'--train-images .*--on-bad-image skip'),
])
def test_each_error_names_the_place_and_the_fix(tmp_path, text, options, message):
    with raises_error(message):
        read(tmp_path, text, **options)


def test_missing_images_can_be_allowed(tmp_path):
    reader = read(tmp_path, 'image,labels\nx.jpg,cat\ny,dog\n', images_must_exist=False)
    assert reader.filenames() == ['x.jpg', 'y']


def test_text_files_of_excel_are_read(tmp_path):
    text = 'image;Bär\r\na.jpg;1\r\nb.jpg;x\r\n'
    with raises_error("labels.csv:4, but got 'x'"):
        read(tmp_path, 'sep=;\r\n' + text)
    assert read(tmp_path, 'sep=;\r\n' + text.replace('x', '0')).class_names == ['Bär']
    make_csv(tmp_path, '')
    (tmp_path / 'labels.csv').write_bytes(text.replace('x', '0').replace(';', '\t').encode('utf-16'))
    assert ReaderCsv(tmp_path, tmp_path / 'labels.csv').class_names == ['Bär']


@pytest.mark.parametrize('name', ['labels.xlsx', 'labels.XLS', 'labels.ods'])
def test_a_workbook_is_refused_with_what_to_do(tmp_path, name):
    (tmp_path / name).write_bytes(b'PK\3\4')
    with raises_error(f"{name} is a workbook. Save it as a CSV file; Excel calls that 'CSV UTF-8'"):
        ReaderCsv(tmp_path, tmp_path / name)
    with raises_error(f'but got the workbook {name}. Save it as a CSV file'):
        find_csv(tmp_path, 'train')


def test_a_file_that_is_missing_or_no_text_is_refused(tmp_path):
    with raises_error(r'Cannot read .*none.csv: No such file'):
        ReaderCsv(tmp_path, tmp_path / 'none.csv')
    (tmp_path / 'labels.csv').write_bytes(b'image,labels\n\xff.jpg,cat\n')
    with raises_error(r"Expected UTF-8 text in .*labels.csv, .*Save it as UTF-8; Excel calls that 'CSV UTF-8'"):
        ReaderCsv(tmp_path, tmp_path / 'labels.csv')


@pytest.mark.parametrize('files, split, found', [
    (('train.csv', 'val.csv', 'test.csv'), 'train', 'train.csv'),
    (('train.csv', 'val.csv', 'test.csv'), 'validation', 'val.csv'),
    (('train.csv', 'val.csv', 'test.csv'), 'test', 'test.csv'),
    (('train.tsv', 'valid.tsv'), 'validation', 'valid.tsv'),
    (('Training.csv', 'test.CSV'), 'train', 'Training.csv'),
    (('Training.csv', 'test.CSV'), 'eval', 'test.CSV'),
    (('all.tsv', 'readme.txt'), 'validation', 'all.tsv'),
    (('labels.csv', 'annotations.csv', 'x.csv'), 'train', 'labels.csv'),
    (('annotations.csv', 'x.csv'), 'train', 'annotations.csv'),
    (('labels.csv', 'train.csv'), 'train', 'train.csv'),
])
def test_the_file_of_a_split_is_found(tmp_path, files, split, found):
    for name in files:
        (tmp_path / name).write_text('image\tcat\tsplit\na.jpg\t1\ttrain\n' if name.endswith('.tsv') else
                                     'image,cat,split\na.jpg,1,train\n')
    assert find_csv(tmp_path, split) == tmp_path / found


@pytest.mark.parametrize('files, split, message', [
    ((), 'train', 'Expected train.csv or one file of all splits in .*, but got no .csv or .tsv file'),
    (('x.csv', 'y.tsv'), 'train', 'Expected train.csv .*, but got x.csv, y.tsv'),
    (('train.csv',), 'validation', 'Expected validation.csv .*, but got train.csv'),
    (('train.csv', 'val.csv'), 'test', 'Expected test.csv .*, but got train.csv, val.csv'),
])
def test_a_missing_file_lists_the_existing_ones(tmp_path, files, split, message):
    for name in files:
        (tmp_path / name).write_text('image,cat\na.jpg,1\n')
    with raises_error(message):
        find_csv(tmp_path, split)


def test_a_missing_folder_is_named(tmp_path):
    with raises_error(f'The folder of the data set \\(--data-dir\\) does not exist: {tmp_path}/nowhere'):
        find_csv(tmp_path / 'nowhere', 'train')


def test_a_missing_validation_file_names_the_flag_that_needs_none(tmp_path):
    make_csv(tmp_path, 'image,labels\na.jpg,cat\n', name='train.csv')
    with raises_error('Expected validation.csv .*but got train.csv. Set --val-ann .*or let --val-fraction 0.2'):
        find_csv(tmp_path, 'validation')


def test_a_file_of_all_splits_must_tell_them_apart(tmp_path):
    file = make_csv(tmp_path, 'image,cat,when\na.jpg,1,train\n')
    message = rf"{re.escape(str(file))} has no column of splits to find 'train'.*--csv-split-column.* --split-file"
    with raises_error(message):
        find_csv(tmp_path, 'train')
    assert find_csv(tmp_path, 'train', split_column='when') == file


def test_a_column_that_names_no_splits_is_no_split_column(tmp_path):
    for index in range(3):
        Image.new('RGB', (4, 4)).save(tmp_path / f'{index}.jpg')
    (tmp_path / 'train.csv').write_text('image,labels,fold\n0.jpg,cat,0\n1.jpg,dog,1\n2.jpg,cat,2\n')
    reader = ReaderCsv(tmp_path, tmp_path / 'train.csv', 'train')
    assert len(reader) == 3 and reader.split_column is None
    assert len(ReaderCsv(tmp_path, tmp_path / 'train.csv', '1', split_column='fold')) == 1


def test_an_id_beside_the_image_is_no_class(tmp_path):
    for index in range(2):
        Image.new('RGB', (4, 4)).save(tmp_path / f'{index}.jpg')
    (tmp_path / 'train.csv').write_text('id,image,cat\n0,0.jpg,1\n1,1.jpg,0\n')
    assert ReaderCsv(tmp_path, tmp_path / 'train.csv').class_names == ['cat']


def test_splitting_at_spaces_logs_a_warning(tmp_path, caplog):
    Image.new('RGB', (4, 4)).save(tmp_path / '0.jpg')
    (tmp_path / 'train.csv').write_text('image,labels\n0.jpg,dining table\n')
    assert ReaderCsv(tmp_path, tmp_path / 'train.csv').class_names == ['dining', 'table']
    assert 'are split at spaces. Set --csv-delimiter' in caplog.text
    assert ReaderCsv(tmp_path, tmp_path / 'train.csv', label_delimiter=';').class_names == ['dining table']
