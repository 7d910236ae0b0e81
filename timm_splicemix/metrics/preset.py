""" Definitions of the multi-label metrics, in which implementations differ """
from dataclasses import dataclass
from numbers import Real
from typing import Sequence, Union

from ..errors import UsageError


@dataclass(frozen=True)
class Preset:
    """ Definitions that a result depends on; `str` describes them.

    Args:
        name: Name to print.
        threshold: Probability from which a class is predicted, one for all classes or one for each.
        strict: Require a probability above the threshold.
        class_f1: CF1 as the 'harmonic' mean of CP and CR, or as the 'mean' of the F1 of the classes (0 where tp = 0).
        interpolated: Compute AP from the highest precision at each recall or above.
        exact: Predict the top k also below the threshold.
        unknown: Meaning of targets of -1 in precision, recall and F1: 'negative', or 'ignore' to leave them out. AP
            always ignores them.
    """
    name: str = 'paper'
    threshold: Union[float, Sequence[float]] = 0.5
    strict: bool = False
    class_f1: str = 'harmonic'
    interpolated: bool = False
    exact: bool = False
    unknown: str = 'negative'

    def __post_init__(self):
        if not isinstance(self.threshold, Real):
            object.__setattr__(self, 'threshold', tuple(float(value) for value in self.threshold))
        for threshold in self.thresholds:
            if not 0 <= threshold <= 1:
                raise UsageError(f'Expected threshold to be a probability from 0 to 1, but got {threshold}.')
        if self.class_f1 not in ('harmonic', 'mean'):
            raise UsageError(f"Expected class_f1 to be 'harmonic' or 'mean', but got {self.class_f1!r}.")
        if self.unknown not in ('negative', 'ignore'):
            raise UsageError(f"Expected unknown to be 'negative' or 'ignore', but got {self.unknown!r}.")

    @property
    def thresholds(self) -> tuple[float, ...]:
        """Thresholds as a tuple of one for all classes or one for each."""
        return self.threshold if isinstance(self.threshold, tuple) else (self.threshold,)

    def check_classes(self, num_classes: int) -> None:
        if isinstance(self.threshold, tuple) and len(self.threshold) != num_classes:
            raise UsageError(
                f'Expected one threshold or {num_classes}, one for each class, but got {len(self.threshold)}.')

    def __str__(self) -> str:
        threshold = 'a threshold for each class' if isinstance(self.threshold, tuple) else f'{self.threshold:g}'
        class_f1 = 'harmonic mean of CP and CR' if self.class_f1 == 'harmonic' else 'mean of F1 per class'
        return (
            f'{self.name}: predicted if p {">" if self.strict else ">="} {threshold}, '
            f'top k {"whatever the threshold" if self.exact else "and above the threshold"}, CF1 is the {class_f1}, '
            f'AP {"interpolated" if self.interpolated else "not interpolated"}, '
            f'unknown labels ignored in AP, {"negative" if self.unknown == "negative" else "ignored"} in P/R/F')


PRESETS = {preset.name: preset for preset in (
    Preset('paper'),
    Preset('asl', threshold=0.8, strict=True, class_f1='mean'),
    Preset('interpolated', interpolated=True),
)}


def as_preset(preset: Union[str, Preset]) -> Preset:
    """Return the preset of a name."""
    if isinstance(preset, Preset):
        return preset
    if preset not in PRESETS:
        names = ', '.join(repr(name) for name in PRESETS)
        raise UsageError(f'Expected preset to be one of {names}, or a Preset, but got {preset!r}.')
    return PRESETS[preset]
