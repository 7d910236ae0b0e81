""" Files: atomic writes, reading, names of folders and text tables """
import csv
import errno
import math
import os

import pytest

from timm_splicemix.errors import UsageError
from timm_splicemix.files import (
    atomic_write,
    format_table,
    free_folder,
    printable,
    read_csv,
    read_json,
    read_rows,
    read_text,
    read_yaml,
    short_names,
    write_csv,
    write_json,
    write_text,
)


def test_a_file_appears_with_its_folder_and_the_usual_permissions(tmp_path):
    write_text('one', tmp_path / 'a' / 'b' / 'file.txt')
    path = tmp_path / 'a' / 'b' / 'file.txt'
    assert path.read_text() == 'one' and list(path.parent.iterdir()) == [path]
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.mark.parametrize('error', [OSError(errno.ENOSPC, 'No space left on device'), RuntimeError('other')])
def test_a_block_that_fails_leaves_the_old_file_and_no_temporary_one(tmp_path, error):
    path = tmp_path / 'file.txt'
    path.write_text('old')
    message = rf'Cannot write {path}: No space left on device\.' if isinstance(error, OSError) else 'other'
    expected = UsageError if isinstance(error, OSError) else RuntimeError
    with pytest.raises(expected, match=message), atomic_write(path) as temporary:
        temporary.write_text('half')
        raise error
    assert path.read_text() == 'old' and list(tmp_path.iterdir()) == [path]


def test_places_that_cannot_be_written_are_named(tmp_path):
    (tmp_path / 'file').write_text('')
    (tmp_path / 'folder' / 'inner').mkdir(parents=True)
    for path, message in (
            (tmp_path / 'file' / 'a.txt', 'file is not a folder'),
            (tmp_path / 'file' / 'a' / 'b.txt', 'file is not a folder'),
            (tmp_path / 'folder', 'Is a directory'),
            (tmp_path / ('a' * 300), 'File name too long')):
        with pytest.raises(UsageError, match=f'Cannot write {path}: .*{message}'):
            write_text('text', path)
    with pytest.raises(UsageError, match=r'Cannot write .*surrogates not allowed'):
        write_text('\udcff.jpg', tmp_path / 'name.txt')
    assert sorted(path.name for path in tmp_path.rglob('*')) == ['file', 'folder', 'inner']


def test_what_is_written_is_read_back(tmp_path):
    rows = [{'a': '1', 'b': 'x,"y"\r\nz'}, {'a': 'ü', 'b': ''}]
    write_csv(rows, tmp_path / 'a.csv')
    assert read_csv(tmp_path / 'a.csv', ['a', 'b']) == rows
    assert read_rows(tmp_path / 'a.csv')[0] == ['a', 'b']
    write_json({'a': [1., math.nan], 'b': (math.inf, 'ü')}, tmp_path / 'a.json')
    assert read_json(tmp_path / 'a.json') == {'a': [1., None], 'b': [None, 'ü']}
    write_text('1: [a]\n', tmp_path / 'a.yaml')
    assert read_yaml(tmp_path / 'a.yaml') == {'1': ['a']}


def test_text_that_a_spreadsheet_would_compute_is_escaped_and_read_back(tmp_path):
    cells = {
        '=1+1': "'=1+1", '+a': "'+a", '-b': "'-b", '@c': "'@c", '\td': "'\td", '\re': "'\re", '-': "'-", "'=1": "''=1",
        "''-f": "'''-f", "'quoted'": "'quoted'", "'": "'", '-1.5': '-1.5', '+1e-3': '+1e-3', '': '', ' =x': ' =x'}
    write_csv([{'=HYPERLINK()': text, 'number': -1.5, 'none': None} for text in cells], tmp_path / 'a.csv')
    with open(tmp_path / 'a.csv', newline='', encoding='utf-8') as file:
        header, *rows = csv.reader(file)
    assert header == ["'=HYPERLINK()", 'number', 'none']
    assert [row[0] for row in rows] == list(cells.values())
    assert {tuple(row[1:]) for row in rows} == {('-1.5', '')}
    assert [row['=HYPERLINK()'] for row in read_csv(tmp_path / 'a.csv', ['=HYPERLINK()'])] == list(cells)


def test_control_characters_are_escaped_on_the_terminal():
    names = {
        '\x1b[31mred': r'\x1b[31mred', 'a\nb\tc\r': r'a\nb\tc\r', '\x9b2J': r'\x9b2J', 'x\u202egnp': r'x\u202egnp',
        'bad\udcff': r'bad\udcff', 'Größe 猫 🐈 \u200c': 'Größe 猫 🐈 \u200c'}
    for name, shown in names.items():
        assert printable(name) == shown
        assert format_table([{name: name}]).splitlines() == [shown, shown]
    assert printable('a\nb\x07', keep='\n') == 'a\nb\\x07'


def test_short_rows_are_filled_and_a_byte_order_mark_is_dropped(tmp_path):
    (tmp_path / 'a.csv').write_bytes(b'\xef\xbb\xbfa,b\n1\n\n2,3,4\n')
    assert read_csv(tmp_path / 'a.csv') == [{'a': '1', 'b': ''}, {'a': '2', 'b': '3'}]


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / 'latin').write_bytes(b'\xff')
    (tmp_path / 'empty').write_text('')
    (tmp_path / 'list').write_text('[1, 2]')
    (tmp_path / 'bad').write_text('{a: [')
    (tmp_path / 'day').write_text('a: 2020-02-30')
    os.mkfifo(tmp_path / 'pipe')
    for read, name, message in (
            (read_text, 'nowhere', 'Cannot read .*nowhere: No such file'),
            (read_text, '.', 'Is a directory'),
            (read_text, 'pipe', 'Not a regular file'),
            (read_text, 'latin', 'Expected UTF-8 text in .*latin'),
            (read_json, 'bad', 'Expected JSON in .*bad'),
            (read_yaml, 'bad', 'Expected YAML in .*bad'),
            (read_yaml, 'day', 'Expected YAML in .*day'),
            (read_yaml, 'empty', 'but got nothing'),
            (read_yaml, 'list', 'but got list'),
            (lambda path: read_csv(path, ['a']), 'empty', "Expected a column 'a' in .*empty, but got an empty file"),
            (lambda path: read_csv(path, ['a']), 'list', r"Expected a column 'a' in .*list, but got \[1,  2\]")):
        with pytest.raises(UsageError, match=message):
            read(tmp_path / name)


def test_a_free_folder_has_the_first_number_that_is_not_taken(tmp_path):
    assert free_folder(tmp_path / 'a') == tmp_path / 'a'
    (tmp_path / 'a').mkdir()
    (tmp_path / 'a-2').mkdir()
    assert free_folder(tmp_path / 'a') == tmp_path / 'a-3'
    assert free_folder(tmp_path / 'a', lambda folder: folder.name == 'a') == tmp_path / 'a-2'


def test_short_names_tell_paths_apart(tmp_path):
    assert short_names([tmp_path / 'a' / 'x', tmp_path / 'b' / 'y']) == ['x', 'y']
    assert short_names([tmp_path / 'a' / 'x', tmp_path / 'b' / 'x']) == ['a/x', 'b/x']
    with pytest.raises(UsageError, match=rf'Expected different paths to compare, but got {tmp_path} twice'):
        short_names([tmp_path, tmp_path / 'a' / '..'])
    assert short_names(['a', 'b'], ['one', 'two']) == ['one', 'two']
    for names in (['one'], ['one', 'one']):
        with pytest.raises(UsageError, match='Expected 2 different --names'):
            short_names(['a', 'b'], names)


def test_a_table_has_text_on_the_left_and_numbers_on_the_right():
    rows = [{'name': 'a', 'n': 1234, 'AP': 5., 'gain': 1., 'cell': '5 (+1)'},
            {'name': 'long name', 'n': None, 'AP': math.nan, 'gain': -1.5, 'cell': '-'}]
    assert format_table(rows, {'gain': '+.1f', 'cell': ''}).splitlines() == [
        'name           n    AP  gain    cell',
        'a          1,234  5.00  +1.0  5 (+1)',
        'long name      -     -  -1.5       -']
