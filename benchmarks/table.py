""" One table of all claims that benchmarks wrote to the file $BENCH_RESULTS: claim, goal, measured

    BENCH_RESULTS=output/bench.jsonl python benchmarks/metrics.py
    python benchmarks/table.py output/bench.jsonl
"""
import argparse
import json
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('file', type=Path, help='file of results')
    rows = [json.loads(line) for line in parser.parse_args().file.read_text(encoding='utf-8').splitlines()]
    print('| claim | goal | measured (quartiles) | met |\n|---|---|---|---|')
    for row in rows:
        low, median, high = (f'{value:.3g}' for value in row['measured'])
        print(f"| {row['claim']} | {row['goal']} | {median} ({low} to {high}) | {'yes' if row['met'] else 'no'} |")


if __name__ == '__main__':
    main()
