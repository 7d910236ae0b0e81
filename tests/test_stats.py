import builtins
import tarfile

import pytest
import torch
from PIL import Image

from timm_splicemix.check import main as check
from timm_splicemix.data.statistics import co_occurrence, format_statistics, top_pairs
from timm_splicemix.preview import main as preview
from timm_splicemix.stats import main

from .runs import make_images

TARGETS = torch.tensor([[1, 1, 0], [1, 1, 0], [1, 0, -1], [0, 0, 1], [0, 0, 0]], dtype=torch.int8)
NAMES = ['cat', 'dog', 'bird']


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / 'data'
    folder.mkdir()
    labels = ['cat;dog', 'cat;dog', 'cat', 'bird', '']
    rows = ''.join(f'{index}.jpg,{label}\n' for index, label in enumerate(labels))
    (folder / 'train.csv').write_text('image,labels\n' + rows)
    for index in range(5):
        Image.new('RGB', (9, 7)).save(folder / f'{index}.jpg')
    (folder / 'absent_image.csv').write_text('image,labels\nnowhere.jpg,cat\n')
    (folder / 'twice.csv').write_text('image,labels\n0.jpg,cat\n./0.jpg,dog;cat\n')
    (folder / 'empty.csv').write_text('image,labels\n')
    return folder


def test_co_occurrence_is_counted():
    assert co_occurrence(TARGETS).tolist() == [[3, 2, 0], [2, 2, 0], [0, 0, 1]]
    assert top_pairs(co_occurrence(TARGETS), 5) == [(0, 1, 2)]


def test_the_table_lists_classes_and_pairs():
    lines = format_statistics(TARGETS, NAMES, 5).splitlines()
    assert lines[0] == '5 images, 3 classes, 6 labels: 1.20 per image (0 to 2)'
    assert lines[1] == 'labels per image: 0: 1, 1: 2, 2: 2'
    assert [line.split() for line in lines[3:7]] == [
        ['class', 'images', 'part', 'unknown'], ['cat', '3', '60.00%', '0'], ['dog', '2', '40.00%', '0'],
        ['bird', '1', '20.00%', '1']]
    assert lines[-1].split() == ['cat', '+', 'dog', '2', '66.7%', '100.0%']


def test_the_command_prints_and_draws(root, tmp_path, capsys):
    output = tmp_path / 'new' / 'stats.png'
    main(['--dataset', 'csv', '--data-dir', str(root), '--output', str(output)])
    printed = capsys.readouterr().out
    assert printed.startswith('5 images, 3 classes, 6 labels') and f'plot: {output}' in printed
    assert Image.open(output).width > 1000
    assert list(output.parent.iterdir()) == [output]


def test_hidden_labels_are_seen(root, capsys):
    main(['--dataset', 'csv', '--data-dir', str(root), '--keep-labels', 'single'])
    assert capsys.readouterr().out.startswith('5 images, 3 classes, 4 labels')


def test_without_matplotlib_a_warning_replaces_the_plot(root, tmp_path, capsys, caplog, monkeypatch):
    real_import = builtins.__import__

    def no_matplotlib(name, *args, **kwargs):
        if name.startswith('matplotlib'):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, '__import__', no_matplotlib)
    main(['--dataset', 'csv', '--data-dir', str(root), '--output', str(tmp_path / 'stats.png')])
    assert "pip install 'timm-splicemix[plot]'" in caplog.text
    assert '5 images' in capsys.readouterr().out and not (tmp_path / 'stats.png').exists()


@pytest.mark.parametrize('flags, message', [
    (['--dataset', 'csv', '--output', 'stats.docx'], 'stats.docx'),
    (['--dataset', 'csv', '--split', 'validation'], 'csv'),
    (['--dataset', 'csv', '--class-order', 'name'], 'class_order'),
    (['--dataset', 'voc/2007', '--csv-delimiter', ';'], 'label_delimiter'),
    (['--dataset', 'csv', '--keep-labels', '50'], "but got '50'"),
    (['--dataset', 'csv', '--class-map', 'nowhere.txt'], 'nowhere.txt'),
    (['--dataset', 'coco/2014'], 'instances_train2014.json'),
    (['--dataset', 'cvs'], "Unknown data set 'cvs'"),
    (['--dataset', 'csv', '--data-dir', '/no/such/folder'], '/no/such/folder'),
    (['--dataset', 'csv', '--train-ann', 'absent.csv'], 'absent.csv'),
    (['--dataset', 'csv', '--train-ann', 'absent_image.csv'], 'nowhere.jpg'),
    (['--dataset', 'csv', '--train-ann', 'twice.csv'], 'twice'),
    (['--dataset', 'csv', '--train-ann', 'empty.csv'], 'a header only'),
    (['--dataset', 'csv', '--csv-delimiter', ''], '--csv-delimiter'),
    (['--dataset', 'csv', '--dataset-download'], 'cannot be downloaded'),
    (['--dataset', 'voc/2007', '--data-dir', '/no/such/folder'], '/no/such/folder'),
    (['--dataset', 'coco', '--train-ann', 'train.csv'], 'is not in COCO format'),
    (['--dataset', 'folder', '--train-ann', 'empty.csv'], 'empty.csv'),
    (['--dataset', 'wds/nothing'], '--class-map'),
])
def test_bad_input_is_one_line_and_exit_code_2(root, capsys, flags, message):
    with pytest.raises(SystemExit) as caught:
        main(['--data-dir', str(root), *flags])
    errors = [line for line in capsys.readouterr().err.splitlines() if 'error: ' in line]
    assert caught.value.code == 2 and len(errors) == 1 and message in errors[0]


def test_a_data_set_with_one_class_per_image_is_refused(tmp_path, capsys):
    (tmp_path / 'cat').mkdir()
    Image.new('RGB', (4, 4)).save(tmp_path / 'cat' / 'a.png')
    with pytest.raises(SystemExit):
        main(['--data-dir', str(tmp_path)])
    assert 'Expected a multi-label data set' in capsys.readouterr().err


@pytest.mark.parametrize('workers', ['0', '2'])
@pytest.mark.parametrize('decoder', ['pil', 'torchvision'])
def test_check_finds_every_unreadable_file(root, capsys, workers, decoder):
    flags = ['--dataset', 'csv', '--data-dir', str(root), '--workers', workers, '--decoder', decoder]
    check(flags)
    assert capsys.readouterr().out == '5 images, 0 unreadable\n'
    (root / '1.jpg').write_bytes((root / '1.jpg').read_bytes()[:200])
    (root / '3.jpg').unlink()
    with pytest.raises(SystemExit) as caught:
        check(flags)
    assert caught.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f'{root}/1.jpg: ') and lines[1].startswith(f'{root}/3.jpg: ')
    assert lines[2] == '5 images, 2 unreadable'


def test_check_reads_folders_and_shards(tmp_path, capsys):
    (tmp_path / 'folders' / 'cat').mkdir(parents=True)
    Image.new('RGB', (4, 4)).save(tmp_path / 'folders' / 'cat' / 'a.png')
    (tmp_path / 'folders' / 'cat' / 'b.png').write_bytes(b'no image')
    with pytest.raises(SystemExit) as caught:
        check(['--data-dir', str(tmp_path / 'folders'), '--workers', '0'])
    lines = capsys.readouterr().out.splitlines()
    assert caught.value.code == 1 and lines[0].startswith(f'{tmp_path}/folders/cat/b.png: ')
    assert lines[1] == '2 images, 1 unreadable'

    (tmp_path / 'classes.txt').write_text('cat\ndog\n')
    with tarfile.open(tmp_path / 'train-0.tar', 'w') as tar:
        for key, image, label in (('a', 'folders/cat/a.png', 'cat'), ('b', 'folders/cat/b.png', 'dog'),
                                  ('c', 'folders/cat/a.png', 'dgo')):
            tar.add(tmp_path / image, f'{key}.png')
            (tmp_path / 'label.json').write_text(f'{{"labels": ["{label}"]}}')
            tar.add(tmp_path / 'label.json', f'{key}.json')
    with pytest.raises(SystemExit) as caught:
        check(['--dataset', 'wds/', '--data-dir', str(tmp_path), '--workers', '0'])
    lines = capsys.readouterr().out.splitlines()
    assert caught.value.code == 1 and len(lines) == 3
    assert 'train-0.tar:b.png' in lines[0] and "did you mean 'dog'" in lines[1]


def test_a_csv_file_without_splits_is_shown_as_a_whole(tmp_path, capsys):
    make_images(tmp_path, num_train=4, num_val=2)
    rows = [line.split(',') for line in (tmp_path / 'labels.csv').read_text().splitlines()]
    (tmp_path / 'labels.csv').write_text('\n'.join(','.join([row[0], *row[2:]]) for row in rows))
    for command, flags in ((main, ()), (check, ('--workers', '0')), (preview, ('--output', str(tmp_path / 'a.png')))):
        command(['--dataset', 'csv', '--data-dir', str(tmp_path), *flags])
    assert '6 images, 0 unreadable' in capsys.readouterr().out


def test_what_was_assumed_about_labels_is_logged(tmp_path, capsys):
    make_images(tmp_path, num_train=2, num_val=0)
    (tmp_path / 'train.csv').write_text('image,cat,dog\n0.png,1,\n1.png,1,1\n')
    for command, flags in ((main, ()), (check, ('--workers', '0')), (preview, ('--output', str(tmp_path / 'a.png')))):
        command(['--dataset', 'csv', '--data-dir', str(tmp_path), *flags])
        assert '1 empty cells in' in capsys.readouterr().err
