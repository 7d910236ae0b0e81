""" Slow plain-loop implementations to compare with """
import torch


def resize_bilinear(image: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Bilinear resize with aligned corners of (C, H, W), one output pixel at a time, in double precision."""
    channels, old_height, old_width = image.shape
    out = torch.zeros(channels, height, width, dtype=torch.float64)
    for y in range(height):
        for x in range(width):
            v = y * (old_height - 1) / (height - 1) if height > 1 else 0.
            u = x * (old_width - 1) / (width - 1) if width > 1 else 0.
            y0, x0 = min(int(v), old_height - 1), min(int(u), old_width - 1)
            y1, x1 = min(y0 + 1, old_height - 1), min(x0 + 1, old_width - 1)
            b, a = v - y0, u - x0
            for c in range(channels):
                p = image[c].double()
                out[c, y, x] = (
                    (1 - b) * ((1 - a) * p[y0, x0] + a * p[y0, x1]) + b * ((1 - a) * p[y1, x0] + a * p[y1, x1]))
    return out


def union(values: list[float]) -> float:
    """The label of several cells: the largest, but unknown (-1) beats absent (0)."""
    if any(value > 0 for value in values):
        return max(values)
    return -1. if -1. in values else 0.


def intersection(values: list[float]) -> float:
    """The label of several cells that must all have a class: the smallest, but unknown (-1) beats present (1)."""
    known = [value for value in values if value != -1]
    if any(value < 1 for value in known):
        return min(known)
    return -1. if -1. in values else 1.


def label(values: list[float], index: int, unknown_classes=(), all_classes=()) -> float:
    """The label of a class of a mixed image, from those of its visible cells."""
    if index in unknown_classes and len(values) > 1:
        return -1.
    return intersection(values) if index in all_classes else union(values)


def splice(
        images: torch.Tensor,
        targets: torch.Tensor,
        record,
        fill: float = 0.,
        unknown_classes=(),
        all_classes=(),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mixed images and targets of a record, one cell of one image at a time."""
    _, channels, height, width = images.shape
    rows, cols = record.grid.rows, record.grid.cols
    mixed_images, mixed_targets = [], []
    for sources, dropped in zip(record.sources.tolist(), record.dropped.tolist()):
        canvas = torch.full((channels, height, width), float('nan'), dtype=torch.float64)
        labels = [[] for _ in range(targets.shape[1])]
        for cell in range(rows * cols):
            i, j = cell // cols, cell % cols
            top, bottom = i * height // rows, (i + 1) * height // rows
            left, right = j * width // cols, (j + 1) * width // cols
            if dropped[cell]:
                canvas[:, top:bottom, left:right] = fill
                continue
            canvas[:, top:bottom, left:right] = resize_bilinear(images[sources[cell]], bottom - top, right - left)
            for values, value in zip(labels, targets[sources[cell]].tolist()):
                values.append(value)
        mixed_images.append(canvas)
        mixed_targets.append([
            label(values, index, unknown_classes, all_classes) for index, values in enumerate(labels)])
    return torch.stack(mixed_images), torch.tensor(mixed_targets)


def split_cells(maps: torch.Tensor, rows: int, cols: int) -> list[torch.Tensor]:
    """Cells of (M, C, H, W) maps, resized before if the grid doesn't divide them, one map and one cell at a time."""
    cells = []
    for one_map in maps:
        height, width = max(rows, one_map.shape[1] // rows * rows), max(cols, one_map.shape[2] // cols * cols)
        if (height, width) != one_map.shape[1:]:
            one_map = resize_bilinear(one_map, height, width)
        for row in range(rows):
            for col in range(cols):
                cells.append(one_map[
                    :, row * height // rows:(row + 1) * height // rows, col * width // cols:(col + 1) * width // cols])
    return cells


def consistency(maps: torch.Tensor, image_logits: torch.Tensor, records, head, detach: bool = True) -> torch.Tensor:
    """Consistency loss of the maps of all mixed images, one cell and one class at a time; keeps gradients."""
    teachers = image_logits.detach() if detach else image_logits
    total, terms, start = 0., 0, 0
    for record in records:
        cells = split_cells(maps[start:start + len(record.sources)], record.grid.rows, record.grid.cols)
        start += len(record.sources)
        for cell, source, dropped in zip(cells, record.sources.flatten().tolist(), record.dropped.flatten().tolist()):
            if dropped:
                continue
            student = head(cell.unsqueeze(0))[0]
            for x, z in zip(student, teachers[source]):
                p, q = 1 / (1 + torch.exp(-x)), 1 / (1 + torch.exp(-z))
                total = total - q * torch.log(p) - (1 - q) * torch.log(1 - p)
                terms += 1
    return total / terms
