""" A flag that takes keyword arguments """
import argparse
import ast
from typing import Any, Optional, Sequence


class KwargsAction(argparse.Action):
    """ Turn KEY=VALUE ... into a dict, values read as Python literals where they are some, and as text otherwise.

    As on timm's command line, and the last such flag replaces those before it.
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
