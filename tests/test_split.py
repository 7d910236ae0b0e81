""" Stratified splits, the file that lists them, and the commands that use it """
import json
import logging
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from timm_splicemix.data import create_dataset, divide, read_partition, stratified_split, write_partition
from timm_splicemix.predict import main as predict
from timm_splicemix.report import main as report
from timm_splicemix.results import Scores
from timm_splicemix.split import main as split
from timm_splicemix.validate import main as validate

from .helpers import raises_error
from .runs import CLASSES, assert_same_weights, make_images, summary, train, train_until
from .test_train_flags_data import create_sets
from .test_wds import write_shards
from .train_flags import shows


def make_targets(number=1000, classes=30, seed=0, unknown=0.):
    """Labels of frequent and rare classes; the first image has all of them."""
    generator = torch.Generator().manual_seed(seed)
    frequencies = 0.4 * torch.rand(classes, generator=generator) ** 3 + 0.003
    targets = (torch.rand(number, classes, generator=generator) < frequencies).to(torch.int8)
    targets = targets.masked_fill(torch.rand(number, classes, generator=generator) < unknown, -1)
    targets[0] = 1
    return targets


def deviation(targets, parts, fractions):
    """Mean distance of the share of a class in a part from the wanted one."""
    present = targets == 1
    counts = torch.stack([present[parts == part].sum(dim=0) for part in range(len(fractions))])
    return (counts / present.sum(dim=0) - torch.tensor(fractions)[:, None]).abs().mean().item()


@pytest.mark.parametrize('fractions', [(0.8, 0.2), (0.5, 0.5), (0.7, 0.2, 0.1), (0.905, 0.095)])
@pytest.mark.parametrize('unknown', [0., 0.5])
def test_every_image_is_in_one_part_of_the_wanted_size(fractions, unknown):
    for seed, number in enumerate((40, 333, 1000)):
        targets = make_targets(number, seed=seed, unknown=unknown)
        parts = stratified_split(targets, fractions, seed)
        sizes = torch.bincount(parts, minlength=len(fractions)).tolist()
        assert len(parts) == number == sum(sizes)
        assert all(abs(size - fraction * number) < 1 for size, fraction in zip(sizes, fractions))


@pytest.mark.parametrize('fractions', [(0.8, 0.2), (0.7, 0.2, 0.1)])
@pytest.mark.parametrize('unknown', [0., 0.5])
def test_classes_have_their_share_more_than_in_random_splits(fractions, unknown):
    for seed in range(5):
        targets = make_targets(seed=seed, unknown=unknown)
        parts = stratified_split(targets, fractions, seed)
        at_random = [
            deviation(targets, parts[torch.randperm(1000, generator=torch.Generator().manual_seed(other))], fractions)
            for other in range(20)]
        assert deviation(targets, parts, fractions) < min(0.6 * np.mean(at_random), *at_random)


def test_each_class_is_as_close_to_its_share_as_whole_images_allow():
    labels = torch.eye(4, dtype=torch.int8).repeat_interleave(torch.tensor([5, 10, 20, 25]), dim=0)  # one label each
    parts = stratified_split(labels, (0.8, 0.2))
    assert (labels[parts == 1] == 1).sum(dim=0).tolist() == [1, 2, 4, 5]
    unknown = labels.clone()
    unknown[labels == 0] = -1
    assert torch.equal(stratified_split(unknown, (0.8, 0.2)), parts)  # unknown labels count as none
    assert torch.bincount(stratified_split(torch.zeros(10, 3), (0.7, 0.3))).tolist() == [7, 3]


def test_a_split_depends_on_the_seed_alone():
    targets = make_targets()
    splits = [stratified_split(targets, (0.8, 0.2), seed) for seed in (0, 0, 1)]
    assert torch.equal(splits[0], splits[1]) and not torch.equal(splits[0], splits[2])
    # Fixed values: the same seed must give the same split in later versions.
    assert stratified_split(torch.eye(2).repeat(6, 1), (0.75, 0.25)).tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 1, 1, 0, 0]


@pytest.mark.parametrize('fractions', [(1.,), (0.5, 0.4), (1., 0.), (-0.5, 1.5)])
def test_fractions_that_make_no_parts_are_refused(fractions):
    with raises_error('Expected at least two fractions above 0 with a sum of 1'):
        stratified_split(make_targets(), fractions)


def test_too_few_images_are_refused():
    with raises_error('3 images are too few for parts of 0.9, 0.1'):
        stratified_split(make_targets(3), (0.9, 0.1))


# Parts of data sets

def test_parts_of_shards_keep_their_order_of_reading(tmp_path):
    dataset = create_dataset('wds/', write_shards(tmp_path, [7, 8, 9]))
    partition = divide(dataset, {'train': 0.75, 'val': 0.25}, 'train')
    assert partition.parts['train'][0].startswith('train-000.tar:')
    train_set, val_set = (partition.select(create_dataset('wds/', tmp_path), part) for part in ('train', 'validation'))
    assert (len(train_set), len(val_set)) == (18, 6)
    assert sorted(train_set.reader.locations() + val_set.reader.locations()) == sorted(dataset.reader.locations())
    assert sorted(train_set.reader.epoch_order(0, 1).tolist()) == list(range(18))
    for part in (train_set, val_set):
        for index in range(len(part)):
            place = dataset.reader.locations().index(part.reader.locations()[index])
            assert part[index][0].getpixel((0, 0)) == dataset[place][0].getpixel((0, 0))
            assert torch.equal(part[index][1], dataset[place][1])
        assert torch.equal(part.targets, torch.stack([part[index][1] for index in range(len(part))]).to(torch.int8))


def test_folders_of_one_class_each_can_be_split(tmp_path):
    for name in ('ant', 'bee'):
        (tmp_path / name).mkdir()
        for index in range(10):
            Image.new('RGB', (8, 8)).save(tmp_path / name / f'{index}.png')
    train_set, val_set = create_sets(tmp_path, '--val-fraction', '0.3')
    assert np.bincount([val_set[index][1] for index in range(len(val_set))]).tolist() == [3, 3]
    assert len({*train_set.filenames(), *val_set.filenames()}) == 20 and len(train_set) == 14


def test_images_of_the_same_name_are_told_apart(tmp_path):
    datasets = pytest.importorskip('datasets')
    Image.new('RGB', (8, 8)).save(tmp_path / 'a.png')
    image = {'bytes': (tmp_path / 'a.png').read_bytes(), 'path': 'a.png'}
    features = datasets.Features({'image': datasets.Image(), 'labels': datasets.Sequence(datasets.Value('string'))})
    rows = {'image': [image] * 8, 'labels': [['ant'], ['bee']] * 4}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / 'data'))
    train_set, val_set = create_sets('--dataset', 'hfds/data', '--data-dir', tmp_path, '--val-fraction', '0.25')
    assert val_set.targets.sum(dim=0).tolist() == [1, 1]
    assert not {*train_set.reader.locations()} & {*val_set.reader.locations()}


@pytest.mark.parametrize('content, message', [
    ('[]', 'Expected a file of "parts"'), ('{"parts": {"train": []}}', 'Expected a file of "parts"'),
    ('{"parts": {"train": [1]}}', 'Expected a file of "parts"'), ('{', 'Expected JSON'),
    ('{"parts": {"train": ["a.png"], "val": ["a.png"]}}', 'lists a.png more than once')])
def test_a_file_that_is_no_split_is_refused(tmp_path, content, message):
    (tmp_path / 'split.json').write_text(content)
    with raises_error(message):
        read_partition(tmp_path / 'split.json')


# Runs

@pytest.fixture
def data(tmp_path):
    """Images with one file of labels that knows no splits."""
    folder = make_images(tmp_path / 'data', 24, 0)
    lines = (folder / 'labels.csv').read_text().splitlines()
    lines = [','.join([cells[0], *cells[2:]]) for cells in (line.split(',') for line in lines)]
    (folder / 'labels.csv').write_text('\n'.join(lines))
    return folder


@shows('val_fraction', 'split_seed', 'split_file')
def test_a_fraction_of_the_training_set_is_kept_for_validation(data, tmp_path):
    flags = ('--dataset', 'csv', data)
    with raises_error("no column of splits to find 'train'.*--val-fraction"):
        create_sets(*flags)
    train_set, val_set = create_sets(*flags, '--val-fraction', '0.25')
    assert (len(train_set), len(val_set)) == (18, 6)
    assert {*train_set.filenames(), *val_set.filenames()} == {f'{index}.png' for index in range(24)}
    assert create_sets(*flags, '--val-fraction', '0.25')[1].filenames() == val_set.filenames()
    assert create_sets(*flags, '--val-fraction', '0.25', '--split-seed', '1')[1].filenames() != val_set.filenames()
    write_partition(val_set.partition, tmp_path / 'split.json')
    again = create_sets(*flags, '--split-file', tmp_path / 'split.json')
    assert [part.filenames() for part in again] == [train_set.filenames(), val_set.filenames()]
    single = create_sets(*flags, '--val-fraction', '0.25', '--keep-labels', 'single')
    assert single[1].filenames() == val_set.filenames() and torch.equal(single[1].targets, val_set.targets)
    assert (single[0].targets.sum(dim=1) == 1).all()


@pytest.mark.parametrize('flags, message', [
    (('--val-fraction', '0.2', '--split-file', 'x.json'), '--val-fraction or --split-file, but got both'),
    (('--val-fraction', '0.2', '--val-ann', 'x.csv'), '--val-fraction or --val-ann, but got both'),
    (('--val-fraction', '0.2', '--val-images', 'x'), '--val-fraction or --val-images, but got both'),
    (('--split-file', 'x.json', '--val-split', 'test'), '--split-file or --val-split, but got both'),
    (('--split-seed', '1'), '--val-fraction with --split-seed'),
    (('--split-file', 'nowhere.json'), 'nowhere.json'),
    (('--dataset', 'tfds/some', '--val-fraction', '0.2'), 'Expected a multi-label data set or folders of classes'),
])
def test_contradictions_are_refused(data, monkeypatch, flags, message):
    monkeypatch.setattr('timm.data.create_dataset', lambda name, **kwargs: [name])
    with raises_error(message):
        create_sets('--dataset', 'csv', data, *flags)


@pytest.mark.parametrize('missing', [False, True])
def test_parts_are_cached_and_read_as_without_a_cache(data, tmp_path, missing):
    if missing:
        (data / '3.png').unlink()
    flags = ('--dataset', 'csv', data, '--val-fraction', '0.25', '--on-bad-image', 'skip')
    plain, cached = create_sets(*flags), create_sets(*flags, '--cache', tmp_path / 'cache')
    for expected, got in zip(plain, cached):
        for _ in range(2):  # the second time from the cache
            for index in range(len(expected)):
                assert got[index][0].tobytes() == expected[index][0].tobytes()
                assert torch.equal(got[index][1], expected[index][1])


def test_the_labels_of_both_parts_are_read_once(data, caplog):
    text = (data / 'labels.csv').read_text()
    (data / 'labels.csv').write_text(text + '\n' + text.splitlines()[1])
    with caplog.at_level(logging.INFO):
        create_sets('--dataset', 'csv', data, '--val-fraction', '0.25')
    assert sum('1 duplicate rows' in message for message in caplog.messages) == 1


def test_missing_images_of_a_split_file_are_skipped_in_training(data, tmp_path, caplog):
    flags = ('--dataset', 'csv', data)
    train_set, val_set = create_sets(*flags, '--val-fraction', '0.25')
    write_partition(val_set.partition, tmp_path / 'split.json')
    flags += ('--split-file', tmp_path / 'split.json')
    name = train_set.filenames()[0]
    (data / name).unlink()
    with raises_error(f'1 of the 24 images listed in .* are missing, such as {name}.*--on-bad-image skip'):
        create_sets(*flags)
    again = create_sets(*flags, '--on-bad-image', 'skip')
    assert [part.filenames() for part in again] == [train_set.filenames()[1:], val_set.filenames()]
    assert f"Skipped 1 of the 18 images of part 'train', which are not in the data set, such as {name}." in caplog.text
    (data / val_set.filenames()[0]).unlink()
    with raises_error(f"1 of the 6 images of part 'val' are not in the data set, or their files are missing, such as "
                      f'{val_set.filenames()[0]}'):
        create_sets(*flags, '--on-bad-image', 'skip')


def test_images_that_were_not_split_are_reported(data, caplog):
    _, val_set = create_sets('--dataset', 'csv', data, '--val-fraction', '0.25')
    partition = val_set.partition
    lines = (data / 'labels.csv').read_text().splitlines()
    shutil.copy(data / '0.png', data / 'new.png')
    (data / 'labels.csv').write_text('\n'.join([*lines, 'new.png,1,0,0']))
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert partition.select(create_dataset('csv', data, annotations='labels.csv'), 'val').filenames() \
            == val_set.filenames()
    assert caplog.messages == ['1 images of the data set are in no part of the split and are not used.']
    first = partition.parts['val'][0]
    (data / 'labels.csv').write_text('\n'.join(line for line in lines if not line.startswith(first)))
    with raises_error(f"1 of the 6 images of part 'val' are not in the data set, or their files are missing, such as "
                      f'{first}'):
        partition.select(create_dataset('csv', data, annotations='labels.csv'), 'val')
    with raises_error("no part 'test'. Its parts: train, val"):
        partition.select(create_dataset('csv', data, annotations='labels.csv'), 'test')


def test_a_run_is_resumed_and_validated_with_its_own_split(data, tmp_path, caplog):
    flags = ('--val-fraction', '0.25')
    whole = train(data, tmp_path / 'whole', *flags)
    cut = train_until(1, 1, data, tmp_path / 'cut', *flags)
    parts = read_partition(whole / 'split.json').parts
    assert parts == read_partition(cut / 'split.json').parts
    # The resumed run must not split again, which would give other parts with other labels.
    (cut / 'args.yaml').write_text((cut / 'args.yaml').read_text().replace('split_seed: 0', 'split_seed: 7'))
    train(data, tmp_path / 'cut', '--resume', cut)
    assert_same_weights(whole / 'last.pth.tar', cut / 'last.pth.tar')
    assert read_partition(cut / 'split.json').parts == parts

    common = ['--dataset', 'csv', '--data-dir', str(data), '--checkpoint', str(whole), '-j', '0']
    for split_name, part in (('validation', 'val'), ('train', 'train')):
        validate([*common, '--split', split_name, '--output', str(tmp_path / part)])
        assert sorted(Scores.load(tmp_path / part / 'scores.npz').filenames) == sorted(parts[part])
    result = json.loads((tmp_path / 'val' / 'results.json').read_text())
    best = max(float(row['eval_mAP']) for row in summary(whole))
    assert result['metrics']['mAP'] == pytest.approx(best, abs=1e-4)
    assert f"Using part 'validation' of {whole / 'split.json'}" in caplog.text
    predict(['--checkpoint', str(whole), *(str(data / image) for image in parts['val'])])
    report([str(whole), str(tmp_path / 'val'), '--output', str(tmp_path / 'report.html')])
    assert 'val_fraction' in (tmp_path / 'report.html').read_text()

    moved = tmp_path / 'moved'
    shutil.copytree(data, moved)
    common[3] = str(moved)
    with pytest.raises(SystemExit):
        validate(common)
    assert f'Use --split-file {whole / "split.json"}' in caplog.text
    validate([*common, '--split-file', str(whole / 'split.json'), '--output', str(tmp_path / 'again')])
    assert json.loads((tmp_path / 'again' / 'results.json').read_text())['metrics'] == result['metrics']


def test_images_of_another_folder_are_found_again_by_validation(data, tmp_path):
    shutil.copytree(data, tmp_path / 'labels', ignore=shutil.ignore_patterns('*.png'))
    shutil.copytree(data, tmp_path / 'photos', ignore=shutil.ignore_patterns('*.csv'))
    run = train(tmp_path / 'labels', tmp_path / 'run', '--val-fraction', '0.25', '--train-images', tmp_path / 'photos')
    validate(['--dataset', 'csv', '--data-dir', str(tmp_path / 'labels'), '--checkpoint', str(run), '-j', '0',
              '--output', str(tmp_path / 'val')])
    assert len(Scores.load(tmp_path / 'val' / 'scores.npz').filenames) == 6


def test_the_command_leaves_out_missing_images_by_a_flag(data, tmp_path, capsys):
    flags = ['--dataset', 'csv', '--data-dir', str(data), '--output', str(tmp_path / 'split.json')]
    (data / '3.png').unlink()
    with pytest.raises(SystemExit):
        split(flags)
    assert '--on-bad-image skip' in capsys.readouterr().err
    split([*flags, '--on-bad-image', 'skip'])
    parts = read_partition(tmp_path / 'split.json').parts
    assert {*parts['train'], *parts['val']} == {f'{index}.png' for index in range(24) if index != 3}


def test_the_command_writes_a_file_and_describes_it(data, tmp_path, capsys):
    flags = ['--dataset', 'csv', '--data-dir', str(data), '--output', str(tmp_path / 'split.json')]
    split([*flags, '--val-fraction', '0.25', '--test-fraction', '0.125'])
    partition = read_partition(tmp_path / 'split.json')
    assert [len(images) for images in partition.parts.values()] == [15, 6, 3]
    printed = capsys.readouterr().out
    assert 'train      15' in printed and f'--split-file {tmp_path / "split.json"}' in printed
    train_set, val_set = create_sets('--dataset', 'csv', data, '--split-file', tmp_path / 'split.json')
    assert (len(train_set), len(val_set)) == (15, 6) and list(train_set.class_names) == list(CLASSES)
    with pytest.raises(SystemExit):
        split([*flags, '--val-fraction', '0.5', '--test-fraction', '0.5'])
    assert 'with a sum below 1, but got 1.' in capsys.readouterr().err
    (data / 'labels.csv').write_text('image,ant,bee\n' + '\n'.join(f'{i}.png,1,{int(i == 3)}' for i in range(8)))
    split([*flags, '--val-fraction', '0.25'])
    assert "No image of part 'val' has: bee." in capsys.readouterr().out
