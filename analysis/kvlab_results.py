"""The one Python reader of kvlab's result files (HDF5 schema version 1).

>>> import kvlab_results as kr
>>> kr.summary("results/quickstart.h5")            # a DataFrame, one row per cell
>>> kr.cell("results/quickstart.h5", "3f2a...")    # a dict: tables as DataFrames, arrays as numpy arrays

Without this file, in one line (text comes as bytes):
>>> pd.DataFrame(h5py.File("results/quickstart.h5")["summary"][:]).map(lambda v: v.decode() if isinstance(v, bytes) else v)
"""

import h5py
import pandas as pd

SCHEMA_VERSION = 1


def _open(path):
    file = h5py.File(path, "r")
    version = file.attrs.get("schema_version")
    if version != SCHEMA_VERSION:
        file.close()
        raise ValueError(f"{path}: got schema version {version}, wanted {SCHEMA_VERSION}")
    return file


def _table(dataset):
    frame = pd.DataFrame(dataset[:])
    for name in dataset.dtype.names:
        if h5py.check_string_dtype(dataset.dtype[name]):
            frame[name] = frame[name].map(lambda v: v.decode() if isinstance(v, bytes) else v)
    frame.attrs["units"] = dict(zip(dataset.dtype.names, dataset.attrs["units"]))
    return frame


def info(path):
    """The root attributes: what ran, where, when and with which versions."""
    with _open(path) as file:
        return dict(file.attrs)


def summary(path):
    """/summary as a DataFrame; NaN or -1 = not measured; units in .attrs["units"]."""
    with _open(path) as file:
        return _table(file["summary"])


def cell(path, id):
    """Everything about one cell by its path below /cells/<id>, e.g. "samples", "fidelity/kl", "trace/kept_offsets".

    Tables are DataFrames, arrays numpy arrays; step_parts is a DataFrame with one column per part. Pieces that were not
    measured are absent.
    """
    pieces = {}

    def take(name, node):
        if not isinstance(node, h5py.Dataset):
            return
        if node.dtype.names:
            pieces[name] = _table(node)
        elif "parts" in node.attrs:
            pieces[name] = pd.DataFrame(node[:], columns=list(node.attrs["parts"]))
        else:
            pieces[name] = node[:]

    with _open(path) as file:
        if id not in file["cells"]:
            raise KeyError(f"{path}: got cell {id!r}, wanted one of {', '.join(file['cells'])}")
        file["cells"][id].visititems(take)
    return pieces
