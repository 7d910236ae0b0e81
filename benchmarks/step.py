""" Time of a training step with SpliceMix and SpliceMix-CL, relative to a plain step with as many images

Times a whole step (forward, backward, SGD) of

    plain      timm's ClassificationTask with binary cross entropy on B + M images
    SpliceMix  SpliceMixTask on B images, to which it appends M mixed ones
    CL         the same with consistency learning

of each model alternately, and then a step without mixing of each multi-label head (`--heads`) on the first model,
relative to the same model with global max pooling (GMP) and a linear classifier.

Prints median times, and median and quartiles of the ratios per round. Exits with 1 if the median of a ratio of
SpliceMix is above `--at-most`. Use more rounds on a busy machine, where single ratios vary a lot.

    python benchmarks/step.py
    python benchmarks/step.py --models resnet50 --batch-size 8 --rounds 30
    python benchmarks/step.py --device cuda --batch-size 64
    python benchmarks/step.py --models resnet50 --heads csra ml-gcn
"""
import argparse
import itertools
import sys
from typing import Callable

import torch
from timing import alternate, claim, medians, ratios
from timm.models import get_pretrained_cfg
from timm.task import ClassificationTask, TrainingTask

import timm_splicemix as tsm
from timm_splicemix.errors import UsageError
from timm_splicemix.heads import list_heads

MODELS = ('resnet50', 'vit_tiny_patch16_224', 'swin_tiny_patch4_window7_224')
GRIDS, RATIO = '1x2,2x2,2x3', 0.25
NUM_CLASSES = 80
HEAD_ROUNDS = 5  # at most: the larger heads take several times as long as the model


def make_steps(name: str, batch_size: int, img_size: int, device: torch.device) -> dict[str, Callable[[], None]]:
    torch.manual_seed(0)
    kwargs = {'img_size': img_size} if get_pretrained_cfg(name).fixed_input_size else {}
    model = tsm.create_model(name, num_classes=NUM_CLASSES, global_pool='max', **kwargs).to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    criterion = torch.nn.BCEWithLogitsLoss()
    images = torch.randn(batch_size + int(RATIO * batch_size), 3, img_size, img_size, device=device)
    targets = (torch.rand(len(images), NUM_CLASSES, device=device) < 0.05).float()

    def make_step(task: TrainingTask, number: int) -> Callable[[], None]:
        rounds = itertools.count()

        def step() -> None:
            if isinstance(task, tsm.SpliceMixTask):
                task.set_step(0, next(rounds))  # the same grids with and without consistency learning
            optimizer.zero_grad(set_to_none=True)
            task(images[:number], targets[:number])['loss'].backward()
            optimizer.step()
            if device.type == 'cuda':
                torch.cuda.synchronize()
        return step

    def make_task(consistency_weight: float) -> tsm.SpliceMixTask:
        return tsm.SpliceMixTask(
            model, criterion, tsm.SpliceMix(GRIDS, ratio=RATIO), consistency_weight,
            input_size=(3, img_size, img_size), verbose=False)

    return {
        'plain': make_step(ClassificationTask(model, criterion, verbose=False), len(images)),
        'SpliceMix': make_step(make_task(0.), batch_size),
        'CL': make_step(make_task(1.), batch_size),
    }


def make_head_steps(
        name: str,
        heads: list[str],
        batch_size: int,
        img_size: int,
        device: torch.device,
) -> dict[str, Callable[[], None]]:
    """A step with GMP, and one with each head that the model supports."""
    kwargs = {'img_size': img_size} if get_pretrained_cfg(name).fixed_input_size else {}
    images = torch.randn(batch_size, 3, img_size, img_size, device=device)
    targets = (torch.rand(len(images), NUM_CLASSES, device=device) < 0.05).float()
    side_inputs = {
        'class_vectors': torch.randn(NUM_CLASSES, 300), 'cooccurrence': (targets.sum(dim=0), targets.T @ targets)}

    def make_step(head: str) -> Callable[[], None]:
        torch.manual_seed(0)
        options = {'head': head, 'side_inputs': side_inputs} if head else {'global_pool': 'max'}
        model = tsm.create_model(name, num_classes=NUM_CLASSES, **options, **kwargs).to(device).train()
        task = tsm.SpliceMixTask(model, torch.nn.BCEWithLogitsLoss(), verbose=False)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=1e-4, momentum=0.9)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            task(images, targets)['loss'].backward()
            optimizer.step()
            if device.type == 'cuda':
                torch.cuda.synchronize()
        return step

    steps = {'GMP': make_step('')}
    for head in heads:
        try:
            steps[head] = make_step(head)
        except UsageError as error:
            print(error, file=sys.stderr)
    return steps


def measure_heads(args: argparse.Namespace) -> None:
    name = args.models[0]
    steps = make_head_steps(name, args.heads, args.batch_size, args.img_size, args.device)
    times = alternate(steps, min(args.rounds, HEAD_ROUNDS), title='heads')
    print(f'\n| head on {name}, {args.batch_size} images | ms | / GMP |\n|---|---|---|')
    for head, seconds in medians(times).items():
        low, ratio, high = ratios(times, head, 'GMP')
        print(f'| {head} | {seconds * 1e3:.0f} | {ratio:.3f} ({low:.3f} to {high:.3f}) |', flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--models', nargs='+', default=MODELS, help=f'models to measure (default: {" ".join(MODELS)})')
    parser.add_argument(
        '--heads', nargs='*', default=list_heads(), choices=list_heads(), metavar='NAME',
        help='heads to measure on the first model (default: all)')
    parser.add_argument('--batch-size', type=int, default=8, help='number of regular images (default: 8)')
    parser.add_argument('--img-size', type=int, default=224, help='image size (default: 224)')
    parser.add_argument('--rounds', type=int, default=15, help='number of measurements of each step (default: 15)')
    parser.add_argument('--threads', type=int, default=1, help='threads of torch (default: 1)')
    parser.add_argument('--device', type=torch.device, default='cpu', help='default: cpu')
    parser.add_argument('--at-most', type=float, default=1.03, help='largest acceptable ratio (default: 1.03)')
    args = parser.parse_args()
    if args.batch_size < round(1 / RATIO):
        parser.error(f'Expected --batch-size of at least {round(1 / RATIO)}, but got {args.batch_size}.')
    if args.rounds < 2:
        parser.error(f'Expected --rounds of at least 2, but got {args.rounds}.')

    torch.set_num_threads(args.threads)
    print(f'torch {torch.__version__}, {args.threads} thread(s), {args.batch_size} + {int(RATIO * args.batch_size)} '
          f'images of {args.img_size} px, {args.rounds} rounds')
    print('| model | plain ms | SpliceMix ms | CL ms | SpliceMix / plain | CL / SpliceMix |\n|---|---|---|---|---|---|',
          flush=True)
    met = []
    for name in args.models:
        steps = make_steps(name, args.batch_size, args.img_size, args.device)
        times = alternate(steps, args.rounds, title=name)
        cells = [name, *(f'{seconds * 1e3:.0f}' for seconds in medians(times).values())]
        for step, base in (('SpliceMix', 'plain'), ('CL', 'SpliceMix')):
            low, ratio, high = ratios(times, step, base)
            cells.append(f'{ratio:.3f} ({low:.3f} to {high:.3f})')
            met.append(claim(f'time of a step, {name}: {step} / {base}', (low, ratio, high), at_most=args.at_most))
        print(f'| {" | ".join(cells)} |', flush=True)
    if args.heads:
        measure_heads(args)
    sys.exit(not all(met))


if __name__ == '__main__':
    main()
