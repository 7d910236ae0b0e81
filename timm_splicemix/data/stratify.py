""" Split images into parts in which every class has its share """
from typing import Sequence

import numpy as np
import torch

from ..errors import UsageError
from .seeding import mix_seeds


def stratified_split(targets: torch.Tensor, fractions: Sequence[float], seed: int = 0) -> torch.Tensor:
    """ Split images with several labels each by iterative stratification (Sechidis et al., 2011).

    The class with the fewest images left goes first: each of its images joins the part that lacks most of this class.
    Images without a positive label fill the parts up. Unknown labels (-1) count as no label. The sizes of the parts are
    exact, up to rounding.

    Args:
        targets: (N, classes): 1 present, 0 absent, -1 unknown.
        fractions: Size of each part relative to the whole; the sum is 1.
        seed: Random seed, of which the result is a function.

    Returns:
        (N,) int64, the part of each image.
    """
    if len(fractions) < 2 or min(fractions) <= 0 or abs(sum(fractions) - 1) > 1e-6:
        raise UsageError(f'Expected at least two fractions above 0 with a sum of 1, but got {list(fractions)}.')
    room = _sizes(len(targets), fractions)
    if 0 in room:
        raise UsageError(f'{len(targets)} images are too few for parts of {", ".join(f"{f:g}" for f in fractions)}.')
    generator = np.random.RandomState(mix_seeds(seed, len(fractions)))  # its stream is the same in every version
    order = generator.permutation(len(targets))
    present = (targets == 1).numpy()[order]
    class_order = generator.permutation(present.shape[1])
    parts = torch.empty(len(targets), dtype=torch.int64)
    parts[torch.from_numpy(order)] = torch.from_numpy(_assign(present[:, class_order], fractions, room))
    return parts


def _sizes(number: int, fractions: Sequence[float]) -> list[int]:
    """Whole numbers in the proportion of the fractions, by the largest remainders."""
    exact = np.array(fractions) * number
    sizes = np.floor(exact + 1e-9).astype(int)
    for part in np.argsort(sizes - exact, kind='stable')[:number - sizes.sum()]:
        sizes[part] += 1
    return sizes.tolist()


def _assign(present: np.ndarray, fractions: Sequence[float], room: list[int]) -> np.ndarray:
    """The part of each image; plain lists are faster here than arrays, as each image is a step of its own."""
    images, labels = present.nonzero()
    ends = np.searchsorted(images, np.arange(1, len(present) + 1)).tolist()
    labels_of = [labels[start:end].tolist() for start, end in zip([0, *ends], ends)]
    left = present.sum(axis=0)
    wanted = [(fraction * left).tolist() for fraction in fractions]
    left = left.tolist()
    parts = [-1] * len(present)
    all_parts = range(len(fractions))
    while any(left):
        rarest = min((number, label) for label, number in enumerate(left) if number)[1]
        for image in present[:, rarest].nonzero()[0].tolist():
            if parts[image] >= 0:
                continue
            part = max((part for part in all_parts if room[part]), key=lambda p: (wanted[p][rarest], room[p]))
            parts[image] = part
            room[part] -= 1
            for label in labels_of[image]:
                wanted[part][label] -= 1
                left[label] -= 1
    result = np.array(parts)
    result[result < 0] = np.repeat(np.arange(len(room)), room)
    return result
