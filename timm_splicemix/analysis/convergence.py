""" How fast do runs converge, and do they overfit? Loss and mAP over the epochs of several runs in one plot

    python -m timm_splicemix.analysis.convergence output/train/baseline output/train/splicemix
    python -m timm_splicemix.analysis.convergence runs/* --metric eval_ema_mAP --loss eval_ema_loss --output figures

Runs are folders of train.py; the first is the baseline. The table lists, for each run, the best and the last metric,
the first epoch that reaches the best metric of the baseline, and the lowest and the last loss; a loss that rises after
its minimum is a sign of overfitting. Epochs count from 0.
"""
import argparse
from pathlib import Path
from typing import Any, Optional, Sequence

from ..args import command
from ..draw import COLORS, load_pyplot, plot_text, save_figure
from ..files import format_table
from .common import Run, create_parser, read_runs, write_analysis

NAME = 'convergence'


def parse_args(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = create_parser(NAME, __doc__, 'RUN', 'folders of train.py, the baseline first')
    parser.add_argument(
        '--metric', metavar='COLUMN', help='column of summary.csv (default: eval_mAP, or eval_top1 if there is none)')
    parser.add_argument(
        '--loss', default='eval_loss', metavar='COLUMN',
        help='column of summary.csv; training losses of different methods are not comparable (default: %(default)s)')
    return parser.parse_args(argv)


def convergence_rows(runs: Sequence[Run], metric: str, loss: str) -> list[dict[str, Any]]:
    """ Return a row for each run; 'reaches first' is None for a run that never reaches the best of the first run.

    Args:
        runs: The runs, the baseline first.
        metric: Column to maximise.
        loss: Column to minimise.
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


def draw_convergence(runs: Sequence[Run], metric: str, loss: str, path: Path) -> None:
    """Draw loss and metric over the epochs, one line per run."""
    pyplot = load_pyplot()
    if pyplot is None:
        return
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4), layout='constrained')
    for axes, column in zip(panels, (loss, metric)):
        for number, run in enumerate(runs):
            values = run.column(column)
            axes.plot(
                list(values), list(values.values()), color=COLORS[number % len(COLORS)], label=plot_text(run.name),
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
    print(format_table(rows, {f'lowest {args.loss}': '.4f', f'last {args.loss}': '.4f'}))
    write_analysis(args.output, NAME, {NAME: rows}, lambda path: draw_convergence(runs, metric, args.loss, path))


if __name__ == '__main__':
    main()
