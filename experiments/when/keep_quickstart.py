""" Append the runs of `timm-splicemix quickstart` to the records, so that report.py shows them

    timm-splicemix quickstart --seed 3
    python experiments/when/keep_quickstart.py output/quickstart/images200-epochs100-seed3
"""
import argparse
import json
from pathlib import Path
from typing import Any, Optional, Sequence

from plan import ARMS, SETTINGS
from queue_runs import RECORDS, append
from run_one import bootstrap, curve, read_summary

from timm_splicemix.files import read_yaml
from timm_splicemix.quickstart import COLUMNS

PLACES = dict(zip(COLUMNS, ('val', 'val_unbiased', 'val_half')))


def read_run(folder: Path, arm: str) -> dict[str, Any]:
    """ Read a run as `run_one.py` would write its result.

    Args:
        folder: Folder of all runs of a quickstart.
        arm: Name of the run.
    """
    args = read_yaml(folder / arm / 'args.yaml')
    images = int(folder.name.partition('images')[2].partition('-')[0])
    metrics, samples = {}, {}
    for name, place in PLACES.items():
        found = json.loads((folder / arm / name / 'results.json').read_text(encoding='utf-8'))['metrics']
        metrics[place] = {'mAP': round(found['mAP'], 4), 'loss': round(found['loss'], 6)}
        samples[place] = bootstrap(folder / arm / name / 'scores.npz')
    setting = f'quickstart-{args["epochs"]}'
    if setting not in SETTINGS:
        raise SystemExit(f'error: Add a setting {setting} to plan.py for a quickstart of {args["epochs"]} epochs.')
    return {
        'name': f'{setting}-{images}-{arm}-seed{args["seed"]}-lr{args["lr"]:g}', 'setting': setting, 'images': images,
        'arm': arm, 'seed': args['seed'], 'lr': args['lr'], 'metrics': metrics,
        'curve': curve(read_summary(folder / arm)), 'core_seconds': 0, 'samples': samples}


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folders', type=Path, nargs='+', metavar='DIR', help='folders of the three runs')
    parser.add_argument('--records', type=Path, default=RECORDS, metavar='DIR', help='folder of the records')
    args = parser.parse_args(argv)
    results = [read_run(folder, arm) for folder in args.folders for arm in ARMS]
    print('\n'.join(append(results, args.records)) or 'No new runs.')


if __name__ == '__main__':
    main()
