""" Train a task for an epoch, evaluate a model """
import contextlib
import math
from dataclasses import dataclass
from typing import Any, Callable, Iterator, Optional

import torch
from timm.scheduler.scheduler import Scheduler
from timm.task import TrainingTask
from timm.utils import dispatch_clip_grad
from torch import nn

from ..errors import UsageError
from .progress import FiniteCheck, LossMeter, Progress


class StopTraining(Exception):
    """Raised by a hook to leave the loop, after the run saved what it needs to resume."""


@dataclass
class Step:
    """ How batches are processed and logged.

    Args:
        device: Device that batches are moved to.
        image_dtype: Type that images are converted to.
        autocast: Creates the context manager of a forward pass.
        scaler: Loss scaler for float16, None otherwise.
        accumulate: Number of batches per optimizer update.
        clip_grad: Gradient clipping threshold, None to disable clipping.
        clip_mode: 'norm', 'value', or 'agc' (adaptive, the classifier excluded).
        channels_last: Convert images to the channels-last memory format.
        synchronize: Wait for the device after each update.
        log_interval: Number of updates (in evaluation: batches) between log lines.
        is_primary: True on the process that logs.
        distributed: True if there are several processes.
    """
    device: torch.device
    image_dtype: Optional[torch.dtype] = None
    autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    scaler: Any = None
    accumulate: int = 1
    clip_grad: Optional[float] = None
    clip_mode: str = 'norm'
    channels_last: bool = False
    synchronize: bool = False
    log_interval: int = 50
    is_primary: bool = True
    distributed: bool = False

    def to_device(self, images: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        images = images.to(self.device, self.image_dtype, non_blocking=True)
        targets = targets.to(self.device, non_blocking=True)
        # Some decoders return channels-last images.
        memory_format = torch.channels_last if self.channels_last else torch.contiguous_format
        return images.contiguous(memory_format=memory_format), targets

    def backward(self, task: TrainingTask, optimizer: torch.optim.Optimizer, loss: torch.Tensor, update: bool) -> None:
        """ Accumulate the gradients of a loss and, if `update` is set, clip them and step the optimizer.

        Args:
            task: Knows which gradients are clipped.
            optimizer: Updates the weights.
            loss: Loss of one batch, already divided by the number of accumulated batches.
            update: True for the last batch of an update.
        """
        parameters = task.get_clip_parameters(exclude_head='agc' in self.clip_mode)
        create_graph = getattr(optimizer, 'is_second_order', False)
        if self.scaler is not None:
            self.scaler(
                loss, optimizer, clip_grad=self.clip_grad, clip_mode=self.clip_mode, parameters=parameters,
                create_graph=create_graph, need_update=update)
            return
        loss.backward(create_graph=create_graph)
        if update:
            if self.clip_grad is not None:
                dispatch_clip_grad(parameters, self.clip_grad, mode=self.clip_mode)
            optimizer.step()


@dataclass
class Epoch:
    """ The batches to train on.

    Args:
        index: Number of the epoch.
        num_batches: Number of batches in a whole epoch. If the data has fewer, it is read several times.
        start_batch: First batch; a resumed epoch starts in the middle, at the first batch of an update.
        losses: Losses of the batches before `start_batch`; the losses of the epoch are added to them.
    """
    index: int
    num_batches: int
    start_batch: int = 0
    losses: Optional[LossMeter] = None


class Hooks:
    """Methods that the loops call. They do nothing here; a run overrides them, and may raise `StopTraining`."""

    def before_batch(self, batch: int, images: torch.Tensor, targets: torch.Tensor) -> None:
        """Called before each training batch, with the batch on its device."""

    def after_update(self, num_done: int, losses: LossMeter, finite: FiniteCheck) -> None:
        """ Called after each optimizer update.

        Args:
            num_done: Number of batches of the epoch that are done.
            losses: Mean losses so far.
            finite: Call its `check()` before saving, because losses on a GPU are not checked after every batch.
        """

    def after_eval_batch(self, num_done: int) -> None:
        """Called after each evaluation batch, with the number of batches done."""


def loader_length(loader: Any) -> int:
    """Return the number of batches of a whole epoch, also if the loader was set to start in the middle of one."""
    loader.set_epoch(0)
    return len(loader)


def _batches(loader: Any, epoch: Epoch) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    length = loader_length(loader)
    passes = max(1, math.ceil(epoch.num_batches / length))
    batch = epoch.start_batch
    while batch < epoch.num_batches:
        index, offset = divmod(batch, length)
        loader.set_epoch(epoch.index * passes + index, offset)
        end = (index + 1) * length
        for images, targets in loader:
            yield images, targets
            batch += 1
            if batch == epoch.num_batches < end:
                return
        if batch < end:
            raise UsageError(
                f'Expected {length} batches in an epoch, but the data ended after {batch - index * length}.')


def train_one_epoch(
        task: TrainingTask,
        loader: Any,
        optimizer: torch.optim.Optimizer,
        step: Step,
        epoch: Epoch,
        scheduler: Optional[Scheduler] = None,
        hooks: Optional[Hooks] = None,
) -> dict[str, float]:
    """ Train for an epoch, or for the rest of one.

    Args:
        task: Computes the loss of a batch.
        loader: Returns batches, starting at any of them (`set_epoch(epoch, start_batch)`).
        optimizer: Updates the weights.
        step: How batches are processed and logged.
        epoch: Which batches to train on.
        scheduler: Sets the learning rates after each update, None if they are constant.
        hooks: Called between batches.

    Returns:
        Mean losses over the images of all processes.
    """
    hooks = hooks or Hooks()
    losses = epoch.losses or LossMeter(step.device)
    finite = FiniteCheck(step.device, loader.filenames)
    updates_per_epoch = math.ceil(epoch.num_batches / step.accumulate)
    progress = Progress(
        f'Train {epoch.index}', epoch.num_batches, epoch.start_batch, step.log_interval * step.accumulate,
        step.is_primary)
    optimizer.zero_grad(set_to_none=True)
    for batch, (images, targets) in enumerate(_batches(loader, epoch), epoch.start_batch):
        update_index = batch // step.accumulate
        group_size = min(step.accumulate, epoch.num_batches - update_index * step.accumulate)
        is_update = (batch + 1) % step.accumulate == 0 or batch + 1 == epoch.num_batches
        num_updates = epoch.index * updates_per_epoch + update_index + 1
        images, targets = step.to_device(images, targets)
        hooks.before_batch(batch, images, targets)

        for part in task.parts(images, targets) if hasattr(task, 'parts') else [(images, targets)]:
            with contextlib.nullcontext() if is_update else task.no_sync():
                with step.autocast():
                    result = task(*part)
                step.backward(task, optimizer, result['loss'] / group_size, is_update)
            losses.update(
                {name: value for name, value in result.items() if name == 'loss' or name.endswith('_loss')},
                len(part[0]))
            finite.add(batch, result['loss'], loader.indices)
            if is_update:
                optimizer.zero_grad(set_to_none=True)
                task.update_ema(step=num_updates)
        if is_update and step.synchronize:
            torch.get_device_module(step.device).synchronize()
        if is_update and scheduler is not None:
            scheduler.step_update(num_updates=num_updates)
        progress.add(len(images))
        if progress.should_log(batch):
            finite.check()
            progress.log(batch, losses.compute(), optimizer)
        if is_update:
            hooks.after_update(batch + 1, losses, finite)
    finite.check()
    progress.close()
    return losses.compute(step.distributed)


@torch.inference_mode()
def evaluate(
        model: nn.Module,
        loader: Any,
        meter: Any,
        step: Step,
        criterion: Optional[Callable] = None,
        name: str = 'Validate',
        hooks: Optional[Hooks] = None,
) -> dict[str, float]:
    """ Evaluate a model on all images of a data set.

    Args:
        model: The model; it is switched to evaluation mode.
        loader: Returns each image of this process once.
        meter: Computes the metrics from logits, targets and indices.
        step: How batches are processed and logged.
        criterion: Loss to report in addition to the metrics.
        name: Name of the evaluation in the log.
        hooks: Called between batches.

    Returns:
        'loss' if there is a criterion, then the metrics.
    """
    model.eval()
    hooks = hooks or Hooks()
    losses = LossMeter(step.device)
    progress = Progress(name, len(loader), 0, step.log_interval, step.is_primary)
    for batch, (images, targets) in enumerate(loader):
        images, targets = step.to_device(images, targets)
        with step.autocast():
            logits = model(images)
        logits = logits.float()
        if criterion is not None:
            losses.update({'loss': criterion(logits, targets)}, len(images))
        meter.update(logits, targets, loader.indices if None not in loader.indices else None)
        progress.add(len(images))
        if progress.should_log(batch):
            progress.log(batch, losses.compute())
        hooks.after_eval_batch(batch + 1)
    progress.close()
    if criterion is not None and not losses.count:  # a process without images takes part in the mean, too
        losses.update({'loss': torch.zeros((), device=step.device)}, 0)
    mean = losses.compute(step.distributed) if criterion is not None else {}
    _check_all_scored(meter, loader, step)
    return {**mean, **meter.compute()}


def _check_all_scored(meter: Any, loader: Any, step: Step) -> None:
    if not hasattr(loader.dataset, '__len__'):
        return
    number = getattr(loader.dataset, 'num_samples', None)  # len() of a streamed data set is that of this process
    number = len(loader.dataset) if number is None else number
    scored = torch.tensor(len(meter), device=step.device)
    if step.distributed:
        torch.distributed.all_reduce(scored)
    if int(scored) != number:
        raise UsageError(f'Expected to score {number} images, but got {int(scored)}.')
