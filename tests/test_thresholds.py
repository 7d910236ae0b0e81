""" Thresholds: tuning, files, overfitting """
import pytest
import torch

from tests.helpers import raises_error
from tests.test_results import NAMES, make_scores
from timm_splicemix.metrics import (
    PRESETS,
    Preset,
    Thresholds,
    describe_tuning,
    load_thresholds,
    multilabel_metrics,
    parse_thresholds,
    save_thresholds,
    tune_thresholds,
)


@pytest.mark.parametrize('preset', [Preset(), Preset(strict=True), Preset(unknown='ignore')])
def test_a_tuned_threshold_has_the_highest_f1_of_all(preset):
    scores = make_scores(unknown=True)
    values = tune_thresholds(scores.scores, scores.targets, preset)
    for column in range(3):
        logits, labels = scores.scores[:, column], scores.targets[:, column]
        if preset.unknown == 'ignore':
            logits, labels = logits[labels >= 0], labels[labels >= 0]

        def f1(threshold, logits=logits, labels=labels):
            predicted, positive = logits.double() >= threshold, labels == 1
            return float(2 * (predicted & positive).sum() / (predicted.sum() + positive.sum()))

        best = max(f1(candidate) for candidate in logits.double())
        assert f1(values[column].logit()) == pytest.approx(best)
        assert not (logits.double() - values[column].logit()).abs().min() < 1e-6  # half-way, not at a score


def test_a_class_without_positives_keeps_its_threshold_and_sure_scores_stay_below_one():
    logits = torch.tensor([[90., 1.], [80., 2.], [-5., 3.]])
    targets = torch.tensor([[1, 0], [1, 0], [0, 0]])
    values = tune_thresholds(logits, targets, PRESETS['asl'])
    assert values[1] == 0.8 and 0 < values[0] < 1
    assert tune_thresholds(torch.tensor([[99.], [98.]]), torch.tensor([[1], [0]]), Preset())[0] < 1


def test_thresholds_are_read_for_the_classes_of_the_model_in_any_order(tmp_path):
    saved = Thresholds((0.1, 0.2, 0.3), NAMES, 'csv', 'val', 40, (1, 20, 30))
    save_thresholds(saved, tmp_path / 'thresholds.json')
    assert load_thresholds(tmp_path / 'thresholds.json', NAMES) == saved
    turned = load_thresholds(tmp_path / 'thresholds.json', NAMES[::-1])
    assert turned.values == (0.3, 0.2, 0.1) and turned.positives == (30, 20, 1)
    with raises_error("with 'dog' in one of them only"):
        load_thresholds(tmp_path / 'thresholds.json', ('ant', 'bee', 'cow', 'dog'))
    (tmp_path / 'bad.json').write_text('[]')
    with raises_error('Expected a file that --thresholds tune wrote'):
        load_thresholds(tmp_path / 'bad.json', NAMES)
    assert parse_thresholds(None, NAMES) is None and parse_thresholds('0.3', NAMES) == 0.3
    with raises_error('from 0 to 1, but got nan'):
        parse_thresholds('nan', NAMES)


def test_what_overfits_is_the_gain_that_is_gone_on_other_images():
    tuned_on, scored_on = make_scores(noise=2.), make_scores(seed=9, noise=2.)
    values = tuple(tune_thresholds(tuned_on.scores, tuned_on.targets, Preset()).tolist())
    thresholds = Thresholds(values, NAMES, positives=(3, 20, 20))
    pairs = [(part.scores, part.targets) for part in (tuned_on, scored_on)]
    text = describe_tuning(*pairs, thresholds, Preset())
    gains = [
        multilabel_metrics(*pair, None, Preset(threshold=values))['CF1'] - multilabel_metrics(*pair, None)['CF1']
        for pair in pairs]
    assert f'{gains[0] - gains[1]:.2f} of the {gains[0]:.2f} points' in text
    assert 'unreliable: ant.' in text
