/* The roster of the ranks that have joined, and watching their processes; see peer_watch.h. A line of the roster:
 * rank, 1 where it has rejoined, space, pid, start time. */
#include "store/peer_watch.h"

#include "base/fail.h"
#include "base/host.h"
#include "store/store_ops.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    LINE_ROOM = 128,
    PAUSE_MS = 50,         /* before the first check; then twice as long each time … */
    LAST_PAUSE_MS = 400,   /* … up to this, … */
    PAUSE_PER_RANK_MS = 4, /* … and longer, since the store serves all ranks */
};

/* ---- The roster ------------------------------------------------------------------------------ */

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

bool td__rejoins(void)
{
    const char *said = getenv("TANDEM_REJOIN");
    return said && !strcmp(said, "1");
}

/* ---- Watching -------------------------------------------------------------------------------- */

/* The process of another rank. */
struct td__watched_peer {
    int pid; /* 0: not known, or not on this machine */
    int fd;  /* -1: not watched */
    bool ended;
};

bool td__peer_watch_has_self(const struct td__peer_watch *peers, const char *list)
{
    struct td__process_id own;
    struct td__roster_entry entry;
    bool present = false;
    if (!td__process_identify((int)getpid(), &own))
        return false;
    while (td__roster_next(&list, &entry))
        if (entry.rank == peers->rank)
            present = td__process_id_equal(&entry.process, &own) && !entry.rejoined;
    return present;
}

static void watch(struct td__watched_peer *peer, const struct td__process_id *process)
{
    if (peer->pid == process->pid)
        return;
    if (peer->fd >= 0)
        close(peer->fd);
    peer->pid = process->pid;
    peer->fd = td__process_watch_id(process, &peer->ended);
}

/* The last entry of a rank counts: it is that of a successor. */
void td__peer_watch_watch(struct td__peer_watch *peers, const char *list)
{
    struct td__process_id own;
    struct td__roster_entry entry;
    if (!td__process_identify((int)getpid(), &own))
        return;
    if (!peers->list) {
        peers->list = calloc((size_t)peers->size, sizeof *peers->list);
        for (int r = 0; peers->list && r < peers->size; r++)
            peers->list[r].fd = -1;
    }
    while (peers->list && td__roster_next(&list, &entry))
        if (entry.rank != peers->rank && entry.rank >= 0 && entry.rank < peers->size &&
            entry.process.space == own.space && entry.process.pid != own.pid)
            watch(&peers->list[entry.rank], &entry.process);
}

int td__peer_watch_find_ended(struct td__peer_watch *peers, char text[TD__WATCHED_TEXT])
{
    char how[96];
    for (int r = 0; peers->list && r < peers->size; r++) {
        struct td__watched_peer *peer = &peers->list[r];
        if (!peer->ended && !td__process_has_ended(peer->fd, 0))
            continue;
        td__wait_status_text(td__process_wait_status(peer->pid, peer->fd), how, sizeof how);
        snprintf(text, TD__WATCHED_TEXT, "rank %d (on %.128s, pid %d) %s", r, td__host_name(),
                 peer->pid, how);
        return r;
    }
    return -1;
}

static int64_t bounded_ms(td__deadline deadline, int64_t most)
{
    int left = td__deadline_poll_ms(deadline);
    return left < 0 ? most : left < 1 ? TD_NOW : left < most ? left : most;
}

/* A rank that has ended is no reason to fail where it had done its part before. */
static td_status look_again(td_store *store, const char *const *keys, int count, td_bytes *values)
{
    struct td__error reason;
    td__error_save(&reason);
    return td_store_multi_get(store, keys, count, TD_NOW, values) ? td__error_restore(&reason)
                                                                  : TD_OK;
}

td_status td__peer_watch_get(td_store *store, const char *const *keys, int count,
                             const struct td__watched_wait *wait, td_bytes *values)
{
    int64_t more = (int64_t)PAUSE_PER_RANK_MS * wait->ranks, pause = PAUSE_MS + more;
    struct td__error before;
    td__error_save(&before);
    td_status status;
    for (;;) {
        status = td_store_multi_get(store, keys, count, bounded_ms(wait->deadline, pause), values);
        if (status != TD_ERR_TIMEOUT || td__deadline_passed(wait->deadline))
            break;
        status = wait->check(wait->arg);
        if (status) {
            status = look_again(store, keys, count, values);
            break;
        }
        pause = pause * 2 < LAST_PAUSE_MS + more ? pause * 2 : LAST_PAUSE_MS + more;
    }
    if (!status)
        td__error_undo(&before);
    return status;
}

void td__peer_watch_free(struct td__peer_watch *peers)
{
    for (int r = 0; peers->list && r < peers->size; r++)
        if (peers->list[r].fd >= 0)
            close(peers->list[r].fd);
    free(peers->list);
    peers->list = NULL;
}
