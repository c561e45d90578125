/* Progress bars: the text for each width, and what a terminal or a file gets to see. */
#include "runner.h"

#include "base/clock.h"
#include "data/progress.h"

#include <tandem/tandem.h>

#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

/* Characters, which are all one column wide here. */
static int columns_of(const char *line)
{
    int columns = 0;
    for (; *line; line++)
        columns += (*line & 0xc0) != 0x80;
    return columns;
}

static const char *line_of(struct td__progress_view view, int width)
{
    static char line[2048];
    view.unit = view.unit ? view.unit : "batch";
    size_t size = td__progress_line(line, sizeof line, &view, width);
    CHECK_EQ(size, strlen(line));
    if (columns_of(line) > width)
        FAIL("\"%s\" is wider than %d", line, width);
    return line;
}

static const struct td__progress_view half = {
    .label = "epoch 1", .total = 938, .done = 422, .elapsed_s = 2.791, .loss = 0.43214};

TEST(lines)
{
    CHECK_STR(line_of(half, 80),
              "epoch 1   44% ████████▌           422/938  151.2 batch/s  0:03 left  loss 0.4321");
    CHECK_STR(line_of(half, 120), "epoch 1   44% █████████████████▉                       422/938  "
                                  "151.2 batch/s  0:03 left  loss 0.4321");
    struct td__progress_view view = {.total = 4, .loss = NAN};
    CHECK_STR(line_of(view, 30), "  0%                       0/4");
    view.done = 4;
    view.elapsed_s = 3723;
    view.finished = true;
    CHECK_STR(line_of(view, 60), "100% ███████████████████████████ 4/4  930.8 s/batch  1:02:03");
    view.unit = "B";
    view.done = 40000;
    view.total = 0;
    CHECK_STR(line_of(view, 60), "40000 B  10.7 B/s  1:02:03");
    view.elapsed_s = 0.001;
    CHECK_STR(line_of(view, 60), "40000 B  40.0M B/s  0:00");
    view.loss = INFINITY;
    CHECK_STR(line_of(view, 60), "40000 B  40.0M B/s  0:00  loss inf");
    view = (struct td__progress_view){
        .total = 1000000000, .done = 1, .elapsed_s = 1e9, .loss = NAN};
    CHECK_CONTAINS(line_of(view, 80), "? left");
}

/* What does not fit goes, and the line is never too wide. */
TEST(narrow_lines)
{
    CHECK_STR(line_of(half, 66),
              "epoch 1   44% ██▏   422/938  151.2 batch/s  0:03 left  loss 0.4321");
    CHECK_STR(line_of(half, 65), "epoch 1   44%  422/938  151.2 batch/s  0:03 left  loss 0.4321");
    CHECK_STR(line_of(half, 47), "epoch 1   44%  422/938  0:03 left  loss 0.4321");
    CHECK_STR(line_of(half, 24), "epoch 1  loss 0.4321");
    CHECK_STR(line_of(half, 12), "epoch 1");
    CHECK_STR(line_of(half, 3), "epo");
    CHECK_STR(line_of(half, 0), "");
    for (int width = 0; width < 200; width++)
        for (int64_t done = 0; done <= 950; done += 19) {
            struct td__progress_view view = half;
            view.done = done;
            line_of(view, width);
            view.total = 0;
            line_of(view, width);
        }
    char small[10];
    struct td__progress_view view = half;
    view.unit = "batch";
    CHECK(td__progress_line(small, sizeof small, &view, 80) < sizeof small);
}

TEST(labels)
{
    struct td__progress_view view = {.label = "grün\033[2J\n\x80 x", .done = 1, .loss = NAN};
    CHECK_STR(line_of(view, 60), "grün?[2J?? x  1 batch  0:00");
    view.label = "訓練";
    char line[256];
    view.unit = "batch";
    td__progress_line(line, sizeof line, &view, 3); /* two columns each */
    CHECK_STR(line, "訓");
    char longer[1000];
    memset(longer, 'x', sizeof longer - 1);
    longer[sizeof longer - 1] = '\0';
    view.label = longer;
    view.unit = longer;
    CHECK(columns_of(line_of(view, 400)) <= 400);
}

/* ---- On a terminal ---------------------------------------------------------------------------- */

static void run_bars(void *arg)
{
    const td_progress_options *options = arg;
    td_progress *bar = td_progress_begin(options);
    for (int i = 0; i < 2000; i++)
        td_progress_step(bar, 1, 0.5);
    td_progress_end(bar);
}

/* Runs bars with a terminal as standard error, and returns what it was shown. */
static char *run_on_terminal(td_progress_options *options)
{
    static char shown[1 << 16];
    int terminal = posix_openpt(O_RDWR | O_NOCTTY);
    if (terminal < 0 || grantpt(terminal) || unlockpt(terminal))
        td_test_skip("there are no terminals here");
    int slave = open(ptsname(terminal), O_RDWR | O_NOCTTY);
    CHECK(slave >= 0);
    struct winsize size = {.ws_row = 24, .ws_col = 60};
    CHECK_EQ(ioctl(slave, TIOCSWINSZ, &size), 0);
    fflush(NULL);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        dup2(slave, STDERR_FILENO);
        run_bars(options);
        _exit(0);
    }
    close(slave);
    size_t used = 0;
    for (ssize_t got; used < sizeof shown - 1; used += (size_t)got) {
        got = read(terminal, shown + used,
                   sizeof shown - 1 - used); /* an error once it is closed */
        if (got <= 0)
            break;
    }
    shown[used] = '\0';
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    close(terminal);
    return shown;
}

TEST(on_a_terminal)
{
    td_progress_options options = {.total = 2000, .label = "train"};
    CHECK_EQ(setenv("TERM", "xterm", 1), 0);
    unsetenv("RANK");
    int64_t begun = td__now_ns();
    const char *shown = run_on_terminal(&options);
    int64_t tenths = (td__now_ns() - begun) / 100000000;
    CHECK(strncmp(shown, "\rtrain    0%", 12) == 0);
    CHECK_CONTAINS(shown, "\rtrain  100% ");
    CHECK_CONTAINS(shown, "2000/2000");
    CHECK_CONTAINS(shown, "\033[K\r\n");
    int64_t lines = 0;
    for (const char *at = shown; (at = strstr(at, "\rtrain")); at++) {
        char line[500];
        size_t length = strcspn(at + 1, "\033");
        snprintf(line, sizeof line, "%.*s", (int)length, at + 1);
        CHECK(columns_of(line) < 60);
        lines++;
    }
    CHECK(lines <= tenths + 2); /* at most ten a second, and the first and the last one */

    CHECK_EQ(setenv("RANK", "1", 1), 0);
    CHECK_STR(run_on_terminal(&options), "");
    CHECK_EQ(setenv("RANK", "0", 1), 0);
    CHECK_CONTAINS(run_on_terminal(&options), "2000/2000");
    CHECK_EQ(setenv("TERM", "dumb", 1), 0);
    CHECK_STR(run_on_terminal(&options), "");
}

TEST(not_on_a_terminal)
{
    td_progress_options options = {.total = 2000, .label = "train", .unit = "step"};
    unsetenv("RANK");
    struct td_test_child child = td_test_fork(run_bars, &options);
    CHECK_STR(child.output, "");
    free(child.output);
    options.lines = true;
    child = td_test_fork(run_bars, &options);
    CHECK(strncmp(child.output, "train  100% ", 12) == 0);
    CHECK_CONTAINS(child.output, "2000/2000");
    CHECK_CONTAINS(child.output, "loss 0.5\n");
    free(child.output);
    CHECK_EQ(setenv("RANK", "2", 1), 0);
    child = td_test_fork(run_bars, &options);
    CHECK_STR(child.output, "");
    free(child.output);
    td_progress_step(NULL, 1, 0);
    td_progress_end(NULL);
    run_bars(NULL);
}

RANKS(rank_0_only, .ranks = 2)
{
    td_progress_options options = {.total = 2000, .lines = true};
    CHECK_OK(td_init_process_group(NULL));
    unsetenv("RANK"); /* the world knows */
    int saved = dup(STDERR_FILENO), pipes[2];
    char output[300];
    CHECK_EQ(pipe(pipes), 0);
    dup2(pipes[1], STDERR_FILENO);
    run_bars(&options);
    dup2(saved, STDERR_FILENO);
    close(pipes[1]);
    ssize_t got = read(pipes[0], output, sizeof output);
    CHECK(td_test_rank() == 0 ? got > 10 : got == 0);
    CHECK_OK(td_destroy_process_group());
}
