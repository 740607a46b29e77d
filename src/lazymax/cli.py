"""The `lazymax` command. Exit codes: 0 all is well, 1 a check failed, 2 the command was used wrongly."""

import argparse
import itertools
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict

from . import arch as arches
from .backends import registry
from .bench import command as bench_command
from .compat import tritons
from .console import (
    Parser,
    UsageError,
    add_rules,
    parse_band,
    parse_device,
    parse_dtypes,
    parse_shape,
    progress,
    say,
    table,
    usage,
)
from .dispatch import KERNEL_DTYPES, plan
from .doctor import diagnose
from .explanation import Explanation
from .problem import Problem
from .verify import SHAPES, run_matrix


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    try:
        given = list(sys.argv[1:] if arguments is None else arguments)
        options = _parser().parse_args(given, argparse.Namespace(arguments=given[1:]))
        return int(options.run(options))
    except UsageError as error:
        print(f"lazymax: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader (head, less) has had enough; Python would complain once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _parser() -> Parser:
    parser = Parser(
        prog="lazymax",
        description="Exact attention for PyTorch, in Triton: look, check, measure.",
        epilog="Exit codes: 0 all is well, 1 a check failed, 2 the command was used wrongly.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="devices, versions, caches, what will run here and why")
    doctor.add_argument("--json", action="store_true")
    doctor.set_defaults(run=_doctor)

    explain = commands.add_parser("explain", help="which kernel a problem takes on a GPU, and why not the others")
    explain.add_argument("--arch", help="such as gfx1151, sm_90, cpu; default: the GPU here")
    explain.add_argument("--shape", required=True, metavar="B,Hq,Hkv,Sq,Sk,D[,Dv]")
    explain.add_argument("--dtype", default="bf16", help="fp16, bf16, fp32, fp64; default: bf16")
    add_rules(explain)
    explain.add_argument("--json", action="store_true")
    explain.set_defaults(run=_explain)

    verify = commands.add_parser("verify", help="check the kernels on your device against a float64 reference")
    verify.add_argument("--device", help="cpu, cuda, cuda:N; default: the GPU, else the CPU")
    verify.add_argument("--dtype", default="fp16,bf16,fp32", help="comma list; default: fp16,bf16,fp32")
    verify.add_argument("--impl", default="auto", help="a backend's name or reference; default: auto")
    verify.add_argument("--json", action="store_true")
    verify.set_defaults(run=_verify)

    bench = commands.add_parser(
        "bench",
        help="time the forward beside other libraries, checked first",
        description="Results are checked first, the order alternates, times are medians over rounds with min..max.",
    )
    bench_command.add_arguments(bench)
    bench.set_defaults(run=bench_command.run)

    compile = commands.add_parser("compile", help="compile every tile row of a GPU, without the GPU")
    compile.add_argument("--arch", required=True, help="such as gfx1151, sm_90, sm_100")
    compile.add_argument("--dtype", help="comma list; default: bf16, fp32, and fp16 where it has rows of its own")
    compile.add_argument("--impl", default="auto", help="a backend or a variant; default: the one that the GPU uses")
    compile.add_argument("--features", action="store_true", help="the builds with masks, mods and the like, bf16 only")
    compile.add_argument("--json", action="store_true")
    compile.set_defaults(run=_compile)
    return parser


def _doctor(options: argparse.Namespace) -> int:
    diagnosis = diagnose()
    print(json.dumps(diagnosis.as_dict(), indent=2) if options.json else diagnosis)
    return 1 if diagnosis.problems else 0


def _explain(options: argparse.Namespace) -> int:
    with usage():
        problem = Problem.from_shape(
            parse_shape(options.shape), options.dtype, causal=options.causal, window=parse_band(options.window)
        )
        arch = arches.by_name(options.arch) if options.arch else arches.of(parse_device(None))
        explanation = Explanation(problem, arch, plan(problem, arch, options.impl))
    print(explanation.to_json() if options.json else explanation)
    return 0


def _verify(options: argparse.Namespace) -> int:
    with usage():
        device, dtypes = parse_device(options.device), parse_dtypes(options.dtype)
        arch = arches.of(device)
        for dtype in dtypes:  # a named impl that cannot run here is a mistake of the caller, found before the matrix
            plan(Problem.from_shape((1, 1, 1, 1, 1, 64), dtype), arch, options.impl)
    total = len(SHAPES) * len(dtypes)
    checks = list(progress(run_matrix(device, dtypes, options.impl), "verify", total))
    failed = [check for check in checks if not check.ok]
    note = ""
    if not any(check.plan.startswith("triton:") for check in checks):
        note = f"no Triton kernel ran: this checked the reference route only, on {arch.id}. " + (
            "Any machine can run the kernel in Triton's interpreter: TRITON_INTERPRET=1 lazymax verify --device cpu"
        )
    if options.json:
        result = dict(device=str(device), arch=arch.id, ok=not failed, note=note, checks=list(map(asdict, checks)))
        print(json.dumps(result, indent=2))
    else:
        rows = [("ok" if check.ok else "FAIL", check.name, check.plan, check.detail) for check in checks]
        print(table(("", "problem", "what ran", "error beside the float64 reference"), rows))
        print(f"{total - len(failed)} of {total} within the error budget on {arch}")
        if note:
            print(f"note: {note}")
    return 1 if failed else 0


def _compile(options: argparse.Namespace) -> int:
    with usage():
        arch = arches.by_name(options.arch)
        arch.target  # noqa: B018  raises for what Triton does not compile for
        asked = parse_dtypes(options.dtype) if options.dtype else ()
        dtypes = tuple(str(dtype).removeprefix("torch.") for dtype in asked)
        served = ["auto", *(name for name, backend in registry().items() if backend.serves(arch))]
        if options.impl not in served:
            raise ValueError(f"--impl: got {options.impl!r}, expected one of {', '.join(served)} for {arch.id}")
        for dtype in dtypes:
            if dtype not in KERNEL_DTYPES:
                raise ValueError(f"--dtype: got {dtype}, but the kernels take {', '.join(KERNEL_DTYPES)}")
    fault = tritons.unsupported_triton(tritons.triton_version())
    if fault:
        raise UsageError(f"compile: {fault}")
    if tritons.interpreting():
        raise UsageError("compile: TRITON_INTERPRET is set, so Triton would not compile; unset it")
    from . import compiling, compiling_backward

    if options.features:
        found = itertools.chain(compiling.compile_features(arch), compiling_backward.compile_features(arch))
    else:
        forward = compiling.compile_arch(arch, dtypes or None, options.impl)
        found = itertools.chain(forward, compiling_backward.compile_arch(arch, dtypes or None, options.impl))
    reports = list(progress(found, f"compile {arch.id}"))
    bad = [report for report in reports if not report.ok]
    if options.json:
        print(json.dumps([report.as_dict() for report in reports], indent=2))
        return 1 if bad else 0
    rows = [
        (
            "ok" if r.ok else "FAIL", f"{r.backend} {r.row}", r.problem, "tuned" if r.tuned else "", str(r.registers),
            str(r.spills), str(r.shared), f"{r.in_loop} of {r.in_all}", f"{r.seconds:.1f}", r.error or "",
        )
        for r in reports
    ]  # fmt: skip
    instruction = reports[0].instruction if reports else "matrix instruction"
    head = ("", "row", "problem", "", "regs", "spills", "shared", f"{instruction} in loop", "seconds", "")
    say(table(head, rows))
    say(
        f"{len(reports) - len(bad)} of {len(reports)} compiled for {arch} by Triton {tritons.triton_version()}, not run"
    )
    return 1 if bad or not reports else 0
