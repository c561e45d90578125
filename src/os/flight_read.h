/* Reading the flight recorder's pages, which are another process's bytes, or a file's.
 *
 * A snapshot is a copy; td__flight_read_head() and td__flight_read_log() make plain structs of it, in which
 * every number is in its range, every text is printable, and every time is of the wall clock. */
#ifndef TD_OS_FLIGHT_READ_H
#define TD_OS_FLIGHT_READ_H

#include "os/flight.h"

/** The reader's own time, in all ways in which a page can tell it. */
struct td__flight_now {
    uint64_t ticks; /* 0 where this machine has no steady counter */
    int64_t ns;     /* CLOCK_MONOTONIC */
    int64_t wall;   /* CLOCK_REALTIME minus CLOCK_MONOTONIC */
    uint64_t boot;
};

void td__flight_now(struct td__flight_now *now);

static inline int64_t td__flight_wall_ns(const struct td__flight_now *now)
{
    return now->ns + now->wall;
}

struct td__flight_book_info {
    int slots; /* that are there in full */
    int pid;
    int nnodes, node_rank, world_size, attempt, max_restarts;
    int64_t started_ns;
    char host[TD__FLIGHT_HOST + 1];
    char run_id[TD__FLIGHT_HOST + 1];
    char command[257];
};

struct td__flight_call {
    uint64_t number;
    uint64_t sequence;
    uint64_t count;
    int64_t queued_ns, started_ns, ended_ns; /* 0: not yet */
    enum td__flight_kind kind;
    enum td__flight_state state;
    bool posted; /* the caller went on */
    bool uneven; /* parts of different sizes; the count is that of the whole */
    bool waited; /* a thread of the program waits for it */
    td_dtype dtype;
    int rank;   /* root, or the other side; -1: none, any */
    int detail; /* tag, or td_reduce_op */
    int group;  /* 0 to TD__FLIGHT_GROUPS-1 */
    char label[TD__FLIGHT_LABEL + 1];
};

struct td__flight_page {
    /* The worker's. */
    enum td__flight_phase phase;
    int64_t phase_ns;
    int rank, size;
    int pid;   /* 0: it has closed the page, or never came */
    bool here; /* written on this machine, since it was started */
    char host[TD__FLIGHT_HOST + 1];
    td_status failure;
    int64_t failure_ns;
    uint64_t failure_number; /* of the entry, 0: none */
    char sentence[TD__FLIGHT_SENTENCE + 1];
    uint64_t keys[TD__FLIGHT_GROUPS]; /* 0: no such group any more */
    char groups[TD__FLIGHT_GROUPS][TD__FLIGHT_NAME + 1];
    uint64_t total; /* operations begun so far */

    /* The launcher's. */
    int started_rank, started_pid; /* pid 0: there was no launcher */
    int spare;                     /* its number; -1: it is none */
    bool waits;                    /* a spare, for a rank */
    int64_t started_ns, ended_ns;  /* 0: not yet */
    int wait_status;
    char ending[TD__FLIGHT_ENDING + 1];

    int64_t seen_ns; /* the latest moment of which the page knows */
    int count;
    struct td__flight_call calls[TD__FLIGHT_ENTRIES]; /* the oldest first */
};

/** Takes apart the head of a book. TD_ERR_INVALID where it is none. */
td_status td__flight_read_head(const void *bytes, size_t size, struct td__flight_book_info *info);

/** Takes apart one log of a book whose head was read well: `slot` is below its slots. */
void td__flight_read_log(const void *bytes, size_t size, int slot, const struct td__flight_now *now,
                         struct td__flight_page *page);

/** A copy of a whole book that others write to, for free(); NULL without memory. */
void *td__flight_book_copy(const struct td__flight_book *book);

/** The same of the log that this process writes, while it does. */
void td__flight_log_read(const struct td__flight_log *log, const struct td__flight_now *now,
                         struct td__flight_page *page);

/** "all_reduce #17 of 4 f32", without its group. */
void td__flight_describe(const struct td__flight_call *call, char text[TD__FLIGHT_TEXT]);

const char *td__flight_kind_name(enum td__flight_kind kind);
const char *td__flight_state_name(enum td__flight_state state);

#endif
