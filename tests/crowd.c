/* A crowd; see crowd.h. */
#include "crowd.h"

#include "forks.h"
#include "runner.h"

#include "base/auth.h"
#include "base/clock.h"

#include <errno.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

struct member {
    int fd;
    int port;
    enum manner manner;
    size_t place; /* of its port in the list */
    long answered;
};

struct words {
    uint8_t overheard[8][TD__HELLO_SIZE], wrong[TD__HELLO_SIZE];
    uint8_t garbage[4096];
};

static void make_words(const struct crowd *crowd, struct words *words)
{
    for (int i = 0; i < 8 && crowd->ports[i]; i++) {
        struct td__auth right = {.purpose = crowd->purpose[i]};
        CHECK_OK(td__secret_load(crowd->secret, &right.secret));
        right.tls = right.secret.tls;
        CHECK_OK(td__auth_hello(&right, words->overheard[i]));
    }
    struct td__auth wrong = {.purpose = "link"};
    CHECK_OK(td__secret_load("a secret of another job", &wrong.secret));
    CHECK_OK(td__auth_hello(&wrong, words->wrong));
    CHECK_OK(td__random(words->garbage, sizeof words->garbage));
}

static void speak(const struct member *member, const struct words *words)
{
    const void *what = NULL;
    size_t size = 0;
    switch (member->manner) {
    case GARBAGE:
        what = words->garbage;
        size = sizeof words->garbage;
        break;
    case HALF_A_HELLO:
        what = words->overheard[member->place];
        size = TD__HELLO_SIZE / 2;
        break;
    case WRONG_SECRET:
        what = words->wrong;
        size = TD__HELLO_SIZE;
        break;
    case REPLAYED:
        what = words->overheard[member->place];
        size = TD__HELLO_SIZE;
        break;
    default:
        return;
    }
    (void)!send(member->fd, what, size, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static void open_member(const struct crowd *crowd, struct member *member, const struct words *words)
{
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                                  .sin_port = htons((uint16_t)member->port)};
    member->answered = 0;
    member->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (member->fd >= 0 && connect(member->fd, (struct sockaddr *)&address, sizeof address)) {
        close(member->fd);
        member->fd = -1;
    }
    if (member->fd < 0)
        return;
    speak(member, words);
    atomic_fetch_add(&crowd->state->opened, 1);
    if (member->manner == LEAVING) {
        close(member->fd);
        member->fd = -1;
        return;
    }
    atomic_fetch_add(&crowd->state->held, 1);
}

/* Takes what has come; closes what the server has closed. A hello of another secret gets a refusal, and one
 * that was overheard may get a challenge, where the server has forgotten it. */
static void look_at(const struct crowd *crowd, struct member *member)
{
    uint8_t bytes[256];
    ssize_t got = recv(member->fd, bytes, sizeof bytes, MSG_DONTWAIT);
    if (got > 0) {
        member->answered += got;
        long allowed = member->manner == REPLAYED       ? TD__CHALLENGE_SIZE
                       : member->manner == WRONG_SECRET ? TD__REFUSAL_SIZE
                                                        : 0;
        if (member->answered > allowed)
            atomic_fetch_add(&crowd->state->answers, got);
    } else if (got == 0 || errno != EAGAIN) {
        close(member->fd);
        member->fd = -1;
        atomic_fetch_sub(&crowd->state->held, 1);
    }
}

static void note_cpu(const struct crowd *crowd)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    atomic_store(&crowd->state->cpu_us, (usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000000L +
                                            usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

static void run_crowd(void *arg)
{
    const struct crowd *crowd = arg;
    struct member *members = calloc((size_t)crowd->count, sizeof *members);
    struct words *words = calloc(1, sizeof *words);
    int ports = 0;
    while (ports < 8 && crowd->ports[ports])
        ports++;
    make_words(crowd, words);
    for (int i = 0; i < crowd->count; i++) {
        enum manner manner = crowd->manner == MANNERS ? (enum manner)(i / ports % MANNERS)
                                                      : (enum manner)crowd->manner;
        members[i] = (struct member){.fd = -1,
                                     .port = crowd->ports[i % ports],
                                     .place = (size_t)(i % ports),
                                     .manner = manner};
    }
    for (;;) {
        for (int i = 0; i < crowd->count; i++) {
            if (members[i].fd >= 0)
                look_at(crowd, &members[i]);
            if (members[i].fd < 0)
                open_member(crowd, &members[i], words);
        }
        note_cpu(crowd);
        long wanted = atomic_load(&crowd->state->attempts_wanted);
        if (wanted && atomic_load(&crowd->state->opened) >= wanted)
            break;
        if (!wanted)
            td__sleep_ns(100000000);
    }
    free(members);
    free(words);
}

int crowd_size(int usual)
{
    struct rlimit limit;
    const char *wish = getenv("TD_TEST_STRANGERS");
    int count = wish && *wish ? atoi(wish) : usual;
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
    if (limit.rlim_max < (rlim_t)count + 100)
        td_test_skip("only %lu descriptors", (unsigned long)limit.rlim_max);
    return count;
}

static void raise_limit_and_run(void *arg)
{
    struct rlimit limit;
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
    limit.rlim_cur = limit.rlim_max;
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
    run_crowd(arg);
}

void crowd_start(struct crowd *crowd)
{
    if (!crowd->state)
        crowd->state = fork_shared(sizeof *crowd->state);
    crowd->pid = fork_start(raise_limit_and_run, crowd);
    CHECK_SOON(atomic_load(&crowd->state->opened) >= crowd->count);
}

void crowd_stop(struct crowd *crowd)
{
    if (atomic_load(&crowd->state->attempts_wanted))
        fork_join(crowd->pid);
    else
        fork_kill(crowd->pid, SIGKILL);
    CHECK_EQ(atomic_load(&crowd->state->answers), 0);
}
