/* One collective call after another, each checked against what it must give.
 *
 *     struct scene scene = scene_open(&(struct setup){.transport = "tcp"});
 *     run_case(&scene, &(struct collective_case){.kind = TD_OP_ALL_REDUCE, .dtype = TD_F32, .count = 7});
 *     scene_close(&scene);
 *
 * Every rank knows the inputs of all, since these follow from the number of the case, and computes what
 * must come out, bit for bit: loaded, combined along the tree and stored, step by step. The memory around
 * the buffers, inputs that are not in place and outputs of ranks that get no result must be unchanged. */
#ifndef TANDEM_TESTS_COLLECTIVE_CASES_H
#define TANDEM_TESTS_COLLECTIVE_CASES_H

#include "reduce/reduction.h"

#include <tandem/backend.h>

/* How a world is made. All members may be left out. */
struct setup {
    const char *transport; /* TANDEM_TRANSPORT */
    const char *hosts;     /* "0011": the host of each rank, for TANDEM_HOST_ID */
    const char *backend;
    const char *options;
    bool any_order; /* reductions may be formed in another order than along the tree */
    int processors; /* what the system says how many there are; 0: the truth */
};

struct scene {
    td_group *group; /* NULL: the world */
    int rank, size;  /* in the group */
    const char *hosts;
    bool any_order;
    uint64_t number; /* of the last case; the same on all ranks */
    td_reduce_op own_op;
    td_reduce_op scaled_op;
};

/** Makes the world, and a scene of all its ranks. */
struct scene scene_open(const struct setup *setup);
void scene_close(struct scene *scene);

/** A scene of another group of this world; it needs no closing. */
struct scene scene_of(const struct scene *world, td_group *group);

/** A scene of a new group of all ranks of the world, in reversed order. */
struct scene scene_reversed(const struct scene *world);

enum memory {
    IN_ARENA,
    IN_HEAP,
    IN_BOTH, /* one for the input and one for the output, different ones on different ranks */
    MEMORIES,
};

/* The scene's own operation, and its sum with another factor on each rank. */
#define OWN_OP ((td_reduce_op)-1)
#define SCALED_SUM ((td_reduce_op)-2)

struct collective_case {
    td_op_kind kind;
    td_dtype dtype;
    td_reduce_op op;
    size_t count;
    const size_t
        *counts; /* of uneven parts (all_gather, reduce_scatter), instead of `count`; or NULL */
    int root;    /* rank in the group */
    bool in_place;
    enum memory memory;
};

struct flight;

/** Starts a case: asynchronously with a work where `async`, else it is done on return. */
struct flight *case_start(struct scene *scene, const struct collective_case *what, bool async);

/** The work of a case that was started asynchronously; still the flight's. */
td_work *flight_work(const struct flight *flight);

/** Waits for it, checks its result, and frees it. */
void flight_finish(struct flight *flight);

/** The same for each of `count` flights, from the last to the first. */
void flights_finish(struct flight **flights, size_t count);

/** Starts and finishes it; under ThreadSanitizer some of the cases only. */
void run_case(struct scene *scene, const struct collective_case *what);

/** Uneven all_to_all with parts of up to `most` elements, empty ones among them. */
void run_uneven(struct scene *scene, td_dtype dtype, size_t most, enum memory memory, bool async);

bool is_rooted(td_op_kind kind);
bool is_reduction(td_op_kind kind);

/** Whether there is such a reduction; OWN_OP and SCALED_SUM included. */
bool is_supported(td_dtype dtype, td_reduce_op op);

/** The same for a scene: OWN_OP depends on the order of reduction. */
bool scene_supports(const struct scene *scene, int dtype, int op);

/* A test of `count` ranks that runs run_world() of its file, with a struct setup as its argument. */
#define WORLD(id, count, ...)                                                                      \
    static const struct setup setup_##id = {__VA_ARGS__};                                          \
    static struct td_test test_##id = {                                                            \
        .name = #id, .run = run_world, .arg = &setup_##id, .ranks = count, .deadline_s = 60};      \
    __attribute__((constructor)) static void register_##id(void)                                   \
    {                                                                                              \
        td_test_register(&test_##id);                                                              \
    }

#endif
