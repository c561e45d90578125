/* The memory that the ranks of one host share, and the processes behind it.
 *
 * Each rank has an entry: its event, and what other ranks need to know of its process. A rank that leaves sets
 * `gone` in its entry after its last message, increments `departures`, and signals all events. A rank that ends
 * without leaving is found by the failure detector, which wakes the waiters of this process.
 *
 * Whether a process may read another's memory is tested once, with a random number that only that process has
 * at that address. */
#include "p2p/p2p_internal.h"

#include <assert.h>
#include <sys/random.h>
#include <sys/uio.h>
#include <unistd.h>

static_assert(sizeof(struct td__ring) == TD__RING_BYTES, "rings stand side by side");
static_assert(sizeof(struct td__descriptor) == TD__LINE, "a descriptor is a cache line");

static size_t descriptors_at(int local_size)
{
    return sizeof(struct td__shared) + (size_t)local_size * sizeof(struct td__p2p_entry);
}

static size_t rings_at(int local_size)
{
    size_t end = descriptors_at(local_size) +
                 (size_t)local_size * TD__DESCRIPTORS * sizeof(struct td__descriptor);
    return (end + TD__RING_BYTES - 1) / TD__RING_BYTES * TD__RING_BYTES;
}

size_t td__p2p_shared_size(int local_size)
{
    return rings_at(local_size) + (size_t)local_size * (size_t)local_size * TD__RING_BYTES;
}

/* ---- Beginning and ending -------------------------------------------------------------------- */

static struct td__ring *ring_between(struct td__p2p *p2p, int from, int to)
{
    char *rings = (char *)p2p->shared + rings_at(p2p->local_size);
    size_t index = (size_t)from * (size_t)p2p->local_size + (size_t)to;
    return (struct td__ring *)(rings + index * TD__RING_BYTES);
}

struct td__descriptor *td__p2p_shm_descriptor(struct td__p2p *p2p, int local, uint32_t number)
{
    char *first = (char *)p2p->shared + descriptors_at(p2p->local_size);
    return (struct td__descriptor *)first + (size_t)local * TD__DESCRIPTORS + number;
}

void td__p2p_shm_begin(struct td__p2p *p2p, void *memory)
{
    int own = p2p->local_index;
    p2p->shared = memory;
    for (int i = 0; i < p2p->local_size; i++) {
        struct td__peer *peer = &p2p->peers[p2p->locals[i]];
        peer->writes.ring = ring_between(p2p, own, i);
        peer->reads.ring = ring_between(p2p, i, own);
        peer->writes.room = TD__RING_DATA;
    }
    if (getrandom(&p2p->nonce, sizeof p2p->nonce, 0) != sizeof p2p->nonce)
        p2p->nonce = (uint64_t)td__now_ns();
    struct td__p2p_entry *entry = &p2p->shared->entries[own];
    entry->nonce = p2p->nonce;
    entry->nonce_address = (uintptr_t)&p2p->nonce;
    atomic_store_explicit(&entry->pid, (uint32_t)getpid(), memory_order_release);
    p2p->attached = true;
}

void td__p2p_shm_leave(struct td__p2p *p2p)
{
    struct td__shared *shared = p2p->shared;
    atomic_store(&shared->entries[p2p->local_index].gone, 1);
    atomic_fetch_add(&shared->departures, 1);
    for (int i = 0; i < p2p->local_size; i++)
        td__wait_event_signal(&shared->entries[i].event);
}

void td__p2p_shm_signal(struct td__p2p *p2p, int peer)
{
    td__wait_event_signal(&p2p->shared->entries[p2p->peers[peer].local].event);
}

struct td__wait_event *td__p2p_shm_own_event(struct td__p2p *p2p)
{
    return &p2p->shared->entries[p2p->local_index].event;
}

bool td__p2p_shm_elsewhere(struct td__p2p *p2p, int peer)
{
    if (peer < 0 || p2p->peers[peer].local < 0)
        return false;
    const struct td__p2p_entry *entry = &p2p->shared->entries[p2p->peers[peer].local];
    return td__wait_event_processor(td__p2p_shm_own_event(p2p)) !=
           td__wait_event_processor(&entry->event);
}

/* ---- The processes of other ranks ------------------------------------------------------------------- */

int td__p2p_shm_pid(struct td__p2p *p2p, int peer)
{
    struct td__p2p_entry *entry = &p2p->shared->entries[p2p->peers[peer].local];
    return (int)atomic_load_explicit(&entry->pid, memory_order_acquire);
}

bool td__p2p_shm_readable(struct td__p2p *p2p, int rank)
{
    struct td__peer *peer = &p2p->peers[rank];
    if (!peer->readable) {
        struct td__p2p_entry *entry = &p2p->shared->entries[peer->local];
        uint64_t nonce = 0;
        struct iovec here = {&nonce, sizeof nonce};
        struct iovec there = {(void *)(uintptr_t)entry->nonce_address, sizeof nonce};
        ssize_t got = process_vm_readv(td__p2p_shm_pid(p2p, rank), &here, 1, &there, 1, 0);
        peer->readable = got == sizeof nonce && nonce == entry->nonce ? 1 : -1;
    }
    return peer->readable > 0;
}
