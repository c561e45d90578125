/* A thread that MPI does not let go.
 *
 * A collective of MPI waits for the data of other ranks, and a rank that dies meanwhile never sends them: no function of
 * MPI makes the others return. So the thread that blocks gets a signal, whose handler jumps out of MPI
 * (siglongjmp()). From then on MPI is not called any more in this process: its locks and its state may be in the middle
 * of something. What must not be interrupted is memory allocation, whose locks the rest of the process needs: the
 * handler leaves code of libc alone, but for the calls in which a thread waits, and the signal comes again. */
#include "mpi_backend.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <poll.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <ucontext.h>
#include <unistd.h>

#define GRACE_NS 250000000L /* MPI may return by itself, with an error */
#define PAUSE_NS 1000000L

enum { RESCUE_SIGNAL = SIGURG, WAITING = 7 }; /* which is ignored where nothing handles it */

struct range {
    uintptr_t start, end;
};

static struct range libc, waiting[WAITING];
static struct sigaction earlier;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* In the memory that every thread has from its start: the handler must not allocate. */
#define OF_THREAD static _Thread_local __attribute__((tls_model("initial-exec")))
OF_THREAD sigjmp_buf *way_out;
OF_THREAD volatile sig_atomic_t is_in_mpi;

/* ---- Where a thread is ------------------------------------------------------------------------------- */

static int find_libc(struct dl_phdr_info *info, size_t size, void *arg)
{
    uintptr_t address = (uintptr_t)arg;
    (void)size;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        uintptr_t start = info->dlpi_addr + part->p_vaddr;
        if (part->p_type == PT_LOAD && address >= start && address < start + part->p_memsz) {
            libc = (struct range){start, start + part->p_memsz};
            return 1;
        }
    }
    return 0;
}

static struct range function(void *address)
{
    Dl_info info;
    const ElfW(Sym) *symbol = NULL;
    if (!dladdr1(address, &info, (void **)&symbol, RTLD_DL_SYMENT) || !symbol || !info.dli_saddr)
        return (struct range){0, 0};
    return (struct range){(uintptr_t)info.dli_saddr, (uintptr_t)info.dli_saddr + symbol->st_size};
}

static bool within(const struct range *range, uintptr_t at)
{
    return at >= range->start && at < range->end;
}

static bool may_jump(const ucontext_t *context)
{
#if defined __x86_64__
    uintptr_t at = (uintptr_t)context->uc_mcontext.gregs[REG_RIP];
#elif defined __aarch64__
    uintptr_t at = context->uc_mcontext.pc;
#else
    (void)context;
    return true;
#endif
#if defined __x86_64__ || defined __aarch64__
    for (int i = 0; i < WAITING; i++)
        if (within(&waiting[i], at))
            return true;
    return !within(&libc, at);
#endif
}

static void on_signal(int number, siginfo_t *info, void *context)
{
    if (is_in_mpi && may_jump(context)) {
        is_in_mpi = 0;
        siglongjmp(*way_out, 1);
    }
    if (is_in_mpi)
        return;
    if (earlier.sa_flags & SA_SIGINFO)
        earlier.sa_sigaction(number, info, context);
    else if (earlier.sa_handler != SIG_DFL && earlier.sa_handler != SIG_IGN)
        earlier.sa_handler(number);
}

static void install(void)
{
    void *calls[WAITING] = {(void *)sched_yield,    (void *)poll,   (void *)epoll_wait,
                            (void *)nanosleep,      (void *)usleep, (void *)select,
                            (void *)clock_nanosleep};
    struct sigaction action = {.sa_sigaction = on_signal, .sa_flags = SA_SIGINFO | SA_RESTART};
    dl_iterate_phdr(find_libc, (void *)malloc);
    for (int i = 0; i < WAITING; i++)
        waiting[i] = function(calls[i]);
    sigemptyset(&action.sa_mask);
    sigaction(RESCUE_SIGNAL, &action, &earlier);
}

/* ---- Blocking, and taking out -------------------------------------------------------------------------- */

/* The thread that takes this one out uses its id, and the group. */
static void await_rescuer(const struct mpi_group *group)
{
    while (atomic_load(&group->rescuing))
        nanosleep(&(struct timespec){.tv_nsec = PAUSE_NS}, NULL);
}

/* After the jump: the handler's signal is still blocked. */
static td_status come_out(struct mpi_group *group)
{
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, RESCUE_SIGNAL);
    atomic_store(&mpi.lost, true);
    atomic_store(&group->blocked, false);
    await_rescuer(group);
    pthread_sigmask(SIG_UNBLOCK, &signals, NULL);
    td_log(TD_LOG_WARN,
           "group \"%s\": a call of %s was abandoned; this process cannot use MPI any more",
           group->context->name, mpi.name);
    return mpi_failure(group);
}

td_status mpi_run_blocking(struct mpi_group *group, int (*fn)(void *arg), void *arg, int *result)
{
    sigjmp_buf here;
    if (sigsetjmp(here, 0))
        return come_out(group);
    way_out = &here;
    group->blocked_thread = pthread_self();
    is_in_mpi = 1;
    atomic_store(&group->blocked, true);
    if (atomic_load(&group->failed))
        mpi_rescue(group);
    *result = fn(arg);
    is_in_mpi = 0;
    atomic_store(&group->blocked, false);
    await_rescuer(group);
    return TD_OK;
}

static void *take_out(void *arg)
{
    struct mpi_group *group = arg;
    int64_t end = mpi_now_ns() + GRACE_NS;
    while (atomic_load(&group->blocked)) {
        if (mpi_now_ns() >= end)
            pthread_kill(group->blocked_thread, RESCUE_SIGNAL);
        nanosleep(&(struct timespec){.tv_nsec = PAUSE_NS}, NULL);
    }
    atomic_store(&group->rescuing, false);
    return NULL;
}

void mpi_rescue(struct mpi_group *group)
{
    pthread_t thread;
    sigset_t all, before;
    pthread_once(&once, install);
    if (!atomic_load(&group->blocked) || atomic_exchange(&group->rescuing, true))
        return;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (pthread_create(&thread, NULL, take_out, group))
        atomic_store(&group->rescuing, false);
    else
        pthread_detach(thread);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}
