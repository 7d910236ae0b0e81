""" Compare evaluation results, with bootstrap intervals """
from pathlib import Path
from typing import Any, Callable, Optional, Sequence, Union

import torch
from tqdm import tqdm

from ..files import format_table, printable, write_csv, write_json
from ..metrics import average_precision
from ..results import SCORES, Result, Scores, read_results

_SAMPLES_AT_ONCE = 128


def compare_files(
        paths: Sequence[Union[str, Path]],
        output: Optional[Union[str, Path]] = None,
        num_samples: int = 1000,
        seed: int = 0,
        draw_sizes: Optional[Callable] = None,
) -> str:
    """ Compare results of validate.py, and return the comparison as text.

    Args:
        paths: results.json files, or their folders.
        output: Folder for compare.json, compare.csv and sizes.png.
        num_samples: Number of bootstrap samples.
        seed: Seed of the samples.
        draw_sizes: Function that draws sizes.png, if all results have --eval-sizes.
    """
    results = read_results(paths)
    comparison = compare_results(results, num_samples, seed)
    text = format_comparison(comparison)
    if not output:
        return text
    folder = Path(output)
    write_json(comparison, folder / 'compare.json')
    write_csv(
        [{'name': row['name'], 'model': row['model'], **row['metrics']} for row in comparison['results']],
        folder / 'compare.csv')
    sizes = {result.name: result.content.get('sizes') for result in results}
    if draw_sizes is not None and all(sizes.values()):
        draw_sizes(sizes, folder / 'sizes.png', 'mAP' if 'mAP' in sizes[results[0].name][0] else 'top1')
    return f'{text}\n\nOutput folder: {folder}'


def compare_results(results: Sequence[Result], num_samples: int = 1000, seed: int = 0) -> dict[str, Any]:
    """ Compare results of the same images with the first of them.

    Intervals come from the paired bootstrap over images: both models are scored on the same samples of the images, so
    that what is hard for both cancels out. They show how much the difference depends on the images of the data set,
    not on the seed of training.

    Args:
        results: Results that `read_results` returned.
        num_samples: Number of bootstrap samples.
        seed: Seed of the samples.

    Returns:
        For each result 'name', 'model', 'metrics', and the 'difference' of each metric to the first result. If all
        results have scores, also 'mAP_interval' of the difference, and the difference in AP of all 'classes'.
    """
    first = results[0]
    names = [name for name in first.content['metrics'] if all(name in other.content['metrics'] for other in results)]
    rows = [{
        'name': result.name,
        'model': result.content['model'],
        'metrics': {name: result.content['metrics'][name] for name in names},
        'difference': {name: _minus(result.content['metrics'][name], first.content['metrics'][name]) for name in names},
    } for result in results]
    if any(result.scores is None for result in results):
        return {'results': rows, 'num_samples': 0}
    interpolated = first.content['preset'] == 'interpolated'
    samples = draw_samples(len(first.scores.scores), num_samples, seed)
    sampled = [sampled_map(result.scores, samples, interpolated, result.name) for result in results]
    classes = [100 * average_precision(result.scores.scores, result.scores.targets, interpolated) for result in results]
    for row, values, precisions in zip(rows, sampled, classes):
        row['mAP_interval'] = interval(values - sampled[0])
        row['classes'] = dict(zip(first.scores.class_names, (precisions - classes[0]).tolist()))
    return {'results': rows, 'num_samples': num_samples}


def draw_samples(num_images: int, number: int, seed: int = 0) -> torch.Tensor:
    """Draw bootstrap samples of all images: (samples, images) uint8, how often each image is drawn."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.empty(number, num_images, dtype=torch.uint8)
    for row in counts:
        drawn = torch.randint(num_images, (num_images,), generator=generator)
        row.copy_(torch.bincount(drawn, minlength=num_images))
    return counts


def sampled_average_precision(
        scores: torch.Tensor,
        labels: torch.Tensor,
        samples: torch.Tensor,
        interpolated: bool = False,
) -> torch.Tensor:
    """ Compute the AP of one class on many bootstrap samples, with a single sort.

    Args:
        scores: (N,).
        labels: (N,), 1, 0, or -1 for unknown.
        samples: (samples, N), how often each image is drawn.
        interpolated: Use the highest precision at each recall or above.

    Returns:
        (samples,) float64 from 0 to 1, NaN for a sample without positives.
    """
    known = (labels >= 0).nonzero().flatten()
    ordered, order = scores[known].sort(descending=True)
    order = known[order]
    positive = labels[order] == 1
    # Where the scores equal to that of each positive end, among all and among the positives: they share one threshold.
    own = -ordered[positive]
    ends, ends_true = (torch.searchsorted(among, own, right=True) - 1 for among in (-ordered, own))
    values = []
    for some in samples.split(_SAMPLES_AT_ONCE):
        weights = some[:, order]  # (some, known)
        predicted = weights.cumsum(dim=1, dtype=torch.int32)[:, ends]
        drawn = weights[:, positive]  # (some, positives)
        true = drawn.cumsum(dim=1, dtype=torch.int32)[:, ends_true]
        precision = true.double() / predicted.clamp(min=1)
        if interpolated:
            precision = precision.masked_fill(drawn == 0, 0.).flip(1).cummax(dim=1).values.flip(1)
        values.append((drawn * precision).sum(dim=1) / drawn.sum(dim=1))  # 0 / 0 is NaN
    return torch.cat(values)


def sampled_map(scores: Scores, samples: torch.Tensor, interpolated: bool = False, name: str = '') -> torch.Tensor:
    """ Compute the mAP on many bootstrap samples, in percent.

    Args:
        scores: Scores of all images.
        samples: (samples, images), how often each image is drawn.
        interpolated: Use the highest precision at each recall or above.
        name: Name in the progress bar.

    Returns:
        (samples,) float64.
    """
    pairs = zip(scores.scores.t().contiguous(), scores.targets.t().contiguous())
    bar = tqdm(pairs, total=len(scores.class_names), desc=f'Bootstrap {name}', unit='class', leave=False, disable=None)
    values = [
        sampled_average_precision(column, labels, samples, interpolated)
        for column, labels in bar if (labels == 1).any()]
    return 100 * torch.stack(values).nanmean(dim=0)


def interval(values: torch.Tensor) -> tuple[float, float]:
    """Return the 2.5 % and 97.5 % quantiles."""
    low, high = torch.quantile(values, torch.tensor([0.025, 0.975], dtype=values.dtype)).tolist()
    return low, high


def _minus(value: Optional[float], other: Optional[float]) -> Optional[float]:
    return None if value is None or other is None else value - other


def format_comparison(comparison: dict[str, Any], number: int = 5) -> str:
    """Format what `compare_results` returned, with the `number` classes that gain and lose most."""
    first, *others = rows = comparison['results']
    table = []
    for name in first['metrics']:
        cells = {'': name, first['name']: _number(first['metrics'][name], '.2f')}
        for row in others:
            value, change = _number(row['metrics'][name], '.2f'), _number(row['difference'][name], '+.2f')
            cells[row['name']] = f'{value} ({change})'
        table.append(cells)
    lines = [format_table(table, {row['name']: '' for row in rows})]
    if not comparison['num_samples']:
        return '\n'.join([*lines, '', f'No intervals: not all results have {SCORES}.'])
    for row in others:
        low, high = row['mAP_interval']
        verdict = 'higher' if low > 0 else 'lower' if high < 0 else 'no significant difference'
        lines += [
            '', f'{row["name"]} against {first["name"]}: {row["difference"]["mAP"]:+.2f} mAP, '
            f'95 % interval [{low:+.2f}, {high:+.2f}] ({comparison["num_samples"]:,} bootstrap samples): {verdict}']
        changes = sorted(
            ((name, value) for name, value in row['classes'].items() if value == value), key=lambda item: item[1])
        gains, losses = [item for item in changes[::-1] if item[1] > 0], [item for item in changes if item[1] < 0]
        for title, part in (('largest gains', gains[:number]), ('largest losses', losses[:number])):
            if part:
                lines.append(f'  {title}: ' + ', '.join(f'{printable(name)} {value:+.2f}' for name, value in part))
    return '\n'.join(lines)


def _number(value: Optional[float], spec: str) -> str:
    return '-' if value is None else format(value, spec)
