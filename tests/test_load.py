""" Checkpoints are read without running code, and rebuild their model """
import argparse
import json
import logging
import os
import pickle

import pytest
import timm
import torch
from safetensors.torch import save_file

import timm_splicemix as tsm
from tests.evaluations import CLASSES, write_checkpoint
from tests.helpers import raises_error
from timm_splicemix.run.load import load_model
from timm_splicemix.run.read import read_checkpoint, read_tensors

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    """Folders of runs with and without EMA weights."""
    folder = tmp_path_factory.mktemp('runs')
    write_checkpoint(folder / 'ema', ema=True)
    write_checkpoint(folder / 'plain')
    return folder


@torch.inference_mode()
def logits(model, images=IMAGES):
    return model(images)



@pytest.mark.parametrize('use_ema, key, weights', [
    (None, 'state_dict_ema', 'ema'), (True, 'state_dict_ema', 'ema'), (False, 'state_dict', 'plain')])
def test_ema_weights_are_loaded_unless_the_plain_ones_are_asked_for(runs, use_ema, key, weights, caplog):
    caplog.set_level(logging.INFO)
    state = read_checkpoint(runs / 'ema' / 'model_best.pth.tar')
    for load in (tsm.load_checkpoint, load_model):
        model, info = load(runs / 'ema' / 'model_best.pth.tar', use_ema=use_ema)
        assert all(torch.equal(value, state[key][name]) for name, value in model.state_dict().items())
        assert info.weights == weights and not model.training
    assert f'Loading the {weights.replace("ema", "EMA")} weights of' in caplog.text
    assert not torch.equal(state['state_dict']['fc.weight'], state['state_dict_ema']['fc.weight'])


def test_plain_weights_are_loaded_if_the_ema_was_not_evaluated(runs, tmp_path):
    state = read_checkpoint(runs / 'ema' / 'last.pth.tar')
    torch.save({**state, 'args': {'model_ema_force_cpu': True}}, tmp_path / 'cpu.pth.tar')
    assert tsm.load_checkpoint(tmp_path / 'cpu.pth.tar')[1].weights == 'plain'
    assert tsm.load_checkpoint(tmp_path / 'cpu.pth.tar', use_ema=True)[1].weights == 'ema'


def test_missing_ema_weights_are_an_error_if_asked_for(runs):
    assert tsm.load_checkpoint(runs / 'plain')[1].weights == 'plain'
    with raises_error('Expected EMA weights for --use-ema, but got none in'):
        tsm.load_checkpoint(runs / 'plain', use_ema=True)


def test_a_folder_gives_its_best_checkpoint_else_the_last_or_a_recovery(runs, tmp_path):
    checkpoint = runs / 'plain' / 'last.pth.tar'
    state = read_checkpoint(checkpoint)
    for epoch, name in enumerate(('recovery-1-2.pth.tar', 'last.pth.tar', 'model_best.pth.tar')):
        torch.save({**state, 'epoch': epoch}, tmp_path / name)
        assert tsm.load_checkpoint(tmp_path)[1].epoch == epoch
    (tmp_path / 'empty').mkdir()
    with raises_error('which has no model_best.pth.tar or last.pth.tar'):
        tsm.load_checkpoint(tmp_path / 'empty')


def test_a_checkpoint_of_ours_records_its_model(runs):
    model, info = tsm.load_checkpoint(runs / 'plain')
    assert (info.model_name, info.class_names, info.epoch, info.metric) == ('test_resnet', CLASSES, 3, 50.)
    assert info.data_config['input_size'] == (3, 32, 32) and tsm.models.is_max_pooled(model)


def test_arguments_replace_those_of_the_checkpoint(runs, tmp_path):
    model, _ = tsm.load_checkpoint(runs / 'plain', global_pool='avg')
    assert not tsm.models.is_max_pooled(model)
    write_checkpoint(tmp_path, 'test_vit', img_size=32)
    model, info = tsm.load_checkpoint(tmp_path, img_size=64)
    assert info.data_config['input_size'] == (3, 64, 64) and info.model_kwargs['img_size'] == (64, 64)
    assert logits(model, torch.zeros(1, 3, 64, 64)).shape == (1, 3)
    with raises_error('Expected --num-classes 3, as in'):
        tsm.load_checkpoint(tmp_path, num_classes=7)


def test_a_checkpoint_of_timm_is_rebuilt_from_its_settings(tmp_path):
    torch.manual_seed(0)
    options = {'num_classes': 5, 'in_chans': 1, 'global_pool': 'max'}
    model, ema = (timm.create_model('test_resnet', **options).eval() for _ in range(2))
    args = argparse.Namespace(
        model='test_resnet', num_classes=None, gp='max', in_chans=1, img_size=64, input_size=None, mean=[0.3], std=None,
        crop_pct=0.7, interpolation='', model_kwargs={})
    state = {'arch': 'test_resnet', 'args': args, 'state_dict': model.state_dict(), 'epoch': 7, 'metric': 12.}
    images = torch.randn(2, 1, 64, 64)
    torch.save(state, tmp_path / 'timm.pth.tar')
    loaded, info = tsm.load_checkpoint(tmp_path / 'timm.pth.tar')
    assert torch.equal(logits(loaded, images), logits(model, images))
    assert (info.epoch, info.metric, info.class_names, info.weights) == (7, 12., None, 'plain')
    config = info.data_config
    assert (config['input_size'], config['mean'], config['crop_pct']) == ((1, 64, 64), (0.3,), 0.7)
    del state['arch']
    torch.save({**state, 'state_dict_ema': ema.state_dict()}, tmp_path / 'ema.pth.tar')
    loaded, info = tsm.load_checkpoint(tmp_path / 'ema.pth.tar')
    assert info.weights == 'ema' and torch.equal(logits(loaded, images), logits(ema, images))
    _, info = load_model(tmp_path / 'ema.pth.tar', img_size=32)
    assert info.data_config['input_size'] == (1, 32, 32)


def test_a_transformer_of_timm_keeps_its_size(tmp_path):
    model = timm.create_model('test_vit', num_classes=3, img_size=64).eval()
    args = argparse.Namespace(img_size=64)
    torch.save({'arch': 'test_vit', 'args': args, 'state_dict': model.state_dict()}, tmp_path / 'vit.pth')
    loaded, info = tsm.load_checkpoint(tmp_path / 'vit.pth')
    images = torch.randn(1, 3, 64, 64)
    assert info.data_config['input_size'] == (3, 64, 64) and torch.equal(logits(loaded, images), logits(model, images))
    loaded, info = tsm.load_checkpoint(tmp_path / 'vit.pth', img_size=96)
    assert logits(loaded, torch.zeros(1, 3, 96, 96)).shape == (1, 3)


def test_weights_alone_need_a_name(tmp_path):
    model = timm.create_model('test_resnet', num_classes=4).eval()
    for content in (model.state_dict(), {'model': model.state_dict(), 'epoch': 3}):
        torch.save(content, tmp_path / 'bare.pth')
        assert set(read_checkpoint(tmp_path / 'bare.pth')) == {'state_dict'}
        with raises_error('Expected --model, as .* does not contain the name of its model'):
            tsm.load_checkpoint(tmp_path / 'bare.pth')
        loaded, _ = load_model(tmp_path / 'bare.pth', model_name='test_resnet')
        assert torch.equal(logits(loaded), logits(model))
    assert len(read_tensors(tmp_path / 'bare.pth')) == len(model.state_dict())
    assert read_tensors('weights.npz') is None


class Code:
    def __reduce__(self):
        return os.mkdir, ('made-by-a-checkpoint',)


@pytest.mark.filterwarnings('ignore:Detected pickle protocol')
def test_a_checkpoint_with_code_is_refused_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({'state_dict': {}, 'args': Code()}, 'evil.pth')
    torch.save({'state_dict': {}, 'args': Code()}, 'old.pth', _use_new_zipfile_serialization=False)
    torch.save({'state_dict': {}, 'args': Code()}, 'new.pth', pickle_protocol=4)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with open(f'{protocol}.pkl', 'wb') as file:
            pickle.dump({'state_dict': {}, 'args': Code()}, file, protocol)
    for name in ('evil.pth', 'old.pth', 'new.pth', *(f'{protocol}.pkl' for protocol in range(protocol + 1))):
        with raises_error(rf'{name} contains code \(posix\.mkdir\), which is not run\. Save the weights alone'):
            read_checkpoint(name)
    torch.save(torch.nn.Linear(2, 2), 'module.pth')
    with raises_error(r'contains code \(torch\.nn\.modules\.linear\.Linear\)'):
        read_checkpoint('module.pth')
    assert not os.path.exists('made-by-a-checkpoint')


@pytest.mark.filterwarnings('ignore')
def test_files_that_are_no_checkpoints_are_refused(runs, tmp_path):
    whole = (runs / 'plain' / 'last.pth.tar').read_bytes()
    for content in (b'', b'image,label\n', b'\x80\x02}b.', whole[:len(whole) // 2]):
        (tmp_path / 'bad.pth').write_bytes(content)
        with raises_error('bad.pth is not a checkpoint, or it is truncated or damaged'):
            read_checkpoint(tmp_path / 'bad.pth')
    (tmp_path / 'bad.safetensors').write_bytes(b'nothing')
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2)), tmp_path / 'script.pt')
    torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.zeros(1, 2),)), tmp_path / 'exported.pt2')
    torch.save([1, 2], tmp_path / 'list.pth')
    torch.save({'model': 3}, tmp_path / 'number.pth')
    for name, message in (
            ('bad.safetensors', 'a safetensors file'), ('script.pt', 'script.pt is an exported program'),
            ('exported.pt2', r'exported.pt2 is an exported program, .* Give the checkpoint, or export it to onnx'),
            ('list.pth', 'contains a list'), ('number.pth', 'no weights of a model'), ('none.pth', 'is not a file')):
        with raises_error(message):
            read_checkpoint(tmp_path / name)


@pytest.mark.parametrize('description', [
    '[' * 100000, 'nothing', '3', '{}', '{"model_name": "resnet18", "class_names": 3}',
    '{"model_name": "resnet18", "class_names": [3]}', '{"model_name": "resnet18", "model_kwargs": []}'])
def test_a_damaged_description_in_safetensors_is_refused(tmp_path, description):
    save_file({'fc.bias': torch.zeros(2)}, tmp_path / 'x.safetensors', {'timm_splicemix': description})
    with raises_error('Expected a safetensors file, but got .*x.safetensors'):
        read_checkpoint(tmp_path / 'x.safetensors')


def test_weights_of_another_model_are_named(runs, tmp_path):
    state = read_checkpoint(runs / 'plain' / 'last.pth.tar')
    weights = state['state_dict']
    for change, message in (
            ({'extra': torch.zeros(2)}, 'Unexpected key extra in checkpoint'),
            ({'fc.bias': torch.zeros(9)}, r'Expected fc.bias of shape \(3,\), but got \(9,\)')):
        torch.save({**state, 'state_dict': {**weights, **change}}, tmp_path / 'other.pth.tar')
        with raises_error(message):
            tsm.load_checkpoint(tmp_path / 'other.pth.tar')
    torch.save({**state, 'state_dict': {'fc.bias': weights['fc.bias']}}, tmp_path / 'other.pth.tar')
    with raises_error('Missing key'):
        tsm.load_checkpoint(tmp_path / 'other.pth.tar')


def test_arguments_of_the_loader_are_checked(runs):
    for options, message in (
            ({}, '--model for timm'), ({'use_ema': True}, 'a checkpoint with --use-ema'),
            ({'path': runs / 'plain', 'nonsense': 1}, "Cannot create model 'test_resnet'")):
        with raises_error(message):
            load_model(**options)
    with raises_error('Expected --mean with 1 or 3 values'):
        load_model(runs / 'plain', data_config={'mean': [0.1, 0.2]})
    _, info = load_model(runs / 'plain', data_config={'mean': [0.4], 'crop_pct': 0.5})
    assert info.data_config['mean'] == (0.4, 0.4, 0.4) and info.data_config['crop_pct'] == 0.5
    assert json.dumps(info.state())
