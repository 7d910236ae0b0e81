""" RecursiveMix: the mixed batch of the step before, made smaller, in a box """
from dataclasses import dataclass
from typing import Any, Optional

import torch

from ..errors import UsageError
from .base import Mixer, check_alpha, distributed_rank
from .pairs import PairPlan, mix_pairs
from .splicemix import _check_probability

__all__ = ['RecursiveMix', 'RecursivePlan', 'Remembered']


@dataclass(frozen=True, eq=False)
class Remembered:
    """ What a step leaves to the next one.

    Args:
        images: (P, C, H, W), mixed.
        targets: (P, classes), mixed.
        logits: (P, classes), what the model said about them.
    """
    images: torch.Tensor
    targets: torch.Tensor
    logits: torch.Tensor


@dataclass(frozen=True, eq=False)
class RecursivePlan(PairPlan):
    """ A plan whose partners are those of the step before.

    Args:
        previous: What is pasted, None if nothing is.
    """
    previous: Optional[Remembered] = None

    def relative_box(self, height: int, width: int) -> tuple[float, float, float, float]:
        """Left, top, right and bottom of the box that is pasted into images of a size, each from 0 to 1."""
        top, bottom, left, right = self.pixel_boxes(height, width)[0].tolist()
        return left / width, top / height, right / width, bottom / height

    def partner_logits(self) -> torch.Tensor:
        """(N, classes): what the model said about the image in the box, a step before."""
        logits = self.previous.logits
        return logits.index_select(0, self.partners.to(logits.device, non_blocking=True))


class RecursiveMix(Mixer):
    """ Show in a box of each image the mixed image of the step before as a whole.

        plan = mixer.plan(len(images))
        images, targets = mixer.apply(images, targets, plan)
        logits = model(images)
        mixer.remember(images, targets, logits)

    The term for consistency compares what the model says about the box of its feature map, `plan.relative_box`, with
    `plan.partner_logits()`, and is weighted by the box's part of the image, 1 - `plan.weights`; there is none if
    `plan.previous` is None.

    The first batch of an epoch is left as it is. Image i is mixed with image i of the batch before; if there are fewer
    of those, they are used again. What is remembered is part of the state, as a run continued in the middle of an epoch
    needs it; it belongs to one process, so each has to save its own.

    Args:
        alpha: The box's part of the image's area is drawn uniformly from 0 to alpha.
        prob: Probability of mixing a batch.
        num_classes: Number of classes, needed for integer targets, which become one-hot.
        seed: Seed of everything that is drawn.
        rank: Rank of this process, that of `torch.distributed` if None.
    """

    def __init__(
            self,
            alpha: float = 0.5,
            prob: float = 1.0,
            num_classes: Optional[int] = None,
            seed: int = 0,
            rank: Optional[int] = None,
    ):
        super().__init__(num_classes, seed, rank)
        if check_alpha('alpha', alpha) > 1:
            raise UsageError(f'Expected alpha to be a part of the area, at most 1, but got {alpha}.')
        self.alpha = float(alpha)
        self.prob = _check_probability('prob', prob)
        self._previous: Optional[Remembered] = None
        self._previous_place = (0, 0)  # epoch, and the step that may use it first

    def remember(self, images: torch.Tensor, targets: torch.Tensor, logits: torch.Tensor) -> None:
        """ Keep a batch for the step after it.

        Args:
            images: (B, C, H, W), as `apply` returned them, not to be changed later.
            targets: (B, classes), as `apply` returned them.
            logits: (B, classes), what the model said about them.
        """
        if not len(images) == len(targets) == len(logits):
            raise UsageError(
                f'Expected as many targets and logits as images, but got {len(targets)} targets and {len(logits)} '
                f'logits for {len(images)} images.')
        self._previous = Remembered(images.detach(), targets.detach(), logits.detach())
        self._previous_place = (self._epoch, self._step)

    def set_step(self, epoch: int, step: int) -> None:
        """Say which batch of which epoch is next; one that is not after what is remembered starts anew."""
        super().set_step(epoch, step)
        if epoch != self._previous_place[0] or step < self._previous_place[1]:
            self._previous = None

    def state_dict(self) -> dict[str, Any]:
        previous = None if self._previous is None else dict(vars(self._previous))
        return {**super().state_dict(), 'previous': previous, 'previous_place': self._previous_place,
                'rank': distributed_rank(self.rank)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state; what another process remembers is left out."""
        is_own = state['rank'] == distributed_rank(self.rank)
        self._previous = Remembered(**state['previous']) if state['previous'] and is_own else None
        self._previous_place = tuple(state['previous_place'])
        super().load_state_dict(state)

    def plan(self, batch_size: int) -> RecursivePlan:
        """ Draw how the next batch is mixed, and move on to the step after it.

        Args:
            batch_size: Number of images.
        """
        generator = self._next_generator(batch_size)
        is_mixed, area, *place = torch.rand(4, generator=generator).tolist()
        if not self.mixup_enabled or is_mixed >= self.prob or self._previous is None:
            return RecursivePlan.unmixed(batch_size)
        side = (area * self.alpha) ** 0.5
        everything = torch.arange(batch_size)
        return RecursivePlan(
            everything[:0], everything, everything % len(self._previous.images),
            torch.ones(batch_size, dtype=torch.float64),
            torch.tensor([[side, side, *place]], dtype=torch.float64).expand(batch_size, 4),
            resized=True, batch_size=batch_size, previous=self._previous)

    def apply(
            self,
            images: torch.Tensor,
            targets: torch.Tensor,
            plan: RecursivePlan,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """ Mix a batch as planned.

        Args:
            images: (B, C, H, W).
            targets: (B, classes) multi-hot, soft or with -1 for unknown, or (B,) integer classes.
            plan: What `plan(B)` returned.
        """
        others = None
        if plan.previous is not None:
            others = (
                plan.previous.images.to(images.device, images.dtype, non_blocking=True),
                plan.previous.targets.to(images.device, non_blocking=True))
        return mix_pairs(images, targets, plan, others, self.num_classes)
