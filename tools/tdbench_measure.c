/* A row of the table. Before each iteration all ranks call a barrier; each rank times its own call, and an
 * iteration takes as long as its slowest rank. The ranks exchange their times after the row, so that only
 * the barrier is between two calls.
 *
 *     warm-up -> number of iterations -> iterations -> maxima over the ranks -> check
 *
 * The buffers hold zeros meanwhile, so that repeated sums do not change them. One more call, with known
 * values, is checked. */
#include "tdbench.h"

#include "base/clock.h"
#include "base/fail.h"

#include <stdlib.h>
#include <string.h>

enum { MIN_ITERATIONS = 5, MAX_ITERATIONS = 1000, PAGE = 4096, GARBAGE = 0x5a };

/* ---- Memory ---------------------------------------------------------------------------------- */

static char *allocate(const struct bench_world *world, size_t bytes)
{
    bool malloced = !strcmp(world->options->memory, "malloc");
    char *memory = malloced ? aligned_alloc(64, (bytes + 63) & ~(size_t)63) : td_alloc(bytes);
    /* An untouched page is cheap to read, and expensive at the first write. */
    for (size_t i = 0; memory && i < bytes; i += PAGE)
        ((volatile char *)memory)[i] = 0;
    return memory;
}

static void release(const struct bench_world *world, char *memory)
{
    if (!strcmp(world->options->memory, "malloc"))
        free(memory);
    else
        td_free(memory);
}

td_status bench_world_open(struct bench_world *world, const struct bench_options *options)
{
    size_t period = BENCH_PERIOD * 2 * sizeof(double), most = td_dtype_size(options->dtype);
    bool input = false;
    *world = (struct bench_world){.options = options,
                                  .rank = td_get_rank(NULL),
                                  .size = td_get_world_size(NULL),
                                  .local_size = td_get_local_size()};
    for (int i = 0; i < options->operation_count; i++) {
        input |= options->operations[i]->needs_input;
        for (int s = 0; s < options->sizes.count; s++) {
            size_t bytes = bench_true_bytes(world, options->operations[i], options->sizes.at[s]);
            most = bytes > most ? bytes : most;
        }
    }
    size_t iterations = options->iterations ? (size_t)options->iterations : MAX_ITERATIONS;
    world->counts = calloc((size_t)world->size, sizeof *world->counts);
    world->times = malloc(iterations * sizeof *world->times);
    world->pattern = malloc(period);
    world->scratch = malloc(2 * period);
    world->out = allocate(world, most);
    world->in = input ? allocate(world, most) : NULL;
    if (world->counts && world->times && world->pattern && world->scratch && world->out &&
        (world->in || !input))
        return TD_OK;
    bench_world_close(world);
    char text[24];
    return td_fail(TD_ERR_NOMEM, "out of memory for buffers of %s bytes; --max sets the largest",
                   bench_size_text((int64_t)most, text));
}

void bench_world_close(struct bench_world *world)
{
    release(world, world->in);
    release(world, world->out);
    free(world->scratch);
    free(world->pattern);
    free(world->times);
    free(world->counts);
    world->in = world->out = world->scratch = world->pattern = NULL;
    world->times = NULL;
    world->counts = NULL;
}

size_t bench_true_bytes(const struct bench_world *world, const struct bench_operation *operation,
                        int64_t bytes)
{
    size_t unit = td_dtype_size(world->options->dtype);
    if (operation->parts)
        unit *= (size_t)world->size;
    if (!operation->fill)
        return 0;
    return (size_t)bytes < unit ? (bytes ? unit : 0) : (size_t)bytes / unit * unit;
}

/* ---- Time ------------------------------------------------------------------------------------ */

td_status bench_once(struct bench_world *world, const struct bench_operation *operation,
                     size_t count, double *seconds)
{
    td_work *work = NULL;
    TD_TRY(td_group_barrier(NULL, NULL));
    int64_t start = td__now_ns();
    td_status status = operation->call(world, count, world->options->async ? &work : NULL);
    if (!status && work)
        status = td_work_wait(work, 0);
    *seconds = (double)(td__now_ns() - start) * 1e-9;
    td_work_release(work);
    return status;
}

td_status bench_maximum(double *values, size_t count)
{
    return td_group_all_reduce(values, values, count, TD_F64, TD_MAX, NULL, NULL);
}

/* Computes the number of iterations from the fastest one of the warm-up. */
static td_status choose_iterations(struct bench_world *world,
                                   const struct bench_operation *operation, size_t count,
                                   int *iterations)
{
    double fastest = 1e9, seconds;
    for (int i = 0; i < world->options->warmup; i++) {
        TD_TRY(bench_once(world, operation, count, &seconds));
        fastest = seconds < fastest ? seconds : fastest;
    }
    TD_TRY(bench_maximum(&fastest, 1));
    double wanted = world->options->seconds / (fastest + 1e-9);
    *iterations = world->options->iterations ? world->options->iterations
                  : wanted > MAX_ITERATIONS  ? MAX_ITERATIONS
                  : wanted < MIN_ITERATIONS  ? MIN_ITERATIONS
                                             : (int)wanted;
    return TD_OK;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

void bench_sort(double *values, size_t count)
{
    qsort(values, count, sizeof *values, by_value);
}

static td_status measure_time(struct bench_world *world, const struct bench_operation *operation,
                              struct bench_row *row)
{
    TD_TRY(choose_iterations(world, operation, row->count, &row->iterations));
    size_t n = (size_t)row->iterations;
    for (size_t i = 0; i < n; i++)
        TD_TRY(bench_once(world, operation, row->count, &world->times[i]));
    TD_TRY(bench_maximum(world->times, n));
    bench_sort(world->times, n);
    /* The time of a message is half of its round trip. */
    double share = !strcmp(operation->name, "sendrecv") ? 0.5 : 1;
    row->median = world->times[n / 2] * share;
    row->min = world->times[0] * share;
    row->p99 = world->times[(n * 99 + 99) / 100 - 1] * share;
    return TD_OK;
}

/* ---- Results --------------------------------------------------------------------------------- */

static td_status measure_wrong(struct bench_world *world, const struct bench_operation *operation,
                               struct bench_row *row)
{
    double seconds;
    memset(world->out, GARBAGE, row->bytes);
    operation->fill(world, row->count);
    TD_TRY(bench_once(world, operation, row->count, &seconds));
    bool knew = world->first_wrong[0];
    row->wrong = operation->check(world, row->count);
    world->wrong += row->wrong;
    if (row->wrong && !knew) {
        size_t used = strlen(world->first_wrong);
        snprintf(world->first_wrong + used, sizeof world->first_wrong - used,
                 " after %s of %zu bytes", operation->name, row->bytes);
    }
    return td_group_all_reduce(&row->wrong, &row->wrong, 1, TD_I64, TD_SUM, NULL, NULL);
}

td_status bench_measure(struct bench_world *world, const struct bench_operation *operation,
                        int64_t bytes, struct bench_row *row)
{
    *row = (struct bench_row){.operation = operation, .ranks = world->size, .wrong = -1};
    row->bytes = bench_true_bytes(world, operation, bytes);
    row->count = row->bytes / td_dtype_size(world->options->dtype);
    if (operation->parts)
        row->count /= (size_t)world->size;
    memset(world->out, 0, row->bytes);
    if (operation->needs_input)
        memset(world->in, 0, row->bytes);
    TD_TRY(measure_time(world, operation, row));
    if (operation->check && !world->options->no_check)
        TD_TRY(measure_wrong(world, operation, row));
    return TD_OK;
}
