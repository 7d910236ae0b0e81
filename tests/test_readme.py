""" Every code block of the README runs, and its tables say what is so """
import argparse
import re
import shlex
import sys

import pytest

import timm_splicemix as tsm
from tests.conftest import REPOSITORY
from timm_splicemix.data.shapes import SPLITS
from timm_splicemix.data.shapes_scene import CLASS_NAMES

README = (REPOSITORY / 'README.md').read_text(encoding='utf-8')
BLOCKS = re.findall(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', README, flags=re.MULTILINE | re.DOTALL)


def test_every_block_has_a_language_that_is_run_here():
    assert README.count('```') == 2 * len(BLOCKS)
    assert {language for language, _, _ in BLOCKS} == {'python', 'bash'}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Where the blocks run one after the other: later ones use files of earlier ones."""
    return tmp_path_factory.mktemp('readme')


@pytest.mark.parametrize('language, title, code', BLOCKS, ids=[f'block{i}' for i in range(len(BLOCKS))])
def test_the_block_runs(run, folder, language, title, code):
    if language == 'python':
        script = folder / (title or 'script.py')
        script.write_text(code)
        if title:  # run by a bash block that follows
            compile(code, title, 'exec')
            return
        commands = [[sys.executable, str(script)]]
    else:
        commands = [shlex.split(line) for line in code.splitlines()]
    for command in commands:
        if command == ['make', 'test']:  # is running right now
            dry = run('make', '--dry-run', 'test')
            assert dry.returncode == 0 and 'pytest' in dry.stdout
            continue
        if command[0] == 'make':
            check_make(run, folder, command)
            continue
        if command[0] == 'torchrun':
            command.insert(1, '--standalone')
        done = run(*command, cwd=folder)
        assert done.returncode == 0, done.stderr


def check_make(run, folder, command):
    """Run a make target in the environment of the tests instead of setting up another."""
    done = run(
        *command, '--old-file', f'{sys.prefix}/.timm-splicemix-installed', VENV=sys.prefix,
        QUICKSTART_DIR=str(folder / 'quickstart'))
    assert done.returncode == 0, done.stderr
    assert (folder / 'quickstart' / 'preview.png').stat().st_size > 10_000


def test_the_table_of_flags_is_that_of_the_parser():
    parser = argparse.ArgumentParser(add_help=False)
    tsm.add_splicemix_args(parser)
    documented = dict(re.findall(r'^\| `(--[\w-]+)` \| `([^`]+)`', README, flags=re.MULTILINE))
    expected = {action.option_strings[0]: str(action.default) or "''" for action in parser._actions}
    assert documented == expected


def test_what_the_readme_says_of_shapes_is_so():
    assert f'{sum(SPLITS.values()):,} rendered scenes with {len(CLASS_NAMES)} classes' in README


def test_the_picture_is_there_and_small():
    picture, = re.findall(r'!\[.*\]\((.*)\)', README)
    assert 10_000 < (REPOSITORY / picture).stat().st_size < 300_000
