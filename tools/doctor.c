/* tdrun doctor: what this installation and this machine have, and what is wrong with them; with several nodes, also
 * between these. A list of checks, each of which prints lines:
 *
 *     ok    device    cuda: 2 devices; NVIDIA H200, driver 12.4
 *
 * A check reports what it finds by doctor_report(), and what must be alike on all nodes by doctor_fact(). */
#include "doctor.h"
#include "doctor_internal.h"

#include "base/fail.h"
#include "group/process_group.h"
#include "launch/flags.h"

#include <tandem/plugin.h>

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { EXIT_TROUBLE = 1, EXIT_USAGE = 2, TIMEOUT_S = 60, TEXT = 1024 };

/* ---- Reporting --------------------------------------------------------------------------------- */

static void print_line(struct doctor_findings *findings, enum doctor_verdict verdict,
                       const char *subject, const char *place, const char *text)
{
    static const char *const words[] = {"ok", "note", "FAIL"};
    findings->broken += verdict == DOCTOR_FAIL;
    printf("%-5s %-9s %s%s\n", words[verdict], subject, place, text);
}

void doctor_report(struct doctor_findings *findings, enum doctor_verdict verdict,
                   const char *subject, const char *format, ...)
{
    char text[TEXT], line[2 * TEXT];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    print_line(findings, verdict, subject, findings->place, text);
    if (verdict != DOCTOR_FAIL)
        return;
    int size = snprintf(line, sizeof line, "%s%s: %s", findings->place, subject, text);
    td__buffer_put_string(&findings->failed, line, (size_t)size);
}

void doctor_report_job(struct doctor_findings *findings, enum doctor_verdict verdict,
                       const char *subject, const char *format, ...)
{
    char text[2 * TEXT];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    print_line(findings, verdict, subject, "", text);
}

void doctor_fact(struct doctor_findings *findings, const char *name, const char *format, ...)
{
    char text[DOCTOR_VALUE];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    td__buffer_put_string(&findings->facts, name, strlen(name));
    td__buffer_put_string(&findings->facts, text, strlen(text));
}

/* ---- Checks -------------------------------------------------------------------------------------- */

static void check_version(struct doctor_findings *findings)
{
    doctor_report(findings, DOCTOR_OK, "tandem", "version %s", td_version());
    doctor_fact(findings, "version", "%s", td_version());
}

static void report_plugin(struct doctor_findings *findings, const td_plugin_info *plugin)
{
    if (plugin->state == TD_PLUGIN_FAILED) {
        doctor_report(findings, plugin->status == TD_ERR_UNSUPPORTED ? DOCTOR_NOTE : DOCTOR_FAIL,
                      "plug-in", "%s, from %s: %s", plugin->name, plugin->origin, plugin->error);
        return;
    }
    char name[DOCTOR_NAME];
    snprintf(name, sizeof name, "plug-in %s", plugin->name);
    doctor_fact(findings, name, "%s", plugin->release);
    bool both = *plugin->devices && *plugin->backends;
    bool nothing = !*plugin->devices && !*plugin->backends;
    doctor_report(findings, nothing ? DOCTOR_NOTE : DOCTOR_OK, "plug-in", "%s %s, %s: %s%s%s%s%s%s",
                  plugin->name, plugin->release, plugin->path, nothing ? "registers nothing" : "",
                  *plugin->devices ? "devices " : "", plugin->devices, both ? "; " : "",
                  *plugin->backends ? "backends " : "", plugin->backends);
}

static void check_plugins(struct doctor_findings *findings)
{
    td_plugin_info *plugins;
    int count;
    if (td_list_plugins(true, &plugins, &count)) {
        doctor_report(findings, DOCTOR_FAIL, "plug-in", "%s", td_last_error());
        return;
    }
    for (int i = 0; i < count; i++)
        report_plugin(findings, &plugins[i]);
    if (!count)
        doctor_report(findings, DOCTOR_NOTE, "plug-in", "there is none");
    td_free_plugin_list(plugins);
}

static void report_device(const struct device_line *line, void *arg)
{
    char name[DOCTOR_NAME];
    snprintf(name, sizeof name, "device %s", line->kind);
    if (strcmp(line->kind, "cpu") != 0) /* of which there are as many everywhere */
        doctor_fact(arg, name, "%s", line->text);
    doctor_report(arg,
                  line->broken   ? DOCTOR_FAIL
                  : line->absent ? DOCTOR_NOTE
                                 : DOCTOR_OK,
                  "device", "%s: %s", line->kind, line->text);
}

static void check_devices(struct doctor_findings *findings)
{
    device_list(report_device, findings);
}

static void check_backends(struct doctor_findings *findings)
{
    char names[1024], *rest;
    td__backend_names(names, sizeof names);
    for (char *name = strtok_r(names, ", ", &rest); name; name = strtok_r(NULL, ", ", &rest))
        doctor_report(findings, DOCTOR_OK, "backend", "%s", name);
}

/* As the plug-in nccl finds it. Its version must be the same on all nodes. */
static void check_nccl(struct doctor_findings *findings)
{
    const char *chosen = getenv("TANDEM_NCCL_SO");
    void *library = dlopen(chosen && *chosen ? chosen : "libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    int (*get_version)(int *) = library ? (int (*)(int *))dlsym(library, "ncclGetVersion") : NULL;
    int version;
    if (get_version && !get_version(&version) && version >= 10000) {
        doctor_report(findings, DOCTOR_OK, "nccl", "version %d.%d.%d", version / 10000,
                      version / 100 % 100, version % 100);
        doctor_fact(findings, "NCCL", "%d.%d.%d", version / 10000, version / 100 % 100,
                    version % 100);
    }
}

static void check_installation(struct doctor_findings *findings)
{
    check_version(findings);
    check_plugins(findings);
    check_devices(findings);
    check_backends(findings);
    check_nccl(findings);
}

/* ---- The command line ------------------------------------------------------------------------------ */

struct doctor_options {
    const char *nnodes, *node_rank, *master_addr, *master_port, *local_addr, *backend, *endpoint;
    double timeout_s;
    bool help;
};

#define OPTION(field) .offset = offsetof(struct doctor_options, field)

/* Those of tdrun that say where a job is, in the order of given_options(). */
static const struct td__flag flags[] = {
    {"nnodes", 0, "N", "nodes to compare, each of which runs this command (1)", td__flag_set_text,
     OPTION(nnodes)},
    {"node-rank", 0, "N", "number of this node among the nodes (0)", td__flag_set_text,
     OPTION(node_rank)},
    {"master-addr", 0, "HOST", "node 0, as the other nodes reach it (127.0.0.1)", td__flag_set_text,
     OPTION(master_addr)},
    {"master-port", 0, "PORT", "port of the store on node 0 (29500)", td__flag_set_text,
     OPTION(master_port)},
    {"local-addr", 0, "HOST", "address of this node; tells whether it owns the endpoint",
     td__flag_set_text, OPTION(local_addr)},
    {"rdzv-backend", 0, "static|c10d", "c10d: nodes are numbered as they arrive (static)",
     td__flag_set_text, OPTION(backend)},
    {"rdzv-endpoint", 0, "HOST[:PORT]", "of the store, instead of --master-addr and -port",
     td__flag_set_text, OPTION(endpoint)},
    {"timeout", 0, "SECONDS", "how long to wait for the other nodes (60)", td__flag_set_seconds,
     OPTION(timeout_s)},
    {"help", 'h', NULL, "print this", td__flag_set_bool, OPTION(help)},
};

enum { GIVEN = 7 }; /* of them are tdrun's */

static td_status parse(int argc, char **argv, struct doctor_options *options)
{
    static const struct td__flag_table table = {flags, sizeof flags / sizeof *flags, NULL};
    int rest;
    TD_TRY(td__flags_parse(&table, argc, argv, options, &rest));
    if (rest < argc)
        return td_fail(
            TD_ERR_INVALID,
            "\"%s\" is one too many; to start a program of the name doctor: tdrun ./doctor",
            argv[rest]);
    if (options->help) {
        puts(
            "usage: tdrun doctor [options]\n\n"
            "Lists what this installation of Tandem and this machine have, and what is wrong with\n"
            "them. With several nodes it is started on each of them at the same time, with the\n"
            "options and the environment that tdrun would have there: the nodes meet in a store,\n"
            "connect to each other in both directions, and compare what they have.\n"
            "A line that begins with FAIL says what would fail; the exit code is then 1.\n\n"
            "    tdrun doctor\n"
            "    tdrun doctor --nnodes 2 --node-rank 0 --master-addr host0\n");
        td__flags_print(&table, stdout);
    }
    return TD_OK;
}

/* Has tdrun itself read its options, and the variables that give them. */
static td_status read_job(const struct doctor_options *options, char words[][512], char **arguments,
                          struct td__run_options *job)
{
    int count = 0;
    arguments[count++] = "tdrun";
    for (int i = 0; i < GIVEN; i++) {
        const char *value = *(const char *const *)((const char *)options + flags[i].offset);
        if (!value)
            continue;
        snprintf(words[i], 512, "--%s=%s", flags[i].name, value);
        arguments[count++] = words[i];
    }
    arguments[count++] = "doctor"; /* the program */
    arguments[count] = NULL;
    return td__run_options_parse(count, arguments, job);
}

static void check(const struct td__run_options *job, double timeout_s,
                  struct doctor_findings *findings)
{
    if (job->nnodes > 1 && job->node_rank >= 0)
        snprintf(findings->place, sizeof findings->place, "node %d (%s): ", job->node_rank,
                 td__this_host(job));
    else if (job->nnodes > 1)
        snprintf(findings->place, sizeof findings->place, "%s: ", td__this_host(job));
    check_installation(findings);
    doctor_check_machine(findings, job);
    fflush(stdout);
    if (job->nnodes > 1)
        doctor_check_nodes(findings, job, timeout_s);
}

int doctor_run(int argc, char **argv)
{
    struct doctor_options options = {.timeout_s = TIMEOUT_S};
    struct doctor_findings findings = {0};
    struct td__run_options job;
    char words[GIVEN][512], *arguments[GIVEN + 3];
    td_status status = parse(argc, argv, &options);
    if (!status && options.help)
        return 0;
    if (!status)
        status = read_job(&options, words, arguments, &job);
    if (status) {
        fprintf(stderr, "tdrun doctor: %s\n", td_last_error());
        return EXIT_USAGE;
    }
    check(&job, options.timeout_s, &findings);
    td__run_options_free(&job);
    td__buffer_free(&findings.facts);
    td__buffer_free(&findings.failed);
    return fflush(stdout) || findings.broken ? EXIT_TROUBLE : 0;
}
