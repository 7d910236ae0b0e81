""" ResizeMix: another image of the batch, made smaller, in a box """
from typing import Optional, Sequence

import torch

from .drawing import Mixer, check_alpha, draw_beta
from .pairs import PairPlan, mix_pairs
from .splicemix import _check_probability

__all__ = ['ResizeMix']


class ResizeMix(Mixer):
    """ Show in a box of each image another image of the batch as a whole.

    Box and order of the partners are drawn once per batch. The centre of the box is anywhere in the image; what the
    borders leave of the box is what the partner is resized to, bilinearly with aligned corners.

    Args:
        alpha: The box's side, as a part of the image's, is drawn from Beta(alpha, alpha) scaled to `scale`; the 1 of
            the paper draws it uniformly.
        scale: Smallest and largest side.
        prob: Probability of mixing a batch.
        num_classes: Number of classes, needed for integer targets, which become one-hot.
        seed: Seed of everything that is drawn.
        rank: Rank of this process, that of `torch.distributed` if None.
    """

    def __init__(
            self,
            alpha: float = 1.,
            scale: Sequence[float] = (0.1, 0.8),
            prob: float = 1.0,
            num_classes: Optional[int] = None,
            seed: int = 0,
            rank: Optional[int] = None,
    ):
        super().__init__(num_classes, seed, rank)
        if len(scale) != 2 or not 0 <= scale[0] <= scale[1] <= 1:
            raise ValueError(f'Expected scale to be the smallest and the largest side, from 0 to 1, but got {scale}.')
        self.alpha = check_alpha('alpha', alpha)
        self.scale = tuple(scale)
        self.prob = _check_probability('prob', prob)

    def plan(self, batch_size: int) -> PairPlan:
        """ Draw how the next batch is mixed, and move on to the step after it.

        Args:
            batch_size: Number of images.
        """
        generator = self._next_generator(batch_size)
        is_mixed = float(torch.rand((), generator=generator)) < self.prob
        if not self.mixup_enabled or not is_mixed or batch_size == 1:
            return PairPlan.unmixed(batch_size)
        order = torch.randperm(batch_size, generator=generator)
        partners = torch.empty_like(order)
        partners[order] = order.roll(1)  # one ring through all images: no image's partner is itself
        place = torch.rand(2, generator=generator).double()
        low, high = self.scale
        side = low + (high - low) * draw_beta(self.alpha, 1, generator)
        box = torch.cat([side, side, place]).expand(batch_size, 4)
        everything = torch.arange(batch_size)
        return PairPlan(
            everything[:0], everything, partners, torch.ones(batch_size, dtype=torch.float64), box, resized=True,
            batch_size=batch_size)

    def apply(self, images: torch.Tensor, targets: torch.Tensor, plan: PairPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """ Mix a batch as planned.

        Args:
            images: (B, C, H, W).
            targets: (B, classes) multi-hot, soft or with -1 for unknown, or (B,) integer classes.
            plan: What `plan(B)` returned.
        """
        return mix_pairs(images, targets, plan, num_classes=self.num_classes)
