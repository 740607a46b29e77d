"""lazymax among torch's flash attention implementations: registering, activating, restoring, and what it computes.

Without a GPU the same functions are put under the CPU's dispatch key, where torch has no flash kernel.
"""

import gc
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

import lazymax
from lazymax.compat import sdpa_registry as registry
from lazymax.compat.sdpa import register_with_torch
from lazymax.testing import EPS, make_qkv, within_budget

attention = importlib.import_module("torch.nn.attention")
aten = torch.ops.aten
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def tables(key: str) -> list[Any]:
    """What the dispatcher runs for a key, per operator."""
    return [
        (torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key), torch._C._dispatch_dump(f"aten::{name}"))
        for name in registry.IMPLEMENTATIONS
    ]


@pytest.fixture
def routes() -> Iterator[list[str]]:
    """The routes that lazymax's operator took; "torch" where torch's kernel was called."""
    taken: list[str] = []

    def observe(plan: Any) -> None:
        taken.append("torch" if plan is None else plan.route)

    lazymax.ops.observers.append(observe)
    yield taken
    lazymax.ops.observers.remove(observe)


@pytest.fixture
def flash(device: str) -> Iterator[None]:
    """lazymax in torch's place, for the device of the tests."""
    override = registry.override_flash("CPU" if device == "cpu" else "CUDA")
    yield
    override.remove()


def formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None = None) -> Any:
    """Attention and its LSE by formula, (B, H, S, D), grouped heads, causal bottom right, differentiable."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        s = s.masked_fill(~torch.ones_like(s[0, 0], dtype=torch.bool).tril(s.shape[-1] - s.shape[-2]), float("-inf"))
    return torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)


def assert_within(actual: torch.Tensor, exact: torch.Tensor, low: torch.Tensor, what: str) -> None:
    budget = within_budget(actual.detach(), exact.detach(), low.detach(), eps=4 * EPS[actual.dtype], what=what)
    assert budget.ok, str(budget)


# registering ----------------------------------------------------------------------------------------------------------


def test_importing_lazymax_patches_and_registers_nothing(clean_env: dict[str, str]) -> None:
    code = (
        "import torch; torchs = torch.nn.functional.scaled_dot_product_attention; import lazymax.compat.sdpa; "
        "assert torch.nn.functional.scaled_dot_product_attention is torchs; "
        "assert 'lazymax' not in torch.nn.attention.list_flash_attention_impls()"
    )
    subprocess.run([sys.executable, "-c", code], env=clean_env, check=True)


def test_activating_and_restoring_leave_the_dispatcher_as_it_was() -> None:
    before = tables("CUDA")
    register_with_torch()
    register_with_torch()  # twice is once
    assert attention.list_flash_attention_impls().count("lazymax") == 1
    assert tables("CUDA") == before and attention.current_flash_attention_impl() is None
    for _ in range(2):
        attention.activate_flash_attention_impl("lazymax")
        assert attention.current_flash_attention_impl() == "lazymax"
        during = tables("CUDA")
        assert all(has for has, _ in during) and all(a != b for (_, a), (_, b) in zip(during, before, strict=True))
        attention.restore_flash_attention_impl()
        assert tables("CUDA") == before and attention.current_flash_attention_impl() is None
    attention.activate_flash_attention_impl("lazymax")
    attention.activate_flash_attention_impl("lazymax")  # restores the first
    attention.restore_flash_attention_impl()
    gc.collect()
    assert tables("CUDA") == before


def test_removing_twice_is_removing_once() -> None:
    before = tables("CUDA")
    override = registry.override_flash()
    override.remove()
    override.remove()
    assert tables("CUDA") == before


def test_a_torch_without_a_registry_is_told_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(attention, "register_flash_attention_impl")
    with pytest.raises(NotImplementedError, match=r"torch .* has no registry .* 2\.10 or newer has; .*replace_sdpa"):
        register_with_torch()


# SDPA's operator ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    id: str
    sizes: tuple[int, ...] = (2, 2, 2, 5, 5, 16)
    causal: bool = False
    scale: float | None = None
    layout: str = "bhsd"
    dtype: torch.dtype = torch.float16

    def qkv(self, device: str) -> Tensors:
        return make_qkv(*self.sizes, dtype=self.dtype, device=device, layout=self.layout)  # type: ignore[arg-type]


CASES = (
    Case("full"),
    Case("causal", causal=True),
    Case("causal is bottom right", (1, 2, 2, 4, 7, 16), causal=True),
    Case("grouped", (1, 4, 2, 5, 6, 16), scale=0.5),
    Case("stored as B, S, H, D", (2, 2, 2, 5, 5, 16), causal=True, layout="bshd"),
    Case("fp32", dtype=torch.float32),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_forward_and_backward_through_autograd(case: Case, device: str, flash: None, routes: list[str]) -> None:
    """torch's autograd formula calls the backward with what the forward returned."""
    q, k, v = leaves = [t.requires_grad_() for t in case.qkv(device)]
    result = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, case.causal, scale=case.scale)
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, debug_mask = result
    assert routes == ["triton"]
    assert (cum_q, cum_k, max_q, max_k) == (None, None, q.shape[2], k.shape[2])
    assert lse.shape == q.shape[:3] and lse.dtype == torch.float32 and debug_mask.numel() == 0
    hip = torch.version.hip is not None
    assert seed.dtype == offset.dtype == (torch.int64 if hip else torch.uint64) and offset.shape == ()
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    grads = torch.autograd.grad(out, leaves, grad_out)

    wide = [t.detach().double().requires_grad_() for t in leaves]
    exact, exact_lse = formula(*wide, case.causal, case.scale)
    low = [t.detach().requires_grad_() for t in leaves]
    lowered, low_lse = formula(*low, case.causal, case.scale)
    assert_within(out, exact, lowered, "out")
    assert_within(lse[..., None], exact_lse[..., None], low_lse[..., None].float(), "lse")
    exact_grads = torch.autograd.grad(exact, wide, grad_out.double())
    low_grads = torch.autograd.grad(lowered, low, grad_out)
    for name, grad, grad64, grad_low in zip("qkv", grads, exact_grads, low_grads, strict=True):
        assert_within(grad, grad64, grad_low, f"d{name}")


STORED = {
    "dense": lambda t: t,
    "bshd": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "part of a projection": lambda t: torch.cat((t, t, t), -1)[..., : t.shape[-1]],
    "head dim not contiguous": lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
    "expanded": lambda t: t[:1].expand(t.shape),
    "one head": lambda t: t[:, :1],
}


@pytest.mark.parametrize("stored", STORED)
def test_strides_are_those_that_torch_promises_a_compiled_graph(stored: str, device: str, flash: None) -> None:
    q, k, v = (STORED[stored](t) for t in make_qkv(2, 2, 2, 5, 5, 16, device=device))
    real = aten._scaled_dot_product_flash_attention(q, k, v)
    back = aten._scaled_dot_product_flash_attention_backward(real[0], q, k, v, *real[:6], 0.0, False, *real[6:8])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fq, fk, fv = (mode.from_tensor(t) for t in (q, k, v))
        fake = aten._scaled_dot_product_flash_attention(fq, fk, fv)
        fake_back = aten._scaled_dot_product_flash_attention_backward(
            fake[0], fq, fk, fv, *fake[:6], 0.0, False, *fake[6:8]
        )
    for x, y in zip((*real[:2], real[8], *back), (*fake[:2], fake[8], *fake_back), strict=True):
        assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
    assert [(t.shape, t.dtype) for t in real[6:8]] == [(t.shape, t.dtype) for t in fake[6:8]]


def test_compiled(device: str, flash: None, routes: list[str]) -> None:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]

    leaves = [t.requires_grad_() for t in make_qkv(1, 2, 2, 5, 5, 16, device=device, layout="bshd")]
    torch.compiler.reset()
    out = torch.compile(call, fullgraph=True, backend="aot_eager")(*leaves)
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert routes[0] == "triton"
    expected = call(*leaves)
    assert torch.equal(out, expected) and out.stride() == expected.stride()
    for grad, eager in zip(grads, torch.autograd.grad(expected, leaves, torch.ones_like(out)), strict=True):
        assert torch.equal(grad, eager)


def test_gradients_of_one_device_of_a_ring(device: str, flash: None) -> None:
    """torch's ring attention calls the backward with the output and LSE over the keys of all devices, and the keys of
    one; the sums are the gradients."""
    q, k, v = make_qkv(1, 4, 2, 6, 8, 16, dtype=torch.float32, device=device)
    grad_out = torch.randn(1, 4, 6, 16, generator=torch.Generator().manual_seed(1)).to(device)
    whole = aten._scaled_dot_product_flash_attention(q, k, v)
    expected = aten._scaled_dot_product_flash_attention_backward(grad_out, q, k, v, *whole[:6], 0.0, False, *whole[6:8])
    parts = []
    for keys in (slice(0, 3), slice(3, 8)):
        parts.append(
            aten._scaled_dot_product_flash_attention_backward(
                grad_out, q, k[:, :, keys], v[:, :, keys], *whole[:6], 0.0, False, *whole[6:8]
            )
        )
    dq = parts[0][0] + parts[1][0]
    dk, dv = (torch.cat([part[i] for part in parts], 2) for i in (1, 2))
    for grad, want in zip((dq, dk, dv), expected, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-4, atol=1e-5)


# the flash operator: dense with the heads inside, and packed ----------------------------------------------------------


@pytest.mark.parametrize("window", ((None, None), (-1, -1), (2, 0), (1, 2)), ids=str)
@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
def test_flash_dense_is_attention(causal: bool, window: Any, device: str, flash: None) -> None:
    q, k, v = (t.transpose(1, 2) for t in make_qkv(2, 4, 2, 4, 6, 16, device=device))
    sides = dict(window_size_left=window[0], window_size_right=window[1])
    out, lse, _, _, _ = aten._flash_attention_forward(q, k, v, None, None, 4, 6, 0.0, causal, False, **sides)
    left = None if window[0] in (None, -1) else window[0]
    right = None if causal or window[1] in (None, -1) else window[1]
    expected, expected_lse = lazymax.attention(
        q, k, v, layout="bshd", causal="bottom_right" if causal else None, window=(left, right),
        window_align="bottom_right", return_lse=True,
    )  # fmt: skip
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse) and out.stride() == q.stride()


def test_flash_packed_forward_and_backward(device: str, flash: None, routes: list[str]) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [3, 0, 6]
    cum = torch.tensor([0, 3, 3, 9], dtype=torch.int32, device=device)
    q, k, v = leaves = [
        torch.randn(9, heads, 16, generator=generator).to(device).requires_grad_() for heads in (4, 2, 2)
    ]
    out, lse, _, _, _ = aten._flash_attention_forward(q, k, v, cum, cum, 6, 6, 0.0, True, False)
    assert out.shape == q.shape and lse.shape == (4, 9) and routes == ["triton"]
    grad_out = torch.randn(out.shape, generator=generator).to(out)
    grads = torch.autograd.grad(out, leaves, grad_out)

    wide, low = ([t.detach().to(dtype).requires_grad_() for t in leaves] for dtype in (torch.float64, torch.float32))
    made = []
    for tensors in (wide, low):
        heads_first = [[t.transpose(0, 1)[None] for t in x.split(lengths)] for x in tensors]
        parts = [formula(*part, causal=True)[0] for part in zip(*heads_first, strict=True)]
        whole = torch.cat([part[0].transpose(0, 1) for part in parts])
        made.append((whole, *torch.autograd.grad(whole, tensors, grad_out.to(whole))))
    for name, got, exact, lowered in zip(("out", "dq", "dk", "dv"), (out, *grads), *made, strict=True):
        assert_within(got, exact, lowered, name)


# what stays torch's ---------------------------------------------------------------------------------------------------


LEFT: tuple[tuple[str, Callable[..., Any], str], ...] = (
    ("dropout", lambda q: aten._scaled_dot_product_flash_attention(q, q, q, 0.5), "dropout_p=0.5"),
    (
        "debug mask",
        lambda q: aten._scaled_dot_product_flash_attention(q, q, q, 0.0, False, True),
        "return_debug_mask=True",
    ),
    (
        "dropout, backward",
        lambda q: aten._scaled_dot_product_flash_attention_backward(
            q, q, q, q, q, q.new_zeros(1, 2, 4).float(), None, None, 4, 4, 0.5, False, q, q
        ),
        "dropout_p=0.5",
    ),
    (
        "ALiBi",
        lambda q: aten._flash_attention_forward(
            q, q, q, None, None, 2, 2, 0.0, False, False, alibi_slopes=q.new_ones(4).float()
        ),
        "alibi_slopes",
    ),
    (
        "lengths",
        lambda q: aten._flash_attention_forward(
            q, q, q, None, None, 2, 2, 0.0, False, False, seqused_k=torch.ones(1, dtype=torch.int32, device=q.device)
        ),
        "seqused_k",
    ),
    (
        "packed queries alone",
        lambda q: aten._flash_attention_forward(
            q[0], q[0], q[0], torch.tensor([0, 2], dtype=torch.int32, device=q.device), None, 2, 2, 0.0, False, False
        ),
        "packed queries over keys that are not",
    ),
)


@pytest.mark.parametrize("call, words", [case[1:] for case in LEFT], ids=[case[0] for case in LEFT])
def test_what_is_left_to_torch_says_so_where_torch_has_no_kernel(call: Any, words: str, device: str) -> None:
    if device != "cpu":
        pytest.skip("torch has flash kernels there")
    override = registry.override_flash("CPU")
    try:
        with pytest.raises(
            NotImplementedError, match=rf"got {words}, which lazymax leaves to torch's kernel, and this"
        ):
            call(torch.randn(1, 2, 4, 16).half())
    finally:
        override.remove()


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_what_is_left_to_torch_reaches_torchs_kernel(routes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Under an operator for which the CPU has a kernel of torch's."""
    monkeypatch.setattr(registry, "COUNTED", "_scaled_dot_product_flash_attention_for_cpu")
    name = "_scaled_dot_product_flash_attention_for_cpu"
    q, k, v = make_qkv(1, 2, 2, 4, 5, 16, dtype=torch.float32)
    expected = getattr(aten, name)(q, k, v, 0.0, True, scale=0.5)[0]
    library = torch.library.Library("aten", "IMPL", "CPU")
    ours = registry._with_torch_behind(name, lambda *args, **kwargs: "nothing", "CPU")
    library.impl(name, ours, "CPU", with_keyset=True)
    try:
        assert torch.equal(getattr(aten, name)(q, k, v, 0.0, True, scale=0.5)[0], expected)
        assert routes == ["torch"]
    finally:
        registry.FlashOverride(library).remove()
    getattr(aten, name)(q, k, v)
    assert routes == ["torch"]


# on a GPU -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def activated() -> Iterator[None]:
    register_with_torch()
    attention.activate_flash_attention_impl("lazymax")
    torch.compiler.reset()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        yield
    attention.restore_flash_attention_impl()


def on_gpu(head_dim: int, kv_heads: int = 2) -> list[torch.Tensor]:
    made = make_qkv(2, 4, kv_heads, 150, 150, head_dim, dtype=torch.bfloat16, device="cuda")
    return [t.requires_grad_() for t in made]


def assert_gradients(leaves: list[torch.Tensor], grads: Any, grad_out: torch.Tensor) -> None:
    """Those of causal attention."""
    made = []
    for dtype in (torch.float64, torch.bfloat16):
        copies = [t.detach().to(dtype).requires_grad_() for t in leaves]
        made.append(torch.autograd.grad(formula(*copies, causal=True)[0], copies, grad_out.to(dtype)))
    for name, *of in zip("qkv", grads, *made, strict=True):
        assert_within(*of, f"d{name}")


def gpu_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", (False, True), ids=("eager", "inductor"))
@pytest.mark.parametrize("head_dim", (64, 68))  # 68: SDPA pads it for its flash kernels
def test_sdpa_selects_lazymax(head_dim: int, compiled: bool, activated: None, routes: list[str]) -> None:
    leaves = on_gpu(head_dim)
    out = (torch.compile(gpu_attention, fullgraph=True) if compiled else gpu_attention)(*leaves)
    assert routes == ["triton"]
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    assert_gradients(leaves, torch.autograd.grad(out, leaves, grad_out), grad_out)
    assert "torch" not in routes
    with torch.no_grad():
        assert_within(out, formula(*(t.double() for t in leaves), True)[0], formula(*leaves, True)[0], "out")


@pytest.mark.gpu
def test_dropout_is_torchs_forward_and_backward(activated: None, routes: list[str]) -> None:
    leaves = on_gpu(64, kv_heads=4)

    def run() -> Any:
        torch.manual_seed(5)
        out = F.scaled_dot_product_attention(*leaves, dropout_p=0.3)
        return out, *torch.autograd.grad(out.float().sum(), leaves)

    out, *grads = run()
    assert routes == ["torch"] and all(grad.isfinite().all() for grad in grads)
    attention.restore_flash_attention_impl()
    assert torch.equal(out, run()[0]) and routes == ["torch"]


@pytest.mark.gpu
def test_torchs_backward_takes_lazymaxs_forward_and_the_reverse(activated: None, routes: list[str]) -> None:
    leaves = on_gpu(64)
    ours = gpu_attention(*leaves)
    grad_out = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1)).to(ours)
    attention.restore_flash_attention_impl()
    assert_gradients(leaves, torch.autograd.grad(ours, leaves, grad_out), grad_out)
    theirs = gpu_attention(*leaves)
    assert routes == ["triton"]
    attention.activate_flash_attention_impl("lazymax")
    assert_gradients(leaves, torch.autograd.grad(theirs, leaves, grad_out), grad_out)
    assert len(routes) > 1


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_run_packed(activated: None, routes: list[str]) -> None:
    parts = [torch.randn(n, 2, 64, device="cuda", dtype=torch.float16) for n in (30, 75)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    out = F.scaled_dot_product_attention(nested, nested, nested, is_causal=True)
    assert routes == ["triton"]
    for got, part in zip(out.transpose(1, 2).unbind(), parts, strict=True):
        x = part.transpose(0, 1)[None]
        wide = x.double()
        assert_within(got.transpose(0, 1)[None], formula(wide, wide, wide, True)[0], formula(x, x, x, True)[0], "out")
