/* Ranks that stand still, and whose process lives: stopped, cut off, or computing without end.
 *
 * A thread of each rank looks at the others while td_elastic_run() runs (that of the first rank also for newcomers):
 *
 *     heartbeat       it queries the next rank of the ring. The endpoint of a process answers whatever its program does; one that
 *                     does not answer for heartbeat_ms is excluded. If several stand still, the next one's turn comes when
 *                     the group is one smaller.
 *     step timeout    where a step has taken too long, it queries all others for the number of collectives that they have begun.
 *                     Those with the fewest are excluded, if that is fewer than this rank's, which waits then: others may wait
 *                     in an earlier call than it. So nobody is if one does not answer, which may be the one that they wait
 *                     for: it is silent, or has ended or been excluded, and the step is about to fail. In td_group_shrink(),
 *                     those that have not called it are. Groups of some of the ranks count, too, or those that wait there for
 *                     one which does not come would have as few.
 *
 * Time in which this thread did not run does not count, or a job that is suspended and goes on would take itself to pieces. */
#include "base/fail.h"
#include "elastic/elastic_internal.h"
#include "fault/peer_query.h"
#include "group/process_group.h"
#include "peer/endpoint.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    HEARTBEAT_MS = 10000,
    STEP_FLOOR_MS = 2000,
    FIRST_STEPS_MS = 300000, /* until there is a median */
    STEP_FACTOR = 10,
    LOOK_MS = 200,
    TIMES = 32,
    LEAST_TIMES = 8,
    LEAST_TICK_MS = 10,
    MOST_TICK_MS = 250,
    CATCH_UP_FACTOR = 4, /* a step in which newcomers get the state, or it is divided anew */
};

struct td__elastic_watch {
    td_elastic *elastic;
    pthread_t thread;
    bool running, stopping;
    pthread_mutex_t lock; /* guards what follows; leaf */
    pthread_cond_t changed;

    /* What the training's thread does. */
    int *ranks, size, self;
    uint64_t all_key, active_key; /* of the groups */
    uint64_t (*part_keys)[TD__ELASTIC_PARTS];
    uint32_t attempt;             /* of td_group_shrink() */
    struct td__root *root;
    bool in_shrink;
    int64_t number;  /* of what it does now: a step, a shrink; another one begins the count anew */
    double patience; /* by how much the limit is longer */
    double times[TIMES]; /* of the last steps, in ms */
    int64_t time_count;

    /* The watching thread's own. */
    int64_t known_number, waited_ms, silent_ms, last_ns;
    int silent_rank;
    int64_t looked_ms; /* since it looked for newcomers */
    int64_t tick_ms;
};

/* ---- Limits ---------------------------------------------------------------------------------------------------- */

static int compare_times(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* With the lock held. 0: none. */
static int64_t step_limit(const struct td__elastic_watch *watch)
{
    int64_t given = watch->elastic->options.step_timeout_ms;
    double times[TIMES];
    int count = watch->time_count < TIMES ? (int)watch->time_count : TIMES;
    if (given)
        return given < 0 ? 0 : (int64_t)((double)given * watch->patience);
    if (count < LEAST_TIMES)
        return FIRST_STEPS_MS;
    memcpy(times, watch->times, (size_t)count * sizeof *times);
    qsort(times, (size_t)count, sizeof *times, compare_times);
    double limit = STEP_FACTOR * times[count / 2];
    return (int64_t)((limit > STEP_FLOOR_MS ? limit : STEP_FLOOR_MS) * watch->patience);
}

static int64_t heartbeat(const struct td__elastic_watch *watch)
{
    int64_t given = watch->elastic->options.heartbeat_ms;
    return given ? (given < 0 ? 0 : given) : HEARTBEAT_MS;
}

/* ---- Queries ----------------------------------------------------------------------------------------------------- */

/* A copy of what the training's thread does. */
struct view {
    int ranks[TD__ELASTIC_MOST_SLICES], size, self;
    uint64_t all_key, active_key, part_keys[TD__ELASTIC_MOST_SLICES][TD__ELASTIC_PARTS];
    uint32_t attempt;
    struct td__root *root;
    bool in_shrink;
    int64_t number, limit_ms;
};

static void look(struct td__elastic_watch *watch, struct view *view)
{
    view->size = watch->size < TD__ELASTIC_MOST_SLICES ? watch->size : TD__ELASTIC_MOST_SLICES;
    memcpy(view->ranks, watch->ranks, (size_t)view->size * sizeof *view->ranks);
    memcpy(view->part_keys, watch->part_keys, (size_t)view->size * sizeof *view->part_keys);
    view->self = watch->self;
    view->all_key = watch->all_key;
    view->active_key = watch->active_key;
    view->attempt = watch->attempt;
    view->root = watch->root;
    view->in_shrink = watch->in_shrink;
    view->number = watch->number;
    view->limit_ms = step_limit(watch);
}

static bool ask(const struct view *view, int index, uint32_t topic, uint64_t key, uint64_t value,
                int64_t ms, uint64_t *answer, bool is_byte)
{
    struct td__buffer bytes = {0};
    bool answered = !td__endpoint_query(view->root->endpoint, view->ranks[index], topic, key, value,
                                        td__deadline_in_ms(ms), &bytes);
    struct td__reader reader = td__reader_of(bytes.data, bytes.size);
    *answer = is_byte ? td__reader_u8(&reader) : td__reader_u64(&reader);
    answered &= !reader.failed;
    td__buffer_free(&bytes);
    return answered;
}

static void exclude(const struct view *view, int index, const char *reason)
{
    struct td__error error;
    td__error_save(&error);
    td_log(TD_LOG_WARN, "td_elastic: excludes rank %d: it %s", view->ranks[index], reason);
    if (td_group_exclude(NULL, view->ranks[index], reason))
        td_log(TD_LOG_WARN, "td_elastic: %s", td__error_text());
    td__error_undo(&error);
}

static bool is_present(const struct view *view, int index)
{
    return td__endpoint_presence(view->root->endpoint, view->ranks[index]) == TD__PRESENT;
}

/* ---- Heartbeats ---------------------------------------------------------------------------------------------------- */

static void beat(struct td__elastic_watch *watch, const struct view *view, int64_t passed_ms)
{
    int next = (view->self + 1) % view->size;
    int64_t limit = heartbeat(watch);
    uint64_t ignored;
    while (next != view->self && !is_present(view, next))
        next = (next + 1) % view->size;
    if (!limit || next == view->self)
        return;
    bool same = watch->silent_rank == view->ranks[next];
    watch->silent_ms = same ? watch->silent_ms + passed_ms : 0;
    watch->silent_rank = view->ranks[next];
    if (ask(view, next, TD__TOPIC_PROGRESS, view->all_key, 0, watch->tick_ms, &ignored, false)) {
        watch->silent_ms = 0;
    } else if (watch->silent_ms >= limit && is_present(view, next)) {
        char reason[120];
        snprintf(reason, sizeof reason, TD__SILENCE " %.1f s",
                 (double)watch->silent_ms / 1e3);
        watch->silent_ms = 0;
        exclude(view, next, reason);
    }
}

/* ---- Steps that take too long ----------------------------------------------------------------------------------------- */

/* The groups in which a rank calls in a step; 0: none. */
enum { GROUPS = 2 + TD__ELASTIC_PARTS };

static void list_groups(const struct view *view, int index, uint64_t keys[GROUPS])
{
    keys[0] = view->all_key;
    keys[1] = view->active_key == view->all_key ? 0 : view->active_key;
    memcpy(keys + 2, view->part_keys[index], sizeof view->part_keys[index]);
}

/* How many collectives a rank has begun on them. */
static bool progress(const struct view *view, int index, uint64_t *begun)
{
    uint64_t keys[GROUPS], more = 0;
    list_groups(view, index, keys);
    *begun = 0;
    for (int i = 0; i < GROUPS; i++, *begun += more, more = 0)
        if (keys[i] &&
            !ask(view, index, TD__TOPIC_PROGRESS, keys[i], 0, MOST_TICK_MS, &more, false))
            return false;
    return true;
}

static uint64_t own_progress(const struct view *view)
{
    uint64_t keys[GROUPS], begun = 0;
    list_groups(view, view->self, keys);
    for (int i = 0; i < GROUPS; i++) {
        struct td__flight_last last = {0};
        if (keys[i])
            td__recorder_last(view->root, keys[i], &last);
        begun += last.started;
    }
    return begun;
}

/* 0: it is the one that the others wait for, if no other has less. */
static bool measure(const struct view *view, int index, uint64_t *begun)
{
    if (view->in_shrink)
        return ask(view, index, TD__TOPIC_SHRINK, view->all_key, (uint64_t)view->attempt << 32,
                   MOST_TICK_MS, begun, true);
    return progress(view, index, begun);
}

static void find_late(const struct view *view, int64_t waited_ms)
{
    uint64_t least = view->in_shrink ? 1 : own_progress(view);
    uint64_t *begun = malloc((size_t)view->size * sizeof *begun);
    bool late = false, all_answer = true;
    for (int i = 0; i < view->size && begun; i++) {
        uint64_t count = UINT64_MAX;
        begun[i] = UINT64_MAX;
        if (i == view->self)
            continue;
        if (!is_present(view, i) || !measure(view, i, &count)) {
            all_answer = false;
            continue;
        }
        begun[i] = count;
        late |= count < least;
        least = count < least ? count : least;
    }
    char reason[160];
    snprintf(reason, sizeof reason,
             view->in_shrink ? "has not noticed the end of another rank for %.1f s"
                             : "is late: the others have waited for %.1f s in a step",
             (double)waited_ms / 1e3);
    late &= view->in_shrink || all_answer;
    for (int i = 0; i < view->size && late; i++)
        if (begun[i] == least)
            exclude(view, i, reason);
    free(begun);
}

static void check_step(struct td__elastic_watch *watch, const struct view *view, int64_t passed_ms)
{
    if (view->number != watch->known_number) {
        watch->known_number = view->number;
        watch->waited_ms = 0;
        return;
    }
    watch->waited_ms += passed_ms;
    if (!view->limit_ms || watch->waited_ms < view->limit_ms)
        return;
    find_late(view, watch->waited_ms);
    watch->waited_ms = view->limit_ms / 2; /* asked again after a while */
}

/* ---- Newcomers --------------------------------------------------------------------------------------------------------- */

/* The first rank looks into the store, where a process that asks to be admitted is counted. */
static void look_for_newcomers(struct td__elastic_watch *watch, const struct view *view,
                               int64_t passed_ms)
{
    int count = 0;
    watch->looked_ms += passed_ms;
    if (!watch->elastic->admits || view->self != 0 || watch->looked_ms < LOOK_MS)
        return;
    watch->looked_ms = 0;
    struct td__error error;
    td__error_save(&error);
    if (td_group_waiting(NULL, &count) == TD_OK && count > 0)
        atomic_store(&watch->elastic->newcomers_wait, true);
    td__error_undo(&error);
}

/* ---- The thread ---------------------------------------------------------------------------------------------------- */

static int64_t choose_tick(const struct td__elastic_watch *watch)
{
    int64_t beat_ms = heartbeat(watch), step_ms = watch->elastic->options.step_timeout_ms;
    int64_t tick = MOST_TICK_MS;
    if (beat_ms && beat_ms / 8 < tick)
        tick = beat_ms / 8;
    if (step_ms > 0 && step_ms / 8 < tick)
        tick = step_ms / 8;
    return tick < LEAST_TICK_MS ? LEAST_TICK_MS : tick;
}

/* False when the thread is to end. With the lock held. */
static bool pause_tick(struct td__elastic_watch *watch)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    int64_t ns = until.tv_nsec + watch->tick_ms * 1000000;
    until.tv_sec += ns / 1000000000;
    until.tv_nsec = ns % 1000000000;
    int woken = 0;
    while (!watch->stopping && woken != ETIMEDOUT)
        woken = pthread_cond_timedwait(&watch->changed, &watch->lock, &until);
    return !watch->stopping;
}

static void *watch_others(void *arg)
{
    struct td__elastic_watch *watch = arg;
    struct view *view = malloc(sizeof *view);
    watch->last_ns = td__now_ns();
    pthread_mutex_lock(&watch->lock);
    while (view && pause_tick(watch)) {
        look(watch, view);
        pthread_mutex_unlock(&watch->lock);
        int64_t now = td__now_ns(), passed = (now - watch->last_ns) / 1000000;
        int64_t most = 4 * watch->tick_ms;
        passed = passed < most ? passed : most;
        watch->last_ns = now;
        look_for_newcomers(watch, view, passed);
        if (view->size > 1) {
            beat(watch, view, passed);
            check_step(watch, view, passed);
        }
        pthread_mutex_lock(&watch->lock);
    }
    pthread_mutex_unlock(&watch->lock);
    free(view);
    return NULL;
}

/* ---- What the training's thread says ----------------------------------------------------------------------------------- */

void td__watch_now(td_elastic *elastic, bool in_shrink)
{
    struct td__elastic_watch *watch = elastic->watch;
    if (!watch)
        return;
    pthread_mutex_lock(&watch->lock);
    size_t size = (size_t)elastic->size;
    int *ranks = realloc(watch->ranks, size * sizeof *ranks);
    watch->ranks = ranks ? ranks : watch->ranks;
    uint64_t(*part_keys)[TD__ELASTIC_PARTS] = realloc(watch->part_keys, size * sizeof *part_keys);
    watch->part_keys = part_keys ? part_keys : watch->part_keys;
    if (ranks && part_keys) {
        memcpy(ranks, elastic->ranks, size * sizeof *ranks);
        memcpy(part_keys, elastic->part_keys, size * sizeof *part_keys);
        watch->size = elastic->size;
    }
    watch->self = elastic->rank;
    watch->root = elastic->all->root;
    watch->all_key = elastic->all->key;
    watch->active_key = elastic->active ? elastic->active->key : 0;
    watch->attempt = elastic->all->shrunk;
    watch->in_shrink = in_shrink;
    bool copies = elastic->active_size < elastic->size ||
                  (!elastic->entered && td__elastic_is_divided(elastic));
    watch->patience = copies ? CATCH_UP_FACTOR : 1;
    watch->number++;
    pthread_mutex_unlock(&watch->lock);
}

void td__watch_note_step(td_elastic *elastic, double ms)
{
    struct td__elastic_watch *watch = elastic->watch;
    if (!watch)
        return;
    pthread_mutex_lock(&watch->lock);
    watch->times[watch->time_count++ % TIMES] = ms;
    pthread_mutex_unlock(&watch->lock);
}

td_status td__watch_begin(td_elastic *elastic)
{
    struct td__elastic_watch *watch = elastic->watch;
    if (!watch) {
        pthread_condattr_t monotonic;
        watch = calloc(1, sizeof *watch);
        if (!watch)
            return td__fail_nomem("td_elastic_run");
        watch->elastic = elastic;
        watch->silent_rank = -1;
        watch->tick_ms = choose_tick(watch);
        pthread_mutex_init(&watch->lock, NULL);
        pthread_condattr_init(&monotonic);
        pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
        pthread_cond_init(&watch->changed, &monotonic);
        pthread_condattr_destroy(&monotonic);
        elastic->watch = watch;
    }
    td__watch_now(elastic, false);
    watch->stopping = false;
    if (pthread_create(&watch->thread, NULL, watch_others, watch))
        return td_fail(TD_ERR_SYSTEM, "td_elastic_run: no thread could be started");
    watch->running = true;
    return TD_OK;
}

void td__watch_end(td_elastic *elastic)
{
    struct td__elastic_watch *watch = elastic->watch;
    if (!watch || !watch->running)
        return;
    pthread_mutex_lock(&watch->lock);
    watch->stopping = true;
    pthread_cond_signal(&watch->changed);
    pthread_mutex_unlock(&watch->lock);
    pthread_join(watch->thread, NULL);
    watch->running = false;
}

void td__watch_free(td_elastic *elastic)
{
    struct td__elastic_watch *watch = elastic->watch;
    if (!watch)
        return;
    td__watch_end(elastic);
    pthread_cond_destroy(&watch->changed);
    pthread_mutex_destroy(&watch->lock);
    free(watch->ranks);
    free(watch->part_keys);
    free(watch);
    elastic->watch = NULL;
}
