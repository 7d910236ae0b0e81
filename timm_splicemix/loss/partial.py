""" The loss for partial labels: an asymmetric loss that decides which unknown labels are taken as negative """
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

__all__ = ['PARTIAL', 'PartialAsymmetricLoss', 'partial_asymmetric_loss']

PARTIAL = ('ignore', 'negative', 'selective')


def _likely_positive(logits: torch.Tensor, unknown: torch.Tensor, number: int) -> torch.Tensor:
    """The unknown entries with the highest logits of the batch, at most `number`; those known fill up what is left."""
    ranked = logits.detach().masked_fill(~unknown, -torch.inf).flatten()
    likely = torch.zeros_like(ranked, dtype=torch.bool)
    indices = ranked.topk(min(number, ranked.numel()), sorted=False).indices
    return likely.scatter_(0, indices, True).view_as(unknown)


def _ignored(
        logits: torch.Tensor,
        unknown: torch.Tensor,
        partial: str,
        topk: int,
        prior: Optional[torch.Tensor],
        prior_threshold: float,
) -> torch.Tensor:
    """Which entries have no loss; always unknown ones."""
    if partial == 'ignore':
        return unknown
    if partial == 'negative':
        return torch.zeros_like(unknown)
    ignored = _likely_positive(logits, unknown, topk * len(logits))
    if prior is not None:
        if prior.shape != logits.shape[1:]:
            raise UsageError(
                f'Expected prior of shape ({logits.shape[1]},), one for each class, but got {tuple(prior.shape)}.')
        ignored = ignored | (prior.to(logits.device, non_blocking=True) > prior_threshold)
    return ignored & unknown


def partial_asymmetric_loss(
        logits: torch.Tensor,
        targets: torch.Tensor,
        *,
        partial: str = 'selective',
        gamma_unknown: float = 4.,
        gamma_neg: float = 1.,
        gamma_pos: float = 0.,
        clip: float = 0.,
        detach_focus: bool = True,
        topk: int = 5,
        prior: Optional[torch.Tensor] = None,
        prior_threshold: float = 0.05,
        pos_weight: Optional[Union[torch.Tensor, float]] = None,
        reduction: str = 'mean',
) -> torch.Tensor:
    """ Partial asymmetric loss (P-ASL), with the class-aware selection of unknown labels.

    It is `asymmetric_loss` with a third kind of label: an unknown one has the loss of a negative, with a focusing
    exponent of its own, or none. What becomes of unknown labels is chosen by `partial`:

    - 'ignore': none has a loss.
    - 'negative': all have.
    - 'selective': all have, except the topk * N that are likeliest to be positive by the logits of this batch, and
      those of classes which are frequent by `prior`.

    Those without a loss are no part of the mean. The defaults are what the authors use on COCO with labels dropped at
    random; with a fixed number of labels per class they have gamma_neg 3.

    Args:
        logits: (N, C).
        targets: (N, C) of values between 0 and 1, or -1 for unknown; or (N,) class indices.
        partial: 'ignore', 'negative' or 'selective'.
        gamma_unknown: Focusing exponent of unknown labels.
        gamma_neg: Focusing exponent of negatives.
        gamma_pos: Focusing exponent of positives.
        clip: Probability up to which a negative or unknown label has no loss.
        detach_focus: Take the powers as constants, so no gradient goes through them.
        topk: Unknown labels per image that 'selective' ignores; they are chosen among those of the whole batch.
        prior: (C,), how frequent each class is, such as the mean prediction of a model trained with 'ignore'; None
            leaves the choice to the logits.
        prior_threshold: Prior above which a class is frequent.
        pos_weight: (C,), or one number; weight of positives.
        reduction: 'mean', 'sum' or 'batchmean'; the authors' code has the sum.
    """
    if partial not in PARTIAL:
        raise UsageError(f"Expected partial to be one of {', '.join(PARTIAL)}, but got '{partial}'.")
    for name, gamma in (('gamma_unknown', gamma_unknown), ('gamma_neg', gamma_neg), ('gamma_pos', gamma_pos)):
        check_range(name, gamma, 0.)
    check_range('clip', clip, 0., 1.)
    check_range('topk', topk, 0)
    check_range('prior_threshold', prior_threshold, 0., 1.)
    logits, targets, unknown = prepare(logits, targets)
    ignored = _ignored(logits, unknown, partial, topk, prior, prior_threshold)
    logits = logits.masked_fill(ignored, 0.)
    positive = weigh_positives(positive_term(logits, gamma_pos, detach_focus), pos_weight)
    negative = negative_term(logits, gamma_neg, clip, detach_focus)
    losses = targets * positive + (1 - targets) * negative
    if partial != 'ignore':
        losses = torch.where(unknown, negative_term(logits, gamma_unknown, clip, detach_focus), losses)
    return reduce_losses(losses, ignored, reduction)


class PartialAsymmetricLoss(MultilabelLoss):
    """ `partial_asymmetric_loss` as a module.

    Args:
        partial: What becomes of unknown labels: 'ignore', 'negative' or 'selective'.
        gamma_unknown: Focusing exponent of unknown labels.
        gamma_neg: Focusing exponent of negatives.
        gamma_pos: Focusing exponent of positives.
        clip: Probability up to which a negative or unknown label has no loss.
        detach_focus: Take focusing weights as constants.
        topk: Unknown labels per image that 'selective' ignores.
        prior: (C,), how frequent each class is.
        prior_threshold: Prior above which a class is frequent.
        pos_weight: (C,), or one number; weight of positives.
        reduction: 'mean', 'sum' or 'batchmean'.
    """

    def __init__(
            self,
            partial: str = 'selective',
            gamma_unknown: float = 4.,
            gamma_neg: float = 1.,
            gamma_pos: float = 0.,
            clip: float = 0.,
            detach_focus: bool = True,
            topk: int = 5,
            prior: Optional[torch.Tensor] = None,
            prior_threshold: float = 0.05,
            pos_weight: Optional[Union[torch.Tensor, float]] = None,
            reduction: str = 'mean',
    ):
        super().__init__(
            partial_asymmetric_loss, partial=partial, gamma_unknown=gamma_unknown, gamma_neg=gamma_neg,
            gamma_pos=gamma_pos, clip=clip, detach_focus=detach_focus, topk=topk, prior=prior,
            prior_threshold=prior_threshold, pos_weight=pos_weight, reduction=reduction)
