/* The nodes meet in the job's store, at the port and with the secret that the job would have. Keys, all below
 * "\1doctor/", for the nodes r:
 *
 *     who/<r>     the hosts of the processes that claim to be node r
 *     next        how many have come, where nodes are numbered as they arrive
 *     node/<r>    what node r has published about itself
 *     present     a byte for each node: whether it has come in time. Node 0 decides
 *     links/<r>   how node r's connections to the others went
 *
 * Everything read from the store is checked: lengths are bounded, and control characters are not printed. */
#include "doctor_internal.h"

#include "base/fail.h"
#include "base/host.h"
#include "launch/node.h"
#include "store/store_ops.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KEY "\1doctor/"

enum {
    MAGIC = 0x74646401, /* of records and links; another version has another one */
    MOST_FACTS = 64,
    MOST_FAILED = 64,
    TEXT_LIMIT = 2048,
    SLACK_MS = 10000,
};

/* ---- What a node publishes ------------------------------------------------------------------------ */

static void put_text(struct td__buffer *buffer, const char *text)
{
    td__buffer_put_string(buffer, text, strlen(text));
}

static void take_text(struct td__reader *reader, char *text, size_t room)
{
    struct td__span span = td__reader_string(reader, TEXT_LIMIT);
    snprintf(text, room, "%.*s", (int)span.size, span.size ? span.data : "");
    for (char *at = text; *at; at++)
        *at = (unsigned char)*at < ' ' || *at == 0x7f ? '?' : *at;
}

static uint32_t count_strings(const struct td__buffer *buffer)
{
    struct td__reader reader = td__reader_of(buffer->data, buffer->size);
    uint32_t count = 0;
    for (; !td__reader_done(&reader) && !reader.failed; count++)
        td__reader_string(&reader, SIZE_MAX);
    return count;
}

static void put_record(struct td__buffer *buffer, const struct doctor_node *own,
                       const struct doctor_findings *findings)
{
    td__buffer_put_u32(buffer, MAGIC);
    put_text(buffer, own->host);
    put_text(buffer, own->address);
    td__buffer_put_u32(buffer, (uint32_t)own->port);
    td__buffer_put(buffer, own->identity, sizeof own->identity);
    td__buffer_put_u32(buffer, count_strings(&findings->facts) / 2);
    td__buffer_put(buffer, findings->facts.data, findings->facts.size);
    td__buffer_put_u32(buffer, count_strings(&findings->failed));
    td__buffer_put(buffer, findings->failed.data, findings->failed.size);
    buffer->failed = buffer->failed || findings->facts.failed || findings->failed.failed;
}

static bool take_lists(struct td__reader *reader, struct doctor_node *node)
{
    uint32_t count = td__reader_u32(reader);
    if (count > MOST_FACTS || !(node->facts = calloc(count + 1, sizeof *node->facts)))
        return false;
    for (; node->fact_count < (int)count; node->fact_count++) {
        take_text(reader, node->facts[node->fact_count].name, DOCTOR_NAME);
        take_text(reader, node->facts[node->fact_count].value, DOCTOR_VALUE);
    }
    count = td__reader_u32(reader);
    if (count > MOST_FAILED || !(node->failed = calloc(count + 1, sizeof *node->failed)))
        return false;
    for (; node->failed_count < (int)count; node->failed_count++) {
        char text[TEXT_LIMIT];
        take_text(reader, text, sizeof text);
        if (!(node->failed[node->failed_count] = strdup(text)))
            return false;
    }
    return td__reader_done(reader);
}

static bool take_record(const td_bytes *value, struct doctor_node *node)
{
    struct td__reader reader = td__reader_of(value->data, value->size);
    if (td__reader_u32(&reader) != MAGIC)
        return false;
    take_text(&reader, node->host, sizeof node->host);
    take_text(&reader, node->address, sizeof node->address);
    node->port = (int)td__reader_u32(&reader);
    for (size_t i = 0; i < sizeof node->identity; i++)
        node->identity[i] = td__reader_u8(&reader);
    return take_lists(&reader, node);
}

static void put_links(struct td__buffer *buffer, const struct doctor_link *links, int size)
{
    td__buffer_put_u32(buffer, MAGIC);
    for (int r = 0; r < size; r++) {
        td__buffer_put_u8(buffer, (uint8_t)links[r].state);
        td__buffer_put_u64(buffer, (uint64_t)links[r].round_trip_ns);
        td__buffer_put_u64(buffer, (uint64_t)links[r].clock_ns);
        put_text(buffer, links[r].reason ? links[r].reason : "");
    }
}

static bool take_links(const td_bytes *value, struct doctor_link *links, int size)
{
    struct td__reader reader = td__reader_of(value->data, value->size);
    bool known = td__reader_u32(&reader) == MAGIC;
    for (int r = 0; r < size; r++) {
        uint8_t state = td__reader_u8(&reader);
        known = known && state <= DOCTOR_BROKEN;
        links[r].state = state;
        links[r].round_trip_ns = (int64_t)td__reader_u64(&reader);
        links[r].clock_ns = (int64_t)td__reader_u64(&reader);
        char reason[DOCTOR_VALUE];
        take_text(&reader, reason, sizeof reason);
        free(links[r].reason); /* this node's own come back, too */
        links[r].reason = *reason ? strdup(reason) : NULL;
    }
    return known && td__reader_done(&reader);
}

/* ---- Meeting -------------------------------------------------------------------------------------- */

static const char *key_of(char key[64], const char *kind, int rank)
{
    snprintf(key, 64, KEY "%s/%d", kind, rank);
    return key;
}

/* Takes this node's number. Two processes with one number are the mistake of a copied command line. */
static td_status claim(struct doctor_job *job)
{
    char key[64];
    int64_t count;
    td_bytes who;
    if (job->rank < 0) {
        TD_TRY(td_store_add(job->store, KEY "next", 1, &count));
        if (count >= job->size)
            return td_fail(TD_ERR_MISMATCH, "the job has all of its %d nodes already", job->size);
        job->rank = (int)count;
    }
    key_of(key, "who", job->rank);
    char mine[DOCTOR_NAME * 4 + 4];
    snprintf(mine, sizeof mine, "%s ", td__this_host(job->options));
    TD_TRY(td_store_append(job->store, key, mine, strlen(mine)));
    TD_TRY(td_store_get(job->store, key, SLACK_MS, &who));
    struct td__reader reader = td__reader_of(who.data, who.size);
    bool twin = who.size > strlen(mine);
    char other[DOCTOR_NAME * 4] = "";
    for (size_t i = 0; i < who.size && i < sizeof other - 1; i++) {
        char c = (char)td__reader_u8(&reader);
        if (c == ' ')
            break;
        other[i] = (unsigned char)c < ' ' || c == 0x7f ? '?' : c;
    }
    td_bytes_free(&who);
    if (twin && job->rank)
        return td_fail(TD_ERR_MISMATCH,
                       "--node-rank %d was given twice, on %s and on %s: the nodes are numbered "
                       "from 0 to %d",
                       job->rank, other, td__this_host(job->options), job->size - 1);
    return TD_OK;
}

/* Reads the records of those that have come; true when that is all of them. */
static td_status look_for_nodes(struct doctor_job *job, int *missing)
{
    *missing = 0;
    for (int r = 0; r < job->size; r++) {
        struct doctor_node *node = &job->nodes[r];
        char key[64];
        td_bytes value;
        bool found;
        if (node->present)
            continue;
        TD_TRY(td__store_look_up(job->store, key_of(key, "node", r), &value, &found));
        *missing += !found;
        if (!found)
            continue;
        node->present = true;
        if (r != job->rank)
            node->readable = take_record(&value, node);
        td_bytes_free(&value);
    }
    return TD_OK;
}

/* Node 0 waits for the others, and publishes which of them have come. */
static td_status await_nodes(struct doctor_job *job)
{
    td__deadline deadline = td__deadline_in_ms((int64_t)(job->timeout_s * 1000));
    int64_t pause = 1000000;
    int missing;
    do {
        TD_TRY(look_for_nodes(job, &missing));
    } while (missing && td__pause_longer(&pause, 100000000, deadline));
    char *present = malloc((size_t)job->size);
    if (!present)
        return td__fail_nomem("doctor");
    for (int r = 0; r < job->size; r++)
        present[r] = job->nodes[r].present;
    td_status status = td_store_set(job->store, KEY "present", present, (size_t)job->size);
    free(present);
    return status;
}

/* The others take node 0's word for it. */
static td_status learn_nodes(struct doctor_job *job)
{
    td_bytes present;
    int missing;
    TD_TRY(td_store_get(job->store, KEY "present", (int64_t)(job->timeout_s * 1000) + SLACK_MS,
                        &present));
    td_status status = look_for_nodes(job, &missing);
    if (!status && present.size != (size_t)job->size)
        status = td_fail(TD_ERR_MISMATCH,
                         "--nnodes is %d here, and %zu on node 0: it must be the same on all nodes",
                         job->size, present.size);
    for (int r = 0; !status && r < job->size; r++)
        job->nodes[r].present = job->nodes[r].present && ((const char *)present.data)[r];
    if (!status && !job->nodes[job->rank].present)
        status = td_fail(TD_ERR_TIMEOUT, "this node came when node 0 did not wait any more");
    td_bytes_free(&present);
    return status;
}

static td_status exchange_links(struct doctor_job *job)
{
    char key[64];
    struct td__buffer links = {0};
    td__deadline deadline = td__deadline_in_ms(doctor_connect_ms(job->size) + SLACK_MS);
    put_links(&links, job->nodes[job->rank].links, job->size);
    td_status status = links.failed ? td__fail_nomem("doctor")
                                    : td_store_set(job->store, key_of(key, "links", job->rank),
                                                   links.data, links.size);
    td__buffer_free(&links);
    for (int r = 0; !status && r < job->size; r++) {
        struct doctor_node *node = &job->nodes[r];
        td_bytes value;
        if (!node->present)
            continue;
        int left = td__deadline_poll_ms(deadline);
        status = td_store_get(job->store, key_of(key, "links", r), left > 0 ? left : 1, &value);
        if (status == TD_ERR_TIMEOUT) { /* doctor_compare() names it */
            status = TD_OK;
            continue;
        }
        if (status)
            break;
        node->reported = take_links(&value, node->links, job->size);
        td_bytes_free(&value);
    }
    return status;
}

static td_status publish(struct doctor_job *job, const struct doctor_findings *findings)
{
    struct td__buffer record = {0};
    char key[64];
    struct doctor_node *own = &job->nodes[job->rank];
    put_record(&record, own, findings);
    td_bytes copy = {.data = (char *)record.data, .size = record.size};
    td_status status = record.failed ? td__fail_nomem("doctor")
                                     : td_store_set(job->store, key_of(key, "node", job->rank),
                                                    record.data, record.size);
    /* Its facts come back as the other nodes read them. */
    own->readable = !status && take_record(&copy, own);
    td__buffer_free(&record);
    return status;
}

/* Says that no links of this node will follow. */
static void leave_early(struct doctor_job *job)
{
    char key[64], error[TD__ERROR_TEXT];
    td_status status = td_last_status();
    snprintf(error, sizeof error, "%s", td__error_text());
    td_store_set(job->store, key_of(key, "links", job->rank), "", 0);
    td_fail(status, "%s", error);
}

static td_status meet(struct doctor_job *job, struct doctor_findings *findings)
{
    struct doctor_listener *listener;
    struct doctor_node *own = &job->nodes[job->rank];
    char address[64];
    snprintf(own->host, sizeof own->host, "%s", td__this_host(job->options));
    setenv("MASTER_ADDR", job->options->host, 1); /* as the ranks of a job have it */
    td__own_address(job->store, address);
    snprintf(own->address, sizeof own->address, "%s", address);
    doctor_fact(findings, "MTU", "%d", doctor_mtu(own->address));
    TD_TRY(doctor_listen(own->address, own, &listener));
    char key[64];
    td_status status = publish(job, findings);
    if (!status) /* where this process is killed, the store sets the key */
        status = td__tcp_store_set_will(job->store, key_of(key, "links", job->rank), "", 0);
    if (!status)
        status = job->rank ? learn_nodes(job) : await_nodes(job);
    if (!status)
        doctor_connect(job);
    if (!status)
        status = exchange_links(job);
    else /* its own error counts; those that wait for this node need not */
        leave_early(job);
    doctor_listener_close(listener);
    return status;
}

/* ---- All of it -------------------------------------------------------------------------------------- */

static bool make_nodes(struct doctor_job *job)
{
    job->nodes = calloc((size_t)job->size, sizeof *job->nodes);
    for (int r = 0; job->nodes && r < job->size; r++)
        if (!(job->nodes[r].links = calloc((size_t)job->size, sizeof(struct doctor_link))))
            return false;
    return job->nodes != NULL;
}

static void free_nodes(struct doctor_job *job)
{
    for (int r = 0; job->nodes && r < job->size; r++) {
        struct doctor_node *node = &job->nodes[r];
        for (int i = 0; i < node->failed_count; i++)
            free(node->failed[i]);
        for (int i = 0; node->links && i < job->size; i++)
            free(node->links[i].reason);
        free(node->failed);
        free(node->facts);
        free(node->links);
    }
    free(job->nodes);
}

void doctor_check_nodes(struct doctor_findings *findings, const struct td__run_options *options,
                        double timeout_s)
{
    struct td__job_secret secret;
    struct doctor_job job = {.options = options,
                             .timeout_s = timeout_s,
                             .rank = options->node_rank,
                             .size = options->nnodes};
    struct td__run_options patient = *options;
    patient.join_timeout_s = timeout_s;
    if (td__job_secret_find(options, &secret) || doctor_master_elsewhere(options))
        return; /* the checks of the machine have said so */
    if (td__job_store_open(&patient, &secret, &job.rank, &job.store)) {
        doctor_report(findings, DOCTOR_FAIL, "store", "%s", td__error_text());
        return;
    }
    td_status status = claim(&job);
    if (!status && job.rank >= 0)
        snprintf(findings->place, sizeof findings->place, "node %d (%s): ", job.rank,
                 td__this_host(options));
    if (!status)
        status = make_nodes(&job) ? meet(&job, findings) : td__fail_nomem("doctor");
    if (status)
        doctor_report(findings, DOCTOR_FAIL, "nodes", "%s", td__error_text());
    else
        doctor_compare(findings, &job);
    fflush(stdout);
    free_nodes(&job);
    td_store_close(job.store);
}
