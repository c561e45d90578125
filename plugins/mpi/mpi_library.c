/* MPI itself: initialising, finalising, its texts. */
#include "mpi_backend.h"

#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

enum { FINALIZE_S = 3, SPINS_ALONE = 100 };

struct mpi_library mpi = {.lock = PTHREAD_MUTEX_INITIALIZER};

static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
static bool is_open, is_ours;
static pid_t owner;

td_status mpi_check(int result, const char *what, const char *group)
{
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    if (result == MPI_SUCCESS)
        return TD_OK;
    mpi_enter();
    MPI_Error_string(result, text, &length);
    mpi_leave();
    for (char *at = text; *at; at++) /* MPICH's have lines */
        if (*at == '\n')
            *at = at[1] ? ' ' : '\0';
    return td_fail(TD_ERR_SYSTEM, "%s on group \"%s\": %s: %s", what, group, mpi.name, text);
}

/* "Open MPI v4.1.4, package: …" and "MPICH Version:\t4.0.2\nMPICH Release date: …". */
static void read_name(void)
{
    char text[MPI_MAX_LIBRARY_VERSION_STRING] = "", kind[32] = "", number[32] = "";
    int length = 0;
    MPI_Get_library_version(text, &length);
    if (sscanf(text, "Open MPI v%31[0-9.]", number) == 1)
        snprintf(mpi.name, sizeof mpi.name, "Open MPI %s", number);
    else if (sscanf(text, "%31[A-Z] Version: %31[0-9.]", kind, number) == 2)
        snprintf(mpi.name, sizeof mpi.name, "%s %s", kind, number);
    else
        snprintf(mpi.name, sizeof mpi.name, "%.60s", text);
}

static void *leave_after_all(void *status)
{
    nanosleep(&(struct timespec){.tv_sec = FINALIZE_S}, NULL);
    _exit((int)(intptr_t)status);
}

/* MPI_Finalize() waits for all processes. A process that has not left its groups in order would wait for ranks that wait
 * for it; without the call, the launcher ends the job. If a rank may be dead, it must not wait for ever. */
static void finalize(int status, void *arg)
{
    pthread_t thread;
    int done = 0;
    (void)arg;
    MPI_Finalized(&done);
    if (done || getpid() != owner || atomic_load(&mpi.lost) || atomic_load(&mpi.groups))
        return;
    if (atomic_load(&mpi.failed) &&
        pthread_create(&thread, NULL, leave_after_all, (void *)(intptr_t)status))
        return;
    MPI_Finalize();
}

static td_status initialise(void)
{
    int done = 0, level = MPI_THREAD_SINGLE;
    MPI_Finalized(&done);
    if (done)
        return td_fail(
            TD_ERR_STATE,
            "backend mpi: the program has called MPI_Finalize(); create groups before it");
    MPI_Initialized(&done);
    if (done) {
        MPI_Query_thread(&level);
        return level == MPI_THREAD_MULTIPLE ? (mpi.multiple = true, TD_OK) : TD_OK;
    }
    const char *wanted = getenv("TANDEM_MPI_THREADS");
    bool serialized = wanted && !strcmp(wanted, "serialized");
    if (MPI_Init_thread(NULL, NULL, serialized ? MPI_THREAD_SERIALIZED : MPI_THREAD_MULTIPLE,
                        &level) != MPI_SUCCESS)
        return td_fail(TD_ERR_SYSTEM, "backend mpi: MPI_Init_thread() failed; start the program "
                                      "with mpirun");
    mpi.multiple = level == MPI_THREAD_MULTIPLE;
    /* MPI_Test() of MPICH takes the error handler of MPI_COMM_WORLD. */
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
    is_ours = true;
    owner = getpid();
    on_exit(finalize, NULL);
    return TD_OK;
}

static void hash(uint64_t *value, const void *data, size_t size)
{
    for (const unsigned char *at = data; size--; at++)
        *value = (*value ^ *at) * 0x100000001b3u;
}

/* Launchers bind ranks to processors of their own, or to some that they share, or not at all. */
static void find_processors(void)
{
    cpu_set_t cpus;
    char boot[64] = "";
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    ssize_t size = fd >= 0 ? read(fd, boot, sizeof boot) : 0;
    if (fd >= 0)
        close(fd);
    CPU_ZERO(&cpus);
    mpi.processors = sched_getaffinity(0, sizeof cpus, &cpus) ? 1 : CPU_COUNT(&cpus);
    mpi.place = 0xcbf29ce484222325u;
    hash(&mpi.place, boot, size > 0 ? (size_t)size : 0);
    hash(&mpi.place, &cpus, sizeof cpus);
}

static td_status learn(void)
{
    void *limit = NULL;
    int found = 0;
    find_processors();
    MPI_Comm_rank(MPI_COMM_WORLD, &mpi.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &mpi.size);
    MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &limit, &found);
    mpi.tag_limit = found ? *(int *)limit : 32767;
    read_name();
    return TD_OK;
}

td_status mpi_library_open(void)
{
    td_status status = TD_OK;
    pthread_mutex_lock(&opening);
    if (!is_open) {
        status = initialise();
        if (!status)
            status = learn();
        is_open = !status;
    }
    pthread_mutex_unlock(&opening);
    if (!status && is_ours && getpid() != owner)
        return td_fail(TD_ERR_STATE,
                       "backend mpi: this process was forked from one that uses MPI; start it with "
                       "mpirun instead");
    if (!status && atomic_load(&mpi.lost))
        return td_fail(
            TD_ERR_STATE,
            "backend mpi: %s cannot be used any more in this process, since a call of it "
            "was abandoned when a rank was lost; use the backend native",
            mpi.name);
    return status;
}

bool mpi_wait_turn(struct mpi_wait *wait)
{
    wait->turns++;
    if (wait->turns < wait->spins) {
#if defined __x86_64__
        __builtin_ia32_pause();
#endif
        return false;
    }
    int64_t now = mpi_now_ns();
    if (!wait->since_ns)
        wait->since_ns = wait->next_ns = now;
    /* On a busy host sched_yield() hardly lets others go first, but sleeping does. */
    int64_t waited = now - wait->since_ns, yields = wait->spins < SPINS_ALONE ? 30000 : 2000000;
    if (waited < yields)
        sched_yield();
    else
        nanosleep(&(struct timespec){.tv_nsec = waited < 100000000 ? 50000 : 500000}, NULL);
    if (now < wait->next_ns)
        return false;
    wait->next_ns = now + 1000000;
    return true;
}
