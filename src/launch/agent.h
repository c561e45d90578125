/* The agent: starts the workers of this node, watches over them, and ends them. */
#ifndef TD_LAUNCH_AGENT_H
#define TD_LAUNCH_AGENT_H

#include "launch/supervisor.h"
#include "launch/job_store.h"
#include "launch/worker_program.h"

struct td__agent_job {
    const struct td__run_options *options;
    const struct td__job_secret *secret;
    const struct td__worker_program *program;
};

/** Runs the job (a struct td__agent_job) and returns tdrun's exit code. Says on standard error what
 *  the user should know. For td__supervisor_run(). */
int td__agent_run(const struct td__agent_start *start, void *job);

#endif
