""" AP gain by object size """
import json
import math

import pytest
import torch

from tests.analyses import check_refused, check_written, random_scores, read_table, write_result
from tests.helpers import rng
from timm_splicemix.analysis.small_objects import (
    gain_rows,
    main,
    mean_areas,
    mean_rows,
)
from timm_splicemix.data import create_dataset, generate_shapes
from timm_splicemix.data.shapes_scene import CLASS_NAMES
from timm_splicemix.results import read_results

NAMES = ('ant', 'bee', 'cow', 'dog', 'elk')
AREAS = {'ant': 1., 'bee': 2., 'cow': 50., 'dog': 40., 'elk': 90.}


@pytest.fixture(scope='module')
def shapes(tmp_path_factory):
    return generate_shapes(tmp_path_factory.mktemp('data') / 'shapes', images={'val': 60})


@pytest.fixture
def results(tmp_path):
    targets = (torch.rand(30, 5, generator=rng(9)) < 0.5).to(torch.int8)
    return [write_result(tmp_path / f'r{seed}', random_scores(targets, NAMES, seed)) for seed in range(3)]


def test_areas_are_means_over_objects(shapes):
    areas = mean_areas(create_dataset('coco', shapes, 'val'))
    content = json.loads((shapes / 'annotations' / 'instances_val.json').read_text())
    for entry in content['categories']:
        own = [item['area'] for item in content['annotations'] if item['category_id'] == entry['id']]
        assert areas[entry['name']] == pytest.approx(sum(own) / len(own))
    assert list(areas) == list(CLASS_NAMES)


def test_gains_are_differences_of_the_written_ap(results):
    evaluated = read_results(results, ['base', 'a', 'b'])
    rows = gain_rows(evaluated, AREAS, 2)
    assert [row['class'] for row in rows] == ['ant', 'bee', 'dog', 'cow', 'elk']
    assert [row['group'] for row in rows] == ['smallest', 'smallest', '', 'largest', 'largest']
    tables = [{row['class']: float(row['AP']) for row in read_table(f'{path}/per_class_ap.csv')} for path in results]
    for row in rows:
        name = row['class']
        assert [row['base AP'], row['a AP'], row['b AP']] == [table[name] for table in tables]
        assert row['a gain'] == tables[1][name] - tables[0][name]
        assert row['b gain'] == tables[2][name] - tables[0][name]
    small, large = mean_rows(rows)
    assert small['class'] == 'mean of 2' and small['area'] == 1.5 and large['area'] == 70.
    assert small['b gain'] == pytest.approx((rows[0]['b gain'] + rows[1]['b gain']) / 2)
    assert large['a gain'] == pytest.approx((rows[3]['a gain'] + rows[4]['a gain']) / 2)


def test_groups_never_share_a_class(results):
    rows = gain_rows(read_results(results), AREAS, 20)
    assert [row['group'] for row in rows] == ['smallest', 'smallest', '', 'largest', 'largest']


def test_classes_without_objects_or_positives_are_left_out(tmp_path):
    targets = (torch.rand(30, 5, generator=rng(9)) < 0.5).to(torch.int8)
    targets[:, 1] = 0
    paths = [write_result(tmp_path / f'r{seed}', random_scores(targets, NAMES, seed)) for seed in range(2)]
    rows = gain_rows(read_results(paths), {**AREAS, 'elk': math.nan})
    assert [row['class'] for row in rows] == ['ant', 'dog', 'cow']


def test_the_command_reads_results_and_annotations_of_shapes(shapes, tmp_path, capsys):
    dataset = create_dataset('coco', shapes, 'val')
    paths = [
        write_result(tmp_path / f'r{seed}', random_scores(dataset.targets, dataset.class_names, seed), dataset='coco')
        for seed in range(3)]
    output = tmp_path / 'out'
    main([*paths, '--data-dir', str(shapes), '--names', 'base', 'a', 'b', '--number', '5', '--output', str(output)])
    check_written(output, 'small_objects.csv', 'small_objects.png')
    rows = read_table(output / 'small_objects.csv')
    assert len(rows) == len(CLASS_NAMES) + 2 and list(rows[0]) == [
        'class', 'group', 'area', 'base AP', 'a AP', 'b AP', 'a gain', 'b gain']
    areas = [float(row['area']) for row in rows[:-2]]
    assert areas == sorted(areas)
    printed = capsys.readouterr().out
    assert printed.count('mean of 5') == 2 and len(printed.splitlines()) == 15


def test_images_are_not_needed(shapes, results, tmp_path, capsys):
    file = shapes / 'annotations' / 'instances_val.json'
    targets = create_dataset('coco', shapes, 'val').targets
    paths = [
        write_result(tmp_path / f's{seed}', random_scores(targets, CLASS_NAMES, seed), dataset='csv', split='test')
        for seed in range(2)]
    empty = tmp_path / 'empty'
    empty.mkdir()
    main([*paths, '--dataset', 'coco', '--data-dir', str(empty), '--annotations', str(file),
          '--output', str(tmp_path / 'out')])
    printed = capsys.readouterr().out
    assert 'mean of 8' in printed
    # The file of boxes is enough for results of another format.
    main([*paths, '--annotations', str(file), '--output', str(tmp_path / 'same')])
    assert capsys.readouterr().out.replace('same', 'out') == printed


def test_bad_input_is_one_line_and_exit_code_2(shapes, results, tmp_path, capsys):
    def check(argv, message):
        check_refused(main, argv, message, capsys)
        assert not (tmp_path / 'out').exists()

    output = ['--output', tmp_path / 'out']
    coco = [*output, '--dataset', 'coco', '--data-dir', shapes]
    check([results[0], *coco], 'a baseline and at least one more result')
    check([*results, *coco, '--number', '0'], 'argument --number: ')
    check([*results, *coco], 'a data set with the classes of the results')
    check([*results, *coco, '--names', 'a', 'b'], '3 different --names')
    check([*results, *coco, '--names', 'a', 'b', 'a'], '3 different --names')
    check([results[0], results[0], *coco], 'twice')
    check([results[0], tmp_path / 'nowhere', *coco], 'nowhere')
    check([*results, *output, '--dataset', 'coco', '--data-dir', tmp_path / 'nowhere'], 'does not exist')
    check([*results, *coco, '--split', 'test'], 'instances_test.json')
    (tmp_path / 'train.csv').write_text('image,labels\na.jpg,ant\n')
    check([*results, *output, '--data-dir', tmp_path, '--annotations', 'train.csv'], 'with the areas of objects')
    (tmp_path / 'r1' / 'per_class_ap.csv').unlink()
    check([*results, *coco], 'per_class_ap.csv')
