""" Classes of two data sets: those of the training set, or of a model, count """
import difflib
import logging
from typing import Optional, Sequence

import torch.utils.data
from timm.data.readers.reader_image_folder import ReaderImageFolder

from ..errors import UsageError
from ..files import printable
from .readers.base import MultiLabelReader

_logger = logging.getLogger(__name__)
_SHOWN = 20  # names in a message


def align_classes(
        dataset: torch.utils.data.Dataset,
        class_names: Sequence[str],
        dataset_title: str,
        classes_title: str,
        drop_unknown: bool = False,
) -> None:
    """ Give a data set the classes of another one, in their order.

    A class that the data set lacks is absent in all its images, which is a warning. A class that only the data set has
    is an error, unless its labels are dropped. Data sets without names of classes stay as they are.

    Args:
        dataset: The data set; changed in place.
        class_names: The classes.
        dataset_title: Name of the data set in messages.
        classes_title: Name of the owner of `class_names` in messages.
        drop_unknown: Drop labels of other classes.
    """
    reader = getattr(dataset, 'reader', None)
    own = getattr(dataset, 'class_names', None)
    if not own or list(own) == list(class_names):
        return
    if not isinstance(reader, (MultiLabelReader, ReaderImageFolder)):
        raise UsageError(
            f'{_capital(dataset_title)} ({len(own)} classes) and {classes_title} ({len(class_names)}) have different '
            'classes. List the classes in a file for --class-map.')
    names = _names_of_indices(own, class_names)
    unknown = [name for name in names if name not in set(class_names)]
    if unknown and not drop_unknown:
        raise UsageError(
            f'{len(unknown)} of the {len(own)} classes of {dataset_title} are no classes of {classes_title}: '
            f'{_listing(unknown)}.{_suggestion(unknown, class_names)} List the classes to use in a file for '
            '--class-map, or drop the labels of these classes with --drop-unknown-classes.')
    if len(unknown) == len(own):
        raise UsageError(f'{_capital(dataset_title)} and {classes_title} have no class in common.')
    missing = [name for name in class_names if name not in set(names)]
    places = {name: place for place, name in enumerate(names)}
    if isinstance(reader, MultiLabelReader):
        reader.select_classes([places.get(name, -1) for name in class_names], class_names)
    else:
        _select_folders(reader, names, class_names)
    if unknown:
        what = 'labels' if isinstance(reader, MultiLabelReader) else 'images'
        _logger.warning(f'Dropped the {what} of {len(unknown)} classes of {dataset_title}: {_listing(unknown)}.')
    if missing:
        _logger.warning(
            f'{_capital(dataset_title)} lacks {len(missing)} of the {len(class_names)} classes of {classes_title}, '
            f'which count as absent in all its images: {_listing(missing)}.')


def _names_of_indices(own: Sequence[str], class_names: Sequence[str]) -> list[str]:
    """The own names, or if they are indices and no names of the classes, what they stand for."""
    if set(own) & set(class_names) or not all(name.isascii() and name.isdigit() for name in own):
        return list(own)
    return [class_names[int(name)] if int(name) < len(class_names) else name for name in own]


def _select_folders(reader: ReaderImageFolder, names: Sequence[str], class_names: Sequence[str]) -> None:
    indices = {name: index for index, name in enumerate(class_names)}
    reader.samples = [(path, indices[names[old]]) for path, old in reader.samples if names[old] in indices]
    reader.class_to_idx = indices


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _listing(names: Sequence[str]) -> str:
    more = f' and {len(names) - _SHOWN} more' if len(names) > _SHOWN else ''
    return ', '.join(map(printable, names[:_SHOWN])) + more


def _suggestion(unknown: Sequence[str], class_names: Sequence[str]) -> str:
    for name in unknown:
        near: Optional[str] = next(iter(difflib.get_close_matches(name[:200], class_names, n=1, cutoff=0.7)), None)
        near = near or next((other for other in class_names if other.lower() == name.lower()), None)
        if near is not None:
            return f" Did you mean '{printable(near)}' by '{printable(name)}'?"
    return ''
