/* The start of a job: the time until its processes run, have completed the rendezvous, and have ended.
 *
 *     start        from before tdrun is started until both of 2 workers are in main()
 *     meet         until the last of 64 or 256 ranks has returned from td_rendezvous()
 *     end          until tdrun has ended, in the same runs
 *     spawn_…      the same with td_spawn() instead of tdrun
 *     rendezvous   td_rendezvous() alone, in 2 to 16 processes that run already: the slowest rank's
 *
 * The workers are this program again. They read CLOCK_MONOTONIC, which is the same in all processes, first
 * thing in main() and after the rendezvous, and write it to a memfd of the parent that they open through
 * /proc, so that nothing depends on what the launcher does with their output. */
#include "measure.h"

#include "base/clock.h"

#include <tandem/launch.h>
#include <tandem/rendezvous.h>

#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAX_RANKS = 4096, MAX_ROUNDS = 1000, MAX_WORDS = 60 };

/* The times of one rank, in the memfd; 0 for what it has not reached. */
struct rank_times {
    int64_t begun; /* at the start of main() */
    int64_t met;   /* it has returned from td_rendezvous() */
};

/* One run of a job. */
struct moments {
    int64_t begin, all_begun, all_met, end;
    int64_t longest_rendezvous;
};

struct bench {
    const char *peer;
    bool table;
    int rounds;     /* 0: each measurement's own */
    int ranks;      /* that meet; 0: 64 and 256 */
    int hosts;      /* over which the launcher's command divides them */
    char **command; /* the launcher; "{n}" stands for the number of processes */
    char path[64];  /* of the memfd */
    struct rank_times *records;
};

extern char **environ;

/* ---- The workers ----------------------------------------------------------------------------- */

static td_status record_rendezvous(struct rank_times *record)
{
    td_world world;
    td_status status = td_rendezvous(NULL, NULL, &world);
    record->met = td__now_ns();
    return status ? status : td_world_close(&world);
}

/* A process that a launcher has started: "--worker start|meet RECORDS". */
static int run_worker(int64_t begun, const char *task, const char *path)
{
    const char *rank = getenv("RANK");
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (!rank || fd < 0)
        bench_die("worker: %s", rank ? strerror(errno) : "RANK is not set");
    struct rank_times record = {.begun = begun};
    if (!strcmp(task, "meet"))
        bench_check(record_rendezvous(&record));
    if (pwrite(fd, &record, sizeof record, atoi(rank) * (off_t)sizeof record) !=
        (ssize_t)sizeof record)
        bench_die("worker: cannot write its times: %s", strerror(errno));
    return 0;
}

/* A process that td_spawn() has started. */
static td_status run_spawned(int rank, void *records)
{
    struct rank_times *record = (struct rank_times *)records + rank;
    record->begun = td__now_ns();
    return record_rendezvous(record);
}

/* ---- One run --------------------------------------------------------------------------------- */

/* The launcher's command for `ranks` processes that do `task`. */
static void make_command(const struct bench *bench, int ranks, const char *task, char **words,
                         char *room, size_t size)
{
    static char self[PATH_MAX];
    if (!realpath("/proc/self/exe", self))
        bench_die("/proc/self/exe: %s", strerror(errno));
    int count = 0;
    for (char **word = bench->command; *word && count < MAX_WORDS - 5; word++) {
        char *place = strstr(*word, "{n}");
        if (!place) {
            words[count++] = *word;
            continue;
        }
        int length = snprintf(room, size, "%.*s%d%s", (int)(place - *word), *word,
                              ranks / bench->hosts, place + 3);
        if (length < 0 || (size_t)length >= size)
            bench_die("the launcher's command is too long");
        words[count++] = room;
        room += length + 1;
        size -= (size_t)length + 1;
    }
    const char *const rest[] = {self, "--worker", task, bench->path, NULL};
    memcpy(words + count, rest, sizeof rest);
}

static void launch(const struct bench *bench, int ranks, const char *task, struct moments *moments)
{
    char *words[MAX_WORDS], room[512];
    int status;
    pid_t pid;
    make_command(bench, ranks, task, words, room, sizeof room);
    moments->begin = td__now_ns();
    int error = posix_spawnp(&pid, words[0], NULL, NULL, words, environ);
    if (error)
        bench_die("%s: %s", words[0], strerror(error));
    waitpid(pid, &status, 0);
    moments->end = td__now_ns();
    if (status)
        bench_die("%s with %d processes has failed", words[0], ranks);
}

static void run_once(const struct bench *bench, bool spawn, int ranks, const char *task,
                     struct moments *moments)
{
    bool meets = spawn || !strcmp(task, "meet");
    memset(bench->records, 0, (size_t)ranks * sizeof *bench->records);
    *moments = (struct moments){0};
    if (spawn) {
        moments->begin = td__now_ns();
        bench_check(td_spawn(run_spawned, bench->records, ranks, NULL));
        moments->end = td__now_ns();
    } else {
        launch(bench, ranks, task, moments);
    }
    for (int rank = 0; rank < ranks; rank++) {
        const struct rank_times *record = &bench->records[rank];
        if (!record->begun || (meets && !record->met))
            bench_die("rank %d of %d has written no times", rank, ranks);
        int64_t rendezvous = record->met - record->begun;
        if (record->begun > moments->all_begun)
            moments->all_begun = record->begun;
        if (record->met > moments->all_met)
            moments->all_met = record->met;
        if (rendezvous > moments->longest_rendezvous)
            moments->longest_rendezvous = rendezvous;
    }
}

/* ---- The measurements ------------------------------------------------------------------------ */

static void print_row(const struct bench *bench, const char *prefix, const char *what, int ranks,
                      int64_t *times, int count)
{
    bench_sort(times, (size_t)count);
    double median = (double)bench_at(times, (size_t)count, 0.5) / 1e6,
           least = (double)times[0] / 1e6;
    char name[32];
    snprintf(name, sizeof name, "%s%s", prefix, what);
    if (bench->table)
        printf("%-14s %5d %10.2f %10.2f\n", name, ranks, median, least);
    else
        printf("{\"peer\":\"%s\",\"what\":\"%s\",\"ranks\":%d,"
               "\"median_ms\":%.2f,\"min_ms\":%.2f}\n",
               bench->peer, name, ranks, median, least);
    fflush(stdout);
}

static int rounds_of(const struct bench *bench, int usual)
{
    return bench->rounds ? bench->rounds : usual;
}

static void measure_start(const struct bench *bench, bool spawn)
{
    int64_t start[MAX_ROUNDS];
    int rounds = rounds_of(bench, 20);
    for (int round = -1; round < rounds; round++) { /* one more, before the others, to warm up */
        struct moments moments;
        run_once(bench, spawn, 2, "start", &moments);
        if (round >= 0)
            start[round] = moments.all_begun - moments.begin;
    }
    print_row(bench, spawn ? "spawn_" : "", "start", 2, start, rounds);
}

static void measure_meeting(const struct bench *bench, bool spawn, int ranks)
{
    int64_t meet[MAX_ROUNDS], end[MAX_ROUNDS];
    int rounds = rounds_of(bench, 5);
    for (int round = 0; round < rounds; round++) {
        struct moments moments;
        run_once(bench, spawn, ranks, "meet", &moments);
        meet[round] = moments.all_met - moments.begin;
        end[round] = moments.end - moments.begin;
    }
    print_row(bench, spawn ? "spawn_" : "", "meet", ranks, meet, rounds);
    print_row(bench, spawn ? "spawn_" : "", "end", ranks, end, rounds);
}

static void measure_rendezvous(const struct bench *bench)
{
    int64_t times[MAX_ROUNDS];
    int rounds = rounds_of(bench, 7);
    for (int ranks = 2; ranks <= 16; ranks *= 2) {
        for (int round = 0; round < rounds; round++) {
            struct moments moments;
            run_once(bench, true, ranks, "meet", &moments);
            times[round] = moments.longest_rendezvous;
        }
        print_row(bench, "", "rendezvous", ranks, times, rounds);
    }
}

static void make_records(struct bench *bench)
{
    size_t size = MAX_RANKS * sizeof *bench->records;
    int fd = memfd_create("bench_start", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)size))
        bench_die("memfd: %s", strerror(errno));
    bench->records = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (bench->records == MAP_FAILED)
        bench_die("mmap: %s", strerror(errno));
    snprintf(bench->path, sizeof bench->path, "/proc/%ld/fd/%d", (long)getpid(), fd);
}

/* tdrun as it is built beside this program, in build/<preset>/bin. */
static char **own_command(void)
{
    static char path[PATH_MAX + 16], self[PATH_MAX];
    static char *command[] = {path, "--standalone", "--nproc-per-node={n}", NULL};
    if (!realpath("/proc/self/exe", self))
        bench_die("/proc/self/exe: %s", strerror(errno));
    snprintf(path, sizeof path, "%s/../bin/tdrun", dirname(self));
    return command;
}

static const char usage[] =
    "usage: bench_start [OPTION…] [WHAT…] [-- LAUNCHER…]\n"
    "\n"
    "Measures how long a job takes to start. WHAT is one of these, all of them by default:\n"
    "\n"
    "  start            until both of 2 workers of tdrun are in main()\n"
    "  meet             until td_rendezvous() of 64 and 256 workers, and until tdrun has ended\n"
    "  spawn            both of these with td_spawn()\n"
    "  rendezvous       td_rendezvous() alone, in 2, 4, 8 and 16 processes\n"
    "\n"
    "LAUNCHER takes the place of tdrun, with {n} for the number of processes, as in\n"
    "  bench_start --peer torch start -- torchrun --standalone --nproc_per_node={n} --no_python\n"
    "\n"
    "  --table          a table instead of one line of JSON for each figure\n"
    "  --ranks N        so many for meet, instead of 64 and 256\n"
    "  --hosts N        {n} is the number for each of so many hosts that LAUNCHER starts them on\n"
    "  --rounds N       runs of which the median is taken (20 for start, 5 for meet, 7 for\n"
    "                   rendezvous)\n"
    "  --peer NAME      the name in the JSON (tandem)\n";

static bool wants(int argc, char **argv, const char *what)
{
    for (int i = 0; i < argc; i++)
        if (!strcmp(argv[i], what))
            return true;
    return argc == 0;
}

int main(int argc, char **argv)
{
    int64_t begun = td__now_ns();
    if (argc == 4 && !strcmp(argv[1], "--worker"))
        return run_worker(begun, argv[2], argv[3]);

    struct bench bench = {.peer = "tandem", .hosts = 1};
    char *what[8];
    int count = 0;
    for (int i = 1; i < argc && !bench.command; i++) {
        const char *word = argv[i];
        if (!strcmp(word, "--help") || !strcmp(word, "-h")) {
            fputs(usage, stdout);
            return 0;
        } else if (!strcmp(word, "--table")) {
            bench.table = true;
        } else if (!strcmp(word, "--ranks")) {
            bench.ranks = bench_number(word, argv[++i], 1);
            if (bench.ranks > MAX_RANKS)
                bench_die("at most %d ranks", MAX_RANKS);
        } else if (!strcmp(word, "--hosts")) {
            bench.hosts = bench_number(word, argv[++i], 1);
        } else if (!strcmp(word, "--rounds")) {
            bench.rounds = bench_number(word, argv[++i], 1);
            if (bench.rounds > MAX_ROUNDS)
                bench_die("at most %d rounds", MAX_ROUNDS);
        } else if (!strcmp(word, "--peer") && argv[i + 1]) {
            bench.peer = argv[++i];
        } else if (!strcmp(word, "--") && argv[i + 1]) {
            bench.command = &argv[i + 1];
        } else if (count < 8 && (!strcmp(word, "start") || !strcmp(word, "meet") ||
                                 !strcmp(word, "spawn") || !strcmp(word, "rendezvous"))) {
            what[count++] = argv[i];
        } else {
            fputs(usage, stderr);
            return 2;
        }
    }
    if (!bench.command)
        bench.command = own_command();

    make_records(&bench);
    if (bench.table)
        printf("%-14s %5s %10s %10s\n", "", "ranks", "median ms", "least ms");
    if (wants(count, what, "start"))
        measure_start(&bench, false);
    for (int ranks = 64; !bench.ranks && ranks <= 256 && wants(count, what, "meet"); ranks *= 4)
        measure_meeting(&bench, false, ranks);
    if (bench.ranks && wants(count, what, "meet"))
        measure_meeting(&bench, false, bench.ranks);
    if (wants(count, what, "spawn"))
        measure_start(&bench, true);
    for (int ranks = 64; ranks <= 256 && wants(count, what, "spawn"); ranks *= 4)
        measure_meeting(&bench, true, ranks);
    if (wants(count, what, "rendezvous"))
        measure_rendezvous(&bench);
    return 0;
}
