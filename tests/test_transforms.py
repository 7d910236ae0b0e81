import collections
import functools
import io
import pickle
import random

import numpy as np
import pytest
import timm.data
import torch
from PIL import Image, ImageOps
from timm.data.transforms import RandomResizedCropAndInterpolation
from torchvision import transforms

from timm_splicemix.data.decode import DECODERS, decode_image
from timm_splicemix.data.seeding import seeded
from timm_splicemix.data.transforms import MultiScaleCrop, create_transform, crop_and_resize

from .helpers import raises_error

pytestmark = pytest.mark.filterwarnings('ignore:The image decoding and encoding capabilities:DeprecationWarning')

TRAIN = {
    'multiscale': {'is_training': True, 'train_crop_mode': 'multiscale', 'color_jitter': None},
    'rrc': {'is_training': True, 'color_jitter': None, 'vflip': 0.3},
    'no_aug': {'is_training': True, 'no_aug': True},
}
EVAL = {
    'squash': {'crop_mode': 'squash', 'crop_pct': 1.},
    'squash and crop': {'crop_mode': 'squash', 'crop_pct': 0.9},
    'center': {'crop_pct': 0.875},
    'border': {'crop_mode': 'border', 'crop_pct': 0.9},
    'trimmed border': {'crop_mode': 'border', 'crop_pct': 1., 'crop_border_pixels': 5},
}


@functools.cache
def photo(seed, height=480, width=640):
    """A JPEG file with a 1/f texture and objects with edges, as in photos."""
    generator = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width))
    frequency[0, 0] = 1
    noise = np.fft.rfft2(generator.normal(size=(3, height, width)))
    image = np.fft.irfft2(noise / frequency ** 1.2, s=(height, width)).transpose(1, 2, 0)
    image = image / image.std() * 55 + 128
    for _ in range(8):
        top, left, h, w = generator.integers((0, 0, 20, 20), (height - 20, width - 20, 200, 200))
        image[top:top + h, left:left + w] = generator.integers(256, size=3)
    file = io.BytesIO()
    Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(file, 'JPEG', quality=90)
    return file.getvalue()


def photos():
    return [photo(0), photo(1), photo(2, 640, 480), photo(3, 333, 500)]


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def both(size, data, seed, **kwargs):
    """Results of both decoders with equal seeds; they must leave the generators in the same state."""
    results, states = [], []
    for decoder in DECODERS:
        transform = create_transform(size, decoder=decoder, **kwargs)
        seed_all(seed)
        results.append(transform(decode_image(data, decoder)))
        states.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert states[0] == states[1]
    return results


@pytest.mark.parametrize('size, interpolation, at_most', [
    (448, 'bilinear', 2),
    (224, 'bilinear', 2),
    ((3, 256, 320), 'bilinear', 2),
    (224, 'bicubic', 8),  # sharp edges depend on which side is resized first, and Pillow goes by the image's shape
    ((3, 256, 320), 'random', 8),
])
@pytest.mark.parametrize('name', [*TRAIN, *EVAL])
def test_decoders_transform_alike(name, size, interpolation, at_most):
    kwargs = {**TRAIN, **EVAL}[name]
    if interpolation == 'random' and name in EVAL:
        interpolation = 'bicubic'  # 'random' is for training
    for seed, data in enumerate(photos() * (3 if name in ('multiscale', 'rrc') else 1)):
        image, tensor = both(size, data, seed, use_prefetcher=True, interpolation=interpolation, **kwargs)
        assert image.dtype == tensor.dtype == torch.uint8
        assert image.shape == tensor.shape == (3, *((size, size) if isinstance(size, int) else size[1:]))
        difference = (image.int() - tensor.int()).abs()
        assert difference.max() <= at_most
        assert difference.float().mean() <= 0.6


@pytest.mark.parametrize('name', ['multiscale', 'rrc', 'squash'])
def test_without_prefetcher_images_are_normalised_floats(name):
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
    for decoder in DECODERS:
        kwargs = {**TRAIN, **EVAL}[name]
        seed_all(0)
        pixels = create_transform(64, decoder=decoder, use_prefetcher=True, **kwargs)(decode_image(photo(0), decoder))
        seed_all(0)
        image = create_transform(64, decoder=decoder, mean=mean, std=std, **kwargs)(decode_image(photo(0), decoder))
        assert image.dtype == torch.float32 and image.is_contiguous()
        expected = (pixels / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
        torch.testing.assert_close(image, expected)


def test_random_erasing_erases_the_same_by_both_decoders():
    for seed in range(4):
        image, tensor = both(96, photo(seed), seed, re_prob=1., re_count=2, **TRAIN['multiscale'])
        erased = (image == 0).all(0)
        assert erased.any()
        assert torch.equal(erased, (tensor == 0).all(0))
    seed_all(0)
    uint8 = create_transform(96, use_prefetcher=True, re_prob=1., **TRAIN['rrc'])(decode_image(photo(0)))
    seed_all(0)
    plain = create_transform(96, use_prefetcher=True, **TRAIN['rrc'])(decode_image(photo(0)))
    assert torch.equal(uint8, plain), 'the prefetcher erases'


@pytest.mark.parametrize('kwargs', [
    *EVAL.values(), TRAIN['rrc'], TRAIN['no_aug'],
    {'is_training': True, 'train_crop_mode': 'rkrc', 'auto_augment': 'rand-m9-mstd0.5', 'interpolation': 'bicubic'},
    {'is_training': True, 'grayscale_prob': 0.5, 'gaussian_blur_prob': 0.5, 're_prob': 0.5},
])
def test_pil_is_what_timm_does(kwargs):
    ours, timms = create_transform((3, 96, 80), **kwargs), timm.data.create_transform((3, 96, 80), **kwargs)
    assert repr(ours.transforms[:-1]) == repr(timms.transforms[:-1])
    for seed in range(3):
        seed_all(seed)
        image = ours(decode_image(photo(seed)))
        seed_all(seed)
        assert torch.equal(image, timms(decode_image(photo(seed))))


def test_transforms_can_be_separated_and_sent_to_workers():
    for decoder in DECODERS:
        parts = create_transform(64, decoder=decoder, separate=True, **TRAIN['multiscale'])
        assert len(parts) == 3
        seed_all(1)
        image = decode_image(photo(0), decoder)
        for part in parts:
            image = part(image)
        seed_all(1)
        whole = create_transform(64, decoder=decoder, **TRAIN['multiscale'])
        assert 'MultiScaleCrop(size=(64, 64)' in repr(whole)
        assert torch.equal(image, pickle.loads(pickle.dumps(whole))(decode_image(photo(0), decoder)))


# MultiScaleCrop


def all_crops(size, height, width, scales=(1, 0.875, 0.75, 0.66, 0.5), max_distort=2):
    """Every crop as often as it is drawn, by plain loops."""
    crops = collections.Counter()
    for i, scale_h in enumerate(scales):
        for j, scale_w in enumerate(scales):
            h, w = int(min(height, width) * scale_h), int(min(height, width) * scale_w)
            h = size[0] if -3 < h - size[0] < 3 else h
            w = size[1] if -3 < w - size[1] < 3 else w
            if j - i > max_distort or i - j > max_distort:
                continue
            dh, dw = (height - h) // 4, (width - w) // 4
            for top in range(5):
                for left in range(5):
                    if top % 2 == left % 2:  # the 3 x 3 grid is even, even; the points between are odd, odd
                        crops[top * dh, left * dw, h, w] += 1
    return crops


@pytest.mark.parametrize('size, squashed', [((448, 448), (512, 512)), ((224, 224), (256, 256)), ((60, 96), (69, 110))])
def test_crops_are_those_of_a_plain_enumeration_and_equally_likely(size, squashed):
    crop = MultiScaleCrop(size)
    assert crop.squashed_size == squashed
    expected = all_crops(size, *squashed)
    assert expected.total() == 19 * 13
    random.seed(0)
    draws = 60_000
    drawn = collections.Counter(crop.make_params(*squashed) for _ in range(draws))
    assert drawn.keys() == expected.keys()
    # mean squared deviation in units of the variance: 1 if all is as expected, with a standard deviation below 0.1
    probability = {box: count / expected.total() for box, count in expected.items()}
    chi2 = [(drawn[box] - draws * p) ** 2 / (draws * p * (1 - p)) for box, p in probability.items()]
    assert 0.6 < np.mean(chi2) < 1.4


def test_crops_stay_inside_and_are_not_too_distorted():
    random.seed(1)
    scales = (1, 0.875, 0.75, 0.66, 0.5)
    for size in (448, (100, 300), (300, 100), 8, 7):
        crop = MultiScaleCrop(size)
        height, width = crop.squashed_size
        for _ in range(500):
            top, left, h, w = crop.make_params(height, width)
            assert 0 <= top <= top + h <= height and 0 <= left <= left + w <= width
    lengths = [int(512 * scale) for scale in scales]
    sizes = MultiScaleCrop(448).crop_sizes(512, 512)
    assert max(abs(lengths.index(h) - lengths.index(w)) for h, w in sizes) == 2
    assert len(MultiScaleCrop(448, max_distort=1).crop_sizes(512, 512)) == 13
    assert MultiScaleCrop(448, scales=(1,)).crop_sizes(512, 512) == [(512, 512)]


def test_lengths_near_the_size_become_the_size():
    sizes = MultiScaleCrop(30, scales=(1, 0.75, 0.5)).crop_sizes(38, 38)  # 38, 28, 19
    assert {h for h, _ in sizes} == {38, 30, 19}


def test_multiscale_squashes_then_crops_then_resizes():
    image = decode_image(photo(0))
    crop = MultiScaleCrop((56, 84))
    random.seed(3)
    result = crop(image)
    random.seed(3)
    top, left, h, w = crop.make_params(64, 96)
    squashed = image.resize((96, 64), Image.Resampling.BILINEAR)
    expected = squashed.crop((left, top, left + w, top + h)).resize((84, 56), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(result, expected)


def test_applying_a_crop_draws_nothing_and_leaves_the_image_alone():
    image = decode_image(photo(0), 'torchvision')
    before = image.clone()
    random.seed(0)
    torch.manual_seed(0)
    state = random.getstate(), torch.get_rng_state()
    first, second = (crop_and_resize(image, (10, 20, 200, 300), (64, 64)) for _ in range(2))
    assert torch.equal(first, second) and torch.equal(image, before)
    assert random.getstate() == state[0] and torch.equal(torch.get_rng_state(), state[1])


@pytest.mark.parametrize('decoder', DECODERS)
def test_images_are_flipped_as_often_as_asked(decoder):
    image = decode_image(photo(0), decoder)
    for hflip in (0., 0.25, 1.):
        transform = create_transform(16, decoder=decoder, use_prefetcher=True, hflip=hflip, **TRAIN['multiscale'])
        others = transform.transforms[1:]
        cropped = crop_and_resize(image, None, (16, 16))
        upright = transforms.Compose([stage for stage in others if 'Flip' not in repr(stage)])(cropped)
        seed_all(0)
        flips = 0
        for _ in range(400):
            result = transforms.Compose(others)(cropped)
            assert torch.equal(result, upright) or torch.equal(result, upright.flip(2))
            flips += not torch.equal(result, upright)
        assert abs(flips / 400 - hflip) < 0.07


def test_multiscale_takes_the_place_of_timms_crop_only():
    ours = create_transform(448, is_training=True, train_crop_mode='multiscale', hflip=0.3, color_jitter=0.1)
    timms = timm.data.create_transform(448, is_training=True, hflip=0.3, color_jitter=0.1)
    assert isinstance(ours.transforms[0], MultiScaleCrop)
    assert isinstance(timms.transforms[0], RandomResizedCropAndInterpolation)
    assert repr(ours.transforms[1:]) == repr(timms.transforms[1:])
    for kwargs in (TRAIN['no_aug'], EVAL['squash']):  # neither crops at random
        ours = create_transform(448, train_crop_mode='multiscale', **kwargs)
        assert repr(ours) == repr(timm.data.create_transform(448, **kwargs))


# Refusals


@pytest.mark.parametrize('flag, kwargs', [
    ('--aa', {'auto_augment': 'rand-m9'}),
    ('--color-jitter', {'color_jitter': 0.4}),
    ('--color-jitter', {'color_jitter': (0., 0., 0.1)}),
    ('--grayscale-prob', {'grayscale_prob': 0.1}),
    ('--gaussian-blur-prob', {'gaussian_blur_prob': 0.1}),
    ('--train-crop-mode', {'train_crop_mode': 'rkrc'}),
    ('--train-crop-mode', {'train_crop_mode': 'rkrr'}),
    ('--naflex-loader', {'naflex': True}),
    ('--tf-preprocessing', {'tf_preprocessing': True}),
    ('interpolation', {'interpolation': 'lanczos'}),
    ('interpolation', {'interpolation': 'hamming'}),
    ('interpolation', {'interpolation': 'nearest'}),
])
def test_torchvision_refuses_what_needs_pil(flag, kwargs):
    kwargs = {'is_training': True, 'color_jitter': None, **kwargs}
    with raises_error(f'{flag}.*decoder.*torchvision.*--decoder pil|torchvision.*{flag}.*--decoder pil'):
        create_transform(64, decoder='torchvision', **kwargs)


def test_torchvision_refuses_stages_that_it_does_not_know():
    with raises_error(r'does not support the transform Patchify.*--decoder pil'):
        create_transform(64, decoder='torchvision', patchify=True)


def test_torchvision_refuses_the_colour_jitter_that_timm_adds_by_itself():
    with raises_error(r'does not support color_jitter \(--color-jitter\), but got 0.4'):
        create_transform(64, is_training=True, decoder='torchvision')


@pytest.mark.parametrize('off', [None, 0, 0., (0, 0, 0)])
@pytest.mark.parametrize('color_jitter_prob', [None, 0.5])
def test_colour_jitter_that_is_off_leaves_draws_and_pixels_alike(off, color_jitter_prob):
    image, tensor = both(
        96, photo(0), 5, is_training=True, use_prefetcher=True, color_jitter=off, color_jitter_prob=color_jitter_prob)
    assert (image.int() - tensor.int()).abs().max() <= 2


def test_what_only_training_uses_is_no_obstacle_in_evaluation():
    kwargs = {'auto_augment': 'rand-m9', 'color_jitter': 0.4, 'train_crop_mode': 'rkrc', 'grayscale_prob': 0.1}
    for mode in ({}, {'is_training': True, 'no_aug': True}):
        transform = create_transform(64, decoder='torchvision', **mode, **kwargs)
        assert 'ColorJitter' not in repr(transform) and 'RandAugment' not in repr(transform)


@pytest.mark.parametrize('kwargs, message', [
    ({'decoder': 'nvjpeg'}, "Expected decoder to be pil or torchvision, but got 'nvjpeg'"),
    ({'train_crop_mode': 'five'}, "Expected train_crop_mode to be one of .*multiscale.* but got 'five'"),
    ({'scale': (0.5, 1.)}, "'multiscale' has fixed scales .* but got scale .*--train-crop-mode rrc"),
    ({'ratio': (1., 1.)}, "'multiscale' has fixed scales .* but got ratio"),
    ({'naflex': True}, 'supports neither naflex nor tf_preprocessing'),
])
def test_what_makes_no_sense_is_refused(kwargs, message):
    with raises_error(message):
        create_transform(64, **{**TRAIN['multiscale'], **kwargs})


def test_timms_default_scale_and_ratio_are_no_obstacle_to_multiscale():
    transform = create_transform(64, scale=[0.08, 1.], ratio=[3 / 4, 4 / 3], **TRAIN['multiscale'])
    assert isinstance(transform.transforms[0], MultiScaleCrop)


@pytest.mark.parametrize(
    'policy', ['rand-m1', 'rand-m9-mstd3-inc1', 'rand-m30-mmax30-inc1', 'augmix-m10', 'original', 'v0'])
def test_posterization_keeps_at_least_one_bit_at_all_magnitudes(policy, monkeypatch):
    kept, posterize = [], ImageOps.posterize
    monkeypatch.setattr(
        'timm.data.auto_augment.ImageOps.posterize', lambda image, bits: kept.append(bits) or posterize(image, bits))
    transform = create_transform(8, is_training=True, auto_augment=policy, use_prefetcher=True)
    image = Image.new('RGB', (12, 12), 'teal')
    with seeded(0):
        for _ in range(300):
            transform(image)
    assert kept and min(kept) >= 1
    assert pickle.loads(pickle.dumps(transform))(image).dtype == torch.uint8  # workers may be spawned


@pytest.mark.parametrize('mode', [transforms.InterpolationMode.BILINEAR, transforms.InterpolationMode.BICUBIC])
@pytest.mark.parametrize('box', [None, (20, 0, 100, 160), (10, 5, 90, 120), (3, 4, 64, 48)])
def test_pixels_and_memory_format_of_resized_tensors_are_those_of_0_1_0(box, mode):
    """The memory format changes the last bits of what a model computes."""
    image = torch.randint(0, 256, (120, 160, 3), dtype=torch.uint8).permute(2, 0, 1)
    top, left, height, width = box or (0, 0, 120, 160)
    crop = image[:, top:top + height, left:left + width]
    pixels = crop[None].contiguous(memory_format=torch.channels_last)
    expected = crop
    if crop.shape[1:] != (64, 48):
        expected = torch.nn.functional.interpolate(pixels, (64, 48), mode=mode.value, antialias=True)[0]
    resized = crop_and_resize(image, box, (64, 48), mode)
    assert torch.equal(resized, expected) and resized.stride() == expected.stride()
    again = crop_and_resize(image, box, (64, 48), mode, channels_last=True)
    assert torch.equal(again, expected) and (box == (3, 4, 64, 48) or again.permute(1, 2, 0).is_contiguous())
