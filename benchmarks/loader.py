""" How fast images are read, decoded and transformed for training, against timm's transforms with PIL

Makes 640 x 480 JPEG files and takes them from the disk to uint8 tensors of 448 px, by the pipelines in turn. Prints the
median images per second of each, and the medians of their ratios in a round. Exits with 1 if decoder 'torchvision' is
not `--at-least` times as fast as timm.

    python benchmarks/loader.py
    python benchmarks/loader.py --workers 1 --at-least 1.5
"""
import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable, Optional

import numpy as np
import timm.data
import timm.data.loader
import torch
from PIL import Image
from tqdm import tqdm

from timm_splicemix.data.collate import Sample, fast_collate
from timm_splicemix.data.decode import decode_image
from timm_splicemix.data.transforms import create_transform

NUM_IMAGES = 64
HEIGHT, WIDTH = 480, 640
BATCH_SIZE = 16


def write_images(folder: Path) -> list[Path]:
    """ JPEG files as detailed as photos, which take 50 to 110 kB at this size and quality.

    Their spectrum falls like that of photos, and colours vary less than light.
    """
    frequency = np.hypot(np.fft.fftfreq(HEIGHT)[:, None], np.fft.rfftfreq(WIDTH))
    frequency[0, 0] = 1.
    to_rgb = np.array([[1., 1., 1.], [0.3, 0., -0.3], [-0.15, 0.3, -0.15]])  # from light and two colour differences
    paths = []
    for i in range(NUM_IMAGES):
        noise = np.fft.rfft2(np.random.default_rng(i).normal(size=(3, HEIGHT, WIDTH)))
        texture = np.fft.irfft2(noise / frequency ** 1.5, s=(HEIGHT, WIDTH))
        pixels = 128 + 50 * (texture / texture.std()).transpose(1, 2, 0) @ to_rgb
        paths.append(folder / f'{i}.jpg')
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(paths[-1], quality=90)
    return paths


class Images(torch.utils.data.Dataset):
    """Images of a pipeline, from files; decoder None reads like timm's `ImageDataset`."""

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
    """What reads all images once."""
    if not workers:
        return lambda: [dataset[i] for i in range(len(dataset))]
    collate = timm.data.loader.fast_collate if dataset.decoder is None else fast_collate
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=BATCH_SIZE, num_workers=workers, persistent_workers=True, collate_fn=collate)
    return lambda: [None for _ in loader]


def alternate(functions: dict[str, Callable[[], None]], seconds: float, title: str) -> dict[str, np.ndarray]:
    """Seconds of functions called in turn, so that all meet the same load of the machine."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    start = time.perf_counter()
    with tqdm(desc=title, unit='round', disable=not sys.stderr.isatty(), leave=False) as progress:
        while time.perf_counter() - start < seconds or progress.n < 5:
            for name, function in functions.items():
                before = time.perf_counter()
                function()
                times[name].append(time.perf_counter() - before)
            progress.n += 1
            progress.refresh()
    return {name: np.array(taken) for name, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--size', type=int, default=448, help='height and width of the result (default: 448)')
    parser.add_argument('--workers', type=int, default=0, help='processes of a DataLoader (default: 0, no DataLoader)')
    parser.add_argument('--seconds', type=float, default=15., help='time spent on each row (default: 15)')
    parser.add_argument('--at-least', type=float, default=2., help='smallest ratio that is good enough (default: 2)')
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
            taken = alternate(functions, args.seconds, crop)
            rates = {name: f'{NUM_IMAGES / np.median(seconds):.0f}' for name, seconds in taken.items()}
            ratios = {name: np.median(seconds / taken['torchvision']) for name, seconds in taken.items()}
            print(
                f"| {crop} | {rates.get('timm', '')} | {rates['pil']} | {rates['torchvision']} | "
                f"{format(ratios['timm'], '.2f') if 'timm' in ratios else ''} | {ratios['pil']:.2f} |", flush=True)
            if ratios.get('timm', args.at_least) < args.at_least:
                sys.exit(f'Expected torchvision / timm of at least {args.at_least}, but got {ratios["timm"]:.2f}')


if __name__ == '__main__':
    main()
