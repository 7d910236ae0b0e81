""" The flags of timm's scripts: those of timm 1.0.30, and those of a clone that TIMM_SCRIPTS names """
import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

Flags = dict[str, dict[str, Any]]  # by name: flags, default, nargs, const, choices, kind
TIMM_FLAGS: dict[str, Flags] = json.loads(Path(__file__).with_suffix('.json').read_text())
TRAIN, VALIDATE = TIMM_FLAGS['train'], TIMM_FLAGS['validate']


def describe(action: argparse.Action) -> dict[str, Any]:
    """A flag as the JSON file has it."""
    return {
        'flags': list(action.option_strings), 'default': action.default, 'nargs': action.nargs, 'const': action.const,
        'choices': None if action.choices is None else list(action.choices), 'kind': type(action).__name__}


def read_script(path: Path) -> Flags:
    """The flags of a script by the parser that it has at module level."""
    spec = importlib.util.spec_from_file_location(f'timm_script_{path.stem}', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # argparse has no public list; a test with a small script of its own notices if this one changes.
    return {action.dest: describe(action) for action in module.parser._actions if action.dest != 'help'}
