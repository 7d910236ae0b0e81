""" The commands that a run prints work as they are """
import json
import logging
import shlex
import sys
from pathlib import Path

import pytest

from timm_splicemix.run.hints import program, resume_command

from .conftest import REPOSITORY
from .evaluations import quiet  # noqa: F401
from .runs import CLASSES, summary, train


def write_data(folder, images):
    """Labels in columns, in a split and with a class map that need a flag each."""
    folder.mkdir()
    rows = (images / 'labels.csv').read_text().splitlines()[1:]
    lines = ['photo,tags,part,labels']
    for row in rows:
        name, split, *labels = row.split(',')
        tags = '|'.join(name for name, there in zip(CLASSES, labels) if there == '1')
        lines.append(f'{name},{tags},{"fit" if split == "train" else "held out"},nonsense')
        (folder / name).write_bytes((images / name).read_bytes())
    (folder / 'all labels.csv').write_text('\n'.join(lines) + '\n')
    (folder / 'classes.txt').write_text('\n'.join(CLASSES[::-1]) + '\n')


@pytest.mark.slow
def test_the_command_at_the_end_of_a_run_evaluates_its_best_checkpoint(data, tmp_path, monkeypatch, caplog, run):
    caplog.set_level(logging.INFO)
    write_data(tmp_path / 'my data', data)
    monkeypatch.chdir(tmp_path)
    train(
        Path('my data'), Path('runs'), '--train-ann', 'all labels.csv', '--val-ann', 'my data/all labels.csv',
        '--class-map', 'classes.txt', '--csv-image-column', 'photo', '--csv-label-column', 'tags',
        '--csv-split-column', 'part', '--csv-delimiter', '|', '--csv-empty', 'unknown', '--train-split', 'fit',
        '--val-split', 'held out', '--metrics', 'asl', '--decoder', 'torchvision', '--epochs', '1')
    printed = next(line for line in caplog.text.splitlines() if 'Validate    ' in line).partition('Validate    ')[2]
    (tmp_path / 'elsewhere').mkdir()
    done = run(*shlex.split(printed), '--output', tmp_path / 'results', '-j', '0', cwd=tmp_path / 'elsewhere')
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / 'results' / 'results.json').read_text())
    epoch, = summary(tmp_path / 'runs' / 'run')
    assert result['num_images'] == 9 and result['preset'] == 'asl' and result['split'] == 'held out'
    assert result['metrics']['mAP'] == pytest.approx(float(epoch['eval_mAP']), abs=1e-3)


def test_commands_have_their_installed_name_if_they_are_installed(monkeypatch, tmp_path):
    monkeypatch.setenv('PATH', str(tmp_path))
    assert shlex.split(program('validate')) == [sys.executable, str(REPOSITORY / 'validate.py')]
    assert shlex.split(program('predict')) == [sys.executable, '-m', 'timm_splicemix.predict']
    command = tmp_path / 'timm-splicemix'
    command.write_text('')
    command.chmod(0o755)
    assert shlex.split(program('validate'))[0] == sys.executable  # it is of another environment
    monkeypatch.setattr(sys, 'executable', str(tmp_path / 'python'))
    assert program('validate') == 'timm-splicemix validate'
    assert resume_command(tmp_path / 'my run') == f"timm-splicemix train --resume '{tmp_path / 'my run'}'"
