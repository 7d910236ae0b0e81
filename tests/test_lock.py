""" Two runs never write to one folder, and what killed runs left is removed """
import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from timm_splicemix import train as train_module
from timm_splicemix.files import atomic_write, remove_temporary_files
from timm_splicemix.run.lock import FolderInUse, FolderLock

from .conftest import REPOSITORY
from .runs import summary, train
from .test_stop import read_until, start

HOLD = '''
import os, sys, time
from pathlib import Path
from timm_splicemix.run.lock import FolderLock

lock = FolderLock(Path(sys.argv[1]))
if os.fork():
    print('locked', flush=True)
time.sleep(600)
'''
DIE = '''
import os, sys
from timm_splicemix.files import atomic_write

with atomic_write(sys.argv[1]) as temporary:
    temporary.write_text('half')
    os.kill(os.getpid(), 9)
'''


def python(code, *args):
    environment = {**os.environ, 'PYTHONPATH': str(REPOSITORY)}
    return subprocess.Popen(
        [sys.executable, '-c', code, *map(str, args)], env=environment, stdout=subprocess.PIPE, text=True,
        start_new_session=True)


@pytest.fixture
def holder():
    """Lets another process, which has a forked child, hold the lock of a folder."""
    processes = []

    def hold(folder):
        process = python(HOLD, folder)
        processes.append(process)
        assert process.stdout.readline() == 'locked\n'
        return process

    yield hold
    for process in processes:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.slow
def test_the_lock_of_a_dead_process_does_not_block(tmp_path, holder):
    process = holder(tmp_path)
    with pytest.raises(FolderInUse, match=f'process {process.pid} on {socket.gethostname()}'):
        FolderLock(tmp_path)
    process.kill()
    process.wait()  # its child lives on
    lock = FolderLock(tmp_path)
    assert (tmp_path / '.lock').read_text() == f'process {os.getpid()} on {socket.gethostname()}'
    lock.release()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_folder_in_use_is_not_resumed_and_a_new_run_gets_another_one(data, tmp_path, holder, capsys, caplog):
    folder = train(data, tmp_path, '--epochs', '1')
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert '.lock' not in before
    process = holder(folder)
    with pytest.raises(SystemExit):
        train_module.main(['--resume', str(folder), '--epochs', '2'])
    assert f'{folder} is in use by a run (process {process.pid} on' in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != '.lock'} == before

    process = holder(tmp_path / 'new')
    train(data, tmp_path, '--epochs', '1', name='new')
    assert [path.name for path in (tmp_path / 'new').iterdir()] == ['.lock']
    assert f'in use by a run (process {process.pid}' in caplog.text
    assert len(summary(tmp_path / 'new-2')) == 1


@pytest.mark.slow
def test_temporary_files_of_killed_runs_are_removed(data, tmp_path):
    folder = train(data, tmp_path, '--epochs', '1')
    names = {path.name for path in folder.iterdir()}
    for name in ('last.pth.tar', 'summary.csv', 'some'):
        assert python(DIE, folder / name).wait() == -signal.SIGKILL
    assert len({path.name for path in folder.iterdir()}) == len(names) + 3
    (folder / '.mine.tmp').write_text('')
    train_module.main(['--resume', str(folder)])
    assert {path.name for path in folder.iterdir()} == {*names, '.mine.tmp'}


@pytest.mark.parametrize('name', ['a.b.csv', 'plain', '.hidden', 'x' * 120 + '.png'])
def test_every_temporary_file_is_recognised(tmp_path, name):
    with pytest.raises(Exception, match='Cannot write'), atomic_write(tmp_path / name) as temporary:
        assert temporary.suffix == (tmp_path / name).suffix or temporary.suffix == '.tmp'
        remove_temporary_files(tmp_path)
        assert not temporary.exists()


@pytest.mark.slow
def test_a_run_is_not_resumed_beside_its_orphaned_processes(data, tmp_path, capsys):
    process = start(data, tmp_path, '--epochs', '500', '-b', '4', processes=2)
    text = read_until(process, 'Train 1')
    listed = subprocess.run(['ps', '-o', 'pid=', '--ppid', str(process.pid)], capture_output=True, text=True).stdout
    process.kill()  # torchrun alone
    process.wait()
    try:
        with pytest.raises(SystemExit):
            train_module.main(['--resume', str(tmp_path / 'run'), '--epochs', '3'])
        owner = re.search(r'is in use by a run \(process (\d+) on', capsys.readouterr().err)
        assert owner and owner[1] in listed.split(), text
    finally:
        for rank in listed.split():
            os.kill(int(rank), signal.SIGKILL)
        process.communicate()
