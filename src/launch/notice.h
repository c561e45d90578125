/* The messages of launchers to each other, and their encoding. */
#ifndef TD_LAUNCH_NOTICE_H
#define TD_LAUNCH_NOTICE_H

#include "base/buffer.h"
#include "base/fail.h"
#include "launch/options.h"

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

/** The name of this host in messages. */
const char *td__this_host(const struct td__run_options *options);

#endif
