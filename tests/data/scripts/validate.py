""" A short evaluation script that uses timm by the same names as timm's own validate.py, for tests of `with_timm` """
import argparse
import json
from pathlib import Path

import torch
from timm import utils
from timm.data import create_dataset, create_loader, resolve_data_config
from timm.models import create_model, load_checkpoint

parser = argparse.ArgumentParser(description='Short evaluation script')
for flag, kind, default in (
        ('--data-dir', str, None), ('--dataset', str, ''), ('--split', str, 'validation'), ('--class-map', str, ''),
        ('--model', str, 'dpn92'), ('--num-classes', int, None), ('--gp', str, None), ('--img-size', int, None),
        ('--checkpoint', str, ''), ('--batch-size', int, 256), ('--workers', int, 4), ('--log-freq', int, 10),
        ('--device', str, 'cuda'), ('--seed', int, 42), ('--results-file', str, '')):
    parser.add_argument(flag, type=kind, default=default)
parser.add_argument('--amp', action='store_true')


def main():
    utils.setup_default_logging()
    args = parser.parse_args()
    checkpoints = sorted(Path(args.checkpoint).glob('checkpoint-*.pth.tar')) if Path(args.checkpoint).is_dir() else []
    if checkpoints:
        results = []
        for checkpoint in checkpoints:
            args.checkpoint = str(checkpoint)
            results.append(validate(args))
        results.sort(key=lambda result: result['top1'], reverse=True)
    else:
        results = validate(args)
    if args.results_file:
        Path(args.results_file).write_text(json.dumps(results))
    print(json.dumps(results))


def validate(args):
    model = create_model(args.model, num_classes=args.num_classes, global_pool=args.gp)
    load_checkpoint(model, args.checkpoint)
    config = resolve_data_config(vars(args), model=model)
    dataset = create_dataset(root=args.data_dir, name=args.dataset, split=args.split, class_map=args.class_map)
    loader = create_loader(
        dataset, input_size=config['input_size'], batch_size=args.batch_size, num_workers=args.workers,
        mean=config['mean'], std=config['std'], device=torch.device(args.device))
    model.to(args.device).eval()
    correct = 0
    with torch.inference_mode():
        for images, targets in loader:
            correct += (model(images).argmax(dim=1) == targets).sum().item()
    return {'model': args.model, 'top1': 100 * correct / len(dataset)}


if __name__ == '__main__':
    main()
