import contextlib
import copy
import logging
import math
import re

import pytest
import torch
from timm.scheduler import StepLRScheduler
from timm.task import ClassificationTask
from timm.utils import NativeScaler
from torch import nn

from tests.helpers import make_batch, raises_error
from tests.test_progress import add_without_checking
from timm_splicemix.data import create_loader
from timm_splicemix.metrics import multilabel_metrics
from timm_splicemix.mix import SpliceMix, splice
from timm_splicemix.run import progress
from timm_splicemix.run.engine import (
    Epoch,
    Hooks,
    Step,
    StopTraining,
    evaluate,
    loader_length,
    train_one_epoch,
)
from timm_splicemix.run.factory import create_meter
from timm_splicemix.run.progress import LossMeter
from timm_splicemix.task import SpliceMixTask

CPU = torch.device('cpu')
BCE = nn.BCEWithLogitsLoss()


class Images(torch.utils.data.Dataset):
    """Random images of 8 px with their labels, and file names."""
    transform = None

    def __init__(self, size=24, classes=5, single_label=False):
        self.images, self.targets = make_batch(size, height=8, width=8, classes=classes)
        if single_label:
            self.targets = torch.arange(size) % classes

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.targets[index]

    def filename(self, index):
        return f'{index}.jpg'


def make_loader(dataset=None, batch_size=4, is_training=True):
    dataset = dataset or Images()
    loader = create_loader(
        dataset, 8, batch_size, is_training=is_training, num_workers=0, use_prefetcher=False, persistent_workers=False)
    dataset.transform = None
    return loader


def make_model(classes=5, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Tanh(), nn.Linear(8, classes)).to(dtype)


def make_task(mixer=None, criterion=BCE, model=None):
    return SpliceMixTask(model or make_model(), criterion, mixer, verbose=False)


def make_hooks(**methods):
    """Hooks with some methods replaced, such as `before_batch`."""
    hooks = Hooks()
    vars(hooks).update(methods)
    return hooks


def train(task, loader=None, epoch=0, num_batches=6, start_batch=0, losses=None, optimizer=None, step=None,
          scheduler=None, **hooks):
    optimizer = optimizer or torch.optim.SGD(task.parameters(), lr=0.1)
    return train_one_epoch(
        task, loader or make_loader(), optimizer, step or Step(CPU), Epoch(epoch, num_batches, start_batch, losses),
        scheduler, make_hooks(**hooks))


def weights(task, ema=False):
    return torch.cat([parameter.detach().flatten() for parameter in task.get_eval_model(ema=ema).parameters()])


def seen_batches(loader, epoch, num_batches, start_batch=0):
    """Indices of the samples of each batch of an epoch."""
    seen = []
    train(make_task(), loader, epoch, num_batches, start_batch=start_batch,
          before_batch=lambda *_: seen.append(list(loader.indices)))
    return seen


# --- an update ---


def test_an_epoch_is_a_plain_loop_over_its_batches():
    task = make_task()
    model = copy.deepcopy(task.get_eval_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = make_loader()
    loader.set_epoch(3)
    losses = []
    for images, targets in loader:
        loss = BCE(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    metrics = train(task, epoch=3)
    assert metrics == pytest.approx({'loss': sum(losses) / 6, 'task_loss': sum(losses) / 6})
    torch.testing.assert_close(weights(task), torch.cat([p.detach().flatten() for p in model.parameters()]))


@pytest.mark.parametrize('batch_size, accumulate', [(2, 4), (8, 1), (4, 2)])
def test_accumulated_gradients_equal_those_of_one_large_batch(batch_size, accumulate):
    results = []
    for size, parts in ((8, 1), (batch_size, accumulate)):
        task = make_task(model=make_model(dtype=torch.float64))
        step = Step(CPU, torch.float64, accumulate=parts)
        metrics = train(task, make_loader(batch_size=size), num_batches=24 // size, step=step)
        results.append((weights(task), metrics['loss']))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-10, atol=1e-12)
    if batch_size == 8:
        assert results[0][1] == results[1][1]


def test_the_last_update_of_an_epoch_may_have_fewer_batches():
    gathered = []
    task = make_task()
    optimizer = torch.optim.SGD(task.parameters(), lr=0.)
    step = Step(CPU, accumulate=4)
    grads = []
    optimizer.register_step_pre_hook(
        lambda *_: grads.append(task.get_eval_model()[3].bias.grad.clone()))
    train(task, optimizer=optimizer, step=step, after_update=lambda done, *_: gathered.append(done))
    assert gathered == [4, 6]
    loader = make_loader()
    batches = list(loader)[4:]  # with a rate of 0 all gradients are those of the first weights
    expected = [
        torch.autograd.grad(BCE(model(images), targets), model[3].bias)[0]
        for model in [task.get_eval_model()] for images, targets in batches]
    torch.testing.assert_close(grads[1], (expected[0] + expected[1]) / 2)


def test_processes_exchange_gradients_only_at_updates():
    task = make_task()
    entered = []
    batches = []

    @contextlib.contextmanager
    def no_sync():
        entered.append(batches[-1])
        yield

    task.no_sync = no_sync
    train(task, num_batches=5, step=Step(CPU, accumulate=2), before_batch=lambda batch, *_: batches.append(batch))
    assert entered == [0, 2]  # the updates are after the batches 1, 3 and 4


@pytest.mark.parametrize('mode', ['norm', 'value', 'agc'])
@pytest.mark.parametrize('scaled', [False, True])
def test_gradients_are_clipped(mode, scaled):
    task = make_task()
    limit = 1e-3
    before = [parameter.detach().clone() for parameter in task.get_eval_model().parameters()]
    optimizer = torch.optim.SGD(task.parameters(), lr=1.)
    scaler = NativeScaler(device='cpu') if scaled else None
    step = Step(CPU, clip_grad=limit, clip_mode=mode, scaler=scaler)
    train(task, make_loader(batch_size=24), num_batches=1, optimizer=optimizer, step=step)
    moves = [(old - new).detach() for old, new in zip(before, task.get_eval_model().parameters())]
    norms = [move.norm().item() for move in moves]
    total = math.sqrt(sum(norm ** 2 for norm in norms))
    if mode == 'norm':
        assert total == pytest.approx(limit, rel=1e-3)
    elif mode == 'value':
        assert max(move.abs().max().item() for move in moves) == pytest.approx(limit, rel=1e-3)
    else:  # relative to the norm of the weights of each unit; the classifier is excluded
        unit_norms = moves[0].norm(dim=1), before[0].norm(dim=1)
        assert (unit_norms[0] <= limit * unit_norms[1] * 1.001).all()
        assert moves[2].norm() > 10 * limit * before[2].norm()


def test_a_high_limit_does_not_change_gradients():
    tasks = [make_task(), make_task()]
    for task, limit in zip(tasks, (None, 1e6)):
        train(task, step=Step(CPU, clip_grad=limit))
    assert torch.equal(weights(tasks[0]), weights(tasks[1]))


def test_a_scaled_loss_gives_the_same_update():
    tasks = [make_task(), make_task()]
    for task, scaler in zip(tasks, (None, NativeScaler(device='cpu'))):
        train(task, step=Step(CPU, scaler=scaler, accumulate=2))
    torch.testing.assert_close(weights(tasks[0]), weights(tasks[1]), rtol=1e-5, atol=1e-6)


def test_the_forward_pass_runs_in_autocast():
    task = make_task()
    dtypes = []
    task.get_eval_model().register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    step = Step(CPU, autocast=lambda: torch.autocast('cpu', torch.bfloat16))
    assert math.isfinite(train(task, num_batches=1, step=step)['loss'])
    assert dtypes == [torch.bfloat16]


def test_images_are_converted_to_type_and_memory_format():
    images, targets = make_batch(2, height=8, width=8)
    found, labels = Step(CPU, torch.bfloat16, channels_last=True).to_device(images, targets)
    assert found.dtype == torch.bfloat16 and found.is_contiguous(memory_format=torch.channels_last)
    assert labels.dtype == torch.float32
    assert Step(CPU).to_device(images, targets)[0] is images


def test_scheduler_and_moving_average_count_updates():
    task = make_task()
    task.setup_ema(decay=0.5)
    ema_steps = []
    task.update_ema = lambda step: ema_steps.append(step)
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1)
    scheduler = StepLRScheduler(optimizer, decay_t=1, decay_rate=0.5, t_in_epochs=False)
    rates = []
    train(task, optimizer=optimizer, scheduler=scheduler, step=Step(CPU, accumulate=4), epoch=2,
          after_update=lambda *_: rates.append(optimizer.param_groups[0]['lr']))
    assert ema_steps == [5, 6]  # two updates in each of the epochs 0 and 1
    assert rates == [0.1 / 32, 0.1 / 64]


def test_the_moving_average_is_updated():
    task = make_task()
    task.setup_ema(decay=0.5)
    train(task)
    assert 0 < (weights(task, ema=True) - weights(task)).abs().max() < 0.2


# --- which batches ---


def test_a_stopped_epoch_resumes_exactly():
    def new():
        task = make_task(SpliceMix('2x2', ratio=0.5))
        return task, torch.optim.SGD(task.parameters(), lr=0.1, momentum=0.9)

    def run(task, optimizer, **kwargs):
        return train(task, epoch=1, optimizer=optimizer, step=Step(CPU, accumulate=2),
                     before_batch=lambda batch, *_: task.set_step(1, batch), **kwargs)

    task, optimizer = new()
    whole, losses = run(task, optimizer), []
    expected = weights(task)

    def stop(done, meter, finite):
        losses.append(meter.state_dict())
        if done == 4:
            raise StopTraining

    task, optimizer = new()
    with pytest.raises(StopTraining):
        run(task, optimizer, after_update=stop)
    again, new_optimizer = new()
    again.load_checkpoint_state(task.get_checkpoint_state()['state_dict'])
    new_optimizer.load_state_dict(optimizer.state_dict())
    meter = LossMeter(CPU)
    meter.load_state_dict(losses[-1])
    assert losses[-1]['count'] == 16
    assert run(again, new_optimizer, start_batch=4, losses=meter) == whole
    assert torch.equal(weights(again), expected)


def test_alternate_updates_the_weights_for_regular_and_for_mixed_images():
    model = make_model()
    expected = copy.deepcopy(model)
    task = make_task(SpliceMix('2x2', batch='alternate', ratio=0.5, seed=3), model=model)
    found = train(task, make_loader(batch_size=8), num_batches=1)
    loader = make_loader(batch_size=8)
    loader.set_epoch(0)
    images, targets = next(iter(loader))
    record, = SpliceMix('2x2', ratio=0.5, seed=3).plan(8).records
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    losses = []
    for batch in ((images, targets), splice(images, targets, record)):
        loss = BCE(expected(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for name, value in model.state_dict().items():
        assert torch.allclose(value, expected.state_dict()[name], atol=1e-6), name
    assert found['loss'] == pytest.approx((8 * losses[0] + 4 * losses[1]) / 12, rel=1e-5)


def test_a_finished_epoch_trains_nothing():
    task = make_task()
    before = weights(task)
    averages = LossMeter(CPU)
    averages.update({'loss': torch.tensor(2.)}, 3)
    assert train(task, start_batch=6, losses=averages) == {'loss': 2.}
    assert torch.equal(weights(task), before)


def test_a_long_epoch_reads_the_data_again_in_another_order():
    loader = make_loader()
    seen = seen_batches(loader, epoch=0, num_batches=15)
    passes = [[index for batch in seen[start:start + 6] for index in batch] for start in (0, 6, 12)]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(24))
    assert passes[0] != passes[1] and len(passes[2]) == 12
    later = seen_batches(loader, epoch=1, num_batches=15)
    starts = [batches[start] for batches in (seen, later) for start in (0, 6, 12)]
    assert len({tuple(batch) for batch in starts}) == 6  # all orders differ
    for start_batch in (1, 6, 8, 14):
        assert seen_batches(loader, 1, 15, start_batch) == later[start_batch:]


def test_a_short_epoch_stops_early_and_the_next_has_another_order():
    loader = make_loader()
    whole = seen_batches(loader, 1, 6)
    assert seen_batches(loader, 1, 2) == whole[:2]
    assert seen_batches(loader, 1, 2, start_batch=1) == whole[1:2]
    assert seen_batches(loader, 2, 2) != whole[:2]


def test_the_length_of_an_epoch_does_not_depend_on_its_start():
    loader = make_loader()
    loader.set_epoch(4, 3)
    assert loader_length(loader) == 6


def test_data_that_ends_too_early_is_an_error():
    loader = make_loader()

    class Short:
        indices = ()
        set_epoch, filenames = loader.set_epoch, loader.filenames

        def __len__(self):
            return 6

        def __iter__(self):
            return iter(list(loader)[:4])

    with raises_error('Expected 6 batches in an epoch, but the data ended after 4'):
        train(make_task(), Short())


# --- non-finite losses ---


@pytest.mark.parametrize('value', [float('nan'), float('inf')])
def test_a_non_finite_loss_is_an_error_with_batch_and_files(value):
    loader = make_loader()
    bad = seen_batches(loader, 0, 6)[3]
    calls = []

    def criterion(logits, targets):
        calls.append(1)
        return BCE(logits, targets) * (value if len(calls) == 4 else 1.)

    saved = []
    with raises_error(r'Non-finite loss at batch 3 \(files: ') as error:
        train(make_task(criterion=criterion), loader, after_update=lambda done, *_: saved.append(done))
    assert ', '.join(f'{index}.jpg' for index in bad) in str(error.value)
    assert 'Lower --lr' in str(error.value)
    assert saved == [1, 2, 3]  # no update is saved after it


def test_a_hook_can_check_the_losses_before_it_saves(monkeypatch):
    monkeypatch.setattr(progress.FiniteCheck, 'add', add_without_checking)
    task = make_task(criterion=lambda logits, targets: BCE(logits, targets) * float('nan'))
    with raises_error('at batch 0'):
        train(task, after_update=lambda done, losses, finite: finite.check())


# --- evaluation ---


@pytest.mark.parametrize('batch_size', [5, 24])
def test_evaluation_computes_the_metrics_of_all_images(batch_size):
    dataset, model = Images(), make_model()
    model.insert(1, nn.Dropout(0.5))
    model.train()
    loader = make_loader(dataset, batch_size, is_training=False)
    meter = create_meter(True, 5, CPU, list('abcde'))
    metrics = evaluate(model, loader, meter, Step(CPU), BCE)
    assert not model.training
    with torch.no_grad():
        logits = model(dataset.images)
    expected = {'loss': BCE(logits, dataset.targets).item(), **multilabel_metrics(logits, dataset.targets)}
    assert metrics == pytest.approx(expected)
    assert list(metrics)[:2] == ['loss', 'mAP']
    assert 'loss' not in evaluate(model, loader, create_meter(True, 5, CPU), Step(CPU))


def test_single_labels_are_scored_by_top_1_and_top_5():
    dataset, model = Images(23, classes=9, single_label=True), make_model(9)
    loader = make_loader(dataset, 5, is_training=False)
    metrics = evaluate(model, loader, create_meter(False, 9, CPU), Step(CPU), nn.CrossEntropyLoss())
    with torch.no_grad():
        logits = model(dataset.images)
    hits = {1: 0, 5: 0}
    for row, target in zip(logits.tolist(), dataset.targets.tolist()):
        rank = sum(value > row[target] for value in row)
        for k in hits:
            hits[k] += rank < k
    assert 0 < hits[1] < hits[5] < 23
    assert metrics == pytest.approx({
        'loss': nn.functional.cross_entropy(logits, dataset.targets).item(),
        'top1': 100 * hits[1] / 23, 'top5': 100 * hits[5] / 23})


def test_an_image_that_was_not_scored_is_an_error():
    loader = make_loader(Images(24), 4, is_training=False)
    loader.batches.num_samples = 20
    with raises_error('Expected to score 24 images, but got 20'):
        evaluate(make_model(), loader, create_meter(True, 5, CPU), Step(CPU))


def test_evaluation_can_be_stopped_after_any_batch():
    done = []

    def stop(number):
        done.append(number)
        if number == 3:
            raise StopTraining

    hooks = make_hooks(after_eval_batch=stop)
    with pytest.raises(StopTraining):
        evaluate(make_model(), make_loader(is_training=False), create_meter(True, 5, CPU), Step(CPU), hooks=hooks)
    assert done == [1, 2, 3]


def test_evaluation_in_half_precision_scores_float32():
    dataset = Images()
    meter = create_meter(True, 5, CPU)
    step = Step(CPU, autocast=lambda: torch.autocast('cpu', torch.bfloat16))
    metrics = evaluate(make_model(), make_loader(dataset, is_training=False), meter, step, BCE)
    with torch.no_grad():
        exact = BCE(make_model()(dataset.images), dataset.targets).item()
    assert metrics['loss'] == pytest.approx(exact, rel=0.02)


def test_a_task_of_timm_can_be_trained():
    task = ClassificationTask(make_model(), BCE, verbose=False)
    assert set(train(task)) == {'loss'}


# --- progress ---


def test_training_logs_losses_speed_and_remaining_time(caplog):
    with caplog.at_level(logging.INFO, logger='timm_splicemix.run'):
        train(make_task(SpliceMix('2x2')), step=Step(CPU, log_interval=2))
    lines = [record.getMessage() for record in caplog.records]
    assert [re.search(r'(\d)/6', line)[1] for line in lines] == ['2', '4', '6']
    pattern = (r'Train 0: \d/6 \( ?\d+ %\)  loss \d\.\d{4}  task_loss \d\.\d{4}  lr 0\.1  [\d.]+ img/s  '
               r'\d+:\d\d left')
    assert all(re.fullmatch(pattern, line) for line in lines), lines
    assert lines[-1].endswith('0:00 left')


def test_evaluation_logs_its_loss(caplog):
    with caplog.at_level(logging.INFO, logger='timm_splicemix.run'):
        loader = make_loader(is_training=False)
        evaluate(make_model(), loader, create_meter(True, 5, CPU), Step(CPU, log_interval=4), BCE)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and lines[0].startswith('Validate: 4/6 ( 66 %)  loss 0.')
    assert 'img/s' in lines[0] and 'left' in lines[0] and 'lr' not in lines[0]


def test_speed_and_remaining_time_are_those_of_the_resumed_part(monkeypatch, caplog):
    now = [100.]
    monkeypatch.setattr(progress.time, 'perf_counter', lambda: now[0])

    def before_batch(batch, images, targets):
        now[0] += 50.

    with caplog.at_level(logging.INFO, logger='timm_splicemix.run'):
        train(
            make_task(), num_batches=150, start_batch=48, step=Step(CPU, log_interval=25), before_batch=before_batch)
    line = next(record.getMessage() for record in caplog.records if ' 50/150' in record.getMessage())
    assert '0.1 img/s' in line  # 8 images in 100 s
    assert line.endswith('1:23:20 left')  # 100 batches of 50 s


def test_only_the_primary_process_logs(caplog):
    with caplog.at_level(logging.INFO, logger='timm_splicemix.run'):
        train(make_task(), step=Step(CPU, is_primary=False, log_interval=1))
    assert not caplog.records
