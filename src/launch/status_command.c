/* tdrun status: what the jobs of this machine do, at this moment. */
#include "base/clock.h"
#include "base/fail.h"
#include "base/number.h"
#include "launch/flags.h"
#include "launch/jobs.h"
#include "os/process.h"

#include <limits.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

enum { EXIT_TROUBLE = 1, EXIT_USAGE = 2, COLUMNS = 100 };

struct command_options {
    bool json, all, help;
    double watch; /* 0: once */
    int pid;      /* 0: all jobs */
};

static td_status set_watch(const struct td__flag *flag, const char *value, void *target)
{
    TD_TRY(td__flag_set_seconds(flag, value, target));
    double *seconds = &((struct command_options *)target)->watch;
    *seconds = *seconds < 0.1 ? 0.1 : *seconds;
    return TD_OK;
}

static const struct td__flag flags[] = {
    {"json", 0, NULL, "as JSON, an object a job", td__flag_set_bool,
     offsetof(struct command_options, json), 0, 0},
    {"watch", 0, "[SECONDS]", "again and again (every 2 s)", set_watch,
     offsetof(struct command_options, watch), 0, 0},
    {"all", 0, NULL, "also jobs of other users, which only root may see", td__flag_set_bool,
     offsetof(struct command_options, all), 0, 0},
    {"help", 'h', NULL, "print this", td__flag_set_bool, offsetof(struct command_options, help), 0,
     0},
};
static const struct td__flag_table table = {flags, sizeof flags / sizeof *flags, "TDRUN_STATUS_"};

static int fail(int code)
{
    fprintf(stderr, "tdrun status: %s\n", td_last_error());
    return code;
}

/* ---- The table ------------------------------------------------------------------------------- */

/* The width of the terminal; 0 where the output is none, and nothing has to be cut. */
static int width(void)
{
    struct winsize size;
    if (!isatty(STDOUT_FILENO))
        return 0;
    return !ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) && size.ws_col > 40 ? size.ws_col : COLUMNS;
}

/* Cuts a text to so many characters. */
static void cut(char *text, int limit)
{
    int seen = 0;
    for (char *at = text; *at; at++) {
        if (((unsigned char)*at & 0xc0) == 0x80)
            continue;
        if (++seen > limit) {
            *at = 0;
            return;
        }
    }
}

static void describe(const struct td__postmortem_rank *rank, char text[300], int64_t *since_ns)
{
    char call[256];
    text[0] = 0;
    *since_ns = rank->phase_ns;
    if (rank->state == TD__STORY_CALLING) {
        td__postmortem_call(&rank->current, rank->current_group, call);
        snprintf(text, 300, "%s%s", rank->current.state == TD__FLIGHT_QUEUED ? "queued: " : "",
                 call);
        *since_ns = rank->current.started_ns ? rank->current.started_ns : rank->current.queued_ns;
    } else if (rank->ended) {
        snprintf(text, 300, "%s", rank->ending);
        *since_ns = rank->ended_ns;
    } else if (rank->has_last && rank->state == TD__STORY_IDLE) {
        td__postmortem_call(&rank->last, rank->last_group, call);
        snprintf(text, 300, "%s: %s", rank->last.state == TD__FLIGHT_FAILED ? "failed" : "last",
                 call);
        *since_ns = rank->last.ended_ns;
    }
}

static const char *state_name(const struct td__postmortem_rank *rank)
{
    char process = rank->ended ? 'E' : td__process_state(rank->pid);
    return process == 0     ? "gone"
           : process == 'T' ? "stopped"
           : process == 'Z' ? "ending"
                            : td__postmortem_state_name(rank->state);
}

static void put_rank(struct td__buffer *out, const struct td__postmortem *postmortem,
                     const struct td__postmortem_rank *rank, int columns)
{
    char text[300], age[32] = "";
    int64_t since;
    describe(rank, text, &since);
    if (since)
        td__postmortem_duration((double)(postmortem->moment_ns - since) / 1e9, age);
    if (columns)
        cut(text, columns - 48 > 10 ? columns - 48 : 10);
    td__postmortem_put(out, "%6d %8d  %-11s %12s %7.*f  %s\n", rank->rank, rank->pid,
                       state_name(rank), age, rank->rate < 10 ? 1 : 0, rank->rate, text);
}

static void put_job(struct td__buffer *out, const struct td__postmortem *postmortem, int columns)
{
    const struct td__flight_book_info *info = &postmortem->books[0].info;
    char age[32], heading[700];
    td__postmortem_duration((double)(postmortem->moment_ns - info->started_ns) / 1e9, age);
    snprintf(heading, sizeof heading, "job %d on %s, %d of %d ranks, for %s%s%s", info->pid,
             info->host, info->slots, info->world_size, age, info->command[0] ? ": " : "",
             info->command);
    if (columns)
        cut(heading, columns);
    td__postmortem_put(out, "%s\n", heading);
    if (info->nnodes > 1)
        td__postmortem_put(out, "node %d of %d\n", info->node_rank, info->nnodes);
    if (info->attempt)
        td__postmortem_put(out, "restart %d of %d\n", info->attempt, info->max_restarts);
    td__postmortem_put(out, "%6s %8s  %-11s %12s %7s  %s\n", "RANK", "PID", "STATE", "FOR", "OPS/S",
                       "OPERATION");
    for (int i = 0; i < postmortem->count; i++)
        put_rank(out, postmortem, &postmortem->ranks[i], columns);
}

/* ---- Looking --------------------------------------------------------------------------------- */

static bool is_wanted(const struct command_options *options, const struct td__postmortem_book *book)
{
    return !options->pid || td__job_has_process(book, options->pid);
}

static void put_hollow_job(struct td__buffer *out, const struct td__flight_book_info *info)
{
    td__postmortem_put(out, "job %d on %s names %d ranks, and has next to nothing about them%s%s\n",
                       info->pid, info->host, info->slots, info->command[0] ? ": " : "",
                       info->command);
}

/* A postmortem takes over an array of books; each of these gets its own. */
static td_status put_book(struct td__buffer *out, const struct td__job *job,
                          struct td__postmortem_book *book, bool json, int columns, bool first)
{
    struct td__postmortem postmortem;
    struct td__flight_now now;
    struct td__postmortem_book *own = malloc(sizeof *own);
    if (!own) {
        free(book->bytes);
        return td__fail_nomem("status");
    }
    *own = *book;
    td__flight_now(&now);
    TD_TRY(td__postmortem_take(own, 1, &now, true, -1, &postmortem));
    if (json) {
        td__postmortem_put(out, "%s", first ? "" : ",\n");
        td__postmortem_print_json(&postmortem, false, out);
        out->size--; /* its line end */
    } else {
        td__postmortem_put(out, "%s", first ? "" : "\n");
        if (job->hollow)
            put_hollow_job(out, &job->info);
        else
            put_job(out, &postmortem, columns);
    }
    td__postmortem_free(&postmortem);
    return TD_OK;
}

static td_status look(const struct command_options *options, struct td__buffer *out, int *shown)
{
    struct td__job *jobs;
    struct td__postmortem_book book; /* one at a time, however many there are */
    int count, columns = options->json ? 0 : width();
    TD_TRY(td__jobs_find(options->all, &jobs, &count));
    td_status status = TD_OK;
    *shown = 0;
    td__postmortem_put(out, "%s", options->json ? "[" : "");
    for (int i = 0; i < count && !status; i++) {
        if (!td__job_copy(&jobs[i], &book))
            continue;
        if (is_wanted(options, &book))
            status = put_book(out, &jobs[i], &book, options->json, columns, !(*shown)++);
        else
            free(book.bytes);
    }
    td__postmortem_put(out, "%s", options->json ? "]\n" : "");
    free(jobs);
    return status;
}

static int show(const struct command_options *options, bool again)
{
    struct td__buffer text = {0};
    int shown;
    if (look(options, &text, &shown)) {
        td__buffer_free(&text);
        return fail(EXIT_TROUBLE);
    }
    if (again && !options->json)
        fputs(isatty(STDOUT_FILENO) ? "\033[H\033[J" : "\n", stdout);
    if (shown || options->json)
        fwrite(text.data, 1, text.size, stdout);
    td__buffer_free(&text);
    if (!shown && options->pid)
        fprintf(stderr,
                "tdrun status: process %d is neither the launcher of a job nor a worker of "
                "one that runs here\n",
                options->pid);
    else if (!shown)
        fprintf(stderr, "tdrun status: no job of %s runs on this machine%s\n",
                options->all && !geteuid() ? "anybody" : "this user",
                options->all && geteuid() ? "; those of others only root may see" : "");
    return fflush(stdout) || !shown ? EXIT_TROUBLE : 0;
}

/* ---- The command line ------------------------------------------------------------------------ */

/* "--watch" alone, or before something that is no number, is every two seconds. */
static void complete_watch(int argc, char **argv)
{
    static char usual[] = "--watch=2";
    double seconds;
    for (int i = 1; i < argc; i++)
        if (!strcmp(argv[i], "--watch") &&
            (i + 1 == argc || !td__parse_seconds(argv[i + 1], &seconds)))
            argv[i] = usual;
}

static td_status parse(int argc, char **argv, struct command_options *options)
{
    complete_watch(argc, argv);
    for (int rest; argc > 0; argc -= rest, argv += rest) {
        TD_TRY(td__flags_parse(&table, argc, argv, options, &rest));
        if (rest < argc && (options->pid || !td__parse_int(argv[rest], 1, INT_MAX, &options->pid)))
            return td_fail(TD_ERR_INVALID,
                           "\"%s\" is %s; to start a program of the name status: tdrun ./status",
                           argv[rest],
                           options->pid ? "one too many" : "not the number of a process");
        if (rest >= argc)
            break;
    }
    return TD_OK;
}

int td__status_command(int argc, char **argv)
{
    struct command_options options = {0};
    if (parse(argc, argv, &options))
        return fail(EXIT_USAGE);
    if (options.help) {
        puts(
            "usage: tdrun status [--json] [--watch [SECONDS]] [--all] [PID]\n\n"
            "Shows what the workers of jobs on this machine do: of all jobs of this user, or of the\n"
            "one with the launcher or worker PID.\n");
        td__flags_print(&table, stdout);
        return 0;
    }
    int code = show(&options, false);
    while (options.watch > 0 && !code) {
        td__sleep_ns((int64_t)(options.watch * 1e9));
        code = show(&options, true);
    }
    return code;
}
