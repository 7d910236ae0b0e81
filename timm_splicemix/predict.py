""" Say what is in images: class names and probabilities, by a checkpoint of train.py

    python -m timm_splicemix.predict --checkpoint output/train/RUN/model_best.pth.tar photo.jpg
    python -m timm_splicemix.predict --checkpoint FILE photos/ --output predictions.csv --draw predictions.png
    python -m timm_splicemix.predict --checkpoint FILE photos/ --thresholds output/train/RUN/thresholds.json

Folders are looked through with all their sub-folders. An image that can't be read is named, the others are predicted,
and the exit code is 1.
"""
import argparse
import logging
import sys
from pathlib import Path
from typing import Optional, Sequence

import torch
from timm.utils import setup_default_logging
from tqdm import tqdm

from .args import (
    CommandParser,
    add_predict_model_args,
    add_prediction_args,
    command,
    map_defaults,
    parse_with_config,
)
from .args.types import at_least
from .data import create_transform
from .draw import check_image_name, draw_predictions, save_image
from .errors import UsageError
from .metrics import Thresholds, parse_thresholds
from .run.load import load_model, model_options
from .run.machine import precision
from .run.predictor import (
    THUMBNAIL,
    FlipAverage,
    Images,
    check_numbers,
    choose,
    class_names,
    find_images,
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
        '--top', type=at_least(1), metavar='N', help='name at most this many classes (default: no limit)')
    group.add_argument(
        '--output', metavar='FILE', help='write all probabilities, as .json or .csv (default: none, it prints)')
    group.add_argument('--draw', metavar='FILE', help=f'draw the first {DRAWN} images with what was found, as .png')
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


def refuse(args: argparse.Namespace) -> None:
    """ Refuse what can't be done, before anything is.

    Args:
        args: Flags.
    """
    if args.thresholds == 'tune':
        raise UsageError('Expected --thresholds to be a probability or a file, but got tune, which validate.py does.')
    if args.output and Path(args.output).suffix not in ('.json', '.csv'):
        raise UsageError(f"Expected --output to end in .json or .csv, but got '{args.output}'.")
    if args.draw:
        check_image_name(args.draw)
    elif args.columns is not None:
        raise UsageError('Expected --draw with --columns, but got --columns alone.')


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    args, given = parse_with_config(build_parser(), argv)
    setup_default_logging()
    refuse(args)
    args.model_dtype = None
    map_defaults(args, given)
    files = find_images(args.images)
    device = torch.device(args.device)

    # Model
    model, info = load_model(**model_options(args))
    if not info.multi_label and args.thresholds is not None:
        raise UsageError('Expected a multi-label model for --thresholds, but got one with a class per image.')
    names = class_names(args, info.class_names, model.num_classes)
    thresholds = parse_thresholds(args.thresholds, names)
    values = thresholds.values if isinstance(thresholds, Thresholds) else [0.5 if thresholds is None else thresholds]
    values = torch.tensor(values, dtype=torch.float64)
    model = FlipAverage(model, info.multi_label) if args.tta else model
    model.to(device).eval()

    # Images
    config = info.data_config
    transform = create_transform(
        config['input_size'], mean=config['mean'], std=config['std'], interpolation=config['interpolation'],
        crop_pct=config['crop_pct'], crop_mode=config['crop_mode'])
    images = Images(files, transform, 'L' if config['input_size'][0] == 1 else 'RGB', DRAWN if args.draw else 0)
    loader = torch.utils.data.DataLoader(images, args.batch_size, num_workers=args.workers, collate_fn=list)

    autocast, _, _ = precision(args, device)
    rows, cards, bad = [], [], 0
    for batch in tqdm(loader, desc='Predict', unit='batch', leave=False, disable=None):
        found = {}
        good = [(index, tensor) for index, tensor, _ in batch if tensor is not None]
        if good:
            with torch.inference_mode(), autocast():
                logits = model(torch.stack([tensor for _, tensor in good]).to(device)).float().cpu().double()
            check_numbers(logits, [files[index] for index, _ in good])
            probabilities = logits.sigmoid() if info.multi_label else logits.softmax(dim=1)
            found = dict(zip((index for index, _ in good), probabilities))
        for index, tensor, extra in batch:
            if tensor is None:
                bad += 1
                rows.append({'image': str(files[index]), 'error': extra})
                print(f'error: {files[index]} can not be read: {extra}', file=sys.stderr)
                continue
            labels = choose(found[index], values, names, args.top, info.multi_label)
            words = ', '.join(f'{name} {value:.2f}' for name, value in labels.items()) or 'nothing'
            tqdm.write(f'{files[index]}: {words}')
            rows.append({'image': str(files[index]), 'labels': labels,
                         'probabilities': dict(zip(names, found[index].tolist()))})
            if extra is not None:
                cards.append((extra, files[index].name, labels))

    if args.output:
        write_predictions(rows, names, Path(args.output))
    if args.draw and cards:
        save_image(draw_predictions(cards, THUMBNAIL, args.columns), args.draw)
        if len(files) > DRAWN:
            _logger.info(f'{args.draw} shows the first {DRAWN} of {len(files):,} images.')
    if bad:
        print(f'error: {bad} of {len(files)} image(s) can not be read, the others were predicted.', file=sys.stderr)
        sys.exit(1)


if __name__ == '__main__':
    main()
