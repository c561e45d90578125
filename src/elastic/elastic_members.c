/* Who takes part: after a loss the survivors go on, and ranks that have come get the state.
 *
 *     regroup     abort what is under way · shrink · enter, until it succeeds
 *     enter       all ranks compare where they stand:
 *                     committed steps of the ranks     5 5 4 4 new       5 was committed: the agreement on it was complete,
 *                     roll forward                         5 5           so these have its outcome, too, and commit it
 *                     bind the next step to            x x x x           those that have the state; the new one catches up
 *
 * In the beginning no rank has a state that counts. Then that of the first rank does, and ranks whose weights are the same
 * have it, too; others, where programs have drawn other initial weights, catch up like newcomers.
 *
 * A state of which each rank has a part is divided anew among all of them, newcomers too, in that moment. No rank rolls forward:
 * all go back to the newest state that is whole, that of the last commit or the one before. */
#include "base/fail.h"
#include "base/text.h"
#include "elastic/elastic_internal.h"
#include "group/process_group.h"
#include "peer/endpoint.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Where a rank stands. */
struct standing {
    int64_t committed, generation;
    uint64_t shape, plan, weights;
    int32_t slices;
    uint8_t established, ready, stopped, resumed;
};

/* ---- Groups ---------------------------------------------------------------------------------------------------- */

static td_status list_members(td_elastic *elastic, td_group *group)
{
    int size = td_get_world_size(group);
    int *ranks = malloc((size_t)size * sizeof *ranks);
    bool *active = calloc((size_t)size, sizeof *active);
    struct td__pace *paces = calloc((size_t)size, sizeof *paces);
    uint64_t(*part_keys)[TD__ELASTIC_PARTS] = calloc((size_t)size, sizeof *part_keys);
    td_status status = ranks && active && paces && part_keys
                           ? td_get_process_group_ranks(group, ranks)
                           : td__fail_nomem("td_elastic");
    if (status) {
        free(ranks);
        free(active);
        free(paces);
        free(part_keys);
        return status;
    }
    free(elastic->ranks);
    free(elastic->active_ranks);
    free(elastic->paces);
    free(elastic->part_keys);
    elastic->part_keys = part_keys; /* set when the model is divided */
    elastic->ranks = ranks;
    elastic->active_ranks = active;
    elastic->paces = paces;
    elastic->rank = td_get_rank(group);
    elastic->size = size;
    return TD_OK;
}

static void drop_active(td_elastic *elastic)
{
    if (elastic->active && elastic->active != elastic->all)
        td_group_destroy(elastic->active);
    elastic->active = NULL;
}

static void drop_former(td_elastic *elastic)
{
    for (int i = 0; i < elastic->former_count; i++)
        td_group_destroy(elastic->former[i]);
    free(elastic->former);
    elastic->former = NULL;
    elastic->former_count = 0;
}

void td__elastic_leave_groups(td_elastic *elastic)
{
    drop_active(elastic);
    td_group_destroy(elastic->all);
    elastic->all = NULL;
    drop_former(elastic);
}

static td_status keep_former(td_elastic *elastic)
{
    td_group **former = realloc(elastic->former,
                                (size_t)(elastic->former_count + 1) * sizeof *former);
    if (!former)
        return td__fail_nomem("td_elastic");
    drop_active(elastic);
    former[elastic->former_count++] = elastic->all;
    elastic->former = former;
    elastic->all = NULL;
    return TD_OK;
}

td_status td__elastic_adopt(td_elastic *elastic, td_group *group)
{
    TD_TRY(list_members(elastic, group));
    if (elastic->all && td__elastic_is_divided(elastic))
        TD_TRY(keep_former(elastic));
    else if (elastic->all)
        td__elastic_leave_groups(elastic);
    elastic->all = group;
    elastic->entered = false;
    return TD_OK;
}

/* ---- Comparing -------------------------------------------------------------------------------------------------- */

/* Options that decide on the bits, and what is trained, in one number each. */
static uint64_t hash_plan(const td_elastic *elastic)
{
    const td_elastic_options *options = &elastic->options;
    int64_t numbers[] = {(int64_t)options->seed,
                         options->slice_size,
                         options->dataset ? td_dataset_size(options->dataset) : -1,
                         options->no_shuffle,
                         options->drop_last,
                         options->check_every,
                         options->mismatch,
                         options->straggler,
                         options->fsdp != NULL};
    uint64_t divided = td__elastic_is_divided(elastic) ? td__sharded_plan(elastic->replica) : 0;
    return td__bit_hash(numbers, sizeof numbers, divided) ^
           td__bit_hash(&options->straggler_factor, sizeof(double), 1) ^
           td__bit_hash(&options->clip_norm, sizeof(double), 2);
}

static td_status stand(td_elastic *elastic, struct standing *own)
{
    struct td__buffer text = {0};
    *own = (struct standing){.committed = td__elastic_committed(elastic),
                             .plan = hash_plan(elastic),
                             .slices = elastic->slices,
                             .established = elastic->established,
                             .ready = elastic->ready,
                             .resumed = elastic->resumed,
                             .stopped = atomic_load(&elastic->stopped)};
    if (td__elastic_is_divided(elastic))
        own->generation = elastic->replica->ops->generation(elastic->replica);
    td_status status = elastic->replica->ops->put(elastic->replica, TD__PIECES_WEIGHTS, &text);
    if (!status)
        own->shape = td__bit_hash(text.data, text.size, 0);
    td__buffer_free(&text);
    bool compares = !elastic->established && !td__elastic_is_divided(elastic);
    return compares && !status ? td__elastic_hash_all(elastic, TD__PIECES_WEIGHTS, &own->weights) : status;
}

/* The rank whose state counts: the first of those that are the farthest; *any: one has a state at all. */
static int find_farthest(const td_elastic *elastic, const struct standing *all, bool *any)
{
    int best = 0;
    *any = false;
    for (int r = 0; r < elastic->size; r++)
        if (all[r].established && (!*any || all[r].committed > all[best].committed)) {
            best = r;
            *any = true;
        }
    return best;
}

static td_status check_same(const td_elastic *elastic, const struct standing *own,
                            const struct standing *best, int rank)
{
    if (own->shape != best->shape)
        return td_fail(
            TD_ERR_MISMATCH,
            "td_elastic_run: this rank has another model than rank %d: the names, dtypes "
            "or shapes of its parameters and buffers are not the same",
            rank);
    if (own->plan != best->plan)
        return td_fail(
            TD_ERR_MISMATCH,
            "td_elastic_run: this rank has other options than rank %d: seed, slice_size, "
            "the size of the dataset, no_shuffle, drop_last, check_every, the policies, "
            "straggler_factor, clip_norm, and of `fsdp` whether it is set, strategy, shard_size "
            "and mixed precision must be the same",
            rank);
    if (elastic->options.slices && own->slices != best->slices)
        return td_fail(TD_ERR_MISMATCH, "td_elastic_run: this rank has %d slices, rank %d has %d",
                       own->slices, rank, best->slices);
    return TD_OK;
}

/* ---- Going on --------------------------------------------------------------------------------------------------- */

static td_status roll_forward(td_elastic *elastic, int64_t committed)
{
    while (td__elastic_committed(elastic) < committed) {
        if (!elastic->ready)
            return td_fail(TD_ERR_STATE,
                           "td_elastic: step %" PRId64 " was committed by another rank, and this "
                           "one does not have its gradients",
                           td__elastic_committed(elastic));
        TD_TRY(td__elastic_commit(elastic));
        td__elastic_count(elastic, &elastic->stats.rolled_forward);
    }
    return TD_OK;
}

/* Which ranks compute the next step. A state of others is of no use: they get that one. */
static td_status choose_active(td_elastic *elastic, const struct standing *all, int best, bool any)
{
    int before = 0;
    elastic->active_size = 0;
    elastic->active_rank = -1;
    for (int r = 0; r < elastic->size; r++) {
        bool has = any ? all[r].established
                       : all[r].weights == all[best].weights &&
                             all[r].committed == all[best].committed;
        if (r < elastic->rank)
            before += has;
        elastic->active_ranks[r] = has;
        elastic->active_size += has;
    }
    elastic->established = elastic->active_ranks[elastic->rank];
    if (elastic->established)
        elastic->active_rank = before;
    int newcomers = 0;
    for (int r = 0; r < elastic->rank; r++)
        newcomers += !elastic->active_ranks[r];
    if (elastic->active_size > elastic->slices ||
        (!elastic->established && elastic->active_size + newcomers >= elastic->slices))
        return td_fail(TD_ERR_INVALID,
                       "td_elastic_run: %d slices are too few for %d ranks; each computes one at "
                       "least",
                       elastic->slices, elastic->size);
    drop_active(elastic);
    elastic->active = elastic->all;
    if (elastic->active_size == elastic->size)
        return TD_OK;
    elastic->active = NULL;
    TD_TRY(td_group_split(elastic->all, elastic->established ? 0 : -1, elastic->rank, NULL,
                          &elastic->active));
    return TD_OK;
}

static td_status provide_slices(td_elastic *elastic, int slices)
{
    if (elastic->slices == slices && elastic->losses)
        return TD_OK;
    double *losses = realloc(elastic->losses, (size_t)slices * sizeof *losses);
    if (!losses)
        return td__fail_nomem("td_elastic");
    memset(losses, 0, (size_t)slices * sizeof *losses);
    elastic->losses = losses;
    elastic->slices = slices;
    return TD_OK;
}

/* Looks for a checkpoint, when no rank has a state yet. */
static td_status resume(td_elastic *elastic)
{
    bool loaded = false;
    td_training training = elastic->options.training;
    elastic->resumed = true;
    if (!elastic->options.checkpoint || !training.model || td__elastic_is_divided(elastic))
        return TD_OK; /* restore() does */
    training.any_size = true;
    TD_TRY(td_training_load_latest(elastic->options.checkpoint, &training, elastic->all, &loaded));
    if (loaded) {
        atomic_store(&elastic->committed, training.step);
        atomic_store(&elastic->settled, training.step);
    }
    return TD_OK;
}

/* ---- A divided state --------------------------------------------------------------------------------------------- */

static void tell_joined(td_elastic *elastic, const struct standing *all, int64_t begin_ns)
{
    double ms = (double)(td__now_ns() - begin_ns) / 1e6;
    if (!all[elastic->rank].established) {
        pthread_mutex_lock(&elastic->lock);
        elastic->stats.catch_up_ms = ms;
        pthread_mutex_unlock(&elastic->lock);
    }
    for (int r = 0; r < elastic->size; r++) {
        if (all[r].established)
            continue;
        td__elastic_count(elastic, &elastic->stats.joined);
        td__elastic_tell(
            elastic,
            (td_elastic_event){.kind = TD_ELASTIC_JOINED, .rank = elastic->ranks[r], .ms = ms});
    }
}

static void all_compute(td_elastic *elastic)
{
    drop_active(elastic);
    elastic->active = elastic->all;
    elastic->active_size = elastic->size;
    elastic->active_rank = elastic->rank;
    for (int r = 0; r < elastic->size; r++)
        elastic->active_ranks[r] = true;
    elastic->established = true;
}

static td_status divide(td_elastic *elastic, const struct standing *all, int best, bool any)
{
    int64_t begin_ns = td__now_ns(), committed = 0;
    struct td__elastic_source source = {.first = best, .begins = !any};
    if (elastic->rank >= elastic->slices)
        return td_fail(TD_ERR_INVALID,
                       "td_elastic_run: %d slices are too few for %d ranks; each computes one at "
                       "least",
                       elastic->slices, elastic->size);
    for (int r = elastic->size - 1; r >= 0; r--)
        if (all[r].established) {
            source.first = r;
            source.generation = all[r].generation > source.generation ? all[r].generation
                                                                      : source.generation;
        }
    TD_TRY(elastic->replica->ops->undo(elastic->replica));
    TD_TRY(elastic->replica->ops->restore(elastic->replica, elastic, &source, &committed));
    atomic_store(&elastic->committed, committed);
    if (!all[elastic->rank].established || committed < atomic_load(&elastic->settled))
        atomic_store(&elastic->settled, committed);
    all_compute(elastic);
    elastic->ready = false;
    drop_former(elastic);
    if (any)
        tell_joined(elastic, all, begin_ns);
    return td__elastic_settle(elastic);
}

/* The same on all ranks, also where some know that the last one is written, and others do not. */
static void decide_on_checkpoint(td_elastic *elastic)
{
    int64_t every = elastic->options.checkpoint_every, committed = td__elastic_committed(elastic);
    elastic->saved = -1;
    elastic->checkpoint_due = elastic->options.checkpoint && every > 0 && committed > 0 &&
                              committed % every == 0 && elastic->active_size == elastic->size;
}

static td_status decide(td_elastic *elastic, const struct standing *all)
{
    bool any, ready = true, divided = td__elastic_is_divided(elastic);
    int best = find_farthest(elastic, all, &any);
    TD_TRY(check_same(elastic, &all[elastic->rank], &all[best], elastic->ranks[best]));
    TD_TRY(provide_slices(elastic, all[best].slices));
    for (int r = 0; r < elastic->size; r++) {
        if (all[r].stopped)
            atomic_store(&elastic->stopped, true);
        if (all[r].established)
            ready &= all[r].ready && all[r].committed == all[best].committed;
    }
    if (divided) {
        TD_TRY(divide(elastic, all, best, any));
    } else {
        if (any && elastic->established)
            TD_TRY(roll_forward(elastic, all[best].committed));
        TD_TRY(choose_active(elastic, all, best, any));
        atomic_store(&elastic->committed, all[best].committed);
        atomic_store(&elastic->settled, all[best].committed);
        /* Where all have the outcome of the next step, only the agreement on it is left. */
        ready &= any && elastic->established;
        if (elastic->ready && !ready)
            TD_TRY(elastic->replica->ops->undo(elastic->replica));
        elastic->ready = ready;
    }
    elastic->check_due = elastic->admit_due = false;
    decide_on_checkpoint(elastic);
    elastic->bound = false;
    elastic->entered = true;
    return td__audit_regroup(elastic);
}

td_status td__elastic_enter(td_elastic *elastic)
{
    struct standing own, *all = malloc((size_t)elastic->size * sizeof *all);
    bool again = true;
    td_status status = all ? TD_OK : td__fail_nomem("td_elastic");
    while (again && !status) {
        bool any, resumed = true;
        status = stand(elastic, &own);
        if (!status)
            status = td_group_all_gather(all, &own, sizeof own, TD_U8, elastic->all, NULL);
        if (status)
            break;
        find_farthest(elastic, all, &any);
        for (int r = 0; r < elastic->size; r++)
            resumed &= all[r].resumed;
        again = !any && !resumed;
        status = again ? resume(elastic) : decide(elastic, all);
    }
    free(all);
    return status;
}

/* ---- Newcomers --------------------------------------------------------------------------------------------------- */

/* In a newcomer td_elastic_create() makes the same group of the same new world. */
td_status td__elastic_admit(td_elastic *elastic)
{
    td_group *grown = NULL, *all;
    elastic->admit_due = false;
    TD_TRY(td_group_admit(elastic->all, NULL, &grown));
    if (!grown)
        return TD_OK;
    TD_TRY(td_new_group(NULL, 0, &(td_group_options){.world = grown}, &all));
    td_status status = td__elastic_adopt(elastic, all);
    if (status)
        td_group_destroy(all);
    return status;
}

/* ---- After a loss ------------------------------------------------------------------------------------------------- */

/* Ranks that were in the group before and are not any more. */
static void report_losses(td_elastic *elastic, const int *before, int before_size)
{
    struct td__endpoint *endpoint = elastic->all->root->endpoint;
    for (int i = 0; i < before_size; i++) {
        bool left = false;
        for (int r = 0; r < elastic->size; r++)
            left |= elastic->ranks[r] == before[i];
        if (left)
            continue;
        char text[400];
        const char *reason = td__endpoint_exit_reason(endpoint, before[i]);
        snprintf(text, sizeof text, "%s", td__endpoint_describe(endpoint, before[i]));
        td__text_add(text, sizeof text, " %s", reason ? reason : "is not a member any more");
        td__elastic_count(elastic, &elastic->stats.deaths);
        if (elastic->rank == 0)
            td_log(TD_LOG_WARN, "td_elastic: %s; %d ranks go on with step %" PRId64, text,
                   elastic->size, td__elastic_committed(elastic));
        td__elastic_tell(
            elastic, (td_elastic_event){.kind = TD_ELASTIC_DIED, .rank = before[i], .text = text});
    }
}

/* All survivors come to the same result; and all have the state. */
static td_status check_enough(const td_elastic *elastic, int before)
{
    int least = elastic->options.min_ranks ? elastic->options.min_ranks : 1;
    if (elastic->size < least)
        return td_fail(TD_ERR_PEER,
                       "td_elastic_run: %d of %d ranks are left after step %" PRId64
                       ", and the training needs %d",
                       elastic->size, before, td__elastic_committed(elastic), least);
    if (elastic->options.need_majority && 2 * elastic->size <= before)
        return td_fail(TD_ERR_PEER,
                       "td_elastic_run: %d of %d ranks are left after step %" PRId64
                       ", which is no majority; the others may go on in their part of the network",
                       elastic->size, before, td__elastic_committed(elastic));
    return td__network_check(elastic);
}

/* Ends what is under way here. Afterwards no thread of this process is in a call of the groups, and when all survivors have
 * joined td_group_shrink(), none of them writes memory of another one. */
static td_status stop_calls(td_elastic *elastic)
{
    td_group_abort(elastic->all);
    if (elastic->active && elastic->active != elastic->all)
        td_group_abort(elastic->active);
    td__catch_up_end(elastic);
    bool keeps = elastic->ready && !td__elastic_is_divided(elastic);
    return keeps ? TD_OK : elastic->replica->ops->undo(elastic->replica);
}

static td_status shrink(td_elastic *elastic)
{
    td_group *rest;
    TD_TRY(stop_calls(elastic));
    td__elastic_at("shrink", elastic);
    td__watch_now(elastic, true);
    TD_TRY(td_group_shrink(elastic->all, NULL, &rest));
    td_status status = td__elastic_adopt(elastic, rest);
    if (status)
        td_group_destroy(rest);
    else
        td__watch_now(elastic, false);
    return status;
}

static void note_recovery(td_elastic *elastic)
{
    double ms = (double)(td__now_ns() - elastic->failed_ns) / 1e6;
    elastic->failed_ns = 0;
    pthread_mutex_lock(&elastic->lock);
    td_elastic_stats *stats = &elastic->stats;
    stats->recoveries++;
    stats->recovery_ms = ms;
    stats->slowest_recovery_ms = ms > stats->slowest_recovery_ms ? ms : stats->slowest_recovery_ms;
    pthread_mutex_unlock(&elastic->lock);
    td__elastic_tell(elastic,
                     (td_elastic_event){.kind = TD_ELASTIC_RECOVERED, .rank = -1, .ms = ms});
}

td_status td__elastic_regroup(td_elastic *elastic)
{
    int before_size = elastic->size, *before = malloc((size_t)elastic->size * sizeof *before);
    if (!before)
        return td__fail_nomem("td_elastic");
    memcpy(before, elastic->ranks, (size_t)before_size * sizeof *before);
    if (!elastic->ready && elastic->established)
        td__elastic_count(elastic, &elastic->stats.repeated);
    td_status status;
    int known = before_size;
    do {
        status = shrink(elastic);
        if (status)
            break; /* the others have gone on without this rank, or one of them does not answer */
        report_losses(elastic, before, known);
        td__network_note(elastic, before, known);
        memcpy(before, elastic->ranks, (size_t)elastic->size * sizeof *before);
        known = elastic->size;
        td__elastic_at("shrunk", elastic);
        status = td__elastic_enter(elastic);
    } while (td__elastic_is_loss(status) && status != TD_ERR_TIMEOUT && !elastic->hopeless);
    free(before);
    TD_TRY(status);
    note_recovery(elastic);
    return td__elastic_committed(elastic) >= elastic->steps ? TD_OK
                                                            : check_enough(elastic, before_size);
}
