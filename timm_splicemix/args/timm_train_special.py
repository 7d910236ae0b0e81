""" Flags of timm's train script: varying image sizes, NaFlex and distillation """
import argparse

from .timm_shared import add_naflex_args

LOSS_SCALES = ('none', 'sqrt', 'linear')


def add_size_schedule_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group('Scheduled image size parameters')
    group.add_argument(
        '--train-img-sizes', nargs='+', type=int, metavar='PIXELS',
        help='sizes to choose from for each batch (default: always --img-size)')
    group.add_argument(
        '--train-batch-sizes', nargs='+', type=int, metavar='N',
        help='batch size for each of --train-img-sizes (default: --batch-size for all)')
    group.add_argument(
        '--train-size-probs', nargs='+', type=float, metavar='P',
        help='weight of each of --train-img-sizes (default: all the same)')
    group.add_argument(
        '--train-size-schedule', default='constant', choices=['constant', 'progressive'],
        help='constant draws by the weights, progressive goes from the first size to the last (default: %(default)s)')
    group.add_argument(
        '--train-size-schedule-spread', type=float, default=0.65, metavar='STD',
        help='how many neighbours of its current size progressive draws too (default: %(default)s)')
    group.add_argument(
        '--train-size-random-mix', type=float, default=0.1, metavar='PART',
        help='part of the draws of progressive that is among all sizes (default: %(default)s)')
    group.add_argument(
        '--train-batches-per-epoch', '--train-steps-per-epoch', type=int, metavar='N',
        help='batches that count as an epoch (default: all of the data)')
    group.add_argument(
        '--variable-batch-loss-scale', default='none', choices=list(LOSS_SCALES),
        help='how the loss is scaled by the size of the batch relative to --batch-size (default: %(default)s)')


def add_naflex_train_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group('NaFlex parameters')
    add_naflex_args(group)
    group.add_argument(
        '--naflex-train-seq-lens', nargs='+', type=int, default=[128, 256, 576, 784, 1024], metavar='N',
        help='lengths of sequences to train on (default: 128 256 576 784 1024)')
    group.add_argument(
        '--naflex-patch-sizes', nargs='+', type=int, metavar='PIXELS',
        help="sizes of patches to train on (default: the model's own)")
    group.add_argument(
        '--naflex-patch-size-probs', nargs='+', type=float, metavar='P',
        help='probability of each of --naflex-patch-sizes (default: all the same)')
    group.add_argument(
        '--naflex-loss-scale', default='linear', choices=list(LOSS_SCALES),
        help='how the loss is scaled by the size of the batch (default: %(default)s)')
    group.add_argument(
        '--naflex-patchify-channels-first', action='store_true',
        help='order the values of a patch by channel first instead of by place first')


def add_distillation_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group('Knowledge distillation parameters')
    group.add_argument(
        '--kd-model-name', metavar='MODEL', help='teacher, a model of timm with its weights (default: no distillation)')
    group.add_argument(
        '--kd-distill-type', default='logit', choices=['logit', 'feature', 'token'],
        help="what is learnt from the teacher: its logits, its features, or its logits by a token of the student's own "
             '(default: %(default)s)')
    group.add_argument(
        '--kd-loss-type', default='kl', metavar='NAME',
        help='loss between logits: kl, divergence of softmax, which suits one label per image (default: %(default)s)')
    group.add_argument(
        '--distill-loss-weight', type=float, metavar='WEIGHT',
        help='weight of the loss against the teacher (default: 1, or 1 minus --task-loss-weight)')
    group.add_argument(
        '--task-loss-weight', type=float, metavar='WEIGHT', help='weight of the loss against the labels (default: 1)')
    group.add_argument(
        '--kd-temperature', type=float, default=4.0, metavar='T',
        help='temperature that softens the logits (default: %(default)s)')
    group.add_argument(
        '--kd-student-feature-dim', type=int, metavar='N', help="size of the student's features (default: detected)")
    group.add_argument(
        '--kd-teacher-feature-dim', type=int, metavar='N', help="size of the teacher's features (default: detected)")
    group.add_argument(
        '--kd-token-distill-type', default='soft', choices=['soft', 'hard'],
        help="what a token learns: soft, the teacher's distribution, or hard, its best class (default: %(default)s)")
