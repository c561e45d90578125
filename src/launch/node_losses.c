/* How the coordinator finds that nodes are lost, and how it begins where it has taken over from another one; see
 * coordination.h.
 *
 * A node that is silent may be alive in another part of a network that was cut. As long as further nodes are suspected,
 * nothing is decided: a cut silences all nodes of the other part within the time between two beats. */
#include "launch/coordination.h"
#include "launch/node_store.h"

#include "base/clock.h"
#include "base/text.h"
#include "os/address.h"
#include "os/socket.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum {
    TAKEOVER_MS = 3000, /* after the heartbeat's limit, for nodes that have not noticed the loss */
    PROBE_AFTER_MS = 1000,
    PROBE_MS = 500,
};

/* ---- The store ------------------------------------------------------------------------------- */

/* The latest whole copy; among equal ones that of the lowest node. */
static struct td__seat *best_copy(const struct td__node *node, int without)
{
    struct td__seat *best = NULL;
    for (int i = 0; i < node->lead->count; i++) {
        struct td__seat *seat = &node->lead->seats[i];
        const struct td__store_copy *copy = &seat->introduction.copy;
        if (!seat->here || seat->lost || seat->leaving || !copy->whole ||
            seat->introduction.node.id == without)
            continue;
        const struct td__store_copy *other = best ? &best->introduction.copy : copy;
        bool later = copy->copy_term > other->copy_term ||
                     (copy->copy_term == other->copy_term &&
                      copy->copy_version > other->copy_version);
        bool same = copy->copy_term == other->copy_term &&
                    copy->copy_version == other->copy_version;
        if (!best || later ||
            (same &&
             seat->introduction.node.node_rank < best->introduction.node.node_rank))
            best = seat;
    }
    return best;
}

static void put_store_at(struct td__node *node, const struct td__roster_node *at)
{
    struct td__roster *roster = &node->roster;
    roster->store_number = at->store_number;
    roster->store_port = at->store_port;
    snprintf(roster->store_address, sizeof roster->store_address, "%s", at->address);
}

bool td__lead_move_store(struct td__node *node, int without)
{
    struct td__seat *best = best_copy(node, without);
    uint64_t term = node->roster.store_term;
    if (!best)
        return false;
    for (int i = 0; i < node->lead->count; i++) {
        uint64_t seen = node->lead->seats[i].introduction.copy.term;
        term = seen > term ? seen : term;
    }
    put_store_at(node, &best->introduction.node);
    node->roster.store_term = term + 1;
    return true;
}

void td__lead_take_copy(struct td__node *node, struct td__seat *seat, struct td__span body)
{
    struct td__reader reader = td__reader_of(body.data, body.size);
    struct td__store_copy copy;
    td__store_copy_read(&reader, &copy);
    if (!td__reader_done(&reader))
        return;
    seat->introduction.copy = copy;
    if (!node->lead->handing_ns || !copy.primary || copy.number != node->roster.store_number ||
        copy.term < node->roster.store_term)
        return;
    node->lead->handing_ns = td__now_ns(); /* it has moved */
    td__lead_let_go(node);
}

/* After nodes were lost. */
static void check_store(struct td__node *node, char *text, size_t room)
{
    struct td__roster *roster = &node->roster;
    if (!node->keeper)
        return;
    for (int i = 0; i < node->lead->count; i++)
        if (node->lead->seats[i].introduction.node.store_number == roster->store_number)
            return;
    if (td__lead_move_store(node, -1))
        return;
    if (td__node_store_renew(node)) {
        td__node_post_over(node, td__error_text());
        return;
    }
    struct td__seat *own = td__lead_seat(node, node->introduction.node.id);
    own->introduction.copy = node->introduction.copy;
    own->introduction.node.store_number = node->introduction.node.store_number;
    own->introduction.node.store_port = node->introduction.node.store_port;
    roster->store_term++;
    put_store_at(node, &own->introduction.node);
    if (td__others_go_on(node->options))
        td__text_add(text, room, "; the store of the job was lost: workers that start from now on do "
                                 "not find those that run");
}

/* ---- Nodes that are lost --------------------------------------------------------------------- */

int64_t td__node_silence_ns(void)
{
    return td__heartbeat_ms() * 1000000;
}

/* Whether a node that is not lost yet has been silent for so long that it may be. */
static bool any_suspect(const struct td__node *node)
{
    int64_t since = td__now_ns() - td__node_silence_ns() / 2;
    for (int i = 0; i < node->lead->count; i++) {
        const struct td__seat *seat = &node->lead->seats[i];
        if (seat->peer && !seat->lost && seat->peer->link.heard_ns < since)
            return true;
    }
    return false;
}

/* Whether this part of the network may go on; ends it otherwise. */
static bool check_quorum(struct td__node *node)
{
    const struct td__roster *roster = &node->roster;
    char text[512];
    int here = 0;
    uint8_t *lost = calloc((size_t)roster->count + 1, 1);
    if (!lost)
        abort();
    for (int i = 0; i < roster->count; i++) {
        const struct td__seat *seat = td__lead_seat(node, roster->at[i].id);
        lost[i] = seat ? seat->lost : node->lost && node->lost[i] ? node->lost[i] : 2;
        here += !lost[i];
    }
    bool quorum = td__roster_has_quorum(roster, lost);
    free(lost);
    if (quorum || !roster->count)
        return true;
    snprintf(text, sizeof text,
             "%d of the %d nodes of the job can reach each other here, and the others may go on "
             "without them: only the part of a network with more than half of the nodes goes on, "
             "or with half of them and the lowest",
             here, roster->count);
    td__lead_end_job(node, -1, 1, text);
    return false;
}

/* A silent node counts until the next roster. */
static void note_silent(struct td__node *node, int id)
{
    const struct td__roster *roster = &node->roster;
    if (!node->lost)
        node->lost = calloc((size_t)roster->count + 1, 1);
    if (!node->lost)
        abort();
    for (int i = 0; i < roster->count; i++)
        if (roster->at[i].id == id)
            node->lost[i] = 1;
}

/* Takes the seats of lost nodes away, and returns one line on them. */
static void remove_lost(struct td__node *node, char *text, size_t room)
{
    int lost = 0;
    text[0] = '\0';
    for (int i = node->lead->count - 1; i >= 0; i--) {
        struct td__seat *seat = &node->lead->seats[i];
        if (!seat->lost)
            continue;
        if (seat->lost == 1)
            note_silent(node, seat->introduction.node.id);
        if (td__others_go_on(node->options) && seat->in_round)
            td__lead_report(node, TD__MESSAGE_LOST, seat->introduction.node.id, 1, seat->why,
                            seat->introduction.node.id);
        if (seat->in_round && !seat->gone)
            td__lead_pass_on(node, seat);
        if (lost++ < 4)
            td__text_add(text, room, "%s%s", lost > 1 ? "; " : "", seat->why);
        td__lead_remove(node, seat);
    }
    if (lost > 4)
        td__text_add(text, room, "; and %d more", lost - 4);
    check_store(node, text, room);
}

/* Decides on nodes that are lost. */
void td__lead_judge(struct td__node *node)
{
    struct td__coordination *lead = node->lead;
    char text[TD__ERROR_TEXT];
    bool any = false, silent = false;
    for (int i = 0; i < lead->count; i++) {
        any = any || lead->seats[i].lost;
        silent = silent || lead->seats[i].lost == 1;
    }
    if (!any || lead->phase == TD__ENDED || lead->phase == TD__TAKEOVER ||
        (silent && any_suspect(node)))
        return;
    if (silent && !check_quorum(node))
        return;
    bool begun = node->roster.count > 0;
    uint64_t term = node->roster.store_term;
    remove_lost(node, text, sizeof text);
    if (begun && !td__others_go_on(node->options) && node->roster.store_term != term)
        td__lead_update(node);
    if (!td__lead_is_elastic(node) && (!begun || !td__others_go_on(node->options))) {
        td__lead_end_job(node, -1, 1, text);
    } else if (lead->phase == TD__GATHER) {
        td__lead_check_gathered(node);
    } else if (td__others_go_on(node->options)) {
        td__lead_update(node);
        td__lead_check_round(node);
    } else {
        td__lead_change(node, text);
        td__lead_check_round(node);
    }
}

void td__lead_lose(struct td__node *node, struct td__node_peer *peer, bool silent)
{
    struct td__seat *seat = td__lead_seat(node, peer->id);
    peer->id = -1;
    peer->dropped = true;
    if (!seat || seat->lost)
        return;
    seat->peer = NULL;
    seat->lost = silent ? 1 : 2;
    if (seat->introduction.node.node_rank < 0)
        seat->introduction.node.node_rank = seat->introduction.wanted_rank >= 0
                                                ? seat->introduction.wanted_rank
                                                : seat->introduction.node.id;
    td__member_describe_loss(&seat->introduction.node, silent, seat->why, sizeof seat->why);
    td__lead_judge(node);
}

/* ---- Taking over ----------------------------------------------------------------------------- */

/* For the user who wants to add a node. */
static void say_taken_over(struct td__node *node)
{
    const struct td__roster *roster = &node->roster;
    const struct td__run_options *options = node->options;
    char at[128], text[512];
    td__endpoint_text(roster->store_address, roster->store_port, at, sizeof at);
    bool same = td__host_is_here(options->host, td__deadline_in_ms(PROBE_MS));
    snprintf(text, sizeof text, "node %d (on %s) has taken over%s%s",
             node->introduction.node.node_rank, node->introduction.node.host,
             same ? "" : "; further nodes join at --rdzv-endpoint ", same ? "" : at);
    td__node_post(node, TD__NODE_LOST, true, 0, text);
}

/* All nodes of the roster that can come have done so, or may not come any more. */
static void end_takeover(struct td__node *node)
{
    struct td__coordination *lead = node->lead;
    char text[TD__ERROR_TEXT];
    for (int i = 0; i < lead->count; i++) {
        struct td__seat *seat = &lead->seats[i];
        if (seat->here || seat->lost)
            continue;
        seat->lost = 1;
        td__member_describe_loss(&seat->introduction.node, true, seat->why, sizeof seat->why);
    }
    if (!check_quorum(node))
        return;
    lead->phase = TD__RUN;
    remove_lost(node, text, sizeof text);
    td__text_add(text, sizeof text, "; node %d (on %s) has taken over",
                 node->introduction.node.node_rank, node->introduction.node.host);
    td__lead_update(node);
    if (td__others_go_on(node->options))
        say_taken_over(node);
    else
        td__lead_change(node, text);
    td__lead_check_round(node);
}

static void check_takeover(struct td__node *node)
{
    for (int i = 0; i < node->lead->count; i++)
        if (!node->lead->seats[i].here && !node->lead->seats[i].lost)
            return;
    end_takeover(node);
}

/* A node of the job that has lost the coordinator. */
void td__lead_return(struct td__node *node, const struct td__introduction *introduction,
                     const struct td__roster *theirs, struct td__node_peer *peer)
{
    struct td__coordination *lead = node->lead;
    struct td__seat *seat = td__lead_seat(node, introduction->node.id);
    if (lead->phase != TD__TAKEOVER || !seat || seat->here || seat->lost) {
        td__lead_refuse(
            peer, "the other nodes have gone on without this one, which they could not reach");
        return;
    }
    peer->id = introduction->node.id;
    seat->peer = peer;
    seat->here = true;
    seat->in_round = theirs->round == node->roster.round;
    seat->gone = introduction->round_gone >= node->roster.round;
    seat->introduction.copy = introduction->copy;
    check_takeover(node);
}

void td__lead_take_over(struct td__node *node)
{
    struct td__coordination *lead = calloc(1, sizeof *lead);
    if (!lead)
        abort();
    const struct td__roster *roster = &node->roster;
    *lead = (struct td__coordination){.phase = TD__TAKEOVER, .first = node->introduction};
    lead->begun_ns = td__now_ns();
    lead->limit_ns = td__deadline_in_ms(td__heartbeat_ms() + TAKEOVER_MS);
    node->lead = lead;
    for (int i = 0; i < roster->count; i++) {
        struct td__introduction introduction = node->introduction;
        introduction.node = roster->at[i];
        introduction.wanted_rank = td__lead_is_elastic(node) ? -1 : roster->at[i].node_rank;
        struct td__seat *seat = td__lead_add(node, &introduction, NULL);
        seat->own = seat->here = roster->at[i].id == node->introduction.node.id;
        seat->in_round = true;
        seat->gone = seat->own && node->introduction.round_gone >= roster->round;
        seat->lost = node->lost[i];
        if (seat->own)
            td__node_store_look(node, &seat->introduction.copy);
        else
            seat->introduction.copy = (struct td__store_copy){0};
        if (seat->lost)
            td__member_describe_loss(&roster->at[i], seat->lost == 1, seat->why, sizeof seat->why);
        if (roster->at[i].id >= lead->next_id)
            lead->next_id = roster->at[i].id + 1;
    }
    check_takeover(node);
}

/* A node that has not come: has its launcher ended, too? */
static void probe_one(struct td__node *node)
{
    for (int i = 0; i < node->lead->count; i++) {
        struct td__seat *seat = &node->lead->seats[i];
        int fd;
        if (seat->here || seat->lost || seat->why[0])
            continue;
        td__member_describe_loss(&seat->introduction.node, false, seat->why, sizeof seat->why);
        td_status status = td__node_connect(node, &seat->introduction.node, PROBE_MS, &fd);
        if (!status)
            close(fd);
        else if (status == TD_ERR_PEER)
            seat->lost = 2;
        check_takeover(node);
        return;
    }
}

int64_t td__lead_tick_takeover(struct td__node *node)
{
    struct td__coordination *lead = node->lead;
    if (td__deadline_passed(lead->limit_ns))
        end_takeover(node);
    else if (td__now_ns() - lead->begun_ns >= PROBE_AFTER_MS * INT64_C(1000000))
        probe_one(node);
    return lead->phase == TD__TAKEOVER ? td__deadline_in_ms(PROBE_AFTER_MS / 4) : TD__NEVER;
}
