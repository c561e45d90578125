/* A job is an operation under way: its buffers, and its works where it is asynchronous. */
#ifndef TANDEM_TESTS_CHAOS_JOB_H
#define TANDEM_TESTS_CHAOS_JOB_H

#include "chaos.h"

enum { MOST_WORKS = 2 * MAX_RANKS };

struct job {
    struct operation operation;
    const struct members *members;
    int lane;
    int self; /* this rank in the group */
    size_t input_bytes, output_bytes;
    char *input, *output; /* the same where it is in place */
    bool input_shared, output_shared;
    td_work *works[MOST_WORKS];
    int partners[MOST_WORKS]; /* ranks of the world, for messages; -1: any */
    bool receives[MOST_WORKS];
    int work_count;
    bool failed;
};

/* chaos_data.c */

/** Makes the buffers, and fills them in. */
void job_prepare(struct job *job);

/** Frees the buffers and the works, which are complete. */
void job_clean_up(struct job *job);

/** After a failure: marks the buffers, which are the caller's again; and whether the marks are still there,
 *  so that no rank has written to them since. */
void job_mark(struct job *job);
bool job_is_marked(const struct job *job);

/** Whether the output is right, and the input unchanged. */
bool job_result_is_right(const struct job *job);
bool job_input_is_whole(struct job *job);

/* chaos_judge.c */

/** "lane 0, operation 7, all_reduce of …". */
void job_describe(const struct job *job, char text[200]);

/** A collective has ended so; its call, or the wait for it, began at `since`. */
void judge_collective(struct rank *rank, const struct job *job, td_status status, int64_t since);

/** A message from or to `partner` has failed. */
void judge_message(struct rank *rank, const struct job *job, int partner, td_status status,
                   int64_t since);

#endif
