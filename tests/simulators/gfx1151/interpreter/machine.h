/* What a program, a wave and a run are. Mirrored field by field in ../build.py, which checks the sizes. */
#pragma once
#include <stdint.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t i8;
typedef int16_t i16;
typedef int32_t i32;
typedef int64_t i64;
typedef _Float16 f16;

enum { LANES = 32, ALL_LANES = 0xffffffff };

/* Operand codes: 0..127 scalar registers, of which some are special; VGPR n is V0 + n; negative: absent. */
enum { VCC = 106, VCC_HI = 107, NULL_REG = 124, EXEC_LO = 126, EXEC_HI = 127, IMMEDIATE = 128, SCC = 253, V0 = 256 };

/* Modifiers of a source; HALF: a 16-bit operand (v1.l, v1.h), HI: its upper half. */
enum { NEG32 = 1, ABS32 = 2, HI = 4, NEG16 = 8, ABS16 = 16, NEG64 = 32, ABS64 = 64, HALF = 128 };

typedef struct {
  i32 code;
  u32 mods;
  u64 imm;
} Operand;

typedef struct {
  u32 op;
  u32 aux; /* by operation: compare type and truth table, width in bytes, atomic kind, which sources are 64-bit */
  Operand d, d2, a, b, c;
  i32 target, dpp; /* branch target as instruction index; index into the DPP table or -1 */
  u32 omod, dual;  /* omod: 1 *2, 2 *4, 3 /2, bit 7 clamp; dual: first half of a VOPD pair */
  i32 offset;
  u32 opsel, opsel_hi, neg_lo, neg_hi, flags;
} Ins;

/* Data-parallel primitive: the lane that each lane reads (-1 none), lanes enabled, bound_ctrl, fetch-inactive. */
typedef struct {
  i8 source[LANES];
  u32 enable, bound_ctrl, fetch_inactive;
} Dpp;

typedef struct {
  u32 v[256][LANES];
  u32 s[128];
  u32 scc;
  i32 pc, live;
  u8 *scratch;
  u32 scratch_per_lane;
} Wave;

enum { ERR_MEMORY = 1, ERR_LDS, ERR_SCRATCH, ERR_OPERATION, ERR_STEPS, ERR_JUMP };

typedef struct {
  u64 executed, lds_cycles, lds_conflict_free_cycles, cache_lines, memory_bytes, lds_bytes, wmma_mismatches;
  u64 branches_taken;
  u64 err_address;
  i32 err, err_pc, err_lane;
  u32 err_size;
} Stats;

typedef void (*Trace)(u32 wave, u32 index, const u32 *vgprs, const u32 *sgprs);

/* Everything that one run is given; `stats` and `counts` (per instruction) are what it gives back. */
typedef struct {
  const Ins *program;
  const Dpp *dpp;
  u64 *counts;
  Stats *stats;
  const u64 *ranges; /* pairs of first and past-the-last address that may be accessed */
  Trace trace;       /* before each instruction, or null */
  u64 max_steps;
  i32 length, range_count;
  u32 threads, lds_size, scratch_per_lane;
  u32 poison; /* what registers start with; its highest byte fills LDS and scratch */
} Job;

typedef struct {
  const Job *job;
  u8 *lds;
  i32 last_range; /* that was hit: the next access is likely there too */
  u32 wave;
} Context;

/* Instruction n lies at CODE_BASE + 4 * n for s_getpc, s_swappc and s_setpc: no address of anything else. */
#define CODE_BASE (1ull << 52)

/* Memory operations, Ins.flags: the low byte is the bytes per lane. */
enum { F_SIGNED = 1 << 8, F_D16 = 1 << 9, F_D16HI = 1 << 10 };
enum { F_OFFEN = 1 << 15, F_IDXEN = 1 << 16, F_RETURN = 1 << 17 };
enum { GLOBAL, FLAT, BUFFER, SCRATCH };
static inline u32 bytes_of(const Ins *i) { return i->flags & 255; }
static inline u32 space_of(const Ins *i) { return i->flags >> 12 & 7; }
enum {
  AT_ADD, AT_SUB, AT_SMIN, AT_UMIN, AT_SMAX, AT_UMAX, AT_AND, AT_OR, AT_XOR, AT_SWAP, AT_CMPSWAP, AT_FADD, AT_FMIN,
  AT_FMAX
};
