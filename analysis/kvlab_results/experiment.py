"""What an experiment's text says of the runs: the depths of a task's facts, and the batch. It needs PyYAML."""

import functools

import yaml

# Tasks with a grid of depths, and the default of `depth`. plugins/plugins.json has the same; a test compares them.
DEPTHS = {"kv": 5, "multikey": 5, "niah": 5, "passkey": 5}


@functools.lru_cache
def _document(text):
    """The YAML document, and the overrides that kvlab wrote behind it as [(key, value)]."""
    lines = text.rstrip("\n").split("\n")
    sets = []
    while lines and lines[-1].startswith("# --set "):
        key, _, value = lines.pop()[len("# --set ") :].partition("=")
        sets.insert(0, (key.strip(), yaml.safe_load(value)))
    document = yaml.safe_load("\n".join(lines))
    return (document if isinstance(document, dict) else {}), sets


def _tasks(document, sets):
    """{label: (plugin, parameters)}"""
    tasks = dict(sets).get("tasks", document.get("tasks"))
    found = {}
    for entry in tasks if isinstance(tasks, list) else []:
        if isinstance(entry, str):
            found[entry] = (entry, {})
        elif isinstance(entry, dict) and "task" in entry:
            plugin, more = entry["task"], {}
            if isinstance(plugin, dict):
                plugin, more = next(iter(plugin.items()))
            found[entry.get("name", plugin)] = (plugin, {**entry, **(more or {})})
        elif isinstance(entry, dict) and len(entry) == 1:
            name, parameters = next(iter(entry.items()))
            found[name] = (name, dict(parameters or {}))
    return found


def _override(parameters, label, document, sets):
    sweep = document.get("sweep")
    for key, value in [*(sweep.items() if isinstance(sweep, dict) else []), *sets]:
        key = key.removeprefix("sweep.")
        for prefix in (f"tasks.{label}.", f"{label}."):
            if key.startswith(prefix):
                parameters[key.removeprefix(prefix)] = value
    return parameters


def depths(text, task, samples):
    """The number of depths of the facts that `task` asks for first, evenly from 0 to 1; None where the text does not
    say. task: as in /summary. samples: the task's samples in one cell, which tell the values of an axis apart."""
    try:
        document, sets = _document(text)
        label = task.removesuffix(" question=decode")
        plugin, parameters = _tasks(document, sets).get(label, ("", {}))
        parameters = _override(parameters, label, document, sets)
    except (yaml.YAMLError, AttributeError, TypeError):
        return None
    if plugin not in DEPTHS or parameters.get("ask", 0) != 0:
        return None

    def axis(name, default):
        value = parameters.get(name, default)
        return [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int)]

    fits = [(d, s) for d in axis("depth", DEPTHS[plugin]) for s in axis("samples", 1) if d * s == samples]
    return fits[0][0] if len(fits) == 1 else None


def batch(text):
    """Sequences at once in a run without a workload; None where the text does not say."""
    try:
        document, sets = _document(text)
    except (yaml.YAMLError, AttributeError):
        return None
    value = dict(sets).get("batch", document.get("batch", 1))
    return value if isinstance(value, int) else None
