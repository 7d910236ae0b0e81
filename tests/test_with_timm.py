""" timm's scripts with our flags: a script of our own with the same names and, with TIMM_SCRIPTS, those of a clone """
import functools
import hashlib
import json
import logging
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
import timm
import torch
import yaml
from PIL import Image

import timm_splicemix as tsm
from timm_splicemix import validate as validate_command
from timm_splicemix.models import is_max_pooled
from timm_splicemix.run.read import read_checkpoint
from timm_splicemix.with_timm import main

from .conftest import REPOSITORY
from .runs import TINY, assert_same_weights, flags_of, summary, train, weights

OWN = Path(__file__).parent / 'data' / 'scripts'
CLONE = Path(os.environ.get('TIMM_SCRIPTS', 'none'))
TORCHRUN = (sys.executable, '-m', 'torch.distributed.run', '--nproc-per-node', '2', '--standalone')
METRICS = [name + suffix for suffix in ('', '_3') for name in ('CP', 'CR', 'CF1', 'OP', 'OR', 'OF1')]
CL = ('--gp', 'max', '--splicemix-grids', '1x2,2x2', '--splicemix-ratio', '0.5', '--splicemix-cl')


@pytest.fixture(params=['own', pytest.param('timm', marks=pytest.mark.skipif(
    not CLONE.is_dir(), reason='TIMM_SCRIPTS names no clone of pytorch-image-models'))])
def scripts(request):
    """The folder of train.py and validate.py, which stay as they are on the disk."""
    folder = OWN if request.param == 'own' else CLONE
    before = {path: hashlib.sha256(path.read_bytes()).digest() for path in folder.glob('*.py')}
    yield folder
    assert before == {path: hashlib.sha256(path.read_bytes()).digest() for path in folder.glob('*.py')}


@pytest.fixture(autouse=True)
def own_handlers():
    """A script adds a handler to the root logger, whose stream ends with the test."""
    before = list(logging.root.handlers)
    yield
    logging.root.handlers[:] = before


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
    """Single-label images in a folder for each class."""
    root = tmp_path_factory.mktemp('folders')
    generator = torch.Generator().manual_seed(0)
    for split, number in (('train', 6), ('validation', 3)):
        for index, name in enumerate(('a', 'b', 'c')):
            (root / split / name).mkdir(parents=True)
            for image in range(number):
                pixels = torch.randint(0, 160, (64, 64, 3), generator=generator)
                pixels[..., index] += 60
                Image.fromarray(pixels.to(torch.uint8).numpy()).save(root / split / name / f'{image}.png')
    return root


def with_timm(scripts, data, output, *flags, name='run'):
    main([str(scripts / 'train.py'), *flags_of(data, output, *flags, name=name), '--device', 'cpu'])
    return output / name


def whole_set(checkpoint, data, **kwargs):
    """Metrics of a checkpoint by the meter, on the whole validation set as one batch."""
    model, info = tsm.load_checkpoint(checkpoint, **kwargs)
    dataset = tsm.create_dataset('csv', data, 'val')
    config = {name: info.data_config[name] for name in ('mean', 'std', 'interpolation', 'crop_pct', 'crop_mode')}
    loader = timm.data.create_loader(
        dataset, info.data_config['input_size'], 16, use_prefetcher=False, num_workers=0,
        collate_fn=tsm.multilabel_collate, **config)
    meter = tsm.MultilabelMeter(3)
    with torch.inference_mode():
        for images, targets in loader:
            meter.update(model(images), targets)
    assert len(meter) == 9
    return meter.compute()


@pytest.mark.parametrize('flags', [
    (*CL, '--model-ema', '--model-ema-decay', '0.9', '--eval-metric', 'CF1'),
    ('--mixup', '0.5', '--cutmix', '0.5', '--mixup-off-epoch', '1', '--loss', 'asl', '--drop', '0.3', '--freeze-bn',
     '--freeze', 'conv1', 'bn1', '--backbone-lr-scale', '0.1'),
    ('--recursivemix', '--keep-labels', '0.6', '--loss', 'p-asl', '--metrics', 'asl', '--decoder', 'torchvision'),
    ('--splice-with', 'mixup', '--class-weights', 'auto', '--crop-mode', 'squash', '--no-prefetcher',
     '--val-fraction', '0.3'),
    ('--splicemix-grids', '2x2', '--splicemix-off-epoch', '1', '--batch-augment', '1.5', '--loss', 'splc'),
    ('--head', 'csra', '--head-kwargs', 'heads=2', '--splicemix-grids', '2x2', '--splicemix-cl', '0.5'),
], ids=['cl', 'mixup', 'recursivemix', 'splice-with', 'splicemix', 'head'])
def test_a_run_equals_that_of_our_own_command(scripts, data, tmp_path, flags):
    ours = train(data, tmp_path, *flags, name='ours')
    theirs = with_timm(scripts, data, tmp_path, *flags, name='theirs')
    keys = ('state_dict', 'state_dict_ema') if '--model-ema' in flags else ('state_dict',)
    for key in keys:
        for name in ('last.pth.tar', 'model_best.pth.tar'):
            assert_same_weights(ours / name, theirs / name, key)
    epochs = [weights(theirs / f'checkpoint-{epoch}.pth.tar').values() for epoch in (0, 1)]
    assert not all(map(torch.equal, *epochs))
    assert (theirs / 'split.json').is_file() == ('--val-fraction' in flags)
    prefix = 'eval_ema_' if '--model-ema' in flags else 'eval_'  # timm has one column for both
    for own, other in zip(summary(ours), summary(theirs), strict=True):
        assert list(other) == ['epoch', 'train_loss', 'eval_loss', 'eval_mAP', *(f'eval_{m}' for m in METRICS), 'lr']
        assert float(other['train_loss']) == pytest.approx(float(own['train_loss']), rel=1e-6)
        for name in ('loss', 'mAP', *METRICS):
            assert other[f'eval_{name}'] == own[f'{prefix}{name}'], name


def test_auto_grids_are_chosen_and_saved(scripts, data, tmp_path):
    flags = ('--splicemix-grids', 'auto', '--epochs', '1', '--gp', 'max', '--img-size', '96')
    ours, theirs = (make(data, tmp_path, *flags, name=name) for make, name in (
        (train, 'ours'), (functools.partial(with_timm, scripts), 'theirs')))
    assert_same_weights(ours / 'last.pth.tar', theirs / 'last.pth.tar')
    expected = yaml.safe_load((ours / 'args.yaml').read_text())['splicemix_grids']
    assert '1x2' in expected
    settings = yaml.safe_load((theirs / 'args.yaml').read_text())
    assert settings['splicemix_grids'] == expected and settings['img_size'] == 96
    assert read_checkpoint(theirs / 'last.pth.tar')['args'].splicemix_grids == expected


def test_a_resumed_run_equals_the_run_that_was_not_interrupted(scripts, data, tmp_path):
    flags = (*CL, '--splicemix-drop-prob', '0.5', '--drop', '0.2', '--model-ema', '--model-ema-decay', '0.5',
             '--epochs', '3')
    whole = with_timm(scripts, data, tmp_path, *flags, name='whole')
    resumed = with_timm(
        scripts, data, tmp_path, *flags, '--resume', whole / 'checkpoint-0.pth.tar', name='resumed')
    for key in ('state_dict', 'state_dict_ema'):
        assert_same_weights(whole / 'last.pth.tar', resumed / 'last.pth.tar', key)
    assert summary(resumed) == summary(whole)[1:]


def test_the_metrics_are_those_of_the_whole_set_and_choose_the_best_checkpoint(scripts, data, tmp_path, caplog):
    run = with_timm(scripts, data, tmp_path, '--epochs', '3', '--splicemix-grids', '2x2', '--eval-metric', 'mAP')
    rows = summary(run)
    best = max(rows, key=lambda row: float(row['eval_mAP']))
    checkpoint = read_checkpoint(run / 'model_best.pth.tar')
    assert checkpoint['metric'] == float(best['eval_mAP']) and checkpoint['epoch'] == int(best['epoch'])
    for name, value in whole_set(run / 'model_best.pth.tar', data).items():
        assert float(best[f'eval_{name}']) == pytest.approx(value, abs=1e-9), name
    for row in rows:
        assert f"Test: mAP {float(row['eval_mAP']):.2f}" in caplog.text
    assert 'CP' in caplog.text and 'OF1' in caplog.text


@pytest.mark.slow
def test_two_processes_score_each_image_once(scripts, data, run, tmp_path):
    flags = flags_of(data, tmp_path, *CL, '--model-ema', '--model-ema-decay', '0.8', '-b', '2', '--device', 'cpu')
    done = run(*TORCHRUN, '-m', 'timm_splicemix.with_timm', scripts / 'train.py', *flags)
    assert done.returncode == 0, done.stderr
    row = summary(tmp_path / 'run')[-1]
    for name, value in whole_set(tmp_path / 'run' / 'last.pth.tar', data, use_ema=True).items():
        assert float(row[f'eval_{name}']) == pytest.approx(value, abs=1e-9), name
    assert done.stderr.count('Test (EMA): mAP') == 2, done.stderr


@pytest.mark.slow
def test_two_processes_validate_each_image_once_and_print_one_result(scripts, data, run, tmp_path):
    folder = with_timm(scripts, data, tmp_path, '--epochs', '1')
    done = run(
        *TORCHRUN, '-m', 'timm_splicemix.with_timm', scripts / 'validate.py', '--dataset', 'csv', '--data-dir', data,
        '--checkpoint', folder / 'last.pth.tar', '--device', 'cpu', '--batch-size', '2', '--workers', '0')
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.replace('--result', ''))
    expected = whole_set(folder / 'last.pth.tar', data)
    assert result['num_images'] == 9
    assert {name: result[name] for name in expected} == pytest.approx(expected, abs=1e-4)


def plain_script(path, argv, monkeypatch):
    monkeypatch.setattr(sys, 'argv', [str(path), *argv])
    runpy.run_path(str(path), run_name='__main__')


def log_of(caplog, folder):
    """The log without times and names of folders; the next log starts after it."""
    lines = [re.sub(r'Time: .*?(?=  \w+:)|Data: .*', '', line) for line in caplog.messages]
    caplog.clear()
    return [line.replace(str(folder), '') for line in lines]


@pytest.mark.parametrize('flags', [(), ('--mixup', '0.4', '--model-ema', '--gp', 'max')], ids=['plain', 'mixup'])
def test_without_our_flags_a_single_label_run_is_timm_s_own(scripts, folders, tmp_path, monkeypatch, caplog, flags):
    logs, runs = [], []
    for name in ('timm', 'ours'):
        argv = [*flags_of(folders, tmp_path / name, *flags), '--dataset', '', '--num-classes', '3', '--device', 'cpu']
        if name == 'timm':
            plain_script(scripts / 'train.py', argv, monkeypatch)
        else:
            main([str(scripts / 'train.py'), *argv])
        runs.append(tmp_path / name / 'run')
        logs.append(log_of(caplog, tmp_path / name))
    assert_same_weights(runs[0] / 'last.pth.tar', runs[1] / 'last.pth.tar')
    for name in ('summary.csv', 'args.yaml'):
        texts = [(run / name).read_text().replace(str(run.parent), '') for run in runs]
        assert texts[0] == texts[1], name
    assert 'top1' in (runs[1] / 'summary.csv').read_text()
    assert logs[0] == logs[1] and any('oss' in line for line in logs[0])
    keys = [read_checkpoint(run / 'last.pth.tar').keys() for run in runs]
    assert keys[0] == keys[1]


def test_single_label_data_can_be_spliced(scripts, folders, tmp_path, caplog):
    flags = ('--dataset', '', '--splicemix-grids', '2x2', '--num-classes', '3', '--log-interval', '1')
    run = with_timm(scripts, folders, tmp_path, *flags)
    assert [row['eval_top1'] for row in summary(run)] and 'mAP' not in summary(run)[0]
    assert 'SpliceMix(' in caplog.text
    assert read_checkpoint(run / 'last.pth.tar')['timm_splicemix']['info']['class_names'] == ['a', 'b', 'c']


@pytest.mark.parametrize('model', [
    ('test_vit', '--model-kwargs', 'embed_dim=16', 'depth=1', 'num_heads=2'), ('test_mambaout',)])
def test_max_pooling_keeps_the_keys_of_timm_s_default_model(data, tmp_path, model):
    flags = ('--gp', 'max', '--splicemix-grids', '2x2', '--splicemix-cl', '--epochs', '1', '-b', '8')
    if not CLONE.is_dir():  # the short script has no --model-kwargs
        model = model[:1]
    run = with_timm(CLONE if CLONE.is_dir() else OWN, data, tmp_path, *flags, '--model', *model)
    loaded, info = tsm.load_checkpoint(run)
    assert is_max_pooled(loaded, info.data_config['input_size']) and info.class_names == ('red', 'green', 'blue')
    kwargs = {'embed_dim': 16, 'depth': 1, 'num_heads': 2} if len(model) > 1 else {}
    expected = timm.create_model(model[0], num_classes=3, **kwargs).state_dict()
    assert read_checkpoint(run / 'last.pth.tar')['state_dict'].keys() == expected.keys()


def test_the_args_yaml_of_a_run_repeats_it(scripts, data, tmp_path):
    first = with_timm(scripts, data, tmp_path, *CL, '--keep-labels', 'single', '--loss', 'wan', name='first')
    settings = yaml.safe_load((first / 'args.yaml').read_text())
    assert (settings['splicemix_cl'], settings['keep_labels'], settings['eval_metric']) == (1.0, 'single', 'mAP')
    main([str(scripts / 'train.py'), '--config', str(first / 'args.yaml'), '--experiment', 'second'])
    assert_same_weights(first / 'last.pth.tar', tmp_path / 'second' / 'last.pth.tar')
    (tmp_path / 'bad.yaml').write_text(yaml.safe_dump({**settings, 'splicemix_drop_prob': 3}))
    assert_refused([scripts / 'train.py', '--config', tmp_path / 'bad.yaml'], "Bad value of 'splicemix_drop_prob'")


def assert_refused(argv, message):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match=message):
        patch.setenv('TSM_TRACEBACK', '1')
        main([str(part) for part in argv])


@pytest.mark.parametrize('flags, message', [
    (('--splicemix-grids', '2x2', '--splicemix-batch', 'alternate'), 'alternate: .* one update for each batch'),
    (('--train-batches-per-epoch', '2'), 'Expected no --train-batches-per-epoch'),
    (('--aug-splits', '2'), '--aug-splits: Only the default 0 is supported'),
    (('--splicemix-cl',), 'Expected --splicemix-grids with --splicemix-cl'),
    (('--eval-metric', 'top5'), 'Expected --eval-metric to be one of mAP'),
    (('--num-classes', '7'), 'Expected --num-classes 3'),
    (('--splicemix-grids', '2x2', '--mixup', '0.2'), 'Expected one way of mixing'),
    (('--freeze', 'nothing'), 'Expected --freeze to name modules'),
])
def test_flags_that_do_not_work_are_refused_in_one_sentence(scripts, data, tmp_path, flags, message):
    if flags[0] == '--train-batches-per-epoch' and flags[0] not in (scripts / 'train.py').read_text():
        pytest.skip('timm before 1.0.29 has no such flag')
    assert_refused([scripts / 'train.py', *flags_of(data, tmp_path, *flags), '--device', 'cpu'], message)
    assert not (tmp_path / 'run').exists()


def test_a_script_that_lacks_a_name_is_refused_with_the_name_and_the_known_versions(tmp_path):
    script = tmp_path / 'train.py'
    for name in ('ClassificationTask', 'resume_task_checkpoint', 'create_loader'):
        script.write_text(re.sub(rf'(?<=[ (]){name}\b', f'{name} as other', (OWN / 'train.py').read_text(), count=1)
                          .replace('def create_loaders', 'def loaders'))
        assert_refused([script], f'{script} lacks the name {name}. .* timm 1.0.27, 1.0.28 and 1.0.29.dev0')
    script.write_text('from timm.data import no_such_name')
    assert_refused([script], f'Cannot load {script} with timm {timm.__version__}: cannot import name .no_such_name')
    assert_refused([tmp_path / 'other.py'], 'which is not a file')
    (tmp_path / 'validate.py').write_text('import argparse\nparser = argparse.ArgumentParser()\ndef main(): pass')
    assert_refused([tmp_path / 'validate.py'], 'lacks the name validate')


def test_a_flag_that_a_script_has_too_keeps_its_own_choices(data, folders, tmp_path):
    text = (OWN / 'train.py').read_text()
    line = "parser.add_argument('--loss', default='ce', choices=['ce', 'poly'])\n"
    (tmp_path / 'train.py').write_text(text.replace('config_parser =', f'{line}config_parser =', 1))
    plain = with_timm(tmp_path, folders, tmp_path, '--dataset', '', '--loss', 'poly', '--num-classes', '3', name='a')
    assert 'top1' in (plain / 'summary.csv').read_text()
    assert 'splicemix_grids' not in (plain / 'args.yaml').read_text()
    same = with_timm(tmp_path, data, tmp_path, '--loss', 'hill', name='same')
    assert_same_weights(same / 'last.pth.tar', with_timm(OWN, data, tmp_path, '--loss', 'hill') / 'last.pth.tar')
    bce = with_timm(tmp_path, data, tmp_path, name='bce')
    assert_same_weights(bce / 'last.pth.tar', with_timm(OWN, data, tmp_path, name='own') / 'last.pth.tar')


def test_validate_gives_the_metrics_of_our_own_command(scripts, data, tmp_path, capfd, caplog):
    run = with_timm(scripts, data, tmp_path, '--gp', 'max')
    flags = ['--dataset', 'csv', '--data-dir', str(data), '--device', 'cpu', '--workers', '0']
    validate_command.main([*flags, '--checkpoint', str(run), '--output', str(tmp_path / 'ours'), '--metrics', 'asl'])
    ours = json.loads((tmp_path / 'ours' / 'results.json').read_text())['metrics']
    capfd.readouterr()
    best = str(run / 'model_best.pth.tar')
    main([str(scripts / 'validate.py'), *flags, '--checkpoint', best, '--metrics', 'asl'])
    result = json.loads(capfd.readouterr().out.replace('--result', ''))
    assert {name: result[name] for name in ours} == pytest.approx(ours, abs=1e-4)
    assert (result['model'], result['img_size'], result['num_images']) == ('test_resnet', 64, 9)
    assert ' * mAP' in caplog.text and 'top1' not in result
    main([str(scripts / 'validate.py'), *flags, '--checkpoint', str(run), '--results-file', str(tmp_path / 'all.json'),
          *(('--results-format', 'json') if scripts == CLONE else ())])
    results = json.loads((tmp_path / 'all.json').read_text())
    values = [result['mAP'] for result in results]
    assert len(values) >= 2 and values == sorted(values, reverse=True)


def test_validate_without_our_flags_is_timm_s_own(scripts, folders, tmp_path, monkeypatch, capfd, caplog):
    torch.manual_seed(0)
    torch.save(timm.create_model('test_resnet', num_classes=3).state_dict(), tmp_path / 'model.pth')
    flags = ['--data-dir', str(folders), '--model', 'test_resnet', '--num-classes', '3', '--img-size', '64',
             '--device', 'cpu', '--workers', '0', '--checkpoint', str(tmp_path / 'model.pth')]
    plain_script(scripts / 'validate.py', flags, monkeypatch)
    expected, expected_log = capfd.readouterr().out, log_of(caplog, tmp_path)
    main([str(scripts / 'validate.py'), *flags])
    assert capfd.readouterr().out == expected and 'top1' in expected
    assert log_of(caplog, tmp_path) == expected_log


def test_help_lists_the_flags_of_the_script_and_ours(scripts, capfd):
    for name, flags in (('train.py', ('--epochs', '--splicemix-grids', '--loss-gamma', '--keep-labels')),
                        ('validate.py', ('--checkpoint', '--thresholds', '--val-ann'))):
        with pytest.raises(SystemExit) as stop:
            main([str(scripts / name), '--help'])
        text = capfd.readouterr().out
        assert stop.value.code == 0 and all(flag in text for flag in flags)


def test_another_timm_beside_the_script_is_reported(tmp_path, caplog):
    (tmp_path / 'timm').mkdir()
    (tmp_path / 'timm' / 'version.py').write_text("__version__ = '0.9.1'\n")
    (tmp_path / 'train.py').write_text((OWN / 'train.py').read_text())
    with pytest.raises(SystemExit):
        main([str(tmp_path / 'train.py'), '--help'])
    assert f'not timm 0.9.1 beside the script. To use that one, set PYTHONPATH={tmp_path}' in caplog.text


def edited(script, folder):
    """The script with the changes of the documentation."""
    text = script.read_text()
    page = (REPOSITORY / 'docs' / 'timm.md').read_text()
    diff = re.search(r'^```diff\n(.*?)^```$', page, re.MULTILINE | re.DOTALL)[1]
    for hunk in re.split(r'^@@.*@@\n', diff, flags=re.MULTILINE)[1:]:
        lines = [(line[:1], line[1:]) for line in hunk.splitlines(keepends=True)]
        before = ''.join(line for sign, line in lines if sign in ' -')
        assert text.count(before) == 1, before
        text = text.replace(before, ''.join(line for sign, line in lines if sign in ' +'))
    (folder / 'train.py').write_text(text)
    return folder / 'train.py'


@pytest.mark.skipif(not CLONE.is_dir(), reason='TIMM_SCRIPTS names no clone of pytorch-image-models')
@pytest.mark.parametrize('processes', [1, 2])
def test_the_changes_by_hand_give_exact_metrics(data, run, tmp_path, processes):
    flags = flags_of(
        data, tmp_path, *CL[:-1], '--num-classes', 3, '--eval-metric', 'mAP', '-b', '4', '-vb', '2', '--device', 'cpu')
    launcher = TORCHRUN if processes == 2 else (sys.executable,)
    done = run(*launcher, edited(CLONE / 'train.py', tmp_path), *flags)
    assert done.returncode == 0, done.stderr
    row = summary(tmp_path / 'run')[-1]
    for name, value in whole_set(tmp_path / 'run' / 'last.pth.tar', data).items():
        assert float(row[f'eval_{name}']) == pytest.approx(value, abs=1e-9), name
    assert 'SpliceMix(' in done.stderr and 'consistency weight 1' in done.stderr


def test_defaults_fit_the_machine_and_the_labels(data, tmp_path, caplog):
    argv = [*TINY, '--data-dir', data, '--output', tmp_path, '--experiment', 'run', '--epochs', '1']
    main([str(OWN / 'train.py'), *map(str, argv)])
    if not torch.cuda.is_available():
        assert 'Using --device cpu: no GPU was found.' in caplog.text
    assert 'Using --smoothing 0' in caplog.text and 'Using --eval-metric mAP' in caplog.text
