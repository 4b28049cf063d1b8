// Numbers of the element types that kernels compute on, as float or as 64-bit integers. One text for all compilers:
// half precision is converted by the device's own instructions where there is a device, else bit by bit.
#ifndef LMCACHE_CUDA_NUMBERS_H
#define LMCACHE_CUDA_NUMBERS_H

#include <lmcache/abi.h>

enum lmc_float_type { LMC_FLOAT32, LMC_FLOAT16, LMC_BFLOAT16 };
enum lmc_int_type { LMC_UINT8, LMC_INT8, LMC_INT16, LMC_INT32, LMC_INT64 };

union lmc_float_bits {
    float value;
    unsigned int bits;
};

LMC_FN float lmc_from_bits(unsigned int bits)
{
    lmc_float_bits it;
    it.bits = bits;
    return it.value;
}

LMC_FN unsigned int lmc_to_bits(float value)
{
    lmc_float_bits it;
    it.value = value;
    return it.bits;
}

LMC_FN float lmc_bfloat_to_float(unsigned short it) { return lmc_from_bits((unsigned int)it << 16); }

LMC_FN unsigned short lmc_float_to_bfloat(float value)
{
    const unsigned int bits = lmc_to_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (unsigned short)(bits >> 16 | 0x40u); // a NaN stays one
    return (unsigned short)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

#if defined(__CUDA_ARCH__)
LMC_FN float lmc_half_to_float(unsigned short it)
{
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(it));
    return value;
}

LMC_FN unsigned short lmc_float_to_half(float value)
{
    unsigned short it;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(it) : "f"(value));
    return it;
}
#elif defined(__HIP_DEVICE_COMPILE__) && __HIP_DEVICE_COMPILE__
LMC_FN float lmc_half_to_float(unsigned short it) { return (float)__builtin_bit_cast(_Float16, it); }
LMC_FN unsigned short lmc_float_to_half(float value)
{
    return __builtin_bit_cast(unsigned short, (_Float16)value);
}
#else
LMC_FN float lmc_half_to_float(unsigned short it)
{
    const unsigned int sign = (unsigned int)(it & 0x8000u) << 16, rest = it & 0x7fffu;
    if (rest >= 0x7c00u) // infinity, NaN
        return lmc_from_bits(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
    if (rest < 0x400u) // zero, subnormal: rest * 2**-24
        return lmc_from_bits(sign | lmc_to_bits((float)rest * (1.0f / 16777216.0f)));
    return lmc_from_bits(sign | ((rest << 13) + 0x38000000u));
}

LMC_FN unsigned short lmc_float_to_half(float value)
{
    const unsigned int bits = lmc_to_bits(value), sign = bits >> 16 & 0x8000u;
    unsigned int rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) // NaN
        return (unsigned short)(sign | 0x7e00u | (rest >> 13 & 0x3ffu));
    if (rest >= 0x47800000u) // 2**16 and more
        return (unsigned short)(sign | 0x7c00u);
    if (rest < 0x38800000u) // below 2**-14: adding 0.5 leaves the subnormal's bits at the end, rounded to even
        return (unsigned short)(sign | (lmc_to_bits(lmc_from_bits(rest) + 0.5f) - 0x3f000000u));
    rest += 0xfffu + (rest >> 13 & 1);
    return (unsigned short)(sign | ((rest - 0x38000000u) >> 13));
}
#endif

LMC_FN float lmc_load_float(lmc_u64 base, lmc_i64 index, int type)
{
    if (type == LMC_FLOAT32)
        return reinterpret_cast<const float *>(base)[index];
    const unsigned short it = reinterpret_cast<const unsigned short *>(base)[index];
    return type == LMC_FLOAT16 ? lmc_half_to_float(it) : lmc_bfloat_to_float(it);
}

LMC_FN void lmc_store_float(lmc_u64 base, lmc_i64 index, int type, float value)
{
    if (type == LMC_FLOAT32)
        reinterpret_cast<float *>(base)[index] = value;
    else
        reinterpret_cast<unsigned short *>(base)[index] =
            type == LMC_FLOAT16 ? lmc_float_to_half(value) : lmc_float_to_bfloat(value);
}

LMC_FN lmc_i64 lmc_load_int(lmc_u64 base, lmc_i64 index, int type)
{
    switch (type) {
    case LMC_UINT8:
        return reinterpret_cast<const unsigned char *>(base)[index];
    case LMC_INT8:
        return reinterpret_cast<const signed char *>(base)[index];
    case LMC_INT16:
        return reinterpret_cast<const short *>(base)[index];
    case LMC_INT32:
        return reinterpret_cast<const int *>(base)[index];
    default:
        return reinterpret_cast<const lmc_i64 *>(base)[index];
    }
}

LMC_FN void lmc_store_int(lmc_u64 base, lmc_i64 index, int type, lmc_i64 value)
{
    switch (type) {
    case LMC_UINT8:
        reinterpret_cast<unsigned char *>(base)[index] = (unsigned char)value;
        break;
    case LMC_INT8:
        reinterpret_cast<signed char *>(base)[index] = (signed char)value;
        break;
    case LMC_INT16:
        reinterpret_cast<short *>(base)[index] = (short)value;
        break;
    case LMC_INT32:
        reinterpret_cast<int *>(base)[index] = (int)value;
        break;
    default:
        reinterpret_cast<lmc_i64 *>(base)[index] = value;
    }
}

#endif
