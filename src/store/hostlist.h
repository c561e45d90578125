/* Slurm's compressed host lists: "gpu[01-03,7],login" stands for gpu01 gpu02 gpu03 gpu7 login. */
#ifndef TD_STORE_HOSTLIST_H
#define TD_STORE_HOSTLIST_H

#include <tandem/base.h>

/** Writes the first host of `list` to `first` and counts all of them. TD_ERR_INVALID says at which
 *  character the list is malformed. */
td_status td__hostlist_first(const char *list, char first[256], int64_t *count);

#endif
