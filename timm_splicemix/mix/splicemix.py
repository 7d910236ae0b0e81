""" SpliceMix: grids of downsampled images of the batch, spliced to the batch

A mixed image is an r x c grid of downsampled images of the batch, its label is the union of theirs. Everything random
is drawn first, into a `MixPlan` of `SpliceRecord`s that can be printed, stored and replayed; applying a plan is a pure
function.
"""
import math
from numbers import Real
from typing import Optional, Sequence, Union

import torch
import torch.nn.functional as F

from ..errors import UsageError
from .base import Mixer
from .grid import Grid, parse_grids
from .record import (
    MixPlan,
    SpliceRecord,
    deal_sources,
    draw_dropped,
    sample_record,
)

__all__ = ['Grid', 'MixPlan', 'SpliceMix', 'SpliceRecord', 'parse_grids', 'sample_record', 'splice', 'split_cells']


def _check_batch(images: torch.Tensor, targets: torch.Tensor) -> None:
    if images.ndim != 4:
        raise UsageError(f'Expected images of shape (B, C, H, W), but got {tuple(images.shape)}.')
    if not images.is_floating_point() and images.dtype != torch.uint8:
        raise UsageError(f'Expected images of a floating point type or uint8, but got {images.dtype}.')
    if targets.ndim != 2:
        raise UsageError(f'Expected targets of shape (B, classes), but got {tuple(targets.shape)}.')
    if len(targets) != len(images):
        raise UsageError(
            f'Expected as many targets as images, but got {len(targets)} targets for {len(images)} images.')
    if targets.device != images.device:
        raise UsageError(
            f'Expected images and targets on one device, but got {images.device} and {targets.device}.')
    if targets.device.type == 'cpu' and targets.dtype != torch.bool:  # looking at a GPU's values would wait for it
        valid = (targets.clamp(0, 1) == targets) | (targets == -1)
        if not valid.all():
            raise UsageError(
                'Expected targets in [0, 1], or -1 for unknown, '
                f'but got {targets[~valid][0].item()}: are these logits, counts or class indices?')


def _check_record(record: SpliceRecord, images: torch.Tensor) -> None:
    num_images, _, height, width = images.shape
    if height < record.grid.rows or width < record.grid.cols:
        raise UsageError(
            f'Expected images with a pixel for each cell of a {record.grid} grid, but got {height} x {width} pixels.')
    if record.num_mixed and not 0 <= int(record.sources.min()) <= int(record.sources.max()) < num_images:
        raise UsageError(
            f'Expected sources among the {num_images} images of the batch, '
            f'but got {int(record.sources.min())} to {int(record.sources.max())}.')


def _fill_value(fill: Union[float, Sequence[float]], images: torch.Tensor) -> torch.Tensor:
    """The value of a dropped cell as a tensor that broadcasts over (M, C, h, w)."""
    values = [fill] if isinstance(fill, Real) else list(fill)
    if len(values) not in (1, images.shape[1]):
        raise UsageError(
            f'Expected fill to be one number or {images.shape[1]}, one for each channel, but got {len(values)}.')
    if images.dtype == torch.uint8:
        if not all(0 <= value <= 255 for value in values):
            raise UsageError(f'Expected fill from 0 to 255 for uint8 images, but got {fill}.')
        values = [round(value) for value in values]
    return torch.tensor(values, dtype=images.dtype).view(1, -1, 1, 1).to(images.device, non_blocking=True)


def _edges(length: int, parts: int) -> list[int]:
    """Where `parts` cells that tile `length` pixels begin and end; their sizes differ by at most one pixel."""
    return [i * length // parts for i in range(parts + 1)]


def _is_channels_last(images: torch.Tensor) -> bool:
    return not images.is_contiguous() and images.is_contiguous(memory_format=torch.channels_last)


def _resize(images: torch.Tensor, height: int, width: int) -> torch.Tensor:
    return F.interpolate(images, size=(height, width), mode='bilinear', align_corners=True)


def _flat(images: torch.Tensor) -> torch.Tensor:
    """The memory of dense images as one row, without a copy."""
    return (images.permute(0, 2, 3, 1) if _is_channels_last(images) else images).view(-1)


def _gather(
        images: torch.Tensor,
        index: torch.Tensor,
        channels_last: bool,
        scratch: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """images[index] in the given memory format, held by `scratch` if there is one."""
    view = images.permute(0, 2, 3, 1) if channels_last else images
    shape = (len(index), *view.shape[1:])
    out = None if scratch is None else scratch[:math.prod(shape)].view(shape)
    picked = torch.index_select(view, 0, index, out=out)
    return picked.permute(0, 3, 1, 2) if channels_last else picked


def _gather_small(
        images: torch.Tensor,
        index: torch.Tensor,
        height: int,
        width: int,
        scratch: Optional[torch.Tensor],
) -> torch.Tensor:
    """ images[index], resized bilinearly with aligned corners.

    The ways on the CPU differ in speed alone, by up to four times, as long as values are finite. torch resizes floating
    point images of up to three channels, and all uint8 images, with the same arithmetic in both memory formats, but
    with one thread faster in channels_last (and fails on contiguous uint8 images that shrink to one pixel); where rows
    keep their places, resizing along them is all there is to do.
    """
    on_cpu = images.device.type == 'cpu'
    if not on_cpu or _is_channels_last(images) or images.shape[1] > 3:
        picked = _gather(images, index, _is_channels_last(images), scratch)
    elif images.dtype == torch.float32 and height == images.shape[2]:
        rows = _gather(images, index, False, scratch).flatten(0, 1)  # (M * C, H, W)
        return F.interpolate(rows, size=width, mode='linear', align_corners=True).unflatten(0, (len(index), -1))
    elif images.dtype == torch.uint8:
        planes = _gather(images, index, False, scratch).unbind(1)  # interleaving them is faster than gathering so
        picked = torch.stack(planes, dim=-1).permute(0, 3, 1, 2)
    else:
        picked = _gather(images, index, torch.get_num_threads() == 1, scratch)
    if picked.dtype == torch.uint8 and not on_cpu:  # only the CPU interpolates integers
        return _resize(picked.float(), height, width).round_().to(torch.uint8)
    return _resize(picked, height, width)


def _union(targets: torch.Tensor, dropped: torch.Tensor) -> torch.Tensor:
    """ The labels of mixed images: present if present in a cell, unknown if no cell has it and one may.

    Args:
        targets: (M, cells, classes).
        dropped: (M, cells) bool, the cells that don't count.
    """
    targets = targets.masked_fill(dropped.unsqueeze(-1), 0)
    highest, lowest = targets.amax(dim=1), targets.amin(dim=1)  # (M, classes)
    return torch.where(highest > 0, highest, lowest)


def splice(
        images: torch.Tensor,
        targets: torch.Tensor,
        record: SpliceRecord,
        *,
        out: Optional[torch.Tensor] = None,
        fill: Union[float, Sequence[float]] = 0.,
) -> tuple[torch.Tensor, torch.Tensor]:
    """ Make the mixed images and targets of a record.

    The cells tile the image exactly, whatever its size; each shows the whole source image, resized bilinearly with
    aligned corners.

    Args:
        images: (B, C, H, W), of a floating point type or uint8, contiguous or channels_last.
        targets: (B, classes), multi-hot with -1 for unknown, or soft.
        record: Which image fills which cell.
        out: Where to write the mixed images, (M, C, H, W), not to share memory with `images`; a new tensor if None.
        fill: Value of a dropped cell, one for all channels or one for each. 0 is the mean colour of normalised images.

    Returns:
        Mixed images (M, C, H, W) and mixed targets (M, classes), where a class has the highest value of the cells in
        sight, or -1 if none has it but it is unknown in one.
    """
    _check_batch(images, targets)
    shape = (record.num_mixed, *images.shape[1:])
    if out is None:
        out = _empty(images, record.num_mixed)
    elif out.shape != shape or out.dtype != images.dtype or out.device != images.device:
        raise UsageError(
            f'Expected out of shape {shape}, {images.dtype} on {images.device}, '
            f'but got {tuple(out.shape)}, {out.dtype} on {out.device}.')
    return out, _splice_into(out, images, targets, record, fill)


def _splice_into(
        out: torch.Tensor,
        images: torch.Tensor,
        targets: torch.Tensor,
        record: SpliceRecord,
        fill: Union[float, Sequence[float]],
        scratch: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """ Write the mixed images of a record to `out` and return their targets.

    Args:
        scratch: Memory for at least M * C * H * W values that saves allocating as much for each cell. Where it is
            enough for all cells of a row, and these are of one size, they are made together, which is faster.
    """
    _check_record(record, images)
    if images.requires_grad:
        scratch = None  # torch differentiates through no given output
    grid = record.grid
    fill_value = _fill_value(fill, images)
    any_dropped = record.dropped.any(dim=0).tolist()
    sources = record.sources.to(images.device, non_blocking=True)
    dropped = record.dropped.to(images.device, non_blocking=True)
    tops, lefts = _edges(images.shape[2], grid.rows), _edges(images.shape[3], grid.cols)
    together = 1
    several_threads = images.device.type == 'cpu' and torch.get_num_threads() > 1  # they share one cell better
    if scratch is not None and images.shape[3] % grid.cols == 0 and not several_threads:
        together = grid.cols if scratch.numel() >= grid.cols * out.numel() else 1
    for first in range(0, grid.cells, together):
        row, col = divmod(first, grid.cols)
        cells = slice(first, first + together)
        place = out[:, :, tops[row]:tops[row + 1], lefts[col]:lefts[col + together]]
        place = place.unflatten(3, (together, -1))  # (M, C, h, cells, w)
        filling = _gather_small(images, sources[:, cells].flatten(), place.shape[2], place.shape[4], scratch)
        if any(any_dropped[cells]):
            filling = torch.where(dropped[:, cells].reshape(-1, 1, 1, 1), fill_value, filling)
        filling = filling.unflatten(0, (record.num_mixed, together))  # (M, cells, C, h, w)
        place.copy_(filling.permute(0, 2, 3, 1, 4))
    return _union(targets[sources], dropped)


def split_cells(maps: torch.Tensor, grid: Grid) -> torch.Tensor:
    """ Cut feature maps of mixed images into the maps of their cells.

    A map that the grid does not divide is first resized, bilinearly with aligned corners, to the next smaller size
    that it does, or to one position for each cell where the map has fewer.

    Args:
        maps: (M, C, H, W).
        grid: Grid of the mixed images.

    Returns:
        (M * cells, C, h, w), in the order of `record.sources.flatten()`.
    """
    if maps.ndim != 4:
        raise UsageError(f'Expected maps of shape (M, C, H, W), but got {tuple(maps.shape)}.')
    num_maps, channels, height, width = maps.shape
    cell_height, cell_width = max(1, height // grid.rows), max(1, width // grid.cols)
    size = (cell_height * grid.rows, cell_width * grid.cols)
    if size != (height, width):
        maps = _resize(maps, *size)
    maps = maps.reshape(num_maps, channels, grid.rows, cell_height, grid.cols, cell_width)
    maps = maps.permute(0, 2, 4, 1, 3, 5)  # (M, rows, cols, C, h, w)
    return maps.reshape(num_maps * grid.cells, channels, cell_height, cell_width)


def _empty(images: torch.Tensor, length: int) -> torch.Tensor:
    memory_format = torch.channels_last if _is_channels_last(images) else torch.contiguous_format
    return torch.empty(
        (length, *images.shape[1:]), dtype=images.dtype, device=images.device, memory_format=memory_format)


def _one_hot(targets: torch.Tensor, num_classes: int) -> torch.Tensor:
    if targets.device.type == 'cpu' and len(targets):  # looking at a GPU's values would wait for it
        lowest, highest = int(targets.min()), int(targets.max())
        if lowest < 0 or highest >= num_classes:
            raise UsageError(
                f'Expected integer targets from 0 to {num_classes - 1}, but got {lowest} to {highest}.')
    zeros = torch.zeros(len(targets), num_classes, device=targets.device)
    return zeros.scatter_(1, targets.long().unsqueeze(1), 1.)


def _as_grids(grids: Union[str, Grid, Sequence[Union[str, Grid]]]) -> tuple[Grid, ...]:
    if isinstance(grids, str):
        return parse_grids(grids)
    if isinstance(grids, Grid):
        return (grids,)
    grids = tuple(part for grid in grids for part in (parse_grids(grid) if isinstance(grid, str) else (grid,)))
    if not grids or not all(isinstance(grid, Grid) for grid in grids):
        raise UsageError(f"Expected at least one grid, such as '2x2', but got {list(grids)}.")
    return grids


def _check_probability(name: str, value: float) -> float:
    if not isinstance(value, Real) or not 0 <= value <= 1:
        raise UsageError(f'Expected {name} to be a probability from 0 to 1, but got {value}.')
    return float(value)


class SpliceMix(Mixer):
    """ Append grids of downsampled images to a batch, with timm's `Mixup` contract.

        mixer = SpliceMix('1x2,2x2,2x3')
        images, targets = mixer(images, targets)  # regular rows first, then mixed ones

    What is drawn depends on (seed, rank, epoch, step) alone. The step counts the batches by itself; a training script
    that can be resumed calls `set_step` instead. Set `mixup_enabled` to False to stop mixing.

    Args:
        grids: Grids to choose from, as text or a sequence of `Grid`. One with rows != cols is flipped half of the time.
        ratio: Number of mixed images as a part of the batch size, or 'ref' for floor(B / (rows * cols - dropped)); with
            grids drawn for each mixed image, 'ref' goes on until every image is in sight once, as near as they fit.
        drop_prob: Probability of dropping cells, 1 to rows * cols - 1 of them, of a grid that doesn't fix their number.
        prob: Probability of mixing a batch at all.
        mode: Draw grid, flip and number of dropped cells once per 'batch' or for each mixed image ('elem').
        batch: 'append' adds the mixed images to the batch; 'fixed' keeps its size by leaving out as many of its first
            images; 'exclusive' leaves out the images that are seen in mixed ones, so that none is seen twice; 'only'
            leaves out all regular images; 'alternate' is 'append' with the mixed images to be trained as a batch of
            their own, see `batches`.
        num_classes: Number of classes, needed for integer targets, which become one-hot.
        fill: Value of a dropped cell, one for all channels or one for each; 0 is the mean colour of normalised images.
        seed: Seed of everything that is drawn.
        rank: Rank of this process, that of `torch.distributed` if None.
    """
    MODES = ('batch', 'elem')
    BATCHES = ('append', 'fixed', 'exclusive', 'only', 'alternate')

    def __init__(
            self,
            grids: Union[str, Grid, Sequence[Union[str, Grid]]] = '1x2,2x2,2x3',
            ratio: Union[float, str] = 0.25,
            drop_prob: float = 0.3,
            prob: float = 1.0,
            mode: str = 'batch',
            batch: str = 'append',
            num_classes: Optional[int] = None,
            fill: Union[float, Sequence[float]] = 0.,
            seed: int = 0,
            rank: Optional[int] = None,
    ):
        super().__init__(num_classes, seed, rank)
        self.grids = _as_grids(grids)
        if ratio != 'ref' and (not isinstance(ratio, Real) or not 0 <= ratio < math.inf):
            raise UsageError(f"Expected ratio to be a number of at least 0 or 'ref', but got {ratio!r}.")
        if mode not in self.MODES:
            raise UsageError(f'Expected mode to be one of {", ".join(self.MODES)}, but got {mode!r}.')
        if batch not in self.BATCHES:
            raise UsageError(f'Expected batch to be one of {", ".join(self.BATCHES)}, but got {batch!r}.')
        fills = [fill] if isinstance(fill, Real) else fill
        if isinstance(fills, str) or not all(isinstance(value, Real) and math.isfinite(value) for value in fills):
            raise UsageError(f'Expected fill to be a number, or one for each channel, but got {fill!r}.')
        self.ratio = ratio
        self.drop_prob = _check_probability('drop_prob', drop_prob)
        self.prob = _check_probability('prob', prob)
        self.mode = mode
        self.batch = batch
        self.fill = fill
        self._weights = torch.tensor([grid.weight for grid in self.grids], dtype=torch.float64)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}('{','.join(map(str, self.grids))}', ratio={self.ratio!r}, "
            f'drop_prob={self.drop_prob}, prob={self.prob}, mode={self.mode!r}, batch={self.batch!r}, '
            f'num_classes={self.num_classes}, fill={self.fill}, seed={self.seed}, rank={self.rank})')

    def plan(self, batch_size: int) -> MixPlan:
        """ Draw how the next batch is mixed, and move on to the step after it.

        Args:
            batch_size: Number of regular images.
        """
        generator = self._next_generator(batch_size)
        everything = torch.arange(batch_size)
        if not self.mixup_enabled or float(torch.rand((), generator=generator)) >= self.prob:
            return MixPlan(everything, (), batch_size)
        layouts = self._draw_layouts(batch_size, generator)
        if not layouts:
            return MixPlan(everything, (), batch_size)

        by_shape: dict[tuple[int, int], list[int]] = {}
        for rows, cols, num_dropped in layouts:
            by_shape.setdefault((rows, cols), []).append(num_dropped)
        grids = [Grid(rows, cols) for rows, cols in by_shape]
        dropped = [draw_dropped(drops, grid.cells, generator) for grid, drops in zip(grids, by_shape.values())]
        sources = deal_sources(batch_size, dropped, generator)
        records = tuple(SpliceRecord(*record) for record in zip(grids, sources, dropped))
        return MixPlan(self._kept(everything, records), records, batch_size)

    def apply(self, images: torch.Tensor, targets: torch.Tensor, plan: MixPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """ Mix a batch as planned.

        Args:
            images: (B, C, H, W).
            targets: (B, classes) multi-hot, soft or with -1 for unknown, or (B,) integer classes.
            plan: What `plan(B)` returned.

        Returns:
            The kept regular images followed by the mixed ones, and their targets.
        """
        if targets.ndim == 1 and not targets.is_floating_point():
            if self.num_classes is None:
                raise UsageError('Expected num_classes to be given for integer targets, but got None: '
                                 'set SpliceMix(num_classes=...).')
            targets = _one_hot(targets, self.num_classes)
        _check_batch(images, targets)
        if self.num_classes is not None and targets.shape[1] != self.num_classes:
            raise UsageError(f'Expected targets of {self.num_classes} classes, but got {targets.shape[1]}.')
        if plan.batch_size not in (None, len(images)):
            raise UsageError(f'Expected a plan for {len(images)} images, but got one for {plan.batch_size}.')
        num_kept = len(plan.kept)
        if num_kept and not 0 <= int(plan.kept.min()) <= int(plan.kept.max()) < len(images):
            raise UsageError(f'Expected a plan for {len(images)} images, but got one that keeps {plan.kept.tolist()}.')
        keeps_all = torch.equal(plan.kept, torch.arange(len(images)))
        if keeps_all and not plan.records:
            return images, targets

        out = _empty(images, num_kept + plan.num_mixed)
        mixed_targets = []
        start = num_kept
        for record in plan.records:
            end = start + record.num_mixed
            # The regular images come last, so that until then their place can serve as scratch memory.
            scratch = _flat(out[:num_kept]) if record.num_mixed <= num_kept else None
            mixed_targets.append(_splice_into(out[start:end], images, targets, record, self.fill, scratch))
            start = end
        if keeps_all:
            out[:num_kept].copy_(images)
            return out, torch.cat([targets, *mixed_targets])
        kept = plan.kept.to(images.device, non_blocking=True)
        if images.requires_grad:
            out[:num_kept].copy_(images.index_select(0, kept))
        elif num_kept:
            _gather(images, kept, _is_channels_last(images), _flat(out[:num_kept]))
        return out, torch.cat([targets.index_select(0, kept), *mixed_targets])

    def batches(self, images: torch.Tensor, targets: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """ Plan and mix a batch, and give the batches to be trained on, each in a step of its own.

        There is one, what calling the mixer gives, unless `batch` is 'alternate': then there are the regular images,
        and after them the mixed ones, if any. Where all grids show a single cell, such as 2x2-3, these are images of
        the size of a cell, without the empty rest, in a batch for each size.

        Args:
            images: (B, C, H, W).
            targets: (B, classes) multi-hot, soft or with -1 for unknown, or (B,) integer classes.
        """
        plan = self.plan(len(images))
        if self.batch != 'alternate':
            return [self.apply(images, targets, plan)]
        regular = images, targets = self.apply(images, targets, MixPlan(plan.kept, (), plan.batch_size))
        if not plan.records:
            return [regular]
        if any(grid.drop != grid.cells - 1 for grid in self.grids):
            return [regular, self.apply(images, targets, MixPlan(plan.kept[:0], plan.records, plan.batch_size))]
        batches = [regular]
        for record in plan.records:
            _check_record(record, images)
            sources = record.sources[~record.dropped].to(images.device, non_blocking=True)
            size = (images.shape[2] // record.grid.rows, images.shape[3] // record.grid.cols)
            batches.append((_gather_small(images, sources, *size, None), targets.index_select(0, sources)))
        return batches

    def _draw_layout(self, grid: Grid, generator: torch.Generator) -> tuple[int, int, int]:
        """Draw rows, columns and number of dropped cells of a grid."""
        flip, drop = torch.rand(2, generator=generator).tolist()
        if grid.rows != grid.cols and flip < 0.5:
            grid = grid.flipped()
        num_dropped = grid.drop or 0
        if grid.drop is None and grid.cells > 1 and drop < self.drop_prob:
            num_dropped = int(torch.randint(1, grid.cells, (), generator=generator))
        return grid.rows, grid.cols, num_dropped

    def _draw_layouts(self, batch_size: int, generator: torch.Generator) -> list[tuple[int, int, int]]:
        """Draw the layout of each mixed image; how many there are may depend on what is drawn."""
        limit = math.inf if self.ratio == 'ref' else math.floor(self.ratio * batch_size + 1e-6)  # 0.29 * 100 is 29
        if self.batch == 'fixed':
            limit = min(limit, batch_size)
        # With 'ref' and 'exclusive' the cells in sight are at most the images there are.
        in_sight_limit = batch_size if self.ratio == 'ref' or self.batch == 'exclusive' else math.inf
        weights = self._weights.clone()
        layouts, in_sight = [], 0
        layout = None
        while len(layouts) < limit and weights.any():
            if layout is None or self.mode == 'elem':
                choice = int(torch.multinomial(weights, 1, generator=generator))
                layout = self._draw_layout(self.grids[choice], generator)
            rows, cols, num_dropped = layout
            if in_sight + rows * cols - num_dropped <= in_sight_limit:
                in_sight += rows * cols - num_dropped
                layouts.append(layout)
            elif self.mode == 'batch':
                break
            else:
                weights[choice] = 0.  # what is left of the images goes to smaller grids
        return layouts

    def _kept(self, everything: torch.Tensor, records: tuple[SpliceRecord, ...]) -> torch.Tensor:
        if self.batch in ('append', 'alternate'):
            return everything
        if self.batch == 'fixed':
            return everything[sum(record.num_mixed for record in records):]
        if self.batch == 'only':
            return everything[:0]
        seen = torch.zeros(len(everything), dtype=torch.bool)
        for record in records:
            seen[record.sources[~record.dropped]] = True
        return everything[~seen]
