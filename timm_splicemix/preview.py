""" Draw a SpliceMix batch of a data set

    python -m timm_splicemix.preview --dataset shapes --splicemix-grids 2x2 --output preview.png
    python -m timm_splicemix.preview --dataset csv --data-dir path/to/images --splicemix-grids 2x3-2
"""
import argparse
import itertools
from typing import Any, Optional, Sequence

import torch
from timm.data import IMAGENET_DEFAULT_MEAN
from torchvision.transforms import v2

from .args import (
    CommandParser,
    add_dataset_args,
    add_label_args,
    add_splicemix_args,
    command,
    setup_logging,
    splicemix_kwargs,
)
from .args.types import at_least, integer
from .data import create_dataset
from .draw import check_image_name, draw_batch, save_image
from .errors import UsageError
from .mix import SpliceMix, parse_grids
from .run.datasets import split_kwargs
from .run.grids import set_auto_grids


def parse_args(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = CommandParser(prog='timm_splicemix.preview', description=__doc__)
    parser.add_argument('--split', default='train', help='split to draw from')
    parser.add_argument('--batch-size', type=at_least(1), default=12, metavar='N', help='number of regular images')
    parser.add_argument('--img-size', type=at_least(1), default=160, metavar='PIXELS', help='height and width')
    parser.add_argument('--columns', type=at_least(1), metavar='N', help='images per row (default: about a square)')
    parser.add_argument('--seed', type=integer, default=42, metavar='N', help='seed of the images and of their mixing')
    parser.add_argument('--output', default='preview.png', metavar='FILE', help='image file to write')
    add_dataset_args(parser)
    add_label_args(parser)
    add_splicemix_args(parser)
    parser.set_defaults(splicemix_grids='1x2,2x2,2x3')
    return parser.parse_args(argv)


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    args = parse_args(argv)
    setup_logging()
    check_image_name(args.output)
    size = (args.img_size, args.img_size)
    set_auto_grids(args, size)
    parse_grids(args.splicemix_grids or '1x1')  # an error in the grids comes before the data set is read
    transform = v2.Compose([v2.PILToTensor(), v2.RGB(), v2.Resize(size, antialias=True)])
    dataset = create_dataset(transform=transform, **split_kwargs(args, args.split))
    samples = _choose(dataset, args.batch_size, args.seed)
    if not samples:
        raise UsageError(f"Split '{args.split}' has no images.")
    images = torch.stack([image for image, _ in samples])
    targets = torch.stack([torch.as_tensor(target) for _, target in samples])
    class_names = _class_names(dataset, targets)

    kwargs = splicemix_kwargs(args, class_names)
    if not args.splicemix_grids:
        kwargs.update(grids='1x1', prob=0.)
    # Normalisation turns this mean colour into 0, the value of dropped cells in training.
    fill = [255 * mean for mean in IMAGENET_DEFAULT_MEAN]
    mixer = SpliceMix(**kwargs, num_classes=len(class_names), fill=fill, seed=args.seed)
    plan = mixer.plan(len(images))
    images, targets = mixer.apply(images, targets, plan)
    regular, mixed = len(plan.kept), plan.num_mixed
    title = f'{regular} regular and {mixed} mixed images' if mixed else f'{regular} regular images, not mixed'
    save_image(draw_batch(images, targets, plan, class_names, title, args.columns), args.output)
    print(f'{args.output}: {title}')


def _choose(dataset: torch.utils.data.Dataset, number: int, seed: int) -> list[tuple[torch.Tensor, Any]]:
    """Random samples, or the first ones of an iterable data set."""
    if isinstance(dataset, torch.utils.data.IterableDataset):
        return list(itertools.islice(dataset, number))
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(dataset), generator=generator)[:number].tolist()
    return [dataset[index][:2] for index in chosen]


def _class_names(dataset: torch.utils.data.Dataset, targets: torch.Tensor) -> list[str]:
    names = getattr(dataset, 'class_names', None) or getattr(dataset, 'classes', None)
    if names is None:
        names = map(str, range(targets.shape[1] if targets.ndim == 2 else int(targets.max()) + 1))
    return list(names)


if __name__ == '__main__':
    main()
