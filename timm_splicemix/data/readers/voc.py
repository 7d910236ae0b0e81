""" PASCAL VOC 2007 and 2012 """
import os
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Optional, Sequence, Union

import torch

from ...errors import UsageError
from ...files import open_regular, read_text
from ..splits import TRAIN, VALIDATION
from .base import MultiLabelReader, check_files_exist, check_unique, class_index, image_paths

VOC_CLASSES = (
    'aeroplane', 'bicycle', 'bird', 'boat', 'bottle', 'bus', 'car', 'cat', 'chair', 'cow', 'diningtable', 'dog',
    'horse', 'motorbike', 'person', 'pottedplant', 'sheep', 'sofa', 'train', 'tvmonitor')
DIFFICULT = {'ignore': -1, 'positive': 1, 'negative': 0}  # target of each policy
_TRAIN_AND_VALIDATION = {'2007': ('trainval', 'test'), '2012': ('train', 'val')}


def voc_split(split: str, year: str) -> str:
    """ VOC's own name of a split.

    timm's 'train' (and 'training') is trainval in VOC 2007 (5,011 images, tested on 4,952) and train in VOC 2012.
    'validation', 'eval' and 'evaluation' are test in 2007 and val in 2012. 'train-only' is VOC's own train. All other
    names (trainval, val, test) are VOC's own, so 'val' is VOC's val in 2007 too.
    """
    _check_year(year)
    train, validation = _TRAIN_AND_VALIDATION[year]
    if split == 'train-only':
        return 'train'
    if split in TRAIN:
        return train
    return validation if split in VALIDATION and split != 'val' else split


class ReaderVoc(MultiLabelReader):
    """ Images of a split of VOC, with labels from the class files in ImageSets/Main or the XML files in Annotations.

    A class is difficult in an image if all its objects there are difficult.

    Args:
        root: VOC2007 (or VOC2012), VOCdevkit, or the folder that contains VOCdevkit.
        year: '2007' or '2012'.
        split: VOC's own name (train, val, trainval or test); `voc_split` gives it for timm's names.
        difficult: Target of difficult classes: 'negative' 0, 'positive' 1, 'ignore' -1.
        images: Folder of the images, by default JPEGImages.
        images_must_exist: Raise an error for listed images that are missing.
    """

    def __init__(
            self,
            root: Union[str, Path],
            year: str,
            split: str,
            difficult: str = 'negative',
            images: Union[str, Path, None] = None,
            images_must_exist: bool = True,
    ):
        _check_year(year)
        if difficult not in DIFFICULT:
            raise UsageError(f"Expected difficult to be one of {', '.join(DIFFICULT)}, but got '{difficult}'.")
        folder = _find_folder(Path(root), year)
        main = folder / 'ImageSets' / 'Main'
        splits = _splits(main)
        if split not in splits:
            raise UsageError(f"VOC {year} in {main} has no split '{split}'. Its splits: {', '.join(splits) or 'none'}.")

        list_file = main / f'{split}.txt'
        image_ids = _read_image_ids(list_file) if list_file.is_file() else None
        self.source = 'class files' if all(file.is_file() for file in _class_files(main, split)) else 'xml'
        if self.source == 'class files':
            image_ids, labels = _read_class_files(main, split, image_ids)
        images = folder / 'JPEGImages' if images is None else images
        paths = image_paths(images, [f'{image_id}.jpg' for image_id in image_ids], str(list_file))
        check_unique(paths, str(list_file))
        if self.source == 'xml':
            labels = _read_xml(folder / 'Annotations', image_ids)
        if images_must_exist:
            check_files_exist(paths, f'split {split} in {main}', images)
        targets = (labels == 1).to(torch.int8)
        targets[labels == 0] = DIFFICULT[difficult]
        super().__init__(paths, targets, VOC_CLASSES, root=images)
        self.labels_file = main if self.source == 'class files' else folder / 'Annotations'
        self.split = split
        self.image_ids = image_ids
        self.difficult = labels == 0  # (N, classes)

    def select_classes(self, columns: Sequence[int], class_names: Sequence[str]) -> None:
        super().select_classes(columns, class_names)
        absent = self.difficult.new_zeros(len(self), 1)
        self.difficult = torch.cat([self.difficult, absent], dim=1)[:, list(columns)]


def _check_year(year: str) -> None:
    if year not in _TRAIN_AND_VALIDATION:
        raise UsageError(f"Expected the year of VOC to be '2007' or '2012', but got {year!r}.")


def _find_folder(root: Path, year: str) -> Path:
    name = f'VOC{year}'
    places = [root / 'VOCdevkit' / name, root / name]
    if os.path.basename(os.path.abspath(root)) == name:
        places.append(root)
    for place in places:
        if (place / 'ImageSets' / 'Main').is_dir():
            return place
    looked = ', '.join(str(place) for place in places)
    raise UsageError(f'{root} has no {name} with ImageSets/Main. Searched: {looked}.')


def _class_files(main: Path, split: str) -> list[Path]:
    return [main / f'{name}_{split}.txt' for name in VOC_CLASSES]


def _splits(main: Path) -> list[str]:
    """Splits with a list of images or all class files; train_val.txt is class train in split val."""
    stems = [file.stem for file in main.glob('*.txt')]
    parts = [stem.partition('_') for stem in stems]
    listed = {stem for stem, (name, _, split) in zip(stems, parts) if not (split and name in VOC_CLASSES)}
    labelled = {split for name, _, split in parts if split and name in VOC_CLASSES}
    return sorted(listed | {split for split in labelled if all(file.is_file() for file in _class_files(main, split))})


def _read_fields(file: Path, number: int, form: str) -> list[list[str]]:
    """Fields of each line, `number` of them."""
    rows = []
    for line, text in enumerate(read_text(file).splitlines(), start=1):
        fields = text.split()
        if fields and (len(fields) != number or (number == 2 and fields[1] not in ('-1', '0', '1'))):
            raise UsageError(f"Expected a line of the form '{form}' in {file}:{line}, but got '{text}'.")
        if fields:
            rows.append(fields)
    if not rows:
        raise UsageError(f"Expected lines of the form '{form}' in {file}, but it is empty.")
    return rows


def _read_image_ids(file: Path) -> list[str]:
    return [image_id for image_id, in _read_fields(file, 1, '000012')]


def _read_class_files(main: Path, split: str, image_ids: Optional[list[str]]) -> tuple[list[str], torch.Tensor]:
    """Image ids, and (N, 20) int8: 1 present, 0 difficult, -1 absent."""
    columns = []
    first = main / f'{split}.txt'
    for file in _class_files(main, split):
        rows = _read_fields(file, 2, '000012 -1')
        if image_ids is None:
            first, image_ids = file, [image_id for image_id, _ in rows]
        check_unique([image_id for image_id, _ in rows], str(file))
        labels = dict(rows)
        different = sorted(labels.keys() ^ set(image_ids))
        if different:
            raise UsageError(
                f'{first} and {file} list different images: {len(different)} are in one of them only, such as '
                f'{different[0]}. Unpack VOC again.')
        columns.append([int(labels[image_id]) for image_id in image_ids])
    return image_ids, torch.tensor(columns, dtype=torch.int8).T.contiguous()


def _read_xml(annotations: Path, image_ids: list[str]) -> torch.Tensor:
    """(N, 20) int8: 1 present, 0 difficult, -1 absent."""
    class_to_idx = {name: index for index, name in enumerate(VOC_CLASSES)}
    labels = torch.full((len(image_ids), len(VOC_CLASSES)), -1, dtype=torch.int8)
    for row, image_id in enumerate(image_ids):
        file = annotations / f'{image_id}.xml'
        for name, difficult in _read_objects(file):
            column = class_index(name, class_to_idx, str(file))
            labels[row, column] = max(int(labels[row, column]), 0 if difficult else 1)
    return labels


def _read_objects(file: Path) -> list[tuple[str, bool]]:
    """Class of each object of an image, and whether the object is difficult."""
    if not os.path.isfile(file):  # Path.is_file raises an error for long names
        raise UsageError(f'No labels: there are neither all class files in ImageSets/Main nor {file}.')
    try:
        with open_regular(file) as stream:
            annotation = ET.parse(stream).getroot()
    except (ET.ParseError, LookupError, OSError, ValueError) as error:  # LookupError, ValueError: unknown encodings
        raise UsageError(f'Cannot read {file} as XML: {error}.') from error
    if annotation.tag != 'annotation':
        raise UsageError(f'Expected an <annotation> in {file}, but got <{annotation.tag}>.')
    objects = []
    for item in annotation.findall('object'):
        name = (item.findtext('name') or '').strip()
        difficult = item.findtext('difficult', default='0').strip()
        if not name or difficult not in ('0', '1'):
            raise UsageError(
                f"Expected objects with a <name> and a <difficult> of 0 or 1 in {file}, but got '{name}' and "
                f"'{difficult}'.")
        objects.append((name, difficult == '1'))
    return objects
