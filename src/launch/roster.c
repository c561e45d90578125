/* The roster of a job's nodes, and the messages about nodes; see roster.h. */
#include "launch/roster.h"

#include "base/fail.h"
#include "base/host.h"
#include "base/text.h"
#include "os/address.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TEXT_LIMIT = 4096, MOST_NODES = TD__MAX_NODES, MOST_WORKERS = TD__MAX_WORKERS };

static void put_text(struct td__buffer *buffer, const char *text, size_t room)
{
    td__buffer_put_string(buffer, text, strnlen(text, room - 1));
}

static void read_text(struct td__reader *reader, char *text, size_t room)
{
    struct td__span span = td__reader_string(reader, TEXT_LIMIT);
    snprintf(text, room, "%.*s", (int)span.size, span.data);
}

static void put_int(struct td__buffer *buffer, int value)
{
    td__buffer_put_u32(buffer, (uint32_t)value);
}

/* A number from `low` to `high`; outside it the reader has failed. */
static int read_int(struct td__reader *reader, int low, int high)
{
    int value = (int)td__reader_u32(reader);
    if (value < low || value > high)
        reader->failed = true;
    return value;
}

/* ---- Nodes ----------------------------------------------------------------------------------- */

static void put_node(struct td__buffer *buffer, const struct td__roster_node *node)
{
    put_int(buffer, node->id);
    put_int(buffer, node->node_rank);
    put_int(buffer, node->rank);
    put_int(buffer, node->nproc);
    put_int(buffer, node->spares);
    put_int(buffer, node->adoptions);
    for (int i = 0; i < node->adoptions; i++)
        put_int(buffer, node->adopted[i]);
    put_int(buffer, node->pid);
    put_int(buffer, node->port);
    put_text(buffer, node->address, sizeof node->address);
    td__buffer_put(buffer, node->identity, sizeof node->identity);
    td__buffer_put_u32(buffer, node->store_number);
    put_int(buffer, node->store_port);
    put_text(buffer, node->host, sizeof node->host);
    put_text(buffer, node->role, sizeof node->role);
}

static void read_node(struct td__reader *reader, struct td__roster_node *node)
{
    node->id = read_int(reader, -1, INT_MAX);
    node->node_rank = read_int(reader, -1, MOST_NODES);
    node->rank = read_int(reader, 0, INT_MAX / 2);
    node->nproc = read_int(reader, 1, MOST_WORKERS);
    node->spares = read_int(reader, 0, MOST_WORKERS);
    node->adoptions = read_int(reader, 0, TD__ADOPTED);
    for (int i = 0; !reader->failed && i < node->adoptions; i++)
        node->adopted[i] = read_int(reader, 0, INT_MAX / 2);
    node->pid = read_int(reader, 0, INT_MAX);
    node->port = read_int(reader, 0, 65535);
    read_text(reader, node->address, sizeof node->address);
    for (size_t i = 0; i < sizeof node->identity; i++)
        node->identity[i] = td__reader_u8(reader);
    node->store_number = td__reader_u32(reader);
    node->store_port = read_int(reader, 0, 65535);
    read_text(reader, node->host, sizeof node->host);
    read_text(reader, node->role, sizeof node->role);
}

void td__roster_put(struct td__buffer *buffer, const struct td__roster *roster)
{
    put_int(buffer, roster->version);
    put_int(buffer, roster->round);
    put_int(buffer, roster->restarts);
    put_int(buffer, roster->coordinator);
    put_text(buffer, roster->store_address, sizeof roster->store_address);
    put_int(buffer, roster->store_port);
    td__buffer_put_u64(buffer, roster->store_term);
    td__buffer_put_u32(buffer, roster->store_number);
    put_int(buffer, roster->count);
    for (int i = 0; i < roster->count; i++)
        put_node(buffer, &roster->at[i]);
}

bool td__roster_take(struct td__reader *reader, struct td__roster *roster)
{
    struct td__roster taken = {.version = read_int(reader, 0, INT_MAX)};
    taken.round = read_int(reader, 0, INT_MAX);
    taken.restarts = read_int(reader, 0, INT_MAX);
    taken.coordinator = read_int(reader, 0, INT_MAX);
    read_text(reader, taken.store_address, sizeof taken.store_address);
    taken.store_port = read_int(reader, 0, 65535);
    taken.store_term = td__reader_u64(reader);
    taken.store_number = td__reader_u32(reader);
    taken.count = read_int(reader, 0, MOST_NODES);
    if (reader->failed)
        return false;
    taken.at = calloc((size_t)taken.count + 1, sizeof *taken.at);
    for (int i = 0; taken.at && i < taken.count && !reader->failed; i++)
        read_node(reader, &taken.at[i]);
    if (!taken.at || reader->failed) {
        free(taken.at);
        return false;
    }
    td__roster_free(roster);
    *roster = taken;
    return true;
}

void td__roster_free(struct td__roster *roster)
{
    free(roster->at);
    *roster = (struct td__roster){0};
}

const struct td__roster_node *td__roster_find(const struct td__roster *roster, int id)
{
    for (int i = 0; i < roster->count; i++)
        if (roster->at[i].id == id)
            return &roster->at[i];
    return NULL;
}

const struct td__roster_node *td__roster_find_store(const struct td__roster *roster,
                                                    uint32_t number)
{
    for (int i = 0; i < roster->count; i++)
        if (roster->at[i].store_port && roster->at[i].store_number == number)
            return &roster->at[i];
    return NULL;
}

bool td__roster_is_standby(const struct td__roster *roster, const struct td__roster_node *node)
{
    int before = 0;
    for (int i = 0; i < roster->count; i++) {
        const struct td__roster_node *other = &roster->at[i];
        if (other == node)
            return node->store_port && node->store_number != roster->store_number &&
                   before < TD__STANDBYS;
        before += other->store_port && other->store_number != roster->store_number;
    }
    return false;
}

void td__roster_world(const struct td__roster *roster, int id, struct td__node_world *world)
{
    const struct td__roster_node *own = td__roster_find(roster, id);
    *world = (struct td__node_world){
        .node_id = id,
        .node_rank = own->node_rank,
        .nodes = roster->count,
        .rank = own->rank,
        .port = roster->store_port,
        .round = roster->round,
        .restarts = roster->restarts,
    };
    snprintf(world->address, sizeof world->address, "%s", roster->store_address);
    for (int i = 0; i < roster->count; i++) {
        const struct td__roster_node *node = &roster->at[i];
        char address[128];
        if (!td__roster_is_standby(roster, node) || !node->address[0])
            continue;
        td__endpoint_text(node->address, node->store_port, address, sizeof address);
        td__text_add(world->standbys, sizeof world->standbys, "%s%s",
                     world->standbys[0] ? "," : "", address);
    }
    for (int i = 0; i < roster->count; i++) {
        const struct td__roster_node *node = &roster->at[i];
        bool same_role = !strcmp(node->role, own->role);
        if (node->rank < own->rank)
            world->role_rank += same_role ? node->nproc : 0;
        world->role_size += same_role ? node->nproc + node->adoptions : 0;
        if (node->rank + node->nproc > world->size)
            world->size = node->rank + node->nproc;
        for (int k = 0; k < node->adoptions; k++)
            if (node->adopted[k] >= world->size)
                world->size = node->adopted[k] + 1;
    }
}

bool td__roster_has_quorum(const struct td__roster *roster, const uint8_t *lost)
{
    int counted = 0, here = 0;
    bool lowest_here = false;
    for (int i = 0; i < roster->count; i++) {
        if (lost[i] == 2)
            continue;
        if (!counted++)
            lowest_here = !lost[i];
        here += !lost[i];
    }
    return 2 * here > counted || (2 * here == counted && lowest_here);
}

/* ---- Messages -------------------------------------------------------------------------------- */

void td__store_copy_put(struct td__buffer *buffer, const struct td__store_copy *copy)
{
    td__buffer_put_u32(buffer, copy->number);
    td__buffer_put_u8(buffer, copy->primary);
    td__buffer_put_u8(buffer, copy->whole);
    td__buffer_put_u64(buffer, copy->term);
    td__buffer_put_u64(buffer, copy->copy_term);
    td__buffer_put_u64(buffer, copy->copy_version);
}

void td__store_copy_read(struct td__reader *reader, struct td__store_copy *copy)
{
    copy->number = td__reader_u32(reader);
    copy->primary = td__reader_u8(reader);
    copy->whole = td__reader_u8(reader);
    copy->term = td__reader_u64(reader);
    copy->copy_term = td__reader_u64(reader);
    copy->copy_version = td__reader_u64(reader);
}

void td__report_put(struct td__buffer *buffer, const struct td__report *report)
{
    put_int(buffer, report->node);
    put_int(buffer, report->round);
    put_int(buffer, report->code);
    put_text(buffer, report->text, sizeof report->text);
}

bool td__report_read(struct td__span span, struct td__report *report)
{
    struct td__reader reader = td__reader_of(span.data, span.size);
    report->node = (int)td__reader_u32(&reader);
    report->round = (int)td__reader_u32(&reader);
    report->code = (int)td__reader_u32(&reader);
    read_text(&reader, report->text, sizeof report->text);
    return td__reader_done(&reader);
}

void td__introduction_put(struct td__buffer *buffer, const struct td__introduction *introduction)
{
    /* The version first: another one may go on differently. */
    put_text(buffer, introduction->version, sizeof introduction->version);
    put_text(buffer, introduction->node.host, sizeof introduction->node.host);
    put_int(buffer, introduction->nnodes);
    put_int(buffer, introduction->min_nodes);
    put_int(buffer, introduction->max_restarts);
    put_int(buffer, introduction->on_failure);
    put_int(buffer, introduction->wanted_rank);
    put_text(buffer, introduction->run_id, sizeof introduction->run_id);
    put_int(buffer, introduction->round_gone);
    td__store_copy_put(buffer, &introduction->copy);
    put_node(buffer, &introduction->node);
}

bool td__introduction_read(struct td__reader *reader, struct td__introduction *introduction)
{
    *introduction = (struct td__introduction){0};
    read_text(reader, introduction->version, sizeof introduction->version);
    read_text(reader, introduction->node.host, sizeof introduction->node.host);
    if (reader->failed)
        return false;
    if (strcmp(introduction->version, td__job_version) != 0)
        return true; /* td__introduction_check() says the rest */
    introduction->nnodes = read_int(reader, 1, MOST_NODES);
    introduction->min_nodes = read_int(reader, 1, introduction->nnodes);
    introduction->max_restarts = read_int(reader, 0, INT_MAX);
    introduction->on_failure = read_int(reader, 0, TD__SHRINK);
    introduction->wanted_rank = read_int(reader, -1, MOST_NODES);
    read_text(reader, introduction->run_id, sizeof introduction->run_id);
    introduction->round_gone = read_int(reader, -1, INT_MAX);
    td__store_copy_read(reader, &introduction->copy);
    read_node(reader, &introduction->node);
    return !reader->failed;
}

td_status td__introduction_check(const struct td__introduction *node, int node_rank,
                                 const struct td__introduction *first)
{
    const char *flag = node->nnodes != first->nnodes || node->min_nodes != first->min_nodes
                           ? "--nnodes"
                       : node->max_restarts != first->max_restarts ? "--max-restarts"
                       : node->on_failure != first->on_failure     ? "--on-failure"
                       : strcmp(node->run_id, first->run_id)       ? "--rdzv-id"
                                                                   : NULL;
    if (strcmp(node->version, first->version) != 0)
        return td_fail(TD_ERR_MISMATCH,
                       "node 0 (on %s) has Tandem %s, node %d (on %s) has %s: install the same "
                       "version on all nodes",
                       first->node.host, first->version, node_rank, node->node.host, node->version);
    if (!flag)
        return TD_OK;
    return td_fail(TD_ERR_MISMATCH,
                   "%s must be the same on all nodes, but differs between node 0 (on %s) and node "
                   "%d (on %s)",
                   flag, first->node.host, node_rank, node->node.host);
}
