""" Losses that weigh each label by how hard it is: focal, asymmetric, Hill and SPLC """
from typing import Optional, Union

import torch

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
    'AsymmetricLoss', 'FocalLoss', 'HillLoss', 'SplcLoss', 'asymmetric_loss', 'focal_loss', 'hill_loss', 'splc_loss',
]


def focal_loss(
        logits: torch.Tensor,
        targets: torch.Tensor,
        *,
        gamma: float = 2.,
        alpha: Optional[float] = None,
        pos_weight: Optional[Union[torch.Tensor, float]] = None,
        reduction: str = 'mean',
) -> torch.Tensor:
    """ Focal loss, -y * (1 - p)^gamma * log(p) - (1 - y) * p^gamma * log(1 - p).

    Args:
        logits: (N, C).
        targets: (N, C) of values between 0 and 1, or -1 for unknown; or (N,) class indices.
        gamma: Focusing exponent.
        alpha: Weight of positives, with 1 - alpha that of negatives, as in detection; None weighs neither, as papers
            on multi-label classification have it.
        pos_weight: (C,), or one number; weight of positives.
        reduction: 'mean', 'sum' or 'batchmean'.
    """
    check_range('gamma', gamma, 0.)
    logits, targets, unknown = prepare(logits, targets)
    logits = logits.masked_fill(unknown, 0.)
    positive, negative = weigh_positives(positive_term(logits, gamma), pos_weight), negative_term(logits, gamma)
    if alpha is not None:
        check_range('alpha', alpha, 0., 1.)
        positive, negative = alpha * positive, (1 - alpha) * negative
    return reduce_losses(targets * positive + (1 - targets) * negative, unknown, reduction)


def asymmetric_loss(
        logits: torch.Tensor,
        targets: torch.Tensor,
        *,
        gamma_neg: float = 4.,
        gamma_pos: float = 1.,
        clip: float = 0.05,
        detach_focus: bool = False,
        pos_weight: Optional[Union[torch.Tensor, float]] = None,
        reduction: str = 'mean',
) -> torch.Tensor:
    """ Asymmetric loss (ASL), a focal loss that focuses more on negatives and forgets the easy ones.

    With q = max(p - clip, 0),

        loss = -y * (1 - p)^gamma_pos * log(p) - (1 - y) * q^gamma_neg * log(1 - q)

    Each of the two has its own weight whatever y is, so it is right for soft targets too; for 0 and 1 it equals
    timm's `AsymmetricLossMultiLabel`. The defaults are those of the authors' library; their COCO recipe has
    gamma_pos 0, and detach_focus.

    Args:
        logits: (N, C).
        targets: (N, C) of values between 0 and 1, or -1 for unknown; or (N,) class indices.
        gamma_neg: Focusing exponent of negatives.
        gamma_pos: Focusing exponent of positives.
        clip: Probability up to which a negative has no loss.
        detach_focus: Take the two powers as constants, so no gradient goes through them.
        pos_weight: (C,), or one number; weight of positives.
        reduction: 'mean', 'sum' or 'batchmean'; the authors' and timm's code has the sum.

    Example:
        >>> import torch
        >>> asymmetric_loss(torch.tensor([[0.3, 5.]]), torch.tensor([[0.9, -1.]]))
        tensor(0.2179)
    """
    for name, gamma in (('gamma_neg', gamma_neg), ('gamma_pos', gamma_pos)):
        check_range(name, gamma, 0.)
    check_range('clip', clip, 0., 1.)
    logits, targets, unknown = prepare(logits, targets)
    logits = logits.masked_fill(unknown, 0.)
    positive = weigh_positives(positive_term(logits, gamma_pos, detach_focus), pos_weight)
    negative = negative_term(logits, gamma_neg, clip, detach_focus)
    return reduce_losses(targets * positive + (1 - targets) * negative, unknown, reduction)


def hill_loss(
        logits: torch.Tensor,
        targets: torch.Tensor,
        *,
        lamb: float = 1.5,
        margin: float = 1.,
        gamma: float = 2.,
        reduction: str = 'mean',
) -> torch.Tensor:
    """ Hill loss, for missing labels: the surer a negative is predicted to be positive, the less it is pushed down.

    With p' = sigmoid(x - margin),

        loss = -y * (1 - p')^gamma * log(p') + (1 - y) * (lamb - p) * p^2

    Args:
        logits: (N, C).
        targets: (N, C) of values between 0 and 1, or -1 for unknown; or (N,) class indices.
        lamb: Where the hill ends: the gradient of a negative turns at p = 2 / 3 * lamb.
        margin: What is taken from the logits of positives.
        gamma: Focusing exponent of positives.
        reduction: 'mean', 'sum' or 'batchmean'; the authors' code has the sum.
    """
    check_range('lamb', lamb, 1.)
    check_range('gamma', gamma, 0.)
    logits, targets, unknown = prepare(logits, targets)
    logits = logits.masked_fill(unknown, 0.)
    p = logits.sigmoid()
    losses = targets * positive_term(logits - margin, gamma) + (1 - targets) * (lamb - p) * p.square()
    return reduce_losses(losses, unknown, reduction)


def splc_loss(
        logits: torch.Tensor,
        targets: torch.Tensor,
        *,
        epoch: int = 0,
        start_epoch: int = 1,
        tau: float = 0.6,
        margin: float = 1.,
        gamma: float = 2.,
        reduction: str = 'mean',
) -> torch.Tensor:
    """ Self-paced loss correction (SPLC), for missing labels: a negative predicted above tau is taken as positive.

    It is a focal loss in which the logits of positives are lowered by the margin. From `start_epoch` on, negatives with
    p > tau have the loss of positives, without the margin. Targets themselves stay as they are. The negative part of a
    soft target is corrected the same way.

    Args:
        logits: (N, C).
        targets: (N, C) of values between 0 and 1, or -1 for unknown, which is ignored; or (N,) class indices.
        epoch: Epoch of training, from 0.
        start_epoch: First epoch in which negatives are corrected; 1 is the second.
        tau: Probability above which they are.
        margin: What is taken from the logits of positives.
        gamma: Focusing exponent.
        reduction: 'mean', 'sum' or 'batchmean'; the authors' code has the sum.
    """
    check_range('start_epoch', start_epoch, 0)
    check_range('tau', tau, 0., 1.)
    check_range('gamma', gamma, 0.)
    logits, targets, unknown = prepare(logits, targets)
    logits = logits.masked_fill(unknown, 0.)
    negative = negative_term(logits, gamma)
    if epoch >= start_epoch:
        negative = torch.where(logits.sigmoid() > tau, positive_term(logits, gamma), negative)
    losses = targets * positive_term(logits - margin, gamma) + (1 - targets) * negative
    return reduce_losses(losses, unknown, reduction)


class FocalLoss(MultilabelLoss):
    """ `focal_loss` as a module.

    Args:
        gamma: Focusing exponent.
        alpha: Weight of positives, with 1 - alpha that of negatives; None weighs neither.
        pos_weight: (C,), or one number; weight of positives.
        reduction: 'mean', 'sum' or 'batchmean'.
    """

    def __init__(
            self,
            gamma: float = 2.,
            alpha: Optional[float] = None,
            pos_weight: Optional[Union[torch.Tensor, float]] = None,
            reduction: str = 'mean',
    ):
        super().__init__(focal_loss, gamma=gamma, alpha=alpha, pos_weight=pos_weight, reduction=reduction)


class AsymmetricLoss(MultilabelLoss):
    """ `asymmetric_loss` as a module.

    Args:
        gamma_neg: Focusing exponent of negatives.
        gamma_pos: Focusing exponent of positives.
        clip: Probability up to which a negative has no loss.
        detach_focus: Take focusing weights as constants.
        pos_weight: (C,), or one number; weight of positives.
        reduction: 'mean', 'sum' or 'batchmean'.
    """

    def __init__(
            self,
            gamma_neg: float = 4.,
            gamma_pos: float = 1.,
            clip: float = 0.05,
            detach_focus: bool = False,
            pos_weight: Optional[Union[torch.Tensor, float]] = None,
            reduction: str = 'mean',
    ):
        super().__init__(
            asymmetric_loss, gamma_neg=gamma_neg, gamma_pos=gamma_pos, clip=clip, detach_focus=detach_focus,
            pos_weight=pos_weight, reduction=reduction)


class HillLoss(MultilabelLoss):
    """ `hill_loss` as a module.

    Args:
        lamb: Where the hill ends.
        margin: What is taken from the logits of positives.
        gamma: Focusing exponent of positives.
        reduction: 'mean', 'sum' or 'batchmean'.
    """

    def __init__(self, lamb: float = 1.5, margin: float = 1., gamma: float = 2., reduction: str = 'mean'):
        super().__init__(hill_loss, lamb=lamb, margin=margin, gamma=gamma, reduction=reduction)


class SplcLoss(MultilabelLoss):
    """ `splc_loss` as a module, which is told the epoch.

    Args:
        start_epoch: First epoch in which negatives are corrected; 1 is the second.
        tau: Probability above which they are.
        margin: What is taken from the logits of positives.
        gamma: Focusing exponent.
        reduction: 'mean', 'sum' or 'batchmean'.
    """

    def __init__(
            self,
            start_epoch: int = 1,
            tau: float = 0.6,
            margin: float = 1.,
            gamma: float = 2.,
            reduction: str = 'mean',
    ):
        super().__init__(
            splc_loss, epoch=0, start_epoch=start_epoch, tau=tau, margin=margin, gamma=gamma, reduction=reduction)

    def set_epoch(self, epoch: int) -> None:
        """ Say which epoch begins; a resumed run has to say it too.

        Args:
            epoch: Its number, from 0.
        """
        self.settings['epoch'] = epoch
