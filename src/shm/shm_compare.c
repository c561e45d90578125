/* Whether all members of a comm make the same calls; see shm_comm.h.
 *
 * Every call writes a fingerprint to the cell of its rank: one word with everything that must match. A rank that
 * waits for another one compares the fingerprints of all calls since the last comparison. A rank that only
 * sends does not wait; its calls are compared by the next call that waits, before their announcements are
 * reused, or when it leaves. */
#include "shm/shm_comm.h"

#include "base/fail.h"
#include "base/text.h"

/* Bits of a fingerprint: kind, dtype and reduce op (4 each), root (12), count (39), and DETAILED: cell->details
 * must match too. An all_to_all with uneven parts has different counts on each rank, and the kind UNEVEN. */
enum { UNEVEN = TD__COLLECTIVES, OWN_OPERATION = 15, NO_ROOT = 4095 };

#define DETAILED ((uint64_t)1 << 63)

/* The number of the user's reduce op, and call.detail: a hash of uneven counts, for example. */
static uint64_t details_of(const struct td__operation *operation)
{
    return (uint64_t)operation->reduction.number << 32 | operation->call.detail;
}

static uint64_t fingerprint_of(const struct td__operation *operation)
{
    const struct td__reduction *reduction = &operation->reduction;
    uint64_t kind = td__shm_exchanges_counts(operation) ? UNEVEN : operation->call.kind;
    uint64_t op = reduction->user ? OWN_OPERATION : reduction->op;
    uint64_t root = operation->called_root < 0 ? NO_ROOT
                                               : (uint64_t)operation->called_root % NO_ROOT;
    return kind | (uint64_t)reduction->dtype << 4 | op << 8 | root << 12 |
           (uint64_t)operation->call.count << 25 >> 1 | (details_of(operation) ? DETAILED : 0);
}

static size_t *counts_of(const struct td__shm_comm *comm, int index, uint64_t call)
{
    return comm->cells[index].counts[call % TD__SHM_ANNOUNCEMENTS];
}

static uint64_t *detail_of(const struct td__shm_comm *comm, int index, uint64_t call)
{
    return &comm->cells[index].details[call % TD__SHM_ANNOUNCEMENTS];
}

void td__shm_record_call(struct td__shm_comm *comm, const struct td__operation *operation)
{
    uint64_t fingerprint = fingerprint_of(operation);
    comm->sequence = operation->call.sequence;
    td__shm_announcement(comm, comm->index)->fingerprint = fingerprint;
    if (fingerprint & DETAILED)
        *detail_of(comm, comm->index, comm->call) = details_of(operation);
    if (td__operation_uneven(operation))
        for (int i = 0; i < operation->parts && i < TD__NAMED_COUNTS; i++)
            counts_of(comm, comm->index, comm->call)[i] = operation->call.input_counts[i];
}

enum { CALL_TEXT = 160 + TD__COUNTS_TEXT };

static uint64_t announced_details(struct td__shm_comm *comm, int index, uint64_t call)
{
    uint64_t fingerprint = td__shm_announcement_of(comm, index, call)->fingerprint;
    return fingerprint & DETAILED ? *detail_of(comm, index, call) : 0;
}

/* Describes a call of `index`, with the counts of uneven parts. */
static void describe_call(struct td__shm_comm *comm, int index, uint64_t call, int parts,
                          char text[CALL_TEXT])
{
    uint64_t fingerprint = td__shm_announcement_of(comm, index, call)->fingerprint;
    uint64_t details = announced_details(comm, index, call);
    unsigned kind = fingerprint & 15, dtype = fingerprint >> 4 & 15, op = fingerprint >> 8 & 15;
    unsigned root = fingerprint >> 12 & 4095;
    bool reduces = kind == TD_OP_REDUCE || kind == TD_OP_ALL_REDUCE || kind == TD_OP_REDUCE_SCATTER;
    char detail[64], counts[TD__COUNTS_TEXT];
    text[0] = 0;
    td__text_add(text, CALL_TEXT, "%s",
                 kind == UNEVEN           ? "all_to_all with uneven parts"
                 : kind < TD__COLLECTIVES ? td_op_kind_name((td_op_kind)kind)
                                          : "something else");
    if (kind != UNEVEN && kind != TD_OP_BARRIER)
        td__text_add(text, CALL_TEXT, " of %llu %s",
                     (unsigned long long)((fingerprint & ~DETAILED) >> 24),
                     td_dtype_name((td_dtype)dtype));
    if (reduces && op == OWN_OPERATION)
        td__text_add(text, CALL_TEXT, ", its own operation no. %u", (unsigned)(details >> 32));
    else if (reduces)
        td__text_add(text, CALL_TEXT, ", %s", td_reduce_op_name((td_reduce_op)op));
    if (root != NO_ROOT)
        td__text_add(text, CALL_TEXT, ", root %u", root);
    td__text_add(text, CALL_TEXT, "%s", td__detail_text((uint32_t)details, detail));
    if (details & TD__DETAIL_UNEVEN && !(details & TD__DETAIL_LIST))
        td__text_add(text, CALL_TEXT, " with counts %s",
                     td__counts_text(counts_of(comm, index, call), parts, counts));
}

static td_status fail_mismatch(struct td__shm_comm *comm, const struct td__operation *operation,
                               uint64_t call, int index)
{
    char ours[CALL_TEXT], theirs[CALL_TEXT];
    uint32_t own = (uint32_t)announced_details(comm, comm->index, call);
    uint32_t other = (uint32_t)announced_details(comm, index, call);
    describe_call(comm, comm->index, call, operation->parts, ours);
    describe_call(comm, index, call, operation->parts, theirs);
    return td__shm_fail(
        comm, TD_ERR_MISMATCH,
        "call #%llu on group \"%s\": rank %d called %s%s, rank %d called %s%s; %s",
        (unsigned long long)(operation->call.sequence - (comm->call - call)), operation->group,
        comm->world_ranks[comm->index], ours, td__place_text(own, other), comm->world_ranks[index],
        theirs, td__place_text(other, own),
        td__remedy_text(own, other, "every rank must make the same calls in the same order"));
}

/* A fingerprint stays for TD__SHM_ANNOUNCEMENTS calls, and no rank is further ahead than half of that. */
td_status td__shm_compare(struct td__shm_comm *comm, const struct td__operation *operation,
                          int index, uint64_t call)
{
    for (uint64_t c = comm->agreed + 1; c <= call; c++) {
        uint64_t fingerprint = td__shm_announcement_of(comm, comm->index, c)->fingerprint;
        if (td__shm_announcement_of(comm, index, c)->fingerprint != fingerprint ||
            (fingerprint & DETAILED &&
             *detail_of(comm, index, c) != *detail_of(comm, comm->index, c)))
            return fail_mismatch(comm, operation, c, index);
    }
    return TD_OK;
}

/* ---- Before leaving -------------------------------------------------------------------------- */

/* The last call that `index` has begun, up to this rank's last one. */
static uint64_t last_call(const struct td__shm_comm *comm, int index)
{
    uint64_t call = comm->agreed;
    while (call < comm->call &&
           atomic_load_explicit(&td__shm_announcement_of(comm, index, call + 1)->progress,
                                memory_order_acquire) >= td__shm_progress(call + 1, 1))
        call++;
    return call;
}

/* Whether each member has begun this rank's last call, or is lost. */
static bool is_settled(struct td__shm_comm *comm)
{
    for (int i = 0; i < comm->size; i++)
        if (i != comm->index && last_call(comm, i) < comm->call && td__shm_find_lost(comm, i) < 0)
            return false;
    return true;
}

td_status td__shm_verify(struct td__shm_comm *comm, const char *group, td__deadline deadline)
{
    if (!atomic_load(&comm->attached) || comm->agreed == comm->call)
        return td__shm_state(comm);
    struct td__operation operation = {.call.kind = TD_OP_BARRIER,
                                      .call.sequence = comm->sequence,
                                      .group = group,
                                      .parts = comm->size};
    struct td__waiting waiting;
    td__waiting_begin(&waiting, &comm->cells[comm->index].event, comm->oversubscribed, deadline);
    waiting.sleepers = &comm->head->sleepers;
    while (!is_settled(comm) && !td__shm_is_broken(comm) && td__waiting_step(&waiting))
        ;
    td__waiting_end(&waiting);
    for (int i = 0; i < comm->size; i++)
        if (i != comm->index && !td__shm_is_broken(comm))
            TD_TRY(td__shm_compare(comm, &operation, i, last_call(comm, i)));
    return td__shm_state(comm);
}
