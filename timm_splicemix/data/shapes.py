""" The shapes data set: rendered scenes of everyday icons in COCO format, generated in seconds

In the splits 'train' and 'val', pairs of classes mostly occur together; in 'val_unbiased' they do not. The drop of a
metric from 'val' to 'val_unbiased' shows how much a model relies on co-occurrence.

Files depend on the seed alone, up to the versions of numpy and Pillow. A data set is generated in a temporary folder
and moved to its place in one step, so that it is complete or does not exist.
"""
import json
import os
import platform
import re
import shutil
import time
import zlib
from pathlib import Path
from typing import Any, Optional, Union

import numpy as np
from filelock import FileLock
from tqdm import tqdm

from ..errors import UsageError
from ..files import read_text, write_text
from .shapes_scene import CLASS_NAMES, draw_scene

GENERATOR_VERSION = 1  # raise it whenever the same seed gives other files
SPLITS = {'train': 2000, 'val': 500, 'val_unbiased': 500}  # images
BIASED_SPLITS = ('train', 'val')
RECEIPT = 'shapes.json'
_MAX_IMAGES = 1_000_000  # per split; ids start at multiples of it, so that they do not depend on other splits
_STALE_AFTER = 60.  # seconds without a new image; a generator writes hundreds per second


def generate_shapes(
        root: Union[str, os.PathLike],
        seed: int = 0,
        images: Optional[dict[str, int]] = None,
        progress: bool = True,
) -> Path:
    """ Generate the shapes data set, unless it exists.

    If several processes ask for the same folder at once, one generates and the others wait for it. An image depends on
    the seed, its split and its index only, so a smaller data set has the first images of a larger one.

    Args:
        root: Folder of the data set; it must be missing, empty or contain the same data set.
        seed: Random seed.
        images: Number of images per split to generate, by default `SPLITS`.
        progress: Show a progress bar, on a terminal.

    Returns:
        The folder, with the images in <split>/ and their annotations in annotations/instances_<split>.json.
    """
    receipt = _make_receipt(seed, SPLITS if images is None else images)
    folder = Path(root).resolve()  # keeps a link to an empty folder
    if _holds(folder, receipt):
        return Path(root)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / f'.{folder.name}.lock'):
            if not _holds(folder, receipt):
                _remove_leftovers(folder)
                _generate(folder, receipt, progress)
    except OSError as error:
        raise UsageError(f'Cannot write the shapes data set to {folder}: {error}') from error
    return Path(root)


def _make_receipt(seed: int, images: dict[str, int]) -> dict[str, Any]:
    """Parameters of a data set, which determine its files."""
    if not _is_int(seed) or seed < 0:
        raise UsageError(f'Expected seed to be an integer of at least 0, but got {seed!r}.')
    unknown = [split for split in images if split not in SPLITS]
    if unknown or not images:
        raise UsageError(
            f'Expected images for splits among {", ".join(SPLITS)}, but got '
            f'{", ".join(map(str, unknown)) or "none"}.')
    for split, count in images.items():
        if not _is_int(count) or not 1 <= count <= _MAX_IMAGES:
            raise UsageError(f"Expected 1 to {_MAX_IMAGES} images for the split '{split}', but got {count!r}.")
    return {'generator': GENERATOR_VERSION, 'seed': seed, 'images': dict(images)}


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _holds(folder: Path, receipt: dict[str, Any]) -> bool:
    """Whether the folder contains the data set; False if it is missing or empty, an error if it has something else."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        names = None
    if names == []:
        return False
    if names is None or RECEIPT not in names:
        raise UsageError(
            f'Expected {folder} to be missing, empty or a shapes data set, '
            f'but got {"a file" if names is None else "a folder with other files"}. Choose another folder.')
    text = read_text(folder / RECEIPT)
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        found = text
    if found != receipt:
        raise UsageError(
            f'Expected the shapes data set {_dumps(receipt)} in {folder}, but got {_dumps(found)}. '
            'Choose another folder, or delete this one to generate it again.')
    return True


def _temporary_folder(folder: Path) -> Path:
    """A place beside the folder: a folder moves in one step only within a file system."""
    return folder.with_name(f'.{folder.name}.{_machine()}-{os.getpid()}.tmp')


def _machine() -> str:
    return f'{zlib.crc32(platform.node().encode()):08x}'


def _remove_leftovers(folder: Path) -> None:
    """ Remove temporary folders of killed processes.

    The process that holds the lock is the only one that generates, except on a shared file system whose locks do not
    work across machines: folders of other machines are kept as long as they grow.
    """
    name = re.compile(rf'\.{re.escape(folder.name)}\.([0-9a-f]{{8}})-\d+\.tmp')
    for path in list(folder.parent.iterdir()):
        match = name.fullmatch(path.name)
        if match and (match[1] == _machine() or time.time() - _last_change(path) > _STALE_AFTER):
            shutil.rmtree(path, ignore_errors=True)


def _last_change(path: Path) -> float:
    try:
        return max(part.stat().st_mtime for part in (path, *path.iterdir()))
    except FileNotFoundError:  # it was just moved to its place
        return time.time()


def _generate(folder: Path, receipt: dict[str, Any], progress: bool) -> None:
    temporary = _temporary_folder(folder)
    try:
        temporary.mkdir()
        _write(temporary, receipt, progress)
        try:
            if folder.exists():
                folder.rmdir()  # empty; Windows would not replace it
            os.replace(temporary, folder)
        except OSError:
            if not _holds(folder, receipt):  # another machine may have been faster
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(folder: Path, receipt: dict[str, Any], progress: bool) -> None:
    (folder / 'annotations').mkdir()
    total = sum(receipt['images'].values())
    with tqdm(total=total, desc='Generating shapes', unit='img', disable=None if progress else True) as bar:
        for split, count in receipt['images'].items():
            _write_split(folder, split, count, receipt['seed'], bar)
    write_text(_dumps(receipt) + '\n', folder / RECEIPT)


def _write_split(folder: Path, split: str, count: int, seed: int, bar: tqdm) -> None:
    (folder / split).mkdir()
    split_index = list(SPLITS).index(split)
    images, annotations = [], []
    for index in range(count):
        rng = np.random.default_rng([seed, split_index, index])
        scene, objects = draw_scene(rng, biased=split in BIASED_SPLITS)
        image_id = split_index * _MAX_IMAGES + index + 1
        file_name = f'{split}_{index:06d}.jpg'
        scene.save(folder / split / file_name, quality=90)
        images.append({'id': image_id, 'file_name': file_name, 'width': scene.width, 'height': scene.height})
        annotations += [{
            'id': 10 * image_id + number,  # a scene has fewer than 10 objects
            'image_id': image_id,
            'category_id': shape.category + 1,
            'bbox': list(shape.box),
            'area': shape.area,
            'iscrowd': 0,
        } for number, shape in enumerate(objects)]
        bar.update()
    coco = {
        'info': {'description': f'shapes, {split}', 'version': str(GENERATOR_VERSION)},
        'licenses': [],
        'images': images,
        'annotations': annotations,
        'categories': [{'id': i, 'name': name, 'supercategory': 'shape'} for i, name in enumerate(CLASS_NAMES, 1)],
    }
    write_text(_dumps(coco) + '\n', folder / 'annotations' / f'instances_{split}.json')


def _dumps(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
