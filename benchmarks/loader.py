""" Images per second of reading, decoding and transforming images for training, relative to timm's transforms with PIL

Writes JPEG files and reads them as uint8 tensors of 448 px, with the pipelines alternately:

    timm         timm's reading and transforms
    pil          ours with PIL
    torchvision  --decoder torchvision
    scaled       --decoder torchvision --scaled-decoding
    cache        --decoder torchvision --cache DIR, filled before

for files of 640 x 480 with two crops, and for photos of 12 megapixels. Prints the median images per second, and the
quartiles of ratios per round. Exits with 1 if a ratio misses its goal.

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

from timm_splicemix.data import MultiLabelDataset, MultiLabelReader, create_transform
from timm_splicemix.data.collate import fast_collate
from timm_splicemix.data.loader import _Samples
from timm_splicemix.data.sampler import SampleKey

BATCH_SIZE = 16
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

    def __getitem__(self, index: int) -> tuple:
        with open(self.paths[index], 'rb') as file:
            return self.transform(Image.open(io.BytesIO(file.read())).convert('RGB')), 0


def passes(dataset: torch.utils.data.Dataset, number: int, workers: int) -> Callable[[], None]:
    """A function that reads all images once."""
    is_timm = isinstance(dataset, TimmImages)
    keys = list(range(number)) if is_timm else [SampleKey(0, index, 0) for index in range(number)]
    if not workers:
        return lambda: [dataset[key] for key in keys]
    collate = timm.data.loader.fast_collate if is_timm else fast_collate
    batches = [keys[start:start + BATCH_SIZE] for start in range(0, number, BATCH_SIZE)]
    loader = torch.utils.data.DataLoader(
        dataset, batch_sampler=batches, num_workers=workers, persistent_workers=True, collate_fn=collate)
    return lambda: [None for _ in loader]


def pipelines(paths: list[Path], size: int, crop: str, workers: int, names: list[str]) -> dict[str, Callable[[], None]]:
    kwargs = {'is_training': True, 'use_prefetcher': True, 'color_jitter': None, 'interpolation': 'bilinear'}
    functions = {}
    for name in names:
        if name == 'timm':
            dataset = TimmImages(paths, timm.data.create_transform(size, **kwargs))
        else:
            reader = MultiLabelReader(paths, torch.ones(len(paths), 1, dtype=torch.int8), ['a'], paths[0].parent)
            images = MultiLabelDataset(reader)
            images.decoder = 'pil' if name == 'pil' else 'torchvision'
            images.scaled_decoding = name == 'scaled'
            images.transform = create_transform(
                size, decoder=images.decoder, train_crop_mode=crop, scaled_decoding=images.scaled_decoding, **kwargs)
            if name == 'cache':
                images.use_cache(paths[0].parent / 'cache')
            dataset = _Samples(images, seed=0)  # with the seeds that a loader sets for each sample
        functions[name] = passes(dataset, len(paths), workers)
    return functions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--size', type=int, default=448, help='image size (default: 448)')
    parser.add_argument('--workers', type=int, default=0, help='workers of a DataLoader (default: 0, no DataLoader)')
    parser.add_argument('--seconds', type=float, default=20., help='time per row (default: 20)')
    args = parser.parse_args()

    torch.set_num_threads(1)
    met = []
    with tempfile.TemporaryDirectory() as folder:
        small = write_images(Path(folder), 64, 640, 480)
        large = write_images(Path(folder), 4, 4000, 3000)
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
    sys.exit(not all(met))


if __name__ == '__main__':
    main()
