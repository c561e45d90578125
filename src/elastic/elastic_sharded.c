/* A module of td_fsdp(): each rank has shards of the parameters and of the optimizer's state, and copies of them are in the
 * memory of other ranks (parallel/fsdp_mirror.h).
 *
 *     rank 0    slices 0 3 6 ┐              ┌─ agreement ── update ── slices …
 *     rank 1    slices 1 4 7 ├─ reductions ─┤               update ── slices …
 *     rank 2    slices 2 5   ┘              └───────────────update ── slices …
 *     copies     … of the state before it ──┘ are complete          └── of the new state …
 *
 * The agreement on a step proves that the state before it is in copies. So a step is settled when the next one is agreed on, and
 * when a rank dies in between, all go back to the state before the update, or to that after it where it is whole. The ranks
 * that are left, and newcomers, divide it anew (parallel/fsdp_reshard.c). The copies of the ranks before live until those of
 * the new ranks are complete on all of them:
 *
 *     mirror    from which the state can be divided; a newcomer has none
 *     next      made by restore(); becomes `mirror` when all have it. A rank that has not learned that is told by the others,
 *               whose `generation` is that of its `next`
 *
 * In the beginning each rank has a whole model, in a group of its own, with a mirror: all divide that of the first rank. It is on
 * the host then, also where shards are to be on an accelerator, which would have less room for it. */
#include "base/fail.h"
#include "elastic/elastic_internal.h"
#include "group/process_group.h"
#include "optim/optimizer.h"
#include "parallel/fsdp_mirror.h"
#include "parallel/fsdp_slices.h"
#include "tensor/tensor_internal.h"

#include <tandem/amp.h>

#include <stdlib.h>
#include <string.h>

enum { KEPT_STATES = TD__MIRROR_SLOTS };

/* What is not in a mirror: the states of schedule and scaler. */
struct kept_rest {
    int64_t step; /* -1: none */
    struct td__buffer bytes;
};

struct sharded_replica {
    struct td__elastic_replica base;
    td_training parts;
    td_module *model; /* of td_fsdp() */
    char *directory;  /* of the shards in files; NULL: there are none */
    td_group *alone;  /* of this rank, for which it was made */
    struct td__buffer shape;
    struct td__mirror *mirror, *next;
    int64_t generation, next_generation;
    struct kept_rest rest[KEPT_STATES]; /* by step modulo their number */
    bool touched;     /* the model of this rank is not the initial one any more … */
    bool has_initial; /* … which the first mirror has */
};

static struct sharded_replica *of(struct td__elastic_replica *replica)
{
    return (struct sharded_replica *)replica;
}

/* ---- A step ----------------------------------------------------------------------------------------------------- */

static td_status sharded_bind(struct td__elastic_replica *base, td_group *group, int slices)
{
    (void)base, (void)group, (void)slices; /* restore() has done it */
    return TD_OK;
}

/* A failure of a group that has some of the ranks only is one of the training's, and so the others learn of it. */
static td_status spread(struct sharded_replica *replica, td_elastic *elastic, td_status status)
{
    struct td__error error;
    if (!td__elastic_is_loss(status))
        return status;
    td__error_save(&error);
    if (td__elastic_is_loss(td__fsdp_group_state(td__fsdp_of(replica->model))))
        td_group_abort(elastic->all);
    td__error_restore(&error);
    return status;
}

static td_status compute_slices(struct sharded_replica *replica, td_elastic *elastic)
{
    td_slices slices = td_slices_begin(replica->model, td__elastic_committed(elastic));
    td_status status = td_slices_status(&slices);
    for (int i = 0; i < slices.count && !status; i++) {
        int k = slices.first + i * slices.stride;
        status = td__elastic_fetch(elastic, k);
        if (!status && td_slices_next(&slices))
            status = td__elastic_slice(elastic, replica->model, k);
        else if (!status)
            status = td_slices_status(&slices);
    }
    TD_TRY(status);
    td_slices_next(&slices); /* takes part in the last passes of others */
    return td_slices_status(&slices);
}

static td_status sharded_compute(struct td__elastic_replica *base, td_elastic *elastic)
{
    struct sharded_replica *replica = of(base);
    td_status status = compute_slices(replica, elastic);
    if (!status) /* what a device has been given is not the outcome yet */
        status = td__fsdp_await(td__fsdp_of(replica->model));
    return spread(replica, elastic, status);
}

/* Calls that wait for ranks which have given up, since a group is broken, end. */
static void abort_calls(struct sharded_replica *replica)
{
    struct td__fsdp *fsdp = td__fsdp_of(replica->model);
    td__fsdp_abort(fsdp);
    struct td__error error;
    td__error_save(&error);
    bool broken = td__fsdp_group_state(fsdp);
    td__error_restore(&error);
    if (broken) {
        td__mirror_abort(replica->mirror);
        td__mirror_abort(replica->next);
    }
}

/* What a step has left half done is dropped when the shards are made anew. */
static td_status sharded_undo(struct td__elastic_replica *base)
{
    abort_calls(of(base));
    return TD_OK;
}

static td_status sharded_commit(struct td__elastic_replica *base, td_elastic *elastic)
{
    struct sharded_replica *replica = of(base);
    return spread(replica, elastic, td__elastic_update(elastic, &replica->parts, replica->model));
}

/* ---- Copies ------------------------------------------------------------------------------------------------------ */

/* The elements of a tensor of the host, behind each other. */
static td_status put_elements(struct td__buffer *bytes, const td_state *state)
{
    for (int i = 0; i < td_state_count(state); i++) {
        td_tensor *dense = td__contiguous(td_state_tensor(state, i));
        if (!dense)
            return td__error_status();
        td__buffer_put(bytes, td_tensor_data(dense), td_tensor_nbytes(dense));
        td_tensor_release(dense);
    }
    return bytes->failed ? td__fail_nomem("td_elastic") : TD_OK;
}

static td_status keep_rest(struct sharded_replica *replica, int64_t step)
{
    struct kept_rest *rest = &replica->rest[step % KEPT_STATES];
    td_state *state = td_state_create();
    if (!state)
        return td__error_status();
    rest->step = step;
    rest->bytes.size = 0;
    td_status status = td__elastic_add_schedule(&replica->parts, state);
    if (!status) {
        td__put_state(&rest->bytes, state);
        status = put_elements(&rest->bytes, state);
    }
    td_state_destroy(state);
    return status;
}

static td_status keep_in(struct sharded_replica *replica, struct td__mirror *mirror, int64_t step)
{
    TD_TRY(keep_rest(replica, step));
    return td__mirror_commit(mirror, step);
}

static td_status sharded_keep(struct td__elastic_replica *base, td_elastic *elastic)
{
    return keep_in(of(base), of(base)->mirror, td__elastic_committed(elastic));
}

static td_status sharded_kept(struct td__elastic_replica *base)
{
    return td__mirror_wait(of(base)->mirror);
}

/* ---- Going back --------------------------------------------------------------------------------------------------- */

static td_status take_elements(struct td__reader *reader, const td_state *state)
{
    for (int i = 0; i < td_state_count(state); i++) {
        td_tensor *tensor = td_state_tensor(state, i);
        size_t bytes = td_tensor_nbytes(tensor);
        if ((size_t)(reader->end - reader->at) < bytes)
            return td_fail(TD_ERR_MISMATCH, "td_elastic: the state of another rank is cut off");
        memcpy(td_tensor_data(tensor), reader->at, bytes);
        reader->at += bytes;
    }
    return TD_OK;
}

/* The learning rates are those of the optimizer, whose groups are set already. */
static td_status load_rest(const struct sharded_replica *replica, const td_state *state)
{
    td_optimizer *optimizer = replica->parts.optimizer;
    size_t bytes = (size_t)optimizer->group_count * sizeof *optimizer->groups;
    struct td__parameter_group *groups = malloc(bytes + 1);
    if (!groups)
        return td__fail_nomem("td_elastic");
    memcpy(groups, optimizer->groups, bytes);
    td_status status = td__elastic_load_schedule(&replica->parts, state);
    memcpy(optimizer->groups, groups, bytes);
    free(groups);
    return status;
}

/* All ranks get what the first one had after a step. */
static td_status share_rest(struct sharded_replica *replica, td_elastic *elastic, int first,
                            int64_t step)
{
    const struct kept_rest *own = &replica->rest[step % KEPT_STATES];
    bool sends = elastic->rank == first;
    td_bytes bytes = {0};
    if (!replica->parts.schedule && !replica->parts.scaler)
        return TD_OK;
    if (sends)
        bytes = (td_bytes){.data = (char *)own->bytes.data, .size = own->bytes.size};
    TD_TRY(td_broadcast_object_list(&bytes, 1, elastic->ranks[first], elastic->all));
    struct td__reader reader = td__reader_of(bytes.data, bytes.size);
    td_state *state = NULL;
    td_status status = td__take_state(&reader, &state);
    if (!status)
        status = take_elements(&reader, state);
    if (!status)
        status = load_rest(replica, state);
    td_state_destroy(state);
    if (!sends)
        td_bytes_free(&bytes);
    return status;
}

/* The newest checkpoint, if there is one. */
static td_status load_checkpoint(const struct sharded_replica *replica, td_elastic *elastic,
                                 int64_t *step, bool *loaded)
{
    td_training training = replica->parts;
    training.any_size = true;
    *loaded = false;
    if (!elastic->options.checkpoint)
        return TD_OK;
    TD_TRY(td_training_load_latest(elastic->options.checkpoint, &training, elastic->all, loaded));
    if (*loaded)
        *step = training.step;
    return TD_OK;
}

/* No rank that is left has a copy of some shards. */
static td_status begin_anew(struct sharded_replica *replica, td_elastic *elastic, int64_t *step)
{
    bool loaded = false;
    struct td__error lost;
    td__error_save(&lost);
    td_status status = TD_OK;
    if (elastic->options.checkpoint)
        status = td__fsdp_reshard_blank(replica->model, replica->parts.optimizer, elastic->all);
    if (!status)
        status = load_checkpoint(replica, elastic, step, &loaded);
    TD_TRY(status);
    elastic->hopeless = !loaded;
    if (!loaded)
        return td_fail(TD_ERR_PEER, "td_elastic_run: %s, and there is no checkpoint to go on from",
                       lost.text);
    if (elastic->rank == 0)
        td_log(TD_LOG_WARN, "td_elastic: %s; the ranks go on from the checkpoint of step %lld",
               lost.text, (long long)*step);
    return TD_OK;
}

/* They read memory that is about to be freed; nobody needs them. */
static void end_copies(struct td__mirror *mirror)
{
    struct td__error before;
    td__error_save(&before);
    if (mirror && td__mirror_wait(mirror))
        td__error_undo(&before);
}

static void sharded_end_copies(struct td__elastic_replica *base)
{
    abort_calls(of(base));
    end_copies(of(base)->mirror);
    end_copies(of(base)->next);
}

static td_status divide(struct sharded_replica *replica, td_elastic *elastic,
                        const struct td__elastic_source *source, int64_t *step)
{
    bool begins = source->begins, loaded;
    bool has = begins ? elastic->rank == source->first : replica->mirror && replica->generation;
    struct td__fsdp *fsdp = td__fsdp_of(replica->model);
    fsdp->slices->total = elastic->slices;
    if (begins && !replica->touched) {
        TD_TRY(keep_in(replica, replica->mirror, 0));
        replica->has_initial = true;
    }
    replica->touched = true;
    if (begins && has && !replica->has_initial)
        return td_fail(TD_ERR_STATE, "td_elastic_run: no rank is left that has the weights");
    if (replica->mirror && !has)
        end_copies(replica->mirror);
    td_status status = td__fsdp_reshard(replica->model, replica->parts.optimizer, elastic->all,
                                        has ? replica->mirror : NULL, step);
    if (status == TD_ERR_PEER && !begins) {
        struct td__error error;
        td__error_save(&error);
        bool works = !td__group_state(elastic->all);
        td__error_restore(&error);
        return works ? begin_anew(replica, elastic, step) : status;
    }
    TD_TRY(status);
    TD_TRY(share_rest(replica, elastic, source->first, *step));
    return begins ? load_checkpoint(replica, elastic, step, &loaded) : TD_OK;
}

static void take_next(struct sharded_replica *replica)
{
    td__mirror_free(replica->mirror);
    replica->mirror = replica->next;
    replica->generation = replica->next_generation;
    replica->next = NULL;
    td_group_destroy(replica->alone);
    replica->alone = NULL;
}

/* All ranks have their part of the state, and know in which groups the others call. */
static td_status meet(struct sharded_replica *replica, td_elastic *elastic)
{
    const struct td__fsdp_ranks *ranks = td__fsdp_of(replica->model)->units[0]->ranks;
    uint64_t keys[TD__ELASTIC_PARTS] = {ranks->owns_shards ? ranks->shards->key : 0,
                                        ranks->owns_replicas ? ranks->replicas->key : 0};
    return td_group_all_gather(elastic->part_keys, keys, TD__ELASTIC_PARTS, TD_U64, elastic->all,
                               NULL);
}

static td_status sharded_restore(struct td__elastic_replica *base, td_elastic *elastic,
                                 const struct td__elastic_source *source, int64_t *committed)
{
    struct sharded_replica *replica = of(base);
    int64_t step = 0;
    if (replica->next && replica->next_generation == source->generation)
        take_next(replica); /* another rank knows that all had it */
    td__mirror_free(replica->next);
    replica->next = NULL;
    TD_TRY(divide(replica, elastic, source, &step));
    TD_TRY(td__mirror_create(replica->model, replica->parts.optimizer, &replica->next));
    replica->next_generation = source->generation + 1;
    TD_TRY(keep_in(replica, replica->next, step));
    TD_TRY(td__mirror_wait(replica->next));
    td__elastic_at("divided", elastic);
    TD_TRY(meet(replica, elastic));
    take_next(replica);
    *committed = step;
    return TD_OK;
}

static int64_t sharded_generation(const struct td__elastic_replica *base)
{
    return ((const struct sharded_replica *)base)->generation;
}

/* ---- What ranks compare ------------------------------------------------------------------------------------------ */

static td_status sharded_put(struct td__elastic_replica *base, enum td__elastic_replica_part kind,
                             struct td__buffer *text)
{
    (void)kind;
    td__buffer_put(text, of(base)->shape.data, of(base)->shape.size);
    return text->failed ? td__fail_nomem("td_elastic") : TD_OK;
}

/* The shards of two ranks have nothing in common. */
static td_status sharded_list(struct td__elastic_replica *base, enum td__elastic_replica_part kind,
                              struct td__elastic_replica_pieces *list)
{
    (void)base, (void)kind, (void)list;
    return TD_OK;
}

static void sharded_free(struct td__elastic_replica *base)
{
    struct sharded_replica *replica = of(base);
    td__mirror_free(replica->mirror);
    td__mirror_free(replica->next);
    td_module_destroy(replica->model);
    td_group_destroy(replica->alone);
    td__buffer_free(&replica->shape);
    free(replica->directory);
    for (int i = 0; i < KEPT_STATES; i++)
        td__buffer_free(&replica->rest[i].bytes);
    free(replica);
}

static const struct td__elastic_replica_ops sharded_ops = {
    .bind = sharded_bind,
    .compute = sharded_compute,
    .undo = sharded_undo,
    .commit = sharded_commit,
    .list = sharded_list,
    .put = sharded_put,
    .free = sharded_free,
    .keep = sharded_keep,
    .kept = sharded_kept,
    .end_copies = sharded_end_copies,
    .restore = sharded_restore,
    .generation = sharded_generation,
};

uint64_t td__sharded_plan(const struct td__elastic_replica *base)
{
    const struct sharded_replica *replica = (const struct sharded_replica *)base;
    const td_fsdp_options *options = &td__fsdp_of(replica->model)->options;
    int64_t numbers[] = {options->strategy, options->shard_size, options->mixed_precision,
                         options->param_dtype, options->reduce_dtype};
    return td__bit_hash(numbers, sizeof numbers, 0);
}

td_module *td__sharded_model(struct td__elastic_replica *replica)
{
    return replica->ops == &sharded_ops ? of(replica)->model : NULL;
}

/* ---- Making one -------------------------------------------------------------------------------------------------- */

static td_status check_options(const td_elastic_options *options)
{
    static const char call[] = "td_elastic_create";
    const td_fsdp_options *fsdp = options->fsdp;
    if (!options->training.optimizer)
        return td_fail(TD_ERR_INVALID,
                       "%s: with `fsdp` the training needs an optimizer, whose state is copied",
                       call);
    if (fsdp->group || fsdp->slices)
        return td_fail(TD_ERR_INVALID,
                       "%s: fsdp.group and fsdp.slices must be 0: those of the training count",
                       call);
    return TD_OK;
}

static td_status describe(struct sharded_replica *replica)
{
    td_state *parameters = td_module_parameters(replica->parts.model);
    td_state *buffers = td_module_buffers(replica->parts.model);
    td_status status = parameters && buffers ? TD_OK : td__error_status();
    if (!status) {
        td__put_state(&replica->shape, parameters);
        td__put_state(&replica->shape, buffers);
    }
    td_state_destroy(parameters);
    td_state_destroy(buffers);
    return status;
}

/* The units decide on what is where. */
static td_status describe_units(struct sharded_replica *replica)
{
    const struct td__fsdp *fsdp = td__fsdp_of(replica->model);
    for (int u = 0; u < fsdp->count; u++) {
        const struct td__fsdp_unit *unit = fsdp->units[u];
        td__buffer_put_string(&replica->shape, unit->name, strlen(unit->name));
        td__buffer_put_u32(&replica->shape, (uint32_t)unit->flat_count);
        td__buffer_put_u8(&replica->shape, unit->keep);
        for (int f = 0; f < unit->flat_count; f++)
            td__buffer_put_u32(&replica->shape, (uint32_t)unit->flats[f].count);
    }
    return replica->shape.failed ? td__fail_nomem("td_elastic_create") : TD_OK;
}

static td_status wrap(struct sharded_replica *replica, td_elastic *elastic)
{
    int self = td_get_rank(NULL);
    td_fsdp_options options = *elastic->options.fsdp;
    td_status status = describe(replica);
    if (!status)
        status = td_new_group(&self, 1, NULL, &replica->alone);
    if (status) {
        td_module_destroy(replica->parts.model);
        return status;
    }
    td_fsdp_offload offload = options.offload;
    if (offload.directory && !(replica->directory = strdup(offload.directory))) {
        td_module_destroy(replica->parts.model);
        return td__fail_nomem("td_elastic_create");
    }
    offload.directory = replica->directory; /* it is needed in each division */
    options.group = replica->alone;
    options.slices = elastic->slices;
    options.offload.enabled = true;
    options.offload.device_bytes = options.offload.host_bytes = 0;
    replica->model = td_fsdp(replica->parts.model, &options);
    if (!replica->model)
        return td__error_status();
    td__fsdp_of(replica->model)->options.offload = offload;
    td__fsdp_of(replica->model)->slices->state.seed = elastic->options.seed;
    TD_TRY(describe_units(replica));
    return td__mirror_create(replica->model, replica->parts.optimizer, &replica->mirror);
}

td_status td__sharded_replica(td_elastic *elastic, struct td__elastic_replica **replica_out)
{
    TD_TRY(check_options(&elastic->options));
    struct sharded_replica *replica = calloc(1, sizeof *replica);
    if (!replica)
        return td__fail_nomem("td_elastic_create");
    replica->base.ops = &sharded_ops;
    replica->parts = elastic->options.training;
    for (int i = 0; i < KEPT_STATES; i++)
        replica->rest[i].step = -1;
    elastic->took_model = true;
    td_status status = wrap(replica, elastic);
    if (status) {
        sharded_free(&replica->base);
        return status;
    }
    *replica_out = &replica->base;
    return TD_OK;
}
