""" Export a checkpoint to ONNX, torch.export (.pt2), TorchScript or safetensors, and check the file by running it

    python -m timm_splicemix.export output/train/RUN --format onnx
    python -m timm_splicemix.export output/train/RUN/last.pth.tar --format pt2 --no-ema --output exported

The exported model takes normalised float32 images and returns logits. A JSON file next to it contains class names,
image size, normalisation, crop and tuned thresholds. ONNX and safetensors files are also checkpoints for validate and
predict. torch has deprecated TorchScript.
"""
from typing import Optional, Sequence

from .args import (
    CommandParser,
    add_predict_model_args,
    command,
    parse_with_config,
    setup_logging,
)
from .args.config import KwargsAction
from .args.ours import EXPORTS
from .errors import UsageError
from .run.export import export_from_flags


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog='timm_splicemix.export', usage='%(prog)s CHECKPOINT --format FORMAT [flags]', description=__doc__)
    parser.add_argument('path', nargs='?', default='', metavar='CHECKPOINT', help='checkpoint, or folder of a run')
    parser.add_argument(
        '--format', required=True, choices=EXPORTS, help='format to write; torch has deprecated torchscript')
    parser.add_argument('--output', metavar='DIR', help='folder to write to (default: a new one in output/export)')
    add_predict_model_args(parser)
    group = parser.add_argument_group('Changes of the model')
    group.add_argument('--reparam', action='store_true', help='fuse the branches of models that support it')
    group.add_argument(
        '--test-pool', action='store_true', help='average the classifier over the positions of larger images')
    group.add_argument(
        '--model-kwargs', nargs='*', default={}, action=KwargsAction, metavar='KEY=VALUE',
        help='further arguments of the model')
    return parser


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    args, _ = parse_with_config(build_parser(), argv)
    setup_logging()
    if args.path and args.checkpoint and args.path != args.checkpoint:
        raise UsageError(f'Expected one checkpoint, but got {args.path} and --checkpoint {args.checkpoint}.')
    args.checkpoint = args.path or args.checkpoint
    export_from_flags(args)


if __name__ == '__main__':
    main()
