""" The task with DDP, EMA, compilation, reduced precision and timm's optimizers """
import contextlib
import sys

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2
from torch import nn

from tests.helpers import make_batch
from tests.test_task import TinyModel, close, gradients, make_task, next_plan, tiny_model
from timm_splicemix.mix import MixPlan, SpliceRecord
from timm_splicemix.models import create_model, freeze_batch_norm
from timm_splicemix.task import SpliceMixModule


@contextlib.contextmanager
def one_process(tmp_path):
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/meet', rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


# --- DDP, EMA and compilation ---


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


def test_ddp_with_one_process_gives_the_same_gradients(tmp_path):
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


@pytest.mark.parametrize('head', ['', 'csra'])
def test_backbone_and_head_are_compiled_for_mixed_and_unmixed_batches(head):
    called = []

    def backend(graph, inputs):
        def call(*args):
            called.append(graph.code)
            return graph(*args)
        return call

    torch.manual_seed(0)
    model = create_model('test_resnet', num_classes=5, global_pool=None if head else 'max', head=head)
    task = make_task(model, consistency_weight=1., input_size=(3, 64, 64)).train()
    task.compile(backend=backend)
    images, targets = make_batch(4, height=64, width=64)
    names = {'': ('linear',), 'csra': ('conv2d', 'softmax')}[head]
    for enabled in (True, False, False):  # after --splicemix-off-epoch no batch is mixed
        task.mixer.mixup_enabled = enabled
        called.clear()
        result = task(images, targets)
        assert bool(result['consistency_loss']) == enabled
        backbone, own_head = called  # parts are not compiled, as their sizes vary
        assert 'batch_norm' in backbone and 'linear' not in backbone and 'cross_entropy' not in backbone
        assert 'batch_norm' not in own_head and 'cross_entropy' not in own_head
        assert any(name in own_head for name in names), own_head
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
from tests.test_task_wrapped import distributed_case, gradients

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


@pytest.mark.slow
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
