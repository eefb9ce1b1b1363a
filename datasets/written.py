"""The files that convert.py writes: a header, then a record a line. README.md describes them."""

import hashlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from common import DataError

SCHEMA = 1
HEADER = "kvlab_dataset"
SUMMARY = "dataset.yaml"
OURS = "# datasets/convert.py wrote this file.\n"


class AllLeftOut(DataError):
    """The source has records, and none of them is the task's."""


def line_of(value):
    return json.dumps(value, ensure_ascii=False, separators=(", ", ": ")) + "\n"


class Replacement:
    """A file that takes the place of `path` when the block ends well, and leaves nothing behind when it does not."""

    def __init__(self, path):
        self.path = Path(path)

    def __enter__(self):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle, self.temporary = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=self.path.parent)
        self.file = os.fdopen(handle, "wb")
        return self.file

    def __exit__(self, kind, *_):
        try:
            self.file.flush()
            os.fsync(self.file.fileno())
        finally:
            self.file.close()
            if kind:
                os.unlink(self.temporary)
        if not kind:
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(self.temporary, 0o666 & ~mask)
            os.replace(self.temporary, self.path)


def header_of(dataset, name, task, source, count, sha256):
    """The first line of a converted file."""
    return {HEADER: {
        "schema": SCHEMA, "set": dataset.name, "task": name, "title": dataset.title, "paper": dataset.paper,
        "source": dataset.source, "version": dataset.version, "licence": dataset.licence,
        "prompt_source": dataset.prompt_source, "note": " ".join(filter(None, [dataset.note, task.note])),
        "from": [{"file": f, "sha256": s} for f, s in sorted(source.read.items())], "left_out": source.left_out,
        "records": count, "records_sha256": sha256,
        "prompt": task.prompt, "question_text": task.question_text, "answer_opening": task.answer_opening,
        "references": task.references, "metric": task.metric, "max_new_tokens": task.max_new_tokens, "chat": task.chat,
        "truncate": task.truncate, "stop": list(task.stop)}}


def write_task(dataset, name, task, source, options, path):
    """Converts one task to `path`. Returns the number of records. The old file stays until the new one is whole.
    AllLeftOut: there was none to write."""
    source.read, source.left_out = {}, {}
    count, digest, last, ids = 0, hashlib.sha256(), time.monotonic(), set()
    with tempfile.TemporaryFile() as body:
        for value in dataset.read(name, source, options):
            if value["id"] in ids:
                raise DataError(f"{dataset.name} {name}: record {count + 1}",
                                f"got the id '{value['id']}' of an earlier record, wanted an id of its own")
            ids.add(value["id"])
            try:
                line = line_of(value).encode("utf-8")
            except UnicodeEncodeError:
                raise DataError(f"{dataset.name} {name}: record {value['id']}", "got text that is no Unicode") from None
            body.write(line)
            digest.update(line)
            count += 1
            if time.monotonic() - last > 2:
                last = time.monotonic()
                print(f"{dataset.name} {name}: {count} records so far", file=sys.stderr)
        if count == 0:
            out = ", ".join(f"{n} left out ({why})" for why, n in source.left_out.items())
            error = AllLeftOut if source.left_out else DataError
            raise error(", ".join(map(source.place, sorted(source.read))) or source.path,
                        f"got no record for {name}{out and '; '}{out}, wanted at least one")
        with Replacement(path) as out:
            out.write(line_of(header_of(dataset, name, task, source, count, digest.hexdigest())).encode("utf-8"))
            body.seek(0)
            while block := body.read(1 << 20):
                out.write(block)
    return count


def read_header(path):
    """The header of a converted file. None: the file has none."""
    with open(path, "rb") as file:
        try:
            first = json.loads(file.readline())
        except ValueError:
            return None
    return first.get(HEADER) if isinstance(first, dict) else None


def digest_of(file):
    """(lines, SHA-256) of the rest of the file."""
    count, digest = 0, hashlib.sha256()
    for line in file:
        count += 1
        digest.update(line)
    return count, digest.hexdigest()


def checked(path):
    """The number of records of a converted file, which must be what its header says."""
    header = read_header(path)
    if header is None:
        raise DataError(path, "got no header, wanted a file that convert.py wrote")
    with open(path, "rb") as file:
        file.readline()
        count, digest = digest_of(file)
    if (count, digest) != (header.get("records"), header.get("records_sha256")):
        raise DataError(path, f"got {count} records with SHA-256 {digest}, wanted the header's {header.get('records')} with "
                        f"{header.get('records_sha256')}")
    return count


def check_ours(paths, folder):
    """Refuses to replace what convert.py did not write, the source files among it."""
    for path in paths:
        if os.path.lexists(path) and not (path.is_file() and read_header(path)):
            raise DataError(path, "got a file that convert.py did not write, wanted another folder for --to")
    summary = Path(folder) / SUMMARY
    if summary.exists() and not summary.read_bytes().startswith(OURS.encode()):
        raise DataError(summary, "got a file that convert.py did not write, wanted another folder for --to")


def write_summary(dataset, folder):
    """dataset.yaml: every converted file of the folder, with its hash. Nothing where there is none."""
    lines = []
    for path in sorted(Path(folder).glob("*.jsonl")):
        header = read_header(path)
        if header and header.get("set") == dataset.name:
            with open(path, "rb") as file:
                digest = digest_of(file)[1]
            lines.append(f"  {path.name}: {{bytes: {path.stat().st_size}, sha256: {digest}, "
                         f"records: {header['records']}, metric: {header['metric']}}}\n")
    quoted = {key: json.dumps(getattr(dataset, key), ensure_ascii=False)
              for key in ("title", "paper", "source", "version", "licence", "prompt_source")}
    if not lines:
        return
    text = (f"{OURS}name: {dataset.name}\ntitle: {quoted['title']}\nfiles:\n{''.join(lines)}"
            + "".join(f"{key}: {quoted[key]}\n" for key in ("paper", "source", "version", "licence", "prompt_source"))
            + "task: jsonl\n")
    with Replacement(Path(folder) / SUMMARY) as out:
        out.write(text.encode("utf-8"))
