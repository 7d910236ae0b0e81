""" Mean losses, the check for non-finite losses, and the progress of an epoch """
import logging
import time
from typing import Any, Callable, Optional, Sequence

import torch
from tqdm import tqdm

from ..errors import UsageError

_logger = logging.getLogger(__name__)


class LossMeter:
    """Mean losses over images. They are accumulated on `device`, so that updating never waits for a GPU."""

    def __init__(self, device: torch.device):
        self.device = device
        self.dtype = torch.float32 if device.type == 'mps' else torch.float64
        self.sums: dict[str, torch.Tensor] = {}
        self.count = 0

    def update(self, values: dict[str, torch.Tensor], count: int) -> None:
        """Add the mean losses of `count` images."""
        self.count += count
        for name, value in values.items():
            if name not in self.sums:
                self.sums[name] = torch.zeros((), dtype=self.dtype, device=self.device)
            self.sums[name] = self.sums[name] + value.detach().to(self.dtype) * count

    def compute(self, distributed: bool = False) -> dict[str, float]:
        """Return the means; with `distributed` over all processes, which must all call this."""
        *sums, count = self._totals(distributed)
        return {name: value / max(count, 1) for name, value in zip(self.sums, sums)}

    def copy(self) -> 'LossMeter':
        other = LossMeter(self.device)
        other.sums, other.count = dict(self.sums), self.count
        return other

    def state_dict(self) -> dict[str, Any]:
        """Return sums and count of this process as numbers."""
        *sums, count = self._totals(distributed=False)
        return {'sums': dict(zip(self.sums, sums)), 'count': round(count)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state['count']
        self.sums = {
            name: torch.tensor(value, dtype=self.dtype, device=self.device) for name, value in state['sums'].items()}

    def _totals(self, distributed: bool) -> list[float]:
        count = torch.tensor(self.count, dtype=self.dtype, device=self.device)
        values = torch.stack([*self.sums.values(), count])
        if distributed:
            torch.distributed.all_reduce(values)
        return values.tolist()


class NonFiniteLoss(UsageError):
    """ A loss was not finite.

    Args:
        message: The message.
        batch: Index of the first such batch in its epoch.
    """

    def __init__(self, message: str, batch: int):
        super().__init__(message)
        self.batch = batch


class FiniteCheck:
    """ Finds the first batch with a non-finite loss. On a GPU the result is only read in `check()`, which waits.

    Args:
        device: Device of the losses.
        filenames: Returns the file names of samples.
    """

    def __init__(self, device: torch.device, filenames: Callable[[Sequence], list[str]]):
        self.device = device
        self.filenames = filenames
        self.first_bad = torch.full((), -1, dtype=torch.int64, device=device)
        self.num_finite = 0  # the losses of the batches before this one are known to be finite
        self.unchecked: list[tuple[int, Sequence]] = []  # batches since the last check, with their samples

    def add(self, batch: int, loss: torch.Tensor, indices: Sequence) -> None:
        is_first = (self.first_bad < 0) & ~torch.isfinite(loss.detach())
        self.first_bad = torch.where(is_first, torch.full_like(self.first_bad, batch), self.first_bad)
        self.unchecked.append((batch, indices))
        if self.device.type == 'cpu':
            self.check()

    def check(self) -> None:
        """Raise an error if a loss was not finite."""
        batch = int(self.first_bad)
        indices = dict(self.unchecked).get(batch)
        if batch < 0 and self.unchecked:
            self.num_finite = self.unchecked[-1][0] + 1
        self.unchecked.clear()
        if batch >= 0:
            files = f' (files: {", ".join(self.filenames(indices))})' if indices else ''
            raise NonFiniteLoss(
                f'Non-finite loss at batch {batch}{files}. Lower --lr, lengthen --warmup-epochs, set --clip-grad, use '
                '--amp-dtype bfloat16, or check these images. Saved checkpoints are from before this batch.', batch)


class Progress:
    """ Shows losses, images per second and remaining time: in a progress bar on a terminal, in log lines elsewhere.

    Args:
        name: Name of the loop.
        total: Number of batches.
        done: Number of batches that were done in an earlier run.
        interval: Number of batches between log lines.
        is_primary: True on the process that logs.
    """

    def __init__(self, name: str, total: int, done: int, interval: int, is_primary: bool):
        self.name = name
        self.total = total
        self.start = done
        self.interval = max(1, interval)
        self.is_primary = is_primary
        self.bar = None
        if is_primary:
            self.bar = tqdm(total=total, initial=done, desc=name, unit='batch', leave=False, disable=None)
        self.num_images = 0
        self.started = time.perf_counter()

    def add(self, num_images: int) -> None:
        self.num_images += num_images
        if self.bar is not None:
            self.bar.update()

    def should_log(self, batch: int) -> bool:
        return (batch + 1) % self.interval == 0 or batch + 1 == self.total

    def log(self, batch: int, losses: dict[str, float], optimizer: Optional[torch.optim.Optimizer] = None) -> None:
        if not self.is_primary:
            return
        seconds = max(time.perf_counter() - self.started, 1e-9)
        parts = [f'{name} {value:.4f}' for name, value in losses.items()]
        if optimizer is not None:
            parts.append(f'lr {max(group["lr"] for group in optimizer.param_groups):.3g}')
        parts.append(f'{self.num_images / seconds:.1f} img/s')
        if not self.bar.disable:
            self.bar.set_postfix_str(', '.join(parts))
            return
        left = seconds / (batch + 1 - self.start) * (self.total - batch - 1)
        done = f'{batch + 1:>{len(str(self.total))}}/{self.total} ({100 * (batch + 1) // self.total:3d} %)'
        _logger.info('  '.join([f'{self.name}: {done}', *parts, f'{format_duration(left)} left']))

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def format_duration(seconds: float) -> str:
    """Format seconds as M:SS or H:MM:SS."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f'{hours}:{minutes:02d}:{seconds:02d}' if hours else f'{minutes}:{seconds:02d}'
