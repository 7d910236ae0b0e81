""" Effects of the flags of train.py for optimizer, schedule, losses and mixing """
import math

import pytest
import torch

from timm_splicemix.mix import (
    Mixup,
    RecursiveMix,
    ResizeMix,
    SpliceMix,
    SpliceWith,
)
from timm_splicemix.models import classifier_parameters
from timm_splicemix.run.model import set_training

from .helpers import raises_error
from .runs import CLASSES, make_images
from .train_flags import build, model_of, shows


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp('flags') / 'images')


# Optimizer

def defaults(data, *flags):
    run = build(data, *flags)
    return type(run.optimizer).__name__, run.optimizer.param_groups[-1]


@shows('opt', 'opt_eps', 'opt_betas', 'momentum', 'weight_decay', 'opt_kwargs')
def test_the_optimizer_is_the_given_one(data):
    name, group = defaults(data, '--momentum', '0.7', '--weight-decay', '0.03', '--opt-kwargs', 'foreach=True')
    assert (name, group['momentum'], group['weight_decay'], group['foreach']) == ('SGD', 0.7, 0.03, True)
    name, group = defaults(data, '--opt', 'adamw', '--opt-eps', '0.01', '--opt-betas', '0.5', '0.6')
    assert (name, group['eps'], tuple(group['betas'])) == ('AdamW', 0.01, (0.5, 0.6))
    with raises_error("Expected an optimizer that has betas for --opt-betas, but got 'sgd'"):
        build(data, '--opt-betas', '0.5', '0.6')
    with raises_error("Expected an optimizer that has eps for --opt-eps, but got 'sgd'"):
        build(data, '--opt-eps', '0.5')
    with raises_error('Expected an optimizer of timm'):
        build(data, '--opt', 'adamw', '--opt-betas', '0.5')


@shows('layer_decay', 'layer_decay_min_scale', 'layer_decay_no_opt_scale')
def test_layer_decay_scales_the_rates_of_layers(data):
    def scales(*flags):
        return sorted({round(group['lr_scale'], 6) for group in build(data, *flags).optimizer.param_groups})

    whole = scales('--layer-decay', '0.5')
    assert whole == [0.5 ** power for power in reversed(range(len(whole)))] and len(whole) > 3
    assert scales('--layer-decay', '0.5', '--layer-decay-min-scale', '0.3') == [0.3, 0.5, 1]
    flags = ('--layer-decay', '0.5', '--layer-decay-no-opt-scale', '0.3')
    assert scales(*flags) == [0.5, 1]
    frozen = [parameter for parameter in model_of(build(data, *flags)).parameters() if not parameter.requires_grad]
    assert frozen


@shows('backbone_lr_scale')
@pytest.mark.parametrize('sched', ['cosine', 'none'])
def test_the_backbone_learns_more_slowly(data, sched):
    run = build(data, '--backbone-lr-scale', '0.1', '--sched', sched)
    classifier = {id(parameter) for parameter in classifier_parameters(model_of(run))}
    for group in run.optimizer.param_groups:
        for parameter in group['params']:
            assert group['lr'] == pytest.approx(0.05 if id(parameter) in classifier else 0.005)


def update(data, *flags, scale=1.):
    """Change of the weights in one step with known gradients."""
    run = build(data, '--opt', 'momentum', '--momentum', '0', '--weight-decay', '0', '--lr', '1', *flags)
    set_training(run.task, [], False)
    before = {name: value.detach().clone() for name, value in model_of(run).named_parameters()}
    loss = scale * sum((parameter * 3).sum() for parameter in model_of(run).parameters())
    run.step.backward(run.task, run.optimizer, loss, update=True)
    return {name: before[name] - value.detach() for name, value in model_of(run).named_parameters()}


@shows('clip_grad', 'clip_mode')
def test_gradients_are_clipped(data):
    def norm(moves):
        return math.sqrt(sum(float(move.square().sum()) for move in moves.values()))

    assert norm(update(data)) > 100
    assert norm(update(data, '--clip-grad', '2')) == pytest.approx(2, rel=1e-3)
    moves = update(data, '--clip-grad', '0.5', '--clip-mode', 'value')
    assert all(move.allclose(torch.tensor(0.5), atol=1e-5) for move in moves.values())
    moves = update(data, '--clip-grad', '0.01', '--clip-mode', 'agc')
    assert moves['fc.weight'].allclose(torch.tensor(3.), atol=1e-5)  # the classifier is not clipped
    assert float(moves['conv1.0.weight'].abs().max()) < 0.1


@shows('grad_accum_steps')
def test_gradients_are_accumulated(data):
    run = build(data, '--grad-accum-steps', '2', '--epochs', '1')
    assert run.step.accumulate == 2
    steps = []
    run.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    run.train()
    assert len(steps) == 2  # of 4 batches


# Learning rate

def rates(data, *flags, epochs=None, lr='1'):
    """The learning rate of each epoch."""
    run = build(data, '--lr', lr, *flags)
    found = []
    for epoch in range(epochs or run.num_epochs):
        found.append(run.optimizer.param_groups[0]['lr'])
        run.scheduler.step(epoch + 1)
    return found


@shows('lr', 'lr_base', 'lr_base_size', 'lr_base_scale')
def test_the_rate_is_scaled_with_the_batch_size_unless_given(data):
    def rate(*flags):
        run = build(data, *flags, before=lambda args: '--lr' in flags or vars(args).update(lr=None))
        return run.optimizer.param_groups[0]['lr']

    assert rate('--lr', '0.3') == 0.3
    base = ('--lr-base', '0.8', '--lr-base-size', '64')
    assert rate(*base) == pytest.approx(0.8 * 4 / 64)
    assert rate(*base, '--grad-accum-steps', '2') == pytest.approx(0.8 * 8 / 64)
    assert rate(*base, '--lr-base-scale', 'sqrt') == pytest.approx(0.8 * 0.25)
    assert rate(*base, '--opt', 'adamw') == pytest.approx(0.8 * 0.25)
    assert rate(*base, '--opt', 'adamw', '--lr-base-scale', 'linear') == pytest.approx(0.8 / 16)


@shows('sched', 'epochs', 'min_lr', 'decay_epochs', 'decay_milestones', 'decay_rate')
def test_the_rate_follows_the_schedule(data):
    cosine = [0.1 + 0.9 * (1 + math.cos(math.pi * epoch / 4)) / 2 for epoch in range(4)]
    assert rates(data, '--epochs', '4', '--min-lr', '0.1') == pytest.approx(cosine)
    step = ('--sched', 'step', '--epochs', '5', '--decay-epochs', '2', '--decay-rate', '0.5')
    assert rates(data, *step) == [1, 1, 0.5, 0.5, 0.25]
    multistep = ('--sched', 'multistep', '--epochs', '5', '--decay-milestones', '2', '4', '--decay-rate', '0.5')
    assert rates(data, *multistep) == [1, 0.5, 0.5, 0.25, 0.25]  # timm counts these epochs from 1
    poly = ('--sched', 'poly', '--epochs', '4', '--decay-rate', '2')
    assert rates(data, *poly) == pytest.approx([1, 0.75 ** 2, 0.25, 0.25 ** 2])
    tanh = rates(data, '--sched', 'tanh', '--epochs', '4')
    assert len(tanh) == 4 and tanh != cosine and tanh == sorted(tanh, reverse=True)
    assert build(data, '--sched', 'none').scheduler is None


@shows('lr_cycle_mul', 'lr_cycle_decay', 'lr_cycle_limit', 'lr_k_decay', 'cooldown_epochs')
def test_the_schedule_has_cycles_and_a_cooldown(data):
    once = rates(data, '--epochs', '4')
    cycles = ('--epochs', '4', '--lr-cycle-limit', '2')
    assert rates(data, *cycles) == pytest.approx([*once, *(0.5 * rate for rate in once)])
    assert rates(data, *cycles, '--lr-cycle-decay', '0.25')[4] == pytest.approx(0.25)
    assert len(rates(data, *cycles, '--lr-cycle-mul', '2')) == 4 + 8
    assert rates(data, '--epochs', '4', '--cooldown-epochs', '2', '--min-lr', '0.1')[-2:] == [0.1, 0.1]
    slow = rates(data, '--epochs', '4', '--lr-k-decay', '2')
    assert slow[1] == pytest.approx((1 + math.cos(math.pi / 16)) / 2)


@shows('warmup_lr', 'warmup_epochs', 'warmup_prefix')
def test_the_rate_warms_up(data):
    flags = ('--epochs', '6', '--warmup-epochs', '2', '--warmup-lr', '0.2')
    plain = rates(data, '--epochs', '6')
    assert rates(data, *flags) == pytest.approx([0.2, 0.6, *plain[2:]])
    assert rates(data, *flags, '--warmup-prefix') == pytest.approx([0.2, 0.6, *plain])


@shows('lr_noise', 'lr_noise_pct')
def test_the_rate_has_noise_in_a_range_of_epochs(data):
    plain = rates(data, '--epochs', '10')
    noisy = rates(data, '--epochs', '10', '--lr-noise', '0.3', '0.6')
    different = [epoch for epoch in range(10) if noisy[epoch] != plain[epoch]]
    assert different == [3, 4, 5]
    little = rates(data, '--epochs', '10', '--lr-noise', '0.3', '0.6', '--lr-noise-pct', '0.01')
    assert 0 < max(abs(rate / other - 1) for rate, other in zip(little[3:6], plain[3:6])) < 0.01
    with raises_error('Expected one or two numbers for --lr-noise'):
        build(data, '--lr-noise', '0.1', '0.2', '0.3')


@shows('sched_on_updates')
def test_the_schedule_can_step_on_updates(data):
    run = build(data, '--epochs', '2', '--sched-on-updates', '--lr', '1')
    run.scheduler.step_update(4)  # of 8
    assert run.optimizer.param_groups[0]['lr'] == pytest.approx(0.5)
    run = build(data, '--epochs', '2', '--lr', '1')
    run.scheduler.step_update(4)
    assert run.optimizer.param_groups[0]['lr'] == 1


@shows('patience_epochs')
def test_plateau_decays_after_its_patience(data):
    def rates_of_plateau(patience):
        run = build(data, '--sched', 'plateau', '--patience-epochs', patience, '--lr', '1', '--epochs', '6')
        found = []
        for epoch in range(6):
            run.scheduler.step(epoch + 1, 50.)
            found.append(run.optimizer.param_groups[0]['lr'])
        return found

    assert rates_of_plateau('0')[1] == pytest.approx(0.1)
    assert rates_of_plateau('2')[:4] == pytest.approx([1, 1, 1, 0.1])


# Losses

LOGITS = torch.tensor([[2., -1., 0.5], [-2., 1., 3.], [0.1, 2., -0.3]])
TARGETS = torch.tensor([[1., 0., 0.], [0., 1., 0.], [1., 0., 0.]])
UNKNOWN = torch.tensor([[1., -1., 0.], [-1., 1., -1.], [0., -1., 1.]])


def loss(data, *flags, targets=TARGETS, epoch=0):
    criterion = build(data, *flags).task.criterion
    if hasattr(criterion, 'set_epoch'):
        criterion.set_epoch(epoch)
    return float(criterion(LOGITS, targets))


@shows('loss', 'bce_loss')
def test_the_loss_is_the_given_one(data):
    plain = torch.nn.functional.binary_cross_entropy_with_logits(LOGITS, TARGETS).item()
    assert loss(data) == loss(data, '--bce-loss') == loss(data, '--loss', 'bce') == pytest.approx(plain)
    assert len({round(loss(data, '--loss', name), 5) for name in ('bce', 'focal', 'asl', 'hill')}) == 4


@shows('bce_loss', 'smoothing')
def test_single_label_data_uses_cross_entropy_unless_bce_is_given(tmp_path):
    images = make_images(tmp_path / 'images')
    for index in range(25):
        folder = tmp_path / 'data' / ('train' if index < 16 else 'val') / CLASSES[index % 3]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f'{index}.png').symlink_to(images / f'{index}.png')
    flags = ('--dataset', '', '--num-classes', '3', '--smoothing')
    classes = TARGETS.argmax(dim=1)
    for value in ('0', '0.1'):
        expected = torch.nn.functional.cross_entropy(LOGITS, classes, label_smoothing=float(value)).item()
        assert loss(tmp_path / 'data', *flags, value, targets=classes) == pytest.approx(expected)
    binary = torch.nn.functional.binary_cross_entropy_with_logits(LOGITS, TARGETS).item()
    assert loss(tmp_path / 'data', *flags, '0', '--bce-loss', targets=TARGETS) == pytest.approx(binary)


@shows('bce_sum', 'bce_target_thresh', 'bce_pos_weight', 'smoothing', 'class_weights')
def test_binary_cross_entropy_gets_its_parameters(data):
    plain = loss(data)
    assert loss(data, '--bce-sum') == pytest.approx(3 * plain)
    soft = TARGETS * 0.7
    assert loss(data, '--bce-target-thresh', '0.6', targets=soft) == pytest.approx(plain)
    assert loss(data, targets=soft) != pytest.approx(plain)
    weighted = torch.nn.functional.binary_cross_entropy_with_logits(LOGITS, TARGETS, pos_weight=torch.tensor(2.))
    assert loss(data, '--bce-pos-weight', '2') == pytest.approx(weighted.item())
    assert loss(data, '--smoothing', '0.1') != pytest.approx(plain)
    targets = build(data).train_loader.dataset.targets
    weight = (targets == 0).sum(dim=0) / (targets == 1).sum(dim=0)
    weighted = torch.nn.functional.binary_cross_entropy_with_logits(LOGITS, TARGETS, pos_weight=weight)
    assert loss(data, '--class-weights', 'auto') == pytest.approx(weighted.item())


LOSS_FLAGS = {
    'loss_reduction': ('bce', 'sum'), 'loss_eps': ('bce-ls', '0.3'), 'loss_gamma': ('focal', '3'),
    'loss_alpha': ('focal', '0.2'), 'loss_gamma_pos': ('asl', '2'), 'loss_gamma_neg': ('asl', '2'),
    'loss_clip': ('asl', '0.2'), 'loss_margin': ('hill', '2'), 'loss_lamb': ('hill', '2'), 'loss_tau': ('splc', '0.8'),
    'loss_start_epoch': ('splc', '3'), 'loss_partial': ('p-asl', 'negative'), 'loss_gamma_unknown': ('p-asl', '1'),
    'loss_topk': ('p-asl', '1'),
}


@shows(*LOSS_FLAGS)
@pytest.mark.parametrize('name', LOSS_FLAGS)
def test_a_loss_gets_its_parameters(data, name):
    kind, value = LOSS_FLAGS[name]
    flags = ('--loss', kind, *(('--loss-topk', '0') if name == 'loss_gamma_unknown' else ()))
    targets = UNKNOWN if kind == 'p-asl' else TARGETS
    changed = loss(data, *flags, f"--{name.replace('_', '-')}", value, targets=targets, epoch=2)
    assert changed != pytest.approx(loss(data, *flags, targets=targets, epoch=2))
    if name != 'loss_reduction':  # which all have
        with raises_error(f"Expected --{name.replace('_', '-')} with --loss"):
            build(data, '--loss', 'wan', f"--{name.replace('_', '-')}", value)


@shows('loss_detach_focus')
def test_focusing_weights_have_a_gradient_unless_detached(data):
    def gradient(*flags):
        logits = LOGITS.clone().requires_grad_()
        build(data, '--loss', 'asl', *flags).task.criterion(logits, TARGETS).backward()
        return logits.grad

    assert torch.equal(gradient(), gradient('--no-loss-detach-focus'))
    assert not torch.allclose(gradient(), gradient('--loss-detach-focus'))


@shows('loss_prior', 'loss_prior_threshold')
def test_frequent_classes_are_ignored_where_unknown(data, tmp_path):
    (tmp_path / 'prior.csv').write_text('red,0.1\ngreen,0.6\nblue,0.3\n')
    flags = ('--loss', 'p-asl', '--loss-topk', '0')
    prior = (*flags, '--loss-prior', tmp_path / 'prior.csv')
    values = [loss(data, *some, targets=UNKNOWN) for some in (
        flags, prior, (*prior, '--loss-prior-threshold', '0.5'), (*prior, '--loss-prior-threshold', '0.9'))]
    assert len({round(value, 5) for value in values}) == 3 and values[3] == values[0]


# Mixing

def mix(run, batch_size=8, step=0):
    run.mixer.set_step(0, step)
    return run.mixer.plan(batch_size)


@shows('splicemix_grids', 'splicemix_ratio', 'splicemix_drop_prob', 'splicemix_prob', 'splicemix_mode',
       'splicemix_batch')
def test_splicemix_flags_reach_the_plan(data):
    def plan(*flags, steps=1):
        run = build(data, '--splicemix-grids', '2x2', *flags)
        assert isinstance(run.mixer, SpliceMix)
        return [mix(run, step=step) for step in range(steps)]

    assert build(data).mixer is None
    record, = plan('--splicemix-drop-prob', '0')[0].records
    assert str(record.grid) == '2x2' and record.num_mixed == 2 and not record.dropped.any()
    assert plan('--splicemix-ratio', '0.5')[0].records[0].num_mixed == 4
    assert plan('--splicemix-drop-prob', '1')[0].records[0].dropped.any()
    assert not plan('--splicemix-prob', '0')[0].records
    assert len(plan('--splicemix-batch', 'only')[0].kept) == 0 and len(plan()[0].kept) == 8
    grids = ('--splicemix-grids', '1x2,2x2,2x3,3x3', '--splicemix-ratio', '1')
    assert max(len(plan.records) for plan in plan(*grids, steps=5)) == 1
    assert max(len(plan.records) for plan in plan(*grids, '--splicemix-mode', 'elem', steps=5)) > 1


@shows('splicemix_unknown', 'splicemix_all')
def test_names_of_classes_are_those_of_the_data(data):
    run = build(data, '--splicemix-grids', '2x2', '--splicemix-unknown', 'blue', 'red', '--splicemix-all', 'green')
    assert run.info.class_names == ('red', 'green', 'blue')
    assert vars(run.mixer.labels) == {'unknown_classes': (0, 2), 'all_classes': (1,)}


@shows('splicemix_weight')
def test_mixed_images_have_a_weight_in_the_loss(data):
    def loss(*flags):
        run = build(data, '--splicemix-grids', '2x2', *flags)
        return run.task(torch.ones(4, 3, 64, 64), torch.eye(4, 3))['loss']

    assert loss('--splicemix-weight', '1') == loss() != loss('--splicemix-weight', '0.25')


@shows('splicemix_cl_mean')
def test_the_consistency_loss_divides_by_visible_or_all_cells(data):
    def consistency(*flags):
        run = build(data, '--splicemix-grids', '2x2-1', '--splicemix-cl', *flags)
        torch.manual_seed(0)
        return run.task(torch.randn(4, 3, 64, 64), torch.ones(4, 3))['consistency_loss']

    torch.testing.assert_close(consistency('--splicemix-cl-mean', 'all'), 3 / 4 * consistency())


@shows('splicemix_cl', 'splicemix_cl_no_detach')
def test_the_consistency_loss_has_its_weight(data):
    def result(*flags):
        run = build(data, '--splicemix-grids', '2x2', '--splicemix-drop-prob', '0', *flags)
        run.task.set_step(0, 0)
        torch.manual_seed(0)
        images, targets = torch.randn(4, 3, 64, 64), torch.ones(4, 3)
        return run, run.task(images, targets)

    assert 'consistency_loss' not in result()[1]
    (one, half) = (result('--splicemix-cl', *weight)[1] for weight in ((), ('0.5',)))
    assert one['consistency_loss'] > 0
    torch.testing.assert_close(one['loss'], one['task_loss'] + one['consistency_loss'])
    torch.testing.assert_close(half['loss'], half['task_loss'] + 0.5 * half['consistency_loss'])
    gradients = []
    for flags in ((), ('--splicemix-cl-no-detach',)):
        run, found = result('--splicemix-cl', *flags)
        found['loss'].backward()
        gradients.append(model_of(run).fc.weight.grad)
    assert not torch.allclose(*gradients)


@shows('mixup', 'cutmix', 'cutmix_minmax', 'mixup_prob', 'mixup_switch_prob', 'mixup_mode')
def test_mixup_flags_reach_the_plan(data):
    def plans(*flags):
        run = build(data, *flags)
        assert type(run.mixer) is Mixup
        return [mix(run, step=step) for step in range(20)]

    def is_boxed(plan):
        return bool((plan.boxes[:, :2] > 0).any())

    def blends(plan):
        return len(plan.blend.unique())

    assert not any(is_boxed(plan) for plan in plans('--mixup', '0.4'))
    assert all(is_boxed(plan) for plan in plans('--cutmix', '1'))
    both = ('--mixup', '0.4', '--cutmix', '1')
    assert 0 < sum(is_boxed(plan) for plan in plans(*both)) < 20
    assert sum(is_boxed(plan) for plan in plans(*both, '--mixup-switch-prob', '1')) == 20
    assert sum(is_boxed(plan) for plan in plans(*both, '--mixup-switch-prob', '0')) == 0
    sides = torch.cat([plan.boxes[:, :2] for plan in plans('--cutmix-minmax', '0.4', '0.5')])
    assert float(sides.min()) >= 0.4 and float(sides.max()) <= 0.5
    assert 0 < sum(bool((plan.blend < 1).any()) for plan in plans('--mixup', '0.4', '--mixup-prob', '0.5')) < 20
    assert {blends(plan) for plan in plans('--mixup', '0.4')} == {1}
    assert {blends(plan) for plan in plans('--mixup', '0.4', '--mixup-mode', 'pair')} == {4}
    assert {blends(plan) for plan in plans('--mixup', '0.4', '--mixup-mode', 'elem')} == {8}


@shows('resizemix', 'recursivemix', 'splice_with', 'splice_with_ratio')
def test_other_mixers_are_created(data):
    resize, recursive = build(data, '--resizemix').mixer, build(data, '--recursivemix', '0.3').mixer
    assert isinstance(resize, ResizeMix) and resize.alpha == 1
    assert isinstance(recursive, RecursiveMix) and recursive.alpha == 0.3
    assert build(data, '--resizemix', '0.2').mixer.alpha == 0.2
    images, targets = torch.randn(8, 3, 16, 16), torch.zeros(8, 3)
    for flags, number in ((('mixup',), 10), (('cutmix', '--splice-with-ratio', '0.5'), 12)):
        mixer = build(data, '--splice-with', *flags).mixer
        assert isinstance(mixer, SpliceWith) and mixer.kind == flags[0]
        assert len(mixer(images, targets)[0]) == number


@shows('recursivemix_cl')
def test_recursivemix_compares_a_box_with_the_previous_step(data):
    torch.manual_seed(0)
    images, targets = torch.randn(4, 3, 64, 64), torch.ones(4, 3)
    for weight in ('0', '0.2'):
        task = build(data, '--recursivemix', '--recursivemix-cl', weight).task
        for step in range(2):
            task.set_step(0, step)
            result = task(images, targets)
        expected = result['task_loss'] + float(weight) * result.get('consistency_loss', 0.)
        torch.testing.assert_close(result['loss'], expected)
        assert ('consistency_loss' in result) == (weight != '0')
    assert result['consistency_loss'] > 0


@shows('splicemix_off_epoch', 'mixup_off_epoch')
@pytest.mark.parametrize('flags', [
    ('--splicemix-grids', '2x2', '--splicemix-off-epoch', '1'), ('--mixup', '0.4', '--mixup-off-epoch', '1')])
def test_mixing_stops_at_the_off_epoch(data, monkeypatch, flags):
    run = build(data, *flags, '--train-batches-per-epoch', '1')
    enabled = []
    before_batch = run.before_batch

    def note(*args):
        enabled.append(run.mixer.mixup_enabled)
        before_batch(*args)

    monkeypatch.setattr(run, 'before_batch', note)
    run.train()
    assert enabled == [True, False]
