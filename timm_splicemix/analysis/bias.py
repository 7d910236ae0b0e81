""" Does a model recognise a class without its usual context? AP of classes with and without their context

    python -m timm_splicemix.analysis.bias results/baseline results/splicemix --pairs-from results/baseline-held-out
    python -m timm_splicemix.analysis.bias results/baseline results/splicemix --pairs coco-stuff
    python -m timm_splicemix.analysis.bias results/baseline results/splicemix --pairs-from results/baseline-held-out \\
        --context stuff_train2017.json stuff_val2017.json

Results are folders that validate.py wrote. The most biased pairs are found as in Singh et al. (2020): the bias of a
class b towards a context z is the mean probability of b in images with b and z, divided by that in images with b but
without z; z must be in at least a fifth of the images of b. The z with the largest bias is the context c of b, and the
20 classes b with the largest bias are used. They are found with a plain classifier on images that are neither in its
training set nor among those scored (--pairs-from). AP of b is then computed on two distributions: 'exclusive', images
with b without c and all images without b, and 'co-occur', images with both and all images without b. A model that
recognises b by c is poor on the first. Compare models, not the two distributions of one model, because AP also depends
on the number of images with b.
"""
import argparse
import logging
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Sequence

import torch

from ..args import command
from ..args.types import at_least, probability
from ..draw import COLORS, load_pyplot, plot_text, save_figure
from ..errors import UsageError
from ..files import format_table, printable, read_csv, read_json, read_text
from ..metrics import average_precision
from ..results import Result, Scores
from .common import create_parser, mean, read_multilabel_results, write_analysis

_logger = logging.getLogger(__name__)

NAME = 'bias'
NUMBER, MIN_PART = 20, 0.2
EXCLUSIVE, CO_OCCUR = KINDS = 'exclusive', 'co-occur'
# Pairs that Singh et al. found in COCO-Stuff: 80 object classes, 91 stuff classes.
COCO_STUFF_PAIRS = (
    ('cup', 'dining table'), ('wine glass', 'person'), ('handbag', 'person'), ('apple', 'fruit'), ('car', 'road'),
    ('bus', 'road'), ('potted plant', 'vase'), ('spoon', 'bowl'), ('microwave', 'oven'), ('keyboard', 'mouse'),
    ('skis', 'person'), ('clock', 'building-other'), ('sports ball', 'person'), ('remote', 'person'),
    ('snowboard', 'person'), ('toaster', 'ceiling-other'), ('hair drier', 'towel'), ('tennis racket', 'person'),
    ('skateboard', 'person'), ('baseball glove', 'person'))


def parse_args(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = create_parser(NAME, __doc__, 'RESULT', 'folders of validate.py')
    parser.add_argument(
        '--pairs-from', metavar='RESULT',
        help='folder of validate.py, of a plain classifier on other images, to find pairs (default: the first RESULT)')
    parser.add_argument(
        '--pairs', metavar='FILE',
        help="CSV file of pairs with columns 'class' and 'context', such as a bias_pairs.csv of this command, or "
             'coco-stuff for the 20 published pairs (default: find pairs)')
    parser.add_argument(
        '--context', nargs='+', default=(), metavar='FILE',
        help="annotations in COCO format of more classes in the same images, such as COCO-Stuff's "
             'stuff_train2017.json and stuff_val2017.json, to use as context; images are matched by the number at the '
             'end of their file names')
    parser.add_argument(
        '--classes', metavar='FILE',
        help='classes that may be biased, one per line, such as the objects among objects and stuff (default: all)')
    parser.add_argument('--number', type=at_least(1), metavar='N', help=f'number of pairs to find (default: {NUMBER})')
    parser.add_argument(
        '--min-part', type=probability, metavar='P',
        help=f'minimum fraction of the images of a class that contain its context (default: {MIN_PART})')
    args = parser.parse_args(argv)
    given = [flag for flag in ('pairs_from', 'classes', 'number', 'min_part') if getattr(args, flag) is not None]
    if args.pairs and given:
        parser.error(f"Expected --pairs, or --{given[0].replace('_', '-')} to find pairs, but got both.")
    args.number = NUMBER if args.number is None else args.number
    args.min_part = MIN_PART if args.min_part is None else args.min_part
    return args


@dataclass(frozen=True)
class Context:
    """ Labels that may be the context of a class.

    Args:
        names: Names of the classes.
        targets: (N, classes) int8, 1, 0, or -1 for unknown.
    """
    names: tuple[str, ...]
    targets: torch.Tensor


@dataclass(frozen=True)
class Pair:
    """ A class and its context.

    Args:
        name: The class b.
        context: Its context c.
        bias: Mean probability of b with c divided by that without c; NaN if unknown.
    """
    name: str
    context: str
    bias: float = math.nan

    def __str__(self) -> str:
        return f'{self.name} - {self.context}'


def find_pairs(
        scores: Scores,
        context: Context,
        number: int = NUMBER,
        min_part: float = MIN_PART,
        classes: Optional[Sequence[str]] = None,
) -> list[Pair]:
    """ Find the pairs with the largest bias, in descending order.

    Args:
        scores: Scores of a plain classifier.
        context: Labels of the same images.
        number: Maximum number of pairs.
        min_part: Minimum fraction of the images of a class that contain its context.
        classes: Classes that may be biased, None for all.
    """
    with_context, without = (context.targets == 1).double(), (context.targets == 0).double()
    pairs = []
    for column, name in enumerate(scores.class_names):
        images = scores.targets[:, column] == 1
        if (classes is not None and name not in classes) or not images.any():
            continue
        probabilities = scores.scores[images, column].double().sigmoid()
        there, absent = with_context[images], without[images]  # (images of the class, contexts)
        num_there, num_absent = there.sum(dim=0), absent.sum(dim=0)
        candidates = (num_there / len(probabilities) >= min_part) & (num_there > 0) & (num_absent > 0)
        candidates[context.names.index(name)] = False
        if candidates.any():
            biases = (probabilities @ there / num_there) / (probabilities @ absent / num_absent)
            best = int(biases.masked_fill(~candidates, -1.).argmax())
            pairs.append(Pair(name, context.names[best], float(biases[best])))
    return sorted(pairs, key=lambda pair: -pair.bias)[:number]


def score_pairs(
        scores: Scores,
        context: Context,
        pairs: Sequence[Pair],
        interpolated: bool = False,
) -> list[tuple[float, float]]:
    """ Compute the AP of the class of each pair in percent, exclusive and co-occur; NaN without such images.

    Args:
        scores: Scores of the images.
        context: Labels of the same images.
        pairs: The pairs.
        interpolated: Use the interpolated AP.
    """
    columns = [scores.class_names.index(pair.name) for pair in pairs]
    others = context.targets[:, [context.names.index(pair.context) for pair in pairs]]
    values, targets = scores.scores[:, columns], scores.targets[:, columns]
    precisions = []
    for has_context in (0, 1):
        # Images of the class in the other distribution are ignored; images without the class are in both.
        selected = targets.masked_fill((targets == 1) & (others != has_context), -1)
        precisions.append((100 * average_precision(values, selected, interpolated)).tolist())
    return list(zip(*precisions))


def count_images(scores: Scores, context: Context, pair: Pair) -> tuple[int, int]:
    """Count the images of the class without its context, and with it."""
    images = scores.targets[:, scores.class_names.index(pair.name)] == 1
    others = context.targets[images, context.names.index(pair.context)]
    return int((others == 0).sum()), int((others == 1).sum())


Annotations = tuple[set[int], dict[str, set[int]]]  # numbers of all images, and of the images of each class


def read_annotations(files: Sequence[str]) -> Annotations:
    """Read annotations in COCO format."""
    images: set[int] = set()
    labels: dict[str, set[int]] = {}
    for file in files:
        content = read_json(file)
        try:
            names = {entry['id']: entry['name'] for entry in content['categories']}
            numbers = {entry['id']: _number(entry['file_name']) for entry in content['images']}
            labels.update({name: set() for name in names.values() if name not in labels})
            for entry in content['annotations']:
                labels[names[entry['category_id']]].add(numbers[entry['image_id']])
        except (KeyError, TypeError) as error:
            raise UsageError(f'Expected annotations in COCO format for --context, but got {file}: {error!r}') from error
        images.update(numbers.values())
    return images, labels


def _number(file_name: str) -> int:
    """Return the number at the end of the name of a COCO image, which is the same in all releases."""
    match = re.search(r'(\d+)$', Path(file_name).stem)
    if match is None:
        raise UsageError(f'Expected a file name that ends in a number, such as 000000000042.jpg, but got {file_name}.')
    return int(match[1])


def create_context(scores: Scores, annotations: Optional[Annotations] = None) -> Context:
    """Return the labels of the scores together with those of annotations of the same images."""
    if annotations is None:
        return Context(scores.class_names, scores.targets)
    if not scores.filenames:
        raise UsageError('Expected scores with file names for --context, but got a scores.npz without.')
    images, labels = annotations
    rows = [_number(name) for name in scores.filenames]
    missing = [name for name, row in zip(scores.filenames, rows) if row not in images]
    if missing:
        raise UsageError(
            f'Expected all {len(rows):,} images of the results in the annotations of --context, but got '
            f'{len(missing):,} that are missing, such as {missing[0]}: give the files of all splits.')
    # COCO-Stuff labels all pixels of objects 'other'.
    added = sorted(name for name in labels if name not in scores.class_names and name != 'other')
    targets = torch.tensor([[row in labels[name] for name in added] for row in rows], dtype=torch.int8)
    return Context((*scores.class_names, *added), torch.cat([scores.targets, targets], dim=1))


def read_pairs(path: str) -> list[Pair]:
    """Read pairs from a CSV file; 'coco-stuff' stands for the published ones."""
    if path == 'coco-stuff':
        return [Pair(*names) for names in COCO_STUFF_PAIRS]
    rows = read_csv(path, ('class', 'context'))
    try:
        pairs = [Pair(row['class'], row['context'], float(row.get('bias') or math.nan)) for row in rows]
    except ValueError as error:
        raise UsageError(f"Expected numbers in the column 'bias' of {path}, but got: {error}") from error
    names = [pair.name for pair in pairs]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None or not pairs:
        got = f"'{double}' twice" if pairs else 'none'
        raise UsageError(f'Expected pairs of different classes in {path}, but got {got}.')
    return pairs


def choose_pairs(
        args: argparse.Namespace,
        first: Result,
        context: Context,
        annotations: Optional[Annotations],
) -> list[Pair]:
    """Read the pairs of --pairs, or find some."""
    if args.pairs:
        pairs = read_pairs(args.pairs)
        for pair in pairs:
            for name, there in ((pair.name, first.scores.class_names), (pair.context, context.names)):
                if name not in there:
                    raise UsageError(
                        f"Expected pairs of the {len(there)} known classes, but got '{name}' in {pair}: give "
                        'annotations that have it (--context), or other pairs.')
        return pairs
    source = first
    if args.pairs_from:
        source, = read_multilabel_results([args.pairs_from])
        if source.scores.class_names != first.scores.class_names:
            raise UsageError(f'Expected the classes of the results in --pairs-from, but got others in {source.folder}.')
        context = create_context(source.scores, annotations)
    classes = None
    if args.classes:
        classes = [line.strip() for line in read_text(args.classes).splitlines() if line.strip()]
        unknown = next((name for name in classes if name not in first.scores.class_names), None)
        if unknown is not None:
            raise UsageError(f"Expected classes of the results in {args.classes}, but got '{unknown}'.")
    pairs = find_pairs(source.scores, context, args.number, args.min_part, classes)
    if not pairs:
        raise UsageError(
            f'No class has another one in at least {args.min_part:.0%} of its images. Lower --min-part.')
    if source.scores.filenames == first.scores.filenames and source.content['split'] == first.content['split']:
        _logger.warning(
            'Pairs are found on the images that are scored, so their bias is partly chance. Give results of other '
            'images with --pairs-from.')
    return pairs


def pair_rows(results: Sequence[Result], context: Context, pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """Return a row for each pair: its bias, the number of images and, for each result, AP on both distributions."""
    rows = []
    for pair in pairs:
        numbers = count_images(results[0].scores, context, pair)
        rows.append({'class': pair.name, 'context': pair.context, 'bias': pair.bias, **dict(zip(KINDS, numbers))})
    for result in results:
        interpolated = result.content['preset'] == 'interpolated'
        for row, values in zip(rows, score_pairs(result.scores, context, pairs, interpolated)):
            row.update((f'{result.name} {kind}', value) for kind, value in zip(KINDS, values))
    return rows


def summary_rows(results: Sequence[Result], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """ Return a row for each result: means over the pairs with images in both distributions, and mAP.

    Args:
        results: The results.
        rows: Return value of `pair_rows`.
    """
    biased = {row['class'] for row in rows}
    scored = [row for row in rows if row[EXCLUSIVE] and row[CO_OCCUR]]
    summary = []
    for result in results:
        exclusive, together = (mean([row[f'{result.name} {kind}'] for row in scored]) for kind in KINDS)
        total = result.content['metrics']['mAP']
        summary.append({
            'name': result.name, EXCLUSIVE: exclusive, CO_OCCUR: together, 'sum': exclusive + together,
            'mAP': math.nan if total is None else total,
            'mAP of other classes': mean([ap for name, (ap, _) in result.classes.items() if name not in biased]),
        })
    return summary


def draw_bias(rows: Sequence[dict[str, Any]], summary: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the AP of each pair on both distributions, one dot per result, and their means."""
    pyplot = load_pyplot()
    if pyplot is None:
        return
    figure, panels = pyplot.subplots(
        1, 2, figsize=(10, 0.26 * len(rows) + 0.2 * len(summary) + 1.5), sharey=True, sharex=True, layout='constrained')
    places = range(len(rows))
    for axes, kind in zip(panels, KINDS):
        for number, result in enumerate(summary):
            color, name = COLORS[number % len(COLORS)], result['name']
            axes.scatter([row[f'{name} {kind}'] for row in rows], places, color=color, s=24, alpha=0.85, zorder=3)
            axes.axvline(
                result[kind], color=color, linestyle='--', linewidth=1,
                label=f'{plot_text(name)}: mean {result[EXCLUSIVE]:.2f} exclusive, {result[CO_OCCUR]:.2f} co-occur')
        axes.set(title=kind, xlabel='AP in %')
        axes.set_yticks(places, [plot_text(f'{row["class"]} - {row["context"]}') for row in rows], fontsize=8)
        axes.grid(alpha=0.3)
    panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc='outside lower center', fontsize='small')
    save_figure(figure, path)


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    args = parse_args(argv)
    results = read_multilabel_results(args.paths, args.names)
    annotations = read_annotations(args.context) if args.context else None
    context = create_context(results[0].scores, annotations)
    rows = pair_rows(results, context, choose_pairs(args, results[0], context, annotations))
    summary = summary_rows(results, rows)
    print(f'{len(rows)} pairs: images of each distribution, AP of the class in %\n\n{format_table(rows)}\n')
    left_out = [f'{row["class"]} - {row["context"]}' for row in rows if not (row[EXCLUSIVE] and row[CO_OCCUR])]
    if left_out:
        print(f'Not in the means, because one distribution has no images: {", ".join(map(printable, left_out))}.\n')
    print(f'mAP in %, means over {len(rows) - len(left_out)} pairs\n\n{format_table(summary)}')
    write_analysis(
        args.output, NAME, {f'{NAME}_pairs': rows, NAME: summary}, lambda path: draw_bias(rows, summary, path))


if __name__ == '__main__':
    main()
