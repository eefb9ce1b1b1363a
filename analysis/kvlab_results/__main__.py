"""The command line of the package.

    python -m kvlab_results report results/*.h5 -o report/        # report/index.html; or -o FILE.html

Exit codes: 0 done; 2 something is wrong with what was given; 3 a Python package is missing.
"""

import argparse
import importlib.util
import pathlib
import sys

NEEDED = {"h5py": "h5py", "matplotlib": "matplotlib", "numpy": "numpy", "pandas": "pandas", "yaml": "PyYAML"}


def lacking():
    """A message where packages are missing; None where all are there."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    debian = " ".join(f"python3-{name}" for name in missing)
    pip = " ".join(NEEDED[name] for name in missing)
    return (
        f"{sys.executable}: got no {', '.join(missing)}, wanted the Python packages of a report: "
        f"apt-get install {debian}, or {sys.executable} -m pip install {pip}"
    )


def main(words):
    parser = argparse.ArgumentParser(prog="kvlab_results", description="Reports of kvlab's result files.")
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser("report", help="one HTML page of some files")
    report.add_argument("files", nargs="+", metavar="F.h5", help="result or profile files")
    report.add_argument("-o", "--output", required=True, help="a folder, which gets index.html, or a file *.html")
    commands.add_parser("packages", help="end with 3 where a package of a report is missing")
    args = parser.parse_args(words)
    missing = lacking()
    if args.command == "packages":
        print(missing or "all there")
        return 3 if missing else 0
    if missing:
        print(f"error: {missing}", file=sys.stderr)
        return 3
    from kvlab_results import report as reports  # needs the packages

    try:
        print(reports.write(args.files, args.output))
    except (reports.ReportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    if not __package__:  # run as a folder: python3 analysis/kvlab_results
        sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)
    sys.exit(main(sys.argv[1:]))
