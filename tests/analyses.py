""" Results and runs that the analyses read, and checks that all their tests share """
import csv

import pytest
import torch
import yaml

from tests.helpers import rng
from timm_splicemix.files import write_csv, write_json
from timm_splicemix.metrics import average_precision, multilabel_metrics
from timm_splicemix.results import Scores, class_rows


def random_scores(targets, names, seed=0, files=()):
    return Scores(torch.randn(targets.shape, generator=rng(seed)), targets, tuple(names), None, tuple(files))


def write_result(folder, scores, **changes):
    """Write the files of validate.py except for pictures."""
    metrics = {'loss': 0.5, **multilabel_metrics(scores.scores, scores.targets, 3)}
    scores.save(folder / 'scores.npz')
    write_csv(class_rows(scores, 100 * average_precision(scores.scores, scores.targets)), folder / 'per_class_ap.csv')
    write_json({
        'model': 'resnet18', 'dataset': 'csv', 'split': 'val', 'num_images': len(scores.scores),
        'num_classes': len(scores.class_names), 'preset': 'paper', 'metrics': metrics, **changes,
    }, folder / 'results.json')
    return str(folder)


def write_run(folder, values, losses=None, **settings):
    """Write a run with these mAPs, None for an epoch that was not evaluated."""
    rows = [{
        'epoch': epoch, 'train_loss': 0.7, 'eval_loss': '' if value is None else (losses or values)[epoch],
        'eval_mAP': '' if value is None else value, 'lr': 0.1,
    } for epoch, value in enumerate(values)]
    write_csv(rows, folder / 'summary.csv')
    settings = {
        'batch_size': 16, 'epochs': len(values), 'lr': 0.1, 'seed': 0, 'output': str(folder), 'splicemix_grids': '',
        'splicemix_ratio': '0.25', 'splicemix_drop_prob': 0., 'splicemix_prob': 1., 'splicemix_mode': 'batch',
        'splicemix_batch': 'append', 'splicemix_cl': None, **settings}
    (folder / 'args.yaml').write_text(yaml.safe_dump(settings))
    return str(folder)


def read_table(path):
    with open(path, newline='') as file:
        return list(csv.DictReader(file))


def check_refused(main, argv, message, capsys):
    """Check that the command prints one line with this message and exits with code 2."""
    with pytest.raises(SystemExit) as caught:
        main([str(part) for part in argv])
    error = capsys.readouterr().err
    assert caught.value.code == 2 and message in error and error.count('\n') == 1, error


def check_written(folder, *names):
    """Check that the folder has exactly these files, none of them empty."""
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    assert all(path.stat().st_size for path in folder.iterdir())
