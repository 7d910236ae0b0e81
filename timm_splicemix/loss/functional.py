""" Loss functions of logits (N, C) and targets (N, C)

Targets are 1, 0, soft values between them, or -1 for unknown; (N,) class indices become one-hot. The losses are
computed from logits in float32 (float64 if given), with and without autocast, and they and their gradients stay finite
for all logits that float16 can represent. No decision depends on a tensor's value, so they never wait for a GPU.

An unknown target has no loss and doesn't count in the mean, except in `assume_negative_loss`, `weak_negative_loss` and
`partial_asymmetric_loss`, which treat all or some unknown targets as negative.

Parameters that several losses share:
    pos_weight: Weight of positives, (C,) or one number for all classes.
    reduction: 'mean' over all entries that count, their 'sum', or 'batchmean', the sum over classes averaged over the
        images with at least one such entry. All losses use the mean by default, so that a learning rate carries over
        from one loss to another. The reference code of ASL, Hill, SPLC and P-ASL uses the sum, which is N * C times as
        large without unknown targets.

With p = sigmoid(logits), a term of a positive is -(1 - p)^gamma * log(p), and that of a negative is
-q^gamma * log(1 - q) with q = max(p - clip, 0).
"""
import math
from typing import Optional, Union

import torch
import torch.nn.functional as F

from ..errors import UsageError

REDUCTIONS = ('mean', 'sum', 'batchmean')
PARTIAL = ('ignore', 'negative', 'selective')
PosWeight = Optional[Union[torch.Tensor, float]]


def binary_cross_entropy(
        logits: torch.Tensor,
        targets: torch.Tensor,
        *,
        smoothing: float = 0.,
        target_threshold: Optional[float] = None,
        sum_classes: bool = False,
        pos_weight: PosWeight = None,
        reduction: str = 'mean',
) -> torch.Tensor:
    """ Binary cross entropy with the options of timm's `BinaryCrossEntropy`.

    Args:
        smoothing: Targets become y * (1 - smoothing) + smoothing / C. timm smooths class indices only; here multi-hot
            targets are smoothed too.
        target_threshold: After smoothing, set targets above it to 1 and others to 0.
        sum_classes: timm's name for the reduction 'batchmean'.
    """
    if sum_classes and reduction == 'sum':
        raise UsageError("Expected reduction 'mean' or 'batchmean' with sum_classes, but got 'sum'.")
    _check_range('smoothing', smoothing, 0., 1.)
    logits, targets, unknown = _prepare(logits, targets)
    targets = targets * (1 - smoothing) + smoothing / max(logits.shape[1], 1)
    if target_threshold is not None:
        _check_range('target_threshold', target_threshold, 0., 1.)
        targets = (targets > target_threshold).to(logits.dtype)
    losses = _cross_entropy(logits.masked_fill(unknown, 0.), targets, pos_weight)
    return _reduce(losses, unknown, 'batchmean' if sum_classes else reduction)


def smoothed_binary_cross_entropy(
        logits: torch.Tensor,
        targets: torch.Tensor,
        *,
        eps: float = 0.1,
        pos_weight: PosWeight = None,
        reduction: str = 'mean',
) -> torch.Tensor:
    """ Binary cross entropy with label smoothing per label: 1 becomes 1 - eps, and 0 becomes eps.

    Args:
        eps: Amount of smoothing, up to 0.5.
    """
    logits, targets, unknown = _prepare(logits, targets)
    losses = _cross_entropy(logits.masked_fill(unknown, 0.), _smooth(targets, eps), pos_weight)
    return _reduce(losses, unknown, reduction)


def assume_negative_loss(
        logits: torch.Tensor,
        targets: torch.Tensor,
        *,
        eps: float = 0.,
        pos_weight: PosWeight = None,
        reduction: str = 'mean',
) -> torch.Tensor:
    """ Binary cross entropy that treats unknown targets as negative (AN).

    Args:
        eps: Amount of label smoothing: 1 becomes 1 - eps, 0 and unknown become eps. AN-LS uses 0.1.
    """
    logits, targets, _ = _prepare(logits, targets)
    return _reduce(_cross_entropy(logits, _smooth(targets.clamp(min=0.), eps), pos_weight), None, reduction)


def weak_negative_loss(logits: torch.Tensor, targets: torch.Tensor, *, reduction: str = 'mean') -> torch.Tensor:
    """ Binary cross entropy that treats unknown targets as negative and weights negatives by 1 / (C - 1) (WAN).

    In an image with one known positive, the negatives together have the weight of the positive.
    """
    logits, targets, _ = _prepare(logits, targets)
    negative = _negative_term(logits) / max(logits.shape[1] - 1, 1)
    return _reduce(_combine(targets.clamp(min=0.), _positive_term(logits), negative), None, reduction)


def focal_loss(
        logits: torch.Tensor,
        targets: torch.Tensor,
        *,
        gamma: float = 2.,
        alpha: Optional[float] = None,
        pos_weight: PosWeight = None,
        reduction: str = 'mean',
) -> torch.Tensor:
    """ Focal loss, -y * (1 - p)^gamma * log(p) - (1 - y) * p^gamma * log(1 - p).

    Args:
        gamma: Focusing exponent.
        alpha: Weight of positives, with 1 - alpha for negatives, as in detection; None weights neither, as papers on
            multi-label classification do.
    """
    _check_range('gamma', gamma, 0.)
    logits, targets, unknown = _prepare(logits, targets)
    logits = logits.masked_fill(unknown, 0.)
    positive, negative = _weight(_positive_term(logits, gamma), pos_weight), _negative_term(logits, gamma)
    if alpha is not None:
        _check_range('alpha', alpha, 0., 1.)
        positive, negative = alpha * positive, (1 - alpha) * negative
    return _reduce(_combine(targets, positive, negative), unknown, reduction)


def asymmetric_loss(
        logits: torch.Tensor,
        targets: torch.Tensor,
        *,
        gamma_neg: float = 4.,
        gamma_pos: float = 1.,
        clip: float = 0.05,
        detach_focus: bool = False,
        pos_weight: PosWeight = None,
        reduction: str = 'mean',
) -> torch.Tensor:
    """ Asymmetric loss (ASL), a focal loss with a larger exponent for negatives that ignores easy negatives.

    With q = max(p - clip, 0),

        loss = -y * (1 - p)^gamma_pos * log(p) - (1 - y) * q^gamma_neg * log(1 - q)

    Both terms have their own focusing weight for any y, so the loss is correct for soft targets too; for 0 and 1 it
    equals timm's `AsymmetricLossMultiLabel`. The defaults are those of the authors' library; their COCO recipe uses
    gamma_pos 0 and detach_focus.

    Args:
        gamma_neg: Focusing exponent of negatives.
        gamma_pos: Focusing exponent of positives.
        clip: Probability up to which a negative has no loss.
        detach_focus: Treat the focusing weights as constants in the gradient.

    Example:
        >>> import torch
        >>> asymmetric_loss(torch.tensor([[0.3, 5.]]), torch.tensor([[0.9, -1.]]))
        tensor(0.2179)
    """
    _check_exponents(gamma_neg=gamma_neg, gamma_pos=gamma_pos)
    _check_range('clip', clip, 0., 1.)
    logits, targets, unknown = _prepare(logits, targets)
    logits = logits.masked_fill(unknown, 0.)
    positive = _weight(_positive_term(logits, gamma_pos, detach_focus), pos_weight)
    negative = _negative_term(logits, gamma_neg, clip, detach_focus)
    return _reduce(_combine(targets, positive, negative), unknown, reduction)


def hill_loss(
        logits: torch.Tensor,
        targets: torch.Tensor,
        *,
        lamb: float = 1.5,
        margin: float = 1.,
        gamma: float = 2.,
        reduction: str = 'mean',
) -> torch.Tensor:
    """ Hill loss for missing labels, with a small gradient for negatives of high probability.

    With p' = sigmoid(x - margin),

        loss = -y * (1 - p')^gamma * log(p') + (1 - y) * (lamb - p) * p^2

    Args:
        lamb: Position of the hill: the gradient of a negative changes its sign at p = 2 / 3 * lamb.
        margin: Subtracted from the logits of positives.
        gamma: Focusing exponent of positives.
    """
    _check_range('lamb', lamb, 1.)
    _check_range('gamma', gamma, 0.)
    logits, targets, unknown = _prepare(logits, targets)
    logits = logits.masked_fill(unknown, 0.)
    p = logits.sigmoid()
    losses = targets * _positive_term(logits - margin, gamma) + (1 - targets) * (lamb - p) * p.square()
    return _reduce(losses, unknown, reduction)


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
    """ Self-paced loss correction (SPLC) for missing labels: negatives predicted above tau count as positive.

    This is a focal loss that subtracts the margin from the logits of positives. From `start_epoch` on, negatives with
    p > tau have the loss of positives, without the margin. The negative part of a soft target is corrected in the same
    way. The targets themselves don't change.

    Args:
        epoch: Index of the current epoch.
        start_epoch: Index of the first epoch in which negatives are corrected.
        tau: Probability above which negatives are corrected.
        margin: Subtracted from the logits of positives.
        gamma: Focusing exponent.
    """
    _check_range('start_epoch', start_epoch, 0)
    _check_range('tau', tau, 0., 1.)
    _check_range('gamma', gamma, 0.)
    logits, targets, unknown = _prepare(logits, targets)
    logits = logits.masked_fill(unknown, 0.)
    negative = _negative_term(logits, gamma)
    if epoch >= start_epoch:
        negative = torch.where(logits.sigmoid() > tau, _positive_term(logits, gamma), negative)
    return _reduce(_combine(targets, _positive_term(logits - margin, gamma), negative), unknown, reduction)


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
        pos_weight: PosWeight = None,
        reduction: str = 'mean',
) -> torch.Tensor:
    """ Partial asymmetric loss (P-ASL) with class-aware selection of unknown labels.

    This is `asymmetric_loss`, with unknown labels treated as negatives with their own focusing exponent or ignored:

    - 'ignore': all unknown labels are ignored.
    - 'negative': all unknown labels are negative.
    - 'selective': unknown labels are negative, except the topk * N with the highest logits in the batch and those of
      classes that are frequent according to `prior`, which are ignored.

    Ignored labels don't count in the mean. The defaults are those of the authors for COCO with labels dropped at
    random; for a fixed number of labels per class they use gamma_neg 3.

    Args:
        partial: 'ignore', 'negative' or 'selective'.
        gamma_unknown: Focusing exponent of unknown labels.
        gamma_neg: Focusing exponent of negatives.
        gamma_pos: Focusing exponent of positives.
        clip: Probability up to which a negative or unknown label has no loss.
        detach_focus: Treat the focusing weights as constants in the gradient.
        topk: Number of unknown labels per image that 'selective' ignores, chosen over the whole batch.
        prior: (C,), frequency of each class, such as the mean prediction of a model trained with 'ignore'.
        prior_threshold: Prior above which a class is frequent.
    """
    if partial not in PARTIAL:
        raise UsageError(f"Expected partial to be one of {', '.join(PARTIAL)}, but got '{partial}'.")
    _check_exponents(gamma_unknown=gamma_unknown, gamma_neg=gamma_neg, gamma_pos=gamma_pos)
    _check_range('clip', clip, 0., 1.)
    _check_range('topk', topk, 0)
    _check_range('prior_threshold', prior_threshold, 0., 1.)
    logits, targets, unknown = _prepare(logits, targets)
    ignored = unknown
    if partial == 'negative':
        ignored = torch.zeros_like(unknown)
    elif partial == 'selective':
        ignored = unknown & _likely_positive(logits, unknown, topk * len(logits), prior, prior_threshold)
    logits = logits.masked_fill(ignored, 0.)
    positive = _weight(_positive_term(logits, gamma_pos, detach_focus), pos_weight)
    losses = _combine(targets, positive, _negative_term(logits, gamma_neg, clip, detach_focus))
    if partial != 'ignore':
        losses = torch.where(unknown, _negative_term(logits, gamma_unknown, clip, detach_focus), losses)
    return _reduce(losses, ignored, reduction)


def union_cross_entropy(logits: torch.Tensor, targets: torch.Tensor, smoothing: float = 0.) -> torch.Tensor:
    """ Softmax cross entropy of single labels, or of their union in mixed images, where each class has the same share.

    Args:
        logits: (N, C).
        targets: (N,) class indices, or (N, C) values of at least 0; each row is divided by its sum.
        smoothing: Label smoothing.

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


# --- the steps of a loss ---


def _check_range(name: str, value: float, low: float, high: float = math.inf) -> None:
    if not (low <= value <= high and math.isfinite(value)):
        what = f'of at least {low}' if high == math.inf else f'between {low} and {high}'
        raise UsageError(f'Expected {name} {what}, but got {value}.')


def _check_exponents(**gammas: float) -> None:
    for name, gamma in gammas.items():
        _check_range(name, gamma, 0.)


def _prepare(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits and targets in float32 or float64, and the mask of unknown targets, each (N, C)."""
    if logits.ndim != 2 or not logits.is_floating_point():
        raise UsageError(
            f'Expected logits of shape (N, classes) and a floating point type, but got {tuple(logits.shape)} of '
            f'{logits.dtype}.')
    dtype = torch.promote_types(logits.dtype, torch.float32)
    is_index = targets.ndim == 1 and not targets.is_floating_point() and targets.dtype != torch.bool
    if is_index and len(targets) == len(logits):
        # F.one_hot would read the largest index and wait for the GPU.
        targets = torch.zeros_like(logits, dtype=dtype).scatter_(1, targets.long().unsqueeze(1), 1.)
    if targets.shape != logits.shape:
        raise UsageError(
            f'Expected targets of shape {tuple(logits.shape)}, as the logits, or ({len(logits)},) class indices, '
            f'but got {tuple(targets.shape)} of {targets.dtype}.')
    targets = targets.to(dtype)
    return logits.to(dtype), targets, targets < 0


def _positive_term(logits: torch.Tensor, gamma: float = 0., detach_focus: bool = False) -> torch.Tensor:
    """-(1 - p)^gamma * log(p)"""
    loss = -F.logsigmoid(logits)
    if gamma == 0:
        return loss
    # The power by its logarithm, since the derivative of 0^gamma is infinite for gamma < 1.
    focus = (gamma * F.logsigmoid(-logits)).exp()
    return loss * (focus.detach() if detach_focus else focus)


def _negative_term(
        logits: torch.Tensor,
        gamma: float = 0.,
        clip: float = 0.,
        detach_focus: bool = False,
) -> torch.Tensor:
    """-q^gamma * log(1 - q) with q = max(p - clip, 0)"""
    if clip == 0:
        return _positive_term(-logits, gamma, detach_focus)
    p = logits.sigmoid()
    active = p > clip
    loss = -((-logits).sigmoid() + clip).clamp(max=1.).log()  # sigmoid(-x) is more precise than 1 - p
    if gamma != 0:
        focus = torch.where(active, p - clip, 1.).pow(gamma)  # any base but 0 where the loss is masked below
        loss = loss * (focus.detach() if detach_focus else focus)
    return loss.masked_fill(~active, 0.)


def _weight(loss: torch.Tensor, pos_weight: PosWeight) -> torch.Tensor:
    """Multiply the term of positives (N, C) by the weights of their classes."""
    if pos_weight is None:
        return loss
    if not isinstance(pos_weight, torch.Tensor):
        _check_range('pos_weight', pos_weight, 0.)
        return loss * pos_weight
    if pos_weight.shape not in ((), loss.shape[1:]):
        raise UsageError(
            f'Expected pos_weight of shape ({loss.shape[1]},), one for each class, but got {tuple(pos_weight.shape)}.')
    return loss * pos_weight.to(loss, non_blocking=True)


def _combine(targets: torch.Tensor, positive: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
    return targets * positive + (1 - targets) * negative


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor, pos_weight: PosWeight) -> torch.Tensor:
    return _combine(targets, _weight(_positive_term(logits), pos_weight), _negative_term(logits))


def _smooth(targets: torch.Tensor, eps: float) -> torch.Tensor:
    _check_range('eps', eps, 0., 0.5)
    return targets * (1 - 2 * eps) + eps


def _likely_positive(
        logits: torch.Tensor,
        unknown: torch.Tensor,
        number: int,
        prior: Optional[torch.Tensor],
        prior_threshold: float,
) -> torch.Tensor:
    """(N, C) bool with at least the `number` unknown entries of highest logits, and the classes of high prior."""
    ranked = logits.detach().masked_fill(~unknown, -torch.inf).flatten()
    indices = ranked.topk(min(number, ranked.numel()), sorted=False).indices
    likely = torch.zeros_like(ranked, dtype=torch.bool).scatter_(0, indices, True).view_as(unknown)
    if prior is None:
        return likely
    if prior.shape != logits.shape[1:]:
        raise UsageError(
            f'Expected prior of shape ({logits.shape[1]},), one for each class, but got {tuple(prior.shape)}.')
    return likely | (prior.to(logits.device, non_blocking=True) > prior_threshold)


def _reduce(losses: torch.Tensor, ignored: Optional[torch.Tensor], reduction: str) -> torch.Tensor:
    """Reduce losses (N, C), without the ignored entries, to a scalar: 0 with gradients of 0 if no entry remains."""
    if reduction not in REDUCTIONS:
        raise UsageError(f"Expected reduction to be one of {', '.join(REDUCTIONS)}, but got '{reduction}'.")
    if ignored is None:
        ignored = torch.zeros_like(losses, dtype=torch.bool)
    total = losses.masked_fill(ignored, 0.).sum()
    if reduction == 'sum':
        return total
    counted = ~ignored if reduction == 'mean' else (~ignored).any(dim=1)
    return total / counted.sum().clamp(min=1)
