""" Runs of benchmarks/voc.py on disk: their folders, and what the repository keeps of finished ones """
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional, Sequence

import yaml
from voc_arms import ARMS, Arm

from timm_splicemix.files import atomic_write, write_json
from timm_splicemix.results import RESULTS, SCORES, Scores
from timm_splicemix.run.tracking import read_summary

RECORD = 'run.json'
ENVIRONMENT = 'environment.yaml'
EVALUATION = 'validate'  # folder of what validate.py wrote, in that of the run
EVALUATION_KEYS = ('epoch', 'metrics', 'sizes')
ENVIRONMENT_KEYS = ('timm_splicemix', 'timm', 'torch', 'python')


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
    with atomic_write(folder / RECORD) as temporary:
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


def keep_runs(runs: Sequence[Run], records: Path) -> list[str]:
    """ Copy what is worth keeping of runs that are finished and evaluated; returns the names of new ones.

    Weights are left, and paths of this machine too. Scores are kept in half precision; the mAP of an epoch is in the
    summary, so it is only intervals and gains of classes that they change, by about 0.01.

    Args:
        runs: Runs.
        records: Folder to keep them in.
    """
    new = []
    for run in runs:
        folder = records / run.name
        if not run.is_finished or run.evaluation() is None or (folder / RECORD).is_file():
            continue
        (folder / EVALUATION).mkdir(parents=True, exist_ok=True)
        evaluation = run.evaluation()
        write_json({key: evaluation[key] for key in EVALUATION_KEYS}, folder / EVALUATION / RESULTS)
        scores = run.scores()
        replace(scores, scores=scores.scores.half(), filenames=()).save(folder / EVALUATION / SCORES)
        with atomic_write(folder / 'summary.csv') as temporary:
            shutil.copyfile(run.folder / 'summary.csv', temporary)
        content = run.environment()
        with atomic_write(folder / ENVIRONMENT) as temporary:
            temporary.write_text(yaml.safe_dump({key: content[key] for key in ENVIRONMENT_KEYS if key in content}))
        write_record(folder, run.record)  # the last one: with it, the run is kept
        new.append(run.name)
    return new


def all_runs(output: Path, records: Path) -> list[Run]:
    """ Runs of a folder, and those that were kept.

    Args:
        output: Folder of all runs.
        records: Folder of what was kept; a run that is in both is taken from there.
    """
    kept = read_runs(records)
    names = {run.name for run in kept}
    return in_order(kept + [run for run in read_runs(output) if run.name not in names])
