""" Label statistics of a data set: labels per image, images per class, classes that occur together

    python -m timm_splicemix.stats --dataset voc/2007 --data-dir path/to/voc
    python -m timm_splicemix.stats --dataset csv --data-dir path/to/images --split train --output stats.png
"""
import argparse
from typing import Optional, Sequence

from .args import CommandParser, add_dataset_args, add_label_args, command, setup_logging
from .args.types import at_least
from .data.dataset import MultiLabelDataset
from .data.registry import create_dataset
from .data.statistics import co_occurrence, format_statistics
from .draw import draw_statistics, save_figure
from .errors import UsageError
from .run.datasets import split_kwargs


def parse_args(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = CommandParser(prog='timm_splicemix.stats', description=__doc__)
    parser.add_argument('--split', default='train', help='split to read')
    parser.add_argument(
        '--pairs', type=at_least(0), default=10, metavar='N', help='number of pairs of classes to list')
    parser.add_argument('--output', metavar='FILE', help='also draw a plot, such as stats.png')
    add_dataset_args(parser)
    add_label_args(parser)
    return parser.parse_args(argv)


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    args = parse_args(argv)
    setup_logging()
    dataset = create_dataset(**split_kwargs(args, args.split))
    if not isinstance(dataset, MultiLabelDataset):
        raise UsageError(f"Expected a multi-label data set, but got '{args.dataset}' of type {type(dataset).__name__}.")
    print(format_statistics(dataset.targets, dataset.class_names, args.pairs))
    if args.output:
        title = f'{args.dataset}, {args.split}: {len(dataset):,} images'
        labels = (dataset.targets == 1).sum(dim=1)
        figure = draw_statistics(co_occurrence(dataset.targets), labels, dataset.class_names, title)
        if figure is not None:
            save_figure(figure, args.output)
            print(f'\nplot: {args.output}')


if __name__ == '__main__':
    main()
