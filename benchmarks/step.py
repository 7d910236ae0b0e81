""" How much a training step of SpliceMix, and of SpliceMix-CL, costs beside a plain one on as many images

Times a whole step (forward, backward, SGD) of

    plain      timm's ClassificationTask with binary cross entropy on B + M images
    SpliceMix  SpliceMixTask on B images, to which it appends M mixed ones
    CL         the same with consistency learning

of one model, in turn, beginning with another one each round, so that all meet the same load of the machine. Prints the
median times, and the medians and quartiles of the ratios of each round. Exits with 1 if the median of a ratio is above
`--at-most`. Ratios of single rounds spread more than they may differ, so on a busy machine take more rounds.

    python benchmarks/step.py
    python benchmarks/step.py --models resnet50 --batch-size 8 --rounds 30
"""
import argparse
import statistics
import sys
import time
from typing import Callable

import torch
from timm.models import get_pretrained_cfg
from timm.task import ClassificationTask, TrainingTask
from tqdm import tqdm

import timm_splicemix as tsm

MODELS = ('resnet50', 'vit_tiny_patch16_224', 'swin_tiny_patch4_window7_224')
GRIDS, RATIO = '1x2,2x2,2x3', 0.25
NUM_CLASSES = 80


def make_steps(name: str, batch_size: int, img_size: int) -> dict[str, Callable[[int], None]]:
    """ Steps of a model, each a function of the number of the round.

    Args:
        name: Name of the model.
        batch_size: Number of regular images.
        img_size: Their height and width.
    """
    torch.manual_seed(0)
    kwargs = {'img_size': img_size} if get_pretrained_cfg(name).fixed_input_size else {}
    model = tsm.create_model(name, num_classes=NUM_CLASSES, global_pool='max', **kwargs).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    criterion = torch.nn.BCEWithLogitsLoss()
    images = torch.randn(batch_size + int(RATIO * batch_size), 3, img_size, img_size)
    targets = (torch.rand(len(images), NUM_CLASSES) < 0.05).float()

    def make_step(task: TrainingTask, number: int) -> Callable[[int], None]:
        def step(round_index: int) -> None:
            if isinstance(task, tsm.SpliceMixTask):
                task.set_step(0, round_index)  # the same grids with and without consistency learning
            optimizer.zero_grad(set_to_none=True)
            task(images[:number], targets[:number])['loss'].backward()
            optimizer.step()
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


def measure(steps: dict[str, Callable[[int], None]], rounds: int, name: str) -> dict[str, list[float]]:
    """ Seconds of each step in each round.

    Args:
        steps: What to measure.
        rounds: Number of rounds.
        name: What the progress bar says.
    """
    names = list(steps)
    for step in steps.values():  # the first time is not like the others
        step(0)
    times: dict[str, list[float]] = {step: [] for step in names}
    for index in tqdm(range(rounds), desc=name, disable=not sys.stderr.isatty(), leave=False):
        first = index % len(names)
        for step in names[first:] + names[:first]:
            before = time.perf_counter()
            steps[step](index)
            times[step].append(time.perf_counter() - before)
    return times


def compare(times: dict[str, list[float]], step: str, base: str) -> tuple[float, str]:
    """ Median of the ratios of all rounds, and how to print it with its quartiles.

    Args:
        times: What `measure` returned.
        step: The step that costs more.
        base: The step that it is compared with.
    """
    ratios = [a / b for a, b in zip(times[step], times[base])]
    low, median, high = statistics.quantiles(ratios, n=4, method='inclusive')
    return median, f'{median:.3f} ({low:.3f} to {high:.3f})'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--models', nargs='+', default=MODELS, help=f'models to measure (default: {" ".join(MODELS)})')
    parser.add_argument('--batch-size', type=int, default=8, help='number of regular images (default: 8)')
    parser.add_argument('--img-size', type=int, default=224, help='size of the images (default: 224)')
    parser.add_argument('--rounds', type=int, default=15, help='how often each step is measured (default: 15)')
    parser.add_argument('--threads', type=int, default=1, help='threads of torch (default: 1)')
    parser.add_argument('--at-most', type=float, default=1.03, help='ratio that is good enough (default: 1.03)')
    args = parser.parse_args()
    if args.batch_size < round(1 / RATIO):
        parser.error(f'Expected a batch of at least {round(1 / RATIO)} images, of which one is mixed, '
                     f'but got {args.batch_size}.')
    if args.rounds < 2:
        parser.error(f'Expected at least 2 rounds, but got {args.rounds}.')

    torch.set_num_threads(args.threads)
    print(f'torch {torch.__version__}, {args.threads} thread(s), {args.batch_size} + {int(RATIO * args.batch_size)} '
          f'images of {args.img_size} px, {args.rounds} rounds')
    print('| model | plain ms | SpliceMix ms | CL ms | SpliceMix / plain | CL / SpliceMix |\n|---|---|---|---|---|---|',
          flush=True)
    missed = []
    for name in args.models:
        times = measure(make_steps(name, args.batch_size, args.img_size), args.rounds, name)
        medians = [f'{statistics.median(seconds) * 1e3:.0f}' for seconds in times.values()]
        cells = [name, *medians]
        for step, base in (('SpliceMix', 'plain'), ('CL', 'SpliceMix')):
            ratio, text = compare(times, step, base)
            cells.append(text)
            if ratio > args.at_most:
                missed.append(f'{name}, {step} / {base}: {ratio:.3f}')
        print(f'| {" | ".join(cells)} |', flush=True)
    if missed:
        sys.exit(f'Expected ratios of at most {args.at_most}, but got ' + '; '.join(missed))


if __name__ == '__main__':
    main()
