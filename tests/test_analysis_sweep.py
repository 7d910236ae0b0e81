""" mAP over grids and numbers of mixed images """
import statistics

import pytest

from tests.analyses import check_refused, check_written, read_table, write_run
from timm_splicemix.analysis.sweep import count_mixed, describe_grids, main

SETTINGS = {
    'batch_size': 16, 'splicemix_grids': '2x2', 'splicemix_ratio': '0.25', 'splicemix_drop_prob': 0.,
    'splicemix_prob': 0.5, 'splicemix_mode': 'batch', 'splicemix_batch': 'append'}
RUNS = {  # grids, ratio: mAP of each epoch for each seed
    ('', '0.25'): ([50., 60.], [52., 58.]),
    ('2x2', '0.25'): ([61., 60.], [63., 62.], [65., 64.]),
    ('2x2', 0.5): ([58., 57.],),
    ('2x2-1', 'ref'): ([62., 61.], [60., 59.]),
}


@pytest.fixture
def runs(tmp_path):
    return [
        write_run(tmp_path / f'{number}-{seed}', values, splicemix_grids=grids, splicemix_ratio=ratio, seed=seed)
        for number, ((grids, ratio), all_values) in enumerate(RUNS.items()) for seed, values in enumerate(all_values)]


@pytest.mark.parametrize('grids, ratio, expected', [
    ('2x2', '0.25', 4), ('2x2', 0.3, 4), ('1x2', 'ref', 8), ('2x3-2', 'ref', 4), ('3x3', 'ref', 1), ('', '0.25', 0)])
def test_the_number_of_mixed_images_is_that_of_the_mixer(grids, ratio, expected):
    assert count_mixed({**SETTINGS, 'splicemix_grids': grids, 'splicemix_ratio': ratio}) == expected


def test_runs_may_have_classes_that_are_unknown_in_mixed_images():
    assert count_mixed({**SETTINGS, 'splicemix_unknown': ['one person'], 'splicemix_all': ['no finding']}) == 4


def test_a_number_that_depends_on_the_draw_is_a_mean():
    number = count_mixed({**SETTINGS, 'splicemix_grids': '1x2,2x2', 'splicemix_ratio': 'ref'})
    assert 4 < number < 8 and number == count_mixed(
        {**SETTINGS, 'splicemix_grids': '1x2,2x2', 'splicemix_ratio': 'ref', 'seed': 7})


def test_grids_are_described_with_dropped_cells():
    assert describe_grids(SETTINGS) == '2x2'
    assert describe_grids({**SETTINGS, 'splicemix_drop_prob': 0.3}) == '2x2 drop 0.3'
    assert describe_grids({**SETTINGS, 'splicemix_drop_prob': 0.3, 'splicemix_grids': '2X2-1, 1x1'}) == '2x2-1,1x1'
    assert describe_grids({**SETTINGS, 'splicemix_grids': ''}) == 'baseline'


@pytest.mark.parametrize('epoch', ['best', 'last'])
def test_means_and_deviations_are_over_seeds(runs, tmp_path, capsys, epoch):
    main([*runs, '--epoch', epoch, '--output', str(tmp_path / 'out')])
    check_written(tmp_path / 'out', 'sweep.csv', 'sweep.png')
    rows = read_table(tmp_path / 'out' / 'sweep.csv')
    assert [(row['grids'], row['mixed'], row['runs']) for row in rows] == [
        ('baseline', '0', '2'), ('2x2', '4', '3'), ('2x2', '8', '1'), ('2x2-1', '5', '2')]
    chosen = [[max(values) if epoch == 'best' else values[-1] for values in some] for some in RUNS.values()]
    for row, values in zip(rows, chosen):
        assert float(row['eval_mAP']) == pytest.approx(statistics.mean(values))
        assert float(row['gain']) == pytest.approx(statistics.mean(values) - statistics.mean(chosen[0]))
        if len(values) > 1:
            assert float(row['deviation']) == pytest.approx(statistics.stdev(values))
        else:
            assert row['deviation'] == 'nan'
    line = capsys.readouterr().out.splitlines()[3].split()
    assert line[:3] == ['2x2', '8', '1'] and line[4] == '-'


def test_without_a_baseline_there_is_no_gain(runs, tmp_path, capsys):
    main([*runs[2:], '--output', str(tmp_path / 'out')])
    assert {row['gain'] for row in read_table(tmp_path / 'out' / 'sweep.csv')} == {'nan'}


def test_an_unfinished_run_is_reported(runs, tmp_path, caplog):
    cut = write_run(tmp_path / 'cut', [50.], seed=9, epochs=2)
    main([*runs, cut, '--ignore', 'epochs', '--output', str(tmp_path / 'out')])
    assert f'{cut} has 1 of 2 epochs' in caplog.text


def test_bad_input_is_one_line_and_exit_code_2(runs, tmp_path, capsys):
    def check(message, *argv, **settings):
        other = write_run(tmp_path / 'other', [1., 2.], **{'seed': 9, **settings})
        check_refused(main, [*runs, other, *argv], message, capsys)

    check('two of seed 1 with baseline', seed=1)
    check('lr 0.1 in', lr=0.2)
    check('splicemix_mode batch in', splicemix_grids='2x2', splicemix_mode='elem')
    check("'2y2'", splicemix_grids='2y2')
    check("'many'", splicemix_grids='2x2', splicemix_ratio='many')
    check("column 'eval_map'", '--metric', 'eval_map')
    # Flags of SpliceMix may differ in runs without it, and so may ignored flags.
    other = write_run(tmp_path / 'other', [1., 2.], seed=9, splicemix_mode='elem', lr=0.2)
    main([*runs, other, '--ignore', 'lr', '--output', str(tmp_path / 'out')])
    capsys.readouterr()
    (tmp_path / 'other' / 'args.yaml').write_text('- a\n')
    check_refused(main, [*runs, other], "'name: value'", capsys)
    (tmp_path / 'other' / 'args.yaml').unlink()
    check_refused(main, [*runs, other], 'args.yaml', capsys)
