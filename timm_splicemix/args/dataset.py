""" Flags that name a data set and say what becomes of its labels """
import argparse

from ..data import CLASS_ORDERS, DIFFICULT, dataset_names


def add_dataset_args(parser: argparse.ArgumentParser) -> None:
    """ Add the flags that name a data set, with timm's names where timm has them.

    Args:
        parser: Parser that gets them.
    """
    group = parser.add_argument_group('Data set')
    group.add_argument('--data-dir', metavar='DIR', help="folder of the data set (default: a cache for 'shapes')")
    group.add_argument(
        '--dataset', default='', metavar='NAME',
        help=f"one of {', '.join(dataset_names())} (default: a folder with a sub-folder for each class)")
    group.add_argument(
        '--dataset-download', action='store_true',
        help='fetch the data set if it is not there (COCO, VOC, some of timm)')
    group.add_argument('--class-map', metavar='FILE', help='file that lists the classes, one in a line')
    group.add_argument('--input-key', metavar='NAME', help='column of the images (hfds)')
    group.add_argument('--target-key', metavar='NAME', help='column or field of the labels (hfds, wds)')


def add_label_args(parser: argparse.ArgumentParser) -> None:
    """ Add the flags that say where labels are and what becomes of them.

    Args:
        parser: Parser that gets a group of flags.
    """
    group = parser.add_argument_group('Labels', 'where they are and what becomes of them')
    group.add_argument(
        '--train-ann', metavar='FILE',
        help='annotations to train on: instances_*.json, a CSV file or a list (coco, csv, folder)')
    group.add_argument('--val-ann', metavar='FILE', help='annotations to validate on')
    group.add_argument('--class-order', choices=CLASS_ORDERS, help='order of classes by id or name (coco; default: id)')
    group.add_argument(
        '--keep-unlabelled', action='store_true', default=None, help='keep images without any object (coco)')
    group.add_argument(
        '--voc-difficult', choices=DIFFICULT, help='what difficult objects are in training (voc; default: negative)')
    group.add_argument(
        '--voc-difficult-eval', choices=DIFFICULT,
        help='what difficult objects are in evaluation (voc; default: ignore)')
    group.add_argument('--csv-image-column', metavar='NAME', help='column of the images (csv; default: recognised)')
    group.add_argument('--csv-label-column', metavar='NAME', help='column of the labels (csv; default: recognised)')
    group.add_argument('--csv-split-column', metavar='NAME', help='column of the split (csv; default: recognised)')
    group.add_argument('--csv-delimiter', metavar='CHAR', help='what separates labels (csv; default: recognised)')
    group.add_argument(
        '--keep-labels', metavar='75|40|single|P',
        help='hide labels of the training set: keep n // 2 + 1, n // 5 + 1 or 1 of the n labels of an image, or know '
             'each entry with probability P (default: keep all)')
    group.add_argument(
        '--keep-labels-seed', type=int, default=0, metavar='N', help='seed of what is hidden (default: %(default)s)')
