""" Times functions alternately in one process, so that all of them see the same load of the machine """
import statistics
import sys
import time
from typing import Any, Callable

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
