/* Between rref.c, rref_entries.c and rref_calls.c. */
#ifndef TD_RPC_RREF_INTERNAL_H
#define TD_RPC_RREF_INTERNAL_H

#include "rpc/rpc_agent.h"

/* ---- Handles: rref.c --------------------------------------------------------------------------- */

td_rref *td__rref_adopt(td_rref *rref);

/** A reference on the owner; `made`: there is a value. On another worker. One reference. */
td_rref *td__rref_own(struct td__rpc_agent *agent, uint64_t id, bool made, const char *what);
td_rref *td__rref_user(struct td__rpc_agent *agent, uint64_t id, uint64_t fork, int owner);

/** The call that makes the value has been started; takes the future over. */
void td__rref_set_made(td_rref *rref, td_future *made);
td_future *td__rref_made(const td_rref *rref);

/** Frees a reference whose call could not be started. */
void td__rref_forget(struct td__rpc_agent *agent, td_rref *rref);

/** Keeps a reference until a call that uses it has been answered: its deletion must not overtake the call. */
td_status td__rref_keep_until(td_rref *rref, td_future *answer);

uint64_t td__rref_id(const td_rref *rref);
int td__rref_owner_rank(const td_rref *rref);

/** On the owner: the future of the value. */
td_future *td__rref_future(const td_rref *rref);

/** The agent, if the reference is one of its; NULL with the last error set. */
struct td__rpc_agent *td__rref_enter(const td_rref *rref, const char *call);

/* ---- On the owner: rref_entries.c ---------------------------------------------------------------- */

struct td__rref_entry;

/** The entry of an id, for a handle; and the end of the handle. */
struct td__rref_entry *td__rref_entry_hold(struct td__rpc_agent *agent, uint64_t id, bool made,
                                           const char *what);
void td__rref_entry_let_go(struct td__rpc_agent *agent, struct td__rref_entry *entry);
td_future *td__rref_entry_future(const struct td__rref_entry *entry);

td_status td__rref_fork_add(struct td__rpc_agent *agent, uint64_t id, uint64_t fork, int rank);
td_status td__rref_fork_delete(struct td__rpc_agent *agent, uint64_t id, uint64_t fork, int from);

/** The call that makes a value has come, with the fork of the caller; the future of the value, with one reference. */
td_future *td__rref_begin(struct td__rpc_agent *agent, uint64_t id, uint64_t fork, int from,
                          const char *what);

/** It has failed before it could begin: so do uses of the value. */
void td__rref_never(struct td__rpc_agent *agent, uint64_t id, td_status status, const char *text);

/** A future of the value of an id, with one reference; it may be cancelled. */
td_future *td__rref_use(struct td__rpc_agent *agent, uint64_t id);

/** A worker has gone; `forks`: its forks are released. */
void td__rref_entries_lost(struct td__rpc_agent *agent, int rank, bool forks);
void td__rref_entries_close(struct td__rpc_agent *agent);

#endif
