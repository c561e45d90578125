/* Writing the flight recorder's pages: entries, names, failures; see flight.h. flight_open.c finds the
 * page. */
#include "os/flight.h"

#include <linux/membarrier.h>
#include <sched.h>
#include <string.h>
#include <sys/syscall.h>
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

void td__flight_mark_time(struct td__flight_log *log)
{
    atomic_store_explicit(&log->bytes->ticks[1], td__flight_ticks(log), memory_order_relaxed);
    atomic_store_explicit(&log->bytes->ns[1], (uint64_t)td__now_ns(), memory_order_relaxed);
}

/* ---- What seldom happens --------------------------------------------------------------------- */

void td__flight_set_phase(struct td__flight_log *log, enum td__flight_phase phase)
{
    if (phase >= TD__FLIGHT_LEAVING && atomic_load(&log->users) > 1)
        return;
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
        uint64_t what = atomic_load(&bytes->entries[i].what);
        if ((what >> 16 & 0xff) == (uint64_t)slot)
            atomic_store(&bytes->entries[i].what,
                         (what & ~UINT64_C(0xff0000)) | (TD__FLIGHT_GROUPS - 1) << 16);
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

static _Thread_local uint64_t label[TD__FLIGHT_LABEL / 8]; /* all zero where there is none */
atomic_bool td__flight_labels_exist;

void td__flight_set_label(const char *text)
{
    char whole[TD__FLIGHT_LABEL];
    td__flight_cut(text ? text : "", whole, sizeof whole);
    memcpy(label, whole, sizeof label);
    if (*whole)
        atomic_store(&td__flight_labels_exist, true);
}

bool td__flight_put_label(struct td__flight_log *log, uint64_t index)
{
    const uint64_t *own = label;
    _Atomic uint64_t *words = log->bytes->labels[index % TD__FLIGHT_ENTRIES];
    for (int i = 0; own[0] && i < TD__FLIGHT_LABEL / 8; i++)
        td__flight_put(&words[i], own[i]);
    return own[0] != 0;
}

/* What `writer` is when it is no thread. */
static const char taken_away, all_threads;

static bool kernel_has(int command)
{
    long commands = syscall(SYS_membarrier, MEMBARRIER_CMD_QUERY, 0, 0);
    return commands > 0 && (commands & command);
}

/* All that other threads of this process store before it is seen here after it, and the other way
 * round. Registering takes some milliseconds, once, and so it waits until it is needed. Were it refused,
 * one number might be given out twice. */
static void make_all_see(void)
{
    syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0);
    syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0);
}

/* Ends the time of the one thread that counts by itself. */
static void share_counting(struct td__flight_log *log)
{
    pthread_mutex_lock(&log->lock);
    if (atomic_load(&log->writer) != &all_threads) {
        atomic_store(&log->writer, &taken_away);
        make_all_see();
        while (atomic_load_explicit(&log->counting, memory_order_acquire))
            sched_yield(); /* for a few instructions of that thread */
        atomic_store(&log->writer, &all_threads);
    }
    pthread_mutex_unlock(&log->lock);
}

uint64_t td__flight_number_shared(struct td__flight_log *log)
{
    const void *writer = NULL;
    if (atomic_load(&log->writer) == NULL && kernel_has(MEMBARRIER_CMD_PRIVATE_EXPEDITED) &&
        atomic_compare_exchange_strong(&log->writer, &writer, td__flight_self()))
        return td__flight_number(log);
    if (atomic_load(&log->writer) != &all_threads)
        share_counting(log);
    return atomic_fetch_add_explicit(&log->bytes->next, 1, memory_order_relaxed);
}

uint64_t td__flight_next_free(struct td__flight_log *log, uint64_t index)
{
    for (int i = 0; i < TRIES; i++) {
        const struct td__flight_entry *entry = &log->bytes->entries[index % TD__FLIGHT_ENTRIES];
        if (td__flight_is_free(td__flight_look(&entry->mark), index))
            break;
        atomic_fetch_add_explicit(&log->bytes->passed, 1, memory_order_relaxed);
        index = td__flight_number(log);
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
    unsigned state = (unsigned)mark & 0xff;
    bool under_way = state == TD__FLIGHT_QUEUED || state == TD__FLIGHT_RUNNING;
    if (entry && mark >> 16 == number && under_way)
        atomic_compare_exchange_strong(&entry->mark, &mark, mark | TD__FLIGHT_WAITED);
}
