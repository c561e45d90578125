/* What the coordinator decides; see node.h.
 *
 *               enough nodes                 all workers have ended
 *     GATHER ------------------> RUN ---------------------------------> ENDED
 *       ^  ^                      | a worker has failed,
 *       |  | too few nodes        | nodes come or go
 *       |  +-------------+        v
 *       |                +------ STOP <-- TAKEOVER (of a job that runs)
 *       +--- restarts left: RUN   |
 *                                 +---> ENDED
 *
 * STOP ends when each node of the round has no worker left, or is lost. So a worker that fails because another node has
 * died never counts as a failure: the death is noticed before the round has ended, and then the change of the nodes is
 * what ended it.
 *
 * With --on-failure replace and shrink there is only RUN: nodes come and go without stopping the others. */
#include "launch/coordination.h"

#include "base/clock.h"
#include "base/fail.h"
#include "base/text.h"
#include "os/socket.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    HAND_OVER_MS = 2000,
    GRACE_MS = 2000, /* the coordinator waits so much longer: those that cannot reach it know why */
};

/* ---- Messages -------------------------------------------------------------------------------- */

void td__lead_tell(struct td__node *node, const struct td__seat *seat, enum td__node_message kind,
                   const struct td__buffer *body)
{
    if (seat->own)
        td__member_take(node, kind, (struct td__span){(const char *)body->data, body->size});
    else if (seat->peer)
        td__node_link_send(&seat->peer->link, kind, body->data, body->size);
}

static void tell_all(struct td__node *node, enum td__node_message kind,
                     const struct td__buffer *body, int except)
{
    bool of_round = kind == TD__MESSAGE_STOP || kind == TD__MESSAGE_CHANGE;
    for (int i = 0; i < node->lead->count; i++) {
        const struct td__seat *seat = &node->lead->seats[i];
        if (seat->introduction.node.id != except && (seat->in_round || !of_round))
            td__lead_tell(node, seat, kind, body);
    }
}

void td__lead_report(struct td__node *node, enum td__node_message kind, int from, int code,
                     const char *text, int except)
{
    struct td__report report = {.node = from, .round = node->roster.round, .code = code};
    struct td__buffer body = {0};
    snprintf(report.text, sizeof report.text, "%s", text);
    td__report_put(&body, &report);
    tell_all(node, kind, &body, except);
    td__buffer_free(&body);
}

void td__lead_end_job(struct td__node *node, int except, int code, const char *text)
{
    node->lead->phase = TD__ENDED;
    td__lead_report(node, TD__MESSAGE_OVER, -1, code, text, except);
}

void td__lead_refuse(struct td__node_peer *peer, const char *text)
{
    struct td__report report = {.node = -1, .code = 1};
    struct td__buffer body = {0};
    snprintf(report.text, sizeof report.text, "%s", text);
    td__report_put(&body, &report);
    td__node_link_send(&peer->link, TD__MESSAGE_REFUSED, body.data, body.size);
    td__buffer_free(&body);
    peer->dropped = true;
    peer->dropped_ns = td__now_ns();
}

/* ---- Seats ----------------------------------------------------------------------------------- */

struct td__seat *td__lead_seat(const struct td__node *node, int id)
{
    for (int i = 0; i < node->lead->count; i++)
        if (node->lead->seats[i].introduction.node.id == id)
            return &node->lead->seats[i];
    return NULL;
}

struct td__seat *td__lead_add(struct td__node *node, const struct td__introduction *introduction,
                              struct td__node_peer *peer)
{
    struct td__coordination *lead = node->lead;
    struct td__seat *seats = realloc(lead->seats, ((size_t)lead->count + 1) * sizeof *seats);
    if (!seats)
        abort(); /* the supervisor cleans up */
    lead->seats = seats;
    struct td__seat *seat = &seats[lead->count++];
    *seat = (struct td__seat){
        .introduction = *introduction, .peer = peer, .own = !peer, .here = true};
    if (seat->introduction.node.id < 0)
        seat->introduction.node.id = lead->next_id++;
    if (peer)
        peer->id = seat->introduction.node.id;
    return seat;
}

void td__lead_remove(struct td__node *node, struct td__seat *seat)
{
    struct td__coordination *lead = node->lead;
    if (seat->peer)
        seat->peer->id = -1;
    size_t behind = (size_t)(&lead->seats[lead->count] - seat) - 1;
    memmove(seat, seat + 1, behind * sizeof *seat);
    lead->count--;
}

/* ---- Rosters --------------------------------------------------------------------------------- */

static int compare_ranks(const void *a, const void *b)
{
    const struct td__roster_node *x = a, *y = b;
    return x->node_rank < y->node_rank ? -1 : x->node_rank > y->node_rank;
}

static bool has_node_rank(const struct td__node *node, int rank)
{
    for (int i = 0; i < node->lead->count; i++)
        if (node->lead->seats[i].introduction.node.node_rank == rank)
            return true;
    return false;
}

static void take_node_rank(const struct td__node *node, struct td__seat *seat)
{
    int rank = td__lead_is_elastic(node) ? -1 : seat->introduction.wanted_rank;
    for (int next = 0; rank < 0 || has_node_rank(node, rank); next++)
        rank = next;
    seat->introduction.node.node_rank = rank;
}

/* All nodes get new ranks. Those that were asked for come first, where the number of nodes is fixed. */
static void rank_nodes(struct td__node *node)
{
    struct td__coordination *lead = node->lead;
    for (int i = 0; i < lead->count; i++)
        lead->seats[i].introduction.node.node_rank = -1;
    for (int wanted = 1; wanted >= 0; wanted--)
        for (int i = 0; i < lead->count; i++)
            if ((lead->seats[i].introduction.wanted_rank >= 0) == wanted)
                take_node_rank(node, &lead->seats[i]);
}

/* The lowest ranks that no living worker has. */
static void rank_newcomer(struct td__node *node, struct td__seat *seat)
{
    struct td__roster_node *own = &seat->introduction.node;
    own->node_rank = -1;
    own->rank = 0;
    take_node_rank(node, seat);
    for (int i = 0; i < node->lead->count; i++) {
        const struct td__roster_node *other = &node->lead->seats[i].introduction.node;
        int behind = other == own ? -1 : td__roster_node_behind(other, own->rank, own->nproc);
        if (behind < 0)
            continue;
        own->rank = behind;
        i = -1; /* that may collide with another one */
    }
}

/* Makes the roster of the seats. */
static void agree(struct td__node *node, bool rank_workers)
{
    struct td__coordination *lead = node->lead;
    struct td__roster *roster = &node->roster;
    struct td__roster_node *at = calloc((size_t)lead->count, sizeof *at);
    if (!at)
        abort();
    for (int i = 0; i < lead->count; i++)
        at[i] = lead->seats[i].introduction.node;
    qsort(at, (size_t)lead->count, sizeof *at, compare_ranks);
    for (int i = 0, rank = 0; rank_workers && i < lead->count; rank += at[i++].nproc) {
        at[i].rank = rank;
        td__lead_seat(node, at[i].id)->introduction.node.rank = rank;
    }
    free(roster->at);
    free(node->lost);
    node->lost = NULL;
    roster->at = at;
    roster->count = lead->count;
    roster->coordinator = node->introduction.node.id;
    roster->version++;
}

static void publish(struct td__node *node, enum td__node_message kind, struct td__seat *only,
                    int except)
{
    struct td__buffer body = {0};
    td__buffer_put_u8(&body, only != NULL);
    td__roster_put(&body, &node->roster);
    if (only)
        td__lead_tell(node, only, kind, &body);
    else
        tell_all(node, kind, &body, except);
    td__buffer_free(&body);
}

void td__lead_update(struct td__node *node)
{
    agree(node, false);
    publish(node, TD__MESSAGE_ROSTER, NULL, -1);
}

/* ---- Rounds ---------------------------------------------------------------------------------- */

static void begin_round(struct td__node *node)
{
    struct td__coordination *lead = node->lead;
    rank_nodes(node);
    agree(node, true);
    for (int i = 0; i < lead->count; i++) {
        lead->seats[i].in_round = true;
        lead->seats[i].gone = false;
    }
    lead->failed = false;
    lead->phase = TD__RUN;
    publish(node, TD__MESSAGE_ROUND, NULL, -1);
}

static void begin_gathering(struct td__node *node)
{
    struct td__coordination *lead = node->lead;
    int64_t join_ms = (int64_t)(node->options->join_timeout_s * 1000);
    bool begun = node->roster.count > 0;
    lead->phase = TD__GATHER;
    lead->begun_ns = td__now_ns();
    lead->last_call_ns = 0;
    lead->limit_ns = td__deadline_in_ms(!begun && join_ms >= GRACE_MS ? join_ms + GRACE_MS
                                                                      : join_ms);
}

/* TD__GATHER: begins where there are enough nodes. */
void td__lead_check_gathered(struct td__node *node)
{
    struct td__coordination *lead = node->lead;
    int64_t wait_ms = (int64_t)(node->options->last_call_timeout_s * 1000);
    if (lead->count < node->options->min_nodes)
        lead->last_call_ns = 0;
    else if (!lead->last_call_ns)
        lead->last_call_ns = td__deadline_in_ms(wait_ms);
    if (lead->count == node->options->nnodes ||
        (lead->last_call_ns && td__deadline_passed(lead->last_call_ns)))
        begin_round(node);
}

static void end_well(struct td__node *node)
{
    struct td__buffer nothing = {0};
    node->lead->phase = TD__ENDED;
    tell_all(node, TD__MESSAGE_DONE, &nothing, -1);
}

/* The store of a node that leaves moves before. False as long as it does; the node then has to wait. */
static bool hand_store_over(struct td__node *node, const struct td__seat *seat)
{
    struct td__coordination *lead = node->lead;
    const struct td__roster_node *leaving = &seat->introduction.node;
    if (!lead->handing_ns && node->keeper && lead->count > 1 &&
        leaving->store_number == node->roster.store_number &&
        td__lead_move_store(node, leaving->id)) {
        lead->handing_ns = td__deadline_in_ms(HAND_OVER_MS);
        td__lead_update(node);
    }
    return !lead->handing_ns || td__deadline_passed(lead->handing_ns);
}

/* The last to go is this one: another takes over then. */
static void let_go(struct td__node *node)
{
    struct td__buffer nothing = {0};
    for (int i = node->lead->count - 1; i >= 0; i--) {
        struct td__seat *seat = &node->lead->seats[i];
        if (!seat->leaving || (seat->in_round && !seat->gone) || !hand_store_over(node, seat))
            continue;
        node->lead->handing_ns = 0;
        td__lead_tell(node, seat, TD__MESSAGE_DONE, &nothing);
        if (seat->own) {
            node->lead->phase = TD__ENDED;
            return;
        }
        td__lead_remove(node, seat);
    }
}

/* The workers of the round have ended on all nodes. */
static void end_round(struct td__node *node)
{
    struct td__coordination *lead = node->lead;
    if (lead->phase == TD__RUN) {
        end_well(node);
        return;
    }
    if (lead->failed && node->roster.restarts >= node->options->max_restarts) {
        end_well(node);
        return;
    }
    let_go(node);
    if (lead->phase == TD__ENDED || lead->handing_ns)
        return;
    node->roster.restarts += lead->failed;
    node->roster.round++;
    if (lead->count >= node->options->min_nodes) {
        begin_round(node);
        return;
    }
    begin_gathering(node);
    td__lead_check_gathered(node);
}

void td__lead_check_round(struct td__node *node)
{
    const struct td__coordination *lead = node->lead;
    if (lead->phase != TD__RUN && lead->phase != TD__STOP)
        return;
    for (int i = 0; i < lead->count; i++)
        if (lead->seats[i].in_round && !lead->seats[i].gone)
            return;
    end_round(node);
}

/* Ends the workers of all nodes, because nodes come or go. */
void td__lead_change(struct td__node *node, const char *text)
{
    struct td__coordination *lead = node->lead;
    lead->failed = false;
    if (lead->phase == TD__RUN)
        td__lead_report(node, TD__MESSAGE_CHANGE, -1, 1, text, -1);
    if (lead->phase == TD__RUN)
        lead->phase = TD__STOP;
}

static void on_failure(struct td__node *node, struct td__span body)
{
    struct td__coordination *lead = node->lead;
    struct td__report report;
    if (lead->phase != TD__RUN || !td__report_read(body, &report) ||
        report.round != node->roster.round || td__others_go_on(node->options))
        return;
    lead->failed = true;
    lead->phase = TD__STOP;
    td__lead_report(node, TD__MESSAGE_STOP, report.node, report.code, report.text, -1);
}

static void on_gone(struct td__node *node, struct td__seat *seat, struct td__span body)
{
    struct td__report report;
    if (!td__report_read(body, &report) || report.round != node->roster.round)
        return;
    seat->gone = true;
    td__lead_check_round(node);
}

static void on_leave(struct td__node *node, struct td__seat *seat)
{
    char text[512];
    if (node->lead->phase == TD__ENDED)
        return;
    seat->leaving = true;
    snprintf(text, sizeof text, "node %d (on %s) leaves the job", seat->introduction.node.node_rank,
             seat->introduction.node.host);
    if (!td__others_go_on(node->options)) {
        td__lead_change(node, text);
        td__lead_check_round(node);
        return;
    }
    int id = seat->introduction.node.id;
    seat->gone = true;
    td__lead_report(node, TD__MESSAGE_LOST, id, 0, text, id);
    td__lead_pass_on(node, seat);
    td__lead_let_go(node);
}

void td__lead_let_go(struct td__node *node)
{
    if (td__others_go_on(node->options)) {
        let_go(node);
        if (node->lead->phase == TD__ENDED || node->lead->handing_ns)
            return;
        td__lead_update(node);
    }
    td__lead_check_round(node);
}

/* A node is to leave: passed on to it. */
static void on_drain(struct td__node *node, struct td__span body)
{
    struct td__report report;
    struct td__buffer copy = {0};
    struct td__seat *seat = td__report_read(body, &report) ? td__lead_seat(node, report.node)
                                                           : NULL;
    if (!seat)
        return;
    td__buffer_put(&copy, body.data, body.size);
    td__lead_tell(node, seat, TD__MESSAGE_DRAIN, &copy);
    td__buffer_free(&copy);
}

/* ---- Nodes that come ------------------------------------------------------------------------- */

/* Another launcher that has the rank which this one asks for; NULL for none. */
static const struct td__seat *find_twin(const struct td__node *node,
                                        const struct td__introduction *introduction)
{
    for (int i = 0; i < node->lead->count && introduction->wanted_rank >= 0; i++)
        if (node->lead->seats[i].introduction.wanted_rank == introduction->wanted_rank)
            return &node->lead->seats[i];
    return NULL;
}

/* Why a launcher cannot join; TD_OK where it can. */
static td_status check_newcomer(const struct td__node *node,
                                const struct td__introduction *introduction)
{
    const struct td__coordination *lead = node->lead;
    const struct td__run_options *options = node->options;
    const struct td__seat *twin = find_twin(node, introduction);
    int rank = introduction->wanted_rank >= 0 ? introduction->wanted_rank : lead->count;
    TD_TRY(td__introduction_check(introduction, rank, &lead->first));
    if (twin)
        return td_fail(TD_ERR_MISMATCH,
                       "two launchers were started with --node-rank %d: process %d on %s and "
                       "process %d on %s",
                       rank, twin->introduction.node.pid, twin->introduction.node.host,
                       introduction->node.pid, introduction->node.host);
    if (lead->phase == TD__ENDED)
        return td_fail(TD_ERR_STATE, "the job at %s, port %d, ends", options->host, options->port);
    if (lead->count >= options->nnodes)
        return td_fail(TD_ERR_MISMATCH, "the job at %s, port %d, has all of its %d nodes already",
                       options->host, options->port, options->nnodes);
    return TD_OK;
}

static void welcome(struct td__node *node, const struct td__introduction *introduction,
                    struct td__node_peer *peer)
{
    char text[512];
    struct td__coordination *lead = node->lead;
    struct td__seat *seat = td__lead_add(node, introduction, peer);
    snprintf(text, sizeof text, "a node (process %d on %s) joins the job", introduction->node.pid,
             introduction->node.host);
    if (lead->phase == TD__GATHER) {
        td__lead_check_gathered(node);
    } else if (!td__others_go_on(node->options)) {
        td__lead_change(node, text);
        td__lead_check_round(node);
    } else if (lead->phase == TD__RUN) {
        rank_newcomer(node, seat);
        seat->in_round = true;
        agree(node, false);
        publish(node, TD__MESSAGE_ROUND, seat, -1);
        publish(node, TD__MESSAGE_ROSTER, NULL, seat->introduction.node.id);
    }
}

static void fill_address(struct td__node_peer *peer, const char *host, struct td__roster_node *node)
{
    struct td__address remote;
    td__remote_address(peer->link.fd, &remote);
    if (!node->address[0] && !td__address_is_local(&remote))
        td__address_host(&remote, node->address, sizeof node->address);
    if (!node->address[0] && strlen(host) < sizeof node->address)
        td__text_add(node->address, sizeof node->address, "%s", host); /* where this one is */
}

static void on_join(struct td__node *node, struct td__node_peer *peer, struct td__span body)
{
    struct td__introduction introduction;
    struct td__roster theirs = {0};
    struct td__reader reader = td__reader_of(body.data, body.size);
    const struct td__roster_node *own = &node->introduction.node;
    bool begun = node->roster.count > 0;
    if (!td__introduction_read(&reader, &introduction)) {
        peer->dropped = true;
        return;
    }
    if (introduction.node.id < 0 && node->lead->phase == TD__TAKEOVER) {
        td__buffer_put(&peer->joining, body.data, body.size); /* it waits until that is over */
        return;
    }
    if (introduction.node.id >= 0) {
        if (td__roster_take(&reader, &theirs))
            td__lead_return(node, &introduction, &theirs, peer);
        td__roster_free(&theirs);
        return;
    }
    fill_address(peer, own->address[0] ? own->address : node->options->host, &introduction.node);
    td_status status = check_newcomer(node, &introduction);
    if (!status) {
        welcome(node, &introduction, peer);
        return;
    }
    td__lead_refuse(peer, td__error_text());
    bool too_many = node->lead->count >= node->options->nnodes && !find_twin(node, &introduction);
    if (!begun && status == TD_ERR_MISMATCH && !too_many)
        td__lead_end_job(node, -1, 1, td__error_text());
}

void td__lead_take(struct td__node *node, struct td__node_peer *peer, enum td__node_message kind,
                   struct td__span body)
{
    struct td__report report;
    int id = peer ? peer->id : node->introduction.node.id;
    if (peer && kind == TD__MESSAGE_JOIN && id < 0) {
        on_join(node, peer, body);
        return;
    }
    struct td__seat *seat = td__lead_seat(node, id);
    if (!seat)
        return;
    switch (kind) {
    case TD__MESSAGE_FAILED:
        on_failure(node, body);
        break;
    case TD__MESSAGE_GONE:
        on_gone(node, seat, body);
        break;
    case TD__MESSAGE_LEAVE:
        on_leave(node, seat);
        break;
    case TD__MESSAGE_DRAIN:
        on_drain(node, body);
        break;
    case TD__MESSAGE_COPY:
        td__lead_take_copy(node, seat, body);
        break;
    case TD__MESSAGE_END:
        if (node->lead->phase != TD__ENDED && td__report_read(body, &report))
            td__lead_end_job(node, id, report.code, report.text);
        break;
    default:
        break;
    }
}

/* ---- The beginning, and what is due ---------------------------------------------------------- */

td_status td__lead_begin(struct td__node *node)
{
    node->lead = calloc(1, sizeof *node->lead);
    if (!node->lead)
        return td__fail_nomem("launcher");
    node->lead->first = node->introduction;
    begin_gathering(node);
    struct td__seat *seat = td__lead_add(node, &node->introduction, NULL);
    node->introduction.node.id = seat->introduction.node.id;
    td__lead_check_gathered(node);
    return TD_OK;
}

/* "1, 3": the ranks that no launcher has taken. */
static int list_missing(const struct td__node *node, char *list, size_t room)
{
    int missing = 0;
    for (int rank = 0; rank < node->options->nnodes; rank++) {
        bool taken = false;
        for (int i = 0; i < node->lead->count; i++) {
            const struct td__introduction *other = &node->lead->seats[i].introduction;
            taken = taken ||
                    (other->wanted_rank >= 0 ? other->wanted_rank : other->node.id) == rank;
        }
        if (taken)
            continue;
        if (strlen(list) + 24 < room)
            td__text_add(list, room, "%s%d", missing ? ", " : "", rank);
        else if (!strstr(list, "…"))
            td__text_add(list, room, ", …");
        missing++;
    }
    return missing;
}

static void give_up_gathering(struct td__node *node)
{
    const struct td__run_options *options = node->options;
    char list[400] = "", text[512];
    int count = node->lead->count;
    if (node->roster.count) {
        snprintf(text, sizeof text,
                 "%d of at least %d nodes %s left, and no other has joined within %g s", count,
                 options->min_nodes, count == 1 ? "is" : "are", options->join_timeout_s);
    } else if (td__lead_is_elastic(node)) {
        snprintf(text, sizeof text,
                 "%d of at least %d nodes %s arrived within %g s: tdrun was not started on the "
                 "others, or cannot reach node 0",
                 count, options->min_nodes, count == 1 ? "has" : "have", options->join_timeout_s);
    } else {
        int missing = list_missing(node, list, sizeof list);
        snprintf(text, sizeof text,
                 "node%s %s of %d %s not arrived within %g s: tdrun was not started there, or "
                 "cannot reach node 0",
                 missing == 1 ? "" : "s", list, options->nnodes, missing == 1 ? "has" : "have",
                 options->join_timeout_s);
    }
    td__lead_end_job(node, -1, 1, text);
}

int64_t td__lead_tick(struct td__node *node)
{
    struct td__coordination *lead = node->lead;
    td__lead_judge(node);
    if (lead->phase == TD__GATHER) {
        td__lead_check_gathered(node);
        if (lead->phase == TD__GATHER && lead->count < node->options->min_nodes &&
            td__deadline_passed(lead->limit_ns))
            give_up_gathering(node);
        if (lead->phase == TD__GATHER)
            return lead->last_call_ns ? lead->last_call_ns : lead->limit_ns;
    }
    if (lead->phase == TD__TAKEOVER)
        return td__lead_tick_takeover(node);
    if (lead->handing_ns && td__deadline_passed(lead->handing_ns))
        td__lead_let_go(node);
    return lead->handing_ns && lead->phase != TD__ENDED ? lead->handing_ns : TD__NEVER;
}

bool td__lead_is_done(const struct td__node *node)
{
    return node->lead->phase == TD__ENDED;
}

void td__lead_free(struct td__node *node)
{
    if (node->lead)
        free(node->lead->seats);
    free(node->lead);
    node->lead = NULL;
}
