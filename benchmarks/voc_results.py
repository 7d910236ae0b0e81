""" What came out of the runs of benchmarks/voc.py: tables, pictures, and the section of a document """
import json
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional, Sequence

import torch
import yaml
from voc_arms import ARMS, Arm
from voc_time import format_times

from timm_splicemix.metrics import average_precision
from timm_splicemix.report import load_pyplot, save_figure, written_whole
from timm_splicemix.results import RESULTS, SCORES, Scores, draw_samples, draw_sizes, interval, sampled_map
from timm_splicemix.tracking import read_summary

RECORD = 'run.json'
ENVIRONMENT = 'environment.yaml'
EVALUATION = 'validate'  # folder of what validate.py wrote, in that of the run
GROUPS = {  # the 40 % are of COCO, where the rule comes from
    'baseline': 'All labels', '40-baseline': 'Labels by the rule "40 %"', 'single-baseline': 'One label of each image'}
MAIN = ('baseline', 'splicemix', 'splicemix-cl', 'baseline-more')
NUM_SAMPLES = 1000


@dataclass(frozen=True)
class Run:
    """ A run, finished or not.

    Args:
        folder: Its folder.
        record: What the benchmark wrote down about it.
        rows: Rows of its summary, one for each epoch.
    """
    folder: Path
    record: dict[str, Any]
    rows: list[dict[str, str]]

    @property
    def arm(self) -> Arm:
        return ARMS[self.record['arm']]

    @property
    def seed(self) -> int:
        return self.record['seed']

    @property
    def name(self) -> str:
        return run_name(self.arm, self.seed)

    @property
    def epochs(self) -> int:
        """Number of epochs that it is to have."""
        return self.record['epochs']

    @property
    def size(self) -> int:
        """Height and width of its images."""
        flags = self.record['recipe']
        return int(flags[flags.index('--img-size') + 1])

    @property
    def is_finished(self) -> bool:
        return self.record['finished']

    @property
    def scored_rows(self) -> list[dict[str, str]]:
        """Rows of the epochs that were scored; --val-interval leaves some out, never the last one of a run."""
        return [row for row in self.rows if row.get('eval_mAP')]

    def curve(self, metric: str = 'mAP') -> list[float]:
        """Values of a metric in each epoch that was scored."""
        return [float(row[f'eval_{metric}']) for row in self.scored_rows]

    def scored_epochs(self) -> list[int]:
        """Numbers of these epochs, from 1 on."""
        return [int(row['epoch']) + 1 for row in self.scored_rows]

    def evaluation(self) -> Optional[dict[str, Any]]:
        """What validate.py found for the last epoch, None if it was not asked."""
        file = self.folder / EVALUATION / RESULTS
        if not file.is_file():
            return None
        content = json.loads(file.read_text(encoding='utf-8'))
        return content if content.get('epoch') == self.epochs - 1 and 'sizes' in content else None

    def scores(self) -> Optional[Scores]:
        """Scores of all images after the last epoch, None if validate.py was not asked."""
        if self.evaluation() is None:
            return None
        scores = Scores.load(self.folder / EVALUATION / SCORES)
        return replace(scores, scores=scores.scores.float())

    def environment(self) -> dict[str, Any]:
        """Versions that it was made with, {} if they were not written down."""
        file = self.folder / ENVIRONMENT
        return yaml.safe_load(file.read_text(encoding='utf-8')) if file.is_file() else {}


def run_name(arm: Arm, seed: int) -> str:
    """Name of a run and of its folder."""
    return f'{arm.name}-seed{seed}'


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write down what a run is."""
    with written_whole(folder / RECORD) as temporary:
        temporary.write_text(json.dumps(record, indent=2) + '\n', encoding='utf-8')


def read_record(folder: Path) -> Optional[dict[str, Any]]:
    """Read what `write_record` wrote, None if nothing."""
    file = folder / RECORD
    return json.loads(file.read_text(encoding='utf-8')) if file.is_file() else None


def read_runs(output: Path) -> list[Run]:
    """ All runs that were begun, in the order of the arms, then of the seeds.

    Args:
        output: Folder of all runs.
    """
    runs = [
        Run(file.parent, read_record(file.parent), read_summary(file.parent / 'summary.csv'))
        for file in output.glob(f'*/{RECORD}')]
    return in_order([run for run in runs if run.record['arm'] in ARMS])


def in_order(runs: Sequence[Run]) -> list[Run]:
    """Runs in the order of the arms, then of the seeds."""
    order = list(ARMS)
    return sorted(runs, key=lambda run: (order.index(run.arm.name), run.seed))


def check_same_recipe(runs: Sequence[Run]) -> None:
    """ Refuse runs of different recipes, which can't be compared.

    Args:
        runs: Runs; those without an epoch may begin anew.
    """
    begun = [run for run in runs if run.rows]
    for run in begun[1:]:
        for name in ('recipe', 'weights'):
            if run.record[name] != begun[0].record[name]:
                raise ValueError(
                    f'Expected runs of the same recipe, but got {begun[0].folder} and {run.folder} with another '
                    f'{name}: choose another --output or --records.')


def mean_and_std(values: Sequence[float], digits: int = 2, sign: str = '') -> str:
    """Mean, and with two values or more their standard deviation (of a sample)."""
    if not values:
        return '-'
    mean = f'{round(statistics.mean(values), digits) + 0.:{sign}.{digits}f}'  # + 0, as there is no gain of -0.00
    return f'{mean} ± {statistics.stdev(values):.{digits}f}' if len(values) > 1 else mean


def paper_cell(arm: Arm) -> str:
    """What the paper reports of an arm, and its gain there."""
    if arm.paper is None:
        return ''
    reference = ARMS[arm.reference].paper
    no_gain = arm.name == arm.reference or reference is None or arm.is_quoted
    gain = '' if no_gain else f' ({arm.paper - reference:+.1f})'
    return f'{arm.paper:.1f}{gain}'


class Report:
    """ Tables and pictures of runs.

    Args:
        runs: What `read_runs` returned.
        num_samples: Bootstrap samples behind the intervals.
    """

    def __init__(self, runs: Sequence[Run], num_samples: int = NUM_SAMPLES):
        self.runs = list(runs)
        check_same_recipe(self.runs)
        self.num_samples = num_samples
        self._targets: Optional[torch.Tensor] = None
        self._samples: Optional[torch.Tensor] = None
        self._sampled: dict[str, torch.Tensor] = {}

    def finished(self, arm: str) -> dict[int, Run]:
        """Finished runs of an arm by their seeds."""
        return {run.seed: run for run in self.runs if run.arm.name == arm and run.is_finished}

    def pairs(self, arm: Arm) -> list[tuple[Run, Run]]:
        """Finished runs of an arm and those of its reference with the same seeds."""
        mine, others = self.finished(arm.name), self.finished(arm.reference)
        return [(mine[seed], others[seed]) for seed in mine if seed in others]

    def arms(self, reference: str) -> list[Arm]:
        """Arms of a group of which a run was begun."""
        begun = {run.arm.name for run in self.runs}
        return [arm for arm in ARMS.values() if arm.name in begun and arm.reference == reference]

    def text(self) -> str:
        """Everything that is known, in Markdown."""
        if not self.runs:
            return 'No run was begun yet.'
        parts = [self._table(reference) for reference in GROUPS if self.arms(reference)]
        parts += [part for part in (self._size_table(), self._unfinished()) if part]
        return '\n\n'.join(parts)

    def _table(self, reference: str) -> str:
        arms = self.arms(reference)
        lines = [
            f'### {GROUPS[reference]}', '',
            '| arm | seeds | epochs | **mAP, last epoch** | each seed | mAP, best epoch | CF1 | OF1 | '
            'gain in mAP | 95 % interval | paper |',
            '|---|---|---|---|---|---|---|---|---|---|---|']
        for arm in arms:
            runs = list(self.finished(arm.name).values())
            begun = [run for run in self.runs if run.arm.name == arm.name]
            last = [run.curve()[-1] for run in runs]
            gains = [mine.curve()[-1] - other.curve()[-1] for mine, other in self.pairs(arm)]
            is_reference = arm.name == reference
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
        """The main arms in a few columns, in Markdown."""
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
        """ 95 % interval of the gain over the reference, by bootstrap over images; None without scores.

        Both arms are scored on the same samples, each as the mean over its seeds, so it says how much depends on the
        choice of the images. How much depends on the seed is told by the deviation beside it.

        Args:
            arm: The arm.
        """
        pairs = self.pairs(arm)
        if not pairs or any(run.evaluation() is None for pair in pairs for run in pair):
            return None
        gains = [self._sampled_map(mine) - self._sampled_map(other) for mine, other in pairs]
        return interval(torch.stack(gains).mean(dim=0))

    def _scores(self, run: Run) -> Scores:
        """Scores of a run that was evaluated, on the same images as those of the others."""
        scores = run.scores()
        if self._targets is None:
            self._targets = scores.targets
        if not torch.equal(scores.targets, self._targets):
            raise ValueError(
                f'Expected scores of the same images with the same labels in all runs, but got others in {run.folder}: '
                f'remove its folder {EVALUATION} and evaluate it anew.')
        return scores

    def _sampled_map(self, run: Run) -> torch.Tensor:
        if run.name not in self._sampled:
            scores = self._scores(run)
            if self._samples is None:
                self._samples = draw_samples(len(scores.scores), self.num_samples)
            self._sampled[run.name] = sampled_map(scores, self._samples, name=run.name)
        return self._sampled[run.name]

    def sizes(self) -> dict[str, list[dict[str, Any]]]:
        """mAP at each size, its mean over seeds and their values, by the title of the arm."""
        curves = {}
        for arm in ARMS.values():
            studies = [run.evaluation()['sizes'] for run in self.finished(arm.name).values() if run.evaluation()]
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
        return '\n'.join(['Not finished, and not in the means:', '', *states]) if runs else ''

    def draw_curves(self, path: Path) -> bool:
        """ Draw the mAP over the epochs, the mean of the seeds of each arm, and pale the seeds themselves.

        Args:
            path: Picture to write.

        Returns:
            Whether there was anything to draw, and matplotlib to draw it.
        """
        begun = {run.arm.reference for run in self.runs if run.scored_rows}
        groups = [reference for reference in GROUPS if reference in begun]
        pyplot = load_pyplot() if groups else None
        if pyplot is None:
            return False
        figure, panels = pyplot.subplots(
            1, len(groups), figsize=(1 + 5.5 * len(groups), 4.2), layout='constrained', squeeze=False)
        for axes, reference in zip(panels[0], groups):
            for number, arm in enumerate(self.arms(reference)):
                runs = [run for run in self.runs if run.arm.name == arm.name and run.scored_rows]
                if not runs:
                    continue
                color = f'C{number}' if number < 10 else 'black'
                for run in runs if len(runs) > 1 else []:
                    axes.plot(run.scored_epochs(), run.curve(), color=color, alpha=0.25, linewidth=1)
                # A mean over the seeds that are furthest, not to be cut off where another one has begun
                epochs = max((run.scored_epochs() for run in runs), key=len)
                furthest = [run.curve() for run in runs if run.scored_epochs() == epochs]
                mean = [statistics.mean(values) for values in zip(*furthest)]
                axes.plot(epochs, mean, color=color, marker='.', label=arm.title)
            axes.set(title=GROUPS[reference], xlabel='epoch', ylabel='mAP on val in %')
            axes.locator_params(axis='x', integer=True)
            axes.grid(alpha=0.3)
            axes.legend(fontsize='small')
        save_figure(figure, path)
        return True

    def draw_sizes(self, path: Path) -> bool:
        """Draw the mAP over the size of images, of the main arms; returns as `draw_curves` does."""
        titles = [ARMS[name].title for name in MAIN]
        curves = {title: rows for title, rows in self.sizes().items() if title in titles}
        if not curves or load_pyplot() is None:
            return False
        draw_sizes(curves, path)
        return True

    def draw_classes(self, path: Path) -> bool:
        """Draw the gain of each class, means over seeds, of the main arms; returns as `draw_curves` does."""
        gains = {}
        for arm in (ARMS[name] for name in MAIN[1:]):
            pairs = self.pairs(arm)
            if pairs and all(run.evaluation() is not None for pair in pairs for run in pair):
                pairs = [(self._scores(mine), self._scores(other)) for mine, other in pairs]
                names = pairs[0][0].class_names
                gains[arm.title] = 100 * torch.stack([
                    average_precision(mine.scores, mine.targets) - average_precision(other.scores, other.targets)
                    for mine, other in pairs]).mean(dim=0)
        pyplot = load_pyplot() if gains else None
        if pyplot is None:
            return False
        order = next(iter(gains.values())).nan_to_num().argsort().tolist()
        figure, axes = pyplot.subplots(figsize=(5.5, 6), layout='constrained')
        height = 0.8 / len(gains)
        for number, (title, values) in enumerate(gains.items()):
            places = [place - 0.4 + (number + 0.5) * height for place in range(len(order))]
            axes.barh(places, values[order].tolist(), height, label=title)
        axes.set_yticks(range(len(order)), [names[index] for index in order])
        axes.set(xlabel='gain in AP over the baseline')
        axes.axvline(0, color='#5f6368', linewidth=1)
        axes.grid(alpha=0.3, axis='x')
        axes.legend(fontsize='small')
        save_figure(figure, path)
        return True


def describe_runs(runs: Sequence[Run]) -> str:
    """ What was run: flags, versions and hours.

    Args:
        runs: Runs of one recipe.
    """
    first = runs[0]
    hours = sum(run.record['seconds'] for run in runs) / 3600
    lines = [
        f'{sum(run.is_finished for run in runs)} runs are finished. All took {hours:.1f} hours of one process, beside '
        'whatever else the machine did.', '',
        f'All of them: `train.py {" ".join(first.record["recipe"])}`, weights {first.record["weights"]}.', '']
    versions = first.environment()
    if versions:
        words = [f'{name} {versions[name]}' for name in ('python', 'torch', 'timm', 'timm_splicemix')]
        lines += [f'Versions: {", ".join(words)}.', '']
    lines += ['| arm | flags of its own |', '|---|---|']
    for arm in dict.fromkeys(run.arm for run in runs):
        flags = ' '.join(arm.flags)
        lines.append(f'| {arm.title} | `{flags}` |' if flags else f'| {arm.title} | |')
    return '\n'.join(lines)


def marks(section: str) -> tuple[str, str]:
    """Lines of a document between which the results of a section stand."""
    return f'<!-- {section}: begin -->', f'<!-- {section}: end -->'


def write_document(path: Path, section: str, report: Report, times: Sequence[dict[str, Any]] = ()) -> None:
    """ Put tables and pictures between the marks of a section; pictures go beside the document.

    Args:
        path: Document in Markdown with the two marks.
        section: Name of the section, and the beginning of those of the pictures.
        report: What is put there.
        times: What `voc_time.measure` returned, () for none.
    """
    parts = [report.text()]
    if times:
        parts.append(format_times(times))
    if report.runs:
        parts.insert(0, describe_runs(report.runs))
        for name, title, draw in (
                ('curves', 'mAP over the epochs', report.draw_curves),
                ('sizes', 'mAP at lower resolution', report.draw_sizes),
                ('classes', 'Gain in AP of each class', report.draw_classes)):
            file = path.with_name(f'{section}-{name}.png')
            if draw(file):
                parts.append(f'![{title}]({file.name})')
    write_section(path, section, '\n\n'.join(parts))


def write_section(path: Path, section: str, body: str) -> None:
    """ Put a text between the marks of a section.

    Args:
        path: Document in Markdown with the two marks.
        section: Name of the section.
        body: The text.
    """
    text = path.read_text(encoding='utf-8')
    begin, end = marks(section)
    head, found, rest = text.partition(begin)
    _, found_end, tail = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"Expected the lines '{begin}' and '{end}' in {path}, but got a document without.")
    with written_whole(path) as temporary:
        temporary.write_text(f'{head}{begin}\n{body}\n{end}{tail}', encoding='utf-8')
