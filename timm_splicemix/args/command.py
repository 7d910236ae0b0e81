""" How commands parse their flags and speak of mistakes """
import argparse
import functools
import os
import sys
from typing import Any, Callable, Optional, Sequence


class CommandParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, and whose description keeps its lines."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{'formatter_class': argparse.RawDescriptionHelpFormatter, **kwargs})

    def error(self, message: str):
        self.exit(2, f'{self.prog}: error: {message} (see --help)\n')


def command(main: Callable[[Optional[Sequence[str]]], None]) -> Callable[[Optional[Sequence[str]]], None]:
    """ Make what a user can mend one line and exit code 2 instead of a traceback.

    Set the environment variable TSM_TRACEBACK to see where an error comes from.
    """
    @functools.wraps(main)
    def run(argv: Optional[Sequence[str]] = None) -> None:
        try:
            main(argv)
        except (ValueError, OSError, ImportError) as error:  # the last: an extra that is not installed
            if os.environ.get('TSM_TRACEBACK'):
                raise
            print('error:', ' '.join(str(error).split()), file=sys.stderr)
            sys.exit(2)

    return run
