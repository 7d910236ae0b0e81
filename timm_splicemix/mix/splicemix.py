""" SpliceMix: append grids of downsampled images to the batch

A mixed image is an r x c grid of downsampled images of the batch, and its label is the union of their labels. All
randomness is drawn first, into a `MixPlan` of `SpliceRecord`s that can be printed, stored and replayed; applying a plan
is deterministic.
"""
import math
from dataclasses import dataclass
from numbers import Real
from typing import Optional, Sequence, Union

import torch

from ..errors import UsageError
from .base import (
    Batch,
    Mixer,
    Plan,
    check_batch,
    check_choice,
    check_mixer_input,
    check_probability,
    gather,
    gather_resized,
    is_channels_last,
    resize,
)
from .grid import Grid, parse_grids
from .record import SpliceRecord, draw_dropped, draw_sources
from .union import LabelUnion


@dataclass(frozen=True, eq=False)
class MixPlan(Plan):
    """ All random choices of one mixed batch.

    Args:
        kept: (K,) int64, indices of the regular images that stay in the batch, in this order.
        records: The mixed images that follow them; () if the batch is not mixed.
        batch_size: Number of images that the plan was drawn for; None skips this check.
    """
    records: tuple[SpliceRecord, ...] = ()
    batch_size: Optional[int] = None

    @property
    def num_mixed(self) -> int:
        return sum(record.num_mixed for record in self.records)

    @property
    def num_parts(self) -> int:
        return sum(record.sources.numel() for record in self.records)

    def parts(self, maps: torch.Tensor, image_size: tuple[int, int]) -> list[tuple[slice, torch.Tensor]]:
        """The cells of the mixed images of each record."""
        parts = []
        start = len(self.kept)
        for record in self.records:
            rows = slice(start, start + record.num_mixed)
            parts.append((rows, split_cells(maps[rows], record.grid)))
            start = rows.stop
        return parts

    def teachers(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits of each cell's regular image; requires that all regular images stay in the batch."""
        sources = torch.cat([record.sources.flatten() for record in self.records])
        return logits.index_select(0, sources.to(logits.device, non_blocking=True))

    def dropped_parts(self) -> torch.Tensor:
        return torch.cat([record.dropped.flatten() for record in self.records])

    def captions(self) -> list[str]:
        mixed = [f'mixed {record.grid}' for record in self.records for _ in range(record.num_mixed)]
        return super().captions() + mixed

    def cells(self) -> dict[int, tuple[SpliceRecord, int]]:
        rows = [(record, row) for record in self.records for row in range(record.num_mixed)]
        return dict(enumerate(rows, start=len(self.kept)))


def splice(
        images: torch.Tensor,
        targets: torch.Tensor,
        record: SpliceRecord,
        *,
        out: Optional[torch.Tensor] = None,
        fill: Union[float, Sequence[float]] = 0.,
        unknown_classes: Sequence[int] = (),
        all_classes: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """ Create the mixed images and targets of a record.

    The cells tile the image exactly, whatever its size. Each cell shows its whole source image, resized bilinearly with
    aligned corners.

    Args:
        images: (B, C, H, W), of a floating point type or uint8, contiguous or channels_last.
        targets: (B, classes), multi-hot with -1 for unknown, or soft.
        record: Which image fills which cell.
        out: Output tensor for the mixed images, (M, C, H, W), which must not share memory with `images`.
        fill: Value of dropped cells, one for all channels or one for each. 0 is the mean colour of normalised images.
        unknown_classes: See `SpliceMix`.
        all_classes: See `SpliceMix`.

    Returns:
        Mixed images (M, C, H, W) and mixed targets (M, classes). The target of a class is the largest of the visible
        cells, or -1 if no visible cell has the class and it is unknown in one of them.
    """
    check_batch(images, targets)
    labels = LabelUnion(unknown_classes, all_classes)
    shape = (record.num_mixed, *images.shape[1:])
    if out is None:
        out = _empty(images, record.num_mixed)
    elif out.shape != shape or out.dtype != images.dtype or out.device != images.device:
        raise UsageError(
            f'Expected out of shape {shape}, {images.dtype} on {images.device}, '
            f'but got {tuple(out.shape)}, {out.dtype} on {out.device}.')
    return out, _splice_into(out, images, labels.prepare(targets), record, fill, labels)


def split_cells(maps: torch.Tensor, grid: Grid) -> torch.Tensor:
    """ Split feature maps of mixed images into the maps of their cells.

    If the grid doesn't divide the size of the maps, they are first resized, bilinearly with aligned corners, to the
    next smaller size that it divides, or to one position per cell if they have fewer positions than cells.

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
        maps = resize(maps, *size)
    maps = maps.reshape(num_maps, channels, grid.rows, cell_height, grid.cols, cell_width)
    maps = maps.permute(0, 2, 4, 1, 3, 5)  # (M, rows, cols, C, h, w)
    return maps.reshape(num_maps * grid.cells, channels, cell_height, cell_width)


def _splice_into(
        out: torch.Tensor,
        images: torch.Tensor,
        targets: torch.Tensor,
        record: SpliceRecord,
        fill: Union[float, Sequence[float]],
        labels: LabelUnion,
        scratch: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """ Write the mixed images of a record to `out` and return their targets.

    Args:
        scratch: Memory for at least M * C * H * W values, which saves an allocation per cell. If it suffices for a row
            of cells of equal size, these are resized together, which is faster.
    """
    _check_record(record, images)
    if images.requires_grad:
        scratch = None  # torch can't differentiate through `out=`
    grid = record.grid
    fill_value = _fill_value(fill, images)
    any_dropped = record.dropped.any(dim=0).tolist()
    sources = record.sources.to(images.device, non_blocking=True)
    dropped = record.dropped.to(images.device, non_blocking=True)
    tops, lefts = _edges(images.shape[2], grid.rows), _edges(images.shape[3], grid.cols)
    together = 1
    several_threads = images.device.type == 'cpu' and torch.get_num_threads() > 1  # faster on one cell at a time
    if scratch is not None and images.shape[3] % grid.cols == 0 and not several_threads:
        together = grid.cols if scratch.numel() >= grid.cols * out.numel() else 1
    for first in range(0, grid.cells, together):
        row, col = divmod(first, grid.cols)
        cells = slice(first, first + together)
        place = out[:, :, tops[row]:tops[row + 1], lefts[col]:lefts[col + together]]
        place = place.unflatten(3, (together, -1))  # (M, C, h, cells, w)
        filling = gather_resized(images, sources[:, cells].flatten(), place.shape[2], place.shape[4], scratch)
        if any(any_dropped[cells]):
            filling = torch.where(dropped[:, cells].reshape(-1, 1, 1, 1), fill_value, filling)
        filling = filling.unflatten(0, (record.num_mixed, together))  # (M, cells, C, h, w)
        place.copy_(filling.permute(0, 2, 3, 1, 4))
    return labels.of_cells(targets[sources], dropped)


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
    """The value of dropped cells as a tensor that broadcasts over (M, C, h, w)."""
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
    """Edges of `parts` cells that tile `length` pixels; the cell sizes differ by at most one pixel."""
    return [i * length // parts for i in range(parts + 1)]


def _empty(images: torch.Tensor, length: int) -> torch.Tensor:
    memory_format = torch.channels_last if is_channels_last(images) else torch.contiguous_format
    return torch.empty(
        (length, *images.shape[1:]), dtype=images.dtype, device=images.device, memory_format=memory_format)


def _flat(images: torch.Tensor) -> torch.Tensor:
    """The memory of dense images as a flat view."""
    return (images.permute(0, 2, 3, 1) if is_channels_last(images) else images).view(-1)


def _as_grids(grids: Union[str, Grid, Sequence[Union[str, Grid]]]) -> tuple[Grid, ...]:
    grids = (grids,) if isinstance(grids, (str, Grid)) else grids
    grids = tuple(part for grid in grids for part in (parse_grids(grid) if isinstance(grid, str) else (grid,)))
    if not grids or not all(isinstance(grid, Grid) for grid in grids):
        raise UsageError(f"Expected at least one grid, such as '2x2', but got {list(grids)}.")
    return grids


class SpliceMix(Mixer):
    """ Append grids of downsampled images to a batch, with the contract of timm's `Mixup`.

        mixer = SpliceMix('1x2,2x2,2x3')
        images, targets = mixer(images, targets)  # regular images first, then mixed ones

    The draws depend on (seed, rank, epoch, step) alone. The mixer counts the steps itself; a training script that can
    be resumed calls `set_step` instead. Set `mixup_enabled` to False to stop mixing.

    Args:
        grids: Grids to choose from, as text or a sequence of `Grid`. A grid with rows != cols is flipped with
            probability 0.5.
        ratio: Number of mixed images as a fraction of the batch size, or 'ref' for floor(B / (rows * cols - dropped)).
            With mode 'elem', 'ref' adds mixed images as long as each image is visible at most once.
        drop_prob: Probability of dropping 1 to rows * cols - 1 cells of a grid without a fixed number of dropped cells.
        prob: Probability of mixing a batch.
        mode: Draw the grid, its flip and the number of dropped cells once per 'batch' or per mixed image ('elem').
        batch: 'append' adds the mixed images to the batch; 'fixed' keeps the batch size by removing as many images from
            its start; 'exclusive' removes the regular images that are visible in mixed ones; 'only' removes all regular
            images; 'alternate' trains the mixed images as a separate batch after the regular one, see `batches`.
        num_classes: Number of classes, required for integer targets, which become one-hot.
        fill: Value of dropped cells, one for all channels or one for each; 0 is the mean colour of normalised images.
        seed: Seed of all draws.
        rank: Rank of this process, that of `torch.distributed` if None.
        unknown_classes: Indices of classes such as 'one person' or 'indoors', for which a union is wrong: they are
            unknown (-1) in mixed images of two or more visible cells. The loss has to ignore -1. Boolean and uint8
            targets become float32.
        all_classes: Indices of classes such as 'no finding', which a mixed image has only if every visible cell has
            them: 0 wins over -1, and -1 over 1.
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
            unknown_classes: Sequence[int] = (),
            all_classes: Sequence[int] = (),
    ):
        super().__init__(num_classes, seed, rank)
        self.grids = _as_grids(grids)
        if ratio != 'ref' and (not isinstance(ratio, Real) or not 0 <= ratio < math.inf):
            raise UsageError(f"Expected ratio to be a number of at least 0 or 'ref', but got {ratio!r}.")
        fills = [fill] if isinstance(fill, Real) else fill
        if isinstance(fills, str) or not all(isinstance(value, Real) and math.isfinite(value) for value in fills):
            raise UsageError(f'Expected fill to be a number, or one for each channel, but got {fill!r}.')
        self.ratio = ratio
        self.drop_prob = check_probability('drop_prob', drop_prob)
        self.prob = check_probability('prob', prob)
        self.mode = check_choice('mode', mode, self.MODES)
        self.batch = check_choice('batch', batch, self.BATCHES)
        self.fill = fill
        self.labels = LabelUnion(unknown_classes, all_classes)
        if num_classes is not None:
            self.labels.check_classes(num_classes)
        self._weights = torch.tensor([grid.weight for grid in self.grids], dtype=torch.float64)

    def __repr__(self) -> str:
        rules = ''.join(f', {name}={list(classes)}' for name, classes in vars(self.labels).items() if classes)
        return (
            f"{type(self).__name__}('{','.join(map(str, self.grids))}', ratio={self.ratio!r}, "
            f'drop_prob={self.drop_prob}, prob={self.prob}, mode={self.mode!r}, batch={self.batch!r}, '
            f'num_classes={self.num_classes}, fill={self.fill}, seed={self.seed}, rank={self.rank}{rules})')

    def plan(self, batch_size: int) -> MixPlan:
        """ Draw how the next batch is mixed, and advance to the following step.

        Args:
            batch_size: Number of regular images.
        """
        generator = self._next_generator(batch_size)
        everything = torch.arange(batch_size)
        layouts = []
        if self.mixup_enabled and float(torch.rand((), generator=generator)) < self.prob:
            layouts = self._draw_layouts(batch_size, generator)
        if not layouts:
            return MixPlan(everything, (), batch_size)

        by_shape: dict[tuple[int, int], list[int]] = {}
        for rows, cols, num_dropped in layouts:
            by_shape.setdefault((rows, cols), []).append(num_dropped)
        grids = [Grid(rows, cols) for rows, cols in by_shape]
        dropped = [draw_dropped(drops, grid.cells, generator) for grid, drops in zip(grids, by_shape.values())]
        sources = draw_sources(batch_size, dropped, generator)
        records = tuple(SpliceRecord(*record) for record in zip(grids, sources, dropped))
        return MixPlan(self._kept(everything, records), records, batch_size)

    def apply(self, images: torch.Tensor, targets: torch.Tensor, plan: MixPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """ Mix a batch according to a plan.

        Args:
            images: (B, C, H, W).
            targets: (B, classes) multi-hot, soft or with -1 for unknown, or (B,) integer classes.
            plan: The plan that `plan(B)` returned.

        Returns:
            The kept regular images followed by the mixed ones, and their targets.
        """
        targets = self.labels.prepare(check_mixer_input(images, targets, plan.batch_size, self.num_classes))
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
            # The regular images are copied last, so that their place can serve as scratch memory until then.
            scratch = _flat(out[:num_kept]) if record.num_mixed <= num_kept else None
            mixed_targets.append(
                _splice_into(out[start:end], images, targets, record, self.fill, self.labels, scratch))
            start = end
        if keeps_all:
            out[:num_kept].copy_(images)
            return out, torch.cat([targets, *mixed_targets])
        kept = plan.kept.to(images.device, non_blocking=True)
        if images.requires_grad:
            out[:num_kept].copy_(images.index_select(0, kept))
        elif num_kept:
            gather(images, kept, is_channels_last(images), _flat(out[:num_kept]))
        return out, torch.cat([targets.index_select(0, kept), *mixed_targets])

    @property
    def separate_batches(self) -> bool:
        return self.batch == 'alternate'

    @property
    def makes_unknown(self) -> bool:
        return bool(self.labels.unknown_classes)

    def batches(self, images: torch.Tensor, targets: torch.Tensor) -> list[Batch]:
        """ Mix a batch, and return the batches to train on, each in its own step.

        This is one mixed batch, unless `batch` is 'alternate': then it is the regular batch, followed by the mixed
        images if there are any. If all grids show a single cell, such as 2x2-3, the mixed images are the downsampled
        images without the dropped cells, in one batch for each size.

        Args:
            images: (B, C, H, W).
            targets: (B, classes) multi-hot, soft or with -1 for unknown, or (B,) integer classes.
        """
        if not self.separate_batches:
            return super().batches(images, targets)
        plan = self.plan(len(images))
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
            batches.append((gather_resized(images, sources, *size), targets.index_select(0, sources)))
        return batches

    def check_consistency(self) -> None:
        if self.batch != 'append':
            raise UsageError(
                f"Expected all regular images in the batch for consistency learning, but got batch '{self.batch}', "
                'which leaves some out: use --splicemix-batch append.')

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
        """Draw the layout of each mixed image; their number may depend on the draws."""
        limit = math.inf if self.ratio == 'ref' else math.floor(self.ratio * batch_size + 1e-6)  # 0.29 * 100 is 29
        if self.batch == 'fixed':
            limit = min(limit, batch_size)
        # With 'ref' and 'exclusive' there are at most as many visible cells as images.
        visible_limit = batch_size if self.ratio == 'ref' or self.batch == 'exclusive' else math.inf
        weights = self._weights.clone()
        layouts, visible = [], 0
        layout = None
        while len(layouts) < limit and weights.any():
            if layout is None or self.mode == 'elem':
                choice = int(torch.multinomial(weights, 1, generator=generator))
                layout = self._draw_layout(self.grids[choice], generator)
            rows, cols, num_dropped = layout
            if visible + rows * cols - num_dropped <= visible_limit:
                visible += rows * cols - num_dropped
                layouts.append(layout)
            elif self.mode == 'batch':
                break
            else:
                weights[choice] = 0.  # the remaining images fit smaller grids only
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
