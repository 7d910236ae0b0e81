""" Prediction for users """
import csv
import json

import pytest
import torch
from PIL import Image

from tests.evaluations import CLASSES, logits_of, quiet, write_checkpoint, write_data  # noqa: F401
from timm_splicemix.draw import draw_predictions
from timm_splicemix.metrics import Thresholds, save_thresholds
from timm_splicemix.predict import main
from timm_splicemix.run.predictor import choose, find_images


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp('predict')
    write_checkpoint(folder / 'run')
    write_data(folder / 'data', number=3, splits=('val',))
    return folder


def predict(place, *more):
    main(['--checkpoint', str(place / 'run' / 'model_best.pth.tar'), *map(str, more)])


def refusal(capsys, place, *more):
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        predict(place, *more)
    assert caught.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_each_image_has_its_classes_and_probabilities(place, tmp_path, capsys):
    predict(place, place / 'data', '--thresholds', 0.4, '--output', tmp_path / 'out.json', '-b', 2)
    rows = json.loads((tmp_path / 'out.json').read_text())
    probabilities = logits_of(place).sigmoid()
    assert [row['image'] for row in rows] == [str(place / 'data' / f'val_{index:02d}.png') for index in range(3)]
    printed = capsys.readouterr().out
    for row, values in zip(rows, probabilities.tolist()):
        assert row['probabilities'] == pytest.approx(dict(zip(CLASSES, values)), abs=1e-4)
        assert row['labels'] == {name: value for name, value in row['probabilities'].items() if value >= 0.4}
        assert list(row['labels'].values()) == sorted(row['labels'].values(), reverse=True)
        words = ', '.join(f'{name} {value:.2f}' for name, value in row['labels'].items()) or 'nothing'
        assert f'{row["image"]}: {words}' in printed


def test_folders_are_looked_through_and_each_image_comes_once(place, tmp_path):
    deep = tmp_path / 'a' / 'b'
    deep.mkdir(parents=True)
    for name in ('x.JPG', 'y.png'):
        Image.new('RGB', (8, 8)).save(deep / name)
    (deep / 'notes.txt').write_text('no image')
    Image.new('RGB', (8, 8)).save(tmp_path / 'odd.dat', format='PNG')
    files = find_images([str(deep / 'y.png'), str(tmp_path), str(tmp_path / 'odd.dat')])
    assert [file.name for file in files] == ['y.png', 'x.JPG', 'odd.dat']


def test_a_bad_image_is_named_and_the_rest_goes_on(place, tmp_path, capsys):
    for index, color in enumerate(('red', 'green')):
        Image.new('RGB', (40, 40), color).save(tmp_path / f'{index}.png')
    (tmp_path / '0b.png').write_bytes(b'nothing')
    with pytest.raises(SystemExit) as caught:
        predict(place, tmp_path, '--output', tmp_path / 'out.csv', '--draw', tmp_path / 'sheet.png', '-b', 1)
    assert caught.value.code == 1
    captured = capsys.readouterr()
    assert '0b.png cannot be read' in captured.err and '1 of 3 image(s)' in captured.err
    with open(tmp_path / 'out.csv') as file:
        rows = list(csv.DictReader(file))
    assert [bool(row['error']) for row in rows] == [False, True, False]
    assert rows[1]['p(cat)'] == '' and 0 < float(rows[2]['p(cat)']) < 1
    with Image.open(tmp_path / 'sheet.png') as sheet:
        assert sheet.getcolors(1 << 20) and (255, 0, 0) in {color for _, color in sheet.getcolors(1 << 20)}


def test_thresholds_of_classes_and_flips_are_used(place, tmp_path):
    probabilities = logits_of(place, flip=False).sigmoid(), logits_of(place, flip=True).sigmoid()
    mean = (probabilities[0] + probabilities[1]) / 2
    save_thresholds(Thresholds((0., 1., 0.), CLASSES), tmp_path / 'thresholds.json')
    predict(place, place / 'data' / 'val_01.png', '--thresholds', tmp_path / 'thresholds.json', '--tta', 'flip',
            '--output', tmp_path / 'out.json')
    row, = json.loads((tmp_path / 'out.json').read_text())
    assert set(row['labels']) == {'bird', 'dog'}
    assert list(row['probabilities'].values()) == pytest.approx(mean[1].tolist(), abs=1e-4)


def test_classes_are_chosen_by_threshold_and_number():
    values = torch.tensor([0.2, 0.9, 0.5], dtype=torch.float64)
    half = torch.tensor([0.5], dtype=torch.float64)
    assert list(choose(values, half, CLASSES, None, True)) == ['cat', 'dog']
    assert list(choose(values, half, CLASSES, 1, True)) == ['cat']
    assert list(choose(values, half, CLASSES, None, False)) == ['cat']
    assert list(choose(values, half, CLASSES, 2, False)) == ['cat', 'dog']


def test_a_sheet_has_a_place_for_each_image():
    cards = [(Image.new('RGB', (20, 10), 'blue'), 'a very long name of a file.png', {'cat': 0.9}),
             (Image.new('RGB', (30, 30), 'lime'), 'b.png', {})]
    wide, tall = draw_predictions(cards, 40, columns=2), draw_predictions(cards, 40, columns=1)
    assert wide.width > tall.width and wide.height < tall.height
    colors = {color: number for number, color in wide.getcolors(1 << 20)}
    assert colors[(0, 0, 255)] == 200 and colors[(0, 255, 0)] == 900


def test_bad_input_is_one_line(place, capsys, tmp_path):
    (tmp_path / 'empty').mkdir()
    image = place / 'data' / 'val_00.png'
    (tmp_path / 'classes.txt').write_text('a\nb\n')
    for flags, message in (
            ([tmp_path / 'empty'], 'Expected images in'),
            ([tmp_path / 'nowhere.png'], 'does not exist'),
            ([image, '--thresholds', 'tune'], 'which needs validate.py'),
            ([image, '--output', 'out.xml'], '.json or .csv'),
            ([image, '--draw', 'out.xml'], 'image format'),
            ([image, '--columns', '2'], '--draw with --columns'),
            ([image, '--top', '0'], '--top: Expected a whole number of at least 1'),
            ([image, '--class-map', tmp_path / 'classes.txt'], 'Expected 3 classes'),
            ([image, '--checkpoint', tmp_path / 'no.pth'], 'which is not a file'),
            ([image, '--use-ema'], '--use-ema'),
            ([image, '--batch-size', '0'], '--batch-size')):
        line = refusal(capsys, place, *flags)
        assert message in line
