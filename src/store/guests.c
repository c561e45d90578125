/* Looking after those who have come; see guests.h. */
#include "store/guests.h"

#include "base/host.h"
#include "os/ending.h"
#include "store/sign_in.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { ANSWER_MS = 2000 };

/* The process of another rank, as far as it can be watched. */
struct td__guest {
    int pid; /* 0: not known, or not on this machine */
    int fd;  /* -1: not watched */
    bool ended;
};

bool td__guests_look_up(td_store *store, const char *key, td_bytes *value)
{
    bool there = false;
    return !td_store_check(store, &key, 1, &there) && there &&
           !td_store_get(store, key, ANSWER_MS, value);
}

bool td__guests_has_self(const struct td__guests *guests, const char *list)
{
    struct td__process_mark own;
    struct td__signature signature;
    bool present = false;
    if (!td__process_mark((int)getpid(), &own))
        return false;
    while (td__next_signature(&list, &signature))
        if (signature.rank == guests->rank)
            present = td__process_mark_equal(&signature.mark, &own) && !signature.again;
    return present;
}

static void watch(struct td__guest *guest, const struct td__process_mark *mark)
{
    if (guest->pid == mark->pid)
        return;
    if (guest->fd >= 0)
        close(guest->fd);
    guest->pid = mark->pid;
    guest->fd = td__process_mark_open(mark, &guest->ended);
}

/* A later line about a rank is about its successor. */
void td__guests_watch(struct td__guests *guests, const char *list)
{
    struct td__process_mark own;
    struct td__signature signature;
    if (!td__process_mark((int)getpid(), &own))
        return;
    if (!guests->list) {
        guests->list = calloc((size_t)guests->size, sizeof *guests->list);
        for (int r = 0; guests->list && r < guests->size; r++)
            guests->list[r].fd = -1;
    }
    while (guests->list && td__next_signature(&list, &signature))
        if (signature.rank != guests->rank && signature.rank >= 0 &&
            signature.rank < guests->size && signature.mark.space == own.space &&
            signature.mark.pid != own.pid)
            watch(&guests->list[signature.rank], &signature.mark);
}

static bool has_ended(struct td__guest *guest)
{
    struct pollfd end = {.fd = guest->fd, .events = POLLIN};
    if (guest->fd >= 0 && poll(&end, 1, 0) == 1)
        guest->ended = true;
    return guest->ended;
}

int td__guests_find_ended(struct td__guests *guests, char text[TD__GUEST_TEXT])
{
    char how[96];
    for (int r = 0; guests->list && r < guests->size; r++) {
        struct td__guest *guest = &guests->list[r];
        if (!has_ended(guest))
            continue;
        /* One that had ended before it was looked for: its number may be another's by now. */
        int ending = guest->fd >= 0 ? td__ending_of(guest->pid, guest->fd) : TD__ENDING_UNKNOWN;
        td__ending_text(ending, how, sizeof how);
        snprintf(text, TD__GUEST_TEXT, "rank %d (on %.128s, pid %d) %s", r, td__host_name(),
                 guest->pid, how);
        return r;
    }
    return -1;
}

void td__guests_free(struct td__guests *guests)
{
    for (int r = 0; guests->list && r < guests->size; r++)
        if (guests->list[r].fd >= 0)
            close(guests->list[r].fd);
    free(guests->list);
    guests->list = NULL;
}
