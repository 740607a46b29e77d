"""CUDA graphs: what a capture holds must be right again in every replay, with new contents of the same tensors."""

import pytest
import torch

import lazymax
from lazymax import testing
from lazymax.extras import Extras
from lazymax.mods import register_mask_mod
from lazymax.options import parse_options
from lazymax.problem import Problem

pytestmark = pytest.mark.gpu
triton = pytest.importorskip("triton", reason="needs Triton")
tl = triton.language


@triton.jit
def same_document(b, h, q_idx, k_idx, documents):
    return tl.load(documents + q_idx) == tl.load(documents + k_idx)


register_mask_mod(
    "graphs.documents", same_document, reference=lambda b, h, i, j, documents: documents[i] == documents[j]
)


def captured(call):
    """The call in a graph, after one outside (which builds the kernels), and its output."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


def check(out, q, k, v, **options):
    extras, rules = parse_options(q, **options)
    problem = Problem.from_tensors(q, k, v, extras, rules)
    for budget in testing.check_attention(out, None, q, k, v, problem, extras):
        assert budget.ok, budget


def test_dropout_draws_anew_in_every_replay():
    """The seed is torch's to advance: a replay drops other probabilities, and the same again after the same seed."""
    q, k, v = testing.make_qkv(2, 4, 2, 130, 200, 64, device="cuda")
    seeds = torch.zeros(1, dtype=torch.int64, device="cuda")

    def call():
        seeds.copy_(torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device="cuda"))
        return lazymax.attention(q, k, v, dropout_p=0.3, dropout_seed=seeds)

    graph, out = captured(call)
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append((int(seeds), out.clone()))
        check(seen[-1][1], q, k, v, dropout_p=0.3, dropout_seed=seeds)
    assert len({seed for seed, _ in seen}) == 3
    assert not torch.equal(seen[0][1], seen[1][1])


def test_dropout_without_a_seed_follows_torchs_generator():
    q, k, v = testing.make_qkv(1, 2, 2, 100, 100, 64, device="cuda")
    graph, out = captured(lambda: lazymax.attention(q, k, v, dropout_p=0.5))
    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        for _ in range(2):
            graph.replay()
            runs.append(out.clone())
    assert torch.equal(runs[0], runs[2]) and torch.equal(runs[1], runs[3]) and not torch.equal(runs[0], runs[1])


def test_list_of_blocks_is_made_in_every_replay():
    q, k, v = testing.make_qkv(1, 4, 4, 700, 700, 64, device="cuda")
    documents = (torch.arange(700, device="cuda") // 100).int()
    options = dict(mask_mod="graphs.documents", mask_mod_args=(documents,))
    assert lazymax.explain(q, k, v, **options, show=False).plan.listed
    graph, out = captured(lambda: lazymax.attention(q, k, v, **options))
    for size in (100, 37, 699):
        documents.copy_(torch.arange(700, device="cuda") // size)
        graph.replay()
        check(out, q, k, v, **options)


def test_packed_offsets_may_change_between_replays():
    q, k, v = testing.make_qkv(1, 4, 2, 500, 500, 64, device="cuda")
    packed = [t[0].transpose(0, 1).contiguous() for t in (q, k, v)]
    offsets = torch.tensor([0, 100, 200, 500], dtype=torch.int32, device="cuda")
    graph, out = captured(lambda: lazymax.attention_varlen(*packed, offsets, offsets, causal="bottom_right"))
    for ends in ([0, 100, 200, 500], [0, 1, 499, 500], [0, 0, 250, 400]):
        offsets.copy_(torch.tensor(ends))
        graph.replay()
        extras, rules = parse_options(q, causal="bottom_right", cu_seqlens_q=offsets, cu_seqlens_k=offsets)
        assert isinstance(extras, Extras)
        problem = Problem.from_tensors(q, k, v, extras, rules)
        (budget,) = testing.check_attention(out.transpose(0, 1)[None], None, q, k, v, problem, extras)
        assert budget.ok, budget
