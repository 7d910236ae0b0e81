""" Training from start to end: what a run writes, and how it resumes """
import os
import signal
import subprocess
import sys

import pytest
import timm
import torch
import yaml

import timm_splicemix as tsm
from timm_splicemix.run import trainer
from timm_splicemix.run.read import read_checkpoint
from timm_splicemix.train import main

from .conftest import REPOSITORY
from .runs import CLASSES, TINY, assert_same_weights, summary, train, train_command, train_until, weights

pytestmark = pytest.mark.curves  # they compare all files of runs
MIXED = ('--splicemix-grids', '1x2,2x2', '--splicemix-cl', '--gp', 'max')
# Everything that draws at random or has a state
EVERYTHING = (
    *MIXED, '--model-ema', '--drop', '0.3', '--momentum', '0.9', '--reprob', '0.5', '--grad-accum-steps', '2',
    '--epochs', '3', '--sched', 'cosine', '--sched-on-updates')


@pytest.fixture(scope='module')
def whole_run(data, tmp_path_factory):
    return train(data, tmp_path_factory.mktemp('whole'), *EVERYTHING)


def assert_same_runs(folder, other):
    assert summary(folder) == summary(other)
    for key in ('state_dict', 'state_dict_ema'):
        assert_same_weights(folder / 'last.pth.tar', other / 'last.pth.tar', key)
    assert {path.name for path in folder.iterdir()} == {path.name for path in other.iterdir()}
    ours, theirs = (read_checkpoint(run / 'last.pth.tar')['timm_splicemix'] for run in (folder, other))
    for key in ('best_metric', 'best_epoch', 'checkpoint_files'):
        assert ours[key] == theirs[key]


# --- what a run writes ---


@pytest.mark.slow
def test_a_run_can_be_understood_and_repeated_from_its_output_folder(data, tmp_path):
    folder = train(data, tmp_path, *MIXED)
    names = {path.name for path in folder.iterdir()}
    assert names == {
        'args.yaml', 'checkpoint-0.pth.tar', 'checkpoint-1.pth.tar', 'classes.txt', 'curves.png', 'environment.yaml',
        'last.pth.tar', 'model_best.pth.tar', 'summary.csv'}
    assert (folder / 'classes.txt').read_text().split() == list(CLASSES)
    rows = summary(folder)
    assert [row['epoch'] for row in rows] == ['0', '1']
    for row in rows:
        parts = float(row['train_task_loss']) + float(row['train_consistency_loss'])
        assert float(row['train_loss']) == pytest.approx(parts, abs=1e-6)
        assert 0 <= float(row['eval_mAP']) <= 100
    environment = yaml.safe_load((folder / 'environment.yaml').read_text())
    assert environment['torch'] == str(torch.__version__)
    assert environment['timm_splicemix'] == tsm.__version__

    main(['--config', str(folder / 'args.yaml'), '--experiment', 'again'])
    assert summary(tmp_path / 'again') == rows
    assert_same_weights(folder / 'last.pth.tar', tmp_path / 'again' / 'last.pth.tar')


def test_another_seed_makes_another_run(data, tmp_path):
    left, right = (
        weights(train(data, tmp_path, '--epochs', '1', '--seed', seed, name=seed) / 'last.pth.tar')
        for seed in ('42', '43'))
    assert not torch.equal(left['conv1.0.weight'], right['conv1.0.weight'])


def test_timm_loads_the_checkpoint(data, tmp_path):
    checkpoint = train(data, tmp_path, *MIXED, '--epochs', '1') / 'last.pth.tar'
    model = timm.create_model('test_resnet', num_classes=3, global_pool='max', checkpoint_path=str(checkpoint))
    plain = timm.create_model('test_resnet', num_classes=3)
    assert weights(checkpoint).keys() == plain.state_dict().keys()
    rebuilt, info = tsm.load_checkpoint(checkpoint)
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(model.eval()(images), rebuilt(images))
    assert info.class_names == CLASSES
    assert info.data_config['input_size'] == (3, 64, 64)
    assert info.multi_label


def test_a_new_run_does_not_overwrite_another_run(data, tmp_path):
    first = train(data, tmp_path, '--epochs', '1')
    before = {path.name: path.read_bytes() for path in first.iterdir()}
    train(data, tmp_path, '--epochs', '1', '--seed', '5')
    assert {path.name: path.read_bytes() for path in first.iterdir()} == before
    assert (tmp_path / 'run-2' / 'last.pth.tar').is_file()


def test_pretrained_weights_of_other_classes_are_loaded_without_the_classifier(data, tmp_path):
    torch.manual_seed(7)
    source = timm.create_model('test_resnet', num_classes=9)
    torch.save(source.state_dict(), tmp_path / 'weights.pth')
    run = train(data, tmp_path, '--epochs', '1', '--lr', '0', '--freeze-bn', '--pretrained-path',
                tmp_path / 'weights.pth')
    found = weights(run / 'last.pth.tar')
    for name, value in source.state_dict().items():
        if not name.startswith('fc.'):
            assert torch.equal(found[name], value), name


def test_a_run_without_matplotlib_logs_once_that_it_draws_no_curves(data, tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, 'matplotlib', None)  # as if it were not installed
    folder = train(data, tmp_path)
    assert not (folder / 'curves.png').exists()
    assert len(summary(folder)) == 2
    assert caplog.text.count("pip install 'timm-splicemix[plot]'") == 1


# --- resuming ---


@pytest.mark.parametrize('workers', ['0', pytest.param('2', marks=pytest.mark.slow)])
@pytest.mark.parametrize('epoch, batch', [(0, 1), (1, 2), (2, 3)])
def test_a_run_stopped_in_an_epoch_resumes_exactly(data, whole_run, tmp_path, caplog, epoch, batch, workers):
    folder = train_until(epoch, batch, data, tmp_path, *EVERYTHING, '-j', workers)
    assert '--resume' in caplog.text
    assert len(list(folder.glob('recovery-*'))) == 1
    train(data, tmp_path, *EVERYTHING, '-j', workers, '--resume', folder)
    assert_same_runs(folder, whole_run)


def test_a_run_stopped_in_an_evaluation_resumes_exactly(data, whole_run, tmp_path, monkeypatch):
    evaluate = trainer.evaluate

    def evaluate_and_signal(*args):
        if ' 1' in args[5]:
            os.kill(os.getpid(), signal.SIGINT)
        return evaluate(*args)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stopped:
        patch.setattr(trainer, 'evaluate', evaluate_and_signal)
        train(data, tmp_path, *EVERYTHING)
    assert stopped.value.code == 128 + signal.SIGINT
    assert [path.name for path in (tmp_path / 'run').glob('recovery-*')] == ['recovery-1-4.pth.tar']
    train(data, tmp_path, *EVERYTHING, '--resume', tmp_path / 'run')
    assert_same_runs(tmp_path / 'run', whole_run)


def test_a_run_resumes_exactly_at_the_end_of_an_epoch(data, whole_run, tmp_path):
    flags = [*EVERYTHING, '--checkpoint-hist', '10']
    folder = train_until(2, 0, data, tmp_path, *flags)
    train(data, tmp_path, *flags, '--resume', folder / 'checkpoint-1.pth.tar')
    assert_same_runs(folder, whole_run)


def test_the_output_folder_is_enough_to_resume(data, whole_run, tmp_path):
    folder = train_until(1, 2, data, tmp_path, *EVERYTHING)
    main(['--resume', str(folder)])
    assert_same_runs(folder, whole_run)


def test_a_resumed_run_writes_to_the_folder_of_its_checkpoint(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = train_until(1, 0, data, tmp_path)
    main([*TINY, '--data-dir', str(data), '--resume', str(folder)])
    assert [row['epoch'] for row in summary(folder)] == ['0', '1']
    assert not (tmp_path / 'output').exists()


@pytest.mark.slow
def test_a_resumed_plateau_schedule_keeps_its_state(data, tmp_path):
    flags = ('--sched', 'plateau', '--patience-epochs', '0', '--epochs', '4', '--eval-metric', 'loss')
    whole = train(data, tmp_path, *flags, name='whole')
    stopped = train_until(3, 1, data, tmp_path, *flags, name='stopped')
    train(data, tmp_path, *flags, '--resume', stopped, name='stopped')
    assert [float(row['lr']) for row in summary(stopped)] == [float(row['lr']) for row in summary(whole)]
    assert_same_weights(whole / 'last.pth.tar', stopped / 'last.pth.tar')


@pytest.mark.slow
def test_a_resumed_run_keeps_the_best_checkpoints(data, tmp_path):
    flags = ('--epochs', '5', '--checkpoint-hist', '2')
    whole = train(data, tmp_path, *flags, name='whole')
    stopped = train_until(3, 1, data, tmp_path, *flags, name='stopped')
    train(data, tmp_path, *flags, '--resume', stopped, name='stopped')
    kept = {path.name for path in whole.glob('*.pth.tar')}
    assert len([name for name in kept if name.startswith('checkpoint-')]) == 2
    assert {path.name for path in stopped.glob('*.pth.tar')} == kept
    assert_same_weights(whole / 'model_best.pth.tar', stopped / 'model_best.pth.tar')
    metrics = [float(row['eval_mAP']) for row in summary(whole)]
    assert read_checkpoint(stopped / 'model_best.pth.tar')['metric'] == pytest.approx(max(metrics))


def test_a_run_can_resume_with_another_optimizer(data, tmp_path):
    folder = train(data, tmp_path, '--epochs', '1')
    train(data, tmp_path, '--epochs', '2', '--opt', 'adamw', '--lr', '1e-3', '--resume', folder, '--no-resume-opt')
    assert [row['epoch'] for row in summary(folder)] == ['0', '1']
    assert 'exp_avg' in next(iter(read_checkpoint(folder / 'last.pth.tar')['optimizer']['state'].values()))


def test_a_run_that_stopped_early_does_not_train_when_it_is_resumed(data, tmp_path):
    flags = ('--epochs', '9', '--patience', '1', '--lr', '0', '--sched', 'none', '--freeze-bn')
    folder = train(data, tmp_path, *flags)
    rows = summary(folder)
    assert len(rows) == 2  # the first epoch is the best one
    main(['--resume', str(folder)])
    assert summary(folder) == rows


def test_a_run_with_another_loss_resumes_from_its_settings(data, tmp_path):
    folder = train(data, tmp_path, '--loss', 'asl', '--epochs', '1')
    main(['--resume', str(folder), '--epochs', '2'])
    assert [row['epoch'] for row in summary(folder)] == ['0', '1']


# --- other processes ---


def environment():
    return {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(REPOSITORY)}


def test_a_run_that_receives_a_signal_saves_before_it_exits(data, tmp_path):
    process = subprocess.Popen(
        train_command(data, tmp_path, '--epochs', '500', '--log-interval', '1'), env=environment(),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for line in process.stdout:
        if line.startswith('Train 1'):
            break
    process.send_signal(signal.SIGINT)
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 130, text
    assert 'Stopped by SIGINT' in text and '--resume' in text
    assert len(list((tmp_path / 'run').glob('recovery-*.pth.tar'))) == 1
