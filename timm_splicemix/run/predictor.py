""" Predict the classes of images """
import contextlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, Optional, Sequence

import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from ..data import create_transform, decode_image, read_class_map
from ..errors import UsageError
from ..files import write_csv, write_json
from .load import CheckpointInfo

SUFFIXES = ('.bmp', '.gif', '.jfif', '.jpeg', '.jpg', '.png', '.ppm', '.tif', '.tiff', '.webp')
THUMBNAIL = 180  # pixels


class FlipAverage(nn.Module):
    """ Returns the logit of the mean probability of an image and its mirror image.

    It is computed from logarithms, as probabilities that round to 1 would become equal.

    Args:
        model: Returns logits (B, classes).
        multi_label: True if probabilities are sigmoids of the logits, False for their softmax.
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


@dataclass(frozen=True)
class Prediction:
    """ Prediction of an image, or the reason why it cannot be read.

    Args:
        file: The image.
        labels: Predicted classes and their probabilities, the most probable first.
        probabilities: Probability of each class.
        thumbnail: Small image to draw, if requested.
        error: Reason why the image cannot be read, '' if it can.
    """
    file: Path
    labels: dict[str, float]
    probabilities: dict[str, float]
    thumbnail: Optional[Image.Image] = None
    error: str = ''


class Predictor:
    """ Predicts the classes of image files with a loaded model.

    Args:
        model: The model.
        info: Its description.
        class_names: Name of each output.
        thresholds: Probability from which a class is predicted, one for all or one for each.
        device: Device to run on.
        top: Largest number of predicted classes. Single-label models predict this many, by default one.
        flip: Average the probabilities of an image and its mirror image.
        autocast: Creates the context manager of a forward pass.
    """

    def __init__(
            self,
            model: nn.Module,
            info: CheckpointInfo,
            class_names: Sequence[str],
            thresholds: Sequence[float] = (0.5,),
            device: Optional[torch.device] = None,
            top: Optional[int] = None,
            flip: bool = False,
            autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ):
        self.device = device or torch.device('cpu')
        self.model = (FlipAverage(model, info.multi_label) if flip else model).to(self.device).eval()
        self.multi_label = info.multi_label
        self.class_names = class_names
        self.thresholds = torch.tensor(thresholds, dtype=torch.float64)
        self.top = top
        self.autocast = autocast
        config = info.data_config
        self.mode = 'L' if config['input_size'][0] == 1 else 'RGB'
        self.transform = create_transform(
            config['input_size'], mean=config['mean'], std=config['std'], interpolation=config['interpolation'],
            crop_pct=config['crop_pct'], crop_mode=config['crop_mode'])

    def predict(
            self,
            files: Sequence[Path],
            batch_size: int = 32,
            num_workers: int = 0,
            num_thumbnails: int = 0,
    ) -> Iterator[list[Prediction]]:
        """ Predict image files, batch by batch.

        Args:
            files: The images.
            batch_size: Number of images in a batch.
            num_workers: Number of processes that read images.
            num_thumbnails: Number of first images that get a thumbnail.
        """
        images = Images(files, self.transform, self.mode, num_thumbnails)
        for batch in torch.utils.data.DataLoader(images, batch_size, num_workers=num_workers, collate_fn=list):
            readable = [(index, tensor) for index, tensor, _ in batch if tensor is not None]
            found = {}
            if readable:
                logits = self._logits(torch.stack([tensor for _, tensor in readable]))
                check_numbers(logits, [files[index] for index, _ in readable])
                probabilities = logits.sigmoid() if self.multi_label else logits.softmax(dim=1)
                found = {index: values for (index, _), values in zip(readable, probabilities)}
            yield [
                Prediction(files[index], {}, {}, error=extra) if tensor is None else Prediction(
                    files[index], choose(found[index], self.thresholds, self.class_names, self.top, self.multi_label),
                    dict(zip(self.class_names, found[index].tolist())), extra)
                for index, tensor, extra in batch]

    @torch.inference_mode()
    def _logits(self, images: torch.Tensor) -> torch.Tensor:
        with self.autocast():
            return self.model(images.to(self.device)).float().cpu().double()


class Images(torch.utils.data.Dataset):
    """ Image files as tensors.

    Args:
        files: The files.
        transform: Converts a PIL image to a tensor.
        mode: PIL mode to read images in.
        num_thumbnails: Number of first images that get a thumbnail.
    """

    def __init__(self, files: Sequence[Path], transform: Callable, mode: str = 'RGB', num_thumbnails: int = 0):
        self.files = files
        self.transform = transform
        self.mode = mode
        self.num_thumbnails = num_thumbnails

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[int, Optional[torch.Tensor], Any]:
        """Return index, tensor, and thumbnail or None; for an unreadable image index, None, and the reason."""
        try:
            image = decode_image(self.files[index].read_bytes(), 'pil', self.mode)
        except (OSError, ValueError) as error:
            return index, None, str(error) or repr(error)
        thumbnail = None
        if index < self.num_thumbnails:
            thumbnail = image.convert('RGB')
            thumbnail.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.BILINEAR)
        return index, self.transform(image), thumbnail


def find_images(paths: Sequence[str]) -> list[Path]:
    """Return the image files, each once, with those of folders and their sub-folders."""
    files: dict[Path, None] = {}
    for path in map(Path, paths):
        if path.is_dir():
            found = sorted(file for file in path.rglob('*') if file.suffix.lower() in SUFFIXES and file.is_file())
            if not found:
                raise UsageError(f'Expected images in {path}, but found none ({", ".join(SUFFIXES)}).')
            files.update(dict.fromkeys(found))
        elif path.is_file():
            files[path] = None
        else:
            raise UsageError(f'Expected image files and folders, but got {path}, which does not exist.')
    return list(files)


def read_class_names(path: Optional[str], known: Optional[Sequence[str]], number: int) -> tuple[str, ...]:
    """Return the name of each output: from --class-map, from the checkpoint (`known`), or else its index."""
    if not path:
        return tuple(known or map(str, range(number)))
    names = read_class_map(path)
    if len(names) != number:
        raise UsageError(f'Expected {number} classes, as the model has, but got {len(names)} in {path}.')
    return tuple(names)


def check_numbers(logits: torch.Tensor, files: Sequence[Path]) -> None:
    """Raise an error that names the first image whose logits have NaN."""
    bad = logits.isnan().any(dim=1)
    if bad.any():
        raise UsageError(f'Logits are NaN for {files[int(bad.nonzero()[0])]}. Try without --amp.')


def choose(
        probabilities: torch.Tensor,
        thresholds: torch.Tensor,
        names: Sequence[str],
        top: Optional[int],
        multi_label: bool,
) -> dict[str, float]:
    """ Return the predicted classes with their probabilities, the most probable first.

    Args:
        probabilities: (classes,).
        thresholds: (classes,) or (1,).
        names: Name of each class.
        top: Largest number of classes.
        multi_label: False to predict the `top` most probable classes, by default one, whatever the thresholds.
    """
    order = probabilities.argsort(descending=True, stable=True).tolist()
    predicted = (probabilities >= thresholds).tolist()
    order = [index for index in order if predicted[index]][:top] if multi_label else order[:top or 1]
    return {names[index]: float(probabilities[index]) for index in order}


def write_predictions(predictions: Sequence[Prediction], names: Sequence[str], path: Path) -> None:
    """Write labels and the probabilities of all classes as .json or .csv."""
    if path.suffix == '.json':
        write_json([
            {'image': str(one.file), 'error': one.error} if one.error else
            {'image': str(one.file), 'labels': one.labels, 'probabilities': one.probabilities}
            for one in predictions], path)
        return
    write_csv([{
        'image': str(one.file),
        'labels': ';'.join(one.labels),
        'error': one.error,
        **{f'p({name})': one.probabilities.get(name, '') for name in names},
    } for one in predictions], path)
