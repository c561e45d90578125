/* A crowd of strangers: a process that holds many connections to a server of the job, and says nothing,
 * or something wrong, on each of them. Those that the server ends it opens again. */
#ifndef TANDEM_TESTS_CROWD_H
#define TANDEM_TESTS_CROWD_H

#include <stdatomic.h>
#include <stdint.h>
#include <sys/types.h>

enum manner {
    SILENT,
    LEAVING,      /* at once, without a word */
    GARBAGE,      /* a page of it */
    HALF_A_HELLO, /* that begins as a right one does */
    WRONG_SECRET,
    REPLAYED, /* one right hello, overheard, again and again */
    MANNERS,
};

struct crowd {
    int ports[8]; /* of servers at 127.0.0.1; 0 ends the list */
    int count;    /* connections at a time, over all ports */
    const char *purpose[8];
    char secret[80]; /* of the job, for the hello that is overheard */
    int manner;      /* MANNERS: all of them in turn */
    struct crowd_state *state;
    pid_t pid;
};

/* Shared with the process of the crowd. */
struct crowd_state {
    atomic_int held;    /* connections that stand at the moment */
    atomic_long opened; /* so far */
    atomic_long
        answers;        /* bytes that came back, other than the one challenge to a replayed hello */
    atomic_long cpu_us; /* that the crowd has used, by the end */
    atomic_long attempts_wanted; /* it ends after that many; 0: never */
};

/** Starts it; returns when all connections were opened once. */
void crowd_start(struct crowd *crowd);

/** Ends it, and checks that no server has answered. */
void crowd_stop(struct crowd *crowd);

/** How many there should be: TD_TEST_STRANGERS, or `usual`. Skips the test where there are not
 *  enough descriptors. */
int crowd_size(int usual);

#endif
