/* tdrun postmortem: the postmortem of pages that were kept as files (TANDEM_FLIGHT=/path/prefix). */
#include "base/fail.h"
#include "launch/flags.h"
#include "launch/jobs.h"

#include <stdlib.h>
#include <string.h>

enum { EXIT_TROUBLE = 1, EXIT_USAGE = 2 };

struct command_options {
    bool json, help;
};

static const struct td__flag flags[] = {
    {"json", 0, NULL, "as one JSON object, with all operations that the pages have",
     td__flag_set_bool, offsetof(struct command_options, json), 0, 0},
    {"help", 'h', NULL, "print this", td__flag_set_bool, offsetof(struct command_options, help), 0,
     0},
};
static const struct td__flag_table table = {flags, sizeof flags / sizeof *flags, "TDRUN_STORY_"};

td__command_fn td__command_find(const char *name)
{
    return !strcmp(name, "status")       ? td__status_command
           : !strcmp(name, "postmortem") ? td__postmortem_command
                                         : NULL;
}

static int fail(int code)
{
    fprintf(stderr, "tdrun postmortem: %s\n", td_last_error());
    return code;
}

static int tell(char **paths, int count, bool json)
{
    struct td__postmortem_book *books = calloc((size_t)count, sizeof *books);
    struct td__postmortem postmortem;
    struct td__flight_now now;
    struct td__buffer text = {0};
    if (!books) {
        td__fail_nomem("postmortem");
        return fail(EXIT_TROUBLE);
    }
    for (int i = 0; i < count; i++)
        if (td__job_read_file(paths[i], &books[i])) {
            for (int k = 0; k < i; k++)
                free(books[k].bytes);
            free(books);
            return fail(EXIT_TROUBLE);
        }
    td__flight_now(&now);
    if (td__postmortem_take(books, count, &now, false, -1, &postmortem))
        return fail(EXIT_TROUBLE);
    if (json)
        td__postmortem_print_json(&postmortem, true, &text);
    else
        td__postmortem_print(&postmortem, "", &text);
    fwrite(text.data, 1, text.size, stdout);
    td__buffer_free(&text);
    td__postmortem_free(&postmortem);
    return fflush(stdout) ? EXIT_TROUBLE : 0;
}

int td__postmortem_command(int argc, char **argv)
{
    struct command_options options = {0};
    int rest;
    if (td__flags_parse(&table, argc, argv, &options, &rest))
        return fail(EXIT_USAGE);
    if (options.help) {
        puts("usage: tdrun postmortem [--json] FILE...\n\n"
             "Tells where the ranks of a job were last, from the files that they left: with\n"
             "TANDEM_FLIGHT=/path/prefix in its environment, rank 3 keeps /path/prefix.3.\n");
        td__flags_print(&table, stdout);
        return 0;
    }
    if (rest == argc) {
        td_fail(TD_ERR_INVALID, "there is no file to read: tdrun postmortem [--json] FILE...");
        return fail(EXIT_USAGE);
    }
    return tell(argv + rest, argc - rest, options.json);
}
