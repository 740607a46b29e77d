"""Modifications of scores and masks that users write: `@triton.jit` functions, registered under a name, which the
kernel inlines. A name is what a compiled graph can hold.

The form of the functions, `(score, b, h, q_idx, k_idx) -> score` and `(b, h, q_idx, k_idx) -> bool`, is that of
FlexAttention (Dong et al., 2024).
"""

import dis
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_LEADING = {"score_mod": ("score", "b", "h", "q_idx", "k_idx"), "mask_mod": ("b", "h", "q_idx", "k_idx")}


@dataclass(frozen=True, slots=True)
class Mod:
    """One registered modification."""

    kind: str  # "score_mod" or "mask_mod"
    name: str
    function: Any  # triton.JITFunction
    reference: Callable[..., Any] | None  # the same in torch operations
    derivative: Any = None  # of a score_mod, by its score: triton.JITFunction or None

    def check_arguments(self, count: int) -> None:
        """Raise ValueError unless the function takes `count` tensors beside its leading arguments."""
        takes = len(inspect.signature(self.function.fn).parameters) - len(_LEADING[self.kind])
        if takes != count:
            raise ValueError(f"{self.kind}_args: got {count} tensors, {self.kind} {self.name!r} takes {takes}")

    def uses(self, parameter: str) -> bool:
        """Whether the function looks at one of its parameters ("b", "h"), whatever it calls it."""
        name = list(inspect.signature(self.function.fn).parameters)[_LEADING[self.kind].index(parameter)]
        names = (i.argval for i in dis.get_instructions(self.function.fn))
        return any(name == used or (isinstance(used, tuple) and name in used) for used in names)

    def twin(self) -> Callable[..., Any]:
        """The torch form; NotImplementedError if none was registered."""
        if self.reference is None:
            raise NotImplementedError(
                f"{self.kind}: {self.name!r} was registered without reference=, the same function in torch operations; "
                "the CPU route, verification and gradients need it"
            )
        return self.reference


_registered: dict[tuple[str, str], Mod] = {}
_forget: list[Callable[[], None]] = []  # called when a name gets another function


def get(kind: str, name: str) -> Mod:
    """The modification of a name; ValueError names those that there are."""
    found = _registered.get((kind, name))
    if found is None:
        names = sorted(known for of, known in _registered if of == kind)
        raise ValueError(f"{kind}: got {name!r}, registered are {', '.join(map(repr, names)) or 'none'}")
    return found


def has_derivative(name: str) -> bool:
    """Whether a score_mod of that name is registered, with its derivative."""
    found = _registered.get(("score_mod", name))
    return found is not None and found.derivative is not None


def _register(kind: str, name: str, function: Any, reference: Callable[..., Any] | None, derivative: Any = None) -> Any:
    if not isinstance(name, str):
        raise TypeError(f"register_{kind}: got name {name!r}, expected a string")
    if function is None:
        return lambda function: _register(kind, name, function, reference, derivative)
    count = _check_function(kind, "", function, None)
    if derivative is not None:
        _check_function(kind, "derivative ", derivative, count)
    if reference is not None and not callable(reference):
        raise TypeError(f"register_{kind}: got reference {reference!r}, expected a function")
    _registered[kind, name] = Mod(kind, name, function, reference, derivative)
    for call in _forget:
        call()
    return function


def _check_function(kind: str, what: str, function: Any, count: int | None) -> int:
    """Raise TypeError unless it is a jitted function of the leading parameters and more, `count` in all if given.
    Returns how many it has."""
    leading = _LEADING[kind]
    plain = getattr(function, "fn", None)  # of a JITFunction; asking for its type would import Triton
    if not callable(plain):
        raise TypeError(f"register_{kind}: got {what}{function!r}, expected a function decorated with @triton.jit")
    parameters = inspect.signature(plain).parameters.values()
    positional = all(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    if not positional or len(parameters) < len(leading):
        raise TypeError(
            f"register_{kind}: got {what}{inspect.signature(plain)}, expected ({', '.join(leading)}) and then one "
            "parameter per tensor argument"
        )
    if count not in (None, len(parameters)):
        raise TypeError(f"register_{kind}: got {what}of {len(parameters)} parameters, expected {count} as the function")
    return len(parameters)


def register_score_mod(
    name: str, function: Any = None, *, reference: Callable[..., Any] | None = None, derivative: Any = None
) -> Any:
    """Register a `@triton.jit` function `(score, b, h, q_idx, k_idx, *args) -> score` as `score_mod=name`.

    Args:
        name: what `attention(score_mod=...)` takes. A name that is taken gets the new function.
        function: a function decorated with `@triton.jit`; without it, `register_score_mod(name)` is a decorator.
            score: fp32 tile, scale (and softcap, ALiBi and a float mask, if given) applied, natural units. b, h: batch
            element (or packed sequence) and query head, int32 scalars. q_idx, k_idx: int32 columns and rows that
            broadcast to the tile, positions in the sequence. args: pointers to the tensors of `score_mod_args`.
        reference: the same in torch operations, all arguments tensors that broadcast (args: the tensors themselves).
            The CPU route, verification and gradients (also those of the tensors) use it and raise without it; but see
            derivative.
        derivative: a `@triton.jit` function of the same parameters that returns d(result) / d(score). With it kernels
            compute the gradients, unless a tensor of `score_mod_args` wants one.

    Returns the function. Raises TypeError for something else than a jitted function of these parameters.
    """
    return _register("score_mod", name, function, reference, derivative)


def register_mask_mod(name: str, function: Any = None, *, reference: Callable[..., Any] | None = None) -> Any:
    """Register a `@triton.jit` function `(b, h, q_idx, k_idx, *args) -> bool`, True keeps, as `mask_mod=name`.

    Arguments, result and errors as in `register_score_mod`. Key blocks without any kept pair are skipped.
    """
    return _register("mask_mod", name, function, reference)
