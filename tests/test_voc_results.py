""" Tables, pictures and documents of the VOC study """
import json
import re
import shutil

import pytest
import torch
import voc
import voc_arms as arms
import voc_pictures as pictures
import voc_records as store
import voc_results as results

from timm_splicemix.data.readers.voc import VOC_CLASSES
from timm_splicemix.results import Scores

TIMES = [
    {'arm': 'Baseline', 'rounds': 8, 'seconds_per_batch': 1.25, 'ratio': [1., 1., 1.]},
    {'arm': 'SpliceMix', 'rounds': 8, 'seconds_per_batch': 1.5, 'ratio': [1.18, 1.204, 1.25]}]


def write_run(output, name, seed, values, scores=None, epochs=3):
    folder = output / f'{name}-seed{seed}'
    finished = len(values) == epochs
    store.write_record(folder, {
        'arm': name, 'seed': seed, 'epochs': epochs, 'recipe': ['--lr', '0.02', '--img-size', '32'], 'flags': [],
        'weights': 'lite0.pth', 'finished': finished, 'seconds': 1800.})
    lines = [f'{epoch},{value},60,70' for epoch, value in enumerate(values)]
    (folder / 'summary.csv').write_text('\n'.join(['epoch,eval_mAP,eval_CF1,eval_OF1', *lines]) + '\n')
    if scores is not None:
        sizes = [{'size': 32 // part, 'trained': part == 1, 'mAP': values[-1] / part} for part in (1, 2)]
        (folder / 'validate').mkdir()
        content = {'epoch': epochs - 1, 'metrics': {}, 'sizes': sizes}
        (folder / 'validate' / 'results.json').write_text(json.dumps(content))
        scores.save(folder / 'validate' / 'scores.npz')


def make_scores(noise, seed):
    generator = torch.Generator().manual_seed(7)
    targets = (torch.rand(60, 20, generator=generator) < 0.3).to(torch.int8)
    drawn = torch.randn(60, 20, generator=torch.Generator().manual_seed(seed))
    return Scores(targets + noise * drawn, targets, VOC_CLASSES)


@pytest.fixture
def some_runs(tmp_path):
    """Three finished runs of the baseline, two of SpliceMix, and two unfinished runs."""
    output = tmp_path / 'runs'
    for seed, last in enumerate((80., 81., 85.)):
        write_run(output, 'baseline', seed, [70., 86., last], make_scores(1., seed))
    for seed, last in enumerate((82., 82.)):
        write_run(output, 'splicemix', seed, [60., 75., last], make_scores(0.3, 10 + seed))
    write_run(output, 'splicemix', 2, [60., 99.])
    write_run(output, '40-splicemix', 0, [50.])
    return output


def test_the_table_has_last_epochs_of_finished_runs_and_gains_of_the_same_seeds(some_runs):
    report = results.Report(store.read_runs(some_runs), num_samples=50)
    tables, _, sizes = report.text().partition('### Low resolution')
    rows = {cells[1]: cells[2:-1] for cells in (
        [cell.strip() for cell in line.split('|')] for line in tables.splitlines() if line.startswith('|'))}
    assert rows['Baseline'][:5] == ['3 of 3', '3 of 3', '**82.00 ± 2.65**', '80.00, 81.00, 85.00', '86.00 ± 0.00']
    assert rows['SpliceMix'][:4] == ['2 of 3', '3 of 3, 2 of 3', '**82.00 ± 0.00**', '82.00, 82.00']
    assert rows['SpliceMix'][7] == '+1.50 ± 0.71'  # 2 and 1 of seeds 0 and 1
    low, high = map(float, rows['SpliceMix'][8].split(' to '))
    assert 0 < low < high  # much less noise
    assert rows['SpliceMix'][9] == '94.6 (+1.3)' and rows['Baseline'][9] == '93.3'
    assert rows['SpliceMix, rule "40 %"'][2:4] == ['-', '-']
    assert '- SpliceMix, seed 2: 2 of 3 epochs, mAP 99.00' in sizes
    assert '| SpliceMix | 82.00 ± 0.00 | 41.00 ± 0.00 |' in sizes


def test_numbers_that_the_paper_quotes_have_no_gain():
    cells = {name: results.paper_cell(arm) for name, arm in arms.ARMS.items()}
    assert (cells['40-baseline'], cells['40-splicemix']) == ('74.4', '76.0 (+1.6)')
    assert (cells['40-asl'], cells['single-splc'], cells['baseline-more']) == ('72.7', '73.2', '')


def test_a_mean_that_is_rounded_to_zero_has_no_minus():
    assert results.mean_and_std([-0.001], sign='+') == '+0.00' and results.mean_and_std([-0.01], sign='+') == '-0.01'
    assert results.mean_and_std([1., 2.], digits=1) == '1.5 ± 0.7'


def test_an_arm_has_no_gain_over_itself(some_runs):
    low, high = results.Report(store.read_runs(some_runs), 50).interval(arms.ARMS['baseline'])
    assert low == high == 0


def test_runs_of_another_recipe_or_of_other_images_are_not_compared(some_runs):
    other = make_scores(1., 0)
    other.targets[0, 0] = 1 - other.targets[0, 0]
    other.save(some_runs / 'splicemix-seed1' / 'validate' / 'scores.npz')
    report = results.Report(store.read_runs(some_runs), 20)
    for draw in (report.text, lambda: pictures.draw_classes(report, some_runs / 'classes.png')):
        with pytest.raises(ValueError, match=r'splicemix-seed1 in .* has others'):
            draw()
    content = store.read_record(some_runs / 'baseline-seed1')
    store.write_record(some_runs / 'baseline-seed1', {**content, 'recipe': ['--lr', '0.1', '--img-size', '32']})
    with pytest.raises(ValueError, match=r'baseline-seed0 in .* and baseline-seed1 in .* differ in recipe'):
        results.Report(store.read_runs(some_runs))


def test_runs_that_were_kept_and_others_are_in_the_order_of_arms(some_runs, tmp_path):
    records = tmp_path / 'records'
    store.keep_runs([run for run in store.read_runs(some_runs) if run.name == 'splicemix-seed0'], records)
    shutil.rmtree(some_runs / 'splicemix-seed0')
    assert [run.name for run in voc.all_runs(some_runs, records)] == [
        *(f'baseline-seed{seed}' for seed in range(3)), *(f'splicemix-seed{seed}' for seed in range(3)),
        '40-splicemix-seed0']


def test_a_report_without_runs(tmp_path):
    report = results.Report(store.read_runs(tmp_path / 'nothing'))
    assert report.text() == 'No runs yet.'
    assert not any(draw(report, tmp_path / 'picture.png') for _, draw in pictures.PICTURES.values())


def test_epochs_without_metrics_are_left_out_of_curves(tmp_path):
    write_run(tmp_path / 'runs', 'baseline', 0, ['', 75., '', 82.], epochs=4)
    write_run(tmp_path / 'runs', 'splicemix', 0, [''], epochs=4)
    report = results.Report(store.read_runs(tmp_path / 'runs'))
    scored, unscored = report.runs
    assert (scored.scored_epochs(), scored.curve()) == ([2, 4], [75., 82.])
    assert (unscored.scored_epochs(), unscored.curve()) == ([], [])
    assert '| Baseline | 1 of 1 | 4 of 4 | **82.00** | 82.00 | 82.00 |' in report.text()
    assert report.text().endswith('- SpliceMix, seed 0: 1 of 4 epochs')
    assert pictures.draw_curves(report, tmp_path / 'curves.png')


def test_results_are_written_between_the_marks_of_their_section(some_runs, tmp_path, capsys):
    page = tmp_path / 'RESULTS.md'
    begin, end = results.marks('runs')
    other = '\n'.join(results.marks('voc-32'))
    page.write_text(f'Before\n{begin}\nold\n{end}\nAfter\n{other}\n')
    records = tmp_path / 'records'
    records.mkdir()
    (records / 'times.json').write_text(json.dumps(TIMES))
    flags = ('--output', str(some_runs), '--records', str(records), '--bootstrap', '20')
    for _ in range(2):
        voc.main([*flags, '--write-docs', str(page)])
        text = page.read_text()
        assert text.startswith(f'Before\n{begin}\n5 finished runs') and 'old' not in text
        assert text.endswith(f'{end}\nAfter\n{other}\n') and '3.5 hours' in text
        assert 'weights lite0.pth' in text and '| SpliceMix | 1.50 | 1.20 (1.18 to 1.25) |' in text
        files = re.findall(r'!\[.*\]\((.*)\)', text)
        assert files == ['runs-curves.png', 'runs-sizes.png', 'runs-classes.png']
        assert all((tmp_path / name).stat().st_size > 1000 for name in files)
    (tmp_path / 'plain.md').write_text('Nothing\n')
    with pytest.raises(SystemExit):
        voc.main([*flags, '--write-docs', str(tmp_path / 'plain.md')])
    assert (tmp_path / 'plain.md').read_text() == 'Nothing\n'


def test_the_headline_shows_the_main_arms_beside_the_paper(some_runs, tmp_path, monkeypatch):
    readme = tmp_path / 'README.md'
    readme.write_text('Before\n{}\nold\n{}\nAfter\n'.format(*results.marks('runs')))
    (tmp_path / 'RESULTS.md').write_text('\n'.join(results.marks('runs')))
    monkeypatch.setattr(voc, 'DOCUMENT', tmp_path / 'RESULTS.md')
    monkeypatch.setattr(voc, 'README', readme)
    voc.main(['--output', str(some_runs), '--bootstrap', '20', '--write-docs', str(tmp_path / 'RESULTS.md')])
    assert 'old' in readme.read_text()  # these are not the runs that it shows
    monkeypatch.setattr(voc, 'HEADLINE', 'runs')
    voc.main(['--output', str(some_runs), '--bootstrap', '20', '--write-docs', str(tmp_path / 'RESULTS.md')])
    text = readme.read_text()
    assert text.startswith('Before\n') and text.endswith('\nAfter\n') and 'old' not in text
    assert '| Baseline | 3 | 82.0 ± 2.6 |  |  | - | 93.3 |' in text
    assert re.search(r'\| SpliceMix \| 2 \| 82\.0 ± 0\.0 \| \+1\.50 ± 0\.71 \| \+.* to \+.* \|', text)
    assert '| - | 94.6 (+1.3) |' in text
    assert 'SpliceMix-CL' not in text


def test_kept_runs_give_the_same_table_and_contain_no_path(some_runs, tmp_path):
    environment = {'timm_splicemix': '1', 'timm': '2', 'torch': '3', 'python': '4', 'command': str(tmp_path)}
    (some_runs / 'baseline-seed0' / 'environment.yaml').write_text(json.dumps(environment))
    records = tmp_path / 'records'
    flags = ('--output', str(some_runs), '--records', str(records), '--bootstrap', '20')
    before = results.Report(store.read_runs(some_runs), 20)
    voc.main([*flags, '--keep'])
    kept = store.read_records(records)
    assert [run.name for run in kept] == [
        *(f'baseline-seed{seed}' for seed in range(3)), 'splicemix-seed0', 'splicemix-seed1']
    after = results.Report(kept, 20)
    for arm in ('baseline', 'splicemix'):
        arm = results.ARMS[arm]
        assert after.interval(arm) == pytest.approx(before.interval(arm), abs=0.05)
    assert after.runs[0].environment == {name: environment[name] for name in environment if name != 'command'}
    files = [file for file in records.rglob('*') if file.is_file()]
    assert {file.name for file in files} == {'runs.json', 'scores.npz'}
    assert not [file for file in files if str(tmp_path).encode() in file.read_bytes()]


def test_the_documents_have_marks_for_results():
    assert all(voc.README.read_text(encoding='utf-8').count(mark) == 1 for mark in results.marks(voc.HEADLINE))
    text = voc.DOCUMENT.read_text(encoding='utf-8')
    for section in ('voc-224', 'voc-224-20', 'voc-128', 'voc-128-20'):
        assert all(text.count(mark) == 1 for mark in results.marks(section))
