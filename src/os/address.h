/* Socket addresses: from text, to text, by name. Three families: IPv4, IPv6 and unix. */
#ifndef TD_OS_ADDRESS_H
#define TD_OS_ADDRESS_H

#include "base/clock.h"

#include <tandem/base.h>

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>

struct td__address {
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
        struct sockaddr_un local;
    };
    socklen_t size;
};

enum { TD__ADDRESS_TEXT = 128, TD__ADDRESS_LIST = 16 };

struct td__address_list {
    struct td__address at[TD__ADDRESS_LIST];
    int count;
};

/**
 * Finds the addresses of `host`: a numeric address ("127.0.0.1", "::1", "[::1]", "fe80::1%eth0")
 * without a query, "unix:/path" or "unix:@name" (port 0), or a name, looked up until the
 * deadline. *retry says whether the same query may succeed later.
 */
td_status td__resolve(const char *host, int port, td__deadline deadline,
                      struct td__address_list *list, bool *retry);

/** "127.0.0.1:29500", "[::1]:29500", "unix:@name". */
const char *td__address_text(const struct td__address *address, char text[TD__ADDRESS_TEXT]);

/** The host of an IPv4 or IPv6 address, "127.0.0.1" or "fe80::1%eth0"; "" for others. */
void td__address_host(const struct td__address *address, char *host, size_t room);

/** Takes the brackets off "[::1]"; other names are copied. False when it is empty or has no room. */
bool td__host_unbracket(const char *host, char *plain, size_t room);

/** Host and port as one text, in one spelling: "[::1]:29500" for "0:0:0:0:0:0:0:1", "[::1]"
 *  and "::1", "127.0.0.1:29500" for "::ffff:127.0.0.1", a name in lower case, "unix:@name" as it is. */
void td__endpoint_text(const char *host, int port, char *text, size_t room);

/** True when `text`, "host:port" in any spelling, is the one that td__endpoint_text() has written. */
bool td__endpoint_is(const char *endpoint, const char *text);

/** True for 127.0.0.0/8, ::1, their mapped forms, and unix sockets: what never leaves the host. */
bool td__address_is_local(const struct td__address *address);

/** The port, 0 for a unix socket. */
int td__address_port(const struct td__address *address);

/** True when `host` is written as a loopback address or "localhost", or is a unix socket. */
bool td__host_is_loopback(const char *host);

/** Splits "host:port", "[v6]:port" or "host" (then *port is left alone). False when it is neither. */
bool td__split_host_port(const char *text, char *host, size_t room, int *port);

#endif
