""" Binary cross entropy for multi-label targets, and its variants for labels that are smoothed or missing """
from typing import Optional, Union

import torch

from ..errors import UsageError
from .terms import (
    MultilabelLoss,
    check_range,
    negative_term,
    positive_term,
    prepare,
    reduce_losses,
    weigh_positives,
)

__all__ = [
    'AssumeNegativeLoss', 'BinaryCrossEntropy', 'SmoothedBinaryCrossEntropy', 'WeakNegativeLoss',
    'assume_negative_loss', 'binary_cross_entropy', 'smoothed_binary_cross_entropy', 'weak_negative_loss',
]


def _smooth(targets: torch.Tensor, eps: float) -> torch.Tensor:
    check_range('eps', eps, 0., 0.5)
    return targets * (1 - 2 * eps) + eps


def _cross_entropy(
        logits: torch.Tensor,
        targets: torch.Tensor,
        pos_weight: Optional[Union[torch.Tensor, float]],
) -> torch.Tensor:
    positive = weigh_positives(positive_term(logits), pos_weight)
    return targets * positive + (1 - targets) * negative_term(logits)  # (N, C)


def binary_cross_entropy(
        logits: torch.Tensor,
        targets: torch.Tensor,
        *,
        smoothing: float = 0.,
        target_threshold: Optional[float] = None,
        pos_weight: Optional[Union[torch.Tensor, float]] = None,
        reduction: str = 'mean',
) -> torch.Tensor:
    """ Binary cross entropy, -w * y * log(p) - (1 - y) * log(1 - p), with the extras of timm's.

    Smoothing is that of timm, y * (1 - smoothing) + smoothing / C, which timm does to class indices only; here it is
    done to multi-hot targets too. The threshold comes after it, as in timm.

    Args:
        logits: (N, C).
        targets: (N, C) of values between 0 and 1, or -1 for unknown; or (N,) class indices.
        smoothing: Part of each target that is spread over all classes.
        target_threshold: Make targets above it 1 and others 0.
        pos_weight: (C,), or one number; weight w of positives.
        reduction: 'mean', 'sum' or 'batchmean'; timm's code has the mean, and 'batchmean' if told to sum classes.
    """
    logits, targets, unknown = prepare(logits, targets)
    check_range('smoothing', smoothing, 0., 1.)
    targets = targets * (1 - smoothing) + smoothing / max(logits.shape[1], 1)
    if target_threshold is not None:
        check_range('target_threshold', target_threshold, 0., 1.)
        targets = (targets > target_threshold).to(logits.dtype)
    losses = _cross_entropy(logits.masked_fill(unknown, 0.), targets, pos_weight)
    return reduce_losses(losses, unknown, reduction)


def smoothed_binary_cross_entropy(
        logits: torch.Tensor,
        targets: torch.Tensor,
        *,
        eps: float = 0.1,
        pos_weight: Optional[Union[torch.Tensor, float]] = None,
        reduction: str = 'mean',
) -> torch.Tensor:
    """ Binary cross entropy of targets smoothed label by label: 1 becomes 1 - eps, and 0 becomes eps.

    Args:
        logits: (N, C).
        targets: (N, C) of values between 0 and 1, or -1 for unknown; or (N,) class indices.
        eps: How far targets move.
        pos_weight: (C,), or one number; weight of positives.
        reduction: 'mean', 'sum' or 'batchmean'; the code of Cole et al. has the mean.
    """
    logits, targets, unknown = prepare(logits, targets)
    losses = _cross_entropy(logits.masked_fill(unknown, 0.), _smooth(targets, eps), pos_weight)
    return reduce_losses(losses, unknown, reduction)


def assume_negative_loss(
        logits: torch.Tensor,
        targets: torch.Tensor,
        *,
        eps: float = 0.,
        pos_weight: Optional[Union[torch.Tensor, float]] = None,
        reduction: str = 'mean',
) -> torch.Tensor:
    """ Binary cross entropy in which the unknown is negative (AN).

    Args:
        logits: (N, C).
        targets: (N, C) of values between 0 and 1, or -1 for unknown; or (N,) class indices.
        eps: How far targets are smoothed: 1 becomes 1 - eps, 0 and unknown become eps (AN-LS has 0.1).
        pos_weight: (C,), or one number; weight of positives.
        reduction: 'mean', 'sum' or 'batchmean'; the code of Cole et al. has the mean.
    """
    logits, targets, _ = prepare(logits, targets)
    losses = _cross_entropy(logits, _smooth(targets.clamp(min=0.), eps), pos_weight)
    return reduce_losses(losses, None, reduction)


def weak_negative_loss(
        logits: torch.Tensor,
        targets: torch.Tensor,
        *,
        reduction: str = 'mean',
) -> torch.Tensor:
    """ Binary cross entropy in which the unknown is negative, and negatives weigh 1 / (C - 1) (WAN).

    With one known positive in an image, its negatives together weigh as much as the positive.

    Args:
        logits: (N, C).
        targets: (N, C) of values between 0 and 1, or -1 for unknown; or (N,) class indices.
        reduction: 'mean', 'sum' or 'batchmean'; the code of Cole et al. has the mean, over all N * C entries.
    """
    logits, targets, _ = prepare(logits, targets)
    targets = targets.clamp(min=0.)
    negative = negative_term(logits) / max(logits.shape[1] - 1, 1)
    return reduce_losses(targets * positive_term(logits) + (1 - targets) * negative, None, reduction)


class BinaryCrossEntropy(MultilabelLoss):
    """ `binary_cross_entropy` as a module.

    Args:
        smoothing: Part of each target that is spread over all classes.
        target_threshold: Make targets above it 1 and others 0.
        sum_classes: timm's name for the reduction 'batchmean'.
        pos_weight: (C,), or one number; weight of positives.
        reduction: 'mean', 'sum' or 'batchmean'.
    """

    def __init__(
            self,
            smoothing: float = 0.,
            target_threshold: Optional[float] = None,
            sum_classes: bool = False,
            pos_weight: Optional[Union[torch.Tensor, float]] = None,
            reduction: str = 'mean',
    ):
        if sum_classes and reduction == 'sum':
            raise UsageError("Expected reduction 'mean' or 'batchmean' with sum_classes, but got 'sum'.")
        super().__init__(
            binary_cross_entropy, smoothing=smoothing, target_threshold=target_threshold, pos_weight=pos_weight,
            reduction='batchmean' if sum_classes else reduction)


class SmoothedBinaryCrossEntropy(MultilabelLoss):
    """ `smoothed_binary_cross_entropy` as a module.

    Args:
        eps: How far targets move.
        pos_weight: (C,), or one number; weight of positives.
        reduction: 'mean', 'sum' or 'batchmean'.
    """

    def __init__(
            self,
            eps: float = 0.1,
            pos_weight: Optional[Union[torch.Tensor, float]] = None,
            reduction: str = 'mean',
    ):
        super().__init__(smoothed_binary_cross_entropy, eps=eps, pos_weight=pos_weight, reduction=reduction)


class AssumeNegativeLoss(MultilabelLoss):
    """ `assume_negative_loss` as a module.

    Args:
        eps: How far targets are smoothed.
        pos_weight: (C,), or one number; weight of positives.
        reduction: 'mean', 'sum' or 'batchmean'.
    """

    def __init__(
            self,
            eps: float = 0.,
            pos_weight: Optional[Union[torch.Tensor, float]] = None,
            reduction: str = 'mean',
    ):
        super().__init__(assume_negative_loss, eps=eps, pos_weight=pos_weight, reduction=reduction)


class WeakNegativeLoss(MultilabelLoss):
    """ `weak_negative_loss` as a module.

    Args:
        reduction: 'mean', 'sum' or 'batchmean'.
    """

    def __init__(self, reduction: str = 'mean'):
        super().__init__(weak_negative_loss, reduction=reduction)
