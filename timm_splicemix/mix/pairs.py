""" Images mixed with one partner each: blended, or shown in a box

The label of a mixed image is the weighted mean of both labels, each weighted by its part of the image. Where a label
with any weight is unknown (-1), so is the result: the mean of what is known and what is not can't be told.
"""
from dataclasses import dataclass
from typing import Optional

import torch

from .splicemix import _check_batch, _gather, _gather_small, _is_channels_last, _one_hot

__all__ = ['PairPlan', 'mix_pairs', 'soft_targets']

UNBOXED = (0., 0., 0., 0.)


@dataclass(frozen=True, eq=False)
class PairPlan:
    """ Everything that is random about a batch whose images are mixed with partners; lives on the CPU.

    Args:
        kept: (K,) int64, the regular images that stay in the batch, in their order.
        images: (N,) int64, the images that are mixed; they follow the kept ones.
        partners: (N,) int64, the image that each of them is mixed with.
        blend: (N,) float64, the weight that an image has of the sum of both, 1 where nothing is blended.
        boxes: (N, 4) float64, height and width of the box that shows the partner, as parts of the image's (0 for no
            box), then where it is, in [0, 1) along y and x.
        inside: The place is that of the box among those where it fits; else of its centre, and borders cut the box.
        resized: The box shows the partner as a whole, made smaller; else what the partner has in the same place.
        batch_size: Number of images that the plan is for, None for any that has those it names.
    """
    kept: torch.Tensor
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
            raise ValueError(
                f'Expected partners, blend and boxes for {size} images, but got shapes {tuple(self.partners.shape)}, '
                f'{tuple(self.blend.shape)} and {tuple(self.boxes.shape)}.')
        if self.resized and not _all_equal(self.boxes):
            raise ValueError('Expected one box for all images where partners are resized, but got several.')

    @classmethod
    def unmixed(cls, batch_size: int) -> 'PairPlan':
        """A plan that leaves a batch as it is."""
        everything = torch.arange(batch_size)
        none = torch.zeros(0, dtype=torch.float64)
        return cls(everything, everything[:0], everything[:0], none, none.view(0, 4), batch_size=batch_size)

    @property
    def num_mixed(self) -> int:
        return len(self.images)

    def pixel_boxes(self, height: int, width: int) -> torch.Tensor:
        """ Where the boxes are in images of a size.

        Returns:
            (N, 4) int64: top, bottom, left and right, the latter of both exclusive.
        """
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
        """ What part of each mixed image is its own and not its partner's.

        Returns:
            (N,) float64.
        """
        tops, bottoms, lefts, rights = self.pixel_boxes(height, width).double().unbind(dim=1)
        return self.blend * (1 - (bottoms - tops) * (rights - lefts) / (height * width))


def _all_equal(rows: torch.Tensor) -> bool:
    return bool((rows == rows[:1]).all())


def _pick(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """values[index], which is `values` itself if all of them are picked in their order."""
    if len(index) == len(values) and torch.equal(index, torch.arange(len(values))):
        return values
    index = index.to(values.device, non_blocking=True)
    if values.ndim == 4:
        return _gather(values, index, _is_channels_last(values))
    return values.index_select(0, index)


def _blend(images: torch.Tensor, others: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The sum of `images`, weighted, and `others`, which it may be written to."""
    if images.dtype == torch.uint8:
        return _blend(images.float(), others.float(), weights).round_().to(torch.uint8)
    if _all_equal(weights):
        return others.lerp_(images, float(weights[0]))
    return others.lerp_(images, weights.to(images.dtype).view(-1, 1, 1, 1).to(images.device, non_blocking=True))


def _is_in_box(edges: torch.Tensor, height: int, width: int, device: torch.device) -> torch.Tensor:
    """(N, 1, H, W) bool: the pixels of each box."""
    tops, bottoms, lefts, rights = edges.to(device, non_blocking=True).view(-1, 4, 1, 1, 1).unbind(dim=1)
    y, x = torch.arange(height, device=device).view(-1, 1), torch.arange(width, device=device)
    return ((y >= tops) & (y < bottoms)) & ((x >= lefts) & (x < rights))


def _mix_images(images: torch.Tensor, others: torch.Tensor, plan: PairPlan) -> torch.Tensor:
    height, width = images.shape[2:]
    edges = plan.pixel_boxes(height, width)  # (N, 4)
    boxed = (edges[:, 1] > edges[:, 0]) & (edges[:, 3] > edges[:, 2])
    out = own = _pick(images, plan.images)
    if boxed.all() and _all_equal(edges):
        top, bottom, left, right = edges[0].tolist()
        partners = plan.partners.to(images.device, non_blocking=True)
        if plan.resized:
            filling = _gather_small(others, partners, bottom - top, right - left, None)
        else:
            filling = others[:, :, top:bottom, left:right].index_select(0, partners)
        out = own.clone() if own is images else own
        out[:, :, top:bottom, left:right] = filling
    elif boxed.any():
        rows = boxed.nonzero().view(-1)
        mask = _is_in_box(edges[rows], height, width, images.device)
        out = _put(own, rows, torch.where(mask, _pick(others, plan.partners[rows]), _pick(own, rows)))
    rows = (plan.blend < 1).nonzero().view(-1)
    if len(rows):
        partners = plan.partners[rows].to(images.device, non_blocking=True)
        fresh = _gather(others, partners, _is_channels_last(others))
        out = _put(out, rows, _blend(_pick(out, rows), fresh, plan.blend[rows]))
    return out


def _put(images: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`images` with some rows replaced."""
    if len(rows) == len(images):
        return values
    return images.clone().index_copy_(0, rows.to(images.device, non_blocking=True), values)


def soft_targets(targets: torch.Tensor, others: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """ The weighted mean of two labels, unknown (-1) where a label with any weight is unknown.

    Args:
        targets: (N, classes), of a floating point type.
        others: (N, classes).
        weights: (N,), the weight of `targets`; that of `others` is the rest.
    """
    weights = weights.to(targets.dtype).view(-1, 1).to(targets.device, non_blocking=True)
    mixed = targets * weights + others * (1 - weights)
    unknown = ((targets < 0) & (weights > 0)) | ((others < 0) & (weights < 1))
    return mixed.masked_fill(unknown, -1)


def mix_pairs(
        images: torch.Tensor,
        targets: torch.Tensor,
        plan: PairPlan,
        others: Optional[tuple[torch.Tensor, torch.Tensor]] = None,
        num_classes: Optional[int] = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """ Mix images with partners as planned; a pure function.

    Args:
        images: (B, C, H, W), of a floating point type or uint8, contiguous or channels_last.
        targets: (B, classes) multi-hot, soft or with -1 for unknown, or (B,) integer classes.
        plan: Which image is mixed with which, and how.
        others: Images and targets that the plan's partners are among, those of the batch if None.
        num_classes: Number of classes, needed for integer targets, which become one-hot.

    Returns:
        The kept images followed by the mixed ones, and their targets, of a floating point type.
    """
    if targets.ndim == 1 and not targets.is_floating_point():
        if num_classes is None:
            raise ValueError('Expected num_classes to be given for integer targets, but got None.')
        targets = _one_hot(targets, num_classes)
    _check_batch(images, targets)
    if num_classes is not None and targets.shape[1] != num_classes:
        raise ValueError(f'Expected targets of {num_classes} classes, but got {targets.shape[1]}.')
    if plan.batch_size not in (None, len(images)):
        raise ValueError(f'Expected a plan for {len(images)} images, but got one for {plan.batch_size}.')
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
