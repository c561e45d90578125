/* Staging: calls on memory of a device, carried out on host memory that the device copies from and to.
 *
 * Both are cut into pieces. While one piece of a collective runs between the ranks, which all do in the same order, the
 * next one is copied from the device, and the one before is copied back. The pieces of a message are the business of
 * one side only. */
#ifndef TD_STAGING_STAGING_H
#define TD_STAGING_STAGING_H

#include "group/process_group.h"

/* Bytes that are copied at once; see docs/algorithms.md. */
enum { TD__STAGED_PIECE = 1 << 20 };

/** A collective that was staged, and its memory. */
struct td__staged_call;

/** Carries out a collective on host memory; `piece` is one of those that a call on a device was cut into. */
typedef td_status (*td__run_piece_fn)(void *arg, struct td__operation *piece);

/** What call.detail of a staged collective and of its pieces is: not that of a call on host memory. */
uint32_t td__staged_detail(const td_call *call);

/** Carries out a collective on memory of a device. Returns when the results are enqueued on the call's stream.
 *  td__staged_call_free() frees *stage, also on failure; other ranks may use its memory before. */
td_status td__staged_call_run(struct td__part *part, const struct td__operation *operation,
                              td__run_piece_fn run, void *arg, struct td__staged_call **stage);
void td__staged_call_free(struct td__staged_call *stage);

/* ---- Messages (staged_messages.c) ----------------------------------------------------------------- */

struct td__staged_message;
struct td__p2p;

/** The messages on devices of one backend. */
struct td__staged_messages {
    td_group *group;
    struct td__p2p *p2p;  /* messages on host memory */
    atomic_uint unposted; /* sends that are being copied from a device */
    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t changed;
    STAILQ_HEAD(, td__staged_message) sends; /* which the thread posts in their order */
    pthread_t thread;
    bool working, stopping;
};

void td__staged_messages_init(struct td__staged_messages *all);
void td__staged_messages_end(struct td__staged_messages *all);

/** As td_backend_ops has them, on memory of a device. */
td_status td__staged_post(struct td__staged_messages *all, const td_call *call, td_work *work);
td_status td__staged_run(struct td__staged_messages *all, const td_call *call);

/** Before a send on host memory: waits until all sends before it are posted, so that messages stay in order. */
void td__staged_flush(struct td__staged_messages *all);

#endif
