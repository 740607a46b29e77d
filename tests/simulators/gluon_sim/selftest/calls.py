"""Calls of the test kernels with what they need; each raises AssertionError where the numbers are wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from triton._C.libtriton import gluon_ir, ir
from triton.compiler.compiler import make_backend
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .. import TARGETS, Options, Outcome, activate, run_mutants, simulate
from ..machine import Stats
from . import (
    faults,
    kernels_blackwell,
    kernels_exchange,
    kernels_hopper,
    kernels_pairs,
    kernels_programs,
    kernels_small,
)
from .box import Box


def launch(
    kernel: str, grid: Any, *args: Any, options: Options | None = None, **kwargs: Any
) -> tuple[tuple[Any, ...], Stats]:
    """Simulate a kernel of kernels_small.py; the arguments as they are afterwards, and what the launch did."""
    given = [a.descriptor() if isinstance(a, Box) else a for a in args]
    return args, simulate(getattr(kernels_small, kernel), grid, *given, options=options, **kwargs).stats


def hosted(options: Options) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Ordinary host code under `activate`: input, output, programs."""
    src, dst = torch.arange(200.0), torch.zeros(200)
    with activate(options) as session:
        kernels_small.add_one[(2,)](src, dst, 200, BLOCK=128, MASK=True, num_warps=4)
    return src, dst, session.reports[0].stats.programs


def configured() -> torch.Tensor:
    """A tuple argument with a constant in it."""
    dst = torch.zeros(128, dtype=torch.int32)
    simulate(kernels_small.config_sum, (1,), dst, (7, gl.constexpr(3)))
    return dst


def packed(order: list[int]) -> torch.Tensor:
    """packed_asm on numbers from 1 on, in a layout of this order."""
    src, dst = torch.arange(1.0, 1025).reshape(256, 4), torch.zeros(256, 4)
    simulate(kernels_small.packed_asm, (1,), src, dst, gl.BlockedLayout([2, 4], [32, 1], [4, 1], order))
    return dst


def spin(options: Options, alone: bool) -> Stats:
    """Program 1 waits for program 0; alone: which does not run."""
    programs = (lambda p: p[0] == 1) if alone else None
    flag = torch.zeros(1, dtype=torch.int32)
    return simulate(kernels_small.spin, (2,), flag, options=replace(options, programs=programs)).stats


def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


def gemm(options: Options, fault: str = "none") -> Stats:
    """The warp-specialised GEMM of kernels_hopper.py; its ring of 2 slots is used 3 times."""
    m, n, k = 128, 128, 384
    a, b, c = _random(m, k, seed=0), _random(k, n, seed=1), torch.zeros(m, n).half()
    boxes = Box(a, (128, 64)), Box(b, (64, 128)), Box(c, (128, 128))
    descriptors = [box.descriptor() for box in boxes]
    stats = simulate(kernels_hopper.ws_gemm, (1,), *descriptors, k, 2, faults.GEMM[fault], options=options).stats
    assert (c.float() - a.float() @ b.float()).abs().max() < 0.1
    return stats


def attention(options: Options, fault: str = "none") -> Stats:
    """The attention of kernels_blackwell.py; its ring of 3 slots takes 5 blocks of K and V."""
    rows, keys, dim = 128, 300, 64
    q, k, v = (_random(s, dim, seed=i) for i, s in enumerate((rows, keys, keys)))
    out = torch.zeros(rows, dim).half()
    boxes = Box(q, (128, dim)), Box(k, (64, dim)), Box(v, (64, dim)), Box(out, (128, dim))
    descriptors, scale = [box.descriptor() for box in boxes], dim**-0.5
    code = faults.ATTENTION[fault]
    stats = simulate(
        kernels_blackwell.attn_fwd, (1,), *descriptors, scale * math.log2(math.e), keys, 3, code, options=options
    ).stats
    expected = torch.softmax(q.float() @ k.float().T * scale, -1) @ v.float()
    assert (out.float() - expected).abs().max() < 2e-3
    return stats


def product(options: Options) -> None:
    """One product of kernels_blackwell.py."""
    a, b, out = _random(128, 64, seed=0), _random(64, 64, seed=1), torch.full((128, 64), torch.nan)
    boxes = Box(a, (128, 64)), Box(b, (64, 64))
    simulate(kernels_blackwell.product, (1,), *[box.descriptor() for box in boxes], out, options=options)
    assert (out - a.float() @ b.float()).abs().max() < 1e-3


def pair(options: Options, fault: str = "none") -> Stats:
    """The products of a pair of CTAs of kernels_pairs.py, over three blocks of keys and part of a fourth."""
    q, k, v = (_random(n, 128, seed=n) / 8 for n in (256, 400, 401))
    v, out = v[:400], torch.full((256, 128), torch.nan)
    descriptors = []
    for t, box, halved in ((q, 256, 0), (k, 128, 0), (v, 128, 1)):
        layout = gl.NVMMASharedLayout(128, 16, rank=2, cga_layout=[[1 - halved, halved]])
        descriptors.append(TensorDescriptor.from_tensor(t, [box, 128], layout))
    stats = simulate(
        kernels_pairs.two_products, (1,), *descriptors, out, 4, faults.PAIR[fault], options=options, num_ctas=2
    ).stats
    assert (out - (q.float() @ k.float().T).half().float() @ v.float()).abs().max() < 1e-3
    return stats


def numbered_by_pairs(programs: int) -> torch.Tensor:
    """What both CTAs of each program wrote."""
    dst = torch.full((384,), -1, dtype=torch.int32)
    simulate(kernels_pairs.numbered, (programs,), dst, num_ctas=2, num_warps=4)
    return dst


def maximum_of_a_pair() -> None:
    simulate(kernels_pairs.maximum, (1,), torch.arange(256.0), torch.zeros(256), num_ctas=2, num_warps=4)


def exchange(options: Options, fault: str = "none", by_tma: bool = False, shift: int = 0) -> Stats:
    """The exchange of kernels_exchange.py by two programs; its ring of 2 slots takes 5 tiles. shift: of the output."""
    n = 5
    x, b = _random(256, n * 64, seed=0), _random(256, 128, seed=1)
    st, out = _random(n, 64, seed=2).float(), torch.ones(n * 64 * 128)
    swizzled, plain = (gl.NVMMASharedLayout(width, bits, rank=2) for width, bits in ((128, 16), (0, 32)))
    given = [
        TensorDescriptor.from_tensor(b, [128, 128], swizzled),
        TensorDescriptor.from_tensor(st, [1, 64], plain),
        out[shift:],
        TensorDescriptor.from_tensor(out.view(-1, 128), [64, 64], gl.NVMMASharedLayout(128, 32, rank=2)),
    ]
    code = (faults.EXCHANGE | faults.EXCHANGE_TMA)[fault]
    stats = simulate(kernels_exchange.exchange, (2,), x, *given, n, n, by_tma, code, options=options).stats
    if by_tma:
        got = out.view(n, 64, 128)
    else:  # tile, half, 8 columns, warp, row of 8, pair of columns, upper or lower rows, column
        got = out.view(n, 2, 8, 4, 8, 4, 2, 2).permute(0, 3, 6, 4, 1, 2, 5, 7).reshape(n, 64, 128)
    tiles = (x.float().view(256, n, 64) * st * (torch.arange(64) >= 8)).half().float()
    assert (got - 1 - torch.einsum("ktq,kd->tqd", tiles, b.float())).abs().max() < 1e-3
    return stats


def sum_in_turn(options: Options, fault: str = "none", programs: int = 5, rows: int = 3) -> Stats:
    """The sum of kernels_programs.py; NaN until it is zeroed."""
    sums, out = torch.full((rows, 1024), torch.nan), torch.zeros(rows, 1024)
    ready, done = torch.zeros(2, 1, dtype=torch.int32)
    given = sums, out, ready, done, rows, faults.SUM[fault]
    stats = simulate(kernels_programs.sum_in_turn, (programs,), *given, options=options).stats
    assert (out == sum(torch.arange(1024.0) + p for p in range(2, programs))).all()
    return stats


def hand_on(options: Options, fault: int = 0) -> torch.Tensor:
    """The four programs of kernels_programs.py that have x one after the other."""
    x = torch.zeros(256)
    simulate(kernels_programs.hand_on, (4,), x, torch.zeros(1, dtype=torch.int32), fault, options=options)
    return x


def stage(options: Options, by_tma: bool, fault: int = 0) -> None:
    """The three programs of kernels_programs.py of which one copies asynchronously what the others write."""
    x, out = torch.zeros(1, 128), torch.zeros(1, 128)
    tiles = TensorDescriptor.from_tensor(x, [1, 128], gl.NVMMASharedLayout(0, 32, rank=2))
    flag = torch.zeros(1, dtype=torch.int32)
    simulate(kernels_programs.stage, (3,), x, tiles, out, flag, by_tma, fault, options=options)
    assert (out == 1).all() and (x == 2).all()


def stage_by_tma(options: Options) -> None:
    stage(options, True)


def cancel(options: Options, fault: str = "none") -> Stats:
    """Programs of 12 that cancel others: each is run once, by itself or by who cancelled it."""
    dst = torch.zeros(12, dtype=torch.int32)
    stats = simulate(kernels_blackwell.cancel, (3, 4), dst, faults.CANCEL[fault], options=options).stats
    assert (dst == 1).all() and stats.programs + stats.cancelled == 12
    return stats


def named(options: Options) -> None:
    """named_barrier of kernels_small.py, which is right."""
    simulate(kernels_small.named_barrier, (1,), torch.zeros(128), True, options=options)


def handshake(options: Options) -> None:
    """two_barriers of kernels_small.py, which is right."""
    dst = torch.zeros(4, 128)
    simulate(kernels_small.two_barriers, (1,), dst, options=options)
    assert (dst == torch.arange(1.0, 5)[:, None]).all()


def mutate(call: str, target: str, seeds: Iterable[int], resident: int = 1) -> list[Outcome]:
    """Mutation testing of a call of this file."""
    return run_mutants(globals()[call], Options(target=target, resident=resident), seeds)


def linear_layout(name: str, shape: tuple[int, ...]) -> str:
    """A layout as Triton spells it out in bits."""
    blocked = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    layouts = {
        "wgmma": gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]),
        "mma": gl.NVMMADistributedLayout([2, 0], [2, 2], [16, 8]),
        "blocked": blocked,
        "slice": gl.SliceLayout(1, blocked),
    }
    context = ir.context()
    ir.load_dialects(context)
    make_backend(TARGETS["sm_100"].gpu).load_dialects(context)
    builder = gluon_ir.GluonOpBuilder(context)
    builder.create_module()
    bits = builder.to_linear_layout(layouts[name]._to_ir(builder), list(shape))
    return (
        f"#ttg.linear<{{register = {bits.reg_bases}, lane = {bits.lane_bases}, warp = {bits.warp_bases}, block = []}}>"
    )
