""" Check the values of flags before data are read and weights are downloaded """
import argparse

import torch
from timm.data.auto_augment import augment_and_mix_transform, auto_augment_transform, rand_augment_transform

from ..data import check_dataset_name, check_download
from ..errors import UsageError
from ..mix import AUTO_GRIDS, is_auto
from ..models import check_model_name
from .factory import create_mixer, loss_kwargs
from .optimizer import create_plain_optimizer


def check_train_options(args: argparse.Namespace) -> None:
    """Raise a `UsageError` for values of flags of train.py that no data set and no weights could make valid."""
    # The names of classes in the two flags of SpliceMix are checked with the data set; 'auto' chooses some of its grids
    # when the model exists.
    grids = ','.join(map(str, AUTO_GRIDS)) if is_auto(args.splicemix_grids) else args.splicemix_grids
    early = {'splicemix_grids': grids, 'splicemix_unknown': [], 'splicemix_all': []}
    create_mixer(argparse.Namespace(**{**vars(args), **early}))
    if args.loss:
        loss_kwargs(args, args.loss)
    if args.aa:
        check_policy(args.aa)
    check_model_name(args.model)
    create_plain_optimizer([torch.nn.Parameter(torch.zeros(1, 1))], args, lr=1.)
    _check_data(args, {args.train_split: args.train_ann, args.val_split: args.val_ann})


def check_validate_options(args: argparse.Namespace) -> None:
    """Raise a `UsageError` for values of flags of validate.py that no data set and no weights could make valid."""
    if not args.checkpoint:
        check_model_name(args.model)
    if args.dataset or args.data_dir:
        splits = [split for split in (args.split, args.tune_split) if split]
        _check_data(args, dict.fromkeys(splits, args.val_ann or args.train_ann))


def check_policy(policy: str) -> None:
    """Raise an error for an augmentation policy (--aa) that timm does not have."""
    create = next((function for name, function in (
        ('rand', rand_augment_transform), ('augmix', augment_and_mix_transform)) if policy.startswith(name)),
        auto_augment_transform)
    try:
        create(policy, {})
    except (AssertionError, ValueError) as error:
        raise UsageError(f"Expected a policy of timm for --aa, but got '{policy}': {error}") from error


def _check_data(args: argparse.Namespace, splits: dict[str, object]) -> None:
    check_dataset_name(args.dataset)
    if args.dataset_download and args.dataset.startswith(('coco/', 'voc/')):
        for split, annotations in splits.items():
            check_download(args.dataset, split, annotations)
