""" What is random about mixed images, as values: which image of the batch fills which cell

Records and plans live on the CPU, so that nothing that is decided from them waits for a GPU.
"""
from collections import deque
from dataclasses import dataclass
from typing import Iterator, Optional, Sequence

import torch

from ..errors import UsageError
from .grid import Grid


@dataclass(frozen=True, eq=False)
class SpliceRecord:
    """ How M mixed images of one grid are made.

    Args:
        grid: The grid as it is laid out, after a possible flip.
        sources: (M, cells) int64, row-major: which image of the batch fills which cell.
        dropped: (M, cells) bool: the cells that are left empty.
    """
    grid: Grid
    sources: torch.Tensor
    dropped: torch.Tensor

    def __post_init__(self):
        shape = (len(self.sources), self.grid.cells)
        if self.sources.shape != shape or self.dropped.shape != shape:
            raise UsageError(
                f'Expected sources and dropped of shape (M, {self.grid.cells}) for a {self.grid} grid, '
                f'but got {tuple(self.sources.shape)} and {tuple(self.dropped.shape)}.')

    @property
    def num_mixed(self) -> int:
        return len(self.sources)


@dataclass(frozen=True, eq=False)
class MixPlan:
    """ Everything that is random about one mixed batch.

    Args:
        kept: (K,) int64, the regular images that stay in the batch, in their order.
        records: The mixed images that follow them; () when the batch is not mixed.
        batch_size: Number of images that the plan is for, None for any that has those it names.
    """
    kept: torch.Tensor
    records: tuple[SpliceRecord, ...] = ()
    batch_size: Optional[int] = None

    @property
    def num_mixed(self) -> int:
        return sum(record.num_mixed for record in self.records)


def draw_dropped(num_dropped: Sequence[int], cells: int, generator: Optional[torch.Generator]) -> torch.Tensor:
    """Choose which cells of each mixed image are dropped: (M, cells) bool with num_dropped[m] true values in row m."""
    ranks = torch.rand(len(num_dropped), cells, generator=generator).argsort(dim=1).argsort(dim=1)  # (M, cells)
    return ranks < torch.tensor(num_dropped, dtype=torch.int64).view(-1, 1)


def _endless_permutations(batch_size: int, generator: Optional[torch.Generator]) -> Iterator[int]:
    while True:
        yield from torch.randperm(batch_size, generator=generator).tolist()


def deal_sources(
        batch_size: int,
        dropped: Sequence[torch.Tensor],
        generator: Optional[torch.Generator],
) -> list[torch.Tensor]:
    """ Deal the images of the batch to the cells of all records.

    Every image is dealt once before any is dealt twice, and no mixed image gets the same one twice unless it has more
    cells than the batch has images. The cells that are seen are served first, so that what is used up are images in
    sight; a dropped cell gets an image only to have one.
    """
    stream = _endless_permutations(batch_size, generator)
    passed_over: deque[int] = deque()  # dealt from the stream but not fitting yet, to be used before anything new

    def deal(in_use: set[int]) -> int:
        if len(in_use) == batch_size:
            in_use.clear()
        for position, image in enumerate(passed_over):
            if image not in in_use:
                del passed_over[position]
                break
        else:
            image = next(stream)
            while image in in_use:
                passed_over.append(image)
                image = next(stream)
        in_use.add(image)
        return image

    sources = [[[-1] * mask.shape[1] for _ in range(len(mask))] for mask in dropped]
    in_use = [[set() for _ in range(len(mask))] for mask in dropped]
    for hidden in (False, True):
        for record, mask in enumerate(dropped):
            for row, col in (mask == hidden).nonzero().tolist():
                sources[record][row][col] = deal(in_use[record][row])
    return [torch.tensor(s, dtype=torch.int64).view(mask.shape) for s, mask in zip(sources, dropped)]


def sample_record(
        batch_size: int,
        grid: Grid,
        num_mixed: int,
        num_dropped: int = 0,
        *,
        generator: Optional[torch.Generator] = None,
) -> SpliceRecord:
    """ Draw which images of a batch fill which cells of `num_mixed` mixed images.

    Args:
        batch_size: Number of images to draw from.
        grid: Layout of every mixed image.
        num_mixed: Number of mixed images.
        num_dropped: Number of cells dropped from each of them, at places drawn for each.
        generator: Source of randomness, torch's default one if None.

    Returns:
        The record to be given to `splice`.
    """
    if batch_size < 1:
        raise UsageError(f'Expected a batch of at least one image, but got batch_size={batch_size}.')
    if num_mixed < 0:
        raise UsageError(f'Expected num_mixed to be at least 0, but got {num_mixed}.')
    if not 0 <= num_dropped < grid.cells:
        raise UsageError(f'Expected num_dropped from 0 to {grid.cells - 1} for a {grid} grid, but got {num_dropped}.')
    dropped = draw_dropped([num_dropped] * num_mixed, grid.cells, generator)
    sources, = deal_sources(batch_size, [dropped], generator)
    return SpliceRecord(grid, sources, dropped)
