""" Predict the classes of images with a checkpoint of train.py

    python -m timm_splicemix.predict --checkpoint output/train/RUN photo.jpg
    python -m timm_splicemix.predict --checkpoint FILE photos/ --output predictions.csv --draw predictions.png
    python -m timm_splicemix.predict --checkpoint output/export/RUN/resnet50.onnx photos/ --thresholds 0.3

If the run has a thresholds.json (validate.py --thresholds tune), it is used. Folders are searched with all their
sub-folders. Unreadable images are reported, the others are predicted, and the exit code is 1.
"""
import argparse
import logging
import sys
from pathlib import Path
from typing import Optional, Sequence

import torch
from tqdm import tqdm

from .args import (
    CommandParser,
    add_predict_model_args,
    add_prediction_args,
    command,
    map_defaults,
    parse_with_config,
    setup_logging,
)
from .args.types import at_least
from .draw import check_image_name, draw_predictions, save_image
from .errors import UsageError
from .files import printable
from .run.load import load_from_flags
from .run.machine import precision
from .run.predictor import (
    THUMBNAIL,
    BatchPredictor,
    choose_thresholds,
    find_images,
    read_class_names,
    write_predictions,
)

_logger = logging.getLogger(__name__)
DRAWN = 200  # images on one sheet


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog='timm_splicemix.predict', usage='%(prog)s [-c FILE] [flags] IMAGE ...', description=__doc__)
    parser.add_argument('images', nargs='+', metavar='IMAGE', help='image files, and folders of them')
    add_predict_model_args(parser)
    group = parser.add_argument_group('Prediction')
    add_prediction_args(group)
    group.add_argument(
        '--top', type=at_least(1), metavar='N', help='largest number of classes per image (default: no limit)')
    group.add_argument(
        '--output', metavar='FILE', help='write the probabilities of all classes to this .json or .csv file')
    group.add_argument('--draw', metavar='FILE', help=f'draw the first {DRAWN} images with their classes, as .png')
    group.add_argument(
        '--columns', type=at_least(1), metavar='N', help='images in a row of --draw (default: about a square)')
    group.add_argument(
        '-b', '--batch-size', type=at_least(1), default=32, metavar='N', help='images per batch')
    group.add_argument(
        '-j', '--workers', type=at_least(0), default=0, metavar='N', help='data loading workers')
    group.add_argument(
        '--device', default='cuda', metavar='DEVICE',
        help='device to run on; without a GPU, cuda becomes cpu (default: %(default)s)')
    group.add_argument('--amp', action='store_true', help='automatic mixed precision')
    group.add_argument(
        '--amp-dtype', default='float16', choices=['float16', 'bfloat16'], help='low precision of --amp')
    return parser


def check_flags(args: argparse.Namespace) -> None:
    if args.thresholds == 'tune':
        raise UsageError('Expected a probability or a file for --thresholds, but got tune, which needs validate.py.')
    if args.output and Path(args.output).suffix not in ('.json', '.csv'):
        raise UsageError(f"Expected --output to end in .json or .csv, but got '{args.output}'.")
    if args.draw:
        check_image_name(args.draw)
    elif args.columns is not None:
        raise UsageError('Expected --draw with --columns, but got --columns alone.')


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    args, given = parse_with_config(build_parser(), argv)
    setup_logging()
    check_flags(args)
    args.model_dtype = None
    map_defaults(args, given)
    files = find_images(args.images)
    device = torch.device(args.device)

    model, info = load_from_flags(args)
    _logger.info(f'{info.model_name} ({info.weights} weights), {model.num_classes} classes.')
    names = read_class_names(args.class_map, info.class_names, model.num_classes)
    thresholds = choose_thresholds(args.thresholds, args.checkpoint, info, names)
    autocast, _, _ = precision(args, device)
    predictor = BatchPredictor(model, info, names, thresholds, device, args.top, args.tta == 'flip', autocast)

    predictions = []
    batches = predictor.predict(files, args.batch_size, args.workers, DRAWN if args.draw else 0)
    with tqdm(total=len(files), desc='Predict', unit='image', leave=False, disable=None) as bar:
        for batch in batches:
            for one in batch:
                if one.error:
                    print(printable(f'error: {one.file} cannot be read: {one.error}'), file=sys.stderr)
                else:
                    labels = ', '.join(f'{name} {value:.2f}' for name, value in one.labels.items()) or 'nothing'
                    tqdm.write(printable(f'{one.file}: {labels}'))
            predictions += batch
            bar.update(len(batch))

    if args.output:
        write_predictions(predictions, names, info.weights, Path(args.output))
    cards = [(one.thumbnail, one.file.name, one.labels) for one in predictions if one.thumbnail is not None]
    if cards:
        save_image(draw_predictions(cards, THUMBNAIL, args.columns), args.draw)
        if len(files) > DRAWN:
            _logger.info(f'{args.draw} shows the first {DRAWN} of {len(files):,} images.')
    num_bad = sum(bool(one.error) for one in predictions)
    if num_bad:
        print(f'error: {num_bad} of {len(files)} image(s) cannot be read, the others were predicted.', file=sys.stderr)
        sys.exit(1)


if __name__ == '__main__':
    main()
