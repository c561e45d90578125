/* Socket addresses; see address.h.
 *
 * getaddrinfo() cannot be given a deadline, so a name is looked up by a thread that is left behind
 * when it takes too long; the query has a reference count, and the last user frees it. */
#include "os/address.h"

#include "base/fail.h"
#include "base/number.h"
#include "base/thread.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <net/if.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct question {
    pthread_mutex_t lock;
    pthread_cond_t answered;
    int holders;
    bool done;
    int error;        /* of getaddrinfo() */
    int system_error; /* the errno behind it, where it says EAI_SYSTEM */
    struct addrinfo *answers;
    char host[256];
};

static void release(struct question *question) /* holds the lock */
{
    bool last = --question->holders == 0;
    pthread_mutex_unlock(&question->lock);
    if (!last)
        return;
    if (question->answers)
        freeaddrinfo(question->answers);
    pthread_cond_destroy(&question->answered);
    pthread_mutex_destroy(&question->lock);
    free(question);
}

static void *look_up(void *arg)
{
    struct question *question = arg;
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_ADDRCONFIG};
    struct addrinfo *answers = NULL;
    int error = getaddrinfo(question->host, NULL, &hints, &answers);
    if (error) { /* a host with nothing but loopback configured still knows "localhost" */
        hints.ai_flags = 0;
        error = getaddrinfo(question->host, NULL, &hints, &answers);
    }
    int system_error = errno;
    pthread_mutex_lock(&question->lock);
    question->error = error;
    question->system_error = system_error;
    question->answers = answers;
    question->done = true;
    pthread_cond_signal(&question->answered);
    release(question);
    return NULL;
}

static void set_port(struct td__address *address, int port)
{
    if (address->any.sa_family == AF_INET)
        address->v4.sin_port = htons((uint16_t)port);
    else if (address->any.sa_family == AF_INET6)
        address->v6.sin6_port = htons((uint16_t)port);
}

static void take_answers(const struct addrinfo *answers, int port, struct td__address_list *list)
{
    list->count = 0;
    for (; answers && list->count < TD__ADDRESS_LIST; answers = answers->ai_next) {
        if (answers->ai_family != AF_INET && answers->ai_family != AF_INET6)
            continue;
        struct td__address *address = &list->at[list->count++];
        memset(address, 0, sizeof *address);
        memcpy(&address->any, answers->ai_addr, answers->ai_addrlen);
        address->size = answers->ai_addrlen;
        set_port(address, port);
    }
}

static td_status resolve_name(const char *host, int port, td__deadline deadline,
                              struct td__address_list *list, bool *retry)
{
    struct question *question = calloc(1, sizeof *question);
    if (!question)
        return td__fail_nomem("name look-up");
    pthread_mutex_init(&question->lock, NULL);
    td__cond_init(&question->answered);
    question->holders = 2;
    snprintf(question->host, sizeof question->host, "%s", host);

    pthread_t thread;
    int error = td__thread_start(&thread, "td-resolve", look_up, question);
    pthread_mutex_lock(&question->lock);
    if (error) {
        question->holders--;
        release(question);
        return td_fail(TD_ERR_SYSTEM, "name look-up of \"%s\": no thread (%s)", host,
                       td__errno_text(error));
    }
    pthread_detach(thread);
    while (!question->done && td__cond_wait(&question->answered, &question->lock, deadline))
        ;
    td_status status = TD_OK;
    if (!question->done) {
        status = td_fail(TD_ERR_TIMEOUT,
                         "host \"%s\" cannot be resolved: the name server did not answer in time",
                         host);
    } else if (question->error == EAI_SYSTEM) {
        status = td_fail(TD_ERR_SYSTEM, "host \"%s\" cannot be resolved: %s", host,
                         td__errno_text(question->system_error));
    } else if (question->error) {
        *retry = true;
        status = td_fail(TD_ERR_INVALID, "host \"%s\" cannot be resolved: %s", host,
                         gai_strerror(question->error));
    } else {
        take_answers(question->answers, port, list);
        if (!list->count)
            status = td_fail(TD_ERR_INVALID, "host \"%s\" has no IPv4 or IPv6 address", host);
    }
    release(question);
    return status;
}

/* Takes the brackets off `length` bytes. */
static bool copy_host(const char *host, size_t length, char *plain, size_t room)
{
    if (length > 2 && host[0] == '[' && host[length - 1] == ']') {
        host++;
        length -= 2;
    }
    if (!length || length >= room)
        return false;
    memcpy(plain, host, length);
    plain[length] = '\0';
    return true;
}

bool td__host_unbracket(const char *host, char *plain, size_t room)
{
    return copy_host(host, strlen(host), plain, room);
}

/* ::ffff:127.0.0.1 is 127.0.0.1: from here on there is one spelling of it. */
static void unmap(struct td__address *address)
{
    struct in6_addr mapped = address->v6.sin6_addr;
    if (!IN6_IS_ADDR_V4MAPPED(&mapped))
        return;
    memset(address, 0, sizeof *address);
    address->v4.sin_family = AF_INET;
    memcpy(&address->v4.sin_addr, &mapped.s6_addr[12], 4);
    address->size = sizeof address->v4;
}

static bool numeric(const char *host, int port, struct td__address *address)
{
    char text[128];
    if (!td__host_unbracket(host, text, sizeof text))
        return false;
    memset(address, 0, sizeof *address);
    if (inet_pton(AF_INET, text, &address->v4.sin_addr) == 1) {
        address->v4.sin_family = AF_INET;
        address->size = sizeof address->v4;
    } else {
        char *zone = strchr(text, '%');
        if (zone)
            *zone++ = '\0';
        if (inet_pton(AF_INET6, text, &address->v6.sin6_addr) != 1)
            return false;
        address->v6.sin6_family = AF_INET6;
        int index = 0;
        if (zone && !(address->v6.sin6_scope_id = if_nametoindex(zone))) {
            if (!td__parse_int(zone, 1, INT_MAX, &index))
                return false; /* an interface that is not there */
            address->v6.sin6_scope_id = (uint32_t)index;
        }
        address->size = sizeof address->v6;
        unmap(address);
    }
    set_port(address, port);
    return true;
}

static td_status local_socket(const char *name, struct td__address *address)
{
    size_t length = strlen(name);
    memset(address, 0, sizeof *address);
    if (!length || length >= sizeof address->local.sun_path)
        return td_fail(TD_ERR_INVALID, "unix socket \"unix:%s\": its name must have 1 to %zu bytes",
                       name, sizeof address->local.sun_path - 1);
    address->local.sun_family = AF_UNIX;
    memcpy(address->local.sun_path, name, length);
    if (name[0] == '@')
        address->local.sun_path[0] = '\0';
    /* An abstract name is as long as the address says; a path ends with its NUL. */
    address->size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + length + (name[0] != '@'));
    return TD_OK;
}

td_status td__resolve(const char *host, int port, td__deadline deadline,
                      struct td__address_list *list, bool *retry)
{
    *retry = false;
    list->count = 0;
    if (!strncmp(host, "unix:", 5)) {
        TD_TRY(local_socket(host + 5, &list->at[0]));
        list->count = 1;
        return TD_OK;
    }
    if (port < 0 || port > 65535)
        return td_fail(TD_ERR_INVALID, "port %d is outside 0 to 65535", port);
    if (!*host || strlen(host) >= 256)
        return td_fail(TD_ERR_INVALID, "host \"%.64s\": a name has 1 to 255 characters", host);
    if (numeric(host, port, &list->at[0])) {
        list->count = 1;
        return TD_OK;
    }
    return resolve_name(host, port, deadline, list, retry);
}

const char *td__address_text(const struct td__address *address, char text[TD__ADDRESS_TEXT])
{
    char host[INET6_ADDRSTRLEN + IF_NAMESIZE + 1] = "?";
    switch (address->any.sa_family) {
    case AF_INET:
        inet_ntop(AF_INET, &address->v4.sin_addr, host, sizeof host);
        snprintf(text, TD__ADDRESS_TEXT, "%s:%d", host, ntohs(address->v4.sin_port));
        break;
    case AF_INET6:
        inet_ntop(AF_INET6, &address->v6.sin6_addr, host, sizeof host);
        if (address->v6.sin6_scope_id)
            snprintf(host + strlen(host), sizeof host - strlen(host), "%%%u",
                     address->v6.sin6_scope_id);
        snprintf(text, TD__ADDRESS_TEXT, "[%s]:%d", host, ntohs(address->v6.sin6_port));
        break;
    case AF_UNIX: {
        const char *path = address->local.sun_path;
        size_t length = address->size - offsetof(struct sockaddr_un, sun_path);
        bool abstract = length && !path[0];
        snprintf(text, TD__ADDRESS_TEXT, "unix:%s%.*s", abstract ? "@" : "",
                 (int)(length - abstract), path + abstract);
        break;
    }
    default:
        snprintf(text, TD__ADDRESS_TEXT, "an address of family %d", address->any.sa_family);
    }
    return text;
}

bool td__address_is_local(const struct td__address *address)
{
    switch (address->any.sa_family) {
    case AF_UNIX:
        return true;
    case AF_INET:
        return ntohl(address->v4.sin_addr.s_addr) >> 24 == 127;
    case AF_INET6:
        return IN6_IS_ADDR_LOOPBACK(&address->v6.sin6_addr) ||
               (IN6_IS_ADDR_V4MAPPED(&address->v6.sin6_addr) &&
                address->v6.sin6_addr.s6_addr[12] == 127);
    }
    return false;
}

void td__address_host(const struct td__address *address, char *host, size_t room)
{
    char zone[IF_NAMESIZE];
    host[0] = '\0';
    if (address->any.sa_family == AF_INET)
        inet_ntop(AF_INET, &address->v4.sin_addr, host, (socklen_t)room);
    if (address->any.sa_family != AF_INET6)
        return;
    struct td__address plain = *address;
    unmap(&plain);
    if (plain.any.sa_family == AF_INET) {
        td__address_host(&plain, host, room);
        return;
    }
    inet_ntop(AF_INET6, &address->v6.sin6_addr, host, (socklen_t)room);
    size_t length = strlen(host);
    if (address->v6.sin6_scope_id && if_indextoname(address->v6.sin6_scope_id, zone))
        snprintf(host + length, room - length, "%%%s", zone);
}

void td__endpoint_text(const char *host, int port, char *text, size_t room)
{
    struct td__address address;
    char canonical[TD__ADDRESS_TEXT], plain[256];
    if (!strncmp(host, "unix:", 5)) {
        snprintf(text, room, "%s", host);
    } else if (numeric(host, port, &address)) {
        snprintf(text, room, "%s", td__address_text(&address, canonical));
    } else {
        if (!td__host_unbracket(host, plain, sizeof plain))
            snprintf(plain, sizeof plain, "%s", host);
        for (char *at = plain; *at; at++)
            *at = (char)tolower((unsigned char)*at);
        snprintf(text, room, "%s:%d", plain, port);
    }
}

bool td__endpoint_is(const char *endpoint, const char *text)
{
    char host[256], canonical[512];
    int port = 0;
    if (!strncmp(text, "unix:", 5))
        return !strcmp(endpoint, text);
    if (!td__split_host_port(text, host, sizeof host, &port))
        return false;
    td__endpoint_text(host, port, canonical, sizeof canonical);
    return !strcmp(endpoint, canonical);
}

int td__address_port(const struct td__address *address)
{
    if (address->any.sa_family == AF_INET)
        return ntohs(address->v4.sin_port);
    if (address->any.sa_family == AF_INET6)
        return ntohs(address->v6.sin6_port);
    return 0;
}

bool td__host_is_loopback(const char *host)
{
    struct td__address address;
    if (!strcasecmp(host, "localhost") || !strncmp(host, "unix:", 5))
        return true;
    return numeric(host, 0, &address) && td__address_is_local(&address);
}

bool td__split_host_port(const char *text, char *host, size_t room, int *port)
{
    const char *colon = strrchr(text, ':');
    const char *bracket = strrchr(text, ']');
    size_t length = strlen(text);
    int number = *port;
    if (colon && bracket && colon < bracket)
        colon = NULL; /* inside [::1] */
    if (colon && !bracket && memchr(text, ':', (size_t)(colon - text)))
        colon = NULL; /* a bare IPv6 address */
    if (colon) {
        if (!td__parse_int(colon + 1, 0, 65535, &number))
            return false;
        length = (size_t)(colon - text);
    }
    if (text[0] == '[' && (length < 3 || text[length - 1] != ']'))
        return false;
    if (!copy_host(text, length, host, room))
        return false;
    *port = number;
    return true;
}
