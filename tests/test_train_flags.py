""" No flag of train.py is parsed and ignored: each has a test of what it does, or is refused """
import pytest

from timm_splicemix import train as train_module
from timm_splicemix.args.check import REFUSED
from timm_splicemix.train import build_parser

from . import test_train_flags_data, test_train_flags_model, test_train_flags_optim, test_train_flags_run
from .timm_flags import TRAIN
from .train_flags import SHOWN, shows

TOPICS = (test_train_flags_data, test_train_flags_model, test_train_flags_optim, test_train_flags_run)
ACTIONS = {action.dest: action for action in build_parser()._actions if action.dest != 'help'}


def another_value(action):
    """Words that set a flag to something else than its default."""
    if action.nargs == 0:
        return []
    if action.choices is not None:
        return [next(choice for choice in action.choices if choice != action.default)]
    return ['some' if action.type is None else '7']


@shows(*REFUSED)
@pytest.mark.parametrize('name', REFUSED)
def test_what_cannot_be_done_is_refused_in_a_line_with_the_reason(name, capsys):
    action = ACTIONS[name]
    with pytest.raises(SystemExit) as left:
        train_module.main([action.option_strings[-1], *another_value(action)])
    assert left.value.code == 2
    line, = [line for line in capsys.readouterr().err.splitlines() if 'error:' in line]
    assert f'Expected no {action.option_strings[-1]}, but got' in line and REFUSED[name] in line


def test_what_is_refused_may_be_given_with_its_default():
    parser = build_parser()
    args, _ = train_module.parse_with_config(parser, ['--aug-splits', '0', '--tta', '0', '--worker-seeding', 'all'])
    train_module.refuse_unsupported(args, parser)
    assert (args.aug_splits, args.tta, args.worker_seeding) == (0, 0, 'all')


def test_every_flag_is_shown_to_work_or_refused():
    assert TOPICS  # whose import fills the list
    assert set(TRAIN) <= ACTIONS.keys()
    assert ACTIONS.keys() - SHOWN == set()
    assert SHOWN - ACTIONS.keys() == set()
