""" Meter of multi-label metrics, exact with any number of processes """
import logging
from collections import deque
from dataclasses import replace
from typing import Any, Callable, Iterable, NamedTuple, Optional, Sequence, Union

import torch
import torch.distributed as dist

from ..errors import UsageError
from ..files import printable
from .functional import (
    average_precision_of_labels,
    check_shapes,
    check_topk,
    check_values,
    metrics_of_labels,
    to_labels,
)
from .preset import Preset, as_preset

_logger = logging.getLogger(__name__)


class _Batch(NamedTuple):
    scores: torch.Tensor  # (B, classes) float32
    labels: torch.Tensor  # (B, classes) int8
    indices: Optional[torch.Tensor]  # (B,) int64


def _to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Copy to the CPU; a copy from CUDA goes to pinned memory, and this does not wait for it."""
    if tensor.is_cuda:
        return tensor.contiguous().to('cpu', non_blocking=True)
    return tensor.to('cpu', copy=True, memory_format=torch.contiguous_format)


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _all_gather(part: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Concatenate the parts of all ranks, whose lengths may differ."""
    # NCCL alone needs tensors on the GPU.
    device = torch.device('cuda', torch.cuda.current_device()) if dist.get_backend() == 'nccl' else torch.device('cpu')
    padded = part.new_zeros((max(lengths), *part.shape[1:]), device=device)
    padded[:len(part)] = part.to(device)
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded)
    return torch.cat([padded[:length].cpu() for padded, length in zip(parts, lengths)])


def _sort_and_drop_duplicates(batch: _Batch) -> _Batch:
    """Sort samples by their indices, and keep the first of those with the same index."""
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

    The results are those of the whole data set, exactly, with any number of processes: `compute` gathers the samples of
    all processes, so all of them have to call it. A sampler that pads the data set repeats samples; pass the sampler,
    or the indices of the samples to `update`, and each counts once. `num_samples` is the number that the last `compute`
    scored.

    Each label takes 5 bytes on the CPU (float32 score, int8 target), and each index 8. `compute` needs about as much
    again while it joins the batches, and each of several processes holds the whole data set while it computes. CUDA
    tensors are copied asynchronously, so an invalid value in them may be reported by a later call.

    Args:
        num_classes: Number of classes.
        topk: Number of highest scores for the metrics with this suffix; None leaves them out.
        threshold: Probability from which a class is predicted, one for all classes or one for each; None for that of
            the preset, which is 0.5 except for 'asl'.
        preset: Definitions of the metrics, or a name in `PRESETS`. The attribute `preset` has the definitions in use,
            including the other arguments.
        class_names: Names for messages, numbers if None.
        exact: Predict the top k also below the threshold; None for the preset's.
        unknown: Meaning of -1 in precision, recall and F1, 'negative' or 'ignore'; None for the preset's.
        sync: Gather from all processes of `torch.distributed`, if it is initialised.
        filename: Function from the index of a sample to its file, for messages.
        sampler: Sampler of the batches in the order of the updates, such as that of a loader of timm, which gives the
            indices of the samples. `update` takes no other ones then.
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
            filename: Optional[Callable[[int], str]] = None,
            sampler: Optional[Iterable[int]] = None,
    ):
        if num_classes < 1:
            raise UsageError(f'Expected num_classes to be at least 1, but got {num_classes}.')
        check_topk(topk)
        if class_names is not None and len(class_names) != num_classes:
            raise UsageError(f'Expected {num_classes} class names, one for each class, but got {len(class_names)}.')
        changes = {'threshold': threshold, 'exact': exact, 'unknown': unknown}
        self.preset = replace(as_preset(preset), **{k: v for k, v in changes.items() if v is not None})
        self.preset.check_classes(num_classes)
        self.num_classes = num_classes
        self.topk = topk
        self.class_names = () if class_names is None else tuple(str(name) for name in class_names)
        self.sync = sync
        self.filename = filename
        self._order = None if sampler is None else torch.tensor(list(sampler), dtype=torch.int64)
        self._warned_of: list[int] = []
        self.reset()

    def reset(self) -> None:
        """Remove all samples."""
        self._batches: list[_Batch] = []
        self._num_stored = 0
        self._pending: deque[tuple[torch.cuda.Event, _Batch]] = deque()
        self._has_indices: Optional[bool] = None
        self._average_precisions: Optional[torch.Tensor] = None
        self.num_samples = 0

    def __len__(self) -> int:
        """Number of samples of this process, duplicates included."""
        return self._num_stored + sum(len(batch.scores) for _, batch in self._pending)

    def update(
            self,
            logits: torch.Tensor,
            targets: torch.Tensor,
            indices: Optional[Union[torch.Tensor, Sequence[int]]] = None,
    ) -> None:
        """ Add a batch.

        Args:
            logits: (B, classes), of a floating point type; stored as float32.
            targets: (B, classes), 1, 0, or -1 for unknown, of any type.
            indices: (B,) indices of the samples in the data set, so that repeated samples count once. Either all
                batches have them, or none.
        """
        check_shapes(logits, targets)
        if logits.shape[1] != self.num_classes:
            raise UsageError(f'Expected logits of {self.num_classes} classes, but got {logits.shape[1]}.')
        if self._order is not None:
            indices = self._indices_in_order(len(logits), indices)
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
            _to_cpu(to_labels(targets)),
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

    def _indices_in_order(self, count: int, indices: Any) -> torch.Tensor:
        """The next indices of the sampler, which is read once: its order must not change."""
        if indices is not None:
            raise UsageError('Expected no indices, as the sampler gives them, but got some.')
        start = len(self)
        if start + count > len(self._order):
            raise UsageError(
                f'Expected {len(self._order)} samples, as many as the sampler has, but got more. Call reset() before '
                'the next pass.')
        return self._order[start:start + count]

    def _store(self, batch: _Batch) -> None:
        def name_row(row: int) -> str:
            if batch.indices is None:
                return f'row {self._num_stored + row}'
            index = int(batch.indices[row])
            return f'sample {index}' if self.filename is None else self.filename(index)

        check_values(batch.scores, batch.labels, name_row, self._name_class)
        self._batches.append(batch)
        self._num_stored += len(batch.scores)

    def _name_class(self, index: int) -> str:
        return f'{index} ({self.class_names[index]})' if self.class_names else str(index)

    def _store_pending(self, wait: bool) -> None:
        """Move the finished copies from CUDA, or all of them, out of pinned memory, which is scarce."""
        while self._pending and (wait or self._pending[0][0].query()):
            copied, batch = self._pending.popleft()
            copied.synchronize()
            self._store(_Batch(*(None if tensor is None else tensor.clone() for tensor in batch)))

    def _join(self) -> _Batch:
        """Join all samples of this process to one batch, and keep it instead of the others."""
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
        """ Gather the samples of all processes, which all have to call it.

        Returns:
            Scores (N, classes) float32, targets (N, classes) int8 and indices (N,) int64. With indices, samples are
            unique and sorted by them. Without, the indices are None, and the samples are sorted by process.
        """
        batch = self._join()
        if self.sync and _is_distributed() and dist.get_world_size() > 1:
            # A process without samples does not know whether the others have indices.
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
            mAP, CP, CR, CF1, OP, OR, OF1, and with `topk` of 3 CP_3 to OF1_3, in percent. Classes without positives
            are left out of mAP and of the class means, with a warning.
        """
        scores, labels, _ = self.gather()
        if not len(scores):
            raise RuntimeError('Cannot compute before update().')
        average_precisions = average_precision_of_labels(scores, labels, self.preset.interpolated)
        self._warn_of_absent(average_precisions.isnan().nonzero().flatten().tolist())
        metrics = metrics_of_labels(average_precisions, scores, labels, self.topk, self.preset)
        self._average_precisions = average_precisions
        self.num_samples = len(scores)
        return metrics

    def per_class(self) -> torch.Tensor:
        """ Return the AP of each class in percent, (classes,) float64, NaN for a class without positives.

        It calls `compute` if a batch was added since the last call.
        """
        if self._average_precisions is None:
            self.compute()
        return 100 * self._average_precisions

    def _warn_of_absent(self, absent: list[int]) -> None:
        """Log the classes without positives, once, as the same data set is scored after each epoch."""
        if absent and absent != self._warned_of and (not _is_distributed() or dist.get_rank() == 0):
            names = ', '.join(printable(self.class_names[i]) if self.class_names else str(i) for i in absent)
            _logger.warning(
                f'{len(absent)} of {self.num_classes} classes without positives, left out of mAP, CP, CR and CF1: '
                f'{names}')
        self._warned_of = absent
