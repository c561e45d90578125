/* Proven connections; see trust.h. */
#include "os/trust.h"

#include "base/fail.h"
#include "base/host.h"
#include "base/text.h"
#include "os/socket.h"
#include "os/tls.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define MS ((int64_t)1000000)

enum {
    RESOLVE_LIMIT_MS = 10000,
    ATTEMPT_LIMIT_MS = 5000,
    WARN_AFTER_MS = 10000,
};

static td_status refuse_without_secret(const char *what, const char *purpose, const char *host)
{
    return td_fail(TD_ERR_AUTH,
                   "%s the %s at %s needs the job's secret, since it is not on this host: set "
                   "TANDEM_SECRET (or TANDEM_SECRET_FILE) to the same text on every host, or "
                   "TANDEM_INSECURE=1 on a network without other users",
                   what, purpose, host);
}

/* What must hold before anything is tried. Unix sockets never leave the host, and need no TLS. */
static td_status check_settings(const char *what, const char *purpose, const char *host,
                                const struct td__secret *secret)
{
    if (secret->tls && !secret->given && strncmp(host, "unix:", 5) != 0)
        return td_fail(
            TD_ERR_AUTH,
            "%s the %s at %s: TANDEM_TLS=1 needs the job's secret, which is the key: set "
            "TANDEM_SECRET (or TANDEM_SECRET_FILE) to the same text on every host",
            what, purpose, host);
    /* A user's secret that cannot be read fails at once, not when the other side is there. */
    struct td__secret tried = *secret;
    return td__host_is_loopback(host) ? td__secret_bind(&tried, host) : TD_OK;
}

/* What was tried and how it went, for the final message: "127.0.0.1:29500 (Connection refused)". */
struct attempts {
    char text[1024];
    bool unanswered; /* at least one has not answered in any way */
    bool refused;    /* nothing listens at any of the addresses */
};

static void note_attempt(struct attempts *attempts, const struct td__address *address,
                         const char *outcome)
{
    char where[TD__ADDRESS_TEXT];
    td__text_add(attempts->text, sizeof attempts->text, "%s%s (%s)", *attempts->text ? ", " : "",
                 td__address_text(address, where), outcome);
}

/* Where to, and how. */
struct way {
    const char *purpose;
    const uint8_t *identity; /* or NULL */
    const struct td__secret *secret;
    td__deadline deadline;
};

static td_status fail_other_tls(const char *where, bool here)
{
    return td_fail(
        TD_ERR_AUTH,
        "the server at %s %s: TANDEM_TLS is %s here, but %s there; set it to the same value "
        "on every host",
        where, here ? "does not encrypt" : "wants TLS", here ? "1" : "not 1", here ? "not 1" : "1");
}

/* It has refused the hello. A client has an identity from its owner, through a store
 * that was proven already. */
static td_status fail_refused(const struct td__auth *auth, const char *where, bool one_of_many)
{
    if (one_of_many)
        return td_fail(
            TD_ERR_AUTH,
            "the server at %s is not the one that is meant: something on the network leads "
            "connections elsewhere, or TANDEM_SECRET differs there",
            where);
    if (auth->secret.origin)
        return td_fail(TD_ERR_AUTH, "the server at %s refused the job's secret: %s", where,
                       auth->secret.origin);
    return td_fail(
        TD_ERR_AUTH,
        "the server at %s refused the job's secret: TANDEM_SECRET is %s (or it is no %s of "
        "Tandem)",
        where,
        auth->secret.given ? "not the same, or missing, there"
                           : "set there, but missing here, or it belongs to another user's job",
        auth->purpose);
}

/* Receives the challenge. *answered: bytes have arrived, though perhaps no challenge; *refused: they are a
 * refusal. */
static int receive_challenge(int fd, uint8_t challenge[TD__CHALLENGE_SIZE], td__deadline deadline,
                             bool *answered, bool *refused)
{
    int error = td__recv_all(fd, challenge, 1, deadline);
    *answered = !error;
    if (error)
        return error;
    td__deadline soon = td__deadline_earlier(deadline, td__deadline_in_ms(ATTEMPT_LIMIT_MS));
    error = td__recv_all(fd, challenge + 1, TD__REFUSAL_SIZE - 1, soon);
    bool begins_so = !error && td__auth_is_refusal(challenge);
    if (!error)
        error = td__recv_all(fd, challenge + TD__REFUSAL_SIZE,
                             TD__CHALLENGE_SIZE - TD__REFUSAL_SIZE, soon);
    *refused = error && begins_so;
    return error;
}

/* Both directions of the proof. A connection that ends without an answer, in order or by a reset, belongs to a
 * server that is ending, that has not started yet behind a proxy, or that has too many clients at the moment.
 * The next attempt may succeed: *passing is then the errno. */
static td_status prove(int fd, struct td__auth *auth, const char *where, const struct way *way,
                       int *passing)
{
    td__deadline deadline = way->deadline;
    uint8_t hello[TD__HELLO_SIZE], challenge[TD__CHALLENGE_SIZE], proof[TD__PROOF_SIZE];
    TD_TRY(td__auth_hello(auth, hello));
    bool answered = false, refused = false;
    int error = td__send_all(fd, hello, sizeof hello, deadline);
    if (!error)
        error = receive_challenge(fd, challenge, deadline, &answered, &refused);
    if (refused)
        return fail_refused(auth, where, way->identity);
    bool right = !error && td__auth_check_challenge(auth, challenge);
    if (!error && !right && auth->other_tls)
        return fail_other_tls(where, auth->tls);
    if (answered && !right && !td__deadline_passed(deadline))
        return td_fail(TD_ERR_AUTH,
                       "the server at %s does not prove the job's secret: TANDEM_SECRET differs, "
                       "or it is no %s of Tandem",
                       where, auth->purpose);
    td__auth_proof(auth, proof);
    if (!error)
        error = td__send_all(fd, proof, sizeof proof, deadline);
    if (!error)
        return TD_OK;
    *passing = error;
    return TD_ERR_PEER;
}

static td_status encrypt(int fd, const struct td__auth *auth, const char *where,
                         td__deadline deadline, int *passing, int *out)
{
    struct td__tls_failure failure = {0};
    uint8_t key[TD__MAC_SIZE];
    td__auth_key(auth, key);
    td_status status = td__tls_wrap(fd, false, key, deadline, &failure);
    *passing = failure.error;
    if (!status)
        *out = fd;
    if (status == TD_ERR_AUTH && !failure.error)
        return td_fail(
            status,
            "the server at %s has proven the job's secret, but not in TLS (%s): the bytes "
            "may be changed on the way",
            where, failure.reason);
    return status;
}

/* Makes a connection to the server at `where` a trusted one. `fd` is taken over, also on failure. */
static td_status authenticate(int fd, bool local, const char *where, const struct way *way,
                              int *passing, int *out)
{
    struct td__auth auth = {
        .secret = *way->secret, .purpose = way->purpose, .tls = way->secret->tls && !local};
    if (way->identity)
        memcpy(auth.identity, way->identity, sizeof auth.identity);
    if (!local)
        td__tune_tcp(fd);
    td_status status = td__secret_bind(&auth.secret, where);
    if (!status)
        status = prove(fd, &auth, where, way, passing);
    if (status)
        close(fd);
    else if (auth.tls)
        status = encrypt(fd, &auth, where, way->deadline, passing, out);
    else
        *out = fd;
    return status;
}

/* The unix socket that belongs to a server at a TCP address; false when that is not on loopback. */
static bool shortcut_of(const struct td__address *tcp, const char *purpose,
                        struct td__address *local)
{
    char text[TD__ADDRESS_TEXT];
    if (tcp->any.sa_family == AF_UNIX || !td__address_is_local(tcp))
        return false;
    *local = (struct td__address){.local = {.sun_family = AF_UNIX}};
    int length = snprintf(local->local.sun_path + 1, sizeof local->local.sun_path - 1,
                          "tandem-%s-%s", purpose, td__address_text(tcp, text));
    local->size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
    return true;
}

/* Whatever fails here, TCP is tried next, and says why. */
static bool connect_shortcut(const struct td__address *tcp, const struct way *way, int *out)
{
    struct td__address local;
    char where[TD__ADDRESS_TEXT];
    int passing;
    if (!shortcut_of(tcp, way->purpose, &local))
        return false;
    int fd = td__connect_to(&local, way->deadline);
    if (fd < 0)
        return false;
    if (!td__peer_is_us(fd)) {
        close(fd);
        return false;
    }
    return !authenticate(fd, true, td__address_text(tcp, where), way, &passing, out);
}

int td__listen_shortcut(int tcp_fd, const char *purpose)
{
    struct td__address tcp, local;
    td__local_address(tcp_fd, &tcp);
    bool everywhere = (tcp.any.sa_family == AF_INET && !tcp.v4.sin_addr.s_addr) ||
                      (tcp.any.sa_family == AF_INET6 && IN6_IS_ADDR_UNSPECIFIED(&tcp.v6.sin6_addr));
    if (everywhere)
        tcp = (struct td__address){.v4 = {.sin_family = AF_INET,
                                          .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                                          .sin_port = htons((uint16_t)td__address_port(&tcp))},
                                   .size = sizeof tcp.v4};
    if (!shortcut_of(&tcp, purpose, &local))
        return -1;
    int fd = td__listen_on(&local);
    return fd < 0 ? -1 : fd;
}

/* Abstract names belong to the first process that binds them, so another user can hold one that can be guessed. A
 * server then takes "@name-1" and so on, and its clients look at all of them. False where there is no such
 * name. */
static bool name_beside(const struct td__address *first, int number, struct td__address *other)
{
    char end[8];
    size_t length = (size_t)snprintf(end, sizeof end, "-%d", number);
    if (first->any.sa_family != AF_UNIX || first->local.sun_path[0] ||
        first->size + length > sizeof first->local)
        return false;
    *other = *first;
    memcpy((char *)&other->local + first->size, end, length);
    other->size += (socklen_t)length;
    return true;
}

static void add_names(struct td__address_list *list)
{
    while (list->count < TD__ADDRESS_LIST &&
           name_beside(&list->at[0], list->count, &list->at[list->count]))
        list->count++;
}

/* Tries all addresses once. When nothing listens at any, *silent is true and `attempts` says why. */
static td_status try_each(const struct td__address_list *list, const char *host,
                          const struct way *way, struct attempts *attempts, bool *silent, int *out)
{
    attempts->text[0] = '\0';
    attempts->refused = true;
    attempts->unanswered = false;
    for (int i = 0; i < list->count; i++) {
        const struct td__address *address = &list->at[i];
        if (!way->secret->given && !td__address_is_local(address) && !way->secret->insecure)
            continue;
        if (connect_shortcut(address, way, out))
            return TD_OK;
        td__deadline limit = td__deadline_earlier(way->deadline,
                                                  td__deadline_in_ms(ATTEMPT_LIMIT_MS));
        int fd = td__connect_to(address, limit);
        bool beside = i && address->any.sa_family == AF_UNIX; /* mostly, nothing listens there */
        attempts->refused &= fd == -ECONNREFUSED || fd == -ENOENT;
        if (fd == -EMFILE || fd == -ENFILE) /* trying again would not help */
            return td_fail(TD_ERR_SYSTEM, "cannot connect to the %s at %s: %s", way->purpose, host,
                           td__errno_text(-fd));
        if (fd < 0) {
            attempts->unanswered |= fd == -ETIMEDOUT;
            if (!beside)
                note_attempt(attempts, address, td__errno_text(-fd));
            continue;
        }
        char where[TD__ADDRESS_TEXT];
        bool local = address->any.sa_family == AF_UNIX;
        int passing = 0;
        td__address_text(address, where);
        if (local && !td__peer_is_us(fd)) {
            close(fd);
            if (list->count == 1)
                return td_fail(TD_ERR_AUTH, "the server at %s runs as another user", where);
            note_attempt(attempts, address, "another user listens there");
            continue;
        }
        td_status status = authenticate(fd, local, where, way, &passing, out);
        if (!status || !passing)
            return status;
        note_attempt(attempts, address,
                     passing == ENODATA ? "it closed the connection without an answer"
                                        : td__errno_text(passing));
    }
    if (!*attempts->text)
        return refuse_without_secret("connecting to", way->purpose, host);
    *silent = true;
    return TD_ERR_TIMEOUT;
}

td_status td__connect_trusted(const char *host, int port, const char *purpose,
                              const uint8_t *identity, const struct td__secret *secret,
                              td__deadline deadline, int *fd)
{
    struct td__address_list list, known = {0};
    struct attempts attempts = {0};
    int64_t start = td__now_ns(), pause = 2 * MS;
    td__deadline resolve_limit = td__deadline_earlier(deadline,
                                                      td__deadline_in_ms(RESOLVE_LIMIT_MS));
    struct way way = {
        .purpose = purpose, .identity = identity, .secret = secret, .deadline = deadline};
    bool warned = false;
    TD_TRY(check_settings("connecting to", purpose, host, secret));
    for (;;) {
        bool unresolved = false, silent = false;
        struct attempts tried = {0};
        td__deadline limit = td__deadline_earlier(deadline, td__deadline_in_ms(RESOLVE_LIMIT_MS));
        td_status status = td__resolve(host, port, limit, &list, &unresolved);
        if (!status && !identity)
            add_names(&list);
        if (!status)
            known = list;
        if (known.count) { /* what was found once is good enough when it is not found again */
            unresolved = false;
            status = try_each(&known, host, &way, &tried, &silent, fd);
        }
        /* An attempt that the deadline cut short says only that; the messages of earlier ones are kept. */
        if (silent && (!*attempts.text || !td__deadline_passed(deadline)))
            attempts = tried;
        if (!unresolved && !silent)
            return status;
        if (silent && identity && tried.refused)
            return td_fail(TD_ERR_PEER, "nothing listens at its address any more");

        /* The same is true of an attempt without time left. */
        int64_t left = (unresolved ? resolve_limit : deadline) - td__now_ns();
        bool last = left <= pause;
        if (last && left > 0)
            td__sleep_ns(left);
        if (last && unresolved)
            return status;
        if (last)
            return td_fail(TD_ERR_TIMEOUT,
                           "cannot reach the %s at %s, port %d, within %.3g s: tried %s%s%s%s%s",
                           purpose, host, port, (double)(td__now_ns() - start) / 1e9, attempts.text,
                           attempts.unanswered ? "; a firewall may drop what goes from " : "",
                           attempts.unanswered ? td__host_name() : "",
                           attempts.unanswered ? " to " : "", attempts.unanswered ? host : "");
        if (!warned && td__now_ns() - start > WARN_AFTER_MS * MS) {
            td_log(TD_LOG_WARN, "still waiting for the %s at %s, port %d: %s", purpose, host, port,
                   unresolved ? td__error_text() : attempts.text);
            warned = true;
        }
        td__sleep_ns(pause);
        pause = pause * 3 / 2 < 250 * MS ? pause * 3 / 2 : 250 * MS;
    }
}

static const struct td__address *first_of_family(const struct td__address_list *list, int family)
{
    for (int i = 0; i < list->count; i++)
        if (list->at[i].any.sa_family == family)
            return &list->at[i];
    return &list->at[0];
}

/* The file of a unix socket stays when its server is killed; nothing listens there then. */
static bool remove_dead_socket(const struct td__address *address)
{
    if (address->any.sa_family != AF_UNIX || !address->local.sun_path[0])
        return false;
    int fd = td__connect_to(address, td__deadline_in_ms(ATTEMPT_LIMIT_MS));
    if (fd >= 0)
        close(fd);
    return fd == -ECONNREFUSED && unlink(address->local.sun_path) == 0;
}

/* A name that another user holds, or one that is not known, is left for those beside it; a name of this user is in
 * use. */
static int listen_beside(struct td__address *address)
{
    struct td__address first = *address;
    int fd = -EADDRINUSE;
    for (int i = 1; fd == -EADDRINUSE && i < TD__ADDRESS_LIST; i++) {
        int held = td__connect_to(address, td__deadline_in_ms(ATTEMPT_LIMIT_MS));
        bool ours = held >= 0 && td__peer_is_us(held);
        if (held >= 0)
            close(held);
        if (ours || !name_beside(&first, i, address))
            break;
        fd = td__listen_on(address);
    }
    char there[TD__ADDRESS_TEXT], here[TD__ADDRESS_TEXT];
    if (fd >= 0)
        td_log(TD_LOG_WARN, "another user holds %s: listening at %s",
               td__address_text(&first, there), td__address_text(address, here));
    return fd;
}

td_status td__listen_trusted(const char *host, int port, const char *purpose,
                             struct td__secret *secret, td__deadline deadline, int *fd_out,
                             int *port_out)
{
    struct td__address_list list;
    bool retry;
    TD_TRY(check_settings("listening for", purpose, host, secret));
    TD_TRY(td__resolve(host, port, deadline, &list, &retry));
    struct td__address address = *first_of_family(&list, AF_INET);
    bool everywhere = !td__host_is_loopback(host) && (secret->given || secret->insecure);
    if (!everywhere && !td__address_is_local(&address))
        return refuse_without_secret("listening for", purpose, host);
    if (everywhere) {
        address = (struct td__address){.v6 = {.sin6_family = AF_INET6,
                                              .sin6_addr = IN6ADDR_ANY_INIT,
                                              .sin6_port = htons((uint16_t)port)},
                                       .size = sizeof address.v6};
    }
    int fd = td__listen_on(&address);
    if (fd == -EADDRINUSE && remove_dead_socket(&address))
        fd = td__listen_on(&address);
    if (fd == -EADDRINUSE && address.any.sa_family == AF_UNIX)
        fd = listen_beside(&address);
    if (fd == -EAFNOSUPPORT && everywhere) { /* a host without IPv6 */
        address = (struct td__address){
            .v4 = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)},
            .size = sizeof address.v4};
        fd = td__listen_on(&address);
    }
    char where[TD__ADDRESS_TEXT];
    td__address_text(&address, where);
    if (fd == -EADDRINUSE && address.any.sa_family == AF_UNIX)
        return td_fail(TD_ERR_SYSTEM, "cannot listen at %s: it is in use already", where);
    if (fd == -EADDRINUSE && !port)
        return td_fail(
            TD_ERR_SYSTEM,
            "no port is free for the %s at %s: all of net.ipv4.ip_local_port_range are in "
            "use, by programs or by connections that have ended a moment ago",
            purpose, where);
    if (fd == -EADDRINUSE)
        return td_fail(TD_ERR_SYSTEM,
                       "port %d is in use already (listening for the %s at %s): choose another one "
                       "with MASTER_PORT or --master-port, or end the program that has it",
                       port, purpose, where);
    if (fd < 0)
        return td_fail(TD_ERR_SYSTEM, "cannot listen for the %s at %s: %s", purpose, where,
                       td__errno_text(-fd));
    td__local_address(fd, &address);
    td_status status = td__secret_bind(secret, td__address_text(&address, where));
    if (status) {
        close(fd);
        return status;
    }
    *fd_out = fd;
    *port_out = td__address_port(&address);
    return TD_OK;
}
