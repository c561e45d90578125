/* td_zero_optimizer(): an optimizer over this rank's shares of the parameters (zero.h).
 *
 *     begin       each share gets its part of the whole gradient, as a view
 *     agree       no rank changes anything before all have prepared their step, with gradients of the same parameters
 *     end         the ranks gather the parameters
 *
 * The rest (groups, learning rates, state, kernels) is that of any optimizer: it only sees smaller parameters. A rank
 * without elements of a parameter has an empty share of it, so that all ranks number parameters, and count steps,
 * alike. */
#include "parallel/zero.h"

#include "base/fail.h"
#include "base/option_rules.h"
#include "parallel/buckets.h"
#include "parallel/ddp.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CALL "td_zero_optimizer"

static struct td__zero *zero_of(const td_optimizer *optimizer)
{
    return optimizer->hook_data;
}

const char *td__zero_name(const struct td__zero *zero, int index, char text[TD__ZERO_NAME])
{
    const struct td__zero_parameter *parameter = &zero->parameters[index];
    if (parameter->name)
        snprintf(text, TD__ZERO_NAME, "\"%.140s\"", parameter->name);
    else
        snprintf(text, TD__ZERO_NAME, "%d, of the shape %s,", index,
                 td__shape_of(parameter->whole));
    return text;
}

/* ---- A step ----------------------------------------------------------------------------------------------------- */

static td_status give_grad(const struct td__zero *zero, int index, td_tensor *share)
{
    struct td__zero_parameter *parameter = &zero->parameters[index];
    int64_t begin = parameter->cuts[zero->rank], end = parameter->cuts[zero->rank + 1];
    parameter->has_grad = false;
    if (parameter->flat->storage != parameter->whole->storage)
        return td_fail(TD_ERR_STATE,
                       "the memory of the parameter was replaced after td_zero_optimizer()");
    if (td__capturing(parameter->whole->storage->device))
        return td_fail(TD_ERR_UNSUPPORTED, "its ranks cannot step in td_graph_capture()");
    td_tensor *grad = td_tensor_grad(parameter->whole);
    if (!grad)
        return td_tensor_set_grad(share, NULL);
    td_tensor *dense = td__contiguous(grad);
    td_tensor *flat = td__reshape(dense, &parameter->whole->layout.numel, 1, NULL);
    td_tensor *part = td__narrow(flat, 0, begin, end - begin);
    td_status status = part ? td_tensor_set_grad(share, part) : td__error_status();
    td_tensor_release(dense);
    td_tensor_release(flat);
    td_tensor_release(part);
    parameter->has_grad = !status;
    return status;
}

static td_status begin_step(td_optimizer *optimizer)
{
    struct td__zero *zero = zero_of(optimizer);
    zero->agreed = false;
    for (int i = 0; i < zero->count; i++) {
        char name[TD__ZERO_NAME];
        td_status status = give_grad(zero, i, optimizer->parameters[i].tensor);
        if (status)
            return td_fail(status, CALL ": rank %d: parameter %s: %s", td_get_rank(NULL),
                           td__zero_name(zero, i, name), td__error_text());
    }
    return TD_OK;
}

/* Bit i: parameter i has a gradient. */
static td_status compare_grads(const struct td__zero *zero, const uint64_t *all, int words)
{
    for (int i = 0; i < zero->count; i++)
        for (int r = 1; r < zero->size; r++) {
            bool first = all[i / 64] >> i % 64 & 1;
            char name[TD__ZERO_NAME];
            if (first == (all[r * words + i / 64] >> i % 64 & 1))
                continue;
            return td_fail(TD_ERR_MISMATCH,
                           CALL ": parameter %s has a gradient on rank %d, and none on rank %d; no "
                                "rank has made the step",
                           td__zero_name(zero, i, name),
                           td_get_global_rank(zero->group, first ? 0 : r),
                           td_get_global_rank(zero->group, first ? r : 0));
        }
    return TD_OK;
}

static td_status agree(td_optimizer *optimizer, td_status status)
{
    struct td__zero *zero = zero_of(optimizer);
    int words = zero->count / 64 + 1;
    uint64_t *mine = calloc((size_t)words * ((size_t)zero->size + 1), sizeof *mine);
    if (!mine) {
        if (zero->size > 1)
            td_group_abort(zero->group); /* the others wait for this rank */
        return td__fail_nomem(CALL);
    }
    for (int i = 0; i < zero->count; i++)
        mine[i / 64] |= (uint64_t)zero->parameters[i].has_grad << i % 64;
    status = td__zero_agree(zero, CALL ": the step", status, mine, words, mine + words);
    if (!status)
        status = compare_grads(zero, mine + words, words);
    free(mine);
    zero->agreed = !status;
    return status;
}

static td_status gather(struct td__zero *zero)
{
    td_tensor **flats = calloc((size_t)zero->count + 1, sizeof *flats);
    int *indices = calloc((size_t)zero->count + 1, sizeof *indices), count = 0;
    td_status status = flats && indices ? TD_OK : td__fail_nomem(CALL);
    for (int i = 0; i < zero->count && !status; i++)
        if (zero->parameters[i].has_grad) {
            flats[count] = zero->parameters[i].flat;
            indices[count++] = i;
        }
    if (!status)
        status = td__zero_gather(zero, flats, indices, count);
    free(flats);
    free(indices);
    return status;
}

static td_status end_step(td_optimizer *optimizer, td_status status)
{
    struct td__zero *zero = zero_of(optimizer);
    for (int i = 0; i < zero->count; i++)
        td_tensor_set_grad(optimizer->parameters[i].tensor, NULL);
    if (!zero->agreed)
        return status;
    if (!status)
        status = gather(zero);
    /* The shares are of different steps now, and ranks may wait for this one. */
    if (status && zero->size > 1) {
        struct td__error cause;
        td__error_save(&cause);
        td_group_abort(zero->group);
        td__error_restore(&cause);
    }
    return status;
}

/* ---- Parameters ------------------------------------------------------------------------------------------------- */

static td_tensor *source(const td_optimizer *optimizer, int index)
{
    return zero_of(optimizer)->parameters[index].whole;
}

static const char *name_of(const td_optimizer *optimizer, int index)
{
    return zero_of(optimizer)->parameters[index].name;
}

static void free_parameters(struct td__zero_parameter *parameters, int count)
{
    for (int i = 0; i < count && parameters; i++) {
        td_tensor_release(parameters[i].whole);
        td_tensor_release(parameters[i].flat);
        free(parameters[i].name);
        free(parameters[i].cuts);
    }
    free(parameters);
}

static void release_all(td_tensor **tensors, int count)
{
    for (int i = 0; i < count && tensors; i++)
        td_tensor_release(tensors[i]);
    free(tensors);
}

static td_status check(const td_tensor *whole)
{
    if (!whole)
        return td_fail(TD_ERR_INVALID, "it is NULL");
    if (!td_tensor_is_leaf(whole))
        return td_fail(TD_ERR_INVALID, "it is not a leaf; only leaves can be changed");
    if (!td__layout_is_contiguous(&whole->layout))
        return td_fail(TD_ERR_UNSUPPORTED, "it is not contiguous");
    if (whole->shard)
        return td_fail(TD_ERR_INVALID, "it is a shard already");
    return TD_OK;
}

static td_status describe(td_tensor *whole, const char *name, struct td__zero_parameter *parameter)
{
    td_status status = check(whole);
    if (!status) {
        parameter->whole = td_tensor_retain(whole);
        parameter->flat = td__reshape(whole, &whole->layout.numel, 1, NULL);
        parameter->name = name ? strdup(name) : NULL;
        if (!parameter->flat || (name && !parameter->name))
            status = td__fail_nomem(CALL);
    }
    return status;
}

/* This rank's share, marked. */
static td_tensor *make_share(const struct td__zero *zero,
                             const struct td__zero_parameter *parameter)
{
    const struct td__layout *layout = &parameter->whole->layout;
    int64_t begin = parameter->cuts[zero->rank], end = parameter->cuts[zero->rank + 1];
    td_shard shard = {.ndim = layout->ndim, .offset = begin};
    memcpy(shard.shape, layout->shape, (size_t)layout->ndim * sizeof shard.shape[0]);
    td_tensor *share = td__narrow(parameter->flat, 0, begin, end - begin);
    if (share && td__tensor_set_shard(share, &shard, &zero->sharding)) {
        td_tensor_release(share);
        return NULL;
    }
    return share;
}

/* Cuts these parameters. The lists are set on success only, and the caller's. `names` may be NULL. */
static td_status cut(const struct td__zero *zero, td_tensor *const *wholes,
                     const char *const *names, int count, struct td__zero_parameter **parameters,
                     td_tensor ***shares)
{
    struct td__zero_parameter *list = calloc((size_t)count + 1, sizeof *list);
    td_tensor **cuts = calloc((size_t)count + 1, sizeof *cuts);
    td_status status = list && cuts ? TD_OK : td__fail_nomem(CALL);
    for (int i = 0; i < count && !status; i++) {
        status = describe(wholes[i], names ? names[i] : NULL, &list[i]);
        if (status && names)
            td_fail(status, CALL ": parameter \"%.120s\": %s", names[i], td__error_text());
        else if (status)
            td_fail(status, CALL ": parameter %d of the group: %s", i, td__error_text());
    }
    if (!status)
        status = td__zero_cut(list, count, zero->size);
    for (int i = 0; i < count && !status; i++) {
        cuts[i] = make_share(zero, &list[i]);
        status = cuts[i] ? TD_OK : td__error_status();
    }
    if (status) {
        free_parameters(list, count);
        release_all(cuts, count);
        return status;
    }
    *parameters = list;
    *shares = cuts;
    return TD_OK;
}

static td_status check_new(const struct td__zero *zero, td_tensor *const *wholes, int count)
{
    for (int i = 0; i < count; i++)
        for (int k = 0; k < zero->count + i; k++) {
            const td_tensor *other = k < zero->count ? zero->parameters[k].whole
                                                     : wholes[k - zero->count];
            if (wholes[i] && wholes[i] == other)
                return td_fail(TD_ERR_INVALID,
                               "td_optimizer_add_group: parameter %d, of the shape %s, is in the "
                               "optimizer already",
                               i, td__shape_of(wholes[i]));
        }
    return TD_OK;
}

static td_status add_group(td_optimizer *optimizer, td_tensor *const *wholes, int count,
                           const td_parameter_group *options)
{
    struct td__zero *zero = zero_of(optimizer);
    struct td__zero_parameter *added = NULL;
    td_tensor **shares = NULL;
    if (count < 0 || (count > 0 && !wholes))
        return td_fail(TD_ERR_INVALID,
                       "td_optimizer_add_group: the list of %d parameters is no list", count);
    TD_TRY(check_new(zero, wholes, count));
    struct td__zero_parameter *all = realloc(
        zero->parameters, ((size_t)zero->count + (size_t)count + 1) * sizeof *all);
    if (!all)
        return td__fail_nomem("td_optimizer_add_group");
    zero->parameters = all;
    TD_TRY(cut(zero, wholes, NULL, count, &added, &shares));
    td_status status = td__optimizer_add_group(optimizer, shares, count, options);
    if (!status) {
        memcpy(all + zero->count, added, (size_t)count * sizeof *all);
        zero->count += count;
        free(added);
    } else {
        free_parameters(added, count);
    }
    release_all(shares, count);
    return status;
}

/* ---- Life ------------------------------------------------------------------------------------------------------- */

/* The ranks of shards that outlive the optimizer, such as those in a td_state, are not known any more. */
static void forget_ranks(td_tensor *tensor)
{
    if (tensor && tensor->shard)
        tensor->shard->sharding = NULL;
}

static void free_zero(struct td__zero *zero)
{
    free_parameters(zero->parameters, zero->count);
    free(zero);
}

static void destroy(td_optimizer *optimizer)
{
    for (int i = 0; i < optimizer->count; i++) {
        forget_ranks(optimizer->parameters[i].tensor);
        for (int b = 0; b < TD__BUFFERS_MOST; b++)
            forget_ranks(optimizer->parameters[i].buffers[b]);
    }
    free_zero(zero_of(optimizer));
}

static const struct td__optimizer_hooks zero_hooks = {
    .name = CALL,
    .name_of = name_of,
    .source = source,
    .begin_step = begin_step,
    .agree = agree,
    .end_step = end_step,
    .add_group = add_group,
    .destroy = destroy,
};

struct td__zero *td__zero_of(const td_optimizer *optimizer, const char *call)
{
    if (optimizer && optimizer->hooks == &zero_hooks)
        return zero_of(optimizer);
    td_fail(TD_ERR_INVALID, "%s: the optimizer is %s", call,
            optimizer ? "not one of td_zero_optimizer()" : "NULL");
    return NULL;
}

static td_status all_gather(const struct td__sharding *sharding, const void *mine, size_t bytes,
                            void *all)
{
    const struct td__zero *zero = (const struct td__zero *)sharding;
    return td_group_all_gather(all, mine, bytes, TD_U8, zero->group, NULL);
}

/* What all ranks must have alike: TD_ERR_MISMATCH names both ranks and the parameter. */
static td_status verify(const struct td__zero *zero, td_tensor *const *wholes,
                        const char *const *names, int count)
{
    struct td__gradient *gradients = calloc((size_t)count + 1, sizeof *gradients);
    if (!gradients)
        return td__fail_nomem(CALL);
    for (int i = 0; i < count; i++) {
        const struct td__layout *layout = &wholes[i]->layout;
        gradients[i].dtype = layout->dtype;
        gradients[i].ndim = layout->ndim;
        memcpy(gradients[i].shape, layout->shape, sizeof gradients[i].shape);
    }
    td_status status = td__verify_gradients(CALL, gradients, names, count, zero->group);
    free(gradients);
    return status;
}

/* Puts the parameters into the order of the optimizer, which may have left some out. */
static td_status adopt(struct td__zero *zero, td_optimizer *optimizer,
                       struct td__zero_parameter *cut, td_tensor *const *shares, int count)
{
    if (optimizer->hooks)
        return td_fail(TD_ERR_INVALID, CALL ": the optimizer that was made is one of %s() already",
                       optimizer->hooks->name);
    zero->parameters = calloc((size_t)optimizer->count + 1, sizeof *zero->parameters);
    if (!zero->parameters)
        return td__fail_nomem(CALL);
    for (int i = 0; i < optimizer->count; i++) {
        int k = 0;
        while (k < count && shares[k] != optimizer->parameters[i].tensor)
            k++;
        if (k == count)
            return td_fail(TD_ERR_INVALID,
                           CALL
                           ": parameter %d of the optimizer that was made, of the shape %s, is "
                           "none of those that were given for it",
                           i, td__shape_of(optimizer->parameters[i].tensor));
        zero->parameters[zero->count++] = cut[k];
        cut[k] = (struct td__zero_parameter){0};
    }
    return TD_OK;
}

static td_optimizer *make_optimizer(struct td__zero *zero, td_tensor *const *wholes,
                                    const char *const *names, int count, td_optimizer_maker make,
                                    void *arg)
{
    struct td__zero_parameter *parameters = NULL;
    td_tensor **shares = NULL;
    td_optimizer *optimizer = NULL;
    td_status status = verify(zero, wholes, names, count);
    if (!status)
        status = cut(zero, wholes, names, count, &parameters, &shares);
    if (!status) {
        optimizer = make(shares, count, arg);
        status = optimizer ? adopt(zero, optimizer, parameters, shares, count) : td__error_status();
    }
    /* A rank without an optimizer would be missed in the first step. */
    status = td__zero_agree(zero, CALL ": making the optimizer", status, NULL, 0, NULL);
    if (!status) {
        optimizer->hooks = &zero_hooks;
        optimizer->hook_data = zero;
    } else {
        td_optimizer_destroy(optimizer);
        optimizer = NULL;
    }
    for (int i = 0; i < count && shares; i++)
        if (!optimizer || parameters[i].whole) /* it was left out */
            forget_ranks(shares[i]);
    free_parameters(parameters, count);
    release_all(shares, count);
    return optimizer;
}

static td_group *group_of(td_module *model, const td_zero_options *options)
{
    if (options && options->group)
        return options->group;
    return td__is_ddp(model) ? td__ddp_of(model, CALL)->group : NULL;
}

td_optimizer *td_zero_optimizer(td_module *model, td_optimizer_maker make, void *arg,
                                const td_zero_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return NULL;
    if (!model || !make)
        return td__null(__func__);
    struct td__zero *zero = calloc(1, sizeof *zero);
    td_state *parameters = zero ? td_module_parameters(model) : NULL;
    int count = parameters ? td_state_count(parameters) : 0;
    td_tensor **wholes = calloc((size_t)count + 1, sizeof *wholes);
    const char **names = calloc((size_t)count + 1, sizeof *names);
    td_optimizer *optimizer = NULL;
    if (!zero || !parameters || !wholes || !names) {
        td__fail_nomem(CALL);
        goto free_all;
    }
    for (int i = 0; i < count; i++) {
        wholes[i] = td_state_tensor(parameters, i);
        names[i] = td_state_name(parameters, i);
    }
    zero->group = group_of(model, options);
    zero->rank = td_get_rank(zero->group);
    zero->size = td_get_world_size(zero->group);
    zero->sharding = (struct td__sharding){
        .rank = zero->rank, .size = zero->size, .all_gather = all_gather};
    if (zero->size < 1)
        td_fail(TD_ERR_STATE, CALL ": there is no process group, or this rank is not in it; call "
                                   "td_init_process_group() first");
    else
        optimizer = make_optimizer(zero, wholes, names, count, make, arg);
free_all:
    td_state_destroy(parameters);
    free(wholes);
    free(names);
    if (zero && !optimizer)
        free_zero(zero);
    return optimizer;
}
