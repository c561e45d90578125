/* Rendezvous URLs; see rendezvous_schemes.h. Pure functions of the text, so that they can be fuzzed. */
#include "store/rendezvous_schemes.h"

#include "base/fail.h"
#include "base/number.h"

#include <ctype.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#define SHOWN 200 /* characters of a URL in a message */

static td_status wrong(const char *text, const char *what)
{
    return td_fail(TD_ERR_INVALID, "rendezvous URL \"%.*s\": %s", SHOWN, text, what);
}

td_status td__url_scheme(const char *text, char scheme[32])
{
    const char *end = strstr(text, "://");
    size_t length = end ? (size_t)(end - text) : 0;
    bool valid = length && length < 32 && isalpha((unsigned char)text[0]);
    for (size_t i = 0; valid && i < length; i++)
        valid = isalnum((unsigned char)text[i]) || strchr("+-.", text[i]);
    if (!valid)
        return wrong(text, "it must begin with a scheme, such as env://, tcp://host:port or "
                           "file:///path");
    for (size_t i = 0; i < length; i++)
        scheme[i] = (char)tolower((unsigned char)text[i]);
    scheme[length] = '\0';
    return TD_OK;
}

static td_status parse_parameter(const char *text, const char *name, size_t name_size,
                                 const char *value, size_t value_size, struct td__url *url)
{
    bool is_rank = name_size == 4 && !memcmp(name, "rank", 4);
    bool is_size = name_size == 10 && !memcmp(name, "world_size", 10);
    if (!is_rank && !is_size)
        return td_fail(TD_ERR_INVALID,
                       "rendezvous URL \"%.*s\": there is no parameter \"%.*s\"; it takes rank and "
                       "world_size",
                       SHOWN, text, (int)(name_size < SHOWN ? name_size : SHOWN), name);
    int64_t number;
    if (!td__parse_i64(value, value_size, &number) || number < INT_MIN || number > INT_MAX)
        return td_fail(TD_ERR_INVALID,
                       "rendezvous URL \"%.*s\": %s is \"%.*s\"; it must be a number", SHOWN, text,
                       is_rank ? "rank" : "world_size",
                       (int)(value_size < SHOWN ? value_size : SHOWN), value);
    if (is_rank && number < 0)
        return td_fail(TD_ERR_INVALID, "rendezvous URL \"%.*s\": the rank is %d; ranks begin at 0",
                       SHOWN, text, (int)number);
    if (is_size && number < 1)
        return td_fail(TD_ERR_INVALID,
                       "rendezvous URL \"%.*s\": the world size is %d; it must be at least 1",
                       SHOWN, text, (int)number);
    *(is_rank ? &url->rank : &url->world_size) = (int)number;
    return TD_OK;
}

static td_status parse_query(const char *text, const char *query, struct td__url *url)
{
    while (*query) {
        size_t length = strcspn(query, "&");
        const char *equals = memchr(query, '=', length);
        if (!equals)
            return wrong(text, "its parameters must be written as rank=…&world_size=…");
        TD_TRY(parse_parameter(text, query, (size_t)(equals - query), equals + 1,
                               length - (size_t)(equals + 1 - query), url));
        query += length;
        if (*query == '&')
            query++;
    }
    return TD_OK;
}

/* host, host:port, [v6]:port, or nothing. */
static td_status parse_authority(const char *text, const char *from, size_t size,
                                 struct td__url *url)
{
    const char *end = from + size, *port = NULL;
    if (size && *from == '[') {
        const char *bracket = memchr(from, ']', size);
        if (!bracket || (bracket + 1 < end && bracket[1] != ':'))
            return wrong(text, "an IPv6 address stands in brackets, such as [::1]:29500");
        port = bracket + 1 < end ? bracket + 2 : NULL;
        from++;
        size = (size_t)(bracket - from);
        if (!size)
            return wrong(text, "there is no address in its brackets");
    } else if (size && (port = memchr(from, ':', size))) {
        size = (size_t)(port - from);
        port++;
    }
    if (size >= sizeof url->host)
        return wrong(text, "its host name is too long");
    memcpy(url->host, from, size);
    url->host[size] = '\0';
    if (!port)
        return TD_OK;
    int64_t number;
    if (!td__parse_i64(port, (size_t)(end - port), &number))
        return wrong(text, "its port must be a number from 0 to 65535");
    if (number < 0 || number > 65535)
        return td_fail(TD_ERR_INVALID, "rendezvous URL \"%.*s\": port %lld is outside 0 to 65535",
                       SHOWN, text, (long long)number);
    url->port = (int)number;
    return TD_OK;
}

td_status td__url_parse(const char *text, struct td__url *url)
{
    *url = (struct td__url){.port = -1, .rank = -1, .world_size = -1};
    TD_TRY(td__url_scheme(text, url->scheme));
    const char *rest = strstr(text, "://") + 3;
    size_t authority = strcspn(rest, "/?");
    TD_TRY(parse_authority(text, rest, authority, url));
    rest += authority;
    size_t path = strcspn(rest, "?");
    if (path >= sizeof url->path)
        return wrong(text, "its path is too long");
    memcpy(url->path, rest, path);
    url->path[path] = '\0';
    rest += path;
    return *rest == '?' ? parse_query(text, rest + 1, url) : TD_OK;
}
