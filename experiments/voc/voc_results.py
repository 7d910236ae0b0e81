""" Results of the VOC study: tables, gains and their intervals, and the documents that show them """
import statistics
from pathlib import Path
from typing import Any, Optional, Sequence

import torch
from voc_arms import ARMS, Arm
from voc_records import Run, check_same_recipe, other_images

from timm_splicemix.errors import UsageError
from timm_splicemix.files import atomic_write
from timm_splicemix.results import Scores
from timm_splicemix.run.compare import draw_samples, interval, sampled_map

GROUPS = tuple(dict.fromkeys(arm.group for arm in ARMS.values()))
MAIN = ('baseline', 'splicemix', 'splicemix-cl', 'baseline-more')
NUM_SAMPLES = 1000


def mean_and_std(values: Sequence[float], digits: int = 2, sign: str = '') -> str:
    """Mean, and with two values or more their sample standard deviation."""
    if not values:
        return '-'
    mean = f'{round(statistics.mean(values), digits) + 0.:{sign}.{digits}f}'  # + 0 turns -0.00 into 0.00
    return f'{mean} ± {statistics.stdev(values):.{digits}f}' if len(values) > 1 else mean


def paper_cell(arm: Arm) -> str:
    """The paper's mAP of an arm and its gain."""
    if arm.paper is None:
        return ''
    reference = ARMS[arm.reference].paper
    no_gain = arm.name == arm.reference or reference is None or arm.is_quoted
    gain = '' if no_gain else f' ({arm.paper - reference:+.1f})'
    return f'{arm.paper:.1f}{gain}'


class Report:
    """ Tables of runs of one recipe.

    Args:
        runs: The runs, finished or not.
        num_samples: Number of bootstrap samples for the intervals.
    """

    def __init__(self, runs: Sequence[Run], num_samples: int = NUM_SAMPLES):
        self.runs = list(runs)
        check_same_recipe(self.runs)
        self.num_samples = num_samples
        self._targets: Optional[torch.Tensor] = None
        self._samples: Optional[torch.Tensor] = None
        self._sampled: dict[str, torch.Tensor] = {}

    def finished(self, arm: str) -> dict[int, Run]:
        return {run.seed: run for run in self.runs if run.arm.name == arm and run.is_finished}

    def pairs(self, arm: Arm) -> list[tuple[Run, Run]]:
        """Finished runs of an arm and those of its reference with the same seeds."""
        mine, others = self.finished(arm.name), self.finished(arm.reference)
        return [(mine[seed], others[seed]) for seed in mine if seed in others]

    def arms(self, group: str) -> list[Arm]:
        """Arms of a group that have at least one run."""
        begun = {run.arm.name for run in self.runs}
        return [arm for arm in ARMS.values() if arm.name in begun and arm.group == group]

    def text(self) -> str:
        """All tables, in Markdown."""
        if not self.runs:
            return 'No runs yet.'
        parts = [self._table(group) for group in GROUPS if self.arms(group)]
        parts += [part for part in (self._size_table(), self._unfinished()) if part]
        return '\n\n'.join(parts)

    def _table(self, group: str) -> str:
        lines = [
            f'### {group}', '',
            '| arm | seeds | epochs | **mAP, last epoch** | each seed | mAP, best epoch | CF1 | OF1 | '
            'gain in mAP | 95 % interval | paper |',
            '|---|---|---|---|---|---|---|---|---|---|---|']
        for arm in self.arms(group):
            runs = list(self.finished(arm.name).values())
            begun = [run for run in self.runs if run.arm.name == arm.name]
            last = [run.curve()[-1] for run in runs]
            gains = [mine.curve()[-1] - other.curve()[-1] for mine, other in self.pairs(arm)]
            is_reference = arm.name == arm.reference
            bounds = None if is_reference else self.interval(arm)
            lines.append('| ' + ' | '.join([
                arm.title, f'{len(runs)} of {len(begun)}',
                ', '.join(dict.fromkeys(f'{len(run.rows)} of {run.epochs}' for run in begun)),
                f'**{mean_and_std(last)}**' if last else '-',
                ', '.join(f'{value:.2f}' for value in last) or '-',
                mean_and_std([max(run.curve()) for run in runs]),
                *(mean_and_std([run.curve(metric)[-1] for run in runs]) for metric in ('CF1', 'OF1')),
                '' if is_reference else mean_and_std(gains, sign='+'),
                '' if is_reference else '-' if bounds is None else '{:+.2f} to {:+.2f}'.format(*bounds),
                paper_cell(arm)]) + ' |')
        return '\n'.join(lines)

    def headline(self) -> str:
        """The short table of the main arms, in Markdown."""
        lines = [
            '| | seeds | mAP | gain | 95 % interval | low resolution: 1/4 of the size | paper (ResNet-101, 448 px) |',
            '|---|---|---|---|---|---|---|']
        sizes = self.sizes()
        for arm in (ARMS[name] for name in MAIN):
            runs = list(self.finished(arm.name).values())
            if not runs:
                continue
            gains = [mine.curve()[-1] - other.curve()[-1] for mine, other in self.pairs(arm)]
            bounds = self.interval(arm)
            is_reference = arm.name == arm.reference
            quarter = next((row['values'] for row in sizes.get(arm.title, ()) if row['size'] * 4 == runs[0].size), [])
            lines.append('| ' + ' | '.join([
                arm.title, str(len(runs)), mean_and_std([run.curve()[-1] for run in runs], 1),
                '' if is_reference else mean_and_std(gains, sign='+'),
                '' if is_reference or bounds is None else '{:+.2f} to {:+.2f}'.format(*bounds),
                mean_and_std(quarter, 1), paper_cell(arm)]) + ' |')
        return '\n'.join(lines)

    def interval(self, arm: Arm) -> Optional[tuple[float, float]]:
        """ 95 % bootstrap interval over images of the gain over the reference; None without scores.

        Both arms are scored on the same samples and averaged over seeds, so the interval measures the influence of the
        choice of images. The standard deviation in the table measures the influence of the seed.
        """
        pairs = self.pairs(arm)
        if not pairs or any(run.evaluation is None for pair in pairs for run in pair):
            return None
        gains = [self._sampled_map(mine) - self._sampled_map(other) for mine, other in pairs]
        return interval(torch.stack(gains).mean(dim=0))

    def scores(self, run: Run) -> Scores:
        """Scores of an evaluated run; all runs must have scored the same images."""
        scores = run.scores()
        if self._targets is None:
            self._targets = scores.targets
        if not torch.equal(scores.targets, self._targets):
            raise other_images(run)
        return scores

    def _sampled_map(self, run: Run) -> torch.Tensor:
        if run.name not in self._sampled:
            scores = self.scores(run)
            if self._samples is None:
                self._samples = draw_samples(len(scores.scores), self.num_samples)
            self._sampled[run.name] = sampled_map(scores, self._samples, name=run.name)
        return self._sampled[run.name]

    def sizes(self) -> dict[str, list[dict[str, Any]]]:
        """mAP at each image size by the title of the arm: mean and values of seeds."""
        curves = {}
        for arm in ARMS.values():
            studies = [run.evaluation['sizes'] for run in self.finished(arm.name).values() if run.evaluation]
            if studies:
                curves[arm.title] = [
                    {'size': rows[0]['size'], 'trained': rows[0]['trained'], 'values': [row['mAP'] for row in rows],
                     'mAP': statistics.mean(row['mAP'] for row in rows)} for rows in zip(*studies)]
        return curves

    def _size_table(self) -> str:
        curves = self.sizes()
        if not curves:
            return ''
        sizes = [row['size'] for row in next(iter(curves.values()))]
        lines = [
            '### Low resolution, mAP of the last epoch', '',
            f'| arm | {" | ".join(f"{size} px" for size in sizes)} |', '|---' * (len(sizes) + 1) + '|']
        for title, rows in curves.items():
            lines.append(f'| {title} | {" | ".join(mean_and_std(row["values"]) for row in rows)} |')
        return '\n'.join(lines)

    def _unfinished(self) -> str:
        runs = [run for run in self.runs if not run.is_finished]
        states = [
            f'- {run.arm.title}, seed {run.seed}: {len(run.rows)} of {run.epochs} epochs'
            + (f', mAP {run.curve()[-1]:.2f}' if run.scored_rows else '') for run in runs]
        return '\n'.join(['Not finished, not included in the means:', '', *states]) if runs else ''


def describe_runs(runs: Sequence[Run]) -> str:
    """Command, versions, hours and arms of runs, in Markdown."""
    first = runs[0]
    hours = sum(run.record['seconds'] for run in runs) / 3600
    lines = [
        f'{sum(run.is_finished for run in runs)} finished runs, {hours:.1f} hours of one process on a shared machine.',
        '', f'Command: `train.py {" ".join(first.record["recipe"])}`, weights {first.record["weights"]}.', '']
    if first.environment:
        versions = [f'{name} {first.environment[name]}' for name in ('python', 'torch', 'timm', 'timm_splicemix')]
        lines += [f'Versions: {", ".join(versions)}.', '']
    lines += ['| arm | additional flags |', '|---|---|']
    for arm in dict.fromkeys(run.arm for run in runs):
        flags = ' '.join(arm.flags)
        lines.append(f'| {arm.title} | `{flags}` |' if flags else f'| {arm.title} | |')
    return '\n'.join(lines)


def marks(section: str) -> tuple[str, str]:
    return f'<!-- {section}: begin -->', f'<!-- {section}: end -->'


def write_section(path: Path, section: str, body: str) -> None:
    """Replace the text between the two marks of a section of a Markdown document."""
    text = path.read_text(encoding='utf-8')
    begin, end = marks(section)
    head, found, rest = text.partition(begin)
    _, found_end, tail = rest.partition(end)
    if not found or not found_end:
        raise UsageError(f"{path} has no lines '{begin}' and '{end}'.")
    with atomic_write(path) as temporary:
        temporary.write_text(f'{head}{begin}\n{body}\n{end}{tail}', encoding='utf-8')
