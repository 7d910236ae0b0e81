""" Flags of timm's train script: augmentation, regularisation and batch norm """
import argparse


def add_augmentation_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group('Augmentation and regularization parameters')
    _add_transform_args(group)
    _add_erasing_args(group)
    _add_mixup_args(group)
    _add_loss_args(group)
    _add_drop_args(group)


def _add_transform_args(group: argparse._ArgumentGroup) -> None:
    group.add_argument('--no-aug', action='store_true', help='train on images transformed as in evaluation')
    group.add_argument(
        '--train-crop-mode', metavar='MODE',
        help="random crop: rrc, rkrc, rkrr, or multiscale, which SpliceMix's paper uses (default: rrc)")
    group.add_argument(
        '--scale', nargs='+', type=float, default=[0.08, 1.0], metavar='PART',
        help='range of the area that a crop keeps; small crops lose labelled objects, try 0.5 1 (default: 0.08 1)')
    group.add_argument(
        '--ratio', nargs='+', type=float, default=[3 / 4, 4 / 3], metavar='RATIO',
        help='range of width to height of a crop (default: 3/4 to 4/3)')
    group.add_argument(
        '--hflip', type=float, default=0.5, metavar='P', help='probability of mirroring (default: %(default)s)')
    group.add_argument(
        '--vflip', type=float, default=0., metavar='P',
        help='probability of turning upside down, right for images from above (default: %(default)s)')
    group.add_argument(
        '--color-jitter', type=float, default=0.4, metavar='STRENGTH',
        help='change of brightness, contrast and saturation, without effect beside most of --aa (default: %(default)s)')
    group.add_argument(
        '--color-jitter-prob', type=float, metavar='P', help='probability of --color-jitter (default: always)')
    group.add_argument(
        '--grayscale-prob', type=float, metavar='P', help='probability of losing all colour (default: 0)')
    group.add_argument('--gaussian-blur-prob', type=float, metavar='P', help='probability of blurring (default: 0)')
    group.add_argument(
        '--aa', metavar='POLICY',
        help='AutoAugment, RandAugment or AugMix policy, such as rand-m9-mstd0.5-inc1 (default: none)')
    group.add_argument(
        '--aug-repeats', type=float, default=0, metavar='N',
        help='times that an image comes in a row, each time transformed anew (default: %(default)s)')
    group.add_argument(
        '--aug-splits', type=int, default=0, metavar='N',
        help='views of each image, the first without --aa: 0, or 2 and more (default: %(default)s)')
    group.add_argument(
        '--train-interpolation', default='random', metavar='NAME',
        help='how training resizes: bilinear, bicubic or random (one of the two) (default: %(default)s)')


def _add_erasing_args(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        '--reprob', type=float, default=0., metavar='P',
        help='probability of erasing a rectangle; labels stay, even of what is erased (default: %(default)s)')
    group.add_argument(
        '--remode', default='pixel', metavar='MODE',
        help='what fills it: const (nothing), rand (one colour) or pixel (noise) (default: %(default)s)')
    group.add_argument(
        '--recount', type=int, default=1, metavar='N', help='most rectangles in an image (default: %(default)s)')
    group.add_argument(
        '--resplit', action='store_true', help='erase nothing in the first view of --aug-splits')


def _add_mixup_args(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        '--mixup', type=float, default=0., metavar='ALPHA',
        help='Mixup of this alpha, 0 is off; not together with --splicemix-grids (default: %(default)s)')
    group.add_argument(
        '--cutmix', type=float, default=0., metavar='ALPHA',
        help='CutMix of this alpha, 0 is off; not together with --splicemix-grids (default: %(default)s)')
    group.add_argument(
        '--cutmix-minmax', nargs='+', type=float, metavar='PART',
        help='least and greatest side of what CutMix cuts; turns CutMix on (default: by alpha)')
    group.add_argument(
        '--mixup-prob', type=float, default=1.0, metavar='P',
        help='probability of mixing by --mixup or --cutmix (default: %(default)s)')
    group.add_argument(
        '--mixup-switch-prob', type=float, default=0.5, metavar='P',
        help='probability of CutMix when both are on (default: %(default)s)')
    group.add_argument(
        '--mixup-mode', default='batch', metavar='MODE',
        help='draw per batch, pair or elem (default: %(default)s)')
    group.add_argument(
        '--mixup-off-epoch', type=int, default=0, metavar='N',
        help='epoch from which on nothing is mixed, 0 is never (default: %(default)s)')


def _add_loss_args(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        '--smoothing', type=float, default=0.1, metavar='EPS',
        help='label smoothing; on multi-label data 0 unless given (default: %(default)s)')
    group.add_argument(
        '--jsd-loss', action='store_true', help='cross entropy and agreement of the views of --aug-splits (AugMix)')
    group.add_argument(
        '--bce-loss', action='store_true',
        help='binary cross entropy on single-label data; multi-label data have it by themselves, see --loss')
    group.add_argument(
        '--bce-sum', action='store_true', help='sum binary cross entropy over the classes instead of averaging')
    group.add_argument(
        '--bce-target-thresh', type=float, metavar='T',
        help='make soft targets 1 above this and 0 below, for binary cross entropy (default: keep them soft)')
    group.add_argument(
        '--bce-pos-weight', type=float, metavar='WEIGHT',
        help='weight of positives in binary cross entropy; more than 1 favours recall (default: 1)')


def _add_drop_args(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        '--drop', type=float, default=0., metavar='P', help='dropout before the classifier (default: %(default)s)')
    group.add_argument('--drop-connect', type=float, metavar='P', help='old name of --drop-path')
    group.add_argument(
        '--drop-path', type=float, metavar='P', help="stochastic depth: branches left out (default: the model's own)")
    group.add_argument(
        '--drop-block', type=float, metavar='P', help="areas of feature maps left out (default: the model's own)")


def add_batch_norm_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group('Batch norm parameters')
    group.add_argument(
        '--bn-momentum', type=float, metavar='M', help="momentum of running statistics (default: the model's own)")
    group.add_argument('--bn-eps', type=float, metavar='EPS', help="epsilon (default: the model's own)")
    group.add_argument(
        '--sync-bn', action='store_true', help='statistics over all GPUs; for batches that are small on each')
    group.add_argument(
        '--dist-bn', default='reduce', metavar='HOW',
        help="running statistics after an epoch: reduce (mean of all GPUs), broadcast (those of the first) or '' (each "
             'its own) (default: %(default)s)')
    group.add_argument(
        '--split-bn', action='store_true', help='a batch norm of its own for each view of --aug-splits')
