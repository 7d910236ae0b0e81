""" Every flag of train.py has a test of its effect, or is refused """
import pytest

from timm_splicemix import train as train_module
from timm_splicemix.args.timm import REFUSED_IN_TRAINING
from timm_splicemix.train import build_parser

from . import (
    test_classes,
    test_split,
    test_train_flags_data,
    test_train_flags_model,
    test_train_flags_optim,
    test_train_flags_run,
)
from .timm_flags import TRAIN
from .train_flags import SHOWN, shows

TOPICS = (
    test_classes, test_split, test_train_flags_data, test_train_flags_model, test_train_flags_optim,
    test_train_flags_run)
FLAGS = build_parser().flags


@shows(*REFUSED_IN_TRAINING)
@pytest.mark.parametrize('name', REFUSED_IN_TRAINING)
def test_unsupported_flags_are_refused_in_a_line_with_the_reason(name, capsys):
    flag, = FLAGS[name].option_strings
    with pytest.raises(SystemExit) as left:
        train_module.main([flag, *([] if FLAGS[name].nargs == 0 else ['7'])])
    assert left.value.code == 2
    line, = [line for line in capsys.readouterr().err.splitlines() if 'error:' in line]
    assert f'argument {flag}: ' in line and f'supported: {REFUSED_IN_TRAINING[name][1]}' in line


def test_every_flag_is_shown_to_work_or_refused():
    assert TOPICS  # whose import fills the list
    assert set(TRAIN) <= FLAGS.keys()
    assert FLAGS.keys() == SHOWN
