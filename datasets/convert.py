#!/usr/bin/env python3
"""Converts the public files of a data set to records that the task `jsonl` reads. README.md describes the files.

    python3 datasets/convert.py list                                    the sets, and where to get each
    python3 datasets/convert.py longbench --from data.zip --to data/longbench
    python3 datasets/convert.py longbench --from data.zip --to data/longbench --task qasper hotpotqa
    python3 datasets/convert.py check data/longbench/qasper.jsonl       is the file what its header says?
    python3 datasets/convert.py longbench --help                        tasks, files, licence, the set's own options

Then, in an experiment:  tasks: [{name: qasper, task: jsonl, data: data/longbench/qasper.jsonl, max_context: 8192}]
Equal sources give equal bytes. A file appears when it is whole. Exit codes: 0 done; 2 something is wrong with what was
given, and the message names file and record.
"""

import argparse
import os
import re
import sys
from pathlib import Path

import common
import written
from sources import DataError, Source


DATA = re.compile(r"\.(jsonl?|csv|tsv|parquet)(\.gz)?$")  # what a set's records may be in


def tasks_of(dataset, source):
    return dataset.find_tasks(source) if dataset.find_tasks else dataset.tasks


def selected(dataset, source, wanted):
    """The tasks to convert: those that are asked for, else those whose files are there."""
    tasks = tasks_of(dataset, source)
    for name in wanted or ():
        if name not in tasks:
            raise DataError("", f"got --task {name}, wanted one of: {', '.join(tasks)}")
    if wanted:
        return {name: tasks[name] for name in wanted}, []
    there = {n: t for n, t in tasks.items() if not t.files or source.find(*t.files)}
    if not there:
        raise DataError(source.path, f"got no file of {dataset.title}, wanted {source.wanted}")
    return there, [name for name in tasks if name not in there]


def convert(dataset, arguments):
    source = Source(arguments.source, f"{dataset.wanted}; get it from {dataset.source}")
    tasks, absent = selected(dataset, source, arguments.task)
    paths = {name: Path(arguments.to) / f"{name}.jsonl" for name in tasks}
    written.check_ours(paths.values(), arguments.to)
    skipped, used = [], set()
    try:
        for name, task in tasks.items():
            try:
                count = written.write_task(dataset, name, task, source, arguments, paths[name])
            except written.AllLeftOut as error:
                skipped.append(name)
                if arguments.task or len(skipped) == len(tasks):
                    raise
                print(f"{dataset.name} {name}: not converted: {error}", file=sys.stderr)
                continue
            finally:
                used.update(source.read)
            left = "".join(f", {n} left out ({why})" for why, n in source.left_out.items())
            print(f"{dataset.name} {name}: {count} records{left} -> {paths[name]}", file=sys.stderr)
    finally:
        written.write_summary(dataset, arguments.to)
    if absent:
        print(f"{dataset.name}: no file for {', '.join(absent)}", file=sys.stderr)
    unread = [n for n in source.names if n not in used and DATA.search(n)]
    if unread and not arguments.task:
        more = f" and {len(unread) - 5} more" if len(unread) > 5 else ""
        print(f"{dataset.name}: no task reads {', '.join(unread[:5])}{more}; wanted {dataset.wanted}", file=sys.stderr)


def listing(sets):
    for name, dataset in sets.items():
        print(f"{name}: {dataset.title}\n  from     {dataset.source}\n  licence  {dataset.licence}")


def description(dataset):
    rows = [f"  {n:26}{t.metric:26}{t.max_new_tokens:7} tokens{'' if t.chat else ', no chat template'}"
            for n, t in dataset.tasks.items()]
    return (f"{dataset.title}. {dataset.paper}\n\nfrom      {dataset.source}\nversion   {dataset.version}\n"
            f"licence   {dataset.licence}\nprompts   {dataset.prompt_source}\nwanted    {dataset.wanted}\n"
            f"sample    {dataset.sample}\n" + (f"note      {dataset.note}\n" if dataset.note else "") +
            "\ntasks, metrics and longest answers:\n" + "\n".join(rows))


def parser_of(sets):
    parser = argparse.ArgumentParser(prog="convert.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", metavar="list | check | SET", required=True)
    commands.add_parser("list", help="the sets, and where to get each")
    checking = commands.add_parser("check", help="compares files with their headers")
    checking.add_argument("file", nargs="+")
    for name, dataset in sets.items():
        one = commands.add_parser(name, help=dataset.title, description=description(dataset),
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
        one.add_argument("--from", dest="source", required=True, metavar="DIR", help="folder or ZIP archive with the files")
        one.add_argument("--to", required=True, metavar="OUT", help="folder for the converted files")
        one.add_argument("--task", nargs="+", metavar="NAME", help="these tasks; without it, all whose files are there")
        if dataset.options:
            dataset.options(one)
    return parser


def main(words=None):
    sets = common.all_sets()
    arguments = parser_of(sets).parse_args(words)
    try:
        if arguments.command == "list":
            listing(sets)
        elif arguments.command == "check":
            for path in arguments.file:
                print(f"{path}: {written.checked(path)} records, as its header says")
        else:
            convert(sets[arguments.command], arguments)
    except DataError as error:
        print(f"convert.py: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"convert.py: {error.filename or ''}: {os.strerror(error.errno) if error.errno else error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
