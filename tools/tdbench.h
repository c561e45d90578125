/* What the files of tdbench share.
 *
 *     tdbench.c            main: starts the ranks, or joins those that a launcher has started
 *     tdbench_options.c    the command line
 *     tdbench_units.c      sizes, times and rates, from and to text
 *     tdbench_operations.c what is measured: the call, its input, its expected output
 *     tdbench_values.c     the values that are sent, and the search for wrong ones
 *     tdbench_measure.c    a row: warm-up, iterations, check
 *     tdbench_rules.c      --rules: operations against others that do the same together
 *     tdbench_report.c     the table and the JSON lines
 *     tdbench_simulate.c   --simulate
 *     device_list.c        --devices, which tdrun shares */
#ifndef TDBENCH_H
#define TDBENCH_H

#include "collective/simulate.h"

#include <tandem/group.h>

#include <stdio.h>

enum { BENCH_MAX_OPERATIONS = 16, BENCH_MAX_SIZES = 64 };

struct bench_operation;

struct bench_list {
    int64_t at[BENCH_MAX_SIZES];
    int count;
};

struct bench_options {
    bool help, version, devices, simulate, rules, json, async, no_check;
    const struct bench_operation *operations[BENCH_MAX_OPERATIONS];
    int operation_count;
    struct bench_list ranks; /* empty: the launcher's */
    struct bench_list sizes; /* of --bytes, or from the next three */
    int64_t min, max;
    int factor;
    td_dtype dtype;
    td_reduce_op op;
    int root;
    const char *transport; /* "shm" or "tcp" */
    const char *backend;   /* NULL: the default */
    const char *memory;    /* "tandem" or "malloc" */
    const char *parts;     /* of all_gather_v and reduce_scatter_v: "random", "one" or "even" */
    int iterations;        /* 0: as many as take `seconds` */
    double seconds;
    int warmup;
    struct td__network network; /* of --simulate */
};

/** Parses the command line; TD_ERR_INVALID with a text for a mistake in it. */
td_status bench_options_parse(int argc, char **argv, struct bench_options *options);

void bench_options_help(FILE *out);

/* ---- Units ----------------------------------------------------------------------------------- */

/** "64K", "1M", "256MiB", "12": bytes, in powers of 1024. */
bool bench_parse_size(const char *text, size_t length, int64_t *bytes);

/** "5us", "1.5 ms", "200ns": seconds. */
bool bench_parse_time(const char *text, double *seconds);

/** "10GB/s", "100Gb/s" (bits): bytes a second. */
bool bench_parse_rate(const char *text, double *bytes_per_second);

/** "64K" for 65536, digits for other numbers; in the caller's buffer. */
const char *bench_size_text(int64_t bytes, char text[24]);

/** "5.00 µs", "1.20 s"; padded to `width` columns. */
const char *bench_time_text(double seconds, int width, char text[48]);

/* ---- One world of ranks ---------------------------------------------------------------------- */

/* A rank, and the memory that it measures with. */
struct bench_world {
    const struct bench_options *options;
    int rank, size, local_size;
    char *in, *out;        /* `in` is NULL where no operation needs it */
    size_t *counts;        /* of uneven parts, for each rank … */
    size_t counts_whole;   /* … of so many elements in all */
    double *times;         /* of the iterations of a row, in seconds */
    char *pattern;         /* one period, of any type */
    char *scratch;         /* for two */
    int64_t wrong;         /* elements of this rank, over all rows */
    char first_wrong[256]; /* a text about the first of them */
};

/** Allocates the memory that the operations need, and touches every page of it. */
td_status bench_world_open(struct bench_world *world, const struct bench_options *options);
void bench_world_close(struct bench_world *world);

/* ---- Operations ------------------------------------------------------------------------------ */

struct bench_operation {
    const char *name;
    bool parts;       /* the buffer has one part a rank */
    bool needs_input; /* is out of place */
    bool reduces;

    /** One call, on `count` elements (of a part, if there are parts). With `work` it may return a work to wait
     *  for. */
    td_status (*call)(struct bench_world *world, size_t count, td_work **work);

    /** Writes known values to the input of `call`. NULL: it has none. */
    void (*fill)(struct bench_world *world, size_t count);

    /** The number of wrong elements in this rank's output. */
    int64_t (*check)(struct bench_world *world, size_t count);
};

/** All of them, ended by one without a name. */
extern const struct bench_operation bench_operations[];

/** Finds an operation by its name, with or without hyphens and underscores; else NULL, and *nearest is the
 *  one with the most similar name, or NULL. */
const struct bench_operation *bench_operation_find(const char *name,
                                                   const struct bench_operation **nearest);

/** How many times the bytes of the buffer cross the busiest link at least. */
double bench_bus_factor(const struct bench_operation *operation, int ranks);

/* ---- Values ------------------------------------------------------------------------------------
 *
 * Element i of what rank r sends depends on r and on i modulo BENCH_PERIOD, a prime: data at a wrong offset
 * is detected, since hardly any block has a multiple of that many elements, and a buffer is compared at the
 * speed of memory. */

enum { BENCH_PERIOD = 4093 };

/** Writes `count` elements of rank `from`, from its element `first` on. */
void bench_fill(struct bench_world *world, int from, size_t first, void *data, size_t count);

/** Counts the elements of `data` that are not those of rank `from`, from its element `first` on. */
int64_t bench_check(struct bench_world *world, int from, size_t first, const void *data,
                    size_t count);

/** The same for the reduced elements of all ranks. */
int64_t bench_check_reduced(struct bench_world *world, size_t first, const void *data,
                            size_t count);

/* ---- Rows ------------------------------------------------------------------------------------ */

struct bench_row {
    const struct bench_operation *operation;
    int ranks;
    size_t bytes, count;
    int iterations;
    double median, min, p99; /* seconds */
    int64_t wrong;           /* elements on all ranks; -1: not checked */
};

/** Measures `operation` with a buffer of about `bytes`; collective. row->bytes is its true size. */
td_status bench_measure(struct bench_world *world, const struct bench_operation *operation,
                        int64_t bytes, struct bench_row *row);

/** One call after a barrier, and this rank's time. */
td_status bench_once(struct bench_world *world, const struct bench_operation *operation,
                     size_t count, double *seconds);

/** The maximum over the ranks of each value; collective. */
td_status bench_maximum(double *values, size_t count);
void bench_sort(double *values, size_t count);

/* ---- Rules ----------------------------------------------------------------------------------- */

/** Sets the operations of the rules in the options. */
void bench_rules_operations(struct bench_options *options);

/** Measures and prints all rules at all sizes; collective. *broken: how many are broken. */
td_status bench_rules_run(struct bench_world *world, int *broken);

/** `bytes` rounded up to whole elements and whole parts. */
size_t bench_true_bytes(const struct bench_world *world, const struct bench_operation *operation,
                        int64_t bytes);

/** The transport in use, in words. */
const char *bench_transport_name(const struct bench_world *world);

/** Prints the host, the ranks and the transport, as comments. */
void bench_print_environment(const struct bench_world *world);
void bench_print_header(const struct bench_world *world);
void bench_print_row(const struct bench_world *world, const struct bench_row *row);

/** Prints the table of costs; returns the exit code. */
int bench_simulate(const struct bench_options *options);

#endif
