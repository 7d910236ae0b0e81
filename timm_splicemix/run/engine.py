""" How a batch becomes an update of the weights """
import contextlib
import math
from dataclasses import dataclass
from typing import Any, Callable, Iterator, Optional

import torch
from timm.scheduler.scheduler import Scheduler
from timm.task import TrainingTask
from timm.utils import dispatch_clip_grad

from ..errors import UsageError
from .progress import FiniteCheck, LossMeter, Progress


@dataclass
class Step:
    """ How a batch becomes an update of the weights.

    Args:
        device: Device that batches are on or go to.
        image_dtype: Type of the images.
        autocast: Makes the context of a forward pass.
        scaler: Scales losses so that small gradients survive float16; None without need.
        accumulate: Number of batches whose gradients make one update.
        clip_grad: Limit of gradients, None for none.
        clip_mode: What is limited: 'norm', 'value', or 'agc' (adaptive, all but the classifier).
        create_graph: Keep the graph of gradients, for second order optimizers.
        channels_last: Whether images are stored with channels last.
        synchronize: Wait for the device after each update.
    """
    device: torch.device
    image_dtype: Optional[torch.dtype] = None
    autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    scaler: Any = None
    accumulate: int = 1
    clip_grad: Optional[float] = None
    clip_mode: str = 'norm'
    create_graph: bool = False
    channels_last: bool = False
    synchronize: bool = False

    def to_device(self, images: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """ A batch where and how the model wants it; a prefetcher has done most of it already.

        Args:
            images: (B, C, H, W).
            targets: (B,) or (B, classes).
        """
        images = images.to(self.device, self.image_dtype, non_blocking=True)
        targets = targets.to(self.device, non_blocking=True)
        # Decoders may give either.
        memory_format = torch.channels_last if self.channels_last else torch.contiguous_format
        return images.contiguous(memory_format=memory_format), targets

    def backward(self, task: TrainingTask, optimizer: torch.optim.Optimizer, loss: torch.Tensor, update: bool) -> None:
        """ Add the gradients of a loss, and update the weights with them if it is time.

        Args:
            task: Knows which gradients are limited.
            optimizer: Makes the update.
            loss: Loss of one batch, already divided by the number of batches of an update.
            update: Whether this is the last batch of an update.
        """
        parameters = task.get_clip_parameters(exclude_head='agc' in self.clip_mode)
        if self.scaler is not None:
            self.scaler(
                loss, optimizer, clip_grad=self.clip_grad, clip_mode=self.clip_mode, parameters=parameters,
                create_graph=self.create_graph, need_update=update)
            return
        loss.backward(create_graph=self.create_graph)
        if update:
            if self.clip_grad is not None:
                dispatch_clip_grad(parameters, self.clip_grad, mode=self.clip_mode)
            optimizer.step()


class StopTraining(Exception):
    """Raised by a callback to leave an epoch, after what is to be saved was saved."""


def _batches(loader: Any, epoch: int, start: int, number: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches `start` to `number` of an epoch; one that is longer than the data goes through them again."""
    length = loader_length(loader)
    passes = max(1, math.ceil(number / length))
    while start < number:
        at, offset = divmod(start, length)
        loader.set_epoch(epoch * passes + at, offset)
        end = (at + 1) * length
        for batch in loader:
            yield batch
            start += 1
            if start == number < end:
                return
        if start < end:
            raise UsageError(f'Expected {length} batches in an epoch, but the data ended after {start - at * length}.')


def loader_length(loader: Any) -> int:
    """Number of batches of a whole epoch, wherever the loader begins the next one."""
    loader.set_epoch(0)
    return len(loader)


def train_one_epoch(
        task: TrainingTask,
        loader: Any,
        optimizer: torch.optim.Optimizer,
        step: Step,
        epoch: int,
        num_batches: int,
        start_batch: int = 0,
        averages: Optional[LossMeter] = None,
        scheduler: Optional[Scheduler] = None,
        log_interval: int = 50,
        is_primary: bool = True,
        distributed: bool = False,
        before_batch: Optional[Callable[[int, torch.Tensor, torch.Tensor], None]] = None,
        after_update: Optional[Callable[[int, LossMeter, Callable[[], None]], None]] = None,
) -> dict[str, float]:
    """ Train for an epoch, or for what is left of it.

    Args:
        task: Gives the loss of a batch.
        loader: Gives batches, from any on (`set_epoch(epoch, start_batch)`).
        optimizer: Updates the weights.
        step: How a batch becomes an update.
        epoch: Number of the epoch.
        num_batches: Number of batches in an epoch.
        start_batch: First batch, after those that were trained on before; where an update begins.
        averages: Means over the batches before the first one.
        scheduler: Sets learning rates after each update, None if they are constant.
        log_interval: Number of updates between lines of the log.
        is_primary: Whether this process speaks.
        distributed: Whether there are other processes.
        before_batch: Called with number, images and targets of each batch.
        after_update: Called after each update with the number of batches done, the averages, and what raises an error
            if a loss was not finite, to be called before anything is saved; may raise `StopTraining`.

    Returns:
        Means of the losses, over the images of all processes.
    """
    averages = LossMeter(step.device) if averages is None else averages
    check = FiniteCheck(step.device)
    updates_per_epoch = math.ceil(num_batches / step.accumulate)
    progress = Progress(f'Train {epoch}', num_batches, start_batch, log_interval * step.accumulate, is_primary)
    optimizer.zero_grad(set_to_none=True)
    for batch, (images, targets) in enumerate(_batches(loader, epoch, start_batch, num_batches), start_batch):
        update_index = batch // step.accumulate
        group_size = min(step.accumulate, num_batches - update_index * step.accumulate)  # the last may be smaller
        is_update = (batch + 1) % step.accumulate == 0 or batch + 1 == num_batches
        images, targets = step.to_device(images, targets)
        if before_batch is not None:
            before_batch(batch, images, targets)

        num_updates = epoch * updates_per_epoch + update_index + 1
        for part in task.parts(images, targets) if hasattr(task, 'parts') else [(images, targets)]:
            with contextlib.nullcontext() if is_update else task.no_sync():
                with step.autocast():
                    result = task(*part)
                step.backward(task, optimizer, result['loss'] / group_size, is_update)
            losses = {name: value for name, value in result.items() if name == 'loss' or name.endswith('_loss')}
            averages.update(losses, len(part[0]))
            check.add(batch, result['loss'], loader.filenames())
            if is_update:
                optimizer.zero_grad(set_to_none=True)
                task.update_ema(step=num_updates)
        if is_update:
            if step.synchronize:
                torch.get_device_module(step.device).synchronize()
            if scheduler is not None:
                scheduler.step_update(num_updates=num_updates)
        progress.add(len(images))
        if progress.should_log(batch):
            check.look()
            progress.log(batch, averages.compute(), optimizer)
        if is_update and after_update is not None:
            after_update(batch + 1, averages, check.look)
    check.look()
    progress.close()
    return averages.compute(distributed)
