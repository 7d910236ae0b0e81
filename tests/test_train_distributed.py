""" Training and mixing in two processes """
import json
import sys

import pytest
import torch

import timm_splicemix as tsm

from .runs import summary, train, train_command, weights

TORCHRUN = (sys.executable, '-m', 'torch.distributed.run', '--nproc-per-node', '2', '--standalone')
DRAW = '''
import json, sys
import torch
import timm_splicemix as tsm

torch.distributed.init_process_group('gloo')
mixer = tsm.SpliceMix('2x3', seed=5)
mixer.set_step(2, 9)
record, = mixer.plan(12).records
rank = torch.distributed.get_rank()
with open(f'{sys.argv[1]}/{rank}.json', 'w') as file:
    json.dump(record.sources.tolist(), file)
torch.distributed.destroy_process_group()
'''


def two_processes(data, output, *flags):
    return [*TORCHRUN, *train_command(data, output, *flags, name='two')[1:]]


def assert_same_summaries(folder, other, **tolerance):
    for row, other_row in zip(summary(folder), summary(other), strict=True):
        for name, value in row.items():
            assert float(value) == pytest.approx(float(other_row[name]), **tolerance), name


@pytest.mark.slow
def test_each_process_draws_its_own_records(run, tmp_path):
    script = tmp_path / 'script.py'
    script.write_text(DRAW)
    done = run(*TORCHRUN, script, tmp_path)
    assert done.returncode == 0, done.stderr
    drawn = [json.loads((tmp_path / f'{rank}.json').read_text()) for rank in (0, 1)]
    assert drawn[0] != drawn[1]
    for rank in (0, 1):
        mixer = tsm.SpliceMix('2x3', seed=5, rank=rank)
        mixer.set_step(2, 9)
        assert mixer.plan(12).records[0].sources.tolist() == drawn[rank]


@pytest.mark.curves  # which the other processes draw, too
def test_two_processes_train_like_one_with_both_batches(data, run, tmp_path):
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
    assert_same_summaries(one, two, rel=1e-4, abs=1e-5)
    # Only the primary process logs.
    assert done.stderr.count('Training test_resnet') == 1
    assert done.stderr.count('Epoch 1: EMA mAP') == 1
