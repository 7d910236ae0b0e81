import argparse

import pytest
import yaml

from timm_splicemix.args import CommandParser, add_train_args, add_validate_args, dump_args, parse_with_config

from .timm_flags import TRAIN


def make_parser():
    parser = CommandParser(prog='train')
    add_train_args(parser)
    return parser


@pytest.fixture
def parse(tmp_path):
    """Parse a command line with a config of this text."""
    def parse_text(text, *argv, parser=None):
        path = tmp_path / 'config.yaml'
        path.write_text(text)
        return parse_with_config(parser or make_parser(), ['--config', str(path), *argv])
    return parse_text


@pytest.fixture
def refusal(capsys):
    """The one line of a call that exits with code 2."""
    def message(function, *args, **kwargs):
        with pytest.raises(SystemExit) as caught:
            function(*args, **kwargs)
        assert caught.value.code == 2
        error = capsys.readouterr().err
        assert error.count('\n') == 1
        return error
    return message


def test_a_config_sets_flags_and_the_command_line_wins(parse):
    args, given = parse('lr: 0.05\nbatch-size: 32\nmodel: resnet101', '--lr', '0.01', '--opt', 'adam')
    assert (args.lr, args.batch_size, args.model, args.opt) == (0.01, 32, 'resnet101', 'adam')
    assert given == {'lr', 'batch_size', 'model', 'opt'}


def test_without_a_config_the_command_line_is_all():
    args, given = parse_with_config(make_parser(), ['folder', '--smoothing', '0.1', '-b', '8'])
    assert args == make_parser().parse_args(['folder', '--smoothing', '0.1', '-b', '8'])
    assert given == {'data', 'smoothing', 'batch_size'}  # smoothing too, which is given as the default
    assert parse_with_config(make_parser(), [])[1] == set()


def test_the_command_line_of_the_process_is_the_default(monkeypatch):
    monkeypatch.setattr('sys.argv', ['train', '--epochs', '3'])
    args, given = parse_with_config(make_parser())
    assert (args.epochs, given) == (3, {'epochs'})


def test_the_command_line_wins_with_a_default_too(parse):
    args, given = parse('smoothing: 0.3\nmodel_ema_decay: 0.9', '--smoothing', '0.1')
    assert (args.smoothing, args.model_ema_decay) == (0.1, 0.9)
    assert given == {'smoothing', 'model_ema_decay'}


def test_defaults_in_an_args_yaml_of_timm_are_not_given_by_the_user(parse):
    text = yaml.safe_dump({name: flag['default'] for name, flag in TRAIN.items()}, default_flow_style=False)
    assert len(yaml.safe_load(text)) == 172
    args, given = parse(text)
    assert args == make_parser().parse_args([])
    assert given == set()


def test_other_values_in_an_args_yaml_are_given_by_the_user(parse):
    defaults = {name: flag['default'] for name, flag in TRAIN.items()}
    changed = {
        'data': 'folder', 'lr': 1e-5, 'scale': [0.5, 1.0], 'opt_kwargs': {'foreach': True}, 'amp': True,
        'torchcompile': 'inductor', 'wandb_tags': ['a', 'b'], 'min_lr': 1e-6}
    args, given = parse(yaml.safe_dump({**defaults, **changed}))
    assert vars(args) == {**vars(make_parser().parse_args([])), **changed}
    assert given == set(changed)


def test_the_config_is_not_among_the_flags(parse):
    assert 'config' not in vars(parse('lr: 1')[0])
    assert 'config' not in vars(parse_with_config(make_parser(), [])[0])


def test_a_parser_can_be_used_again_and_keeps_its_defaults(parse):
    parser = make_parser()
    assert parse('lr: 1\nmodel_kwargs: {a: 1}\ndata: folder', parser=parser)[0].lr == 1
    args, given = parse_with_config(parser, [])
    assert args == make_parser().parse_args([])
    assert given == set()


def test_the_help_names_the_config(capsys):
    with pytest.raises(SystemExit):
        parse_with_config(make_parser(), ['--help'])
    assert '-c FILE, --config FILE' in capsys.readouterr().out


@pytest.mark.parametrize('line, expected', [
    ('lr: 1e-5', 1e-5),  # text to PyYAML
    ('lr: 1', 1.0),
    ("lr: '0.5'", 0.5),
    ('epochs: 8', 8),
    ('opt_betas: [0.9, 1e-3]', [0.9, 1e-3]),
    ('opt_betas: 0.9', [0.9]),
    ('input_size: [3, 64, 32]', [3, 64, 32]),
    ('freeze: [conv1, layer1]', ['conv1', 'layer1']),
    ('freeze: conv1', ['conv1']),
    ('amp: true', True),
    ('amp: false', False),
    ('keep_unlabelled: false', None),
    ('model_kwargs: {drop_rate: 0.1, layers: [1, 2], name: x}', {'drop_rate': 0.1, 'layers': [1, 2], 'name': 'x'}),
    ('opt_kwargs: {eps: 1e-5, inner: {more: [1e-30, 1.0e-3]}}', {'eps': 1e-5, 'inner': {'more': [1e-30, 1e-3]}}),
    ('head_init_bias: prior', 'prior'),
    ('head_init_bias: -2.5', -2.5),
    ('splicemix_cl: true', 1.0),
    ('splicemix_cl: false', 0.0),
    ('splicemix_cl: 0.5', 0.5),
    ('torchcompile: true', 'inductor'),
    ('torchcompile: eager', 'eager'),
    ('splicemix_ratio: 0.5', 0.5),
    ("splicemix_ratio: '0.5'", 0.5),
    ('splicemix_ratio: ref', 'ref'),
    ('aug_splits: 0', 0),
    ("kd_temperature: '4'", 4.0),
    ('keep_labels: 40', '40'),
    ('loss: asl', 'asl'),
    ("loss: ''", ''),
    ('batch_size: null', 128),
    ('decay_milestones:', [90, 180, 270]),
])
def test_a_value_is_converted_as_on_the_command_line(line, expected, parse):
    name = line.partition(':')[0]
    value = getattr(parse(line)[0], name)
    assert value == expected
    assert type(value) is type(expected)


def test_a_flag_with_a_negation_can_be_set_both_ways(parse):
    for word, expected in (('true', True), ('false', False), ('null', None)):
        parser = CommandParser()
        parser.add_argument('--thing', action=argparse.BooleanOptionalAction)
        args, given = parse(f'thing: {word}', parser=parser)
        assert args.thing is expected
        assert given == (set() if expected is None else {'thing'})


@pytest.mark.parametrize('line, expected', [
    ('lr: abc', "a finite number of at least 0, but got 'abc'"),
    ('lr: .nan', "a finite number of at least 0, but got 'nan'"),
    ('lr: -1', "a finite number of at least 0, but got '-1'"),
    ('lr: true', 'a number, but got True'),
    ('lr: [0.1]', 'a number, but got [0.1]'),
    ('epochs: 1.5', "a whole number of at least 1, but got '1.5'"),
    ('hflip: 2', "a finite number from 0 to 1, but got '2'"),
    ('std: [0, 1, 1]', "a finite number above 0, but got '0'"),
    ('lr-cycle-limit: true', 'a number, but got True'),
    ('amp: 1', 'true or false, but got 1'),
    ("amp: 'false'", "true or false, but got 'false'"),
    ('gp: off', 'text, in quotes if it looks like another type, but got False'),
    ('experiment: 2024-05-06', 'text, in quotes if it looks like another type, but got'),
    ('crop_mode: middle', "one of center, squash, border, but got 'middle'"),
    ('loss: none', 'one of bce, '),
    ('sched: sine', 'one of cosine, '),
    ('input_size: [3, 64]', 'a list of 3, but got [3, 64]'),
    ('input_size: 64', 'a list of 3, but got 64'),
    ('opt_betas: []', 'a list of at least one, but got []'),
    ('opt_betas: [0.9, x]', "a finite number, but got 'x'"),
    ('scale: {a: 1}', "a number, but got {'a': 1}"),
    ('model_kwargs: [a=1]', "a mapping 'name: value', but got ['a=1']"),
    ('model_kwargs: {1: 2}', "a mapping 'name: value', but got {1: 2}"),
    ('head_init_bias: half', "a number or 'prior', but got 'half'"),
])
def test_a_bad_value_names_file_and_key(line, expected, parse, refusal, tmp_path):
    key = line.partition(':')[0]
    error = refusal(parse, line)
    assert error.startswith(f"train: error: Bad value of '{key}' in {tmp_path / 'config.yaml'}: Expected {expected}")


@pytest.mark.parametrize('line, expected', [
    ('kd_distill_type: token', 'Only the default logit is supported: the task has no teacher'),
    ('naflex_loader: true', 'Not supported: SpliceMix cannot splice'),
    ('train_img_sizes: [128, 224]', 'Not supported: a run with'),
])
def test_an_unsupported_flag_is_refused_with_the_reason(line, expected, parse, refusal, tmp_path):
    assert f"Bad value of '{line.partition(':')[0]}' in {tmp_path / 'config.yaml'}: {expected}" in refusal(parse, line)


def test_a_key_that_is_set_twice_is_refused(parse, refusal):
    assert "Flag 'batch_size' is set twice in " in refusal(parse, 'batch_size: 1\nbatch-size: 2')


@pytest.mark.parametrize('key, nearest', [
    ('batchsize', 'batch_size'), ('splicemix_grid', 'splicemix_grids'), ('learning_rates', None), ('dr', 'decay_rate'),
    ('train-steps-per-epoch', 'train_batches_per_epoch'), ('help', None), ('config', None), ('7', None), ('', None),
])
def test_an_unknown_key_is_refused_with_the_nearest_flag(key, nearest, parse, refusal, tmp_path):
    error = refusal(parse, f'lr: 1\n{key or repr("")}: 1')
    assert error.startswith(f"train: error: Unknown flag '{key}' in {tmp_path / 'config.yaml'}")
    assert nearest is None or f": did you mean '{nearest}'?" in error


@pytest.mark.parametrize('text', [
    '', '# nothing but a comment', '- lr', 'lr', '3', 'lr: [', 'a: 2024-13-45', '\t- x: 1', '? [a]\n: b', 'lr: 1\n\x07',
    '!!python/object/apply:os.getcwd []', '[' * 3000,
])
def test_a_file_without_a_mapping_is_refused(text, parse, refusal, tmp_path):
    error = refusal(parse, text)
    assert 'error: Expected ' in error
    assert str(tmp_path / 'config.yaml') in error


def test_a_file_that_cannot_be_read_is_refused(refusal, tmp_path):
    (tmp_path / 'binary.yaml').write_bytes(b'\x80\x81\xff')
    for name, reason in (('absent.yaml', 'No such file'), ('', 'Is a directory'), ('binary.yaml', 'Expected UTF-8')):
        error = refusal(parse_with_config, make_parser(), ['-c', str(tmp_path / name)])
        assert str(tmp_path / name) in error
        assert reason in error


def test_flags_that_exclude_each_other_do_so_across_file_and_command_line(parse, refusal):
    def make_validate_parser():
        parser = CommandParser()
        add_validate_args(parser)
        return parser

    error = refusal(parse, 'torchscript: true', '--torchcompile', parser=make_validate_parser())
    assert 'Expected at most one of --torchcompile and --torchscript' in error
    assert parse('torchscript: false', '--torchcompile', parser=make_validate_parser())[0].torchcompile == 'inductor'


@pytest.mark.parametrize('argv', [
    '',
    'folder --lr 1e-05 --weight-decay 1e-4 -b 16 --input-size 3 64 64 --opt-betas 0.9 0.99 --amp --torchcompile',
    '--model-kwargs a=1 b=None c=[1e-5,2] d=x --opt-kwargs eps=1e-8 --head-init-bias prior --wandb-tags 1 yes',
    '--splicemix-grids 1x2,2x2@0.5 --splicemix-ratio ref --splicemix-cl --loss asl --freeze layer1 --keep-labels 40',
    '--experiment 1e5 --output null --dataset yes --class-map 007 --gp 2024-01-02 --head-init-bias=-1e-3',
    '--keep-unlabelled --aa 0x10 --device 1:30 --class-order name --val-ann ä.csv',
])
def test_dumped_flags_are_read_back(argv, parse):
    args, given = parse_with_config(make_parser(), argv.split())
    again, given_again = parse(dump_args(args))
    assert again == args
    assert given_again == given


def test_flags_are_dumped_as_plain_yaml():
    args = make_parser().parse_args(['--lr', '1e-5', '--freeze', 'layer1'])
    lines = dump_args(args).splitlines()
    assert {'lr: 1.0e-05', 'freeze:', '- layer1', 'model: resnet50', 'amp: false', 'aa: null'} <= set(lines)
