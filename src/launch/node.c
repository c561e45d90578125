/* Agreement among the launchers; see node.h.
 *
 * Keys in the store, all below "\1launch/", for the nodes r of the job and the attempts k (an attempt is
 * one start of all workers, the first or after a failure):
 *
 *     node/<r>        the introduction of node r; when all exist, the job can begin
 *     <k>/failures    what failed in attempt k, in the order of arrival: the first one counts
 *     <k>/done/<r>    node r has succeeded, or a worker has failed (then all of them are set)
 *     <k>/gone/<r>    node r has no worker left
 *     over            why the job cannot go on; each launcher's will sets it as well
 *
 * With --keep-going failures are not published, there is only attempt 0, and the will sets gone/<r> once
 * the job has begun: a launcher that dies takes its own workers with it, and no others. The job ends with
 * node 0, which has the store.
 *
 * The talker waits for all <r> of one kind after another: node, 0/done, 0/gone, 1/done, … The
 * watcher waits for `over` only. The agent's thread never waits: it sets and appends, which the
 * store sends off without an answer. An empty value says nothing but "wake up": it ends a thread's
 * wait when this launcher leaves. */
#include "launch/node.h"

#include "base/fail.h"
#include "base/thread.h"
#include "launch/arrival.h"
#include "store/store_ops.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { CLOSE_MS = 3000 };

struct event_entry {
    struct event_entry *next;
    struct td__node_event event;
};

struct td__node {
    const struct td__run_options *options;
    const struct td__job_secret *secret;
    void (*notify)(void *arg);
    void *arg;
    td_store *store;
    struct td__node_world world; /* the talker's, until TD__NODE_READY */
    pthread_t talker, watcher;

    pthread_mutex_t lock; /* protects all below; no other lock is taken under it */
    pthread_cond_t thread_ended;
    struct event_entry *events;
    bool open;                    /* the store is */
    bool has_watcher;             /* it was started … */
    bool talking, watching;       /* … and the threads run */
    bool closing;                 /* the talker should not begin another wait … */
    char waits_for[TD__KEY_ROOM]; /* … and this is the one that it is in, "" for none */
};

/* ---- Events ---------------------------------------------------------------------------------- */

static void post(struct td__node *node, enum td__node_event_kind kind, int code, const char *text)
{
    struct event_entry *entry = calloc(1, sizeof *entry);
    if (!entry)
        abort(); /* a lost event would be a hang; the supervisor cleans up */
    entry->event.kind = kind;
    entry->event.code = code;
    snprintf(entry->event.text, sizeof entry->event.text, "%s", text);
    pthread_mutex_lock(&node->lock);
    struct event_entry **end = &node->events;
    while (*end)
        end = &(*end)->next;
    *end = entry;
    pthread_mutex_unlock(&node->lock);
    node->notify(node->arg);
}

bool td__node_next(struct td__node *node, struct td__node_event *event)
{
    pthread_mutex_lock(&node->lock);
    struct event_entry *entry = node->events;
    if (entry)
        node->events = entry->next;
    pthread_mutex_unlock(&node->lock);
    if (!entry)
        return false;
    *event = entry->event;
    free(entry);
    return true;
}

/* ---- Waiting for all nodes -------------------------------------------------------------------- */

static const char *attempt_prefix(char prefix[TD__KEY_ROOM], int attempt, const char *kind)
{
    snprintf(prefix, TD__KEY_ROOM, TD__KEY "%d/%s/", attempt, kind);
    return prefix;
}

/* Enters or leaves a wait for `prefix`; false when this launcher is about to leave. */
static bool note_wait(struct td__node *node, const char *prefix)
{
    pthread_mutex_lock(&node->lock);
    bool go_on = !node->closing;
    snprintf(node->waits_for, sizeof node->waits_for, "%s", go_on ? prefix : "");
    pthread_mutex_unlock(&node->lock);
    return go_on;
}

/* The talker waits until all nodes have set their key: *values receives theirs, or stays NULL when
 * it was woken up because this launcher leaves. */
static td_status await_all(struct td__node *node, const char *prefix, int64_t timeout_ms,
                           td_bytes **values)
{
    *values = NULL;
    if (!note_wait(node, prefix))
        return TD_OK;
    td_status status = td__gather_wait(node->store, prefix, node->options->nnodes, timeout_ms,
                                       values);
    note_wait(node, "");
    return status;
}

/* ---- Joining --------------------------------------------------------------------------------- */

static void *watch(void *arg);

static td_status begin_watching(struct td__node *node)
{
    pthread_mutex_lock(&node->lock);
    int error = td__thread_start(&node->watcher, "td-watch", watch, node);
    node->has_watcher = node->watching = !error;
    pthread_mutex_unlock(&node->lock);
    return error ? td_fail(TD_ERR_SYSTEM, "cannot start a thread: %s", td__errno_text(error))
                 : TD_OK;
}

/* Joins the other nodes. TD_OK with *begun false: the job is over, and the watcher says why. */
static td_status join_job(struct td__node *node, bool *begun)
{
    int64_t join_ms = (int64_t)(node->options->join_timeout_s * 1000);
    bool tell_all = false;
    td_bytes *values;
    td_status status = td__arrival_claim(node->store, node->options, &node->world.node_rank,
                                         &tell_all);
    if (tell_all)
        td__node_end_job(node, 1, td__error_text());
    if (status)
        return status;
    TD_TRY(td__arrival_introduce(node->store, node->options, node->world.node_rank));
    TD_TRY(begin_watching(node));
    status = await_all(node, TD__KEY_NODE, join_ms > 0 ? join_ms : 1, &values);
    if (status == TD_ERR_TIMEOUT)
        status = td__arrival_missing(node->store, node->options);
    if (!status && values)
        status = td__arrival_survey(values, node->options, &node->world);
    *begun = values != NULL;
    td__gather_free(values, node->options->nnodes);
    if (!status && *begun && node->options->keep_going)
        status = td__arrival_change_will(node->store, node->options, node->world.node_rank);
    if (status == TD_ERR_TIMEOUT || status == TD_ERR_MISMATCH)
        td__node_end_job(node, 1, td__error_text());
    return status;
}

static td_status arrive(struct td__node *node, bool *begun)
{
    TD_TRY(td__job_store_open(node->options, node->secret, &node->world.node_rank, &node->store));
    node->world.port = td_tcp_store_port(node->store);
    pthread_mutex_lock(&node->lock);
    node->open = true;
    pthread_mutex_unlock(&node->lock);
    if (node->options->nnodes > 1)
        return join_job(node, begun);
    node->world.size = node->world.role_size = node->options->nproc;
    *begun = true;
    return TD_OK;
}

/* ---- The threads ------------------------------------------------------------------------------ */

/* Looks for the first failure of the attempt, and posts it when it was on another node. */
static td_status find_failure(struct td__node *node, int attempt, bool *failed)
{
    char key[TD__KEY_ROOM];
    const char *keys[] = {key};
    td_bytes value;
    struct td__notice notice;
    snprintf(key, sizeof key, TD__KEY "%d/failures", attempt);
    TD_TRY(td_store_check(node->store, keys, 1, failed));
    if (!*failed)
        return TD_OK;
    TD_TRY(td_store_get(node->store, key, 0, &value));
    if (td__notice_read(&value, &notice) && notice.node != node->world.node_rank)
        post(node, TD__NODE_FAILED, notice.code, notice.text);
    td_bytes_free(&value);
    return TD_OK;
}

/* Waits until all nodes have set their key of this kind; false when the job ends first. Posts which launchers
 * have died: with --keep-going their will has set it. */
static bool await_kind(struct td__node *node, int attempt, const char *kind)
{
    char prefix[TD__KEY_ROOM];
    td_bytes *values;
    struct td__notice notice;
    if (await_all(node, attempt_prefix(prefix, attempt, kind), INT64_MAX, &values) || !values)
        return false;
    for (int r = 0; r < node->options->nnodes; r++)
        if (values[r].size > 1 && td__notice_read(&values[r], &notice))
            post(node, TD__NODE_LOST, notice.code, notice.text);
    td__gather_free(values, node->options->nnodes);
    return true;
}

/* Follows one attempt; false when it was the last. The watcher reports a connection that is lost. */
static bool follow_attempt(struct td__node *node, int attempt)
{
    bool failed = false;
    if (!node->options->keep_going &&
        (!await_kind(node, attempt, "done") || find_failure(node, attempt, &failed)))
        return false;
    if (!await_kind(node, attempt, "gone"))
        return false;
    post(node, TD__NODE_ALL_GONE, 0, "");
    return failed && attempt < node->options->max_restarts;
}

static void end_thread(struct td__node *node, bool *running)
{
    pthread_mutex_lock(&node->lock);
    *running = false;
    pthread_cond_signal(&node->thread_ended);
    pthread_mutex_unlock(&node->lock);
}

static void *talk(void *arg)
{
    struct td__node *node = arg;
    bool begun = false;
    td_status status = arrive(node, &begun);
    if (status)
        post(node, TD__NODE_OVER, 1, td__error_text());
    else if (begun)
        post(node, TD__NODE_READY, 0, "");
    bool others = !status && begun && node->options->nnodes > 1;
    for (int attempt = 0; others; attempt++)
        others = follow_attempt(node, attempt);
    end_thread(node, &node->talking);
    return NULL;
}

static void *watch(void *arg)
{
    struct td__node *node = arg;
    td_bytes value = {0};
    struct td__notice notice;
    td_status status = td_store_get(node->store, TD__KEY_OVER, INT64_MAX, &value);
    if (status == TD_ERR_SYSTEM) {
        post(node, TD__NODE_OVER, 1, td__error_text());
    } else if (status) {
        char text[512];
        snprintf(text, sizeof text,
                 "the launcher of node 0 (at %s, port %d) has ended, or cannot be reached any more",
                 node->options->host, node->world.port);
        post(node, TD__NODE_OVER, 1, text);
    } else if (value.size && td__notice_read(&value, &notice)) {
        post(node, TD__NODE_OVER, notice.code, notice.text);
    }
    td_bytes_free(&value);
    end_thread(node, &node->watching);
    return NULL;
}

/* ---- The agent's side -------------------------------------------------------------------------- */

td_status td__node_start(const struct td__run_options *options, const struct td__job_secret *secret,
                         void (*notify)(void *), void *arg, struct td__node **node_out)
{
    struct td__node *node = calloc(1, sizeof *node);
    if (!node)
        return td__fail_nomem("launcher");
    *node = (struct td__node){
        .options = options, .secret = secret, .notify = notify, .arg = arg, .talking = true};
    pthread_mutex_init(&node->lock, NULL);
    td__cond_init(&node->thread_ended);
    int error = td__thread_start(&node->talker, "td-talk", talk, node);
    if (error) {
        pthread_cond_destroy(&node->thread_ended);
        pthread_mutex_destroy(&node->lock);
        free(node);
        return td_fail(TD_ERR_SYSTEM, "cannot start a thread: %s", td__errno_text(error));
    }
    *node_out = node;
    return TD_OK;
}

const struct td__node_world *td__node_world(const struct td__node *node)
{
    return &node->world;
}

void td__node_failed(struct td__node *node, int attempt, int code, const char *text)
{
    char key[TD__KEY_ROOM];
    struct td__buffer notice = {0};
    if (node->options->nnodes == 1)
        return;
    td__notice_put(&notice, node->world.node_rank, code, text);
    snprintf(key, sizeof key, TD__KEY "%d/failures", attempt);
    td_store_append(node->store, key, notice.data, notice.size);
    td__buffer_free(&notice);
    td__gather_set(node->store, attempt_prefix(key, attempt, "done"), node->options->nnodes, "1");
}

void td__node_gone(struct td__node *node, int attempt)
{
    char turn[TD__KEY_ROOM], gone[TD__KEY_ROOM];
    if (node->options->nnodes == 1) {
        post(node, TD__NODE_ALL_GONE, 0, "");
        return;
    }
    snprintf(turn, sizeof turn, TD__KEY "%d/done/%d", attempt, node->world.node_rank);
    snprintf(gone, sizeof gone, TD__KEY "%d/gone/%d", attempt, node->world.node_rank);
    td_store_multi_set(node->store, (const char *const[]){turn, gone},
                       (td_bytes[]){{"1", 1}, {"1", 1}}, 2);
}

void td__node_end_job(struct td__node *node, int code, const char *text)
{
    struct td__buffer notice = {0};
    pthread_mutex_lock(&node->lock);
    bool open = node->open;
    pthread_mutex_unlock(&node->lock);
    if (!open || node->options->nnodes == 1)
        return;
    td__notice_put(&notice, -1, code, text); /* the node does not matter any more */
    /* The will says the same from now on, so that leaving in a hurry does not look like a death. */
    td__tcp_store_set_will(node->store, TD__KEY_OVER, notice.data, notice.size);
    td_store_set(node->store, TD__KEY_OVER, notice.data, notice.size);
    td__buffer_free(&notice);
}

/* Only where the key does not exist yet: the first reason must reach launchers that join later, too. */
static void wake_watcher(struct td__node *node)
{
    td_bytes value;
    if (!td_store_compare_set(node->store, TD__KEY_OVER, "", 0, "", 0, &value))
        td_bytes_free(&value);
}

/* Ends the threads; false when one of them still waits for the network. */
static bool end_threads(struct td__node *node)
{
    char waits_for[TD__KEY_ROOM];
    pthread_mutex_lock(&node->lock);
    node->closing = true;
    bool open = node->open, watching = node->watching;
    snprintf(waits_for, sizeof waits_for, "%s", node->waits_for);
    pthread_mutex_unlock(&node->lock);
    if (open)
        td_store_set_timeout(node->store, CLOSE_MS);
    if (watching)
        wake_watcher(node);
    if (*waits_for)
        td__gather_set(node->store, waits_for, node->options->nnodes, "");

    td__deadline deadline = td__deadline_in_ms(open ? CLOSE_MS : 0);
    pthread_mutex_lock(&node->lock);
    while ((node->talking || node->watching) &&
           td__cond_wait(&node->thread_ended, &node->lock, deadline))
        ;
    bool ended = !node->talking && !node->watching;
    if (!ended) { /* they end with the process */
        pthread_detach(node->talker);
        if (node->has_watcher)
            pthread_detach(node->watcher);
    }
    pthread_mutex_unlock(&node->lock);
    return ended;
}

bool td__node_close(struct td__node *node)
{
    if (!end_threads(node))
        return false;
    pthread_join(node->talker, NULL);
    if (node->has_watcher)
        pthread_join(node->watcher, NULL);
    if (node->store)
        td_store_close(node->store);
    for (struct td__node_event event; td__node_next(node, &event);)
        ;
    pthread_cond_destroy(&node->thread_ended);
    pthread_mutex_destroy(&node->lock);
    free(node);
    return true;
}
