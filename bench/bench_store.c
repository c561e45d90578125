/* Calls on the TCP store: the time of one, and how many a second a server answers.
 *
 *     server   a process of its own; its main thread sleeps, the store's thread serves
 *     clients  1 or 8 processes, one connection each
 *
 * Each row is one operation with one number of clients. The clients warm up together, agree on a
 * number of calls that takes about a second, call a barrier of the store, and make that many
 * calls each. The rate is all calls over the time from the first client's start to the last one's
 * end. A call's time is from the return of the one before to its own.
 *
 * td_store_set() does not wait for the server, so its time means little: a get follows the last set inside
 * the measured time, and the rate is that of completed sets.
 *
 * peers/torch_store.py does the same, step by step, with PyTorch's TCPStore. */
#include "measure.h"

#include "base/clock.h"

#include <tandem/store.h>

#include <inttypes.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    MAX_CLIENTS = 64,
    MAX_CALLS = 2000000, /* of one client */
    KEYS = 16,           /* of one multi_get */
    TIMEOUT_MS = 60000,
};

/* The results of a client process, in memory shared with the parent. */
struct result {
    int64_t start, end;
    int64_t calls;
    int64_t *times; /* of each call, in nanoseconds */
};

struct bench {
    const char *host;
    double seconds;
    bool table;
    int port;
    int runs; /* each has keys of its own for its barriers */
    pid_t server;
    struct result *results; /* one a client */
};

/* ---- The operations -------------------------------------------------------------------------- */

static const char *const keys[KEYS] = {"key/0",  "key/1",  "key/2",  "key/3", "key/4",  "key/5",
                                       "key/6",  "key/7",  "key/8",  "key/9", "key/10", "key/11",
                                       "key/12", "key/13", "key/14", "key/15"};

static void call_set(td_store *store)
{
    bench_check(td_store_set(store, "key", "value", 5));
}

static void call_get(td_store *store)
{
    td_bytes value;
    bench_check(td_store_get(store, "key", 0, &value));
    td_bytes_free(&value);
}

static void call_add(td_store *store)
{
    int64_t sum;
    bench_check(td_store_add(store, "counter", 1, &sum));
}

static void call_compare_set(td_store *store)
{
    td_bytes value;
    bench_check(td_store_compare_set(store, "key", "value", 5, "value", 5, &value));
    td_bytes_free(&value);
}

static void call_wait(td_store *store)
{
    bench_check(td_store_wait(store, (const char *const[]){"key"}, 1, 0));
}

static void call_multi_get(td_store *store)
{
    td_bytes values[KEYS];
    bench_check(td_store_multi_get(store, keys, KEYS, 0, values));
    for (int i = 0; i < KEYS; i++)
        td_bytes_free(&values[i]);
}

static const struct operation {
    const char *what;
    void (*call)(td_store *store);
    bool silent; /* without reply: a get at the end waits for completion */
} operations[] = {
    {"set", call_set, true},    {"get", call_get, false},
    {"add", call_add, false},   {"compare_set", call_compare_set, false},
    {"wait", call_wait, false}, {"multi_get_16", call_multi_get, false},
};

enum { OPERATIONS = sizeof operations / sizeof *operations };

/* ---- A client -------------------------------------------------------------------------------- */

static void barrier(td_store *store, int run, const char *name, int clients)
{
    char arrived[64], go[64];
    int64_t count;
    snprintf(arrived, sizeof arrived, "run/%d/%s/arrived", run, name);
    snprintf(go, sizeof go, "run/%d/%s/go", run, name);
    bench_check(td_store_add(store, arrived, 1, &count));
    if (count == clients)
        bench_check(td_store_set(store, go, "", 0));
    bench_check(td_store_wait(store, (const char *const[]){go}, 1, 0));
}

/* Calls for a fifth of the time, and returns how many calls each client makes in the whole time. */
static int64_t warm_up(const struct bench *bench, td_store *store,
                       const struct operation *operation, int clients)
{
    char rate[64];
    int64_t calls = 0, start = td__now_ns(), length = (int64_t)(bench->seconds / 5 * 1e9);
    int64_t total;
    for (; td__now_ns() - start < length; calls++)
        operation->call(store);
    if (operation->silent)
        call_get(store);
    double elapsed = (double)(td__now_ns() - start) / 1e9;

    snprintf(rate, sizeof rate, "run/%d/rate", bench->runs);
    bench_check(td_store_add(store, rate, (int64_t)((double)calls / elapsed), NULL));
    barrier(store, bench->runs, "warm", clients);
    bench_check(td_store_add(store, rate, 0, &total));
    calls = (int64_t)((double)total / clients * bench->seconds);
    return calls < 10 ? 10 : calls > MAX_CALLS ? MAX_CALLS : calls;
}

static void run_client(const struct bench *bench, const struct operation *operation, int clients,
                       struct result *result)
{
    td_store *store;
    bench_check(td_tcp_store_open(bench->host, bench->port,
                                  &(td_tcp_store_options){.timeout_ms = TIMEOUT_MS}, &store));
    barrier(store, bench->runs, "open", clients);
    int64_t calls = warm_up(bench, store, operation, clients);
    memset(result->times, 1, (size_t)calls * sizeof *result->times); /* faults the pages in */
    barrier(store, bench->runs, "start", clients);

    int64_t start = td__now_ns(), before = start;
    for (int64_t i = 0; i < calls; i++) {
        operation->call(store);
        int64_t now = td__now_ns();
        result->times[i] = now - before;
        before = now;
    }
    if (operation->silent)
        call_get(store);
    result->start = start;
    result->end = td__now_ns();
    result->calls = calls;
    bench_check(td_store_close(store));
}

/* ---- The server and the parent --------------------------------------------------------------- */

/* Starts a process that dies with this one. */
static pid_t start_process(void)
{
    fflush(stdout);
    pid_t parent = getpid(), pid = fork();
    if (pid < 0)
        bench_die("fork: %s", strerror(errno));
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
            _exit(1);
    }
    return pid;
}

static void start_server(struct bench *bench)
{
    int ready[2];
    if (pipe(ready))
        bench_die("pipe: %s", strerror(errno));
    bench->server = start_process();
    if (bench->server == 0) {
        td_store *store;
        td_tcp_store_options options = {.host_server = true, .timeout_ms = TIMEOUT_MS};
        bench_check(td_tcp_store_open(bench->host, 0, &options, &store));
        call_set(store);
        for (int i = 0; i < KEYS; i++)
            bench_check(td_store_set(store, keys[i], "value", 5));
        call_get(store);
        int port = td_tcp_store_port(store);
        if (write(ready[1], &port, sizeof port) != (ssize_t)sizeof port)
            _exit(1);
        for (;;)
            pause();
    }
    close(ready[1]);
    if (read(ready[0], &bench->port, sizeof bench->port) != (ssize_t)sizeof bench->port)
        bench_die("the server could not be started");
    close(ready[0]);
}

static void stop_server(struct bench *bench)
{
    kill(bench->server, SIGKILL);
    waitpid(bench->server, NULL, 0);
}

#define TABLE_ROW "%-14s %7d %12.0f %10.2f %10.2f %10.2f\n"
#define JSON_ROW                                                                                   \
    "{\"peer\":\"tandem\",\"what\":\"%s\",\"clients\":%d,\"calls_per_s\":%.0f,"                    \
    "\"median_us\":%.2f,\"min_us\":%.2f,\"p99_us\":%.2f}\n"

static void print_row(const struct bench *bench, const char *what, int clients)
{
    int64_t start = INT64_MAX, end = 0;
    size_t calls = 0;
    for (int i = 0; i < clients; i++) {
        const struct result *result = &bench->results[i];
        start = result->start < start ? result->start : start;
        end = result->end > end ? result->end : end;
        calls += (size_t)result->calls;
    }
    int64_t *times = malloc(calls * sizeof *times);
    if (!times)
        bench_die("out of memory");
    size_t taken = 0;
    for (int i = 0; i < clients; i++) {
        memcpy(times + taken, bench->results[i].times,
               (size_t)bench->results[i].calls * sizeof *times);
        taken += (size_t)bench->results[i].calls;
    }
    bench_sort(times, calls);
    printf(bench->table ? TABLE_ROW : JSON_ROW, what, clients,
           (double)calls / ((double)(end - start) / 1e9), (double)bench_at(times, calls, 0.5) / 1e3,
           (double)times[0] / 1e3, (double)bench_at(times, calls, 0.99) / 1e3);
    fflush(stdout);
    free(times);
}

static void run(struct bench *bench, const struct operation *operation, int clients)
{
    bench->runs++;
    for (int i = 0; i < clients; i++) {
        if (start_process() == 0) {
            run_client(bench, operation, clients, &bench->results[i]);
            _exit(0);
        }
    }
    for (int i = 0; i < clients; i++) {
        int status;
        pid_t pid = wait(&status);
        if (pid < 0 || pid == bench->server || status)
            bench_die("%s: %s has failed", operation->what,
                      pid == bench->server ? "the server" : "a client");
    }
    print_row(bench, operation->what, clients);
}

/* One array of times a client, in memory that the client shares with the parent. */
static void make_results(struct bench *bench)
{
    size_t size = MAX_CLIENTS * (sizeof(struct result) + MAX_CALLS * sizeof(int64_t));
    bench->results = mmap(NULL, size, PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (bench->results == MAP_FAILED)
        bench_die("mmap: %s", strerror(errno));
    int64_t *times = (int64_t *)(bench->results + MAX_CLIENTS);
    for (int i = 0; i < MAX_CLIENTS; i++)
        bench->results[i].times = times + (size_t)i * MAX_CALLS;
}

static const char usage[] =
    "usage: bench_store [OPTION…] [WHAT…]\n"
    "\n"
    "Measures calls on the TCP store: WHAT is set, get, add, compare_set, wait or multi_get_16, all\n"
    "of them by default. Prints one line of JSON for each operation and number of clients.\n"
    "\n"
    "  --table          a table instead of JSON\n"
    "  --clients N      with N clients only, instead of 1 and 8; may be given several times\n"
    "  --ms N           approximate time of each measurement (1000)\n"
    "  --host HOST      where the server listens (127.0.0.1); unix:@NAME is a unix socket\n";

int main(int argc, char **argv)
{
    struct bench bench = {.host = "127.0.0.1", .seconds = 1};
    bool wanted[OPERATIONS] = {0}, any = false;
    int clients[16], client_counts = 0;
    for (int i = 1; i < argc; i++) {
        const char *option = argv[i];
        if (!strcmp(option, "--help") || !strcmp(option, "-h")) {
            fputs(usage, stdout);
            return 0;
        } else if (!strcmp(option, "--table")) {
            bench.table = true;
        } else if (!strcmp(option, "--clients") && client_counts < 16) {
            clients[client_counts] = bench_number(option, argv[++i], 1);
            if (clients[client_counts++] > MAX_CLIENTS)
                bench_die("at most %d clients", MAX_CLIENTS);
        } else if (!strcmp(option, "--ms")) {
            bench.seconds = bench_number(option, argv[++i], 1) / 1e3;
        } else if (!strcmp(option, "--host") && argv[i + 1]) {
            bench.host = argv[++i];
        } else {
            int o = 0;
            while (o < OPERATIONS && strcmp(operations[o].what, option) != 0)
                o++;
            if (o == OPERATIONS) {
                fputs(usage, stderr);
                return 2;
            }
            wanted[o] = any = true;
        }
    }
    if (!client_counts) {
        clients[client_counts++] = 1;
        clients[client_counts++] = 8;
    }

    make_results(&bench);
    start_server(&bench);
    if (bench.table)
        printf("%-14s %7s %12s %10s %10s %10s\n", "", "clients", "calls/s", "median µs", "least µs",
               "p99 µs");
    for (int c = 0; c < client_counts; c++)
        for (int o = 0; o < OPERATIONS; o++)
            if (!any || wanted[o])
                run(&bench, &operations[o], clients[c]);
    stop_server(&bench);
    return 0;
}
