""" Effects of the flags of train.py for data sets, labels, images and loaders """
import os

import pytest
import timm.data
import torch
from PIL import Image
from timm.data.auto_augment import RandAugment
from timm.data.transforms import RandomResizedCropAndInterpolation
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import pil_to_tensor

from timm_splicemix.args import check_train_args, map_defaults, parse_with_config
from timm_splicemix.data import MultiLabelDataset, registry
from timm_splicemix.data.dataset import StrictImageDataset
from timm_splicemix.data.readers.voc import VOC_CLASSES
from timm_splicemix.data.transforms import MultiScaleCrop
from timm_splicemix.run.datasets import create_datasets
from timm_splicemix.run.model import resolve_images
from timm_splicemix.train import build_parser

from .helpers import raises_error
from .runs import CLASSES, make_images
from .test_coco import ANNOTATIONS, write_coco
from .test_voc import make_voc
from .test_wds import NAMES, sample, write_shards, write_tar
from .train_flags import batches, build, images_of, shows

WHOLE = ('--scale', '1', '1', '--ratio', '1', '1', '--hflip', '0')  # nothing at random
RAW = ('--mean', '0', '--std', '1')  # pixels from 0 to 1


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp('flags') / 'images')


@pytest.fixture(scope='module')
def plain(data):
    return images_of(build(data, *WHOLE, *RAW))


def create_sets(*flags):
    parser = build_parser()
    args, given = parse_with_config(parser, [str(flag) for flag in flags])
    check_train_args(args, parser)
    map_defaults(args, given)
    return create_datasets(args)


@pytest.fixture
def timm_calls(monkeypatch):
    """Arguments of the calls of timm.data.create_dataset, which is replaced."""
    calls = []
    monkeypatch.setattr(timm.data, 'create_dataset', lambda name, **kwargs: calls.append({'name': name, **kwargs}))
    return calls


# Data sets

@shows('data', 'data_dir', 'dataset')
def test_the_folder_of_the_data_can_be_given_in_two_ways(data, tmp_path):
    by_name, by_place = create_sets('--dataset', 'csv', '--data-dir', data), create_sets(data, '--dataset', 'csv')
    assert by_name[0].filename(0, absolute=True) == by_place[0].filename(0, absolute=True) == str(data / '0.png')
    with raises_error('Expected one folder of data'):
        create_sets(data, '--data-dir', tmp_path)
    for name in ('train/a', 'train/b', 'val/a', 'val/b'):
        (tmp_path / name).mkdir(parents=True)
        Image.new('RGB', (8, 8)).save(tmp_path / name / 'image.png')
    assert isinstance(by_name[0], MultiLabelDataset)
    assert isinstance(create_sets(tmp_path)[0], StrictImageDataset)  # a class per image


@shows('train_split', 'val_split')
def test_splits_have_names(data):
    train, val = create_sets('--dataset', 'csv', data)
    assert (len(train), len(val)) == (16, 9)
    train, val = create_sets('--dataset', 'csv', data, '--train-split', 'val', '--val-split', 'train')
    assert (len(train), len(val)) == (9, 16)


@shows('train_num_samples', 'val_num_samples', 'epoch_repeats')
def test_the_length_of_a_stream_is_passed_to_timm(timm_calls, data):
    create_sets(
        '--dataset', 'tfds/some', '--train-num-samples', '7', '--val-num-samples', '5', '--epoch-repeats', '2', data)
    assert [call['num_samples'] for call in timm_calls] == [7, 5]
    assert [call.get('repeats') for call in timm_calls] == [2, None]


def test_the_number_of_samples_in_shards_can_be_limited(tmp_path):
    write_shards(tmp_path, [5, 4])
    write_shards(tmp_path, [6], split='val')
    assert list(map(len, create_sets('--dataset', 'wds/', tmp_path))) == [9, 6]
    flags = ('--train-num-samples', '7', '--val-num-samples', '4')
    assert list(map(len, create_sets('--dataset', 'wds/', tmp_path, *flags))) == [7, 4]


@pytest.mark.parametrize('flags', [
    ('--train-num-samples', '7'), ('--val-num-samples', '7'), ('--epoch-repeats', '2'), ('--dataset-download',),
    ('--dataset-trust-remote-code',)])
@pytest.mark.parametrize('dataset', ['csv', ''])
def test_flags_that_a_data_set_does_not_use_are_refused(data, dataset, flags):
    with raises_error(f'Expected {flags[0]} with a data set among .*, but got'):
        create_sets('--dataset', dataset, data, *flags)


@shows('dataset_download')
def test_a_data_set_is_downloaded(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, 'download_dataset', lambda name, root: make_voc(tmp_path))
    flags = ('--dataset', 'voc/2007', '--train-split', 'train', '--val-split', 'val', tmp_path)
    with raises_error('VOC'):
        create_sets(*flags)
    assert len(create_sets(*flags, '--dataset-download')[0]) == 4


@shows('class_map')
def test_a_class_map_orders_the_classes(data, tmp_path):
    (tmp_path / 'classes.txt').write_text('\n'.join(reversed(CLASSES)))
    train, _ = create_sets('--dataset', 'csv', data, '--class-map', tmp_path / 'classes.txt')
    assert list(train.class_names) == list(reversed(CLASSES))
    assert torch.equal(train.targets, create_sets('--dataset', 'csv', data)[0].targets.flip(1))
    with raises_error('Expected no --class-map with a data set of torchvision'):
        create_sets('--dataset', 'torch/cifar10', '--class-map', 'x', data)


@shows('input_img_mode')
def test_images_are_read_in_the_given_mode(data):
    train, _ = create_sets('--dataset', 'csv', data, '--input-img-mode', 'HSV')
    with Image.open(data / '0.png') as image:
        assert torch.equal(pil_to_tensor(train[0][0]), pil_to_tensor(image.convert('HSV')))
    for flags, message in (
            (('--input-img-mode', 'L'), 'Expected images of 3 channels .*, but got 1 in mode L: .* --in-chans 1'),
            (('--in-chans', '4'), 'Expected images of 4 channels .*, but got 3 in mode RGB'),
            (('--input-img-mode', 'some'), "Expected a mode of Pillow's .*'some'")):
        with raises_error(message):
            create_sets('--dataset', 'csv', data, *flags)


@shows('target_key')
def test_labels_may_be_in_another_field(tmp_path):
    for split in ('train', 'val'):
        labels = [{'things': [index % 2], 'labels': [0] if index == 0 else []} for index in range(4)]
        members = [member for index in range(4) for member in sample(index, labels[index])]
        write_tar(tmp_path / f'{split}-000.tar', members)
    (tmp_path / 'classes.txt').write_text('\n'.join(NAMES))
    sums = []
    for flags in ((), ('--target-key', 'things')):
        train, _ = create_sets('--dataset', 'wds/', '--data-dir', tmp_path, *flags)
        sums.append(int(train.targets.sum()))
    assert sums == [1, 4]


@shows('input_key', 'target_key', 'dataset_trust_remote_code')
def test_columns_and_trust_are_passed_to_timm(timm_calls, data):
    create_sets(
        '--dataset', 'hfids/some', data, '--input-key', 'picture', '--target-key', 'thing',
        '--dataset-trust-remote-code')
    assert [(call['input_key'], call['target_key'], call['trust_remote_code']) for call in timm_calls] == [
        ('picture', 'thing', True)] * 2


# Labels

@shows('train_images', 'val_images')
def test_the_folder_of_the_images_of_each_split_can_be_given(tmp_path):
    for folder in ('a', 'b'):
        write_coco(tmp_path, folder, file=f'{folder}.json')
    flags = ['--dataset', 'coco', tmp_path, '--train-ann', 'a.json', '--val-ann', 'b.json']
    sets = create_sets(*flags, '--train-images', 'b', '--val-images', tmp_path / 'a')
    assert [each.filename(0, absolute=True) for each in sets] == [str(tmp_path / f / '0004.jpg') for f in ('b', 'a')]


@shows('train_ann', 'val_ann', 'class_order', 'keep_unlabelled')
def test_coco_annotations_and_class_order(tmp_path):
    write_coco(tmp_path, 'images', file='mine.json')
    write_coco(tmp_path, 'images', file='yours.json', annotations=ANNOTATIONS[:1])
    flags = ('--dataset', 'coco', tmp_path, '--train-ann', 'mine.json', '--val-ann', 'yours.json', '--keep-unlabelled')
    train, val = create_sets(*flags)
    assert (len(train), len(val)) == (3, 3)
    assert train.targets.sum() > val.targets.sum() == 1
    assert list(train.class_names) == ['zebra', 'dog', 'ant']
    assert list(create_sets(*flags, '--class-order', 'name')[0].class_names) == ['ant', 'dog', 'zebra']
    flags = ('--dataset', 'coco', tmp_path, '--train-ann', 'mine.json', '--val-ann', 'mine.json')
    assert len(create_sets(*flags)[0]) == 2


@shows('voc_difficult', 'voc_difficult_eval')
def test_labels_of_difficult_objects(tmp_path):
    make_voc(tmp_path)
    flags = ('--dataset', 'voc/2007', '--train-split', 'train', '--val-split', 'val', tmp_path)
    person = VOC_CLASSES.index('person')

    def labels(*more):
        return [int(dataset.targets[0, person]) for dataset in create_sets(*flags, *more)]

    assert labels() == [0, -1]
    assert labels('--voc-difficult', 'positive') == [1, -1]
    assert labels('--voc-difficult-eval', 'negative') == [0, 0]


@shows('csv_image_column', 'csv_label_column', 'csv_split_column', 'csv_delimiter')
def test_columns_of_a_table_can_be_named(data, tmp_path):
    lines = ['first,second,what,where', '0.png,1.png,a+b,train', '1.png,0.png,b,train', '2.png,2.png,a,val']
    (tmp_path / 'labels.csv').write_text('\n'.join(lines))
    for name in ('0.png', '1.png', '2.png'):
        (tmp_path / name).symlink_to(data / name)
    flags = ['--dataset', 'csv', tmp_path, '--csv-label-column', 'what', '--csv-split-column', 'where']
    train, val = create_sets(*flags, '--csv-image-column', 'second', '--csv-delimiter', '+')
    assert (len(train), len(val)) == (2, 1)
    assert train.filename(0) == '1.png'
    assert train.targets.tolist() == [[1, 1], [0, 1]]
    train, _ = create_sets(*flags, '--csv-image-column', 'first', '--csv-delimiter', '/')
    assert train.filename(0) == '0.png' and 'a+b' in train.class_names


@shows('csv_empty')
def test_empty_cells_of_a_table_are_negative_or_unknown(data, tmp_path):
    (tmp_path / 'labels.csv').write_text('image,cat,dog,split\n0.png,1,,train\n1.png,,1,val\n')
    for name in ('0.png', '1.png'):
        (tmp_path / name).symlink_to(data / name)
    flags = ['--dataset', 'csv', tmp_path]
    assert [each.targets.tolist() for each in create_sets(*flags)] == [[[1, 0]], [[0, 1]]]
    assert [each.targets.tolist() for each in create_sets(*flags, '--csv-empty', 'unknown')] == [[[1, -1]], [[-1, 1]]]


@shows('keep_labels', 'keep_labels_seed')
def test_labels_of_the_training_set_are_hidden(data):
    def targets(*flags):
        train, val = create_sets('--dataset', 'csv', data, *flags)
        assert (val.targets >= 0).all()
        return train.targets

    assert (targets() >= 0).all()
    hidden = targets('--keep-labels', '0.5')
    assert 0 < int((hidden == -1).sum()) < hidden.numel()
    assert not torch.equal(hidden, targets('--keep-labels', '0.5', '--keep-labels-seed', '1'))


# Images

@shows('img_size', 'input_size', 'in_chans', 'batch_size', 'validation_batch_size')
@pytest.mark.parametrize('flags, train_shape, val_batch', [
    ((), (4, 3, 64, 64), 4),
    (('--img-size', '96', '-b', '8'), (8, 3, 96, 96), 8),
    (('--input-size', '1', '64', '96', '-vb', '3'), (4, 1, 64, 96), 3),
    (('--in-chans', '1', '--no-prefetcher'), (4, 1, 64, 64), 4),
    (('--in-chans', '4', '--input-img-mode', 'RGBA'), (4, 4, 64, 64), 4),
])
def test_images_and_batches_have_the_given_size(data, flags, train_shape, val_batch):
    run = build(data, *flags)
    images, _ = batches(run)[0]
    assert images.shape == train_shape
    val_images, _ = next(iter(run.val_loader))
    assert val_images.shape == (val_batch, *train_shape[1:])
    assert run.task.get_eval_model()(images).shape == (len(images), 3)
    assert run.info.data_config['input_size'] == train_shape[1:]
    assert len(run.info.data_config['mean']) == train_shape[1]


@shows('in_chans')
def test_in_chans_changes_the_default_input_size_of_a_model():
    args, _ = parse_with_config(build_parser(), ['--in-chans', '1'])
    assert resolve_images(args, timm.create_model('test_vit', in_chans=1), 1)['input_size'] == (1, 160, 160)


@shows('mean', 'std')
def test_images_are_normalised(data, plain):
    other = images_of(build(data, *WHOLE, '--mean', '0.5', '0.4', '0.3', '--std', '0.25'))
    expected = (plain - torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1)) / 0.25
    torch.testing.assert_close(other, expected)
    for name in ('mean', 'std'):
        with raises_error(f'Expected one number or 3 for --{name}'):
            build(data, f'--{name}', '0.5', '0.5')


@shows('no_prefetcher')
def test_images_are_normalised_without_a_prefetcher_too(data, plain):
    run = build(data, *WHOLE, *RAW, '--no-prefetcher')
    assert run.train_loader._prefetcher is None
    torch.testing.assert_close(images_of(run), plain)


@shows('interpolation', 'crop_pct', 'crop_mode')
def test_evaluation_resizes_and_crops(data):
    def first(*flags):
        return next(iter(build(data, *RAW, *flags).val_loader))[0]

    flags = ('--interpolation', 'nearest', '--crop-pct', '0.5')
    with Image.open(data / '16.png') as image:
        resized = pil_to_tensor(image.resize((128, 128), Image.Resampling.NEAREST)) / 255
    torch.testing.assert_close(first(*flags)[0], resized[:, 32:96, 32:96])
    assert not torch.equal(first(*flags), first('--interpolation', 'bilinear', '--crop-pct', '0.5'))
    wide = ('--input-size', '3', '32', '64', '--crop-pct', '1')
    center, squashed = first(*wide), first(*wide, '--crop-mode', 'squash')
    assert center.shape == squashed.shape and not torch.equal(center, squashed)


@shows('train_interpolation')
def test_training_resizes_with_the_given_interpolation(data, plain):
    def mode(*flags):
        run = build(data, *WHOLE, *RAW, *flags)
        return run.train_loader.dataset.transform.transforms[0].interpolation, images_of(run)

    mode_of_nearest, nearest = mode('--train-interpolation', 'nearest')
    assert mode_of_nearest == InterpolationMode.NEAREST and not torch.equal(nearest, plain)
    assert len(mode('--train-interpolation', 'random')[0]) == 2
    assert mode('--train-interpolation', '', '--interpolation', 'box')[0] == InterpolationMode.BOX


@shows('no_aug')
def test_without_augmentation_an_image_is_always_the_same(data):
    def by_index(run, epoch):
        run.train_loader.set_epoch(epoch)
        return {index: image for images, _ in run.train_loader
                for index, image in zip(run.train_loader.indices, images)}

    run = build(data, '--no-aug', '--reprob', '1')
    first, second = by_index(run, 0), by_index(run, 1)
    assert len(first) == 16 and all(torch.equal(first[index], second[index]) for index in first)
    run = build(data)
    first, second = by_index(run, 0), by_index(run, 1)
    assert not any(torch.equal(first[index], second[index]) for index in first)


@shows('hflip', 'vflip')
def test_images_are_flipped(data, plain):
    assert torch.equal(images_of(build(data, *WHOLE, *RAW, '--hflip', '1')), plain.flip(-1))
    assert torch.equal(images_of(build(data, *WHOLE, *RAW, '--vflip', '1')), plain.flip(-2))


@shows('scale', 'ratio')
def test_crops_have_the_given_area_and_aspect_ratio(data):
    stage = build(data, '--scale', '0.25', '0.25', '--ratio', '2', '2').train_loader.dataset.transform.transforms[0]
    image = Image.new('RGB', (800, 800))
    for _ in range(5):
        *_, height, width = stage.get_params(image, stage.scale, stage.ratio)
        assert height * width == pytest.approx(800 * 800 / 4, rel=0.01)
        assert width / height == pytest.approx(2, rel=0.01)
    for flags in (('--scale', '0.5'), ('--ratio', '2', '1')):
        with raises_error(f'Expected two increasing numbers above 0 for {flags[0]}'):
            build(data, *flags)


@shows('train_crop_mode')
def test_the_train_crop_mode_chooses_the_crop(data):
    def first_stage(*flags):
        return build(data, *flags).train_loader.dataset.transform.transforms[0]

    assert isinstance(first_stage(), RandomResizedCropAndInterpolation)
    assert isinstance(first_stage('--train-crop-mode', 'multiscale'), MultiScaleCrop)
    assert not isinstance(first_stage('--train-crop-mode', 'rkrc'), RandomResizedCropAndInterpolation)


@shows('color_jitter', 'color_jitter_prob')
def test_color_jitter_is_applied_with_its_probability(data, plain):
    def jittered(*flags):
        return images_of(build(data, *WHOLE, *RAW, '--color-jitter', '0.4', *flags))

    def changed(images):
        return sum(not torch.equal(left, right) for left, right in zip(images, plain))

    assert changed(jittered()) == changed(jittered('--color-jitter-prob', '1')) == 16
    assert changed(jittered('--color-jitter-prob', '0')) == 0


@shows('grayscale_prob', 'gaussian_blur_prob')
def test_images_become_gray_or_blurred(data, plain):
    grey = images_of(build(data, *WHOLE, *RAW, '--grayscale-prob', '1'))
    assert torch.equal(grey[:, 0], grey[:, 1]) and not torch.equal(plain[:, 0], plain[:, 1])
    blurred = images_of(build(data, *WHOLE, *RAW, '--gaussian-blur-prob', '1'))
    assert (blurred.std((2, 3)) <= plain.std((2, 3))).all() and blurred.std() < 0.9 * plain.std()


@shows('aa')
def test_an_augmentation_policy_is_applied(data, plain):
    run = build(data, *WHOLE, *RAW, '--aa', 'rand-m9-n2')
    assert any(isinstance(stage, RandAugment) for stage in run.train_loader.dataset.transform.transforms)
    assert not torch.equal(images_of(run), plain)
    with raises_error("Expected a policy of timm for --aa, but got 'nonsense'"):
        build(data, '--aa', 'nonsense')


@shows('reprob', 'remode', 'recount', 'resplit')
def test_rectangles_are_erased(data, plain):
    def erased(*flags):
        images = images_of(build(data, *WHOLE, *RAW, '--reprob', '1', *flags))
        return images, (images != plain).any(dim=1)

    images, mask = erased('--remode', 'const')
    assert mask.flatten(1).any(dim=1).all()
    assert not images.movedim(1, -1)[mask].any()
    box = mask[0].nonzero()
    top, left = box.amin(dim=0).tolist()
    bottom, right = box.amax(dim=0).tolist()
    images, _ = erased('--remode', 'rand')
    assert (images[0, :, top:bottom, left:right] == images[0, :, top:top + 1, left:left + 1]).all()
    images, _ = erased('--remode', 'pixel')
    assert len(images[0, 0, top:bottom, left:right].unique()) > 2
    assert not torch.equal(erased('--remode', 'const', '--recount', '5')[1], mask)
    halves = erased('--resplit')[1].flatten(1).any(dim=1).view(4, 2, 2)  # batches of two halves
    assert not halves[:, 0].any() and halves[:, 1].all()
    with raises_error('Expected --resplit without --no-prefetcher'):
        build(data, '--resplit', '--no-prefetcher')


@shows('decoder', 'on_bad_image')
def test_the_decoder_and_unreadable_images(data, tmp_path):
    assert isinstance(build(data, '--decoder', 'torchvision').train_loader.dataset.transform.transforms[0].stage,
                      RandomResizedCropAndInterpolation)
    broken = make_images(tmp_path / 'images')
    (broken / '3.png').write_bytes(b'')
    with pytest.raises(OSError, match=r'3\.png'):
        batches(build(broken))
    run = build(broken, '--on-bad-image', 'skip')
    assert sum(len(images) for images, _ in batches(run)) == 15 and run.train_loader.num_skipped == 1


# Loaders

@shows('aug_repeats')
def test_images_are_repeated_consecutively(data):
    def order(*flags):
        run = build(data, *flags)
        return [index for _ in run.train_loader for index in run.train_loader.indices]

    once, thrice = order(), order('--aug-repeats', '3')
    assert sorted(once) == list(range(16))
    assert thrice == [index for index in once for _ in range(3)][:16]
    with raises_error('Expected a whole number for --aug-repeats, but got 1.5'):
        build(data, '--aug-repeats', '1.5')


@shows('batch_augment')
def test_batch_augmentation_repeats_images_in_a_batch(data):
    run = build(data, '--batch-augment', '1.5')
    for images, _ in run.train_loader:
        assert len(images) == 6
        assert run.train_loader.indices[4:] == run.train_loader.indices[:2]


@shows('train_batches_per_epoch')
def test_an_epoch_has_the_given_number_of_batches(data):
    assert build(data).num_batches == 4
    assert build(data, '--train-batches-per-epoch', '7').num_batches == 7


class ProcessOfImage:
    """A transform that encodes the id of its process in the pixels."""

    def __call__(self, image):
        digits = [os.getpid() // 256 ** place % 256 for place in range(3)]
        return torch.tensor(digits, dtype=torch.uint8).view(3, 1, 1).expand(3, 64, 64)


def processes_of(run, epoch):
    run.train_loader.dataset.transform = ProcessOfImage()
    digits = images_of(run, epoch)[:, :, 0, 0].mul(255).round().long()
    return set((digits * torch.tensor([1, 256, 65536])).sum(dim=1).tolist())


@shows('workers', 'pin_mem', 'use_multi_epochs_loader')
def test_workers_read_the_images_and_persist_between_epochs(data):
    run = build(data, '-j', '2', '--pin-mem', '--use-multi-epochs-loader', *RAW)
    assert run.train_loader._source.loader.pin_memory and run.val_loader._source.loader.pin_memory
    first, second = processes_of(run, 0), processes_of(run, 1)
    assert len(first) == 2 and first == second and os.getpid() not in first
    run = build(data, '-j', '0', *RAW)
    assert not run.train_loader._source.loader.pin_memory
    assert processes_of(run, 0) == {os.getpid()}


@shows('seed')
def test_the_seed_changes_what_is_drawn(data):
    runs = [build(data, '--seed', seed, '--splicemix-grids', '2x2') for seed in ('42', '42', '43')]
    images = [images_of(run) for run in runs]
    weights = [run.task.get_eval_model().conv1[0].weight for run in runs]
    plans = [run.mixer.plan(8).records[0].sources for run in runs]
    for left, same, other in (images, weights, plans):
        assert torch.equal(left, same) and not torch.equal(left, other)


@shows('cache', 'cache_size', 'scaled_decoding')
def test_images_are_decoded_once_or_in_part(data, tmp_path):
    run = build(data, '--cache', tmp_path / 'cache', '--cache-size', '60')  # of 72 pixels
    images_of(run)
    pixels = run.train_loader.dataset.pixels
    assert (pixels.num_written, pixels.read(0).shape) == (16, (60, 60, 3))
    assert build(data, '--scaled-decoding').train_loader.dataset.scaled_decoding
