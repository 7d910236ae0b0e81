""" The code blocks of the README and the documents run, and their tables are up to date """
import importlib.util
import json
import re
import shlex
import sys

import pytest
import torch
from PIL import Image

import timm_splicemix as tsm
from tests.conftest import REPOSITORY
from timm_splicemix import train, validate
from timm_splicemix.args import CommandParser, add_dataset_args, add_label_args, parse_with_config
from timm_splicemix.data import dataset_names
from timm_splicemix.data.shapes import SPLITS
from timm_splicemix.data.shapes_scene import CLASS_NAMES

TEXTS = {path.name: path.read_text(encoding='utf-8') for path in (
    REPOSITORY / 'README.md', *sorted((REPOSITORY / 'docs').glob('*.md')))}
PICTURE = 'docs/splicemix.png'
SCRIPTS = ('train.py', 'validate.py')
PARSERS = {'train.py': train.build_parser, 'validate.py': validate.build_parser}
README, DATA, TRAINING = TEXTS['README.md'], TEXTS['data.md'], TEXTS['training.md']
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', flags=re.MULTILINE | re.DOTALL)
BLOCKS = [  # those that run commands are slow, as each command takes seconds to start
    pytest.param(
        name, *block, id=f'{name}-{number}', marks=[pytest.mark.slow] if block[0] in ('python', 'bash') else [])
    for name, text in TEXTS.items() for number, block in enumerate(BLOCK.findall(text))]


@pytest.mark.parametrize('name', TEXTS)
def test_every_block_has_a_language_that_is_tested_here(name):
    blocks = BLOCK.findall(TEXTS[name])
    assert TEXTS[name].count('```') == 2 * len(blocks)
    assert {language for language, _, _ in blocks} <= {'python', 'bash', 'csv', 'json', 'console', 'diff'}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Working folder of all blocks: later ones use the files of earlier ones."""
    return tmp_path_factory.mktemp('readme')


@pytest.mark.parametrize('name, language, title, code', BLOCKS)
def test_the_block_runs(run, folder, name, language, title, code):
    if language in ('csv', 'json'):
        check_labels(folder, language, code)
        return
    if language == 'console':  # needs data that is not here, see test_the_flags_of_commands_exist
        return
    if language == 'diff':  # needs timm's script, see test_with_timm.py
        return
    if language == 'python':
        script = folder / (title or 'script.py')
        script.write_text(code)
        if title:  # the next bash block runs it
            compile(code, title, 'exec')
            return
        commands = [[sys.executable, str(script)]]
    else:
        commands = [shlex.split(line) for line in code.splitlines()]
    for command in commands:
        if command == ['make', 'test']:  # this is what runs here
            dry = run('make', '--dry-run', 'test')
            assert dry.returncode == 0 and 'pytest' in dry.stdout
            continue
        if command == ['make', 'quickstart']:  # see test_quickstart.py
            continue
        command = [str(REPOSITORY / part) if part in SCRIPTS else part for part in command]
        if command[0] == 'torchrun':
            command.insert(1, '--standalone')
        if command[0] == 'timm-splicemix':
            command[:1] = [sys.executable, '-m', 'timm_splicemix.cli']
        done = run(*command, cwd=folder)
        assert done.returncode == 0, done.stderr


def shown_commands():
    """Command lines of train.py and validate.py that need other data or a GPU."""
    text = '\n'.join(TEXTS.values())
    blocks = [code.replace('\\\n', ' ') for language, _, code in BLOCK.findall(text) if language == 'console']
    lines = [line for code in blocks for line in code.splitlines()]
    flags = next(line for line in lines if line.startswith('FLAGS=')).partition('=')[2].strip('"')
    lines += [line for line in re.findall(r'`([^`\n]+)`', TEXTS['gpu.md']) if line.startswith(('python', 'torchrun'))]
    return [shlex.split(line.replace('$FLAGS', flags)) for line in lines if any(name in line for name in SCRIPTS)]


@pytest.mark.parametrize('command', shown_commands(), ids=' '.join)
def test_the_flags_of_commands_exist(command, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    script = next(part for part in command if part.endswith(SCRIPTS))
    parse_with_config(PARSERS[script.removeprefix('PATH/')](), command[command.index(script) + 1:])


def check_labels(folder, language, code):
    root = folder / language
    root.mkdir(exist_ok=True)
    for name in ('a', 'b'):
        Image.new('RGB', (4, 4)).save(root / f'{name}.jpg')
    (root / 'labels').with_suffix(f'.{language}').write_text(code)
    dataset = tsm.create_dataset(language, root, 'train', annotations=f'labels.{language}')
    assert sorted(dataset.class_names) == ['bird', 'cat', 'dog'] and len(dataset) in (1, 2)


def test_the_table_of_flags_is_that_of_the_parser():
    parser = CommandParser()
    tsm.add_splicemix_args(parser)
    documented = dict(re.findall(r'^\| `(--splicemix-[\w-]+)` \| `([^`]+)`', TRAINING, flags=re.MULTILINE))
    expected = {action.option_strings[0]: str(action.default) or "''" for action in parser.flags.values()}
    assert documented == expected


def test_every_flag_about_data_is_documented():
    parser = CommandParser()
    add_dataset_args(parser)
    add_label_args(parser)
    for action in parser.flags.values():
        assert action.option_strings[0] in DATA, f'{action.option_strings[0]} is not in docs/data.md'


def test_every_data_set_is_documented():
    for name in dataset_names():
        if name not in ('image_folder', 'tar', 'hfids/', 'tfds/'):  # timm's
            assert f'`{name}' in DATA


def test_the_description_of_shapes_is_right():
    assert f'{sum(SPLITS.values()):,} rendered scenes with {len(CLASS_NAMES)} classes' in DATA


def test_the_notebook_is_the_tutorial():
    spec = importlib.util.spec_from_file_location('notebook', REPOSITORY / 'docs' / 'notebook.py')
    notebook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(notebook)
    content = json.loads(notebook.NOTEBOOK.read_text(encoding='utf-8'))
    assert content == notebook.build(TEXTS['tutorial.md']), 'run python docs/notebook.py'
    code = [''.join(cell['source']) for cell in content['cells'] if cell['cell_type'] == 'code']
    blocks = [code for language, _, code in BLOCK.findall(TEXTS['tutorial.md']) if language in ('python', 'bash')]
    assert [re.sub('^!', '', source, flags=re.MULTILINE) for source in code] == [block.strip() for block in blocks]


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150


@pytest.mark.parametrize('name', TEXTS)
def test_links_to_files_are_valid(name):
    folder = REPOSITORY if name == 'README.md' else REPOSITORY / 'docs'
    links = re.findall(r'\]\((?!https?:)([^)#]+)', TEXTS[name])
    assert all((folder / link).exists() for link in links)


def test_the_picture_is_small():
    assert 10_000 < (REPOSITORY / PICTURE).stat().st_size < 300_000


def test_the_positions_per_cell_of_feature_maps_are_right():
    rows = re.findall(r'^\| (\d+) px \| (\d+)x(\d+) \| (\S+) \| (\S+) \| (\S+) \|$', TEXTS['when.md'], flags=re.M)
    assert len(rows) == 4
    for size, height, width, *cells in rows:
        assert int(size) / 32 == int(height) == int(width)
        for grid, cell in zip(tsm.parse_grids('1x2,2x2,2x3'), cells):
            found = tsm.split_cells(torch.zeros(1, 1, int(height), int(width)), grid)
            assert 'x'.join(map(str, found.shape[2:])) == cell


def test_the_costs_are_those_of_the_study():
    measured = (REPOSITORY / 'experiments/voc/RESULTS.md').read_text(encoding='utf-8')
    rows = re.findall(r'^\| (SpliceMix.*) \| ([\d.]+) \((?:quartiles )?(.+)\) \|$', TEXTS['when.md'], flags=re.M)
    for name, (_, ratio, quartiles) in zip(('SpliceMix', 'SpliceMix-CL', 'SpliceMix, fixed'), rows, strict=True):
        assert re.search(rf'^\| {name} \| [\d.]+ \| {ratio} \({quartiles}\) \|$', measured, flags=re.M)
