""" Predict the classes of images """
import contextlib
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, Optional, Sequence, Union

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torchvision.transforms.functional import to_pil_image

from ..data import BadImageError, convert_image, create_transform, decode_image, read_class_map
from ..errors import UsageError
from ..files import write_csv, write_json
from ..metrics import Thresholds, parse_thresholds
from .load import load_checkpoint
from .read import CheckpointInfo, tuned_thresholds

_logger = logging.getLogger(__name__)
ImageSource = Union[str, Path, Image.Image, torch.Tensor]
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
        file: The image file, None for an image that is not from a file.
        labels: Predicted classes and their probabilities, the most probable first.
        probabilities: Probability of each class.
        thumbnail: Small image to draw, if requested.
        error: Reason why the image cannot be read, '' if it can.
    """
    file: Optional[Path]
    labels: dict[str, float]
    probabilities: dict[str, float]
    thumbnail: Optional[Image.Image] = None
    error: str = ''


class Predictor:
    """ Predicts the classes of images with a trained or exported model.

        predictor = Predictor('runs/first')
        for prediction in predictor.predict(['a.jpg', 'b.jpg']):
            print(prediction.file, prediction.labels)

    Probabilities are sigmoids of the logits, or their softmax for models that were trained with one class per image.
    Attributes are `model`, `info` (see `load_checkpoint`), `class_names` and `thresholds`.

    Args:
        path: Folder of a run, checkpoint of this package or of timm, exported ONNX or safetensors file, or published
            model ('hf-hub:USER/NAME', 'local-dir:FOLDER').
        device: Device to run on, by default the GPU if there is one; ONNX files run on the CPU.
        use_ema: True for the EMA weights, False for the plain ones, None for those that the best metric was measured
            with.
        thresholds: Probability from which a class is predicted, or a thresholds.json; by default the tuned thresholds
            of the run, else 0.5.
        top: Largest number of predicted classes. Single-label models predict this many, by default one.
        flip: Average the probabilities of an image and its mirror image.
        batch_size: Number of images in a batch.
        num_workers: Number of processes that read image files.
        **overrides: Further arguments of `load_checkpoint`, such as `img_size`.
    """

    def __init__(
            self,
            path: Union[str, Path],
            device: Optional[Union[str, torch.device]] = None,
            use_ema: Optional[bool] = None,
            thresholds: Optional[Union[float, str, Path]] = None,
            top: Optional[int] = None,
            flip: bool = False,
            batch_size: int = 32,
            num_workers: int = 0,
            **overrides: Any,
    ):
        model, info = load_checkpoint(path, use_ema=use_ema, **overrides)
        names = read_class_names(None, info.class_names, model.num_classes)
        if device is None:
            device = 'cuda' if torch.cuda.is_available() else 'cpu'
        values = choose_thresholds(None if thresholds is None else str(thresholds), path, info, names)
        self._batches = BatchPredictor(model, info, names, values, torch.device(device), top, flip)
        self.model = model
        self.info = info
        self.class_names = names
        self.thresholds = dict(zip(names, values if len(values) > 1 else values * len(names)))
        self.batch_size = batch_size
        self.num_workers = num_workers

    def predict(self, images: Union[ImageSource, Sequence[ImageSource]]) -> list[Prediction]:
        """ Predict one image or several; returns a prediction for each.

        Args:
            images: Image files, folders of them (searched with their sub-folders), PIL images, uint8 tensors of pixels
                (channels, height, width) in any size, or float tensors that are normalised and have the size of the
                model, also as a batch.

        Raises:
            UsageError: If an image cannot be read.
        """
        sources = list_sources(images)
        predictions = []
        for batch in self._batches.predict(sources, self.batch_size, self.num_workers):
            for prediction in batch:
                if prediction.error:
                    index = len(predictions)
                    raise BadImageError(name_of(sources[index], index), prediction.error)
                predictions.append(prediction)
        return predictions


class BatchPredictor:
    """ Predicts the classes of images with a loaded model, batch by batch.

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
        self.reader = ImageReader(info)

    def predict(
            self,
            images: Sequence[ImageSource],
            batch_size: int = 32,
            num_workers: int = 0,
            num_thumbnails: int = 0,
    ) -> Iterator[list[Prediction]]:
        """ Predict images; an unreadable file gets a prediction with the reason.

        Args:
            images: Files, PIL images or tensors, see `Predictor.predict`.
            batch_size: Number of images in a batch.
            num_workers: Number of processes that read images.
            num_thumbnails: Number of first images that get a thumbnail.
        """
        dataset = Images(images, self.reader, num_thumbnails)
        for batch in torch.utils.data.DataLoader(dataset, batch_size, num_workers=num_workers, collate_fn=list):
            readable = [(index, tensor) for index, tensor, _ in batch if tensor is not None]
            found = {}
            if readable:
                logits = self._logits(torch.stack([tensor for _, tensor in readable]))
                check_numbers(logits, [name_of(images[index], index) for index, _ in readable])
                probabilities = logits.sigmoid() if self.multi_label else logits.softmax(dim=1)
                found = {index: values for (index, _), values in zip(readable, probabilities)}
            yield [
                Prediction(file_of(images[index]), {}, {}, error=extra) if tensor is None else Prediction(
                    file_of(images[index]),
                    choose(found[index], self.thresholds, self.class_names, self.top, self.multi_label),
                    dict(zip(self.class_names, found[index].tolist())), extra)
                for index, tensor, extra in batch]

    @torch.inference_mode()
    def _logits(self, images: torch.Tensor) -> torch.Tensor:
        with self.autocast():
            return self.model(images.to(self.device)).float().cpu().double()


class ImageReader:
    """ Turns an image into the tensor that a model takes.

    Args:
        info: Description of the model.
    """

    def __init__(self, info: CheckpointInfo):
        config = info.data_config
        self.input_size = tuple(config['input_size'])
        self.mode = info.pil_mode
        self.transform = create_transform(
            config['input_size'], mean=config['mean'], std=config['std'], interpolation=config['interpolation'],
            crop_pct=config['crop_pct'], crop_mode=config['crop_mode'])

    def open(self, source: ImageSource) -> Union[Image.Image, torch.Tensor]:
        """Return a PIL image in the mode of the model, or a normalised tensor."""
        if isinstance(source, Image.Image):
            return convert_image(source, self.mode)
        if not isinstance(source, torch.Tensor):
            return decode_image(Path(source).read_bytes(), 'pil', self.mode)
        if source.dim() == 3 and source.dtype == torch.uint8:
            return to_pil_image(source, self.mode if len(source) == self.input_size[0] else None).convert(self.mode)
        if source.shape != self.input_size or not source.is_floating_point():
            raise UsageError(
                f'Expected tensors of pixels, uint8 (channels, height, width), or normalised float tensors '
                f'{self.input_size}, but got {source.dtype} {tuple(source.shape)}.')
        return source.detach().cpu().float()

    def to_tensor(self, image: Union[Image.Image, torch.Tensor]) -> torch.Tensor:
        return image if isinstance(image, torch.Tensor) else self.transform(image)


class Images(torch.utils.data.Dataset):
    """ Images as tensors.

    Args:
        images: Files, PIL images or tensors.
        reader: Reads an image.
        num_thumbnails: Number of first images that get a thumbnail.
    """

    def __init__(self, images: Sequence[ImageSource], reader: ImageReader, num_thumbnails: int = 0):
        self.images = images
        self.reader = reader
        self.num_thumbnails = num_thumbnails

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[int, Optional[torch.Tensor], Any]:
        """Return index, tensor, and thumbnail or None; for an unreadable image index, None, and the reason."""
        try:
            image = self.reader.open(self.images[index])
        except UsageError:
            raise
        except (OSError, ValueError) as error:
            return index, None, str(error) or repr(error)
        thumbnail = None
        if index < self.num_thumbnails:
            thumbnail = image.convert('RGB')
            thumbnail.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.BILINEAR)
        try:
            return index, self.reader.to_tensor(image), thumbnail
        except Exception as error:  # of any library; without the file, nobody could find the image
            raise RuntimeError(
                f'Cannot transform image {name_of(self.images[index], index)}: {error or repr(error)}') from error


def file_of(source: ImageSource) -> Optional[Path]:
    return None if isinstance(source, (Image.Image, torch.Tensor)) else Path(source)


def name_of(source: ImageSource, index: int) -> str:
    return str(file_of(source) or f'number {index}')


def list_sources(images: Union[ImageSource, Sequence[ImageSource]]) -> list[ImageSource]:
    """Return the images of one or several files, folders, PIL images, tensors or batches of tensors."""
    is_one = isinstance(images, (str, np.ndarray)) or (isinstance(images, torch.Tensor) and images.dim() == 3)
    if is_one or not hasattr(images, '__iter__'):
        images = [images]
    sources: list[ImageSource] = []
    for image in images:
        if isinstance(image, torch.Tensor) and image.dim() == 4:
            sources += image
        elif isinstance(image, (Image.Image, torch.Tensor)):
            sources.append(image)
        elif isinstance(image, (str, Path)):
            sources += find_images([str(image)])
        else:
            raise UsageError(
                f'Expected files, PIL images or tensors to predict, but got {type(image).__name__}. Convert arrays by '
                'PIL.Image.fromarray().')
    return sources


def choose_thresholds(
        text: Optional[str],
        path: Union[str, Path],
        info: CheckpointInfo,
        class_names: Sequence[str],
) -> tuple[float, ...]:
    """ Return the thresholds that the user gave, or the tuned ones of a run, or 0.5.

    Args:
        text: Value of --thresholds.
        path: The checkpoint or run.
        info: Its description.
        class_names: Name of each output.
    """
    if text is not None and not info.multi_label:
        raise UsageError('Expected a multi-label model for thresholds, but got a single-label one.')
    thresholds = parse_thresholds(text, class_names)
    if thresholds is None:
        thresholds = tuned_thresholds(path, info)
        if thresholds is not None and set(thresholds.class_names) != set(class_names):
            _logger.warning(f'Ignoring the thresholds of {thresholds.source}, which are for other classes.')
            thresholds = None
        if thresholds is not None:
            thresholds = thresholds.ordered(class_names)
            _logger.info(f'{thresholds.describe()} --thresholds 0.5 overrides them.')
    if isinstance(thresholds, Thresholds):
        return thresholds.values
    return (0.5 if thresholds is None else thresholds,)


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
        raise UsageError(f'Expected {number} classes, as the model has, but got {len(names)} in {names.file}.')
    return tuple(names)


def check_numbers(logits: torch.Tensor, files: Sequence[str]) -> None:
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


def write_predictions(predictions: Sequence[Prediction], names: Sequence[str], weights: str, path: Path) -> None:
    """ Write labels and the probabilities of all classes as .json or .csv.

    Args:
        predictions: Predictions of image files.
        names: Name of each class.
        weights: Weights that predicted, see `CheckpointInfo`.
        path: File to write.
    """
    if path.suffix == '.json':
        write_json([
            {'image': str(one.file), 'weights': weights, 'error': one.error} if one.error else
            {'image': str(one.file), 'weights': weights, 'labels': one.labels, 'probabilities': one.probabilities}
            for one in predictions], path)
        return
    write_csv([{
        'image': str(one.file),
        'labels': ';'.join(one.labels),
        'error': one.error,
        'weights': weights,
        **{f'p({name})': one.probabilities.get(name, '') for name in names},
    } for one in predictions], path)
