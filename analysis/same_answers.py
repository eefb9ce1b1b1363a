"""Do two result files have the same answers? Cells are matched by model, policy, parameters, task and seed.

    python3 analysis/same_answers.py results/serving_ragged.h5 results/serving_ragged_alone.h5

Prints a line per policy, and the first difference of each sample that differs. The exit code is 1 where one differs.
"""

import sys

import kvlab_results as kr

KEYS = ["model", "policy", "params", "task", "seed", "repeat"]


def answers(path):
    done = kr.summary(path).query("status == 'ok'")
    return {tuple(row[KEYS]): kr.cell(path, row["cell"])["samples"] for _, row in done.iterrows()}


def main(first, second):
    one, other = answers(first), answers(second)
    both = [key for key in one if key in other]
    if not both:
        raise SystemExit(f"got no cell that {first} and {second} both have, wanted one")
    differ = 0
    for key in both:
        a, b = one[key].set_index("sample"), other[key].set_index("sample")
        samples = a.index.intersection(b.index)
        wrong = [s for s in samples if a.output[s] != b.output[s]]
        differ += len(wrong)
        preempted = (a.preemptions[samples] > 0).sum()
        print(f"{key[1]}: {len(samples) - len(wrong)} of {len(samples)} answers are the same; {preempted} were preempted")
        for s in wrong:
            shorter = min(len(a.output[s]), len(b.output[s]))
            at = next((i for i in range(shorter) if a.output[s][i] != b.output[s][i]), shorter)
            print(f"  sample {s}: from character {at} on")
    return 1 if differ else 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    sys.exit(main(*sys.argv[1:]))
