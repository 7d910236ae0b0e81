""" One evaluation, of several labels or of one """
from typing import Any, Callable, Optional

import torch
from torch import nn

from ..errors import UsageError
from .engine import Step
from .progress import LossMeter, Progress


@torch.inference_mode()
def evaluate(
        model: nn.Module,
        loader: Any,
        meter: Any,
        step: Step,
        criterion: Optional[Callable] = None,
        name: str = 'Validate',
        log_interval: int = 50,
        is_primary: bool = True,
        distributed: bool = False,
        after_batch: Optional[Callable[[int], None]] = None,
) -> dict[str, float]:
    """ Score a model on all images of a data set.

    Args:
        model: The model; it is put to evaluation mode.
        loader: Gives the images of this process, each once.
        meter: Gets logits, targets and indices; knows the metrics.
        step: Where batches go, and in which precision.
        criterion: Loss to report beside the metrics.
        name: What the log calls this.
        log_interval: Number of batches between lines of the log.
        is_primary: Whether this process speaks.
        distributed: Whether there are other processes.
        after_batch: Called with the number of batches done; may raise `StopTraining`.

    Returns:
        'loss' if there is a criterion, then the metrics of the meter.
    """
    model.eval()
    averages = LossMeter(step.device)
    progress = Progress(name, len(loader), 0, log_interval, is_primary)
    for batch, (images, targets) in enumerate(loader):
        images, targets = step.to_device(images, targets)
        with step.autocast():
            logits = model(images)
        logits = logits.float()
        if criterion is not None:
            averages.update({'loss': criterion(logits, targets)}, len(images))
        meter.update(logits, targets, loader.indices if None not in loader.indices else None)
        progress.add(len(images))
        if progress.should_log(batch):
            progress.log(batch, averages.compute() if averages.sums else {})
        if after_batch is not None:
            after_batch(batch + 1)
    progress.close()
    losses = {}
    if criterion is not None:
        if not averages.sums:  # a process without images
            averages.update({'loss': torch.zeros((), device=step.device)}, 0)
        losses = averages.compute(distributed)
    _check_all_scored(meter, loader, distributed, step.device)
    return {**losses, **meter.compute()}


def _check_all_scored(meter: Any, loader: Any, distributed: bool, device: torch.device) -> None:
    """A result must be over all images of the data set, however many processes there are."""
    if not hasattr(loader.dataset, '__len__'):
        return
    number = getattr(loader.dataset, 'num_samples', None)  # the length of a stream is that of this process alone
    number = len(loader.dataset) if number is None else number
    scored = torch.tensor(len(meter), device=device)
    if distributed:
        torch.distributed.all_reduce(scored)
    if int(scored) != number:
        raise UsageError(f'Expected to score {number} images, but got {int(scored)}.')
