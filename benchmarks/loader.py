""" Images per second of reading, decoding and transforming images for training, relative to timm's transforms with PIL

Writes JPEG files and reads them as uint8 tensors of 448 px, with the pipelines alternately:

    timm         timm's reading and transforms
    pil          ours with PIL
    torchvision  --decoder torchvision
    scaled       --decoder torchvision --scaled-decoding
    cache        --decoder torchvision --cache DIR, filled before

for files of 640 x 480 with two crops, and for photos of 12 megapixels. Prints the median images per second, the
quartiles of ratios per round, and how much the pixels of scaled decoding differ. Exits with 1 if a ratio misses its
goal.

    python benchmarks/loader.py
    python benchmarks/loader.py --workers 1
"""
import argparse
import io
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Callable

import numpy as np
import timm.data
import timm.data.loader
import torch
from PIL import Image
from timing import alternate, claim, medians, ratios

from timm_splicemix.data import MultiLabelDataset, MultiLabelReader, create_loader
from timm_splicemix.data.loader import MultiLabelLoader
from timm_splicemix.data.sampler import SampleKey

BATCH_SIZE = 16
PASSES = 4  # of the files in an epoch, so that the time to start an epoch is small
TRANSFORM = {'is_training': True, 'use_prefetcher': True, 'color_jitter': None, 'interpolation': 'bilinear'}
# Goals: (numerator, denominator): smallest ratio
GOALS = {
    'rrc': {('torchvision', 'timm'): 2.3, ('cache', 'timm'): 5., ('cache', 'torchvision'): 2.5},
    'multiscale': {('torchvision', 'pil'): 1.5, ('cache', 'torchvision'): 2.},
    '12 megapixels': {('scaled', 'timm'): 3., ('scaled', 'torchvision'): 1.5},
}


def write_images(folder: Path, number: int, width: int, height: int) -> list[Path]:
    """Write noise with the spectrum of photos, whose colours vary less than their brightness."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width))
    frequency[0, 0] = 1.
    # from brightness and two colour differences
    to_rgb = np.array([[1., 1., 1.], [0.3, 0., -0.3], [-0.15, 0.3, -0.15]])
    paths = []
    for i in range(number):
        noise = np.fft.rfft2(np.random.default_rng(i).normal(size=(3, height, width)))
        texture = np.fft.irfft2(noise / frequency ** 1.5, s=(height, width))
        pixels = 128 + 50 * (texture / texture.std()).transpose(1, 2, 0) @ to_rgb
        paths.append(folder / f'{width}-{i}.jpg')
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(paths[-1], quality=90)
    return paths


class TimmImages(torch.utils.data.Dataset):
    """Images read as timm's `ImageDataset` does."""

    def __init__(self, paths: list[Path], transform: Callable):
        self.paths = paths
        self.transform = transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple:
        with open(self.paths[index], 'rb') as file:
            return self.transform(Image.open(io.BytesIO(file.read())).convert('RGB')), 0


def timm_pass(paths: list[Path], size: int, workers: int) -> Callable[[], None]:
    dataset = TimmImages(paths, timm.data.create_transform(size, **TRANSFORM))
    if not workers:
        return lambda: [dataset[index] for index in range(len(paths))]
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=BATCH_SIZE, shuffle=True, num_workers=workers, persistent_workers=True,
        collate_fn=timm.data.loader.fast_collate)
    return lambda: [None for _ in loader]


def our_loader(name: str, paths: list[Path], size: int, crop: str, workers: int = 0) -> MultiLabelLoader:
    reader = MultiLabelReader(paths, torch.ones(len(paths), 1, dtype=torch.int8), ['a'], paths[0].parent)
    dataset = MultiLabelDataset(reader)
    if name == 'cache':
        dataset.use_cache(paths[0].parent / 'cache')
    return create_loader(
        dataset, size, BATCH_SIZE, num_workers=workers, device=torch.device('cpu'),
        decoder='pil' if name == 'pil' else 'torchvision', scaled_decoding=name == 'scaled', train_crop_mode=crop,
        **TRANSFORM)


def our_pass(name: str, paths: list[Path], size: int, crop: str, workers: int) -> Callable[[], None]:
    loader = our_loader(name, paths, size, crop, workers)
    if not workers:
        samples = loader._source.loader.dataset
        return lambda: [samples[SampleKey(0, index)] for index in range(len(paths))]
    return lambda: [None for _ in loader._source]  # as the prefetcher gets batches, before it normalises them


def scaled_difference(paths: list[Path], size: int) -> tuple[float, int]:
    """Mean and largest difference of pixels (of 255) between scaled and exact decoding, after the same crops."""
    scaled, exact = (our_loader(name, paths, size, 'rrc')._source.loader.dataset for name in ('scaled', 'torchvision'))
    keys = [SampleKey(0, index) for index in range(len(paths))]
    differences = torch.stack([scaled[key].image.int() - exact[key].image.int() for key in keys]).abs()
    return differences.double().mean().item(), int(differences.max())


def pipelines(paths: list[Path], size: int, crop: str, workers: int, names: list[str]) -> dict[str, Callable[[], None]]:
    """Functions that read all images once."""
    return {
        name: timm_pass(paths, size, workers) if name == 'timm' else our_pass(name, paths, size, crop, workers)
        for name in names
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--size', type=int, default=448, help='image size (default: 448)')
    parser.add_argument('--workers', type=int, default=0, help='workers of a DataLoader (default: 0, no DataLoader)')
    parser.add_argument('--seconds', type=float, default=20., help='time per row (default: 20)')
    args = parser.parse_args()

    torch.set_num_threads(1)
    met = []
    with tempfile.TemporaryDirectory() as folder:
        small = PASSES * write_images(Path(folder), 64, 640, 480)
        large = PASSES * write_images(Path(folder), 4, 4000, 3000)
        rows = {
            'rrc': (small, 'rrc', ['timm', 'pil', 'torchvision', 'cache']),
            'multiscale': (small, 'multiscale', ['pil', 'torchvision', 'cache']),  # timm has no such crop
            '12 megapixels': (large, 'rrc', ['timm', 'pil', 'torchvision', 'scaled']),
        }
        print(f'torch {torch.__version__}, Pillow {Image.__version__}, {args.workers} worker(s), {args.size} px')
        for title, (paths, crop, names) in rows.items():
            kilobytes = statistics.mean(path.stat().st_size for path in paths) / 1000
            times = alternate(
                pipelines(paths, args.size, crop, args.workers, names), seconds=args.seconds, title=title)
            rates = {name: f'{len(paths) / seconds:.0f}' for name, seconds in medians(times).items()}
            print(f'{title}, files of {kilobytes:.0f} kB, images per second: {rates}', flush=True)
            for (fast, base), goal in GOALS[title].items():
                measured = ratios(times, base, fast)
                print(f'    {fast} / {base}: {measured[1]:.2f} ({measured[0]:.2f} to {measured[2]:.2f})', flush=True)
                met.append(claim(f'images per second, {title}: {fast} / {base}', measured, at_least=goal))
        mean, largest = scaled_difference(large, args.size)
        print(f'Pixels of scaled and exact decoding after the crop differ by {mean:.2f} on average, at most {largest}.')
    sys.exit(not all(met))


if __name__ == '__main__':
    main()
