/* tdrun doctor: what this installation has, and what is wrong with it. A list of checks, each of which prints lines:
 *
 *     ok    device    cuda: 2 devices; NVIDIA H200, driver 12.4
 *
 * A check reports what it finds by report(); a new one is a function, and a line in the table at the end. */
#include "doctor.h"

#include "base/fail.h"
#include "group/process_group.h"
#include "launch/flags.h"

#include <tandem/plugin.h>

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { EXIT_TROUBLE = 1, EXIT_USAGE = 2 };

/* ---- Reporting --------------------------------------------------------------------------------- */

enum verdict { OK, NOTE, BROKEN };

struct findings {
    int broken;
};

__attribute__((format(printf, 4, 5))) static void report(struct findings *findings,
                                                         enum verdict verdict, const char *subject,
                                                         const char *format, ...)
{
    static const char *const words[] = {"ok", "note", "FAIL"};
    va_list arguments;
    findings->broken += verdict == BROKEN;
    printf("%-5s %-9s ", words[verdict], subject);
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    putchar('\n');
}

/* ---- Checks -------------------------------------------------------------------------------------- */

static void check_version(struct findings *findings)
{
    report(findings, OK, "tandem", "version %s", td_version());
}

static void report_plugin(struct findings *findings, const td_plugin_info *plugin)
{
    if (plugin->state == TD_PLUGIN_FAILED) {
        report(findings, plugin->status == TD_ERR_UNSUPPORTED ? NOTE : BROKEN, "plug-in",
               "%s, from %s: %s", plugin->name, plugin->origin, plugin->error);
        return;
    }
    bool both = *plugin->devices && *plugin->backends;
    bool nothing = !*plugin->devices && !*plugin->backends;
    report(findings, nothing ? NOTE : OK, "plug-in", "%s %s, %s: %s%s%s%s%s%s", plugin->name,
           plugin->release, plugin->path, nothing ? "registers nothing" : "",
           *plugin->devices ? "devices " : "", plugin->devices, both ? "; " : "",
           *plugin->backends ? "backends " : "", plugin->backends);
}

static void check_plugins(struct findings *findings)
{
    td_plugin_info *plugins;
    int count;
    if (td_list_plugins(true, &plugins, &count)) {
        report(findings, BROKEN, "plug-in", "%s", td_last_error());
        return;
    }
    for (int i = 0; i < count; i++)
        report_plugin(findings, &plugins[i]);
    if (!count)
        report(findings, NOTE, "plug-in", "there is none");
    td_free_plugin_list(plugins);
}

static void report_device(const struct device_line *line, void *arg)
{
    report(arg,
           line->broken   ? BROKEN
           : line->absent ? NOTE
                          : OK,
           "device", "%s: %s", line->kind, line->text);
}

static void check_devices(struct findings *findings)
{
    device_list(report_device, findings);
}

static void check_backends(struct findings *findings)
{
    char names[1024], *rest;
    td__backend_names(names, sizeof names);
    for (char *name = strtok_r(names, ", ", &rest); name; name = strtok_r(NULL, ", ", &rest))
        report(findings, OK, "backend", "%s", name);
}

static void (*const checks[])(struct findings *findings) = {
    check_version,
    check_plugins,
    check_devices,
    check_backends,
};

/* ---- The command line ------------------------------------------------------------------------------ */

static td_status parse(int argc, char **argv, bool *help)
{
    static const struct td__flag flags[] = {
        {.name = "help", .letter = 'h', .help = "print this", .set = td__flag_set_bool},
    };
    static const struct td__flag_table table = {flags, sizeof flags / sizeof *flags, NULL};
    int rest;
    TD_TRY(td__flags_parse(&table, argc, argv, help, &rest));
    if (rest < argc)
        return td_fail(
            TD_ERR_INVALID,
            "\"%s\" is one too many; to start a program of the name doctor: tdrun ./doctor",
            argv[rest]);
    if (*help) {
        puts(
            "usage: tdrun doctor\n\n"
            "Lists what this installation of Tandem has: its version, plug-ins, devices and\n"
            "backends. A line that begins with FAIL says what is broken; the exit code is then 1.\n");
        td__flags_print(&table, stdout);
    }
    return TD_OK;
}

int doctor_run(int argc, char **argv)
{
    struct findings findings = {0};
    bool help = false;
    if (parse(argc, argv, &help)) {
        fprintf(stderr, "tdrun doctor: %s\n", td_last_error());
        return EXIT_USAGE;
    }
    if (help)
        return 0;
    for (size_t i = 0; i < sizeof checks / sizeof *checks; i++)
        checks[i](&findings);
    return fflush(stdout) || findings.broken ? EXIT_TROUBLE : 0;
}
