""" Shards: order, shares of processes, labels, index and errors """
import io
import json
import logging
import os
import pickle
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from timm_splicemix.data import BadImageError, MultiLabelDataset, check_has_positives, create_dataset
from timm_splicemix.data.readers import wds
from timm_splicemix.data.readers.wds import ReaderWds, find_shards, shuffle_shards
from timm_splicemix.data.sampler import EpochBatches

from .helpers import raises_error

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


def read(root, **kwargs):
    """All samples in the order of the shards, as pairs of a number and a target."""
    dataset = MultiLabelDataset(ReaderWds(root, **kwargs), transform=shade)
    return [dataset[index] for index in range(len(dataset))]


def batches(reader, batch_size, is_training, epoch=0, start_batch=0, **kwargs):
    sampler = EpochBatches(len(reader), batch_size, is_training, epoch_order=reader.epoch_order, **kwargs)
    sampler.set_epoch(epoch, start_batch)
    indices = [[key.index for key in batch] for batch in sampler]
    assert len(indices) == len(sampler)
    return indices


def flat(lists):
    return [item for items in lists for item in items]


def test_a_sample_is_an_image_and_a_multi_hot_target(root):
    dataset = MultiLabelDataset(ReaderWds(root))
    image, target = dataset[0]
    assert isinstance(image, Image.Image) and image.mode == 'RGB'
    assert target.dtype == torch.float32 and target.tolist() == [1, 0, 0, 0]
    assert dataset.class_names == NAMES and dataset.num_classes == 4 and len(dataset) == 23
    dataset = MultiLabelDataset(
        ReaderWds(root), input_img_mode='L', target_transform=lambda target: target.argmax().item())
    image, target = dataset[6]
    assert image.mode == 'L' and target == 2
    assert [number for number, _ in read(root)] == list(range(23))


def test_all_targets_are_read_when_they_are_asked_for(root):
    dataset = MultiLabelDataset(ReaderWds(root))
    expected = torch.stack([target for _, target in (dataset[index] for index in range(23))])
    assert torch.equal(dataset.targets.float(), expected) and dataset.targets.dtype == torch.int8
    hidden = create_dataset('wds/', root, keep_labels='0.5')
    assert (hidden.targets == -1).any()
    assert torch.equal(torch.stack([hidden[index][1] for index in range(23)]), hidden.targets.float())


def test_shards_are_read_until_a_label_is_found(root, tmp_path, monkeypatch):
    reader = ReaderWds(root)
    calls = []
    monkeypatch.setattr(reader, '_read', lambda index, read=reader._read: calls.append(index) or read(index))
    assert reader.has_positives() and calls == [0]
    members = [member for index in range(3) for member in sample(index, {'labels': []})]
    write_tar(tmp_path / 'none' / 'train-0.tar', members)
    (tmp_path / 'none' / 'classes.txt').write_text('\n'.join(NAMES))
    dataset = create_dataset('wds/.', root=tmp_path / 'none', split='train')
    with raises_error(f"All labels of the 3 images of split 'train' in {tmp_path / 'none'} are negative"):
        check_has_positives(dataset, 'train')


@pytest.mark.parametrize('batch_size', [1, 4, 50])
def test_evaluation_sees_each_sample_once_and_each_process_reads_on(root, batch_size):
    reader = ReaderWds(root)
    ranks = [flat(batches(reader, batch_size, False, rank=rank, world_size=2)) for rank in (0, 1)]
    assert ranks == [list(range(11)), list(range(11, 23))]
    reader = ReaderWds(write_shards(root / 'few', [3]))
    ranks = [batches(reader, batch_size, False, rank=rank, world_size=5) for rank in range(5)]
    assert sorted(flat(flat(ranks))) == [0, 1, 2] and max(map(len, ranks)) == 1


def test_training_doubles_no_sample_and_all_ranks_have_as_many_batches(root, caplog):
    caplog.set_level(logging.INFO)
    seen = [batches(ReaderWds(root), 3, True, rank=rank, world_size=2) for rank in (0, 1)]
    assert [[len(batch) for batch in part] for part in seen] == [[3, 3, 3]] * 2
    assert len(set(flat(flat(seen)))) == 18
    assert caplog.messages == [
        '5 of 23 samples do not fill a batch of 3 on 2 process(es) and are left out; other ones in each epoch.']


def test_other_samples_are_left_out_in_each_epoch(root):
    reader = ReaderWds(root)
    left_out = [frozenset(range(23)) - set(flat(batches(reader, 4, True, epoch=epoch))) for epoch in range(30)]
    assert {len(part) for part in left_out} == {3}
    assert len(set(left_out)) > 15
    assert len(frozenset().union(*left_out)) > 20


def test_the_order_follows_seed_and_epoch(root):
    reader = ReaderWds(root)
    orders = [flat(batches(reader, 1, True, epoch, seed=seed)) for seed in (0, 1) for epoch in (0, 1)]
    assert orders[0] == flat(batches(reader, 1, True))
    assert len({tuple(order) for order in (*orders, range(23))}) == 5
    assert all(sorted(order) == list(range(23)) for order in orders)
    assert batches(reader, 2, True, 3, start_batch=4) == batches(reader, 2, True, 3)[4:]


def test_the_shuffle_keeps_samples_near_their_shard():
    counts = [100, 40, 260, 100]
    shards = shuffle_shards(counts, 1, seed=0, epoch=0)
    assert sorted(shards.tolist()) == list(range(500))
    assert (np.diff(shards) != 1).sum() <= 3  # whole shards, in another order
    order = shuffle_shards(counts, 50, seed=0, epoch=0)
    assert sorted(order.tolist()) == list(range(500))
    place = np.empty(500, int)
    place[shards] = np.arange(500)
    moves = np.abs(place[order] - np.arange(500))
    assert moves.mean() > 10 and moves.max() < 50


def test_it_can_be_pickled(root):
    dataset = pickle.loads(pickle.dumps(MultiLabelDataset(ReaderWds(root), transform=shade)))
    assert [dataset[index][0] for index in range(23)] == list(range(23))


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
    (_, found), = read(tmp_path, class_names=NAMES, label_key=label_key)
    assert found.tolist() == target


def test_json_without_labels_leaves_them_to_cls(tmp_path):
    write_tar(tmp_path / 'train-0.tar', [('b.cls', b'1'), ('b.json', b'{"width": 4}'), ('b.WEBP', png(0))])
    assert read(tmp_path, class_names=NAMES)[0][1].tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize('name, content, label_key, message', [
    ('json', '{"labels": ["dgo"]}', None, "Label 'dgo' in .*train-0.tar:b.json is not .* did you mean 'dog'"),
    ('json', '{"labels": [4]}', None, 'names or indices of the 4 classes in .*train-0.tar:b.json, but got 4'),
    ('json', '{"labels": [-1]}', None, 'but got -1'),
    ('json', '{"labels": [true]}', None, 'but got True'),
    ('json', '{"labels": "dog"}', None, "Expected a list of labels in .*, but got 'dog'"),
    ('json', '{"target": [0, 1]}', None, 'Expected a list of 4 values among 0, 1 and -1'),
    ('json', '{"target": [0, 1, 2, 0]}', None, 'Expected a list of 4 values among 0, 1 and -1'),
    ('json', '{"tags": ["dog"]}', None, 'field labels or target or multi_hot in .*. Set --target-key'),
    ('json', '{"labels": ["dog"]}', 'tags', 'Expected the field tags in .*, but got'),
    ('json', '["dog"]', None, 'Expected the field labels'),
    ('json', '{"labels', None, 'Invalid JSON in .*b.json'),
    ('cls', 'dog', None, "Expected class indices in .*train-0.tar:b.cls, but got 'dog'"),
    ('cls', '0 9', None, 'but got 9'),
    ('cls', '0', 'things', 'Expected the field things in .*train-0.tar, but got {}'),
])
def test_labels_that_are_wrong_are_named(tmp_path, name, content, label_key, message):
    write_tar(tmp_path / 'train-0.tar', [('b.jpg', png(0)), (f'b.{name}', content.encode())])
    reader = ReaderWds(tmp_path, class_names=NAMES, label_key=label_key)
    for get in (lambda: MultiLabelDataset(reader)[0], lambda: reader.targets):
        with raises_error(message):
            get()


def test_the_number_of_classes_must_be_known(root):
    (root / 'classes.txt').unlink()
    assert len(ReaderWds(root, class_names=NAMES)) == 23
    with raises_error(r'classes.txt does not exist. Write one class name per line'):
        ReaderWds(root)
    for content, message in (('\n\n', 'classes.txt is empty'), ('cat\ndog\ncat\n', "Duplicate class 'cat'")):
        (root / 'classes.txt').write_text(content)
        with raises_error(message):
            ReaderWds(root)


@pytest.mark.parametrize('name', ['data', 'data/train-*.tar'])
def test_classes_are_listed_in_root_or_in_the_folder_of_the_shards(root, name):
    (root.parent / 'classes.txt').write_text('a\nb\n')
    assert ReaderWds(root.parent, name=name).class_names == (NAMES if name == 'data' else ['a', 'b'])


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
    ('', 'validation', r"No shards of split 'validation' in .*: expected validation-\*.tar"),
    ('nothing', 'train', "No shards of split 'train'"),
    ('train-{000..004}.tar', 'train', "No shard train-004.tar in"),
    ('*.tgz', 'train', r'No shard \*.tgz'),
])
def test_missing_shards_are_an_error(root, name, split, message):
    with raises_error(message):
        ReaderWds(root, name=name, split=split)


def test_a_missing_folder_is_an_error(tmp_path):
    with raises_error(r'The folder of the shards, .*nowhere, does not exist'):
        ReaderWds(tmp_path / 'nowhere')


@pytest.mark.parametrize('name, mode', [('train-0.tar.gz', 'w:gz'), ('train-0.tgz', 'w:gz'), ('train-0.tar', 'w:xz')])
def test_compressed_shards_are_refused(tmp_path, name, mode):
    write_tar(tmp_path / name, sample(0), mode)
    with raises_error(f'{name} is compressed'):
        ReaderWds(tmp_path, class_names=NAMES)


@pytest.mark.parametrize('cut', [100, 600, 1024, 1500, 2048, 4096])
def test_a_truncated_shard_is_refused(tmp_path, cut):
    shard = write_tar(tmp_path / 'train-0.tar', sample(0) + sample(1))
    assert len(ReaderWds(tmp_path, class_names=NAMES)) == 2
    shard.write_bytes(shard.read_bytes()[:cut])
    with raises_error(r'train-0.tar is not a complete tar file'):
        ReaderWds(tmp_path, class_names=NAMES)


def test_a_broken_header_and_joined_archives_are_refused(tmp_path):
    shard = write_tar(tmp_path / 'train-0.tar', sample(0) + sample(1))
    whole = shard.read_bytes()
    for content in (whole[:2048] + b'?' * 512 + whole[2560:], whole + whole):
        shard.write_bytes(content)
        with raises_error(r'train-0.tar is not a complete tar file: unreadable from byte'):
            ReaderWds(tmp_path, class_names=NAMES)


@pytest.mark.parametrize('members', [
    ['a.png'],
    ['a.json', 'b.png', 'b.json'],
    ['a.png', 'b.png', 'a.json', 'b.json'],
    ['a.png', 'a.jpg', 'a.json'],
    ['a.png', 'a.json', 'a.png', 'a.json'],
])
def test_samples_that_are_not_whole_are_refused(tmp_path, members):
    write_tar(tmp_path / 'train-0.tar', [(name, b'') for name in members])
    with raises_error(r"Expected one image .* but got 'a' with .* Sort the members by name"):
        ReaderWds(tmp_path, class_names=NAMES)


def test_an_empty_shard_is_refused(tmp_path):
    write_tar(tmp_path / 'train-0.tar', [])
    with raises_error(r'train-0.tar has no samples'):
        ReaderWds(tmp_path, class_names=NAMES)


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
    samples = read(tmp_path, class_names=NAMES)
    assert [(number, target.argmax().item()) for number, target in samples] == [(1, 0), (2, 1)] * 2


def test_an_image_that_cannot_be_read_is_named(tmp_path):
    shard = write_tar(tmp_path / 'train-0.tar', [*sample(0), ('x.png', png(1)[:40]), ('x.cls', b'1'), *sample(7)])
    dataset = MultiLabelDataset(ReaderWds(tmp_path, class_names=NAMES), transform=shade)
    assert dataset[0][0] == 0 and dataset[2][0] == 7
    with pytest.raises(BadImageError, match=r'Cannot read image .*train-0.tar:x.png: .+'):
        dataset[1]
    assert dataset.filename(1) == f'{shard}:1' and dataset.filename(1, basename=True) == 'train-0.tar:1'
    assert dataset.reader.locations() == [f'{shard}:{row}' for row in range(3)]
    shard.unlink()
    with pytest.raises(BadImageError, match=r'Cannot read image .*train-0.tar:1: .*No such file'):
        dataset[1]


def test_either_decoder_gives_the_same(tmp_path):
    noise = Image.fromarray(np.random.RandomState(0).randint(0, 256, (9, 12, 3), np.uint8))
    exif = noise.getexif()
    exif[0x0112] = 6  # taken with the camera on its side
    file = io.BytesIO()
    noise.save(file, 'JPEG', exif=exif)
    write_tar(tmp_path / 'train-0.tar', [('a.jpg', file.getvalue()), ('a.cls', b'0')])
    dataset = MultiLabelDataset(ReaderWds(tmp_path, class_names=NAMES))
    image = dataset[0][0]
    assert image.size == (9, 12)
    dataset.decoder = 'torchvision'
    assert dataset[0][0].permute(1, 2, 0).tolist() == np.asarray(image).tolist()


def test_a_shuffle_size_of_zero_is_refused(root):
    with raises_error('Expected shuffle_size to be at least 1, but got 0'):
        ReaderWds(root, shuffle_size=0)


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
    ReaderWds(root)
    assert scanned == [f'train-{number:03d}.tar' for number in range(4)]
    ReaderWds(root)
    assert len(scanned) == 4
    write_tar(root / 'train-001.tar', sample(5))
    assert len(ReaderWds(root)) == 15
    assert scanned[4:] == ['train-001.tar']
    stat = (root / 'train-002.tar').stat()
    os.utime(root / 'train-002.tar', ns=(stat.st_atime_ns, stat.st_mtime_ns + 1000))
    ReaderWds(root)
    assert scanned[5:] == ['train-002.tar']
    write_tar(root / 'val-0.tar', sample(0))
    assert len(ReaderWds(root, split='val')) == 1 and len(ReaderWds(root)) == 15
    assert scanned[6:] == ['val-0.tar']
    assert not [file for file in os.listdir(root) if file.startswith('.tsm_index.json.')]


def test_an_index_that_is_broken_is_made_again(root, scanned):
    for content in ('', '{"train', '[]'):
        (root / '.tsm_index.json').write_text(content)
        assert len(ReaderWds(root)) == 23
    assert len(scanned) == 12


def test_a_read_only_folder_works_without_a_cache(root, scanned):
    (root / '.tsm_index.json').mkdir()
    (root / '.tsm_index.lock').mkdir()
    for _ in range(2):
        assert [number for number, _ in read(root)] == list(range(23))
    assert len(scanned) == 8
    assert sorted(os.listdir(root))[:2] == ['.tsm_index.json', '.tsm_index.lock'] and len(os.listdir(root)) == 7


def test_a_shard_that_changed_after_indexing_is_an_error(root):
    dataset = MultiLabelDataset(ReaderWds(root))
    content = (root / 'train-000.tar').read_bytes()
    for changed in (content[512:], b''):
        (root / 'train-000.tar').write_bytes(changed)
        with raises_error(r'train-000.tar is not a complete tar file'):
            dataset[0]


def test_what_webdataset_writes_is_read(tmp_path):
    webdataset = pytest.importorskip('webdataset')
    with webdataset.TarWriter(str(tmp_path / 'train-000000.tar')) as writer:
        writer.write({'__key__': 'a', 'png': png(1), 'json': {'labels': ['dog', 'fox']}})
        writer.write({'__key__': 'b', 'png': png(2), 'cls': 2})
    samples = [(number, target.tolist()) for number, target in read(tmp_path, class_names=NAMES)]
    assert samples == [(1, [0, 1, 0, 1]), (2, [0, 0, 1, 0])]


def test_deeply_nested_labels_are_refused(tmp_path):
    write_shards(tmp_path, [1])
    nested = b'{"labels": ' + b'[' * 100000
    write_tar(tmp_path / 'train-000.tar', [('0.png', png(0)), ('0.json', nested)])
    with raises_error(r'Invalid JSON in .*train-000.tar:0.json: maximum recursion'):
        ReaderWds(tmp_path)[0]


@pytest.mark.parametrize('index', [
    '[' * 100000, '[]', '{"train-000.tar": 3}', '{"train-000.tar": {"stamp": STAMP}}',
    '{"train-000.tar": {"stamp": STAMP, "offsets": [[0], 5]}}',
    '{"train-000.tar": {"stamp": STAMP, "offsets": [0, 1000000000]}}'])
def test_a_damaged_index_is_written_again(tmp_path, index):
    write_shards(tmp_path, [3])
    stat = os.stat(tmp_path / 'train-000.tar')
    file = tmp_path / '.tsm_index.json'
    file.write_text(index.replace('STAMP', f'[{stat.st_size}, {stat.st_mtime_ns}]'))
    assert len(ReaderWds(tmp_path)) == 3
    assert len(json.loads(file.read_text())['train-000.tar']['offsets']) == 4


@pytest.mark.parametrize('name', ['../0.png', 'a/../../0.png', '/tmp/0.png'])
def test_members_outside_of_a_shard_are_refused(tmp_path, name):
    write_shards(tmp_path, [1])
    write_tar(tmp_path / 'train-000.tar', [(name, png(0)), (name.replace('png', 'cls'), b'0')])
    with raises_error(rf"train-000.tar has a member '{name}', and paths outside of the shard are refused"):
        ReaderWds(tmp_path)


def test_a_member_of_negative_size_is_refused(tmp_path):
    write_shards(tmp_path, [1])
    header = tarfile.TarInfo('0.png').tobuf(tarfile.GNU_FORMAT)
    header = header[:124] + b'\xff' * 11 + b'\x00' + b' ' * 8 + header[156:]  # -256 bytes
    header = header[:148] + b'%06o\0 ' % sum(header) + header[156:]
    (tmp_path / 'train-000.tar').write_bytes(header + bytes(4096))
    with raises_error(r'train-000.tar is not a complete tar file'):
        ReaderWds(tmp_path)


def test_a_repeated_class_names_its_file(tmp_path):
    write_shards(tmp_path, [1], classes=['cat', 'dog', 'cat', 'fox'])
    with raises_error(r"Duplicate class 'cat' in .*classes.txt"):
        ReaderWds(tmp_path)


@pytest.mark.parametrize(('number', 'shards'), [(3, 1), (5, 1), (14, 2), (15, 3), (22, 4), (23, 4)])
def test_the_number_of_samples_can_be_limited(root, number, shards):
    reader = ReaderWds(root, num_samples=number)
    assert (len(reader), len(reader.shards), len(reader.locations())) == (number, shards, number)
    assert sorted(reader.epoch_order(0, 0).tolist()) == list(range(number))
    assert reader.locations() == ReaderWds(root).locations()[:number]
    assert read(root, num_samples=number)[-1][0] == number - 1


def test_a_limit_is_logged(root, caplog):
    assert len(create_dataset('wds/', root, num_samples=4)) == 4
    assert caplog.messages == ["Using the first 4 of the 23 samples of split 'train'."]
    caplog.clear()
    assert len(create_dataset('wds/', root, num_samples=40)) == len(create_dataset('wds/', root, num_samples=23)) == 23
    assert caplog.messages == ["Split 'train' has 23 samples, fewer than the given 40. All are used."]
