/* The memory that the ranks of one host share, and the processes behind it.
 *
 * Each rank has an entry: the bell that wakes it, and what others need to know of its process. Whoever
 * leaves sets `gone` in his entry after his last message, counts himself in `departures`, and rings
 * everybody. Whoever dies does not: those who wait look from time to time whether the others' processes
 * are still there, as far as they are in the same namespace and numbers of processes mean anything.
 *
 * Whether a process may read another's memory is found out by trying, with a number that only that
 * process has at that address. */
#include "group/messages_shared.h"

#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static_assert(sizeof(struct td__ring) == TD__RING_BYTES, "rings stand side by side");
static_assert(sizeof(struct td__descriptor) == TD__LINE, "a descriptor is a cache line");

static size_t descriptors_at(int local_size)
{
    return sizeof(struct td__shared) + (size_t)local_size * sizeof(struct td__entry);
}

static size_t rings_at(int local_size)
{
    size_t end = descriptors_at(local_size) +
                 (size_t)local_size * TD__LARGE_SLOTS * sizeof(struct td__descriptor);
    return (end + TD__RING_BYTES - 1) / TD__RING_BYTES * TD__RING_BYTES;
}

size_t td__messages_shared_size(int local_size)
{
    return rings_at(local_size) + (size_t)local_size * (size_t)local_size * TD__RING_BYTES;
}

/* ---- Beginning and ending -------------------------------------------------------------------- */

static struct td__ring *ring_between(struct td__messages *messages, int from, int to)
{
    char *rings = (char *)messages->shared + rings_at(messages->local_size);
    size_t index = (size_t)from * (size_t)messages->local_size + (size_t)to;
    return (struct td__ring *)(rings + index * TD__RING_BYTES);
}

struct td__descriptor *td__shm_descriptor(struct td__messages *messages, int local, uint32_t slot)
{
    char *first = (char *)messages->shared + descriptors_at(messages->local_size);
    return (struct td__descriptor *)first + (size_t)local * TD__LARGE_SLOTS + slot;
}

void td__shm_begin(struct td__messages *messages, void *memory)
{
    int own = messages->local_index;
    messages->shared = memory;
    for (int i = 0; i < messages->local_size; i++) {
        struct td__peer *peer = &messages->peers[messages->locals[i]];
        peer->writes.ring = ring_between(messages, own, i);
        peer->reads.ring = ring_between(messages, i, own);
        peer->writes.room = TD__RING_DATA;
    }
    if (getrandom(&messages->nonce, sizeof messages->nonce, 0) != sizeof messages->nonce)
        messages->nonce = (uint64_t)td__now_ns();
    struct stat space;
    struct td__entry *entry = &messages->shared->entries[own];
    entry->pid_namespace = stat("/proc/self/ns/pid", &space) ? 0 : space.st_ino;
    entry->nonce = messages->nonce;
    entry->nonce_address = (uintptr_t)&messages->nonce;
    atomic_store_explicit(&entry->pid, (uint32_t)getpid(), memory_order_release);
    messages->attached = true;
}

void td__shm_leave(struct td__messages *messages)
{
    struct td__shared *shared = messages->shared;
    atomic_store(&shared->entries[messages->local_index].gone, 1);
    atomic_fetch_add(&shared->departures, 1);
    for (int i = 0; i < messages->local_size; i++)
        td__bell_ring(&shared->entries[i].bell);
}

void td__shm_ring(struct td__messages *messages, int peer)
{
    td__bell_ring(&messages->shared->entries[messages->peers[peer].local].bell);
}

struct td__bell *td__shm_own_bell(struct td__messages *messages)
{
    return &messages->shared->entries[messages->local_index].bell;
}

bool td__shm_elsewhere(struct td__messages *messages, int peer)
{
    if (peer < 0 || messages->peers[peer].local < 0)
        return false;
    const struct td__entry *entry = &messages->shared->entries[messages->peers[peer].local];
    return td__bell_processor(td__shm_own_bell(messages)) != td__bell_processor(&entry->bell);
}

/* ---- The others' processes ------------------------------------------------------------------- */

int td__shm_pid(struct td__messages *messages, int peer)
{
    struct td__entry *entry = &messages->shared->entries[messages->peers[peer].local];
    return (int)atomic_load_explicit(&entry->pid, memory_order_acquire);
}

bool td__shm_readable(struct td__messages *messages, int rank)
{
    struct td__peer *peer = &messages->peers[rank];
    if (!peer->readable) {
        struct td__entry *entry = &messages->shared->entries[peer->local];
        uint64_t nonce = 0;
        struct iovec here = {&nonce, sizeof nonce};
        struct iovec there = {(void *)(uintptr_t)entry->nonce_address, sizeof nonce};
        ssize_t got = process_vm_readv(td__shm_pid(messages, rank), &here, 1, &there, 1, 0);
        peer->readable = got == sizeof nonce && nonce == entry->nonce ? 1 : -1;
    }
    return peer->readable > 0;
}
