/* A spare's side; see spare.h. */
#include "store/spare.h"

#include "base/fail.h"
#include "base/number.h"
#include "os/socket.h"
#include "store/rendezvous_schemes.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SAY_MS = 1000 };

/* Guards what follows; held while a spare waits, so that other threads that would join wait, too. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int launcher = -1; /* of a process that has been a spare; until it has joined */

static td_status find_launcher(const char *text, int *fd)
{
    struct stat info;
    if (!td__parse_int(text, 3, INT_MAX, fd) || fstat(*fd, &info) || !S_ISSOCK(info.st_mode))
        return td_fail(TD_ERR_INVALID,
                       "the variable " TD__SPARE_VARIABLE " is \"%.32s\"; it is the number of a "
                       "socket that tdrun --spares has opened, and that must stay open until this "
                       "process gets a rank",
                       text);
    fcntl(*fd, F_SETFD, FD_CLOEXEC); /* not for programs that this one starts */
    return TD_OK;
}

/* The variables of a rank, one after another. */
static td_status take_variables(char *text, size_t size)
{
    for (char *end = text + size; text < end;) {
        size_t length = strlen(text);
        char *equals = strchr(text, '=');
        if (!equals || equals == text)
            return td_fail(TD_ERR_MISMATCH, "this spare and its tdrun are of different versions");
        *equals = '\0';
        if (setenv(text, equals + 1, 1))
            return td__fail_nomem("spare");
        text += length + 1;
    }
    return TD_OK;
}

static td_status receive(int fd)
{
    const char waits = TD__SPARE_WAITS;
    uint32_t size;
    int error = td__send_all(fd, &waits, 1, TD__NEVER);
    if (!error)
        error = td__recv_all(fd, &size, sizeof size, TD__NEVER);
    if (error)
        return td_fail(TD_ERR_PEER,
                       "this process was a spare of tdrun --spares, and is not needed: its tdrun "
                       "has ended");
    if (!size || size > TD__SPARE_ROOM)
        return td_fail(TD_ERR_MISMATCH, "this spare and its tdrun are of different versions");
    char *text = calloc(1, size + 1);
    if (!text)
        return td__fail_nomem("spare");
    error = td__recv_all(fd, text, size, TD__NEVER);
    td_status status = error ? td_fail(TD_ERR_PEER, "this spare's tdrun has ended")
                             : take_variables(text, size);
    free(text);
    return status;
}

td_status td__spare_wait(void)
{
    int fd = -1;
    pthread_mutex_lock(&lock);
    const char *text = td__env(TD__SPARE_VARIABLE);
    td_status status = text ? find_launcher(text, &fd) : TD_OK;
    if (text && !status)
        status = receive(fd);
    if (text && !status) {
        unsetenv(TD__SPARE_VARIABLE);
        launcher = fd;
    }
    pthread_mutex_unlock(&lock);
    return status;
}

void td__spare_joined(void)
{
    const char joined = TD__SPARE_JOINED;
    pthread_mutex_lock(&lock);
    if (launcher >= 0) {
        td__send_all(launcher, &joined, 1, td__deadline_in_ms(SAY_MS));
        close(launcher);
        launcher = -1;
    }
    pthread_mutex_unlock(&lock);
}
