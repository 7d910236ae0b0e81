""" The flags of this package on the command line of a script of timm's """
import argparse
import sys
from typing import Any, Callable, Optional, Sequence

from ..errors import UsageError
from .command import CommandParser, RefusedAction
from .config import convert_value, flags_on_command_line


class _GroupOfNew:
    """A group of a script's parser that leaves out the flags that the script has; those get our choices, too."""

    def __init__(self, group: Any, taken: dict[str, argparse.Action], shared: set[str]):
        self._group = group
        self._taken = taken
        self.shared = shared

    def add_argument(self, *flags: str, **kwargs: Any) -> None:
        name = flags[-1].lstrip('-').replace('-', '_')
        if name not in self._taken:
            self._group.add_argument(*flags, **kwargs)
            return
        self.shared.add(name)
        action = self._taken[name]
        if action.choices is not None and 'choices' in kwargs:
            action.choices = [*action.choices, *(item for item in kwargs['choices'] if item not in action.choices)]


class _ParserOfNew:
    """What the functions of `ours` need of a parser, for `_GroupOfNew`."""

    def __init__(self, parser: argparse.ArgumentParser, taken: dict[str, argparse.Action]):
        self.shared: set[str] = set()
        self._parser = parser
        self._taken = taken

    def add_argument_group(self, *args: Any, **kwargs: Any) -> _GroupOfNew:
        return _GroupOfNew(self._parser.add_argument_group(*args, **kwargs), self._taken, self.shared)


class ScriptFlags:
    """ Adds flags to the parser of a script, and tells them from the script's own.

    Args:
        parser: Parser of the script; it gets the flags that it lacks.
        add_ours: Adds the flags of this package to a parser.
        known: Parser of our command that corresponds to the script, with our flags and timm's.

    Attributes:
        ours: Names of the flags that the script lacked.
    """

    def __init__(
            self,
            parser: argparse.ArgumentParser,
            add_ours: Callable[[Any], Any],
            known: CommandParser,
    ):
        self.known = known
        self._parser = parser
        self._parse = parser.parse_args
        own = self._actions()
        self._defaults = {name: parser.get_default(name) for name in own}
        new = _ParserOfNew(parser, own)
        add_ours(new)
        self.shared = new.shared
        self.ours = self._actions().keys() - own.keys()

    def _actions(self) -> dict[str, argparse.Action]:
        # argparse has no public list of flags; tests with scripts of timm and of our own notice if this one changes.
        return {action.dest: action for action in self._parser._actions if action.dest != 'help'}

    def parse(self, argv: Optional[Sequence[str]] = None) -> tuple[argparse.Namespace, set[str]]:
        """ Parse a command line, after the script may have replaced defaults by those of a YAML file.

        Args:
            argv: The command line, that of the process if None.

        Returns:
            All flags, and the names of those that the user set.
        """
        argv = sys.argv[1:] if argv is None else argv
        args = self._parse(argv)
        given = flags_on_command_line(self._parse, argv, self._actions())
        given |= {name for name, value in self._defaults.items() if self._parser.get_default(name) != value}
        for name in self.ours - given:
            action, value = self.known.flags[name], getattr(args, name)
            if value == action.default:
                continue
            try:  # the YAML file has set it, without a check
                setattr(args, name, convert_value(action, value))
            except argparse.ArgumentTypeError as error:
                raise UsageError(f"Bad value of '{name}' in the config file: {error}") from None
            given.add(name)
        self.shared -= given
        return args, given

    def without_ours(self, args: argparse.Namespace) -> argparse.Namespace:
        """Return the flags that the script has itself."""
        return argparse.Namespace(**{name: value for name, value in vars(args).items() if name not in self.ours})

    def complete(self, args: argparse.Namespace) -> argparse.Namespace:
        """Return a copy of the flags with our defaults, for those that the script lacks or has with another meaning."""
        defaults = {name: action.default for name, action in self.known.flags.items()}
        shared = {name: defaults[name] for name in self.shared}
        return argparse.Namespace(**{**defaults, **vars(args), **shared})

    def check_supported(self, args: argparse.Namespace) -> None:
        """Raise an error for flags of the script that our parts do not support."""
        for name, action in self.known.flags.items():
            value = getattr(args, name, action.default)
            if isinstance(action, RefusedAction) and value != action.default:
                raise UsageError(f"{action.option_strings[-1]}: {action.message()}")
