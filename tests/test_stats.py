import builtins

import pytest
import torch
from PIL import Image

from timm_splicemix.data.check import main as check
from timm_splicemix.data.stats import co_occurrence, format_stats, main, top_pairs

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
    return folder


def test_what_comes_together_is_counted():
    assert co_occurrence(TARGETS).tolist() == [[3, 2, 0], [2, 2, 0], [0, 0, 1]]
    assert top_pairs(co_occurrence(TARGETS), 5) == [(0, 1, 2)]


def test_the_table_says_what_is_there():
    lines = format_stats(TARGETS, NAMES, 5).splitlines()
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


def test_without_matplotlib_a_line_says_so_and_nothing_fails(root, tmp_path, capsys, caplog, monkeypatch):
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
    (['--dataset', 'cvs'], "but got 'cvs'"),
])
def test_bad_input_is_one_line_and_exit_code_2(root, capsys, flags, message):
    with pytest.raises(SystemExit) as caught:
        main(['--data-dir', str(root), *flags])
    error = capsys.readouterr().err
    assert caught.value.code == 2 and message in error and error.count('\n') == 1


def test_a_data_set_with_one_class_per_image_is_refused(tmp_path, capsys):
    (tmp_path / 'cat').mkdir()
    Image.new('RGB', (4, 4)).save(tmp_path / 'cat' / 'a.png')
    with pytest.raises(SystemExit):
        main(['--data-dir', str(tmp_path)])
    assert 'Expected a multi-label data set' in capsys.readouterr().err


@pytest.mark.parametrize('workers', ['0', '2'])
@pytest.mark.parametrize('decoder', ['pil', 'torchvision'])
def test_check_finds_every_file_that_can_not_be_read(root, capsys, workers, decoder):
    flags = ['--dataset', 'csv', '--data-dir', str(root), '--workers', workers, '--decoder', decoder]
    check(flags)
    assert capsys.readouterr().out == '5 images, 0 that can not be read\n'
    (root / '1.jpg').write_bytes((root / '1.jpg').read_bytes()[:200])
    (root / '3.jpg').unlink()
    with pytest.raises(SystemExit) as caught:
        check(flags)
    assert caught.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f'{root}/1.jpg: ') and lines[1].startswith(f'{root}/3.jpg: ')
    assert lines[2] == '5 images, 2 that can not be read'


def test_check_refuses_streams(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        check(['--dataset', 'wds/x', '--data-dir', str(tmp_path), '--class-map', 'none.txt'])
    assert caught.value.code == 2 and capsys.readouterr().err.count('\n') == 1
