/* The commands of tdrun that show jobs: `status`, what those of this machine do at this moment, and
 * `postmortem`, of pages that were kept as files (TANDEM_FLIGHT=/path/prefix). */
#include "base/clock.h"
#include "base/fail.h"
#include "base/number.h"
#include "launch/drain.h"
#include "launch/flags.h"
#include "launch/jobs.h"
#include "os/process.h"

#include <limits.h>
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

#define FIELD(field) .offset = offsetof(struct command_options, field)

static const struct td__flag status_flags[] = {
    {"json", 0, NULL, "as JSON, an object a job", td__flag_set_bool, FIELD(json)},
    {"watch", 0, "[SECONDS]", "again and again (every 2 s)", set_watch, FIELD(watch)},
    {"all", 0, NULL, "also jobs of other users, which only root may see", td__flag_set_bool,
     FIELD(all)},
    {"help", 'h', NULL, "print this", td__flag_set_bool, FIELD(help)},
};

static const struct td__flag postmortem_flags[] = {
    {"json", 0, NULL, "as one JSON object, with all operations that the pages have",
     td__flag_set_bool, FIELD(json)},
    {"help", 'h', NULL, "print this", td__flag_set_bool, FIELD(help)},
};

#define TABLE(flags)                                                                               \
    {                                                                                              \
        flags, sizeof(flags) / sizeof *(flags), NULL                                               \
    }
static const struct td__flag_table status_table = TABLE(status_flags);
static const struct td__flag_table postmortem_table = TABLE(postmortem_flags);

static int fail(const char *command, int code)
{
    fprintf(stderr, "tdrun %s: %s\n", command, td__error_text());
    return code;
}

/* ---- tdrun status: the table ----------------------------------------------------------------- */

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
    *since_ns = rank->page->phase_ns;
    if (rank->state == TD__STORY_CALLING) {
        td__postmortem_call(rank->page, rank->current, call);
        snprintf(text, 300, "%s%s", rank->current->state == TD__FLIGHT_QUEUED ? "queued: " : "",
                 call);
        *since_ns = rank->current->started_ns ? rank->current->started_ns
                                              : rank->current->queued_ns;
    } else if (rank->ended) {
        snprintf(text, 300, "%s", rank->page->ending);
        *since_ns = rank->page->ended_ns;
    } else if (rank->last && rank->state == TD__STORY_IDLE) {
        td__postmortem_call(rank->page, rank->last, call);
        snprintf(text, 300, "%s: %s", rank->last->state == TD__FLIGHT_FAILED ? "failed" : "last",
                 call);
        *since_ns = rank->last->ended_ns;
    }
}

static const char *state_name(const struct td__postmortem_rank *rank)
{
    char process = rank->ended ? 'E' : td__process_state(rank->page->pid);
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
    td__postmortem_put(out, "%6d %8d  %-11s %12s %7.*f  %s\n", rank->page->rank, rank->page->pid,
                       state_name(rank), age, rank->rate < 10 ? 1 : 0, rank->rate, text);
}

static void put_spare(struct td__buffer *out, const struct td__postmortem *postmortem,
                      const struct td__flight_page *page)
{
    char age[32], state = page->ended_ns ? 'E' : td__process_state(page->started_pid);
    int64_t since = page->ended_ns ? page->ended_ns : page->started_ns;
    td__postmortem_duration((double)(postmortem->moment_ns - since) / 1e9, age);
    td__postmortem_put(out, "%6s %8d  %-11s %12s %7s  %s\n", "-", page->started_pid, "spare", age,
                       "-",
                       page->ended_ns               ? page->ending
                       : state == 0 || state == 'Z' ? "ending"
                       : page->waits                ? "waits for a rank"
                                                    : "starts");
}

static void put_job(struct td__buffer *out, const struct td__postmortem *postmortem, int columns)
{
    const struct td__flight_book_info *info = &postmortem->books[0].info;
    char age[32], heading[700];
    td__postmortem_duration((double)(postmortem->moment_ns - info->started_ns) / 1e9, age);
    snprintf(heading, sizeof heading, "job %d on %s, %d of %d ranks, for %s%s%s", info->pid,
             info->host, postmortem->count, info->world_size, age, info->command[0] ? ": " : "",
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
    for (int i = 0; i < postmortem->spare_count; i++)
        put_spare(out, postmortem, postmortem->spares[i]);
}

/* ---- tdrun status: looking ------------------------------------------------------------------- */

static void put_hollow_job(struct td__buffer *out, const struct td__flight_book_info *info)
{
    td__postmortem_put(out, "job %d on %s names %d ranks, and has next to nothing about them%s%s\n",
                       info->pid, info->host, info->slots, info->command[0] ? ": " : "",
                       info->command);
}

static td_status put_book(struct td__buffer *out, const struct td__job *job,
                          struct td__postmortem_book *book, bool json, int columns, bool first)
{
    struct td__postmortem postmortem;
    TD_TRY(td__postmortem_take(book, 1, NULL, true, -1, &postmortem));
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
    int count, columns = options->json ? 0 : width();
    TD_TRY(td__jobs_find(options->all, &jobs, &count));
    td_status status = TD_OK;
    *shown = 0;
    td__postmortem_put(out, "%s", options->json ? "[" : "");
    for (int i = 0; i < count && !status; i++) {
        struct td__postmortem_book *book = td__job_copy(&jobs[i]);
        if (book && (!options->pid || td__job_has_process(book, options->pid)))
            status = put_book(out, &jobs[i], book, options->json, columns, !(*shown)++);
        else if (book)
            td__postmortem_books_free(book, 1);
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
        return fail("status", EXIT_TROUBLE);
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

/* ---- tdrun status: the command line ---------------------------------------------------------- */

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
        TD_TRY(td__flags_parse(&status_table, argc, argv, options, &rest));
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

static int run_status(int argc, char **argv)
{
    struct command_options options = {0};
    if (parse(argc, argv, &options))
        return fail("status", EXIT_USAGE);
    if (options.help) {
        puts(
            "usage: tdrun status [--json] [--watch [SECONDS]] [--all] [PID]\n\n"
            "Shows what the workers of jobs on this machine do: of all jobs of this user, or of the\n"
            "one with the launcher or worker PID.\n");
        td__flags_print(&status_table, stdout);
        return 0;
    }
    int code = show(&options, false);
    while (options.watch > 0 && !code) {
        td__sleep_ns((int64_t)(options.watch * 1e9));
        code = show(&options, true);
    }
    return code;
}

/* ---- tdrun postmortem ------------------------------------------------------------------------ */

static int tell(char **paths, int count, bool json)
{
    struct td__postmortem_book *books = calloc((size_t)count, sizeof *books);
    struct td__postmortem postmortem;
    struct td__buffer text = {0};
    td_status status = books ? TD_OK : td__fail_nomem("postmortem");
    for (int i = 0; !status && i < count; i++)
        status = td__job_read_file(paths[i], &books[i]);
    if (status)
        td__postmortem_books_free(books, books ? count : 0);
    if (status || td__postmortem_take(books, count, NULL, false, -1, &postmortem))
        return fail("postmortem", EXIT_TROUBLE);
    if (json)
        td__postmortem_print_json(&postmortem, true, &text);
    else
        td__postmortem_print(&postmortem, "", &text);
    fwrite(text.data, 1, text.size, stdout);
    td__buffer_free(&text);
    td__postmortem_free(&postmortem);
    return fflush(stdout) ? EXIT_TROUBLE : 0;
}

static int run_postmortem(int argc, char **argv)
{
    struct command_options options = {0};
    int rest;
    if (td__flags_parse(&postmortem_table, argc, argv, &options, &rest))
        return fail("postmortem", EXIT_USAGE);
    if (options.help) {
        puts("usage: tdrun postmortem [--json] FILE...\n\n"
             "Tells where the ranks of a job were last, from the files that they left: with\n"
             "TANDEM_FLIGHT=/path/prefix in its environment, rank 3 keeps /path/prefix.3.\n");
        td__flags_print(&postmortem_table, stdout);
        return 0;
    }
    if (rest == argc) {
        td_fail(TD_ERR_INVALID, "there is no file to read: tdrun postmortem [--json] FILE...");
        return fail("postmortem", EXIT_USAGE);
    }
    return tell(argv + rest, argc - rest, options.json);
}

td__command_fn td__command_find(const char *name)
{
    return !strcmp(name, "status")       ? run_status
           : !strcmp(name, "drain")      ? td__drain_run
           : !strcmp(name, "postmortem") ? run_postmortem
                                         : NULL;
}
