""" Curves of several runs """
import pytest

from tests.analyses import check_refused, check_written, read_table, write_run
from timm_splicemix.analysis import convergence
from timm_splicemix.analysis.common import read_runs
from timm_splicemix.analysis.convergence import convergence_rows, main


@pytest.fixture
def runs(tmp_path):
    return [
        write_run(tmp_path / 'base', [10., 30., None, 30., 25.], [.9, .4, None, .5, .6]),
        write_run(tmp_path / 'fast', [20., 35., 34.], [.8, .3, .2]),
        write_run(tmp_path / 'poor', [5., 6.], [1.5, .9])]


def test_the_table_has_the_best_and_the_last_values(runs):
    base, fast, poor = convergence_rows(read_runs(runs), 'eval_mAP', 'eval_loss')
    assert list(base.values()) == ['base', 5, 30., 1, 25., 1, .4, 1, .6]
    assert list(fast.values()) == ['fast', 3, 35., 1, 34., 1, .2, 2, .2]
    assert list(poor.values()) == ['poor', 2, 6., 1, 6., None, .9, 1, .9]


def test_the_command_prints_and_draws(runs, tmp_path, capsys):
    output = tmp_path / 'out'
    main([*runs[:2], f'{runs[2]}/summary.csv', '--names', 'A', 'B', 'C', '--output', str(output)])
    check_written(output, 'convergence.csv', 'convergence.png')
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].split() == ['C', '2', '6.00', '1', '6.00', '-', '0.9000', '1', '0.9000']
    assert [row['name'] for row in read_table(output / 'convergence.csv')] == ['A', 'B', 'C']


def test_without_matplotlib_only_the_table_is_written(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(convergence, 'load_pyplot', lambda: None)
    main([*runs, '--output', str(tmp_path / 'out')])
    check_written(tmp_path / 'out', 'convergence.csv')


def test_columns_can_be_chosen(runs, tmp_path, capsys):
    main([*runs, '--metric', 'lr', '--loss', 'train_loss', '--output', str(tmp_path / 'out')])
    assert 'lowest train_loss' in capsys.readouterr().out


def test_runs_are_named_by_the_ends_of_their_paths(runs, tmp_path):
    other = write_run(tmp_path / 'more' / 'base', [1.])
    assert [run.name for run in read_runs([runs[0], other])] == [f'{tmp_path.name}/base', 'more/base']


def test_bad_input_is_one_line_and_exit_code_2(runs, tmp_path, capsys):
    check_refused(main, [tmp_path / 'nowhere'], 'nowhere: it does not exist', capsys)
    check_refused(main, [tmp_path], 'it has no epoch', capsys)
    check_refused(main, [*runs, '--metric', 'eval_map'], 'train_loss, eval_loss, eval_mAP', capsys)
    check_refused(main, [runs[0], runs[0]], 'twice', capsys)
    check_refused(main, [*runs, '--names', 'a'], '3 different --names', capsys)
    never = write_run(tmp_path / 'never', [None, None])
    check_refused(main, [runs[0], never], 'never', capsys)
    (tmp_path / 'never' / 'summary.csv').write_text('epoch,eval_mAP,eval_loss\n0,high,1\n')
    check_refused(main, [never], "'high'", capsys)
