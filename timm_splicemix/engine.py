""" One epoch of training, one evaluation """
import contextlib
import logging
import math
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, Optional, Sequence

import torch
from timm.scheduler.scheduler import Scheduler
from timm.task import TrainingTask
from timm.utils import accuracy, dispatch_clip_grad
from torch import nn
from tqdm import tqdm

from .metrics import MultilabelMeter

_logger = logging.getLogger(__name__)

__all__ = ['AccuracyMeter', 'Averages', 'Step', 'StopTraining', 'evaluate', 'train_one_epoch']


class StopTraining(Exception):
    """Raised by a callback to leave an epoch, after what is to be saved was saved."""


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


class Averages:
    """ Means over the images of an epoch, summed where the values are, so that nothing waits for a GPU.

    Args:
        device: Where the values are.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.dtype = torch.float32 if device.type == 'mps' else torch.float64
        self.sums: dict[str, torch.Tensor] = {}
        self.count = 0

    def update(self, values: dict[str, torch.Tensor], count: int) -> None:
        """ Add the means over some images.

        Args:
            values: Mean of each quantity.
            count: Number of images.
        """
        self.count += count
        for name, value in values.items():
            if name not in self.sums:
                self.sums[name] = torch.zeros((), dtype=self.dtype, device=self.device)
            self.sums[name] += value.detach().to(self.dtype) * count

    def state_dict(self, distributed: bool = False) -> dict[str, Any]:
        """ Sums and count as plain numbers.

        Args:
            distributed: Take those of all processes together; all must call this.
        """
        *sums, count = self._totals(distributed)
        return {'sums': dict(zip(self.sums, sums)), 'count': round(count)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state['count']
        self.sums = {
            name: torch.tensor(value, dtype=self.dtype, device=self.device) for name, value in state['sums'].items()}

    def compute(self, distributed: bool = False) -> dict[str, float]:
        """ The means so far.

        Args:
            distributed: Take the mean over all processes; all must call this.
        """
        *sums, count = self._totals(distributed)
        return {name: value / max(count, 1) for name, value in zip(self.sums, sums)}

    def _totals(self, distributed: bool) -> list[float]:
        count = torch.tensor(self.count, dtype=self.dtype, device=self.device)
        values = torch.stack([*self.sums.values(), count])
        if distributed:
            torch.distributed.all_reduce(values)
        return values.tolist()


@dataclass
class _FiniteCheck:
    """ Finds the first batch whose loss is not a number, though values of a GPU are looked at now and then only.

    Args:
        device: Where losses are.
    """
    device: torch.device
    seen: list[tuple[int, list[str]]] = field(default_factory=list)  # batches since the last look, with their files

    def __post_init__(self):
        self.first_bad = torch.full((), -1, dtype=torch.int64, device=self.device)

    def add(self, batch: int, loss: torch.Tensor, filenames: list[str]) -> None:
        is_first = (self.first_bad < 0) & ~torch.isfinite(loss.detach())
        self.first_bad = torch.where(is_first, torch.full_like(self.first_bad, batch), self.first_bad)
        self.seen.append((batch, filenames))
        if self.device.type == 'cpu':
            self.look()

    def look(self) -> None:
        """Raise an error if a loss was not finite; waits for a GPU."""
        bad = int(self.first_bad)
        files = dict(self.seen).get(bad)
        self.seen.clear()
        if bad >= 0:
            raise ValueError(
                f'Expected a finite loss, but got one that is not in batch {bad} of the epoch, of '
                f'{", ".join(files or ["unknown files"])}: lower --lr, lengthen --warmup-epochs, set --clip-grad, or '
                'use --amp-dtype bfloat16; the last checkpoint is from before.')


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
            raise ValueError(f'Expected {length} batches in an epoch, but the data ended after {start - at * length}.')


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
        averages: Optional[Averages] = None,
        scheduler: Optional[Scheduler] = None,
        log_interval: int = 50,
        is_primary: bool = True,
        distributed: bool = False,
        before_batch: Optional[Callable[[int, torch.Tensor, torch.Tensor], None]] = None,
        after_update: Optional[Callable[[int, Averages, Callable[[], None]], None]] = None,
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
    averages = Averages(step.device) if averages is None else averages
    check = _FiniteCheck(step.device)
    updates_per_epoch = math.ceil(num_batches / step.accumulate)
    progress = _Progress(f'Train {epoch}', num_batches, start_batch, log_interval * step.accumulate, is_primary)
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
        if progress.is_time_to_tell(batch):
            check.look()
            progress.tell(batch, averages.compute(), optimizer)
        if is_update and after_update is not None:
            after_update(batch + 1, averages, check.look)
    check.look()
    progress.close()
    return averages.compute(distributed)


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
        top1, top5 = accuracy(logits, targets, topk=(1, 5))
        number = len(targets)
        counts = torch.stack([top1 * number / 100, top5 * number / 100, top1.new_tensor(number)])
        self.counts += counts.to(self.counts)

    def compute(self) -> dict[str, float]:
        """Accuracies in percent."""
        counts = self.counts.clone()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(counts)
        top1, top5, number = counts.tolist()
        return {'top1': 100 * top1 / max(number, 1), 'top5': 100 * top5 / max(number, 1)}


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
    averages = Averages(step.device)
    progress = _Progress(name, len(loader), 0, log_interval, is_primary)
    for batch, (images, targets) in enumerate(loader):
        images, targets = step.to_device(images, targets)
        with step.autocast():
            logits = model(images)
        logits = logits.float()
        if criterion is not None:
            averages.update({'loss': criterion(logits, targets)}, len(images))
        meter.update(logits, targets, loader.indices if None not in loader.indices else None)
        progress.add(len(images))
        if progress.is_time_to_tell(batch):
            progress.tell(batch, averages.compute() if averages.sums else {})
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
    scored = torch.tensor(len(meter), device=device)
    if distributed:
        torch.distributed.all_reduce(scored)
    if int(scored) != len(loader.dataset):
        raise ValueError(f'Expected to score {len(loader.dataset)} images, but got {int(scored)}.')


class _Progress:
    """ A bar on a terminal, lines of the log elsewhere: losses, images per second, time that is left.

    Args:
        name: What is going on.
        total: Number of batches.
        done: Number of them that were done before.
        interval: Number of batches between lines.
        is_primary: Whether anything is shown.
    """

    def __init__(self, name: str, total: int, done: int, interval: int, is_primary: bool):
        self.name = name
        self.total = total
        self.start = done
        self.interval = max(1, interval)
        self.is_primary = is_primary
        self.bar = tqdm(total=total, initial=done, desc=name, unit='batch', leave=False, disable=None) \
            if is_primary else None
        self.num_images = 0
        self.began = time.perf_counter()

    def add(self, num_images: int) -> None:
        self.num_images += num_images
        if self.bar is not None:
            self.bar.update()

    def is_time_to_tell(self, batch: int) -> bool:
        return (batch + 1) % self.interval == 0 or batch + 1 == self.total

    def tell(self, batch: int, losses: dict[str, float], optimizer: Optional[torch.optim.Optimizer] = None) -> None:
        if not self.is_primary:
            return
        seconds = max(time.perf_counter() - self.began, 1e-9)
        parts = [f'{name} {value:.4f}' for name, value in losses.items()]
        rate = f'{self.num_images / seconds:.1f} img/s'
        if optimizer is not None:
            parts.append(f'lr {max(group["lr"] for group in optimizer.param_groups):.3g}')
        if self.bar is not None and not self.bar.disable:
            self.bar.set_postfix_str(', '.join([*parts, rate]))
            return
        left = seconds / (batch + 1 - self.start) * (self.total - batch - 1)
        done = f'{batch + 1:>{len(str(self.total))}}/{self.total} ({100 * (batch + 1) // self.total:3d} %)'
        _logger.info('  '.join([f'{self.name}: {done}', *parts, rate, f'{_duration(left)} left']))

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f'{hours}:{minutes:02d}:{seconds:02d}' if hours else f'{minutes}:{seconds:02d}'


def create_meter(
        multi_label: bool,
        num_classes: int,
        device: torch.device,
        class_names: Sequence[str] = (),
        preset: str = 'paper',
) -> Any:
    """ What scores the predictions of a data set.

    Args:
        multi_label: Whether an image has any number of classes.
        num_classes: Number of classes.
        device: Where predictions are.
        class_names: Names of the classes, for warnings.
        preset: Definition of the multi-label metrics.
    """
    if not multi_label:
        return AccuracyMeter(device)
    return MultilabelMeter(num_classes, preset=preset, class_names=class_names or None)
