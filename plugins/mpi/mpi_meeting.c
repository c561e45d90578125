/* The meeting before each collective: all ranks come to the same call, or all learn that they have not.
 *
 * On one host it goes through a page of memory: each rank writes what it calls into its slot, then the number of the
 * meeting, and waits until all have that number. A rank can be one meeting ahead of another, since the next one waits for
 * all: so a slot has two arrivals, which take turns.
 *
 *     rank 0   | met, call | met, call |        written by rank 0, each once in two meetings, and read by the others
 *     rank 1   | met, call | met, call |
 *
 * Taking turns halves the transfers of cache lines: in one line, a rank that is ahead would take it from those that still
 * read it. A meeting takes as long as one transfer from the last rank to the others then. Tried and dropped, as they
 * changed nothing or cost time: fetching the next arrival for writing while MPI runs, and polling without pauses.
 *
 * Between hosts it is a reduction of MPI that is started without blocking: the greatest hash of a call, and the greatest of
 * its complement. If they are not complements of each other, the calls differ, and all ranks know it. Then they
 * exchange the calls themselves.
 *
 * The page is a file without a name: rank 0 makes it, and the others open it in /proc. */
#include "mpi_backend.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { WORDS = 3, NAMED = 8, LINES = 128 /* bytes; processors fetch cache lines in pairs */ };

/* A call in three words:
 *     kind (4 bits), dtype (4), uneven (1), root + 1 (23), operation (32); the count; detail (32), sequence (32) */
struct mpi_words {
    uint64_t word[WORDS];
};

struct mpi_arrival {
    _Alignas(LINES) _Atomic uint64_t met; /* the number of the meeting, written after the call */
    struct mpi_words call;
};

struct mpi_slot {
    struct mpi_arrival arrival[2]; /* of even meetings, and of odd ones */
    _Alignas(LINES) _Atomic uint32_t left;
};

struct mpi_page {
    struct mpi_slot slot[MPI_PAGE_RANKS];
};

/* ---- What a rank calls --------------------------------------------------------------------------------- */

static inline bool reduces(td_op_kind kind)
{
    return kind == TD_OP_REDUCE || kind == TD_OP_ALL_REDUCE || kind == TD_OP_REDUCE_SCATTER;
}

static inline void describe(const td_call *call, struct mpi_words *words)
{
    bool uneven = call->input_counts != NULL;
    uint64_t op = reduces(call->kind) ? (uint32_t)call->op : 0;
    words->word[0] = (uint64_t)call->kind | (uint64_t)call->dtype << 4 | (uint64_t)uneven << 8 |
                     ((uint64_t)(call->root + 1) & 0x7fffff) << 9 | op << 32;
    words->word[1] = uneven && call->kind == TD_OP_ALL_TO_ALL ? 0 : call->count;
    words->word[2] = (uint64_t)call->detail << 32 | (uint32_t)call->sequence;
}

static inline bool same(const struct mpi_words *a, const struct mpi_words *b)
{
    return !((a->word[0] ^ b->word[0]) | (a->word[1] ^ b->word[1]) | (a->word[2] ^ b->word[2]));
}

static const char *kind_of(const struct mpi_words *words)
{
    return td_op_kind_name((td_op_kind)(words->word[0] & 15));
}

/* "1024 f32", "3 f16 with max, root 2". */
static const char *arguments(const struct mpi_group *group, const struct mpi_words *words,
                             char text[160])
{
    uint64_t head = words->word[0];
    td_op_kind kind = (td_op_kind)(head & 15);
    int root = (int)(head >> 9 & 0x7fffff) - 1;
    uint32_t op = (uint32_t)(head >> 32);
    int length = snprintf(text, 160, "%llu %s", (unsigned long long)words->word[1],
                          td_dtype_name((td_dtype)(head >> 4 & 15)));
    if (head >> 8 & 1)
        length += snprintf(text + length, 160 - (size_t)length, " in uneven parts");
    if (reduces(kind) && op < TD_REDUCE_OP_OWN)
        length += snprintf(text + length, 160 - (size_t)length, " with %s",
                           td_reduce_op_name((td_reduce_op)op));
    else if (reduces(kind))
        length += snprintf(text + length, 160 - (size_t)length, " with operation %u of its own",
                           op - TD_REDUCE_OP_OWN + 1);
    if (root >= 0 && root < group->context->size)
        length += snprintf(text + length, 160 - (size_t)length, ", root %d",
                           group->context->global_ranks[root]);
    if (words->word[2] >> 32)
        snprintf(text + length, 160 - (size_t)length, " (detail %x)",
                 (unsigned)(words->word[2] >> 32));
    return text;
}

/* "barrier", "all_reduce #3 of 1024 f32 with sum". */
static const char *whole(const struct mpi_group *group, const struct mpi_words *words,
                         char text[220])
{
    char with[160];
    uint32_t sequence = (uint32_t)words->word[2];
    if ((words->word[0] & 15) == TD_OP_BARRIER)
        snprintf(text, 220, "%s #%u", kind_of(words), sequence);
    else
        snprintf(text, 220, "%s #%u of %s", kind_of(words), sequence,
                 arguments(group, words, with));
    return text;
}

static td_status fail_different(struct mpi_group *group, const td_call *call,
                                const struct mpi_words *a, int rank_a, const struct mpi_words *b,
                                int rank_b)
{
    char x[220], y[220];
    const int *ranks = group->context->global_ranks;
    bool other_call = (a->word[0] & 15) != (b->word[0] & 15) ||
                      (uint32_t)a->word[2] != (uint32_t)b->word[2];
    if (other_call)
        return td_fail(TD_ERR_MISMATCH,
                       "%s #%llu on group \"%s\": rank %d called %s, rank %d called %s; every rank "
                       "must make the same calls in the same order",
                       td_op_kind_name(call->kind), (unsigned long long)call->sequence,
                       group->context->name, ranks[rank_a], whole(group, a, x), ranks[rank_b],
                       whole(group, b, y));
    return td_fail(TD_ERR_MISMATCH,
                   "%s #%llu on group \"%s\": rank %d called it with %s, rank %d with %s; every "
                   "rank must pass the same",
                   td_op_kind_name(call->kind), (unsigned long long)call->sequence,
                   group->context->name, ranks[rank_a], arguments(group, a, x), ranks[rank_b],
                   arguments(group, b, y));
}

/* ---- Through the page ------------------------------------------------------------------------------------- */

static inline bool has_come(const struct mpi_arrival *arrival, uint64_t met)
{
    return atomic_load_explicit(&arrival->met, memory_order_acquire) >= met;
}

static td_status fail_late(struct mpi_group *group, const td_call *call)
{
    const td_backend_context *context = group->context;
    char missing[120] = "";
    size_t length = 0;
    int named = 0;
    for (int r = 0; group->page && r < context->size; r++)
        if (!has_come(&group->page->slot[r].arrival[group->met & 1], group->met) && named++ < NAMED)
            length += (size_t)snprintf(missing + length, sizeof missing - length, "%s%d",
                                       length ? ", " : "; missing: rank ",
                                       context->global_ranks[r]);
    return td_fail(TD_ERR_TIMEOUT,
                   "%s #%llu on group \"%s\": not all ranks have called it within %lld ms%s%s",
                   td_op_kind_name(call->kind), (unsigned long long)call->sequence, context->name,
                   (long long)call->timeout_ms, missing, named > NAMED ? " …" : "");
}

static td_status fail_left(const struct mpi_group *group, const td_call *call, int rank)
{
    return td_fail(TD_ERR_PEER, "%s #%llu on group \"%s\": rank %d has left",
                   td_op_kind_name(call->kind), (unsigned long long)call->sequence,
                   group->context->name, group->context->global_ranks[rank]);
}

/* Once in a while, in a meeting that lasts. */
static td_status look(struct mpi_group *group, const td_call *call, struct mpi_wait *wait)
{
    td_status status = mpi_failure(group);
    if (status)
        return status;
    int64_t now = mpi_now_ns();
    if (!wait->deadline_ns)
        wait->deadline_ns = now + call->timeout_ms * 1000000;
    return now >= wait->deadline_ns ? fail_late(group, call) : TD_OK;
}

/* MPI sends only while it is called, also what a call that is over has left to send. */
static void make_progress(struct mpi_group *group)
{
    int found;
    if (atomic_load_explicit(&mpi.lost, memory_order_relaxed))
        return;
    mpi_enter();
    MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, group->inner, &found, MPI_STATUS_IGNORE);
    mpi_leave();
}

static td_status await_arrival(struct mpi_group *group, const td_call *call, int rank,
                               struct mpi_wait *wait)
{
    struct mpi_slot *slot = &group->page->slot[rank];
    const struct mpi_arrival *arrival = &slot->arrival[group->met & 1];
    while (!has_come(arrival, group->met)) {
        bool looks = mpi_wait_turn(wait);
        if (wait->turns >= wait->spins)
            make_progress(group);
        if (!looks)
            continue;
        td_status status = look(group, call, wait);
        if (!status && atomic_load(&slot->left) && !has_come(arrival, group->met))
            status = fail_left(group, call, rank);
        if (status)
            return status;
    }
    return TD_OK;
}

/* All ranks name the same two. */
static td_status fail_in_page(struct mpi_group *group, const td_call *call)
{
    const struct mpi_slot *slots = group->page->slot;
    int turn = (int)(group->met & 1), first = 1;
    while (same(&slots[0].arrival[turn].call, &slots[first].arrival[turn].call))
        first++;
    return fail_different(group, call, &slots[0].arrival[turn].call, 0,
                          &slots[first].arrival[turn].call, first);
}

static td_status meet_in_page(struct mpi_group *group, const td_call *call)
{
    int rank = group->context->rank, size = group->context->size;
    struct mpi_slot *slots = group->page->slot;
    uint64_t met = ++group->met;
    struct mpi_arrival *mine = &slots[rank].arrival[met & 1];
    struct mpi_wait wait = {.spins = group->spins};
    struct mpi_words words;
    bool differs = false;
    describe(call, &words);
    mine->call = words;
    atomic_store_explicit(&mine->met, met, memory_order_release);
    for (int r = 0; r < size; r++) {
        const struct mpi_arrival *theirs = &slots[r].arrival[met & 1];
        if (r == rank)
            continue;
        td_status status = await_arrival(group, call, r, &wait);
        if (status)
            return status;
        differs |= !same(&words, &theirs->call);
    }
    return differs ? fail_in_page(group, call) : TD_OK;
}

/* ---- Through MPI --------------------------------------------------------------------------------------------- */

static uint64_t hash_of(const struct mpi_words *words)
{
    uint64_t hash = 0;
    for (int i = 0; i < WORDS; i++) {
        hash = (hash ^ words->word[i]) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 32;
    }
    return hash;
}

td_status mpi_await_request(struct mpi_group *group, const td_call *call, MPI_Request *request,
                            int64_t deadline_ns)
{
    struct mpi_wait wait = {.spins = group->spins, .deadline_ns = deadline_ns};
    for (;;) {
        int done = 0;
        if (atomic_load(&mpi.lost))
            return td_fail(TD_ERR_STATE, "%s on group \"%s\": %s cannot be used any more",
                           td_op_kind_name(call->kind), group->context->name, mpi.name);
        mpi_enter();
        int result = MPI_Test(request, &done, MPI_STATUS_IGNORE);
        mpi_leave();
        if (result != MPI_SUCCESS)
            return mpi_check(result, td_op_kind_name(call->kind), group->context->name);
        if (done)
            return TD_OK;
        td_status status = mpi_wait_turn(&wait) ? look(group, call, &wait) : TD_OK;
        if (status)
            return status;
    }
}

/* A rank that has left in order has said so in the store. */
static td_status find_left(struct mpi_group *group, const td_call *call)
{
    char key[32];
    const char *keys[1] = {key};
    bool there = false;
    for (int r = 0; r < group->context->size; r++) {
        snprintf(key, sizeof key, "left/%d", r);
        if (r != group->context->rank && !td_store_check(group->context->store, keys, 1, &there) &&
            there)
            return fail_left(group, call, r);
    }
    return TD_OK;
}

/* What a meeting gives to MPI: it stays, if the meeting fails, as MPI may still use it. */
struct meeting {
    uint64_t hashes[2], greatest[2];
    struct mpi_words mine;
    struct mpi_words all[];
};

static td_status exchange_calls(struct mpi_group *group, const td_call *call,
                                struct meeting *meeting, int64_t deadline_ns)
{
    MPI_Request request;
    int other = 1;
    mpi_enter();
    int result = MPI_Iallgather(&meeting->mine, WORDS, MPI_UINT64_T, meeting->all, WORDS,
                                MPI_UINT64_T, group->comm, &request);
    mpi_leave();
    td_status status = mpi_check(result, td_op_kind_name(call->kind), group->context->name);
    if (!status)
        status = mpi_await_request(group, call, &request, deadline_ns);
    if (status)
        return status;
    while (other < group->context->size - 1 && same(&meeting->all[0], &meeting->all[other]))
        other++;
    return fail_different(group, call, &meeting->all[0], 0, &meeting->all[other], other);
}

static td_status await_meeting(struct mpi_group *group, const td_call *call, MPI_Request *request,
                               int64_t deadline_ns)
{
    for (;;) {
        int64_t second = mpi_now_ns() + 1000000000;
        bool last = second >= deadline_ns;
        td_status status = mpi_await_request(group, call, request, last ? deadline_ns : second);
        if (status != TD_ERR_TIMEOUT || last)
            return status;
        status = find_left(group, call);
        if (status)
            return status;
    }
}

static td_status meet_by_request(struct mpi_group *group, const td_call *call)
{
    int64_t deadline = mpi_now_ns() + call->timeout_ms * 1000000;
    size_t all = (size_t)group->context->size * sizeof(struct mpi_words);
    struct meeting *meeting = calloc(1, sizeof *meeting + all);
    MPI_Request request;
    if (!meeting)
        return td_fail(TD_ERR_NOMEM, "backend mpi: out of memory");
    group->met++;
    describe(call, &meeting->mine);
    meeting->hashes[0] = hash_of(&meeting->mine);
    meeting->hashes[1] = ~meeting->hashes[0];
    mpi_enter();
    int result = MPI_Iallreduce(meeting->hashes, meeting->greatest, 2, MPI_UINT64_T, MPI_MAX,
                                group->comm, &request);
    mpi_leave();
    td_status status = mpi_check(result, td_op_kind_name(call->kind), group->context->name);
    if (!status)
        status = await_meeting(group, call, &request, deadline);
    if (status)
        return status; /* MPI keeps `meeting` */
    if (meeting->greatest[0] != ~meeting->greatest[1])
        status = exchange_calls(group, call, meeting, deadline);
    if (!status || status == TD_ERR_MISMATCH)
        free(meeting);
    return status;
}

td_status mpi_meet(struct mpi_group *group, const td_call *call)
{
    return group->page ? meet_in_page(group, call) : meet_by_request(group, call);
}

void mpi_leave_meeting(struct mpi_group *group)
{
    char key[32];
    if (group->page) {
        atomic_store(&group->page->slot[group->context->rank].left, 1);
        return;
    }
    snprintf(key, sizeof key, "left/%d", group->context->rank);
    if (group->context->size > 1)
        td_store_set(group->context->store, key, "1", 1);
}

/* ---- The page --------------------------------------------------------------------------------------------------- */

static void read_space(const char *path, char text[64])
{
    ssize_t size = readlink(path, text, 63);
    text[size > 0 ? size : 0] = '\0';
}

/* What ranks of one host have in common: the kernel, its name spaces of processes and networks, and what TANDEM_HOST_ID
 * says. */
static void host_text(char text[260])
{
    char boot[64] = "", processes[64], network[64];
    const char *given = getenv("TANDEM_HOST_ID");
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        ssize_t size = read(fd, boot, 36);
        boot[size > 0 ? size : 0] = '\0';
        close(fd);
    }
    read_space("/proc/self/ns/pid", processes);
    read_space("/proc/self/ns/net", network);
    snprintf(text, 260, "%s %s %s %.60s", boot, processes, network, given ? given : "");
}

struct page_card {
    char host[260];
    int pid, fd;
};

static struct mpi_page *map(int fd)
{
    void *page = mmap(NULL, sizeof(struct mpi_page), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return page == MAP_FAILED ? NULL : page;
}

/* Another rank's file; it belongs to the same user, since the kernel does not let others open it. */
static int open_of_rank_0(const struct page_card *card)
{
    char path[64];
    struct stat info;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", card->pid, card->fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd >= 0 && (fstat(fd, &info) || info.st_size != sizeof(struct mpi_page))) {
        close(fd);
        fd = -1;
    }
    return fd;
}

/* All ranks are here together, so MPI's blocking calls return soon. */
td_status mpi_page_open(struct mpi_group *group)
{
    int rank = group->context->rank, size = group->context->size, fd = -1;
    struct page_card mine = {.pid = -1}, first;
    if (size < 2 || size > MPI_PAGE_RANKS)
        return TD_OK;
    host_text(mine.host);
    if (rank == 0 && (fd = memfd_create("tandem-mpi", MFD_CLOEXEC)) >= 0 &&
        !ftruncate(fd, sizeof(struct mpi_page))) {
        mine.pid = (int)getpid();
        mine.fd = fd;
    }
    first = mine;
    mpi_enter();
    int result = MPI_Bcast(&first, sizeof first, MPI_BYTE, 0, group->comm);
    mpi_leave();
    bool here = result == MPI_SUCCESS && first.pid > 0 && !strcmp(first.host, mine.host);
    if (here && rank)
        fd = open_of_rank_0(&first);
    struct mpi_page *page = here && fd >= 0 ? map(fd) : NULL;
    int well = page != NULL, all = 0;
    mpi_enter();
    result = MPI_Allreduce(&well, &all, 1, MPI_INT, MPI_MIN, group->comm);
    mpi_leave();
    if (fd >= 0)
        close(fd);
    if (page && !all)
        munmap(page, sizeof *page);
    group->page = all ? page : NULL;
    return mpi_check(result, "creating", group->context->name);
}

void mpi_page_close(struct mpi_group *group)
{
    if (group->page)
        munmap(group->page, sizeof *group->page);
    group->page = NULL;
}
