/* The table, or one line of JSON a row. GB are 1e9 bytes. */
#include "tdbench.h"

#include "base/host.h"
#include "reduce/reduce_kernels.h"
#include "peer/wait_event.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

const char *bench_transport_name(const struct bench_world *world)
{
    const char *variable = getenv("TANDEM_TRANSPORT");
    if (world->options->backend && strcmp(world->options->backend, "native") != 0)
        return world->options->backend;
    if (!strcmp(world->options->transport, "tcp") || (variable && !strcmp(variable, "tcp")))
        return "tcp";
    return world->local_size == world->size ? "shm" : "shm+tcp";
}

void bench_print_environment(const struct bench_world *world)
{
    int processors = td__processors();
    printf("# tdbench %s on %s: %d rank%s, %d processor%s, %s; transport %s, memory %s%s\n",
           td_version(), td__host_name(), world->size, world->size == 1 ? "" : "s", processors,
           processors == 1 ? "" : "s", td__kernels()->name, bench_transport_name(world),
           world->options->memory, world->options->async ? ", asynchronous" : "");
    if (world->local_size > processors)
        printf("# more ranks here than processors: they take turns\n");
}

void bench_print_header(const struct bench_world *world)
{
    if (world->options->json)
        return;
    bench_print_environment(world);
    printf("#\n");
    printf("# %-16s %10s %10s %-10s %-7s %11s %11s %11s %8s %8s %7s\n", "", "size", "count", "", "",
           "median", "least", "p99", "algbw", "busbw", "wrong");
    /* The letter µ takes two bytes and one column. */
    printf("# %-16s %10s %10s %-10s %-7s %12s %12s %12s %8s %8s %7s\n", "operation", "bytes",
           "elements", "type", "op", "µs", "µs", "µs", "GB/s", "GB/s", "");
    fflush(stdout);
}

static void print_json(const struct bench_world *world, const struct bench_row *row, double busbw)
{
    char wrong[24] = "null";
    if (row->wrong >= 0)
        snprintf(wrong, sizeof wrong, "%" PRId64, row->wrong);
    printf("{\"peer\":\"tandem\",\"op\":\"%s\",\"ranks\":%d,\"bytes\":%zu,\"transport\":\"%s\","
           "\"memory\":\"%s\",\"dtype\":\"%s\",\"iterations\":%d,\"median_us\":%.3f,"
           "\"min_us\":%.3f,\"p99_us\":%.3f,\"busbw_GBps\":%.4f,\"wrong\":%s}\n",
           row->operation->name, row->ranks, row->bytes, bench_transport_name(world),
           world->options->memory, td_dtype_name(world->options->dtype), row->iterations,
           row->median * 1e6, row->min * 1e6, row->p99 * 1e6, busbw, wrong);
}

static void print_line(const struct bench_world *world, const struct bench_row *row, double algbw,
                       double busbw)
{
    char size[24], wrong[24] = "-";
    if (row->wrong >= 0)
        snprintf(wrong, sizeof wrong, "%" PRId64, row->wrong);
    bool data = row->operation->fill != NULL;
    printf("  %-16s %10s %10zu %-10s %-7s %11.2f %11.2f %11.2f %8.3f %8.3f %7s\n",
           row->operation->name, bench_size_text((int64_t)row->bytes, size), row->count,
           data ? td_dtype_name(world->options->dtype) : "-",
           row->operation->reduces ? td_reduce_op_name(world->options->op) : "-", row->median * 1e6,
           row->min * 1e6, row->p99 * 1e6, algbw, busbw, wrong);
}

void bench_print_row(const struct bench_world *world, const struct bench_row *row)
{
    double algbw = row->median > 0 ? (double)row->bytes / row->median / 1e9 : 0;
    double busbw = algbw * bench_bus_factor(row->operation, row->ranks);
    if (world->options->json)
        print_json(world, row, busbw);
    else
        print_line(world, row, algbw, busbw);
    fflush(stdout);
}
