""" Show where models see a class: class activation maps of one or several checkpoints side by side

    python -m timm_splicemix.analysis.cam runs/plain runs/splicemix --images photo.jpg --classes cup person
    python -m timm_splicemix.analysis.cam runs/vit/last.pth.tar --images a.jpg b.jpg --classes dog --output runs/vit

The map of a class is its logit when the head is applied to each position of the feature map alone, which works for CNNs
and transformers. With average pooling and a linear head, the mean of the map is the logit of the image. If the head of
a transformer uses a class token, the token of each position takes its place.

The command prints the probability of each class and the position of the maximum of its map. The figure has a row for
each image and class and a column for each checkpoint. Colours range from the minimum to the maximum of each map: they
show where a model sees the class, and the probability above shows how confident it is.
"""
import argparse
import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Sequence, Union

import torch
import torch.nn.functional as F
from torch import nn

from ..args import command
from ..data import decode_image
from ..draw import load_pyplot, plot_text, save_figure
from ..errors import UsageError
from ..files import format_table, read_bytes
from ..models import FeatureMap, has_head
from ..models.feature_map import (
    REFUSALS,
    HeadProbe,
    NoFeatureMap,
    model_name,
    probing,
    run_features,
)
from ..run.predictor import ImageReader
from .common import (
    Checkpoint,
    create_checkpoint_parser,
    load_checkpoints,
    write_analysis,
)

NAME = 'cam'
MAX_ROWS = 60  # a figure of about 13,000 pixels


def parse_args(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = create_checkpoint_parser(NAME, __doc__)
    parser.add_argument('--images', nargs='+', required=True, metavar='FILE', help='image files')
    parser.add_argument('--classes', nargs='+', required=True, metavar='NAME', help='names of classes')
    return parser.parse_args(argv)


@dataclass(frozen=True)
class PositionHead:
    """ The head of a model, applied to each position of the feature map alone.

    Args:
        model: The model, in evaluation mode.
        feature_map: Layout of its features.
        replaces_prefix: Replace the class tokens, which the head uses, by the token of each position.
    """
    model: nn.Module
    feature_map: FeatureMap
    replaces_prefix: bool

    @classmethod
    def of(cls, model: nn.Module, input_size: Union[int, tuple[int, ...]]) -> 'PositionHead':
        """ Find out what the head of a model uses, by a forward pass.

        Args:
            model: A model with timm's interface.
            input_size: Image size: a number, (height, width) or (channels, height, width).
        """
        head = getattr(model, 'multilabel_head', None)
        if head is not None and head.num_maps > 1:
            raise UsageError(
                f'Expected a head on one feature map, but got {model.head_name}, which combines {head.num_maps}: it '
                'cannot be applied to single positions.')
        with probing(model):
            try:
                feature_map, features = run_features(model, input_size)
            except NoFeatureMap as error:
                raise UsageError(
                    f'Expected a model with one feature map, but got {model_name(model)}: {error.reason}.'
                ) from error
            try:
                probe = HeadProbe(model, feature_map, features)
                head = cls(model, feature_map, not probe.depends_on_maps_only())
                logits = head(features)
            except REFUSALS as error:
                raise UsageError(
                    f'The head of {model_name(model)} cannot be applied to single positions of the feature map: '
                    f'{str(error).splitlines()[0] if str(error) else error!r}') from error
        if feature_map.num_prefix == 0 and head.replaces_prefix:
            raise UsageError(
                f'The logits of {model_name(model)} do not depend on the feature map: the weights of its head are 0 '
                'or not finite.')
        if logits.shape[1] != model.num_classes:
            raise UsageError(
                f'Expected {model.num_classes} logits for each position, but got {logits.shape[1]} from '
                f'{model_name(model)}.')
        return head

    def __call__(self, features: torch.Tensor, image_size: Optional[tuple[int, int]] = None) -> torch.Tensor:
        """ Compute the logits of each position, (N, classes, h, w).

        Args:
            features: Return value of `forward_features` for N images.
            image_size: Height and width of the images, if they differ from `input_size`.
        """
        maps, prefix = self.feature_map.split(features, image_size)
        number, channels, height, width = maps.shape
        positions = maps.permute(0, 2, 3, 1).reshape(-1, channels, 1, 1)  # (N * h * w, C, 1, 1)
        if prefix is not None:
            prefix = prefix.repeat_interleave(height * width, dim=0)
            if self.replaces_prefix:
                prefix = positions.reshape(-1, 1, channels).expand_as(prefix)
        logits = self.model.forward_head(self.feature_map.join(positions, prefix))
        return logits.reshape(number, height, width, -1).permute(0, 3, 1, 2)


@torch.inference_mode()
def class_activation_maps(head: PositionHead, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the logits (N, classes) and the maps (N, classes, h, w) of normalised images (N, channels, H, W)."""
    image_size = tuple(images.shape[2:])
    features = head.model.forward_features(images)
    options = {'image_size': image_size} if has_head(head.model) else {}
    return head.model.forward_head(features, **options).float(), head(features, image_size).float()


@dataclass(frozen=True)
class Card:
    """ A map to draw.

    Args:
        pixels: (H, W, 3) input of the model, from 0 to 1.
        heat: (h, w) logits.
        probability: Probability of the class in the whole image.
    """
    pixels: torch.Tensor
    heat: torch.Tensor
    probability: float


def find_class(checkpoint: Checkpoint, name: str) -> int:
    if name in checkpoint.class_names:
        return checkpoint.class_names.index(name)
    nearest = difflib.get_close_matches(name, checkpoint.class_names, n=3, cutoff=0.5) or checkpoint.class_names[:5]
    raise UsageError(
        f"Expected one of the {len(checkpoint.class_names)} classes of {checkpoint.name}, such as "
        f"{', '.join(nearest)}, but got '{name}'.")


def read_image(path: Union[str, Path], mode: str) -> Any:
    """Read a PIL image in a mode of PIL."""
    data = read_bytes(path)
    try:
        return decode_image(data, 'pil', mode)
    except (OSError, ValueError) as error:
        raise UsageError(f'Expected an image, but got {path}, which cannot be decoded: {error}') from error


def compute_maps(
        checkpoint: Checkpoint,
        images: Sequence[str],
        classes: Sequence[str],
) -> tuple[list[dict[str, Any]], dict[tuple[str, str], Card]]:
    """ Compute the maps of all classes in all images.

    Returns:
        Rows of the table, and the map of each image and class.
    """
    config = checkpoint.info.data_config
    reader = ImageReader(checkpoint.info)
    head = PositionHead.of(checkpoint.model, tuple(config['input_size']))
    mean, std = (torch.tensor(config[key]).view(-1, 1, 1) for key in ('mean', 'std'))
    rows, cards = [], {}
    for file in images:
        image = reader.to_tensor(read_image(file, reader.mode))
        logits, maps = class_activation_maps(head, image[None])
        probabilities = logits.sigmoid() if checkpoint.info.multi_label else logits.softmax(dim=1)
        shown = image * std + mean
        shown = shown[:3 if len(shown) >= 3 else 1]  # without the alpha channel
        pixels = shown.clamp(0, 1).expand(3, -1, -1).permute(1, 2, 0)  # (H, W, 3)
        for name in classes:
            index = find_class(checkpoint, name)
            heat = maps[0, index]
            if not heat.isfinite().all():
                raise UsageError(f'Non-finite logits of {checkpoint.name} for {file}. Check its weights.')
            top, left = divmod(int(heat.argmax()), heat.shape[1])
            rows.append({
                'image': str(file), 'class': name, 'checkpoint': checkpoint.name,
                'probability': float(probabilities[0, index]), 'logit': float(logits[0, index]),
                'mean': float(heat.mean()), 'highest': float(heat.max()),
                'x': round((left + 0.5) / heat.shape[1], 4), 'y': round((top + 0.5) / heat.shape[0], 4)})
            cards[file, name] = Card(pixels, heat, rows[-1]['probability'])
    return rows, cards


def draw_maps(columns: dict[str, dict[tuple[str, str], Card]], path: Path) -> None:
    """Draw a row for each image and class: the image, then the map of each checkpoint."""
    pyplot = load_pyplot()
    if pyplot is None:
        return
    keys = list(next(iter(columns.values())))
    figure, axes = pyplot.subplots(
        len(keys), 1 + len(columns), figsize=(2.2 * (1 + len(columns)), 2.2 * len(keys) + 0.2), squeeze=False,
        layout='constrained')
    for row, key in zip(axes, keys):
        file, name = key
        first = next(iter(columns.values()))[key]
        row[0].imshow(first.pixels.numpy())
        row[0].set_title(_fit(Path(file).name), fontsize=8)
        row[0].set_ylabel(_fit(name), fontsize=9)
        for axis, (title, cards) in zip(row[1:], columns.items()):
            card = cards[key]
            axis.imshow(card.pixels.numpy())
            axis.imshow(to_heat(card.heat, card.pixels.shape[:2]).numpy(), cmap='jet', vmin=0, vmax=1, alpha=0.5)
            axis.set_title(f'{_fit(title)}\n{card.probability:.3f}', fontsize=8)
        for axis in row:
            axis.set(xticks=[], yticks=[])
    save_figure(figure, path)


def to_heat(logits: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Scale a map (h, w) to the range 0 to 1 and to the size of its image; a constant map becomes 0."""
    low, high = logits.min(), logits.max()
    heat = (logits - low) / (high - low) if high > low else torch.zeros_like(logits)
    return F.interpolate(heat[None, None], size=tuple(size), mode='bilinear', align_corners=False)[0, 0]


def _fit(text: str, length: int = 28) -> str:
    """Cut a long text at its start."""
    return plot_text(text if len(text) <= length else f'...{text[3 - length:]}')


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    args = parse_args(argv)
    images, classes = (list(dict.fromkeys(names)) for names in (args.images, args.classes))
    if len(images) * len(classes) > MAX_ROWS:
        raise UsageError(
            f'Expected at most {MAX_ROWS} maps per checkpoint, but got {len(images)} images of {len(classes)} classes.')
    checkpoints = load_checkpoints(args)
    for checkpoint in checkpoints:
        for name in classes:
            find_class(checkpoint, name)
    found = {checkpoint.name: compute_maps(checkpoint, images, classes) for checkpoint in checkpoints}
    tables = [rows for rows, _ in found.values()]
    rows = [row for same in zip(*tables) for row in same]  # by image and class, then by checkpoint
    print(format_table(rows))
    print('\nmean, highest: mean and maximum of the map, in logits; x, y: position of the maximum, from 0 to 1')
    columns = {name: cards for name, (_, cards) in found.items()}
    write_analysis(args.output, NAME, {NAME: rows}, lambda path: draw_maps(columns, path))


if __name__ == '__main__':
    main()
