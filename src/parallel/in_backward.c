/* td_optimizer_in_backward(): a parameter is stepped as soon as its gradient is final.
 *
 *     td_ddp()         when its bucket is reduced (ddp_step.c)
 *     td_fsdp()        when its flat is reduced (fsdp_reduce.c)
 *     other leaves     when the backward pass has accumulated the gradient, by an observer
 *
 * A leaf becomes ready when all nodes with an edge to it have run: every use of a weight whose gradient it gets is over
 * when it is stepped. Other uses (td_detach() of a weight) notice that its version has changed, and fail the pass.
 *
 * A checkpointed segment has an inner pass for its leaves. A weight of two segments would be stepped between them, and
 * the second would run with the new value: its gradient fails the pass, which names the weight. */
#include "parallel/in_backward.h"

#include "autograd/graph.h"
#include "base/fail.h"
#include "optim/optimizer.h"
#include "parallel/ddp.h"
#include "parallel/fsdp_internal.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define CALL "td_optimizer_in_backward"

/* One parameter of the optimizer. */
struct entry {
    struct td__in_backward *all;
    int index;
    char *name;
    uint64_t observer;              /* 0: none */
    struct td__ddp *ddp;            /* which steps it; NULL: none */
    int number;                     /* there */
    struct td__fsdp_param *sharded; /* which td_fsdp() steps; NULL: none */
    bool stepped;                   /* by the observer, in this pass */
};

struct td__in_backward {
    td_optimizer *optimizer;
    /* One step at a time, on the host and on accelerators: the threads of a pass deliver gradients. A long step on the
     * host, of a shard that is offloaded, does not stop one on the device. */
    pthread_mutex_t locks[2];
    struct entry *entries;
    int count;
    atomic_bool ending; /* the end of this pass calls end_pass() */
};

/* ---- Steps ------------------------------------------------------------------------------------------------------ */

static td_status step(struct td__in_backward *all, const int *indices, int count)
{
    td_optimizer *optimizer = all->optimizer;
    td_status status = td__optimizer_step_some(optimizer, indices, count);
    if (status)
        return td_fail(status, CALL ": the step of parameter \"%.120s\"%s: %s",
                       all->entries[indices[0]].name, count > 1 ? " and others" : "",
                       td__error_text());
    for (int i = 0; i < count && !status; i++)
        status = td_tensor_set_grad(optimizer->parameters[indices[i]].tensor, NULL);
    return status;
}

td_status td__in_backward_step(struct td__in_backward *all, const int *indices, int count)
{
    if (!count)
        return TD_OK;
    const td_tensor *tensor = all->optimizer->parameters[indices[0]].tensor;
    pthread_mutex_t *lock = &all->locks[td__on_host(tensor)];
    pthread_mutex_lock(lock);
    td_status status = step(all, indices, count);
    pthread_mutex_unlock(lock);
    return status;
}

static void reset(void *arg)
{
    struct td__in_backward *all = arg;
    for (int i = 0; i < all->count; i++)
        all->entries[i].stepped = false;
    all->ending = false;
}

static td_status end_pass(void *arg)
{
    reset(arg);
    return TD_OK;
}

static td_status on_accumulated(td_tensor *tensor, const struct td__grad_place *place, void *arg)
{
    struct entry *entry = arg;
    (void)tensor;
    if (place)
        return TD_OK; /* the gradient is in a context of distributed autograd */
    if (entry->stepped)
        return td_fail(TD_ERR_STATE,
                       CALL ": parameter \"%.120s\" got a second gradient in a pass after it was "
                            "stepped with the first; it is used in several checkpointed segments",
                       entry->name);
    if (!atomic_exchange(&entry->all->ending, true))
        TD_TRY(td__at_end_of_backward(end_pass, reset, entry->all));
    entry->stepped = true;
    return td__in_backward_step(entry->all, &entry->index, 1);
}

/* ---- Attaching -------------------------------------------------------------------------------------------------- */

static td_status fail_stepped(const struct entry *entry)
{
    return td_fail(TD_ERR_STATE,
                   CALL ": parameter \"%.120s\" is stepped by another optimizer already",
                   entry->name);
}

static td_status attach_flat(struct td__in_backward *all, struct td__fsdp_flat *flat)
{
    for (int p = 0; p < flat->count; p++)
        for (int i = 0; i < all->count; i++) {
            struct entry *entry = &all->entries[i];
            if (all->optimizer->parameters[i].tensor != flat->params[p].tensor)
                continue;
            if (flat->params[p].stepper)
                return fail_stepped(entry);
            entry->sharded = &flat->params[p];
            td__fsdp_set_stepper(entry->sharded, all, i);
        }
    return TD_OK;
}

static td_status attach_fsdp(struct td__in_backward *all, struct td__fsdp *fsdp)
{
    for (int u = 0; u < fsdp->count; u++)
        for (int f = 0; f < fsdp->units[u]->flat_count; f++)
            TD_TRY(attach_flat(all, &fsdp->units[u]->flats[f]));
    return TD_OK;
}

static td_status attach_ddp(struct td__in_backward *all, struct td__ddp *ddp)
{
    for (int number = 0; number < ddp->count; number++)
        for (int i = 0; i < all->count; i++) {
            struct entry *entry = &all->entries[i];
            if (all->optimizer->parameters[i].tensor != ddp->parameters[number].tensor)
                continue;
            if (ddp->parameters[number].stepper)
                return fail_stepped(entry);
            entry->ddp = ddp;
            entry->number = number;
            td__ddp_set_stepper(ddp, number, all, i);
        }
    return TD_OK;
}

/* Modules that reduce gradients themselves, anywhere in `module`, step their parameters. */
static td_status attach_wrappers(struct td__in_backward *all, td_module *module)
{
    if (td__is_ddp(module))
        TD_TRY(attach_ddp(all, td__ddp_of(module, CALL)));
    if (td__fsdp_of(module))
        TD_TRY(attach_fsdp(all, td__fsdp_of(module)));
    for (int i = 0; i < td_child_count(module); i++)
        TD_TRY(attach_wrappers(all, td_child(module, i)));
    return TD_OK;
}

static bool is_observed(const td_tensor *tensor)
{
    for (const struct td__hook *hook = tensor->node->outputs[0].hooks; hook; hook = hook->next)
        if (hook->observer == on_accumulated)
            return true;
    return false;
}

static td_status attach_leaves(struct td__in_backward *all)
{
    for (int i = 0; i < all->count; i++) {
        struct entry *entry = &all->entries[i];
        td_tensor *tensor = all->optimizer->parameters[i].tensor;
        if (entry->ddp || entry->sharded || !td_tensor_requires_grad(tensor))
            continue;
        if (is_observed(tensor))
            return fail_stepped(entry);
        TD_TRY(td__leaf_add_observer(tensor, on_accumulated, entry, &entry->observer));
    }
    return TD_OK;
}

static td_status find_names(struct td__in_backward *all, const td_state *parameters)
{
    for (int i = 0; i < all->count; i++) {
        struct entry *entry = &all->entries[i];
        const td_tensor *tensor = all->optimizer->parameters[i].tensor;
        *entry = (struct entry){.all = all, .index = i};
        for (int k = 0; k < td_state_count(parameters) && !entry->name; k++)
            if (td_state_tensor(parameters, k) == tensor &&
                !(entry->name = strdup(td_state_name(parameters, k))))
                return td__fail_nomem(CALL);
        if (!entry->name)
            return td_fail(TD_ERR_INVALID,
                           CALL ": parameter %d of the optimizer, of the shape %s, is none of the "
                                "module",
                           i, td__shape_of(tensor));
    }
    return TD_OK;
}

/* ---- Life ------------------------------------------------------------------------------------------------------- */

static void free_all(struct td__in_backward *all)
{
    for (int i = 0; i < all->count; i++) {
        struct entry *entry = &all->entries[i];
        if (entry->observer)
            td_tensor_remove_hook(all->optimizer->parameters[i].tensor, entry->observer);
        if (entry->ddp)
            td__ddp_set_stepper(entry->ddp, entry->number, NULL, 0);
        if (entry->sharded)
            td__fsdp_set_stepper(entry->sharded, NULL, 0);
        free(entry->name);
    }
    for (int i = 0; i < 2; i++)
        pthread_mutex_destroy(&all->locks[i]);
    free(all->entries);
    free(all);
}

void td__in_backward_forget(struct td__in_backward *all, int index)
{
    all->entries[index].ddp = NULL;
    all->entries[index].sharded = NULL;
}

static void destroy(td_optimizer *optimizer)
{
    free_all(optimizer->hook_data);
}

static const char *name_of(const td_optimizer *optimizer, int index)
{
    const struct td__in_backward *all = optimizer->hook_data;
    return all->entries[index].name;
}

static td_status refuse_group(td_optimizer *optimizer, td_tensor *const *parameters, int count,
                              const td_parameter_group *options)
{
    (void)optimizer, (void)parameters, (void)count, (void)options;
    return td_fail(TD_ERR_STATE, "td_optimizer_add_group: add groups before " CALL "()");
}

static const struct td__optimizer_hooks in_backward_hooks = {
    .name = CALL,
    .steps_in_backward = true,
    .name_of = name_of,
    .add_group = refuse_group,
    .destroy = destroy,
};

td_status td_optimizer_in_backward(td_module *module, td_optimizer *optimizer)
{
    if (!module || !optimizer)
        return td__fail_null(__func__);
    if (optimizer->hooks)
        return td_fail(optimizer->hooks->steps_in_backward ? TD_ERR_STATE : TD_ERR_UNSUPPORTED,
                       "%s: the optimizer is one of %s()", __func__, optimizer->hooks->name);
    struct td__in_backward *all = calloc(1, sizeof *all);
    struct entry *entries = calloc((size_t)optimizer->count + 1, sizeof *entries);
    td_state *parameters = td_module_parameters(module);
    if (!all || !entries || !parameters) {
        td_state_destroy(parameters);
        free(all);
        free(entries);
        return td__fail_nomem(__func__);
    }
    *all = (struct td__in_backward){
        .optimizer = optimizer, .entries = entries, .count = optimizer->count};
    for (int i = 0; i < 2; i++)
        pthread_mutex_init(&all->locks[i], NULL);
    td_status status = find_names(all, parameters);
    if (!status)
        status = attach_wrappers(all, module);
    if (!status)
        status = attach_leaves(all);
    td_state_destroy(parameters);
    if (status) {
        free_all(all);
        return status;
    }
    optimizer->hooks = &in_backward_hooks;
    optimizer->hook_data = all;
    return TD_OK;
}
