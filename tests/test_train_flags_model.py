""" Effects of the flags of train.py for the model, the device and the EMA """
import functools
import sys

import pytest
import timm
import torch
from timm.layers import DropPath, is_fast_norm, set_fast_norm
from timm.layers.drop import DropBlock2d
from torch import nn

from timm_splicemix.models import has_head
from timm_splicemix.models.pooling import is_max_pooled
from timm_splicemix.run import trainer
from timm_splicemix.run.machine import set_up_device
from timm_splicemix.run.model import checkpoint_gradients, count_classes, set_training
from timm_splicemix.task import SpliceMixTask

from .helpers import raises_error
from .runs import make_images, summary, train
from .train_flags import batches, build, model_of, shows

ONE_BATCH = ('--epochs', '1', '--train-batches-per-epoch', '1')


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp('flags') / 'images')


@pytest.fixture
def pretrained(monkeypatch, tmp_path):
    """A model whose weights replace those that would be downloaded."""
    torch.manual_seed(1)
    model = timm.create_model('test_resnet')
    monkeypatch.setattr(timm.models._builder, 'load_state_dict_from_hf', lambda *args, **kwargs: model.state_dict())
    torch.save(model.state_dict(), tmp_path / 'weights.pth')
    return model


@pytest.fixture
def group(tmp_path):
    """A process group with one process; returns a function that makes a run part of it."""
    torch.distributed.init_process_group('gloo', f'file://{tmp_path}/store', rank=0, world_size=1)

    def join(args, **settings):
        args.distributed = True
        vars(args).update(settings)

    yield join
    torch.distributed.destroy_process_group()


def first_weight(model):
    return next(model.parameters())


# Model

@shows('model', 'model_kwargs', 'num_classes')
def test_the_model_is_the_given_one(data):
    assert type(model_of(build(data))).__name__ == 'ResNet'
    assert type(model_of(build(data, '--model', 'test_efficientnet'))).__name__ == 'EfficientNet'
    run = build(data, '--model-kwargs', 'act_layer=silu')
    assert any(isinstance(module, nn.SiLU) for module in model_of(run).modules())
    assert run.info.model_kwargs['act_layer'] == 'silu'
    assert model_of(build(data, '--num-classes', '3')).num_classes == 3
    with raises_error('Expected --num-classes 3, as in the data set, but got 4'):
        build(data, '--num-classes', '4')
    with raises_error('Expected a model of 3 classes, but got one of 5'):
        build(data, '--model-kwargs', 'num_classes=5')


@shows('num_classes')
def test_num_classes_applies_to_a_data_set_without_classes(data):
    args = build(data, '--num-classes', '3').args
    assert count_classes(args, object()) == 3


@shows('gp')
def test_the_pooling_is_the_given_one(data):
    assert is_max_pooled(model_of(build(data, '--gp', 'max')), 64)
    assert not is_max_pooled(model_of(build(data)), 64)
    assert model_of(build(data, '--gp', 'avgmax')).global_pool.pool_type == 'avgmax'


@shows('pretrained', 'pretrained_path', 'initial_checkpoint')
def test_weights_are_loaded_from_the_given_source(data, pretrained, tmp_path):
    for flags in (('--pretrained',), ('--pretrained-path', tmp_path / 'weights.pth')):
        assert torch.equal(first_weight(model_of(build(data, *flags))), first_weight(pretrained))
    assert not torch.equal(first_weight(model_of(build(data))), first_weight(pretrained))
    model = model_of(build(data, '--seed', '1'))
    torch.save(model.state_dict(), tmp_path / 'own.pth')
    started = model_of(build(data, '--initial-checkpoint', tmp_path / 'own.pth'))
    assert all(torch.equal(value, started.state_dict()[name]) for name, value in model.state_dict().items())


@shows('head_init_scale', 'head_init_bias', 'head_init_std')
def test_the_classifier_is_initialized(data):
    def classifier(*flags):
        return model_of(build(data, *flags)).get_classifier()

    assert classifier('--head-init-std', '0.5').weight.std().item() == pytest.approx(0.5, rel=0.2)
    assert classifier().weight.std().item() == pytest.approx(0.01, rel=0.2)
    assert classifier('--head-init-bias=-2.5').bias.tolist() == [-2.5] * 3
    assert len(classifier('--head-init-bias', 'prior').bias.unique()) > 1
    torch.testing.assert_close(
        classifier('--head-init-scale', '0.5').weight, classifier('--head-init-scale', '1').weight / 2)


@shows('drop', 'drop_path', 'drop_connect', 'drop_block')
def test_drop_rates_reach_the_model(data):
    def rates(kind, name, *flags):
        return {getattr(module, name) for module in model_of(build(data, *flags)).modules() if isinstance(module, kind)}

    assert model_of(build(data, '--drop', '0.3')).drop_rate == 0.3
    images = torch.randn(2, 3, 64, 64)
    model = model_of(build(data, '--drop', '0.3', '--freeze-bn')).train()
    assert not torch.equal(model(images), model(images))
    for flag in ('--drop-path', '--drop-connect'):
        assert max(rates(DropPath, 'drop_prob', flag, '0.2')) == pytest.approx(0.2)
    assert rates(DropPath, 'drop_prob') == rates(DropBlock2d, 'drop_prob') == set()
    assert 0.1 in rates(DropBlock2d, 'drop_prob', '--drop-block', '0.1')


@shows('bn_momentum', 'bn_eps')
def test_batch_norm_gets_its_parameters(data):
    model = model_of(build(data, '--model', 'test_efficientnet', '--bn-momentum', '0.37', '--bn-eps', '0.01'))
    layers = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert {(layer.momentum, layer.eps) for layer in layers} == {(0.37, 0.01)}
    with raises_error('bn_momentum'):  # a model that can't
        build(data, '--bn-momentum', '0.37')


@shows('freeze', 'freeze_bn')
def test_frozen_modules_do_not_change(data):
    run = build(data, '--freeze', 'conv1', 'layer1', '--freeze-bn')
    model = model_of(run)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if name.startswith(('conv1.', 'layer1.'))}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    images, targets = batches(run)[0]
    set_training(run.task, run.frozen, run.args.freeze_bn)
    run.step.backward(run.task, run.optimizer, run.task(images, targets)['loss'], True)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert 'fc.weight' in changed
    assert not any(name in frozen or 'running' in name for name in changed)
    set_training(run.task, [], False)
    run.task(images, targets)
    assert not torch.equal(model.bn1.running_mean, before['bn1.running_mean'])


@shows('grad_checkpointing')
def test_activations_are_recomputed(data):
    run = build(data, '--grad-checkpointing')
    assert model_of(run).grad_checkpointing and not model_of(build(data)).grad_checkpointing
    calls = []
    model_of(run).layer1[0].register_forward_pre_hook(lambda *_: calls.append(1))
    set_training(run.task, [], False)
    images, targets = batches(run)[0]
    run.task(images, targets)['loss'].backward()
    assert len(calls) == 2
    with raises_error('Expected a model that supports --grad-checkpointing, but got Linear'):
        checkpoint_gradients(nn.Linear(1, 1))


@shows('channels_last')
def test_channels_are_last_in_memory(data):
    run = build(data, '--channels-last')
    assert model_of(run).layer1[0].conv1.weight.is_contiguous(memory_format=torch.channels_last)
    images, _ = run.step.to_device(*batches(run)[0])
    assert images.is_contiguous(memory_format=torch.channels_last)
    images, _ = build(data).step.to_device(*batches(run)[0])
    assert images.is_contiguous()


@shows('fast_norm')
def test_norms_compute_in_low_precision(data):
    try:
        set_fast_norm(False)
        build(data)
        assert not is_fast_norm()
        build(data, '--fast-norm')
        assert is_fast_norm()
    finally:
        set_fast_norm(False)


@shows('torchcompile', 'torchcompile_mode')
def test_the_model_is_compiled(data, monkeypatch):
    calls = []

    def compile_model(function, **kwargs):
        calls.append(kwargs)
        return function

    monkeypatch.setattr(torch, 'compile', compile_model)
    build(data)
    assert not calls
    build(data, '--torchcompile')
    build(data, '--torchcompile', 'eager', '--torchcompile-mode', 'max-autotune')
    kinds = [(call['backend'], call['mode']) for call in calls]
    assert kinds == [('inductor', None)] * 2 + [('eager', 'max-autotune')] * 2  # to train and to evaluate
    with raises_error('Expected --torchcompile to be one of .*inductor.*, but got .nonsense'):
        build(data, '--torchcompile', 'nonsense')


# Device

@shows('device')
def test_the_device_is_the_given_one(data):
    assert build(data, '--device', 'cpu').step.device == torch.device('cpu')
    assert next(model_of(build(data)).parameters()).device.type == 'cpu'  # there being no GPU
    for name in ('nonsense', 'xpu'):
        with raises_error(f"Expected a device of this machine, but got '{name}'"):
            build(data, '--device', name)


@shows('amp', 'amp_dtype', 'model_dtype')
def test_weights_and_outputs_have_the_given_precision(data):
    def dtypes(*flags):
        run = build(data, *flags)
        images, _ = run.step.to_device(*batches(run)[0])
        with run.step.autocast():
            return first_weight(model_of(run)).dtype, model_of(run)(images).dtype, type(run.step.scaler).__name__

    float32, bfloat16 = torch.float32, torch.bfloat16
    assert dtypes() == (float32, float32, 'NoneType')
    assert dtypes('--amp') == (float32, bfloat16, 'NoneType')  # the default for a CPU
    assert dtypes('--amp', '--amp-dtype', 'float16') == (float32, torch.float16, 'NativeScaler')
    assert dtypes('--model-dtype', 'bfloat16') == (bfloat16, bfloat16, 'NoneType')


@shows('device_modules')
def test_device_modules_are_imported(data, tmp_path, monkeypatch):
    (tmp_path / 'module_of_some_device.py').write_text('')
    monkeypatch.syspath_prepend(tmp_path)
    build(data, '--device-modules', 'module_of_some_device')
    assert sys.modules.pop('module_of_some_device')


@shows('local_rank')
def test_the_local_rank_of_the_launcher_wins(data, monkeypatch):
    assert build(data, '--local_rank', '3').args.local_rank == 0  # one process, as in timm
    args = build(data).args
    args.local_rank = 3
    for name, value in (('WORLD_SIZE', '2'), ('RANK', '1'), ('LOCAL_RANK', '1')):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.distributed, 'init_process_group', lambda **_: None)
    monkeypatch.setattr(torch.distributed, 'get_world_size', lambda: 2)
    monkeypatch.setattr(torch.distributed, 'get_rank', lambda: 1)
    set_up_device(args)
    assert (args.local_rank, args.rank, args.world_size) == (1, 1, 2)


@shows('synchronize_step')
def test_the_device_is_synchronized_after_each_update(data, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cpu, 'synchronize', lambda *_: calls.append(1))
    train(data, tmp_path, *ONE_BATCH)
    assert not calls
    train(data, tmp_path, '--epochs', '1', '--grad-accum-steps', '2', '--synchronize-step', name='synchronized')
    assert len(calls) == 2


@shows('no_ddp_bb')
def test_buffers_are_broadcast_unless_switched_off(data, group):
    assert build(data, before=group).task.trainable_module.broadcast_buffers
    assert not build(data, '--no-ddp-bb', before=group).task.trainable_module.broadcast_buffers


@shows('sync_bn')
def test_batch_norm_is_synchronized(data, group, monkeypatch):
    with raises_error('Expected --sync-bn on GPUs'):
        build(data, '--sync-bn')
    monkeypatch.setattr(SpliceMixTask, 'prepare_distributed', lambda *_, **__: None)  # wants GPUs
    run = build(data, before=functools.partial(group, sync_bn=True))
    layers = [module for module in model_of(run).modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    assert layers and all(isinstance(layer, nn.SyncBatchNorm) for layer in layers)


@shows('dist_bn')
@pytest.mark.parametrize('how, expected', [('reduce', True), ('broadcast', False), ('', None)])
def test_running_statistics_are_distributed_after_an_epoch(data, group, monkeypatch, how, expected):
    calls = []
    monkeypatch.setattr(trainer, 'distribute_bn', lambda model, world_size, reduce: calls.append(reduce))
    run = build(data, *ONE_BATCH, '--model-ema', '--dist-bn', how, before=group)
    run.train()
    assert calls == ([] if expected is None else [expected] * 2)  # of the model and of its average


# Multi-label heads

@shows('head', 'head_kwargs', 'class_vectors')
def test_a_head_replaces_the_classifier(data, tmp_path):
    assert not has_head(model_of(build(data)))
    assert not has_head(model_of(build(data, '--head', '', '--gp', 'max')))
    model = model_of(build(data, '--head', 'csra', '--head-kwargs', 'heads=2', 'lam=0.7'))
    assert model.get_classifier().lam == 0.7 and len(model.get_classifier().classifiers) == 2
    words = tmp_path / 'words.txt'
    words.write_text('red 1 2\ngreen 3 4\nblue 5 6\n')
    model = model_of(build(data, '--head', 'ml-gcn', '--class-vectors', words))
    assert model.get_classifier().class_vectors.tolist() == [[1, 2], [3, 4], [5, 6]]


# EMA

@shows('model_ema', 'model_ema_decay', 'model_ema_warmup')
def test_an_ema_is_kept(data):
    def averaged(*flags):
        run = build(data, '--model-ema', *flags)
        before = first_weight(model_of(run)).detach().clone()
        with torch.no_grad():
            first_weight(model_of(run)).add_(1)
        run.task.update_ema(step=10)
        return (first_weight(run.task.get_eval_model(ema=True)) - before).mean().item()

    assert not build(data).task.has_ema()
    assert averaged('--model-ema-decay', '0.9') == pytest.approx(0.1, abs=1e-5)
    assert averaged('--model-ema-decay', '0.5') == pytest.approx(0.5, abs=1e-5)
    assert averaged('--model-ema-decay', '0.9', '--model-ema-warmup') > 0.2


@shows('model_ema_force_cpu', 'model_ema')
def test_an_ema_on_the_cpu_is_not_evaluated(data, tmp_path):
    folder = train(data, tmp_path, *ONE_BATCH, '--model-ema')
    assert 'eval_ema_mAP' in summary(folder)[0]
    folder = train(data, tmp_path, *ONE_BATCH, '--model-ema', '--model-ema-force-cpu', name='cpu')
    assert 'eval_ema_mAP' not in summary(folder)[0]
    assert build(data, '--model-ema', '--model-ema-force-cpu').task.trainable_module_ema.device == 'cpu'
    assert build(data, '--model-ema').task.trainable_module_ema.device is None
