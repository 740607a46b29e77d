"""Modifications of scores and masks: registration, its errors, and what is known of a function without running it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import lazymax
from lazymax import mods, ops
from lazymax.testing import EPS, make_qkv, within_budget


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Any, Any]]:
    """The names of each test are gone after it."""
    monkeypatch.setattr(mods, "_registered", dict(mods._registered))
    yield mods._registered
    ops._decided.clear()


@triton.jit
def double(score, b, h, q_idx, k_idx):
    return score * 2.0


@triton.jit
def halve(score, b, h, q_idx, k_idx):
    return score * 0.5


@triton.jit
def of_tensors(score, b, h, q_idx, k_idx, one, two):
    return score + tl.load(one + b) + tl.load(two + h)


@triton.jit
def near(b, h, q_idx, k_idx):
    return tl.abs(q_idx - k_idx) < 4


@triton.jit
def far(b, h, q_idx, k_idx):
    return tl.abs(q_idx - k_idx) >= 4


REGISTER = {"score_mod": lazymax.register_score_mod, "mask_mod": lazymax.register_mask_mod}
FUNCTION = {"score_mod": double, "mask_mod": near}


@pytest.mark.parametrize("kind", REGISTER)
def test_a_registered_function_is_found_by_its_name(kind: str) -> None:
    def twin(*arguments: Any) -> None:
        return None

    assert REGISTER[kind]("mine", FUNCTION[kind], reference=twin) is FUNCTION[kind]
    found = mods.get(kind, "mine")
    assert (found.kind, found.name, found.function, found.twin()) == (kind, "mine", FUNCTION[kind], twin)
    other = next(name for name in REGISTER if name != kind)
    with pytest.raises(ValueError, match=f"{other}: got 'mine', registered are "):
        mods.get(other, "mine")


@pytest.mark.parametrize("kind", REGISTER)
def test_the_decorator(kind: str) -> None:
    decorate = REGISTER[kind]("decorated", reference=max)
    assert decorate(FUNCTION[kind]) is FUNCTION[kind]
    assert mods.get(kind, "decorated").twin() is max


def test_unknown_names_are_answered_with_the_known_ones(registered: dict[Any, Any]) -> None:
    registered.clear()
    with pytest.raises(ValueError, match="mask_mod: got 'x', registered are none"):
        mods.get("mask_mod", "x")
    for name in "ba":
        lazymax.register_mask_mod(name, near)
    with pytest.raises(ValueError, match="mask_mod: got 'x', registered are 'a', 'b'"):
        mods.get("mask_mod", "x")


def plain(score, b, h, q_idx, k_idx):
    return score


def _short(score, b, h, q_idx):
    return score


def _starred(score, b, h, q_idx, k_idx, *args):
    return score


def _keyword(score, b, h, q_idx, k_idx, *, weight):
    return score


@dataclass(frozen=True)
class Bad:
    id: str
    register: Any
    words: tuple[str, ...]


BAD = (
    Bad("name is a number", lambda: lazymax.register_score_mod(3, double),
        ("register_score_mod: got name 3", "expected a string")),
    Bad("name is the function", lambda: lazymax.register_mask_mod(near),
        ("register_mask_mod: got name", "expected a string")),
    Bad("function is not jitted", lambda: lazymax.register_score_mod("x", plain),
        ("register_score_mod: got <function plain", "decorated with @triton.jit")),
    Bad("function is a name", lambda: lazymax.register_score_mod("x", "double"),
        ("register_score_mod: got 'double'", "decorated with @triton.jit")),
    Bad("too few parameters", lambda: lazymax.register_score_mod("x", triton.jit(_short)),
        ("register_score_mod: got (score, b, h, q_idx)", "expected (score, b, h, q_idx, k_idx) and then")),
    Bad("a score_mod of a mask_mod's parameters", lambda: lazymax.register_score_mod("x", near),
        ("register_score_mod: got (b, h, q_idx, k_idx)", "expected (score, b, h, q_idx, k_idx)")),
    Bad("any number of tensors", lambda: lazymax.register_score_mod("x", triton.jit(_starred)),
        ("*args", "one parameter per tensor argument")),
    Bad("keywords", lambda: lazymax.register_score_mod("x", triton.jit(_keyword)),
        ("*, weight", "one parameter per tensor argument")),
    Bad("reference is no function", lambda: lazymax.register_mask_mod("x", near, reference=True),
        ("register_mask_mod: got reference True", "expected a function")),
    Bad("derivative is not jitted", lambda: lazymax.register_score_mod("x", double, derivative=plain),
        ("register_score_mod: got derivative <function plain", "decorated with @triton.jit")),
    Bad("derivative takes a tensor more", lambda: lazymax.register_score_mod("x", double, derivative=of_tensors),
        ("register_score_mod: got derivative of 7 parameters, expected 5 as the function",)),
    Bad("the decorator, not jitted", lambda: lazymax.register_mask_mod("x")(plain),
        ("register_mask_mod: got <function plain", "decorated with @triton.jit")),
)  # fmt: skip


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.id)
def test_something_else_than_a_modification_is_refused(case: Bad, registered: dict[Any, Any]) -> None:
    before = dict(registered)
    with pytest.raises(TypeError) as caught:
        case.register()
    for words in case.words:
        assert words in str(caught.value)
    assert registered == before


def test_arguments_are_counted() -> None:
    lazymax.register_score_mod("two", of_tensors)
    found = mods.get("score_mod", "two")
    found.check_arguments(2)
    for count in (0, 1, 3):
        with pytest.raises(ValueError, match=f"score_mod_args: got {count} tensors, score_mod 'two' takes 2"):
            found.check_arguments(count)


@pytest.mark.parametrize("kind", REGISTER)
def test_without_a_torch_form_the_reference_refuses(kind: str, device: str) -> None:
    REGISTER[kind]("alone", FUNCTION[kind])
    with pytest.raises(NotImplementedError, match=f"{kind}: 'alone' was registered without reference="):
        mods.get(kind, "alone").twin()
    q, k, v = make_qkv(1, 2, 2, 9, 17, 16, device=device)
    assert lazymax.attention(q, k, v, **{kind: "alone"}).isfinite().all()  # the kernel needs none
    message = "registered without reference="
    with pytest.raises(NotImplementedError, match=message):
        lazymax.attention(q, k, v, **{kind: "alone"}, impl="reference")
    leaf = q.clone().requires_grad_()
    out = lazymax.attention(leaf, k, v, **{kind: "alone"})
    if kind == "mask_mod":  # its gradients come from the kernels
        out.sum().backward()
        assert leaf.grad is not None and leaf.grad.isfinite().all()
    else:
        with pytest.raises(NotImplementedError, match=message):
            out.sum().backward()
    with pytest.raises(NotImplementedError, match=message), lazymax.verification():
        lazymax.attention(q, k, v, **{kind: "alone"})


# ---- uses


@triton.jit
def _helper(x):
    return x + 1


@dataclass(frozen=True)
class Uses:
    """A mask_mod and which of batch and head it looks at."""

    id: str
    function: Any
    uses: tuple[str, ...] = field(default=())


def _nothing(b, h, q_idx, k_idx):
    return q_idx > k_idx


def _batch(b, h, q_idx, k_idx):
    return (q_idx + b) > k_idx


def _head(b, h, q_idx, k_idx):
    return (q_idx + h) > k_idx


def _both(b, h, q_idx, k_idx):
    x = b * 7 + h
    return q_idx > x


def _renamed(head, batch, row, col):
    return row + batch > col


def _called(b, h, q_idx, k_idx):
    return q_idx > _helper(b)


def _loaded(b, h, q_idx, k_idx, table):
    return tl.load(table + h) > k_idx


def _together(b, h, q_idx, k_idx):
    return (b == h) & (q_idx > k_idx)


USES = (
    Uses("nothing", _nothing),
    Uses("batch", _batch, ("b",)),
    Uses("head", _head, ("h",)),
    Uses("both", _both, ("b", "h")),
    Uses("by other names", _renamed, ("h",)),
    Uses("through a call", _called, ("b",)),
    Uses("as an address", _loaded, ("h",)),
    Uses("in one instruction of newer Pythons", _together, ("b", "h")),
)


@pytest.mark.parametrize("case", USES, ids=lambda case: case.id)
def test_which_parameters_a_function_looks_at(case: Uses) -> None:
    lazymax.register_mask_mod("looks", triton.jit(case.function))
    found = mods.get("mask_mod", "looks")
    assert tuple(name for name in ("b", "h") if found.uses(name)) == case.uses


def test_a_score_mod_has_its_parameters_one_further() -> None:
    lazymax.register_score_mod("looks", of_tensors)
    lazymax.register_score_mod("blind", double)
    assert [mods.get("score_mod", "looks").uses(name) for name in ("score", "b", "h", "q_idx")] == [True] * 3 + [False]
    assert [mods.get("score_mod", "blind").uses(name) for name in ("score", "b", "h")] == [True, False, False]


# ---- another function for a name


def twice(score, *at):
    return score * 2.0


def half(score, *at):
    return score * 0.5


def test_a_name_that_is_taken_gets_the_new_function_at_once(device: str) -> None:
    """Also in a compiled graph, which holds the name; decisions of the old one are forgotten."""
    q, k, v = make_qkv(1, 1, 1, 9, 17, 16, dtype=torch.float32, device=device)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q: lazymax.attention(q, k, v, score_mod="mine"), fullgraph=True, backend="aot_eager"
    )
    for function, reference, scale in ((double, twice, 0.5), (halve, half, 0.125), (double, twice, 0.5)):
        lazymax.register_score_mod("mine", function, reference=reference)
        assert not ops._decided
        want = lazymax.attention(q, k, v, scale=scale)  # the default is 1 / 4
        for call in (lambda q: lazymax.attention(q, k, v, score_mod="mine"), compiled):
            budget = within_budget(call(q), want.double(), want.clone(), eps=EPS[torch.float32])
            assert budget.ok, str(budget)
    torch._dynamo.reset()


def test_key_blocks_are_listed_anew_for_the_new_function(device: str) -> None:
    q, k, v = make_qkv(1, 1, 1, 9, 100, 16, dtype=torch.float16, device=device)
    keys, rows = torch.arange(100, device=device), torch.arange(9, device=device)[:, None]
    for function, keep in ((near, (rows - keys).abs() < 4), (far, (rows - keys).abs() >= 4)):
        lazymax.register_mask_mod("mine", function)
        got = lazymax.attention(q, k, v, mask_mod="mine")
        want = lazymax.attention(q, k, v, attn_mask=keep, impl="reference")
        budget = within_budget(got, want.double(), want.clone(), eps=2 * EPS[torch.float16])
        assert budget.ok, str(budget)
