/* tdrun drain: asks a job that runs on this machine to move the workers of one of its nodes away.
 *
 * Each agent listens at a unix socket that is named after the pid of its tdrun. A request is the name of a node, and the
 * answer a sentence, behind '+' or '-'. The node that is meant may be another one. */
#ifndef TD_LAUNCH_DRAIN_H
#define TD_LAUNCH_DRAIN_H

struct td__agent;

/** Begins to listen. Where that is not possible, the job runs as well. */
void td__drain_listen(struct td__agent *agent);

/** Answers the request that was passed on. */
void td__drain_answer(struct td__agent *agent, int code, const char *text);

void td__drain_close(struct td__agent *agent);

/** The command. */
int td__drain_run(int argc, char **argv);

#endif
