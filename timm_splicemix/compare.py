""" Compare results of validate.py on the same images: differences to the first, with bootstrap intervals

    python -m timm_splicemix.compare output/validate/A output/validate/B
    python -m timm_splicemix.compare output/validate/A output/validate/B --output output/compare --bootstrap 10000
"""
from typing import Optional, Sequence

from .args import CommandParser, command
from .args.types import at_least, integer
from .draw import draw_sizes
from .errors import UsageError
from .run.compare import compare_files


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog='timm_splicemix.compare', usage='%(prog)s [flags] RESULTS RESULTS ...', description=__doc__)
    parser.add_argument('results', nargs='+', metavar='RESULTS', help='results.json files, or their folders')
    parser.add_argument('--output', metavar='DIR', help='folder for compare.json, compare.csv and sizes.png')
    parser.add_argument(
        '--bootstrap', type=at_least(1), default=1000, metavar='N', help='bootstrap samples of the 95 %% intervals')
    parser.add_argument('--seed', type=integer, default=42, metavar='N', help='random seed of the samples')
    return parser


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    args = build_parser().parse_args(argv)
    if len(args.results) < 2:
        raise UsageError(f'Expected at least two results to compare, but got {args.results[0]} alone.')
    print(compare_files(args.results, args.output, args.bootstrap, args.seed, draw_sizes))


if __name__ == '__main__':
    main()
