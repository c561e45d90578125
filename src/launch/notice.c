/* The messages of launchers to each other; see arrival.h. */
#include "launch/arrival.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* All workers of a job can be counted. */
enum { MOST_NODES = 1 << 16, MOST_WORKERS = 1 << 16 };

enum { TEXT_LIMIT = 4096 };

/* Flags that follow an introduction where one is set. */
enum { KEEP_GOING = 1 };

static void put_text(struct td__buffer *buffer, const char *text, size_t room)
{
    td__buffer_put_string(buffer, text, strnlen(text, room - 1));
}

static void read_text(struct td__reader *reader, char *text, size_t room)
{
    struct td__span span = td__reader_string(reader, TEXT_LIMIT);
    snprintf(text, room, "%.*s", (int)span.size, span.data);
}

void td__notice_put(struct td__buffer *buffer, int node, int code, const char *text)
{
    td__buffer_put_u32(buffer, (uint32_t)node);
    td__buffer_put_u32(buffer, (uint32_t)code);
    put_text(buffer, text, sizeof((struct td__notice *)0)->text);
}

bool td__notice_read(const td_bytes *value, struct td__notice *notice)
{
    struct td__reader reader = td__reader_of(value->data, value->size);
    notice->node = (int)td__reader_u32(&reader);
    notice->code = (int)td__reader_u32(&reader);
    read_text(&reader, notice->text, sizeof notice->text);
    return !reader.failed;
}

void td__introduction_put(struct td__buffer *buffer, const struct td__run_options *options)
{
    const struct td__introduction *room = NULL;
    td__buffer_put_u32(buffer, (uint32_t)options->nnodes);
    td__buffer_put_u32(buffer, (uint32_t)options->nproc);
    td__buffer_put_u32(buffer, (uint32_t)options->max_restarts);
    td__buffer_put_u32(buffer, (uint32_t)getpid());
    put_text(buffer, td__this_host(options), sizeof room->host);
    put_text(buffer, options->run_id, sizeof room->run_id);
    put_text(buffer, options->role, sizeof room->role);
    if (options->keep_going)
        td__buffer_put_u32(buffer, KEEP_GOING);
}

bool td__introduction_read(const td_bytes *value, struct td__introduction *introduction)
{
    struct td__reader reader = td__reader_of(value->data, value->size);
    introduction->nnodes = (int)td__reader_u32(&reader);
    introduction->nproc = (int)td__reader_u32(&reader);
    introduction->max_restarts = (int)td__reader_u32(&reader);
    introduction->pid = (int)td__reader_u32(&reader);
    read_text(&reader, introduction->host, sizeof introduction->host);
    read_text(&reader, introduction->run_id, sizeof introduction->run_id);
    read_text(&reader, introduction->role, sizeof introduction->role);
    uint32_t flags = td__reader_done(&reader) ? 0 : td__reader_u32(&reader);
    introduction->keep_going = flags & KEEP_GOING;
    return td__reader_done(&reader) && introduction->nnodes > 0 &&
           introduction->nnodes <= MOST_NODES && introduction->nproc > 0 &&
           introduction->nproc <= MOST_WORKERS && !(flags & ~(uint32_t)KEEP_GOING);
}

td_status td__introduction_check(const struct td__introduction *node, int node_rank,
                                 const struct td__introduction *first)
{
    const char *flag = node->nnodes != first->nnodes               ? "--nnodes"
                       : node->max_restarts != first->max_restarts ? "--max-restarts"
                       : node->keep_going != first->keep_going     ? "--keep-going"
                       : strcmp(node->run_id, first->run_id)       ? "--rdzv-id"
                                                                   : NULL;
    if (!flag)
        return TD_OK;
    return td_fail(TD_ERR_MISMATCH,
                   "%s must be the same on all nodes, but differs between node 0 (on %s) and node "
                   "%d (on %s)",
                   flag, first->host, node_rank, node->host);
}
