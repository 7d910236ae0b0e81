""" Flags that choose how batches are mixed """
import argparse
from typing import Optional

from ..mix import Mixer, Mixup, RecursiveMix, ResizeMix, SpliceMix, SpliceWith
from .splicemix import splicemix_kwargs


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


def create_mixer(args: argparse.Namespace, num_classes: Optional[int] = None, seed: int = 0) -> Optional[Mixer]:
    """ Create the mixer that the flags ask for.

    Args:
        args: Flags of `add_mixer_args`, of `add_splicemix_args` and timm's of Mixup.
        num_classes: Number of classes, needed for integer targets.
        seed: Seed of everything that is drawn.

    Returns:
        The mixer, None if no flag asks for one.
    """
    has_cutmix = bool(args.cutmix or args.cutmix_minmax)
    asked = {
        '--splicemix-grids': bool(args.splicemix_grids),
        '--mixup': bool(args.mixup) and args.splice_with != 'mixup',
        '--cutmix-minmax' if args.cutmix_minmax else '--cutmix': has_cutmix and args.splice_with != 'cutmix',
        '--resizemix': bool(args.resizemix),
        '--recursivemix': bool(args.recursivemix),
        '--splice-with': bool(args.splice_with),
    }
    ways = [flag for flag, is_asked in asked.items() if is_asked]
    if len(ways) > 1 and not {flag.removesuffix('-minmax') for flag in ways} <= {'--mixup', '--cutmix'}:
        raise ValueError(f'Expected one way of mixing, but got {" and ".join(ways)}: leave out all but one.')
    if not ways:
        return None
    common = {'num_classes': num_classes, 'seed': seed}
    if args.splicemix_grids:
        return SpliceMix(**splicemix_kwargs(args), **common)
    common['prob'] = args.mixup_prob
    if args.resizemix:
        return ResizeMix(args.resizemix, **common)
    if args.recursivemix:
        return RecursiveMix(args.recursivemix, **common)
    common.update(mode=args.mixup_mode, cutmix_minmax=args.cutmix_minmax or None)
    if args.splice_with:
        alpha = args.mixup if args.splice_with == 'mixup' else args.cutmix
        return SpliceWith(args.splice_with, args.splice_with_ratio, alpha or 1., **common)
    return Mixup(args.mixup, args.cutmix, switch_prob=args.mixup_switch_prob, **common)
