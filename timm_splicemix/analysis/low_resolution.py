""" How much accuracy is lost on images smaller than in training? Several models side by side

    python validate.py ... --checkpoint runs/a/model_best.pth.tar --eval-sizes 448 224 112 64 --output results/a
    python validate.py ... --checkpoint runs/b/model_best.pth.tar --eval-sizes 448 224 112 64 --output results/b
    python -m timm_splicemix.analysis.low_resolution results/a results/b --names Baseline SpliceMix

Results are folders that `validate.py --eval-sizes` wrote. The table has a row for each size, and for each model the
metric and its change from the training size, which is marked by a star; the figure has a line for each model.
"""
import argparse
import math
from typing import Any, Optional, Sequence

from ..args import command
from ..draw import draw_sizes
from ..errors import UsageError
from ..files import format_table
from ..results import Result, read_results
from .common import create_parser, write_analysis

NAME = 'low_resolution'


def parse_args(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = create_parser(NAME, __doc__, 'RESULT', 'folders of validate.py --eval-sizes')
    parser.add_argument('--metric', help='such as mAP, CF1 or OF1 (default: mAP, or top1 for single labels)')
    return parser.parse_args(argv)


def read_curves(
        results: Sequence[Result],
        metric: Optional[str] = None,
) -> tuple[dict[str, list[dict[str, Any]]], str]:
    """Return the size, whether it is the training size, and the metric for each result; and the name of the metric."""
    curves = {}
    for result in results:
        sizes = result.content.get('sizes')
        if not sizes:
            raise UsageError(
                f'Expected results of several sizes, but got one size in {result.folder}: evaluate it with validate.py '
                '--eval-sizes.')
        metric = metric or ('mAP' if 'mAP' in sizes[0] else 'top1')
        if any(metric not in row for row in sizes):
            there = ', '.join(name for name in sizes[0] if name not in ('size', 'trained'))
            raise UsageError(f"Expected a metric of {result.folder} ({there}), but got '{metric}'.")
        curves[result.name] = [{
            'size': row['size'], 'trained': row['trained'],
            metric: math.nan if row[metric] is None else float(row[metric]),  # JSON has no NaN
        } for row in sizes]
    return curves, metric


def size_rows(curves: dict[str, list[dict[str, Any]]], metric: str) -> list[dict[str, Any]]:
    """ Return a row for each size, the largest first, with None for a model that was not evaluated at the size.

    Args:
        curves: First return value of `read_curves`.
        metric: Metric to compare.
    """
    trained = {row['size'] for sizes in curves.values() for row in sizes if row['trained']}
    rows = []
    for size in sorted({row['size'] for sizes in curves.values() for row in sizes}, reverse=True):
        cells: dict[str, Any] = {'size': f'{size} *' if size in trained else str(size)}
        for name, sizes in curves.items():
            own = next((row[metric] for row in sizes if row['trained']), math.nan)
            value = next((row[metric] for row in sizes if row['size'] == size), None)
            cells[f'{name} {metric}'] = value
            cells[f'{name} change'] = None if value is None else value - own
        rows.append(cells)
    return rows


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    args = parse_args(argv)
    curves, metric = read_curves(read_results(args.paths, args.names), args.metric)
    rows = size_rows(curves, metric)
    print(f'{metric} in %, * training size\n\n{format_table(rows, {f"{name} change": "+.2f" for name in curves})}')
    table = [{**row, 'size': row['size'].split()[0]} for row in rows]
    write_analysis(args.output, NAME, {NAME: table}, lambda path: draw_sizes(curves, path, metric))


if __name__ == '__main__':
    main()
