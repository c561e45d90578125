/* tdbench: measures collective operations and checks their results.
 *
 * With --ranks it starts the ranks itself (td_spawn()), in a new world for each number of them. Without, a
 * launcher has started every rank, or there is only this one. Only rank 0 prints. */
#include "tdbench.h"

#include "base/fail.h"
#include "doctor.h"

#include <tandem/launch.h>

#include <stdlib.h>
#include <string.h>

enum { EXIT_TROUBLE = 1, EXIT_USAGE = 2 };

static int fail(int code)
{
    fprintf(stderr, "tdbench: %s\n", td_last_error());
    return code;
}

/* All sizes of one operation. Small sizes that round up to the same number of parts are one row. */
static td_status run_operation(struct bench_world *world, const struct bench_operation *operation)
{
    const struct bench_list *sizes = &world->options->sizes;
    size_t last = SIZE_MAX;
    if (!strcmp(operation->name, "sendrecv") && world->size < 2) {
        fprintf(stderr, "tdbench: sendrecv needs two ranks and is left out\n");
        return TD_OK;
    }
    for (int i = 0; i < sizes->count; i++) {
        struct bench_row row;
        size_t bytes = bench_true_bytes(world, operation, sizes->at[i]);
        if (bytes == last)
            continue;
        last = bytes;
        TD_TRY(bench_measure(world, operation, sizes->at[i], &row));
        if (world->rank == 0)
            bench_print_row(world, &row);
    }
    return TD_OK;
}

/* A wrong result is reported at the end, in `wrong`: until then all ranks continue. */
static td_status run_operations(const struct bench_options *options, char *wrong, size_t capacity)
{
    struct bench_world world;
    td_status status = TD_OK;
    int broken = 0;
    TD_TRY(bench_world_open(&world, options));
    if (options->rules)
        status = bench_rules_run(&world, &broken);
    else if (world.rank == 0)
        bench_print_header(&world);
    for (int i = 0; i < options->operation_count && !status && !options->rules; i++)
        status = run_operation(&world, options->operations[i]);
    /* A rank that fails ends the others; rank 0 has printed all rows by then. */
    if (!status)
        status = td_group_barrier(NULL, NULL);
    if (broken)
        snprintf(wrong, capacity, "broken rules: %d", broken);
    if (world.wrong)
        snprintf(wrong, capacity, "wrong elements: %lld; the first: %s", (long long)world.wrong,
                 world.first_wrong);
    bench_world_close(&world);
    return status;
}

/* The main function of each rank. */
static td_status run_rank(int rank, void *arg)
{
    const struct bench_options *options = arg;
    bool tcp = !strcmp(options->transport, "tcp");
    (void)rank;
    TD_TRY(td_init_process_group(&(td_init_options){
        .backend = options->backend, .backend_options = tcp ? "transport=tcp" : NULL}));
    char wrong[512] = "";
    int size = td_get_world_size(NULL);
    if (options->root >= size)
        return td_fail(TD_ERR_INVALID, "--root %d: of %d ranks, the last is %d", options->root,
                       size, size - 1);
    if (!options->ranks.count && size == 1)
        fprintf(stderr, "tdbench: there is only one rank, since no launcher has started more; "
                        "-n 2 starts two here\n");
    TD_TRY(run_operations(options, wrong, sizeof wrong));
    TD_TRY(td_destroy_process_group());
    return wrong[0] ? td_fail(TD_ERR_MISMATCH, "%s", wrong) : TD_OK;
}

static void print_device(const struct device_line *line, void *arg)
{
    *(int *)arg |= line->broken ? EXIT_TROUBLE : 0;
    printf("%s: %s\n", line->kind, line->text);
}

static int print_devices(void)
{
    int code = 0;
    device_list(print_device, &code);
    return code;
}

int main(int argc, char **argv)
{
    struct bench_options options;
    if (bench_options_parse(argc, argv, &options))
        return fail(EXIT_USAGE);
    if (options.help) {
        bench_options_help(stdout);
        return 0;
    }
    if (options.version) {
        printf("tdbench %s\n", td_version());
        return 0;
    }
    if (options.devices)
        return print_devices();
    if (options.simulate)
        return bench_simulate(&options);
    if (!options.ranks.count)
        return run_rank(0, &options) ? fail(EXIT_TROUBLE) : 0;
    for (int i = 0; i < options.ranks.count; i++)
        if (td_spawn(run_rank, &options, (int)options.ranks.at[i], NULL))
            return fail(EXIT_TROUBLE);
    return 0;
}
