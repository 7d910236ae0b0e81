""" Exported models, run as others would """
import importlib.util
import json

import pytest
import torch

import timm_splicemix as tsm
from tests.helpers import raises_error
from tests.test_validate import CLASSES, quiet, refusal, write_checkpoint  # noqa: F401 - quiet is used by pytest
from timm_splicemix.run import export
from timm_splicemix.run.export import export_model, read_safetensors
from timm_splicemix.run.load import load_model
from timm_splicemix.validate import main

HAS_ONNX = all(importlib.util.find_spec(name) for name in ('onnx', 'onnxruntime', 'onnxscript'))
IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp('run'))


def expected(checkpoint):
    model, _ = tsm.load_checkpoint(checkpoint)
    with torch.inference_mode():
        return model(IMAGES)


def test_torchscript_runs_without_the_package(checkpoint, tmp_path):
    main(['--checkpoint', str(checkpoint), '--export', 'torchscript', '--output', str(tmp_path)])
    extra = {'config.json': ''}
    model = torch.jit.load(str(tmp_path / 'test_resnet.pt'), _extra_files=extra)
    torch.testing.assert_close(model(IMAGES), expected(checkpoint), rtol=1e-3, atol=1e-3)
    described = json.loads((tmp_path / 'test_resnet.pt.json').read_text())
    assert described == json.loads(extra['config.json'])
    assert described['class_names'] == list(CLASSES) and described['data_config']['mean'] == [0.5, 0.5, 0.5]
    assert sorted(path.name for path in tmp_path.iterdir()) == ['test_resnet.pt', 'test_resnet.pt.json']


@pytest.mark.parametrize('name, options, flags', [
    ('test_resnet', {}, []), ('test_vit', {'img_size': 32}, ['--img-size', '64'])])
def test_safetensors_are_a_checkpoint_that_knows_its_model(tmp_path, name, options, flags):
    checkpoint = write_checkpoint(tmp_path / 'run', name, **options)
    main(['--checkpoint', str(checkpoint), '--export', 'safetensors', '--output', str(tmp_path / 'out'), *flags])
    model, info = load_model(tmp_path / 'out' / f'{name}.safetensors')
    assert info.class_names == CLASSES and info.model_name == name
    size = 64 if flags else 32
    assert tuple(info.data_config['input_size']) == (3, size, size)
    original, _ = load_model(checkpoint, image_size=(size, size))
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        assert torch.equal(model(images), original(images))
    assert set(read_safetensors(tmp_path / 'out' / f'{name}.safetensors')[0]) == set(original.state_dict())


@pytest.mark.skipif(not HAS_ONNX, reason="needs pip install 'timm-splicemix[export]'")
def test_onnx_runs_with_any_number_of_images(checkpoint, tmp_path):
    import onnxruntime
    main(['--checkpoint', str(checkpoint), '--export', 'onnx', '--output', str(tmp_path)])
    session = onnxruntime.InferenceSession(str(tmp_path / 'test_resnet.onnx'), providers=['CPUExecutionProvider'])
    for number in (1, 4):
        logits, = session.run(['logits'], {'images': IMAGES[:number].numpy()})
        torch.testing.assert_close(torch.from_numpy(logits), expected(checkpoint)[:number], rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(HAS_ONNX, reason='it is installed')
def test_a_missing_onnx_is_said_with_what_to_install(checkpoint, tmp_path, capsys):
    line = refusal(capsys, ['--checkpoint', checkpoint, '--export', 'onnx', '--output', tmp_path / 'out'])
    assert "pip install 'timm-splicemix[export]'" in line
    assert not list((tmp_path / 'out').glob('*'))


def test_an_export_that_differs_is_not_written(checkpoint, tmp_path, monkeypatch):
    model, info = load_model(checkpoint)
    monkeypatch.setitem(export._EXPORTERS, 'onnx', lambda model, *_: lambda images: model(images) + 0.1)
    with raises_error('a difference of 0.1'):
        export_model(model, info, tmp_path / 'model', 'onnx')
    monkeypatch.setitem(export._EXPORTERS, 'onnx', lambda model, *_: lambda images: model(images) * torch.nan)
    with raises_error('a difference of nan'):
        export_model(model, info, tmp_path / 'model', 'onnx')
    assert not list(tmp_path.iterdir())


def test_a_model_of_another_precision_is_exported_in_float32(checkpoint, tmp_path):
    model, info = load_model(checkpoint)
    model.bfloat16()
    export_model(model, info, tmp_path / 'model', 'safetensors')
    assert read_safetensors(tmp_path / 'model.safetensors')[0]['fc.weight'].dtype == torch.float32
    assert next(model.parameters()).dtype == torch.bfloat16


def test_bad_files_and_flags_are_one_line(checkpoint, tmp_path, capsys):
    (tmp_path / 'bad.safetensors').write_bytes(b'nothing')
    assert 'a safetensors file' in refusal(
        capsys, ['--checkpoint', tmp_path / 'bad.safetensors', '--export', 'torchscript'])
    assert 'no file' in refusal(capsys, ['--checkpoint', tmp_path / 'no.safetensors', '--export', 'torchscript'])
    assert '--reparam' in refusal(capsys, ['--checkpoint', checkpoint, '--export', 'safetensors', '--reparam'])
