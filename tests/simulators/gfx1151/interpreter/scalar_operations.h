/* Scalar operations. Each line is X(mnemonic, statements): A, B, C are the sources, D the old destination, R the
 * result, K the condition code (SCC), EXEC the lane mask. AF.. and AH.. as in vector_operations.h. */
#pragma once
#include "vector_operations.h"

#define SOP_OPS(X) \
  X(s_mov_b32, R = A) \
  X(s_cmov_b32, if (!K) R = D; else R = A) \
  X(s_not_b32, R = ~A; K = R != 0) \
  X(s_brev_b32, R = brev32(A)) \
  X(s_bcnt1_i32_b32, R = (u32)__builtin_popcount(A); K = R != 0) \
  X(s_ctz_i32_b32, R = ctz32(A)) \
  X(s_clz_i32_u32, R = clz32(A)) \
  X(s_cls_i32, R = cls32(A)) \
  X(s_sext_i32_i8, R = (u32)(i32)(i8)A) \
  X(s_sext_i32_i16, R = (u32)SX16(A)) \
  X(s_abs_i32, R = (i32)A < 0 ? 0 - A : A; K = R != 0) \
  X(s_bitset0_b32, R = D & ~(1u << (A & 31))) \
  X(s_bitset1_b32, R = D | (1u << (A & 31))) \
  X(s_and_saveexec_b32, R = EXEC; EXEC = A & R; K = EXEC != 0) \
  X(s_or_saveexec_b32, R = EXEC; EXEC = A | R; K = EXEC != 0) \
  X(s_xor_saveexec_b32, R = EXEC; EXEC = A ^ R; K = EXEC != 0) \
  X(s_and_not1_saveexec_b32, R = EXEC; EXEC = A & ~R; K = EXEC != 0) \
  X(s_and_not0_saveexec_b32, R = EXEC; EXEC = ~A & R; K = EXEC != 0) \
  X(s_add_u32, R = A + B; K = R < A) \
  X(s_sub_u32, R = A - B; K = B > A) \
  X(s_add_i32, R = A + B; K = ((~(A ^ B) & (A ^ R)) >> 31)) \
  X(s_sub_i32, R = A - B; K = (((A ^ B) & (A ^ R)) >> 31)) \
  X(s_addc_u32, u64 sum = (u64)A + B + K; R = (u32)sum; K = sum >> 32) \
  X(s_subb_u32, u64 sum = (u64)B + K; R = A - B - K; K = sum > A) \
  X(s_mul_i32, R = A * B) \
  X(s_mul_hi_u32, R = (u32)(((u64)A * B) >> 32)) \
  X(s_mul_hi_i32, R = (u32)(((i64)(i32)A * (i32)B) >> 32)) \
  X(s_min_i32, K = (i32)A < (i32)B; R = K ? A : B) \
  X(s_max_i32, K = (i32)A >= (i32)B; R = K ? A : B) \
  X(s_min_u32, K = A < B; R = K ? A : B) \
  X(s_max_u32, K = A >= B; R = K ? A : B) \
  X(s_and_b32, R = A & B; K = R != 0) \
  X(s_or_b32, R = A | B; K = R != 0) \
  X(s_xor_b32, R = A ^ B; K = R != 0) \
  X(s_nand_b32, R = ~(A & B); K = R != 0) \
  X(s_nor_b32, R = ~(A | B); K = R != 0) \
  X(s_xnor_b32, R = ~(A ^ B); K = R != 0) \
  X(s_and_not1_b32, R = A & ~B; K = R != 0) \
  X(s_or_not1_b32, R = A | ~B; K = R != 0) \
  X(s_lshl_b32, R = A << (B & 31); K = R != 0) \
  X(s_lshr_b32, R = A >> (B & 31); K = R != 0) \
  X(s_ashr_i32, R = (u32)((i32)A >> (B & 31)); K = R != 0) \
  X(s_bfe_u32, R = (u32)field_u64(A, B & 31, (B >> 16) & 127, 32); K = R != 0) \
  X(s_bfe_i32, R = (u32)field_i64((u64)(i64)(i32)A, B & 31, (B >> 16) & 127, 32); K = R != 0) \
  X(s_bfm_b32, R = ((1u << (A & 31)) - 1) << (B & 31)) \
  X(s_absdiff_i32, R = A - B; if ((i32)R < 0) R = 0 - R; K = R != 0) \
  X(s_lshl1_add_u32, u64 sum = ((u64)A << 1) + B; R = (u32)sum; K = sum > 0xffffffffull) \
  X(s_lshl2_add_u32, u64 sum = ((u64)A << 2) + B; R = (u32)sum; K = sum > 0xffffffffull) \
  X(s_lshl3_add_u32, u64 sum = ((u64)A << 3) + B; R = (u32)sum; K = sum > 0xffffffffull) \
  X(s_lshl4_add_u32, u64 sum = ((u64)A << 4) + B; R = (u32)sum; K = sum > 0xffffffffull) \
  X(s_cselect_b32, R = K ? A : B) \
  X(s_pack_ll_b32_b16, R = (A & 0xffff) | (B << 16)) \
  X(s_pack_lh_b32_b16, R = (A & 0xffff) | (B & 0xffff0000)) \
  X(s_pack_hh_b32_b16, R = (A >> 16) | (B & 0xffff0000)) \
  X(s_pack_hl_b32_b16, R = (A >> 16) | (B << 16)) \
  X(s_movk_i32, R = A) \
  X(s_cmovk_i32, R = K ? A : D) \
  X(s_addk_i32, R = D + A; K = ((~(D ^ A) & (D ^ R)) >> 31)) \
  X(s_mulk_i32, R = D * A) \
  X(s_add_f32, R = fu(AF + BF)) \
  X(s_sub_f32, R = fu(AF - BF)) \
  X(s_mul_f32, R = fu(AF * BF)) \
  X(s_min_f32, R = fu(fmn(AF, BF))) \
  X(s_max_f32, R = fu(fmx(AF, BF))) \
  X(s_fmac_f32, R = fu(fmaf(AF, BF, DF))) \
  X(s_fmaak_f32, R = fu(fmaf(AF, BF, CF))) \
  X(s_fmamk_f32, R = fu(fmaf(AF, BF, CF))) \
  X(s_ceil_f32, R = fu(ceilf(AF))) \
  X(s_floor_f32, R = fu(floorf(AF))) \
  X(s_trunc_f32, R = fu(truncf(AF))) \
  X(s_rndne_f32, R = fu(rintf(AF))) \
  X(s_cvt_f32_i32, R = fu((float)(i32)A)) \
  X(s_cvt_f32_u32, R = fu((float)A)) \
  X(s_cvt_i32_f32, R = (u32)f2i(AF)) \
  X(s_cvt_u32_f32, R = f2u(AF)) \
  X(s_cvt_f16_f32, R = fh(AF)) \
  X(s_cvt_f32_f16, R = fu(hf(A))) \
  X(s_cvt_hi_f32_f16, R = fu(hf(A >> 16))) \
  X(s_cvt_pk_rtz_f16_f32, R = f2h_rtz(AF) | f2h_rtz(BF) << 16) \
  X(s_add_f16, R = fh(AH + BH)) \
  X(s_sub_f16, R = fh(AH - BH)) \
  X(s_mul_f16, R = fh(AH * BH)) \
  X(s_min_f16, R = fh(fmn(AH, BH))) \
  X(s_max_f16, R = fh(fmx(AH, BH))) \
  X(s_fmac_f16, R = dh((double)AH * BH + DH))

/* 64-bit */
#define SOP64_OPS(X) \
  X(s_mov_b64, R = A) \
  X(s_not_b64, R = ~A; K = R != 0) \
  X(s_and_b64, R = A & B; K = R != 0) \
  X(s_or_b64, R = A | B; K = R != 0) \
  X(s_xor_b64, R = A ^ B; K = R != 0) \
  X(s_and_not1_b64, R = A & ~B; K = R != 0) \
  X(s_or_not1_b64, R = A | ~B; K = R != 0) \
  X(s_lshl_b64, R = A << (B & 63); K = R != 0) \
  X(s_lshr_b64, R = A >> (B & 63); K = R != 0) \
  X(s_ashr_i64, R = (u64)((i64)A >> (B & 63)); K = R != 0) \
  X(s_cselect_b64, R = K ? A : B) \
  X(s_bfe_u64, R = field_u64(A, B & 63, (u32)(B >> 16) & 127, 64); K = R != 0) \
  X(s_bfe_i64, R = field_i64(A, B & 63, (u32)(B >> 16) & 127, 64); K = R != 0) \
  X(s_bfm_b64, R = ((1ull << (A & 63)) - 1) << (B & 63)) \
  X(s_sext_i64_i32, R = (u64)(i64)(i32)A)

/* Compares write only SCC: X(mnemonic, condition) */
#define SCMP_OPS(X) \
  X(s_cmp_eq_i32, A == B) \
  X(s_cmp_lg_i32, A != B) \
  X(s_cmp_gt_i32, (i32)A > (i32)B) \
  X(s_cmp_ge_i32, (i32)A >= (i32)B) \
  X(s_cmp_lt_i32, (i32)A < (i32)B) \
  X(s_cmp_le_i32, (i32)A <= (i32)B) \
  X(s_cmp_eq_u32, A == B) \
  X(s_cmp_lg_u32, A != B) \
  X(s_cmp_gt_u32, A > B) \
  X(s_cmp_ge_u32, A >= B) \
  X(s_cmp_lt_u32, A < B) \
  X(s_cmp_le_u32, A <= B) \
  X(s_bitcmp0_b32, !((A >> (B & 31)) & 1)) \
  X(s_bitcmp1_b32, (A >> (B & 31)) & 1) \
  X(s_cmp_lt_f32, AF < BF) \
  X(s_cmp_eq_f32, AF == BF) \
  X(s_cmp_le_f32, AF <= BF) \
  X(s_cmp_gt_f32, AF > BF) \
  X(s_cmp_ge_f32, AF >= BF) \
  X(s_cmp_lg_f32, AF < BF || AF > BF) \
  X(s_cmp_o_f32, !isnan(AF) && !isnan(BF)) \
  X(s_cmp_u_f32, isnan(AF) || isnan(BF)) \
  X(s_cmp_nge_f32, !(AF >= BF)) \
  X(s_cmp_nlg_f32, !(AF < BF || AF > BF)) \
  X(s_cmp_ngt_f32, !(AF > BF)) \
  X(s_cmp_nle_f32, !(AF <= BF)) \
  X(s_cmp_neq_f32, !(AF == BF)) \
  X(s_cmp_nlt_f32, !(AF < BF))
