/* Kernels over elements: fills, copies and conversions, choices, and sums with a factor. */
#include "cuda/each_element.h"

/* ---- Fills, copies and choices: by the size of an element ----------------------------------------------------- */

#define EACH_SIZE(F)                                                                               \
    F(1, uint8_t)                                                                                  \
    F(2, uint16_t)                                                                                 \
    F(4, uint32_t)                                                                                 \
    F(8, uint64_t)                                                                                 \
    F(16, bytes16)

template <typename T> __device__ void fill(const fill_args &args)
{
    T value;
    memcpy(&value, args.value, sizeof value);
    for_each_group<CUDA_WIDTH(sizeof(T)), 1>(args.each, [&](auto n, const int64_t(&at)[1]) {
        T out[n.value];
        for (int k = 0; k < n.value; k++)
            out[k] = value;
        write_group(args.out, at[0], out);
    });
}

#define FILL(size, T)                                                                              \
    TD_KERNEL(fill_##size, struct fill_args)                                                       \
    {                                                                                              \
        fill<T>(args);                                                                             \
    }
EACH_SIZE(FILL)

#define COPY(size, T)                                                                              \
    TD_KERNEL(copy_##size, struct map_args)                                                        \
    {                                                                                              \
        map_elements<T, T, CUDA_WIDTH(size)>(args, [](T x) { return x; });                         \
    }
EACH_SIZE(COPY)

template <typename T> __device__ void choose(const where_args &args)
{
    for_each_group<CUDA_WIDTH(sizeof(T)), 4>(args.each, [&](auto n, const int64_t(&at)[4]) {
        uint8_t condition[n.value];
        T a[n.value], b[n.value];
        read_group(condition, args.condition, at[1], args.each.repeated & 2);
        read_group(a, args.a, at[2], args.each.repeated & 4);
        read_group(b, args.b, at[3], args.each.repeated & 8);
        for (int k = 0; k < n.value; k++)
            if (!condition[k])
                a[k] = b[k];
        write_group(args.out, at[0], a);
    });
}

#define WHERE(size, T)                                                                             \
    TD_KERNEL(where_##size, struct where_args)                                                     \
    {                                                                                              \
        choose<T>(args);                                                                           \
    }
EACH_SIZE(WHERE)

/* Through a tile in shared memory, so that reads and writes are both of neighbours; its rows are one longer, for
 * other banks. A block takes a tile; the threads of a warp are neighbours in out, and then in x. */
template <typename T> __device__ void transpose(const transpose_args &args)
{
    __shared__ T tile[TRANSPOSE_TILE][TRANSPOSE_TILE + 1];
    int lane = threadIdx.x % TRANSPOSE_TILE, line = threadIdx.x / TRANSPOSE_TILE;
    int64_t number = blockIdx.x, at[2];
    int64_t column = number % args.column_tiles * TRANSPOSE_TILE;
    number /= args.column_tiles;
    int64_t row = number % args.row_tiles * TRANSPOSE_TILE;
    find_offsets(args.batch, number / args.row_tiles, at);
    T *out = (T *)args.out + at[0];
    const T *x = (const T *)args.x + at[1];
    for (int k = line; k < TRANSPOSE_TILE; k += TRANSPOSE_ROWS)
        if (column + k < args.columns && row + lane < args.rows)
            tile[k][lane] = x[(column + k) * args.x_stride + row + lane];
    __syncthreads();
    for (int k = line; k < TRANSPOSE_TILE; k += TRANSPOSE_ROWS)
        if (row + k < args.rows && column + lane < args.columns)
            out[(row + k) * args.out_stride + column + lane] = tile[lane][k];
}

#define TRANSPOSE(size, T)                                                                         \
    TD_KERNEL_SYNC(transpose_##size, struct transpose_args)                                        \
    {                                                                                              \
        transpose<T>(args);                                                                        \
    }
EACH_SIZE(TRANSPOSE)

/* ---- Conversions: as the host's, by way of f64 or i64 where it takes that way ---------------------------------- */

/* What fits neither i64 nor u64 becomes the minimum of i64. */
__device__ inline uint64_t integer_of(double value)
{
    bool is_signed = value >= -0x1p63 && value < 0x1p63;
    bool is_large = value >= 0x1p63 && value < 0x1p64;
    int64_t low = (int64_t)(is_signed ? value : is_large ? value - 0x1p63 : -0x1p63);
    return (uint64_t)low + (is_large ? (uint64_t)1 << 63 : 0);
}

/* Each type as a number that C++ converts: floats, integers, or the real part. */
template <typename T> __device__ inline typename compute<T>::type plain_of(T x)
{
    return load(x);
}
__device__ inline uint8_t plain_of(truth x)
{
    return x.byte != 0;
}
template <typename T> __device__ inline T plain_of(complex_of<T> x)
{
    return x.re;
}

template <typename T> struct is_integer {
    static constexpr bool value = true;
};
template <> struct is_integer<float> {
    static constexpr bool value = false;
};
template <> struct is_integer<double> {
    static constexpr bool value = false;
};

template <typename T> struct to {
    template <typename A> static __device__ T of(A x)
    {
        auto plain = plain_of(x);
        if constexpr (is_integer<T>::value && !is_integer<decltype(plain)>::value)
            return (T)integer_of(plain);
        else
            return (T)plain;
    }
};
/* A u64 is rounded twice on the way to halves. */
template <typename A> __device__ inline float single_of(A x)
{
    return (float)plain_of(x);
}
__device__ inline float single_of(uint64_t x)
{
    return (float)(double)x;
}
template <> struct to<f16> {
    template <typename A> static __device__ f16 of(A x)
    {
        return store<f16>(single_of(x));
    }
};
template <> struct to<bf16> {
    template <typename A> static __device__ bf16 of(A x)
    {
        return store<bf16>(single_of(x));
    }
};
template <> struct to<truth> {
    template <typename A> static __device__ truth of(A x)
    {
        return truth{plain_of(x) != 0};
    }
    template <typename A> static __device__ truth of(complex_of<A> x)
    {
        return truth{x.re != 0 || x.im != 0};
    }
};
template <typename T> struct to<complex_of<T>> {
    template <typename A> static __device__ complex_of<T> of(A x)
    {
        return {(T)plain_of(x), 0};
    }
    static __device__ complex_of<T> of(uint64_t x)
    {
        return {(T)(double)x, 0};
    }
    template <typename A> static __device__ complex_of<T> of(complex_of<A> x)
    {
        return {(T)x.re, (T)x.im};
    }
};

/* From any dtype, one element at a time. */
#define CASE(name, A)                                                                              \
    case CUDA_DTYPE_##name:                                                                        \
        out[at[0]] = to<T>::of(((const A *)args.x)[at[1]]);                                        \
        break;

#define CUDA_DTYPE_f32 CUDA_F32
#define CUDA_DTYPE_f64 CUDA_F64
#define CUDA_DTYPE_f16 CUDA_F16
#define CUDA_DTYPE_bf16 CUDA_BF16
#define CUDA_DTYPE_i8 CUDA_I8
#define CUDA_DTYPE_u8 CUDA_U8
#define CUDA_DTYPE_i16 CUDA_I16
#define CUDA_DTYPE_i32 CUDA_I32
#define CUDA_DTYPE_i64 CUDA_I64
#define CUDA_DTYPE_u32 CUDA_U32
#define CUDA_DTYPE_u64 CUDA_U64
#define CUDA_DTYPE_bool CUDA_BOOL
#define CUDA_DTYPE_complex64 CUDA_COMPLEX64
#define CUDA_DTYPE_complex128 CUDA_COMPLEX128

template <typename T> __device__ void convert_any(const map_args &args)
{
    T *out = (T *)args.out;
    for (int64_t i = first_element(); i < args.each.space.count; i += element_step()) {
        int64_t at[2];
        find_offsets(args.each.space, i, at);
        switch (args.op) {
            EACH_DTYPE(CASE)
        }
    }
}

#define CONVERT_ANY(name, T)                                                                       \
    TD_KERNEL(convert_##name, struct map_args)                                                     \
    {                                                                                              \
        convert_any<T>(args);                                                                      \
    }
EACH_DTYPE(CONVERT_ANY)

/* The usual ones, in groups; launch_elements.c has the same list. */
#define CONVERT(to_name, T, from_name, A)                                                          \
    TD_KERNEL(convert_##to_name##_##from_name, struct map_args)                                    \
    {                                                                                              \
        map_elements<T, A, CUDA_WIDTH(sizeof(T) > sizeof(A) ? sizeof(T) : sizeof(A))>(             \
            args, [](A x) { return to<T>::of(x); });                                               \
    }
CONVERT(f16, f16, f32, float)
CONVERT(bf16, bf16, f32, float)
CONVERT(f32, float, f16, f16)
CONVERT(f32, float, bf16, bf16)
CONVERT(bf16, bf16, f16, f16)
CONVERT(f16, f16, bf16, bf16)
CONVERT(f32, float, f64, double)
CONVERT(f64, double, f32, float)
CONVERT(f32, float, u8, uint8_t)
CONVERT(f32, float, bool, truth)
CONVERT(f16, f16, bool, truth)
CONVERT(bf16, bf16, bool, truth)
CONVERT(f32, float, i32, int32_t)
CONVERT(f32, float, i64, int64_t)
CONVERT(i64, int64_t, i32, int32_t)
CONVERT(i64, int64_t, bool, truth)

/* ---- clamp --------------------------------------------------------------------------------------------------------- */

/* NaN fails both comparisons and stays. */
template <typename C> __device__ inline C clamped(C x, C low, C high)
{
    C value = x < low ? low : x;
    return value > high ? high : value;
}

#define CLAMP_FLOAT(name, T)                                                                       \
    TD_KERNEL(clamp_##name, struct map_args)                                                       \
    {                                                                                              \
        compute<T>::type low = (compute<T>::type)args.low, high = (compute<T>::type)args.high;     \
        map_elements<T, T, CUDA_WIDTH(sizeof(T))>(                                                 \
            args, [&](T x) { return store<T>(clamped(load(x), low, high)); });                     \
    }
EACH_FLOAT(CLAMP_FLOAT)

#define CLAMP_INTEGER(name, T)                                                                     \
    TD_KERNEL(clamp_##name, struct map_args)                                                       \
    {                                                                                              \
        T low = (T)args.least, high = (T)args.most;                                                \
        map_elements<T, T, CUDA_INTEGER_WIDTH(sizeof(T))>(                                         \
            args, [&](T x) { return clamped(x, low, high); });                                     \
    }
EACH_INTEGER(CLAMP_INTEGER)

/* ---- add_scaled ------------------------------------------------------------------------------------------------------ */

#define ADD_SCALED_FLOAT(name, T)                                                                  \
    TD_KERNEL(add_scaled_##name, struct pair_args)                                                 \
    {                                                                                              \
        compute<T>::type alpha = (compute<T>::type)args.alpha;                                     \
        map_groups<T, T, CUDA_WIDTH(sizeof(T))>(args, [&](auto &out, auto &a, auto &b) {           \
            each_of(out, a, b, [&](T p, T q) { return store<T>(fma(alpha, load(q), load(p))); });  \
        });                                                                                        \
    }
EACH_FLOAT(ADD_SCALED_FLOAT)

#define ADD_SCALED_INTEGER(name, T)                                                                \
    TD_KERNEL(add_scaled_##name, struct pair_args)                                                 \
    {                                                                                              \
        typedef wrapping<T>::type U;                                                               \
        U alpha = (U)args.whole_alpha;                                                             \
        map_groups<T, T, CUDA_INTEGER_WIDTH(sizeof(T))>(args, [&](auto &out, auto &a, auto &b) {   \
            each_of(out, a, b, [&](T p, T q) { return (T)((U)p + alpha * (U)q); });                \
        });                                                                                        \
    }
EACH_INTEGER(ADD_SCALED_INTEGER)

template <typename T> __device__ void add_scaled_complex(const pair_args &args)
{
    typedef complex_of<T> C;
    T alpha = (T)args.alpha;
    map_groups<C, C, CUDA_WIDTH(sizeof(C))>(args, [&](auto &out, auto &a, auto &b) {
        each_of(out, a, b, [&](C p, C q) {
            return C{fma(alpha, q.re, p.re), fma(alpha, q.im, p.im)};
        });
    });
}

TD_KERNEL(add_scaled_complex64, struct pair_args)
{
    add_scaled_complex<float>(args);
}
TD_KERNEL(add_scaled_complex128, struct pair_args)
{
    add_scaled_complex<double>(args);
}
