/* Rounds over remote calls. Every rank is a worker, "w0", "w1", …, and its lanes call the others all the time:
 *
 *     chaos_rpc.c             begins and leaves; what is left of the victim
 *     chaos_rpc_functions.c   the functions that workers serve
 *     chaos_rpc_calls.c       the calls of a lane, and their results
 *     chaos_rpc_judge.c       whether a call may fail so
 *
 * A call fails only because of the victim, if that takes part in it, and names it. Calls among the others succeed. */
#ifndef TANDEM_TESTS_CHAOS_RPC_H
#define TANDEM_TESTS_CHAOS_RPC_H

#include "chaos.h"

#include <tandem/tandem.h>

enum { CALL_MS = 30000, NAP_MS = 80, NAP_TIMEOUT_MS = 20 };

enum call_kind {
    CALL_ADD,
    CALL_EXCHANGE,  /* a tensor there, and another one back */
    CALL_IN_PLACE,  /* the callee changes it */
    CALL_KEEP,      /* the callee keeps it, and the caller changes its own */
    CALL_OBJECT,    /* of a class, which a third worker uses as well */
    CALL_REFERENCE, /* to a tensor, which is fetched */
    CALL_NESTED,    /* through several workers */
    CALL_LATER,     /* answered by a future */
    CALL_GRADIENT,  /* in a context of distributed autograd */
    CALL_CANCELLED,
    CALL_SHORT,   /* its timeout passes */
    CALL_REFUSED, /* the function fails */
    CALL_KINDS,
};

struct remote_call {
    uint64_t key; /* what the data depend on */
    int lane, index;
    enum call_kind kind;
    int to, third;      /* workers */
    int64_t count;      /* elements of tensors */
    int64_t timeout_ms; /* 0: CALL_MS */
    bool async, copy;
    unsigned through; /* a bit for each worker that takes part */
};

/** Call `index` of a lane of a rank. */
void plan_call(const struct rank *rank, int lane, int index, struct remote_call *call);
const char *call_name(int kind);

/** "w3", in a buffer of which there are a few. */
const char *worker_name(int rank);

/** Becomes a worker; `options` has the init method, and the timeout of joining. */
td_status rpc_begin(struct rank *rank, const td_init_options *options);

/** The first `count` calls of a lane; and one more to each worker: those to the victim must fail. */
void rpc_run_lane(struct rank *rank, int lane, int count);
void rpc_run_last(struct rank *rank, int lane);

/** Nothing of the victim, and of the calls, is left: memory that is lent, references, contexts. */
void rpc_check_empty(struct rank *rank);

/** Shuts down as the plan says. */
td_status rpc_leave(struct rank *rank);

/** Registers the functions, and releases the tensors that they have kept. */
void rpc_register(struct rank *rank);
void rpc_drop_kept(void);

/** A tensor of which every element depends on `key`; whether all elements are those plus `more`. */
td_tensor *keyed_tensor(uint64_t key, int64_t count);
bool tensor_is_keyed(td_tensor *tensor, uint64_t key, int64_t count, float more);

/** A call that was started at `since` has failed, by the last error. */
void judge_call(struct rank *rank, const struct remote_call *call, int64_t since);

#endif
