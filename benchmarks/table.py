""" One table of all claims that benchmarks wrote to the file $BENCH_RESULTS: claim, goal, measured

    BENCH_RESULTS=output/bench.jsonl python benchmarks/metrics.py
    python benchmarks/table.py output/bench.jsonl

`make bench` writes a row {"script": NAME} before each benchmark, so that the table shows those that crashed. Exits with
1 if there are any.
"""
import argparse
import json
import sys
from pathlib import Path
from typing import Any


def find_crashed(rows: list[dict[str, Any]]) -> list[str]:
    """Scripts that did not come to their end, or have no claim."""
    starts = [index for index, row in enumerate(rows) if 'script' in row]
    crashed = []
    for start, stop in zip(starts, [*starts[1:], len(rows)]):
        keys = {key for row in rows[start:stop] for key in row}
        if not {'claim', 'ended'} <= keys:
            crashed.append(rows[start]['script'])
    return crashed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('file', type=Path, help='file of results')
    rows = [json.loads(line) for line in parser.parse_args().file.read_text(encoding='utf-8').splitlines()]
    print('| claim | goal | measured (quartiles) | met |\n|---|---|---|---|')
    for row in (row for row in rows if 'claim' in row):
        measured, met = f"not measured: {row.get('reason')}", '-'
        if row['measured'] is not None:
            low, median, high = (f'{value:.3g}' for value in row['measured'])
            measured, met = f'{median} ({low} to {high})', 'yes' if row['met'] else 'no'
        print(f"| {row['claim']} | {row['goal']} | {measured} | {met} |")
    crashed = find_crashed(rows)
    for script in crashed:
        print(f'| benchmarks/{script} | | crashed, see its output above | no |')
    sys.exit(bool(crashed))


if __name__ == '__main__':
    main()
