/* Collective operations and messages over any MPI, as JSON lines of rank 0.
 *
 *     mpirun -n N mpi_bench PEER OPERATIONS SIZES SECONDS [multiple]
 *
 * With "multiple" at the thread level MPI_THREAD_MULTIPLE.
 * OPERATIONS and SIZES are lists with commas. The same method as in every program of this directory
 * and in tdbench (docs/benchmarks.md): a barrier before each iteration, each rank times its call,
 * an iteration's time is the maximum over the ranks, and the number of iterations comes from the
 * warm-up, so that a row takes about SECONDS. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WARMUP = 3, MIN_ITERATIONS = 5, MAX_ITERATIONS = 1000, PAGE = 4096 };

static int rank, ranks;
static float *in, *out;

/* `bytes` is the whole buffer: what one rank holds for all_reduce, broadcast, reduce and sendrecv,
 * and the parts of all ranks together for the others. */
static void call(const char *op, size_t bytes)
{
    int n = (int)(bytes / sizeof(float)), part = n / ranks;
    MPI_Comm world = MPI_COMM_WORLD;
    if (!strcmp(op, "all_reduce")) {
        MPI_Allreduce(MPI_IN_PLACE, out, n, MPI_FLOAT, MPI_SUM, world);
    } else if (!strcmp(op, "broadcast")) {
        MPI_Bcast(out, n, MPI_FLOAT, 0, world);
    } else if (!strcmp(op, "reduce")) {
        MPI_Reduce(rank ? (void *)out : MPI_IN_PLACE, out, n, MPI_FLOAT, MPI_SUM, 0, world);
    } else if (!strcmp(op, "all_gather")) {
        MPI_Allgather(in, part, MPI_FLOAT, out, part, MPI_FLOAT, world);
    } else if (!strcmp(op, "reduce_scatter")) {
        MPI_Reduce_scatter_block(in, out, part, MPI_FLOAT, MPI_SUM, world);
    } else if (!strcmp(op, "all_to_all")) {
        MPI_Alltoall(in, part, MPI_FLOAT, out, part, MPI_FLOAT, world);
    } else if (!strcmp(op, "gather")) {
        MPI_Gather(in, part, MPI_FLOAT, out, part, MPI_FLOAT, 0, world);
    } else if (!strcmp(op, "scatter")) {
        MPI_Scatter(in, part, MPI_FLOAT, out, part, MPI_FLOAT, 0, world);
    } else if (!strcmp(op, "barrier")) {
        MPI_Barrier(world);
    } else if (!strcmp(op, "sendrecv")) {
        if (rank == 0)
            MPI_Send(in, n, MPI_FLOAT, 1, 0, world);
        if (rank <= 1)
            MPI_Recv(out, n, MPI_FLOAT, 1 - rank, 0, world, MPI_STATUS_IGNORE);
        if (rank == 1)
            MPI_Send(in, n, MPI_FLOAT, 0, 0, world);
    } else {
        fprintf(stderr, "mpi_bench: there is no operation %s\n", op);
        MPI_Abort(world, 2);
    }
}

static double bus_factor(const char *op)
{
    double others = (ranks - 1.0) / ranks;
    if (!strcmp(op, "all_reduce"))
        return 2 * others;
    if (!strcmp(op, "broadcast") || !strcmp(op, "reduce") || !strcmp(op, "sendrecv"))
        return 1;
    return strcmp(op, "barrier") ? others : 0;
}

static double once(const char *op, size_t bytes)
{
    MPI_Barrier(MPI_COMM_WORLD);
    double start = MPI_Wtime();
    call(op, bytes);
    return MPI_Wtime() - start;
}

static void maximum(double *values, int count)
{
    MPI_Allreduce(MPI_IN_PLACE, values, count, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void measure(const char *peer, const char *op, size_t bytes, double seconds)
{
    double times[MAX_ITERATIONS], fastest = 1e9, share = strcmp(op, "sendrecv") ? 1 : 0.5;
    for (int i = 0; i < WARMUP; i++) {
        double time = once(op, bytes);
        fastest = time < fastest ? time : fastest;
    }
    maximum(&fastest, 1);
    double wanted = seconds / (fastest + 1e-9);
    int n = wanted > MAX_ITERATIONS ? MAX_ITERATIONS : (int)wanted;
    n = n < MIN_ITERATIONS ? MIN_ITERATIONS : n;
    for (int i = 0; i < n; i++)
        times[i] = once(op, bytes);
    maximum(times, n);
    if (rank)
        return;
    qsort(times, (size_t)n, sizeof *times, by_value);
    double median = times[n / 2] * share;
    printf("{\"peer\":\"%s\",\"op\":\"%s\",\"ranks\":%d,\"bytes\":%zu,\"iters\":%d,"
           "\"median_us\":%.3f,\"min_us\":%.3f,\"busbw_GBps\":%.4f}\n",
           peer, op, ranks, bytes, n, median * 1e6, times[0] * share * 1e6,
           (double)bytes / median * bus_factor(op) / 1e9);
    fflush(stdout);
}

/* Touches every page: untouched pages all map to the one zero page, which makes reads too fast. The compiler
 * must not see that these are the zeros of calloc(). */
static float *allocate(size_t bytes)
{
    char *memory = malloc(bytes);
    if (!memory) {
        fprintf(stderr, "mpi_bench: out of memory\n");
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    memset(memory, 0, bytes);
    for (size_t i = 0; i < bytes; i += PAGE)
        ((volatile char *)memory)[i] = 0;
    return (float *)memory;
}

static void check(void)
{
    enum { COUNT = 1024 };
    for (int i = 0; i < COUNT; i++)
        out[i] = 1;
    call("all_reduce", COUNT * sizeof(float));
    for (int i = 0; i < COUNT; i++) {
        if (out[i] != (float)ranks) {
            fprintf(stderr, "mpi_bench: a sum is wrong\n");
            MPI_Abort(MPI_COMM_WORLD, 1);
        }
        out[i] = 0;
    }
}

/* All sizes of one operation. A part has at least one element. */
static void measure_sizes(const char *peer, const char *op, const char *sizes, double seconds)
{
    double factor = bus_factor(op);
    size_t least = factor > 0 && factor == (ranks - 1.0) / ranks ? sizeof(float) * (size_t)ranks
                                                                 : 0;
    for (char *end; *sizes; sizes = *end ? end + 1 : end) {
        size_t bytes = strtoull(sizes, &end, 10);
        if (factor == 0)
            bytes = 0;
        measure(peer, op, bytes < least ? least : bytes, seconds);
        if (factor == 0)
            return;
    }
}

int main(int argc, char **argv)
{
    int level = MPI_THREAD_SINGLE, wanted = argc == 6 ? MPI_THREAD_MULTIPLE : MPI_THREAD_SINGLE;
    MPI_Init_thread(&argc, &argv, wanted, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc != 5 && (argc != 6 || level != wanted)) {
        fprintf(stderr, "usage: mpi_bench PEER OPERATIONS SIZES SECONDS [multiple]\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    size_t most = 4096;
    for (char *end, *at = argv[3]; *at; at = *end ? end + 1 : end) {
        size_t bytes = strtoull(at, &end, 10);
        most = bytes > most ? bytes : most;
    }
    in = allocate(most);
    out = allocate(most);
    check();
    for (char *op = strtok(argv[2], ","); op; op = strtok(NULL, ","))
        measure_sizes(argv[1], op, argv[3], atof(argv[4]));
    free(in);
    free(out);
    MPI_Finalize();
    return 0;
}
