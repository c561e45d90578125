/* Sharded checkpoints of a training. The entries are those of training_state.c; each rank writes its own generators and
 * sampler, and reads those of its number. What of the model and the optimizer it reads, the marks of the parameters say. */
#include "base/fail.h"
#include "checkpoint/sharded.h"
#include "optim/optimizer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

td_status td_training_save_sharded(const char *directory, const td_training *training,
                                   td_group *group, td_async_save **save)
{
    static const char call[] = "td_training_save_sharded";
    struct td__coordinator coordinator;
    td_state *state = NULL;
    TD_TRY(td__coordinator_of(call, group, &coordinator));
    td_status mine = td__training_own(call, training, coordinator.rank, coordinator.size, &state);
    struct td__save_request request = {
        .call = call, .path = directory, .state = state, .is_training = true};
    td_status status = td__save_sharded(&request, group, mine, save);
    td_state_destroy(state);
    return status;
}

/* ---- Loading ------------------------------------------------------------------------------------------- */

struct loading {
    const td_training *training;
    const struct td__coordinator *coordinator;
    struct td__shard_reader reader;
    td_state *model; /* of the training; NULL: there is none */
    int64_t ranks;   /* of the checkpoint */
    td_state *state;
};

static const char *behind(const char *name, const char *prefix)
{
    size_t length = strlen(prefix);
    return strncmp(name, prefix, length) ? NULL : name + length;
}

/* Of "state.3.exp_avg", parameter 3, which it is like; NULL for numbers. */
static const td_tensor *parameter_of(const td_optimizer *optimizer, const char *name)
{
    int number = -1, length = 0;
    if (sscanf(name, "state.%d.%n", &number, &length) != 1 || length == 0 || number < 0 ||
        number >= optimizer->count || !strcmp(name + length, "step"))
        return NULL;
    return optimizer->parameters[number].tensor;
}

/* Whether an entry is needed, and which tensor it is for, if any. */
static bool is_needed(const struct loading *loading, const struct td__sharded_tensor *tensor,
                      const td_tensor **target)
{
    const td_training *training = loading->training;
    const char *name;
    char own[64];
    *target = NULL;
    if ((name = behind(tensor->name, "model."))) {
        *target = training->model ? td__find_wrapped(loading->model, name) : NULL;
        return training->model;
    }
    if ((name = behind(tensor->name, "optimizer."))) {
        *target = training->optimizer ? parameter_of(training->optimizer, name) : NULL;
        return training->optimizer;
    }
    if (behind(tensor->name, "schedule."))
        return training->schedule;
    if (behind(tensor->name, "scaler."))
        return training->scaler;
    if (!behind(tensor->name, "rank."))
        return true;
    snprintf(own, sizeof own, "rank.%d.", loading->coordinator->rank);
    bool other_size = loading->ranks != loading->coordinator->size;
    return other_size ? !strcmp(tensor->name, "rank.0.sampler") : behind(tensor->name, own) != NULL;
}

static td_status fetch(struct loading *loading)
{
    const struct td__index *index = loading->reader.index;
    for (size_t i = 0; i < index->count; i++) {
        const struct td__sharded_tensor *tensor = index->tensors[i];
        const td_tensor *target;
        if (!is_needed(loading, tensor, &target))
            continue;
        td_tensor *fetched = td__shard_fetch(&loading->reader, tensor, tensor->name, target, true);
        if (!fetched)
            return td__error_status();
        td_status status = td_state_add(loading->state, tensor->name, fetched);
        td_tensor_release(fetched);
        TD_TRY(status);
    }
    return TD_OK;
}

/* Whether the module and its sizes fit, before anything is read. */
static td_status begin(struct loading *loading, const char *call, const char *path,
                       const struct td__index *index)
{
    if (!index->is_training)
        return td_fail(TD_ERR_INVALID,
                       "%s: %s holds tensors, but is no checkpoint of a training; read it with "
                       "td_load_sharded()",
                       call, path);
    loading->ranks = index->ranks;
    loading->state = td_state_create();
    if (!loading->state)
        return td__error_status();
    if (loading->training->model && !(loading->model = td_module_state(loading->training->model)))
        return td__error_status();
    return td__shard_reader_begin(&loading->reader, call, path, index);
}

td_status td__training_load_sharded(const char *call, const char *path, td_training *training,
                                    const struct td__coordinator *coordinator)
{
    struct loading loading = {.training = training, .coordinator = coordinator};
    struct td__index index;
    char *directory = NULL;
    td_status mine = training ? TD_OK : td_fail(TD_ERR_INVALID, "%s: the training is NULL", call);
    TD_TRY(td__index_share(call, coordinator, path, mine, &index, &directory));
    td_status status = begin(&loading, call, directory, &index);
    if (!status) {
        status = fetch(&loading);
        td__shard_reader_end(&loading.reader);
    }
    td_state_destroy(loading.model);
    td__index_free(&index);
    free(directory);
    /* All ranks must have read theirs before one changes anything. */
    status = td__coordinator_agree(coordinator, status);
    if (status) {
        td_state_destroy(loading.state);
        return status;
    }
    return td__training_finish(call, coordinator, TD_OK, loading.state, training);
}

td_status td_training_load_sharded(const char *directory, td_training *training, td_group *group)
{
    static const char call[] = "td_training_load_sharded";
    struct td__coordinator coordinator;
    TD_TRY(td__coordinator_of(call, group, &coordinator));
    return td__training_load_sharded(call, directory, training, &coordinator);
}
