/* Prices a schedule on a network that one does not have, up to 100,000 ranks. */
#ifndef TD_COLLECTIVE_SIMULATE_H
#define TD_COLLECTIVE_SIMULATE_H

#include "collective/schedule.h"

/* What things cost, in seconds. */
struct td__network {
    double latency;     /* from the start of a message to its first byte */
    double message;     /* more for each further message of a round */
    double byte;        /* on the wire */
    double reduce_byte; /* to reduce */
    double copy_byte;   /* to copy */
};

struct td__price {
    double seconds;
    int32_t rounds;
    double sent;     /* bytes that the busiest rank sends */
    double messages; /* that the busiest rank sends */
};

/**
 * The price of `algorithm` for `size` ranks and a vector of `bytes` (all ranks' parts together where
 * each has its own). Rounds are taken to be in step: each costs what its busiest rank takes. Of more
 * than 2048 ranks a sample is looked at. False without memory.
 */
bool td__simulate(const struct td__algorithm *algorithm, int32_t size, double bytes,
                  const struct td__network *network, struct td__price *price);

#endif
