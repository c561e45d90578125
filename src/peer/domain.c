/* The domain of a process; see domain.h. */
#include "peer/domain.h"

#include "base/fail.h"
#include "base/thread.h"
#include "os/socket.h"
#include "os/tls.h"
#include "os/trust.h"
#include "peer/endpoint_internal.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { LISTEN_MS = 10000, BATCH = 16, FORMER = 64 };

static pthread_mutex_t open_lock = PTHREAD_MUTEX_INITIALIZER;  /* held while a domain is opened */
static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER; /* for the table and `users` */
static LIST_HEAD(, td__domain) table;

/* Another thread of the parent may have held the locks. The domains stay the parent's. */
static void in_child(void)
{
    pthread_mutex_init(&open_lock, NULL);
    pthread_mutex_init(&table_lock, NULL);
    LIST_INIT(&table);
}

__attribute__((constructor)) static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, in_child);
}

/* ---- Requests -------------------------------------------------------------------------------- */

/* The endpoint for a request; marks it as served. */
static struct td__endpoint *begin_service(struct td__domain *domain, uint32_t number)
{
    pthread_mutex_lock(&domain->lock);
    struct td__endpoint *endpoint;
    TAILQ_FOREACH (endpoint, &domain->endpoints, link)
        if (endpoint->own.number == number)
            break;
    domain->served = endpoint;
    pthread_mutex_unlock(&domain->lock);
    return endpoint;
}

static void end_service(struct td__domain *domain)
{
    pthread_mutex_lock(&domain->lock);
    domain->served = NULL;
    pthread_cond_broadcast(&domain->idle);
    pthread_mutex_unlock(&domain->lock);
}

struct td__former_exclusion {
    struct td__former_exclusion *next;
    uint32_t number; /* of the endpoint */
    int rank;
    struct td__exclusion *exclusion;
};

static void free_former(struct td__former_exclusion *former)
{
    while (former) {
        struct td__former_exclusion *next = former->next;
        free(former->exclusion);
        free(former);
        former = next;
    }
}

/* Those whose processes may live; the oldest are dropped. */
void td__domain_keep_exclusions(struct td__domain *domain, const struct td__endpoint *endpoint)
{
    const struct td__card *peer;
    if (!atomic_load(&endpoint->exclusions))
        return;
    pthread_mutex_lock(&domain->lock);
    TD__PEER_FOREACH (peer, r, endpoint) {
        const struct td__exclusion *exclusion = td__exclusion_of(endpoint, r);
        struct td__former_exclusion *former = malloc(sizeof *former);
        if (exclusion && exclusion->pidfd < 0 && r != endpoint->rank && former) {
            *former = (struct td__former_exclusion){.next = domain->former,
                                                    .number = endpoint->own.number,
                                                    .rank = r,
                                                    .exclusion = td__exclusion_copy(exclusion)};
            domain->former = former;
        } else {
            free(former);
        }
    }
    struct td__former_exclusion *last = domain->former;
    for (int i = 1; last && i < FORMER; i++)
        last = last->next;
    if (last) {
        free_former(last->next);
        last->next = NULL;
    }
    pthread_mutex_unlock(&domain->lock);
}

static bool refuse_former(struct td__domain *domain, int fd, const uint8_t bytes[TD__REQUEST_SIZE])
{
    struct td__request request;
    bool refused = false;
    if (!td__request_read(bytes, TD__MAX_RANKS, &request))
        return false;
    pthread_mutex_lock(&domain->lock);
    for (const struct td__former_exclusion *at = domain->former; at && !refused; at = at->next)
        if (at->number == td__request_number(bytes) && at->rank == request.rank && at->exclusion) {
            td__exclusion_refuse(at->exclusion, fd);
            refused = true;
        }
    pthread_mutex_unlock(&domain->lock);
    return refused;
}

/* An endpoint is added before its card is published, so if it is not found, it has been closed. */
static void on_accepted(void *arg, int fd, bool local, const uint8_t bytes[TD__REQUEST_SIZE])
{
    struct td__domain *domain = arg;
    struct td__endpoint *endpoint = begin_service(domain, td__request_number(bytes));
    if (endpoint) {
        td__endpoint_take_request(endpoint, fd, local, bytes);
        end_service(domain);
    } else if (!refuse_former(domain, fd, bytes)) {
        td__reply(fd, TD__REPLY_LEFT);
        td__sock_close(fd);
    }
}

void td__domain_add(struct td__domain *domain, struct td__endpoint *endpoint)
{
    pthread_mutex_lock(&domain->lock);
    endpoint->own.number = ++domain->last_number;
    TAILQ_INSERT_TAIL(&domain->endpoints, endpoint, link);
    pthread_mutex_unlock(&domain->lock);
}

void td__domain_remove(struct td__domain *domain, struct td__endpoint *endpoint)
{
    pthread_mutex_lock(&domain->lock);
    TAILQ_REMOVE(&domain->endpoints, endpoint, link);
    while (domain->served == endpoint)
        td__cond_wait(&domain->idle, &domain->lock, TD__NEVER);
    pthread_mutex_unlock(&domain->lock);
}

/* ---- Listening ------------------------------------------------------------------------------- */

/* Wakes the waiters of the endpoints whose descriptors are ready. */
static void wake_waiters(struct td__domain *domain)
{
    struct epoll_event ready[BATCH];
    int count = epoll_wait(domain->wake_set, ready, BATCH, 0);
    for (int i = 0; i < count; i++) {
        struct td__endpoint *endpoint = begin_service(domain, ready[i].data.u32);
        if (!endpoint)
            continue;
        td__endpoint_wake_waiters(endpoint);
        end_service(domain);
    }
}

static void *run_listener(void *arg)
{
    struct td__domain *domain = arg;
    struct pollfd fds[3] = {{.fd = td__auth_listener_fd(domain->listener), .events = POLLIN},
                            {.fd = domain->wake, .events = POLLIN},
                            {.fd = domain->wake_set, .events = POLLIN}};
    for (int timeout = 0; !fds[1].revents; timeout = td__auth_listener_turn(domain->listener)) {
        poll(fds, 3, timeout);
        if (fds[2].revents)
            wake_waiters(domain);
    }
    td__auth_listener_close(domain->listener);
    return NULL;
}

static td_status open_listener(struct td__domain *domain, int tcp_fd, int local_fd)
{
    struct td__auth_listener_options options = {.secret = &domain->secret,
                                                .purpose = "link",
                                                .request_size = TD__REQUEST_SIZE,
                                                .fn = on_accepted,
                                                .arg = domain};
    memcpy(options.identity, domain->identity, TD__IDENTITY_SIZE);
    TD_TRY(td__auth_listener_open(tcp_fd, local_fd, &options, &domain->listener));
    domain->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    domain->wake_set = epoll_create1(EPOLL_CLOEXEC);
    int error = domain->wake < 0 || domain->wake_set < 0
                    ? errno
                    : td__thread_start(&domain->thread, "td-endpoint", run_listener, domain);
    if (!error)
        return TD_OK;
    td__auth_listener_close(domain->listener);
    if (domain->wake >= 0)
        close(domain->wake);
    if (domain->wake_set >= 0)
        close(domain->wake_set);
    return td_fail(TD_ERR_SYSTEM, "no thread to listen for other ranks: %s", td__errno_text(error));
}

static void close_listener(struct td__domain *domain)
{
    eventfd_write(domain->wake, 1);
    pthread_join(domain->thread, NULL);
    close(domain->wake);
    close(domain->wake_set);
}

/* A unix socket in the abstract namespace, under a name that cannot be guessed. */
static td_status listen_locally(char name[TD__CARD_TEXT], int *fd)
{
    struct td__address_list list;
    uint8_t random[8];
    bool retry;
    TD_TRY(td__random(random, sizeof random));
    int length = snprintf(name, TD__CARD_TEXT, "unix:@tandem-link-%d-", (int)getpid());
    for (size_t i = 0; i < sizeof random; i++)
        length += snprintf(name + length, TD__CARD_TEXT - (size_t)length, "%02x", random[i]);
    TD_TRY(td__resolve(name, 0, TD__NEVER, &list, &retry));
    *fd = td__listen_on(&list.at[0]);
    if (*fd < 0)
        return td_fail(TD_ERR_SYSTEM, "cannot listen at %s: %s", name, td__errno_text(-*fd));
    return TD_OK;
}

static td_status start_listener(struct td__domain *domain)
{
    int tcp_fd, local_fd;
    struct td__secret bound = domain->secret; /* it is bound already */
    TD_TRY(td__listen_trusted(domain->host, 0, "link", &bound, td__deadline_in_ms(LISTEN_MS),
                              &tcp_fd, &domain->port));
    td_status status = listen_locally(domain->local, &local_fd);
    if (status) {
        close(tcp_fd);
        return status;
    }
    return open_listener(domain, tcp_fd, local_fd);
}

/* ---- Life ------------------------------------------------------------------------------------ */

static void free_domain(struct td__domain *domain)
{
    pthread_mutex_destroy(&domain->view_lock);
    pthread_cond_destroy(&domain->idle);
    pthread_mutex_destroy(&domain->lock);
    free_former(domain->former);
    free(domain);
}

static td_status make_domain(const char *host, const struct td__secret *secret,
                             struct td__domain **domain_out)
{
    struct td__domain *domain = calloc(1, sizeof *domain);
    if (!domain)
        return td__fail_nomem("endpoint");
    domain->users = 1;
    TAILQ_INIT(&domain->endpoints);
    domain->secret = *secret;
    snprintf(domain->host, sizeof domain->host, "%.100s", host);
    pthread_mutex_init(&domain->lock, NULL);
    pthread_mutex_init(&domain->view_lock, NULL);
    td__cond_init(&domain->idle);
    td_status status = td__random(domain->identity, sizeof domain->identity);
    if (!status)
        status = start_listener(domain);
    if (status) {
        free_domain(domain);
        return status;
    }
    *domain_out = domain;
    return TD_OK;
}

/* A listener beyond loopback listens on every address of the machine. */
static bool fits(const struct td__domain *domain, const char *host, const struct td__secret *secret)
{
    bool same_address = td__host_is_loopback(host) ? !strcmp(domain->host, host)
                                                   : !td__host_is_loopback(domain->host);
    return same_address && domain->secret.given == secret->given &&
           domain->secret.tls == secret->tls && domain->secret.insecure == secret->insecure &&
           !memcmp(domain->secret.key, secret->key, sizeof secret->key);
}

static struct td__domain *find_domain(const char *host, const struct td__secret *secret)
{
    pthread_mutex_lock(&table_lock);
    struct td__domain *domain;
    LIST_FOREACH (domain, &table, link)
        if (fits(domain, host, secret))
            break;
    if (domain)
        domain->users++;
    pthread_mutex_unlock(&table_lock);
    return domain;
}

td_status td__domain_open(const char *host, struct td__domain **domain)
{
    struct td__secret secret;
    td_status status = TD_OK;
    TD_TRY(td__secret_load(NULL, &secret));
    if (td__host_is_loopback(host)) /* the identity distinguishes the jobs of a user */
        TD_TRY(td__secret_bind(&secret, "links"));
    pthread_mutex_lock(&open_lock);
    *domain = find_domain(host, &secret);
    if (!*domain) {
        status = make_domain(host, &secret, domain);
        pthread_mutex_lock(&table_lock);
        if (!status)
            LIST_INSERT_HEAD(&table, *domain, link);
        pthread_mutex_unlock(&table_lock);
    }
    pthread_mutex_unlock(&open_lock);
    return status;
}

void td__domain_close(struct td__domain *domain)
{
    pthread_mutex_lock(&table_lock);
    bool last = --domain->users == 0;
    if (last)
        LIST_REMOVE(domain, link);
    pthread_mutex_unlock(&table_lock);
    if (!last)
        return;
    td__failure_detector_end(domain);
    close_listener(domain);
    free_domain(domain);
}
