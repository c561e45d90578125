/* Compressed host lists, compared with a plain expansion where the list is small enough for one. */
#include "fuzz.h"

#include "store/rendezvous_schemes.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_HOSTS = 200, MAX_NAME = 300 };

static void check(bool condition)
{
    if (!condition)
        abort();
}

/* The outcome of a plain expansion. */
struct expansion {
    enum { FINE, WRONG, TOO_LARGE } outcome;
    long count;
    char first[MAX_NAME];
};

static void add_host(struct expansion *result, const char *name)
{
    if (result->count++ == 0)
        strcpy(result->first, name);
    if (result->count > MAX_HOSTS)
        result->outcome = TOO_LARGE;
}

static void expand(struct expansion *result, const char *done, const char *rest, const char *end);

/* One range of a bracket, from `at`: each of its numbers, followed by what comes behind the
 * bracket. Returns where it ends, NULL when it is wrong or too large. */
static const char *expand_range(struct expansion *result, const char *done, const char *at,
                                const char *behind, const char *end)
{
    size_t low_digits = strspn(at, "0123456789"), high_digits = low_digits;
    const char *low = at, *high = at;
    at += low_digits;
    if (*at == '-') {
        high = at + 1;
        high_digits = strspn(high, "0123456789");
        at = high + high_digits;
    }
    if (!low_digits || !high_digits) {
        result->outcome = WRONG;
        return NULL;
    }
    if (low_digits > 17 || high_digits > 17) {
        result->outcome = TOO_LARGE;
        return NULL;
    }
    long from = strtol(low, NULL, 10), to = strtol(high, NULL, 10);
    if (to < from)
        result->outcome = WRONG;
    for (long number = from; number <= to && result->outcome == FINE; number++) {
        char name[MAX_NAME];
        if (snprintf(name, sizeof name, "%s%0*ld", done, (int)low_digits, number) >= MAX_NAME)
            result->outcome = TOO_LARGE;
        else
            expand(result, name, behind, end);
    }
    return result->outcome == FINE ? at : NULL;
}

/* Adds all hosts whose name begins with `done` and goes on as `rest`, up to `end`, says. */
static void expand(struct expansion *result, const char *done, const char *rest, const char *end)
{
    char name[MAX_NAME];
    size_t plain = 0;
    while (rest + plain < end && rest[plain] != '[' && rest[plain] != ']')
        plain++;
    if (strlen(done) + plain > 255) { /* the longest name there is */
        result->outcome = TOO_LARGE;
        return;
    }
    snprintf(name, sizeof name, "%s%.*s", done, (int)plain, rest);
    rest += plain;
    if (rest == end) {
        add_host(result, name);
        return;
    }
    const char *close = *rest == '[' ? memchr(rest, ']', (size_t)(end - rest)) : NULL;
    if (!close) {
        result->outcome = WRONG;
        return;
    }
    const char *at = rest;
    do
        at = expand_range(result, name, at + 1, close + 1, end);
    while (at && *at == ',');
    if (at && at != close)
        result->outcome = WRONG;
}

/* Splits the list at the commas outside brackets. */
static void expand_list(struct expansion *result, const char *list)
{
    for (const char *start = list;; start++) {
        const char *end = start;
        for (bool inside = false; *end && (inside || *end != ','); end++)
            inside = *end == '[' ? true : *end == ']' ? false : inside;
        if (end == start)
            result->outcome = WRONG;
        if (result->outcome == FINE)
            expand(result, "", start, end);
        if (result->outcome != FINE || !*end)
            return;
        start = end;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char first[256];
    int64_t count;
    char *list = malloc(size + 1);
    memcpy(list, data, size);
    list[size] = '\0';
    struct expansion plain = {.outcome = FINE};
    td_status status = td__hostlist_first(list, first, &count);
    expand_list(&plain, list);
    if (status) {
        check(status == TD_ERR_INVALID && strstr(td_last_error(), "host list \""));
        check(plain.outcome != FINE);
    } else {
        check(count >= 1 && first[0] && strlen(first) < sizeof first);
        check(plain.outcome != WRONG);
        if (plain.outcome == FINE)
            check(count == plain.count && !strcmp(first, plain.first));
    }
    free(list);
    return 0;
}
