""" Exported models run without the package, and both commands write the same """
import importlib.util
import json
import logging

import pytest
import torch

import timm_splicemix as tsm
from tests.evaluations import CLASSES, quiet, write_checkpoint  # noqa: F401 - quiet is used by pytest
from tests.helpers import raises_error
from timm_splicemix.export import main
from timm_splicemix.run import export
from timm_splicemix.run.export import export_model
from timm_splicemix.run.load import load_model
from timm_splicemix.run.read import read_checkpoint
from timm_splicemix.validate import main as validate

HAS_ONNX = all(importlib.util.find_spec(name) for name in ('onnx', 'onnxruntime', 'onnxscript'))
IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp('run'), ema=True)


def run(checkpoint, *flags):
    main([str(part) for part in (checkpoint, '--format', *flags)])


def refusal(capsys, *flags):
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        run(*flags)
    assert caught.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


def expected(checkpoint, use_ema=None):
    model, _ = tsm.load_checkpoint(checkpoint, use_ema)
    with torch.inference_mode():
        return model(IMAGES)


def test_torchscript_runs_without_the_package(checkpoint, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    run(checkpoint.parent, 'torchscript', '--output', tmp_path)
    extra = {'config.json': ''}
    model = torch.jit.load(str(tmp_path / 'test_resnet.pt'), _extra_files=extra)
    torch.testing.assert_close(model(IMAGES), expected(checkpoint), rtol=1e-3, atol=1e-3)
    described = json.loads((tmp_path / 'test_resnet.pt.json').read_text())
    assert described == json.loads(extra['config.json']) and described['weights'] == 'ema'
    assert described['class_names'] == list(CLASSES) and described['data_config']['mean'] == [0.5, 0.5, 0.5]
    assert sorted(path.name for path in tmp_path.iterdir()) == ['test_resnet.pt', 'test_resnet.pt.json']
    assert '(ema weights; logits differ by at most' in caplog.text and 'has deprecated TorchScript' in caplog.text


def test_pt2_runs_without_the_package_and_with_any_number_of_images(checkpoint, tmp_path):
    run(checkpoint.parent, 'pt2', '--output', tmp_path)
    extra = {'config.json': ''}
    model = torch.export.load(tmp_path / 'test_resnet.pt2', extra_files=extra).module()
    for number in (1, 4):
        torch.testing.assert_close(
            model(IMAGES[:number]), expected(checkpoint)[:number], rtol=1e-3, atol=1e-3)
    described = json.loads((tmp_path / 'test_resnet.pt2.json').read_text())
    assert described == json.loads(extra['config.json']) and described['weights'] == 'ema'


def test_validate_export_writes_the_same(checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(checkpoint, 'safetensors')
    validate(['--checkpoint', str(checkpoint), '--export', 'safetensors'])
    name = f'{checkpoint.parent.name}-model_best-safetensors'
    folders = (tmp_path / 'output' / command / name for command in ('export', 'validate'))
    one, other = (folder / 'test_resnet.safetensors' for folder in folders)
    assert one.with_suffix('.safetensors.json').read_bytes() == other.with_suffix('.safetensors.json').read_bytes()
    one, other = read_checkpoint(one), read_checkpoint(other)
    assert one['timm_splicemix'] == other['timm_splicemix']
    assert all(torch.equal(value, other['state_dict'][key]) for key, value in one['state_dict'].items())


@pytest.mark.parametrize('name, options, flags', [
    ('test_resnet', {}, []), ('test_vit', {'img_size': 32}, ['--img-size', '64'])])
def test_safetensors_are_a_checkpoint_that_describes_its_model(tmp_path, name, options, flags):
    checkpoint = write_checkpoint(tmp_path / 'run', name, **options)
    run(checkpoint, 'safetensors', '--output', tmp_path / 'out', *flags)
    model, info = load_model(tmp_path / 'out' / f'{name}.safetensors')
    assert info.class_names == CLASSES and info.model_name == name
    size = 64 if flags else 32
    assert tuple(info.data_config['input_size']) == (3, size, size)
    original, _ = load_model(checkpoint, img_size=size)
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        assert torch.equal(model(images), original(images))
    state = read_checkpoint(tmp_path / 'out' / f'{name}.safetensors')
    assert set(state['state_dict']) == set(original.state_dict())


def test_safetensors_record_which_weights_they_contain(checkpoint, tmp_path):
    for use_ema, kind in ((None, 'ema'), (False, 'plain')):
        model, info = load_model(checkpoint, use_ema=use_ema)
        export_model(model, info, tmp_path / kind, 'safetensors')
        loaded, info = tsm.load_checkpoint(tmp_path / f'{kind}.safetensors')
        assert info.weights == kind
        with torch.inference_mode():
            assert torch.equal(loaded(IMAGES), expected(checkpoint, use_ema))
        with raises_error('EMA weights'):
            tsm.load_checkpoint(tmp_path / f'{kind}.safetensors', use_ema=kind != 'ema')


def test_class_names_can_be_given(checkpoint, tmp_path):
    (tmp_path / 'classes.txt').write_text('owl\ncow\npig\n')
    run(checkpoint, 'safetensors', '--class-map', tmp_path / 'classes.txt', '--output', tmp_path)
    assert load_model(tmp_path / 'test_resnet.safetensors')[1].class_names == ('owl', 'cow', 'pig')


@pytest.mark.skipif(not HAS_ONNX, reason="needs pip install 'timm-splicemix[export]'")
def test_onnx_runs_with_any_number_of_images(checkpoint, tmp_path, capsys, caplog):
    import onnxruntime
    caplog.set_level(logging.INFO)
    run(checkpoint, 'onnx', '--output', tmp_path)
    lines = [line for line in caplog.messages if not line.startswith('Loading the EMA weights')]
    assert len(lines) == 1 and lines[0].startswith('Exported ')  # none of the many steps of torch
    assert capsys.readouterr().out == ''
    session = onnxruntime.InferenceSession(str(tmp_path / 'test_resnet.onnx'), providers=['CPUExecutionProvider'])
    for number in (1, 4):
        logits, = session.run(['logits'], {'images': IMAGES[:number].numpy()})
        torch.testing.assert_close(torch.from_numpy(logits), expected(checkpoint)[:number], rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(HAS_ONNX, reason='it is installed')
def test_a_missing_onnx_names_what_to_install(checkpoint, tmp_path, capsys):
    assert "pip install 'timm-splicemix[export]'" in refusal(capsys, checkpoint, 'onnx', '--output', tmp_path / 'out')
    assert not list((tmp_path / 'out').glob('*'))


def test_an_export_that_differs_is_not_written(checkpoint, tmp_path, monkeypatch):
    model, info = load_model(checkpoint)
    for change, difference in ((lambda logits: logits + 0.1, '0.1'), (lambda logits: logits * torch.nan, 'nan')):
        monkeypatch.setitem(
            export._EXPORTERS, 'onnx', lambda model, *_, change=change: lambda images: change(model(images)))
        with raises_error(f'differ from those of the model by {difference}'):
            export_model(model, info, tmp_path / 'model', 'onnx')
    assert not list(tmp_path.iterdir())


def test_a_model_of_another_precision_is_exported_in_float32(checkpoint, tmp_path):
    model, info = load_model(checkpoint)
    model.bfloat16()
    export_model(model, info, tmp_path / 'model', 'safetensors')
    assert read_checkpoint(tmp_path / 'model.safetensors')['state_dict']['fc.weight'].dtype == torch.float32
    assert next(model.parameters()).dtype == torch.bfloat16


def test_bad_files_and_flags_are_one_line(checkpoint, tmp_path, capsys):
    (tmp_path / 'bad.safetensors').write_bytes(b'nothing')
    for flags, message in (
            ([tmp_path / 'bad.safetensors', 'torchscript'], 'a safetensors file'),
            ([tmp_path / 'no.safetensors', 'torchscript'], 'not a file'),
            ([checkpoint, 'safetensors', '--reparam'], '--reparam'),
            ([checkpoint, 'onnx', '--checkpoint', 'other.pth'], 'Expected one checkpoint'),
            ([checkpoint, 'nonsense'], 'nonsense'),
            (['', 'onnx'], 'Expected a checkpoint, or --model')):
        assert message in refusal(capsys, *flags)
    with pytest.raises(SystemExit):
        validate(['--checkpoint', str(checkpoint), '--export', 'safetensors', '--test-pool'])
    assert '--test-pool' in capsys.readouterr().err
