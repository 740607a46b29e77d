"""The optional tensors and rules of a call: every mistake names the argument, what came and what was expected."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lazymax import mods
from lazymax.extras import ARGUMENTS, NO_EXTRAS, NO_RULES, Extras, Rules, check_extras, check_numbers, check_offsets

Q, K = torch.zeros(2, 4, 5, 8), torch.zeros(2, 2, 7, 8)  # (B, Hq, Sq, D), (B, Hkv, Sk, D)
ONE_Q, ONE_K = Q[:1], K[:1]  # as packed sequences come
SEED, LENGTHS = torch.tensor([3]), torch.tensor([3, 7])
ENDS = torch.tensor([0, 2, 2, 5])
PACKED = dict(cu_seqlens_q=ENDS, cu_seqlens_k=ENDS)


def _two(score, b, h, q_idx, k_idx, weight, table):
    return score


def _none(b, h, q_idx, k_idx):
    return True


mods.register_score_mod("test_extras.two", SimpleNamespace(fn=_two))
mods.register_mask_mod("test_extras.none", SimpleNamespace(fn=_none))
TWO = dict(score_mod="test_extras.two")
WEIGHTS = (torch.zeros(4), torch.zeros(3))


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


@dataclass(frozen=True)
class Good:
    id: str
    extras: dict[str, Any] = field(default_factory=dict)
    rules: dict[str, Any] = field(default_factory=dict)
    one: bool = False  # batch element


GOOD = (
    Good("nothing"),
    *(
        Good(f"mask {shape}", dict(mask=zeros(*shape, dtype=dtype)))
        for shape, dtype in (
            ((2, 4, 5, 7), torch.bool), ((1, 1, 1, 1), torch.bool), ((2, 1, 1, 7), torch.float16),
            ((1, 4, 5, 1), torch.float64),
        )
    ),
    Good("slopes per head", dict(alibi_slopes=zeros(4))),
    Good("slopes per batch", dict(alibi_slopes=zeros(2, 4).half())),
    Good("sinks per batch, expanded", dict(sinks=zeros(1, 4).expand(2, 4))),
    Good("lengths", dict(seqlens_k=LENGTHS)),
    Good("lengths in int32", dict(seqlens_k=LENGTHS.int())),
    Good("one length of any stride", dict(seqlens_k=torch.arange(8)[::8]), one=True),
    Good("packed", PACKED, one=True),
    Good("packed, longest", PACKED, dict(max_seqlen_q=5, max_seqlen_k=0), one=True),
    Good("packed, int32 and int64", dict(cu_seqlens_q=ENDS.int(), cu_seqlens_k=ENDS), one=True),
    Good("packed, no sequence", dict(cu_seqlens_q=ENDS[:1], cu_seqlens_k=ENDS[:1]), one=True),
    Good("packed, slopes and sinks", dict(**PACKED, alibi_slopes=zeros(4), sinks=zeros(3, 4)), one=True),
    Good("dropout", dict(dropout_seed=SEED), dict(dropout_p=0.5)),
    Good("a seed of no dimension", dict(dropout_seed=SEED[0]), dict(dropout_p=1.0)),
    Good("score_mod", dict(score_args=WEIGHTS), TWO),
    Good("mask_mod", {}, dict(mask_mod="test_extras.none")),
)  # fmt: skip


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.id)
def test_what_fits_passes(case: Good) -> None:
    extras, rules = Extras(**case.extras), Rules(**case.rules)
    check_numbers(rules)
    check_extras(*((ONE_Q, ONE_K) if case.one else (Q, K)), extras, rules)


@dataclass(frozen=True)
class Bad:
    id: str
    extras: dict[str, Any]
    error: type[Exception]
    words: tuple[str, ...]  # the argument, what came, what was expected
    rules: dict[str, Any] = field(default_factory=dict)
    q: torch.Tensor | None = None  # packed: one batch element


def packed(id: str, extras: dict[str, Any], *rest: Any, rules: Any = (), q: torch.Tensor = ONE_Q) -> Bad:
    return Bad(id, {**PACKED, **extras}, *rest, rules=dict(rules), q=q)


BOOL, FLOAT = "bool (True keeps)", "floating (added)"
BAD = (
    Bad("mask of integers", dict(mask=zeros(1, 1, 5, 7, dtype=torch.int64)), TypeError,
        ("attn_mask: got dtype torch.int64", BOOL, FLOAT)),
    Bad("mask of two dimensions", dict(mask=zeros(5, 7)), ValueError,
        ("attn_mask: got shape (5, 7)", "broadcasts to (B, Hq, Sq, Sk) = (2, 4, 5, 7)")),
    *(
        Bad(f"mask {shape}", dict(mask=zeros(*shape)), ValueError,
            (f"attn_mask: got shape {shape}", "(B, Hq, Sq, Sk) = (2, 4, 5, 7)"))
        for shape in ((3, 1, 5, 7), (1, 2, 5, 7), (1, 1, 4, 7), (1, 1, 5, 8), (1, 1, 5, 0), (2, 5, 4, 7))
    ),
    Bad("mask on another device", dict(mask=zeros(1, 1, 5, 7).to("meta")), ValueError,
        ("attn_mask: got device meta", "q is on cpu", "move it there")),
    *(
        bad
        for name in ("alibi_slopes", "sinks")
        for bad in (
            Bad(f"{name} of integers", {name: zeros(4, dtype=torch.int32)}, TypeError,
                (f"{name}: got dtype torch.int32", "expected a floating one")),
            Bad(f"{name} of key heads", {name: zeros(2)}, ValueError,
                (f"{name}: got shape (2,)", "expected (Hq,) or (B, Hq) with Hq = 4")),
            Bad(f"{name} of another batch", {name: zeros(3, 4)}, ValueError, (f"{name}: got shape (3, 4)", "(B, Hq)")),
            Bad(f"{name} transposed", {name: zeros(4, 2)}, ValueError, (f"{name}: got shape (4, 2)", "(B, Hq)")),
            Bad(f"{name} of one number", {name: torch.tensor(1.0)}, ValueError, (f"{name}: got shape ()", "(Hq,)")),
            Bad(f"{name} on another device", {name: zeros(4).to("meta")}, ValueError, (f"{name}: got device meta",)),
            packed(f"{name} of another number of sequences", {name: zeros(2, 4)}, ValueError,
                   (f"{name}: got 2 rows", "one per sequence: 3")),
        )
    ),
    Bad("lengths of another batch", dict(seqlens_k=torch.tensor([1, 2, 3])), ValueError,
        ("seqlens_k: got 3 lengths", "expected one per batch: 2")),
    Bad("lengths that are floats", dict(seqlens_k=LENGTHS.float()), TypeError,
        ("seqlens_k: got dtype torch.float32", "expected int32 or int64")),
    Bad("lengths in int16", dict(seqlens_k=LENGTHS.short()), TypeError, ("seqlens_k: got dtype torch.int16",)),
    Bad("lengths of two dimensions", dict(seqlens_k=LENGTHS[:, None]), ValueError,
        ("seqlens_k: got torch.int64 of shape (2, 1)", "expected one contiguous dimension")),
    Bad("lengths with a stride", dict(seqlens_k=torch.arange(4)[::2]), ValueError,
        ("seqlens_k: got torch.int64 of shape (2,) and stride (2,)", "contiguous")),
    Bad("offsets of q alone", dict(cu_seqlens_q=ENDS), ValueError,
        ("cu_seqlens_q, cu_seqlens_k: got one of them", "expected both"), q=ONE_Q),
    Bad("offsets of k alone", dict(cu_seqlens_k=ENDS), ValueError,
        ("cu_seqlens_q, cu_seqlens_k: got one of them", "expected both"), q=ONE_Q),
    packed("different offsets", dict(cu_seqlens_k=ENDS[:3]), ValueError,
           ("cu_seqlens_q, cu_seqlens_k: got 4 and 3 offsets", "one more than sequences in both")),
    packed("no offsets", dict(cu_seqlens_q=ENDS[:0], cu_seqlens_k=ENDS[:0]), ValueError, ("got 0 and 0 offsets",)),
    packed("offsets that are floats", dict(cu_seqlens_k=ENDS.float()), TypeError,
           ("cu_seqlens_k: got dtype torch.float32", "expected int32 or int64")),
    packed("offsets with a stride", dict(cu_seqlens_q=torch.arange(8)[::2]), ValueError,
           ("cu_seqlens_q: got torch.int64 of shape (4,) and stride (2,)",)),
    packed("offsets on another device", dict(cu_seqlens_q=ENDS.to("meta")), ValueError,
           ("cu_seqlens_q: got device meta", "q is on cpu")),
    packed("a batch beside offsets", {}, ValueError, ("q: got a batch of 2", "(total, heads, head dim)"), q=Q),
    packed("a mask beside offsets", dict(mask=zeros(1, 1, 5, 7)), ValueError,
           ("attn_mask: got one beside packed sequences", "a mask_mod sees")),
    packed("lengths beside offsets", dict(seqlens_k=LENGTHS[:1]), ValueError,
           ("seqlens_k: got it beside packed sequences", "cu_seqlens_k")),
    packed("longest below 0", {}, ValueError, ("max_seqlen_q: got -1", "expected a length"),
           rules=dict(max_seqlen_q=-1)),
    Bad("longest without offsets", dict(seqlens_k=LENGTHS), ValueError,
        ("max_seqlen_q, max_seqlen_k: for packed sequences", "got no cu_seqlens_q"), dict(max_seqlen_k=7)),
    Bad("dropout without a seed", {}, ValueError,
        ("dropout_seed: got None", "expected an int64 tensor of one element"), dict(dropout_p=0.5)),
    Bad("seed in int32", dict(dropout_seed=SEED.int()), ValueError,
        ("dropout_seed: got torch.int32 of shape (1,)", "int64"), dict(dropout_p=0.5)),
    Bad("two seeds", dict(dropout_seed=LENGTHS), ValueError,
        ("dropout_seed: got torch.int64 of shape (2,)", "one element"), dict(dropout_p=0.5)),
    Bad("seed on another device", dict(dropout_seed=SEED.to("meta")), ValueError, ("dropout_seed: got device meta",),
        dict(dropout_p=0.5)),
    Bad("unknown score_mod", {}, ValueError, ("score_mod: got 'no such', registered are", "'test_extras.two'"),
        dict(score_mod="no such")),
    Bad("a mask_mod as score_mod", {}, ValueError, ("score_mod: got 'test_extras.none', registered are",),
        dict(score_mod="test_extras.none")),
    Bad("unknown mask_mod", {}, ValueError, ("mask_mod: got 'two', registered are", "'test_extras.none'"),
        dict(mask_mod="two")),
    Bad("one argument too few", dict(score_args=WEIGHTS[:1]), ValueError,
        ("score_mod_args: got 1 tensors", "score_mod 'test_extras.two' takes 2"), TWO),
    Bad("one argument too many", dict(mask_args=WEIGHTS[:1]), ValueError,
        ("mask_mod_args: got 1 tensors", "mask_mod 'test_extras.none' takes 0"), dict(mask_mod="test_extras.none")),
    Bad("arguments without a score_mod", dict(score_args=WEIGHTS), ValueError,
        ("score_mod_args: got 2 tensors without a score_mod",)),
    Bad("arguments without a mask_mod", dict(mask_args=WEIGHTS[:1]), ValueError,
        ("mask_mod_args: got 1 tensors without a mask_mod",)),
    Bad("an argument on another device", dict(score_args=(WEIGHTS[0], WEIGHTS[1].to("meta"))), ValueError,
        ("score_mod_args[1]: got device meta", "q is on cpu"), TWO),
)  # fmt: skip


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.id)
def test_a_mistake_says_what_came_and_what_was_expected(case: Bad) -> None:
    q = Q if case.q is None else case.q
    with pytest.raises(case.error) as caught:
        check_extras(q, K[: q.shape[0]], Extras(**case.extras), Rules(**case.rules))
    assert type(caught.value) is case.error
    for words in case.words:
        assert words in str(caught.value)


@dataclass(frozen=True)
class Number:
    id: str
    rules: dict[str, float]
    words: str | None


INF, NAN = float("inf"), float("nan")
NUMBERS = (
    Number("defaults", {}, None),
    Number("zeros", dict(scale=0.0, softcap=0.0, dropout_p=0.0), None),
    Number("ints", dict(scale=-2, softcap=50, dropout_p=1), None),
    Number("large", dict(scale=1e30, softcap=1e38), None),
    Number("scale inf", dict(scale=INF), "scale: got inf, expected a finite number"),
    Number("scale NaN", dict(scale=NAN), "scale: got nan, expected a finite number"),
    Number("softcap below 0", dict(softcap=-0.5), "softcap: got -0.5, expected 0 (none) or a finite number"),
    Number("softcap inf", dict(softcap=INF), "softcap: got inf, expected"),
    Number("softcap NaN", dict(softcap=NAN), "softcap: got nan, expected"),
    Number("softcap whose inverse overflows", dict(softcap=1e-39), "softcap: got 1e-39, expected"),
    Number("dropout below 0", dict(dropout_p=-0.1), "dropout_p: got -0.1, expected a probability, 0 to 1"),
    Number("dropout above 1", dict(dropout_p=1.1), "dropout_p: got 1.1, expected a probability, 0 to 1"),
    Number("dropout NaN", dict(dropout_p=NAN), "dropout_p: got nan, expected a probability"),
)


@pytest.mark.parametrize("case", NUMBERS, ids=lambda case: case.id)
def test_numbers(case: Number) -> None:
    if case.words is None:
        check_numbers(Rules(**case.rules))
        return
    with pytest.raises(ValueError) as caught:
        check_numbers(Rules(**case.rules))
    assert case.words in str(caught.value)


@dataclass(frozen=True)
class Offsets:
    id: str
    values: list[int]
    good: bool


OFFSETS = (
    Offsets("rising", [0, 2, 2, 5], True),
    Offsets("rows behind the last", [0, 1, 2, 3], True),
    Offsets("no sequence", [0], True),
    Offsets("not from 0", [1, 2, 3, 4], False),
    Offsets("falling", [0, 3, 2, 5], False),
    Offsets("beyond the rows", [0, 2, 2, 9], False),
    Offsets("negative", [0, -1, 2, 5], False),
)


@pytest.mark.parametrize("name, rows", [("cu_seqlens_q", 5), ("cu_seqlens_k", 7)])
@pytest.mark.parametrize("case", OFFSETS, ids=lambda case: case.id)
def test_offsets(case: Offsets, name: str, rows: int) -> None:
    extras = Extras(**{**PACKED, name: torch.tensor(case.values)})
    if case.good:
        check_offsets(5, 7, extras)
        return
    with pytest.raises(ValueError) as caught:
        check_offsets(5, 7, extras)
    for words in (f"{name}: got {case.values}", f"begin with 0 and rise to {rows} at most"):
        assert words in str(caught.value)


def test_no_offsets_need_no_check() -> None:
    check_offsets(5, 7, NO_EXTRAS)


def test_tensors_have_the_names_that_users_know() -> None:
    assert list(NO_EXTRAS.tensors()) == []
    extras = Extras(mask=Q, sinks=K, score_args=WEIGHTS, mask_args=[SEED])  # type: ignore[arg-type]
    got = list(extras.tensors())
    assert [name for name, _ in got] == [
        "attn_mask", "sinks", "score_mod_args[0]", "score_mod_args[1]", "mask_mod_args[0]",
    ]  # fmt: skip
    assert all(x is y for (_, x), y in zip(got, (Q, K, *WEIGHTS, SEED), strict=True))
    assert len(ARGUMENTS) == len(Extras._fields)


def test_nothing_is_the_default() -> None:
    assert Extras() == NO_EXTRAS and Rules() == NO_RULES
    check_extras(Q, K, NO_EXTRAS, NO_RULES)
    check_numbers(NO_RULES)
