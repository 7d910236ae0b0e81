""" A full disk, which is a small file system in memory; mounting it needs the rights of root """
import shutil
import subprocess

import pytest

from timm_splicemix.data import generate_shapes
from timm_splicemix.export import main as export
from timm_splicemix.train import main as train
from timm_splicemix.validate import main as validate

from .evaluations import write_checkpoint
from .helpers import raises_error
from .runs import flags_of, summary

FULL = 'No space left on device'


@pytest.fixture
def disk(tmp_path):
    """A mounted file system; call it with a size in KiB to create or resize it."""
    folder = tmp_path / 'disk'

    def mount(size):
        options = f'size={size}k' if not folder.exists() else f'remount,size={size}k'
        folder.mkdir(exist_ok=True)
        done = subprocess.run(['mount', '-t', 'tmpfs', '-o', options, 'tmpfs', folder], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f'a file system cannot be mounted here: {done.stderr.strip()}')
        return folder

    if shutil.which('mount') is None:
        pytest.skip('there is no command to mount a file system')
    yield mount
    subprocess.run(['umount', '--lazy', folder], capture_output=True)


def error_of(capsys, command, *flags):
    with pytest.raises(SystemExit) as stop:
        command([str(flag) for flag in flags])
    assert stop.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_training_says_so_keeps_the_last_checkpoint_and_can_be_resumed(data, disk, capsys):
    folder = disk(5000)  # of which a checkpoint needs 3,000
    line = error_of(capsys, train, *flags_of(data, folder))
    run = folder / 'run'
    assert line.startswith(f'error: Cannot write {run / "last.pth.tar"}: {FULL}. ') and f'--resume {run}' in line
    names = {path.name for path in run.glob('*.tar')}
    assert names == {'last.pth.tar', 'model_best.pth.tar', 'checkpoint-0.pth.tar'}
    disk(12000)
    train(['--resume', str(run)])
    assert [row['epoch'] for row in summary(run)] == ['0', '1']


def test_training_without_space_for_its_settings_says_so(data, disk, capsys):
    folder = disk(4)
    assert FULL in error_of(capsys, train, *flags_of(data, folder))


def test_validation_says_so(data, disk, tmp_path, capsys):
    checkpoint = write_checkpoint(tmp_path / 'run', class_names=('red', 'green', 'blue'))
    folder = disk(4)
    flags = ('--dataset', 'csv', '--data-dir', data, '--checkpoint', checkpoint, '-j', '0', '--output', folder)
    line = error_of(capsys, validate, *flags)
    assert line.startswith(f'error: Cannot write {folder}') and line.endswith(f': {FULL}.')


@pytest.mark.parametrize('kind', ['torchscript', 'safetensors'])
def test_export_says_so(disk, tmp_path, kind, capsys):
    checkpoint = write_checkpoint(tmp_path / 'run')
    folder = disk(200)
    line = error_of(capsys, export, checkpoint, '--format', kind, '--output', folder)
    assert line.startswith(f'error: Cannot write {folder}') and line.endswith(f': {FULL}.')


def test_generating_shapes_says_so(disk):
    folder = disk(200)
    with raises_error(f"Cannot write the shapes data set to {folder / 'shapes'}: .*{FULL}"):
        generate_shapes(folder / 'shapes', progress=False)
    assert not list(folder.glob('.shapes*.tmp'))
