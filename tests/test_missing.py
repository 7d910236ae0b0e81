from collections import Counter

import pytest
import torch

from timm_splicemix.data.missing import keep_labels, parse_keep_labels

from .helpers import raises_error


def make_targets(size=400, classes=20, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(size, classes, generator=generator) < 0.2).to(torch.int8)


@pytest.mark.parametrize('protocol, kept', [
    ('75', lambda n: n // 2 + 1), ('40', lambda n: n // 5 + 1), ('single', lambda n: 1)])
def test_each_image_keeps_the_number_of_labels_of_the_protocol(protocol, kept):
    targets = make_targets()
    left = keep_labels(targets, protocol)
    for before, after in zip(targets.sum(dim=1).tolist(), left.sum(dim=1).tolist()):
        assert after == (kept(before) if before else 0)
    assert set(left.unique().tolist()) == {0, 1}
    assert not ((left == 1) & (targets == 0)).any()  # nothing is invented
    assert targets.dtype == left.dtype


@pytest.mark.parametrize('protocol', ['75', '40', 'single'])
def test_the_labels_that_stay_are_chosen_uniformly(protocol):
    targets = torch.zeros(6000, 12, dtype=torch.int8)
    targets[:, 3:8] = 1
    left = keep_labels(targets, protocol, seed=3)[:, 3:8].float().mean(dim=0)
    assert (left - left.mean()).abs().max() < 0.03


def test_a_probability_makes_unknown_what_it_hides_present_or_absent():
    targets = make_targets(2000)
    left = keep_labels(targets, 0.3, seed=1)
    known = left != -1
    assert torch.equal(left[known], targets[known])
    for value in (0, 1):
        assert abs(known[targets == value].float().mean().item() - 0.3) < 0.02


def test_unknown_labels_stay_unknown():
    targets = torch.tensor([[1, -1, 1, 0]] * 50, dtype=torch.int8)
    for protocol in ('40', 'single', 0.5):
        assert (keep_labels(targets, protocol)[:, 1] == -1).all()


def test_the_same_seed_hides_the_same():
    targets = make_targets()
    for protocol in ('75', '40', 'single', 0.5):
        assert torch.equal(keep_labels(targets, protocol, 5), keep_labels(targets, protocol, 5))
        assert not torch.equal(keep_labels(targets, protocol, 5), keep_labels(targets, protocol, 6))


def test_the_rule_gives_the_known_counts_of_labels():
    # Of n labels, an image with 1, 2, ..., 7 keeps these many.
    counts = Counter()
    for n in range(1, 8):
        targets = torch.zeros(1, 10, dtype=torch.int8)
        targets[0, :n] = 1
        for protocol in ('75', '40', 'single'):
            counts[protocol, n] = int(keep_labels(targets, protocol).sum())
    assert [counts['75', n] for n in range(1, 8)] == [1, 2, 2, 3, 3, 4, 4]
    assert [counts['40', n] for n in range(1, 8)] == [1, 1, 1, 1, 2, 2, 2]
    assert [counts['single', n] for n in range(1, 8)] == [1] * 7


def test_the_protocols_draw_apart():
    targets = make_targets()
    single, some = keep_labels(targets, 'single', 0), keep_labels(targets, '40', 0)
    many = targets.sum(dim=1) >= 3
    nested = ((single == 1) <= (some == 1)).all(dim=1)[many].float().mean()
    assert nested < 0.7


@pytest.mark.parametrize('text', ['0', '1', '-0.1', '1.5', '50', 'half', 'nan', ''])
def test_other_protocols_are_refused(text):
    with raises_error('Expected 75, 40, single or a probability between 0 and 1 for --keep-labels'):
        parse_keep_labels(text)
