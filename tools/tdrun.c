/* tdrun: starts the processes of a job and watches over them. src/launch/ has all of it but `tdrun doctor`. */
#include "doctor.h"
#include "launch/hosts.h"
#include "launch/supervisor.h"
#include "launch/jobs.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { EXIT_TROUBLE = 1, EXIT_USAGE = 2 };

static bool served; /* by the tdrun of another host, which says what goes wrong here */

static int fail(int code)
{
    if (served) {
        td__hosts_tell_failure(td_last_error());
        return code;
    }
    fprintf(stderr, "tdrun: %s\n", td_last_error());
    return code;
}

/* Opens closed descriptors among 0 to 2, which other files would get otherwise. */
static void fill_standard_descriptors(void)
{
    int fd;
    do
        fd = open("/dev/null", O_RDWR);
    while (fd >= 0 && fd <= STDERR_FILENO);
    if (fd >= 0)
        close(fd);
}

/* The agent writes its title over the arguments; the options point to these copies instead. */
static char **copy_arguments(int argc, char **argv)
{
    char **copies = calloc((size_t)argc + 1, sizeof *copies);
    for (int i = 0; copies && i < argc; i++)
        if (!(copies[i] = strdup(argv[i])))
            return NULL;
    return copies;
}

static void free_arguments(char **copies)
{
    for (char **at = copies; *at; at++)
        free(*at);
    free(copies);
}

static int run(int argc, char **argv, const struct td__run_options *options)
{
    struct td__job_secret secret;
    struct td__worker_program program;
    int code;
    if (options->help) {
        td__run_options_help(stdout);
        return 0;
    }
    if (options->version) {
        printf("tdrun %s\n", td_version());
        return 0;
    }
    program = (struct td__worker_program){0};
    if (!options->hosts.count && td__worker_program_plan(options, &program, &code))
        return fail(code);
    if (program.by_itself) /* as -u does for the others */
        setenv("PYTHONUNBUFFERED", "1", 0);
    struct td__agent_job job = {.options = options, .secret = &secret, .program = &program};
    if (td__job_secret_find(options, &secret)) {
        code = fail(EXIT_TROUBLE);
    } else {
        fputs(options->notes, stderr);
        if (td__supervisor_run(argc, argv, &job, &code))
            code = fail(EXIT_TROUBLE);
    }
    td__worker_program_free(&program);
    return code;
}

/* tdrun serve: as another host's tdrun --hosts says on standard input. */
static int serve(int argc, char **argv)
{
    struct td__served server = {0};
    struct td__run_options options;
    served = true;
    if (td__hosts_serve(&server))
        return fail(EXIT_TROUBLE);
    if (td__run_options_parse(server.argc, server.argv, &options))
        return fail(EXIT_USAGE);
    options.served_host = server.host;
    int code = run(argc, argv, &options);
    td__hosts_tell_end(code);
    td__run_options_free(&options);
    free_arguments(server.argv);
    return code;
}

int main(int argc, char **argv)
{
    struct td__run_options options;
    fill_standard_descriptors();
    if (argc == 2 && !strcmp(argv[1], "serve"))
        return serve(argc, argv);
    td__command_fn command = argc > 1 ? td__command_find(argv[1]) : NULL;
    if (argc > 1 && !strcmp(argv[1], "doctor"))
        command = doctor_run;
    if (command)
        return command(argc - 1, argv + 1);
    char **copies = copy_arguments(argc, argv);
    if (!copies) {
        fprintf(stderr, "tdrun: out of memory\n");
        return EXIT_TROUBLE;
    }
    if (td__run_options_parse(argc, copies, &options)) {
        free_arguments(copies);
        return options.quiet ? EXIT_USAGE : fail(EXIT_USAGE);
    }
    int code = run(argc, argv, &options);
    td__run_options_free(&options);
    free_arguments(copies);
    return code;
}
