""" Write docs/tutorial.ipynb from docs/tutorial.md: python docs/notebook.py

Text becomes Markdown cells, Python blocks become code cells, and shell commands code cells with a leading `!`. Blocks
that are only shown (console, csv) stay text.
"""
import json
import re
from pathlib import Path
from typing import Any

TUTORIAL = Path(__file__).resolve().parent / 'tutorial.md'
NOTEBOOK = TUTORIAL.with_suffix('.ipynb')
_CODE = re.compile(r'^```(python|bash)\n(.*?)^```$\n?', flags=re.MULTILINE | re.DOTALL)


def build(text: str) -> dict[str, Any]:
    """Return the notebook of a Markdown text as the content of an .ipynb file."""
    cells = []
    # split() gives text, language and code by turns
    for place, part in enumerate(_CODE.split(text)):
        kind = place % 3
        if kind == 1:
            language = part
            continue
        source = part.strip()
        if kind == 2 and language == 'bash':
            source = '\n'.join(f'!{line}' for line in source.splitlines())
        if source:
            cells.append(_cell('code' if kind == 2 else 'markdown', source, len(cells)))
    kernel = {'display_name': 'Python 3', 'language': 'python', 'name': 'python3'}
    return {'cells': cells, 'metadata': {'kernelspec': kernel}, 'nbformat': 4, 'nbformat_minor': 5}


def _cell(kind: str, source: str, number: int) -> dict[str, Any]:
    cell = {'cell_type': kind, 'id': f'cell-{number}', 'metadata': {}, 'source': source.splitlines(keepends=True)}
    return {**cell, 'execution_count': None, 'outputs': []} if kind == 'code' else cell


if __name__ == '__main__':
    NOTEBOOK.write_text(
        json.dumps(build(TUTORIAL.read_text(encoding='utf-8')), indent=1, ensure_ascii=False) + '\n', encoding='utf-8')
    print(NOTEBOOK)
