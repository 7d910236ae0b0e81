import copy
import math

import pytest
import timm
import torch

from tests.helpers import raises_error
from timm_splicemix.models import classifier_parameters
from timm_splicemix.run.optimizer import (
    create_optimizer,
    create_scheduler,
    learning_rate,
    load_scheduler_state,
    scheduler_state,
)
from timm_splicemix.train import build_parser


def make_args(*flags, lr=0.1, **values):
    args = build_parser().parse_args(['--dataset', 'shapes', *flags])
    args.lr = lr
    for name, value in values.items():
        setattr(args, name, value)
    return args


def make_model():
    torch.manual_seed(0)
    return timm.create_model('test_resnet', num_classes=5)


def make_optimizer(model, **values):
    """The optimizer, with the learning rates of the first epoch."""
    args = make_args(**values)
    optimizer = create_optimizer(model, args)
    create_scheduler(optimizer, args, updates_per_epoch=5)
    return optimizer


def step_with_gradients_of_one(optimizer, model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def rates(optimizer, model):
    """Learning rate of each parameter, by its name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {names[id(p)]: group['lr'] for group in optimizer.param_groups for p in group['params']}
    assert len(found) == len(names) == sum(len(group['params']) for group in optimizer.param_groups)
    return found


def by_role(optimizer, model):
    """The one rate of the backbone and the one of the classifier."""
    all_rates = rates(optimizer, model)
    backbone = {rate for name, rate in all_rates.items() if not name.startswith('fc.')}
    classifier = {rate for name, rate in all_rates.items() if name.startswith('fc.')}
    assert len(backbone) == len(classifier) == 1
    return backbone.pop(), classifier.pop()


# --- learning rate ---


@pytest.mark.parametrize('opt, scale, factor', [
    ('sgd', '', 2), ('momentum', '', 2), ('adamw', '', math.sqrt(2)), ('lamb', '', math.sqrt(2)),
    ('Adan', '', math.sqrt(2)), ('adamw', 'linear', 2), ('sgd', 'sqrt', math.sqrt(2)), ('rmsprop', '', 2)])
def test_the_base_rate_scales_with_the_global_batch_size_as_in_timm(opt, scale, factor):
    args = make_args(lr=None, opt=opt, lr_base=0.3, lr_base_size=256, lr_base_scale=scale, batch_size=32,
                     grad_accum_steps=4)
    assert learning_rate(args, world_size=4) == pytest.approx(0.3 * factor)


def test_a_given_rate_is_not_scaled():
    assert learning_rate(make_args(lr=0.05, batch_size=999), world_size=8) == 0.05
    assert learning_rate(make_args(lr=0., batch_size=999), world_size=8) == 0.


# --- optimizer ---


@pytest.mark.parametrize('sched', ['none', 'cosine', 'step', 'multistep', 'poly', 'tanh', 'plateau'])
@pytest.mark.parametrize('warmup', [0, 3])
def test_the_rate_of_the_backbone_is_scaled_in_all_epochs(sched, warmup):
    model = make_model()
    args = make_args(sched=sched, warmup_epochs=warmup, epochs=10, backbone_lr_scale=0.1, decay_milestones=[4, 6],
                     decay_epochs=2, decay_rate=0.5, patience_epochs=0, warmup_lr=0.001)
    optimizer = create_optimizer(model, args)
    scheduler, _ = create_scheduler(optimizer, args, updates_per_epoch=5)
    seen = []
    for epoch in range(10):
        backbone, classifier = by_role(optimizer, model)
        assert backbone == pytest.approx(0.1 * classifier)
        seen.append(classifier)
        if scheduler is not None:
            scheduler.step(epoch + 1, metric=0.5)
    assert max(seen) <= 0.1 + 1e-9
    assert (len(set(seen)) == 1) == (sched == 'none')
    assert seen[0] == pytest.approx(0.001 if warmup and sched != 'none' else 0.1)


def test_an_update_of_the_backbone_is_scaled():
    model, plain = make_model(), make_model()
    for module, scale in ((model, 0.1), (plain, 1.)):
        optimizer = make_optimizer(
            module, sched='none', backbone_lr_scale=scale, opt='momentum', momentum=0., weight_decay=0.)
        step_with_gradients_of_one(optimizer, module)
    start = dict(make_model().named_parameters())
    for name, parameter in model.named_parameters():
        rate = 0.1 if name.startswith('fc.') else 0.01
        torch.testing.assert_close(parameter, start[name] - rate)
    assert all(torch.allclose(parameter, start[name] - 0.1) for name, parameter in plain.named_parameters())


@pytest.mark.parametrize('sched', ['none', 'cosine'])
def test_the_scale_of_the_backbone_multiplies_layer_decay(sched):
    model = make_model()
    found = {}
    for scale in (1., 0.1):
        optimizer = make_optimizer(
            model, sched=sched, warmup_epochs=0, layer_decay=0.7, backbone_lr_scale=scale, opt='adamw')
        found[scale] = rates(optimizer, model)
    assert len(set(found[1.].values())) > 2
    for name, rate in found[1.].items():
        assert found[0.1][name] == pytest.approx(rate if name.startswith('fc.') else 0.1 * rate)


def test_groups_keep_their_weight_decay_and_other_options():
    model = make_model()
    plain = create_optimizer(model, make_args(opt='adamw', weight_decay=0.05))
    divided = create_optimizer(model, make_args(opt='adamw', weight_decay=0.05, backbone_lr_scale=0.1))
    decays = [{
        id(p): (group['weight_decay'], group['betas']) for group in optimizer.param_groups for p in group['params']}
        for optimizer in (plain, divided)]
    assert decays[0] == decays[1]
    assert {decay for decay, _ in decays[0].values()} == {0., 0.05}
    assert len(divided.param_groups) == 4


def test_a_scale_of_0_freezes_the_backbone():
    model = make_model()
    assert by_role(make_optimizer(model, sched='none', backbone_lr_scale=0., opt='sgd'), model) == (0., 0.1)


def test_a_wrapped_optimizer_is_scaled_too():
    model = make_model()
    optimizer = make_optimizer(model, sched='none', backbone_lr_scale=0.1, opt='lookahead_sgd')
    assert by_role(optimizer, model) == pytest.approx((0.01, 0.1))
    step_with_gradients_of_one(optimizer, model)
    start = make_model()
    moved = [(a - b).abs().max().item() for a, b in zip(start.parameters(), model.parameters())]
    assert moved[0] == pytest.approx(moved[-1] / 10, rel=1e-3)


def test_a_scaled_optimizer_saves_and_loads_its_state():
    model = make_model()
    optimizer, again = (make_optimizer(model, sched='none', backbone_lr_scale=0.1, opt='adamw') for _ in range(2))
    step_with_gradients_of_one(optimizer, model)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert rates(again, model) == rates(optimizer, model)
    assert all(torch.equal(again.state[p]['exp_avg'], optimizer.state[p]['exp_avg']) for p in model.parameters())


def test_bad_optimizers_are_errors():
    with raises_error("Expected an optimizer of timm for --opt, but got 'nonsense'"):
        create_optimizer(make_model(), make_args(opt='nonsense'))
    with raises_error("Expected an optimizer of timm for --opt, but got 'sgd': .*nonsense"):
        create_optimizer(make_model(), make_args(opt='sgd', opt_kwargs={'nonsense': 1}))
    with raises_error('Expected a model with a classifier'):
        create_optimizer(timm.create_model('test_resnet', num_classes=0), make_args(backbone_lr_scale=0.1))
    assert len(classifier_parameters(make_model())) == 2


# --- scheduler ---


def test_a_schedule_determines_the_number_of_epochs():
    optimizer = create_optimizer(make_model(), make_args())
    args = make_args(sched='cosine', epochs=7, cooldown_epochs=2, warmup_epochs=0)
    scheduler, num_epochs = create_scheduler(optimizer, args, 5)
    assert num_epochs == 9
    assert scheduler_state(scheduler) == {}
    load_scheduler_state(scheduler, {})
    assert scheduler_state(None) == {}


def test_bad_schedules_are_errors():
    optimizer = create_optimizer(make_model(), make_args())
    with raises_error('Expected --sched plateau without --sched-on-updates'):
        create_scheduler(optimizer, make_args(sched='plateau', sched_on_updates=True), 5)


@pytest.mark.parametrize('metric, values', [
    ('mAP', [10., 20., 19., 18., 30., 29., 28., 27., 26., 25.]),
    ('loss', [3., 2., 2.1, 2.2, 1., 1.1, 1.2, 1.3, 1.4, 1.5])])
@pytest.mark.parametrize('cut', [1, 3, 4, 7])
def test_a_resumed_plateau_equals_an_uninterrupted_one(metric, values, cut):
    args = make_args(sched='plateau', patience_epochs=1, decay_rate=0.5, warmup_epochs=2, eval_metric=metric,
                     backbone_lr_scale=0.1, lr_noise=[0.3, 0.8], epochs=10)
    model = make_model()

    def start():
        optimizer = create_optimizer(model, args)
        return optimizer, create_scheduler(optimizer, args, 5)[0]

    def step_through(optimizer, scheduler, epochs):
        found = []
        for epoch in epochs:
            scheduler.step(epoch + 1, values[epoch])
            found.append(by_role(optimizer, model))
        return found

    expected = step_through(*start(), range(10))
    assert min(expected)[1] < 0.06
    optimizer, scheduler = start()
    found = step_through(optimizer, scheduler, range(cut))
    state = scheduler_state(scheduler), copy.deepcopy(optimizer.state_dict())
    optimizer, scheduler = start()
    optimizer.load_state_dict(state[1])
    load_scheduler_state(scheduler, state[0])
    assert found + step_through(optimizer, scheduler, range(cut, 10)) == expected
