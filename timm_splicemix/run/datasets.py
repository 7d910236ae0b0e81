""" Flags become data sets: the splits of a run, or parts of one split (--val-fraction, --split-file) """
import argparse
import logging
from pathlib import Path
from typing import Any, Optional

import torch
from PIL import ImageMode

from ..data import (
    PARTITION,
    MultiLabelDataset,
    Partition,
    StrictImageDataset,
    align_classes,
    check_has_positives,
    create_dataset,
    divide,
    is_training_split,
    read_partition,
)
from ..data.readers.csv import find_csv
from ..data.readers.json import find_json
from ..errors import UsageError

_logger = logging.getLogger(__name__)


def create_dataset_from_flags(
        args: argparse.Namespace,
        split: str,
        is_training: bool = False,
        in_chans: Optional[int] = None,
        partition: Optional[Partition] = None,
        **options: Any,
) -> torch.utils.data.Dataset:
    """ Create one split of the data set that the flags of train.py or validate.py name.

    Args:
        args: Flags.
        split: Name of the split.
        is_training: True for the split to train on. Only then are labels hidden (--keep-labels), and annotations come
            from --train-ann.
        in_chans: Number of image channels of the model, by default that of the flags.
        partition: Parts of the split that it names; `split` is then one of them.
        **options: Further arguments of `create_dataset`; they override the flags.
    """
    if partition is None:
        if is_training:
            options = {'skip_missing_images': args.on_bad_image == 'skip', **options}
        dataset = _read(args, is_training, in_chans, {'split': split, **options})
    else:
        dataset = partition.select(_read_whole(args, partition.source, is_training, in_chans, **options), split)
    return _check(args, dataset, split)


def _read(
        args: argparse.Namespace,
        is_training: bool,
        in_chans: Optional[int],
        options: dict[str, Any],
) -> torch.utils.data.Dataset:
    if in_chans is None:
        in_chans = args.input_size[0] if args.input_size else args.in_chans or 3
    kwargs = {**dataset_kwargs(args, is_training), 'input_img_mode': image_mode(args, in_chans)}
    if args.dataset_trust_remote_code:
        kwargs['trust_remote_code'] = True
    if args.dataset.startswith(('tfds/', 'wds/', 'hfids/')):
        kwargs['seed'] = args.seed
    return create_dataset(**{**kwargs, **options})


def _read_whole(
        args: argparse.Namespace,
        source: str,
        is_training: bool,
        in_chans: Optional[int] = None,
        **options: Any,
) -> torch.utils.data.Dataset:
    """The images of all parts of a split, with the labels of training or validation."""
    # validate.py, which has no such flag, need not have all images of a partition.
    skip = getattr(args, 'on_bad_image', 'skip') == 'skip'
    return _read(args, is_training, in_chans, {**whole_split(args, source), 'skip_missing_images': skip, **options})


def _check(args: argparse.Namespace, dataset: torch.utils.data.Dataset, split: str) -> torch.utils.data.Dataset:
    check_has_positives(dataset, split)
    if args.cache:
        if not isinstance(dataset, StrictImageDataset):
            raise UsageError(f'--cache does not support data set {args.dataset}, which is read as a stream.')
        dataset.use_cache(args.cache, args.cache_size)
    return dataset


def create_datasets(args: argparse.Namespace) -> tuple[torch.utils.data.Dataset, torch.utils.data.Dataset]:
    """ Create the training set and the validation set.

    If both are parts of one split, by --val-fraction or --split-file, they have an attribute `partition`.
    """
    options = {'num_samples': args.train_num_samples, 'repeats': args.epoch_repeats or None}
    if args.val_fraction or args.split_file:
        return _create_parts(args, **options)
    train_set = create_dataset_from_flags(args, args.train_split, is_training=True, **options)
    val_set = create_dataset_from_flags(args, args.val_split, num_samples=args.val_num_samples)
    names = getattr(train_set, 'class_names', None)
    if names:
        align_classes(val_set, names, 'the validation set', 'the training set', args.drop_unknown_classes)
        check_has_positives(val_set, args.val_split)
    return train_set, val_set


def _create_parts(args: argparse.Namespace, **options: Any) -> tuple[StrictImageDataset, StrictImageDataset]:
    partition = _listed_parts(args)
    source = args.train_split if partition is None else partition.source
    whole = _read_whole(args, source, is_training=False, **options)
    if partition is None:
        fractions = {'train': 1 - args.val_fraction, 'val': args.val_fraction}
        partition = divide(whole, fractions, source, args.split_seed, {'dataset': args.dataset})
        sizes = ' and '.join(f'{len(images):,} ({part})' for part, images in partition.parts.items())
        _logger.info(f"Split the {len(whole):,} images of '{source}' into {sizes}.")
    val_set = partition.select(whole, 'val')
    if args.keep_labels is not None or args.dataset == 'json' or args.dataset.startswith('voc/'):
        whole = _read_whole(args, source, is_training=True, **options)  # training has other labels than validation
    train_set = partition.select(whole, 'train', skip_missing=args.on_bad_image == 'skip')
    train_set.partition = val_set.partition = partition
    return _check(args, train_set, 'train'), _check(args, val_set, 'val')


def _listed_parts(args: argparse.Namespace) -> Optional[Partition]:
    """The parts of the run to resume or of --split-file; None if they are yet to be made."""
    resumed = Path(args.resume)
    own_file = (resumed if resumed.is_dir() else resumed.parent) / PARTITION
    if args.resume and own_file.is_file():
        return read_partition(own_file)
    return read_partition(args.split_file) if args.split_file else None


def whole_split(args: argparse.Namespace, split: str) -> dict[str, Any]:
    """Arguments of `create_dataset` that read a split to be divided, which a label file need not name."""
    source = dataset_kwargs(args, True)
    kwargs = {name: source[name] for name in ('annotations', 'images')}
    if kwargs['annotations'] is None and args.data_dir:
        if args.dataset == 'csv':
            kwargs['annotations'] = find_csv(args.data_dir, split, args.csv_split_column, may_lack_splits=True)
        elif args.dataset == 'json':
            kwargs['annotations'] = find_json(args.data_dir, split, may_lack_splits=True)
    return {**kwargs, 'split': split}


def split_kwargs(args: argparse.Namespace, split: str) -> dict[str, Any]:
    """Arguments of `create_dataset` that read a split to look at; a CSV file without splits is its training split."""
    is_training = is_training_split(split)
    return {**dataset_kwargs(args, is_training), **(whole_split(args, split) if is_training else {'split': split})}


def dataset_kwargs(args: argparse.Namespace, is_training: bool) -> dict[str, Any]:
    """ Turn the flags of `add_dataset_args` and `add_label_args` into arguments of `create_dataset`.

    Args:
        args: Flags.
        is_training: True for the split to train on. Only then are labels hidden (--keep-labels).
    """
    kwargs = {
        'name': args.dataset,
        'root': args.data_dir,
        'is_training': is_training,
        'download': args.dataset_download,
        'class_map': args.class_map or None,
        'drop_unknown_classes': args.drop_unknown_classes,
        'input_key': args.input_key,
        'target_key': args.target_key,
        'annotations': args.train_ann if is_training else args.val_ann,
        'images': args.train_images if is_training else args.val_images,
        'class_order': args.class_order,
        'keep_unlabelled': args.keep_unlabelled,
        'difficult': args.voc_difficult if is_training else args.voc_difficult_eval,
        'image_column': args.csv_image_column,
        'label_column': args.csv_label_column,
        'split_column': args.csv_split_column,
        'label_delimiter': args.csv_delimiter,
        'empty_cells': args.csv_empty,
    }
    if is_training and args.keep_labels is not None:
        kwargs.update(keep_labels=args.keep_labels, keep_labels_seed=args.keep_labels_seed)
    return kwargs


def image_mode(args: argparse.Namespace, in_chans: int) -> str:
    """Return the PIL mode of --input-img-mode, or that of `in_chans` channels; raise an error if it has others."""
    mode = args.input_img_mode or ('L' if in_chans == 1 else 'RGB')
    try:
        bands = ImageMode.getmode(mode).bands
    except KeyError:
        raise UsageError(
            f"Expected a mode of Pillow's for --input-img-mode, such as RGB or L, but got '{mode}'.") from None
    if len(bands) != in_chans:
        raise UsageError(
            f'Expected images of {in_chans} channels (--in-chans), but got {len(bands)} in mode {mode}: set '
            '--input-img-mode, such as L for 1, RGB for 3 or RGBA for 4, or create the model with '
            f'--in-chans {len(bands)}.')
    return mode


def is_multi_label(dataset: torch.utils.data.Dataset) -> bool:
    """Return True if targets are multi-hot, False if they are class indices."""
    return isinstance(dataset, MultiLabelDataset)
