"""The cases: what is timed beside which base, from the sizes of a GPU or of a test."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from . import make
from .make import Maker

CAUSAL = {"causal": "top_left"}
GAP = 0.03  # what an equivalent spelling of the same band may cost
VARLEN_SEED = 15  # 32849 rows on a GPU


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a whole suite."""

    batch: int
    width: int  # heads times head dim
    length: int
    long: int  # of the packed documents
    documents: int
    window: int
    uneven: tuple[int, int]  # shortest and longest of as many packed sequences


ON_GPU = Sizes(batch=2, width=2048, length=4096, long=16384, documents=16, window=1024, uneven=(100, 8000))
ON_CPU = Sizes(batch=2, width=256, length=24, long=40, documents=4, window=6, uneven=(2, 20))

Tensors = Callable[[Maker], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Feature:
    """One call to time. `shape` is B, Hq, Hkv, Sq, Sk, D[, Dv]."""

    name: str
    shape: tuple[int, ...]
    base: str | None = None  # name of the case beside which it costs what it costs; None: a base itself
    options: tuple[tuple[str, Any], ...] = ()  # of the call, those that are no tensors
    tensors: Tensors = make.nothing
    lengths: tuple[int, ...] = ()  # of packed sequences, which share the B * Sq rows of the shape
    drop_in: bool = False  # through scaled_dot_product_attention
    same: bool = False  # gives the values of the base
    allowed: float | None = None  # how far the cost may be from 1
    flex: tuple[str, ...] = ()  # modifications that say the same to flex_attention
    flex_tensors: Tensors = make.nothing  # their arguments, as ours take them
    suite: str = "features"


def features(sizes: Sizes) -> tuple[Feature, ...]:
    """All cases, every base before what is compared with it, the most wanted first."""
    found = [
        *_causal(128, sizes), *_full(128, sizes), *_documents(128, sizes),
        *_causal(64, sizes), *_full(64, sizes), *_documents(64, sizes),
        *_head_dims(sizes),
    ]  # fmt: skip
    few = ("softcap 50", f"{sizes.documents} documents")  # what flex_attention is timed on at D=64
    return tuple(
        replace(f, flex=()) if f.name.startswith("D=64") and not any(word in f.name for word in few) else f
        for f in found
    )


def _options(**options: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(options.items())


def _of(base: Feature) -> Callable[..., Feature]:
    """Makes the cases of a base: its shape and options, and what is said."""

    def feature(what: str, tensors: Tensors = make.nothing, *, plain: bool = False, **said: Any) -> Feature:
        own = {name: said.pop(name) for name in Feature.__slots__ if name in said}
        options = said if plain else dict(base.options) | said
        return Feature(f"{base.name}, {what}", base.shape, base.name, _options(**options), tensors, **own)

    return feature


def _causal(dim: int, sizes: Sizes) -> Iterator[Feature]:
    heads, length = sizes.width // dim, sizes.length
    base = Feature(
        f"D={dim} causal", (sizes.batch, heads, heads, length, length, dim), None, _options(**CAUSAL),
        flex=("bench.causal",),
    )  # fmt: skip
    case, packed = _of(base), (length,) * sizes.batch
    yield base
    yield case("as is_causal", plain=True, is_causal=True, drop_in=True, same=True, allowed=GAP)
    yield case("as window (none, 0)", plain=True, window=(None, 0), same=True, allowed=GAP)
    yield case(f"as window ({length - 1}, 0)", plain=True, window=(length - 1, 0), same=True, allowed=GAP)
    yield case("as bool mask (1, 1, S, S)", make.triangle, plain=True, same=True)
    yield case("as mask_mod", plain=True, mask_mod="bench.causal", same=True)
    yield case("softcap 50", softcap=50.0, flex=("bench.softcap_50", "bench.causal"))
    yield case("ALiBi", make.alibi, flex=("bench.alibi", "bench.causal"), flex_tensors=make.alibi_mod)
    yield case("varlen, the same lengths", lengths=packed, same=True)
    yield case("varlen, ragged", lengths=make.partition(sum(packed), 8, seed=1))
    yield case(f"window {sizes.window}", window=(sizes.window - 1, 0))
    if dim == 128:
        yield case("ALiBi as score_mod", make.alibi_mod, score_mod="bench.alibi")
        yield case("sinks", make.sinks)
        yield case(
            "prefix-LM mask_mod", make.prefix, plain=True, mask_mod="bench.prefix_lm", flex=("bench.prefix_lm",),
            flex_tensors=make.prefix,
        )  # fmt: skip


def _full(dim: int, sizes: Sizes) -> Iterator[Feature]:
    heads, length = sizes.width // dim, sizes.length
    base = Feature(f"D={dim} full", (sizes.batch, heads, heads, length, length, dim))
    case, packed = _of(base), (length,) * sizes.batch
    yield base
    yield case("bool mask, key padding", make.key_padding)
    yield case("bool mask (1, 1, S, S), half", make.half)
    yield case("float mask (1, 1, S, S)", make.float_mask)
    yield case("softcap 50", softcap=50.0, flex=("bench.softcap_50",))
    yield case("sinks", make.sinks)
    yield case("dropout 0.1", make.dropout, dropout_p=0.1)
    yield case("seqlens_k, all full", make.full_lengths, same=True)
    yield case("varlen, the same lengths", lengths=packed, same=True)
    if dim == 128:
        yield case("bool mask (B, H, S, S), half", make.half_per_head)
        yield case("float mask, key padding", make.float_key_padding)
        yield case("float mask (B, H, S, S)", make.float_mask_per_head)
        yield case("softcap 50 as score_mod", score_mod="bench.softcap_50")
        yield case("return_lse", return_lse=True, same=True)
        yield case("seqlens_k, half", make.half_lengths)
        yield case("varlen, ragged", lengths=make.partition(sum(packed), 8, seed=1))


def _documents(dim: int, sizes: Sizes) -> Iterator[Feature]:
    """Packed documents, causal inside of each; the same data as a mask and as packed sequences."""
    heads, long, count = sizes.width // dim, sizes.long, sizes.documents
    lengths = make.partition(long, count, seed=2)
    tensors = partial(make.documents, lengths=lengths)
    base = Feature(f"D={dim} causal, S={long}", (1, heads, heads, long, long, dim), None, _options(**CAUSAL))
    yield base
    first = _of(base)(
        f"{count} documents, mask_mod", tensors, plain=True, mask_mod="bench.causal_document",
        flex=("bench.causal_document",), flex_tensors=tensors,
    )  # fmt: skip
    yield first
    yield _of(base)(f"{count} documents, causal and mask_mod", tensors, mask_mod="bench.same_document")
    varlen = _of(base)(f"{count} documents, varlen", lengths=lengths)
    yield varlen
    # The other way to see it: what the mask costs where packing would have served.
    yield replace(first, name=f"{first.name} beside varlen", base=varlen.name, same=True, flex=())


def _head_dims(sizes: Sizes) -> Iterator[Feature]:
    """Head dims beside the powers of two around them, 16 heads; the next larger one is the base."""
    length, heads = sizes.length, sizes.width // 128

    def shape(batch: int, kv_heads: int, *dims: int) -> tuple[int, ...]:
        return batch, heads, kv_heads, length, length, *dims

    for dim in (64, 80, 96):
        yield Feature(f"head dim {dim}, full", shape(sizes.batch, heads, dim), "D=128 full")
    for band, options in (("full", ()), ("causal", _options(**CAUSAL))):
        base = Feature(f"D=256 {band}", shape(1, heads, 256), None, options)
        yield base
        dims: tuple[tuple[int, ...], ...] = ((128,), (160,), (192,)) if band == "full" else ((128,), (192,), (192, 128))
        for each in dims:
            name = f"head dim {each[0]}" + (f", {each[1]} of v" if each[1:] else "")
            yield Feature(f"{name}, {band}", shape(1, heads, *each), base.name, options)
    base = Feature(f"D=512 causal, {heads} over 1 heads", shape(1, 1, 512), None, _options(**CAUSAL))
    yield base
    yield Feature(
        f"head dim 576, 512 of v, causal, {heads} over 1 heads", shape(1, 1, 576, 512), base.name, base.options
    )


def varlen(sizes: Sizes) -> tuple[Feature, ...]:
    """Packed sequences of very different lengths, most off the tile. No bases, but other libraries beside them."""
    lengths, heads = make.uneven(*sizes.uneven, sizes.documents, seed=VARLEN_SEED), sizes.width // 128
    total = sum(lengths)
    return tuple(
        Feature(
            f"{len(lengths)} sequences of {min(lengths)} to {max(lengths)}, {q_heads} over {kv_heads} heads, {band}",
            (1, q_heads, kv_heads, total, total, 128), None, options, lengths=lengths, suite="varlen",
        )
        for q_heads, kv_heads in ((heads, heads), (2 * heads, max(1, heads // 2)))
        for band, options in (("causal", _options(**CAUSAL)), ("full", ()))
    )  # fmt: skip


SUITES: dict[str, Callable[[Sizes], tuple[Feature, ...]]] = {"features": features, "varlen": varlen}
