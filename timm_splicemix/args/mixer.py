""" Flags that choose how batches are mixed """
import argparse

from ..mix import SpliceWith


def add_mixer_args(parser: argparse.ArgumentParser) -> None:
    """ Add the flags of ways to mix that neither timm nor `add_splicemix_args` has.

    Args:
        parser: Parser that gets a group of flags.
    """
    group = parser.add_argument_group('Mixing', 'what SpliceMix is compared with, beside --mixup and --cutmix')
    group.add_argument(
        '--resizemix', nargs='?', type=float, const=1., default=0., metavar='ALPHA',
        help='ResizeMix: another image as a whole in a box, its side 0.1 to 0.8 of the image by Beta(ALPHA, ALPHA) '
             '(default: %(default)s, off; when given bare: %(const)s)')
    group.add_argument(
        '--recursivemix', nargs='?', type=float, const=0.5, default=0., metavar='ALPHA',
        help='RecursiveMix: the mixed image of the step before in a box of up to this part of the area '
             '(default: %(default)s, off; when given bare: %(const)s)')
    group.add_argument(
        '--recursivemix-cl', type=float, default=0.5, metavar='WEIGHT',
        help='weight of its loss between what the box is taken for and what was said about its image a step before, 0 '
             'is off (default: %(default)s)')
    group.add_argument(
        '--splice-with', choices=SpliceWith.KINDS,
        help='append images of Mixup or CutMix to the batch; --mixup or --cutmix give its alpha (default: 1)')
    group.add_argument(
        '--splice-with-ratio', type=float, default=0.25, metavar='RATIO',
        help='mixed images of --splice-with as a part of the batch size (default: %(default)s)')
    group.add_argument(
        '--batch-augment', type=float, default=1., metavar='M',
        help='batch augmentation: each image M times in its batch, each time transformed anew; with 1.25, a quarter of '
             'the batch is there twice (default: %(default)s)')
