""" `timm-splicemix COMMAND ...`: runs one of the commands of the package """
import difflib
import sys
from importlib import import_module
from typing import NoReturn, Optional, Sequence

from . import __version__

# A command is a module with `main(argv)`, which is imported only when it runs.
COMMANDS = {
    'quickstart': 'train small models with and without SpliceMix, and compare them',
    'train': 'train a model',
    'validate': 'evaluate a checkpoint on a data set',
    'predict': 'predict the labels of images',
    'preview': 'draw a mixed batch of a data set',
    'export': 'export a checkpoint to ONNX, .pt2, TorchScript or safetensors',
    'compare': 'compare the results of two models, with confidence intervals',
    'split': 'split a data set into images to train and to validate on',
    'stats': 'show the label statistics of a data set',
    'check': 'find unreadable images of a data set',
    'report': 'write an HTML report of runs',
    'push': 'publish a model on the Hugging Face Hub',
    'with_timm': "run timm's own train.py or validate.py with our flags",
    'analysis': "draw one of the paper's figures: timm-splicemix analysis NAME ...",
}
ANALYSES = {
    'bias': 'AP of classes with and without their usual context',
    'cam': 'class activation maps',
    'convergence': 'loss and mAP over epochs',
    'low_resolution': 'mAP at smaller image sizes',
    'small_objects': 'gain in AP by object size',
    'sweep': 'mAP over grids and numbers of mixed images',
    'tsne': 't-SNE of the classifier weights',
}


def _help(prog: str, commands: dict[str, str]) -> str:
    width = max(map(len, commands)) + 2
    return '\n'.join([
        f'usage: {prog} COMMAND ...', '', 'Commands:',
        *(f'  {name:<{width}}{text}' for name, text in commands.items()), '',
        f"Run '{prog} COMMAND --help' for the flags of a command."])


def _unknown(prog: str, name: str, commands: dict[str, str]) -> NoReturn:
    nearest = difflib.get_close_matches(name, commands, n=1, cutoff=0.5)
    hint = f'did you mean {nearest[0]!r}?' if nearest else f'expected one of {", ".join(commands)}.'
    print(f'{prog}: error: unknown command {name!r}: {hint}', file=sys.stderr)
    sys.exit(2)


def main(argv: Optional[Sequence[str]] = None) -> None:
    name, *rest = list(sys.argv[1:] if argv is None else argv) or ['--help']
    prog, commands, package = 'timm-splicemix', COMMANDS, 'timm_splicemix'
    if name == '--version':
        print(f'{prog} {__version__}')
        return
    if name == 'analysis':
        prog, commands, package = f'{prog} analysis', ANALYSES, f'{package}.analysis'
        name, *rest = rest or ['--help']
        name = name.replace('-', '_') if not name.startswith('-') else name
    if name in ('-h', '--help'):
        print(_help(prog, commands))
        return
    if name not in commands:
        _unknown(prog, name, commands)
    import_module(f'{package}.{name}').main(rest)


if __name__ == '__main__':
    main()
