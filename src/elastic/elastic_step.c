/* One step: compute, agree, commit. elastic.c has the picture. */
#include "base/fail.h"
#include "elastic/elastic_internal.h"
#include "group/process_group.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* ---- Slices ---------------------------------------------------------------------------------------------------- */

/* The finalizer of splitmix64. */
static uint64_t mix(uint64_t x)
{
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

td_status td__elastic_fetch(td_elastic *elastic, int slice)
{
    td__elastic_at("fetch", elastic);
    return td__samples_get(elastic, td__elastic_committed(elastic), slice, &elastic->batch);
}

td_status td__elastic_slice(td_elastic *elastic, td_module *model, int slice)
{
    TD_SCOPE;
    int64_t step = td__elastic_committed(elastic), begin = td__now_ns();
    td_elastic_slice now = {
        .step = step,
        .epoch = td__samples_epoch(elastic, step),
        .slice = slice,
        .batch = elastic->batch,
        .model = model,
        .seed = mix(mix(elastic->options.seed ^ mix((uint64_t)step)) + (uint64_t)slice),
    };
    uint64_t failures = td__error_count();
    td_status status = elastic->slice_fn(&now, elastic->slice_arg);
    if (status && td__error_count() == failures)
        td_fail(status, "td_elastic_run: the function failed for slice %d of step %" PRId64, slice,
                step);
    elastic->losses[slice] = now.loss;
    elastic->slice_ns += td__now_ns() - begin;
    td__elastic_at("slice", elastic);
    return status;
}

/* A failure of the step that this rank would have had alone is its own. */
static td_status judge(const td_elastic *elastic, td_status status)
{
    struct td__error error;
    td__error_save(&error);
    td_status group = td__group_state(elastic->active);
    td__error_restore(&error);
    if (!td__elastic_is_loss(group) && td__elastic_is_loss(status))
        return td_fail(TD_ERR_STATE, "td_elastic_run: %s", error.text);
    return td__elastic_is_loss(group) ? group : status;
}

/* All ranks get the losses of all slices, in their order: a part of the outcome. */
static td_status share_losses(td_elastic *elastic)
{
    int most = (elastic->slices + elastic->active_size - 1) / elastic->active_size;
    double *all = calloc((size_t)most * ((size_t)elastic->active_size + 1), sizeof *all), sum = 0;
    if (!all)
        return td__fail_nomem("td_elastic");
    double *mine = all + (size_t)most * (size_t)elastic->active_size;
    struct td__elastic_share share = td__elastic_share(elastic, elastic->active_rank);
    for (int i = 0; i < share.count; i++)
        mine[i] = elastic->losses[share.first + i * share.stride];
    td_status status = td_group_all_gather(all, mine, (size_t)most, TD_F64, elastic->active, NULL);
    for (int r = 0; r < elastic->active_size && !status; r++) {
        share = td__elastic_share(elastic, r);
        for (int i = 0; i < share.count; i++)
            elastic->losses[share.first + i * share.stride] =
                all[(size_t)r * (size_t)most + (size_t)i];
    }
    for (int k = 0; k < elastic->slices; k++)
        sum += elastic->losses[k];
    elastic->loss = sum / elastic->slices;
    free(all);
    return status;
}

static td_status compute(td_elastic *elastic)
{
    if (!elastic->bound)
        TD_TRY(elastic->replica->ops->bind(elastic->replica, elastic->active, elastic->slices));
    elastic->bound = true;
    elastic->slice_ns = 0;
    td_status status = elastic->replica->ops->compute(elastic->replica, elastic);
    if (!status)
        status = share_losses(elastic);
    if (status)
        return judge(elastic, status);
    elastic->slice_ns /= td__elastic_share(elastic, elastic->active_rank).count;
    return td__audit_computed(elastic, td__elastic_committed(elastic));
}

/* ---- The commit --------------------------------------------------------------------------------------------------- */

static td_status tell_steps(td_elastic *elastic)
{
    int64_t committed = td__elastic_committed(elastic);
    if (atomic_load(&elastic->settled) >= committed)
        return TD_OK;
    atomic_store(&elastic->settled, committed);
    pthread_mutex_lock(&elastic->lock);
    elastic->stats.steps++;
    elastic->stats.loss = elastic->committed_loss;
    pthread_mutex_unlock(&elastic->lock);
    td__elastic_at("committed", elastic);
    td__elastic_tell(elastic, (td_elastic_event){.kind = TD_ELASTIC_COMMITTED,
                                                 .rank = -1,
                                                 .loss = elastic->committed_loss});
    return TD_OK;
}

td_status td__elastic_settle(td_elastic *elastic)
{
    TD_TRY(tell_steps(elastic));
    return td__audit_committed(elastic);
}

/* Where a state is divided, an update may need other ranks, and what it has left half done is restored. */
static bool is_loss_in_update(const td_elastic *elastic, td_status status)
{
    return td__elastic_is_divided(elastic) && td__elastic_is_loss(status) &&
           td__elastic_is_loss(td__group_state(elastic->all));
}

td_status td__elastic_commit(td_elastic *elastic)
{
    td__elastic_at("commit", elastic);
    td_status status = elastic->replica->ops->commit(elastic->replica, elastic);
    if (is_loss_in_update(elastic, status))
        return status;
    if (status) {
        struct td__error error;
        td__error_save(&error);
        return td_fail(td__elastic_is_loss(status) ? TD_ERR_STATE : status,
                       "td_elastic_run: the update of step %" PRId64 " failed on this rank: %s",
                       td__elastic_committed(elastic), error.text);
    }
    elastic->ready = false;
    int64_t committed = atomic_fetch_add(&elastic->committed, 1) + 1;
    elastic->committed_loss = elastic->loss;
    int64_t every = elastic->options.checkpoint_every;
    if (elastic->options.checkpoint && every > 0 && committed % every == 0)
        elastic->checkpoint_due = true;
    if (!td__elastic_is_divided(elastic))
        return tell_steps(elastic);
    td__elastic_at("updated", elastic);
    return TD_OK;
}

/* The newcomers have the same state as everyone now. */
static void take_in(td_elastic *elastic)
{
    if (elastic->active_size == elastic->size)
        return;
    if (elastic->active && elastic->active != elastic->all)
        td_group_destroy(elastic->active);
    elastic->active = elastic->all;
    double ms = (double)(td__now_ns() - elastic->step_ns) / 1e6;
    for (int r = 0; r < elastic->size; r++) {
        if (elastic->active_ranks[r])
            continue;
        elastic->active_ranks[r] = true;
        td__elastic_count(elastic, &elastic->stats.joined);
        td__elastic_tell(
            elastic,
            (td_elastic_event){.kind = TD_ELASTIC_JOINED, .rank = elastic->ranks[r], .ms = ms});
    }
    elastic->active_size = elastic->size;
    elastic->active_rank = elastic->rank;
    elastic->established = true;
    elastic->bound = false;
}

td_status td__elastic_save(td_elastic *elastic)
{
    td_training training = elastic->options.training;
    int keep = elastic->options.checkpoint_keep ? elastic->options.checkpoint_keep : 2;
    training.step = td__elastic_committed(elastic);
    training.epoch = td__samples_epoch(elastic, training.step);
    if (elastic->options.checkpoint && training.model)
        TD_TRY(td__elastic_is_divided(elastic)
                   ? td_training_save_sharded_numbered(elastic->options.checkpoint, &training, keep,
                                                       elastic->all, NULL)
                   : td_training_save_numbered(elastic->options.checkpoint, &training, keep,
                                               elastic->all));
    elastic->saved = training.step;
    elastic->checkpoint_due = false;
    return TD_OK;
}

/* ---- The step ----------------------------------------------------------------------------------------------------- */

static td_status agree(td_elastic *elastic)
{
    td_status status = td__elastic_agree(elastic);
    if (status == TD_ERR_MISMATCH || (status && !td__group_state(elastic->all)))
        elastic->ready =
            false; /* other bits: the step is repeated without the rank that has them */
    return status;
}

td_status td__elastic_attempt(td_elastic *elastic)
{
    elastic->step_ns = td__now_ns();
    td_status status = td__flip_at(elastic, TD__FLIP_PARAMETER);
    if (!status)
        status = td__catch_up_begin(elastic);
    td__elastic_at(elastic->established ? "begun" : "caught", elastic);
    if (!status && elastic->established && !elastic->ready)
        status = compute(elastic);
    if (!status)
        status = td__flip_at(elastic, TD__FLIP_GRADIENT);
    if (!status)
        status = td__catch_up_finish(elastic);
    TD_TRY(status);
    td__catch_up_end(elastic);
    const struct td__elastic_replica_ops *ops = elastic->replica->ops;
    if (ops->kept) /* what the ranks go back to if one of them dies in the update */
        TD_TRY(ops->kept(elastic->replica));
    elastic->ready = true;
    td__elastic_at("ready", elastic);
    TD_TRY(agree(elastic));
    TD_TRY(td__elastic_at("agreed", elastic));
    TD_TRY(td__elastic_settle(elastic));
    TD_TRY(td__elastic_commit(elastic));
    if (ops->keep)
        TD_TRY(ops->keep(elastic->replica, elastic));
    TD_TRY(td__audit_committed(elastic));
    pthread_mutex_lock(&elastic->lock);
    elastic->step_total_ns += td__now_ns() - elastic->step_ns;
    elastic->timed_steps++;
    pthread_mutex_unlock(&elastic->lock);
    td__watch_note_step(elastic, (double)(td__now_ns() - elastic->step_ns) / 1e6);
    take_in(elastic);
    return TD_OK;
}
