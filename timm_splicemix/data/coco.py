""" Data sets in COCO's instance format """
import contextlib
import io
import json
from pathlib import Path
from typing import Union

import torch
from pycocotools.coco import COCO

from .reader import MultiLabelReader


class ReaderCoco(MultiLabelReader):
    """ Images that are listed, and labelled by the objects in them, in an `instances_*.json`.

    Classes are ordered by category id. Images without any object are left out; crowds count as objects.

    Args:
        images: Folder of the images.
        annotations: The JSON file.
    """

    def __init__(self, images: Union[str, Path], annotations: Union[str, Path]):
        coco = _load(Path(annotations))
        categories = sorted(coco.cats)
        class_of = {category: index for index, category in enumerate(categories)}
        labelled = sorted(image_id for image_id in coco.imgs if coco.imgToAnns[image_id])
        targets = torch.zeros(len(labelled), len(categories), dtype=torch.int8)
        areas = []
        for row, image_id in enumerate(labelled):
            for annotation in coco.imgToAnns[image_id]:
                column = class_of[annotation['category_id']]
                targets[row, column] = 1
                areas.append((row, column, annotation['area']))
        super().__init__(
            [Path(images) / coco.imgs[image_id]['file_name'] for image_id in labelled],
            targets,
            [coco.cats[category]['name'] for category in categories],
            root=images,
        )
        self.image_ids = labelled
        self.object_areas = areas  # (row, class, area in pixels) of each object


def _load(annotations: Path) -> COCO:
    if not annotations.is_file():
        raise ValueError(f'Expected an annotation file, but got {annotations}, which does not exist.')
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools tells its progress to the standard output
        try:
            return COCO(str(annotations))
        except (json.JSONDecodeError, UnicodeDecodeError, AssertionError) as error:
            raise ValueError(f'Expected annotations in COCO format, but got {annotations}: {error}') from error
