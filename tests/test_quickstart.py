""" The quickstart works as described in the README: as a command, and as `make quickstart` """
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
from PIL import Image, ImageChops, ImageStat

from tests.analyses import check_refused, random_scores, write_result, write_run
from tests.conftest import REPOSITORY
from tests.helpers import rng
from timm_splicemix import quickstart, train, validate
from timm_splicemix.results import read_results
from timm_splicemix.run.compare import compare_results

PICTURE = REPOSITORY / 'docs' / 'splicemix.png'
SMALL = ('--images', '64', '--epochs', '2')
LOCK = '''
import fcntl, os, sys
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.lockf(file, fcntl.LOCK_EX)
print('locked', flush=True)
sys.stdin.read()
'''


def plan(tmp_path, name, *flags):
    args = quickstart.parse_args(['--output', str(tmp_path), *flags])
    job = quickstart.plan_run(name, tmp_path / 'runs', (tmp_path / 'shapes', tmp_path / 'train'), args)
    return job.commands


def test_the_runs_differ_in_the_flags_of_splicemix_alone(tmp_path):
    parsed = {}
    for name in quickstart.ARMS:
        (command, *flags), *evaluations = plan(tmp_path, name, '--seed', '3')
        assert command == 'train' and [words[0] for words in evaluations] == ['validate', 'validate']
        parsed[name] = vars(train.build_parser().parse_args(flags))
        sizes = [validate.build_parser().parse_args(words[1:]).eval_sizes for words in evaluations]
        assert sizes == [[parsed[name]['img_size'] // 2], None]
    plain = parsed['plain']
    assert not plain['splicemix_grids'] and plain['seed'] == 3 and plain['epochs'] == 100
    own = {'experiment', 'splicemix_grids', 'splicemix_cl'}
    assert all({key for key in plain if plain[key] != other[key]} <= own for other in parsed.values())
    assert {name: (bool(args['splicemix_grids']), args['splicemix_cl']) for name, args in parsed.items()} == {
        'plain': (False, 0.), 'splicemix': (True, 0.), 'splicemix-cl': (True, 1.)}


def test_only_what_is_not_finished_is_done(tmp_path):
    run = tmp_path / 'runs' / 'splicemix'
    run.mkdir(parents=True)
    write_run(run, [None, None, 60.])
    (run / 'last.pth.tar').touch()
    assert [words[0] for words in plan(tmp_path, 'splicemix')] == ['train', 'validate', 'validate']
    assert plan(tmp_path, 'splicemix')[0][-2:] == ['--resume', str(run)]
    write_run(run, [60.] * 100)
    assert [words[0] for words in plan(tmp_path, 'splicemix')] == ['validate', 'validate']
    (run / 'val').mkdir()
    (run / 'val' / 'results.json').touch()
    remaining, = plan(tmp_path, 'splicemix')
    assert remaining[remaining.index('--split') + 1] == 'val_unbiased'
    assert [words[0] for words in plan(tmp_path, 'splicemix', '--epochs', '120')] == ['train', 'validate', 'validate']


def test_the_table_has_the_differences_and_intervals_of_compare(tmp_path):
    targets = (torch.rand(40, 3, generator=rng()) < 0.5).to(torch.int8)
    for seed, name in enumerate(quickstart.ARMS):
        for place in quickstart.COLUMNS:
            write_result(tmp_path / name / place, random_scores(targets, 'abc', seed + len(place)))
    rows = quickstart.compare_runs(tmp_path)
    assert [row['mAP'] for row in rows] == ['plain', 'splicemix', 'splicemix-cl']
    for place, title in quickstart.COLUMNS.items():
        expected = compare_results(read_results([tmp_path / name / place for name in quickstart.ARMS]))['results']
        assert rows[0][title] == f'{expected[0]["metrics"]["mAP"]:.1f}'
        for row, result in zip(rows[1:], expected[1:]):
            numbers = result['metrics']['mAP'], result['difference']['mAP'], *result['mAP_interval']
            assert [float(text) for text in re.findall(r'[-+]?\d+\.\d', row[title])] == [round(n, 1) for n in numbers]


def test_two_quickstarts_never_write_to_the_same_folder(tmp_path, capsys):
    folder = tmp_path / 'images64-epochs2-seed0'
    folder.mkdir()
    command = [sys.executable, '-c', LOCK, str(folder / '.lock')]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b'locked\n'
        words = f'Another process uses the folder {folder}'
        check_refused(quickstart.main, ['--output', tmp_path, *SMALL], words, capsys)
        other.stdin.close()


def start(output):
    environment = {**os.environ, 'PYTHONPATH': str(REPOSITORY)}
    return subprocess.Popen(
        [sys.executable, '-m', 'timm_splicemix.cli', 'quickstart', '--output', str(output), *SMALL], env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
def test_a_stopped_quickstart_resumes_and_repeats_nothing(tmp_path):
    stopped = start(tmp_path)
    lines = []
    for line in stopped.stdout:
        lines.append(line)
        if 'epoch 1/2' in line:
            stopped.send_signal(signal.SIGINT)
            break
    text = ''.join(lines) + stopped.communicate(timeout=1200)[0]
    assert stopped.returncode == 130, text
    assert text.endswith('Stopped. The same command resumes the runs.\n') and 'evaluating' not in text
    folder = tmp_path / 'images64-epochs2-seed0'
    logs = [path.read_text() for path in folder.glob('*.log')]
    assert len(logs) == 3 and any('The state is saved' in log for log in logs)

    resumed = start(tmp_path)
    text = resumed.communicate(timeout=1200)[0]
    assert resumed.returncode == 0 and 'resuming' in text and 'epoch 2/2' in text, text
    assert text.count('epoch 1/2') + ''.join(lines).count('epoch 1/2') <= 3
    check_end(text, tmp_path, folder)
    files = [folder / name / 'last.pth.tar' for name in quickstart.ARMS]
    times = [path.stat().st_mtime_ns for path in files]

    again = start(tmp_path)
    text = again.communicate(timeout=1200)[0]
    assert again.returncode == 0 and text.count('finished before') == 3, text
    assert 'training' not in text.partition('training images')[0]
    assert [path.stat().st_mtime_ns for path in files] == times
    check_end(text, tmp_path, folder)


def check_end(text, output, folder):
    """Check the table, the pictures and the report at the end of a quickstart; returns rows of numbers."""
    report = folder / 'report.html'
    assert text.splitlines()[-2:] == [f'Mixed batch  {output / "preview.png"}', f'Report       {report}']
    page = report.read_text(encoding='utf-8')
    assert all(f'{name}/val_unbiased' in page for name in quickstart.ARMS)
    header, *rows = text.partition(', seed 0:\n\n')[2].partition('\n\n')[0].splitlines()
    assert re.split('  +', header) == ['mAP', *quickstart.COLUMNS.values()]
    table = {row.split()[0]: [float(number) for number in re.findall(r'[-+]?\d+\.\d', row)] for row in rows}
    assert {name: len(numbers) for name, numbers in table.items()} == {'plain': 3, 'splicemix': 12, 'splicemix-cl': 12}
    return table


@pytest.mark.slow
def test_make_quickstart_shows_a_gain_with_few_images(run, tmp_path):
    done = run(  # in the environment of the tests
        'make', 'quickstart', '--no-print-directory', '--old-file', f'{sys.prefix}/.timm-splicemix-installed',
        VENV=sys.prefix, QUICKSTART_DIR=str(tmp_path), timeout=3000, OMP_NUM_THREADS='')
    assert done.returncode == 0, done.stderr
    table = check_end(done.stdout, tmp_path, tmp_path / 'images200-epochs100-seed0')
    assert table['plain'][0] > 50, table
    gains = [table[name][column] for name in ('splicemix', 'splicemix-cl') for column in (1, 9)]  # val, half size
    assert min(gains) > 0, table

    drawn, shown = (Image.open(path).convert('RGB') for path in (tmp_path / 'preview.png', PICTURE))
    assert drawn.size == shown.size
    difference = ImageStat.Stat(ImageChops.difference(drawn, shown)).mean
    assert max(difference) < 1.  # fonts and JPEG differ slightly between versions
