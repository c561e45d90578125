/* Control messages of references: calls of td.control that are repeated until they are answered, and take effect once. */
#ifndef TD_RPC_CONTROL_H
#define TD_RPC_CONTROL_H

#include "rpc/rpc_agent.h"

enum td__control {
    TD__CONTROL_FORK = 1,
    TD__CONTROL_DELETE,
    TD__CONTROL_ACCEPTED,
    TD__CONTROL_NEVER
};

/** Called once the message has taken effect (`done`), or cannot any more: the other worker has ended, or this one, with
 *  NULL for the agent. */
typedef void (*td__control_fn)(struct td__rpc_agent *agent, bool done, void *arg);

/** Sends one to the worker `to`, without waiting. `done` may be NULL. */
void td__control_send(struct td__rpc_agent *agent, int to, enum td__control kind, uint64_t id,
                      uint64_t fork, td__control_fn done, void *arg);

/** The function that receives them, "td.control(number: int, kind: int, id: int, fork: int)". */
td_value *td__control_receive(td_rpc_call *call, td_value *const *args, int count);

/** For tests: how long an answer is waited for before a message is repeated, instead of 5 seconds, if it is not 0. */
extern atomic_int td__control_answer_ms;

/** What a message of `from` does; rref.c. */
td_status td__rref_control(struct td__rpc_agent *agent, int from, int64_t kind, uint64_t id,
                           uint64_t fork);

#endif
