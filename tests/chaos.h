/* Fault injection: ranks run random operations, one of them (the victim) gets a fault, and the others must notice. In
 * some rounds the operations are collectives and messages, in others remote calls.
 *
 *     chaos.c             the command line, the rounds, the summary
 *     chaos_plan.c        what happens in a round: a pure function of the seed and the round's number
 *     chaos_host.c        starts the ranks of a round, injects the fault, and checks the outcome (chaos_host.h)
 *     chaos_network.c     network namespaces, and cables that can be cut
 *     chaos_left.c        what a round has left behind
 *     chaos_rank.c        one rank: begins, runs its lanes, leaves
 *     chaos_recovery.c    what survivors do then: shrink the group, also while another one dies, and grow it
 *     chaos_operation.c   the operations of a rank, and their results (chaos_job.h)
 *     chaos_pattern.c     the data: every rank knows the data of all ranks, so each result is known in advance
 *     chaos_rpc.h         rounds over remote calls
 *
 * The host and the ranks share one page of memory (struct page). Every rank has two lanes, threads that
 * run a sequence of operations each: the first on the world and some groups, the second on a group of its
 * own. An operation that fails must fail because of the victim, and must say so. */
#ifndef TANDEM_TESTS_CHAOS_H
#define TANDEM_TESTS_CHAOS_H

#include "base/clock.h"

#include <tandem/group.h>

#include <stdatomic.h>
#include <sys/types.h>

enum {
    MAX_RANKS = 8,
    LANES = 2,
    MAX_GROUPS = 5,    /* the first is the world, the last one the second lane's */
    REST = MAX_GROUPS, /* the number of the group that is left after a loss */
    MAX_OPERATIONS = 80,
    COMPLAINT = 900,
    MAX_DETECTIONS = 16,
};

/* ---- The plan -------------------------------------------------------------------------------- */

enum chaos_way { WAY_SHM, WAY_TCP, WAY_HOSTS, WAY_BACKEND, WAY_SPACES, WAYS };

enum fault {
    FAULT_KILL,  /* it ends in some way, in the middle of everything */
    FAULT_EARLY, /* it ends before or while the world is made */
    FAULT_LATE,  /* it ends while it leaves */
    FAULT_PAUSE, /* it is stopped for a while: no rank should notice */
    FAULT_STOP,  /* it is stopped for good: the timeout names it */
    FAULT_LEAVE, /* it leaves in order, and the others go on */
    FAULT_CUT,   /* its network is cut */
    FAULT_ABORT, /* it gives a group up */
    FAULTS,
};

/* What the survivors do. */
enum after {
    AFTER_NOTHING,
    AFTER_SHRINK, /* go on without the victim */
    AFTER_LOSS,   /* the same, while another one dies */
    AFTER_GROW,   /* go on without it, then with it again */
};

enum end { END_KILL, END_SEGV, END_ABORT, END_EXIT, END_SILENT, ENDS };

enum chaos_store { STORE_HOST, STORE_RANK_0, STORE_FILE };

struct members {
    int size;
    int ranks[MAX_RANKS];
};

struct plan {
    uint64_t seed;
    int round;
    int size;
    enum chaos_way way;
    enum chaos_store store;
    enum fault fault;
    enum end end;
    int victim;
    bool by_host;         /* the host injects the fault, not the victim itself */
    int64_t delay_ns;     /* from the moment when the victim is there */
    int64_t pause_ns;     /* how long it is stopped */
    int stop_at[LANES];   /* the operation that the victim is at */
    int count[LANES];     /* operations */
    int hosts[MAX_RANKS]; /* the host that each rank is on */
    int groups;
    struct members group[MAX_GROUPS];
    int64_t short_ms;  /* FAULT_STOP: the timeout of groups with the victim */
    int aborted_group; /* FAULT_ABORT: the group */
    enum after after;
    int second; /* AFTER_LOSS: the rank that dies then, else -1 */
    int64_t second_delay_ns;

    /* Rounds over remote calls. */
    bool rpc;
    int serves;    /* the victim dies in the function of this call to it; 0: while it runs a lane */
    bool graceful; /* the shutdown */
    bool early;    /* and it does not wait for the lanes of the others */
};

/* ---- Random numbers ---------------------------------------------------------------------------- */

struct rng {
    uint64_t state;
};

/** A number that depends on both. */
uint64_t mix(uint64_t a, uint64_t b);

/** One of `sides` numbers from 0; true in so many of 100 cases; one of `count`, as often as its weight says. */
uint64_t draw(struct rng *rng, uint64_t sides);
bool chance(struct rng *rng, int percent);
int choose(struct rng *rng, const int *weights, int count);

/* ---- Operations -------------------------------------------------------------------------------- */

enum kind {
    KIND_BROADCAST,
    KIND_REDUCE,
    KIND_ALL_REDUCE,
    KIND_SCATTER,
    KIND_GATHER,
    KIND_ALL_GATHER,
    KIND_REDUCE_SCATTER,
    KIND_ALL_TO_ALL,
    KIND_UNEVEN,
    KIND_BARRIER,
    KIND_PAIR,   /* a message */
    KIND_RING,   /* each rank to the next */
    KIND_FAN_IN, /* all ranks to one, with TD_ANY_SOURCE */
    KINDS,
};

struct operation {
    uint64_t key; /* what the data depend on */
    int index;
    enum kind kind;
    int group;
    td_dtype dtype;
    td_reduce_op op;
    size_t count;
    int root, peer; /* ranks in the group */
    bool async;
    bool in_place;
};

/** What happens in a round; `rpc`: over remote calls. */
void plan_make(uint64_t seed, int round, bool spaces, bool rpc, struct plan *plan);

/** Operation `index` of a lane. */
void plan_operation(const struct plan *plan, int lane, int index, struct operation *operation);

/** Operation `index` on the group that is left, in the `attempt`th attempt to go on. */
void plan_rest_operation(const struct plan *plan, const struct members *members, int attempt,
                         int index, struct operation *operation);

bool plan_has(const struct members *members, int rank);
void plan_describe(const struct plan *plan, char *text, size_t room);
const char *kind_name(enum kind kind);
const char *fault_name(enum fault fault);
const char *way_name(enum chaos_way way);

/* ---- The page -------------------------------------------------------------------------------- */

enum state { STATE_NONE, STATE_INIT, STATE_RUNS, STATE_FINISHED, STATE_LEAVES, STATE_DONE };

struct page {
    _Atomic uint32_t events;   /* counted up, and rung, whenever anything here changes */
    _Atomic int64_t fault_ns;  /* when the fault was injected; 0: not yet */
    atomic_bool reached;       /* the victim is where the fault is due */
    atomic_bool injected;      /* by the host */
    _Atomic int64_t second_ns; /* when the second victim died */
    atomic_bool wanted_again;  /* the victim is to be started again */
    atomic_int attempts;       /* to shrink that have begun: each aborts the former group */
    struct report {
        atomic_int state;
        atomic_int end_of_init;       /* its status */
        _Atomic int64_t destroy_ns;   /* how long leaving took */
        atomic_int at[LANES];         /* the operation that a lane is at, -1 before */
        _Atomic int64_t since[LANES]; /* when it began */
        atomic_int kind[LANES], group[LANES];
        atomic_uint left[4];   /* a bit for each rank that is left, after each attempt */
        atomic_int operations; /* that went well */
        atomic_int detections; /* failures because of the victim */
        int64_t detection_ns[MAX_DETECTIONS];
        atomic_flag complained;
        char complaint[COMPLAINT]; /* the first thing that is wrong */
    } ranks[MAX_RANKS];
};

/** Wakes all processes that wait at the page. */
void page_ring(struct page *page);

/** Waits for the next ring after `events` was read, `ns` at most. */
void page_wait(struct page *page, uint32_t events, int64_t ns);

/* ---- Inside a rank --------------------------------------------------------------------------- */

struct rank {
    const struct plan *plan;
    struct page *page;
    struct report *report;
    int rank;
    td_group *groups[MAX_GROUPS + 1]; /* NULL: not a member, or the world */
    bool broken[MAX_GROUPS + 1];      /* each is its lane's own */
    td_status broken_with[MAX_GROUPS + 1];
    int broken_at[MAX_GROUPS + 1]; /* the operation */
    struct members rest;           /* of the group that is left */
    int attempt;                   /* that made it */
    atomic_bool begun;             /* the lanes run */

    /* What may happen now, and to which ranks. */
    enum fault fault;
    int victim;
    _Atomic int64_t *fault_ns;
};

/** `again`: this process takes the place of one that has died. */
int rank_main(const struct plan *plan, int rank, struct page *page, bool again);

/** The world is made as the plan says. */
td_status rank_begin(struct rank *rank);

/** What the survivors do after all lanes have ended, and what a restarted rank does. */
void recover(struct rank *rank);
void come_back(struct rank *rank);

/** Ends this process as the plan says, after a while, in the middle of whatever it is doing. */
void inject_self(struct rank *rank, _Atomic int64_t *when, int64_t delay_ns);

/** Writes down what is wrong; only the first complaint of a rank counts. */
void rank_report(struct rank *rank, const char *format, ...) __attribute__((format(printf, 2, 3)));

/** Runs the first `count` operations of a lane. */
void run_lane(struct rank *rank, int lane, int count);

/** Uses every group of the lane once more: with the victim it must fail, without it it must work. */
void run_last(struct rank *rank, int lane);

/** Runs `count` operations on the group that is left; `last`: and one more, which the second victim does
 *  not take part in. */
void run_rest(struct rank *rank, int attempt, int count, bool last);

/** Called by a lane before operation `index`. */
void rank_at(struct rank *rank, int lane, int index);

/** Called by a function that serves a call; `last`: of run_last(). */
void rank_serves(struct rank *rank, bool last);

/** How long after the fault, or the begin of the call, every rank must have noticed it; and that it has. */
int64_t rank_limit_ns(const struct plan *plan);
void rank_noticed(struct rank *rank, int64_t took);

/** Whether a sentence names "rank N", or has it in a list: "ranks 1, N have". */
bool names_rank(const char *text, int rank);

/** Waits until the victim has aborted its group; other ranks return at once. */
void rank_await_abort(const struct rank *rank);

/* ---- Data ------------------------------------------------------------------------------------ */

/** Fills in `count` elements: what `rank` gives for `part`. */
void pattern_fill(void *data, const struct operation *operation, size_t count, int rank, int part);

/** Whether they are what `rank` gives for `part`. */
bool pattern_is(const void *data, const struct operation *operation, size_t count, int rank,
                int part);

/** Whether they are the reduction of what all `members` give for `part`. */
bool pattern_is_reduced(const void *data, const struct operation *operation, size_t count,
                        const struct members *members, int part);

/** Whether nothing was written to `bytes` bytes that pattern_poison() has filled. */
bool pattern_is_poison(const void *data, size_t bytes);
void pattern_poison(void *data, size_t bytes);

/** How many elements `from` sends to `to` in an exchange with uneven parts. */
size_t uneven_count(const struct operation *operation, int from, int to);

/* ---- The host -------------------------------------------------------------------------------- */

struct outcome {
    bool failed;
    bool injected;
    int operations;
    int detections;
    int64_t detection_ns[MAX_RANKS * MAX_DETECTIONS];
    int64_t leaving_ns; /* the longest time that a rank took to leave */
    double seconds;
    char text[8192]; /* what is wrong */
};

/** The signal that asks this process to end; 0: none. A round that runs is cut short by it. */
extern volatile int host_ended_by;

/** Runs a round. `stacks`: shows where the threads of ranks are that hang. */
void host_run(const struct plan *plan, bool stacks, struct outcome *outcome);

/** How much longer everything may take: 5 under a sanitizer, else 1. */
int slowness(void);

/* ---- Networks -------------------------------------------------------------------------------- */

#define NETWORK_HOST "10.98.0.254"

/** Moves this process to a network of its own. False, and why, where that is not permitted. */
bool network_begin(const char **why);

/** Whether network_begin() has done it: then all sockets that there are belong to the rounds. */
bool network_is_own(void);

/** Makes a namespace for host `index`, joined to this one. Returns a descriptor of it, or -1. */
int network_add(int index);

/** Pulls the plug of a host. */
bool network_cut(int index);

/** Removes what network_add() has made. */
void network_clear(int hosts);

/* ---- What is left ---------------------------------------------------------------------------- */

/** What this process holds that Tandem may have made: sockets, and memory of groups. */
struct holdings {
    int descriptors, sockets, memories; /* memories: of groups */
    int mappings;                       /* of different memories, an arena of its own included */
    int threads;
};

struct holdings left_holdings(void);

/** What is there now and was not before, in words; "" where all is well. */
void left_compare(const struct holdings *before, char *text, size_t room);

/** Adds to `text` what the ended processes `pids` have left in the system: sockets, files in
 *  `directory`, processes. */
void left_check(const pid_t *pids, int count, const char *directory, char *text, size_t room);

#endif
