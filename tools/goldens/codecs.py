#!/usr/bin/env python3
"""Codes of K and V in numpy, and the golden that the C++ codes must equal bit by bit. Usage: codecs.py [FOLDER | --check]

Formulas: plain quantizers of LeanKV and QServe, KIVI's groups. scale = f16((max - min) / most), zero = f16(min), code =
nearest, ties to even, of (x - zero) / scale. whole_zero (Atom): s = max(max - min, 1e-5) / most, zero = f16(-s * z), z =
the whole number nearest to -min / s, of 0 to most, and scale = f16(s). e4m3: scale = f16(max |x| / 448), zero = 0, code =
the nearest number of the table of all e4m3 numbers, ties to the even code. What is not finite: NaN is left out of min and max and becomes code 0
(e4m3: 0x7f). min, max and max - min are drawn to the largest f16. A scale of 0 gives code 0. Scale and zero are
never -0. Everything is f32.
"""
import json
import os
import sys

import numpy as np

PAGE, DIM = 32, 32
MOST_F16 = np.float32(65504)
# name, bits, kind, axis, group (0 = all numbers of the axis)
SIDES = [("8", 8, "integer", "token", 0), ("4", 4, "integer", "token", 0), ("2", 2, "integer", "token", 0),
         ("e4m3", 8, "e4m3", "token", 0), ("4 by channel", 4, "integer", "channel", 32),
         ("2 by channel", 2, "integer", "channel", 16), ("8 by channel", 8, "integer", "channel", 8),
         ("4 by token, groups", 4, "integer", "token", 8), ("2 by token, groups", 2, "integer", "token", 16),
         ("e4m3 by channel", 8, "e4m3", "channel", 16), ("atom 8", 8, "whole_zero", "token", 0),
         ("atom 4", 4, "whole_zero", "token", 0), ("atom 2", 2, "whole_zero", "token", 0)]
LOWER = [("8", "4"), ("4", "2"), ("8", "2")]


def e4m3_table():
    """The magnitudes of codes 0 to 0x7e."""
    codes = np.arange(0x7F)
    exponent, fraction = codes >> 3, codes & 7
    return np.where(exponent > 0, (1 + fraction / 8) * 2.0 ** (exponent - 7), fraction / 8 * 2.0**-6)


def to_e4m3(y):
    table = e4m3_table()
    size = np.minimum(np.abs(y.astype(np.float64)), table[-1])
    above = np.clip(np.searchsorted(table, size), 1, len(table) - 1)
    below = above - 1
    up = table[above] - size < size - table[below]
    tie = table[above] - size == size - table[below]
    code = np.where(up | (tie & (above % 2 == 0)), above, below)
    return np.where(np.isnan(y), 0x7F, code + 128 * np.signbit(y)).astype(np.uint8)


def within(x):
    return np.clip(x, -MOST_F16, MOST_F16)


def encode_groups(x, bits, kind):
    """x: [groups, numbers]. Codes of the same shape; scale and zero [groups] in f16."""
    with np.errstate(all="ignore"):
        known = np.where(np.isnan(x), np.inf, x)
        low = known.min(-1)
        high = np.where(np.isnan(x), -np.inf, x).max(-1)
        empty = np.isnan(x).all(-1)
        if kind == "e4m3":
            scale, zero = within(np.maximum(-low, high) / np.float32(448)) + np.float32(0), np.zeros_like(low)
        elif kind == "whole_zero":
            most = np.float32(2**bits - 1)
            scale = within(np.maximum(high - low, np.float32(1e-5)) / most)
            zero = within(-scale * np.rint(np.clip(-low / scale, np.float32(0), most))) + np.float32(0)
        else:
            most = np.float32(2**bits - 1)
            scale, zero = np.where(low < high, within((high - low) / most), np.float32(0)), within(low) + np.float32(0)
        scale = np.where(empty, np.float32(0), scale).astype(np.float16)
        zero = np.where(empty, np.float32(0), zero).astype(np.float16)
        s, z = scale.astype(np.float32)[:, None], zero.astype(np.float32)[:, None]
        units = np.where(s > 0, (x - z) / s, np.where(np.isnan(x), x, np.float32(0))).astype(np.float32)
        if kind == "e4m3":
            return to_e4m3(units), scale, zero
        codes = np.rint(np.clip(np.nan_to_num(units, nan=0, posinf=1e9, neginf=-1e9), 0, 2**bits - 1))
    return codes.astype(np.uint8), scale, zero


def encode(x, bits, kind, axis, group):
    """x: [token, channel]. Codes of the same shape; scale and zero of each group: [token, group], or [channel, group]."""
    rows = x if axis == "token" else x.T
    group = group or rows.shape[1]
    codes, scale, zero = encode_groups(rows.reshape(-1, group), bits, kind)
    codes = codes.reshape(rows.shape)
    return codes if axis == "token" else codes.T, scale, zero


def lower(codes, scale, bits, to):
    """Codes of `bits` as codes of fewer bits: the nearest multiple of the new unit. There are no ties."""
    ratio = (2**bits - 1) // (2**to - 1)
    with np.errstate(over="ignore"):
        lowered = within(scale.astype(np.float32) * np.float32(ratio)).astype(np.float16)
    return np.rint(codes / ratio).astype(np.uint8), lowered


def numbers():
    rng = np.random.default_rng(20261125)
    x = rng.standard_normal((PAGE, DIM)).astype(np.float32)
    x[:, 3] *= 30  # a channel of outliers
    x[:, 7] = 2.5  # max == min by channel
    x[2] = -1.25  # and by token
    x[4] = np.arange(DIM) / 2 - 4  # ties
    x[5, 4], x[6, 9], x[7, 10] = np.nan, np.inf, -np.inf
    x[8] *= 1e5  # beyond f16
    x[9] *= 1e-6  # subnormal scales
    x[10] = 0
    x[11] = np.where(np.arange(DIM) % 2, -0.0, 0.0)
    x[12] = np.nan
    x[13:, 12] *= 1e-3
    return x


def text(a, kind):
    return np.ascontiguousarray(a).astype(kind).tobytes().hex()


def golden(x):
    sides, made = [], {}
    for name, bits, kind, axis, group in SIDES:
        codes, scale, zero = made[name] = encode(x, bits, kind, axis, group)
        sides.append({"name": name, "bits": bits, "kind": kind, "axis": axis, "group": group,
                      "codes": text(codes, "u1"), "scale": text(scale, "<f2"), "zero": text(zero, "<f2")})
    lowered = []
    for of, to in LOWER:
        codes, scale = lower(made[of][0], made[of][1], int(of), int(to))
        lowered.append({"from": int(of), "to": int(to), "codes": text(codes, "u1"), "scale": text(scale, "<f2")})
    return {"tokens": PAGE, "channels": DIM, "x": text(x, "<f4"), "sides": sides, "lowered": lowered}


def main():
    home = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../core/test/golden")
    if sys.argv[1:] == ["--check"]:
        with open(os.path.join(home, "codecs.json"), encoding="utf-8") as file:
            stored = json.load(file)
        x = np.frombuffer(bytes.fromhex(stored["x"]), "<f4").reshape(PAGE, DIM)
        if stored != golden(x):
            sys.exit("codecs.py: core/test/golden/codecs.json is not what this script writes for its x")
        return
    with open(os.path.join(sys.argv[1] if len(sys.argv) > 1 else home, "codecs.json"), "w", encoding="utf-8") as file:
        file.write(json.dumps(golden(numbers()), indent=0) + "\n")


if __name__ == "__main__":
    main()
