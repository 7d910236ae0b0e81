""" Mixup and CutMix as in timm, for any batch size and for labels of several classes """
from typing import Optional, Sequence

import torch

from .drawing import Mixer, check_alpha, draw_beta
from .pairs import UNBOXED, PairPlan, mix_pairs
from .splicemix import _check_probability

__all__ = ['Mixup', 'SpliceWith']


class Mixup(Mixer):
    """ Mix each image with another of the batch, by Mixup (blend both) or CutMix (a box shows the other).

        mixer = Mixup(mixup_alpha=0.2, cutmix_alpha=1.)
        images, targets = mixer(images, targets)

    Names and meanings are those of timm's `Mixup`: image i is mixed with image B - 1 - i. In a batch of an odd size,
    the image in the middle is mixed with the first one, or, by pairs, left alone. The weights of labels are those of
    what is seen; unknown labels (-1) make the mixed label unknown.

    Args:
        mixup_alpha: Weights of Mixup are drawn from Beta(alpha, alpha); 0 for no Mixup.
        cutmix_alpha: Areas of CutMix are drawn from Beta(alpha, alpha); 0 for no CutMix.
        cutmix_minmax: Smallest and largest side of CutMix's box, as parts of the image's, instead of `cutmix_alpha`.
        prob: Probability of mixing the batch, pair or image.
        switch_prob: Probability of CutMix where both are on.
        mode: Draw once per 'batch', for each 'pair' of images or for each image ('elem').
        num_classes: Number of classes, needed for integer targets, which become one-hot.
        seed: Seed of everything that is drawn.
        rank: Rank of this process, that of `torch.distributed` if None.
    """
    MODES = ('batch', 'pair', 'elem')

    def __init__(
            self,
            mixup_alpha: float = 1.,
            cutmix_alpha: float = 0.,
            cutmix_minmax: Optional[Sequence[float]] = None,
            prob: float = 1.0,
            switch_prob: float = 0.5,
            mode: str = 'batch',
            num_classes: Optional[int] = None,
            seed: int = 0,
            rank: Optional[int] = None,
    ):
        super().__init__(num_classes, seed, rank)
        self.mixup_alpha = check_alpha('mixup_alpha', mixup_alpha, positive=False)
        self.cutmix_alpha = check_alpha('cutmix_alpha', cutmix_alpha, positive=False)
        if cutmix_minmax is not None:
            if len(cutmix_minmax) != 2 or not 0 <= cutmix_minmax[0] <= cutmix_minmax[1] <= 1:
                raise ValueError(
                    'Expected cutmix_minmax to be the smallest and the largest side, from 0 to 1, '
                    f'but got {cutmix_minmax}.')
            self.cutmix_alpha = self.cutmix_alpha or 1.
        if not self.mixup_alpha and not self.cutmix_alpha:
            raise ValueError('Expected mixup_alpha or cutmix_alpha above 0, or cutmix_minmax, but got none of them.')
        if mode not in self.MODES:
            raise ValueError(f'Expected mode to be one of {", ".join(self.MODES)}, but got {mode!r}.')
        self.cutmix_minmax = None if cutmix_minmax is None else tuple(cutmix_minmax)
        self.prob = _check_probability('prob', prob)
        self.switch_prob = _check_probability('switch_prob', switch_prob)
        self.mode = mode

    def plan(self, batch_size: int) -> PairPlan:
        """ Draw how the next batch is mixed, and move on to the step after it.

        Args:
            batch_size: Number of images.
        """
        generator = self._next_generator(batch_size)
        groups = {'batch': 1, 'pair': batch_size // 2, 'elem': batch_size}[self.mode]
        is_mixed = torch.rand(groups, generator=generator) < self.prob
        if not self.mixup_enabled or batch_size == 1 or not is_mixed.any():
            return PairPlan.unmixed(batch_size)
        blend, boxes = self._draw(groups, generator)
        blend = torch.where(is_mixed, blend, 1.)
        boxes = boxes * is_mixed.view(-1, 1)
        everything = torch.arange(batch_size)
        partners = everything.flip(0)
        middle = batch_size // 2
        if self.mode == 'pair':
            blend = torch.cat([blend, blend.new_ones(1)])  # of the image in the middle
            boxes = torch.cat([boxes, boxes.new_tensor([UNBOXED])])
        elif batch_size % 2:
            partners[middle] = 0
        group = {'batch': torch.zeros_like(everything), 'pair': torch.minimum(everything, partners),
                 'elem': everything}[self.mode]
        return PairPlan(
            everything[:0], everything, partners, blend[group], boxes[group],
            inside=self.cutmix_minmax is not None, batch_size=batch_size)

    def apply(self, images: torch.Tensor, targets: torch.Tensor, plan: PairPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """ Mix a batch as planned.

        Args:
            images: (B, C, H, W).
            targets: (B, classes) multi-hot, soft or with -1 for unknown, or (B,) integer classes.
            plan: What `plan(B)` returned.
        """
        return mix_pairs(images, targets, plan, num_classes=self.num_classes)

    def _draw(self, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw (count,) weights to blend with, 1 for CutMix, and (count, 4) boxes, empty for Mixup."""
        switch_prob = self.switch_prob if self.mixup_alpha and self.cutmix_alpha else float(self.cutmix_alpha > 0)
        is_cutmix = torch.rand(count, generator=generator) < switch_prob
        places = torch.rand(count, 2, generator=generator).double()
        blend = torch.ones(count, dtype=torch.float64)
        sides = torch.zeros(count, 2, dtype=torch.float64)
        if self.mixup_alpha:
            blend = torch.where(is_cutmix, blend, draw_beta(self.mixup_alpha, count, generator))
        if self.cutmix_minmax is not None:
            low, high = self.cutmix_minmax
            sides = low + (high - low) * torch.rand(count, 2, generator=generator).double()
        elif self.cutmix_alpha:
            sides = (1 - draw_beta(self.cutmix_alpha, count, generator)).sqrt().view(-1, 1).expand(-1, 2)
        return blend, torch.cat([sides, places], dim=1) * is_cutmix.view(-1, 1)


class SpliceWith(Mixup):
    """ Append images of Mixup or CutMix to the batch, as SpliceMix appends grids.

    The paper's (32, 8) is a batch of 32 with a ratio of 0.25, its (20, 20) a batch of 20 with a ratio of 1. Each image
    of the batch is mixed once, with another, before any is mixed twice.

    Args:
        kind: 'mixup' or 'cutmix'.
        ratio: Number of mixed images as a part of the batch size.
        alpha: Weights or areas are drawn from Beta(alpha, alpha).
        cutmix_minmax: Smallest and largest side of CutMix's box, as parts of the image's, instead of `alpha`.
        prob: Probability of mixing a batch at all.
        mode: Draw once per 'batch' or for each mixed image ('elem').
        num_classes: Number of classes, needed for integer targets, which become one-hot.
        seed: Seed of everything that is drawn.
        rank: Rank of this process, that of `torch.distributed` if None.
    """
    KINDS = ('mixup', 'cutmix')
    MODES = ('batch', 'elem')

    def __init__(
            self,
            kind: str,
            ratio: float = 0.25,
            alpha: float = 1.,
            cutmix_minmax: Optional[Sequence[float]] = None,
            prob: float = 1.0,
            mode: str = 'batch',
            num_classes: Optional[int] = None,
            seed: int = 0,
            rank: Optional[int] = None,
    ):
        if kind not in self.KINDS:
            raise ValueError(f'Expected kind to be one of {", ".join(self.KINDS)}, but got {kind!r}.')
        if kind == 'mixup' and cutmix_minmax is not None:
            raise ValueError(f"Expected cutmix_minmax with kind 'cutmix' only, but got {cutmix_minmax} with 'mixup'.")
        alpha = check_alpha('alpha', alpha)
        super().__init__(
            mixup_alpha=alpha if kind == 'mixup' else 0., cutmix_alpha=alpha if kind == 'cutmix' else 0.,
            cutmix_minmax=cutmix_minmax, prob=prob, mode=mode, num_classes=num_classes, seed=seed, rank=rank)
        self.kind = kind
        self.ratio = check_alpha('ratio', ratio)

    def plan(self, batch_size: int) -> PairPlan:
        """ Draw how the next batch is mixed, and move on to the step after it.

        Args:
            batch_size: Number of regular images.
        """
        generator = self._next_generator(batch_size)
        is_mixed = float(torch.rand((), generator=generator)) < self.prob
        count = int(self.ratio * batch_size + 1e-6)  # 0.29 * 100 is 29
        if not self.mixup_enabled or not is_mixed or not count or batch_size == 1:
            return PairPlan.unmixed(batch_size)
        images, partners = [], []
        for _ in range(0, count, batch_size):
            order = torch.randperm(batch_size, generator=generator)
            images.append(order)
            partners.append(order.roll(batch_size // 2))  # no image's partner is itself
        groups = count if self.mode == 'elem' else 1
        blend, boxes = self._draw(groups, generator)
        return PairPlan(
            torch.arange(batch_size), torch.cat(images)[:count], torch.cat(partners)[:count],
            blend.expand(count).clone(), boxes.expand(count, 4).clone(),
            inside=self.cutmix_minmax is not None, batch_size=batch_size)
