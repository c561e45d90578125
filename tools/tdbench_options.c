/* The command line of tdbench: names of operations and flags, in any order. */
#include "tdbench.h"

#include "base/fail.h"
#include "base/number.h"
#include "reduce/reduction.h"
#include "launch/flags.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_RANKS = 1 << 20, MAX_SPAWNED = 4096 };

static const int64_t default_bytes[] = {4, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20};
static const int64_t default_ranks[] = {2, 8, 64, 1024, 100000};

/* ---- Setters --------------------------------------------------------------------------------- */

static td_status set_size(const struct td__flag *flag, const char *value, void *target)
{
    if (!bench_parse_size(value, strlen(value), (int64_t *)((char *)target + flag->offset)))
        return td_fail(TD_ERR_INVALID, "\"%s\" is not a size such as 4, 64K or 256M", value);
    return TD_OK;
}

/* Sizes or numbers between commas; `low` and `high` of the flag bound them. */
static td_status set_list(const struct td__flag *flag, const char *value, void *target)
{
    struct bench_list list = {.count = 0};
    for (const char *at = value;; at++) {
        size_t length = strcspn(at, ",");
        int64_t number;
        if (!bench_parse_size(at, length, &number) || number < flag->low ||
            (flag->high && number > flag->high))
            return td_fail(TD_ERR_INVALID, "\"%.*s\" is not %s", (int)length, at,
                           flag->high ? "a number of ranks" : "a size such as 4, 64K or 256M");
        if (list.count == BENCH_MAX_SIZES)
            return td_fail(TD_ERR_INVALID, "there are more than %d values", BENCH_MAX_SIZES);
        list.at[list.count++] = number;
        at += length;
        if (!*at)
            break;
    }
    *(struct bench_list *)((char *)target + flag->offset) = list;
    return TD_OK;
}

static td_status set_dtype(const struct td__flag *flag, const char *value, void *target)
{
    if (!td_dtype_parse(value, (td_dtype *)((char *)target + flag->offset)))
        return td_fail(TD_ERR_INVALID, "\"%s\" is not a dtype such as f32, f64, f16, bf16, i8 …",
                       value);
    return TD_OK;
}

static td_status set_reduce_op(const struct td__flag *flag, const char *value, void *target)
{
    for (td_reduce_op op = TD_SUM; op <= TD_PREMUL_SUM; op++) {
        if (!strcmp(value, td_reduce_op_name(op))) {
            *(td_reduce_op *)((char *)target + flag->offset) = op;
            return TD_OK;
        }
    }
    return td_fail(TD_ERR_INVALID,
                   "\"%s\" is not one of sum, product, min, max, avg, band, bor, bxor, premul_sum",
                   value);
}

/* One of the words in the flag's argument: "shm|tcp". */
static td_status set_word(const struct td__flag *flag, const char *value, void *target)
{
    const char *word = flag->argument;
    size_t length = strcspn(word, "|");
    while (word[length] && (strlen(value) != length || strncmp(value, word, length) != 0)) {
        word += length + 1;
        length = strcspn(word, "|");
    }
    if (strlen(value) != length || strncmp(value, word, length) != 0)
        return td_fail(TD_ERR_INVALID, "\"%s\" is not one of %s", value, flag->argument);
    return td__flag_set_text(flag, value, target);
}

static td_status set_positive_seconds(const struct td__flag *flag, const char *value, void *target)
{
    double seconds;
    if (!td__parse_seconds(value, &seconds) || seconds <= 0)
        return td_fail(TD_ERR_INVALID, "\"%s\" is not a number of seconds above 0", value);
    *(double *)((char *)target + flag->offset) = seconds;
    return TD_OK;
}

static td_status unset_bool(const struct td__flag *flag, const char *value, void *target)
{
    (void)value;
    *(bool *)((char *)target + flag->offset) = false;
    return TD_OK;
}

static td_status set_time(const struct td__flag *flag, const char *value, void *target)
{
    if (!bench_parse_time(value, (double *)((char *)target + flag->offset)))
        return td_fail(TD_ERR_INVALID, "\"%s\" is not a time such as 5us or 1.5ms", value);
    return TD_OK;
}

/* Stored as seconds a byte. */
static td_status set_rate(const struct td__flag *flag, const char *value, void *target)
{
    double rate;
    if (!bench_parse_rate(value, &rate))
        return td_fail(TD_ERR_INVALID, "\"%s\" is not a rate such as 10GB/s or 100Gb/s", value);
    *(double *)((char *)target + flag->offset) = 1 / rate;
    return TD_OK;
}

/* ---- The table ------------------------------------------------------------------------------- */

#define AT(field) .offset = offsetof(struct bench_options, field)

static const struct td__flag flags[] = {
    {"ranks", 'n', "N[,N...]", "start N ranks here (those of the launcher)", set_list, AT(ranks), 1,
     MAX_RANKS},
    {"min", 0, "SIZE", "smallest buffer (4)", set_size, AT(min)},
    {"max", 0, "SIZE", "largest buffer (256M)", set_size, AT(max)},
    {"factor", 'f', "N", "each buffer is N times the last (4)", td__flag_set_int, AT(factor), 2,
     1 << 20},
    {"bytes", 'b', "SIZE[,SIZE...]", "these buffers instead", set_list, AT(sizes), 0, 0},
    {"dtype", 'd', "TYPE", "f32, f64, f16, bf16, i8, u8, i32, i64 … (f32)", set_dtype, AT(dtype)},
    {"op", 'o', "OP", "how to reduce: sum, product, min, max, avg, band … (sum)", set_reduce_op,
     AT(op)},
    {"root", 0, "RANK", "of broadcast, reduce, gather and scatter (0)", td__flag_set_int, AT(root),
     0, MAX_RANKS - 1},
    {"transport", 0, "shm|tcp", "between ranks of one host (shm)", set_word, AT(transport)},
    {"backend", 0, "NAME", "of the group: native, or one of a plug-in such as mpi (native)",
     td__flag_set_text, AT(backend)},
    {"memory", 0, "tandem|malloc", "allocator of the buffers (tandem: td_alloc())", set_word,
     AT(memory)},
    {"parts", 0, "random|one|even",
     "of all_gather_v and reduce_scatter_v (random); one: the root's", set_word, AT(parts)},
    {"iters", 'i', "N", "iterations of a row (5 to 1000, from --time)", td__flag_set_int,
     AT(iterations), 1, 10000000},
    {"time", 't', "SECONDS", "approximate time of a row (0.8)", set_positive_seconds, AT(seconds)},
    {"warmup", 'w', "N", "warm-up iterations (3)", td__flag_set_int, AT(warmup), 1, 1000000},
    {"check", 0, NULL, "check the results at every size (the default)", unset_bool, AT(no_check)},
    {"no-check", 0, NULL, "do not check them", td__flag_set_bool, AT(no_check)},
    {"async", 0, NULL, "make each call asynchronous, and wait for its work", td__flag_set_bool,
     AT(async)},
    {"rules", 0, NULL, "check that no operation takes longer than others that do the same",
     td__flag_set_bool, AT(rules)},
    {"json", 'j', NULL, "print one line of JSON a row", td__flag_set_bool, AT(json)},
    {"simulate", 0, NULL, "print what the algorithms would cost on a network", td__flag_set_bool,
     AT(simulate)},
    {"latency", 0, "TIME", "--simulate: of a message (5us)", set_time, AT(network.latency)},
    {"bandwidth", 0, "RATE", "--simulate: of a link (10GB/s)", set_rate, AT(network.byte)},
    {"reduce", 0, "RATE", "--simulate: at which a rank reduces (8GB/s)", set_rate,
     AT(network.reduce_byte)},
    {"devices", 0, NULL, "list the devices of this machine, and do nothing else", td__flag_set_bool,
     AT(devices)},
    {"help", 'h', NULL, "print this help", td__flag_set_bool, AT(help)},
    {"version", 'V', NULL, "print the version", td__flag_set_bool, AT(version)},
};

static const struct td__flag_table table = {flags, sizeof flags / sizeof *flags, ""};

void bench_options_help(FILE *out)
{
    fputs("usage: tdbench OPERATION… [options]\n"
          "       tdbench --rules [options]\n"
          "       tdbench --simulate [OPERATION…] [--ranks N,...] [--bytes SIZE,...]\n"
          "       tdbench --devices\n\n"
          "Measures collective operations, and checks their results.\n\n"
          "    tdbench all_reduce -n 2                       two ranks on this machine\n"
          "    tdrun --nproc-per-node 4 tdbench all          the ranks of a launcher\n"
          "    tdbench all_gather -n 8 --max 1M --json\n\n"
          "Operations:",
          out);
    for (const struct bench_operation *at = bench_operations; at->name; at++)
        fprintf(out, " %s", at->name);
    fputs(", or all.\n\n", out);
    td__flags_print(&table, out);
    fputs(
        "\nSizes are in bytes, with K, M and G for powers of 1024. The exit code is 1 when a\n"
        "result was wrong, a rank has failed, a rule was broken or a device cannot be used, and 2\n"
        "when the command line is wrong.\n",
        out);
}

/* ---- Putting it together --------------------------------------------------------------------- */

static td_status take_operation(const char *name, struct bench_options *options)
{
    const struct bench_operation *meant, *found = bench_operation_find(name, &meant);
    if (found) {
        for (int i = 0; i < options->operation_count; i++)
            if (options->operations[i] == found)
                return TD_OK;
        options->operations[options->operation_count++] = found;
        return TD_OK;
    }
    if (!strcmp(name, "all")) {
        options->operation_count = 0;
        for (const struct bench_operation *at = bench_operations; at->name; at++)
            options->operations[options->operation_count++] = at;
        return TD_OK;
    }
    if (meant)
        return td_fail(TD_ERR_INVALID, "unknown operation %s; did you mean %s?", name, meant->name);
    return td_fail(TD_ERR_INVALID, "unknown operation %s; --help lists the known ones", name);
}

static void take_defaults(struct bench_list *list, const int64_t *values, size_t count)
{
    if (list->count)
        return;
    memcpy(list->at, values, count * sizeof *values);
    list->count = (int)count;
}

static td_status finish_sizes(struct bench_options *options)
{
    struct bench_list *list = &options->sizes;
    char least[24], most[24];
    if (list->count)
        return TD_OK;
    if (options->min < 1 || options->max < options->min)
        return td_fail(TD_ERR_INVALID, "--min %s and --max %s: there is no size between them",
                       bench_size_text(options->min, least), bench_size_text(options->max, most));
    for (int64_t bytes = options->min; bytes <= options->max; bytes *= options->factor) {
        list->at[list->count++] = bytes;
        if (bytes > options->max / options->factor || list->count == BENCH_MAX_SIZES)
            break;
    }
    return TD_OK;
}

/* The ranks of a run; those of a simulation may be any number. */
static td_status finish_ranks(struct bench_options *options)
{
    const char *rank = getenv("RANK"), *size = getenv("WORLD_SIZE");
    int world;
    for (int i = 0; i < options->ranks.count; i++) {
        if (options->ranks.at[i] > MAX_SPAWNED)
            return td_fail(TD_ERR_INVALID, "--ranks: %lld processes are too many; at most %d",
                           (long long)options->ranks.at[i], MAX_SPAWNED);
        if (options->root >= options->ranks.at[i])
            return td_fail(TD_ERR_INVALID, "--root %d: of %lld ranks, the last is %lld",
                           options->root, (long long)options->ranks.at[i],
                           (long long)options->ranks.at[i] - 1);
    }
    if (options->ranks.count && rank && size && td__parse_int(size, 2, 1 << 30, &world))
        return td_fail(TD_ERR_INVALID,
                       "--ranks starts ranks, but a launcher has started this one as rank %s of "
                       "%d already; leave --ranks out",
                       rank, world);
    return TD_OK;
}

static td_status finish(struct bench_options *options)
{
    if (options->simulate) {
        take_defaults(&options->sizes, default_bytes, sizeof default_bytes / sizeof(int64_t));
        take_defaults(&options->ranks, default_ranks, sizeof default_ranks / sizeof(int64_t));
        return TD_OK;
    }
    if (options->rules)
        bench_rules_operations(options);
    if (!options->operation_count)
        return td_fail(TD_ERR_INVALID, "there is no operation to measure: tdbench all_reduce -n 2; "
                                       "--help lists them");
    TD_TRY(finish_sizes(options));
    TD_TRY(finish_ranks(options));
    bool reduces = false;
    for (int i = 0; i < options->operation_count; i++)
        reduces |= options->operations[i]->reduces;
    struct td__reduction reduction = {.dtype = options->dtype, .op = options->op, .factor = 1};
    return reduces ? td__reduction_check(&reduction) : TD_OK;
}

td_status bench_options_parse(int argc, char **argv, struct bench_options *options)
{
    /* A further message of the same round costs a fifth of the first one's latency, a copy half of a
     * reduction: good enough to compare the algorithms. */
    *options = (struct bench_options){
        .min = 4,
        .max = 256 << 20,
        .factor = 4,
        .dtype = TD_F32,
        .op = TD_SUM,
        .transport = "shm",
        .memory = "tandem",
        .parts = "random",
        .seconds = 0.8,
        .warmup = 3,
        .network = {.latency = 5e-6, .byte = 1e-10, .reduce_byte = 1 / 8e9},
    };
    for (int at = 0; at < argc;) {
        int rest;
        TD_TRY(td__flags_parse(&table, argc - at, argv + at, options, &rest));
        at += rest;
        if (at < argc)
            TD_TRY(take_operation(argv[at], options));
    }
    options->network.transfer = options->network.latency / 5;
    options->network.copy_byte = options->network.reduce_byte / 2;
    return options->help || options->version || options->devices ? TD_OK : finish(options);
}
