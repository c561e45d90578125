/* Finding the log of a rank: a slot of a launcher's book, a file, or private memory; see flight.h.
 *
 * A slot belongs to the process that put its number into `owner`. Another one may take it over when that
 * process has left its world, or is gone (a script that runs two programs, one after the other); until
 * then it gets private memory. In one process a rank may have two worlds at once, while one grows out of
 * the other: they share the log. */
#include "base/fail.h"
#include "base/file_limit.h"
#include "base/host.h"
#include "base/number.h"
#include "os/flight.h"
#include "os/process.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* Protects the list of logs with a place, and their users. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct td__flight_log *logs;

/* ---- Places ---------------------------------------------------------------------------------- */

static struct td__flight_head *map_book(int fd, size_t size)
{
    void *map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return map == MAP_FAILED ? NULL : map;
}

int td__flight_book_find(const char *path, int flags, struct stat *found)
{
    if (stat(path, found) || !S_ISREG(found->st_mode))
        return -1; /* opening a pipe or a terminal may do something */
    int fd = open(path, flags | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0)
        return -1;
    int seals = fcntl(fd, F_GET_SEALS);
    if (!fstat(fd, found) && seals >= 0 && (seals & F_SEAL_SHRINK) &&
        found->st_size >= TD__FLIGHT_HEAD &&
        (size_t)found->st_size <= td__flight_book_size(TD__FLIGHT_SLOTS))
        return fd;
    close(fd);
    return -1;
}

static bool take_slot(struct td__flight_bytes *bytes)
{
    uint32_t owner = 0, self = (uint32_t)getpid();
    if (atomic_compare_exchange_strong(&bytes->owner, &owner, self))
        return true;
    bool elsewhere = atomic_load(&bytes->boot) != td__boot_number(); /* a file from another time */
    bool gone = owner != self && kill((pid_t)owner, 0) && errno == ESRCH;
    return (elsewhere || gone) && atomic_compare_exchange_strong(&bytes->owner, &owner, self);
}

static bool is_book(const struct td__flight_head *head, size_t size, int slot)
{
    return head->magic == TD__FLIGHT_MAGIC && head->version == TD__FLIGHT_VERSION &&
           head->log_size == sizeof(struct td__flight_bytes) && (uint32_t)slot < head->slots &&
           head->slots <= TD__FLIGHT_SLOTS && size >= td__flight_book_size((int)head->slots);
}

static bool take_log(struct td__flight_log *log, struct td__flight_head *head, size_t size,
                     int slot)
{
    if (!is_book(head, size, slot) || !take_slot(td__flight_log_at(head, slot))) {
        munmap(head, size);
        return false;
    }
    log->map = head;
    log->map_size = size;
    log->bytes = td__flight_log_at(head, slot);
    return true;
}

/* *there: there is such a slot, even if another process has it. */
static bool open_slot(struct td__flight_log *log, pid_t pid, int number, int slot, bool *there)
{
    char path[64];
    struct stat found;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)pid, number);
    int fd = td__flight_book_find(path, O_RDWR, &found);
    *there = false;
    if (fd < 0)
        return false;
    size_t size = (size_t)found.st_size;
    struct td__flight_head *head = map_book(fd, size);
    close(fd);
    *there = head && is_book(head, size, slot);
    return head && take_log(log, head, size, slot);
}

static bool read_place(const char *text, pid_t *pid, int *fd, int *slot)
{
    int numbers[3];
    for (int i = 0; i < 3; i++) {
        size_t size = strcspn(text, ":");
        int64_t number;
        if (!td__parse_i64(text, size, &number) || number < 0 || number > INT_MAX ||
            text[size] != (i < 2 ? ':' : 0))
            return false;
        numbers[i] = (int)number;
        text += size + 1;
    }
    *pid = numbers[0];
    *fd = numbers[1];
    *slot = numbers[2];
    return true;
}

/* Why a file is left alone; NULL: nothing speaks against it. Another user could read what is written
 * there, or cut it while it is mapped, and a look at it would then end this process. So could another
 * rank that has it mapped; and what is something else is not for us to overwrite. */
static const char *objection(int fd, size_t size)
{
    struct td__flight_head head;
    struct stat found;
    if (fstat(fd, &found))
        return td__errno_text(errno);
    if (!S_ISREG(found.st_mode))
        return "it is no plain file";
    if (found.st_uid != geteuid())
        return "it belongs to another user";
    if (found.st_mode & (S_IWGRP | S_IWOTH))
        return "others may write to it (chmod go-w)";
    bool fits = !found.st_size || ((size_t)found.st_size == size &&
                                   pread(fd, &head, sizeof head, 0) == (ssize_t)sizeof head &&
                                   is_book(&head, size, 0));
    return fits ? NULL : "there is a file of that name, and it is something else";
}

/* NULL, or why it did not work. */
static const char *open_file(struct td__flight_log *log, const char *prefix, int rank,
                             int world_size)
{
    char path[PATH_MAX];
    size_t size = td__flight_book_size(1);
    struct td__flight_job job = {
        .pid = getpid(), .slots = 1, .nnodes = 1, .world_size = world_size};
    if (snprintf(path, sizeof path, "%s.%d", prefix, rank) >= (int)sizeof path)
        return td__errno_text(ENAMETOOLONG);
    int fd = open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
    if (fd < 0)
        return errno == ELOOP ? "it is a symbolic link" : td__errno_text(errno);
    const char *why = objection(fd, size);
    /* Allocated here and now: a full disk must not be found out by a store to memory. */
    int error = why ? 0 : td__file_allocate(fd, (off_t)size);
    struct td__flight_head *head = why || error ? NULL : map_book(fd, size);
    if (!why && !head)
        why = td__errno_text(error ? error : errno);
    close(fd);
    if (why)
        return why;
    if (!head->magic)
        td__flight_head_fill(head, &job);
    return take_log(log, head, size, 0) ? NULL : "another process writes to it";
}

static bool open_private(struct td__flight_log *log)
{
    size_t size = sizeof(struct td__flight_bytes);
    void *map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED)
        return false;
    log->map = log->bytes = map;
    log->map_size = size;
    return true;
}

/* So that the same rank finds it again; without memory for that it gets another one then. */
static bool keep_place(struct td__flight_log *log, const char *place, int rank)
{
    log->place = strdup(place);
    log->rank = rank;
    log->pid = getpid();
    return true;
}

static bool find_log(struct td__flight_log *log, int rank, int size)
{
    const char *place = getenv(TD__FLIGHT_VARIABLE);
    pid_t pid;
    int fd, slot;
    bool there;
    if (place && strchr(place, '/')) {
        const char *why = open_file(log, place, rank, size);
        if (!why)
            return keep_place(log, place, rank);
        td_log(TD_LOG_WARN, "TANDEM_FLIGHT: %s.%d cannot be used: %s; operations are not kept",
               place, rank, why);
    } else if (place && *place) {
        if (!read_place(place, &pid, &fd, &slot))
            td_log(TD_LOG_WARN,
                   "TANDEM_FLIGHT is \"%s\"; it must be a path with a slash, as /tmp/flight",
                   place);
        else if (open_slot(log, pid, fd, slot, &there))
            return keep_place(log, place, rank);
        else if (!there)
            td_log(TD_LOG_WARN,
                   "TANDEM_FLIGHT is \"%s\", but process %d has no page %d of a flight recorder "
                   "open as %d; operations are not kept",
                   place, (int)pid, slot, fd);
    }
    return open_private(log) && (!place || keep_place(log, place, rank));
}

/* What an earlier owner wrote is gone; what the launcher wrote stays. */
static void clear(struct td__flight_bytes *bytes)
{
    for (int i = 0; i < TD__FLIGHT_ENTRIES; i++)
        atomic_store(&bytes->entries[i].mark, 0);
    for (int i = 0; i < TD__FLIGHT_GROUPS; i++)
        atomic_store(&bytes->groups[i].key, 0);
    atomic_store(&bytes->next, 0);
    atomic_store(&bytes->passed, 0);
    atomic_store(&bytes->failure, 0);
    atomic_store(&bytes->failure_entry, 0);
}

/* ---- Opening and closing --------------------------------------------------------------------- */

static void begin(struct td__flight_log *log)
{
    struct td__flight_bytes *bytes = log->bytes;
    log->stamps = td__flight_has_stamps();
    clear(bytes);
    atomic_store(&bytes->owner, (uint32_t)getpid());
    atomic_store(&bytes->clock, log->stamps);
    atomic_store(&bytes->wall, (uint64_t)(td__wall_ns() - td__now_ns()));
    atomic_store(&bytes->boot, td__boot_number());
    td__flight_put_text(bytes->host, TD__FLIGHT_HOST, td__host_name());
    td__flight_mark_time(log);
    atomic_store(&bytes->ticks[0], atomic_load(&bytes->ticks[1]));
    atomic_store(&bytes->ns[0], atomic_load(&bytes->ns[1]));
}

/* The log that this rank has open at the place where TANDEM_FLIGHT points now, or -1: that is expected
 * there. A slot that is expected is for any rank, a file is named after one. */
static struct td__flight_log *find_open(int rank)
{
    const char *place = getenv(TD__FLIGHT_VARIABLE);
    bool slot = place && !strchr(place, '/');
    for (struct td__flight_log *log = place ? logs : NULL; log; log = log->next) {
        bool expected = !atomic_load(&log->users) && (slot || rank < 0);
        if ((log->rank == rank || expected) && log->pid == getpid() && !strcmp(log->place, place))
            return log;
    }
    return NULL;
}

static void set_rank(struct td__flight_log *log, int rank, int size)
{
    log->rank = rank;
    atomic_store(&log->bytes->rank, rank);
    atomic_store(&log->bytes->size, size);
}

static td_status open_fresh(int rank, int size, struct td__flight_log **log_out)
{
    struct td__flight_log *log = calloc(1, sizeof *log);
    if (!log)
        return td__fail_nomem("flight recorder");
    if (!find_log(log, rank, size)) {
        free(log);
        return td__fail_nomem("flight recorder");
    }
    pthread_mutex_init(&log->lock, NULL);
    begin(log);
    set_rank(log, rank, size);
    if (log->place) {
        log->next = logs;
        logs = log;
    }
    *log_out = log;
    return TD_OK;
}

/* In the child of a fork(), before it has another thread. */
static void forget_parent(void)
{
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER; /* a thread of the parent may have held it */
    logs = NULL;
}

__attribute__((constructor)) static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, forget_parent);
}

void td__flight_expect(int rank, int size)
{
    const char *place = getenv(TD__FLIGHT_VARIABLE);
    struct td__flight_log *log;
    if (!place || !*place || (rank < 0 && strchr(place, '/')))
        return;
    pthread_mutex_lock(&lock);
    if (!find_open(rank) && !open_fresh(rank, size, &log))
        td__flight_set_phase(log, TD__FLIGHT_JOINING);
    pthread_mutex_unlock(&lock);
}

void td__flight_give_up(td_status status, const char *sentence)
{
    pthread_mutex_lock(&lock);
    struct td__flight_log *log = find_open(-1);
    if (log && atomic_load(&log->users))
        log = NULL;
    if (log)
        atomic_store(&log->users, 1);
    pthread_mutex_unlock(&lock);
    if (log && status)
        td__flight_fail(log, 0, status, sentence);
    if (log)
        td__flight_close(log);
}

td_status td__flight_open(int rank, int size, struct td__flight_log **log_out)
{
    td_status status = TD_OK;
    pthread_mutex_lock(&lock);
    struct td__flight_log *log = find_open(rank);
    if (log && !atomic_load(&log->users))
        set_rank(log, rank, size);
    if (!log)
        status = open_fresh(rank, size, &log);
    if (!status) {
        atomic_fetch_add(&log->users, 1);
        td__flight_set_phase(log, TD__FLIGHT_JOINING);
        *log_out = log;
    }
    pthread_mutex_unlock(&lock);
    return status;
}

void td__flight_close(struct td__flight_log *log)
{
    pthread_mutex_lock(&lock);
    bool last = atomic_fetch_sub(&log->users, 1) == 1;
    for (struct td__flight_log **link = &logs; last && *link; link = &(*link)->next)
        if (*link == log) {
            *link = log->next;
            break;
        }
    if (!last && atomic_load(&log->bytes->phase) == TD__FLIGHT_JOINING)
        td__flight_set_phase(log, TD__FLIGHT_JOINED); /* as the other user is */
    pthread_mutex_unlock(&lock);
    if (!last)
        return;
    atomic_store(&log->bytes->owner, 0);
    munmap(log->map, log->map_size);
    pthread_mutex_destroy(&log->lock);
    free(log->place);
    free(log);
}
