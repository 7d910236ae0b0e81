import json
import logging
import multiprocessing
import os
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_loader as timm_create_loader

from timm_splicemix.data import batch_memory, collate, create_dataset, create_loader
from timm_splicemix.data import loader as loaders
from timm_splicemix.data.batch_memory import BatchMemory
from timm_splicemix.data.collate import FastCollate, Sample
from timm_splicemix.data.dataset import BadImageError
from timm_splicemix.data.sampler import EpochBatches

from .helpers import raises_error

CPU = torch.device('cpu')


@pytest.fixture(scope='module')
def root(tmp_path_factory):
    """37 images whose targets are their index in binary."""
    folder = tmp_path_factory.mktemp('images')
    rng = np.random.default_rng(0)
    lines = ['image,' + ','.join(f'bit{bit}' for bit in range(6))]
    for index in range(37):
        Image.fromarray(rng.integers(0, 256, (40, 48, 3), np.uint8)).save(folder / f'{index}.png')
        lines.append(f'{index}.png,' + ','.join(str(index >> bit & 1) for bit in range(6)))
    (folder / 'train.csv').write_text('\n'.join(lines))
    (folder / 'val.csv').write_text('\n'.join(lines))
    return folder


def index_of(targets):
    return (targets * 2 ** torch.arange(6)).sum(dim=1).long().tolist()


def make_loader(root, is_training=True, batch_size=8, split=None, **kwargs):
    dataset = create_dataset('csv', root, split or ('train' if is_training else 'val'))
    kwargs = {'num_workers': 0, 'device': CPU, 'color_jitter': None, **kwargs}
    return create_loader(dataset, 16, batch_size, is_training=is_training, **kwargs)


def read(loader, epoch=0, start_batch=0):
    loader.set_epoch(epoch, start_batch)
    return [(images.clone(), targets.clone(), list(loader.indices)) for images, targets in loader]


def assert_same_batches(left, right):
    assert len(left) == len(right) > 0
    for (images, targets, indices), (other_images, other_targets, other_indices) in zip(left, right):
        assert torch.equal(images, other_images) and torch.equal(targets, other_targets) and indices == other_indices


@pytest.mark.parametrize('use_prefetcher', [True, False])
@pytest.mark.parametrize('decoder', ['pil', 'torchvision'])
def test_batches_are_the_same_with_any_number_of_workers(root, use_prefetcher, decoder):
    def batches(workers):
        loader = make_loader(root, num_workers=workers, use_prefetcher=use_prefetcher, decoder=decoder, re_prob=0.5)
        return read(loader, epoch=0) + read(loader, epoch=1)

    expected = batches(0)
    assert_same_batches(batches(2), expected)
    assert_same_batches(batches(3), expected)
    assert len(expected) == 8
    for images, targets, indices in expected:
        assert images.shape == (8, 3, 16, 16) and images.dtype == torch.float32
        assert targets.dtype == torch.float32 and index_of(targets) == indices


def test_epochs_and_seeds_differ_in_order_and_transforms(root):
    loader = make_loader(root)
    first, second, again = read(loader, 0), read(loader, 1), read(loader, 0)
    assert_same_batches(first, again)
    assert [b[2] for b in first] != [b[2] for b in second]
    other_seed = read(make_loader(root, seed=1), 0)
    assert [b[2] for b in first] != [b[2] for b in other_seed]
    images = {index: image for b in first for index, image in zip(b[2], b[0])}
    for image, index in ((image, index) for b in second for index, image in zip(b[2], b[0])):
        assert index not in images or not torch.equal(images[index], image)


@pytest.mark.parametrize('workers', [0, 2])
def test_an_epoch_can_be_continued_in_its_middle(root, workers):
    whole = read(make_loader(root, num_workers=workers, re_prob=0.5, re_mode='pixel'), epoch=3)
    loader = make_loader(root, num_workers=workers, re_prob=0.5, re_mode='pixel')
    loader.set_epoch(3, start_batch=2)
    assert len(loader) == 2
    assert_same_batches(read(loader, epoch=3, start_batch=2), whole[2:])


def test_reading_leaves_the_global_generators_alone(root):
    torch.manual_seed(0)
    state = torch.get_rng_state()
    read(make_loader(root, re_prob=0.5, re_mode='pixel'))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize('use_prefetcher', [True, False])
def test_closing_ends_the_workers(root, use_prefetcher):
    before = set(multiprocessing.active_children())
    loader = make_loader(root, num_workers=2, use_prefetcher=use_prefetcher)
    loader.cycle = loader  # only the garbage collector would find it
    read(loader)
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 2
    loader.close()
    assert not workers & set(multiprocessing.active_children())
    assert len(loader.dataset)


def test_training_drops_what_does_not_fill_a_batch_and_evaluation_nothing(root):
    training, evaluation = make_loader(root), make_loader(root, is_training=False)
    assert len(training) == 4 and len(evaluation) == 5
    seen = [index for b in read(training) for index in b[2]]
    assert len(set(seen)) == len(seen) == 32
    batches = read(evaluation)
    assert [index for b in batches for index in b[2]] == list(range(37))
    assert [index for b in batches for index in index_of(b[1])] == list(range(37))


def test_evaluation_is_that_of_timm(root):
    ours = read(make_loader(root, is_training=False))
    dataset = create_dataset('csv', root, 'val', target_transform=lambda target: int(index_of(target[None])[0]))
    theirs = timm_create_loader(dataset, 16, 8, num_workers=0, device=CPU)
    for (images, _, indices), (their_images, their_indices) in zip(ours, theirs):
        assert torch.equal(images, their_images) and indices == their_indices.tolist()


@pytest.mark.parametrize('num_samples', [37, 40, 64])
@pytest.mark.parametrize('world_size', [1, 2, 3])
def test_processes_share_the_samples(num_samples, world_size):
    for epoch in range(3):
        parts = []
        for rank in range(world_size):
            batches = EpochBatches(num_samples, 5, True, seed=1, rank=rank, world_size=world_size)
            batches.set_epoch(epoch)
            parts.append([[key.index for key in batch] for batch in batches])
            assert len(parts[-1]) == len(batches)
        assert len({len(part) for part in parts}) == 1
        seen = [index for part in parts for batch in part for index in batch]
        assert len(seen) == len(set(seen)) == num_samples // (5 * world_size) * 5 * world_size
    ranks = [EpochBatches(num_samples, 5, rank=rank, world_size=world_size) for rank in range(world_size)]
    in_evaluation = [key.index for batches in ranks for batch in batches for key in batch]
    assert sorted(in_evaluation) == list(range(num_samples))


def test_every_sample_is_trained_on_over_the_epochs():
    batches = EpochBatches(37, 8, True)
    seen = set()
    for epoch in range(10):
        batches.set_epoch(epoch)
        seen |= {key.index for batch in batches for key in batch}
    assert seen == set(range(37))


def test_repeats_are_copies_with_transforms_of_their_own(root):
    loader = make_loader(root, num_aug_repeats=4)
    for images, _, indices in read(loader):
        assert indices == [index for index in dict.fromkeys(indices) for _ in range(4)]
        assert not torch.equal(images[0], images[1])
    assert len(loader) == 4


@pytest.mark.parametrize('copies, expected', [
    (1, range(8)), (1.25, [*range(8), 0, 1]), (2, [*range(8)] * 2), (2.5, [*range(8)] * 2 + [0, 1, 2, 3]),
    (1.1, range(8)), (1.125, [*range(8), 0])])
def test_copies_follow_the_images_of_a_batch_with_transforms_of_their_own(root, copies, expected):
    once = read(make_loader(root))
    loader = make_loader(root, batch_copies=copies)
    batches = read(loader)
    assert len(loader) == len(batches) == len(once) == 4
    for (images, targets, indices), (plain, _, plain_indices) in zip(batches, once):
        assert indices == index_of(targets) == [plain_indices[place] for place in expected]
        assert torch.equal(images[:8], plain)  # the originals are those of a run without copies
        for place in range(8, len(images)):
            for other in range(place):
                assert not torch.equal(images[place], images[other])


def test_copies_are_the_same_with_any_number_of_workers_and_from_any_batch(root):
    whole = read(make_loader(root, batch_copies=1.25), epoch=2)
    assert_same_batches(read(make_loader(root, batch_copies=1.25, num_workers=2), 2, start_batch=1), whole[1:])


def test_copies_stay_in_the_process_of_their_image(root):
    parts = [[index for batch in EpochBatches(37, 4, True, rank=rank, world_size=2, copies=2) for _, index, _ in batch]
             for rank in (0, 1)]
    assert not set(parts[0]) & set(parts[1])
    assert [len(part) for part in parts] == [32, 32]


@pytest.mark.parametrize('options, message', [
    ({'batch_copies': 0.5}, 'Expected at least 1 copy of each image in a batch, but got 0.5'),
    ({'batch_copies': float('nan')}, 'Expected at least 1 copy'), ({'batch_copies': float('inf')}, 'at least 1 copy'),
    ({'batch_copies': 2, 'num_aug_repeats': 3}, 'but got 2 copies with 3 repeats'),
    ({'batch_copies': 2, 'is_training': False}, 'but got 2 copies in evaluation')])
def test_impossible_copies_are_refused(root, options, message):
    with raises_error(message):
        make_loader(root, **options)


SCRIPT = '''
import json, sys
import torch
from timm_splicemix.data import create_dataset, create_loader

root, output = sys.argv[1:]
torch.distributed.init_process_group('gloo')
rank = torch.distributed.get_rank()
seen = {}
for split in ('train', 'val'):
    dataset = create_dataset('csv', root, split)
    loader = create_loader(
        dataset, 16, 8, is_training=split == 'train', num_workers=2, device=torch.device('cpu'), color_jitter=None)
    loader.set_epoch(0)
    seen[split] = [list(loader.indices) for _ in loader]
json.dump(seen, open(f'{output}/{rank}.json', 'w'))
torch.distributed.destroy_process_group()
'''


def test_files_of_every_kind_and_name_are_read_alike_by_both_decoders(tmp_path):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (6, 8, 3), np.uint8).repeat(4, axis=0).repeat(4, axis=1)
    image = Image.fromarray(pixels)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    image.save(tmp_path / 'plain.jpg')
    image.convert('L').save(tmp_path / 'gray scale.JPG')
    image.convert('CMYK').save(tmp_path / 'druckfähig.jpeg')
    image.quantize(16).save(tmp_path / 'パレット.PNG')
    image.convert('RGBA').save(tmp_path / 'clear.png')
    image.save(tmp_path / 'turned.jpg', exif=exif)
    names = sorted(path.name for path in tmp_path.iterdir())
    (tmp_path / 'val.csv').write_text('image,labels\n' + ''.join(f'{name},Katze;🐕\n' for name in names), 'utf-8')
    batches = {}
    for decoder in ('pil', 'torchvision'):
        dataset = create_dataset('csv', tmp_path, 'val')
        assert dataset.class_names == ['Katze', '🐕']
        dataset.decoder = decoder
        sizes = {name: tuple(np.asarray(dataset[i][0]).shape) for i, name in enumerate(names)}
        upright = (32, 24, 3) if decoder == 'pil' else (3, 32, 24)
        assert sizes['turned.jpg'] == upright and sizes['plain.jpg'] != upright
        loader = create_loader(
            dataset, 16, 6, num_workers=0, device=CPU, decoder=decoder, crop_mode='squash', crop_pct=1.)
        (batches[decoder], _), = loader
        assert loader.filenames() == names
    assert (batches['pil'] - batches['torchvision']).abs().max() < 2.5 / 255 / 0.22  # grey levels, normalised


@pytest.mark.slow
def test_two_real_processes_cover_each_sample_exactly_once(run, root, tmp_path):
    script = tmp_path / 'script.py'
    script.write_text(SCRIPT)
    done = run(
        sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2', script, root, tmp_path)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f'{rank}.json').read_text()) for rank in (0, 1)]
    assert sorted(i for rank in ranks for batch in rank['val'] for i in batch) == list(range(37))
    trained = [i for rank in ranks for batch in rank['train'] for i in batch]
    assert len(trained) == len(set(trained)) == 32
    assert [len(rank['train']) for rank in ranks] == [2, 2]


def test_the_files_of_a_batch_are_known(root):
    loader = make_loader(root)
    loader.set_epoch(0)
    for _, targets in loader:
        assert loader.filenames() == [f'{index}.png' for index in index_of(targets)]


@pytest.mark.parametrize('workers', [0, 2])
@pytest.mark.parametrize('use_prefetcher', [True, False])
def test_a_bad_image_is_an_error_with_its_path(root, tmp_path, workers, use_prefetcher):
    for is_training in (True, False):
        loader = make_loader(root, is_training, num_workers=workers, use_prefetcher=use_prefetcher)
        bad = tmp_path / 'bad.png'
        bad.write_bytes(b'no image')
        loader.dataset.reader.paths[5] = str(bad)
        with pytest.raises(BadImageError, match=f'^Cannot read image {bad}: .*$'):
            for epoch in range(20):
                read(loader, epoch)


@pytest.mark.parametrize('workers', [0, 2])
def test_bad_images_can_be_skipped_and_are_logged(root, tmp_path, workers, caplog):
    loader = make_loader(root, num_workers=workers, on_bad_image='skip')
    for index in (5, 6, 7):
        loader.dataset.reader.paths[index] = str(tmp_path / f'missing{index}.png')
    with caplog.at_level(logging.WARNING):
        batches = read(loader, epoch=1)
    left_out = {5, 6, 7} & {key.index for batch in loader.batches for key in batch}
    assert left_out and loader.num_skipped == len(left_out)
    seen = [index for b in batches for index in b[2]]
    assert len(seen) == 32 - len(left_out) and not set(seen) & {5, 6, 7}
    for index in left_out:
        assert any(str(tmp_path / f'missing{index}.png') in message for message in caplog.messages)
    assert f'{len(left_out)} unreadable image(s) were skipped in epoch 1.' in caplog.messages
    for _, targets, indices in batches:
        assert index_of(targets) == indices


def test_a_batch_of_bad_images_alone_is_an_error(root, tmp_path):
    loader = make_loader(root, batch_size=1, on_bad_image='skip')
    loader.dataset.reader.paths[4] = str(tmp_path / 'missing.png')
    with raises_error(r'None of the 1 images of a batch can be read, such as .*missing\.png'):
        read(loader)


@pytest.mark.skipif(not hasattr(os, 'memfd_create'), reason='Linux only')
def test_workers_stack_images_by_a_private_function_of_torch(root, monkeypatch):
    """It fails when torch renames the function; batches would then be right, but slower."""
    expected = read(make_loader(root))
    monkeypatch.setattr(collate, 'default_collate', lambda images: pytest.fail('not stacked in shared memory'))
    assert_same_batches(read(make_loader(root, num_workers=1)), expected)


@pytest.mark.skipif(not hasattr(os, 'memfd_create'), reason='Linux only')
def test_memory_of_batches_is_used_again_after_the_release_of_the_batch_or_of_a_later_one(monkeypatch):
    monkeypatch.setattr(batch_memory, 'get_worker_info', lambda: SimpleNamespace(id=1))
    memory = BatchMemory(2)
    places, pixels = zip(*(memory.take(12) for _ in range(4)))
    assert len(set(places)) == 4 and len({part.data_ptr() for part in pixels[:3]}) == 3 and pixels[3] is None
    memory.release(places[0])
    assert memory.take(12)[1].data_ptr() == pixels[0].data_ptr() and memory.take(12)[1] is None
    memory.release(places[3])  # the main process dropped the two before, of an epoch that ended early
    assert {memory.take(12)[1].data_ptr() for _ in range(2)} == {part.data_ptr() for part in pixels[1:3]}
    memory.release(memory.take(12)[0])
    assert memory.take(24)[1].shape == (24,)


@pytest.mark.parametrize('workers', [0, 1])
def test_two_passes_at_once_have_their_own_batches(root, workers):
    expected = read(make_loader(root, is_training=False, batch_size=2))
    loader = make_loader(root, is_training=False, batch_size=2, num_workers=workers, persistent_workers=False)
    batches = ((images, targets, list(loader.indices)) for images, targets in loader)
    first = [next(batches)]
    time.sleep(0.5)  # the worker waits with prefetched batches
    second = read(loader)
    first.append(next(batches))
    time.sleep(0.5)
    assert_same_batches([*first, *batches], expected)
    assert_same_batches(second, expected)


@pytest.mark.parametrize('device, pin_memory, expected', [
    ('cpu', False, True), ('cuda', True, True), ('cuda', False, False), ('mps', True, False)])
def test_memory_is_used_again_only_where_batches_are_copied_at_once(root, monkeypatch, device, pin_memory, expected):
    monkeypatch.setattr(loaders, 'PrefetchLoader', lambda source, **_: SimpleNamespace(random_erasing=None))
    loader = make_loader(root, num_workers=1, device=torch.device(device), pin_memory=pin_memory)
    assert (loader._source.loader.collate_fn.memory is not None) == (expected and hasattr(os, 'memfd_create'))


@pytest.mark.parametrize('crop', ['rrc', 'multiscale'])
def test_batches_in_used_memory_have_their_pixels_and_memory_format(root, crop):
    """Also after epochs that ended early; crops of whole rows or of 16 px make some batches planar."""
    def batches(workers):
        loader = make_loader(
            root, num_workers=workers, decoder='torchvision', train_crop_mode=crop, interpolation='bilinear',
            batch_size=3)
        for epoch in range(3):
            loader.set_epoch(epoch)
            next(iter(loader))
        return [batch for epoch in range(2) for batch in read(loader, epoch)]

    expected, found = batches(0), batches(1)
    assert_same_batches(found, expected)
    strides = [images.stride() for images, _, _ in expected]
    assert [images.stride() for images, _, _ in found] == strides
    assert len(set(strides)) == 2


def test_integers_that_are_no_multi_hot_targets_are_refused():
    samples = [Sample(i, torch.zeros(3, 4, 4), torch.tensor([0, 1, 5 * i])) for i in range(2)]
    assert FastCollate()(samples).bad_target == (1, 5)


@pytest.mark.parametrize('options, message', [
    ({'num_aug_splits': 3}, 'num_aug_splits'), ({'separate': True}, 'separate'), ({'naflex': True}, 'naflex'),
    ({'crop_mode': 'sqash'}, 'crop_mode'), ({'train_crop_mode': 'none'}, 'train_crop_mode'),
    ({'rank': 2, 'world_size': 2}, 'rank'), ({'rank': 0}, 'rank and world_size together')])
def test_options_that_the_loader_does_not_have_are_refused(root, options, message):
    with raises_error(message):
        make_loader(root, **options)


def test_several_processes_without_a_group_are_refused(root, monkeypatch):
    monkeypatch.setenv('WORLD_SIZE', '2')
    with raises_error('2 processes were launched without a process group'):
        make_loader(root)


def test_the_papers_crop_has_no_colour_jitter_unless_given(root):
    dataset = create_dataset('csv', root, 'train')
    for options, expected in (({}, False), ({'color_jitter': 0.4}, True)):
        create_loader(dataset, 16, 8, is_training=True, train_crop_mode='multiscale', device=CPU, **options)
        assert ('ColorJitter' in repr(dataset.transform)) == expected


def test_skipping_is_refused_in_evaluation(root):
    with raises_error("on_bad_image 'skip' is for training alone"):
        make_loader(root, is_training=False, on_bad_image='skip')


def test_other_ways_with_bad_images_are_refused(root):
    with raises_error("Expected on_bad_image to be raise or skip, but got 'ignore'"):
        make_loader(root, on_bad_image='ignore')


def test_a_training_set_smaller_than_a_batch_is_refused(root):
    with raises_error(r'The training set of 37 images .* Reduce --batch-size to at most 18'):
        make_loader(root, batch_size=20, rank=0, world_size=2)
    with raises_error('Expected a batch size of at least 1'):
        make_loader(root, batch_size=0)


@pytest.mark.parametrize('workers', [0, 2])
@pytest.mark.parametrize('value', [2., -0.5, float('nan')])
def test_invalid_targets_are_refused_on_the_cpu(root, workers, value):
    loader = make_loader(root, num_workers=workers, is_training=False)
    loader.dataset.target_transform = lambda target: target + value if target.sum() == 3 else target
    message = r'^Expected targets in \[0, 1\], or -1 for unknown, but got .* for 7\.png\.$'
    with raises_error(message):
        read(loader)


def test_unknown_and_soft_targets_pass():
    samples = [Sample(i, torch.zeros(3, 4, 4, dtype=torch.uint8), torch.tensor([-1., 0.25, 1.])) for i in range(2)]
    batch = FastCollate()(samples)
    assert batch.bad_target is None and batch.targets.tolist() == [[-1., 0.25, 1.]] * 2
    assert batch.images.dtype == torch.uint8


@pytest.mark.parametrize('use_prefetcher', [True, False])
def test_integer_classes_stay_integers(tmp_path, use_prefetcher):
    for name in ('cat', 'dog'):
        (tmp_path / name).mkdir()
        for index in range(3):
            Image.new('RGB', (20, 20)).save(tmp_path / name / f'{index}.png')
    dataset = create_dataset('', tmp_path)
    loader = create_loader(dataset, 16, 4, num_workers=0, device=CPU, use_prefetcher=use_prefetcher)
    assert [targets.tolist() for _, targets in loader] == [[0, 0, 0, 1], [1, 1]]
