""" Does a model know an object without the company that it keeps? AP where a class comes with its partner, and without

    python -m timm_splicemix.analysis.bias results/baseline results/splicemix --pairs-from results/baseline-held-out
    python -m timm_splicemix.analysis.bias results/baseline results/splicemix --pairs coco-stuff
    python -m timm_splicemix.analysis.bias results/baseline results/splicemix --pairs-from results/baseline-held-out \\
        --context stuff_train2017.json stuff_val2017.json

Results are folders that validate.py wrote. The most biased pairs are found as Singh et al. (2020) do: the bias of a
class b to a context z is the mean probability of b in images with b and z over that in images with b but without z; z
is in at least a fifth of the images of b; the z with the largest bias is the partner c of b; the 20 classes b with the
largest bias count. They are found with a plain classifier, on images that it was neither trained on nor is scored on
(--pairs-from). Two distributions are then scored: 'exclusive', images with b without c and all images without b, and
'co-occur', images with both and all images without b. A model that recognises b by c is poor on the first. Compare
models, not the two distributions of one model: AP also depends on how many images have b.
"""
import argparse
import csv
import json
import logging
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Sequence, Union

import torch

from ..args import command
from ..draw import load_pyplot, save_figure
from ..errors import UsageError
from ..files import write_csv
from ..metrics import average_precision
from ..results import Scores
from .common import (
    COLORS,
    Evaluation,
    create_parser,
    format_table,
    mean,
    output_folder,
    read_evaluations,
)

_logger = logging.getLogger(__name__)

NAME = 'bias'
NUMBER, MIN_PART = 20, 0.2
# What Singh et al. found with COCO-Stuff: 80 classes of objects, 91 of stuff.
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
        help='folder of validate.py, of a plain classifier on other images, to find pairs in (default: the first one)')
    parser.add_argument(
        '--pairs', metavar='FILE',
        help="CSV file of pairs, with columns 'class' and 'context', such as the bias_pairs.csv that is written; or "
             "coco-stuff for the published 20 (default: pairs are found)")
    parser.add_argument(
        '--context', nargs='+', default=(), metavar='FILE',
        help="annotations in COCO format with more classes of the same images, such as COCO-Stuff's "
             'stuff_train2017.json and stuff_val2017.json; they count as context, and are matched by the number at the '
             'end of file names')
    parser.add_argument(
        '--classes', metavar='FILE',
        help='classes that may be biased, one in a line, such as the objects among objects and stuff (default: all)')
    parser.add_argument('--number', type=int, metavar='N', help=f'pairs to find (default: {NUMBER})')
    parser.add_argument(
        '--min-part', type=float, metavar='P',
        help=f'part of the images of a class that a context must be in (default: {MIN_PART})')
    args = parser.parse_args(argv)
    given = [flag for flag in ('pairs_from', 'classes', 'number', 'min_part') if getattr(args, flag) is not None]
    if args.pairs and given:
        parser.error(f"Expected --pairs, or --{given[0].replace('_', '-')} to find some, but got both.")
    args.number = NUMBER if args.number is None else args.number
    args.min_part = MIN_PART if args.min_part is None else args.min_part
    if args.number < 1:
        parser.error(f'Expected --number of at least 1, but got {args.number}.')
    if not 0 <= args.min_part <= 1:
        parser.error(f'Expected --min-part from 0 to 1, but got {args.min_part}.')
    return args


@dataclass(frozen=True)
class Context:
    """ Classes that an image may have beside the one in question.

    Args:
        names: Names of the classes.
        targets: (N, classes) int8, 1, 0, or -1 for unknown.
    """
    names: tuple[str, ...]
    targets: torch.Tensor


@dataclass(frozen=True)
class Pair:
    """ A class and the context that it is biased to.

    Args:
        name: The class, b.
        context: Its context, c.
        bias: Mean probability of b with c over that without; NaN if it was not measured.
    """
    name: str
    context: str
    bias: float = math.nan


def find_pairs(
        scores: Scores,
        context: Context,
        number: int = NUMBER,
        min_part: float = MIN_PART,
        classes: Optional[Sequence[str]] = None,
) -> list[Pair]:
    """ The most biased pairs, the most biased first.

    Args:
        scores: Scores of a plain classifier.
        context: Labels of the same images that may be context.
        number: How many pairs to find at most.
        min_part: Part of the images of a class that have its context, at least.
        classes: Classes that may be biased, all if None.
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
    """ AP of the class of each pair, in percent, on the exclusive and on the co-occurring distribution.

    Args:
        scores: Scores of the images.
        context: Labels of the same images that may be context.
        pairs: What is scored.
        interpolated: Whether AP uses the envelope of the precision.

    Returns:
        Exclusive and co-occur for each pair, NaN if there is no such image.
    """
    columns = [scores.class_names.index(pair.name) for pair in pairs]
    others = context.targets[:, [context.names.index(pair.context) for pair in pairs]]
    values, targets = scores.scores[:, columns], scores.targets[:, columns]
    precisions = []
    for company in (0, 1):
        # Images with the class, but not in this company, are ignored; those without the class are in both.
        some = targets.masked_fill((targets == 1) & (others != company), -1)
        precisions.append((100 * average_precision(values, some, interpolated)).tolist())
    return list(zip(*precisions))


def count_images(scores: Scores, context: Context, pair: Pair) -> tuple[int, int]:
    """How many images have the class without its context, and with it."""
    images = scores.targets[:, scores.class_names.index(pair.name)] == 1
    others = context.targets[images, context.names.index(pair.context)]
    return int((others == 0).sum()), int((others == 1).sum())


@dataclass(frozen=True)
class Annotations:
    """ More classes of images.

    Args:
        images: Numbers of all images that were looked at.
        labels: Numbers of the images that have a class, for each class.
    """
    images: set[int]
    labels: dict[str, set[int]]


def read_annotations(files: Sequence[str]) -> Annotations:
    """ Read annotations in COCO format, each image by the number that the name of its file ends in.

    Args:
        files: JSON files.
    """
    images: set[int] = set()
    labels: dict[str, set[int]] = {}
    for file in files:
        try:
            content = json.loads(Path(file).read_text(encoding='utf-8'))
            names = {entry['id']: entry['name'] for entry in content['categories']}
            numbers = {entry['id']: _number(entry['file_name']) for entry in content['images']}
            for name in names.values():
                labels.setdefault(name, set())
            for entry in content['annotations']:
                labels[names[entry['category_id']]].add(numbers[entry['image_id']])
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise UsageError(f'Expected annotations in COCO format for --context, but got {file}: {error!r}') from error
        images.update(numbers.values())
    return Annotations(images, labels)


def create_context(scores: Scores, annotations: Optional[Annotations] = None) -> Context:
    """ What may be context: the classes that are scored, and those of more annotations.

    Args:
        scores: Scores of the images.
        annotations: More classes of the same images.
    """
    if annotations is None:
        return Context(scores.class_names, scores.targets)
    if not scores.filenames:
        raise UsageError('Expected scores that name their images for --context, but got some without.')
    labels = annotations.labels
    rows = [_number(name) for name in scores.filenames]
    lacking = [name for name, row in zip(scores.filenames, rows) if row not in annotations.images]
    if lacking:
        raise UsageError(
            f'Expected all {len(rows):,} images of the results in the annotations of --context, but got '
            f'{len(lacking):,} that are not there, such as {lacking[0]}: give the files of all their splits.')
    # COCO-Stuff calls all pixels of objects 'other'.
    added = sorted(name for name in labels if name not in scores.class_names and name != 'other')
    targets = torch.tensor([[row in labels[name] for name in added] for row in rows], dtype=torch.int8)
    return Context((*scores.class_names, *added), torch.cat([scores.targets, targets], dim=1))


def _number(file_name: str) -> int:
    """The number that the name of a file of COCO ends in, which is the same in all years."""
    match = re.search(r'(\d+)$', Path(file_name).stem)
    if match is None:
        raise UsageError(f'Expected a file name that ends in a number, such as 000000000042.jpg, but got {file_name}.')
    return int(match[1])


def read_pairs(path: str) -> list[Pair]:
    """ Pairs of a CSV file.

    Args:
        path: The file, or coco-stuff.
    """
    if path == 'coco-stuff':
        return [Pair(*names) for names in COCO_STUFF_PAIRS]
    try:
        with open(path, newline='', encoding='utf-8') as file:
            pairs = [
                Pair(row['class'], row['context'], float(row.get('bias') or math.nan)) for row in csv.DictReader(file)]
    except (OSError, KeyError, ValueError, csv.Error) as error:
        raise UsageError(
            f"Expected a CSV file with columns 'class' and 'context' for --pairs, but got {path}: {error!r}") from error
    names = [pair.name for pair in pairs]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None or not pairs:
        what = f"'{double}' twice" if pairs else 'none'
        raise UsageError(f'Expected pairs with a class of their own for --pairs, but got {what} in {path}.')
    return pairs


def check_pairs(pairs: Sequence[Pair], scores: Scores, context: Context) -> None:
    """ Refuse pairs whose classes are not there.

    Args:
        pairs: The pairs.
        scores: Scores of the images.
        context: What may be context.
    """
    for pair in pairs:
        for name, there in ((pair.name, scores.class_names), (pair.context, context.names)):
            if name not in there:
                raise UsageError(
                    f"Expected pairs of the {len(there)} classes that are known, but got '{name}' in "
                    f'{pair.name} - {pair.context}: give annotations that have it (--context), or other pairs.')


def pair_rows(
        evaluations: Sequence[Evaluation],
        context: Context,
        pairs: Sequence[Pair],
) -> list[dict[str, Any]]:
    """ Rows of the table of pairs.

    Args:
        evaluations: What is scored.
        context: Labels of the same images that may be context.
        pairs: The pairs.

    Returns:
        Class, context, bias, numbers of images, and for each result its AP on both distributions.
    """
    rows = []
    for pair in pairs:
        exclusive, together = count_images(evaluations[0].scores, context, pair)
        rows.append({
            'class': pair.name, 'context': pair.context, 'bias': pair.bias, 'exclusive': exclusive,
            'co-occur': together})
    for evaluation in evaluations:
        interpolated = evaluation.content['preset'] == 'interpolated'
        for row, (exclusive, together) in zip(rows, score_pairs(evaluation.scores, context, pairs, interpolated)):
            row.update({f'{evaluation.name} exclusive': exclusive, f'{evaluation.name} co-occur': together})
    return rows


def summary_rows(evaluations: Sequence[Evaluation], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """ Rows of the table of results: means over the pairs that both distributions have images of.

    Args:
        evaluations: What was scored.
        rows: What `pair_rows` returned.

    Returns:
        Name, mAP on both distributions and their sum, mAP on all images of all classes and of those without a pair.
    """
    biased = {row['class'] for row in rows}
    scored = [row for row in rows if row['exclusive'] and row['co-occur']]
    summary = []
    for evaluation in evaluations:
        exclusive, together = (
            mean([row[f'{evaluation.name} {kind}'] for row in scored]) for kind in ('exclusive', 'co-occur'))
        everything = evaluation.content['metrics']['mAP']
        summary.append({
            'name': evaluation.name, 'exclusive': exclusive, 'co-occur': together, 'sum': exclusive + together,
            'mAP': math.nan if everything is None else everything,
            'mAP of other classes': mean([ap for name, ap in evaluation.class_ap().items() if name not in biased]),
        })
    return summary


def draw_bias(
        rows: Sequence[dict[str, Any]],
        summary: Sequence[dict[str, Any]],
        path: Union[str, Path],
) -> None:
    """ Draw the AP of each pair on both distributions, a dot for each result, with the means.

    Args:
        rows: What `pair_rows` returned.
        summary: What `summary_rows` returned.
        path: Picture to write; none is without matplotlib.
    """
    pyplot = load_pyplot()
    if pyplot is None:
        return
    figure, panels = pyplot.subplots(
        1, 2, figsize=(10, 0.26 * len(rows) + 0.2 * len(summary) + 1.5), sharey=True, sharex=True, layout='constrained')
    places = range(len(rows))
    for axes, kind in zip(panels, ('exclusive', 'co-occur')):
        for number, result in enumerate(summary):
            color, name = COLORS[number % len(COLORS)], result['name']
            axes.scatter([row[f'{name} {kind}'] for row in rows], places, color=color, s=24, alpha=0.85, zorder=3)
            axes.axvline(
                result[kind], color=color, linestyle='--', linewidth=1,
                label=f'{name}: mean {result["exclusive"]:.2f} exclusive, {result["co-occur"]:.2f} co-occur')
        axes.set(title=kind, xlabel='AP in %')
        axes.set_yticks(places, [f'{row["class"]} - {row["context"]}' for row in rows], fontsize=8)
        axes.grid(alpha=0.3)
    panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc='outside lower center', fontsize='small')
    save_figure(figure, path)


def _find(args: argparse.Namespace, first: Evaluation, annotations: Optional[Annotations]) -> list[Pair]:
    source = first
    if args.pairs_from:
        source, = read_evaluations([args.pairs_from])
        if source.need_scores().class_names != first.scores.class_names:
            raise UsageError(
                f'Expected the classes of the results in --pairs-from, but got others in {source.folder}.')
    classes = None
    if args.classes:
        classes = [line.strip() for line in Path(args.classes).read_text(encoding='utf-8').splitlines() if line.strip()]
        unknown = next((name for name in classes if name not in source.scores.class_names), None)
        if unknown is not None:
            raise UsageError(f"Expected classes of the results in {args.classes}, but got '{unknown}'.")
    context = create_context(source.scores, annotations)
    pairs = find_pairs(source.scores, context, args.number, args.min_part, classes)
    if not pairs:
        raise UsageError(
            f'Expected a class with another one in at least {args.min_part:.0%} of its images, but got none: lower '
            '--min-part.')
    if source.scores.filenames == first.scores.filenames and source.content['split'] == first.content['split']:
        _logger.warning(
            'Pairs are found on the images that are scored, so that part of their bias is chance: give results of '
            'other images to find them in (--pairs-from).')
    return pairs


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    args = parse_args(argv)
    evaluations = read_evaluations(args.paths, args.names)
    for evaluation in evaluations:
        evaluation.need_scores()
    first = evaluations[0].scores
    annotations = read_annotations(args.context) if args.context else None
    pairs = read_pairs(args.pairs) if args.pairs else _find(args, evaluations[0], annotations)
    context = create_context(first, annotations)
    check_pairs(pairs, first, context)
    rows = pair_rows(evaluations, context, pairs)
    summary = summary_rows(evaluations, rows)
    print(f'{len(rows)} pairs: images of each distribution, AP of the class in %\n\n{format_table(rows)}\n')
    left_out = [f'{row["class"]} - {row["context"]}' for row in rows if not (row['exclusive'] and row['co-occur'])]
    if left_out:
        print(f'Left out of the means, as one distribution has no image of them: {", ".join(left_out)}.\n')
    print(f'mAP in %, means over {len(rows) - len(left_out)} pairs\n\n{format_table(summary)}')
    folder = output_folder(args.output, NAME)
    write_csv(rows, folder / f'{NAME}_pairs.csv')
    write_csv(summary, folder / f'{NAME}.csv')
    draw_bias(rows, summary, folder / f'{NAME}.png')
    print(f'\nWritten to {folder}.')


if __name__ == '__main__':
    main()
