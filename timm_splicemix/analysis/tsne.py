""" Show which classes are similar to a model: t-SNE of the classifier weights, coloured by super-category

    python -m timm_splicemix.analysis.tsne runs/plain runs/splicemix --groups annotations/instances_val2014.json
    python -m timm_splicemix.analysis.tsne runs/splicemix/model_best.pth.tar --groups groups.csv --output runs/splicemix

Classes of the same super-category have the same colour and marker. --groups is an annotation file in COCO format, whose
categories have a super-category, or a CSV file with two columns, class and super-category.

Distances in a t-SNE plot mean little, so the table uses the cosine similarity of the weights: for each checkpoint, how
many classes have a nearest class of the same super-category. Without --groups, it lists the nearest class of each.
This command needs scikit-learn: pip install 'timm-splicemix[analysis]'.
"""
import argparse
from pathlib import Path
from typing import Any, Callable, Optional, Sequence, Union

import torch
import torch.nn.functional as F
from torch import nn

from ..args import command
from ..args.types import at_least
from ..draw import INK, load_pyplot, plot_text, save_figure
from ..errors import UsageError
from ..files import format_table, read_json, read_rows
from ..models import classifier_parameters, has_head
from .common import create_checkpoint_parser, load_checkpoints, write_analysis

NAME = 'tsne'
MARKERS = 'os^Dv<>PX*ph'


def parse_args(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = create_checkpoint_parser(NAME, __doc__)
    parser.add_argument(
        '--groups', metavar='FILE',
        help='super-categories: a .json in COCO format, or a .csv of class and super-category (default: none)')
    parser.add_argument(
        '--perplexity', type=at_least(1.), metavar='N',
        help='approximate number of neighbours of a class (default: a third of the classes, at most 10)')
    parser.add_argument(
        '--metric', choices=('cosine', 'euclidean'), default='cosine',
        help='distance between weights for t-SNE (default: %(default)s)')
    parser.add_argument('--seed', type=at_least(0), default=0, metavar='N', help='seed of t-SNE (default: %(default)s)')
    return parser.parse_args(argv)


def read_groups(path: Union[str, Path]) -> dict[str, str]:
    """ Read the super-category of each class.

    Args:
        path: Annotations in COCO format, or a CSV file of two columns, with or without a header.
    """
    path = Path(path)
    if path.suffix.lower() != '.json':
        rows = [[cell.strip() for cell in row] for row in read_rows(path)]
        bad = next((row for row in rows if len(row) != 2), None)
        if not rows or bad is not None:
            got = f"the row '{','.join(bad)}'" if bad else 'none'
            raise UsageError(f'Expected rows of a class and its super-category in {path}, but got {got}.')
        return dict(rows)
    content = read_json(path)
    try:
        return {category['name']: str(category['supercategory']) for category in content['categories']}
    except (KeyError, TypeError) as error:
        raise UsageError(
            f"Expected categories with 'name' and 'supercategory' in {path}, but got: {error!r}") from error


def group_classes(class_names: Sequence[str], groups: Optional[dict[str, str]], path: str) -> list[str]:
    """ Return the super-category of each class.

    Args:
        class_names: The classes.
        groups: Return value of `read_groups`, None without super-categories.
        path: File of the super-categories.
    """
    if groups is None:
        return ['all'] * len(class_names)
    missing = [name for name in class_names if name not in groups]
    if missing:
        raise UsageError(
            f"Expected a super-category for each class in {path}, but {len(missing)} are missing, such as "
            f"'{missing[0]}'.")
    empty = [name for name in class_names if not groups[name].strip()]
    if empty:
        raise UsageError(
            f"Expected a super-category for each class in {path}, but {len(empty)} are empty, such as that of "
            f"'{empty[0]}'. Name them, or leave --groups out.")
    return [groups[name] for name in class_names]


def classifier_weights(model: nn.Module) -> torch.Tensor:
    """ Return the classifier weights, (classes, features) float32; those of several classifiers are concatenated.

    For a head that computes the weights of its classifier (ML-GCN), these are returned.
    """
    computed = model.get_classifier().class_weights() if has_head(model) else None
    if computed is not None and computed.ndim == 2:
        return computed.detach().float().cpu()
    weights = [
        parameter.detach().float().flatten(1) for parameter in classifier_parameters(model)
        if parameter.ndim >= 2 and len(parameter) == model.num_classes]
    if not weights:
        raise UsageError(f'The classifier of {type(model).__name__} has no weights for each class.')
    return torch.cat(weights, dim=1).cpu()


def nearest_classes(weights: torch.Tensor) -> list[int]:
    """Return, for each class, the other class with the highest cosine similarity of weights (classes, features)."""
    directions = F.normalize(weights.double(), dim=1)
    return (directions @ directions.T).fill_diagonal_(-torch.inf).argmax(dim=1).tolist()


def load_tsne() -> Callable[..., Any]:
    try:
        from sklearn.manifold import TSNE
    except ImportError as error:
        raise UsageError("t-SNE needs scikit-learn: pip install 'timm-splicemix[analysis]'.") from error
    return TSNE


def project(weights: torch.Tensor, perplexity: float, metric: str = 'cosine', seed: int = 0) -> torch.Tensor:
    """ Compute positions of classes in a plane by t-SNE, (classes, 2).

    Args:
        weights: (classes, features).
        perplexity: Approximate number of neighbours.
        metric: 'cosine' or 'euclidean'.
        seed: Seed of the initial positions.
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
    """ Return a row for each class of a checkpoint.

    Args:
        name: Name of the checkpoint.
        class_names: Its classes.
        groups: Super-category of each class.
        weights: (classes, features).
        places: (classes, 2), return value of `project`.
    """
    return [
        {'checkpoint': name, 'class': class_name, 'group': group, 'x': x, 'y': y,
         'nearest': class_names[other], 'nearest_group': groups[other]}
        for class_name, group, (x, y), other in zip(class_names, groups, places.tolist(), nearest_classes(weights))]


def neighbour_rows(tables: dict[str, Sequence[dict[str, Any]]]) -> list[dict[str, str]]:
    """ Count the classes of each super-category whose nearest class is of the same super-category.

    Super-categories with a single class are not counted in the last row, the fraction of all classes.

    Args:
        tables: Return value of `table_of` for each checkpoint.
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


def draw_places(tables: dict[str, Sequence[dict[str, Any]]], path: Path) -> None:
    """Draw the positions of the classes, one panel per checkpoint."""
    pyplot = load_pyplot()
    if pyplot is None:
        return
    groups = sorted({row['group'] for rows in tables.values() for row in rows})
    colors = pyplot.get_cmap('tab20' if len(groups) > 10 else 'tab10')
    figure, axes = pyplot.subplots(
        1, len(tables), figsize=(6.5 * len(tables), 6.5), squeeze=False, layout='constrained')
    for axis, (name, rows) in zip(axes[0], tables.items()):
        for number, group in enumerate(groups):
            mine = [row for row in rows if row['group'] == group]
            axis.scatter(
                [row['x'] for row in mine], [row['y'] for row in mine], s=36, label=plot_text(group),
                color=colors(number % colors.N), marker=MARKERS[number % len(MARKERS)])
        for row in rows:
            axis.annotate(
                plot_text(row['class']), (row['x'], row['y']), xytext=(4, 3), textcoords='offset points', fontsize=7,
                color=INK)
        axis.set(xticks=[], yticks=[], title=plot_text(name))
        axis.margins(0.12)
    if len(groups) > 1:
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc='outside lower center', ncols=min(6, len(groups)), fontsize='small')
    save_figure(figure, path)


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    args = parse_args(argv)
    load_tsne()  # fail early
    groups = read_groups(args.groups) if args.groups else None
    tables = {}
    for checkpoint in load_checkpoints(args):
        names = checkpoint.class_names
        if len(names) < 4:
            raise UsageError(f'Expected at least 4 classes for t-SNE, but got {len(names)} in {checkpoint.name}.')
        perplexity = min(10., (len(names) - 1) / 3) if args.perplexity is None else args.perplexity
        if not 1 <= perplexity < len(names):
            raise UsageError(
                f'Expected --perplexity of at least 1 and less than the {len(names)} classes, but got {perplexity:g}.')
        weights = classifier_weights(checkpoint.model)
        if not weights.isfinite().all():
            raise UsageError(f'Non-finite classifier weights in {checkpoint.name}.')
        places = project(weights, perplexity, args.metric, args.seed)
        tables[checkpoint.name] = table_of(
            checkpoint.name, names, group_classes(names, groups, args.groups), weights, places)
    if groups is None:
        columns = ('checkpoint', 'class', 'nearest')
        print(format_table([{name: row[name] for name in columns} for rows in tables.values() for row in rows]))
    else:
        print(format_table(neighbour_rows(tables)))
        print('\nclasses whose nearest class, by cosine similarity of the weights, is of the same super-category')
    rows = [row for table in tables.values() for row in table]
    write_analysis(args.output, NAME, {NAME: rows}, lambda path: draw_places(tables, path))


if __name__ == '__main__':
    main()
