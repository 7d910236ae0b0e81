""" Flags of timm's train script: optimiser and learning rate """
import argparse

from .kwargs import KwargsAction


def add_optimizer_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group('Optimizer parameters')
    group.add_argument(
        '--opt', default='sgd', metavar='NAME',
        help="optimiser of timm's, sgd is with Nesterov momentum, momentum is without (default: %(default)s)")
    group.add_argument('--opt-eps', type=float, metavar='EPS', help="epsilon (default: the optimiser's own)")
    group.add_argument(
        '--opt-betas', nargs='+', type=float, metavar='BETA', help='betas of Adam and its kin (default: their own)')
    group.add_argument('--momentum', type=float, default=0.9, metavar='M', help='momentum (default: %(default)s)')
    group.add_argument(
        '--weight-decay', type=float, default=2e-5, metavar='DECAY',
        help="weight decay, not of biases and norms; SpliceMix's paper has 1e-4 (default: %(default)s)")
    group.add_argument(
        '--clip-grad', type=float, metavar='LIMIT', help='clip gradients at this limit (default: no clipping)')
    group.add_argument(
        '--clip-mode', default='norm', metavar='MODE',
        help='what --clip-grad limits: norm of all, value of each, or agc, relative to its weight '
             '(default: %(default)s)')
    group.add_argument(
        '--layer-decay', type=float, metavar='FACTOR',
        help='factor between the learning rates of a layer and the next, for fine-tuning transformers (default: 1)')
    group.add_argument(
        '--layer-decay-min-scale', type=float, default=0, metavar='SCALE',
        help='least scale that --layer-decay comes down to (default: %(default)s)')
    group.add_argument(
        '--layer-decay-no-opt-scale', type=float, metavar='SCALE',
        help='freeze layers that --layer-decay scales by less than this (default: freeze none)')
    group.add_argument(
        '--opt-kwargs', nargs='*', default={}, action=KwargsAction, metavar='KEY=VALUE',
        help='further arguments of the optimiser, such as foreach=True')


def add_schedule_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group('Learning rate schedule parameters')
    _add_rate_args(group)
    _add_noise_and_cycle_args(group)
    _add_epoch_args(group)


def _add_rate_args(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        '--sched', default='cosine', metavar='NAME',
        help='schedule: cosine, tanh, step, multistep, plateau, poly or none (default: %(default)s)')
    group.add_argument(
        '--sched-on-updates', action='store_true', help='change the rate after each update instead of each epoch')
    group.add_argument(
        '--lr', type=float, metavar='LR', help='learning rate, whatever the batch size (default: from --lr-base)')
    group.add_argument(
        '--lr-base', type=float, default=0.1, metavar='LR',
        help='learning rate for a batch of --lr-base-size, from which that of the real batch follows '
             '(default: %(default)s)')
    group.add_argument(
        '--lr-base-size', type=int, default=256, metavar='N',
        help='batch size, of all GPUs together, that --lr-base is for (default: %(default)s)')
    group.add_argument(
        '--lr-base-scale', default='', metavar='HOW',
        help='how the rate grows with the batch: linear or sqrt (default: sqrt for Ada* and LAMB, else linear)')
    group.add_argument(
        '--warmup-lr', type=float, default=1e-5, metavar='LR',
        help='rate at the start of warm-up (default: %(default)s)')
    group.add_argument(
        '--min-lr', type=float, default=0, metavar='LR', help='rate that the schedule ends at (default: %(default)s)')


def _add_noise_and_cycle_args(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        '--lr-noise', nargs='+', type=float, metavar='PART',
        help='add noise to the rate from this part of the epochs on, or between two parts (default: no noise)')
    group.add_argument(
        '--lr-noise-pct', type=float, default=0.67, metavar='PART',
        help='most that noise changes the rate by, as a part of it (default: %(default)s)')
    group.add_argument(
        '--lr-noise-std', type=float, default=1.0, metavar='STD',
        help='standard deviation of the noise (default: %(default)s)')
    group.add_argument(
        '--lr-cycle-mul', type=float, default=1.0, metavar='FACTOR',
        help='how much longer each cycle is than the one before (default: %(default)s)')
    group.add_argument(
        '--lr-cycle-decay', type=float, default=0.5, metavar='FACTOR',
        help='how much lower each cycle starts than the one before (default: %(default)s)')
    group.add_argument(
        '--lr-cycle-limit', type=int, default=1, metavar='N', help='number of cycles (default: %(default)s)')
    group.add_argument(
        '--lr-k-decay', type=float, default=1.0, metavar='K',
        help='exponent of time in cosine and poly: more than 1 keeps the rate high for longer (default: %(default)s)')


def _add_epoch_args(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        '--epochs', type=int, default=300, metavar='N',
        help="epochs to train; fine-tuning needs fewer, SpliceMix's paper has 80 (default: %(default)s)")
    group.add_argument(
        '--epoch-repeats', type=float, default=0., metavar='N',
        help='passes over the data that count as one epoch, 0 is one (default: %(default)s)')
    group.add_argument(
        '--start-epoch', type=int, metavar='N', help='epoch to start at, from 0 (default: 0, or where --resume was)')
    group.add_argument(
        '--decay-milestones', nargs='+', type=int, default=[90, 180, 270], metavar='EPOCH',
        help='epochs at which multistep lowers the rate (default: 90 180 270)')
    group.add_argument(
        '--decay-epochs', type=float, default=90, metavar='N',
        help='epochs between the steps of step (default: %(default)s)')
    group.add_argument(
        '--warmup-epochs', type=int, default=5, metavar='N',
        help='epochs in which the rate climbs from --warmup-lr (default: %(default)s)')
    group.add_argument(
        '--warmup-prefix', action='store_true', help='let the schedule begin after warm-up instead of with it')
    group.add_argument(
        '--cooldown-epochs', type=int, default=0, metavar='N',
        help='epochs at --min-lr, added after the schedule (default: %(default)s)')
    group.add_argument(
        '--patience-epochs', type=int, default=10, metavar='N',
        help='epochs without a better metric after which plateau lowers the rate; to stop then, see --patience '
             '(default: %(default)s)')
    group.add_argument(
        '--decay-rate', '--dr', type=float, default=0.1, metavar='FACTOR',
        help='factor of each step of step, multistep and plateau (default: %(default)s)')
