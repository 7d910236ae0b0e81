""" Flags that set the parameters of a multi-label loss """
import argparse
from typing import Any, Sequence

from ..errors import UsageError
from ..loss import (
    LOSSES,
    PARTIAL,
    REDUCTIONS,
    loss_parameters,
)

CLASS_WEIGHTS = ('none', 'auto')
# Each is the flag --loss-NAME and the parameter NAME of the losses that have it.
_PARAMETERS = {
    'reduction': {'choices': REDUCTIONS, 'help': 'mean over all entries, their sum, or sum over classes and mean over '
                                                 'images'},
    'eps': {'type': float, 'metavar': 'E', 'help': 'smoothing of each label: 1 becomes 1 - E, and 0 becomes E'},
    'gamma': {'type': float, 'metavar': 'G', 'help': 'focusing exponent'},
    'alpha': {'type': float, 'metavar': 'A', 'help': 'weight of positives, with 1 - A that of negatives'},
    'gamma_pos': {'type': float, 'metavar': 'G', 'help': 'focusing exponent of positives'},
    'gamma_neg': {'type': float, 'metavar': 'G', 'help': 'focusing exponent of negatives'},
    'clip': {'type': float, 'metavar': 'P', 'help': 'probability up to which a negative has no loss'},
    'detach_focus': {'action': argparse.BooleanOptionalAction,
                     'help': 'let no gradient go through the focusing weights'},
    'margin': {'type': float, 'metavar': 'M', 'help': 'what is taken from the logits of positives'},
    'lamb': {'type': float, 'metavar': 'L', 'help': 'where the hill of negatives ends'},
    'tau': {'type': float, 'metavar': 'P', 'help': 'probability above which a negative is taken as positive'},
    'start_epoch': {'type': int, 'metavar': 'N', 'help': 'first epoch, from 0, in which that is done'},
    'partial': {'choices': PARTIAL, 'help': 'what becomes of unknown labels'},
    'gamma_unknown': {'type': float, 'metavar': 'G', 'help': 'focusing exponent of unknown labels'},
    'topk': {'type': int, 'metavar': 'K', 'help': 'likely positives per image that selective ignores'},
    'prior': {'metavar': 'FILE', 'help': 'how frequent each class is: a number, or name,number, in each line; '
                                         'selective ignores frequent ones'},
    'prior_threshold': {'type': float, 'metavar': 'P', 'help': 'prior above which a class is frequent'},
}


def _flag(parameter: str) -> str:
    return f"--loss-{parameter.replace('_', '-')}"


def _takers(parameter: str) -> dict[str, Any]:
    """The losses that have a parameter, with their defaults of it."""
    return {name: loss_parameters(name)[parameter] for name in LOSSES if parameter in loss_parameters(name)}


def _one_of(names: Sequence[str]) -> str:
    return ' or '.join(filter(None, (', '.join(names[:-1]), names[-1])))


def add_loss_args(parser: argparse.ArgumentParser) -> None:
    """ Add the flags that set the parameters of losses.

    --loss itself is not among them, nor are timm's --smoothing and --bce-*, which set those of 'bce'.

    Args:
        parser: Parser that gets a group of flags.
    """
    group = parser.add_argument_group('Loss', 'parameters of --loss; each has the default of the loss unless given')
    for parameter, options in _PARAMETERS.items():
        takers = _takers(parameter)
        if len(takers) == len(LOSSES):
            note = f'default: {takers["bce"]}'
        else:
            note = ', '.join(f'{name}: {"none" if value is None else value}' for name, value in takers.items())
        group.add_argument(_flag(parameter), **{**options, 'help': f'{options["help"]} ({note})'})
    group.add_argument(
        '--class-weights', choices=CLASS_WEIGHTS, default='none',
        help='weigh positives of each class by negatives / positives in the training set '
             f'({", ".join(_takers("pos_weight"))}; default: %(default)s)')


def _refuse(flag: str, parameter: str, name: str) -> None:
    raise UsageError(f'Expected {flag} with --loss {_one_of(list(_takers(parameter)))}, but got --loss {name}.')
