""" Data sets by name: the multi-label ones here, and every one that timm knows """
import inspect
import logging
import os
from pathlib import Path
from typing import Any, Callable, Optional, Sequence, Union

import timm.data
import torch.utils.data
from timm.data.readers.class_map import load_class_map

from ..errors import UsageError
from .dataset import MultiLabelDataset, StrictImageDataset
from .download import download_dataset
from .missing import keep_labels as hide_labels
from .readers.base import MultiLabelReader
from .readers.coco import ReaderCoco, find_coco, find_images
from .readers.csv import ReaderCsv, find_csv
from .readers.hfds import ReaderHfdsMultiLabel, hfds_is_multi_label, load_hfds
from .readers.list import ReaderList
from .readers.voc import ReaderVoc, voc_split
from .readers.wds import WdsDataset
from .shapes import generate_shapes
from .splits import is_training_split, own_split

_logger = logging.getLogger(__name__)

Root = Optional[Union[str, Path]]

_TIMM_FOLDERS = ('', 'folder', 'image_folder', 'tar')
_TIMM_PREFIXES = ('torch/', 'hfds/', 'hfids/', 'tfds/', 'wds/')
_GIVEN = ('name', 'root', 'split', 'is_training', 'images_must_exist')  # to readers, by create_dataset
_DOWNLOADS = ('coco/2014', 'coco/2017', 'voc/2007', 'voc/2012')


def _need_folder(root: Root, name: str) -> Path:
    if root is None or not Path(root).exists():
        raise UsageError(
            f"Expected the folder of data set '{name}' (--data-dir), but got {root}, which does not exist.")
    return Path(root)


def _shapes(name: str, root: Root, split: str, *, seed: int = 0) -> MultiLabelReader:
    if root is None:
        cache = Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache')
        root = cache / 'timm_splicemix' / 'shapes'
    split = own_split(split)
    if split not in ('train', 'val', 'val_unbiased'):
        raise UsageError(f"Expected a split of shapes (train, val or val_unbiased), but got '{split}'.")
    root = generate_shapes(root, seed=seed)
    return ReaderCoco(root / split, root / 'annotations' / f'instances_{split}.json')


def _coco(
        name: str,
        root: Root,
        split: str,
        *,
        annotations: Root = None,
        class_order: str = 'id',
        keep_unlabelled: bool = False,
        images_must_exist: bool = True,
) -> MultiLabelReader:
    root = _need_folder(root, name)
    year = name.partition('/')[2] or None
    if annotations is None:
        images, file = find_coco(root, own_split(split.removesuffix(year or '')), year)
    else:
        file = _find_file(root, annotations)
        images = find_images(root, file)
    return ReaderCoco(images, file, class_order, keep_unlabelled, images_must_exist)


def _voc(
        name: str,
        root: Root,
        split: str,
        *,
        is_training: bool,
        difficult: Optional[str] = None,
        images_must_exist: bool = True,
) -> MultiLabelReader:
    year = name.partition('/')[2]
    difficult = difficult or ('negative' if is_training else 'ignore')
    return ReaderVoc(_need_folder(root, name), year, voc_split(split, year), difficult, images_must_exist)


def _csv(
        name: str,
        root: Root,
        split: str,
        *,
        annotations: Root = None,
        class_names: Optional[Sequence[str]] = None,
        image_column: Optional[str] = None,
        label_column: Optional[str] = None,
        split_column: Optional[str] = None,
        label_delimiter: Optional[str] = None,
        images_must_exist: bool = True,
) -> MultiLabelReader:
    root = _need_folder(root, name)
    file = find_csv(root, split, split_column) if annotations is None else _find_file(root, annotations)
    return ReaderCsv(
        root, file, split, class_names, image_column, label_column, split_column, label_delimiter, images_must_exist)


def _list(
        name: str,
        root: Root,
        split: str,
        *,
        annotations: Root,
        class_names: Optional[Sequence[str]] = None,
        num_classes: Optional[int] = None,
        images_must_exist: bool = True,
) -> MultiLabelReader:
    root = _need_folder(root, name)
    return ReaderList(root, _find_file(root, annotations), class_names, num_classes, images_must_exist)


def _hfds(
        name: str,
        root: Root,
        split: str,
        *,
        input_key: Optional[str] = None,
        target_key: Optional[str] = None,
        class_names: Optional[Sequence[str]] = None,
) -> MultiLabelReader:
    return ReaderHfdsMultiLabel(name.partition('/')[2], root, split, input_key, target_key, class_names)


_READERS: dict[str, Callable[..., MultiLabelReader]] = {
    'coco': _coco,
    'coco/2014': _coco,
    'coco/2017': _coco,
    'csv': _csv,
    'shapes': _shapes,
    'voc/2007': _voc,
    'voc/2012': _voc,
}


def dataset_names() -> list[str]:
    """The names that `create_dataset` knows; those that end in / want a name behind it."""
    return sorted(_READERS) + sorted(filter(None, _TIMM_FOLDERS)) + sorted(_TIMM_PREFIXES)


def create_dataset(
        name: str,
        root: Root = None,
        split: str = 'train',
        *,
        is_training: Optional[bool] = None,
        download: bool = False,
        class_map: Union[str, dict[str, int], None] = None,
        class_names: Optional[Sequence[str]] = None,
        keep_labels: Optional[str] = None,
        keep_labels_seed: int = 0,
        images_must_exist: bool = True,
        transform: Optional[Callable[[Any], Any]] = None,
        target_transform: Optional[Callable[[torch.Tensor], Any]] = None,
        input_img_mode: str = 'RGB',
        **kwargs: Any,
) -> torch.utils.data.Dataset:
    """ Create a data set by its name.

    Options that are None are left to the data set; one that it does not have is refused.

    Args:
        name: 'shapes' (embedded, generated on first use), 'coco/2014', 'coco/2017', 'coco', 'voc/2007', 'voc/2012',
            'csv', 'folder' with `annotations`, 'hfds/...', 'wds/...', or any name that timm's function takes.
        root: Folder of the data set; None is the user's cache for 'shapes'.
        split: Split, by the data set's own name or timm's ('train', 'validation').
        is_training: Whether the split is trained on, None to tell by its name.
        download: Fetch the data set if it is not there (COCO, VOC, and what timm can fetch).
        class_map: File that lists the classes, or a dict of their indices (csv, folder, hfds, wds, timm's).
        class_names: Names of the classes instead of a file.
        keep_labels: Hide labels of a training split: '75', '40', 'single' or a probability, see `keep_labels`.
        keep_labels_seed: Seed of what is hidden.
        images_must_exist: Refuse lists of images that are not there, where images are listed.
        transform: Applied to each image.
        target_transform: Applied to each target.
        input_img_mode: Mode that images are converted to.
        **kwargs: What the data set itself takes: `annotations` (coco, csv, folder), `class_order` and `keep_unlabelled`
            (coco), `difficult` (voc), `image_column`, `label_column`, `split_column` and `label_delimiter` (csv),
            `num_classes` (folder), `input_key` and `target_key` (hfds, wds), `seed` (shapes, wds).

    Returns:
        A data set with multi-hot float targets, `class_names` and `num_classes`, or what timm returns.
    """
    is_training = is_training_split(split) if is_training is None else is_training
    kwargs = {key: value for key, value in kwargs.items() if value is not None}
    if class_names is None and class_map is not None:
        class_names = _names_of(class_map, root)
    if keep_labels is not None and not is_training:
        raise UsageError(f"Expected keep_labels for a training split only, but got it for '{split}'.")
    if download and name in _READERS and name not in _DOWNLOADS:
        raise UsageError(f"Expected a data set that can be fetched ({', '.join(_DOWNLOADS)}), but got '{name}'.")
    common = {'transform': transform, 'target_transform': target_transform, 'input_img_mode': input_img_mode}

    factory = _find_reader(name, root, split, kwargs)
    if factory is None and name.startswith('wds/') and (class_names or _lists_classes(root, name[4:])):
        if keep_labels is not None:
            raise UsageError('Expected keep_labels for a data set that is not streamed, but got it for wds.')
        kwargs = {'label_key' if key == 'target_key' else key: value for key, value in kwargs.items()}
        return _call(name, WdsDataset, {
            'root': _need_folder(root, name), 'name': name.partition('/')[2], 'split': split,
            'class_names': class_names, 'is_training': is_training, **common}, kwargs)
    if factory is None:
        if keep_labels is not None:
            raise UsageError(f"Expected keep_labels for a multi-label data set, but got it for '{name}'.")
        return _timm_dataset(name, root, split, is_training, download, class_map, common, kwargs)

    known = inspect.signature(factory).parameters
    given = {'is_training': is_training, 'images_must_exist': images_must_exist}
    given = {key: value for key, value in given.items() if key in known}
    if class_names is not None:
        given['class_names'] = class_names
    given = {'name': name, 'root': root, 'split': split, **given}
    try:
        reader = _call(name, factory, given, kwargs)
    except ValueError:
        if not download:
            raise
        if root is None:
            raise UsageError(f"Expected the folder to fetch '{name}' into (--data-dir), but got None.") from None
        download_dataset(name, root)
        reader = _call(name, factory, given, kwargs)
    if not len(reader):
        raise UsageError(f"Expected images in split '{split}' of data set '{name}', but got none in {reader.root}.")
    if keep_labels is not None:
        reader.targets = hide_labels(reader.targets, keep_labels, keep_labels_seed)
    _warn_of_absent_classes(reader, split)
    return MultiLabelDataset(reader, **common)


def check_same_classes(train: torch.utils.data.Dataset, validation: torch.utils.data.Dataset) -> None:
    """ Refuse splits that don't have the same classes in the same order.

    Args:
        train: One data set.
        validation: Another one.
    """
    left, right = (list(getattr(dataset, 'class_names', None) or ()) for dataset in (train, validation))
    if left and right and left != right:
        only = sorted(set(left) ^ set(right))
        what = f"'{only[0]}' in one of them only" if only else 'another order'
        raise UsageError(
            f'Expected the same classes to train and to validate on, but got {len(left)} and {len(right)} with {what}: '
            'list them in a file for --class-map.')


def _find_reader(
        name: str,
        root: Root,
        split: str,
        kwargs: dict[str, Any],
) -> Optional[Callable[..., MultiLabelReader]]:
    if name in _READERS:
        return _READERS[name]
    if name.lower() in _TIMM_FOLDERS and 'annotations' in kwargs:
        return _list
    if name.startswith('hfds/'):
        dataset = load_hfds(name.partition('/')[2], root, split)
        return _hfds if hfds_is_multi_label(dataset, kwargs.get('target_key')) else None
    return None


def _lists_classes(root: Root, name: str) -> bool:
    """Whether shards come with the file that names their classes; without it they are timm's."""
    return root is not None and any((Path(root) / folder / 'classes.txt').is_file() for folder in ('', name))


def _call(name: str, factory: Callable, given: dict[str, Any], kwargs: dict[str, Any]) -> Any:
    """Call a factory, or say which of the options it does not have."""
    known = inspect.signature(factory).parameters
    unknown = [key for key in (*kwargs, *given) if key not in known]
    if unknown:
        takes = ', '.join(key for key in known if key not in _GIVEN) or 'none'
        raise UsageError(f"Expected options that data set '{name}' has ({takes}), but got {', '.join(unknown)}.")
    return factory(**given, **kwargs)


def _find_file(root: Path, file: Union[str, Path]) -> Path:
    """A file that is given by its path, or by its path in the folder of the data set."""
    for candidate in (Path(file), root / file, root / 'annotations' / file):
        if candidate.is_file():
            return candidate
    raise UsageError(f'Expected an annotation file, but got {file}, which is neither there nor in {root}.')


def _names_of(class_map: Union[str, dict[str, int]], root: Root) -> list[str]:
    try:
        class_to_idx = load_class_map(class_map, '' if root is None else str(root))
    except (AssertionError, OSError, ValueError) as error:
        raise UsageError(f'Expected a file that lists the classes, but got {class_map}: {error}') from error
    names = sorted(class_to_idx, key=class_to_idx.get)
    if [class_to_idx[name] for name in names] != list(range(len(names))):
        raise UsageError(f'Expected classes with the indices 0 to {len(names) - 1}, but got others in {class_map}.')
    return names


def _warn_of_absent_classes(reader: MultiLabelReader, split: str) -> None:
    present = (reader.targets == 1).any(dim=0).tolist()
    absent = [name for name, there in zip(reader.class_names, present) if not there]
    if absent:
        _logger.warning(f"No image of split '{split}' has: {', '.join(absent)}.")


def _timm_dataset(
        name: str,
        root: Root,
        split: str,
        is_training: bool,
        download: bool,
        class_map: Union[str, dict[str, int], None],
        common: dict[str, Any],
        kwargs: dict[str, Any],
) -> torch.utils.data.Dataset:
    if name.lower() in _TIMM_FOLDERS:
        _need_folder(root, name)
    elif not name.lower().startswith(_TIMM_PREFIXES):
        raise UsageError(f"Expected a data set among {', '.join(dataset_names())}, but got '{name}'.")
    try:
        dataset = timm.data.create_dataset(
            name, root=None if root is None else str(root), split=split, is_training=is_training, download=download,
            class_map=class_map, **common, **kwargs)
    except (AssertionError, ImportError, RuntimeError, TypeError) as error:  # what timm and torchvision raise at a user
        multi_label = '; for several labels per image, write classes.txt or give --class-map'
        hint = multi_label if name.startswith('wds/') else ''
        raise UsageError(f"Expected data set '{name}' in {root}, but got: {error or repr(error)}{hint}") from error
    if type(dataset) is not timm.data.ImageDataset:
        return dataset
    return StrictImageDataset(
        None,
        reader=dataset.reader,
        load_bytes=dataset.load_bytes,
        input_img_mode=dataset.input_img_mode,
        transform=dataset.transform,
        target_transform=dataset.target_transform,
        additional_features=dataset.additional_features,
    )
