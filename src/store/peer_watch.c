/* Looking after those who have come; see peer_watch.h. */
#include "store/peer_watch.h"

#include "base/host.h"
#include "os/process.h"
#include "store/roster.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { ANSWER_MS = 2000 };

/* The process of another rank, as far as it can be watched. */
struct td__watched_peer {
    int pid; /* 0: not known, or not on this machine */
    int fd;  /* -1: not watched */
    bool ended;
};

bool td__peer_watch_look_up(td_store *store, const char *key, td_bytes *value)
{
    bool there = false;
    return !td_store_check(store, &key, 1, &there) && there &&
           !td_store_get(store, key, ANSWER_MS, value);
}

bool td__peer_watch_has_self(const struct td__peer_watch *peers, const char *list)
{
    struct td__process_id own;
    struct td__roster_entry entry;
    bool present = false;
    if (!td__process_identify((int)getpid(), &own))
        return false;
    while (td__roster_next(&list, &entry))
        if (entry.rank == peers->rank)
            present = td__process_id_equal(&entry.process, &own) && !entry.again;
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

/* A later line about a rank is about its successor. */
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

void td__peer_watch_free(struct td__peer_watch *peers)
{
    for (int r = 0; peers->list && r < peers->size; r++)
        if (peers->list[r].fd >= 0)
            close(peers->list[r].fd);
    free(peers->list);
    peers->list = NULL;
}
