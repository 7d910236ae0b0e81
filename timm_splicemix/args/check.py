""" Flags of timm that mean something else here: those refused, and defaults that are wrong for several labels """
import argparse
import logging
from pathlib import Path
from typing import Any

import torch

from ..errors import UsageError

_logger = logging.getLogger(__name__)

SCHEDULES = ('cosine', 'tanh', 'step', 'multistep', 'plateau', 'poly', 'none')
_NAFLEX = 'NaFlex batches hold sequences of patches, which can not be spliced'
_SIZES = 'images of one batch after another would have other sizes, which can not be resumed exactly'
_DISTILLATION = 'there is no teacher in this task; distil with timm, then fine-tune here'
_SPLITS = 'splits of a batch by augmentation make no sense for mixed images'
# Flags that can't be honoured, with the reason; they may be given with their default.
REFUSED = {
    'naflex_loader': _NAFLEX,
    'naflex_train_seq_lens': _NAFLEX,
    'naflex_max_seq_len': _NAFLEX,
    'naflex_patch_sizes': _NAFLEX,
    'naflex_patch_size_probs': _NAFLEX,
    'naflex_loss_scale': _NAFLEX,
    'naflex_patchify_channels_first': _NAFLEX,
    'train_img_sizes': _SIZES,
    'train_batch_sizes': _SIZES,
    'train_size_probs': _SIZES,
    'train_size_schedule': _SIZES,
    'train_size_schedule_spread': _SIZES,
    'train_size_random_mix': _SIZES,
    'variable_batch_loss_scale': _SIZES,
    'kd_model_name': _DISTILLATION,
    'kd_distill_type': _DISTILLATION,
    'kd_loss_type': _DISTILLATION,
    'distill_loss_weight': _DISTILLATION,
    'task_loss_weight': _DISTILLATION,
    'kd_temperature': _DISTILLATION,
    'kd_student_feature_dim': _DISTILLATION,
    'kd_teacher_feature_dim': _DISTILLATION,
    'kd_token_distill_type': _DISTILLATION,
    'aug_splits': _SPLITS,
    'jsd_loss': _SPLITS,
    'split_bn': _SPLITS,
    'torchscript': 'a scripted model has no feature map to cut; use --torchcompile',
    'fuser': 'it sets up TorchScript, which is not used; use --torchcompile',
    'tta': 'evaluation while training sees each image once; use validate.py --tta flip',
    'worker_seeding': 'every sample has a seed of its own, whichever worker reads it',
    'lr_noise_std': "timm's schedules draw noise of deviation 1 and keep what is below --lr-noise-pct",
}
_AT_LEAST_ONE = (
    'batch_size', 'validation_batch_size', 'grad_accum_steps', 'epochs', 'log_interval', 'val_interval',
    'checkpoint_hist', 'img_size', 'in_chans', 'num_classes', 'train_batches_per_epoch', 'recount', 'lr_base_size',
    'lr_cycle_limit')
_AT_LEAST_ZERO = (
    'workers', 'recovery_interval', 'warmup_epochs', 'patience', 'splicemix_off_epoch', 'mixup_off_epoch',
    'cooldown_epochs', 'start_epoch', 'aug_repeats', 'weight_decay', 'splicemix_cl', 'lr', 'head_init_std')
_ABOVE_ZERO = ('crop_pct', 'clip_grad', 'layer_decay', 'decay_epochs', 'lr_cycle_mul')
_PROBABILITIES = (
    'hflip', 'vflip', 'color_jitter_prob', 'grayscale_prob', 'gaussian_blur_prob', 'reprob', 'drop', 'drop_path',
    'drop_connect', 'drop_block', 'model_ema_decay')
_INTERPOLATIONS = ('nearest', 'bilinear', 'bicubic', 'box', 'hamming', 'lanczos', '')
_CHOICES = {
    'amp_dtype': ('float16', 'bfloat16'),
    'model_dtype': ('float32', 'float16', 'bfloat16'),
    'clip_mode': ('norm', 'value', 'agc'),
    'dist_bn': ('broadcast', 'reduce', ''),
    'sched': SCHEDULES,
    'lr_base_scale': ('linear', 'sqrt', ''),
    'remode': ('const', 'rand', 'pixel'),
    'interpolation': _INTERPOLATIONS,
    'train_interpolation': ('random', *_INTERPOLATIONS),
    'torchcompile_mode': ('default', 'reduce-overhead', 'max-autotune', 'max-autotune-no-cudagraphs'),
}
_STREAMED = ('hfids/', 'tfds/', 'wds/')
# Flags that only some data sets have a use for; others that a data set lacks it refuses itself.
_OF_DATA_SETS = {
    'train_num_samples': _STREAMED,
    'val_num_samples': _STREAMED,
    'epoch_repeats': _STREAMED,
    'dataset_download': ('coco/', 'voc/', 'torch/', 'hfids/', 'tfds/'),
    'dataset_trust_remote_code': ('hfds/', 'hfids/'),
}
_NOT_OF_TORCH = ('class_map', 'input_img_mode')


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


_PAIRS = ('mixup', 'cutmix', 'cutmix_minmax', 'splice_with')
_MIXERS = (*_PAIRS, 'resizemix', 'recursivemix')
# Flags that say how something is done, and those of which one has it done
_NEEDS = {
    'mixup_mode': _PAIRS,
    'mixup_off_epoch': (*_MIXERS, 'splicemix_grids'),
    'mixup_prob': _MIXERS,
    'recursivemix_cl': ('recursivemix',),
    'splice_with_ratio': ('splice_with',),
    'splicemix_cl': ('splicemix_grids',),
    'splicemix_batch': ('splicemix_grids',),
    'splicemix_cl_no_detach': ('splicemix_cl',),
    'splicemix_drop_prob': ('splicemix_grids',),
    'splicemix_mode': ('splicemix_grids',),
    'splicemix_off_epoch': ('splicemix_grids',),
    'splicemix_prob': ('splicemix_grids',),
    'splicemix_ratio': ('splicemix_grids',),
    'torchcompile_mode': ('torchcompile',),
}


def refuse_unsupported(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """ Refuse, in a sentence, what can't be done or contradicts itself.

    Args:
        args: What the parser returned.
        parser: Parser that knows the defaults.
    """
    for name, reason in REFUSED.items():
        value = getattr(args, name)
        if value != parser.get_default(name):
            raise UsageError(f'Expected no {_flag(name)}, but got {value}: {reason}.')
    for names, lowest in ((_AT_LEAST_ONE, 1), (_AT_LEAST_ZERO, 0)):
        for name in names:
            value = getattr(args, name)
            if value is not None and value < lowest:
                raise UsageError(f'Expected {_flag(name)} of at least {lowest}, but got {value}.')
    for name in _ABOVE_ZERO:
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise UsageError(f'Expected {_flag(name)} above 0, but got {value}.')
    for name in _PROBABILITIES:
        value = getattr(args, name)
        if value is not None and not 0 <= value <= 1:
            raise UsageError(f'Expected {_flag(name)} from 0 to 1, but got {value}.')
    for name, choices in _CHOICES.items():
        value = getattr(args, name)
        if value is not None and value not in choices:
            names = ', '.join(filter(None, choices))
            raise UsageError(f"Expected {_flag(name)} to be one of {names}, but got '{value}'.")
    _check_data_set(args)
    _check_images(args)
    if args.lr_noise is not None and len(args.lr_noise) > 2:
        raise UsageError(f'Expected one or two numbers for --lr-noise, but got {len(args.lr_noise)}.')
    if args.amp and args.model_dtype not in (None, 'float32'):
        raise UsageError(f'Expected --amp or --model-dtype {args.model_dtype}, but got both.')
    if args.model_dtype == 'float16':
        raise UsageError(
            'Expected --model-dtype bfloat16 or float32, but got float16, whose updates vanish: use --amp.')
    if args.data and args.data_dir and args.data != args.data_dir:
        raise UsageError(f'Expected one folder of data, but got {args.data} and --data-dir {args.data_dir}.')
    for name in ('initial_checkpoint', 'pretrained_path'):
        path = getattr(args, name)
        if path and not Path(path).is_file():
            raise UsageError(f'Expected a file of weights for {_flag(name)}, but got {path}, which is none.')
    if args.drop_connect is not None and args.drop_path is not None:
        raise UsageError('Expected --drop-path or its old name --drop-connect, but got both.')
    for name, needed in _NEEDS.items():
        if getattr(args, name) != parser.get_default(name) and not any(getattr(args, other) for other in needed):
            raise UsageError(f'Expected {" or ".join(map(_flag, needed))} with {_flag(name)}, but got none.')
    if args.mixup_switch_prob != parser.get_default('mixup_switch_prob') and not (
            args.mixup and (args.cutmix or args.cutmix_minmax)):
        raise UsageError('Expected --mixup and --cutmix with --mixup-switch-prob, but got one of them or none.')
    if args.torchcompile == 'eager' and args.grad_checkpointing:
        raise UsageError('Expected another backend with --grad-checkpointing, but got --torchcompile eager.')
    if args.cooldown_epochs and args.sched not in ('cosine', 'tanh', 'poly'):
        raise UsageError(f'Expected --sched cosine, tanh or poly with --cooldown-epochs, but got {args.sched}.')
    if args.torchcompile and args.torchcompile not in torch.compiler.list_backends(exclude_tags=()):
        names = ', '.join(torch.compiler.list_backends())
        raise UsageError(f"Expected --torchcompile to be one of {names}, but got '{args.torchcompile}'.")
    if args.splicemix_batch == 'alternate' and args.grad_accum_steps > 1:
        raise UsageError(
            f'Expected --grad-accum-steps 1 with --splicemix-batch alternate, but got {args.grad_accum_steps}: regular '
            'and mixed images have updates of their own.')


def _check_data_set(args: argparse.Namespace) -> None:
    """Refuse flags that the data set has no use for, which it would not notice itself."""
    for name, prefixes in _OF_DATA_SETS.items():
        if getattr(args, name) and not args.dataset.startswith(prefixes):
            names = ', '.join(f'{prefix}...' for prefix in prefixes)
            raise UsageError(f"Expected {_flag(name)} with a data set among {names}, but got '{args.dataset}'.")
    if args.dataset.startswith('torch/'):
        for name in _NOT_OF_TORCH:
            if getattr(args, name):
                raise UsageError(f"Expected no {_flag(name)} with a data set of torchvision, but got '{args.dataset}'.")


def _check_images(args: argparse.Namespace) -> None:
    """Refuse sizes and statistics of images that contradict each other."""
    channels = args.input_size[0] if args.input_size else args.in_chans or 3
    if args.input_size and min(args.input_size) < 1:
        raise UsageError(f'Expected --input-size of at least 1, but got {args.input_size}.')
    for name in ('mean', 'std'):
        values = getattr(args, name)
        if values is not None and len(values) not in (1, channels):
            raise UsageError(f'Expected one number or {channels} for {_flag(name)}, but got {len(values)}.')
    for name in ('scale', 'ratio'):
        values = getattr(args, name)
        if values is not None and (len(values) != 2 or not 0 < values[0] <= values[1]):
            raise UsageError(f'Expected two rising numbers above 0 for {_flag(name)}, but got {values}.')
    if args.aug_repeats != int(args.aug_repeats):
        raise UsageError(f'Expected a whole number for --aug-repeats, but got {args.aug_repeats}.')
    if args.resplit and args.no_prefetcher:
        raise UsageError('Expected --resplit without --no-prefetcher, but got both: single images have no halves.')


def map_defaults(args: argparse.Namespace, given: set[str]) -> None:
    """ Set what timm's defaults leave open on this machine, and say so in a line each.

    Args:
        args: What the parser returned; changed.
        given: Flags that the user set.
    """
    args.data_dir = args.data_dir or args.data
    if args.pretrained_path:
        args.pretrained = True
    if args.drop_connect is not None:
        args.drop_path = args.drop_connect
    if args.device.startswith('cuda') and not torch.cuda.is_available():
        if 'device' in given:
            raise UsageError(f'Expected a GPU for --device {args.device}, but got none: use --device cpu.')
        args.device = 'cpu'
        _say('--device cpu, as there is no GPU')
    if args.amp and not args.device.startswith('cuda') and args.amp_dtype == 'float16' and 'amp_dtype' not in given:
        args.amp_dtype = 'bfloat16'
        _say(f'--amp-dtype bfloat16, as {args.device} is slow in float16 or lacks it')


def map_defaults_of_data(args: argparse.Namespace, given: set[str], multi_label: bool) -> None:
    """ Set the defaults that depend on what the labels are, and say so in a line each.

    Args:
        args: What the parser returned; changed.
        given: Flags that the user set.
        multi_label: Whether an image has any number of classes.
    """
    _check_loss(args, given, multi_label)
    if not multi_label:
        if args.eval_metric not in ('top1', 'top5', 'loss'):
            raise UsageError(f"Expected --eval-metric top1, top5 or loss, but got '{args.eval_metric}'.")
        return
    if 'smoothing' not in given and args.smoothing:
        args.smoothing = 0.
        _say('--smoothing 0, as labels are multi-hot')
    if args.eval_metric == 'top1' and 'eval_metric' not in given:
        args.eval_metric = 'mAP'
        _say('--eval-metric mAP, as labels are multi-hot')
    names = ('mAP', *(f'{name}{suffix}' for suffix in ('', '_3') for name in ('CP', 'CR', 'CF1', 'OP', 'OR', 'OF1')))
    if args.eval_metric not in (*names, 'loss'):
        raise UsageError(
            f"Expected --eval-metric to be one of {', '.join(names)} or loss, but got '{args.eval_metric}'.")


def uses_softmax(args: argparse.Namespace, multi_label: bool) -> bool:
    """ Whether classes exclude each other in the loss.

    Args:
        args: What the parser returned.
        multi_label: Whether an image has any number of classes.
    """
    return not multi_label and not args.bce_loss and not args.loss


def _check_loss(args: argparse.Namespace, given: set[str], multi_label: bool) -> None:
    """Refuse flags of a loss that is not the one in use."""
    if not multi_label and args.loss not in ('', 'bce'):
        raise UsageError(
            f'Expected a multi-label data set for --loss {args.loss}, but got one with a class per image: '
            'leave it out, or use --bce-loss.')
    if args.bce_loss and args.loss not in ('', 'bce'):
        raise UsageError(f'Expected one loss, but got --bce-loss and --loss {args.loss}.')
    softmax = uses_softmax(args, multi_label)
    of_bce = {'bce_sum', 'bce_target_thresh', 'bce_pos_weight'} | (set() if softmax else {'smoothing'})
    for name in sorted(given & of_bce):
        # A run writes down a smoothing of 0, which asks for nothing.
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


def _say(what: Any) -> None:
    _logger.info(f'Uses {what}.')
