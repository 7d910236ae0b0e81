""" How fast average precision is, against scikit-learn's and torchmetrics' on the same scores

Prints the median time of each, measured in turn in one run, and how many times as long as ours they take; torchmetrics
if it is installed. All are exact, and have to agree. Exits with 1 if a ratio is below `--at-least`.

    python benchmarks/metrics.py
    python benchmarks/metrics.py --half --threads 2
"""
import argparse
import statistics
import sys
import time
from typing import Callable

import torch
from sklearn.metrics import average_precision_score
from tqdm import tqdm

from timm_splicemix.metrics import MultilabelMeter, average_precision

try:
    from torchmetrics.classification import MultilabelAveragePrecision
except ImportError:
    MultilabelAveragePrecision = None

POSITIVE = 0.036  # of all labels, as in COCO 2014


def make_data(samples: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits whose positives are higher by two standard deviations, and their targets."""
    generator = torch.Generator().manual_seed(0)
    targets = (torch.rand(samples, classes, generator=generator) < POSITIVE).long()
    return torch.randn(samples, classes, generator=generator) + 2 * targets - 3, targets


def by_sklearn(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    scores, targets = scores.numpy(), targets.numpy()
    values = [average_precision_score(targets[:, c], scores[:, c]) for c in range(scores.shape[1])]
    return torch.tensor(values, dtype=torch.float64)


def by_torchmetrics(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    metric = MultilabelAveragePrecision(num_labels=scores.shape[1], average='none', thresholds=None)
    metric.update(scores, targets)
    return metric.compute()


def by_meter(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """All thirteen metrics, from batches: what a whole evaluation costs."""
    meter = MultilabelMeter(scores.shape[1])
    for batch, batch_targets in zip(scores.split(64), targets.split(64)):
        meter.update(batch, batch_targets)
    return meter.per_class() / 100


def measure(functions: dict[str, Callable], repeats: int) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Median seconds of functions called in turn, so that all meet the same load of the machine, and their results."""
    times = {name: [] for name in functions}
    results = {}
    for _ in tqdm(range(repeats), disable=not sys.stderr.isatty(), leave=False):
        for name, function in functions.items():
            before = time.perf_counter()
            results[name] = function()
            times[name].append(time.perf_counter() - before)
    return {name: statistics.median(taken) for name, taken in times.items()}, results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--samples', type=int, default=40137, help='images (default: 40137, as COCO 2014 val)')
    parser.add_argument('--classes', type=int, default=80, help='classes (default: 80)')
    parser.add_argument('--half', action='store_true', help='scores rounded to half precision, so that many are equal')
    parser.add_argument('--threads', type=int, default=1, help='threads of torch (default: 1)')
    parser.add_argument('--repeats', type=int, default=5, help='calls of each (default: 5)')
    parser.add_argument('--at-least', type=float, default=5., help='smallest ratio that is good enough (default: 5)')
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    scores, targets = make_data(args.samples, args.classes)
    if args.half:
        scores = scores.half().float()
    others = {'scikit-learn': lambda: by_sklearn(scores, targets)}
    if MultilabelAveragePrecision is not None:
        others['torchmetrics'] = lambda: by_torchmetrics(scores, targets)
    functions = {
        'average_precision': lambda: average_precision(scores, targets),
        'MultilabelMeter': lambda: by_meter(scores, targets),
        **others,
    }
    times, results = measure(functions, args.repeats)

    ours = times['average_precision']
    print(f'torch {torch.__version__}, {args.threads} thread(s), {args.samples} x {args.classes}')
    print('| | ms | ratio | largest difference |\n|---|---|---|---|')
    for name, taken in times.items():
        difference = (results[name].double() - results['average_precision']).abs().max().item()
        print(f'| {name} | {taken * 1e3:.1f} | {taken / ours:.1f} | {difference:.0e} |')
        if difference > 1e-5:  # torchmetrics computes in float32
            sys.exit(f'Expected equal results, but got a difference of {difference} to {name}.')
    too_slow = [f'{name}: {times[name] / ours:.1f}' for name in others if times[name] / ours < args.at_least]
    if too_slow:
        sys.exit(f'Expected ratios of at least {args.at_least}, but got ' + '; '.join(too_slow))


if __name__ == '__main__':
    main()
