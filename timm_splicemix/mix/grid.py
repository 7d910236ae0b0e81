""" Grids of mixed images, and their text form """
import math
import re
from dataclasses import dataclass, replace
from typing import Optional

from ..errors import UsageError

_GRID_GRAMMAR = re.compile(r'(\d+)x(\d+)(?:-(\d+))?(?:@((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?))?')


@dataclass(frozen=True)
class Grid:
    """ The layout of a mixed image, `ROWSxCOLS[-DROPPED][@WEIGHT]` as text.

    Args:
        rows: Number of cells from top to bottom.
        cols: Number of cells from left to right.
        drop: Fixed number of dropped cells; `SpliceMix` draws it if None.
        weight: Relative probability of drawing this grid.
    """
    rows: int
    cols: int
    drop: Optional[int] = None
    weight: float = 1.

    def __post_init__(self):
        for name in ('rows', 'cols', 'drop'):
            value = getattr(self, name)
            if not isinstance(value, int) and not (name == 'drop' and value is None):
                raise UsageError(f'Expected {name} of a grid to be an integer, but got {value!r}.')
        if self.rows < 1 or self.cols < 1:
            raise UsageError(f"Expected a grid of at least 1x1, but got '{self.rows}x{self.cols}'.")
        if self.drop is not None and not 0 <= self.drop < self.cells:
            raise UsageError(
                f"Expected a grid that drops fewer than its {self.cells} cells, but got '{self}': "
                f'at most {self.cells - 1} can be dropped.')
        if not 0 < self.weight < math.inf:
            raise UsageError(f'Expected a grid with a positive weight, but got {self.weight}.')

    @property
    def cells(self) -> int:
        return self.rows * self.cols

    def flipped(self) -> 'Grid':
        """The grid with rows and columns exchanged."""
        return replace(self, rows=self.cols, cols=self.rows)

    def __str__(self) -> str:
        drop = '' if self.drop is None else f'-{self.drop}'
        weight = '' if self.weight == 1 else f'@{float(self.weight)!r}'
        return f'{self.rows}x{self.cols}{drop}{weight}'


def parse_grids(text: str) -> tuple[Grid, ...]:
    """ Parse a comma-separated list of grids, such as '1x2,2x2@0.5,2x3-2'.

    Args:
        text: Grids in the grammar ROWSxCOLS[-DROPPED][@WEIGHT].

    Returns:
        The grids in the order of the text.
    """
    grids = []
    for part in text.split(','):
        match = _GRID_GRAMMAR.fullmatch(part.strip().lower())
        if match is None:
            raise UsageError(
                f"Expected grids such as '1x2,2x2@0.5,2x3-2' (ROWSxCOLS[-DROPPED][@WEIGHT]), "
                f"but got '{part}' in '{text}'.")
        rows, cols, drop, weight = match.groups()
        grids.append(Grid(
            int(rows),
            int(cols),
            drop=None if drop is None else int(drop),
            weight=1. if weight is None else float(weight),
        ))
    return tuple(grids)
