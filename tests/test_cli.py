import importlib
import re
import sys

import pytest

import timm_splicemix as tsm
from timm_splicemix import cli
from timm_splicemix.args import CommandParser

MODULES = {
    **{(name,): f'timm_splicemix.{name}' for name in cli.COMMANDS if name != 'analysis'},
    **{('analysis', name): f'timm_splicemix.analysis.{name}' for name in cli.ANALYSES},
}


@pytest.mark.parametrize('words', MODULES, ids=' '.join)
def test_a_command_runs_its_module_with_the_remaining_arguments(words, monkeypatch):
    module = importlib.import_module(MODULES[words])
    calls = []
    monkeypatch.setattr(module, 'main', calls.append)
    cli.main([*words, '--flag', 'value'])
    assert calls == [['--flag', 'value']]


def test_the_arguments_default_to_those_of_the_process(monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['timm-splicemix', '--version'])
    cli.main()
    assert capsys.readouterr().out == f'timm-splicemix {tsm.__version__}\n'


@pytest.mark.parametrize('argv, commands', [
    ([], cli.COMMANDS), (['--help'], cli.COMMANDS), (['analysis'], cli.ANALYSES), (['analysis', '-h'], cli.ANALYSES)])
def test_help_lists_each_command_in_one_line(argv, commands, capsys):
    cli.main(argv)
    lines = capsys.readouterr().out.splitlines()
    for name, text in commands.items():
        assert [line.split() for line in lines].count([name, *text.split()]) == 1
    assert max(map(len, lines)) < 80


@pytest.mark.parametrize('argv, message', [
    (['trian'], "unknown command 'trian': did you mean 'train'?"),
    (['zzz'], "unknown command 'zzz': expected one of quickstart, train, validate, "),
    (['--dataset', 'csv'], "unknown command '--dataset': "),
    (['analysis', 'low-resolutoin'], "unknown command 'low_resolutoin': did you mean 'low_resolution'?"),
])
def test_an_unknown_command_is_one_line_with_the_nearest_name(argv, message, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and message in error and error.count('\n') == 1


def parser_of(words):
    class Parsed(Exception):
        pass

    def parse_args(parser, *args, **kwargs):
        raise Parsed(parser)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Parsed) as stop:
        patch.setattr(CommandParser, 'parse_args', parse_args)
        cli.main([*words])
    return stop.value.args[0]


@pytest.mark.parametrize('words', MODULES, ids=' '.join)
def test_a_number_that_is_not_finite_is_refused_with_its_flag(words, capsys):
    parser = parser_of(words)
    flags = [action for action in parser.flags.values() if action.type is not None]
    assert len(flags) >= {('train',): 100, ('validate',): 10}.get(words, 0)
    for action in flags:
        flag = action.option_strings[-1]
        values = action.nargs if isinstance(action.nargs, int) else 1
        for number in ('nan', 'inf', '1e999', '-inf'):
            with pytest.raises(SystemExit) as stop:
                parser.parse_args([f'{flag}={number}'] if values == 1 else [flag, *[number] * values])
            message = capsys.readouterr().err
            assert stop.value.code == 2 and message.count('\n') == 1 and re.search(rf'{flag}\b.*: ', message), message


@pytest.mark.slow
def test_only_the_chosen_command_is_imported(run):
    code = "import sys; from timm_splicemix import cli; cli.main([]); print('timm_splicemix.train' in sys.modules)"
    done = run(sys.executable, '-c', code)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == 'False', done.stderr
