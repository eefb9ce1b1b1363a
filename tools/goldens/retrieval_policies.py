"""Policies that keep everything and read a part of it, in plain torch, from the papers' method descriptions.

Think and FastGen are here, too: one changes the prompt's keys, the other gives each head a rule of what it keeps.
"""
import json
import math
import os
import string

import torch
import torch.nn.functional as F

import policies
from evicting_policies import numbers
from head_policies import DuoAttention
from policies import Full, group_reduce, top


def pages_to_tokens(pages, size, seen):
    """Ascending positions of these pages of a text of `seen` tokens."""
    return torch.cat([torch.arange(page * size, min((page + 1) * size, seen)) for page in sorted(pages)])


# --- pages ---------------------------------------------------------------------------------------------------------

def box_scores(q, pages, mean_radius):
    """q [G, D], pages [(tokens, D)]: [G, pages], the greatest product of a query with a point of a page's box.

    The box has the centre (max + min) / 2. Its radius is the keys' mean distance from the centre, or their greatest."""
    scores = []
    for keys in pages:
        centre = (keys.amax(0) + keys.amin(0)) / 2
        away = (keys - centre).abs()
        radius = away.mean(0) if mean_radius else away.amax(0)
        scores.append(torch.maximum(q * (centre + radius), q * (centre - radius)).sum(-1))
    return torch.stack(scores, -1)


def resident_after(resident, must, scores, room):
    """Pages on the device after those of `must` came: of the others the lowest scores leave, until `room` pages are left.

    scores: {page: number}, of pages that may leave."""
    stay = max(0, room - len(must))
    others = sorted(resident - must, key=lambda page: (scores[page], page))
    return must | set(others[max(0, len(others) - stay):])


class ArkVale(Full):
    """A step fetches its best pages. Attention reads all pages on the device, and the lowest of them leave for others."""

    def configure(self, spec):
        self.page, self.dense = spec.get("page_size", 16), spec.get("dense_layers", 2)
        self.sinks, self.window, self.most = spec.get("sinks", 64), spec.get("window", 33), spec.get("top", 1280)
        self.group, self.scale = spec.get("group", "mean"), spec.get("scale", 1.0)
        self.mean_radius, self.keep_best = spec.get("mean_radius", True), spec.get("keep_best", True)
        self.reads_resident = spec.get("resident", True)
        most_of_window = (self.window + self.page - 2) // self.page + 1  # pages
        self.pinned = (-(-self.sinks // self.page) + most_of_window) * self.page  # tokens
        self.device = {}  # (layer, KV head): pages

    def fetch(self, layer, kv, q, keys, tokens):
        """q [G, D] of the newest token, keys [t, D]. Returns the best pages, of so many tokens, and the pinned ones."""
        seen, size = len(keys), self.page
        parts = keys.split(size)
        between = range(-(-self.sinks // size), max(seen - self.window, 0) // size)
        pinned = set(range(len(parts))) - set(between)
        score, best = torch.zeros(0), set()
        if len(between):
            score = box_scores(q, parts[between[0]:between[-1] + 1], self.mean_radius)
            if self.group == "softmax_mean":
                score = (score * self.scale).softmax(-1)
            score = group_reduce(score, 1, "mean" if self.group == "softmax_mean" else self.group)[0]
            best = {between[i] for i in top(score, max(1, tokens // size)).tolist()}
        order = {page: score[i].item() if self.keep_best else page for i, page in enumerate(between)}
        must = best | pinned
        here = self.device.get((layer, kv), set(range(len(parts)))) | {len(parts) - 1}
        self.device[layer, kv] = resident_after(here, must, order, self.tokens // size)
        return must

    def prompt(self, layer, prompt):
        if layer >= self.dense:
            for kv in range(self.model.kv_heads):
                queries = prompt.q[kv * self.model.group:(kv + 1) * self.model.group, -1]
                self.fetch(layer, kv, queries, prompt.k[kv], self.tokens - self.pinned)
        return super().prompt(layer, prompt)

    def select(self, layer, q, k, kept):
        if layer < self.dense:
            return kept, None
        read, chosen = [], []
        for kv in range(self.model.kv_heads):
            queries = q[kv * self.model.group:(kv + 1) * self.model.group]
            must = self.fetch(layer, kv, queries, k[kv], min(self.most, self.tokens // 2, self.tokens - self.pinned))
            pages = self.device[layer, kv] if self.reads_resident else must
            chosen.append(torch.tensor(sorted(pages)))
            read.append(pages_to_tokens(pages, self.page, k.shape[1]))
        return read, chosen


def group_scores(scores, parts):
    """The best score of each `parts` neighbouring pages; the last group may have fewer."""
    return torch.stack([some.amax() for some in scores.split(parts)])


class LServe(DuoAttention):
    """Streaming heads, and heads that read groups of pages. A choice serves until the text has so many tokens more."""

    def configure(self, spec):
        super().configure(spec)
        self.page, self.parts, self.most = spec.get("page_size", 16), spec.get("parts", 4), spec.get("tokens", 4096)
        self.every, self.group = spec.get("choose_every", 4) if spec.get("reuse", True) else 1, spec.get("group", "max")
        self.chosen = {}  # (layer, KV head): pages

    def prompt_masks(self, layer):
        window = self.spec.get("prompt_window", 8192)
        return [(0, 0) if whole else (self.sinks, window) for whole in self.everything[layer].tolist()]

    def choose(self, queries, keys):
        history, pages = len(keys) - 1, keys.split(self.page)
        bounds, rule = box_scores(queries, pages, False), self.group
        if rule == "softmax_mean":
            bounds, rule = (bounds * self.spec.get("scale", 1.0)).softmax(-1), "mean"
        scores = group_scores(group_reduce(bounds, 1, rule)[0], self.parts)
        scores[-1] = torch.inf
        count = len(scores) if history <= self.most else self.most // (self.page * self.parts)
        groups = set(top(scores, count).tolist())
        return [page for page in range(len(pages)) if page // self.parts in groups]

    def select(self, layer, q, k, kept):
        read, pages = [], []
        for kv, head in enumerate(kept):
            if not self.everything[layer][kv]:
                read.append(head)
                pages.append(torch.arange(-(-len(head) // self.page)))
                continue
            if (layer, kv) not in self.chosen or (k.shape[1] - 1) % self.every == 0:
                self.chosen[layer, kv] = self.choose(q[kv * self.model.group:(kv + 1) * self.model.group], k[kv])
            pages.append(torch.tensor(self.chosen[layer, kv]))
            read.append(pages_to_tokens(self.chosen[layer, kv], self.page, k.shape[1]))
        return read, pages


# --- tokens of pages -----------------------------------------------------------------------------------------------

def fewest(weights, share):
    """Ascending indices of the fewest weights [n], best first, that add up to `share` of their sum. None of them is 0."""
    weights = weights.double()
    if share >= 1:
        return (weights > 0).nonzero()[:, 0]
    ordered = weights.sort(descending=True, stable=True).values.cumsum(0)
    return top(weights, int((ordered < share * ordered[-1]).sum()) + 1)


def four_bits(x):
    """x [..., D] through 4-bit codes by vector: scale (max - min) / 15, and the minimum as zero."""
    low = x.amin(-1, keepdim=True)
    scale = (x.amax(-1, keepdim=True) - low) / 15
    return torch.where(scale > 0, low + scale * ((x - low) / scale).round(), x)


class Twilight(policies.Quest):
    """Quest's pages are candidates. A query head takes the fewest of their tokens whose weights make up a share p."""
    lists_tokens = True

    def configure(self, spec):
        super().configure({**spec, "last_page": True})
        self.share = spec.get("p", 0.85) if spec.get("top_p", True) else 1
        self.int4 = spec.get("estimate", "int4") == "int4"
        self.wanted, self.of_text = spec.get("tokens", 0), spec.get("share", 0.25)

    def select(self, layer, q, k, kept):
        if layer < self.dense:
            return kept, None
        seen, read = k.shape[1], []
        scores = self.page_scores(q, k)
        scores[:, -1] = torch.inf
        count = max(1, (self.wanted or int(self.of_text * seen)) // self.page)
        for kv in range(self.model.kv_heads):
            tokens = pages_to_tokens(top(scores[kv], count).tolist(), self.page, seen)
            keys = four_bits(k[kv, tokens]) if self.int4 else k[kv, tokens]
            taken = {seen - 1}
            for query in q[kv * self.model.group:(kv + 1) * self.model.group]:
                weights = (keys @ query / math.sqrt(len(query))).softmax(-1)
                taken |= set(tokens[fewest(weights, self.share)].tolist())
            read.append(torch.tensor(sorted(taken)))
        return read, None


# --- clusters ------------------------------------------------------------------------------------------------------

def first_keys(count, n, seed, kv):
    """Knuth's algorithm S: `count` of n indices, drawn by the sequence of numbers that KV head kv has of the seed."""
    start, drawn = numbers(seed, kv), []
    for i in range(n):
        if (numbers(start, i) >> 32) * (n - i) < (count - len(drawn)) << 32:
            drawn.append(i)
    return drawn


def k_means(keys, drawn, iterations):
    """Clusters of keys [n, D] by cosine, from the keys `drawn`. Returns (centroids [clusters, D], label of each key).

    A centroid is the mean of its keys. One without keys stays where it is."""
    keys = keys.double()
    centroids, directions = keys[drawn].clone(), F.normalize(keys, dim=1)

    def labels():
        return torch.argmax(directions @ F.normalize(centroids, dim=1).T, 1)

    for _ in range(iterations):
        of_key = labels()
        for cluster in of_key.unique().tolist():
            centroids[cluster] = keys[of_key == cluster].mean(0)
    return centroids, labels()


def whole_clusters(scores, members, most):
    """Tokens of whole clusters, the best scores first, and of the next one those that come first, `most` in all."""
    taken = []
    for cluster in torch.sort(scores, descending=True, stable=True).indices.tolist():
        taken += members[cluster][:most - len(taken)]
        if len(taken) == most:
            break
    return sorted(taken)


class Clusters:
    """The clusters of one KV head: centroids [clusters, D], the positions of each, and where they end."""

    def __init__(self, end):
        self.centroids, self.members, self.end = None, [], end

    def add(self, keys, count, seed, kv, iterations):
        """The next keys [n, D] become so many clusters."""
        if not len(keys):
            return
        centroids, of_key = k_means(keys, first_keys(count, len(keys), seed, kv), iterations)
        self.centroids = centroids if self.centroids is None else torch.cat([self.centroids, centroids])
        self.members += [(self.end + (of_key == cluster).nonzero()[:, 0]).tolist() for cluster in range(count)]
        self.end += len(keys)


class ClusterKv(Full):
    """Whole clusters of keys, in the order of their centroids' products with the group's mean query, up to the budget."""
    lists_tokens = True

    def configure(self, spec):
        self.sinks, self.dense = spec.get("sinks", 16), spec.get("dense_layers", 2)
        self.clusters, self.each = spec.get("clusters", 0), spec.get("tokens_per_cluster", 80)
        self.iterations, self.seed = spec.get("iterations", 20), spec.get("seed", 0)
        self.span = spec.get("window", 320)
        self.of_span = min(self.span, spec.get("window_clusters", 8))
        self.heads = {}  # (layer, KV head): Clusters

    def prompt(self, layer, prompt):
        self.n = prompt.n
        first = min(self.sinks, prompt.n)
        count = min(prompt.n - first, self.clusters or max(1, (prompt.n - first) // self.each))
        for kv in range(self.model.kv_heads if layer >= self.dense else 0):
            self.heads[layer, kv] = Clusters(first)
            self.heads[layer, kv].add(prompt.k[kv, first:], count, (self.seed << 16) + layer, kv, self.iterations)
        return super().prompt(layer, prompt)

    def select(self, layer, q, k, kept):
        if layer < self.dense:
            return kept, None
        seen, read = k.shape[1], []
        generated = seen - self.n - 1  # before this step's token
        for kv in range(self.model.kv_heads):
            head = self.heads[layer, kv]
            if self.span and generated and generated % self.span == 0:
                head.add(k[kv, seen - 1 - self.span:seen - 1], self.of_span, (self.seed << 16) + layer, kv, self.iterations)
            query = q[kv * self.model.group:(kv + 1) * self.model.group].double().mean(0)
            chosen = whole_clusters(head.centroids @ query, head.members, max(0, self.tokens - self.sinks))
            read.append(torch.tensor([*range(min(self.sinks, seen)), *chosen, *range(head.end, seen)]))
        return read, None


class SqueezedAttention(Full):
    """Clusters whose tokens get more of a query's attention than a share that the prompt's last queries give."""
    lists_tokens = True

    def configure(self, spec):
        self.percent, self.percentile = spec.get("percent_clusters", 5.0), spec.get("percentile", 0.9)
        self.iterations, self.seed = spec.get("iterations", 20), spec.get("seed", 0)
        self.last = spec.get("window", 100)
        self.percent_coarse, self.percentile_coarse = spec.get("percent_coarse", 0.0), spec.get("percentile_coarse", 0.5)
        self.heads, self.shares = {}, []
        self.coarse, self.coarse_shares = {}, []  # (layer, KV head): clusters of clusters, and which cluster is in which

    def shares_of(self, queries, clusters):
        """queries [G, w, D] of a KV head: [clusters], the mean share of a token."""
        sizes = torch.tensor([len(members) for members in clusters.members], dtype=torch.float64)
        logits = queries.double() @ clusters.centroids.T / math.sqrt(queries.shape[-1])
        return cluster_shares(logits, sizes).mean((0, 1))

    def prompt(self, layer, prompt):
        n = max(0, prompt.n - self.last)
        count = min(n, max(1, int(self.percent * n / 100)))
        queries = prompt.q[:, -self.last:].reshape(self.model.kv_heads, self.model.group, -1, prompt.q.shape[-1])
        for kv in range(self.model.kv_heads):
            self.heads[layer, kv] = clusters = Clusters(0)
            clusters.add(prompt.k[kv, :n], count, (self.seed << 16) + layer, kv, self.iterations)
            self.shares += self.of_tokens(queries[kv], clusters)
            if self.percent_coarse and n:
                self.coarse[layer, kv] = self.coarser(clusters, min(n, max(1, int(self.percent_coarse * n / 100))), layer, kv)
                self.coarse_shares += self.of_tokens(queries[kv], self.coarse[layer, kv][0])
        return super().prompt(layer, prompt)

    def of_tokens(self, queries, clusters):
        shares = self.shares_of(queries, clusters).tolist()
        return [share for share, members in zip(shares, clusters.members) for _ in members]

    def coarser(self, clusters, count, layer, kv):
        seed, centroids = (self.seed << 16) + layer + (1 << 15), clusters.centroids.float()
        above = Clusters(clusters.end)
        above.centroids, label = k_means(centroids, first_keys(count, len(centroids), seed, kv), self.iterations)
        above.members = [sum([clusters.members[i] for i in (label == c).nonzero()[:, 0].tolist()], []) for c in range(count)]
        return above, label

    def finish_prompt(self, kept, n):
        self.threshold = torch.quantile(torch.tensor(self.shares, dtype=torch.float64), self.percentile).item()
        if self.coarse:
            self.low = torch.quantile(torch.tensor(self.coarse_shares, dtype=torch.float64), self.percentile_coarse).item()
        return kept

    def left_by_coarse(self, queries, layer, kv):
        """The clusters of a head, without the tokens of those whose coarse cluster gets too little."""
        head = self.heads[layer, kv]
        if (layer, kv) not in self.coarse:
            return head
        above, label = self.coarse[layer, kv]
        stays = (self.shares_of(queries, above) > self.low)[label].tolist()
        left = Clusters(head.end)
        left.centroids, left.members = head.centroids, [m if stay else [] for m, stay in zip(head.members, stays)]
        return left

    def select(self, layer, q, k, kept):
        read = []
        for kv in range(self.model.kv_heads):
            queries = q[kv * self.model.group:(kv + 1) * self.model.group, None]
            head = self.left_by_coarse(queries, layer, kv)
            shares = self.shares_of(queries, head)
            chosen = [members for share, members in zip(shares, head.members) if share > self.threshold]
            read.append(torch.tensor(sorted(sum(chosen, [])) + [*range(head.end, k.shape[1])]))
        return read, None


def cluster_shares(logits, sizes):
    """logits [..., clusters] of centroids: the share of one token of each, if its cluster's tokens lay at the centroid."""
    if not (sizes > 0).any():
        return torch.zeros_like(logits)
    weights = (logits - logits[..., sizes > 0].amax(-1, keepdim=True)).clamp(max=0).exp() * (sizes > 0)
    return weights / (weights * sizes).sum(-1, keepdim=True)


# --- blocks and chunks ---------------------------------------------------------------------------------------------

class InfLlm(Full):
    """Blocks of the text in front of a window. The mean of a few keys stands for a block, for each query head its own."""

    def configure(self, spec):
        self.page, self.block = spec.get("page_size", 16), spec.get("block", 128)
        self.first, self.near, self.most = self.whole(spec.get("sinks", 128)), spec.get("window", 4096), spec.get("top", 16)
        self.local = spec.get("local_scores", True)
        self.representatives = spec.get("representatives", 4)
        self.at_end = spec.get("clamped_scores", True)
        self.positions = spec.get("positions", "clamped")
        self.chunk = spec.get("prompt_chunk", 512) if spec.get("prompt_retrieval", True) else 0
        self.mass, self.vectors = {}, {}  # of a layer: [Hq, t], and [blocks made][Hq, D]

    def whole(self, tokens):
        return -(-tokens // self.page) * self.page

    def attend_in_prompt(self, layer, q, k, v):
        """Each chunk chooses blocks by its mean query, of those that left the window before it."""
        if not self.chunk:
            return None
        self.mass[layer], self.vectors[layer] = q.new_zeros(self.model.heads, k.shape[1]), []
        self.prompt_pages[layer], outputs = [], []
        for begin in range(0, k.shape[1], self.chunk):
            end = min(begin + self.chunk, k.shape[1])
            self.prompt_pages[layer].append(self.pages_of_chunk(layer, q[:, begin:end], begin, end))
            for position in range(begin, end):
                outputs.append(self.attend_at(layer, q[:, position], k, v, position, self.prompt_pages[layer][-1]))
            self.make(layer, k[:, :end])
        for kv in range(self.model.kv_heads):
            self.decisions[layer, kv] = self.prompt_pages[layer]
        return torch.stack(outputs)

    def pages_of_chunk(self, layer, q, begin, end):
        """What the chunk's queries q [Hq, end - begin, D] read; [] while the text fits in the window."""
        if end <= self.near:
            return []
        asked = self.model.rotate(q, self.near - torch.arange(begin, end)) if self.at_end else q
        return self.pages_to_read(layer, asked.mean(1), end)

    def attend_at(self, layer, q, k, v, position, pages):
        """The output [Hq * D] of a prompt's token, which reads these pages up to itself, or everything."""
        read = torch.arange(position + 1)
        if pages:
            read = read[torch.isin(read // self.page, torch.tensor(pages))]
        near, outputs = read > position - self.near, []
        for head, query in enumerate(q):
            kv = head // self.model.group
            keys = self.clamped(k[kv, read], read, position) if pages else k[kv, read]
            output, share = policies.attend(query[None], keys, v[kv, read])
            self.mass[layer][head, read[near]] += share[0, near]
            outputs.append(output[0])
        return torch.cat(outputs)

    def prompt(self, layer, prompt):
        if self.chunk:
            return super().prompt(layer, prompt)
        keys, n = self.model.expand(prompt.k), prompt.n
        logits = prompt.q @ keys.transpose(1, 2) / math.sqrt(keys.shape[-1])
        row, column = torch.arange(n)[:, None], torch.arange(n)[None]
        shares = logits.masked_fill(column > row, -math.inf).softmax(-1)
        self.mass[layer] = shares.masked_fill(column <= row - self.near, 0).sum(1)
        self.vectors[layer] = []
        self.make(layer, prompt.k)
        return super().prompt(layer, prompt)

    def make(self, layer, keys):
        """The vectors of the blocks that have left the window of a text of these keys [Hkv, t, D]."""
        made = self.vectors[layer]
        while self.first + (len(made) + 1) * self.block + self.near <= keys.shape[1]:
            begin = self.first + len(made) * self.block
            places = torch.arange(begin, begin + self.block)
            of_block = self.model.expand(self.model.rotate(keys[:, places], -places) if self.at_end else keys[:, places])
            made.append(torch.stack([representative(of_block[head], self.mass[layer][head, places],
                                                    self.representatives if self.local else self.block)
                                     for head in range(self.model.heads)]))

    def select(self, layer, q, k, kept):
        self.make(layer, k)
        seen = k.shape[1]
        asked = self.model.rotate(q[:, None], torch.tensor([self.near - (seen - 1)]))[:, 0] if self.at_end else q
        pages = self.pages_to_read(layer, asked, seen)
        read = pages_to_tokens(pages, self.page, seen)
        return [read] * self.model.kv_heads, [torch.tensor(pages)] * self.model.kv_heads

    def pages_to_read(self, layer, asked, seen):
        """Of a text of `seen` tokens: all pages but those of blocks that the query asked [Hq, D] ranks too low."""
        vectors, pages = self.vectors[layer], list(range(-(-seen // self.page)))
        if vectors:
            always = self.first + self.whole(self.near + self.block - 1)
            most = min(max((self.tokens - always) // self.block, 1), self.most) if self.tokens else self.most
            scores = torch.stack([(asked * of_heads).sum() for of_heads in vectors])
            inside = top(scores, most).tolist()
            pages = [page for page in pages if self.block_of(page, len(vectors)) in (None, *inside)]
        return pages

    def clamped(self, keys, places, position):
        """No key lies further than the window before the query."""
        if self.positions == "original":
            return keys
        return self.model.rotate(keys[None], (position - self.near - places).clamp(min=0))[0]

    def block_of(self, page, made):
        block = (page * self.page - self.first) // self.block
        return block if 0 <= block < made else None

    def attended(self, layer, q, keys, kept, shares):
        mass = torch.cat([self.mass[layer], self.mass[layer].new_zeros(self.model.heads, 1)], 1)
        mass[:, -self.near:] += torch.cat(shares)[:, -self.near:]
        self.mass[layer] = mass


def representative(keys, mass, count):
    """keys [block, D], mass [block]: the mean of the `count` keys of the most mass."""
    return keys[top(mass, count)].mean(0)


class ShadowKv(Full):
    """Chunks of a prompt by their landmarks, the mean keys. Keys get a low rank before RoPE, those of outliers do not."""
    lists_tokens = True

    def configure(self, spec):
        self.rank, self.size = spec.get("rank", 160), spec.get("chunk", 8)
        self.outliers = spec.get("outliers", 48) if spec.get("outlier_chunks", True) else 0
        self.local, self.group = spec.get("local_chunks", 4), spec.get("group", "max")
        self.dim, self.low_rank = spec.get("logit_dim", 0), spec.get("low_rank", True)
        self.landmarks, self.out = {}, {}  # of a layer: [Hkv, chunks, D], and the outliers of each KV head

    def prompt(self, layer, prompt):
        chunks = max(0, prompt.n // self.size - self.local)
        parts = prompt.k[:, :chunks * self.size].reshape(self.model.kv_heads, chunks, self.size, -1)
        self.landmarks[layer] = parts.mean(2)
        self.out[layer] = [outlier_chunks(head, self.outliers) for head in parts]
        self.n, self.end = prompt.n, chunks * self.size
        return super().prompt(layer, prompt)

    def rewritten(self, layer, prompt):
        if not self.low_rank or self.tokens >= prompt.n:
            return None
        places = torch.arange(prompt.n)
        flat = self.model.rotate(prompt.k, -places).transpose(0, 1).reshape(prompt.n, -1)
        flat = low_rank(flat, self.rank).reshape(prompt.n, self.model.kv_heads, -1).transpose(0, 1)
        keys = self.model.rotate(flat, places)
        for kv, out in enumerate(self.out[layer]):
            exact = self.tokens_of(out, prompt.n)
            keys[kv, exact] = prompt.k[kv, exact]
        return keys

    def tokens_of(self, chunks, seen):
        inside = [torch.arange(chunk * self.size, (chunk + 1) * self.size) for chunk in sorted(chunks)]
        return torch.cat([*inside, torch.arange(self.end, seen)])

    def select(self, layer, q, k, kept):
        count, read = max(0, self.tokens // self.size - self.outliers - self.local), []
        for kv, out in enumerate(self.out[layer]):
            others = [chunk for chunk in range(self.landmarks[layer].shape[1]) if chunk not in out]
            logits = q[kv * self.model.group:(kv + 1) * self.model.group] @ self.landmarks[layer][kv, others].T
            shares = (logits / math.sqrt(self.dim or q.shape[-1])).softmax(-1)
            best = top(group_reduce(shares, 1, self.group)[0], count).tolist()
            read.append(self.tokens_of(out + [others[i] for i in best], k.shape[1]))
        return read, None


def outlier_chunks(chunks, count):
    """chunks [chunks, size, D]: the `count` ones whose keys have the least cosine with their mean."""
    cosine = F.cosine_similarity(chunks, chunks.mean(1, keepdim=True), -1)
    return top(-cosine.amin(1), count).tolist()


def low_rank(x, rank):
    """The nearest matrix of that rank."""
    u, s, v = torch.linalg.svd(x.double(), full_matrices=False)
    return ((u[:, :rank] * s[:rank]) @ v[:rank]).to(x.dtype)


# --- channels ------------------------------------------------------------------------------------------------------

def skewing_matrices(model, ids):
    """{(layer, KV head): A [D, D]}, where A = V of the singular value decomposition Q = U S V^T of a text's queries. The
    queries of a group's heads stand below each other, after RoPE. Then Q A has its longest columns first, and
    (Q A) (K A)^T = Q K^T."""
    x, positions, matrices = model.embed(ids), torch.arange(len(ids)), {}
    for layer in range(model.layers):
        q, k, v = model.qkv(layer, x)
        q = model.rotate(q, positions)
        for kv, of_group in enumerate(q.double().reshape(model.kv_heads, -1, q.shape[-1])):
            matrices[layer, kv] = torch.linalg.svd(of_group, full_matrices=True)[2].T.to(q.dtype)
        attended, _, _ = model.prompt_attention(q, model.rotate(k, positions), v)
        x = model.after_attention(layer, x, attended)
    return matrices


class InfiniGen(Full):
    """A layer's input and the next layer's query weights guess logits of the next layer, by a few channels. With a skew,
    queries and keys are first multiplied by the matrices that the text `sample` gives."""
    lists_tokens = True

    def configure(self, spec):
        self.skew = skewing_matrices(self.model, spec["sample"]) if "sample" in spec else None
        self.alpha, self.ratio, self.cap = spec.get("alpha", 4.0), spec.get("partial_ratio", 0.2), spec.get("cap", 400)
        self.cap_share, self.dense = spec.get("cap_share", 1.0), max(1, spec.get("dense_layers", 2))
        self.channels, self.guessed = {}, {}  # of a layer: of each KV head; [Hq, D]

    def prompt(self, layer, prompt):
        of_heads = prompt.q.reshape(self.model.kv_heads, -1, prompt.q.shape[-1])
        sums = [self.skewed(layer, kv, queries).abs().sum(0) for kv, queries in enumerate(of_heads)]
        self.channels[layer] = [top(head, max(1, int(self.ratio * len(head)))) for head in sums]
        return super().prompt(layer, prompt)

    def skewed(self, layer, kv, x):
        return x @ self.skew[layer, kv] if self.skew else x

    def enter(self, layer, x, position):
        if layer + 1 < self.model.layers:
            x = self.model._norm(x, f"model.layers.{layer}.input_layernorm.weight")
            q = self.model._linear(x, f"model.layers.{layer + 1}.self_attn.q_proj").reshape(self.model.heads, 1, -1)
            self.guessed[layer + 1] = self.model.rotate(q, torch.tensor([position]))[:, 0]

    def select(self, layer, q, k, kept):
        if layer < self.dense:
            return kept, None
        scores = []
        for kv, few in enumerate(self.channels[layer]):
            guess = self.guessed[layer][kv * self.model.group:(kv + 1) * self.model.group]
            guess = self.skewed(layer, kv, guess)[:, few]
            # The copy of these channels has 16 bits a number.
            partial = self.skewed(layer, kv, k[kv, :-1])[:, few].half().to(k.dtype)
            scores.append((guess @ partial.T / math.sqrt(q.shape[-1])).amax(0))
        scores = torch.stack(scores)
        limit = min(self.cap or len(scores[0]), int(self.cap_share * len(scores[0])))
        most = max(1, min(near_greatest(scores, self.alpha), limit))
        return [torch.cat([top(head, most), torch.tensor([k.shape[1] - 1])]) for head in scores], None


def near_greatest(scores, alpha):
    """scores [heads, n]: the mean, rounded down, of how many of a head are above its greatest less alpha."""
    return int((scores > scores.amax(-1, keepdim=True) - alpha).sum()) // len(scores)


class Think(Full):
    """Channels of a prompt's keys become zeros where the queries' and the keys' mean squares have the least product."""

    def configure(self, spec):
        self.ratio, self.last, self.recent = spec.get("ratio", 0.4), spec.get("window", 32), spec.get("recent", 32)

    def rewritten(self, layer, prompt):
        keys, (kv_heads, n, dim) = prompt.k.clone(), prompt.k.shape
        queries = prompt.q[:, -self.last:].reshape(kv_heads, -1, dim)
        for kv in range(kv_heads):
            stay = channels_that_stay(queries[kv].square().mean(0), prompt.k[kv].square().mean(0), self.ratio)
            gone = torch.ones(dim, dtype=torch.bool)
            gone[stay] = False
            keys[kv, :max(0, n - self.recent), gone] = 0
        return keys


def channels_that_stay(queries, keys, ratio):
    """Ascending channels; queries and keys [D] are mean squares."""
    return top(queries * keys, len(keys) - int(len(keys) * ratio))


# --- rules of heads ------------------------------------------------------------------------------------------------

class FastGen(Full):
    """A head gets the first of five nested rules that recovers enough of its attention to the prompt: the mean over the
    group, or the least of its heads."""

    def configure(self, spec):
        self.recovery, self.sinks, self.whole = spec.get("recovery", 0.85), spec.get("sinks", 4), spec.get("whole", 0)
        self.frequent = spec.get("frequent_share", 0.3) if spec.get("frequency", True) else 0
        self.local = spec.get("window_share", 0.3) if spec.get("local", True) else 0
        self.least = spec.get("group", "mean") == "min"
        self.queries, self.window = spec.get("queries", 0), spec.get("queries", 0) or 1 << 20
        kinds = token_kinds(self.model.path)
        self.special = kinds["special"] if spec.get("special", True) else set()
        self.punctuation = kinds["punctuation"] if spec.get("punctuation", True) else set()
        self.rule, self.sums = {}, {}  # (layer, KV head): number of the rule; attention by text position

    def near(self, seen):
        return max(1, int(self.local * seen)) if self.local else 0

    def of_rule(self, rule, kept, mean, seen):
        """Marks what a rule keeps of these positions, of a text of `seen` tokens. mean [len(kept)] attention."""
        if rule == 4:
            return torch.ones(len(kept), dtype=torch.bool)
        kinds = self.special | (self.punctuation if rule > 0 else set())
        marks = torch.tensor([p < self.sinks or self.text[p] in kinds for p in kept.tolist()])
        others = (~marks).nonzero()[:, 0]
        if rule >= 2:
            marks[others[top(mean[others], math.ceil(self.frequent * seen))]] = True
        if rule == 3:
            marks |= kept >= seen - self.near(seen)
        return marks

    def prompt(self, layer, prompt):
        n, kept = prompt.n, [torch.arange(prompt.n)] * self.model.kv_heads
        rows = prompt.last_rows.reshape(self.model.kv_heads, self.model.group, -1, n)  # [Hkv, G, queries, n]
        count = rows.shape[2]
        see_it = torch.clamp(n - torch.arange(n), max=count)
        query = torch.arange(n - count, n)[:, None]
        for kv in range(self.model.kv_heads):
            mean = rows[kv].sum(1).mean(0) / see_it
            self.sums[layer, kv] = mean * (n - torch.arange(n))
            self.rule[layer, kv] = 4 if n <= self.whole else first_rule(
                [recovered(rows[kv], self.of_rule(min(rule, 2), kept[kv], mean, n)[None] |
                           (query - torch.arange(n) < (self.near(n) if rule == 3 else 0)), self.least)
                 for rule in range(4)], self.recovery)
            kept[kv] = kept[kv][self.of_rule(self.rule[layer, kv], kept[kv], mean, n)]
        return kept

    def after(self, layer, kept, mass):
        seen = int(kept[0][-1]) + 1
        left = []
        for kv, head in enumerate(kept):
            sums = torch.cat([self.sums[layer, kv], mass[kv].new_zeros(1)])
            sums[head] += mass[kv]
            self.sums[layer, kv] = sums
            left.append(head[self.of_rule(self.rule[layer, kv], head, sums[head] / (seen - head), seen)])
        return left


def recovered(rows, marks, least=False):
    """rows [G, queries, n], marks [queries or 1, n]: the attention to what is marked, mean over queries and heads, or of
    the head with the least."""
    of_heads = (rows * marks).sum(-1).mean(-1)
    return (of_heads.amin() if least else of_heads.mean()).item()


def first_rule(recoveries, wanted):
    return next((rule for rule, got in enumerate(recoveries) if got >= wanted), len(recoveries))


def token_kinds(folder):
    """Ids of special tokens, and of ASCII punctuation with white space or without, by a folder's byte-level tokenizer."""
    with open(os.path.join(folder, "tokenizer.json")) as file:
        tokenizer = json.load(file)
    special = {token["id"] for token in tokenizer["added_tokens"] if token["special"]}
    space = {"\u0120", "\u010a", "\u0109", "\u010d"}  # as byte-level tokenizers write them
    punctuation = {id for token, id in tokenizer["model"]["vocab"].items() if id not in special and
                   set(token) <= set(string.punctuation) | space and set(token) & set(string.punctuation)}
    return {"special": special, "punctuation": punctuation}


policies.POLICIES.update(arkvale=ArkVale, twilight=Twilight, clusterkv=ClusterKv, squeezed_attention=SqueezedAttention, lserve=LServe,
                         infllm=InfLlm, shadowkv=ShadowKv, infinigen=InfiniGen, think=Think, fastgen=FastGen)
