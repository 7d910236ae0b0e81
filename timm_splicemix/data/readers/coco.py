""" Data sets in COCO's instance format """
import contextlib
import json
import math
import re
from array import array
from collections import Counter
from collections.abc import Hashable
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional, Sequence, Union

import numpy as np
import torch

from ...errors import UsageError
from ...files import read_text
from ..cache import Arrays, cached_arrays
from .base import MultiLabelReader, check_classes, check_files_exist, check_unique, image_paths
from .find import find_beside_images, image_folder

CLASS_ORDERS = ('id', 'name')
OBJECT = np.dtype([('row', np.int32), ('column', np.int32), ('area', np.float64)])
_PARTS = ('images', 'annotations', 'categories')
_SPACE = re.compile(r'[ \t\n\r]*')
_ENDS = {'{': '}', '[': ']'}
_CACHE_VERSION = 2  # of `_to_arrays`


class ReaderCoco(MultiLabelReader):
    """ Images and the classes of their objects, from an `instances_*.json`. Crowds count as objects.

    The attribute `object_areas` has the row, column (class) and area in pixels of each object.

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
        content = _load(Path(annotations))
        objects = content.objects
        if class_order == 'name':
            order = sorted(range(len(content.class_names)), key=content.class_names.__getitem__)
            objects['column'] = np.argsort(order)[objects['column']]
            content = content._replace(class_names=[content.class_names[column] for column in order])
        kept = np.full(len(content.files), keep_unlabelled)
        kept[objects['row']] = True
        objects['row'] = (kept.cumsum() - 1)[objects['row']]
        targets = torch.zeros(int(kept.sum()), len(content.class_names), dtype=torch.int8)
        targets.numpy()[objects['row'], objects['column']] = 1
        files = [file for file, keep in zip(content.files, kept.tolist()) if keep]
        paths = image_paths(images, files, str(annotations))
        check_unique(paths, str(annotations))
        if images_must_exist:
            check_files_exist(paths, str(annotations), images)
        super().__init__(paths, targets, content.class_names, root=images)
        self.labels_file = annotations
        self.image_ids = [image_id for image_id, keep in zip(content.image_ids, kept.tolist()) if keep]
        self.object_areas = objects

    def select_classes(self, columns: Sequence[int], class_names: Sequence[str]) -> None:
        places = np.full(len(self.class_names), -1, np.int32)
        for place, column in enumerate(columns):
            if column >= 0:
                places[column] = place
        super().select_classes(columns, class_names)
        self.object_areas['column'] = places[self.object_areas['column']]
        self.object_areas = self.object_areas[self.object_areas['column'] >= 0]


class _Content(NamedTuple):
    """Images and classes in the order of their ids; objects (OBJECT) in the order of their images."""
    image_ids: list[Union[int, str]]
    files: list[str]
    class_names: list[str]
    objects: np.ndarray


def _load(file: Path) -> _Content:
    if not file.is_file():
        raise UsageError(f'Annotation file {file} does not exist.')
    arrays = cached_arrays(file, _CACHE_VERSION, lambda: _to_arrays(_parse(file)))
    return _Content(*json.loads(arrays['names'].tobytes()), arrays['objects'])


def _to_arrays(content: _Content) -> Arrays:
    names = json.dumps(content[:-1]).encode()
    return {'names': np.frombuffer(names, np.uint8), 'objects': content.objects}


def _parse(file: Path) -> _Content:
    """Parse a file; only what is needed of each entry is kept in memory."""
    annotations = _Annotations(file)
    images = _Entries(file, 'images', 'file_name')
    categories = _Categories(file)
    try:
        found = _parse_lists(read_text(file), dict(zip(_PARTS, (images.add, annotations.add, categories.add))))
    except UsageError:
        raise
    except RecursionError:
        raise UsageError(f'{file} is not in COCO format: it is nested too deeply.') from None
    except ValueError as error:
        raise UsageError(f'{file} is not in COCO format: {error}.') from error
    missing = next((part for part in _PARTS if part not in found), None)
    if missing is not None:
        raise UsageError(f"{file} is not in COCO format: '{missing}' is missing.")
    image_ids, files = images.sort()
    categories.drop_group(annotations.references['category_id'])
    category_ids, names = categories.sort()
    check_classes(names, file)
    rows = annotations.find('image_id', image_ids)
    columns = annotations.find('category_id', category_ids)
    objects = np.empty(len(rows), OBJECT)
    objects['row'], objects['column'], objects['area'] = rows, columns, annotations.areas
    return _Content(image_ids, files, names, objects[rows.argsort(kind='stable')])


def _parse_lists(text: str, add: dict[str, Callable[[Any], None]]) -> set[str]:
    """ Parse a JSON object and pass the entries of its lists on, one by one, so that they need not be kept.

    Args:
        text: The JSON.
        add: Functions that receive the entries of the lists with these names.

    Returns:
        The names of the lists that were found.
    """
    decode = json.JSONDecoder().raw_decode
    found = set()
    mark, place = _next(text, 0, '{')
    while mark != '}':
        name, place = decode(text, place)
        if not isinstance(name, str) or name in found:
            raise json.JSONDecodeError(f'Expecting another property name than {name!r:.80}', text, place)
        mark, place = _next(text, place, ':')
        if name not in add:
            _, place = decode(text, place)
        else:
            found.add(name)
            mark, place = _next(text, place, '[')
            while mark != ']':
                entry, place = decode(text, place)
                add[name](entry)
                mark, place = _next(text, place, ',]')
        mark, place = _next(text, place, ',}')
    if place < len(text):
        raise json.JSONDecodeError('Extra data', text, place)
    return found


def _next(text: str, place: int, marks: str) -> tuple[str, int]:
    """One of the marks, and the place of what follows; an empty object or list counts as its end."""
    place = _SPACE.match(text, place).end()
    mark = text[place:place + 1]
    if not mark or mark not in marks:
        raise json.JSONDecodeError(f"Expecting {' or '.join(marks)}", text, place)
    place = _SPACE.match(text, place + 1).end()
    if mark in '{[' and text[place:place + 1] == _ENDS[mark]:
        return _ENDS[mark], _SPACE.match(text, place + 1).end()
    return mark, place


class _Entries:
    """Ids of the images or categories of a file, and one text of each."""

    def __init__(self, file: Path, part: str, key: str):
        self.place = f"'{part}' in {file}"
        self.key = key
        self.ids: list[Union[int, str]] = []
        self.texts: list[str] = []

    def add(self, entry: Any) -> None:
        if not isinstance(entry, dict) or type(entry.get('id')) not in (int, str):
            raise UsageError(f'An entry of {self.place} has no id, a number or text: {entry!r:.200}.')
        text = entry.get(self.key)
        if not isinstance(text, str) or not text.strip():
            raise UsageError(f'An entry of {self.place} has no {self.key}, a text: {entry!r:.200}.')
        self.ids.append(entry['id'])
        self.texts.append(text)

    def sort(self) -> tuple[list[Union[int, str]], list[str]]:
        """Ids and texts in the order of the ids."""
        if len(set(map(type, self.ids))) > 1:
            raise UsageError(f'Expected ids of one type of {self.place}, but got both numbers and text.')
        if len(set(self.ids)) < len(self.ids):
            raise UsageError(f'Two entries of {self.place} have the id {Counter(self.ids).most_common(1)[0][0]}.')
        order = sorted(range(len(self.ids)), key=self.ids.__getitem__)
        return [self.ids[index] for index in order], [self.texts[index] for index in order]


class _Categories(_Entries):
    """Ids and names of the categories of a file, and the name of the group that each belongs to."""

    def __init__(self, file: Path):
        super().__init__(file, 'categories', 'name')
        self.groups: list[Any] = []

    def add(self, entry: Any) -> None:
        super().add(entry)
        self.groups.append(entry.get('supercategory'))

    def drop_group(self, used: list[Any]) -> None:
        """Drop the category without objects that Roboflow adds as the group of all others."""
        groups = [group for group in self.groups if group != 'none']
        if 'none' not in self.groups or not groups or any(group != groups[0] for group in groups):
            return
        place = self.groups.index('none')
        if self.texts[place] == groups[0] and len(groups) == len(self.groups) - 1 and self.ids[place] not in used:
            del self.ids[place], self.texts[place], self.groups[place]


class _Annotations:
    """Image, category and area of each object of a file."""

    def __init__(self, file: Path):
        self.file = file
        self.ids: list[Any] = []
        self.references: dict[str, list[Any]] = {'image_id': [], 'category_id': []}
        self.areas = array('d')

    def add(self, entry: Any) -> None:
        try:
            for key, values in self.references.items():
                values.append(entry[key])
        except (KeyError, TypeError):
            raise UsageError(f"An entry of 'annotations' in {self.file} has no {key}: {entry!r:.200}.") from None
        self.ids.append(entry.get('id'))
        try:
            self.areas.append(_area(entry))
        except (OverflowError, TypeError, ValueError):
            raise UsageError(
                f"Expected a number as the area of annotation {entry.get('id')!r:.80} of {self.file}, or a bbox of 4 "
                f"numbers, but got {entry.get('area', entry.get('bbox'))!r:.80}.") from None

    def find(self, key: str, ids: list[Union[int, str]]) -> np.ndarray:
        """Place of what each object refers to in a list of ids."""
        places = {number: place for place, number in enumerate(ids)}
        values = self.references[key]
        with contextlib.suppress(TypeError):  # unhashable
            found = np.array([places.get(value, -1) for value in values], dtype=np.int32)
            if not (found < 0).any():
                return found
        index, value = next((i, v) for i, v in enumerate(values) if not isinstance(v, Hashable) or v not in places)
        raise UsageError(
            f'Annotation {self.ids[index]!r:.80} of {self.file} has {key} {value!r:.80}, which the file does not list.')


def _area(annotation: dict[str, Any]) -> float:
    """Area of an object in pixels: as given, or that of its box, or NaN without a box."""
    if annotation.get('area') is not None:
        return float(annotation['area'])
    _, _, width, height = annotation.get('bbox') or (math.nan,) * 4
    return float(width) * float(height)


def find_coco(root: Union[str, Path], split: str, year: Optional[str]) -> tuple[Path, Path]:
    """Image folder and annotation file of a split; `year` is that of the official names, None for other data sets."""
    name = f'{split}{year or ""}'
    file = Path(root) / 'annotations' / f'instances_{name}.json'
    if file.is_file():
        return Path(root) / name, file
    beside = [] if year else find_beside_images(Path(root), split, ('.coco.json',))
    if not beside:
        there = ', '.join(sorted(path.name for path in file.parent.glob('instances_*.json'))) or 'no such file there'
        other = '' if year else f', nor does {split}/_annotations.coco.json'
        table = [] if year else find_beside_images(Path(root), split, ('_classes.csv',))
        hint = f' Read {table[0]} with --dataset csv.' if table else ''
        raise UsageError(
            f'{file.absolute()} does not exist{other}; found {there}. Set another split, or --train-ann and --val-ann '
            f'to the annotation files.{hint}')
    return beside[0].parent, beside[0]


def find_images(root: Union[str, Path], annotations: Union[str, Path]) -> Path:
    """Image folder of an annotation file: the one of the same name, images/, or the root itself."""
    beside = image_folder(root, annotations)
    if beside != Path(root):
        return beside
    name = Path(annotations).stem.removeprefix('instances_')
    candidates = [Path(root) / name, Path(root) / 'images' / name, Path(root) / 'images', Path(root)]
    return next((candidate for candidate in candidates if candidate.is_dir()), Path(root))
