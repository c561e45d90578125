/* PMI-1 as it goes over the wire: lines of text through the descriptor in PMI_FD, which a launcher such as MPICH's hydra
 * has opened for this process.
 *
 *     cmd=get_my_kvsname                      -> cmd=my_kvsname kvsname=K
 *     cmd=put kvsname=K key=k value=v         -> cmd=put_result rc=0
 *     cmd=barrier_in                          -> cmd=barrier_out     when all ranks are in it
 *     cmd=get kvsname=K key=k                 -> cmd=get_result rc=0 value=v
 *
 * MPI uses the same descriptor, in MPI_Init(): nothing behind the end of an answer is read.
 *
 * hydra kills the other processes of a host when one of them ends that has begun, but has not said
 *
 *     cmd=finalize                            -> cmd=finalize_ack
 *
 * It closes the connection then, so this is said when the process exits, unless it has failed, or MPI has said it. */
#include "store/launcher_kv.h"

#include "base/fail.h"
#include "base/number.h"
#include "store/rendezvous_schemes.h"

#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FINALIZE_MS = 2000 };

/* Who has begun, on which connection: its descriptor may be closed, and be that of another one, when the process exits. */
static pid_t user;
static struct stat begun;

/* -1: there is none. */
static int find_fd(void)
{
    struct stat info;
    int fd = -1;
    const char *text = td__env("PMI_FD");
    if (!text || !td__parse_int(text, 0, 1 << 20, &fd) || fstat(fd, &info) ||
        !S_ISSOCK(info.st_mode))
        return -1;
    return fd;
}

bool td__pmi_exists(void)
{
    return td__env("PMI_RANK") && find_fd() >= 0;
}

bool td__pmi_field(const char *line, const char *name, char *value, size_t room)
{
    size_t length = strlen(name);
    for (const char *at = line; *at; at += strcspn(at, " \n"), at += strspn(at, " \n")) {
        if (strncmp(at, name, length) != 0 || at[length] != '=')
            continue;
        size_t size = strcspn(at + length + 1, " \n");
        if (size >= room)
            return false;
        memcpy(value, at + length + 1, size);
        value[size] = '\0';
        return true;
    }
    return false;
}

static td_status fail_io(const char *what, const char *why)
{
    return td_fail(TD_ERR_SYSTEM,
                   "the key-value space of the launcher (PMI_FD): %s: %s; set MASTER_ADDR and "
                   "MASTER_PORT to do without it",
                   what, why);
}

static td_status await_readable(int fd, const char *what, td__deadline deadline)
{
    struct pollfd entry = {.fd = fd, .events = POLLIN};
    int ready;
    do
        ready = poll(&entry, 1, td__deadline_poll_ms(deadline));
    while (ready < 0 && errno == EINTR);
    if (ready < 0)
        return fail_io(what, td__errno_text(errno));
    return ready ? TD_OK
                 : td_fail(TD_ERR_TIMEOUT,
                           "the key-value space of the launcher (PMI_FD): %s: not all ranks are "
                           "there in time; every process of mpirun must join",
                           what);
}

static td_status read_line(int fd, const char *what, char line[TD__KV_LINE], td__deadline deadline)
{
    for (size_t used = 0; used + 1 < TD__KV_LINE; used++) {
        TD_TRY(await_readable(fd, what, deadline));
        ssize_t got = read(fd, line + used, 1);
        if (got < 0 && errno == EINTR) {
            used--;
            continue;
        }
        if (got <= 0)
            return fail_io(what, got ? td__errno_text(errno) : "the launcher has closed it");
        if (line[used] == '\n') {
            line[used + 1] = '\0';
            return TD_OK;
        }
    }
    return fail_io(what, "the answer is too long");
}

/* Sends a line, and reads the answer, which must be `expected`. */
static td_status request(int fd, const char *line, const char *expected, char answer[TD__KV_LINE],
                         td__deadline deadline)
{
    char command[64], rc[16];
    size_t size = strlen(line);
    if (send(fd, line, size, MSG_NOSIGNAL) != (ssize_t)size)
        return fail_io(expected, "cannot be written to");
    TD_TRY(read_line(fd, expected, answer, deadline));
    if (!td__pmi_field(answer, "cmd", command, sizeof command) || strcmp(command, expected) != 0)
        return fail_io(expected, "another answer came");
    if (td__pmi_field(answer, "rc", rc, sizeof rc) && strcmp(rc, "0") != 0)
        return fail_io(expected, "the launcher refuses");
    return TD_OK;
}

/* Whether MPI has the descriptor, or had it until MPI_Finalize(). */
static bool mpi_has_begun(void)
{
    int (*initialized)(int *), begun_too = 0;
    *(void **)&initialized = dlsym(RTLD_DEFAULT, "MPI_Initialized");
    return initialized && !initialized(&begun_too) && begun_too;
}

static void finalize_at_exit(int exit_status, void *arg)
{
    struct stat info;
    char answer[TD__KV_LINE];
    int fd = find_fd();
    (void)arg;
    bool open = fd >= 0 && !fstat(fd, &info) && info.st_dev == begun.st_dev &&
                info.st_ino == begun.st_ino;
    if (open && !exit_status && getpid() == user && !mpi_has_begun())
        request(fd, "cmd=finalize\n", "finalize_ack", answer, td__deadline_in_ms(FINALIZE_MS));
}

static void finalize_later(int fd)
{
    if (user != getpid() && !fstat(fd, &begun) && !on_exit(finalize_at_exit, NULL))
        user = getpid();
}

td_status td__pmi_exchange(const char *key, char value[TD__KV_VALUE], bool put,
                           td__deadline deadline)
{
    char line[TD__KV_LINE], answer[TD__KV_LINE], space[512];
    int fd = find_fd();
    if (fd < 0)
        return fail_io("PMI_FD", "it is no socket");
    TD_TRY(request(fd, "cmd=init pmi_version=1 pmi_subversion=1\n", "response_to_init", answer,
                   deadline));
    finalize_later(fd);
    TD_TRY(request(fd, "cmd=get_my_kvsname\n", "my_kvsname", answer, deadline));
    if (!td__pmi_field(answer, "kvsname", space, sizeof space))
        return fail_io("my_kvsname", "it has no name");
    if (put) {
        snprintf(line, sizeof line, "cmd=put kvsname=%s key=%s value=%s\n", space, key, value);
        TD_TRY(request(fd, line, "put_result", answer, deadline));
    }
    TD_TRY(request(fd, "cmd=barrier_in\n", "barrier_out", answer, deadline));
    if (put)
        return TD_OK;
    snprintf(line, sizeof line, "cmd=get kvsname=%s key=%s\n", space, key);
    TD_TRY(request(fd, line, "get_result", answer, deadline));
    return td__pmi_field(answer, "value", value, TD__KV_VALUE)
               ? TD_OK
               : fail_io("get_result", "rank 0 has put no value");
}
