/* How a node joins its job: it claims its rank, publishes its introduction, and works out the ranks of its
 * workers from the introductions of all nodes. node.c describes the keys. */
#ifndef TD_LAUNCH_ARRIVAL_H
#define TD_LAUNCH_ARRIVAL_H

#include "base/buffer.h"
#include "launch/node.h"

#define TD__KEY "\1launch/"
#define TD__KEY_OVER TD__KEY "over"
#define TD__KEY_NODE TD__KEY "node/"

enum { TD__KEY_ROOM = 64 };

/** Claims the rank *node_rank, or where that is -1 the next one. TD_ERR_MISMATCH: it is taken, or the
 *  job has all of its nodes; with *tell_all the other nodes fail as well. */
td_status td__arrival_claim(td_store *store, const struct td__run_options *options, int *node_rank,
                            bool *tell_all);

/** Publishes this node's introduction, and a will: the store reports the launcher's end by it. */
td_status td__arrival_introduce(td_store *store, const struct td__run_options *options,
                                int node_rank);

/** --keep-going, when the job has begun: the will says only that this node's workers have ended. */
td_status td__arrival_change_will(td_store *store, const struct td__run_options *options,
                                  int node_rank);

/** The join timeout has passed: TD_ERR_TIMEOUT, which names the nodes that have not joined. */
td_status td__arrival_missing(td_store *store, const struct td__run_options *options);

/** Works out the world from the introductions of all nodes; `world` has zeros but for the node's rank and
 *  the port. TD_ERR_MISMATCH: they were not started alike. */
td_status td__arrival_survey(const td_bytes *values, const struct td__run_options *options,
                             struct td__node_world *world);

/* ---- The messages of launchers to each other, and their encoding (notice.c) ------------------ */

/** Something went wrong on a node. */
struct td__notice {
    int node;
    int code;                  /* the exit code that goes with it */
    char text[TD__ERROR_TEXT]; /* a sentence */
};

void td__notice_put(struct td__buffer *buffer, int node, int code, const char *text);

/** Reads the first of the notices in `value`; false when there is none. */
bool td__notice_read(const td_bytes *value, struct td__notice *notice);

/** What a node publishes about itself when it joins. */
struct td__introduction {
    int nnodes, nproc, max_restarts, pid;
    bool keep_going;
    char host[256], run_id[256], role[256];
};

void td__introduction_put(struct td__buffer *buffer, const struct td__run_options *options);
bool td__introduction_read(const td_bytes *value, struct td__introduction *introduction);

/** Compares what must be the same on all nodes; TD_ERR_MISMATCH names both. */
td_status td__introduction_check(const struct td__introduction *node, int node_rank,
                                 const struct td__introduction *first);

/* ---- One key for each node: "<prefix>0", "<prefix>1", … in the job's store ------------------- */

/** Waits until all `count` keys exist; *values is freed with td__gather_free(). NULL where one is empty, which
 *  says nothing but "wake up". */
td_status td__gather_wait(td_store *store, const char *prefix, int count, int64_t timeout_ms,
                          td_bytes **values);

void td__gather_free(td_bytes *values, int count);

/** Sets all of them to the same text, in one step and without waiting. */
td_status td__gather_set(td_store *store, const char *prefix, int count, const char *value);

#endif
