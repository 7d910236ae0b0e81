""" Flags that describe a `SpliceMix` """
import argparse
from typing import Any, Union

from ..errors import UsageError
from ..mix import SpliceMix


def add_splicemix_args(parser: argparse.ArgumentParser) -> None:
    """ Add the flags that describe a `SpliceMix` to a parser of one's own.

    Args:
        parser: Parser that gets a group of --splicemix-* flags.
    """
    group = parser.add_argument_group('SpliceMix', 'mixed images: grids of downsampled images, labelled by their union')
    group.add_argument(
        '--splicemix-grids', default='', metavar='GRIDS',
        help="grids to choose from, ROWSxCOLS[-DROPPED][@WEIGHT],..., the paper's are 1x2,2x2,2x3; '' is off "
             "(default: '%(default)s')")
    group.add_argument(
        '--splicemix-ratio', default='0.25', metavar='RATIO',
        help="mixed images as a part of the batch size, or 'ref' for floor(B / (rows * cols - dropped)) "
             '(default: %(default)s)')
    group.add_argument(
        '--splicemix-drop-prob', type=float, default=0.3, metavar='P',
        help="probability of dropping cells of a grid that doesn't say how many (default: %(default)s)")
    group.add_argument(
        '--splicemix-prob', type=float, default=1.0, metavar='P',
        help='probability of mixing a batch (default: %(default)s)')
    group.add_argument(
        '--splicemix-mode', choices=SpliceMix.MODES, default='batch',
        help='draw grid and number of dropped cells per batch or per mixed image (default: %(default)s)')
    group.add_argument(
        '--splicemix-batch', choices=SpliceMix.BATCHES, default='append',
        help='append: all images, then mixed ones; fixed: mixed ones take the place of the first images; exclusive: no '
             'image both regular and in a mixed one; only: mixed ones alone; alternate: mixed ones as a batch of their '
             'own, trained after the regular one (default: %(default)s)')


def splicemix_kwargs(args: argparse.Namespace) -> dict[str, Any]:
    """ Turn the flags of `add_splicemix_args` into arguments of `SpliceMix`.

    Args:
        args: What the parser returned.
    """
    ratio: Union[float, str] = args.splicemix_ratio
    if ratio != 'ref':
        try:
            ratio = float(ratio)
        except ValueError:
            raise UsageError(f"Expected --splicemix-ratio to be a number or 'ref', but got '{ratio}'.") from None
    return {
        'grids': args.splicemix_grids,
        'ratio': ratio,
        'drop_prob': args.splicemix_drop_prob,
        'prob': args.splicemix_prob,
        'mode': args.splicemix_mode,
        'batch': args.splicemix_batch,
    }
