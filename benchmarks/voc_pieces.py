""" Looks into runs of benchmarks/voc.py: is each piece of SpliceMix right on real photos, and what do mixed images do?

First compares mixed images, labels, cells of feature maps and the consistency loss of a real batch with the plain loops
of tests/reference.py. Then, for each checkpoint, shows val images whole and mixed by each grid, every image once, and
prints

    mAP and loss of regular images, of mixed ones against the union of their labels, and of cells against the labels
    of their images: what does the model make of an image that is one of several, and small?
    how far the inputs of BatchNorm layers are from the statistics that training keeps, for regular and mixed images

    python benchmarks/voc_pieces.py --data-dir voc --checkpoints output/voc-224/{baseline,splicemix}-seed0/last.pth.tar
"""
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, Callable, Iterator, Optional, Sequence

import torch
from torch import nn
from tqdm import tqdm

import timm_splicemix as tsm
from timm_splicemix.args import CommandParser, command
from timm_splicemix.data import create_loader
from timm_splicemix.loss import binary_cross_entropy
from timm_splicemix.models import check_consistency

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests import reference

GRIDS = tsm.parse_grids('1x2,2x1,2x2,2x3,3x2')
BATCH_SIZE = 24  # is filled by every grid without a rest
NORM_BATCHES = 8  # whose inputs of BatchNorm are looked at: means of all their pixels need no more


def val_batches(data_dir: str, config: dict[str, Any], size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """ Images and labels of val, as validate.py has them.

    Args:
        data_dir: Folder of VOC 2007.
        config: What the checkpoint says of images.
        size: Height and width of images.
    """
    dataset = tsm.create_dataset('voc/2007', root=data_dir, split='val')
    loader = create_loader(
        dataset, (3, size, size), BATCH_SIZE, mean=config['mean'], std=config['std'], num_workers=0,
        device=torch.device('cpu'), use_prefetcher=False, persistent_workers=False, decoder='torchvision',
        interpolation=config['interpolation'], crop_pct=config['crop_pct'], crop_mode=config['crop_mode'])
    return iter(loader)


def compare_pieces(model: nn.Module, images: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """ Largest differences between the pieces and plain loops.

    Args:
        model: A model of `load_checkpoint`.
        images: (B, C, H, W), normalised; two mixed ones are made of them.
        targets: (B, classes).
    """
    grid = tsm.Grid(2, 3)
    record = tsm.sample_record(len(images), grid, 2, num_dropped=1, generator=torch.Generator().manual_seed(0))
    mixed, labels = tsm.splice(images, targets, record)
    slow_mixed, slow_labels = reference.splice(images, targets, record)
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
        'mixed images': float((mixed - slow_mixed).abs().max()),
        'labels of mixed images': float((labels - slow_labels).abs().max()),
        'cells of feature maps': float((tsm.split_cells(maps, grid) - slow_cells).abs().max()),
        'consistency loss, relative': float((loss / slow_loss - 1).abs()),
    }


class NormInputs:
    """ Collects mean and variance of the inputs of BatchNorm layers, of parts of batches.

    Args:
        model: The model that is watched.
    """

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

    def distances(self, part: str) -> dict[str, tuple[float, float]]:
        """ How far inputs are from the running statistics, by stage: medians over channels (some are dead) of the
        distance of the means in standard deviations, and of the ratio of the variances.

        Args:
            part: Part of the batches.
        """
        found = defaultdict(list)
        for name, layer in self.layers.items():
            mean, square = torch.stack(self.sums[name, part]).double().mean(dim=0)
            variance = layer.running_var.double()
            distance = ((mean - layer.running_mean).abs() / variance.sqrt()).nanmedian()
            stage = '.'.join(name.split('.')[:2]) if name.startswith('blocks') else name
            found[stage].append((float(distance), float(((square - mean.square()) / variance).nanmedian())))
        return {
            stage: tuple(sum(values) / len(values) for values in zip(*pairs)) for stage, pairs in found.items()}


def look(path: str, data_dir: str, num_batches: Optional[int]) -> tuple[dict[str, tuple[float, float]], NormInputs]:
    """ Show whole and mixed images to the model of a checkpoint.

    Args:
        path: The checkpoint.
        data_dir: Folder of VOC 2007.
        num_batches: Number of batches, None for all.

    Returns:
        mAP and loss of each kind of image, and the inputs of its BatchNorm layers.
    """
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
        scores[kind] = (100 * float(ap.nanmean()), float(loss))
    return scores, norms


def format_looks(looks: dict[str, dict[str, tuple[float, float]]]) -> str:
    """The table of mAP and loss, in Markdown: a row for each kind of image, a column for each checkpoint."""
    lines = [f'| images | {" | ".join(looks)} |', '|---' * (len(looks) + 1) + '|']
    for kind in next(iter(looks.values())):
        cells = ['{:.2f} ({:.4f})'.format(*scores[kind]) for scores in looks.values()]
        lines.append(f'| {kind} | {" | ".join(cells)} |')
    return '\n'.join(lines)


def format_norms(norms: NormInputs) -> str:
    """The table of distances from the running statistics, in Markdown."""
    parts = ['regular', *map(str, GRIDS)]
    distances = {part: norms.distances(part) for part in parts}
    lines = [f'| layers | {" | ".join(parts)} |', '|---' * (len(parts) + 1) + '|']
    for stage in distances['regular']:
        cells = ['{:.2f} ({:.2f})'.format(*distances[part][stage]) for part in parts]
        lines.append(f'| {stage} | {" | ".join(cells)} |')
    return '\n'.join(lines)


def build_parser() -> CommandParser:
    parser = CommandParser(prog='voc_pieces.py', description=__doc__)
    parser.add_argument('--data-dir', required=True, metavar='DIR', help='folder of VOC 2007')
    parser.add_argument('--checkpoints', nargs='+', required=True, metavar='FILE', help='checkpoints of train.py')
    parser.add_argument('--batches', type=int, metavar='N', help=f'batches of {BATCH_SIZE} images (default: all)')
    parser.add_argument('--threads', type=int, default=1, help='threads of torch (default: 1)')
    return parser


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    args = build_parser().parse_args(argv)
    torch.set_num_threads(args.threads)
    model, info = tsm.load_checkpoint(args.checkpoints[0])
    images, targets = next(val_batches(args.data_dir, info.data_config, info.data_config['input_size'][-1]))
    print('Largest differences between the project and plain loops, on a real batch:')
    with torch.inference_mode():
        for name, value in compare_pieces(model, images[:6], targets[:6].float()).items():
            print(f'- {name}: {value:.2g}')
    looks, norms = {}, {}
    for path in args.checkpoints:
        name = Path(path).parent.name
        looks[name], norms[name] = look(path, args.data_dir, args.batches)
    print('\nmAP (and loss) on val, each image once in each row:\n\n' + format_looks(looks))
    for name, found in norms.items():
        print(f'\n{name}, inputs of BatchNorm: distance of means from the running ones in deviations (and ratio of '
              f'variances):\n\n{format_norms(found)}')


if __name__ == '__main__':
    main()
