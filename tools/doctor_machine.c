/* What a job needs of the machine: names, interfaces, a clock, the secret, shared memory, limits. Each check prints
 * its lines, and notes what must be alike on all nodes. */
#include "doctor_internal.h"

#include "base/fail.h"
#include "base/host.h"
#include "base/text.h"
#include "launch/node.h"
#include "os/address.h"
#include "os/process.h"
#include "os/socket.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <inttypes.h>
#include <net/if.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/timex.h>
#include <sys/uio.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    RESOLVE_MS = 10000,
    FILES_LEAST = 128, /* a rank needs about 30 descriptors, and the store one for each rank */
    FILES_ENOUGH = 1024,
    SECRET_ENOUGH = 16, /* characters */
};

/* ---- Names and interfaces ----------------------------------------------------------------------- */

static void check_host(struct doctor_findings *findings)
{
    char full[HOST_NAME_MAX + 1] = "";
    struct td__address_list list;
    struct utsname system;
    bool retry;
    gethostname(full, sizeof full - 1);
    uname(&system);
    doctor_fact(findings, "machine", "%s", system.machine);
    td_status status = td__resolve(full, 0, td__deadline_in_ms(RESOLVE_MS), &list, &retry);
    if (status) /* a job needs only the name of node 0 */
        doctor_report(findings, DOCTOR_NOTE, "host", "%s, which no name service knows; Linux %s",
                      full, system.release);
    else
        doctor_report(findings, DOCTOR_OK, "host", "%s, Linux %s on %s", full, system.release,
                      system.machine);
}

bool doctor_master_elsewhere(const struct td__run_options *options)
{
    return options->node_rank == 0 && !options->local_addr &&
           !td__host_is_here(options->host, td__deadline_in_ms(RESOLVE_MS));
}

/* The address of the store as this node resolves it. A name that means another machine on each node is the classic
 * mistake. */
static void check_master(struct doctor_findings *findings, const struct td__run_options *options)
{
    struct td__address_list list;
    char all[DOCTOR_VALUE] = "", one[TD__ADDRESS_TEXT];
    bool retry, loopback = true;
    if (td__resolve(options->host, options->port, td__deadline_in_ms(RESOLVE_MS), &list, &retry)) {
        doctor_report(findings, DOCTOR_FAIL, "master", "%s", td__error_text());
        return;
    }
    for (int i = 0; i < list.count; i++) {
        td__address_host(&list.at[i], one, sizeof one);
        td__text_add(all, sizeof all, "%s%s", *all ? ", " : "", one);
        loopback = loopback && td__address_is_local(&list.at[i]);
    }
    const char *is = strcmp(all, options->host) != 0 ? " is " : "";
    const char *what = *is ? all : "";
    if (doctor_master_elsewhere(options))
        doctor_report(findings, DOCTOR_FAIL, "master",
                      "%s%s%s, which is no address of this machine, though this is node 0: "
                      "--master-addr must lead to node 0",
                      options->host, is, what);
    else if (options->node_rank > 0 && loopback)
        doctor_report(findings, DOCTOR_NOTE, "master",
                      "%s%s%s leads to this machine itself: right only if node 0 is on it, too",
                      options->host, is, what);
    else
        doctor_report(findings, DOCTOR_OK, "master", "%s%s%s, port %d", options->host, is, what,
                      options->port);
}

static int64_t number_in(const char *interface, const char *name)
{
    char path[128], text[32];
    snprintf(path, sizeof path, "/sys/class/net/%s/%s", interface, name);
    return td__text_read(path, text, sizeof text) ? strtoll(text, NULL, 10) : -1;
}

/* MTU by ioctl(), not from /sys, which may be that of another network namespace. */
static int mtu_of(const char *interface)
{
    struct ifreq request = {0};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    snprintf(request.ifr_name, sizeof request.ifr_name, "%s", interface);
    int mtu = fd >= 0 && !ioctl(fd, SIOCGIFMTU, &request) ? request.ifr_mtu : -1;
    if (fd >= 0)
        close(fd);
    return mtu;
}

/* The text of an address of IPv4 or IPv6; false for others. */
static bool address_text(const struct sockaddr *from, char text[TD__ADDRESS_TEXT])
{
    struct td__address address = {.size = sizeof address};
    if (!from || (from->sa_family != AF_INET && from->sa_family != AF_INET6))
        return false;
    memcpy(&address, from, from->sa_family == AF_INET ? sizeof address.v4 : sizeof address.v6);
    td__address_host(&address, text, TD__ADDRESS_TEXT);
    return true;
}

int doctor_mtu(const char *address)
{
    struct ifaddrs *all;
    int mtu = -1;
    if (getifaddrs(&all))
        return -1;
    for (struct ifaddrs *at = all; at; at = at->ifa_next) {
        char text[TD__ADDRESS_TEXT];
        if (address_text(at->ifa_addr, text) && !strcmp(text, address))
            mtu = mtu_of(at->ifa_name);
    }
    freeifaddrs(all);
    return mtu;
}

static bool is_link_local(const struct sockaddr *address)
{
    return address->sa_family == AF_INET6 &&
           IN6_IS_ADDR_LINKLOCAL(&((const struct sockaddr_in6 *)address)->sin6_addr);
}

static void check_interfaces(struct doctor_findings *findings, bool needed)
{
    struct ifaddrs *all;
    int found = 0;
    if (getifaddrs(&all)) {
        doctor_report(findings, DOCTOR_NOTE, "interface", "they cannot be listed: %s",
                      td__errno_text(errno));
        return;
    }
    for (struct ifaddrs *at = all; at; at = at->ifa_next) {
        char text[TD__ADDRESS_TEXT], speed[48] = "";
        if (!(at->ifa_flags & IFF_UP) || (at->ifa_flags & IFF_LOOPBACK) ||
            !address_text(at->ifa_addr, text) || is_link_local(at->ifa_addr))
            continue;
        int64_t megabits = number_in(at->ifa_name, "speed");
        if (megabits > 0)
            snprintf(speed, sizeof speed, ", %" PRId64 " Mb/s", megabits);
        doctor_report(findings, at->ifa_flags & IFF_RUNNING ? DOCTOR_OK : DOCTOR_NOTE, "interface",
                      "%s %s, MTU %d%s%s", at->ifa_name, text, mtu_of(at->ifa_name), speed,
                      at->ifa_flags & IFF_RUNNING ? "" : "; it has no carrier");
        found++;
    }
    freeifaddrs(all);
    if (!found)
        doctor_report(findings, needed ? DOCTOR_FAIL : DOCTOR_NOTE, "interface",
                      "there is none but loopback: other machines cannot be reached");
}

static void check_clock(struct doctor_findings *findings)
{
    struct timex state = {0};
    int verdict = adjtimex(&state);
    bool known = verdict >= 0, right = known && !(state.status & STA_UNSYNC);
    doctor_report(findings, right ? DOCTOR_OK : DOCTOR_NOTE, "clock", "%s",
                  right   ? "it is synchronised"
                  : known ? "the kernel says that it is not synchronised with others"
                          : "whether it is synchronised is not known");
}

/* ---- The secret --------------------------------------------------------------------------------- */

static void check_secret(struct doctor_findings *findings, const struct td__run_options *options)
{
    struct td__secret secret;
    struct td__job_secret job = {0};
    const char *text = getenv("TANDEM_SECRET"), *file = getenv("TANDEM_SECRET_FILE");
    if (td__job_secret_find(options, &job) || td__secret_load(NULL, &secret)) {
        doctor_report(findings, DOCTOR_FAIL, "secret", "%s", td__error_text());
        return;
    }
    doctor_fact(findings, "TANDEM_TLS", "%d", secret.tls);
    const char *tls = secret.tls ? "; what goes over the network is encrypted" : "";
    if (secret.given && text && strlen(text) < SECRET_ENOUGH)
        doctor_report(
            findings, DOCTOR_NOTE, "secret",
            "TANDEM_SECRET has %zu characters, and can be guessed: openssl rand -hex 32%s",
            strlen(text), tls);
    else if (secret.given)
        doctor_report(findings, DOCTOR_OK, "secret", "from %s%s",
                      text && *text   ? "TANDEM_SECRET"
                      : file && *file ? file
                                      : "the cluster's launcher",
                      tls);
    else if (secret.insecure)
        doctor_report(findings, DOCTOR_NOTE, "secret",
                      "none, and TANDEM_INSECURE=1: whoever reaches the ports can join a job");
    else
        doctor_report(findings, DOCTOR_OK, "secret",
                      "none is set: jobs of one machine only, with a secret of their own");
}

/* ---- Memory --------------------------------------------------------------------------------------- */

enum { SHARED = 1 << 20 };

static const char *try_shared_memory(void)
{
    signal(SIGXFSZ, SIG_IGN); /* EFBIG says it better */
    int fd = memfd_create("tdrun-doctor", MFD_CLOEXEC);
    if (fd < 0)
        return td__errno_text(errno);
    const char *why = NULL;
    int error = posix_fallocate(fd, 0, SHARED);
    void *map = error ? MAP_FAILED : mmap(NULL, SHARED, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (error || map == MAP_FAILED)
        why = td__errno_text(error ? error : errno);
    else
        munmap(map, SHARED);
    close(fd);
    return why;
}

/* Whether a process of this user may read the memory of another one, as ranks do. NULL, or why not. The child reads
 * that of its parent: the other way is permitted also where Yama forbids it to ranks, which are siblings. */
static const char *try_reading(void)
{
    static int word = 42;
    int status = 0, found = 0;
    /* The child would have a copy of what waits, and its _exit() writes that under ThreadSanitizer. */
    fflush(stdout);
    pid_t pid = fork();
    if (!pid) {
        struct iovec to = {&found, sizeof found}, from = {&word, sizeof word};
        _exit(process_vm_readv(getppid(), &to, 1, &from, 1, 0) == sizeof found ? 0 : errno);
    }
    bool ended = pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status);
    return ended && WEXITSTATUS(status) ? td__errno_text(WEXITSTATUS(status)) : NULL;
}

static void check_memory(struct doctor_findings *findings)
{
    struct rlimit files;
    const char *why = try_shared_memory();
    if (why && !getrlimit(RLIMIT_FSIZE, &files) && files.rlim_cur < SHARED)
        doctor_report(findings, DOCTOR_FAIL, "memory",
                      "ranks of this machine cannot share any: files are limited to %" PRIu64
                      " bytes (ulimit -f), and it counts as one",
                      (uint64_t)files.rlim_cur);
    else if (why)
        doctor_report(findings, DOCTOR_FAIL, "memory",
                      "ranks of this machine cannot share any: %s; TANDEM_TRANSPORT=tcp works "
                      "without",
                      why);
    else
        doctor_report(findings, DOCTOR_OK, "memory",
                      "ranks of this machine can share it (memfd; the size of /dev/shm does not "
                      "matter)");
    why = try_reading();
    if (why)
        doctor_report(
            findings, DOCTOR_NOTE, "memory",
            "process_vm_readv() is not permitted (%s): large messages from memory that is "
            "not td_alloc()'s are slower; in a container, its seccomp profile decides",
            why);
    int watch = td__process_watch((int)getpid(), NULL);
    if (watch < 0)
        doctor_report(findings, DOCTOR_NOTE, "memory",
                      "pidfd_open() does not work (%s): how a rank ended is not known to others",
                      td__errno_text(errno));
    else
        close(watch);
}

/* ---- Limits --------------------------------------------------------------------------------------- */

static void check_files(struct doctor_findings *findings, const struct td__run_options *options)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit))
        return;
    uint64_t now = limit.rlim_cur, most = limit.rlim_max;
    uint64_t least = FILES_LEAST + (uint64_t)options->nnodes;
    if (now < least)
        doctor_report(findings, DOCTOR_FAIL, "limits",
                      "%" PRIu64 " descriptors for a process are too few: ulimit -n %" PRIu64 "%s",
                      now, (uint64_t)FILES_ENOUGH,
                      most < FILES_ENOUGH ? ", which only an administrator can permit" : "");
    else if (now < FILES_ENOUGH)
        doctor_report(findings, DOCTOR_NOTE, "limits",
                      "%" PRIu64 " descriptors for a process are enough for about %" PRIu64
                      " ranks: ulimit -n raises it",
                      now, now - 64);
    else
        doctor_report(findings, DOCTOR_OK, "limits", "%" PRIu64 " descriptors for a process", now);
}

/* Locked memory is what network cards read and write by themselves: NCCL and MPI need it, Tandem itself does not. */
static void check_locked(struct doctor_findings *findings)
{
    struct rlimit limit;
    struct stat cards;
    if (getrlimit(RLIMIT_MEMLOCK, &limit))
        return;
    bool infiniband = !stat("/dev/infiniband", &cards);
    if (limit.rlim_cur == RLIM_INFINITY)
        doctor_report(findings, DOCTOR_OK, "limits", "any amount of locked memory");
    else
        doctor_report(findings, infiniband ? DOCTOR_FAIL : DOCTOR_OK, "limits",
                      "%" PRIu64 " KiB of locked memory%s", (uint64_t)limit.rlim_cur >> 10,
                      infiniband ? ": NCCL and MPI over InfiniBand need more (ulimit -l unlimited)"
                                 : ", which matters with InfiniBand only");
}

void doctor_check_machine(struct doctor_findings *findings, const struct td__run_options *options)
{
    static const char *const variables[] = {"TANDEM_HEARTBEAT", "TANDEM_TRANSPORT", "TANDEM_SIMD"};
    char boot[64] = "?";
    struct stat space = {0};
    bool alone = options->nnodes == 1;
    check_host(findings);
    if (!alone)
        check_master(findings, options);
    check_interfaces(findings, !alone && !td__host_is_loopback(options->host));
    check_clock(findings);
    check_secret(findings, options);
    check_memory(findings);
    check_files(findings, options);
    check_locked(findings);
    td__boot_name(boot);
    stat("/proc/self/ns/net", &space);
    doctor_fact(findings, "boot", "%s", boot);
    doctor_fact(findings, "network", "%llu", (unsigned long long)space.st_ino);
    doctor_fact(findings, "--nnodes", "%d", options->nnodes);
    for (size_t i = 0; i < sizeof variables / sizeof *variables; i++) {
        const char *value = getenv(variables[i]);
        doctor_fact(findings, variables[i], "%s", value && *value ? value : "not set");
    }
}
