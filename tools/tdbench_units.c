/* Sizes, times and rates, from and to text. Sizes count in powers of 1024, as memory does; rates in
 * powers of 1000, as networks do. */
#include "tdbench.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

struct unit {
    const char *name;
    double factor;
};

static const struct unit times[] = {{"s", 1},     {"ms", 1e-3}, {"us", 1e-6},
                                    {"µs", 1e-6}, {"ns", 1e-9}, {NULL, 0}};

/* A "b" is a bit and a "B" a byte; "/s" may be left out. */
static const struct unit rates[] = {
    {"B", 1},          {"kB", 1e3},      {"KB", 1e3},      {"MB", 1e6},      {"GB", 1e9},
    {"TB", 1e12},      {"Mb", 1e6 / 8},  {"Gb", 1e9 / 8},  {"Tb", 1e12 / 8}, {"Mbit", 1e6 / 8},
    {"Gbit", 1e9 / 8}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {NULL, 0},
};

/* A number above 0 and one of the units. */
static bool parse(const char *text, const struct unit *units, const char *ending, double *value)
{
    char *end;
    double number = strtod(text, &end);
    if (end == text || !isfinite(number) || number <= 0)
        return false;
    while (*end == ' ')
        end++;
    size_t length = strlen(end), extra = strlen(ending);
    if (length > extra && extra && !strcmp(end + length - extra, ending))
        length -= extra;
    for (const struct unit *unit = units; unit->name; unit++) {
        if (strlen(unit->name) == length && !strncmp(unit->name, end, length)) {
            *value = number * unit->factor;
            return true;
        }
    }
    return false;
}

bool bench_parse_time(const char *text, double *seconds)
{
    return parse(text, times, "", seconds);
}

bool bench_parse_rate(const char *text, double *bytes_per_second)
{
    return parse(text, rates, "/s", bytes_per_second);
}

bool bench_parse_size(const char *text, size_t length, int64_t *bytes)
{
    static const char letters[] = "KMGT";
    const char *end = text + length;
    int64_t number = 0;
    if (text == end || !isdigit((unsigned char)*text))
        return false;
    for (; text < end && isdigit((unsigned char)*text); text++) {
        if (number > INT64_MAX / 10 - 1)
            return false;
        number = number * 10 + (*text - '0');
    }
    const char *letter = text < end ? strchr(letters, toupper((unsigned char)*text)) : NULL;
    if (letter) {
        int shift = 10 * (int)(letter - letters + 1);
        if (number > INT64_MAX >> shift)
            return false;
        number <<= shift;
        text++;
    }
    size_t left = (size_t)(end - text);
    bool known = left == 0 || (left == 1 && !strncasecmp(text, "B", 1)) ||
                 (left == 2 && letter && !strncasecmp(text, "iB", 2));
    if (known)
        *bytes = number;
    return known;
}

const char *bench_size_text(int64_t bytes, char text[24])
{
    const char *letter = "\0KMG";
    while (bytes >= 1024 && bytes % 1024 == 0 && letter[1]) {
        bytes /= 1024;
        letter++;
    }
    snprintf(text, 24, "%lld%.1s", (long long)bytes, letter);
    return text;
}

const char *bench_time_text(double seconds, int width, char text[48])
{
    /* The letter µ takes two bytes and one column. */
    static const struct unit shown[] = {{"s ", 1}, {"ms", 1e-3}, {"µs", 1e-6}};
    const struct unit *unit = seconds >= 1 ? shown : seconds >= 1e-3 ? shown + 1 : shown + 2;
    snprintf(text, 48, "%*.2f %s", width - 3, seconds / unit->factor, unit->name);
    return text;
}
