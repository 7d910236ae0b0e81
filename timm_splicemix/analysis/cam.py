""" Show where models see a class: class activation maps of one or several checkpoints, side by side

    python -m timm_splicemix.analysis.cam runs/plain runs/splicemix --images photo.jpg --classes cup person
    python -m timm_splicemix.analysis.cam runs/vit/last.pth.tar --images a.jpg b.jpg --classes dog --output runs/vit

The map of a class is the logit that the model's head gives to each position of the feature map on its own: it works
for CNNs and transformers. With average pooling and a linear head its mean is the logit of the image. A transformer
whose head reads a class token gets each position's token in place of it.

It prints a table of the probability of each class and where its map is highest. The picture has a row for each image
and class, and a column for each checkpoint. Colours go from the lowest to the highest value of each map: they say where
a model looks, and the probability above them how sure it is.
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
from ..data import create_transform, decode_image
from ..draw import load_pyplot, save_figure
from ..errors import UsageError
from ..files import write_csv
from ..models import FeatureMap
from ..models.feature_map import (
    REFUSALS,
    HeadProbe,
    NoFeatureMap,
    model_name,
    probing,
    run_features,
)
from .checkpoints import Checkpoint, load_checkpoints
from .common import create_parser, format_table, output_folder

NAME = 'cam'
MOST_ROWS = 60  # of the picture, which is as tall as 13,000 pixels then


def parse_args(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = create_parser(
        NAME, __doc__, 'CHECKPOINT', 'checkpoints of train.py, or folders of runs, of which the best one is taken')
    parser.add_argument('--images', nargs='+', required=True, metavar='FILE', help='images to look at')
    parser.add_argument('--classes', nargs='+', required=True, metavar='NAME', help='classes to look for')
    parser.add_argument('--use-ema', action='store_true', help="take the checkpoints' moving averages of the weights")
    parser.add_argument('--model', metavar='NAME', help='any model of timm, where a checkpoint does not say which')
    return parser.parse_args(argv)


@dataclass(frozen=True)
class PositionHead:
    """ The head of a model, applied to each position of the feature map on its own.

    Args:
        model: The model, in evaluation mode.
        feature_map: Layout of its features.
        replaces_prefix: Whether the head reads class tokens, in place of which each position's token is put.
    """
    model: nn.Module
    feature_map: FeatureMap
    replaces_prefix: bool

    @classmethod
    def of(cls, model: nn.Module, input_size: Union[int, tuple[int, ...]]) -> 'PositionHead':
        """ Find out, by a forward pass, what the head of a model reads.

        Args:
            model: A model with timm's interface.
            input_size: Size of the images: one number, (height, width) or (channels, height, width).
        """
        with probing(model):
            try:
                feature_map, features = run_features(model, input_size)
            except NoFeatureMap as error:
                raise UsageError(
                    f'Expected a model with one feature map to draw, but got {model_name(model)}: {error.reason}.'
                ) from error
            try:
                probe = HeadProbe(model, feature_map, features)
                head = cls(model, feature_map, not probe.sees_maps_alone())
                logits = head(features)
            except REFUSALS as error:
                raise UsageError(
                    'Expected a head that takes single positions of the feature map, but got that of '
                    f'{model_name(model)}: {str(error).splitlines()[0] if str(error) else error!r}') from error
        if feature_map.num_prefix == 0 and head.replaces_prefix:
            raise UsageError(
                f'Expected a head that follows the feature map, but got that of {model_name(model)}, which gives '
                'the same logits for all maps: its weights are 0, or not numbers.')
        if logits.shape[1] != model.num_classes:
            raise UsageError(
                f'Expected {model.num_classes} logits of each position, but got {logits.shape[1]} of '
                f'{model_name(model)}.')
        return head

    def __call__(self, features: torch.Tensor, image_size: Optional[tuple[int, int]] = None) -> torch.Tensor:
        """ The logits of each position.

        Args:
            features: What `forward_features` returned for N images.
            image_size: Height and width of the images, if their shape is not that of the described ones.

        Returns:
            (N, classes, h, w).
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
    """ The logits of images and of each of their positions.

    Args:
        head: What `PositionHead.of` returned.
        images: (N, channels, H, W), normalised.

    Returns:
        (N, classes), and maps (N, classes, h, w).
    """
    features = head.model.forward_features(images)
    return head.model.forward_head(features).float(), head(features, tuple(images.shape[2:])).float()


@dataclass(frozen=True)
class Card:
    """ One map to draw.

    Args:
        pixels: (H, W, 3) from 0 to 1, what the model was given.
        heat: (h, w) logits.
        probability: Of the class in the whole image.
    """
    pixels: torch.Tensor
    heat: torch.Tensor
    probability: float


def find_class(checkpoint: Checkpoint, name: str) -> int:
    """ The output of a model that stands for a class.

    Args:
        checkpoint: The model.
        name: Name of the class.
    """
    if name in checkpoint.class_names:
        return checkpoint.class_names.index(name)
    nearest = difflib.get_close_matches(name, checkpoint.class_names, n=3, cutoff=0.5) or checkpoint.class_names[:5]
    raise UsageError(
        f"Expected classes of {checkpoint.name}, but got '{name}': there are {', '.join(nearest)} among its "
        f'{len(checkpoint.class_names)}.')


def read_image(path: Union[str, Path], channels: int) -> Any:
    """ An image of PIL, or an error that names the file.

    Args:
        path: The file.
        channels: 1 for grey.
    """
    try:
        return decode_image(Path(path).read_bytes(), 'pil', 'L' if channels == 1 else 'RGB')
    except OSError as error:
        raise UsageError(f'Expected an image, but got {path}: {error.strerror or error}.') from error
    except ValueError as error:
        raise UsageError(f'Expected an image, but got {path}, which can not be read: {error}') from error


def look(
        checkpoint: Checkpoint,
        images: Sequence[str],
        classes: Sequence[str],
) -> tuple[list[dict[str, Any]], dict[tuple[str, str], Card]]:
    """ Maps of all classes in all images, by one checkpoint.

    Args:
        checkpoint: The model.
        images: Files.
        classes: Names.

    Returns:
        Rows of the table, and what to draw of each image and class.
    """
    config = checkpoint.info.data_config
    transform = create_transform(
        config['input_size'], mean=config['mean'], std=config['std'], interpolation=config['interpolation'],
        crop_pct=config['crop_pct'], crop_mode=config['crop_mode'])
    head = PositionHead.of(checkpoint.model, tuple(config['input_size']))
    mean, std = (torch.tensor(config[key]).view(-1, 1, 1) for key in ('mean', 'std'))
    rows, cards = [], {}
    for file in images:
        image = transform(read_image(file, config['input_size'][0]))
        logits, maps = class_activation_maps(head, image[None])
        probabilities = logits.sigmoid() if checkpoint.info.multi_label else logits.softmax(dim=1)
        pixels = (image * std + mean).clamp(0, 1)[:3].expand(3, -1, -1).permute(1, 2, 0)  # (H, W, 3)
        for name in classes:
            index = find_class(checkpoint, name)
            heat = maps[0, index]
            if not heat.isfinite().all():
                raise UsageError(f'Expected maps that are numbers, but got others of {checkpoint.name} for {file}.')
            top, left = divmod(int(heat.argmax()), heat.shape[1])
            rows.append({
                'image': str(file), 'class': name, 'checkpoint': checkpoint.name,
                'probability': float(probabilities[0, index]), 'logit': float(logits[0, index]),
                'mean': float(heat.mean()), 'highest': float(heat.max()),
                'x': round((left + 0.5) / heat.shape[1], 4), 'y': round((top + 0.5) / heat.shape[0], 4)})
            cards[file, name] = Card(pixels, heat, rows[-1]['probability'])
    return rows, cards


def draw_maps(columns: dict[str, dict[tuple[str, str], Card]]):
    """ A figure: a row for each image and class, the image, then a column for each checkpoint.

    Args:
        columns: What `look` returned of each checkpoint, by its name.

    Returns:
        The figure, None without matplotlib.
    """
    pyplot = load_pyplot()
    if pyplot is None:
        return None
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
    return figure


def to_heat(logits: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """ A map as large as its image, from 0 where it is lowest to 1 where it is highest; 0 if it is the same everywhere.

    Args:
        logits: (h, w).
        size: Height and width of the image.
    """
    low, high = logits.min(), logits.max()
    heat = (logits - low) / (high - low) if high > low else torch.zeros_like(logits)
    return F.interpolate(heat[None, None], size=tuple(size), mode='bilinear', align_corners=False)[0, 0]


def _fit(text: str, length: int = 28) -> str:
    """The end of a text that is too long; a dollar is no formula."""
    return (text if len(text) <= length else f'...{text[3 - length:]}').replace('$', r'\$')


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    args = parse_args(argv)
    images, classes = (list(dict.fromkeys(names)) for names in (args.images, args.classes))
    if len(images) * len(classes) > MOST_ROWS:
        raise UsageError(
            f'Expected at most {MOST_ROWS} maps of each checkpoint, but got {len(images)} images of {len(classes)} '
            'classes: choose fewer.')
    checkpoints = load_checkpoints(args.paths, args.names, args.model, args.use_ema)
    for checkpoint in checkpoints:
        for name in classes:
            find_class(checkpoint, name)
    found = {checkpoint.name: look(checkpoint, images, classes) for checkpoint in checkpoints}
    tables = [rows for rows, _ in found.values()]
    rows = [row for same in zip(*tables) for row in same]  # the checkpoints of each image and class one after the other
    print(format_table(rows))
    print('\nmean, highest: of the map, in logits; x, y: where it is highest, in parts of the image')
    folder = output_folder(args.output, NAME)
    write_csv(rows, folder / f'{NAME}.csv')
    figure = draw_maps({name: cards for name, (_, cards) in found.items()})
    if figure is not None:
        save_figure(figure, folder / f'{NAME}.png')
    print(f'\nWritten to {folder}.')


if __name__ == '__main__':
    main()
