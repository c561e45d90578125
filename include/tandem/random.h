/* Random numbers: the same ones as PyTorch draws on a CPU from the same seed.
 *
 *     td_manual_seed(1234);
 *     td_tensor *w = td_empty(TD_SHAPE(10, 784), TD_F32);
 *     td_uniform_(w, -0.05, 0.05, NULL);
 *
 * A generator is a Mersenne Twister (mt19937) and, now and then, half of a pair of normal numbers
 * that was not asked for yet. Each function that draws takes a generator; NULL is the default one.
 *
 * Which numbers come is a part of the contract: for f32 and f64, each function here writes what
 * PyTorch 1.13 writes, bit for bit, on a processor with AVX2. The f64 normal numbers use the C
 * library's log, sin and cos, and are as equal as those are.
 *
 * Threads. A generator has a lock: a call draws all of its numbers in one piece. Which thread comes
 * first is the program's business. */
#ifndef TANDEM_RANDOM_H
#define TANDEM_RANDOM_H

#include <tandem/tensor.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Generators ------------------------------------------------------------------------------ */

typedef struct td_generator td_generator;

/** The default generator. It lives as long as the process, and begins with the same seed in each,
 * so that a program that sets none is repeatable. */
TD_API td_generator *td_default_generator(void);

/** Begins the default generator anew. Only the lower 32 bits of a seed count. */
TD_API void td_manual_seed(uint64_t seed);

/** A generator of one's own. NULL without memory. */
TD_API td_generator *td_generator_create(uint64_t seed);

/** Frees it. NULL is fine; the default generator is left alone. */
TD_API void td_generator_destroy(td_generator *generator);

/** Begins anew with `seed`: what was drawn before plays no part any more. */
TD_API void td_generator_manual_seed(td_generator *generator, uint64_t seed);

/** The last seed that it was given. */
TD_API uint64_t td_generator_initial_seed(td_generator *generator);

/** The bytes of a state: those of torch.get_rng_state(). */
#define TD_GENERATOR_STATE_SIZE 5056

/** Writes the state, with which the same numbers follow again. */
TD_API void td_generator_get_state(td_generator *generator, void *state);

/** Goes on from a state of td_generator_get_state() or of torch.get_rng_state(). TD_ERR_INVALID,
 *  and nothing changed, where the bytes are no such state. */
TD_API td_status td_generator_set_state(td_generator *generator, const void *state, size_t size);

/* ---- Filling a tensor -------------------------------------------------------------------------
 *
 * Each writes all elements of `tensor`, whatever its strides, in the order of their place in memory
 * where that differs from the order of their indices, as PyTorch does. TD_ERR_INVALID (nothing was
 * written or drawn) where the tensor is NULL, its dtype does not fit, elements share memory, or a
 * number is out of range.
 *
 * Uniform and normal numbers are for f32, f64, f16 and bf16; the others for all but complex ones. */

/** Uniform in [from, to). */
TD_API td_status td_uniform_(td_tensor *tensor, double from, double to, td_generator *generator);

/** Normal. Contiguous tensors of 16 elements and more are filled 16 at a time by another formula
 *  than others; f16 and bf16 are the numbers of f32, rounded. */
TD_API td_status td_normal_(td_tensor *tensor, double mean, double std, td_generator *generator);

/** 1 with the probability `p`, otherwise 0. */
TD_API td_status td_bernoulli_(td_tensor *tensor, double p, td_generator *generator);

/** Integers from 0 to the largest one of the dtype; for a floating-point dtype, up to which it
 *  holds each integer (2^24 for f32); 0 or 1 for bool. */
TD_API td_status td_random_(td_tensor *tensor, td_generator *generator);

/** Integers from `from` to `to` - 1, which the dtype must hold exactly. */
TD_API td_status td_random_range_(td_tensor *tensor, int64_t from, int64_t to,
                                  td_generator *generator);

/* ---- Making one ------------------------------------------------------------------------------- */

/** Uniform in [0, 1), from the default generator. */
TD_API td_tensor *td_rand(const int64_t *shape, int ndim, td_dtype dtype);

/** Normal, mean 0 and standard deviation 1, from the default generator. */
TD_API td_tensor *td_randn(const int64_t *shape, int ndim, td_dtype dtype);

/** Integers from `low` to `high` - 1, from the default generator. */
TD_API td_tensor *td_randint(int64_t low, int64_t high, const int64_t *shape, int ndim,
                             td_dtype dtype);

/** The numbers from 0 to n - 1 in random order, from the default generator or from another one. */
TD_API td_tensor *td_randperm(int64_t n, td_dtype dtype);
TD_API td_tensor *td_randperm_with(int64_t n, td_dtype dtype, td_generator *generator);

#ifdef __cplusplus
}
#endif

#endif
