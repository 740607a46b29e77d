"""`replace_sdpa`: what stands where torch's function stood, eager and compiled, and that all of it goes back."""

import itertools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.overrides import TorchFunctionMode

import lazymax
from lazymax.compat import sdpa
from lazymax.testing import EPS, make_qkv, within_budget

TORCH = (torch._C._nn.scaled_dot_product_attention,)  # in a tuple: a module-level name would be replaced too
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def qkv(device: str, q_len: int = 5, kv_len: int = 7, dtype: torch.dtype = torch.float32, kv_heads: int = 2) -> Tensors:
    return make_qkv(2, 2, kv_heads, q_len, kv_len, 16, dtype=dtype, device=device)


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rules: Any) -> torch.Tensor:
    """torch's formula in float64."""
    mask = rules.pop("attn_mask", None)
    mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
    with sdpa_kernel(SDPBackend.MATH):
        return TORCH[0](q.double(), k.double(), v.double(), mask, **rules)


def assert_right(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rules: Any) -> None:
    with sdpa_kernel(SDPBackend.MATH):
        low = TORCH[0](q, k, v, **rules)
    budget = within_budget(out, exact(q, k, v, **rules), low, eps=EPS[out.dtype])
    assert budget.ok, str(budget)


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    """Every test begins and ends with torch's own function, and with nothing of ours that counts."""
    assert F.scaled_dot_product_attention is TORCH[0]
    yield
    assert F.scaled_dot_product_attention is TORCH[0]
    assert not sdpa._replacing and not lazymax.ops.observers


numbers = itertools.count()


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    """A module that did `from torch.nn.functional import scaled_dot_product_attention as attend`."""
    made = types.ModuleType(f"test_sdpa_consumer_{next(numbers)}")  # torch.compile keeps what it found by a name
    exec(
        "from torch.nn.functional import scaled_dot_product_attention as attend\n"
        "def call(q, k, v): return attend(q, k, v)",
        made.__dict__,
    )
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]


# where it stands ------------------------------------------------------------------------------------------------------


def test_a_handle_alone_changes_nothing_and_says_so() -> None:
    with pytest.warns(UserWarning, match=r"alone changes nothing.*activate\(\)"):
        lazymax.replace_sdpa()
    assert F.scaled_dot_product_attention is TORCH[0]


def test_every_module_level_name_is_replaced_and_put_back(module: types.ModuleType) -> None:
    holder = {"attend": TORCH[0]}  # no module-level name
    with lazymax.replace_sdpa():
        for name in (F.scaled_dot_product_attention, torch.nn.functional.scaled_dot_product_attention, module.attend):
            assert name is sdpa.replacement
        late = types.ModuleType("test_sdpa_late")
        sys.modules[late.__name__] = late
        exec("from torch.nn.functional import scaled_dot_product_attention", late.__dict__)
        assert late.scaled_dot_product_attention is sdpa.replacement
        assert holder["attend"] is torch._C._nn.scaled_dot_product_attention is TORCH[0]
        assert lazymax.reference.TORCH_SDPA is TORCH[0]
    del sys.modules[late.__name__]
    assert module.attend is late.scaled_dot_product_attention is F.scaled_dot_product_attention is TORCH[0]
    assert lazymax.scaled_dot_product_attention is not TORCH[0]
    assert sdpa.replacement is not TORCH[0]


def test_names_that_others_changed_meanwhile_are_left_alone(module: types.ModuleType) -> None:
    with lazymax.replace_sdpa():
        module.attend = len
    assert module.attend is len


def test_a_module_class_of_its_own_is_not_asked() -> None:
    class Lazy(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"asked for {name}")

        @property
        def __dict__(self) -> Any:
            raise AssertionError("asked for __dict__")

    sys.modules["test_sdpa_lazy"] = Lazy("test_sdpa_lazy")
    try:
        with lazymax.replace_sdpa():
            pass
    finally:
        del sys.modules["test_sdpa_lazy"]


def test_a_third_function_in_the_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = lazymax.replace_sdpa()
    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", len)
        with pytest.raises(RuntimeError, match=r"got <built-in function len>.*undo that replacement first"):
            handle.activate()
        assert not handle.active and F.scaled_dot_product_attention is len


def test_who_still_holds_the_replacement_gets_torchs_function(device: str) -> None:
    q, k, v = qkv(device)
    with lazymax.replace_sdpa() as handle:
        kept = F.scaled_dot_product_attention
        kept(q, k, v)
    before = handle.kernel_calls, handle.torch_calls
    torch.testing.assert_close(kept(q, k, v, is_causal=True), TORCH[0](q, k, v, is_causal=True), rtol=0, atol=0)
    assert (handle.kernel_calls, handle.torch_calls) == before == (1, 0)


# handles --------------------------------------------------------------------------------------------------------------


def test_activate_and_deactivate_twice_are_once(device: str) -> None:
    handle = lazymax.replace_sdpa()
    handle.deactivate()
    assert handle.activate() is handle.activate() is handle and handle.active
    F.scaled_dot_product_attention(*qkv(device))
    handle.deactivate()
    assert F.scaled_dot_product_attention is TORCH[0] and not handle.active
    handle.deactivate()
    assert handle.kernel_calls == 1
    with handle:
        F.scaled_dot_product_attention(*qkv(device))
    assert handle.kernel_calls == 2  # goes on


def test_with_leaves_what_it_found() -> None:
    handle = lazymax.replace_sdpa().activate()
    with handle, handle:
        pass
    assert handle.active
    handle.deactivate()
    with handle:
        with handle:
            pass
        assert handle.active and F.scaled_dot_product_attention is sdpa.replacement
    assert not handle.active


def test_an_error_inside_puts_back_too() -> None:
    with pytest.raises(KeyError), lazymax.replace_sdpa():
        raise KeyError


@pytest.mark.parametrize("first_out", (0, 1), ids=("the outer goes first", "the inner goes first"))
def test_two_handles_each_count_while_they_are_active(first_out: int, device: str) -> None:
    q, k, v = qkv(device)
    handles = [lazymax.replace_sdpa().activate()]
    F.scaled_dot_product_attention(q, k, v)
    handles.append(lazymax.replace_sdpa().activate())
    F.scaled_dot_product_attention(q, k, v)
    handles[first_out].deactivate()
    F.scaled_dot_product_attention(q, k, v)
    assert F.scaled_dot_product_attention is sdpa.replacement
    handles[1 - first_out].deactivate()
    F.scaled_dot_product_attention(q, k, v)
    assert [handle.kernel_calls for handle in handles] == ([2, 2] if first_out == 0 else [3, 1])


def test_threads_activate_and_count() -> None:
    q, k, v = qkv("cpu", dtype=torch.float64)  # torch's function: short calls
    shared = lazymax.replace_sdpa().activate()
    errors: list[Exception] = []

    def work() -> None:
        try:
            for _ in range(20):
                with lazymax.replace_sdpa() as mine:
                    F.scaled_dot_product_attention(q, k, v)
                    assert mine.torch_calls >= 1
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shared.deactivate()
    assert not errors and shared.torch_calls == 80


# what it computes -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A call of torch's function: rules, made of (q, k), and whether a kernel computes it."""

    id: str
    rules: Callable[[torch.Tensor, torch.Tensor], dict[str, Any]]
    sizes: dict[str, Any] = field(default_factory=dict)


def _random_mask(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(q.shape[0], 1, q.shape[2], k.shape[2], generator=generator) > 0.4
    mask[..., 0] = True
    return mask.to(q.device)


CASES = (
    Case("full", lambda q, k: {}),
    Case("causal", lambda q, k: dict(is_causal=True)),
    Case("scale", lambda q, k: dict(scale=0.5)),
    Case("grouped", lambda q, k: dict(enable_gqa=True), dict(kv_heads=1)),
    Case("fp16", lambda q, k: dict(is_causal=True), dict(dtype=torch.float16)),
    Case("boolean mask", lambda q, k: dict(attn_mask=_random_mask(q, k))),
    Case("added mask", lambda q, k: dict(attn_mask=_random_mask(q, k).to(q.dtype) * 2)),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_kernel_computes_it_and_is_counted(case: Case, device: str) -> None:
    q, k, v = qkv(device, **case.sizes)
    rules = case.rules(q, k)
    with lazymax.replace_sdpa() as handle:
        out = F.scaled_dot_product_attention(q, k, v, **rules)
    assert_right(out, q, k, v, **rules)
    assert (handle.kernel_calls, handle.torch_calls) == (1, 0)


LEFT = (
    Case("float64", lambda q, k: dict(is_causal=True), dict(dtype=torch.float64)),
    Case("float64 and a mask", lambda q, k: dict(attn_mask=_random_mask(q, k)), dict(dtype=torch.float64)),
)


@pytest.mark.parametrize("case", LEFT, ids=lambda case: case.id)
def test_what_no_kernel_takes_reaches_torchs_function_and_not_itself(case: Case, device: str) -> None:
    q, k, v = qkv(device, **case.sizes)
    rules = case.rules(q, k)
    with lazymax.replace_sdpa() as handle:
        out = F.scaled_dot_product_attention(q, k, v, **rules)
    assert_right(out, q, k, v, **rules)
    assert (handle.kernel_calls, handle.torch_calls) == (0, 1)


def test_lazymaxs_reference_reaches_torchs_function_and_not_itself(device: str) -> None:
    q, k, v = qkv(device)
    with lazymax.replace_sdpa() as handle:
        out = lazymax.attention(q, k, v, causal="top_left", impl="reference")
    assert_right(out, q, k, v, is_causal=True)
    assert (handle.kernel_calls, handle.torch_calls) == (0, 1)


def test_gradients(device: str) -> None:
    leaves = [t.requires_grad_() for t in qkv(device)]
    with lazymax.replace_sdpa() as handle:
        out = F.scaled_dot_product_attention(*leaves, is_causal=True)
        grads = torch.autograd.grad(out.square().sum(), leaves)
    assert handle.kernel_calls == 1
    with sdpa_kernel(SDPBackend.MATH):
        low = torch.autograd.grad(TORCH[0](*leaves, is_causal=True).square().sum(), leaves)
    doubled = [t.detach().double().requires_grad_() for t in leaves]
    wide = torch.autograd.grad(exact(*doubled, is_causal=True).square().sum(), doubled)
    for name, grad, grad64, grad32 in zip("qkv", grads, wide, low, strict=True):
        budget = within_budget(grad, grad64, grad32, eps=4 * EPS[grad.dtype], what=f"d{name}")
        assert budget.ok, str(budget)


def test_parameters_are_plain_tensors(device: str) -> None:
    q, k, v = qkv(device)
    with lazymax.replace_sdpa() as handle:
        F.scaled_dot_product_attention(torch.nn.Parameter(q), k, v)
    assert handle.kernel_calls == 1


def test_torchs_own_modules_come_here_too(device: str) -> None:
    attention = torch.nn.MultiheadAttention(32, 2, batch_first=True, device=device)
    x = torch.randn(2, 5, 32, device=device)
    with lazymax.replace_sdpa() as handle:
        out, _ = attention(x, x, x, need_weights=False)
    assert handle.kernel_calls == 1
    torch.testing.assert_close(out, attention(x, x, x, need_weights=False)[0], rtol=1e-3, atol=1e-4)


BAD = (
    ("seven positions", lambda f, q: f(q, q, q, None, 0.0, False, 0.5), TypeError),
    ("unknown keyword", lambda f, q: f(q, q, q, mask=None), TypeError),
    ("no value", lambda f, q: f(q, q), TypeError),
    ("query is a number", lambda f, q: f(1, q, q), TypeError),
    ("head dims", lambda f, q: f(q, q[..., :8], q), RuntimeError),
    ("mask and causal", lambda f, q: f(q, q, q, q.new_ones(5, 5).bool(), 0.0, True, scale=float("nan")), RuntimeError),
)


@pytest.mark.parametrize("call, error", [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_wrong_use_raises_what_torch_raises(call: Any, error: type[Exception], device: str) -> None:
    q = qkv(device)[0]
    with lazymax.replace_sdpa(), pytest.raises(error) as caught:
        call(F.scaled_dot_product_attention, q)
    assert type(caught.value) is error


def test_positions_and_keywords_are_torchs(device: str) -> None:
    q, k, v = qkv(device)
    with lazymax.replace_sdpa() as handle:
        by_position = F.scaled_dot_product_attention(q, k, v, None, 0.0, True, scale=0.5, enable_gqa=False)
        by_name = F.scaled_dot_product_attention(
            enable_gqa=False, scale=0.5, is_causal=True, dropout_p=0.0, attn_mask=None, value=v, key=k, query=q
        )
    assert torch.equal(by_position, by_name) and handle.kernel_calls == 2
    assert_right(by_position, q, k, v, is_causal=True, scale=0.5)


# whose torch's function stays the one -----------------------------------------------------------------------------


class Recorder(torch.Tensor):
    """A subclass with a __torch_function__, which sees what torch shows it."""

    seen: list[Any] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclasses_see_torchs_function(device: str) -> None:
    q, k, v = qkv(device)
    Recorder.seen.clear()
    with lazymax.replace_sdpa() as handle:
        out = F.scaled_dot_product_attention(q, k, v.as_subclass(Recorder))
    assert type(out) is Recorder and TORCH[0] in Recorder.seen
    assert (handle.kernel_calls, handle.torch_calls) == (0, 1)


class Watch(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_function_modes_see_torchs_function_but_a_default_device_is_none(device: str) -> None:
    q, k, v = qkv(device)
    with lazymax.replace_sdpa() as handle:
        with Watch() as watch:
            F.scaled_dot_product_attention(q, k, v)
        assert watch.seen == [TORCH[0]] and (handle.kernel_calls, handle.torch_calls) == (0, 1)
        with torch.device(device):
            F.scaled_dot_product_attention(q, k, v)
        assert (handle.kernel_calls, handle.torch_calls) == (1, 1)


@pytest.mark.parametrize("q_len", (5, 7))
@pytest.mark.parametrize("bias", (causal_upper_left, causal_lower_right))
def test_causal_biases(bias: Any, q_len: int, device: str) -> None:
    q, k, v = qkv(device, q_len=q_len)
    triangle = bias(q_len, 7)
    with lazymax.replace_sdpa() as handle:
        out = F.scaled_dot_product_attention(q, k, v, triangle)
        with pytest.raises(ValueError, match="CausalBias should not be used with causal=True"):
            F.scaled_dot_product_attention(q, k, v, triangle, is_causal=True)
    assert type(out) is torch.Tensor
    assert_right(out, q, k, v, attn_mask=triangle._materialize(q.device))
    assert (handle.kernel_calls, handle.torch_calls) == (1, 0)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_jit_trace_records_torchs_operator(device: str) -> None:
    q, k, v = (t[:1] for t in qkv(device))
    with lazymax.replace_sdpa():
        traced = torch.jit.trace(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), (q, k, v))
    assert "aten::scaled_dot_product_attention" in str(traced.graph)


def test_forward_mode_differentiation_is_torchs() -> None:
    q, k, v = qkv("cpu")
    with sdpa_kernel(SDPBackend.MATH):
        with lazymax.replace_sdpa():
            _, tangent = torch.func.jvp(lambda q: F.scaled_dot_product_attention(q, k, v), (q,), (q,))
        _, expected = torch.func.jvp(lambda q: TORCH[0](q, k, v), (q,), (q,))
    torch.testing.assert_close(tangent, expected, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_torchs() -> None:
    parts = [torch.randn(n, 2, 16) for n in (3, 5)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    with lazymax.replace_sdpa():
        out = F.scaled_dot_product_attention(nested, nested, nested)
    for got, part in zip(out.transpose(1, 2).unbind(), parts, strict=True):
        x = part.transpose(0, 1)
        torch.testing.assert_close(got.transpose(0, 1), TORCH[0](x, x, x), rtol=1e-5, atol=1e-5)


# under torch.compile --------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("how", ("attribute", "from-import"))
@pytest.mark.parametrize("begin", ("before", "while"))
def test_compiled_code_follows_every_change(
    how: str, begin: str, device: str, module: types.ModuleType, fresh_dynamo: None
) -> None:
    """Compiled before or while it is active: each change takes effect at the next call, without a reset, at the cost of
    one more compilation the first time only."""
    q, k, v = qkv(device)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend if how == "attribute" else module.call, fullgraph=True, backend=counter)
    rules = dict(is_causal=True) if how == "attribute" else {}
    handle = lazymax.replace_sdpa()
    if begin == "before":
        assert_right(compiled(q, k, v), q, k, v, **rules)
    for round_ in range(1, 4):
        with handle:
            assert_right(compiled(q, k, v), q, k, v, **rules)
            assert_right(compiled(q, k, v), q, k, v, **rules)
        assert (handle.kernel_calls, handle.torch_calls) == (2 * round_, 0)
        assert_right(compiled(q, k, v), q, k, v, **rules)
        assert (handle.kernel_calls, handle.torch_calls) == (2 * round_, 0)
    assert counter.frame_count == 2


def test_one_graph_serves_all_lengths(device: str, fresh_dynamo: None) -> None:
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    with lazymax.replace_sdpa() as handle, torch._dynamo.config.patch(error_on_recompile=True):
        for length in (3, 5, 9):
            q, k, v = qkv(device, q_len=length, kv_len=length + 1)
            assert_right(compiled(q, k, v), q, k, v, is_causal=True)
    assert handle.kernel_calls == 3


def test_compiled_with_a_mask_and_a_default_device(device: str, fresh_dynamo: None) -> None:
    q, k, v = qkv(device)
    mask = _random_mask(q, k)
    compiled = torch.compile(
        lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, mask), fullgraph=True, backend="aot_eager"
    )
    with lazymax.replace_sdpa() as handle, torch.device(device):
        assert_right(compiled(q, k, v, mask), q, k, v, attn_mask=mask)
    assert (handle.kernel_calls, handle.torch_calls) == (1, 0)


def test_compiled_calls_that_torch_computes_are_right(device: str, fresh_dynamo: None) -> None:
    q, k, v = qkv(device, dtype=torch.float64)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    with lazymax.replace_sdpa() as handle:
        assert_right(compiled(q, k, v), q, k, v, is_causal=True)
        assert_right(compiled(q, k, v), q, k, v, is_causal=True)
    assert handle.kernel_calls == 0


def test_inductor_forward_and_backward(device: str, fresh_dynamo: None) -> None:
    """Nothing around the call: a C++ kernel of Inductor's costs 20 s on the CPU."""
    leaves = [t.requires_grad_() for t in qkv(device)]
    compiled = torch.compile(attend, fullgraph=True)
    with lazymax.replace_sdpa() as handle:
        out = compiled(*leaves)
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
        assert handle.kernel_calls == 1
        eager_out = attend(*leaves)
        eager = torch.autograd.grad(eager_out, leaves, torch.ones_like(eager_out))
    assert_right(out.detach(), *(t.detach() for t in leaves), is_causal=True)
    for grad, expected in zip(grads, eager, strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-6)


# on a GPU -------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_on_a_gpu_whatever_torch_selects(dtype: torch.dtype) -> None:
    q, k, v = make_qkv(2, 4, 4, 200, 200, 64, dtype=dtype, device="cuda")
    with lazymax.replace_sdpa() as handle, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert handle.kernel_calls == 1
    assert_right(out, q, k, v, is_causal=True)


@pytest.mark.gpu
def test_a_cuda_graph_keeps_the_kernel_it_captured() -> None:
    q, k, v = make_qkv(1, 2, 2, 100, 100, 64, dtype=torch.float16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with lazymax.replace_sdpa() as handle:
        F.scaled_dot_product_attention(q, k, v)
        with torch.cuda.graph(graph):
            out = F.scaled_dot_product_attention(q, k, v)
    q.neg_()
    graph.replay()
    assert handle.kernel_calls == 2  # the warm-up and the capture
    assert_right(out, q, k, v)
