/* Rendezvous URLs. What is taken for one is put together again from its parts, and must then mean
 * the same. */
#include "fuzz.h"

#include "store/rendezvous_schemes.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void check(bool condition)
{
    if (!condition)
        abort();
}

static void check_parts(const struct td__url *url)
{
    check(url->scheme[0] && strlen(url->scheme) < sizeof url->scheme);
    for (const char *at = url->scheme; *at; at++)
        check(!isupper((unsigned char)*at));
    check(strlen(url->host) < sizeof url->host && !strpbrk(url->host, "/?"));
    check(strlen(url->path) < sizeof url->path && !strchr(url->path, '?'));
    check(!url->path[0] || url->path[0] == '/');
    check(url->port >= -1 && url->port <= 65535);
    check(url->rank >= -1);
    check(url->world_size == -1 || url->world_size >= 1);
}

static void put_together(const struct td__url *url, char *text, size_t room)
{
    bool brackets = url->host[0] == '[' || strchr(url->host, ':');
    size_t length = (size_t)snprintf(text, room, brackets ? "%s://[%s]" : "%s://%s", url->scheme,
                                     url->host);
    if (url->port >= 0)
        length += (size_t)snprintf(text + length, room - length, ":%d", url->port);
    length += (size_t)snprintf(text + length, room - length, "%s?", url->path);
    if (url->rank >= 0)
        length += (size_t)snprintf(text + length, room - length, "rank=%d&", url->rank);
    if (url->world_size >= 0)
        snprintf(text + length, room - length, "world_size=%d", url->world_size);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct td__url url, again;
    char *text = malloc(size + 1);
    memcpy(text, data, size);
    text[size] = '\0';
    td_status status = td__url_parse(text, &url);
    free(text);
    if (status) {
        check(status == TD_ERR_INVALID && strstr(td_last_error(), "rendezvous URL \""));
        return 0;
    }
    check_parts(&url);
    char whole[5000];
    put_together(&url, whole, sizeof whole);
    check(!td__url_parse(whole, &again));
    check(!strcmp(url.scheme, again.scheme) && !strcmp(url.host, again.host));
    check(!strcmp(url.path, again.path) && url.port == again.port);
    check(url.rank == again.rank && url.world_size == again.world_size);
    return 0;
}
