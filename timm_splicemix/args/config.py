""" YAML files that set flags, and flags that take keyword arguments """
import argparse
import ast
import difflib
import re
import sys
from typing import Any, Callable, Optional, Sequence

import yaml

from ..errors import UsageError
from ..files import read_yaml
from .command import CommandParser, RefusedAction

_UNSET = object()
_EXPONENT = re.compile(r'[-+]?\d+(\.\d*)?[eE][-+]?\d+')  # PyYAML reads 1e-5 as text


class KwargsAction(argparse.Action):
    """ Parse KEY=VALUE ... into a dict, as timm does: values are Python literals or else text.

    The last flag replaces the ones before it.
    """

    def __call__(
            self,
            parser: argparse.ArgumentParser,
            namespace: argparse.Namespace,
            values: Sequence[str],
            option_string: Optional[str] = None,
    ) -> None:
        setattr(namespace, self.dest, dict(self._parse(pair) for pair in values if pair))

    def _parse(self, pair: str) -> tuple[str, Any]:
        key, equals, value = pair.partition('=')
        if not equals or not key.isidentifier():
            raise argparse.ArgumentError(self, f"Expected KEY=VALUE, but got '{pair}'")
        try:
            return key, ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError):
            return key, value


def parse_with_config(
        parser: CommandParser,
        argv: Optional[Sequence[str]] = None,
) -> tuple[argparse.Namespace, set[str]]:
    """ Parse a command line on which -c/--config may name a YAML file of flags; the command line wins.

    Keys of the file are flags without the leading dashes, `batch_size` or `batch-size`; null stands for the default.
    Values pass the same checks as on the command line. An unknown key or a bad value exits with code 2 and one line.

    Args:
        parser: Parser of the flags; --config is added to it.
        argv: Command line, that of the process if None.

    Returns:
        The flags, without `config`, and the names of those that the user set: all that are on the command line, and
        those in the file that differ from their default, since the `args.yaml` of a run lists every flag.
    """
    if 'config' not in parser.flags:
        parser.add_argument('-c', '--config', metavar='FILE', help='YAML file of flags; the command line wins')
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    given = flags_on_command_line(parser.parse_args, argv, parser.flags)
    path = vars(args).pop('config')
    given.discard('config')
    if path is None:
        return args, given

    try:
        values = _read(path, parser)
    except UsageError as error:
        parser.error(str(error))
    for name, value in values.items():
        if name not in given:
            setattr(args, name, value)
    given |= {name for name, value in values.items() if value != parser.flags[name].default}
    for group in parser.exclusive:  # argparse has checked the command line alone
        flags = [_option(action) for action in group if action.dest in given]
        if len(flags) > 1:
            parser.error(f"Expected at most one of {' and '.join(flags)}, but got {len(flags)} with {path}.")
    return args, given


def uses_config(parser: CommandParser, argv: Sequence[str]) -> bool:
    """Whether a command line has --config, for a parser that `parse_with_config` was called with before."""
    return parser.parse_args(argv).config is not None


def dump_args(args: argparse.Namespace) -> str:
    """ Write flags as YAML that `parse_with_config` reads back, and so does timm if it knows them.

    YAML has no tuples: those in --model-kwargs and --opt-kwargs are read back as lists.
    """
    return yaml.safe_dump(vars(args), default_flow_style=False, allow_unicode=True)


def flags_on_command_line(
        parse_args: Callable[[Sequence[str], argparse.Namespace], argparse.Namespace],
        argv: Sequence[str],
        flags: dict[str, argparse.Action],
) -> set[str]:
    """Names of those of a parser's flags that a command line sets, including those set to their default."""
    args = parse_args(argv, argparse.Namespace(**dict.fromkeys(flags, _UNSET)))
    return {
        name for name, action in flags.items()
        # argparse sets an absent optional positional to its default.
        if getattr(args, name) is not _UNSET and (action.option_strings or getattr(args, name) is not action.default)}


def _read(path: str, parser: CommandParser) -> dict[str, Any]:
    values = {}
    for key, value in read_yaml(path).items():
        name = key.replace('-', '_')
        if name not in parser.flags or name == 'config':
            raise UsageError(f"Unknown flag '{key}' in {path}{_nearest(name, parser)}")
        if name in values:
            raise UsageError(f"Flag '{name}' is set twice in {path}.")
        try:
            values[name] = convert_value(parser.flags[name], value)
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"Bad value of '{key}' in {path}: {error}") from None
    return values


def _nearest(name: str, parser: CommandParser) -> str:
    names = {dest: dest for dest in parser.flags}
    for dest, action in parser.flags.items():
        names.update((option.lstrip('-').replace('-', '_'), dest) for option in action.option_strings)
    close = difflib.get_close_matches(name, names, n=1)
    return f": did you mean '{names[close[0]]}'?" if close else '.'


def _refuse(expected: str, value: Any) -> None:
    raise argparse.ArgumentTypeError(f'Expected {expected}, but got {value!r}')


def convert_value(action: argparse.Action, value: Any) -> Any:
    """The value of a YAML file as a flag on the command line would have it, or an `argparse.ArgumentTypeError`."""
    if value is None or (type(value) is type(action.default) and value == action.default):
        return action.default  # which may be one that the command line refuses, such as '' with choices
    if isinstance(action, RefusedAction):
        if not action.accepts(value):
            raise argparse.ArgumentTypeError(action.message())
        return action.default
    if isinstance(action, KwargsAction):
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            _refuse("a mapping 'name: value'", value)
        return _parse_exponents(value)
    if action.nargs == 0:
        if not isinstance(value, bool):
            _refuse('true or false', value)
        # store_true can only set its constant; argparse.BooleanOptionalAction sets both.
        return action.default if isinstance(action.const, bool) and value != action.const else value
    if action.nargs == '?' and action.const is not None and isinstance(value, bool):
        return action.const if value else action.default
    if action.nargs in (None, '?'):
        return _convert_one(action, value)
    values = value if isinstance(value, list) else [value]
    if isinstance(action.nargs, int) and len(values) != action.nargs:
        _refuse(f'a list of {action.nargs}', value)
    if not values and action.nargs == '+':
        _refuse('a list of at least one', value)
    return [_convert_one(action, value) for value in values]


def _convert_one(action: argparse.Action, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        _refuse('a number' if action.type else 'text, in quotes if it looks like another type', value)
    try:
        value = (action.type or str)(str(value))
    except ValueError:
        _refuse('a number', value)
    if action.choices is not None and value not in action.choices:
        _refuse(f"one of {', '.join(map(str, action.choices))}", value)
    return value


def _parse_exponents(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _parse_exponents(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_parse_exponents(part) for part in value]
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def _option(action: argparse.Action) -> str:
    return next((option for option in action.option_strings if option.startswith('--')), action.dest)
