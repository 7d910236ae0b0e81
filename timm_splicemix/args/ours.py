""" The flags that timm lacks: SpliceMix, other mixers, labels, losses, training, evaluation, prediction """
import argparse
from typing import Any, Optional, Sequence

from ..data import CLASS_ORDERS, DECODERS, DIFFICULT, EMPTY, ON_BAD_IMAGE
from ..data.transforms import CROP_MODES
from ..errors import UsageError
from ..heads import head_options, list_heads
from ..loss import LOSSES, MEANS, PARTIAL, REDUCTIONS, loss_parameters
from ..metrics import PRESETS
from ..mix import AUTO_WEIGHT, SpliceMix, SpliceWith, choose_grids, find_classes, is_auto
from .config import KwargsAction
from .timm import add_ema_args, add_input_args, add_timm_train_args, add_timm_validate_args
from .types import above, at_least, integer, number, number_or, open_fraction, probability

EXPORTS = ('onnx', 'pt2', 'torchscript', 'safetensors')
_PRESETS = (
    'definition of the metrics: paper (F1 of mean precision and recall), asl (mean F1 of classes, threshold 0.8), '
    'interpolated (AP as in VOC 2007)')
# Each is the flag --loss-NAME and the parameter NAME of the losses that have it.
LOSS_PARAMETERS: dict[str, dict[str, Any]] = {
    'reduction': {
        'choices': REDUCTIONS, 'metavar': 'HOW',
        'help': 'mean or sum over all entries, or batchmean: sum over classes, mean over images'},
    'eps': {'type': number, 'metavar': 'E', 'help': 'smoothing of each label: 1 becomes 1 - E, and 0 becomes E'},
    'gamma': {'type': number, 'metavar': 'G', 'help': 'focusing exponent'},
    'alpha': {'type': number, 'metavar': 'A', 'help': 'weight of positives; negatives have 1 - A'},
    'gamma_pos': {'type': number, 'metavar': 'G', 'help': 'focusing exponent of positives'},
    'gamma_neg': {'type': number, 'metavar': 'G', 'help': 'focusing exponent of negatives'},
    'clip': {'type': number, 'metavar': 'P', 'help': 'probability below which negatives have no loss'},
    'detach_focus': {'action': argparse.BooleanOptionalAction, 'help': 'no gradient through the focusing weights'},
    'margin': {'type': number, 'metavar': 'M', 'help': 'margin subtracted from the logits of positives'},
    'lamb': {'type': number, 'metavar': 'L', 'help': 'lambda of the Hill loss of negatives'},
    'tau': {'type': number, 'metavar': 'P', 'help': 'probability above which a negative is treated as a positive'},
    'start_epoch': {'type': integer, 'metavar': 'N', 'help': 'first epoch, from 0, that uses --loss-tau'},
    'partial': {'choices': PARTIAL, 'metavar': 'HOW', 'help': f"treatment of unknown labels: {', '.join(PARTIAL)}"},
    'gamma_unknown': {'type': number, 'metavar': 'G', 'help': 'focusing exponent of unknown labels'},
    'topk': {'type': integer, 'metavar': 'K', 'help': 'most likely unknown labels per image that selective ignores'},
    'prior': {
        'metavar': 'FILE',
        'help': "frequency of each class, 'number' or 'name,number' per line; selective ignores unknown labels of "
                'frequent classes'},
    'prior_threshold': {'type': number, 'metavar': 'P', 'help': 'frequency above which a class is frequent'},
}


def add_train_args(parser: argparse.ArgumentParser) -> None:
    """Add all flags of the train command: ours first, then timm's."""
    add = add_our_train_args(parser).add_argument
    add('--patience', type=at_least(0), default=0, metavar='N',
        help='stop after N epochs without a better metric, 0 for never')
    add('--log-tensorboard', action='store_true', help='write TensorBoard logs to the folder of the run')
    add_timm_train_args(parser)


def add_our_train_args(parser: argparse.ArgumentParser) -> Any:
    """Add the flags that timm's train script lacks, and return the group for flags of the training loop."""
    _add_splicemix_training_args(_add_splicemix_group(parser).add_argument)
    add_label_args(parser)
    _add_split_args(parser.add_argument_group('Splitting').add_argument)
    group = parser.add_argument_group('Multi-label training')
    group.add_argument(
        '--loss', default='', choices=list(LOSSES), metavar='NAME',
        help=f"one of {', '.join(LOSSES)} (default: bce on multi-label data)")
    _add_fine_tuning_args(group.add_argument)
    _add_head_args(parser)
    add_loss_args(parser)
    add_mixer_args(parser)
    return group


def add_validate_args(parser: argparse.ArgumentParser) -> None:
    """Add all flags of the validate command: ours first, then timm's."""
    add = add_our_validate_args(parser).add_argument
    add('--eval-sizes', nargs='+', type=at_least(1), metavar='PIXELS',
        help='low-resolution study: also evaluate at these image sizes, e.g. 448 224 112 64')
    add('--output', metavar='DIR', help='folder of the results (default: a new one in output/validate)')
    add('--export', choices=EXPORTS,
        help='export the model and verify its outputs; needs no data set; torch has deprecated torchscript')
    add('--compare', nargs='+', metavar='RESULTS',
        help='compare results.json files or their folders with the first one; needs no model')
    add('--bootstrap', type=at_least(1), default=1000, metavar='N',
        help='bootstrap samples of the 95 %% intervals of --compare')
    add_timm_validate_args(parser)


def add_our_validate_args(parser: argparse.ArgumentParser) -> Any:
    """Add the flags that timm's validate script lacks, and return the group for flags of the evaluation."""
    group = parser.add_argument_group('Multi-label evaluation')
    group.add_argument('--metrics', default='paper', choices=list(PRESETS), help=_PRESETS)
    add_prediction_args(group, can_tune=True)
    group.add_argument(
        '--tune-split', metavar='NAME',
        help='split to tune thresholds on; it must not share images with --split or with the training set (default: '
             'the validation split of the run, if another split is evaluated)')
    group.add_argument('--decoder', default='pil', choices=DECODERS, help='image decoder; torchvision is faster')
    _add_decoding_args(group.add_argument)
    add_label_args(parser, training=False)
    group.add_argument(
        '--split-file', metavar='FILE',
        help="evaluate the part --split in this file, which 'timm-splicemix split' or train.py (split.json) wrote "
             '(default: the file of the run, for the same data)')
    return group


def add_splicemix_args(parser: argparse.ArgumentParser) -> None:
    """ Add the flags that describe a `SpliceMix` to any argument parser.

    Args:
        parser: Parser that gets a group of --splicemix-* flags.
    """
    _add_splicemix_group(parser)


def splicemix_kwargs(
        args: argparse.Namespace,
        class_names: Optional[Sequence[str]] = None,
        image_size: Optional[tuple[int, int]] = None,
) -> dict[str, Any]:
    """ Turn the flags of `add_splicemix_args` into arguments of `SpliceMix`.

    Args:
        args: Parsed arguments.
        class_names: Names of the classes, in order, which --splicemix-unknown and --splicemix-all refer to. Without
            them, these flags take class indices.
        image_size: Height and width of the images, for --splicemix-grids auto.
    """
    names = ('grids', 'ratio', 'drop_prob', 'prob', 'mode', 'batch')
    kwargs = {name: getattr(args, f'splicemix_{name}') for name in names}
    if is_auto(kwargs['grids']):
        if image_size is None:
            raise UsageError(
                'Expected image_size for --splicemix-grids auto, but got None: call splicemix_kwargs(args, '
                'image_size=(height, width)), or list the grids.')
        kwargs['grids'] = choose_grids(image_size).grids
    for name in ('unknown', 'all'):
        classes = getattr(args, f'splicemix_{name}', None)  # the args.yaml of an older run lacks it
        if classes:
            kwargs[f'{name}_classes'] = find_classes(classes, class_names, f'--splicemix-{name}')
    return kwargs


def _add_splicemix_group(parser: argparse.ArgumentParser) -> Any:
    group = parser.add_argument_group(
        'SpliceMix', 'mixed images: grids of downsampled images of the batch, labelled by their union')
    add = group.add_argument
    add('--splicemix-grids', default='', metavar='GRIDS',
        help="grids to choose from, ROWSxCOLS[-DROPPED][@WEIGHT],..., e.g. 1x2,2x2,2x3 as in the paper; auto: those of "
             "the paper whose cells are not too small for the images and the feature map; '' is off "
             "(default: '%(default)s')")
    add('--splicemix-ratio', type=number_or('ref'), default=0.25, metavar='RATIO',
        help="mixed images relative to the batch size, or 'ref' for floor(B / (rows * cols - dropped)) "
             '(default: %(default)s)')
    add('--splicemix-drop-prob', type=probability, default=0.3, metavar='P',
        help='probability of dropping cells, for grids without -DROPPED (default: %(default)s)')
    add('--splicemix-prob', type=probability, default=1.0, metavar='P',
        help='probability of mixing a batch (default: %(default)s)')
    add('--splicemix-mode', choices=SpliceMix.MODES, default='batch',
        help='draw grid and number of dropped cells per batch or per mixed image (default: %(default)s)')
    add('--splicemix-batch', choices=SpliceMix.BATCHES, default='append', metavar='HOW',
        help='append: add mixed images to the batch; fixed: replace its first images; exclusive: no image is both '
             'regular and part of a mixed one; only: mixed images alone; alternate: train on the mixed images as a '
             'separate batch (default: %(default)s)')
    add('--splicemix-unknown', nargs='+', default=[], metavar='CLASS',
        help='classes that are unknown in mixed images of several cells, as a union is wrong for them, such as '
             'one_person or indoors; the loss has to ignore unknown labels')
    add('--splicemix-all', nargs='+', default=[], metavar='CLASS',
        help='classes that a mixed image has only if all of its cells have them, such as no_finding')
    return group


def _add_splicemix_training_args(add: Any) -> None:
    add('--splicemix-cl', nargs='?', type=at_least(0.), const=1.0, default=0., metavar='WEIGHT',
        help='weight of the SpliceMix-CL loss (prediction of a cell vs. prediction of its source image) '
             '(default: off, without a value: %(const)s)')
    add('--splicemix-cl-no-detach', action='store_true',
        help='let the SpliceMix-CL loss update the predictions of source images too')
    add('--splicemix-cl-mean', choices=MEANS, default='visible',
        help='divide the SpliceMix-CL loss by the visible cells, or by all cells as the reference code of the paper')
    add('--splicemix-weight', type=above(0.), metavar='W',
        help=f'weight of a mixed image in the loss (default: 1; {AUTO_WEIGHT} with --splicemix-grids auto)')
    add('--splicemix-off-epoch', type=at_least(0), default=0, metavar='N',
        help='epoch to stop splicing at, 0 for never')


def add_mixer_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the mixers that neither timm nor `add_splicemix_args` has."""
    add = parser.add_argument_group('Other mixers', 'for comparison, beside --mixup and --cutmix').add_argument
    add('--resizemix', nargs='?', type=at_least(0.), const=1., default=0., metavar='ALPHA',
        help='ResizeMix: paste a resized image, of 0.1 to 0.8 of the side by Beta(ALPHA, ALPHA) '
             '(default: off, without a value: %(const)s)')
    add('--recursivemix', nargs='?', type=at_least(0.), const=0.5, default=0., metavar='ALPHA',
        help="RecursiveMix: paste the previous step's mixed image in a box of up to this fraction of the area "
             '(default: off, without a value: %(const)s)')
    add('--recursivemix-cl', type=at_least(0.), default=0.5, metavar='WEIGHT',
        help="consistency weight between the box's prediction and the previous step's prediction")
    add('--splice-with', choices=SpliceWith.KINDS,
        help='append Mixup or CutMix images to the batch; --mixup or --cutmix set alpha (default: 1)')
    add('--splice-with-ratio', type=number, default=0.25, metavar='RATIO',
        help='mixed images of --splice-with relative to the batch size')
    add('--batch-augment', type=number, default=1., metavar='M',
        help='batch augmentation: M differently augmented copies of each image; 1.25 repeats a quarter of the batch')


def add_label_args(parser: argparse.ArgumentParser, training: bool = True) -> None:
    """ Add the flags that locate and interpret labels.

    Args:
        parser: Parser that gets a group of flags.
        training: Add the flags that apply to training only, too.
    """
    add = parser.add_argument_group('Labels').add_argument
    add('--train-ann', metavar='FILE',
        help='training labels: instances_*.json, a CSV file, a JSON file or a list (coco, csv, json, folder)')
    add('--val-ann', metavar='FILE', help='validation labels')
    add('--drop-unknown-classes', action='store_true',
        help='drop labels of classes that --class-map, or else the training set or the model, does not have')
    add('--train-images', metavar='DIR',
        help='folder that the names of training images are relative to, in the folder of the data set or the current '
             "one (coco, csv, json, folder, voc; default: the data set's own)")
    add('--val-images', metavar='DIR', help='the same for validation images')
    add('--class-order', choices=CLASS_ORDERS, help='order of classes (coco; default: id)')
    add('--keep-unlabelled', action='store_true', default=None, help='keep images without objects (coco)')
    if training:
        add('--voc-difficult', choices=DIFFICULT, metavar='HOW',
            help=f"difficult objects in training: {', '.join(DIFFICULT)} (voc, json; default: negative)")
    add('--voc-difficult-eval', choices=DIFFICULT, metavar='HOW',
        help=f"difficult objects in evaluation: {', '.join(DIFFICULT)} (voc, json; default: ignore)")
    for name, what in (('image', 'images'), ('label', 'labels'), ('split', 'split')):
        add(f'--csv-{name}-column', metavar='NAME', help=f'column of the {what} (csv; default: detected)')
    add('--csv-delimiter', metavar='CHAR', help='separator of labels (csv; default: detected)')
    add('--csv-empty', choices=EMPTY,
        help='label of empty cells, and of classes that an image has no Confidence for (csv; default: negative)')
    if training:
        add('--keep-labels', metavar='75|40|single|P',
            help='hide training labels: keep n // 2 + 1, n // 5 + 1 or 1 of the n labels of an image, or each entry '
                 'with probability P (default: keep all)')
        add('--keep-labels-seed', type=integer, default=0, metavar='N', help='seed of --keep-labels')


def _add_split_args(add: Any) -> None:
    add('--val-fraction', type=open_fraction, metavar='FRACTION',
        help='validate on this fraction of --train-split, in which every class has its share, and train on the rest; '
             'the split is written to split.json in the folder of the run')
    add('--split-seed', type=integer, default=0, metavar='N', help='seed of --val-fraction')
    add('--split-file', metavar='FILE',
        help="train and validate on the parts of --train-split in this file, which 'timm-splicemix split' wrote")


def losses_with(parameter: str) -> dict[str, Any]:
    """The losses that have a parameter, with their default of it."""
    return {name: loss_parameters(name)[parameter] for name in LOSSES if parameter in loss_parameters(name)}


def add_loss_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags for parameters of losses; --loss itself and timm's --smoothing and --bce-* are not among them."""
    group = parser.add_argument_group('Loss parameters', 'for --loss; the losses that have them and their defaults')
    for parameter, options in LOSS_PARAMETERS.items():
        losses = losses_with(parameter)
        if len(losses) == len(LOSSES):
            note = f'default: {losses["bce"]}'
        else:
            note = ', '.join(f'{name}: {"none" if value is None else value}' for name, value in losses.items())
        group.add_argument(
            f"--loss-{parameter.replace('_', '-')}", **{**options, 'help': f'{options["help"]} ({note})'})
    group.add_argument(
        '--class-weights', choices=['none', 'auto'], default='none',
        help='auto: weight positives by negatives / positives of the class in the training set '
             f'({", ".join(losses_with("pos_weight"))}; default: %(default)s)')


def _add_fine_tuning_args(add: Any) -> None:
    add('--backbone-lr-scale', type=at_least(0.), default=1.0, metavar='FACTOR',
        help='learning rate of the backbone relative to the classifier or --head; the paper uses 0.1')
    add('--freeze-bn', action='store_true', help='freeze running statistics of batch norm, for small batches')
    add('--freeze', nargs='+', default=[], metavar='NAME', help='modules to freeze, e.g. conv1 bn1 layer1')
    add('--head-init-std', type=at_least(0.), metavar='STD',
        help="standard deviation of a new classifier's weights (default: 0.01 on multi-label data, else the model's)")
    add('--crop-mode', choices=CROP_MODES,
        help="evaluation crop: center crops, squash keeps every object, border pads (default: the model's own)")
    add('--decoder', default='pil', choices=DECODERS,
        help='image decoder; torchvision is faster and supports crops, flips and erasing')
    _add_decoding_args(add)
    add('--on-bad-image', default='raise', choices=ON_BAD_IMAGE,
        help='raise an error for unreadable and missing training images, or skip them')
    add('--metrics', default='paper', choices=list(PRESETS), help=_PRESETS)


def _add_decoding_args(add: Any) -> None:
    add('--scaled-decoding', action='store_true',
        help='decode JPEG photos at 1/2, 1/4 or 1/8 of their size where the crop needs no more; faster for large '
             'photos, pixels differ slightly')
    add('--cache', metavar='ram|DIR',
        help='decode every image once and keep its pixels: ram keeps them in memory until the run ends, a folder keeps '
             'them for later runs')
    add('--cache-size', type=at_least(1), metavar='PIXELS',
        help='shorter side of images in the cache; larger images are resized (default: exact pixels)')


def _add_head_args(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group('Multi-label head', "in place of the model's pooling and classifier").add_argument
    options = '; '.join(f"{name}: {', '.join(head_options(name))}" for name in list_heads())
    add('--head', default='', choices=['', *list_heads()], metavar='NAME',
        help=f"one of {', '.join(list_heads())} (default: '', the model's own classifier with --gp)")
    add('--head-kwargs', nargs='*', default={}, action=KwargsAction, metavar='KEY=VALUE',
        help=f'options of the head, see docs/heads.md ({options})')
    add('--class-vectors', metavar='FILE',
        help='word vectors for the heads that use them: GloVe or fastText (.txt, .vec), .npz, .npy or .safetensors '
             '(default: those of the package wordllama, or else of the training labels)')


def add_prediction_args(group: Any, can_tune: bool = False) -> None:
    """Add the flags that turn logits into predictions to an argument group; `can_tune` adds --thresholds tune."""
    group.add_argument(
        '--tta', choices=['flip'], help='test-time augmentation: average each image and its mirror image')
    tune = ', or tune: find the best ones and write them beside the checkpoint' if can_tune else ''
    group.add_argument(
        '--thresholds', metavar='P|FILE|tune' if can_tune else 'P|FILE',
        help=f'probability from which a class is predicted, a thresholds.json with one per class{tune} (default: the '
             'thresholds.json of the run if there is one, else the threshold of --metrics, or 0.5)')


def add_predict_model_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose a model to predict with, named as in timm's validate script."""
    group = parser.add_argument_group('Model', 'checkpoints of train.py store all of this; flags override it')
    add = group.add_argument
    add('--checkpoint', default='', metavar='FILE',
        help='checkpoint, folder of a run, exported .onnx or .safetensors file, or hf-hub:USER/NAME')
    add_ema_args(group)
    add('--model', '-m', metavar='MODEL', help='any timm model, for checkpoints without one')
    add('--pretrained', action='store_true', help="use timm's pretrained weights")
    add('--class-map', metavar='FILE', help='file with one class name per line, for checkpoints without class names')
    add('--crop-mode', choices=CROP_MODES,
        help="center crops, squash keeps every object, border pads (default: the model's own)")
    add('--input-img-mode', metavar='MODE', help="PIL mode to load images in, e.g. RGBA (default: the model's own)")
    add_input_args(add)
