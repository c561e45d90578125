/* Philox 4x32-10, the generator of accelerators: numbers from a seed and a counter, so that each element of a tensor can
 * be computed on its own. random.h says which words become which numbers; these are the host's, which every device's
 * agree with. */
#ifndef TD_TENSOR_PHILOX_H
#define TD_TENSOR_PHILOX_H

#include "tensor/random_distributions.h"

/** The four words of a counter, under a key. */
void td__philox(const uint32_t counter[4], const uint32_t key[2], uint32_t words[4]);

/** Words number `first` to `first` + `count` - 1 of what td_generator_take() has reserved. */
void td__philox_words(uint64_t seed, uint64_t offset, int64_t first, uint32_t *words,
                      int64_t count);

/** Whether each element takes two words, rather than one. */
bool td__takes_two_words(const struct td__distribution *distribution);

/** The numbers of a distribution for elements `first` to `first` + `count` - 1, at most TD__RANDOM_BLOCK; `first` is even. */
void td__philox_numbers(const struct td__distribution *distribution, uint64_t seed, uint64_t offset,
                        int64_t first, void *out, int64_t count);

#endif
