""" What the repository keeps of finished runs of benchmarks/voc.py: all that its tables and pictures are made of """
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Sequence

import yaml
from voc_results import ENVIRONMENT, EVALUATION, RECORD, Run, in_order, read_runs, write_record

from timm_splicemix.report import written_whole
from timm_splicemix.results import RESULTS, SCORES, write_json

EVALUATION_KEYS = ('epoch', 'metrics', 'sizes')
ENVIRONMENT_KEYS = ('timm_splicemix', 'timm', 'torch', 'python')


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
        with written_whole(folder / 'summary.csv') as temporary:
            shutil.copyfile(run.folder / 'summary.csv', temporary)
        content = run.environment()
        with written_whole(folder / ENVIRONMENT) as temporary:
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
