/* What Slurm says about the job step that this process is a task of; for srun ./program and srun tdrun. */
#ifndef TD_STORE_SLURM_H
#define TD_STORE_SLURM_H

#include <tandem/base.h>

struct td__slurm_step {
    int nodes, node;       /* of the step, and which of them this is */
    int task, local_task;  /* which of its tasks this process is, in the step and on this node */
    int tasks, tasks_here; /* how many there are in the step, and on this node */
    int cpus;              /* of each task; 0 where Slurm does not say */
};

/** Reads the variables that srun sets for its tasks; *inside is false in a batch script, where srun has not
 *  started this process, and outside of Slurm. TD_ERR_INVALID: one of them is malformed. */
td_status td__slurm_step_read(struct td__slurm_step *step, bool *inside);

/** The first node of the step, and how many it has: "" and 0 where Slurm does not say. */
td_status td__slurm_nodes(char first[256], int64_t *nodes);

/** A port for the job's store: the same for all tasks of a step, another one for other steps and jobs. */
int td__slurm_port(void);

/**
 * The address of a node for other nodes: its name where that can be looked up; otherwise what Slurm knows, from
 * SLURM_NODE_ALIASES or `scontrol show node`. Where neither knows better, the name.
 */
void td__slurm_node_address(const char *node, char address[256]);

/**
 * In a job of Slurm that has no secret (TANDEM_SECRET, TANDEM_SECRET_FILE), makes the job's from the user's own
 * secret, which all nodes find in the home directory that they share, and adopts it (td__secret_adopt()). It is a MAC
 * over the cluster, the job and the number of times that the job was requeued: other users cannot compute it, and
 * neither other jobs nor processes that are left of an earlier run of this one have it. Elsewhere, and with
 * TANDEM_INSECURE=1, it does nothing, and `text`, unless that is NULL, is "".
 *
 * TD_ERR_AUTH: the user's secret cannot be used; the sentence says why.
 */
td_status td__slurm_adopt_secret(char text[65]);

#endif
