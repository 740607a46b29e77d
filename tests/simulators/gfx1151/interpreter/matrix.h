/* v_wmma: D = A B + C of 16x16 tiles. Row m of A lies in lane m and column n of B in lane n, both repeated in lanes
 * 16 to 31; register r of lane l holds row 2 r + l / 16, column l % 16 of C and D. Sums are accumulated in double and
 * rounded once: the order of the hardware's additions is not documented. */
#pragma once
#include "operands.h"

enum { TILE = 16 };
typedef const u32 (*Registers)[LANES];

static Registers registers(const Wave *w, const Operand *o) { return (Registers)&w->v[o->code - V0]; }

static void count_mismatch(Stats *stats, Registers a, Registers b, int count) { /* lanes 16.. that repeat nothing */
  for (int r = 0; r < count; r++)
    for (int l = 0; l < TILE; l++)
      if (a[r][l] != a[r][l + TILE] || b[r][l] != b[r][l + TILE]) {
        stats->wmma_mismatches++;
        return;
      }
}
static void unpack_floats(Registers v, int bf16, float out[TILE][TILE]) { /* [lane][k] */
  for (int l = 0; l < TILE; l++)
    for (int k = 0; k < TILE; k++) {
      u32 x = v[k >> 1][l] >> (16 * (k & 1));
      out[l][k] = bf16 ? bf(x) : hf(x);
    }
}
static void multiply_floats(Registers va, Registers vb, int bf16, double sum[TILE][TILE]) {
  float a[TILE][TILE], b[TILE][TILE];
  double transposed[TILE][TILE]; /* [k][n] */
  unpack_floats(va, bf16, a);
  unpack_floats(vb, bf16, b);
  for (int k = 0; k < TILE; k++)
    for (int n = 0; n < TILE; n++) transposed[k][n] = b[n][k];
  for (int m = 0; m < TILE; m++) {
    double row[TILE] = {0};
    for (int k = 0; k < TILE; k++) {
      double x = a[m][k];
#pragma GCC ivdep
      for (int n = 0; n < TILE; n++) row[n] += x * transposed[k][n];
    }
    memcpy(sum[m], row, sizeof row);
  }
}
static i64 multiply_integers(Registers va, Registers vb, int bits, u32 is_signed, int m, int n) {
  i64 sum = 0;
  int per = 32 / bits;
  for (int k = 0; k < TILE; k++) {
    u32 x = va[k / per][m], y = vb[k / per][n], at = (u32)(bits * (k % per));
    i64 a = (is_signed & 1) ? (i32)bfe_i(x, at, bits) : (i64)bfe_u(x, at, bits);
    i64 b = (is_signed & 2) ? (i32)bfe_i(y, at, bits) : (i64)bfe_u(y, at, bits);
    sum += a * b;
  }
  return sum;
}
static u32 add_single(const Ins *i, double sum, u32 c) {
  u32 bits = (i->neg_hi & 4) ? c & 0x7fffffff : c;
  return fu((float)(sum + uf(bits ^ (i->neg_lo & 4) << 29)));
}
static u32 add_half(const Ins *i, double sum, u32 c, u32 old) { /* op_sel: which half of C and D */
  int high = (i->opsel >> 2) & 1, bf16 = i->op == OP_v_wmma_bf16_bf16;
  u32 half = high ? c >> 16 : c & 0xffff;
  double v = sum + (bf16 ? bf(half) : hf(half));
  u32 out = bf16 ? fb((float)v) : dh(v);
  return high ? (old & 0xffff) | out << 16 : (old & 0xffff0000) | out;
}
static u32 add_integer(const Ins *i, i64 sum, u32 c) {
  sum += (i32)c;
  return (i->omod & 128) ? (u32)clampi(sum, INT32_MIN, INT32_MAX) : (u32)sum;
}
static void wmma(Context *c, Wave *w, const Ins *i) {
  Registers a = registers(w, &i->a), b = registers(w, &i->b), old = registers(w, &i->d);
  int bits = i->op == OP_v_wmma_i32_iu8 ? 8 : i->op == OP_v_wmma_i32_iu4 ? 4 : 16;
  int bf16 = i->op == OP_v_wmma_f32_bf16 || i->op == OP_v_wmma_bf16_bf16;
  int single = i->op == OP_v_wmma_f32_f16 || i->op == OP_v_wmma_f32_bf16;
  u32 out[8][LANES], constant[LANES];
  double sum[TILE][TILE];
  count_mismatch(c->job->stats, a, b, bits / 2);
  if (bits == 16) multiply_floats(a, b, bf16, sum);
  for (int r = 0; r < 8; r++) {
    const Operand row = {i->c.code >= V0 ? i->c.code + r : i->c.code, 0, i->c.imm};
    const u32 *add = fetch(w, &row, constant);
    for (int l = 0; l < LANES; l++) {
      int m = 2 * r + (l >> 4), n = l & 15;
      out[r][l] = single       ? add_single(i, sum[m][n], add[l])
                  : bits == 16 ? add_half(i, sum[m][n], add[l], old[r][l])
                               : add_integer(i, multiply_integers(a, b, bits, i->neg_lo, m, n), add[l]);
    }
  }
  memcpy(w->v[i->d.code - V0], out, sizeof out);
}
