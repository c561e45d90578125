/* What all attempts have in common; see attempt.h. */
#include "base/fail.h"
#include "launch/attempt.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

/* A worker takes three descriptors here; the workers themselves keep the limit they would have. */
static void raise_file_limit(struct td__attempt_setup *setup)
{
    if (getrlimit(RLIMIT_NOFILE, &setup->file_limit))
        return;
    struct rlimit raised = {.rlim_cur = setup->file_limit.rlim_max,
                            .rlim_max = setup->file_limit.rlim_max};
    if (!setrlimit(RLIMIT_NOFILE, &raised))
        setup->worker.file_limit = &setup->file_limit;
}

static td_status plan_cpus(struct td__attempt_setup *setup)
{
    struct td__cpus allowed;
    if (setup->options->numa == TD__NUMA_NONE)
        return TD_OK;
    TD_TRY(td__cpus_allowed(&allowed));
    setup->cpus = calloc((size_t)setup->options->nproc, sizeof *setup->cpus);
    if (!setup->cpus)
        return td__fail_nomem("binding to CPUs");
    return td__numa_plan("/sys/devices/system", setup->options->numa, setup->options->nproc,
                         &allowed, setup->cpus);
}

static td_status plan_logs(struct td__attempt_setup *setup)
{
    const struct td__run_options *options = setup->options;
    bool any = false;
    for (int i = 0; i < options->nproc; i++)
        any = any || options->redirect[i] || options->tee[i];
    if (!any)
        return TD_OK;
    int node = options->nnodes > 1 ? setup->world->node_rank : -1;
    TD_TRY(td__logs_open(&setup->logs, options->log_dir, options->run_id, node));
    if (setup->logs.fresh[0])
        td__console_say(setup->console, "tdrun: the workers' output is kept in %s\n",
                        setup->logs.directory);
    return TD_OK;
}

td_status td__attempt_setup_open(struct td__attempt_setup *setup)
{
    setup->null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (setup->null < 0)
        return td_fail(TD_ERR_SYSTEM, "cannot open /dev/null: %s", td__errno_text(errno));
    raise_file_limit(setup);
    TD_TRY(plan_cpus(setup));
    return plan_logs(setup);
}

void td__attempt_setup_close(struct td__attempt_setup *setup)
{
    if (setup->null > 0)
        close(setup->null);
    free(setup->cpus);
}
