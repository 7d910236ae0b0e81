""" Models to evaluate, predict with and export: loaded as they were trained, and what is put around them """
import dataclasses
import logging
import math
from pathlib import Path
from typing import Any, Callable, Optional, Sequence, Union

import torch
import torch.nn.functional as F
from timm.data import resolve_data_config
from timm.models import get_pretrained_cfg
from torch import nn

from .checkpoint import CheckpointInfo, load_weights, read_checkpoint
from .engine import AccuracyMeter
from .export import is_safetensors, read_safetensors
from .metrics import MultilabelMeter
from .models import create_model

_logger = logging.getLogger(__name__)

# What timm raises at a user: flags that a model does not take, files that are not there
_REFUSALS = (AssertionError, AttributeError, LookupError, NotImplementedError, OSError, RuntimeError, TypeError)
_EMA_KEYS = ('state_dict_ema', 'model_ema')  # of this project and timm, old and new


@dataclasses.dataclass(frozen=True)
class _Weights:
    values: Optional[dict[str, torch.Tensor]] = None
    info: Optional[CheckpointInfo] = None
    architecture: Optional[str] = None


def load_model(
        checkpoint: Union[str, Path] = '',
        model_name: Optional[str] = None,
        pretrained: bool = False,
        use_ema: bool = False,
        num_classes: Optional[int] = None,
        global_pool: Optional[str] = None,
        in_chans: Optional[int] = None,
        image_size: Optional[tuple[int, int]] = None,
        data_options: Optional[dict[str, Any]] = None,
        model_kwargs: Optional[dict[str, Any]] = None,
        use_test_size: bool = False,
        **build_kwargs: Any,
) -> tuple[nn.Module, CheckpointInfo]:
    """ A model in evaluation mode, with all that is known about it.

    A checkpoint of this project, or a file that it exported as safetensors, knows its model, pooling, image size,
    normalisation, crop and classes; arguments that are given win. Other checkpoints need a name. Without a checkpoint,
    timm's own weights are taken.

    Args:
        checkpoint: Checkpoint or safetensors file; '' for none.
        model_name: Name of the model in timm's registry or on a hub.
        pretrained: Take timm's weights; as without a checkpoint.
        use_ema: Take the moving average of the weights.
        num_classes: Size of the classifier.
        global_pool: Pooling.
        in_chans: Channels of images.
        image_size: (height, width) of images.
        data_options: What differs of crop_pct, crop_mode, mean, std and interpolation.
        model_kwargs: Further arguments of `create_model`.
        use_test_size: Take timm's size for testing where it has one; a checkpoint of this project is evaluated at the
            size that it was trained at.
        **build_kwargs: Arguments of `create_model` that are no property of the model, such as `scriptable`.

    Returns:
        The model, and what is known, with the data configuration that holds.
    """
    if checkpoint and pretrained:
        raise ValueError('Expected --checkpoint or --pretrained, but got both.')
    if not checkpoint and not model_name:
        raise ValueError('Expected --checkpoint, or --model for weights of timm, but got neither.')
    data_options = dict(data_options or {})
    weights = _read_weights(checkpoint, use_ema) if checkpoint else _Weights()
    if use_ema and not checkpoint:
        raise ValueError('Expected --checkpoint with --use-ema, but got none.')
    options = {'num_classes': num_classes, 'global_pool': global_pool, 'in_chans': in_chans, **(model_kwargs or {})}
    options = {name: value for name, value in options.items() if value is not None}
    saved = weights.info
    if saved is not None:
        _check_agrees(saved, model_name, num_classes, checkpoint)
        options = {**saved.model_kwargs, **options}
        name = saved.model_name
    else:
        name = model_name or weights.architecture
        if name is None:
            raise ValueError(f'Expected --model with {checkpoint}, which does not say what model it is, but got none.')
        if 'num_classes' not in options and weights.values is not None:
            options.update(_count_classes(name, weights.values))
        cfg = get_pretrained_cfg(name)
        if image_size and cfg is not None and cfg.fixed_input_size and image_size != tuple(cfg.input_size[1:]):
            options.setdefault('img_size', image_size)

    try:
        model = create_model(name, pretrained=weights.values is None, **build_kwargs, **options)
    except _REFUSALS as error:
        raise ValueError(f"Expected model '{name}' to load, but got: {error or repr(error)}") from error
    if weights.values is not None:
        load_weights(model, weights.values, checkpoint)
    if saved is None:
        options['num_classes'] = model.num_classes
        saved = CheckpointInfo(name, options)
        data_config = resolve_data_config({'in_chans': in_chans}, model=model, use_test_size=use_test_size)
    else:
        data_config = dict(saved.data_config)
    channels = options.get('in_chans', 3)
    trained_size = tuple(data_config['input_size'][1:])
    data_config['input_size'] = (channels, *(image_size or trained_size))
    for key in ('mean', 'std'):
        own = data_config[key]
        if len(own) not in (1, channels):  # those of colours
            own = (sum(own) / len(own),)
        data_config[key] = _per_channel(key, data_options.pop(key, own), channels)
    data_config.update(data_options)
    model.eval()
    made_for = options.get('img_size')
    if made_for is not None:
        trained_size = (made_for, made_for) if isinstance(made_for, int) else tuple(made_for)
    set_image_size(model, data_config['input_size'], trained_size)
    if hasattr(model, 'set_input_size') and trained_size != data_config['input_size'][1:]:
        options['img_size'] = data_config['input_size'][1:]
    return model, dataclasses.replace(saved, model_kwargs=options, data_config=data_config)


def _read_weights(checkpoint: Union[str, Path], use_ema: bool) -> _Weights:
    if is_safetensors(checkpoint):
        if use_ema:
            raise ValueError(f'Expected a checkpoint for --use-ema, but got {checkpoint}, which has no moving average.')
        return _Weights(*read_safetensors(checkpoint))
    state = read_checkpoint(checkpoint)
    ema = next((state[key] for key in _EMA_KEYS if state.get(key) is not None), None)
    if use_ema and ema is None:
        raise ValueError(f'Expected a moving average of the weights for --use-ema, but got none in {checkpoint}.')
    if ema is not None and not use_ema:
        _logger.info(f'Takes the plain weights of {checkpoint}; --use-ema takes their moving average.')
    values = ema if use_ema else state['state_dict']
    if 'timm_splicemix' not in state:
        return _Weights(values, architecture=state.get('arch'))
    saved = state['timm_splicemix']['info']
    names = saved['class_names'] and tuple(saved['class_names'])
    info = CheckpointInfo(
        **{**saved, 'class_names': names}, epoch=state.get('epoch'), metric=state.get('metric'),
        args=dict(state.get('args') or {}))
    return _Weights(values, info)


def _check_agrees(
        info: CheckpointInfo,
        model_name: Optional[str],
        num_classes: Optional[int],
        checkpoint: Union[str, Path],
) -> None:
    if model_name not in (None, info.model_name):
        raise ValueError(
            f'Expected --model {info.model_name}, as {checkpoint} says, but got {model_name}: leave it out.')
    saved = info.model_kwargs.get('num_classes')
    if None not in (num_classes, saved) and num_classes != saved:
        raise ValueError(f'Expected --num-classes {saved}, as {checkpoint} says, but got {num_classes}: leave it out.')


def _count_classes(name: str, weights: dict[str, torch.Tensor]) -> dict[str, int]:
    """Size of the classifier of weights that come without a description."""
    cfg = get_pretrained_cfg(name)
    layer = cfg.classifier if cfg is not None else None
    layer = layer[0] if isinstance(layer, (tuple, list)) else layer
    weight = next((weights[key] for key in (f'{layer}.weight', f'module.{layer}.weight') if key in weights), None)
    return {} if weight is None else {'num_classes': len(weight)}


def _per_channel(name: str, values: Sequence[float], channels: int) -> tuple[float, ...]:
    values = tuple(values)
    if len(values) == 1:
        values *= channels
    if len(values) != channels:
        raise ValueError(f'Expected --{name} with 1 number or {channels}, one for each channel, but got {len(values)}.')
    return values


def set_image_size(
        model: nn.Module,
        input_size: Sequence[int],
        current: Optional[Sequence[int]] = None,
) -> None:
    """ Make a model take images of a size, or say that it can't.

    Position embeddings and windows are made anew for the size, by timm; convolutions take any.

    Args:
        model: The model; changed.
        input_size: (channels, height, width).
        current: (height, width) that the model takes now, None if unknown.
    """
    size = tuple(input_size[1:])
    try:
        if size != current and hasattr(model, 'set_input_size'):
            model.set_input_size(img_size=size)
        parameter = next(model.parameters())
        with torch.inference_mode():
            model(torch.zeros(1, *input_size, device=parameter.device, dtype=parameter.dtype))
    except (*_REFUSALS, ValueError) as error:
        reason = (str(error) or repr(error)).splitlines()[0]
        raise ValueError(
            f'Expected an image size that {type(model).__name__} takes, but got {size[0]} x {size[1]} with '
            f'{input_size[0]} channels: {reason}') from error


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
        raise ValueError(
            f'Expected a model and a data set with the same classes, but got {num_outputs} in {checkpoint} and '
            f'{num_classes} in {dataset}: {knows}; evaluate on the data set that it was trained for, give --class-map, '
            'or choose outputs by --valid-labels.')
    if not info.class_names or not class_names or list(info.class_names) == list(class_names):
        return None
    if sorted(info.class_names) != sorted(class_names):
        saved, found = next((a, b) for a, b in zip(info.class_names, class_names) if a != b)
        raise ValueError(
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


class NamingMeter(MultilabelMeter):
    """ A meter that names the image whose scores are no numbers.

    Args:
        filename: Gives the file of an index.
        *args: Those of `MultilabelMeter`, as `**kwargs`.
    """

    def __init__(self, filename: Callable[[int], str], *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.filename = filename

    def _store(self, batch: Any) -> None:
        bad = batch.scores.isnan().any(dim=1)
        if bad.any() and batch.indices is not None:
            raise ValueError(
                f'Expected scores that are numbers, but got NaN for {self.filename(int(batch.indices[bad][0]))} '
                f'({int(bad.sum())} of the {len(bad)} images of its batch): look at the image, and try without --amp '
                'and with --model-dtype float32; if all images have it, the weights are broken.')
        super()._store(batch)


class AveragingMeter(AccuracyMeter):
    """ Accuracy, precision, recall and F1 of single labels, over all processes.

    Args:
        device: Where predictions are.
        num_classes: Number of classes.
        average: 'micro' over all images, 'macro' over classes, or 'weighted' by their number of images.
    """

    def __init__(self, device: torch.device, num_classes: int, average: str):
        super().__init__(device)
        self.average = average
        self.classes = torch.zeros(3, num_classes, dtype=self.counts.dtype, device=self.counts.device)

    def update(self, logits: torch.Tensor, targets: torch.Tensor, indices: Optional[Sequence[int]] = None) -> None:
        super().update(logits, targets, indices)
        predicted, targets = logits.argmax(dim=1).to(self.classes.device), targets.to(self.classes.device)
        for row, classes, weight in (
                (0, targets, predicted == targets), (1, predicted, None), (2, targets, None)):
            ones = torch.ones_like(classes) if weight is None else weight
            self.classes[row].index_add_(0, classes, ones.to(self.classes.dtype))

    def compute(self) -> dict[str, float]:
        """Accuracies, precision, recall and F1 in percent."""
        metrics = super().compute()
        counts = self.classes.clone()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(counts)
        if self.average == 'micro':
            counts = counts.sum(dim=1, keepdim=True)
        counts = counts[:, counts[1] + counts[2] > 0]  # as scikit-learn: classes that are neither there nor predicted
        true, predicted, positive = counts.double().cpu()
        values = {
            'precision': true / predicted.clamp(min=1),
            'recall': true / positive.clamp(min=1),
            'f1': 2 * true / (predicted + positive).clamp(min=1),
        }
        weights = positive if self.average == 'weighted' else torch.ones_like(positive)
        return {**metrics, **{
            f'{name}_{self.average}': 100 * float((value * weights).sum() / weights.sum())
            for name, value in values.items()}}
