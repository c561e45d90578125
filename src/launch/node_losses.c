/* How the coordinator finds that nodes are lost, and how it begins where it has taken over from another one; see
 * coordination.h.
 *
 * A node that is silent may be alive in another part of a network that was cut. As long as further nodes are suspected,
 * nothing is decided: a cut silences all nodes of the other part within the time between two beats. */
#include "launch/coordination.h"

#include "base/clock.h"
#include "base/text.h"
#include "os/socket.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum {
    TAKEOVER_MS = 3000, /* after the heartbeat's limit, for nodes that have not noticed the loss */
    PROBE_AFTER_MS = 1000,
    PROBE_MS = 500,
};

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
        if (lost++ < 4)
            td__text_add(text, room, "%s%s", lost > 1 ? "; " : "", seat->why);
        td__lead_remove(node, seat);
    }
    if (lost > 4)
        td__text_add(text, room, "; and %d more", lost - 4);
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
    remove_lost(node, text, sizeof text);
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
    if (td__others_go_on(node->options)) {
        td__lead_update(node);
    } else {
        td__text_add(text, sizeof text, "; node %d (on %s) has taken over",
                     node->introduction.node.node_rank, node->introduction.node.host);
        td__lead_change(node, text);
    }
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
