/* Random numbers: the same ones as PyTorch draws on a CPU from the same seed.
 *
 *     td_manual_seed(1234);
 *     td_tensor *w = td_empty(TD_SHAPE(10, 784), TD_F32, NULL);
 *     td_uniform_(w, -0.05, 0.05, NULL);
 *
 * A generator is a Mersenne Twister (mt19937) and, at times, the cached half of a pair of normal
 * numbers. Each function that draws takes a generator; NULL is the default one.
 *
 * The numbers are part of the contract: for f32 and f64, each function writes what PyTorch 1.13
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

/** The default generator. Its initial seed is the same in every process, so a program that sets
 * none is repeatable. */
TD_API td_generator *td_default_generator(void);

/** Seeds the default generator. Only the lower 32 bits of a seed are used. */
TD_API void td_manual_seed(uint64_t seed);

/** A new generator. NULL without memory. */
TD_API td_generator *td_generator_create(uint64_t seed);

/** Frees it. NULL and the default generator are ignored. */
TD_API void td_generator_destroy(td_generator *generator);

/** Seeds it anew. */
TD_API void td_generator_manual_seed(td_generator *generator, uint64_t seed);

/** The last seed that it was given. */
TD_API uint64_t td_generator_initial_seed(td_generator *generator);

/** The bytes of a state: those of torch.get_rng_state(). */
#define TD_GENERATOR_STATE_SIZE 5056

/** Writes the state. */
TD_API void td_generator_get_state(td_generator *generator, void *state);

/** Restores a state of td_generator_get_state() or of torch.get_rng_state(). TD_ERR_INVALID, and
 *  nothing changed, if the bytes are no such state. */
TD_API td_status td_generator_set_state(td_generator *generator, const void *state, size_t size);

/* ---- Filling a tensor -------------------------------------------------------------------------
 *
 * Each writes all elements of `tensor`, of any strides, in memory order where that differs from the
 * order of indices, as PyTorch does. TD_ERR_INVALID (nothing was written or drawn) if the tensor is
 * NULL, its dtype is not supported, elements share memory, or an argument is out of range.
 *
 * Uniform and normal numbers are for f32, f64, f16 and bf16; the others for all but complex
 * ones. */

/** Uniform in [from, to). */
TD_API td_status td_uniform_(td_tensor *tensor, double from, double to, td_generator *generator);

/** Normal. Contiguous tensors of 16 elements and more are filled 16 at a time by another formula
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

/* ---- Making one ------------------------------------------------------------------------------- */

/** Uniform in [0, 1), from the default generator. */
TD_API td_tensor *td_rand(const int64_t *shape, int ndim, td_dtype dtype, td_device *device);

/** Normal, mean 0 and standard deviation 1, from the default generator. */
TD_API td_tensor *td_randn(const int64_t *shape, int ndim, td_dtype dtype, td_device *device);

/** Integers from `low` to `high` - 1, from the default generator. */
TD_API td_tensor *td_randint(int64_t low, int64_t high, const int64_t *shape, int ndim,
                             td_dtype dtype, td_device *device);

/** The numbers from 0 to n - 1 in random order, from the default generator or from another one. */
TD_API td_tensor *td_randperm(int64_t n, td_dtype dtype, td_device *device);
TD_API td_tensor *td_randperm_with(int64_t n, td_dtype dtype, td_device *device,
                                   td_generator *generator);

#ifdef __cplusplus
}
#endif

#endif
