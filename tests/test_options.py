"""From the arguments of the public functions to what the operator takes."""

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy
import pytest
import torch

from lazymax.extras import NO_EXTRAS, NO_RULES, Extras, Rules
from lazymax.options import align_of, parse_causal, parse_length, parse_mask, parse_options, parse_window, plain_rules

Q = torch.zeros(2, 4, 5, 8)


@dataclass(frozen=True)
class Parse:
    id: str
    value: Any
    want: Any  # a value, or an exception type
    words: str = ""


CAUSALS = (
    Parse("None", None, None),
    Parse("False", False, None),
    Parse("top_left", "top_left", "top_left"),
    Parse("bottom_right", "bottom_right", "bottom_right"),
    Parse("True is ambiguous", True, ValueError, "causal: got True, expected 'top_left'"),
    Parse("misspelt", "top-left", ValueError, "causal: got 'top-left', expected None, 'top_left' or 'bottom_right'"),
    Parse("number", 1.5, ValueError, "causal: got 1.5"),
)
WINDOWS = (
    Parse("None", None, (None, None)),
    Parse("both", (3, 4), (3, 4)),
    Parse("zero", (0, 0), (0, 0)),
    Parse("-1 is open", (-1, -1), (None, None)),
    Parse("None is open", (None, 2), (None, 2)),
    Parse("a list", [1, -1], (1, None)),
    Parse("-2", (-2, 0), ValueError, "window: got (-2, 0); only None or -1 means open"),
    Parse("-5 right", (0, -5), ValueError, "window: got (0, -5)"),
    Parse("one size", 5, ValueError, "window: got 5, expected a pair (left, right)"),
    Parse("three", (1, 2, 3), ValueError, "window: got (1, 2, 3), expected a pair"),
    Parse("floats", (1.0, 2), TypeError, "window: got (1.0, 2), expected integers or None"),
    Parse("bools", (True, 2), TypeError, "window: got (True, 2), expected integers or None"),
)
LONGEST = (
    Parse("none", None, None),
    Parse("int", 7, 7),
    Parse("a tensor (B80)", torch.tensor(7), 7),
    Parse("one of numpy's", numpy.int32(7), 7),
    Parse("float", 7.0, TypeError, "max_seqlen_q: got 7.0, expected an int or None"),
    Parse("a floating tensor", torch.tensor(7.0), TypeError, "max_seqlen_q: got tensor(7.), expected an int or None"),
    Parse("bool", False, TypeError, "max_seqlen_q: got False"),
)
MASKS = (
    Parse("none", None, None),
    Parse("keys", torch.zeros(7), (1, 1, 1, 7)),
    Parse("queries and keys", torch.zeros(5, 7), (1, 1, 5, 7)),
    Parse("heads, queries and keys", torch.zeros(4, 5, 7), (1, 4, 5, 7)),
    Parse("four", torch.zeros(2, 1, 5, 7), (2, 1, 5, 7)),
    Parse("one number", torch.tensor(1.0), (1, 1, 1, 1)),
    Parse("five", torch.zeros(1, 2, 1, 5, 7), ValueError, "attn_mask: got shape (1, 2, 1, 5, 7), expected one that"),
    Parse("a list", [[True]], TypeError, "attn_mask: got list, expected a torch.Tensor"),
)


def check_parse(parse: Any, case: Parse) -> None:
    if not (isinstance(case.want, type) and issubclass(case.want, Exception)):
        got = parse(case.value)
        assert (tuple(got.shape) if isinstance(got, torch.Tensor) else got) == case.want
        return
    with pytest.raises(case.want) as caught:
        parse(case.value)
    assert type(caught.value) is case.want and case.words in str(caught.value)


@pytest.mark.parametrize("case", CAUSALS, ids=lambda case: case.id)
def test_causal(case: Parse) -> None:
    check_parse(parse_causal, case)


@pytest.mark.parametrize("case", WINDOWS, ids=lambda case: case.id)
def test_window(case: Parse) -> None:
    check_parse(parse_window, case)


@pytest.mark.parametrize("case", LONGEST, ids=lambda case: case.id)
def test_longest_sequence(case: Parse) -> None:
    check_parse(lambda value: parse_length("max_seqlen_q", value), case)
    if isinstance(case.want, int):
        assert type(parse_length("max_seqlen_q", case.value)) is int  # of a cache's key, and of the operator's schema


@pytest.mark.parametrize("case", MASKS, ids=lambda case: case.id)
def test_mask(case: Parse) -> None:
    check_parse(parse_mask, case)


def test_a_mask_is_a_view() -> None:
    """Broadcast dimensions stay so, and gradients reach the user's tensor."""
    mask = torch.zeros(1, 7, requires_grad=True).expand(5, 7)
    got = parse_mask(mask)
    assert got is not None and got.data_ptr() == mask.data_ptr() and got.stride()[2:] == (0, 1) and got.requires_grad


def test_alignment_is_the_one_of_causal_else_of_window_else_top_left() -> None:
    assert align_of(None, None) == "top_left"
    assert align_of("bottom_right", None) == align_of(None, "bottom_right") == "bottom_right"
    assert align_of("bottom_right", "bottom_right") == "bottom_right"
    with pytest.raises(ValueError, match=r"window_align: got 'top_left' beside causal='bottom_right'"):
        align_of("bottom_right", "top_left")
    with pytest.raises(ValueError, match=r"window_align: got 'middle', expected None, 'top_left' or 'bottom_right'"):
        align_of(None, "middle")


# ---- all of them


SLOPES, SINKS, LENGTHS, SEED = torch.zeros(4), torch.ones(4), torch.tensor([3, 4]), torch.tensor([5])
OFFSETS = torch.tensor([0, 5])


@dataclass(frozen=True)
class Options:
    id: str
    options: dict[str, Any]
    extras: dict[str, Any] = field(default_factory=dict)
    rules: dict[str, Any] = field(default_factory=dict)


OPTIONS = (
    Options("none", {}),
    Options("causal", dict(causal="bottom_right"), rules=dict(causal=True, align="bottom_right")),
    Options("window", dict(window=(3, -1), window_align="bottom_right"),
            rules=dict(window_left=3, align="bottom_right")),
    Options("numbers", dict(scale=2, softcap=3, dropout_p=0), rules=dict(scale=2, softcap=3)),
    Options("slopes and sinks", dict(alibi_slopes=SLOPES, sinks=SINKS), dict(alibi_slopes=SLOPES, sinks=SINKS)),
    Options("lengths", dict(seqlens_k=LENGTHS), dict(seqlens_k=LENGTHS)),
    Options("packed", dict(cu_seqlens_q=OFFSETS, cu_seqlens_k=LENGTHS, max_seqlen_q=5, max_seqlen_k=7),
            dict(cu_seqlens_q=OFFSETS, cu_seqlens_k=LENGTHS), dict(max_seqlen_q=5, max_seqlen_k=7)),
    Options("dropout", dict(dropout_p=0.5, dropout_seed=SEED), dict(dropout_seed=SEED), dict(dropout_p=0.5)),
    Options("a seed without dropout", dict(dropout_seed=SEED)),
    Options("mods", dict(score_mod="a", score_mod_args=[SLOPES, SINKS], mask_mod="b", mask_mod_args=(LENGTHS,)),
            dict(score_args=(SLOPES, SINKS), mask_args=(LENGTHS,)), dict(score_mod="a", mask_mod="b")),
)  # fmt: skip


@pytest.mark.parametrize("case", OPTIONS, ids=lambda case: case.id)
def test_every_option_has_its_place(case: Options) -> None:
    extras, rules = parse_options(Q, **case.options)
    assert rules == Rules(**case.rules)
    want = Extras(**case.extras)
    assert [name for name, _ in extras.tensors()] == [name for name, _ in want.tensors()]
    assert all(x is y for (_, x), (_, y) in zip(extras.tensors(), want.tensors(), strict=True))
    assert (extras is NO_EXTRAS) is (not case.extras)  # what the operator's short way looks at
    assert isinstance(hash(rules), int)


def test_no_options_are_the_defaults() -> None:
    assert parse_options(Q) == (NO_EXTRAS, NO_RULES)


def test_dropout_without_a_seed_draws_one_from_torchs_generator() -> None:
    def seed() -> int:
        drawn = parse_options(Q, dropout_p=0.5)[0].dropout_seed
        assert drawn is not None and drawn.dtype == torch.int64 and drawn.shape == (1,) and drawn.device == Q.device
        return int(drawn)

    torch.manual_seed(1)
    first, second = seed(), seed()
    torch.manual_seed(1)
    assert seed() == first != second
    state = torch.get_rng_state()
    parse_options(Q, dropout_p=0.0)
    parse_options(Q, dropout_p=0.5, dropout_seed=SEED)
    assert torch.equal(torch.get_rng_state(), state), "drew a seed that nobody needs"


PLAIN: dict[str, tuple[Any, ...]] = {
    "causal": (None, False, "top_left", "bottom_right", True, "x"),
    "window": (None, (3, 4), [3, -1], (-1, None), (-2, 0), (1.0, 2), 5),
    "scale": (None, 2, 0.5, 0.0, "x"),
    "window_align": (None, "bottom_right", "middle"),
}


def answer(parse: Any, values: tuple[Any, ...]) -> tuple[Any, ...]:
    try:
        rules = parse(**dict(zip(PLAIN, values, strict=True)))
    except (ValueError, TypeError) as error:
        return type(error), str(error)
    return rules, type(rules.scale)


def test_rules_of_plain_calls_are_those_of_every_call() -> None:
    """All combinations, twice: a cache may neither mix up values that compare equal nor keep an error."""
    for values in [*itertools.product(*PLAIN.values())] * 2:
        got, want = answer(plain_rules, values), answer(lambda **options: parse_options(Q, **options)[1], values)
        both_wrong = isinstance(got[0], type) and isinstance(want[0], type)  # any of several mistakes may come first
        assert got == want or (both_wrong and got[0] in (ValueError, TypeError)), values


@dataclass(frozen=True)
class Bad:
    id: str
    options: dict[str, Any]
    error: type[Exception]
    words: tuple[str, ...]


BAD = (
    Bad("causal", dict(causal=True), ValueError, ("causal: got True", "'top_left'")),
    Bad("window", dict(window=3), ValueError, ("window: got 3", "a pair")),
    Bad("alignments", dict(causal="top_left", window_align="bottom_right"), ValueError, ("window_align", "agree")),
    Bad("scale is text", dict(scale="x"), TypeError, ("scale: got 'x', expected a number",)),
    Bad("scale is a tensor", dict(scale=SINKS), TypeError, ("scale: got tensor", "expected a number")),
    Bad("softcap is None", dict(softcap=None), TypeError, ("softcap: got None, expected a number",)),
    Bad("dropout is None", dict(dropout_p=None), TypeError, ("dropout_p: got None, expected a number",)),
    Bad("score_mod is a function", dict(score_mod=abs), TypeError,
        ("score_mod: got <built-in function abs>", "a name given to lazymax.register_score_mod")),
    Bad("mask_mod is a number", dict(mask_mod=1), TypeError, ("mask_mod: got 1", "lazymax.register_mask_mod")),
    Bad("arguments are a tensor", dict(score_mod="a", score_mod_args=SINKS), TypeError,
        ("score_mod_args: got Tensor, expected a tuple of tensors",)),
    Bad("arguments are None", dict(mask_mod="a", mask_mod_args=None), TypeError,
        ("mask_mod_args: got NoneType, expected a tuple of tensors",)),
    Bad("an argument is a number", dict(score_mod="a", score_mod_args=(SINKS, 2)), TypeError,
        ("score_mod_args: got 2, expected a torch.Tensor",)),
    Bad("an argument of the mask_mod", dict(mask_mod="a", mask_mod_args=["x"]), TypeError,
        ("mask_mod_args: got 'x', expected a torch.Tensor",)),
    Bad("mask", dict(attn_mask=True), TypeError, ("attn_mask: got bool, expected a torch.Tensor",)),
    Bad("slopes", dict(alibi_slopes=[1.0]), TypeError, ("alibi_slopes: got [1.0], expected a torch.Tensor",)),
    Bad("sinks", dict(sinks=0.5), TypeError, ("sinks: got 0.5, expected a torch.Tensor",)),
    Bad("lengths", dict(seqlens_k=[3, 4]), TypeError, ("seqlens_k: got [3, 4], expected a torch.Tensor",)),
    Bad("offsets of q", dict(cu_seqlens_q=(0, 5)), TypeError, ("cu_seqlens_q: got (0, 5), expected a torch.Tensor",)),
    Bad("offsets of k", dict(cu_seqlens_k=5), TypeError, ("cu_seqlens_k: got 5, expected a torch.Tensor",)),
    Bad("seed", dict(dropout_p=0.5, dropout_seed=7), TypeError, ("dropout_seed: got 7, expected a torch.Tensor",)),
    Bad("a seed without dropout", dict(dropout_seed=7), TypeError, ("dropout_seed: got 7, expected a torch.Tensor",)),
    Bad("longest of q", dict(max_seqlen_q=1.5), TypeError, ("max_seqlen_q: got 1.5, expected an int or None",)),
    Bad("longest of k", dict(max_seqlen_k="9"), TypeError, ("max_seqlen_k: got '9', expected an int or None",)),
    Bad("longest is a bool", dict(max_seqlen_k=True), TypeError, ("max_seqlen_k: got True, expected an int",)),
    Bad("longest is many", dict(max_seqlen_q=LENGTHS), TypeError, ("max_seqlen_q: got tensor([3, 4]), expected",)),
    Bad("softcap is text", dict(softcap="nan"), TypeError, ("softcap: got 'nan', expected a number",)),
)  # fmt: skip


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.id)
def test_an_option_of_a_wrong_type_is_named(case: Bad) -> None:
    with pytest.raises(case.error) as caught:
        parse_options(Q, **case.options)
    assert type(caught.value) is case.error
    for words in case.words:
        assert words in str(caught.value)
