""" Does a model gain more on small objects? Gain in AP of the classes with the smallest and the largest objects

    python -m timm_splicemix.analysis.small_objects results/baseline results/splicemix --data-dir path/to/coco
    python -m timm_splicemix.analysis.small_objects results/baseline results/splicemix results/splicemix-cl \\
        --data-dir path/to/coco --names ResNet-101 SpliceMix SpliceMix-CL --output figures

Results are folders that validate.py wrote, the first of them the one that the others are compared with. Classes are
sorted by the mean area of their objects, which the annotations of the data set say (COCO's format, or shapes); images
are not opened. The table has the mean gain of the 20 classes with the smallest objects and of the 20 with the largest.
"""
import argparse
import math
from pathlib import Path
from typing import Any, Optional, Sequence, Union

from ..args import command
from ..data import MultiLabelDataset, create_dataset
from ..draw import load_pyplot, save_figure
from ..errors import UsageError
from ..files import write_csv
from .common import (
    COLORS,
    Evaluation,
    create_parser,
    format_table,
    mean,
    output_folder,
    read_evaluations,
)

NAME = 'small_objects'


def parse_args(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = create_parser(NAME, __doc__, 'RESULT', 'folders of validate.py, the baseline first')
    parser.add_argument('--data-dir', metavar='DIR', help="folder of the data set (default: the cache of 'shapes')")
    parser.add_argument('--dataset', metavar='NAME', help='its name, such as coco/2014 (default: that of the results)')
    parser.add_argument('--split', metavar='NAME', help='split with the objects (default: that of the results)')
    parser.add_argument('--annotations', metavar='FILE', help='instances_*.json, if it has another name (coco)')
    parser.add_argument(
        '--number', type=int, default=20, metavar='N',
        help='classes with the smallest, and with the largest objects; half of the classes if they are fewer than 2 N '
             '(default: %(default)s)')
    args = parser.parse_args(argv)
    if len(args.paths) < 2:
        parser.error('Expected a baseline and at least one more result, but got one.')
    if args.number < 1:
        parser.error(f'Expected --number of at least 1, but got {args.number}.')
    return args


def mean_areas(dataset: MultiLabelDataset) -> dict[str, float]:
    """ Mean area of the objects of each class in pixels, NaN for a class without objects of known area.

    Args:
        dataset: Its reader knows the area of each object.
    """
    areas: dict[int, list[float]] = {}
    for _, column, area in dataset.reader.object_areas:
        areas.setdefault(column, []).append(area)
    return {name: mean(areas.get(column, [])) for column, name in enumerate(dataset.class_names)}


def gain_rows(evaluations: Sequence[Evaluation], areas: dict[str, float], number: int = 20) -> list[dict[str, Any]]:
    """ Rows of the table, the class with the smallest objects first.

    Args:
        evaluations: The baseline, then the others.
        areas: Mean area of the objects of each class.
        number: Classes to call smallest, and largest; at most half of them.

    Returns:
        Class, group ('smallest', 'largest' or ''), area, AP of each result, and gain of each but the first.
    """
    precisions = [evaluation.class_ap() for evaluation in evaluations]
    unknown = [name for name in precisions[0] if name not in areas]
    if unknown:
        raise UsageError(
            f"Expected a data set with the classes of the results, but got one without '{unknown[0]}': name that of "
            'the results (--dataset, --data-dir).')
    if any(values.keys() != precisions[0].keys() for values in precisions):
        raise UsageError('Expected results of the same classes, but got others: evaluate all on the same data set.')
    known = [name for name in precisions[0] if not math.isnan(areas[name] + sum(values[name] for values in precisions))]
    if len(known) < 2:
        raise UsageError(f'Expected at least two classes with objects and positives, but got {len(known)}.')
    known.sort(key=areas.get)
    number = min(number, len(known) // 2)
    rows = []
    for place, name in enumerate(known):
        group = 'smallest' if place < number else 'largest' if place >= len(known) - number else ''
        row = {'class': name, 'group': group, 'area': areas[name]}
        row.update((f'{evaluation.name} AP', values[name]) for evaluation, values in zip(evaluations, precisions))
        for evaluation, values in zip(evaluations[1:], precisions[1:]):
            row[f'{evaluation.name} gain'] = values[name] - precisions[0][name]
        rows.append(row)
    return rows


def mean_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """ The means of the smallest and of the largest classes, as rows of the same table.

    Args:
        rows: What `gain_rows` returned.
    """
    means = []
    for group in ('smallest', 'largest'):
        some = [row for row in rows if row['group'] == group]
        values = {name: mean([row[name] for row in some]) for name in rows[0] if name not in ('class', 'group')}
        means.append({'class': f'mean of {len(some)}', 'group': group, **values})
    return means


def draw_gains(rows: Sequence[dict[str, Any]], names: Sequence[str], path: Union[str, Path]) -> None:
    """ Draw the gain of each class, a panel for each result, with the means of both groups.

    Args:
        rows: What `gain_rows` returned.
        names: Results that gain, without the baseline.
        path: Picture to write; none is without matplotlib.
    """
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
        axes.axhline(0, color='#202124', linewidth=0.8)
        axes.set(title=name, ylabel='gain in AP')
        axes.grid(axis='y', alpha=0.3)
        axes.margins(y=0.25)  # room for the legend
        axes.legend(loc='upper right', fontsize='small', ncols=2)
    panels[-1, 0].set_xticks(range(len(shown)), [row['class'] for row in shown], rotation=90, fontsize=8)
    panels[-1, 0].set_xlim(-0.8, len(shown) - 0.2)
    save_figure(figure, path)


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    args = parse_args(argv)
    evaluations = read_evaluations(args.paths, args.names)
    content = evaluations[0].content
    name, split = args.dataset or content['dataset'], args.split or content['split']
    dataset = create_dataset(name, args.data_dir, split, annotations=args.annotations, images_must_exist=False)
    if not hasattr(getattr(dataset, 'reader', None), 'object_areas'):
        raise UsageError(
            f"Expected a data set that says how large objects are (coco, shapes), but got '{name}': name the same "
            'images in COCO format (--dataset coco --annotations FILE).')
    rows = gain_rows(evaluations, mean_areas(dataset), args.number)
    means = mean_rows(rows)
    table = [row for row in rows if row['group'] == 'smallest'] + means[:1]
    table += [row for row in rows if row['group'] == 'largest'] + means[1:]
    others = [evaluation.name for evaluation in evaluations[1:]]
    print(format_table(table, signed=[f'{other} gain' for other in others]))
    folder = output_folder(args.output, NAME)
    write_csv([*rows, *means], folder / f'{NAME}.csv')
    draw_gains(rows, others, folder / f'{NAME}.png')
    print(f'\nWritten to {folder}.')


if __name__ == '__main__':
    main()
