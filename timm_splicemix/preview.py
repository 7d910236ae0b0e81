""" Draw a SpliceMixed batch of a data set, to see what a model is going to see

    python -m timm_splicemix.preview --dataset shapes --splicemix-grids 2x2 --output preview.png
    python -m timm_splicemix.preview --data-dir path/to/folders --splicemix-grids 2x3-2 --splicemix-batch fixed
"""
import argparse
from typing import Optional, Sequence

import torch
from timm.data import IMAGENET_DEFAULT_MEAN
from torchvision.transforms import v2

from .args import CommandParser, add_splicemix_args, command, splicemix_kwargs
from .data import create_dataset, dataset_names
from .mix import SpliceMix
from .report import draw_batch, save_image


def parse_args(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = CommandParser(
        prog='timm_splicemix.preview',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        '--data-dir', metavar='DIR', help="folder of the data set (default: a cache folder for 'shapes')")
    parser.add_argument(
        '--dataset', default='', metavar='NAME',
        help=f"one of {', '.join(dataset_names())} (default: a folder with a sub-folder for each class)")
    parser.add_argument('--split', default='train', help='split to draw from (default: %(default)s)')
    parser.add_argument(
        '--batch-size', type=int, default=12, metavar='N', help='regular images (default: %(default)s)')
    parser.add_argument(
        '--img-size', type=int, default=160, metavar='PIXELS', help='height and width (default: %(default)s)')
    parser.add_argument('--columns', type=int, metavar='N', help='images in a row (default: about a square)')
    parser.add_argument(
        '--seed', type=int, default=0, metavar='N', help='which images, and how they are mixed (default: %(default)s)')
    parser.add_argument(
        '--output', default='preview.png', metavar='FILE', help='picture to write (default: %(default)s)')
    add_splicemix_args(parser)
    parser.set_defaults(splicemix_grids='1x2,2x2,2x3')
    args = parser.parse_args(argv)
    for name in ('batch_size', 'img_size', 'columns'):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"Expected --{name.replace('_', '-')} of at least 1, but got {getattr(args, name)}.")
    return args


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    args = parse_args(argv)
    kwargs = splicemix_kwargs(args)
    if not args.splicemix_grids:
        kwargs.update(grids='1x1', prob=0.)
    # What a dropped cell looks like to the model: the mean that normalisation subtracts.
    mixer = SpliceMix(**kwargs, fill=[255 * mean for mean in IMAGENET_DEFAULT_MEAN], seed=args.seed)

    transform = v2.Compose([v2.PILToTensor(), v2.Resize((args.img_size, args.img_size), antialias=True)])
    dataset = create_dataset(args.dataset, root=args.data_dir, split=args.split, transform=transform)
    class_names = _class_names(dataset)
    mixer.num_classes = len(class_names)
    generator = torch.Generator().manual_seed(args.seed)
    chosen = torch.randperm(len(dataset), generator=generator)[:args.batch_size].tolist()
    if not chosen:
        raise ValueError(f"Expected images in split '{args.split}', but got none.")
    samples = [dataset[index] for index in chosen]
    images = torch.stack([image for image, _ in samples])
    targets = torch.stack([torch.as_tensor(target) for _, target in samples])

    plan = mixer.plan(len(images))
    images, targets = mixer.apply(images, targets, plan)
    regular, mixed = len(plan.kept), plan.num_mixed
    title = f'{regular} regular and {mixed} mixed images' if mixed else f'{regular} regular images, not mixed'
    save_image(draw_batch(images, targets, plan, class_names, title, args.columns), args.output)
    print(f'{args.output}: {title}')


def _class_names(dataset: torch.utils.data.Dataset) -> list[str]:
    """Names of the classes, from the data set or from the reader that timm gave it."""
    names = getattr(dataset, 'class_names', None) or getattr(dataset, 'classes', None)
    if names is None:
        reader = getattr(dataset, 'reader', None)
        class_to_idx = getattr(reader, 'class_to_idx', None)
        if not class_to_idx:
            raise ValueError(f'Expected a data set that names its classes, but got {type(dataset).__name__}.')
        names = sorted(class_to_idx, key=class_to_idx.get)
    return list(names)


if __name__ == '__main__':
    main()
