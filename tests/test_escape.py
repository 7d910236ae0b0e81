""" Odd names of classes and files in what commands print and write """
import csv
import re

import pytest
from PIL import Image

from timm_splicemix.check import main as check
from timm_splicemix.predict import main as predict
from timm_splicemix.results import read_result
from timm_splicemix.stats import main as stats
from timm_splicemix.train import main as train
from timm_splicemix.validate import main as validate

from .evaluations import quiet  # noqa: F401
from .runs import TINY, make_images

NAMES = ('=1+1', '-red\x1b[31m', 'x\x07\u202ey')
CONTROL = re.compile('[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]')


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    """A data set with odd names, and a run on it."""
    place = tmp_path_factory.mktemp('place')
    data = make_images(place / 'data', num_train=8, num_val=5)
    labels = data / 'labels.csv'
    rest = labels.read_text().split('\n', 1)[1]
    labels.write_text('\n'.join([','.join(['image', 'split', *NAMES]), rest.replace('12.png', '-12\x1b[2J.png')]))
    (data / '12.png').rename(data / '-12\x1b[2J.png')
    train([*TINY, '--epochs', '1', '--data-dir', str(data), '--output', str(place), '--experiment', 'run'])
    return place


def test_the_terminal_shows_control_characters_escaped(place, capfd, tmp_path):
    data = place / 'data'
    flags = ['--dataset', 'csv', '--data-dir', str(data)]
    validate([*flags, '--checkpoint', str(place / 'run'), '-j', '0', '--output', str(tmp_path / 'validate')])
    predict(['--checkpoint', str(place / 'run'), str(data), '--thresholds', '0'])
    stats(flags)
    (data / '\x1b]0;bad\x07.png').write_bytes(b'no image')
    with pytest.raises(SystemExit):
        predict(['--checkpoint', str(place / 'run'), str(data)])
    (data / '\x1b]0;bad\x07.png').unlink()
    out, err = capfd.readouterr()
    assert not CONTROL.search(out + err)
    assert r'-red\x1b[31m' in out and r'-12\x1b[2J.png: ' in out and r'\x1b]0;bad\x07.png cannot be read' in err
    assert r'-red\x1b[31m' in err  # the log


def test_errors_and_bad_images_are_escaped(place, capfd, tmp_path):
    data = make_images(tmp_path / 'data', num_train=2, num_val=2)
    (data / '0.png').rename(data / '0\x1b[1m.png')
    (data / '0\x1b[1m.png').write_bytes(b'')
    labels = data / 'labels.csv'
    labels.write_text(labels.read_text().replace('0.png', '0\x1b[1m.png'))
    with pytest.raises(SystemExit):
        check(['--dataset', 'csv', '--data-dir', str(data), '--workers', '0'])
    with pytest.raises(SystemExit):
        train([*TINY, '-b', '2', '--data-dir', str(data), '--output', str(tmp_path)])
    out, err = capfd.readouterr()
    assert not CONTROL.search(out + err)
    assert r'0\x1b[1m.png: ' in out and r'0\x1b[1m.png' in err.splitlines()[-1]


def test_csv_results_are_escaped_and_read_back(place, tmp_path):
    flags = ['--dataset', 'csv', '--data-dir', str(place / 'data'), '--checkpoint', str(place / 'run'), '-j', '0']
    validate([*flags, '--output', str(tmp_path / 'out')])
    assert set(read_result(tmp_path / 'out').classes) == set(NAMES)
    Image.new('RGB', (32, 32)).save(tmp_path / 'a.png')
    predict(['--checkpoint', str(place / 'run'), str(tmp_path / 'a.png'), '--output', str(tmp_path / 'p.csv'),
             '--thresholds', '0', '--top', '1'])
    for path in (tmp_path / 'out' / 'per_class_ap.csv', tmp_path / 'p.csv'):
        with open(path, newline='') as file:
            cells = [cell for row in csv.reader(file) for cell in row]
        assert not [cell for cell in cells if re.match(r'[=+@\t\r]|-(?![\d.])', cell)]
    with open(tmp_path / 'out' / 'per_class_ap.csv', newline='') as file:
        assert {row['class'] for row in csv.DictReader(file)} == {"'=1+1", "'-red\x1b[31m", NAMES[2]}
