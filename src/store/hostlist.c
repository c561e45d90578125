/* Compressed host lists; see rendezvous_schemes.h.
 *
 *     list   = host { "," host }
 *     host   = { text | "[" range { "," range } "]" }        at least one
 *     range  = digits [ "-" digits ]
 *
 * The first host takes the low end of the first range of each bracket; the number of hosts is the
 * product of the bracket's sizes, summed over the list. Nothing is expanded, so a hostile list costs
 * no more than its length. */
#include "store/rendezvous_schemes.h"

#include "base/fail.h"

#include <ctype.h>
#include <string.h>

struct parser {
    const char *list;
    const char *at;
    char *first; /* where the first host is written to; NULL for the others */
    size_t length;
};

static td_status malformed(const struct parser *parser, const char *why)
{
    return td_fail(TD_ERR_INVALID, "host list \"%.200s\": character %d: %s", parser->list,
                   (int)(parser->at - parser->list) + 1, why);
}

static td_status put(struct parser *parser, const char *text, size_t size)
{
    if (!parser->first)
        return TD_OK;
    if (parser->length + size > 255)
        return malformed(parser, "the host name is too long");
    memcpy(parser->first + parser->length, text, size);
    parser->length += size;
    parser->first[parser->length] = '\0';
    return TD_OK;
}

static td_status parse_digits(struct parser *parser, const char **start, size_t *size,
                              int64_t *value)
{
    *start = parser->at;
    *value = 0;
    for (; isdigit((unsigned char)*parser->at); parser->at++)
        if (__builtin_mul_overflow(*value, 10, value) ||
            __builtin_add_overflow(*value, *parser->at - '0', value))
            return malformed(parser, "the number is too large");
    *size = (size_t)(parser->at - *start);
    return *size ? TD_OK : malformed(parser, "a number was expected");
}

static td_status parse_bracket(struct parser *parser, int64_t *count)
{
    int64_t hosts = 0;
    bool leading = true;
    do {
        parser->at++; /* '[' or ',' */
        const char *digits;
        size_t size;
        int64_t low, high, range;
        TD_TRY(parse_digits(parser, &digits, &size, &low));
        if (leading)
            TD_TRY(put(parser, digits, size));
        leading = false;
        high = low;
        if (*parser->at == '-') {
            parser->at++;
            TD_TRY(parse_digits(parser, &digits, &size, &high));
        }
        if (high < low)
            return malformed(parser, "the range runs backwards");
        if (__builtin_sub_overflow(high, low - 1, &range) ||
            __builtin_add_overflow(hosts, range, &hosts))
            return malformed(parser, "there are too many hosts");
    } while (*parser->at == ',');
    if (*parser->at != ']')
        return malformed(parser, "']' was expected");
    parser->at++;
    if (__builtin_mul_overflow(*count, hosts, count))
        return malformed(parser, "there are too many hosts");
    return TD_OK;
}

static td_status parse_host(struct parser *parser, int64_t *count)
{
    const char *start = parser->at;
    *count = 1;
    while (*parser->at && *parser->at != ',') {
        if (*parser->at == '[') {
            TD_TRY(parse_bracket(parser, count));
            continue;
        }
        size_t size = strcspn(parser->at, ",[]");
        if (!size)
            return malformed(parser, "']' without '['");
        TD_TRY(put(parser, parser->at, size));
        parser->at += size;
    }
    return parser->at > start ? TD_OK : malformed(parser, "a host name was expected");
}

td_status td__hostlist_first(const char *list, char first[256], int64_t *count)
{
    struct parser parser = {.list = list, .at = list, .first = first};
    int64_t total = 0, hosts;
    for (;;) {
        TD_TRY(parse_host(&parser, &hosts));
        if (__builtin_add_overflow(total, hosts, &total))
            return malformed(&parser, "there are too many hosts");
        parser.first = NULL;
        if (!*parser.at)
            break;
        parser.at++; /* ',' */
    }
    *count = total;
    return TD_OK;
}
