"""The torch operators: what torch.library, compile, export and CUDA graphs expect of them, and their cache."""

import copy
import itertools
import pickle
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from calls import (
    SIEVE,
    TILT,
    assert_within,
    bools,
    floats,
    leaves,
    moved,
    normal,
    odd_address,
    packed,
    shift,
    shift_reference,
    stored,
    weigh,
    weigh_reference,
)
from torch._subclasses.fake_tensor import FakeTensorMode

import lazymax
from lazymax import differentiation, mods, ops
from lazymax.extras import NO_EXTRAS, NO_RULES, Extras, Rules
from lazymax.options import parse_options
from lazymax.problem import Problem
from lazymax.testing import check_attention, make_qkv

FORWARD, BACKWARD = torch.ops.lazymax.attention_forward, torch.ops.lazymax.attention_backward
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


SIZES = (2, 2, 1, 19, 37, 16)
PACKED_SIZES = (1, 2, 1, 19, 37, 16)
ENDS = dict(cu_seqlens_q=torch.tensor([0, 7, 7, 16]), cu_seqlens_k=torch.tensor([0, 11, 20, 37]))


# ---- torch.library.opcheck


@dataclass(frozen=True)
class Op:
    id: str
    sizes: tuple[int, ...] = SIZES
    options: dict[str, Any] = field(default_factory=dict)  # of `attention()` and `attention_varlen()`
    impl: str = "auto"
    return_lse: bool = True
    order: tuple[int, ...] = (0, 1, 2, 3)  # of q in memory
    grad: bool = True
    dtype: torch.dtype = torch.float32

    def qkv(self, device: str) -> Tensors:
        q, k, v = make_qkv(*self.sizes, dtype=self.dtype, device=device)
        return stored(q, self.order), k, v

    def parsed(self, q: torch.Tensor, device: str) -> tuple[Extras, Rules]:
        return parse_options(q, **moved(self.options, device, grad=self.grad))


OPS = (
    Op("plain"),
    Op("stored as B, S, H, D", order=(0, 2, 1, 3)),
    Op("stored as H, B, S, D, no LSE", order=(1, 0, 2, 3), return_lse=False),
    Op("D_v, causal", (2, 2, 2, 19, 19, 16, 24), dict(causal="bottom_right", scale=0.3)),
    Op("window, no gradient", options=dict(window=(5, 2)), grad=False),
    Op("reference", (3, 2, 1, 9, 17, 8), dict(causal="top_left"), impl="reference"),
    Op("fp16", order=(0, 2, 1, 3), dtype=torch.float16),
    Op("one query", (2, 2, 1, 1, 37, 16)),
)
WITH_EXTRAS = (
    Op("float mask, sinks, slopes, dropout", options=dict(
        attn_mask=normal(37, 19).T, softcap=2.0, sinks=normal(2), alibi_slopes=normal(2, 2), dropout_p=0.2,
        dropout_seed=torch.tensor([7])), order=(0, 2, 1, 3)),
    Op("bool mask, lengths, mask_mod, no gradient", options=dict(
        **SIEVE, attn_mask=bools(2, 1, 1, 37), seqlens_k=torch.tensor([37, 11])), grad=False),
    Op("packed, sinks per sequence", PACKED_SIZES, dict(**ENDS, sinks=normal(3, 2), causal="bottom_right"),
       order=(0, 2, 1, 3)),
    Op("score_mod", options=TILT),
)  # fmt: skip


@pytest.mark.parametrize("case", [*OPS, *WITH_EXTRAS], ids=lambda case: case.id)
def test_opcheck_of_the_forward(case: Op, device: str) -> None:
    qkv = case.qkv(device)
    if case.grad:
        qkv = tuple(
            stored(t.detach(), case.order if i == 0 else (0, 1, 2, 3)).requires_grad_() for i, t in enumerate(qkv)
        )
    extras, rules = case.parsed(qkv[0], device)
    torch.library.opcheck(FORWARD, (*qkv, *extras, *rules, case.impl, None, case.return_lse))


INSIDE = pytest.mark.xfail(
    strict=True,
    reason="torch.func.vjp inside the backward fails under any dispatch mode: Cannot access storage of TensorWrapper",
)


@pytest.mark.parametrize(
    "case", [*OPS[:5], *WITH_EXTRAS[:-1], pytest.param(WITH_EXTRAS[-1], marks=INSIDE)], ids=lambda case: case.id
)
def test_opcheck_of_the_backward(case: Op, device: str) -> None:
    q, k, v = case.qkv(device)
    grad_out = stored(torch.randn(*q.shape[:3], v.shape[3], device=device), case.order)
    grad_lse = torch.randn(q.shape[:3], device=device) if case.return_lse else None
    extras, rules = parse_options(q, **moved(case.options, device))
    torch.library.opcheck(BACKWARD, (grad_out, grad_lse, q, k, v, *extras, *rules, [case.grad] * 4))


def test_gradients_that_are_not_wanted_are_empty_as_fake_says(device: str) -> None:
    q, k, v = make_qkv(1, 2, 2, 5, 7, 8, dtype=torch.float16, device=device)
    extras, rules = parse_options(q, attn_mask=normal(5, 7).to(device), sinks=normal(2).to(device))
    arguments = (torch.ones_like(q), None, q, k, v, *extras, *rules)
    for needs in ([False] * 4, [True] * 4):
        real = BACKWARD(*arguments, needs)
        with FakeTensorMode() as mode:
            fake = BACKWARD(*torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, arguments), needs)
        sizes = [(1, 2, 5, 8), (1, 2, 7, 8), (1, 2, 7, 8), (1, 1, 5, 7) if needs[0] else (0,), (0,),
                 (2,) if needs[2] else (0,)]  # fmt: skip
        assert [tuple(g.shape) for g in real] == [tuple(g.shape) for g in fake] == sizes
        assert [g.dtype for g in real] == [g.dtype for g in fake]


# ---- strides


ORDERS = [(*order, 3) for order in itertools.permutations(range(3))] + [(0, 1, 3, 2), (3, 2, 1, 0)]


@dataclass(frozen=True)
class Stride:
    id: str
    sizes: tuple[int, ...]
    make: Callable[[torch.Tensor], torch.Tensor]


STRIDES = [
    *(Stride(f"order {order}", (2, 4, 2, 7, 9, 8, 6), lambda q, order=order: stored(q, order)) for order in ORDERS),
    Stride("sliced", (2, 4, 2, 7, 9, 8, 6), lambda q: torch.cat([q, q], 2)[:, :, 3:10]),
    Stride("broadcast batch", (2, 4, 2, 7, 9, 8), lambda q: q[:1].expand_as(q)),
    Stride("broadcast heads", (2, 4, 2, 7, 9, 8), lambda q: q[:, :1].expand_as(q)),
    Stride("one query", (2, 4, 2, 1, 9, 8), lambda q: stored(q, (0, 2, 1, 3))),
    Stride("one head", (2, 1, 1, 7, 9, 8), lambda q: stored(q, (2, 0, 1, 3))),
    Stride("one batch", (1, 4, 2, 7, 9, 8), lambda q: q.as_strided(q.shape, (3, 56, 8, 1))),
    Stride("empty", (2, 4, 2, 0, 9, 8), lambda q: stored(q, (0, 2, 1, 3))),
]


@pytest.mark.parametrize("case", STRIDES, ids=lambda case: case.id)
def test_real_and_fake_strides_are_the_same_and_dense(case: Stride, device: str) -> None:
    q, k, v = make_qkv(*case.sizes, dtype=torch.float16, device=device)
    q = case.make(q)
    batch, heads, q_len, _ = q.shape
    tensors = (normal(9, q_len).T, normal(heads).half(), normal(batch, heads), normal(heads).half(), normal(batch, 3))

    def parsed(q: torch.Tensor, mask: Any, slopes: Any, sinks: Any, *args: Any) -> tuple[Extras, Rules]:
        options = dict(attn_mask=mask, alibi_slopes=slopes, sinks=sinks, score_mod="calls.tilt", score_mod_args=args)
        return parse_options(q, **options)  # type: ignore[arg-type]

    tensors = tuple(t.to(device) for t in tensors)
    extras, rules = parsed(q, *tensors)
    how, needs = ("reference", None, True), [True] * 4  # every route writes into the same output
    real = FORWARD(q, k, v, *extras, *rules, *how)
    back = BACKWARD(*real, q, k, v, *extras, *rules, needs)
    with FakeTensorMode() as mode:
        fq, fk, fv, *rest = (mode.from_tensor(t) for t in (q, k, v, *tensors))
        fake_extras, _ = parsed(fq, *rest)
        fake = FORWARD(fq, fk, fv, *fake_extras, *rules, *how)
        fake_back = BACKWARD(*fake, fq, fk, fv, *fake_extras, *rules, needs)
    names = ("out", "lse", "dq", "dk", "dv", "dmask", "dslopes", "dsinks", "dweight", "dtable")
    for name, x, y in zip(names, (*real, *back), (*fake, *fake_back), strict=True):
        got = (x.shape, x.stride(), x.dtype, x.device, x.storage_offset())
        assert got == (y.shape, y.stride(), y.dtype, y.device, y.storage_offset()), name
    out = real[0]
    assert out.stride(3) == 1 or out.numel() == 0
    dense = sorted(range(4), key=lambda dim: -out.stride(dim))
    assert out.permute(dense).is_contiguous() or out.numel() == 0
    by_q = sorted((d for d in range(3) if q.shape[d] > 1), key=lambda d: -q.stride(d))
    by_out = sorted((d for d in range(3) if q.shape[d] > 1), key=lambda d: -out.stride(d))
    assert by_q == by_out or 0 in q.stride()[:3] or out.numel() == 0


# ---- torch.compile


@pytest.fixture
def fresh_compile() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def strict_compile(fresh_compile: None) -> Iterator[None]:
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


@dataclass(frozen=True)
class Compiled:
    id: str
    call: Callable[..., Any]
    more: Callable[[int, int], tuple[torch.Tensor, ...]] = lambda q_len, kv_len: ()  # other arguments of the call
    sizes: tuple[int, ...] = (2, 2, 1, 16, 16, 16)
    order: tuple[int, ...] = (0, 1, 2, 3)
    lengths: tuple[tuple[int, int], ...] = ((17, 17), (33, 33), (40, 40))
    backend: str = "aot_eager"

    def inputs(self, q_len: int, kv_len: int, device: str) -> list[torch.Tensor]:
        batch, q_heads, kv_heads, _, _, dim = self.sizes
        qkv = make_qkv(batch, q_heads, kv_heads, q_len, kv_len, dim, dtype=torch.float32, device=device)
        return [*(stored(t, self.order) for t in qkv), *(moved(t, device) for t in self.more(q_len, kv_len))]


def ends(length: int) -> torch.Tensor:
    return torch.tensor([0, length // 3, length // 3, length - 2], dtype=torch.int32)


COMPILED = (
    Compiled("attention", lambda q, k, v: lazymax.attention(q, k, v)),
    Compiled(
        "causal, LSE",
        lambda q, k, v: sum(t.sum() for t in lazymax.attention(q, k, v, causal="top_left", return_lse=True)),
    ),
    Compiled(
        "cross", lambda q, k, v: lazymax.attention(q, k, v, window=(9, None)), lengths=((17, 40), (33, 41), (9, 70))
    ),
    Compiled("drop-in", lambda q, k, v: lazymax.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)),
    Compiled(
        "stored as B, S, H, D",
        lambda q, k, v: lazymax.attention(q, k, v).transpose(1, 2).flatten(2),
        order=(0, 2, 1, 3),
    ),
    Compiled(
        "bshd",
        lambda q, k, v: lazymax.attention(q.mT.mT.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), layout="bshd"),
    ),
    Compiled(
        "inductor",
        lambda q, k, v: lazymax.attention(q * 2, k + 1, v.sin()).transpose(1, 2).flatten(2) + 1,
        order=(0, 2, 1, 3),
        lengths=((19, 19), (37, 37)),
        backend="inductor",
    ),
    Compiled(
        "bool mask of batch and keys, drop-in",
        lambda q, k, v, mask: lazymax.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True),
        lambda q_len, kv_len: (bools(2, 1, 1, kv_len),),
        lengths=((17, 17), (33, 33)),
    ),
    Compiled(
        "every option",
        lambda q, k, v, mask, slopes, sinks, lengths, weight, table, limit, seed: lazymax.attention(
            q, k, v, attn_mask=mask, alibi_slopes=slopes, sinks=sinks, seqlens_k=lengths, score_mod="calls.tilt",
            score_mod_args=(weight, table), mask_mod="calls.sieve", mask_mod_args=(limit,), dropout_p=0.2,
            dropout_seed=seed, softcap=3.0, causal="bottom_right",
        ),
        lambda q_len, kv_len: (
            normal(q_len, kv_len), normal(2, 2), normal(2), torch.tensor([kv_len, kv_len // 2]), normal(2),
            normal(2, 3), torch.tensor([30, 7]), torch.tensor([3]),
        ),
        lengths=((9, 40), (17, 21)),
    ),
    Compiled(
        "packed",
        lambda q, k, v, q_ends, k_ends, sinks: lazymax.attention_varlen(
            *packed(q, k, v), q_ends, k_ends, q.shape[2], k.shape[2], causal="bottom_right", sinks=sinks
        ),
        lambda q_len, kv_len: (ends(q_len), ends(kv_len), normal(2)),
        sizes=(1, 2, 1, 16, 16, 16),
        order=(0, 2, 1, 3),
        lengths=((17, 40), (9, 21)),
    ),
)  # fmt: skip


@pytest.mark.parametrize("case", COMPILED, ids=lambda case: case.id)
def test_one_compilation_serves_all_lengths_forward_and_backward(
    case: Compiled, device: str, strict_compile: None
) -> None:
    compiled = torch.compile(case.call, fullgraph=True, dynamic=True, backend=case.backend)
    for lengths in case.lengths:
        inputs = case.inputs(*lengths, device)
        # The compiled call, the same call eagerly, and in float64.
        kinds = (torch.float32, torch.float32, torch.float64)
        ours, eager, exact = ([moved(t.detach(), device, kind, grad=True) for t in inputs] for kind in kinds)
        got, low, want = compiled(*ours), case.call(*eager), case.call(*exact)
        assert got.shape == low.shape and got.stride() == low.stride()
        for out in (got, low, want):
            out.square().sum().backward()
        assert_within(got, want, low, "out")
        for i, (x, y, z) in enumerate(zip(ours, exact, eager, strict=True)):
            assert (x.grad is None) is (z.grad is None) is (not x.is_floating_point())
            if x.grad is not None:
                assert_within(x.grad, y.grad, z.grad, f"gradient {i}")


@pytest.mark.parametrize("case", COMPILED[-1:], ids=lambda case: case.id)
def test_lengths_are_found_to_be_dynamic(case: Compiled, device: str, fresh_compile: None) -> None:
    """Without dynamic=True torch compiles once for the first length and once more for all others."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(case.call, fullgraph=True, backend=counter)
    for lengths in (*case.lengths, (21, 50)):
        inputs = case.inputs(*lengths, device)
        assert torch.equal(compiled(*inputs), case.call(*inputs))
    assert counter.frame_count == 2


def test_compiled_dropout_draws_a_new_seed_each_call(device: str, fresh_compile: None) -> None:
    q, k, v = make_qkv(1, 2, 2, 17, 33, 16, dtype=torch.float32, device=device)
    compiled = torch.compile(lambda q, k, v: lazymax.attention(q, k, v, dropout_p=0.5), fullgraph=True,
                             backend="aot_eager")  # fmt: skip
    torch.manual_seed(3)
    first, second = compiled(q, k, v), compiled(q, k, v)
    torch.manual_seed(3)
    assert not torch.equal(first, second) and torch.equal(compiled(q, k, v), first)


def test_compiled_under_autocast(device: str, strict_compile: None) -> None:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            return lazymax.scaled_dot_product_attention(q, k, v)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (17, 33):
        q, k, v = make_qkv(1, 2, 2, length, length, 16, dtype=torch.float32, device=device)
        out = compiled(q, k, v.bfloat16())
        assert out.dtype == torch.bfloat16 and torch.equal(out, call(q, k, v.bfloat16()))


def test_compiling_warns_of_nothing(device: str, fresh_compile: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._dynamo.utils, "warn_once_cache", set())
    q, k, v = make_qkv(1, 2, 2, 9, 9, 16, dtype=torch.float32, device=device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.compile(lazymax.attention, fullgraph=True, backend="aot_eager")(q, k, v, causal="top_left")
    assert [str(w.message) for w in caught if "triton" not in w.filename] == []


def test_bad_shapes_are_refused_while_tracing(strict_compile: None) -> None:
    q, k, v = make_qkv(1, 2, 2, 9, 9, 16)
    compiled = torch.compile(lazymax.attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="different head dims") as caught:
        compiled(q, k[..., :8], v)
    assert "ValueError" in repr(caught.value) + str(caught.value)


# ---- export


class Layer(torch.nn.Module):
    """A user's module."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return lazymax.scaled_dot_product_attention(q * self.scale, k, v, is_causal=True)


def test_export_keeps_one_node_and_free_lengths(device: str) -> None:
    qkv = make_qkv(2, 2, 2, 19, 19, 16, dtype=torch.float32, device=device)
    length = torch.export.Dim("length", min=2, max=4096)
    layer = Layer().to(device)
    program = torch.export.export(layer, qkv, dynamic_shapes=({2: length},) * 3)
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert targets.count(torch.ops.lazymax.attention_forward.default) == 1
    longer = make_qkv(2, 2, 2, 37, 37, 16, dtype=torch.float32, device=device)
    assert torch.equal(program.module()(*longer), layer(*longer))


def test_a_module_is_copied_and_pickled(device: str) -> None:
    layer = Layer().to(device)
    qkv = make_qkv(1, 2, 2, 9, 9, 16, dtype=torch.float32, device=device)
    want = layer(*qkv)
    assert torch.equal(copy.deepcopy(layer)(*qkv), want)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(*qkv), want)


# ---- empty and fake inputs


@dataclass(frozen=True)
class Empty:
    id: str
    sizes: tuple[int, ...]


EMPTIES = (
    Empty("no batch", (0, 4, 2, 5, 7, 8)),
    Empty("no heads", (2, 0, 0, 5, 7, 8)),
    Empty("no queries", (2, 4, 2, 0, 7, 8)),
    Empty("no keys", (2, 4, 2, 5, 0, 8)),
    Empty("no queries, no keys", (2, 4, 2, 0, 0, 8)),
    Empty("no head dim", (2, 4, 2, 5, 7, 0, 8)),
    Empty("no head dim of v", (2, 4, 2, 5, 7, 8, 0)),
)


@pytest.mark.parametrize("rules", [{}, dict(causal="bottom_right", window=(2, None))], ids=["full", "band"])
@pytest.mark.parametrize("case", EMPTIES, ids=lambda case: case.id)
def test_empty_inputs(case: Empty, rules: dict[str, Any], device: str) -> None:
    qkv = make_qkv(*case.sizes, dtype=torch.float32, device=device)
    leaf = leaves(qkv)
    out, lse = lazymax.attention(*leaf, return_lse=True, **rules)
    problem = Problem.from_call(*qkv, return_lse=True, **rules)
    for budget in check_attention(out.detach(), lse.detach(), *qkv, problem):
        assert budget.ok, str(budget)
    if case.sizes[4] == 0:
        assert (out == 0).all() and (lse == float("-inf")).all()
    (out.sum() + lse.masked_fill(lse.isinf(), 0.0).sum()).backward()
    for t in leaf:
        assert t.grad.shape == t.shape and t.grad.isfinite().all()


@pytest.mark.parametrize("case", EMPTIES, ids=lambda case: case.id)
def test_empty_inputs_with_every_option(case: Empty, device: str) -> None:
    batch, heads, _, q_len, kv_len, *_ = case.sizes
    q, k, v = leaves(make_qkv(*case.sizes, dtype=torch.float32, device=device))
    options = moved(
        dict(
            attn_mask=normal(q_len, kv_len), alibi_slopes=normal(batch, heads), sinks=normal(heads), softcap=2.0,
            seqlens_k=torch.full((batch,), kv_len // 2), dropout_p=0.2, dropout_seed=torch.tensor([1]),
            score_mod="calls.weigh", score_mod_args=(normal(heads),),
        ), device, grad=True,
    )  # fmt: skip
    out, lse = lazymax.attention(q, k, v, **options, return_lse=True)
    extras, rules = parse_options(q, **options)
    problem = Problem.from_tensors(q, k, v, extras, rules, return_lse=True)
    with torch.no_grad():
        for budget in check_attention(out, lse, q, k, v, problem, extras):
            assert budget.ok, str(budget)
    (out.sum() + lse.sum()).backward()
    for name, t in (*zip("qkv", (q, k, v), strict=True), *floats(options).items()):
        assert t.grad.shape == t.shape and t.grad.isfinite().all(), name
    if kv_len == 0:
        assert torch.equal(lse, options["sinks"][:, None].expand_as(lse))


@pytest.mark.parametrize("rows", [0, 3])
def test_no_sequence(rows: int, device: str) -> None:
    q, k, v = leaves([torch.ones(rows, 2, 8, device=device) for _ in "qkv"])
    none = torch.zeros(1, dtype=torch.int32, device=device)
    out, lse = lazymax.attention_varlen(q, k, v, none, none, return_lse=True)
    assert out.shape == (rows, 2, 8) and (out == 0).all()
    assert lse.shape == (2, rows) and (lse == float("-inf")).all()
    out.sum().backward()
    assert all((t.grad == 0).all() for t in (q, k, v))


def test_fake_tensors() -> None:
    with FakeTensorMode():
        q, k, v = torch.empty(2, 4, 5, 8), torch.empty(2, 2, 7, 8), torch.empty(2, 2, 7, 6)
        out, lse = lazymax.attention(q, k, v, causal="top_left", return_lse=True)
        assert (out.shape, lse.shape, lse.dtype) == ((2, 4, 5, 6), (2, 4, 5), torch.float32)
        assert lazymax.scaled_dot_product_attention(q, k, v, enable_gqa=True).shape == (2, 4, 5, 6)
        with pytest.raises(ValueError, match="different head dims"):
            lazymax.attention(q, k[..., :4], v)
        mask = torch.empty(5, 7)
        assert lazymax.attention(q, k, v, attn_mask=mask, dropout_p=0.5).shape == (2, 4, 5, 6)
        with pytest.raises(ValueError, match=r"attn_mask: got shape \(1, 1, 5, 4\)"):
            lazymax.attention(q, k, v, attn_mask=mask[:, :4])
        ends = torch.empty(4, dtype=torch.int64)
        assert lazymax.attention_varlen(*packed(q, k, v), ends, ends).shape == (5, 4, 6)


def test_tensors_on_different_devices_are_refused_by_the_operator() -> None:
    q, k, v = make_qkv(1, 2, 2, 5, 5, 8)
    with pytest.raises(ValueError, match="got devices cpu, cpu, meta, expected one"):
        FORWARD(q, k, v.to("meta"), *NO_EXTRAS, *NO_RULES, *ops.Options())


# ---- the cache of decisions


@pytest.fixture
def decisions(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Problem]]:
    """The problems that were decided during a test, starting from an empty cache."""
    made: list[Problem] = []
    real = ops._decide

    def spy(*arguments: Any) -> Any:
        decided = real(*arguments)
        made.append(decided.problem)
        return decided

    monkeypatch.setattr(ops, "_decided", {})
    monkeypatch.setattr(ops, "_decide", spy)
    yield made


@dataclass(frozen=True)
class Variant:
    id: str
    change: Callable[[Tensors], Any] = lambda qkv: qkv
    rules: dict[str, Any] = field(default_factory=dict)
    new: bool = True


VARIANTS = (
    Variant("dtype", lambda qkv: [t.bfloat16() for t in qkv]),
    Variant("fp32", lambda qkv: [t.float() for t in qkv]),
    Variant("strides of q", lambda qkv: (stored(qkv[0], (0, 2, 1, 3)), *qkv[1:])),
    Variant("strides of v", lambda qkv: (*qkv[:2], stored(qkv[2], (0, 2, 1, 3)))),
    Variant("head dimension of k", lambda qkv: (qkv[0], stored(qkv[1], (0, 1, 3, 2)), qkv[2])),
    Variant("address of q", lambda qkv: (odd_address(qkv[0]), *qkv[1:])),
    Variant("address of k", lambda qkv: (qkv[0], odd_address(qkv[1]), qkv[2])),
    Variant("address of v", lambda qkv: (*qkv[:2], odd_address(qkv[2]))),
    Variant("fewer queries", lambda qkv: (qkv[0][:, :, :-1], *qkv[1:])),
    Variant("fewer keys", lambda qkv: (qkv[0], qkv[1][:, :, :-1], qkv[2][:, :, :-1])),
    Variant("impl", rules=dict(impl="reference")),
    Variant("scale", rules=dict(scale=0.3)),
    Variant("scale of 1", rules=dict(scale=1)),
    Variant("threshold", rules=dict(rescale_threshold=0)),
    Variant("causal", rules=dict(causal="top_left")),
    Variant("bottom right", rules=dict(causal="bottom_right")),
    Variant("window", rules=dict(window=(3, 2))),
    Variant("window, the other way", rules=dict(window=(2, 3))),
    Variant("window, bottom right", rules=dict(window=(3, 2), window_align="bottom_right")),
    Variant("LSE", rules=dict(return_lse=True)),
    Variant("softcap", rules=dict(softcap=2.0)),
    Variant("another softcap", rules=dict(softcap=0.5)),
    Variant("mask", rules=dict(attn_mask=normal(9, 17))),
    Variant("mask of other values", rules=dict(attn_mask=normal(9, 17, seed=4)), new=False),
    Variant("mask, transposed", rules=dict(attn_mask=normal(17, 9).T)),
    Variant("mask of queries", rules=dict(attn_mask=normal(9, 1))),
    Variant("mask of keys", rules=dict(attn_mask=normal(1, 17))),
    Variant("mask of keys, expanded", rules=dict(attn_mask=normal(1, 17).expand(9, 17))),
    Variant("mask of heads", rules=dict(attn_mask=normal(2, 1, 1))),
    Variant("mask in fp16", rules=dict(attn_mask=normal(9, 17).half())),
    Variant("bool mask", rules=dict(attn_mask=bools(9, 17))),
    Variant("address of the mask", rules=dict(attn_mask=odd_address(normal(9, 17)))),
    Variant("slopes", rules=dict(alibi_slopes=normal(2))),
    Variant("slopes per batch", rules=dict(alibi_slopes=normal(1, 2))),
    Variant("slopes, bottom right", rules=dict(alibi_slopes=normal(2), window_align="bottom_right")),
    Variant("sinks", rules=dict(sinks=normal(2))),
    Variant("lengths", rules=dict(seqlens_k=torch.tensor([11]))),
    Variant("other lengths", rules=dict(seqlens_k=torch.tensor([3])), new=False),
    Variant("lengths in int32", rules=dict(seqlens_k=torch.tensor([11], dtype=torch.int32))),
    Variant("dropout", rules=dict(dropout_p=0.25, dropout_seed=torch.tensor([1]))),
    Variant("another seed", rules=dict(dropout_p=0.25, dropout_seed=torch.tensor([2])), new=False),
    Variant("more dropout", rules=dict(dropout_p=0.5, dropout_seed=torch.tensor([1]))),
    Variant("score_mod", rules=TILT),
    Variant("mask_mod", rules=SIEVE),
    Variant("both mods", rules={**TILT, **SIEVE}),
    Variant("packed", rules=dict(cu_seqlens_q=torch.tensor([0, 9]), cu_seqlens_k=torch.tensor([0, 17]))),
    Variant("otherwise packed", rules=dict(
        cu_seqlens_q=torch.tensor([0, 5]), cu_seqlens_k=torch.tensor([0, 9])), new=False),
    Variant("two sequences", rules=dict(
        cu_seqlens_q=torch.tensor([0, 5, 9]), cu_seqlens_k=torch.tensor([0, 9, 17]))),
    Variant("packed, longest", rules=dict(
        cu_seqlens_q=torch.tensor([0, 9]), cu_seqlens_k=torch.tensor([0, 17]), max_seqlen_k=17)),
)  # fmt: skip


def test_no_two_problems_share_a_decision_and_none_is_made_twice(decisions: list[Problem], device: str) -> None:
    base = make_qkv(1, 2, 2, 9, 17, 16, dtype=torch.float16, device=device)
    variants = [Variant("plain"), *VARIANTS]
    count = 0
    for turn in range(2):
        for case in variants:
            count += case.new and turn == 0
            qkv = case.change(base)
            options = moved(case.rules, device)
            how = ops.Options(*(options.pop(n, default) for n, default in ops.Options()._asdict().items()))
            extras, rules = parse_options(qkv[0], **options)
            out, lse = differentiation.forward(*qkv, extras, rules, how)
            problem = Problem.from_tensors(*qkv, extras, rules)
            for budget in check_attention(out, lse if how.return_lse else None, *qkv, problem, extras):
                assert budget.ok, f"{case.id}: {budget}"
            assert len(decisions) == count, case.id


def test_a_mod_of_the_same_name_makes_a_new_decision(
    decisions: list[Problem], monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(mods, "_registered", dict(mods._registered))
    monkeypatch.setattr(mods, "_forget", [ops._decided.clear])
    q, k, v = make_qkv(1, 2, 2, 9, 17, 16, dtype=torch.float16, device=device)
    weight = torch.full((2,), 0.5, device=device)
    results = []
    for function, reference in ((weigh, weigh_reference), (shift, shift_reference)):
        lazymax.register_score_mod("test_ops.changing", function, reference=reference)
        results.append(lazymax.attention(q, k, v, score_mod="test_ops.changing", score_mod_args=(weight,)))
        extras, rules = parse_options(q, score_mod="test_ops.changing", score_mod_args=(weight,))
        (budget,) = check_attention(results[-1], None, q, k, v, Problem.from_tensors(q, k, v, extras, rules), extras)
        assert budget.ok, str(budget)
    assert len(decisions) == 2 and not torch.equal(*results)


def test_the_cache_of_decisions_is_bounded(
    decisions: list[Problem], monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(ops, "_DECIDED_LIMIT", 4)
    for length in range(1, 9):
        q, k, v = make_qkv(1, 1, 1, length, length, 16, dtype=torch.float16, device=device)
        out = lazymax.attention(q, k, v)
        assert len(ops._decided) <= 4
        for budget in check_attention(out, None, q, k, v, Problem.from_call(q, k, v)):
            assert budget.ok, str(budget)
    assert len(decisions) == 8


def test_fp32_precision_is_part_of_the_problem(decisions: list[Problem], device: str) -> None:
    q, k, v = make_qkv(1, 1, 1, 9, 9, 16, dtype=torch.float32, device=device)
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "high", "highest"):
            torch.set_float32_matmul_precision(precision)
            lazymax.attention(q, k, v)
    finally:
        torch.set_float32_matmul_precision(before)
    assert [problem.fp32_precision for problem in decisions] == ["ieee", "tf32"]


def test_fp32_precision_by_torchs_newer_switch(decisions: list[Problem], device: str) -> None:
    """torch.get_float32_matmul_precision raises once the newer switch was used; a call of ours must not."""
    q, k, v = make_qkv(1, 1, 1, 9, 9, 16, dtype=torch.float32, device=device)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        for precision in ("ieee", "tf32"):
            torch.backends.cuda.matmul.fp32_precision = precision
            lazymax.attention(q, k, v)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert [problem.fp32_precision for problem in decisions] == ["ieee", "tf32"]


def test_the_same_call_gives_the_same_bits(device: str) -> None:
    q, k, v = make_qkv(1, 2, 1, 70, 70, 16, dtype=torch.float16, device=device)
    first = lazymax.attention(q, k, v, causal="top_left", return_lse=True)
    for _ in range(3):
        again = lazymax.attention(q, k, v, causal="top_left", return_lse=True)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


# ---- the GPU


def check(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rules: Any) -> None:
    for budget in check_attention(out, None, q, k, v, Problem.from_call(q, k, v, **rules)):
        assert budget.ok, str(budget)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [128, 333, 1000])
def test_cuda_graph_replays_new_values_after_a_warm_up_at_another_length(length: int) -> None:
    warm = make_qkv(1, 4, 2, 200, 200, 64, dtype=torch.float16, device="cuda")
    lazymax.attention(*warm, causal="top_left")
    torch.cuda.synchronize()
    q, k, v = make_qkv(1, 4, 2, length, length, 64, dtype=torch.float16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = lazymax.attention(q, k, v, causal="top_left")
    for seed in (1, 2):
        for t, new in zip((q, k, v), make_qkv(1, 4, 2, length, length, 64, seed=seed), strict=True):
            t.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        check(out, q, k, v, causal="top_left")


@pytest.mark.gpu
def test_runs_on_the_current_stream() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # inputs are ready long after a launch on another stream would have read them
        q, k, v = (t.clone() for t in make_qkv(1, 4, 2, 500, 500, 64, dtype=torch.float16, device="cuda"))
        for t in (q, k, v):
            t.mul_(2)
        leaf = leaves((q, k, v))
        out = lazymax.attention(*leaf)
        out.sum().backward()
    stream.synchronize()
    check(out.detach(), q, k, v)
    twin = leaves((q, k, v))
    lazymax.attention(*twin).sum().backward()
    assert all(torch.equal(x.grad, y.grad) for x, y in zip(leaf, twin, strict=True))


@pytest.mark.gpu
def test_inputs_on_a_gpu_that_is_not_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, this machine has {torch.cuda.device_count()}")
    assert torch.cuda.current_device() == 0
    q, k, v = make_qkv(1, 4, 2, 300, 300, 64, dtype=torch.float16, device="cuda:1")
    out = lazymax.attention(q, k, v, causal="top_left")
    assert out.device == q.device and torch.cuda.current_device() == 0
    check(out, q, k, v, causal="top_left")
    with pytest.raises(ValueError, match="got devices cuda:1, cuda:0, cuda:1, expected one"):
        lazymax.attention(q, k.to("cuda:0"), v)


@pytest.mark.gpu
def test_tensors_of_cpu_and_gpu_are_refused() -> None:
    q, k, v = make_qkv(1, 4, 2, 9, 9, 64, dtype=torch.float16, device="cuda")
    with pytest.raises(ValueError, match="got devices cuda:0, cpu, cuda:0, expected one"):
        lazymax.attention(q, k.cpu(), v)
