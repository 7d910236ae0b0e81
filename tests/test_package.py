""" The package as a whole: exported names, imports between modules, console scripts """
import ast
import configparser
import sys
import types
from pathlib import Path

import timm_splicemix as tsm
from timm_splicemix import cli

PACKAGE = Path(tsm.__file__).parent
COMMANDS = {*cli.COMMANDS.keys() - {'analysis'}, *(f'analysis.{name}' for name in cli.ANALYSES)}
OLD_NAMES = {'data.stats', 'data.check', 'analysis.html', 'inference'}  # aliases, until 0.3
# The parts of the package that each part may import, in addition to `errors` and `files`
MAY_IMPORT = {
    '__init__': {'args', 'data', 'heads', 'loss', 'metrics', 'mix', 'models', 'run', 'task'},
    'errors': set(), 'files': set(), 'mix': set(), 'loss': set(), 'metrics': set(), 'data': set(),
    'heads': set(), 'models': {'heads'},
    'task': {'mix', 'loss', 'models'}, 'fonts': set(), 'draw': {'fonts', 'mix'}, 'results': set(),
    'args': {'data', 'heads', 'loss', 'metrics', 'mix'},
    'run': {'args', 'data', 'draw', 'heads', 'loss', 'metrics', 'mix', 'models', 'results', 'task'},
    'cli': set(),  # imports commands, by name
    'analysis': {'args', 'data', 'draw', 'metrics', 'mix', 'models', 'results', 'run'},
}
TORCH_ONLY = {'mix': {'torchvision'}, 'heads': set(), 'loss': set(), 'metrics': set()}  # beside torch


def imports_of(path: Path) -> set[str]:
    """Absolute names of all modules that a file imports."""
    names = set()
    package = ('timm_splicemix', *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = '.'.join(package[:len(package) - node.level + 1]) if node.level else ''
            module = '.'.join(filter(None, (base, node.module)))
            of_package = module == 'timm_splicemix' or node.module is None
            names |= {f'{module}.{alias.name}' for alias in node.names} if of_package else {module}
    return names


def files_and_rooms():
    """Each file with its part of the package; each command is a separate part."""
    for path in sorted(PACKAGE.rglob('*.py')):
        parts = path.relative_to(PACKAGE).with_suffix('').parts
        yield path, '.'.join(parts) if '.'.join(parts) in COMMANDS | OLD_NAMES else parts[0]


def imported_rooms(path: Path) -> set[str]:
    names = {name.removeprefix('timm_splicemix.') for name in imports_of(path) if name.startswith('timm_splicemix.')}
    return {name if name in COMMANDS else name.split('.')[0] for name in names if not name.startswith('__')}


def test_all_lists_the_public_names():
    values = {name: value for name, value in vars(tsm).items() if not name.startswith('_')}
    public = {name for name, value in values.items() if not isinstance(value, types.ModuleType)}
    assert public == set(tsm.__all__) - {'models'}
    assert isinstance(tsm.models, types.ModuleType)
    assert list(tsm.__all__) == sorted(tsm.__all__)


def test_parts_import_only_what_they_may():
    seen = set()
    for path, room in files_and_rooms():
        seen.add(room)
        if room in OLD_NAMES:
            assert len(path.read_text().splitlines()) <= 6, f'{path} is more than an alias'
            continue
        siblings = imported_rooms(path) - {room, 'errors', 'files'}
        assert 'timm_splicemix' not in imports_of(path), f'{path} imports the whole package'
        assert not siblings & COMMANDS, f'{path} imports a command'
        if room not in COMMANDS:
            assert room in MAY_IMPORT, f'{path} needs an entry in MAY_IMPORT'
            assert siblings <= MAY_IMPORT[room], f'{path} imports {siblings - MAY_IMPORT[room]}'
        assert room != 'run' or not {'draw', 'files'} <= imported_rooms(path), f'{path} writes files and draws'
        if room in TORCH_ONLY:
            others = {name.split('.')[0] for name in imports_of(path)} - {'torch', 'timm_splicemix', *TORCH_ONLY[room]}
            assert others <= sys.stdlib_module_names, f'{path} imports {others - sys.stdlib_module_names}'
    assert seen == set(MAY_IMPORT) | COMMANDS | OLD_NAMES


def test_relative_imports_are_seen():
    names = imports_of(PACKAGE / 'preview.py')
    assert {'timm_splicemix.mix', 'timm_splicemix.data', 'torch'} <= names


def test_the_console_scripts_of_0_1_still_exist():
    config = configparser.ConfigParser()
    config.read(PACKAGE.parent / 'setup.cfg')
    lines = config['options.entry_points']['console_scripts'].split('\n')
    scripts = {target.strip() for _, _, target in (line.partition('=') for line in lines if line)}
    old = ('check', 'predict', 'preview', 'report', 'stats', 'train', 'validate')
    assert {f'timm_splicemix.{name}:main' for name in ('cli', *old)} <= scripts


def test_the_package_is_typed():
    assert (PACKAGE / 'py.typed').is_file()
