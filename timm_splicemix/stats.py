""" Show what is in a data set: images, labels per image, positives per class, classes that come together

    python -m timm_splicemix.data.stats --dataset voc/2007 --data-dir path/to/voc
    python -m timm_splicemix.data.stats --dataset csv --data-dir path/to/images --split train --output stats.png
"""
import argparse
from typing import Optional, Sequence

import torch

from .args import CommandParser, add_dataset_args, add_label_args, command
from .data.dataset import MultiLabelDataset
from .data.registry import create_dataset
from .data.splits import is_training_split
from .draw import load_pyplot, save_figure
from .errors import UsageError
from .files import format_table
from .run.factory import dataset_kwargs


def parse_args(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = CommandParser(prog='timm_splicemix.data.stats', description=__doc__)
    parser.add_argument('--split', default='train', help='split to look at (default: %(default)s)')
    parser.add_argument('--pairs', type=int, default=10, metavar='N', help='pairs to list (default: %(default)s)')
    parser.add_argument('--output', metavar='FILE', help='draw a plot too, such as stats.png')
    add_dataset_args(parser)
    add_label_args(parser)
    return parser.parse_args(argv)


def co_occurrence(targets: torch.Tensor) -> torch.Tensor:
    """ How many images have both of two classes.

    Args:
        targets: (N, classes) of 1, 0 and -1.

    Returns:
        (classes, classes), the diagonal being the images that have a class.
    """
    present = (targets == 1).float()
    return (present.T @ present).round().long()


def top_pairs(together: torch.Tensor, number: int) -> list[tuple[int, int, int]]:
    """ The pairs of classes that most images have.

    Args:
        together: What `co_occurrence` returned.
        number: How many pairs.

    Returns:
        (class, other class, images), most images first.
    """
    rows, cols = torch.triu_indices(len(together), len(together), offset=1)
    counts = together[rows, cols]
    order = counts.argsort(descending=True, stable=True)[:number].tolist()
    return [(int(rows[i]), int(cols[i]), int(counts[i])) for i in order if counts[i] > 0]


def format_stats(targets: torch.Tensor, class_names: Sequence[str], number_of_pairs: int) -> str:
    """ The statistics as text.

    Args:
        targets: (N, classes) of 1, 0 and -1.
        class_names: Name of each class.
        number_of_pairs: Pairs to list.
    """
    together = co_occurrence(targets)
    positives = together.diagonal()
    unknown = (targets == -1).sum(dim=0)
    labels = (targets == 1).sum(dim=1)
    order = positives.argsort(descending=True, stable=True).tolist()
    classes = [{
        'class': class_names[index], 'images': int(positives[index]), 'part': int(positives[index]) / len(targets),
        'unknown': int(unknown[index]),
    } for index in order]
    pairs = [{
        'most together': f'{class_names[first]} + {class_names[second]}', 'images': count,
        'of the first': count / int(positives[first]), 'of the second': count / int(positives[second]),
    } for first, second, count in top_pairs(together, number_of_pairs)]
    lines = [
        f'{len(targets):,} images, {len(class_names)} classes, {int(labels.sum()):,} labels: '
        f'{labels.float().mean():.2f} per image ({int(labels.min())} to {int(labels.max())})',
        'labels per image: ' + ', '.join(
            f'{number}: {count:,}' for number, count in enumerate(torch.bincount(labels).tolist()) if count),
        '',
        format_table(classes, {'part': '.2%'}),
    ]
    if pairs:
        lines += ['', format_table(pairs, {'of the first': '.1%', 'of the second': '.1%'})]
    return '\n'.join(lines)


def draw_stats(targets: torch.Tensor, class_names: Sequence[str], title: str):
    """A figure of positives per class, labels per image and co-occurrence; None without matplotlib."""
    pyplot = load_pyplot()
    if pyplot is None:
        return None
    together = co_occurrence(targets)
    order = together.diagonal().argsort(descending=True, stable=True)
    names = [class_names[index] for index in order.tolist()]
    figure, (left, middle, right) = pyplot.subplots(
        1, 3, figsize=(15, max(4., 0.16 * len(names) + 1.5)), width_ratios=(4, 2, 4), layout='constrained')
    figure.suptitle(title)
    left.barh(range(len(names)), together.diagonal()[order].tolist())
    left.set(yticks=range(len(names)), yticklabels=names, xlabel='images', title='images of each class')
    left.invert_yaxis()
    left.margins(y=0.01)
    counts = torch.bincount((targets == 1).sum(dim=1)).tolist()
    middle.bar(range(len(counts)), counts)
    middle.set(xlabel='labels', ylabel='images', title='labels per image')
    part = together[order][:, order] / together.diagonal()[order].clamp(min=1).unsqueeze(1)
    picture = right.imshow(part.numpy(), vmin=0, vmax=1, cmap='viridis', aspect='auto')
    right.set(
        xticks=range(len(names)), yticks=range(len(names)), yticklabels=names,
        title='part of the images of a row that have the column')
    right.set_xticks(range(len(names)), names, rotation=90)
    for axes in (left, right):
        axes.tick_params(labelsize=8 if len(names) <= 40 else 5)
    figure.colorbar(picture, ax=right)
    return figure


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    args = parse_args(argv)
    is_training = is_training_split(args.split)
    dataset = create_dataset(split=args.split, **dataset_kwargs(args, is_training))
    if not isinstance(dataset, MultiLabelDataset):
        raise UsageError(
            f"Expected a multi-label data set that is not streamed, but got '{args.dataset}' of type "
            f'{type(dataset).__name__}.')
    print(format_stats(dataset.targets, dataset.class_names, args.pairs))
    if args.output:
        title = f'{args.dataset}, {args.split}: {len(dataset):,} images'
        figure = draw_stats(dataset.targets, dataset.class_names, title)
        if figure is not None:
            save_figure(figure, args.output)
            print(f'\nplot: {args.output}')


if __name__ == '__main__':
    main()
