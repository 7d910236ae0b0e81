""" Losses by name, weights of positives, and the flags of losses """
import argparse
import copy

import pytest
import torch

from tests.helpers import raises_error, rng
from tests.test_loss_functions import NAMES, WEIGHING, make_batch
from timm_splicemix.args import add_loss_args
from timm_splicemix.loss import (
    LOSSES,
    MultilabelLoss,
    create_loss,
    loss_parameters,
    positive_weights,
)
from timm_splicemix.run.factory import loss_kwargs

# --- modules and names ---


@pytest.mark.parametrize('name', NAMES)
def test_the_module_is_the_function(name):
    assert loss_parameters(name)['reduction'] == 'mean'
    logits, targets = make_batch('unknown')
    loss = create_loss(name)
    assert torch.equal(loss(logits, targets), LOSSES[name](logits, targets))
    assert torch.equal(loss(logits, targets), MultilabelLoss(LOSSES[name])(logits, targets))
    assert repr(loss).startswith(f'MultilabelLoss({name}, ')


def test_sum_classes_is_batchmean():
    logits, targets = make_batch('unknown')
    expected = create_loss('bce', reduction='batchmean')(logits, targets)
    assert torch.equal(create_loss('bce', sum_classes=True)(logits, targets), expected)
    with raises_error("Expected reduction 'mean' or 'batchmean' with sum_classes, but got 'sum'"):
        create_loss('bce', sum_classes=True, reduction='sum')


@pytest.mark.parametrize('name, kwargs, message', [
    ('ce', {}, "Expected a loss among bce, .*p-asl, but got 'ce'"),
    ('wan', {'tau': 1, 'eps': 2}, r"Expected parameters of loss 'wan' \(reduction\), but got tau, eps\."),
    ('asl', {'epoch': 1}, 'but got epoch'),
    ('asl', {'reduction': 'none'}, "Expected reduction to be one of mean, sum, batchmean, but got 'none'"),
    ('asl', {'gamma_neg': -1}, 'Expected gamma_neg of at least 0.0, but got -1'),
    ('asl', {'gamma_pos': float('nan')}, 'Expected gamma_pos of at least 0.0, but got nan'),
    ('asl', {'clip': 1.5}, 'Expected clip between 0.0 and 1.0, but got 1.5'),
    ('focal', {'gamma': float('inf')}, 'Expected gamma of at least 0.0, but got inf'),
    ('focal', {'alpha': 2}, 'Expected alpha between'),
    ('bce', {'smoothing': 1.2}, 'Expected smoothing between'),
    ('bce', {'target_threshold': 7}, 'Expected target_threshold between'),
    ('bce', {'pos_weight': -1.}, 'Expected pos_weight of at least 0.0, but got -1.0'),
    ('bce', {'pos_weight': torch.tensor([1., -1., 1.])}, r'Expected pos_weight to be finite and not neg.* got \['),
    ('bce', {'pos_weight': torch.ones(4)}, r'Expected pos_weight of shape \(3,\), one for each class, but got \(4,\)'),
    ('bce', {'pos_weight': torch.ones(3, 1)}, r'Expected pos_weight of shape \(3,\), .* got \(3, 1\)'),
    ('bce-ls', {'eps': 0.6}, 'Expected eps between 0.0 and 0.5, but got 0.6'),
    ('hill', {'lamb': 0.5}, 'Expected lamb of at least 1.0, but got 0.5'),
    ('splc', {'tau': 60}, 'Expected tau between'),
    ('splc', {'start_epoch': -1}, 'Expected start_epoch of at least 0, but got -1'),
    ('p-asl', {'partial': 'all'}, "Expected partial to be one of ignore, negative, selective, but got 'all'"),
    ('p-asl', {'topk': -1}, 'Expected topk of at least 0, but got -1'),
    ('p-asl', {'prior': torch.ones(4)}, r'Expected prior of shape \(3,\), one for each class, but got \(4,\)'),
    ('p-asl', {'prior_threshold': 5}, 'Expected prior_threshold between'),
])
def test_bad_parameters_are_refused_when_a_loss_is_made(name, kwargs, message):
    with raises_error(message):
        create_loss(name, 3, **kwargs)


def test_bad_parameters_are_refused_without_a_number_of_classes_too():
    with raises_error('Expected gamma_neg of at least 0.0, but got -1'):
        create_loss('asl', gamma_neg=-1)
    with raises_error('Expected (prior|pos_weight) of shape'):
        create_loss('p-asl', prior=torch.ones(4), pos_weight=torch.ones(3))


# --- weights of positives ---


def test_all_other_losses_have_no_weight_of_positives():
    assert [name for name in NAMES if 'pos_weight' in loss_parameters(name)] == WEIGHING


def test_weights_follow_the_module_and_are_no_part_of_its_state():
    loss = create_loss('p-asl', pos_weight=torch.ones(5), prior=torch.ones(5))
    assert {name for name, _ in loss.named_buffers()} == {'pos_weight', 'prior'}
    assert not loss.state_dict() and not list(loss.parameters())
    assert copy.deepcopy(loss).to('meta').prior.device.type == 'meta'
    assert 'pos_weight=<5>' in repr(loss)


def test_weights_are_negatives_over_positives():
    targets = torch.tensor(
        [[1., 0., 0., 1., -1.], [0., 0., -1., 1., -1.], [0., 0., 1., 1., -1.], [0., 0., 1., 1., -1.]])
    assert positive_weights(targets).tolist() == [3., 4., 0.5, 0.25, 1.]
    assert positive_weights(targets > 0).tolist() == [3., 4., 1., 0.25, 4.]
    assert positive_weights(torch.tensor([1, 0, 2, 4]), 4).tolist() == [3., 4., 1., 0.25]
    assert positive_weights(torch.tensor([[0.5], [0.]])).tolist() == [3.]
    assert positive_weights(torch.tensor([1, 500, 1000]), 1000).tolist() == pytest.approx([100., 1., 0.01])
    assert positive_weights(torch.tensor([1, 500]), 1000, max_weight=2000.).tolist() == [999., 1.]


def test_with_weights_positives_and_negatives_of_a_class_count_the_same():
    targets = (torch.rand(50, 5, generator=rng()) < torch.tensor([0.1, 0.2, 0.5, 0.8, 0.3])).float()
    logits = torch.zeros(50, 5, requires_grad=True)
    create_loss('bce', pos_weight=positive_weights(targets))(logits, targets).backward()
    torch.testing.assert_close(logits.grad.sum(dim=0), torch.zeros(5), atol=1e-7, rtol=0)


@pytest.mark.parametrize('args, kwargs, message', [
    ((torch.zeros(4),), {}, r'Expected targets of shape \(N, classes\), or counts .* shape \(4,\) and num_images None'),
    ((torch.zeros(4, 2), 4), {}, r'but got shape \(4, 2\) and num_images 4'),
    ((torch.zeros(4, 2, 2),), {}, r'but got shape \(4, 2, 2\)'),
    ((torch.tensor([5, 1]), 4), {}, r'Expected counts between 0 and num_images 4, but got \[5, 1\]'),
    ((torch.tensor([-1, 1]), 4), {}, 'Expected counts between 0'),
    ((torch.zeros(4, 2),), {'max_weight': 0.5}, 'Expected max_weight of at least 1, but got 0.5'),
])
def test_bad_counts_are_refused(args, kwargs, message):
    with raises_error(message):
        positive_weights(*args, **kwargs)


# --- flags ---


def parse(*argv):
    parser = argparse.ArgumentParser()
    parser.add_argument('--loss', default='bce')
    add_loss_args(parser)
    args = parser.parse_args(argv)
    return args, loss_kwargs(args, args.loss)


@pytest.mark.parametrize('name', NAMES)
def test_without_flags_a_loss_has_its_own_defaults(name):
    args, kwargs = parse('--loss', name)
    assert kwargs == {} and args.class_weights == 'none'


def test_flags_reach_the_loss():
    flags = {
        'bce': ['--loss-reduction', 'sum'],
        'bce-ls': ['--loss-eps', '0.2'],
        'focal': ['--loss-gamma', '3', '--loss-alpha', '0.3'],
        'asl': ['--loss-gamma-pos', '0', '--loss-gamma-neg', '2', '--loss-clip', '0', '--loss-detach-focus'],
        'hill': ['--loss-lamb', '2', '--loss-margin', '0.5', '--loss-gamma', '1'],
        'splc': ['--loss-tau', '0.7', '--loss-start-epoch', '2', '--loss-margin', '0', '--loss-gamma', '1'],
        'an': ['--loss-eps', '0.1', '--class-weights', 'auto'],
        'wan': ['--loss-reduction', 'batchmean'],
        'p-asl': ['--loss-partial', 'selective', '--loss-gamma-unknown', '5', '--loss-topk', '3',
                  '--no-loss-detach-focus'],
    }
    kwargs = {name: parse('--loss', name, *argv)[1] for name, argv in flags.items()}
    assert kwargs == {
        'bce': {'reduction': 'sum'},
        'bce-ls': {'eps': 0.2},
        'focal': {'gamma': 3., 'alpha': 0.3},
        'asl': {'gamma_pos': 0., 'gamma_neg': 2., 'clip': 0., 'detach_focus': True},
        'hill': {'lamb': 2., 'margin': 0.5, 'gamma': 1.},
        'splc': {'tau': 0.7, 'start_epoch': 2, 'margin': 0., 'gamma': 1.},
        'an': {'eps': 0.1},
        'wan': {'reduction': 'batchmean'},
        'p-asl': {'partial': 'selective', 'gamma_unknown': 5., 'topk': 3, 'detach_focus': False},
    }
    for name in NAMES:
        assert set(kwargs[name].items()) <= set(create_loss(name, 5, **kwargs[name]).settings.items())


def test_every_parameter_has_a_flag_or_is_a_flag_of_timm():
    parser = argparse.ArgumentParser()
    add_loss_args(parser)
    flags = {name.removeprefix('loss_') for name in vars(parser.parse_args([])) if name.startswith('loss_')}
    parameters = {parameter for name in NAMES for parameter in loss_parameters(name)}
    assert parameters - flags == {'smoothing', 'target_threshold', 'sum_classes', 'pos_weight'}
    assert flags <= parameters


@pytest.mark.parametrize('argv, message', [
    ('--loss asl --loss-tau 0.5', r'Expected --loss-tau with --loss splc, but got --loss asl\.'),
    ('--loss asl --loss-gamma 0', r'Expected --loss-gamma with --loss focal, hill or splc, but got --loss asl\.'),
    ('--loss-start-epoch 0', 'Expected --loss-start-epoch with --loss splc, but got --loss bce'),
    ('--loss focal --no-loss-detach-focus', 'Expected --loss-detach-focus with --loss asl or p-asl, but got --loss f'),
    ('--loss hill --class-weights auto', 'Expected --class-weights auto with --loss bce, .* or p-asl, but got --loss'),
    ('--loss p-asl --loss-partial ignore --loss-topk 2',
     r'Expected --loss-topk with --loss-partial selective, but got --loss-partial ignore\.'),
    ('--loss p-asl --loss-partial ignore --loss-gamma-unknown 2', 'with --loss-partial negative or selective, but got'),
    ('--loss p-asl --loss-prior-threshold 0.1', 'Expected --loss-prior-threshold with --loss-prior, but got it alone'),
    ('--loss nothing', "Expected a loss among .* but got 'nothing'"),
])
def test_a_flag_that_the_loss_does_not_have_is_refused(argv, message):
    with raises_error(message):
        parse(*argv.split())


@pytest.mark.parametrize('text', ['0.5\n0.01\n\n0.25\n', 'class,prior\ncat,0.5\n"dog, big",0.01\ncow,0.25'])
def test_priors_are_read_from_a_file(text, tmp_path):
    (tmp_path / 'prior.csv').write_text(text)
    _, kwargs = parse('--loss', 'p-asl', '--loss-prior', str(tmp_path / 'prior.csv'), '--loss-prior-threshold', '0.1')
    assert kwargs['prior'].tolist() == pytest.approx([0.5, 0.01, 0.25])
    assert create_loss('p-asl', 3, **kwargs).settings['prior_threshold'] == 0.1
    with raises_error(r'Expected prior of shape \(4,\)'):
        create_loss('p-asl', 4, **kwargs)


@pytest.mark.parametrize('text, message', [
    ('0.5\ncat\n', "Expected a number between 0 and 1 in each line .*, but got 'cat'"),
    ('0.5\nnan\n', "but got 'nan'"), ('class,prior\ncat,50\n', "but got '50'"), ('1.5\n', "but got '1.5'"),
    ('', 'Expected a number for each class .*, but got none'), ('class,prior\n', 'but got none')])
def test_a_bad_file_of_priors_is_refused(text, message, tmp_path):
    with raises_error(r'Cannot read --loss-prior .*prior\.csv'):
        parse('--loss', 'p-asl', '--loss-prior', str(tmp_path / 'prior.csv'))
    (tmp_path / 'prior.csv').write_text(text)
    with raises_error(message):
        parse('--loss', 'p-asl', '--loss-prior', str(tmp_path / 'prior.csv'))
