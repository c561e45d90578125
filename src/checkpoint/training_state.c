/* The entries of a checkpoint:
 *
 *     training.epoch, training.step     the program's counts
 *     training.ranks, training.parts    how many ranks there were, and which of its parts there are
 *     model.…, optimizer.…, …           the states of these, of the schedule and of the scaler
 *     rank.0.random, rank.0.sampler     of each rank: the host's generator, and where its sampler was
 *     rank.0.random.cuda:0              its generators of accelerators that were used
 *
 * Parts are loaded one after another, each completely or not at all. If one fails, or another rank
 * does, the former values of those before it are restored. */
#include "base/option_rules.h"
#include "checkpoint/training.h"
#include "tensor/random_internal.h"
#include "tensor/tensor_internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { POSITION_SIZE = 4, LONGEST_MESSAGE = 1 << 16, NAME_SIZE = 64 };

/* ---- Saving --------------------------------------------------------------------------------------- */

static td_status check_training(const char *call, const td_training *training)
{
    if (!training)
        return td_fail(TD_ERR_INVALID, "%s: the training is NULL", call);
    return td__check_reserved(call, training->reserved);
}

/* The default generators of accelerators: how many, and of each its device and its state. */
static void pack_devices(struct td__buffer *own)
{
    uint32_t count = 0;
    td_generator *generator, *first = td__next_default_generator(NULL);
    for (generator = first; generator; generator = td__next_default_generator(generator))
        count++;
    td__buffer_put_u32(own, count);
    for (generator = first; generator; generator = td__next_default_generator(generator)) {
        unsigned char state[TD_GENERATOR_STATE_SIZE];
        size_t size = td_generator_state_size(generator);
        const char *name = td_device_name(td_generator_device(generator));
        td_generator_get_state(generator, state, size);
        td__buffer_put_string(own, name, strlen(name));
        td__buffer_put_string(own, state, size);
    }
}

td_status td__training_pack(const char *call, const td_training *training, struct td__buffer *own)
{
    td_status status = check_training(call, training);
    const char *message = status ? td__error_text() : "";
    unsigned char random[TD_GENERATOR_STATE_SIZE];
    td_sampler_position position = {0};
    td__buffer_put_u8(own, (uint8_t)status);
    td__buffer_put_string(own, message, strlen(message));
    if (!status) {
        td_sampler_get_position(training->sampler, &position);
        td_generator_get_state(NULL, random, sizeof random);
        td__buffer_put_u8(own, training->sampler != NULL);
        td__buffer_put_u64(own, (uint64_t)position.epoch);
        td__buffer_put_u64(own, (uint64_t)position.taken);
        td__buffer_put_u64(own, position.seed);
        td__buffer_put_u64(own, position.begun);
        td__buffer_put_string(own, random, sizeof random);
        pack_devices(own);
    }
    return own->failed ? td__fail_nomem(call) : TD_OK;
}

static td_status add_list(td_state *state, const char *name, td_dtype dtype, const void *data,
                          int64_t count)
{
    td_tensor *tensor = td__empty("a checkpoint", &count, 1, dtype, td__host_device());
    if (!tensor)
        return TD_ERR_NOMEM;
    memcpy(td_tensor_data(tensor), data, td_tensor_nbytes(tensor));
    td_status status = td_state_add(state, name, tensor);
    td_tensor_release(tensor);
    return status;
}

/* Adds the packed part of a rank. */
static td_status add_rank(const char *call, td_bytes packed, int rank, td_state *state)
{
    struct td__reader reader = td__reader_of(packed.data, packed.size);
    td_status status = (td_status)td__reader_u8(&reader);
    struct td__span message = td__reader_string(&reader, LONGEST_MESSAGE);
    if (status && td__reader_done(&reader))
        return td_fail(status, "rank %d: %.*s", rank, (int)message.size, message.data);
    bool has_sampler = td__reader_u8(&reader);
    int64_t position[POSITION_SIZE];
    for (int i = 0; i < POSITION_SIZE; i++)
        position[i] = (int64_t)td__reader_u64(&reader);
    struct td__span random = td__reader_string(&reader, TD_GENERATOR_STATE_SIZE);
    char name[NAME_SIZE];
    for (uint32_t left = td__reader_u32(&reader); left > 0 && !reader.failed; left--) {
        struct td__span device = td__reader_string(&reader, NAME_SIZE / 2);
        struct td__span own = td__reader_string(&reader, TD_GENERATOR_STATE_SIZE);
        if (reader.failed)
            break;
        snprintf(name, sizeof name, "rank.%d.random.%.*s", rank, (int)device.size,
                 (const char *)device.data);
        TD_TRY(add_list(state, name, TD_U8, own.data, (int64_t)own.size));
    }
    if (!td__reader_done(&reader) || random.size != TD_GENERATOR_STATE_SIZE)
        return td_fail(TD_ERR_MISMATCH, "%s: rank %d made another call", call, rank);
    snprintf(name, sizeof name, "rank.%d.random", rank);
    TD_TRY(add_list(state, name, TD_U8, random.data, TD_GENERATOR_STATE_SIZE));
    snprintf(name, sizeof name, "rank.%d.sampler", rank);
    return has_sampler ? add_list(state, name, TD_I64, position, POSITION_SIZE) : TD_OK;
}

/* Adds the state of a part, which it takes over. */
static td_status add_part(td_state *state, const char *prefix, td_state *part)
{
    if (!part)
        return td__error_status();
    td_status status = td_state_add_all(state, prefix, part);
    td_state_destroy(part);
    return status;
}

/* Of which other ranks have the rest, or which lies flat. */
static bool is_divided(const td_tensor *tensor)
{
    const td_shard *shard = td_tensor_shard(tensor);
    if (!shard)
        return false;
    bool same = td_tensor_ndim(tensor) == shard->ndim;
    for (int d = 0; same && d < shard->ndim; d++)
        same = td_tensor_size(tensor, d) == shard->shape[d];
    return !same;
}

static td_status add_parts(const td_training *training, td_state *state)
{
    if (training->model)
        TD_TRY(add_part(state, "model.", td_module_state(training->model)));
    if (training->optimizer)
        TD_TRY(add_part(state, "optimizer.", td_optimizer_state(training->optimizer)));
    if (training->schedule)
        TD_TRY(add_part(state, "schedule.", td_schedule_state(training->schedule)));
    if (training->scaler)
        TD_TRY(add_part(state, "scaler.", td_grad_scaler_state(training->scaler)));
    return TD_OK;
}

static td_status add_numbers(const td_training *training, int size, td_state *state)
{
    TD_TRY(td_state_add_integer(state, "training.epoch", training->epoch));
    TD_TRY(td_state_add_integer(state, "training.step", training->step));
    TD_TRY(td_state_add_integer(state, "training.ranks", size));
    return td_state_add_integer(state, "training.parts", td__training_parts(training));
}

static td_status collect(const char *call, const td_training *training, const td_bytes *all,
                         int size, td_state *state)
{
    for (int r = 0; r < size; r++)
        TD_TRY(add_rank(call, all[r], r, state));
    TD_TRY(add_numbers(training, size, state));
    TD_TRY(add_parts(training, state));
    for (int i = 0; i < td_state_count(state); i++)
        if (is_divided(td_state_tensor(state, i)))
            return td_fail(TD_ERR_INVALID,
                           "%s: \"%.200s\" is a shard, and rank 0 has no other; use "
                           "td_training_save_sharded()",
                           call, td_state_name(state, i));
    return TD_OK;
}

td_status td__training_collect(const char *call, const td_training *training, const td_bytes *all,
                               int size, td_state **state_out)
{
    td_state *state = td_state_create();
    td_status status = state ? collect(call, training, all, size, state) : TD_ERR_NOMEM;
    if (status)
        td_state_destroy(state);
    else
        *state_out = state;
    return status;
}

static td_status collect_own(const char *call, const td_training *training, int rank, int size,
                             td_state *state)
{
    struct td__buffer own = {0};
    td_status status = td__training_pack(call, training, &own);
    if (!status)
        status = add_rank(call, (td_bytes){.data = (char *)own.data, .size = own.size}, rank,
                          state);
    td__buffer_free(&own);
    if (!status && rank == 0)
        status = add_numbers(training, size, state);
    return status ? status : add_parts(training, state);
}

td_status td__training_own(const char *call, const td_training *training, int rank, int size,
                           td_state **state_out)
{
    TD_TRY(check_training(call, training));
    td_state *state = td_state_create();
    td_status status = state ? collect_own(call, training, rank, size, state) : TD_ERR_NOMEM;
    if (status)
        td_state_destroy(state);
    else
        *state_out = state;
    return status;
}

/* ---- Undo ----------------------------------------------------------------------------------------- */

struct td__undo {
    int changed; /* which parts */
    td_state *model, *optimizer, *schedule, *scaler;
    td_sampler_position position;
    struct td__random_states *random;
    int64_t epoch, step;
};

/* A copy of the state of a part, which it takes over. */
static td_status keep(td_state *part, td_state **copy)
{
    *copy = td_state_clone(part);
    td_state_destroy(part);
    return *copy ? TD_OK : td__error_status();
}

static td_status keep_all(const td_training *training, struct td__undo *undo)
{
    if (training->model)
        TD_TRY(keep(td_module_state(training->model), &undo->model));
    if (training->optimizer)
        TD_TRY(keep(td_optimizer_state(training->optimizer), &undo->optimizer));
    if (training->schedule)
        TD_TRY(keep(td_schedule_state(training->schedule), &undo->schedule));
    if (training->scaler)
        TD_TRY(keep(td_grad_scaler_state(training->scaler), &undo->scaler));
    td_sampler_get_position(training->sampler, &undo->position);
    undo->random = td__random_save();
    if (!undo->random)
        return TD_ERR_NOMEM;
    undo->epoch = training->epoch;
    undo->step = training->step;
    return TD_OK;
}

void td__undo_free(struct td__undo *undo)
{
    if (!undo)
        return;
    td_state_destroy(undo->model);
    td_state_destroy(undo->optimizer);
    td_state_destroy(undo->schedule);
    td_state_destroy(undo->scaler);
    free(undo->random);
    free(undo);
}

static void restore_rates(td_optimizer *optimizer, const td_state *state)
{
    char name[NAME_SIZE];
    for (int g = 0; g < td_optimizer_group_count(optimizer); g++) {
        double lr;
        snprintf(name, sizeof name, "group.%d.lr", g);
        if (!td_state_get_number(state, name, &lr))
            td_optimizer_set_group_lr(optimizer, g, lr);
    }
}

void td__training_undo(td_training *training, struct td__undo *undo)
{
    if (undo->changed & TD__PART_MODEL)
        td_module_load_state(training->model, undo->model, true);
    if (undo->changed & TD__PART_OPTIMIZER)
        td_optimizer_load_state(training->optimizer, undo->optimizer);
    if (undo->changed & TD__PART_SCHEDULE)
        td_schedule_load_state(training->schedule, undo->schedule);
    if (undo->optimizer)
        restore_rates(training->optimizer, undo->optimizer);
    if (undo->changed & TD__PART_SAMPLER)
        td_sampler_set_position(training->sampler, &undo->position);
    if (undo->changed & TD__PART_SCALER)
        td_grad_scaler_load_state(training->scaler, undo->scaler);
    if (undo->changed & TD__PART_RANDOM)
        td__random_restore(undo->random);
    training->epoch = undo->epoch;
    training->step = undo->step;
    undo->changed = 0;
}

/* ---- Loading -------------------------------------------------------------------------------------- */

static td_status apply_model(td_training *training, const td_state *state)
{
    td_state *part = td_state_part(state, "model.");
    td_state *fitted = part ? td__fit_names(part, training->model) : NULL;
    td_status status = fitted ? td_module_load_state(training->model, fitted, true) : TD_ERR_NOMEM;
    td_state_destroy(fitted);
    td_state_destroy(part);
    return status;
}

static td_status apply_optimizer(td_training *training, const td_state *state)
{
    td_state *part = td_state_part(state, "optimizer.");
    td_status status = part ? td_optimizer_load_state(training->optimizer, part) : TD_ERR_NOMEM;
    td_state_destroy(part);
    return status;
}

/* The states of the schedule and of the optimizer both have the learning rates; the optimizer's are
 * used. */
static td_status apply_schedule(td_training *training, const td_state *state)
{
    td_state *part = td_state_part(state, "schedule.");
    td_status status = part ? td_schedule_load_state(training->schedule, part) : TD_ERR_NOMEM;
    td_state_destroy(part);
    if (status || !training->optimizer)
        return status;
    part = td_state_part(state, "optimizer.");
    if (!part)
        return TD_ERR_NOMEM;
    restore_rates(training->optimizer, part);
    td_state_destroy(part);
    return TD_OK;
}

static td_status apply_scaler(td_training *training, const td_state *state)
{
    td_state *part = td_state_part(state, "scaler.");
    td_status status = part ? td_grad_scaler_load_state(training->scaler, part) : TD_ERR_NOMEM;
    td_state_destroy(part);
    return status;
}

/* The bytes of a tensor that must be of this dtype and length. */
static td_status find_list(const td_state *state, const char *what, int rank, td_dtype dtype,
                           int64_t count, const void **data)
{
    char name[NAME_SIZE];
    snprintf(name, sizeof name, "rank.%d.%s", rank, what);
    const td_tensor *tensor = td_state_get(state, name);
    if (!tensor || td_tensor_dtype(tensor) != dtype || td_tensor_ndim(tensor) != 1 ||
        td_tensor_size(tensor, 0) != count)
        return td_fail(TD_ERR_INVALID, "the checkpoint has no \"%s\" of %" PRId64 " %s", name,
                       count, td_dtype_name(dtype));
    *data = td_tensor_data(tensor);
    return TD_OK;
}

static td_status apply_sampler(td_training *training, const td_state *state, int rank,
                               bool other_size)
{
    const void *data = NULL;
    TD_TRY(find_list(state, "sampler", other_size ? 0 : rank, TD_I64, POSITION_SIZE, &data));
    int64_t numbers[POSITION_SIZE];
    memcpy(numbers, data, sizeof numbers);
    td_sampler_position position = {.epoch = numbers[0]};
    if (!other_size) {
        position.taken = numbers[1];
        position.seed = (uint64_t)numbers[2];
        position.begun = numbers[3] != 0;
    }
    return td_sampler_set_position(training->sampler, &position);
}

/* Of accelerators that this machine does not have, nothing is loaded. */
static td_status apply_device_random(const td_state *state, int rank)
{
    char prefix[NAME_SIZE];
    snprintf(prefix, sizeof prefix, "rank.%d.random.", rank);
    size_t length = strlen(prefix);
    for (int i = 0; i < td_state_count(state); i++) {
        const char *name = td_state_name(state, i);
        if (strncmp(name, prefix, length) || !td_device_exists(name + length))
            continue;
        td_generator *generator = td_default_generator(td_device_get(name + length));
        if (!generator)
            return td__error_status();
        const void *data = NULL;
        size_t size = td_generator_state_size(generator);
        TD_TRY(
            find_list(state, name + length - strlen("random."), rank, TD_U8, (int64_t)size, &data));
        TD_TRY(td_generator_set_state(generator, data, size));
    }
    return TD_OK;
}

static td_status apply_random(const td_state *state, int rank)
{
    const void *data = NULL;
    TD_TRY(find_list(state, "random", rank, TD_U8, TD_GENERATOR_STATE_SIZE, &data));
    TD_TRY(td_generator_set_state(NULL, data, TD_GENERATOR_STATE_SIZE));
    return apply_device_random(state, rank);
}

static td_status check_parts(const td_training *training, int64_t parts)
{
    static const char *const names[] = {"model", "optimizer", "schedule", "sampler", "scaler"};
    for (int i = 0; i < 5; i++)
        if (td__training_parts(training) & 1 << i && !(parts & 1 << i))
            return td_fail(TD_ERR_INVALID, "the checkpoint was saved without its %s", names[i]);
    return TD_OK;
}

static td_status check_size(const td_training *training, int64_t ranks, int size)
{
    if (ranks == size || training->any_size)
        return TD_OK;
    return td_fail(TD_ERR_MISMATCH,
                   "the checkpoint is of %" PRId64 " ranks, and there are %d now; with any_size "
                   "training resumes from it, but not bit for bit",
                   ranks, size);
}

static td_status apply(td_training *training, const td_state *state,
                       const struct td__coordinator *coordinator, struct td__undo *undo)
{
    int64_t epoch, step, ranks, parts;
    TD_TRY(td_state_get_integer(state, "training.epoch", &epoch));
    TD_TRY(td_state_get_integer(state, "training.step", &step));
    TD_TRY(td_state_get_integer(state, "training.ranks", &ranks));
    TD_TRY(td_state_get_integer(state, "training.parts", &parts));
    TD_TRY(check_parts(training, parts));
    TD_TRY(check_size(training, ranks, coordinator->size));
    TD_TRY(keep_all(training, undo));
    bool other_size = ranks != coordinator->size;
    if (training->model)
        TD_TRY(apply_model(training, state));
    undo->changed |= training->model ? TD__PART_MODEL : 0;
    if (training->optimizer)
        TD_TRY(apply_optimizer(training, state));
    undo->changed |= training->optimizer ? TD__PART_OPTIMIZER : 0;
    if (training->schedule)
        TD_TRY(apply_schedule(training, state));
    undo->changed |= training->schedule ? TD__PART_SCHEDULE : 0;
    if (training->sampler)
        TD_TRY(apply_sampler(training, state, coordinator->rank, other_size));
    undo->changed |= training->sampler ? TD__PART_SAMPLER : 0;
    if (training->scaler)
        TD_TRY(apply_scaler(training, state));
    undo->changed |= training->scaler ? TD__PART_SCALER : 0;
    undo->changed |= other_size ? 0 : TD__PART_RANDOM; /* before: one of several may fail */
    if (!other_size)
        TD_TRY(apply_random(state, coordinator->rank));
    training->epoch = epoch;
    training->step = step;
    return TD_OK;
}

td_status td__training_apply(const char *call, td_training *training, const td_state *state,
                             const struct td__coordinator *coordinator, struct td__undo **undo_out)
{
    TD_TRY(check_training(call, training));
    struct td__undo *undo = calloc(1, sizeof *undo);
    if (!undo)
        return td__fail_nomem(call);
    td_status status = apply(training, state, coordinator, undo);
    if (status) {
        td_fail(status, "%s: %s", call, td__error_text());
        char *message = strdup(td__error_text());
        if (undo->changed)
            td__training_undo(training, undo);
        if (message)
            td_fail(status, "%s", message);
        free(message);
        td__undo_free(undo);
        return status;
    }
    *undo_out = undo;
    return TD_OK;
}
