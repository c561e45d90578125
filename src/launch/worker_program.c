/* What the workers run; see options.h. It is looked up before anything is started, so that a mistake
 * in its name costs no worker, and so that the message can say more than an errno does. */
#include "launch/options.h"

#include "base/fail.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { NOT_RUNNABLE = 126, NOT_FOUND = 127 };

static bool is_python(const char *name)
{
    size_t length = strlen(name);
    return length > 3 && !strcmp(name + length - 3, ".py");
}

/* 0 when `path` can be executed, or an errno. */
static int runnable(const char *path)
{
    struct stat info;
    if (stat(path, &info))
        return errno;
    if (S_ISDIR(info.st_mode))
        return EISDIR;
    return eaccess(path, X_OK) ? errno : 0;
}

td_status td__worker_program_refused(const char *name, int error, int *exit_code)
{
    *exit_code = error == ENOENT || error == ENOTDIR ? NOT_FOUND : NOT_RUNNABLE;
    if (error == EACCES && !access(name, F_OK))
        return td_fail(TD_ERR_INVALID, "cannot run %s: it is not executable (%s)", name,
                       is_python(name) ? "without --no-python the Python interpreter runs it"
                                       : "chmod +x makes it so");
    if (error == ENOENT && !access(name, F_OK))
        return td_fail(TD_ERR_INVALID,
                       "cannot run %s: the interpreter that it names is not on this machine", name);
    return td_fail(TD_ERR_INVALID, "cannot run %s: %s", name, td__errno_text(error));
}

static td_status not_in_path(const char *name, int *exit_code)
{
    *exit_code = NOT_FOUND;
    if (!access(name, F_OK))
        return td_fail(TD_ERR_INVALID,
                       "cannot run %s: there is no such program in PATH; the one in this "
                       "directory is ./%s",
                       name, name);
    return td_fail(TD_ERR_INVALID, "cannot run %s: there is no such %sprogram in PATH", name,
                   is_python(name) ? "file in this directory, and no such " : "");
}

/* The file that execvp() would run for `name`. */
td_status td__find_program(const char *name, char path[PATH_MAX], int *exit_code)
{
    if (!*name || strlen(name) >= PATH_MAX) {
        *exit_code = NOT_FOUND;
        return td_fail(TD_ERR_INVALID, "cannot run \"%.64s\": that is not the name of a program",
                       name);
    }
    if (strchr(name, '/')) {
        int error = runnable(name);
        if (error)
            return td__worker_program_refused(name, error, exit_code);
        strcpy(path, name);
        return TD_OK;
    }
    const char *directory = getenv("PATH");
    if (!directory)
        directory = "/bin:/usr/bin";
    char refused[PATH_MAX] = ""; /* found, but not executable; another directory may do better */
    for (;;) {
        size_t length = strcspn(directory, ":");
        int size = snprintf(path, PATH_MAX, "%.*s%s%s", (int)length, directory, length ? "/" : "",
                            name);
        int error = size < PATH_MAX ? runnable(path) : ENAMETOOLONG;
        if (!error)
            return TD_OK;
        if (error == EACCES && !*refused)
            strcpy(refused, path);
        if (!directory[length])
            break;
        directory += length + 1;
    }
    return *refused ? td__worker_program_refused(refused, EACCES, exit_code)
                    : not_in_path(name, exit_code);
}

/* ---- Python ---------------------------------------------------------------------------------- */

static bool has_first_line(const char *path)
{
    char text[2] = "";
    FILE *file = fopen(path, "re");
    bool has = file && fread(text, 1, 2, file) == 2 && text[0] == '#' && text[1] == '!';
    if (file)
        fclose(file);
    return has;
}

static const char *chosen_interpreter(void)
{
    const char *name = getenv("PYTHON_EXEC");
    return name && *name ? name : NULL;
}

static td_status find_interpreter(struct td__worker_program *program, const char **name,
                                  int *exit_code)
{
    const char *chosen = chosen_interpreter();
    *name = chosen ? chosen : "python3";
    if (!td__find_program(*name, program->path, exit_code))
        return TD_OK;
    return chosen ? td_fail(TD_ERR_INVALID, "PYTHON_EXEC: %s", td__error_text())
                  : td_fail(TD_ERR_INVALID,
                            "a Python program needs its interpreter: %s (PYTHON_EXEC names another "
                            "one)",
                            td__error_text());
}

/* A script is read by the interpreter, so it must be a file that can be read, not one to execute. */
static td_status check_script(const char *name, int *exit_code)
{
    struct stat info;
    int error = stat(name, &info) || access(name, R_OK) ? errno : 0;
    if (!error)
        return TD_OK;
    *exit_code = error == ENOENT || error == ENOTDIR ? NOT_FOUND : NOT_RUNNABLE;
    return td_fail(TD_ERR_INVALID, "cannot run %s: %s", name, td__errno_text(error));
}

/* Whether the interpreter is to run the program. *by_itself: it is a script, and runs by its first line. */
static bool wants_interpreter(const struct td__run_options *options, bool *by_itself)
{
    const char *name = options->program[0];
    *by_itself = false;
    if (options->no_python)
        return false;
    if (options->module || options->run_path)
        return true;
    if (!is_python(name) || (!strchr(name, '/') && access(name, F_OK)))
        return false;
    *by_itself = !chosen_interpreter() && !runnable(name) && has_first_line(name);
    return !*by_itself;
}

/* ---- Putting it together ----------------------------------------------------------------------- */

td_status td__worker_program_plan(const struct td__run_options *options,
                                  struct td__worker_program *program, int *exit_code)
{
    const char *name = options->program[0], *before[3] = {NULL};
    int ahead = 0, given = 0;
    *program = (struct td__worker_program){.local_rank_name = options->local_rank_name};
    if (wants_interpreter(options, &program->by_itself)) {
        if (!options->module)
            TD_TRY(check_script(name, exit_code));
        TD_TRY(find_interpreter(program, &before[ahead++], exit_code));
        before[ahead++] = "-u"; /* what it prints is seen at once, and not lost when it is killed */
        if (options->module)
            before[ahead++] = "-m";
    } else if (program->by_itself && strlen(name) < sizeof program->path) {
        strcpy(program->path, name); /* in this directory, where it has no slash */
    } else {
        TD_TRY(td__find_program(name, program->path, exit_code));
    }
    while (options->program[given])
        given++;
    size_t slots = (size_t)(ahead + given) + 2;
    size_t room = options->local_rank_name ? strlen(options->local_rank_name) + 16 : 0;
    program->argv = calloc(1, slots * sizeof *program->argv + room);
    *exit_code = NOT_RUNNABLE;
    if (!program->argv)
        return td__fail_nomem("the program's arguments");
    char **at = program->argv;
    for (int i = 0; i < ahead; i++)
        *at++ = (char *)before[i];
    *at++ = options->program[0];
    if (program->local_rank_name)
        *at++ = program->local_rank = (char *)(program->argv + slots);
    for (int i = 1; i < given; i++)
        *at++ = options->program[i];
    return TD_OK;
}

void td__worker_program_free(struct td__worker_program *program)
{
    free(program->argv);
    program->argv = NULL;
}

char **td__worker_program_arguments(const struct td__worker_program *program, int local_rank)
{
    if (program->local_rank)
        sprintf(program->local_rank, "--%s=%d", program->local_rank_name, local_rank);
    return program->argv;
}
