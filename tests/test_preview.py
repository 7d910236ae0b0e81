import itertools
import sys

import pytest
import torch
from PIL import Image, ImageDraw

import timm_splicemix as tsm
from timm_splicemix.draw import describe_target, draw_batch, save_image
from timm_splicemix.errors import UsageError
from timm_splicemix.preview import main


@pytest.fixture
def folders(tmp_path):
    """A folder with one sub-folder per class, with a colour for each of the three classes."""
    for number, name in enumerate(('red', 'green', 'blue')):
        (tmp_path / 'data' / name).mkdir(parents=True)
        for index in range(4):
            colour = [0, 0, 0]
            colour[number] = 255
            Image.new('RGB', (20 + index, 14), tuple(colour)).save(tmp_path / 'data' / name / f'{index}.png')
    return tmp_path / 'data'


def test_preview_draws_the_batch_that_the_mixer_makes(folders, tmp_path, capsys):
    output = tmp_path / 'new' / 'preview.png'
    main([
        '--data-dir', str(folders), '--batch-size', '8', '--img-size', '32', '--splicemix-grids', '2x2',
        '--splicemix-drop-prob', '0', '--output', str(output)])
    assert capsys.readouterr().out == f'{output}: 8 regular and 2 mixed images\n'
    colours = {colour for _, colour in Image.open(output).convert('RGB').getcolors(100_000)}
    assert {(255, 0, 0), (0, 255, 0), (0, 0, 255)} <= colours
    assert not (tmp_path / 'new' / '.preview.png').exists() and len(list(output.parent.iterdir())) == 1


def test_dropped_cells_have_the_mean_colour(folders, tmp_path):
    def mean_pixels(grid):
        output = tmp_path / 'preview.png'
        main([
            '--data-dir', str(folders), '--batch-size', '8', '--img-size', '60', '--splicemix-grids', grid,
            '--output', str(output)])
        colours = {colour: count for count, colour in Image.open(output).convert('RGB').getcolors(100_000)}
        return colours.get((124, 116, 104), 0)

    assert mean_pixels('2x2-0') == 0
    assert mean_pixels('2x2-3') > 2 * 3 * 300  # of 2 mixed images, 3 cells of 30 x 30, less lines and words


def test_the_same_seed_gives_the_same_picture(folders, tmp_path):
    def draw(seed):
        output = tmp_path / f'{seed}.png'
        main(['--data-dir', str(folders), '--seed', str(seed), '--output', str(output)])
        return output.read_bytes()

    assert draw(0) == draw(0) != draw(1)


def test_without_grids_nothing_is_mixed(folders, tmp_path, capsys):
    main(['--data-dir', str(folders), '--splicemix-grids', '', '--output', str(tmp_path / 'p.png')])
    assert '12 regular images, not mixed' in capsys.readouterr().out


@pytest.mark.parametrize('flags, message', [
    (['--splicemix-grids', '2x'], "but got '2x'"),
    (['--splicemix-grids', '0x2'], 'at least 1x1'),
    (['--splicemix-grids', 'axb'], "but got 'axb'"),
    (['--splicemix-grids', '2x2-4'], 'at most 3 can be dropped'),
    (['--splicemix-grids', ','], 'Expected grids'),
    (['--splicemix-ratio', '-1'], 'Expected ratio'),
    (['--splicemix-ratio', 'half'], "'half'"),
    (['--splicemix-prob', '1.5'], '--splicemix-prob: Expected'),
    (['--splicemix-drop-prob', '-0.5'], '--splicemix-drop-prob: Expected'),
    (['--splicemix-drop-prob', 'x'], 'drop-prob'),
    (['--splicemix-mode', 'pair'], 'mode'),
    (['--batch-size', '0'], '--batch-size: Expected a whole number of at least 1'),
    (['--img-size', '-3'], '--img-size: Expected a whole number of at least 1'),
    (['--img-size', '1'], 'a pixel for each cell'),
    (['--columns', '0'], '--columns: Expected a whole number of at least 1'),
    (['--dataset', 'nonsense'], "Unknown data set 'nonsense'"),
    (['--data-dir', '/no/such/folder'], '/no/such/folder'),
    (['--dataset', 'shapes', '--split', 'nonsense'], "but got 'nonsense'"),
    (['--output', 'preview.docx'], 'preview.docx'),
    (['--output', 'preview.psd'], 'preview.psd'),
    (['--data-dir', 'empty'], 'Found 0 images'),
    (['--dataset', 'torch/nonsense'], 'torch/nonsense'),
    (['--dataset', 'torch/mnist'], 'torch/mnist'),
    (['--dataset', 'tfds/nonsense'], 'tfds/nonsense'),
    (['--nonsense'], '--nonsense'),
])
def test_bad_input_is_one_line_and_exit_code_2(folders, tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'empty').mkdir()
    with pytest.raises(SystemExit) as caught:
        main(['--data-dir', str(folders), '--splicemix-ratio', '0.5', *flags])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert message in error and error.count('\n') == 1
    assert not list(tmp_path.glob('*.png'))


@pytest.mark.slow
def test_the_command_reports_bad_input_without_a_traceback(run, tmp_path):
    done = run(sys.executable, '-m', 'timm_splicemix.preview', '--splicemix-grids', '2x2-4', cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith('error: Expected a grid') and done.stderr.count('\n') == 1
    assert done.stdout == ''


def test_an_unreadable_image_is_named(folders, tmp_path, capsys):
    for path in folders.rglob('*.png'):
        path.write_bytes(b'no image')
    with pytest.raises(SystemExit):
        main(['--data-dir', str(folders), '--output', str(tmp_path / 'p.png')])
    error = capsys.readouterr().err
    assert error.startswith(f'error: Cannot read image {folders}') and error.count('\n') == 1


def test_targets_are_described_by_their_known_values():
    names = ['cat', 'dog', 'bird', 'fish']
    assert describe_target(torch.tensor([1., 0., -1., 0.25]), names) == 'cat, bird?, fish 0.25'
    assert describe_target(torch.zeros(4), names) == 'nothing'


def test_regular_and_mixed_images_are_labelled_by_their_numbers(monkeypatch):
    texts = []
    monkeypatch.setattr(ImageDraw.ImageDraw, 'text', lambda self, place, text, **kwargs: texts.append(text))
    lines = []
    monkeypatch.setattr(ImageDraw.ImageDraw, 'line', lambda self, place, **kwargs: lines.append(place))
    record = tsm.SpliceRecord(tsm.Grid(1, 2), torch.tensor([[3, 1]]), torch.tensor([[False, True]]))
    plan = tsm.MixPlan(torch.tensor([2, 3]), (record,))
    images, targets = tsm.SpliceMix('1x2').apply(torch.zeros(4, 3, 80, 160, dtype=torch.uint8), torch.eye(4), plan)
    draw_batch(images, targets, plan, ['a', 'b', 'c', 'd'], 'title')
    assert texts == ['title', '#2: c', '#3: d', '#3', 'dropped', 'mixed 1x2: d']
    assert len(lines) == 2  # a cross through the dropped cell


def test_gray_images_streams_and_numbered_classes_can_be_drawn(tmp_path, monkeypatch, capsys):
    class Stream(torch.utils.data.IterableDataset):
        def __init__(self, transform):
            self.transform = transform

        def __iter__(self):
            return ((self.transform(Image.new('L', (9, 9), 20 * index)), index % 3) for index in itertools.count())

    monkeypatch.setattr('timm_splicemix.preview.create_dataset', lambda transform, **kwargs: Stream(transform))
    main(['--output', str(tmp_path / 'p.png'), '--batch-size', '8', '--splicemix-grids', '2x2-1'])
    assert '8 regular and 2 mixed images' in capsys.readouterr().out


def test_the_seed_chooses_the_mixing_too(folders, tmp_path, monkeypatch):
    seeds = []
    real = tsm.SpliceMix.__init__
    monkeypatch.setattr(tsm.SpliceMix, '__init__', lambda self, **kw: seeds.append(kw['seed']) or real(self, **kw))
    main(['--data-dir', str(folders), '--seed', '5', '--output', str(tmp_path / 'p.png')])
    assert seeds == [5]


def test_a_batch_of_any_shape_can_be_drawn():
    for height, width in ((30, 60), (60, 30)):
        images = torch.zeros(8, 3, height, width, dtype=torch.uint8)
        mixer = tsm.SpliceMix('2x3', ratio=1., batch='only')
        plan = mixer.plan(8)
        mixed, targets = mixer.apply(images, torch.eye(8), plan)
        sheet = draw_batch(mixed, targets, plan, list('abcdefgh'), 'title', columns=3)
        assert sheet.width == 3 * (width + 8) + 8 and sheet.height > 3 * height


def test_a_picture_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / 'a.png'
    path.write_bytes(b'old')

    def fail(*args, **kwargs):
        args[1].write_bytes(b'half')
        raise OSError('No space left on device')

    monkeypatch.setattr(Image.Image, 'save', fail)
    with pytest.raises(UsageError, match='No space'):
        save_image(Image.new('RGB', (4, 4)), path)
    assert path.read_bytes() == b'old' and list(tmp_path.iterdir()) == [path]
