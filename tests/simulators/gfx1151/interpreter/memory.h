/* Global, buffer, scratch and LDS accesses, checked and counted. Functions return 0 after an error. */
#pragma once
#include "operands.h"

static int fail(Context *c, const Wave *w, int code, int lane, u64 address, u32 size) {
  Stats *s = c->job->stats;
  if (!s->err) s->err = code, s->err_pc = w->pc, s->err_lane = lane, s->err_address = address, s->err_size = size;
  return 0;
}
static int accessible(Context *c, const Wave *w, int lane, u64 address, u32 size) {
  const u64 *r = c->job->ranges + 2 * c->last_range;
  if (address >= r[0] && address + size <= r[1]) return 1;
  r = c->job->ranges;
  for (int k = 0; k < c->job->range_count; k++, r += 2)
    if (address >= r[0] && address + size <= r[1]) {
      c->last_range = k;
      return 1;
    }
  return fail(c, w, ERR_MEMORY, lane, address, size);
}

/* ---- addresses of the lanes; returns the lanes inside the bounds of the buffer */
static u32 buffer_addresses(const Wave *w, const Ins *i, u64 *addresses) {
  const u32 *resource = &w->s[i->b.code], *va = i->a.code >= V0 ? w->v[i->a.code - V0] : ZEROS;
  u64 base = resource[0] | (u64)(resource[1] & 0xffff) << 32;
  u32 stride = (resource[1] >> 16) & 0x3fff, records = resource[2], check = (resource[3] >> 28) & 3;
  u32 soffset = read_scalar(w, &i->c), size = bytes_of(i), inside = 0;
  for (int l = 0; l < LANES; l++) {
    u64 offset = (u32)i->offset, index = 0;
    if (i->flags & F_IDXEN) {
      index = va[l];
      if (i->flags & F_OFFEN) offset += va[l + LANES];
    } else if (i->flags & F_OFFEN) {
      offset += va[l];
    }
    int ok = check == 3   ? records >= soffset && offset + size <= (u64)records - soffset
             : check == 2 ? records != 0
             : check == 1 ? index < records
                          : index < records && offset + size <= stride;
    addresses[l] = base + soffset + offset + index * stride;
    inside |= (u32)ok << l;
  }
  return inside;
}
static u32 lane_addresses(Wave *w, const Ins *i, u64 *addresses) {
  u32 space = space_of(i);
  if (space == BUFFER) return buffer_addresses(w, i, addresses);
  for (int l = 0; l < LANES; l++) {
    u64 a = (u64)(i64)i->offset;
    if (space == SCRATCH) {
      if (i->a.code >= V0) a += vgpr(w, &i->a)[l];
      if (i->b.code >= 0) a += read_scalar(w, &i->b);
      a &= 0xffffffffu;
    } else if (i->b.code >= 0) {
      a += read_scalar64(w, &i->b) + vgpr(w, &i->a)[l];
    } else {
      a += vgpr(w, &i->a)[l] | (u64)vgpr(w, &i->a)[l + LANES] << 32;
    }
    addresses[l] = a;
  }
  return ALL_LANES;
}
static void count_lines(Stats *stats, const u64 *addresses, u32 mask, u32 size) { /* of 128 bytes */
  u64 seen[2 * LANES];
  int count = 0;
  for (int l = 0; l < LANES; l++) {
    if (!(mask >> l & 1)) continue;
    stats->memory_bytes += size;
    for (u64 line = addresses[l] >> 7; line <= (addresses[l] + size - 1) >> 7; line++) {
      int j = count;
      while (j > 0 && seen[j - 1] != line) j--;
      if (j == 0 && count < 2 * LANES) seen[count++] = line;
    }
  }
  stats->cache_lines += count;
}
static u8 *pointer(Context *c, Wave *w, const Ins *i, int lane, u64 address, u32 size) {
  if (space_of(i) != SCRATCH) return accessible(c, w, lane, address, size) ? (u8 *)(uintptr_t)address : 0;
  if (address + size <= w->scratch_per_lane) return w->scratch + (u64)lane * w->scratch_per_lane + address;
  fail(c, w, ERR_SCRATCH, lane, address, size);
  return 0;
}

/* ---- one lane: from memory to registers d, d + 1, ... and back */
static inline void load(Wave *w, int d, int lane, const u8 *p, u32 size, u32 flags) {
  if (size >= 4) {
    for (u32 k = 0; k < size / 4; k++) memcpy(&w->v[d + k][lane], p + 4 * k, 4);
    return;
  }
  u32 x = p[0], *v = &w->v[d][lane];
  if (size == 2) x |= (u32)p[1] << 8;
  if (flags & F_SIGNED) x = size == 1 ? (u32)(i32)(i8)x : (u32)SX16(x);
  *v = (flags & F_D16) ? (*v & 0xffff0000) | (x & 0xffff) : (flags & F_D16HI) ? (*v & 0xffff) | x << 16 : x;
}
static inline void store(const Wave *w, int d, int lane, u8 *p, u32 size, u32 flags) {
  if (size >= 4) {
    for (u32 k = 0; k < size / 4; k++) memcpy(p + 4 * k, &w->v[d + k][lane], 4);
    return;
  }
  u32 x = w->v[d][lane];
  if (flags & F_D16HI) x >>= 16;
  p[0] = (u8)x;
  if (size == 2) p[1] = (u8)(x >> 8);
}
static u64 atomic_result(u32 kind, u32 size, u64 old, u64 x, u64 compare) {
  i64 so = size == 4 ? (i32)old : (i64)old, sx = size == 4 ? (i32)x : (i64)x;
  switch (kind) {
  case AT_ADD: return old + x;
  case AT_SUB: return old - x;
  case AT_SMIN: return so < sx ? old : x;
  case AT_SMAX: return so > sx ? old : x;
  case AT_UMIN: return old < x ? old : x;
  case AT_UMAX: return old > x ? old : x;
  case AT_AND: return old & x;
  case AT_OR: return old | x;
  case AT_XOR: return old ^ x;
  case AT_CMPSWAP: return old == compare ? x : old;
  case AT_FADD: return fu(uf((u32)old) + uf((u32)x));
  case AT_FMIN: return fu(fmn(uf((u32)old), uf((u32)x)));
  case AT_FMAX: return fu(fmx(uf((u32)old), uf((u32)x)));
  default: return x; /* AT_SWAP */
  }
}
/* Operand in registers d.., value to compare with in registers `compare`.. */
static void atomic(Wave *w, const Ins *i, int d, int compare, int lane, u8 *p) {
  u32 size = bytes_of(i);
  u64 old = 0, x = 0, y = 0;
  memcpy(&old, p, size);
  for (u32 k = 0; k < size / 4; k++) {
    x |= (u64)w->v[d + k][lane] << 32 * k;
    if (compare >= 0) y |= (u64)w->v[compare + k][lane] << 32 * k;
  }
  u64 r = atomic_result(i->aux, size, old, x, y);
  memcpy(p, &r, size);
  if (i->flags & F_RETURN)
    for (u32 k = 0; k < size / 4; k++) vgpr(w, &i->d2)[k * LANES + lane] = (u32)(old >> 32 * k);
}

/* ---- instructions */
static int load_scalar(Context *c, Wave *w, const Ins *i) {
  u64 a = (w->s[i->a.code] | (u64)w->s[i->a.code + 1] << 32) + (i64)i->offset;
  if (i->b.code >= 0) a += read_scalar(w, &i->b);
  a &= ~3ull;
  if (!accessible(c, w, -1, a, i->aux)) return 0;
  memcpy(&w->s[i->d.code], (void *)(uintptr_t)a, i->aux);
  return 1;
}
static void out_of_bounds(Wave *w, const Ins *i, int lane) { /* of a buffer: reads 0, writes nothing */
  static const u8 zeros[16];
  u32 size = bytes_of(i);
  if (i->op == OP_mem_load) load(w, i->d.code - V0, lane, zeros, size, i->flags);
  if (i->op == OP_mem_atomic && (i->flags & F_RETURN))
    for (u32 k = 0; k < size / 4; k++) vgpr(w, &i->d2)[k * LANES + lane] = 0;
}
static int access_memory(Context *c, Wave *w, const Ins *i) {
  u64 addresses[LANES];
  u32 size = bytes_of(i), exec = w->s[EXEC_LO], inside = lane_addresses(w, i, addresses);
  int d = i->d.code - V0, compare = i->aux == AT_CMPSWAP ? d + (int)size / 4 : -1;
  if (space_of(i) != SCRATCH) count_lines(c->job->stats, addresses, exec & inside, size);
  for (int l = 0; l < LANES; l++) {
    if (!(exec >> l & 1)) continue;
    if (!(inside >> l & 1)) {
      out_of_bounds(w, i, l);
      continue;
    }
    u8 *p = pointer(c, w, i, l, addresses[l], size);
    if (!p) return 0;
    if (i->op == OP_mem_load) load(w, d, l, p, size, i->flags);
    else if (i->op == OP_mem_store) store(w, d, l, p, size, i->flags);
    else atomic(w, i, d, compare, l, p);
  }
  return 1;
}
/* Model: 32 banks of 4 bytes; a pass takes 32 lanes of up to 4 bytes each, 16 of 8, 8 of 16 bytes, and as many cycles
 * as the most distinct dwords in one bank. */
static void count_lds(Stats *stats, const u32 *addresses, u32 mask, u32 size) {
  int lanes = size <= 4 ? 32 : size <= 8 ? 16 : 8;
  stats->lds_bytes += (u64)size * (u32)__builtin_popcount(mask);
  for (int first = 0; first < LANES; first += lanes) {
    u32 seen[32][LANES];
    u8 count[32] = {0}, most = 0;
    for (int l = first; l < first + lanes; l++) {
      if (!(mask >> l & 1)) continue;
      for (u32 dword = addresses[l] >> 2; dword <= (addresses[l] + size - 1) >> 2; dword++) {
        int bank = dword & 31, j = count[bank];
        while (j > 0 && seen[bank][j - 1] != dword) j--;
        if (j == 0 && count[bank] < LANES) seen[bank][count[bank]++] = dword;
        if (count[bank] > most) most = count[bank];
      }
    }
    stats->lds_cycles += most;
    stats->lds_conflict_free_cycles += most > 0;
  }
}
static int access_lds(Context *c, Wave *w, const Ins *i) {
  u32 size = bytes_of(i), exec = w->s[EXEC_LO], two = i->op == OP_ds_load2 || i->op == OP_ds_store2;
  u32 base[LANES], addresses[LANES];
  memcpy(base, vgpr(w, &i->a), sizeof base); /* the first half of a load may overwrite it */
  int compare = i->b.code >= V0 ? i->b.code - V0 : -1;
  for (u32 half = 0; half <= two; half++) {
    int d = i->d.code - V0;
    if (half) d = i->op == OP_ds_load2 ? d + (int)size / 4 : compare;
    for (int l = 0; l < LANES; l++) addresses[l] = base[l] + (half ? i->aux : (u32)i->offset);
    count_lds(c->job->stats, addresses, exec, size);
    for (int l = 0; l < LANES; l++) {
      if (!(exec >> l & 1)) continue;
      if ((u64)addresses[l] + size > c->job->lds_size) return fail(c, w, ERR_LDS, l, addresses[l], size);
      u8 *p = c->lds + addresses[l];
      if (i->op == OP_ds_load || i->op == OP_ds_load2) load(w, d, l, p, size, i->flags);
      else if (i->op == OP_ds_store || i->op == OP_ds_store2) store(w, d, l, p, size, i->flags);
      else atomic(w, i, d, compare, l, p);
    }
  }
  return 1;
}
/* Exchanges of lanes that go through the LDS hardware without touching its memory. */
static void exchange_lanes(Wave *w, const Ins *i) {
  u32 exec = w->s[EXEC_LO], result[LANES] = {0}, swizzle = (u32)i->offset;
  const u32 *a = vgpr(w, &i->a), *from = i->op == OP_ds_swizzle_b32 ? a : vgpr(w, &i->b);
  for (int l = 0; l < LANES; l++) {
    int s = ((a[l] + i->offset) >> 2) & 31;
    if (i->op == OP_ds_permute_b32) {
      if (exec >> l & 1) result[s] = from[l];
      continue;
    }
    if (i->op == OP_ds_swizzle_b32)
      s = (swizzle & 0x8000) ? (l & ~3) | (int)(swizzle >> (2 * (l & 3)) & 3)
                             : (((l & (swizzle & 31)) | (swizzle >> 5 & 31)) ^ (swizzle >> 10 & 31)) & 31;
    result[l] = (exec >> s & 1) ? from[s] : 0;
  }
  commit(vgpr(w, &i->d), result, exec);
}
