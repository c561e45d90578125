/* One key for each node: "<prefix>0", "<prefix>1", … in the job's store. */
#ifndef TD_LAUNCH_GATHER_H
#define TD_LAUNCH_GATHER_H

#include <tandem/store.h>

/** Waits until all `count` keys exist; *values is freed with td__gather_free(). */
td_status td__gather_wait(td_store *store, const char *prefix, int count, int64_t timeout_ms,
                          td_bytes **values);

void td__gather_free(td_bytes *values, int count);

/** True when one of the values is empty. */
bool td__gather_has_empty(const td_bytes *values, int count);

/** Sets all of them to the same text, in one step and without waiting. */
td_status td__gather_set(td_store *store, const char *prefix, int count, const char *value);

/** Says at once whether all of them exist. */
td_status td__gather_check(td_store *store, const char *prefix, int count, bool *all_exist);

/** Writes the numbers of those that do not exist, "2, 5, 6", and how many there are. A long list is
 *  cut short. */
td_status td__gather_missing(td_store *store, const char *prefix, int count, char *list,
                             size_t room, int *missing);

#endif
