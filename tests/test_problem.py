"""Problem: what dispatch may look at, and every error of a call."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from lazymax import problem as problems
from lazymax import reference
from lazymax.problem import Problem, align_of, parse_causal, parse_dtype, parse_window

TENSORS = dict(
    q=torch.zeros(2, 4, 5, 8), k=torch.zeros(2, 2, 7, 8), v=torch.zeros(2, 2, 7, 6)
)  # grouped queries, different lengths, D_v != D


def build(**rules: Any) -> Problem:
    return Problem.from_tensors(**{**TENSORS, **rules})


@dataclass(frozen=True)
class Bad:
    id: str
    change: dict[str, Any]
    error: type[Exception]
    words: tuple[str, ...]  # the argument, what came, what was expected


BAD = (
    Bad("q is a list", dict(q=[1.0]), TypeError, ("q: got list", "expected a torch.Tensor")),
    Bad("v is None", dict(v=None), TypeError, ("v: got NoneType", "expected a torch.Tensor")),
    Bad("3-D k", dict(k=torch.zeros(2, 7, 8)), ValueError, ("k: got shape (2, 7, 8)", "expected 4 dimensions")),
    Bad("integers", dict(v=torch.zeros(2, 2, 7, 6, dtype=torch.int64)), TypeError, ("v: got dtype torch.int64",)),
    Bad("bool", dict(q=torch.zeros(2, 4, 5, 8, dtype=torch.bool)), TypeError, ("q: got dtype torch.bool",)),
    Bad(
        "complex", dict(q=torch.zeros(2, 4, 5, 8, dtype=torch.complex64)), TypeError, ("q: got dtype torch.complex64",)
    ),
    Bad(
        "sparse", dict(k=torch.zeros(2, 2, 7, 8).to_sparse()), NotImplementedError, ("k: got layout torch.sparse_coo",)
    ),
    Bad(
        "mixed dtypes",
        dict(v=torch.zeros(2, 2, 7, 6).bfloat16()),
        ValueError,
        ("got dtypes torch.float32, torch.float32, torch.bfloat16", "autocast"),
    ),
    Bad(
        "float8",
        {n: t.to(torch.float8_e4m3fn) for n, t in TENSORS.items()},
        NotImplementedError,
        ("got dtype torch.float8_e4m3fn", "expected float16, bfloat16, float32 or float64"),
    ),
    Bad(
        "devices",
        dict(k=torch.zeros(2, 2, 7, 8, device="meta")),
        ValueError,
        ("devices cpu, meta, cpu", "expected one"),
    ),
    Bad(
        "batch of k",
        dict(k=torch.zeros(1, 2, 7, 8), v=torch.zeros(1, 2, 7, 6)),
        ValueError,
        ("batch sizes", "q (2, 4, 5, 8)", "k (1, 2, 7, 8)", "expand k and v"),
    ),
    Bad("batch of v", dict(v=torch.zeros(3, 2, 7, 6)), ValueError, ("batch sizes", "v (3, 2, 7, 6)")),
    Bad(
        "heads of v", dict(v=torch.zeros(2, 4, 7, 6)), ValueError, ("k, v: got different head counts", "v (2, 4, 7, 6)")
    ),
    Bad("length of v", dict(v=torch.zeros(2, 2, 6, 6)), ValueError, ("k, v: got different lengths", "v (2, 2, 6, 6)")),
    Bad(
        "head dim of k",
        dict(k=torch.zeros(2, 2, 7, 4)),
        ValueError,
        ("q, k: got different head dims", "k (2, 2, 7, 4)"),
    ),
    Bad(
        "heads not a multiple",
        dict(k=torch.zeros(2, 3, 7, 8), v=torch.zeros(2, 3, 7, 6)),
        ValueError,
        ("4 query heads over 3 key heads", "expected a multiple"),
    ),
    Bad(
        "no key heads",
        dict(k=torch.zeros(2, 0, 7, 8), v=torch.zeros(2, 0, 7, 6)),
        ValueError,
        ("4 query heads over 0 key heads",),
    ),
    Bad(
        "threshold too large",
        dict(rescale_threshold=8.5),
        ValueError,
        ("rescale_threshold: got 8.5", "0 (exact", "to 8"),
    ),
    Bad("threshold negative", dict(rescale_threshold=-1), ValueError, ("rescale_threshold: got -1",)),
    Bad("scale is inf", dict(scale=float("inf")), ValueError, ("scale: got inf", "expected a finite number")),
    Bad("scale is NaN", dict(scale=float("nan")), ValueError, ("scale: got nan",)),
    Bad("threshold NaN", dict(rescale_threshold=float("nan")), ValueError, ("rescale_threshold: got nan",)),
)


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.id)
def test_bad_input_says_what_came_and_what_was_expected(case: Bad) -> None:
    with pytest.raises(case.error) as caught:
        build(**case.change)
    assert type(caught.value) is case.error
    for words in case.words:
        assert words in str(caught.value)


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
DTYPES = (
    Parse("torch", torch.float16, torch.float16),
    Parse("short", "bf16", torch.bfloat16),
    Parse("fp64", "fp64", torch.float64),
    Parse("torch's name", "float32", torch.float32),
    Parse("unknown", "fp12", ValueError, "dtype: got 'fp12', expected one of fp16"),
    Parse("no dtype", "nn", ValueError, "dtype: got 'nn'"),
    Parse("number", 3, ValueError, "dtype: got 3"),
    Parse("None", None, ValueError, "dtype: got None"),
)


def check_parse(parse: Any, case: Parse) -> None:
    if not (isinstance(case.want, type) and issubclass(case.want, Exception)):
        assert parse(case.value) == case.want
        return
    with pytest.raises(case.want) as caught:
        parse(case.value)
    assert case.words in str(caught.value)


@pytest.mark.parametrize("case", CAUSALS, ids=lambda case: case.id)
def test_causal(case: Parse) -> None:
    check_parse(parse_causal, case)


@pytest.mark.parametrize("case", WINDOWS, ids=lambda case: case.id)
def test_window(case: Parse) -> None:
    check_parse(parse_window, case)


@pytest.mark.parametrize("case", DTYPES, ids=lambda case: case.id)
def test_dtype(case: Parse) -> None:
    check_parse(parse_dtype, case)


def test_alignment_is_the_one_of_causal_else_of_window_else_top_left() -> None:
    assert align_of(None, None) == "top_left"
    assert align_of("bottom_right", None) == align_of(None, "bottom_right") == "bottom_right"
    assert align_of("bottom_right", "bottom_right") == "bottom_right"
    with pytest.raises(ValueError, match=r"window_align: got 'top_left' beside causal='bottom_right'"):
        align_of("bottom_right", "top_left")
    with pytest.raises(ValueError, match=r"window_align: got 'middle', expected None, 'top_left' or 'bottom_right'"):
        align_of(None, "middle")


@dataclass(frozen=True)
class Band:
    id: str
    rules: dict[str, Any]
    lengths: tuple[int, int]
    first: int | None
    last: int | None


BANDS = (
    Band("full", {}, (5, 7), None, None),
    Band("causal, top left", dict(causal=True), (5, 7), None, 0),
    Band("causal, bottom right", dict(causal=True, align="bottom_right"), (5, 7), None, 2),
    Band("causal, bottom right, fewer keys", dict(causal=True, align="bottom_right"), (7, 5), None, -2),
    Band("window", dict(window=(2, 1)), (5, 7), -2, 1),
    Band("window, bottom right", dict(window=(2, 1), align="bottom_right"), (5, 7), 0, 3),
    Band("left only", dict(window=(0, None)), (5, 7), 0, None),
    Band("causal wins over the right side", dict(causal=True, window=(1, 3)), (5, 7), -1, 0),
    Band("wider than the lengths", dict(window=(10**12, 10**12)), (5, 7), -5, 7),
    Band("huge, bottom right", dict(window=(10**12, 10**12), align="bottom_right"), (7, 5), -7, 5),
)


def problem_of(q_len: int, kv_len: int, **rules: Any) -> Problem:
    q, k = torch.zeros(1, 1, q_len, 8, device="meta"), torch.zeros(1, 1, kv_len, 8, device="meta")
    return Problem.from_tensors(q, k, k, **rules)


@pytest.mark.parametrize("case", BANDS, ids=lambda case: case.id)
def test_offsets_of_the_band(case: Band) -> None:
    problem = problem_of(*case.lengths, **case.rules)
    assert (problem.first_offset, problem.last_offset) == (case.first, case.last)


def test_visible_pairs_and_offsets_by_brute_force() -> None:
    """All small lengths and bands: the count, and the clamped offsets, agree with the rule counted pair by pair."""
    sides = (None, 0, 1, 3, 9)
    for q_len in (0, 1, 2, 5):
        for kv_len in (0, 1, 3, 6):
            for align in ("top_left", "bottom_right"):
                for causal in (False, True):
                    for left in sides:
                        for right in sides:
                            shift = kv_len - q_len if align == "bottom_right" else 0
                            want = [
                                (i, j)
                                for i in range(q_len)
                                for j in range(kv_len)
                                if (left is None or j >= i + shift - left)
                                and (right is None or j <= i + shift + right)
                                and not (causal and j > i + shift)
                            ]
                            problem = problem_of(q_len, kv_len, causal=causal, window=(left, right), align=align)
                            seen = reference.keep(
                                torch.arange(q_len), kv_len, problem.first_offset, problem.last_offset
                            )
                            assert [tuple(pair) for pair in seen.nonzero().tolist()] == want, problem
                            assert problem.visible_pairs == len(want), problem


def test_flops_count_visible_pairs_of_both_products() -> None:
    problem = Problem.from_shape((2, 4, 2, 3, 3, 8, 16), "fp16", causal="top_left")
    assert problem.flops == 2 * (2 * 4) * 6 * (8 + 16)


def test_from_shape_is_from_tensors_of_contiguous_tensors() -> None:
    q, k, v = torch.zeros(2, 4, 5, 8), torch.zeros(2, 2, 7, 8), torch.zeros(2, 2, 7, 6)
    rules: dict[str, Any] = dict(causal="bottom_right", window=(3, None), scale=0.5, return_lse=True)
    assert Problem.from_shape((2, 4, 2, 5, 7, 8, 6), torch.float32, **rules) == Problem.from_call(q, k, v, **rules)
    same_dim = Problem.from_shape((2, 4, 2, 5, 7, 8), "bf16")
    assert (same_dim.v_head_dim, same_dim.dtype, same_dim.group) == (8, "bfloat16", 2)


@pytest.mark.parametrize(
    "shape", [(1, 2, 3), (1, 2, 2, 4, 4, -1), (1, 2, 2, 4, 4, 1.5), (True, 2, 2, 4, 4, 8), 5], ids=str
)
def test_bad_shape(shape: Any) -> None:
    with pytest.raises(ValueError, match=r"shape: got .*, expected 6 or 7 sizes: B, Hq, Hkv, Sq, Sk, D\[, D_v\]"):
        Problem.from_shape(shape, "fp16")


def test_defaults() -> None:
    problem = build()
    assert problem.scale == pytest.approx(8**-0.5)
    assert problem.rescale_threshold == 8.0
    assert (problem.requires_grad, problem.copied, problem.wide, problem.descriptor_refusal is None) == (
        False,
        (),
        False,
        False,
    )
    assert build(scale=0).scale == 0.0
    assert build(scale=-2).scale == -2.0
    assert build(rescale_threshold=0).rescale_threshold == 0.0
    assert problems.default_scale(0) == 1.0


def test_requires_grad_only_under_grad_mode() -> None:
    q = TENSORS["q"].clone().requires_grad_()
    assert build(q=q).requires_grad
    with torch.no_grad():
        assert not build(q=q).requires_grad


def half(*size: int) -> torch.Tensor:
    return torch.zeros(*size, dtype=torch.float16)


@dataclass(frozen=True)
class Stored:
    id: str
    make: Any = field(repr=False)  # () -> (k, v)
    words: str | None  # of the refusal of descriptors
    copied: tuple[str, ...] = ()


def shifted(t: torch.Tensor) -> torch.Tensor:
    """The same shape one element further: an address off by 2 bytes."""
    return torch.zeros(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape)


STORED = (
    Stored("contiguous", lambda: (half(2, 2, 7, 8), half(2, 2, 7, 8)), None),
    Stored("stored as B, S, H, D", lambda: [half(2, 7, 2, 8).transpose(1, 2)] * 2, None),
    Stored("address of k", lambda: (shifted(half(2, 2, 7, 8)), half(2, 2, 7, 8)), "k starts at an address"),
    Stored("address of v", lambda: (half(2, 2, 7, 8), shifted(half(2, 2, 7, 8))), "v starts at an address"),
    Stored("row of 10 bytes", lambda: (half(2, 2, 7, 8), half(2, 2, 7, 5)), "v has stride 70 in dimension 0"),
    Stored(
        "row of 24 bytes",
        lambda: [half(2, 2, 8, 12)[..., :8]] * 2,
        "k has stride 12 in dimension 2, expected a positive multiple of 8",
    ),
    Stored("broadcast heads", lambda: [half(2, 1, 7, 8).expand(2, 2, 7, 8)] * 2, "k has stride 0 in dimension 1"),
    Stored("stride of a size-1 dimension", lambda: [torch.as_strided(half(56), (1, 1, 7, 8), (3, 5, 8, 1))] * 2, None),
    Stored("empty", lambda: [half(2, 2, 0, 8)] * 2, "k is empty"),
    Stored("copied first", lambda: (half(2, 2, 8, 7).transpose(2, 3), half(2, 2, 7, 8)), None, ("k",)),
    Stored("every second column", lambda: [half(2, 2, 7, 16)[..., ::2]] * 2, None, ("k", "v")),
    Stored("one column", lambda: [torch.as_strided(half(512), (2, 2, 7, 1), (256, 128, 16, 3))] * 2, None),
)


@pytest.mark.parametrize("case", STORED, ids=lambda case: case.id)
def test_which_storage_descriptors_can_read(case: Stored) -> None:
    k, v = case.make()
    q = half(*k.shape[:2], 5, max(8, k.shape[3]))[..., : k.shape[3]]
    problem = Problem.from_tensors(q, k, v)
    if case.words is None:
        assert problem.descriptor_refusal is None
    else:
        assert problem.descriptor_refusal is not None and problem.descriptor_refusal.startswith(case.words)
    assert problem.copied == case.copied


@dataclass(frozen=True)
class Wide:
    id: str
    stride: int
    rows: int
    wide: bool


WIDES = (
    Wide("2**23 apart", 2**23, 2, True),
    Wide("just below", 2**23 - 1, 2, False),
    Wide("a single row", 2**40, 1, False),
)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("case", WIDES, ids=lambda case: case.id)
def test_wide_rows_ask_for_64_bit_offsets(case: Wide, name: str) -> None:
    tensors = {n: torch.zeros(1, 1, case.rows, 8, dtype=torch.float16, device="meta") for n in "qkv"}
    tensors[name] = torch.empty_strided(
        (1, 1, case.rows, 8), (1, 1, case.stride, 1), dtype=torch.float16, device="meta"
    )
    assert Problem.from_tensors(**tensors).wide is case.wide


def test_fp32_precision_follows_torch_and_only_for_fp32() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert build().fp32_precision == "tf32"
        assert Problem.from_shape((1, 1, 1, 1, 1, 8), "bf16").fp32_precision == "ieee"
        torch.set_float32_matmul_precision("highest")
        assert build().fp32_precision == "ieee"
    finally:
        torch.set_float32_matmul_precision(before)
