""" Labels of mixed images: the union of the cells, and the classes for which a union is wrong """
import difflib
import operator
from dataclasses import dataclass
from typing import Optional, Sequence, Union

import torch

from ..errors import UsageError


@dataclass(frozen=True)
class LabelUnion:
    """ How the labels of the visible cells become the label of a mixed image.

    A mixed image has a class if a visible cell has it: its label is the largest of the cells, and unknown (-1) wins
    over 0. For other classes a union is wrong.

    Args:
        unknown_classes: Indices of classes that are unknown where two or more cells are visible.
        all_classes: Indices of classes that are present only if every visible cell has them: their label is the
            smallest of the cells, and unknown wins over 1.
    """
    unknown_classes: tuple[int, ...] = ()
    all_classes: tuple[int, ...] = ()

    def __post_init__(self):
        for name in ('unknown_classes', 'all_classes'):
            object.__setattr__(self, name, _check_indices(name, getattr(self, name)))
        both = set(self.unknown_classes) & set(self.all_classes)
        if both:
            raise UsageError(
                'Expected a class in unknown_classes (--splicemix-unknown) or in all_classes (--splicemix-all), but '
                f'got class {min(both)} in both.')

    def check_classes(self, num_classes: int) -> None:
        """Raise an error if an index is not below the number of classes."""
        highest = max((*self.unknown_classes, *self.all_classes), default=0)
        if highest >= num_classes:
            raise UsageError(f'Expected class indices from 0 to {num_classes - 1}, but got {highest}.')

    def prepare(self, targets: torch.Tensor) -> torch.Tensor:
        """The targets (B, classes), in float32 if they need to hold -1 and their type cannot."""
        self.check_classes(targets.shape[1])
        has_sign = targets.dtype not in (torch.bool, torch.uint8)
        return targets if has_sign or not self.unknown_classes else targets.float()

    def of_cells(self, targets: torch.Tensor, dropped: torch.Tensor) -> torch.Tensor:
        """ The labels of mixed images. No decision depends on a tensor's value, so this never waits for a GPU.

        Args:
            targets: (M, cells, classes), gathered from the result of `prepare`.
            dropped: (M, cells) bool, the cells that are not visible, on the device of the targets.

        Returns:
            (M, classes)
        """
        hidden = dropped.unsqueeze(-1)  # (M, cells, 1)
        values = targets.masked_fill(hidden, 0)
        highest, lowest = values.amax(dim=1), values.amin(dim=1)  # (M, classes)
        labels = torch.where(highest > 0, highest, lowest)
        if self.all_classes:
            lowest = targets.masked_fill(hidden, 1).amin(dim=1)
            lowest_known = targets.masked_fill(hidden | (targets < 0), 1).amin(dim=1)
            smallest = torch.where(lowest_known < 1, lowest_known, lowest)
            is_all = _mask(self.all_classes, targets) & ~hidden.all(dim=1)  # without a visible cell it has no class
            labels = torch.where(is_all, smallest, labels)
        if self.unknown_classes:
            several = (~hidden).sum(dim=1) > 1  # (M, 1)
            labels = labels.masked_fill(several & _mask(self.unknown_classes, targets), -1)
        return labels


def find_classes(
        classes: Sequence[Union[str, int]],
        class_names: Optional[Sequence[str]],
        what: str = 'classes',
) -> list[int]:
    """ Indices of classes that are given by name or by index.

    Args:
        classes: Names, or indices. The text of an index is accepted if the names of the classes are not known.
        class_names: Names of all classes, None if they are not known.
        what: The flag or argument that lists the classes, for the error.

    Example:
        >>> find_classes(['dog', 0], ['cat', 'dog'])
        [1, 0]
    """
    positions = {name: index for index, name in enumerate(class_names or ())}
    indices = []
    for name in classes:
        if name in positions:
            indices.append(positions[name])
        elif not isinstance(name, str) or (not positions and name.isdecimal()):
            indices.append(int(name))
        elif not positions:
            raise UsageError(f"Expected indices of classes for {what}, as their names are not known, but got '{name}'.")
        else:
            near = difflib.get_close_matches(name, positions, n=3, cutoff=0.5) or list(positions)[:5]
            raise UsageError(
                f"Expected names of the {len(positions)} classes of the data set for {what}, but got '{name}': "
                f"did you mean {' or '.join(near)}?")
    return indices


def _check_indices(name: str, classes: Sequence[int]) -> tuple[int, ...]:
    """The indices in increasing order, each once."""
    try:
        indices = sorted({operator.index(value) for value in classes})
    except TypeError:
        raise UsageError(
            f'Expected indices of classes for {name}, but got {classes!r}: use dataset.class_names.index(name).'
        ) from None
    if indices and indices[0] < 0:
        raise UsageError(f'Expected indices of at least 0 for {name}, but got {indices[0]}.')
    return tuple(indices)


def _mask(classes: Sequence[int], targets: torch.Tensor) -> torch.Tensor:
    """(classes,) bool on the device of the targets, True for the given indices."""
    mask = torch.zeros(targets.shape[-1], dtype=torch.bool)
    mask[list(classes)] = True
    return mask.to(targets.device, non_blocking=True)
