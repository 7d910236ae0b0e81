""" t-SNE of the classifier weights """
import csv
import json
import sys

import pytest
import timm
import torch
from PIL import Image

from tests.analyses import check_refused, read_table
from tests.evaluations import write_checkpoint
from tests.head_cases import make_model
from tests.helpers import raises_error
from timm_splicemix.analysis.tsne import (
    classifier_weights,
    group_classes,
    main,
    nearest_classes,
    neighbour_rows,
    project,
    read_groups,
    table_of,
)

CLASSES = ('bird', 'cat', 'dog', 'bus', 'car', 'van', '$5 _note_')
GROUPS = ('animal', 'animal', 'animal', 'vehicle', 'vehicle', 'vehicle', '_other')


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp('tsne')
    for name, seed in (('one', 0), ('two', 1)):
        write_checkpoint(folder / name, class_names=CLASSES, seed=seed)
    write_checkpoint(folder / 'few')
    with open(folder / 'groups.csv', 'w', newline='') as file:
        csv.writer(file).writerows([('class', 'super-category'), *zip(CLASSES, GROUPS)])
    categories = [{'name': name, 'supercategory': group} for name, group in zip(CLASSES, GROUPS)]
    (folder / 'coco.json').write_text(json.dumps({'categories': categories, 'images': []}))
    return folder


@torch.no_grad()
def test_the_weights_of_a_head_are_those_that_it_computes_or_those_of_its_classifiers():
    model = make_model('resnet', 'ml-gcn').eval()
    maps = torch.rand(2, 96, 3, 3)
    expected = maps.amax(dim=(2, 3)) @ classifier_weights(model).T
    torch.testing.assert_close(model.multilabel_head(maps), expected)
    assert classifier_weights(make_model('resnet', 'csra', heads=2)).shape == (5, 2 * 96)


def clusters():
    """Weights of six classes around two directions, and of one in another direction."""
    torch.manual_seed(0)
    centers = torch.eye(8)[[0, 0, 0, 1, 1, 1, 2]]
    return 5 * centers + 0.1 * torch.randn(7, 8)


def test_the_nearest_class_has_the_highest_cosine():
    weights = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    for index, found in enumerate(nearest_classes(weights)):
        others = [other for other in range(6) if other != index]
        cosines = [torch.cosine_similarity(weights[index], weights[other], dim=0) for other in others]
        assert found == others[int(torch.stack(cosines).argmax())]


def test_similar_classes_are_close_in_the_plane():
    places = project(clusters(), perplexity=2)
    distances = torch.cdist(places, places)
    assert distances[:3, :3].max() < distances[:3, 3:6].min()
    assert torch.equal(places, project(clusters(), perplexity=2))
    assert not torch.equal(places, project(clusters(), perplexity=2, seed=1))


def test_neighbours_are_counted_by_super_category():
    weights = clusters()
    weights[2] = weights[3]  # the dog gets the weights of the bus
    table = table_of('run', CLASSES, GROUPS, weights, torch.zeros(7, 2))
    counted = {row['super-category']: row['run'] for row in neighbour_rows({'run': table})}
    same = sum(row['nearest_group'] == 'vehicle' for row in table if row['group'] == 'vehicle')
    assert counted == {
        '_other': '-', 'animal': '2 of 3', 'vehicle': f'{same} of 3', 'all': f'{(2 + same) / 6:.1%}'}
    assert same < 3  # the nearest class of the bus is the dog


@pytest.mark.parametrize('name', ['test_resnet', 'test_vit', 'repvit_m0_9'])
def test_weights_are_those_of_the_classifier(name):
    model = timm.create_model(name, num_classes=5, pretrained=False)
    weights = classifier_weights(model)
    assert weights.shape[0] == 5 and weights.shape[1] >= model.num_features and not weights.requires_grad
    if name == 'test_resnet':
        assert torch.equal(weights, model.fc.weight)


def test_super_categories_come_from_coco_and_csv(place):
    expected = dict(zip(CLASSES, GROUPS))
    assert read_groups(place / 'coco.json') == expected
    assert read_groups(place / 'groups.csv') == {'class': 'super-category', **expected}
    assert group_classes(CLASSES, expected, '') == list(GROUPS)
    with raises_error("1 are missing, such as 'emu'"):
        group_classes(('bird', 'emu'), expected, 'file')


def test_the_command_writes_a_table_and_a_picture(place, tmp_path, capsys):
    main([str(place / 'one'), str(place / 'two'), '--groups', str(place / 'coco.json'), '--output', str(tmp_path)])
    rows = read_table(tmp_path / 'tsne.csv')
    assert [(row['checkpoint'], row['class'], row['group']) for row in rows] == [
        (run, *pair) for run in ('one', 'two') for pair in zip(CLASSES, GROUPS)]
    assert all(row['nearest'] in CLASSES and row['nearest'] != row['class'] and float(row['x']) for row in rows)
    with Image.open(tmp_path / 'tsne.png') as picture:
        assert picture.width > picture.height  # a panel for each
    assert 'vehicle' in capsys.readouterr().out


def test_without_super_categories_the_nearest_classes_are_listed(place, tmp_path, capsys):
    main([str(place / 'one'), '--perplexity', '2', '--metric', 'euclidean', '--output', str(tmp_path)])
    assert 'nearest' in capsys.readouterr().out
    assert (tmp_path / 'tsne.png').is_file()


def test_bad_input_is_one_line(place, tmp_path, capsys, monkeypatch):
    (tmp_path / 'three.csv').write_text('bird,animal,small\n')
    (tmp_path / 'empty.csv').write_text('')
    (tmp_path / 'part.csv').write_text('bird,animal\n')
    (tmp_path / 'blank.csv').write_text(''.join(f'{name},\n' for name in CLASSES))
    (tmp_path / 'no.json').write_text('{"categories": [{"name": "bird"}]}')
    (tmp_path / 'bad.json').write_text('{')

    def check(message, *argv):
        check_refused(main, [*argv, '--output', tmp_path / 'out'], message, capsys)

    for flags, message in (
            (['--groups', tmp_path / 'three.csv'], "the row 'bird,animal,small'"),
            (['--groups', tmp_path / 'empty.csv'], 'but got none'),
            (['--groups', tmp_path / 'part.csv'], "6 are missing, such as 'cat'"),
            (['--groups', tmp_path / 'blank.csv'], "7 are empty, such as that of 'bird'"),
            (['--groups', tmp_path / 'no.json'], 'supercategory'),
            (['--groups', tmp_path / 'bad.json'], 'Expected JSON'),
            (['--groups', tmp_path / 'nowhere.csv'], 'nowhere.csv'),
            (['--perplexity', '7'], 'less than the 7 classes'),
            (['--perplexity', 'nan'], '--perplexity')):
        check(message, place / 'one', *flags)
    check('at least 4 classes', place / 'few')
    monkeypatch.setitem(sys.modules, 'sklearn.manifold', None)
    check("pip install 'timm-splicemix[analysis]'", place / 'one')
    assert not (tmp_path / 'out').exists()
