""" Several models at several image sizes """
import pytest
import torch

from tests.analyses import check_refused, check_written, random_scores, read_table, write_result
from timm_splicemix.analysis.low_resolution import main

NAMES = ('ant', 'bee')
SIZES = {448: (80., 70.), 224: (75.5, 60.), 64: (30., None)}


def make_sizes(values, trained=448):
    return [{'size': size, 'trained': size == trained, 'loss': 0.1, 'mAP': mAP, 'CF1': f1}
            for size, (mAP, f1) in values.items()]


@pytest.fixture
def results(tmp_path):
    scores = random_scores(torch.tensor([[1, 0], [0, 1], [1, 1]], dtype=torch.int8), NAMES)
    other = {448: (79., 71.), 112: (50., 40.), 64: (45., 35.)}
    return [
        write_result(tmp_path / 'a', scores, sizes=make_sizes(SIZES)),
        write_result(tmp_path / 'b', scores, sizes=make_sizes(other))]


def test_each_size_is_a_row_and_changes_are_from_the_training_size(results, tmp_path, capsys):
    main([*results, '--names', 'A', 'B', '--output', str(tmp_path / 'out')])
    check_written(tmp_path / 'out', 'low_resolution.csv', 'low_resolution.png')
    assert [line.split() for line in capsys.readouterr().out.splitlines()[3:7]] == [
        ['448', '*', '80.00', '+0.00', '79.00', '+0.00'], ['224', '75.50', '-4.50', '-', '-'],
        ['112', '-', '-', '50.00', '-29.00'], ['64', '30.00', '-50.00', '45.00', '-34.00']]
    rows = read_table(tmp_path / 'out' / 'low_resolution.csv')
    assert [row['size'] for row in rows] == ['448', '224', '112', '64']
    assert rows[1] == {'size': '224', 'A mAP': '75.5', 'A change': '-4.5', 'B mAP': '', 'B change': ''}


def test_another_metric_can_be_compared_and_may_have_missing_values(results, tmp_path, capsys):
    main([results[0], '--metric', 'CF1', '--output', str(tmp_path / 'out')])
    assert [line.split() for line in capsys.readouterr().out.splitlines()[3:6]] == [
        ['448', '*', '70.00', '+0.00'], ['224', '60.00', '-10.00'], ['64', '-', '-']]


def test_without_output_each_run_gets_a_new_folder(results, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        main(results)
    assert sorted(path.name for path in (tmp_path / 'output' / 'analysis').iterdir()) == [
        'low_resolution', 'low_resolution-2']


def test_bad_input_is_one_line_and_exit_code_2(results, tmp_path, capsys):
    scores = random_scores(torch.tensor([[1, 0], [0, 1], [1, 1]], dtype=torch.int8), NAMES)
    one = write_result(tmp_path / 'one', scores)
    check_refused(main, [*results, one], '--eval-sizes', capsys)
    check_refused(main, [*results, '--metric', 'top7'], "but got 'top7'", capsys)
    check_refused(main, [tmp_path], 'results.json', capsys)
    check_refused(main, [], 'RESULT', capsys)
    (tmp_path / 'file').write_text('')
    check_refused(main, [*results, '--output', tmp_path / 'file'], 'file', capsys)
