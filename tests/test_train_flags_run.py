""" Effects of the flags of train.py for the course and the output of a run """
import logging
import re
import sys
import types

import pytest
import torch

from timm_splicemix.run.read import read_checkpoint

from .helpers import raises_error
from .runs import make_images, summary, train, weights
from .train_flags import build, shows

ONE_BATCH = ('--train-batches-per-epoch', '1')


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp('flags') / 'images')


@pytest.fixture(scope='module')
def finished(data, tmp_path_factory):
    """A run of three epochs that is evaluated once and saves images."""
    return train(
        data, tmp_path_factory.mktemp('finished'), '--epochs', '3', '--val-interval', '3', '--save-images',
        '--log-interval', '3', '--splicemix-grids', '2x2', '--sched', 'none')


@shows('val_interval', 'save_images', 'log_interval')
def test_a_run_evaluates_and_saves_images_at_intervals(finished):
    assert [bool(row['eval_mAP']) for row in summary(finished)] == [False, False, True]
    pictures = {path.name for path in finished.glob('train-batch-*.jpg')}
    assert pictures == {f'train-batch-{epoch}-{batch}.jpg' for epoch in range(3) for batch in (0, 3)}


@pytest.mark.parametrize('flags', [('--mixup', '0.5'), ('--cutmix', '1'), ('--resizemix',)])
def test_images_of_other_mixers_are_captioned_as_mixed(data, tmp_path, monkeypatch, flags):
    texts = []
    monkeypatch.setattr('PIL.ImageDraw.ImageDraw.text', lambda self, place, text, **kwargs: texts.append(text))
    run = build(data, '--save-images', *flags)
    run.train_loader.set_epoch(0)
    run.before_batch(0, *next(iter(run.train_loader)))
    run.lock.release()
    assert (run.folder / 'train-batch-0-0.jpg').is_file()
    words = ' '.join(text.replace('\n', ' ') for text in texts)
    assert words.startswith('0 regular and 4 mixed images') and len(re.findall(r'#\d \+ #\d', words)) >= 3


@pytest.mark.slow
@shows('log_interval')
def test_log_lines_appear_at_the_interval(data, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    train(data, tmp_path, '--epochs', '1', '--log-interval', '1')
    every = sum('Train 0:' in line for line in caplog.messages)
    caplog.clear()
    train(data, tmp_path, '--epochs', '1', '--log-interval', '3', name='other')
    assert (every, sum('Train 0:' in line for line in caplog.messages)) == (4, 2)


@shows('output', 'experiment')
def test_a_run_writes_to_the_given_folder(data, finished, tmp_path, monkeypatch):
    assert (finished / 'last.pth.tar').is_file() and finished.name == 'run'
    assert build(data).folder.parent == data.parent / 'output'
    monkeypatch.chdir(tmp_path)
    folder = build(data, '--output', '', '--experiment', '').folder
    assert folder.parent.as_posix() == 'output/train' and folder.name.endswith('test_resnet-64')


@shows('resume', 'no_resume_opt', 'start_epoch')
def test_a_run_resumes_with_or_without_its_optimizer(data, finished):
    momentum = read_checkpoint(finished / 'last.pth.tar')['optimizer']['state'][0]['momentum_buffer']
    run = build(data, '--resume', finished, '--splicemix-grids', '2x2', '--epochs', '5')
    assert run.start_epoch == 3
    saved = weights(finished / 'last.pth.tar')
    assert all(torch.equal(value, saved[name]) for name, value in run.task.get_eval_model().state_dict().items())
    loaded = [state['momentum_buffer'] for state in run.optimizer.state.values()]
    assert any(value.shape == momentum.shape and torch.equal(value, momentum) for value in loaded)
    run = build(data, '--resume', finished, '--splicemix-grids', '2x2', '--epochs', '5', '--no-resume-opt')
    assert not run.optimizer.state
    assert torch.equal(run.task.get_eval_model().fc.weight, saved['fc.weight'])
    flags = ('--resume', finished, '--epochs', '5', '--start-epoch', '1')
    assert build(data, *flags).start_epoch == 1
    assert build(data, '--start-epoch', '4', '--epochs', '5').start_epoch == 4


@pytest.mark.slow
@shows('recovery_interval')
def test_recovery_checkpoints_are_saved_at_the_interval(data, monkeypatch):
    for flags, expected in ((('--recovery-interval', '3'), [3]), ((), [])):
        run = build(data, '--epochs', '1', *flags)
        saved = []
        save = run.saver.save_recovery

        def note(epoch, batch, saved=saved, save=save):
            path = save(epoch, batch)
            assert path.is_file()
            saved.append(batch)

        monkeypatch.setattr(run.saver, 'save_recovery', note)
        run.train()
        assert saved == expected
        assert not list(run.folder.glob('recovery-*'))  # the epoch came to its end


@pytest.mark.slow
@shows('checkpoint_hist', 'eval_metric', 'patience')
def test_the_best_checkpoints_are_kept_and_a_run_without_progress_stops(data):
    names = ['mAP', 'loss', *(f'{name}{top}' for name in ('CP', 'CR', 'CF1', 'OP', 'OR', 'OF1') for top in ('', '_3'))]

    def train_with(metrics, *flags):
        run = build(data, *ONE_BATCH, '--epochs', str(len(metrics)), *flags)
        values = iter(metrics)
        run._evaluate = lambda: {**dict.fromkeys(names, 0.), run.args.eval_metric: next(values)}
        run.train()
        return run, {path.name for path in run.folder.glob('checkpoint-*')}

    run, kept = train_with([1., 3., 2.], '--checkpoint-hist', '2')
    assert kept == {'checkpoint-1.pth.tar', 'checkpoint-2.pth.tar'} and run.saver.best_epoch == 1
    run, _ = train_with([1., 3., 2.], '--eval-metric', 'loss')
    assert run.saver.best_epoch == 0
    run, _ = train_with([1., 3., 2.], '--eval-metric', 'CF1')
    assert (run.saver.best_epoch, run.saver.best_metric) == (1, 3.)
    run, kept = train_with([3., 2., 1., 4.], '--patience', '2')
    assert len(kept) == 3 and run.epoch == 2


@shows('metrics')
def test_metrics_have_the_given_definition(data, finished, tmp_path):
    flags = ('--resume', finished / 'last.pth.tar', '--epochs', '4', '--start-epoch', '3', *ONE_BATCH)
    rows = [
        summary(train(data, tmp_path, *flags, '--metrics', preset, name=preset))[-1]
        for preset in ('paper', 'asl')]
    assert rows[0]['eval_mAP'] == rows[1]['eval_mAP']
    assert rows[0]['eval_CF1'] != rows[1]['eval_CF1']


class FakeRun:
    def __init__(self):
        self.options = self.finished = None
        self.logged = []

    def init(self, **options):
        self.options = options
        return self

    def log(self, values):
        self.logged.append(dict(values))

    def finish(self):
        self.finished = True


@shows('log_wandb', 'wandb_project', 'wandb_tags', 'wandb_resume_id')
def test_metrics_are_logged_to_wandb(data, tmp_path, monkeypatch):
    wandb = FakeRun()
    module = types.ModuleType('wandb')
    module.init, module.log = wandb.init, wandb.log
    monkeypatch.setitem(sys.modules, 'wandb', module)
    flags = ('--wandb-project', 'fruit', '--wandb-tags', 'red', 'round', '--wandb-resume-id', 'id7')
    train(data, tmp_path, *ONE_BATCH, '--epochs', '1', *flags, name='off')
    assert wandb.options is None
    train(data, tmp_path, *ONE_BATCH, '--epochs', '1', *flags, '--log-wandb')
    options = wandb.options
    assert (options['project'], options['tags'], options['id'], options['name']) == (
        'fruit', ['red', 'round'], 'id7', 'run')
    assert options['config']['lr'] == 0.05
    assert wandb.finished and len(wandb.logged) == 1 and 'eval_mAP' in wandb.logged[0]


@shows('log_wandb')
def test_a_missing_wandb_is_an_error(data, monkeypatch):
    monkeypatch.setitem(sys.modules, 'wandb', None)
    with raises_error('--log-wandb requires Weights & Biases: pip install wandb'):
        build(data, '--log-wandb')


@shows('log_tensorboard')
def test_metrics_are_logged_to_tensorboard(data, tmp_path, monkeypatch):
    scalars = {}

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            self.folder = folder

        def add_scalar(self, name, value, epoch):
            scalars[name, epoch] = value

        def flush(self):
            scalars['flushed'] = True

        def close(self):
            scalars['closed'] = self.folder

    module = types.ModuleType('torch.utils.tensorboard')
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, 'torch.utils.tensorboard', module)
    train(data, tmp_path, *ONE_BATCH, '--epochs', '1', name='off')
    assert not scalars
    folder = train(data, tmp_path, *ONE_BATCH, '--epochs', '1', '--log-tensorboard')
    assert scalars['closed'] == str(folder) and {('train/loss', 0), ('eval/mAP', 0), ('lr', 0)} <= scalars.keys()


@shows('log_tensorboard')
def test_a_missing_tensorboard_is_an_error(data, monkeypatch):
    monkeypatch.setitem(sys.modules, 'torch.utils.tensorboard', None)
    with raises_error('--log-tensorboard requires TensorBoard: pip install tensorboard'):
        build(data, '--log-tensorboard')
