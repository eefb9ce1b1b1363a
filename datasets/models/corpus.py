#!/usr/bin/env python3
"""Builds the training corpus of the recall models from freely licensed text.

Writes FOLDER/corpus.jsonl.xz, one {"source", "kind", "text"} per document, and FOLDER/heldout.txt, a book that no model is
trained on. Kinds: book, documentation, code, dialogue. Packages come from Debian 12 (`apt-get download` installs nothing).
Books are Project Gutenberg plain-text files given by hand. README.md of each model names titles and licences.
"""

import argparse
import gzip
import html
import json
import lzma
import random
import re
import subprocess
import sys
from pathlib import Path

# package: (kind, files inside, characters at most, licence)
PACKAGES = {
    "anarchism": ("documentation", "**/html/sec*.html", 3_000_000, "GFDL-1.1+ or GPL-2+"),
    "bash-doc": ("documentation", "**/bashref.html", 500_000, "GFDL-1.3+"),
    "debian-reference-en": ("documentation", "**/ch*.en.html", 700_000, "GPL-2+"),
    "developers-reference": ("documentation", "**/developers-reference/[a-z]*.html", 300_000, "GPL-2+"),
    "fortunes": ("dialogue", "**/fortunes/*", 2_500_000, "BSD-style collection; see its copyright file"),
    "git-doc": ("documentation", "**/*.txt", 1_500_000, "GPL-2"),
    "jargon-text": ("documentation", "**/jargon.txt.gz", 1_500_000, "public domain"),
    "libpython3.11-stdlib": ("code", "**/*.py", 3_000_000, "PSF-2"),
    "libstdc++-12-dev": ("code", "**/c++/12/*/*.h", 800_000, "GPL-3+ with runtime exception"),
    "linux-doc-6.1": ("documentation", "**/_sources/**/*.rst.txt", 3_000_000, "GPL-2"),
    "perl-doc": ("documentation", "**/perl[a-z]*.pod", 1_000_000, "Artistic or GPL-1+"),
    "perl-modules-5.36": ("code", "**/*.pm", 1_200_000, "Artistic or GPL-1+"),
    "postgresql-doc-15": ("documentation", "**/html/*.html", 1_500_000, "PostgreSQL"),
    "python3.11-doc": ("documentation", "**/_sources/**/*.rst.txt", 1_500_000, "PSF-2"),
    "sqlite3-doc": ("documentation", "**/sqlite3/*.html", 1_500_000, "public domain"),
}
for campaign in ("did", "dw", "httt", "l", "low", "nr", "thot", "tsg", "utbs"):
    PACKAGES[f"wesnoth-1.16-{campaign}"] = ("dialogue", "**/scenarios/*.cfg", 500_000, "GPL-2+")


def strip_html(page):
    page = re.sub(r"(?is)<(script|style|head|nav)\b.*?</\1>", " ", page)
    page = re.sub(r"(?i)<(p|div|li|tr|h\d|pre|br|dt|dd|table|ul)\b[^>]*>", "\n", page)
    page = html.unescape(re.sub(r"<[^>]+>", "", page))
    return re.sub(r"[ \t]+", " ", page)


def strip_pod(text):
    text = re.sub(r"(?m)^=\w+ ?", "", text)
    return re.sub(r"[A-Z]<{1,3} ?(.*?) ?>{1,3}", r"\1", text)


def wesnoth_lines(text):
    """The speeches of a scenario, 'Name: words'."""
    out, speaker = [], "Narrator"
    for match in re.finditer(r'speaker=(\S+)|message= *_ *"((?:[^"]|"")*)"', text):
        if match[1]:
            speaker = match[1].strip('"')
        else:
            out.append(f"{speaker}: {' '.join(match[2].split())}")
    return "\n".join(out)


def join_lines(text):
    """One paragraph per line, as novels are read."""
    paragraphs = [" ".join(p.split()) for p in re.split(r"\n\s*\n", text)]
    return "\n".join(p for p in paragraphs if p)


def clean(text):
    text = text.replace("\r\n", "\n").replace("\t", "    ")
    text = re.sub(r"[^\n -~\u00a0-\u024f\u2010-\u2026]", "", text)
    return re.sub(r"\n{3,}", "\n\n", re.sub(r" +\n", "\n", text)).strip()


def read(path):
    raw = gzip.open(path).read() if path.suffix == ".gz" else path.read_bytes()
    text = raw.decode("utf-8", "replace")
    if path.suffix == ".html":
        return strip_html(text)
    if path.suffix == ".pod":
        return strip_pod(text)
    return wesnoth_lines(text) if path.suffix == ".cfg" else text


def package_texts(name, cache):
    deb = next(iter(cache.glob(f"{name}_*.deb")), None)
    if deb is None:
        subprocess.run(["apt-get", "download", name], cwd=cache, check=True, stdout=subprocess.DEVNULL)
        deb = next(cache.glob(f"{name}_*.deb"))
    root = cache / "unpacked" / name
    if not root.exists():
        root.mkdir(parents=True)
        subprocess.run(["dpkg-deb", "-x", deb, root], check=True)
    kind, pattern, most, _ = PACKAGES[name]
    files = [
        f for f in sorted(root.glob(pattern)) if f.is_file() and not f.is_symlink() and f.suffix not in (".dat", ".u8")
    ]
    random.Random(name).shuffle(files)  # a package's share comes from all of its files
    for f in files:
        text = clean("\n\n".join(read(f).split("\n%\n")))[:200_000]
        if len(text) > 400 and most > 0:
            most -= len(text)
            yield kind, text


def book_text(path):
    text = path.read_text("utf-8-sig", "replace")
    title = re.search(r"(?m)^Title: (.+)$", text)
    body = re.split(r"\*\*\* ?(?:START|END) OF.*?\*\*\*", text, flags=re.S)
    return (title[1].strip() if title else path.stem), clean(join_lines(body[1] if len(body) > 1 else text))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("folder", type=Path, help="where the corpus and the downloaded packages go")
    p.add_argument("--books", type=Path, help="folder of Project Gutenberg .txt files")
    p.add_argument("--heldout", default="Captain Blood", help="title of the book that is kept for measuring perplexity")
    p.add_argument(
        "--skip", default="The Mysterious Island", help="title that is left out: the haystack of the niah task"
    )
    a = p.parse_args()
    a.folder.mkdir(parents=True, exist_ok=True)
    documents = []
    for name in PACKAGES:
        before = len(documents)
        documents += [{"source": name, "kind": kind, "text": text} for kind, text in package_texts(name, a.folder)]
        print(
            f"{name:24} {PACKAGES[name][0]:14} {len(documents) - before:5} documents "
            f"{sum(len(d['text']) for d in documents[before:]) / 1e6:6.2f} MB  {PACKAGES[name][3]}"
        )
    for path in sorted(a.books.glob("*.txt")) if a.books else ():
        title, text = book_text(path)
        if title.startswith(a.skip):
            continue
        print(f"{title[:40]:40} book {len(text) / 1e6:6.2f} MB  public domain")
        if title.startswith(a.heldout):
            (a.folder / "heldout.txt").write_text(text)
            continue
        documents += [
            {"source": title, "kind": "book", "text": text[i : i + 100_000]} for i in range(0, len(text), 100_000)
        ]
    random.Random(0).shuffle(documents)
    with lzma.open(a.folder / "corpus.jsonl.xz", "wt", preset=6) as out:
        for d in documents:
            out.write(json.dumps(d) + "\n")
    print(f"{len(documents)} documents, {sum(len(d['text']) for d in documents) / 1e6:.1f} MB")


if __name__ == "__main__":
    sys.exit(main())
