""" Time of validate.py relative to timm's own validate script, on the same model, images and flags

Writes a folder of JPEG files with one class each, which timm's script can evaluate, too, and runs both scripts
alternately, in new processes. Needs timm's scripts, which are no part of the package timm: a folder with validate.py of
a clone of pytorch-image-models, in --timm-scripts or $TIMM_SCRIPTS. Exits with 1 if ours takes more than `--at-most`
of timm's time.

    TIMM_SCRIPTS=pytorch-image-models python benchmarks/evaluation.py
"""
import argparse
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import timm
import torch
from loader import write_images
from timing import alternate, claim, medians, not_measured, ratios

REPOSITORY = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        '--timm-scripts', default=os.environ.get('TIMM_SCRIPTS'), metavar='DIR',
        help="folder of timm's validate.py")
    parser.add_argument('--model', default='resnet18', help='default: resnet18')
    parser.add_argument('--images', type=int, default=256, help='number of images (default: 256)')
    parser.add_argument('--rounds', type=int, default=5, help='runs of each script (default: 5)')
    parser.add_argument('--at-most', type=float, default=1., help='largest acceptable ratio (default: 1)')
    args = parser.parse_args()
    if not args.timm_scripts:
        not_measured(
            'time of validate.py: ours / timm', f'at most {args.at_most:g}',
            "$TIMM_SCRIPTS, the folder of timm's validate.py, is not set")
        return

    with tempfile.TemporaryDirectory() as folder:
        for name in ('a', 'b'):
            images = Path(folder) / 'data' / 'validation' / name
            images.mkdir(parents=True)
            write_images(images, args.images // 2, 640, 480)
        checkpoint = Path(folder) / 'model.pth'
        torch.save(timm.create_model(args.model, num_classes=2).state_dict(), checkpoint)
        flags = [
            '--data-dir', f'{folder}/data', '--model', args.model, '--num-classes', '2', '--checkpoint', checkpoint,
            '--device', 'cpu', '--workers', '1', '--batch-size', '32']
        ours = [sys.executable, REPOSITORY / 'validate.py', *flags, '--output']
        commands = {
            'timm': [sys.executable, Path(args.timm_scripts).resolve() / 'validate.py', *flags],
            'pil': [*ours, f'{folder}/pil'],
            'torchvision': [*ours, f'{folder}/torchvision', '--decoder', 'torchvision'],
        }
        environment = {**os.environ, 'PYTHONPATH': str(REPOSITORY), 'OMP_NUM_THREADS': '1'}
        run = partial(subprocess.run, check=True, env=environment, cwd=folder, capture_output=True)
        times = alternate({name: partial(run, command) for name, command in commands.items()}, args.rounds)
    print(f'{args.model}, {args.images} images, seconds: ' + str({k: round(v, 1) for k, v in medians(times).items()}))
    met = [
        claim(
            f'time of validate.py, {args.model}, decoder {name}: ours / timm', ratios(times, name, 'timm'),
            at_most=args.at_most)
        for name in ('pil', 'torchvision')
    ]
    sys.exit(not all(met))


if __name__ == '__main__':
    main()
