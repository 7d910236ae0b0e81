""" Errors and ruined weights in the middle of an epoch, and what can be resumed after them """
import os
import shutil

import pytest

from timm_splicemix import train as train_module

from .runs import assert_same_weights, make_images, summary, train, train_until
from .test_stop import assert_equal_runs, finish, start

FLAGS = ('--model-ema', '--grad-accum-steps', '2', '--epochs', '3', '--splicemix-grids', '2x2')


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp('data'), num_train=24)


@pytest.fixture(scope='module')
def whole(data, tmp_path_factory):
    return train(data, tmp_path_factory.mktemp('whole'), *FLAGS)


class Breaks:
    """Breaks files of a data set when a hook of the trainer is called the n-th time, and repairs them."""

    def __init__(self, monkeypatch, hook, call, folder, pattern):
        self.files = {path: path.read_bytes() for path in folder.glob(pattern)}
        hooks = getattr(train_module.Trainer, hook)
        calls = []

        def broken(trainer, *args):
            calls.append(args)
            if len(calls) == call:
                for path in self.files:
                    path.write_bytes(b'') if len(self.files) == 1 else path.unlink()
            hooks(trainer, *args)

        monkeypatch.setattr(train_module.Trainer, hook, broken)

    def repair(self):
        for path, content in self.files.items():
            path.write_bytes(content)


@pytest.mark.parametrize('hook, call, pattern, saved', [
    ('before_batch', 9, '*.png', 'recovery-1-2.pth.tar'),  # the folder vanishes between two updates
    ('before_batch', 8, '*.png', 'recovery-1-2.pth.tar'),
    ('after_eval_batch', 7, '30.png', 'recovery-1-6.pth.tar'),  # an image of the second batch
], ids=['half an update', 'an update', 'evaluation'])
@pytest.mark.parametrize('workers', ['0', '1'])
def test_an_error_saves_the_last_update(
        data, whole, tmp_path, monkeypatch, capsys, caplog, hook, call, pattern, saved, workers):
    images = tmp_path / 'data'
    shutil.copytree(data, images)
    folder = tmp_path / 'run'
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        broken = Breaks(patch, hook, call, images, pattern)
        # The loader with workers is ahead of the updates.
        train(images, tmp_path, *FLAGS, '-j', workers)
    assert '.png' in capsys.readouterr().err
    found = [path.name for path in folder.glob('recovery-*')]
    if workers == '0':
        assert found == [saved]
    assert 'is saved; resume with: ' in caplog.text and f' --resume {folder}' in caplog.text
    assert not (folder / '.lock').exists()
    broken.repair()
    train(images, tmp_path, *FLAGS, '--resume', folder)
    assert_equal_runs(folder, whole)


def test_missing_validation_images_are_found_before_the_first_epoch(data, tmp_path, capsys):
    images = tmp_path / 'data'
    shutil.copytree(data, images)
    (images / '30.png').unlink()
    with pytest.raises(SystemExit):
        train(images, tmp_path)
    assert '1 of the 9 images listed in' in capsys.readouterr().err
    assert not (tmp_path / 'run').exists()


@pytest.mark.slow
def test_a_ruined_recovery_checkpoint_is_removed_and_the_one_before_resumes(data, tmp_path, capsys, caplog):
    flags = ('--epochs', '3', '--sched', 'none', '--opt', 'sgd', '--lr', '0.05')
    whole = train(data, tmp_path / 'whole', *flags)
    folder = train_until(1, 1, data, tmp_path, *flags)
    good = folder / 'recovery-1-2.pth.tar'
    assert good.exists()
    with pytest.raises(SystemExit):
        train_module.main(['--resume', str(folder), '--lr', '1e30', '--recovery-interval', '1'])
    assert 'Non-finite loss at batch 3' in capsys.readouterr().err
    assert f'Removing {folder / "recovery-1-3.pth.tar"}' in caplog.text
    assert list(folder.glob('recovery-*')) == [good]
    train_module.main(['--resume', str(folder), '--lr', '0.05', '--recovery-interval', '0'])
    assert summary(folder) == summary(whole)
    assert_same_weights(folder / 'last.pth.tar', whole / 'last.pth.tar')


def test_a_ruined_checkpoint_of_a_stopped_run_is_removed_when_it_is_resumed(data, tmp_path, capsys):
    folder = train_until(1, 1, data, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('tests.runs.main', lambda flags: train_module.main(['--resume', str(folder), '--lr', '1e30']))
        train_until(1, 2, data, tmp_path)
    names = ['recovery-1-2.pth.tar', 'recovery-1-3.pth.tar']
    assert sorted(path.name for path in folder.glob('recovery-*')) == names
    with pytest.raises(SystemExit):
        train_module.main(['--resume', str(folder), '--lr', '0.01'])
    assert 'Non-finite loss at batch 3' in capsys.readouterr().err
    assert [path.name for path in folder.glob('recovery-*')] == names[:1]
    train_module.main(['--resume', str(folder), '--lr', '0.01'])
    assert not list(folder.glob('recovery-*'))


def test_one_recovery_checkpoint_is_kept_while_losses_are_finite(data, tmp_path, monkeypatch):
    counts = []
    after_update = train_module.Trainer.after_update

    def count(trainer, *args):
        after_update(trainer, *args)
        counts.append(len(list(trainer.folder.glob('recovery-*'))))

    monkeypatch.setattr(train_module.Trainer, 'after_update', count)
    train(data, tmp_path, '--epochs', '1', '--recovery-interval', '2')
    assert counts == [0, 1, 1, 2, 1, 1]


@pytest.mark.slow
def test_the_primary_process_saves_when_another_one_fails(data, tmp_path):
    images = tmp_path / 'data'
    shutil.copytree(data, images)
    content = (images / '3.png').read_bytes()
    (images / '3.png').write_bytes(b'')
    flags = ('-b', '2', '-j', '0', '--val-split', 'val')
    process = start(images, tmp_path, *flags, processes=2)
    text = process.communicate(timeout=300)[0]
    assert process.returncode != 0
    assert '3.png' in text
    folder = tmp_path / 'run'
    assert os.listdir(folder)
    found = list(folder.glob('recovery-0-*'))
    assert len(found) == 1 and 'is saved; resume with' in text, text
    (images / '3.png').write_bytes(content)
    text = finish(start(images, tmp_path, *flags, '--resume', folder, processes=2))
    assert f'Resuming {found[0]}' in text
    assert len(summary(folder)) == 3
