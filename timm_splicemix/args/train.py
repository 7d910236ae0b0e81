""" Flags of training that timm lacks """
import argparse
from typing import Sequence

from ..data import DECODERS, ON_BAD_IMAGE
from ..data.transforms import CROP_MODES
from ..metrics import PRESETS


def add_train_args(parser: argparse.ArgumentParser, losses: Sequence[str]) -> None:
    """ Add the flags of training that timm's script lacks, apart from those of `add_splicemix_args`.

    Args:
        parser: Parser that gets a group of flags.
        losses: Names that --loss takes.
    """
    group = parser.add_argument_group('Multi-label')
    _add_consistency_args(group)
    group.add_argument(
        '--loss', default='', choices=list(losses), metavar='NAME',
        help=f"one of {', '.join(losses)} (default: binary cross entropy on multi-label data)")
    _add_fine_tuning_args(group)
    _add_image_args(group)
    group.add_argument(
        '--metrics', default='paper', choices=list(PRESETS),
        help='definitions of the metrics: paper, F1 of mean precision and recall; asl, mean of the F1 of classes, '
             'threshold 0.8; interpolated, average precision as in VOC (default: %(default)s)')
    group.add_argument(
        '--patience', type=int, default=0, metavar='N',
        help='stop after this many epochs without a better metric, 0 is never (default: %(default)s)')
    group.add_argument('--log-tensorboard', action='store_true', help="log for TensorBoard to the run's folder")


def _add_consistency_args(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        '--splicemix-cl', nargs='?', type=float, const=1.0, default=0., metavar='WEIGHT',
        help='SpliceMix-CL: weight of the loss between what a cell and its regular image are taken for '
             '(default: %(default)s, off; when given bare: %(const)s)')
    group.add_argument(
        '--splicemix-cl-no-detach', action='store_true',
        help='let that loss move the predictions of regular images too, not those of cells alone')
    group.add_argument(
        '--splicemix-off-epoch', type=int, default=0, metavar='N',
        help='epoch from which on nothing is spliced, 0 is never (default: %(default)s)')


def _add_fine_tuning_args(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        '--backbone-lr-scale', type=float, default=1.0, metavar='FACTOR',
        help='learning rate of all but the classifier, relative to it; the paper has 0.1 (default: %(default)s)')
    group.add_argument(
        '--freeze-bn', action='store_true',
        help='keep the running statistics of batch norm, and train its scale and shift; good for small batches')
    group.add_argument(
        '--freeze', nargs='+', default=[], metavar='NAME',
        help='modules that are not trained, such as conv1 bn1 layer1 (default: none)')
    group.add_argument(
        '--head-init-std', type=float, metavar='STD',
        help='standard deviation of the first weights of a new classifier; small ones start with small logits '
             "(default: 0.01 on multi-label data, else the model's own)")


def _add_image_args(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        '--crop-mode', choices=CROP_MODES,
        help='how evaluation makes an image square: center crops, squash keeps every object, border pads '
             "(default: the model's own)")
    group.add_argument(
        '--decoder', default='pil', choices=DECODERS,
        help='what decodes images; torchvision is faster and knows crops, flips and erasing (default: %(default)s)')
    group.add_argument(
        '--on-bad-image', default='raise', choices=ON_BAD_IMAGE,
        help='stop at a training image that cannot be read, or skip it and say so (default: %(default)s)')
