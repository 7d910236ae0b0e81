""" Every code block of the README and of the documents runs, and their tables say what is so """
import argparse
import re
import shlex
import sys

import pytest
from PIL import Image

import timm_splicemix as tsm
from tests.conftest import REPOSITORY
from timm_splicemix.args import add_dataset_args, add_label_args
from timm_splicemix.data import dataset_names
from timm_splicemix.data.shapes import SPLITS
from timm_splicemix.data.shapes_scene import CLASS_NAMES

TEXTS = {path.name: path.read_text(encoding='utf-8') for path in (
    REPOSITORY / 'README.md', *sorted((REPOSITORY / 'docs').glob('*.md')))}
PICTURE = 'docs/splicemix.png'
SCRIPTS = ('train.py', 'validate.py')
README, DATA = TEXTS['README.md'], TEXTS['data.md']
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', flags=re.MULTILINE | re.DOTALL)
# Each command takes seconds to start, so those of the longer documents run with the slow tests.
SLOW = ('analysis.md', 'evaluation.md', 'training.md')
BLOCKS = [
    pytest.param(
        name, *block, id=f'{name}-{number}', marks=[pytest.mark.slow] if name in SLOW else [])
    for name, text in TEXTS.items() for number, block in enumerate(BLOCK.findall(text))]


@pytest.mark.parametrize('name', TEXTS)
def test_every_block_has_a_language_that_is_run_here(name):
    blocks = BLOCK.findall(TEXTS[name])
    assert TEXTS[name].count('```') == 2 * len(blocks)
    assert {language for language, _, _ in blocks} <= {'python', 'bash', 'csv'}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Where the blocks run one after the other: later ones use files of earlier ones."""
    return tmp_path_factory.mktemp('readme')


@pytest.mark.parametrize('name, language, title, code', BLOCKS)
def test_the_block_runs(run, folder, name, language, title, code):
    if language == 'csv':
        check_csv(folder, code)
        return
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
        if command == ['make', 'quickstart']:  # see test_quickstart.py
            continue
        command = [str(REPOSITORY / part) if part in SCRIPTS else part for part in command]
        if command[0] == 'torchrun':
            command.insert(1, '--standalone')
        done = run(*command, cwd=folder)
        assert done.returncode == 0, done.stderr


def check_csv(folder, code):
    """Read the file that is shown."""
    root = folder / 'csv'
    root.mkdir(exist_ok=True)
    for name in ('a', 'b'):
        Image.new('RGB', (4, 4)).save(root / f'{name}.jpg')
    (root / 'labels.csv').write_text(code)
    dataset = tsm.create_dataset('csv', root, 'train', annotations='labels.csv')
    assert sorted(dataset.class_names) == ['bird', 'cat', 'dog'] and len(dataset) in (1, 2)


def test_the_table_of_flags_is_that_of_the_parser():
    parser = argparse.ArgumentParser(add_help=False)
    tsm.add_splicemix_args(parser)
    documented = dict(re.findall(r'^\| `(--[\w-]+)` \| `([^`]+)`', README, flags=re.MULTILINE))
    expected = {action.option_strings[0]: str(action.default) or "''" for action in parser._actions}
    assert documented == expected


def test_every_flag_about_data_is_documented():
    parser = argparse.ArgumentParser(add_help=False)
    add_dataset_args(parser)
    add_label_args(parser)
    for action in parser._actions:
        assert action.option_strings[0] in DATA, f'{action.option_strings[0]} is not in docs/data.md'


def test_every_data_set_is_documented():
    for name in dataset_names():
        if name not in ('image_folder', 'tar', 'hfids/', 'tfds/'):  # timm's
            assert f'`{name}' in DATA


def test_what_the_readme_says_of_shapes_is_so():
    assert f'{sum(SPLITS.values()):,} rendered scenes with {len(CLASS_NAMES)} classes' in README


def test_the_picture_is_small():
    assert 10_000 < (REPOSITORY / PICTURE).stat().st_size < 300_000
