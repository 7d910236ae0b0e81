""" Data sets in COCO's instance format """
import contextlib
import io
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any, Optional, Union

import torch
from pycocotools.coco import COCO

from ...errors import UsageError
from .base import MultiLabelReader, check_files_exist, check_unique

CLASS_ORDERS = ('id', 'name')


class ReaderCoco(MultiLabelReader):
    """ Images and the classes of their objects, from an `instances_*.json`. Crowds count as objects.

    Args:
        images: Folder of the images.
        annotations: The JSON file.
        class_order: Order of the classes, by category 'id' or by 'name'.
        keep_unlabelled: Keep images without objects.
        images_must_exist: Raise an error for listed images that are missing.
    """

    def __init__(
            self,
            images: Union[str, Path],
            annotations: Union[str, Path],
            class_order: str = 'id',
            keep_unlabelled: bool = False,
            images_must_exist: bool = True,
    ):
        if class_order not in CLASS_ORDERS:
            raise UsageError(f"Expected class_order to be {' or '.join(CLASS_ORDERS)}, but got '{class_order}'.")
        coco = _load(Path(annotations))
        _check_consistent(coco, annotations)
        names = {category: entry['name'] for category, entry in coco.cats.items()}
        categories = sorted(names, key=names.get if class_order == 'name' else None)
        class_of = {category: index for index, category in enumerate(categories)}
        image_ids = sorted(image_id for image_id in coco.imgs if keep_unlabelled or coco.imgToAnns[image_id])
        targets = torch.zeros(len(image_ids), len(categories), dtype=torch.int8)
        areas = []
        for row, image_id in enumerate(image_ids):
            for annotation in coco.imgToAnns[image_id]:
                column = class_of.get(annotation['category_id'])
                if column is None:
                    raise UsageError(
                        f"Annotation {annotation['id']} of {annotations} has category_id {annotation['category_id']}, "
                        f'which is none of its {len(categories)} categories.')
                targets[row, column] = 1
                areas.append((row, column, _area(annotation)))
        paths = [str(Path(images) / coco.imgs[image_id]['file_name']) for image_id in image_ids]
        check_unique(paths, str(annotations))
        if images_must_exist:
            check_files_exist(paths, str(annotations))
        super().__init__(paths, targets, [names[category] for category in categories], root=images)
        self.labels_file = annotations
        self.image_ids = image_ids
        self.object_areas = areas  # (row, class, area in pixels) of each object


def _load(annotations: Path) -> COCO:
    if not annotations.is_file():
        raise UsageError(f'Annotation file {annotations} does not exist.')
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints its progress
        try:
            coco = COCO(str(annotations))
        except (json.JSONDecodeError, UnicodeDecodeError, AssertionError, KeyError, TypeError) as error:
            raise UsageError(f'{annotations} is not in COCO format: {error!r}') from error
    for part in ('images', 'annotations', 'categories'):
        if part not in coco.dataset:
            raise UsageError(f"{annotations} is not in COCO format: '{part}' is missing.")
    return coco


def _check_consistent(coco: COCO, annotations: Union[str, Path]) -> None:
    """Raise errors for what pycocotools would ignore, losing images or labels."""
    for part, key in (('images', 'file_name'), ('categories', 'name')):
        entries = coco.dataset[part]
        lacking = next((entry for entry in entries if key not in entry), None)
        if lacking is not None:
            raise UsageError(f"An entry of '{part}' in {annotations} has no {key}: {lacking}.")
        counts = Counter(entry['id'] for entry in entries)
        double = next((number for number, count in counts.items() if count > 1), None)
        if double is not None:
            raise UsageError(f"Two entries of '{part}' in {annotations} have the id {double}.")
    lost = next((entry for entry in coco.dataset['annotations'] if entry['image_id'] not in coco.imgs), None)
    if lost is not None:
        raise UsageError(
            f"Annotation {lost['id']} of {annotations} is of image {lost['image_id']}, which the file does not list.")


def _area(annotation: dict[str, Any]) -> float:
    """Area of an object in pixels: as given, or that of its box, or NaN without a box."""
    if 'area' in annotation:
        return float(annotation['area'])
    _, _, width, height = annotation.get('bbox') or (math.nan,) * 4
    return float(width * height)


def find_coco(root: Union[str, Path], split: str, year: Optional[str]) -> tuple[Path, Path]:
    """Image folder and annotation file of a split; `year` is that of the official names, None for other data sets."""
    name = f'{split}{year or ""}'
    file = Path(root) / 'annotations' / f'instances_{name}.json'
    if not file.is_file():
        there = ', '.join(sorted(path.name for path in file.parent.glob('instances_*.json'))) or 'no such file'
        raise UsageError(f'{file} does not exist; found {there}. Set another split or annotation file.')
    return Path(root) / name, file


def find_images(root: Union[str, Path], annotations: Union[str, Path]) -> Path:
    """Image folder of an annotation file: the one of the same name, images/, or the root itself."""
    name = Path(annotations).stem.removeprefix('instances_')
    candidates = [Path(root) / name, Path(root) / 'images' / name, Path(root) / 'images', Path(root)]
    return next((candidate for candidate in candidates if candidate.is_dir()), Path(root))
