/* Vector operations that compute every lane alike. Each line is X(mnemonic, expression of one lane's result).
 * A, B, C are the sources and D the old destination as raw bits; AF..DF the same as f32, AH..DH as f16. */
#pragma once
#include "numerics.h"

#define AF uf(A)
#define BF uf(B)
#define CF uf(C)
#define DF uf(D)
#define AH hf(A)
#define BH hf(B)
#define CH hf(C)
#define DH hf(D)

/* 32-bit result */
#define LANE_OPS(X) \
  X(v_mov_b32, A) \
  X(v_not_b32, ~A) \
  X(v_bfrev_b32, brev32(A)) \
  X(v_ffbh_u32, clz32(A)) \
  X(v_clz_i32_u32, clz32(A)) \
  X(v_ctz_i32_b32, ctz32(A)) \
  X(v_cls_i32, cls32(A)) \
  X(v_add_f32, fu(AF + BF)) \
  X(v_sub_f32, fu(AF - BF)) \
  X(v_subrev_f32, fu(BF - AF)) \
  X(v_mul_f32, fu(AF * BF)) \
  X(v_mul_dx9_zero_f32, (AF == 0 || BF == 0) ? 0 : fu(AF * BF)) \
  X(v_max_f32, fu(fmx(AF, BF))) \
  X(v_min_f32, fu(fmn(AF, BF))) \
  X(v_max3_f32, fu(fmx(fmx(AF, BF), CF))) \
  X(v_min3_f32, fu(fmn(fmn(AF, BF), CF))) \
  X(v_maxmin_f32, fu(fmn(fmx(AF, BF), CF))) \
  X(v_minmax_f32, fu(fmx(fmn(AF, BF), CF))) \
  X(v_med3_f32, fu(med3(AF, BF, CF))) \
  X(v_fma_f32, fu(fmaf(AF, BF, CF))) \
  X(v_fmac_f32, fu(fmaf(AF, BF, DF))) \
  X(v_fmaak_f32, fu(fmaf(AF, BF, CF))) \
  X(v_fmamk_f32, fu(fmaf(AF, BF, CF))) \
  X(v_rcp_f32, fu((float)(1.0 / (double)AF))) \
  X(v_rcp_iflag_f32, fu((float)(1.0 / (double)AF))) \
  X(v_rsq_f32, fu((float)(1.0 / sqrt((double)AF)))) \
  X(v_sqrt_f32, fu(sqrtf(AF))) \
  X(v_exp_f32, fu(exp2_flushed(AF))) \
  X(v_log_f32, fu(log2_flushed(AF))) \
  X(v_sin_f32, fu(sin_turns(AF))) \
  X(v_cos_f32, fu(cos_turns(AF))) \
  X(v_floor_f32, fu(floorf(AF))) \
  X(v_ceil_f32, fu(ceilf(AF))) \
  X(v_trunc_f32, fu(truncf(AF))) \
  X(v_rndne_f32, fu(rintf(AF))) \
  X(v_fract_f32, fu(fract(AF))) \
  X(v_ldexp_f32, fu(ldexpf(AF, clampi((i32)B, -1000, 1000)))) \
  X(v_frexp_mant_f32, fu(frexp_mantissa(AF))) \
  X(v_frexp_exp_i32_f32, (u32)frexp_exponent(AF)) \
  X(v_div_fixup_f32, div_fixup(A, B, C)) \
  X(v_cvt_f32_i32, fu((float)(i32)A)) \
  X(v_cvt_f32_u32, fu((float)A)) \
  X(v_cvt_i32_f32, (u32)f2i(AF)) \
  X(v_cvt_u32_f32, f2u(AF)) \
  X(v_cvt_nearest_i32_f32, (u32)f2i(floorf(AF + 0.5f))) \
  X(v_cvt_floor_i32_f32, (u32)f2i(floorf(AF))) \
  X(v_cvt_f32_f16, fu(hf(A))) \
  X(v_cvt_f32_ubyte0, fu((float)(A & 255))) \
  X(v_cvt_f32_ubyte1, fu((float)((A >> 8) & 255))) \
  X(v_cvt_f32_ubyte2, fu((float)((A >> 16) & 255))) \
  X(v_cvt_f32_ubyte3, fu((float)(A >> 24))) \
  X(v_cvt_pk_rtz_f16_f32, f2h_rtz(AF) | f2h_rtz(BF) << 16) \
  X(v_cvt_pk_u16_u32, pack16(clampi(A, 0, 65535), clampi(B, 0, 65535))) \
  X(v_cvt_pk_i16_i32, pack16(clampi((i32)A, -32768, 32767), clampi((i32)B, -32768, 32767))) \
  X(v_cvt_pk_i16_f32, pack16(f2i16(AF), f2i16(BF))) \
  X(v_cvt_pk_u16_f32, pack16((i32)f2u16(AF), (i32)f2u16(BF))) \
  X(v_cvt_pk_u8_f32, insert_byte(C, B & 3, (u32)clampi((i64)f2u(rintf(AF)), 0, 255))) \
  X(v_pack_b32_f16, (A & 0xffff) | (B << 16)) \
  X(v_add_nc_u32, A + B) \
  X(v_sub_nc_u32, A - B) \
  X(v_subrev_nc_u32, B - A) \
  X(v_add_nc_i32, A + B) \
  X(v_sub_nc_i32, A - B) \
  X(v_add_nc_u32_clamp, A + B < A ? 0xffffffffu : A + B) \
  X(v_sub_nc_u32_clamp, A < B ? 0 : A - B) \
  X(v_subrev_nc_u32_clamp, B < A ? 0 : B - A) \
  X(v_add_nc_i32_clamp, (u32)clampi((i64)(i32)A + (i32)B, INT32_MIN, INT32_MAX)) \
  X(v_sub_nc_i32_clamp, (u32)clampi((i64)(i32)A - (i32)B, INT32_MIN, INT32_MAX)) \
  X(v_mul_lo_u32, A * B) \
  X(v_mul_hi_u32, (u32)(((u64)A * B) >> 32)) \
  X(v_mul_hi_i32, (u32)(((i64)(i32)A * (i32)B) >> 32)) \
  X(v_mul_u32_u24, (A & 0xffffff) * (B & 0xffffff)) \
  X(v_mul_i32_i24, (u32)(((i32)(A << 8) >> 8) * (i64)((i32)(B << 8) >> 8))) \
  X(v_mul_hi_u32_u24, (u32)(((u64)(A & 0xffffff) * (B & 0xffffff)) >> 32)) \
  X(v_mad_u32_u24, (A & 0xffffff) * (B & 0xffffff) + C) \
  X(v_mad_i32_i24, (u32)(((i32)(A << 8) >> 8) * (i64)((i32)(B << 8) >> 8)) + C) \
  X(v_mad_u32_u16, (A & 0xffff) * (B & 0xffff) + C) \
  X(v_mad_i32_i16, (u32)(SX16(A) * SX16(B)) + C) \
  X(v_add3_u32, A + B + C) \
  X(v_lshl_add_u32, (A << (B & 31)) + C) \
  X(v_add_lshl_u32, (A + B) << (C & 31)) \
  X(v_lshl_or_b32, (A << (B & 31)) | C) \
  X(v_and_or_b32, (A & B) | C) \
  X(v_or3_b32, A | B | C) \
  X(v_xor3_b32, A ^ B ^ C) \
  X(v_xad_u32, (A ^ B) + C) \
  X(v_bfi_b32, (A & B) | (~A & C)) \
  X(v_and_b32, A & B) \
  X(v_or_b32, A | B) \
  X(v_xor_b32, A ^ B) \
  X(v_xnor_b32, ~(A ^ B)) \
  X(v_lshlrev_b32, B << (A & 31)) \
  X(v_lshrrev_b32, B >> (A & 31)) \
  X(v_ashrrev_i32, (u32)((i32)B >> (A & 31))) \
  X(v_lshl_b32, A << (B & 31)) \
  X(v_bfe_u32, bfe_u(A, B, C)) \
  X(v_bfe_i32, bfe_i(A, B, C)) \
  X(v_bfm_b32, ((1u << (A & 31)) - 1) << (B & 31)) \
  X(v_bcnt_u32_b32, (u32)__builtin_popcount(A) + B) \
  X(v_alignbit_b32, (u32)((((u64)A << 32) | B) >> (C & 31))) \
  X(v_alignbyte_b32, (u32)((((u64)A << 32) | B) >> (8 * (C & 3)))) \
  X(v_perm_b32, perm(A, B, C)) \
  X(v_min_i32, (i32)A < (i32)B ? A : B) \
  X(v_max_i32, (i32)A > (i32)B ? A : B) \
  X(v_min_u32, A < B ? A : B) \
  X(v_max_u32, A > B ? A : B) \
  X(v_min3_i32, (u32)min_i(min_i((i32)A, (i32)B), (i32)C)) \
  X(v_max3_i32, (u32)max_i(max_i((i32)A, (i32)B), (i32)C)) \
  X(v_min3_u32, min_u(min_u(A, B), C)) \
  X(v_max3_u32, max_u(max_u(A, B), C)) \
  X(v_maxmin_i32, (u32)min_i(max_i((i32)A, (i32)B), (i32)C)) \
  X(v_minmax_i32, (u32)max_i(min_i((i32)A, (i32)B), (i32)C)) \
  X(v_maxmin_u32, min_u(max_u(A, B), C)) \
  X(v_minmax_u32, max_u(min_u(A, B), C)) \
  X(v_med3_i32, (u32)max_i(min_i((i32)A, (i32)B), min_i(max_i((i32)A, (i32)B), (i32)C))) \
  X(v_med3_u32, max_u(min_u(A, B), min_u(max_u(A, B), C))) \
  X(v_sad_u8, sad_u8(A, B, C)) \
  X(v_cvt_f32_bf16, fu(bf(A))) \
  X(v_dot2_f32_f16, fu((float)((double)hf(A) * hf(B) + (double)hf(A >> 16) * hf(B >> 16) + CF))) \
  X(v_dot2acc_f32_f16, fu((float)((double)hf(A) * hf(B) + (double)hf(A >> 16) * hf(B >> 16) + DF))) \
  X(v_dot2_f32_bf16, fu((float)((double)bf(A) * bf(B) + (double)bf(A >> 16) * bf(B >> 16) + CF)))

/* 16-bit result: the other half of the destination is preserved */
#define LANE16_OPS(X) \
  X(v_mov_b16, A) \
  X(v_not_b16, ~A) \
  X(v_and_b16, A & B) \
  X(v_or_b16, A | B) \
  X(v_xor_b16, A ^ B) \
  X(v_cvt_f16_f32, fh(AF)) \
  X(v_cvt_f16_u16, fh((float)(u16)A)) \
  X(v_cvt_f16_i16, fh((float)SX16(A))) \
  X(v_cvt_u16_f16, f2u16(AH)) \
  X(v_cvt_i16_f16, (u32)f2i16(AH)) \
  X(v_add_f16, fh(AH + BH)) \
  X(v_sub_f16, fh(AH - BH)) \
  X(v_subrev_f16, fh(BH - AH)) \
  X(v_mul_f16, fh(AH * BH)) \
  X(v_fma_f16, dh((double)AH * BH + CH)) \
  X(v_fmac_f16, dh((double)AH * BH + DH)) \
  X(v_fmaak_f16, dh((double)AH * BH + CH)) \
  X(v_fmamk_f16, dh((double)AH * BH + CH)) \
  X(v_max_f16, fh(fmx(AH, BH))) \
  X(v_min_f16, fh(fmn(AH, BH))) \
  X(v_max3_f16, fh(fmx(fmx(AH, BH), CH))) \
  X(v_min3_f16, fh(fmn(fmn(AH, BH), CH))) \
  X(v_med3_f16, fh(med3(AH, BH, CH))) \
  X(v_maxmin_f16, fh(fmn(fmx(AH, BH), CH))) \
  X(v_minmax_f16, fh(fmx(fmn(AH, BH), CH))) \
  X(v_rcp_f16, dh(1.0 / AH)) \
  X(v_rsq_f16, dh(1.0 / sqrt(AH))) \
  X(v_sqrt_f16, dh(sqrt(AH))) \
  X(v_exp_f16, dh(exp2(AH))) \
  X(v_log_f16, dh(log2(AH))) \
  X(v_floor_f16, fh(floorf(AH))) \
  X(v_ceil_f16, fh(ceilf(AH))) \
  X(v_trunc_f16, fh(truncf(AH))) \
  X(v_rndne_f16, fh(rintf(AH))) \
  X(v_fract_f16, fh(AH - floorf(AH))) \
  X(v_ldexp_f16, dh(ldexp(AH, SX16(B)))) \
  X(v_add_nc_u16, A + B) \
  X(v_sub_nc_u16, A - B) \
  X(v_add_nc_u16_clamp, (u32)clampi((i64)(u16)A + (u16)B, 0, 65535)) \
  X(v_sub_nc_u16_clamp, (u32)clampi((i64)(u16)A - (u16)B, 0, 65535)) \
  X(v_add_nc_i16_clamp, (u32)clampi((i64)SX16(A) + SX16(B), -32768, 32767)) \
  X(v_sub_nc_i16_clamp, (u32)clampi((i64)SX16(A) - SX16(B), -32768, 32767)) \
  X(v_add_nc_i16, A + B) \
  X(v_sub_nc_i16, A - B) \
  X(v_mul_lo_u16, A * B) \
  X(v_lshlrev_b16, B << (A & 15)) \
  X(v_lshrrev_b16, (B & 0xffff) >> (A & 15)) \
  X(v_ashrrev_i16, (u32)(SX16(B) >> (A & 15))) \
  X(v_max_i16, SX16(A) > SX16(B) ? A : B) \
  X(v_min_i16, SX16(A) < SX16(B) ? A : B) \
  X(v_max_u16, (u16)A > (u16)B ? A : B) \
  X(v_min_u16, (u16)A < (u16)B ? A : B) \
  X(v_mad_u16, A * B + C) \
  X(v_mad_i16, A * B + C)

/* Packed 16-bit: P, Q, R are the halves of the sources, S that of the old destination */
#define PK_OPS(X) \
  X(v_pk_add_f16, fh(hf(P) + hf(Q))) \
  X(v_pk_mul_f16, fh(hf(P) * hf(Q))) \
  X(v_pk_fma_f16, dh((double)hf(P) * hf(Q) + hf(R))) \
  X(v_pk_fmac_f16, dh((double)hf(P) * hf(Q) + hf(S))) \
  X(v_pk_max_f16, fh(fmx(hf(P), hf(Q)))) \
  X(v_pk_min_f16, fh(fmn(hf(P), hf(Q)))) \
  X(v_pk_add_u16, P + Q) \
  X(v_pk_add_i16, P + Q) \
  X(v_pk_sub_u16, P - Q) \
  X(v_pk_sub_i16, P - Q) \
  X(v_pk_mul_lo_u16, P * Q) \
  X(v_pk_mad_u16, P * Q + R) \
  X(v_pk_mad_i16, P * Q + R) \
  X(v_pk_lshlrev_b16, Q << (P & 15)) \
  X(v_pk_lshrrev_b16, (Q & 0xffff) >> (P & 15)) \
  X(v_pk_ashrrev_i16, (u32)(SX16(Q) >> (P & 15))) \
  X(v_pk_max_i16, SX16(P) > SX16(Q) ? P : Q) \
  X(v_pk_min_i16, SX16(P) < SX16(Q) ? P : Q) \
  X(v_pk_max_u16, P > Q ? P : Q) \
  X(v_pk_min_u16, P < Q ? P : Q)

/* 64-bit result; narrow sources come zero extended (see Ins.aux) */
#define LANE64_OPS(X) \
  X(v_lshlrev_b64, B << (A & 63)) \
  X(v_lshrrev_b64, B >> (A & 63)) \
  X(v_ashrrev_i64, (u64)((i64)B >> (A & 63))) \
  X(v_mad_u64_u32, (u64)(u32)A * (u32)B + C) \
  X(v_mad_i64_i32, (u64)((i64)(i32)A * (i32)B) + C) \
  X(v_add_f64, du(ud(A) + ud(B))) \
  X(v_mul_f64, du(ud(A) * ud(B))) \
  X(v_fma_f64, du(fma(ud(A), ud(B), ud(C)))) \
  X(v_max_f64, du(dmx(ud(A), ud(B)))) \
  X(v_min_f64, du(dmn(ud(A), ud(B)))) \
  X(v_rcp_f64, du(1.0 / ud(A))) \
  X(v_sqrt_f64, du(sqrt(ud(A)))) \
  X(v_rsq_f64, du(1.0 / sqrt(ud(A)))) \
  X(v_floor_f64, du(floor(ud(A)))) \
  X(v_ceil_f64, du(ceil(ud(A)))) \
  X(v_trunc_f64, du(trunc(ud(A)))) \
  X(v_rndne_f64, du(rint(ud(A)))) \
  X(v_ldexp_f64, du(ldexp(ud(A), (i32)B))) \
  X(v_cvt_f64_f32, du((double)uf((u32)A))) \
  X(v_cvt_f64_i32, du((double)(i32)A)) \
  X(v_cvt_f64_u32, du((double)(u32)A))

/* 32-bit result of a 64-bit source */
#define LANE32_FROM64_OPS(X) \
  X(v_cvt_f32_f64, fu((float)ud(A))) \
  X(v_cvt_i32_f64, (u32)d2i(ud(A))) \
  X(v_cvt_u32_f64, d2u(ud(A)))
