""" Times functions alternately in one process, so that all of them see the same load of the machine """
import atexit
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable, Optional

from tqdm import tqdm


def alternate(
        functions: dict[str, Callable[[], Any]],
        rounds: int = 5,
        seconds: float = 0.,
        title: str = '',
) -> dict[str, list[float]]:
    """Seconds of each call, after one call to warm up, for at least `rounds` rounds and `seconds` in total.

    Each round starts with another function.
    """
    for function in functions.values():
        function()
    names = list(functions)
    times: dict[str, list[float]] = {name: [] for name in names}
    start = time.perf_counter()
    with tqdm(desc=title, unit='round', disable=not sys.stderr.isatty(), leave=False) as progress:
        while progress.n < rounds or time.perf_counter() - start < seconds:
            first = progress.n % len(names)
            for name in names[first:] + names[:first]:
                before = time.perf_counter()
                functions[name]()
                times[name].append(time.perf_counter() - before)
            progress.n += 1
            progress.refresh()
    return times


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in times.items()}


def ratios(times: dict[str, list[float]], name: str, base: str) -> tuple[float, float, float]:
    """Quartiles of the ratio of two functions in each round."""
    values = [a / b for a, b in zip(times[name], times[base])]
    return tuple(statistics.quantiles(values, n=4, method='inclusive'))


def claim(
        text: str,
        measured: tuple[float, float, float],
        at_least: Optional[float] = None,
        at_most: Optional[float] = None,
) -> bool:
    """ Compare a measured ratio with its goal, and append both to the file $BENCH_RESULTS for `table.py`.

    Args:
        text: What is compared.
        measured: Lower quartile, median and upper quartile.
        at_least, at_most: The goal for the median.

    Returns:
        Whether the goal is met.
    """
    median = measured[1]
    met = (at_least is None or median >= at_least) and (at_most is None or median <= at_most)
    goal = f'at least {at_least:g}' if at_least is not None else f'at most {at_most:g}'
    _append({'claim': text, 'goal': goal, 'measured': measured, 'met': met})
    if not met:
        print(f'Missed: {text}: expected {goal}, but got {median:.3g}.', file=sys.stderr)
    return met


def not_measured(text: str, goal: str, reason: str) -> None:
    """Append a claim to the file $BENCH_RESULTS that cannot be measured here."""
    _append({'claim': text, 'goal': goal, 'measured': None, 'reason': reason})
    print(f'Not measured: {text}: {reason}.')


def _append(row: dict[str, Any]) -> None:
    if os.environ.get('BENCH_RESULTS'):
        with open(Path(os.environ['BENCH_RESULTS']), 'a', encoding='utf-8') as file:
            file.write(json.dumps(row) + '\n')


@atexit.register
def _append_end() -> None:
    if not hasattr(sys, 'last_value'):  # no exception
        _append({'ended': True})
