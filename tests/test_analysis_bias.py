""" Pairs of classes that co-occur, and AP with and without the context """
import json
import math
from dataclasses import replace

import pytest
import torch
from sklearn.metrics import average_precision_score

from tests.analyses import check_refused, check_written, random_scores, read_table, write_result
from tests.helpers import rng
from timm_splicemix.analysis.bias import (
    COCO_STUFF_PAIRS,
    Context,
    Pair,
    count_images,
    create_context,
    find_pairs,
    main,
    read_annotations,
    score_pairs,
)
from timm_splicemix.data import create_dataset, generate_shapes
from timm_splicemix.data.shapes_scene import BIASED_PAIRS, CLASS_NAMES

NAMES = ('ant', 'bee', 'cow', 'dog', 'elk')
PARTNERS = {name: partner for pair in BIASED_PAIRS for name, partner in (pair, pair[::-1])}


def make_scores(number=80, seed=0, unknown=True):
    targets = (torch.rand(number, 5, generator=rng(3)) < torch.tensor([.6, .5, .4, .3, .2])).to(torch.int8)
    if unknown:
        targets[torch.rand(number, 5, generator=rng(4)) < 0.1] = -1
    files = [f'val/COCO_val2014_{index:012d}.jpg' for index in range(number)]
    return random_scores(targets, NAMES, seed, files)


def reference_pairs(scores, context, number, min_part):
    """The protocol in plain loops."""
    found = []
    for b, name in enumerate(scores.class_names):
        images = [row for row in range(len(scores.scores)) if scores.targets[row, b] == 1]
        best = None
        for z, other in enumerate(context.names):
            with_z = [row for row in images if context.targets[row, z] == 1]
            without = [row for row in images if context.targets[row, z] == 0]
            if other == name or not with_z or not without or len(with_z) / len(images) < min_part:
                continue
            means = [sum(1 / (1 + math.exp(-scores.scores[row, b])) for row in rows) / len(rows)
                     for rows in (with_z, without)]
            if best is None or means[0] / means[1] > best[1]:
                best = (other, means[0] / means[1])
        if best is not None:
            found.append((name, *best))
    return sorted(found, key=lambda pair: -pair[2])[:number]


def reference_ap(scores, context, pair, has_context):
    """AP of a class on its images with or without the context, and all images without the class."""
    b, c = scores.class_names.index(pair.name), context.names.index(pair.context)
    rows = [
        row for row in range(len(scores.scores))
        if scores.targets[row, b] == 0 or (scores.targets[row, b] == 1 and context.targets[row, c] == has_context)]
    return 100 * average_precision_score((scores.targets[rows, b] == 1).numpy(), scores.scores[rows, b].numpy())


@pytest.mark.parametrize('number, min_part', [(20, 0.2), (3, 0.2), (20, 0.35), (20, 0.)])
def test_pairs_are_those_of_the_protocol(number, min_part):
    scores = make_scores()
    pairs = find_pairs(scores, create_context(scores), number, min_part)
    expected = reference_pairs(scores, create_context(scores), number, min_part)
    assert [(pair.name, pair.context) for pair in pairs] == [(name, other) for name, other, _ in expected]
    assert [pair.bias for pair in pairs] == pytest.approx([bias for _, _, bias in expected])


def test_some_classes_alone_may_be_biased():
    scores = make_scores()
    pairs = find_pairs(scores, create_context(scores), classes=['bee', 'dog'])
    assert {pair.name for pair in pairs} == {'bee', 'dog'}


def test_a_context_in_all_or_none_of_the_images_is_not_used():
    targets = torch.tensor([[1, 1, 0, 1], [1, 1, 0, 0], [1, 1, 0, 1], [0, 0, 0, 0]], dtype=torch.int8)
    scores = random_scores(targets, 'abcd')
    pairs = {pair.name: pair.context for pair in find_pairs(scores, create_context(scores), min_part=0.)}
    assert pairs == {'a': 'd', 'b': 'd'}


def test_a_fifth_of_the_images_is_enough():
    targets = torch.tensor([[1, 1]] + [[1, 0]] * 4, dtype=torch.int8)
    scores = random_scores(targets, 'ab')
    assert [pair.name for pair in find_pairs(scores, create_context(scores))] == ['a']
    assert not find_pairs(scores, create_context(scores), min_part=0.21)


def test_ap_is_that_of_the_images_of_each_distribution():
    scores = make_scores()
    context = create_context(scores)
    pairs = find_pairs(scores, context)
    assert len(pairs) == 5
    for pair, (exclusive, together) in zip(pairs, score_pairs(scores, context, pairs)):
        assert exclusive == pytest.approx(reference_ap(scores, context, pair, 0))
        assert together == pytest.approx(reference_ap(scores, context, pair, 1))
        b, c = (scores.targets[:, NAMES.index(name)] for name in (pair.name, pair.context))
        assert count_images(scores, context, pair) == (
            sum(x == 1 and y == 0 for x, y in zip(b, c)), sum(x == 1 and y == 1 for x, y in zip(b, c)))


def write_stuff(path, images, labels):
    """Write annotations of stuff: the names of the classes of each image."""
    names = sorted({name for some in labels for name in some})
    path.write_text(json.dumps({
        'images': [{'id': 100 + image, 'file_name': f'{image:012d}.jpg'} for image in images],
        'categories': [{'id': 92 + index, 'name': name} for index, name in enumerate(names)],
        'annotations': [
            {'image_id': 100 + image, 'category_id': 92 + names.index(name)}
            for image, some in zip(images, labels) for name in some]}))
    return str(path)


def test_stuff_is_matched_by_the_number_of_the_image(tmp_path):
    scores = make_scores(4)
    files = [
        write_stuff(tmp_path / 'a.json', [3, 0], [['road', 'other'], ['sky']]),
        write_stuff(tmp_path / 'b.json', [1, 2, 7], [['road', 'sky'], [], ['sand']])]
    context = create_context(scores, read_annotations(files))
    assert context.names == (*NAMES, 'road', 'sand', 'sky')  # 'other' is not stuff
    assert torch.equal(context.targets[:, :5], scores.targets)
    assert context.targets[:, 5:].tolist() == [[0, 0, 1], [1, 0, 1], [0, 0, 0], [1, 0, 0]]


def test_stuff_can_be_the_context_of_an_object():
    scores = make_scores(unknown=False)
    stuff = (torch.rand(80, 1, generator=rng(8)) < 0.5).to(torch.int8)
    scores.scores[:, 2] = 4. * stuff[:, 0] - 2
    context = Context((*NAMES, 'road'), torch.cat([scores.targets, stuff], dim=1))
    assert (find_pairs(scores, context)[0].name, find_pairs(scores, context)[0].context) == ('cow', 'road')
    (exclusive, together), = score_pairs(scores, context, [Pair('cow', 'road')])
    assert together > exclusive


def test_the_command_takes_stuff_as_context(tmp_path):
    scores = make_scores(unknown=False)
    stuff = torch.rand(80, generator=rng(8)) < 0.5
    scores.scores[:, 2] = 4. * stuff - 2
    path = write_result(tmp_path / 'a', scores)
    file = write_stuff(tmp_path / 'stuff.json', range(80), [['road'] if there else [] for there in stuff])
    main([path, '--context', file, '--number', '1', '--output', str(tmp_path / 'out')])
    row, = read_table(tmp_path / 'out' / 'bias_pairs.csv')
    cows = scores.targets[:, 2] == 1
    assert (row['class'], row['context']) == ('cow', 'road')
    assert (int(row['exclusive']), int(row['co-occur'])) == (int((cows & ~stuff).sum()), int((cows & stuff).sum()))


@pytest.fixture(scope='module')
def shapes(tmp_path_factory):
    images = {'val': 150, 'val_unbiased': 150}
    root = generate_shapes(tmp_path_factory.mktemp('data') / 'shapes', images=images)
    return {split: create_dataset('coco', root, split) for split in images}


def follow_partners(dataset, seed):
    """Scores of a model that responds to the partner of a class as much as to the class."""
    targets = dataset.targets.float()
    partners = torch.stack([
        targets[:, CLASS_NAMES.index(PARTNERS[name])] if name in PARTNERS else torch.zeros(len(targets))
        for name in CLASS_NAMES], dim=1)
    scores = targets + 2 * partners + 0.3 * torch.randn(targets.shape, generator=rng(seed))
    files = [dataset.filename(index) for index in range(len(targets))]
    return replace(random_scores(dataset.targets, CLASS_NAMES, files=files), scores=scores)


def test_the_pairs_of_shapes_are_found_and_biased_models_fail_without_context(shapes, tmp_path, capsys, caplog):
    held_out = write_result(tmp_path / 'held-out', follow_partners(shapes['val'], 1))
    dataset = shapes['val_unbiased']
    biased = follow_partners(dataset, 2)
    fair = replace(biased, scores=dataset.targets + 0.5 * torch.randn(biased.scores.shape, generator=rng(3)))
    paths = [write_result(tmp_path / 'biased', biased), write_result(tmp_path / 'fair', fair)]
    output = tmp_path / 'out'
    main([*paths, '--pairs-from', held_out, '--output', str(output)])
    check_written(output, 'bias.csv', 'bias.png', 'bias_pairs.csv')
    assert 'Pairs are found on the images that are scored' not in caplog.text
    pairs = read_table(output / 'bias_pairs.csv')
    assert {row['class']: row['context'] for row in pairs} == PARTNERS
    assert float(pairs[0]['bias']) >= float(pairs[-1]['bias']) > 1
    first, second = read_table(output / 'bias.csv')
    assert float(first['co-occur']) > float(first['exclusive']) + 20
    assert float(second['exclusive']) > float(first['exclusive']) + 20
    scored = [row for row in pairs if row['exclusive'] != '0' and row['co-occur'] != '0']
    assert scored
    for row, name in ((first, 'biased'), (second, 'fair')):
        for kind in ('exclusive', 'co-occur'):
            values = [float(pair[f'{name} {kind}']) for pair in scored]
            assert float(row[kind]) == pytest.approx(sum(values) / len(values))
        assert float(row['sum']) == pytest.approx(float(row['exclusive']) + float(row['co-occur']))
    content = json.loads((tmp_path / 'fair' / 'results.json').read_text())
    assert float(second['mAP']) == content['metrics']['mAP']
    printed = capsys.readouterr().out

    # The pairs that were written can be read again.
    main([*paths, '--pairs', str(output / 'bias_pairs.csv'), '--output', str(tmp_path / 'again')])
    assert read_table(tmp_path / 'again' / 'bias.csv') == [first, second]
    assert capsys.readouterr().out.splitlines()[:-1] == printed.splitlines()[:-1]


def test_classes_without_a_pair_have_their_own_mean(tmp_path, caplog):
    scores = make_scores()
    path = write_result(tmp_path / 'a', scores)
    main([path, '--number', '2', '--output', str(tmp_path / 'out')])
    assert 'Pairs are found on the images that are scored' in caplog.text
    biased = {row['class'] for row in read_table(tmp_path / 'out' / 'bias_pairs.csv')}
    values = [float(row['AP']) for row in read_table(f'{path}/per_class_ap.csv') if row['class'] not in biased]
    row, = read_table(tmp_path / 'out' / 'bias.csv')
    assert len(values) == 3 and float(row['mAP of other classes']) == pytest.approx(sum(values) / 3)


def test_a_pair_without_images_in_a_distribution_is_left_out_and_named(tmp_path, capsys):
    scores = make_scores(unknown=False)
    scores.targets[scores.targets[:, 0] == 1, 1] = 1  # no ant without a bee
    path = write_result(tmp_path / 'a', scores)
    (tmp_path / 'pairs.csv').write_text('class,context\nant,bee\ncow,dog\n')
    main([path, '--pairs', str(tmp_path / 'pairs.csv'), '--output', str(tmp_path / 'out')])
    assert 'no images: ant - bee.' in capsys.readouterr().out
    exclusive, together = score_pairs(scores, create_context(scores), [Pair('cow', 'dog')])[0]
    row, = read_table(tmp_path / 'out' / 'bias.csv')
    assert (float(row['exclusive']), float(row['co-occur'])) == (pytest.approx(exclusive), pytest.approx(together))


def test_the_published_pairs_have_twenty_classes():
    assert len({name for name, _ in COCO_STUFF_PAIRS}) == len(COCO_STUFF_PAIRS) == 20


def test_bad_input_is_one_line_and_exit_code_2(tmp_path, capsys):
    path = write_result(tmp_path / 'a', make_scores())
    other = write_result(tmp_path / 'other', random_scores(make_scores().targets[:, :2], NAMES[:2]))
    stuff = write_stuff(tmp_path / 'stuff.json', [1, 2], [['road'], []])
    bad = tmp_path / 'bad'
    bad.write_text('name\nant\n')
    empty = tmp_path / 'empty.json'
    empty.write_text('{}')
    twice = tmp_path / 'twice.csv'
    twice.write_text('class,context\nant,bee\nant,cow\n')
    absent = tmp_path / 'absent.csv'
    absent.write_text('class,context\nant,road\n')
    for argv, message in [
            (['--number', '0'], 'argument --number: '), (['--min-part', '2'], 'argument --min-part: '),
            (['--pairs', bad, '--number', '3'], '--pairs, or --number'), (['--pairs', bad], "a column 'class'"),
            (['--pairs', tmp_path / 'nowhere'], 'nowhere'), (['--pairs', twice], "'ant' twice"),
            (['--pairs', absent], "but got 'road'"), (['--pairs', 'coco-stuff'], "but got 'cup'"),
            (['--context', bad], 'Expected JSON'), (['--context', empty], 'COCO format'),
            (['--context', stuff], '78 that are missing'),
            (['--pairs-from', other], 'the classes of the results'), (['--pairs-from', tmp_path], 'results.json'),
            (['--classes', bad], "but got 'name'"), (['--classes', tmp_path / 'nowhere'], 'nowhere'),
            (['--min-part', '1'], 'Lower --min-part')]:
        check_refused(main, [path, *argv, '--output', tmp_path / 'out'], message, capsys)
    (tmp_path / 'a' / 'scores.npz').unlink()
    check_refused(main, [path], 'scores.npz', capsys)
