""" `make quickstart` works as described in the README """
import csv
import re
import shlex
import sys

import pytest
from PIL import Image, ImageChops, ImageStat

import timm_splicemix as tsm
from tests.conftest import REPOSITORY

PICTURE = REPOSITORY / 'docs' / 'splicemix.png'


@pytest.mark.slow
def test_quickstart_trains_a_model(run, tmp_path):
    done = run(  # in the environment of the tests
        'make', 'quickstart', '--old-file', f'{sys.prefix}/.timm-splicemix-installed', VENV=sys.prefix,
        QUICKSTART_DIR=str(tmp_path), timeout=1500, OMP_NUM_THREADS='')
    assert done.returncode == 0, done.stderr
    text = done.stdout + done.stderr

    drawn, shown = (Image.open(path).convert('RGB') for path in (tmp_path / 'preview.png', PICTURE))
    assert drawn.size == shown.size
    difference = ImageStat.Stat(ImageChops.difference(drawn, shown)).mean
    assert max(difference) < 1.  # fonts and JPEG differ slightly between versions

    # The mAP of an untrained model is the mean frequency of the classes.
    targets = tsm.create_dataset('shapes', tmp_path / 'shapes', 'validation').targets
    with open(tmp_path / 'run' / 'summary.csv', newline='') as file:
        best = max(float(row['eval_mAP']) for row in csv.DictReader(file))
    assert best >= 3 * 100 * (targets == 1).float().mean()

    assert re.search(r'mAP \d+\.\d+', text) and 'OF1' in text
    for name in ('model_best.pth.tar', 'curves.png'):
        assert str(tmp_path / 'run' / name) in text
        assert (tmp_path / 'run' / name).is_file()
    assert 'preview.png' in text
    command = shlex.split(re.search(r'Validate    (.*)', text)[1])
    validated = run(*command, '--output', tmp_path / 'validate', cwd=tmp_path)
    assert validated.returncode == 0, validated.stderr
    assert f'{best:.2f}' in validated.stdout + validated.stderr
