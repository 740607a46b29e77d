/* Numbers and names of the operations, in groups by what executes them. */
#pragma once
#include "scalar_operations.h"

#define SELECT_OPS(X) X(v_cndmask_b32) X(v_cndmask_b16)
#define MIXED_OPS(X) X(v_fma_mix_f32) X(v_fma_mixlo_f16) X(v_fma_mixhi_f16)
#define DOT_OPS(X) X(v_dot4_i32_iu8) X(v_dot4_u32_u8) X(v_dot8_i32_iu4)
#define WMMA_OPS(X) \
  X(v_wmma_f32_f16) X(v_wmma_f32_bf16) X(v_wmma_f16_f16) X(v_wmma_bf16_bf16) X(v_wmma_i32_iu8) X(v_wmma_i32_iu4)
#define CARRY_OPS(X) \
  X(v_add_co_u32) X(v_sub_co_u32) X(v_subrev_co_u32) X(v_add_co_ci_u32) X(v_sub_co_ci_u32) X(v_subrev_co_ci_u32)
#define COMPARE_OPS(X) X(v_cmp) X(v_cmp_class_f32)
#define MEMORY_OPS(X) X(mem_load) X(mem_store) X(mem_atomic)
#define LDS_OPS(X) X(ds_load) X(ds_store) X(ds_load2) X(ds_store2) X(ds_atomic)
#define EXCHANGE_OPS(X) X(ds_bpermute_b32) X(ds_permute_b32) X(ds_swizzle_b32)
#define SPECIAL_OPS(X) \
  X(v_div_scale_f32) X(v_div_fmas_f32) X(v_readlane_b32) X(v_readfirstlane_b32) X(v_writelane_b32) \
  X(v_permlane16_b32) X(v_permlanex16_b32) X(v_permlane64_b32) X(v_mbcnt_lo_u32_b32) X(v_mbcnt_hi_u32_b32) \
  X(v_swap_b32)
#define FLOW_OPS(X) \
  X(nop) X(s_endpgm) X(s_barrier) X(s_branch) X(s_cbranch) X(s_getpc_b64) X(s_setpc_b64) X(s_swappc_b64) \
  X(s_cmp_eq_u64) X(s_cmp_lg_u64) X(s_load) X(s_getreg)

/* GROUP(name of the group, list) */
#define GROUPS(GROUP) \
  GROUP(lane, LANE_OPS) GROUP(lane16, LANE16_OPS) GROUP(select, SELECT_OPS) GROUP(pk, PK_OPS) \
  GROUP(lane64, LANE64_OPS) \
  GROUP(lane32from64, LANE32_FROM64_OPS) GROUP(sop, SOP_OPS) GROUP(sop64, SOP64_OPS) GROUP(scmp, SCMP_OPS) \
  GROUP(flow, FLOW_OPS) GROUP(mixed, MIXED_OPS) GROUP(dot, DOT_OPS) GROUP(wmma, WMMA_OPS) GROUP(carry, CARRY_OPS) \
  GROUP(compare, COMPARE_OPS) GROUP(memory, MEMORY_OPS) GROUP(lds, LDS_OPS) GROUP(exchange, EXCHANGE_OPS) \
  GROUP(special, SPECIAL_OPS)

enum {
#define NUMBER(name, ...) OP_##name,
#define GROUP(name, list) list(NUMBER) END_##name,
  GROUPS(GROUP)
#undef GROUP
#undef NUMBER
  OP_COUNT
};

/* Indexed by number; the number that ends a group names the group: "|lane". */
static const char *const NAMES[] = {
#define NAME(name, ...) #name,
#define GROUP(name, list) list(NAME) "|" #name,
  GROUPS(GROUP)
#undef GROUP
#undef NAME
};
