""" What an epoch tells while it goes on: means of losses, rate and time left, and a loss that is no number """
import logging
import time
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from tqdm import tqdm

from ..errors import UsageError

_logger = logging.getLogger(__name__)


class LossMeter:
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
class FiniteCheck:
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
            raise UsageError(
                f'Expected a finite loss, but got one that is not in batch {bad} of the epoch, of '
                f'{", ".join(files or ["unknown files"])}: lower --lr, lengthen --warmup-epochs, set --clip-grad, or '
                'use --amp-dtype bfloat16; the last checkpoint is from before.')


class Progress:
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

    def should_log(self, batch: int) -> bool:
        return (batch + 1) % self.interval == 0 or batch + 1 == self.total

    def log(self, batch: int, losses: dict[str, float], optimizer: Optional[torch.optim.Optimizer] = None) -> None:
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
