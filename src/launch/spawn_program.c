/* This program, to be started again; see spawn.h. */
#include "launch/spawn.h"

#include "base/fail.h"
#include "os/process.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* The file's own name, so that the child appears under it in ps; not where the file was removed or replaced since: the
 * link of the kernel still leads to the one that runs. By a descriptor, since QEMU has the right file behind the link
 * only when it is opened. */
static void find_file(char path[PATH_MAX])
{
    static const char link[] = "/proc/self/exe";
    struct stat running, named;
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    int fd = open(link, O_PATH | O_CLOEXEC);
    bool same = false;
    if (length > 0) {
        path[length] = '\0';
        same = fd >= 0 && !fstat(fd, &running) && !stat(path, &named) &&
               running.st_dev == named.st_dev && running.st_ino == named.st_ino;
    }
    if (fd >= 0)
        close(fd);
    if (!same)
        snprintf(path, PATH_MAX, "%s", link);
}

/* The arguments as the kernel has them, each ended by a NUL; where it does not tell, the name alone. */
static td_status read_arguments(struct td__own_program *program)
{
    struct td__buffer *texts = &program->arguments;
    int fd = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    char part[4096];
    ssize_t got;
    while (fd >= 0 && (got = read(fd, part, sizeof part)) > 0)
        td__buffer_put(texts, part, (size_t)got);
    if (fd >= 0)
        close(fd);
    if (!texts->size)
        td__buffer_put(texts, program_invocation_name, strlen(program_invocation_name));
    td__buffer_put(texts, "", 1); /* the program may have overwritten the last NUL */
    size_t count = 0;
    for (size_t i = 0; i < texts->size; i++)
        count += !texts->data[i];
    program->argv = texts->failed ? NULL : calloc(count + 1, sizeof *program->argv);
    if (!program->argv)
        return td__fail_nomem("td_spawn");
    char *at = (char *)texts->data, *end = at + texts->size - 1;
    for (size_t i = 0; at < end; at += strlen(at) + 1)
        program->argv[i++] = at;
    return TD_OK;
}

/* The environment, with room for the variable. */
static td_status read_environment(struct td__own_program *program)
{
    size_t count = 0, used = 0;
    while (environ && environ[count])
        count++;
    program->envp = calloc(count + 2, sizeof *program->envp);
    if (!program->envp)
        return td__fail_nomem("td_spawn");
    for (size_t i = 0; i < count; i++)
        if (strncmp(environ[i], TD__SPAWN_VARIABLE "=", sizeof TD__SPAWN_VARIABLE))
            program->envp[used++] = environ[i];
    program->envp[used] = program->variable;
    return TD_OK;
}

td_status td__own_program_read(struct td__own_program *program)
{
    find_file(program->path);
    td_status status = read_arguments(program);
    if (!status)
        status = read_environment(program);
    if (status)
        td__own_program_free(program);
    return status;
}

int td__own_program_start(struct td__own_program *program, int link, int arg_fd, pid_t *pid,
                          const char **step)
{
    snprintf(program->variable, sizeof program->variable, TD__SPAWN_VARIABLE "=%d", link);
    struct td__child_spec spec = {
        .path = program->path,
        .argv = program->argv,
        .envp = program->envp,
        .standard = {-1, -1, -1},
        .keep = {link, arg_fd},
        .parents_group = true,
        .exit_pipe = -1,
    };
    return td__child_start(&spec, pid, step);
}

void td__own_program_free(struct td__own_program *program)
{
    td__buffer_free(&program->arguments);
    free(program->argv);
    free(program->envp);
    *program = (struct td__own_program){0};
}
