""" JSON files with a record for each image: lists of records, JSON Lines, and mmpretrain's format """
import json
import re
from pathlib import Path
from typing import Any, Iterable, NamedTuple, Optional, Sequence, Union

import numpy as np
import torch

from ...errors import UsageError
from ...files import read_text
from ..class_map import source_of
from ..splits import split_names
from .base import (
    MultiLabelReader,
    are_multi_hot,
    check_files_exist,
    class_index,
    complete_extensions,
    has_splits,
    image_paths,
    merge_duplicates,
)
from .find import find_label_file
from .table import IMAGE_COLUMNS, LABEL_COLUMNS, SPLIT_COLUMNS, plain_name
from .voc import DIFFICULT

_SUFFIXES = ('.json', '.jsonl', '.ndjson')
_MULTI_HOT_KEYS = ('multihot', 'onehot')
_LABEL_KEYS = (*LABEL_COLUMNS, 'gtlabel', 'gtlabels', 'target', 'targets', *_MULTI_HOT_KEYS)
_MULTI_HOT_SUFFIX = ':multi_hot'
_LISTS = ('data_list', 'data', 'samples', 'records', 'images', 'annotations', 'items')
_CLASSES = ('classes', 'CLASSES', 'class_names', 'categories')
_MOST_CLASSES = 10 ** 6  # of indices without names

Place = str  # file and record of labels, for errors


def find_json(root: Union[str, Path], split: str, may_lack_splits: bool = False) -> Path:
    """ Find the file of a split: its own (train.json, train/metadata.jsonl, ...), or the one of all splits.

    The records of the latter must have a key of splits: without it, training and validation would use the same images.
    With `may_lack_splits`, the file is divided later.
    """
    file, is_shared = find_label_file(root, split, _SUFFIXES)
    if is_shared and not may_lack_splits and not has_splits(_splits(_read(file)) or (), split):
        raise UsageError(
            f"The records of {file} have no key 'split' to find '{split}'. Write a file for each split (train.json, "
            'val.json), let train.py --val-fraction 0.2 split the images, or give the split.json of a run by '
            '--split-file.')
    return file


class ReaderJson(MultiLabelReader):
    """ Images and labels of a JSON file.

    The file is a list of records such as {"file_name": "a.jpg", "labels": ["cat", "dog"]}; or JSON Lines, one record
    per line; or an object with such a list, as mmpretrain writes it ({"metainfo": {"classes": [...]}, "data_list":
    [...]}), or that maps images to labels. Labels are names, indices, a multi-hot list of 1, 0 and -1, or an object
    {"cat": 1, "dog": 0}. Keys are recognised by their names.

    Args:
        root: Folder that the images are relative to; names without an extension get that of the existing file.
        file: The file.
        split: Records to keep if they have a key of splits; None keeps all.
        class_names: Name of each class; None is the list of classes in the file, or else all labels in it.
        image_key: Key of the image.
        label_key: Key of the labels; 'KEY:multi_hot' for a list of 0 and 1 that could be one of indices.
        difficult: Target of the labels in KEY_difficult: 'negative' 0, 'positive' 1, 'ignore' -1.
        images_must_exist: Raise an error for listed images that are missing.
    """

    def __init__(
            self,
            root: Union[str, Path],
            file: Union[str, Path],
            split: Optional[str] = None,
            class_names: Optional[Sequence[str]] = None,
            image_key: Optional[str] = None,
            label_key: Optional[str] = None,
            difficult: str = 'negative',
            images_must_exist: bool = True,
    ):
        if difficult not in DIFFICULT:
            raise UsageError(f"Expected difficult to be one of {', '.join(DIFFICULT)}, but got '{difficult}'.")
        content = _read(Path(file))
        image_key = content.find_key(image_key, IMAGE_COLUMNS, 'image', '--input-key')
        key = None if label_key is None else label_key.removesuffix(_MULTI_HOT_SUFFIX)
        multi_hot = key != label_key
        key = content.find_key(key, _LABEL_KEYS, 'labels', '--target-key')
        number = len(content.classes or class_names or ()) or None
        rows, number = _parse_labels(content, key, number, multi_hot or plain_name(key) in _MULTI_HOT_KEYS)
        uncertain = _parse_difficult(content, f'{key}_difficult')
        kept = _records_of_split(content, split)
        class_names, columns = _find_classes(content, [*rows, *uncertain], class_names, number)
        targets = np.zeros((len(kept), len(class_names)), np.int8)
        for values, target in ((uncertain, DIFFICULT[difficult]), (rows, None)):
            _fill(targets, [values[record] for record in kept] if values else [], columns, target)

        names = [content.image(record, image_key) for record in kept]
        paths = complete_extensions(image_paths(root, names, str(file)))
        paths, targets = merge_duplicates(paths, torch.from_numpy(targets), str(file))
        if images_must_exist:
            check_files_exist(paths, str(file), root)
        self.labels_file = file
        super().__init__(paths, targets, class_names, root=root)


class _Content(NamedTuple):
    """Records of a file, the line of each (0 if the file is no JSON Lines file), and the classes that it lists."""
    file: Path
    records: list[dict[str, Any]]
    lines: list[int]
    classes: Optional[list[str]] = None

    def where(self, record: int) -> Place:
        line = self.lines[record]
        return f'{self.file}:{line}' if line else f'record {record + 1} of {self.file}'

    def find_key(self, given: Optional[str], usual: Sequence[str], what: str, flag: str) -> str:
        """Key of the records; all of them must have it."""
        keys = dict.fromkeys(key for record in self.records for key in record)
        plain = {plain_name(key): key for key in reversed(keys)}
        key = given if given is not None else next((plain[name] for name in usual if name in plain), None)
        if key is None or key not in keys:
            missing = f"no key '{given}' ({flag})" if given is not None else f'no key of the {what}'
            hint = ''
            if flag == '--target-key' and given is None:
                hint = ', or write them under one key, such as "labels": ["cat"] or "labels": {"cat": 1, "dog": 0}'
            raise UsageError(
                f"The records of {self.file} have {missing}. Their keys: {', '.join(keys)!s:.200}. Set {flag}{hint}.")
        without = next((i for i, record in enumerate(self.records) if record.get(key) is None), None)
        if without is not None:
            hint = ' Write [] for an image without labels.' if flag == '--target-key' else ''
            raise UsageError(f"The key '{key}' is missing in {self.where(without)}.{hint}")
        return key

    def image(self, record: int, key: str) -> str:
        name = self.records[record][key]
        if type(name) is int and abs(name) < 10 ** 18:
            name = str(name)
        if not isinstance(name, str) or not name.strip():
            raise UsageError(
                f"Expected the name of an image as '{key}' in {self.where(record)}, but got {name!r:.200}.")
        return name.strip()


def _read(file: Path) -> _Content:
    text = read_text(file)
    if file.suffix.lower() != '.json':
        return _read_lines(file, text)
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == 'Extra data' and '\n' in text.strip():
            return _read_lines(file, text)
        raise UsageError(f'Expected JSON in {file}, but got: {error}') from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f'Expected JSON in {file}, but got: {error}') from error
    classes = None
    if isinstance(content, dict):
        found = _find_list(file, content)
        classes, content = _listed_classes(file, content), found
    return _check_records(_Content(file, content, [0] * len(content) if isinstance(content, list) else [], classes))


def _read_lines(file: Path, text: str) -> _Content:
    records, lines = [], []
    for line, part in enumerate(text.split('\n'), start=1):
        if part.strip():
            try:
                records.append(json.loads(part))
            except (ValueError, RecursionError) as error:
                raise UsageError(f'Expected JSON in {file}:{line}, but got: {error}') from error
            lines.append(line)
    return _check_records(_Content(file, records, lines))


def _check_records(content: _Content) -> _Content:
    if not isinstance(content.records, list) or not content.records:
        raise UsageError(
            f'Expected a list of records such as {{"image": "a.jpg", "labels": ["cat"]}} in {content.file}, but got '
            f'{content.records!r:.200}.')
    other = next((i for i, record in enumerate(content.records) if not isinstance(record, dict)), None)
    if other is not None:
        raise UsageError(
            f'Expected a record such as {{"image": "a.jpg", "labels": ["cat"]}} in {content.where(other)}, but got '
            f'{content.records[other]!r:.200}.')
    return content


def _find_list(file: Path, content: dict[str, Any]) -> Any:
    """The list of records in an object, or the records of an object that maps images to labels."""
    if all(isinstance(content.get(key), list) for key in ('images', 'annotations', 'categories')):
        raise UsageError(f'{file} is in COCO format. Read it with --dataset coco.')
    for key in _LISTS:
        if isinstance(content.get(key), list):
            return content[key]
    if content and all(has_splits([key], None) and _are_records(part) for key, part in content.items()):
        return [{**record, 'split': split} for split, records in content.items() for record in records]
    if content and all(isinstance(labels, (list, str, dict)) for labels in content.values()):
        return [{'image': image, 'labels': labels} for image, labels in content.items()]
    raise UsageError(
        f"Expected a list of records in {file}, or one with the key {_LISTS[0]}, but got an object with the keys "
        f"{', '.join(content)!s:.200}.")


def _are_records(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(record, dict) for record in value)


def _listed_classes(file: Path, content: dict[str, Any]) -> Optional[list[str]]:
    places = [part for part in (content.get('metainfo'), content) if isinstance(part, dict)]
    classes = next((part[key] for part in places for key in _CLASSES if part.get(key) is not None), None)
    is_mapping = not any(isinstance(content.get(key), list) for key in _LISTS)
    if classes is None or is_mapping:  # an image may have the name 'classes'
        return None
    if isinstance(classes, list):
        classes = [entry.get('name') if isinstance(entry, dict) else entry for entry in classes]
    if not isinstance(classes, list) or not classes or not all(isinstance(n, str) and n.strip() for n in classes):
        raise UsageError(f'Expected a list of names as the classes of {file}, but got {classes!r:.200}.')
    return classes


# Labels of a record: names or indices, each with its target. Multi-hot lists become indices.
Labels = list[tuple[Union[str, int], int]]


def _parse_labels(
        content: _Content,
        key: str,
        number: Optional[int],
        multi_hot: bool,
) -> tuple[list[Labels], int]:
    """ Parse the labels of all records.

    Args:
        content: The records.
        key: Their key of the labels.
        number: Number of classes, if it is known.
        multi_hot: Whether lists are multi-hot, as opposed to indices; otherwise they are if they cannot be indices.

    Returns:
        The labels of each record, and the least number of classes.
    """
    values = [record[key] for record in content.records]
    if number is None:
        _refuse_joined_labels(content, values)
    values = [[value] if type(value) in (str, int) else value for value in values]
    lists = [value for value in values if isinstance(value, list)]
    multi_hot = multi_hot or any(type(entry) in (bool, float) for value in lists for entry in value)
    multi_hot = multi_hot or (
        len(lists) == len(values) and all(type(entry) is int for value in lists for entry in value)
        and are_multi_hot(lists, number))
    if not multi_hot:
        return [_parse(value, content.where(i), None) for i, value in enumerate(values)], 0
    number = number or len(lists[0] if lists else ())
    return [_parse(value, content.where(i), number) for i, value in enumerate(values)], number


def _refuse_joined_labels(content: _Content, values: Sequence[Any]) -> None:
    """Raise an error for a text such as "cat, dog" if "cat" is a label too: it would be a class of its own."""
    single = {value.strip() for value in values if isinstance(value, str)}
    for record, value in enumerate(values):
        parts = re.split('[;|,]', value) if isinstance(value, str) else ()
        if len(parts) > 1 and any(part.strip() in single for part in parts):
            labels = json.dumps([part.strip() for part in parts], ensure_ascii=False)
            raise UsageError(
                f'Expected one label or a list of labels in {content.where(record)}, but got {value!r:.200}. Write '
                f'{labels!s:.200}, or set --class-map to a file that lists this name as a class.')


def _parse(value: Any, where: Place, multi_hot: Optional[int]) -> Labels:
    """ Parse the labels of a record.

    Args:
        value: The labels.
        where: Their place, for errors.
        multi_hot: Length of a multi-hot list; None if lists are names and indices.
    """
    if isinstance(value, dict):
        if not all(_is_target(target) for target in value.values()):
            raise UsageError(
                f'Expected 1 (present), 0 (absent) or -1 (unknown) for each class in {where}, but got {value!r:.200}. '
                'Write the list of the labels instead.')
        return [(name, int(target)) for name, target in value.items()]
    if multi_hot is not None:
        if not isinstance(value, list) or len(value) != multi_hot or not all(map(_is_target, value)):
            raise UsageError(
                f'Expected a list of {multi_hot} values among 0, 1 and -1 in {where}, but got {value!r:.200}.')
        return [(index, int(target)) for index, target in enumerate(value) if target != 0]
    if not isinstance(value, list):
        raise UsageError(f'Expected a list of labels in {where}, but got {value!r:.200}.')
    for label in value:
        is_name = isinstance(label, str) and label.strip()
        if not is_name and not (type(label) is int and 0 <= label < _MOST_CLASSES):
            raise UsageError(
                f'Expected names or indices of classes in {where}, but got {label!r:.200}. Write labels such as '
                '["cat", "dog"].')
    return [(label, 1) for label in value]


def _is_target(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) and value in (-1, 0, 1)


def _parse_difficult(content: _Content, key: str) -> list[Labels]:
    """Labels of difficult objects, [] if no record has any."""
    if not any(record.get(key) for record in content.records):
        return []
    return [_parse(record.get(key) or [], content.where(i), None) for i, record in enumerate(content.records)]


def _records_of_split(content: _Content, split: Optional[str]) -> list[int]:
    values = _splits(content)
    if values is None or split is None or not has_splits(values, split):
        return list(range(len(content.records)))
    values = [value.lower() for value in values]
    name = next((name for name in split_names(split.lower()) if name in values), None)
    if name is None:
        raise UsageError(f"{content.file} has no split '{split}'. Its splits: {', '.join(sorted(set(values)))}.")
    return [record for record, value in enumerate(values) if value == name]


def _splits(content: _Content) -> Optional[list[str]]:
    """Split of each record; None without a key of splits."""
    keys = {plain_name(key): key for key in content.records[0]}
    key = next((keys[name] for name in SPLIT_COLUMNS if name in keys), None)
    return None if key is None else [str(record.get(key, '')) for record in content.records]


def _find_classes(
        content: _Content,
        rows: Iterable[Labels],
        class_names: Optional[Sequence[str]],
        number: int,
) -> tuple[Sequence[str], dict[Union[str, int], int]]:
    """Names of the classes, and the column of each label."""
    labels: dict[Union[str, int], int] = {}  # and the first record that has it
    for record, row in enumerate(rows):
        for label, _ in row:
            labels.setdefault(label, record % len(content.records))
    own = content.classes
    texts, indices = ([label for label in labels if type(label) is kind] for kind in (str, int))
    if own is None and class_names is None and texts and indices:
        raise UsageError(
            f"Expected names or indices as labels of {content.file}, but got both, such as '{texts[0]:.80}' and "
            f'{indices[0]}. Set --class-map to the classes.')
    if own is None and class_names is None:
        own = sorted(texts) if texts else [str(index) for index in range(max([*indices, number - 1], default=-1) + 1)]
        if not own:
            raise UsageError(f'{content.file} has no labels. Set --class-map to the classes.')
    names = list(own if class_names is None else class_names)
    own = own or names  # indices refer to the file's own classes
    class_to_idx = {name: index for index, name in enumerate(names)}
    source = str(content.file) if class_names is None else source_of(class_names)
    columns = {}
    for label, record in labels.items():
        name = label
        if type(label) is int:
            if label >= len(own):
                raise UsageError(
                    f'Expected class indices 0 to {len(own) - 1} in {content.where(record)}, but got {label}.')
            name = own[label]
        columns[label] = class_index(name, class_to_idx, content.where(record), source)
    return names, columns


def _fill(
        targets: np.ndarray,
        rows: Sequence[Labels],
        columns: dict[Union[str, int], int],
        target: Optional[int],
) -> None:
    """Set the targets of all labels to `target`, None for their own."""
    entries = [(row, columns[label], own) for row, labels in enumerate(rows) for label, own in labels]
    if entries:
        where, places, own = np.array(entries).T
        targets[where, places] = own if target is None else target
