""" Which image of the batch fills which cell of mixed images, and how this is drawn """
from collections import deque
from dataclasses import dataclass
from typing import Iterator, Optional, Sequence

import torch

from ..errors import UsageError
from .grid import Grid


@dataclass(frozen=True, eq=False)
class SpliceRecord:
    """ How M mixed images of one grid are composed; its tensors are on the CPU.

    Args:
        grid: The grid of the mixed images, after a possible flip.
        sources: (M, cells) int64, row-major: index of the image that fills each cell.
        dropped: (M, cells) bool: True for the cells that are left empty.
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


def draw_dropped(num_dropped: Sequence[int], cells: int, generator: Optional[torch.Generator]) -> torch.Tensor:
    """Draw the dropped cells of each mixed image: (M, cells) bool with num_dropped[m] true values in row m."""
    ranks = torch.rand(len(num_dropped), cells, generator=generator).argsort(dim=1).argsort(dim=1)  # (M, cells)
    return ranks < torch.tensor(num_dropped, dtype=torch.int64).view(-1, 1)


def _endless_permutations(batch_size: int, generator: Optional[torch.Generator]) -> Iterator[int]:
    while True:
        yield from torch.randperm(batch_size, generator=generator).tolist()


def draw_sources(
        batch_size: int,
        dropped: Sequence[torch.Tensor],
        generator: Optional[torch.Generator],
) -> list[torch.Tensor]:
    """ Distribute the images of the batch over the cells of all records.

    Every image is used once before any is used twice, and no mixed image holds the same image twice unless it has more
    cells than the batch has images. Visible cells are filled before dropped ones, so this holds for visible images too.
    """
    stream = _endless_permutations(batch_size, generator)
    postponed: deque[int] = deque()  # images of the stream that a mixed image held already; they are used first

    def next_image(in_use: set[int]) -> int:
        if len(in_use) == batch_size:
            in_use.clear()
        for position, image in enumerate(postponed):
            if image not in in_use:
                del postponed[position]
                break
        else:
            image = next(stream)
            while image in in_use:
                postponed.append(image)
                image = next(stream)
        in_use.add(image)
        return image

    sources = [[[-1] * mask.shape[1] for _ in range(len(mask))] for mask in dropped]
    in_use = [[set() for _ in range(len(mask))] for mask in dropped]
    for is_dropped in (False, True):
        for record, mask in enumerate(dropped):
            for row, col in (mask == is_dropped).nonzero().tolist():
                sources[record][row][col] = next_image(in_use[record][row])
    return [torch.tensor(s, dtype=torch.int64).view(mask.shape) for s, mask in zip(sources, dropped)]


def sample_record(
        batch_size: int,
        grid: Grid,
        num_mixed: int,
        num_dropped: int = 0,
        *,
        generator: Optional[torch.Generator] = None,
) -> SpliceRecord:
    """ Draw which images of a batch fill the cells of `num_mixed` mixed images.

    Args:
        batch_size: Number of images to draw from.
        grid: Grid of every mixed image.
        num_mixed: Number of mixed images.
        num_dropped: Number of dropped cells of each mixed image; their places are drawn for each image.
        generator: Random generator, torch's default one if None.

    Returns:
        The record for `splice`.
    """
    if batch_size < 1:
        raise UsageError(f'Expected a batch of at least one image, but got batch_size={batch_size}.')
    if num_mixed < 0:
        raise UsageError(f'Expected num_mixed to be at least 0, but got {num_mixed}.')
    if not 0 <= num_dropped < grid.cells:
        raise UsageError(f'Expected num_dropped from 0 to {grid.cells - 1} for a {grid} grid, but got {num_dropped}.')
    dropped = draw_dropped([num_dropped] * num_mixed, grid.cells, generator)
    sources, = draw_sources(batch_size, [dropped], generator)
    return SpliceRecord(grid, sources, dropped)
