""" Fonts for text in any script: installed fonts that have the characters which a default font lacks """
import functools
import importlib.util
import io
import logging
import os
import struct
import sys
import unicodedata
from pathlib import Path
from typing import BinaryIO, Callable, Iterable, Iterator, NamedTuple, Optional

import numpy as np
from PIL import ImageDraw, ImageFont

from .files import open_regular, printable

_logger = logging.getLogger(__name__)
_SUFFIXES = ('.ttf', '.otf', '.ttc', '.otc')
_MAX_TABLE = 1 << 22  # bytes of a table of characters
# Of fonts with as many of the characters, those whose names have the fewest of these words are preferred.
_UNUSUAL = (
    'bold', 'italic', 'oblique', 'black', 'light', 'thin', 'medium', 'condensed', 'narrow', 'extra', 'mono', 'serif',
    'unifont', 'math', 'display')

HasCharacter = Callable[[str], bool]


class Fonts(NamedTuple):
    """Files of the fonts that have some of the needed characters, and the characters that no font has."""
    files: tuple[Path, ...]
    missing: frozenset[str]


def read_characters(file: BinaryIO) -> HasCharacter:
    """ Read which characters an OpenType or TrueType font draws, from its table `cmap`.

    Of a collection, the first font is read. Raises OSError, ValueError or struct.error for other files.
    """
    def read(format: str, place: int) -> tuple[int, ...]:
        file.seek(place)
        return struct.unpack(format, file.read(struct.calcsize(format)))

    start = read('>I', 12)[0] if read('4s', 0) == (b'ttcf',) else 0
    records = (read('>4sIII', start + 12 + 16 * index) for index in range(read('>H', start + 4)[0]))
    tables = {tag: (place, length) for tag, _, place, length in records}
    if b'cmap' not in tables or not tables.keys() & {b'glyf', b'CFF ', b'CFF2'}:
        raise ValueError('No outlines')  # fonts of coloured bitmaps can't be drawn at any size
    file.seek(tables[b'cmap'][0])
    table = file.read(min(tables[b'cmap'][1], _MAX_TABLE))
    readers = {4: _read_ranges, 12: _read_groups}
    found = {}
    for index in range(struct.unpack_from('>H', table, 2)[0]):
        platform, encoding, place = struct.unpack_from('>HHI', table, 4 + 8 * index)
        kind = struct.unpack_from('>H', table, place)[0]
        if (platform == 0 or (platform, encoding) in ((3, 1), (3, 10))) and kind in readers:  # Unicode
            found[kind] = place
    if not found:
        raise ValueError('No table of Unicode characters')
    return readers[max(found)](table[found[max(found)]:])


def _read_ranges(table: bytes) -> HasCharacter:
    """Read a table of format 4, of the characters up to U+FFFF."""
    number = struct.unpack_from('>H', table, 6)[0] // 2
    places = (14, 16 + 2 * number, 16 + 4 * number, 16 + 6 * number)
    last, first, shift, offset = (np.frombuffer(table, '>u2', number, place).astype(int) for place in places)

    def has(character: str) -> bool:
        code = ord(character)
        index = int(np.searchsorted(last, code))
        if index == number or first[index] > code:
            return False
        if not offset[index]:
            return bool((code + shift[index]) % 65536)
        place = places[3] + 2 * index + offset[index] + 2 * (code - first[index])
        return table[place:place + 2] not in (b'', b'\0\0')

    return has


def _read_groups(table: bytes) -> HasCharacter:
    """Read a table of format 12, of all characters."""
    number = struct.unpack_from('>I', table, 12)[0]
    groups = np.frombuffer(table, '>u4', 3 * number, 16).reshape(number, 3).astype(int)

    def has(character: str) -> bool:
        code = ord(character)
        index = int(np.searchsorted(groups[:, 1], code))
        return index < number and bool(groups[index, 0] <= code) and bool(groups[index, 2] + code - groups[index, 0])

    return has


@functools.cache
def font_characters(path: Path) -> HasCharacter:
    """Return which characters a font draws; none if the file is not such a font."""
    try:
        with open_regular(path) as file:
            return read_characters(file)
    except (OSError, ValueError, struct.error):
        return lambda character: False


def font_folders() -> Iterator[Path]:
    """Folders of the fonts of the user and of the system, and matplotlib's."""
    home = Path(os.path.expanduser('~'))
    if sys.platform == 'win32':
        yield Path(os.environ.get('LOCALAPPDATA', home)) / 'Microsoft' / 'Windows' / 'Fonts'
        yield Path(os.environ.get('WINDIR', 'C:\\Windows')) / 'Fonts'
    elif sys.platform == 'darwin':
        yield from (home / 'Library/Fonts', Path('/Library/Fonts'), Path('/System/Library/Fonts'))
    else:
        shared = os.environ.get('XDG_DATA_DIRS') or '/usr/local/share:/usr/share'
        user = os.environ.get('XDG_DATA_HOME') or home / '.local' / 'share'
        yield home / '.fonts'
        yield from (Path(folder) / 'fonts' for folder in (user, *shared.split(':')))
    matplotlib = importlib.util.find_spec('matplotlib')
    if matplotlib is not None and matplotlib.origin:
        yield Path(matplotlib.origin).parent / 'mpl-data' / 'fonts' / 'ttf'


def _font_files() -> list[Path]:
    """List the installed fonts, those with plain names first."""
    def unusual(path: Path) -> tuple[int, str]:
        name = path.stem.lower().replace('sansserif', '').replace('sans serif', '')
        return sum(word in name for word in _UNUSUAL), name

    files = {
        Path(folder) / name for place in font_folders() for folder, _, names in os.walk(place) for name in names
        if name.lower().endswith(_SUFFIXES) and 'lastresort' not in name.lower()}
    return sorted(files, key=unusual)


def drawn_characters(texts: Iterable[str]) -> set[str]:
    """Return the characters of texts that need a glyph: neither spaces nor controls of shape and direction."""
    characters = set().union(*texts)
    return {
        character for character in characters
        if unicodedata.category(character) not in ('Cc', 'Cf', 'Cs', 'Zs', 'Zl', 'Zp')
        and not '\ufe00' <= character <= '\ufe0f'}  # variants of the character before


def find_fonts(characters: Iterable[str]) -> Fonts:
    """Find installed fonts that together have characters, and log a warning about those that no font has."""
    found = _find_fonts(frozenset(characters))
    _warn_about(found.missing)
    return found


@functools.lru_cache(maxsize=64)
def _find_fonts(characters: frozenset[str]) -> Fonts:
    missing, chosen = set(characters), []
    files = _font_files() if missing else []
    while missing and files:
        coverage = [sum(map(font_characters(path), missing)) for path in files]
        best = max(coverage)
        if not best:
            break
        path = files.pop(coverage.index(best))
        if _can_load(path):
            chosen.append(path)
            missing = {character for character in missing if not font_characters(path)(character)}
    return Fonts(tuple(chosen), frozenset(missing))


def _can_load(path: Path) -> bool:
    try:
        ImageFont.truetype(str(path), 12)
    except OSError:
        return False
    return True


@functools.cache
def _warn_about(missing: frozenset[str]) -> None:
    if missing:
        some = ', '.join(f'{character} (U+{ord(character):04X})' for character in sorted(missing)[:3])
        _logger.warning(
            f'No installed font has {len(missing)} character(s) of the text in pictures, such as {some}: boxes are '
            'drawn instead. Install a font that has them, such as one of https://fonts.google.com/noto, or copy it to '
            '~/.local/share/fonts.')


class Typeface:
    """ Pillow's default font, and installed fonts for the characters that it lacks.

    Args:
        size: Size of the text in pixels.
        texts: All text that will be drawn.
    """

    def __init__(self, size: int, texts: Iterable[str] = ()):
        default = ImageFont.load_default(size=size)
        has = _default_characters()
        self.fonts: list[tuple[ImageFont.FreeTypeFont, Optional[HasCharacter]]] = [(default, has)]
        needed = {character for character in drawn_characters(texts) if not has(character)}
        for path in find_fonts(needed).files:
            self.fonts.append((ImageFont.truetype(str(path), size), font_characters(path)))

    def runs(self, text: str) -> list[tuple[ImageFont.FreeTypeFont, str]]:
        """Split text into parts of one font each; control characters are escaped."""
        text = printable(text)
        if len(self.fonts) == 1:
            return [(self.fonts[0][0], text)]
        parts: list[tuple[ImageFont.FreeTypeFont, str]] = []
        for character in text:
            font = next((font for font, has in self.fonts if has(character)), None)
            attached = character == ' ' or unicodedata.category(character) in ('Mn', 'Mc', 'Me', 'Cf')
            if parts and (font is None or attached or font is parts[-1][0]):
                parts[-1] = parts[-1][0], parts[-1][1] + character
            else:
                parts.append((font or self.fonts[0][0], character))
        return parts

    def getlength(self, text: str) -> float:
        return sum(font.getlength(part) for font, part in self.runs(text))

    def draw(self, draw: ImageDraw.ImageDraw, place: tuple[float, float], text: str, fill: str) -> None:
        """Draw one line of text from its top left corner; all fonts share a baseline."""
        x, y = place
        baseline = y + self.fonts[0][0].getmetrics()[0]
        for font, part in self.runs(text):
            draw.text((x, baseline), part, fill=fill, font=font, anchor='ls')
            x += font.getlength(part)


@functools.cache
def _default_characters() -> HasCharacter:
    content = getattr(ImageFont.load_default(size=12), 'font_bytes', None)
    return str.isascii if content is None else read_characters(io.BytesIO(content))
