""" Publish a model on the Hugging Face Hub, with class names, thresholds and a model card

    python -m timm_splicemix.push output/train/RUN USER/NAME --dry-run
    python -m timm_splicemix.push output/train/RUN USER/NAME --results output/validate/RUN --license cc-by-4.0

The card describes data, flags and classes, and shows the metrics and the AP of each class of an evaluation: that of
--results, or one in the folder of the run (validate.py --output RUN/val). Look at it with --dry-run, which writes all
files and uploads nothing. Afterwards, `--model hf-hub:USER/NAME` or `--checkpoint hf-hub:USER/NAME` loads the model
here, and timm.create_model('hf-hub:USER/NAME', pretrained=True) loads it where timm can build it; the card says so.
"""
from pathlib import Path
from typing import Optional, Sequence

from . import __version__
from .args import CommandParser, command, setup_logging
from .args.timm import add_ema_args
from .draw import draw_classes
from .files import free_folder
from .run.hub import CARD, open_publication, upload, write_card, write_repository
from .run.load import ema_flag


def build_parser() -> CommandParser:
    parser = CommandParser(prog='timm_splicemix.push', usage='%(prog)s RUN USER/NAME [flags]', description=__doc__)
    parser.add_argument('run', metavar='RUN', help='folder of a run, or a checkpoint')
    parser.add_argument('repository', metavar='USER/NAME', help='name of the model on the Hugging Face Hub')
    parser.add_argument('--dry-run', action='store_true', help='write the files and upload nothing')
    parser.add_argument(
        '--results', metavar='DIR', help='folder that validate.py wrote (default: the one in the folder of the run)')
    parser.add_argument('--output', metavar='DIR', help='folder of the files (default: a new one in output/push)')
    parser.add_argument('--license', default='apache-2.0', metavar='NAME', help='license of the weights')
    parser.add_argument('--private', action='store_true', help='create a private repository')
    parser.add_argument('--message', default='Add model', metavar='TEXT', help='message of the commit')
    add_ema_args(parser)
    return parser


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    args = build_parser().parse_args(argv)
    setup_logging()
    publication = open_publication(args.run, args.repository, args.results, ema_flag(args))
    folder = Path(args.output) if args.output else free_folder(
        Path('output/push') / args.repository.replace('/', '_'))
    timm_reason = write_repository(publication, folder)
    result = publication.result
    if result is not None and result.classes:
        rows = [{'class': name, 'AP': value, 'positives': number} for name, (value, number) in result.classes.items()]
        draw_classes(rows, result.content, folder / 'per_class_ap.png')
    write_card(publication, folder, timm_reason, args.license, __version__)
    print(f'Model card  {folder / CARD}')
    if result is None:
        print('The card has no evaluation: run validate.py, then give --results.')
    print(f'Plain timm  {f"cannot load the model: {timm_reason}" if timm_reason else "loads the model"}')
    if args.dry_run:
        print(f'Dry run     nothing was uploaded; files are in {folder}')
    else:
        print(f'Uploaded    {upload(publication, folder, args.private, args.message)}')


if __name__ == '__main__':
    main()
