/* Looking after those who have come; see peer_watch.h. */
#include "store/peer_watch.h"

#include "base/host.h"
#include "os/ending.h"
#include "store/roster.h"

#include <poll.h>
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
    struct td__process_mark own;
    struct td__roster_entry signature;
    bool present = false;
    if (!td__process_mark((int)getpid(), &own))
        return false;
    while (td__roster_next(&list, &signature))
        if (signature.rank == peers->rank)
            present = td__process_mark_equal(&signature.mark, &own) && !signature.again;
    return present;
}

static void watch(struct td__watched_peer *peer, const struct td__process_mark *mark)
{
    if (peer->pid == mark->pid)
        return;
    if (peer->fd >= 0)
        close(peer->fd);
    peer->pid = mark->pid;
    peer->fd = td__process_mark_open(mark, &peer->ended);
}

/* A later line about a rank is about its successor. */
void td__peer_watch_watch(struct td__peer_watch *peers, const char *list)
{
    struct td__process_mark own;
    struct td__roster_entry signature;
    if (!td__process_mark((int)getpid(), &own))
        return;
    if (!peers->list) {
        peers->list = calloc((size_t)peers->size, sizeof *peers->list);
        for (int r = 0; peers->list && r < peers->size; r++)
            peers->list[r].fd = -1;
    }
    while (peers->list && td__roster_next(&list, &signature))
        if (signature.rank != peers->rank && signature.rank >= 0 && signature.rank < peers->size &&
            signature.mark.space == own.space && signature.mark.pid != own.pid)
            watch(&peers->list[signature.rank], &signature.mark);
}

static bool has_ended(struct td__watched_peer *peer)
{
    struct pollfd end = {.fd = peer->fd, .events = POLLIN};
    if (peer->fd >= 0 && poll(&end, 1, 0) == 1)
        peer->ended = true;
    return peer->ended;
}

int td__peer_watch_find_ended(struct td__peer_watch *peers, char text[TD__WATCHED_TEXT])
{
    char how[96];
    for (int r = 0; peers->list && r < peers->size; r++) {
        struct td__watched_peer *peer = &peers->list[r];
        if (!has_ended(peer))
            continue;
        /* One that had ended before it was looked for: its number may be another's by now. */
        int ending = peer->fd >= 0 ? td__ending_of(peer->pid, peer->fd) : TD__ENDING_UNKNOWN;
        td__ending_text(ending, how, sizeof how);
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
