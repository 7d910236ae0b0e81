""" RecursiveMix: show the previous mixed batch, resized, in a box """
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torchvision.ops import roi_align

from ..errors import UsageError
from .base import Batch, check_alpha, check_probability, distributed_rank
from .pairs import PairMixer, PairPlan, mix_pairs


@dataclass(frozen=True, eq=False)
class PreviousBatch:
    """ A mixed batch, as the next step uses it.

    Args:
        images: (P, C, H, W), mixed.
        targets: (P, classes), mixed.
        logits: (P, classes), the model's logits of the images.
    """
    images: torch.Tensor
    targets: torch.Tensor
    logits: torch.Tensor


@dataclass(frozen=True, eq=False)
class RecursivePlan(PairPlan):
    """ A plan whose partners are images of the previous batch.

    The part of each image that consistency learning predicts is the box. Its teacher is the logits of the previous
    step, and its weight is the area of the box relative to the image.

    Args:
        previous: The previous batch, None if nothing is mixed.
    """
    previous: Optional[PreviousBatch] = None

    @property
    def num_parts(self) -> int:
        return self.num_mixed

    def relative_box(self, height: int, width: int) -> tuple[float, float, float, float]:
        """Left, top, right and bottom of the box in images of this size, each from 0 to 1."""
        top, bottom, left, right = self.pixel_boxes(height, width)[0].tolist()
        return left / width, top / height, right / width, bottom / height

    def parts(self, maps: torch.Tensor, image_size: tuple[int, int]) -> list[tuple[slice, torch.Tensor]]:
        """The box of each feature map, resampled to the size of the map."""
        height, width = maps.shape[2:]
        left, top, right, bottom = self.relative_box(*image_size)
        corners = torch.tensor([left * width, top * height, right * width, bottom * height])
        rois = torch.cat([torch.arange(len(maps)).view(-1, 1).float(), corners.expand(len(maps), 4)], dim=1)
        rois = rois.to(maps.device, non_blocking=True)
        with torch.autocast(maps.device.type, enabled=False):  # half precision can't represent all row numbers
            boxes = roi_align(maps.float(), rois, (height, width), aligned=True).to(maps.dtype)
        return [(slice(None), boxes)]

    def teachers(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits of the previous step for the image in each box."""
        previous = self.previous.logits
        picked = previous.index_select(0, self.partners.to(previous.device, non_blocking=True))
        return picked.to(logits.device)  # after resuming, the previous batch is on the CPU

    def parts_weight(self, image_size: tuple[int, int]) -> float:
        left, top, right, bottom = self.relative_box(*image_size)
        return (right - left) * (bottom - top)

    def captions(self) -> list[str]:
        return [caption.replace('+ #', '+ previous #') for caption in super().captions()]


class RecursiveMix(PairMixer):
    """ Show the mixed image of the previous step, resized, in a box of each image.

        plan = mixer.plan(len(images))
        images, targets = mixer.apply(images, targets, plan)
        logits = model(images)
        mixer.remember(images, targets, logits)

    The first batch of an epoch is not mixed. Image i is mixed with image i of the previous batch, modulo its size. The
    previous batch is part of the state, since a run that resumes in the middle of an epoch needs it. It belongs to one
    process, so each process has to save its own.

    Args:
        alpha: The area of the box, relative to the image, is drawn uniformly from 0 to alpha.
        prob: Probability of mixing a batch.
        num_classes, seed, rank: See `Mixer`.
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
        self.prob = check_probability('prob', prob)
        self._previous: Optional[PreviousBatch] = None
        self._previous_place = (0, 0)  # epoch, and the first step that may use it

    def plan(self, batch_size: int) -> RecursivePlan:
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

    def apply(self, images: torch.Tensor, targets: torch.Tensor, plan: RecursivePlan) -> Batch:
        others = None
        if plan.previous is not None:
            others = (
                plan.previous.images.to(images.device, images.dtype, non_blocking=True),
                plan.previous.targets.to(images.device, non_blocking=True))
        return mix_pairs(images, targets, plan, others, self.num_classes)

    def remember(self, images: torch.Tensor, targets: torch.Tensor, logits: torch.Tensor) -> None:
        """ Keep a batch for the next step.

        Args:
            images: (B, C, H, W), as returned by `apply`; they must not be changed later.
            targets: (B, classes), as returned by `apply`.
            logits: (B, classes), the model's logits of the images.
        """
        if not len(images) == len(targets) == len(logits):
            raise UsageError(
                f'Expected as many targets and logits as images, but got {len(targets)} targets and {len(logits)} '
                f'logits for {len(images)} images.')
        self._previous = PreviousBatch(images.detach(), targets.detach(), logits.detach())
        self._previous_place = (self._epoch, self._step)

    def check_consistency(self) -> None:
        """Every plan supports consistency learning."""

    def set_step(self, epoch: int, step: int) -> None:
        """Set the epoch and step of the next batch; a previous batch that doesn't precede it is discarded."""
        super().set_step(epoch, step)
        if epoch != self._previous_place[0] or step < self._previous_place[1]:
            self._previous = None

    def state_dict(self) -> dict[str, Any]:
        previous = None if self._previous is None else dict(vars(self._previous))
        return {**super().state_dict(), 'previous': previous, 'previous_place': self._previous_place,
                'rank': distributed_rank(self.rank)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state; the previous batch of another process is not used."""
        is_own = state['rank'] == distributed_rank(self.rank)
        self._previous = PreviousBatch(**state['previous']) if state['previous'] and is_own else None
        self._previous_place = tuple(state['previous_place'])
        super().load_state_dict(state)
