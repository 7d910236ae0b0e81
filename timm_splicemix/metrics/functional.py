""" Multi-label metrics of a whole data set: average precision, and precision, recall and F1 per class and overall

With tp, pp and gt, the true positives, predicted positives and ground truth positives of each class,

    CP = mean(tp / max(pp, 1))    CR = mean(tp / gt)        CF1 = 2 CP CR / (CP + CR)
    OP = sum(tp) / sum(pp)        OR = sum(tp) / sum(gt)    OF1 = 2 OP OR / (OP + OR)

where the means are over the classes with positives. Implementations differ in the threshold, in CF1 and in AP; a
`Preset` selects the definitions. Targets are 1 (present), 0 (absent) or -1 (unknown, also called difficult).
"""
import math
from typing import Callable, NamedTuple, Optional, Union

import torch

from ..errors import UsageError
from .preset import Preset, as_preset

_CLASSES_AT_ONCE = 16  # float32 scores that fill a cache line of 64 bytes
_ROWS_AT_ONCE = 4096
_INVALID = 2  # replaces targets other than 1, 0 and -1, so that values of a GPU can be checked after their copy


def check_shapes(scores: torch.Tensor, targets: torch.Tensor) -> None:
    if scores.ndim != 2:
        raise UsageError(f'Expected scores of shape (N, classes), but got {tuple(scores.shape)}.')
    if targets.shape != scores.shape:
        raise UsageError(
            f'Expected targets of the shape of the scores, {tuple(scores.shape)}, but got {tuple(targets.shape)}.')
    if not scores.is_floating_point():
        raise UsageError(f'Expected scores of a floating point type, but got {scores.dtype}.')


def check_topk(topk: Optional[int]) -> None:
    if topk is not None and topk < 1:
        raise UsageError(f'Expected topk to be at least 1, or None for no top-k metrics, but got {topk}.')


def check_values(
        scores: torch.Tensor,
        labels: torch.Tensor,
        name_row: Callable[[int], str] = 'row {}'.format,
        name_class: Callable[[int], str] = str,
) -> None:
    """Raise an error that names the first NaN score or invalid label."""
    nans = scores.isnan()
    if nans.any():
        row, column = nans.nonzero()[0].tolist()
        raise UsageError(
            f'Score is NaN for {name_row(row)}, class {name_class(column)} ({int(nans.any(dim=1).sum())} of '
            f'{len(scores)} samples have NaN). Check the input, and try without --amp and with --model-dtype float32; '
            'if all samples have NaN, the weights are broken.')
    if labels.numel() and not -1 <= int(labels.min()) <= int(labels.max()) <= 1:
        row, column = ((labels < -1) | (labels > 1)).nonzero()[0].tolist()
        raise UsageError(
            f'Expected targets of 1, 0, or -1 for unknown, but got another value for {name_row(row)}, class '
            f'{name_class(column)}: soft targets and class indices have no multi-label metrics.')


def to_labels(targets: torch.Tensor) -> torch.Tensor:
    """Convert targets to int8 without reading values of a GPU."""
    labels = targets.detach().to(torch.int8)
    if targets.dtype in (torch.int8, torch.bool):
        return labels
    return labels.masked_fill_(labels != targets, _INVALID)


def average_precision(scores: torch.Tensor, targets: torch.Tensor, interpolated: bool = False) -> torch.Tensor:
    """ Average precision of each class, as in scikit-learn: the mean of the precision at each positive.

    Equal scores share one threshold. Only the order of the scores matters, so logits and probabilities give the same
    result, except for probabilities of half precision, which round many scores to one.

        average_precision(torch.tensor([[.9], [.8], [.7]]), torch.tensor([[1], [0], [1]]))  # (1/1 + 2/3) / 2 = 0.8333

    Args:
        scores: (N, classes), of a floating point type; half precision is compared as float32.
        targets: (N, classes), 1, 0, or -1 for entries to ignore.
        interpolated: Use the highest precision at each recall or above.

    Returns:
        (classes,) float64 from 0 to 1 on the CPU; NaN for a class without positives.
    """
    check_shapes(scores, targets)
    scores, labels = scores.detach().cpu(), to_labels(targets).cpu()
    if scores.dtype != torch.float64:
        scores = scores.float()
    check_values(scores, labels)
    return average_precision_of_labels(scores, labels, interpolated)


def average_precision_of_labels(scores: torch.Tensor, labels: torch.Tensor, interpolated: bool) -> torch.Tensor:
    """Compute `average_precision` of checked float scores and int8 labels on the CPU."""
    values = []
    for some_scores, some_labels in zip(scores.split(_CLASSES_AT_ONCE, 1), labels.split(_CLASSES_AT_ONCE, 1)):
        all_keys = _sortable(some_scores.t().contiguous())  # (some classes, N)
        for keys, class_labels in zip(all_keys, some_labels.t().contiguous()):
            values.append(_class_average_precision(keys, class_labels, interpolated))
    return torch.tensor(values, dtype=torch.float64)


def _sortable(scores: torch.Tensor) -> torch.Tensor:
    """Convert floating point scores to integers of the same order, which torch sorts several times as fast."""
    wide = scores.dtype == torch.float64
    bits = (scores + 0.).view(torch.int64 if wide else torch.int32)  # -0. + 0. is 0., so that both are one score
    return bits ^ ((bits >> (63 if wide else 31)) & (2 ** 63 - 1 if wide else 2 ** 31 - 1))


def _class_average_precision(keys: torch.Tensor, labels: torch.Tensor, interpolated: bool) -> float:
    """ Compute the AP of one class.

    Each positive adds the precision at its own score. Counting the samples at this score or above makes equal scores
    share one threshold. Only the positions of the positives are needed, so nothing is sorted along with the scores.
    """
    positives = keys[labels == 1].sort().values  # (P,)
    if not len(positives):
        return math.nan
    if int(labels.min()) < 0:
        keys = keys[labels >= 0]
    num_predicted = len(keys) - torch.searchsorted(keys.sort().values, positives)
    num_true = len(positives) - torch.searchsorted(positives, positives)
    precision = num_true.double() / num_predicted
    if interpolated:
        precision = precision.cummax(dim=0).values  # recall falls from the lowest score to the highest
    return precision.mean().item()


class _Counts(NamedTuple):
    true: torch.Tensor  # (classes,), as the others
    predicted: torch.Tensor
    positive: torch.Tensor


def _highest(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Mask of exactly the k highest scores of each row; of equal scores, those of the first classes."""
    kth = scores.topk(min(k, scores.shape[1]), dim=1).values[:, -1:]
    higher, equal = scores > kth, scores == kth
    return higher | (equal & (equal.cumsum(dim=1) <= k - higher.sum(dim=1, keepdim=True)))


def _count(scores: torch.Tensor, labels: torch.Tensor, preset: Preset, topk: Optional[int] = None) -> _Counts:
    logits = torch.tensor(preset.thresholds, dtype=torch.float64).logit().to(scores.dtype)
    counts = torch.zeros(3, scores.shape[1], dtype=torch.int64)
    for some_scores, some_labels in zip(scores.split(_ROWS_AT_ONCE), labels.split(_ROWS_AT_ONCE)):
        if topk is not None and preset.exact:
            predicted = _highest(some_scores, topk)
        else:
            predicted = some_scores > logits if preset.strict else some_scores >= logits
            if topk is not None:
                predicted &= _highest(some_scores, topk)
        if preset.unknown == 'ignore':  # an unknown class among the top k keeps its place, but isn't counted
            predicted &= some_labels >= 0
        positive = some_labels == 1
        for total, part in zip(counts, (predicted & positive, predicted, positive)):
            total += part.sum(dim=0)
    return _Counts(*counts)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.


def _harmonic_mean(first: float, second: float) -> float:
    return _ratio(2 * first * second, first + second)  # NaN stays NaN


def _precision_recall_f1(counts: _Counts, class_f1: str) -> tuple[float, ...]:
    """Compute CP, CR, CF1, OP, OR and OF1 from 0 to 1, NaN where they are undefined for lack of positives."""
    present = counts.positive > 0
    true, predicted, positive = (count[present].double() for count in counts)
    class_precision = (true / predicted.clamp(min=1)).mean().item()
    class_recall = (true / positive).mean().item()
    if class_f1 == 'mean':
        f1 = (2 * true / (predicted + positive)).mean().item()
    else:
        f1 = _harmonic_mean(class_precision, class_recall)
    num_true, num_predicted, num_positive = (int(count.sum()) for count in counts)
    precision = _ratio(num_true, num_predicted)
    recall = num_true / num_positive if num_positive else math.nan
    return class_precision, class_recall, f1, precision, recall, _harmonic_mean(precision, recall)


def metrics_of_labels(
        average_precisions: torch.Tensor,
        scores: torch.Tensor,
        labels: torch.Tensor,
        topk: Optional[int],
        preset: Preset,
) -> dict[str, float]:
    """Compute `multilabel_metrics` of checked scores and labels on the CPU, given the AP of each class."""
    metrics = {'mAP': average_precisions.nanmean().item()}
    for k in (None,) if topk is None else (None, topk):
        values = _precision_recall_f1(_count(scores, labels, preset, k), preset.class_f1)
        names = ('CP', 'CR', 'CF1', 'OP', 'OR', 'OF1')
        metrics.update((name if k is None else f'{name}_{k}', value) for name, value in zip(names, values))
    return {name: 100 * value for name, value in metrics.items()}


def multilabel_metrics(
        logits: torch.Tensor,
        targets: torch.Tensor,
        topk: Optional[int] = 3,
        preset: Union[str, Preset] = 'paper',
) -> dict[str, float]:
    """ All metrics of a whole data set at once, see `MultilabelMeter`.

    Args:
        logits: (N, classes), of a floating point type; compared as float32.
        targets: (N, classes), 1, 0, or -1 for unknown.
        topk: Number of highest scores for the metrics with this suffix; None leaves them out.
        preset: Definitions of the metrics, or a name in `PRESETS`.

    Returns:
        mAP, CP, CR, CF1, OP, OR, OF1, and with `topk` of 3 CP_3 to OF1_3, in percent.
    """
    check_shapes(logits, targets)
    check_topk(topk)
    preset = as_preset(preset)
    preset.check_classes(logits.shape[1])
    if not len(logits):
        raise UsageError('Expected at least one sample, but got none.')
    scores, labels = logits.detach().float().cpu(), to_labels(targets).cpu()
    check_values(scores, labels)
    precisions = average_precision_of_labels(scores, labels, preset.interpolated)
    return metrics_of_labels(precisions, scores, labels, topk, preset)
