""" What all mixers share: a generator of their own, and counters that say what it draws """
import hashlib
import math
import random
from numbers import Real
from typing import Any, Optional

import torch

from ..errors import UsageError


def distributed_rank(rank: Optional[int] = None) -> int:
    """The given rank, or that of `torch.distributed`."""
    if rank is not None:
        return rank
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if distributed else 0


class Mixer:
    """ Draw a plan for a batch, then apply it.

    What is drawn depends on (seed, rank, epoch, step) alone. The step counts the batches by itself; a training script
    that can be resumed calls `set_step` instead. Set `mixup_enabled` to False to stop mixing.

    A mixer defines `plan(batch_size)`, which draws, and `apply(images, targets, plan)`, which doesn't.

    Args:
        num_classes: Number of classes, needed for integer targets, which become one-hot.
        seed: Seed of everything that is drawn.
        rank: Rank of this process, that of `torch.distributed` if None.
    """

    def __init__(self, num_classes: Optional[int] = None, seed: int = 0, rank: Optional[int] = None):
        if num_classes is not None and num_classes < 1:
            raise UsageError(f'Expected num_classes of at least 1, but got {num_classes}.')
        self.num_classes = num_classes
        self.seed = seed
        self.rank = rank
        self.mixup_enabled = True
        self._epoch = 0
        self._step = 0

    def __repr__(self) -> str:
        settings = {name: value for name, value in vars(self).items() if name[0] != '_' and name != 'mixup_enabled'}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in settings.items())})"

    def set_step(self, epoch: int, step: int) -> None:
        """Say which batch of which epoch is next; later ones are counted from there."""
        self._epoch = epoch
        self._step = step

    def state_dict(self) -> dict[str, Any]:
        return {'epoch': self._epoch, 'step': self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.set_step(state['epoch'], state['step'])

    def plan(self, batch_size: int) -> Any:
        raise NotImplementedError

    def apply(self, images: torch.Tensor, targets: torch.Tensor, plan: Any) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    def __call__(self, images: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.apply(images, targets, self.plan(len(images)))

    def _next_generator(self, batch_size: int) -> torch.Generator:
        """The generator of this step; moves on to the step after it."""
        if batch_size < 1:
            raise UsageError(f'Expected a batch of at least one image, but got batch_size={batch_size}.')
        place = (self.seed, distributed_rank(self.rank), self._epoch, self._step)
        counters = ' '.join(str(int(counter)) for counter in place)
        digest = hashlib.blake2b(counters.encode(), digest_size=4).digest()
        self._step += 1
        return torch.Generator().manual_seed(int.from_bytes(digest, 'little'))  # torch's CPU generator uses 32 bits


def draw_beta(alpha: float, count: int, generator: torch.Generator) -> torch.Tensor:
    """ Draw from Beta(alpha, alpha), by python as torch's distributions take no generator.

    Returns:
        (count,) float64.
    """
    source = random.Random(int(torch.randint(2 ** 62, (), generator=generator)))
    return torch.tensor([source.betavariate(alpha, alpha) for _ in range(count)], dtype=torch.float64)


def check_alpha(name: str, value: float, *, positive: bool = True) -> float:
    if not isinstance(value, Real) or not 0 <= value < math.inf or (positive and value == 0):
        raise UsageError(f'Expected {name} to be a number {"above" if positive else "of at least"} 0, but got {value}.')
    return float(value)
