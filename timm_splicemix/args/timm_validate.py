""" All flags of timm's validate script, with its names and defaults """
import argparse

from .timm_shared import (
    add_build_args,
    add_codegen_args,
    add_input_args,
    add_loader_args,
    add_naflex_args,
    add_precision_args,
    add_seed_arg,
    add_source_args,
)


def add_timm_validate_args(parser: argparse.ArgumentParser) -> None:
    """ Add all flags of timm's validate script, so that its command lines are understood.

    They include the flags of `add_dataset_args`: call one or the other.

    Args:
        parser: Parser that gets them.
    """
    _add_dataset_args(parser)
    _add_model_args(parser)
    one_of = add_codegen_args(parser)
    one_of.add_argument('--aot-autograd', action='store_true', help='compile the model with AOT autograd')
    add_precision_args(parser.add_argument_group('Device'))
    _add_result_args(parser)
    _add_misc_args(parser)
    add_naflex_args(parser.add_argument_group('NaFlex parameters'))


def _add_dataset_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group('Dataset parameters')
    add_source_args(group)
    group.add_argument(
        '--split', default='validation', metavar='NAME',
        help="split to evaluate on; validation finds the data set's own, be it val2014, test or val "
             '(default: %(default)s)')
    group.add_argument(
        '--num-samples', type=int, metavar='N', help='images of a streamed split (default: as it says)')


def _add_model_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group('Model parameters')
    group.add_argument(
        '--model', '-m', default='dpn92', metavar='MODEL',
        help='any model of timm; a checkpoint of this project knows its own (default: %(default)s)')
    group.add_argument('--pretrained', action='store_true', help='evaluate the weights that timm offers')
    group.add_argument('--checkpoint', default='', metavar='FILE', help='checkpoint to evaluate (default: none)')
    group.add_argument('--use-ema', action='store_true', help="evaluate the checkpoint's moving average of the weights")
    add_input_args(group)
    group.add_argument(
        '--use-train-size', action='store_true',
        help='evaluate at the size of pre-training, also where timm has a larger one for testing')
    group.add_argument(
        '--crop-mode', metavar='MODE',
        help='center crops, squash keeps every object but not the shape, border pads (default: that of the model)')
    group.add_argument(
        '--crop-border-pixels', type=int, metavar='N', help='pixels to cut off at each border first (default: 0)')
    group.add_argument('--test-pool', action='store_true', help='average the classifier over places of larger inputs')
    group.add_argument('--reparam', action='store_true', help='fuse the branches of models that can be, to be faster')
    add_build_args(group)


def _add_result_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group('Results')
    group.add_argument('--results-file', default='', metavar='FILE', help='file to write the results to')
    group.add_argument(
        '--results-format', default='csv', metavar='FORMAT', help='its format: csv or json (default: %(default)s)')
    group.add_argument(
        '--real-labels', default='', metavar='FILE', help='corrected labels of ImageNet (ReaL), a JSON file')
    group.add_argument(
        '--valid-labels', default='', metavar='FILE',
        help='file of the numbers of the classes that count, when the data set has fewer than the model')
    group.add_argument(
        '--metrics-avg', choices=['micro', 'macro', 'weighted'],
        help='precision, recall and F1 of single-label data, averaged so (default: not computed)')


def _add_misc_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group('Miscellaneous parameters')
    group.add_argument(
        '-b', '--batch-size', type=int, default=256, metavar='N', help='images in a batch (default: %(default)s)')
    add_loader_args(group)
    group.add_argument(
        '--log-freq', type=int, default=10, metavar='N', help='batches between lines of log (default: %(default)s)')
    group.add_argument('--num-gpu', type=int, default=1, metavar='N', help='GPUs to use (default: %(default)s)')
    group.add_argument(
        '--tf-preprocessing', action='store_true', help="prepare images by TensorFlow, as some models' authors did")
    group.add_argument(
        '--retry', action='store_true', help='try again with smaller batches when memory runs out')
    add_seed_arg(group)
