""" Types of flags: argparse applies them to the command line, `parse_with_config` to YAML values """
import argparse
import math
from typing import Callable, Optional, Union

Number = Union[int, float]


def _number(
        kind: type,
        low: Optional[Number] = None,
        high: Optional[Number] = None,
        above: Optional[Number] = None,
        below: Optional[Number] = None,
) -> Callable[[str], Number]:
    """ A type that parses a finite number.

    Args:
        kind: int or float.
        low: Smallest value.
        high: Largest value, together with `low` or `above`.
        above: Lower bound that is excluded.
        below: Upper bound that is excluded, together with `above`.
    """
    expected = f"a {'whole' if kind is int else 'finite'} number"
    if above is not None:
        expected += f' above {above:g}' + ('' if high is None else f' and at most {high:g}')
        expected += '' if below is None else f' and below {below:g}'
    elif low is not None:
        expected += f' of at least {low:g}' if high is None else f' from {low:g} to {high:g}'

    def parse(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        fits = math.isfinite(value) and (low is None or value >= low) and (high is None or value <= high)
        if not fits or (above is not None and value <= above) or (below is not None and value >= below):
            raise argparse.ArgumentTypeError(f"Expected {expected}, but got '{text}'")
        return value

    return parse


integer = _number(int)
number = _number(float)
probability = _number(float, low=0, high=1)
fraction = _number(float, above=0, high=1)
open_fraction = _number(float, above=0, below=1)


def at_least(low: Number) -> Callable[[str], Number]:
    """A number that is not below `low`; a whole number if `low` is an int."""
    return _number(type(low), low=low)


def above(low: float) -> Callable[[str], float]:
    return _number(float, above=low)


def number_or(word: str) -> Callable[[str], Union[float, str]]:
    """A finite number, or one word that stands for a computed value."""
    def parse(text: str) -> Union[float, str]:
        if text == word:
            return text
        try:
            return number(text)
        except argparse.ArgumentTypeError:
            raise argparse.ArgumentTypeError(f"Expected a number or '{word}', but got '{text}'") from None

    return parse
