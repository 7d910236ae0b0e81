""" Flags that timm's train and validate scripts have in common """
import argparse

from ..data import dataset_names
from .kwargs import KwargsAction


def add_source_args(group: argparse._ArgumentGroup) -> None:
    """Where images and labels are."""
    group.add_argument('data', nargs='?', metavar='DIR', help='folder of the data set; --data-dir is the same and wins')
    group.add_argument('--data-dir', metavar='DIR', help="folder of the data set (default: a cache for 'shapes')")
    group.add_argument(
        '--dataset', default='', metavar='NAME',
        help=f"one of {', '.join(dataset_names())} (default: a folder with a sub-folder for each class)")
    group.add_argument(
        '--dataset-download', action='store_true',
        help='fetch the data set if it is not there (COCO, VOC, some of timm)')
    group.add_argument(
        '--class-map', default='', metavar='FILE',
        help="file that lists the classes, one in a line (default: the data set's own)")
    group.add_argument(
        '--input-img-mode', metavar='MODE',
        help="mode of Pillow's that images are read in, such as RGB or L (default: by --in-chans)")
    group.add_argument('--input-key', metavar='NAME', help='column of the images (hfds, wds)')
    group.add_argument('--target-key', metavar='NAME', help='column or field of the labels (hfds, wds)')
    group.add_argument(
        '--dataset-trust-remote-code', action='store_true',
        help='run code that a data set of the Hugging Face hub brings along: only if you trust its author')


def add_input_args(group: argparse._ArgumentGroup) -> None:
    """Shape and normalisation of the images that a model gets."""
    group.add_argument(
        '--num-classes', type=int, metavar='N', help='size of the classifier (default: that of the data set)')
    group.add_argument(
        '--gp', metavar='POOL',
        help="global pooling: max, avg, avgmax, catavgmax, ...; SpliceMix's paper uses max (default: the model's own)")
    group.add_argument(
        '--img-size', type=int, metavar='PIXELS',
        help="height and width of the input; multi-label papers mostly use 448 (default: the model's own)")
    group.add_argument('--in-chans', type=int, metavar='N', help="channels of the input (default: the model's own)")
    group.add_argument(
        '--input-size', nargs=3, type=int, metavar='N',
        help='channels, height and width of the input, such as 3 448 448; wins over --img-size')
    group.add_argument(
        '--crop-pct', type=float, metavar='PART',
        help='part of the resized image that evaluation keeps; less than 1 may cut off labelled objects '
             "(default: the model's own)")
    group.add_argument(
        '--mean', nargs='+', type=float, metavar='MEAN',
        help="means that normalisation subtracts, one for each channel (default: the model's own)")
    group.add_argument(
        '--std', nargs='+', type=float, metavar='STD',
        help="deviations that normalisation divides by, one for each channel (default: the model's own)")
    group.add_argument(
        '--interpolation', default='', metavar='NAME',
        help="how evaluation resizes: bilinear, bicubic, ... (default: the model's own)")


def add_build_args(group: argparse._ArgumentGroup) -> None:
    """How a model is built and laid out in memory."""
    group.add_argument(
        '--channels-last', action='store_true',
        help='keep channels last in memory; convolutions are faster so on new GPUs')
    group.add_argument(
        '--fuser', default='', metavar='NAME', help='fuser of TorchScript: te, old or nvfuser (default: that of torch)')
    group.add_argument(
        '--fast-norm', action='store_true', help='let normalisation layers compute in the low precision of AMP')
    group.add_argument(
        '--model-kwargs', nargs='*', default={}, action=KwargsAction, metavar='KEY=VALUE',
        help='further arguments of the model, such as drop_rate=0.1')


def add_codegen_args(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """How a model is compiled; returns the group of flags that exclude each other."""
    group = parser.add_argument_group('Scripting / codegen')
    group.add_argument(
        '--torchcompile-mode', metavar='MODE',
        help='mode of torch.compile: default, reduce-overhead, max-autotune (default: that of torch)')
    one_of = group.add_mutually_exclusive_group()
    one_of.add_argument('--torchscript', action='store_true', help='compile the model with TorchScript')
    one_of.add_argument(
        '--torchcompile', nargs='?', const='inductor', metavar='BACKEND',
        help='compile the model with torch.compile (default: off, when given bare: %(const)s)')
    return one_of


def add_precision_args(group: argparse._ArgumentGroup) -> None:
    """Where a model runs, and in which precision."""
    group.add_argument(
        '--device', default='cuda', metavar='DEVICE',
        help='device to run on; without a GPU, cuda becomes cpu (default: %(default)s)')
    group.add_argument('--amp', action='store_true', help='automatic mixed precision')
    group.add_argument(
        '--amp-dtype', default='float16', metavar='DTYPE',
        help='low precision of --amp: float16, or bfloat16, which needs no loss scaling (default: %(default)s)')
    group.add_argument(
        '--model-dtype', metavar='DTYPE',
        help='precision of the weights themselves, not together with --amp (default: float32)')


def add_loader_args(group: argparse._ArgumentGroup) -> None:
    """How batches come to the device."""
    group.add_argument(
        '-j', '--workers', type=int, default=4, metavar='N',
        help='processes that read images, for each GPU (default: %(default)s)')
    group.add_argument(
        '--pin-mem', action='store_true', help='read to memory that a GPU copies from fast; costs memory of the host')
    group.add_argument(
        '--no-prefetcher', action='store_true', help='normalise in the workers instead of on the device, ahead of time')


def add_seed_arg(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        '--seed', type=int, default=42, metavar='N', help='seed of everything that is drawn (default: %(default)s)')


def add_naflex_args(group: argparse._ArgumentGroup) -> None:
    """Batches of images that keep their shape, as sequences of patches."""
    group.add_argument(
        '--naflex-loader', action='store_true', help='load sequences of patches of images of any shape, for NaFlexViT')
    group.add_argument(
        '--naflex-max-seq-len', type=int, default=576, metavar='N',
        help='longest sequence of patches in evaluation (default: %(default)s)')
