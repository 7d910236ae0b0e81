""" One line of advice at the end of a run """
import logging

import pytest

from timm_splicemix.run import advice
from timm_splicemix.run.advice import MIN_EPOCHS, advise
from timm_splicemix.train import build_parser, main

from .runs import summary, train, train_until

OVERFITS = 0.1, 0.1 * advice.OVERFITS_ABOVE * 1.01
SPLICEMIX = ('--splicemix-grids', '2x2')


def curves(train_loss, val_loss, epochs=MIN_EPOCHS, **last):
    """Rows of a summary.csv whose last epoch has these losses."""
    row = {'train_loss': '0.9', 'train_task_loss': '0.9', 'eval_loss': '0.9'}
    rows = [{'epoch': str(epoch), **row} for epoch in range(epochs)]
    losses = {'train_loss': str(train_loss), 'train_task_loss': str(train_loss), 'eval_loss': str(val_loss)}
    rows[-1].update({**losses, **last})
    return rows


def advice_for(*flags, losses=OVERFITS, multi_label=True, **kwargs):
    args = build_parser().parse_args(['--smoothing', '0', *flags])  # the default on multi-label data
    return advise(args, multi_label, curves(*losses, **kwargs))


def test_a_plain_run_that_overfits_is_advised_to_use_splicemix():
    assert advice_for() == (
        f'Training loss 0.1, validation loss {OVERFITS[1]:.2g}: the model overfits; SpliceMix (--splicemix-grids auto '
        '--splicemix-weight 1) usually helps here, see docs/when.md.')
    assert advice_for(losses=(0.1, 0.1 * advice.OVERFITS_ABOVE * 0.99)) is None
    assert advice_for('--loss', 'bce', '--drop', '0.3', '--aa', 'rand-m9') is not None
    assert advice_for(multi_label=False) is not None


def test_a_run_with_splicemix_gets_no_advice():
    assert advice_for(*SPLICEMIX) is None
    assert advice_for(*SPLICEMIX, '--splicemix-cl') is None
    assert advice_for(*SPLICEMIX, '--splicemix-off-epoch', str(MIN_EPOCHS - 1)) is None


@pytest.mark.parametrize('flags', [
    ('--loss', 'asl'), ('--loss', 'asl', '--loss-reduction', 'sum'), ('--loss', 'bce', '--loss-reduction', 'batchmean'),
    ('--loss', 'bce-ls'), ('--bce-sum',), ('--bce-pos-weight', '2'), ('--bce-target-thresh', '0.2'),
    ('--class-weights', 'auto'), ('--smoothing', '0.1'), ('--keep-labels', '0.5'), ('--mixup', '0.2'),
    ('--cutmix', '1'), ('--cutmix-minmax', '0.2', '0.8'), ('--resizemix',), ('--recursivemix',),
    ('--splice-with', 'mixup'), ('--mixup', '0.2', '--mixup-off-epoch', '1')])
def test_losses_that_cannot_be_compared_give_no_advice(flags):
    assert advice_for(*flags) is None


def test_binary_cross_entropy_of_one_class_is_not_compared_with_cross_entropy():
    assert advice_for('--bce-loss', multi_label=False) is None


def test_other_curves_give_no_advice():
    assert advice_for(epochs=MIN_EPOCHS - 1) is None
    assert advice_for(train_task_loss='0.05') is None  # the head has a loss of its own
    assert advice_for(train_task_loss='') is None  # of timm's script
    for losses in ((0., 0.5), (float('nan'), 0.5), (0.1, float('inf')), (0.1, '')):
        assert advise(build_parser().parse_args(['--smoothing', '0']), True, curves(*losses)) is None
    assert advise(build_parser().parse_args(['--smoothing', '0']), True, []) is None


def test_the_last_epoch_that_was_evaluated_counts():
    rows = [*curves(*OVERFITS), {'epoch': str(MIN_EPOCHS), 'train_loss': '9', 'train_task_loss': '9', 'eval_loss': ''}]
    assert advise(build_parser().parse_args(['--smoothing', '0']), True, rows) == advice_for()


@pytest.mark.slow
def test_only_a_finished_run_ends_with_advice(data, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(advice, 'OVERFITS_ABOVE', 0.)
    folder = train_until(MIN_EPOCHS, 1, data, tmp_path, '--epochs', str(MIN_EPOCHS + 1), '--val-interval', '2')
    assert len(summary(folder)) == MIN_EPOCHS and 'overfits' not in caplog.text
    main(['--resume', str(folder)])
    last = summary(folder)[-1]
    losses = tuple(float(last[name]) for name in ('train_loss', 'eval_loss'))
    assert caplog.messages[-1].strip().startswith('Training loss {:.2g}, validation loss {:.2g}: '.format(*losses))
    assert caplog.text.count('the model overfits') == 1
    caplog.clear()
    train(data, tmp_path, '--epochs', '1', name='short')
    assert 'Validate    ' in caplog.text and 'overfits' not in caplog.text
