""" Statistics of multi-hot targets """
from typing import Sequence

import torch

from ..files import format_table


def co_occurrence(targets: torch.Tensor) -> torch.Tensor:
    """ Count the images that have both of two classes.

    Args:
        targets: (N, classes) of 1, 0 and -1.

    Returns:
        (classes, classes); the diagonal counts the images of each class.
    """
    present = (targets == 1).float()
    return (present.T @ present).round().long()


def top_pairs(counts: torch.Tensor, number: int) -> list[tuple[int, int, int]]:
    """The pairs of classes that most images have, as (class, other class, images), given `co_occurrence` counts."""
    rows, cols = torch.triu_indices(len(counts), len(counts), offset=1)
    images = counts[rows, cols]
    order = images.argsort(descending=True, stable=True)[:number].tolist()
    return [(int(rows[i]), int(cols[i]), int(images[i])) for i in order if images[i] > 0]


def format_statistics(targets: torch.Tensor, class_names: Sequence[str], num_pairs: int) -> str:
    """Labels per image, images per class, and the most frequent pairs of classes, as text."""
    counts = co_occurrence(targets)
    positives = counts.diagonal()
    unknown = (targets == -1).sum(dim=0)
    labels = (targets == 1).sum(dim=1)
    classes = [{
        'class': class_names[index], 'images': int(positives[index]), 'part': int(positives[index]) / len(targets),
        'unknown': int(unknown[index]),
    } for index in positives.argsort(descending=True, stable=True).tolist()]
    pairs = [{
        'most together': f'{class_names[first]} + {class_names[second]}', 'images': count,
        'of the first': count / int(positives[first]), 'of the second': count / int(positives[second]),
    } for first, second, count in top_pairs(counts, num_pairs)]
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
