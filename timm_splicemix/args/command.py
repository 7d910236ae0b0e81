""" The argument parser and the error handling of all commands """
import argparse
import functools
import logging
import os
import shutil
import sys
import textwrap
from typing import Any, Callable, Mapping, Optional, Sequence

from timm.utils import setup_default_logging

from ..errors import UsageError
from ..files import printable


class CommandParser(argparse.ArgumentParser):
    """ An argument parser with one-line errors, defaults in its help texts, and a public list of its flags.

    Attributes:
        flags: Actions by their name in the parsed arguments, without --help.
        exclusive: Lists of flags that exclude each other.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        self.flags: dict[str, argparse.Action] = {}
        self.exclusive: list[list[argparse.Action]] = []
        position = min(36, shutil.get_terminal_size().columns // 3)
        formatter = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=position)
        super().__init__(*args, **{'formatter_class': formatter, **kwargs})
        self.description = self.description and self.description.strip()

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        return self._record(super().add_argument(*args, **kwargs))

    def add_argument_group(self, *args: Any, **kwargs: Any) -> Any:
        return self._observe(super().add_argument_group(*args, **kwargs))

    def add_mutually_exclusive_group(self, **kwargs: Any) -> Any:
        self.exclusive.append([])
        return self._observe(super().add_mutually_exclusive_group(**kwargs), self.exclusive[-1])

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: error: {printable(' '.join(message.split()))} (see --help)\n")

    def _observe(self, group: Any, exclusive: Optional[list[argparse.Action]] = None) -> Any:
        """Record what is added to a group, which argparse does not report to its parser."""
        add_argument, add_group = group.add_argument, group.add_mutually_exclusive_group

        def add(*args: Any, **kwargs: Any) -> argparse.Action:
            action = self._record(add_argument(*args, **kwargs))
            if exclusive is not None:
                exclusive.append(action)
            return action

        def add_exclusive(**kwargs: Any) -> Any:
            self.exclusive.append([])
            return self._observe(add_group(**kwargs), self.exclusive[-1])

        group.add_argument, group.add_mutually_exclusive_group = add, add_exclusive
        return group

    def _record(self, action: argparse.Action) -> argparse.Action:
        if action.default is argparse.SUPPRESS:  # --help
            return action
        self.flags[action.dest] = action
        default = action.default
        if action.help in (None, argparse.SUPPRESS) or 'default' in action.help:
            return action
        if default is not False and default not in (None, '', [], {}):
            shown = ' '.join(map(str, default)) if isinstance(default, list) else '%(default)s'
            action.help += f' (default: {shown})'
        return action


class RefusedAction(argparse.Action):
    """ A flag that is accepted with its default only.

    Args:
        reason: Why no other value is supported.
    """

    def __init__(self, option_strings: Sequence[str], dest: str, default: Any, reason: str):
        nargs = 0 if default is False else '+' if isinstance(default, list) else None
        super().__init__(option_strings, dest, nargs, default=default, help=argparse.SUPPRESS)
        self.reason = reason

    def __call__(
            self,
            parser: argparse.ArgumentParser,
            namespace: argparse.Namespace,
            values: Any,
            option_string: Optional[str] = None,
    ) -> None:
        if self.nargs == 0 or not self.accepts(values):
            raise argparse.ArgumentError(self, self.message())
        setattr(namespace, self.dest, self.default)

    def accepts(self, value: Any) -> bool:
        """Whether a value of the command line or of a YAML file is the default."""
        if isinstance(self.default, list):
            return isinstance(value, list) and list(map(str, value)) == list(map(str, self.default))
        try:
            return value == self.default or type(self.default)(str(value)) == self.default
        except (TypeError, ValueError):
            return False

    def message(self) -> str:
        has_default = self.default not in (None, '') and self.default is not False
        return f"{f'Only the default {self.default} is' if has_default else 'Not'} supported: {self.reason}"


def add_refused_args(parser: argparse.ArgumentParser, refused: Mapping[str, tuple[Any, str]]) -> None:
    """ Add flags that are accepted with their default only, in one group of the help.

    Args:
        parser: Parser that gets the group.
        refused: Default and reason of each flag.
    """
    flags = {name: f"--{name.replace('_', '-')}" for name in refused}
    description = textwrap.fill(
        f"accepted with their default only, so that commands and configs of timm run: {' '.join(flags.values())}",
        width=100, break_on_hyphens=False)
    group = parser.add_argument_group('Not supported', description)
    for name, (default, reason) in refused.items():
        group.add_argument(flags[name], action=RefusedAction, default=default, reason=reason)


def setup_logging() -> None:
    """Log to the terminal as timm does, with control characters in the names of classes and files escaped."""
    def escape(record: logging.LogRecord) -> bool:
        record.msg, record.args = printable(record.getMessage(), keep='\n'), ()
        return True

    setup_default_logging()
    for handler in logging.getLogger().handlers:
        handler.addFilter(escape)


def command(main: Callable[[Optional[Sequence[str]]], None]) -> Callable[[Optional[Sequence[str]]], None]:
    """ Print a `UsageError` as one line and exit with code 2; other exceptions are bugs and keep their traceback.

    The environment variable TSM_TRACEBACK shows the traceback of a `UsageError` too.
    """
    @functools.wraps(main)
    def run(argv: Optional[Sequence[str]] = None) -> None:
        try:
            main(argv)
        except UsageError as error:
            if os.environ.get('TSM_TRACEBACK'):
                raise
            print('error:', printable(' '.join(str(error).split())), file=sys.stderr)
            sys.exit(2)

    return run
