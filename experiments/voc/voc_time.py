""" Training time of each arm relative to the baseline, with the data and the training loop of train.py """
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
BATCHES = 4  # per measurement, so that all grids occur and arms alternate often


def make_measurement(arm: Arm, recipe: Recipe, flags: Sequence[str], output: str) -> Callable[[int], float]:
    """Return a function that trains a few batches of an arm and returns the seconds; `flags` name data and weights."""
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
    """ Time arms alternately in this process, starting with another arm in each round.

    Returns:
        For each arm its title, the seconds per batch, and the quartiles of its ratio to the first arm.
    """
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory() as output:
        measurements = {arm.title: make_measurement(arm, recipe, flags, output) for arm in arms}
        titles = list(measurements)
        seconds: dict[str, list[float]] = {title: [] for title in titles}
        for measurement in measurements.values():  # warm-up
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
    lines = [
        '### Training time, without evaluation', '',
        f'One thread, {rows[0]["rounds"]} rounds of {BATCHES} batches including data loading and optimizer, arms '
        'alternating: median seconds per batch, and median and quartiles of the ratio per round.',
        '', '| arm | seconds per batch | ratio to the baseline |', '|---|---|---|']
    for row in rows:
        low, median, high = row['ratio']
        lines.append(f'| {row["arm"]} | {row["seconds_per_batch"]:.2f} | {median:.2f} ({low:.2f} to {high:.2f}) |')
    return '\n'.join(lines)


def read_times(folder: Path) -> list[dict[str, Any]]:
    file = folder / TIMES
    return json.loads(file.read_text(encoding='utf-8')) if file.is_file() else []
