""" Images and labels """
from .class_map import read_class_map
from .classes import align_classes
from .collate import multilabel_collate
from .dataset import (
    BadImageError,
    MultiLabelDataset,
    StrictImageDataset,
    find_bad_images,
)
from .decode import DECODERS, convert_image, decode_image
from .download import download_dataset
from .loader import ON_BAD_IMAGE, MultiLabelLoader, create_loader
from .missing import keep_labels
from .partition import PARTITION, Partition, divide, read_partition, write_partition
from .readers.base import MultiLabelReader
from .readers.coco import CLASS_ORDERS, ReaderCoco
from .readers.csv import EMPTY, ReaderCsv
from .readers.json import ReaderJson
from .readers.list import ReaderList
from .readers.voc import DIFFICULT, ReaderVoc
from .readers.wds import ReaderWds
from .registry import (
    check_dataset_name,
    check_download,
    check_has_positives,
    create_dataset,
    dataset_names,
    has_multi_label_reader,
)
from .seeding import mix_seeds
from .shapes import generate_shapes
from .splits import is_training_split, own_split
from .stratify import stratified_split
from .transforms import create_transform

__all__ = [
    'CLASS_ORDERS',
    'DECODERS',
    'DIFFICULT',
    'EMPTY',
    'ON_BAD_IMAGE',
    'PARTITION',
    'BadImageError',
    'MultiLabelDataset',
    'MultiLabelLoader',
    'MultiLabelReader',
    'Partition',
    'ReaderCoco',
    'ReaderCsv',
    'ReaderJson',
    'ReaderList',
    'ReaderVoc',
    'ReaderWds',
    'StrictImageDataset',
    'align_classes',
    'check_dataset_name',
    'check_download',
    'check_has_positives',
    'convert_image',
    'create_dataset',
    'create_loader',
    'create_transform',
    'dataset_names',
    'decode_image',
    'divide',
    'download_dataset',
    'find_bad_images',
    'generate_shapes',
    'has_multi_label_reader',
    'is_training_split',
    'keep_labels',
    'mix_seeds',
    'multilabel_collate',
    'own_split',
    'read_class_map',
    'read_partition',
    'stratified_split',
    'write_partition',
]
