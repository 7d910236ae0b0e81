""" Work that a run does not do for every update: ask the other processes, look up file names, draw curves """
import itertools
import os
import signal

import pytest
import torch

from timm_splicemix.data import MultiLabelLoader
from timm_splicemix.run import signals, trainer

from .runs import train, train_until


@pytest.fixture
def group(tmp_path):
    torch.distributed.init_process_group('gloo', f'file://{tmp_path}/store', rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize('seconds, most', [(0.01, 30), (0.5, 530), (3., 1000)])
def test_processes_ask_each_other_about_once_a_second(group, monkeypatch, seconds, most):
    now, asked = [0.], []
    all_reduce = torch.distributed.all_reduce
    monkeypatch.setattr(signals.time, 'monotonic', lambda: now[0])
    monkeypatch.setattr(torch.distributed, 'all_reduce', lambda *args, **kwargs: (
        asked.append(now[0]), all_reduce(*args, **kwargs)))

    def update():
        now[0] += seconds
        return stop.requested()

    with signals.StopRequest(group) as stop:
        assert not any(update() for _ in range(1000))
        assert len(asked) <= most
        assert max(later - earlier for earlier, later in itertools.pairwise(asked)) <= max(2., seconds + 0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        received = now[0]
        while not update():
            pass
        assert now[0] - received <= max(2., seconds + 0.01)
        stop.restart()  # such as in an evaluation, whose batches take another time
        assert update()


def test_file_names_are_looked_up_for_errors_only(data, tmp_path, monkeypatch):
    monkeypatch.setattr(MultiLabelLoader, 'filenames', lambda *_: pytest.fail('looked up'))
    train(data, tmp_path, '--epochs', '1')


@pytest.mark.slow
def test_curves_of_short_epochs_are_drawn_at_the_beginning_and_at_the_end(data, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(trainer, 'draw_curves', lambda rows, path: drawn.append(len(rows)) or True)
    train(data, tmp_path, '--epochs', '4')
    assert drawn == [1, 4]
    train_until(3, 1, data, tmp_path, '--epochs', '4', name='stopped')
    assert drawn == [1, 4, 1, 3]
