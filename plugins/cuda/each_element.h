/* For CUDA sources: loops over the elements of tensors, in groups of neighbours where struct cuda_each says so. A group
 * is loaded and stored at once, with up to 16 bytes. */
#ifndef CUDA_EACH_ELEMENT_H
#define CUDA_EACH_ELEMENT_H

#include "cuda/device_code.h"
#include "cuda/elements_args.h"

/* ---- Types ------------------------------------------------------------------------------------------------- */

template <typename T> struct complex_of {
    T re, im;
};
typedef complex_of<float> complex64;
typedef complex_of<double> complex128;

/* A bool is a byte, and of its own type, since every byte that is not 0 is true. */
struct truth {
    uint8_t byte;
};

struct bytes16 {
    uint64_t halves[2];
};

#define EACH_FLOAT(F)                                                                              \
    F(f32, float)                                                                                  \
    F(f64, double)                                                                                 \
    F(f16, f16)                                                                                    \
    F(bf16, bf16)
#define EACH_INTEGER(F)                                                                            \
    F(i8, int8_t)                                                                                  \
    F(u8, uint8_t)                                                                                 \
    F(i16, int16_t)                                                                                \
    F(i32, int32_t)                                                                                \
    F(i64, int64_t)                                                                                \
    F(u32, uint32_t)                                                                               \
    F(u64, uint64_t)
#define EACH_COMPLEX(F)                                                                            \
    F(complex64, complex64)                                                                        \
    F(complex128, complex128)
#define EACH_DTYPE(F) EACH_FLOAT(F) EACH_INTEGER(F) F(bool, truth) EACH_COMPLEX(F)

/* The unsigned type in which integers wrap around. */
template <typename T> struct wrapping {
    typedef uint32_t type;
};
template <> struct wrapping<int64_t> {
    typedef uint64_t type;
};
template <> struct wrapping<uint64_t> {
    typedef uint64_t type;
};

/* ---- Groups --------------------------------------------------------------------------------------------------- */

template <int bytes> struct word_of;
template <> struct word_of<1> {
    typedef uint8_t type;
};
template <> struct word_of<2> {
    typedef uint16_t type;
};
template <> struct word_of<4> {
    typedef uint32_t type;
};
template <> struct word_of<8> {
    typedef uint2 type;
};
template <> struct word_of<16> {
    typedef uint4 type;
};

/* N elements from `at` on, or one that stands for all. */
template <typename T, int N>
__device__ inline void read_group(T (&to)[N], const void *data, int64_t at, bool repeated)
{
    const T *from = (const T *)data + at;
    if constexpr (N == 1) {
        to[0] = *from;
    } else if (repeated) {
        T one = *from;
        for (int k = 0; k < N; k++)
            to[k] = one;
    } else {
        typename word_of<sizeof to>::type word = *(const typename word_of<sizeof to>::type *)from;
        memcpy((void *)to, &word, sizeof word);
    }
}

template <typename T, int N>
__device__ inline void write_group(void *data, int64_t at, const T (&from)[N])
{
    T *to = (T *)data + at;
    if constexpr (N == 1) {
        *to = from[0];
    } else {
        typename word_of<sizeof from>::type word;
        memcpy(&word, (const void *)from, sizeof word);
        *(typename word_of<sizeof from>::type *)to = word;
    }
}

template <int N> struct number {
    static constexpr int value = N;
};

/* Calls body(number<N>(), offsets) for each group of N = `width` elements, or of one. */
template <int width, int operands, typename Body>
__device__ inline void for_each_group(const cuda_each &each, Body body)
{
    int64_t at[operands];
    if (width > 1 && each.width == width) {
        for (int64_t i = first_element(); i < each.space.count; i += element_step()) {
            find_offsets(each.space, i, at);
            body(number<width>(), at);
        }
        for (int64_t i = first_element(); i < each.tail; i += element_step()) {
            for (int t = 0; t < operands; t++)
                at[t] = each.repeated >> t & 1 ? 0 : each.space.count * width + i;
            body(number<1>(), at);
        }
    } else {
        for (int64_t i = first_element(); i < each.space.count; i += element_step()) {
            find_offsets(each.space, i, at);
            body(number<1>(), at);
        }
    }
}

/* out[i] = function(x[i]), of types R and A. */
template <typename R, typename A, int width, typename Function>
__device__ inline void map_elements(const map_args &args, Function function)
{
    for_each_group<width, 2>(args.each, [&](auto n, const int64_t(&at)[2]) {
        A x[n.value];
        R out[n.value];
        read_group(x, args.x, at[1], args.each.repeated & 2);
        for (int k = 0; k < n.value; k++)
            out[k] = function(x[k]);
        write_group(args.out, at[0], out);
    });
}

/* An operand of pair_args: a tensor, or the scalar. */
template <typename T, int N>
__device__ inline void read_operand(T (&to)[N], const pair_args &args, const void *data, int64_t at,
                                    bool repeated)
{
    if (data) {
        read_group(to, data, at, repeated);
        return;
    }
    T scalar;
    memcpy((void *)&scalar, args.scalar, sizeof scalar);
    for (int k = 0; k < N; k++)
        to[k] = scalar;
}

/* function(out, a, b) on groups of one size: out is of type R, a and b of type T. */
template <typename R, typename T, int width, typename Function>
__device__ inline void map_groups(const pair_args &args, Function function)
{
    for_each_group<width, 3>(args.each, [&](auto n, const int64_t(&at)[3]) {
        T a[n.value], b[n.value];
        R out[n.value];
        read_operand(a, args, args.a, at[1], args.each.repeated & 2);
        read_operand(b, args, args.b, at[2], args.each.repeated & 4);
        function(out, a, b);
        write_group(args.out, at[0], out);
    });
}

/* out[k] = function(a[k], b[k]), for those. */
template <typename R, typename T, int N, typename Function>
__device__ inline void each_of(R (&out)[N], const T (&a)[N], const T (&b)[N], Function function)
{
    for (int k = 0; k < N; k++)
        out[k] = function(a[k], b[k]);
}

#endif
