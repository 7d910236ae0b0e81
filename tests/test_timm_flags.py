import pytest

from timm_splicemix.args import (
    CommandParser,
    add_label_args,
    add_splicemix_args,
    add_timm_train_args,
    add_timm_validate_args,
    add_train_args,
)
from timm_splicemix.args.kwargs import KwargsAction
from timm_splicemix.run.factory import dataset_kwargs

from .timm_flags import TRAIN, VALIDATE

SCRIPTS = {'train': (add_timm_train_args, TRAIN), 'validate': (add_timm_validate_args, VALIDATE)}
FLOATS = '''
    crop_pct mean std head_init_scale opt_eps opt_betas momentum weight_decay clip_grad layer_decay
    layer_decay_min_scale layer_decay_no_opt_scale lr lr_base lr_noise lr_noise_pct lr_noise_std lr_cycle_mul
    lr_cycle_decay lr_k_decay warmup_lr min_lr epoch_repeats decay_epochs decay_rate scale ratio hflip vflip
    color_jitter color_jitter_prob grayscale_prob gaussian_blur_prob aug_repeats bce_target_thresh bce_pos_weight reprob
    mixup cutmix cutmix_minmax mixup_prob mixup_switch_prob smoothing drop drop_connect drop_path drop_block bn_momentum
    bn_eps model_ema_decay train_size_probs train_size_schedule_spread train_size_random_mix naflex_patch_size_probs
    distill_loss_weight task_loss_weight kd_temperature'''
INTS = '''
    train_num_samples val_num_samples num_samples num_classes img_size in_chans input_size batch_size
    validation_batch_size grad_accum_steps local_rank lr_base_size lr_cycle_limit epochs start_epoch decay_milestones
    warmup_epochs cooldown_epochs patience_epochs aug_splits recount mixup_off_epoch seed log_interval val_interval
    recovery_interval checkpoint_hist workers tta train_img_sizes train_batch_sizes train_batches_per_epoch
    naflex_train_seq_lens naflex_max_seq_len naflex_patch_sizes kd_student_feature_dim kd_teacher_feature_dim
    crop_border_pixels log_freq num_gpu'''
KWARGS = ('model_kwargs', 'opt_kwargs')
TITLES = {
    'train': {
        'Dataset parameters', 'Model parameters', 'Scripting / codegen', 'Device & distributed', 'Optimizer parameters',
        'Learning rate schedule parameters', 'Augmentation and regularization parameters', 'Batch norm parameters',
        'Model exponential moving average parameters', 'Miscellaneous parameters', 'Scheduled image size parameters',
        'NaFlex parameters', 'Knowledge distillation parameters'},
    'validate': {
        'Dataset parameters', 'Model parameters', 'Scripting / codegen', 'Device', 'Results',
        'Miscellaneous parameters', 'NaFlex parameters'},
}
TYPES = {name: kind for kind, names in ((float, FLOATS), (int, INTS)) for name in names.split()}
each_script = pytest.mark.parametrize('script', SCRIPTS)


def make_parser(script='train'):
    parser = CommandParser(prog=script)
    SCRIPTS[script][0](parser)
    return parser


def full_parser():
    parser = make_parser()
    add_label_args(parser)
    add_splicemix_args(parser)
    add_train_args(parser, losses=('bce', 'asl'))
    return parser


def actions_of(parser):
    return {action.dest: action for action in parser._actions if action.dest != 'help'}


def refusal(capsys, parser, *argv):
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(argv)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.count('\n') == 1
    return error


@each_script
def test_every_flag_is_as_in_timm(script):
    found = {
        name: (
            tuple(action.option_strings), action.default, action.nargs, action.const,
            None if action.choices is None else tuple(action.choices))
        for name, action in actions_of(make_parser(script)).items()}
    assert found == SCRIPTS[script][1]


def test_the_scripts_have_as_many_flags_as_timm():
    assert (len(TRAIN), len(VALIDATE)) == (172, 57)


@each_script
def test_every_flag_has_the_type_of_its_values(script):
    for name, action in actions_of(make_parser(script)).items():
        if name == 'head_init_bias':  # see below
            continue
        expected = TYPES.get(name)
        assert action.type is expected, name
        assert isinstance(action, KwargsAction) == (name in KWARGS), name
        if expected is not None and action.default is not None:
            values = action.default if action.nargs else [action.default]
            assert [expected(str(value)) for value in values] == values, name


def test_every_flag_of_the_lists_above_exists():
    assert len(TYPES) == len(FLOATS.split()) + len(INTS.split())
    assert {*TYPES, *KWARGS} <= {*TRAIN, *VALIDATE}


@each_script
def test_every_flag_is_in_a_group_and_has_a_help_text(script):
    parser = make_parser(script)
    assert parser.format_help()  # a percent sign that is not escaped would raise
    titled = {group.title: group for group in parser._action_groups if group.title in TITLES[script]}
    assert set(titled) == TITLES[script]
    assert {action.dest for group in titled.values() for action in group._group_actions} == set(SCRIPTS[script][1])
    helps = [action.help for action in actions_of(parser).values()]
    assert all(len(text) > 10 for text in helps)
    assert len(set(helps)) == len(helps)


def test_our_flags_have_help_texts_and_do_not_clash_with_those_of_timm():
    parser = full_parser()
    assert all(action.help for action in parser._actions)
    for line in ('--splicemix-grids', '--splicemix-cl [WEIGHT]', '--keep-labels', '--loss NAME'):
        assert line in parser.format_help()


def test_a_command_line_of_timm_is_understood():
    line = (
        'path --model vit_tiny_patch16_224 -b 64 -vb 32 -j 2 --opt adamw --opt-betas 0.9 0.99 --lr 5e-4 --dr 0.5 '
        '--input-size 3 96 96 --aa rand-m9-mstd0.5-inc1 --torchcompile --amp --local_rank 1 --train-steps-per-epoch 7 '
        '--opt-kwargs foreach=True --model-kwargs drop_rate=0.1 act_layer=relu')
    args = make_parser().parse_args(line.split())
    assert (args.data, args.model, args.batch_size, args.validation_batch_size) == (
        'path', 'vit_tiny_patch16_224', 64, 32)
    assert (args.workers, args.opt, args.opt_betas, args.lr, args.decay_rate) == (2, 'adamw', [0.9, 0.99], 5e-4, 0.5)
    assert (args.input_size, args.aa, args.torchcompile) == ([3, 96, 96], 'rand-m9-mstd0.5-inc1', 'inductor')
    assert (args.amp, args.local_rank, args.train_batches_per_epoch) == (True, 1, 7)
    assert (args.opt_kwargs, args.model_kwargs) == ({'foreach': True}, {'drop_rate': 0.1, 'act_layer': 'relu'})


@pytest.mark.parametrize('pair, expected', [
    ('a=1', 1), ('a=1e-5', 1e-5), ('a=(2, 3)', (2, 3)), ("a={'b': None}", {'b': None}), ('a=relu', 'relu'),
    ('a=x=y', 'x=y'), ('a=', ''), ('a={[]: 1}', '{[]: 1}'), ('a="1"', '1'), ('a=__import__("os")', '__import__("os")'),
])
def test_values_of_kwargs_are_literals_or_text(pair, expected):
    assert make_parser().parse_args(['--model-kwargs', pair]).model_kwargs == {'a': expected}


def test_kwargs_may_be_none_at_all():
    assert make_parser().parse_args(['--model-kwargs']).model_kwargs == {}
    assert make_parser().parse_args(['--model-kwargs', '']).model_kwargs == {}


def test_kwargs_leave_the_default_as_it_is():
    parser = make_parser()
    parser.parse_args(['--model-kwargs', 'a=1'])
    assert parser.parse_args([]).model_kwargs == {}


@pytest.mark.parametrize('pair', ['a', '=1', 'a b=1'])
def test_what_is_no_pair_is_refused(pair, capsys):
    error = refusal(capsys, make_parser(), '--opt-kwargs', pair)
    assert f"argument --opt-kwargs: Expected KEY=VALUE, but got '{pair}'" in error


def test_the_bias_of_the_classifier_is_a_number_or_prior(capsys):
    def bias(text):
        return make_parser().parse_args([f'--head-init-bias={text}']).head_init_bias

    assert (bias('-2.5'), bias('prior')) == (-2.5, 'prior')
    error = refusal(capsys, make_parser(), '--head-init-bias', 'half')
    assert "argument --head-init-bias: Expected a number or 'prior', but got 'half'" in error


@each_script
def test_a_model_is_compiled_in_one_way_only(script, capsys):
    assert 'not allowed with' in refusal(capsys, make_parser(script), '--torchscript', '--torchcompile')


def test_a_data_set_can_be_made_of_the_flags():
    args = full_parser().parse_args(['--data-dir', 'path', '--dataset', 'csv', '--val-ann', 'val.csv'])
    kwargs = dataset_kwargs(args, is_training=False)
    assert (kwargs['name'], kwargs['root'], kwargs['annotations']) == ('csv', 'path', 'val.csv')


def test_our_flags_change_nothing_unless_given():
    ours = set(actions_of(full_parser())) - set(TRAIN)
    args = vars(full_parser().parse_args([]))
    off = {name for name in ours if not args[name]}
    assert {name: args[name] for name in ours - off} == {
        'backbone_lr_scale': 1.0, 'decoder': 'pil', 'on_bad_image': 'raise', 'metrics': 'paper',
        'splicemix_ratio': '0.25', 'splicemix_drop_prob': 0.3, 'splicemix_prob': 1.0, 'splicemix_mode': 'batch',
        'splicemix_batch': 'append'}
    assert {
        'splicemix_grids', 'splicemix_cl', 'splicemix_cl_no_detach', 'splicemix_off_epoch', 'loss', 'freeze_bn',
        'freeze', 'crop_mode', 'patience', 'log_tensorboard', 'head_init_std'} <= off


@pytest.mark.parametrize('argv, weight', [([], 0.), (['--splicemix-cl'], 1.), (['--splicemix-cl', '0.5'], 0.5)])
def test_consistency_learning_has_a_weight(argv, weight):
    assert full_parser().parse_args(argv).splicemix_cl == weight


def test_our_flags_are_understood():
    line = (
        '--loss asl --freeze conv1 layer1 --crop-mode squash --decoder torchvision --on-bad-image skip --patience 3 '
        '--metrics asl --head-init-std 0.02 --splicemix-off-epoch 4 --backbone-lr-scale 0.1')
    args = full_parser().parse_args(line.split())
    assert (args.loss, args.freeze, args.crop_mode, args.decoder) == (
        'asl', ['conv1', 'layer1'], 'squash', 'torchvision')
    assert (args.on_bad_image, args.patience, args.metrics) == ('skip', 3, 'asl')
    assert (args.head_init_std, args.splicemix_off_epoch, args.backbone_lr_scale) == (0.02, 4, 0.1)


@pytest.mark.parametrize('flag', ['--loss', '--crop-mode', '--decoder', '--on-bad-image', '--metrics'])
def test_a_name_that_does_not_exist_is_refused(flag, capsys):
    assert f'argument {flag}: invalid choice' in refusal(capsys, full_parser(), flag, 'nonsense')
