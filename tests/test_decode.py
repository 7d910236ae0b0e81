import io
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from PIL.JpegImagePlugin import JpegImageFile
from torchvision.transforms.functional import pil_to_tensor

from timm_splicemix.data import create_dataset
from timm_splicemix.data.decode import DECODERS, decode_image
from timm_splicemix.run import predictor
from timm_splicemix.run.read import CheckpointInfo

from .helpers import raises_error

pytestmark = [
    pytest.mark.filterwarnings('ignore:The image decoding and encoding capabilities:DeprecationWarning'),
    pytest.mark.filterwarnings('ignore::UserWarning:PIL'),  # of EXIF that is damaged on purpose
]


def picture(height=46, width=61):
    """Gradients, waves and a hard edge; no symmetry."""
    y, x = np.mgrid[:height, :width]
    image = np.stack([4 * x, 5 * y, 128 + 90 * np.sin(x / 5 + y / 3)], -1).clip(0, 255)
    image[height // 3:height // 2, :width // 4] = (250, 10, 60)
    return Image.fromarray(image.astype(np.uint8))


def encode(image, file_format, **kwargs):
    file = io.BytesIO()
    image.save(file, file_format, **kwargs)
    return file.getvalue()


def with_alpha(image):
    image = image.convert('RGBA')
    image.putalpha(image.getchannel(0))
    return image


def exif_orientation(orientation, big_endian=True):
    """EXIF with this orientation only."""
    order, mark = ('>', b'MM') if big_endian else ('<', b'II')
    entry = struct.pack(order + 'HHIHH', ExifTags.Base.Orientation, 3, 1, orientation, 0)
    return b'Exif\0\0' + mark + struct.pack(order + 'HIH', 42, 8, 1) + entry + struct.pack(order + 'I', 0)


def decode_both(data, **kwargs):
    """Pixels of both decoders as tensors, after a check of their types."""
    image, tensor = (decode_image(data, decoder, **kwargs) for decoder in DECODERS)
    assert isinstance(image, Image.Image) and image.mode == kwargs.get('mode', 'RGB')
    assert tensor.dtype == torch.uint8 and tensor.ndim == 3
    return pil_to_tensor(image), tensor


FILES = {
    'jpeg': lambda: encode(picture(), 'JPEG', quality=90),
    'jpeg of quality 100': lambda: encode(picture(), 'JPEG', quality=100),
    'jpeg 4:4:4': lambda: encode(picture(), 'JPEG', subsampling=0),
    'jpeg 4:2:2': lambda: encode(picture(), 'JPEG', subsampling=1),
    'jpeg progressive': lambda: encode(picture(), 'JPEG', progressive=True),
    'jpeg stored as RGB': lambda: encode(picture(), 'JPEG', keep_rgb=True),
    'jpeg gray': lambda: encode(picture().convert('L'), 'JPEG'),
    'jpeg gray progressive': lambda: encode(picture().convert('L'), 'JPEG', progressive=True),
    'jpeg CMYK': lambda: encode(picture().convert('CMYK'), 'JPEG'),
    'jpeg of 1 pixel': lambda: encode(picture(1, 1), 'JPEG'),
    'jpeg of 1 row': lambda: encode(picture(1, 17), 'JPEG'),
    'jpeg padded': lambda: encode(picture(), 'JPEG') + bytes(100),
    'jpeg with garbage after its end': lambda: encode(picture(), 'JPEG') + b'garbage',
    'png': lambda: encode(picture(), 'PNG'),
    'png gray': lambda: encode(picture().convert('L'), 'PNG'),
    'png palette': lambda: encode(picture().convert('P'), 'PNG'),
    'png palette with transparency': lambda: encode(picture().convert('P'), 'PNG', transparency=3),
    'png with alpha': lambda: encode(with_alpha(picture()), 'PNG'),
    'png gray with alpha': lambda: encode(with_alpha(picture()).convert('LA'), 'PNG'),
    'png of 1 bit': lambda: encode(picture().convert('1'), 'PNG'),
    'png of 1 pixel': lambda: encode(picture(1, 1), 'PNG'),
    'gif': lambda: encode(picture(), 'GIF'),
    'bmp': lambda: encode(picture(), 'BMP'),
    'webp': lambda: encode(picture(), 'WEBP'),
    'tiff': lambda: encode(picture(), 'TIFF'),
}


@pytest.mark.parametrize('name', FILES)
def test_both_decoders_give_the_pixels_that_pil_reads(name):
    data = FILES[name]()
    expected = np.array(Image.open(io.BytesIO(data)).convert('RGB'))
    for pixels in decode_both(data):
        np.testing.assert_array_equal(pixels.permute(1, 2, 0), expected)


def png_of_16_bits(values):
    """PNG of uint16 (H, W), or (H, W, C), which PIL does not write."""
    def chunk(name, data):
        return struct.pack('>I', len(data)) + name + data + struct.pack('>I', zlib.crc32(name + data))

    height, width = values.shape[:2]
    color_type = {1: 0, 2: 4, 3: 2, 4: 6}[values[0, 0].size]
    rows = b''.join(b'\0' + row.astype('>u2').tobytes() for row in values)
    header = struct.pack('>IIBBBBB', width, height, 16, color_type, 0, 0, 0)
    return b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', header) + chunk(b'IDAT', zlib.compress(rows)) + chunk(b'IEND', b'')


def gray_of_16_bits(mode, values):
    return Image.frombytes(mode, values.shape[::-1], values.astype('>u2' if mode == 'I;16B' else '<u2').tobytes())


FILES_16_BITS = {
    'png': png_of_16_bits,
    'png by PIL': lambda values: encode(gray_of_16_bits('I;16', values), 'PNG'),
    'png rgb': lambda values: png_of_16_bits(np.stack([values] * 3, -1)),
    'png gray with alpha': lambda values: png_of_16_bits(np.stack([values] * 2, -1)),
    'png with alpha': lambda values: png_of_16_bits(np.stack([values] * 4, -1)),
    'tiff I;16': lambda values: encode(gray_of_16_bits('I;16', values), 'TIFF'),
    'tiff I;16 compressed': lambda values: encode(gray_of_16_bits('I;16', values), 'TIFF', compression='tiff_lzw'),
    'tiff I;16B': lambda values: encode(gray_of_16_bits('I;16B', values), 'TIFF'),
    'pgm': lambda values: b'P5 %d %d 65535\n' % values.shape[::-1] + values.astype('>u2').tobytes(),
}


@pytest.mark.parametrize('largest', [65535, 4095, 300])
@pytest.mark.parametrize('name', FILES_16_BITS)
def test_16_bit_values_are_divided_by_256_whatever_the_range_of_the_image(name, largest):
    values = np.linspace(0, largest, 46 * 61).astype(np.uint16).reshape(46, 61)
    data = FILES_16_BITS[name](values)
    for mode in ('RGB', 'L'):
        for pixels in decode_both(data, mode=mode):
            np.testing.assert_array_equal(pixels, np.stack([values // 256] * len(pixels)))


def test_16_bit_images_are_rotated_too():
    values = np.linspace(0, 65535, 46 * 61).astype(np.uint16).reshape(46, 61)
    for mode in ('I;16', 'I;16B'):
        data = encode(gray_of_16_bits(mode, values), 'PNG', exif=exif_orientation(6))
        for pixels in decode_both(data):
            np.testing.assert_array_equal(pixels[0], np.rot90(values // 256, -1))


def test_16_bit_values_stay_where_the_mode_holds_them():
    values = np.linspace(0, 65535, 46 * 61).astype(np.uint16).reshape(46, 61)
    data = png_of_16_bits(values)
    np.testing.assert_array_equal(decode_image(data, mode='F'), values)
    np.testing.assert_array_equal(decode_image(data, mode=None), values)


def test_16_bit_files_are_the_same_in_training_and_in_prediction(tmp_path):
    values = np.linspace(0, 65535, 46 * 61).astype(np.uint16).reshape(46, 61)
    names = ('png', 'tiff I;16', 'tiff I;16B')
    files = [tmp_path / f'{index}.{name[:3]}' for index, name in enumerate(names)]
    for file, name in zip(files, names):
        file.write_bytes(FILES_16_BITS[name](values))
    (tmp_path / 'train.csv').write_text('image,labels\n' + ''.join(f'{file.name},gray\n' for file in files))
    expected = torch.from_numpy(values // 256).float().div(255).expand(3, 46, 61)
    config = {
        'input_size': (3, 46, 61), 'mean': (0.,) * 3, 'std': (1.,) * 3, 'interpolation': 'bilinear', 'crop_pct': 1.,
        'crop_mode': 'squash'}
    reader = predictor.ImageReader(CheckpointInfo('resnet18', data_config=config))
    opened = [Image.open(file) for file in files]
    for image in predictor.Images([*files, *opened], reader):
        torch.testing.assert_close(image[1], expected, rtol=0, atol=0)
    for decoder in DECODERS:
        dataset = create_dataset('csv', root=str(tmp_path), split='train')
        dataset.decoder = decoder
        for image, _ in dataset:
            pixels = pil_to_tensor(image) if decoder == 'pil' else image
            torch.testing.assert_close(pixels / 255, expected, rtol=0, atol=0)


def test_torchvision_decodes_rgb_and_gray_jpeg_without_pil(monkeypatch):
    def load(self):
        raise OSError('decoded by PIL')

    monkeypatch.setattr(JpegImageFile, 'load', load)
    for name in ('jpeg', 'jpeg progressive', 'jpeg gray'):
        assert decode_image(FILES[name](), 'torchvision').shape == (3, 46, 61)
    with pytest.raises(OSError, match='decoded by PIL'):
        decode_image(FILES['jpeg CMYK'](), 'torchvision')


@pytest.mark.parametrize('mode', ['L', 'RGBA', 'CMYK'])
def test_other_modes_are_the_same_too(mode):
    pixels, tensor = decode_both(FILES['jpeg'](), mode=mode)
    assert len(tensor) == len(mode)
    assert torch.equal(pixels, tensor)


def test_without_a_mode_the_image_stays_as_it_is():
    assert decode_image(FILES['jpeg CMYK'](), mode=None).mode == 'CMYK'
    assert decode_image(FILES['jpeg gray'](), 'torchvision', mode=None).shape == (1, 46, 61)


@pytest.mark.parametrize('file_format', ['JPEG', 'PNG', 'WEBP'])
@pytest.mark.parametrize('big_endian', [True, False])
@pytest.mark.parametrize('orientation', range(1, 9))
def test_exif_makes_images_upright_by_both_decoders(orientation, big_endian, file_format):
    data = encode(picture(), file_format, exif=exif_orientation(orientation, big_endian))
    stored = np.array(Image.open(io.BytesIO(data)).convert('RGB'))
    upright = {
        1: stored,
        2: stored[:, ::-1],
        3: stored[::-1, ::-1],
        4: stored[::-1],
        5: stored.swapaxes(0, 1),
        6: np.rot90(stored, -1),
        7: stored[::-1, ::-1].swapaxes(0, 1),
        8: np.rot90(stored),
    }[orientation]
    for pixels in decode_both(data):
        np.testing.assert_array_equal(pixels.permute(1, 2, 0), upright)
    for pixels in decode_both(data, exif=False):
        np.testing.assert_array_equal(pixels.permute(1, 2, 0), stored)


def test_tiff_is_turned_once():
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    for pixels in decode_both(encode(picture(), 'TIFF', exif=exif)):
        np.testing.assert_array_equal(pixels.permute(1, 2, 0), np.rot90(picture(), -1))


def test_an_orientation_that_only_xmp_knows_counts_for_both():
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    pixels, tensor = decode_both(encode(picture(), 'JPEG', xmp=xmp))
    assert pixels.shape == (3, 61, 46)
    assert torch.equal(pixels, tensor)


@pytest.mark.parametrize('exif', [b'Exif\0\0garbage', exif_orientation(9), exif_orientation(6)[:-9]])
def test_exif_that_makes_no_sense_turns_nothing(exif):
    pixels, tensor = decode_both(encode(picture(), 'JPEG', exif=exif))
    assert pixels.shape == (3, 46, 61)
    assert torch.equal(pixels, tensor)


@pytest.mark.parametrize('decoder', DECODERS)
@pytest.mark.parametrize('keep', [0.01, 0.3, 0.6, 0.99])
@pytest.mark.parametrize('name', ['jpeg', 'jpeg progressive', 'jpeg gray', 'jpeg CMYK', 'png', 'bmp', 'webp', 'gif'])
def test_truncated_files_are_refused(name, keep, decoder):
    data = FILES[name]()
    if (name, keep) in {('png', 0.99), ('gif', 0.99)}:
        keep = 0.9  # the last bytes hold no pixels
    with pytest.raises((OSError, ValueError)):
        decode_image(data[:int(keep * len(data))], decoder)


@pytest.mark.parametrize('decoder', DECODERS)
@pytest.mark.parametrize('cut', [1, 2])
def test_a_jpeg_without_its_end_marker_is_refused(cut, decoder):
    with pytest.raises(OSError, match='truncated'):
        decode_image(FILES['jpeg']()[:-cut], decoder)


@pytest.mark.parametrize('decoder', DECODERS)
def test_other_files_are_refused_with_a_reason(decoder):
    for data in (b'', b'\xff\xd8\xff', b'<html>not found</html>', bytes(1000)):
        with pytest.raises(OSError, match=f'its {len(data)} bytes are not in an image format that PIL reads'):
            decode_image(data, decoder)


@pytest.mark.parametrize('decoder', DECODERS)
def test_huge_images_are_refused(decoder, monkeypatch):
    monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 100)
    with pytest.raises(OSError, match='exceeds limit'):
        decode_image(FILES['jpeg'](), decoder)


def test_damaged_jpegs_get_the_same_verdict_and_pixels_from_both():
    generator = np.random.default_rng(0)
    data = encode(picture(), 'JPEG', exif=exif_orientation(6))
    verdicts = []
    for _ in range(300):
        damaged = np.frombuffer(data, dtype=np.uint8).copy()
        places = generator.integers(len(data), size=generator.integers(1, 4))
        damaged[places] = generator.integers(256, size=len(places))
        results = []
        for decoder in DECODERS:
            try:
                image = decode_image(damaged.tobytes(), decoder)
                results.append(pil_to_tensor(image) if decoder == 'pil' else image)
            except (OSError, ValueError):
                results.append(None)
        image, tensor = results
        assert (image is None) == (tensor is None)
        if image is not None:
            assert torch.equal(image, tensor)
        verdicts.append(image is None)
    assert 0 < sum(verdicts) < len(verdicts)


def test_an_unknown_decoder_is_refused():
    with raises_error("Expected decoder to be pil or torchvision, but got 'jpeg4py'"):
        decode_image(b'', 'jpeg4py')
