""" Scenes of the shapes data set: a few icons on a cluttered background

Icons are polygons in unit coordinates (x to the right, y down, -1 to 1), so that they are rotated, flipped and scaled
exactly. The random appearance of an icon is drawn first, as a `_Look`.
"""
import colorsys
import math
from dataclasses import dataclass, replace
from typing import Optional, Union

import numpy as np
from PIL import Image, ImageChops, ImageDraw

Box = tuple[int, int, int, int]  # x, y, width, height
Color = tuple[float, float, float]  # hue, saturation, value
Points = list[tuple[float, float]]

IMAGE_SIZES = ((160, 120), (120, 160), (144, 144), (160, 160))  # width, height
OBJECT_COUNT_WEIGHTS = (0.24, 0.36, 0.22, 0.12, 0.06)  # of 1, 2, ... objects in a scene
MIN_SIDE, MAX_SIDE = 12., 80.
MAX_COVERED = 0.25
PARTNER_PROB = 0.85
_MAX_ROTATION = 20.  # degrees
_SUPERSAMPLING = 4
_RIM_WIDTH = 0.07  # in unit coordinates
_COVERED = [0] * 128 + [255] * 128  # of an alpha value

BROWN, CREAM, WHITE, DARK, GLASS = (0.07, 0.6, 0.5), (0.12, 0.2, 0.95), (0., 0., 1.), (0., 0., 0.2), (0.55, 0.25, 0.95)
RED, ORANGE, YELLOW, GREEN = (0., 0.8, 0.88), (0.07, 0.85, 0.97), (0.135, 0.8, 1.), (0.34, 0.65, 0.6)
BLUE, PURPLE, PINK, PALE = (0.59, 0.7, 0.85), (0.77, 0.55, 0.8), (0.93, 0.5, 0.97), (0.58, 0.1, 0.98)


def _ellipse(
        x: float,
        y: float,
        rx: float,
        ry: float,
        start: float = 0.,
        stop: float = 360.,
        turn: float = 0.,
) -> Points:
    angles = [math.radians(start + (stop - start) * i / 28) for i in range(29)]
    cos, sin = math.cos(math.radians(turn)), math.sin(math.radians(turn))
    around = [(rx * math.cos(a), ry * math.sin(a)) for a in angles]
    return [(x + cos * u - sin * v, y + sin * u + cos * v) for u, v in around]


def _rectangle(left: float, top: float, right: float, bottom: float) -> Points:
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _arc(x: float, y: float, radius: float, width: float, start: float = 0., stop: float = 360.) -> Points:
    """A curved band, or a ring."""
    outer = _ellipse(x, y, radius + width / 2, radius + width / 2, start, stop)
    return outer + _ellipse(x, y, radius - width / 2, radius - width / 2, stop, start)


def _spikes(count: int, outer: float, inner: float) -> Points:
    angles = [math.pi * i / count - math.pi / 2 for i in range(2 * count)]
    return [((inner if i % 2 else outer) * math.cos(a), (inner if i % 2 else outer) * math.sin(a))
            for i, a in enumerate(angles)]


def _heart() -> Points:
    angles = [0.5 + (2 * math.pi - 1) * i / 36 for i in range(37)]
    return [(0., -6.)] + [
        (16 * math.sin(a) ** 3, -13 * math.cos(a) + 5 * math.cos(2 * a) + 2 * math.cos(3 * a) + math.cos(4 * a))
        for a in angles]


@dataclass(frozen=True)
class _Icon:
    """An icon as polygons in the order of painting."""
    colors: tuple[Color, ...]  # possible main colours
    parts: tuple[tuple[Points, Union[float, Color]], ...]  # polygon, and colour or brightness of the main colour


# Several icons share colours (sun, star, moon and key; heart, balloon and umbrella), so that colour is not enough.
_ICONS = {
    'sun': _Icon((YELLOW, ORANGE), (
        (_spikes(10, 1., 0.6), 0.9), (_ellipse(0, 0, 0.56, 0.56), 1.))),
    'cloud': _Icon((PALE, WHITE), (
        (_ellipse(-0.55, 0.15, 0.42, 0.38), 1.), (_ellipse(0.55, 0.12, 0.44, 0.42), 1.),
        (_ellipse(-0.05, -0.15, 0.52, 0.5), 1.), (_rectangle(-0.6, 0.1, 0.6, 0.53), 1.))),
    'tree': _Icon((GREEN,), (
        (_rectangle(-0.14, 0.5, 0.14, 1.), BROWN), ([(0, -0.2), (0.72, 0.66), (-0.72, 0.66)], 0.8),
        ([(0, -0.6), (0.58, 0.25), (-0.58, 0.25)], 0.95), ([(0, -1.), (0.42, -0.2), (-0.42, -0.2)], 1.1))),
    'house': _Icon((RED, BROWN, BLUE), (
        (_rectangle(0.38, -0.85, 0.6, -0.3), 0.7), (_rectangle(-0.72, -0.1, 0.72, 0.9), CREAM),
        ([(0, -0.95), (0.95, 0), (-0.95, 0)], 1.), (_rectangle(-0.5, 0.25, -0.08, 0.9), BROWN),
        (_rectangle(0.14, 0.22, 0.54, 0.58), GLASS))),
    'boat': _Icon((RED, BROWN, BLUE), (
        (_rectangle(-0.05, -1., 0.05, 0.5), BROWN), ([(0.12, -0.9), (0.85, 0.3), (0.12, 0.3)], WHITE),
        ([(-0.12, -0.6), (-0.12, 0.3), (-0.7, 0.3)], CREAM),
        ([(-1., 0.42), (1., 0.42), (0.62, 0.95), (-0.62, 0.95)], 1.))),
    'fish': _Icon((ORANGE, BLUE, PURPLE), (
        ([(0.4, 0), (1., -0.5), (0.88, 0), (1., 0.5)], 0.8), ([(-0.3, -0.3), (0.25, -0.72), (0.35, -0.2)], 0.8),
        (_ellipse(-0.22, 0, 0.78, 0.45), 1.), (_arc(-0.75, 0, 0.4, 0.08, -50, 50), 0.7),
        (_ellipse(-0.62, -0.12, 0.12, 0.12), WHITE), (_ellipse(-0.64, -0.12, 0.06, 0.06), DARK))),
    'flower': _Icon((PINK, PURPLE, RED), (
        (_rectangle(-0.06, 0, 0.06, 1.), GREEN), (_ellipse(0.3, 0.72, 0.3, 0.13, turn=-30), GREEN),
        *((_ellipse(0.34 * math.cos(a), 0.34 * math.sin(a) - 0.35, 0.28, 0.2, turn=math.degrees(a)), 1.)
          for a in np.arange(6) * math.pi / 3), (_ellipse(0, -0.35, 0.2, 0.2), YELLOW))),
    'mushroom': _Icon((RED, BROWN), (
        ([(-0.24, 0), (0.24, 0), (0.34, 0.9), (-0.34, 0.9)], CREAM), (_ellipse(0, 0.12, 0.95, 1., 180, 360), 1.),
        (_ellipse(-0.42, -0.22, 0.17, 0.15), WHITE), (_ellipse(0.08, -0.52, 0.17, 0.15), WHITE),
        (_ellipse(0.46, -0.12, 0.17, 0.14), WHITE))),
    'car': _Icon((RED, BLUE, GREEN), (
        ([(-0.55, -0.05), (-0.35, -0.5), (0.3, -0.5), (0.6, -0.05)], 1.), (_rectangle(-1., -0.08, 1., 0.35), 1.),
        ([(-0.4, -0.06), (-0.26, -0.38), (-0.04, -0.38), (-0.04, -0.06)], GLASS),
        ([(0.06, -0.06), (0.06, -0.38), (0.25, -0.38), (0.44, -0.06)], GLASS),
        (_ellipse(-0.52, 0.35, 0.24, 0.24), DARK), (_ellipse(0.52, 0.35, 0.24, 0.24), DARK),
        (_ellipse(-0.52, 0.35, 0.1, 0.1), PALE), (_ellipse(0.52, 0.35, 0.1, 0.1), PALE))),
    'key': _Icon((YELLOW, ORANGE, PALE), (
        (_rectangle(-0.3, -0.09, 1., 0.09), 1.), (_rectangle(0.5, 0, 0.64, 0.36), 1.),
        (_rectangle(0.82, 0, 0.96, 0.3), 1.), (_arc(-0.58, 0, 0.31, 0.22), 1.))),
    'cup': _Icon((BLUE, WHITE, PINK), (
        (_arc(0.55, 0.12, 0.3, 0.15, -100, 100), 0.85),
        ([(-0.78, -0.45), (0.58, -0.45), (0.4, 0.78), (-0.6, 0.78)], 1.), (_ellipse(-0.1, -0.45, 0.68, 0.17), 0.9),
        (_ellipse(-0.1, -0.43, 0.56, 0.11), BROWN))),
    'umbrella': _Icon((PURPLE, BLUE, RED), (
        (_rectangle(-0.05, -0.9, 0.05, 0.7), BROWN), (_arc(0.16, 0.7, 0.16, 0.1, 0, 180), BROWN),
        (_ellipse(0, 0.02, 0.95, 0.85, 180, 360)
         + [(0.63, -0.14), (0.32, 0.02), (0, -0.14), (-0.32, 0.02), (-0.63, -0.14)], 1.),
        (_ellipse(0, 0.02, 0.32, 0.85, 180, 360) + [(0, -0.14)], 0.8))),
    'moon': _Icon((YELLOW, PALE), (
        (_ellipse(0, 0, 0.95, 0.95, 50, 310) + _ellipse(0.42, 0, 0.75, 0.75, 284, 76), 1.),)),
    'star': _Icon((YELLOW, ORANGE), ((_spikes(5, 1., 0.42), 1.),)),
    'balloon': _Icon((RED, BLUE, GREEN), (
        ([(-0.03, 0.4), (0.03, 0.4), (0.13, 0.75), (0.03, 1.), (-0.03, 1.), (0.06, 0.75)], DARK),
        ([(0, 0.28), (0.14, 0.48), (-0.14, 0.48)], 0.8), (_ellipse(0, -0.32, 0.58, 0.68), 1.),
        (_ellipse(-0.22, -0.58, 0.1, 0.18, turn=25), WHITE))),
    'heart': _Icon((RED, PINK, PURPLE), ((_heart(), 1.),)),
}
CLASS_NAMES = tuple(_ICONS)
BIASED_PAIRS = (
    ('sun', 'cloud'), ('tree', 'house'), ('boat', 'fish'), ('flower', 'mushroom'),
    ('car', 'key'), ('cup', 'umbrella'), ('moon', 'star'), ('balloon', 'heart'))
_PARTNERS = {
    CLASS_NAMES.index(name): CLASS_NAMES.index(partner)
    for pair in BIASED_PAIRS for name, partner in (pair, pair[::-1])}


def _to_unit_square(icon: _Icon) -> list[np.ndarray]:
    """The icon's polygons, each (N, 2), centred and scaled to a longer side from -1 to 1."""
    polygons = [np.array(points, dtype=np.float64) for points, _ in icon.parts]
    low, high = np.concatenate(polygons).min(axis=0), np.concatenate(polygons).max(axis=0)
    return [(points - (low + high) / 2) * (2 / (high - low).max()) for points in polygons]


def _grow(points: np.ndarray, distance: float) -> np.ndarray:
    """Move the outline of a polygon outwards, with limited tips at sharp corners."""
    before = points - np.roll(points, 1, axis=0)
    points, before = (array[np.abs(before).max(axis=1) > 1e-9] for array in (points, before))  # drop repeated points
    after = np.roll(before, -1, axis=0)
    orientation = np.sign(np.sum(points[:, 0] * after[:, 1] - points[:, 1] * after[:, 0]))  # that of the area
    normals = [
        orientation * np.stack([edge[:, 1], -edge[:, 0]], axis=1) / np.hypot(*edge.T)[:, None]
        for edge in (before, after)]
    shared = normals[0] + normals[1]
    return points + distance * shared / np.maximum(1 + np.sum(normals[0] * normals[1], axis=1), 0.5)[:, None]


_POLYGONS = [_to_unit_square(icon) for icon in _ICONS.values()]
# A dark rim separates an icon from its background.
_RIMS = [[_grow(points, _RIM_WIDTH) for points in polygons] for polygons in _POLYGONS]


@dataclass(frozen=True)
class SceneObject:
    """An object of a scene; its pixels are those that it covers by more than half."""
    category: int  # index into CLASS_NAMES
    box: Box  # tight box of its pixels
    area: int  # number of its pixels


@dataclass(frozen=True)
class _Look:
    """Random appearance of an icon: size, main colour, jitter of all colours, rotation and flip."""
    side: float
    color: Color
    jitter: Color
    angle: float
    flip: bool


def _rgb(color: Color, jitter: Color = (0., 1., 1.), brightness: float = 1.) -> tuple[int, int, int]:
    hue, saturation, value = color
    red, green, blue = colorsys.hsv_to_rgb(
        (hue + jitter[0]) % 1, min(1., saturation * jitter[1]), min(1., value * jitter[2] * brightness))
    return round(255 * red), round(255 * green), round(255 * blue)


def draw_classes(rng: np.random.Generator, biased: bool) -> list[int]:
    """Draw the classes of a scene's objects; if biased, the partner of an object mostly follows it."""
    classes: list[int] = []
    for _ in range(1 + int(rng.choice(len(OBJECT_COUNT_WEIGHTS), p=OBJECT_COUNT_WEIGHTS))):
        partner = _PARTNERS.get(classes[-1]) if biased and classes else None
        if partner is None or partner in classes or rng.random() >= PARTNER_PROB:
            partner = int(rng.integers(len(CLASS_NAMES)))
        classes.append(partner)
    return classes


def _draw_look(rng: np.random.Generator, category: int) -> _Look:
    colors = _ICONS[CLASS_NAMES[category]].colors
    return _Look(
        side=math.exp(rng.uniform(math.log(MIN_SIDE), math.log(MAX_SIDE))),
        color=colors[rng.integers(len(colors))],
        jitter=(rng.uniform(-0.035, 0.035), rng.uniform(0.8, 1.15), rng.uniform(0.8, 1.1)),
        angle=rng.uniform(-_MAX_ROTATION, _MAX_ROTATION),
        flip=bool(rng.random() < 0.5),
    )


def _render_icon(category: int, look: _Look) -> Image.Image:
    """The icon with smooth edges on a tight transparent patch."""
    half = look.side * _SUPERSAMPLING / 2
    cos, sin = math.cos(math.radians(look.angle)), math.sin(math.radians(look.angle))
    mirror = -1 if look.flip else 1
    turn = half * np.array([[mirror * cos, mirror * sin], [-sin, cos]])  # points are rows
    rims, polygons = ([points @ turn for points in part[category]] for part in (_RIMS, _POLYGONS))
    low, high = np.concatenate(rims).min(axis=0) - 1, np.concatenate(rims).max(axis=0) + 1
    width, height = np.ceil((high - low) / _SUPERSAMPLING).astype(int).tolist()

    patch = Image.new('RGBA', (width * _SUPERSAMPLING, height * _SUPERSAMPLING))
    draw = ImageDraw.Draw(patch)
    rim_color = _rgb(look.color, look.jitter, 0.35)
    for points in rims:  # before the parts, so that rims are visible around the icon only
        draw.polygon((points - low).ravel().tolist(), fill=rim_color)
    for points, (_, color) in zip(polygons, _ICONS[CLASS_NAMES[category]].parts):
        color, brightness = (look.color, color) if isinstance(color, float) else (color, 1.)
        draw.polygon((points - low).ravel().tolist(), fill=_rgb(color, look.jitter, brightness))
    return patch.reduce(_SUPERSAMPLING)


def _mask_box(patch: Image.Image) -> tuple[Box, int]:
    """Tight box and number of the pixels that are covered by more than half."""
    mask = patch.getchannel('A').point(_COVERED)
    left, top, right, bottom = mask.getbbox()
    return (left, top, right - left, bottom - top), mask.histogram()[255]


def _overlaps(box: Box, other: Box) -> bool:
    width = min(box[0] + box[2], other[0] + other[2]) - max(box[0], other[0])
    height = min(box[1] + box[3], other[1] + other[3]) - max(box[1], other[1])
    smaller = min(box[2] * box[3], other[2] * other[3])
    return width > 0 and height > 0 and width * height > MAX_COVERED * smaller


def _find_place(rng: np.random.Generator, size: tuple[int, int], box: Box, taken: list[Box]) -> Optional[Box]:
    """Try to find a place where the box does not cover other boxes too much."""
    _, _, width, height = box
    for _ in range(12):
        x, y = (int(rng.integers(total - length + 1)) for total, length in zip(size, (width, height)))
        place = (x, y, width, height)
        if not any(_overlaps(place, other) for other in taken):
            return place
    return None


def _add_object(
        rng: np.random.Generator,
        scene: Image.Image,
        category: int,
        taken: list[Box],
) -> Optional[SceneObject]:
    """Paste an icon where there is room, smaller if needed; None if there is no room."""
    look = _draw_look(rng, category)
    while True:
        patch = _render_icon(category, look)
        box, area = _mask_box(patch)
        place = _find_place(rng, scene.size, box, taken)
        if place is not None:
            scene.paste(patch, (place[0] - box[0], place[1] - box[1]), patch)
            return SceneObject(category, place, area)
        if look.side <= MIN_SIDE:
            return None
        look = replace(look, side=max(MIN_SIDE, look.side * 0.7))


def _draw_background(rng: np.random.Generator, size: tuple[int, int]) -> Image.Image:
    """A gradient with smooth noise, lines, blobs and polygons."""
    ends = np.array([
        _rgb((rng.random(), rng.uniform(0.1, 0.5), rng.uniform(0.5, 0.95))) for _ in range(2)], dtype=np.float32)
    angle = rng.uniform(0, 2 * math.pi)
    across = np.linspace(-0.5, 0.5, 7, dtype=np.float32)
    mix = 0.5 + math.cos(angle) * across + math.sin(angle) * across[:, None]  # (7, 7)
    coarse = ends[0] + mix[..., None] * (ends[1] - ends[0]) + rng.normal(0, 14, (7, 7, 1)) + rng.normal(0, 7, (7, 7, 3))
    image = Image.fromarray(coarse.clip(0, 255).astype(np.uint8)).resize(size, Image.Resampling.BICUBIC)

    width, height = 2 * size[0], 2 * size[1]  # reduced later, for smooth edges
    image = image.resize((width, height), Image.Resampling.NEAREST)
    draw = ImageDraw.Draw(image, 'RGBA')
    for _ in range(int(rng.integers(8, 18))):
        fill = (*_rgb((rng.random(), rng.uniform(0.1, 0.6), rng.uniform(0.3, 1.))), int(rng.integers(80, 200)))
        x, y, length = rng.uniform(0, width), rng.uniform(0, height), math.exp(rng.uniform(math.log(12), math.log(130)))
        kind = rng.integers(4)
        if kind == 0:
            turn = rng.uniform(0, math.pi)
            reach_x, reach_y = length * math.cos(turn), length * math.sin(turn)
            draw.line((x - reach_x, y - reach_y, x + reach_x, y + reach_y), fill=fill, width=int(rng.integers(2, 8)))
        elif kind == 1:
            rx, ry = (length / 2 * rng.uniform(0.4, 1., 2)).tolist()
            draw.ellipse((x - rx, y - ry, x + rx, y + ry), fill=fill)
        elif kind == 2:
            turns = np.sort(rng.uniform(0, 2 * math.pi, rng.integers(3, 6)))
            points = length / 2 * np.stack([np.cos(turns), np.sin(turns)], axis=1) + (x, y)
            draw.polygon(points.ravel().tolist(), fill=fill)
        else:
            start = rng.uniform(0, 360)
            box = (x - length / 2, y - length / 2, x + length / 2, y + length / 2)
            draw.arc(box, start, start + rng.uniform(60, 300), fill=fill, width=int(rng.integers(2, 7)))

    strength = rng.uniform(2, 9)
    noise = Image.frombytes('L', size, rng.bytes(size[0] * size[1]))
    grain = noise.point([round(128 + strength * (value / 127.5 - 1)) for value in range(256)])
    return ImageChops.add(image.reduce(2), Image.merge('RGB', [grain] * 3), offset=-128)


def draw_scene(rng: np.random.Generator, biased: bool) -> tuple[Image.Image, list[SceneObject]]:
    """Draw an RGB scene and its one to five objects; if biased, the `BIASED_PAIRS` mostly occur together."""
    scene = _draw_background(rng, IMAGE_SIZES[rng.integers(len(IMAGE_SIZES))])
    objects: list[SceneObject] = []
    for category in draw_classes(rng, biased):
        added = _add_object(rng, scene, category, [other.box for other in objects])
        if added is not None:
            objects.append(added)
    return scene, objects
