/* Addresses as people write them. Nothing is looked up: only unix sockets and numeric addresses are
 * resolved. */
#include "fuzz.h"

#include "base/number.h"
#include "os/address.h"

#include <arpa/inet.h>
#include <limits.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void check(bool condition)
{
    if (!condition)
        abort();
}

static void split(const char *text, size_t room)
{
    char *host = malloc(room); /* of exactly its size, for the sanitizer */
    int port = -7;
    if (td__split_host_port(text, host, room, &port)) {
        check(host[0] && strlen(host) < room);
        check(port == -7 || (port >= 0 && port <= 65535));
    }
    free(host);
}

/* Whether td__resolve() needs no name server. */
static bool is_numeric(const char *text)
{
    char copy[128]; /* longer ones are names */
    struct in6_addr address;
    size_t length = strlen(text);
    if (length >= 2 && text[0] == '[' && text[length - 1] == ']') {
        text++;
        length -= 2;
    }
    if (length >= sizeof copy)
        return false;
    memcpy(copy, text, length);
    copy[length] = '\0';
    if (inet_pton(AF_INET, copy, &address) == 1)
        return true;
    char *zone = strchr(copy, '%');
    int index;
    if (zone) {
        *zone++ = '\0';
        if (!if_nametoindex(zone) && !td__parse_int(zone, 1, INT_MAX, &index))
            return false;
    }
    return inet_pton(AF_INET6, copy, &address) == 1;
}

/* Written as text and read again, an address is the same. */
static void check_text(const struct td__address *address)
{
    char text[TD__ADDRESS_TEXT], host[TD__ADDRESS_TEXT];
    struct td__address_list again;
    int port = -1;
    bool retry;
    td__address_text(address, text);
    if (address->any.sa_family == AF_UNIX) {
        check(!strncmp(text, "unix:", 5));
        return;
    }
    check(td__split_host_port(text, host, sizeof host, &port));
    check(port == td__address_port(address));
    check(!td__resolve(host, port, 0, &again, &retry));
    check(again.count == 1);
    if (address->any.sa_family == AF_INET)
        check(address->v4.sin_addr.s_addr == again.at[0].v4.sin_addr.s_addr);
    else
        check(!memcmp(&address->v6.sin6_addr, &again.at[0].v6.sin6_addr, 16) &&
              address->v6.sin6_scope_id == again.at[0].v6.sin6_scope_id);
    check(td__address_is_local(address) == td__address_is_local(&again.at[0]));
}

static void resolve(const char *text, int port)
{
    struct td__address_list list;
    bool retry = true;
    bool local = !strncmp(text, "unix:", 5);
    bool loopback = td__host_is_loopback(text);
    if (!local && !is_numeric(text))
        return;
    td_status status = td__resolve(text, port, 0, &list, &retry);
    check(!retry);
    if (status) {
        check(status == TD_ERR_INVALID);
        return;
    }
    check(list.count == 1);
    const struct td__address *address = &list.at[0];
    check(address->size <= sizeof *address);
    check(td__address_is_local(address) == loopback);
    check(td__address_port(address) == (local ? 0 : port));
    check_text(address);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2)
        return 0;
    int port = data[0] << 8 | data[1];
    char *text = malloc(size - 1);
    memcpy(text, data + 2, size - 2);
    text[size - 2] = '\0';
    split(text, 256);
    split(text, 1 + data[0] % 16);
    resolve(text, port);
    free(text);
    return 0;
}
