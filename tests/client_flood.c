/* A flood of unauthenticated clients; see client_flood.h. */
#include "client_flood.h"

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

struct flood_client {
    int fd;
    int port;
    enum manner manner;
    size_t index; /* of its port in the list */
    long answered;
};

struct payloads {
    uint8_t recorded[8][TD__HELLO_SIZE], wrong[TD__HELLO_SIZE];
    uint8_t garbage[4096];
};

static void make_payloads(const struct client_flood *flood, struct payloads *payloads)
{
    for (int i = 0; i < 8 && flood->ports[i]; i++) {
        struct td__auth right = {.purpose = flood->purpose[i]};
        CHECK_OK(td__secret_load(flood->secret, &right.secret));
        right.tls = right.secret.tls;
        CHECK_OK(td__auth_hello(&right, payloads->recorded[i]));
    }
    struct td__auth wrong = {.purpose = "link"};
    CHECK_OK(td__secret_load("a secret of another job", &wrong.secret));
    CHECK_OK(td__auth_hello(&wrong, payloads->wrong));
    CHECK_OK(td__random(payloads->garbage, sizeof payloads->garbage));
}

static void send_payload(const struct flood_client *client, const struct payloads *payloads)
{
    const void *what = NULL;
    size_t size = 0;
    switch (client->manner) {
    case GARBAGE:
        what = payloads->garbage;
        size = sizeof payloads->garbage;
        break;
    case HALF_A_HELLO:
        what = payloads->recorded[client->index];
        size = TD__HELLO_SIZE / 2;
        break;
    case WRONG_SECRET:
        what = payloads->wrong;
        size = TD__HELLO_SIZE;
        break;
    case REPLAYED:
        what = payloads->recorded[client->index];
        size = TD__HELLO_SIZE;
        break;
    default:
        return;
    }
    (void)!send(client->fd, what, size, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static void open_client(const struct client_flood *flood, struct flood_client *client,
                        const struct payloads *payloads)
{
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                                  .sin_port = htons((uint16_t)client->port)};
    client->answered = 0;
    client->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (client->fd >= 0 && connect(client->fd, (struct sockaddr *)&address, sizeof address)) {
        close(client->fd);
        client->fd = -1;
    }
    if (client->fd < 0)
        return;
    send_payload(client, payloads);
    atomic_fetch_add(&flood->state->opened, 1);
    if (client->manner == LEAVING) {
        close(client->fd);
        client->fd = -1;
        return;
    }
    atomic_fetch_add(&flood->state->held, 1);
}

/* Reads, and closes connections that the server has closed. A hello with another secret gets a refusal, and a
 * replayed one may get a challenge when the server no longer remembers its nonce. */
static void poll_client(const struct client_flood *flood, struct flood_client *client)
{
    uint8_t bytes[256];
    ssize_t got = recv(client->fd, bytes, sizeof bytes, MSG_DONTWAIT);
    if (got > 0) {
        client->answered += got;
        long allowed = client->manner == REPLAYED       ? TD__CHALLENGE_SIZE
                       : client->manner == WRONG_SECRET ? TD__REFUSAL_SIZE
                                                        : 0;
        if (client->answered > allowed)
            atomic_fetch_add(&flood->state->answers, got);
    } else if (got == 0 || errno != EAGAIN) {
        close(client->fd);
        client->fd = -1;
        atomic_fetch_sub(&flood->state->held, 1);
    }
}

static void note_cpu(const struct client_flood *flood)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    atomic_store(&flood->state->cpu_us, (usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000000L +
                                            usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

static void run_flood(void *arg)
{
    const struct client_flood *flood = arg;
    struct flood_client *clients = calloc((size_t)flood->count, sizeof *clients);
    struct payloads *payloads = calloc(1, sizeof *payloads);
    int ports = 0;
    while (ports < 8 && flood->ports[ports])
        ports++;
    make_payloads(flood, payloads);
    for (int i = 0; i < flood->count; i++) {
        enum manner manner = flood->manner == MANNERS ? (enum manner)(i / ports % MANNERS)
                                                      : (enum manner)flood->manner;
        clients[i] = (struct flood_client){.fd = -1,
                                           .port = flood->ports[i % ports],
                                           .index = (size_t)(i % ports),
                                           .manner = manner};
    }
    for (;;) {
        for (int i = 0; i < flood->count; i++) {
            if (clients[i].fd >= 0)
                poll_client(flood, &clients[i]);
            if (clients[i].fd < 0)
                open_client(flood, &clients[i], payloads);
        }
        note_cpu(flood);
        long wanted = atomic_load(&flood->state->attempts_wanted);
        if (wanted && atomic_load(&flood->state->opened) >= wanted)
            break;
        if (!wanted)
            td__sleep_ns(100000000);
    }
    free(clients);
    free(payloads);
}

int client_flood_size(int usual)
{
    struct rlimit limit;
    const char *wanted = getenv("TD_TEST_CLIENTS");
    int count = wanted && *wanted ? atoi(wanted) : usual;
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
    run_flood(arg);
}

void client_flood_start(struct client_flood *flood)
{
    if (!flood->state)
        flood->state = fork_shared(sizeof *flood->state);
    flood->pid = fork_start(raise_limit_and_run, flood);
    CHECK_SOON(atomic_load(&flood->state->opened) >= flood->count);
}

void client_flood_stop(struct client_flood *flood)
{
    if (atomic_load(&flood->state->attempts_wanted))
        fork_join(flood->pid);
    else
        fork_kill(flood->pid, SIGKILL);
    CHECK_EQ(atomic_load(&flood->state->answers), 0);
}
