""" Labels for which a union is wrong: unknown_classes and all_classes """
import itertools
import random
import re

import pytest
import torch
import yaml
from PIL import Image

import timm_splicemix as tsm
from tests import reference
from tests.helpers import make_batch, raises_error, rng
from timm_splicemix.loss import LOSSES, PARTIAL, create_loss, ignores_unknown, union_cross_entropy
from timm_splicemix.mix import find_classes
from timm_splicemix.preview import main as preview
from timm_splicemix.train import main

from .runs import assert_same_weights, flags_of, train, train_until
from .train_flags import build

RULES = {'unknown_classes': (1, 4), 'all_classes': (0, 2)}
VALUES = (0., 1., -1., 0.3, 0.8)


def any_targets(size=8, classes=5, seed=0):
    source = random.Random(seed)
    return torch.tensor([[source.choice(VALUES) for _ in range(classes)] for _ in range(size)])


def record_of(*dropped):
    cells = len(dropped)
    return tsm.SpliceRecord(tsm.Grid(1, cells), torch.arange(cells).view(1, -1), torch.tensor([dropped]))


# --- the labels ---


@pytest.mark.parametrize('grid', tsm.parse_grids('1x1,1x2,2x2,2x3'))
@pytest.mark.parametrize('seed', range(6))
def test_labels_equal_the_plain_loops(grid, seed):
    images, targets = make_batch(height=5, width=6)[0], any_targets(seed=seed)
    for num_dropped in range(grid.cells):
        record = tsm.sample_record(8, grid, 4, num_dropped, generator=rng(seed))
        expected = reference.splice(images, targets, record, **RULES)[1]
        assert torch.equal(tsm.splice(images, targets, record, **RULES)[1], expected)


@pytest.mark.parametrize('cells', list(itertools.product((0., 1., -1.), repeat=2)))
def test_every_pair_of_hard_labels(cells):
    targets = torch.tensor(cells).view(2, 1).expand(2, 3)
    mixed = tsm.splice(torch.zeros(2, 3, 4, 4), targets, record_of(False, False), unknown_classes=[1], all_classes=[2])
    order = (0., -1., 1.)  # 0 beats -1 beats 1
    assert mixed[1].tolist() == [[max(cells, key=order.index), -1., min(cells, key=order.index)]]


@pytest.mark.parametrize('value', VALUES)
def test_a_single_visible_cell_keeps_its_labels(value):
    targets = torch.tensor([[value] * 3, [1 - abs(value)] * 3])
    mixed = tsm.splice(torch.zeros(2, 3, 4, 4), targets, record_of(False, True), unknown_classes=[0], all_classes=[1])
    assert torch.equal(mixed[1], targets[:1])


def test_without_a_visible_cell_there_is_no_class():
    mixed = tsm.splice(
        torch.zeros(2, 3, 4, 4), torch.ones(2, 3), record_of(True, True), unknown_classes=[0], all_classes=[1])
    assert mixed[1].tolist() == [[0, 0, 0]]


@pytest.mark.parametrize('dtype', [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16])
def test_targets_of_any_type_can_become_unknown(dtype):
    images, targets = make_batch()
    mixer = tsm.SpliceMix('2x2', drop_prob=0., prob=0.5, **RULES)
    expected = tsm.SpliceMix('2x2', drop_prob=0., prob=0.5, **RULES)
    found = set()
    for _ in range(8):
        plan = mixer.plan(8)
        mixed = mixer.apply(images, targets.to(dtype), plan)[1]
        assert mixed.dtype == (torch.float32 if dtype in (torch.bool, torch.uint8) else dtype)
        assert mixed.tolist() == expected.apply(images, targets, plan)[1].tolist()
        found |= set(mixed.flatten().tolist())
    assert found == {0, 1, -1}


def test_booleans_stay_booleans_if_nothing_becomes_unknown():
    images, targets = make_batch()
    for rules in ({}, {'all_classes': [0, 1]}):
        assert tsm.SpliceMix('2x2', **rules)(images, targets.bool())[1].dtype == torch.bool


def test_integer_classes():
    classes = torch.tensor([0, 1, 2, 2])
    mixer = tsm.SpliceMix('1x2', drop_prob=0., ratio=8, num_classes=3, unknown_classes=[0], all_classes=[2])
    plan = mixer.plan(4)
    mixed = mixer.apply(make_batch(4)[0], classes, plan)[1][4:].tolist()
    pairs = [classes[sources].tolist() for record in plan.records for sources in record.sources]
    assert mixed == [[-1, float(1 in pair), float(pair == [2, 2])] for pair in pairs]
    assert [2, 2] in pairs and any(1 in pair for pair in pairs)


# --- the mixer ---


@pytest.mark.parametrize('batch', tsm.SpliceMix.BATCHES)
@pytest.mark.parametrize('mode', tsm.SpliceMix.MODES)
def test_the_rules_hold_in_every_mode_and_change_nothing_else(batch, mode):
    images, targets = make_batch(12, height=4, width=4)[0], any_targets(12)
    kwargs = {'mode': mode, 'batch': batch, 'ratio': 0.5, 'seed': 3}
    plain, mixer = tsm.SpliceMix(**kwargs), tsm.SpliceMix(**kwargs, **RULES)
    for _ in range(4):
        plan, ours = plain.plan(12), mixer.plan(12)
        assert [record.sources.tolist() for record in plan.records] == [
            record.sources.tolist() for record in ours.records]
        expected_images, expected = plain.apply(images, targets, plan)
        mixed_images, mixed = mixer.apply(images, targets, ours)
        assert torch.equal(mixed_images, expected_images)
        assert torch.equal(mixed, mixer.apply(images, targets, ours)[1])  # pure
        assert torch.equal(mixed[:, 3], expected[:, 3])  # no rule
        kept = len(ours.kept)
        assert torch.equal(mixed[:kept], targets[ours.kept])
        labels = [reference.splice(images, targets, record, **RULES)[1] for record in ours.records]
        assert torch.equal(mixed[kept:], torch.cat(labels) if labels else mixed[kept:])


@pytest.mark.parametrize('grids', ['2x2', '2x2-3'])
def test_alternate_batches_follow_the_rules(grids):
    images, targets = make_batch(12)[0], any_targets(12)
    kwargs = {'grids': grids, 'batch': 'alternate', 'drop_prob': 0.}
    regular, mixed = tsm.SpliceMix(**kwargs, **RULES).batches(images, targets)
    plain = tsm.SpliceMix(**kwargs).batches(images, targets)
    assert torch.equal(regular[1], targets)
    several_cells = grids == '2x2'
    assert (mixed[1][:, [1, 4]] == -1).all() == several_cells
    assert torch.equal(mixed[1], plain[1][1]) != several_cells


def test_consistency_learning_is_unchanged():
    def step(**rules):
        torch.manual_seed(0)
        model = tsm.create_model('test_resnet', num_classes=5, global_pool='max')
        task = tsm.SpliceMixTask(
            model, create_loss('bce', 5), tsm.SpliceMix('2x2', ratio=1, **rules), consistency_weight=1., verbose=False)
        return task(*make_batch(height=64, width=64))

    plain, ours = step(), step(**RULES)
    assert torch.equal(plain['consistency_loss'], ours['consistency_loss'])
    assert torch.equal(plain['output'], ours['output'])
    assert not torch.equal(plain['task_loss'], ours['task_loss'])


def test_the_repr_lists_the_classes():
    mixer = tsm.SpliceMix('2x2', unknown_classes=[4, 1, 1], all_classes=torch.tensor([2]))
    assert repr(mixer).endswith('rank=None, unknown_classes=[1, 4], all_classes=[2])')


@pytest.mark.parametrize('kwargs, message', [
    ({'unknown_classes': ['dog']}, r"Expected indices of classes for unknown_classes, but got \['dog'\].*class_names"),
    ({'all_classes': 3}, 'Expected indices of classes for all_classes, but got 3'),
    ({'all_classes': [-1]}, 'Expected indices of at least 0 for all_classes, but got -1'),
    ({'unknown_classes': [5], 'num_classes': 5}, 'Expected class indices from 0 to 4, but got 5'),
    ({'unknown_classes': [1, 2], 'all_classes': [2]}, 'but got class 2 in both'),
])
def test_wrong_classes_are_refused(kwargs, message):
    with raises_error(message):
        tsm.SpliceMix(**kwargs)


def test_a_class_beyond_the_targets_is_refused():
    with raises_error('Expected class indices from 0 to 4, but got 7'):
        tsm.SpliceMix(unknown_classes=[7])(*make_batch())
    with raises_error('Expected class indices from 0 to 4, but got 7'):
        tsm.splice(*make_batch(), record_of(False, False), all_classes=[7])


def test_names_become_indices():
    names = ['cat', 'dog', '7', 'no finding']
    assert find_classes(['no finding', 1, '7'], names) == [3, 1, 2]
    assert find_classes(['7', 0], None) == [7, 0]
    with raises_error("4 classes of the data set for --flag, but got 'no findings': did you mean no finding"):
        find_classes(['no findings'], names, '--flag')
    with raises_error("as their names are not known, but got 'dog'"):
        find_classes(['dog'], None)


# --- losses ---


@pytest.mark.parametrize('name', LOSSES)
def test_losses_that_ignore_unknown_labels_are_recognised(name):
    assert ignores_unknown(create_loss(name, 20), 20) == (name not in ('an', 'wan', 'p-asl'))


@pytest.mark.parametrize('partial', PARTIAL)
def test_partial_losses_are_recognised(partial):
    assert ignores_unknown(create_loss('p-asl', 20, partial=partial), 20) == (partial == 'ignore')


@pytest.mark.parametrize('criterion', [
    torch.nn.BCEWithLogitsLoss(), torch.nn.CrossEntropyLoss(), union_cross_entropy, create_loss('wan')])
def test_a_task_refuses_other_losses(criterion):
    model = tsm.create_model('test_resnet', num_classes=5)
    tsm.SpliceMixTask(model, criterion, tsm.SpliceMix(all_classes=[1]), verbose=False)
    with raises_error(r'Expected a loss that ignores unknown labels .*--splicemix-unknown.*: use the loss bce'):
        tsm.SpliceMixTask(model, criterion, tsm.SpliceMix(unknown_classes=[1]), verbose=False)


# --- the commands ---


@pytest.fixture
def refusal(data, tmp_path, capsys):
    def call(*flags):
        with pytest.raises(SystemExit) as left:
            main(flags_of(data, tmp_path, *flags))
        assert left.value.code == 2 and not list(tmp_path.glob('**/*.tar'))
        line, = (line for line in capsys.readouterr().err.splitlines() if 'error:' in line)
        return line

    return call


@pytest.mark.parametrize('flags, words', [
    ('--splicemix-grids 2x2 --splicemix-unknown blue gren', "--splicemix-unknown, but got 'gren': did you mean gre"),
    ('--splicemix-grids 2x2 --splicemix-all 1', "for --splicemix-all, but got '1'"),
    ('--splicemix-grids 2x2 --splicemix-all red --splicemix-unknown red', 'in both'),
    ('--splicemix-grids 2x2 --splicemix-unknown red --loss wan', 'unknown labels .* but got wan: use the loss bce'),
    ('--splicemix-unknown red', 'Expected --splicemix-grids with --splicemix-unknown'),
    ('--mixup 0.2 --splicemix-unknown red', 'Expected --splicemix-grids with --splicemix-unknown'),
    ('--recursivemix --splicemix-all red', 'Expected --splicemix-grids with --splicemix-all'),
])
def test_wrong_flags_are_refused(refusal, flags, words):
    assert re.search(words, refusal(*flags.split()))


@pytest.fixture
def folders(tmp_path):
    for split, name, index in itertools.product(('train', 'validation'), ('red', 'blue'), range(4)):
        path = tmp_path / 'folders' / split / name / f'{index}.png'
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new('RGB', (70, 70), name).save(path)
    return tmp_path / 'folders'


def test_softmax_is_refused_and_binary_cross_entropy_is_not(folders, refusal, capsys):
    flags = ('--dataset', '', '--splicemix-grids', '1x2', '--splicemix-unknown', 'red', '--epochs', '1')
    assert 'but got union_cross_entropy' in refusal(*flags, '--data-dir', folders)
    run = build(folders, *flags, '--bce-loss')
    assert run.mixer.labels.unknown_classes == (1,)
    run.train()


@pytest.mark.slow
def test_a_run_resumes_from_its_args_with_the_same_labels(data, tmp_path):
    flags = (
        '--splicemix-grids', '1x2,2x2', '--splicemix-ratio', '1', '--splicemix-cl', '--splicemix-unknown', 'red',
        '--splicemix-all', 'blue')
    whole = train(data, tmp_path, *flags, name='whole')
    settings = yaml.safe_load((whole / 'args.yaml').read_text())
    assert (settings['splicemix_unknown'], settings['splicemix_all']) == (['red'], ['blue'])
    cut = train_until(1, 2, data, tmp_path, '--config', whole / 'args.yaml', name='cut')
    train(data, tmp_path, '--resume', cut, name='cut')
    assert_same_weights(whole / 'last.pth.tar', cut / 'last.pth.tar')


def test_preview_marks_unknown_labels(data, tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr('timm_splicemix.preview.draw_batch', lambda images, targets, *args: shown.append(targets))
    monkeypatch.setattr('timm_splicemix.preview.save_image', lambda *args: None)
    preview([
        '--dataset', 'csv', '--data-dir', str(data), '--batch-size', '8', '--img-size', '32', '--splicemix-grids',
        '2x2-0', '--splicemix-unknown', 'green'])
    targets, = shown
    assert (targets[8:, 1] == -1).all() and (targets[:8] >= 0).all() and (targets[8:, [0, 2]] >= 0).all()
