""" Does a model gain more on small objects? AP gain of the classes with the smallest and the largest objects

    python -m timm_splicemix.analysis.small_objects results/baseline results/splicemix --data-dir path/to/coco
    python -m timm_splicemix.analysis.small_objects results/baseline results/splicemix results/splicemix-cl \\
        --data-dir path/to/coco --names ResNet-101 SpliceMix SpliceMix-CL --output figures

Results are folders that validate.py wrote; the first is the baseline. Classes are sorted by the mean area of their
objects in the annotations of the data set (COCO format, or shapes); images are not needed. The table has the mean gain
of the 20 classes with the smallest objects and of the 20 classes with the largest.
"""
import argparse
import math
from pathlib import Path
from typing import Any, Optional, Sequence

import numpy as np

from ..args import command
from ..args.types import at_least
from ..data import MultiLabelDataset, create_dataset
from ..draw import COLORS, INK, load_pyplot, plot_text, save_figure
from ..errors import UsageError
from ..files import format_table
from ..results import CLASSES, Result
from .common import create_parser, mean, read_multilabel_results, write_analysis

NAME = 'small_objects'


def parse_args(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = create_parser(NAME, __doc__, 'RESULT', 'folders of validate.py, the baseline first')
    parser.add_argument('--data-dir', metavar='DIR', help="folder of the data set (default: the cache of 'shapes')")
    parser.add_argument('--dataset', metavar='NAME', help='such as coco/2014 (default: that of the results)')
    parser.add_argument('--split', metavar='NAME', help='split of the data set (default: that of the results)')
    parser.add_argument(
        '--annotations', metavar='FILE',
        help='annotation file in COCO format, also for results of another data set, such as csv (default: '
             'instances_SPLIT.json)')
    parser.add_argument(
        '--number', type=at_least(1), default=20, metavar='N',
        help='classes in each of the two groups, at most half of all classes (default: %(default)s)')
    args = parser.parse_args(argv)
    if len(args.paths) < 2:
        parser.error('Expected a baseline and at least one more result, but got one result.')
    return args


def mean_areas(dataset: MultiLabelDataset) -> dict[str, float]:
    """Return the mean area of the objects of each class in pixels, NaN for a class without objects."""
    objects, number = dataset.reader.object_areas, len(dataset.class_names)
    counts = np.bincount(objects['column'], minlength=number)
    sums = np.bincount(objects['column'], weights=objects['area'], minlength=number)
    return {name: float(sums[i] / counts[i]) if counts[i] else math.nan for i, name in enumerate(dataset.class_names)}


def gain_rows(results: Sequence[Result], areas: dict[str, float], number: int = 20) -> list[dict[str, Any]]:
    """ Return a row for each class, the class with the smallest objects first.

    Args:
        results: The baseline, then the others.
        areas: Mean area of the objects of each class.
        number: Classes in the groups 'smallest' and 'largest', at most half of all classes.
    """
    precisions = [{name: ap for name, (ap, _) in result.classes.items()} for result in results]
    unknown = [name for name in precisions[0] if name not in areas]
    if unknown:
        raise UsageError(
            f"Expected a data set with the classes of the results, but got one without '{unknown[0]}': set --dataset "
            'and --data-dir.')
    if any(values.keys() != precisions[0].keys() for values in precisions):
        raise UsageError('Expected results of the same classes: evaluate all models on the same data set.')
    known = [name for name in precisions[0] if not math.isnan(areas[name] + sum(values[name] for values in precisions))]
    if len(known) < 2:
        raise UsageError(f'Expected at least two classes with objects and positives, but got {len(known)}.')
    known.sort(key=areas.get)
    number = min(number, len(known) // 2)
    rows = []
    for place, name in enumerate(known):
        group = 'smallest' if place < number else 'largest' if place >= len(known) - number else ''
        row = {'class': name, 'group': group, 'area': areas[name]}
        row.update((f'{result.name} AP', values[name]) for result, values in zip(results, precisions))
        for result, values in zip(results[1:], precisions[1:]):
            row[f'{result.name} gain'] = values[name] - precisions[0][name]
        rows.append(row)
    return rows


def mean_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the means of both groups of `gain_rows`, as rows of the same table."""
    means = []
    for group in ('smallest', 'largest'):
        some = [row for row in rows if row['group'] == group]
        values = {name: mean([row[name] for row in some]) for name in rows[0] if name not in ('class', 'group')}
        means.append({'class': f'mean of {len(some)}', 'group': group, **values})
    return means


def draw_gains(rows: Sequence[dict[str, Any]], names: Sequence[str], path: Path) -> None:
    """Draw the gain of each class and the means of both groups, one panel per result except for the baseline."""
    pyplot = load_pyplot()
    if pyplot is None:
        return
    shown = [row for row in rows if row['group']]
    groups = {
        group: [place for place, row in enumerate(shown) if row['group'] == group] for group in ('smallest', 'largest')}
    figure, panels = pyplot.subplots(
        len(names), 1, figsize=(max(5., 0.27 * len(shown) + 1.2), 2.4 * len(names) + 1.2), layout='constrained',
        sharex=True, sharey=True, squeeze=False)
    for axes, name in zip(panels[:, 0], names):
        gains = [row[f'{name} gain'] for row in shown]
        for (group, places), color in zip(groups.items(), COLORS):
            average = mean([gains[place] for place in places])
            axes.bar(places, [gains[place] for place in places], color=color, alpha=0.75)
            axes.hlines(
                average, places[0] - 0.5, places[-1] + 0.5, color=color, linestyle='--',
                label=f'{len(places)} {group}: mean {average:+.2f}')
        axes.axhline(0, color=INK, linewidth=0.8)
        axes.set(title=plot_text(name), ylabel='AP gain')
        axes.grid(axis='y', alpha=0.3)
        axes.margins(y=0.25)  # room for the legend
        axes.legend(loc='upper right', fontsize='small', ncols=2)
    panels[-1, 0].set_xticks(range(len(shown)), [plot_text(row['class']) for row in shown], rotation=90, fontsize=8)
    panels[-1, 0].set_xlim(-0.8, len(shown) - 0.2)
    save_figure(figure, path)


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    args = parse_args(argv)
    results = read_multilabel_results(args.paths, args.names, (CLASSES,))
    content = results[0].content
    name, split = args.dataset or content['dataset'], args.split or content['split']
    root = args.data_dir
    if args.annotations and args.annotations.lower().endswith('.json') and not args.dataset:
        # Boxes for results of any data set, such as csv
        name, root = 'coco', root or Path(args.annotations).parent
    dataset = create_dataset(name, root, split, annotations=args.annotations, images_must_exist=False)
    if not hasattr(getattr(dataset, 'reader', None), 'object_areas'):
        raise UsageError(
            f"Expected a data set with the areas of objects (coco, shapes), but got '{name}': give annotations of the "
            'same images in COCO format (--annotations FILE).')
    rows = gain_rows(results, mean_areas(dataset), args.number)
    means = mean_rows(rows)
    table = [row for row in rows if row['group'] == 'smallest'] + means[:1]
    table += [row for row in rows if row['group'] == 'largest'] + means[1:]
    others = [result.name for result in results[1:]]
    print(format_table(table, {f'{other} gain': '+.2f' for other in others}))
    write_analysis(args.output, NAME, {NAME: [*rows, *means]}, lambda path: draw_gains(rows, others, path))


if __name__ == '__main__':
    main()
