/* Remote references.
 *
 * The owner of a value has an entry for it, under an id that the worker which made the reference has chosen. Each
 * reference elsewhere is a fork, with an id of its own, and the entry lists the forks that the owner knows. The value is
 * freed when there is no fork and no reference on the owner any more.
 *
 *     the owner passes a reference on       it adds the fork to the entry before it sends it
 *     another worker does, the parent       the receiver sends FORK to the owner, and when that has answered, ACCEPTED to
 *                                           the parent. Until then the parent keeps its own reference
 *     a fork is released                    its worker sends DELETE to the owner, once the owner knows the fork, and no
 *                                           call that uses it is under way
 *     the call that is to make the value    has failed before it began: its worker sends NEVER
 *
 * These messages are calls of td.control. They are repeated until they are answered, and carry a number by which the
 * receiver recognizes a repetition. They may overtake each other, and the call that makes the value: FORK and uses of an
 * unknown id make an entry, which waits for its value, and ends with the last of them. A message that is not sent, or is
 * not decoded by its receiver, takes back or refuses the forks that it carries (message.c). */
#ifndef TD_RPC_RREF_H
#define TD_RPC_RREF_H

#include "rpc/rpc_agent.h"

/** Registers the functions of the library; once. */
td_status td__rref_register(void);

/** Frees all entries, and reports those that are in use. */
void td__rrefs_close(struct td__rpc_agent *agent);

/** A worker has gone: its forks are released, and what was kept for it. */
void td__rrefs_lost(struct td__rpc_agent *agent, int rank);

/** Fails all values that are not there yet. */
void td__rrefs_abort(struct td__rpc_agent *agent);

/** How many entries there are. */
int td__rref_entry_count(struct td__rpc_agent *agent);

#endif
