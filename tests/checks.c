/* The inside of a test: its state, its helpers, and its checks. */
#include "runner_page.h"

#include "base/clock.h"

#include <tandem/device.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

static struct td_test_page *page;
static const struct td_test *current;
static int rank, size = 1, barriers;

int td_test_run_rank(const struct td_test *test)
{
    int fd = atoi(getenv(TD_TEST_PAGE_VARIABLE));
    page = mmap(NULL, sizeof *page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (page == MAP_FAILED) {
        perror("test runner: the page of the ranks");
        return TD_TEST_EXIT_FAILED;
    }
    close(fd);
    current = test;
    if (test->ranks) {
        rank = atoi(getenv("RANK"));
        size = atoi(getenv("WORLD_SIZE"));
    }
    setvbuf(stdout, NULL, _IOLBF, 0); /* output before a crash is in the report */
    const char *name = getenv(TD_TEST_DEVICE_VARIABLE);
    if (!td_test_on_host() && test->host_only)
        td_test_skip("%s", test->host_only);
    if (name)
        CHECK_OK(td_set_device(td_device_get(name)));
    test->run();
    if (name) /* what failed later */
        CHECK_OK(td_device_synchronize(td_device_get(name)));
    return 0;
}

int td_test_rank(void)
{
    return rank;
}

int td_test_size(void)
{
    return size;
}

const void *td_test_arg(void)
{
    return current->arg;
}

const char *td_test_temp_dir(void)
{
    return getenv(TD_TEST_DIRECTORY_VARIABLE);
}

int td_test_count_files(const char *directory)
{
    int count = 0;
    DIR *stream = opendir(directory);
    CHECK(stream != NULL);
    for (struct dirent *entry; (entry = readdir(stream));)
        count += strcmp(entry->d_name, ".") && strcmp(entry->d_name, "..");
    closedir(stream);
    return count;
}

bool td_test_on_host(void)
{
    const char *name = getenv(TD_TEST_DEVICE_VARIABLE);
    return !name || !strncmp(name, "cpu", 3);
}

int td_test_slowness(void)
{
    return TD_TEST_SLOWNESS;
}

bool td_test_is_long(void)
{
    return getenv(TD_TEST_LONG_VARIABLE) != NULL;
}

/* The state of "PID/task/TID", 0 without it. */
static char thread_state(const char *thread)
{
    char path[600], text[256], state = 0;
    snprintf(path, sizeof path, "/proc/%s/stat", thread);
    FILE *file = fopen(path, "re");
    text[file ? fread(text, 1, sizeof text - 1, file) : 0] = 0;
    const char *name_end = strrchr(text, ')');
    if (name_end)
        sscanf(name_end + 1, " %c", &state);
    if (file)
        fclose(file);
    return state;
}

/* Whether all threads of a process are stopped, or it has ended. */
static bool has_stopped(int pid)
{
    char path[64], thread[512];
    snprintf(path, sizeof path, "/proc/%d/task", pid);
    DIR *tasks = opendir(path);
    bool stopped = true;
    for (struct dirent *entry; stopped && tasks && (entry = readdir(tasks));) {
        snprintf(thread, sizeof thread, "%d/task/%s", pid, entry->d_name);
        char state = entry->d_name[0] == '.' ? 'T' : thread_state(thread);
        stopped = state == 'T' || state == 't' || state == 'Z' || !state;
    }
    if (tasks)
        closedir(tasks);
    return stopped;
}

void td_test_kill(int victim, int signal)
{
    int pid;
    while (!(pid = atomic_load(&page->ranks[victim].pid)))
        td__sleep_ns(100000);
    if (pid <= 0 || kill(pid, signal) || signal != SIGSTOP)
        return;
    while (!has_stopped(pid)) /* a thread that runs goes on for a moment */
        td__sleep_ns(100000);
}

void td_test_barrier(void)
{
    int all = ++barriers * size;
    atomic_fetch_add(&page->arrived, 1);
    while (atomic_load(&page->arrived) < all)
        td__sleep_ns(200000);
}

/* Writes the rank's message; a later one is only printed, and so is that of a process without the page, which
 * td_spawn() has started by exec. */
static void say(const char *format, va_list args)
{
    char message[sizeof page->ranks[0].message];
    vsnprintf(message, sizeof message, format, args);
    if (page && !atomic_flag_test_and_set(&page->ranks[rank].said))
        memcpy(page->ranks[rank].message, message, sizeof message);
    else
        dprintf(STDERR_FILENO, "%s\n", message);
}

void td_test_skip(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    say(format, args);
    va_end(args);
    _exit(TD_TEST_EXIT_SKIPPED);
}

static void say_text(const char *format, ...) __attribute__((format(printf, 1, 2)));

static void say_text(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    say(format, args);
    va_end(args);
}

/* Without exit(): other threads are still running, and what they use must not be taken away. */
void td_test_fail(const char *file, int line, const char *format, ...)
{
    char message[3500];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    const char *name = strrchr(file, '/');
    say_text("%s:%d: %s", name ? name + 1 : file, line, message);
    _exit(TD_TEST_EXIT_FAILED);
}

void td_test_check_eq(const char *file, int line, const char *a_text, const char *b_text,
                      long long a, long long b)
{
    if (a != b)
        td_test_fail(file, line, "CHECK_EQ(%s, %s): %lld is not %lld", a_text, b_text, a, b);
}

void td_test_check_str(const char *file, int line, const char *text, const char *a, const char *b)
{
    if (!a || !b || strcmp(a, b) != 0)
        td_test_fail(file, line, "CHECK_STR(%s): \"%.1500s\" is not \"%.1500s\"", text,
                     a ? a : "(NULL)", b ? b : "(NULL)");
}

void td_test_check_contains(const char *file, int line, const char *what, const char *text,
                            const char *part)
{
    if (!text || !strstr(text, part))
        td_test_fail(file, line, "CHECK_CONTAINS(%s): \"%.1000s\" is not in \"%.2000s\"", what,
                     part, text ? text : "(NULL)");
}

void td_test_check_prompt(const char *file, int line, int64_t since_ns)
{
    double seconds = (double)(td__now_ns() - since_ns) / 1e9;
    if (seconds > 20.0 * td_test_slowness())
        td_test_fail(file, line, "it took %.1f s, as long as a timeout", seconds);
}

void td_test_check_mem(const char *file, int line, const char *a_text, const char *b_text,
                       const void *a, const void *b, size_t bytes)
{
    const unsigned char *x = a, *y = b;
    for (size_t i = 0; i < bytes; i++)
        if (x[i] != y[i])
            td_test_fail(file, line, "CHECK_MEM(%s, %s): byte %zu of %zu is %d, not %d", a_text,
                         b_text, i, bytes, x[i], y[i]);
}

void td_test_check_ok(const char *file, int line, const char *call, td_status status)
{
    if (status)
        td_test_fail(file, line, "CHECK_OK(%s): %s: %s", call, td_status_name(status),
                     td_last_error());
}

void td_test_check_fails(const char *file, int line, const char *call, td_status status,
                         td_status expected, const char *part)
{
    if (status != expected)
        td_test_fail(file, line, "CHECK_FAILS(%s): %s instead of %s%s%s", call,
                     td_status_name(status), td_status_name(expected), status ? ": " : "",
                     status ? td_last_error() : "");
    if (!strstr(td_last_error(), part))
        td_test_fail(file, line, "CHECK_FAILS(%s): \"%s\" is not in the message: %s", call, part,
                     td_last_error());
}

void td_test_pause(const char *file, int line, const char *condition, int left)
{
    if (left <= 0)
        td_test_fail(file, line, "CHECK_SOON(%s) did not come about", condition);
    td__sleep_ns(1000000);
}

/* ---- Child processes ------------------------------------------------------------------------- */

static char *read_all(int fd)
{
    size_t used = 0, room = 4096;
    char *text = malloc(room);
    for (;;) {
        ssize_t got = read(fd, text + used, room - used - 1);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            break;
        used += (size_t)got;
        if (used + 1 == room)
            text = realloc(text, room *= 2);
    }
    text[used] = '\0';
    return text;
}

const char *td_test_program(void)
{
    static char program[PATH_MAX];
    ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    return length > 0 ? program : "/proc/self/exe";
}

static struct td_test_child run_child(void (*fn)(void *), void *arg, const char *const *argv)
{
    int pipe_fds[2];
    if (pipe2(pipe_fds, O_CLOEXEC))
        FAIL("pipe: %s", strerror(errno));
    fflush(stdout);
    pid_t pid = fork();
    if (pid < 0)
        FAIL("fork: %s", strerror(errno));
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(pipe_fds[1], STDOUT_FILENO);
        dup2(pipe_fds[1], STDERR_FILENO);
        close(pipe_fds[0]);
        close(pipe_fds[1]);
        if (argv) {
            execvp(argv[0], (char *const *)argv);
            dprintf(STDERR_FILENO, "%s: %s\n", argv[0], strerror(errno));
            _exit(127);
        }
        fn(arg);
        fflush(stdout);
        _exit(0);
    }
    close(pipe_fds[1]);
    struct td_test_child child = {.output = read_all(pipe_fds[0])};
    close(pipe_fds[0]);
    while (waitpid(pid, &child.status, 0) < 0 && errno == EINTR)
        ;
    return child;
}

struct td_test_child td_test_fork(void (*fn)(void *), void *arg)
{
    return run_child(fn, arg, NULL);
}

struct td_test_child td_test_exec(const char *const *argv)
{
    return run_child(NULL, NULL, argv);
}
