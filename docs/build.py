""" Build the API reference from the docstrings of the package: python docs/build.py --output output/docs """
import argparse
import warnings
from pathlib import Path

import pdoc

MODULES = (
    'timm_splicemix',  # with timm_splicemix.models, which it exports
    'timm_splicemix.mix', 'timm_splicemix.heads', 'timm_splicemix.loss', 'timm_splicemix.metrics',
    'timm_splicemix.data', 'timm_splicemix.task')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--output', type=Path, default=Path('output/docs'), metavar='DIR', help='default: %(default)s')
    args = parser.parse_args()
    warnings.filterwarnings('error', module='pdoc')
    pdoc.render.configure(docformat='google', show_source=False)
    pdoc.pdoc(*MODULES, output_directory=args.output)
    print(f'API reference: {args.output / "index.html"}')


if __name__ == '__main__':
    main()
