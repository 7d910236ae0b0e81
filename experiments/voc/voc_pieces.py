""" Checks each part of SpliceMix on real photos, and measures how models see mixed images

First compares mixed batches, cells of feature maps and the consistency loss on real photos with the plain loops of
tests/reference.py. Then each checkpoint predicts val images, whole and mixed by each grid (every image once), for

    mAP and loss of regular images, of mixed images against the union of labels, and of cells against the labels of
    their images;
    the distance of the inputs of BatchNorm layers from the running statistics, for regular and mixed images.

    python experiments/voc/voc_pieces.py --data-dir voc --checkpoints output/voc-224/splicemix-seed0/last.pth.tar
"""
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, Callable, Iterator, Optional, Sequence

import torch
from torch import nn
from tqdm import tqdm
from voc_arms import GRIDS as TRAINED_GRIDS

import timm_splicemix as tsm
from timm_splicemix.args import CommandParser, command
from timm_splicemix.data import create_loader
from timm_splicemix.files import write_json
from timm_splicemix.loss import binary_cross_entropy
from timm_splicemix.models import check_consistency

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests import reference

MIXED_BATCHES = 6  # compared with plain loops; 8 images make two mixed ones
GRIDS = tsm.parse_grids('1x2,2x1,2x2,2x3,3x2')
BATCH_SIZE = 24  # a multiple of the cells of every grid
DEAD = 1e-4  # channels with less than this fraction of the median variance are skipped
NORM_BATCHES = 8  # enough for the means of the inputs of BatchNorm

Score = tuple[float, float, int]  # mAP, loss and number of images


def val_batches(data_dir: str, config: dict[str, Any], size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Images and labels of val, preprocessed as in validate.py."""
    dataset = tsm.create_dataset('voc/2007', root=data_dir, split='val')
    loader = create_loader(
        dataset, (3, size, size), BATCH_SIZE, mean=config['mean'], std=config['std'], num_workers=0,
        device=torch.device('cpu'), use_prefetcher=False, persistent_workers=False, decoder='torchvision',
        interpolation=config['interpolation'], crop_pct=config['crop_pct'], crop_mode=config['crop_mode'])
    return iter(loader)


def compare_mixing(images: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """Largest differences between mixed batches of 8 images and plain loops."""
    mixer = tsm.SpliceMix(TRAINED_GRIDS, seed=0, rank=0)
    found = defaultdict(float)
    for _ in range(MIXED_BATCHES):
        plan = mixer.plan(len(images))
        batch, labels = mixer.apply(images.contiguous(memory_format=torch.channels_last), targets, plan)
        slow = [reference.splice(images, targets, record) for record in plan.records]
        pairs = {
            'regular images': (batch[:len(images)], images),
            'mixed images': (batch[len(images):], torch.cat([mixed for mixed, _ in slow])),
            'labels': (labels, torch.cat([targets, *(union for _, union in slow)])),
        }
        for name, (fast, plain) in pairs.items():
            found[name] = max(found[name], float((fast - plain).abs().max()))
    return dict(found)


def compare_consistency(model: nn.Module, images: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """Largest differences of the cells and the consistency loss of 6 images from plain loops."""
    grid = tsm.Grid(2, 3)
    record = tsm.sample_record(len(images), grid, 2, num_dropped=1, generator=torch.Generator().manual_seed(0))
    mixed, _ = tsm.splice(images, targets, record)
    plan = tsm.MixPlan(torch.arange(len(images)), (record,))
    logits, cell_logits = tsm.SpliceMixModule(model)(torch.cat([images, mixed]), plan)
    sources, dropped = record.sources.flatten(), record.dropped.flatten()
    loss = tsm.consistency_loss(cell_logits, logits[sources], dropped)
    feature_map = check_consistency(model, tuple(images.shape[1:]))
    maps, _ = feature_map.split(model.forward_features(mixed), tuple(images.shape[2:]))
    slow_loss = reference.consistency(
        maps, logits, [record], lambda cell: model.forward_head(feature_map.join(cell.to(maps.dtype), None)))
    slow_cells = torch.cat([cell.unsqueeze(0) for cell in reference.split_cells(maps, grid.rows, grid.cols)])
    return {
        'cells of feature maps': float((tsm.split_cells(maps, grid) - slow_cells).abs().max()),
        'consistency loss, relative': float((loss / slow_loss - 1).abs()),
    }


class NormInputs:
    """Collects the mean and variance of the inputs of BatchNorm layers, for parts of batches."""

    def __init__(self, model: nn.Module):
        self.layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.BatchNorm2d)}
        self.parts: dict[str, slice] = {}
        self.sums: dict[tuple[str, str], list[torch.Tensor]] = defaultdict(list)
        for name, layer in self.layers.items():
            layer.register_forward_hook(self._hook(name))

    def _hook(self, name: str) -> Callable:
        def collect(layer: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
            for part, rows in self.parts.items():
                values = inputs[0][rows]
                moments = torch.stack([values.mean(dim=(0, 2, 3)), values.square().mean(dim=(0, 2, 3))])
                self.sums[name, part].append(moments)
        return collect

    def distances(self, part: str) -> dict[str, tuple[float, float, float]]:
        """ Distance of the inputs from the running statistics, averaged over the layers of each stage.

        Returns:
            Median and 95 % quantile over channels of the distance of means in standard deviations, and the median
            ratio of variances.
        """
        found = defaultdict(list)
        for name, layer in self.layers.items():
            mean, square = torch.stack(self.sums[name, part]).double().mean(dim=0)
            variance = layer.running_var.double()
            alive = variance > DEAD * variance.median()  # a constant channel has no scale
            distance = ((mean - layer.running_mean).abs() / variance.sqrt())[alive]
            ratio = ((square - mean.square()) / variance)[alive]
            stage = '.'.join(name.split('.')[:2]) if name.startswith('blocks') else name
            found[stage].append((float(distance.median()), float(distance.quantile(0.95)), float(ratio.median())))
        return {
            stage: tuple(sum(values) / len(values) for values in zip(*layers)) for stage, layers in found.items()}


def look(path: str, data_dir: str, num_batches: Optional[int]) -> tuple[dict[str, Score], NormInputs]:
    """Predict whole and mixed images: mAP, loss and number of each kind, and the inputs of BatchNorm layers."""
    model, info = tsm.load_checkpoint(path)
    model.to(memory_format=torch.channels_last)
    module = tsm.SpliceMixModule(model)
    module.feature_map = check_consistency(model, tuple(info.data_config['input_size']))
    norms = NormInputs(model)
    found: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
    generator = torch.Generator().manual_seed(0)
    batches = val_batches(data_dir, info.data_config, info.data_config['input_size'][-1])
    for index, (images, targets) in enumerate(tqdm(batches, desc=path, disable=not sys.stderr.isatty())):
        if index == num_batches or len(images) < BATCH_SIZE:
            break
        targets = targets.float()
        records = [
            tsm.sample_record(BATCH_SIZE, grid, BATCH_SIZE // grid.cells, generator=generator) for grid in GRIDS]
        mixed = [tsm.splice(images, targets, record) for record in records]
        batch = torch.cat([images, *(part for part, _ in mixed)]).contiguous(memory_format=torch.channels_last)
        starts = torch.tensor([BATCH_SIZE, *(record.num_mixed for record in records)]).cumsum(0).tolist()
        rows = {str(grid): slice(start, end) for grid, start, end in zip(GRIDS, starts, starts[1:])}
        norms.parts = {'regular': slice(0, BATCH_SIZE), **rows} if index < NORM_BATCHES else {}
        with torch.inference_mode():
            logits, cells = module(batch, tsm.MixPlan(torch.arange(BATCH_SIZE), tuple(records)))
        found['regular'].append((logits[:BATCH_SIZE], targets))
        cells = cells.split([record.sources.numel() for record in records])
        for grid, record, (_, labels), cell_logits in zip(GRIDS, records, mixed, cells):
            found[f'{grid} mixed'].append((logits[rows[str(grid)]], labels))
            found[f'{grid} cells'].append((cell_logits, targets[record.sources.flatten()]))
    scores = {}
    for kind, pairs in found.items():
        logits, targets = (torch.cat(parts) for parts in zip(*pairs))
        ap = tsm.average_precision(logits, targets)
        loss = binary_cross_entropy(logits, targets)
        scores[kind] = (100 * float(ap.nanmean()), float(loss), len(logits))
    return scores, norms


def format_looks(looks: dict[str, dict[str, Score]]) -> str:
    lines = [f'| images | number | {" | ".join(looks)} |', '|---' * (len(looks) + 2) + '|']
    for kind, (*_, number) in next(iter(looks.values())).items():
        cells = ['{:.2f} ({:.4f})'.format(*scores[kind]) for scores in looks.values()]
        lines.append(f'| {kind} | {number} | {" | ".join(cells)} |')
    return '\n'.join(lines)


def format_norms(distances: dict[str, dict[str, tuple[float, float, float]]]) -> str:
    lines = [f'| layers | {" | ".join(distances)} |', '|---' * (len(distances) + 1) + '|']
    for stage in next(iter(distances.values())):
        cells = ['{:.2f}, {:.2f} ({:.2f})'.format(*stages[stage]) for stages in distances.values()]
        lines.append(f'| {stage} | {" | ".join(cells)} |')
    return '\n'.join(lines)


def build_parser() -> CommandParser:
    parser = CommandParser(prog='voc_pieces.py', description=__doc__)
    parser.add_argument('--data-dir', required=True, metavar='DIR', help='folder of VOC 2007')
    parser.add_argument('--checkpoints', nargs='+', required=True, metavar='FILE', help='checkpoints of train.py')
    parser.add_argument('--batches', type=int, metavar='N', help=f'batches of {BATCH_SIZE} images (default: all)')
    parser.add_argument('--keep', type=Path, metavar='FILE', help='write all numbers to this JSON file')
    parser.add_argument('--threads', type=int, default=1, help='threads of torch (default: 1)')
    return parser


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    args = build_parser().parse_args(argv)
    torch.set_num_threads(args.threads)
    model, info = tsm.load_checkpoint(args.checkpoints[0])
    images, targets = next(val_batches(args.data_dir, info.data_config, info.data_config['input_size'][-1]))
    targets = targets.float()
    print('Largest differences from plain loops on real photos:', flush=True)
    with torch.inference_mode():
        pieces = {**compare_mixing(images[:8], targets[:8]), **compare_consistency(model, images[:6], targets[:6])}
    for name, value in pieces.items():
        print(f'- {name}: {value:.2g}', flush=True)
    looks, norms = {}, {}
    for path in args.checkpoints:
        name = Path(path).parent.name
        looks[name], inputs = look(path, args.data_dir, args.batches)
        norms[name] = {part: inputs.distances(part) for part in ('regular', *map(str, GRIDS))}
    print('\nmAP (and loss) on val, each image once in each row:\n\n' + format_looks(looks))
    for name, distances in norms.items():
        print(f'\n{name}, inputs of BatchNorm: distance from the running mean in standard deviations, median and '
              f'95 % quantile over channels (and ratio of variances):\n\n{format_norms(distances)}')
    if args.keep:
        write_json({'pieces': pieces, 'looks': looks, 'norms': norms}, args.keep)


if __name__ == '__main__':
    main()
