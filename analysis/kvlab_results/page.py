"""The parts of a report's page: text, tables, figures. Everything that comes from a file is escaped."""

import html
import math
from dataclasses import dataclass, field

from kvlab_results import style

CSS = """
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:76rem;background:var(--surface);color:var(--ink);
font:1rem/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.6rem;margin:.5rem 0}
h2{font-size:1.25rem;margin:2.5rem 0 .5rem;border-top:1px solid var(--grid);padding-top:1rem}
h3{font-size:1rem;margin:1.2rem 0 .3rem}
a{color:var(--link)}p,ul,dl{margin:.5rem 0;max-width:60rem}
.note{color:var(--muted);font-size:.9rem}
nav ul{columns:16rem;padding-left:1.2rem}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,21rem),1fr));gap:1.2rem 1.5rem}
.grid>*{min-width:0}
figure{margin:0}figure svg{display:block;width:100%;max-width:28rem;height:auto}
figure svg *{stroke-linejoin:round;stroke-linecap:butt}
figure svg text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
figcaption{font-weight:600;font-size:.92rem;margin-bottom:.2rem}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1rem;padding:0;margin:.6rem 0;list-style:none;font-size:.9rem}
.legend svg{width:.9em;height:.9em;vertical-align:-.08em;margin-right:.35em}
.scroll{overflow-x:auto;max-width:100%;container-type:inline-size}
.scroll:focus-visible,summary:focus-visible,a:focus-visible{outline:2px solid var(--link);outline-offset:2px}
table{border-collapse:collapse;font-size:.88rem;font-variant-numeric:tabular-nums;overflow-wrap:normal}
caption{text-align:left;font-weight:600;padding:.4rem 0}
caption span{display:block;position:sticky;left:0;width:max-content;overflow-wrap:anywhere;
max-width:calc(100vw - 2rem);max-width:100cqi}
th,td{padding:.25rem .6rem;border-bottom:1px solid var(--grid);text-align:right;vertical-align:top;white-space:nowrap}
th{font-weight:600;background:var(--raised)}tbody th{font-weight:400;background:none}
tbody .faint>*{color:var(--muted)}
.text{text-align:left}.long{white-space:normal;min-width:14rem}
details{margin:.3rem 0}summary{cursor:pointer;color:var(--muted);font-size:.9rem}
pre{overflow-x:auto;background:var(--raised);padding:.7rem;font-size:.85rem;max-width:100%}
dt{font-weight:600}dd{margin:0 0 .4rem 1rem}
"""


def escape(value):
    return html.escape(style.printable(str(value)), quote=True)


def number(value, digits=4):
    """As `kvlab report` prints it; "-" = not measured."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    return f"{value:.{digits}g}"


@dataclass
class Table:
    """header: column names. The first `text` columns are text, and the first one heads its row. long: columns whose
    text may wrap. faint: rows in grey. under: lines below the table."""

    caption: str
    header: list
    rows: list
    text: int = 1
    long: tuple = ()
    faint: tuple = ()
    under: tuple = ()

    def html(self):
        def class_of(column):
            names = ["text"] * (column < self.text or column in self.long) + ["long"] * (column in self.long)
            return f' class="{" ".join(names)}"' if names else ""

        head = "".join(f'<th scope="col"{class_of(i)}>{escape(name)}</th>' for i, name in enumerate(self.header))
        body = []
        for place, row in enumerate(self.rows):
            cells = [f'<th scope="row"{class_of(0)}>{escape(row[0])}</th>']
            cells += [f"<td{class_of(i)}>{escape(value)}</td>" for i, value in enumerate(row) if i]
            grey = ' class="faint"' * (place in self.faint)
            body.append(f"<tr{grey}>{''.join(cells)}</tr>")
        under = "".join(f'<p class="note">{escape(line)}</p>\n' for line in self.under)
        return (
            f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(self.caption)}"><table>'
            f"<caption><span>{escape(self.caption)}</span></caption><thead><tr>{head}</tr></thead>"
            f"<tbody>\n{chr(10).join(body)}\n</tbody></table></div>\n{under}"
        )


@dataclass
class Panel:
    """One picture. draw(axes) draws it; `table` has its numbers."""

    title: str
    draw: object
    table: Table
    notes: list = field(default_factory=list)
    height: float = 2.7

    def html(self, name):
        svg = style.figure_svg(self.draw, name, f"{self.title}. The numbers are in the table below.", self.height)
        notes = "".join(f'<p class="note">{escape(note)}</p>' for note in self.notes)
        return (
            f"<div><figure><figcaption>{escape(self.title)}</figcaption>{svg}</figure>{notes}"
            f"<details><summary>Numbers</summary>{self.table.html()}</details></div>\n"
        )


@dataclass
class Section:
    """A chapter of the page. policies: those that its legend names. key: its anchor."""

    key: str
    title: str
    lead: str
    panels: list = field(default_factory=list)
    tables: list = field(default_factory=list)
    policies: list = field(default_factory=list)
    hollow: bool = False
    above: str = ""  # HTML before and behind the rest, made by the functions of this file
    extra: str = ""

    def html(self, styles):
        parts = [
            f'<section id="{self.key}" aria-labelledby="{self.key}-h"><h2 id="{self.key}-h">{escape(self.title)}</h2>'
            f"<p>{escape(self.lead)}</p>\n"
        ]
        parts.append(self.above)
        if self.policies:
            parts.append(legend(self.policies, styles, self.hollow))
        if self.panels:
            panels = "".join(panel.html(f"{self.key}-{i}") for i, panel in enumerate(self.panels))
            parts.append(f'<div class="grid">\n{panels}</div>\n')
        return "".join(parts + [table.html() for table in self.tables] + [self.extra, "</section>\n"])


def _mark(shape, variable, filled=True):
    fill = f"var(--{variable})" if filled else "var(--surface)"
    return (
        f'<svg viewBox="-6 -6 12 12" aria-hidden="true"><g fill="{fill}" stroke="var(--{variable})" stroke-width="1.4">'
        f"{style.SHAPES[shape]}</g></svg>"
    )


def legend(policies, styles, hollow):
    items = [f"<li>{_mark(styles[p].mark, styles[p].variable)}{escape(p)}</li>" for p in dict.fromkeys(policies)]
    if hollow:
        items.append(f"<li>{_mark('o', 'muted', False)}hollow: read its labels first</li>")
    return f'<ul class="legend" aria-label="policies">{"".join(items)}</ul>\n'


def swatches(names, variables):
    """A legend of areas: {name: CSS variable}."""
    items = [
        f'<li><svg viewBox="0 0 12 12" aria-hidden="true"><rect width="12" height="12" fill="var(--{v})"/></svg>'
        f"{escape(n)}</li>"
        for n, v in zip(names, variables)
    ]
    return f'<ul class="legend">{"".join(items)}</ul>\n'


def details(summary, text):
    return f'<details><summary>{escape(summary)}</summary><pre tabindex="0">{escape(text)}</pre></details>\n'


def document(title, parts):
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>\n{style.css_variables()}{CSS}</style>\n</head>\n<body>\n"
        f"{''.join(parts)}</body>\n</html>\n"
    )
