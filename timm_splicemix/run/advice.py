""" One line of advice at the end of a run, from its own training and validation loss """
import argparse
import math
from typing import Optional, Sequence

from ..args import uses_softmax
from ..args.ours import LOSS_PARAMETERS

# Validation loss / training loss after the last epoch, from which on SpliceMix gained in all recorded runs of
# experiments/when; chosen after these were known. With lower ratios it did not always gain, see docs/when.md.
OVERFITS_ABOVE = 10.0
MIN_EPOCHS = 5  # shorter runs get no advice

# Training with one of these flags has another loss than the evaluation, or other labels.
_OTHER_LOSS = (
    'smoothing', 'bce_sum', 'bce_target_thresh', 'bce_pos_weight', 'keep_labels',
    *(f'loss_{name}' for name in LOSS_PARAMETERS))
_MIXERS = ('splicemix_grids', 'mixup', 'cutmix', 'cutmix_minmax', 'resizemix', 'recursivemix', 'splice_with')


def advise(args: argparse.Namespace, multi_label: bool, rows: Sequence[dict[str, str]]) -> Optional[str]:
    """ Return the advice to use SpliceMix if a run without mixed images overfits, otherwise None.

    Args:
        args: Flags of the finished run.
        multi_label: Whether an image can have several classes.
        rows: Rows of summary.csv.
    """
    evaluated = [row for row in rows if row.get('eval_loss')]
    if len(rows) < MIN_EPOCHS or not evaluated or not _are_comparable(args, multi_label):
        return None
    last = evaluated[-1]
    train, val = float(last['train_loss']), float(last['eval_loss'])
    # They differ if the head has losses of its own; timm's script does not record the second one.
    is_plain_loss = math.isclose(train, float(last.get('train_task_loss') or 'nan'), rel_tol=1e-4)
    if not (is_plain_loss and train > 0 and OVERFITS_ABOVE * train <= val < math.inf):
        return None
    return (
        f'Training loss {train:.2g}, validation loss {val:.2g}: the model overfits; SpliceMix (--splicemix-grids auto '
        '--splicemix-weight 1) usually helps here, see docs/when.md.')


def _are_comparable(args: argparse.Namespace, multi_label: bool) -> bool:
    """Whether the training loss of regular images is the loss of the evaluation: binary or softmax cross entropy."""
    is_loss_of_evaluation = args.loss in ('', 'bce') if multi_label else uses_softmax(args, multi_label)
    others = any(getattr(args, name) for name in (*_OTHER_LOSS, *_MIXERS)) or args.class_weights == 'auto'
    return is_loss_of_evaluation and not others
