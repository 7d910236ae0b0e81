""" Runs side by side, in real processes """
import re
import signal

import pytest

from timm_splicemix.run.checkpoint import has_checkpoints
from timm_splicemix.run.jobs import Job, run_jobs

from .conftest import REPOSITORY
from .runs import flags_of, summary

LINE = re.compile(
    r'^(\w+) +epoch (\d+)/(\d+)  loss \d\.\d{4}  (mAP [ \d]\d\.\d\d|  {7})  +[\d.]+ img/s  (\d+:\d\d) left$', re.M)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv('PYTHONPATH', str(REPOSITORY))


def make_job(data, folder, name, *flags, num_epochs=2, others=()):
    words = ['train', *flags_of(data, folder, '--epochs', num_epochs, '--val-interval', 2, *flags, name=name)]
    return Job(f'{name:<6}', folder / name, [words, *others], 'training', num_epochs, 16)


@pytest.mark.slow
def test_runs_show_a_line_for_each_epoch_and_do_their_commands_in_order(data, tmp_path, capsys):
    words = ['stats', '--dataset', 'csv', '--data-dir', str(data), '--split', 'val']
    first = make_job(data, tmp_path, 'first', others=[words])
    assert run_jobs([first, Job('second', tmp_path / 'second', [], 'training', 2, 16)], at_once=1)
    text = capsys.readouterr().out
    assert text.startswith('first   training\n') and text.endswith('first   finished\nsecond  finished before\n')
    lines = LINE.findall(text)
    assert [line[:3] for line in lines] == [('first', '1', '2'), ('first', '2', '2')]
    rows = summary(tmp_path / 'first')
    assert lines[0][3].strip() == '' and lines[1][3] == f'mAP {float(rows[1]["eval_mAP"]):5.2f}'
    assert lines[1][4] == '0:00'
    log = first.log.read_text()
    assert log.startswith('$ timm-splicemix train --dataset csv ') and '\n$ timm-splicemix stats ' in log
    assert 'Best epoch' in log and 'labels per image' in log


@pytest.mark.slow
def test_a_failing_run_shows_its_last_lines_and_the_others_save_and_stop(data, tmp_path, capsys):
    words = ['validate', '--dataset', 'csv', '--data-dir', str(data), '--checkpoint', str(tmp_path / 'missing')]
    bad = make_job(data, tmp_path, 'bad', num_epochs=1, others=[words])
    long = make_job(data, tmp_path, 'long', num_epochs=1000)  # it trains when the other one fails
    assert not run_jobs([bad, long, Job('never', tmp_path / 'never', [words], 'failing', 1, 1)], at_once=2)
    captured = capsys.readouterr()
    assert f'bad failed with exit code 2. Last lines of {bad.log}:\n' in captured.err
    assert re.search(r'^error: .*missing', captured.err, re.M) and captured.err.endswith('\nStopping long ...\n')
    assert long.process.returncode == 128 + signal.SIGTERM and has_checkpoints(long.folder)
    assert 'never' not in captured.out
