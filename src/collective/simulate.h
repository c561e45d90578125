/* Estimates the time of an algorithm on a network model, for up to 1,000,000 ranks. */
#ifndef TD_COLLECTIVE_SIMULATE_H
#define TD_COLLECTIVE_SIMULATE_H

#include "collective/schedule.h"

/* The network model: costs in seconds. */
struct td__network {
    double latency;     /* of the first transfer of a round */
    double transfer;    /* of each further transfer of the round */
    double byte;        /* sent */
    double reduce_byte; /* reduced */
    double copy_byte;   /* copied */
};

struct td__price {
    double seconds;
    int32_t rounds;
    double sent;      /* bytes that the busiest rank sends */
    double transfers; /* that the busiest rank sends */
};

/**
 * The price of `algorithm` for `size` ranks and a vector of `bytes` (of all ranks' parts together if each has its
 * own). The model is synchronous: each round takes as long as its busiest rank. Of more than 2048 ranks a sample
 * is simulated. False if out of memory.
 */
bool td__simulate(const struct td__algorithm *algorithm, int32_t size, double bytes,
                  const struct td__network *network, struct td__price *price);

#endif
