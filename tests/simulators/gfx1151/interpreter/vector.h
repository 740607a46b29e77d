/* Vector instructions. */
#pragma once
#include "operands.h"

#define EACH_LANE for (int l = 0; l < LANES; l++)
#define UNUSED(x) (void)(x)

/* ---- operations that compute every lane alike: the result goes to `t`, the lanes to write come back in `mask` */
static void lane_operation(Wave *w, const Job *job, const Ins *i, u32 *t, u32 *mask) {
  u32 buffers[5][LANES];
  const u32 *a = fetch(w, &i->a, buffers[0]), *b = fetch(w, &i->b, buffers[1]), *c = fetch(w, &i->c, buffers[2]);
  const u32 *d = i->d.code >= V0 ? vgpr(w, &i->d) : ZEROS;
  if (i->dpp >= 0) {
    *mask &= permute(w, job->dpp + i->dpp, a, buffers[3]);
    a = buffers[3];
  }
  if (i->op > END_lane && i->op < END_lane16 && (i->d.mods & HI)) {
    EACH_LANE buffers[4][l] = d[l] >> 16;
    d = buffers[4];
  }
  switch (i->op) {
#define LANE_CASE(name, expression) \
  case OP_##name: \
    EACH_LANE { \
      u32 A = a[l], B = b[l], C = c[l], D = d[l]; \
      UNUSED(A), UNUSED(B), UNUSED(C), UNUSED(D); \
      t[l] = (u32)(expression); \
    } \
    break;
    LANE_OPS(LANE_CASE)
    LANE16_OPS(LANE_CASE)
  default: { /* v_cndmask */
    u32 chosen = read_scalar(w, &i->c);
    EACH_LANE t[l] = (chosen >> l & 1) ? b[l] : a[l];
  }
  }
  if (i->omod) output_modifier(t, i->omod);
}
static void commit_lanes(Wave *w, const Ins *i, const u32 *t, u32 mask) {
  int half = (i->op > END_lane && i->op < END_lane16) || (i->d.mods & HALF) || i->op == OP_v_cndmask_b16;
  if (half) commit16(vgpr(w, &i->d), t, mask, (i->d.mods & HI) != 0);
  else commit(vgpr(w, &i->d), t, mask);
}
/* One operation, or both of a VOPD pair, which read before either writes; returns the instructions passed. */
static int lane_instruction(Wave *w, const Job *job, const Ins *i) {
  u32 t[LANES], t2[LANES], mask = w->s[EXEC_LO], mask2 = mask;
  lane_operation(w, job, i, t, &mask);
  if (!i->dual) {
    commit_lanes(w, i, t, mask);
    return 1;
  }
  lane_operation(w, job, i + 1, t2, &mask2);
  job->counts[w->pc + 1]++;
  commit(vgpr(w, &i->d), t, mask);
  commit(vgpr(w, &i[1].d), t2, mask2);
  return 2;
}

static void packed_instruction(Wave *w, const Ins *i) {
  u32 buffers[3][LANES], t[LANES];
  const u32 *a = fetch(w, &i->a, buffers[0]), *b = fetch(w, &i->b, buffers[1]), *c = fetch(w, &i->c, buffers[2]);
  const u32 *d = vgpr(w, &i->d);
  EACH_LANE {
    u32 r[2] = {0, 0};
    for (int h = 0; h < 2; h++) {
      u32 select = h ? i->opsel_hi : i->opsel, negate = h ? i->neg_hi : i->neg_lo;
      u32 P = (a[l] >> (16 * (select & 1)) & 0xffff) ^ (negate & 1) << 15;
      u32 Q = (b[l] >> (16 * (select >> 1 & 1)) & 0xffff) ^ (negate >> 1 & 1) << 15;
      u32 R = (c[l] >> (16 * (select >> 2 & 1)) & 0xffff) ^ (negate >> 2 & 1) << 15;
      u32 S = d[l] >> (16 * h) & 0xffff;
      UNUSED(R), UNUSED(S);
      switch (i->op) {
#define PACKED_CASE(name, expression) \
  case OP_##name: r[h] = (expression) & 0xffff; break;
        PK_OPS(PACKED_CASE)
      }
    }
    t[l] = r[0] | r[1] << 16;
  }
  commit(vgpr(w, &i->d), t, w->s[EXEC_LO]);
}
static void wide_instruction(Wave *w, const Ins *i) { /* aux: which sources are 64-bit */
  u64 a[LANES], b[LANES], c[LANES];
  u32 low[LANES], high[LANES], exec = w->s[EXEC_LO];
  fetch64(w, &i->a, a, i->aux & 1);
  fetch64(w, &i->b, b, i->aux & 2);
  fetch64(w, &i->c, c, i->aux & 4);
  EACH_LANE {
    u64 A = a[l], B = b[l], C = c[l], r = 0;
    switch (i->op) {
#define WIDE_CASE(name, expression) \
  case OP_##name: r = (expression); break;
      LANE64_OPS(WIDE_CASE)
    }
    low[l] = (u32)r;
    high[l] = (u32)(r >> 32);
  }
  commit(vgpr(w, &i->d), low, exec);
  commit(vgpr(w, &i->d) + LANES, high, exec);
}
static void narrow_instruction(Wave *w, const Ins *i) {
  u64 a[LANES];
  u32 t[LANES];
  fetch64(w, &i->a, a, 1);
  EACH_LANE {
    u64 A = a[l];
    switch (i->op) {
#define NARROW_CASE(name, expression) \
  case OP_##name: t[l] = (expression); break;
      LANE32_FROM64_OPS(NARROW_CASE)
    }
  }
  commit(vgpr(w, &i->d), t, w->s[EXEC_LO]);
}
static void mixed_instruction(Wave *w, const Ins *i) { /* sources of f32 or f16 each */
  u32 buffers[3][LANES], t[LANES], exec = w->s[EXEC_LO];
  const u32 *s[3] = {fetch(w, &i->a, buffers[0]), fetch(w, &i->b, buffers[1]), fetch(w, &i->c, buffers[2])};
  EACH_LANE {
    float f[3];
    for (int k = 0; k < 3; k++) {
      u32 x = s[k][l];
      f[k] = (i->opsel_hi >> k & 1) ? hf(x >> (16 * (i->opsel >> k & 1))) : uf(x);
      if (i->neg_hi >> k & 1) f[k] = fabsf(f[k]);
      if (i->neg_lo >> k & 1) f[k] = -f[k];
    }
    t[l] = i->op == OP_v_fma_mix_f32 ? fu(fmaf(f[0], f[1], f[2])) : dh((double)f[0] * f[1] + f[2]);
  }
  if (i->op != OP_v_fma_mix_f32) {
    commit16(vgpr(w, &i->d), t, exec, i->op == OP_v_fma_mixhi_f16);
    return;
  }
  if (i->omod) output_modifier(t, i->omod);
  commit(vgpr(w, &i->d), t, exec);
}
static void dot_instruction(Wave *w, const Ins *i) { /* of bytes or nibbles */
  u32 buffers[3][LANES], t[LANES];
  const u32 *a = fetch(w, &i->a, buffers[0]), *b = fetch(w, &i->b, buffers[1]), *c = fetch(w, &i->c, buffers[2]);
  u32 bits = i->op == OP_v_dot8_i32_iu4 ? 4 : 8, is_signed = i->op == OP_v_dot4_u32_u8 ? 0 : i->neg_lo;
  EACH_LANE {
    i64 sum = (i32)c[l];
    for (u32 k = 0; k < 32; k += bits) {
      i64 x = (is_signed & 1) ? (i32)bfe_i(a[l], k, bits) : (i64)bfe_u(a[l], k, bits);
      i64 y = (is_signed & 2) ? (i32)bfe_i(b[l], k, bits) : (i64)bfe_u(b[l], k, bits);
      sum += x * y;
    }
    t[l] = (u32)sum;
  }
  commit(vgpr(w, &i->d), t, w->s[EXEC_LO]);
}
static void carry_instruction(Wave *w, const Ins *i) {
  u32 buffers[2][LANES], t[LANES], exec = w->s[EXEC_LO], carry_out = 0;
  const u32 *a = fetch(w, &i->a, buffers[0]), *b = fetch(w, &i->b, buffers[1]);
  u32 carry_in = i->op >= OP_v_add_co_ci_u32 ? read_scalar(w, &i->c) : 0;
  int add = i->op == OP_v_add_co_u32 || i->op == OP_v_add_co_ci_u32;
  int reverse = i->op == OP_v_subrev_co_u32 || i->op == OP_v_subrev_co_ci_u32;
  EACH_LANE {
    u64 x = reverse ? b[l] : a[l], y = (u64)(reverse ? a[l] : b[l]) + (carry_in >> l & 1);
    u64 r = add ? x + y : x - y;
    carry_out |= (u32)(add ? r >> 32 & 1 : y > x) << l;
    t[l] = (u32)r;
  }
  commit(vgpr(w, &i->d), t, exec);
  write_scalar(w, &i->d2, carry_out & exec);
}

/* ---- compares: a bit per lane. less 1, equal 2, greater 4, unordered 8; aux has the bits that mean true. */
#define ORDER(x, y) ((x) < (y) ? 1 : (x) == (y) ? 2 : (x) > (y) ? 4 : 8)
enum { T_F32, T_F16, T_F64, T_I32, T_U32, T_I16, T_U16, T_I64, T_U64 };
static int order(u32 type, u32 x, u32 y) {
  switch (type) {
  case T_F32: return ORDER(uf(x), uf(y));
  case T_F16: return ORDER(hf(x), hf(y));
  case T_I32: return ORDER((i32)x, (i32)y);
  case T_U32: return ORDER(x, y);
  case T_I16: return ORDER(SX16(x), SX16(y));
  default: return ORDER(x & 0xffff, y & 0xffff);
  }
}
static int order64(u32 type, u64 x, u64 y) {
  return type == T_F64 ? ORDER(ud(x), ud(y)) : type == T_I64 ? ORDER((i64)x, (i64)y) : ORDER(x, y);
}
static void compare_instruction(Wave *w, const Job *job, const Ins *i) {
  u32 r = 0, type = i->aux >> 4, truth = i->aux & 15, buffers[3][LANES];
  if (i->op == OP_v_cmp && (type == T_F64 || type >= T_I64)) {
    u64 a[LANES], b[LANES];
    fetch64(w, &i->a, a, 1);
    fetch64(w, &i->b, b, 1);
    EACH_LANE r |= (u32)((truth & order64(type, a[l], b[l])) != 0) << l;
  } else {
    const u32 *a = fetch(w, &i->a, buffers[0]), *b = fetch(w, &i->b, buffers[1]);
    if (i->dpp >= 0) {
      permute(w, job->dpp + i->dpp, a, buffers[2]);
      a = buffers[2];
    }
    if (i->op == OP_v_cmp_class_f32) EACH_LANE r |= (u32)((float_class(uf(a[l])) & b[l]) != 0) << l;
    else EACH_LANE r |= (u32)((truth & order(type, a[l], b[l])) != 0) << l;
  }
  r &= w->s[EXEC_LO];
  if (i->flags & 1) w->s[EXEC_LO] = r; /* v_cmpx */
  else write_scalar(w, &i->d, r);
}

/* ---- operations that look across lanes, or at VCC */
static void permlane(Wave *w, const Ins *i) {
  u64 select = read_scalar(w, &i->b) | (u64)read_scalar(w, &i->c) << 32;
  u32 t[LANES], exec = w->s[EXEC_LO], mask = exec;
  int other = i->op == OP_v_permlanex16_b32 ? 16 : 0, fetch_inactive = i->opsel & 1, bound_ctrl = i->opsel >> 1 & 1;
  EACH_LANE {
    int s = (int)(select >> (4 * (l & 15)) & 15) | ((l & 16) ^ other), valid = fetch_inactive || (exec >> s & 1);
    t[l] = valid ? vgpr(w, &i->a)[s] : 0;
    if (!valid && !bound_ctrl) mask &= ~(1u << l);
  }
  commit(vgpr(w, &i->d), t, mask);
}
static void division_instruction(Wave *w, const Ins *i) {
  u32 buffers[3][LANES], t[LANES], exec = w->s[EXEC_LO], vcc = w->s[VCC], scaled = 0;
  const u32 *a = fetch(w, &i->a, buffers[0]), *b = fetch(w, &i->b, buffers[1]), *c = fetch(w, &i->c, buffers[2]);
  EACH_LANE {
    u32 flag = 0;
    if (i->op == OP_v_div_scale_f32) {
      t[l] = div_scale(a[l], b[l], c[l], &flag);
    } else { /* v_div_fmas */
      float f = fmaf(uf(a[l]), uf(b[l]), uf(c[l]));
      t[l] = fu((vcc >> l & 1) ? ldexpf(f, exponent(uf(c[l])) > 127 ? 64 : -64) : f);
    }
    scaled |= flag << l;
  }
  commit(vgpr(w, &i->d), t, exec);
  if (i->op == OP_v_div_scale_f32) write_scalar(w, &i->d2, scaled & exec);
}
static void swap(Wave *w, const Ins *i) {
  u32 *x = vgpr(w, &i->d), *y = vgpr(w, &i->a), exec = w->s[EXEC_LO], kept[LANES];
  memcpy(kept, x, sizeof kept);
  commit(x, y, exec);
  commit(y, kept, exec);
}
static void special_instruction(Wave *w, const Ins *i) {
  u32 buffers[2][LANES], t[LANES], exec = w->s[EXEC_LO];
  switch (i->op) {
  case OP_v_div_scale_f32:
  case OP_v_div_fmas_f32: division_instruction(w, i); break;
  case OP_v_permlane16_b32:
  case OP_v_permlanex16_b32: permlane(w, i); break;
  case OP_v_permlane64_b32: break; /* nothing to do in a wave of 32 */
  case OP_v_swap_b32: swap(w, i); break;
  case OP_v_readlane_b32: write_scalar(w, &i->d, vgpr(w, &i->a)[read_scalar(w, &i->b) & 31]); break;
  case OP_v_readfirstlane_b32:
    write_scalar(w, &i->d, i->a.code >= V0 ? vgpr(w, &i->a)[exec ? __builtin_ctz(exec) : 0] : read_scalar(w, &i->a));
    break;
  case OP_v_writelane_b32: vgpr(w, &i->d)[read_scalar(w, &i->b) & 31] = read_scalar(w, &i->a); break;
  case OP_v_mbcnt_lo_u32_b32: {
    const u32 *a = fetch(w, &i->a, buffers[0]), *b = fetch(w, &i->b, buffers[1]);
    EACH_LANE t[l] = (u32)__builtin_popcount(a[l] & ((1u << l) - 1)) + b[l];
    commit(vgpr(w, &i->d), t, exec);
    break;
  }
  case OP_v_mbcnt_hi_u32_b32: commit(vgpr(w, &i->d), fetch(w, &i->b, buffers[1]), exec); break;
  }
}
