""" Class activation maps """
import numpy as np
import pytest
import timm
import torch
from PIL import Image

import timm_splicemix as tsm
from tests.analyses import check_refused, read_table
from tests.evaluations import CLASSES, write_checkpoint
from tests.helpers import raises_error
from timm_splicemix.analysis.cam import (
    PositionHead,
    class_activation_maps,
    main,
    to_heat,
)
from timm_splicemix.analysis.common import create_checkpoint_parser, load_checkpoints


def maps_of(model, size=64):
    torch.manual_seed(1)
    images = torch.randn(2, 3, size, size + 32)
    head = PositionHead.of(model.eval(), (3, size, size + 32))
    return images, head, *class_activation_maps(head, images)


@torch.no_grad()
def test_the_map_of_a_cnn_is_the_classifier_at_each_position_and_its_mean_the_logit():
    model = timm.create_model('test_resnet', num_classes=3, global_pool='avg')
    images, _, logits, maps = maps_of(model)
    features = model.forward_features(images)
    assert maps.shape == (2, 3, *features.shape[2:]) and features.shape[2] != features.shape[3]
    for n in range(2):
        for i in range(maps.shape[2]):
            for j in range(maps.shape[3]):
                expected = model.fc.weight @ features[n, :, i, j] + model.fc.bias
                torch.testing.assert_close(maps[n, :, i, j], expected)
    torch.testing.assert_close(logits, model(images))
    torch.testing.assert_close(maps.mean(dim=(2, 3)), logits)


@torch.no_grad()
def test_a_max_pooled_cnn_has_the_map_of_the_average_pooled_one():
    torch.manual_seed(0)
    average = timm.create_model('test_resnet', num_classes=3, global_pool='avg')
    maximum = tsm.create_model('test_resnet', num_classes=3, global_pool='max')
    maximum.load_state_dict(average.state_dict())
    torch.testing.assert_close(maps_of(average)[3], maps_of(maximum)[3])


@torch.no_grad()
@pytest.mark.parametrize('pool', ['avg', 'token', 'max'])
def test_the_map_of_a_transformer_is_the_head_on_each_token(pool):
    model = tsm.create_model('test_vit', num_classes=3, global_pool=pool, img_size=(64, 96))
    images, head, logits, maps = maps_of(model)
    torch.testing.assert_close(logits, model(images))
    assert maps.shape == (2, 3, 4, 6) and head.replaces_prefix == (pool == 'token')
    tokens = model.forward_features(images)[:, model.num_prefix_tokens:]
    for n in range(2):
        for place in range(24):
            expected = model.head(model.fc_norm(tokens[n, place]))
            torch.testing.assert_close(maps[n, :, place // 6, place % 6], expected)
    assert maps.std(dim=(2, 3)).min() > 0


@torch.no_grad()
def test_hidden_layers_behind_the_pool_see_each_position():
    model = timm.create_model('mobilenetv3_small_050', num_classes=3)
    images, _, _, maps = maps_of(model)
    features = model.forward_features(images)
    place = features[:1, :, 1:2, 2:3]
    torch.testing.assert_close(maps[:1, :, 1, 2], model.forward_head(place), rtol=1e-4, atol=1e-5)


def test_models_without_a_single_feature_map_are_refused():
    model = timm.create_model('crossvit_9_240', num_classes=2)
    with raises_error('one feature map'):
        PositionHead.of(model.eval(), 240)


def test_heat_goes_from_0_to_1_and_is_as_large_as_the_image():
    heat = to_heat(torch.tensor([[2., 4.], [3., 3.]]), (20, 30))
    assert heat.shape == (20, 30) and heat[0, 0] == 0 and heat[0, -1] == 1
    assert not to_heat(torch.full((2, 2), 7.), (4, 4)).any()


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp('cam')
    write_checkpoint(folder / 'cnn', global_pool='avg')
    write_checkpoint(folder / 'vit', 'test_vit', CLASSES[::-1], size=64, global_pool='token', img_size=64)
    pixels = np.random.default_rng(0).integers(0, 256, (50, 40, 3), dtype=np.uint8)
    for name in ('one.png', 'two.png'):
        Image.fromarray(pixels).save(folder / name)
    (folder / 'broken.png').write_bytes(b'nothing')
    return folder


def test_checkpoints_are_found_in_runs_and_named_by_them(place):
    paths = [str(place / 'cnn'), str(place / 'vit' / 'model_best.pth.tar')]
    checkpoints = load_checkpoints(create_checkpoint_parser('cam', '').parse_args(paths))
    assert [checkpoint.name for checkpoint in checkpoints] == ['cnn', 'vit']
    assert [checkpoint.class_names for checkpoint in checkpoints] == [CLASSES, CLASSES[::-1]]


@torch.no_grad()
def test_the_command_writes_a_row_and_a_map_for_each(place, tmp_path, capsys):
    files = [str(place / name) for name in ('one.png', 'two.png')]
    main([str(place / 'cnn'), str(place / 'vit'), '--images', *files, '--classes', 'dog', 'bird',
          '--names', 'A', 'B', '--output', str(tmp_path)])
    rows = read_table(tmp_path / 'cam.csv')
    assert [(row['image'], row['class'], row['checkpoint']) for row in rows] == [
        (file, name, model) for file in files for name in ('dog', 'bird') for model in 'AB']
    model, _ = tsm.load_checkpoint(place / 'cnn' / 'model_best.pth.tar')
    image = Image.open(files[0]).resize((32, 32), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255).sub(0.5).div(0.5)
    logit = model(pixels[None])[0, CLASSES.index('dog')]
    assert float(rows[0]['logit']) == pytest.approx(float(logit), abs=1e-3)
    assert float(rows[0]['mean']) == pytest.approx(float(logit), abs=1e-3)
    assert float(rows[0]['probability']) == pytest.approx(float(logit.sigmoid()), abs=1e-3)
    assert 0 < float(rows[1]['x']) < 1 and float(rows[1]['highest']) >= float(rows[1]['mean'])
    with Image.open(tmp_path / 'cam.png') as picture:
        assert picture.width > 600 and picture.height > 800  # three columns, four rows
    assert 'probability' in capsys.readouterr().out


@torch.no_grad()
@pytest.mark.parametrize('mode', ['L', 'LA', 'RGBA'])
def test_images_are_read_in_the_mode_of_the_model(mode, place, tmp_path):
    channels = len(mode)
    write_checkpoint(tmp_path / 'run', global_pool='avg', in_chans=channels)
    pixels = np.random.default_rng(1).integers(0, 256, (32, 32, channels), dtype=np.uint8)
    file = tmp_path / 'image.png'
    Image.fromarray(pixels.squeeze(), mode).save(file)
    main([str(tmp_path / 'run'), '--images', str(file), '--classes', 'dog', '--output', str(tmp_path / 'out')])
    model, _ = tsm.load_checkpoint(tmp_path / 'run')
    logit = model(torch.from_numpy(pixels).permute(2, 0, 1)[None] / 127.5 - 1)[0, CLASSES.index('dog')]
    row, = read_table(tmp_path / 'out' / 'cam.csv')
    assert float(row['logit']) == pytest.approx(float(logit), abs=1e-4)
    assert (tmp_path / 'out' / 'cam.png').is_file()


def test_bad_input_is_one_line(place, tmp_path, capsys):
    image, run = str(place / 'one.png'), str(place / 'cnn')
    for argv, message in (
            ([run, '--images', image, '--classes', 'brid'], "classes of cnn, such as bird, but got 'brid'"),
            ([run, '--images', str(place / 'no.png'), '--classes', 'dog'], 'no.png'),
            ([run, '--images', str(place / 'broken.png'), '--classes', 'dog'], 'broken.png'),
            ([str(place / 'nothing'), '--images', image, '--classes', 'dog'], 'not a file'),
            (['cnn.onnx', '--images', image, '--classes', 'dog'], 'but got cnn.onnx, which is an exported model'),
            ([run, run, '--images', image, '--classes', 'dog'], 'twice'),
            ([run, '--images', image, '--classes', 'dog', '--names', 'a', 'b'], '--names'),
            ([run, '--images', *(f'{i}.png' for i in range(61)), '--classes', 'dog'], 'at most 60 maps'),
            ([run, '--images', image, '--classes', 'dog', '--use-ema'], '--use-ema'),
            ([run, '--classes', 'dog'], '--images')):
        check_refused(main, [*argv, '--output', tmp_path / 'out'], message, capsys)
    assert not (tmp_path / 'out').exists()
