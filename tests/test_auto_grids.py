""" --splicemix-grids auto: grids for the image size and the feature map """
import argparse
import logging

import pytest
import timm
import torch
import yaml

import timm_splicemix as tsm
from timm_splicemix.mix import AUTO_GRIDS, AUTO_WEIGHT, auto, choose_grids
from timm_splicemix.models import describe_features
from timm_splicemix.preview import main as preview
from timm_splicemix.run.grids import set_auto_grids
from timm_splicemix.train import build_parser, main, parse_args

from .conftest import REPOSITORY
from .helpers import make_batch, raises_error
from .runs import assert_same_weights, flags_of, train, train_until

N, K = auto.MIN_CELL_PIXELS, auto.MIN_CELL_POSITIONS
FINE_MAP = ('--model-kwargs', 'output_stride=8')  # 8x8 at 64 px


def names(grids):
    return [f'{grid.rows}x{grid.cols}' for grid in grids]


def smallest_side(grid, image_size):
    """The shortest side of all cells of mixed images of both orientations, by the pixels that they cover."""
    sides = []
    for each in (grid, grid.flipped()):
        images = torch.arange(each.cells).float().view(-1, 1, 1, 1).expand(-1, 1, *image_size).contiguous()
        record = tsm.SpliceRecord(
            tsm.Grid(each.rows, each.cols), torch.arange(each.cells).view(1, -1), torch.zeros(1, each.cells).bool())
        mixed = tsm.splice(images, torch.zeros(each.cells, 1), record)[0][0, 0]
        for cell in range(each.cells):
            rows, cols = (mixed == cell).nonzero(as_tuple=True)
            sides += [len(rows.unique()), len(cols.unique())]
    return min(sides)


def smallest_part(grid, map_size):
    parts = [tsm.split_cells(torch.zeros(1, 1, *map_size), each) for each in (grid, grid.flipped())]
    return min(min(part.shape[2:]) for part in parts)


def test_the_grids_are_those_of_the_configs():
    config = yaml.safe_load((REPOSITORY / 'configs' / 'coco_resnet101_splicemix.yaml').read_text())
    assert tsm.parse_grids(config['splicemix_grids']) == AUTO_GRIDS


@pytest.mark.parametrize('image_size', [
    (N, N), (2 * N - 1, 2 * N), (2 * N, 2 * N), (3 * N - 1, 3 * N), (3 * N, 3 * N), (2 * N, 3 * N + 1), (9 * N, N)])
@pytest.mark.parametrize('map_size', [None, (1, 1), (K, K), (2 * K, 2 * K), (3 * K - 1, 3 * K), (3 * K, 3 * K)])
def test_a_grid_is_chosen_exactly_if_all_cells_of_both_orientations_are_large_enough(image_size, map_size):
    choice = choose_grids(image_size, map_size)
    expected = [
        grid for grid in AUTO_GRIDS if smallest_side(grid, image_size) >= N
        and (map_size is None or smallest_part(grid, map_size) >= K)]
    assert names(choice.grids) == (names(expected) or ['1x2'])
    assert choice.fits == bool(expected)
    if len(expected) > 1:
        assert list(choice.grids) == expected  # with their weights
    assert tsm.SpliceMix(str(choice)).grids == choice.grids
    for grid in AUTO_GRIDS:  # what is left out is listed with its size
        assert (f'{grid.rows}x{grid.cols} (' in choice.reason) == (bool(expected) and grid not in expected)


def test_the_reason_has_all_sizes():
    assert choose_grids((2 * N, 2 * N), (9 * K, 9 * K)).reason == (
        f'with images of {2 * N} x {2 * N} px and a feature map of {9 * K} x {9 * K}, cells have at least {N} x {N} px '
        f'and {K} x {K} positions; left out: 2x3 ({N} x {2 * N // 3} px, {9 * K // 2} x {3 * K} positions)')
    assert choose_grids((N, N)).reason == (
        f'with images of {N} x {N} px, no grid has cells of at least {N} x {N} px; those of 1x2 are the largest and '
        f'have {N} x {N // 2} px')


@pytest.mark.parametrize('size, expected', [
    (448, ['1x2', '2x2', '2x3']), (224, ['1x2', '2x2', '2x3']), (128, ['1x2', '2x2']), (96, ['1x2'])])
def test_the_limits_are_those_of_the_study_for_models_of_stride_32(size, expected):
    choice = choose_grids((size, size), (size // 32, size // 32))
    assert names(choice.grids) == expected and choice.fits == (size > 96)


# --- models ---


@pytest.mark.parametrize('name, size, kwargs, expected', [
    ('test_resnet', (96, 160), {'output_stride': 8}, (12, 20)),
    ('test_vit', (160, 160), {'embed_dim': 16, 'depth': 1, 'num_heads': 2}, (10, 10)),
    ('swin_tiny_patch4_window7_224', (224, 224),
     {'embed_dim': 8, 'depths': (1, 1, 1, 1), 'num_heads': (1, 1, 1, 1)}, (7, 7)),
])
def test_the_feature_map_of_the_model_counts(name, size, kwargs, expected, caplog):
    caplog.set_level(logging.INFO)
    model = timm.create_model(name, num_classes=3, **kwargs)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    args = argparse.Namespace(splicemix_grids='auto', rank=0)
    assert set_auto_grids(args, (3, *size), model) == args.splicemix_grids == str(choose_grids(size, expected))
    assert f'a feature map of {expected[0]} x {expected[1]}' in caplog.text and len(caplog.records) == 1
    assert torch.equal(torch.get_rng_state(), state) and model.training
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


def test_only_the_image_size_counts_without_a_single_feature_map(caplog):
    caplog.set_level(logging.INFO)
    model = timm.create_model('pit_ti_224', num_classes=3)
    args = argparse.Namespace(splicemix_grids='auto')
    assert set_auto_grids(args, (3, 224, 224), model) == str(choose_grids((224, 224)))
    line, = caplog.messages
    assert line.endswith('; pit_ti_224 has no single feature map, so none counts.')


@pytest.mark.parametrize('rank', [0, 1])
def test_a_warning_of_one_process_says_that_no_grid_fits(rank, caplog):
    args = argparse.Namespace(splicemix_grids=' Auto', rank=rank)
    assert set_auto_grids(args, (3, N, N)) == '1x2'
    assert [record.levelname for record in caplog.records] == ['WARNING'] * (rank == 0)
    if rank == 0:
        assert caplog.messages[0].startswith('Using --splicemix-grids 1x2 for auto: ')
        assert caplog.messages[0].endswith('Use larger images (--img-size), or train without --splicemix-grids.')


@pytest.mark.parametrize('grids', ['', '2x2', '1x2@0.5,3x3-2'])
def test_other_grids_stay(grids, caplog):
    caplog.set_level(logging.INFO)
    args = argparse.Namespace(splicemix_grids=grids)
    assert set_auto_grids(args, (3, 8, 8), model=None) == args.splicemix_grids == grids
    assert not caplog.records


@pytest.mark.parametrize('flags, weight', [
    ({}, AUTO_WEIGHT), ({'splicemix_weight': 0.5}, 0.5), ({'splicemix_batch': 'fixed'}, AUTO_WEIGHT),
    ({'splicemix_batch': 'only'}, None), ({'splicemix_batch': 'alternate'}, None), ({'loss_reduction': 'sum'}, None)])
def test_auto_gives_mixed_images_a_weight_where_the_user_did_not(flags, weight):
    model = timm.create_model('test_resnet', num_classes=3)
    args = argparse.Namespace(**{'splicemix_grids': 'auto', 'splicemix_weight': None, **flags})
    set_auto_grids(args, (3, 160, 160), model)
    assert args.splicemix_weight == weight


@pytest.mark.parametrize('saved, weight', [({}, None), ({'splicemix_weight': 0.5}, 0.5)])
def test_a_resumed_run_keeps_its_weight(saved, weight):
    args = argparse.Namespace(splicemix_grids='auto', splicemix_weight=None)
    resumed = {'args': {'splicemix_grids': '1x2', **saved}}
    assert set_auto_grids(args, (3, 160, 160), timm.create_model('test_resnet'), resumed) == '1x2'
    assert args.splicemix_weight == weight


# --- commands ---


@pytest.fixture(scope='module')
def chosen():
    """What auto stands for in the runs below."""
    model = timm.create_model('test_resnet', output_stride=8)
    return str(choose_grids((64, 64), describe_features(model, 64).grid))


@pytest.fixture(scope='module')
def whole_run(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp('auto')
    (folder / 'auto.yaml').write_text('splicemix_grids: auto\nsplicemix_mode: elem\n')
    return train(data, folder, '-c', folder / 'auto.yaml', *FINE_MAP, '--gp', 'max')


def test_a_run_of_a_config_with_auto_equals_the_run_with_the_grids_that_it_saved(data, tmp_path, whole_run, chosen):
    for settings in (
            yaml.safe_load((whole_run / 'args.yaml').read_text()),
            torch.load(whole_run / 'last.pth.tar', weights_only=True)['args']):
        assert (settings['splicemix_grids'], settings['splicemix_weight']) == (chosen, AUTO_WEIGHT)
    flags = '--splicemix-grids', chosen, '--splicemix-weight', AUTO_WEIGHT, '--splicemix-mode', 'elem'
    listed = train(data, tmp_path, *flags, *FINE_MAP, '--gp', 'max')
    assert_same_weights(whole_run / 'last.pth.tar', listed / 'last.pth.tar')


@pytest.mark.parametrize('again', [(), ('--splicemix-grids', 'auto')])
def test_a_resumed_run_keeps_its_grids(data, tmp_path, whole_run, chosen, again, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    folder = train_until(
        0, 2, data, tmp_path, '--splicemix-grids', 'auto', '--splicemix-mode', 'elem', *FINE_MAP, '--gp', 'max')
    line = f'Using --splicemix-grids {chosen} and --splicemix-weight 0.25 for auto: with images of 64 x 64 px'
    assert caplog.text.count(line) == 1
    monkeypatch.setattr(auto, 'MIN_CELL_PIXELS', 10_000)  # another version of the package
    main(['--resume', str(folder), *again])
    assert_same_weights(folder / 'last.pth.tar', whole_run / 'last.pth.tar')
    settings = yaml.safe_load((folder / 'args.yaml').read_text())
    assert (settings['splicemix_grids'], settings['splicemix_weight']) == (chosen, AUTO_WEIGHT)
    assert ('these are the grids of the resumed run' in caplog.text) == bool(again)


def test_a_run_says_that_no_grid_fits_and_that_cells_are_too_coarse_for_cl(data, tmp_path, caplog):
    train(data, tmp_path, '--splicemix-grids', 'auto', '--splicemix-cl', '--gp', 'max', '--epochs', '1')
    about_grids, about_cells = [record.getMessage() for record in caplog.records if record.levelname == 'WARNING']
    assert 'Using --splicemix-grids 1x2 and --splicemix-weight 0.25 for auto' in about_grids
    assert '2 x 1 positions' in about_grids
    assert 'SpliceMix-CL predicts cells of few positions on the feature map of 2 x 2 (1x2: 2 x 1)' in about_cells


def test_the_preview_has_no_model(data, tmp_path, caplog, capsys):
    caplog.set_level(logging.INFO)
    preview([
        '--dataset', 'csv', '--data-dir', str(data), '--img-size', str(2 * N), '--splicemix-grids', 'auto',
        '--output', str(tmp_path / 'preview.png')])
    line, = (line for line in caplog.messages if 'auto' in line)
    assert line.startswith(f'Using --splicemix-grids {choose_grids((2 * N, 2 * N))} for auto: ')
    assert line.endswith('; there is no model here, so its feature map does not count.')
    assert 'mixed images' in capsys.readouterr().out


def test_other_mistakes_are_still_found_early(data, tmp_path, capsys):
    for flags, message in (
            (('--splicemix-grids', 'auto,2x2'), "but got 'auto' in 'auto,2x2'"),
            (('--splicemix-grids', 'auto', '--mixup', '0.2'), '--splicemix-grids and --mixup'),
            (('--splicemix-grids', 'auto', '--splicemix-ratio=-1'), 'Expected ratio')):
        with pytest.raises(SystemExit):
            main(flags_of(data, tmp_path, *flags))
        assert message in capsys.readouterr().err


def test_the_help_explains_auto(capsys):
    with pytest.raises(SystemExit):
        main(['--help'])
    text = ' '.join(capsys.readouterr().out.split())
    assert 'auto: those of the paper whose cells are not too small' in text
    assert parse_args(build_parser(), ['--splicemix-grids', 'auto'])[0].splicemix_grids == 'auto'


def test_own_scripts_give_the_image_size():
    parser = argparse.ArgumentParser()
    tsm.add_splicemix_args(parser)
    args = parser.parse_args(['--splicemix-grids', 'auto'])
    with raises_error('Expected image_size for --splicemix-grids auto, but got None'):
        tsm.splicemix_kwargs(args)
    mixer = tsm.SpliceMix(**tsm.splicemix_kwargs(args, image_size=(2 * N, 2 * N)))
    assert mixer.grids == choose_grids((2 * N, 2 * N)).grids
    assert len(mixer(*make_batch(8, height=2 * N, width=2 * N))[0]) == 10
