/* Pricing schedules; see simulate.h. */
#include "collective/simulate.h"

#include "collective/tree.h"

#include <stdlib.h>

enum { ALL_PRICED = 2048, SAMPLE = 16 };

/* What one rank does in one round. */
struct work {
    double sent, received, reduced, copied;
    int32_t sends, receives;
};

static double cost(const struct work *work, const struct td__network *network)
{
    int32_t transfers = work->sends > work->receives ? work->sends : work->receives;
    double bytes = work->sent > work->received ? work->sent : work->received;
    double seconds = bytes * network->byte + work->reduced * network->reduce_byte +
                     work->copied * network->copy_byte;
    if (transfers)
        seconds += network->latency + (transfers - 1) * network->transfer;
    return seconds;
}

static void count_step(struct work *work, const struct td__step *step, double block_bytes)
{
    double bytes = step->count * block_bytes;
    switch (step->kind) {
    case TD__STEP_SEND:
        work->sent += bytes;
        work->sends++;
        break;
    case TD__STEP_RECV_REDUCE:
        work->reduced += bytes;
        /* fall through */
    case TD__STEP_RECV:
        work->received += bytes;
        work->receives++;
        break;
    case TD__STEP_COPY:
        work->copied += bytes;
        break;
    case TD__STEP_REDUCE:
        work->reduced += bytes;
        break;
    }
}

/* Raises the time of each round to that of this rank. */
static void add_rank(const struct td__schedule *schedule, double bytes,
                     const struct td__network *network, double *rounds, struct td__price *price)
{
    double block_bytes = schedule->blocks ? bytes / schedule->blocks : 0, sent = 0, transfers = 0;
    for (size_t i = 0; i < schedule->count;) {
        int32_t round = schedule->steps[i].round;
        struct work work = {0};
        for (; i < schedule->count && schedule->steps[i].round == round; i++)
            count_step(&work, &schedule->steps[i], block_bytes);
        double seconds = cost(&work, network);
        if (seconds > rounds[round])
            rounds[round] = seconds;
        sent += work.sent;
        transfers += work.sends;
    }
    if (sent > price->sent)
        price->sent = sent;
    if (transfers > price->transfers)
        price->transfers = transfers;
}

/* Whether a rank is simulated. In a large group, of an algorithm that is not symmetric, those at the ends, around
 * the middle and around the largest power of two, where the busiest ranks of the trees are. */
static bool is_priced(const struct td__algorithm *algorithm, int32_t rank, int32_t size)
{
    if (algorithm->symmetric)
        return rank == 0;
    int32_t power = (int32_t)1 << td__log2(size), middle = size / 2;
    return size <= ALL_PRICED || rank < SAMPLE || rank >= size - SAMPLE ||
           abs(rank - power) < SAMPLE || abs(rank - power / 2) < SAMPLE ||
           abs(rank - middle) < SAMPLE;
}

bool td__simulate(const struct td__algorithm *algorithm, int32_t size, double bytes,
                  const struct td__network *network, struct td__price *price)
{
    double *rounds = NULL;
    *price = (struct td__price){0};
    for (int32_t rank = 0; rank < size; rank++) {
        if (!is_priced(algorithm, rank, size))
            continue;
        struct td__schedule schedule;
        struct td__plan plan = {.rank = rank, .size = size, .root = 0};
        bool made = td__schedule_build(algorithm, &plan, &schedule);
        if (made && !rounds) {
            price->rounds = schedule.rounds;
            rounds = calloc((size_t)schedule.rounds + 1, sizeof *rounds);
        }
        if (made && rounds)
            add_rank(&schedule, bytes, network, rounds, price);
        td__schedule_free(&schedule);
        if (!made || !rounds) {
            free(rounds);
            return false;
        }
    }
    for (int32_t round = 0; round < price->rounds; round++)
        price->seconds += rounds[round];
    free(rounds);
    return true;
}
