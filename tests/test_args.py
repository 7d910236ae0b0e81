import argparse

import pytest

import timm_splicemix as tsm
from timm_splicemix.args import CommandParser, command
from timm_splicemix.errors import UsageError


def parse(*argv):
    parser = argparse.ArgumentParser()
    tsm.add_splicemix_args(parser)
    return parser.parse_args(argv)


def test_the_flags_have_the_defaults_of_the_mixer():
    mixer = tsm.SpliceMix(**tsm.splicemix_kwargs(parse('--splicemix-grids', '1x2,2x2,2x3')))
    assert repr(mixer) == repr(tsm.SpliceMix())


def test_every_flag_reaches_the_mixer():
    args = parse(
        '--splicemix-grids', '2x3-2', '--splicemix-ratio', 'ref', '--splicemix-drop-prob', '0.1',
        '--splicemix-prob', '0.5', '--splicemix-mode', 'elem', '--splicemix-batch', 'fixed',
        '--splicemix-unknown', 'dog', 'cat', '--splicemix-all', 'none')
    expected = tsm.SpliceMix(
        '2x3-2', ratio='ref', drop_prob=0.1, prob=0.5, mode='elem', batch='fixed', unknown_classes=[0, 2],
        all_classes=[1])
    assert repr(tsm.SpliceMix(**tsm.splicemix_kwargs(args, ['cat', 'none', 'dog']))) == repr(expected)
    assert set(vars(args)) == {
        f'splicemix_{name}' for name in (
            'grids', 'ratio', 'drop_prob', 'prob', 'mode', 'batch', 'unknown', 'all')}


def test_splicemix_is_off_by_default():
    assert parse().splicemix_grids == ''


@pytest.mark.parametrize('flag, value, message', [
    ('ratio', 'half', "Expected a number or 'ref', but got 'half'"),
    ('prob', '1.5', "Expected a finite number from 0 to 1, but got '1.5'"),
])
def test_a_bad_value_is_refused_by_any_parser(flag, value, message, capsys):
    with pytest.raises(SystemExit):
        parse(f'--splicemix-{flag}', value)
    assert f'argument --splicemix-{flag}: {message}' in capsys.readouterr().err


def test_a_usage_error_is_one_line_and_exit_code_2(capsys, monkeypatch):
    @command
    def main(argv=None):
        raise UsageError('Expected this,\n but got that.')

    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    assert capsys.readouterr().err == 'error: Expected this, but got that.\n'
    monkeypatch.setenv('TSM_TRACEBACK', '1')
    with pytest.raises(UsageError):
        main([])


@pytest.mark.parametrize('kind', [KeyError, ValueError, OSError, ImportError])
def test_any_other_exception_keeps_its_traceback(kind):
    @command
    def main(argv=None):
        raise kind('defect')

    with pytest.raises(kind):
        main([])


def test_an_unknown_flag_is_one_line_and_exit_code_2(capsys):
    with pytest.raises(SystemExit) as caught:
        CommandParser(prog='thing').parse_args(['--nonsense'])
    assert caught.value.code == 2
    assert capsys.readouterr().err == 'thing: error: unrecognized arguments: --nonsense (see --help)\n'


def test_a_parser_lists_its_flags_and_shows_their_defaults():
    parser = CommandParser()
    parser.add_argument('paths', nargs='+', help='files')
    group = parser.add_argument_group('Group')
    group.add_argument('--size', default=3, help='a size')
    group.add_argument('--sizes', default=[1, 2], help='sizes')
    one_of = group.add_mutually_exclusive_group()
    actions = [one_of.add_argument('--this', action='store_true'), one_of.add_argument('--that', default='')]
    other = parser.add_mutually_exclusive_group().add_argument('--alone', default=0, help='a number (default: zero)')
    assert list(parser.flags) == ['paths', 'size', 'sizes', 'this', 'that', 'alone']
    assert parser.exclusive == [actions, [other]]
    helps = {name: action.help for name, action in parser.flags.items()}
    assert helps == {
        'paths': 'files', 'size': 'a size (default: %(default)s)', 'sizes': 'sizes (default: 1 2)', 'this': None,
        'that': None, 'alone': 'a number (default: zero)'}
    args = parser.parse_args(['file', '--this', '--size', '4'])
    assert vars(args) == {'paths': ['file'], 'size': '4', 'sizes': [1, 2], 'this': True, 'that': '', 'alone': 0}
