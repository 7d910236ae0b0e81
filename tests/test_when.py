import csv
import json
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.analyses import random_scores, write_result
from tests.conftest import REPOSITORY
from tests.helpers import rng
from tests.test_voc import make_voc

FOLDER = REPOSITORY / 'experiments' / 'when'
sys.path.append(str(FOLDER))

import keep_quickstart  # noqa: E402 - found by the line above
import lists  # noqa: E402
import plan  # noqa: E402
import queue_runs  # noqa: E402
import report  # noqa: E402

from timm_splicemix.train import build_parser  # noqa: E402

# Stands for run_one.py: writes epochs until it is stopped or done
RUN_ONE = '''
import json, os, sys, time
name, output = sys.argv[1], sys.argv[sys.argv.index('--output') + 1]
with open(os.path.join(output, 'order.txt'), 'a') as file:
    file.write(name + '\\n')
time.sleep(float(os.environ.get('SECONDS', '0')))
folder = os.path.join(output, name)
with open(os.path.join(folder, 'result.json'), 'w') as file:
    lr = float(name.partition('-lr')[2])
    json.dump({'name': name, 'metrics': {'val': {'mAP': lr}}, 'core_seconds': 1, 'samples': {}}, file)
'''


def make_result(name, mAP, loss=0.2, train_loss=0.1):
    run = plan.find_run(name)
    return {
        'name': name, 'setting': run.setting.name, 'images': run.images, 'arm': run.arm, 'seed': run.seed, 'lr': run.lr,
        'metrics': {'val': {'mAP': mAP, 'loss': loss}}, 'curve': {'train_loss': [1., train_loss]}, 'core_seconds': 10,
        'samples': {'val': [round(100 * mAP), round(100 * mAP) + 100]}}


def search_scores(recipe, best):
    return {run.name: float(run.lr == best) for arm in plan.ARMS for run in plan.search_runs(recipe, arm)}


def test_runs_that_depend_on_the_search_wait_for_it():
    names = [run.name for run in plan.runs_in_order({})]
    assert names[0] == 'shapes-12x12-800-plain-seed100-lr0.002'
    assert not any(name.startswith('narrow') for name in names)
    names = [run.name for run in plan.runs_in_order(search_scores(plan.SHAPES, 0.008))]
    assert 'narrow-12x12-400-plain-seed1-lr0.008' in names
    assert not any('shufflenet' in name and 'seed0' in name for name in names)
    assert 'voc-160-300-plain-seed0-lr0.02' in names  # its recipe has a single rate
    assert len(names) == len(set(names))


def test_every_run_has_the_steps_of_its_setting_and_flags_that_train_accepts():
    for run in plan.runs_in_order({}, assume=True):
        args = build_parser().parse_args(run.flags())
        steps = run.setting.epochs, run.setting.batches
        assert (args.epochs, args.train_batches_per_epoch, args.batch_size) == (*steps, 32)
        assert args.seed == run.seed
        assert bool(args.splicemix_grids) == (run.arm != 'plain')
        assert bool(args.splicemix_cl) == (plan.without_weight(run.arm) == 'splicemix-cl')
        assert args.splicemix_weight == (0.25 if run.arm.endswith('-quarter') else None)
        assert plan.find_run(run.name) == run


def test_voc_lists_are_seeded_and_nested_and_the_search_has_its_own(tmp_path):
    data = tmp_path / 'data'
    make_voc(data / 'voc')

    def images(run):
        files, notes = lists.make_lists(run, data)
        assert notes['train'].startswith(f'{run.images} images, sha256 ')
        return {name: [row['image'] for row in csv.DictReader(file.open())] for name, file in files.items()}

    number = len(lists.create_dataset('voc/2007', data / 'voc', 'train-only'))
    setting = plan.SETTINGS['voc-160']
    small, large = (images(plan.Run(setting, count, 'plain', 0, 0.02))['train'] for count in (1, number))
    assert large[:1] == small
    assert len(set(large)) == number
    search = images(plan.Run(setting, 1, 'plain', plan.SEARCH_SEED, 0.02))
    assert not set(search['train']) & set(search['val'])
    assert set(search['train']) | set(search['val']) == set(large)


def test_voc_lists_have_the_labels_of_the_data_set(tmp_path):
    data = tmp_path / 'data'
    make_voc(data / 'voc')
    files, _ = lists.make_lists(plan.Run(plan.SETTINGS['voc-160'], 1, 'plain', 0, 0.02), data)
    listed = lists.create_dataset('csv', data, 'val', annotations=files['val']).reader
    official = lists.create_dataset('voc/2007', data / 'voc', 'val').reader
    assert listed.class_names == official.class_names
    assert torch.equal(listed.targets, official.targets)


@pytest.fixture
def command(tmp_path, monkeypatch):
    for name in ('plan.py', 'queue_runs.py'):
        (tmp_path / name).write_text((FOLDER / name).read_text())
    (tmp_path / 'run_one.py').write_text(RUN_ONE)
    return [
        sys.executable, str(tmp_path / 'queue_runs.py'), 'run', '--data', str(tmp_path), '--output',
        str(tmp_path / 'runs'), '--only', 'seed100', '--pause-file', str(tmp_path / 'pause')]


def test_queue_runs_all_once_and_collect_appends_them_once(command, tmp_path):
    for _ in range(2):
        subprocess.run([*command, '--jobs', '9'], check=True, timeout=60)
    wanted = [run.name for arm in plan.ARMS for run in plan.search_runs(plan.SHAPES, arm)]
    assert sorted((tmp_path / 'runs' / 'order.txt').read_text().split()) == sorted(wanted)
    assert len(queue_runs.collect(tmp_path / 'runs', tmp_path / 'records')) == len(wanted)
    assert queue_runs.collect(tmp_path / 'runs', tmp_path / 'records') == []
    finished = queue_runs.read_finished(None, tmp_path / 'records')
    assert plan.chosen_rate(plan.SHAPES, 'plain', queue_runs.scores_of(finished)) == 0.008


def test_queue_suspends_its_runs_and_stops_them(command, tmp_path, monkeypatch):
    monkeypatch.setenv('SECONDS', '300')
    queue = subprocess.Popen([*command, '--jobs', '1'], stdout=subprocess.PIPE, text=True)
    try:
        assert 'Queue with' in queue.stdout.readline()
        assert 'are left out' in queue.stdout.readline()
        name = queue.stdout.readline().split()[-1].rstrip('.')
        process = int((tmp_path / 'runs' / name / 'lock').read_text())

        def state():
            with open(f'/proc/{process}/stat') as file:
                return file.read().rpartition(')')[2].split()[0]

        (tmp_path / 'pause').touch()
        assert 'Paused' in queue.stdout.readline()
        deadline = time.monotonic() + 10
        while state() != 'T' and time.monotonic() < deadline:
            time.sleep(0.05)
        assert state() == 'T'
        queue.send_signal(signal.SIGTERM)
        assert queue.wait(30) == 0
        with pytest.raises(OSError, match='No such'):
            state()
    finally:
        queue.kill()


def test_report_pairs_seeds_and_uses_the_chosen_rate(tmp_path, capsys):
    results = [make_result(name, 100 * score) for name, score in search_scores(plan.SHAPES, 0.004).items()]
    for images, gain in ((200, 3), (400, 2), (800, -0.5), (2000, -2)):
        for seed in (0, 1):
            for arm in plan.ARMS:
                name = f'narrow-3x3-{images}-{arm}-seed{seed}-lr0.004'
                mAP = 80. + seed + (gain + seed if arm != 'plain' else 0)
                results.append(make_result(name, mAP, loss=0.1 + 0.02 * gain))
    results.append(make_result('narrow-3x3-400-plain-seed0-lr0.008', 99.))
    for result in results:
        (tmp_path / result['name']).mkdir()
        (tmp_path / result['name'] / 'result.json').write_text(json.dumps(result))
    report.main([
        '--records', str(tmp_path / 'records'), '--output', str(tmp_path), '--voc-records', str(tmp_path / 'none')])
    text = capsys.readouterr().out
    assert '**0.004: 100.0**' in text
    row = next(line for line in text.splitlines() if line.startswith('| shapes, 3x3 map | 400 |'))
    assert '80.5 ± 0.7 | +2.5 ± 0.7 (+2.5 to +2.5)' in row
    assert row.endswith('| 0.100 | 0.140 | 1.4 ± 0.0 |')
    assert 'SpliceMix, gap above' in text
    assert 'right in 7 of 8 pairs' in text


def test_runs_of_the_quickstart_are_kept_and_reported(tmp_path, capsys):
    targets = (torch.rand(40, 3, generator=rng()) < 0.5).to(torch.int8)
    folder = tmp_path / 'images200-epochs70-seed4'
    for number, arm in enumerate(plan.ARMS):
        for place in keep_quickstart.PLACES:
            write_result(folder / arm / place, random_scores(targets, 'abc', number))
        (folder / arm / 'summary.csv').write_text('epoch,train_task_loss,eval_loss,eval_mAP\n0,0.1,0.2,60\n')
        (folder / arm / 'args.yaml').write_text('epochs: 70\nseed: 4\nlr: 0.004\n')
    flags = ['--records', str(tmp_path / 'records')]
    for _ in range(2):
        keep_quickstart.main([str(folder), *flags])
    assert capsys.readouterr().out.splitlines() == [
        *(f'quickstart-70-200-{arm}-seed4-lr0.004' for arm in plan.ARMS), 'No new runs.']
    report.main([*flags, '--voc-records', str(tmp_path)])
    mAPs = [
        json.loads((folder / arm / 'val' / 'results.json').read_text())['metrics']['mAP']
        for arm in ('plain', 'splicemix')]
    title = plan.SETTINGS['quickstart-70'].title
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith(f'| {title}'))
    assert row.startswith(f'| {title} | 200 | 1 | {mAPs[0]:.1f} | {mAPs[1] - mAPs[0]:+.1f} (')


def test_report_has_the_runs_of_the_voc_study(tmp_path, capsys):
    report.main(['--records', str(tmp_path)])
    mAP = '85.1 ± 0.2 | +1.1 ± 0.4 | +0.5'  # as in its RESULTS.md
    row = f'| VOC study, 224 px, 20 epochs | 2,500 | 2 / 2 / 1 | {mAP} | 0.025 | 0.079 | 3.2 ± 0.1 |'
    assert row in capsys.readouterr().out.splitlines()


def test_the_documents_have_the_numbers_of_the_records(capsys):
    report.main([])
    text = capsys.readouterr().out
    table = text.partition('## Gains by the gap of the plain model\n\n')[2].partition('\n\n')[0]
    assert len(table.splitlines()) > 8
    page = (REPOSITORY / 'docs' / 'when.md').read_text()
    assert table in page
    hits = re.findall(r'gap above .*? right in (\d+ of )(\d+) pairs, with each cell left out in (\d+)', text)
    assert len(hits) == 2
    for best, pairs, left_out in hits:
        assert f'{best}{pairs}' in page and f'{left_out} of {pairs}' in page
    weights = text.partition('## Less weight for mixed images\n\n')[2].partition('\n\n')[0]
    assert len(weights.splitlines()) > 4 and weights in page
    count = text.partition(' runs')[0]
    assert f'{count} runs' in (FOLDER / 'README.md').read_text()


def test_picture_of_the_gains_is_drawn(tmp_path):
    report.main(['--picture', str(tmp_path / 'gain.png')])
    assert (tmp_path / 'gain.png').stat().st_size > 10_000


def test_threshold_separates_gains_from_losses():
    points = [(0.01, -2.), (0.02, -1.), (0.1, 1.), (0.2, 2.)]
    assert report.best_threshold(points) == pytest.approx(0.06)
    assert report.count_hits(points, 0.06) == 4
    assert report.count_hits(points, 0.15) == 3
