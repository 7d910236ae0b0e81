""" Signals to a whole process group, as a queue or Ctrl-C sends them, to real runs """
import os
import signal
import subprocess

import pytest

from .conftest import REPOSITORY
from .runs import assert_same_weights, make_images, summary, train_command

TORCHRUN = ('-m', 'torch.distributed.run', '--nproc-per-node', '2', '--standalone')
FLAGS = (
    '--epochs', '3', '--model-ema', '--splicemix-grids', '2x2', '--grad-accum-steps', '2', '--log-interval', '1',
    '--val-split', 'val')


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp('data'), num_train=48, num_val=160)


def start(data, output, *flags, processes=1):
    python, *command = train_command(data, output, *FLAGS, *flags)
    launcher = TORCHRUN if processes > 1 else ()
    environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(REPOSITORY)}
    return subprocess.Popen(
        [python, *launcher, *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True)


def finish(process):
    text = process.communicate(timeout=300)[0]
    assert process.returncode == 0, text
    return text


def read_until(process, beginning):
    """Read what a process prints until a line with this beginning."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(beginning):
            return ''.join(lines)
    raise AssertionError(''.join(lines))


def remember_runs(data, tmp_path_factory, *flags):
    """A function that returns the folder of an uninterrupted run with a number of processes; each is run once."""
    folders = {}

    def get(processes):
        if processes not in folders:
            output = tmp_path_factory.mktemp('whole')
            finish(start(data, output, *flags, '-b', 8 // processes, processes=processes))
            folders[processes] = output / 'run'
        return folders[processes]

    return get


@pytest.fixture(scope='module')
def whole_runs(data, tmp_path_factory):
    return remember_runs(data, tmp_path_factory, '-j', '0')


def assert_equal_runs(folder, other):
    assert summary(folder) == summary(other)
    for key in ('state_dict', 'state_dict_ema'):
        assert_same_weights(folder / 'last.pth.tar', other / 'last.pth.tar', key)


@pytest.mark.slow
@pytest.mark.parametrize('processes, workers, moment', [
    (1, 0, 'Train 1'), (1, 1, 'Train 1'), (1, 2, 'Train 1'), (1, 0, 'Validate 1'), (1, 1, 'Validate 1'),
    (1, 2, 'Validate 1 (EMA)'), (2, 0, 'Train 1'), (2, 1, 'Train 1'), (2, 2, 'Train 1'), (2, 2, 'Validate 1'),
])
def test_sigterm_to_the_process_group_saves_a_state_that_resumes_exactly(
        data, whole_runs, tmp_path, processes, workers, moment):
    flags = ('-j', workers, '-b', 8 // processes)
    process = start(data, tmp_path, *flags, processes=processes)
    read_until(process, moment)
    os.killpg(process.pid, signal.SIGTERM)
    text = process.communicate(timeout=120)[0]
    assert process.returncode not in (0, -signal.SIGKILL), text
    assert 'The state is saved' in text and 'DataLoader worker' not in text, text
    folder = tmp_path / 'run'
    found = [path.name for path in folder.glob('recovery-*')]
    assert found == ['recovery-1-6.pth.tar'] if moment.startswith('Validate') else len(found) == 1, found
    finish(start(data, tmp_path, *flags, '--resume', folder, processes=processes))
    assert_equal_runs(folder, whole_runs(processes))


@pytest.mark.slow
@pytest.mark.parametrize('flags', [
    ('--splicemix-cl', '--gp', 'max', '--epochs', '4'),
    ('--no-ddp-bb', '--dist-bn', ''),
    ('--recursivemix', '--splicemix-grids', ''),
], ids=' '.join)
def test_two_processes_resume_exactly_what_each_has_of_its_own(data, tmp_path, flags):
    flags = (*flags, '-b', 4, '-j', 0)
    finish(start(data, tmp_path / 'whole', *flags, processes=2))
    process = start(data, tmp_path, *flags, processes=2)
    read_until(process, 'Train 1')
    os.kill(process.pid, signal.SIGTERM)  # torchrun forwards it
    text = process.communicate(timeout=120)[0]
    assert 'The state is saved' in text, text
    assert len(list((tmp_path / 'run').glob('recovery-*.pth.tar'))) == 1
    finish(start(data, tmp_path, *flags, '--resume', tmp_path / 'run', processes=2))
    assert_equal_runs(tmp_path / 'run', tmp_path / 'whole' / 'run')


@pytest.mark.slow
def test_timeout_signals_twice_and_the_state_is_saved(data, tmp_path):
    process = start(data, tmp_path, '-j', '1', '--epochs', '500')
    read_until(process, 'Train 1')
    for number in (signal.SIGTERM, signal.SIGCONT, signal.SIGTERM):
        os.killpg(process.pid, number)
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + signal.SIGTERM, text
    assert 'Stopped by SIGTERM' in text


@pytest.mark.slow
def test_workers_end_with_the_run_that_is_killed(data, tmp_path):
    process = start(data, tmp_path, '-j', '2', '--epochs', '500')
    read_until(process, 'Train 1')
    process.kill()
    process.communicate(timeout=60)  # ends when the last of them closes the pipe
