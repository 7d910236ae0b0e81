""" Show which classes a model holds for alike: t-SNE of the classifier weights, coloured by super-category

    python -m timm_splicemix.analysis.tsne runs/plain runs/splicemix --groups annotations/instances_val2014.json
    python -m timm_splicemix.analysis.tsne runs/splicemix/model_best.pth.tar --groups groups.csv --output runs/splicemix

Classes of the same super-category have the same colour and shape. --groups is an annotation file of COCO's format,
whose categories name their super-category, or a CSV file with two columns: class and super-category.

It prints for each checkpoint how many classes have a class of their own super-category as the nearest one, by the
cosine of the weights themselves: t-SNE is a picture, its distances say little. Without --groups it prints the nearest
class of each. It needs scikit-learn: pip install 'timm-splicemix[analysis]'.
"""
import argparse
import csv
import json
from pathlib import Path
from typing import Any, Callable, Optional, Sequence, Union

import torch
import torch.nn.functional as F
from torch import nn

from ..args import command
from ..draw import load_pyplot, save_figure
from ..errors import UsageError
from ..files import write_csv
from ..models import classifier_parameters
from .checkpoints import load_checkpoints
from .common import create_parser, format_table, output_folder

NAME = 'tsne'
MARKERS = 'os^Dv<>PX*ph'
METRICS = ('cosine', 'euclidean')


def parse_args(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = create_parser(
        NAME, __doc__, 'CHECKPOINT', 'checkpoints of train.py, or folders of runs, of which the best one is taken')
    parser.add_argument(
        '--groups', metavar='FILE',
        help="super-categories: COCO's .json, or a .csv of class and super-category (default: one for all classes)")
    parser.add_argument(
        '--perplexity', type=float, metavar='N',
        help='about how many classes are neighbours (default: a third of the classes, at most 10)')
    parser.add_argument(
        '--metric', choices=METRICS, default='cosine', help='distance of weights for t-SNE (default: %(default)s)')
    parser.add_argument('--seed', type=int, default=0, metavar='N', help='seed of t-SNE (default: %(default)s)')
    parser.add_argument('--use-ema', action='store_true', help="take the checkpoints' moving averages of the weights")
    parser.add_argument('--model', metavar='NAME', help='any model of timm, where a checkpoint does not say which')
    return parser.parse_args(argv)


def read_groups(path: Union[str, Path]) -> dict[str, str]:
    """ The super-category of each class.

    Args:
        path: Annotations of COCO's format, or a CSV file of two columns; its first row may be a header, which names no
            class.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding='utf-8-sig')
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f'Expected a file of super-categories, but got {path}: {error}') from error
    if path.suffix.lower() != '.json':
        rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines()) if any(row)]
        bad = next((row for row in rows if len(row) != 2), None)
        if not rows or bad is not None:
            got = f"the row '{','.join(bad)}'" if bad else 'none'
            raise UsageError(f'Expected rows of a class and its super-category in {path}, but got {got}.')
        return dict(rows)
    try:
        return {category['name']: str(category['supercategory']) for category in json.loads(text)['categories']}
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"Expected categories with 'name' and 'supercategory' in {path}, but got none: {error!r}") from error


def group_classes(class_names: Sequence[str], groups: Optional[dict[str, str]], path: str) -> list[str]:
    """ The super-category of each class, in their order.

    Args:
        class_names: The classes.
        groups: What `read_groups` returned, None for a single one.
        path: Where it is from.
    """
    if groups is None:
        return ['all'] * len(class_names)
    missing = [name for name in class_names if name not in groups]
    if missing:
        raise UsageError(
            f'Expected a super-category of each class in {path}, but got none of {len(missing)}, such as '
            f"'{missing[0]}'.")
    return [groups[name] for name in class_names]


def classifier_weights(model: nn.Module) -> torch.Tensor:
    """ The weights that give the logit of each class.

    Args:
        model: A timm model; heads of several layers of logits have theirs side by side.

    Returns:
        (classes, features) float32.
    """
    weights = [
        parameter.detach().float().flatten(1) for parameter in classifier_parameters(model)
        if parameter.ndim >= 2 and len(parameter) == model.num_classes]
    if not weights:
        raise UsageError(f'Expected a classifier with weights of each class, but got that of {type(model).__name__}.')
    return torch.cat(weights, dim=1).cpu()


def nearest_classes(weights: torch.Tensor) -> list[int]:
    """ The other class whose weights have the highest cosine with those of a class, for each class.

    Args:
        weights: (classes, features).
    """
    directions = F.normalize(weights.double(), dim=1)
    return (directions @ directions.T).fill_diagonal_(-torch.inf).argmax(dim=1).tolist()


def load_tsne() -> Callable[..., Any]:
    """The class of scikit-learn, or an error that says how to get it."""
    try:
        from sklearn.manifold import TSNE
    except ImportError as error:
        raise ImportError(
            "Expected scikit-learn for t-SNE, but got none: pip install 'timm-splicemix[analysis]'.") from error
    return TSNE


def project(weights: torch.Tensor, perplexity: float, metric: str = 'cosine', seed: int = 0) -> torch.Tensor:
    """ Places of classes in a plane, by t-SNE.

    Args:
        weights: (classes, features).
        perplexity: About how many classes are neighbours.
        metric: 'cosine' or 'euclidean'.
        seed: Seed of the first places.

    Returns:
        (classes, 2).
    """
    tsne = load_tsne()(perplexity=perplexity, metric=metric, init='random', random_state=seed)
    return torch.from_numpy(tsne.fit_transform(weights.numpy()))


def table_of(
        name: str,
        class_names: Sequence[str],
        groups: Sequence[str],
        weights: torch.Tensor,
        places: torch.Tensor,
) -> list[dict[str, Any]]:
    """ A row for each class of a checkpoint.

    Args:
        name: Name of the checkpoint.
        class_names: Its classes.
        groups: Super-category of each.
        weights: (classes, features).
        places: (classes, 2), what `project` returned.
    """
    return [
        {'checkpoint': name, 'class': class_name, 'group': group, 'x': x, 'y': y,
         'nearest': class_names[other], 'nearest_group': groups[other]}
        for class_name, group, (x, y), other in zip(class_names, groups, places.tolist(), nearest_classes(weights))]


def neighbour_rows(tables: dict[str, Sequence[dict[str, Any]]]) -> list[dict[str, str]]:
    """ How many classes of each super-category have one of it as their nearest class.

    Args:
        tables: What `table_of` returned for each checkpoint.

    Returns:
        Rows of words. A super-category of one class has none, and does not count in the last row, over all.
    """
    groups = sorted({row['group'] for rows in tables.values() for row in rows})
    table = [{'super-category': group} for group in (*groups, 'all')]
    for name, rows in tables.items():
        found = {group: [row['nearest_group'] == group for row in rows if row['group'] == group] for group in groups}
        found = {group: same for group, same in found.items() if len(same) > 1}
        for line, group in zip(table, groups):
            line[name] = f'{sum(found[group])} of {len(found[group])}' if group in found else '-'
        number = sum(map(len, found.values()))
        table[-1][name] = f'{sum(map(sum, found.values())) / number:.1%}' if number else '-'
    return table


def draw_places(tables: dict[str, Sequence[dict[str, Any]]]):
    """ A figure with a panel for each checkpoint; None without matplotlib.

    Args:
        tables: What `table_of` returned for each checkpoint.
    """
    pyplot = load_pyplot()
    if pyplot is None:
        return None
    groups = sorted({row['group'] for rows in tables.values() for row in rows})
    colors = pyplot.get_cmap('tab20' if len(groups) > 10 else 'tab10')
    figure, axes = pyplot.subplots(
        1, len(tables), figsize=(6.5 * len(tables), 6.5), squeeze=False, layout='constrained')
    for axis, (name, rows) in zip(axes[0], tables.items()):
        for number, group in enumerate(groups):
            mine = [row for row in rows if row['group'] == group]
            axis.scatter(
                [row['x'] for row in mine], [row['y'] for row in mine], s=36, label=_plain(group),
                color=colors(number % colors.N), marker=MARKERS[number % len(MARKERS)])
        for row in rows:
            axis.annotate(
                _plain(row['class']), (row['x'], row['y']), xytext=(4, 3), textcoords='offset points', fontsize=7,
                color='#202124')
        axis.set(xticks=[], yticks=[], title=_plain(name))
        axis.margins(0.12)
    if len(groups) > 1:
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc='outside lower center', ncols=min(6, len(groups)), fontsize='small')
    return figure


def _plain(text: str) -> str:
    """A dollar is no formula, and a leading underscore hides nothing from the legend."""
    text = text.replace('$', r'\$')
    return f'\u200b{text}' if text.startswith('_') else text


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    args = parse_args(argv)
    load_tsne()  # before anything takes time
    groups = read_groups(args.groups) if args.groups else None
    tables = {}
    for checkpoint in load_checkpoints(args.paths, args.names, args.model, args.use_ema):
        names = checkpoint.class_names
        if len(names) < 4:
            raise UsageError(f'Expected at least 4 classes for t-SNE, but got {len(names)} in {checkpoint.name}.')
        perplexity = min(10., (len(names) - 1) / 3) if args.perplexity is None else args.perplexity
        if not 1 <= perplexity < len(names):
            raise UsageError(
                f'Expected --perplexity from 1 to less than the {len(names)} classes, but got {perplexity:g}.')
        weights = classifier_weights(checkpoint.model)
        if not weights.isfinite().all():
            raise UsageError(f'Expected weights that are numbers, but got others in {checkpoint.name}.')
        places = project(weights, perplexity, args.metric, args.seed)
        tables[checkpoint.name] = table_of(
            checkpoint.name, names, group_classes(names, groups, args.groups), weights, places)
    if groups is None:
        columns = ('checkpoint', 'class', 'nearest')
        print(format_table([{name: row[name] for name in columns} for rows in tables.values() for row in rows]))
    else:
        print(format_table(neighbour_rows(tables)))
        print('\nclasses whose nearest class, by the cosine of weights, is of their super-category')
    folder = output_folder(args.output, NAME)
    write_csv([row for rows in tables.values() for row in rows], folder / f'{NAME}.csv')
    figure = draw_places(tables)
    if figure is not None:
        save_figure(figure, folder / f'{NAME}.png')
    print(f'\nWritten to {folder}.')


if __name__ == '__main__':
    main()
