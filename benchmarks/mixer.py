""" Speed of SpliceMix, relative to the algorithm of the paper's figure with the same grids and sources

Prints the median time of both, timed alternately, and their ratio. Exits with 1 if a ratio is below `--at-least`, which
holds for contiguous images and one thread. A second table, for information, compares all mixers with those of timm and
torchvision, which support integer classes only; timm's modify the batch in place.

    python benchmarks/mixer.py
    python benchmarks/mixer.py --threads 2 --channels-last --at-least 1
"""
import argparse
import sys
from functools import partial
from typing import Callable

import timm.data
import torch
import torch.nn.functional as F
from timing import alternate, claim, medians, ratios
from torchvision.transforms import v2
from torchvision.utils import make_grid
from tqdm import tqdm

import timm_splicemix as tsm
from timm_splicemix.mix import Mixup, RecursiveMix, ResizeMix, SpliceWith

SIZES = ((32, 448), (32, 224), (128, 224))  # batch, pixels
DTYPES = (torch.float32, torch.uint8)
NUM_CLASSES = 80


def paper_splicemix(
        images: torch.Tensor,
        targets: torch.Tensor,
        record: tsm.SpliceRecord,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The steps of the paper's figure for any grid: gather, interpolate, make_grid, split, stack, cat."""
    rows, cols = record.grid.rows, record.grid.cols
    height, width = images.shape[2:]
    cell = (height // rows, width // cols)
    order = record.sources.flatten()
    small = F.interpolate(images[order], size=cell, mode='bilinear', align_corners=True)
    column = make_grid(small, nrow=cols, padding=0)
    mixed = torch.stack(column.split(cell[0] * rows, dim=1), dim=0)
    if mixed.shape[2:] != images.shape[2:]:  # the grid does not divide the image
        mixed = F.interpolate(mixed, size=(height, width), mode='bilinear', align_corners=True)
    union = targets[order].view(record.num_mixed, rows * cols, -1).sum(1)
    union[union > 0] = 1
    return torch.cat((images, mixed)), torch.cat((targets, union))


def remembering(images: torch.Tensor, targets: torch.Tensor) -> RecursiveMix:
    mixer = RecursiveMix()
    mixer.remember(images, targets, targets)
    return mixer


def compare_mixers(seconds: float, memory_format: torch.memory_format) -> None:
    """Print the images that each mixer and its counterpart in timm or torchvision mix per second, draws included."""
    batch, size = SIZES[0]
    images = torch.rand(batch, 3, size, size).contiguous(memory_format=memory_format)
    targets = (torch.rand(batch, NUM_CLASSES) < 0.05).float()
    classes = torch.randint(NUM_CLASSES, (batch,))

    def timms(*alphas: float, mode: str = 'batch') -> Callable:
        return timm.data.Mixup(*alphas, mode=mode, label_smoothing=0., num_classes=NUM_CLASSES)

    rows = (
        ('Mixup', Mixup(1.), 'timm', timms(1.)),
        ('Mixup', Mixup(1.), 'torchvision', v2.MixUp(num_classes=NUM_CLASSES)),
        ('Mixup, elem', Mixup(1., mode='elem'), 'timm', timms(1., mode='elem')),
        ('CutMix', Mixup(0., 1.), 'timm', timms(0., 1.)),
        ('CutMix', Mixup(0., 1.), 'torchvision', v2.CutMix(num_classes=NUM_CLASSES)),
        ('CutMix, elem', Mixup(0., 1., mode='elem'), 'timm', timms(0., 1., mode='elem')),
        ('ResizeMix', ResizeMix(), "timm's CutMix", timms(0., 1.)),
        ('RecursiveMix', remembering(images, targets), "timm's CutMix", timms(0., 1.)),
        ('splice with Mixup', SpliceWith('mixup'), "timm's Mixup", timms(1.)),
        ('splice with CutMix', SpliceWith('cutmix'), "timm's CutMix", timms(0., 1.)),
        ('SpliceMix', tsm.SpliceMix(), "timm's Mixup", timms(1.)),
    )
    print(f'\n{batch} x {size} px, float32\n| mixer | images/s | other | images/s | ratio |\n|---|---|---|---|---|')
    for name, mixer, other_name, other in tqdm(rows, disable=not sys.stderr.isatty(), leave=False):
        functions = {'theirs': partial(other, images, classes), 'ours': partial(mixer, images, targets)}
        theirs, ours = medians(alternate(functions, seconds=seconds)).values()
        tqdm.write(f'| {name} | {batch / ours:.0f} | {other_name} | {batch / theirs:.0f} | {theirs / ours:.2f} |')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--threads', type=int, default=1, help='threads of torch (default: 1)')
    parser.add_argument('--channels-last', action='store_true', help='use the channels_last memory format')
    parser.add_argument('--seconds', type=float, default=2., help='time per row (default: 2)')
    parser.add_argument('--at-least', type=float, default=1.5, help='smallest acceptable ratio (default: 1.5)')
    parser.add_argument('--grids', default='1x2,2x2,2x3', help='grids to measure (default: 1x2,2x2,2x3)')
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    memory_format = torch.channels_last if args.channels_last else torch.contiguous_format
    layout = str(memory_format).removeprefix('torch.')
    print(f'torch {torch.__version__}, {args.threads} thread(s), {layout}')
    print('| images | type | grid | paper ms | ours ms | ratio |\n|---|---|---|---|---|---|', flush=True)
    cases = [(d, b, s, g) for d in DTYPES for b, s in SIZES for g in tsm.parse_grids(args.grids)]
    met = []
    for dtype, batch, size, grid in tqdm(cases, disable=not sys.stderr.isatty(), leave=False):
        generator = torch.Generator().manual_seed(0)
        images = (torch.rand(batch, 3, size, size, generator=generator) * 255).to(dtype, memory_format=memory_format)
        targets = (torch.rand(batch, NUM_CLASSES, generator=generator) < 0.05).float()
        mixer = tsm.SpliceMix([grid])
        plan = tsm.MixPlan(torch.arange(batch), (tsm.sample_record(batch, grid, batch // 4, generator=generator),))
        functions = {
            'paper': partial(paper_splicemix, images, targets, plan.records[0]),
            'ours': partial(mixer.apply, images, targets, plan),
        }
        times = alternate(functions, seconds=args.seconds)
        paper, ours = medians(times).values()
        measured = ratios(times, 'paper', 'ours')
        row = f'{batch} x {size} px | {str(dtype).removeprefix("torch.")} | {grid}'
        tqdm.write(f'| {row} | {paper * 1e3:.2f} | {ours * 1e3:.2f} | {measured[1]:.2f} |')
        text = f'mixing, {args.threads} thread(s), {layout}, {row.replace(" |", ",")}: speed / paper\'s algorithm'
        met.append(claim(text, measured, at_least=args.at_least))
    compare_mixers(args.seconds, memory_format)
    sys.exit(not all(met))


if __name__ == '__main__':
    main()
