"""What Gluon has no word for, as PTX: arithmetic on pairs, maxima of three, exp2 on the FMA pipe, an order."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# 2^f for f in [0, 1) with 1 at 0, highest power first: minimax fits made for this file, largest relative errors 2.1e-3,
# 8.6e-5 and 1.4e-7 (the MUFU's is 2.4e-7).
_POLYNOMIALS = {
    2: ("0x3EA8ED46", "0x3F2A7C50", "0x3F800000"),
    3: ("0x3D9DD591", "0x3E691BA3", "0x3F31F32E", "0x3F800000"),
    5: ("0x3AF4BA8B", "0x3C13BC27", "0x3D648E74", "0x3E75EDAB", "0x3F31725D", "0x3F800000"),
}


@gluon.jit
def fma2(a, b, c):
    """a * b + c, two columns an instruction."""
    return gl.inline_asm_elementwise(
        """{ .reg .b64 x, y, z;
        mov.b64 x, {$2, $3}; mov.b64 y, {$4, $5}; mov.b64 z, {$6, $7};
        fma.rn.ftz.f32x2 x, x, y, z; mov.b64 {$0, $1}, x; }""", "=r,=r,r,r,r,r,r,r", [a, b, c], dtype=gl.float32,
        is_pure=True, pack=2)


@gluon.constexpr_function
def _pair_text(operation):
    return ("{ .reg .b64 x, y; mov.b64 x, {$2, $3}; mov.b64 y, {$4, $5}; " + operation
            + ".rn.ftz.f32x2 x, x, y; mov.b64 {$0, $1}, x; }")


@gluon.jit
def _pairs(a, b, OPERATION: gl.constexpr):
    TEXT: gl.constexpr = _pair_text(OPERATION)
    return gl.inline_asm_elementwise(TEXT, "=r,=r,r,r,r,r", [a, b], dtype=gl.float32, is_pure=True, pack=2)


@gluon.jit
def mul2(a, b):
    return _pairs(a, b, "mul")


@gluon.jit
def add2(a, b):
    return _pairs(a, b, "add")


@gluon.jit
def max3(a, b, c):
    """Triton 3.6 makes one chain of 127 maxima of two."""
    return gl.inline_asm_elementwise("max.f32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=gl.float32, is_pure=True,
                                     pack=1)


@gluon.jit
def exp2(x):
    """On the MUFU."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


def _software_pair(out, x, degree):
    """2^x of two columns. x = n + f: adding 1.5 * 2**23 (0x4B400000), rounded down, leaves n in the low bits, which go
    to the exponent of the polynomial. Below -127 it is 0; NaN stays NaN or becomes a number that overflows P."""
    first, *others = _POLYNOMIALS[degree]
    steps = "".join(f"mov.b32 a, {c}; mov.b64 c, {{a, a}}; fma.rn.ftz.f32x2 p, p, f, c;\n" for c in others)
    return f"""max.ftz.NaN.f32 a, {x[0]}, 0fC2FE0000; max.ftz.NaN.f32 b, {x[1]}, 0fC2FE0000; mov.b64 x, {{a, b}};
        mov.b32 a, 0x4B400000; mov.b64 m, {{a, a}};
        add.rm.ftz.f32x2 r, x, m; sub.rn.ftz.f32x2 f, r, m; sub.rn.ftz.f32x2 f, x, f;
        mov.b32 a, {first}; mov.b64 p, {{a, a}};
        {steps}mov.b64 {{u, v}}, p; mov.b64 {{i, j}}, r; shl.b32 i, i, 23; shl.b32 j, j, 23;
        add.s32 {out[0]}, i, u; add.s32 {out[1]}, j, v;
        """


def _shared_text(software, degree):
    """exp2 of 16 columns in one block, which ptxas interleaves: `software` of them, in pairs spread evenly, on the FMA
    pipe, the others on the MUFU."""
    count = software // 2
    chosen = {(i + 1) * 8 // count - 1 for i in range(count)}
    text = "{ .reg .b64 x, m, r, f, p, c; .reg .b32 a, b, u, v, i, j;\n"
    for pair in range(8):
        out, x = ((f"${n + 2 * pair}", f"${n + 2 * pair + 1}") for n in (0, 16))
        if pair in chosen:
            text += _software_pair(out, x, degree)
        else:
            text += f"ex2.approx.ftz.f32 {out[0]}, {x[0]}; ex2.approx.ftz.f32 {out[1]}, {x[1]};\n"
    return text + "}"


_TEXTS = {(columns, degree): _shared_text(columns, degree) for columns in range(2, 17, 2) for degree in _POLYNOMIALS}
# An output may be written before later inputs are read.
_CONSTRAINTS = gl.constexpr(",".join(["=&r"] * 16 + ["r"] * 16))


@gluon.constexpr_function
def _text(software, degree):
    return _TEXTS[(software, degree)]


@gluon.jit
def exp2_shared(x, config):
    """exp2, of SOFTWARE columns of every 16 on the FMA pipe."""
    if config.SOFTWARE == 0:
        return exp2(x)
    else:
        TEXT: gl.constexpr = _text(config.SOFTWARE, config.DEGREE)
        return gl.inline_asm_elementwise(TEXT, _CONSTRAINTS, [x], dtype=gl.float32, is_pure=True, pack=16)


@gluon.jit
def after(a, b):
    """a, not before b (finite) is known: a + 0 * b, which ptxas cannot remove."""
    return gl.inline_asm_elementwise("fma.rn.ftz.f32 $0, $2, 0f00000000, $1;", "=r,r,r", [a, b], dtype=gl.float32,
                                     is_pure=True, pack=1)


@gluon.jit
def seldom():
    """True, always. LLVM holds that NaN is seldom met, so it thinks a block under this runs hardly ever and prepares
    nothing for it outside: what roles have in common (numbers made of the thread's, the CTA's) it computed before they
    part, where ptxas of Triton 3.9 spilled it: 36 to 108 bytes. ptxas knows the NaN, so no instruction is left."""
    x = gl.inline_asm_elementwise("mov.b32 $0, 0x7FC00000;", "=r,r", [gl.to_tensor(0)], dtype=gl.float32, is_pure=False,
                                  pack=1)
    return x != x
