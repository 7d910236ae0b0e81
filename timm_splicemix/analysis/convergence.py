""" How fast do runs converge, and do they overfit? Loss and mAP over the epochs of several runs in one plot

    python -m timm_splicemix.analysis.convergence output/train/baseline output/train/splicemix
    python -m timm_splicemix.analysis.convergence runs/* --metric eval_ema_mAP --loss eval_ema_loss --output figures

Runs are folders of train.py, the first of them the one that the others are compared with. The table has, for each run,
the best and the last metric, the epoch in which it reaches the best of the first run, and the lowest and the last loss;
a loss that rises from its lowest tells of overfitting. Epochs count from 0.
"""
import argparse
from pathlib import Path
from typing import Any, Optional, Sequence, Union

from ..args import command
from ..draw import load_pyplot, save_figure
from ..files import write_csv
from .common import (
    COLORS,
    Run,
    create_parser,
    format_table,
    output_folder,
    read_runs,
)

NAME = 'convergence'


def parse_args(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = create_parser(NAME, __doc__, 'RUN', 'folders of train.py, the one to compare with first')
    parser.add_argument(
        '--metric', metavar='COLUMN', help='column of summary.csv (default: eval_mAP, or eval_top1 if there is none)')
    parser.add_argument(
        '--loss', default='eval_loss', metavar='COLUMN',
        help='column of summary.csv; training losses of different methods can not be compared (default: %(default)s)')
    return parser.parse_args(argv)


def convergence_rows(runs: Sequence[Run], metric: str, loss: str) -> list[dict[str, Any]]:
    """ Rows of the table.

    Args:
        runs: The runs, the one to compare with first.
        metric: Column that should be high.
        loss: Column that should be low.

    Returns:
        Name, number of epochs, best metric and its epoch, last metric, the first epoch that is at least as good as the
        best of the first run (None if none is), lowest loss and its epoch, last loss.
    """
    goal = max(runs[0].column(metric).values())
    rows = []
    for run in runs:
        metrics, losses = run.column(metric), run.column(loss)
        best, lowest = max(metrics, key=metrics.get), min(losses, key=losses.get)  # the first of equal ones
        rows.append({
            'name': run.name, 'epochs': len(run.rows),
            f'best {metric}': metrics[best], 'best epoch': best, f'last {metric}': metrics[max(metrics)],
            'reaches first': min((epoch for epoch, value in metrics.items() if value >= goal), default=None),
            f'lowest {loss}': losses[lowest], 'lowest epoch': lowest, f'last {loss}': losses[max(losses)],
        })
    return rows


def draw_convergence(runs: Sequence[Run], metric: str, loss: str, path: Union[str, Path]) -> None:
    """ Draw loss and metric over the epochs, a line for each run.

    Args:
        runs: The runs.
        metric: Column that should be high.
        loss: Column that should be low.
        path: Picture to write; none is without matplotlib.
    """
    pyplot = load_pyplot()
    if pyplot is None:
        return
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4), layout='constrained')
    for axes, column in zip(panels, (loss, metric)):
        for number, run in enumerate(runs):
            values = run.column(column)
            axes.plot(
                list(values), list(values.values()), color=COLORS[number % len(COLORS)], label=run.name,
                linestyle=('-', '--', ':')[number // len(COLORS) % 3], marker='o' if len(values) < 15 else None)
        axes.set(title=column, xlabel='epoch')
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
    panels[1].legend(fontsize='small')
    save_figure(figure, path)


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    args = parse_args(argv)
    runs = read_runs(args.paths, args.names)
    metric = args.metric or ('eval_mAP' if 'eval_mAP' in runs[0].rows[0] else 'eval_top1')
    rows = convergence_rows(runs, metric, args.loss)
    print(format_table(rows, precise=[f'lowest {args.loss}', f'last {args.loss}']))
    folder = output_folder(args.output, NAME)
    write_csv(rows, folder / f'{NAME}.csv')
    draw_convergence(runs, metric, args.loss, folder / f'{NAME}.png')
    print(f'\nWritten to {folder}.')


if __name__ == '__main__':
    main()
