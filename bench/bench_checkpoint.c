/* Sharded checkpoints beside dd on the same disk, in the same run: each rank has MIB of shards.
 *
 *     dd           dd bs=1M conv=fsync of as many bytes as all ranks together have
 *     save         td_save_sharded()
 *     load         td_load_sharded() with the files in the page cache, and from the disk (cold)
 *     dd_read      dd of the files to /dev/null from the disk
 *     stop         how long an asynchronous save stops the program, beside
 *     memcpy       a copy of the same bytes to memory that is new, as that of the snapshot is, and to memory that was used
 *
 *     tdrun --standalone --nproc-per-node=2 bench_checkpoint DIRECTORY MIB [ROUNDS]
 *
 * Medians of the rounds; scripts/bench-checkpoint runs it. */
#include "base/clock.h"

#include <tandem/tandem.h>

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { TENSORS = 16, MOST_ROUNDS = 50 };

struct times {
    double dd[MOST_ROUNDS], save[MOST_ROUNDS], cold[MOST_ROUNDS], dd_read[MOST_ROUNDS],
        warm[MOST_ROUNDS], stop[MOST_ROUNDS], fresh[MOST_ROUNDS], used[MOST_ROUNDS];
};

static int rank, ranks;

static void must(td_status status)
{
    if (!status)
        return;
    fprintf(stderr, "bench_checkpoint: %s\n", td_last_error());
    exit(1);
}

static double since(int64_t begin)
{
    return (double)(td__now_ns() - begin) * 1e-9;
}

static td_state *make_state(int64_t bytes)
{
    td_state *state = td_state_create();
    for (int i = 0; i < TENSORS; i++) {
        char name[32];
        int64_t count = bytes / TENSORS / 4;
        td_shard shard = {.ndim = 1, .shape = {count * ranks}, .offset = count * rank};
        td_tensor *tensor = td_empty(&count, 1, TD_F32, td_device_get("cpu"));
        uint32_t *data = td_tensor_data(tensor);
        for (int64_t k = 0; k < count; k++)
            data[k] = (uint32_t)k * 2654435761u + (uint32_t)i;
        must(td_tensor_set_shard(tensor, &shard));
        snprintf(name, sizeof name, "layer.%d", i);
        must(td_state_add(state, name, tensor));
        td_tensor_release(tensor);
    }
    return state;
}

static double run(const char *command)
{
    int64_t begin = td__now_ns();
    if (rank == 0 && system(command)) {
        fprintf(stderr, "bench_checkpoint: %s fails\n", command);
        exit(1);
    }
    return since(begin);
}

static void drop_caches(const char *directory)
{
    for (int r = 0; r < ranks; r++) {
        char path[4096];
        snprintf(path, sizeof path, "%s/bench.sharded/shard-%05d.safetensors", directory, r);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
            continue;
        posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        close(fd);
    }
}

static void copy(const td_state *state, char *to)
{
    for (int i = 0; i < td_state_count(state); i++) {
        td_tensor *tensor = td_state_tensor(state, i);
        memcpy(to, td_tensor_data(tensor), td_tensor_nbytes(tensor));
        to += td_tensor_nbytes(tensor);
    }
}

/* All ranks at once, as the saves. */
static void measure_copies(const td_state *state, size_t bytes, double *fresh, double *used)
{
    char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        exit(1);
    must(td_barrier(NULL, NULL));
    int64_t begin = td__now_ns();
    copy(state, memory);
    *fresh = since(begin);
    must(td_barrier(NULL, NULL));
    begin = td__now_ns();
    copy(state, memory);
    *used = since(begin);
    munmap(memory, bytes);
}

static void measure(const char *directory, int mib, td_state *state, struct times *times, int round)
{
    char command[8192], path[4096];
    td_async_save *save = NULL;
    snprintf(path, sizeof path, "%s/bench.sharded", directory);
    snprintf(command, sizeof command,
             "dd if=/dev/zero of='%s/bench.dd' bs=1M count=%d conv=fsync 2>/dev/null", directory,
             mib * ranks);
    run("sync");
    times->dd[round] = run(command);
    snprintf(command, sizeof command, "rm -f '%s/bench.dd'; sync", directory);
    run(command);
    must(td_barrier(NULL, NULL));
    int64_t begin = td__now_ns();
    must(td_save_sharded(path, state, NULL, 0, NULL, NULL));
    times->save[round] = since(begin);
    must(td_barrier(NULL, NULL));
    begin = td__now_ns();
    must(td_load_sharded(path, state, NULL));
    times->warm[round] = since(begin);
    must(td_barrier(NULL, NULL));
    drop_caches(directory);
    must(td_barrier(NULL, NULL));
    begin = td__now_ns();
    must(td_load_sharded(path, state, NULL));
    times->cold[round] = since(begin);
    must(td_barrier(NULL, NULL));
    drop_caches(directory);
    snprintf(command, sizeof command, "cat '%s'/shard-* | dd of=/dev/null bs=1M 2>/dev/null", path);
    times->dd_read[round] = run(command);
    measure_copies(state, (size_t)mib << 20, &times->fresh[round], &times->used[round]);
    must(td_barrier(NULL, NULL));
    begin = td__now_ns();
    must(td_save_sharded(path, state, NULL, 0, NULL, &save));
    times->stop[round] = since(begin);
    must(td_async_save_wait(save, 0));
    td_async_save_release(save);
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *list, int count)
{
    qsort(list, (size_t)count, sizeof *list, compare);
    return count % 2 ? list[count / 2] : (list[count / 2 - 1] + list[count / 2]) / 2;
}

int main(int argc, char **argv)
{
    static struct times times;
    int mib = argc > 2 ? atoi(argv[2]) : 0, rounds = argc > 3 ? atoi(argv[3]) : 5;
    if (mib < 1 || rounds < 1 || rounds > MOST_ROUNDS) {
        fputs("usage: bench_checkpoint DIRECTORY MIB [ROUNDS]\n", stderr);
        return 2;
    }
    must(td_init_process_group(NULL));
    rank = td_get_rank(NULL);
    ranks = td_get_world_size(NULL);
    td_state *state = make_state((int64_t)mib << 20);
    for (int i = 0; i < rounds; i++)
        measure(argv[1], mib, state, &times, i);
    double gb = (double)mib * ranks * (1 << 20) * 1e-9;
    double dd = median(times.dd, rounds), read = median(times.dd_read, rounds);
    double save = median(times.save, rounds), cold = median(times.cold, rounds);
    double warm = median(times.warm, rounds), stop = median(times.stop, rounds);
    double fresh = median(times.fresh, rounds), used = median(times.used, rounds);
    if (rank == 0) {
        printf("%d ranks, %d MiB each, medians of %d rounds\n", ranks, mib, rounds);
        printf("dd conv=fsync  %6.2f GB/s\n", gb / dd);
        printf("save           %6.2f GB/s  %.2f of dd\n", gb / save, dd / save);
        printf("dd of files    %6.2f GB/s (cold)\n", gb / read);
        printf("load, cold     %6.2f GB/s  %.2f of dd conv=fsync, %.2f of dd of the files\n",
               gb / cold, dd / cold, read / cold);
        printf("load, cached   %6.2f GB/s  %.2f of dd conv=fsync\n", gb / warm, dd / warm);
        printf(
            "asynchronous   stops for %.1f ms; memcpy to new memory %.1f ms (ratio %.2f), to used "
            "memory %.1f ms\n",
            stop * 1e3, fresh * 1e3, stop / fresh, used * 1e3);
    }
    td_state_destroy(state);
    must(td_destroy_process_group());
    return 0;
}
