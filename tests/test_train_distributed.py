""" Training with two real processes """
import os
import signal
import subprocess
import sys

import pytest
import torch

from .conftest import REPOSITORY
from .runs import TINY, assert_same_weights, make_images, summary, train, weights

TORCHRUN = (sys.executable, '-m', 'torch.distributed.run', '--nproc-per-node', '2', '--standalone')


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp('data'))


def two_processes(data, output, *flags):
    return [*TORCHRUN, str(REPOSITORY / 'train.py'), *TINY, '--data-dir', str(data), '--output', str(output),
            '--experiment', 'two', *map(str, flags)]


def test_two_processes_train_like_one_with_the_batches_together(data, run, tmp_path):
    flags = ('--freeze-bn', '--opt', 'sgd', '--lr', '0.02', '--model-ema', '--grad-accum-steps', '2')
    one = train(data, tmp_path, *flags, '-b', '4', name='one')
    done = run(*two_processes(data, tmp_path, *flags, '-b', '2'))
    assert done.returncode == 0, done.stderr
    two = tmp_path / 'two'
    for key in ('state_dict', 'state_dict_ema'):
        left, right = weights(one / 'last.pth.tar', key), weights(two / 'last.pth.tar', key)
        assert left.keys() == right.keys()
        for name, value in left.items():
            assert torch.allclose(value, right[name], rtol=1e-4, atol=1e-6), name
    assert {path.name for path in one.iterdir()} == {path.name for path in two.iterdir()}
    for row, other in zip(summary(one), summary(two), strict=True):
        for name, value in row.items():
            assert float(value) == pytest.approx(float(other[name]), rel=1e-4, abs=1e-5), name
    # Only the first process writes and speaks.
    assert done.stderr.count('Training test_resnet') == 1
    assert done.stderr.count('Epoch 1: mAP') == 1


@pytest.mark.slow
def test_two_processes_mix_for_themselves_and_go_on_exactly_after_a_stop(data, tmp_path):
    flags = ('--splicemix-grids', '1x2,2x2', '--splicemix-cl', '--gp', 'max', '-b', '2', '--epochs', '4')
    environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(REPOSITORY)}
    whole = subprocess.run(
        two_processes(data, tmp_path / 'whole', *flags), env=environment, capture_output=True, text=True, timeout=300)
    assert whole.returncode == 0, whole.stderr
    process = subprocess.Popen(
        two_processes(data, tmp_path, *flags, '--log-interval', '1'), env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True)
    for line in process.stdout:
        if line.startswith('Train 1'):
            break
    process.send_signal(signal.SIGTERM)
    text = process.communicate(timeout=120)[0]
    assert process.returncode != 0
    assert 'The state is saved' in text, text
    assert len(list((tmp_path / 'two').glob('recovery-*.pth.tar'))) == 1
    resumed = subprocess.run(
        two_processes(data, tmp_path, *flags, '--resume', tmp_path / 'two'), env=environment, capture_output=True,
        text=True, timeout=300)
    assert resumed.returncode == 0, resumed.stderr
    assert_same_weights(tmp_path / 'whole' / 'two' / 'last.pth.tar', tmp_path / 'two' / 'last.pth.tar')
    for row, other in zip(summary(tmp_path / 'whole' / 'two'), summary(tmp_path / 'two'), strict=True):
        for name, value in row.items():
            assert float(value) == pytest.approx(float(other[name]), rel=1e-12), name
