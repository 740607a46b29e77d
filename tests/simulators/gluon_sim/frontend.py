"""Lower a `@gluon.jit` kernel with Triton's own front end, without a GPU, and read the result.

The IR that is simulated is the TTGIR that the real compiler would go on to lower: constexpr evaluation,
aggregates, `static_range`, inlining, layout inference and every front-end or verifier error come from Triton.
Of a `@triton.jit` kernel it is what all of Triton's passes make, barriers and partitions of warps included.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import triton
from triton._C.libtriton import ir, nvidia, passes
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

from .errors import SimError, Unsupported
from .mlir import Module
from .reader import parse_module

PAIRS = hasattr(nvidia.passes.ttgpuir, "add_membar")  # of CTAs: from Triton 3.9 on
PTX_VERSION = 88  # the allocation pass wants one; nothing that is simulated depends on it


@dataclass(frozen=True)
class Target:
    """What a GPU is to the simulator."""

    capability: int
    shared_bytes: int  # that one program may use

    @property
    def gpu(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


TARGETS = {
    "sm_80": Target(80, 163 << 10),
    "sm_90": Target(90, 227 << 10),
    "sm_100": Target(100, 227 << 10),
    "sm_103": Target(103, 227 << 10),
    "sm_120": Target(120, 99 << 10),
}


@dataclass
class Program:
    """A lowered kernel."""

    name: str
    module: Module
    ttgir: str  # pretty form, for people
    num_warps: int
    shared_bytes: int | None  # scratch included; known if the compiler's own allocation is used
    tmem_columns: int | None
    executable: Any = field(default=None, repr=False, compare=False)


@dataclass
class Bound:
    """One call: the lowered kernel plus the arguments it takes at run time."""

    program: Program
    runtime_args: list[tuple[str, Any, Any]]  # name, value, type as Triton specialised it
    bound_args: dict[str, Any]


_cache: dict[Any, Program] = {}


def lower_call(
    fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], target: str, *, physical_alloc: bool, insert_fences: bool
) -> Bound:
    """Specialise `fn` on `args` exactly as Triton's launcher would, and lower it (cached)."""
    if not isinstance(fn, JITFunction):
        raise TypeError(
            f"kernel: expected a @gluon.jit or @triton.jit function, got {type(fn).__name__}; where TRITON_INTERPRET "
            "is set, Triton makes none: use a fresh process (simulators.gluon_sim.Worker)"
        )
    written = isinstance(fn, GluonJITFunction)
    if not written:
        kwargs = kwargs | {"debug": False}  # what would run
    backend = make_backend(TARGETS[target].gpu)
    binder = create_function_from_signature(fn.signature, fn.params, backend)
    bound, spec, _ = binder(*args, **kwargs)
    options, signature, constexprs, attrs = fn._pack_args(backend, kwargs, bound, spec, None)
    pair = options.num_ctas == 2 and physical_alloc and TARGETS[target].capability // 10 == 10 and PAIRS
    if options.num_ctas != 1 and not pair:
        raise Unsupported(f"clusters: {fn.__name__} is launched with num_ctas={options.num_ctas} for {target}")
    key = (fn, target, repr(spec), repr(constexprs), repr(options), physical_alloc, insert_fences)
    if key not in _cache:
        source = (GluonASTSource if written else ASTSource)(fn, signature, constexprs, attrs)
        _cache[key] = _lower(fn.__name__, source, options, backend, target, physical_alloc, insert_fences)
    runtime = [(n, v, s[0]) for (n, v), s in zip(bound.items(), spec, strict=True)]
    return Bound(_cache[key], runtime, dict(bound))


def _lower(
    name: str, source: Any, options: Any, backend: Any, target: str, physical_alloc: bool, insert_fences: bool
) -> Program:
    gpu = TARGETS[target].gpu
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    codegen = backend.get_codegen_implementation(options)
    mod = source.make_ir(gpu, options, codegen, backend.get_module_map(), context)
    if not mod.verify():
        raise SimError(f"{name}: Triton's verifier rejected the kernel (its message is on stderr)")
    compiled = not isinstance(source, GluonASTSource)
    if compiled:
        metadata: dict[str, Any] = {}
        mod = backend.make_ttgir(backend.make_ttir(mod, metadata, options, gpu.arch), metadata, options, gpu.arch)
    else:
        mod = backend.gluon_to_ttgir(mod, {}, options, gpu.arch)
    _late_passes(mod, gpu.arch, physical_alloc, insert_fences, options.num_ctas)
    pretty = str(mod.str_nodebug())
    shared = mod.get_int_attr("ttg.shared") if physical_alloc else None
    tmem = mod.get_int_attr("ttg.tensor_memory_size") if physical_alloc else None
    module = parse_module(_generic_text(mod, context), options.num_ctas)
    module.compiled = compiled
    return Program(name, module, pretty, options.num_warps, shared, tmem)


def _late_passes(mod: Any, capability: int, physical_alloc: bool, insert_fences: bool, ctas: int) -> None:
    """The allocation and proxy-fence passes that the real pipeline runs before LLVM; for pairs of CTAs also the one
    that puts barriers between them after their mbarriers are made and before they end."""
    pm = ir.pass_manager(mod.context)
    if physical_alloc:
        passes.ttgpuir.add_allocate_warp_groups(pm)
        nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(pm, capability, PTX_VERSION)
        nvidia.passes.ttnvgpuir.add_allocate_tensor_memory(pm)
    if insert_fences and physical_alloc:  # from Triton 3.9 on the pass needs the addresses
        nvidia.passes.ttnvgpuir.add_proxy_fence_insertion(pm, capability)
    if ctas == 2:
        nvidia.passes.ttgpuir.add_membar(pm, capability, PTX_VERSION)
    pm.run(mod, "gluon_sim")


def _generic_text(mod: Any, context: Any) -> str:
    """Print in generic form.

    Triton's bindings have no flag for it, but MLIR prints a module that does not verify in generic form, so one
    constant is put after a `tt.return` (the reader stops at terminators). The module is not used afterwards.
    """
    ends: list[Any] = []
    mod.walk(lambda op: ends.append(op.get_block()) if op.get_name() == "tt.return" else None)
    builder = ir.builder(context)
    builder.set_insertion_point_to_end(ends[0])
    builder.get_int32(0)
    text = str(mod)
    if '"builtin.module"' not in text:
        raise Unsupported(f"Triton {triton.__version__}: could not obtain generic MLIR text")
    return text
