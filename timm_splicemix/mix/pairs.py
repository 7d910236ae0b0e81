""" Mixup, CutMix, ResizeMix and SpliceWith: each image is mixed with one partner, blended or in a box

The label of a mixed image is the mean of both labels, weighted by their parts of the image. It is unknown (-1) where a
label with a weight above 0 is unknown.
"""
from dataclasses import dataclass
from typing import Optional, Sequence

import torch

from ..errors import UsageError
from .base import (
    Batch,
    Mixer,
    Plan,
    check_alpha,
    check_choice,
    check_mixer_input,
    check_probability,
    check_sides,
    draw_beta,
    gather,
    gather_resized,
    is_channels_last,
)

# --- the plan and how it is applied ---


@dataclass(frozen=True, eq=False)
class PairPlan(Plan):
    """ All random choices of a batch whose images are mixed with partners.

    Args:
        kept: (K,) int64, indices of the regular images that stay in the batch, in this order.
        images: (N,) int64, indices of the images that are mixed; they follow the kept ones.
        partners: (N,) int64, index of the partner of each of them.
        blend: (N,) float64, weight of the image in the weighted sum with its partner, 1 where nothing is blended.
        boxes: (N, 4) float64, height and width of the box that shows the partner, relative to the image (0 for no
            box), then its position in [0, 1) along y and x.
        inside: If True, the position selects among the places where the whole box fits into the image; otherwise it is
            that of the centre, and the borders of the image clip the box.
        resized: If True, the box shows the whole partner, resized; otherwise the same region of the partner.
        batch_size: Number of images that the plan was drawn for; None skips this check.
    """
    images: torch.Tensor
    partners: torch.Tensor
    blend: torch.Tensor
    boxes: torch.Tensor
    inside: bool = False
    resized: bool = False
    batch_size: Optional[int] = None

    def __post_init__(self):
        size = self.num_mixed
        if self.partners.shape != (size,) or self.blend.shape != (size,) or self.boxes.shape != (size, 4):
            raise UsageError(
                f'Expected partners, blend and boxes for {size} images, but got shapes {tuple(self.partners.shape)}, '
                f'{tuple(self.blend.shape)} and {tuple(self.boxes.shape)}.')
        if self.resized and not _all_equal(self.boxes):
            raise UsageError('Expected one box for all images where partners are resized, but got several.')

    @classmethod
    def unmixed(cls, batch_size: int) -> 'PairPlan':
        """The plan that leaves a batch as it is."""
        everything = torch.arange(batch_size)
        none = torch.zeros(0, dtype=torch.float64)
        return cls(everything, everything[:0], everything[:0], none, none.view(0, 4), batch_size=batch_size)

    @property
    def num_mixed(self) -> int:
        return len(self.images)

    @property
    def num_regular(self) -> int:
        return len(self.kept) or self.num_mixed  # mixed images that replace all regular ones are the output

    def captions(self) -> list[str]:
        is_mixed = (self.blend < 1) | self.boxes[:, :2].all(dim=1)
        rows = zip(self.images.tolist(), self.partners.tolist(), is_mixed.tolist())
        return super().captions() + [f'#{image} + #{other}' if mixed else f'#{image}' for image, other, mixed in rows]

    def pixel_boxes(self, height: int, width: int) -> torch.Tensor:
        """The boxes in images of this size: (N, 4) int64, top, bottom (exclusive), left and right (exclusive)."""
        edges = []
        for side, place, length in zip(self.boxes[:, :2].T, self.boxes[:, 2:].T, (height, width)):
            cut = (side * length).floor()
            if self.inside:
                start = (place * (length - cut + 1)).floor()
                edges += [start, start + cut]
            else:
                centre = (place * length).floor()
                edges += [centre - (cut / 2).floor(), centre + ((cut + 1) / 2).floor()]
            edges[-2:] = [edge.clamp(0, length) for edge in edges[-2:]]
        return torch.stack(edges, dim=1).long()

    def weights(self, height: int, width: int) -> torch.Tensor:
        """(N,) float64, the weight of each image in its mixed image; the rest is that of its partner."""
        tops, bottoms, lefts, rights = self.pixel_boxes(height, width).double().unbind(dim=1)
        return self.blend * (1 - (bottoms - tops) * (rights - lefts) / (height * width))


def mix_pairs(
        images: torch.Tensor,
        targets: torch.Tensor,
        plan: PairPlan,
        others: Optional[Batch] = None,
        num_classes: Optional[int] = None,
) -> Batch:
    """ Mix images with their partners according to a plan.

    Args:
        images: (B, C, H, W), of a floating point type or uint8, contiguous or channels_last.
        targets: (B, classes) multi-hot, soft or with -1 for unknown, or (B,) integer classes.
        plan: Which image is mixed with which partner, and how.
        others: Images and targets that contain the partners, those of the batch if None.
        num_classes: Number of classes, required for integer targets, which become one-hot.

    Returns:
        The kept images followed by the mixed ones, and their targets, of a floating point type.
    """
    targets = check_mixer_input(images, targets, plan.batch_size, num_classes)
    if not targets.is_floating_point():
        targets = targets.float()
    kept = _pick(images, plan.kept), _pick(targets, plan.kept)
    if not plan.num_mixed:
        return kept
    other_images, other_targets = (images, targets) if others is None else others
    weights = plan.weights(*images.shape[2:])
    mixed_targets = soft_targets(_pick(targets, plan.images), _pick(other_targets, plan.partners), weights)
    mixed_images = _mix_images(images, other_images, plan)
    if not len(plan.kept):
        return mixed_images, mixed_targets
    return torch.cat([kept[0], mixed_images]), torch.cat([kept[1], mixed_targets])


def soft_targets(targets: torch.Tensor, others: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """ The weighted mean of two labels, unknown (-1) where a label with a weight above 0 is unknown.

    Args:
        targets: (N, classes), of a floating point type.
        others: (N, classes).
        weights: (N,), the weight of `targets`; that of `others` is 1 - weight.
    """
    weights = weights.to(targets.dtype).view(-1, 1).to(targets.device, non_blocking=True)
    mixed = targets * weights + others * (1 - weights)
    unknown = ((targets < 0) & (weights > 0)) | ((others < 0) & (weights < 1))
    return mixed.masked_fill(unknown, -1)


def _mix_images(images: torch.Tensor, others: torch.Tensor, plan: PairPlan) -> torch.Tensor:
    height, width = images.shape[2:]
    edges = plan.pixel_boxes(height, width)  # (N, 4)
    boxed = (edges[:, 1] > edges[:, 0]) & (edges[:, 3] > edges[:, 2])
    out = own = _pick(images, plan.images)
    if boxed.all() and _all_equal(edges):
        top, bottom, left, right = edges[0].tolist()
        partners = plan.partners.to(images.device, non_blocking=True)
        if plan.resized:
            filling = gather_resized(others, partners, bottom - top, right - left)
        else:
            filling = others[:, :, top:bottom, left:right].index_select(0, partners)
        out = own.clone() if own is images else own
        out[:, :, top:bottom, left:right] = filling
    elif boxed.any():
        rows = boxed.nonzero().view(-1)
        mask = _box_mask(edges[rows], height, width, images.device)
        out = _replace(own, rows, torch.where(mask, _pick(others, plan.partners[rows]), _pick(own, rows)))
    rows = (plan.blend < 1).nonzero().view(-1)
    if len(rows):
        partners = plan.partners[rows].to(images.device, non_blocking=True)
        blended = _blend(_pick(out, rows), gather(others, partners, is_channels_last(others)), plan.blend[rows])
        out = _replace(out, rows, blended)
    return out


def _blend(images: torch.Tensor, others: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum of `images` and `others`; it may be stored in `others`."""
    if images.dtype == torch.uint8:
        return _blend(images.float(), others.float(), weights).round_().to(torch.uint8)
    if _all_equal(weights):
        return others.lerp_(images, float(weights[0]))
    return others.lerp_(images, weights.to(images.dtype).view(-1, 1, 1, 1).to(images.device, non_blocking=True))


def _box_mask(edges: torch.Tensor, height: int, width: int, device: torch.device) -> torch.Tensor:
    """(N, 1, H, W) bool, True inside each box."""
    tops, bottoms, lefts, rights = edges.to(device, non_blocking=True).view(-1, 4, 1, 1, 1).unbind(dim=1)
    y, x = torch.arange(height, device=device).view(-1, 1), torch.arange(width, device=device)
    return ((y >= tops) & (y < bottoms)) & ((x >= lefts) & (x < rights))


def _all_equal(rows: torch.Tensor) -> bool:
    return bool((rows == rows[:1]).all())


def _pick(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """values[index], without a copy if the index is that of all values in their order."""
    if len(index) == len(values) and torch.equal(index, torch.arange(len(values))):
        return values
    index = index.to(values.device, non_blocking=True)
    if values.ndim == 4:
        return gather(values, index, is_channels_last(values))
    return values.index_select(0, index)


def _replace(images: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A copy of `images` with some rows replaced by `values`, or `values` if these are all rows."""
    if len(rows) == len(images):
        return values
    return images.clone().index_copy_(0, rows.to(images.device, non_blocking=True), values)


# --- the mixers ---


class PairMixer(Mixer):
    """A mixer whose plans are `PairPlan`s."""

    def apply(self, images: torch.Tensor, targets: torch.Tensor, plan: PairPlan) -> Batch:
        return mix_pairs(images, targets, plan, num_classes=self.num_classes)


class Mixup(PairMixer):
    """ Mix each image with another of the batch, by Mixup (blend both) or CutMix (show the other in a box).

        mixer = Mixup(mixup_alpha=0.2, cutmix_alpha=1.)
        images, targets = mixer(images, targets)

    Names and meanings are those of timm's `Mixup`: image i is mixed with image B - 1 - i. In a batch of odd size, the
    image in the middle is mixed with the first one, or stays unmixed with mode 'pair'. Labels are weighted by the
    visible parts of their images; an unknown label (-1) makes the mixed label unknown.

    Args:
        mixup_alpha: The weights of Mixup are drawn from Beta(alpha, alpha); 0 switches Mixup off.
        cutmix_alpha: The areas of CutMix are drawn from Beta(alpha, alpha); 0 switches CutMix off.
        cutmix_minmax: Smallest and largest side of the box of CutMix, relative to the image, instead of `cutmix_alpha`.
        prob: Probability of mixing the batch, pair or image.
        switch_prob: Probability of CutMix if both are on.
        mode: Draw once per 'batch', per 'pair' of images or per image ('elem').
        num_classes, seed, rank: See `Mixer`.
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
        self.cutmix_minmax = None
        if cutmix_minmax is not None:
            self.cutmix_minmax = check_sides('cutmix_minmax', cutmix_minmax)
            self.cutmix_alpha = self.cutmix_alpha or 1.
        if not self.mixup_alpha and not self.cutmix_alpha:
            raise UsageError('Expected mixup_alpha or cutmix_alpha above 0, or cutmix_minmax, but got none of them.')
        self.prob = check_probability('prob', prob)
        self.switch_prob = check_probability('switch_prob', switch_prob)
        self.mode = check_choice('mode', mode, self.MODES)

    def plan(self, batch_size: int) -> PairPlan:
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
        if self.mode == 'pair':  # the image in the middle has no partner
            blend = torch.cat([blend, blend.new_ones(1)])
            boxes = torch.cat([boxes, boxes.new_zeros(1, 4)])
        elif batch_size % 2:
            partners[batch_size // 2] = 0
        group = {'batch': torch.zeros_like(everything), 'pair': torch.minimum(everything, partners),
                 'elem': everything}[self.mode]
        return PairPlan(
            everything[:0], everything, partners, blend[group], boxes[group],
            inside=self.cutmix_minmax is not None, batch_size=batch_size)

    def _draw(self, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw (count,) weights for blending, 1 for CutMix, and (count, 4) boxes, 0 for Mixup."""
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
    """ Append images mixed by Mixup or CutMix to the batch, as SpliceMix appends grids.

    The paper's (32, 8) is a batch of 32 with a ratio of 0.25, its (20, 20) a batch of 20 with a ratio of 1. Each image
    of the batch is mixed once before any is mixed twice.

    Args:
        kind: 'mixup' or 'cutmix'.
        ratio: Number of mixed images as a fraction of the batch size.
        alpha: Weights or areas are drawn from Beta(alpha, alpha).
        cutmix_minmax: Smallest and largest side of the box of CutMix, relative to the image, instead of `alpha`.
        prob: Probability of mixing a batch.
        mode: Draw once per 'batch' or per mixed image ('elem').
        num_classes, seed, rank: See `Mixer`.
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
        check_choice('kind', kind, self.KINDS)
        if kind == 'mixup' and cutmix_minmax is not None:
            raise UsageError(f"Expected cutmix_minmax with kind 'cutmix' only, but got {cutmix_minmax} with 'mixup'.")
        alpha = check_alpha('alpha', alpha)
        super().__init__(
            mixup_alpha=alpha if kind == 'mixup' else 0., cutmix_alpha=alpha if kind == 'cutmix' else 0.,
            cutmix_minmax=cutmix_minmax, prob=prob, mode=mode, num_classes=num_classes, seed=seed, rank=rank)
        self.kind = kind
        self.ratio = check_alpha('ratio', ratio)

    def plan(self, batch_size: int) -> PairPlan:
        generator = self._next_generator(batch_size)
        is_mixed = float(torch.rand((), generator=generator)) < self.prob
        count = int(self.ratio * batch_size + 1e-6)  # 0.29 * 100 is 29
        if not self.mixup_enabled or not is_mixed or not count or batch_size == 1:
            return PairPlan.unmixed(batch_size)
        images, partners = [], []
        for _ in range(0, count, batch_size):
            order = torch.randperm(batch_size, generator=generator)
            images.append(order)
            partners.append(order.roll(batch_size // 2))  # no image is its own partner
        blend, boxes = self._draw(count if self.mode == 'elem' else 1, generator)
        return PairPlan(
            torch.arange(batch_size), torch.cat(images)[:count], torch.cat(partners)[:count],
            blend.expand(count).clone(), boxes.expand(count, 4).clone(),
            inside=self.cutmix_minmax is not None, batch_size=batch_size)


class ResizeMix(PairMixer):
    """ Show another image of the batch, resized, in a box of each image.

    The box and the order of the partners are drawn once per batch. The centre of the box is anywhere in the image; the
    partner is resized to the part of the box inside the image, bilinearly with aligned corners.

    Args:
        alpha: The side of the box, relative to the image, is drawn from Beta(alpha, alpha) scaled to `scale`; the
            paper's 1 is the uniform distribution.
        scale: Smallest and largest side.
        prob: Probability of mixing a batch.
        num_classes, seed, rank: See `Mixer`.
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
        self.alpha = check_alpha('alpha', alpha)
        self.scale = check_sides('scale', scale)
        self.prob = check_probability('prob', prob)

    def plan(self, batch_size: int) -> PairPlan:
        generator = self._next_generator(batch_size)
        is_mixed = float(torch.rand((), generator=generator)) < self.prob
        if not self.mixup_enabled or not is_mixed or batch_size == 1:
            return PairPlan.unmixed(batch_size)
        order = torch.randperm(batch_size, generator=generator)
        partners = torch.empty_like(order)
        partners[order] = order.roll(1)  # a single cycle through all images: no image is its own partner
        place = torch.rand(2, generator=generator).double()
        low, high = self.scale
        side = low + (high - low) * draw_beta(self.alpha, 1, generator)
        box = torch.cat([side, side, place]).expand(batch_size, 4)
        everything = torch.arange(batch_size)
        return PairPlan(
            everything[:0], everything, partners, torch.ones(batch_size, dtype=torch.float64), box, resized=True,
            batch_size=batch_size)
