"""Problem: what dispatch may look at, and every error of a call."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lazymax import mods, reference
from lazymax import problem as problems
from lazymax.extras import Extras, Rules
from lazymax.problem import Problem, parse_dtype

TENSORS = dict(
    q=torch.zeros(2, 4, 5, 8), k=torch.zeros(2, 2, 7, 8), v=torch.zeros(2, 2, 7, 6)
)  # grouped queries, different lengths, D_v != D


def build(**change: Any) -> Problem:
    """q, k, v, fields of `Rules` and the options of `from_tensors`, each by its name."""
    rules = Rules(**{name: change.pop(name) for name in Rules._fields if name in change})
    return Problem.from_tensors(**{**TENSORS, **change}, rules=rules)


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


@pytest.mark.parametrize("case", DTYPES, ids=lambda case: case.id)
def test_dtype(case: Parse) -> None:
    check_parse(parse_dtype, case)


def window(left: int | None, right: int | None, **rules: Any) -> dict[str, Any]:
    return dict(window_left=left, window_right=right, **rules)


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
    Band("window", window(2, 1), (5, 7), -2, 1),
    Band("window, bottom right", window(2, 1, align="bottom_right"), (5, 7), 0, 3),
    Band("left only", window(0, None), (5, 7), 0, None),
    Band("causal wins over the right side", window(1, 3, causal=True), (5, 7), -1, 0),
    Band("decode, bottom right: hides nothing", dict(causal=True, align="bottom_right"), (1, 7), None, None),
    Band("decode, top left", dict(causal=True), (1, 7), None, 0),
    Band("one key", dict(causal=True), (5, 1), None, None),
    Band("hides one key on the left", window(3, None), (5, 7), -3, None),
    Band("hides none on the left", window(4, None), (5, 7), None, None),
    Band("hides one key on the right", window(None, 5), (5, 7), None, 5),
    Band("hides none on the right", window(None, 6), (5, 7), None, None),
    Band("wider than the lengths", window(10**12, 10**12), (5, 7), None, None),
    Band("huge, bottom right", window(10**12, 10**12, align="bottom_right"), (7, 5), None, None),
    Band("keys all to the left", window(10**12, 0, align="bottom_right"), (7, 5), None, -2),
)


def problem_of(q_len: int, kv_len: int, **rules: Any) -> Problem:
    q, k = torch.zeros(1, 1, q_len, 8, device="meta"), torch.zeros(1, 1, kv_len, 8, device="meta")
    return Problem.from_tensors(q, k, k, rules=Rules(**rules))


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
                            problem = problem_of(q_len, kv_len, **window(left, right, causal=causal, align=align))
                            seen = reference.keep(
                                torch.arange(q_len), kv_len, problem.first_offset, problem.last_offset
                            )
                            assert [tuple(pair) for pair in seen.nonzero().tolist()] == want, problem
                            assert problem.visible_pairs == len(want), problem
                            counts = [sum(1 for row, _ in want if row == i) for i in range(q_len)]
                            assert max(counts, default=0) <= problem.reach <= kv_len, problem
                            first, last = problem.first_offset, problem.last_offset
                            pairs = [(i, j) for i in range(q_len) for j in range(kv_len)]
                            # A bound that hides nothing costs a masked stretch for nothing: it is none.
                            assert first is None or not pairs or any(j < i + first for i, j in pairs), problem
                            assert last is None or not pairs or any(j > i + last for i, j in pairs), problem
                            assert all(o is None or -q_len <= o <= kv_len for o in (first, last)), problem  # 32 bits


@dataclass(frozen=True)
class Ragged:
    id: str
    rules: dict[str, Any]
    first: int | None
    last: int | None


RAGGED = (
    Ragged("full", {}, None, None),
    Ragged("causal, top left", dict(causal=True), None, 0),
    Ragged("causal, bottom right: the kernel knows each difference", dict(causal=True, align="bottom_right"), None, 0),
    Ragged("window", window(2, 1), -2, 1),
    Ragged("window, bottom right", window(2, 1, align="bottom_right"), -2, 1),
    Ragged("wide: a difference of lengths may bring it back", window(10, 10, align="bottom_right"), -10, 10),
    Ragged("huge, clamped to both lengths", window(10**12, 10**12), -12, 12),
)


@pytest.mark.parametrize("packed", [False, True], ids=["seqlens_k", "packed"])
@pytest.mark.parametrize("case", RAGGED, ids=lambda case: case.id)
def test_offsets_of_ragged_problems_are_without_a_shift(case: Ragged, packed: bool) -> None:
    """Lengths 5 and 7 at most: no offset may take the difference of the longest into account."""
    q, k = torch.zeros(1, 1, 5, 8, device="meta"), torch.zeros(1, 1, 7, 8, device="meta")
    ends = torch.zeros(4, dtype=torch.int32, device="meta")
    extras = Extras(cu_seqlens_q=ends, cu_seqlens_k=ends) if packed else Extras(seqlens_k=ends[:1])
    problem = Problem.from_tensors(q, k, k, extras, Rules(**case.rules))
    assert (problem.first_offset, problem.last_offset) == (case.first, case.last)
    assert problem.ragged and problem.packed == ((5, 7) if packed else None)


def test_flops_count_visible_pairs_of_both_products() -> None:
    problem = Problem.from_shape((2, 4, 2, 3, 3, 8, 16), "fp16", causal="top_left")
    assert problem.flops == 2 * (2 * 4) * 6 * (8 + 16)


def test_from_shape_is_from_tensors_of_contiguous_tensors() -> None:
    q, k, v = torch.zeros(2, 4, 5, 8), torch.zeros(2, 2, 7, 8), torch.zeros(2, 2, 7, 6)
    rules: dict[str, Any] = dict(causal="bottom_right", window=(3, None), scale=0.5, return_lse=True)
    assert Problem.from_shape((2, 4, 2, 5, 7, 8, 6), torch.float32, **rules) == Problem.from_call(q, k, v, **rules)
    rules |= dict(attn_mask=torch.zeros(4, 5, 1), sinks=torch.zeros(4), softcap=2.0, seqlens_k=torch.tensor([3, 4]),
                  dropout_p=0.5, alibi_slopes=torch.zeros(2, 4))  # fmt: skip
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


@pytest.mark.parametrize("name", ["attn_mask", "alibi_slopes", "sinks", "score_mod_args"])
def test_requires_grad_of_optional_tensors(name: str) -> None:
    given = torch.zeros(4, requires_grad=True) if name != "attn_mask" else torch.zeros(7, requires_grad=True)
    options: dict[str, Any] = {name: given}
    if name == "score_mod_args":
        options = dict(score_mod="test_problem.add", score_mod_args=(given,))
    assert Problem.from_call(**TENSORS, **options).requires_grad
    with torch.no_grad():
        assert not Problem.from_call(**TENSORS, **options).requires_grad


def _add(score, b, h, q_idx, k_idx, weight):
    return score


def _any(b, h, q_idx, k_idx):
    return True


mods.register_score_mod("test_problem.add", SimpleNamespace(fn=_add))
mods.register_mask_mod("test_problem.any", SimpleNamespace(fn=_any))


@dataclass(frozen=True)
class Feature:
    """What a call says beside q, k and v, and the fields of its problem that differ from the plain ones."""

    id: str
    options: dict[str, Any]
    want: dict[str, Any]
    modified: bool = False
    plain: bool = False
    ragged: bool = False


def varies(pattern: str) -> tuple[bool, ...]:
    """ "b.q." -> over batch and query"""
    return tuple(letter != "." for letter in pattern)


FLOAT, BOOL = dict(mask="float32"), dict(mask="bool")
ENDS = torch.tensor([0, 2, 2, 5])
FEATURES = (
    Feature("bool mask", dict(attn_mask=torch.ones(2, 4, 5, 7) > 0), dict(**BOOL, mask_varies=varies("bhqk"))),
    Feature("float mask of keys", dict(attn_mask=torch.zeros(7)), dict(**FLOAT, mask_varies=varies("...k")), True),
    Feature("mask of queries", dict(attn_mask=torch.zeros(5, 1)), dict(**FLOAT, mask_varies=varies("..q.")), True),
    Feature("mask of batch", dict(attn_mask=torch.zeros(2, 1, 1, 1)), dict(**FLOAT, mask_varies=varies("b...")), True),
    Feature("mask, expanded heads", dict(attn_mask=torch.zeros(2, 1, 5, 7).expand(2, 4, 5, 7)),
            dict(**FLOAT, mask_varies=varies("b.qk")), True),
    Feature("mask of one element", dict(attn_mask=torch.tensor(True)), dict(**BOOL, mask_varies=varies("...."))),
    Feature("mask in fp16", dict(attn_mask=torch.zeros(7).half()), dict(mask="float16", mask_varies=varies("...k")),
            True),
    Feature("softcap", dict(softcap=3), dict(softcap=3.0), True),
    Feature("slopes", dict(alibi_slopes=torch.zeros(4)), dict(alibi=True), True),
    Feature("sinks", dict(sinks=torch.zeros(2, 4)), dict(sinks=True)),
    Feature("lengths", dict(seqlens_k=torch.tensor([3, 4])), dict(seqlens_k=True), plain=True, ragged=True),
    Feature("score_mod", dict(score_mod="test_problem.add", score_mod_args=[torch.zeros(1)]),
            dict(score_mod="test_problem.add"), True),
    Feature("mask_mod", dict(mask_mod="test_problem.any"), dict(mask_mod="test_problem.any")),
    Feature("dropout", dict(dropout_p=0.5), dict(dropout_p=0.5)),
    Feature("dropout of all", dict(dropout_p=1), dict(dropout_p=1.0)),
    Feature("nothing", dict(softcap=0, dropout_p=0, alibi_slopes=None), {}, plain=True),
)  # fmt: skip


@pytest.mark.parametrize("case", FEATURES, ids=lambda case: case.id)
def test_features(case: Feature) -> None:
    problem = Problem.from_call(**TENSORS, **case.options)
    assert problem == replace(build(), **case.want)
    assert (problem.modified, problem.plain, problem.ragged) == (case.modified, case.plain, case.ragged)


@dataclass(frozen=True)
class Packed:
    id: str
    options: dict[str, Any]
    lengths: tuple[int, int]


PACKED = (
    Packed("no bounds", {}, (5, 7)),
    Packed("both", dict(max_seqlen_q=3, max_seqlen_k=4), (3, 4)),
    Packed("keys alone", dict(max_seqlen_k=0), (5, 0)),
    Packed("longer than the rows", dict(max_seqlen_q=9, max_seqlen_k=9), (5, 7)),
)


@pytest.mark.parametrize("case", PACKED, ids=lambda case: case.id)
def test_packed_lengths_are_bounds(case: Packed) -> None:
    q, k, v = (t[:1] for t in TENSORS.values())
    problem = Problem.from_call(q, k, v, cu_seqlens_q=ENDS, cu_seqlens_k=ENDS, **case.options)
    assert (problem.batch, problem.packed, problem.q_len, problem.kv_len) == (3, (5, 7), *case.lengths)
    assert problem.ragged and not problem.plain and not problem.modified


def test_query_tiles() -> None:
    assert [build().q_tiles(block_m) for block_m in (1, 2, 4, 5, 16)] == [2 * n for n in (5, 3, 2, 1, 1)]
    q, k, v = (t[:1] for t in TENSORS.values())
    packed = Problem.from_call(q, k, v, cu_seqlens_q=ENDS, cu_seqlens_k=ENDS)
    assert [packed.q_tiles(block_m) for block_m in (2, 4, 16)] == [2 + 4, 1 + 4, 0 + 4]


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


@pytest.mark.parametrize("case", WIDES[:2], ids=lambda case: case.id)
@pytest.mark.parametrize("dim", [2, 3], ids=["rows", "columns"])
def test_wide_masks_ask_for_64_bit_offsets(case: Wide, dim: int) -> None:
    q = torch.zeros(1, 1, 2, 8, dtype=torch.float16, device="meta")
    strides = [1, 1, 1, 1]
    strides[dim] = case.stride
    mask = torch.empty_strided((1, 1, 2, 2), strides, device="meta")
    assert Problem.from_call(q, q, q, attn_mask=mask).wide is case.wide


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
