/* Staged collectives; see staging.h.
 *
 * Piece p consists of the elements p * width to (p + 1) * width of every part of the buffers, so that a call in place is
 * one in place for each piece, and uneven parts end in different pieces. The host's memory of a piece is one of
 * BUFFERS slots. Two streams copy:
 *
 *     copies        piece p + 1 from the device    -> `ready`
 *     the call's    piece p - 1 to the device      -> `done`
 *
 * The host waits for `ready` before it runs a piece, and for `done` before it uses the slot again. */
#include "staging/staging.h"

#include "base/fail.h"
#include "device/device_internal.h"

#include <stdlib.h>

enum { BUFFERS = 3, PART_BYTES_LEAST = 16 << 10 };

/* The input or the output of this rank. */
struct staged_side {
    char *data;
    bool used;
    int parts;
    const size_t *counts; /* of the parts; NULL: each has `count` */
    size_t count;
    size_t *piece; /* counts of the parts of the present piece */
};

struct staged_slot {
    char *input, *output; /* the same where the call is one in place */
    void *input_pinned, *output_pinned;
    td_event *ready, *done;
};

struct td__staged_call {
    const struct td__operation *operation;
    td_device *device;
    td_stream *from, *to;
    size_t element, width; /* bytes; elements of a part in a piece */
    size_t pieces;
    struct staged_side input, output;
    int slots;
    struct staged_slot slot[BUFFERS];
    bool copying; /* what is enqueued on `from` may not have run */
};

uint32_t td__staged_detail(const td_call *call)
{
    uint64_t hash = ((uint64_t)call->count ^ (uint64_t)call->detail << 32) * 0x9e3779b97f4a7c15u;
    return (uint32_t)(hash >> 35) | TD__DETAIL_STAGED;
}

/* ---- The sides of a call ---------------------------------------------------------------------------- */

static bool has_one_part(td_op_kind kind)
{
    return kind == TD_OP_BROADCAST || kind == TD_OP_REDUCE || kind == TD_OP_ALL_REDUCE;
}

static bool gives_parts(td_op_kind kind)
{
    return kind == TD_OP_SCATTER || kind == TD_OP_REDUCE_SCATTER || kind == TD_OP_ALL_TO_ALL;
}

static bool gets_parts(td_op_kind kind)
{
    return kind == TD_OP_GATHER || kind == TD_OP_ALL_GATHER || kind == TD_OP_ALL_TO_ALL;
}

static void set_sides(struct td__staged_call *stage, const td_group *group)
{
    const td_call *call = &stage->operation->call;
    td_op_kind kind = call->kind;
    bool is_root = call->root == group->rank, uneven = call->input_counts != NULL;
    size_t own = uneven && kind != TD_OP_ALL_TO_ALL ? call->input_counts[group->rank] : call->count;
    stage->input = (struct staged_side){
        .data = (char *)call->input,
        .used = is_root || (kind != TD_OP_BROADCAST && kind != TD_OP_SCATTER),
        .parts = gives_parts(kind) ? group->size : 1,
        .counts = gives_parts(kind) ? call->input_counts : NULL,
        .count = own,
    };
    stage->output = (struct staged_side){
        .data = call->output,
        .used = kind == TD_OP_BROADCAST ? !is_root
                                        : is_root || (kind != TD_OP_REDUCE && kind != TD_OP_GATHER),
        .parts = gets_parts(kind) ? group->size : 1,
        .counts = gets_parts(kind) ? call->output_counts : NULL,
        .count = own,
    };
}

static size_t part_count(const struct staged_side *side, int part)
{
    return side->counts ? side->counts[part] : side->count;
}

static size_t longest_part(const struct staged_side *side)
{
    return side->counts ? td__largest_count(side->counts, side->parts) : side->count;
}

/* Sets the counts of piece `number` of all parts; returns their sum. */
static size_t cut_piece(const struct td__staged_call *stage, struct staged_side *side,
                        size_t number)
{
    size_t start = number * stage->width, sum = 0;
    for (int i = 0; i < side->parts; i++) {
        size_t count = part_count(side, i), left = count > start ? count - start : 0;
        side->piece[i] = left < stage->width ? left : stage->width;
        sum += side->piece[i];
    }
    return sum;
}

/* ---- Copies ------------------------------------------------------------------------------------------ */

/* Copies a piece between the device and the host, on the stream. */
static td_status copy_piece(const struct td__staged_call *stage, struct staged_side *side,
                            size_t number, char *host, bool out)
{
    td_device *device = stage->device;
    const td_device_ops *ops = td__ops_of(device);
    size_t part_start = 0;
    cut_piece(stage, side, number);
    for (int i = 0; i < side->parts; i++) {
        size_t bytes = side->piece[i] * stage->element;
        char *data = side->data + (part_start + number * stage->width) * stage->element;
        part_start += part_count(side, i);
        if (bytes == 0)
            continue;
        TD_TRY(out ? ops->copy_out(device->self, stage->from->self, host, data, bytes, true)
                   : ops->copy_in(device->self, stage->to->self, data, host, bytes, true));
        host += bytes;
    }
    return TD_OK;
}

static td_status fetch_piece(struct td__staged_call *stage, size_t number)
{
    struct staged_slot *slot = &stage->slot[number % (size_t)stage->slots];
    stage->copying = true;
    TD_TRY(td__wait_for_event("staging", slot->done));
    if (stage->input.used)
        TD_TRY(copy_piece(stage, &stage->input, number, slot->input, true));
    return td_event_record(slot->ready, stage->from);
}

static td_status return_piece(struct td__staged_call *stage, size_t number)
{
    struct staged_slot *slot = &stage->slot[number % (size_t)stage->slots];
    if (!stage->output.used)
        return TD_OK;
    TD_TRY(copy_piece(stage, &stage->output, number, slot->output, false));
    return td_event_record(slot->done, stage->to);
}

/* ---- Pieces -------------------------------------------------------------------------------------------- */

static td_status run_piece(struct td__staged_call *stage, size_t number, td__run_piece_fn run,
                           void *arg)
{
    const struct staged_slot *slot = &stage->slot[number % (size_t)stage->slots];
    struct td__operation piece = *stage->operation;
    td_call *call = &piece.call;
    bool uneven = call->input_counts != NULL;
    size_t inputs = cut_piece(stage, &stage->input, number);
    size_t outputs = cut_piece(stage, &stage->output, number);
    bool shared = has_one_part(call->kind);
    call->device = NULL;
    call->stream = NULL;
    call->input = stage->input.used || call->kind == TD_OP_BROADCAST ? slot->input : NULL;
    call->output = stage->output.used || call->kind == TD_OP_BROADCAST
                       ? (shared ? slot->input : slot->output)
                       : NULL;
    if (uneven && call->kind == TD_OP_ALL_TO_ALL) {
        call->input_counts = stage->input.piece;
        call->output_counts = stage->output.piece;
    } else if (uneven) {
        call->count = inputs > outputs ? inputs : outputs; /* the sum of all parts */
        call->input_counts = call->output_counts = gives_parts(call->kind) ? stage->input.piece
                                                                           : stage->output.piece;
    } else {
        call->count = stage->input.piece[0];
    }
    return run(arg, &piece);
}

static td_status run_pieces(struct td__staged_call *stage, td__run_piece_fn run, void *arg)
{
    size_t fetched = 0;
    for (size_t p = 0; p < stage->pieces; p++) {
        for (; fetched < stage->pieces && fetched <= p + 1; fetched++)
            TD_TRY(fetch_piece(stage, fetched));
        TD_TRY(td__wait_for_event("staging", stage->slot[p % (size_t)stage->slots].ready));
        TD_TRY(run_piece(stage, p, run, arg));
        TD_TRY(return_piece(stage, p));
    }
    stage->copying = false;
    return TD_OK;
}

/* A rank knows only its own counts of an uneven all_to_all. */
static td_status agree_on_longest(const struct td__staged_call *stage, td__run_piece_fn run,
                                  void *arg, size_t *longest)
{
    int64_t value = (int64_t)*longest;
    struct td__operation most = *stage->operation;
    most.reduction = (struct td__reduction){.op = TD_MAX, .dtype = TD_I64, .factor = 1};
    most.call.kind = TD_OP_ALL_REDUCE;
    most.call.op = TD_MAX;
    most.call.dtype = TD_I64;
    most.call.count = 1;
    most.call.input = most.call.output = &value;
    most.call.input_counts = most.call.output_counts = NULL;
    most.call.device = NULL;
    most.call.stream = NULL;
    TD_TRY(run(arg, &most));
    *longest = (size_t)value;
    return TD_OK;
}

static td_status cut_call(struct td__staged_call *stage, int size, td__run_piece_fn run, void *arg)
{
    const td_call *call = &stage->operation->call;
    size_t bytes = TD__STAGED_PIECE, inputs = longest_part(&stage->input),
           outputs = longest_part(&stage->output), longest = inputs > outputs ? inputs : outputs;
    if (!has_one_part(call->kind)) {
        bytes /= (size_t)size;
        bytes = bytes > PART_BYTES_LEAST ? bytes : PART_BYTES_LEAST;
    }
    stage->width = bytes / stage->element;
    if (call->kind == TD_OP_ALL_TO_ALL && call->input_counts)
        TD_TRY(agree_on_longest(stage, run, arg, &longest));
    stage->pieces = longest ? (longest - 1) / stage->width + 1 : 1;
    stage->width = stage->pieces == 1 && longest ? longest : stage->width;
    stage->slots = stage->pieces < BUFFERS ? (int)stage->pieces : BUFFERS;
    return TD_OK;
}

/* ---- Memory -------------------------------------------------------------------------------------------- */

/* Memory for the first piece, which has the most elements. */
static td_status take_memory(struct td__staged_call *stage, struct staged_side *side, char **data,
                             void **pinned)
{
    size_t bytes = cut_piece(stage, side, 0) * stage->element;
    *data = td__pinned_alloc(stage->device, bytes ? bytes : 1, pinned);
    return *data ? TD_OK : td__error_status();
}

static td_status take_slot(struct td__staged_call *stage, struct staged_slot *slot)
{
    td_op_kind kind = stage->operation->call.kind;
    slot->ready = td__event_take(stage->device);
    slot->done = td__event_take(stage->device);
    if (!slot->ready || !slot->done)
        return td__error_status();
    if (has_one_part(kind)) {
        TD_TRY(take_memory(stage, &stage->input, &slot->input, &slot->input_pinned));
        slot->output = slot->input;
        return TD_OK;
    }
    if (stage->input.used)
        TD_TRY(take_memory(stage, &stage->input, &slot->input, &slot->input_pinned));
    if (stage->output.used)
        TD_TRY(take_memory(stage, &stage->output, &slot->output, &slot->output_pinned));
    return TD_OK;
}

static td_status prepare(struct td__staged_call *stage, struct td__part *part, td__run_piece_fn run,
                         void *arg)
{
    const td_call *call = &stage->operation->call;
    size_t size = (size_t)part->group->size;
    stage->device = call->device;
    stage->to = call->stream;
    stage->from = td__part_stream(part, call->device, TD__STREAM_COPIES);
    stage->element = td_dtype_size(call->dtype);
    set_sides(stage, part->group);
    stage->input.piece = calloc(2 * size, sizeof *stage->input.piece);
    stage->output.piece = stage->input.piece + size;
    if (!stage->from || !stage->input.piece)
        return stage->from ? td__fail_nomem("staging") : td__error_status();
    TD_TRY(td_stream_wait_stream(stage->from, stage->to));
    TD_TRY(cut_call(stage, part->group->size, run, arg));
    for (int i = 0; i < stage->slots; i++)
        TD_TRY(take_slot(stage, &stage->slot[i]));
    return TD_OK;
}

td_status td__staged_call_run(struct td__part *part, const struct td__operation *operation,
                              td__run_piece_fn run, void *arg, struct td__staged_call **out)
{
    struct td__staged_call *stage = *out = calloc(1, sizeof *stage);
    if (!stage)
        return td__fail_nomem("staging");
    stage->operation = operation;
    TD_TRY(prepare(stage, part, run, arg));
    return run_pieces(stage, run, arg);
}

static void free_memory(const struct td__staged_call *stage, void *data, void *pinned)
{
    if (!data)
        return;
    td__pinned_use(pinned, stage->to);
    td__pinned_free(data, pinned);
}

void td__staged_call_free(struct td__staged_call *stage)
{
    if (!stage)
        return;
    struct td__error error;
    td__error_save(&error);
    if (stage->copying)
        td__wait_for_stream("staging", stage->from);
    for (int i = 0; i < BUFFERS; i++) {
        struct staged_slot *slot = &stage->slot[i];
        if (slot->output != slot->input)
            free_memory(stage, slot->output, slot->output_pinned);
        free_memory(stage, slot->input, slot->input_pinned);
        td__event_give_back(slot->ready);
        td__event_give_back(slot->done);
    }
    free(stage->input.piece);
    free(stage);
    td__error_restore(&error);
}
