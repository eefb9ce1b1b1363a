"""Writes core/test/golden/code.json: answers, and the code that EvalPlus takes out of them.

    pip install --no-deps evalplus==0.3.1
    pip install tree_sitter tree_sitter_python tqdm termcolor
    python tools/goldens/answer_code.py [--check]

The code is that of evalplus.sanitize. Random cases have seed 1. Answers without two lines that parse are left out: of those
EvalPlus keeps a line that is no code.
"""

import ast
import json
import random
import sys
import types
from pathlib import Path

data = types.ModuleType("evalplus.data")  # the package needs it to read files, which this does not
for name in ("get_human_eval_plus", "get_mbpp_plus", "load_solutions", "write_directory", "write_jsonl"):
    setattr(data, name, None)
sys.modules["evalplus.data"] = data

from evalplus.sanitize import code_extract, sanitize  # noqa: E402

FILE = Path(__file__).parents[2] / "core/test/golden/code.json"

PIECES = [
    "def next_one(n):\n    return n + 1\n",
    "def next_one(n):\n    return helper(n)\n",
    "def next_one(n):\n    'docstring helper'\n    return uses(n, k=Y)\n",
    "def helper(n):\n    return X * n\n",
    "def uses(n):\n    return f'{X}{n!r}' + A.f.__name__\n",
    "def kw(*, X=1):\n    return X\n",
    "def gl():\n    global X\n    X = 2\n    return a\n",
    "def useless():\n    pass\n",
    "def nested():\n    def inner():\n        return 1\n    inner()\n",
    "def broken(:\n",
    "@dec\ndef deco():\n    return 1\n",
    "async def co():\n    return helper\n",
    "class A:\n    def f(self):\n        return helper(3)\n",
    "import math\n",
    "from os import path\n",
    "from __future__ import annotations\n",
    "X = 3\n",
    "Y: int = X\n",
    "a, b = helper, 2\n",
    "d[k] = helper\n",
    "x.y = z\n",
    "a = b = 4\n",
    "x += 1\n",
    "type_ = 1; other = 2\n",
    "lam = lambda helper: helper\n",
    "s = f'{helper(2)} text'\n",
    "\u00e9 = '\u00fc'; x2 = \u00e9\n",
    "assert next_one(2) == 3\n",
    "print(next_one(1))\n",
    "if True:\n    q = 1\n",
    "for i in []:\n    pass\n",
    "with open('x') as X:\n    pass\n",
    "try:\n    import numpy\nexcept ImportError:\n    pass\n",
    "# comment helper\n",
    "    indented = 2\n",
    "This is it:\n",
    "```python\n",
    "```\n",
    "\n",
]


def parses(text):
    try:
        ast.parse(text)
        return True
    except SyntaxError:
        return False


def cases():
    random.seed(1)
    made = []
    while len(made) < 250:
        text = "".join(random.choice(PIECES) for _ in range(random.randint(1, 10)))
        text = random.choice([text, text.rstrip("\n")])
        entry = random.choice(["next_one", "next_one", ""])
        if parses(code_extract(text)):
            made.append({"answer": text, "entry": entry, "code": sanitize(text, entry or None)})
    return made


def main():
    text = "[\n" + ",\n".join(json.dumps(c) for c in cases()) + "\n]\n"
    if "--check" in sys.argv:
        sys.exit(text != FILE.read_text())
    FILE.write_text(text)


if __name__ == "__main__":
    main()
