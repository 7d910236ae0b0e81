""" Pictures of the VOC study; each function returns whether there was something to draw and matplotlib to draw it """
import statistics
from pathlib import Path

import torch
from voc_arms import ARMS, HEADS_GROUP
from voc_results import GROUPS, MAIN, Report

from timm_splicemix import draw
from timm_splicemix.draw import load_pyplot, save_figure
from timm_splicemix.metrics import average_precision


def draw_curves(report: Report, path: Path) -> bool:
    """Draw the mAP over epochs: the mean of each arm, and its seeds in a lighter color."""
    begun = {run.arm.group for run in report.runs if run.scored_rows}
    groups = [group for group in GROUPS if group in begun and group != HEADS_GROUP]  # too many arms for one picture
    pyplot = load_pyplot() if groups else None
    if pyplot is None:
        return False
    figure, panels = pyplot.subplots(
        1, len(groups), figsize=(1 + 5.5 * len(groups), 4.2), layout='constrained', squeeze=False)
    for axes, group in zip(panels[0], groups):
        for number, arm in enumerate(report.arms(group)):
            runs = [run for run in report.runs if run.arm.name == arm.name and run.scored_rows]
            if not runs:
                continue
            color = f'C{number}' if number < 10 else 'black'
            for run in runs if len(runs) > 1 else []:
                axes.plot(run.scored_epochs(), run.curve(), color=color, alpha=0.25, linewidth=1)
            # The mean of the longest runs, so that a run that has just begun does not shorten the curve
            epochs = max((run.scored_epochs() for run in runs), key=len)
            furthest = [run.curve() for run in runs if run.scored_epochs() == epochs]
            mean = [statistics.mean(values) for values in zip(*furthest)]
            axes.plot(epochs, mean, color=color, marker='.', label=arm.title)
        axes.set(title=group, xlabel='epoch', ylabel='mAP on val in %')
        axes.locator_params(axis='x', integer=True)
        axes.grid(alpha=0.3)
        axes.legend(fontsize='small')
    save_figure(figure, path)
    return True


def draw_sizes(report: Report, path: Path) -> bool:
    """Draw the mAP of the main arms over the image size."""
    titles = [ARMS[name].title for name in MAIN]
    curves = {title: rows for title, rows in report.sizes().items() if title in titles}
    if not curves or load_pyplot() is None:
        return False
    draw.draw_sizes(curves, path)
    return True


def draw_classes(report: Report, path: Path) -> bool:
    """Draw the gain of the main arms in AP of each class, averaged over seeds."""
    gains = {}
    for arm in (ARMS[name] for name in MAIN[1:]):
        pairs = report.pairs(arm)
        if pairs and all(run.evaluation is not None for pair in pairs for run in pair):
            pairs = [(report.scores(mine), report.scores(other)) for mine, other in pairs]
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


PICTURES = {  # by the suffix of the file name
    'curves': ('mAP over the epochs', draw_curves),
    'sizes': ('mAP at lower resolution', draw_sizes),
    'classes': ('Gain in AP of each class', draw_classes),
}
