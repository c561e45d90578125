/* The identity of this process: its host, and its rank in the world. */
#ifndef TD_BASE_HOST_H
#define TD_BASE_HOST_H

#include <stdbool.h>

/** The host's name, without its domain. */
const char *td__host_name(void);

/** The version that this process has for the others of its job: td_version(); a test takes another one. */
extern const char *td__job_version;

/** The rank in log lines: from RANK at the start, and from the rendezvous later. */
void td__log_set_rank(int rank);

/** Sets the rank in the world, for components that do not use groups; size 0: the world was destroyed. */
void td__identity_set(int rank, int size);

/** False if this process is not in a world: none was created, it was destroyed, or it belongs to the parent
 *  of a fork. */
bool td__identity(int *rank, int *size);

#endif
