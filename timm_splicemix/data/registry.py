""" Data sets by name: the multi-label ones here, and every one that timm knows """
import os
from pathlib import Path
from typing import Any, Callable, Optional, Union

import timm.data
import torch.utils.data

from .coco import ReaderCoco
from .dataset import MultiLabelDataset, StrictImageDataset
from .shapes import generate_shapes

_TIMM_NAMES = ('', 'folder', 'image_folder', 'tar')
_TIMM_PREFIXES = ('torch/', 'hfds/', 'hfids/', 'tfds/', 'wds/')
_VALIDATION = ('val', 'validation', 'eval', 'evaluation')


def _create_shapes(root: Optional[Union[str, Path]], split: str, *, seed: int = 0, **kwargs: Any) -> MultiLabelDataset:
    """The embedded data set, generated on first use."""
    if root is None:
        cache = Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache')
        root = cache / 'timm_splicemix' / 'shapes'
    split = 'val' if split in _VALIDATION else split
    if split not in ('train', 'val', 'val_unbiased'):
        raise ValueError(f"Expected a split of shapes (train, val or val_unbiased), but got '{split}'.")
    root = generate_shapes(root, seed=seed)
    return MultiLabelDataset(ReaderCoco(root / split, root / 'annotations' / f'instances_{split}.json'), **kwargs)


_FACTORIES: dict[str, Callable[..., MultiLabelDataset]] = {
    'shapes': _create_shapes,
}


def dataset_names() -> list[str]:
    """The names that `create_dataset` knows; those that end in / want a name behind it."""
    return sorted(_FACTORIES) + sorted(filter(None, _TIMM_NAMES)) + sorted(_TIMM_PREFIXES)


def _strict(dataset: timm.data.ImageDataset) -> StrictImageDataset:
    """The same data set with errors instead of substitutes."""
    return StrictImageDataset(
        None,
        reader=dataset.reader,
        load_bytes=dataset.load_bytes,
        input_img_mode=dataset.input_img_mode,
        transform=dataset.transform,
        target_transform=dataset.target_transform,
        additional_features=dataset.additional_features,
    )


def create_dataset(
        name: str,
        root: Optional[Union[str, Path]] = None,
        split: str = 'train',
        **kwargs: Any,
) -> torch.utils.data.Dataset:
    """ Create a data set by its name.

    Args:
        name: 'shapes' (embedded, generated on first use), or any name that `timm.data.create_dataset` takes.
        root: Folder of the data set; None is the user's cache for 'shapes'.
        split: Split, by the data set's own name or timm's ('train', 'validation').
        **kwargs: `transform`, `target_transform`, `input_img_mode`, and what the data set itself takes (`seed` of
            'shapes').

    Returns:
        A data set with multi-hot float targets, `class_names` and `num_classes`, or what timm returns.
    """
    if name in _FACTORIES:
        return _FACTORIES[name](root, split, **kwargs)
    if name.lower() in _TIMM_NAMES and (root is None or not Path(root).exists()):
        raise ValueError(f"Expected the folder of data set '{name}', but got {root}, which does not exist.")
    if name.lower() in _TIMM_NAMES or name.lower().startswith(_TIMM_PREFIXES):
        dataset = timm.data.create_dataset(name, root=None if root is None else str(root), split=split, **kwargs)
        return _strict(dataset) if type(dataset) is timm.data.ImageDataset else dataset
    raise ValueError(f"Expected a data set among {', '.join(dataset_names())}, but got '{name}'.")
