""" Text in any script: characters of fonts, fonts for what the default font lacks, and the sentence without one """
import io
import logging
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageChops, ImageDraw, ImageFont

import timm_splicemix as tsm
from timm_splicemix import draw, fonts
from timm_splicemix.fonts import Typeface, drawn_characters, find_fonts, read_characters
from timm_splicemix.preview import main as preview

NAMES = ('犬', 'кошка', '𞤀')  # the last is above U+FFFF


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A user without fonts, on a system without fonts; returns the user's folder of fonts."""
    monkeypatch.setenv('HOME', str(tmp_path / 'home'))
    monkeypatch.setenv('XDG_DATA_HOME', str(tmp_path / 'home' / 'share'))
    monkeypatch.setenv('XDG_DATA_DIRS', str(tmp_path / 'nowhere'))
    folder = tmp_path / 'home' / 'share' / 'fonts'
    folder.mkdir(parents=True)
    caches = (fonts._find_fonts, fonts.font_characters, fonts._warn_about)
    for cache in caches:
        cache.cache_clear()
    yield folder
    for cache in caches:
        cache.cache_clear()


def write_font(path, characters):
    """Write a font whose glyphs are filled squares."""
    pytest.importorskip('fontTools')
    from fontTools.fontBuilder import FontBuilder
    from fontTools.pens.ttGlyphPen import TTGlyphPen
    builder = FontBuilder(1000)
    names = {ord(character): f'u{ord(character):X}' for character in characters}
    order = ['.notdef', *names.values()]
    builder.setupGlyphOrder(order)
    builder.setupCharacterMap(names)
    pen = TTGlyphPen(None)
    for index, point in enumerate(((50, 0), (50, 800), (950, 800), (950, 0))):
        (pen.lineTo if index else pen.moveTo)(point)
    pen.closePath()
    square = pen.glyph()
    builder.setupGlyf({name: TTGlyphPen(None).glyph() if name == '.notdef' else square for name in order})
    builder.setupHorizontalMetrics(dict.fromkeys(order, (1000, 50)))
    builder.setupHorizontalHeader(ascent=900, descent=-100)
    builder.setupNameTable({'familyName': path.stem, 'styleName': 'Regular'})
    builder.setupOS2()
    builder.setupPost()
    builder.save(path)
    return path


def ink(image):
    """Number of black pixels."""
    return image.convert('L').point(lambda value: 255 * (value < 40)).histogram()[255]


def test_the_characters_of_a_font_are_those_that_other_libraries_read(home):
    ttlib = pytest.importorskip('fontTools.ttLib')
    matplotlib = pytest.importorskip('matplotlib')
    path = write_font(home / 'Squares.ttf', 'aБ犬𞤀')
    folder = Path(matplotlib.get_data_path()) / 'fonts' / 'ttf'
    files = [path, *sorted(folder.glob('[!L]*.ttf'))]  # not LastResort
    files.append(io.BytesIO(ImageFont.load_default(size=12).font_bytes))
    for file in files:
        stream = file if isinstance(file, io.BytesIO) else io.BytesIO(file.read_bytes())
        has = read_characters(stream)
        known = ttlib.TTFont(stream).getBestCmap()
        codes = [*range(32, 0x3000), 0x72AC, 0x1E900, 0x1D400, 0xFFFF, 0x10FFFF]
        found = [code for code in codes if has(chr(code))]
        assert found == [code for code in codes if known.get(code, '.notdef') != '.notdef']


def test_files_that_are_no_fonts_have_no_characters(home, caplog):
    for number, content in enumerate((b'', b'\0\1\0\0', b'ttcf' + bytes(40), b'\0\1\0\0\xff\xff' + bytes(90))):
        (home / f'{number}.ttf').write_bytes(content)
    good = write_font(home / 'Good.ttf', '犬').read_bytes()
    for size in range(12, len(good), 37):
        (home / f'cut{size}.otf').write_bytes(good[:size])
    (home / 'Good.ttf').unlink()
    (home / 'whole.ttc').mkdir()
    with caplog.at_level(logging.WARNING):
        found = find_fonts('犬')
    assert found.missing == {'犬'} or all(ImageFont.truetype(str(path), 12) for path in found.files)


def test_spaces_and_controls_need_no_font():
    assert drawn_characters(['a b\n\u200f\u202e\ufe0f', '犬']) == {'a', 'b', '犬'}


def test_text_is_drawn_with_the_fonts_that_have_it(home, caplog):
    write_font(home / 'Squares Bold.ttf', '犬')
    write_font(home / 'Squares.ttf', '犬𞤀')
    with caplog.at_level(logging.WARNING):
        face = Typeface(20, NAMES)
    parts = face.runs('a 犬x𞤀, кошка')
    assert [text for _, text in parts] == ['a ', '犬', 'x', '𞤀', ', ', 'кошка']
    assert parts[1][0].getname()[0] == parts[3][0].getname()[0] == 'Squares'
    assert parts[5][0].getname()[0].startswith('DejaVu')  # of matplotlib
    assert not caplog.records
    image = Image.new('L', (200, 40), 'white')
    face.draw(ImageDraw.Draw(image), (5, 5), '犬', '#000000')
    assert abs(ink(image) - 18 * 16) < 40  # the square
    assert face.getlength('犬犬') == 40


def test_characters_that_no_font_has_are_one_sentence(home, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            Typeface(11, ['犬', 'dog'])
    message, = [record.getMessage() for record in caplog.records]
    assert '犬 (U+72AC)' in message and 'Install a font' in message
    assert '\n' not in message


def test_the_preview_draws_class_names_of_any_script(home, tmp_path, caplog):
    for name in NAMES[:2]:
        (tmp_path / 'data' / name).mkdir(parents=True)
        for index in range(2):
            Image.new('RGB', (20, 14), 'red').save(tmp_path / 'data' / name / f'{index}.png')

    def picture(output):
        preview(['--data-dir', str(tmp_path / 'data'), '--img-size', '60', '--output', str(tmp_path / output)])
        return Image.open(tmp_path / output)

    without = picture('without.png')
    assert '犬 (U+72AC)' in caplog.text
    write_font(home / 'Squares.ttf', '犬')
    fonts._find_fonts.cache_clear()
    caplog.clear()
    with_font = picture('with.png')
    assert not caplog.records and ink(with_font) > ink(without)


def test_plots_draw_class_names_of_any_script(home, tmp_path, caplog, recwarn):
    pytest.importorskip('matplotlib')
    rows = [{'class': name, 'AP': 50., 'positives': 3} for name in NAMES]
    result = {'metrics': {'mAP': 50.}, 'model': 'm', 'dataset': '犬', 'split': 'val', 'num_images': 5}

    def pictures(name):
        draw.draw_classes(rows, result, tmp_path / f'{name}.png')
        figure = draw.draw_statistics(torch.eye(3), torch.tensor([1, 1, 1]), NAMES, 'title')
        draw.save_figure(figure, tmp_path / f'{name}-statistics.png')
        return [Image.open(tmp_path / f'{name}{end}.png').convert('RGB') for end in ('', '-statistics')]

    without = pictures('without')
    assert 'No installed font has 2 character(s)' in caplog.text and len(caplog.records) <= 2
    write_font(home / 'Squares.ttf', '犬𞤀')
    fonts._find_fonts.cache_clear()
    caplog.clear()
    for left, right in zip(without, pictures('with')):
        assert left.size != right.size or ImageChops.difference(left, right).getbbox()
        assert ink(right) > ink(left)
    assert not caplog.records and not [warning for warning in recwarn if 'Glyph' in str(warning.message)]


def test_dollars_in_names_are_no_formula(tmp_path, recwarn):
    pyplot = pytest.importorskip('matplotlib.pyplot')
    before = pyplot.get_fignums()  # of other tests
    rows = [{'class': name, 'AP': 50., 'positives': 3} for name in ('US$', r'$\frac$', '$x$')]
    result = {'metrics': {'mAP': 50.}, 'model': '$x', 'dataset': 'y$', 'split': 'val', 'num_images': 5}
    draw.draw_classes(rows, result, tmp_path / 'classes.png')  # matplotlib refuses the second as a formula
    figure = draw.draw_statistics(torch.eye(2), torch.tensor([1, 1]), ['$x$', '_y'], r'$\frac$')
    assert figure.axes[0].get_yticklabels()[0].get_text() == r'\$x\$'
    draw.save_figure(figure, tmp_path / 'statistics.png')
    assert pyplot.get_fignums() == before


def test_long_words_are_broken(home):
    face = Typeface(11)
    lines = draw._wrap(f'short {"w" * 60} end', 100, face)
    assert ''.join(lines).replace(' ', '') == f'short{"w" * 60}end' and len(lines) > 4
    assert all(face.getlength(line) <= 100 for line in lines)


def test_the_default_font_draws_as_before():
    images = [Image.new('L', (200, 40), 'white') for _ in range(2)]
    Typeface(11).draw(ImageDraw.Draw(images[0]), (3, 4), '3: dog, cat?', '#000000')
    ImageDraw.Draw(images[1]).text((3, 4), '3: dog, cat?', fill='#000000', font=ImageFont.load_default(size=11))
    assert images[0].tobytes() == images[1].tobytes()


def test_control_characters_of_names_are_escaped():
    assert Typeface(11).runs('a\x1b\udc80')[0][1] == 'a\\x1b\\udc80'
    mixer = tsm.SpliceMix('1x2', seed=0)
    plan = mixer.plan(4)
    images, targets = mixer.apply(torch.zeros(4, 3, 30, 30, dtype=torch.uint8), torch.ones(4, 1), plan)
    assert draw.draw_batch(images, targets, plan, ['\udc80'], 'title').width > 30
