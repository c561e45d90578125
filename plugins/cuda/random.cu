/* Kernels: random numbers and dropout, by the rules of random.h. A thread computes a block of Philox, four words, and
 * what becomes of it. */
#include "cuda/each_element.h"
#include "cuda/random_args.h"

/* ---- Philox 4x32-10 ----------------------------------------------------------------------------------------------- */

__device__ inline void draw_words(const cuda_words &from, int64_t number, uint32_t (&words)[4])
{
    uint64_t block = from.offset + (uint64_t)number;
    uint32_t a = (uint32_t)block, b = (uint32_t)(block >> 32), c = 0, d = 0;
    uint32_t key0 = (uint32_t)from.seed, key1 = (uint32_t)(from.seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t product0 = (uint64_t)0xd2511f53u * a, product1 = (uint64_t)0xcd9e8d57u * c;
        a = (uint32_t)(product1 >> 32) ^ b ^ key0;
        b = (uint32_t)product1;
        c = (uint32_t)(product0 >> 32) ^ d ^ key1;
        d = (uint32_t)product0;
        key0 += 0x9e3779b9u;
        key1 += 0xbb67ae85u;
    }
    words[0] = a;
    words[1] = b;
    words[2] = c;
    words[3] = d;
}

/* The words of this launch. */
__device__ inline cuda_words words_of(const cuda_words &from)
{
    if (from.captured)
        return {from.captured[0], from.captured[1], nullptr};
    return from;
}

/* Of elements that take 64 bits a block has two. */
__device__ inline uint64_t pair_of(const uint32_t (&words)[4], int k)
{
    return (uint64_t)words[2 * k] << 32 | words[2 * k + 1];
}

/* N elements in pieces of at most 16 bytes. */
template <typename T, int N> __device__ inline void read_pieces(T (&to)[N], const T *from)
{
    constexpr int P = N < CUDA_WIDTH((int)sizeof(T)) ? N : CUDA_WIDTH((int)sizeof(T));
    for (int k = 0; k < N; k += P)
        read_group(*(T(*)[P]) & to[k], from + k, 0, false);
}
template <typename T, int N> __device__ inline void write_pieces(T *to, const T (&from)[N])
{
    constexpr int P = N < CUDA_WIDTH((int)sizeof(T)) ? N : CUDA_WIDTH((int)sizeof(T));
    for (int k = 0; k < N; k += P)
        write_group(to + k, 0, *(const T(*)[P]) & from[k]);
}

/* Fills `out`, N elements of each block of words: make(out, words). */
template <typename T, int N, typename Make>
__device__ inline void draw(const random_args &args, Make make)
{
    int64_t count = args.space.count;
    const cuda_words from = words_of(args.words);
    for (int64_t i = first_element() * N; i < count; i += element_step() * N) {
        uint32_t words[4];
        T out[N];
        draw_words(from, i / N, words);
        make(out, words);
        if (args.grouped && i + N <= count) {
            write_pieces((T *)args.out + i, out);
            continue;
        }
        for (int k = 0; k < N && i + k < count; k++) {
            int64_t at[1];
            find_offsets(args.space, i + k, at);
            ((T *)args.out)[at[0]] = out[k];
        }
    }
}

/* ---- Uniform and normal numbers ------------------------------------------------------------------------------------- */

/* In [0, 1), with `digits` bits of a word. */
template <int digits> __device__ inline float unit_of(uint32_t word)
{
    return (float)(word >> (32 - digits)) * (1.0f / (1 << digits));
}

__device__ inline double unit_of_pair(uint64_t bits)
{
    return (double)(bits >> 11) * 0x1p-53;
}

#define UNIFORM(name, T, digits)                                                                   \
    TD_KERNEL(uniform_##name, struct random_args)                                                  \
    {                                                                                              \
        float from = (float)args.from, range = (float)args.range;                                  \
        draw<T, 4>(args, [&](auto &out, auto &words) {                                             \
            for (int k = 0; k < 4; k++)                                                            \
                out[k] = store<T>(fmaf(unit_of<digits>(words[k]), range, from));                   \
        });                                                                                        \
    }
UNIFORM(f32, float, 24)
UNIFORM(f16, f16, 11)
UNIFORM(bf16, bf16, 8)

TD_KERNEL(uniform_f64, struct random_args)
{
    draw<double, 2>(args, [&](auto &out, auto &words) {
        for (int k = 0; k < 2; k++)
            out[k] = fma(unit_of_pair(pair_of(words, k)), args.range, args.from);
    });
}

/* Box and Muller: two elements are one point. 1 - u is exact, and so is the angle in units of pi. */
#define NORMAL(name, T)                                                                            \
    TD_KERNEL(normal_##name, struct random_args)                                                   \
    {                                                                                              \
        float mean = (float)args.from, deviation = (float)args.range;                              \
        draw<T, 4>(args, [&](auto &out, auto &words) {                                             \
            for (int k = 0; k < 4; k += 2) {                                                       \
                float sine, cosine, radius = sqrtf(-2 * logf(1 - unit_of<24>(words[k])));          \
                sincospif(2 * unit_of<24>(words[k + 1]), &sine, &cosine);                          \
                out[k] = store<T>(fmaf(radius * cosine, deviation, mean));                         \
                out[k + 1] = store<T>(fmaf(radius * sine, deviation, mean));                       \
            }                                                                                      \
        });                                                                                        \
    }
NORMAL(f32, float)
NORMAL(f16, f16)
NORMAL(bf16, bf16)

TD_KERNEL(normal_f64, struct random_args)
{
    draw<double, 2>(args, [&](auto &out, auto &words) {
        double sine, cosine, radius = sqrt(-2 * log(1 - unit_of_pair(pair_of(words, 0))));
        sincospi(2 * unit_of_pair(pair_of(words, 1)), &sine, &cosine);
        out[0] = fma(radius * cosine, args.range, args.from);
        out[1] = fma(radius * sine, args.range, args.from);
    });
}

/* ---- Ones and zeros, and integers -------------------------------------------------------------------------------------- */

template <typename T> __device__ inline T integer_as(uint64_t value)
{
    return (T)(typename compute<T>::type)(int64_t)value;
}
template <> __device__ inline f16 integer_as<f16>(uint64_t value)
{
    return store<f16>((float)(int64_t)value);
}
template <> __device__ inline bf16 integer_as<bf16>(uint64_t value)
{
    return store<bf16>((float)(int64_t)value);
}

#define BERNOULLI(name, T)                                                                         \
    TD_KERNEL(bernoulli_##name, struct random_args)                                                \
    {                                                                                              \
        draw<T, 4>(args, [&](auto &out, auto &words) {                                             \
            for (int k = 0; k < 4; k++)                                                            \
                out[k] = integer_as<T>(words[k] < args.threshold);                                 \
        });                                                                                        \
    }
EACH_FLOAT(BERNOULLI)
EACH_INTEGER(BERNOULLI)
BERNOULLI(bool, uint8_t)

#define RANGE(name, T)                                                                             \
    TD_KERNEL(range_##name, struct random_args)                                                    \
    {                                                                                              \
        draw<T, 4>(args, [&](auto &out, auto &words) {                                             \
            for (int k = 0; k < 4; k++)                                                            \
                out[k] = integer_as<T>(args.base + ((uint64_t)words[k] * args.modulus >> 32));     \
        });                                                                                        \
    }                                                                                              \
    TD_KERNEL(wide_range_##name, struct random_args)                                               \
    {                                                                                              \
        draw<T, 2>(args, [&](auto &out, auto &words) {                                             \
            for (int k = 0; k < 2; k++) {                                                          \
                uint64_t bits = pair_of(words, k);                                                 \
                out[k] = integer_as<T>(args.base +                                                 \
                                       (args.modulus ? __umul64hi(bits, args.modulus) : bits));    \
            }                                                                                      \
        });                                                                                        \
    }
EACH_FLOAT(RANGE)
EACH_INTEGER(RANGE)
RANGE(bool, uint8_t)

/* ---- Dropout ------------------------------------------------------------------------------------------------------------- */

/* What is dropped is multiplied by 0, so that NaN stays. */
template <typename T> __device__ inline T scaled(T x, uint8_t keep, double factor)
{
    typedef typename compute<T>::type C;
    return store<T>(load(x) * (keep ? (C)factor : 0));
}

/* Draws what is kept, and scales: for blocks of one element. */
template <typename T> __device__ void dropout(const dropout_args &args)
{
    constexpr int N = DROPOUT_GROUP(sizeof(T));
    T *out = (T *)args.out;
    const T *x = (const T *)args.x;
    const cuda_words from = words_of(args.words);
    for (int64_t i = first_element() * N; i < args.count; i += element_step() * N) {
        uint8_t keep[N];
        for (int k = 0; k < N; k += 4) {
            uint32_t words[4];
            draw_words(from, (i + k) / 4, words);
            for (int j = 0; j < 4; j++)
                keep[k + j] = words[j] < args.threshold;
        }
        if (args.grouped && i + N <= args.count) {
            T group[N];
            read_pieces(group, x + i);
            for (int k = 0; k < N; k++)
                group[k] = scaled(group[k], keep[k], args.factor);
            write_pieces(out + i, group);
            write_pieces(args.keep + i, keep);
            continue;
        }
        for (int k = 0; k < N && i + k < args.count; k++) {
            out[i + k] = scaled(x[i + k], keep[k], args.factor);
            args.keep[i + k] = keep[k];
        }
    }
}

/* The block of element i. */
__device__ inline int64_t block_of(const dropout_args &args, int64_t i)
{
    return args.block == 1           ? i
           : args.count <= INT32_MAX ? (uint32_t)i / (uint32_t)args.block
                                     : i / args.block;
}

template <typename T> __device__ void dropout_grad(const dropout_args &args)
{
    constexpr int N = DROPOUT_GROUP(sizeof(T));
    T *out = (T *)args.out;
    const T *x = (const T *)args.x;
    for (int64_t i = first_element() * N; i < args.count; i += element_step() * N) {
        if (args.grouped && i + N <= args.count) { /* a group is in one block, or one block each */
            T group[N];
            uint8_t keep[N];
            read_pieces(group, x + i);
            if (args.block == 1) {
                read_pieces(keep, (const uint8_t *)args.keep + i);
            } else {
                uint8_t one = args.keep[block_of(args, i)];
                for (int k = 0; k < N; k++)
                    keep[k] = one;
            }
            for (int k = 0; k < N; k++)
                group[k] = scaled(group[k], keep[k], args.factor);
            write_pieces(out + i, group);
            continue;
        }
        for (int k = 0; k < N && i + k < args.count; k++)
            out[i + k] = scaled(x[i + k], args.keep[block_of(args, i + k)], args.factor);
    }
}

#define DROPOUT(name, T)                                                                           \
    TD_KERNEL(dropout_##name, struct dropout_args)                                                 \
    {                                                                                              \
        dropout<T>(args);                                                                          \
    }                                                                                              \
    TD_KERNEL(dropout_grad_##name, struct dropout_args)                                            \
    {                                                                                              \
        dropout_grad<T>(args);                                                                     \
    }
EACH_FLOAT(DROPOUT)
