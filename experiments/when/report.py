""" Tables and the picture of the study, from its records and those of the VOC study

    python experiments/when/report.py [--output DIR] [--picture FILE]

The gap of a run is the validation loss divided by the training loss of the plain model, both after the last epoch; the
training loss is the one that train.py logs. A gain is the difference of the mAP of two runs with the same seed.
"""
import argparse
import itertools
import json
import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterable, Optional, Sequence

import numpy as np
from plan import ARMS, PLAIN, SEARCH_SEED, SETTINGS, WEIGHTED_ARMS, chosen_rate, search_runs, without_weight
from queue_runs import HERE, RECORDS, SAMPLES, read_finished, read_lines, scores_of

VOC_RECORDS = HERE.parent / 'voc' / 'records'
VOC_STUDY = ('voc-128', 'voc-128-20', 'voc-224', 'voc-224-20')  # all of split train, with 10 and 20 epochs
VOC_ARMS = {'baseline': PLAIN, **{arm: arm for arm in ARMS}}

PLACES = {'val': 'val', 'val_unbiased': 'val_unbiased', 'val_half': 'val at half size'}
CLEAR_GAIN = 0.5  # in mAP; smaller differences change their sign with the seed
MIXED = [arm for arm in ARMS if arm != PLAIN]


@dataclass
class Cell:
    """ Reported runs of a setting and a number of images.

    Args:
        title: Title of the setting.
        images: Number of training images.
        runs: Records by arm and seed.
    """
    title: str
    images: int
    runs: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)

    def seeds(self, arm: str) -> list[int]:
        """Seeds of an arm that have a plain run too."""
        return sorted(seed for name, seed in self.runs if name == arm and (PLAIN, seed) in self.runs)

    def count_seeds(self) -> str:
        """Number of seeds, or one number for each arm if they differ."""
        counts = [str(len(self.seeds(arm))) for arm in ARMS]
        return counts[0] if len(set(counts)) == 1 else ' / '.join(counts)

    def values(self, arm: str, place: str) -> list[float]:
        """mAP of each seed; [] where it was not measured."""
        metrics = [self.runs[arm, seed]['metrics'] for seed in self.seeds(arm)]
        return [found[place]['mAP'] for found in metrics if place in found]

    def gain(self, arm: str, place: str, seed: int) -> float:
        """Gain in mAP over the plain run of the same seed."""
        mine, plain = (self.runs[name, seed]['metrics'][place]['mAP'] for name in (arm, PLAIN))
        return mine - plain

    def gains(self, arm: str, place: str) -> list[float]:
        """Gain of each seed; [] where it was not measured."""
        is_measured = bool(self.values(arm, place))
        return [self.gain(arm, place, seed) for seed in self.seeds(arm)] if is_measured else []

    def losses(self, seed: int) -> tuple[float, float]:
        """Training and validation loss of the plain run after its last epoch."""
        run = self.runs[PLAIN, seed]
        return run['curve']['train_loss'][-1], run['metrics']['val']['loss']

    def gap(self, seed: int) -> float:
        """Validation loss / training loss of the plain run."""
        train, val = self.losses(seed)
        return val / train


def make_cells(finished: dict[str, dict[str, Any]]) -> list[Cell]:
    """ Runs with the learning rate of the search, or its middle rate while the search isn't finished.

    Args:
        finished: Records by name.
    """
    scores = scores_of(finished)
    cells: dict[tuple[str, int], Cell] = {}
    for record in finished.values():
        recipe = SETTINGS[record['setting']].recipe
        rate = chosen_rate(recipe, record['arm'], scores) or recipe.rates[1]
        if record['seed'] != SEARCH_SEED and record['lr'] == rate:
            key = record['setting'], record['images']
            cell = cells.setdefault(key, Cell(SETTINGS[key[0]].title, key[1]))
            cell.runs[record['arm'], record['seed']] = record
    order = list(SETTINGS)
    return [cells[key] for key in sorted(cells, key=lambda key: (order.index(key[0]), key[1]))]


def voc_study_cells(folder: Path) -> list[Cell]:
    """ Cells of the VOC study, whose arms share one learning rate and are trained on all images.

    Args:
        folder: Its records.
    """
    cells = []
    for name in VOC_STUDY:
        if not (folder / name).is_dir():
            continue
        records = json.loads((folder / name / 'runs.json').read_text(encoding='utf-8'))
        found = [(item['record'], item['rows'][-1], item['evaluation']['sizes']) for item in records.values()]
        size, epochs = found[0][2][0]['size'], found[0][0]['epochs']
        cell = Cell(f'VOC study, {size} px, {epochs} epochs', 2500)
        for record, last, sizes in found:
            if record['arm'] in VOC_ARMS:
                mAPs = {each['size']: each['mAP'] for each in sizes}
                cell.runs[VOC_ARMS[record['arm']], record['seed']] = {
                    'name': f'{name}-{record["arm"]}-{record["seed"]}',
                    'metrics': {
                        'val': {'mAP': mAPs[size], 'loss': float(last['eval_loss'])},
                        'val_half': {'mAP': mAPs[size // 2]}},
                    'curve': {'train_loss': [float(last['train_task_loss'])]}}
        cells.append(cell)
    return cells


def mean_and_std(values: Sequence[float], digits: int = 1, sign: str = '') -> str:
    """Mean, with the standard deviation of two values or more; a dash without values."""
    if not values:
        return '-'
    mean = f'{round(statistics.mean(values), digits) + 0.:{sign}.{digits}f}'
    return f'{mean} ± {statistics.stdev(values):.{digits}f}' if len(values) > 1 else mean


def interval(cell: Cell, arm: str, place: str, samples: dict[str, dict[str, list[int]]]) -> str:
    """ 95 % interval of the mean gain, by bootstrap over validation images; '' without samples.

    Args:
        cell: The cell.
        arm: The arm.
        place: What is scored, a key of `PLACES`.
        samples: mAP of the bootstrap samples of each run, in hundredths of a percent.
    """
    gains = []
    for seed in cell.seeds(arm):
        mine, plain = (samples.get(cell.runs[name, seed]['name'], {}).get(place) for name in (arm, PLAIN))
        if mine is None or plain is None:
            return ''
        gains.append((np.array(mine) - np.array(plain)) / 100)
    if not gains:
        return ''
    low, high = np.quantile(np.mean(gains, axis=0), (0.025, 0.975))
    return f' ({low:+.1f} to {high:+.1f})'


def format_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ['---'] * len(head), *rows]
    return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


def rate_table(finished: dict[str, dict[str, Any]]) -> str:
    """mAP of each learning rate of the search, the chosen one in bold."""
    scores, rows = scores_of(finished), []
    for recipe in dict.fromkeys(setting.recipe for setting in SETTINGS.values()):
        for arm, title in ARMS.items():
            runs = search_runs(recipe, arm)
            chosen = chosen_rate(recipe, arm, scores)
            values = {run.lr: f'{scores[run.name]:.1f}' if run.name in scores else '-' for run in runs}
            if any(value != '-' for value in values.values()):
                cells = ', '.join(
                    f'**{lr:g}: {value}**' if lr == chosen else f'{lr:g}: {value}' for lr, value in values.items())
                rows.append([f'{recipe.search[0]}, {recipe.search[1]:,} images', title, cells])
    return format_table(['search', 'arm', 'learning rate: mAP'], rows)


def gain_table(cells: Sequence[Cell], place: str, samples: dict[str, dict[str, list[int]]]) -> str:
    """ Gains over the plain runs, a row for each cell.

    Args:
        cells: The cells.
        place: What is scored, a key of `PLACES`.
        samples: mAP of the bootstrap samples of each run.
    """
    head = ['setting', 'images', 'seeds', 'plain', *(f'{ARMS[arm]}: gain' for arm in MIXED)]
    with_losses = place == 'val'
    rows = []
    for cell in cells:
        if not cell.values(PLAIN, place):
            continue
        gains = [
            mean_and_std(cell.gains(arm, place), sign='+')
            + interval(cell, arm, place, samples) for arm in MIXED]
        row = [
            cell.title, f'{cell.images:,}', cell.count_seeds(), mean_and_std(cell.values(PLAIN, place)), *gains]
        if with_losses:
            train, val = zip(*(cell.losses(seed) for seed in cell.seeds(PLAIN)))
            gaps = [cell.gap(seed) for seed in cell.seeds(PLAIN)]
            row += [*(f'{statistics.mean(losses):.3f}' for losses in (train, val)), mean_and_std(gaps)]
        rows.append(row)
    return format_table([*head, *(['plain: training loss', 'validation loss', 'gap'] if with_losses else [])], rows)


def summary_table(cells: Sequence[Cell]) -> str:
    """The table of docs/when.md: gains on val and at half size, from the largest gap to the smallest."""
    head = ['plain model: validation / training loss', 'setting', 'images', 'seeds', *(
        f'{where}{ARMS[arm]}' for where in ('', 'half size: ') for arm in MIXED)]
    rows = []
    for cell in cells:
        gap = statistics.mean(cell.gap(seed) for seed in cell.seeds(PLAIN))
        gains = [
            mean_and_std(cell.gains(arm, place), sign='+')
            for place in ('val', 'val_half') for arm in MIXED]
        rows.append((gap, [f'{gap:.1f}', cell.title, f'{cell.images:,}', cell.count_seeds(), *gains]))
    return format_table(head, [row for _, row in sorted(rows, key=lambda row: -row[0])])


def weight_table(cells: Sequence[Cell]) -> str:
    """Gains with and without less weight for mixed images, of the seeds that have both; '' if there are none."""
    rows = []
    for cell, place in itertools.product(cells, PLACES):
        row = []
        for arm in WEIGHTED_ARMS:
            seeds = [seed for seed in cell.seeds(arm) if cell.values(arm, place)]
            for each in (without_weight(arm), arm):
                row.append(mean_and_std([cell.gain(each, place, seed) for seed in seeds], sign='+'))
        if row.count('-') < len(row):
            gap = statistics.mean(cell.gap(seed) for seed in cell.seeds(PLAIN))
            seeds = str(len(cell.seeds(next(iter(WEIGHTED_ARMS)))))
            rows.append([cell.title, f'{cell.images:,}', f'{gap:.1f}', seeds, PLACES[place], *row])
    arms = [title for arm, weighted in WEIGHTED_ARMS.items() for title in (ARMS[without_weight(arm)], weighted)]
    return format_table(['setting', 'images', 'gap', 'seeds', 'mAP on', *arms], rows) if rows else ''


def best_threshold(points: Sequence[tuple[float, float]]) -> float:
    """ The threshold of a predictor above which gains are positive most reliably.

    Args:
        points: Predictor and gain of each pair of runs.
    """
    values = sorted({value for value, _ in points})
    middles = [(low + high) / 2 for low, high in itertools.pairwise(values)]
    return max([values[0] - 1e-6, *middles, values[-1]], key=lambda threshold: count_hits(points, threshold))


def count_hits(points: Iterable[tuple[float, float]], threshold: float) -> int:
    """Number of points whose gain is positive exactly if the predictor is above the threshold."""
    return sum((value > threshold) == (gain > 0) for value, gain in points)


def _clear_hits(points: Sequence[tuple[float, float]], threshold: float) -> str:
    clear = [point for point in points if abs(point[1]) >= CLEAR_GAIN]
    return (
        f'Of pairs that differ by at least {CLEAR_GAIN:g} mAP: {count_hits(clear, threshold)} of {len(clear)}, always '
        f'"gains" {sum(gain > 0 for _, gain in clear)}.')


def rule_lines(cells: Sequence[Cell]) -> list[str]:
    """ How well a threshold of the gap, or of the difference of the losses, predicts the sign of the gain on val.

    The second hit rate is the honest one: each cell is predicted by the threshold of all other cells.

    Args:
        cells: The cells.
    """
    lines = []
    for arm in MIXED:
        for name, predict in (('gap', lambda a, b: b / a), ('validation - training loss', lambda a, b: b - a)):
            points = defaultdict(list)
            for cell in cells:
                for seed in cell.seeds(arm):
                    points[cell.title, cell.images].append((predict(*cell.losses(seed)), cell.gain(arm, 'val', seed)))
            if len(points) < 4:
                continue
            together = [point for part in points.values() for point in part]
            threshold = best_threshold(together)
            left_out = sum(
                count_hits(part, best_threshold([
                    point for other, others in points.items() if other != key for point in others]))
                for key, part in points.items())
            lines.append(
                f'- {ARMS[arm]}, {name} above {threshold:.3g}: sign of the gain right in '
                f'{count_hits(together, threshold)} of {len(together)} pairs, with each cell left out in {left_out}; '
                f'always "gains" is right in {sum(gain > 0 for _, gain in together)}. '
                + _clear_hits(together, threshold))
    return lines


def draw(cells: Sequence[Cell], path: Path) -> None:
    """ Draw gains against the gap of the plain runs: mean over seeds, with the range of the seeds.

    Args:
        cells: The cells.
        path: Picture to write.
    """
    import matplotlib
    matplotlib.use('Agg')
    from matplotlib import pyplot
    from matplotlib.lines import Line2D
    markers = dict(zip(dict.fromkeys(cell.title for cell in cells), itertools.cycle('osD^v<>PX*hd')))
    colors = {arm: f'C{number}' for number, arm in enumerate(MIXED)}
    figure, panels = pyplot.subplots(1, len(PLACES), figsize=(5 * len(PLACES), 5), layout='constrained')
    for axes, (place, title) in zip(panels, PLACES.items()):
        for cell, arm in itertools.product(cells, MIXED):
            if not cell.values(arm, place):
                continue
            gaps, gains = zip(*((cell.gap(seed), cell.gain(arm, place, seed)) for seed in cell.seeds(arm)))
            x, y = statistics.mean(gaps), statistics.mean(gains)
            axes.errorbar(
                x, y, yerr=[[y - min(gains)], [max(gains) - y]], xerr=[[x - min(gaps)], [max(gaps) - x]],
                fmt=markers[cell.title], color=colors[arm], alpha=0.8, markersize=6, elinewidth=0.8)
            if arm == MIXED[0]:
                axes.annotate(f'{cell.images:,}', (x, y), xytext=(5, 3), textcoords='offset points', fontsize=7)
        axes.axhline(0, color='#5f6368', linewidth=1)
        ticks = [1, 2, 4, 8, 16, 32]
        axes.set(
            title=f'mAP on {title}', xlabel='plain model: validation loss / training loss', ylabel='gain in mAP',
            xscale='log', xticks=ticks, xticklabels=ticks, xlim=(0.8, 40))
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    handles = [Line2D([], [], color=colors[arm], linewidth=6, label=ARMS[arm]) for arm in MIXED]
    handles += [
        Line2D([], [], color='#5f6368', marker=marker, linestyle='', label=title) for title, marker in markers.items()]
    figure.legend(handles=handles, loc='outside lower center', ncols=4, fontsize=8)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def parse_args(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--records', type=Path, default=RECORDS, metavar='DIR', help='folder of the records')
    parser.add_argument('--output', type=Path, metavar='DIR', help='folder of runs that are not collected yet')
    parser.add_argument(
        '--voc-records', type=Path, default=VOC_RECORDS, metavar='DIR', help='records of the VOC study')
    parser.add_argument('--picture', type=Path, metavar='FILE', help='draw the gains (needs matplotlib)')
    return parser.parse_args(argv)


def main(argv: Optional[Sequence[str]] = None) -> None:
    args = parse_args(argv)
    finished = read_finished(args.output, args.records)
    samples = {line.pop('name'): line for line in read_lines(args.records / SAMPLES)}
    samples.update({name: record['samples'] for name, record in finished.items() if 'samples' in record})
    cells = [*make_cells(finished), *voc_study_cells(args.voc_records)]
    hours = sum(record['core_seconds'] for record in finished.values()) / 3600
    print(f'{len(finished)} runs, {hours:.1f} core-hours. Mean and standard deviation over seeds; in parentheses the '
          '95 % interval over validation images.')
    print(f'\n## Gains by the gap of the plain model\n\n{summary_table(cells)}')
    print(f'\n## Learning rates\n\n{rate_table(finished)}')
    for place, title in PLACES.items():
        print(f'\n## mAP on {title}\n\n{gain_table(cells, place, samples)}')
    weights = weight_table(cells)
    if weights:
        print(f'\n## Less weight for mixed images\n\n{weights}')
    lines = rule_lines(cells)
    if lines:
        print('\n## Does the gap predict the gain?\n\n' + '\n'.join(lines))
    if args.picture and cells:
        draw(cells, args.picture)


if __name__ == '__main__':
    main()
