""" Parts of a page that needs no network and no script: text, tables, pictures, curves """
import base64
import io
import math
from html import escape
from pathlib import Path
from typing import Any, Optional, Sequence, Union

from PIL import Image

from ..errors import UsageError
from .common import COLORS

MOST_PIXELS = 1600  # width of a picture; wider ones are made smaller
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1200px; padding: 16px; background: #fff; color: #202124;
  font: 15px/1.5 system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 24px; line-height: 1.25; margin: 8px 0; }
h2 { font-size: 19px; margin: 36px 0 8px; padding-bottom: 4px; border-bottom: 1px solid #dadce0; }
h3 { font-size: 15px; margin: 20px 0 6px; }
p { margin: 6px 0; }
.pale { color: #5f6368; }
nav a { color: #174ea6; margin-right: 14px; display: inline-block; }
.scroll { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: 4px 10px; border-bottom: 1px solid #e8eaed; text-align: right; vertical-align: top;
  min-width: 64px; overflow-wrap: break-word; }
thead th { border-bottom: 2px solid #dadce0; vertical-align: bottom; min-width: 84px; }
tbody th { font-weight: normal; }
th:first-child { position: sticky; left: 0; background: #fff; text-align: left; min-width: 84px; max-width: 44vw;
  overflow-wrap: break-word; }
.words td, .words th { text-align: left; }
.words td { min-width: 130px; max-width: 480px; overflow-wrap: anywhere; }
.panels { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 320px), 1fr)); }
.pictures { display: grid; gap: 20px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 520px), 1fr)); }
.panels > *, .pictures > * { min-width: 0; margin: 0; }
svg { display: block; width: 100%; height: auto; max-width: 560px; }
img { display: block; max-width: 100%; height: auto; border: 1px solid #e8eaed; }
figure { margin: 12px 0; }
figcaption { font-size: 13px; color: #5f6368; }
.key span { display: inline-block; margin-right: 16px; }
.key i { display: inline-block; width: 14px; height: 4px; margin-right: 6px; vertical-align: middle; }
details { margin: 8px 0; }
summary { cursor: pointer; font-weight: 600; }
@media (max-width: 600px) { th, td { padding: 4px 6px; } }
"""


def render_page(title: str, intro: Sequence[str], sections: dict[str, str]) -> str:
    """ A whole page.

    Args:
        title: Headline, as text.
        intro: Lines below it, as text.
        sections: HTML of each section by its title; those that are empty are left out.
    """
    parts = {name: html for name, html in sections.items() if html}
    links = ''.join(f'<a href="#part{i}">{escape(name)}</a>' for i, name in enumerate(parts))
    body = ''.join(
        f'<section id="part{i}"><h2>{escape(name)}</h2>{html}</section>\n'
        for i, (name, html) in enumerate(parts.items()))
    lines = ''.join(f'<p class="pale">{escape(line)}</p>' for line in intro)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n'
        f'<header><h1>{escape(title)}</h1>{lines}<nav>{links}</nav></header>\n<main>\n{body}</main>\n</body>\n</html>\n')


def render_table(
        header: Sequence[str],
        rows: Sequence[Sequence[Any]],
        words: bool = False,
        bars: Optional[Sequence[Sequence[Optional[float]]]] = None,
) -> str:
    """ A table that scrolls in itself if it is too wide.

    Args:
        header: Names of the columns.
        rows: Cells as text; the first of a row is its name.
        words: Whether cells are words, not numbers.
        bars: For each cell after the first a part from 0 to 1 that is coloured, or None.
    """
    lines = []
    for number, row in enumerate(rows):
        cells = [f'<th scope="row">{escape(str(row[0]))}</th>']
        for place, cell in enumerate(row[1:]):
            part = bars[number][place] if bars else None
            style = ''
            if part is not None:
                percent = f'{100 * min(1., max(0., part)):.1f}%'
                style = f' style="background:linear-gradient(90deg,#d2e3fc {percent},transparent {percent})"'
            cells.append(f'<td{style}>{escape(str(cell))}</td>')
        lines.append(f'<tr>{"".join(cells)}</tr>')
    head = ''.join(f'<th scope="col">{escape(name)}</th>' for name in header)
    return (
        f'<div class="scroll"><table class="{"words" if words else "numbers"}"><thead><tr>{head}</tr></thead>'
        f'<tbody>{"".join(lines)}</tbody></table></div>')


def render_picture(path: Union[str, Path], caption: str) -> str:
    """ A picture inside the page.

    Where there is little room it gets smaller, but not by more than half; then it scrolls, for its words to be read.

    Args:
        path: Image file; a wide one is made smaller.
        caption: Words below it.
    """
    try:
        content = Path(path).read_bytes()
        with Image.open(io.BytesIO(content)) as image:
            image.load()
            kind, size = image.format, image.size
            if image.width > MOST_PIXELS:
                size = MOST_PIXELS, max(1, round(image.height * MOST_PIXELS / image.width))
                smaller = image if image.mode in ('RGB', 'RGBA', 'L') else image.convert('RGBA')
                kind = 'JPEG' if kind == 'JPEG' else 'PNG'
                buffer = io.BytesIO()
                smaller.resize(size, Image.Resampling.LANCZOS).save(buffer, kind, quality=88)
                content = buffer.getvalue()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UsageError(f'Expected a picture, but got {path}, which can not be read: {error}') from error
    data = base64.b64encode(content).decode()
    return (
        f'<figure><div class="scroll"><img src="data:{Image.MIME[kind]};base64,{data}" width="{size[0]}" '
        f'height="{size[1]}" style="min-width:{round(0.55 * size[0])}px" alt="{escape(caption)}"></div>'
        f'<figcaption>{escape(caption)}</figcaption></figure>')


def render_key(names: Sequence[str]) -> str:
    """ What colour is whose.

    Args:
        names: Names, in the order of the colours.
    """
    marks = (f'<span><i style="background:{color_of(i)}"></i>{escape(name)}</span>' for i, name in enumerate(names))
    return f'<p class="key">{"".join(marks)}</p>'


def color_of(number: int) -> str:
    """The colour of a line."""
    return COLORS[number % len(COLORS)]


def render_curves(title: str, curves: Sequence[tuple[int, bool, Sequence[tuple[float, float]]]]) -> str:
    """ Lines over epochs, drawn as SVG.

    Args:
        title: Words above.
        curves: Number of the colour, whether the line is dashed, and its points (x, y), for each line.
    """
    points = [point for _, _, line in curves for point in line if math.isfinite(point[1])]
    if not points:
        return ''
    width, height, left, right, top, bottom = 360, 240, 52, 12, 28, 34
    xs, ys = _ticks(*_range([x for x, _ in points]), whole=True), _ticks(*_range([y for _, y in points]))
    (low_x, high_x), (low_y, high_y) = _range([*xs, *(x for x, _ in points)]), _range([*ys, *(y for _, y in points)])

    def place(x: float, y: float) -> tuple[float, float]:
        return (left + (x - low_x) / (high_x - low_x) * (width - left - right),
                height - bottom - (y - low_y) / (high_y - low_y) * (height - top - bottom))

    parts = [f'<text x="{left}" y="16" font-size="13" font-weight="600">{escape(title)}</text>']
    for y in ys:
        _, at = place(low_x, y)
        parts.append(
            f'<line x1="{left}" x2="{width - right}" y1="{at:.1f}" y2="{at:.1f}" stroke="#e8eaed"/>'
            f'<text x="{left - 6}" y="{at + 4:.1f}" font-size="11" text-anchor="end">{y:.6g}</text>')
    for x in xs:
        at, _ = place(x, low_y)
        parts.append(
            f'<text x="{at:.1f}" y="{height - bottom + 15}" font-size="11" text-anchor="middle">{x:.6g}</text>')
    parts.append(
        f'<text x="{(left + width - right) / 2:.1f}" y="{height - 4}" font-size="11" text-anchor="middle">epoch</text>')
    for number, dashed, line in curves:
        places = [place(x, y) for x, y in line if math.isfinite(y)]
        style = ' stroke-dasharray="5 3"' if dashed else ''
        parts.append(
            f'<polyline fill="none" stroke="{color_of(number)}" stroke-width="1.8"{style} '
            f'points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}"/>')
        if len(places) == 1:
            parts.append(f'<circle cx="{places[0][0]:.1f}" cy="{places[0][1]:.1f}" r="3" fill="{color_of(number)}"/>')
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title)}" fill="#202124" font-family="sans-serif">{"".join(parts)}</svg>')


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - (abs(low) or 1.) / 2, high + (abs(high) or 1.) / 2)


def _ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """At most six round numbers from `low` to `high`."""
    rough = (high - low) / 5
    power = 10. ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    step = max(1., step) if whole else step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]
