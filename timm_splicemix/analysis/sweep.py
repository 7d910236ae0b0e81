""" Which grid, and how many mixed images? mAP over both, with mean and standard deviation over seeds

    for grid in 1x2 2x2 2x3 2x3-2; do for ratio in 0.125 0.25 0.5; do for seed in 0 1 2; do
      python train.py ... --splicemix-grids $grid --splicemix-ratio $ratio --splicemix-drop-prob 0 --seed $seed \\
        --output sweep --experiment $grid-$ratio-$seed
    done; done; done
    python -m timm_splicemix.analysis.sweep sweep/*

Runs are folders of train.py that differ in --splicemix-grids, --splicemix-ratio, --splicemix-drop-prob and --seed; runs
without grids are the baseline. Runs with the same grids and number of mixed images form one row of the table. In the
figure, lines of grids with dropped cells are dashed.
"""
import argparse
import logging
import math
import statistics
from pathlib import Path
from typing import Any, Optional, Sequence, Union

from ..args import command, splicemix_kwargs
from ..draw import COLORS, INK, load_pyplot, save_figure
from ..errors import UsageError
from ..files import format_table
from ..mix import SpliceMix, parse_grids
from .common import Run, create_parser, read_runs, write_analysis

_logger = logging.getLogger(__name__)

NAME = 'sweep'
BASELINE = 'baseline'
_SWEPT = {'splicemix_grids', 'splicemix_ratio', 'splicemix_drop_prob', 'seed'}
# Flags that do not affect the result
_NEUTRAL = {
    'checkpoint_hist', 'data', 'data_dir', 'dataset_download', 'device', 'experiment', 'local_rank', 'log_interval',
    'log_tensorboard', 'log_wandb', 'output', 'pin_mem', 'recovery_interval', 'resume', 'save_images',
    'synchronize_step', 'wandb_project', 'wandb_resume_id', 'wandb_tags', 'workers'}
_STEPS = 100  # to average the number of mixed images over


def parse_args(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = create_parser(NAME, __doc__, 'RUN', 'folders of train.py', named=False)
    parser.add_argument(
        '--metric', default='eval_mAP', metavar='COLUMN', help='column of summary.csv (default: %(default)s)')
    parser.add_argument(
        '--epoch', choices=('best', 'last'), default='best',
        help='epoch to use; the best one is chosen on the validation images themselves (default: %(default)s)')
    parser.add_argument(
        '--ignore', nargs='+', default=(), metavar='FLAG', help='other settings that may differ, such as batch_size')
    return parser.parse_args(argv)


def describe_grids(settings: dict[str, Any]) -> str:
    """Return the grids of a run, with the probability of dropping cells if it has an effect."""
    text = str(settings.get('splicemix_grids') or '')
    if not text:
        return BASELINE
    grids = parse_grids(text)
    prob = settings.get('splicemix_drop_prob', 0.)
    drops = prob and any(grid.drop is None and grid.cells > 1 for grid in grids)
    return ','.join(map(str, grids)) + (f' drop {prob:g}' if drops else '')


def count_mixed(settings: dict[str, Any]) -> Union[int, float]:
    """Return the number of mixed images per batch; a mean, if it depends on the grid that is drawn (ratio 'ref')."""
    if not settings.get('splicemix_grids'):
        return 0
    try:
        kwargs = splicemix_kwargs(argparse.Namespace(**{**settings, 'splicemix_unknown': [], 'splicemix_all': []}))
        if kwargs['ratio'] != 'ref':
            kwargs['ratio'] = float(kwargs['ratio'])  # runs of 0.1.0 saved it as text
        mixer = SpliceMix(**{**kwargs, 'prob': 1.})
        size = int(settings['batch_size'])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f'Expected the flags of SpliceMix in args.yaml, but got: {error}') from error
    numbers = []
    for step in range(_STEPS):
        mixer.set_step(0, step)
        numbers.append(mixer.plan(size).num_mixed)
    return numbers[0] if len(set(numbers)) == 1 else sum(numbers) / len(numbers)


def check_same_settings(runs: Sequence[Run], settings: Sequence[dict[str, Any]], ignore: Sequence[str] = ()) -> None:
    """ Refuse runs that differ in other settings than the swept ones.

    Args:
        runs: The runs.
        settings: Settings of each run.
        ignore: Other settings that may differ.
    """
    free = _SWEPT | _NEUTRAL | {name.lstrip('-').replace('-', '_') for name in ignore}
    pairs = list(zip(runs, settings))
    mixed = [(run, own) for run, own in pairs if own.get('splicemix_grids')]
    for some, of_splicemix in ((pairs, False), (mixed, True)):  # SpliceMix flags only matter with SpliceMix
        for run, own in some[1:]:
            first, flags = some[0]
            for name in sorted({*own, *flags} - free):
                if name.startswith('splicemix_') == of_splicemix and own.get(name) != flags.get(name):
                    raise UsageError(
                        f'Expected runs that differ in grids, number of mixed images and seed, but got {name} '
                        f'{flags.get(name)} in {first.folder} and {own.get(name)} in {run.folder}: leave one out, or '
                        f'add --ignore {name}.')


def sweep_rows(
        runs: Sequence[Run],
        settings: Sequence[dict[str, Any]],
        metric: str = 'eval_mAP',
        epoch: str = 'best',
) -> list[dict[str, Any]]:
    """ Return a row for each choice of grids and number of mixed images, the baseline first.

    Args:
        runs: The runs.
        settings: Settings of each run.
        metric: Column of the summaries.
        epoch: 'best' or 'last'.
    """
    groups: dict[tuple[str, float], dict[Any, float]] = {}
    for run, own in zip(runs, settings):
        values = run.column(metric)
        wanted = own.get('epochs')
        if isinstance(wanted, int) and max(int(row['epoch']) for row in run.rows) + 1 < wanted:
            _logger.warning(f'{run.folder} has {len(run.rows)} of {wanted} epochs.')
        group = groups.setdefault((describe_grids(own), count_mixed(own)), {})
        seed = own.get('seed')
        if seed in group:
            raise UsageError(
                f'Expected runs of different seeds, but got two of seed {seed} with {describe_grids(own)} and '
                f'{count_mixed(own):g} mixed images, the second in {run.folder}.')
        group[seed] = max(values.values()) if epoch == 'best' else values[max(values)]
    plain = groups.get((BASELINE, 0))
    base = statistics.mean(plain.values()) if plain else math.nan
    rows = []
    for (grids, mixed), by_seed in sorted(groups.items(), key=lambda item: (item[0][0] != BASELINE, item[0])):
        values = list(by_seed.values())
        average = statistics.mean(values)
        rows.append({
            'grids': grids, 'mixed': mixed, 'runs': len(values), metric: average,
            'deviation': statistics.stdev(values) if len(values) > 1 else math.nan,
            'gain': average - base})
    return rows


def draw_sweep(rows: Sequence[dict[str, Any]], metric: str, path: Path) -> None:
    """Draw mean and standard deviation over the number of mixed images, one line per choice of grids."""
    pyplot = load_pyplot()
    if pyplot is None:
        return
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout='constrained')
    colors: dict[tuple[tuple[int, int], ...], str] = {}
    for name in dict.fromkeys(row['grids'] for row in rows):
        some = [row for row in rows if row['grids'] == name]
        means = [row[metric] for row in some]
        spread = [0. if math.isnan(row['deviation']) else row['deviation'] for row in some]
        low, high = ([a + sign * b for a, b in zip(means, spread)] for sign in (-1, 1))
        if name == BASELINE:
            axes.axhline(means[0], color=INK, linewidth=1, label=BASELINE)
            axes.axhspan(low[0], high[0], color=INK, alpha=0.1)
            continue
        grids = parse_grids(name.partition(' ')[0])
        # The same grids have the same colour with and without dropped cells.
        color = colors.setdefault(tuple((grid.rows, grid.cols) for grid in grids), COLORS[len(colors) % len(COLORS)])
        drops = ' drop ' in name or any(grid.drop for grid in grids)
        places = [row['mixed'] for row in some]
        axes.plot(places, means, color=color, linestyle='--' if drops else '-', marker='o', markersize=4, label=name)
        axes.fill_between(places, low, high, color=color, alpha=0.12)
    axes.set(xlabel='mixed images per batch', ylabel=f'{metric}: mean and standard deviation')
    axes.grid(alpha=0.3)
    axes.legend(fontsize='small')
    save_figure(figure, path)


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    args = parse_args(argv)
    runs = read_runs(args.paths)
    settings = [run.settings() for run in runs]
    check_same_settings(runs, settings, args.ignore)
    rows = sweep_rows(runs, settings, args.metric, args.epoch)
    print(format_table(rows, {'gain': '+.2f'}))
    write_analysis(args.output, NAME, {NAME: rows}, lambda path: draw_sweep(rows, args.metric, path))


if __name__ == '__main__':
    main()
