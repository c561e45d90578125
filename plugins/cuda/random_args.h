/* Arguments of the kernels in random.cu. */
#ifndef RANDOM_ARGS_H
#define RANDOM_ARGS_H

#include "cuda/cuda_args.h"

/* Words of a generator: td_generator_take() has reserved them. */
struct cuda_words {
    uint64_t seed, offset;
    const uint64_t *captured; /* in a graph: the address of these two for each launch; else NULL */
};

struct random_args {
    struct cuda_space space; /* in the order of indices */
    void *out;
    struct cuda_words words;
    int32_t grouped;    /* out is contiguous, and what one block of words becomes is aligned */
    double from, range; /* of uniform numbers; mean and standard deviation of normal ones */
    uint64_t threshold; /* of ones among zeros: words below it */
    uint64_t base;      /* of integers */
    uint64_t modulus;   /* … 0: 2^64 */
};

/* Elements that a thread takes at once in dropout: 16 bytes, but whole blocks of 4 words. */
#define DROPOUT_GROUP(bytes) ((bytes) == 2 ? 8 : 4)

struct dropout_args {
    void *out;
    const void *x;
    unsigned char *keep;
    int64_t count, block; /* x[i] goes with keep[i / block] */
    struct cuda_words words;
    uint64_t threshold;
    double factor;
    int32_t grouped; /* all are aligned */
};

#endif
