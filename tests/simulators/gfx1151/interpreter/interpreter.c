/* Interpreter of the part of the RDNA3.5 (gfx11, gfx1151) instruction set, in wave32, that LLVM emits for Triton
 * kernels. Semantics follow the public "RDNA3.5 Instruction Set Architecture" of AMD. Driven by ../emulator.py, which
 * hands over the program encoded by ../encoding.py. All of it is one translation unit, for speed. */
#include "opcodes.h"

#include "memory.h"
#include "matrix.h"
#include "vector.h"

const char *operation_name(int i) { return i < 0 || i >= OP_COUNT ? 0 : NAMES[i]; }
int size_of(int what) {
  static const int sizes[] = {sizeof(Ins), sizeof(Dpp), sizeof(Stats), sizeof(Job)};
  return sizes[what];
}

/* ---- scalar instructions */
static void scalar_instruction(Wave *w, const Ins *i) {
  u32 A = read_scalar(w, &i->a), B = read_scalar(w, &i->b), C = read_scalar(w, &i->c), R = 0, K = w->scc;
  u32 D = i->d.code >= 0 && i->d.code < IMMEDIATE ? w->s[i->d.code] : 0;
#define EXEC w->s[EXEC_LO]
  switch (i->op) {
#define SCALAR_CASE(name, ...) \
  case OP_##name: { __VA_ARGS__; break; }
    SOP_OPS(SCALAR_CASE)
  }
#undef EXEC
  write_scalar(w, &i->d, R);
  w->scc = K & 1;
}
static void scalar64_instruction(Wave *w, const Ins *i) { /* aux: which sources are 64-bit */
  u64 A = i->aux & 1 ? read_scalar64(w, &i->a) : read_scalar(w, &i->a);
  u64 B = i->aux & 2 ? read_scalar64(w, &i->b) : read_scalar(w, &i->b), R = 0;
  u32 K = w->scc;
  switch (i->op) { SOP64_OPS(SCALAR_CASE) }
  write_scalar64(w, &i->d, R);
  w->scc = K & 1;
}
static void scalar_compare(Wave *w, const Ins *i) {
  u32 A = read_scalar(w, &i->a), B = read_scalar(w, &i->b);
  switch (i->op) {
#define COMPARE_CASE(name, condition) \
  case OP_##name: w->scc = (condition) ? 1 : 0; break;
    SCMP_OPS(COMPARE_CASE)
  }
}
static int branch_taken(const Wave *w, const Ins *i) {
  switch (i->aux) {
  case 0: return !w->scc;
  case 1: return w->scc != 0;
  case 2: return w->s[VCC] == 0;
  case 3: return w->s[VCC] != 0;
  case 4: return w->s[EXEC_LO] == 0;
  default: return w->s[EXEC_LO] != 0;
  }
}
/* Next instruction, or negative after an error. */
static int flow_instruction(Context *c, Wave *w, const Ins *i) {
  int next = w->pc + 1;
  switch (i->op) {
  case OP_s_branch: return i->target;
  case OP_s_cbranch:
    if (!branch_taken(w, i)) return next;
    c->job->stats->branches_taken++;
    return i->target;
  case OP_s_getpc_b64: write_scalar64(w, &i->d, CODE_BASE + 4 * (u64)next); return next;
  case OP_s_setpc_b64:
  case OP_s_swappc_b64: {
    u64 to = read_scalar64(w, &i->a) - CODE_BASE;
    if (to & 3 || to / 4 >= (u64)c->job->length) return fail(c, w, ERR_JUMP, -1, to + CODE_BASE, 0) - 1;
    if (i->op == OP_s_swappc_b64) write_scalar64(w, &i->d, CODE_BASE + 4 * (u64)next);
    return (int)(to / 4);
  }
  case OP_s_cmp_eq_u64: w->scc = read_scalar64(w, &i->a) == read_scalar64(w, &i->b); return next;
  case OP_s_cmp_lg_u64: w->scc = read_scalar64(w, &i->a) != read_scalar64(w, &i->b); return next;
  case OP_s_getreg: write_scalar(w, &i->d, 0); return next;
  case OP_s_load: return load_scalar(c, w, i) ? next : -1;
  default: return next; /* nop, s_barrier, s_endpgm */
  }
}

/* ---- waves */
static int execute(Context *c, Wave *w, const Ins *i) { /* returns the next instruction, or negative after an error */
  u32 op = i->op;
  int next = w->pc + 1;
  if (op < END_select) return w->pc + lane_instruction(w, c->job, i);
  if (op < END_pk) packed_instruction(w, i);
  else if (op < END_lane64) wide_instruction(w, i);
  else if (op < END_lane32from64) narrow_instruction(w, i);
  else if (op < END_sop) scalar_instruction(w, i);
  else if (op < END_sop64) scalar64_instruction(w, i);
  else if (op < END_scmp) scalar_compare(w, i);
  else if (op < END_flow) return flow_instruction(c, w, i);
  else if (op < END_mixed) mixed_instruction(w, i);
  else if (op < END_dot) dot_instruction(w, i);
  else if (op < END_wmma) wmma(c, w, i);
  else if (op < END_carry) carry_instruction(w, i);
  else if (op < END_compare) compare_instruction(w, c->job, i);
  else if (op < END_memory) return access_memory(c, w, i) ? next : -1;
  else if (op < END_lds) return access_lds(c, w, i) ? next : -1;
  else if (op < END_exchange) exchange_lanes(w, i);
  else if (op < END_special) special_instruction(w, i);
  else return fail(c, w, ERR_OPERATION, -1, op, 0) - 1;
  return next;
}
enum { ENDED, AT_BARRIER, FAILED = -1 };
static int run_wave(Context *c, Wave *w) { /* until a barrier or the end */
  const Job *job = c->job;
  for (;;) {
    if (w->pc < 0 || w->pc >= job->length) return fail(c, w, ERR_JUMP, -1, 0, 0) - 1;
    if (job->stats->executed >= job->max_steps) return fail(c, w, ERR_STEPS, -1, 0, 0) - 1;
    const Ins *i = job->program + w->pc;
    job->counts[w->pc]++;
    if (job->trace) job->trace(c->wave, (u32)w->pc, &w->v[0][0], w->s);
    int next = execute(c, w, i);
    if (next < 0) return FAILED;
    w->pc = next;
    job->stats->executed++;
    if (i->op == OP_s_endpgm) return ENDED;
    if (i->op == OP_s_barrier) return AT_BARRIER;
  }
}
static int wave_count(const Job *job) { return (int)((job->threads + LANES - 1) / LANES); }
static int run_workgroup(Context *c, Wave *waves) {
  int count = wave_count(c->job), live = count;
  while (live)
    for (int k = 0; k < count; k++) {
      if (!waves[k].live) continue;
      c->wave = (u32)k;
      int state = run_wave(c, &waves[k]);
      if (state == FAILED) return FAILED;
      if (state == ENDED) waves[k].live = 0, live--;
    }
  return 0;
}

/* ---- runs */
static void poison_memory(const Job *job, u8 *lds, u8 *scratch) {
  memset(lds, (int)(job->poison >> 24), job->lds_size);
  memset(scratch, (int)(job->poison >> 24), (u64)job->scratch_per_lane * LANES * wave_count(job));
}
static void start_wave(const Job *job, Wave *w, int index, u8 *scratch) {
  u32 lanes = job->threads - LANES * index;
  for (int r = 0; r < 256; r++) EACH_LANE w->v[r][l] = job->poison;
  for (int r = 0; r < 128; r++) w->s[r] = job->poison;
  w->s[VCC] = w->s[VCC_HI] = w->s[NULL_REG] = w->s[EXEC_HI] = 0;
  w->s[EXEC_LO] = lanes >= LANES ? (u32)ALL_LANES : (1u << lanes) - 1;
  EACH_LANE w->v[0][l] = (u32)(LANES * index + l);
  w->scc = 0;
  w->pc = 0;
  w->live = 1;
  w->scratch_per_lane = job->scratch_per_lane;
  w->scratch = scratch + (u64)index * LANES * job->scratch_per_lane;
}
typedef struct {
  Wave *waves;
  u8 *lds, *scratch;
} Room;
static Room allocate(const Job *job) {
  u64 scratch = (u64)job->scratch_per_lane * LANES * wave_count(job);
  return (Room){malloc(sizeof(Wave) * wave_count(job)), malloc(job->lds_size + 1), malloc(scratch + 1)};
}
static void release(Room room) {
  free(room.waves);
  free(room.lds);
  free(room.scratch);
}
/* A grid of workgroups from `first` up to before `last`, from instruction `entry` on. flags: bit k, pass the
 * workgroup's index k in an SGPR after the user ones. Returns 0, or -1 with stats->err set. */
int run_grid(const Job *job, i32 entry, const u32 *first, const u32 *last, const u32 *user, u32 users, u32 flags) {
  Room room = allocate(job);
  Context c = {job, room.lds, 0, 0};
  int state = 0;
  for (u32 z = first[2]; z < last[2] && !state; z++)
    for (u32 y = first[1]; y < last[1] && !state; y++)
      for (u32 x = first[0]; x < last[0] && !state; x++) {
        const u32 index[3] = {x, y, z};
        poison_memory(job, room.lds, room.scratch);
        for (int k = 0; k < wave_count(job); k++) {
          Wave *w = &room.waves[k];
          start_wave(job, w, k, room.scratch);
          w->pc = entry;
          u32 s = 0;
          for (; s < users; s++) w->s[s] = user[s];
          for (u32 axis = 0; axis < 3; axis++)
            if (flags >> axis & 1) w->s[s++] = index[axis];
        }
        state = run_workgroup(&c, room.waves);
      }
  release(room);
  return state;
}
/* One workgroup whose registers come from and go to vgprs[wave][256][32] and sgprs[wave][128]. */
int run_registers(const Job *job, u32 *vgprs, u32 *sgprs) {
  Room room = allocate(job);
  Context c = {job, room.lds, 0, 0};
  poison_memory(job, room.lds, room.scratch);
  for (int k = 0; k < wave_count(job); k++) {
    Wave *w = &room.waves[k];
    start_wave(job, w, k, room.scratch);
    memcpy(w->v, vgprs + (u64)k * 256 * LANES, sizeof w->v);
    memcpy(w->s, sgprs + (u64)k * 128, sizeof w->s);
  }
  int state = run_workgroup(&c, room.waves);
  for (int k = 0; k < wave_count(job); k++) {
    memcpy(vgprs + (u64)k * 256 * LANES, room.waves[k].v, sizeof room.waves[k].v);
    memcpy(sgprs + (u64)k * 128, room.waves[k].s, sizeof room.waves[k].s);
  }
  release(room);
  return state;
}
