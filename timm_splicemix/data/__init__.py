""" Images and labels """
from .coco import ReaderCoco
from .dataset import MultiLabelDataset, StrictImageDataset
from .registry import create_dataset, dataset_names
from .shapes import generate_shapes

__all__ = [
    'MultiLabelDataset',
    'ReaderCoco',
    'StrictImageDataset',
    'create_dataset',
    'dataset_names',
    'generate_shapes',
]
