""" Open every image of a data set, to know of broken files before a training does

    python -m timm_splicemix.data.check --dataset coco/2014 --data-dir path/to/coco --workers 8

Prints each file that can't be read; the exit code is 1 if there are any.
"""
import argparse
import sys
from typing import Iterator, Optional, Sequence, Union

import torch.utils.data
from tqdm import tqdm

from .args import CommandParser, add_dataset_args, add_label_args, command
from .args.types import at_least
from .data.dataset import BadImageError, StrictImageDataset
from .data.decode import DECODERS
from .data.readers.wds import WdsDataset
from .data.registry import create_dataset
from .data.splits import is_training_split
from .errors import UsageError
from .run.factory import dataset_kwargs


def parse_args(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = CommandParser(prog='timm_splicemix.data.check', description=__doc__)
    parser.add_argument('--split', default='train', help='split to look at (default: %(default)s)')
    parser.add_argument(
        '--workers', type=at_least(0), default=2, metavar='N', help='processes that read (default: %(default)s)')
    parser.add_argument('--decoder', choices=DECODERS, default='pil', help='what decodes images (default: %(default)s)')
    add_dataset_args(parser)
    add_label_args(parser)
    return parser.parse_args(argv)


class _Reports(torch.utils.data.Dataset):
    """For each image, None or what is wrong with it."""

    def __init__(self, dataset: Union[StrictImageDataset, WdsDataset]):
        self.dataset = dataset

    def __len__(self) -> int:
        return self.dataset.num_samples if isinstance(self.dataset, WdsDataset) else len(self.dataset)

    def __getitem__(self, index: int) -> Optional[str]:
        try:
            self.dataset.load(0, index) if isinstance(self.dataset, WdsDataset) else self.dataset[index]
        except BadImageError as error:
            return f'{error.path}: {error.reason}'
        except ValueError as error:  # a label in a shard
            return str(error)
        return None


def find_bad_images(dataset: Union[StrictImageDataset, WdsDataset], workers: int) -> Iterator[Optional[str]]:
    """ Read every image.

    Args:
        dataset: The images.
        workers: Processes that read, 0 to read in this one.

    Returns:
        For each image, None or its file and what is wrong with it.
    """
    loader = torch.utils.data.DataLoader(_Reports(dataset), batch_size=16, num_workers=workers, collate_fn=list)
    for reports in loader:
        yield from reports


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    args = parse_args(argv)
    is_training = is_training_split(args.split)
    dataset = create_dataset(split=args.split, images_must_exist=False, **dataset_kwargs(args, is_training))
    if not isinstance(dataset, (StrictImageDataset, WdsDataset)):
        raise UsageError(
            f"Expected a data set of files or shards, but got '{args.dataset}' of type {type(dataset).__name__}.")
    dataset.decoder = args.decoder
    bad = 0
    total = len(_Reports(dataset))
    with tqdm(total=total, unit='img', desc='Checking', disable=None) as bar:
        for report in find_bad_images(dataset, args.workers):
            bar.update()
            if report is not None:
                bad += 1
                bar.set_postfix(bad=bad)
                tqdm.write(report, file=sys.stdout)
    print(f'{total:,} images, {bad:,} that can not be read')
    if bad:
        sys.exit(1)


if __name__ == '__main__':
    main()
