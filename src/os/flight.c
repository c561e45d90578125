/* Writing the flight recorder's pages: finding the log, and its entries; see flight.h.
 *
 * A slot of a book belongs to the process that put its number into `owner`. Another one may take it
 * over when that process has left its world, or is gone (a script that runs two programs, one after
 * the other); until then it gets private memory. */
#include "os/flight.h"

#include "base/fail.h"
#include "base/host.h"
#include "base/number.h"
#include "os/flight_text.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

enum { TRIES = 16 }; /* entries that are under way are passed over, but not for ever */

/* ---- Time ------------------------------------------------------------------------------------ */

/* Whether the counter runs at one rate, always, and on all processors alike. */
bool td__flight_has_stamps(void)
{
#if defined(__x86_64__)
    unsigned a, b, c, d;
    return __get_cpuid(0x80000007, &a, &b, &c, &d) && (d & 1u << 8);
#else
    return false;
#endif
}

static void take_pair(struct td__flight_log *log, int which)
{
    atomic_store_explicit(&log->bytes->ticks[which], td__flight_ticks(log), memory_order_relaxed);
    atomic_store_explicit(&log->bytes->ns[which], (uint64_t)td__now_ns(), memory_order_relaxed);
}

void td__flight_mark_time(struct td__flight_log *log)
{
    take_pair(log, 1);
}

/* ---- Finding the log ------------------------------------------------------------------------- */

static struct td__flight_head *map_book(int fd, size_t size)
{
    void *map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return map == MAP_FAILED ? NULL : map;
}

static struct td__flight_bytes *log_at(struct td__flight_head *head, int slot)
{
    return (struct td__flight_bytes *)((char *)head + TD__FLIGHT_HEAD +
                                       (size_t)slot * sizeof(struct td__flight_bytes));
}

/* Opens the book that another process has open. It must be one that cannot shrink under us, or a look
 * at it could end this process. */
static int open_book(pid_t pid, int number, size_t *size)
{
    char path[64];
    struct stat found;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)pid, number);
    if (stat(path, &found) || !S_ISREG(found.st_mode))
        return -1; /* opening a pipe or a terminal may do something */
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0)
        return -1;
    int seals = fcntl(fd, F_GET_SEALS);
    size_t limit = TD__FLIGHT_HEAD + (size_t)TD__FLIGHT_SLOTS * sizeof(struct td__flight_bytes);
    if (fstat(fd, &found) || seals < 0 || !(seals & F_SEAL_SHRINK) ||
        found.st_size < TD__FLIGHT_HEAD || (size_t)found.st_size > limit) {
        close(fd);
        return -1;
    }
    *size = (size_t)found.st_size;
    return fd;
}

static bool take_slot(struct td__flight_bytes *bytes)
{
    uint32_t none = 0, self = (uint32_t)getpid();
    if (atomic_compare_exchange_strong(&bytes->owner, &none, self))
        return true;
    uint32_t owner = none;
    bool gone = owner != self && kill((pid_t)owner, 0) && errno == ESRCH;
    return gone && atomic_compare_exchange_strong(&bytes->owner, &owner, self);
}

static bool open_slot(struct td__flight_log *log, pid_t pid, int number, int slot)
{
    size_t size;
    int fd = open_book(pid, number, &size);
    struct td__flight_head *head = fd < 0 ? NULL : map_book(fd, size);
    if (fd >= 0)
        close(fd);
    if (!head)
        return false;
    bool known = head->magic == TD__FLIGHT_MAGIC && head->version == TD__FLIGHT_VERSION &&
                 head->log_size == sizeof(struct td__flight_bytes) &&
                 (uint32_t)slot < head->slots &&
                 size >= TD__FLIGHT_HEAD + (size_t)head->slots * sizeof(struct td__flight_bytes);
    if (!known || !take_slot(log_at(head, slot))) {
        munmap(head, size);
        return false;
    }
    log->map = head;
    log->map_size = size;
    log->bytes = log_at(head, slot);
    return true;
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

static void fill_in_head(struct td__flight_head *head, int world_size)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    *head = (struct td__flight_head){
        .magic = TD__FLIGHT_MAGIC,
        .version = TD__FLIGHT_VERSION,
        .slots = 1,
        .log_size = sizeof(struct td__flight_bytes),
        .pid = (int32_t)getpid(),
        .nnodes = 1,
        .world_size = world_size,
        .started_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec,
    };
    snprintf(head->host, sizeof head->host, "%s", td__host_name());
}

static bool open_file(struct td__flight_log *log, const char *prefix, int rank, int size)
{
    char path[4096];
    size_t bytes = TD__FLIGHT_HEAD + sizeof(struct td__flight_bytes);
    if (snprintf(path, sizeof path, "%s.%d", prefix, rank) >= (int)sizeof path) {
        errno = ENAMETOOLONG;
        return false;
    }
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0)
        return false;
    /* Allocated here and now: a full disk must not be found out by a store to memory. */
    int error = posix_fallocate(fd, 0, (off_t)bytes);
    struct td__flight_head *head = error ? NULL : map_book(fd, bytes);
    close(fd);
    if (!head) {
        errno = error ? error : errno;
        return false;
    }
    fill_in_head(head, size);
    log->map = head;
    log->map_size = bytes;
    log->bytes = log_at(head, 0);
    return true;
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

static bool find_log(struct td__flight_log *log, int rank, int size)
{
    const char *place = getenv(TD__FLIGHT_VARIABLE);
    pid_t pid;
    int fd, slot;
    if (place && strchr(place, '/')) {
        if (open_file(log, place, rank, size))
            return true;
        td_log(TD_LOG_WARN, "TANDEM_FLIGHT: %s.%d cannot be made: %s; operations are not kept",
               place, rank, td__errno_text(errno));
    } else if (place && *place) {
        if (!read_place(place, &pid, &fd, &slot))
            td_log(TD_LOG_WARN,
                   "TANDEM_FLIGHT is \"%s\"; it can be a path with a slash, as /tmp/flight", place);
        else if (open_slot(log, pid, fd, slot))
            return true;
    }
    return open_private(log);
}

/* What an earlier owner wrote is gone; what the launcher wrote stays. */
static void clear(struct td__flight_bytes *bytes)
{
    for (int i = 0; i < TD__FLIGHT_ENTRIES; i++) {
        atomic_store(&bytes->entries[i].mark, 0);
    }
    for (int i = 0; i < TD__FLIGHT_GROUPS; i++)
        atomic_store(&bytes->groups[i].key, 0);
    atomic_store(&bytes->next, 0);
    atomic_store(&bytes->failure, 0);
    atomic_store(&bytes->failure_entry, 0);
}

td_status td__flight_open(int rank, int size, struct td__flight_log **log_out)
{
    struct td__flight_log *log = calloc(1, sizeof *log);
    struct timespec wall;
    if (!log)
        return td__fail_nomem("flight recorder");
    if (!find_log(log, rank, size)) {
        free(log);
        return td__fail_nomem("flight recorder");
    }
    pthread_mutex_init(&log->lock, NULL);
    log->stamps = td__flight_has_stamps();
    struct td__flight_bytes *bytes = log->bytes;
    clear(bytes);
    atomic_store(&bytes->owner, (uint32_t)getpid());
    atomic_store(&bytes->rank, rank);
    atomic_store(&bytes->size, size);
    atomic_store(&bytes->clock, log->stamps);
    clock_gettime(CLOCK_REALTIME, &wall);
    atomic_store(&bytes->wall,
                 (uint64_t)((int64_t)wall.tv_sec * 1000000000 + wall.tv_nsec - td__now_ns()));
    atomic_store(&bytes->boot, td__flight_boot());
    td__flight_put_text(bytes->host, TD__FLIGHT_HOST, td__host_name());
    take_pair(log, 0);
    take_pair(log, 1);
    td__flight_set_phase(log, TD__FLIGHT_JOINING);
    *log_out = log;
    return TD_OK;
}

void td__flight_close(struct td__flight_log *log)
{
    atomic_store(&log->bytes->owner, 0);
    munmap(log->map, log->map_size);
    pthread_mutex_destroy(&log->lock);
    free(log);
}

/* ---- What seldom happens --------------------------------------------------------------------- */

void td__flight_set_phase(struct td__flight_log *log, enum td__flight_phase phase)
{
    td__flight_mark_time(log);
    atomic_store(&log->bytes->phase_at, td__flight_ticks(log));
    atomic_store(&log->bytes->phase, phase);
}

void td__flight_fail(struct td__flight_log *log, uint64_t entry, td_status status,
                     const char *sentence)
{
    struct td__flight_bytes *bytes = log->bytes;
    pthread_mutex_lock(&log->lock);
    td__flight_mark_time(log);
    td__flight_put_text(bytes->sentence, TD__FLIGHT_SENTENCE, sentence);
    atomic_store(&bytes->failure_entry, entry);
    atomic_store(&bytes->failure_at, td__flight_ticks(log));
    atomic_store(&bytes->failure, (uint32_t)status);
    pthread_mutex_unlock(&log->lock);
}

/* The entries of a group whose name makes room for another's. */
static void hand_over_entries(struct td__flight_bytes *bytes, int slot)
{
    for (int i = 0; i < TD__FLIGHT_ENTRIES; i++) {
        uint32_t what = atomic_load(&bytes->entries[i].what);
        if ((what >> 16 & 0xff) == (uint32_t)slot)
            atomic_store(&bytes->entries[i].what, (what & ~0xff0000u) | (TD__FLIGHT_GROUPS - 1)
                                                                            << 16);
    }
}

int td__flight_name_group(struct td__flight_log *log, uint64_t key, const char *name)
{
    struct td__flight_bytes *bytes = log->bytes;
    enum { OTHERS = TD__FLIGHT_GROUPS - 1 };
    int slot = OTHERS;
    pthread_mutex_lock(&log->lock);
    for (int i = OTHERS - 1; i >= 0; i--)
        if (!atomic_load(&bytes->groups[i].key))
            slot = i;
    if (slot == OTHERS) {
        key = 1;
        name = "…";
    } else {
        hand_over_entries(bytes, slot);
    }
    td__flight_put_text(bytes->groups[slot].name, TD__FLIGHT_NAME, name);
    atomic_store(&bytes->groups[slot].key, key);
    pthread_mutex_unlock(&log->lock);
    return slot;
}

void td__flight_forget_group(struct td__flight_log *log, int slot)
{
    if (slot >= 0 && slot < TD__FLIGHT_GROUPS - 1)
        atomic_store(&log->bytes->groups[slot].key, 0); /* the name stays until it is needed */
}

/* ---- Entries --------------------------------------------------------------------------------- */

_Thread_local uint64_t td__flight_label[TD__FLIGHT_LABEL / 8];

void td__flight_set_label(const char *text)
{
    char whole[TD__FLIGHT_LABEL];
    td__flight_cut(text ? text : "", whole, sizeof whole);
    memcpy(td__flight_label, whole, sizeof td__flight_label);
}

void td__flight_put_label(struct td__flight_log *log, uint64_t index)
{
    _Atomic uint64_t *words = log->bytes->labels[index % TD__FLIGHT_ENTRIES];
    for (int i = 0; i < TD__FLIGHT_LABEL / 8; i++)
        td__flight_put(&words[i], td__flight_label[i]);
}

void td__flight_claim_more(struct td__flight_log *log, struct td__flight_claim *claim)
{
    enum { AT_ONCE = 8 };
    claim->next = atomic_fetch_add_explicit(&log->bytes->next, AT_ONCE, memory_order_relaxed);
    claim->end = claim->next + AT_ONCE;
}

uint64_t td__flight_next_free(struct td__flight_log *log, uint64_t index)
{
    for (int i = 0; i < TRIES; i++) {
        const struct td__flight_entry *entry = &log->bytes->entries[index % TD__FLIGHT_ENTRIES];
        if (!td__flight_under_way(td__flight_look(&entry->mark)))
            break;
        index = atomic_fetch_add_explicit(&log->bytes->next, 1, memory_order_relaxed);
    }
    return index;
}

void td__flight_run(struct td__flight_log *log, uint64_t number)
{
    struct td__flight_entry *entry = td__flight_entry(log, number);
    if (!entry)
        return;
    uint64_t waited = td__flight_look(&entry->mark) & TD__FLIGHT_WAITED;
    td__flight_put(&entry->started, td__flight_ticks(log));
    td__flight_put(&entry->mark, number << 16 | waited | TD__FLIGHT_RUNNING);
}

void td__flight_wait(struct td__flight_log *log, uint64_t number)
{
    struct td__flight_entry *entry = td__flight_entry(log, number);
    uint64_t mark = entry ? td__flight_look(&entry->mark) : 0;
    if (entry && mark >> 16 == number && td__flight_under_way(mark))
        atomic_compare_exchange_strong(&entry->mark, &mark, mark | TD__FLIGHT_WAITED);
}
