""" Missing-label protocols, which hide labels of a training set """
from typing import Union

import torch

from ..errors import UsageError
from .seeding import mix_seeds

# Number of labels that an image with n labels keeps, counted in the published lists of the missing-label papers
_KEPT = {
    '75': lambda n: n // 2 + 1,
    '40': lambda n: n // 5 + 1,
    'single': torch.ones_like,
}


def parse_keep_labels(text: Union[str, float]) -> Union[str, float]:
    if str(text) in _KEPT:
        return str(text)
    try:
        probability = float(text)
    except ValueError:
        probability = -1.
    if not 0 < probability < 1:
        raise UsageError(
            f"Expected 75, 40, single or a probability between 0 and 1 for --keep-labels, but got '{text}'.")
    return probability


def keep_labels(targets: torch.Tensor, protocol: Union[str, float], seed: int = 0) -> torch.Tensor:
    """ Hide labels of (N, classes) targets.

    '75', '40' and 'single' keep floor(n / 2) + 1, floor(n / 5) + 1 or 1 of the n labels of each image, chosen
    uniformly; the others become 0 (absent). A probability P keeps each entry, present or absent, with probability P;
    the others become -1 (unknown).
    """
    protocol = parse_keep_labels(protocol)
    number = list(_KEPT).index(protocol) if isinstance(protocol, str) else len(_KEPT)
    generator = torch.Generator().manual_seed(mix_seeds(seed, number))  # the protocols draw independently
    draws = torch.rand(targets.shape, generator=generator)
    if not isinstance(protocol, str):
        return targets.masked_fill(draws >= protocol, -1)
    present = targets == 1
    count = present.sum(dim=1, keepdim=True)
    ranks = draws.masked_fill(~present, 2.).argsort(dim=1).argsort(dim=1)  # present labels first, in random order
    return targets.masked_fill(present & (ranks >= _KEPT[protocol](count)), 0)
