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
def test_the_base_rate_grows_with_the_global_batch_as_in_timm(opt, scale, factor):
    args = make_args(lr=None, opt=opt, lr_base=0.3, lr_base_size=256, lr_base_scale=scale, batch_size=32,
                     grad_accum_steps=4)
    assert learning_rate(args, world_size=4) == pytest.approx(0.3 * factor)


def test_a_given_rate_is_taken():
    assert learning_rate(make_args(lr=0.05, batch_size=999), world_size=8) == 0.05
    assert learning_rate(make_args(lr=0., batch_size=999), world_size=8) == 0.


def test_an_unknown_scale_is_refused():
    with raises_error("Expected --lr-base-scale linear or sqrt, but got 'cubic'"):
        learning_rate(make_args(lr=None, lr_base_scale='cubic'), 1)


# --- optimizer ---


@pytest.mark.parametrize('sched', ['none', 'cosine', 'step', 'multistep', 'poly', 'tanh', 'plateau'])
@pytest.mark.parametrize('warmup', [0, 3])
def test_the_backbone_learns_at_its_part_of_the_rate_all_the_time(sched, warmup):
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


def test_an_update_moves_the_backbone_by_its_part():
    model, plain = make_model(), make_model()
    for module, scale in ((model, 0.1), (plain, 1.)):
        args = make_args(sched='none', backbone_lr_scale=scale, opt='momentum', momentum=0., weight_decay=0.)
        optimizer = create_optimizer(module, args)
        create_scheduler(optimizer, args, 5)
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    start = dict(make_model().named_parameters())
    for name, parameter in model.named_parameters():
        rate = 0.1 if name.startswith('fc.') else 0.01
        torch.testing.assert_close(parameter, start[name] - rate)
    assert all(torch.allclose(parameter, start[name] - 0.1) for name, parameter in plain.named_parameters())


@pytest.mark.parametrize('sched', ['none', 'cosine'])
def test_the_backbone_s_part_comes_on_top_of_layer_decay(sched):
    model = make_model()
    found = {}
    for scale in (1., 0.1):
        args = make_args(sched=sched, warmup_epochs=0, layer_decay=0.7, backbone_lr_scale=scale, opt='adamw')
        optimizer = create_optimizer(model, args)
        create_scheduler(optimizer, args, 5)
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


def test_a_scale_of_0_leaves_the_backbone_as_it_is():
    model = make_model()
    args = make_args(sched='none', backbone_lr_scale=0., opt='sgd')
    optimizer = create_optimizer(model, args)
    create_scheduler(optimizer, args, 5)
    assert by_role(optimizer, model) == (0., 0.1)


def test_a_wrapped_optimizer_is_scaled_too():
    model = make_model()
    args = make_args(sched='none', backbone_lr_scale=0.1, opt='lookahead_sgd')
    optimizer = create_optimizer(model, args)
    create_scheduler(optimizer, args, 5)
    assert by_role(optimizer, model) == pytest.approx((0.01, 0.1))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    start = make_model()
    moved = [(a - b).abs().max().item() for a, b in zip(start.parameters(), model.parameters())]
    assert moved[0] == pytest.approx(moved[-1] / 10, rel=1e-3)


def test_a_divided_optimizer_saves_and_loads_its_state():
    args = make_args(sched='none', backbone_lr_scale=0.1, opt='adamw')
    model = make_model()
    optimizer = create_optimizer(model, args)
    create_scheduler(optimizer, args, 5)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    again = create_optimizer(model, args)
    create_scheduler(again, args, 5)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert rates(again, model) == rates(optimizer, model)
    assert all(torch.equal(again.state[p]['exp_avg'], optimizer.state[p]['exp_avg']) for p in model.parameters())


def test_what_is_no_optimizer_is_refused():
    with raises_error("Expected an optimizer of timm for --opt, but got 'nonsense'"):
        create_optimizer(make_model(), make_args(opt='nonsense'))
    with raises_error("Expected an optimizer of timm for --opt, but got 'sgd': .*nonsense"):
        create_optimizer(make_model(), make_args(opt='sgd', opt_kwargs={'nonsense': 1}))
    with raises_error('Expected --backbone-lr-scale of at least 0, but got -1'):
        create_optimizer(make_model(), make_args(opt='sgd', backbone_lr_scale=-1))
    with raises_error('Expected a model with a classifier'):
        create_optimizer(timm.create_model('test_resnet', num_classes=0), make_args(backbone_lr_scale=0.1))
    assert len(classifier_parameters(make_model())) == 2


# --- scheduler ---


def test_a_schedule_says_how_many_epochs_it_wants():
    optimizer = create_optimizer(make_model(), make_args())
    args = make_args(sched='cosine', epochs=7, cooldown_epochs=2, warmup_epochs=0)
    scheduler, num_epochs = create_scheduler(optimizer, args, 5)
    assert num_epochs == 9
    assert scheduler_state(scheduler) == {}
    load_scheduler_state(scheduler, {})
    assert scheduler_state(None) == {}


def test_bad_schedules_are_refused():
    optimizer = create_optimizer(make_model(), make_args())
    with raises_error("Expected --sched to be one of cosine, .*, none, but got 'sine'"):
        create_scheduler(optimizer, make_args(sched='sine'), 5)
    with raises_error('Expected --sched plateau without --sched-on-updates'):
        create_scheduler(optimizer, make_args(sched='plateau', sched_on_updates=True), 5)


@pytest.mark.parametrize('metric, values', [
    ('mAP', [10., 20., 19., 18., 30., 29., 28., 27., 26., 25.]),
    ('loss', [3., 2., 2.1, 2.2, 1., 1.1, 1.2, 1.3, 1.4, 1.5])])
@pytest.mark.parametrize('cut', [1, 3, 4, 7])
def test_a_plateau_goes_on_as_if_never_interrupted(metric, values, cut):
    args = make_args(sched='plateau', patience_epochs=1, decay_rate=0.5, warmup_epochs=2, eval_metric=metric,
                     backbone_lr_scale=0.1, lr_noise=[0.3, 0.8], epochs=10)
    model = make_model()

    def start():
        optimizer = create_optimizer(model, args)
        return optimizer, create_scheduler(optimizer, args, 5)[0]

    def go_on(optimizer, scheduler, epochs):
        found = []
        for epoch in epochs:
            scheduler.step(epoch + 1, values[epoch])
            found.append(by_role(optimizer, model))
        return found

    expected = go_on(*start(), range(10))
    assert min(expected)[1] < 0.06
    optimizer, scheduler = start()
    found = go_on(optimizer, scheduler, range(cut))
    state = scheduler_state(scheduler), copy.deepcopy(optimizer.state_dict())
    optimizer, scheduler = start()
    optimizer.load_state_dict(state[1])
    load_scheduler_state(scheduler, state[0])
    assert found + go_on(optimizer, scheduler, range(cut, 10)) == expected
