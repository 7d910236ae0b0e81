import math

import pytest
import torch
from sklearn.metrics import average_precision_score

from tests.helpers import rng
from timm_splicemix.metrics import (
    PRESETS,
    AccuracyMeter,
    MultilabelMeter,
    Preset,
    average_precision,
    multilabel_metrics,
)

NAMES = ['mAP', 'CP', 'CR', 'CF1', 'OP', 'OR', 'OF1', 'CP_3', 'CR_3', 'CF1_3', 'OP_3', 'OR_3', 'OF1_3']


def make_scores(samples=200, classes=7, unknown=0., seed=0):
    """Logits that tell something about their targets, in which every class has a positive."""
    generator = rng(seed)
    targets = (torch.rand(samples, classes, generator=generator) < 0.3).float()
    targets[torch.rand(samples, classes, generator=generator) < unknown] = -1
    targets[0] = 1
    return torch.randn(samples, classes, generator=generator) + targets.clamp(min=0) - 0.5, targets


def plain_average_precision(scores, targets, interpolated=False):
    """AP of one class from lists: precision and recall at each score, and the area under them."""
    known = [(score, target) for score, target in zip(scores, targets) if target != -1]
    num_positive = sum(target == 1 for _, target in known)
    if not num_positive:
        return math.nan
    points = []
    for threshold in sorted({score for score, _ in known}, reverse=True):
        predicted = [target for score, target in known if score >= threshold]
        points.append((sum(predicted) / num_positive, sum(predicted) / len(predicted)))  # recall, precision
    area, last_recall = 0., 0.
    for i, (recall, precision) in enumerate(points):
        if interpolated:
            precision = max(later for _, later in points[i:])
        area += (recall - last_recall) * precision
        last_recall = recall
    return area


def plain_metrics(scores, targets, preset, k=3):
    """All metrics by loops over samples and classes."""
    scores, targets = scores.tolist(), targets.tolist()
    num_classes = len(scores[0])
    columns = [([row[c] for row in scores], [row[c] for row in targets]) for c in range(num_classes)]
    values = [plain_average_precision(*column, interpolated=preset.interpolated) for column in columns]
    present = [c for c in range(num_classes) if not math.isnan(values[c])]
    result = {'mAP': sum(values[c] for c in present) / len(present)}
    for suffix in ('', f'_{k}'):
        tp, pp, gt = [0] * num_classes, [0] * num_classes, [0] * num_classes
        for row, labels in zip(scores, targets):
            ranking = sorted(range(num_classes), key=lambda c: (-row[c], c))
            for c in range(num_classes):
                probability = 1 / (1 + math.exp(-row[c]))
                predicted = probability > preset.threshold if preset.strict else probability >= preset.threshold
                if suffix:
                    in_top = c in ranking[:k]
                    predicted = in_top if preset.exact else in_top and predicted
                if preset.unknown == 'ignore' and labels[c] == -1:
                    continue
                pp[c] += predicted
                gt[c] += labels[c] == 1
                tp[c] += predicted and labels[c] == 1
        cp = sum(tp[c] / max(pp[c], 1) for c in present) / len(present)
        cr = sum(tp[c] / gt[c] for c in present) / len(present)
        if preset.class_f1 == 'mean':
            f1s = []
            for c in present:
                precision, recall = tp[c] / max(pp[c], 1), tp[c] / gt[c]
                f1s.append(2 * precision * recall / (precision + recall) if tp[c] else 0.)
            cf1 = sum(f1s) / len(f1s)
        else:
            cf1 = 2 * cp * cr / (cp + cr)
        op, recall = sum(tp) / sum(pp), sum(tp) / sum(gt)
        of1 = 2 * op * recall / (op + recall)
        for name, value in zip(('CP', 'CR', 'CF1', 'OP', 'OR', 'OF1'), (cp, cr, cf1, op, recall, of1)):
            result[name + suffix] = value
    return {name: 100 * value for name, value in result.items()}


def sklearn_average_precision(scores, targets):
    values = []
    for c in range(scores.shape[1]):
        known = targets[:, c] != -1
        values.append(average_precision_score(targets[known, c].numpy(), scores[known, c].double().numpy()))
    return torch.tensor(values, dtype=torch.float64)


def compute(scores, targets, **kwargs):
    meter = MultilabelMeter(scores.shape[1], **kwargs)
    meter.update(scores, targets)
    return meter.compute()


# --- average precision ---


@pytest.mark.parametrize('kind', ['random', 'tied', 'half', 'bfloat16', 'sigmoid', 'equal', 'double', 'large'])
@pytest.mark.parametrize('unknown', [0., 0.2])
def test_average_precision_equals_scikit_learn(kind, unknown):
    scores, targets = make_scores(1000, 18, unknown)
    scores = {
        'random': scores,
        'tied': (2 * scores).round() / 2,
        'half': scores.half(),
        'bfloat16': scores.bfloat16(),
        'sigmoid': (20 * scores).half().sigmoid(),  # many are 0 or 1
        'equal': torch.zeros_like(scores),
        'double': 1 + 1e-12 * scores.double(),  # all the same in float32
        'large': scores * 1e38,  # some are infinite
    }[kind]
    finite = scores.double().nan_to_num(posinf=1e300, neginf=-1e300)  # scikit-learn refuses infinity
    result = average_precision(scores, targets)
    assert result.shape == (18,) and result.dtype == torch.float64
    torch.testing.assert_close(result, sklearn_average_precision(finite, targets), atol=1e-9, rtol=0)


@pytest.mark.parametrize('interpolated', [False, True])
@pytest.mark.parametrize('tied', [False, True])
def test_average_precision_equals_the_plain_loops(interpolated, tied):
    for seed in range(5):
        scores, targets = make_scores(40, 18, 0.2, seed)
        scores = scores.round() if tied else scores
        expected = [plain_average_precision(*c, interpolated) for c in zip(scores.T.tolist(), targets.T.tolist())]
        result = average_precision(scores, targets, interpolated)
        assert result.tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize('targets, expected, interpolated', [
    ([1, 0, 1, 0], (1 + 2 / 3) / 2, (1 + 2 / 3) / 2),
    ([0, 1, 1, 0], (1 / 2 + 2 / 3) / 2, 2 / 3),
    ([0, 0, 0, 1], 1 / 4, 1 / 4),
    ([-1, 1, -1, 1], 1., 1.),
    ([-1, 0, 1, -1], 1 / 2, 1 / 2),
    ([1, 1, 1, 1], 1., 1.),
])
def test_average_precision_by_hand(targets, expected, interpolated):
    scores, targets = torch.tensor([[4.], [3.], [2.], [1.]]), torch.tensor(targets).view(4, 1)
    assert average_precision(scores, targets).item() == pytest.approx(expected, abs=1e-15)
    assert average_precision(scores, targets, interpolated=True).item() == pytest.approx(interpolated, abs=1e-15)


def test_equal_scores_share_one_threshold():
    targets = torch.tensor([[1], [0], [0], [1]])
    assert average_precision(torch.tensor([[2.], [2.], [2.], [1.]]), targets).item() == pytest.approx(5 / 12)
    assert average_precision(torch.tensor([[0.], [-0.], [0.], [-0.]]), targets).item() == 0.5


def test_a_class_without_positives_has_no_average_precision():
    scores, targets = make_scores(10, 3)
    targets[:, 1], targets[:, 2] = 0, -1
    result = average_precision(scores, targets)
    assert result.isnan().tolist() == [False, True, True]


@pytest.mark.parametrize('dtype', [torch.bool, torch.uint8, torch.int8, torch.int64, torch.bfloat16, torch.float64])
def test_targets_may_be_of_any_type(dtype):
    scores, targets = make_scores()
    assert torch.equal(average_precision(scores, targets.to(dtype)), average_precision(scores, targets))


def test_average_precision_depends_on_the_order_of_scores_alone():
    scores, targets = make_scores(unknown=0.1)
    expected = average_precision(scores, targets)
    scores = scores.double()
    for transformed in (scores.sigmoid(), scores.exp(), 3 * scores - 7, scores ** 3):
        assert torch.equal(average_precision(transformed, targets), expected)


def test_the_envelope_is_never_below():
    for seed in range(10):
        scores, targets = make_scores(50, 5, seed=seed)
        assert (average_precision(scores, targets, True) >= average_precision(scores, targets)).all()


def test_the_arguments_stay_as_they_are():
    scores, targets = make_scores(unknown=0.2)
    copies = scores.clone(), targets.clone()
    average_precision(scores, targets)
    compute(scores, targets, unknown='ignore')
    assert torch.equal(scores, copies[0]) and torch.equal(targets, copies[1])


# --- precision, recall, F1 ---


@pytest.mark.parametrize('preset', [
    *PRESETS.values(),
    Preset('own', threshold=0.3, exact=True),
    Preset('own', unknown='ignore'),
    Preset('own', threshold=0.6, class_f1='mean', unknown='ignore', exact=True, interpolated=True),
], ids=[*PRESETS, 'exact', 'ignore', 'all'])
@pytest.mark.parametrize('tied', [False, True])
def test_all_metrics_equal_the_plain_loops(preset, tied):
    for seed, k in enumerate((1, 2, 3, 7, 9)):
        scores, targets = make_scores(60, 7, 0.1, seed)
        scores = scores.round() if tied else scores
        expected = plain_metrics(scores, targets, preset, k)
        assert compute(scores, targets, preset=preset, topk=k) == pytest.approx(expected, abs=1e-9)
        assert multilabel_metrics(scores, targets, k, preset) == pytest.approx(expected, abs=1e-9)


def test_all_metrics_by_hand():
    logits = torch.tensor([
        [3., 2., 1., 0.5],
        [2., -1., -2., 1.],
        [-1., -2., 1., -3.],
    ])
    targets = torch.tensor([
        [1, 0, 1, 1],
        [0, 1, 0, 1],
        [1, 0, 1, 0],
    ])
    # tp 1 0 2 2, pp 2 1 2 2, gt 2 1 2 2; among the top 3 the last class of the first sample is missing
    expected = {
        'mAP': 100 * (5 / 6 + 1 / 2 + 1 + 1) / 4,
        'CP': 62.5, 'CR': 62.5, 'CF1': 62.5, 'OP': 100 * 5 / 7, 'OR': 100 * 5 / 7, 'OF1': 100 * 5 / 7,
        'CP_3': 62.5, 'CR_3': 50., 'CF1_3': 100 * 5 / 9,
        'OP_3': 100 * 4 / 6, 'OR_3': 100 * 4 / 7, 'OF1_3': 100 * 8 / 13,
    }
    result = compute(logits, targets)
    assert list(result) == NAMES
    assert result == pytest.approx(expected, abs=1e-12)
    exact = compute(logits, targets, exact=True)  # tp 2 1 2 1, pp 3 3 2 1
    assert exact['CP_3'] == pytest.approx(100 * (2 / 3 + 1 / 3 + 1 + 1) / 4)
    assert exact['OP_3'] == pytest.approx(100 * 6 / 9)
    assert exact['OP'] == result['OP']


def test_the_two_kinds_of_class_f1_differ():
    # tp 1 1 0, pp 1 1 1, gt 2 1 1: precisions 1 1 0, recalls 1/2 1 0, F1 2/3 1 0
    logits = torch.tensor([[1., -1., -1.], [-1., 1., -1.], [-1., -1., 1.]])
    targets = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 0]])
    targets[0, 2] = 1
    paper, mean = compute(logits, targets), compute(logits, targets, preset=Preset('own', class_f1='mean'))
    assert paper['CF1'] == pytest.approx(100 * 2 * (2 / 3) * (1 / 2) / (2 / 3 + 1 / 2))  # 57.14
    assert mean['CF1'] == pytest.approx(100 * (2 / 3 + 1 + 0) / 3)  # 55.56
    assert {**paper, 'CF1': 0, 'CF1_3': 0} == {**mean, 'CF1': 0, 'CF1_3': 0}


def test_a_class_that_is_never_predicted_adds_nothing_to_overall_precision():
    logits, targets = torch.tensor([[1., -1.], [1., -1.]]), torch.tensor([[1, 1], [1, 1]])
    assert compute(logits, targets)['OP'] == 100.
    assert compute(logits, targets)['CP'] == 50.


def test_the_threshold_itself_is_predicted_unless_strict():
    logits, targets = torch.tensor([[0.], [1.]]), torch.tensor([[1], [1]])
    assert compute(logits, targets)['OR'] == 100.
    assert compute(logits, targets, preset=Preset('own', strict=True))['OR'] == 50.


def test_a_threshold_is_given_as_probability_and_may_differ_by_class():
    probabilities = torch.tensor([[0.25, 0.75, 0.45], [0.35, 0.65, 0.55]])
    targets = torch.ones(2, 3)
    cases = ((0.3, 5 / 6), (0.7, 1 / 6), ([0.3, 0.7, 0.4], 4 / 6), (torch.tensor([0.2, 0.9, 1]), 2 / 6))
    for threshold, recall in cases:
        result = compute(probabilities.logit(), targets, threshold=threshold)
        assert result['OR'] == pytest.approx(100 * recall)


def test_unknown_labels_are_negatives_or_ignored():
    logits, targets = torch.tensor([[1.], [1.], [-1.]]), torch.tensor([[1], [-1], [-1]])
    assert compute(logits, targets)['OP'] == 50.
    assert compute(logits, targets, unknown='ignore')['OP'] == 100.
    assert compute(logits, targets)['mAP'] == 100.


def test_of_equal_scores_the_first_classes_are_on_top():
    logits, targets = torch.zeros(1, 5), torch.tensor([[1, 1, 1, 0, 0]])
    assert compute(logits, targets)['OF1_3'] == 100.


def test_nothing_predicted_and_nothing_to_find():
    scores, targets = make_scores()
    nothing = compute(scores - 100, targets)
    assert nothing['mAP'] > 0 and not any(value for name, value in nothing.items() if name != 'mAP')
    empty = compute(scores, torch.zeros_like(targets))
    assert empty['OP'] == 0 and all(math.isnan(empty[name]) for name in ('mAP', 'CP', 'CR', 'CF1', 'OR', 'OF1'))


def test_perfect_scores_give_100():
    _, targets = make_scores()
    assert set(compute(2 * targets - 1, targets, topk=7).values()) == {100.}
    assert set(compute(2 * targets - 1, targets, preset=Preset('own', class_f1='mean'), topk=7).values()) == {100.}


def test_the_order_of_samples_does_not_matter():
    scores, targets = make_scores(unknown=0.1)
    scores = scores.round()
    order = torch.randperm(len(scores), generator=rng())
    assert compute(scores[order], targets[order]) == compute(scores, targets)


# --- bad input ---


@pytest.mark.parametrize('scores, targets, message', [
    (torch.zeros(3), torch.zeros(3), r'Expected scores of shape \(N, classes\), but got \(3,\)'),
    (torch.zeros(4, 3), torch.zeros(4), r'Expected targets of the shape of the scores, \(4, 3\), but got \(4,\)'),
    (torch.zeros(4, 3), torch.zeros(4, 2), r'Expected targets of the shape of the scores, \(4, 3\), but got \(4, 2\)'),
    (torch.zeros(4, 3).long(), torch.zeros(4, 3), r'Expected scores of a floating point type, but got torch.int64'),
    (torch.tensor([[0., 0, 0], [0, 0, math.nan]]), torch.zeros(2, 3), 'Score is NaN for row 1, class 2'),
    (torch.zeros(2, 3), torch.tensor([[0, 1, 0], [0, 0.9, 0]]), r'Expected targets of 1, 0, or -1 .* row 1, class 1'),
    (torch.zeros(1, 3), torch.tensor([[0, 1, math.nan]]), r'Expected targets of 1, 0, or -1 .* row 0, class 2'),
    (torch.zeros(1, 3), torch.tensor([[0, 1, -2]]), r'Expected targets of 1, 0, or -1 .* row 0, class 2'),
    (torch.zeros(1, 3), torch.tensor([[0, 1, 257]]), r'Expected targets of 1, 0, or -1 .* row 0, class 2'),
    (torch.zeros(1, 3), torch.tensor([[0, 1, 255]], dtype=torch.uint8), r'Expected targets of .* row 0, class 2'),
    (torch.zeros(1, 3), torch.tensor([[0, 1, 5]], dtype=torch.int8), r'Expected targets of .* row 0, class 2'),
])
def test_bad_scores_and_targets(scores, targets, message):
    for function in (average_precision, multilabel_metrics, MultilabelMeter(3).update):
        with pytest.raises(ValueError, match=message):
            function(scores, targets)


def test_bad_definitions():
    with pytest.raises(ValueError, match="Expected class_f1 to be 'harmonic' or 'mean', but got 'micro'"):
        Preset('own', class_f1='micro')
    with pytest.raises(ValueError, match='Expected one threshold or 7, one for each class, but got 2'):
        multilabel_metrics(*make_scores(), preset=Preset('own', threshold=(0.5, 0.5)))
    with pytest.raises(ValueError, match='Expected at least one sample, but got none'):
        multilabel_metrics(torch.zeros(0, 3), torch.zeros(0, 3))


def test_accuracy_does_not_depend_on_the_batch_size():
    logits = torch.randn(50, 7, generator=rng())
    targets = torch.arange(50) % 7
    results = []
    for size in (50, 7, 1):
        meter = AccuracyMeter(torch.device('cpu'))
        for part in range(0, 50, size):
            meter.update(logits[part:part + size], targets[part:part + size], indices=range(size))
        assert len(meter) == 50
        results.append(meter.compute())
    assert all(result == pytest.approx(results[0]) for result in results)
    assert results[0]['top1'] == pytest.approx(100 * (logits.argmax(dim=1) == targets).double().mean().item())
    meter = AccuracyMeter(torch.device('cpu'))
    assert meter.compute() == {'top1': 0., 'top5': 0.}
    meter.update(torch.eye(3), torch.arange(3))  # fewer classes than 5
    assert meter.compute() == {'top1': 100., 'top5': 100.}
