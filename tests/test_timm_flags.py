import os
from pathlib import Path

import pytest

from timm_splicemix.args import CommandParser
from timm_splicemix.args.command import RefusedAction
from timm_splicemix.args.config import KwargsAction
from timm_splicemix.args.timm import (
    REFUSED_IN_TRAINING,
    REFUSED_IN_VALIDATION,
    add_timm_train_args,
    add_timm_validate_args,
)
from timm_splicemix.run.datasets import dataset_kwargs
from timm_splicemix.train import build_parser

from .timm_flags import TIMM_FLAGS, TRAIN, VALIDATE, describe, read_script

ADD_ARGS = {'train': add_timm_train_args, 'validate': add_timm_validate_args}
OURS = {'train': set(), 'validate': {'no_ema', 'keep_labels', 'keep_labels_seed', 'voc_difficult'}}
FLOATS = '''
    crop_pct mean std head_init_scale opt_eps opt_betas momentum weight_decay clip_grad layer_decay
    layer_decay_min_scale layer_decay_no_opt_scale lr lr_base lr_noise lr_noise_pct lr_cycle_mul lr_cycle_decay
    lr_k_decay warmup_lr min_lr epoch_repeats decay_epochs decay_rate scale ratio hflip vflip color_jitter
    color_jitter_prob grayscale_prob gaussian_blur_prob aug_repeats bce_target_thresh bce_pos_weight reprob mixup cutmix
    cutmix_minmax mixup_prob mixup_switch_prob smoothing drop drop_connect drop_path drop_block bn_momentum bn_eps
    model_ema_decay head_init_bias'''
INTS = '''
    train_num_samples val_num_samples num_samples num_classes img_size in_chans input_size batch_size
    validation_batch_size grad_accum_steps local_rank lr_base_size lr_cycle_limit epochs start_epoch decay_milestones
    warmup_epochs cooldown_epochs patience_epochs recount mixup_off_epoch seed log_interval val_interval
    recovery_interval checkpoint_hist workers train_batches_per_epoch crop_border_pixels log_freq'''
TYPES = {name: kind for kind, names in ((float, FLOATS), (int, INTS)) for name in names.split()}
each_script = pytest.mark.parametrize('script', ADD_ARGS)


def make_parser(script='train'):
    parser = CommandParser(prog=script)
    ADD_ARGS[script](parser)
    return parser


def refusal(capsys, parser, *argv):
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(argv)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.count('\n') == 1
    return error


def differences(script, timm_flags):
    """What our parser lacks or has otherwise, in words."""
    ours = make_parser(script).flags
    found = [f'{name} is new in timm' for name in timm_flags if name not in ours]
    found += [f'{name} is no longer in timm' for name in ours if name not in timm_flags and name not in OURS[script]]
    for name in timm_flags.keys() & ours.keys():
        expected, own = dict(timm_flags[name]), describe(ours[name])
        if isinstance(ours[name], RefusedAction):
            keys = ('flags', 'default')
        else:  # ours may have choices where timm has none
            keys = ('flags', 'default', 'nargs', 'const', *(['choices'] if expected['choices'] else []))
        found += [
            f'{name}: {key} is {expected[key]!r} in timm, {own[key]!r} here' for key in keys
            if own[key] != expected[key]]
    return found


@each_script
def test_every_flag_is_as_in_timm(script):
    assert differences(script, TIMM_FLAGS[script]) == []
    assert (len(TRAIN), len(VALIDATE)) == (172, 57)


@each_script
@pytest.mark.skipif('TIMM_SCRIPTS' not in os.environ, reason='TIMM_SCRIPTS names no clone of pytorch-image-models')
def test_every_flag_is_as_in_a_clone_of_timm(script):
    found = differences(script, read_script(Path(os.environ['TIMM_SCRIPTS']) / f'{script}.py'))
    assert found == [], '\n'.join(found)


def test_new_and_changed_flags_of_a_script_are_reported(tmp_path):
    (tmp_path / 'train.py').write_text('\n'.join([
        'import argparse', "config_parser = parser = argparse.ArgumentParser()", "parser.add_argument('--config')",
        "parser = argparse.ArgumentParser()", "group = parser.add_argument_group('Some')",
        "group.add_argument('--lr', type=float, default=3.0)", "group.add_argument('--brand-new')",
        "group.add_argument('--epochs', type=int, default=300)"]))
    found = differences('train', read_script(tmp_path / 'train.py'))
    assert found[0] == 'brand_new is new in timm' and 'batch_size is no longer in timm' in found
    assert [line for line in found if ':' in line] == ['lr: default is 3.0 in timm, None here']


@each_script
def test_every_flag_has_the_type_of_its_values(script):
    for name, action in make_parser(script).flags.items():
        assert isinstance(action, KwargsAction) == (name in ('model_kwargs', 'opt_kwargs')), name
        assert (action.type is not None) == (name in TYPES), name
        if action.type is not None:
            assert type(action.type('1')) is TYPES[name], name
            values = action.default if action.nargs else [action.default]
            assert action.default is None or [action.type(str(value)) for value in values] == values, name


def test_every_number_is_finite():
    for name, action in {**build_parser().flags, **make_parser('validate').flags}.items():
        for text in ('nan', 'inf', '-inf', '1e999') if action.type is not None else ():
            with pytest.raises(Exception, match=f"Expected a .*, but got '{text}'"):
                action.type(text)
                pytest.fail(f'{name} accepts {text}')


@pytest.mark.parametrize('argv, message', [
    ('--lr nan', "argument --lr: Expected a finite number of at least 0, but got 'nan'"),
    ('--clip-grad nan', "argument --clip-grad: Expected a finite number above 0, but got 'nan'"),
    ('--splicemix-cl nan', "argument --splicemix-cl: Expected a finite number of at least 0, but got 'nan'"),
    ('--std 0 0 0', "argument --std: Expected a finite number above 0, but got '0'"),
    ('--hflip 1.5', "argument --hflip: Expected a finite number from 0 to 1, but got '1.5'"),
    ('--crop-pct 0', "argument --crop-pct: Expected a finite number above 0 and at most 1, but got '0'"),
    ('--epochs 0', "argument --epochs: Expected a whole number of at least 1, but got '0'"),
    ('--epochs 1.5', "argument --epochs: Expected a whole number of at least 1, but got '1.5'"),
    ('--seed x', "argument --seed: Expected a whole number, but got 'x'"),
    ('--momentum x', "argument --momentum: Expected a finite number, but got 'x'"),
    ('--head-init-bias half', "argument --head-init-bias: Expected a number or 'prior', but got 'half'"),
    ('--splicemix-ratio nan', "argument --splicemix-ratio: Expected a number or 'ref', but got 'nan'"),
    ('--opt-kwargs a', "argument --opt-kwargs: Expected KEY=VALUE, but got 'a'"),
    ('--opt-kwargs =1', "argument --opt-kwargs: Expected KEY=VALUE, but got '=1'"),
    ('--torchscript', 'argument --torchscript: Not supported: '),
    ('--kd-temperature 2', 'argument --kd-temperature: Only the default 4.0 is supported: '),
    *((f'{flag} nonsense', f"argument {flag}: invalid choice: 'nonsense'") for flag in (
        '--loss', '--crop-mode', '--decoder', '--on-bad-image', '--metrics', '--sched', '--clip-mode', '--amp-dtype')),
])
def test_a_bad_value_is_refused_with_the_name_of_its_flag(argv, message, capsys):
    assert message in refusal(capsys, build_parser(), *argv.split())


@each_script
def test_every_flag_has_a_help_text(script):
    text = make_parser(script).format_help()  # a percent sign that is not escaped would raise
    helps = [action.help for action in make_parser(script).flags.values() if not isinstance(action, RefusedAction)]
    assert all(len(text) > 6 for text in helps)
    assert 'SUPPRESS' not in text
    for name, action in make_parser(script).flags.items():
        assert not action.option_strings or action.option_strings[-1] in text, name


def test_the_help_of_training_is_short_and_begins_with_our_flags(monkeypatch):
    monkeypatch.setenv('COLUMNS', '120')
    lines = build_parser().format_help().splitlines()
    assert len(lines) <= 362 and max(map(len, lines)) <= 120
    titles = [line for line in lines if line.endswith(':') and not line.startswith(' ')]
    assert titles[1:7] == [
        'SpliceMix:', 'Labels:', 'Splitting:', 'Multi-label training:', 'Multi-label head:', 'Loss parameters:']
    assert titles[-1] == 'Not supported:'
    assert any('--lr-base-size N' in line and '(default: 256)' in line for line in lines)


@each_script
def test_refused_flags_are_accepted_with_their_default(script):
    refused = REFUSED_IN_TRAINING if script == 'train' else REFUSED_IN_VALIDATION
    argv = []
    for name, (default, _) in refused.items():
        if default is not None and default is not False:
            argv += [f"--{name.replace('_', '-')}", *map(str, default if isinstance(default, list) else [default])]
    parser = make_parser(script)
    assert parser.parse_args(argv) == parser.parse_args([])
    assert {name: parser.get_default(name) for name in refused} == {
        name: default for name, (default, _) in refused.items()}


def test_a_command_line_of_timm_is_accepted():
    line = (
        'path --model vit_tiny_patch16_224 -b 64 -vb 32 -j 2 --opt adamw --opt-betas 0.9 0.99 --lr 5e-4 --dr 0.5 '
        '--input-size 3 96 96 --aa rand-m9-mstd0.5-inc1 --torchcompile --amp --local_rank 1 --train-steps-per-epoch 7 '
        '--opt-kwargs foreach=True --model-kwargs drop_rate=0.1 act_layer=relu --head-init-bias=-2.5 --aug-splits 0')
    args = make_parser().parse_args(line.split())
    assert vars(args) == {
        **vars(make_parser().parse_args([])), 'data': 'path', 'model': 'vit_tiny_patch16_224', 'batch_size': 64,
        'validation_batch_size': 32, 'workers': 2, 'opt': 'adamw', 'opt_betas': [0.9, 0.99], 'lr': 5e-4,
        'decay_rate': 0.5, 'input_size': [3, 96, 96], 'aa': 'rand-m9-mstd0.5-inc1', 'torchcompile': 'inductor',
        'amp': True, 'local_rank': 1, 'train_batches_per_epoch': 7, 'opt_kwargs': {'foreach': True},
        'model_kwargs': {'drop_rate': 0.1, 'act_layer': 'relu'}, 'head_init_bias': -2.5}


@pytest.mark.parametrize('pair, expected', [
    ('a=1', 1), ('a=1e-5', 1e-5), ('a=(2, 3)', (2, 3)), ("a={'b': None}", {'b': None}), ('a=relu', 'relu'),
    ('a=x=y', 'x=y'), ('a=', ''), ('a={[]: 1}', '{[]: 1}'), ('a="1"', '1'), ('a=__import__("os")', '__import__("os")'),
])
def test_values_of_kwargs_are_literals_or_text(pair, expected):
    assert make_parser().parse_args(['--model-kwargs', pair]).model_kwargs == {'a': expected}


def test_kwargs_may_be_empty_and_leave_the_default_as_it_is():
    parser = make_parser()
    for argv in (['--model-kwargs'], ['--model-kwargs', ''], ['--model-kwargs', 'a=1'], []):
        assert parser.parse_args(argv).model_kwargs == ({'a': 1} if 'a=1' in argv else {})


@pytest.mark.parametrize('argv', ['--torchscript --torchcompile', '--use-ema --no-ema'])
def test_flags_that_exclude_each_other_are_refused(argv, capsys):
    assert 'not allowed with' in refusal(capsys, make_parser('validate'), *argv.split())


def test_a_data_set_can_be_created_from_the_flags():
    args = build_parser().parse_args(['--data-dir', 'path', '--dataset', 'csv', '--val-ann', 'val.csv'])
    kwargs = dataset_kwargs(args, is_training=False)
    assert (kwargs['name'], kwargs['root'], kwargs['annotations']) == ('csv', 'path', 'val.csv')


def test_our_flags_change_nothing_unless_given():
    parser = build_parser()
    values = {name: parser.get_default(name) for name in parser.flags.keys() - TRAIN.keys()}
    assert {name: value for name, value in values.items() if value} == {
        'backbone_lr_scale': 1.0, 'decoder': 'pil', 'on_bad_image': 'raise', 'metrics': 'paper', 'batch_augment': 1.0,
        'splicemix_ratio': 0.25, 'splicemix_drop_prob': 0.3, 'splicemix_prob': 1.0, 'splicemix_mode': 'batch',
        'splicemix_cl_mean': 'visible', 'splicemix_batch': 'append',
        'recursivemix_cl': 0.5, 'splice_with_ratio': 0.25, 'class_weights': 'none'}
    assert {
        'splicemix_grids', 'splicemix_cl', 'splicemix_cl_no_detach', 'splicemix_off_epoch', 'loss', 'freeze_bn',
        'freeze', 'crop_mode', 'patience', 'log_tensorboard', 'head_init_std'} <= values.keys()


@pytest.mark.parametrize('argv, weight', [([], 0.), (['--splicemix-cl'], 1.), (['--splicemix-cl', '0.5'], 0.5)])
def test_consistency_learning_has_a_weight(argv, weight):
    assert build_parser().parse_args(argv).splicemix_cl == weight
