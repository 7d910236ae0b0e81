import copy
import logging
import math

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from tests import reference
from tests.helpers import make_batch, raises_error
from timm_splicemix.mix import (
    Grid,
    Mixer,
    MixPlan,
    Mixup,
    Plan,
    SpliceMix,
    SpliceRecord,
    SpliceWith,
    auto,
)
from timm_splicemix.models import create_model
from timm_splicemix.task import SpliceMixTask

BCE = nn.BCEWithLogitsLoss()


class TinyModel(nn.Module):
    """A model with timm's interface, without BatchNorm, that counts the images in its backbone."""

    def __init__(self, classes=5, channels=6):
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 2, stride=2)
        self.fc = nn.Linear(channels, classes)
        self.num_features, self.num_classes, self.in_chans = channels, classes, 3
        self.batches = []

    def forward_features(self, x):
        self.batches.append(len(x))
        return self.conv(x).tanh()

    def forward_head(self, x, pre_logits=False):
        x = x.amax(dim=(2, 3))
        return x if pre_logits else self.fc(x)

    def forward(self, x):
        return self.forward_head(self.forward_features(x))


def tiny_model(dtype=torch.float32, seed=0, **kwargs):
    torch.manual_seed(seed)
    return TinyModel(**kwargs).to(dtype)


def make_task(model=None, grids='2x2', ratio=0.5, consistency_weight=0., detach=True, input_size=None, mixed_weight=1.,
              **mixer_kwargs):
    mixer = SpliceMix(grids, ratio=ratio, **mixer_kwargs)
    return SpliceMixTask(
        model or tiny_model(), BCE, mixer, consistency_weight, detach=detach, input_size=input_size, verbose=False,
        mixed_weight=mixed_weight)


def next_plan(task, batch_size, epoch=0, step=0):
    """The plan that the task will draw."""
    mixer = copy.deepcopy(task.mixer)
    mixer.set_step(epoch, step)
    return mixer.plan(batch_size)


def gradients(module):
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters()}


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# --- mixing and the loss of the whole batch ---


@pytest.mark.parametrize('consistency_weight', [0., 1.])
def test_the_mixed_batch_goes_through_the_backbone_once(consistency_weight):
    task = make_task(consistency_weight=consistency_weight, input_size=(3, 12, 12))
    task.trainable_module.model.batches.clear()
    result = task(*make_batch(8))
    assert task.trainable_module.model.batches == [12]
    assert result['output'].shape == (8, 5)


def test_the_task_loss_is_that_of_regular_and_mixed_images_alike():
    task = make_task(grids='1x2,2x2', mode='elem')
    images, targets = make_batch(8)
    plan = next_plan(task, 8)
    mixed = [reference.splice(images, targets, record) for record in plan.records]
    all_images = torch.cat([images, *(part.float() for part, _ in mixed)])
    all_targets = torch.cat([targets, *(part for _, part in mixed)])
    result = task(images, targets)
    logits = task.get_eval_model()(all_images)
    assert len(all_images) == 12
    close(result['loss'], F.binary_cross_entropy_with_logits(logits, all_targets), 1e-5)
    close(result['output'], logits[:8], 1e-5)
    assert torch.equal(result['task_loss'], result['loss'])
    assert not result['task_loss'].requires_grad and 'consistency_loss' not in result


@pytest.mark.parametrize('batch', ['append', 'fixed'])
@pytest.mark.parametrize('weight', [0.25, 2.])
def test_mixed_images_have_their_weight_in_the_loss(weight, batch):
    task = make_task(grids='1x2,2x2', mode='elem', batch=batch, mixed_weight=weight)
    images, targets = make_batch(8)
    plan = next_plan(task, 8)
    regular = len(plan.kept)
    assert 0 < regular < 8 + plan.num_mixed
    mixed = [reference.splice(images, targets, record) for record in plan.records]
    all_images = torch.cat([images[plan.kept], *(part.float() for part, _ in mixed)])
    all_targets = torch.cat([targets[plan.kept], *(part for _, part in mixed)])
    logits = task.get_eval_model()(all_images)
    losses = [F.binary_cross_entropy_with_logits(*pair) for pair in zip(logits, all_targets)]
    weights = [1.] * regular + [weight] * (len(all_images) - regular)
    expected = sum(factor * loss for factor, loss in zip(weights, losses)) / sum(weights)
    result = task(images, targets)
    close(result['loss'], expected, 1e-5)
    assert torch.equal(result['task_loss'], result['loss'])
    assert len(result['output']) == regular


@pytest.mark.parametrize('batch, number', [('append', 8), ('fixed', 6), ('only', 0)])
def test_the_output_are_the_regular_images_that_stayed(batch, number):
    images, targets = make_batch(8)
    task = make_task(ratio=0.25, batch=batch)
    output = task(images, targets)['output']
    close(output, task.get_eval_model()(images[8 - number:]), 1e-6)


def test_another_mixer_may_append_or_replace_images():
    images, targets = make_batch(8)
    for mixer, number in ((SpliceWith('mixup', ratio=0.5), 12), (Mixup(mixup_alpha=1.), 8)):
        model = tiny_model()
        result = SpliceMixTask(model, BCE, mixer, verbose=False)(images, targets)
        assert model.batches == [number]
        assert len(result['output']) == 8
        assert result['loss'].isfinite()


@pytest.mark.parametrize('mixup', [
    lambda images, targets: (images * 2, targets / 2),
    timm.data.Mixup(mixup_alpha=0.5, label_smoothing=0., num_classes=5)], ids=['function', "timm's Mixup"])
def test_any_callable_with_the_contract_of_timm_is_a_mixer(mixup):
    images, targets = make_batch(8)
    if not isinstance(mixup, timm.data.Mixup):
        expected = BCE(tiny_model()(2 * images), targets / 2)
    else:
        targets = torch.arange(8) % 5
        np.random.seed(0)
        mixed, soft_targets = mixup(images.clone(), targets)
        expected = BCE(tiny_model()(mixed), soft_targets)
    np.random.seed(0)
    task = SpliceMixTask(tiny_model(), BCE, mixup, verbose=False)
    task.set_step(1, 2)
    result = task(images, targets)
    assert torch.equal(result['loss'], expected) and len(result['output']) == 8
    with raises_error('Expected a SpliceMix for consistency learning, but got <'):
        SpliceMixTask(tiny_model(), BCE, mixup, consistency_weight=1.)


def test_a_new_mixer_defines_its_plan_and_how_to_apply_it():
    class LeftHalf(Plan):
        """The last image twice, the second time mirrored; its left half is to predict what the first image does."""
        num_mixed = num_parts = 1

        def parts(self, maps, image_size):
            return [(slice(-1, None), maps[-1:, :, :, :maps.shape[3] // 2])]

        def teachers(self, logits):
            return logits[:1]

        def parts_weight(self, image_size):
            return image_size[0] / 100

    class Mirror(Mixer):
        def plan(self, batch_size):
            return LeftHalf(torch.arange(batch_size))

        def apply(self, images, targets, plan):
            return torch.cat([images, images[-1:].flip(3)]), torch.cat([targets, targets[-1:]])

        def check_consistency(self):
            pass

        def remember(self, images, targets, logits):
            self.remembered = len(images), len(targets), len(logits)

    images, targets = make_batch(4)
    model, mixer = tiny_model(), Mirror()
    result = SpliceMixTask(model, BCE, mixer, consistency_weight=1., verbose=False)(images, targets)
    features = model.forward_features(torch.cat([images, images[-1:].flip(3)]))
    logits = model.forward_head(features)
    expected = BCE(model.forward_head(features[-1:, :, :, :3]), logits[:1].sigmoid())
    close(result['consistency_loss'], 0.12 * expected.detach(), 1e-6)
    assert torch.equal(result['output'], logits[:4]) and mixer.remembered == (5, 5, 5)


def test_integer_classes_become_unions():
    images, _ = make_batch(8)
    classes = torch.arange(8) % 5
    seen = []

    def criterion(logits, targets):
        seen.append(targets)
        return BCE(logits, targets)

    task = SpliceMixTask(tiny_model(), criterion, SpliceMix('1x2-0', ratio=0.5, num_classes=5), verbose=False)
    task(images, classes)['loss'].backward()
    assert torch.equal(seen[0][:8], F.one_hot(classes, 5).float())
    assert (seen[0][8:].sum(dim=1) >= 1).all() and seen[0][8:].max() == 1


def test_the_step_determines_what_is_mixed():
    task = make_task(consistency_weight=1.)
    batch = make_batch(8)

    def loss(epoch, step):
        task.set_step(epoch, step)
        return task(*batch)['loss'].item()

    first = loss(3, 5)
    others = [loss(3, 6), loss(4, 5)]
    assert first not in others
    assert loss(3, 5) == first
    task.set_step(3, 5)
    assert [task(*batch)['loss'].item() for _ in range(2)] == [first, others[0]]  # counted on from there
    SpliceMixTask(tiny_model(), BCE, verbose=False).set_step(0, 0)  # no mixer, nothing to set


def test_set_epoch_reaches_a_criterion_that_wants_it():
    class Changing(nn.BCEWithLogitsLoss):
        epoch = None

        def set_epoch(self, epoch):
            self.epoch = epoch

    task = SpliceMixTask(tiny_model(), Changing(), verbose=False)
    task.set_epoch(7)
    assert task.criterion.epoch == 7
    make_task().set_epoch(7)  # one that doesn't is left alone


def test_the_log_shows_loss_mixer_and_consistency_weight(caplog):
    with caplog.at_level(logging.INFO, logger='timm_splicemix.task'):
        SpliceMixTask(tiny_model(), BCE, SpliceMix('2x2'), 0.5)
        SpliceMixTask(tiny_model(), F.binary_cross_entropy_with_logits)
        make_task()  # not verbose
    assert [record.getMessage() for record in caplog.records] == [
        f"SpliceMixTask: BCEWithLogitsLoss, {SpliceMix('2x2')}, consistency weight 0.5",
        'SpliceMixTask: binary_cross_entropy_with_logits, no mixing']


# --- consistency loss ---


@pytest.mark.parametrize('size', [(12, 12), (14, 10), (6, 4), (4, 6)])  # maps of 6x6, 7x5, 3x2 and 2x3
@pytest.mark.parametrize('grids, mode', [('2x2', 'batch'), ('1x2,2x2,2x3', 'elem'), ('3x3-4', 'batch')])
@pytest.mark.parametrize('detach', [True, False])
def test_loss_and_gradients_equal_the_plain_loops(size, grids, mode, detach):
    model = tiny_model(torch.float64)
    task = make_task(model, grids, consistency_weight=0.7, mode=mode, drop_prob=0.5, detach=detach)
    images, targets = make_batch(6, height=size[0], width=size[1], dtype=torch.float64)
    targets = targets.double()
    plan = next_plan(task, 6)
    result = task(images, targets)
    result['loss'].backward()

    again = copy.deepcopy(model)
    again.zero_grad()
    mixed = [reference.splice(images, targets, record) for record in plan.records]
    features = again.forward_features(torch.cat([images, *(part for part, _ in mixed)]))
    logits = again.forward_head(features)
    task_loss = BCE(logits, torch.cat([targets, *(part for _, part in mixed)]))
    consistency = reference.consistency(features[6:], logits, plan.records, again.forward_head, detach)
    (task_loss + 0.7 * consistency).backward()
    close(result['loss'], task_loss + 0.7 * consistency)
    close(result['consistency_loss'], consistency.detach())
    close(result['task_loss'], task_loss.detach())
    close(gradients(model), gradients(again))


class Pixels(nn.Module):
    """The map is the image, and the maximum of a channel is the logit of its class."""
    num_features = num_classes = in_chans = 1

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward_features(self, x):
        return x * self.scale

    def forward_head(self, x, pre_logits=False):
        return x.amax(dim=(2, 3))

    def forward(self, x):
        return self.forward_head(self.forward_features(x))


@pytest.mark.parametrize('drops', [False, True])
def test_a_case_by_hand(drops):
    # A 2x2 image in a 2x1 cell keeps its left column. Image 0 has its log 3 on the right, image 1 on the left. So all
    # images predict 3/4, and the mixed one too unless cell 1 is dropped; but the cell of image 0 predicts 1/2.
    log3 = math.log(3)
    images = torch.tensor([[[[0., log3], [0., 0.]]], [[[log3, 0.], [0., 0.]]]], dtype=torch.float64)
    targets = torch.tensor([[1.], [0.]], dtype=torch.float64)
    record = SpliceRecord(Grid(1, 2), torch.tensor([[0, 1]]), torch.tensor([[False, drops]]))
    task = make_task(Pixels(), consistency_weight=2.)
    task.mixer.plan = lambda batch_size: MixPlan(torch.arange(batch_size), (record,), batch_size)
    result = task(images, targets)
    of_cell_0, of_cell_1 = math.log(2), 0.75 * math.log(4 / 3) + 0.25 * math.log(4)
    of_mixed = math.log(2) if drops else math.log(4 / 3)
    task_loss = (math.log(4 / 3) + math.log(4) + of_mixed) / 3
    consistency = of_cell_0 if drops else (of_cell_0 + of_cell_1) / 2
    assert result['task_loss'].item() == pytest.approx(task_loss, rel=1e-12)
    assert result['consistency_loss'].item() == pytest.approx(consistency, rel=1e-12)
    assert result['loss'].item() == pytest.approx(task_loss + 2 * consistency, rel=1e-12)


def test_dropped_cells_add_no_loss_whatever_image_they_had():
    images, targets = make_batch(6, dtype=torch.float64)
    sources = torch.tensor([[0, 1, 2, 3], [4, 5, 0, 1]])
    dropped = torch.tensor([[False, True, False, False], [True, False, False, True]])
    losses = []
    for value in (0, 3, 5):
        record = SpliceRecord(Grid(2, 2), sources.masked_fill(dropped, value), dropped)
        task = make_task(tiny_model(torch.float64), consistency_weight=1.)
        task.mixer.plan = lambda size, record=record: MixPlan(torch.arange(size), (record,), size)
        losses.append(task(images, targets.double())['consistency_loss'])
    assert losses[0] == losses[1] == losses[2] > 0


def test_the_stop_gradient_changes_gradients_and_not_the_loss():
    images, targets = make_batch(8, dtype=torch.float64)
    losses, grads = [], []
    for detach in (True, False):
        model = tiny_model(torch.float64)
        loss = make_task(model, consistency_weight=1., detach=detach)(images, targets.double())['loss']
        loss.backward()
        losses.append(loss)
        grads.append(gradients(model))
    assert torch.equal(*losses)
    assert all((grads[0][name] - grads[1][name]).abs().max() > 1e-4 for name in grads[0])


@pytest.mark.parametrize('mixing', ['prob 0', 'ratio 0', 'off'])
def test_a_batch_that_is_not_mixed_gives_the_plain_loss(mixing):
    images, targets = make_batch(4)
    task = make_task(
        consistency_weight=1., prob=0. if mixing == 'prob 0' else 1., ratio=0. if mixing == 'ratio 0' else 0.5)
    task.mixer.mixup_enabled = mixing != 'off'
    result = task(images, targets)
    result['loss'].backward()
    model = task.get_eval_model()
    assert torch.equal(result['loss'], BCE(model(images), targets))
    assert torch.equal(result['output'], model(images))
    assert result['consistency_loss'] == 0
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_without_a_mixer_the_loss_is_the_plain_one():
    images, targets = make_batch(4)
    task = SpliceMixTask(tiny_model(), BCE, None, verbose=False)
    result = task(images, targets)
    assert torch.equal(result['loss'], BCE(task.get_eval_model()(images), targets))
    assert set(result) == {'loss', 'output', 'task_loss'}


@pytest.mark.parametrize('ratio, backbone_images', [(0.25, 1), (1., 2), (3., 4)])
def test_a_batch_of_one_image_works(ratio, backbone_images):
    images, targets = make_batch(1)
    task = make_task(ratio=ratio, consistency_weight=1., input_size=(3, 12, 12))
    task.trainable_module.model.batches.clear()
    result = task(images, targets)
    result['loss'].backward()
    assert task.trainable_module.model.batches == [backbone_images]
    assert result['output'].shape == (1, 5)
    assert (result['consistency_loss'] > 0) == (backbone_images > 1)
    assert all(parameter.grad.isfinite().all() for parameter in task.parameters())


@pytest.mark.parametrize('name, pool, size', [
    ('test_resnet', 'max', (64, 96)), ('test_vit', 'max', (160, 160)), ('test_vit', 'avg', (160, 160))])
def test_models_of_timm_train_with_consistency(name, pool, size):
    torch.manual_seed(0)
    model = create_model(name, num_classes=5, global_pool=pool)
    task = make_task(model, '1x2,2x2,2x3', consistency_weight=1., mode='elem')
    result = task.train()(*make_batch(4, height=size[0], width=size[1]))
    result['loss'].backward()
    assert result['consistency_loss'] > 0
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert result['output'].shape == (4, 5)


@pytest.mark.parametrize('mixer, message', [
    (None, 'Expected a SpliceMix for consistency learning, but got None: set --splicemix-grids'),
    (Mixup(mixup_alpha=1.), 'Expected a SpliceMix for consistency learning, but got .*Mixup'),
    (SpliceWith('cutmix'), 'Expected a SpliceMix for consistency learning, but got .*SpliceWith'),
    *((SpliceMix(batch=batch), f"Expected all regular images .* got batch '{batch}'.*: use --splicemix-batch append")
      for batch in ('fixed', 'exclusive', 'only', 'alternate')),
])
def test_consistency_learning_needs_all_regular_images_in_the_batch(mixer, message):
    with raises_error(message) as error:
        SpliceMixTask(tiny_model(), BCE, mixer, consistency_weight=1.)
    assert '\n' not in str(error.value)
    SpliceMixTask(tiny_model(), BCE, mixer)  # fine without


def cl_warnings(caplog, grids, size, model=None, weight=1., verbose=True):
    caplog.clear()
    SpliceMixTask(model or tiny_model(), BCE, SpliceMix(grids), weight, input_size=(3, *size), verbose=verbose)
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_consistency_learning_warns_about_cells_of_few_positions(caplog, monkeypatch):
    limit = max(auto.CL_WARNS_BELOW, 2)  # also if the warning is switched off
    monkeypatch.setattr(auto, 'CL_WARNS_BELOW', limit)
    few, enough = 2 * (2 * limit - 1), 4 * limit  # the model has a stride of 2
    line, = cl_warnings(caplog, '1x1,1x2,2x2@0.4', (few, enough))
    side = (2 * limit - 1) // 2
    assert f'map of {few // 2} x {enough // 2} (1x2: {side} x {enough // 2}, 2x2: {side} x {enough // 4}), ' in line
    assert '--splicemix-grids' not in line  # the largest cells are among them
    assert cl_warnings(caplog, '1x2,2x2', (enough, enough)) == []
    line, = cl_warnings(caplog, '1x2,2x2,2x3', (enough, enough))
    assert f'(2x3: {limit} x {2 * limit // 3})' in line and '\n' not in line
    for way_out in ('--img-size', 'output_stride=16', '--splicemix-grids 1x2', 'leave out --splicemix-cl', 'when.md'):
        assert way_out in line
    assert cl_warnings(caplog, '2x2', (few, few), weight=0.) == []
    assert cl_warnings(caplog, '2x2', (few, few), verbose=False) == []  # another process logs it
    monkeypatch.setattr(auto, 'CL_WARNS_BELOW', 1)  # off
    assert cl_warnings(caplog, '2x2', (few, few)) == []


def test_the_warning_about_tokens_has_no_stride(caplog, monkeypatch):
    monkeypatch.setattr(auto, 'CL_WARNS_BELOW', 6)
    model = create_model('test_vit', num_classes=5, global_pool='max', embed_dim=16, depth=1, num_heads=2)
    line, = cl_warnings(caplog, '2x2', (160, 160), model)
    assert 'map of 10 x 10 (2x2: 5 x 5)' in line and 'output_stride' not in line


def test_invalid_settings_are_refused_before_training():
    with raises_error('Expected a consistency weight of at least 0, but got -1'):
        make_task(consistency_weight=-1)
    with raises_error('Expected a weight of mixed images above 0, but got 0'):
        make_task(mixed_weight=0)
    for batch in ('alternate', 'only'):
        with raises_error(f"but got the batch '{batch}'"):
            make_task(batch=batch, mixed_weight=0.5)
    with raises_error('Expected a mean as loss to weight mixed images .*, but got a sum'):
        SpliceMixTask(
            tiny_model(), torch.nn.BCEWithLogitsLoss(reduction='sum'), SpliceMix('2x2'), mixed_weight=2.)
    model = create_model('test_vit', num_classes=5)
    with raises_error('cannot be used for consistency learning: its head reads the class token'):
        make_task(model, consistency_weight=1., input_size=(3, 160, 160))
    make_task(model, input_size=(3, 160, 160))  # plain SpliceMix suits all
