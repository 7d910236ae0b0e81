""" The table of `make bench` """
import json
import os
import subprocess
import sys

from .conftest import REPOSITORY

SCRIPTS = {
    'good.py': 'claim("fast", (1, 2, 3), at_least=2)',
    'raises.py': 'claim("slow", (1, 2, 3), at_least=4); raise OSError',
    'killed.py': 'claim("other", (1, 2, 3), at_most=4); os._exit(9)',
    'exits.py': 'sys.exit("Expected equal results")',
    'skipped.py': 'not_measured("far", "at most 1", "no GPU")',
}


def test_the_table_shows_what_crashed_and_what_was_not_measured(tmp_path):
    file = tmp_path / 'bench.jsonl'
    folder = REPOSITORY / 'benchmarks'
    for name, code in SCRIPTS.items():
        with open(file, 'a') as rows:
            rows.write(json.dumps({'script': name}) + '\n')
        subprocess.run(
            [sys.executable, '-c', f'import os, sys; from timing import claim, not_measured; {code}'], cwd=folder,
            env={**os.environ, 'BENCH_RESULTS': str(file)}, capture_output=True)
    done = subprocess.run([sys.executable, folder / 'table.py', file], capture_output=True, text=True)
    assert done.stdout.splitlines()[2:] == [
        '| fast | at least 2 | 2 (1 to 3) | yes |',
        '| slow | at least 4 | 2 (1 to 3) | no |',
        '| other | at most 4 | 2 (1 to 3) | yes |',
        '| far | at most 1 | not measured: no GPU | - |',
        *(f'| benchmarks/{name} | | crashed, see its output above | no |'
          for name in ('raises.py', 'killed.py', 'exits.py')),
    ]
    assert done.returncode == 1
