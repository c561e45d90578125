/* Fully sharded modules: how they are made, and their settings. */
#include "parallel/fsdp_offload.h"

#include "base/fail.h"
#include "base/option_rules.h"
#include "group/process_group.h"
#include "parallel/buckets.h"
#include "parallel/fsdp_slices.h"

#include <stdlib.h>
#include <string.h>

static const char key; /* of the attachment */

struct td__fsdp *td__fsdp_of(const td_module *module)
{
    return module ? td__module_attached(module, &key) : NULL;
}

bool td_is_fsdp(const td_module *module)
{
    return td__fsdp_of(module) != NULL;
}

static void free_shell(struct td__fsdp *fsdp)
{
    td__offloader_free(fsdp->offloader);
    td__fsdp_slices_free(fsdp);
    for (int i = 0; i < fsdp->buffer_count; i++)
        td_tensor_release(fsdp->buffers[i]);
    free(fsdp->buffers);
    free(fsdp->units);
    free(fsdp->order);
    free(fsdp->ran);
    free(fsdp);
}

void td__fsdp_dissolve(struct td__fsdp *fsdp)
{
    td__module_detach(fsdp->module, &key);
    free_shell(fsdp);
}

static void free_fsdp(void *arg)
{
    struct td__fsdp *fsdp = arg;
    td__fsdp_wait_reductions(fsdp, 0);
    for (int u = 0; u < fsdp->count; u++)
        td__fsdp_unit_free(fsdp->units[u]);
    free_shell(fsdp);
}

/* ---- Making one ------------------------------------------------------------------------------------------- */

static bool is_new(const struct td__fsdp_flat *flat)
{
    return flat->shard == NULL;
}

/* Calls visit for each flat of this call. */
static td_status each_flat(struct td__fsdp *fsdp,
                           td_status (*visit)(struct td__fsdp_flat *, void *), void *arg)
{
    for (int u = 0; u < fsdp->count; u++)
        for (int f = 0; f < fsdp->units[u]->flat_count; f++)
            if (is_new(&fsdp->units[u]->flats[f]))
                TD_TRY(visit(&fsdp->units[u]->flats[f], arg));
    return TD_OK;
}

struct description {
    struct td__gradient *gradients;
    const char **names;
    int count;
};

static td_status describe(struct td__fsdp_flat *flat, void *arg)
{
    struct description *all = arg;
    for (int i = 0; i < flat->count; i++, all->count++) {
        const struct td__fsdp_param *param = &flat->params[i];
        if (!all->gradients)
            continue;
        struct td__gradient *gradient = &all->gradients[all->count];
        gradient->dtype = flat->dtype;
        gradient->ndim = param->whole.ndim;
        memcpy(gradient->shape, param->whole.shape, sizeof gradient->shape);
        gradient->numel = param->whole.numel;
        gradient->device = flat->device;
        all->names[all->count] = param->name;
    }
    return TD_OK;
}

static td_status verify(struct td__fsdp *fsdp, td_group *group)
{
    struct description count = {0}, all = {0};
    each_flat(fsdp, describe, &count);
    all.gradients = calloc((size_t)count.count + 1, sizeof *all.gradients);
    all.names = calloc((size_t)count.count + 1, sizeof *all.names);
    td_status status = all.gradients && all.names ? TD_OK : td__fail_nomem("td_fsdp");
    if (!status)
        status = each_flat(fsdp, describe, &all);
    if (!status)
        status = td__verify_gradients("td_fsdp", all.gradients, all.names, all.count, group);
    free(all.gradients);
    free(all.names);
    return status;
}

static td_status share_values(struct td__fsdp_flat *flat, void *options)
{
    return td__flat_share_values(flat, !((const td_fsdp_options *)options)->no_init);
}

static td_status collect_buffers(struct td__fsdp *fsdp)
{
    td_state *buffers = td_module_buffers(fsdp->module);
    if (!buffers)
        return td__error_status();
    fsdp->buffers = calloc((size_t)td_state_count(buffers) + 1, sizeof(td_tensor *));
    for (int i = 0; fsdp->buffers && i < td_state_count(buffers); i++)
        fsdp->buffers[fsdp->buffer_count++] = td_tensor_retain(td_state_tensor(buffers, i));
    td_state_destroy(buffers);
    return fsdp->buffers ? TD_OK : td__fail_nomem("td_fsdp");
}

struct memory {
    bool shares;
    struct td__tiers tiers;
    struct td__fsdp_region *region;
    size_t bytes;
};

static bool can_share(const struct td__fsdp_flat *flat)
{
    return !flat->is_whole && !flat->in_file;
}

static td_status lay_out(struct td__fsdp_flat *flat, void *arg)
{
    struct memory *memory = arg;
    TD_TRY(td__flat_lay_out(flat));
    TD_TRY(td__offload_place(flat, &memory->tiers));
    memory->shares &= flat->device->is_host;
    memory->bytes += can_share(flat) ? td__flat_region_bytes(flat) : 0;
    return TD_OK;
}

static td_status begin(struct td__fsdp_flat *flat, void *arg)
{
    struct memory *memory = arg;
    bool shares = memory->region && can_share(flat);
    TD_TRY(td__flat_begin(flat, shares ? memory->region : NULL, memory->bytes,
                          memory->tiers.options->directory));
    if (shares)
        memory->bytes += td__flat_region_bytes(flat);
    for (int i = 0; i < flat->count && flat->requires_grad && !flat->is_remade; i++)
        TD_TRY(td__leaf_add_observer(flat->params[i].tensor, td__fsdp_on_accumulated,
                                     &flat->params[i], &flat->params[i].observer));
    return TD_OK;
}

static td_status allocate(struct td__fsdp *fsdp, struct memory *memory,
                          const struct td__fsdp_ranks *ranks)
{
    if (memory->shares && memory->bytes)
        TD_TRY(td__fsdp_region_make(ranks, memory->bytes, &memory->region));
    fsdp->shares |= memory->region != NULL;
    memory->bytes = 0;
    return each_flat(fsdp, begin, memory);
}

static td_status make_memory(struct td__fsdp *fsdp, const td_fsdp_options *options,
                             const struct td__fsdp_ranks *ranks)
{
    struct memory memory = {0};
    td__tiers_init(&memory.tiers, &options->offload);
    TD_TRY(td__fsdp_can_share(ranks, &memory.shares));
    memory.shares &= !options->no_shared_memory;
    TD_TRY(td__offload_agree(ranks, &memory.tiers, each_flat(fsdp, lay_out, &memory)));
    td_status status = td__offload_agree(ranks, &memory.tiers, allocate(fsdp, &memory, ranks));
    td__fsdp_region_release(memory.region);
    return status;
}

static td_status add_hooks(struct td__fsdp *fsdp)
{
    for (int u = 0; u < fsdp->count; u++) {
        struct td__fsdp_unit *unit = fsdp->units[u];
        td_module_hooks hooks = {.forward_pre = td__fsdp_forward_pre,
                                 .forward = td__fsdp_forward,
                                 .backward_pre = td__fsdp_backward_pre,
                                 .arg = unit};
        if (!unit->hooks)
            TD_TRY(td_module_add_hooks(unit->module, &hooks, &unit->hooks));
    }
    return TD_OK;
}

/* Counts a unit; the bytes of its whole parameters or gradients. *gathers: it has parameters to gather. */
static size_t count_unit(struct td__fsdp *fsdp, const struct td__fsdp_unit *unit, bool *gathers)
{
    size_t bytes = 0;
    for (int f = 0; f < unit->flat_count; f++) {
        const struct td__fsdp_flat *flat = &unit->flats[f];
        bytes += flat->is_whole ? 0 : td__flat_bytes(flat);
        *gathers |= !flat->is_whole && !flat->region;
        fsdp->stats.shard_elements += flat->is_whole ? flat->numel : td__flat_shard_count(flat);
        for (int i = 0; i < flat->count; i++)
            fsdp->stats.parameters += flat->params[i].whole.numel;
    }
    return bytes;
}

/* Two units gathered, and the gradients of one. Where nothing is gathered, the gradients of the outermost unit, of one that
 * computes, and of one that is reduced meanwhile. */
static void set_limit(struct td__fsdp *fsdp)
{
    size_t most = 0, second = 0, outermost = 0, inner = 0;
    bool gathers = false;
    for (int u = 0; u < fsdp->count; u++) {
        size_t bytes = count_unit(fsdp, fsdp->units[u], &gathers);
        if (u == 0)
            outermost = bytes;
        else if (bytes > inner)
            inner = bytes;
        if (bytes > most) {
            second = most;
            most = bytes;
        } else if (bytes > second) {
            second = bytes;
        }
    }
    fsdp->limit = gathers ? 2 * most + second : outermost + 2 * inner;
    if (td__fsdp_sums(fsdp)) /* the gradients of one that come from others */
        fsdp->limit += most;
    fsdp->stats.units = fsdp->count;
    fsdp->stats.shared_memory = fsdp->shares;
}

static td_status check_options(const td_fsdp_options *options)
{
    TD_TRY(td__check_reserved("td_fsdp", options->reserved));
    TD_TRY(td__check_reserved("td_fsdp", options->offload.reserved));
    if ((unsigned)options->strategy > TD_HYBRID_SHARD)
        return td_fail(TD_ERR_INVALID, "td_fsdp: there is no strategy %d", (int)options->strategy);
    bool halves = options->param_dtype == TD_F16 || options->param_dtype == TD_BF16 ||
                  options->param_dtype == TD_F32;
    bool reduces = options->reduce_dtype == TD_F16 || options->reduce_dtype == TD_BF16 ||
                   options->reduce_dtype == TD_F32;
    if (options->mixed_precision && (!halves || !reduces))
        return td_fail(TD_ERR_INVALID,
                       "td_fsdp: param_dtype and reduce_dtype are TD_F16, TD_BF16 or TD_F32");
    return TD_OK;
}

static td_status fill(struct td__fsdp *fsdp, const td_fsdp_options *options)
{
    struct td__fsdp_ranks *ranks;
    TD_TRY(td__fsdp_ranks_make(options, &ranks));
    td_status status = td__fsdp_make_units(fsdp, options, ranks);
    if (!status)
        status = collect_buffers(fsdp);
    fsdp->ran_capacity = 64 + 8 * fsdp->count;
    fsdp->ran = calloc((size_t)fsdp->ran_capacity, sizeof *fsdp->ran);
    if (!status && !fsdp->ran)
        status = td__fail_nomem("td_fsdp");
    if (!status && ranks->group->size > 1)
        status = verify(fsdp, ranks->group);
    if (!status)
        status = each_flat(fsdp, share_values, (void *)options);
    if (!status)
        status = make_memory(fsdp, options, ranks);
    if (!status) /* what is in no flat */
        status = td_module_materialize(fsdp->module);
    if (!status)
        status = add_hooks(fsdp);
    if (!status)
        status = td__fsdp_slices_make(fsdp, options->slices);
    if (!status)
        set_limit(fsdp);
    if (!status && fsdp->count == 1 && ranks->size > 1 && fsdp->module->child_count)
        td_log(
            TD_LOG_WARN,
            "td_fsdp: the whole model is one unit, so that all its parameters are whole during a pass; "
            "set min_parameters, kinds or is_unit, or call td_fsdp() for inner modules first");
    td__fsdp_ranks_release(ranks);
    return status;
}

td_module *td_fsdp(td_module *module, const td_fsdp_options *options)
{
    if (!module)
        return td__null(__func__);
    td_fsdp_options chosen = options ? *options : (td_fsdp_options){0};
    td_status status = check_options(&chosen);
    if (!status && td__fsdp_of(module))
        status = td_fail(TD_ERR_STATE, "td_fsdp: the module is sharded already");
    struct td__fsdp *fsdp = status ? NULL : calloc(1, sizeof *fsdp);
    if (!status && !fsdp)
        status = td__fail_nomem("td_fsdp");
    if (!status) {
        fsdp->module = module;
        fsdp->sync = true;
        fsdp->options = chosen;
        fsdp->broadcasts = !chosen.no_broadcast_buffers;
        fsdp->buffers_changed = true;
        status = fill(fsdp, &chosen);
        td_status attached = td__module_attach(module, &key, fsdp, free_fsdp);
        if (attached)
            free_fsdp(fsdp);
        status = status ? status : attached;
    }
    if (!status)
        return module;
    struct td__error error;
    td__error_save(&error);
    td_module_destroy(module);
    td__error_restore(&error);
    return NULL;
}

/* ---- Making other shards ----------------------------------------------------------------------------------------- */

static void end_unit(struct td__fsdp_unit *unit, struct td__fsdp_ranks *ranks)
{
    for (int f = 0; f < unit->flat_count; f++) {
        struct td__fsdp_flat *flat = &unit->flats[f];
        td__flat_end(flat);
        flat->is_whole = ranks->size == 1 && flat->compute == flat->dtype &&
                         flat->reduce == flat->dtype;
    }
    td__fsdp_ranks_release(unit->ranks);
    unit->ranks = ranks;
    ranks->owners++;
    unit->calls = 0;
    unit->ran = false;
}

/* Those of the options; where TD_HYBRID_SHARD cannot divide, as TD_FULL_SHARD does. */
static td_status remake_ranks(const td_fsdp_options *options, struct td__fsdp_ranks **ranks)
{
    td_fsdp_options chosen = *options;
    const td_group *group = options->group;
    if (options->strategy == TD_HYBRID_SHARD && !td__fsdp_is_even(options, group)) {
        chosen.strategy = TD_FULL_SHARD;
        if (group->rank == 0)
            td_log(TD_LOG_WARN,
                   "td_fsdp: TD_HYBRID_SHARD needs %s; until that is so, each of the %d ranks has "
                   "a shard, as with TD_FULL_SHARD",
                   options->shard_size ? "a number of ranks that shard_size divides"
                                       : "as many ranks on each host",
                   group->size);
    }
    return td__fsdp_ranks_make(&chosen, ranks);
}

td_status td__fsdp_remake(struct td__fsdp *fsdp, td_group *group)
{
    struct td__fsdp_ranks *ranks;
    fsdp->options.group = group;
    TD_TRY(remake_ranks(&fsdp->options, &ranks));
    for (int u = 0; u < fsdp->count; u++)
        end_unit(fsdp->units[u], ranks);
    td__offloader_free(fsdp->offloader); /* its staging has the size of the former shards */
    fsdp->offloader = NULL;
    fsdp->reduction_count = fsdp->order_count = fsdp->at = fsdp->back = fsdp->depth = 0;
    fsdp->ran_count = 0;
    fsdp->sequence = 0;
    fsdp->unsettled = fsdp->ending = fsdp->shares = false;
    fsdp->buffers_changed = true;
    fsdp->stats.whole_bytes = 0;
    fsdp->stats.parameters = fsdp->stats.shard_elements = 0;
    td_status status = make_memory(fsdp, &fsdp->options, ranks);
    if (!status)
        set_limit(fsdp);
    td__fsdp_ranks_release(ranks);
    return status;
}

/* ---- Settings ------------------------------------------------------------------------------------------------ */

static struct td__fsdp *expect(const td_module *module, const char *call)
{
    struct td__fsdp *fsdp = td__fsdp_of(module);
    if (!fsdp)
        td_fail(TD_ERR_INVALID, "%s: the module is %s", call,
                module ? "not one that td_fsdp() was called for" : "NULL");
    return fsdp;
}

bool td_fsdp_set_sync(td_module *module, bool sync)
{
    struct td__fsdp *fsdp = expect(module, __func__);
    if (!fsdp)
        return false;
    bool before = fsdp->sync;
    fsdp->sync = sync;
    return before;
}

td_status td_fsdp_get_stats(td_module *module, td_fsdp_stats *stats)
{
    const struct td__fsdp *fsdp = expect(module, __func__);
    if (!fsdp)
        return TD_ERR_INVALID;
    *stats = fsdp->stats;
    td__offload_add_stats(fsdp, stats);
    return TD_OK;
}

/* ---- Whole parameters ---------------------------------------------------------------------------------------- */

/* A private copy of the whole, of which all tensors become views. */
static td_status summon(struct td__fsdp_flat *flat)
{
    const struct td__fsdp_ranks *ranks = flat->unit->ranks;
    if (flat->is_whole)
        return TD_OK;
    td_tensor **parts = NULL;
    flat->scope = td__storage_create(flat->device, "td_fsdp_gather_begin",
                                     (size_t)flat->numel * td_dtype_size(flat->dtype));
    td_tensor *mine = td__flat_view(flat->shard, flat->dtype, 0, td__flat_shard_count(flat));
    td_status status = flat->scope && mine ? td__flat_cut(flat, flat->scope, flat->dtype, &parts)
                                           : td__error_status();
    if (!status)
        status = td__flat_copy(parts[ranks->rank], mine);
    if (!status && ranks->size > 1)
        status = td_all_gather(parts, ranks->size, parts[ranks->rank], ranks->shards, NULL);
    td__flat_drop_cut(flat, &parts);
    td_tensor_release(mine);
    TD_TRY(td__fsdp_fail(flat->unit, "gathering the parameters", status));
    flat->is_in = true;
    for (int i = 0; i < flat->count; i++) {
        struct td__fsdp_param *param = &flat->params[i];
        struct td__layout whole = param->whole;
        whole.dtype = flat->dtype;
        td__tensor_set_shard(param->tensor, NULL, NULL);
        td__leaf_set_memory(param->tensor, flat->scope, param->offset, &whole);
    }
    return TD_OK;
}

static td_status dismiss(struct td__fsdp_flat *flat, bool write)
{
    if (!flat->scope)
        return TD_OK;
    int64_t count = td__flat_shard_count(flat);
    td_tensor *from = td__flat_view(flat->scope, flat->dtype, flat->cuts[flat->unit->ranks->rank],
                                    count);
    td_tensor *to = td__flat_view(flat->shard, flat->dtype, 0, count);
    td_status status = from && to ? TD_OK : td__error_status();
    if (!status && write && count) {
        status = td__tensor_copy(to, from);
        td__tensor_bump_version(to);
    }
    td_tensor_release(from);
    td_tensor_release(to);
    td_status swapped = td__flat_swap_out(flat);
    td__storage_release(flat->scope);
    flat->scope = NULL;
    return status ? status : swapped;
}

static td_status dismiss_all(struct td__fsdp *fsdp, bool write)
{
    td_status status = TD_OK;
    for (int u = 0; u < fsdp->count; u++)
        for (int f = 0; f < fsdp->units[u]->flat_count; f++) {
            td_status dismissed = dismiss(&fsdp->units[u]->flats[f], write);
            status = status ? status : dismissed;
        }
    fsdp->scope = false;
    return status;
}

td_status td_fsdp_gather_begin(td_module *module, bool write)
{
    struct td__fsdp *fsdp = expect(module, __func__);
    if (!fsdp)
        return TD_ERR_INVALID;
    if (fsdp->scope || fsdp->ending)
        return td_fail(TD_ERR_STATE, "td_fsdp_gather_begin: %s",
                       fsdp->scope ? "the parameters are gathered already" : "a pass runs");
    td_status status = td__fsdp_meet(fsdp);
    for (int u = 0; u < fsdp->count && !status; u++) {
        status = td__unit_leave(fsdp->units[u], true);
        for (int f = 0; f < fsdp->units[u]->flat_count && !status; f++)
            status = summon(&fsdp->units[u]->flats[f]);
    }
    fsdp->scope = true;
    fsdp->scope_writes = write;
    if (status)
        dismiss_all(fsdp, false);
    return status;
}

td_status td_fsdp_gather_end(td_module *module)
{
    struct td__fsdp *fsdp = expect(module, __func__);
    if (!fsdp)
        return TD_ERR_INVALID;
    if (!fsdp->scope)
        return td_fail(TD_ERR_STATE, "td_fsdp_gather_end: td_fsdp_gather_begin() was not called");
    td_status status = dismiss_all(fsdp, fsdp->scope_writes);
    td_status met = td__fsdp_meet(fsdp);
    return status ? status : met;
}
