import csv
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time

import pytest
import timm
import torch
import voc
import voc_arms as arms
import voc_pieces as pieces
import voc_time
from voc_records import read_runs

import timm_splicemix as tsm
from tests.conftest import REPOSITORY
from tests.helpers import raises_error
from tests.test_voc import OBJECTS, make_voc
from tests.test_voc_results import make_scores
from timm_splicemix.data.readers.voc import ReaderVoc
from timm_splicemix.train import build_parser

FLAGS = ('--epochs', '2', '--model', 'test_efficientnet', '--size', '32', '--batch-size', '4', '--bootstrap', '20')

# A stand-in for train.py: an epoch is a row of the summary, and --resume continues the summary
TRAIN = '''
import csv, os, signal, sys, time
flags = sys.argv[1:]
value = lambda name: flags[flags.index(name) + 1]
folder = os.path.join(value('--output'), value('--experiment'))
with open(os.path.join(value('--output'), 'order.txt'), 'a') as file:
    file.write(value('--experiment') + (' resumed' if '--resume' in flags else '') + '\\n')
if os.environ.get('FAILS') == value('--experiment'):
    sys.exit('This went wrong.')
with open(os.path.join(folder, 'pid'), 'w') as file:
    file.write(str(os.getpid()))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
summary = os.path.join(folder, 'summary.csv')
done = len(open(summary).readlines()) - 1 if '--resume' in flags else 0
for epoch in range(done, int(value('--epochs'))):
    with open(summary, 'a') as file:
        if not epoch:
            file.write('epoch,eval_mAP,eval_CF1,eval_OF1\\n')
        file.write(f"{epoch},{80 + 10 * epoch + int(value('--seed'))},70,75\\n")
    open(os.path.join(folder, 'last.pth.tar'), 'w').close()
    if os.environ.get('HANGS') == value('--experiment'):
        time.sleep(60)
'''


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Run the study with a stand-in for train.py; returns its exit code."""
    make_voc(tmp_path / 'data')
    script = tmp_path / 'stand_in.py'
    script.write_text(TRAIN)
    monkeypatch.setattr(voc, 'TRAIN', (sys.executable, str(script)))
    monkeypatch.setattr('voc_jobs.POLL_SECONDS', 0.02)

    def run_study(*flags):
        try:
            voc.main(['--data-dir', str(tmp_path / 'data'), '--output', str(tmp_path / 'runs'), *FLAGS, *flags])
        except SystemExit as error:
            return error.code
        return 0
    return run_study


def order(tmp_path):
    return (tmp_path / 'runs' / 'order.txt').read_text().splitlines()


def record(tmp_path, name):
    return json.loads((tmp_path / 'runs' / name / 'run.json').read_text())


def test_every_first_seed_comes_before_any_second_and_main_arms_come_first():
    runs = [(arm.name, seed) for arm, seed in arms.run_order()]
    assert [seed for _, seed in runs] == sorted(seed for _, seed in runs)
    main = ['baseline', 'splicemix', 'splicemix-cl', 'baseline-more']
    assert [name for name, _ in runs[:4]] == main
    assert [run for run in runs if run[1]] == [(name, seed) for seed in (1, 2) for name in main]
    assert len(runs) == len(set(runs)) == 20 + 8
    assert {name for name, _ in runs} == {name for name, arm in arms.ARMS.items() if arm.seeds}


def test_arms_and_seeds_can_be_chosen():
    named = arms.run_order(['mixup', 'splicemix-cl-no-detach', 'baseline'], num_seeds=2)
    assert [(arm.name, seed) for arm, seed in named] == [
        (name, seed) for seed in (0, 1) for name in ('baseline', 'mixup', 'splicemix-cl-no-detach')]
    assert [seed for _, seed in arms.run_order(['splicemix-cl-no-detach'])] == [0]
    with raises_error("Expected arms among baseline, .*, but got 'mixap'"):
        arms.run_order(['mixap'])


def test_every_arm_is_a_command_of_train_and_differs_only_in_its_own_flags():
    parser, recipe = build_parser(), arms.Recipe()
    given = {}
    for arm in arms.ARMS.values():
        args = vars(parser.parse_args([*recipe.flags(), *arm.flags, *arms.seed_flags(arm, 1)]))
        assert args['seed'] == 1 and args['train_split'] == 'train-only' and args['val_split'] == 'val'
        assert args['freeze_bn'] and args['gp'] == ('' if args['head'] else 'max')
        first = arms.ARMS[arms.ARMS[arm.reference].reference]  # of at most two steps
        assert first.reference == first.name and first.name.endswith('baseline')
        given[arm.name] = args
    assert len({str(args) for args in given.values()}) == len(given)
    for name, args in given.items():
        changed = {key for key, value in args.items() if value != given['baseline'][key]}
        own = {flag[2:].replace('-', '_') for flag in arms.ARMS[name].flags if flag.startswith('--')}
        assert changed - {'keep_labels_seed'} == own


def test_flags_change_the_recipe():
    args = voc.build_parser().parse_args(
        ['--size', '128', '--epochs', '20', '--lr', '0.1', '--head-init-scale', '1', '--freeze', 'conv_stem'])
    own, other = (vars(build_parser().parse_args(recipe.flags())) for recipe in (arms.Recipe(), voc.make_recipe(args)))
    changed = {key: value for key, value in other.items() if value != own[key]}
    assert changed == {'img_size': 128, 'epochs': 20, 'lr': 0.1, 'head_init_scale': 1.0, 'freeze': ['conv_stem']}


def test_stem_and_first_four_of_seven_stages_are_frozen():
    model = timm.create_model(arms.MODEL)
    names = [name for name, _ in model.named_children()]
    assert names[:3] == ['conv_stem', 'bn1', 'blocks'] and len(model.blocks) == 7
    assert list(arms.FREEZE) == [*names[:2], *(f'blocks.{stage}' for stage in range(4))]


def test_runs_are_trained_in_order_and_never_twice(study, tmp_path, capsys):
    flags = ('--arms', 'baseline', 'splicemix', '--seeds', '2')
    assert study(*flags) == 0
    names = ['baseline-seed0', 'splicemix-seed0', 'baseline-seed1', 'splicemix-seed1']
    assert order(tmp_path) == names
    assert 'baseline-seed1: epoch 2 of 2, mAP 91.00; 6 of 8 epochs in total' in capsys.readouterr().out
    assert study(*flags) == 0
    assert order(tmp_path) == names
    assert '| Baseline | 2 of 2 | 2 of 2 | **90.50 ± 0.71** | 90.00, 91.00 |' in capsys.readouterr().out
    assert study('--arms', 'mixup') == 0
    assert order(tmp_path) == [*names, 'mixup-seed0']
    assert record(tmp_path, 'mixup-seed0')['finished']
    assert (tmp_path / 'runs' / 'curves.png').stat().st_size > 1000


def test_a_failed_run_does_not_stop_others_and_is_tried_again(study, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv('FAILS', 'baseline-seed0')
    flags = ('--arms', 'baseline', 'splicemix', '--seeds', '1')
    assert study(*flags).startswith('Failed: baseline-seed0')
    assert 'This went wrong.' in capsys.readouterr().out
    monkeypatch.delenv('FAILS')
    assert study(*flags) == 0
    assert order(tmp_path) == ['baseline-seed0', 'splicemix-seed0', 'baseline-seed0']


def test_at_the_time_limit_runs_are_asked_to_save_and_the_next_call_resumes(study, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv('HANGS', 'baseline-seed0')
    flags = ('--arms', 'baseline', 'splicemix', '--seeds', '1', '--jobs', '1')
    assert study(*flags, '--time-limit', '0.03') == 0
    text = capsys.readouterr().out
    assert 'Time limit reached' in text and 'stopped: baseline-seed0\nwaiting: splicemix-seed0' in text
    assert '- Baseline, seed 0: 1 of 2 epochs, mAP 80.00' in text and '| Baseline | 0 of 1 | 1 of 2 | - |' in text
    assert not record(tmp_path, 'baseline-seed0')['finished']
    monkeypatch.delenv('HANGS')
    assert study(*flags) == 0
    assert order(tmp_path) == ['baseline-seed0', 'baseline-seed0 resumed', 'splicemix-seed0']
    with open(tmp_path / 'runs' / 'baseline-seed0' / 'summary.csv', newline='') as file:
        assert [row['epoch'] for row in csv.DictReader(file)] == ['0', '1']


@pytest.mark.slow
def test_a_run_that_outlives_a_killed_study_is_left_alone(study, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv('HANGS', 'baseline-seed0')
    script = (
        f'import sys; sys.path.insert(0, {str(REPOSITORY / "experiments" / "voc")!r}); import voc; '
        f'voc.TRAIN = ({sys.executable!r}, {str(tmp_path / "stand_in.py")!r}); voc.main(sys.argv[1:])')
    parent = subprocess.Popen(
        [sys.executable, '-c', script, '--data-dir', str(tmp_path / 'data'), '--output', str(tmp_path / 'runs'), *FLAGS,
         '--arms', 'baseline'], env={**os.environ, 'PYTHONPATH': str(REPOSITORY)})
    deadline = time.monotonic() + 60
    while not (tmp_path / 'runs' / 'baseline-seed0' / 'last.pth.tar').exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    child = int((tmp_path / 'runs' / 'baseline-seed0' / 'pid').read_text())
    parent.kill()
    parent.wait()
    try:
        assert study('--arms', 'baseline', '--seeds', '1') == 0
        assert 'elsewhere: baseline-seed0' in capsys.readouterr().out
        assert order(tmp_path) == ['baseline-seed0']
    finally:
        os.kill(child, signal.SIGTERM)


def test_a_signal_asks_runs_to_save_and_the_table_is_printed(study, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv('HANGS', 'baseline-seed0')
    log = voc.Progress.log

    def log_and_interrupt(self, *args):
        log(self, *args)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(voc.Progress, 'log', log_and_interrupt)
    before = signal.getsignal(signal.SIGTERM)
    assert study('--arms', 'baseline', '--seeds', '1') == 0
    assert signal.getsignal(signal.SIGTERM) == before
    text = capsys.readouterr().out
    assert 'Signal received, stopping 1 jobs.' in text
    assert 'stopped: baseline-seed0' in text and '### All labels' in text


def test_a_folder_with_runs_of_another_recipe_is_an_error(study, tmp_path, capsys):
    assert study('--arms', 'baseline', '--seeds', '1') == 0
    assert study('--arms', 'splicemix', '--epochs', '3') == 2
    assert 'Expected runs of the same recipe' in capsys.readouterr().err
    assert order(tmp_path) == ['baseline-seed0']


@pytest.mark.parametrize('flags, words', [
    (('--epochs', '0'), 'Expected --epochs of at least 1, but got 0'),
    (('--seeds', '0'), 'Expected --seeds of at least 1'),
    (('--val-interval', '0'), 'Expected --val-interval of at least 1, but got 0'),
    (('--time', '1'), 'Expected --time of at least 2 rounds, but got 1'),
    (('--arms', 'mixap'), "but got 'mixap'"),
    (('--subset', '5'), 'Expected --subset between 1 and 4'),
    (('--weights', 'nowhere.pth'), '--weights: file not found'),
])
def test_bad_flags_are_one_line(study, tmp_path, monkeypatch, capsys, flags, words):
    assert study('--cache', str(tmp_path / 'cache'), *flags) == 2
    error = capsys.readouterr().err
    assert words in error and error.count('\n') == 1


def test_an_archive_is_unpacked_once(tmp_path, monkeypatch):
    monkeypatch.delenv('TSM_VOC_TAR', raising=False)
    with raises_error('set --data-dir, or TSM_VOC_TAR to a tar archive'):
        voc.find_data(None, tmp_path / 'cache')
    make_voc(tmp_path / 'packed')
    with tarfile.open(tmp_path / 'VOC2007-small.tar', 'w') as archive:
        archive.add(tmp_path / 'packed' / 'VOCdevkit', 'VOCdevkit')
    monkeypatch.setenv('TSM_VOC_TAR', str(tmp_path / 'VOC2007-small.tar'))
    folder = voc.find_data(None, tmp_path / 'cache')
    assert folder == tmp_path / 'cache' / 'VOC2007-small'
    assert len(ReaderVoc(folder, '2007', 'train')) == len(OBJECTS)
    (folder / 'mark').touch()
    assert voc.find_data(None, tmp_path / 'cache') == folder and (folder / 'mark').exists()
    (tmp_path / 'broken.tar').write_text('no archive')
    monkeypatch.setenv('TSM_VOC_TAR', str(tmp_path / 'broken.tar'))
    with raises_error('TSM_VOC_TAR: .* is not a tar archive'):
        voc.find_data(None, tmp_path / 'cache')
    assert [path.name for path in (tmp_path / 'cache').iterdir()] == ['VOC2007-small']


def test_a_subset_has_always_the_same_images_with_their_labels(tmp_path):
    make_voc(tmp_path / 'data')
    folder = voc.make_subset(tmp_path / 'data', 2, tmp_path / 'cache')
    assert voc.make_subset(tmp_path / 'data', 2, tmp_path / 'cache') == folder
    whole, part, val = (
        ReaderVoc(root, '2007', split, difficult='ignore')
        for root, split in ((tmp_path / 'data', 'train'), (folder, 'train2'), (folder, 'val')))
    rows = [whole.image_ids.index(image_id) for image_id in part.image_ids]
    assert len(part) == 2 and rows == sorted(rows)
    assert torch.equal(part.targets, whole.targets[rows]) and torch.equal(part.difficult, whole.difficult[rows])
    assert val.image_ids == whole.image_ids and torch.equal(val.targets, whole.targets)


def test_progress_prints_epochs_without_metrics(capsys):
    progress = voc.Progress(total=4, done=0)
    progress.log('baseline-seed0', {'epoch': '0', 'eval_mAP': ''}, 2)
    progress.log('baseline-seed0', {'epoch': '1', 'eval_mAP': '81.5'}, 2)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith('baseline-seed0: epoch 1 of 2; 1 of 4 epochs in total')
    assert second.startswith('baseline-seed0: epoch 2 of 2, mAP 81.50; 2 of 4 epochs in total')


def test_kept_runs_count_as_finished_and_others_are_trained(study, tmp_path, capsys):
    flags = ('--records', str(tmp_path / 'records'), '--arms', 'baseline', 'splicemix', '--seeds', '1')
    assert study(*flags) == 0
    for name in ('baseline-seed0', 'splicemix-seed0'):
        folder = tmp_path / 'runs' / name / 'validate'
        folder.mkdir()
        (folder / 'results.json').write_text(json.dumps({'epoch': 1, 'metrics': {'mAP': 90.}, 'sizes': [], 'a': 1}))
        make_scores(1., 0).save(folder / 'scores.npz')
    assert study(*flags, '--keep') == 0 and study(*flags, '--keep') == 0
    assert 'nothing new' in capsys.readouterr().out
    (tmp_path / 'runs').rename(tmp_path / 'elsewhere')
    assert study(*flags, '--seeds', '2') == 0
    assert order(tmp_path) == ['baseline-seed1', 'splicemix-seed1']
    assert '| Baseline | 2 of 2 | 2 of 2 | **90.50 ± 0.71** | 90.00, 91.00 |' in capsys.readouterr().out
    assert study(*flags, '--epochs', '3') == 2
    assert 'Expected runs of the same recipe in' in capsys.readouterr().err


def test_the_timed_task_is_the_trained_one(tmp_path, monkeypatch):
    make_voc(tmp_path / 'data')
    timed = []
    monkeypatch.setattr(voc_time, 'train_one_epoch', lambda task, *args, **kwargs: timed.append(task))
    recipe = arms.Recipe(model='test_efficientnet', size=64, batch_size=2, freeze=('conv_stem',))
    flags = ('--data-dir', str(tmp_path / 'data'), '--workers', '0')
    voc_time.make_measurement(arms.ARMS['40-splc'], recipe, flags, str(tmp_path / 'output'))(3)
    model = timed[0].get_trainable_module()
    norms = [layer for layer in model.modules() if isinstance(layer, torch.nn.BatchNorm2d)]
    assert model.training and len(norms) > 2 and not any(layer.training for layer in norms)
    assert timed[0].criterion.settings['epoch'] == 3


@pytest.mark.slow
def test_arms_are_timed_with_the_environment_of_runs(tmp_path, monkeypatch, capfd):
    monkeypatch.delenv('MALLOC_MMAP_MAX_', raising=False)
    make_voc(tmp_path / 'data')
    weights = tmp_path / 'weights.pth'
    torch.save(timm.create_model('test_efficientnet').state_dict(), weights)
    with pytest.raises(SystemExit) as stop:  # with the exit code of another process
        voc.main([
            '--data-dir', str(tmp_path / 'data'), '--records', str(tmp_path / 'records'), '--weights', str(weights),
            *FLAGS, '--size', '64', '--freeze', '--arms', 'baseline', 'splicemix-cl', 'batch-augment', '--time', '3'])
    assert stop.value.code == 0
    text = capfd.readouterr().out
    rows = json.loads((tmp_path / 'records' / 'times.json').read_text())
    assert [row['arm'] for row in rows] == ['Baseline', 'SpliceMix-CL', 'Batch Augmentation']
    assert rows[0]['ratio'] == [1., 1., 1.] and all(row['seconds_per_batch'] > 0 for row in rows)
    assert '| Baseline | ' in text and '1.00 (1.00 to 1.00) |' in text
    assert not list((tmp_path / 'data').glob('output*'))


@pytest.mark.slow
def test_the_study_trains_and_evaluates_with_the_commands_of_the_project(tmp_path, monkeypatch, capsys):
    make_voc(tmp_path / 'data')
    weights = tmp_path / 'weights.pth'
    torch.save(timm.create_model('test_efficientnet').state_dict(), weights)
    where = ('--data-dir', str(tmp_path / 'data'), '--output', str(tmp_path / 'runs'))
    voc.main([
        *where, '--weights', str(weights), *FLAGS, '--size', '64', '--epochs', '1', '--warmup-epochs', '0',
        '--arms', 'splicemix-cl', '--seeds', '1'])
    voc.main([*where, '--low-resolution'])
    text = capsys.readouterr().out
    assert '| SpliceMix-CL | 1 of 1 | 1 of 1 | **' in text and '| arm | 64 px | 32 px | 16 px | 9 px |' in text
    run, = read_runs(tmp_path / 'runs')
    assert run.is_finished and run.evaluation['metrics']['mAP'] == pytest.approx(run.curve()[-1], abs=0.01)
    assert len(run.scores().scores) == len(OBJECTS)

    monkeypatch.setattr(pieces, 'BATCH_SIZE', len(OBJECTS))
    monkeypatch.setattr(pieces, 'GRIDS', tsm.parse_grids('1x2,2x2'))
    pieces.main(['--data-dir', str(tmp_path / 'data'), '--checkpoints', str(run.folder / 'last.pth.tar')])
    text = capsys.readouterr().out
    assert '- labels: 0\n' in text and '| images | number | splicemix-cl-seed0 |' in text
    assert re.search(fr'\| regular \| {len(OBJECTS)} \| {run.curve()[-1]:.2f} \(0\.\d+\) \|', text)
    assert re.search(fr'\| 2x2 cells \| {len(OBJECTS)} \| \d+\.\d\d \(\d+\.\d+\) \|', text)
    assert '| layers | regular | 1x2 | 2x2 |' in text
