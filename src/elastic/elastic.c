/* Training that goes on when ranks die or join.
 *
 *     rank 0    slices 0 1 2 ┐              ┌─ agreement ─┬─ commit s ── slices …
 *     rank 1    slices 3 4   ├─ reductions ─┤             ├─ commit s ── slices …
 *     rank 2    slices 5 6 7 ┘              └─────────────┴─ commit s ── slices …
 *                state: that before step s                  │ state: that after step s
 *
 * Slices make the gradients of a step the same bits whoever computes them (docs/slices.md). While a step is computed nothing
 * of the state changes: parameters, buffers, optimizer, schedule, and the position in the data are those before it. What it
 * yields, its outcome, are the reduced gradients, and the buffers for after it. Each rank has the whole outcome, and says so in
 * the agreement (elastic_agreement.c), an all_gather that nobody leaves before all have entered. Then each applies the same
 * deterministic update to its own state: that is the commit. It sends nothing, so no other rank can make it fail.
 *
 * A rank that dies breaks the groups of the others, whose calls fail. They shrink the group, and compare how many steps they
 * have committed (elastic_members.c). These numbers differ by one at most, since the next agreement needs every rank:
 *
 *     before the agreement was complete anywhere    nobody has committed: the step is repeated, by other ranks. Random numbers go
 *                                                   by slice, the buffers are set back: it yields the same bits
 *     it was complete on some of the ranks          these have committed. That they have proves that each of the others has the
 *                                                   whole outcome: those roll forward, and commit, too
 *     every survivor has the outcome                only the agreement is repeated
 *
 * So the state before a step costs no copy, and no step is lost or made twice. What follows from a failure in the middle of any
 * of this, a second one included, is the same again.
 *
 * Newcomers are members of the group of all ranks, but not of the one whose ranks compute; they get the state while the others
 * compute the step, and then its outcome (elastic_catch_up.c). From the agreement on they are like everyone.
 *
 * At the end of td_elastic_run() all ranks wait for each other: a rank that left before could take the proof of the last
 * commit with it where more ranks are needed than are left.
 *
 * What holds: a rank that is in the agreement of a step has its outcome; `committed` of two ranks differs by one at most; the
 * state is that of `committed` steps whenever no commit is under way; no thread but that of td__catch_up_begin() reads the
 * state of another moment. */
#include "base/fail.h"
#include "base/option_rules.h"
#include "elastic/elastic_internal.h"
#include "group/process_group.h"
#include "group/root.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

td_status (*td__elastic_probe)(const char *moment, td_elastic *elastic);

void td__elastic_tell(td_elastic *elastic, td_elastic_event event)
{
    if (!elastic->options.on_event)
        return;
    event.step = td__elastic_committed(elastic);
    event.ranks = elastic->size;
    event.text = event.text ? event.text : "";
    elastic->options.on_event(&event, elastic->options.event_arg);
}

/* ---- Running ----------------------------------------------------------------------------------------------------- */

/* All have committed what was to be committed. A rank that fails here was left alone by ranks that had passed: it is done. */
static td_status part(td_elastic *elastic)
{
    if (elastic->saved != td__elastic_committed(elastic))
        TD_TRY(td__elastic_save(elastic));
    if (elastic->replica->ops->kept)
        TD_TRY(elastic->replica->ops->kept(elastic->replica));
    TD_TRY(td_group_barrier(elastic->all, NULL));
    return td__elastic_settle(elastic);
}

static bool is_over(const td_elastic *elastic, int64_t steps)
{
    return td__elastic_committed(elastic) >= steps || atomic_load(&elastic->stopped);
}

/* One more thing that all ranks do. */
static td_status advance(td_elastic *elastic, int64_t steps, bool *begun, bool *done)
{
    td__watch_now(elastic, false);
    if (!elastic->entered)
        return td__elastic_enter(elastic);
    if (atomic_load(&elastic->leaves)) { /* the others find it gone, and go on from its copies */
        *done = true;
        return elastic->replica->ops->kept ? elastic->replica->ops->kept(elastic->replica) : TD_OK;
    }
    if (!is_over(elastic, steps)) {
        *begun = true;
        if (elastic->checkpoint_due)
            TD_TRY(td__elastic_save(elastic));
        if (elastic->admit_due)
            return td__elastic_admit(elastic);
        return td__elastic_attempt(elastic);
    }
    if (*begun)
        TD_TRY(part(elastic));
    else
        TD_TRY(td__group_state(elastic->all)); /* a rank has died between two calls */
    *done = true;
    return TD_OK;
}

static td_status run(td_elastic *elastic, int64_t steps)
{
    bool begun = false, done = false;
    td_status status = TD_OK;
    while (!status && !done) {
        status = advance(elastic, steps, &begun, &done);
        if (!td__elastic_is_loss(status) || elastic->hopeless)
            continue;
        td_log(TD_LOG_INFO, "td_elastic: %s", td__error_text());
        elastic->failed_ns = elastic->failed_ns ? elastic->failed_ns : td__now_ns();
        status = td__elastic_regroup(elastic);
    }
    return status;
}

static void leave_groups(td_elastic *elastic)
{
    if (elastic->replica && elastic->replica->ops->end_copies)
        elastic->replica->ops->end_copies(elastic->replica);
    td__elastic_leave_groups(elastic);
}

/* Why this rank gives up is not changed by what follows. */
static void give_up(td_elastic *elastic, td_status status)
{
    struct td__error error;
    td__error_save(&error);
    td__catch_up_end(elastic);
    /* Too few ranks are left, and they have the state: it is not lost. */
    if (status == TD_ERR_PEER && elastic->established && elastic->entered &&
        !td__group_state(elastic->all))
        td__elastic_save(elastic);
    if (elastic->replica && !elastic->ready)
        elastic->replica->ops->undo(elastic->replica);
    elastic->gave_up = true;
    leave_groups(elastic);
    td_destroy_process_group();
    td__error_restore(&error);
}

td_status td_elastic_run(td_elastic *elastic, int64_t steps, td_elastic_slice_fn slice_fn,
                         void *arg)
{
    if (!elastic || !slice_fn)
        return td__fail_null(__func__);
    if (elastic->gave_up)
        return td_fail(TD_ERR_STATE, "td_elastic_run: this rank has left the training");
    elastic->slice_fn = slice_fn;
    elastic->slice_arg = arg;
    elastic->steps = steps;
    td_status status = td__watch_begin(elastic);
    if (!status)
        status = run(elastic, steps);
    td__watch_end(elastic);
    if (status)
        give_up(elastic, status);
    return status;
}

/* ---- Making one -------------------------------------------------------------------------------------------------- */

static int power_above(int number)
{
    int power = 1;
    while (power < number)
        power *= 2;
    return power;
}

static int default_slices(const td_elastic_options *options)
{
    const char *text = getenv("WORLD_SIZE");
    int size = td_get_world_size(options->group), given = text ? atoi(text) : 0;
    int most = size > given ? size : given;
    return power_above(most < TD__ELASTIC_MOST_SLICES ? most : TD__ELASTIC_MOST_SLICES);
}

static td_status check_numbers(const td_elastic_options *options)
{
    static const char call[] = "td_elastic_create";
    int slices = options->slices;
    if (slices < 0 || slices > TD__ELASTIC_MOST_SLICES || (slices & (slices - 1)))
        return td_fail(TD_ERR_INVALID,
                       "%s: the number of slices is %d; it is a power of two, up to %d", call,
                       slices, TD__ELASTIC_MOST_SLICES);
    if (options->dataset ? options->slice_size < 1 : options->slice_size != 0)
        return td_fail(
            TD_ERR_INVALID, "%s: slice_size is %" PRId64 " %s", call, options->slice_size,
            options->dataset ? "; a slice has one sample at least" : "without a dataset");
    if (options->min_ranks < 0 || options->checkpoint_every < 0 || options->checkpoint_keep < 0 ||
        options->check_every < 0 || options->workers < 0 || options->clip_norm < 0)
        return td_fail(TD_ERR_INVALID,
                       "%s: min_ranks, checkpoint_every, checkpoint_keep, check_every, workers and "
                       "clip_norm must not be negative",
                       call);
    if (options->checkpoint_every && !options->checkpoint)
        return td_fail(TD_ERR_INVALID, "%s: checkpoint_every is set, and `checkpoint` is not",
                       call);
    return TD_OK;
}

static td_status check_options(const td_elastic_options *options)
{
    static const char call[] = "td_elastic_create";
    const td_training *training = &options->training;
    TD_TRY(td__check_reserved_of(call, options->reserved, 8));
    TD_TRY(td__check_reserved(call, training->reserved));
    if (!training->model == !options->memory)
        return td_fail(TD_ERR_INVALID,
                       "%s: either training.model or `memory` is what is trained, and one of them "
                       "must be set",
                       call);
    if (options->fsdp && options->memory)
        return td_fail(TD_ERR_INVALID, "%s: `fsdp` is for a module, not for plain memory", call);
    if (training->sampler || training->epoch || training->step)
        return td_fail(TD_ERR_INVALID,
                       "%s: training.sampler, epoch and step must be 0: the step decides on the "
                       "samples, and a checkpoint on the step",
                       call);
    if (training->model && !training->optimizer && !options->update)
        return td_fail(TD_ERR_INVALID,
                       "%s: neither training.optimizer nor `update` is set, so that no step would "
                       "change anything",
                       call);
    TD_TRY(check_numbers(options));
    const td_group *world = td__world(), *group = options->group;
    if (td_get_world_size(options->group) < 1)
        return td_fail(TD_ERR_STATE,
                       "%s: there is no process group, or this rank is not in it; call "
                       "td_init_process_group() first",
                       call);
    if (!world || (group && group->root != world->root))
        return td_fail(TD_ERR_UNSUPPORTED,
                       "%s: the group is not one of the world of td_init_process_group()", call);
    return TD_OK;
}

/* A group of the training's own, so that its calls do not mix with the program's. */
static td_status make_group(td_elastic *elastic)
{
    td_group *given = elastic->options.group, *all;
    int size = td_get_world_size(given), *ranks = malloc((size_t)size * sizeof *ranks);
    td_status status = ranks ? td_get_process_group_ranks(given, ranks)
                             : td__fail_nomem("td_elastic_create");
    if (!status)
        status = td_new_group(ranks, size, NULL, &all);
    free(ranks);
    TD_TRY(status);
    status = td__elastic_adopt(elastic, all);
    if (status)
        td_group_destroy(all);
    return status;
}

static td_status copy_text(const char **text)
{
    if (!*text)
        return TD_OK;
    *text = strdup(*text);
    return *text ? TD_OK : td__fail_nomem("td_elastic_create");
}

static td_status fill(td_elastic *elastic)
{
    td_elastic_options *options = &elastic->options;
    const char *audit = options->audit, *checkpoint = options->checkpoint;
    options->audit = options->checkpoint = NULL;
    TD_TRY(copy_text(&checkpoint));
    options->checkpoint = checkpoint;
    TD_TRY(td__flip_read(elastic));
    elastic->slices = options->slices ? options->slices : default_slices(options);
    if (options->straggler_factor == 0)
        options->straggler_factor = 2;
    TD_TRY(make_group(elastic));
    elastic->admits = elastic->size == td_get_world_size(NULL);
    if (elastic->admits && elastic->rank == 0)
        TD_TRY(td__root_welcome(elastic->all, true));
    if (audit)
        TD_TRY(td__audit_open(audit, &elastic->audit));
    if (options->dataset)
        TD_TRY(td__samples_make(elastic, &elastic->samples));
    td_status status = options->fsdp             ? td__sharded_replica(elastic, &elastic->replica)
                       : options->training.model ? td__module_replica(elastic, &elastic->replica)
                                                 : td__memory_replica(elastic, &elastic->replica);
    options->memory = NULL; /* the caller's */
    return status;
}

td_elastic *td_elastic_create(const td_elastic_options *options)
{
    if (!options)
        return td__null(__func__);
    td_elastic *elastic = check_options(options) ? NULL : calloc(1, sizeof *elastic);
    if (!elastic) {
        td_status status = td__error_status();
        td_module_destroy(options->training.model);
        if (!status)
            td__fail_nomem(__func__);
        return NULL;
    }
    elastic->options = *options;
    elastic->saved = -1;
    pthread_mutex_init(&elastic->lock, NULL);
    td_dataset_retain(options->dataset);
    if (fill(elastic)) {
        if (!elastic->replica && !elastic->took_model)
            td_module_destroy(options->training.model);
        td_elastic_destroy(elastic);
        return NULL;
    }
    return elastic;
}

void td_elastic_destroy(td_elastic *elastic)
{
    if (!elastic)
        return;
    struct td__error error;
    td__error_save(&error);
    if (elastic->all && elastic->admits && elastic->rank == 0 && !atomic_load(&elastic->leaves))
        td__root_welcome(elastic->all, false);
    if (elastic->all)
        leave_groups(elastic);
    td__watch_free(elastic);
    td__samples_free(elastic->samples);
    if (elastic->replica)
        elastic->replica->ops->free(elastic->replica);
    td__audit_close(elastic->audit);
    td_dataset_release(elastic->options.dataset);
    pthread_mutex_destroy(&elastic->lock);
    free((char *)elastic->options.checkpoint);
    free(elastic->ranks);
    free(elastic->lost_hosts);
    free(elastic->active_ranks);
    free(elastic->paces);
    free(elastic->part_keys);
    free(elastic->losses);
    free(elastic);
    td__error_undo(&error);
}

/* ---- Asking ------------------------------------------------------------------------------------------------------ */

int64_t td_elastic_step(const td_elastic *elastic)
{
    return elastic ? atomic_load(&((td_elastic *)elastic)->settled) : -1;
}

int td_elastic_world(const td_elastic *elastic)
{
    return elastic ? elastic->size : -1;
}

int td_elastic_rank(const td_elastic *elastic)
{
    return elastic ? elastic->rank : -1;
}

td_group *td_elastic_group(const td_elastic *elastic)
{
    return elastic ? elastic->all : NULL;
}

bool td_elastic_stopped(const td_elastic *elastic)
{
    return elastic && (atomic_load(&elastic->stopped) || atomic_load(&elastic->leaves));
}

td_module *td_elastic_model(const td_elastic *elastic)
{
    return elastic ? td__elastic_replica_model(elastic->replica) : NULL;
}

void td_elastic_check(td_elastic *elastic)
{
    if (elastic)
        atomic_store(&elastic->check_wanted, true);
}

td_status td_elastic_get_stats(const td_elastic *elastic, td_elastic_stats *stats)
{
    if (!elastic || !stats)
        return td__fail_null(__func__);
    pthread_mutex_lock((pthread_mutex_t *)&elastic->lock);
    *stats = elastic->stats;
    if (elastic->timed_steps)
        stats->step_ms = (double)elastic->step_total_ns / 1e6 / (double)elastic->timed_steps;
    if (elastic->agreements)
        stats->agreement_ms = (double)elastic->agreement_total_ns / 1e6 /
                              (double)elastic->agreements;
    pthread_mutex_unlock((pthread_mutex_t *)&elastic->lock);
    return TD_OK;
}
