/* Byte strings in one buffer, one after another. */
#ifndef TD_DIST_OBJECTS_H
#define TD_DIST_OBJECTS_H

#include <tandem/base.h>

/** TD_ERR_INVALID where there is no list, or an object has a size and no data. */
td_status td__objects_check(const char *call, const char *name, const td_bytes *objects, int count);

/** The sum of sizes that may come from another rank. */
td_status td__objects_add_up(const char *call, const uint64_t *sizes, int count, size_t *total);

/** Puts the bytes of all of them to `body`. */
void td__objects_pack(char *body, const td_bytes *objects, int count);

/** Makes objects of the bytes at `body`, which stand one after another, or with a `stride` that is
 * not 0 at fixed distances. All are set, or none. */
td_status td__objects_unpack(const char *call, const char *body, const uint64_t *sizes,
                             size_t stride, int count, td_bytes *objects);

#endif
