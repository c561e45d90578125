/* The transports between the ranks of a test. */
#ifndef TANDEM_TESTS_WAYS_H
#define TANDEM_TESTS_WAYS_H

#include <tandem/group.h>

#include <stdint.h>

struct way {
    const char *transport; /* TANDEM_TRANSPORT; NULL: not set */
    const char *hosts; /* a letter for each rank: by the same one on one host; NULL: all on one */
};

/** Shared memory, TCP, and two ranks on each host. */
extern const struct way shm, tcp, mixed;

/** Sets the environment so that td_init_process_group() takes this way. */
void take_way(const struct way *way);

/** Makes this process one of a world whose ranks reach each other so. 0: the usual timeout. */
void open_world(const struct way *way, int64_t timeout_ms);

/** An all_reduce of ones: how many ranks the group has. */
float sum_on(td_group *group);

#endif
