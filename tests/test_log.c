/* The log: levels, lines that stay whole, and sinks of the program. */
#include "runner.h"

#include "base/clock.h"
#include "base/host.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define MS ((int64_t)1000000)
#define COUNT_OF(array) (sizeof(array) / sizeof *(array))

/* Has its own first look at the environment: the process has not used the log before. */
static void log_each_level(void *arg)
{
    const char *const *variables = arg; /* TANDEM_LOG, RANK; NULL: not set */
    if (variables[0])
        setenv("TANDEM_LOG", variables[0], 1);
    if (variables[1])
        setenv("RANK", variables[1], 1);
    td_log(TD_LOG_ERROR, "line %s", "e");
    td_log(TD_LOG_WARN, "line %s", "w");
    td_log(TD_LOG_INFO, "line %s", "i");
    td_log(TD_LOG_DEBUG, "line %s", "d");
}

static char *log_with(const char *level, const char *rank)
{
    const char *variables[] = {level, rank};
    struct td_test_child child = td_test_fork(log_each_level, variables);
    CHECK_EQ(child.status, 0);
    return child.output;
}

TEST(log_levels)
{
    static const struct {
        const char *value, *shown;
    } levels[] = {{NULL, "ew"},    {"", "ew"},        {"error", "e"},    {"warn", "ew"},
                  {"info", "ewi"}, {"debug", "ewid"}, {"DEBUG", "ewid"}, {"loud", "ew"}};
    for (size_t i = 0; i < COUNT_OF(levels); i++) {
        char *output = log_with(levels[i].value, NULL);
        for (const char *level = "ewid"; *level; level++) {
            char line[16];
            snprintf(line, sizeof line, ": line %c\n", *level);
            CHECK_EQ(strstr(output, line) != NULL, strchr(levels[i].shown, *level) != NULL);
        }
        if (i + 1 == COUNT_OF(levels)) /* a wrong value is reported */
            CHECK_CONTAINS(output,
                           "TANDEM_LOG is \"loud\"; it must be error, warn, info or debug\n");
        else
            CHECK(!strstr(output, "TANDEM_LOG"));
        free(output);
    }
}

/* "tandem 12:34:56.789 host rank 3 warn: text" */
TEST(log_lines_have_time_host_and_rank)
{
    char *output = log_with("error", "3"), expected[256];
    int hour, minute, second, ms, end = 0;
    CHECK_EQ(sscanf(output, "tandem %2d:%2d:%2d.%3d %n", &hour, &minute, &second, &ms, &end), 4);
    CHECK(hour < 24 && minute < 60 && second < 61);
    snprintf(expected, sizeof expected, "%s rank 3 error: line e\n", td__host_name());
    CHECK_STR(output + end, expected);
    free(output);

    output = log_with("error", NULL);
    snprintf(expected, sizeof expected, " %s error: line e\n", td__host_name());
    CHECK_CONTAINS(output, expected);
    free(output);

    char host[256];
    CHECK_EQ(gethostname(host, sizeof host), 0);
    host[strcspn(host, ".")] = '\0';
    CHECK_STR(td__host_name(), host);
}

struct seen {
    int count;
    td_log_level level;
    char line[4096];
};

static void remember(td_log_level level, const char *line, void *arg)
{
    struct seen *seen = arg;
    seen->count++;
    seen->level = level;
    snprintf(seen->line, sizeof seen->line, "%s", line);
    td_log(TD_LOG_ERROR, "from inside the sink: dropped, not repeated for ever");
}

static void log_to_sink_and_back(void *arg)
{
    (void)arg;
    struct seen seen = {0};
    td_log_set_sink(remember, &seen);
    td_log(TD_LOG_WARN, "%s %d", "to the sink", 1);
    CHECK_EQ(seen.count, 1);
    CHECK_EQ(seen.level, TD_LOG_WARN);
    CHECK_CONTAINS(seen.line, "warn: to the sink 1");
    CHECK(!strchr(seen.line, '\n'));
    td_log(TD_LOG_INFO, "not shown");
    CHECK_EQ(seen.count, 1);
    td_log_set_level(TD_LOG_DEBUG);
    td_log(TD_LOG_DEBUG, "shown");
    CHECK_EQ(seen.count, 2);
    CHECK_EQ(seen.level, TD_LOG_DEBUG);
    td_log_set_level(TD_LOG_ERROR);
    td_log(TD_LOG_WARN, "not shown");
    CHECK_EQ(seen.count, 2);
    td__log_set_rank(12);
    td_log(TD_LOG_ERROR, "x");
    CHECK_CONTAINS(seen.line, " rank 12 error: x");
    td__log_set_rank(-1);
    td_log(TD_LOG_ERROR, "x");
    CHECK(!strstr(seen.line, "rank"));

    char text[4000];
    memset(text, 'y', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    td_log(TD_LOG_ERROR, "%s", text);
    CHECK(strlen(seen.line) > 1500 && strlen(seen.line) < sizeof text);
    td_log_set_sink(NULL, NULL);
    td_log(TD_LOG_ERROR, "back on standard error");
    td_log(TD_LOG_ERROR, "%s", text);
    CHECK_EQ(seen.count, 5);
}

TEST(log_sink)
{
    struct td_test_child child = td_test_fork(log_to_sink_and_back, NULL);
    CHECK_EQ(child.status, 0);
    CHECK_CONTAINS(child.output, "error: back on standard error\n");
    CHECK(!strstr(child.output, "to the sink"));
    CHECK_EQ(child.output[strlen(child.output) - 1], '\n'); /* a cut line ends like any other */
    free(child.output);
}

struct slow_sink {
    atomic_int inside, left;
};

static void sink_slowly(td_log_level level, const char *line, void *arg)
{
    (void)level;
    (void)line;
    struct slow_sink *slow = arg;
    atomic_store(&slow->inside, 1);
    td__sleep_ns(50 * MS);
    atomic_store(&slow->left, 1);
}

static void *log_once(void *arg)
{
    (void)arg;
    td_log(TD_LOG_ERROR, "x");
    return NULL;
}

TEST(log_sink_is_idle_when_replaced)
{
    struct slow_sink slow = {0};
    pthread_t thread;
    td_log_set_sink(sink_slowly, &slow);
    CHECK_EQ(pthread_create(&thread, NULL, log_once, NULL), 0);
    CHECK_SOON(atomic_load(&slow.inside));
    td_log_set_sink(NULL, NULL);
    CHECK(atomic_load(&slow.left));
    pthread_join(thread, NULL);
}

static void *log_many(void *arg)
{
    for (int i = 0; i < 200; i++)
        td_log(TD_LOG_ERROR, "<%d %d of a rather long line that must stay in one piece>",
               *(int *)arg, i);
    return NULL;
}

static void log_from_threads(void *arg)
{
    (void)arg;
    pthread_t threads[4];
    int numbers[4] = {0, 1, 2, 3};
    for (int i = 0; i < 4; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, log_many, &numbers[i]), 0);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
}

TEST(log_lines_do_not_mix)
{
    struct td_test_child child = td_test_fork(log_from_threads, NULL);
    CHECK_EQ(child.status, 0);
    int next[4] = {0}, lines = 0;
    for (char *rest = child.output, *line; (line = strtok_r(rest, "\n", &rest)); lines++) {
        int thread, number, end = 0;
        char *body = strchr(line, '<');
        CHECK(!strncmp(line, "tandem ", 7) && body);
        sscanf(body, "<%d %d of a rather long line that must stay in one piece>%n", &thread,
               &number, &end);
        CHECK(end > 0 && body[end] == '\0');
        CHECK_EQ(number, next[thread]++);
    }
    CHECK_EQ(lines, 800);
    free(child.output);
}
