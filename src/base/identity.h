/* Which rank of how many this process is, for components that do not use groups. */
#ifndef TD_BASE_IDENTITY_H
#define TD_BASE_IDENTITY_H

#include <stdbool.h>

/** The process has become a rank of a world; size 0: of none any more. */
void td__identity_set(int rank, int size);

/** False where this process is not in a world: none was made, it was destroyed, or it is the
 *  parent's and this is a fork. */
bool td__identity(int *rank, int *size);

#endif
