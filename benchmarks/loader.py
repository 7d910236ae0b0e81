""" Speed of reading, decoding and transforming images for training, relative to timm's transforms with PIL

Writes 640 x 480 JPEG files and reads them as uint8 tensors of 448 px, with the pipelines alternately. Prints the median
images per second, and the median ratios per round. Exits with 1 if decoder 'torchvision' is not `--at-least` times as
fast as timm.

    python benchmarks/loader.py
    python benchmarks/loader.py --workers 1 --at-least 1.5
"""
import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Callable, Optional

import numpy as np
import timm.data
import timm.data.loader
import torch
from PIL import Image
from timing import alternate, medians, ratios

from timm_splicemix.data.collate import Sample, fast_collate
from timm_splicemix.data.decode import decode_image
from timm_splicemix.data.transforms import create_transform

NUM_IMAGES = 64
HEIGHT, WIDTH = 480, 640
BATCH_SIZE = 16


def write_images(folder: Path) -> list[Path]:
    """Write noise with the spectrum of photos, whose colours vary less than their brightness: about 50 to 110 kB."""
    frequency = np.hypot(np.fft.fftfreq(HEIGHT)[:, None], np.fft.rfftfreq(WIDTH))
    frequency[0, 0] = 1.
    # from brightness and two colour differences
    to_rgb = np.array([[1., 1., 1.], [0.3, 0., -0.3], [-0.15, 0.3, -0.15]])
    paths = []
    for i in range(NUM_IMAGES):
        noise = np.fft.rfft2(np.random.default_rng(i).normal(size=(3, HEIGHT, WIDTH)))
        texture = np.fft.irfft2(noise / frequency ** 1.5, s=(HEIGHT, WIDTH))
        pixels = 128 + 50 * (texture / texture.std()).transpose(1, 2, 0) @ to_rgb
        paths.append(folder / f'{i}.jpg')
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(paths[-1], quality=90)
    return paths


class Images(torch.utils.data.Dataset):
    """Images of one pipeline; decoder None reads as timm's `ImageDataset` does."""

    def __init__(self, paths: list[Path], decoder: Optional[str], transform: Callable):
        self.paths = paths
        self.decoder = decoder
        self.transform = transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple:
        with open(self.paths[index], 'rb') as file:
            if self.decoder is None:
                return self.transform(Image.open(file).convert('RGB')), 0
            return Sample(index, self.transform(decode_image(file.read(), self.decoder)), torch.zeros(1))


def pipelines(paths: list[Path], size: int, train_crop_mode: str) -> dict[str, Images]:
    kwargs = {'is_training': True, 'use_prefetcher': True, 'color_jitter': None, 'interpolation': 'bilinear'}
    sets = {
        name: Images(paths, name, create_transform(size, decoder=name, train_crop_mode=train_crop_mode, **kwargs))
        for name in ('pil', 'torchvision')
    }
    if train_crop_mode == 'multiscale':
        return sets  # timm has no such crop
    return {'timm': Images(paths, None, timm.data.create_transform(size, **kwargs)), **sets}


def passes(dataset: Images, workers: int) -> Callable[[], None]:
    """A function that reads all images once."""
    if not workers:
        return lambda: [dataset[i] for i in range(len(dataset))]
    collate = timm.data.loader.fast_collate if dataset.decoder is None else fast_collate
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=BATCH_SIZE, num_workers=workers, persistent_workers=True, collate_fn=collate)
    return lambda: [None for _ in loader]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--size', type=int, default=448, help='image size (default: 448)')
    parser.add_argument('--workers', type=int, default=0, help='workers of a DataLoader (default: 0, no DataLoader)')
    parser.add_argument('--seconds', type=float, default=15., help='time per row (default: 15)')
    parser.add_argument('--at-least', type=float, default=2., help='smallest acceptable ratio (default: 2)')
    args = parser.parse_args()

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        paths = write_images(Path(folder))
        kilobytes = statistics.mean(path.stat().st_size for path in paths) / 1000
        print(
            f'torch {torch.__version__}, Pillow {Image.__version__}, {args.workers} worker(s), '
            f'{WIDTH} x {HEIGHT} JPEG of {kilobytes:.0f} kB to {args.size} px, images per second')
        print('| crop | timm | pil | torchvision | torchvision / timm | torchvision / pil |\n|---|---|---|---|---|---|')
        for crop in ('rrc', 'multiscale'):
            functions = {
                name: passes(dataset, args.workers) for name, dataset in pipelines(paths, args.size, crop).items()}
            times = alternate(functions, seconds=args.seconds, title=crop)
            rates = {name: f'{NUM_IMAGES / seconds:.0f}' for name, seconds in medians(times).items()}
            factors = {name: ratios(times, name, 'torchvision')[1] for name in times}
            over_timm = f'{factors["timm"]:.2f}' if 'timm' in factors else ''
            print(
                f"| {crop} | {rates.get('timm', '')} | {rates['pil']} | {rates['torchvision']} | {over_timm} | "
                f"{factors['pil']:.2f} |", flush=True)
            if factors.get('timm', args.at_least) < args.at_least:
                sys.exit(f'Expected torchvision / timm of at least {args.at_least}, but got {over_timm}.')


if __name__ == '__main__':
    main()
