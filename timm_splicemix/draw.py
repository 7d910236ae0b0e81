""" Pictures: batches and predictions by PIL, curves and bars by matplotlib """
import logging
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any, Optional, Sequence, Union

import torch
from PIL import Image, ImageDraw, ImageFont

from .errors import UsageError
from .files import atomic_write, printable
from .fonts import Typeface, drawn_characters, find_fonts, font_characters
from .mix import Plan, SpliceRecord

_logger = logging.getLogger(__name__)
INK, PALE, PAPER, BAR = '#202124', '#5f6368', '#ffffff', '#d2e3fc'
COLORS = ('#1a73e8', '#d93025', '#188038', '#f9ab00', '#9334e6', '#12b5cb', '#e8710a', PALE)  # of lines and bars
_REGULAR, _MIXED = '#dadce0', COLORS[1]
_MARGIN, _LINE = 8, 15


def check_image_name(path: Union[str, Path]) -> None:
    """Raise an error unless PIL can write images with the suffix of `path`."""
    formats = Image.registered_extensions()
    if formats.get(Path(path).suffix.lower()) not in Image.SAVE:
        raise UsageError(f"Expected a file name that ends in an image format, such as .png, but got '{path}'.")


def save_image(image: Image.Image, path: Union[str, Path]) -> None:
    """Write an image in the format of its suffix."""
    check_image_name(path)
    with atomic_write(path) as temporary:
        image.save(temporary, optimize=True)


def load_pyplot() -> Optional[ModuleType]:
    """Import matplotlib's pyplot without a screen; if it is not installed, log a warning and return None."""
    try:
        import matplotlib
    except ImportError:
        _logger.warning("Plots need matplotlib: pip install 'timm-splicemix[plot]'.")
        return None
    matplotlib.use('Agg')
    import matplotlib.pyplot
    return matplotlib.pyplot


def save_figure(figure: Any, path: Union[str, Path]) -> None:
    """Write a matplotlib figure in the format of its suffix, and close it, also if it cannot be written."""
    if Path(path).suffix.lower().lstrip('.') not in figure.canvas.get_supported_filetypes():
        raise UsageError(f"Expected a file name that ends in a format for plots, such as .png, but got '{path}'.")
    _set_fonts(figure)
    try:
        with atomic_write(path) as temporary, warnings.catch_warnings():
            warnings.filterwarnings('ignore', 'Glyph .* missing', UserWarning)  # logged by find_fonts
            figure.savefig(temporary, dpi=110)
    finally:
        load_pyplot().close(figure)


def _set_fonts(figure: Any) -> None:
    """Add installed fonts to the texts of a figure that have characters which matplotlib's font lacks."""
    from matplotlib import font_manager
    from matplotlib.text import Text
    has = font_characters(Path(font_manager.findfont(font_manager.FontProperties())))
    lacking = {
        text: {character for character in drawn_characters([text.get_text()]) if not has(character)}
        for text in figure.findobj(Text)}
    fonts = find_fonts(set().union(*lacking.values())).files
    names = {entry.fname: entry.name for entry in font_manager.fontManager.ttflist}
    for path in map(str, fonts):
        if path not in names:
            font_manager.fontManager.addfont(path)
            names[path] = font_manager.fontManager.ttflist[-1].name
    families = [names[str(path)] for path in fonts]
    for text, characters in lacking.items():
        if characters:
            text.set_fontfamily([*text.get_fontfamily(), *families])


def plot_text(text: str) -> str:
    """Escape control characters and what matplotlib treats specially: dollars, and a leading underscore in legends."""
    text = printable(text).replace('$', r'\$')
    return f'\u200b{text}' if text.startswith('_') else text


def describe_target(target: torch.Tensor, class_names: Sequence[str]) -> str:
    """List the classes of a target (classes,): soft labels with their value, unknown ones with a question mark."""
    words = []
    for value, name in zip(target.tolist(), class_names):
        if value == 1:
            words.append(name)
        elif value == -1:
            words.append(f'{name}?')
        elif value > 0:
            words.append(f'{name} {value:.2g}')
    return ', '.join(words) or 'nothing'


def draw_batch(
        images: torch.Tensor,
        targets: torch.Tensor,
        plan: Plan,
        class_names: Sequence[str],
        title: str,
        columns: Optional[int] = None,
) -> Image.Image:
    """ Draw a mixed batch with its labels.

    Each regular image has its index in the batch as caption; each cell of a mixed image shows the index of its source,
    or that it was dropped.

    Args:
        images: (K + M, 3, H, W) uint8 images after mixing.
        targets: (K + M, classes) targets after mixing.
        plan: The plan that was applied.
        class_names: Name of each class.
        title: Title of the picture.
        columns: Images per row, None for about a square.
    """
    _, _, height, width = images.shape
    columns = columns or max(1, round((len(images) * height / width) ** 0.5))
    columns = min(columns, max(1, len(images)))
    font, bold = Typeface(11, class_names), Typeface(14, [title])
    small = ImageFont.load_default(size=10)
    num_kept = len(plan.kept)
    cells = plan.cells()
    texts = [
        _wrap(f'{caption}: {describe_target(target, class_names)}', width, font)
        for caption, target in zip(plan.captions(), targets)
    ]
    # Regular and mixed images are in separate rows.
    rows = [list(range(num_kept))[i:i + columns] for i in range(0, num_kept, columns)]
    rows += [list(range(num_kept, len(images)))[i:i + columns] for i in range(0, len(images) - num_kept, columns)]
    heights = [height + 6 + _LINE * max(len(texts[i]) for i in row) for row in rows]

    sheet_width = columns * (width + _MARGIN) + _MARGIN
    title_lines = _wrap(title, sheet_width - 2 * _MARGIN, bold)
    top = 12 + 18 * len(title_lines)
    sheet = Image.new('RGB', (sheet_width, top + sum(heights) + _MARGIN * len(rows)), PAPER)
    draw = ImageDraw.Draw(sheet)
    for number, line in enumerate(title_lines):
        bold.draw(draw, (_MARGIN, 8 + 18 * number), line, INK)
    for row, row_height in zip(rows, heights):
        for column, index in enumerate(row):
            left = _MARGIN + column * (width + _MARGIN)
            sheet.paste(Image.fromarray(images[index].permute(1, 2, 0).contiguous().numpy()), (left, top))
            if index in cells:
                _draw_cells(draw, *cells[index], (left, top, width, height), small)
            outline = _REGULAR if index < num_kept else _MIXED
            draw.rectangle((left - 1, top - 1, left + width, top + height), outline=outline)
            for number, text in enumerate(texts[index]):
                font.draw(draw, (left, top + height + 2 + _LINE * number), text, INK)
        top += row_height + _MARGIN
    return sheet


def _draw_cells(
        draw: ImageDraw.ImageDraw,
        record: SpliceRecord,
        row: int,
        place: tuple[int, int, int, int],
        font: ImageFont.ImageFont,
) -> None:
    left, top, width, height = place
    rows, cols = record.grid.rows, record.grid.cols
    for cell, (source, dropped) in enumerate(zip(record.sources[row].tolist(), record.dropped[row].tolist())):
        i, j = divmod(cell, cols)
        x0, x1 = left + j * width // cols, left + (j + 1) * width // cols
        y0, y1 = top + i * height // rows, top + (i + 1) * height // rows
        draw.rectangle((x0 - 1, y0 - 1, x1, y1), outline=PAPER)
        if dropped:
            draw.line((x0, y0, x1 - 1, y1 - 1), fill=PALE)
            draw.line((x0, y1 - 1, x1 - 1, y0), fill=PALE)
        text = 'dropped' if dropped else f'#{source}'
        box = draw.textbbox((x0 + 3, y0 + 1), text, font=font)
        if box[2] + 2 < x1:  # in a cell that is too small, the cross is enough
            draw.rectangle((box[0] - 2, box[1] - 1, box[2] + 1, box[3] + 1), fill=PAPER)
            draw.text((x0 + 3, y0 + 1), text, fill=PALE if dropped else INK, font=font)


def _wrap(text: str, width: int, font: Typeface) -> list[str]:
    """Break text into lines of at most `width` pixels, between words if possible."""
    lines, current = [], ''
    for word in text.split():
        longer = f'{current} {word}'.strip()
        if current and font.getlength(longer) > width:
            lines.append(current)
            longer = word
        while len(longer) > 1 and font.getlength(longer) > width:
            fitting = (end for end in range(len(longer) - 1, 1, -1) if font.getlength(longer[:end]) <= width)
            end = next(fitting, 1)
            lines.append(longer[:end])
            longer = longer[end:]
        current = longer
    return lines + [current]


def draw_curves(rows: Sequence[dict[str, str]], path: Union[str, Path]) -> bool:
    """Draw losses, metric and learning rate over the rows of a summary.csv; returns False without matplotlib."""
    pyplot = load_pyplot()
    if pyplot is None or not rows:
        return False
    names = list(rows[0])
    metric = next((name for name in ('mAP', 'top1') if f'eval_{name}' in names), None)
    panels = {
        'loss': [name for name in names if name.endswith('loss')],
        metric: [name for name in names if metric and name in (f'eval_{metric}', f'eval_ema_{metric}')],
        'learning rate': ['lr'],
    }
    panels = {title: columns for title, columns in panels.items() if title and columns}
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.5 * len(panels), 3.4), layout='constrained')
    for axis, (title, columns) in zip(axes, panels.items()):
        for column in columns:
            points = [(int(row['epoch']), float(row[column])) for row in rows if row[column] not in ('', None)]
            if points:
                axis.plot(*zip(*points), marker='.', label=column)
        axis.set_title(title)
        axis.set_xlabel('epoch')
        axis.grid(alpha=0.3)
        if len(columns) > 1:
            axis.legend(fontsize='small')
    save_figure(figure, path)
    return True


def save_batch(
        images: torch.Tensor,
        targets: torch.Tensor,
        plan: Plan,
        class_names: Optional[Sequence[str]],
        mean: Sequence[float],
        std: Sequence[float],
        path: Union[str, Path],
) -> None:
    """ Write a picture of a batch as the model gets it.

    Args:
        images: (K + M, C, H, W) normalised images.
        targets: (K + M, classes) targets, or (K,) class indices.
        plan: The plan that was applied.
        class_names: Name of each class, None for indices.
        mean: Mean of the normalisation.
        std: Standard deviation of the normalisation.
        path: Image file.
    """
    if targets.ndim == 1:
        targets = torch.nn.functional.one_hot(targets.long())
    names = class_names or [str(index) for index in range(targets.shape[1])]
    channels = images.shape[1]
    shift, scale = (torch.tensor(list(values)[:channels]).view(1, -1, 1, 1) for values in (mean, std))
    pixels = ((images.detach().float().cpu() * scale + shift) * 255).round().clamp(0, 255).to(torch.uint8)
    pixels = pixels.expand(-1, 3, -1, -1) if channels == 1 else pixels[:, :3]
    title = f'{len(plan.kept)} regular and {plan.num_mixed} mixed images'
    save_image(draw_batch(pixels, targets.cpu(), plan, names, title), path)


def draw_predictions(
        cards: Sequence[tuple[Image.Image, str, dict[str, float]]],
        size: int,
        columns: Optional[int] = None,
) -> Image.Image:
    """ Draw a contact sheet of images with their predicted classes and bars of their probabilities.

    Args:
        cards: Image of at most `size` pixels, title, and probability of each predicted class.
        size: Width and height that each image gets.
        columns: Images per row, None for about a square.
    """
    columns = min(columns or max(1, round(len(cards) ** 0.5)), len(cards))
    font = Typeface(11, (name for _, _, labels in cards for name in labels))
    bold = Typeface(12, (title for _, title, _ in cards))
    rows = [cards[start:start + columns] for start in range(0, len(cards), columns)]
    heights = [size + 22 + _LINE * max(max(1, len(labels)) for _, _, labels in row) for row in rows]
    sheet = Image.new(
        'RGB', (columns * (size + _MARGIN) + _MARGIN, sum(heights) + _MARGIN * (len(rows) + 1)), PAPER)
    draw = ImageDraw.Draw(sheet)
    top = _MARGIN
    for row, height in zip(rows, heights):
        for column, (image, title, labels) in enumerate(row):
            left = _MARGIN + column * (size + _MARGIN)
            draw.rectangle((left - 1, top - 1, left + size, top + size), outline=_REGULAR)
            sheet.paste(image, (left + (size - image.width) // 2, top + (size - image.height) // 2))
            bold.draw(draw, (left, top + size + 3), _shorten(title, size, bold), INK)
            for number, (name, value) in enumerate(labels.items()):
                y = top + size + 20 + _LINE * number
                draw.rectangle((left, y, left + round((size - 1) * value), y + _LINE - 3), fill=BAR)
                font.draw(draw, (left + 2, y), _shorten(f'{value:.2f} {name}', size - 4, font), INK)
            if not labels:
                font.draw(draw, (left, top + size + 20), 'nothing', PALE)
        top += height + _MARGIN
    return sheet


def _shorten(text: str, width: int, font: Typeface) -> str:
    """Cut text to at most `width` pixels."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(f'{text}...') > width:
        text = text[:-1]
    return f'{text}...'


def draw_classes(rows: Sequence[dict[str, Any]], result: dict[str, Any], path: Union[str, Path]) -> None:
    """ Draw the AP and the number of positives of each class.

    Args:
        rows: Return value of `results.class_rows`.
        result: Content of results.json.
        path: Image file; not written without matplotlib.
    """
    pyplot = load_pyplot()
    rows = [row for row in rows if row['positives']]
    if pyplot is None or not rows:
        return
    figure, axes = pyplot.subplots(figsize=(7, max(3., 0.19 * len(rows) + 1.3)), layout='constrained')
    places = range(len(rows))
    axes.barh(places, [row['AP'] for row in rows], color=COLORS[0])
    for place, row in zip(places, rows):
        axes.text(row['AP'] + 1, place, f'{row["positives"]:,}', va='center', fontsize=7, color=PALE)
    mean = result['metrics']['mAP']
    axes.axvline(mean, color=COLORS[1], linewidth=1, label=f'mAP {mean:.2f}')
    axes.set(
        yticks=places, yticklabels=[plot_text(row['class']) for row in rows], xlim=(0, 112),
        xlabel='AP in %, number of positives',
        title=plot_text(f'{result["model"]}, {result["dataset"]} {result["split"]}, {result["num_images"]:,} images'))
    axes.tick_params(axis='y', labelsize=8 if len(rows) <= 40 else 6)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.legend(loc='lower right', fontsize='small')
    save_figure(figure, path)


def draw_sizes(curves: dict[str, Sequence[dict[str, Any]]], path: Union[str, Path], metric: str = 'mAP') -> None:
    """ Draw a metric over the image size, one line per model, and mark the training size.

    Args:
        curves: For each model, rows of the size, whether it is the training size, and metrics.
        path: Image file; not written without matplotlib.
        metric: Metric to draw.
    """
    pyplot = load_pyplot()
    if pyplot is None:
        return
    figure, axes = pyplot.subplots(figsize=(5.5, 4), layout='constrained')
    ticks = sorted({row['size'] for rows in curves.values() for row in rows})
    for name, rows in curves.items():
        rows = sorted(rows, key=lambda row: row['size'])
        axes.plot([row['size'] for row in rows], [row[metric] for row in rows], marker='o', label=plot_text(name))
    for size in {row['size'] for rows in curves.values() for row in rows if row['trained']}:
        axes.axvline(size, color=PALE, linestyle='--', linewidth=1, label=f'trained at {size}')
    axes.set_xscale('log', base=2)
    axes.set_xticks(ticks, [str(size) for size in ticks])
    axes.minorticks_off()
    axes.set(xlabel='image size in pixels', ylabel=f'{metric} in %')
    axes.grid(alpha=0.3)
    axes.legend(fontsize='small')
    save_figure(figure, path)


def draw_statistics(counts: torch.Tensor, labels: torch.Tensor, class_names: Sequence[str], title: str):
    """ Draw a figure of images per class, labels per image and classes that occur together.

    Args:
        counts: (classes, classes) images that have both classes.
        labels: (N,) labels of each image.
        class_names: Name of each class.
        title: Title of the figure.

    Returns:
        The figure; None without matplotlib.
    """
    pyplot = load_pyplot()
    if pyplot is None:
        return None
    order = counts.diagonal().argsort(descending=True, stable=True)
    names = [plot_text(class_names[index]) for index in order.tolist()]
    figure, (left, middle, right) = pyplot.subplots(
        1, 3, figsize=(15, max(4., 0.16 * len(names) + 1.5)), width_ratios=(4, 2, 4), layout='constrained')
    figure.suptitle(plot_text(title))
    left.barh(range(len(names)), counts.diagonal()[order].tolist())
    left.set(yticks=range(len(names)), yticklabels=names, xlabel='images', title='images per class')
    left.invert_yaxis()
    left.margins(y=0.01)
    heights = torch.bincount(labels).tolist()
    middle.bar(range(len(heights)), heights)
    middle.set(xlabel='labels', ylabel='images', title='labels per image')
    part = counts[order][:, order] / counts.diagonal()[order].clamp(min=1).unsqueeze(1)
    picture = right.imshow(part.numpy(), vmin=0, vmax=1, cmap='viridis', aspect='auto')
    right.set(
        xticks=range(len(names)), yticks=range(len(names)), yticklabels=names,
        title="fraction of the row's images that have the column's class")
    right.set_xticks(range(len(names)), names, rotation=90)
    for axes in (left, right):
        axes.tick_params(labelsize=8 if len(names) <= 40 else 5)
    figure.colorbar(picture, ax=right)
    return figure
