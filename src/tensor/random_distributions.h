/* Distributions: how the words of a generator become random numbers. */
#ifndef TD_TENSOR_RANDOM_DISTRIBUTIONS_H
#define TD_TENSOR_RANDOM_DISTRIBUTIONS_H

#include "tensor/random_internal.h"

/** How many numbers are drawn at a time, at most; a multiple of the group of normal numbers. */
enum { TD__RANDOM_BLOCK = 512, TD__NORMAL_GROUP = 16 };

enum td__distribution_kind { TD__UNIFORM, TD__NORMAL, TD__BERNOULLI, TD__INTEGERS };

struct td__distribution {
    enum td__distribution_kind kind;
    td_dtype dtype;
    double from, range; /* of uniform numbers; mean and standard deviation of normal ones */
    double p;           /* of ones among zeros */
    uint64_t modulus;   /* of integers; 0: all 64 bits */
    uint64_t base;      /* what is added to them */
    bool wide;          /* mt19937: each takes 64 bits of the generator */
};

/* ---- From the Mersenne Twister. Each writes `count` numbers, at most TD__RANDOM_BLOCK; the generator is locked -------- */

/** Uniform in [from, from + range). */
void td__draw_uniform(td_generator *generator, const struct td__distribution *distribution,
                      void *out, int64_t count);

/** Normal, one at a time: computed in pairs, of which the generator keeps the second for the next call. */
void td__draw_normal(td_generator *generator, const struct td__distribution *distribution,
                     void *out, int64_t count);

/** Normal, in groups of 16; `count` is a multiple. */
void td__draw_normal_groups(td_generator *generator, const struct td__distribution *distribution,
                            void *out, int64_t count);

/** base + word % modulus. */
void td__draw_integers(td_generator *generator, const struct td__distribution *distribution,
                       void *out, int64_t count);

/** 1 with the probability p, otherwise 0. */
void td__draw_bernoulli(td_generator *generator, const struct td__distribution *distribution,
                        void *out, int64_t count);

/** A floating-point dtype holds each integer exactly up to 2 to the power of this. */
int td__float_digits(td_dtype dtype);

/** Rounded as a floating-point dtype holds it (random.c). */
double td__as_dtype(td_dtype dtype, double x);

/** The bits of `x` in f16 or bf16. */
uint16_t td__to_half(td_dtype dtype, float x);

/** Writes element `i`, an integer that the dtype holds exactly; a negative one as its two's
 *  complement. */
void td__put_integer(void *out, td_dtype dtype, int64_t i, uint64_t value);

#endif
