""" Split a data set into parts in which every class has its share: iterative stratification of several labels per image

    python -m timm_splicemix.split --dataset csv --data-dir path/to/images --val-fraction 0.2 --output split.json
    python train.py --dataset csv --data-dir path/to/images --split-file split.json

The file lists the images of each part: train, val and, with --test-fraction, test. `train.py --val-fraction 0.2` does
the same and writes the file to the folder of the run. The parts depend on the data and --seed only.
"""
import argparse
from typing import Any, Optional, Sequence

import torch

from .args import CommandParser, add_dataset_args, add_label_args, command, setup_logging
from .args.types import integer, open_fraction
from .data import ON_BAD_IMAGE, PARTITION, Partition, divide, write_partition
from .data.partition import multi_hot_targets
from .data.registry import create_dataset
from .errors import UsageError
from .files import format_table, printable
from .run.datasets import dataset_kwargs, whole_split


def parse_args(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = CommandParser(prog='timm_splicemix.split', description=__doc__)
    add = parser.add_argument
    add('--split', default='train', metavar='NAME', help='split of the data set to divide')
    add('--val-fraction', type=open_fraction, default=0.2, metavar='FRACTION', help='size of the part to validate on')
    add('--test-fraction', type=open_fraction, metavar='FRACTION', help='size of a part to test on (default: no part)')
    add('--seed', type=integer, default=0, metavar='N', help='random seed')
    add('--on-bad-image', default='raise', choices=ON_BAD_IMAGE,
        help='skip: leave out images whose files are missing, instead of raising an error')
    add('--output', default=PARTITION, metavar='FILE', help='JSON file to write')
    add_dataset_args(parser)
    add_label_args(parser, training=False)
    parser.set_defaults(keep_labels=None, voc_difficult=None)  # flags of training
    return parser.parse_args(argv)


def describe(partition: Partition, targets: dict[str, torch.Tensor], class_names: Sequence[str]) -> str:
    """ Return a table of the parts, and the classes that a part lacks.

    Args:
        partition: The parts.
        targets: (images, classes) of each part.
        class_names: Name of each class.
    """
    total = sum((part == 1).sum(dim=0) for part in targets.values())
    num_images = sum(map(len, targets.values()))
    rows: list[dict[str, Any]] = []
    notes = []
    for name, part in targets.items():
        present = (part == 1).sum(dim=0)
        shares = 100 * present[total > 0] / total[total > 0]
        rows.append({
            'part': name, 'images': len(part), 'labels': int(present.sum()),
            'wanted %': 100 * partition.origin['fractions'][name], 'images %': 100 * len(part) / num_images,
            'smallest class %': float(shares.min()), 'largest class %': float(shares.max())})
        lacking = [class_names[index] for index in ((present == 0) & (total > 0)).nonzero().flatten().tolist()]
        if lacking:
            notes.append(f"No image of part '{name}' has: {', '.join(map(printable, lacking))}.")
    formats = dict.fromkeys([column for column in rows[0] if column.endswith('%')], '.1f')
    return '\n'.join([format_table(rows, formats), *notes])


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    args = parse_args(argv)
    setup_logging()
    others = args.val_fraction + (args.test_fraction or 0.)
    if others >= 1:
        raise UsageError(f'Expected --val-fraction and --test-fraction with a sum below 1, but got {others:g}.')
    fractions = {'train': 1 - others, 'val': args.val_fraction}
    if args.test_fraction:
        fractions['test'] = args.test_fraction
    kwargs = {**dataset_kwargs(args, True), **whole_split(args, args.split)}
    dataset = create_dataset(**kwargs, skip_missing_images=args.on_bad_image == 'skip')
    partition = divide(dataset, fractions, args.split, args.seed, {'dataset': args.dataset})
    write_partition(partition, args.output)
    labels = multi_hot_targets(dataset)
    targets = {part: labels[partition.indices(dataset, part)] for part in partition.parts}
    print(describe(partition, targets, dataset.class_names))
    print(f'\nSplit  {args.output}\nTrain  python train.py ... --split-file {args.output}')


if __name__ == '__main__':
    main()
