/* The memory that the ranks of one host share; see p2p_shm.c and p2p_ring.c.
 *
 *     shared | entry of each rank | descriptors of each rank | ring 0→0, 0→1, … 1→0, … */
#ifndef TD_P2P_P2P_SHM_INTERNAL_H
#define TD_P2P_P2P_SHM_INTERNAL_H

#include "p2p/p2p_internal.h"

enum { TD__LINE = 64, TD__RING_BYTES = 32 * 1024, TD__RING_DATA = TD__RING_BYTES - 2 * TD__LINE };

struct td__ring {
    _Alignas(TD__LINE) _Atomic uint64_t head;    /* bytes taken; the reader's */
    _Alignas(TD__LINE) _Atomic uint32_t starved; /* the writer waits for room */
    _Alignas(TD__LINE) char data[TD__RING_DATA];
};

struct td__p2p_entry {
    _Alignas(TD__LINE) struct td__wait_event event;
    _Alignas(TD__LINE) _Atomic uint32_t pid; /* the others are valid once this is not 0 */
    _Atomic uint32_t gone;
    uint64_t pid_namespace;
    uint64_t nonce;
    uint64_t nonce_address;
};

struct td__shared {
    _Alignas(TD__LINE) _Atomic uint32_t departures;
    struct td__p2p_entry entries[];
};

/** A rank has left or died: takes what it had sent before, and parts with it. */
void td__ring_lose(struct td__p2p *p2p, int source, const char *exit_reason);

#endif
