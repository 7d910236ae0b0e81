import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent

# Some virtual machines report AMX instructions that they cannot execute, which would kill tests of bfloat16.
os.environ.setdefault('ONEDNN_MAX_CPU_ISA', 'AVX512_CORE_BF16')


@pytest.fixture(scope='session')
def data(tmp_path_factory):
    """A folder of 25 images with labels.csv, shared by all tests: copy it before changing it."""
    from .runs import make_images  # imports the package, which some tests do in another process
    return make_images(tmp_path_factory.mktemp('data') / 'images')


@pytest.fixture(autouse=True)
def no_curves(request, monkeypatch):
    """Runs in this process draw no curves, which takes a second of each, but in tests marked `curves`."""
    if 'curves' not in request.keywords:
        monkeypatch.setattr('timm_splicemix.run.trainer.draw_curves', lambda rows, path: False)


@pytest.fixture
def run():
    """Run a command as a user would, in another process; returns what it printed and its exit code."""
    def run_command(*command, cwd=REPOSITORY, timeout=300, **environment):
        path = f'{Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}'
        python_path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get('PYTHONPATH'))))
        environment = {**os.environ, 'PATH': path, 'PYTHONPATH': python_path, 'OMP_NUM_THREADS': '1', **environment}
        command = [str(part) for part in command]
        return subprocess.run(command, cwd=cwd, env=environment, timeout=timeout, capture_output=True, text=True)
    return run_command
