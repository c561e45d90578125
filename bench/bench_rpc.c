/* Remote calls between two workers of one host.
 *
 *     caller   worker "a": makes the calls, and prints
 *     callee   worker "b": its main thread waits in the graceful shutdown, the agent's threads serve
 *
 * A row is one kind of call, repeated for about --ms milliseconds, and has the median and the best of its
 * repetitions. The rows that end with _tcp are measured by another pair of workers with TANDEM_TRANSPORT=tcp; beside
 * them, tcp_ping_pong sends 64 bytes there and back between the same two processes over a plain loopback connection,
 * with blocking calls. For death, each repetition has two processes of its own.
 *
 * peers/rpc_torch.py does the same, step by step, with torch.distributed.rpc. */
#include "measure.h"

#include "base/clock.h"

#include <tandem/tandem.h>

#include <arpa/inet.h>
#include <dirent.h>
#include <inttypes.h>
#include <linux/futex.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
    MOST = 1 << 20, /* repetitions of a row */
    IN_FLIGHT = 100,
    BATCH = 2000, /* calls of a repetition of calls_in_flight */
    REFERENCES = 100,
    SILENCE_MS = 50,
    IDLE_MS = 1000,
    TIMEOUT_MS = 50, /* of timeout_late … */
    NAP_MS = 150,    /* … and how long its function takes */
    PING = 64,       /* bytes */
    BOUNCES = 1000,  /* of a cache line, in a repetition of cache_line */
};

#define ELEMENTS (16 << 20) /* f32: 64 MiB */

/* What the two processes of wake_up and cache_line share. */
struct wake {
    _Atomic uint32_t word;                 /* the callee's thread sleeps until it changes */
    _Alignas(64) _Atomic uint32_t answer;  /* the last word that it has seen */
    _Alignas(64) _Atomic uint32_t bounced; /* even: the caller's turn */
};

static struct wake *wake;

struct bench {
    int64_t time_ns; /* of a row, about */
    bool table;
    bool tcp;
    bool alone; /* not between the two workers */
    bool pinned;
    int processors[2]; /* of the workers, if pinned */
    const char *const *only;
    int only_count;
    pid_t callee;
    td_tensor *tensor;
    td_rref *counter;
    bool listens; /* a thread of the callee, for wake_up */
    int ping;     /* a connected socket, whose other end is the callee */
    int64_t *times;
    size_t count;
};

static td_value *checked(td_value *value)
{
    if (!value)
        bench_die("%s", td_last_error());
    return value;
}

static void sleep_ms(int ms)
{
    nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000L}, NULL);
}

/* ---- What the callee serves ------------------------------------------------------------------- */

static td_value *increment(td_rpc_call *call, td_value *const *args, int count)
{
    int64_t x;
    (void)call, (void)count;
    return td_value_int(args[0], &x) ? NULL : td_value_of(x + 1);
}

static td_value *first(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)count;
    return td_value_of(*(const float *)td_tensor_data(td_value_tensor(args[0])));
}

static td_value *sum(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)count;
    return td_value_of(td_item(td_sum(td_value_tensor(args[0]))));
}

static td_value *same(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)count;
    return args[0];
}

static td_value *process(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)args, (void)count;
    return td_value_of(getpid());
}

static td_value *nap(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)args, (void)count;
    sleep_ms(NAP_MS);
    return td_value_nil();
}

static td_value *hold(td_rpc_call *call, td_value *const *args, int count)
{
    (void)args, (void)count;
    while (!td_rpc_call_is_cancelled(call))
        sleep_ms(10);
    return td_value_nil();
}

static void *new_counter(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)args, (void)count;
    return calloc(1, sizeof(int64_t));
}

static td_value *count_up(td_rpc_call *call, td_value *const *args, int count)
{
    (void)args, (void)count;
    return td_value_of(++*(int64_t *)td_rpc_call_self(call));
}

/* Sends back what it gets, until the other end closes. */
static void *send_back(void *arg)
{
    int listener = (int)(intptr_t)arg, fd = accept(listener, NULL, NULL), one = 1;
    char bytes[PING];
    close(listener);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    while (recv(fd, bytes, PING, MSG_WAITALL) == PING && send(fd, bytes, PING, 0) == PING)
        ;
    close(fd);
    return NULL;
}

static td_value *ping_port(td_rpc_call *call, td_value *const *args, int count)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    pthread_t thread;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    (void)call, (void)args, (void)count;
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, size) || listen(fd, 1) ||
        getsockname(fd, (struct sockaddr *)&address, &size) ||
        pthread_create(&thread, NULL, send_back, (void *)(intptr_t)fd)) {
        td_fail(TD_ERR_SYSTEM, "ping_port: %s", strerror(errno));
        return NULL;
    }
    pthread_detach(thread);
    return td_value_of(ntohs(address.sin_port));
}

/* Sleeps until the word changes, and answers. */
static void *answer_wakes(void *arg)
{
    (void)arg;
    for (uint32_t seen = atomic_load(&wake->word);; seen = atomic_load(&wake->word)) {
        atomic_store(&wake->answer, seen);
        while (atomic_load(&wake->word) == seen)
            syscall(SYS_futex, &wake->word, FUTEX_WAIT, seen, NULL, NULL, 0);
    }
    return NULL;
}

static td_value *listen_for_wakes(td_rpc_call *call, td_value *const *args, int count)
{
    pthread_t thread;
    (void)call, (void)args, (void)count;
    if (pthread_create(&thread, NULL, answer_wakes, NULL)) {
        td_fail(TD_ERR_SYSTEM, "listen_for_wakes: %s", strerror(errno));
        return NULL;
    }
    pthread_detach(thread);
    return td_value_nil();
}

/* Both workers may be on one processor. */
static void await_turn(uint32_t turn)
{
    for (int polls = 1; atomic_load_explicit(&wake->bounced, memory_order_acquire) != turn; polls++)
        if (polls % 4096 == 0)
            sched_yield();
}

static td_value *bounce(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)args, (void)count;
    for (uint32_t turn = 1; turn < 2 * BOUNCES; turn += 2) {
        await_turn(turn);
        atomic_store_explicit(&wake->bounced, turn + 1, memory_order_release);
    }
    return td_value_nil();
}

static void register_all(void)
{
    static const td_rpc_method methods[] = {{"count_up()", count_up}, {0}};
    static const td_rpc_class counter = {
        .signature = "Counter()", .create = new_counter, .destroy = free, .methods = methods};
    bench_check(td_rpc_register("increment(x: int)", increment, NULL));
    bench_check(td_rpc_register("first(x: tensor)", first, NULL));
    bench_check(td_rpc_register("sum(x: tensor)", sum, NULL));
    bench_check(td_rpc_register("same(x: tensor)", same, NULL));
    bench_check(td_rpc_register("process()", process, NULL));
    bench_check(td_rpc_register("nap()", nap, NULL));
    bench_check(td_rpc_register("hold()", hold, NULL));
    bench_check(td_rpc_register("ping_port()", ping_port, NULL));
    bench_check(td_rpc_register("listen_for_wakes()", listen_for_wakes, NULL));
    bench_check(td_rpc_register("bounce()", bounce, NULL));
    bench_check(td_rpc_register_class(&counter));
}

/* ---- The rows --------------------------------------------------------------------------------- */

/* Each function is one repetition, and returns its time in nanoseconds. */

static int64_t call_once(struct bench *bench)
{
    TD_SCOPE;
    (void)bench;
    int64_t start = td__now_ns();
    checked(td_rpc_sync("b", "increment", TD_ARGS(1), NULL));
    return td__now_ns() - start;
}

static int64_t call_asleep(struct bench *bench)
{
    sleep_ms(SILENCE_MS);
    return call_once(bench);
}

/* What call_asleep takes without a library: a futex wakes a thread of the callee, and this thread spins until that has
 * answered through a shared line. No call that needs a thread of another process which sleeps can be faster. */
static int64_t wake_up(struct bench *bench)
{
    if (!bench->listens) {
        TD_SCOPE;
        checked(td_rpc_sync("b", "listen_for_wakes", TD_NO_ARGS, NULL));
        bench->listens = true;
    }
    sleep_ms(SILENCE_MS);
    int64_t start = td__now_ns();
    uint32_t word = atomic_fetch_add(&wake->word, 1) + 1;
    syscall(SYS_futex, &wake->word, FUTEX_WAKE, 1, NULL, NULL, 0);
    while (atomic_load(&wake->answer) != word)
        sched_yield(); /* as a call does, since both may share a processor */
    return td__now_ns() - start;
}

/* A cache line there and back between two processors: what calls in flight need twice, if nothing hides it. */
static int64_t cache_line(struct bench *bench)
{
    TD_SCOPE;
    (void)bench;
    atomic_store(&wake->bounced, 0);
    td_future *bounced = td_rpc_async("b", "bounce", TD_NO_ARGS, NULL);
    if (!bounced)
        bench_die("%s", td_last_error());
    int64_t start = 0;
    for (uint32_t turn = 0; turn < 2 * BOUNCES; turn += 2) {
        atomic_store_explicit(&wake->bounced, turn + 1, memory_order_release);
        await_turn(turn + 2);
        if (!start)
            start = td__now_ns(); /* the callee has come */
    }
    int64_t time = td__now_ns() - start;
    checked(td_future_wait(bounced, 0));
    return time / (BOUNCES - 1);
}

static void finish(td_future *future)
{
    TD_SCOPE;
    checked(td_future_wait(future, 0));
    td_future_release(future);
}

static td_future *begin(void)
{
    TD_SCOPE;
    td_future *future = td_rpc_async("b", "increment", TD_ARGS(1), NULL);
    if (!future)
        bench_die("%s", td_last_error());
    return td_future_retain(future);
}

/* Of one call, while IN_FLIGHT others are in flight. */
static int64_t calls_in_flight(struct bench *bench)
{
    td_future *futures[IN_FLIGHT];
    (void)bench;
    for (int i = 0; i < IN_FLIGHT; i++)
        futures[i] = begin();
    int64_t start = td__now_ns();
    for (int i = 0; i < BATCH; i++) {
        finish(futures[i % IN_FLIGHT]);
        futures[i % IN_FLIGHT] = begin();
    }
    int64_t end = td__now_ns();
    for (int i = 0; i < IN_FLIGHT; i++)
        finish(futures[i]);
    return (end - start) / BATCH;
}

static int64_t send_tensor(td_tensor *tensor, const char *function, bool copy)
{
    TD_SCOPE;
    int64_t start = td__now_ns();
    td_value *result = checked(
        td_rpc_sync("b", function, TD_ARGS(tensor), &(td_rpc_call_options){.copy = copy}));
    int64_t time = td__now_ns() - start;
    double number;
    if (td_value_kind_of(result) != TD_VALUE_TENSOR &&
        (td_value_float(result, &number) || number < 1))
        bench_die("%s returned %g", function, number);
    return time;
}

static int64_t first_byte(struct bench *bench)
{
    return send_tensor(bench->tensor, "first", false);
}

/* Of memory that has not been sent before, as far as the allocator has some. While it is filled, the callee falls
 * asleep: a call wakes it, so that the time is that of the tensor (call_asleep measures the other). */
static int64_t first_byte_new(struct bench *bench)
{
    TD_SCOPE;
    td_tensor *tensor = td_ones(TD_SHAPE(ELEMENTS), TD_F32, NULL);
    call_once(bench);
    return send_tensor(tensor, "first", false);
}

static int64_t sum_by_reference(struct bench *bench)
{
    return send_tensor(bench->tensor, "sum", false);
}

static int64_t there_and_back(struct bench *bench)
{
    return send_tensor(bench->tensor, "same", false);
}

static int64_t there_and_back_by_value(struct bench *bench)
{
    return send_tensor(bench->tensor, "same", true);
}

/* Of one reference, when the callee has made and dropped all of them. */
static int64_t make_reference(struct bench *bench)
{
    int64_t start = td__now_ns();
    for (int i = 0; i < REFERENCES; i++) {
        TD_SCOPE;
        if (!td_remote("b", "Counter", TD_NO_ARGS, NULL))
            bench_die("%s", td_last_error());
    }
    call_once(bench);
    return (td__now_ns() - start) / REFERENCES;
}

static int64_t call_method(struct bench *bench)
{
    TD_SCOPE;
    int64_t start = td__now_ns();
    checked(td_rref_sync(bench->counter, "count_up", TD_NO_ARGS, NULL));
    return td__now_ns() - start;
}

static int64_t process_time(pid_t pid)
{
    clockid_t clock;
    struct timespec time;
    if (clock_getcpuclockid(pid, &clock) || clock_gettime(clock, &time))
        bench_die("the processor time of %d cannot be read", (int)pid);
    return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

/* The processor time of the agent's threads in a process. */
static int64_t agent_time(pid_t pid)
{
    char path[300], name[32];
    int64_t total = 0, time;
    snprintf(path, sizeof path, "/proc/%d/task", (int)pid);
    DIR *folder = opendir(path);
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        snprintf(path, sizeof path, "/proc/%d/task/%s/comm", (int)pid, entry->d_name);
        FILE *file = fopen(path, "r");
        bool is_agent = file && fgets(name, sizeof name, file) && !strcmp(name, "td-rpc\n");
        if (file)
            fclose(file);
        snprintf(path, sizeof path, "/proc/%d/task/%s/schedstat", (int)pid, entry->d_name);
        if (!is_agent || !(file = fopen(path, "r")))
            continue;
        if (fscanf(file, "%" SCNd64, &time) == 1)
            total += time;
        fclose(file);
    }
    if (folder)
        closedir(folder);
    return total;
}

/* The processor time in a second without calls: of the callee's agent, and of the whole callee. */
static int64_t idle(struct bench *bench)
{
    sleep_ms(SILENCE_MS);
    int64_t before = agent_time(bench->callee);
    sleep_ms(IDLE_MS);
    return agent_time(bench->callee) - before;
}

static int64_t idle_process(struct bench *bench)
{
    sleep_ms(SILENCE_MS);
    int64_t before = process_time(bench->callee);
    sleep_ms(IDLE_MS);
    return process_time(bench->callee) - before;
}

static int64_t ping_pong(struct bench *bench)
{
    char bytes[PING] = {0};
    int64_t start = td__now_ns();
    if (send(bench->ping, bytes, PING, 0) != PING ||
        recv(bench->ping, bytes, PING, MSG_WAITALL) != PING)
        bench_die("ping-pong: %s", strerror(errno));
    return td__now_ns() - start;
}

/* How much later than its timeout a call fails. */
static int64_t timeout_late(struct bench *bench)
{
    TD_SCOPE;
    (void)bench;
    int64_t start = td__now_ns();
    td_value *value = td_rpc_sync("b", "nap", TD_NO_ARGS,
                                  &(td_rpc_call_options){.timeout_ms = TIMEOUT_MS});
    int64_t time = td__now_ns() - start;
    if (value || td_last_status() != TD_ERR_TIMEOUT)
        bench_die("timeout_late: %s", value ? "the call was answered" : td_last_error());
    return time - TIMEOUT_MS * INT64_C(1000000);
}

/* ---- The death of a callee ---------------------------------------------------------------------- */

static void join_pair(int rank, td_store *store)
{
    register_all();
    bench_check(td_init_rpc(rank ? "b" : "a",
                            &(td_rpc_options){.store = store, .rank = rank, .world_size = 2}));
}

/* The caller, which has the store: from the SIGKILL to the failure of a call that waits. */
static int64_t survive(int port_out)
{
    TD_SCOPE;
    td_store *store;
    bench_check(
        td_tcp_store_open("127.0.0.1", 0, &(td_tcp_store_options){.host_server = true}, &store));
    int port = td_tcp_store_port(store);
    int64_t pid = 0;
    if (write(port_out, &port, sizeof port) != sizeof port)
        bench_die("write: %s", strerror(errno));
    join_pair(0, store);
    td_future *held = td_rpc_async("b", "hold", TD_NO_ARGS, NULL);
    bench_check(td_value_int(checked(td_rpc_sync("b", "process", TD_NO_ARGS, NULL)), &pid));
    int64_t start = td__now_ns();
    kill((pid_t)pid, SIGKILL);
    td_value *value = td_future_wait(held, 0);
    int64_t time = td__now_ns() - start;
    if (value || td_last_status() != TD_ERR_PEER)
        bench_die("death: %s", value ? "the call was answered" : td_last_error());
    bench_check(td_rpc_shutdown(&(td_rpc_shutdown_options){.now = true}));
    td_store_close(store);
    return time;
}

static void die(int port_in)
{
    td_store *store;
    int port;
    if (read(port_in, &port, sizeof port) != sizeof port)
        bench_die("read: %s", strerror(errno));
    bench_check(td_tcp_store_open("127.0.0.1", port, NULL, &store));
    join_pair(1, store);
    for (;;)
        pause();
}

/* In two processes that are made for it. */
static int64_t death(struct bench *bench)
{
    int ports[2], times[2];
    int64_t time = 0;
    (void)bench;
    if (pipe(ports) || pipe(times))
        bench_die("pipe: %s", strerror(errno));
    pid_t callee = fork();
    if (callee == 0)
        die(ports[0]);
    pid_t caller = fork();
    if (caller == 0) {
        time = survive(ports[1]);
        _exit(write(times[1], &time, sizeof time) != sizeof time);
    }
    close(times[1]);
    close(ports[0]);
    close(ports[1]);
    if (callee < 0 || caller < 0 || read(times[0], &time, sizeof time) != sizeof time)
        bench_die("death: no time was measured");
    close(times[0]);
    waitpid(callee, NULL, 0);
    waitpid(caller, NULL, 0);
    return time;
}

/* ---- All rows ----------------------------------------------------------------------------------- */

enum unit { US, MS, PER_S };

static const struct row {
    const char *what;
    enum unit unit;
    int64_t (*once)(struct bench *bench);
    bool tcp;     /* between the workers with TANDEM_TRANSPORT=tcp */
    int at_least; /* repetitions */
} rows[] = {
    {"call", US, call_once, false, 1000},
    {"call_asleep", US, call_asleep, false, 20},
    {"wake_up", US, wake_up, false, 20},
    {"cache_line", US, cache_line, false, 5},
    {"calls_in_flight", PER_S, calls_in_flight, false, 5},
    {"first_byte", US, first_byte, false, 20},
    {"first_byte_new", US, first_byte_new, false, 5},
    {"sum_by_reference", MS, sum_by_reference, false, 5},
    {"there_and_back", US, there_and_back, false, 20},
    {"there_and_back_by_value", MS, there_and_back_by_value, false, 5},
    {"reference", US, make_reference, false, 5},
    {"method", US, call_method, false, 1000},
    {"idle", US, idle, false, 1},
    {"idle_process", US, idle_process, false, 1},
    {"timeout_late", MS, timeout_late, false, 20},
    {"death", MS, death, false, 20},
    {"call_tcp", US, call_once, true, 1000},
    {"calls_in_flight_tcp", PER_S, calls_in_flight, true, 5},
    {"there_and_back_tcp", MS, there_and_back, true, 5},
    {"tcp_ping_pong", US, ping_pong, true, 1000},
    {"death_tcp", MS, death, true, 20},
};

enum { ROWS = sizeof rows / sizeof *rows };

/* ---- Measuring -------------------------------------------------------------------------------- */

static double in_unit(enum unit unit, int64_t ns)
{
    return unit == US ? (double)ns / 1e3 : unit == MS ? (double)ns / 1e6 : 1e9 / (double)ns;
}

static void print_row(const struct bench *bench, const struct row *row, const char *suffix,
                      int64_t median, int64_t best)
{
    static const char *const units[] = {"us", "ms", "per_s"};
    char what[64];
    snprintf(what, sizeof what, "%s%s%s", row->what, suffix, bench->pinned ? "_pinned" : "");
    printf(bench->table ? "%-30s %6s %12.2f %12.2f %9zu\n"
                        : "{\"peer\":\"tandem\",\"what\":\"%s\",\"unit\":\"%s\",\"median\":%.2f,"
                          "\"best\":%.2f,\"repetitions\":%zu}\n",
           what, units[row->unit], in_unit(row->unit, median), in_unit(row->unit, best),
           bench->count);
    fflush(stdout);
}

static bool is_wanted(const struct bench *bench, const struct row *row)
{
    bool wanted = !bench->only_count;
    for (int i = 0; i < bench->only_count; i++)
        wanted |= !strcmp(bench->only[i], row->what);
    return wanted && row->tcp == bench->tcp && (row->once == death) == bench->alone;
}

static void measure(struct bench *bench, const struct row *row)
{
    int64_t end = td__now_ns() + bench->time_ns / 5;
    if (row->once != idle && row->once != idle_process && row->once != death)
        do
            row->once(bench);
        while (td__now_ns() < end);
    end = td__now_ns() + bench->time_ns;
    bench->count = 0;
    while (bench->count < MOST && ((int)bench->count < row->at_least || td__now_ns() < end))
        bench->times[bench->count++] = row->once(bench);
    bench_sort(bench->times, bench->count);
    int64_t best = bench->times[0], most = bench->times[bench->count - 1];
    print_row(bench, row, "", bench_at(bench->times, bench->count, 0.5), best);
    if (row->once == death || row->once == timeout_late) /* of these, the slowest counts */
        print_row(bench, row, "_slowest", most, most);
}

static int connect_ping(void)
{
    TD_SCOPE;
    int64_t port = 0;
    bench_check(td_value_int(checked(td_rpc_sync("b", "ping_port", TD_NO_ARGS, NULL)), &port));
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_port = htons((uint16_t)port),
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) ||
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one))
        bench_die("connect: %s", strerror(errno));
    return fd;
}

static void measure_wanted(struct bench *bench)
{
    bench->times = malloc(MOST * sizeof *bench->times);
    if (!bench->times)
        bench_die("out of memory");
    memset(bench->times, 1, MOST * sizeof *bench->times); /* faults the pages in */
    for (int r = 0; r < ROWS; r++)
        if (is_wanted(bench, &rows[r]))
            measure(bench, &rows[r]);
    free(bench->times);
}

static void measure_all(struct bench *bench)
{
    int64_t pid = 0;
    bench_check(td_value_int(checked(td_rpc_sync("b", "process", TD_NO_ARGS, NULL)), &pid));
    bench->callee = (pid_t)pid;
    bench->tensor = td_ones(TD_SHAPE(ELEMENTS), TD_F32, NULL);
    bench->counter = td_remote("b", "Counter", TD_NO_ARGS, NULL);
    if (!bench->tensor || !bench->counter)
        bench_die("%s", td_last_error());
    bench->ping = bench->tcp ? connect_ping() : -1;
    measure_wanted(bench);
    if (bench->ping >= 0)
        close(bench->ping);
    td_rref_release(bench->counter);
    td_tensor_release(bench->tensor);
}

static td_status run_worker(int rank, void *arg)
{
    struct bench *bench = arg;
    if (bench->pinned) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(bench->processors[rank], &set);
        if (sched_setaffinity(0, sizeof set, &set))
            bench_die("processor %d: %s", bench->processors[rank], strerror(errno));
    }
    bench_check(td_set_num_threads(1));
    register_all();
    bench_check(td_init_rpc(rank ? "b" : "a", NULL));
    if (rank == 0)
        measure_all(bench);
    return td_rpc_shutdown(NULL);
}

static const char usage[] =
    "usage: bench_rpc [OPTION…] [WHAT…]\n"
    "\n"
    "Measures remote calls between two workers of this host. WHAT is a row, all of them by default;\n"
    "bench/README.md explains them. Prints one line of JSON for each.\n"
    "\n"
    "  --table          a table instead of JSON\n"
    "  --ms N           approximate time of each row (300)\n"
    "  --pin A,B        the caller on processor A, the callee on processor B\n";

static struct bench read_options(int argc, char **argv, const char **only)
{
    struct bench bench = {.time_ns = 300000000, .only = only};
    for (int i = 1; i < argc; i++) {
        int row = 0;
        while (row < ROWS && strcmp(rows[row].what, argv[i]) != 0)
            row++;
        if (!strcmp(argv[i], "--table"))
            bench.table = true;
        else if (!strcmp(argv[i], "--ms"))
            bench.time_ns = bench_number(argv[i], argv[i + 1], 1) * INT64_C(1000000), i++;
        else if (!strcmp(argv[i], "--pin") && argv[i + 1] &&
                 sscanf(argv[i + 1], "%d,%d", &bench.processors[0], &bench.processors[1]) == 2)
            bench.pinned = true, i++;
        else if (row < ROWS)
            only[bench.only_count++] = argv[i];
        else {
            bool help = !strcmp(argv[i], "--help") || !strcmp(argv[i], "-h");
            fputs(usage, help ? stdout : stderr);
            exit(help ? 0 : 2);
        }
    }
    return bench;
}

int main(int argc, char **argv)
{
    const char **only = calloc((size_t)argc, sizeof *only);
    struct bench bench = read_options(argc, argv, only);
    wake = mmap(NULL, sizeof *wake, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (wake == MAP_FAILED)
        bench_die("mmap: %s", strerror(errno));
    if (bench.table)
        printf("%-30s %6s %12s %12s %9s\n", "", "unit", "median", "best", "count");
    for (int tcp = 0; tcp < 2; tcp++) {
        bool any = false;
        bench.tcp = tcp;
        for (int r = 0; r < ROWS; r++)
            any |= is_wanted(&bench, &rows[r]);
        if (tcp)
            setenv("TANDEM_TRANSPORT", "tcp", 1);
        if (any)
            bench_check(td_spawn(run_worker, &bench, 2, NULL));
        bench.alone = true;
        measure_wanted(&bench);
        bench.alone = false;
    }
    free(only);
    return 0;
}
