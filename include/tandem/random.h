/* Random numbers: on the host the same ones as PyTorch draws on a CPU from the same seed.
 *
 *     td_manual_seed(1234);
 *     td_tensor *w = td_empty(TD_SHAPE(10, 784), TD_F32, NULL);
 *     td_uniform_(w, -0.05, 0.05, NULL);
 *
 * A generator belongs to a device. The host's, which also those devices use whose memory is the host's ("cpu:0"), is a
 * Mersenne Twister (mt19937) and, at times, the cached half of a pair of normal numbers. Those of accelerators are counters
 * (Philox), described below. Each function that draws takes a generator of the tensor's device; NULL is the device's
 * default one. One of another device is TD_ERR_INVALID, with the names of both.
 *
 * The numbers are part of the contract: on the host, for f32 and f64, each function writes what PyTorch 1.13
 * writes with AVX2, bit for bit. Normal f64 numbers use the C library's log, sin and cos, and
 * depend on it.
 *
 * Threads. A generator has a lock: a call draws all of its numbers without interleaving. */
#ifndef TANDEM_RANDOM_H
#define TANDEM_RANDOM_H

#include <tandem/tensor.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Generators ------------------------------------------------------------------------------ */

typedef struct td_generator td_generator;

/** The default generator of a device; NULL, with the last error set, where there is no such device. Its seed is the last
 *  one of td_manual_seed(); before, it is the same in every process, so that a program that sets none is repeatable. In
 *  the functions below a NULL generator is the host's default one. */
TD_API td_generator *td_default_generator(td_device *device);

/** Seeds the default generators of all devices, also of those that are used later. On the host only the lower 32 bits of
 *  a seed are used. */
TD_API void td_manual_seed(uint64_t seed);

/** A new generator of a device. NULL without memory, and where there is no such device. */
TD_API td_generator *td_generator_create(uint64_t seed, td_device *device);

/** Frees it. NULL and default generators are ignored. */
TD_API void td_generator_destroy(td_generator *generator);

/** Its device; for those of "cpu:0" and the like, the one that it was created for. */
TD_API td_device *td_generator_device(const td_generator *generator);

/** Seeds it anew. */
TD_API void td_generator_manual_seed(td_generator *generator, uint64_t seed);

/** The last seed that it was given. */
TD_API uint64_t td_generator_initial_seed(td_generator *generator);

/** The bytes of a state of the host's generators: those of torch.get_rng_state(). */
#define TD_GENERATOR_STATE_SIZE 5056

/** The bytes of a state of this generator: TD_GENERATOR_STATE_SIZE on the host, 16 for accelerators (the seed and the
 *  offset, little-endian). */
TD_API size_t td_generator_state_size(td_generator *generator);

/** Writes the state. TD_ERR_INVALID, and nothing written, unless `size` is td_generator_state_size(). */
TD_API td_status td_generator_get_state(td_generator *generator, void *state, size_t size);

/** Restores a state of td_generator_get_state(), on the host also of torch.get_rng_state(). TD_ERR_INVALID, and
 *  nothing changed, if the bytes are no such state. */
TD_API td_status td_generator_set_state(td_generator *generator, const void *state, size_t size);

/* ---- Generators of accelerators ----------------------------------------------------------------
 *
 * For authors of devices: the numbers of Philox 4x32-10, so that all devices draw the same ones from one seed.
 *
 * A generator is a seed and an offset. A kernel that needs `words` words of 32 bits reserves them when it is called, and
 * may compute them later, each on its own: word w is word w % 4 of the block with the counter (b, b >> 32, 0, 0), where
 * b = offset + w / 4, and the key (seed, seed >> 32), in words of 32 bits. Element i, in the order of indices whatever
 * the strides are, uses word i; where it needs 64 bits it uses words 2i (the upper half) and 2i + 1, and the call
 * reserves twice as many. Of a word the upper bits are used:
 *
 *     uniform     f32: u = (word >> 8) 2^-24; f16 and bf16: (word >> 21) 2^-11 and (word >> 24) 2^-8; f64, 64 bits:
 *                 u = (bits >> 11) 2^-53. The number is fma(u, to - from, from), where `from`, `to` and their difference are
 *                 rounded to the dtype; in f32 for the halves, which are then rounded.
 *     normal      Of elements 2k and 2k + 1, u and v as above (f32 also for halves) are a point:
 *                     r = sqrt(-2 log(1 - u)), a = 2 pi v; element 2k: mean + std r cos(a), and 2k + 1: mean + std r sin(a)
 *                 After an odd number of elements the last point is used for one. Here devices may differ by the roundings
 *                 of log, sin and cos in the dtype (f32 for halves).
 *     bernoulli   1 where word 2^-32 < p, computed exactly (in f64), and so is what dropout keeps, with 1 - p.
 *     ranges      Of up to 2^32 numbers: (word * range) >> 32. Of more, 64 bits: the upper half of the product of 128 bits;
 *                 of 2^64: the bits.
 *
 * Each call begins with a new block. A call without elements reserves nothing. */

/** Reserves ceil(words / 4) blocks: returns the seed, and the offset before. TD_ERR_INVALID for the host's. */
TD_API td_status td_generator_take(td_generator *generator, int64_t words, uint64_t *seed,
                                   uint64_t *offset);

/** The same for kernels of a device that has graphs (td_graph_capture()). While one is being captured *captured is an
 *  address of the device, where the kernel finds the seed and the offset of each launch, and uses them instead; else it is
 *  NULL. In a capture td_generator_take() is TD_ERR_STATE. */
TD_API td_status td_generator_take_captured(td_generator *generator, int64_t words, uint64_t *seed,
                                            uint64_t *offset, const uint64_t **captured);

/* ---- Filling a tensor -------------------------------------------------------------------------
 *
 * Each writes all elements of `tensor`, of any strides; on the host in memory order where that differs from the
 * order of indices, as PyTorch does. TD_ERR_INVALID (nothing was written or drawn) if the tensor is
 * NULL, its dtype is not supported, elements share memory, or an argument is out of range, or the generator is
 * of another device.
 *
 * Uniform and normal numbers are for f32, f64, f16 and bf16; the others for all but complex
 * ones. */

/** Uniform in [from, to). */
TD_API td_status td_uniform_(td_tensor *tensor, double from, double to, td_generator *generator);

/** Normal. On the host, contiguous tensors of 16 elements and more are filled 16 at a time by another formula
 *  than others; f16 and bf16 are the numbers of f32, rounded. */
TD_API td_status td_normal_(td_tensor *tensor, double mean, double std, td_generator *generator);

/** 1 with the probability `p`, otherwise 0. */
TD_API td_status td_bernoulli_(td_tensor *tensor, double p, td_generator *generator);

/** Integers from 0 to the maximum of the dtype; for a floating-point dtype, to the largest up to
 *  which it holds every integer (2^24 for f32); 0 or 1 for bool. */
TD_API td_status td_random_(td_tensor *tensor, td_generator *generator);

/** Integers from `from` to `to` - 1, which the dtype must hold exactly. */
TD_API td_status td_random_range_(td_tensor *tensor, int64_t from, int64_t to,
                                  td_generator *generator);

/* ---- Making one: with the default generator of the device ---------------------------------------- */

/** Uniform in [0, 1). */
TD_API td_tensor *td_rand(const int64_t *shape, int ndim, td_dtype dtype, td_device *device);

/** Normal, mean 0 and standard deviation 1. */
TD_API td_tensor *td_randn(const int64_t *shape, int ndim, td_dtype dtype, td_device *device);

/** Integers from `low` to `high` - 1. */
TD_API td_tensor *td_randint(int64_t low, int64_t high, const int64_t *shape, int ndim,
                             td_dtype dtype, td_device *device);

/** The numbers from 0 to n - 1 in random order: made on the host, and moved to the device. From the host's default
 *  generator, or from another one of the host or of the device. */
TD_API td_tensor *td_randperm(int64_t n, td_dtype dtype, td_device *device);
TD_API td_tensor *td_randperm_with(int64_t n, td_dtype dtype, td_device *device,
                                   td_generator *generator);

#ifdef __cplusplus
}
#endif

#endif
