"""Colours, marks and figures of a report, for light and dark pages alike.

matplotlib draws with stand-in colours. figure_svg() replaces them by the page's CSS variables, so one drawing serves
both modes. Text stays text, in the page's font. Equal drawings give equal bytes.
"""

import io
import re
import warnings
import xml.etree.ElementTree as ET
from collections import namedtuple

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

SVG = "http://www.w3.org/2000/svg"
XLINK = "http://www.w3.org/1999/xlink"

# CSS variable -> (light, dark). Each series has a contrast of 3 or more with the surface. Any two of them also differ
# for eyes that do not tell red from green. The tests hold both.
PAGE = {
    "surface": ("#fcfcfa", "#15171c"),
    "raised": ("#f1f1ec", "#20232a"),
    "ink": ("#1b1c1f", "#eceef2"),
    "muted": ("#55585f", "#a9aeb9"),
    "grid": ("#d9d9d2", "#343842"),
    "link": ("#1a56b8", "#8ab8ff"),
}
SERIES = [
    ("#2062ce", "#2d6fdc"),
    ("#9a5505", "#fc9e47"),
    ("#98004e", "#b53e95"),
    ("#2b9095", "#52b0ab"),
    ("#a17adf", "#d59bff"),
    ("#2d4608", "#edee45"),
    ("#ec5d4b", "#a06604"),
    ("#4f0e8a", "#99f7fc"),
]
# Low to high, from the surface to the ink.
RAMP = [
    ("#eef3fa", "#1c2430"),
    ("#d8e5f5", "#1f3048"),
    ("#bdd4ee", "#234062"),
    ("#9dbfe5", "#2b5480"),
    ("#7fabdb", "#35659a"),
    ("#3f75b8", "#5b92cc"),
    ("#2a60a4", "#79a8da"),
    ("#1a4a89", "#a8caee"),
    ("#0b3468", "#dcebfc"),
]

INK, MUTED, GRID, SURFACE = "#0b0b01", "#0b0b02", "#0b0b03", "#0b0b04"
_VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid", SURFACE: "surface"}
_VARIABLES.update({f"#0b0c{i:02x}": f"s{i}" for i in range(len(SERIES))})
_VARIABLES.update({f"#0b0d{i:02x}": f"q{i}" for i in range(len(RAMP))})
COLOURS = [f"#0b0c{i:02x}" for i in range(len(SERIES))]
STEPS = [f"#0b0d{i:02x}" for i in range(len(RAMP))]
SEQUENTIAL = ListedColormap(STEPS)

# matplotlib's marks, and the same shapes for the page's legends, about (0, 0) from -5 to 5.
SHAPES = {
    "o": '<circle r="4.2"/>',
    "s": '<rect x="-4" y="-4" width="8" height="8"/>',
    "^": '<path d="M0-4.8 4.6 3.6-4.6 3.6z"/>',
    "D": '<path d="M0-5 5 0 0 5-5 0z"/>',
    "v": '<path d="M0 4.8 4.6-3.6-4.6-3.6z"/>',
    "P": '<path d="M-1.7-5h3.4v3.3h3.3v3.4h-3.3v3.3h-3.4v-3.3h-3.3v-3.4h3.3z"/>',
    "<": '<path d="M-4.8 0 3.6-4.6 3.6 4.6z"/>',
    ">": '<path d="M4.8 0-3.6-4.6-3.6 4.6z"/>',
    "p": '<path d="M0-4.8 4.6-1.5 2.8 3.9-2.8 3.9-4.6-1.5z"/>',
}
MARKS = list(SHAPES)

# Control characters, which XML forbids, characters that turn the direction of writing, and halves of pairs.
_NOT_PRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def printable(text):
    """The text with such characters written as \\x1b or \\u202e, as kvlab's tables write them."""

    def written(found):
        code = ord(found.group())
        return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"

    return _NOT_PRINTABLE.sub(written, text)


Style = namedtuple("Style", "colour mark variable")


def styles(policies):
    """{policy: Style}, by first appearance. `full` has the ink's colour. The ninth policy has the first colour again,
    with another mark."""
    found = {}
    for policy in policies:
        if policy in found:
            continue
        if policy == "full":
            found[policy] = Style(INK, "o", "ink")
            continue
        at = len([name for name in found if name != "full"])
        colour = at % len(SERIES)
        mark = MARKS[1 + (at + at // len(SERIES)) % (len(MARKS) - 1)]
        found[policy] = Style(COLOURS[colour], mark, f"s{colour}")
    return found


SMALL = 8.7  # of 248 units across, 10 CSS pixels or more on a page 320 wide

_SETTINGS = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "text.usetex": False,
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "lines.linewidth": 1.4,
    "lines.markersize": 5,
    "axes.formatter.useoffset": False,
    "axes.unicode_minus": True,
}

WIDTH = 3.45  # inches: 248 units of an SVG, 331 CSS pixels, a phone's width


def figure_svg(draw, name, title, height=2.7):
    """The SVG text of what draw(axes) draws. name: unique on the page, in front of every id. title: for readers who do
    not see the picture."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()  # a user's matplotlibrc changes nothing
        matplotlib.rcParams.update({**_SETTINGS, "svg.hashsalt": name})
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure.add_subplot())
        out = io.StringIO()
        warnings.filterwarnings("ignore", "Glyph")  # the page's font draws the text
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _for_page(out.getvalue(), name, title)


def _for_page(text, name, title):
    ET.register_namespace("", SVG)
    ET.register_namespace("xlink", XLINK)
    root = ET.fromstring(printable(text))
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{SVG}}}style", f"{{{SVG}}}metadata"):
                parent.remove(child)
    for node in root.iter():
        for key, value in list(node.attrib.items()):
            if key == "id":
                node.set(key, f"{name}-{value}")
            elif key == f"{{{XLINK}}}href":
                node.set(key, value.replace("#", f"#{name}-", 1))
            else:
                value = re.sub(r"url\(#", f"url(#{name}-", value)
                value = re.sub(r"#0b0[bcd][0-9a-f]{2}", lambda m: f"var(--{_VARIABLES[m.group()]})", value)
                if key == "style":  # the page's font and the drawing's size
                    value = re.sub(r"font: ([0-9.]+px) [^;]*", r"font-size: \1", value)
                elif key in ("d", "transform", "points", "x", "y"):
                    value = re.sub(r"-?[0-9]+\.[0-9]{3,}", lambda m: f"{float(m.group()):.2f}", value)
                node.set(key, value)
        cell = re.fullmatch(r"fill: var\(--(q\d)\); stroke: var\(--\1\); stroke-width: 0.3", node.get("style", ""))
        if cell:  # there are many: a class takes less room
            del node.attrib["style"]
            node.set("class", cell.group(1))
    for size in ("width", "height", "version"):
        root.attrib.pop(size, None)
    root.set("role", "img")
    root.set("aria-labelledby", f"{name}-title")
    label = ET.Element(f"{{{SVG}}}title", {"id": f"{name}-title"})
    label.text = title
    root.insert(0, label)
    return ET.tostring(root, encoding="unicode")


def css_variables():
    """The rules that give the variables their light and dark values."""
    pairs = {**PAGE, **{f"s{i}": c for i, c in enumerate(SERIES)}, **{f"q{i}": c for i, c in enumerate(RAMP)}}
    light, dark = ("".join(f"--{name}:{pair[mode]};" for name, pair in pairs.items()) for mode in (0, 1))
    cells = "".join(f".q{i}{{fill:var(--q{i});stroke:var(--q{i});stroke-width:.3}}" for i in range(len(RAMP)))
    return f":root{{color-scheme:light dark;{light}}}\n@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n{cells}"
