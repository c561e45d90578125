/* --rules: no operation takes longer than others that do the same together, and none is slower in place than
 * out of place.
 *
 * A round has one call of each operation, in an order that changes from round to round, so that other load
 * on the machine affects all of them. Before every call each rank rewrites its input, as a program would
 * have computed it: what others read is in the writer's cache. Medians over the rounds of the slowest rank's
 * times are compared.
 *
 * The right side of a rule is the sum of its operations' medians. A rule is kept if the left side takes at
 * most SLACK times that, or exceeds it by no more than the resolution of the clock. If one is broken, the
 * size is measured three times more, and the medians of all four count. */
#include "tdbench.h"

#include "base/clock.h"
#include "base/fail.h"

#include <stdlib.h>
#include <string.h>

enum { LEAST_ROUNDS = 31, MOST_ROUNDS = 500, TRIES = 4, GUESS_ROUNDS = 3, CLOCK_READINGS = 1000 };

#define SLACK 1.1

/* ---- The other ways to call ------------------------------------------------------------------ */

static char *own_part(struct bench_world *world, char *whole, size_t count)
{
    return whole + (size_t)world->rank * count * td_dtype_size(world->options->dtype);
}

static td_status all_reduce_out_of_place(struct bench_world *world, size_t count, td_work **work)
{
    return td_group_all_reduce(world->out, world->in, count, world->options->dtype,
                               world->options->op, NULL, work);
}

static td_status reduce_out_of_place(struct bench_world *world, size_t count, td_work **work)
{
    void *output = world->rank == world->options->root ? world->out : NULL;
    return td_group_reduce(output, world->in, count, world->options->dtype, world->options->root,
                           world->options->op, NULL, work);
}

static td_status reduce_scatter_in_place(struct bench_world *world, size_t count, td_work **work)
{
    return td_group_reduce_scatter(own_part(world, world->in, count), world->in, count,
                                   world->options->dtype, world->options->op, NULL, work);
}

static td_status all_gather_in_place(struct bench_world *world, size_t count, td_work **work)
{
    return td_group_all_gather(world->out, own_part(world, world->out, count), count,
                               world->options->dtype, NULL, work);
}

static void fill_input(struct bench_world *world, size_t count)
{
    bench_fill(world, world->rank, 0, world->in, count);
}

static void fill_inputs(struct bench_world *world, size_t count)
{
    bench_fill(world, world->rank, 0, world->in, count * (size_t)world->size);
}

static void fill_own_part(struct bench_world *world, size_t count)
{
    bench_fill(world, world->rank, 0, own_part(world, world->out, count), count);
}

static const struct bench_operation variants[] = {
    {"all_reduce out of place", .needs_input = true, .reduces = true,
     .call = all_reduce_out_of_place, .fill = fill_input},
    {"reduce out of place", .needs_input = true, .reduces = true, .call = reduce_out_of_place,
     .fill = fill_input},
    {"reduce_scatter in place", .parts = true, .needs_input = true, .reduces = true,
     .call = reduce_scatter_in_place, .fill = fill_inputs},
    {"all_gather in place", .parts = true, .needs_input = true, .call = all_gather_in_place,
     .fill = fill_own_part},
    {.name = NULL},
};

/* ---- The rules ------------------------------------------------------------------------------- */

enum { RULES = 8 };

struct rule {
    const char *whole, *parts[2];
};

static const struct rule rules[RULES] = {
    {"all_reduce", {"reduce_scatter", "all_gather"}}, {"all_reduce", {"reduce", "broadcast"}},
    {"all_reduce", {"all_reduce out of place"}},      {"broadcast", {"scatter", "all_gather"}},
    {"reduce", {"reduce_scatter", "gather"}},         {"reduce", {"reduce out of place"}},
    {"reduce_scatter in place", {"reduce_scatter"}},  {"all_gather in place", {"all_gather"}},
};

static const struct bench_operation *find(const char *name)
{
    const struct bench_operation *nearest;
    for (const struct bench_operation *at = variants; at->name; at++)
        if (!strcmp(name, at->name))
            return at;
    return bench_operation_find(name, &nearest);
}

static void add(struct bench_options *options, const char *name)
{
    const struct bench_operation *operation = find(name);
    for (int i = 0; i < options->operation_count; i++)
        if (options->operations[i] == operation)
            return;
    options->operations[options->operation_count++] = operation;
}

void bench_rules_operations(struct bench_options *options)
{
    options->operation_count = 0;
    for (int i = 0; i < RULES; i++) {
        add(options, rules[i].whole);
        for (int k = 0; k < 2 && rules[i].parts[k]; k++)
            add(options, rules[i].parts[k]);
    }
}

/* ---- Measuring ------------------------------------------------------------------------------- */

struct round_table {
    size_t bytes;
    double *times[BENCH_MAX_OPERATIONS]; /* in each round */
    double medians[BENCH_MAX_OPERATIONS];
    int rounds;
    double clock_step;
};

static size_t count_of(const struct bench_world *world, const struct round_table *table,
                       const struct bench_operation *operation)
{
    size_t count = table->bytes / td_dtype_size(world->options->dtype);
    return operation->parts ? count / (size_t)world->size : count;
}

static td_status run_one(struct bench_world *world, struct round_table *table, int column,
                         int round)
{
    const struct bench_operation *operation = world->options->operations[column];
    size_t count = count_of(world, table, operation);
    operation->fill(world, count);
    return bench_once(world, operation, count, &table->times[column][round]);
}

/* Each round has another order, the same on all ranks: the time of a call depends a little on the call
 * before it, more so if ranks share processors. */
static void shuffle(int *columns, int count, uint32_t *state)
{
    for (int k = count - 1; k > 0; k--) {
        *state = *state * 1664525u + 1013904223u;
        int other = (int)((*state >> 8) % (uint32_t)(k + 1)), moved = columns[k];
        columns[k] = columns[other];
        columns[other] = moved;
    }
}

static td_status run_rounds(struct bench_world *world, struct round_table *table, int rounds)
{
    int columns[BENCH_MAX_OPERATIONS], count = world->options->operation_count;
    uint32_t state = 1;
    for (int k = 0; k < count; k++)
        columns[k] = k;
    for (int i = 0; i < rounds; i++) {
        shuffle(columns, count, &state);
        for (int k = 0; k < count; k++)
            TD_TRY(run_one(world, table, columns[k], i));
    }
    for (int k = 0; k < count; k++) {
        TD_TRY(bench_maximum(table->times[k], (size_t)rounds));
        bench_sort(table->times[k], (size_t)rounds);
        table->medians[k] = table->times[k][rounds / 2];
    }
    return TD_OK;
}

/* Computes the number of rounds from a few of them; all ranks have the same times. */
static td_status choose_rounds(struct bench_world *world, struct round_table *table)
{
    double round = 0;
    TD_TRY(run_rounds(world, table, GUESS_ROUNDS));
    for (int k = 0; k < world->options->operation_count; k++)
        round += table->times[k][0];
    double wanted = world->options->seconds / (round + 1e-9);
    table->rounds = world->options->iterations ? world->options->iterations
                    : wanted > MOST_ROUNDS     ? MOST_ROUNDS
                    : wanted < LEAST_ROUNDS    ? LEAST_ROUNDS
                                               : (int)wanted;
    return TD_OK;
}

static double median_of(const struct bench_world *world, const struct round_table *table,
                        const char *name)
{
    const struct bench_operation *operation = find(name);
    for (int k = 0; k < world->options->operation_count; k++)
        if (world->options->operations[k] == operation)
            return table->medians[k];
    return 0;
}

/* ---- Printing -------------------------------------------------------------------------------- */

/* The resolution of the clock: the least difference of two readings. */
static double find_clock_step(void)
{
    int64_t step = INT64_MAX, before = td__now_ns();
    for (int i = 0; i < CLOCK_READINGS; i++) {
        int64_t now = td__now_ns();
        if (now > before && now - before < step)
            step = now - before;
        before = now;
    }
    return (double)step * 1e-9;
}

struct finding {
    double whole, sum;
};

/* The error of a time is one step of the clock, and a rule has two or three times. */
static bool is_kept(const struct finding *finding, int rule, double clock_step)
{
    int times = rules[rule].parts[1] ? 3 : 2;
    return finding->whole <= SLACK * finding->sum + times * clock_step;
}

static struct finding find_times(const struct bench_world *world, const struct round_table *table,
                                 int rule)
{
    struct finding found = {.whole = median_of(world, table, rules[rule].whole)};
    for (int k = 0; k < 2 && rules[rule].parts[k]; k++)
        found.sum += median_of(world, table, rules[rule].parts[k]);
    return found;
}

/* The medians over the first `count` findings. */
static struct finding middle_of(const struct finding *findings, int count)
{
    double wholes[TRIES], sums[TRIES];
    for (int i = 0; i < count; i++) {
        wholes[i] = findings[i].whole;
        sums[i] = findings[i].sum;
    }
    bench_sort(wholes, (size_t)count);
    bench_sort(sums, (size_t)count);
    int low = (count - 1) / 2, high = count / 2;
    return (struct finding){.whole = (wholes[low] + wholes[high]) / 2,
                            .sum = (sums[low] + sums[high]) / 2};
}

static void describe(const struct rule *rule, char text[80])
{
    snprintf(text, 80, "%s <= %s%s%s", rule->whole, rule->parts[0], rule->parts[1] ? " + " : "",
             rule->parts[1] ? rule->parts[1] : "");
}

static void print_finding(const struct bench_world *world, const struct round_table *table,
                          int rule, const struct finding *finding)
{
    char text[80], size[24];
    bool kept = is_kept(finding, rule, table->clock_step);
    double ratio = finding->whole / finding->sum;
    describe(&rules[rule], text);
    if (world->options->json)
        printf("{\"rule\":\"%s\",\"ranks\":%d,\"bytes\":%zu,\"transport\":\"%s\",\"memory\":\"%s\","
               "\"rounds\":%d,\"whole_us\":%.3f,\"sum_us\":%.3f,\"ratio\":%.3f,\"kept\":%s}\n",
               text, world->size, table->bytes, bench_transport_name(world), world->options->memory,
               table->rounds, finding->whole * 1e6, finding->sum * 1e6, ratio,
               kept ? "true" : "false");
    else
        printf("  %-42s %5d %8s %11.2f %11.2f %7.2f%s\n", text, world->size,
               bench_size_text((int64_t)table->bytes, size), finding->whole * 1e6,
               finding->sum * 1e6, ratio, kept ? "" : "  BROKEN");
    fflush(stdout);
}

static void print_header(const struct bench_world *world)
{
    if (world->options->json)
        return;
    bench_print_environment(world);
    printf("#\n# %-42s %5s %8s %11s %11s %7s\n", "rule, in us", "ranks", "bytes", "left side",
           "right side", "ratio");
}

/* ---- All of it ------------------------------------------------------------------------------- */

static td_status run_size(struct bench_world *world, struct round_table *table, int *broken)
{
    struct finding found[RULES][TRIES];
    int tries = 1; /* all ranks have the same times, so they try as often */
    TD_TRY(choose_rounds(world, table));
    for (int attempt = 0; attempt < tries; attempt++) {
        TD_TRY(run_rounds(world, table, table->rounds));
        for (int i = 0; i < RULES; i++) {
            found[i][attempt] = find_times(world, table, i);
            if (!is_kept(&found[i][attempt], i, table->clock_step))
                tries = TRIES;
        }
    }
    for (int i = 0; i < RULES; i++) {
        struct finding middle = middle_of(found[i], tries);
        *broken += !is_kept(&middle, i, table->clock_step);
        if (world->rank == 0)
            print_finding(world, table, i, &middle);
    }
    return TD_OK;
}

td_status bench_rules_run(struct bench_world *world, int *broken)
{
    const struct bench_options *options = world->options;
    struct round_table table = {.clock_step = find_clock_step()};
    size_t rounds = options->iterations > GUESS_ROUNDS ? (size_t)options->iterations : MOST_ROUNDS;
    size_t unit = td_dtype_size(options->dtype) * (size_t)world->size, last = 0;
    td_status status = TD_OK;
    double *memory = calloc(BENCH_MAX_OPERATIONS * rounds, sizeof *memory);
    if (!memory)
        return td__fail_nomem("tdbench --rules");
    for (int k = 0; k < BENCH_MAX_OPERATIONS; k++)
        table.times[k] = memory + (size_t)k * rounds;
    status = bench_maximum(&table.clock_step, 1);
    if (world->rank == 0 && !status)
        print_header(world);
    for (int i = 0; i < options->sizes.count && !status; i++) {
        size_t bytes = (size_t)options->sizes.at[i];
        table.bytes = bytes < unit ? unit : bytes / unit * unit;
        if (table.bytes != last)
            status = run_size(world, &table, broken);
        last = table.bytes;
    }
    free(memory);
    return status;
}
