/* Socket communicators among the threads of one process, linked over loopback TCP. */
#ifndef TANDEM_TESTS_TCP_WORLD_H
#define TANDEM_TESTS_TCP_WORLD_H

#include "tcp/tcp_layout.h"

enum { MOST_RANKS = 16 };

struct seat {
    struct tcp_world *world;
    int rank;
    int size;
    struct td__tcp_comm *comm;
    uint64_t sequence; /* of the last call */
    const void *arg;
};

typedef void (*seat_fn)(struct seat *seat);

/** Runs `body` in `size` threads, each with a comm; `algorithm` may be NULL. Communicators are destroyed when
 *  all bodies have ended; one that destroys its own, and sets it to NULL, leaves early. */
void tcp_world_run(int size, const char *algorithm, seat_fn body, const void *arg);

/** The next call of the seat: a deadline of 20 s, group "test". */
struct td__operation seat_call(struct seat *seat, td_op_kind kind, size_t count, td_dtype dtype);

/** How many links there have been in this world. */
int tcp_world_links(struct seat *seat);

#endif
