""" Thresholds of the classes: tuning, and thresholds.json with their origin """
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Optional, Sequence, Union

import torch

from ..errors import UsageError
from ..files import format_table, printable, read_json, write_json
from .functional import multilabel_metrics
from .preset import Preset

FEW = 10  # positives below which a tuned threshold is unreliable
_LARGEST = 30.  # logit whose probability is still less than 1


@dataclass(frozen=True)
class Thresholds:
    """ Probabilities from which classes are predicted, and the data that they were tuned on.

    Args:
        values: Threshold of each class.
        class_names: Names of the classes.
        dataset: Data set of the tuning.
        split: Split of the tuning.
        num_images: Number of images of the tuning.
        positives: Number of images of each class.
        weights: Weights of the checkpoint that they were tuned for, 'ema' or 'plain'; '' if unknown.
        epoch: Epoch of the checkpoint that they were tuned for, None if unknown.
        source: File that they were read from.
    """
    values: tuple[float, ...]
    class_names: tuple[str, ...]
    dataset: str = ''
    split: str = ''
    num_images: int = 0
    positives: tuple[int, ...] = ()
    weights: str = ''
    epoch: Optional[int] = None
    source: str = field(default='', compare=False)

    def ordered(self, class_names: Sequence[str]) -> 'Thresholds':
        """Return the thresholds in another order of the same classes."""
        order = [self.class_names.index(name) for name in class_names]
        positives = tuple(self.positives[index] for index in order) if self.positives else ()
        return replace(
            self, values=tuple(self.values[index] for index in order), class_names=tuple(class_names),
            positives=positives)

    def describe(self) -> str:
        """Say in one line where the thresholds come from."""
        origin = ', '.join(filter(None, (
            f'{self.dataset} {self.split}'.strip() and f'tuned on {f"{self.dataset} {self.split}".strip()}',
            self.weights and f'for the {self.weights} weights')))
        return f'Using the thresholds of {self.source}' + (f' ({origin}).' if origin else '.')


def tune_thresholds(logits: torch.Tensor, targets: torch.Tensor, preset: Preset) -> torch.Tensor:
    """ Find the threshold with the highest F1 of each class, in the middle between two logits.

    Args:
        logits: (N, classes).
        targets: (N, classes), 1, 0, or -1 for unknown.
        preset: Meaning of unknown targets, and threshold of classes without positives.

    Returns:
        (classes,) probabilities, float64.
    """
    default = preset.threshold
    values = []
    for index, (scores, labels) in enumerate(zip(logits.double().t(), targets.t())):
        if preset.unknown == 'ignore':
            scores, labels = scores[labels >= 0], labels[labels >= 0]
        positive = labels == 1
        if not positive.any():
            values.append(default[index] if isinstance(default, tuple) else default)
            continue
        scores, order = scores.sort(descending=True)
        true = positive[order].cumsum(dim=0)
        number = torch.arange(1, len(scores) + 1)
        f1 = 2 * true / (number + positive.sum())
        last = torch.ones_like(positive)  # equal scores share one threshold
        last[:-1] = scores[:-1] > scores[1:]
        best = int(f1.masked_fill(~last, -1).argmax())
        below = scores[best + 1] if best + 1 < len(scores) else scores[best] - 1
        values.append(float(((scores[best] + below) / 2).clamp(-_LARGEST, _LARGEST).sigmoid()))
    return torch.tensor(values, dtype=torch.float64)


def describe_tuning(
        tuned_on: tuple[torch.Tensor, torch.Tensor],
        scored_on: tuple[torch.Tensor, torch.Tensor],
        thresholds: Thresholds,
        preset: Preset,
) -> str:
    """ Format the gain of thresholds on the tuning split and on the evaluated split; the difference is overfitting.

    Args:
        tuned_on: Logits and targets of the tuning split.
        scored_on: Logits and targets of the evaluated split.
        thresholds: The tuned thresholds.
        preset: Definitions of the metrics, with the threshold that they replace.
    """
    tuned = replace(preset, threshold=thresholds.values)
    rows, gains = [], []
    for title, (logits, targets) in (('tuning split', tuned_on), ('evaluated split', scored_on)):
        before, after = (multilabel_metrics(logits, targets, None, which) for which in (preset, tuned))
        gains.append(after['CF1'] - before['CF1'])
        rows.append({'': title})
        for name in ('CF1', 'OF1'):
            rows[-1].update({
                name: before[name], f'{name} tuned': after[name], f'{name} gain': after[name] - before[name]})
    lines = [format_table(rows, {'CF1 gain': '+.2f', 'OF1 gain': '+.2f'})]
    lines.append(
        f'{max(0., gains[0] - gains[1]):.2f} of the {gains[0]:.2f} points of CF1 gained on the tuning split are '
        'overfitting: report the evaluated split alone.')
    few = [name for name, number in zip(thresholds.class_names, thresholds.positives) if number < FEW]
    if few:
        lines.append(f'Thresholds from fewer than {FEW} positives are unreliable: {", ".join(map(printable, few))}.')
    return '\n'.join(lines)


def thresholds_content(thresholds: Thresholds) -> dict[str, Any]:
    """Return the content of thresholds.json."""
    positives = thresholds.positives or (None,) * len(thresholds.values)
    return {
        'dataset': thresholds.dataset,
        'split': thresholds.split,
        'num_images': thresholds.num_images,
        'maximises': 'F1 of each class',
        'weights': thresholds.weights,
        'epoch': thresholds.epoch,
        'classes': [
            {'name': name, 'threshold': value, 'positives': number}
            for name, value, number in zip(thresholds.class_names, thresholds.values, positives)],
    }


def save_thresholds(thresholds: Thresholds, path: Union[str, Path]) -> None:
    """Write thresholds.json."""
    write_json(thresholds_content(thresholds), path)


def parse_thresholds_content(content: Any, source: Union[str, Path]) -> Thresholds:
    """ Turn the content of a thresholds.json into `Thresholds`.

    Args:
        content: What `thresholds_content` returned.
        source: File that contains it.
    """
    try:
        classes = {entry['name']: entry for entry in content['classes']}
        values = tuple(float(entry['threshold']) for entry in classes.values())
        origin = {name: content[name] for name in ('dataset', 'split', 'num_images')}
        positives = tuple(entry['positives'] for entry in classes.values())
        weights, epoch = content.get('weights', ''), content.get('epoch')
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f'Expected a file that --thresholds tune wrote, but got {source}: {error!r}') from error
    positives = () if None in positives else positives
    return Thresholds(
        values, tuple(classes), positives=positives, weights=weights, epoch=epoch, source=str(source), **origin)


def load_thresholds(path: Union[str, Path], class_names: Optional[Sequence[str]]) -> Thresholds:
    """ Read thresholds.json.

    Args:
        path: The file.
        class_names: Classes of the model, which the file contains in any order; None for those of the file.
    """
    thresholds = parse_thresholds_content(read_json(path), path)
    if class_names is None:
        return thresholds
    if set(class_names) != set(thresholds.class_names):
        name = sorted(set(class_names) ^ set(thresholds.class_names))[0]
        raise UsageError(
            f'Expected thresholds of the {len(class_names)} classes of the model, but got {len(thresholds.values)} in '
            f"{path}, with '{name}' in one of them only. Tune the thresholds of this model.")
    return thresholds.ordered(class_names)


def parse_thresholds(text: Optional[str], class_names: Optional[Sequence[str]]) -> Any:
    """ Parse --thresholds, except for 'tune'.

    Args:
        text: A probability, or a file that `save_thresholds` wrote.
        class_names: Classes of the model.

    Returns:
        A probability, `Thresholds`, or None if there is no text.
    """
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        return load_thresholds(text, class_names)
    if not 0 <= value <= 1:
        raise UsageError(f'Expected --thresholds to be a probability from 0 to 1, but got {text}.')
    return value
