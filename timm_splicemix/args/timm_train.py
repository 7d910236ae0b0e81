""" All flags of timm's train script, with its names and defaults """
import argparse
from typing import Union

from .timm_shared import (
    add_build_args,
    add_codegen_args,
    add_input_args,
    add_loader_args,
    add_precision_args,
    add_seed_arg,
    add_source_args,
)
from .timm_train_augment import add_augmentation_args, add_batch_norm_args
from .timm_train_optim import add_optimizer_args, add_schedule_args
from .timm_train_special import add_distillation_args, add_naflex_train_args, add_size_schedule_args


def add_timm_train_args(parser: argparse.ArgumentParser) -> None:
    """ Add all flags of timm's train script, in its groups, so that its command lines and configs are understood.

    They include the flags of `add_dataset_args`: call one or the other.

    Args:
        parser: Parser that gets them.
    """
    _add_dataset_args(parser)
    _add_model_args(parser)
    add_codegen_args(parser)
    _add_device_args(parser)
    add_optimizer_args(parser)
    add_schedule_args(parser)
    add_augmentation_args(parser)
    add_batch_norm_args(parser)
    _add_ema_args(parser)
    _add_misc_args(parser)
    add_size_schedule_args(parser)
    add_naflex_train_args(parser)
    add_distillation_args(parser)


def number_or_prior(text: str) -> Union[float, str]:
    """ Read the bias that a classifier starts with: a number, or 'prior', the frequency of each class.

    Args:
        text: What the user wrote.
    """
    if text == 'prior':
        return text
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"Expected a number or 'prior', but got '{text}'") from None


def _add_dataset_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group('Dataset parameters')
    add_source_args(group)
    group.add_argument(
        '--train-split', default='train', metavar='NAME', help='split to train on (default: %(default)s)')
    group.add_argument(
        '--val-split', default='validation', metavar='NAME',
        help="split to evaluate on; validation finds the data set's own, be it val2014, test or val "
             '(default: %(default)s)')
    group.add_argument(
        '--train-num-samples', type=int, metavar='N', help='images of a streamed training split (default: as it says)')
    group.add_argument(
        '--val-num-samples', type=int, metavar='N', help='images of a streamed evaluation split (default: as it says)')


def _add_model_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group('Model parameters')
    group.add_argument('--model', default='resnet50', metavar='MODEL', help='any model of timm (default: %(default)s)')
    group.add_argument('--pretrained', action='store_true', help='start from the weights that timm offers')
    group.add_argument(
        '--pretrained-path', metavar='FILE',
        help='weights to take for those that timm offers, the classifier anew if it differs; implies --pretrained')
    group.add_argument(
        '--initial-checkpoint', default='', metavar='FILE',
        help='checkpoint to start from, with the classifier, so of the same classes (default: none)')
    group.add_argument(
        '--resume', default='', metavar='FILE',
        help='checkpoint of a run to go on with: weights, optimiser, epoch, best metric (default: none)')
    group.add_argument(
        '--no-resume-opt', action='store_true', help='take weights alone from --resume, and a new optimiser')
    add_input_args(group)
    group.add_argument(
        '-b', '--batch-size', type=int, default=128, metavar='N',
        help='images in a batch on each GPU, before SpliceMix adds its own (default: %(default)s)')
    group.add_argument(
        '-vb', '--validation-batch-size', type=int, metavar='N',
        help='the same in evaluation (default: --batch-size)')
    add_build_args(group)
    group.add_argument(
        '--grad-accum-steps', type=int, default=1, metavar='N',
        help='batches whose gradients make one update, for a large batch in little memory (default: %(default)s)')
    group.add_argument(
        '--grad-checkpointing', action='store_true',
        help='compute activations again in the backward pass: slower, in less memory')
    group.add_argument(
        '--head-init-scale', type=float, metavar='FACTOR',
        help='scale the first weights of the classifier by this; wins over --head-init-std')
    group.add_argument(
        '--head-init-bias', type=number_or_prior, metavar='BIAS',
        help='bias that the classifier starts with: a number such as -2.5, since most labels are 0, or prior, the '
             'frequency of each class')


def _add_device_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group('Device & distributed')
    add_precision_args(group)
    group.add_argument(
        '--no-ddp-bb', action='store_true', help='let each process keep buffers of its own, not those of the first')
    group.add_argument(
        '--synchronize-step', action='store_true', help='wait for the device after each step; to measure, it is slow')
    group.add_argument(
        '--local_rank', type=int, default=0, metavar='N',
        help='set by old launchers; torchrun needs no flag (default: %(default)s)')
    group.add_argument(
        '--device-modules', nargs='+', metavar='MODULE',
        help='Python modules to import that bring a kind of device to torch (default: none)')


def _add_ema_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group('Model exponential moving average parameters')
    group.add_argument('--model-ema', action='store_true', help='keep a moving average of the weights, and evaluate it')
    group.add_argument(
        '--model-ema-force-cpu', action='store_true', help='keep the average on the CPU: slow, but saves GPU memory')
    group.add_argument(
        '--model-ema-decay', type=float, default=0.9998, metavar='DECAY',
        help='part of the average that stays at each update; 0.9997 is usual on COCO (default: %(default)s)')
    group.add_argument(
        '--model-ema-warmup', action='store_true', help='start with less decay, right for runs of few updates')


def _add_misc_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group('Miscellaneous parameters')
    add_seed_arg(group)
    group.add_argument(
        '--worker-seeding', default='all', metavar='HOW',
        help='what is seeded in workers: all, or part, without numpy (default: %(default)s)')
    group.add_argument(
        '--log-interval', type=int, default=50, metavar='N', help='batches between lines of log (default: %(default)s)')
    group.add_argument(
        '--val-interval', type=int, default=1, metavar='N', help='epochs between evaluations (default: %(default)s)')
    group.add_argument(
        '--recovery-interval', type=int, default=0, metavar='N',
        help='batches between checkpoints within an epoch, 0 is none (default: %(default)s)')
    group.add_argument(
        '--checkpoint-hist', type=int, default=10, metavar='N', help='best checkpoints to keep (default: %(default)s)')
    add_loader_args(group)
    group.add_argument('--save-images', action='store_true', help='save the batch as a picture at each line of log')
    group.add_argument(
        '--output', default='', metavar='DIR', help='folder of the folders of runs (default: output/train)')
    group.add_argument(
        '--experiment', default='', metavar='NAME', help='folder of this run (default: date, model and size)')
    group.add_argument(
        '--eval-metric', default='top1', metavar='NAME',
        help='metric that says which checkpoint is best; on multi-label data mAP unless given (default: %(default)s)')
    group.add_argument(
        '--tta', type=int, default=0, metavar='N',
        help='views of an image that evaluation averages, 0 is one (default: %(default)s)')
    group.add_argument(
        '--use-multi-epochs-loader', action='store_true',
        help='keep the workers from epoch to epoch, as is always done here')
    group.add_argument('--log-wandb', action='store_true', help='log to Weights & Biases')
    group.add_argument('--wandb-project', metavar='NAME', help="project there (default: wandb's own)")
    group.add_argument('--wandb-tags', nargs='+', default=[], metavar='TAG', help='tags of the run there')
    group.add_argument('--wandb-resume-id', default='', metavar='ID', help='run there to go on with')
