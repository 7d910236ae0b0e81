""" Data sets of Hugging Face, from folders that save_to_disk wrote """
import io
import pickle
import sys

import pytest
import torch
from PIL import Image

from timm_splicemix.data import MultiLabelDataset
from timm_splicemix.data.readers.hfds import ReaderHfdsMultiLabel, hfds_is_multi_label, load_hfds
from timm_splicemix.data.splits import split_names

from .helpers import raises_error

datasets = pytest.importorskip('datasets')


def png(shade):
    file = io.BytesIO()
    Image.new('RGB', (4, 3), (shade, 0, 0)).save(file, 'PNG')
    return file.getvalue()


def make(labels, feature, column='labels', first=0, **others):
    features = datasets.Features({
        'image': datasets.Image(), column: feature, **{name: feature for name, (feature, _) in others.items()}})
    images = [{'bytes': png(first + index), 'path': None} for index in range(len(labels))]
    content = {'image': images, column: labels, **{name: values for name, (_, values) in others.items()}}
    return datasets.Dataset.from_dict(content, features=features)


def save(dataset, folder):
    dataset.save_to_disk(str(folder))
    return folder


CLASSES = datasets.ClassLabel(names=['cat', 'dog', 'eel'])
INTEGER = datasets.Value('int64')
TEXT = datasets.Value('string')
SEQUENCE = datasets.Sequence


@pytest.mark.parametrize('labels, feature, names, targets', [
    ([[0, 2], [], [1]], SEQUENCE(CLASSES), ['cat', 'dog', 'eel'], [[1, 0, 1], [0, 0, 0], [0, 1, 0]]),
    ([[0, 3], [], [1]], SEQUENCE(INTEGER), ['0', '1', '2', '3'], [[1, 0, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0]]),
    ([['eel', 'cat'], [], ['cat', 'cat']], SEQUENCE(TEXT), ['cat', 'eel'], [[1, 1], [0, 0], [1, 0]]),
    ([[0, 1, -1], [0, 0, 0]], SEQUENCE(datasets.Value('int8'), length=3), ['0', '1', '2'], [[0, 1, -1], [0, 0, 0]]),
    ([[0, 1, 1], [0, 1, 0]], SEQUENCE(INTEGER), ['0', '1', '2'], [[0, 1, 1], [0, 1, 0]]),
    ([[0., 1.], [1., 0.]], SEQUENCE(datasets.Value('float32')), ['0', '1'], [[0, 1], [1, 0]]),
    ([[True, False], [True, True]], SEQUENCE(datasets.Value('bool')), ['0', '1'], [[1, 0], [1, 1]]),
    ([[0], [1]], SEQUENCE(INTEGER), ['0', '1'], [[1, 0], [0, 1]]),
    ([[0, 1], [1, 0]], SEQUENCE(INTEGER), ['0', '1'], [[1, 1], [1, 1]]),
])
def test_every_kind_of_labels_is_read(tmp_path, labels, feature, names, targets):
    reader = ReaderHfdsMultiLabel('data', root=save(make(labels, feature), tmp_path / 'data').parent)
    assert reader.class_names == names
    assert reader.class_to_idx == {name: index for index, name in enumerate(names)}
    assert reader.targets.dtype == torch.int8 and reader.targets.tolist() == targets
    file, target = reader[1]
    assert target.dtype == torch.float32 and target.tolist() == targets[1]
    with file:
        assert Image.open(file).getpixel((0, 0)) == (1, 0, 0)


def test_paths_with_two_dots_are_refused_unless_they_are_names_of_bytes(tmp_path):
    features = datasets.Features({'image': TEXT, 'labels': SEQUENCE(CLASSES)})
    for path in ('../a.png', 'x/../../a.png'):
        save(datasets.Dataset.from_dict({'image': [path], 'labels': [[0]]}, features=features), tmp_path / 'data')
        with raises_error(rf"data set 'data' lists {path}, and '..' is refused.*write absolute paths"):
            ReaderHfdsMultiLabel('data', root=tmp_path)
    features = datasets.Features({'image': datasets.Image(), 'labels': SEQUENCE(CLASSES)})
    rows = {'image': [{'bytes': png(1), 'path': '../a.png'}], 'labels': [[0]]}
    save(datasets.Dataset.from_dict(rows, features=features), tmp_path / 'named')
    assert len(MultiLabelDataset(ReaderHfdsMultiLabel('named', root=tmp_path))[0]) == 2


@pytest.mark.parametrize('labels, feature, names, targets', [
    ([[0, 2], [1]], SEQUENCE(CLASSES), ['eel', 'cat', 'dog'], [[1, 1, 0], [0, 0, 1]]),
    ([[0, 2], [1]], SEQUENCE(INTEGER), ['a', 'b', 'c', 'd'], [[1, 0, 1, 0], [0, 1, 0, 0]]),
    ([['b'], ['a']], SEQUENCE(TEXT), ['c', 'b', 'a'], [[0, 1, 0], [0, 0, 1]]),
    ([[0, 1], [0, 0]], SEQUENCE(INTEGER, length=2), ['a', 'b'], [[0, 1], [0, 0]]),
    ([[0, 0], [1, 1]], SEQUENCE(INTEGER), ['a', 'b', 'c'], [[1, 0, 0], [0, 1, 0]]),
])
def test_class_names_order_the_targets(tmp_path, labels, feature, names, targets):
    save(make(labels, feature), tmp_path)
    reader = ReaderHfdsMultiLabel('', root=tmp_path, class_names=names)
    assert reader.class_names == names
    assert reader.targets.tolist() == targets


def test_a_folder_is_found_as_root_as_name_in_root_and_as_name(tmp_path):
    folder = save(make([[0]], SEQUENCE(CLASSES)), tmp_path / 'data')
    for name, root in (('', folder), ('anything', folder), ('data', tmp_path), (str(folder), None)):
        reader = ReaderHfdsMultiLabel(name, root=root)
        assert len(reader) == 1 and reader.root == str(folder)


@pytest.mark.parametrize('present, asked, found', [
    (('train', 'validation', 'test'), 'validation', 'validation'),
    (('train', 'val', 'test'), 'validation', 'val'),
    (('train', 'valid', 'test'), 'validation', 'valid'),
    (('train', 'test'), 'validation', 'test'),
    (('training', 'test'), 'train', 'training'),
    (('train', 'validation', 'test'), 'test', 'test'),
    (('train', 'odd'), 'odd', 'odd'),
])
def test_timms_names_of_splits_find_the_data_sets_own(tmp_path, present, asked, found):
    splits = {name: make([[0]] * (2 + index), SEQUENCE(CLASSES)) for index, name in enumerate(present)}
    save(datasets.DatasetDict(splits), tmp_path)
    assert len(ReaderHfdsMultiLabel('', root=tmp_path, split=asked)) == len(splits[found])


def test_test_is_never_taken_from_validation():
    assert 'validation' not in split_names('test')
    assert split_names('validation')[:3] == ('validation', 'val', 'valid') and split_names('validation')[-1] == 'test'


def test_an_absent_split_lists_those_present(tmp_path):
    save(datasets.DatasetDict({'train': make([[0]], SEQUENCE(CLASSES))}), tmp_path / 'two')
    save(make([[0]], SEQUENCE(CLASSES)), tmp_path / 'one')
    for name in ('one', 'two'):
        with raises_error(rf"'{name}' has no split 'validation'\. Its splits: train\."):
            ReaderHfdsMultiLabel(name, root=tmp_path, split='validation')


@pytest.mark.parametrize('feature, train, val, names', [
    (SEQUENCE(TEXT), [['a']], [['c'], ['b']], ['a', 'b', 'c']),
    (SEQUENCE(INTEGER), [[1]], [[2], []], ['0', '1', '2']),
])
def test_classes_that_nobody_names_are_those_of_all_splits(tmp_path, feature, train, val, names):
    save(datasets.DatasetDict({'train': make(train, feature), 'val': make(val, feature)}), tmp_path)
    for split in ('train', 'validation'):
        assert ReaderHfdsMultiLabel('', root=tmp_path, split=split).class_names == names


def test_columns_are_found_by_type_then_by_name(tmp_path):
    features = datasets.Features({
        'id': INTEGER, 'photo': datasets.Image(), 'label': CLASSES, 'objects': SEQUENCE(CLASSES),
        'tags': SEQUENCE(TEXT), 'flags': SEQUENCE(INTEGER, length=2)})
    row = {
        'id': [1], 'photo': [{'bytes': png(0), 'path': None}], 'label': [0], 'objects': [[1]], 'tags': [['a']],
        'flags': [[0, 1]]}
    dataset = datasets.Dataset.from_dict(row, features=features)
    reader = ReaderHfdsMultiLabel('', root=save(dataset, tmp_path / 'all'))
    assert (reader.image_column, reader.label_column) == ('photo', 'objects')
    reader = ReaderHfdsMultiLabel('', root=tmp_path / 'all', label_column='tags')
    assert reader.class_names == ['a']
    save(dataset.remove_columns(['objects', 'label']), tmp_path / 'flags')
    assert ReaderHfdsMultiLabel('', root=tmp_path / 'flags').label_column == 'flags'
    save(dataset.remove_columns(['objects', 'label', 'flags']), tmp_path / 'tags')
    assert ReaderHfdsMultiLabel('', root=tmp_path / 'tags').label_column == 'tags'


def test_single_and_multi_label_columns_are_distinguished():
    assert hfds_is_multi_label(make([[0]], SEQUENCE(CLASSES)))
    assert hfds_is_multi_label(make([[0, 1]], SEQUENCE(INTEGER, length=2), column='target'))
    assert hfds_is_multi_label(make([0], CLASSES, tags=(SEQUENCE(TEXT), [['a']])), 'tags')
    assert not hfds_is_multi_label(make([0], CLASSES, column='label'))
    assert not hfds_is_multi_label(make([0], INTEGER, column='label'))
    assert not hfds_is_multi_label(make([0], CLASSES, 'label', box=(SEQUENCE(INTEGER, length=4), [[0, 0, 2, 2]])))
    assert not hfds_is_multi_label(make([0], INTEGER, column='number'))


def test_a_single_label_is_refused_by_the_reader(tmp_path):
    save(make([0], CLASSES, column='label'), tmp_path)
    assert not hfds_is_multi_label(load_hfds('', root=tmp_path))
    with raises_error(r'Expected a column with a sequence of labels .* are for timm'):
        ReaderHfdsMultiLabel('', root=tmp_path)


@pytest.mark.parametrize('labels, feature, kwargs, message', [
    ([['cat'], ['dgo']], SEQUENCE(TEXT), {'class_names': ['cat', 'dog']}, "'dgo' in row 1 .*did you mean 'dog'"),
    ([[0], [7]], SEQUENCE(INTEGER), {'class_names': ['cat', 'dog']}, 'indices of 2 classes in row 1 .* but got 7'),
    ([[0, 5]], SEQUENCE(INTEGER, length=2), {}, r'2 values among 0, 1 and -1 in row 0 .*, but got \[0, 5\]'),
    ([[0, 1]], SEQUENCE(INTEGER, length=2), {'class_names': ['a']}, 'Expected 1 values'),
    ([[]], SEQUENCE(TEXT), {}, "Column 'labels' of .* has no labels. Set --class-map"),
    ([None], SEQUENCE(TEXT), {'class_names': ['a']}, "Column 'labels' is empty in row 0"),
    ([[0]], SEQUENCE(CLASSES), {'label_column': 'lables'}, "--target-key to be one of image, labels, but got 'lables'"),
    ([[0]], SEQUENCE(CLASSES), {'image_column': 'img'}, "--input-key to be one of image, labels, but got 'img'"),
    ([[['a']]], SEQUENCE(SEQUENCE(TEXT)), {}, 'Expected a sequence of classes, indices or names'),
])
def test_errors_say_what_is_wrong(tmp_path, labels, feature, kwargs, message):
    save(make(labels, feature), tmp_path)
    with raises_error(message):
        ReaderHfdsMultiLabel('', root=tmp_path, **kwargs)


def test_an_ambiguous_column_is_asked_for(tmp_path):
    save(make([[0]], SEQUENCE(CLASSES), column='one', two=(SEQUENCE(CLASSES), [[0]])), tmp_path)
    with raises_error('Expected one column of labels, but got one, two'):
        ReaderHfdsMultiLabel('', root=tmp_path)


def test_a_missing_package_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, 'datasets', None)
    with raises_error(r"pip install 'timm-splicemix\[hfds\]'"):
        ReaderHfdsMultiLabel('', root=tmp_path)


def test_anything_else_is_loaded_from_the_hub_into_root(monkeypatch, tmp_path):
    calls = []

    def load_dataset(name, **kwargs):
        calls.append((name, kwargs))
        rows = make([[0]] * 4, SEQUENCE(CLASSES))
        return rows.select(range(1)) if 'split' in kwargs else datasets.DatasetDict({'train': rows, 'test': rows})

    monkeypatch.setattr(datasets, 'load_dataset', load_dataset)
    assert len(ReaderHfdsMultiLabel('someone/some', root=tmp_path, split='validation')) == 4
    assert calls == [('someone/some', {'cache_dir': str(tmp_path)})]
    assert len(ReaderHfdsMultiLabel('someone/some', root=tmp_path, split='train[:25%]')) == 1
    assert calls[-1] == ('someone/some', {'cache_dir': str(tmp_path), 'split': 'train[:25%]'})


def test_images_are_not_decoded_to_read_labels(monkeypatch, tmp_path):
    save(make([[0]], SEQUENCE(CLASSES)), tmp_path)
    monkeypatch.setattr(datasets.Image, 'decode_example', lambda *args, **kwargs: pytest.fail('decoded'))
    reader = ReaderHfdsMultiLabel('', root=tmp_path)
    assert reader[0][0].read() == png(0)


def test_names_are_paths_where_there_are_paths(tmp_path):
    (tmp_path / 'there.png').write_bytes(png(9))
    features = datasets.Features({'image': datasets.Image(), 'labels': SEQUENCE(CLASSES)})
    images = [{'bytes': png(0), 'path': 'images/in.png'}, {'bytes': png(0), 'path': None}]
    images += [{'bytes': None, 'path': str(tmp_path / 'there.png')}, None]
    rows = datasets.Dataset.from_dict({'image': images, 'labels': [[0]] * 4}, features=features)
    rows.save_to_disk(str(tmp_path / 'data'))
    reader = ReaderHfdsMultiLabel('data', root=tmp_path)
    assert reader.filenames()[:2] == ['in.png', 'data:1']  # save_to_disk drops folders
    assert reader.filename(0, basename=True) == reader.filename(0, absolute=True, basename=True) == 'in.png'
    assert reader.filename(2, basename=True) == 'there.png'
    with pytest.raises(OSError, match="Cannot read image data:3: column 'image' is empty"):
        MultiLabelDataset(reader)[3]


def test_an_image_outside_of_the_data_set_is_opened(monkeypatch, tmp_path):
    (tmp_path / 'there.png').write_bytes(png(9))
    features = datasets.Features({'image': datasets.Image(), 'labels': SEQUENCE(CLASSES)})
    row = {'image': [str(tmp_path / 'there.png')], 'labels': [[0]]}
    rows = datasets.Dataset.from_dict(row, features=features)
    monkeypatch.setattr(datasets, 'load_dataset', lambda name, cache_dir: datasets.DatasetDict({'train': rows}))
    reader = ReaderHfdsMultiLabel('some')
    assert reader.filename(0) == reader.filename(0, absolute=True) == str(tmp_path / 'there.png')
    with reader[0][0] as file:
        assert file.read() == png(9)


def test_a_saved_format_does_not_matter(tmp_path):
    save(make([[0, 1], [1, 1]], SEQUENCE(INTEGER, length=2)).with_format('torch'), tmp_path)
    reader = ReaderHfdsMultiLabel('', root=tmp_path)
    assert reader.targets.tolist() == [[0, 1], [1, 1]] and reader[0][0].read() == png(0)


@pytest.mark.parametrize('context', ['fork', pytest.param('spawn', marks=pytest.mark.slow)])
def test_workers_read_it(tmp_path, context):
    save(make([[index % 3] for index in range(10)], SEQUENCE(CLASSES)), tmp_path)
    dataset = MultiLabelDataset(ReaderHfdsMultiLabel('', root=tmp_path), transform=shade)
    loader = torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=2, multiprocessing_context=context)
    shades, targets = (torch.cat(parts) for parts in zip(*loader))
    assert shades.tolist() == list(range(10))
    assert targets.argmax(1).tolist() == [index % 3 for index in range(10)]
    assert len(pickle.loads(pickle.dumps(dataset))) == 10


def shade(image):
    return image.getpixel((0, 0))[0]
