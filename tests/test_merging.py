"""`merge_states`: attention over two sets of keys, joined by the LSEs."""

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from calls import moved

import lazymax
from lazymax.options import parse_options
from lazymax.problem import Problem
from lazymax.testing import EPS, check_attention, make_qkv, within_budget

INF, NAN = float("inf"), float("nan")
State = tuple[torch.Tensor, torch.Tensor]


def states(count: int, *shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[State]:
    generator = torch.Generator().manual_seed(3)

    def normal(*size: int, factor: float = 1.0) -> torch.Tensor:
        return (torch.randn(size, generator=generator, dtype=torch.float64) * factor).to(device)

    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return [(normal(*shape, 8).to(dtype), normal(*shape, factor=3.0).to(lse_dtype)) for _ in range(count)]


def formula(parts: list[State], dtype: torch.dtype = torch.float64) -> State:
    """Any number of states at once: weights are the softmax of the LSEs; one without keys weighs 0."""
    lse = torch.stack([part[1].to(dtype) for part in parts])
    total = torch.logsumexp(lse, 0)
    weights = torch.where(total == -INF, 0.0, torch.softmax(lse, 0))
    outs = torch.stack([torch.where((part[1] == -INF)[..., None], 0.0, part[0].to(dtype)) for part in parts])
    return (weights[..., None] * outs).sum(0), total


def check(got: State, parts: list[State]) -> None:
    exact, low = formula(parts), formula(parts, torch.float32)
    out, lse = got
    assert out.dtype == parts[0][0].dtype
    assert lse.dtype == (torch.float64 if out.dtype == torch.float64 else torch.float32)
    low = exact if out.dtype == torch.float64 else low
    for budget in (
        within_budget(out, exact[0], low[0].to(out.dtype, copy=True) + 0.0, eps=EPS[out.dtype]),
        within_budget(lse[..., None], exact[1][..., None], low[1][..., None] + 0.0, eps=EPS[lse.dtype], what="lse"),
    ):
        assert budget.ok, str(budget)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 5), (4,), (), (2, 0, 3)], ids=str)
def test_two_states_are_the_softmax_of_both(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    parts = states(2, *shape, dtype=dtype, device=device)
    check(lazymax.merge_states(*parts[0], *parts[1]), parts)


def test_sides_without_keys(device: str) -> None:
    """-inf on one side, on the other, on both, whatever their outputs hold; far apart; infinite."""
    first, second = states(2, 8, device=device)
    first[1][[0, 2, 3]], second[1][[1, 2, 3]] = -INF, -INF
    first[0][0], second[0][1] = NAN, INF
    first[0][3], second[0][3] = NAN, -INF
    first[1][4], second[1][4] = 3e38, -3e38
    first[1][5], second[1][5] = torch.finfo(torch.float32).min, torch.finfo(torch.float32).min
    out, lse = lazymax.merge_states(*first, *second)
    check((out, lse), [first, second])
    assert torch.equal(out[0], second[0][0]) and lse[0] == second[1][0]
    assert torch.equal(out[1], first[0][1]) and lse[1] == first[1][1]
    assert (out[2:4] == 0).all() and (lse[2:4] == -INF).all()
    assert torch.equal(out[4], first[0][4]) and lse[4] == first[1][4]


def test_nan_in_a_side_with_keys_shows(device: str) -> None:
    first, second = states(2, 3, device=device)
    first[0][0, 1], second[1][1] = NAN, NAN
    out, lse = lazymax.merge_states(*first, *second)
    assert out[0, 1].isnan() and out[0, [0, *range(2, 8)]].isfinite().all() and out[2].isfinite().all()
    assert out[1].isnan().all() and lse[1].isnan() and lse[[0, 2]].isfinite().all()


def test_the_order_does_not_matter(device: str) -> None:
    """Commutative, and associative within the rounding."""
    parts = states(4, 2, 5, device=device)
    parts[1][1][0, :3], parts[2][1][0, 1:] = -INF, -INF
    one, other = lazymax.merge_states(*parts[0], *parts[1]), lazymax.merge_states(*parts[1], *parts[0])
    assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))
    for order in itertools.permutations(range(4)):
        a, b, c, d = (parts[i] for i in order)
        left = lazymax.merge_states(*lazymax.merge_states(*lazymax.merge_states(*a, *b), *c), *d)
        pairs = lazymax.merge_states(*lazymax.merge_states(*a, *b), *lazymax.merge_states(*c, *d))
        check(left, parts)
        check(pairs, parts)


def test_a_state_without_keys_changes_nothing(device: str) -> None:
    state, empty = states(2, 2, 5, device=device)
    empty[0].fill_(NAN)
    empty[1].fill_(-INF)
    for got in (lazymax.merge_states(*state, *empty), lazymax.merge_states(*empty, *state)):
        assert all(torch.equal(x, y) for x, y in zip(got, state, strict=True))


def test_strides_and_broadcasts(device: str) -> None:
    first, second = states(2, 2, 3, 5, device=device)
    want = lazymax.merge_states(*first, *second)
    got = lazymax.merge_states(first[0].mT.contiguous().mT, first[1].mT.contiguous().mT, *second)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


# ---- gradients (B44)


@pytest.mark.parametrize("through", ["out", "lse", "both"])
def test_gradients_are_those_of_the_formula_and_never_nan(through: str, device: str) -> None:
    parts = states(2, 6, dtype=torch.float64, device=device)
    parts[0][1][0], parts[1][1][1] = -INF, -INF
    parts[0][1][2], parts[1][1][2] = -INF, -INF
    parts[0][1][3] = 500.0

    def gradients(merge: Any) -> list[torch.Tensor]:
        leaf = [t.clone().requires_grad_() for part in parts for t in part]
        out, lse = merge(leaf)
        loss = torch.zeros((), dtype=torch.float64, device=device)
        if through != "lse":
            loss = loss + (out * torch.arange(1.0, 9.0, device=device)).sum()
        if through != "out":
            loss = loss + torch.where(lse == -INF, 0.0, lse).sin().sum()
        loss.backward()
        return [torch.zeros_like(t) if t.grad is None else t.grad for t in leaf]

    got = gradients(lambda leaf: lazymax.merge_states(*leaf))

    def explicit(leaf: list[torch.Tensor]) -> State:
        """Row by row in the words of the docstring, so that no branch that is not taken can leave a NaN."""
        out1, lse1, out2, lse2 = leaf
        rows = []
        for row in range(6):
            sides = [(o[row], l[row]) for o, l in ((out1, lse1), (out2, lse2)) if l[row] != -INF]
            if not sides:
                rows.append((0.0 * out1[row].detach(), lse1[row].detach()))
                continue
            total = torch.logsumexp(torch.stack([l for _, l in sides]), 0)
            rows.append((sum(o * torch.exp(l - total) for o, l in sides), total))
        return torch.stack([o for o, _ in rows]), torch.stack([l for _, l in rows])  # type: ignore[misc]

    for name, x, y in zip(("out1", "lse1", "out2", "lse2"), got, gradients(explicit), strict=True):
        budget = within_budget(x, y, y + 0.0, eps=EPS[torch.float64], what=name)
        assert budget.ok and x.isfinite().all(), str(budget)


def test_gradcheck(device: str) -> None:
    leaf = [t.requires_grad_() for part in states(2, 2, 3, dtype=torch.float64, device=device) for t in part]
    assert torch.autograd.gradcheck(lazymax.merge_states, leaf)


def test_gradients_of_a_split_call_are_those_of_the_whole(device: str) -> None:
    """Through the operator's LSE: each half learns of the other by it alone."""
    q, k, v = make_qkv(1, 2, 1, 5, 9, 8, dtype=torch.float64, device=device)
    grads = []
    for cut in (None, 4):
        leaf = [t.clone().requires_grad_() for t in (q, k, v)]
        out, lse = halves(*leaf, cut) if cut else lazymax.attention(*leaf, return_lse=True)  # type: ignore[misc]
        (out.square().sum() + lse.double().sin().sum()).backward()
        grads.append([t.grad for t in leaf])
    for name, whole, split in zip("qkv", *grads, strict=True):
        # The LSE is float32: its rounding moves the merged output by as much.
        budget = within_budget(split, whole, whole + 0.0, eps=EPS[torch.float32], what=f"d{name}")
        assert budget.ok, str(budget)


# ---- attention in parts


def halves(q: Any, k: Any, v: Any, cut: int, first: Any = (), second: Any = (), **rules: Any) -> State:
    """Keys before and from `cut`, each with options of its own."""
    return lazymax.merge_states(
        *lazymax.attention(q, k[:, :, :cut], v[:, :, :cut], **rules, **dict(first), return_lse=True),
        *lazymax.attention(q, k[:, :, cut:], v[:, :, cut:], **rules, **dict(second), return_lse=True),
    )


@dataclass(frozen=True)
class Split:
    id: str
    options: dict[str, Any] = field(default_factory=dict)
    once: tuple[str, ...] = ()  # options that one part alone may have
    by_key: tuple[str, ...] = ()  # options that are cut as the keys are


MASK = torch.randn(5, 37, generator=torch.Generator().manual_seed(1)).masked_fill(torch.arange(37) % 3 == 1, -INF)
SPLITS = (
    Split("plain"),
    Split("softcap, scale", dict(softcap=1.5, scale=-0.7)),
    Split("sinks", dict(sinks=torch.tensor([0.5, 3.0])), once=("sinks",)),
    Split("a mask that leaves rows no key on one side", dict(attn_mask=torch.arange(37) < 20), by_key=("attn_mask",)),
    Split("float mask with holes", dict(attn_mask=MASK), by_key=("attn_mask",)),
)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", SPLITS, ids=lambda case: case.id)
def test_attention_of_split_keys_is_attention(case: Split, dtype: torch.dtype, device: str) -> None:
    """Anywhere, also where one part has no key at all; sinks belong to either part."""
    q, k, v = make_qkv(1, 2, 1, 5, 37, 16, dtype=dtype, device=device)
    options = moved(case.options, device)
    extras, rules = parse_options(q, **options)
    problem = Problem.from_tensors(q, k, v, extras, rules, return_lse=True)
    shared = {name: value for name, value in options.items() if name not in case.once + case.by_key}
    cuts = (0, 16, 20) if dtype == torch.float16 else (11,)
    for cut in cuts:
        first, second = ({n: options[n][..., part] for n in case.by_key} for part in (slice(cut), slice(cut, None)))
        for owner in (first, second) if case.once else (first,):
            mine = {name: options[name] for name in case.once}
            out, lse = halves(
                q, k, v, cut, {**first, **(mine if owner is first else {})},
                {**second, **(mine if owner is second else {})}, **shared,
            )  # fmt: skip
            # Each half rounds its output before they meet: one rounding more than a whole call has.
            exact, exact_lse = lazymax.attention(*(t.double() for t in (q, k, v)), **options, return_lse=True)
            low = lazymax.attention(q, k, v, **options)
            assert within_budget(out, exact, low, eps=2 * EPS[dtype]).ok, cut
            (budget,) = check_attention(low, lse, q, k, v, problem, extras)[1:]
            assert budget.ok, f"cut at {cut}: {budget}"
            assert exact_lse.shape == lse.shape


def test_packed_sequences_split_too(device: str) -> None:
    q, k, v = (t[0].transpose(0, 1) for t in make_qkv(1, 2, 1, 9, 20, 16, dtype=torch.float32, device=device))
    rows = torch.tensor([0, 4, 9], device=device)
    parts = [
        lazymax.attention_varlen(q, k[keys], v[keys], rows, torch.tensor(ends, device=device), return_lse=True)
        for keys, ends in (([0, 1, 2, *range(8, 14)], [0, 3, 9]), ([*range(3, 8), *range(14, 20)], [0, 5, 11]))
    ]
    want, want_lse = lazymax.attention_varlen(
        q, k, v, rows, torch.tensor([0, 8, 20], device=device), return_lse=True, impl="reference"
    )
    # (total, heads, head dim) beside an LSE of (heads, total)
    (out1, lse1), (out2, lse2) = ((out.transpose(0, 1), lse) for out, lse in parts)
    out, lse = lazymax.merge_states(out1, lse1, out2, lse2)
    for x, y, what in ((out.transpose(0, 1), want, "out"), (lse[..., None], want_lse[..., None], "lse")):
        budget = within_budget(x, y.double(), y + 0.0, eps=2 * EPS[torch.float32], what=what)
        assert budget.ok, str(budget)


def test_compiled_in_one_graph(device: str) -> None:
    q, k, v = make_qkv(1, 2, 1, 5, 37, 16, dtype=torch.float32, device=device)
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: halves(q, k, v, 20)[0], fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), halves(q, k, v, 20)[0])
    torch._dynamo.reset()


# ---- mistakes


@dataclass(frozen=True)
class Bad:
    id: str
    change: dict[str, Any]
    error: type[Exception]
    words: tuple[str, ...]


OUT, LSE = torch.zeros(2, 3, 5, 8), torch.zeros(2, 3, 5)
BAD = (
    Bad("out is a list", dict(out1=[1.0]), TypeError, ("out1: got list", "expected a torch.Tensor")),
    Bad("no LSE", dict(lse2=None), TypeError, ("lse2: got NoneType", "expected a torch.Tensor")),
    Bad("integers", dict(out2=OUT.long()), TypeError, ("out2: got dtype torch.int64", "expected a floating one")),
    Bad("an LSE of integers", dict(lse1=LSE.int()), TypeError, ("lse1: got dtype torch.int32", "a floating one")),
    Bad("lengths differ", dict(out2=OUT[:, :, :4]), ValueError,
        ("out1, out2: got torch.float32 of shape (2, 3, 5, 8)", "(2, 3, 4, 8)", "expected the same")),
    Bad("outputs that would broadcast", dict(out2=OUT[:1]), ValueError, ("out1, out2:", "(1, 3, 5, 8)")),
    Bad("dtypes differ", dict(out2=OUT.half()), ValueError, ("torch.float32", "torch.float16", "expected the same")),
    Bad("an LSE of another order", dict(lse1=LSE.transpose(1, 2)), ValueError,
        ("lse1: got shape (2, 5, 3)", "out1 without its last dimension: (2, 3, 5)")),
    Bad("an LSE with a dimension of 1", dict(lse2=LSE[..., None]), ValueError, ("lse2: got shape (2, 3, 5, 1)",)),
    Bad("an LSE that would broadcast", dict(lse2=LSE[:1]), ValueError, ("lse2: got shape (1, 3, 5)",)),
)  # fmt: skip


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.id)
def test_a_mistake_says_what_came_and_what_was_expected(case: Bad) -> None:
    with pytest.raises(case.error) as caught:
        lazymax.merge_states(**{**dict(out1=OUT, lse1=LSE, out2=OUT, lse2=LSE), **case.change})
    assert type(caught.value) is case.error
    for words in case.words:
        assert words in str(caught.value)
