""" --scaled-decoding: JPEG files decoded at the size that a crop needs """
import io

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2.functional import pil_to_tensor

from timm_splicemix.data import create_loader, create_transform
from timm_splicemix.data.dataset import BadImageError, MultiLabelDataset
from timm_splicemix.data.decode import decode_image
from timm_splicemix.data.encoded import EncodedImage
from timm_splicemix.data.readers.base import MultiLabelReader
from timm_splicemix.data.seeding import seeded
from timm_splicemix.train import main

from .runs import flags_of, summary, train

SIZE = 64
TRANSFORMS = {
    'rrc': {'is_training': True, 'scale': (0.3, 1.)},
    'rrc, random interpolation': {'is_training': True, 'interpolation': 'random'},
    'multiscale': {'is_training': True, 'train_crop_mode': 'multiscale'},
    'center': {'crop_mode': 'center', 'crop_pct': 0.875},
    'squash': {'crop_mode': 'squash'},
    'border': {'crop_mode': 'border'},
}


def photo(width=600, height=400):
    """Waves, whose pixels change slowly, as those of large photos do."""
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / a + y / b) for a, b in ((80, 180), (140, -60), (-50, 120))]
    return Image.fromarray((127 + 100 * np.stack(waves, axis=-1)).astype(np.uint8))


def encode(image, file_format='JPEG', orientation=1):
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    image.save(file, file_format, exif=exif, **({'quality': 95} if file_format == 'JPEG' else {}))
    return file.getvalue()


def as_array(image):
    return np.asarray(image if isinstance(image, (np.ndarray, torch.Tensor)) else pil_to_tensor(image)).astype(float)


@pytest.mark.parametrize('decoder', ['pil', 'torchvision'])
@pytest.mark.parametrize('scale, divisor', [(1., 1), (0.51, 1), (0.5, 2), (0.3, 2), (0.25, 4), (0.13, 4), (0.01, 8)])
def test_the_size_is_the_smallest_of_libjpeg_that_is_enough(decoder, scale, divisor):
    image = as_array(decode_image(encode(photo()), decoder, scale=scale))
    assert image.shape == (3, 400 // divisor, 600 // divisor)
    if divisor > 1:
        small = photo().resize((600 // divisor, 400 // divisor), Image.Resampling.BOX)
        assert abs(image - as_array(small)).mean() < 1


def test_other_formats_are_decoded_as_they_are():
    data = encode(photo(), 'PNG')
    assert torch.equal(decode_image(data, 'torchvision', scale=0.1), decode_image(data, 'torchvision'))


@pytest.mark.parametrize('decoder', ['pil', 'torchvision'])
@pytest.mark.parametrize('orientation', [1, 6])
@pytest.mark.parametrize('name', TRANSFORMS)
def test_crops_are_those_of_the_whole_image(decoder, orientation, name):
    data = encode(photo(), orientation=orientation)
    options = {'use_prefetcher': True, 'decoder': decoder, 'color_jitter': None, **TRANSFORMS[name]}
    plain, scaled = (create_transform(SIZE, scaled_decoding=value, **options) for value in (False, True))
    for epoch in range(4):
        with seeded(0, epoch, 0):
            expected = as_array(plain(decode_image(data, decoder)))
        with seeded(0, epoch, 0):
            result = as_array(scaled(EncodedImage(data, decoder, 'RGB', exif=True)))
        assert result.shape == expected.shape
        assert abs(result - expected).mean() < 4  # of 255; crops start at whole pixels of the smaller image


@pytest.mark.parametrize('decoder', ['pil', 'torchvision'])
def test_images_not_larger_than_the_crop_keep_their_pixels(decoder):
    data = encode(photo(90, 70))
    options = {'is_training': True, 'use_prefetcher': True, 'decoder': decoder, 'color_jitter': None}
    plain, scaled = (create_transform(SIZE, scaled_decoding=value, **options) for value in (False, True))
    with seeded(0):
        expected = as_array(plain(decode_image(data, decoder)))
    with seeded(0):
        np.testing.assert_array_equal(as_array(scaled(EncodedImage(data, decoder, 'RGB', exif=True))), expected)


def test_stages_that_need_all_pixels_get_them():
    transform = create_transform(SIZE, is_training=True, train_crop_mode='rkrc', scaled_decoding=True)
    assert transform(EncodedImage(encode(photo()), 'pil', 'RGB', exif=True)).shape == (3, SIZE, SIZE)


@pytest.mark.parametrize('keep', [5, 3000])
def test_a_damaged_file_is_named(tmp_path, keep):
    path = tmp_path / 'damaged.jpg'
    path.write_bytes(encode(photo())[:keep])
    dataset = MultiLabelDataset(MultiLabelReader([path], torch.ones(1, 1, dtype=torch.int8), ['a'], tmp_path))
    loader = create_loader(
        dataset, SIZE, 1, num_workers=0, device=torch.device('cpu'), decoder='torchvision', scaled_decoding=True,
        crop_pct=1.)
    with pytest.raises(BadImageError, match=r'damaged\.jpg'):
        list(loader)


def test_training(data, tmp_path, capsys):
    run = train(data, tmp_path, '--scaled-decoding', '--epochs', 1, '--decoder', 'torchvision')
    assert len(summary(run)) == 1
    with pytest.raises(SystemExit):
        main(flags_of(data, tmp_path, '--scaled-decoding', '--cache', 'ram'))
    assert 'Expected --cache or --scaled-decoding, but got both' in capsys.readouterr().err
