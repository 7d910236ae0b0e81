""" Flags of evaluation and prediction that timm lacks, and those of timm's validate script that mean something else """
import argparse
import logging

import torch

from ..data import DECODERS
from ..data.transforms import CROP_MODES
from ..errors import UsageError
from ..metrics import PRESETS
from .timm_shared import add_input_args

_logger = logging.getLogger(__name__)
EXPORTS = ('onnx', 'torchscript', 'safetensors')
TTA = ('flip',)
_INTERPOLATIONS = ('nearest', 'bilinear', 'bicubic', 'box', 'hamming', 'lanczos')
_NAFLEX = 'NaFlex batches hold sequences of patches, which no model of this project is trained on'
_HIDDEN = 'a result is over all labels; only training hides some'
# Flags that can't be honoured, with the reason; they may be given with their default.
REFUSED_IN_VALIDATION = {
    'naflex_loader': _NAFLEX,
    'naflex_max_seq_len': _NAFLEX,
    'num_gpu': 'each GPU has a process of its own here, use torchrun --nproc-per-node N validate.py',
    'real_labels': 'it holds for the 50,000 images of ImageNet, which timm evaluates; make a csv data set of it',
    'tf_preprocessing': 'images are prepared by PIL or torchvision, see --decoder',
    'keep_labels': _HIDDEN,
    'keep_labels_seed': _HIDDEN,
    'voc_difficult': 'it is for training, use --voc-difficult-eval',
}
# Flags that only some data sets have a use for; others that a data set lacks it refuses itself.
_OF_DATA_SETS = {
    'num_samples': ('hfids/', 'tfds/', 'wds/'),
    'dataset_download': ('coco/', 'voc/', 'torch/', 'hfids/', 'tfds/'),
    'dataset_trust_remote_code': ('hfds/', 'hfids/'),
}
_NOT_OF_TORCH = ('class_map', 'input_img_mode')
_AT_LEAST_ONE = (
    'batch_size', 'img_size', 'in_chans', 'num_classes', 'num_samples', 'log_freq', 'bootstrap')


_AT_LEAST_ZERO = ('workers', 'crop_border_pixels')
_CHOICES = {
    'amp_dtype': ('float16', 'bfloat16'),
    'model_dtype': ('float32', 'float16', 'bfloat16'),
    'crop_mode': CROP_MODES,
    'interpolation': _INTERPOLATIONS,
    'results_format': ('csv', 'json'),
    'fuser': ('te', 'old', 'legacy', 'nvfuser', 'nvf'),
}


def add_validate_args(parser: argparse.ArgumentParser) -> None:
    """ Add the flags of evaluation that timm's script lacks.

    Args:
        parser: Parser that gets a group of flags.
    """
    group = parser.add_argument_group('Multi-label')
    group.add_argument(
        '--metrics', default='paper', choices=list(PRESETS),
        help='definitions of the metrics: paper, F1 of mean precision and recall; asl, mean of the F1 of classes, '
             'threshold 0.8; interpolated, average precision as in VOC (default: %(default)s)')
    add_prediction_args(group)
    group.add_argument(
        '--tune-split', metavar='NAME',
        help='split that --thresholds tune looks at; it shares no image with --split, nor with what was trained on')
    group.add_argument(
        '--eval-sizes', nargs='+', type=int, metavar='PIXELS',
        help='low-resolution study: evaluate images of these sizes too, such as 448 224 112 64, fed as they are')
    group.add_argument(
        '--decoder', default='pil', choices=DECODERS,
        help='what decodes images; torchvision is faster (default: %(default)s)')
    group.add_argument(
        '--output', metavar='DIR', help='folder of the results (default: a new one in output/validate)')
    group.add_argument(
        '--export', choices=EXPORTS,
        help='write the model in another format, checked by running what was written; needs no data set')
    group.add_argument(
        '--compare', nargs='+', metavar='RESULTS',
        help='show results.json files, or their folders, side by side, the others against the first; needs no model')
    group.add_argument(
        '--bootstrap', type=int, default=1000, metavar='N',
        help='samples of images behind the 95 %% intervals of --compare (default: %(default)s)')


def add_prediction_args(group: argparse._ArgumentGroup) -> None:
    """ Add the flags that say how logits become predictions.

    Args:
        group: Group that gets them.
    """
    group.add_argument(
        '--tta', choices=TTA, help='average the probabilities of each image and its mirror image (default: off)')
    group.add_argument(
        '--thresholds', metavar='P|FILE|tune',
        help='probability from which on a class is predicted: one for all, or thresholds.json with one for each; '
             "validate.py writes it to the checkpoint's folder when told to tune (default: as the metrics say, or 0.5)")


def add_predict_model_args(parser: argparse.ArgumentParser) -> None:
    """ Add the flags that name a model to predict with, as timm's validate script has them.

    Args:
        parser: Parser that gets a group of flags.
    """
    group = parser.add_argument_group('Model', 'a checkpoint of train.py knows all of it; flags change what it says')
    group.add_argument('--checkpoint', default='', metavar='FILE', help='checkpoint to predict with')
    group.add_argument('--use-ema', action='store_true', help="take the checkpoint's moving average of the weights")
    group.add_argument('--model', '-m', metavar='MODEL', help='any model of timm, where the checkpoint does not say')
    group.add_argument('--pretrained', action='store_true', help='take the weights that timm offers')
    group.add_argument('--class-map', metavar='FILE', help='file that lists the classes, where the checkpoint does not')
    group.add_argument(
        '--crop-mode', choices=CROP_MODES,
        help='center crops, squash keeps every object but not the shape, border pads (default: that of the model)')
    add_input_args(group)


def refuse_in_validation(args: argparse.Namespace, parser: argparse.ArgumentParser, given: set[str]) -> None:
    """ Refuse, in a sentence, what can't be done or contradicts itself.

    Args:
        args: What the parser of `add_timm_validate_args`, `add_label_args` and `add_validate_args` returned.
        parser: Parser that knows the defaults.
        given: Flags that the user set.
    """
    for name, reason in REFUSED_IN_VALIDATION.items():
        if getattr(args, name) != parser.get_default(name):
            raise UsageError(f'Expected no {_flag(name)}, but got {getattr(args, name)}: {reason}.')
    check_values(args)
    for name, needed in (
            ('tune_split', '--thresholds tune'), ('torchcompile_mode', '--torchcompile'), ('fuser', '--torchscript'),
            ('results_format', '--results-file'), ('bootstrap', '--compare')):
        other = needed.split()[0].lstrip('-').replace('-', '_')
        fits = args.thresholds == 'tune' if name == 'tune_split' else getattr(args, other)
        if name in given and not fits:
            raise UsageError(f'Expected {needed} with {_flag(name)}, but got {_flag(name)} alone.')
    if args.thresholds == 'tune' and not args.tune_split:
        raise UsageError(
            'Expected --tune-split with --thresholds tune, but got none: thresholds that are tuned on the images that '
            'they are scored on look better than they are.')
    if args.compare:
        others = sorted(given - {'compare', 'bootstrap', 'output', 'seed'})
        if others:
            raise UsageError(f'Expected --compare alone, or with --output, but got {_flag(others[0])}.')
        if len(args.compare) < 2:
            raise UsageError(f'Expected at least two results for --compare, but got {args.compare[0]} alone.')
    if args.amp and args.model_dtype not in (None, 'float32'):
        raise UsageError(f'Expected --amp or --model-dtype {args.model_dtype}, but got both.')
    if args.data and args.data_dir and args.data != args.data_dir:
        raise UsageError(f'Expected one folder of data, but got {args.data} and --data-dir {args.data_dir}.')
    if args.eval_sizes and (args.img_size or args.input_size or args.test_pool):
        raise UsageError(
            'Expected --eval-sizes without --img-size, --input-size and --test-pool, but got one of them: the size of '
            'the model is among those evaluated anyway.')
    if args.test_pool and args.gp == 'max':
        raise UsageError('Expected --test-pool or --gp max, but got both: test pooling averages.')
    _check_data_set(args)


def _check_data_set(args: argparse.Namespace) -> None:
    """Refuse flags that the data set has no use for, which it would not notice itself."""
    for name, prefixes in _OF_DATA_SETS.items():
        if getattr(args, name) and not args.dataset.startswith(prefixes):
            names = ', '.join(f'{prefix}...' for prefix in prefixes)
            raise UsageError(f"Expected {_flag(name)} with a data set among {names}, but got '{args.dataset}'.")
    for name in _NOT_OF_TORCH:
        if getattr(args, name) and args.dataset.startswith('torch/'):
            raise UsageError(f"Expected no {_flag(name)} with a data set of torchvision, but got '{args.dataset}'.")


def check_values(args: argparse.Namespace) -> None:
    """ Refuse numbers and words that no model takes; flags that a command does not have are left out.

    Args:
        args: What a parser returned.
    """
    for names, lowest in ((_AT_LEAST_ONE, 1), (_AT_LEAST_ZERO, 0)):
        for name in names:
            value = getattr(args, name, None)
            if value is not None and value < lowest:
                raise UsageError(f'Expected {_flag(name)} of at least {lowest}, but got {value}.')
    for name in ('eval_sizes', 'input_size'):
        if any(value < 1 for value in getattr(args, name, None) or ()):
            raise UsageError(f'Expected {_flag(name)} of at least 1, but got {getattr(args, name)}.')
    for name, choices in _CHOICES.items():
        value = getattr(args, name, None)
        if value and value not in choices:
            raise UsageError(f"Expected {_flag(name)} to be one of {', '.join(choices)}, but got '{value}'.")
    if args.crop_pct is not None and not 0 < args.crop_pct <= 1:
        raise UsageError(f'Expected --crop-pct above 0 and at most 1, but got {args.crop_pct}.')
    if any(value <= 0 for value in args.std or ()):
        raise UsageError(f'Expected --std above 0, but got {args.std}.')


def map_validation_defaults(args: argparse.Namespace, given: set[str]) -> None:
    """ Set what timm's defaults leave open on this machine, and say so in a line each.

    Args:
        args: What a parser returned; changed.
        given: Flags that the user set.
    """
    if args.device.startswith('cuda') and not torch.cuda.is_available():
        if 'device' in given:
            raise UsageError(f'Expected a GPU for --device {args.device}, but got none: use --device cpu.')
        args.device = 'cpu'
        _logger.info('Uses --device cpu, as there is no GPU.')
    if args.amp and not args.device.startswith('cuda') and args.amp_dtype == 'float16' and 'amp_dtype' not in given:
        args.amp_dtype = 'bfloat16'
        _logger.info(f'Uses --amp-dtype bfloat16, as {args.device} is slow in float16 or lacks it.')


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
