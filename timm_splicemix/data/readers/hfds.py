""" Hugging Face `datasets` with several labels per image """
import io
import itertools
import os
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO, Iterable, Iterator, Optional, Sequence, Union

import numpy as np
import torch

from ...errors import UsageError
from ...files import open_regular
from ..class_map import source_of
from ..splits import split_names
from .base import MultiLabelReader, are_multi_hot, class_index, refuse_parent_folders

if TYPE_CHECKING:
    from datasets import Dataset


_IMAGE_NAMES = ('image', 'img')
_LABEL_NAMES = ('labels', 'label', 'tags')
_ROWS = 1000  # labels read at a time


class ReaderHfdsMultiLabel(MultiLabelReader):
    """ Images and labels of a Hugging Face data set.

    The labels of a row are a sequence: of `ClassLabel`, of indices, of names, or the multi-hot vector itself (a
    sequence of fixed length, or one of 0, 1 and -1 that cannot be indices because a row repeats a value). If neither
    the data set nor `class_names` names the classes, they are those of all its splits, so that the splits agree.

    Args:
        name: Name on the Hub, or folder that `save_to_disk` wrote.
        root: Folder that `save_to_disk` wrote, or its parent with `name` in it; otherwise the cache of downloads.
        split: Split, by the data set's own name or timm's ('train', 'validation').
        image_column: Column of the images; None finds the one of type `Image`, or named 'image' or 'img'.
        label_column: Column of the labels; None finds it by its type or name.
        class_names: Name of each class, in the order of the targets.
    """

    def __init__(
            self,
            name: str,
            root: Optional[Union[str, Path]] = None,
            split: str = 'train',
            image_column: Optional[str] = None,
            label_column: Optional[str] = None,
            class_names: Optional[Sequence[str]] = None,
    ):
        datasets = _import_datasets()
        dataset, splits = _load(name, root, split)
        image_column = _image_column(dataset.features, image_column)
        column = _label_column(dataset.features, label_column)
        if column is None or _item(dataset.features[column]) is None:
            raise UsageError(
                f"Expected a column with a sequence of labels in '{name}', but got {dict(dataset.features)}. Set "
                '--target-key to its name; data with one label per image are for timm.')
        targets, names = _read_targets(dataset, splits, column, class_names, name)
        self.dataset = dataset.select_columns([image_column]).with_format(None)
        self.dataset = self.dataset.cast_column(image_column, datasets.Image(decode=False))
        self.image_column = image_column
        self.label_column = column
        paths = list(_paths(self.dataset, image_column))
        refuse_parent_folders([path for path, is_file in paths if is_file], f"Hugging Face data set '{name}'")
        paths = [path or f'{name}:{index}' for index, (path, _) in enumerate(paths)]
        super().__init__(paths, targets, names, root=_saved_folder(name, root) or root or name)

    def __getitem__(self, index: int) -> tuple[BinaryIO, torch.Tensor]:
        image = self.dataset[index][self.image_column]
        if image is None or not (image['bytes'] or image['path']):
            raise OSError(f"column '{self.image_column}' is empty")
        target = self.targets[index].float()
        return io.BytesIO(image['bytes']) if image['bytes'] else open_regular(image['path']), target

    image_folder = None  # the images may be in the data set

    def locations(self) -> list[str]:
        # Splits repeat the names of images.
        where = ' '.join([str(self.dataset.split), *(file['filename'] for file in self.dataset.cache_files)])
        return [f'{where}:{index}' for index in range(len(self))]

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        path = self.paths[index]
        if basename:
            return os.path.basename(path)
        # The path of an image whose bytes are in the data set need not exist.
        return os.path.abspath(path) if absolute and os.path.exists(path) else path


def load_hfds(name: str, root: Optional[Union[str, Path]] = None, split: str = 'train') -> 'Dataset':
    """Load one split; see `ReaderHfdsMultiLabel` for the arguments."""
    return _load(name, root, split)[0]


def hfds_is_multi_label(dataset: 'Dataset', label_column: Optional[str] = None) -> bool:
    """Whether the labels are sequences, as opposed to one class per image."""
    column = _label_column(dataset.features, label_column)
    return column is not None and _item(dataset.features[column]) is not None


def _import_datasets() -> ModuleType:
    try:
        import datasets
    except ImportError as error:
        raise UsageError(
            "Hugging Face data sets need the package datasets: pip install 'timm-splicemix[hfds]'.") from error
    return datasets


def _saved_folder(name: str, root: Optional[Union[str, Path]]) -> Optional[Path]:
    """The folder that `save_to_disk` wrote, if it exists."""
    folders = [] if root is None else [Path(root) / name]
    folders += [Path(name)] if name else []
    folders += [] if root is None else [Path(root)]
    return next((f for f in folders if (f / 'dataset_dict.json').is_file() or (f / 'state.json').is_file()), None)


def _load(name: str, root: Optional[Union[str, Path]], split: str) -> tuple['Dataset', dict[str, 'Dataset']]:
    """The requested split, and all splits."""
    datasets = _import_datasets()
    folder = _saved_folder(name, root)
    if folder is None and not name:
        raise UsageError(f'{root} was not written by save_to_disk. Set --dataset hfds/NAME to a name on the Hub.')
    cache = None if root is None else str(root)
    # A data set of the Hub is prepared with all its splits in any case.
    try:
        loaded = (
            datasets.load_dataset(name, cache_dir=cache) if folder is None else datasets.load_from_disk(str(folder)))
    except (OSError, ValueError) as error:
        raise UsageError(f"Cannot load the Hugging Face data set '{folder or name}': {error}") from error
    # One without splits becomes 'train', as in `load_dataset`: otherwise it would serve as its own validation set.
    splits = dict(loaded) if isinstance(loaded, dict) else {str(loaded.split or 'train'): loaded}
    found = next((candidate for candidate in split_names(split) if candidate in splits), None)
    if found is not None:
        return splits[found], splits
    if folder is None and ('[' in split or '+' in split):
        return datasets.load_dataset(name, split=split, cache_dir=cache), splits
    raise UsageError(f"'{name or folder}' has no split '{split}'. Its splits: {', '.join(splits)}.")


def _item(feature: Any) -> Optional[Any]:
    """Type of the items of a sequence, which has several types in `datasets`; None for other features."""
    if isinstance(feature, list) and len(feature) == 1:
        return feature[0]
    return getattr(feature, 'feature', None)


def _is_class_label(feature: Any) -> bool:
    return type(feature).__name__ == 'ClassLabel'


def _is_fixed_numeric(feature: Any) -> bool:
    dtype = str(getattr(_item(feature), 'dtype', ''))
    return getattr(feature, 'length', -1) > 0 and dtype.startswith(('int', 'uint', 'float', 'bool'))


def _image_column(features: dict[str, Any], given: Optional[str]) -> str:
    _check_column(features, given, '--input-key')
    images = [column for column, feature in features.items() if type(feature).__name__ == 'Image']
    named = [column for column in _IMAGE_NAMES if column in features]
    if given is None and len(images) > 1 and not set(named) & set(images):
        raise UsageError(f"Expected one column of images, but got {', '.join(images)}. Set --input-key to one of them.")
    found = [given] if given else [column for column in named if column in images] + images + named
    if not found:
        raise UsageError(f"Expected a column of images, but got {', '.join(features)}. Set --input-key to its name.")
    return found[0]


def _label_column(features: dict[str, Any], given: Optional[str]) -> Optional[str]:
    """The column of labels, whether sequences or not; None if there is none."""
    _check_column(features, given, '--target-key')
    if given is not None:
        return given
    named = [column for column in _LABEL_NAMES if column in features]
    found = [column for column, feature in features.items() if _is_class_label(_item(feature))]
    if not found and not any(_is_class_label(features[column]) for column in named):
        found = [column for column, feature in features.items() if _is_fixed_numeric(feature)]
    if len(found) > 1 and not set(named) & set(found):
        raise UsageError(f"Expected one column of labels, but got {', '.join(found)}. Set --target-key to one of them.")
    found = [column for column in named if column in found] + found + named
    return found[0] if found else None


def _check_column(features: dict[str, Any], given: Optional[str], flag: str) -> None:
    if given is not None and given not in features:
        raise UsageError(f"Expected {flag} to be one of {', '.join(features)}, but got '{given}'.")


def _rows(dataset: 'Dataset', column: str, name: str) -> Iterator[tuple[str, list]]:
    """Place of each row, for errors, and its labels; images are not read."""
    index = 0
    for batch in dataset.select_columns([column]).with_format(None).iter(_ROWS):
        for row in batch[column]:
            where = f"row {index} of '{name}'"
            if row is None:
                raise UsageError(f"Column '{column}' is empty in {where}. Write an empty sequence for no labels.")
            yield where, row
            index += 1


def _paths(dataset: 'Dataset', column: str) -> Iterator[tuple[Optional[str], bool]]:
    """Path of each image, and whether it is that of a file, because the data set has no bytes; these are not read."""
    for table in dataset.with_format('arrow').iter(_ROWS):
        for chunk in table.column(column).chunks:
            content, paths = (chunk.flatten()[chunk.type.get_field_index(field)] for field in ('bytes', 'path'))
            files = zip(paths.to_pylist(), content.is_null().to_pylist())
            yield from ((path, no_bytes and path is not None) for path, no_bytes in files)


def _read_targets(
        dataset: 'Dataset',
        splits: dict[str, 'Dataset'],
        column: str,
        class_names: Optional[Sequence[str]],
        name: str,
) -> tuple[torch.Tensor, list[str]]:
    """(N, classes) int8 and the name of each class."""
    def all_rows() -> Iterator[list]:
        sets = [d for d in splits.values() if column in d.features]
        return (row for _, row in itertools.chain.from_iterable(_rows(d, column, name) for d in sets))

    feature = dataset.features[column]
    item = _item(feature)
    own_names = list(item.names) if _is_class_label(item) else None
    dtype = str(getattr(item, 'dtype', item))
    is_text = dtype in ('string', 'large_string')
    if not is_text and not dtype.startswith(('int', 'uint', 'float', 'bool')):
        raise UsageError(f"Expected a sequence of classes, indices or names in column '{column}', but got {item}.")
    names = None if class_names is None else list(class_names)
    rows = _rows(dataset, column, name)
    if own_names is None and not is_text and (
            _is_fixed_numeric(feature)
            or dtype.startswith(('float', 'bool'))
            or are_multi_hot(all_rows(), None if names is None else len(names))
    ):
        targets = _parse_multi_hot(rows, len(dataset), None if names is None else len(names))
        return targets, names or [str(index) for index in range(targets.shape[1])]

    if names is None and own_names is not None:
        names = own_names
    elif names is None and is_text:
        names = sorted({label for row in all_rows() for label in row})
    elif names is None:
        names = [str(index) for index in range(max((label for row in all_rows() for label in row), default=-1) + 1)]
    if not names:
        raise UsageError(f"Column '{column}' of '{name}' has no labels. Set --class-map to the classes.")
    source = '' if class_names is None else source_of(class_names)
    return _parse_labels(rows, len(dataset), names, own_names or names, source), names


def _parse_multi_hot(rows: Iterable[tuple[str, list]], count: int, classes: Optional[int]) -> torch.Tensor:
    targets = None if classes is None else np.zeros((count, classes), np.int8)
    for index, (where, row) in enumerate(rows):
        if targets is None:
            targets = np.zeros((count, len(row)), np.int8)
        values = np.asarray(row)
        if len(row) != targets.shape[1] or not np.isin(values, (-1, 0, 1)).all():
            raise UsageError(f'Expected {targets.shape[1]} values among 0, 1 and -1 in {where}, but got {row}.')
        targets[index] = values
    if targets is None:
        raise UsageError('The split is empty and does not tell the number of classes. Set --class-map.')
    return torch.from_numpy(targets)


def _parse_labels(
        rows: Iterable[tuple[str, list]],
        count: int,
        names: list[str],
        own_names: list[str],
        source: str,
) -> torch.Tensor:
    """Indices in the rows refer to `own_names`; `names` is the order of the classes in the targets."""
    class_to_idx = {name: index for index, name in enumerate(names)}
    targets = torch.zeros(count, len(names), dtype=torch.int8)
    for index, (where, row) in enumerate(rows):
        for label in row:
            if isinstance(label, int):
                if not 0 <= label < len(own_names):
                    raise UsageError(f'Expected indices of {len(own_names)} classes in {where}, but got {label}.')
                label = own_names[label]
            elif label is None:
                raise UsageError(f'Empty label in {where}: {row}.')
            targets[index, class_index(label, class_to_idx, where, source)] = 1
    return targets
