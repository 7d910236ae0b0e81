""" Prediction: images in, class names and probabilities out """
import argparse
import logging
import math
from pathlib import Path
from typing import Any, Callable, Optional, Sequence

import torch
import torch.nn.functional as F
from PIL import Image
from timm.data.readers.class_map import load_class_map
from torch import nn

from ..data import decode_image
from ..errors import UsageError
from ..files import write_csv, write_json
from .checkpoint import CheckpointInfo

_logger = logging.getLogger(__name__)
SUFFIXES = ('.bmp', '.gif', '.jfif', '.jpeg', '.jpg', '.png', '.ppm', '.tif', '.tiff', '.webp')
THUMBNAIL = 180  # pixels


def find_images(paths: Sequence[str]) -> list[Path]:
    """ Image files, in order and each once; those of folders by the endings of their names.

    Args:
        paths: Files and folders.
    """
    files: dict[Path, None] = {}
    for path in map(Path, paths):
        if path.is_dir():
            found = sorted(file for file in path.rglob('*') if file.suffix.lower() in SUFFIXES and file.is_file())
            if not found:
                raise UsageError(f'Expected images in {path}, but found none (looked for {", ".join(SUFFIXES)}).')
            files.update(dict.fromkeys(found))
        elif path.is_file():
            files[path] = None
        else:
            raise UsageError(f'Expected image files and folders, but got {path}, which does not exist.')
    return list(files)


class Images(torch.utils.data.Dataset):
    """ Images by number, or what is wrong with them.

    Args:
        files: The files.
        transform: Makes tensors of PIL images.
        mode: Mode of PIL's that images are read in.
        num_thumbnails: Number of images that come with a small version to draw.
    """

    def __init__(self, files: Sequence[Path], transform: Callable, mode: str = 'RGB', num_thumbnails: int = 0):
        self.files = files
        self.transform = transform
        self.mode = mode
        self.num_thumbnails = num_thumbnails

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[int, Optional[torch.Tensor], Any]:
        """Number, tensor or None, and thumbnail or reason."""
        try:
            image = decode_image(self.files[index].read_bytes(), 'pil', self.mode)
        except (OSError, ValueError) as error:
            return index, None, str(error)
        thumbnail = None
        if index < self.num_thumbnails:
            thumbnail = image.convert('RGB')
            thumbnail.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.BILINEAR)
        return index, self.transform(image), thumbnail


def class_names(args: argparse.Namespace, known: Optional[Sequence[str]], number: int) -> tuple[str, ...]:
    """ Name of each output: from --class-map, the checkpoint, or else its number.

    Args:
        args: Flags.
        known: Those of the checkpoint, None if it has none.
        number: Number of outputs.
    """
    if not args.class_map:
        return tuple(known or map(str, range(number)))
    try:
        class_to_idx = load_class_map(args.class_map)
    except (AssertionError, OSError, ValueError) as error:
        raise UsageError(f'Expected a file that lists the classes, but got {args.class_map}: {error}') from error
    names = sorted(class_to_idx, key=class_to_idx.get)
    if len(names) != number:
        raise UsageError(f'Expected {number} classes, as the model has, but got {len(names)} in {args.class_map}.')
    return tuple(names)


def check_numbers(logits: torch.Tensor, files: Sequence[Path]) -> None:
    """ Refuse predictions that are not numbers, with the first image that has them.

    Args:
        logits: (B, classes).
        files: File of each row.
    """
    bad = logits.isnan().any(dim=1)
    if bad.any():
        file = files[int(bad.nonzero()[0])]
        raise UsageError(f'Expected scores that are numbers, but got NaN for {file}: try without --amp.')


def choose(
        probabilities: torch.Tensor,
        thresholds: torch.Tensor,
        names: Sequence[str],
        top: Optional[int],
        multi_label: bool,
) -> dict[str, float]:
    """ The classes that are predicted, the most probable first.

    Args:
        probabilities: (classes,).
        thresholds: (classes,) or (1,).
        names: Name of each class.
        top: Number of classes at most.
        multi_label: Whether there may be any number; else it is the `top` most probable, one by default.
    """
    order = probabilities.argsort(descending=True, stable=True).tolist()
    predicted = (probabilities >= thresholds).tolist()
    order = [index for index in order if predicted[index]][:top] if multi_label else order[:top or 1]
    return {names[index]: float(probabilities[index]) for index in order}


def write_predictions(rows: Sequence[dict[str, Any]], names: Sequence[str], path: Path) -> None:
    """ Write what was found, and the probabilities of all classes.

    Args:
        rows: An image, with 'labels' and 'probabilities' or 'error', each.
        names: Name of each class.
        path: .json or .csv.
    """
    if path.suffix == '.json':
        write_json(rows, path)
        return
    write_csv([{
        'image': row['image'],
        'labels': ';'.join(row.get('labels', ())),
        'error': row.get('error', ''),
        **{f'p({name})': row['probabilities'][name] if 'probabilities' in row else '' for name in names},
    } for row in rows], path)


def match_classes(
        info: CheckpointInfo,
        num_outputs: int,
        class_names: Optional[Sequence[str]],
        num_classes: Optional[int],
        checkpoint: str,
        dataset: str,
) -> Optional[list[int]]:
    """ Which output of a model is which class of a data set.

    Args:
        info: What is known about the model.
        num_outputs: Number of its outputs.
        class_names: Classes of the data set, None if unknown.
        num_classes: Number of them, None if unknown.
        checkpoint: What to call the model.
        dataset: What to call the data set.

    Returns:
        The output of each class, None if they are in the same order.
    """
    if num_classes is not None and num_classes != num_outputs:
        if info.class_names:
            knows = f'{checkpoint} lists its classes and knows better what its outputs are'
        elif class_names:
            knows = f'the data set lists its classes and knows better, as {checkpoint} does not name its own'
        else:
            knows = 'neither names its classes'
        raise UsageError(
            f'Expected a model and a data set with the same classes, but got {num_outputs} in {checkpoint} and '
            f'{num_classes} in {dataset}: {knows}; evaluate on the data set that it was trained for, give --class-map, '
            'or choose outputs by --valid-labels.')
    if not info.class_names or not class_names or list(info.class_names) == list(class_names):
        return None
    if sorted(info.class_names) != sorted(class_names):
        saved, found = next((a, b) for a, b in zip(info.class_names, class_names) if a != b)
        raise UsageError(
            f"Expected the classes of {checkpoint}, such as '{saved}', but got '{found}' in {dataset}: evaluate on the "
            'data set that the model was trained for, or give --class-map.')
    _logger.info(f'Puts the outputs of {checkpoint} in the order of the classes of {dataset}.')
    return [info.class_names.index(name) for name in class_names]


class ChosenOutputs(nn.Module):
    """ Some of the outputs of a model, in an order of one's own.

    Args:
        model: Gives logits (B, outputs).
        outputs: Numbers of those that are wanted.
    """

    def __init__(self, model: nn.Module, outputs: Sequence[int]):
        super().__init__()
        self.model = model
        self.register_buffer('outputs', torch.tensor(outputs), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)[:, self.outputs]


class FlipAverage(nn.Module):
    """ The logit of the mean probability of an image and its mirror image.

    It is computed from logarithms: a probability that rounds to 1 would make equal what is not.

    Args:
        model: Gives logits (B, classes).
        multi_label: Whether probabilities are sigmoids of logits, else their softmax.
    """

    def __init__(self, model: nn.Module, multi_label: bool = True):
        super().__init__()
        self.model = model
        self.multi_label = multi_label

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = torch.stack([self.model(x), self.model(x.flip(-1))]).float()  # (2, B, classes)
        if not self.multi_label:
            return logits.log_softmax(dim=-1).logsumexp(dim=0) - math.log(2)
        return F.logsigmoid(logits).logsumexp(dim=0) - F.logsigmoid(-logits).logsumexp(dim=0)
