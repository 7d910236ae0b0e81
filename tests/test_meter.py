""" Meters: batches, indices, several processes, single labels """
import json
import logging
import math
import sys

import pytest
import torch
from sklearn.metrics import precision_recall_fscore_support

from tests.helpers import rng
from tests.test_metrics import NAMES, compute, make_scores
from timm_splicemix.metrics import (
    PRESETS,
    AveragingMeter,
    MultilabelMeter,
    Preset,
    average_precision,
    multilabel_metrics,
)

# --- classes without positives ---


def test_classes_without_positives_leave_the_means_and_are_named(caplog):
    scores, targets = make_scores()
    targets[:, 2], targets[:, 5] = 0, -1
    meter = MultilabelMeter(7, class_names=['cat', 'dog', 'cow', 'car', 'bus', 'tie', 'cup'])
    meter.update(scores, targets)
    with caplog.at_level(logging.WARNING, 'timm_splicemix.metrics'):
        result = meter.compute()
        meter.compute()
    assert [record.message.split(': ')[1] for record in caplog.records] == ['cow, tie']
    kept = [0, 1, 3, 4, 6]
    others = compute(scores[:, kept], targets[:, kept])
    for name in ('mAP', 'CP', 'CR', 'CF1', 'OR'):
        assert result[name] == pytest.approx(others[name])
    assert result['OP'] < others['OP']  # what is predicted wrongly stays wrong
    assert meter.per_class().isnan().nonzero().flatten().tolist() == [2, 5]


def test_nothing_is_logged_if_all_classes_have_positives(caplog):
    compute(*make_scores())
    assert not caplog.records


# --- meter ---


@pytest.mark.parametrize('batch_size', [1, 7, 64, 500])
@pytest.mark.parametrize('preset', PRESETS)
def test_batches_give_the_same_as_all_at_once(batch_size, preset):
    scores, targets = make_scores(unknown=0.1)
    meter = MultilabelMeter(7, preset=preset)
    for start in range(0, 200, batch_size):
        meter.update(scores[start:start + batch_size], targets[start:start + batch_size])
    assert meter.compute() == multilabel_metrics(scores, targets, preset=preset)
    assert meter.num_samples == len(meter) == 200


def test_per_class_is_average_precision_in_percent():
    scores, targets = make_scores(unknown=0.1)
    meter = MultilabelMeter(7)
    meter.update(scores, targets)
    assert torch.equal(meter.per_class(), 100 * average_precision(scores, targets))
    assert meter.per_class().mean().item() == pytest.approx(meter.compute()['mAP'])
    meter.update(-scores, targets)
    both = average_precision(torch.cat([scores, -scores]), torch.cat([targets, targets]))
    assert torch.equal(meter.per_class(), 100 * both)


def test_a_sample_counts_once_if_indices_are_given():
    scores, targets = make_scores(50)
    order = torch.randperm(50, generator=rng()).tolist()
    meter = MultilabelMeter(7)
    meter.update(scores[order[:30]], targets[order[:30]], order[:30])
    meter.update(scores[order[20:]], targets[order[20:]], torch.tensor(order[20:]))
    assert meter.compute() == compute(scores, targets)
    assert (len(meter), meter.num_samples) == (60, 50)
    gathered = meter.gather()
    assert torch.equal(gathered[0], scores) and torch.equal(gathered[1], targets.to(torch.int8))
    assert gathered[2].tolist() == list(range(50))


def test_of_samples_with_the_same_index_the_first_counts():
    meter = MultilabelMeter(1)
    meter.update(torch.tensor([[2.], [1.]]), torch.tensor([[1], [0]]), [1, 0])
    meter.update(torch.tensor([[-5.], [7.]]), torch.tensor([[0], [1]]), [1, 0])
    scores, targets, indices = meter.gather()
    assert (scores.tolist(), targets.tolist(), indices.tolist()) == ([[1.], [2.]], [[0], [1]], [0, 1])


def test_a_meter_can_go_on_after_compute_and_start_again():
    scores, targets = make_scores()
    meter = MultilabelMeter(7)
    meter.update(scores[:90], targets[:90])
    assert meter.compute() == compute(scores[:90], targets[:90])
    meter.update(scores[90:], targets[90:])
    assert meter.compute() == compute(scores, targets)
    meter.reset()
    assert (len(meter), meter.num_samples) == (0, 0)
    meter.update(scores[:50], targets[:50], range(50))
    assert meter.compute() == compute(scores[:50], targets[:50])


def test_a_meter_keeps_copies_without_gradients_of_five_bytes_for_each_label():
    scores, targets = make_scores()
    meter = MultilabelMeter(7)
    logits = scores.clone().requires_grad_()
    meter.update(logits[:100], targets[:100])
    meter.update(logits[100:], targets[100:])
    logits.data.zero_()
    assert meter.compute() == compute(scores, targets)
    kept = [tensor for batch in meter._batches for tensor in batch if tensor is not None]
    assert sum(tensor.untyped_storage().nbytes() for tensor in kept) == 5 * scores.numel()
    assert not any(tensor.requires_grad for tensor in kept)


def test_half_precision_logits_are_scored_as_they_are():
    scores, targets = make_scores()
    assert compute(scores.bfloat16(), targets.bfloat16()) == compute(scores.bfloat16().float(), targets)


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_a_meter_takes_batches_from_the_gpu():
    scores, targets = make_scores(unknown=0.1)
    meter = MultilabelMeter(7)
    for start in range(0, 200, 64):
        part = slice(start, start + 64)
        meter.update(scores[part].cuda(), targets[part].cuda(), torch.arange(200)[part].cuda())
    assert meter.compute() == compute(scores, targets)
    meter.update(torch.full((1, 7), math.nan).cuda(), targets[:1].cuda(), [200])
    with pytest.raises(ValueError, match='NaN'):
        meter.compute()


class SlowCopy:
    """Stands for the event of a copy from the GPU that is not there until one waits for it."""

    def __init__(self, destination, source):
        self.destination, self.source = destination, source

    def query(self):
        return torch.equal(self.destination, self.source)

    def synchronize(self):
        self.destination.copy_(self.source)


def test_copies_on_their_way_are_waited_for_by_compute_alone():
    scores, targets = make_scores()
    meter, late = MultilabelMeter(7), MultilabelMeter(7)
    late.update(torch.full((50, 7), 9.), targets[:50])
    batch = late._batches.pop()
    meter._pending.append((SlowCopy(batch.scores, scores[:50]), batch))
    meter.update(scores[50:], targets[50:])
    assert len(meter) == 200 and len(meter._pending) == 1
    assert meter.compute() == compute(scores, targets)
    assert len(meter) == 200 and not meter._pending


def test_topk_may_be_another_number_or_none():
    scores, targets = make_scores()
    assert list(compute(scores, targets, topk=None)) == NAMES[:7]
    assert list(compute(scores, targets, topk=5))[7:] == ['CP_5', 'CR_5', 'CF1_5', 'OP_5', 'OR_5', 'OF1_5']
    everything = compute(scores, targets, topk=100)
    assert everything['OF1_100'] == everything['OF1']


def test_the_preset_in_use_can_be_read():
    assert MultilabelMeter(7).preset == PRESETS['paper']
    assert str(MultilabelMeter(7).preset) == (
        'paper: predicted if p >= 0.5, top k and above the threshold, CF1 is the harmonic mean of CP and CR, '
        'AP not interpolated, unknown labels ignored in AP, negative in P/R/F')
    assert str(MultilabelMeter(7, preset='asl').preset).startswith('asl: predicted if p > 0.8, ')
    meter = MultilabelMeter(7, preset='asl', threshold=0.6, exact=True, unknown='ignore')
    assert meter.preset == Preset('asl', 0.6, strict=True, class_f1='mean', exact=True, unknown='ignore')


# --- several processes ---


SCRIPT = '''
import json, sys
import torch
from timm_splicemix.metrics import MultilabelMeter

torch.distributed.init_process_group('gloo')
rank, folder = torch.distributed.get_rank(), sys.argv[1]
scores, targets = torch.load(f'{folder}/data.pt')
results = {}

def evaluate(name, samples, with_indices, batch_size=4):
    meter = MultilabelMeter(scores.shape[1])
    for batch in torch.tensor(samples, dtype=torch.int64).split(batch_size):
        meter.update(scores[batch], targets[batch], batch if with_indices else None)
    results[name] = [meter.compute(), meter.per_class().tolist(), meter.num_samples]

uneven = list(range(20)) if rank == 0 else list(range(20, 37))
padded = [i % 37 for i in range(rank, 38, 2)]  # as torch's DistributedSampler
evaluate('uneven', uneven, False)
evaluate('padded', padded, True)
evaluate('one process without a sample', list(range(37)) if rank == 1 else [], True)
evaluate('one process without a batch', list(range(37)) if rank == 0 else [], False)

try:
    MultilabelMeter(scores.shape[1]).compute()
except RuntimeError as error:
    results['nothing'] = str(error)
try:
    evaluate('mixed', uneven, rank == 0)
except ValueError as error:
    results['mixed'] = str(error)
alone = MultilabelMeter(scores.shape[1], sync=False)
alone.update(scores, targets)
if rank == 0:
    results['alone'] = [alone.compute(), alone.per_class().tolist(), alone.num_samples]
with open(f'{folder}/{rank}.json', 'w') as file:
    json.dump(results, file)
torch.distributed.destroy_process_group()
'''


@pytest.mark.slow
def test_two_processes_give_the_digits_of_one(run, tmp_path):
    scores, targets = make_scores(37, 5, unknown=0.1)
    torch.save((scores, targets), tmp_path / 'data.pt')
    script = tmp_path / 'script.py'
    script.write_text(SCRIPT)
    done = run(sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2', script, tmp_path)
    assert done.returncode == 0, done.stderr
    meter = MultilabelMeter(5)
    meter.update(scores, targets)
    expected = [meter.compute(), meter.per_class().tolist(), 37]
    for rank in (0, 1):
        results = json.loads((tmp_path / f'{rank}.json').read_text())
        assert results.pop('nothing') == 'Cannot compute before update().'
        assert results.pop('mixed') == 'Expected indices from all processes or from none, but got both.'
        assert len(results) == 5 - rank
        for name, result in results.items():
            assert result == expected, name


@pytest.mark.parametrize('kwargs, message', [
    ({'num_classes': 0}, 'Expected num_classes to be at least 1, but got 0'),
    ({'topk': 0}, 'Expected topk to be at least 1, or None for no top-k metrics, but got 0'),
    ({'threshold': 1.5}, 'Expected threshold to be a probability from 0 to 1, but got 1.5'),
    ({'threshold': [0.5, math.nan, 0.5]}, 'Expected threshold to be a probability from 0 to 1, but got nan'),
    ({'threshold': [0.5, 0.5]}, 'Expected one threshold or 3, one for each class, but got 2'),
    ({'preset': 'coco'}, "Expected preset to be one of 'paper', 'asl', 'interpolated', or a Preset, but got 'coco'"),
    ({'class_names': ['cat']}, 'Expected 3 class names, one for each class, but got 1'),
    ({'unknown': 'positive'}, "Expected unknown to be 'negative' or 'ignore', but got 'positive'"),
])
def test_bad_arguments_of_the_meter(kwargs, message):
    with pytest.raises(ValueError, match=message):
        MultilabelMeter(**{'num_classes': 3, **kwargs})


def test_a_meter_can_not_compute_nothing():
    meter = MultilabelMeter(3)
    for function in (meter.compute, meter.per_class):
        with pytest.raises(RuntimeError, match=r'Cannot compute before update\(\)'):
            function()
    meter.update(torch.zeros(0, 3), torch.zeros(0, 3))
    with pytest.raises(RuntimeError, match=r'Cannot compute before update\(\)'):
        meter.compute()


def test_a_bad_batch_is_named_and_leaves_the_meter_as_it_was():
    scores, targets = make_scores()
    meter = MultilabelMeter(7, class_names=['cat', 'dog', 'cow', 'car', 'bus', 'tie', 'cup'])
    meter.update(scores[:100], targets[:100])
    broken = scores[100:].clone()
    broken[3, 1] = math.nan
    with pytest.raises(ValueError, match=r'NaN for row 103, class 1 \(dog\)'):
        meter.update(broken, targets[100:])
    with pytest.raises(ValueError, match='Expected logits of 7 classes, but got 6'):
        meter.update(scores[:, 1:], targets[:, 1:])
    meter.update(scores[100:], targets[100:])
    assert meter.compute() == compute(scores, targets)
    meter.reset()
    with pytest.raises(ValueError, match=r'NaN for sample 1003, class 1 \(dog\)'):
        meter.update(broken, targets[100:], range(1000, 1100))


def test_bad_indices():
    scores, targets = make_scores(8)
    meter = MultilabelMeter(7)
    with pytest.raises(ValueError, match=r'Expected an index for each of the 8 samples, but got shape \(7,\)'):
        meter.update(scores, targets, range(7))
    with pytest.raises(ValueError, match=r'Expected indices of an integer type, but got torch\.float32'):
        meter.update(scores, targets, torch.zeros(8))
    meter.update(scores, targets, range(8))
    with pytest.raises(ValueError, match='Expected indices with all batches or with none, but got both'):
        meter.update(scores, targets)


# --- single labels ---


@pytest.mark.parametrize('average', ['micro', 'macro', 'weighted'])
def test_averages_of_single_labels_are_those_of_scikit_learn(average):
    generator = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(50, 7, generator=generator), torch.randint(5, (50,), generator=generator)
    meter = AveragingMeter(torch.device('cpu'), 7, average)
    for part in range(0, 50, 20):
        meter.update(logits[part:part + 20], targets[part:part + 20])
    expected = precision_recall_fscore_support(targets, logits.argmax(dim=1), average=average, zero_division=0)
    names = [f'{name}_{average}' for name in ('precision', 'recall', 'f1')]
    assert [meter.compute()[name] for name in names] == pytest.approx([100 * value for value in expected[:3]])
