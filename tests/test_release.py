""" Wheel and source distribution, and the lowest supported versions of torch, torchvision and timm """
import configparser
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

import pytest

import timm_splicemix as tsm
from tests.conftest import REPOSITORY

PACKAGE = REPOSITORY / 'timm_splicemix'
CORE_TESTS = (
    'test_splicemix', 'test_multilabel_loss', 'test_consistency', 'test_metrics', 'test_task', 'test_pooling',
    'test_train')


def requirements():
    config = configparser.ConfigParser()
    config.read(REPOSITORY / 'setup.cfg')
    return config['options']['install_requires'].split()


def files_of_package():
    """Files that every distribution must contain, relative to the repository."""
    tracked = subprocess.run(
        ['git', 'ls-files', 'timm_splicemix'], cwd=REPOSITORY, capture_output=True, text=True).stdout.splitlines()
    found = [
        str(path.relative_to(REPOSITORY)) for path in PACKAGE.rglob('*')
        if path.is_file() and '__pycache__' not in path.parts]
    return set(tracked) & set(found) or set(found)


@pytest.fixture(scope='module')
def distributions(tmp_path_factory):
    """Wheel and source distribution, built from a copy of the repository."""
    folder = tmp_path_factory.mktemp('release')
    clone = folder / 'clone'
    shutil.copytree(REPOSITORY, clone, ignore=shutil.ignore_patterns(
        '.venv', '.git', 'output', 'build', 'dist', '*.egg-info', '__pycache__', '.*_cache', 'records'))
    # Without isolation, as the build would download setuptools again
    built = subprocess.run(
        [sys.executable, '-m', 'build', '--no-isolation', '--outdir', str(folder), str(clone)],
        capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,), (source,) = folder.glob('*.whl'), folder.glob('*.tar.gz')
    return wheel, source


@pytest.mark.slow
def test_the_distributions_contain_every_file_of_the_package(distributions):
    wheel, source = distributions
    assert wheel.name == f'timm_splicemix-{tsm.__version__}-py3-none-any.whl'
    with zipfile.ZipFile(wheel) as archive:
        assert files_of_package() <= set(archive.namelist())
    with tarfile.open(source) as archive:
        names = {name.partition('/')[2] for name in archive.getnames()}
    assert files_of_package() | {'README.md', 'LICENSE', 'setup.cfg'} <= names


@pytest.mark.slow
def test_the_wheel_works_in_a_new_environment_and_another_folder(distributions, run, tmp_path):
    environment = tmp_path / 'environment'
    venv.create(environment, symlinks=True)
    python = environment / 'bin' / 'python'
    packages = next(environment.glob('lib/python*/site-packages'))
    # The dependencies come from the environment of the tests, whose editable install of the package stays invisible.
    (packages / 'dependencies.pth').write_text(sysconfig.get_path('purelib'))
    installed = run(
        sys.executable, '-m', 'pip', '--python', python, 'install', '--no-deps', '--no-index', '--ignore-installed',
        distributions[0])
    assert installed.returncode == 0, installed.stderr
    there = {'cwd': tmp_path, 'PYTHONPATH': ''}
    imported = run(python, '-c', 'import timm_splicemix; print(timm_splicemix.__file__)', **there)
    assert imported.stdout.strip() == str(packages / 'timm_splicemix' / '__init__.py'), imported.stderr
    command = environment / 'bin' / 'timm-splicemix'
    assert run(command, '--version', **there).stdout == f'timm-splicemix {tsm.__version__}\n'
    drawn = run(command, 'preview', '--dataset', 'shapes', '--data-dir', 'shapes', '--output', 'batch.png', **there)
    assert drawn.returncode == 0, drawn.stderr
    assert (tmp_path / 'batch.png').stat().st_size > 1000
    help_text = run(environment / 'bin' / 'timm-splicemix-train', '--help', **there)
    assert '--splicemix-grids' in help_text.stdout, help_text.stderr


def test_the_versions_of_torch_torchvision_and_timm_have_a_lower_bound():
    bounds = {name: bound for name, _, bound in (requirement.partition('>=') for requirement in requirements())}
    assert all(bounds[name] for name in ('torch', 'torchvision', 'timm'))
    assert bounds['timm'] == '1.0.30,<2'


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get('TSM_TEST_LOWEST'), reason='TSM_TEST_LOWEST=1 downloads several GB')
def test_the_core_tests_pass_with_the_lowest_versions(run):
    lowest = [requirement.partition(',')[0].replace('>=', '==') for requirement in requirements()]
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder) / 'bin' / 'python'
        venv.create(folder, with_pip=True)
        installed = run(
            python, '-m', 'pip', 'install', '--quiet', *lowest, 'pytest', 'scikit-learn', 'matplotlib', timeout=3600)
        assert installed.returncode == 0, installed.stderr
        tests = [f'tests/{name}.py' for name in CORE_TESTS]
        passed = run(python, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', *tests, timeout=3600)
        assert passed.returncode == 0, passed.stdout[-5000:]
