/* --simulate: the cost of every algorithm on a model network, the cheapest one, and the one that the library
 * chooses. Each cell rebuilds its schedules: a few seconds for all operations with 100,000 ranks. */
#include "tdbench.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_ALGORITHMS = 8, CELL = 12, EXIT_TROUBLE = 1, EXIT_USAGE = 2 };

/* Costs closer than this are equal. */
static const double tie = 1.005;

/* The algorithms of one operation. */
struct choice {
    td_op_kind op;
    const struct td__algorithm *algorithms[MAX_ALGORITHMS];
    int count;
};

/* One line of the table. */
struct line {
    int32_t ranks;
    int64_t bytes;
    struct td__price prices[MAX_ALGORITHMS];
    int cheapest, chosen; /* -1 where the library's is not among them */
};

static void find_algorithms(td_op_kind op, struct choice *choice)
{
    *choice = (struct choice){.op = op};
    for (const struct td__algorithm *at = td__algorithms; at->name; at++)
        if (at->op == op && choice->count < MAX_ALGORITHMS)
            choice->algorithms[choice->count++] = at;
}

static bool price_line(const struct choice *choice, const struct td__network *network,
                       struct line *line)
{
    const char *chosen = td__select(choice->op, line->ranks, (size_t)line->bytes);
    line->cheapest = 0;
    line->chosen = -1;
    for (int i = 0; i < choice->count; i++) {
        if (!td__simulate(choice->algorithms[i], line->ranks, (double)line->bytes, network,
                          &line->prices[i]))
            return false;
        if (line->prices[i].seconds < line->prices[line->cheapest].seconds)
            line->cheapest = i;
        if (!strcmp(choice->algorithms[i]->name, chosen))
            line->chosen = i;
    }
    return true;
}

static double times_cheapest(const struct line *line, int i)
{
    double least = line->prices[line->cheapest].seconds;
    return least > 0 ? line->prices[i].seconds / least : 1;
}

static void print_header(const struct choice *choice)
{
    printf("\n%-15s %7s %7s", td_op_kind_name(choice->op), "ranks", "bytes");
    for (int i = 0; i < choice->count; i++)
        printf(" %*s ", CELL, choice->algorithms[i]->name);
    printf("  taken\n");
}

static void print_line(const struct choice *choice, const struct line *line)
{
    char size[24], price[48];
    printf("%-15s %7d %7s", "", line->ranks, bench_size_text(line->bytes, size));
    for (int i = 0; i < choice->count; i++)
        printf(" %s%c", bench_time_text(line->prices[i].seconds, CELL, price),
               times_cheapest(line, i) < tie ? '*' : ' ');
    printf("  %s", line->chosen < 0 ? "-" : choice->algorithms[line->chosen]->name);
    if (line->chosen >= 0 && times_cheapest(line, line->chosen) >= tie)
        printf(" (%.2f times the cheapest)", times_cheapest(line, line->chosen));
    putchar('\n');
}

static void print_json(const struct choice *choice, const struct line *line)
{
    for (int i = 0; i < choice->count; i++)
        printf("{\"op\":\"%s\",\"ranks\":%d,\"bytes\":%lld,\"algorithm\":\"%s\","
               "\"seconds\":%.9f,\"rounds\":%d,\"sent_bytes\":%.0f,\"cheapest\":%s,\"taken\":%s}\n",
               td_op_kind_name(choice->op), line->ranks, (long long)line->bytes,
               choice->algorithms[i]->name, line->prices[i].seconds, line->prices[i].rounds,
               line->prices[i].sent, i == line->cheapest ? "true" : "false",
               i == line->chosen ? "true" : "false");
}

static bool simulate_operation(const struct bench_options *options, td_op_kind op)
{
    struct choice choice;
    int sizes = op == TD_OP_BARRIER ? 1 : options->sizes.count;
    find_algorithms(op, &choice);
    if (!options->json)
        print_header(&choice);
    for (int r = 0; r < options->ranks.count; r++) {
        for (int s = 0; s < sizes; s++) {
            struct line line = {.ranks = (int32_t)options->ranks.at[r],
                                .bytes = op == TD_OP_BARRIER ? 0 : options->sizes.at[s]};
            if (!price_line(&choice, &options->network, &line)) {
                fprintf(stderr, "tdbench: out of memory for the schedule of %d ranks\n",
                        line.ranks);
                return false;
            }
            if (options->json)
                print_json(&choice, &line);
            else
                print_line(&choice, &line);
            fflush(stdout);
        }
    }
    return true;
}

/* Whether the command line names the operation, or none. */
static bool is_wanted(const struct bench_options *options, td_op_kind op)
{
    for (int i = 0; i < options->operation_count; i++)
        if (!strcmp(options->operations[i]->name, td_op_kind_name(op)))
            return true;
    return options->operation_count == 0;
}

static void print_network(const struct td__network *network)
{
    char latency[48], transfer[48];
    printf("# latency %s, %s for a further transfer, %.4g GB/s on the wire, %.4g GB/s to reduce\n",
           bench_time_text(network->latency, 0, latency),
           bench_time_text(network->transfer, 0, transfer), 1e-9 / network->byte,
           1e-9 / network->reduce_byte);
    printf(
        "# * is the cheapest; taken: what the library chooses. Reductions are formed in one order\n"
        "# whatever the size, so it takes no ring for them unless asked by name.\n");
}

int bench_simulate(const struct bench_options *options)
{
    bool any = false;
    for (int op = 0; op < TD__COLLECTIVES; op++)
        any |= is_wanted(options, (td_op_kind)op);
    if (!any) {
        fprintf(stderr, "tdbench: sendrecv is a single message and has no algorithms to compare\n");
        return EXIT_USAGE;
    }
    if (!options->json)
        print_network(&options->network);
    for (int op = 0; op < TD__COLLECTIVES; op++)
        if (is_wanted(options, (td_op_kind)op) && !simulate_operation(options, (td_op_kind)op))
            return EXIT_TROUBLE;
    return 0;
}
