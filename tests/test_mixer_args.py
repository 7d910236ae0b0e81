import argparse

import pytest

import timm_splicemix as tsm
from tests.helpers import raises_error
from timm_splicemix.args import add_mixer_args
from timm_splicemix.mix import (
    Mixup,
    RecursiveMix,
    ResizeMix,
    SpliceWith,
)
from timm_splicemix.run.factory import create_mixer


def parse(*argv):
    """The flags of mixing, with timm's names and defaults of Mixup."""
    parser = argparse.ArgumentParser()
    for name, default in (('mixup', 0.), ('cutmix', 0.), ('mixup-prob', 1.), ('mixup-switch-prob', 0.5)):
        parser.add_argument(f'--{name}', type=float, default=default)
    parser.add_argument('--cutmix-minmax', type=float, nargs='+')
    parser.add_argument('--mixup-mode', default='batch')
    tsm.add_splicemix_args(parser)
    add_mixer_args(parser)
    return parser.parse_args(argv)


def make(*argv):
    return create_mixer(parse(*argv), num_classes=5, seed=3)


def settings(mixer):
    return {'type': type(mixer), **{name: value for name, value in vars(mixer).items() if name != '_weights'}}


def test_nothing_is_mixed_by_default():
    assert make() is None
    assert make('--splicemix-ratio', '0.5', '--mixup-prob', '0.5', '--batch-augment', '2') is None


@pytest.mark.parametrize('argv, expected', [
    ('--splicemix-grids 2x2 --splicemix-ratio ref', lambda **kw: tsm.SpliceMix('2x2', 'ref', **kw)),
    ('--splicemix-grids 2x2-3 --splicemix-batch alternate',
     lambda **kw: tsm.SpliceMix('2x2-3', batch='alternate', **kw)),
    ('--mixup 0.2', lambda **kw: Mixup(0.2, **kw)),
    ('--mixup 0.2 --cutmix 1 --mixup-prob 0.7 --mixup-switch-prob 0.3 --mixup-mode elem',
     lambda **kw: Mixup(0.2, 1., prob=0.7, switch_prob=0.3, mode='elem', **kw)),
    ('--cutmix 1 --mixup-mode pair', lambda **kw: Mixup(0., 1., mode='pair', **kw)),
    ('--cutmix-minmax 0.2 0.8', lambda **kw: Mixup(0., 0., (0.2, 0.8), **kw)),
    ('--mixup 0.2 --cutmix-minmax 0.2 0.8', lambda **kw: Mixup(0.2, 0., (0.2, 0.8), **kw)),
    ('--resizemix', lambda **kw: ResizeMix(**kw)),
    ('--resizemix 2 --mixup-prob 0.5', lambda **kw: ResizeMix(2., prob=0.5, **kw)),
    ('--recursivemix', lambda **kw: RecursiveMix(**kw)),
    ('--recursivemix 0.3', lambda **kw: RecursiveMix(0.3, **kw)),
    ('--splice-with mixup', lambda **kw: SpliceWith('mixup', **kw)),
    ('--splice-with mixup --mixup 0.4 --splice-with-ratio 1 --mixup-mode elem',
     lambda **kw: SpliceWith('mixup', 1., 0.4, mode='elem', **kw)),
    ('--splice-with cutmix --cutmix 0.4', lambda **kw: SpliceWith('cutmix', alpha=0.4, **kw)),
    ('--splice-with cutmix --cutmix-minmax 0.2 0.8 --mixup-prob 0.5',
     lambda **kw: SpliceWith('cutmix', cutmix_minmax=(0.2, 0.8), prob=0.5, **kw)),
])
def test_flags_choose_the_mixer(argv, expected):
    assert settings(make(*argv.split())) == settings(expected(num_classes=5, seed=3))


@pytest.mark.parametrize('argv, message', [
    ('--mixup 0.2 --splicemix-grids 2x2', 'but got --splicemix-grids and --mixup: leave out all but one'),
    ('--cutmix-minmax 0.2 0.8 --splicemix-grids 2x2', 'but got --splicemix-grids and --cutmix-minmax'),
    ('--mixup 0.2 --cutmix 1 --resizemix', 'but got --mixup and --cutmix and --resizemix'),
    ('--recursivemix --resizemix', 'but got --resizemix and --recursivemix'),
    ('--recursivemix --splicemix-grids 2x2', 'but got --splicemix-grids and --recursivemix'),
    ('--splice-with mixup --cutmix 1', 'but got --cutmix and --splice-with'),
    ('--splice-with cutmix --mixup 1', 'but got --mixup and --splice-with'),
    ('--splice-with cutmix --splicemix-grids 2x2', 'but got --splicemix-grids and --splice-with'),
])
def test_flags_that_contradict_each_other_are_refused(argv, message):
    with raises_error(f'Expected one way of mixing, {message}'):
        make(*argv.split())


@pytest.mark.parametrize('argv, message', [
    ('--mixup -1', 'Expected mixup_alpha to be a number of at least 0, but got -1'),
    ('--mixup 1 --mixup-mode half', "Expected mode to be one of batch, pair, elem, but got 'half'"),
    ('--splice-with mixup --mixup-mode pair', "Expected mode to be one of batch, elem, but got 'pair'"),
    ('--cutmix-minmax 0.5', 'Expected cutmix_minmax to be the smallest and the largest side'),
    ('--recursivemix 2', 'Expected alpha to be a part of the area'),
])
def test_invalid_values_are_refused(argv, message):
    with raises_error(message):
        make(*argv.split())
