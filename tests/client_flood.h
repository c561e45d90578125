/* A flood of unauthenticated clients: a process that holds many connections to listeners of the job, and sends
 * nothing, or invalid data, on each of them. It reopens those that the listener closes. */
#ifndef TANDEM_TESTS_CLIENT_FLOOD_H
#define TANDEM_TESTS_CLIENT_FLOOD_H

#include <stdatomic.h>
#include <stdint.h>
#include <sys/types.h>

enum manner {
    SILENT,
    LEAVING,      /* closes at once, without sending */
    GARBAGE,      /* a page of it */
    HALF_A_HELLO, /* the beginning of a valid one */
    WRONG_SECRET,
    REPLAYED, /* one valid hello that was recorded, again and again */
    MANNERS,
};

struct client_flood {
    int ports[8]; /* of servers at 127.0.0.1; 0 ends the list */
    int count;    /* connections at a time, over all ports */
    const char *purpose[8];
    char secret[80]; /* of the job, for the recorded hello */
    int manner;      /* MANNERS: all of them in turn */
    struct client_flood_state *state;
    pid_t pid;
};

/* Shared with the flooding process. */
struct client_flood_state {
    atomic_int held;     /* connections that are open now */
    atomic_long opened;  /* so far */
    atomic_long answers; /* bytes received, other than the one challenge to a replayed hello */
    atomic_long cpu_us;  /* used by the flooding process, at its end */
    atomic_long attempts_wanted; /* it ends after that many; 0: never */
};

/** Starts it; returns when all connections were opened once. */
void client_flood_start(struct client_flood *flood);

/** Ends it, and checks that no listener has answered. */
void client_flood_stop(struct client_flood *flood);

/** How many clients: TD_TEST_CLIENTS, or `usual`. Skips the test where there are not
 *  enough descriptors. */
int client_flood_size(int usual);

#endif
