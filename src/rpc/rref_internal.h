/* Between rref.c and rref_calls.c. */
#ifndef TD_RPC_RREF_INTERNAL_H
#define TD_RPC_RREF_INTERNAL_H

#include "rpc/rpc_agent.h"

td_rref *td__rref_adopt(td_rref *rref);

/** A reference on the owner; `made`: there is a value. On another worker. One reference. */
td_rref *td__rref_own(struct td__rpc_agent *agent, uint64_t id, bool made, const char *what);
td_rref *td__rref_user(struct td__rpc_agent *agent, uint64_t id, uint64_t fork, int owner);

/** The call that makes the value has been started; takes the future over. */
void td__rref_set_made(td_rref *rref, td_future *made);
td_future *td__rref_made(const td_rref *rref);

/** Frees a reference whose call could not be started. */
void td__rref_forget(struct td__rpc_agent *agent, td_rref *rref);

uint64_t td__rref_id(const td_rref *rref);
int td__rref_owner_rank(const td_rref *rref);

/** On the owner: the future of the value. */
td_future *td__rref_future(const td_rref *rref);

/** The agent, if the reference is one of its; NULL with the last error set. */
struct td__rpc_agent *td__rref_enter(const td_rref *rref, const char *call);

/** On the owner: the call that makes a value has come, with the fork of the caller; the future of the value, with one
 *  reference. */
td_future *td__rref_begin(struct td__rpc_agent *agent, uint64_t id, uint64_t fork, int from,
                          const char *what);

/** On the owner: the future of the value of an id, with one reference. */
td_future *td__rref_wait_for(struct td__rpc_agent *agent, uint64_t id);

#endif
