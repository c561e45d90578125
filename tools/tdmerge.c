/* tdmerge: one safetensors file of a sharded checkpoint. */
#include "base/fail.h"
#include "launch/flags.h"

#include <tandem/checkpoint.h>

#include <stddef.h>

enum { EXIT_FAILED = 1, EXIT_USAGE = 2 };

struct merge_options {
    const char *directory, *file, *prefix;
    bool all, help, version;
};

#define AT(field) .offset = offsetof(struct merge_options, field)

static const struct td__flag flags[] = {
    {"prefix", 'p', "TEXT", "the tensors whose names begin with TEXT, without it",
     td__flag_set_text, AT(prefix)},
    {"all", 'a', NULL, "all tensors, by their whole names", td__flag_set_bool, AT(all)},
    {"help", 'h', NULL, "print this help", td__flag_set_bool, AT(help)},
    {"version", 'V', NULL, "print the version", td__flag_set_bool, AT(version)},
};
static const struct td__flag_table table = {flags, sizeof flags / sizeof *flags, NULL};

static void print_help(void)
{
    fputs(
        "usage: tdmerge DIRECTORY FILE [options]\n\n"
        "Writes the tensors of a sharded checkpoint to one safetensors file, with a few MiB of memory:\n"
        "the model of a training, and all tensors of other checkpoints.\n\n"
        "    tdmerge run/step-000000001000.sharded net.safetensors\n\n",
        stdout);
    td__flags_print(&table, stdout);
    fputs(
        "\nThe exit code is 1 when the file cannot be written, or the checkpoint is damaged, and 2\n"
        "when the command line is wrong.\n",
        stdout);
}

static td_status parse(int argc, char **argv, struct merge_options *options)
{
    *options = (struct merge_options){0};
    while (argc > 1) {
        int rest;
        TD_TRY(td__flags_parse(&table, argc, argv, options, &rest));
        if (rest >= argc)
            break;
        if (options->file)
            return td_fail(TD_ERR_INVALID, "\"%s\": there are a directory and a file only",
                           argv[rest]);
        if (options->directory)
            options->file = argv[rest];
        else
            options->directory = argv[rest];
        argc -= rest;
        argv += rest;
    }
    if (options->help || options->version)
        return TD_OK;
    if (!options->file)
        return td_fail(TD_ERR_INVALID, "the %s is missing; see --help",
                       options->directory ? "file" : "directory");
    if (options->all && options->prefix)
        return td_fail(TD_ERR_INVALID, "--all and --prefix exclude each other");
    return TD_OK;
}

int main(int argc, char **argv)
{
    struct merge_options options;
    if (parse(argc, argv, &options)) {
        fprintf(stderr, "tdmerge: %s\n", td_last_error());
        return EXIT_USAGE;
    }
    if (options.help) {
        print_help();
        return 0;
    }
    if (options.version) {
        printf("tdmerge %s\n", td_version());
        return 0;
    }
    if (!td_merge_sharded(options.directory, options.file, options.all ? "" : options.prefix))
        return 0;
    fprintf(stderr, "tdmerge: %s\n", td_last_error());
    return EXIT_FAILED;
}
