""" The report, a single HTML page """
import base64
import hashlib
import html
import io
import json
import os
import re
import shutil
import xml.etree.ElementTree
from html.parser import HTMLParser

import pytest
import yaml
from markupsafe import escape
from PIL import Image

from tests.analyses import check_refused
from tests.browser import run_in_page
from tests.runs import CLASSES, make_images, summary, train
from timm_splicemix.analysis.page import MAX_PIXELS, Chart, Line, Picture, render_page
from timm_splicemix.report import main
from timm_splicemix.validate import main as validate

VOID = {'meta', 'img', 'br', 'hr', 'input', 'link'}
EVIL = '<script>alert("1")</script> & \'more\''


class Page(HTMLParser):
    """A parsed page: checks that tags are closed in order, and collects addresses, text and cells."""

    def __init__(self, path):
        super().__init__()
        self.text = path.read_text(encoding='utf-8')
        self.stack, self.tags, self.pictures, self.addresses, self.words, self.cells = [], [], [], [], [], []
        self.scripts = []  # data and code of the mistakes
        self.feed(self.text)
        self.close()
        assert not self.stack, f'{self.stack} not closed'

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        attributes = dict(attributes)
        if tag == 'img':
            self.pictures.append(attributes)
        self.addresses += [value for name, value in attributes.items() if name in ('src', 'href', 'srcset', 'action')]
        assert not any(name.startswith('on') for name in attributes)
        if tag == 'tr':
            self.cells.append([])
        elif tag in ('td', 'th'):
            self.cells[-1].append('')
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)  # SVG

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        if self.stack and self.stack[-1] in ('td', 'th'):
            self.cells[-1][-1] += data
        if self.stack and self.stack[-1] == 'script':
            self.scripts.append(data)
        elif self.stack and self.stack[-1] != 'style':
            self.words.append(data)

    def row(self, name):
        return next(cells for cells in self.cells if cells[0] == name)

    def check_alone(self):
        """Check that the page runs its own script alone, loads no other files, and contains every picture."""
        assert not {'link', 'iframe', 'object', 'embed', 'base'} & set(self.tags)
        assert '@import' not in self.text and 'url(' not in self.text
        assert len(self.scripts) in (0, 2) and self.tags.count('script') == len(self.scripts)
        digests = [base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() for code in self.scripts[1:]]
        assert re.findall("script-src 'sha256-([^']*)'", html.unescape(self.text)) == digests
        for address in self.addresses:
            assert address.startswith(('data:image/', '#')), address[:60]
        for picture in self.pictures:
            head, data = picture['src'].split(',', 1)
            with Image.open(io.BytesIO(base64.b64decode(data, validate=True))) as image:
                image.load()
                assert head == f'data:{Image.MIME[image.format]};base64'
                assert image.size == (int(picture['width']), int(picture['height']))
            assert picture['alt']


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    """A trained and evaluated run with an analysis, and a run written by hand."""
    folder = tmp_path_factory.mktemp('html')
    data = make_images(folder / 'data')
    run = train(data, folder / 'runs', '--splicemix-grids', '2x2', '--save-images', '--model-ema', name='one')
    validate(['--dataset', 'csv', '--data-dir', str(data), '--checkpoint', str(run / 'model_best.pth.tar'), '-j', '0',
              '--eval-sizes', '32', '--output', str(folder / 'results')])
    (run / 'analysis').mkdir()
    Image.new('RGB', (2000, 500), 'red').save(run / 'analysis' / 'cam.png')
    (run / 'analysis' / 'cam.csv').write_text(f'class,value\n"{EVIL.replace(chr(34), chr(34) * 2)}",0.123456\n')

    other = folder / 'runs' / 'two'
    (other / 'validate').mkdir(parents=True)
    (other / 'args.yaml').write_text(yaml.safe_dump({'model': 'test_resnet', 'lr': 0.5, 'log_interval': 7, 'gp': EVIL}))
    (other / 'summary.csv').write_text('epoch,train_loss,eval_loss,eval_mAP,lr\n0,2.5,nan,,0.1\n1,1.5,3,40.5,0.05\n')
    result = json.loads((folder / 'results' / 'results.json').read_text())
    result['metrics']['mAP'] += 1.25
    result['checkpoint'] = str(other / 'gone.pth.tar')
    (other / 'validate' / 'results.json').write_text(json.dumps(result))
    rows = (folder / 'results' / 'per_class_ap.csv').read_text().splitlines()
    (other / 'validate' / 'per_class_ap.csv').write_text('\n'.join([*rows[:3], '<b>x,nan,0,0', '']))
    return folder


def write(tmp_path, *paths):
    output = tmp_path / 'page' / 'report.html'
    main([*map(str, paths), '--output', str(output)])
    page = Page(output)
    page.check_alone()
    return page


def test_a_run_is_shown_with_all_its_files(place, capsys):
    run = place / 'runs' / 'one'
    main([str(run)])
    page = Page(run / 'report.html')
    page.check_alone()
    captions = [picture['alt'] for picture in page.pictures]
    assert captions[-1] == 'analysis/cam' and len(captions) == 3
    assert all(re.fullmatch(r'one: epoch \d+, batch \d+', caption) for caption in captions[:2])
    rows = summary(run)
    best = max(rows, key=lambda row: float(row['eval_ema_mAP']))  # as train.py chooses
    assert page.row('mAP') == ['mAP', *(f'{float(best[name]):.2f}' for name in ('eval_mAP', 'eval_ema_mAP'))]
    assert page.row('splicemix_grids') == ['splicemix_grids', '2x2']
    lines = re.findall(r'points="([^"]*)"', page.text)
    assert [len(line.split()) for line in lines] == [len(rows)] * 6  # losses and mAP with EMA, learning rate
    assert 'one, in training' in page.words and 'Command and versions' in page.words
    assert 'report.html' in capsys.readouterr().out
    assert any('timm-splicemix validate --output DIR' in word for word in page.words)  # shows mistakes
    (run / 'report.html').unlink()


def test_results_are_shown_with_their_run_and_runs_side_by_side(place, tmp_path):
    page = write(tmp_path, place / 'runs' / 'one', place / 'runs' / 'two', place / 'results')
    result = json.loads((place / 'results' / 'results.json').read_text())
    value = result['metrics']['mAP']
    assert page.row('')[1:] == ['one: results', 'two']
    assert page.row('mAP')[1:] == [f'{value:.2f}', f'{value + 1.25:.2f} (+1.25)']
    assert page.row('class') == ['class', 'positives', 'one: results', 'two', 'difference']
    assert page.row(CLASSES[0])[4] in ('+0.00', '-')
    assert page.row('<b>x')[2:] == ['-', '-', '-']
    assert page.row('lr')[1:] == ['0.05', '0.5'] and page.row('log_interval')[1:] == ['2', '7']
    assert [cells for cells in page.cells if cells[0] == '64'] and 'sizes: table' in ' '.join(page.words)


def test_text_of_a_run_is_escaped(place, tmp_path):
    page = write(tmp_path, place / 'runs' / 'one', place / 'runs' / 'two')
    assert page.row('gp')[2] == EVIL and page.row(EVIL)[1] == '0.123'
    assert EVIL not in page.text and str(escape(EVIL)) in page.text


def test_the_report_of_several_runs_is_in_their_common_folder(place, tmp_path, monkeypatch):
    runs = shutil.copytree(place / 'runs', tmp_path / 'runs')
    monkeypatch.chdir(tmp_path)
    main(['runs/one', 'runs/two', '--title', 'Both & more', '--batches', '0'])
    page = Page(runs / 'report.html')
    page.check_alone()
    assert 'Both & more' in page.words and [picture['alt'] for picture in page.pictures] == ['analysis/cam']


def test_a_folder_of_analyses_alone_is_shown(tmp_path):
    Image.new('L', (30, 20)).save(tmp_path / 'a.png')
    (tmp_path / 'a.csv').write_text('size,mAP\n' + ''.join(f'{i},{i}.5\n' for i in range(150)))
    page = write(tmp_path, tmp_path)
    assert 'a: table (first 100 of 150 rows)' in page.words and len(page.cells) == 101


def test_only_regular_files_are_read(tmp_path):
    (tmp_path / 'a.csv').write_text('a,b,c\n1\n')
    os.mkfifo(tmp_path / 'pipe.png')
    (tmp_path / 'lost.png').symlink_to(tmp_path / 'nowhere.png')
    (tmp_path / 'loop').symlink_to(tmp_path)
    (tmp_path / 'args.yaml').mkdir()
    page = write(tmp_path, tmp_path)
    assert page.cells == [['a', 'b', 'c'], ['1', '', '']] and not page.pictures


def test_the_page_fits_narrow_and_wide_screens(place, tmp_path):
    text = write(tmp_path, place / 'runs' / 'one').text
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    without = re.sub(r'<div class="scroll">.*?</div>', '', text, flags=re.S)
    assert not {'table', 'img'} & set(re.findall(r'<(\w+)', without)), 'wide elements scroll by themselves'
    fixed = [int(value) for value in re.findall(r'[^-]width: (\d+)px', text)]
    assert all(value <= 358 for value in fixed)  # 390 without the margins


def test_wide_pictures_are_resized(tmp_path):
    for mode, name in (('RGB', 'a.jpg'), ('P', 'a.png'), ('RGBA', 'b.png')):
        Image.new(mode, (2 * MAX_PIXELS, 600)).save(tmp_path / name)
        picture = Picture.read(tmp_path / name, 'words')
        with Image.open(io.BytesIO(base64.b64decode(picture.source.partition('base64,')[2]))) as image:
            assert image.size == (picture.width, picture.height) == (MAX_PIXELS, 300)


@pytest.mark.parametrize('points', [
    [(0, 1.), (1, 2.), (2, float('nan')), (3, 4.)], [(0, 3.)], [(0, 0.), (1, 0.)], [(0, 1e-6), (500, 3e-5)],
    [(7, -1e9)]])
def test_curves_stay_inside_their_picture(points):
    chart = Chart('loss <1>', [Line(0, False, points), Line(9, True, points)])
    page = render_page('title', [], {'Curves': [('charts', [chart])]})
    svg = xml.etree.ElementTree.fromstring(re.search(r'<svg.*</svg>', page, re.DOTALL).group())
    for line in svg.iter('polyline'):
        places = [tuple(map(float, place.split(','))) for place in line.get('points').split()]
        assert len(places) == sum(y == y for _, y in points)
        assert all(52 <= x <= 348 and 28 <= y <= 206 for x, y in places)
        assert places == sorted(places)
    for text in svg.iter('text'):
        assert 0 <= float(text.get('x')) <= 360 and 0 <= float(text.get('y')) <= 240
    ticks = [text for text in svg.iter('text') if text.get('text-anchor') == 'end']
    assert 1 <= len(ticks) <= 7 and all(len(tick.text) <= 8 for tick in ticks)


def test_bad_input_is_one_line(tmp_path, capsys):
    for name in ('empty', 'yaml', 'list', 'json', 'metrics', 'classes', 'summary', 'picture', 'table', 'good'):
        (tmp_path / name).mkdir()
    (tmp_path / 'yaml' / 'args.yaml').write_text('a: [')
    (tmp_path / 'list' / 'args.yaml').write_text('- a')
    (tmp_path / 'json' / 'results.json').write_text('{')
    (tmp_path / 'metrics' / 'results.json').write_text('{"model": 1}')
    (tmp_path / 'classes' / 'results.json').write_text('{"metrics": {}}')
    (tmp_path / 'classes' / 'per_class_ap.csv').write_text('class,AP\na,b\n')
    (tmp_path / 'summary' / 'summary.csv').write_text('a,b\n1,2\n')
    (tmp_path / 'picture' / 'a.png').write_bytes(b'nothing')
    (tmp_path / 'table' / 'a.csv').write_bytes(b'a,\xff\n')
    (tmp_path / 'good' / 'a.csv').write_text('a,b\n1,2\n')
    for argv, message in (
            (['nowhere'], 'which is not a folder'), (['empty'], 'which has no args.yaml'), (['yaml'], 'args.yaml'),
            (['list'], 'args.yaml'), (['json'], 'results.json'), (['metrics'], 'results.json'),
            (['classes'], 'per_class_ap.csv'), (['summary'], 'summary.csv'), (['picture'], 'a.png'),
            (['table'], 'a.csv'), (['good', 'good'], 'twice'), (['good', '--batches', '-1'], '--batches'),
            (['good', '--output', '.'], 'file name for --output'),
            (['good', '--output', 'report.pdf'], "to end in .html, but got 'report.pdf'")):
        argv = [tmp_path / part if re.fullmatch(r'\w+|\.', part) else part for part in argv]
        check_refused(main, argv, message, capsys)
    assert not list(tmp_path.rglob('*.html'))


@pytest.mark.parametrize('width', [1280, 390])
def test_a_browser_shows_every_picture_within_the_width(place, tmp_path, width):
    report = write(tmp_path, place / 'runs' / 'one', place / 'runs' / 'two')
    seen = run_in_page(report.text, width, (
        'const pictures = [...page.images];'
        'return {wide: page.documentElement.scrollWidth, number: pictures.length,'
        ' broken: pictures.filter(picture => !picture.naturalWidth).length};'), tmp_path)
    assert seen['number'] > 0 and seen['broken'] == 0 and seen['wide'] <= width
