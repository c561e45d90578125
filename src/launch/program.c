/* Finding the program; see program.h. It is looked up before anything is started, so that a mistake
 * in its name costs no worker, and so that the message can say more than an errno does. */
#include "launch/program.h"

#include "base/fail.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { NOT_RUNNABLE = 126, NOT_FOUND = 127 };

static const char *python_hint(const char *name)
{
    size_t length = strlen(name);
    return length > 3 && !strcmp(name + length - 3, ".py")
               ? "; a Python script is started as: tdrun … python3 "
               : NULL;
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

td_status td__program_refused(const char *name, int error, int *exit_code)
{
    const char *python = python_hint(name);
    *exit_code = error == ENOENT || error == ENOTDIR ? NOT_FOUND : NOT_RUNNABLE;
    if (error == EACCES && !access(name, F_OK))
        return python
                   ? td__fail(TD_ERR_INVALID, "cannot run %s: it is not executable%s%s", name,
                              python, name)
                   : td__fail(TD_ERR_INVALID,
                              "cannot run %s: it is not executable (chmod +x makes it so)", name);
    if (error == ENOENT && !access(name, F_OK))
        return td__fail(TD_ERR_INVALID,
                        "cannot run %s: the interpreter that it names is not on this machine",
                        name);
    return td__fail(TD_ERR_INVALID, "cannot run %s: %s", name, td__errno_text(error));
}

static td_status not_in_path(const char *name, int *exit_code)
{
    const char *python = python_hint(name);
    *exit_code = NOT_FOUND;
    if (access(name, F_OK))
        return td__fail(TD_ERR_INVALID, "cannot run %s: there is no such program in PATH", name);
    if (python)
        return td__fail(TD_ERR_INVALID, "cannot run %s: it is not a program in PATH%s%s", name,
                        python, name);
    return td__fail(TD_ERR_INVALID,
                    "cannot run %s: there is no such program in PATH; the one in this directory is "
                    "./%s",
                    name, name);
}

td_status td__program_find(const char *name, char path[PATH_MAX], int *exit_code)
{
    if (!*name || strlen(name) >= PATH_MAX) {
        *exit_code = NOT_FOUND;
        return td__fail(TD_ERR_INVALID, "cannot run \"%.64s\": that is not the name of a program",
                        name);
    }
    if (strchr(name, '/')) {
        int error = runnable(name);
        if (error)
            return td__program_refused(name, error, exit_code);
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
    return *refused ? td__program_refused(refused, EACCES, exit_code)
                    : not_in_path(name, exit_code);
}
