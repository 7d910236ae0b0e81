""" Read every image of a data set to find the unreadable ones before training

    python -m timm_splicemix.check --dataset coco/2014 --data-dir path/to/coco --workers 8

Prints each unreadable file; the exit code is 1 if there are any.
"""
import argparse
import sys
from typing import Optional, Sequence

from tqdm import tqdm

from .args import CommandParser, add_dataset_args, add_label_args, command, setup_logging
from .args.types import at_least
from .data.dataset import StrictImageDataset, find_bad_images
from .data.decode import DECODERS
from .data.registry import create_dataset
from .errors import UsageError
from .files import printable
from .run.datasets import split_kwargs


def parse_args(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = CommandParser(prog='timm_splicemix.check', description=__doc__)
    parser.add_argument('--split', default='train', help='split to read')
    parser.add_argument(
        '--workers', type=at_least(0), default=2, metavar='N', help='number of worker processes')
    parser.add_argument('--decoder', choices=DECODERS, default='pil', help='image decoder')
    add_dataset_args(parser)
    add_label_args(parser)
    return parser.parse_args(argv)


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    args = parse_args(argv)
    setup_logging()
    dataset = create_dataset(images_must_exist=False, **split_kwargs(args, args.split))
    if not isinstance(dataset, StrictImageDataset):
        raise UsageError(
            f"Expected a data set with random access, but got '{args.dataset}' of type {type(dataset).__name__}.")
    dataset.decoder = args.decoder
    bad = 0
    with tqdm(total=len(dataset), unit='img', desc='Checking', disable=None) as bar:
        for problem in find_bad_images(dataset, args.workers):
            bar.update()
            if problem is not None:
                bad += 1
                bar.set_postfix(bad=bad)
                tqdm.write(printable(problem), file=sys.stdout)
    print(f'{len(dataset):,} images, {bad:,} unreadable')
    if bad:
        sys.exit(1)


if __name__ == '__main__':
    main()
