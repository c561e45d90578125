/* A small network that is trained with td_fsdp(), for tests of offloading: the same numbers in each run. */
#ifndef TANDEM_TESTS_OFFLOAD_TRAINING_H
#define TANDEM_TESTS_OFFLOAD_TRAINING_H

#include <tandem/tandem.h>

enum { OFFLOAD_STEPS = 3 };

struct offload_job {
    td_device *device;
    int parts;        /* passes of a step */
    bool no_sync;     /* all but the last are not reduced */
    double clip;      /* 0: none */
    bool in_backward; /* steps */
    bool scales;      /* with a gradient scaler */
    bool groups;      /* two groups of the optimizer */
};

/* What training has left on this rank. */
struct offload_result {
    float losses[OFFLOAD_STEPS];
    double norm;
    void *bits; /* shards of parameters, and the state of the optimizer; for free() */
    size_t bytes;
    td_fsdp_stats stats;
};

/** About 30,000 parameters in 4 layers, one of them called twice in a pass; on `device`. */
td_module *offload_net(td_device *device);
td_optimizer *offload_optimizer(td_module *model, const struct offload_job *job);

/** One step; returns its status, and the loss of the last pass. */
td_status offload_step(td_module *model, td_optimizer *optimizer, td_grad_scaler *scaler,
                       const struct offload_job *job, int step, float *loss, double *norm);

/** OFFLOAD_STEPS steps of a new network, which must succeed. */
struct offload_result offload_train(const struct offload_job *job, const td_fsdp_options *options);

/** The bits of a model and its optimizer on this rank, behind *bytes. */
void *offload_bits(td_module *model, td_optimizer *optimizer, size_t *bytes);

#endif
