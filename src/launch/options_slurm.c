/* tdrun's options under Slurm; see options.h.
 *
 * What batch scripts have that were written for another launcher, and what is made of it:
 *
 *     srun with several tasks a node      an error, since each task would be a launcher of all workers
 *     --node-rank=$SLURM_NODEID           0 on all nodes, since the batch shell expands it: SLURM_NODEID instead
 *     --master-addr=$(scontrol …)         a name that perhaps only Slurm knows: its address
 *
 * Several launchers on a node are right where --nnodes counts them (--nnodes $SLURM_NTASKS), and with --standalone. */
#include "launch/options.h"

#include "base/fail.h"
#include "base/text.h"
#include "os/address.h"
#include "store/slurm.h"

#include <stdlib.h>

static td_status fail_several(const struct td__slurm_step *step,
                              const struct td__given_place *given,
                              const struct td__run_options *options)
{
    char cpus[48] = "", flags[160] = "", rank[160] = "";
    if (step->cpus)
        snprintf(cpus, sizeof cpus, " --cpus-per-task=%d", step->cpus * step->tasks_here);
    if (given->nnodes || given->node_rank >= 0 || given->master_addr || given->endpoint)
        snprintf(flags, sizeof flags,
                 ", without --nnodes, --node-rank, --master-addr and --master-port, which tdrun "
                 "takes from Slurm");
    if (given->node_rank >= 0 && step->nodes > 1)
        snprintf(
            rank, sizeof rank,
            " ($SLURM_NODEID in a batch script is 0 for every node: the batch shell expands it "
            "before srun starts)");
    return td_fail(
        TD_ERR_INVALID,
        "srun has started %d launchers on this node (--ntasks-per-node=%d), and each of "
        "them would start %d worker%s: one tdrun a node starts all of them; write srun "
        "--ntasks-per-node=1%s tdrun --nproc-per-node=%d %s%s%s",
        step->tasks_here, step->tasks_here, options->nproc, options->nproc == 1 ? "" : "s", cpus,
        options->nproc > 1 ? options->nproc : step->tasks_here, "program …", flags, rank);
}

static void take_place(const struct td__slurm_step *step, const struct td__given_place *given,
                       struct td__run_options *options)
{
    options->nnodes = step->nodes;
    if (!given->nnodes)
        options->min_nodes = step->nodes;
    if (given->node_rank < 0 && !given->numbered_on_arrival)
        options->node_rank = step->node;
    if (given->node_rank == 0 && step->node > 0) {
        options->node_rank = step->node;
        td__text_add(options->notes, sizeof options->notes,
                     "tdrun: --node-rank 0 is wrong here, since Slurm says that this is node %d: "
                     "$SLURM_NODEID in a batch script is expanded before srun starts; leave "
                     "--node-rank out, tdrun reads SLURM_NODEID itself\n",
                     step->node);
    }
}

static td_status take_address(const struct td__given_place *given, struct td__run_options *options)
{
    char node[256];
    int64_t nodes = 1;
    if (given->master_port < 0)
        options->port = td__slurm_port();
    snprintf(node, sizeof node, "%s", options->host);
    if (!given->master_addr && !given->endpoint)
        TD_TRY(td__slurm_nodes(node, &nodes));
    if (nodes && !td__host_is_loopback(node))
        td__slurm_node_address(node, options->host);
    return TD_OK;
}

td_status td__options_from_slurm(const struct td__given_place *given,
                                 struct td__run_options *options)
{
    struct td__slurm_step step;
    bool inside;
    TD_TRY(td__slurm_step_read(&step, &inside));
    if (!inside)
        return TD_OK;
    if (given->nnodes && options->nnodes != step.nodes)
        return TD_OK; /* launchers of several steps, or several on a node: by hand */
    if (step.tasks > step.nodes) {
        options->quiet = step.task > 0;
        return fail_several(&step, given, options);
    }
    take_place(&step, given, options);
    options->threads = step.cpus / options->nproc;
    if (step.cpus && !options->threads)
        options->threads = 1;
    return options->nnodes > 1 ? take_address(given, options) : TD_OK;
}
