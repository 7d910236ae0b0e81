""" The HTML page of a report, a single file without links to other files

A section of the page is a list of blocks: ('heading', text), ('note', text), ('table', Table), ('picture', Picture),
('pictures', list of Picture), ('key', names of lines in the order of their colours), ('charts', list of Chart) or, once
in a page, ('mistakes', data of the script mistakes.js). Only this block has a script, which is allowed by its hash.
"""
import base64
import hashlib
import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Sequence

import jinja2
from PIL import Image

from ..draw import COLORS
from ..errors import UsageError
from ..files import read_bytes

MAX_PIXELS = 1600  # wider pictures are resized


@dataclass(frozen=True)
class Table:
    """ A table that scrolls by itself if it is too wide.

    Args:
        header: Names of the columns.
        rows: Cells; the first cell of a row is its name.
        words: Align cells on the left.
        bars: For each cell but the first the width of a bar in percent, or None.
        summary: If given, the table is hidden behind this text until the user clicks on it.
    """
    header: Sequence[str]
    rows: Sequence[Sequence[Any]]
    words: bool = False
    bars: Optional[Sequence[Sequence[Optional[float]]]] = None
    summary: str = ''


@dataclass(frozen=True)
class Picture:
    """An embedded picture; on a narrow screen it shrinks by half at most, so that its text stays legible."""
    source: str
    width: int
    height: int
    caption: str

    @classmethod
    def read(cls, path: Path, caption: str) -> 'Picture':
        content = read_bytes(path)
        try:
            with Image.open(io.BytesIO(content)) as image:
                image.load()
                kind, size = image.format, image.size
                if image.width > MAX_PIXELS:
                    size = MAX_PIXELS, max(1, round(image.height * MAX_PIXELS / image.width))
                    smaller = image if image.mode in ('RGB', 'RGBA', 'L') else image.convert('RGBA')
                    kind = 'JPEG' if kind == 'JPEG' else 'PNG'
                    buffer = io.BytesIO()
                    smaller.resize(size, Image.Resampling.LANCZOS).save(buffer, kind, quality=88)
                    content = buffer.getvalue()
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise UsageError(f'Expected a picture, but got {path}, which cannot be decoded: {error}') from error
        return cls(f'data:{Image.MIME[kind]};base64,{base64.b64encode(content).decode()}', *size, caption)


@dataclass(frozen=True)
class Line:
    """A line of a chart: the index of its run, which sets its colour, dashed or solid, and points (x, y)."""
    number: int
    dashed: bool
    points: Sequence[tuple[float, float]]


class Chart:
    """ Lines over epochs, as the coordinates of an SVG picture.

    Args:
        title: Title of the chart.
        lines: The lines, with at least one finite point.
    """
    width, height, left, right, top, bottom = 360, 240, 52, 348, 28, 206  # of the picture, and of the lines in it

    def __init__(self, title: str, lines: Sequence[Line]):
        self.title = title
        points = [[point for point in line.points if math.isfinite(point[1])] for line in lines]
        xs, ys = zip(*(point for some in points for point in some))
        x_ticks, y_ticks = _ticks(*_range(xs), whole=True), _ticks(*_range(ys))
        x_range, y_range = _range([*xs, *x_ticks]), _range([*ys, *y_ticks])

        def place_x(x: float) -> float:
            return round(self.left + (x - x_range[0]) / (x_range[1] - x_range[0]) * (self.right - self.left), 1)

        def place_y(y: float) -> float:
            return round(self.bottom - (y - y_range[0]) / (y_range[1] - y_range[0]) * (self.bottom - self.top), 1)

        self.x_ticks = [(place_x(x), f'{x:.6g}') for x in x_ticks]
        self.y_ticks = [(place_y(y), f'{y:.6g}') for y in y_ticks]
        self.lines = [
            Line(line.number, line.dashed, [(place_x(x), place_y(y)) for x, y in some])
            for line, some in zip(lines, points)]


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - (abs(low) or 1.) / 2, high + (abs(high) or 1.) / 2)


def _ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """Return at most six round numbers from `low` to `high`."""
    rough = (high - low) / 5
    power = 10. ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    step = max(1., step) if whole else step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def render_page(title: str, names: Sequence[str], sections: dict[str, Sequence[tuple[str, Any]]]) -> str:
    """ Render the page.

    Args:
        title: Title of the page.
        names: Names below the title.
        sections: Blocks of each section; sections without blocks are left out.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    sections = {name: blocks for name, blocks in sections.items() if blocks}
    has_script = any(kind == 'mistakes' for blocks in sections.values() for kind, _ in blocks)
    script = environment.loader.get_source(environment, 'mistakes.js')[0] if has_script else ''
    script_hash = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    template = environment.get_template('report.html')
    return template.render(
        title=title, names=names, sections=sections, colors=COLORS, script=script, script_hash=script_hash) + '\n'
