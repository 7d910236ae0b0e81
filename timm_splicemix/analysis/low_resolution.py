""" How much is lost when images are smaller than those of training? Several models side by side

    python validate.py ... --checkpoint runs/a/model_best.pth.tar --eval-sizes 448 224 112 64 --output results/a
    python validate.py ... --checkpoint runs/b/model_best.pth.tar --eval-sizes 448 224 112 64 --output results/b
    python -m timm_splicemix.analysis.low_resolution results/a results/b --names Baseline SpliceMix

Results are folders that `validate.py --eval-sizes` wrote. The table has a row for each size, and for each model the
metric and its change from the size of training, which a star marks; the picture has a line for each model.
"""
import argparse
import math
from typing import Any, Optional, Sequence

from ..args import command
from ..draw import draw_sizes
from ..errors import UsageError
from ..files import write_csv
from .common import (
    Evaluation,
    create_parser,
    format_table,
    output_folder,
    read_evaluations,
)

NAME = 'low_resolution'


def parse_args(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = create_parser(NAME, __doc__, 'RESULT', 'folders of validate.py --eval-sizes')
    parser.add_argument('--metric', help='such as mAP, CF1 or OF1 (default: mAP, or top1 with a class per image)')
    return parser.parse_args(argv)


def read_curves(
        evaluations: Sequence[Evaluation],
        metric: Optional[str] = None,
) -> tuple[dict[str, list[dict[str, Any]]], str]:
    """ Size, whether it is that of training, and the metric, for each size of each result; and the metric's name.

    Args:
        evaluations: Results with sizes.
        metric: What is compared, mAP or top1 if None.
    """
    curves = {}
    for evaluation in evaluations:
        sizes = evaluation.content.get('sizes')
        if not sizes:
            raise UsageError(
                f'Expected results of several sizes, but got {evaluation.folder} with one: evaluate it with '
                'validate.py --eval-sizes.')
        metric = metric or ('mAP' if 'mAP' in sizes[0] else 'top1')
        if any(metric not in row for row in sizes):
            there = ', '.join(name for name in sizes[0] if name not in ('size', 'trained'))
            raise UsageError(f"Expected a metric of {evaluation.folder} ({there}), but got '{metric}'.")
        curves[evaluation.name] = [{
            'size': row['size'], 'trained': row['trained'],
            metric: math.nan if row[metric] is None else float(row[metric]),  # JSON has no NaN
        } for row in sizes]
    return curves, metric


def size_rows(curves: dict[str, list[dict[str, Any]]], metric: str) -> list[dict[str, Any]]:
    """ Rows of the table, the largest size first.

    Args:
        curves: What `read_curves` returned.
        metric: What is compared.

    Returns:
        Size, with a star if a model was trained with it, and the metric and its change for each model; None where a
        model was not evaluated.
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
    curves, metric = read_curves(read_evaluations(args.paths, args.names), args.metric)
    rows = size_rows(curves, metric)
    print(f'{metric} in %, * size of training\n\n{format_table(rows, signed=[f"{name} change" for name in curves])}')
    folder = output_folder(args.output, NAME)
    write_csv([{**row, 'size': row['size'].split()[0]} for row in rows], folder / f'{NAME}.csv')
    draw_sizes(curves, folder / f'{NAME}.png', metric)
    print(f'\nWritten to {folder}.')


if __name__ == '__main__':
    main()
