"""The public files that a converter reads: a folder or a ZIP archive, and the records in its files."""

import csv
import gzip
import hashlib
import io
import json
import re
import zipfile
import zlib
from pathlib import Path


class DataError(Exception):
    """Something is wrong with what was given. place: the file, and the record in it where there is one."""

    def __init__(self, place, message):
        super().__init__(f"{place}: {message}" if place else message)


def no_number(text):
    raise ValueError(f"{text} is no number of JSON")


class Source:
    """The files of a folder or of a ZIP archive, by their path inside it. Remembers the hashes of those that were read."""

    def __init__(self, path, wanted):
        self.path, self.wanted, self.read, self.left_out = Path(path), wanted, {}, {}
        self.zip = None
        if self.path.is_dir():
            names = (p.relative_to(self.path).as_posix() for p in self.path.rglob("*") if p.is_file())
        elif self.path.is_file() and zipfile.is_zipfile(self.path):
            self.zip = zipfile.ZipFile(self.path)
            names = (n for n in self.zip.namelist() if not n.endswith("/"))
        else:
            what = "a file that is no ZIP archive" if self.path.exists() else "no such folder"
            raise DataError(self.path, f"got {what}, wanted a folder or a ZIP archive with {wanted}")
        self.names = sorted(n for n in names if not any(part.startswith((".", "__MACOSX")) for part in n.split("/")))

    def matching(self, pattern):
        """Paths whose end matches, from the start of a folder's or file's name on."""
        return [n for n in self.names if re.search(rf"(^|/){pattern}$", n)]

    def find(self, *names):
        """The one file of any of these names, or of its packed form NAME.gz. None: there is none."""
        for name in names:
            found = self.matching(re.escape(name)) or self.matching(re.escape(name) + r"\.gz")
            if len(found) > 1:
                raise DataError(self.path, f"got {name} {len(found)} times ({', '.join(found)}), wanted it once")
            if found:
                return found[0]
        return None

    def need(self, *names, without=""):
        """As find(), but there must be one. without: what does without it, if anything."""
        found = self.find(*names)
        if not found:
            raise DataError(self.path, f"got no {' or '.join(names)}, wanted {self.wanted}{without and '; '}{without}")
        return found

    def opened(self, name):
        """The file's bytes as a stream, unpacked where its name ends with .gz. Remembers the hash of the file as it is."""
        raw = (lambda: self.zip.open(name)) if self.zip else (lambda: open(self.path / name, "rb"))
        digest = hashlib.sha256()
        with raw() as file:
            while block := file.read(1 << 20):
                digest.update(block)
        self.read[name] = digest.hexdigest()
        return gzip.GzipFile(fileobj=raw()) if name.endswith(".gz") else raw()

    def lines(self, name):
        """Yields (line number, text without its end)."""
        with self.opened(name) as file:
            number = 0
            try:
                for number, line in enumerate(file, 1):
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\n")
                    if text.startswith("version https://git-lfs"):
                        raise DataError(self.place(name), "got a Git LFS pointer, wanted the file itself (git lfs pull)")
                    yield number, text
            except UnicodeDecodeError:
                raise DataError(f"{self.place(name)}:{number + (number == 0)}", "got bytes that are no UTF-8") from None
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise DataError(self.place(name), f"got no gzip data ({error}), wanted a whole .gz file") from None

    def text(self, name):
        return "\n".join(text for _, text in self.lines(name))

    def place(self, name, record=None):
        return f"{self.path / name}" + (f": record {record}" if record is not None else "")

    def records(self, name):
        """Yields (place, dict) for each record of a .jsonl, .json, .csv or .parquet file, the first three also as .gz."""
        kind = Path(name.removesuffix(".gz")).suffix
        reader = {".jsonl": self._jsonl, ".json": self._json, ".csv": self._csv, ".parquet": self._parquet}.get(kind)
        if not reader:
            raise DataError(self.place(name), f"got a file of the kind '{kind}', wanted .jsonl, .json, .csv or .parquet")
        count = 0
        for count, value in enumerate(reader(name), 1):
            if not isinstance(value, dict):
                raise DataError(self.place(name, count), "got JSON that is no object, wanted {field: value, ...}")
            yield self.place(name, count), value
        if count == 0:
            raise DataError(self.place(name), "got no records")

    def _jsonl(self, name):
        for number, line in self.lines(name):
            if number == 1 and line.lstrip()[:1] == "[":
                yield from self._json(name)
                return
            if line.strip():
                yield self._parse(line, f"{self.place(name)}:{number}")

    def _json(self, name):
        text = self.text(name)
        if text.lstrip()[:1] == "{" and "\n{" in text.strip():
            yield from self._jsonl(name)
            return
        values = self._parse(text, self.place(name))
        if not isinstance(values, list):
            raise DataError(self.place(name), "got JSON that is no array, wanted an array of records")
        yield from values

    @staticmethod
    def _parse(text, place):
        try:
            return json.loads(text, parse_constant=no_number)
        except (ValueError, RecursionError) as error:
            raise DataError(place, f"got text that is no JSON ({error}), wanted one whole JSON value") from None

    def _csv(self, name):
        csv.field_size_limit(1 << 30)
        try:
            rows = list(csv.reader(io.StringIO(self.text(name), newline=""), strict=True))
        except csv.Error as error:
            raise DataError(self.place(name), f"got text that is no CSV ({error})") from None
        for number, row in enumerate(rows[1:], 1):
            if len(row) != len(rows[0]):
                raise DataError(self.place(name, number), f"got {len(row)} columns, wanted {len(rows[0])}")
            yield dict(zip(rows[0], row))

    def _parquet(self, name):
        try:
            from pyarrow import parquet
        except ImportError:
            raise DataError(self.place(name), "got a Parquet file and no Python package pyarrow, wanted pyarrow "
                            "(pip install pyarrow), or the same records as .jsonl") from None
        try:
            yield from parquet.read_table(io.BytesIO(self.opened(name).read())).to_pylist()
        except Exception as error:  # pyarrow has many kinds
            raise DataError(self.place(name), f"got no Parquet data ({error})") from None
