""" Losses of single labels, as class indices or as the union that mixing makes of them """
import torch
import torch.nn.functional as F
from torch import nn

from ..errors import UsageError

__all__ = ['UnionCrossEntropy', 'union_cross_entropy']


def union_cross_entropy(logits: torch.Tensor, targets: torch.Tensor, smoothing: float = 0.) -> torch.Tensor:
    """ Soft cross entropy against the classes that are present, each with the same share.

    Args:
        logits: (N, C).
        targets: (N,) class indices, or (N, C) values of at least 0; each row is divided by its sum.
        smoothing: Share of the target that goes to all classes alike.

    Returns:
        The mean over images.
    """
    if not 0 <= smoothing < 1:
        raise UsageError(f'Expected smoothing from 0 to below 1, but got {smoothing}.')
    if targets.ndim == 1:
        targets = F.one_hot(targets.long(), logits.shape[1])
    targets = targets.to(logits.dtype)
    targets = targets / targets.sum(dim=1, keepdim=True).clamp(min=torch.finfo(targets.dtype).tiny)
    targets = targets * (1 - smoothing) + smoothing / logits.shape[1]
    return -(targets * F.log_softmax(logits, dim=1)).sum(dim=1).mean()


class UnionCrossEntropy(nn.Module):
    """ `union_cross_entropy` as a module.

    Args:
        smoothing: Share of the target that goes to all classes alike.
    """

    def __init__(self, smoothing: float = 0.):
        super().__init__()
        self.smoothing = smoothing

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return union_cross_entropy(logits, targets, self.smoothing)
