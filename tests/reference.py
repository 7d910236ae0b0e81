""" Slow plain-loop oracles """
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


def splice(images: torch.Tensor, targets: torch.Tensor, record, fill: float = 0.) -> tuple[torch.Tensor, torch.Tensor]:
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
            for label, value in zip(labels, targets[sources[cell]].tolist()):
                label.append(value)
        mixed_images.append(canvas)
        mixed_targets.append([union(label) for label in labels])
    return torch.stack(mixed_images), torch.tensor(mixed_targets)
