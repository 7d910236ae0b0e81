""" The configs: headers that agree with their content, the paper's recipe, and runs that start """
import csv
import functools
import json
import math
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import yaml
from PIL import Image

from timm_splicemix.args import parse_with_config
from timm_splicemix.data.readers.voc import VOC_CLASSES
from timm_splicemix.models import create_model
from timm_splicemix.run.factory import create_mixer
from timm_splicemix.run.optimizer import create_optimizer, create_scheduler
from timm_splicemix.task import SpliceMixModule
from timm_splicemix.train import build_parser, main
from timm_splicemix.validate import build_parser as build_validate_parser

REPOSITORY = Path(__file__).parent.parent
CONFIGS = sorted((REPOSITORY / 'configs').glob('*.yaml'))
VALIDATION = [path for path in CONFIGS if 'validate' in path.name]
TRAINING = [path for path in CONFIGS if path not in VALIDATION]
BY_DATA = {
    data: [path for path in TRAINING if path.name.startswith(f'{data}_')] for data in ('coco', 'voc', 'imagenet')}
SMALLEST = {  # model of each family
    'resnet': ['test_resnet'],
    'shufflenetv2': ['shufflenetv2_x0_5'],
    'tresnet': ['test_resnet'],
    'swin': [
        'swin_tiny_patch4_window7_224', '--model-kwargs', 'embed_dim=16', 'depths=(1,1,1,1)', 'num_heads=(1,1,1,1)'],
    'vit': ['test_vit'],
}

HEADS = [path for path in TRAINING if 'head' in yaml.safe_load(path.read_text())]

each_config = pytest.mark.parametrize('path', CONFIGS, ids=lambda path: path.stem)
each_training = pytest.mark.parametrize('path', TRAINING, ids=lambda path: path.stem)


def read_header(path):
    """Fields of the leading comment; indented lines continue a field."""
    fields = {}
    for line in path.read_text().splitlines():
        if not line.startswith('#'):
            break
        if match := re.match(r'# ([A-Z]\w+): +(.+)', line):
            name, fields[match[1]] = match[1], match[2]
        else:
            fields[name] += f' {line[1:].strip()}'
    return {name: text.replace('\\ ', '') for name, text in fields.items()}


def make_parser(path):
    return build_parser() if path in TRAINING else build_validate_parser()


@functools.cache
def parse(path, *argv):
    return parse_with_config(make_parser(path), ['--config', str(path), *argv])[0]


def write_image(path, seed):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (40, 48, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def write_coco(root, number=12, classes=6):
    for split in ('train2014', 'val2014'):
        for i in range(number):
            write_image(root / split / f'{i}.jpg', i)
        objects = [(i, (i + step) % classes) for i in range(number) for step in range(1 + i % 3)]
        annotations = {
            'images': [{'id': i, 'file_name': f'{i}.jpg', 'width': 48, 'height': 40} for i in range(number)],
            'categories': [{'id': i + 1, 'name': f'class {i}'} for i in range(classes)],
            'annotations': [
                {'id': i, 'image_id': image, 'category_id': label + 1, 'bbox': [0, 0, 9, 9], 'area': 81., 'iscrowd': 0}
                for i, (image, label) in enumerate(objects)]}
        (root / 'annotations').mkdir(exist_ok=True)
        (root / 'annotations' / f'instances_{split}.json').write_text(json.dumps(annotations))


def write_voc(root, number=20):
    folder = root / 'VOCdevkit' / 'VOC2007'
    main_folder = folder / 'ImageSets' / 'Main'
    main_folder.mkdir(parents=True)
    for split, start in (('trainval', 0), ('test', number)):
        names = [f'{i:06d}' for i in range(start, start + number)]
        for i, name in enumerate(names):
            write_image(folder / 'JPEGImages' / f'{name}.jpg', start + i)
        (main_folder / f'{split}.txt').write_text('\n'.join(names))
        for column, label in enumerate(VOC_CLASSES):
            values = [1 if i % 20 == column else 0 if i % 7 == column else -1 for i in range(number)]
            (main_folder / f'{label}_{split}.txt').write_text(
                '\n'.join(f'{name} {value:2d}' for name, value in zip(names, values)))


def write_folders(root, number=2, classes=6):
    for split in ('train', 'validation'):
        for label in range(classes):
            for i in range(number):
                write_image(root / split / f'class{label}' / f'{i}.jpg', number * label + i)


@pytest.fixture(scope='module')
def train(tmp_path_factory):
    """Run a config for two steps with tiny data and a tiny model; returns the folder and the row of the summary."""
    root = tmp_path_factory.mktemp('configs')
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr('timm_splicemix.run.trainer.draw_curves', lambda *args, **kwargs: None)
    for name, write in (('coco', write_coco), ('voc', write_voc), ('imagenet', write_folders)):
        (root / name).mkdir()
        write(root / name)

    def run(path, *argv):
        config = yaml.safe_load(path.read_text())
        # No flag unsets these: tests do not download, and low precision is slow on a CPU.
        config = {name: value for name, value in config.items() if name not in ('pretrained', 'amp')}
        copy = root / path.name
        copy.write_text(yaml.safe_dump(config))
        model, = (argv for family, argv in SMALLEST.items() if config['model'].startswith(family))
        data, out = root / path.name.split('_')[0], tmp_path_factory.mktemp(path.stem)
        size = '96' if config.get('head') == 'tdrg' else '64'
        if config.get('warmup_prefix'):  # its epochs are added
            argv = (*argv, '--warmup-epochs', '0')
        main([
            '--config', str(copy), '--data-dir', str(data), '--img-size', size, '-b', '10', '--epochs', '1',
            '--train-batches-per-epoch', '2', '-j', '0', '--output', str(out), '--experiment', 'run', '--model', *model,
            *argv])
        with open(out / 'run' / 'summary.csv', encoding='utf-8') as file:
            row, = csv.DictReader(file)
        return out / 'run', row

    yield run
    monkeypatch.undo()


@pytest.fixture(scope='module')
def coco_checkpoint(train):
    runs = {}

    def find(name):
        if name not in runs:
            runs[name] = train(REPOSITORY / 'configs' / f'{name}.yaml')[0] / 'model_best.pth.tar'
        return runs[name]
    return find


@pytest.fixture(autouse=True)
def errors_as_they_are(monkeypatch):
    monkeypatch.setenv('TSM_TRACEBACK', '1')


@each_config
def test_the_header_of_a_config_is_complete_and_its_command_valid(path):
    header = read_header(path)
    assert list(header)[:4] == ['Reproduces', 'Command', 'Paper', 'Cost']
    python, script, *argv = shlex.split(header['Command'])
    assert (python, script) == ('python', 'train.py' if path in TRAINING else 'validate.py')
    assert argv[argv.index('--config') + 1] == f'configs/{path.name}'
    assert re.search(r'[Tt]ables? \d.*\(tb|no row of the tables', header['Reproduces']) and 'mAP' in header['Paper']
    argv[argv.index('--config') + 1] = str(path)
    args, _ = parse_with_config(make_parser(path), argv)
    dataset = {'coco': 'coco/2014', 'voc': 'voc/2007', 'imagenet': ''}[args.data_dir]
    assert args.dataset == dataset and path.name.startswith(args.data_dir)


@each_config
def test_a_config_contains_no_defaults(path):
    parser = make_parser(path)
    args = parse(path)
    for name in yaml.safe_load(path.read_text()):
        assert getattr(args, name) != parser.get_default(name), name


def test_the_readme_lists_every_config_with_the_number_of_its_header():
    rows = dict(re.findall(r'^\| `(\w+)` \|.*\| ([^|]+) \|$', (REPOSITORY / 'configs/README.md').read_text(), re.M))
    assert set(rows) == {path.stem for path in CONFIGS}
    for path in CONFIGS:
        paper = read_header(path)['Paper']
        number = re.match(r'mAP ([\d.]+)', paper)
        assert rows[path.stem].split()[0] == (number[1] if number else '-'), path.stem
        star = re.search(r'with a star (?:mAP )?([\d.]+)', paper)
        assert re.findall(r'\* ([\d.]+)', rows[path.stem]) == ([star[1]] if star else [])


@each_training
def test_the_consistency_loss_divides_as_in_the_reference_code(path):
    args = parse(path)
    assert args.splicemix_cl_mean == ('all' if args.splicemix_cl else 'visible')
    assert ('divides by all cells' in read_header(path).get('Notes', '')) == bool(args.splicemix_cl)


def test_the_flags_for_other_augmentations_in_the_readme_make_a_mixer():
    lines = re.findall(r'^\| `(--[^`]+)` \|', (REPOSITORY / 'configs/README.md').read_text(), re.M)
    assert len(lines) == 5
    for line in lines:
        args = parse(REPOSITORY / 'configs' / 'coco_resnet101_baseline.yaml', *line.split())
        assert (create_mixer(args, num_classes=80) is not None) == (args.batch_augment == 1)


@pytest.mark.parametrize('path', [path for path in TRAINING if path not in HEADS], ids=lambda path: path.stem)
def test_every_row_follows_the_recipe_of_the_paper(path):
    args = parse(path)
    assert (args.opt, args.momentum, args.weight_decay, args.sched, args.decay_rate) == (
        'momentum', 0.9, 1e-4, 'multistep', 0.1)
    assert (args.color_jitter, args.hflip, args.reprob, args.aa, args.train_interpolation) == (
        0, 0.5, 0, None, 'bilinear')
    if path in BY_DATA['imagenet']:
        return
    assert (args.epochs, args.decay_milestones, args.backbone_lr_scale, args.loss) == (80, [40, 60], 0.1, '')
    assert (args.train_crop_mode, args.crop_mode, args.crop_pct) == ('multiscale', 'squash', 1.)
    assert args.img_size == {'vit': 384, 'swin': 224}.get(args.model.split('_')[0], 448)
    is_voc = path in BY_DATA['voc']
    assert (args.lr, args.warmup_epochs, args.amp, args.clip_grad) == (
        (0.01, 0, False, 10.) if is_voc else (0.05, 3, True, None))
    own_pooling = any(name in path.name for name in ('avg', 'vit', 'swin', 'shufflenetv2'))
    assert args.gp == (None if own_pooling else 'max')


# Head, learning rates of head and backbone, batch size, epochs, and epochs at which the rate decays, of published code
RECIPES = {
    'mlgcn': ('ml-gcn', 0.1, 0.01, 32, 100, (40, 80)),
    'ssgrl': ('ssgrl', 1e-5, 1e-5, 4, 200, ()),
    'addgcn': ('add-gcn', 0.05, 0.005, 16, 50, (31, 41)),
    'tdrg': ('tdrg', 0.03, 0.003, 32, 50, (41,)),
    'csra': ('csra', 0.1, 0.01, 16, 30, (5, 10, 15, 20, 25)),
    'dsdl': ('dsdl', 0.01, 0.001, 32, 200, (40,)),
    'mldecoder': ('ml-decoder', 1e-4, 1e-4, 56, 40, None),
    'q2l': ('q2l', 1e-4, 1e-4, 32, 80, None),
}


@pytest.mark.parametrize('path', HEADS, ids=lambda path: path.stem)
def test_methods_follow_their_published_recipes(path):
    args = parse(path)
    head, lr, backbone_lr, batch_size, epochs, decays = RECIPES[path.stem.split('_')[1]]
    assert (args.head, args.lr, args.batch_size, args.gp) == (head, lr, batch_size, None)
    assert args.lr * args.backbone_lr_scale == pytest.approx(backbone_lr)
    assert (args.img_size, args.crop_mode, args.crop_pct) == (448, 'squash', 1.)
    assert bool(args.splicemix_grids) == path.stem.endswith('splicemix')
    after = rates(path, updates_per_epoch=10, model=create_model('test_resnet', num_classes=3, head='csra'))
    assert after.num_epochs == epochs
    assert (args.hflip == 0.5) == (head not in ('ssgrl', 'ml-decoder', 'q2l'))
    assert (args.loss == 'asl') == bool(args.loss_detach_focus) == (head in ('ml-decoder', 'q2l'))
    if decays is None:  # one cycle, with its maximum after a fifth
        assert after(0)[-1] == pytest.approx(lr / 25) and after(2 * epochs)[-1] == pytest.approx(lr)
        assert after(10 * epochs - 1)[-1] < lr / 100
        return
    for decay, epoch in enumerate(decays):
        for updates, rate in ((10 * epoch - 2, lr / 10 ** decay), (10 * epoch, lr / 10 ** (decay + 1))):
            assert max(after(updates)) == pytest.approx(rate)
    assert args.sched == 'none' or max(after(10 * epochs - 1)) == pytest.approx(lr / 10 ** len(decays))


def test_both_rows_of_a_method_differ_in_splicemix_alone():
    for name in ('mlgcn', 'ssgrl', 'addgcn', 'tdrg'):
        plain, mixed = (
            yaml.safe_load((REPOSITORY / f'configs/coco_{name}_{row}.yaml').read_text())
            for row in ('baseline', 'splicemix'))
        assert mixed.pop('splicemix_grids') and mixed == plain


def rates(path, updates_per_epoch, model=None):
    """A function that returns the learning rates of backbone and classifier after a number of updates."""
    args = parse(path)
    optimizer = create_optimizer(model or timm.create_model('test_resnet', num_classes=3), args)
    if model is None:
        assert all(group['weight_decay'] == 1e-4 and not group['nesterov'] for group in optimizer.param_groups)
        assert sum(len(group['params']) for group in optimizer.param_groups[1:]) == 2
    scheduler, num_epochs = create_scheduler(optimizer, args, updates_per_epoch)
    assert model is not None or num_epochs == 80

    def after(updates):
        if scheduler is not None:
            scheduler.step(updates // updates_per_epoch)
            scheduler.step_update(updates)
        return [group['lr'] for group in optimizer.param_groups]
    after.num_epochs = num_epochs
    return after


def test_coco_warms_up_by_updates_from_zero_and_decays_twice():
    after = rates(REPOSITORY / 'configs' / 'coco_resnet101_splicemix.yaml', updates_per_epoch=10)
    for updates, rate in ((0, 0.), (1, 0.05 / 30), (15, 0.025), (30, 0.05), (398, 0.05), (400, 5e-3), (598, 5e-3),
                          (600, 5e-4), (799, 5e-4)):
        assert after(updates) == pytest.approx([rate / 10, rate])


def test_voc_starts_at_its_full_rate_and_decays_twice():
    after = rates(REPOSITORY / 'configs' / 'voc_resnet101_splicemix.yaml', updates_per_epoch=10)
    for updates, rate in ((0, 0.01), (398, 0.01), (400, 1e-3), (598, 1e-3), (600, 1e-4), (799, 1e-4)):
        assert after(updates) == pytest.approx([rate / 10, rate])


@pytest.mark.parametrize('name, regular, mixed, cells, in_sight', [
    ('coco_ablation_ds_splice', 32, 8, 4, 1),
    ('coco_ablation_ds_splice_cl', 32, 8, 4, 1),
    ('coco_ablation_ds_mg_splice', 32, 8, 4, 4),
    ('coco_ablation_ds_mg_splice_cl', 32, 8, 4, 4),
    ('coco_batch_exclusive_32_8', 32, 8, 4, 4),
    ('coco_batch_exclusive_20_20', 20, 20, 4, 4),
    ('coco_batch_only_0_40', 0, 40, 4, 4),
])
def test_a_batch_has_the_regular_and_mixed_images_that_the_paper_counts(name, regular, mixed, cells, in_sight):
    args = parse(REPOSITORY / 'configs' / f'{name}.yaml')
    mixer = create_mixer(args, num_classes=80)
    for _ in range(20):
        plan = mixer.plan(args.batch_size)
        assert (len(plan.kept), plan.num_mixed) == (regular, mixed)
        record, = plan.records
        assert record.grid.cells == cells
        assert (~record.dropped).sum(dim=1).tolist() == [in_sight] * mixed
        if 'batch' in name:  # no image is seen twice
            seen = record.sources[~record.dropped].tolist() + plan.kept.tolist()
            assert len(set(seen)) == len(seen) == args.batch_size


@pytest.mark.parametrize('name, regular, mixed', [
    ('coco_splice_mixup_32_8', 32, 8), ('coco_splice_cutmix_32_8', 32, 8),
    ('coco_splice_mixup_20_20', 20, 20), ('coco_splice_cutmix_20_20', 20, 20)])
def test_images_of_mixup_and_cutmix_are_appended_as_the_paper_counts(name, regular, mixed):
    args = parse(REPOSITORY / 'configs' / f'{name}.yaml')
    mixer = create_mixer(args, num_classes=80)
    assert mixer.kind in name and max(mixer.mixup_alpha, mixer.cutmix_alpha) == 0.5
    images, targets = torch.rand(args.batch_size, 3, 8, 8), torch.ones(args.batch_size, 80)
    mixed_images, _ = mixer(images, targets)
    assert args.batch_size == regular and len(mixed_images) == regular + mixed
    assert torch.equal(mixed_images[:regular], images)


@pytest.mark.parametrize('name, size, number', [('coco_ablation_ds', 4, 32), ('coco_ablation_ds_mg', 8, 8)])
def test_the_mixer_of_rows_without_the_splice_of_batches_gives_a_second_batch(name, size, number):
    args = parse(REPOSITORY / 'configs' / f'{name}.yaml')
    images, targets = torch.rand(args.batch_size, 3, 8, 8), torch.ones(args.batch_size, 80)
    regular, second = create_mixer(args, num_classes=80).batches(images, targets)
    assert torch.equal(regular[0], images)
    assert second[0].shape == (number, 3, size, size) and len(second[1]) == number


def test_the_main_rows_draw_grids_and_dropped_cells_as_the_reference_code():
    args = parse(REPOSITORY / 'configs' / 'coco_resnet101_splicemix_cl.yaml')
    mixer = create_mixer(args, num_classes=80)
    records = [mixer.plan(args.batch_size).records[0] for _ in range(800)]
    for cells, part in ((2, 0.3), (4, 0.4), (6, 0.3)):
        assert np.mean([record.grid.cells == cells for record in records]) == pytest.approx(part, abs=0.06)
    assert np.mean([bool(record.dropped.any()) for record in records]) == pytest.approx(0.3, abs=0.06)
    assert {record.num_mixed for record in records} == {8}


@pytest.mark.slow
@each_training
def test_a_config_runs_with_tiny_data_and_a_tiny_model(train, coco_checkpoint, path):
    start = yaml.safe_load(path.read_text()).get('pretrained_path')
    argv = ['--pretrained-path', coco_checkpoint(start.removesuffix('.pth.tar'))] if start else []
    folder, row = train(path, *map(str, argv))
    losses = {name: float(value) for name, value in row.items() if 'loss' in name and value}
    assert losses and all(math.isfinite(value) for value in losses.values())
    assert any('consistency' in name for name in losses) == ('_cl' in path.stem)
    metric = 'top1' if path in BY_DATA['imagenet'] else 'mAP'
    assert any(metric in name for name in row)
    assert (folder / 'model_best.pth.tar').is_file()


@pytest.mark.parametrize('name, second', [
    ('coco_ablation_ds', (10, 3, 32, 32)), ('coco_ablation_ds_mg', (2, 3, 64, 64))])
def test_rows_without_the_splice_of_batches_train_the_second_batch_by_itself(train, monkeypatch, name, second):
    seen = []
    forward = SpliceMixModule.forward

    def spy(module, images, *args):
        seen.append(tuple(images.shape))
        return forward(module, images, *args)
    monkeypatch.setattr(SpliceMixModule, 'forward', spy)
    train(REPOSITORY / 'configs' / f'{name}.yaml')
    assert seen == [(10, 3, 64, 64), second] * 2


def test_a_run_on_voc_starts_from_the_weights_of_the_run_on_coco(train, coco_checkpoint):
    start = coco_checkpoint('coco_resnet101_splicemix')
    folder, _ = train(
        REPOSITORY / 'configs' / 'voc_resnet101_splicemix_from_coco.yaml', '--pretrained-path', str(start),
        '--lr', '0', '--seed', '7')
    before, after = (
        torch.load(path, weights_only=True)['state_dict'] for path in (start, folder / 'model_best.pth.tar'))
    names = [name for name in before if name.endswith(('.weight', '.bias')) and not name.startswith('fc.')]
    assert len(names) > 20 and all(torch.equal(before[name], after[name]) for name in names)
    assert len(before['fc.weight']) == 6 and len(after['fc.weight']) == 20


def test_a_missing_pretrained_path_is_an_error_at_once(train, monkeypatch, capsys):
    monkeypatch.delenv('TSM_TRACEBACK')
    with pytest.raises(SystemExit) as caught:
        train(REPOSITORY / 'configs' / 'voc_resnet101_splicemix_from_coco.yaml')
    assert caught.value.code == 2
    assert 'coco_resnet101_splicemix.pth.tar' in capsys.readouterr().err
