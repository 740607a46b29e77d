"""The tile tables: what every row must say, and what happens when a folder is broken."""

import importlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lazymax import arch as arches
from lazymax import backends
from lazymax.arch import Arch
from lazymax.backends import LARGEST_HEAD_DIM, Backend, Tile, When, registry
from lazymax.dispatch import KERNEL_DTYPES, plan, select_tile
from lazymax.problem import Problem

MAX_BLOCK_N = 128  # products.guarded_pv counts the keys of a block in 8 bits


@dataclass(frozen=True)
class Row:
    backend: str
    index: int

    @property
    def tile(self) -> Tile:
        return registry()[self.backend].forward[self.index]


# A variant runs by name only, and takes only what it is for.
FAMILIES = [name for name, backend in registry().items() if backend.automatic]
VARIANTS = [name for name in registry() if name not in FAMILIES]
ROWS = [Row(name, index) for name, backend in registry().items() for index in range(len(backend.forward))]


def row_id(row: Row) -> str:
    return f"{row.backend}-{row.index}-{row.tile.name}"


def archs_of(backend: Backend) -> list[Arch]:
    every = [arches.by_name(name) for name in backend.archs or arches.names()]
    return [arch for arch in every if arch.matrix_unit != "none"]


# No condition; the portable rows are there for the largest heads too.
LAST = {"portable": When(max_head_dim=LARGEST_HEAD_DIM)}


@pytest.mark.parametrize("name", FAMILIES)
def test_table(name: str) -> None:
    backend = registry()[name]
    assert isinstance(backend, Backend) and isinstance(backend.archs, tuple) and backend.forward
    assert set(backend.archs) <= set(arches.names()), "an arch that arch.py does not know"
    assert bool(backend.archs) is (name != "portable")
    assert backend.level.strip()
    last = backend.forward[-1]
    assert last.when == LAST.get(name, When()), f"the last row of {name} has a condition: {last.when}"
    for arch in archs_of(backend):
        for shape in ((1, 1, 1, 1, 1, 1), (1, 2, 1, 77, 99, 256), (4, 32, 32, 4096, 4096, 128)):
            for dtype in KERNEL_DTYPES:
                chosen = plan(Problem.from_shape(shape, dtype), arch, name)
                assert chosen.backend == name and chosen.tile is not None


@pytest.mark.parametrize("name", VARIANTS)
def test_variant(name: str) -> None:
    variant = registry()[name]
    folder = next(other for other in FAMILIES if name.startswith(f"{other}-"))
    assert variant.archs and set(variant.archs) <= set(registry()[folder].archs)
    for arch in archs_of(variant):
        taken = Problem.from_shape((1, 4, 2, 300, 300, 64), "bf16")
        assert plan(taken, arch).backend == folder
        assert {r.candidate: r.reason for r in plan(taken, arch).rejected}[name].startswith("only when asked for")
        chosen = plan(taken, arch, name)
        assert chosen.backend == name and chosen.tile in variant.forward
        for other in (replace(taken, softcap=1.0), replace(taken, dtype="float32"), replace(taken, head_dim=65)):
            assert plan(other, arch).route == "triton"
            with pytest.raises(NotImplementedError, match=f"impl: '{name}' cannot take this problem on {arch.id}"):
                plan(other, arch, name)


@pytest.mark.parametrize("dims", [(257, 257), (320, 64), (64, 512), (576, 512)], ids=str)
def test_large_heads_find_a_row_on_every_gpu(dims: tuple[int, int]) -> None:
    """Tiles for usual heads would not fit: only rows that say so take more than 256 columns."""
    for arch in archs_of(registry()["portable"]):
        for dtype in KERNEL_DTYPES:
            for length in (1, 4096):
                asked = Problem.from_shape((1, 16, 1, length, length, *dims), dtype)
                for problem in (
                    asked,
                    replace(asked, descriptor_refusal="k has stride 7"),
                    replace(asked, softcap=1.0),
                ):
                    tile = plan(problem, arch).tile
                    assert tile is not None and (tile.when.max_head_dim or 0) >= max(dims), arch.id


def test_portable_is_tried_last() -> None:
    assert list(registry())[-1] == "portable"
    assert not registry()["portable"].archs


def test_an_arch_belongs_to_one_backend() -> None:
    owners: dict[str, list[str]] = {}
    for name, backend in registry().items():
        for arch in backend.archs if backend.automatic else ():
            owners.setdefault(arch, []).append(name)
    assert {arch: names for arch, names in owners.items() if len(names) > 1} == {}


@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_row_is_typed_and_says_where_it_comes_from(row: Row) -> None:
    tile = row.tile
    assert isinstance(tile, Tile) and isinstance(tile.when, When)
    for name, kind in (("block_m", int), ("block_n", int), ("num_warps", int), ("num_stages", int),
                       ("descriptors", bool), ("warp_specialize", bool), ("tuned", bool), ("reason", str),
                       ("provenance", str)):  # fmt: skip
        assert type(getattr(tile, name)) is kind, f"{name} is {getattr(tile, name)!r}"
    assert tile.rescale in ("select", "branch")
    assert tile.reason.strip() and tile.provenance.strip()
    assert tile.when.dtypes is None or set(tile.when.dtypes) <= set(KERNEL_DTYPES)
    assert all(getattr(tile.when, name) in (None, True, False) for name in ("causal", "window", "plain", "ragged"))
    assert tile.when.max_head_dim is None or 1 <= tile.when.max_head_dim <= LARGEST_HEAD_DIM


@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_row_fits_the_kernel_and_the_gpu(row: Row) -> None:
    tile = row.tile
    own = type(tile) is not Tile  # the rows of another kernel: its tiles are made up of matrix instructions
    assert tile.block_m % 16 == 0
    for size in (16 if own else tile.block_m, tile.block_n, tile.num_warps):
        assert size & (size - 1) == 0 and size > 0, f"{size} is no power of two"
    assert 16 <= tile.block_m // getattr(tile, "ctas", 1) <= 256
    assert 16 <= tile.block_n <= MAX_BLOCK_N
    assert 1 <= tile.num_stages <= 6
    for arch in archs_of(registry()[row.backend]):
        threads = tile.num_warps * arch.warp_size
        assert threads <= (1024 if arch.vendor == "nvidia" else 512), f"{threads} threads on {arch.id}"


@pytest.mark.parametrize("row", [row for row in ROWS if registry()[row.backend].archs], ids=row_id)
def test_descriptors_only_where_every_arch_has_them(row: Row) -> None:
    if row.tile.descriptors:
        assert all(arch.descriptors for arch in archs_of(registry()[row.backend]))


@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_a_row_that_was_only_compiled_does_not_say_more(row: Row) -> None:
    if row.tile.provenance.startswith("compiled only"):
        assert (row.tile.level or registry()[row.backend].level).startswith("compiled only")


@pytest.mark.parametrize("row", [row for row in ROWS if row.tile.warp_specialize], ids=row_id)
def test_roles_only_where_triton_makes_them(row: Row) -> None:
    """Its pass is for tensor memory and for what TMA loads, and fails on the branch form of the rescale."""
    assert type(row.tile) is Tile and row.tile.descriptors and row.tile.rescale == "select" and row.tile.when.plain
    assert {arch.matrix_unit for arch in archs_of(registry()[row.backend])} == {"tcgen05"}


@pytest.mark.parametrize("name", [n for n, b in registry().items() if any(row.descriptors for row in b.forward)])
def test_what_descriptors_refuse_still_finds_a_row(name: str) -> None:
    """A k of odd strides cannot be described; a row by pointers must take it on the same GPU."""
    for arch in archs_of(registry()[name]):
        for dtype in KERNEL_DTYPES:
            for head_dim in (1, 64, 72, 128, 256):
                asked = Problem.from_shape((1, 2, 2, 300, 300, head_dim), dtype)
                for problem in (asked, masked(asked)):
                    chosen = plan(replace_refusal(problem), arch, name)
                    assert chosen.tile is not None and not chosen.tile.descriptors


def replace_refusal(problem: Problem) -> Problem:
    return replace(problem, descriptor_refusal="k has stride 7 in dimension 2")


def masked(problem: Problem) -> Problem:
    return replace(problem, mask="bool", mask_varies=(True, False, False, True))


UNSET = ("reason", "provenance", "tuned")  # what is said of a row and not set by it


def settings(tile: Tile) -> tuple[Any, ...]:
    return (type(tile), *(getattr(tile, f.name) for f in fields(tile) if f.name not in UNSET))


def test_no_row_is_a_silent_copy_of_another_gpus() -> None:
    """Of equal rows of one vendor's backends, all but one say whose they are and why ("the same as gfx1100: ...").
    Equal numbers across vendors are chance: their waves, registers and matrix units differ."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in ROWS:
        for vendor in {arches.by_name(name).vendor for name in registry()[row.backend].archs}:
            groups.setdefault((vendor, *settings(row.tile)), []).append(row)
    silent = []
    for rows in groups.values():
        unexplained = [row for row in rows if "same as" not in row.tile.reason.lower()]
        if len({row.backend for row in unexplained}) > 1:
            silent.append(" = ".join(map(row_id, unexplained)))
    assert silent == []


@pytest.mark.parametrize("name", list(registry()))
def test_every_row_is_reachable(name: str) -> None:
    """A row that no problem selects is a row that nothing tests; of those that the installed Triton can build."""
    backend = registry()[name]
    built = [i for i, tile in enumerate(backend.forward) if not all(map(tile.outdated, archs_of(backend)))]
    chosen = set()
    for arch in archs_of(backend):
        for dtype in KERNEL_DTYPES:
            for dims in (*((n, n) for n in (16, 32, 64, 80, 96, 128, 160, 112, 192, 256, 320)), (192, 128), (576, 512)):
                for length, heads in ((1, 1), (64, 2), (256, 8), (2048, 2), (512, 32), (4096, 128)):
                    for rules in ({}, dict(causal="top_left"), dict(causal="top_left", window=(512, None))):
                        asked = Problem.from_shape((1, heads, heads, length, length, *dims), dtype, **rules)
                        for problem in (asked, replace_refusal(asked), masked(asked), replace_refusal(masked(asked))):
                            chosen.add(select_tile(backend, problem, arch)[0])
    assert [row_id(Row(name, i)) for i in built if backend.forward[i] not in chosen] == []


@dataclass(frozen=True)
class Condition:
    id: str
    when: When
    shape: tuple[int, ...] = (1, 2, 2, 300, 300, 64)
    dtype: str = "fp16"
    causal: str | None = None
    features: dict[str, Any] = field(default_factory=dict)
    words: str | None = None  # of the refusal


PACKED = dict(cu_seqlens_q=torch.tensor([0, 9, 300]), cu_seqlens_k=torch.tensor([0, 9, 300]))  # 300 // 64 + 2 + 1 slots
WITHOUT = "for problems without masks, mods and the like"
CONDITIONS = (
    Condition("none", When()),
    Condition("usual head dims", When(), (1, 2, 2, 8, 8, 256)),
    Condition("no usual head dim", When(), (1, 2, 2, 8, 8, 257), words="for head dims to 256, got 257"),
    Condition("no usual head dim of v", When(), (1, 2, 2, 8, 8, 64, 300), words="for head dims to 256, got 300"),
    Condition("large heads", When(max_head_dim=576), (1, 2, 2, 8, 8, 576, 512)),
    Condition("head dim of v inside", When(max_v_head_dim=64), (1, 2, 2, 300, 300, 128, 64)),
    Condition("head dim of v outside", When(max_v_head_dim=64), (1, 2, 2, 300, 300, 64, 72),
              words="for head dims of v to 64, got 72"),
    Condition("plain", When(plain=True)),
    Condition("not plain", When(plain=True), features=dict(attn_mask=torch.ones(300) > 0), words=WITHOUT),
    Condition("modified", When(plain=True), features=dict(softcap=1.0), words=WITHOUT),
    Condition("sinks", When(plain=True), features=dict(sinks=torch.zeros(2)), words=WITHOUT),
    Condition("lengths are plain", When(plain=True), features=dict(seqlens_k=torch.tensor([9]))),
    Condition("too plain", When(plain=False), words="for masks, mods and the like"),
    Condition("one length", When(ragged=False)),
    Condition("several lengths", When(ragged=False), features=dict(seqlens_k=torch.tensor([9])),
              words="for one length of all of the batch"),
    Condition("ragged", When(ragged=True), features=PACKED),
    Condition("not ragged", When(ragged=True), words="for lengths that differ over the batch"),
    Condition("window inside", When(window=True), features=dict(window=(3, None))),
    Condition("window outside", When(window=True), words="for windows"),
    Condition("window unwanted", When(window=False), features=dict(window=(3, None)),
              words="for problems without a left bound"),
    Condition("a window that hides nothing is none", When(window=False), features=dict(window=(299, None))),
    Condition("named head dim", When(head_dims=(32, 64))),
    Condition("another head dim", When(head_dims=(32, 80)), words="for head dims 32, 80, got 64"),
    Condition("named head dim, another of v", When(head_dims=(64,)), (1, 2, 2, 8, 8, 64, 32),
              words="for head dims 64, got 64, 32 of v"),
    Condition("head dim inside", When(max_head_dim=64)),
    Condition("head dim outside", When(max_head_dim=63), words="for head dims to 63, got 64"),
    Condition(
        "head dim of v counts", When(max_head_dim=64), (1, 2, 2, 8, 8, 64, 72), words="for head dims to 64, got 72"
    ),
    Condition("dtype inside", When(dtypes=backends.HALF)),
    Condition("dtype outside", When(dtypes=backends.HALF), dtype="fp32", words="for float16 and bfloat16, got float32"),
    Condition("causal", When(causal=True), causal="top_left"),
    Condition("not causal", When(causal=True), words="for causal problems"),
    Condition("not full", When(causal=False), causal="top_left", words="for problems without a right bound"),
    Condition("programs enough", When(min_programs=1.0)),
    Condition("programs short", When(min_programs=1.25), words="for 1.25 programs per multiprocessor and more, got 10"),
    Condition("keys enough", When(min_keys=300)),
    Condition("keys short", When(min_keys=301), words="for 301 keys of a query and more, got 300"),
    Condition("window short", When(min_keys=65), features=dict(window=(60, 3)), words="for 65 keys of a query"),
    Condition("window enough", When(min_keys=64), features=dict(window=(60, 3))),
    Condition("window open", When(min_keys=300), features=dict(window=(60, None))),
    Condition("packed rows: a slot more per sequence", When(min_programs=1.5), features=PACKED,
              words="for 1.5 programs per multiprocessor and more, got 14"),
)  # fmt: skip


@pytest.mark.parametrize("case", CONDITIONS, ids=lambda case: case.id)
def test_condition_of_a_row(case: Condition) -> None:
    """block_m 64 on a GPU of 10 multiprocessors: 2 heads of 5 tiles are 10 programs."""
    arch = Arch("sm_80", "nvidia", "mma", 10, 1 << 16)
    problem = Problem.from_shape(case.shape, case.dtype, causal=case.causal, **case.features)
    got = case.when.refusal(problem, arch, 64)
    assert got is None if case.words is None else got is not None and got.startswith(case.words)


@pytest.fixture
def fresh_registry() -> Iterator[None]:
    registry.cache_clear()
    yield
    registry.cache_clear()


def good_tile() -> Tile:
    return Tile(block_m=16, block_n=16, num_warps=1, num_stages=1, reason="test", provenance="test")


@dataclass(frozen=True)
class Broken:
    id: str
    make: Any  # () -> module
    words: str


def raises(error: Exception) -> Any:
    def make() -> None:
        raise error

    return make


BROKEN = (
    Broken("import fails", raises(ImportError("no gluon")), "ImportError: no gluon"),
    Broken("syntax", raises(SyntaxError("invalid syntax")), "SyntaxError: invalid syntax"),
    Broken("a bug", raises(ZeroDivisionError("x")), "ZeroDivisionError: x"),
    Broken("no BACKEND", lambda: SimpleNamespace(), "AttributeError"),
    Broken("BACKEND is no Backend", lambda: SimpleNamespace(BACKEND=None), "got NoneType, expected a Backend"),
    Broken("no rows", lambda: SimpleNamespace(BACKEND=Backend(archs=("sm_90",), level="x", forward=())), "no rows"),
)


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.id)
def test_a_broken_folder_costs_one_warning_and_leaves_portable(
    case: Broken, fresh_registry: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.import_module

    def load(name: str, package: str | None = None) -> Any:
        return case.make() if name == "lazymax.backends.aaa_broken.tiles" else real(name, package)

    modules = [*backends.pkgutil.iter_modules(backends.__path__), SimpleNamespace(name="aaa_broken")]
    modules = [module for module in modules if module.name in ("aaa_broken", "portable")]
    monkeypatch.setattr(backends.pkgutil, "iter_modules", lambda path: modules)
    monkeypatch.setattr(backends.importlib, "import_module", load)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert list(registry()) == ["portable"]
        chosen = plan(Problem.from_shape((1, 1, 1, 64, 64, 64), "fp16"), arches.by_name("sm_90"))
    assert (chosen.route, chosen.backend) == ("triton", "portable")
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == 1 and messages[0].startswith("lazymax: backend aaa_broken left out: ")
    assert case.words in messages[0]


def test_without_any_backend_the_reference_runs(fresh_registry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends.pkgutil, "iter_modules", lambda path: [])
    chosen = plan(Problem.from_shape((1, 1, 1, 64, 64, 64), "fp16"), arches.by_name("sm_90"))
    assert (chosen.route, chosen.reason) == ("reference", "no backend takes it")


def test_a_new_folder_is_found_and_first(fresh_registry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Backend(archs=("sm_90",), level="test", forward=(good_tile(),))
    real = importlib.import_module
    modules = [*backends.pkgutil.iter_modules(backends.__path__), SimpleNamespace(name="aaa")]
    monkeypatch.setattr(backends.pkgutil, "iter_modules", lambda path: modules)
    monkeypatch.setattr(
        backends.importlib, "import_module",
        lambda name, package=None: SimpleNamespace(BACKEND=mine) if ".aaa." in name else real(name, package),
    )  # fmt: skip
    asked = Problem.from_shape((1, 1, 1, 64, 64, 64), "fp16")
    assert plan(asked, arches.by_name("sm_90")).backend == "aaa"
    assert plan(asked, arches.by_name("sm_80")).backend != "aaa"
