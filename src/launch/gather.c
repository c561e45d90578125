/* One key for each node; see arrival.h. */
#include "launch/arrival.h"

#include "base/fail.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The keys, in one piece of memory. */
static char **make_keys(const char *prefix, int count)
{
    size_t room = strlen(prefix) + 16;
    char **keys = malloc((size_t)count * (sizeof *keys + room));
    if (!keys)
        return NULL;
    char *text = (char *)(keys + count);
    for (int i = 0; i < count; i++, text += room) {
        snprintf(text, room, "%s%d", prefix, i);
        keys[i] = text;
    }
    return keys;
}

td_status td__gather_wait(td_store *store, const char *prefix, int count, int64_t timeout_ms,
                          td_bytes **values_out)
{
    char **keys = make_keys(prefix, count);
    td_bytes *values = calloc((size_t)count, sizeof *values);
    td_status status = keys && values ? td_store_multi_get(store, (const char *const *)keys, count,
                                                           timeout_ms, values)
                                      : td__fail_nomem("launcher");
    free(keys);
    if (status)
        free(values);
    else
        *values_out = values;
    return status;
}

void td__gather_free(td_bytes *values, int count)
{
    for (int i = 0; values && i < count; i++)
        td_bytes_free(&values[i]);
    free(values);
}

bool td__gather_has_empty(const td_bytes *values, int count)
{
    for (int i = 0; i < count; i++)
        if (!values[i].size)
            return true;
    return false;
}

td_status td__gather_set(td_store *store, const char *prefix, int count, const char *value)
{
    char **keys = make_keys(prefix, count);
    td_bytes *values = calloc((size_t)count, sizeof *values);
    for (int i = 0; values && i < count; i++)
        values[i] = (td_bytes){.data = (char *)value, .size = strlen(value)};
    td_status status = keys && values
                           ? td_store_multi_set(store, (const char *const *)keys, values, count)
                           : td__fail_nomem("launcher");
    free(keys);
    free(values);
    return status;
}

td_status td__gather_check(td_store *store, const char *prefix, int count, bool *all_exist)
{
    char **keys = make_keys(prefix, count);
    td_status status = keys ? td_store_check(store, (const char *const *)keys, count, all_exist)
                            : td__fail_nomem("launcher");
    free(keys);
    return status;
}

td_status td__gather_missing(td_store *store, const char *prefix, int count, char *list,
                             size_t room, int *missing)
{
    char **keys = make_keys(prefix, count);
    td_status status = keys ? TD_OK : td__fail_nomem("launcher");
    size_t used = 0;
    *missing = 0;
    *list = '\0';
    for (int i = 0; i < count && !status; i++) {
        bool exists = true;
        status = td_store_check(store, (const char *const *)&keys[i], 1, &exists);
        if (exists)
            continue;
        ++*missing;
        char item[24];
        int size = snprintf(item, sizeof item, "%s%d", used ? ", " : "", i);
        if (used + (size_t)size + sizeof ", …" <= room)
            used += (size_t)sprintf(list + used, "%s", item);
        else
            strcpy(list + used, ", …");
    }
    free(keys);
    return status;
}
