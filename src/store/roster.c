/* The roster; see roster.h. A line: rank, 1 where it has rejoined, space, pid, start time. */
#include "store/roster.h"

#include "store/store_ops.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { LINE_ROOM = 128 };

void td__roster_key(const char *prefix, char key[TD__ROSTER_KEY])
{
    size_t size = strlen(prefix);
    if (size && prefix[size - 1] == '/')
        size--;
    snprintf(key, TD__ROSTER_KEY, TD__INTERNAL_KEY "processes/%.*s", (int)size, prefix);
}

td_status td__roster_add(td_store *store, const char *key, int rank, bool rejoined)
{
    struct td__process_id process;
    char line[LINE_ROOM];
    if (!td__process_identify((int)getpid(), &process))
        return TD_OK;
    int length = snprintf(line, sizeof line, "%d %d %llx %d %llu\n", rank, rejoined,
                          (unsigned long long)process.space, process.pid,
                          (unsigned long long)process.started);
    return td_store_append(store, key, line, (size_t)length);
}

bool td__roster_next(const char **at, struct td__roster_entry *entry)
{
    while (**at) {
        unsigned long long space = 0, started = 0;
        int rejoined = 0;
        char line[LINE_ROOM];
        size_t length = strcspn(*at, "\n");
        snprintf(line, sizeof line, "%.*s", (int)(length < LINE_ROOM ? length : 0), *at);
        *at += length;
        *at += **at == '\n';
        bool sound = sscanf(line, "%d %d %llx %d %llu", &entry->rank, &rejoined, &space,
                            &entry->process.pid, &started) == 5;
        entry->rejoined = rejoined;
        entry->process.space = space;
        entry->process.started = started;
        if (sound && entry->process.pid > 0)
            return true;
    }
    return false;
}
