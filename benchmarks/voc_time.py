""" How long an epoch of each arm takes beside one of the baseline, with the data and the loop of train.py """
import json
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Sequence

import torch
from tqdm import tqdm
from voc_arms import Arm, Recipe, seed_flags

from timm_splicemix.args import map_defaults
from timm_splicemix.run.engine import Epoch, Hooks, train_one_epoch
from timm_splicemix.run.machine import set_up_device
from timm_splicemix.run.model import set_training
from timm_splicemix.train import build_parser, create_run, parse_args

TIMES = 'times.json'
BATCHES = 4  # of one measurement: all grids come, and the order of arms changes often


def make_measurement(arm: Arm, recipe: Recipe, flags: Sequence[str], output: str) -> Callable[[int], float]:
    """ A function that trains some batches of an arm, the n-th time other ones, and returns the seconds.

    Args:
        arm: The arm.
        recipe: What all arms share.
        flags: Flags that say where data and weights are.
        output: Folder for what train.py writes.
    """
    args, given = parse_args(build_parser(), [
        *recipe.flags(), *arm.flags, *seed_flags(arm, 0), *flags, '--output', output, '--experiment', arm.name])
    settings = dict(vars(args))
    map_defaults(args, given)
    run = create_run(args, given, settings, set_up_device(args))
    run.step.is_primary = False  # no log lines

    class SetStep(Hooks):
        def before_batch(self, batch: int, images: torch.Tensor, targets: torch.Tensor) -> None:
            run.task.set_step(run.epoch, batch)

    def measure(index: int) -> float:
        set_training(run.task, run.frozen, args.freeze_bn)
        run.epoch = index
        run.task.set_epoch(index)
        started = time.perf_counter()
        train_one_epoch(
            run.task, run.train_loader, run.optimizer, run.step, Epoch(index, BATCHES), hooks=SetStep())
        return time.perf_counter() - started

    return measure


def measure(arms: Sequence[Arm], recipe: Recipe, flags: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """ Time arms in turn, in this process alone, beginning with another one each round.

    Args:
        arms: The arms; the first one is what the others are compared with.
        recipe: What all arms share.
        flags: Flags that say where data and weights are.
        rounds: Number of times that each is measured.

    Returns:
        For each arm its title, the seconds of a batch, and the quartiles of its ratios to the first one.
    """
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory() as output:
        measurements = {arm.title: make_measurement(arm, recipe, flags, output) for arm in arms}
        titles = list(measurements)
        seconds: dict[str, list[float]] = {title: [] for title in titles}
        for measurement in measurements.values():  # the first time is not like the others
            measurement(0)
        for index in tqdm(range(1, rounds + 1), desc='Rounds', disable=not sys.stderr.isatty()):
            first = index % len(titles)
            for title in titles[first:] + titles[:first]:
                seconds[title].append(measurements[title](index))
    logging.disable(logging.NOTSET)
    rows = []
    for title, values in seconds.items():
        ratios = [mine / base for mine, base in zip(values, seconds[titles[0]])]
        rows.append({
            'arm': title, 'rounds': rounds, 'seconds_per_batch': statistics.median(values) / BATCHES,
            'ratio': statistics.quantiles(ratios, n=4, method='inclusive')})
    return rows


def format_times(rows: Sequence[dict[str, Any]]) -> str:
    """The table of times, in Markdown."""
    lines = [
        '### Time of training, without evaluation', '',
        f'One thread, {rows[0]["rounds"]} rounds of {BATCHES} batches with data and '
        'optimizer, the arms in turn: median seconds of a batch, and median and quartiles of the ratios of each round.',
        '', '| arm | seconds of a batch | ratio to the baseline |', '|---|---|---|']
    for row in rows:
        low, median, high = row['ratio']
        lines.append(f'| {row["arm"]} | {row["seconds_per_batch"]:.2f} | {median:.2f} ({low:.2f} to {high:.2f}) |')
    return '\n'.join(lines)


def read_times(folder: Path) -> list[dict[str, Any]]:
    """What was measured and kept in a folder, [] if nothing."""
    file = folder / TIMES
    return json.loads(file.read_text(encoding='utf-8')) if file.is_file() else []
