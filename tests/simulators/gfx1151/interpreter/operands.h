/* Reading and writing the operands of an instruction. */
#pragma once
#include "numerics.h"

static const u32 ZEROS[LANES];

static inline u32 modified(u32 x, u32 mods) {
  if (mods & HI) x >>= 16;
  if (mods & ABS32) x &= 0x7fffffff;
  if (mods & NEG32) x ^= 0x80000000;
  if (mods & ABS16) x &= 0xffff7fff;
  if (mods & NEG16) x ^= 0x8000;
  return x;
}

/* ---- scalar */
static inline u32 read_scalar(const Wave *w, const Operand *o) {
  if (o->code < 0 || o->code == NULL_REG) return 0;
  u32 x = o->code < IMMEDIATE    ? w->s[o->code]
          : o->code == IMMEDIATE ? (u32)o->imm
          : o->code == SCC       ? w->scc
                                 : w->v[o->code - V0][0];
  return o->mods ? modified(x, o->mods) : x;
}
static inline u64 read_scalar64(const Wave *w, const Operand *o) {
  if (o->code < 0 || o->code == NULL_REG) return 0;
  if (o->code == IMMEDIATE) return o->imm;
  if (o->code == SCC) return w->scc;
  return w->s[o->code] | (u64)w->s[o->code + 1] << 32;
}
static inline void write_scalar(Wave *w, const Operand *o, u32 x) {
  if (o->code >= 0 && o->code != NULL_REG && o->code < IMMEDIATE) w->s[o->code] = x;
}
static inline void write_scalar64(Wave *w, const Operand *o, u64 x) {
  if (o->code < 0 || o->code == NULL_REG || o->code >= IMMEDIATE) return;
  w->s[o->code] = (u32)x;
  w->s[o->code + 1] = (u32)(x >> 32);
}

/* ---- vector: the 32 lanes of a source, in the register itself where nothing has to be changed, else in `buffer` */
static inline u32 *vgpr(Wave *w, const Operand *o) { return w->v[o->code - V0]; }
static const u32 *fetch(const Wave *w, const Operand *o, u32 *buffer) {
  if (o->code < 0) return ZEROS;
  if (o->code < V0) {
    u32 x = read_scalar(w, o);
    for (int l = 0; l < LANES; l++) buffer[l] = x;
    return buffer;
  }
  const u32 *v = w->v[o->code - V0];
  if (!(o->mods & ~HALF)) return v;
  for (int l = 0; l < LANES; l++) buffer[l] = modified(v[l], o->mods);
  return buffer;
}
static void fetch64(const Wave *w, const Operand *o, u64 *buffer, int wide) {
  u32 m = o->mods;
  if (o->code < 0) {
    memset(buffer, 0, LANES * sizeof *buffer);
    return;
  }
  if (o->code < V0) {
    u64 x = wide ? read_scalar64(w, o) : read_scalar(w, o);
    for (int l = 0; l < LANES; l++) buffer[l] = x;
  } else {
    const u32 *low = w->v[o->code - V0], *high = low + LANES;
    for (int l = 0; l < LANES; l++) {
      buffer[l] = wide ? low[l] | (u64)high[l] << 32 : low[l];
      if (!wide && (m & ABS32)) buffer[l] &= 0x7fffffff;
      if (!wide && (m & NEG32)) buffer[l] ^= 0x80000000;
    }
  }
  for (int l = 0; l < LANES; l++) {
    if (m & ABS64) buffer[l] &= ~(1ull << 63);
    if (m & NEG64) buffer[l] ^= 1ull << 63;
  }
}
/* Lanes permuted; returns the lanes whose result is written. */
static u32 permute(const Wave *w, const Dpp *dpp, const u32 *from, u32 *out) {
  u32 written = dpp->enable;
  for (int l = 0; l < LANES; l++) {
    int s = dpp->source[l];
    int valid = s >= 0 && (dpp->fetch_inactive || (w->s[EXEC_LO] >> s & 1));
    out[l] = valid ? from[s] : 0;
    if (!valid && !dpp->bound_ctrl) written &= ~(1u << l);
  }
  return written;
}
static inline void commit(u32 *v, const u32 *result, u32 mask) {
  if (mask == (u32)ALL_LANES) {
    memcpy(v, result, LANES * sizeof *v);
    return;
  }
  for (int l = 0; l < LANES; l++) v[l] = (mask >> l & 1) ? result[l] : v[l];
}
static inline void commit16(u32 *v, const u32 *result, u32 mask, int high) {
  for (int l = 0; l < LANES; l++)
    if (mask >> l & 1) v[l] = high ? (v[l] & 0xffff) | result[l] << 16 : (v[l] & 0xffff0000) | (result[l] & 0xffff);
}
static void output_modifier(u32 *result, u32 omod) {
  static const float scale[4] = {1, 2, 4, 0.5f};
  for (int l = 0; l < LANES; l++) {
    float f = uf(result[l]);
    if (omod & 3) f *= scale[omod & 3];
    if (omod & 128) f = isnan(f) ? 0.0f : f < 0 ? 0.0f : f > 1 ? 1.0f : f;
    result[l] = fu(f);
  }
}
