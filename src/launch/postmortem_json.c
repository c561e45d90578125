/* The postmortem of a job as JSON, for programs; see postmortem.h. Times are seconds of the wall clock. */
#include "launch/postmortem.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void td__postmortem_put(struct td__buffer *out, const char *format, ...)
{
    char text[1024];
    va_list args;
    va_start(args, format);
    int size = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (size > 0)
        td__buffer_put(out, text, (size_t)size < sizeof text ? (size_t)size : sizeof text - 1);
}

/* Begins a member, with a comma where it is not the first one. */
static void put_name(struct td__buffer *out, const char *name)
{
    bool first = out->size && out->data[out->size - 1] == '{';
    td__postmortem_put(out, "%s\"%s\":", first ? "" : ",", name);
}

/* The text is printable UTF-8 already: only two characters have to be escaped. */
static void put_text(struct td__buffer *out, const char *name, const char *text)
{
    put_name(out, name);
    td__buffer_put_u8(out, '"');
    for (; *text; text++) {
        if (*text == '"' || *text == '\\')
            td__buffer_put_u8(out, '\\');
        td__buffer_put_u8(out, (uint8_t)*text);
    }
    td__buffer_put_u8(out, '"');
}

static void put_time(struct td__buffer *out, const char *name, int64_t ns)
{
    put_name(out, name);
    if (ns)
        td__postmortem_put(out, "%.9f",
                           (double)(ns / 1000000000) + (double)(ns % 1000000000) / 1e9);
    else
        td__postmortem_put(out, "null");
}

static void put_call(struct td__buffer *out, const struct td__flight_page *page,
                     const struct td__flight_call *call)
{
    bool message = call->kind == TD__FLIGHT_SEND || call->kind == TD__FLIGHT_RECV;
    td__postmortem_put(out, "{\"number\":%" PRIu64 ",\"operation\":\"%s\",\"state\":\"%s\"",
                       call->number, td__flight_kind_name(call->kind),
                       td__flight_state_name(call->state));
    put_text(out, "group", page->groups[call->group]);
    if (call->sequence)
        td__postmortem_put(out, ",\"sequence\":%" PRIu64, call->sequence);
    td__postmortem_put(out, ",\"count\":%" PRIu64 ",\"dtype\":\"%s\"", call->count,
                       td_dtype_name(call->dtype));
    if (message)
        td__postmortem_put(out, ",\"peer\":%d,\"tag\":%d", call->rank, call->detail);
    else if (call->rank >= 0)
        td__postmortem_put(out, ",\"root\":%d", call->rank);
    if (call->uneven)
        td__postmortem_put(out, ",\"uneven\":true");
    td__postmortem_put(out, ",\"asynchronous\":%s", call->posted ? "true" : "false");
    if (call->label[0])
        put_text(out, "label", call->label);
    put_time(out, "called", call->queued_ns);
    put_time(out, "started", call->started_ns);
    put_time(out, "ended", call->ended_ns);
    td__postmortem_put(out, "}");
}

static void put_line(struct td__buffer *out, const struct td__postmortem *postmortem, int index)
{
    struct td__postmortem_line line;
    char text[2048];
    td__postmortem_line(postmortem, index, &line);
    td__postmortem_line_text(&line, text, sizeof text);
    put_text(out, "text", text);
}

static void put_rank(struct td__buffer *out, const struct td__postmortem *postmortem, int index,
                     bool whole)
{
    const struct td__postmortem_rank *rank = &postmortem->ranks[index];
    const struct td__flight_page *page = rank->page;
    td__postmortem_put(out, "{\"rank\":%d,\"pid\":%d", page->rank, page->pid);
    put_text(out, "host", page->host);
    td__postmortem_put(out, ",\"state\":\"%s\",\"first\":%s",
                       td__postmortem_state_name(rank->state),
                       rank == postmortem->cause ? "true" : "false");
    put_line(out, postmortem, index);
    td__postmortem_put(out, ",\"total\":%" PRIu64 ",\"per_second\":%.3f", page->total, rank->rate);
    if (rank->ended) {
        td__postmortem_put(out, ",\"ended\":{");
        put_text(out, "how", page->ending);
        put_time(out, "at", page->ended_ns);
        td__postmortem_put(out, "}");
    }
    if (page->failure) {
        td__postmortem_put(out, ",\"failure\":{\"status\":\"%s\"", td_status_name(page->failure));
        put_text(out, "message", page->sentence);
        put_time(out, "at", page->failure_ns);
        td__postmortem_put(out, "}");
    }
    if (rank->current) {
        td__postmortem_put(out, ",\"current\":");
        put_call(out, page, rank->current);
    }
    if (rank->last) {
        td__postmortem_put(out, ",\"last\":");
        put_call(out, page, rank->last);
    }
    td__postmortem_put(out, whole ? ",\"operations\":[" : "");
    for (int i = 0; whole && i < page->count; i++) {
        td__postmortem_put(out, i ? "," : "");
        put_call(out, page, &page->calls[i]);
    }
    td__postmortem_put(out, whole ? "]" : "");
    td__postmortem_put(out, "}");
}

static void put_job(struct td__buffer *out, const struct td__flight_book_info *info)
{
    td__postmortem_put(out, "{\"pid\":%d", info->pid);
    put_text(out, "host", info->host);
    put_text(out, "run_id", info->run_id);
    put_text(out, "command", info->command);
    td__postmortem_put(out, ",\"world_size\":%d,\"nodes\":%d,\"node_rank\":%d,\"restarts\":%d",
                       info->world_size, info->nnodes, info->node_rank, info->attempt);
    put_time(out, "started", info->started_ns);
    td__postmortem_put(out, "}");
}

/* Only where there are some. */
static void put_spares(struct td__buffer *out, const struct td__postmortem *postmortem)
{
    td__postmortem_put(out, ",\"spares\":[");
    for (int i = 0; i < postmortem->spare_count; i++) {
        const struct td__flight_page *page = postmortem->spares[i];
        td__postmortem_put(out, "%s{\"spare\":%d,\"pid\":%d,\"waits\":%s", i ? "," : "",
                           page->spare, page->started_pid, page->waits ? "true" : "false");
        if (page->ended_ns)
            put_text(out, "ended", page->ending);
        td__postmortem_put(out, "}");
    }
    td__postmortem_put(out, "]");
}

void td__postmortem_print_json(const struct td__postmortem *postmortem, bool whole,
                               struct td__buffer *out)
{
    td__postmortem_put(out, "{");
    put_time(out, "time", postmortem->moment_ns);
    if (postmortem->book_count == 1) {
        td__postmortem_put(out, ",\"job\":");
        put_job(out, &postmortem->books[0].info);
    }
    if (postmortem->cause)
        td__postmortem_put(out, ",\"first\":%d", postmortem->cause->page->rank);
    else
        td__postmortem_put(out, ",\"first\":null");
    td__postmortem_put(out, ",\"ranks\":[");
    for (int i = 0; i < postmortem->count; i++) {
        td__postmortem_put(out, i ? "," : "");
        put_rank(out, postmortem, i, whole);
    }
    td__postmortem_put(out, "]");
    if (postmortem->spare_count)
        put_spares(out, postmortem);
    td__postmortem_put(out, "}\n");
}
