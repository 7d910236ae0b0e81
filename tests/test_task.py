import contextlib
import copy
import logging
import math
import sys

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from timm.optim import create_optimizer_v2
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
)
from timm_splicemix.models import create_model, freeze_batch_norm
from timm_splicemix.task import SpliceMixModule, SpliceMixTask

BCE = nn.BCEWithLogitsLoss()


class TinyModel(nn.Module):
    """A model with timm's interface, without BatchNorm, that counts what goes through its backbone."""

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


def make_task(model=None, grids='2x2', ratio=0.5, consistency_weight=0., detach=True, input_size=None, **mixer_kwargs):
    mixer = SpliceMix(grids, ratio=ratio, **mixer_kwargs)
    return SpliceMixTask(
        model or tiny_model(), BCE, mixer, consistency_weight, detach=detach, input_size=input_size, verbose=False)


def next_plan(task, batch_size, epoch=0, step=0):
    """The plan that the task is going to draw."""
    mixer = copy.deepcopy(task.mixer)
    mixer.set_step(epoch, step)
    return mixer.plan(batch_size)


def gradients(module):
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters()}


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@contextlib.contextmanager
def one_process(tmp_path):
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/meet', rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


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


def test_the_log_says_what_the_task_does(caplog):
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
def test_consistency_learning_refuses_what_has_no_regular_images_to_learn_from(mixer, message):
    with raises_error(message) as error:
        SpliceMixTask(tiny_model(), BCE, mixer, consistency_weight=1.)
    assert '\n' not in str(error.value)
    SpliceMixTask(tiny_model(), BCE, mixer)  # fine without


def test_what_can_not_be_is_refused_before_training():
    with raises_error('Expected a consistency weight of at least 0, but got -1'):
        make_task(consistency_weight=-1)
    model = create_model('test_vit', num_classes=5)
    with raises_error('Expected a head that sees the feature map alone for consistency learning'):
        make_task(model, consistency_weight=1., input_size=(3, 160, 160))
    make_task(model, input_size=(3, 160, 160))  # plain SpliceMix suits all


# --- what is wrapped: DDP, moving average, compilation ---


def test_the_model_to_evaluate_is_the_plain_one(tmp_path):
    model = tiny_model()
    task = make_task(model, consistency_weight=1.)
    assert task.get_eval_model() is model
    assert task.get_eval_model(ema=True) is None
    task.setup_ema(decay=0.5)
    average = task.get_eval_model(ema=True)
    assert type(average) is TinyModel and average is not model
    assert task.get_eval_model(task.trainable_module) is model
    with one_process(tmp_path):
        task.prepare_distributed()
        assert isinstance(task.trainable_module, nn.parallel.DistributedDataParallel)
        assert task.get_eval_model() is model
        assert task.get_eval_model(ema=True) is average
        assert isinstance(task.get_trainable_module().module, SpliceMixModule)


def test_a_checkpoint_has_the_keys_of_the_plain_model_however_it_is_wrapped(tmp_path):
    model = create_model('test_resnet', num_classes=5, global_pool='max')
    keys = list(timm.create_model('test_resnet', num_classes=5).state_dict())
    task = make_task(model, consistency_weight=1.)
    assert list(task.get_checkpoint_state()['state_dict']) == keys
    assert task.get_checkpoint_state(ema=True) == {}
    task.setup_ema()
    task.compile(backend='eager')
    task.compile_ema(backend='eager')
    with one_process(tmp_path):
        task.prepare_distributed()
        state = {**task.get_checkpoint_state(), **task.get_checkpoint_state(ema=True)}
        assert set(state) == {'state_dict', 'state_dict_ema'}
        assert all(list(part) == keys for part in state.values())
        other = make_task(create_model('test_resnet', num_classes=5, global_pool='max'))
        other.setup_ema()
        other.load_checkpoint_state(state['state_dict'])
        other.load_checkpoint_state(state['state_dict_ema'], ema=True)
    assert all(torch.equal(value, state['state_dict'][name])
               for name, value in other.get_eval_model().state_dict().items())


def test_one_process_of_ddp_gives_the_gradients_of_none(tmp_path):
    batch = make_batch(8)
    tasks = [make_task(tiny_model(), consistency_weight=1., rank=0) for _ in range(2)]
    with one_process(tmp_path):
        tasks[1].prepare_distributed()
        losses = []
        for task in tasks:
            result = task(*batch)
            result['loss'].backward()
            losses.append(result['loss'])
        assert torch.equal(*losses)
        close(gradients(tasks[0].get_eval_model()), gradients(tasks[1].get_eval_model()), 1e-6)
        with tasks[1].no_sync():
            assert not tasks[1].trainable_module.require_backward_grad_sync


def test_the_moving_average_follows_the_weights():
    task = make_task(consistency_weight=1.)
    task.setup_ema(decay=0.75)
    model, average = task.get_eval_model(), task.get_eval_model(ema=True)
    before = model.fc.weight.detach().clone()
    with torch.no_grad():
        model.fc.weight.add_(1.)
    task.update_ema(step=5)
    close(average.fc.weight, before + 0.25, 1e-6)
    close(task.get_checkpoint_state(ema=True)['state_dict_ema']['fc.weight'], before + 0.25, 1e-6)
    make_task().update_ema(step=5)  # without one nothing happens


@pytest.mark.parametrize('consistency_weight', [0., 1.])
def test_a_compiled_task_gives_the_same(consistency_weight):
    batch = make_batch(4, height=64, width=64)
    results, models = [], []
    for compiled in (False, True):
        torch.manual_seed(0)
        models.append(create_model('test_resnet', num_classes=5, global_pool='max'))
        task = make_task(models[-1], consistency_weight=consistency_weight, input_size=(3, 64, 64))
        if compiled:
            eval_model = task.compile(backend='eager')
            assert task.get_eval_model() is eval_model
            assert eval_model._orig_mod is models[-1]
        results.append(task.train()(*batch))
        results[-1]['loss'].backward()
    close(results[1]['loss'], results[0]['loss'], 1e-6)
    close(results[1]['output'], results[0]['output'], 1e-5)
    close(gradients(models[1]), gradients(models[0]), 1e-5)
    assert list(task.get_checkpoint_state()['state_dict']) == list(models[1].state_dict())
    assert list(task.trainable_module.state_dict()) == [f'model.{name}' for name in models[1].state_dict()]
    images = make_batch(2, height=64, width=64)[0]
    assert torch.equal(task.eval().get_eval_model()(images), models[1](images))


def test_compilation_is_of_the_backbone_and_not_of_the_task():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph.code)
        return graph

    torch.manual_seed(0)
    model = create_model('test_resnet', num_classes=5, global_pool='max')
    task = make_task(model, consistency_weight=1., input_size=(3, 64, 64)).train()
    task.compile(backend=backend)
    images, targets = make_batch(4, height=64, width=64)
    task(images, targets)
    assert len(graphs) == 1
    assert 'conv2d' in graphs[0] and 'linear' not in graphs[0] and 'cross_entropy' not in graphs[0]
    task.mixer.mixup_enabled = False  # an unmixed batch works too
    torch.testing.assert_close(task.eval()(images, targets)['output'], model(images))


@pytest.mark.parametrize('consistency_weight', [0., 1.])
def test_bfloat16_gives_a_float32_loss(consistency_weight):
    torch.manual_seed(0)
    model = create_model('test_resnet', num_classes=5, global_pool='max').eval()
    batch = make_batch(4, height=64, width=64)
    losses = []
    for enabled in (False, True):
        task = make_task(model, consistency_weight=consistency_weight, input_size=(3, 64, 64))
        with torch.autocast('cpu', torch.bfloat16, enabled=enabled):
            result = task(*batch)
        assert result['loss'].dtype == result['output'].dtype == torch.float32
        losses.append(result['loss'])
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=0.05) and losses[0] != losses[1]
    losses[1].backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_model_of_half_precision_gives_a_float32_loss():
    task = make_task(tiny_model(torch.bfloat16), consistency_weight=1.)
    images, targets = make_batch(4, dtype=torch.bfloat16)
    assert task(images, targets)['loss'].dtype == torch.float32


def test_images_with_channels_last_give_the_same():
    images, targets = make_batch(8)
    losses = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        task = make_task(tiny_model().to(memory_format=memory_format), consistency_weight=1.)
        losses.append(task(images.to(memory_format=memory_format), targets)['loss'])
    close(*losses, 1e-6)


# --- groups of parameters ---


MODELS = {
    'test_resnet': {},
    'test_vit': {},
    'test_convnext': {},
    'swin_tiny_patch4_window7_224': {
        'img_size': 56, 'embed_dim': 24, 'depths': (1, 1, 2, 1), 'num_heads': (1, 2, 4, 8)},
    'deit_tiny_distilled_patch16_224': {'img_size': 32, 'depth': 2},
    'shufflenetv2_x0_5': {},
    'cait_xxs24_224': {'img_size': 32, 'depth': 2},  # its matcher is a function
    'pit_ti_224': {'img_size': 64},  # it has none
}


@pytest.mark.parametrize('name', MODELS)
@pytest.mark.parametrize('layer_decay', [None, 0.7])
def test_optimizers_group_parameters_as_those_of_the_plain_model(name, layer_decay):
    task = make_task(timm.create_model(name, num_classes=5, **MODELS[name]))
    names = {id(parameter): name for name, parameter in task.get_eval_model().named_parameters()}
    plain, ours = ([
        ([names[id(parameter)] for parameter in group['params']], group.get('lr_scale'), group['weight_decay'])
        for group in create_optimizer_v2(
            module, opt='sgd', lr=0.1, weight_decay=0.05, layer_decay=layer_decay).param_groups]
        for module in (task.get_eval_model(), task.get_trainable_module()))
    assert ours == plain
    assert len(plain) >= (3 if layer_decay else 2)


def test_coarse_groups_and_functions_are_those_of_the_plain_model():
    model = timm.create_model('test_vit')
    module = SpliceMixModule(model)
    groups = timm.models.group_parameters(module, module.group_matcher(coarse=True), reverse=True)
    plain = timm.models.group_parameters(model, model.group_matcher(coarse=True), reverse=True)
    assert groups == {f'model.{name}': group for name, group in plain.items()}
    model.group_matcher = lambda coarse=False: {'name': len}
    assert module.group_matcher()['name']('model.abc') == 3
    assert module.no_weight_decay() == {f'model.{name}' for name in model.no_weight_decay()}
    assert SpliceMixModule(tiny_model()).no_weight_decay() == set()


# --- two processes ---


TWO_PROCESSES = '''
import sys
import torch
from tests.test_task import distributed_case, gradients

torch.distributed.init_process_group('gloo')
rank = torch.distributed.get_rank()
part = slice(4 * rank, 4 * rank + 4)
for mixed in (False, True):
    task, images, targets = distributed_case(mixed)
    task.prepare_distributed()
    result = task(images[part], targets[part])
    result['loss'].backward()
    state = {'loss': result['loss'].detach(), 'grads': gradients(task.get_eval_model())}
    torch.save(state, f'{sys.argv[1]}/{mixed}-{rank}.pt')
torch.distributed.destroy_process_group()
'''


def distributed_case(mixed):
    torch.manual_seed(0)
    model = create_model('test_resnet', num_classes=5, global_pool='max').double()
    task = make_task(model, '2x2-1', consistency_weight=1. if mixed else 0., seed=5, input_size=(3, 64, 64))
    task.mixer.mixup_enabled = mixed
    task.set_step(2, 9)
    freeze_batch_norm(task.train())
    images, targets = make_batch(8, height=64, width=64, dtype=torch.float64)
    return task, images, targets.double()


def test_two_processes_have_the_gradients_of_one_on_the_union_of_their_batches(run, tmp_path):
    script = tmp_path / 'script.py'
    script.write_text(TWO_PROCESSES)
    done = run(sys.executable, '-m', 'torch.distributed.run', '--nproc-per-node', '2', '--standalone', script, tmp_path)
    assert done.returncode == 0, done.stderr
    for mixed in (False, True):
        states = [torch.load(tmp_path / f'{mixed}-{rank}.pt', weights_only=True) for rank in (0, 1)]
        task, images, targets = distributed_case(mixed)
        records = []
        for rank in (0, 1):
            task.mixer.rank = rank
            for record in next_plan(task, 4, 2, 9).records:
                records.append(SpliceRecord(record.grid, record.sources + 4 * rank, record.dropped))
        assert len(records) == (2 if mixed else 0)
        plan = MixPlan(torch.arange(8), tuple(records), 8)
        task.mixer.plan = lambda size, plan=plan: plan
        result = task(images, targets)
        result['loss'].backward()
        close((states[0]['loss'] + states[1]['loss']) / 2, result['loss'].detach())
        assert states[0]['loss'] != states[1]['loss']
        for state in states:
            close(state['grads'], gradients(task.get_eval_model()))
