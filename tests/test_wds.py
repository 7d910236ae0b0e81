""" Shards: who reads which sample, in which order, and what is refused """
import io
import json
import logging
import os
import pickle
import random
import sys
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from timm_splicemix.data.readers import wds
from timm_splicemix.data.readers.wds import WdsDataset, epoch_order, find_shards

NAMES = ['cat', 'dog', 'eel', 'fox']


def png(shade):
    file = io.BytesIO()
    Image.new('RGB', (4, 3), (shade, 0, 0)).save(file, 'PNG')
    return file.getvalue()


def write_tar(path, members, mode='w'):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def sample(index, labels=None):
    """Image and labels; the number of the sample can be read off the image."""
    labels = {'labels': [index % len(NAMES)]} if labels is None else labels
    return [(f'{index:04d}.png', png(index)), (f'{index:04d}.json', json.dumps(labels).encode())]


def write_shards(root, counts, split='train', classes=NAMES):
    first = 0
    for shard, count in enumerate(counts):
        members = [member for index in range(first, first + count) for member in sample(index)]
        write_tar(root / f'{split}-{shard:03d}.tar', members)
        first += count
    (root / 'classes.txt').write_text('\n'.join(classes) + '\n')
    return root


@pytest.fixture
def root(tmp_path):
    return write_shards(tmp_path / 'data', [5, 9, 1, 8])  # 23 samples


def shade(image):
    return image.getpixel((0, 0))[0]


def noisy_shade(image):
    """The sample, and a number from each of the generators that transforms use."""
    return torch.tensor([shade(image), random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


def batches(dataset, workers=0, **kwargs):
    loader = torch.utils.data.DataLoader(dataset, batch_size=dataset.batch_size, num_workers=workers, **kwargs)
    return [images.tolist() for images, _ in loader]


def flat(lists):
    return [item for items in lists for item in items]


def test_a_sample_is_an_image_and_a_multi_hot_target(root):
    dataset = WdsDataset(root)
    image, target = next(iter(dataset))
    assert isinstance(image, Image.Image) and image.mode == 'RGB'
    assert target.dtype == torch.float32 and target.tolist() == [1, 0, 0, 0]
    assert dataset.class_names == NAMES and dataset.num_classes == 4 and len(dataset) == 23
    dataset = WdsDataset(root, input_img_mode='L', target_transform=lambda target: target.argmax().item())
    image, target = list(dataset)[6]
    assert image.mode == 'L' and target == 2


@pytest.mark.parametrize('workers', [0, 1, 3])
@pytest.mark.parametrize('batch_size', [1, 4, 50])
def test_evaluation_sees_each_sample_once(root, workers, batch_size):
    ranks = [WdsDataset(root, transform=shade, batch_size=batch_size, rank=r, world_size=2) for r in (0, 1)]
    seen = [flat(batches(dataset, workers)) for dataset in ranks]
    assert flat(seen) == list(range(23))
    assert [len(part) for part in seen] == [len(dataset) for dataset in ranks] == [11, 12]
    assert all(dataset.remainder == 0 for dataset in ranks)


def test_evaluation_on_more_processes_than_samples_leaves_some_idle(tmp_path):
    root = write_shards(tmp_path, [3])
    seen = [[shade(image) for image, _ in WdsDataset(root, rank=rank, world_size=5)] for rank in range(5)]
    assert sorted(flat(seen)) == [0, 1, 2] and max(map(len, seen)) == 1


@pytest.mark.parametrize('workers', [0, 1, 3])
def test_training_doubles_no_sample_and_all_ranks_have_as_many_batches(root, workers, caplog):
    caplog.set_level(logging.INFO)
    ranks = [
        WdsDataset(root, transform=shade, batch_size=3, rank=rank, world_size=2, is_training=True) for rank in (0, 1)]
    seen = [batches(dataset, workers, drop_last=True) for dataset in ranks]
    assert [[len(batch) for batch in part] for part in seen] == [[3, 3, 3]] * 2
    assert [len(dataset) for dataset in ranks] == [9, 9]
    assert len(set(flat(flat(seen)))) == 18
    assert ranks[0].remainder == ranks[1].remainder == 5
    assert [r.getMessage() for r in caplog.records if 'left out' in r.getMessage()] == [
        '5 of 23 samples fill no batch of 3 on 2 processes and are left out, others in each epoch.']


def test_what_is_left_out_rotates(root):
    dataset = WdsDataset(root, transform=shade, batch_size=4, is_training=True)
    assert dataset.remainder == 3
    left_out = []
    for epoch in range(30):
        dataset.set_epoch(epoch)
        seen = {shade for shade, _ in dataset}
        assert len(seen) == 20
        left_out.append(frozenset(range(23)) - seen)
    assert len(set(left_out)) > 15
    assert len(frozenset().union(*left_out)) > 20


@pytest.mark.parametrize('is_training', [False, True])
def test_batches_do_not_depend_on_the_number_of_workers(root, is_training):
    dataset = WdsDataset(
        root, transform=noisy_shade, batch_size=3, is_training=is_training, rank=1, world_size=2, seed=7)
    dataset.set_epoch(4)
    expected = batches(dataset)
    assert len(expected) == (3 if is_training else 4)
    for workers in (1, 3, 5):
        assert batches(dataset, workers) == expected


def test_the_order_follows_seed_and_epoch(root):
    def order(seed, epoch):
        dataset = WdsDataset(root, transform=shade, is_training=True, seed=seed)
        dataset.set_epoch(epoch)
        return [shade for shade, _ in dataset]

    assert order(0, 0) == order(0, 0)
    orders = [order(0, 0), order(0, 1), order(1, 0), order(1, 1), list(range(23))]
    assert len({tuple(numbers) for numbers in orders}) == 5
    assert all(sorted(numbers) == list(range(23)) for numbers in orders)


def test_augmentation_differs_from_epoch_to_epoch(root):
    dataset = WdsDataset(root, transform=noisy_shade, is_training=True)
    drawn = []
    for epoch in (0, 1):
        dataset.set_epoch(epoch)
        drawn.append({row[0].item(): row[1:].tolist() for row, _ in dataset})
    assert all(drawn[0][number] != drawn[1][number] for number in range(23))
    assert len({tuple(row) for row in drawn[0].values()}) == 23


def test_the_shuffle_keeps_samples_near_their_shard():
    counts = [100, 40, 260, 100]
    shards = epoch_order(counts, 1, seed=0, epoch=0)
    assert sorted(shards.tolist()) == list(range(500))
    assert (np.diff(shards) != 1).sum() <= 3  # whole shards, in another order
    order = epoch_order(counts, 50, seed=0, epoch=0)
    assert sorted(order.tolist()) == list(range(500))
    place = np.empty(500, int)
    place[shards] = np.arange(500)
    moves = np.abs(place[order] - np.arange(500))
    assert moves.mean() > 10 and moves.max() < 50


@pytest.mark.parametrize('workers', [0, 1, 3])
def test_start_batch_continues_an_epoch(root, workers):
    dataset = WdsDataset(root, transform=noisy_shade, batch_size=2, is_training=True, rank=0, world_size=2)
    dataset.set_epoch(3)
    expected = batches(dataset)
    for start in (1, 2, 4, 5):
        dataset.set_epoch(3, start_batch=start)
        assert batches(dataset, workers) == expected[start:]
    dataset.set_epoch(3)
    assert batches(dataset, workers) == expected


def test_the_epoch_reaches_workers_that_live_on(root):
    dataset = WdsDataset(root, transform=noisy_shade, batch_size=2, is_training=True)
    loader = torch.utils.data.DataLoader(dataset, batch_size=2, num_workers=2, persistent_workers=True)
    for epoch, start in ((0, 0), (1, 0), (2, 3), (3, 0)):
        dataset.set_epoch(epoch, start)
        seen = [images.tolist() for images, _ in loader]
        assert seen == batches(dataset)
        assert len(seen) == 11 - start


@pytest.mark.slow
def test_a_spawned_worker_reads_it(root):
    dataset = WdsDataset(root, transform=noisy_shade, batch_size=4, is_training=True)
    dataset.set_epoch(2)
    assert batches(dataset, 2, multiprocessing_context='spawn') == batches(dataset)


def test_it_can_be_pickled(root):
    dataset = pickle.loads(pickle.dumps(WdsDataset(root, transform=shade)))
    assert [number for number, _ in dataset] == list(range(23))


SCRIPT = '''
import json, sys
import torch
from timm_splicemix.data.readers.wds import WdsDataset

def shade(image):
    return image.getpixel((0, 0))[0]

torch.distributed.init_process_group('gloo')
rank = torch.distributed.get_rank()
val = WdsDataset(sys.argv[1], transform=shade)
train = WdsDataset(sys.argv[1], transform=shade, is_training=True, batch_size=3)
seen = {}
for name, dataset, size in (('val', val, 1), ('train', train, 3)):
    loader = torch.utils.data.DataLoader(dataset, batch_size=size, num_workers=2)
    seen[name] = [shades.tolist() for shades, _ in loader]
    steps = torch.tensor(len(seen['val']))
    torch.distributed.all_reduce(steps)
    assert steps == 23
with open(f'{sys.argv[2]}/{rank}.json', 'w') as file:
    json.dump(seen, file)
torch.distributed.destroy_process_group()
'''


def test_processes_share_the_samples_out(run, root, tmp_path):
    script = tmp_path / 'script.py'
    script.write_text(SCRIPT)
    done = run(
        sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2', script, root, tmp_path)
    assert done.returncode == 0, done.stderr
    seen = [json.loads((tmp_path / f'{rank}.json').read_text()) for rank in (0, 1)]
    assert flat(seen[0]['val'] + seen[1]['val']) == list(range(23))
    assert [len(part['train']) for part in seen] == [3, 3]
    assert len(set(flat(seen[0]['train'] + seen[1]['train']))) == 18


@pytest.mark.parametrize('name, content, label_key, target', [
    ('json', '{"labels": ["dog", "fox"]}', None, [0, 1, 0, 1]),
    ('json', '{"labels": [3, "cat", 3]}', None, [1, 0, 0, 1]),
    ('json', '{"labels": []}', None, [0, 0, 0, 0]),
    ('json', '{"labels": [0, 1, 0, 1]}', None, [1, 1, 0, 0]),
    ('json', '{"target": [0, 1, -1, 1]}', None, [0, 1, -1, 1]),
    ('json', '{"multi_hot": [0.0, 1, 0, 1]}', None, [0, 1, 0, 1]),
    ('json', '{"labels": [0], "things": ["eel"]}', 'things', [0, 0, 1, 0]),
    ('json', '{"things": [0, 1, 0, 1]}', 'things', [1, 1, 0, 0]),
    ('json', '{"things": [0, 1, 0, 1]}', 'things:multi_hot', [0, 1, 0, 1]),
    ('json', '{"a:b": [0, 1]}', 'a:b', [1, 1, 0, 0]),
    ('cls', '2', None, [0, 0, 1, 0]),
    ('cls', '0, 2 3\n', None, [1, 0, 1, 1]),
    ('cls', '', None, [0, 0, 0, 0]),
])
def test_labels_are_read_from_json_and_cls(tmp_path, name, content, label_key, target):
    write_tar(tmp_path / 'train-0.tar', [('a/b.jpg', png(0)), (f'a/b.{name}', content.encode())])
    dataset = WdsDataset(tmp_path, class_names=NAMES, label_key=label_key)
    assert next(iter(dataset))[1].tolist() == target


def test_json_without_labels_leaves_them_to_cls(tmp_path):
    write_tar(tmp_path / 'train-0.tar', [('b.cls', b'1'), ('b.json', b'{"width": 4}'), ('b.WEBP', png(0))])
    assert next(iter(WdsDataset(tmp_path, class_names=NAMES)))[1].tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize('name, content, label_key, message', [
    ('json', '{"labels": ["dgo"]}', None, "'dog' is the nearest, but got the label 'dgo' in .*train-0.tar:b.json"),
    ('json', '{"labels": [4]}', None, 'names or indices of the 4 classes, but got 4 in .*train-0.tar:b.json'),
    ('json', '{"labels": [-1]}', None, 'but got -1'),
    ('json', '{"labels": [true]}', None, 'but got True'),
    ('json', '{"labels": "dog"}', None, "Expected a list of labels, but got 'dog'"),
    ('json', '{"target": [0, 1]}', None, 'Expected a list of 4 values among 0, 1 and -1'),
    ('json', '{"target": [0, 1, 2, 0]}', None, 'Expected a list of 4 values among 0, 1 and -1'),
    ('json', '{"tags": ["dog"]}', None, 'field labels or target or multi_hot.* name the field as label_key'),
    ('json', '{"labels": ["dog"]}', 'tags', 'Expected the field tags, but got'),
    ('json', '["dog"]', None, 'Expected the field labels'),
    ('json', '{"labels', None, 'Expected JSON, but got .*b.json'),
    ('cls', 'dog', None, "Expected indices of classes, but got 'dog' in .*train-0.tar:b.cls"),
    ('cls', '0 9', None, 'but got 9'),
    ('cls', '0', 'things', 'Expected the field things, but got {} in .*train-0.tar'),
])
def test_labels_that_are_wrong_are_named(tmp_path, name, content, label_key, message):
    write_tar(tmp_path / 'train-0.tar', [('b.jpg', png(0)), (f'b.{name}', content.encode())])
    dataset = WdsDataset(tmp_path, class_names=NAMES, label_key=label_key)
    with pytest.raises(ValueError, match=message):
        next(iter(dataset))


def test_the_number_of_classes_must_be_known(root):
    (root / 'classes.txt').unlink()
    assert len(WdsDataset(root, class_names=NAMES)) == 23
    with pytest.raises(ValueError, match=r'on a line of .*classes.txt, but got no such file: write it, or give class'):
        WdsDataset(root)
    for content, message in (('\n\n', 'an empty file'), ('cat\ndog\ncat\n', "Expected each class once, but got 'cat'")):
        (root / 'classes.txt').write_text(content)
        with pytest.raises(ValueError, match=message):
            WdsDataset(root)


@pytest.mark.parametrize('name', ['data', 'data/train-*.tar'])
def test_classes_are_listed_in_root_or_in_the_folder_of_the_shards(root, name):
    (root.parent / 'classes.txt').write_text('a\nb\n')
    assert WdsDataset(root.parent, name=name).class_names == (NAMES if name == 'data' else ['a', 'b'])


@pytest.mark.parametrize('files, name, split, found', [
    (['train-0.tar', 'train-1.tar', 'val-0.tar'], '', 'train', ['train-0.tar', 'train-1.tar']),
    (['train-0.tar', 'val-0.tar'], '', 'validation', ['val-0.tar']),
    (['train-0.tar', 'test-0.tar'], '', 'validation', ['test-0.tar']),
    (['voc_train_0.tar', 'pretrain-0.tar', 'voc_val2012_0.tar'], '', 'train', ['voc_train_0.tar']),
    (['voc_train_0.tar', 'voc_val2012_0.tar'], '', 'val', ['voc_val2012_0.tar']),
    (['train/0.tar', 'train/1.tar', 'val/0.tar'], '', 'train', ['train/0.tar', 'train/1.tar']),
    (['a/train-0.tar', 'train-0.tar'], 'a', 'train', ['a/train-0.tar']),
    (['s-000.tar', 's-001.tar', 's-002.tar', 's-003.tar'], 's-{001..002}.tar', 'train', ['s-001.tar', 's-002.tar']),
    (['s-9.tar', 's-10.tar'], 's-{9..10}.tar', 'train', ['s-10.tar', 's-9.tar']),
    (['a-0.tar', 'b-0.tar', 'c-0.tar'], '{a,c}-*.tar', 'train', ['a-0.tar', 'c-0.tar']),
    (['a-0.tar', 'b-0.tar'], '', 'b-{0..0}.tar', ['b-0.tar']),
])
def test_shards_of_a_split_are_found(tmp_path, files, name, split, found):
    for file in files:
        write_tar(tmp_path / file, sample(0))
    assert [os.path.relpath(shard, tmp_path) for shard in find_shards(tmp_path, name, split)] == found


@pytest.mark.parametrize('name, split, message', [
    ('', 'validation', r"Expected the shards of split 'validation' as validation-\*.tar.* but got none"),
    ('nothing', 'train', "Expected the shards of split 'train'"),
    ('train-{000..004}.tar', 'train', "Expected shards for .* but got no train-004.tar in"),
    ('*.tgz', 'train', r'got no \*.tgz'),
])
def test_missing_shards_are_told(root, name, split, message):
    with pytest.raises(ValueError, match=message):
        WdsDataset(root, name=name, split=split)


def test_a_missing_folder_is_told(tmp_path):
    with pytest.raises(ValueError, match=r'Expected the folder of the shards, but got .*nowhere, which does not exist'):
        WdsDataset(tmp_path / 'nowhere')


@pytest.mark.parametrize('name, mode', [('train-0.tar.gz', 'w:gz'), ('train-0.tgz', 'w:gz'), ('train-0.tar', 'w:xz')])
def test_compressed_shards_are_refused(tmp_path, name, mode):
    write_tar(tmp_path / name, sample(0), mode)
    with pytest.raises(ValueError, match=f'Expected plain tar files, but got .*{name}, which is compressed'):
        WdsDataset(tmp_path, class_names=NAMES)


@pytest.mark.parametrize('cut', [100, 600, 1024, 1500, 2048, 4096])
def test_a_truncated_shard_is_refused(tmp_path, cut):
    shard = write_tar(tmp_path / 'train-0.tar', sample(0) + sample(1))
    assert len(list(WdsDataset(tmp_path, class_names=NAMES))) == 2
    shard.write_bytes(shard.read_bytes()[:cut])
    with pytest.raises(ValueError, match=r'Expected a complete tar file, but got .*train-0.tar'):
        WdsDataset(tmp_path, class_names=NAMES)


def test_a_broken_header_and_joined_archives_are_refused(tmp_path):
    shard = write_tar(tmp_path / 'train-0.tar', sample(0) + sample(1))
    whole = shard.read_bytes()
    for content in (whole[:2048] + b'?' * 512 + whole[2560:], whole + whole):
        shard.write_bytes(content)
        with pytest.raises(ValueError, match=r'Expected a complete tar file, but got .*unreadable from byte'):
            WdsDataset(tmp_path, class_names=NAMES)


@pytest.mark.parametrize('members', [
    ['a.png'],
    ['a.json', 'b.png', 'b.json'],
    ['a.png', 'b.png', 'a.json', 'b.json'],
    ['a.png', 'a.jpg', 'a.json'],
    ['a.png', 'a.json', 'a.png', 'a.json'],
])
def test_samples_that_are_not_whole_are_refused(tmp_path, members):
    write_tar(tmp_path / 'train-0.tar', [(name, b'') for name in members])
    with pytest.raises(ValueError, match=r"Expected one image .* but got 'a' with .* sort the members by name"):
        WdsDataset(tmp_path, class_names=NAMES)


def test_an_empty_shard_is_refused(tmp_path):
    write_tar(tmp_path / 'train-0.tar', [])
    with pytest.raises(ValueError, match=r'Expected samples in each shard, but got none in .*train-0.tar'):
        WdsDataset(tmp_path, class_names=NAMES)


def test_long_names_folders_and_other_files_do_not_matter(tmp_path):
    deep = '/'.join(['folder' * 10] * 5)
    members = [
        ('__info__.json', b'{}'), ('.hidden.png', b''), (f'{deep}/a.png', png(1)), (f'{deep}/a.txt', b''),
        (f'{deep}/a.json', b'{"labels": [0]}'), ('README', b''), ('é.png', png(2)), ('é.json', b'{"labels": [1]}')]
    for number, form in enumerate((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)):
        with tarfile.open(tmp_path / f'train-{number}.tar', 'w', format=form) as tar:
            tar.add(tmp_path, arcname='folder', recursive=False)
            for name, content in members:
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    dataset = WdsDataset(tmp_path, class_names=NAMES, transform=shade)
    assert [(number, target.argmax().item()) for number, target in dataset] == [(1, 0), (2, 1)] * 2


def test_an_image_that_cannot_be_read_is_named(tmp_path):
    write_tar(tmp_path / 'train-0.tar', [*sample(0), ('x.png', png(1)[:40]), ('x.cls', b'1'), *sample(7)])
    dataset = WdsDataset(tmp_path, class_names=NAMES, transform=shade)
    samples = iter(dataset)
    assert next(samples)[0] == 0
    message = r'Expected a readable image, but got .*train-0.tar:x.png: .+'
    with pytest.raises(OSError, match=message):
        next(samples)
    assert next(samples)[0] == 7  # one who skips bad images can go on
    with pytest.raises((OSError, RuntimeError), match=message):  # which of them is up to torch
        batches(dataset, workers=1)


def test_either_decoder_gives_the_same(tmp_path):
    noise = Image.fromarray(np.random.RandomState(0).randint(0, 256, (9, 12, 3), np.uint8))
    exif = noise.getexif()
    exif[0x0112] = 6  # taken with the camera on its side
    file = io.BytesIO()
    noise.save(file, 'JPEG', exif=exif)
    write_tar(tmp_path / 'train-0.tar', [('a.jpg', file.getvalue()), ('a.cls', b'0')])
    dataset = WdsDataset(tmp_path, class_names=NAMES)
    image = next(iter(dataset))[0]
    assert image.size == (9, 12)
    dataset.decoder = 'torchvision'
    assert next(iter(dataset))[0].permute(1, 2, 0).tolist() == np.asarray(image).tolist()


@pytest.mark.parametrize('kwargs, message', [
    ({'is_training': True, 'batch_size': 12, 'rank': 0, 'world_size': 2}, 'at least one batch of 12 .* got 23 samples'),
    ({'rank': 1}, 'rank and world_size together'),
    ({'rank': 2, 'world_size': 2}, 'Expected a rank below the world size of 2, but got 2'),
    ({'batch_size': 0}, 'batch_size and shuffle_size >= 1'),
])
def test_arguments_that_cannot_be_are_refused(root, kwargs, message):
    with pytest.raises(ValueError, match=message):
        WdsDataset(root, **kwargs)


def test_several_processes_without_a_group_are_refused(root, monkeypatch):
    monkeypatch.setenv('WORLD_SIZE', '2')
    with pytest.raises(ValueError, match='Expected a process group, but got none where 2 processes were launched'):
        WdsDataset(root)
    assert len(WdsDataset(root, rank=0, world_size=1)) == 23


@pytest.fixture
def scanned(monkeypatch):
    """The shards that were scanned."""
    shards = []
    scan = wds._scan

    def recorded(shard):
        shards.append(os.path.basename(shard))
        return scan(shard)

    monkeypatch.setattr(wds, '_scan', recorded)
    return shards


def test_the_index_is_kept_and_renewed_for_shards_that_change(root, scanned):
    WdsDataset(root)
    assert scanned == [f'train-{number:03d}.tar' for number in range(4)]
    WdsDataset(root)
    assert len(scanned) == 4
    write_tar(root / 'train-001.tar', sample(5))
    assert len(WdsDataset(root)) == 15
    assert scanned[4:] == ['train-001.tar']
    stat = (root / 'train-002.tar').stat()
    os.utime(root / 'train-002.tar', ns=(stat.st_atime_ns, stat.st_mtime_ns + 1000))
    WdsDataset(root)
    assert scanned[5:] == ['train-002.tar']
    write_tar(root / 'val-0.tar', sample(0))
    assert len(WdsDataset(root, split='val')) == 1 and len(WdsDataset(root)) == 15
    assert scanned[6:] == ['val-0.tar']
    assert not [file for file in os.listdir(root) if file.startswith('.tsm_index.json.')]


def test_an_index_that_is_broken_is_made_again(root, scanned):
    for content in ('', '{"train', '[]'):
        (root / '.tsm_index.json').write_text(content)
        assert len(WdsDataset(root)) == 23
    assert len(scanned) == 12


def test_a_folder_that_cannot_be_written_is_read_all_the_same(root, scanned):
    (root / '.tsm_index.json').mkdir()
    (root / '.tsm_index.lock').mkdir()
    for _ in range(2):
        assert [shade(image) for image, _ in WdsDataset(root)] == list(range(23))
    assert len(scanned) == 8
    assert sorted(os.listdir(root))[:2] == ['.tsm_index.json', '.tsm_index.lock'] and len(os.listdir(root)) == 7


def test_a_shard_that_changes_under_the_index_is_told(root):
    dataset = WdsDataset(root)
    content = (root / 'train-000.tar').read_bytes()
    for changed in (content[512:], b''):
        (root / 'train-000.tar').write_bytes(changed)
        with pytest.raises(ValueError, match=r'Expected a complete tar file, but got .*train-000.tar'):
            next(iter(dataset))


def test_timms_loader_takes_it(root):
    from timm.data import create_loader
    dataset = WdsDataset(root, is_training=True, batch_size=4)
    loader = create_loader(
        dataset, (3, 8, 8), 4, is_training=True, num_workers=2, use_prefetcher=False, device=torch.device('cpu'))
    assert len(loader) == 5
    shapes = [(images.shape, targets.shape) for images, targets in loader]
    assert shapes == [((4, 3, 8, 8), (4, 4))] * 5


def test_what_webdataset_writes_is_read(tmp_path):
    webdataset = pytest.importorskip('webdataset')
    with webdataset.TarWriter(str(tmp_path / 'train-000000.tar')) as writer:
        writer.write({'__key__': 'a', 'png': png(1), 'json': {'labels': ['dog', 'fox']}})
        writer.write({'__key__': 'b', 'png': png(2), 'cls': 2})
    samples = [(number, target.tolist()) for number, target in WdsDataset(tmp_path, class_names=NAMES, transform=shade)]
    assert samples == [(1, [0, 1, 0, 1]), (2, [0, 0, 1, 0])]
