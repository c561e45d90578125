/* The log: each entry is one line and one write(), so that lines of several processes do not mix. TANDEM_LOG,
 * RANK and TZ are read on first use: the program may change its environment later, while a thread of the
 * library writes to the log. */
#include "base/file_limit.h"
#include "base/host.h"

#include <tandem/base.h>

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static const char *const level_names[] = {"error", "warn", "info", "debug"};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static atomic_int shown_level;
static atomic_int log_rank;
static char host[64];

/* Held while the sink runs, so that td_log_set_sink() returns only when the former sink is idle. Innermost: no
 * other lock is taken while it is held. */
static pthread_mutex_t sink_lock = PTHREAD_MUTEX_INITIALIZER;
static td_log_fn sink;
static void *sink_arg;
static _Thread_local bool inside_sink;

static void set_up(void)
{
    if (gethostname(host, sizeof host - 1))
        strcpy(host, "localhost");
    host[strcspn(host, ".")] = '\0';
    tzset(); /* otherwise localtime_r() reads TZ at the first line */

    const char *rank = getenv("RANK");
    atomic_store(&log_rank, rank && *rank ? atoi(rank) : -1);

    atomic_store(&shown_level, TD_LOG_WARN);
    const char *wanted = getenv("TANDEM_LOG");
    if (!wanted || !*wanted)
        return;
    for (int level = TD_LOG_ERROR; level <= TD_LOG_DEBUG; level++) {
        if (!strcasecmp(wanted, level_names[level])) {
            atomic_store(&shown_level, level);
            return;
        }
    }
    fprintf(stderr, "tandem: TANDEM_LOG is \"%s\"; it must be error, warn, info or debug\n",
            wanted);
}

const char *td__host_name(void)
{
    pthread_once(&once, set_up);
    return host;
}

void td__log_set_rank(int rank)
{
    pthread_once(&once, set_up);
    atomic_store(&log_rank, rank);
}

void td_log_set_level(td_log_level level)
{
    pthread_once(&once, set_up);
    atomic_store(&shown_level, level);
}

void td_log_set_sink(td_log_fn fn, void *arg)
{
    pthread_mutex_lock(&sink_lock);
    sink = fn;
    sink_arg = arg;
    pthread_mutex_unlock(&sink_lock);
}

static void write_line(td_log_level level, char *line, size_t length)
{
    pthread_mutex_lock(&sink_lock);
    if (sink) {
        inside_sink = true;
        sink(level, line, sink_arg);
        inside_sink = false;
    }
    bool done = sink != NULL;
    pthread_mutex_unlock(&sink_lock);
    if (done)
        return;

    line[length++] = '\n';
    ssize_t ignored = td__file_write(STDERR_FILENO, line, length);
    (void)ignored; /* a failure of standard error cannot be reported */
}

void td_log(td_log_level level, const char *format, ...)
{
    pthread_once(&once, set_up);
    if ((int)level > atomic_load_explicit(&shown_level, memory_order_relaxed) || inside_sink)
        return;

    struct timespec now;
    struct tm local;
    clock_gettime(CLOCK_REALTIME, &now);
    localtime_r(&now.tv_sec, &local);

    char line[2048 + 2];
    const size_t capacity = sizeof line - 2; /* the line end, and the NUL */
    int rank = atomic_load(&log_rank);
    char rank_text[32] = "";
    if (rank >= 0)
        snprintf(rank_text, sizeof rank_text, " rank %d", rank);
    int head = snprintf(line, capacity, "tandem %02d:%02d:%02d.%03ld %s%s %s: ", local.tm_hour,
                        local.tm_min, local.tm_sec, now.tv_nsec / 1000000, host, rank_text,
                        level_names[level]);
    va_list args;
    va_start(args, format);
    int body = vsnprintf(line + head, capacity - (size_t)head, format, args);
    va_end(args);
    size_t length = (size_t)head + (size_t)(body < 0 ? 0 : body);
    if (length >= capacity)
        length = capacity - 1;
    write_line(level, line, length);
}
