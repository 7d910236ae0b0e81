""" Mistakes in the report: which are chosen, their pictures, and the filters in a browser """
import base64
import io
import json
import shutil
from urllib.parse import urlencode

import numpy as np
import pytest
import torch
from PIL import Image

from tests import runs
from tests.analyses import check_refused
from tests.browser import dump_dom, run_in_page
from tests.evaluations import write_checkpoint
from tests.test_report import EVIL, Page
from timm_splicemix.report import main
from timm_splicemix.results import Scores
from timm_splicemix.validate import main as validate

CLASSES = ('cat', 'dog', '犬 כלב')
# Probability and label (1 present, 0 absent, -1 unknown) of cat and dog; the third class is always right.
IMAGES = (
    ((0.99, 0), (0.10, 0)), ((0.60, 0), (0.95, 1)), ((0.90, 0), (0.02, 1)), ((0.97, -1), (0.30, 1)),
    ((0.01, -1), (0.50, 0)), ((0.20, 1), (0.40, 0)), ((0.80, 1), (0.05, 1)))


def write_results(folder, images=IMAGES, classes=CLASSES, root=None, **content):
    """Write what validate.py writes for given probabilities and labels, and a picture of each image."""
    root = root or folder.parent / f'{folder.name}-images'
    root.mkdir(parents=True, exist_ok=True)
    files = []
    for index in range(len(images)):
        files.append(f'{index}.jpg')
        noise = np.random.default_rng(index).integers(0, 256, (6, 8, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((320, 240)).save(root / files[-1])
    rows = [[*image, *[(0.1, 0)] * (len(classes) - 2)] for image in images]
    probabilities = torch.tensor([[value for value, _ in row] for row in rows], dtype=torch.float64)
    targets = torch.tensor([[label for _, label in row] for row in rows], dtype=torch.int8)
    folder.mkdir(parents=True, exist_ok=True)
    Scores(probabilities.logit().float(), targets, tuple(classes), torch.arange(len(images)), tuple(files)).save(
        folder / 'scores.npz')
    result = {
        'metrics': {'mAP': 50.}, 'preset': 'paper', 'dataset': 'csv', 'split': 'val', 'num_images': len(images),
        'threshold': 0.5, 'image_folder': str(root), **content}
    (folder / 'results.json').write_text(json.dumps({key: value for key, value in result.items() if value != 'none'}))
    return folder


def report(tmp_path, *argv):
    """Write a report; returns the page and the data of its mistakes."""
    output = tmp_path / 'report.html'
    main([*map(str, argv), '--output', str(output)])
    page = Page(output)
    page.check_alone()
    return page, json.loads(page.scripts[0]) if page.scripts else None


def cards_of(data, kind, name=None, result=0):
    """File and probability of each card of a kind, in the order of the page."""
    classes = data['results'][result]['classes']
    return [(data['files'][card[1]], card[5]) for card in data['cards'] if card[0] == result and card[3] == kind
            and (name is None or classes[card[4]] == name)]


def notes_of(page):
    return ' '.join(page.words)


def test_the_most_confident_mistakes_of_each_class_are_chosen(tmp_path):
    page, data = report(tmp_path, write_results(tmp_path / 'results'), '--mistakes', 2)
    # Images 3 and 4 have an unknown label for cat; image 4 is predicted as dog, at exactly the threshold.
    assert cards_of(data, 'fp', 'cat') == [('0.jpg', 0.99), ('2.jpg', 0.9)]
    assert cards_of(data, 'fn', 'cat') == [('5.jpg', 0.2)]
    assert cards_of(data, 'fp', 'dog') == [('4.jpg', 0.5)]
    assert cards_of(data, 'fn', 'dog') == [('2.jpg', 0.02), ('6.jpg', 0.05)]
    assert not cards_of(data, 'fp', CLASSES[2]) and not cards_of(data, 'fn', CLASSES[2])
    assert data['results'][0]['wrong'] == [[3, 1, 0], [1, 3, 0]]  # all, also those that are not shown
    assert 'a class is predicted at a probability of at least 0.5.' in notes_of(page)
    assert sorted(cards_of(data, 'random')) == [(f'{index}.jpg', None) for index in range(7)]
    # Over all classes, the most confident mistake is the first.
    assert [data['files'][card[1]] for card in data['cards'] if card[3] != 'random'][:2] == ['0.jpg', '2.jpg']


def test_the_thresholds_of_the_evaluation_count(tmp_path):
    results = write_results(
        tmp_path / 'results', threshold=[0.95, 0.05, 0.5], preset='asl', thresholds_tuned_on='csv tune')
    page, data = report(tmp_path, results)
    assert cards_of(data, 'fp', 'cat') == [('0.jpg', 0.99)] and len(cards_of(data, 'fn', 'cat')) == 2
    assert cards_of(data, 'fn', 'dog') == [('2.jpg', 0.02), ('6.jpg', 0.05)]  # at the threshold is not above
    assert 'a probability above the threshold of its class, tuned on csv tune' in notes_of(page)
    assert data['results'][0]['thresholds'] == [0.95, 0.05, 0.5]


def test_a_probability_at_the_threshold_is_predicted_as_in_the_metrics(tmp_path):
    for threshold in torch.arange(0.05, 1, 0.05).tolist():
        results = write_results(tmp_path / 'results', [((threshold, 0), (threshold, 1))], threshold=threshold)
        _, data = report(tmp_path, results)
        assert len(cards_of(data, 'fp', 'cat')) == data['results'][0]['wrong'][0][0] == 1
        assert not cards_of(data, 'fn', 'dog')


def test_a_card_lists_all_labels_of_its_image(tmp_path):
    _, data = report(tmp_path, write_results(tmp_path / 'results'))
    views = {data['files'][card[1]]: data['views'][card[2]] for card in data['cards']}
    assert views['1.jpg'] == [[[1, 0.95, 1, 1], [0, 0.6, 0, 1]], 0]  # class, probability, label, predicted
    assert views['3.jpg'] == [[[0, 0.97, -1, 1], [1, 0.3, 1, 0]], 0]
    many = write_results(
        tmp_path / 'many', images=[((0.9, 0),) * 2] * 2, classes=[str(index) for index in range(40)], threshold=0.05)
    _, data = report(tmp_path, many)
    assert {(len(view), rest) for view, rest in data['views']} == {(12, 28)}


def test_every_one_of_many_classes_has_its_mistakes(tmp_path):
    classes = [f'class {index}' for index in range(150)]
    results = write_results(tmp_path / 'results', [((0.9, 0), (0.1, 1))] * 2, classes, threshold=0.05)
    _, data = report(tmp_path, results, '--mistakes', 1, '--sample', 0)
    assert sorted(card[4] for card in data['cards'] if card[3] == 'fp') == [0, *range(2, 150)]
    assert data['results'][0]['wrong'][0] == [2, 0, *[2] * 148]


def test_each_picture_is_embedded_once_and_small(tmp_path):
    root = tmp_path / 'images'
    first, second = (write_results(tmp_path / name, root=root) for name in ('one', 'two'))
    rotated = Image.new('RGB', (400, 200), 'red')
    exif = rotated.getexif()
    exif[0x0112] = 6
    rotated.save(root / '0.jpg', exif=exif)
    Image.fromarray(np.full((50, 40), 0x8000, dtype=np.uint16)).save(root / '1.jpg', 'PNG')  # 16 bits
    _, data = report(tmp_path, first, second, '--thumbnail-size', 100)
    assert len(data['results']) == 2 and len(data['cards']) == 2 * (3 + 1 + 1 + 3 + 7)
    assert sorted(data['files']) == [f'{index}.jpg' for index in range(7)]
    assert len(set(data['thumbnails'])) == 7
    pictures = {}
    for file, content in zip(data['files'], data['thumbnails']):
        with Image.open(io.BytesIO(base64.b64decode(content))) as image:
            pictures[file] = image.convert('RGB')
            assert image.format == 'JPEG'
    assert {image.size for file, image in pictures.items() if file > '1.jpg'} == {(100, 75)}
    assert pictures['0.jpg'].size == (50, 100)
    assert pictures['1.jpg'].size == (40, 50) and abs(pictures['1.jpg'].getpixel((9, 9))[0] - 128) < 3


def test_the_number_of_pictures_is_limited(tmp_path):
    results = write_results(tmp_path / 'results')
    page, data = report(tmp_path, results, '--max-pictures', 3, '--sample', 0)
    # The most confident mistake of every class and kind comes before the second of any: images 0, 2, 5, then 4.
    assert data['files'] == ['0.jpg', '2.jpg', '5.jpg']
    assert cards_of(data, 'fp') == [('0.jpg', 0.99), ('2.jpg', 0.9)]
    assert '4 less confident mistakes are left out' in notes_of(page)
    _, data = report(tmp_path, results, '--mistakes', 0, '--sample', 2)
    assert [card[3] for card in data['cards']] == ['random'] * 2
    page, data = report(tmp_path, results, '--mistakes', 0, '--sample', 0)
    assert data is None and 'Mistakes' not in page.words


def test_the_random_sample_is_the_same_for_results_of_the_same_images(tmp_path):
    first, second = (write_results(tmp_path / name, root=tmp_path / 'images') for name in ('one', 'two'))
    _, data = report(tmp_path, first, second, '--sample', 3)
    assert cards_of(data, 'random') == cards_of(data, 'random', result=1) != []


def test_the_page_says_how_many_random_images_it_has(tmp_path):
    results = write_results(tmp_path / 'results')
    for number, sentence in ((3, '3 random images show'), (24, 'All 7 images show')):
        page, _ = report(tmp_path, results, '--sample', number)
        assert sentence in notes_of(page)


def test_moved_and_missing_pictures_are_one_line(tmp_path, capsys):
    results = write_results(tmp_path / 'results')
    moved = tmp_path / 'elsewhere' / 'val'
    moved.parent.mkdir()
    shutil.move(tmp_path / 'results-images', moved)
    page, data = report(tmp_path, results)
    assert set(data['thumbnails']) == {None} and len(data['cards']) == 15
    assert f'such as 0.jpg, in {tmp_path}/results-images. If they were moved, give their folder by --images.' in (
        notes_of(page))
    for folder in (moved, moved.parent):
        page, data = report(tmp_path, results, '--images', folder)
        assert None not in data['thumbnails'] and f'Pictures: {moved}' in page.words
    (moved / '0.jpg').unlink()
    (moved / '2.jpg').write_bytes(b'no image')
    page, data = report(tmp_path, results, '--images', moved)
    missing = [file for file, thumbnail in zip(data['files'], data['thumbnails']) if thumbnail is None]
    message = '2 of 7 pictures cannot be read, such as'
    assert sorted(missing) == ['0.jpg', '2.jpg'] and message in notes_of(page)
    assert message in capsys.readouterr().err
    check_refused(main, [results, '--images', moved / '1.jpg'], '--images', capsys)


def test_results_without_their_folder_use_that_of_the_run(tmp_path):
    run = tmp_path / 'run'
    results = write_results(run / 'validate', image_folder='none')
    page, data = report(tmp_path, results)
    assert set(data['thumbnails']) == {None} and 'give their folder by --images' in notes_of(page)
    (run / 'args.yaml').write_text(f'dataset: csv\ndata_dir: {run}\n')
    assert None not in report(tmp_path, run)[1]['thumbnails']
    (run / 'args.yaml').write_text(f'dataset: coco\ndata_dir: {run}\n')  # other images of the same name
    assert set(report(tmp_path, run)[1]['thumbnails']) == {None}


def test_images_inside_shards_are_listed_without_pictures(tmp_path):
    results = write_results(tmp_path / 'results', image_folder=None, dataset='wds/photos')
    page, data = report(tmp_path, results)
    assert len(data['cards']) == 15 and set(data['thumbnails']) == {None}
    assert 'No pictures of results: its images are not files of their own.' in page.words


def test_malformed_thresholds_are_one_line(tmp_path, capsys):
    for threshold in ([0.5], 'high', None, 7):
        results = write_results(tmp_path / 'results', threshold=threshold)
        check_refused(main, [results], 'results.json', capsys)


def test_pictures_of_a_real_evaluation_are_found(data, tmp_path, monkeypatch):
    checkpoint = write_checkpoint(tmp_path / 'run', class_names=runs.CLASSES)
    monkeypatch.chdir(data.parent)
    validate([
        '--dataset', 'csv', '--data-dir', data.name, '--split', 'val', '--checkpoint', str(checkpoint), '-j', '0',
        '--output', str(tmp_path / 'results')])
    monkeypatch.chdir(tmp_path)
    page, found = report(tmp_path, 'results')
    assert len(found['files']) == 9 and None not in found['thumbnails'] and f'Pictures: {data}' in page.words


STEPS = """
    const get = id => page.getElementById(id);
    const fields = get('mistakes-filters').elements;
    const seen = [];
    const look = async () => {
      const cards = [...get('mistakes-list').children];
      const pictures = [...get('mistakes-list').querySelectorAll('img')];
      for (const picture of pictures) picture.loading = 'eager';
      await Promise.all(pictures.map(picture => picture.complete || new Promise(done => { picture.onload = done; })));
      seen.push({
        wide: page.documentElement.scrollWidth, status: get('mistakes-status').textContent,
        more: get('mistakes-more').hidden ? null : get('mistakes-more').textContent,
        pictures: pictures.filter(picture => picture.naturalWidth).length,
        cards: cards.map(card => [card.querySelector('.badge').textContent, card.querySelector('h3')?.textContent ?? '',
                                  card.querySelector('.file').textContent])});
    };
    const choose = async (name, value) => {
      fields[name].value = value;
      fields[name].dispatchEvent(new Event('input', {bubbles: true}));
      await look();
    };
    await look();
"""


def test_a_probability_just_below_the_threshold_is_not_rounded_to_it(tmp_path):
    images = (((0.4964, 1), (0.4961, 1)), ((0.9, 1), (0.9, 1)))
    page, _ = report(tmp_path, write_results(tmp_path / 'results', images), '--sample', 0)
    text, *_ = run_in_page(page.text, 1280, """
        return [page.getElementById('mistakes-list').textContent];""", tmp_path)
    assert 'probability 0.496, threshold 0.500' in text and 'Also false negative: cat 0.496' in text


@pytest.mark.parametrize('width', [1280, 390])
def test_the_filters_work_in_a_browser(tmp_path, width):
    page, _ = report(tmp_path, write_results(tmp_path / 'results'))
    seen = run_in_page(page.text, width, STEPS + """
        await choose('class', 'cat');
        await choose('kind', 'fn');
        get('mistakes-filters').querySelector('button').click(); await look();
        await choose('kind', 'random');
        await choose('kind', '');
        await choose('search', '2.JPG dog');
        await choose('search', 'nothing of the kind');
        return seen;""", tmp_path)
    everything, cat, missed_cat, cleared, random, _, searched, nothing = seen
    positive, negative = 'False positive', 'False negative'
    assert len(everything['cards']) == everything['pictures'] == 15 and everything['cards'] == cleared['cards']
    assert everything['cards'][:2] == [[positive, 'cat', '0.jpg'], [negative, 'dog', '2.jpg']]
    assert [card for card in cat['cards'] if card[1]] == [
        [positive, 'cat', '0.jpg'], [positive, 'cat', '2.jpg'], [negative, 'cat', '5.jpg'], [positive, 'cat', '1.jpg']]
    # Random images with the class: labelled or predicted as cat, also where the label is unknown
    assert {card[2] for card in cat['cards'] if not card[1]} == {f'{index}.jpg' for index in (0, 1, 2, 3, 5, 6)}
    assert missed_cat['cards'] == [[negative, 'cat', '5.jpg']]
    assert '3 false positives and 1 false negative in 7 images for cat' in missed_cat['status']
    assert {card[0] for card in random['cards']} == {'Random image'} and len(random['cards']) == 7
    assert len(searched['cards']) == 3 and {card[2] for card in searched['cards']} == {'2.jpg'}
    assert not nothing['cards'] and nothing['status'].startswith('0 cards')
    assert all(step['wide'] <= width for step in seen)


@pytest.mark.parametrize('width', [1280, 390])
def test_long_and_hostile_names_stay_text_in_a_browser(tmp_path, width):
    names = [EVIL, 'w' * 150, '</script><img src=x onerror="document.title=1">', *map(str, range(57))]
    images = [((0.9 - index / 1000, 0), (0.9, 0)) for index in range(30)]
    first, second = (
        write_results(tmp_path / name, images, names, root=tmp_path / 'images') for name in ('one', 'l' * 90))
    page, data = report(tmp_path, first, second, '--mistakes', 30)
    assert len(data['cards']) == 2 * (2 * 30 + 24)
    seen = run_in_page(page.text, width, STEPS + """
        get('mistakes-more').click(); await look();
        await choose('result', '1');
        await choose('class', fields.class.options[fields.class.length - 1].value);
        return {seen, title: page.title, scripts: page.scripts.length,
                options: [...fields.class.options].map(option => option.value)};""", tmp_path)
    first, second, other, _ = seen['seen']
    assert seen['title'] == 'Report' and seen['scripts'] == 2 and set(names) <= set(seen['options'])
    assert len(first['cards']) == 48 and first['more'] == 'Show 36 more'
    assert len(second['cards']) == 84 and second['more'] is None and len(other['cards']) == 48
    assert {card[1] for card in second['cards']} == {EVIL, 'w' * 150, ''}
    assert all(step['wide'] <= width for step in seen['seen'])


def test_the_address_sets_the_filters(tmp_path):
    report(tmp_path, write_results(tmp_path / 'results'))
    state = urlencode({'mistakes': '', 'class': 'dog', 'kind': 'fn', 'search': '6'})
    page = dump_dom(f'{(tmp_path / "report.html").as_uri()}#{state}')
    assert page.count('<li class="card') == page.count('<li class="card fn"') == 1 and '<bdi>6.jpg</bdi>' in page
