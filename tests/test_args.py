import argparse

import pytest

import timm_splicemix as tsm
from timm_splicemix.args import CommandParser, command


def parse(*argv):
    parser = argparse.ArgumentParser()
    tsm.add_splicemix_args(parser)
    return parser.parse_args(argv)


def test_flags_make_the_mixer_of_the_same_defaults():
    mixer = tsm.SpliceMix(**tsm.splicemix_kwargs(parse('--splicemix-grids', '1x2,2x2,2x3')))
    assert repr(mixer) == repr(tsm.SpliceMix())


def test_every_flag_reaches_the_mixer():
    args = parse(
        '--splicemix-grids', '2x3-2', '--splicemix-ratio', 'ref', '--splicemix-drop-prob', '0.1',
        '--splicemix-prob', '0.5', '--splicemix-mode', 'elem', '--splicemix-batch', 'fixed')
    expected = tsm.SpliceMix('2x3-2', ratio='ref', drop_prob=0.1, prob=0.5, mode='elem', batch='fixed')
    assert repr(tsm.SpliceMix(**tsm.splicemix_kwargs(args))) == repr(expected)
    assert set(vars(args)) == {
        f'splicemix_{name}' for name in ('grids', 'ratio', 'drop_prob', 'prob', 'mode', 'batch')}


def test_splicemix_is_off_by_default():
    assert parse().splicemix_grids == ''


def test_a_ratio_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="Expected --splicemix-ratio to be a number or 'ref', but got 'half'"):
        tsm.splicemix_kwargs(parse('--splicemix-ratio', 'half'))


def test_a_mistake_in_a_command_is_one_line_and_exit_code_2(capsys, monkeypatch):
    @command
    def main(argv=None):
        raise ValueError('Expected this,\n but got that.')

    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    assert capsys.readouterr().err == 'error: Expected this, but got that.\n'
    monkeypatch.setenv('TSM_TRACEBACK', '1')
    with pytest.raises(ValueError):
        main([])


def test_a_defect_in_a_command_keeps_its_traceback():
    @command
    def main(argv=None):
        raise KeyError('defect')

    with pytest.raises(KeyError):
        main([])


def test_a_flag_that_does_not_exist_is_one_line_and_exit_code_2(capsys):
    with pytest.raises(SystemExit) as caught:
        CommandParser(prog='thing').parse_args(['--nonsense'])
    assert caught.value.code == 2
    assert capsys.readouterr().err == 'thing: error: unrecognized arguments: --nonsense (see --help)\n'
