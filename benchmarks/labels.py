""" Speed and memory of reading label files, relative to `json.load` and `csv.reader` on the same files

Writes synthetic files as large as COCO 2017 (118,287 images, 860,001 objects) and a CSV file of a million rows. Prints
the median time of each reader and its ratio; and the memory that a reader keeps, which is the growth of resident memory
in a new process, without and with the cache that other processes use. Exits with 1 if a limit is exceeded.

    python benchmarks/labels.py
    python benchmarks/labels.py --scale 0.1 --rounds 3
"""
import argparse
import csv
import gc
import json
import multiprocessing
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable

from timing import alternate, claim, medians, ratios

from timm_splicemix.data import ReaderCoco, ReaderCsv, cache

IMAGES, OBJECTS, CLASSES, ROWS = 118287, 860001, 80, 1000000


def write_coco(path: Path, images: int, objects: int) -> None:
    """Write annotations with polygons of 7 to 32 points, as many bytes for each object as COCO has."""
    generator = random.Random(0)
    polygons = [
        json.dumps([[round(generator.uniform(0, 640), 2) for _ in range(2 * generator.randint(7, 32))]])
        for _ in range(1000)]
    ids = generator.sample(range(600000), images)
    with open(path, 'w') as file:
        entries = [{
            'license': 3, 'file_name': f'{number:012d}.jpg', 'height': 480, 'width': 640, 'id': number,
            'coco_url': f'http://images.cocodataset.org/train2017/{number:012d}.jpg',
            'date_captured': '2013-11-14 11:18:45',
        } for number in ids]
        file.write(f'{{"info": {{}}, "licenses": [], "images": {json.dumps(entries)}, "annotations": [')
        for number in range(objects):
            file.write(
                f'{", " if number else ""}{{"segmentation": {polygons[number % len(polygons)]}, '
                f'"area": {generator.uniform(0, 50000):.4f}, "iscrowd": 0, "image_id": {generator.choice(ids)}, '
                f'"bbox": [473.07, 395.93, 38.65, 28.67], "category_id": {generator.randint(1, CLASSES)}, '
                f'"id": {number + 1}}}')
        categories = [{'supercategory': 'thing', 'id': i, 'name': f'class {i}'} for i in range(1, CLASSES + 1)]
        file.write(f'], "categories": {json.dumps(categories)}}}')


def write_csv(path: Path, rows: int, quote: str = '') -> None:
    generator = random.Random(0)
    names = [f'class {number}' for number in range(CLASSES)]
    with open(path, 'w') as file:
        file.write('image,labels\n')
        for row in range(rows):
            labels = ';'.join(generator.sample(names, generator.randint(1, 5)))
            file.write(f'{row:012d}.jpg,{quote}{labels}{quote}\n')


def load_json(path: Path) -> Any:
    with open(path) as file:
        return json.load(file)


def load_csv(path: Path) -> list[list[str]]:
    with open(path, newline='') as file:
        return list(csv.reader(file))


def read_coco(path: Path) -> ReaderCoco:
    return ReaderCoco(path.parent, path, images_must_exist=False)


def read_new_coco(path: Path) -> ReaderCoco:
    path.with_name(f'.{path.name}.npz').unlink(missing_ok=True)
    return read_coco(path)


def read_csv(path: Path) -> ReaderCsv:
    return ReaderCsv(path.parent, path, images_must_exist=False)


def resident() -> int:
    """Bytes of this process in memory (Linux)."""
    return int(Path('/proc/self/statm').read_text().split()[1]) * os.sysconf('SC_PAGE_SIZE')


def _grow(read: Callable, path: Path, queue: Any) -> None:
    before = resident()
    kept = read(path)
    gc.collect()
    queue.put(resident() - before)
    del kept


def kept_memory(read: Callable, path: Path) -> float:
    """Megabytes by which reading makes a new process grow."""
    context = multiprocessing.get_context('spawn')
    queue = context.Queue()
    process = context.Process(target=_grow, args=(read, path, queue))
    process.start()
    grown = queue.get()
    process.join()
    return grown / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--scale', type=float, default=1., help='size of the files (default: 1)')
    parser.add_argument('--rounds', type=int, default=3, help='calls of each function (default: 3)')
    parser.add_argument('--json-at-most', type=float, default=1.4, help='largest ratio to json.load (default: 1.4)')
    parser.add_argument('--csv-at-most', type=float, default=1.6, help='largest ratio to csv.reader (default: 1.6)')
    parser.add_argument('--kept-at-most', type=float, default=300., help='largest memory in MB (default: 300)')
    parser.add_argument('--folder', type=Path, help='folder of the files, which are kept (default: a temporary one)')
    args = parser.parse_args()

    cache._MIN_SIZE = 0  # so that scaled files are cached too
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        sys.exit(not compare(folder, args))


def compare(folder: Path, args: argparse.Namespace) -> bool:
    """Print a table; return whether all goals are met."""
    coco, plain, quoted = folder / 'instances.json', folder / 'labels.csv', folder / 'quoted.csv'
    write_coco(coco, int(IMAGES * args.scale), int(OBJECTS * args.scale))
    write_csv(plain, int(ROWS * args.scale))
    write_csv(quoted, int(ROWS * args.scale), '"')
    met = []
    print('| file | reader | seconds | ratio | kept, MB |\n|---|---|---|---|---|')
    for path, base, readers, limit in (
        (coco, load_json, (read_new_coco, read_coco), args.json_at_most),
        (plain, load_csv, (read_csv,), args.csv_at_most),
        (quoted, load_csv, (read_csv,), args.csv_at_most),
    ):
        functions = {read.__name__: lambda read=read, path=path: read(path) and None for read in (base, *readers)}
        times = alternate(functions, args.rounds, title=path.name)
        size = f'{path.name}, {path.stat().st_size / 1e6:.0f} MB'
        for read in (base, *readers):
            name, taken = read.__name__, medians(times)[read.__name__]
            measured = ratios(times, name, base.__name__)
            kept = kept_memory(read, path)
            print(f'| {size} | {name} | {taken:.2f} | {measured[1]:.2f} | {kept:.0f} |', flush=True)
            if read is base:
                continue
            met.append(claim(f'time to read {size}: {name} / {base.__name__}', measured, at_most=limit))
            if path == coco:
                met.append(claim(f'MB kept of {size}: {name}', (kept,) * 3, at_most=args.kept_at_most))
    return all(met)


if __name__ == '__main__':
    main()
