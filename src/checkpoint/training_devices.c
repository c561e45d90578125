/* Which entries of a checkpoint are loaded, and to which devices. What a part keeps on its devices goes there at once;
 * numbers, generators and positions are read by the host. Entries of parts that no rank has are skipped. */
#include "base/fail.h"
#include "checkpoint/training.h"
#include "optim/optimizer.h"

#include <stdio.h>
#include <string.h>

int td__training_parts(const td_training *training)
{
    if (!training)
        return 0;
    return (training->model ? TD__PART_MODEL : 0) | (training->optimizer ? TD__PART_OPTIMIZER : 0) |
           (training->schedule ? TD__PART_SCHEDULE : 0) |
           (training->sampler ? TD__PART_SAMPLER : 0) | (training->scaler ? TD__PART_SCALER : 0);
}

td_status td__gather_parts(const struct td__coordinator *coordinator, const td_training *training,
                           int *parts)
{
    struct td__buffer mine = {0};
    td_bytes *all = NULL;
    td__buffer_put_u8(&mine, (uint8_t)td__training_parts(training));
    td_status status = mine.failed ? td__fail_nomem("a checkpoint")
                                   : td__coordinator_gather(coordinator, &mine, &all);
    *parts = 0;
    for (int r = 0; all && r < coordinator->size; r++)
        *parts |= all[r].size == 1 ? (uint8_t)all[r].data[0] : 0;
    td__coordinator_free(coordinator, all);
    td__buffer_free(&mine);
    return status;
}

/* The name behind `prefix`; NULL if it does not begin with that. */
static const char *behind(const char *name, const char *prefix)
{
    size_t length = strlen(prefix);
    return strncmp(name, prefix, length) ? NULL : name + length;
}

/* Of "state.3.exp_avg", where parameter 3 is. */
static td_device *home_in_optimizer(const td_optimizer *optimizer, const char *name)
{
    int number = -1;
    if (!optimizer || sscanf(name, "state.%d.", &number) != 1 || number < 0 ||
        number >= optimizer->count)
        return td__host_device();
    return td__target_of(td_tensor_device(optimizer->parameters[number].tensor));
}

static td_device *home_of(const struct td__file_tensor *tensor, bool *fixed, void *arg)
{
    const struct td__training_target *target = arg;
    const char *name = behind(tensor->name, "model.");
    if (name && !(target->parts & TD__PART_MODEL))
        return NULL;
    if (name)
        return td__home_in(target->model, name);
    name = behind(tensor->name, "optimizer.");
    if (name && !(target->parts & TD__PART_OPTIMIZER))
        return NULL;
    if (name && tensor->ndim > 0)
        return home_in_optimizer(target->training ? target->training->optimizer : NULL, name);
    *fixed = true;
    return td__host_device();
}

td_status td__training_target(const td_training *training, int parts,
                              struct td__training_target *target)
{
    *target = (struct td__training_target){.training = training, .parts = parts};
    target->load = (struct td__load_target){
        .map = training ? training->map_location : NULL, .home = home_of, .arg = target};
    if (training && training->model && !(target->model = td_module_state(training->model)))
        return td__error_status();
    return TD_OK;
}

void td__training_target_free(struct td__training_target *target)
{
    td_state_destroy(target->model);
    target->model = NULL;
}
