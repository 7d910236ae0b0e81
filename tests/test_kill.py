""" Runs that are killed or stopped at random moments resume exactly """
import os
import random
import re
import signal
import subprocess
import time

import pytest

from timm_splicemix.run.read import read_checkpoint

from .runs import make_images
from .test_stop import assert_equal_runs, finish, remember_runs, start

pytestmark = pytest.mark.slow
FLAGS = ('--recovery-interval', '1', '--model-ema')


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp('data'), num_train=48, num_val=48)


@pytest.fixture(scope='module')
def whole_runs(data, tmp_path_factory):
    return remember_runs(data, tmp_path_factory, *FLAGS)


def children(pid):
    listed = subprocess.run(['ps', '-o', 'pid=', '--ppid', str(pid)], capture_output=True, text=True).stdout
    return [int(child) for child in listed.split()]


def end(process, fault, processes):
    """Let a fault happen to a run and wait until all its processes ended."""
    if fault == 'SIGTERM':
        os.killpg(process.pid, signal.SIGTERM)
    elif fault == 'kill one':  # of the ranks; torchrun ends the other one
        for child in children(process.pid)[:1] if processes > 1 else [process.pid]:
            os.kill(child, signal.SIGKILL)
    else:
        ranks = children(process.pid) if processes > 1 else []
        for pid in (process.pid, *ranks):
            os.kill(pid, signal.SIGKILL)
    return process.communicate(timeout=120)[0]


def interrupt_and_resume(data, whole, output, fault, processes, seed):
    """Interrupt a run after a random line of its log, resume it, compare it with the whole run; returns the line."""
    flags = (*FLAGS, '-j', seed % 3, '-b', 8 // processes)
    process = start(data, output, *flags, processes=processes)
    draws = random.Random(seed)
    last = draws.randrange(40)  # 3 lines of training and 12 of validation in each of 3 epochs
    lines = (line for line in process.stdout if re.match(r'Train \d|Validate \d', line))
    line = next(line for number, line in enumerate(lines) if number == last)
    time.sleep(draws.uniform(0, 0.2))
    end(process, fault, processes)
    folder = output / 'run'
    for path in folder.glob('[!.]*.pth.tar'):
        read_checkpoint(path)  # raises an error if it is truncated
    has_checkpoint = any(folder.glob('[lr]*.pth.tar'))  # last or recovery
    finish(start(data, output, *flags, *(('--resume', folder) if has_checkpoint else ()), processes=processes))
    assert_equal_runs(folder, whole)
    assert {path.name for path in folder.iterdir()} == {path.name for path in whole.iterdir()}
    return line


@pytest.mark.parametrize('fault, processes', [
    ('kill all', 1), ('kill all', 2), ('kill one', 2), ('SIGTERM', 1), ('SIGTERM', 2)])
@pytest.mark.parametrize('seed', [0, 1])
def test_a_fault_at_a_random_moment_loses_nothing(data, whole_runs, tmp_path, fault, processes, seed):
    interrupt_and_resume(data, whole_runs(processes), tmp_path, fault, processes, seed)
