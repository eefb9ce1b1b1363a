#!/usr/bin/env python3
"""Writes core/test/golden/policies/<model>.json: every policy's kept positions, pages, mass and logits on tiny models.

Usage: export_policies.py [core/test/golden [SmolLM2.gguf | --evicting | --heads | --retrieval | --offloading |
                                              --sampling | --others | --stages | --text [CASE ...]]]
Format: README.md in this folder. For the tiny models it tries token seeds until no selection depends on rounding.
With --evicting it writes only <model>-evicting.json, the cases of evicting_policies.py. The other groups do alike.
With --text it writes only recall.json: one case of each policy on real text, by the model datasets/models/recall.
With names of cases it writes these alone anew, and leaves the others in the file as they are.
With the GGUF it writes only smollm2.json: the same on the head of text/english.txt.
"""
import json
import os
import sys

import numpy as np
import torch

import coding_policies
import llama
import policies
import reference_policies as reference
import weights

PROMPT, FORCED, VOCAB = 80, 24, 320
BUDGET = {"tokens": 24}
SNAPKV = {"name": "snapkv", "budget": BUDGET, "window": 8, "kernel": 7, "pooling": "max", "group": "mean"}
QUEST = {"name": "quest", "budget": BUDGET, "page_size": 4, "group": "max", "dense_layers": 1, "last_page": False,
         "page_bounds": True, "scale": 1.0, "min_pages": 3}
CASES = {
    "full": {"name": "full"},
    "full_int8": {"name": "full", "codec": "int8"},
    "window": {"name": "window", "budget": BUDGET},
    "streaming_llm": {"name": "streaming_llm", "budget": BUDGET, "sinks": 4, "positions": "cache_relative"},
    "streaming_llm_original": {"name": "streaming_llm", "budget": BUDGET, "sinks": 4, "positions": "original"},
    "snapkv": SNAPKV,
    "snapkv_average": {**SNAPKV, "pooling": "average"},
    "snapkv_not_full": {**SNAPKV, "budget": {"tokens": 90}},
    "snapkv_pyramid": {**SNAPKV, "budget": {"tokens": 24, "split": "pyramid", "beta": 4}},
    "snapkv_adakv": {**SNAPKV, "budget": {"tokens": 24, "split": "adakv", "floor": 0.2}},
    "snapkv_int8": {**SNAPKV, "codec": "int8"},
    "h2o": {"name": "h2o", "budget": BUDGET, "heavy": 0.5},
    "knorm": {"name": "knorm", "budget": BUDGET},
    "quest": QUEST,
    "quest_mean": {**QUEST, "group": "mean"},
    "quest_sum": {**QUEST, "group": "sum"},
    "quest_softmax_mean": {**QUEST, "group": "softmax_mean"},
    "quest_last_page": {**QUEST, "last_page": True},
    "quest_mean_key": {**QUEST, "page_bounds": False},
}


# The threshold of RaaS lies where these models' attention does, at about 1 / 24.
CAKE = {"name": "cake", "budget": BUDGET, "window": 8, "gamma": 200.0, "kernel": 5, "pooling": "average", "every": 1}
SCISSORHANDS = {"name": "scissorhands", "budget": BUDGET, "window": 6, "recent": 4, "drop": 6}
RAAS = {"name": "raas_tokens", "budget": BUDGET, "threshold": 0.04}
LONG_RAAS = {**RAAS, "budget": {"tokens": 90}, "threshold": 0.012}
MORPHKV = {"name": "morphkv", "budget": BUDGET, "window": 8, "fusion": "max"}
KEYFORMER = {"name": "keyformer", "budget": BUDGET, "recent": 30, "steps": 16}
CRITICALKV = {**SNAPKV, "name": "criticalkv"}
ZIGZAGKV = {**SNAPKV, "name": "zigzagkv"}
EVICTING = {
    "cake": CAKE,
    "cake_mean_alone": {**CAKE, "gamma": 0.0},
    "cake_max": {**CAKE, "pooling": "max", "kernel": 7, "group": "max", "every": 5},
    "scissorhands": SCISSORHANDS,
    "scissorhands_short_window": {**SCISSORHANDS, "drop": 12},
    "scissorhands_long_window": {**SCISSORHANDS, "window": 12, "drop": 4},
    "scissorhands_each_head": {**SCISSORHANDS, "window": 8, "drop": 1, "each_head": True},
    "raas_tokens": RAAS,
    "raas_prompt_fits": LONG_RAAS,
    "raas_prompt_as_others": {**LONG_RAAS, "keep_prompt": False},
    "raas_max": {**RAAS, "group": "max", "threshold": 0.06, "every": 4, "sinks": 2, "window": 3},
    "raas_no_stamps": {**RAAS, "stamps": False},
    "keyformer": {**KEYFORMER, "noise": False},
    "keyformer_cold": {**KEYFORMER, "noise": False, "tau_init": 0.5, "tau_end": 0.5, "recent": 0, "every": 5},
    "keyformer_noise": {**KEYFORMER, "seed": 7},
    "keyformer_noise_in_prompt": {**KEYFORMER, "tau_init": 1.5, "every": 0, "seed": 7},
    "morphkv": MORPHKV,
    "morphkv_sum": {**MORPHKV, "fusion": "sum"},
    "morphkv_seldom": {**MORPHKV, "every": 5},
    "criticalkv": CRITICALKV,
    "criticalkv_first": {**CRITICALKV, "first_stage": 0.25, "pooling": "average", "kernel": 3},
    "zigzagkv": ZIGZAGKV,
    "zigzagkv_no_floor": {**ZIGZAGKV, "floor": 0.0, "mass": 0.5},
    "cake_over_layers": {**CAKE, "name": "cake_over_layers", "every": 0},
    "cake_over_layers_tuned": {**CAKE, "name": "cake_over_layers", "every": 0, "tau1": 1.6, "tau2": 0.4},
}

DUO = {"name": "duo_attention", "sinks": 3, "window": 14,
       "profile": {"gate": [[0.3, 0.9], [0.6, 0.1], [0.6, 0.0]]}}
SNAPKV_HEAD_PROFILE = {**SNAPKV, "budget": {"tokens": 24, "split": "head_profile", "weights": "gate", "floor": 0.25},
                       "profile": DUO["profile"]}
RAZOR = {"name": "razor_attention", "sinks": 2, "window": 12, "window_share": 0.0, "induction": 0.3, "echo": 0.2,
         "compensation": False, "profile": {"echo": [[0.1, 0.2], [0.7, 0.1], [0.7, 0.3]], "induction": [[0.2, 0.5], [0.1, 0.5], [0.6, 0.3]]}}
OMNIKV = {"name": "omnikv", "budget": {"tokens": 20}, "filter_layers": "0", "wait_layers": 0}
SPARQ = {"name": "sparq", "budget": {"tokens": 20}}
HEADS = {
    "duo_attention": DUO,
    "duo_attention_sparse": {**DUO, "sparsity": 0.75},
    "duo_attention_no_sinks": {**DUO, "attention_sinks": False},
    "duo_attention_whole_prompts": {**DUO, "prompt_mask": False},
    "razor_attention": RAZOR,
    "razor_attention_share": {**RAZOR, "window_share": 0.2},
    "razor_attention_prompt": {**RAZOR, "while_decoding": False},
    "omnikv": OMNIKV,
    "omnikv_softmax": {**OMNIKV, "score_by": "softmax_before_last"},
    "omnikv_own": {**OMNIKV, "shared_choice": False},
    "sparq": SPARQ,
    "sparq_rank": {**SPARQ, "rank": 6, "local": 0.0},
    "sparq_no_scale": {**SPARQ, "norm_scale": False},
}

ARKVALE = {"name": "arkvale", "budget": {"tokens": 48}, "page_size": 4, "sinks": 6, "window": 6, "top": 16,
           "dense_layers": 1}
TWILIGHT = {"name": "twilight", "page_size": 4, "tokens": 32, "dense_layers": 1}
CLUSTERKV = {"name": "clusterkv", "budget": {"tokens": 30}, "sinks": 4, "tokens_per_cluster": 8, "iterations": 6,
             "window": 7, "window_clusters": 2, "dense_layers": 1}
SQUEEZED = {"name": "squeezed_attention", "percent_clusters": 15.0, "percentile": 0.8, "window": 12, "iterations": 6}
LSERVE = {"name": "lserve", "page_size": 4, "parts": 2, "tokens": 24, "sinks": 3, "window": 14, "profile": DUO["profile"]}
INFLLM = {"name": "infllm", "prompt_retrieval": False, "budget": {"tokens": 64}, "page_size": 4, "sinks": 5, "window": 14,
          "block": 8, "top": 4, "representatives": 3}
INFLLM_PROMPT = {**INFLLM, "prompt_retrieval": True, "prompt_chunk": 12, "top": 2}
INFINIGEN = {"name": "infinigen", "skew": False, "alpha": 1.0, "dense_layers": 1}
INFINIGEN_SKEW = {**INFINIGEN, "skew": True, "alpha": 3.0, "cap": 12}
SHADOWKV = {"name": "shadowkv", "budget": {"tokens": 40}, "rank": 12, "chunk": 4, "outliers": 3, "local_chunks": 2}
THINK = {"name": "think", "ratio": 0.4, "window": 16, "recent": 10}
FASTGEN = {"name": "fastgen", "recovery": 0.8, "sinks": 2}
RETRIEVAL = {
    "arkvale": ARKVALE,
    "arkvale_greatest_radius": {**ARKVALE, "mean_radius": False},
    "arkvale_oldest_leave": {**ARKVALE, "keep_best": False},
    "arkvale_best_alone": {**ARKVALE, "resident": False, "group": "max"},
    "arkvale_softmax_mean": {**ARKVALE, "resident": False, "group": "softmax_mean", "scale": 0.25, "sinks": 0, "window": 1},
    "twilight": TWILIGHT,
    "twilight_exact": {**TWILIGHT, "estimate": "exact", "p": 0.6, "group": "mean"},
    "twilight_share": {**TWILIGHT, "tokens": 0, "share": 0.3},
    "twilight_all": {**TWILIGHT, "top_p": False},
    "clusterkv": CLUSTERKV,
    "clusterkv_count": {**CLUSTERKV, "clusters": 6, "window": 0, "seed": 3},
    "clusterkv_first_keys": {**CLUSTERKV, "iterations": 0, "sinks": 0, "dense_layers": 0},
    "squeezed_attention": SQUEEZED,
    "squeezed_attention_half": {**SQUEEZED, "percentile": 0.5, "window": 8, "seed": 5},
    "squeezed_attention_two_levels": {**SQUEEZED, "percent_coarse": 5.0, "percentile_coarse": 0.4, "percentile": 0.6},
    "lserve": LSERVE,
    "lserve_prompt_window": {**LSERVE, "prompt_window": 20},
    "lserve_each_step": {**LSERVE, "reuse": False, "parts": 3, "group": "mean"},
    "lserve_softmax_mean": {**LSERVE, "group": "softmax_mean", "scale": 0.5, "sinks": 0},
    "lserve_single_pages": {**LSERVE, "parts": 1, "choose_every": 2, "sparsity": 0.25, "tokens": 82},
    "infllm": INFLLM,
    "infllm_own_positions": {**INFLLM, "clamped_scores": False, "positions": "original"},
    "infllm_clamped_scores": {**INFLLM, "positions": "original"},
    "infllm_clamped_attention": {**INFLLM, "clamped_scores": False},
    "infllm_all_keys": {**INFLLM, "local_scores": False, "top": 2, "sinks": 0},
    "infllm_prompt": INFLLM_PROMPT,
    "infllm_prompt_own_positions": {**INFLLM_PROMPT, "clamped_scores": False, "positions": "original", "prompt_chunk": 7},
    "infinigen_cap": {**INFINIGEN, "alpha": 3.0, "cap": 12, "partial_ratio": 0.4},
    "infinigen_share": {**INFINIGEN, "cap_share": 0.25, "alpha": 2.0},
    "shadowkv": SHADOWKV,
    "shadowkv_exact": {**SHADOWKV, "low_rank": False, "group": "mean"},
    "shadowkv_no_outliers": {**SHADOWKV, "outlier_chunks": False, "rank": 24, "logit_dim": 128},
    "think": THINK,
    "think_all_keys": {**THINK, "ratio": 0.6, "window": 4, "recent": 0},
    "fastgen": FASTGEN,
    "fastgen_last_queries": {**FASTGEN, "queries": 8, "recovery": 0.81},
    "fastgen_no_kinds": {**FASTGEN, "special": False, "punctuation": False, "sinks": 0},
    "fastgen_no_window": {**FASTGEN, "local": False, "recovery": 0.79},
    "fastgen_kinds_alone": {**FASTGEN, "recovery": 0.14},
    "fastgen_punctuation": {**FASTGEN, "recovery": 0.29, "whole": 79},
    "fastgen_no_frequency": {**FASTGEN, "frequency": False, "window_share": 0.5},
}

FREEKV = {"name": "freekv", "budget": {"tokens": 48}, "page_size": 4, "sinks": 6, "window": 10, "threshold": 0.2}
STABLE = {"name": "flexicache", "budget": {"tokens": 40}, "page_size": 4, "rerank_every": 4}
FLEXICACHE = {**STABLE, "profile": {"unstable": [[1, 0], [0, 1], [1, 0]]}}
OFFLOADING = {
    "freekv": FREEKV,
    "freekv_max": {**FREEKV, "group": "max", "sinks": 0, "window": 1, "dense_layers": 0},
    "freekv_scale": {**FREEKV, "scale": 0.25, "threshold": 0.0},
    "freekv_no_correction": {**FREEKV, "correction": False},
    "freekv_no_speculation": {**FREEKV, "speculation": False},
    "flexicache": FLEXICACHE,
    "flexicache_waits": {**FLEXICACHE, "overlap": False, "group": "mean"},
    "flexicache_newest_page": {**FLEXICACHE, "keep_new": False, "group": "softmax_mean", "scale": 0.5, "dense_layers": 1},
    "flexicache_stable": {**STABLE, "unstable_heads": False},
    "flexicache_unaware": {**FLEXICACHE, "stability_aware": False},
    "flexicache_no_reranking": {**FLEXICACHE, "reranking": False, "frame_reuse": False, "group": "sum"},
}

MAGICPIG = {"name": "magicpig", "bits": 4, "tables": 16, "sinks": 3, "window": 10, "full_layers": "0"}
SUBGEN = {"name": "subgen", "radius": 4.0, "clusters": 6, "samples": 2, "values": 8, "sinks": 2, "window": 12}
SAMPLING = {
    "magicpig": MAGICPIG,
    "magicpig_one_collision": {**MAGICPIG, "collisions": 1, "bits": 5, "seed": 3, "full_layers": ""},
    "magicpig_three_collisions": {**MAGICPIG, "collisions": 3, "sinks": 0, "bits": 3, "window": 1},
    "magicpig_no_correction": {**MAGICPIG, "correction": False},
    "magicpig_no_bits": {**MAGICPIG, "bits": 0},
    "subgen": SUBGEN,
    "subgen_one_cluster": {**SUBGEN, "radius": 1000.0, "seed": 5},
    "subgen_many_clusters": {**SUBGEN, "radius": 0.0, "clusters": 200, "samples": 1, "values": 20, "sinks": 0},
    "subgen_no_sketch": {**SUBGEN, "sketch": False},
}

TOVA = {"name": "tova", "budget": BUDGET}
KEYDIFF = {"name": "keydiff", "budget": BUDGET}
RANDOM = {"name": "random", "budget": BUDGET, "seed": 3}
EXPECTED = {"name": "expected_attention", "budget": BUDGET, "horizon": 64}
ORACLE = {"name": "oracle", "budget": BUDGET, "page_size": 4, "dense_layers": 1, "min_pages": 3}
HETEROCACHE = {"name": "heterocache", "budget": {"tokens": 56}, "threshold": 0.55, "check_every": 3, "window": 3,
               "profile": {"role": [[2, 3], [3, 2], [0, 1]], "pivot_of": [[-1, 0], [1, -1], [-1, -1]],
                           "stable": [[0.8, 0.6], [0.3, 0.9], [0.7, 0.4]]}}
UNSTABLE = {**HETEROCACHE["profile"], "stable": [[0.8, 0.02], [0.3, 0.9], [0.7, 0.4]]}
MINICACHE = {"name": "minicache", "start": 0.5, "t": 0.6, "exact": 0.05, "retained": "count"}
LEANKV = {"name": "leankv", "page_size": 4, "window": 12, "high_from": 1.0, "low_from": 0.7}
KVQUANT = {"name": "kvquant", "bits": 3, "outlier_share": 0.05}
ORACLE_EVICT = {"name": "oracle_evict", "budget": BUDGET}
RAAS_PAGES = {"name": "raas", "budget": {"tokens": 26}, "page_size": 4, "threshold": 0.03}
OTHERS = {
    "tova": TOVA,
    "tova_keep_last": {**TOVA, "keep_last": True},
    "tova_seldom": {**TOVA, "every": 5},
    "keydiff": KEYDIFF,
    "keydiff_decoding": {**KEYDIFF, "every": 3},
    "random": RANDOM,
    "random_redraw": {**RANDOM, "redraw": True, "sinks": 2, "recent": 5, "every": 2},
    "expected_attention": EXPECTED,
    "expected_attention_mean_query": {**EXPECTED, "covariance": False, "sinks": 0, "epsilon": 0.01},
    "expected_attention_no_values": {**EXPECTED, "values": False, "horizon": 512},
    "oracle": ORACLE,
    "oracle_max": {**ORACLE, "group": "max", "dense_layers": 0},
    "oracle_tokens": {**ORACLE, "page_size": 1},
    "heterocache": HETEROCACHE,
    "heterocache_sliding": {**HETEROCACHE, "check_every": 1, "window": 4, "stagger": False, "kernel": 3},
    "heterocache_no_retrieval": {**HETEROCACHE, "retrieval": False, "allocation": False},
    "heterocache_excess": {**HETEROCACHE, "budget": {"tokens": 70}, "profile": UNSTABLE},
    "heterocache_excess_is_lost": {**HETEROCACHE, "budget": {"tokens": 70}, "profile": UNSTABLE, "fill": False, "asynchrony": False},
    "minicache": MINICACHE,
    "minicache_all": {**MINICACHE, "start": 0.0, "t": 0.3, "exact": 0.0},
    "leankv": LEANKV,
    "leankv_token_unit": {**LEANKV, "unit": "i", "window": 6, "high_from": 0.8, "low_from": 0.4},
    "leankv_no_low": {**LEANKV, "high_from": 0.7},
    "leankv_paper": {**LEANKV, "window": 6, "high_from": 0.8, "low_from": 0.4, "unit": "i", "queries": "all",
                     "rule": "algorithm_1", "age": "counted"},
    "razor_attention_compensation": {**RAZOR, "compensation": True},
    "razor_attention_compensation_prompt": {**RAZOR, "compensation": True, "while_decoding": False},
    "kvquant": KVQUANT,
    "kvquant_2_bits": {**KVQUANT, "bits": 2, "dense_tokens": 5},
    "kvquant_2_bits_no_norm": {**KVQUANT, "bits": 2, "q_norm": False},
    "kvquant_no_outliers": {**KVQUANT, "outliers": False, "bits": 4},
    "kvquant_uniform": {**KVQUANT, "nonuniform": False},
    "kvquant_no_calibration": {**KVQUANT, "calibration": False, "bits": 4, "outlier_share": 0.2},
    "kvquant_generated": {**KVQUANT, "generated": True, "dense_tokens": 2},
    "oracle_evict": ORACLE_EVICT,
    "oracle_evict_once": {**ORACLE_EVICT, "every": 0},
    "oracle_evict_pins": {**ORACLE_EVICT, "sinks": 3, "recent": 6, "every": 4},
    "raas": RAAS_PAGES,
    "raas_prompt_fits": {**RAAS_PAGES, "budget": {"tokens": 88}, "threshold": 0.02, "page_size": 2, "scaled": True,
                         "window": 3},
    "raas_prompt_as_others": {**RAAS_PAGES, "budget": {"tokens": 84}, "threshold": 2e-3, "keep_prompt": False,
                              "dense_layers": 1, "sinks": 3},
    "full_int4": {"name": "full", "codec": "int4"},
    "full_atom": {"name": "full", "codec": "atom"},
    "keyformer_one_noise": {**KEYFORMER, "seed": 7, "fresh_noise": False},
    "zigzagkv_window_counts": {**ZIGZAGKV, "mass": 0.95, "window_counts": True},
    "omnikv_uniform": {**OMNIKV, "score_by": "uniform", "queries": 6},
    "omnikv_exp": {**OMNIKV, "score_by": "exp", "queries": 2, "shared_choice": False},
    "fastgen_least": {**FASTGEN, "group": "min"},
    "infinigen_skew": INFINIGEN_SKEW,
    "knorm_head_profile": {"name": "knorm", "budget": {"tokens": 40, "split": "head_profile", "weights": "gate", "floor": 0.0},
                           "profile": {"gate": [[0.5, 3.0], [0.0, 0.25], [2.0, 0.5]]}},
}

OVER_QUEST = {**QUEST, "name": "quest+twilight", "pruner": {"p": 0.6, "dense_layers": 1}}
OVER_SNAPKV = {**SNAPKV, "name": "snapkv+criticalkv", "rescorer": {}}
OVER_SNAPKV_BY_HEADS = {**OVER_SNAPKV, "budget": {"tokens": 24, "split": "adakv", "floor": 0.2}, "rescorer": {"first_stage": 0.3}}
STAGES = {
    "quest_twilight": OVER_QUEST,
    "quest_twilight_pinned": {**OVER_QUEST, "last_page": True, "pruner": {"p": 0.85, "dense_layers": 1}},
    "sparq_twilight": {**SPARQ, "name": "sparq+twilight", "pruner": {"p": 0.7, "dense_layers": 0}},
    "full_twilight": {"name": "full+twilight", "pruner": {"p": 0.5, "dense_layers": 1}},
    "snapkv_criticalkv": OVER_SNAPKV,
    "snapkv_criticalkv_adakv": OVER_SNAPKV_BY_HEADS,
    "snapkv_criticalkv_pyramid": {**OVER_SNAPKV, "budget": {"tokens": 24, "split": "pyramid", "beta": 4}},
    "h2o_criticalkv": {"name": "h2o+criticalkv", "budget": BUDGET, "heavy": 0.5, "rescorer": {"first_stage": 0.25}},
}

FEW_STEPS = {"full_int4": 2, "full_atom": 2, "kvquant_generated": 3, "keyformer_one_noise": 3, "zigzagkv_window_counts": 1, "omnikv_uniform": 4, "omnikv_exp": 2, "fastgen_least": 2,
             "infinigen_skew": 3, "knorm_head_profile": 2, "infllm_prompt": 2, "infllm_prompt_own_positions": 2, "raas": 12,
             "raas_prompt_fits": 10, "raas_prompt_as_others": 8}
LONG_LISTS = {spec["name"] for specs in (RETRIEVAL, OFFLOADING, SAMPLING, OTHERS, STAGES) for name, spec in specs.items()
              if name not in FEW_STEPS}  # fewer steps

# Real text, on a model of 8 layers and 4 KV heads. PROFILE's rows are those of a layer.
TEXT_PROMPT, TEXT_FORCED = 120, 6
PROFILE = {"gate": [[.3, .9, .1, .5], [.6, .1, .8, .2], [.6, .0, .4, .7], [.2, .5, .5, .9]] * 2,
           "induction": [[.2, .5, .1, .3], [.1, .5, .6, .0], [.6, .3, .2, .4], [.9, .1, .0, .8]] * 2,
           "echo": [[.1, .2, .9, .0], [.7, .1, .3, .2], [.7, .3, .1, .6], [.0, .4, .2, .5]] * 2,
           "role": [[2, 3, 3, 1], [0, 2, 3, 3], [3, 2, 0, 0], [2, 3, 2, 3]] * 2,
           "pivot_of": [[-1, 0, 0, -1], [-1, -1, 1, 1], [1, -1, -1, -1], [-1, 0, -1, 2]] * 2,
           "stable": [[.8, .6, .4, .3], [.7, .9, .5, .6], [.3, .8, .7, .9], [.6, .4, .8, .7]] * 2,
           "unstable": [[1, 0, 0, 0], [0, 1, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0]] * 2}
TEXT = {name: specs[name] for specs, names in (
    (CASES, "window streaming_llm snapkv snapkv_pyramid snapkv_adakv h2o knorm quest"),
    (EVICTING, "cake scissorhands raas_tokens keyformer keyformer_noise morphkv criticalkv zigzagkv cake_over_layers"),
    (HEADS, "duo_attention razor_attention omnikv sparq"),
    (RETRIEVAL, "arkvale twilight clusterkv squeezed_attention infllm lserve infinigen_share shadowkv think fastgen"),
    (OFFLOADING, "freekv flexicache flexicache_waits"),
    (SAMPLING, "magicpig subgen"),
    (OTHERS, "tova keydiff random expected_attention oracle heterocache minicache leankv razor_attention_compensation kvquant "
             "oracle_evict raas"),
) for name in names.split()}
BY_TOTAL = {"tokens": 24, "exact_total": True}  # as the plugins' defaults divide
TEXT |= {
    "omnikv_two_filters": {**OMNIKV, "filter_layers": "1,4", "wait_layers": 1},
    "clusterkv_generated": {**CLUSTERKV, "window": 3},
    "squeezed_attention_two_levels": RETRIEVAL["squeezed_attention_two_levels"],
    "freekv_digest": {**FREEKV, "summary": "centre_radius", "group": "mean", "dense_layers": 0},
    "freekv_scaled": {**FREEKV, "scores": "scaled"},
    "flexicache_first_step": {**FLEXICACHE, "first_query": "step"},
    "heterocache_by_position": {**HETEROCACHE, "recall_order": "position", "threshold": 0.95, "check_every": 2},
}
BRIEF = {  # two steps
    "k_center": {"name": "k_center", "budget": BUDGET, "sinks": 2},
    "sparq_mean_value_of_groups": {**SPARQ, "mean_value_of_groups": True},
    "minicache_threshold": {**MINICACHE, "exact": 0.2, "retained": "threshold"},
    "quest_twilight": OVER_QUEST,
    "snapkv_head_profile": SNAPKV_HEAD_PROFILE,
    "infllm_prompt": INFLLM_PROMPT,
    "infinigen_skew": INFINIGEN_SKEW,
    "snapkv_criticalkv": OVER_SNAPKV,
    "snapkv_criticalkv_adakv": OVER_SNAPKV_BY_HEADS,
    "snapkv_criticalkv_pyramid": STAGES["snapkv_criticalkv_pyramid"],
    "h2o_criticalkv": STAGES["h2o_criticalkv"],
    "sparq_twilight": STAGES["sparq_twilight"],
    "full_twilight": STAGES["full_twilight"],
    "snapkv_adakv_total": {**SNAPKV, "budget": {**BY_TOTAL, "split": "adakv", "floor": 0.2}},
    "snapkv_adakv_group_first": {**SNAPKV, "group_first": True, "budget": {**BY_TOTAL, "split": "adakv", "floor": 0.5}},
    "snapkv_pyramid_total": {**SNAPKV, "budget": {**BY_TOTAL, "split": "pyramid", "beta": 4}},
    "zigzagkv_each_head": {**ZIGZAGKV, "each_head": True},
    "leankv_greatest_score": {**LEANKV, "greatest": "score"},
    "razor_attention_counts_once": {**RAZOR, "compensation": True, "counts_once": True},
}
TEXT |= BRIEF
TEXT = {name: {**spec, **({"profile": {array: PROFILE[array] for array in spec["profile"]}} if "profile" in spec else {})}
        for name, spec in TEXT.items()}

GROUPS = {"": CASES, "--evicting": EVICTING, "--heads": HEADS, "--retrieval": RETRIEVAL, "--offloading": OFFLOADING,
          "--sampling": SAMPLING, "--others": OTHERS, "--stages": STAGES}

REAL = {name: {"name": name, "budget": {"tokens": 64}}
        for name in ("streaming_llm", "snapkv", "h2o", "knorm", "quest")}
REAL_PROMPT, REAL_FORCED = 160, 2


def selections(result, spec):
    pages = [[[] if layer is None else [head.tolist() for head in layer] for layer in step] for step in result.pages]
    kept, read = ([[[head.tolist() for head in layer] for layer in step] for step in lists]
                  for lists in (result.kept, result.read))
    return kept, pages, read if policies.POLICIES[spec["name"]].lists_tokens else []


def evicted(kept, seen):
    """The lists of positions, or an empty list where every head keeps everything."""
    return [] if all(len(head) == seen for layer in kept for head in layer) else kept


def perturbed(model, seed, by=1e-5):
    """The model with weights off by 1e-5: ten times the error of f32 arithmetic in another order."""
    other, generator = llama.Llama.__new__(llama.Llama), torch.Generator().manual_seed(seed)
    other.__dict__.update(model.__dict__)
    other.w = {name: w * (1 + by * torch.randn(w.shape, generator=generator)) for name, w in model.w.items()}
    return other


def rounded(values, digits=7):
    return [float(f"{value:.{digits}g}") for value in values]


def doubtful(a, b):
    """[layer, kv_head] pairs whose lists differ anywhere between two runs' selections ([step][layer][kv_head])."""
    pairs = [(layer, head) for mine, other in zip(a, b) for step, twin in zip(mine, other)
             for layer, heads in enumerate(step) for head in range(len(heads)) if heads[head] != twin[layer][head]]
    return [list(pair) for pair in sorted(set(pairs))]


def run_case(model, others, name, spec, prompt, forced, logit_ids):
    result = reference.run(model, spec, prompt, forced)
    kept, pages, tokens = selections(result, spec)
    runs = [reference.run(other, spec, prompt, forced) for other in others]
    mine, *theirs = [[*selections(run, spec), [run.decisions]] for run in (result, *runs)]
    doubts = sum((doubtful(mine, other) for other in theirs), [])
    logits = torch.stack(result.logits)
    return {"name": name, "policy": spec, "doubtful": doubts, "kept_prompt": evicted(kept[0], len(prompt)),
            "kept_end": evicted(kept[-1], len(prompt) + len(forced)),
            **({"prompt_pages": result.prompt_pages} if any(result.prompt_pages) else {}),
            "pages": pages if any(any(step) for step in pages) else [],
            **({"tokens": tokens} if tokens else {}),
            "mass": [rounded(step) for step in result.mass],
            "output_error": [rounded(step) for step in result.output_error],
            "max_abs": rounded(logits.abs().amax(-1).tolist()),
            "logits": [rounded(step, 6) for step in logits[:, logit_ids].tolist()]}


def export_tiny(path, group, only):
    """Cases of the first group have the same tokens. Others have their own, since evictions in all steps tie more often."""
    specs = {name: spec for name, spec in GROUPS[group].items() if not only or name in only}
    model, logit_ids = llama.Llama(path), list(range(0, VOCAB, 20))
    others = [llama.Llama(path, torch.float64), perturbed(model, 0), perturbed(model, 1)]
    near = [others[0], perturbed(model, 0, 2e-6), perturbed(model, 1, 2e-6)]  # thousands of codes: some always lie at an edge
    many = others + [perturbed(model, seed) for seed in range(2, 10)]  # counts of shares at a threshold: each share is a tie to be
    document = {"version": 1, "model": "tiny/" + os.path.basename(path)}
    other = np.random.default_rng(1000).integers(2, VOCAB, 200).tolist()
    specs = {name: of_shape(spec, model, other) for name, spec in specs.items()}
    if group == "":
        text, cases = cases_of(model, others, specs, logit_ids)
        return {**document, **text, "logit_ids": logit_ids, "cases": cases}
    cases = []
    for name, spec in specs.items():
        rounds = {"kvquant": near, "scissorhands": many}.get(spec["name"], others)
        text, (case,) = cases_of(model, rounds, {name: spec}, logit_ids)
        cases.append({**case, **text})
    return {**document, "logit_ids": logit_ids, "cases": cases}


def of_shape(spec, model, other):
    """A profile has a row for each layer of the model, a number for each KV head. KVQuant's comes from `other`, the ids of a text."""
    if spec["name"] == "infinigen" and spec["skew"]:
        return {**spec, "sample": other[:150]}
    if spec["name"] == "kvquant" and spec.get("calibration", True):
        return {**spec, "profile": coding_policies.calibrated(model, other, spec["outlier_share"], spec.get("outliers", True))}
    cut = {name: [row[:model.kv_heads] for row in rows[:model.layers]] for name, rows in spec.get("profile", {}).items()}
    return {**spec, "profile": cut} if cut else spec


def cases_of(model, others, specs, logit_ids):
    """The first seed whose tokens leave no near tie in any of the cases. Returns the tokens and the cases."""
    names = {spec["name"] for spec in specs.values()}
    steps = min(FEW_STEPS.get(name, 16 if names & LONG_LISTS else FORCED) for name in specs)

    def drawn(seed):
        ids = np.random.default_rng(seed).integers(2, VOCAB, PROMPT + FORCED).tolist()
        if "fastgen" in names:
            ids[20::35] = [0] * len(ids[20::35])  # special tokens
        return {"seed": seed, "prompt": ids[:PROMPT], "forced": ids[PROMPT:PROMPT + steps]}
    return without_doubts(model, others, specs, logit_ids, map(drawn, range(100)))


def without_doubts(model, others, specs, logit_ids, texts):
    for text in texts:
        cases = []
        for name, spec in specs.items():
            cases.append(run_case(model, others, name, spec, text["prompt"], text["forced"], logit_ids))
            if cases[-1]["doubtful"]:
                start = next(iter(text.items()))
                print(f"  {start}: {name} depends on rounding: {cases[-1]['doubtful']}", flush=True)
                break
        else:
            return text, cases
    raise SystemExit("no text without a near tie")


def export_text(golden, only):
    """The texts begin at tokens of text/english.txt, the first at which no selection of the case depends on rounding."""
    with open(os.path.join(golden, "recall_logits.json")) as file:
        ids, code = (sequence["ids"] for sequence in json.load(file)["sequences"][:2])
    folder, logit_ids = "../../../datasets/models/recall", list(range(0, 4096, 256))
    path = os.path.join(golden, folder)
    model = llama.Llama(path)
    others = [llama.Llama(path, torch.float64), perturbed(model, 0), perturbed(model, 1)]
    cases, most = [], len(ids) - TEXT_PROMPT - TEXT_FORCED
    for name, spec in TEXT.items():
        if only and name not in only:
            continue
        spec = of_shape(spec, model, code[:200])

        def part(start):
            end = start + TEXT_PROMPT
            return {"start": start, "prompt": ids[start:end], "forced": ids[end:end + (2 if name in BRIEF else TEXT_FORCED)]}
        # A text whose codes of kvquant do not depend on rounding is not to be found.
        text, (case,) = without_doubts(model, [] if name == "kvquant" else others, {name: spec}, logit_ids,
                                       map(part, range(0, most, 4)))
        cases.append({**case, "start": text["start"], "forced": text["forced"]})
    return {"version": 1, "model": folder, "tokens": TEXT_PROMPT, "logit_ids": logit_ids, "cases": cases}


def export_real(golden, path):
    with open(os.path.join(golden, "text/english.txt"), encoding="utf-8", newline="") as file:
        ids = weights.gguf_tokenizer(path).encode(file.read(), add_special_tokens=False).ids
    model, logit_ids = llama.Llama(path), list(range(0, 49152, 768))
    exact = llama.Llama(path, torch.float64)
    prompt, forced = ids[:REAL_PROMPT], ids[REAL_PROMPT:REAL_PROMPT + REAL_FORCED]
    cases = []
    for name, spec in REAL.items():
        cases.append(run_case(model, [exact], name, spec, prompt, forced, logit_ids))
        print(f"  {name}: doubtful {cases[-1]['doubtful']}", flush=True)
    return {"version": 1, "model": "SmolLM2-135M-Instruct.Q4_1.gguf", "seed": 0, "prompt": prompt,
            "forced": forced, "logit_ids": logit_ids, "cases": cases}


def main():
    golden = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(__file__), "../../core/test/golden")
    os.makedirs(os.path.join(golden, "policies"), exist_ok=True)
    group = sys.argv[2] if len(sys.argv) > 2 else ""
    only = sys.argv[3:]
    unknown = set(only) - set(TEXT if group == "--text" else GROUPS.get(group, ()))
    if unknown:
        raise SystemExit(f"got cases {', '.join(sorted(unknown))}, wanted cases of the group")
    if group == "--text":
        return save(golden, "recall", export_text(golden, only), TEXT if only else ())
    if group not in GROUPS:
        return save(golden, "smollm2", export_real(golden, group))
    for name in ("llama-gqa3", "llama-gqa4-rope3"):
        document = export_tiny(os.path.join(golden, "tiny", name), group, only)
        save(golden, name + group.replace("--", "-"), document, GROUPS[group] if only else ())


def packed(value):
    """Ascending numbers as text, "@0-5,9": the files are a third as large. policy_golden_test.cpp reads both forms."""
    if isinstance(value, dict):
        return {k: packed(v) for k, v in value.items()}
    if not isinstance(value, list):
        return value
    ascending = all(type(x) is int and x >= 0 for x in value) and all(a < b for a, b in zip(value, value[1:]))
    if len(value) < 3 or not ascending:
        return [packed(x) for x in value]
    runs = []
    for x in value:
        if runs and x == runs[-1][1] + 1:
            runs[-1][1] = x
        else:
            runs.append([x, x])
    return "@" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def save(golden, name, document, order=()):
    """order: the group's cases, where those of the document join or replace those in the file."""
    out = os.path.join(golden, "policies", name + ".json")
    cases = written = document.pop("cases")
    if order:
        with open(out) as file:
            former = json.load(file)["cases"]
        all_cases = {case["name"]: case for case in former + cases}
        written = [all_cases[case] for case in order if case in all_cases]
    with open(out, "w") as file:
        file.write("{" + "".join(f"{json.dumps(k)}: {json.dumps(v)},\n " for k, v in document.items()))
        lines = ",\n".join("  " + json.dumps(packed(case), separators=(",", ":")) for case in written)
        file.write(f'"cases": [\n{lines}\n]}}\n')
    print(f"{name}: seed {document.get('seed', 'of each case')}, {os.path.getsize(out)} bytes")
    for case in cases:
        print(f"  {case['name']}: mass {np.mean(case['mass']):.3f}, error {np.mean(case['output_error']):.3f}")


if __name__ == "__main__":
    main()
