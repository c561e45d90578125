/* A module as a replica: td_ddp() with slices, whose steps can be repeated (parallel/ddp_repeat.c), and the optimizer, the
 * schedule and the scaler that the program has made for it.
 *
 *     state      parameters and buffers, in place; the states of optimizer, schedule and scaler, by td_state
 *     outcome    the buckets, of which the gradients are views, and the buffers for after the step */
#include "base/fail.h"
#include "elastic/elastic_internal.h"
#include "group/process_group.h"
#include "parallel/ddp_slices.h"

#include <tandem/amp.h>

#include <stdlib.h>
#include <string.h>

struct module_replica {
    struct td__elastic_replica base;
    td_elastic *elastic;
    td_training parts;
    td_module *inner, *ddp;
    td_state *parameters, *buffers;
    td_state
        *rest; /* of optimizer, schedule and scaler; NULL: not asked for since the last commit */
    td_tensor **held; /* room for the buffers */
};

static struct module_replica *of(struct td__elastic_replica *replica)
{
    return (struct module_replica *)replica;
}

static struct td__ddp *ddp_of(struct module_replica *replica)
{
    return td__ddp_of(replica->ddp, "td_elastic");
}

/* ---- A step ----------------------------------------------------------------------------------------------------- */

static td_status module_bind(struct td__elastic_replica *base, td_group *group, int slices)
{
    struct module_replica *replica = of(base);
    td__ddp_rebind(ddp_of(replica), group, slices);
    return TD_OK;
}

/* What a device reduces is complete when it is enqueued, and is worth nothing if the group breaks before the device has run it. */
static td_status await_device(struct module_replica *replica, const td_elastic *elastic)
{
    const struct td__ddp *ddp = ddp_of(replica);
    if (!ddp->buckets.count)
        return TD_OK;
    TD_TRY(td_device_synchronize(td_tensor_device(ddp->buckets.buckets[0].buffer)));
    return td__group_state(elastic->active);
}

static td_status module_compute(struct td__elastic_replica *base, td_elastic *elastic)
{
    struct module_replica *replica = of(base);
    td_slices slices = td_slices_begin(replica->ddp, td__elastic_committed(elastic));
    td_status status = td_slices_status(&slices);
    for (int k = slices.first; k < slices.first + slices.count && !status; k++) {
        status = td__elastic_fetch(
            elastic, k); /* a loader may draw random numbers: before the slice's begin */
        if (!status && td_slices_next(&slices))
            status = td__elastic_slice(elastic, replica->ddp, k);
        else if (!status)
            status = td_slices_status(&slices);
    }
    TD_TRY(status);
    if (td_slices_next(&slices) || td_slices_status(&slices))
        return td_slices_status(&slices);
    TD_TRY(td__ddp_share_buffers(ddp_of(replica)));
    return await_device(replica, elastic);
}

static void forget_rest(struct module_replica *replica)
{
    td_state_destroy(replica->rest);
    replica->rest = NULL;
}

static td_status module_undo(struct td__elastic_replica *base)
{
    return td__ddp_undo(ddp_of(of(base)));
}

td_status td__elastic_update(td_elastic *elastic, const td_training *parts, td_module *module)
{
    const td_elastic_options *options = &elastic->options;
    if (options->update)
        return options->update(td__elastic_committed(elastic), options->update_arg);
    if (parts->scaler && options->clip_norm > 0)
        TD_TRY(td_grad_scaler_unscale(parts->scaler, parts->optimizer));
    if (options->clip_norm > 0)
        TD_TRY(td_clip_grad_norm_(module, options->clip_norm, NULL, NULL));
    if (parts->scaler) {
        TD_TRY(td_grad_scaler_step(parts->scaler, parts->optimizer, NULL));
        TD_TRY(td_grad_scaler_update(parts->scaler, 0));
    } else if (parts->optimizer) {
        TD_TRY(td_optimizer_step(parts->optimizer));
    }
    return parts->schedule ? td_schedule_step(parts->schedule) : TD_OK;
}

static td_status module_commit(struct td__elastic_replica *base, td_elastic *elastic)
{
    struct module_replica *replica = of(base);
    forget_rest(replica);
    TD_TRY(td__elastic_update(elastic, &replica->parts, replica->inner));
    return td__ddp_commit(ddp_of(replica));
}

/* ---- Lists ---------------------------------------------------------------------------------------------------- */

static td_status add_all(struct td__elastic_replica_pieces *list, const td_state *state)
{
    for (int i = 0; i < td_state_count(state); i++)
        TD_TRY(td__pieces_add_tensor(list, td_state_tensor(state, i)));
    return TD_OK;
}

/* Adds a part's state, which it takes over, to the rest. */
static td_status add_part(td_state *rest, const char *prefix, td_state *part)
{
    td_status status = part ? td_state_add_all(rest, prefix, part) : td__error_status();
    td_state_destroy(part);
    return status;
}

td_status td__elastic_add_schedule(const td_training *parts, td_state *rest)
{
    if (parts->schedule)
        TD_TRY(add_part(rest, "schedule.", td_schedule_state(parts->schedule)));
    if (parts->scaler)
        TD_TRY(add_part(rest, "scaler.", td_grad_scaler_state(parts->scaler)));
    return TD_OK;
}

static td_status collect_rest(struct module_replica *replica)
{
    const td_training *parts = &replica->parts;
    if (replica->rest)
        return TD_OK;
    replica->rest = td_state_create();
    td_status status = replica->rest ? TD_OK : td__error_status();
    if (!status && parts->optimizer)
        status = add_part(replica->rest, "optimizer.", td_optimizer_state(parts->optimizer));
    if (!status)
        status = td__elastic_add_schedule(parts, replica->rest);
    if (status)
        forget_rest(replica);
    return status;
}

static td_status list_outcome(struct module_replica *replica,
                              struct td__elastic_replica_pieces *list)
{
    struct td__ddp *ddp = ddp_of(replica);
    for (int b = 0; b < ddp->buckets.count; b++)
        TD_TRY(td__pieces_add_tensor(list, ddp->buckets.buckets[b].buffer));
    int held = td__ddp_held_buffers(ddp, replica->held), first = list->count;
    for (int i = 0; i < held; i++)
        TD_TRY(td__pieces_add_tensor(list, replica->held[i]));
    for (int i = first; i < list->count; i++)
        list->pieces[i].moves = true;
    return TD_OK;
}

static td_status module_list(struct td__elastic_replica *base, enum td__elastic_replica_part kind,
                             struct td__elastic_replica_pieces *list)
{
    struct module_replica *replica = of(base);
    if (kind == TD__PIECES_OUTCOME)
        return list_outcome(replica, list);
    TD_TRY(add_all(list, replica->parameters));
    int first = list->count;
    TD_TRY(add_all(list, replica->buffers));
    for (int i = first; i < list->count; i++)
        list->pieces[i].moves = true;
    if (kind == TD__PIECES_WEIGHTS)
        return TD_OK;
    TD_TRY(collect_rest(replica));
    return add_all(list, replica->rest);
}

/* ---- What another rank gets ------------------------------------------------------------------------------------ */

void td__put_state(struct td__buffer *text, const td_state *state)
{
    td__buffer_put_u32(text, (uint32_t)td_state_count(state));
    for (int i = 0; i < td_state_count(state); i++) {
        const td_tensor *tensor = td_state_tensor(state, i);
        const char *name = td_state_name(state, i);
        td__buffer_put_string(text, name, strlen(name));
        td__buffer_put_u32(text, (uint32_t)td_tensor_dtype(tensor));
        td__buffer_put_u32(text, (uint32_t)td_tensor_ndim(tensor));
        for (int d = 0; d < td_tensor_ndim(tensor); d++)
            td__buffer_put_u64(text, (uint64_t)td_tensor_size(tensor, d));
    }
}

static td_status module_put(struct td__elastic_replica *base, enum td__elastic_replica_part kind,
                            struct td__buffer *text)
{
    struct module_replica *replica = of(base);
    struct td__ddp *ddp = ddp_of(replica);
    if (kind == TD__PIECES_STATE) {
        TD_TRY(collect_rest(replica));
        td__put_state(text, replica->rest);
    } else if (kind == TD__PIECES_WEIGHTS) {
        td__put_state(text, replica->parameters);
        td__put_state(text, replica->buffers);
    } else {
        td__buffer_put_u8(text, td__ddp_held_buffers(ddp, replica->held) > 0);
        for (int i = 0; i < ddp->count; i++)
            td__buffer_put_u8(text, td_tensor_grad(ddp->parameters[i].tensor) != NULL);
    }
    return text->failed ? td__fail_nomem("td_elastic") : TD_OK;
}

static td_status take_tensor(struct td__reader *text, td_state *state)
{
    struct td__span name = td__reader_string(text, 4096);
    td_dtype dtype = (td_dtype)td__reader_u32(text);
    uint32_t ndim = td__reader_u32(text);
    int64_t shape[TD_MAX_DIMS] = {0};
    if (text->failed || ndim > TD_MAX_DIMS || !td_dtype_size(dtype))
        return td_fail(TD_ERR_MISMATCH,
                       "td_elastic: another rank has sent a state of another kind");
    for (uint32_t d = 0; d < ndim; d++)
        shape[d] = (int64_t)td__reader_u64(text);
    char *copy = strndup(name.data, name.size);
    td_tensor *tensor = td__empty("td_elastic", shape, (int)ndim, dtype, td__host_device());
    td_status status = copy && tensor ? td_state_add(state, copy, tensor)
                                      : td__fail_nomem("td_elastic");
    td_tensor_release(tensor);
    free(copy);
    return status;
}

td_status td__take_state(struct td__reader *text, td_state **state)
{
    *state = td_state_create();
    td_status status = *state ? TD_OK : td__error_status();
    for (uint32_t left = td__reader_u32(text); left > 0 && !status; left--)
        status = take_tensor(text, *state);
    if (status) {
        td_state_destroy(*state);
        *state = NULL;
    }
    return status;
}

/* The list of the other rank's, with memory to be filled in. */
static td_status take_rest(struct module_replica *replica, struct td__reader *text)
{
    forget_rest(replica);
    TD_TRY(td__take_state(text, &replica->rest));
    if (td__reader_done(text))
        return TD_OK;
    forget_rest(replica);
    return td_fail(TD_ERR_MISMATCH, "td_elastic: the state of another rank is cut off");
}

static td_status take_outcome(struct module_replica *replica, struct td__reader *text)
{
    struct td__ddp *ddp = ddp_of(replica);
    if (td__reader_u8(text))
        TD_TRY(td__ddp_receive_buffers(ddp));
    for (int i = 0; i < ddp->count; i++) {
        td_tensor *view = td__reader_u8(text) ? td__buckets_view(&ddp->buckets, i) : NULL;
        TD_TRY(td_tensor_set_grad(ddp->parameters[i].tensor, view));
    }
    return td__reader_done(text)
               ? TD_OK
               : td_fail(TD_ERR_MISMATCH, "td_elastic: another rank has other parameters");
}

static td_status module_take(struct td__elastic_replica *base, enum td__elastic_replica_part kind,
                             struct td__reader *text)
{
    return kind == TD__PIECES_STATE ? take_rest(of(base), text) : take_outcome(of(base), text);
}

static td_status load_part(const td_state *rest, const char *prefix,
                           td_status (*load)(void *part, const td_state *state), void *part)
{
    if (!part)
        return TD_OK;
    td_state *state = td_state_part(rest, prefix);
    td_status status = state ? load(part, state) : td__error_status();
    td_state_destroy(state);
    return status;
}

static td_status load_optimizer(void *part, const td_state *state)
{
    return td_optimizer_load_state(part, state);
}

static td_status load_schedule(void *part, const td_state *state)
{
    return td_schedule_load_state(part, state);
}

static td_status load_scaler(void *part, const td_state *state)
{
    return td_grad_scaler_load_state(part, state);
}

td_status td__elastic_load_schedule(const td_training *parts, const td_state *rest)
{
    TD_TRY(load_part(rest, "schedule.", load_schedule, parts->schedule));
    return load_part(rest, "scaler.", load_scaler, parts->scaler);
}

/* Learning rates are in the states of both, and those of the optimizer are the ones that count. */
static td_status module_filled(struct td__elastic_replica *base, enum td__elastic_replica_part kind)
{
    struct module_replica *replica = of(base);
    const td_training *parts = &replica->parts;
    if (kind != TD__PIECES_STATE)
        return TD_OK;
    td_status status = td__elastic_load_schedule(parts, replica->rest);
    if (!status)
        status = load_part(replica->rest, "optimizer.", load_optimizer, parts->optimizer);
    forget_rest(replica);
    return status;
}

/* ---- Making one -------------------------------------------------------------------------------------------------- */

static void module_free(struct td__elastic_replica *base)
{
    struct module_replica *replica = of(base);
    forget_rest(replica);
    td_state_destroy(replica->parameters);
    td_state_destroy(replica->buffers);
    td_module_destroy(replica->ddp);
    free(replica->held);
    free(replica);
}

static const struct td__elastic_replica_ops module_ops = {
    .bind = module_bind,
    .compute = module_compute,
    .undo = module_undo,
    .commit = module_commit,
    .list = module_list,
    .put = module_put,
    .take = module_take,
    .filled = module_filled,
    .free = module_free,
};

td_module *td__elastic_replica_model(struct td__elastic_replica *replica)
{
    if (!replica)
        return NULL;
    return replica->ops == &module_ops ? of(replica)->ddp : td__sharded_model(replica);
}

static td_status list_tensors(struct module_replica *replica)
{
    replica->parameters = td_module_parameters(replica->inner);
    replica->buffers = td_module_buffers(replica->inner);
    if (!replica->parameters || !replica->buffers)
        return td__error_status();
    replica->held = calloc((size_t)td_state_count(replica->buffers) + 1, sizeof *replica->held);
    return replica->held ? TD_OK : td__fail_nomem("td_elastic_create");
}

/* td_ddp() is collective, and which ranks there are is not known yet: it is made on this rank alone. */
static td_status wrap(struct module_replica *replica)
{
    const td_elastic_options *options = &replica->elastic->options;
    int self = td_get_rank(NULL);
    td_group *alone;
    td_status status = td_new_group(&self, 1, NULL, &alone);
    if (status) {
        td_module_destroy(replica->inner);
        return status;
    }
    replica->ddp = td_ddp(replica->inner,
                          &(td_ddp_options){
                              .group = alone,
                              .bucket_cap_mb = options->bucket_cap_mb,
                              .find_unused_parameters = options->find_unused_parameters,
                              .no_broadcast_buffers = true,
                              .slices = 1,
                          });
    if (!replica->ddp)
        status = td__error_status();
    else
        td__ddp_hold(ddp_of(replica), options->seed);
    td_group_destroy(alone);
    return status;
}

td_status td__module_replica(td_elastic *elastic, struct td__elastic_replica **replica_out)
{
    const td_elastic_options *options = &elastic->options;
    struct module_replica *replica = calloc(1, sizeof *replica);
    if (!replica)
        return td__fail_nomem("td_elastic_create");
    replica->base.ops = &module_ops;
    elastic->took_model = true;
    replica->elastic = elastic;
    replica->parts = options->training;
    replica->inner = options->training.model;
    td_status status = list_tensors(replica);
    if (status)
        td_module_destroy(replica->inner);
    else
        status = wrap(replica);
    if (status) {
        module_free(&replica->base);
        return status;
    }
    *replica_out = &replica->base;
    return TD_OK;
}
