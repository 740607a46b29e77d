"""Verification mode: silent on right results, loud on wrong ones, and gone after its block."""

import contextvars
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import lazymax
from lazymax import ops, verify
from lazymax.compat.tritons import triton_version
from lazymax.extras import Extras
from lazymax.kernels.launch import ForwardLaunch
from lazymax.testing import EPS, make_qkv, within_budget
from lazymax.verify import SHAPES, run_matrix

AT = (0, 1, 3, 4)


@pytest.fixture
def qkv(device: str) -> Any:
    return make_qkv(1, 2, 2, 19, 23, 16, dtype=torch.float16, device=device)


@pytest.fixture
def sabotage(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The kernel writes one wrong element. Counts the launches."""
    launches: list[int] = []
    real = ForwardLaunch.__call__

    def launch(self: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, extras: Any) -> None:
        real(self, q, k, v, out, lse, extras)
        out[AT] += 0.125
        launches.append(1)

    monkeypatch.setattr(ops, "_decided", {})
    monkeypatch.setattr(ForwardLaunch, "__call__", launch)
    yield launches


def test_right_results_pass_unchanged(qkv: Any) -> None:
    want = lazymax.attention(*qkv, return_lse=True)
    with lazymax.verification() as state:
        got = lazymax.attention(*qkv, return_lse=True)
        lazymax.scaled_dot_product_attention(*qkv, is_causal=True)
    assert (state.checked, state.mismatches) == (2, [])
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_the_reference_route_is_not_compared_with_itself(qkv: Any) -> None:
    with lazymax.verification() as state:
        lazymax.attention(*qkv, impl="reference")
    assert state.checked == 0


def test_a_wrong_element_raises_and_is_named(qkv: Any, sabotage: list[int]) -> None:
    with pytest.raises(lazymax.VerificationError) as caught, lazymax.verification() as state:
        lazymax.attention(*qkv, causal="top_left")
    message = str(caught.value)
    assert sabotage == [1] and state.mismatches == [message]
    plan = lazymax.explain(*qkv, causal="top_left", show=False).plan
    for words in (
        plan.describe(), "left the error budget", "out: error 0.12", f"worst at {AT}", "q (1, 2, 19, 16)",
        "k (1, 2, 23, 16)", "torch.float16", "causal=True", f"torch {torch.__version__}", f"Triton {triton_version()}",
        str(qkv[0].device),
    ):  # fmt: skip
        assert words in message, words
    assert isinstance(caught.value, AssertionError)


def test_a_wrong_lse_raises(qkv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ForwardLaunch.__call__

    def launch(self: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, extras: Any) -> None:
        real(self, q, k, v, out, lse, extras)
        lse[0, 1, 3] *= 1.4426950408889634  # base 2

    monkeypatch.setattr(ops, "_decided", {})
    monkeypatch.setattr(ForwardLaunch, "__call__", launch)
    with (
        pytest.raises(lazymax.VerificationError, match=r"lse: error .*worst at \(0, 1, 3, 0\)"),
        lazymax.verification(),
    ):
        lazymax.attention(*qkv, return_lse=True)


def test_an_output_that_was_not_written_raises(qkv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_decided", {})
    monkeypatch.setattr(ForwardLaunch, "__call__", lambda self, q, k, v, out, lse, extras: out.fill_(float("nan")))
    with pytest.raises(lazymax.VerificationError, match="error inf"), lazymax.verification():
        lazymax.attention(*qkv)


def test_fallback_returns_the_reference_and_warns_once(qkv: Any, sabotage: list[int]) -> None:
    with warnings.catch_warnings(record=True) as caught, lazymax.verification(on_mismatch="fallback") as state:
        warnings.simplefilter("always")
        results = [lazymax.attention(*qkv, return_lse=True) for _ in range(3)]
    messages = [
        str(w.message) for w in caught if issubclass(w.category, RuntimeWarning) and "lazymax" in str(w.message)
    ]
    assert len(messages) == 1 and messages[0].endswith("the reference's result is returned")
    assert state.checked == len(state.mismatches) == len(sabotage) == 3
    exact, exact_lse = lazymax.attention(*(t.double() for t in qkv), return_lse=True)
    for out, lse in results:
        assert torch.equal(out, exact.half())
        budget = within_budget(
            lse[..., None], exact_lse[..., None].double(), lse[..., None].clone(), eps=EPS[torch.float32]
        )
        assert budget.ok, str(budget)


def test_each_block_warns_for_itself(qkv: Any, sabotage: list[int]) -> None:
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="left the error budget"), lazymax.verification(on_mismatch="fallback"):
            lazymax.attention(*qkv)


@pytest.fixture
def unheeding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel computes another call than was asked for: masks, sinks and seeds of zeros, lengths one short."""
    real = ForwardLaunch.__call__

    def launch(self: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, extras: Extras) -> None:
        kept = {name: t for name, t in extras._asdict().items() if isinstance(t, torch.Tensor)}
        changed = {name: t - 1 if "seqlens" in name else torch.zeros_like(t) for name, t in kept.items()}
        args = tuple(t * 2 for t in extras.score_args)
        real(self, q, k, v, out, lse, extras._replace(**changed, score_args=args))

    monkeypatch.setattr(ops, "_decided", {})
    monkeypatch.setattr(ForwardLaunch, "__call__", launch)


@triton.jit
def _weigh(score, b, h, q_idx, k_idx, weight):
    return score * tl.load(weight + h)


lazymax.register_score_mod(
    "test_verify.weigh", _weigh, reference=lambda score, b, h, q_idx, k_idx, weight: score * weight[h]
)

FEATURES: dict[str, dict[str, Any]] = {
    "bool mask": dict(attn_mask=torch.arange(23) % 3 != 1),
    "float mask": dict(attn_mask=torch.linspace(-2, 2, 19)[:, None] * torch.linspace(-1, 1, 23)),
    "slopes": dict(alibi_slopes=torch.tensor([0.25, 0.5])),
    "sinks": dict(sinks=torch.tensor([1.0, 2.0])),
    "lengths": dict(seqlens_k=torch.tensor([9])),
    "dropout": dict(dropout_p=0.3, dropout_seed=torch.tensor([5])),
    "score_mod": dict(score_mod="test_verify.weigh", score_mod_args=(torch.tensor([0.5, 1.0]),)),
}


def moved(value: Any, device: str) -> Any:
    """Options of a call on the device."""
    if isinstance(value, dict):
        return {name: moved(item, device) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(moved(item, device) for item in value)
    return value.to(device) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES)
def test_features_are_checked(options: dict[str, Any], qkv: Any, device: str) -> None:
    options = moved(options, device)
    with lazymax.verification() as state:
        lazymax.attention(*qkv, **options)
    assert (state.checked, state.mismatches) == (1, [])


@pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES)
def test_a_kernel_that_does_not_heed_a_feature_is_found(
    options: dict[str, Any], qkv: Any, device: str, unheeding: None
) -> None:
    options = moved(options, device)
    with pytest.raises(lazymax.VerificationError, match="left the error budget"), lazymax.verification():
        lazymax.attention(*qkv, **options)
    with lazymax.verification(on_mismatch="fallback"), pytest.warns(RuntimeWarning):
        got = lazymax.attention(*qkv, **options)
    exact = lazymax.attention(*(t.double() for t in qkv), **options)
    assert torch.equal(got, exact.half())


@dataclass(frozen=True)
class Offsets:
    id: str
    q: list[int]
    k: list[int]
    words: str | None


OFFSETS = (
    Offsets("right", [0, 3, 3, 19], [0, 20, 21, 23], None),
    Offsets("rows behind the last", [0, 3, 4, 5], [0, 0, 1, 2], None),
    Offsets("not from 0", [1, 3, 4, 5], [0, 0, 1, 2], r"cu_seqlens_q: got \[1, 3, 4, 5\], expected offsets that begin"),
    Offsets("falling", [0, 3, 4, 5], [0, 3, 2, 5], r"cu_seqlens_k: got \[0, 3, 2, 5\], expected .* rise to 23 at most"),
    Offsets("beyond the rows", [0, 3, 4, 20], [0, 3, 4, 5], r"cu_seqlens_q: got .* rise to 19 at most"),
)


@pytest.mark.parametrize("case", OFFSETS, ids=lambda case: case.id)
def test_offsets_of_packed_sequences_are_read(case: Offsets, qkv: Any, device: str) -> None:
    packed = [t[0].transpose(0, 1) for t in qkv]
    offsets = [torch.tensor(ends, dtype=torch.int32, device=device) for ends in (case.q, case.k)]
    if case.words is None:
        with lazymax.verification() as state:
            lazymax.attention_varlen(*packed, *offsets)
        assert state.checked == 1
        return
    with pytest.raises(ValueError, match=case.words), lazymax.verification():
        lazymax.attention_varlen(*packed, *offsets)


def test_without_a_block_nothing_is_checked(qkv: Any, sabotage: list[int]) -> None:
    with lazymax.verification() as state:
        pass
    assert lazymax.attention(*qkv).isfinite().all()
    assert sabotage == [1] and state.checked == 0


def test_a_block_ends_with_an_exception(qkv: Any) -> None:
    with pytest.raises(KeyError), lazymax.verification() as state:
        raise KeyError
    lazymax.attention(*qkv)
    assert state.checked == 0 and verify._active.get() is None


def test_nested_blocks_the_inner_one_counts(qkv: Any, sabotage: list[int]) -> None:
    with lazymax.verification(on_mismatch="fallback") as outer:
        with pytest.raises(lazymax.VerificationError), lazymax.verification() as inner:
            lazymax.attention(*qkv)
        assert (outer.checked, inner.checked) == (0, 1)
        with pytest.warns(RuntimeWarning):
            lazymax.attention(*qkv)
    assert (outer.checked, inner.checked) == (1, 1)


def test_a_block_holds_for_its_thread(qkv: Any) -> None:
    with lazymax.verification() as state:
        for context, checked in ((contextvars.Context(), 0), (contextvars.copy_context(), 1)):
            thread = threading.Thread(target=context.run, args=(lazymax.attention, *qkv))
            thread.start()
            thread.join()
            assert state.checked == checked


def test_compiled_functions_are_checked(qkv: Any, sabotage: list[int]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lazymax.scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    compiled(*qkv)
    with lazymax.verification(on_mismatch="fallback") as state, pytest.warns(RuntimeWarning, match="error budget"):
        compiled(*qkv)
    assert state.checked == 1
    with pytest.raises(lazymax.VerificationError), lazymax.verification():
        compiled(*qkv)
    torch._dynamo.reset()


def test_gradients_pass_through(qkv: Any) -> None:
    leaf = [t.clone().requires_grad_() for t in qkv]
    with lazymax.verification() as state:
        lazymax.attention(*leaf).sum().backward()
    assert state.checked == 1 and all(t.grad.isfinite().all() for t in leaf)


@pytest.mark.parametrize("value", ["ignore", None, True], ids=repr)
def test_other_reactions_are_refused(value: Any) -> None:
    message = rf"on_mismatch: got {value!r}, expected 'raise' or 'fallback'"
    with pytest.raises(ValueError, match=message), lazymax.verification(on_mismatch=value):
        pass


@pytest.mark.gpu
def test_capture_inside_a_block_is_refused() -> None:
    q, k, v = make_qkv(1, 2, 2, 64, 64, 64, dtype=torch.float16, device="cuda")
    lazymax.attention(q, k, v)
    graph = torch.cuda.CUDAGraph()
    message = "cannot compare during CUDA-graph capture"
    with pytest.raises(RuntimeError, match=message), lazymax.verification(), torch.cuda.graph(graph):
        lazymax.attention(q, k, v)


# ---- the matrix of `lazymax verify`


SMALL = ("one query, one key", "rows without keys", "odd head dims")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_matrix(dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [shape for shape in SHAPES if shape.name in SMALL]
    assert len(shapes) == len(SMALL)
    monkeypatch.setattr(verify, "SHAPES", shapes)
    checks = list(run_matrix(torch.device(device), (dtype,)))
    assert [check.name for check in checks] == [f"{s.name}, {str(dtype).removeprefix('torch.')}" for s in shapes]
    assert [str(check) for check in checks if not check.ok] == []
    assert all(check.plan.startswith("triton:") and "out: error" in check.detail for check in checks)


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["auto", "portable", "reference"])
def test_whole_matrix(impl: str, device: str) -> None:
    checks = list(run_matrix(torch.device(device), (torch.float16, torch.bfloat16, torch.float32), impl))
    assert len(checks) == 3 * len(SHAPES)
    assert [str(check) for check in checks if not check.ok] == []


def test_matrix_reports_a_wrong_result(sabotage: list[int], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = verify.Shape("broken", (1, 2, 2, 9, 9, 16, 16))
    monkeypatch.setattr(verify, "SHAPES", (shape,))
    (check,) = run_matrix(torch.device(device), (torch.float16,))
    assert not check.ok and f"worst at {AT}" in check.detail
