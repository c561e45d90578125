/* Newcomers get the state before a step while the members compute it.
 *
 *     member       step's slices … reduce ─────────────┐                        ┌─ agreement ── commit
 *      its thread  ── state ──┐                         └─ outcome ──┐           │
 *     newcomer                └─ receives … loads ──────────────────┴─ receives ┴─ agreement ── commit
 *
 * Nothing of the state is written before the commit, so the thread of a member needs no copy. The newcomer waits in the
 * agreement like everyone, and everyone for it: when it is over, all have the same state. Each newcomer has one member, the
 * work is divided among these. Messages go over the group of all; those of one host are copied by the kernel or mapped. */
#include "base/fail.h"
#include "elastic/elastic_internal.h"
#include "group/process_group.h"
#include "tensor/tensor_internal.h"

#include <stdlib.h>

enum { STATE_TAG = 1, OUTCOME_TAG = 2 };

struct td__catch_up {
    td_elastic *elastic;
    bool sends, running; /* the thread of a member */
    pthread_t thread;
    int *targets, target_count; /* ranks of the world */
    int source;                 /* of a newcomer */
    struct td__buffer text;     /* describes the state */
    struct td__elastic_replica_pieces list;
    td_tensor **copies; /* of what is not the host's memory */
    int copy_count;
    td_status status; /* of the thread */
    struct td__error error;
    int64_t begin_ns;
};

/* ---- Messages --------------------------------------------------------------------------------------------------- */

static td_status send_text(td_elastic *elastic, const struct td__buffer *text, int to, int tag)
{
    uint64_t size = text->size;
    TD_TRY(td_group_send(&size, 1, TD_U64, to, tag, elastic->all, NULL));
    return td_group_send(text->data, text->size, TD_U8, to, tag, elastic->all, NULL);
}

static td_status receive_text(td_elastic *elastic, struct td__buffer *text, int from, int tag)
{
    uint64_t size;
    TD_TRY(td_group_recv(&size, 1, TD_U64, from, tag, elastic->all, NULL));
    if (size > (uint64_t)1 << 30 || !td__buffer_reserve(text, size))
        return td__fail_nomem("td_elastic: the description of a state");
    TD_TRY(td_group_recv(text->data, size, TD_U8, from, tag, elastic->all, NULL));
    text->size = size;
    return TD_OK;
}

static td_status send_piece(td_elastic *elastic, const struct td__elastic_replica_piece *piece,
                            int to, int tag)
{
    if (!piece->bytes)
        return TD_OK;
    if (!piece->tensor || td__on_host(piece->tensor))
        return td_group_send(piece->tensor ? td_tensor_data(piece->tensor) : piece->data,
                             piece->bytes, TD_U8, to, tag, elastic->all, NULL);
    TD_SCOPE;
    td_tensor *here = td_tensor_to(piece->tensor, td_device_get("cpu"));
    return here ? td_group_send(td_tensor_data(here), piece->bytes, TD_U8, to, tag, elastic->all,
                                NULL)
                : td__error_status();
}

static td_status receive_piece(td_elastic *elastic, const struct td__elastic_replica_piece *piece,
                               int from, int tag)
{
    TD_SCOPE;
    if (!piece->bytes)
        return TD_OK;
    if (!piece->tensor)
        return td_group_recv(piece->data, piece->bytes, TD_U8, from, tag, elastic->all, NULL);
    if (td__on_host(piece->tensor)) {
        TD_TRY(td__prepare_write(piece->tensor));
        TD_TRY(td_group_recv(td_tensor_data(piece->tensor), piece->bytes, TD_U8, from, tag,
                             elastic->all, NULL));
    } else {
        TD_NO_GRAD;
        td_tensor *here = td_tensor_to(piece->tensor, td_device_get("cpu")); /* of this shape */
        if (!here)
            return td__error_status();
        TD_TRY(td_group_recv(td_tensor_data(here), piece->bytes, TD_U8, from, tag, elastic->all,
                             NULL));
        TD_TRY(td__tensor_copy(piece->tensor, here));
    }
    td__tensor_bump_version(piece->tensor);
    return TD_OK;
}

static td_status receive_all(td_elastic *elastic, enum td__elastic_replica_part kind, int from,
                             int tag)
{
    struct td__elastic_replica *replica = elastic->replica;
    struct td__buffer text = {0};
    struct td__elastic_replica_pieces list = {0};
    td_status status = receive_text(elastic, &text, from, tag);
    if (!status) {
        struct td__reader reader = td__reader_of(text.data, text.size);
        status = replica->ops->take(replica, kind, &reader);
    }
    if (!status)
        status = replica->ops->list(replica, kind, &list);
    if (!status && kind == TD__PIECES_OUTCOME)
        status = td__pieces_add(&list, (struct td__elastic_replica_piece){
                                           .data = &elastic->loss, .bytes = sizeof elastic->loss});
    for (int i = 0; i < list.count && !status; i++)
        status = receive_piece(elastic, &list.pieces[i], from, tag);
    if (!status)
        status = replica->ops->filled(replica, kind);
    td__pieces_free(&list);
    td__buffer_free(&text);
    return status;
}

/* ---- Members --------------------------------------------------------------------------------------------------- */

static void *send_states(void *arg)
{
    struct td__catch_up *catch_up = arg;
    for (int t = 0; t < catch_up->target_count && !catch_up->status; t++) {
        int to = catch_up->targets[t];
        td_status status = send_text(catch_up->elastic, &catch_up->text, to, STATE_TAG);
        for (int i = 0; i < catch_up->list.count && !status; i++)
            status = send_piece(catch_up->elastic, &catch_up->list.pieces[i], to, STATE_TAG);
        catch_up->status = status;
        if (status)
            td__error_save(&catch_up->error);
    }
    return NULL;
}

/* What is in memory of devices is copied now, since the thread has no stream that would wait for theirs; and the buffers. */
static td_status copy_some(struct td__catch_up *catch_up)
{
    TD_NO_GRAD;
    catch_up->copies = calloc((size_t)catch_up->list.count + 1, sizeof(td_tensor *));
    if (!catch_up->copies)
        return td__fail_nomem("td_elastic");
    for (int i = 0; i < catch_up->list.count; i++) {
        struct td__elastic_replica_piece *piece = &catch_up->list.pieces[i];
        if (!piece->tensor || (td__on_host(piece->tensor) && !piece->moves))
            continue;
        TD_SCOPE;
        td_tensor *here = td__on_host(piece->tensor)
                              ? td_clone(piece->tensor)
                              : td_tensor_to(piece->tensor, td_device_get("cpu"));
        if (!here)
            return td__error_status();
        catch_up->copies[catch_up->copy_count++] = td_tensor_retain(here);
        piece->tensor = here;
    }
    return TD_OK;
}

static td_status begin_sending(struct td__catch_up *catch_up)
{
    struct td__elastic_replica *replica = catch_up->elastic->replica;
    TD_TRY(replica->ops->put(replica, TD__PIECES_STATE, &catch_up->text));
    TD_TRY(replica->ops->list(replica, TD__PIECES_STATE, &catch_up->list));
    TD_TRY(copy_some(catch_up));
    if (pthread_create(&catch_up->thread, NULL, send_states, catch_up))
        return td_fail(TD_ERR_SYSTEM, "td_elastic: no thread could be started");
    catch_up->running = true;
    return TD_OK;
}

static td_status finish_sending(struct td__catch_up *catch_up)
{
    td_elastic *elastic = catch_up->elastic;
    struct td__elastic_replica *replica = elastic->replica;
    pthread_join(catch_up->thread, NULL);
    catch_up->running = false;
    if (catch_up->status)
        return td__error_restore(&catch_up->error);
    struct td__buffer text = {0};
    struct td__elastic_replica_pieces list = {0};
    td_status status = replica->ops->put(replica, TD__PIECES_OUTCOME, &text);
    if (!status)
        status = replica->ops->list(replica, TD__PIECES_OUTCOME, &list);
    if (!status)
        status = td__pieces_add(&list, (struct td__elastic_replica_piece){
                                           .data = &elastic->loss, .bytes = sizeof elastic->loss});
    for (int t = 0; t < catch_up->target_count && !status; t++) {
        int to = catch_up->targets[t];
        status = send_text(elastic, &text, to, OUTCOME_TAG);
        for (int i = 0; i < list.count && !status; i++)
            status = send_piece(elastic, &list.pieces[i], to, OUTCOME_TAG);
    }
    td__pieces_free(&list);
    td__buffer_free(&text);
    return status;
}

/* ---- Both ------------------------------------------------------------------------------------------------------ */

/* Newcomer i gets the state from member i, or from the one that has its turn then. */
static td_status assign(struct td__catch_up *catch_up)
{
    td_elastic *elastic = catch_up->elastic;
    int *members = malloc((size_t)elastic->size * sizeof *members), count = 0, turn = 0;
    catch_up->targets = malloc((size_t)elastic->size * sizeof *catch_up->targets);
    if (!members || !catch_up->targets) {
        free(members);
        return td__fail_nomem("td_elastic");
    }
    for (int r = 0; r < elastic->size; r++)
        if (elastic->active_ranks[r])
            members[count++] = r;
    for (int r = 0; r < elastic->size; r++) {
        if (elastic->active_ranks[r])
            continue;
        int member = members[turn++ % count];
        if (r == elastic->rank)
            catch_up->source = elastic->ranks[member];
        if (member == elastic->rank)
            catch_up->targets[catch_up->target_count++] = elastic->ranks[r];
    }
    catch_up->sends = catch_up->target_count > 0;
    free(members);
    return TD_OK;
}

td_status td__catch_up_begin(td_elastic *elastic)
{
    if (elastic->active_size == elastic->size)
        return TD_OK;
    struct td__catch_up *catch_up = calloc(1, sizeof *catch_up);
    if (!catch_up)
        return td__fail_nomem("td_elastic");
    catch_up->elastic = elastic;
    catch_up->begin_ns = td__now_ns();
    elastic->catch_up = catch_up;
    TD_TRY(assign(catch_up));
    if (!elastic->established)
        return receive_all(elastic, TD__PIECES_STATE, catch_up->source, STATE_TAG);
    return catch_up->sends ? begin_sending(catch_up) : TD_OK;
}

td_status td__catch_up_finish(td_elastic *elastic)
{
    struct td__catch_up *catch_up = elastic->catch_up;
    if (!catch_up)
        return TD_OK;
    if (catch_up->sends)
        return finish_sending(catch_up);
    if (elastic->established)
        return TD_OK;
    TD_TRY(receive_all(elastic, TD__PIECES_OUTCOME, catch_up->source, OUTCOME_TAG));
    pthread_mutex_lock(&elastic->lock);
    elastic->stats.catch_up_ms = (double)(td__now_ns() - catch_up->begin_ns) / 1e6;
    pthread_mutex_unlock(&elastic->lock);
    return TD_OK;
}

void td__catch_up_end(td_elastic *elastic)
{
    struct td__catch_up *catch_up = elastic->catch_up;
    if (!catch_up)
        return;
    if (catch_up->running)
        pthread_join(catch_up->thread, NULL);
    for (int i = 0; i < catch_up->copy_count; i++)
        td_tensor_release(catch_up->copies[i]);
    free(catch_up->copies);
    td__pieces_free(&catch_up->list);
    td__buffer_free(&catch_up->text);
    free(catch_up->targets);
    free(catch_up);
    elastic->catch_up = NULL;
}
