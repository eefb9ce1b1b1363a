"""Writes core/api/kvlab/unicode_tables.hpp: what Python's str methods say about characters beyond ASCII.

    python tools/goldens/unicode_tables.py [FILE]
"""

import sys
import unicodedata
from pathlib import Path

CHARACTERS = range(0x80, 0x110000)


def word_edges():
    """Where isalnum() changes; what is not assigned stays as its neighbour is, which saves entries."""
    edges, inside = [], False
    for c in CHARACTERS:
        if unicodedata.category(chr(c)) not in ("Cn", "Co", "Cs") and chr(c).isalnum() != inside:
            edges.append(c)
            inside = not inside
    return edges


def lower_ranges():
    """(first, last, step, distance): every step-th character from first to last has its lower case at this distance."""
    ranges = []
    for c in CHARACTERS:
        lower = chr(c).lower()
        if len(lower) != 1 or lower == chr(c):
            continue
        distance = ord(lower) - c
        first, last, step, other = ranges[-1] if ranges else (0, -9, 0, 0)
        if distance == other and c - last in ((1, 2) if first == last else (step,)):
            ranges[-1] = (first, c, c - last, distance)
        else:
            ranges.append((c, c, 1, distance))
    return ranges


def zeros():
    return [c for c in CHARACTERS if unicodedata.category(chr(c)) == "Nd" and unicodedata.decimal(chr(c)) == 0]


def lines(items):
    out, line = [], "   "
    for item in items:
        if len(line) + len(item) + 2 > 118:
            out.append(line)
            line = "   "
        line += " " + item + ","
    return "\n".join(out + [line])


def main():
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2] / "core/api/kvlab/unicode_tables.hpp"
    path.write_text(
        f"""// Written by tools/goldens/unicode_tables.py from Unicode {unicodedata.unidata_version}: characters beyond ASCII, ascending.
#pragma once

namespace kvlab::unicode {{

// clang-format off
// Every step-th character from first to last has its lower case at this distance.
struct LowerRange {{ char32_t first, last, step; int distance; }};
inline constexpr LowerRange lower_ranges[] = {{
{lines("{%#x, %#x, %d, %d}" % r for r in lower_ranges())}
}};
// Letters and numbers begin and end here, in turn.
inline constexpr char32_t word_edges[] = {{
{lines("%#x" % c for c in word_edges())}
}};
// The zeros of decimal digits; nine more digits follow each.
inline constexpr char32_t zeros[] = {{
{lines("%#x" % c for c in zeros())}
}};
// clang-format on

}}  // namespace kvlab::unicode
"""
    )


if __name__ == "__main__":
    main()
