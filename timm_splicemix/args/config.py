""" YAML files that set flags """
import argparse
import difflib
import re
import sys
from typing import Any, Optional, Sequence

import yaml

from ..errors import UsageError
from .kwargs import KwargsAction

_UNSET = object()
_KINDS = {float: 'a number', int: 'a whole number', None: 'text, in quotes if need be'}
_EXPONENT = re.compile(r'[-+]?\d+(\.\d*)?[eE][-+]?\d+')  # a number to Python, partly text to PyYAML: 1e-5


def parse_with_config(
        parser: argparse.ArgumentParser,
        argv: Optional[Sequence[str]] = None,
) -> tuple[argparse.Namespace, set[str]]:
    """ Parse a command line on which -c/--config may name a YAML file of flags; the command line wins.

    Keys of the file are flags without the leading dashes, `batch_size` or `batch-size`, and null is the default. A
    file that does not fit, by an unknown key or a value of another type, is one line and exit code 2.

    Args:
        parser: Parser of the flags, which gets --config.
        argv: The command line, that of the process if None.

    Returns:
        The flags, without `config`, and the names of those that the user set: all on the command line, and in the file
        those that differ from the default, since the `args.yaml` of a run lists all that there are.
    """
    if not any(action.dest == 'config' for action in parser._actions):
        parser.add_argument('-c', '--config', metavar='FILE', help='YAML file of flags; the command line wins')
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    given = _on_command_line(parser, argv)
    path = vars(args).pop('config')
    given.discard('config')
    if path is None:
        return args, given

    actions = {
        action.dest: action for action in parser._actions
        if action.dest != 'config' and action.default is not argparse.SUPPRESS}
    try:
        values = _read(path, actions)
    except ValueError as error:
        parser.error(' '.join(str(error).split()))
    for name, value in values.items():
        if name not in given:
            setattr(args, name, value)
    given |= {name for name, value in values.items() if value != actions[name].default}
    for group in parser._mutually_exclusive_groups:  # argparse sees those on the command line alone
        flags = [_flag(action) for action in group._group_actions if action.dest in given]
        if len(flags) > 1:
            parser.error(f"Expected at most one of {' and '.join(flags)}, but got {len(flags)} with {path}.")
    return args, given


def uses_config(parser: argparse.ArgumentParser, argv: Sequence[str]) -> bool:
    """ Whether a command line names a YAML file of flags.

    Args:
        parser: Parser that `parse_with_config` was called with before.
        argv: The command line.
    """
    return parser.parse_args(argv).config is not None


def dump_args(args: argparse.Namespace) -> str:
    """ Write flags as YAML that `parse_with_config` reads back, and timm too if it knows them.

    YAML has no tuples: those in --model-kwargs and --opt-kwargs come back as lists.

    Args:
        args: What the parser returned.
    """
    return yaml.safe_dump(vars(args), default_flow_style=False, allow_unicode=True)


def _on_command_line(parser: argparse.ArgumentParser, argv: Sequence[str]) -> set[str]:
    """Names of the flags that a command line sets, be it to their default."""
    actions = {action.dest: action for action in parser._actions}
    args = parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(actions, _UNSET)))
    return {
        name for name, action in actions.items()
        # argparse sets an optional positional to its default when it is not there.
        if getattr(args, name) is not _UNSET and (action.option_strings or getattr(args, name) is not action.default)}


def _read(path: str, actions: dict[str, argparse.Action]) -> dict[str, Any]:
    try:
        with open(path, encoding='utf-8') as file:
            config = yaml.safe_load(file)
    except OSError as error:
        raise UsageError(f'Expected a YAML file for --config, but got {path}: {error.strerror}.') from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, a day that does not exist
        raise UsageError(f'Expected YAML in {path}, but got: {error}') from error
    if not isinstance(config, dict):
        got = 'nothing' if config is None else type(config).__name__
        raise UsageError(f"Expected lines 'flag: value' in {path}, but got {got}.")

    values = {}
    for key, value in config.items():
        name = str(key).replace('-', '_')
        if name not in actions:
            raise UsageError(f"Expected flags in {path}, but got '{key}'{_nearest(name, actions)}")
        if name in values:
            raise UsageError(f"Expected each flag once in {path}, but got '{name}' twice.")
        try:
            values[name] = _convert(actions[name], value)
        except _Refused as refused:
            raise UsageError(f"Expected '{key}' in {path} to be {refused}, but got {value!r}.") from None
    return values


def _nearest(name: str, actions: dict[str, argparse.Action]) -> str:
    names = {dest: dest for dest in actions}
    for dest, action in actions.items():
        names.update((option.lstrip('-').replace('-', '_'), dest) for option in action.option_strings)
    close = difflib.get_close_matches(name, names, n=1)
    return f": did you mean '{names[close[0]]}'?" if close else '.'


class _Refused(ValueError):
    """A value that a flag does not take; says what it takes."""


def _convert(action: argparse.Action, value: Any) -> Any:
    """What the command line would make of a value."""
    if value is None or (type(value) is type(action.default) and value == action.default):
        return action.default  # which need not be what the command line takes, such as '' beside choices
    if isinstance(action, KwargsAction):
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise _Refused("a mapping 'name: value'")
        return _mend_numbers(value)
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise _Refused('true or false')
        # What store_true has no word for is its default; argparse.BooleanOptionalAction has one for both.
        return action.default if isinstance(action.const, bool) and value != action.const else value
    if action.nargs == '?' and action.const is not None and isinstance(value, bool):
        return action.const if value else action.default
    if action.nargs in (None, '?'):
        return _convert_one(action, value)
    values = value if isinstance(value, list) else [value]
    if isinstance(action.nargs, int) and len(values) != action.nargs:
        raise _Refused(f'a list of {action.nargs}')
    if not values and action.nargs == '+':
        raise _Refused('a list of at least one')
    return [_convert_one(action, value) for value in values]


def _convert_one(action: argparse.Action, value: Any) -> Any:
    kind = _KINDS.get(action.type, f'what {_flag(action)} takes')
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise _Refused(kind)
    try:
        value = (action.type or str)(str(value))
    except (ValueError, argparse.ArgumentTypeError):
        raise _Refused(kind) from None
    if action.choices is not None and value not in action.choices:
        raise _Refused(f"one of {', '.join(map(str, action.choices))}")
    return value


def _mend_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _mend_numbers(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_mend_numbers(part) for part in value]
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def _flag(action: argparse.Action) -> str:
    return next((option for option in action.option_strings if option.startswith('--')), action.dest)
