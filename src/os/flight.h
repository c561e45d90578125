/* The flight recorder's pages: the last operations of each rank, in memory that outlives the rank.
 *
 *     book    head | log of slot 0 | log of slot 1 | …
 *     log     header | 256 entries | 256 labels
 *
 * A launcher makes a book with a slot for each of its workers (a memfd), and names it in the worker's
 * environment; a worker opens it through the launcher's /proc/PID/fd, so that nothing has to be
 * inherited. A process without a launcher writes into a file, or into memory of its own.
 *
 *     TANDEM_FLIGHT=PID:FD:SLOT      a slot of the book that process PID has open as FD
 *     TANDEM_FLIGHT=/path/prefix     a book of one slot, in the file /path/prefix.RANK
 *     not set                        private memory
 *
 * Writing costs one or two looks at the processor's time stamp counter and some stores to one cache
 * line, about 25 ns together; nothing waits, but for the first entry of a second thread. A reader checks
 * everything: the bytes are another process's, may change while they are read, and may be
 * anything (flight_read.c).
 *
 * An entry may be overwritten by the 256th after it. One that is still under way is passed over, so
 * that what a rank is stuck in stays visible. */
#ifndef TD_OS_FLIGHT_H
#define TD_OS_FLIGHT_H

#include "base/clock.h"

#include <tandem/dtype.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

enum {
    TD__FLIGHT_VERSION = 1,
    TD__FLIGHT_ENTRIES = 256,
    TD__FLIGHT_GROUPS = 32,   /* names that are kept; the last slot stands for all others */
    TD__FLIGHT_HEAD = 4096,   /* bytes of a book's head */
    TD__FLIGHT_SLOTS = 65536, /* most logs in a book */
    TD__FLIGHT_LABEL = 24,    /* texts, with the 0 at their end */
    TD__FLIGHT_NAME = 56,
    TD__FLIGHT_HOST = 64,
    TD__FLIGHT_SENTENCE = 512,
    TD__FLIGHT_ENDING = 128,
    TD__FLIGHT_TEXT = 160, /* what td__flight_describe() needs at most */
};

#define TD__FLIGHT_MAGIC 0x5464466c69676874u
#define TD__FLIGHT_MEMORY "tandem-flight" /* the name of a launcher's memfd */
#define TD__FLIGHT_VARIABLE "TANDEM_FLIGHT"

/** Numbers that stand in pages: they do not change. Up to RECV they are those of td_op_kind. */
enum td__flight_kind {
    TD__FLIGHT_BROADCAST,
    TD__FLIGHT_REDUCE,
    TD__FLIGHT_ALL_REDUCE,
    TD__FLIGHT_SCATTER,
    TD__FLIGHT_GATHER,
    TD__FLIGHT_ALL_GATHER,
    TD__FLIGHT_REDUCE_SCATTER,
    TD__FLIGHT_ALL_TO_ALL,
    TD__FLIGHT_BARRIER,
    TD__FLIGHT_SEND,
    TD__FLIGHT_RECV,
    TD__FLIGHT_MONITORED_BARRIER,
    TD__FLIGHT_KINDS,
};

enum td__flight_state {
    TD__FLIGHT_EMPTY,
    TD__FLIGHT_QUEUED,
    TD__FLIGHT_RUNNING,
    TD__FLIGHT_DONE,
    TD__FLIGHT_FAILED,
    /* Added to these: */
    TD__FLIGHT_WAITED = 0x100, /* QUEUED, RUNNING: a thread of the program waits for it */
    TD__FLIGHT_QUICK = 0x200,  /* DONE: it ended when it began, but for some microseconds */
};

enum td__flight_phase {
    TD__FLIGHT_ABSENT, /* has not called td_init_process_group() */
    TD__FLIGHT_JOINING,
    TD__FLIGHT_JOINED,
    TD__FLIGHT_LEAVING,
    TD__FLIGHT_LEFT,
};

/* ---- The bytes ------------------------------------------------------------------------------- */

/* The first bytes of a book. Written once, before others see it. */
struct td__flight_head {
    uint64_t magic;
    uint32_t version;
    uint32_t slots;
    uint32_t log_size;
    int32_t pid; /* of the launcher, as its user knows it */
    int32_t nnodes, node_rank;
    int32_t world_size;
    int32_t attempt, max_restarts;
    int32_t reserved;
    int64_t started_ns; /* wall clock */
    char host[TD__FLIGHT_HOST];
    char run_id[TD__FLIGHT_HOST];
    char command[256];
};

/* One operation: one cache line. Everything is atomic, since another thread of the same process may read
 * it at any time; on common machines that costs nothing.
 *
 *     mark    number from 1 (48 bits), enum td__flight_state (16)
 *     what    rank (32): of the world, the root or the other side of a message; -1: none, any
 *             flags, group, dtype, kind (8 each)
 *
 * The mark says EMPTY while the rest is being written. */
struct td__flight_entry {
    _Alignas(64) _Atomic uint64_t mark;
    _Atomic uint64_t sequence; /* of a collective in its group, 0 for messages */
    _Atomic uint64_t count;
    _Atomic uint64_t what;
    _Atomic uint64_t detail;  /* a message's tag, a reduction's td_reduce_op */
    _Atomic uint64_t queued;  /* ticks */
    _Atomic uint64_t started; /* where it was not begun at once */
    _Atomic uint64_t ended;
};

enum {
    TD__FLIGHT_POSTED = 1,   /* flags: the caller went on */
    TD__FLIGHT_LABELLED = 2, /* there is a label */
    TD__FLIGHT_AT_ONCE = 4,  /* begun when it was called */
    TD__FLIGHT_UNEVEN = 8,   /* parts of different sizes; the count is that of the whole */
};

struct td__flight_group_name {
    _Atomic uint64_t key; /* 0: free */
    _Atomic uint64_t name[TD__FLIGHT_NAME / 8];
};

struct td__flight_bytes {
    /* The worker's. */
    _Atomic uint32_t owner; /* process that writes here, 0: free */
    _Atomic uint32_t phase; /* enum td__flight_phase */
    _Atomic int32_t rank, size;
    _Atomic uint32_t clock;           /* 1: ticks are the time stamp counter, 0: nanoseconds */
    _Atomic uint32_t failure;         /* td_status of the last failure, 0: none … */
    _Atomic uint64_t failure_at;      /* … when, in ticks … */
    _Atomic uint64_t failure_entry;   /* … of which entry, 0: of none */
    _Atomic uint64_t phase_at;        /* ticks */
    _Atomic uint64_t ticks[2], ns[2]; /* the same moment in ticks and in CLOCK_MONOTONIC, twice */
    _Atomic uint64_t wall;            /* CLOCK_REALTIME minus CLOCK_MONOTONIC, at the start */
    _Atomic uint64_t boot;            /* tells one run of a machine from another */
    _Atomic uint64_t host[TD__FLIGHT_HOST / 8];
    _Atomic uint64_t sentence[TD__FLIGHT_SENTENCE / 8];

    /* The launcher's. */
    _Atomic int32_t started_rank, started_pid; /* below 0: spare -1 - started_rank, without a rank */
    _Atomic int32_t wait_status; /* of waitpid(), once it has ended */
    _Atomic int32_t waits;       /* 1: a spare, which waits for a rank */
    _Atomic uint64_t started_at, ended_at; /* wall clock, ns; 0: not yet */
    _Atomic uint64_t ending[TD__FLIGHT_ENDING / 8];

    struct td__flight_group_name groups[TD__FLIGHT_GROUPS];
    _Alignas(64) _Atomic uint64_t next; /* numbers that were given to entries … */
    _Atomic uint64_t passed;            /* … or to none, where the place was not free */

    _Alignas(4096) struct td__flight_entry entries[TD__FLIGHT_ENTRIES];
    _Atomic uint64_t labels[TD__FLIGHT_ENTRIES][TD__FLIGHT_LABEL / 8];
    _Alignas(4096) char end[];
};

/** The bytes of a book with so many slots. */
static inline size_t td__flight_book_size(int slots)
{
    return TD__FLIGHT_HEAD + (size_t)slots * sizeof(struct td__flight_bytes);
}

/** The log of a slot, in a book that is mapped, or copied, at `book`. */
static inline struct td__flight_bytes *td__flight_log_at(const void *book, int slot)
{
    return (struct td__flight_bytes *)((char *)book + td__flight_book_size(slot));
}

/* ---- Writing --------------------------------------------------------------------------------- */

/** A log that this process writes to. */
struct td__flight_log {
    struct td__flight_bytes *bytes;
    void *map;
    size_t map_size;
    bool stamps; /* ticks are the time stamp counter */
    _Atomic(const void *)
        writer;           /* the one thread that gives out numbers; see td__flight_number() */
    atomic_bool counting; /* … and whether it is at it now */
    pthread_mutex_t lock; /* guards the names, the last failure, and the list of the owner's */
    void *traces;
    atomic_int users;            /* worlds that have opened it; 0: expected */
    int rank;                    /* … for this rank … */
    pid_t pid;                   /* … in this process */
    char *place;                 /* as TANDEM_FLIGHT had it; NULL for private memory */
    struct td__flight_log *next; /* of those with a place */
};

/** Finds or makes the log of a rank, as TANDEM_FLIGHT says; private memory where that does not work
 *  or the slot is taken. A rank that opens it again meanwhile gets the same one. TD_ERR_NOMEM only. */
td_status td__flight_open(int rank, int size, struct td__flight_log **log);

/** A rank begins to look for the others: opens its log, so that it is seen to wait for them. `rank` is
 *  -1 where it is not known yet, `size` then 0. The next td__flight_open() goes on with it. Nothing
 *  where TANDEM_FLIGHT names no place, or names files and the rank is not known. */
void td__flight_expect(int rank, int size);

/** Closes that log where no td__flight_open() went on with it. With a `status`, `sentence` says what went wrong. */
void td__flight_give_up(td_status status, const char *sentence);

/** Ends the writing; the bytes stay for their readers. */
void td__flight_close(struct td__flight_log *log);

/** Says how far the rank is. Leaving does not count while there is another user. */
void td__flight_set_phase(struct td__flight_log *log, enum td__flight_phase phase);

/** Keeps a failure and its sentence. */
void td__flight_fail(struct td__flight_log *log, uint64_t entry, td_status status,
                     const char *sentence);

/** Takes a slot for a group's name; gives it back. */
int td__flight_name_group(struct td__flight_log *log, uint64_t key, const char *name);
void td__flight_forget_group(struct td__flight_log *log, int slot);

/** The text that this thread's entries carry from now on, cut; NULL or "": none. */
void td__flight_set_label(const char *label);

/** Takes the second pair of times again, so that a page that is read elsewhere has two. */
void td__flight_mark_time(struct td__flight_log *log);

/** Whether this machine has a time stamp counter that can be used as a clock. */
bool td__flight_has_stamps(void);

static inline uint64_t td__flight_ticks(const struct td__flight_log *log)
{
#if defined(__x86_64__)
    if (log->stamps)
        return __rdtsc();
#endif
    (void)log;
    return (uint64_t)td__now_ns();
}

/** Whether any thread has ever had a label: until then no thread looks at its own, which costs a call. (Thread
 *  locals that need none would be initial-exec, and a library that has such cannot be loaded by dlopen().) */
extern atomic_bool td__flight_labels_exist;

/** What no other thread has: its thread pointer. */
static inline const void *td__flight_self(void)
{
#if defined(__x86_64__)
    const void *self;
    __asm__("mov %%fs:0, %0" : "=r"(self));
    return self;
#else
    return (const void *)pthread_self();
#endif
}

static inline uint64_t td__flight_what(enum td__flight_kind kind, td_dtype dtype, int group,
                                       unsigned flags, int rank)
{
    return (uint64_t)kind | (uint64_t)dtype << 8 | (uint64_t)group << 16 | (uint64_t)flags << 24 |
           (uint64_t)(uint32_t)rank << 32;
}

static inline void td__flight_put(_Atomic uint64_t *at, uint64_t value)
{
    atomic_store_explicit(at, value, memory_order_release);
}

static inline uint64_t td__flight_look(const _Atomic uint64_t *at)
{
    return atomic_load_explicit(at, memory_order_acquire);
}

/** Whether the entry with this mark may make room for that of `index`: it is over, and not a later one.
 *  Where a thread was slow, others may have come round to the same entry; it then takes another, and
 *  leaves alone what they are writing. */
static inline bool td__flight_is_free(uint64_t mark, uint64_t index)
{
    return !mark || (((unsigned)mark & 0xff) >= TD__FLIGHT_DONE && mark >> 16 <= index);
}

/** The slow way to a number: the first one of a thread, or when several threads ask. */
uint64_t td__flight_number_shared(struct td__flight_log *log);

/** Gives out the number of the next entry, less 1.
 *
 *  An atomic add waits for all stores before it, among them those of the last operation to memory that
 *  other ranks look at. So the first thread that asks counts without one, as long as it is the only
 *  one. A second thread takes that right away from it: it says so in `writer`, has the kernel make all
 *  processors see that, and waits until `counting` is false. From then on all threads add atomically. */
static inline uint64_t td__flight_number(struct td__flight_log *log)
{
    const void *self = td__flight_self();
    if (__builtin_expect(atomic_load_explicit(&log->writer, memory_order_relaxed) != self, 0))
        return td__flight_number_shared(log);
    atomic_store_explicit(&log->counting, true, memory_order_relaxed);
    atomic_signal_fence(memory_order_seq_cst); /* the processors' part is done by the kernel */
    bool alone = atomic_load_explicit(&log->writer, memory_order_relaxed) == self;
    uint64_t index = atomic_load_explicit(&log->bytes->next, memory_order_relaxed);
    if (__builtin_expect(alone, 1))
        atomic_store_explicit(&log->bytes->next, index + 1, memory_order_relaxed);
    atomic_store_explicit(&log->counting, false, memory_order_release);
    return __builtin_expect(alone, 1) ? index : td__flight_number_shared(log);
}

/** What happens once in 256 entries, or with a label, or where the next entry is still under way. */
uint64_t td__flight_next_free(struct td__flight_log *log, uint64_t index);
bool td__flight_put_label(struct td__flight_log *log, uint64_t index);

/** Writes an entry and returns its number. `what` is td__flight_what(). For any thread. */
static inline uint64_t td__flight_begin(struct td__flight_log *log, uint64_t sequence,
                                        uint64_t count, uint64_t what, int detail,
                                        enum td__flight_state state)
{
    struct td__flight_bytes *bytes = log->bytes;
    uint64_t now = td__flight_ticks(log), index = td__flight_number(log);
    struct td__flight_entry *entry = &bytes->entries[index % TD__FLIGHT_ENTRIES];
    if (__builtin_expect(!td__flight_is_free(td__flight_look(&entry->mark), index), 0)) {
        index = td__flight_next_free(log, index);
        entry = &bytes->entries[index % TD__FLIGHT_ENTRIES];
    }
    /* A reader looks at the mark before and after the rest: it must see EMPTY where it sees anything
     * that comes after it. So each store releases, which costs nothing on x86. */
    uint64_t number = (index + 1) << 16;
    td__flight_put(&entry->mark, number);
    td__flight_put(&entry->sequence, sequence);
    td__flight_put(&entry->count, count);
    td__flight_put(&entry->detail, (uint32_t)detail);
    td__flight_put(&entry->queued, now);
    if (__builtin_expect(atomic_load_explicit(&td__flight_labels_exist, memory_order_relaxed), 0) &&
        td__flight_put_label(log, index))
        what |= (uint64_t)TD__FLIGHT_LABELLED << 24;
    td__flight_put(&entry->what, what);
    td__flight_put(&entry->mark, number | state);
    if (__builtin_expect(index % TD__FLIGHT_ENTRIES == 0, 0))
        td__flight_mark_time(log);
    return index + 1;
}

/** The entry of this number, or NULL where it was overwritten. */
static inline struct td__flight_entry *td__flight_entry(struct td__flight_log *log, uint64_t number)
{
    struct td__flight_entry *entry = &log->bytes->entries[(number - 1) % TD__FLIGHT_ENTRIES];
    return td__flight_look(&entry->mark) >> 16 == number ? entry : NULL;
}

/** It is over. Another thread might overwrite the entry between the look at its number and the stores;
 *  that takes 256 operations within a nanosecond, and would spoil one line of a report. */
static inline void td__flight_end(struct td__flight_log *log, uint64_t number, bool well)
{
    struct td__flight_entry *entry = td__flight_entry(log, number);
    if (!entry)
        return;
    td__flight_put(&entry->ended, td__flight_ticks(log));
    td__flight_put(&entry->mark, number << 16 | (well ? TD__FLIGHT_DONE : TD__FLIGHT_FAILED));
}

/** The same of one that went well within some microseconds, without a look at the clock. Has the next
 *  entry at hand by the time it is needed. */
static inline void td__flight_end_quick(struct td__flight_log *log, uint64_t number)
{
    struct td__flight_entry *entry = td__flight_entry(log, number);
    if (!entry)
        return;
    td__flight_put(&entry->mark, number << 16 | TD__FLIGHT_QUICK | TD__FLIGHT_DONE);
    __builtin_prefetch(&log->bytes->entries[number % TD__FLIGHT_ENTRIES], 1);
}

/** A queued one runs now. */
void td__flight_run(struct td__flight_log *log, uint64_t number);

/** A thread of the program waits for it. */
void td__flight_wait(struct td__flight_log *log, uint64_t number);

/* ---- The launcher's side --------------------------------------------------------------------- */

struct td__flight_book {
    int fd;
    int slots;
    void *map;
    size_t size;
};

/** What a book says about the job; all texts are cut where they are too long. */
struct td__flight_job {
    pid_t pid; /* that the user knows the job by */
    int slots;
    int nnodes, node_rank, world_size;
    int attempt, max_restarts;
    const char *run_id;
    char *const *command; /* ended by NULL */
};

td_status td__flight_book_open(const struct td__flight_job *job, struct td__flight_book *book);
void td__flight_book_close(struct td__flight_book *book);

/** Fills in the head of a book. */
void td__flight_head_fill(struct td__flight_head *head, const struct td__flight_job *job);

/** Opens the book that another process has open at `path`, below /proc, with `flags` of open(). It cannot
 *  shrink: a look at memory that is gone would end this process. -1 where it is none, may not be opened,
 *  or is gone. */
int td__flight_book_find(const char *path, int flags, struct stat *found);

/** The value of TANDEM_FLIGHT for the worker of `slot`, as process `pid` has the book open. */
void td__flight_book_place(const struct td__flight_book *book, pid_t pid, int slot, char *text,
                           size_t room);

/** A worker was started, has ended. */
void td__flight_book_started(struct td__flight_book *book, int slot, int rank, pid_t pid);
void td__flight_book_ended(struct td__flight_book *book, int slot, int wait_status,
                           const char *how);

/* ---- Texts (flight_text.c) ------------------------------------------------------------------- */

/** Copies as much of `text` as fits with a NUL, in whole UTF-8 characters; the rest of `out` is
 *  zeroed. */
void td__flight_cut(const char *text, char *out, size_t capacity);

/** The same into words of a log; `capacity` is a multiple of 8, at most 512. */
void td__flight_put_text(_Atomic uint64_t *words, size_t capacity, const char *text);

/** Copies at most `size` bytes, up to a NUL; invalid UTF-8 and control characters become '?'.
 *  `out` has space for size + 1 bytes. */
void td__flight_printable(const void *bytes, size_t size, char *out);

#endif
