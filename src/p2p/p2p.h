/* Point-to-point messages between the ranks of one group: matching, and their transport through shared memory and
 * over links. All functions may be called from any thread. */
#ifndef TD_P2P_P2P_H
#define TD_P2P_P2P_H

#include "peer/endpoint.h"

#include <tandem/backend.h>

struct td__p2p;

/**
 * `world_ranks` are the group's ranks in order, this one at `rank`; `key` is the group's number. Ranks of
 * the same host use the shared memory of td__p2p_shared_size() bytes that `shared` returns, all others links.
 * Nothing is opened yet, and no rank is waited for.
 */
struct td__p2p_options {
    struct td__endpoint *endpoint;
    uint64_t key;
    const int *world_ranks;
    int size;
    int rank;
    bool sockets_only; /* links to all, also to those of this host */
    const char *name;  /* of the group, for error texts */

    /** Returns the memory that the ranks of this host share, zeroed at first. Called once, on first use. It may
     *  wait until another rank has created the memory. */
    td_status (*shared)(void *arg, td__deadline deadline, void **memory);
    void *shared_arg;

    /** Whether `world_rank`, on this host, has mapped it. May be NULL. */
    bool (*has_memory)(void *shared_arg, int world_rank);
};

td_status td__p2p_create(const struct td__p2p_options *options, struct td__p2p **p2p);

/** Fails the posts that are left, sends BYE on all links, and frees everything. */
void td__p2p_destroy(struct td__p2p *p2p);

/** How much shared memory `local_size` ranks on one host need. Untouched pages cost nothing. */
size_t td__p2p_shared_size(int local_size);

/**
 * A message whose payload is sent while it is still being made, or used while it still arrives: for both sides, and for
 * every other rank, it is one message like any other. The struct stays until the post has ended.
 */
struct td__p2p_stream {
    struct td__post *post; /* NULL when it has ended */

    /** Of a send of more than 64 KiB: the first `ready` bytes can be read. td__p2p_supply() sets it. */
    size_t ready;

    /** Of a recv: the first `bytes` of the payload are there; not called for the last ones. Calls come in order, from
     *  any thread, and must not block or call functions of this header. */
    void (*arrived)(struct td__p2p_stream *stream, size_t bytes);
};

/** As td_backend_ops has them; `stream` may be NULL. */
td_status td__p2p_post(struct td__p2p *p2p, const td_call *call, td_work *work,
                       const atomic_bool *complete, struct td__p2p_stream *stream);

/** The first `bytes` of a send can be read, more than before. */
void td__p2p_supply(struct td__p2p *p2p, struct td__p2p_stream *stream, size_t bytes);

/** The rest of a send cannot be made: it fails with this status and the last error, the recv with TD_ERR_PEER. */
void td__p2p_fail_stream(struct td__p2p *p2p, struct td__p2p_stream *stream, td_status status);

/** Makes progress until `complete` is set, which waits for `peer`, or TD_ANY_SOURCE. */
void td__p2p_progress(struct td__p2p *p2p, const atomic_bool *complete, int peer,
                      int64_t timeout_ms);

/** Posts a send or a recv and waits for it: the same without a work, and faster. `source` and `received`
 *  are set by a successful recv, and may be NULL. */
td_status td__p2p_run(struct td__p2p *p2p, const td_call *call, int *source, size_t *received);

/** The group is aborted: all posts, present and future, fail with this status and the last error. */
void td__p2p_abort(struct td__p2p *p2p, td_status status);

#endif
