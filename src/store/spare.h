/* A spare: a process that its launcher keeps ready (tdrun --spares), and that has no rank yet.
 *
 * It inherits a socket to the launcher, whose number is in TANDEM_SPARE_FD. When it comes to where it would join the others,
 * it says so, and waits there; the launcher then sends the variables of a rank, at once or much later, and from there on the
 * process is like any worker that was started with them.
 *
 *     spare       TD__SPARE_WAITS                                TD__SPARE_JOINED
 *     launcher                     size u32 | "RANK=1\0LOCAL_RANK=1\0…" */
#ifndef TD_STORE_SPARE_H
#define TD_STORE_SPARE_H

#include <tandem/base.h>

#define TD__SPARE_VARIABLE "TANDEM_SPARE_FD"

/* What a spare says, a byte each. */
#define TD__SPARE_WAITS 'w'
#define TD__SPARE_JOINED 'j'

enum { TD__SPARE_ROOM = 64 << 10 }; /* of the variables */

/** In a spare that has no rank yet: waits until the launcher gives it one, however long that takes, and puts its variables
 *  into the environment. In other processes, and from then on, it returns TD_OK at once.
 *
 *  TD_ERR_PEER: the launcher has ended. TD_ERR_INVALID: TANDEM_SPARE_FD is not what tdrun has set. */
td_status td__spare_wait(void);

/** Tells the launcher that this process, which was a spare, has become a member of its world. */
void td__spare_joined(void);

#endif
