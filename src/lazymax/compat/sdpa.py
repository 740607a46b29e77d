"""`F.scaled_dot_product_attention` itself by lazymax: `replace_sdpa` takes its place in the whole process,
`register_with_torch` (sdpa_registry.py) offers the kernels to torch's own selection. Importing patches nothing."""

import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._device import DeviceContext

from .. import drop_in, ops
from ..dispatch import Plan
from ..reference import TORCH_SDPA
from .sdpa_registry import register_with_torch

__all__ = ["Replacement", "register_with_torch", "replace_sdpa", "scaled_dot_product_attention"]

_lock = threading.RLock()
_active = False  # whether `replacement` computes by lazymax; torch.compile guards on it
_replacing: "list[Replacement]" = []  # those that are active

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """What stands in torch's place while a `replace_sdpa` is active: `lazymax.scaled_dot_product_attention`.

    Arguments, shapes and errors of torch's function. torch's own one computes for tensor subclasses (DTensor, nested
    tensors), under torch function modes other than a default device (torch.export has one), in forward-mode
    differentiation, while torch.jit.trace records, and for whoever still holds this function when no `replace_sdpa` is
    active any more.
    """
    if _active:
        if _is_ours(query, key, value, attn_mask):
            return drop_in.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if attn_mask is not None and type(attn_mask) not in _PLAIN and _is_causal_bias(attn_mask):
            return _causal_bias(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        ops.observe(None)
    return TORCH_SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


replacement = scaled_dot_product_attention


def _is_ours(query: Any, key: Any, value: Any, mask: Any) -> bool:
    """Whether nothing but the call itself says what it means."""
    plain = type(query) in _PLAIN and type(key) in _PLAIN and type(value) in _PLAIN
    if not (plain and (mask is None or type(mask) in _PLAIN)):
        present = (query, key, value) if mask is None else (query, key, value, mask)
        if not all(type(t) in _PLAIN or _traces(t) for t in present):
            return False
    if torch._C._get_tracing_state() is not None:
        return False  # torch.jit.trace: the operator's implementation, called past the dispatcher, would leave no trace
    if torch.autograd.forward_ad._current_level >= 0 and not torch.compiler.is_compiling():
        return False
    modes = torch._C._len_torch_function_stack()
    return modes == 0 or all(isinstance(torch._C._get_function_stack_at(i), DeviceContext) for i in range(modes))


def _traces(t: Any) -> bool:
    """The tensors of torch's tracers stand for plain ones."""
    from torch._subclasses import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return isinstance(t, FakeTensor | FunctionalTensor)


def _is_causal_bias(mask: torch.Tensor) -> bool:
    from torch.nn.attention.bias import CausalBias  # takes a second, and who has one has paid it

    return type(mask) is CausalBias


def _causal_bias(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """A triangle of torch.nn.attention.bias. Its own __torch_function__ (torch 2.11 to 2.13) knows the call by `func is
    F.scaled_dot_product_attention`, which is the replacement and not what torch hands on; so this stands for it."""
    if is_causal or not _is_ours(query, key, value, None):
        return bias._dispatch(  # type: ignore[no-any-return]
            query, key, value, bias, dropout_p, is_causal, scale, enable_gqa
        )
    upper_left = bias.variant.name == "UPPER_LEFT" or bias.seq_len_q == bias.seq_len_kv
    mask = None if upper_left else bias._materialize(query.device)
    return drop_in.scaled_dot_product_attention(
        query, key, value, mask, dropout_p, upper_left, scale=scale, enable_gqa=enable_gqa
    )


class Replacement:
    """Handle of `replace_sdpa`, which see. A context manager.

    Attributes:
        kernel_calls: attention calls that a lazymax kernel computed while this was active, anywhere in the process.
        torch_calls: those that went to lazymax's reference or to torch's function.

    Calls are counted where lazymax decides them, in compiled functions too. Two kinds are not seen: what a compiled
    graph sends to torch's function directly, and the replay of a CUDA graph.
    """

    def __init__(self) -> None:
        self.kernel_calls = 0
        self.torch_calls = 0
        self._used = False
        self._outside: list[bool] = []  # per `with`: whether it was active before

    @property
    def active(self) -> bool:
        return any(other is self for other in tuple(_replacing))

    def activate(self) -> "Replacement":
        """Put lazymax in torch's place, and return the handle; nothing if it is active. Counts go on from where they
        were. Raises RuntimeError if the function that stands in torch's place is a third one."""
        with _lock:
            self._used = True
            if not self.active:
                _install()
                _replacing.append(self)
                ops.observers.append(self._observe)
        return self

    def deactivate(self) -> None:
        """Put torch's function back, once no other handle is active either; nothing if this one is not active."""
        with _lock:
            if self.active:
                _replacing[:] = [other for other in _replacing if other is not self]
                ops.observers.remove(self._observe)
                if not _replacing:
                    _uninstall()

    def _observe(self, plan: Plan | None) -> None:
        if torch.compiler.is_compiling():
            return  # tracing is no call
        with _lock:
            if plan is not None and plan.route == "triton":
                self.kernel_calls += 1
            else:
                self.torch_calls += 1

    def __enter__(self) -> "Replacement":
        with _lock:
            self._outside.append(self.active)
            return self.activate()

    def __exit__(self, *error: object) -> None:
        with _lock:
            if not self._outside.pop():
                self.deactivate()

    def __del__(self) -> None:
        if not self._used:
            warnings.warn(
                "lazymax.replace_sdpa() alone changes nothing: use it in a `with`, or call activate()", stacklevel=2
            )


def replace_sdpa() -> Replacement:
    """Make `torch.nn.functional.scaled_dot_product_attention` run through lazymax in the whole process, until undone.

        with lazymax.replace_sdpa() as sdpa:      # or: sdpa = lazymax.replace_sdpa().activate() ... sdpa.deactivate()
            model.generate(...)
        print(sdpa.kernel_calls, sdpa.torch_calls)

    Nothing changes before `with` or `activate()`. Then the function is replaced under every module-level name that it
    has (`from ... import` too, and modules imported later see the replacement), for all threads; calls of other threads
    at the moment of a change go either way. Undoing puts torch's own function back under all these names; who still
    holds the replacement elsewhere (a closure, a default argument) gets torch's function from it. Not replaced are
    references to torch's function that are no module-level names, calls from C++ (the fast path of
    torch.nn.TransformerEncoderLayer) and TorchScript.

    Handles nest: activating twice is activating once, an inner `with` leaves an outer one or an `activate()` as it
    found it, and with several handles torch's function comes back when the last is inactive. Each counts what ran while
    it was active, whoever activated first.

    Under torch.compile nothing needs a reset: compiled functions are guarded on the function, so they are compiled once
    more at their first call after a change and find both forms from then on. Their kernel calls are counted too.

    Every call that `lazymax.scaled_dot_product_attention` takes runs on lazymax, whatever
    torch.nn.attention.sdpa_kernel selects; `register_with_torch` leaves the selection to torch. What it does not take
    goes to torch's original function (`lazymax.reference.TORCH_SDPA`), as does what lazymax sends to its reference:
    never back to the replacement.
    """
    return Replacement()


def _install() -> None:
    global _active
    found = torch.nn.functional.scaled_dot_product_attention
    if found is not TORCH_SDPA and found is not replacement:
        raise RuntimeError(
            f"replace_sdpa: got {found!r} for torch.nn.functional.scaled_dot_product_attention, expected torch's own "
            "function; undo that replacement first"
        )
    for namespace, name in _names_of(TORCH_SDPA):
        namespace[name] = replacement
    _active = True


def _uninstall() -> None:
    global _active
    _active = False
    for namespace, name in _names_of(replacement):
        namespace[name] = TORCH_SDPA


# Past the module's class, which may load something when asked for an attribute.
_namespace_of: Callable[[Any], dict[str, Any]] = vars(types.ModuleType)["__dict__"].__get__


def _names_of(function: Callable[..., Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Where modules hold a function. Left alone: torch._C._nn, whose function it is, and lazymax's modules, which
    mean the one they name."""
    for module_name, module in list(sys.modules.items()):
        if not isinstance(module, types.ModuleType) or module is torch._C._nn:
            continue
        if module_name == "lazymax" or module_name.startswith("lazymax."):
            continue
        namespace = _namespace_of(module)
        for name, value in list(namespace.items()):
            if value is function:
                yield namespace, name
