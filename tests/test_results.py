""" Result files, tables, comparison and thresholds """
import json
import math

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score

from tests.helpers import raises_error, rng
from timm_splicemix.compare import main
from timm_splicemix.draw import draw_sizes
from timm_splicemix.files import write_json
from timm_splicemix.metrics import average_precision, multilabel_metrics
from timm_splicemix.results import (
    Scores,
    class_rows,
    flat_row,
    format_classes,
    format_sizes,
    read_results,
    write_result,
)
from timm_splicemix.run.compare import (
    compare_results,
    draw_samples,
    format_comparison,
    sampled_average_precision,
    sampled_map,
)
from timm_splicemix.validate import main as validate

NAMES = ('ant', 'bee', 'cow')


def make_scores(number=40, seed=0, noise=1., unknown=False, prefix='image'):
    targets = (torch.rand(number, 3, generator=rng(5)) < 0.4).to(torch.int8)
    scores = targets + noise * torch.randn(number, 3, generator=rng(seed))
    if unknown:
        targets[::7, 1] = -1
    files = tuple(f'{prefix}_{index}.jpg' for index in range(number))
    return Scores((4 * scores).round() / 4, targets, NAMES, torch.arange(number), files)  # rounded: with ties


def write(folder, scores, preset='paper', **changes):
    metrics = {'loss': 0.5, **multilabel_metrics(scores.scores, scores.targets, 3, preset)}
    content = {
        'model': 'resnet18', 'dataset': 'csv', 'split': 'val', 'num_images': len(scores.scores), 'num_classes': 3,
        'preset': preset, 'input_size': [3, 8, 8], 'metrics': metrics, **changes}
    rows = class_rows(scores, 100 * average_precision(scores.scores, scores.targets))
    write_result(content, folder, scores, rows)
    return folder


def test_scores_come_back_as_they_were(tmp_path):
    scores = make_scores(unknown=True)
    scores.save(tmp_path / 'scores.npz')
    again = Scores.load(tmp_path / 'scores.npz')
    assert torch.equal(again.scores, scores.scores) and torch.equal(again.targets, scores.targets)
    assert (again.class_names, again.filenames) == (scores.class_names, scores.filenames)
    assert again.targets.dtype == torch.int8 and torch.equal(again.indices, scores.indices)
    bare = Scores(scores.scores, scores.targets, NAMES)
    bare.save(tmp_path / 'bare.npz')
    assert Scores.load(tmp_path / 'bare.npz').indices is None
    (tmp_path / 'bad.npz').write_bytes(b'nothing')
    with raises_error('bad.npz'):
        Scores.load(tmp_path / 'bad.npz')


def test_classes_are_sorted_and_those_without_positives_come_last():
    scores = make_scores(unknown=True)
    scores.targets[:, 0] = 0
    rows = class_rows(scores, 100 * average_precision(scores.scores, scores.targets))
    assert rows[-1]['class'] == 'ant' and rows[0]['AP'] >= rows[1]['AP']
    assert next(row for row in rows if row['class'] == 'bee')['unknown'] == 6
    last = format_classes(rows).splitlines()[-1].split()
    assert last == ['ant', '-', '0', '0']


def test_json_has_no_nan(tmp_path):
    write_json({'a': [math.nan, 1.5], 'b': (math.inf,)}, tmp_path / 'x.json')
    assert json.loads((tmp_path / 'x.json').read_text()) == {'a': [None, 1.5], 'b': [None]}
    assert flat_row({'input_size': [3, 8, 8], 'x': [1, 2], 'y': {'z': 1}, 'metrics': {'mAP': 3.}}) == {
        'input_size': '3x8x8', 'x': '1 2', 'mAP': 3.}


@pytest.mark.parametrize('interpolated', [False, True])
def test_ap_of_a_bootstrap_sample_is_that_of_its_images(interpolated):
    scores = make_scores(unknown=True)
    samples = draw_samples(40, 7, seed=3)
    assert samples.sum(dim=1).tolist() == [40] * 7
    for column in range(3):
        values = sampled_average_precision(
            scores.scores[:, column], scores.targets[:, column], samples, interpolated)
        for counts, value in zip(samples, values):
            rows = torch.arange(40).repeat_interleave(counts.long())
            expected = average_precision(
                scores.scores[rows, column:column + 1], scores.targets[rows, column:column + 1], interpolated)
            assert value == pytest.approx(expected.item())


def test_a_sample_of_each_image_once_gives_the_map_itself():
    scores = make_scores()
    value, = sampled_map(scores, torch.ones(1, 40, dtype=torch.uint8)).tolist()
    expected = np.mean([
        average_precision_score(scores.targets[:, i].numpy(), scores.scores[:, i].numpy()) for i in range(3)])
    assert value == pytest.approx(100 * expected)


def test_a_class_that_a_sample_lacks_leaves_its_mean():
    scores = make_scores()
    scores.targets[:, 0] = 0
    scores.targets[3, 0] = 1
    counts = torch.ones(1, 40, dtype=torch.uint8)
    counts[0, 3] = 0
    rows = [index for index in range(40) if index != 3]
    expected = 100 * average_precision(scores.scores[rows], scores.targets[rows])[1:].mean()
    assert sampled_map(scores, counts).item() == pytest.approx(expected.item())


def test_a_better_model_is_told_apart_and_an_equal_one_is_not(tmp_path):
    folders = [
        write(tmp_path / 'poor', make_scores(200, noise=2.)), write(tmp_path / 'good', make_scores(200, 1, 0.3)),
        write(tmp_path / 'same', make_scores(200, noise=2.))]
    comparison = compare_results(read_results(folders), 200)
    poor, good, same = comparison['results']
    low, high = good['mAP_interval']
    assert 0 < low < good['difference']['mAP'] < high
    assert good['difference']['mAP'] == pytest.approx(good['metrics']['mAP'] - poor['metrics']['mAP'])
    assert same['mAP_interval'] == (0, 0)
    expected = 100 * (average_precision(*vars_of(1, 0.3)) - average_precision(*vars_of(0, 2.)))
    assert list(good['classes'].values()) == pytest.approx(expected.tolist())
    text = format_comparison(comparison)
    for words in ('good against poor', 'higher', 'no significant difference', 'largest gains'):
        assert words in text


def vars_of(seed, noise):
    scores = make_scores(200, seed, noise)
    return scores.scores, scores.targets


@pytest.mark.parametrize('command', [main, lambda argv: validate(['--compare', *argv])], ids=['compare', 'validate'])
def test_both_commands_compare_files_and_folders(tmp_path, capsys, command):
    sizes = [{'size': 16, 'trained': True, 'mAP': 50., 'CF1': 1., 'OF1': 2.}]
    a = write(tmp_path / 'x' / 'run', make_scores(), sizes=sizes)
    b = write(tmp_path / 'y' / 'run', make_scores(seed=1), sizes=sizes)
    command([str(a), str(b / 'results.json'), '--bootstrap', '50', '--output', str(tmp_path / 'out')])
    printed = capsys.readouterr().out
    assert 'y/run against x/run' in printed and '50 bootstrap samples' in printed
    assert {path.name for path in (tmp_path / 'out').iterdir()} == {'compare.json', 'compare.csv', 'sizes.png'}
    interval = json.loads((tmp_path / 'out' / 'compare.json').read_text())['results'][1]['mAP_interval']
    assert interval == list(compare_results(read_results([a, b]), 50, seed=42)['results'][1]['mAP_interval'])
    (b / 'scores.npz').unlink()
    command([str(a), str(b)])
    assert 'No intervals' in capsys.readouterr().out
    for flags, message in (([str(a)], 'at least two results'), ([str(a), str(b), '--bootstrap', '0'], '--bootstrap')):
        with pytest.raises(SystemExit) as caught:
            command(flags)
        assert caught.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize('change, message', [
    ({'number': 39}, '40 and 39 images'),
    ({'prefix': 'photo'}, 'image_0.jpg and photo_0.jpg'),
    ({'unknown': True}, 'other labels'),
])
def test_results_of_other_data_are_not_compared(tmp_path, capsys, change, message):
    a, b = write(tmp_path / 'a', make_scores()), write(tmp_path / 'b', make_scores(**change))
    with pytest.raises(SystemExit) as caught:
        main([str(a), str(b)])
    assert caught.value.code == 2
    line, = capsys.readouterr().err.strip().splitlines()
    assert 'Expected results of the same data set' in line and message in line


def test_what_is_no_result_is_not_compared(tmp_path):
    a = write(tmp_path / 'a', make_scores())
    b = write(tmp_path / 'b', make_scores(), preset='asl')
    with raises_error('--metrics paper in'):
        read_results([a, b])
    with raises_error('twice'):
        read_results([a, a])
    with raises_error('No such file'):
        read_results([a, tmp_path / 'nowhere.json'])
    (tmp_path / 'bad.json').write_text('{"metrics": {}}')
    with raises_error("without 'dataset'"):
        read_results([a, tmp_path / 'bad.json'])


def test_sizes_are_a_table_and_a_plot(tmp_path):
    rows = [
        {'size': 448, 'trained': True, 'mAP': 80., 'CF1': 70., 'OF1': 75.},
        {'size': 64, 'trained': False, 'mAP': 20., 'CF1': 10., 'OF1': 15.}]
    lines = format_sizes(rows).splitlines()
    assert lines[1].split() == ['448', '*', '80.00', '70.00', '75.00', '+0.00']
    assert lines[2].split() == ['64', '20.00', '10.00', '15.00', '-60.00']
    draw_sizes({'a': rows, 'b': rows}, tmp_path / 'sizes.png')
    assert (tmp_path / 'sizes.png').stat().st_size > 1000
