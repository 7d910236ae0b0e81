""" Metrics of multi-label classification: average precision, and precision, recall and F1 per class and overall

With tp, pp and gt, the true positives, predicted positives and ground truth positives of each class,

    CP = mean(tp / max(pp, 1))    CR = mean(tp / gt)        CF1 = 2 CP CR / (CP + CR)
    OP = sum(tp) / sum(pp)        OR = sum(tp) / sum(gt)    OF1 = 2 OP OR / (OP + OR)

where the means are over the classes with positives. Code in the field differs in the threshold, in CF1 and in AP; a
`Preset` says which definitions hold. Targets are 1 (present), 0 (absent) or -1 (unknown, also called difficult).
"""
import logging
import math
from collections import deque
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Callable, NamedTuple, Optional, Sequence, Union

import torch
import torch.distributed as dist

from ..errors import UsageError

_logger = logging.getLogger(__name__)
_CLASSES_AT_ONCE = 16  # float32 scores that fill a cache line of 64 bytes
_ROWS_AT_ONCE = 4096
_INVALID = 2  # what a target that is not 1, 0 or -1 becomes, so that a GPU's values can be checked after their copy


@dataclass(frozen=True)
class Preset:
    """ The definitions that a result depends on; printing it says them in words.

    Args:
        name: Name to print.
        threshold: Probability from which a class is predicted, one for all classes or one for each.
        strict: Whether a class at the threshold itself is not predicted.
        class_f1: CF1 as the 'harmonic' mean of CP and CR, or as the 'mean' of each class's F1 (0 where tp = 0).
        interpolated: Whether AP uses the envelope of the precision, the highest at this recall or above.
        exact: Whether the top k are predicted even below the threshold.
        unknown: Targets of -1 in precision, recall and F1: 'negative', or 'ignore' for no part in any count. AP always
            ignores them.
    """
    name: str = 'paper'
    threshold: Union[float, Sequence[float]] = 0.5
    strict: bool = False
    class_f1: str = 'harmonic'
    interpolated: bool = False
    exact: bool = False
    unknown: str = 'negative'

    def __post_init__(self):
        if not isinstance(self.threshold, Real):
            object.__setattr__(self, 'threshold', tuple(float(value) for value in self.threshold))
        for threshold in _thresholds(self):
            if not 0 <= threshold <= 1:
                raise UsageError(f'Expected threshold to be a probability from 0 to 1, but got {threshold}.')
        if self.class_f1 not in ('harmonic', 'mean'):
            raise UsageError(f"Expected class_f1 to be 'harmonic' or 'mean', but got {self.class_f1!r}.")
        if self.unknown not in ('negative', 'ignore'):
            raise UsageError(f"Expected unknown to be 'negative' or 'ignore', but got {self.unknown!r}.")

    def __str__(self) -> str:
        threshold = 'a threshold for each class' if isinstance(self.threshold, tuple) else f'{self.threshold:g}'
        class_f1 = 'harmonic mean of CP and CR' if self.class_f1 == 'harmonic' else 'mean of F1 per class'
        return (
            f'{self.name}: predicted if p {">" if self.strict else ">="} {threshold}, '
            f'top k {"whatever the threshold" if self.exact else "and above the threshold"}, CF1 is the {class_f1}, '
            f'AP {"interpolated" if self.interpolated else "not interpolated"}, '
            f'unknown labels ignored in AP, {"negative" if self.unknown == "negative" else "ignored"} in P/R/F')


def _thresholds(preset: Preset) -> tuple[float, ...]:
    return preset.threshold if isinstance(preset.threshold, tuple) else (preset.threshold,)


PRESETS = {preset.name: preset for preset in (
    Preset('paper'),
    Preset('asl', threshold=0.8, strict=True, class_f1='mean'),
    Preset('interpolated', interpolated=True),
)}


def _as_preset(preset: Union[str, Preset]) -> Preset:
    if isinstance(preset, Preset):
        return preset
    if preset not in PRESETS:
        names = ', '.join(repr(name) for name in PRESETS)
        raise UsageError(f'Expected preset to be one of {names}, or a Preset, but got {preset!r}.')
    return PRESETS[preset]


def _check_shapes(scores: torch.Tensor, targets: torch.Tensor) -> None:
    if scores.ndim != 2:
        raise UsageError(f'Expected scores of shape (N, classes), but got {tuple(scores.shape)}.')
    if targets.shape != scores.shape:
        raise UsageError(
            f'Expected targets of the shape of the scores, {tuple(scores.shape)}, but got {tuple(targets.shape)}.')
    if not scores.is_floating_point():
        raise UsageError(f'Expected scores of a floating point type, but got {scores.dtype}.')


def _check_topk(topk: Optional[int]) -> None:
    if topk is not None and topk < 1:
        raise UsageError(f'Expected topk to be at least 1, or None for no top-k metrics, but got {topk}.')


def _check_thresholds(preset: Preset, num_classes: int) -> None:
    if isinstance(preset.threshold, tuple) and len(preset.threshold) != num_classes:
        raise UsageError(
            f'Expected one threshold or {num_classes}, one for each class, but got {len(preset.threshold)}.')


def _to_labels(targets: torch.Tensor) -> torch.Tensor:
    """Targets as int8, one byte for each, without looking at the values of a GPU."""
    labels = targets.detach().to(torch.int8)
    if targets.dtype in (torch.int8, torch.bool):
        return labels
    return labels.masked_fill_(labels != targets, _INVALID)


def _place(row: int, column: int, indices: Optional[torch.Tensor], first_row: int, names: Sequence[str]) -> str:
    sample = f'row {first_row + row}' if indices is None else f'the sample of index {int(indices[row])}'
    return f'{sample}, class {column}' + (f' ({names[column]})' if names else '')


def _check_values(
        scores: torch.Tensor,
        labels: torch.Tensor,
        indices: Optional[torch.Tensor] = None,
        first_row: int = 0,
        names: Sequence[str] = (),
) -> None:
    nans = scores.isnan()
    if nans.any():
        row, column = nans.nonzero()[0].tolist()
        place = _place(row, column, indices, first_row, names)
        raise UsageError(f'Expected scores that are numbers, but got NaN in {place}.')
    if labels.numel() and not -1 <= int(labels.min()) <= int(labels.max()) <= 1:
        row, column = ((labels < -1) | (labels > 1)).nonzero()[0].tolist()
        place = _place(row, column, indices, first_row, names)
        raise UsageError(
            f'Expected targets of 1, 0, or -1 for unknown, but got another value in {place}: '
            'soft targets and class indices can not be scored.')


def _sortable(scores: torch.Tensor) -> torch.Tensor:
    """Integers in the order of floating point scores: torch sorts those several times as fast."""
    wide = scores.dtype == torch.float64
    bits = (scores + 0.).view(torch.int64 if wide else torch.int32)  # -0. + 0. is 0., so that both are one score
    return bits ^ ((bits >> (63 if wide else 31)) & (2 ** 63 - 1 if wide else 2 ** 31 - 1))


def _class_average_precision(keys: torch.Tensor, labels: torch.Tensor, interpolated: bool) -> float:
    """ AP of one class.

    Each positive adds the precision at its own score. Counting those at this score or above makes equal scores share
    one threshold; only the positives' places are needed, so nothing is sorted along with the scores.
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


def _average_precision(scores: torch.Tensor, labels: torch.Tensor, interpolated: bool) -> torch.Tensor:
    values = []
    for some_scores, some_labels in zip(scores.split(_CLASSES_AT_ONCE, 1), labels.split(_CLASSES_AT_ONCE, 1)):
        all_keys = _sortable(some_scores.t().contiguous())  # (some classes, N)
        for keys, class_labels in zip(all_keys, some_labels.t().contiguous()):
            values.append(_class_average_precision(keys, class_labels, interpolated))
    return torch.tensor(values, dtype=torch.float64)


def average_precision(scores: torch.Tensor, targets: torch.Tensor, interpolated: bool = False) -> torch.Tensor:
    """ Average precision of each class, as scikit-learn's: the mean of the precision at each positive.

    Equal scores share one threshold. Any monotone function of the scores gives the same: logits are as good as
    probabilities, and better than those of half precision, which round many scores to one.

        average_precision(torch.tensor([[.9], [.8], [.7]]), torch.tensor([[1], [0], [1]]))  # (1/1 + 2/3) / 2 = 0.8333

    Args:
        scores: (N, classes), of a floating point type; half precision is compared as float32.
        targets: (N, classes), 1, 0, or -1 for an entry that is ignored.
        interpolated: Whether to use the envelope of the precision, the highest at this recall or above.

    Returns:
        (classes,) float64 from 0 to 1 on the CPU, where it is computed; NaN for a class without positives.
    """
    _check_shapes(scores, targets)
    scores, labels = scores.detach().cpu(), _to_labels(targets).cpu()
    if scores.dtype != torch.float64:
        scores = scores.float()
    _check_values(scores, labels)
    return _average_precision(scores, labels, interpolated)


class _Counts(NamedTuple):
    true: torch.Tensor  # (classes,), as the others
    predicted: torch.Tensor
    positive: torch.Tensor


def _highest(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Where the k highest scores of each row are, exactly k of them; of equal ones those of the first classes."""
    kth = scores.topk(min(k, scores.shape[1]), dim=1).values[:, -1:]
    higher, equal = scores > kth, scores == kth
    return higher | (equal & (equal.cumsum(dim=1) <= k - higher.sum(dim=1, keepdim=True)))


def _count(scores: torch.Tensor, labels: torch.Tensor, preset: Preset, topk: Optional[int] = None) -> _Counts:
    logits = torch.tensor(_thresholds(preset), dtype=torch.float64).logit().to(scores.dtype)
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
    """CP, CR, CF1, OP, OR and OF1, from 0 to 1; NaN where there are no positives to define them."""
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


def _metrics(
        average_precisions: torch.Tensor,
        scores: torch.Tensor,
        labels: torch.Tensor,
        topk: Optional[int],
        preset: Preset,
) -> dict[str, float]:
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
        topk: Number of highest scores for the metrics whose names end with it; None leaves them out.
        preset: Name of one of `PRESETS`, or definitions of one's own.

    Returns:
        mAP, CP, CR, CF1, OP, OR, OF1, and with `topk` of 3 CP_3 to OF1_3, in percent.
    """
    _check_shapes(logits, targets)
    _check_topk(topk)
    preset = _as_preset(preset)
    _check_thresholds(preset, logits.shape[1])
    if not len(logits):
        raise UsageError('Expected at least one sample, but got none.')
    scores, labels = logits.detach().float().cpu(), _to_labels(targets).cpu()
    _check_values(scores, labels)
    return _metrics(_average_precision(scores, labels, preset.interpolated), scores, labels, topk, preset)


class _Batch(NamedTuple):
    scores: torch.Tensor  # (B, classes) float32
    labels: torch.Tensor  # (B, classes) int8
    indices: Optional[torch.Tensor]  # (B,) int64


def _to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU, of memory of its own; one from CUDA is not there yet, but on its way to pinned memory."""
    if tensor.is_cuda:
        return tensor.contiguous().to('cpu', non_blocking=True)
    return tensor.to('cpu', copy=True, memory_format=torch.contiguous_format)


def _communication_device() -> torch.device:
    """Where the default process group can gather tensors: NCCL alone needs them on the GPU."""
    if dist.get_backend() == 'nccl':
        return torch.device('cuda', torch.cuda.current_device())
    return torch.device('cpu')


def _all_gather(part: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """ Concatenate the parts of all ranks, in their order.

    Args:
        part: That of this rank, of any length.
        lengths: Those of all ranks; shorter parts are padded on their way.
    """
    device = _communication_device()
    padded = part.new_zeros((max(lengths), *part.shape[1:]), device=device)
    padded[:len(part)] = part.to(device)
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded)
    return torch.cat([padded[:length].cpu() for padded, length in zip(parts, lengths)])


def _sort_and_drop_duplicates(batch: _Batch) -> _Batch:
    """Samples in the order of their indices; of those with the same index the first."""
    if batch.indices is None or (batch.indices.diff() > 0).all():
        return batch
    indices, order = batch.indices.sort(stable=True)
    first = torch.ones(len(indices), dtype=torch.bool)
    first[1:] = indices.diff() != 0
    order = order[first]
    return _Batch(batch.scores[order], batch.labels[order], indices[first])


class MultilabelMeter:
    """ Collect logits and targets batch by batch, and compute the metrics of all of them.

        meter = MultilabelMeter(num_classes=80)
        for images, targets in loader:
            meter.update(model(images), targets)
        meter.compute()['mAP']

    The results are those of the whole data set, exactly, with any number of processes: `compute` gathers what all of
    them hold, so all have to call it. A sampler that pads the data set to divide it repeats samples; give `update` the
    indices of the samples, and each counts once. `num_samples` is the number that the last `compute` scored.

    Each label takes 5 bytes on the CPU (float32 score, int8 target), and each index 8. `compute` takes about as much
    again while it joins the batches, and with several processes each holds the whole while it computes. CUDA tensors
    are copied without waiting for them, so a bad value in them may be reported by a later call.

    Args:
        num_classes: Number of classes.
        topk: Number of highest scores for the metrics whose names end with it; None leaves them out.
        threshold: Probability from which a class is predicted, one for all classes or one for each; the preset's if
            None, which is 0.5 except for 'asl'.
        preset: Name of one of `PRESETS`, or definitions of one's own. The attribute `preset` has those in use, with
            the other arguments in effect.
        class_names: Names for messages, numbers if None.
        exact: Whether the top k are predicted even below the threshold; as the preset has it if None.
        unknown: 'negative' or 'ignore', what -1 is in precision, recall and F1; as the preset has it if None.
        sync: Whether to gather from all processes of `torch.distributed`, if it is in use.
    """

    def __init__(
            self,
            num_classes: int,
            topk: Optional[int] = 3,
            threshold: Optional[Union[float, Sequence[float]]] = None,
            preset: Union[str, Preset] = 'paper',
            class_names: Optional[Sequence[str]] = None,
            exact: Optional[bool] = None,
            unknown: Optional[str] = None,
            sync: bool = True,
    ):
        if num_classes < 1:
            raise UsageError(f'Expected num_classes to be at least 1, but got {num_classes}.')
        _check_topk(topk)
        if class_names is not None and len(class_names) != num_classes:
            raise UsageError(f'Expected {num_classes} class names, one for each class, but got {len(class_names)}.')
        changes = {'threshold': threshold, 'exact': exact, 'unknown': unknown}
        self.preset = replace(_as_preset(preset), **{k: v for k, v in changes.items() if v is not None})
        _check_thresholds(self.preset, num_classes)
        self.num_classes = num_classes
        self.topk = topk
        self.class_names = () if class_names is None else tuple(str(name) for name in class_names)
        self.sync = sync
        self._warned_of: list[int] = []
        self.reset()

    def reset(self) -> None:
        """Forget all samples."""
        self._batches: list[_Batch] = []
        self._num_stored = 0
        self._pending: deque[tuple[torch.cuda.Event, _Batch]] = deque()
        self._has_indices: Optional[bool] = None
        self._average_precisions: Optional[torch.Tensor] = None
        self.num_samples = 0

    def __len__(self) -> int:
        """Number of samples that this process holds, duplicates included."""
        return self._num_stored + sum(len(batch.scores) for _, batch in self._pending)

    def update(
            self,
            logits: torch.Tensor,
            targets: torch.Tensor,
            indices: Optional[Union[torch.Tensor, Sequence[int]]] = None,
    ) -> None:
        """ Add a batch.

        Args:
            logits: (B, classes), of a floating point type; kept as float32.
            targets: (B, classes), 1, 0, or -1 for unknown, of any type.
            indices: (B,), places of the samples in the data set, so that repeated ones count once. All batches have
                them, or none.
        """
        _check_shapes(logits, targets)
        if logits.shape[1] != self.num_classes:
            raise UsageError(f'Expected logits of {self.num_classes} classes, but got {logits.shape[1]}.')
        if indices is not None:
            indices = torch.as_tensor(indices)
            if indices.shape != logits.shape[:1]:
                raise UsageError(
                    f'Expected an index for each of the {len(logits)} samples, but got shape {tuple(indices.shape)}.')
            if len(indices) and (indices.is_floating_point() or indices.dtype == torch.bool):
                raise UsageError(f'Expected indices of an integer type, but got {indices.dtype}.')
        has_indices = indices is not None
        if self._has_indices not in (None, has_indices):
            raise UsageError('Expected indices with all batches or with none, but got both.')
        batch = _Batch(
            _to_cpu(logits.detach().float()),
            _to_cpu(_to_labels(targets)),
            _to_cpu(indices.long()) if has_indices else None,
        )
        on_cuda = next((tensor for tensor in (logits, targets, indices) if tensor is not None and tensor.is_cuda), None)
        if on_cuda is None:
            self._store(batch)
        else:
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(on_cuda.device))
            self._pending.append((copied, batch))
        self._has_indices = has_indices
        self._average_precisions = None
        self._store_pending(wait=False)

    def _store(self, batch: _Batch) -> None:
        _check_values(batch.scores, batch.labels, batch.indices, self._num_stored, self.class_names)
        self._batches.append(batch)
        self._num_stored += len(batch.scores)

    def _store_pending(self, wait: bool) -> None:
        """Take the copies from CUDA that have arrived, or all, out of pinned memory, which is scarce."""
        while self._pending and (wait or self._pending[0][0].query()):
            copied, batch = self._pending.popleft()
            copied.synchronize()
            self._store(_Batch(*(None if tensor is None else tensor.clone() for tensor in batch)))

    def _join(self) -> _Batch:
        """All samples of this process as one batch, which takes the place of the others."""
        self._store_pending(wait=True)
        if len(self._batches) > 1:
            indices = torch.cat([batch.indices for batch in self._batches]) if self._has_indices else None
            scores = torch.cat([batch.scores for batch in self._batches])
            labels = torch.cat([batch.labels for batch in self._batches])
            self._batches = [_Batch(scores, labels, indices)]
        if self._batches:
            return self._batches[0]
        shape = (0, self.num_classes)
        return _Batch(torch.empty(shape), torch.empty(shape, dtype=torch.int8), None)

    def gather(self) -> tuple[torch.Tensor, torch.Tensor, Optional[torch.Tensor]]:
        """ The samples of all processes, which all have to call it.

        Returns:
            Scores (N, classes) float32, targets (N, classes) int8 and indices (N,) int64. With indices, each sample is
            there once, in their order. Without, the indices are None, and one process's samples follow another's.
        """
        batch = self._join()
        if self.sync and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            # An empty process, which knows nothing of indices, does as the others do.
            has_indices = -1 if not len(batch.scores) else int(batch.indices is not None)
            header = torch.tensor([[len(batch.scores), has_indices]])
            headers = _all_gather(header, [1] * dist.get_world_size())
            lengths, kinds = headers[:, 0].tolist(), set(headers[:, 1].tolist()) - {-1}
            if len(kinds) > 1:
                raise UsageError('Expected indices from all processes or from none, but got both.')
            if max(lengths):
                indices = None
                if kinds == {1}:
                    own = torch.empty(0, dtype=torch.int64) if batch.indices is None else batch.indices
                    indices = _all_gather(own, lengths)
                batch = _Batch(_all_gather(batch.scores, lengths), _all_gather(batch.labels, lengths), indices)
        return tuple(_sort_and_drop_duplicates(batch))

    def compute(self) -> dict[str, float]:
        """ Compute the metrics of all samples of all processes, which all have to call it.

        Returns:
            mAP, CP, CR, CF1, OP, OR, OF1, and with `topk` of 3 CP_3 to OF1_3, in percent. A class without positives
            is left out of mAP and the class means, and a warning names it.
        """
        scores, labels, _ = self.gather()
        if not len(scores):
            raise RuntimeError('Cannot compute before update().')
        average_precisions = _average_precision(scores, labels, self.preset.interpolated)
        self._warn_of_absent(average_precisions.isnan().nonzero().flatten().tolist())
        metrics = _metrics(average_precisions, scores, labels, self.topk, self.preset)
        self._average_precisions = average_precisions
        self.num_samples = len(scores)
        return metrics

    def per_class(self) -> torch.Tensor:
        """ AP of each class in percent, (classes,) float64, NaN for a class without positives.

        Those of the last `compute`, which is called if a batch has come since.
        """
        if self._average_precisions is None:
            self.compute()
        return 100 * self._average_precisions

    def _warn_of_absent(self, absent: list[int]) -> None:
        """Name the classes without positives; once, as the same set is scored after each epoch."""
        is_first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
        if absent and absent != self._warned_of and is_first:
            names = ', '.join(self.class_names[i] if self.class_names else str(i) for i in absent)
            _logger.warning(
                f'{len(absent)} of {self.num_classes} classes without positives, left out of mAP, CP, CR and CF1: '
                f'{names}')
        self._warned_of = absent


class NamingMeter(MultilabelMeter):
    """ A meter that names the image whose scores are no numbers.

    Args:
        filename: Gives the file of an index.
        *args: Those of `MultilabelMeter`, as `**kwargs`.
    """

    def __init__(self, filename: Callable[[int], str], *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.filename = filename

    def _store(self, batch: Any) -> None:
        bad = batch.scores.isnan().any(dim=1)
        if bad.any() and batch.indices is not None:
            raise UsageError(
                f'Expected scores that are numbers, but got NaN for {self.filename(int(batch.indices[bad][0]))} '
                f'({int(bad.sum())} of the {len(bad)} images of its batch): look at the image, and try without --amp '
                'and with --model-dtype float32; if all images have it, the weights are broken.')
        super()._store(batch)
