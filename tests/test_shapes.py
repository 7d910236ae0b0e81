import io
import json
import math
import multiprocessing
import os
import re
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO

from timm_splicemix.data import shapes, shapes_scene
from timm_splicemix.data.shapes import SPLITS, generate_shapes
from timm_splicemix.data.shapes_scene import (
    BIASED_PAIRS,
    CLASS_NAMES,
    draw_classes,
    draw_scene,
)

from .helpers import raises_error

FEW = {'train': 30, 'val': 8, 'val_unbiased': 8}
ENDLESS = {'train': 100_000}


@pytest.fixture(scope='module')
def root(tmp_path_factory):
    """A data set for tests that only read it."""
    return generate_shapes(tmp_path_factory.mktemp('data') / 'shapes', images={**FEW, 'train': 150})


def read_all(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob('*') if path.is_file()}


def load(root: Path, split: str) -> COCO:
    return COCO(str(root / 'annotations' / f'instances_{split}.json'))


def temporary_folders(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.endswith('.tmp')]


def fork(target, *args) -> multiprocessing.Process:
    """Start a process that inherits patches and imports."""
    process = multiprocessing.get_context('fork').Process(target=target, args=args)
    process.start()
    return process


def rng_of(*key: int) -> np.random.Generator:
    return np.random.default_rng(key)


def test_same_seed_gives_the_same_bytes_in_every_file(tmp_path):
    first = read_all(generate_shapes(tmp_path / 'first', seed=3, images=FEW))
    second = read_all(generate_shapes(tmp_path / 'second', seed=3, images=dict(reversed(FEW.items()))))
    assert len(first) == sum(FEW.values()) + len(FEW) + 1
    assert first == second


def test_another_seed_gives_other_images_and_annotations(tmp_path):
    first = read_all(generate_shapes(tmp_path / 'first', seed=0, images={'train': 5}))
    second = read_all(generate_shapes(tmp_path / 'second', seed=1, images={'train': 5}))
    assert first.keys() == second.keys()
    assert all(first[name] != second[name] for name in first)


def test_an_image_does_not_depend_on_how_many_there_are(root, tmp_path):
    few = generate_shapes(tmp_path / 'few', images={'val_unbiased': 2})
    assert sorted(path.name for path in few.iterdir()) == ['annotations', 'shapes.json', 'val_unbiased']
    for index in range(2):
        name = f'val_unbiased/val_unbiased_{index:06d}.jpg'
        assert (few / name).read_bytes() == (root / name).read_bytes()
    few, many = load(few, 'val_unbiased'), load(root, 'val_unbiased')
    assert all(few.imgs[i] == many.imgs[i] and few.imgToAnns[i] == many.imgToAnns[i] for i in few.imgs)


def test_default_splits_are_those_of_the_receipt():
    receipt = shapes._make_receipt(0, SPLITS)
    assert receipt == {'generator': 1, 'seed': 0, 'images': {'train': 2000, 'val': 500, 'val_unbiased': 500}}


def test_receipt_has_the_parameters(root):
    assert json.loads((root / 'shapes.json').read_text()) == {
        'generator': shapes.GENERATOR_VERSION, 'seed': 0, 'images': {**FEW, 'train': 150}}


def test_layout_is_that_of_coco(root):
    image_ids = []
    for split, count in {**FEW, 'train': 150}.items():
        coco = load(root, split)
        assert {'info', 'licenses', 'images', 'annotations', 'categories'} == coco.dataset.keys()
        assert [category['id'] for category in coco.dataset['categories']] == list(range(1, len(CLASS_NAMES) + 1))
        assert [category['name'] for category in coco.dataset['categories']] == list(CLASS_NAMES)
        assert len(coco.imgs) == count == len(list((root / split).iterdir()))
        assert len(coco.anns) == len(coco.dataset['annotations'])  # ids are unique
        image_ids += coco.imgs
        for image in coco.imgs.values():
            with Image.open(root / split / image['file_name']) as picture:
                assert picture.format == 'JPEG' and picture.mode == 'RGB'
                assert picture.size == (image['width'], image['height'])
    assert len(set(image_ids)) == len(image_ids)


def test_boxes_lie_in_their_images(root):
    for split in FEW:
        coco = load(root, split)
        for image_id, image in coco.imgs.items():
            annotations = coco.imgToAnns[image_id]
            assert 1 <= len(annotations) <= 5
            for annotation in annotations:
                x, y, width, height = annotation['bbox']
                assert all(isinstance(value, int) for value in annotation['bbox'])
                assert min(x, y) >= 0 and min(width, height) >= 1
                assert x + width <= image['width'] and y + height <= image['height']
                assert 0 < annotation['area'] <= width * height
                assert annotation['iscrowd'] == 0


def test_objects_vary_in_class_size_and_number(root):
    coco = load(root, 'train')
    assert len(CLASS_NAMES) >= 12
    assert {annotation['category_id'] for annotation in coco.anns.values()} == set(range(1, len(CLASS_NAMES) + 1))
    sides = np.array([max(annotation['bbox'][2:]) for annotation in coco.anns.values()])
    assert (sides < 20).mean() > 0.15 and (sides > 56).mean() > 0.1
    assert sides.min() >= 10 and sides.max() <= 100
    assert {len(coco.imgToAnns[image_id]) for image_id in coco.imgs} == {1, 2, 3, 4, 5}
    assert len({(image['width'], image['height']) for image in coco.imgs.values()}) == 4


def plain_background(color: str, rng: np.random.Generator, size: tuple[int, int]) -> Image.Image:
    return Image.new('RGB', size, color)


def test_boxes_and_areas_are_those_of_the_pixels(monkeypatch):
    """The same scene on black and on white differs where it is transparent, and by how much."""
    def alpha(seed: int) -> tuple[np.ndarray, list]:
        pictures = []
        for color in ('black', 'white'):
            monkeypatch.setattr(shapes_scene, '_draw_background', partial(plain_background, color))
            picture, objects = draw_scene(rng_of(seed), biased=False)
            pictures.append(np.asarray(picture, dtype=np.int64)[..., 0])
        return 255 - (pictures[1] - pictures[0]), objects

    def box(mask: np.ndarray) -> list[int]:  # left, top, right, bottom
        rows, columns = mask.any(axis=1).nonzero()[0], mask.any(axis=0).nonzero()[0]
        return [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]

    seen = set()
    for seed in range(400):
        covered, objects = alpha(seed)
        if len(objects) != 1:
            continue
        found = objects[0]
        seen.add(found.category)
        inner, outer = covered > 129, covered > 125  # blending rounds
        x, y, width, height = found.box
        for low, value, high in zip(box(inner)[:2], (x, y), box(outer)[:2]):
            assert low >= value >= high
        for low, value, high in zip(box(inner)[2:], (x + width, y + height), box(outer)[2:]):
            assert low <= value <= high
        assert inner.sum() <= found.area <= outer.sum()
    assert seen == set(range(len(CLASS_NAMES)))


def test_no_object_hides_another():
    def shared(box, other):
        width = min(box[0] + box[2], other[0] + other[2]) - max(box[0], other[0])
        height = min(box[1] + box[3], other[1] + other[3]) - max(box[1], other[1])
        return max(0, width) * max(0, height)

    overlaps = []
    for seed in range(100):
        _, objects = draw_scene(rng_of(seed), biased=True)
        boxes = [found.box for found in objects]
        overlaps += [
            shared(box, other) / min(box[2] * box[3], other[2] * other[3])
            for i, box in enumerate(boxes) for other in boxes[:i]]
    assert 0 < max(overlaps) <= 0.25


def test_an_object_without_room_is_made_smaller_or_left_out():
    scene = Image.new('RGB', (100, 100))
    assert shapes_scene._add_object(rng_of(0), scene, 0, taken=[(0, 0, 100, 100)]) is None
    assert scene.getbbox() is None
    strips = [(0, 0, 100, 40), (0, 60, 100, 40), (0, 0, 40, 100), (60, 0, 40, 100)]  # but for 20 x 20 pixels
    sides = []
    for seed in range(200):
        added = shapes_scene._add_object(rng_of(seed), scene.copy(), 0, strips)
        sides += [] if added is None else [max(added.box[2:])]
    assert sides and max(sides) < 45


def test_background_is_of_many_colors_but_never_stark():
    for seed in range(20):
        pixels = np.asarray(shapes_scene._draw_background(rng_of(seed), (160, 120)), dtype=np.float64)
        assert pixels.shape == (120, 160, 3)
        assert 10 < pixels.std(axis=(0, 1)).mean() < 70


def class_statistics(biased: bool) -> tuple[np.ndarray, np.ndarray]:
    """Fraction of scenes with each class, and of those with one class the fraction with another."""
    present = np.zeros((8000, len(CLASS_NAMES)))
    rng = rng_of(0, biased)
    for row in present:
        row[draw_classes(rng, biased)] = 1
    together = present.T @ present
    return present.mean(axis=0), together / np.diag(together)[:, None]


def test_partners_appear_together_in_a_biased_split_only():
    assert len(BIASED_PAIRS) >= 4
    assert len({name for pair in BIASED_PAIRS for name in pair}) == 2 * len(BIASED_PAIRS)
    biased_frequency, biased = class_statistics(True)
    frequency, unbiased = class_statistics(False)
    for pair in BIASED_PAIRS:
        for a, b in (pair, pair[::-1]):
            a, b = CLASS_NAMES.index(a), CLASS_NAMES.index(b)
            assert biased[a, b] > 0.6
            assert unbiased[a, b] < 0.2
    assert 0.8 < (biased_frequency / frequency).min() <= (biased_frequency / frequency).max() < 1.25
    assert frequency.max() < 1.25 * frequency.min()


def test_classes_of_a_biased_split_also_appear_alone():
    alone = [classes[0] for classes in (draw_classes(rng_of(seed), True) for seed in range(1000)) if len(classes) == 1]
    assert set(alone) == set(range(len(CLASS_NAMES)))


def test_number_of_objects_favours_one_to_three():
    counts = np.bincount([len(draw_classes(rng_of(seed), False)) for seed in range(4000)])
    assert len(counts) == 6 and counts[0] == 0
    assert counts[1:4].sum() > 0.75 * counts.sum()
    assert math.isclose(np.average(np.arange(6), weights=counts), 2.4, abs_tol=0.1)


def test_train_and_val_are_biased_and_val_unbiased_is_not(tmp_path, monkeypatch):
    asked = []

    def record(rng, biased):
        asked.append(biased)
        return draw_scene(rng, biased)

    monkeypatch.setattr(shapes, 'draw_scene', record)
    generate_shapes(tmp_path / 'shapes', images={'train': 2, 'val': 2, 'val_unbiased': 2})
    assert asked == [True] * 4 + [False] * 2


def test_second_call_writes_and_locks_nothing(root, monkeypatch):
    def refuse(*args):
        raise AssertionError('locked')

    monkeypatch.setattr(shapes, 'FileLock', refuse)
    before = {path: path.stat().st_mtime_ns for path in root.rglob('*')}
    assert generate_shapes(root, images={**FEW, 'train': 150}) == root
    assert {path: path.stat().st_mtime_ns for path in root.rglob('*')} == before


def test_folder_may_be_missing_empty_or_linked(tmp_path):
    images = {'train': 1}
    expected = read_all(generate_shapes(tmp_path / 'some' / 'where' / 'shapes', images=images))
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'target').mkdir()
    (tmp_path / 'link').symlink_to(tmp_path / 'target')
    for name in ('empty', 'link'):
        assert read_all(generate_shapes(str(tmp_path / name), images=images)) == expected
    assert (tmp_path / 'link').is_symlink()


def test_interruption_leaves_nothing_behind(tmp_path, monkeypatch):
    drawn = []

    def interrupted(rng, biased):
        if len(drawn) == 4:
            assert len(temporary_folders(tmp_path)) == 1
            raise KeyboardInterrupt
        drawn.append(biased)
        return draw_scene(rng, biased)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shapes, 'draw_scene', interrupted)
        generate_shapes(tmp_path / 'shapes', images=FEW)
    assert not (tmp_path / 'shapes').exists()
    assert not temporary_folders(tmp_path)
    generate_shapes(tmp_path / 'shapes', images=FEW)
    assert len(load(tmp_path / 'shapes', 'train').imgs) == FEW['train']


def test_killed_generation_leaves_no_data_set_and_the_next_one_cleans_up(tmp_path):
    process = fork(generate_shapes, tmp_path / 'shapes', 0, ENDLESS)
    deadline = time.monotonic() + 10
    while not list(tmp_path.glob('.shapes.*.tmp/train/train_000003.jpg')) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    process.join()
    assert not (tmp_path / 'shapes').exists()
    assert len(temporary_folders(tmp_path)) == 1
    generate_shapes(tmp_path / 'shapes', images=FEW)
    assert not temporary_folders(tmp_path)
    assert len(load(tmp_path / 'shapes', 'train').imgs) == FEW['train']


def test_of_processes_that_start_together_one_generates(root, tmp_path, monkeypatch):
    barrier = multiprocessing.get_context('fork').Barrier(3)
    images = {**FEW, 'train': 150}

    def write(*args):
        with open(tmp_path / 'generations', 'a') as file:
            file.write(f'{os.getpid()}\n')
        original(*args)

    def start():
        barrier.wait(10)
        assert generate_shapes(tmp_path / 'shapes', images=images) == tmp_path / 'shapes'

    original = shapes._write
    monkeypatch.setattr(shapes, '_write', write)
    processes = [fork(start) for _ in range(3)]
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len((tmp_path / 'generations').read_text().split()) == 1
    assert not temporary_folders(tmp_path)
    assert read_all(tmp_path / 'shapes') == read_all(root)


@pytest.mark.parametrize('other_seed', [0, 1])
def test_equal_data_set_of_a_faster_machine_is_kept(tmp_path, monkeypatch, other_seed):
    images = {'train': 2}

    def slow_write(*args):
        original(*args)
        os.rename(other, tmp_path / 'shapes')

    other = generate_shapes(tmp_path / 'other', seed=other_seed, images=images)
    theirs = (other / 'shapes.json').stat().st_ino
    original = shapes._write
    monkeypatch.setattr(shapes, '_write', slow_write)
    monkeypatch.setattr(shapes, 'FileLock', nullcontext)  # locks that don't reach other machines
    with nullcontext() if other_seed == 0 else raises_error('"seed": 1'):
        generate_shapes(tmp_path / 'shapes', images=images)
    assert (tmp_path / 'shapes' / 'shapes.json').stat().st_ino == theirs
    assert not temporary_folders(tmp_path)


def test_temporary_folders_of_other_machines_are_kept_while_they_grow(tmp_path):
    here = shapes._machine()
    away = f'{int(here, 16) ^ 1:08x}'
    names = {
        'dead': f'.shapes.{here}-1.tmp', 'stale': f'.shapes.{away}-1.tmp', 'growing': f'.shapes.{away}-2.tmp',
        'other': f'.shapes.old.{here}-1.tmp', 'foreign': '.shapes.tmp'}
    for name in names.values():
        (tmp_path / name / 'train').mkdir(parents=True)
    long_ago = time.time() - 3600
    for key in ('stale', 'growing'):
        os.utime(tmp_path / names[key], (long_ago, long_ago))
    os.utime(tmp_path / names['stale'] / 'train', (long_ago, long_ago))
    generate_shapes(tmp_path / 'shapes', images={'train': 1})
    left = {path.name for path in temporary_folders(tmp_path)}
    assert left == {names['growing'], names['other'], names['foreign']}


def test_data_set_of_another_seed_is_refused(root):
    with raises_error(r'"seed": 7.* but got .*"seed": 0.*Choose another folder, or delete'):
        generate_shapes(root, seed=7, images={**FEW, 'train': 150})


def test_data_set_of_another_size_or_generator_is_refused(root, monkeypatch):
    with raises_error(r'"train": 151.* but got .*"train": 150'):
        generate_shapes(root, images={**FEW, 'train': 151})
    monkeypatch.setattr(shapes, 'GENERATOR_VERSION', 99)
    with raises_error(r'"generator": 99.* but got .*"generator": 1\b'):
        generate_shapes(root, images={**FEW, 'train': 150})


def test_folder_with_something_else_is_refused_and_untouched(tmp_path):
    folder, file, broken = tmp_path / 'folder', tmp_path / 'file', tmp_path / 'broken'
    folder.mkdir()
    (folder / 'thesis.txt').write_text('mine')
    file.write_text('mine')
    broken.mkdir()
    (broken / 'shapes.json').write_text('{"seed"')
    for path, message in (
            (folder, r'but got a folder with other files\. Choose another folder'),
            (file, r'but got a file\. Choose another folder'),
            (broken, re.escape(r'but got "{\"seed\"". Choose another folder')),
    ):
        with raises_error(message):
            generate_shapes(path, images=FEW)
    assert (folder / 'thesis.txt').read_text() == file.read_text() == 'mine'
    assert sorted(path.name for path in tmp_path.iterdir()) == ['broken', 'file', 'folder']


@pytest.mark.parametrize('kwargs, message', [
    ({'seed': -1}, 'Expected seed to be an integer of at least 0, but got -1'),
    ({'seed': 0.5}, 'Expected seed to be an integer of at least 0, but got 0.5'),
    ({'seed': True}, 'but got True'),
    ({'images': {'train': 0}}, "Expected 1 to 1000000 images for the split 'train', but got 0"),
    ({'images': {'val': 2.}}, "for the split 'val', but got 2.0"),
    ({'images': {'train': 1, 'test': 1}}, 'for splits among train, val, val_unbiased, but got test'),
    ({'images': {}}, 'but got none'),
])
def test_wrong_arguments_are_refused_before_anything_is_written(tmp_path, kwargs, message):
    with raises_error(message):
        generate_shapes(tmp_path / 'shapes', **kwargs)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('terminal, progress, shown', [(True, True, True), (False, True, False), (True, False, False)])
def test_progress_is_shown_on_a_terminal_only(tmp_path, monkeypatch, terminal, progress, shown):
    stderr = io.StringIO()
    stderr.isatty = lambda: terminal
    monkeypatch.setattr(sys, 'stderr', stderr)
    generate_shapes(tmp_path / 'shapes', images={'train': 3}, progress=progress)
    assert ('Generating shapes' in stderr.getvalue() and '3/3' in stderr.getvalue()) == shown
    assert shown or not stderr.getvalue()
