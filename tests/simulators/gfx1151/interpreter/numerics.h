/* Bit casts, number formats and the arithmetic of single lanes. IEEE round-to-nearest-even, f32 and f16 denormals
 * kept (Triton's float mode); transcendental results are rounded correctly (the hardware's are within 1 ulp). */
#pragma once
#include "machine.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- formats: u bits, f f32, d f64, h f16, b bf16 */
static inline float uf(u32 x) { float f; memcpy(&f, &x, 4); return f; }
static inline u32 fu(float f) { u32 x; memcpy(&x, &f, 4); return x; }
static inline double ud(u64 x) { double f; memcpy(&f, &x, 8); return f; }
static inline u64 du(double f) { u64 x; memcpy(&x, &f, 8); return x; }
static inline float hf(u32 x) { u16 h = (u16)x; f16 f; memcpy(&f, &h, 2); return (float)f; }
static inline u32 fh(float f) { f16 h = (f16)f; u16 x; memcpy(&x, &h, 2); return x; }
static inline u32 dh(double f) { f16 h = (f16)f; u16 x; memcpy(&x, &h, 2); return x; }
static inline float bf(u32 x) { return uf((x & 0xffff) << 16); }
static inline u32 fb(float f) {
  u32 x = fu(f);
  if ((x & 0x7fffffff) > 0x7f800000) return (x >> 16) | 0x40;
  return (x + 0x7fff + ((x >> 16) & 1)) >> 16;
}
static u32 f2h_rtz(float f) {
  u32 h = fh(f);
  float g = hf(h);
  if (isnan(f) || isinf(f)) return h;
  if (isinf(g)) return (h & 0x8000) | 0x7bff;
  return fabsf(g) > fabsf(f) ? h - 1 : h;
}
static inline float flush(float x) { u32 b = fu(x); return (b & 0x7f800000) ? x : uf(b & 0x80000000); }
#define SX16(x) ((i32)(i16)(x))

/* ---- conversions that saturate; NaN becomes 0 */
static i32 f2i(float f) {
  return isnan(f) ? 0 : f >= 2147483648.0f ? 0x7fffffff : f <= -2147483648.0f ? (i32)0x80000000 : (i32)f;
}
static u32 f2u(float f) { return isnan(f) || f <= 0 ? 0 : f >= 4294967296.0f ? 0xffffffffu : (u32)f; }
static i32 d2i(double f) {
  return isnan(f) ? 0 : f >= 2147483647.0 ? 0x7fffffff : f <= -2147483648.0 ? (i32)0x80000000 : (i32)f;
}
static u32 d2u(double f) { return isnan(f) || f <= 0 ? 0 : f >= 4294967295.0 ? 0xffffffffu : (u32)f; }
static i32 f2i16(float f) { return isnan(f) ? 0 : f >= 32767.0f ? 32767 : f <= -32768.0f ? -32768 : (i32)f; }
static u32 f2u16(float f) { return isnan(f) || f <= 0 ? 0 : f >= 65535.0f ? 65535u : (u32)f; }
static inline i32 clampi(i64 x, i64 lo, i64 hi) { return (i32)(x < lo ? lo : x > hi ? hi : x); }

/* ---- minimum and maximum: a NaN loses, -0 < +0 */
static inline float fmx(float a, float b) {
  return isnan(a) ? b : isnan(b) ? a : a == b ? (signbit(a) ? b : a) : a > b ? a : b;
}
static inline float fmn(float a, float b) {
  return isnan(a) ? b : isnan(b) ? a : a == b ? (signbit(a) ? a : b) : a < b ? a : b;
}
static inline double dmx(double a, double b) {
  return isnan(a) ? b : isnan(b) ? a : a == b ? (signbit(a) ? b : a) : a > b ? a : b;
}
static inline double dmn(double a, double b) {
  return isnan(a) ? b : isnan(b) ? a : a == b ? (signbit(a) ? a : b) : a < b ? a : b;
}
static float med3(float a, float b, float c) {
  return isnan(a) || isnan(b) || isnan(c) ? fmn(fmn(a, b), c) : fmx(fmn(a, b), fmn(fmx(a, b), c));
}
static inline i32 min_i(i32 a, i32 b) { return a < b ? a : b; }
static inline i32 max_i(i32 a, i32 b) { return a > b ? a : b; }
static inline u32 min_u(u32 a, u32 b) { return a < b ? a : b; }
static inline u32 max_u(u32 a, u32 b) { return a > b ? a : b; }

/* ---- bits */
static inline u32 ctz32(u32 x) { return x ? (u32)__builtin_ctz(x) : 0xffffffffu; }
static inline u32 clz32(u32 x) { return x ? (u32)__builtin_clz(x) : 0xffffffffu; }
static inline u32 cls32(u32 x) { return clz32((i32)x < 0 ? ~x : x); }
static inline u32 brev32(u32 x) {
  u32 r = 0;
  for (int i = 0; i < 32; i++) r |= ((x >> i) & 1) << (31 - i);
  return r;
}
static inline u64 field_u64(u64 x, u32 offset, u32 width, u32 bits) { /* width >= bits: all that is left of x */
  x >>= offset;
  return width < bits ? x & ((1ull << width) - 1) : x;
}
static inline u64 field_i64(u64 x, u32 offset, u32 width, u32 bits) {
  x = (u64)((i64)x >> offset);
  if (width >= bits || !width) return width ? x : 0;
  u64 sign = 1ull << (width - 1);
  return ((x & ((1ull << width) - 1)) ^ sign) - sign;
}
static inline u32 bfe_u(u32 a, u32 offset, u32 width) { return (u32)field_u64(a, offset & 31, width & 31, 32); }
static inline u32 bfe_i(u32 a, u32 offset, u32 width) {
  return (u32)field_i64((u64)(i64)(i32)a, offset & 31, width & 31, 32);
}
static inline u32 pack16(i32 low, i32 high) { return ((u32)low & 0xffff) | (u32)high << 16; }
static inline u32 insert_byte(u32 into, u32 at, u32 byte) { return (into & ~(255u << 8 * at)) | byte << 8 * at; }
static inline u32 sad_u8(u32 a, u32 b, u32 sum) {
  for (int q = 0; q < 32; q += 8) sum += (u32)abs((int)((a >> q) & 255) - (int)((b >> q) & 255));
  return sum;
}
/* 0..7: a byte, 8..11: the sign of byte 1, 3, 5 or 7, 12: zero, else 0xff. */
static inline u32 perm_byte(u64 data, u32 select) {
  select &= 255;
  if (select >= 12) return select == 12 ? 0 : 0xff;
  if (select >= 8) return (data >> (8 * (2 * (select - 8) + 1) + 7)) & 1 ? 0xff : 0;
  return (data >> (8 * select)) & 0xff;
}
static inline u32 perm(u32 a, u32 b, u32 select) {
  u64 d = ((u64)a << 32) | b;
  return perm_byte(d, select) | perm_byte(d, select >> 8) << 8 | perm_byte(d, select >> 16) << 16 |
         perm_byte(d, select >> 24) << 24;
}

/* ---- floating point functions */
static inline int exponent(float x) { return (int)((fu(x) >> 23) & 255); }
static inline int is_denormal(float x) { return (fu(x) & 0x7f800000) == 0 && (fu(x) & 0x7fffff); }
static inline float frexp_mantissa(float x) {
  int e;
  return isnan(x) || isinf(x) || x == 0 ? x : frexpf(x, &e);
}
static inline i32 frexp_exponent(float x) {
  int e;
  if (isnan(x) || isinf(x) || x == 0) return 0;
  frexpf(x, &e);
  return e;
}
static inline float fract(float x) {
  float r = x - floorf(x);
  return r >= 1.0f ? 0x1.fffffep-1f : r;
}
static inline float exp2_flushed(float x) { return flush((float)exp2((double)flush(x))); } /* no denormals in or out */
static inline float log2_flushed(float x) {
  x = flush(x);
  return x == 0 ? -INFINITY : (float)log2((double)x);
}
static inline float sin_turns(float x) {
  return isinf(x) || isnan(x) ? NAN : (float)sin(6.283185307179586 * (double)x);
}
static inline float cos_turns(float x) {
  return isinf(x) || isnan(x) ? NAN : (float)cos(6.283185307179586 * (double)x);
}
static int quotient_is_tiny(float n, float d) {
  double q = fabs((double)n / (double)d);
  return q < 0x1p-126 && q > 0;
}
static u32 div_scale(u32 value, u32 denominator, u32 numerator, u32 *vcc) {
  float x = uf(value), d = uf(denominator), n = uf(numerator);
  int inverse_denormal = is_denormal((float)(1.0 / (double)d)), tiny = quotient_is_tiny(n, d);
  *vcc = 0;
  if (n == 0 || d == 0) return 0x7fc00000;
  if (exponent(n) - exponent(d) >= 96) {
    *vcc = 1;
    return value == denominator ? fu(ldexpf(x, 64)) : value;
  }
  if (is_denormal(d)) return fu(ldexpf(x, 64));
  if (inverse_denormal && tiny) {
    *vcc = 1;
    return value == denominator ? fu(ldexpf(x, 64)) : value;
  }
  if (inverse_denormal) return fu(ldexpf(x, -64));
  if (tiny) {
    *vcc = 1;
    return value == numerator ? fu(ldexpf(x, 64)) : value;
  }
  return exponent(n) <= 23 ? fu(ldexpf(x, 64)) : value;
}
static u32 div_fixup(u32 quotient, u32 denominator, u32 numerator) {
  float d = uf(denominator), n = uf(numerator);
  u32 sign = (denominator ^ numerator) & 0x80000000;
  if (isnan(n)) return numerator | 0x400000;
  if (isnan(d)) return denominator | 0x400000;
  if ((d == 0 && n == 0) || (isinf(d) && isinf(n))) return 0xffc00000;
  if (d == 0 || isinf(n)) return sign | 0x7f800000;
  if (isinf(d) || n == 0) return sign;
  if (exponent(n) - exponent(d) < -150) return sign;
  if (isnan(uf(quotient))) return sign | 0x7f800000;
  return sign | (quotient & 0x7fffffff);
}
static u32 float_class(float x) { /* the bit of v_cmp_class */
  u32 bits = fu(x), negative = bits >> 31;
  if (isnan(x)) return (bits & 0x400000) ? 2 : 1;
  if (isinf(x)) return negative ? 4 : 512;
  if (x == 0) return negative ? 32 : 64;
  if (is_denormal(x)) return negative ? 16 : 128;
  return negative ? 8 : 256;
}
