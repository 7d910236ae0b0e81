""" Meters of single-label data: accuracy, precision, recall and F1 """
from typing import Optional, Sequence

import torch


class AccuracyMeter:
    """ Top-1 and top-5 accuracy of single labels, over all processes; the counterpart of `MultilabelMeter`.

    Args:
        device: Where predictions are.
    """

    def __init__(self, device: torch.device):
        self.counts = torch.zeros(3, dtype=torch.float64, device='cpu' if device.type == 'mps' else device)

    def __len__(self) -> int:
        return int(self.counts[2])

    def update(self, logits: torch.Tensor, targets: torch.Tensor, indices: Optional[Sequence[int]] = None) -> None:
        """ Count a batch.

        Args:
            logits: (B, classes).
            targets: (B,) class indices.
            indices: Not needed: no sample comes twice.
        """
        hits = logits.topk(min(5, logits.shape[1])).indices == targets[:, None]  # (B, 5)
        counts = torch.stack([hits[:, 0].sum(), hits.sum(), hits.new_tensor(len(targets), dtype=torch.int64)])
        self.counts += counts.to(self.counts)

    def compute(self) -> dict[str, float]:
        """Accuracies in percent."""
        counts = self.counts.clone()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(counts)
        top1, top5, number = counts.tolist()
        return {'top1': 100 * top1 / max(number, 1), 'top5': 100 * top5 / max(number, 1)}




class AveragingMeter(AccuracyMeter):
    """ Accuracy, precision, recall and F1 of single labels, over all processes.

    Args:
        device: Where predictions are.
        num_classes: Number of classes.
        average: 'micro' over all images, 'macro' over classes, or 'weighted' by their number of images.
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
        """Accuracies, precision, recall and F1 in percent."""
        metrics = super().compute()
        counts = self.classes.clone()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(counts)
        if self.average == 'micro':
            counts = counts.sum(dim=1, keepdim=True)
        counts = counts[:, counts[1] + counts[2] > 0]  # as scikit-learn: classes that are neither there nor predicted
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
