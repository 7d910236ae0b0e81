""" Runs with multi-label heads: training, resuming, evaluation, prediction, export, several processes """
import json
import re
import shutil
import sys

import numpy as np
import pytest
import torch

from timm_splicemix.analysis.cam import PositionHead
from timm_splicemix.analysis.cam import main as cam
from timm_splicemix.args import parse_with_config
from timm_splicemix.export import main as export
from timm_splicemix.heads import head_class
from timm_splicemix.models import create_model
from timm_splicemix.predict import main as predict
from timm_splicemix.run.load import load_checkpoint
from timm_splicemix.run.model import freeze_modules
from timm_splicemix.run.optimizer import create_optimizer
from timm_splicemix.run.read import PUBLISHED
from timm_splicemix.train import build_parser, main
from timm_splicemix.validate import main as validate

from .head_cases import HEADS, PAIRS, make_model, model_of, size_of, small_options
from .helpers import raises_error
from .runs import CLASSES, assert_same_weights, flags_of, summary, train, train_command, train_until, weights

CL = ('--splicemix-grids', '2x2', '--splicemix-cl')
TORCHRUN = (sys.executable, '-m', 'torch.distributed.run', '--nproc-per-node', '2', '--standalone')


def head_flags(head, family='resnet'):
    model, options = model_of(family, head)
    consistency = CL if head_class(head).supports_cells else CL[:2]
    return [
        '--model', model, '--model-kwargs', *(f'{name}={value}' for name, value in options.items()), '--head', head,
        '--head-kwargs', *(f'{name}={value}' for name, value in small_options(head).items()), *consistency,
        '--epochs', '1', '--lr', '0.01', '--clip-grad', '1', '--img-size', str(size_of(head))]


@pytest.fixture
def vectors(tmp_path):
    """A file of class vectors."""
    path = tmp_path / 'vectors.npz'
    np.savez(path, **{name: np.random.default_rng(index).normal(size=5) for index, name in enumerate(CLASSES)})
    return path


def evaluation(checkpoint, data):
    return ['--checkpoint', str(checkpoint), '--dataset', 'csv', '--data-dir', str(data)]


def check_resumes(data, folder, flags):
    """Compare a run with one that was interrupted; returns its folder."""
    whole = train(data, folder, *flags, name='whole')
    parts = train_until(0, 2, data, folder, *flags, name='parts')
    main(['--resume', str(parts)])
    assert_same_weights(whole / 'last.pth.tar', parts / 'last.pth.tar')
    assert summary(whole) == summary(parts)
    return whole


def check_export(folder, output, *formats):
    model, info = load_checkpoint(folder)
    images = torch.randn(3, *info.data_config['input_size'], generator=torch.Generator().manual_seed(1))
    for name in formats:
        export([str(folder), '--format', name, '--output', str(output)])
    with torch.inference_mode():
        logits = model(images)
    if 'safetensors' in formats:
        again, _ = load_checkpoint(next(output.glob('*.safetensors')))
        torch.testing.assert_close(again(images), logits)
    if 'torchscript' in formats:
        loaded = torch.jit.load(str(next(output.glob('*.pt'))))
        torch.testing.assert_close(loaded(images), logits, rtol=1e-3, atol=1e-3)
    return info


@pytest.mark.parametrize('head', HEADS)
def test_a_head_trains_and_its_checkpoint_needs_nothing_else(data, tmp_path, head):
    folder = train(data, tmp_path, *head_flags(head))
    row, = summary(folder)
    losses = {name: float(value) for name, value in row.items() if name.startswith('train_')}
    assert 'train_task_loss' in losses and np.isfinite(list(losses.values())).all()
    assert ('train_consistency_loss' in losses) == head_class(head).supports_cells
    info = check_export(folder, tmp_path / 'exported', 'torchscript', 'safetensors')
    assert info.model_kwargs['head'] == head and info.model_kwargs['head_kwargs'] == small_options(head)
    described = json.loads(next((tmp_path / 'exported').glob('*.pt.json')).read_text())
    assert described['model_kwargs']['head'] == head
    predict([str(data / '0.png'), '--checkpoint', str(folder), '--output', str(tmp_path / 'out.json')])
    assert len(json.loads((tmp_path / 'out.json').read_text())) == 1


@pytest.mark.slow
@pytest.mark.parametrize('head, family', PAIRS)
def test_a_head_trains_exports_and_resumes_on_every_family(data, tmp_path, head, family):
    folder = check_resumes(data, tmp_path, head_flags(head, family))
    check_export(folder, tmp_path / 'exported', 'onnx', 'safetensors')


@pytest.mark.slow
def test_a_resumed_run_needs_no_file_of_class_vectors(data, tmp_path, vectors, capsys):
    flags = [*head_flags('ml-gcn'), '--class-vectors', vectors, '--model-ema']
    whole = train(data, tmp_path, *flags, name='whole')
    stored = weights(whole / 'last.pth.tar')['multilabel_head.class_vectors']
    with np.load(vectors) as arrays:
        np.testing.assert_allclose(stored.numpy(), np.stack([arrays[name] for name in CLASSES]), rtol=1e-6)
    parts = train_until(0, 2, data, tmp_path, *flags, name='parts')
    vectors.unlink()
    with pytest.raises(SystemExit):
        main(['--resume', str(parts), '--head-kwargs', 'hidden=16', 'threshold=0.9'])
    refused = capsys.readouterr().err
    assert re.search('Expected a checkpoint with --head-kwargs threshold=0.9, but got .* with 0.4', refused)
    main(['--resume', str(parts)])
    assert 'Class vectors: those of the checkpoint.' in capsys.readouterr().err
    for key in ('state_dict', 'state_dict_ema'):
        assert_same_weights(whole / 'last.pth.tar', parts / 'last.pth.tar', key)


@pytest.mark.slow
def test_an_initial_checkpoint_brings_the_side_inputs_of_its_head(data, tmp_path, vectors, capsys):
    flags = head_flags('ml-gcn')
    first = train(data, tmp_path, *flags, '--class-vectors', vectors, name='first')
    model, _ = load_checkpoint(first)
    again = train(data, tmp_path, *flags, '--initial-checkpoint', first, '--lr', '0', name='again')
    buffers = [weights(folder / 'last.pth.tar') for folder in (first, again)]
    for key in ('class_vectors', 'adjacency'):
        assert torch.equal(*(found[f'multilabel_head.{key}'] for found in buffers)), key
    name, kwargs = model_of('resnet', 'ml-gcn')
    other = create_model(
        name, **kwargs, num_classes=len(CLASSES), head='ml-gcn', head_kwargs=small_options('ml-gcn'),
        checkpoint_path=first / 'last.pth.tar')
    assert torch.equal(other.multilabel_head.class_vectors, model.multilabel_head.class_vectors)
    for wrong, message in (
            (('--class-vectors', vectors), 'Expected --class-vectors or --initial-checkpoint, but got both'),
            (('--head-kwargs', 'hidden=16', 'threshold=0.9'), 'with --head-kwargs threshold=0.9, but got .* with 0.4')):
        with pytest.raises(SystemExit):
            main(flags_of(data, tmp_path, *flags, '--initial-checkpoint', first, *wrong, name='wrong'))
        assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize('head', HEADS)
def test_activation_maps_need_one_feature_map(head):
    model = make_model('resnet', head).eval()
    if head == 'tdrg':
        with raises_error('Expected a head on one feature map, but got tdrg, which combines 2'):
            PositionHead.of(model, size_of(head))
        return
    features = model.forward_features(torch.randn(1, 3, size_of(head), size_of(head)))
    assert PositionHead.of(model, size_of(head))(features).shape[:2] == (1, model.num_classes)


@pytest.mark.slow
def test_validate_export_and_maps_work_from_the_checkpoint_alone(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = train(data, tmp_path, *head_flags('ml-gcn'), '--backbone-lr-scale', '0.1', '--freeze', 'conv1')
    validate([*evaluation(folder, data), '-j', '0', '--output', 'results'])
    results = json.loads((tmp_path / 'results' / 'results.json').read_text())
    row, = summary(folder)
    assert results['metrics']['mAP'] == pytest.approx(float(row['eval_mAP']), abs=1e-3)
    check_export(folder, tmp_path / 'exported', 'onnx')
    cam([str(folder), '--images', str(data / '0.png'), '--classes', CLASSES[0], '--output', 'maps'])
    assert list((tmp_path / 'maps').rglob('cam.csv'))


def test_frozen_modules_and_the_learning_rate_of_the_backbone():
    args, _ = parse_with_config(build_parser(), ['--opt', 'sgd', '--lr', '1', '--backbone-lr-scale', '0.1'])
    model = make_model('resnet', 'csra')
    freeze_modules(model, ['conv1'])
    optimizer = create_optimizer(model, args)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    scales = {names[id(part)]: group['lr_scale'] for group in optimizer.param_groups for part in group['params']}
    assert not any(name.startswith('conv1.') for name in scales)
    for name, scale in scales.items():
        assert scale == (1. if name.startswith('multilabel_head.') else 0.1), name


def test_weights_of_another_data_set_start_the_backbone(data, tmp_path):
    first = train(data, tmp_path, *head_flags('csra'), name='first')
    second = train(
        data, tmp_path, *head_flags('add-gcn'), '--pretrained-path', first / 'last.pth.tar', '--lr', '0',
        '--freeze-bn', '--weight-decay', '0', name='second')
    before, after = weights(first / 'last.pth.tar'), weights(second / 'last.pth.tar')
    assert torch.equal(before['conv1.0.weight'], after['conv1.0.weight'])


@pytest.mark.slow
def test_a_published_model_brings_its_head_unless_flags_set_another(data, tmp_path):
    first = train(data, tmp_path, *head_flags('csra'), name='first')
    export([str(first), '--format', 'safetensors', '--output', str(tmp_path / 'exported')])
    published = tmp_path / 'published'
    published.mkdir()
    shutil.copy(next((tmp_path / 'exported').glob('*.safetensors')), published / PUBLISHED)
    model = ('--model', f'local-dir:{published}', '--pretrained', '--epochs', '1', '--lr', '0', '--freeze-bn')
    again = train(data, tmp_path, *model, name='again')
    assert load_checkpoint(again)[0].head_name == 'csra'
    assert load_checkpoint(train(data, tmp_path, *model, '--head', 'add-gcn', name='other'))[0].head_name == 'add-gcn'
    own = train(data, tmp_path, *model, '--gp', '', name='own')  # as without --gp
    assert load_checkpoint(own)[0].head_name == 'csra'
    pooled, _ = load_checkpoint(train(data, tmp_path, *model, '--gp', 'max', name='pooled'))
    assert not hasattr(pooled, 'head_name')
    before, after = weights(first / 'last.pth.tar'), pooled.state_dict()
    assert torch.equal(before['conv1.0.weight'], after['conv1.0.weight'])


@pytest.mark.parametrize('flags, words', [
    (['--head', 'gap'], '--head: .*csra'),
    (['--head', 'csra', '--head-kwargs', 'foo=1'], "Unknown option 'foo' of head 'csra': its options are heads, lam"),
    (['--head', 'csra', '--head-kwargs', 'heads=3'], "'heads' of head 'csra', but got 3"),
    (['--head-kwargs', 'lam=1'], 'Expected --head with --head-kwargs'),
    (['--class-vectors', 'a.txt'], 'Expected --head with --class-vectors'),
    (['--head', 'csra', '--class-vectors', 'a.txt'], 'Expected a head that uses --class-vectors'),
    (['--head', 'ml-gcn', '--class-vectors', 'a.txt'], 'Expected a file for --class-vectors, but got a.txt'),
    (['--head', 'csra', '--gp', 'max'], 'Expected --head or --gp'),
    (['--head', 'csra', '--head-init-std', '0.1'], 'Expected --head or --head-init-std'),
    (['--head', 'csra', '--model', 'coat_tiny'], '--head csra is not possible for coat_tiny: its head combines'),
])
def test_wrong_flags_get_one_sentence(data, tmp_path, capsys, flags, words):
    with pytest.raises(SystemExit) as left:
        main(flags_of(data, tmp_path, *flags))
    lines = [line for line in capsys.readouterr().err.splitlines() if 'error:' in line]
    assert left.value.code == 2 and len(lines) == 1
    assert re.search(words, lines[0])


def test_checkpoints_of_another_head_and_other_poolings_are_refused(data, tmp_path, capsys):
    folder = train(data, tmp_path, *head_flags('csra'))
    for command, words in (
            (lambda: main(['--resume', str(folder), '--head', 'add-gcn', '--head-kwargs', 'node_dim=16']),
             "Expected a checkpoint with --head 'add-gcn', but got .* with 'csra'"),
            (lambda: main(['--resume', str(folder), '--head', '', '--head-kwargs']),
             "Expected a checkpoint with --head '', but got .* with 'csra'"),
            (lambda: validate([*evaluation(folder, data), '--gp', 'max']),
             "Expected a head or global_pool .*, but got head 'csra' and 'max'"),
            (lambda: export([str(folder), '--format', 'onnx', '--test-pool']),
             'Expected a model with a classifier of its own for --test-pool, but got head csra')):
        with pytest.raises(SystemExit):
            command()
        assert re.search(words, capsys.readouterr().err)


@pytest.mark.slow
@pytest.mark.parametrize('head', [name for name in ('dsdl', 'tdrg') if name in HEADS])
def test_two_processes_train_with_the_losses_of_a_head(data, run, tmp_path, head):
    command = train_command(data, tmp_path, *head_flags(head), '-b', '2', '--model-ema')
    done = run(*TORCHRUN, *command[1:])
    assert done.returncode == 0, done.stderr
    row, = summary(tmp_path / 'run')
    own = [name for name in row if name.startswith('train_') and name.endswith('_loss')]
    assert len(own) > 2 + head_class(head).supports_cells
    assert all(np.isfinite(float(row[name])) for name in own)
    if 'class_vectors' in head_class(head).side_inputs:
        assert done.stderr.count('Class vectors: ') == 1
