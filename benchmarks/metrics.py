""" Speed of average precision, relative to scikit-learn and torchmetrics on the same scores

Prints the median time of each, and its ratio to ours; torchmetrics only if it is installed. All are exact and must
agree. Exits with 1 if a ratio is below `--at-least`.

    python benchmarks/metrics.py
    python benchmarks/metrics.py --half --threads 2
"""
import argparse
import sys
from typing import Any, Callable

import torch
from sklearn.metrics import average_precision_score
from timing import alternate, claim, medians, ratios

from timm_splicemix.metrics import MultilabelMeter, average_precision

try:
    from torchmetrics.classification import MultilabelAveragePrecision
except ImportError:
    MultilabelAveragePrecision = None

POSITIVE = 0.036  # fraction of positive labels in COCO 2014


def make_data(samples: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and targets; positives are two standard deviations higher."""
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
    """All thirteen metrics, updated with batches, as in an evaluation."""
    meter = MultilabelMeter(scores.shape[1])
    for batch, batch_targets in zip(scores.split(64), targets.split(64)):
        meter.update(batch, batch_targets)
    return meter.per_class() / 100


def keep_result(function: Callable, name: str, results: dict[str, Any]) -> Callable[[], None]:
    def call() -> None:
        results[name] = function()
    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--samples', type=int, default=40137, help='images (default: 40137, the size of COCO 2014 val)')
    parser.add_argument('--classes', type=int, default=80, help='classes (default: 80)')
    parser.add_argument('--half', action='store_true', help='round scores to half precision, for many ties')
    parser.add_argument('--threads', type=int, default=1, help='threads of torch (default: 1)')
    parser.add_argument('--repeats', type=int, default=5, help='calls of each function (default: 5)')
    parser.add_argument('--at-least', type=float, default=5., help='smallest acceptable ratio (default: 5)')
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
    results: dict[str, torch.Tensor] = {}
    functions = {name: keep_result(function, name, results) for name, function in functions.items()}
    all_times = alternate(functions, args.repeats)
    times = medians(all_times)
    ours = times['average_precision']
    print(f'torch {torch.__version__}, {args.threads} thread(s), {args.samples} x {args.classes}')
    print('| | ms | ratio | largest difference |\n|---|---|---|---|')
    for name, taken in times.items():
        difference = (results[name].double() - results['average_precision']).abs().max().item()
        print(f'| {name} | {taken * 1e3:.1f} | {taken / ours:.1f} | {difference:.0e} |')
        if difference > 1e-5:  # torchmetrics computes in float32
            sys.exit(f'Expected equal results, but got a difference of {difference} to {name}.')
    met = [
        claim(
            f'average precision, {args.samples} x {args.classes}: speed / {name}',
            ratios(all_times, name, 'average_precision'), at_least=args.at_least)
        for name in others
    ]
    sys.exit(not all(met))


if __name__ == '__main__':
    main()
