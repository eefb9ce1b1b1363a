#!/usr/bin/env python3
"""Times the decode attention of other libraries on the shapes of `kvlab bench attend`, and prints lines as its --json has.

    python3 analysis/targets/peers.py             on the GPU
    python3 analysis/targets/peers.py --small     one small shape, also on a CPU

One layer of 32 query heads and 8 KV heads of 128 in bf16. As in kvlab's own lines, a CUDA graph holds calls on copies of
the cache that no L2 cache holds together. The time is the median of its replays by events, divided by the calls. Pages
have 16 tokens and are shuffled. Contiguous caches have no pages. A library that is not here, or whose result is not that
of attention, is named under `skipped`.
"""
import argparse
import json
import math
import statistics
import sys
import time

KV_HEADS, GROUP, DIM, PAGE = 8, 4, 128, 16
SHAPES = [(8, 32768), (40, 10240), (1, 131072), (1, 32768), (40, 1024), (40, 2048)]
SMALL = [(2, 64)]
BEYOND_L2 = 350e6  # bytes, as core/cases/attend.cpp has it
RUNS = 30
MOST_ERROR = 2e-2  # relative, of bf16 attention against f32


class Skipped(Exception):
    """Why a library is left out."""


def cache_bytes(batch, tokens):
    return 2 * 2 * batch * tokens * KV_HEADS * DIM


class Inputs:
    """Queries and copies of a paged cache: [page, K or V, KV head, token, dim], the pages of a sequence shuffled."""

    def __init__(self, torch, device, batch, tokens, copies):
        assert tokens % PAGE == 0
        self.torch, self.device, self.batch, self.tokens = torch, device, batch, tokens
        self.pages = batch * tokens // PAGE
        g = torch.Generator(device=device).manual_seed(1)
        random = lambda *shape: torch.randn(*shape, generator=g, device=device, dtype=torch.float32).to(torch.bfloat16)
        self.queries = random(batch, KV_HEADS * GROUP, DIM)
        first = random(self.pages, 2, KV_HEADS, PAGE, DIM)
        self.caches = [first] + [first.clone() for _ in range(copies - 1)]
        order = torch.randperm(self.pages, generator=g, device=device).to(torch.int32)
        self.table = order.view(batch, tokens // PAGE)

    def contiguous(self, cache):
        """Keys and values as [sequence, KV head, token, dim]."""
        of_sequence = cache[self.table.long()]  # [sequence, page, 2, KV head, token, dim]
        both = of_sequence.permute(2, 0, 3, 1, 4, 5).reshape(2, self.batch, KV_HEADS, self.tokens, DIM)
        return both[0].contiguous(), both[1].contiguous()

    def wanted(self):
        keys, values = self.contiguous(self.caches[0])
        q = self.queries.view(self.batch, KV_HEADS, GROUP, DIM).float()
        out = self.torch.empty_like(q)
        for i in range(self.batch):  # one at a time: it is f32
            weights = (q[i] @ keys[i].float().transpose(1, 2) / math.sqrt(DIM)).softmax(-1)
            out[i] = weights @ values[i].float()
        return out.reshape(self.batch, KV_HEADS * GROUP, DIM)


def import_flashinfer():
    try:
        import flashinfer
    except ImportError as e:
        raise Skipped(f"flashinfer is not installed ({e})") from e
    return flashinfer


# Each of these returns calls, one for each copy, that return [sequence, query head, dim].


def flashinfer_decode(tensor_cores):
    def make(x):
        flashinfer = import_flashinfer()
        torch = x.torch
        workspace = torch.zeros(256 << 20, dtype=torch.uint8, device=x.device)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=tensor_cores)
        per = x.tokens // PAGE
        indptr = torch.arange(x.batch + 1, dtype=torch.int32, device=x.device) * per
        last = torch.full((x.batch,), PAGE, dtype=torch.int32, device=x.device)
        wrapper.plan(indptr, x.table.reshape(-1), last, KV_HEADS * GROUP, KV_HEADS, DIM, PAGE,
                     q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
        return [lambda c=c: wrapper.run(x.queries, c) for c in x.caches]

    return make


def cudnn_paged(x):
    flashinfer = import_flashinfer()
    decode = getattr(flashinfer, "cudnn_batch_decode_with_kv_cache", None)
    if decode is None:
        raise Skipped("this flashinfer has no cudnn_batch_decode_with_kv_cache")
    torch = x.torch
    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device=x.device)
    tables = x.table.contiguous()
    sides = [(c[:, 0].contiguous(), c[:, 1].contiguous()) for c in x.caches]

    def calls(*shape):  # of the lengths
        lengths = torch.full(shape, x.tokens, dtype=torch.int32, device=x.device)
        return [lambda k=k, v=v: decode(x.queries, k, v, 1 / math.sqrt(DIM), workspace, max_sequence_kv=x.tokens,
                                        actual_seq_lens_kv=lengths, block_tables=tables, is_cuda_graph_compatible=True)
                for k, v in sides]

    first = calls(x.batch, 1, 1, 1)
    try:
        first[0]()
    except Exception:  # later versions take them flat
        first = calls(x.batch)
    return first


def torch_sdpa(backend):
    def make(x):
        from torch.nn import attention
        from torch.nn.functional import scaled_dot_product_attention
        which = getattr(attention.SDPBackend, backend, None)
        if which is None:
            raise Skipped(f"this torch has no SDPBackend.{backend}")
        # The queries of a KV head are rows of one product, which no library then repeats keys for.
        q = x.queries.view(x.batch, KV_HEADS, GROUP, DIM)
        sides = [x.contiguous(c) for c in x.caches]

        def call(k, v):
            with attention.sdpa_kernel([which]):
                return scaled_dot_product_attention(q, k, v).reshape(x.batch, KV_HEADS * GROUP, DIM)

        return [lambda k=k, v=v: call(k, v) for k, v in sides]

    return make


def products(x):
    q = x.queries.view(x.batch, KV_HEADS, GROUP, DIM).float()
    sides = [[side.float() for side in x.contiguous(c)] for c in x.caches]

    def call(k, v):
        weights = (q @ k.transpose(2, 3) / math.sqrt(DIM)).softmax(-1)
        return (weights @ v).reshape(x.batch, KV_HEADS * GROUP, DIM)

    return [lambda k=k, v=v: call(k, v) for k, v in sides]


KERNELS = {
    "FlashInfer, tensor cores": flashinfer_decode(True),
    "FlashInfer, CUDA cores": flashinfer_decode(False),
    "cuDNN, paged": cudnn_paged,
    "cuDNN, contiguous": torch_sdpa("CUDNN_ATTENTION"),
    "torch flash, contiguous": torch_sdpa("FLASH_ATTENTION"),
}
ON_CPU = {"torch, products": products}


def seconds_on_gpu(torch, calls):
    """Seconds of one call, of each replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    seconds = []
    for run in range(-2, RUNS):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if run >= 0:
            seconds.append(1e-3 * begin.elapsed_time(end) / len(calls))
    return seconds


def seconds_on_cpu(_, calls):
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        for call in calls:
            call()
        seconds.append((time.perf_counter() - begin) / len(calls))
    return seconds


def line_of(torch, cuda, kernel, make, x):
    calls = make(x)
    wanted = x.wanted()
    error = ((calls[0]().view_as(wanted).float() - wanted).norm() / wanted.norm()).item()
    if not error <= MOST_ERROR:
        raise Skipped(f"got a relative difference of {error:.3g} from attention in f32, wanted at most {MOST_ERROR}")
    seconds = (seconds_on_gpu if cuda else seconds_on_cpu)(torch, calls)
    moved = cache_bytes(x.batch, x.tokens)
    median = statistics.median(seconds)
    return {"op": "attend", "shape": f"{x.batch} x {x.tokens}", "kernel": kernel, "seconds_median": median,
            "seconds_best": min(seconds), "bytes": moved, "rate": moved / median}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="one small shape; on a CPU where there is no GPU")
    small = parser.parse_args().small
    out = {"device": "cpu", "ops": [], "skipped": []}
    try:
        import torch
    except ImportError as e:
        out["skipped"] = [{"kernel": kernel, "why": f"torch is not installed ({e})"} for kernel in KERNELS]
        print(json.dumps(out, indent=1))
        return 0
    cuda = torch.cuda.is_available()
    if not cuda and not small:
        print("peers.py: got no GPU, wanted one, or --small", file=sys.stderr)
        return 3
    out["device"] = torch.cuda.get_device_name() if cuda else "cpu"
    out["versions"] = {"torch": torch.__version__}
    if cuda:
        out["versions"]["cudnn"] = torch.backends.cudnn.version()
        try:
            import flashinfer
            out["versions"]["flashinfer"] = flashinfer.__version__
        except Exception:  # said of each kernel below
            pass
    left_out = set()
    for batch, tokens in SMALL if small else SHAPES:
        copies = max(4, int(BEYOND_L2 / cache_bytes(batch, tokens)) + 1) if cuda and not small else 2
        x = Inputs(torch, "cuda" if cuda else "cpu", batch, tokens, copies)
        for kernel, make in (KERNELS if cuda else ON_CPU).items():
            if kernel in left_out:
                continue
            print(f"peers.py: {kernel}, {batch} x {tokens}", file=sys.stderr)
            try:
                out["ops"].append(line_of(torch, cuda, kernel, make, x))
            except Skipped as why:
                left_out.add(kernel)
                out["skipped"].append({"kernel": kernel, "why": str(why)})
            except Exception as error:  # of a library; the others go on
                first = (str(error).strip().splitlines() or [""])[0]
                why = f"{batch} x {tokens}: {type(error).__name__}: {first}"
                out["skipped"].append({"kernel": kernel, "why": why})
            if cuda:
                torch.cuda.empty_cache()
        del x
    if not cuda:
        out["skipped"] += [{"kernel": kernel, "why": "it needs a GPU"} for kernel in KERNELS]
    print(json.dumps(out, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
