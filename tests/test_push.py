""" Models are published with all that their users need; nothing is uploaded here """
import json
import types
from pathlib import Path

import pytest
import timm
import torch
import yaml
from PIL import Image

import timm_splicemix as tsm
from timm_splicemix.metrics import Thresholds, save_thresholds
from timm_splicemix.predict import main as predict
from timm_splicemix.push import main
from timm_splicemix.run import hub, read
from timm_splicemix.validate import main as validate

from .evaluations import (  # noqa: F401
    CLASSES,
    arguments,
    plots,
    quiet,
    write_checkpoint,
    write_data,
)
from .helpers import raises_error
from .runs import train

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def logits(model, images=IMAGES):
    return model.eval()(images)


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    """A run with EMA weights, thresholds and an evaluation, and images."""
    folder = tmp_path_factory.mktemp('push')
    write_checkpoint(folder / 'run', ema=True)
    save_thresholds(
        Thresholds((0.9, 0.2, 0.), CLASSES[::-1], 'csv', 'test', 11, weights='ema', epoch=3),
        folder / 'run' / 'thresholds.json')
    write_data(folder / 'data')
    validate([*arguments(folder), '--output', str(folder / 'run' / 'val')])
    return folder


def push(run, output, *flags):
    main([str(part) for part in (run, 'someone/birds', '--dry-run', '--output', output, *flags)])
    return output


def test_a_dry_run_writes_all_files_and_uploads_nothing(place, tmp_path, monkeypatch, capsys, plots):  # noqa: F811
    monkeypatch.setattr(hub, 'HfApi', None)
    push(place / 'run', tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        'README.md', 'config.json', 'model.safetensors', 'per_class_ap.png', 'thresholds.json']
    assert 'nothing was uploaded' in capsys.readouterr().out
    config = json.loads((tmp_path / 'config.json').read_text())
    assert config['architecture'] == 'test_resnet' and config['label_names'] == list(CLASSES)
    assert config['pretrained_cfg']['mean'] == [0.5, 0.5, 0.5]
    assert config['model_args']['global_pool'] == 'max' and 'fc_norm' not in config['model_args']
    with Image.open(tmp_path / 'per_class_ap.png') as picture:
        assert picture.width > 300


def test_plain_timm_loads_the_model_and_its_transform(place, tmp_path):
    push(place / 'run', tmp_path)
    model = timm.create_model(f'local-dir:{tmp_path}', pretrained=True)
    own, _ = tsm.load_checkpoint(place / 'run')
    assert torch.equal(logits(model), logits(own)) and model.num_classes == 3
    config = timm.data.resolve_model_data_config(model)
    assert (config['input_size'], tuple(config['mean']), config['crop_pct']) == ((3, 32, 32), (0.5, 0.5, 0.5), 1.)


@pytest.mark.parametrize('name, kwargs', [
    ('test_vit', {'img_size': 32}), ('test_resnet', {'in_chans': 4}), ('test_efficientnet', {'global_pool': None}),
    ('test_convnext', {}), ('test_vit', {'img_size': 32, 'embed_dim': 32})])
def test_plain_timm_loads_other_families(tmp_path, name, kwargs):
    run = write_checkpoint(tmp_path / 'run', name, **kwargs).parent
    if kwargs.get('in_chans'):
        state = torch.load(run / 'model_best.pth.tar', weights_only=True)
        state['timm_splicemix']['info']['data_config'].update(input_size=(4, 32, 32), mean=(0.5,) * 4, std=(0.5,) * 4)
        torch.save(state, run / 'model_best.pth.tar')
    folder = push(run, tmp_path / 'out')
    images = torch.randn(2, kwargs.get('in_chans', 3), 32, 32)
    model = timm.create_model(f'local-dir:{folder}', pretrained=True)
    own, _ = tsm.load_checkpoint(folder)
    torch.testing.assert_close(logits(model, images), logits(own, images))
    assert 'Plain timm loads it as well' in (folder / 'README.md').read_text()


@pytest.mark.parametrize('name, kwargs, size, reason', [
    ('shufflenetv2_x0_5', {}, 32, 'timm has no shufflenetv2'),
    ('xcit_nano_12_p16_224', {'img_size': 32}, 32, 'timm does not build xcit'),
    ('test_resnet', {'global_pool': None, 'head': 'csra'}, 32, "timm has no head 'csra'")])
def test_what_plain_timm_cannot_build_is_said_and_loaded_here(tmp_path, name, kwargs, size, reason):
    run = write_checkpoint(tmp_path / 'run', name, size=size, **kwargs).parent
    folder = push(run, tmp_path / 'out')
    card = (folder / 'README.md').read_text().replace('\\', '')
    assert f'Plain timm does not load this model: {reason}' in card and 'import timm\n' not in card
    if not name.startswith('shufflenet'):  # which this package has registered here
        with pytest.raises((RuntimeError, TypeError, AssertionError)):  # rather than wrong predictions
            timm.create_model(f'local-dir:{folder}', pretrained=True)
    loaded, info = tsm.load_checkpoint(f'local-dir:{folder}')
    own, _ = tsm.load_checkpoint(run)
    images = torch.randn(2, 3, size, size)
    assert torch.equal(logits(loaded, images), logits(own, images)) and info.class_names == CLASSES


def test_the_card_has_data_flags_metrics_classes_and_thresholds(data, tmp_path, plots):  # noqa: F811
    run = train(
        data, tmp_path, '--epochs', 1, '--gp', 'max', '--model-kwargs', 'norm_layer=batchnorm2d', '--log-interval', 50,
        '--splicemix-grids', '1x2')
    output = push(run, tmp_path / 'bare')
    card = (output / 'README.md').read_text().replace('\\', '')
    assert 'Validation during training, epoch 0, plain weights:' in card and '| mAP | ' in card
    flags = ['--dataset', 'csv', '--data-dir', str(data), '--checkpoint', str(run), '-j', '0']
    validate([*flags, '--output', str(run / 'val')])
    output = push(run, tmp_path / 'out', '--license', 'cc-by-4.0')
    card = (output / 'README.md').read_text()
    front = yaml.safe_load(card.split('---')[1])
    assert front['license'] == 'cc-by-4.0' and front['library_name'] == 'timm'
    card = card.replace('\\', '')
    mean = json.loads((run / 'val' / 'results.json').read_text())['metrics']['mAP']
    for text in (
            '- Trained on csv, split train.', 'Evaluated on csv, split validation: 9 images.', f'| mAP | {mean:.2f} |',
            '--splicemix-grids 1x2', '--gp max', '--model-kwargs norm_layer=batchnorm2d', '--model test_resnet',
            '![Average precision of each class](per_class_ap.png)', '| class | AP |', '| red | ',
            "tsm.Predictor('hf-hub:someone/birds')"):
        assert text in card, text
    assert str(tmp_path) not in card and str(data) not in card and '--log-interval' not in card


def test_the_card_of_a_run_with_thresholds_shows_them(place, tmp_path):
    push(place / 'run', tmp_path)
    card = (tmp_path / 'README.md').read_text()
    assert '| class | threshold | AP |' in card and '| dog | 0.900 | ' in card and 'csv test, 11 images' in card
    assert json.loads((tmp_path / 'thresholds.json').read_text())['weights'] == 'ema'


def test_a_head_is_published_with_the_inputs_that_it_needs(data, tmp_path):
    run = train(data, tmp_path, '--head', 'ml-gcn', '--epochs', 1)
    folder = push(run, tmp_path / 'out')
    own, published = tsm.Predictor(run), tsm.Predictor(f'local-dir:{folder}')
    assert published.predict(data / '0.png')[0].probabilities == own.predict(data / '0.png')[0].probabilities
    card = (folder / 'README.md').read_text()
    assert '| head | ml-gcn |' in card and '--head ml-gcn' in card and "timm has no head 'ml-gcn'" in card


def test_names_of_classes_cannot_break_the_card(tmp_path):
    write_checkpoint(tmp_path / 'run', class_names=('a|b', '<script>', '![x](y)'))
    push(tmp_path / 'run', tmp_path / 'out')
    card = (tmp_path / 'out' / 'README.md').read_text()
    assert r'a\|b, &lt;script>, !\[x\](y)' in card


def test_published_models_are_loaded_by_their_name(place, tmp_path, monkeypatch):
    push(place / 'run', tmp_path / 'out')
    asked = []

    def download(repository, name, revision=None):
        asked.append((repository, name, revision))
        return str(tmp_path / 'out' / name)

    monkeypatch.setattr(read, 'hf_hub_download', download)
    own = tsm.Predictor(place / 'run')
    file = place / 'data' / 'val_00.png'
    for name in ('hf-hub:someone/birds@main', f'local-dir:{tmp_path / "out"}', tmp_path / 'out'):
        predictor = tsm.Predictor(name)
        assert predictor.thresholds == own.thresholds and predictor.info.weights == 'ema'
        assert predictor.predict(file)[0].probabilities == own.predict(file)[0].probabilities
    assert asked == [('someone/birds', 'model.safetensors', 'main')]
    for flag in ('--checkpoint', '--model'):
        predict([flag, 'hf-hub:someone/birds', str(file), '--output', str(tmp_path / 'out.json')])
        row, = json.loads((tmp_path / 'out.json').read_text())
        assert set(row['labels']) == set(own.predict(file)[0].labels)
    flags = arguments(place)
    flags[flags.index('--checkpoint') + 1] = 'hf-hub:someone/birds'
    validate([*flags, '--output', str(tmp_path / 'results')])
    result = json.loads((tmp_path / 'results' / 'results.json').read_text())
    assert result['metrics'] == json.loads((place / 'run' / 'val' / 'results.json').read_text())['metrics']


@pytest.mark.slow
@pytest.mark.parametrize('kwargs', [{}, {'global_pool': None, 'head': 'csra', 'head_kwargs': {'heads': 2}}])
def test_training_starts_from_a_published_model(data, tmp_path, kwargs):
    run = write_checkpoint(tmp_path / 'run', class_names=('a', 'b'), **kwargs).parent
    folder = push(run, tmp_path / 'out')
    trained = train(
        data, tmp_path, '--model', f'local-dir:{folder}', '--pretrained', '--lr', 0, '--epochs', 1, '--img-size', 64,
        name='trained')
    model, info = tsm.load_checkpoint(trained)
    own, _ = tsm.load_checkpoint(run)
    key = 'layer1.0.conv1.weight'
    assert torch.equal(model.state_dict()[key], own.state_dict()[key]) and len(info.class_names) == 3
    assert info.model_name == 'test_resnet' and info.model_kwargs.get('head') == kwargs.get('head')
    assert kwargs or tsm.models.is_max_pooled(model)
    assert tuple(info.data_config['mean']) == (0.5, 0.5, 0.5)


def test_an_upload_creates_the_repository_and_sends_the_folder(place, tmp_path, monkeypatch, capsys):
    sent = {}

    class Api:
        def __init__(self, **_):
            pass

        def create_repo(self, repository, private, exist_ok):
            sent['private'] = private
            return types.SimpleNamespace(repo_id=repository)

        def upload_folder(self, repo_id, folder_path, commit_message):
            sent.update(repository=repo_id, files=sorted(path.name for path in Path(folder_path).iterdir()))

    monkeypatch.setattr(hub, 'HfApi', Api)
    main([str(place / 'run'), 'someone/birds', '--output', str(tmp_path), '--private'])
    assert sent['repository'] == 'someone/birds' and sent['private'] and 'README.md' in sent['files']

    def fail(*_, **__):
        raise OSError('no connection')

    monkeypatch.setattr(Api, 'upload_folder', fail)
    with pytest.raises(SystemExit) as caught:
        main([str(place / 'run'), 'someone/birds', '--output', str(tmp_path)])
    assert caught.value.code == 2 and 'no connection Log in by' in capsys.readouterr().err


def test_bad_arguments_are_one_sentence(place, tmp_path):
    with raises_error("Expected USER/NAME .* but got 'birds'"):
        hub.open_publication(place / 'run', 'birds', None, None)
    (tmp_path / 'model.safetensors').write_bytes(b'nothing')
    with raises_error('Expected a safetensors file, but got .*model.safetensors'):
        tsm.load_checkpoint(f'local-dir:{tmp_path}')
    with raises_error('Expected results of epoch 3 with plain weights'):
        hub.open_publication(place / 'run', 'a/b', str(place / 'run' / 'val'), use_ema=False)
