""" Meters of single-label data: accuracy, precision, recall and F1, summed over all processes """
from typing import Optional, Sequence

import torch


class AccuracyMeter:
    """ Top-1 and top-5 accuracy; the single-label counterpart of `MultilabelMeter`.

    Args:
        device: Device of the predictions.
    """

    def __init__(self, device: torch.device):
        self.counts = torch.zeros(3, dtype=torch.float64, device='cpu' if device.type == 'mps' else device)

    def __len__(self) -> int:
        return int(self.counts[2])

    def update(self, logits: torch.Tensor, targets: torch.Tensor, indices: Optional[Sequence[int]] = None) -> None:
        """ Add a batch.

        Args:
            logits: (B, classes).
            targets: (B,) class indices.
            indices: Ignored: our samplers repeat no sample.
        """
        hits = logits.topk(min(5, logits.shape[1])).indices == targets[:, None]  # (B, 5)
        counts = torch.stack([hits[:, 0].sum(), hits.sum(), hits.new_tensor(len(targets), dtype=torch.int64)])
        self.counts += counts.to(self.counts)

    def compute(self) -> dict[str, float]:
        """Return the accuracies in percent."""
        top1, top5, number = _sum_over_processes(self.counts).tolist()
        return {'top1': 100 * top1 / max(number, 1), 'top5': 100 * top5 / max(number, 1)}


class AveragingMeter(AccuracyMeter):
    """ Accuracy, and precision, recall and F1 averaged as in scikit-learn.

    Args:
        device: Device of the predictions.
        num_classes: Number of classes.
        average: 'micro' over all images, 'macro' over classes, or 'weighted' by the number of images of each class.
    """

    def __init__(self, device: torch.device, num_classes: int, average: str):
        super().__init__(device)
        self.average = average
        self.classes = torch.zeros(3, num_classes, dtype=self.counts.dtype, device=self.counts.device)

    def update(self, logits: torch.Tensor, targets: torch.Tensor, indices: Optional[Sequence[int]] = None) -> None:
        super().update(logits, targets, indices)
        predicted, targets = logits.argmax(dim=1).to(self.classes.device), targets.to(self.classes.device)
        for row, classes, weight in (
                (0, targets, predicted == targets), (1, predicted, None), (2, targets, None)):
            ones = torch.ones_like(classes) if weight is None else weight
            self.classes[row].index_add_(0, classes, ones.to(self.classes.dtype))

    def compute(self) -> dict[str, float]:
        """Return accuracies, precision, recall and F1 in percent."""
        metrics = super().compute()
        counts = _sum_over_processes(self.classes)
        if self.average == 'micro':
            counts = counts.sum(dim=1, keepdim=True)
        # As in scikit-learn, classes that are neither present nor predicted do not count.
        counts = counts[:, counts[1] + counts[2] > 0]
        true, predicted, positive = counts.double().cpu()
        values = {
            'precision': true / predicted.clamp(min=1),
            'recall': true / positive.clamp(min=1),
            'f1': 2 * true / (predicted + positive).clamp(min=1),
        }
        weights = positive if self.average == 'weighted' else torch.ones_like(positive)
        return {**metrics, **{
            f'{name}_{self.average}': 100 * float((value * weights).sum() / weights.sum())
            for name, value in values.items()}}


def _sum_over_processes(counts: torch.Tensor) -> torch.Tensor:
    counts = counts.clone()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(counts)
    return counts
