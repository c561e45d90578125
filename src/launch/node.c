/* The launcher's thread that talks to the other launchers, and what the agent calls; see node.h.
 *
 * The thread sleeps in poll(). The agent's thread never waits for it: what it has to say goes through a queue, and what
 * happens comes back as events. */
#include "launch/node_internal.h"
#include "launch/node_store.h"

#include "base/clock.h"
#include "base/fail.h"
#include "base/number.h"
#include "base/thread.h"
#include "os/auth_listener.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum {
    CLOSE_MS = 3000,
    BEATS = 5, /* within the heartbeat's limit */
};

/* ---- Events ---------------------------------------------------------------------------------- */

static struct td__event_entry *new_event(enum td__node_event_kind kind)
{
    struct td__event_entry *entry = calloc(1, sizeof *entry);
    if (!entry)
        abort(); /* a lost event would be a hang; the supervisor cleans up */
    entry->event.kind = kind;
    return entry;
}

static void post(struct td__node *node, struct td__event_entry *entry)
{
    pthread_mutex_lock(&node->lock);
    STAILQ_INSERT_TAIL(&node->events, entry, entry);
    pthread_mutex_unlock(&node->lock);
    node->notify(node->arg);
}

void td__node_post(struct td__node *node, enum td__node_event_kind kind, bool own, int code,
                   const char *text)
{
    struct td__event_entry *entry = new_event(kind);
    entry->event.own = own;
    entry->event.code = code;
    snprintf(entry->event.text, sizeof entry->event.text, "%s", text);
    post(node, entry);
}

void td__node_post_round(struct td__node *node, bool late)
{
    struct td__event_entry *entry = new_event(TD__NODE_ROUND);
    td__roster_world(&node->roster, node->introduction.node.id, &entry->event.world);
    entry->event.world.late = late;
    post(node, entry);
}

void td__node_post_store(struct td__node *node)
{
    struct td__event_entry *entry = new_event(TD__NODE_STORE);
    td__roster_world(&node->roster, node->introduction.node.id, &entry->event.world);
    post(node, entry);
}

void td__node_post_over(struct td__node *node, const char *text)
{
    if (node->over)
        return;
    node->over = true;
    td__node_post(node, TD__NODE_OVER, true, 1, text);
}

bool td__node_next(struct td__node *node, struct td__node_event *event)
{
    pthread_mutex_lock(&node->lock);
    struct td__event_entry *entry = STAILQ_FIRST(&node->events);
    if (entry)
        STAILQ_REMOVE_HEAD(&node->events, entry);
    pthread_mutex_unlock(&node->lock);
    if (!entry)
        return false;
    *event = entry->event;
    free(entry);
    return true;
}

/* ---- Orders of the agent --------------------------------------------------------------------- */

/* The agent's side: the thread passes the message on. */
static void order(struct td__node *node, enum td__node_message kind, int round, int code,
                  const char *text)
{
    struct td__report report = {.round = round, .code = code};
    struct td__buffer body = {0};
    snprintf(report.text, sizeof report.text, "%s", text);
    td__report_put(&body, &report);
    pthread_mutex_lock(&node->lock);
    struct td__buffer *queue = &node->orders.in;
    td__buffer_put_u32(queue, (uint32_t)body.size + 1);
    td__buffer_put_u8(queue, (uint8_t)kind);
    td__buffer_put(queue, body.data, body.size);
    pthread_mutex_unlock(&node->lock);
    td__buffer_free(&body);
    eventfd_write(node->wake, 1);
}

void td__node_tell(struct td__node *node, enum td__node_message kind, const void *body, size_t size)
{
    if (node->lead)
        td__lead_take(node, NULL, kind, (struct td__span){body, size});
    else
        td__node_link_send(&node->up, kind, body, size);
}

/* The node that the agent wants to leave: report->text is its name. False, with an answer, where it cannot. */
static bool find_to_drain(struct td__node *node, struct td__report *report)
{
    const struct td__run_options *options = node->options;
    const struct td__roster *roster = &node->roster;
    const struct td__roster_node *found = NULL;
    char text[512];
    int rank;
    bool number = td__parse_int(report->text, 0, TD__MAX_NODES, &rank), possible = false;
    for (int i = 0; i < roster->count && !found; i++)
        if (number ? roster->at[i].node_rank == rank
                   : !strcmp(roster->at[i].host, report->text) ||
                         !strcmp(roster->at[i].address, report->text))
            found = &roster->at[i];
    if (!found) {
        snprintf(text, sizeof text, "no node of it is %s%.200s", number ? "number " : "on host ",
                 report->text);
    } else if (roster->count == 1) {
        snprintf(text, sizeof text, "it has only this node; end it with a signal");
    } else if (!td__others_go_on(options) && roster->count <= options->min_nodes) {
        snprintf(text, sizeof text,
                 "it needs all of its %d nodes: --nnodes is %d:%d, with --on-failure restart-all",
                 roster->count, options->min_nodes, options->nnodes);
    } else {
        possible = true;
        snprintf(text, sizeof text, "node %d (on %s) is asked to leave", found->node_rank,
                 found->host);
    }
    td__node_post(node, TD__NODE_ANSWER, true, !possible, text);
    report->node = possible ? found->id : -1;
    return possible;
}

/* What a new coordinator has to hear once more is kept. */
static void pass_on(struct td__node *node, enum td__node_message kind, struct td__report *report)
{
    struct td__buffer body = {0};
    if (kind != TD__MESSAGE_DRAIN)
        report->node = node->introduction.node.id;
    else if (!find_to_drain(node, report))
        return;
    if (kind == TD__MESSAGE_GONE)
        node->introduction.round_gone = report->round;
    if (kind == TD__MESSAGE_LEAVE)
        node->leaves = true;
    td__report_put(&body, report);
    td__node_tell(node, kind, body.data, body.size);
    td__buffer_free(&body);
}

static void take_orders(struct td__node *node)
{
    eventfd_t count;
    enum td__node_message kind;
    struct td__span body;
    struct td__report report;
    eventfd_read(node->wake, &count);
    for (;;) {
        pthread_mutex_lock(&node->lock);
        bool any = td__node_link_next(&node->orders, &kind, &body) &&
                   td__report_read(body, &report);
        pthread_mutex_unlock(&node->lock);
        if (!any)
            return;
        pass_on(node, kind, &report);
    }
}

/* ---- Connections ----------------------------------------------------------------------------- */

static void free_peer(struct td__node *node, struct td__node_peer *peer)
{
    TAILQ_REMOVE(&node->peers, peer, entry);
    td__node_link_close(&peer->link);
    td__buffer_free(&peer->joining);
    free(peer);
}

/* What another launcher has sent. Where this one is not the coordinator, a JOIN waits until it is. */
static void hear_peer(struct td__node *node, struct td__node_peer *peer)
{
    enum td__node_message kind;
    struct td__span body;
    td__node_link_receive(&peer->link);
    while (td__node_link_next(&peer->link, &kind, &body)) {
        if (node->lead && !peer->dropped)
            td__lead_take(node, peer, kind, body);
        else if (kind == TD__MESSAGE_JOIN && !peer->joining.size)
            td__buffer_put(&peer->joining, body.data, body.size);
    }
}

static void admit_waiting(struct td__node *node)
{
    struct td__node_peer *peer;
    TAILQ_FOREACH (peer, &node->peers, entry) {
        struct td__buffer joining = peer->joining;
        if (!node->lead || !joining.size || peer->dropped)
            continue;
        peer->joining = (struct td__buffer){0};
        td__lead_take(node, peer, TD__MESSAGE_JOIN,
                      (struct td__span){(const char *)joining.data, joining.size});
        td__buffer_free(&joining);
    }
}

static void hear_peers(struct td__node *node)
{
    struct td__node_peer *peer, *next;
    int64_t now = td__now_ns();
    TAILQ_FOREACH (peer, &node->peers, entry)
        hear_peer(node, peer);
    admit_waiting(node);
    TAILQ_FOREACH (peer, &node->peers, entry) {
        bool silent = now - peer->link.heard_ns >= td__node_silence_ns();
        if (node->lead && peer->id >= 0 && (peer->link.fd < 0 || silent))
            td__lead_lose(node, peer, peer->link.fd >= 0);
    }
    for (peer = TAILQ_FIRST(&node->peers); peer; peer = next) {
        next = TAILQ_NEXT(peer, entry);
        bool waited = peer->dropped && now - peer->dropped_ns > CLOSE_MS * INT64_C(1000000);
        if (peer->link.fd < 0 || waited)
            free_peer(node, peer);
    }
}

static void hear_coordinator(struct td__node *node)
{
    enum td__node_message kind;
    struct td__span body;
    if (node->lead || node->over)
        return;
    td__node_link_receive(&node->up);
    while (!node->over && td__node_link_next(&node->up, &kind, &body))
        td__member_take(node, kind, body);
    if (node->over)
        return;
    bool silent = node->up_limit_ns ? td__deadline_passed(node->up_limit_ns)
                                    : td__now_ns() - node->up.heard_ns >= td__node_silence_ns();
    if (node->up.fd < 0 && node->up_limit_ns)
        td__member_take_over(node); /* the next one, then */
    else if (node->up.fd >= 0 && silent && node->up_limit_ns)
        td__node_post_over(node, "this node has lost the coordinator of the job, and the others "
                                 "have not: its connection to that one is cut");
    else if (node->up.fd < 0 || silent)
        td__member_lose_coordinator(node, node->up.fd >= 0);
}

/* Sends beats that are due; returns when the next one is. */
static int64_t beat(struct td__node *node)
{
    struct td__node_peer *peer;
    int64_t now = td__now_ns(), every = td__node_silence_ns() / BEATS, next = now + every;
    if (node->up.fd >= 0 && now - node->up.sent_ns >= every)
        td__node_link_send(&node->up, TD__MESSAGE_BEAT, NULL, 0);
    TAILQ_FOREACH (peer, &node->peers, entry)
        if (node->lead && peer->id >= 0 && now - peer->link.sent_ns >= every)
            td__node_link_send(&peer->link, TD__MESSAGE_BEAT, NULL, 0);
    TAILQ_FOREACH (peer, &node->peers, entry)
        if (peer->id >= 0)
            next = td__deadline_earlier(next, peer->link.sent_ns + every);
    return node->up.fd >= 0 ? td__deadline_earlier(next, node->up.sent_ns + every) : next;
}

/* ---- The thread ------------------------------------------------------------------------------ */

static struct pollfd *list_descriptors(struct td__node *node, nfds_t *count)
{
    struct td__node_peer *peer;
    nfds_t room = 3;
    TAILQ_FOREACH (peer, &node->peers, entry)
        room++;
    struct pollfd *fds = calloc(room, sizeof *fds);
    if (!fds)
        abort();
    *count = 0;
    fds[(*count)++] = (struct pollfd){.fd = node->wake, .events = POLLIN};
    if (node->listener)
        fds[(*count)++] = (struct pollfd){.fd = td__auth_listener_fd(node->listener),
                                          .events = POLLIN};
    if (node->up.fd >= 0)
        fds[(*count)++] = (struct pollfd){
            .fd = node->up.fd, .events = (short)(POLLIN | (node->up.out.size ? POLLOUT : 0))};
    TAILQ_FOREACH (peer, &node->peers, entry)
        if (peer->link.fd >= 0)
            fds[(*count)++] = (struct pollfd){
                .fd = peer->link.fd,
                .events = (short)(POLLIN | (peer->link.out.size ? POLLOUT : 0))};
    return fds;
}

static void flush_all(struct td__node *node)
{
    struct td__node_peer *peer;
    td__node_link_flush(&node->up);
    TAILQ_FOREACH (peer, &node->peers, entry)
        td__node_link_flush(&peer->link);
}

static bool has_members(const struct td__node *node)
{
    const struct td__node_peer *peer;
    TAILQ_FOREACH (peer, &node->peers, entry)
        if (peer->id >= 0 || peer->link.out.size)
            return true;
    return node->up.out.size > 0;
}

/* The agent wants to leave: whether the others have what they need from here. */
static bool may_end(struct td__node *node, int64_t *until)
{
    pthread_mutex_lock(&node->lock);
    bool closing = node->closing;
    pthread_mutex_unlock(&node->lock);
    if (!closing)
        return false;
    if (!*until)
        *until = td__deadline_in_ms(CLOSE_MS / 2);
    return node->leaves || !has_members(node) || td__deadline_passed(*until);
}

static void turn(struct td__node *node, int64_t due, int listener_ms)
{
    nfds_t count;
    struct pollfd *fds = list_descriptors(node, &count);
    int wait_ms = td__deadline_poll_ms(due);
    if (listener_ms >= 0 && listener_ms < wait_ms)
        wait_ms = listener_ms;
    poll(fds, count, wait_ms);
    free(fds);
}

/* What became of this node's copy of the store. Without a place in the job it is in the introduction. */
static void report_copy(struct td__node *node)
{
    struct td__store_copy copy;
    struct td__buffer body = {0};
    if (!node->keeper || node->over || node->introduction.node.id < 0 ||
        !td__node_store_look(node, &copy))
        return;
    node->introduction.copy = copy;
    td__store_copy_put(&body, &copy);
    td__node_tell(node, TD__MESSAGE_COPY, body.data, body.size);
    td__buffer_free(&body);
}

static void serve(struct td__node *node)
{
    int64_t until = 0, due = 0;
    int listener_ms = 0;
    for (;;) {
        turn(node, due, listener_ms);
        take_orders(node);
        if (node->listener)
            listener_ms = td__auth_listener_turn(node->listener);
        else
            listener_ms = -1;
        report_copy(node);
        flush_all(node);
        hear_coordinator(node);
        if (node->over && !node->lead)
            td__node_link_close(&node->up);
        hear_peers(node);
        due = beat(node);
        if (node->lead)
            due = td__deadline_earlier(due, td__lead_tick(node));
        if (may_end(node, &until))
            return;
        if (until)
            due = td__deadline_earlier(due, until);
    }
}

static void *run(void *arg)
{
    struct td__node *node = arg;
    td_status status = td__node_join(node);
    pthread_mutex_lock(&node->lock); /* td__node_start() has it until the thread has its first name */
    pthread_setname_np(pthread_self(), "td-member"); /* for those who look at the process */
    node->joined = true;
    pthread_mutex_unlock(&node->lock);
    if (status)
        td__node_post_over(node, td__error_text());
    else
        serve(node);
    pthread_mutex_lock(&node->lock);
    node->running = false;
    pthread_cond_signal(&node->thread_ended);
    pthread_mutex_unlock(&node->lock);
    return NULL;
}

/* ---- The agent's side -------------------------------------------------------------------------- */

static void free_node(struct td__node *node)
{
    struct td__node_event event;
    while (!TAILQ_EMPTY(&node->peers))
        free_peer(node, TAILQ_FIRST(&node->peers));
    td__node_link_close(&node->up);
    td__node_link_close(&node->orders);
    if (node->listener)
        td__auth_listener_close(node->listener);
    while (!TAILQ_EMPTY(&node->peers)) /* closing the listener admits what was about to be */
        free_peer(node, TAILQ_FIRST(&node->peers));
    td__node_store_close(node);
    if (node->store)
        td_store_close(node->store);
    td__lead_free(node);
    td__roster_free(&node->roster);
    free(node->lost);
    while (td__node_next(node, &event))
        ;
    if (node->wake >= 0)
        close(node->wake);
    pthread_cond_destroy(&node->thread_ended);
    pthread_mutex_destroy(&node->lock);
    free(node);
}

td_status td__node_start(const struct td__run_options *options, const struct td__job_secret *secret,
                         void (*notify)(void *), void *arg, struct td__node **node_out)
{
    struct td__node *node = calloc(1, sizeof *node);
    if (!node)
        return td__fail_nomem("launcher");
    node->options = options;
    node->given_secret = secret;
    node->notify = notify;
    node->arg = arg;
    node->running = true;
    node->up.fd = node->orders.fd = -1;
    TAILQ_INIT(&node->peers);
    STAILQ_INIT(&node->events);
    pthread_mutex_init(&node->lock, NULL);
    td__cond_init(&node->thread_ended);
    node->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    pthread_mutex_lock(&node->lock);
    int error = node->wake < 0 ? errno : td__thread_start(&node->thread, "td-node", run, node);
    pthread_mutex_unlock(&node->lock);
    if (error) {
        free_node(node);
        return td_fail(TD_ERR_SYSTEM, "cannot start a thread: %s", td__errno_text(error));
    }
    *node_out = node;
    return TD_OK;
}

void td__node_failed(struct td__node *node, int round, int code, const char *text)
{
    order(node, TD__MESSAGE_FAILED, round, code, text);
}

void td__node_gone(struct td__node *node, int round)
{
    order(node, TD__MESSAGE_GONE, round, 0, "");
}

void td__node_depart(struct td__node *node)
{
    order(node, TD__MESSAGE_LEAVE, 0, 0, "");
}

void td__node_drain(struct td__node *node, const char *name)
{
    order(node, TD__MESSAGE_DRAIN, 0, 0, name);
}

void td__node_end_job(struct td__node *node, int code, const char *text)
{
    order(node, TD__MESSAGE_END, 0, code, text);
}

bool td__node_close(struct td__node *node)
{
    pthread_mutex_lock(&node->lock);
    node->closing = true;
    td__deadline deadline = td__deadline_in_ms(node->joined ? CLOSE_MS : 0);
    eventfd_write(node->wake, 1);
    while (node->running && td__cond_wait(&node->thread_ended, &node->lock, deadline))
        ;
    bool ended = !node->running;
    pthread_mutex_unlock(&node->lock);
    if (!ended) {
        pthread_detach(node->thread); /* it ends with the process */
        return false;
    }
    pthread_join(node->thread, NULL);
    free_node(node);
    return true;
}
