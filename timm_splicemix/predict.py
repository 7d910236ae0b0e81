""" Say what is in images: class names and probabilities, by a checkpoint of train.py

    python -m timm_splicemix.predict --checkpoint output/train/RUN/model_best.pth.tar photo.jpg
    python -m timm_splicemix.predict --checkpoint FILE photos/ --output predictions.csv --draw predictions.png
    python -m timm_splicemix.predict --checkpoint FILE photos/ --thresholds output/train/RUN/thresholds.json

Folders are looked through with all their sub-folders. An image that can't be read is named, the others are predicted,
and the exit code is 1.
"""
import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any, Callable, Optional, Sequence

import torch
from PIL import Image
from timm.data.readers.class_map import load_class_map
from timm.utils import setup_default_logging
from tqdm import tqdm

from .args import (
    CommandParser,
    add_predict_model_args,
    add_prediction_args,
    check_values,
    command,
    map_validation_defaults,
    model_options,
    parse_with_config,
)
from .data import create_transform, decode_image
from .inference import FlipAverage, load_model
from .machine import precision
from .report import check_image_name, draw_predictions, save_image, written_whole
from .results import write_rows
from .thresholds import Thresholds, parse_thresholds

_logger = logging.getLogger(__name__)

SUFFIXES = ('.bmp', '.gif', '.jfif', '.jpeg', '.jpg', '.png', '.ppm', '.tif', '.tiff', '.webp')
DRAWN = 200  # images on one sheet
THUMBNAIL = 180  # pixels


def build_parser() -> CommandParser:
    parser = CommandParser(prog='timm_splicemix.predict', description=__doc__)
    parser.add_argument('images', nargs='+', metavar='IMAGE', help='image files, and folders of them')
    add_predict_model_args(parser)
    group = parser.add_argument_group('Prediction')
    add_prediction_args(group)
    group.add_argument('--top', type=int, metavar='N', help='name at most this many classes (default: no limit)')
    group.add_argument(
        '--output', metavar='FILE', help='write all probabilities, as .json or .csv (default: none, it prints)')
    group.add_argument('--draw', metavar='FILE', help=f'draw the first {DRAWN} images with what was found, as .png')
    group.add_argument('--columns', type=int, metavar='N', help='images in a row of --draw (default: about a square)')
    group.add_argument(
        '-b', '--batch-size', type=int, default=32, metavar='N', help='images in a batch (default: %(default)s)')
    group.add_argument(
        '-j', '--workers', type=int, default=0, metavar='N', help='processes that read images (default: %(default)s)')
    group.add_argument(
        '--device', default='cuda', metavar='DEVICE',
        help='device to run on; without a GPU, cuda becomes cpu (default: %(default)s)')
    group.add_argument('--amp', action='store_true', help='automatic mixed precision')
    group.add_argument(
        '--amp-dtype', default='float16', metavar='DTYPE', help='low precision of --amp (default: %(default)s)')
    return parser


def refuse(args: argparse.Namespace) -> None:
    """ Refuse what can't be done, before anything is.

    Args:
        args: Flags.
    """
    check_values(args)
    for name in ('top', 'columns'):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f'Expected --{name} of at least 1, but got {getattr(args, name)}.')
    if args.thresholds == 'tune':
        raise ValueError('Expected --thresholds to be a probability or a file, but got tune, which validate.py does.')
    if args.output and Path(args.output).suffix not in ('.json', '.csv'):
        raise ValueError(f"Expected --output to end in .json or .csv, but got '{args.output}'.")
    if args.draw:
        check_image_name(args.draw)
    elif args.columns is not None:
        raise ValueError('Expected --draw with --columns, but got --columns alone.')


def find_images(paths: Sequence[str]) -> list[Path]:
    """ Image files, in order and each once; those of folders by the endings of their names.

    Args:
        paths: Files and folders.
    """
    files: dict[Path, None] = {}
    for path in map(Path, paths):
        if path.is_dir():
            found = sorted(file for file in path.rglob('*') if file.suffix.lower() in SUFFIXES and file.is_file())
            if not found:
                raise ValueError(f'Expected images in {path}, but found none (looked for {", ".join(SUFFIXES)}).')
            files.update(dict.fromkeys(found))
        elif path.is_file():
            files[path] = None
        else:
            raise ValueError(f'Expected image files and folders, but got {path}, which does not exist.')
    return list(files)


class Images(torch.utils.data.Dataset):
    """ Images by number, or what is wrong with them.

    Args:
        files: The files.
        transform: Makes tensors of PIL images.
        mode: Mode of PIL's that images are read in.
        num_thumbnails: Number of images that come with a small version to draw.
    """

    def __init__(self, files: Sequence[Path], transform: Callable, mode: str = 'RGB', num_thumbnails: int = 0):
        self.files = files
        self.transform = transform
        self.mode = mode
        self.num_thumbnails = num_thumbnails

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[int, Optional[torch.Tensor], Any]:
        """Number, tensor or None, and thumbnail or reason."""
        try:
            image = decode_image(self.files[index].read_bytes(), 'pil', self.mode)
        except (OSError, ValueError) as error:
            return index, None, str(error)
        thumbnail = None
        if index < self.num_thumbnails:
            thumbnail = image.convert('RGB')
            thumbnail.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.BILINEAR)
        return index, self.transform(image), thumbnail


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    args, given = parse_with_config(build_parser(), argv)
    setup_default_logging()
    refuse(args)
    args.model_dtype = None
    map_validation_defaults(args, given)
    files = find_images(args.images)
    device = torch.device(args.device)

    # Model
    model, info = load_model(**model_options(args))
    if not info.multi_label and args.thresholds is not None:
        raise ValueError('Expected a multi-label model for --thresholds, but got one with a class per image.')
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


def class_names(args: argparse.Namespace, known: Optional[Sequence[str]], number: int) -> tuple[str, ...]:
    """ Name of each output: from --class-map, the checkpoint, or else its number.

    Args:
        args: Flags.
        known: Those of the checkpoint, None if it has none.
        number: Number of outputs.
    """
    if not args.class_map:
        return tuple(known or map(str, range(number)))
    try:
        class_to_idx = load_class_map(args.class_map)
    except (AssertionError, OSError, ValueError) as error:
        raise ValueError(f'Expected a file that lists the classes, but got {args.class_map}: {error}') from error
    names = sorted(class_to_idx, key=class_to_idx.get)
    if len(names) != number:
        raise ValueError(f'Expected {number} classes, as the model has, but got {len(names)} in {args.class_map}.')
    return tuple(names)


def check_numbers(logits: torch.Tensor, files: Sequence[Path]) -> None:
    """ Refuse predictions that are not numbers, with the first image that has them.

    Args:
        logits: (B, classes).
        files: File of each row.
    """
    bad = logits.isnan().any(dim=1)
    if bad.any():
        file = files[int(bad.nonzero()[0])]
        raise ValueError(f'Expected scores that are numbers, but got NaN for {file}: try without --amp.')


def choose(
        probabilities: torch.Tensor,
        thresholds: torch.Tensor,
        names: Sequence[str],
        top: Optional[int],
        multi_label: bool,
) -> dict[str, float]:
    """ The classes that are predicted, the most probable first.

    Args:
        probabilities: (classes,).
        thresholds: (classes,) or (1,).
        names: Name of each class.
        top: Number of classes at most.
        multi_label: Whether there may be any number; else it is the `top` most probable, one by default.
    """
    order = probabilities.argsort(descending=True, stable=True).tolist()
    predicted = (probabilities >= thresholds).tolist()
    order = [index for index in order if predicted[index]][:top] if multi_label else order[:top or 1]
    return {names[index]: float(probabilities[index]) for index in order}


def write_predictions(rows: Sequence[dict[str, Any]], names: Sequence[str], path: Path) -> None:
    """ Write what was found, and the probabilities of all classes.

    Args:
        rows: An image, with 'labels' and 'probabilities' or 'error', each.
        names: Name of each class.
        path: .json or .csv.
    """
    if path.suffix == '.json':
        with written_whole(path) as temporary:
            temporary.write_text(json.dumps(rows, indent=2, ensure_ascii=False) + '\n', encoding='utf-8')
        return
    write_rows([{
        'image': row['image'],
        'labels': ';'.join(row.get('labels', ())),
        'error': row.get('error', ''),
        **{f'p({name})': row['probabilities'][name] if 'probabilities' in row else '' for name in names},
    } for row in rows], path)


if __name__ == '__main__':
    main()
