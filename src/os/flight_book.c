/* The launcher's side of the flight recorder: a book with a log for each of its workers; see flight.h. */
#include "base/fail.h"
#include "base/file_limit.h"
#include "base/host.h"
#include "base/text.h"
#include "os/flight.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* "./train --epochs 10", as far as there is room. */
static void join(char *const *words, char *text, size_t room)
{
    char whole[4096] = "";
    for (; words && *words; words++)
        td__text_add(whole, sizeof whole, "%s%s", *whole ? " " : "", *words);
    td__flight_cut(whole, text, room);
}

void td__flight_head_fill(struct td__flight_head *head, const struct td__flight_job *job)
{
    *head = (struct td__flight_head){
        .magic = TD__FLIGHT_MAGIC,
        .version = TD__FLIGHT_VERSION,
        .slots = (uint32_t)job->slots,
        .log_size = sizeof(struct td__flight_bytes),
        .pid = (int32_t)job->pid,
        .nnodes = job->nnodes,
        .node_rank = job->node_rank,
        .world_size = job->world_size,
        .attempt = job->attempt,
        .max_restarts = job->max_restarts,
        .started_ns = td__wall_ns(),
    };
    td__flight_cut(td__host_name(), head->host, sizeof head->host);
    td__flight_cut(job->run_id ? job->run_id : "", head->run_id, sizeof head->run_id);
    join(job->command, head->command, sizeof head->command);
}

td_status td__flight_book_open(const struct td__flight_job *job, struct td__flight_book *book)
{
    struct td__flight_book made = {.slots = job->slots, .size = td__flight_book_size(job->slots)};
    const char *step = "memfd_create";
    made.fd = memfd_create(TD__FLIGHT_MEMORY, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (made.fd < 0)
        goto fail;
    step = "ftruncate";
    if (td__file_truncate(made.fd, (off_t)made.size) ||
        fcntl(made.fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))
        goto close_fd;
    step = "mmap";
    made.map = mmap(NULL, made.size, PROT_READ | PROT_WRITE, MAP_SHARED, made.fd, 0);
    if (made.map == MAP_FAILED)
        goto close_fd;
    td__flight_head_fill(made.map, job);
    *book = made;
    return TD_OK;

close_fd:
    close(made.fd);
fail:
    return td_fail(TD_ERR_SYSTEM, "flight recorder for %d workers: %s: %s", job->slots, step,
                   td__errno_text(errno));
}

void td__flight_book_close(struct td__flight_book *book)
{
    if (!book->map)
        return;
    munmap(book->map, book->size);
    close(book->fd);
    *book = (struct td__flight_book){.fd = -1};
}

void td__flight_book_place(const struct td__flight_book *book, pid_t pid, int slot, char *text,
                           size_t room)
{
    snprintf(text, room, "%d:%d:%d", (int)pid, book->fd, slot);
}

void td__flight_book_started(struct td__flight_book *book, int slot, int rank, pid_t pid)
{
    struct td__flight_bytes *bytes = td__flight_log_at(book->map, slot);
    atomic_store(&bytes->started_rank, rank);
    atomic_store(&bytes->started_at, (uint64_t)td__wall_ns());
    atomic_store(&bytes->started_pid, pid);
}

void td__flight_book_ended(struct td__flight_book *book, int slot, int wait_status, const char *how)
{
    struct td__flight_bytes *bytes = td__flight_log_at(book->map, slot);
    atomic_store(&bytes->wait_status, wait_status);
    td__flight_put_text(bytes->ending, TD__FLIGHT_ENDING, how);
    atomic_store(&bytes->ended_at, (uint64_t)td__wall_ns());
}
