"""examples/mods.py: each of its modifications is the argument that it claims to be, also compiled and in the gradients.
That the script itself runs is checked with the other examples."""

import importlib.util
from pathlib import Path

import pytest
import torch
from test_features import FLAT, SMALL, assert_right, by_row

import lazymax
from lazymax import mods, testing
from lazymax.options import parse_options
from lazymax.problem import Problem

PATH = Path(__file__).parents[1] / "examples" / "mods.py"


def load():
    spec = importlib.util.spec_from_file_location("mods_example", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SIZES = (2, 2, 1, 40, 40, 16)
EXAMPLE = load()
EXAMPLE.SIZES = SIZES
EXAMPLES = EXAMPLE.examples()


def qkv(device, dtype=torch.float16):
    q, k, v = testing.make_qkv(*SIZES, dtype=dtype, device=device)
    return q * 8.0, k, v


examples = pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name.replace(" ", "-"))


def test_the_four_are_there():
    assert [example.name for example in EXAMPLES] == ["soft-capping", "ALiBi", "documents", "prefix LM"]


@pytest.mark.parametrize("listed", [False, True], ids=["", "listed"])
@pytest.mark.parametrize("row", [SMALL, FLAT], ids=lambda row: f"{row.block_m}x{row.block_n}")
@examples
def test_a_mod_is_the_argument(example, row, listed, device):
    """Within the error budget of the argument's form, by output and LSE; a mask_mod and its mask bit by bit."""
    if listed and "mask_mod" not in example.mod:
        pytest.skip("a score_mod hides no keys")
    given = qkv(device)
    out, lse = by_row(row, *given, **example.mod, **example.both, listed=listed)
    assert_right(out, lse, *given, **example.same, **example.both)
    if "mask_mod" in example.mod and device == "cpu":
        same, same_lse = by_row(row, *given, **example.same, **example.both, listed=listed)
        assert torch.equal(out, same) and torch.equal(lse, same_lse)


@examples
def test_the_torch_form_is_the_jitted_one(example, device):
    """The oracle with the mod is the oracle with the argument: what verification and gradients rely on."""
    given = qkv(device)
    found = []
    for options in (example.mod, example.same):
        extras, rules = parse_options(given[0], **options, **example.both)
        problem = Problem.from_tensors(*given, extras, rules)
        found.append(lazymax.reference.attention(*given, problem, extras=extras))
    for mod, argument in zip(*found, strict=True):
        assert torch.allclose(mod, argument, rtol=1e-12, atol=1e-12)
    with lazymax.verification() as seen:
        lazymax.attention(*given, **example.mod, **example.both)
    assert seen.checked == 1 and not seen.mismatches


@examples
def test_compiled(example, device):
    """One graph, no break; forward and backward give the bits of the eager call."""
    torch._dynamo.reset()

    def call(q, k, v):
        return lazymax.attention(q, k, v, **example.mod, **example.both, return_lse=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    ours, theirs = ([t.clone().requires_grad_() for t in qkv(device, torch.float32)] for _ in range(2))
    got, want = compiled(*ours), call(*theirs)
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)
    got[0].square().sum().backward()
    want[0].square().sum().backward()
    assert all(torch.equal(x.grad, y.grad) for x, y in zip(ours, theirs, strict=True))


@examples
def test_gradients_are_those_of_the_argument(example, device):
    """Of q, k and v, and of the slopes that ALiBi takes."""
    grads = []
    for options in (example.mod, example.same):
        leaves = [t.clone().requires_grad_() for t in qkv(device, torch.float64)]
        more = {name: _leaf(value) for name, value in options.items()}
        out = lazymax.attention(*leaves, **more, **example.both)
        (out * torch.linspace(-1, 1, out.numel(), device=device, dtype=out.dtype).view(out.shape)).sum().backward()
        slopes = [t for value in more.values() for t in (value if isinstance(value, tuple) else (value,))]
        grads.append([t.grad for t in (*leaves, *slopes) if getattr(t, "grad", None) is not None])
    assert len(grads[0]) == len(grads[1]) == (4 if example.name == "ALiBi" else 3)
    assert all(torch.allclose(x, y, rtol=1e-9, atol=1e-9) for x, y in zip(*grads, strict=True))


def _leaf(value):
    if isinstance(value, tuple):
        return tuple(_leaf(item) for item in value)
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double().requires_grad_() if floating else value


def test_documents_are_packed_sequences(device):
    """The third way to say it: without a mask at all."""
    q, k, v = (t[:1] for t in qkv(device))
    document = EXAMPLES[2].mod["mask_mod_args"][0]
    ends = torch.nn.functional.pad(document.bincount().cumsum(0), (1, 0)).int()
    out = lazymax.attention_varlen(*(t[0].transpose(0, 1) for t in (q, k, v)), ends, ends, causal="top_left")
    assert_right(out.transpose(0, 1)[None], None, q, k, v, **EXAMPLES[2].mod, causal="top_left")


def test_blocks_of_other_documents_are_not_visited(device):
    """NaN in their keys and values costs nothing, not even the careful second run, which would change bits; the plan
    says that they are skipped."""
    example = EXAMPLES[2]
    q, k, v = testing.make_qkv(1, 2, 1, 80, 80, 16, dtype=torch.float16, device=device)
    document = torch.arange(80, device=device) // 32
    options = dict(mask_mod=example.mod["mask_mod"], mask_mod_args=(document,))
    plan = lazymax.explain(q, k, v, **options, show=False).plan
    assert plan.listed and any("skipped" in note for note in plan.notes)
    want = by_row(SMALL, q, k, v, listed=True, **options)
    k[:, :, 64:], v[:, :, :32] = float("nan"), float("nan")
    out, lse = by_row(SMALL, q, k, v, listed=True, **options)
    for got, expected in zip((out, lse), want, strict=True):
        assert torch.equal(got[:, :, 32:64], expected[:, :, 32:64])


def test_registered_names():
    for kind, name in (
        ("score_mod", "soft_capping"), ("score_mod", "alibi"), ("mask_mod", "same_document"), ("mask_mod", "prefix_lm"),
    ):  # fmt: skip
        assert mods.get(kind, name).reference is not None
