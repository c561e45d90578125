/* Inputs of collectives that every rank can compute, and what reductions must make of them. */
#ifndef TANDEM_TESTS_COLLECTIVE_REFERENCE_H
#define TANDEM_TESTS_COLLECTIVE_REFERENCE_H

#include "reduce/reduction.h"

#include <tandem/group.h>

/** A number that looks like any other. */
uint64_t hash_word(uint64_t word);
uint64_t hash_bytes(const void *data, size_t size);

/** Bytes `first` to `first + size` of the input of `rank` in case `number`: numbers of moderate size,
 *  and sums of which depend on their order. */
void fill_input(td_dtype dtype, uint64_t number, int rank, size_t first, size_t size, void *to);

/** Whether they are there; else *wrong is the place of the first byte that is not. */
bool is_input(td_dtype dtype, uint64_t number, int rank, size_t first, size_t size,
              const void *there, size_t *wrong);

/** An operation that is commutative, and gives other bits in another order. */
void own_combine(void *acc, const void *other, size_t count, td_dtype dtype);

/** The factor of a rank's own in a sum. */
double factor_of(int rank);

struct reference {
    struct td__reduction reduction;
    bool scaled; /* by factor_of() each rank */
    int size;
    td_group *group; /* whose ranks have their factors by their ranks in the world */
    uint64_t number;
    size_t first, count; /* elements of the inputs */
    const char *hosts;   /* NULL: one tree; else one for each host, and one over these */
};

/** Puts `count` elements into `result`. */
void reference_expect(const struct reference *reference, void *result);

/** Whether the order does not matter. */
bool is_exact(const struct td__reduction *reduction);

/** Whether all are equal up to what rounding in another order may do. */
bool is_close(td_dtype dtype, const void *a, const void *b, size_t count);

#endif
