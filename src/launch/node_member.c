/* What a launcher makes of the coordinator's messages, and of its loss; see node_internal.h.
 *
 * Where the coordinator is lost, the launcher that follows it in the roster takes over. Each of the others goes through the
 * roster from its beginning: a launcher that has ended refuses the connection at once, one that lives takes the JOIN,
 * and answers when it has lost the coordinator, too. So all that can reach each other meet at the same one. */
#include "launch/node_internal.h"
#include "launch/node_store.h"

#include "base/clock.h"
#include "base/fail.h"
#include "os/socket.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    CONNECT_MS = 3000, /* to another launcher; one that does not answer by then is silent */
    ANSWER_MS = 8000,  /* after the heartbeat's limit: for the new coordinator's first message */
};

void td__member_describe_loss(const struct td__roster_node *lost, bool silent, char *text,
                              size_t room)
{
    int size = snprintf(text, room, "the launcher of node %d (process %d on %s) ", lost->node_rank,
                        lost->pid, lost->host);
    if (size < 0 || (size_t)size >= room)
        return;
    if (silent)
        snprintf(text + size, room - (size_t)size,
                 "has not answered for %d s: its host is down, or cut off from the network",
                 (int)(td__heartbeat_ms() / 1000));
    else
        snprintf(text + size, room - (size_t)size, "has ended");
}

/* ---- Messages of the coordinator ------------------------------------------------------------- */

static void take_roster(struct td__node *node, struct td__span body, bool begins)
{
    struct td__reader reader = td__reader_of(body.data, body.size);
    bool late = td__reader_u8(&reader);
    int id = node->introduction.node.id;
    if (!node->lead && !td__roster_take(&reader, &node->roster))
        return;
    if (id < 0) {
        /* This node's entry is the one with its listener. */
        for (int i = 0; i < node->roster.count; i++)
            if (!memcmp(node->roster.at[i].identity, node->identity, sizeof node->identity))
                node->introduction.node.id = node->roster.at[i].id;
    }
    if (!td__roster_find(&node->roster, node->introduction.node.id)) {
        td__node_post_over(node, "the other nodes go on without this one");
        return;
    }
    node->introduction.node = *td__roster_find(&node->roster, node->introduction.node.id);
    td__node_store_follow(node);
    if (begins)
        td__node_post_round(node, late);
    else if (node->keeper)
        td__node_post_store(node);
}

static void take_report(struct td__node *node, enum td__node_message kind, struct td__span body)
{
    struct td__report report;
    if (!td__report_read(body, &report))
        return;
    bool own = report.node >= 0 && report.node == node->introduction.node.id;
    switch (kind) {
    case TD__MESSAGE_STOP:
        if (!own)
            td__node_post(node, TD__NODE_FAILED, false, report.code, report.text);
        break;
    case TD__MESSAGE_CHANGE:
        td__node_post(node, TD__NODE_CHANGED, false, report.code, report.text);
        break;
    case TD__MESSAGE_LOST:
        td__node_post(node, TD__NODE_LOST, false, report.code, report.text);
        break;
    case TD__MESSAGE_ADOPT:
        td__node_post(node, TD__NODE_ADOPT, false, report.code, report.text);
        break;
    case TD__MESSAGE_DRAIN:
        td__node_post(node, TD__NODE_DRAIN, false, 0, "");
        break;
    case TD__MESSAGE_REFUSED:
        td__node_post_over(node, report.text);
        break;
    default:
        node->over = true;
        td__node_post(node, TD__NODE_OVER, false, report.code, report.text);
        break;
    }
}

void td__member_take(struct td__node *node, enum td__node_message kind, struct td__span body)
{
    node->up_limit_ns = 0;
    switch (kind) {
    case TD__MESSAGE_BEAT:
        break;
    case TD__MESSAGE_ROUND:
    case TD__MESSAGE_ROSTER:
        take_roster(node, body, kind == TD__MESSAGE_ROUND);
        break;
    case TD__MESSAGE_DONE:
        node->over = true;
        td__node_post(node, TD__NODE_ALL_GONE, false, 0, "");
        break;
    default:
        take_report(node, kind, body);
        break;
    }
}

/* ---- The loss of the coordinator ------------------------------------------------------------- */

static int index_of(const struct td__roster *roster, int id)
{
    for (int i = 0; i < roster->count; i++)
        if (roster->at[i].id == id)
            return i;
    return -1;
}

/* Whether the launcher of a node has ended, for certain: its host refuses a connection to it. */
static td_status probe(struct td__node *node, const struct td__roster_node *to)
{
    int fd;
    TD_TRY(td__node_connect(node, to, CONNECT_MS, &fd));
    close(fd);
    return TD_OK;
}

void td__member_lose_coordinator(struct td__node *node, bool silent)
{
    char text[512];
    const struct td__run_options *options = node->options;
    int lost = index_of(&node->roster, node->roster.coordinator);
    td__node_link_close(&node->up);
    if (node->over)
        return;
    bool elastic = options->min_nodes < options->nnodes || td__others_go_on(options);
    if (lost < 0 || !elastic) {
        snprintf(text, sizeof text, "the launcher of node 0 (at %s, port %d) %s", options->host,
                 options->port,
                 silent ? "has not answered for the time of TANDEM_HEARTBEAT: its host is down, or "
                          "cut off from the network"
                        : "has ended, or cannot be reached any more");
        td__node_post_over(node, text);
        return;
    }
    free(node->lost);
    node->lost = calloc((size_t)node->roster.count + 1, 1);
    if (!node->lost)
        abort();
    td_status status = silent ? TD_ERR_TIMEOUT : probe(node, &node->roster.at[lost]);
    if (!status) {
        snprintf(text, sizeof text,
                 "the launcher of node %d (on %s) has closed the connection to this one, and goes "
                 "on without it",
                 node->roster.at[lost].node_rank, node->roster.at[lost].host);
        td__node_post_over(node, text);
        return;
    }
    node->lost[lost] = status == TD_ERR_PEER ? 2 : 1;
    td__member_take_over(node);
}

/* Joins a launcher that is to be the coordinator. */
static bool join(struct td__node *node, int index)
{
    int fd;
    td_status status = td__node_connect(node, &node->roster.at[index], CONNECT_MS, &fd);
    if (status) {
        node->lost[index] = status == TD_ERR_PEER ? 2 : 1;
        return false;
    }
    node->roster.coordinator = node->roster.at[index].id;
    td__node_link_open(&node->up, fd);
    node->up_limit_ns = td__deadline_in_ms(td__heartbeat_ms() + ANSWER_MS);
    td__node_introduce(node);
    return true;
}

void td__member_take_over(struct td__node *node)
{
    for (int i = 0; i < node->roster.count; i++) {
        if (node->lost[i])
            continue;
        if (node->roster.at[i].id != node->introduction.node.id) {
            if (join(node, i))
                return;
            continue;
        }
        td__lead_take_over(node);
        return;
    }
}
