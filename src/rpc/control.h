/* Control messages of references: calls of td.control that are repeated until they are answered, and take effect once. */
#ifndef TD_RPC_CONTROL_H
#define TD_RPC_CONTROL_H

#include "rpc/rpc_agent.h"

enum td__control { TD__CONTROL_FORK = 1, TD__CONTROL_DELETE, TD__CONTROL_ACCEPTED };

/** Called once the message has taken effect; or with NULL if it cannot any more, since one of the two has ended. */
typedef void (*td__control_fn)(struct td__rpc_agent *agent, void *arg);

/** Sends one to the worker `to`, without waiting. `done` may be NULL. */
void td__control_send(struct td__rpc_agent *agent, int to, enum td__control kind, uint64_t id,
                      uint64_t fork, td__control_fn done, void *arg);

/** The function that receives them, "td.control(number: int, kind: int, id: int, fork: int)". */
td_value *td__control_receive(td_rpc_call *call, td_value *const *args, int count);

/** What a message of `from` does; rref.c. */
td_status td__rref_control(struct td__rpc_agent *agent, int from, int64_t kind, uint64_t id,
                           uint64_t fork);

#endif
