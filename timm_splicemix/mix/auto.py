""" Grids that fit the sizes of the images and of the feature map: `--splicemix-grids auto` """
from dataclasses import dataclass, replace
from typing import Optional, Sequence

from .grid import Grid, parse_grids

Size = tuple[int, int]  # height and width

AUTO = 'auto'
# The grids of the paper, with the weights of its reference code, from the largest cells to the smallest
AUTO_GRIDS = parse_grids('1x2@0.3,2x2@0.4,2x3@0.3')
# Weight of mixed images in the loss. In experiments/when it keeps most of the gain on few images, and loses nothing on
# many images, where weight 1 does.
AUTO_WEIGHT = 0.25

# A cell has at least this height and width in a mixed image. The smallest cells that were measured have 43 px (VOC
# study, 2x3 at 128 px) and 48 px (shapes, 2x2 at 96 px): the limit only excludes what nobody has tried.
MIN_CELL_PIXELS = 32
# And this height and width on the feature map. In the VOC study, all three grids together gain at 224 px, where cells
# of 2x3 have 3 x 2 positions, and lose at 128 px, where they have 2 x 1; 1x2 alone, with 4 x 2, does not lose there.
MIN_CELL_POSITIONS = 2
# SpliceMix-CL warns about cells with fewer positions in height or width; 1 never warns. In experiments/when it is 4 to
# 7 mAP behind SpliceMix where cells have one position (3x3 map), and 2 to 3 with a 12x12 map.
CL_WARNS_BELOW = 2


def is_auto(grids: object) -> bool:
    """Whether the value of --splicemix-grids is 'auto'."""
    return isinstance(grids, str) and grids.strip().lower() == AUTO


def cell_size(grid: Grid, size: Size) -> Size:
    """ Height and width of the smallest cell of a grid; of the grid and its transpose, those with the shorter side.

    Args:
        grid: The grid, which `SpliceMix` transposes half of the time.
        size: Height and width of the images, or of the feature map, which `split_cells` cuts in the same way.
    """
    height, width = size
    cells = [(max(1, height // each.rows), max(1, width // each.cols)) for each in (grid, grid.flipped())]
    return min(cells, key=min)


@dataclass(frozen=True)
class GridChoice:
    """ The grids that `choose_grids` has chosen.

    Args:
        grids: The grids.
        fits: False if no grid fits.
        reason: Sizes, and which grids do not fit, as a part of a sentence.
    """
    grids: tuple[Grid, ...]
    fits: bool
    reason: str

    def __str__(self) -> str:
        return ','.join(map(str, self.grids))


def choose_grids(image_size: Size, map_size: Optional[Size] = None) -> GridChoice:
    """ Choose those of the paper's grids that have large enough cells; the grid of the largest cells if none has.

    Args:
        image_size: Height and width of the images.
        map_size: Height and width of the model's last feature map; None if there is none, or if it is not known.
    """
    fitting = [grid for grid in AUTO_GRIDS if _fits(grid, image_size, map_size)]
    grids = fitting or [AUTO_GRIDS[0]]
    if len(grids) == 1:
        grids = [replace(grids[0], weight=1.)]
    sizes = f'images of {_times(image_size)} px'
    needed = f'at least {_times((MIN_CELL_PIXELS,) * 2)} px'
    if map_size is not None:
        sizes += f' and a feature map of {_times(map_size)}'
        needed += f' and {_times((MIN_CELL_POSITIONS,) * 2)} positions'
    if not fitting:
        return GridChoice(
            tuple(grids), False,
            f'with {sizes}, no grid has cells of {needed}; those of {grids[0]} are the largest and have '
            f'{_describe(grids[0], image_size, map_size)}')
    left_out = [
        f'{grid.rows}x{grid.cols} ({_describe(grid, image_size, map_size)})' for grid in AUTO_GRIDS
        if grid not in fitting]
    without = f'; left out: {", ".join(left_out)}' if left_out else ''
    return GridChoice(tuple(grids), True, f'with {sizes}, cells have {needed}{without}')


def coarse_grids(grids: Sequence[Grid], map_size: Size) -> list[Grid]:
    """The grids whose cells have too few positions on a feature map for SpliceMix-CL."""
    return [grid for grid in grids if grid.cells > 1 and min(cell_size(grid, map_size)) < CL_WARNS_BELOW]


def _fits(grid: Grid, image_size: Size, map_size: Optional[Size]) -> bool:
    has_positions = map_size is None or min(cell_size(grid, map_size)) >= MIN_CELL_POSITIONS
    return min(cell_size(grid, image_size)) >= MIN_CELL_PIXELS and has_positions


def _describe(grid: Grid, image_size: Size, map_size: Optional[Size]) -> str:
    pixels = f'{_times(cell_size(grid, image_size))} px'
    return pixels if map_size is None else f'{pixels}, {_times(cell_size(grid, map_size))} positions'


def _times(size: Sequence[int]) -> str:
    return ' x '.join(map(str, size))
