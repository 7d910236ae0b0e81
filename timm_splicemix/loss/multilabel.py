""" Multi-label losses by name

All take logits (N, C) and targets (N, C) of 1, 0, soft values between them, or -1 for unknown. They are computed from
logits in float32 (float64 if given), with and without autocast, and stay finite for logits of any size that float16
has, as do their gradients. An unknown target has no loss and is no part of the mean, except in 'an', 'wan' and 'p-asl',
which take it, or some of it, as negative. Nothing is decided from values, so a GPU is never waited for.

All reduce by 'mean' over all entries unless told otherwise, so that a learning rate carries over from one loss to
another. The code of ASL, Hill, SPLC and P-ASL has the 'sum', which is N * C times as large without unknown targets;
'batchmean', the sum over classes averaged over images, is C times as large.
"""
import inspect
from typing import Any, Optional

import torch

from ..errors import UsageError
from .bce import (
    AssumeNegativeLoss,
    BinaryCrossEntropy,
    SmoothedBinaryCrossEntropy,
    WeakNegativeLoss,
    assume_negative_loss,
    binary_cross_entropy,
    smoothed_binary_cross_entropy,
    weak_negative_loss,
)
from .focusing import (
    AsymmetricLoss,
    FocalLoss,
    HillLoss,
    SplcLoss,
    asymmetric_loss,
    focal_loss,
    hill_loss,
    splc_loss,
)
from .partial import PARTIAL, PartialAsymmetricLoss, partial_asymmetric_loss
from .terms import REDUCTIONS, MultilabelLoss

__all__ = [
    'LOSSES',
    'PARTIAL',
    'REDUCTIONS',
    'AssumeNegativeLoss',
    'AsymmetricLoss',
    'BinaryCrossEntropy',
    'FocalLoss',
    'HillLoss',
    'MultilabelLoss',
    'PartialAsymmetricLoss',
    'SmoothedBinaryCrossEntropy',
    'SplcLoss',
    'WeakNegativeLoss',
    'assume_negative_loss',
    'asymmetric_loss',
    'binary_cross_entropy',
    'create_loss',
    'focal_loss',
    'hill_loss',
    'loss_parameters',
    'partial_asymmetric_loss',
    'positive_weights',
    'smoothed_binary_cross_entropy',
    'splc_loss',
    'weak_negative_loss',
]

LOSSES: dict[str, type[MultilabelLoss]] = {
    'bce': BinaryCrossEntropy,
    'bce-ls': SmoothedBinaryCrossEntropy,
    'focal': FocalLoss,
    'asl': AsymmetricLoss,
    'hill': HillLoss,
    'splc': SplcLoss,
    'an': AssumeNegativeLoss,
    'wan': WeakNegativeLoss,
    'p-asl': PartialAsymmetricLoss,
}


def loss_parameters(name: str) -> dict[str, Any]:
    """ Look up the parameters of a loss.

    Args:
        name: A name of `LOSSES`.

    Returns:
        The default of each parameter.
    """
    if name not in LOSSES:
        raise UsageError(f"Expected a loss among {', '.join(LOSSES)}, but got '{name}'.")
    parameters = inspect.signature(LOSSES[name]).parameters
    return {parameter.name: parameter.default for parameter in parameters.values()}


def create_loss(name: str, num_classes: Optional[int] = None, **kwargs: Any) -> MultilabelLoss:
    """ Create a loss by name.

    Args:
        name: 'bce', 'bce-ls', 'focal', 'asl', 'hill', 'splc', 'an', 'wan' or 'p-asl'.
        num_classes: If given, parameters that have a value for each class are checked against it.
        kwargs: Parameters of the loss.
    """
    known = loss_parameters(name)
    others = [key for key in kwargs if key not in known]
    if others:
        raise UsageError(f"Expected parameters of loss '{name}' ({', '.join(known)}), but got {', '.join(others)}.")
    loss = LOSSES[name](**kwargs)
    if num_classes is not None:
        loss.check(num_classes)
    return loss


def positive_weights(
        targets: torch.Tensor,
        num_images: Optional[int] = None,
        *,
        max_weight: float = 100.,
) -> torch.Tensor:
    """ Weigh positives so that in each class they count as much as negatives: negatives / positives.

    A class without positives, or without negatives, is taken to have one.

    Args:
        targets: (N, C) of values between 0 and 1, or -1 for unknown, which counts as neither; or (C,), how many images
            have each class.
        num_images: How many images there are, with (C,) counts only.
        max_weight: Largest weight, and 1 / max_weight the smallest, so that a rare class doesn't rule the gradient.

    Returns:
        (C,) float32, for `pos_weight`.

    Example:
        >>> import torch
        >>> positive_weights(torch.tensor([[1., 0.], [0., 0.], [0., -1.], [0., 1.]]))
        tensor([3., 2.])
        >>> positive_weights(torch.tensor([1, 4]), num_images=8)
        tensor([7., 1.])
    """
    if targets.ndim not in (1, 2) or (targets.ndim == 1) != (num_images is not None):
        raise UsageError(
            'Expected targets of shape (N, classes), or counts of shape (classes,) together with num_images, but got '
            f'shape {tuple(targets.shape)} and num_images {num_images}.')
    if not max_weight >= 1:
        raise UsageError(f'Expected max_weight of at least 1, but got {max_weight}.')
    values = targets.double()
    if targets.ndim == 2:
        positives = values.clamp(min=0.).sum(dim=0)
        negatives = (values >= 0).sum(dim=0) - positives
    else:
        positives, negatives = values, num_images - values
        if (negatives < 0).any() or (positives < 0).any():
            raise UsageError(f'Expected counts between 0 and num_images {num_images}, but got {targets.tolist()}.')
    ratio = torch.where(negatives > 0, negatives, 1.) / torch.where(positives > 0, positives, 1.)
    return ratio.clamp(1 / max_weight, max_weight).float()
