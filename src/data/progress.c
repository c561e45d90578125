/* Progress bars: when and where a line is drawn. A step only reads the clock unless a tenth of a
 * second has passed. */
#include "data/progress.h"
#include "base/clock.h"
#include "base/fail.h"
#include "base/option_rules.h"
#include "base/file_limit.h"
#include "base/host.h"
#include "base/number.h"

#include <tandem/data.h>

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

enum { LINE = 2048, BETWEEN_NS = 100 * 1000 * 1000, USUAL_WIDTH = 80 };

struct td_progress {
    struct td__progress_view view;
    int64_t begun_ns, drawn_ns;
    bool draws; /* on a terminal */
    bool lines; /* one at the end */
    char *label, *unit;
};

/* Rank 0 of the world, or by RANK if there is no world yet. */
static bool is_first_rank(void)
{
    int rank, size;
    if (td__identity(&rank, &size))
        return rank == 0;
    const char *text = getenv("RANK");
    return !text || !td__parse_int(text, 0, INT32_MAX, &rank) || rank == 0;
}

static bool is_terminal(void)
{
    const char *kind = getenv("TERM");
    return isatty(STDERR_FILENO) && !(kind && strcmp(kind, "dumb") == 0);
}

static int terminal_width(void)
{
    struct winsize size;
    if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0)
        return size.ws_col;
    int width;
    const char *columns = getenv("COLUMNS");
    return columns && td__parse_int(columns, 1, 10000, &width) ? width : USUAL_WIDTH;
}

/* One write(), so that output of other processes does not interleave. Errors are ignored. */
static void write_out(const char *text, size_t size)
{
    while (size > 0) {
        ssize_t written = td__file_write(STDERR_FILENO, text, size);
        if (written < 0 && errno != EINTR)
            return;
        if (written > 0) {
            text += written;
            size -= (size_t)written;
        }
    }
}

static void draw(td_progress *progress, int64_t now, const char *before, int width,
                 const char *behind)
{
    char text[LINE];
    progress->view.elapsed_s = (double)(now - progress->begun_ns) / 1e9;
    progress->drawn_ns = now;
    size_t used = (size_t)snprintf(text, sizeof text, "%s", before);
    used += td__progress_line(text + used, sizeof text - used - 16, &progress->view, width);
    used += (size_t)snprintf(text + used, sizeof text - used, "%s", behind);
    write_out(text, used);
}

/* The last column stays free: some terminals wrap there. */
static void redraw(td_progress *progress, int64_t now, const char *behind)
{
    int width = terminal_width() - 1;
    draw(progress, now, "\r", width > 0 ? width : 1, behind);
}

td_progress *td_progress_begin(const td_progress_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return NULL;
    td_progress_options none = {0};
    options = options ? options : &none;
    td_progress *progress = calloc(1, sizeof *progress);
    if (!progress)
        goto no_memory;
    bool first = is_first_rank();
    progress->draws = first && is_terminal();
    progress->lines = first && !progress->draws && options->lines;
    progress->label = options->label ? strdup(options->label) : NULL;
    progress->unit = strdup(options->unit ? options->unit : "batch");
    if (!progress->unit || (options->label && !progress->label))
        goto free_progress;
    progress->view = (struct td__progress_view){.label = progress->label,
                                                .unit = progress->unit,
                                                .total = options->total > 0 ? options->total : 0,
                                                .loss = NAN};
    progress->begun_ns = td__now_ns();
    if (progress->draws)
        redraw(progress, progress->begun_ns, "\033[K");
    return progress;

free_progress:
    free(progress->label);
    free(progress->unit);
    free(progress);
no_memory:
    td__fail_nomem("td_progress_begin");
    return NULL;
}

void td_progress_step(td_progress *progress, int64_t steps, double loss)
{
    if (!progress)
        return;
    progress->view.done += steps;
    progress->view.loss = loss;
    if (!progress->draws)
        return;
    int64_t now = td__now_ns();
    if (now - progress->drawn_ns >= BETWEEN_NS)
        redraw(progress, now, "\033[K");
}

void td_progress_end(td_progress *progress)
{
    if (!progress)
        return;
    progress->view.finished = true;
    if (progress->draws)
        redraw(progress, td__now_ns(), "\033[K\n");
    else if (progress->lines)
        draw(progress, td__now_ns(), "", USUAL_WIDTH, "\n");
    free(progress->label);
    free(progress->unit);
    free(progress);
}
