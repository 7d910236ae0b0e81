""" Data sets by name: the multi-label ones, and all of timm's """
import logging
from functools import partial
from pathlib import Path
from typing import Any, Callable, Optional, Sequence, Union

import timm.data
import torch.utils.data

from ..errors import UsageError
from ..files import printable
from .cache import cache_folder
from .class_map import read_class_map, source_of
from .classes import align_classes
from .dataset import MultiLabelDataset, StrictImageDataset
from .download import ARCHIVES, choose_archives, download_dataset
from .missing import keep_labels as hide_labels
from .readers.base import MultiLabelReader
from .readers.coco import ReaderCoco, find_coco, find_images
from .readers.csv import ReaderCsv, find_csv
from .readers.find import image_folder
from .readers.hfds import ReaderHfdsMultiLabel, hfds_is_multi_label, load_hfds
from .readers.json import ReaderJson, find_json
from .readers.list import ReaderList
from .readers.subset import without_missing_images
from .readers.voc import ReaderVoc, voc_split
from .readers.wds import ReaderWds
from .shapes import generate_shapes
from .splits import is_training_split, own_split

_logger = logging.getLogger(__name__)

Root = Optional[Union[str, Path]]

_TIMM_FOLDERS = ('', 'folder', 'image_folder', 'tar')
_TIMM_PREFIXES = ('torch/', 'hfds/', 'hfids/', 'tfds/', 'wds/')


def _need_folder(root: Root, name: str) -> Path:
    if root is None or not Path(root).exists():
        relative = '' if root is None or Path(root).is_absolute() else f', which is relative to {Path.cwd()}'
        raise UsageError(f"The folder of data set '{name}' (--data-dir) does not exist: {root}{relative}.")
    return Path(root)


def _shapes(name: str, root: Root, split: str, is_training: bool, shapes_seed: int = 0) -> MultiLabelReader:
    root = cache_folder() / 'shapes' if root is None else root
    split = own_split(split)
    if split not in ('train', 'val', 'val_unbiased'):
        raise UsageError(f"Expected a split of shapes: train, val or val_unbiased, but got '{split}'.")
    root = generate_shapes(root, seed=shapes_seed)
    return ReaderCoco(root / split, root / 'annotations' / f'instances_{split}.json')


def _coco(
        name: str, root: Root, split: str, is_training: bool, annotations: Root = None, images: Root = None,
        **options: Any,
) -> MultiLabelReader:
    root = _need_folder(root, name)
    year = name.partition('/')[2] or None
    if annotations is None:
        folder, file = find_coco(root, own_split(split.removesuffix(year or '')), year)
    else:
        file = _find_file(root, annotations)
        folder = find_images(root, file)
    return ReaderCoco(_find_folder(root, images, folder), file, **options)


def _voc(
        name: str, root: Root, split: str, is_training: bool, difficult: Optional[str] = None, images: Root = None,
        **options: Any,
) -> MultiLabelReader:
    root = _need_folder(root, name)
    year = name.partition('/')[2]
    difficult = difficult or ('negative' if is_training else 'ignore')
    folder = None if images is None else _find_folder(root, images, root)
    return ReaderVoc(root, year, voc_split(split, year), difficult, images=folder, **options)


def _csv(
        name: str, root: Root, split: str, is_training: bool, annotations: Root = None, images: Root = None,
        **options: Any,
) -> MultiLabelReader:
    root = _need_folder(root, name)
    split_column = options.get('split_column')
    file = find_csv(root, split, split_column) if annotations is None else _find_file(root, annotations)
    return ReaderCsv(_find_folder(root, images, image_folder(root, file)), file, split, **options)


def _json(
        name: str, root: Root, split: str, is_training: bool, annotations: Root = None, images: Root = None,
        input_key: Optional[str] = None, target_key: Optional[str] = None, difficult: Optional[str] = None,
        **options: Any,
) -> MultiLabelReader:
    root = _need_folder(root, name)
    file = find_json(root, split) if annotations is None else _find_file(root, annotations)
    return ReaderJson(
        _find_folder(root, images, image_folder(root, file)), file, split, image_key=input_key, label_key=target_key,
        difficult=difficult or ('negative' if is_training else 'ignore'), **options)


def _list(
        name: str, root: Root, split: str, is_training: bool, annotations: Root, images: Root = None, **options: Any,
) -> MultiLabelReader:
    root = _need_folder(root, name)
    return ReaderList(_find_folder(root, images, root), _find_file(root, annotations), **options)


def _hfds(
        name: str, root: Root, split: str, is_training: bool, input_key: Optional[str] = None,
        target_key: Optional[str] = None, **options: Any,
) -> MultiLabelReader:
    return ReaderHfdsMultiLabel(name.partition('/')[2], root, split, input_key, target_key, **options)


def _wds(
        name: str, root: Root, split: str, is_training: bool, target_key: Optional[str] = None, **options: Any,
) -> MultiLabelReader:
    return ReaderWds(_need_folder(root, name), name.partition('/')[2], split, label_key=target_key, **options)


_READERS: dict[str, Callable[..., MultiLabelReader]] = {
    'coco': _coco,
    'coco/2014': _coco,
    'coco/2017': _coco,
    'csv': _csv,
    'json': _json,
    'shapes': _shapes,
    'voc/2007': _voc,
    'voc/2012': _voc,
}
_OPTIONS: dict[Callable[..., MultiLabelReader], tuple[str, ...]] = {
    _shapes: ('shapes_seed',),
    _coco: ('annotations', 'images', 'class_order', 'keep_unlabelled', 'images_must_exist'),
    _voc: ('images', 'difficult', 'images_must_exist'),
    _json: ('annotations', 'images', 'class_names', 'input_key', 'target_key', 'difficult', 'images_must_exist'),
    _csv: (
        'annotations', 'images', 'class_names', 'image_column', 'label_column', 'split_column',
        'label_delimiter', 'empty_cells', 'images_must_exist'),
    _list: ('annotations', 'images', 'class_names', 'num_classes', 'images_must_exist'),
    _hfds: ('input_key', 'target_key', 'class_names'),
    _wds: ('target_key', 'class_names', 'shuffle_size', 'num_samples', 'drop_unknown_classes'),
}
# Options of timm's function that these readers do not need: the loader shuffles, and 0 and False are off
_TIMM_OPTIONS = ('batch_size', 'seed')
_TIMM_SWITCHES = ('repeats', 'trust_remote_code')


def dataset_names() -> list[str]:
    """Names that `create_dataset` accepts; those that end in / are prefixes."""
    return sorted(_READERS) + sorted(filter(None, _TIMM_FOLDERS)) + sorted(_TIMM_PREFIXES)


def check_dataset_name(name: str) -> None:
    """Raise an error for a name that `create_dataset` does not accept."""
    if name not in _READERS and name.lower() not in _TIMM_FOLDERS and not name.lower().startswith(_TIMM_PREFIXES):
        raise UsageError(f"Unknown data set '{name}'. Known ones: {', '.join(dataset_names())}.")


def create_dataset(
        name: str,
        root: Root = None,
        split: str = 'train',
        *,
        is_training: Optional[bool] = None,
        download: bool = False,
        class_map: Union[str, dict[str, int], None] = None,
        class_names: Optional[Sequence[str]] = None,
        drop_unknown_classes: bool = False,
        keep_labels: Optional[str] = None,
        keep_labels_seed: int = 0,
        images_must_exist: bool = True,
        skip_missing_images: bool = False,
        transform: Optional[Callable[[Any], Any]] = None,
        target_transform: Optional[Callable[[torch.Tensor], Any]] = None,
        input_img_mode: str = 'RGB',
        **kwargs: Any,
) -> torch.utils.data.Dataset:
    """ Create a data set by its name.

    It accepts the calls of timm's train and validate scripts unchanged. Options that are None are left to the data
    set; an option that it does not have raises an error.

    Args:
        name: 'shapes' (generated on first use), 'coco/2014', 'coco/2017', 'coco', 'voc/2007', 'voc/2012', 'csv',
            'json', 'folder' with `annotations`, 'hfds/...', 'wds/...', or any name that timm's function accepts.
        root: Folder of the data set; None is the user's cache for 'shapes'.
        split: Split, by the data set's own name or timm's ('train', 'validation').
        is_training: Whether the split is a training split; None decides by its name.
        download: Download the data set if it is missing (COCO, VOC, and what timm can download).
        class_map: File that lists the classes, or a dict of their indices.
        class_names: Names of the classes, instead of a file.
        drop_unknown_classes: Drop labels of classes that are not listed, instead of raising an error.
        keep_labels: Hide labels of a training split: '75', '40', 'single' or a probability, see `keep_labels`.
        keep_labels_seed: Seed of the hidden labels.
        images_must_exist: Raise an error for listed images that are missing.
        skip_missing_images: Leave them out instead, with one line in the log.
        transform: Applied to each image.
        target_transform: Applied to each target.
        input_img_mode: PIL mode that images are converted to.
        **kwargs: Options of the data set: `annotations` (coco, csv, json, folder), `images`, the folder of the
            images (coco, csv, json, folder, voc), `class_order` and `keep_unlabelled` (coco), `difficult` (voc, json),
            `image_column`, `label_column`, `split_column`, `label_delimiter` and `empty_cells` (csv), `num_classes`
            (folder), `input_key` (hfds, json), `target_key` (hfds, json, wds), `shuffle_size` and `num_samples` (wds),
            `shapes_seed` (shapes). `batch_size`, `seed`, `repeats` and `trust_remote_code` are timm's.

    Returns:
        A data set with multi-hot float targets, `class_names` and `num_classes`, or timm's data set.
    """
    is_training = is_training_split(split) if is_training is None else is_training
    kwargs = {key: value for key, value in kwargs.items() if value is not None}
    class_map = class_map or None
    if class_names is None and class_map is not None:
        class_names = read_class_map(class_map, root)
    if keep_labels is not None and not is_training:
        raise UsageError(f"keep_labels is for training splits, but got split '{split}'.")
    if download and name in _READERS:
        check_download(name, split, kwargs.get('annotations'))
    common = {'transform': transform, 'target_transform': target_transform, 'input_img_mode': input_img_mode}

    factory = _find_reader(name, root, split, class_names, kwargs)
    if factory is None:
        if keep_labels is not None:
            raise UsageError(f"keep_labels is for multi-label data sets, but got '{name}'.")
        if 'images' in kwargs:
            raise UsageError(f"--train-images and --val-images are for data sets with label files, but got '{name}'.")
        file = getattr(class_names, 'file', None)
        return _timm_dataset(
            name, root, split, is_training, download, str(file) if file else class_map, common, kwargs)

    options = {key: value for key, value in kwargs.items() if key not in _TIMM_OPTIONS}
    options = {key: value for key, value in options.items() if value or key not in _TIMM_SWITCHES}
    _check_options(name, factory, options)
    if 'images_must_exist' in _OPTIONS[factory]:
        options['images_must_exist'] = images_must_exist and not skip_missing_images
    create = partial(factory, name, root, split, is_training, **options)
    if class_names is not None:
        create = partial(_create_with_classes, create, _OPTIONS[factory], class_names, drop_unknown_classes)
    try:
        reader = create()
    except UsageError:
        if not download:
            raise
        if root is None:
            raise UsageError(f"Set the folder to download '{name}' to (--data-dir).") from None
        download_dataset(name, root)
        reader = create()
    if skip_missing_images and 'images_must_exist' in _OPTIONS[factory]:
        reader = without_missing_images(reader)
    if not len(reader):
        raise UsageError(f"Split '{split}' of data set '{name}' in {reader.root} has no images.")
    if keep_labels is not None:
        reader.targets = hide_labels(reader.targets, keep_labels, keep_labels_seed)
    if not isinstance(reader, ReaderWds):  # it would have to read every shard
        _warn_about_absent_classes(reader, split)
    return MultiLabelDataset(reader, **common)


def has_multi_label_reader(
        name: str,
        root: Root = None,
        split: str = 'train',
        class_map: Union[str, dict[str, int], None] = None,
        **kwargs: Any,
) -> bool:
    """Whether `create_dataset` returns multi-hot targets for these arguments; it reads no labels to find out."""
    kwargs = {key: value for key, value in kwargs.items() if value is not None}
    class_names = read_class_map(class_map, root) if class_map and name.startswith('wds/') else None
    return _find_reader(name, root, split, class_names, kwargs) is not None


def check_download(name: str, split: str, annotations: Root = None) -> None:
    """Raise an error for what no download could provide: another data set, or a split that it does not have."""
    if name not in ARCHIVES:
        raise UsageError(f"Data set '{name}' cannot be downloaded; those that can: {', '.join(ARCHIVES)}.")
    year = name.partition('/')[2]
    own = own_split(split.removesuffix(year)) if name.startswith('coco/') else voc_split(split, year)
    if annotations is None:
        choose_archives(name, [own])


def _check_options(name: str, factory: Callable[..., MultiLabelReader], options: dict[str, Any]) -> None:
    unknown = [key for key in options if key not in _OPTIONS[factory]]
    if unknown:
        hidden = ('images_must_exist', 'drop_unknown_classes')
        known = ', '.join(key for key in _OPTIONS[factory] if key not in hidden)
        raise UsageError(f"Data set '{name}' has no option {', '.join(unknown)}. Its options: {known}.")


def _create_with_classes(
        create: Callable[..., MultiLabelReader],
        known_options: Sequence[str],
        class_names: Sequence[str],
        drop_unknown: bool,
) -> MultiLabelReader:
    """ Create a reader with given classes.

    A reader without such an option, and a file that lacks some of the classes or has labels to drop, is read with the
    classes of its own first.
    """
    refusal = None
    if 'class_names' in known_options:
        extra = {'drop_unknown_classes': drop_unknown} if 'drop_unknown_classes' in known_options else {}
        try:
            return create(class_names=class_names, **extra)
        except UsageError as error:
            refusal = error
    try:
        reader = create()
    except UsageError as error:
        raise refusal or error from None
    where = str(reader.labels_file or reader.root)
    try:
        align_classes(MultiLabelDataset(reader), class_names, where, source_of(class_names), drop_unknown)
    except UsageError:
        if refusal is None or drop_unknown:
            raise
        raise UsageError(
            f'{refusal} Correct the label, list it as a class for --class-map, or drop the labels of other classes '
            'with --drop-unknown-classes.') from None
    return reader


def check_has_positives(dataset: torch.utils.data.Dataset, split: str) -> None:
    """Raise an error if no image of a multi-label data set has any label: nothing could be learned or measured."""
    if not isinstance(dataset, MultiLabelDataset) or dataset.reader.has_positives():
        return
    reader = dataset.reader
    what = 'unknown' if (reader.targets == -1).all() else 'negative or unknown'
    raise UsageError(
        f"All labels of the {len(reader):,} images of split '{split}' in {reader.labels_file or reader.root} are "
        f'{what}. Check the labels, and that this is the right split.')


def _find_reader(
        name: str,
        root: Root,
        split: str,
        class_names: Optional[Sequence[str]],
        kwargs: dict[str, Any],
) -> Optional[Callable[..., MultiLabelReader]]:
    """Factory of the data set's reader; None leaves the data set to timm."""
    if name in _READERS:
        return _READERS[name]
    if name.lower() in _TIMM_FOLDERS and 'annotations' in kwargs:
        return _list
    if name.startswith('hfds/'):
        dataset = load_hfds(name.partition('/')[2], root, split)
        return _hfds if hfds_is_multi_label(dataset, kwargs.get('target_key')) else None
    if name.startswith('wds/') and (class_names or _lists_classes(root, name[4:])):
        return _wds
    return None


def _lists_classes(root: Root, name: str) -> bool:
    return root is not None and any((Path(root) / folder / 'classes.txt').is_file() for folder in ('', name))


def _find_file(root: Path, file: Union[str, Path]) -> Path:
    """Path of a label file that is given as it is, or relative to the folder of the data set."""
    for candidate in (Path(file), root / file, root / 'annotations' / file):
        if candidate.is_file():
            return candidate
    places = '' if Path(file).is_absolute() else f', neither in {Path.cwd()} nor in {root.absolute()}'
    raise UsageError(f'Annotation file {file} does not exist{places}.')


def _find_folder(root: Path, images: Root, default: Path) -> Path:
    """Folder of the images: the given one, in the folder of the data set or in the current one, or the default."""
    if images is None:
        return default
    found = next((folder for folder in (root / images, Path(images)) if folder.is_dir()), None)
    if found is None:
        places = '' if Path(images).is_absolute() else f', neither in {root.absolute()} nor in {Path.cwd()}'
        raise UsageError(f'The folder of images {images} (--train-images, --val-images) does not exist{places}.')
    return found


def _warn_about_absent_classes(reader: MultiLabelReader, split: str) -> None:
    present = (reader.targets == 1).any(dim=0).tolist()
    absent = [name for name, there in zip(reader.class_names, present) if not there]
    if absent:
        _logger.warning(f"No image of split '{split}' has: {', '.join(map(printable, absent))}.")


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
    check_dataset_name(name)
    if name.lower() in _TIMM_FOLDERS:
        _need_folder(root, name)
    try:
        dataset = timm.data.create_dataset(
            name, root=None if root is None else str(root), split=split, is_training=is_training, download=download,
            class_map=class_map, **common, **kwargs)
    except (AssertionError, ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        multi_label = ' For several labels per image, write classes.txt or set --class-map.'
        hint = multi_label if name.startswith('wds/') else ''
        raise UsageError(f"Cannot open data set '{name}' in {root}: {str(error) or repr(error)}.{hint}") from error
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
