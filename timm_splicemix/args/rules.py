""" Rules between flags, and defaults that depend on the machine and on the labels """
import argparse
import logging
from pathlib import Path

import torch

from ..errors import UsageError
from .command import CommandParser

_logger = logging.getLogger(__name__)

_STREAMED = ('hfids/', 'tfds/', 'wds/')
# Flags that only some data sets use, of those that the data sets do not check themselves
_DATA_SETS = {
    'train_num_samples': _STREAMED,
    'val_num_samples': _STREAMED,
    'num_samples': _STREAMED,
    'epoch_repeats': _STREAMED,
    'dataset_download': ('coco/', 'voc/', 'torch/', 'hfids/', 'tfds/'),
    'dataset_trust_remote_code': ('hfds/', 'hfids/'),
}
_PAIRS = ('mixup', 'cutmix', 'cutmix_minmax', 'splice_with')
_MIXERS = (*_PAIRS, 'resizemix', 'recursivemix')
# Flags that have an effect only together with one of others
_NEEDS = {
    'bootstrap': ('compare',),
    'cache_size': ('cache',),
    'class_vectors': ('head',),
    'fuser': ('torchscript',),
    'head_kwargs': ('head',),
    'mixup_mode': _PAIRS,
    'mixup_off_epoch': (*_MIXERS, 'splicemix_grids'),
    'mixup_prob': _MIXERS,
    'recursivemix_cl': ('recursivemix',),
    'results_format': ('results_file',),
    'splice_with_ratio': ('splice_with',),
    'split_seed': ('val_fraction',),
    'splicemix_cl_mean': ('splicemix_cl',),
    'splicemix_cl_no_detach': ('splicemix_cl',),
    'torchcompile_mode': ('torchcompile',),
    **dict.fromkeys(
        [f'splicemix_{name}' for name in (
            'all', 'batch', 'cl', 'drop_prob', 'mode', 'off_epoch', 'prob', 'ratio', 'unknown', 'weight')],
        ('splicemix_grids',)),
}
_METRICS = ('CP', 'CR', 'CF1', 'OP', 'OR', 'OF1')
MULTI_LABEL_METRICS = ('mAP', *_METRICS, *(f'{name}_3' for name in _METRICS), 'loss')


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def check_train_args(args: argparse.Namespace, parser: CommandParser) -> None:
    """ Raise a `UsageError` for flags of the train command that contradict each other.

    Args:
        args: Parsed arguments.
        parser: Parser that knows the defaults.
    """
    _check_common(args, parser)
    _check_images(args)
    if args.val_fraction and args.split_file:
        raise UsageError('Expected --val-fraction or --split-file, but got both.')
    if args.val_fraction or args.split_file:
        flag = '--val-fraction' if args.val_fraction else '--split-file'
        for name in ('val_ann', 'val_images', 'val_num_samples', 'val_split'):
            if getattr(args, name) != parser.get_default(name):
                raise UsageError(
                    f'Expected {flag} or {_flag(name)}, but got both: {flag} validates on a part of --train-split.')
    if args.lr_noise is not None and len(args.lr_noise) > 2:
        raise UsageError(f'Expected one or two numbers for --lr-noise, but got {len(args.lr_noise)}.')
    if args.model_dtype == 'float16':
        raise UsageError(
            'Expected --model-dtype bfloat16 or float32, but got float16, in which small updates are lost: use --amp.')
    for name in ('initial_checkpoint', 'pretrained_path'):
        path = getattr(args, name)
        if path and not Path(path).exists():
            raise UsageError(
                f'Expected a checkpoint or the folder of a run for {_flag(name)}, but got {path}, which is missing.')
    for name in ('gp', 'head_init_std', 'head_init_scale', 'head_init_bias'):
        if args.head and getattr(args, name) not in (None, ''):
            raise UsageError(
                f"Expected --head or {_flag(name)}, which is for the model's own classifier, but got both.")
    if args.drop_connect is not None and args.drop_path is not None:
        raise UsageError('Expected --drop-path or its old name --drop-connect, but got both.')
    if args.mixup_switch_prob != parser.get_default('mixup_switch_prob') and not (
            args.mixup and (args.cutmix or args.cutmix_minmax)):
        raise UsageError('Expected --mixup and --cutmix with --mixup-switch-prob, but got one of them or none.')
    if args.torchcompile == 'eager' and args.grad_checkpointing:
        raise UsageError('Expected another backend with --grad-checkpointing, but got --torchcompile eager.')
    if args.cooldown_epochs and args.sched not in ('cosine', 'tanh', 'poly'):
        raise UsageError(f'Expected --sched cosine, tanh or poly with --cooldown-epochs, but got {args.sched}.')
    if args.splicemix_batch == 'alternate' and args.grad_accum_steps > 1:
        raise UsageError(
            f'Expected --grad-accum-steps 1 with --splicemix-batch alternate, but got {args.grad_accum_steps}: regular '
            'and mixed images have separate updates.')


def check_validate_args(args: argparse.Namespace, parser: CommandParser, given: set[str]) -> None:
    """ Raise a `UsageError` for flags of the validate command that contradict each other.

    Args:
        args: Parsed arguments.
        parser: Parser that knows the defaults.
        given: Names of the flags that the user set.
    """
    _check_common(args, parser)
    if args.tune_split and args.thresholds != 'tune':
        raise UsageError('Expected --thresholds tune with --tune-split, but got --tune-split alone.')
    if args.compare:
        others = sorted(given - {'compare', 'bootstrap', 'output', 'seed'})
        if others:
            raise UsageError(f'Expected --compare alone, or with --output, but got {_flag(others[0])}.')
        if len(args.compare) < 2:
            raise UsageError(f'Expected at least two results for --compare, but got {args.compare[0]} alone.')
    if args.eval_sizes and (args.img_size or args.input_size or args.test_pool):
        raise UsageError(
            'Expected --eval-sizes without --img-size, --input-size and --test-pool, but got one of them: the size of '
            'the model is evaluated anyway.')
    if args.test_pool and args.gp == 'max':
        raise UsageError('Expected --test-pool or --gp max, but got both: test-time pooling averages.')


def _check_common(args: argparse.Namespace, parser: CommandParser) -> None:
    for name, prefixes in _DATA_SETS.items():
        if getattr(args, name, None) and not args.dataset.startswith(prefixes):
            names = ', '.join(f'{prefix}...' for prefix in prefixes)
            raise UsageError(f"Expected {_flag(name)} with a data set among {names}, but got '{args.dataset}'.")
    for name in ('class_map', 'input_img_mode'):
        if getattr(args, name) and args.dataset.startswith('torch/'):
            raise UsageError(f"Expected no {_flag(name)} with a data set of torchvision, but got '{args.dataset}'.")
    for name, needed in _NEEDS.items():
        default = parser.get_default(name)
        if getattr(args, name, default) != default and not any(getattr(args, other) for other in needed):
            raise UsageError(f'Expected {" or ".join(map(_flag, needed))} with {_flag(name)}, but got none.')
    if args.cache and args.scaled_decoding:
        raise UsageError(
            'Expected --cache or --scaled-decoding, but got both: a cache decodes each image once, for all crops.')
    if args.amp and args.model_dtype not in (None, 'float32'):
        raise UsageError(f'Expected --amp or --model-dtype {args.model_dtype}, but got both.')
    if args.data and args.data_dir and args.data != args.data_dir:
        raise UsageError(f'Expected one folder of data, but got {args.data} and --data-dir {args.data_dir}.')
    if args.torchcompile and args.torchcompile not in torch.compiler.list_backends(exclude_tags=()):
        names = ', '.join(torch.compiler.list_backends())
        raise UsageError(f"Expected --torchcompile to be one of {names}, but got '{args.torchcompile}'.")


def _check_images(args: argparse.Namespace) -> None:
    channels = args.input_size[0] if args.input_size else args.in_chans or 3
    for name in ('mean', 'std'):
        values = getattr(args, name)
        if values is not None and len(values) not in (1, channels):
            raise UsageError(f'Expected one number or {channels} for {_flag(name)}, but got {len(values)}.')
    for name in ('scale', 'ratio'):
        values = getattr(args, name)
        if values is not None and (len(values) != 2 or not 0 < values[0] <= values[1]):
            raise UsageError(f'Expected two increasing numbers above 0 for {_flag(name)}, but got {values}.')
    if args.aug_repeats != int(args.aug_repeats):  # a float in timm
        raise UsageError(f'Expected a whole number for --aug-repeats, but got {args.aug_repeats}.')
    if args.resplit and args.no_prefetcher:
        raise UsageError('Expected --resplit without --no-prefetcher, which erases in single images, but got both.')


def map_defaults(args: argparse.Namespace, given: set[str]) -> None:
    """ Replace defaults that do not fit the machine, with one log line each, and merge flags with two names.

    Args:
        args: Parsed arguments of any command with --device and --amp; changed in place.
        given: Names of the flags that the user set.
    """
    if 'data' in args:
        args.data_dir = args.data_dir or args.data
    if getattr(args, 'pretrained_path', None):
        args.pretrained = True
    if getattr(args, 'drop_connect', None) is not None:
        args.drop_path = args.drop_connect
    if args.device.startswith('cuda') and not torch.cuda.is_available():
        if 'device' in given:
            raise UsageError(f'Expected a GPU for --device {args.device}, but found none: use --device cpu.')
        args.device = 'cpu'
        _logger.info('Using --device cpu: no GPU was found.')
    if args.amp and not args.device.startswith('cuda') and args.amp_dtype == 'float16' and 'amp_dtype' not in given:
        args.amp_dtype = 'bfloat16'
        _logger.info(f'Using --amp-dtype bfloat16: float16 is slow or unsupported on {args.device}.')


def map_label_defaults(args: argparse.Namespace, given: set[str], multi_label: bool) -> None:
    """ Check the flags that depend on the labels, and replace defaults that do not fit them, with one log line each.

    Args:
        args: Parsed arguments of the train command; changed in place.
        given: Names of the flags that the user set.
        multi_label: Whether an image can have several classes.
    """
    _check_loss(args, given, multi_label)
    if not multi_label:
        if args.eval_metric not in ('top1', 'top5', 'loss'):
            raise UsageError(f"Expected --eval-metric top1, top5 or loss, but got '{args.eval_metric}'.")
        return
    if 'smoothing' not in given and args.smoothing:
        args.smoothing = 0.
        _logger.info('Using --smoothing 0: labels are multi-hot.')
    if args.eval_metric == 'top1' and 'eval_metric' not in given:
        args.eval_metric = 'mAP'
        _logger.info('Using --eval-metric mAP: labels are multi-hot.')
    if args.eval_metric not in MULTI_LABEL_METRICS:
        raise UsageError(
            f"Expected --eval-metric to be one of {', '.join(MULTI_LABEL_METRICS)}, but got '{args.eval_metric}'.")


def uses_softmax(args: argparse.Namespace, multi_label: bool) -> bool:
    """Whether the loss is cross entropy over exclusive classes."""
    return not multi_label and not args.bce_loss and not args.loss


def _check_loss(args: argparse.Namespace, given: set[str], multi_label: bool) -> None:
    if not multi_label and args.loss not in ('', 'bce'):
        raise UsageError(
            f'Expected a multi-label data set for --loss {args.loss}, but got one class per image: leave --loss out, '
            'or use --bce-loss.')
    if args.bce_loss and args.loss not in ('', 'bce'):
        raise UsageError(f'Expected one loss, but got --bce-loss and --loss {args.loss}.')
    softmax = uses_softmax(args, multi_label)
    bce_flags = {'bce_sum', 'bce_target_thresh', 'bce_pos_weight'} | (set() if softmax else {'smoothing'})
    for name in sorted(given & bce_flags):
        # The args.yaml of a run may set smoothing to 0, which has no effect.
        if getattr(args, name) and (softmax or args.loss not in ('', 'bce')):
            raise UsageError(
                f'Expected {_flag(name)} with binary cross entropy, but got '
                f'{"cross entropy: add --bce-loss" if softmax else f"--loss {args.loss}"}.')
    if softmax:
        for name in sorted(given):
            if name.startswith('loss_') or name == 'class_weights':
                raise UsageError(f'Expected {_flag(name)} with a multi-label loss, but got cross entropy.')
    if args.class_weights == 'auto' and args.bce_pos_weight is not None:
        raise UsageError('Expected --class-weights auto or --bce-pos-weight, but got both.')
