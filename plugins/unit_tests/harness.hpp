// The Python that runs in confinement: it takes the code out of an answer, and runs it with the tests.
#pragma once

namespace unit_tests {

// Its input: a secret, the function's name, what stands before the answer, the tests and the answer, with a NUL between
// them. It prints the secret when the program has come to its end. The code is taken out as EvalPlus's sanitize.py does
// (evalplus/evalplus at e5936083f8e3). That one parses with tree-sitter, this one with Python itself. Functions that
// the tests name stay too: those of HumanEval/50 call one of the prompt. An answer ends at the texts where EvalPlus
// ends it.
inline constexpr const char* harness = R"python(
import ast, os, re, sys

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

def error_of(text):
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return error

def extract(text):
    """The most lines that parse together, at least two; the blank ones do not count."""
    lines = text.split("\n")
    full = [0]
    for line in lines:
        full.append(full[-1] + bool(line.strip()))
    count = lambda r: full[r[1] + 1] - full[r[0]]
    ranges = [(i, j) for i in range(len(lines)) for j in range(i + 1, len(lines))]
    reach = [len(lines)] * len(lines)  # lines i to j have the same error for each j > reach[i]
    for i, j in sorted(filter(count, ranges), key=count, reverse=True):
        if j > reach[i]:
            continue
        part = "\n".join(lines[i : j + 1])
        error = error_of(part)
        if not error:
            return part
        # This one is at the last token that Python read: no later one can mend it.
        if getattr(error, "msg", "") == "invalid syntax" and getattr(error, "end_lineno", 0):
            reach[i] = i + error.end_lineno
    return lines[0]

def target(node):
    """The first name among the parts of an assignment."""
    if isinstance(node, ast.AnnAssign):
        parts = [node.target, node.value]
    else:
        parts = node.targets[:1] + ([node.value] if len(node.targets) == 1 else [])
    return next((p.id for p in parts if isinstance(p, ast.Name)), None)

def names(node):
    out = set()
    for part in ast.walk(node):
        texts = [getattr(part, key, None) for key in ("id", "attr", "arg", "name", "asname", "module")]
        texts += part.names if isinstance(part, (ast.Global, ast.Nonlocal)) else []
        for text in texts:
            out.update(text.split(".") if isinstance(text, str) else [])
    return out

def sanitize(answer, entry, called=()):
    text = extract(answer)
    imports, kept = [], {}
    for node in ast.parse(text).body if not error_of(text) else []:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            if getattr(node, "module", "") != "__future__":
                imports.append(node)
        elif isinstance(node, DEFINITIONS):
            whole = isinstance(node, ast.ClassDef) or any(isinstance(n, ast.Return) for n in ast.walk(node))
            if whole and not node.decorator_list:
                kept.setdefault(node.name, node)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            kept.setdefault(target(node), node)
    if entry:
        wanted, new = set(), {entry} | {n for n, node in kept.items() if n in called and isinstance(node, DEFINITIONS)}
        while new:
            name = new.pop()
            wanted.add(name)
            new |= (names(kept[name]) if name in kept else set()) - wanted
        kept = {name: node for name, node in kept.items() if name in wanted}
    parts = [ast.get_source_segment(text, node) for node in imports + list(kept.values())]
    return "\n".join(parts).strip() or text

def main():
    secret, entry, before, tests, answer = sys.stdin.buffer.read().decode("utf-8", "replace").split("\0", 4)
    answer = re.split(r"\n```(?:\n|$)|\nif __name__|\ndef main\(|\nprint\(", answer)[0]
    program = sanitize(before + answer, entry, set(re.findall(r"\w+", tests))) + "\n\n" + tests
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    exec(compile(program, "answer", "exec"), {})
    os.write(1, secret.encode())
    os._exit(0)

main()
)python";

}  // namespace unit_tests
