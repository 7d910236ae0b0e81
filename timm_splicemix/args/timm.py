""" The flags of timm's train and validate scripts, with timm's names and defaults """
import argparse
from typing import Any

from ..data import dataset_names
from ..data.transforms import CROP_MODES
from .command import add_refused_args
from .config import KwargsAction
from .types import above, at_least, fraction, integer, number, number_or, probability

SCHEDULES = ('cosine', 'tanh', 'step', 'multistep', 'plateau', 'poly', 'none')
_INTERPOLATIONS = ('nearest', 'bilinear', 'bicubic', 'box', 'hamming', 'lanczos', '')
_COMPILE_MODES = ('default', 'reduce-overhead', 'max-autotune', 'max-autotune-no-cudagraphs')

_NAFLEX = 'SpliceMix cannot splice the patch sequences of NaFlex batches'
_SIZES = 'a run with batches of varying image sizes cannot be resumed exactly'
_DISTILLATION = 'the task has no teacher; distil with timm, then fine-tune here'
_SPLITS = 'augmentation splits do not combine with mixed images'
# Flags of the train script that are accepted with their default only: (default, reason)
REFUSED_IN_TRAINING = {
    'naflex_loader': (False, _NAFLEX),
    'naflex_train_seq_lens': ([128, 256, 576, 784, 1024], _NAFLEX),
    'naflex_max_seq_len': (576, _NAFLEX),
    'naflex_patch_sizes': (None, _NAFLEX),
    'naflex_patch_size_probs': (None, _NAFLEX),
    'naflex_loss_scale': ('linear', _NAFLEX),
    'naflex_patchify_channels_first': (False, _NAFLEX),
    'train_img_sizes': (None, _SIZES),
    'train_batch_sizes': (None, _SIZES),
    'train_size_probs': (None, _SIZES),
    'train_size_schedule': ('constant', _SIZES),
    'train_size_schedule_spread': (0.65, _SIZES),
    'train_size_random_mix': (0.1, _SIZES),
    'variable_batch_loss_scale': ('none', _SIZES),
    'kd_model_name': (None, _DISTILLATION),
    'kd_distill_type': ('logit', _DISTILLATION),
    'kd_loss_type': ('kl', _DISTILLATION),
    'distill_loss_weight': (None, _DISTILLATION),
    'task_loss_weight': (None, _DISTILLATION),
    'kd_temperature': (4.0, _DISTILLATION),
    'kd_student_feature_dim': (None, _DISTILLATION),
    'kd_teacher_feature_dim': (None, _DISTILLATION),
    'kd_token_distill_type': ('soft', _DISTILLATION),
    'aug_splits': (0, _SPLITS),
    'jsd_loss': (False, _SPLITS),
    'split_bn': (False, _SPLITS),
    'torchscript': (False, 'a scripted model does not expose its feature map; use --torchcompile'),
    'fuser': ('', 'TorchScript is not used in training; use --torchcompile'),
    'tta': (0, 'evaluation during training uses one view per image; use validate.py --tta flip'),
    'worker_seeding': ('all', 'each sample is seeded by its index, whichever worker loads it'),
    'lr_noise_std': (1.0, "timm's schedulers ignore it and draw noise of standard deviation 1"),
}
_HIDDEN = 'evaluation uses all labels; only training hides some'
# The same for the validate script, and for flags of training that evaluation has no use for
REFUSED_IN_VALIDATION = {
    'naflex_loader': (False, 'models of this package are not trained on NaFlex batches'),
    'naflex_max_seq_len': (576, 'models of this package are not trained on NaFlex batches'),
    'num_gpu': (1, 'each GPU has its own process; use torchrun --nproc-per-node N validate.py'),
    'real_labels': ('', 'ReaL labels cover the 50,000 ImageNet validation images only; convert them to a csv data set'),
    'tf_preprocessing': (False, 'images are decoded by PIL or torchvision; see --decoder'),
    'keep_labels': (None, _HIDDEN),
    'keep_labels_seed': (0, _HIDDEN),
    'voc_difficult': (None, 'it applies to training; use --voc-difficult-eval'),
}


def add_timm_train_args(parser: argparse.ArgumentParser) -> None:
    """ Add all flags of timm's train script, so that its command lines and configs are accepted.

    They include the flags of `add_dataset_args`: call one or the other.
    """
    _add_train_data_args(parser)
    _add_train_model_args(parser)
    _add_train_device_args(parser)
    _add_optimizer_args(parser)
    _add_schedule_args(parser)
    _add_augmentation_args(parser)
    _add_regularization_args(parser)
    _add_misc_args(parser)
    add_refused_args(parser, REFUSED_IN_TRAINING)


def add_timm_validate_args(parser: argparse.ArgumentParser) -> None:
    """ Add all flags of timm's validate script, so that its command lines are accepted.

    They include the flags of `add_dataset_args`: call one or the other.
    """
    add = parser.add_argument_group('Dataset parameters').add_argument
    add_source_args(add)
    add('--split', default='validation', metavar='NAME',
        help="split to evaluate; 'validation' finds the data set's own name (val2014, test, val)")
    add('--num-samples', type=at_least(1), metavar='N',
        help='size of the split of a streamed data set or of shards (default: from its metadata)')

    group = parser.add_argument_group('Model parameters')
    add = group.add_argument
    add('--model', '-m', default='dpn92', metavar='MODEL',
        help='any timm model; checkpoints of this package store theirs (default: %(default)s)')
    add('--pretrained', action='store_true', help="evaluate timm's pretrained weights")
    add('--checkpoint', default='', metavar='FILE',
        help='checkpoint, folder of a run, exported .onnx or .safetensors file, or hf-hub:USER/NAME, to evaluate')
    add_ema_args(group)
    add_input_args(add)
    add('--use-train-size', action='store_true',
        help='evaluate at the training size of pretrained weights even if timm has a larger test size')
    add('--crop-mode', choices=CROP_MODES,
        help="center crops, squash ignores the aspect ratio, border pads (default: the model's own)")
    add('--crop-border-pixels', type=at_least(0), metavar='N', help='pixels to crop at each border before resizing')
    add('--test-pool', action='store_true', help='test-time pooling for images larger than in pre-training')
    add('--reparam', action='store_true', help='fuse the branches of reparameterizable models')
    _add_build_args(add)

    group = parser.add_argument_group('Scripting / codegen')
    group.add_argument(
        '--fuser', default='', choices=['', 'te', 'old', 'legacy', 'nvfuser', 'nvf'], metavar='NAME',
        help="TorchScript fuser: te, old or nvfuser (default: torch's own)")
    one_of = _add_compile_args(group)
    one_of.add_argument('--torchscript', action='store_true', help='script the model')
    one_of.add_argument('--aot-autograd', action='store_true', help='compile the model with AOT autograd')

    _add_precision_args(parser.add_argument_group('Device').add_argument)
    add = parser.add_argument_group('Results').add_argument
    add('--results-file', default='', metavar='FILE', help='also write the metrics to this file')
    add('--results-format', default='csv', choices=['csv', 'json'], help='format of --results-file')
    add('--valid-labels', default='', metavar='FILE',
        help='file with the indices of the model outputs to evaluate, for a data set with fewer classes')
    add('--metrics-avg', choices=['micro', 'macro', 'weighted'],
        help='also compute precision, recall and F1 of single-label data with this average')

    add = parser.add_argument_group('Miscellaneous parameters').add_argument
    add('-b', '--batch-size', type=at_least(1), default=256, metavar='N', help='images per batch')
    _add_loader_args(add)
    add('--log-freq', type=at_least(1), default=10, metavar='N', help='batches between log lines')
    add('--retry', action='store_true', help='retry with smaller batches when memory runs out')
    add('--seed', type=integer, default=42, metavar='N', help='random seed')
    add_refused_args(parser, REFUSED_IN_VALIDATION)


def add_dataset_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of timm that name a data set."""
    _add_dataset_args(parser.add_argument_group('Data set').add_argument)


def add_ema_args(group: Any) -> None:
    """Add --use-ema of timm and its opposite, --no-ema, to an argument group."""
    one_of = group.add_mutually_exclusive_group()
    one_of.add_argument(
        '--use-ema', action='store_true',
        help='require the EMA weights of the checkpoint; by default they are used if it has them')
    one_of.add_argument('--no-ema', action='store_true', help='use the plain weights, even if there are EMA weights')


def add_input_args(add: Any) -> None:
    """Add the flags for the shape and normalization of images, by the `add_argument` of a group."""
    add('--num-classes', type=at_least(1), metavar='N', help="number of classes (default: the data set's)")
    add('--gp', metavar='POOL',
        help="global pooling: max (as in SpliceMix's paper), avg, avgmax, ... (default, and '': the model's own)")
    add('--img-size', type=at_least(1), metavar='PIXELS',
        help="image height and width; multi-label papers mostly use 448 (default: the model's own)")
    add('--in-chans', type=at_least(1), metavar='N', help="input channels (default: the model's own)")
    add('--input-size', nargs=3, type=at_least(1), metavar='N',
        help='channels, height and width, e.g. 3 448 448; overrides --img-size')
    add('--crop-pct', type=fraction, metavar='FRACTION',
        help="fraction of the resized image that evaluation keeps; 1 keeps all objects (default: the model's own)")
    add('--mean', nargs='+', type=number, metavar='MEAN', help="normalization mean (default: the model's own)")
    add('--std', nargs='+', type=above(0.), metavar='STD',
        help="normalization standard deviation (default: the model's own)")
    add('--interpolation', default='', choices=_INTERPOLATIONS, metavar='NAME',
        help="evaluation resize mode: bilinear, bicubic, ... (default: the model's own)")


def _add_dataset_args(add: Any) -> None:
    add('--data-dir', metavar='DIR', help="folder of the data set (default: a cache for 'shapes')")
    add('--dataset', default='', metavar='NAME',
        help=f"one of {', '.join(dataset_names())} (default: a folder with one sub-folder per class)")
    add('--dataset-download', action='store_true',
        help='download the data set if it is missing (COCO, VOC, some of timm)')
    add('--class-map', default='', metavar='FILE',
        help='file with one class name per line, in the folder of the data set or the current one (default: the data '
             "set's own)")
    add('--input-key', metavar='NAME', help='column or key of the images (hfds, json)')
    add('--target-key', metavar='NAME', help='column, field or key of the labels (hfds, wds, json)')


def add_source_args(add: Any) -> None:
    """Add the flags that name a data set and say how to read it, by the `add_argument` of a parser or group."""
    add('data', nargs='?', metavar='DIR', help='folder of the data set, same as --data-dir')
    _add_dataset_args(add)
    add('--input-img-mode', metavar='MODE', help='PIL mode to load images in, e.g. RGB or L (default: from --in-chans)')
    add('--dataset-trust-remote-code', action='store_true',
        help='allow a Hugging Face data set to run its own code; only for authors you trust')


def _add_build_args(add: Any) -> None:
    add('--channels-last', action='store_true', help='use the channels-last memory format')
    add('--fast-norm', action='store_true', help='let normalization layers compute in the low precision of --amp')
    add('--model-kwargs', nargs='*', default={}, action=KwargsAction, metavar='KEY=VALUE',
        help='further arguments of the model, e.g. drop_rate=0.1')


def _add_compile_args(group: Any) -> Any:
    """Add the flags of torch.compile; returns the group of ways to compile, which exclude each other."""
    group.add_argument(
        '--torchcompile-mode', choices=_COMPILE_MODES, metavar='MODE',
        help=f"mode of torch.compile: {', '.join(_COMPILE_MODES)}")
    one_of = group.add_mutually_exclusive_group()
    one_of.add_argument(
        '--torchcompile', nargs='?', const='inductor', metavar='BACKEND',
        help='compile the model with torch.compile (without a value: %(const)s)')
    return one_of


def _add_precision_args(add: Any) -> None:
    add('--device', default='cuda', metavar='DEVICE', help='device; cuda falls back to cpu if there is no GPU')
    add('--amp', action='store_true', help='automatic mixed precision')
    add('--amp-dtype', default='float16', choices=['float16', 'bfloat16'], help='low precision of --amp')
    add('--model-dtype', choices=['float32', 'float16', 'bfloat16'],
        help='precision of the weights, instead of --amp (default: float32)')


def _add_loader_args(add: Any) -> None:
    add('-j', '--workers', type=at_least(0), default=4, metavar='N', help='data loading workers per process')
    add('--pin-mem', action='store_true', help='pin host memory for faster copies to the GPU')
    add('--no-prefetcher', action='store_true', help='normalize in the workers instead of on the device')


def _add_train_data_args(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group('Dataset parameters').add_argument
    add_source_args(add)
    add('--train-split', default='train', metavar='NAME', help='split to train on')
    add('--val-split', default='validation', metavar='NAME',
        help="split to evaluate; 'validation' finds the data set's own name (val2014, test, val)")
    for name in ('train', 'val'):
        add(f'--{name}-num-samples', type=at_least(1), metavar='N',
            help=f'size of the {name} split of a streamed data set or of shards (default: from its metadata)')
    add('--train-batches-per-epoch', '--train-steps-per-epoch', type=at_least(1), metavar='N',
        help='batches per epoch (default: the whole data set)')


def _add_train_model_args(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group('Model parameters').add_argument
    add('--model', default='resnet50', metavar='MODEL', help='any timm model')
    add('--pretrained', action='store_true', help="start from timm's pretrained weights")
    add('--pretrained-path', metavar='FILE',
        help='load pretrained weights from this file or run; a classifier of another shape is re-initialized')
    add('--initial-checkpoint', default='', metavar='FILE', help='start from all weights of this checkpoint or run')
    add('--resume', default='', metavar='FILE',
        help='resume a run from its folder or checkpoint: weights, optimizer, epoch, flags')
    add('--no-resume-opt', action='store_true', help='do not resume the optimizer state')
    add_input_args(add)
    add('-b', '--batch-size', type=at_least(1), default=128, metavar='N',
        help='images per batch and process, before mixing')
    add('-vb', '--validation-batch-size', type=at_least(1), metavar='N',
        help='batch size of evaluation (default: --batch-size)')
    _add_build_args(add)
    add('--grad-accum-steps', type=at_least(1), default=1, metavar='N', help='batches per optimizer update')
    add('--grad-checkpointing', action='store_true', help='recompute activations in the backward pass to save memory')
    add('--head-init-scale', type=number, metavar='FACTOR',
        help='scale the initial weights of the classifier; overrides --head-init-std')
    add('--head-init-bias', type=number_or('prior'), metavar='BIAS',
        help='initial bias of the classifier: a number, e.g. -2.5, or prior for the class frequencies')


def _add_train_device_args(parser: argparse.ArgumentParser) -> None:
    _add_compile_args(parser.add_argument_group('Scripting / codegen'))

    add = parser.add_argument_group('Device & distributed').add_argument
    _add_precision_args(add)
    add('--no-ddp-bb', action='store_true', help='do not broadcast buffers of the first process in DDP')
    add('--synchronize-step', action='store_true', help='synchronize with the device after each step (slow)')
    add('--local_rank', type=integer, default=0, metavar='N', help='set by old launchers; torchrun does not need it')
    add('--device-modules', nargs='+', metavar='MODULE', help='Python modules to import that add a device to torch')


def _add_optimizer_args(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group('Optimizer parameters').add_argument
    add('--opt', default='sgd', metavar='NAME', help='timm optimizer; sgd uses Nesterov momentum, momentum does not')
    add('--opt-eps', type=number, metavar='EPS', help="epsilon (default: the optimizer's own)")
    add('--opt-betas', nargs='+', type=number, metavar='BETA', help="betas (default: the optimizer's own)")
    add('--momentum', type=number, default=0.9, metavar='M', help='momentum')
    add('--weight-decay', type=at_least(0.), default=2e-5, metavar='DECAY',
        help="weight decay, not applied to biases and norms; SpliceMix's paper uses 1e-4")
    add('--clip-grad', type=above(0.), metavar='LIMIT', help='clip gradients (default: no clipping)')
    add('--clip-mode', default='norm', choices=['norm', 'value', 'agc'], help='what --clip-grad limits')
    add('--layer-decay', type=above(0.), metavar='FACTOR',
        help='layer-wise learning rate decay, for fine-tuning transformers, e.g. 0.75 (default: 1)')
    add('--layer-decay-min-scale', type=number, default=0, metavar='SCALE', help='minimum scale of --layer-decay')
    add('--layer-decay-no-opt-scale', type=number, metavar='SCALE',
        help='freeze layers whose --layer-decay scale is below this')
    add('--opt-kwargs', nargs='*', default={}, action=KwargsAction, metavar='KEY=VALUE',
        help='further arguments of the optimizer, e.g. foreach=True')


def _add_schedule_args(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group('Learning rate schedule parameters').add_argument
    add('--sched', default='cosine', choices=SCHEDULES, metavar='NAME', help=f"one of {', '.join(SCHEDULES)}")
    add('--sched-on-updates', action='store_true', help='update the rate after each update instead of each epoch')
    add('--lr', type=at_least(0.), metavar='LR', help='learning rate (default: from --lr-base and the batch size)')
    add('--lr-base', type=at_least(0.), default=0.1, metavar='LR', help='learning rate at --lr-base-size')
    add('--lr-base-size', type=at_least(1), default=256, metavar='N', help='total batch size that --lr-base refers to')
    add('--lr-base-scale', default='', choices=['linear', 'sqrt', ''], metavar='HOW',
        help='scaling with the batch size: linear or sqrt (default: sqrt for Ada* and LAMB, else linear)')
    add('--lr-noise', nargs='+', type=number, metavar='FRACTION',
        help='add noise to the rate from this fraction of the epochs on, or between two fractions')
    add('--lr-noise-pct', type=at_least(0.), default=0.67, metavar='FRACTION', help='limit of the noise, relative')
    add('--lr-cycle-mul', type=above(0.), default=1.0, metavar='FACTOR', help='length of a cycle relative to the last')
    add('--lr-cycle-decay', type=number, default=0.5, metavar='FACTOR', help='rate of a cycle relative to the last')
    add('--lr-cycle-limit', type=at_least(1), default=1, metavar='N', help='number of cycles')
    add('--lr-k-decay', type=number, default=1.0, metavar='K', help='exponent of time in cosine and poly')
    add('--warmup-lr', type=at_least(0.), default=1e-5, metavar='LR', help='learning rate at the start of warm-up')
    add('--min-lr', type=at_least(0.), default=0, metavar='LR', help='learning rate at the end of the schedule')
    add('--epochs', type=at_least(1), default=300, metavar='N',
        help="epochs of the schedule; fine-tuning needs fewer, SpliceMix's paper uses 80")
    add('--epoch-repeats', type=at_least(0.), default=0., metavar='N', help='repeats of a streamed data set per epoch')
    add('--start-epoch', type=at_least(0), metavar='N', help='first epoch (default: 0, or where --resume continues)')
    add('--decay-milestones', nargs='+', type=integer, default=[90, 180, 270], metavar='EPOCH',
        help='epochs at which multistep decays')
    add('--decay-epochs', type=above(0.), default=90, metavar='N', help='interval at which step decays')
    add('--warmup-epochs', type=at_least(0), default=5, metavar='N', help='epochs of warm-up')
    add('--warmup-prefix', action='store_true', help='do not count warm-up as part of the schedule')
    add('--cooldown-epochs', type=at_least(0), default=0, metavar='N', help='epochs at --min-lr after the schedule')
    add('--patience-epochs', type=at_least(0), default=10, metavar='N',
        help='epochs without a better metric before plateau decays; --patience stops the run')
    add('--decay-rate', '--dr', type=number, default=0.1, metavar='FACTOR', help='decay of step, multistep, plateau')


def _add_augmentation_args(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group('Augmentation and regularization parameters').add_argument
    add('--no-aug', action='store_true', help='transform training images as in evaluation')
    add('--train-crop-mode', metavar='MODE',
        help="random crop: rrc, rkrc, rkrr, or multiscale as in SpliceMix's paper (default: rrc)")
    add('--scale', nargs='+', type=number, default=[0.08, 1.0], metavar='FRACTION',
        help='area range of random crops; small crops lose labelled objects, try 0.5 1')
    add('--ratio', nargs='+', type=number, default=[3 / 4, 4 / 3], metavar='RATIO',
        help='aspect ratio range of random crops (default: 3/4 4/3)')
    add('--hflip', type=probability, default=0.5, metavar='P', help='probability of a horizontal flip')
    add('--vflip', type=probability, default=0., metavar='P', help='probability of a vertical flip')
    add('--color-jitter', type=number, default=0.4, metavar='STRENGTH',
        help='brightness, contrast and saturation jitter; most --aa policies replace it')
    add('--color-jitter-prob', type=probability, metavar='P', help='probability of --color-jitter (default: always)')
    add('--grayscale-prob', type=probability, metavar='P', help='probability of conversion to grayscale (default: 0)')
    add('--gaussian-blur-prob', type=probability, metavar='P', help='probability of Gaussian blur (default: 0)')
    add('--aa', metavar='POLICY', help='AutoAugment, RandAugment or AugMix policy, e.g. rand-m9-mstd0.5-inc1')
    add('--aug-repeats', type=at_least(0.), default=0, metavar='N',
        help='consecutive repeats of each image, each with its own augmentation')
    add('--train-interpolation', default='random', choices=['random', *_INTERPOLATIONS], metavar='NAME',
        help='training resize mode: bilinear, bicubic, ..., or random (bilinear or bicubic)')
    add('--reprob', type=probability, default=0., metavar='P', help='probability of random erasing; labels stay')
    add('--remode', default='pixel', choices=['const', 'rand', 'pixel'],
        help='erase with zeros, one random color, or noise')
    add('--recount', type=at_least(1), default=1, metavar='N', help='maximum number of erased rectangles per image')
    add('--resplit', action='store_true', help='do not erase in the first half of a batch')
    for name, method in (('mixup', 'Mixup'), ('cutmix', 'CutMix')):
        add(f'--{name}', type=at_least(0.), default=0., metavar='ALPHA',
            help=f'{method} with this alpha, instead of SpliceMix; 0 is off')
    add('--cutmix-minmax', nargs='+', type=number, metavar='FRACTION',
        help='range of the side of CutMix boxes, e.g. 0.2 0.8; enables CutMix')
    add('--mixup-prob', type=probability, default=1.0, metavar='P', help='probability of Mixup or CutMix')
    add('--mixup-switch-prob', type=probability, default=0.5, metavar='P', help='probability of CutMix if both are on')
    add('--mixup-mode', default='batch', choices=['batch', 'pair', 'elem'],
        help='draw parameters per batch, pair or image')
    add('--mixup-off-epoch', type=at_least(0), default=0, metavar='N', help='epoch to stop mixing at, 0 for never')
    add('--smoothing', type=number, default=0.1, metavar='EPS',
        help='label smoothing (default: %(default)s, and 0 on multi-label data)')
    add('--bce-loss', action='store_true',
        help='binary cross entropy on single-label data; on multi-label data it is the default, see --loss')
    add('--bce-sum', action='store_true', help='sum binary cross entropy over classes')
    add('--bce-target-thresh', type=number, metavar='T', help='binarize soft targets at this threshold')
    add('--bce-pos-weight', type=number, metavar='WEIGHT',
        help='weight of positives in binary cross entropy; more than 1 favors recall')


def _add_regularization_args(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group('Model regularization').add_argument
    add('--drop', type=probability, default=0., metavar='P', help='dropout before the classifier')
    add('--drop-connect', type=probability, metavar='P', help='old name of --drop-path')
    add('--drop-path', type=probability, metavar='P', help="stochastic depth rate (default: the model's own)")
    add('--drop-block', type=probability, metavar='P', help="drop block rate (default: the model's own)")

    add = parser.add_argument_group('Batch norm parameters').add_argument
    add('--bn-momentum', type=number, metavar='M', help="momentum of running statistics (default: the model's own)")
    add('--bn-eps', type=number, metavar='EPS', help="epsilon (default: the model's own)")
    add('--sync-bn', action='store_true', help='synchronize batch norm statistics between GPUs')
    add('--dist-bn', default='reduce', choices=['broadcast', 'reduce', ''], metavar='HOW',
        help="running statistics after an epoch: reduce (mean), broadcast (the first process's) or ''")

    add = parser.add_argument_group('Model exponential moving average parameters').add_argument
    add('--model-ema', action='store_true', help='keep an exponential moving average (EMA) of the weights')
    add('--model-ema-force-cpu', action='store_true', help='keep the EMA on the CPU: saves GPU memory, not evaluated')
    add('--model-ema-decay', type=probability, default=0.9998, metavar='DECAY', help='decay; 0.9997 is common on COCO')
    add('--model-ema-warmup', action='store_true', help='increase the decay gradually, for short runs')


def _add_misc_args(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group('Miscellaneous parameters').add_argument
    add('--seed', type=integer, default=42, metavar='N', help='random seed')
    add('--log-interval', type=at_least(1), default=50, metavar='N', help='batches between log lines')
    add('--val-interval', type=at_least(1), default=1, metavar='N', help='epochs between evaluations')
    add('--recovery-interval', type=at_least(0), default=0, metavar='N',
        help='batches between recovery checkpoints within an epoch, 0 for none')
    add('--checkpoint-hist', type=at_least(1), default=10, metavar='N', help='number of best checkpoints to keep')
    _add_loader_args(add)
    add('--save-images', action='store_true', help='save the batch as an image at each log line')
    add('--output', default='', metavar='DIR', help='parent folder of runs (default: output/train)')
    add('--experiment', default='', metavar='NAME', help='folder of this run (default: date, model and image size)')
    add('--eval-metric', default='top1', metavar='NAME',
        help='metric of the best checkpoint (default: %(default)s, and mAP on multi-label data)')
    add('--use-multi-epochs-loader', action='store_true', help='keep workers between epochs; always on here')
    add('--log-wandb', action='store_true', help='log to Weights & Biases')
    add('--wandb-project', metavar='NAME', help="project (default: wandb's own)")
    add('--wandb-tags', nargs='+', default=[], metavar='TAG', help='tags of the run')
    add('--wandb-resume-id', default='', metavar='ID', help='run to resume')
