""" Runs of the VOC study: folders of train.py, and the records that the repository keeps of finished runs """
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Optional, Sequence

import numpy as np
import torch
import yaml
from voc_arms import ARMS, Arm

from timm_splicemix.errors import UsageError
from timm_splicemix.files import atomic_write, write_json
from timm_splicemix.results import RESULTS, SCORES, Scores
from timm_splicemix.run.tracking import read_summary

RECORD = 'run.json'  # in the folder of a run
RECORDS = 'runs.json'  # records of all runs of a setting, beside their scores
EVALUATION = 'validate'  # output folder of validate.py in the folder of a run
EVALUATION_KEYS = ('epoch', 'metrics', 'sizes')
ENVIRONMENT_KEYS = ('timm_splicemix', 'timm', 'torch', 'python')


@dataclass(frozen=True)
class Run:
    """ A run, finished or not.

    Args:
        folder: Folder of the run, or of the records that it was read from.
        record: Arm, seed, epochs, recipe, flags, weights, seconds, and whether the run has finished.
        rows: Rows of its summary.csv, one per epoch.
        environment: Versions that it was made with, {} if unknown.
        evaluation: Results of validate.py after the last epoch, None if it was not evaluated.
        load_scores: Loads the scores of all images after the last epoch.
    """
    folder: Path
    record: dict[str, Any]
    rows: list[dict[str, str]]
    environment: dict[str, Any]
    evaluation: Optional[dict[str, Any]]
    load_scores: Callable[[], Scores]

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
        return self.record['epochs']

    @property
    def size(self) -> int:
        flags = self.record['recipe']
        return int(flags[flags.index('--img-size') + 1])

    @property
    def is_finished(self) -> bool:
        return self.record['finished']

    @property
    def scored_rows(self) -> list[dict[str, str]]:
        """Rows with metrics; --val-interval skips some epochs, but never the last one."""
        return [row for row in self.rows if row.get('eval_mAP')]

    def curve(self, metric: str = 'mAP') -> list[float]:
        return [float(row[f'eval_{metric}']) for row in self.scored_rows]

    def scored_epochs(self) -> list[int]:
        """Epochs with metrics, counted from 1."""
        return [int(row['epoch']) + 1 for row in self.scored_rows]

    def scores(self) -> Scores:
        scores = self.load_scores()
        return replace(scores, scores=scores.scores.float())


def run_name(arm: Arm, seed: int) -> str:
    return f'{arm.name}-seed{seed}'


def write_record(folder: Path, record: dict[str, Any]) -> None:
    write_json(record, folder / RECORD)


def read_record(folder: Path) -> Optional[dict[str, Any]]:
    file = folder / RECORD
    return json.loads(file.read_text(encoding='utf-8')) if file.is_file() else None


def read_evaluation(folder: Path, epochs: int) -> Optional[dict[str, Any]]:
    """Results of validate.py, None if there are none of the last epoch."""
    file = folder / EVALUATION / RESULTS
    if not file.is_file():
        return None
    content = json.loads(file.read_text(encoding='utf-8'))
    return content if content.get('epoch') == epochs - 1 and 'sizes' in content else None


def read_runs(output: Path) -> list[Run]:
    """Runs in the folder of all runs, in the order of arms and seeds."""
    runs = []
    for folder in (file.parent for file in output.glob(f'*/{RECORD}')):
        record = read_record(folder)
        environment = folder / 'environment.yaml'
        runs.append(Run(
            folder, record, read_summary(folder / 'summary.csv'),
            yaml.safe_load(environment.read_text(encoding='utf-8')) if environment.is_file() else {},
            read_evaluation(folder, record['epochs']),
            lambda file=folder / EVALUATION / SCORES: Scores.load(file)))
    return _in_order(runs)


def read_records(records: Path) -> list[Run]:
    """Runs that `keep_runs` wrote, in the order of arms and seeds."""
    def load_scores(name: str) -> Scores:
        with np.load(records / SCORES) as arrays:
            return Scores(
                torch.from_numpy(arrays[name]), torch.from_numpy(arrays['targets']),
                tuple(arrays['class_names'].tolist()))

    return _in_order([
        Run(records, **content, load_scores=lambda name=name: load_scores(name))
        for name, content in _read_kept(records).items()])


def all_runs(output: Path, records: Path) -> list[Run]:
    """Kept runs, and those of the output folder that were not kept."""
    kept = read_records(records)
    names = {run.name for run in kept}
    return _in_order(kept + [run for run in read_runs(output) if run.name not in names])


def keep_runs(runs: Sequence[Run], records: Path) -> list[str]:
    """ Add finished and evaluated runs to the records, without weights and paths; returns the names of new ones.

    Scores are kept in half precision. Metrics of epochs come from the summary, so this only changes intervals and the
    gains of classes, by about 0.01.
    """
    kept, arrays = _read_kept(records), {}
    new = [run for run in runs if run.is_finished and run.evaluation is not None and run.name not in kept]
    if not new:
        return []
    if (records / SCORES).is_file():
        with np.load(records / SCORES) as file:
            arrays = dict(file)
    for run in new:
        scores = run.scores()
        arrays.setdefault('targets', scores.targets.numpy())
        arrays.setdefault('class_names', np.array(scores.class_names))
        if not np.array_equal(arrays['targets'], scores.targets.numpy()):
            raise other_images(run)
        arrays[run.name] = scores.scores.half().numpy()
        kept[run.name] = {
            'record': run.record,
            'rows': run.rows,
            'environment': {key: run.environment[key] for key in ENVIRONMENT_KEYS if key in run.environment},
            'evaluation': {key: run.evaluation[key] for key in EVALUATION_KEYS},
        }
    with atomic_write(records / SCORES) as temporary, open(temporary, 'wb') as file:
        np.savez_compressed(file, **arrays)
    lines = [f'{json.dumps(name)}: {json.dumps(content)}' for name, content in kept.items()]
    with atomic_write(records / RECORDS) as temporary:  # last: a run counts as kept once it is here
        temporary.write_text('{\n' + ',\n'.join(lines) + '\n}\n', encoding='utf-8')
    return [run.name for run in new]


def check_same_recipe(runs: Sequence[Run]) -> None:
    """Raise an error for runs of different recipes, which cannot be compared."""
    begun = [run for run in runs if run.rows]
    for run in begun[1:]:
        for name in ('recipe', 'weights'):
            if run.record[name] != begun[0].record[name]:
                raise UsageError(
                    f'Expected runs of one recipe, but {begun[0].name} in {begun[0].folder} and {run.name} in '
                    f'{run.folder} differ in {name}: choose another --output or --records.')


def other_images(run: Run) -> UsageError:
    return UsageError(
        f'Expected scores of the same images and labels in all runs, but {run.name} in {run.folder} has others: '
        f'delete its folder {EVALUATION} and evaluate it again.')


def _read_kept(records: Path) -> dict[str, dict[str, Any]]:
    file = records / RECORDS
    return json.loads(file.read_text(encoding='utf-8')) if file.is_file() else {}


def _in_order(runs: Sequence[Run]) -> list[Run]:
    order = list(ARMS)
    known = [run for run in runs if run.record['arm'] in order]
    return sorted(known, key=lambda run: (order.index(run.arm.name), run.seed))
