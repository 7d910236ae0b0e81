""" validate.py on all kinds of data sets """
# ruff: noqa: F811 - fixtures that are imported are arguments too
import json
import sys

import pytest
import torch
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor

import timm_splicemix as tsm
from tests.evaluations import (
    CLASSES,
    arguments,
    close,
    labels_of,
    logits_of,
    place,  # noqa: F401 - used by pytest, as the other fixtures
    quiet,  # noqa: F401
    refusal,
    score,  # noqa: F401
    write_checkpoint,
    write_folders,
)
from tests.test_wds import write_tar
from timm_splicemix.results import Scores
from timm_splicemix.validate import main


def labelled(place, split='val'):
    """(file, classes of it) of the images of a split."""
    return [
        (path, [int(index) for index in row.nonzero()[0]])
        for path, row in zip(sorted((place / 'data').glob(f'{split}_*.png')), labels_of(place, split))]


def test_a_folder_for_each_class_is_scored_by_accuracy(tmp_path):
    data, classes = write_folders(tmp_path / 'data')
    checkpoint = write_checkpoint(tmp_path / 'run')
    main([
        str(data), '--split', '', '--checkpoint', str(checkpoint), '-j', '0', '-b', '4', '--output',
        str(tmp_path / 'out')])
    model, _ = tsm.load_checkpoint(checkpoint)
    images = [pil_to_tensor(Image.open(path)) / 255 for path in sorted(data.glob('*/*.png'))]
    with torch.inference_mode():
        logits = model((torch.stack(images) - 0.5) / 0.5)
    result = json.loads((tmp_path / 'out' / 'results.json').read_text())
    expected = 100 * (logits.argmax(dim=1) == torch.tensor(classes)).double().mean().item()
    assert result['metrics']['top1'] == pytest.approx(expected)
    assert result['metrics']['loss'] == pytest.approx(
        torch.nn.functional.cross_entropy(logits, torch.tensor(classes)).item(), rel=1e-3)


@pytest.mark.parametrize('dataset', ['', 'folder', 'image_folder'])
def test_a_list_gives_images_several_labels(place, score, tmp_path, dataset):
    lines = [f'{path.name},{" ".join(map(str, classes))}' for path, classes in labelled(place)]
    (tmp_path / 'list.txt').write_text('\n'.join(lines))
    scores = score('--dataset', dataset, '--val-ann', tmp_path / 'list.txt')
    assert scores.class_names == CLASSES and scores.targets.tolist() == labels_of(place).tolist()
    assert close(scores.scores, logits_of(place))


def write_shards(place, folder):
    for split in ('val', 'test'):
        for shard in range(2):
            members = []
            for path, classes in labelled(place, split)[shard * 6:(shard + 1) * 6]:
                members += [(f'{path.stem}.png', path.read_bytes()),
                            (f'{path.stem}.json', json.dumps({'labels': classes}).encode())]
            write_tar(folder / f'{split}-{shard:03d}.tar', members)
    return folder


def test_shards_are_scored(place, score, tmp_path, capsys):
    flags = ['--dataset', 'wds/', '--data-dir', write_shards(place, tmp_path / 'shards')]
    scores = score(*flags)
    assert scores.targets.tolist() == labels_of(place).tolist()
    assert close(scores.scores, logits_of(place))
    tune = ['--checkpoint', write_checkpoint(tmp_path / 'run'), '--thresholds', 'tune', '--tune-split']
    assert len(score(*flags, *tune, 'test').scores) == 11
    assert 'Expected --tune-split with other images' in refusal(capsys, arguments(place, *flags, *tune, 'val'))


@pytest.mark.slow
def test_shards_are_scored_by_two_processes_together(run, place, tmp_path):
    flags = ['--dataset', 'wds/', '--data-dir', write_shards(place, tmp_path / 'shards')]
    done = run(
        sys.executable, '-m', 'torch.distributed.run', '--nproc-per-node', '2', '--standalone', 'validate.py',
        *arguments(place, *flags), '--output', tmp_path / 'two')
    assert done.returncode == 0, done.stderr
    scores = Scores.load(tmp_path / 'two' / 'scores.npz')
    assert len(scores.scores) == 11
    assert close(scores.scores, logits_of(place))


def test_a_data_set_of_hugging_face_is_scored(place, score, tmp_path, capsys):
    datasets = pytest.importorskip('datasets')
    features = datasets.Features({
        'image': datasets.Image(), 'labels': datasets.Sequence(datasets.ClassLabel(names=list(CLASSES)))})

    def part(split):
        images = [{'bytes': path.read_bytes(), 'path': None} for path, _ in labelled(place, split)]
        labels = [classes for _, classes in labelled(place, split)]
        return datasets.Dataset.from_dict({'image': images, 'labels': labels}, features=features)

    content = datasets.DatasetDict({'validation': part('val'), 'test': part('test')})
    content.save_to_disk(str(tmp_path / 'hf'))
    flags = ['--dataset', 'hfds/', '--data-dir', tmp_path / 'hf']
    scores = score(*flags)
    assert scores.targets.tolist() == labels_of(place).tolist()
    assert close(scores.scores, logits_of(place))
    tune = ['--checkpoint', write_checkpoint(tmp_path / 'run'), '--thresholds', 'tune', '--tune-split']
    assert len(score(*flags, *tune, 'test').scores) == 11
    assert 'Expected --tune-split with other images' in refusal(capsys, arguments(place, *flags, *tune, 'val'))
