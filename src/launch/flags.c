/* Command line flags; see flags.h. */
#include "launch/flags.h"

#include "base/fail.h"
#include "base/number.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { NAME_ROOM = 64, HELP_COLUMN = 36, ALIKE = 5 };

/* ---- Finding a flag -------------------------------------------------------------------------- */

static bool same_name(const char *typed, size_t size, const char *name)
{
    if (strlen(name) != size)
        return false;
    for (size_t i = 0; i < size; i++)
        if ((typed[i] == '_' ? '-' : typed[i]) != name[i])
            return false;
    return true;
}

static const struct td__flag *find_long(const struct td__flag_table *table, const char *typed,
                                        size_t size)
{
    for (size_t i = 0; i < table->count; i++)
        if (same_name(typed, size, table->flags[i].name))
            return &table->flags[i];
    return NULL;
}

static const struct td__flag *find_short(const struct td__flag_table *table, char letter)
{
    for (size_t i = 0; i < table->count; i++)
        if (letter && table->flags[i].letter == letter)
            return &table->flags[i];
    return NULL;
}

/* How many letters must be added, dropped or changed to get from a to b: Levenshtein's distance, one
 * row at a time. */
static size_t distance(const char *a, const char *b)
{
    size_t row[NAME_ROOM + 1], width = strlen(b);
    for (size_t j = 0; j <= width; j++)
        row[j] = j;
    for (size_t i = 1; a[i - 1]; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= width; j++) {
            size_t change = diagonal + (a[i - 1] != b[j - 1]);
            size_t insert = row[j - 1] + 1, drop = row[j] + 1;
            diagonal = row[j];
            row[j] = change < insert ? change : insert;
            row[j] = row[j] < drop ? row[j] : drop;
        }
    }
    return row[width];
}

/* The flag that was probably meant: one that begins like it, one that differs in at most a third of its
 * letters, or one that shares its first letters. */
static const char *nearest(const struct td__flag_table *table, const char *typed, size_t size)
{
    char name[NAME_ROOM];
    if (size < 2 || size >= sizeof name)
        return NULL;
    for (size_t i = 0; i < size; i++)
        name[i] = typed[i] == '_' ? '-' : (char)tolower((unsigned char)typed[i]);
    name[size] = '\0';
    const char *best = NULL;
    size_t best_distance = size / 3 + 2;
    for (size_t i = 0; i < table->count; i++) {
        const char *candidate = table->flags[i].name;
        if (!strncmp(candidate, name, size))
            return candidate;
        if (!best && size > ALIKE && !strncmp(candidate, name, ALIKE))
            best = candidate; /* --nprocs; unless another one is nearer */
        size_t steps = distance(name, candidate);
        if (steps < best_distance) {
            best = candidate;
            best_distance = steps;
        }
    }
    return best;
}

static bool needs_value(const struct td__flag *flag)
{
    return flag->argument && strncmp(flag->argument, "[=", 2) != 0;
}

static td_status unknown(const struct td__flag_table *table, const char *argument)
{
    const char *typed = argument + strspn(argument, "-");
    size_t size = strcspn(typed, "=");
    int whole = (int)(size + (size_t)(typed - argument));
    const char *meant = nearest(table, typed, size);
    if (meant)
        return td_fail(TD_ERR_INVALID, "unknown option %.*s; did you mean --%s?", whole, argument,
                       meant);
    return td_fail(TD_ERR_INVALID, "unknown option %.*s; --help lists the known ones", whole,
                   argument);
}

/* ---- Parsing --------------------------------------------------------------------------------- */

static td_status set(const struct td__flag *flag, const char *value, const char *where,
                     void *target)
{
    td_status status = flag->set(flag, value, target);
    return status ? td_fail(status, "%s: %s", where, td__error_text()) : TD_OK;
}

/* Takes the flag at argv[*at]; `attached` is the value that stands in the same argument, or NULL. */
static td_status take(const struct td__flag *flag, const char *attached, int argc, char **argv,
                      int *at, void *target)
{
    char where[NAME_ROOM + 2];
    snprintf(where, sizeof where, "--%s", flag->name);
    if (!flag->argument && attached)
        return td_fail(TD_ERR_INVALID, "%s takes no value, but was given \"%s\"", where, attached);
    if (!attached && needs_value(flag)) {
        if (*at + 1 >= argc || !strncmp(argv[*at + 1], "--", 2))
            return td_fail(TD_ERR_INVALID, "%s needs a value: %s %s", where, where, flag->argument);
        attached = argv[++*at];
    }
    return set(flag, attached, where, target);
}

static td_status take_argument(const struct td__flag_table *table, int argc, char **argv, int *at,
                               void *target)
{
    const char *argument = argv[*at], *attached = NULL;
    const struct td__flag *flag;
    if (argument[1] == '-') {
        size_t size = strcspn(argument + 2, "=");
        flag = find_long(table, argument + 2, size);
        if (argument[2 + size])
            attached = argument + 2 + size + 1;
    } else {
        flag = find_short(table, argument[1]);
        if (flag && argument[2])
            attached = argument + 2 + (argument[2] == '=');
        if (flag && attached && !flag->argument)
            flag = NULL; /* "-help" is not "-h" */
    }
    return flag ? take(flag, attached, argc, argv, at, target) : unknown(table, argument);
}

td_status td__flags_parse(const struct td__flag_table *table, int argc, char **argv, void *target,
                          int *rest)
{
    int at = 1;
    for (; at < argc && argv[at][0] == '-' && argv[at][1]; at++) {
        if (!strcmp(argv[at], "--")) {
            at++;
            break;
        }
        TD_TRY(take_argument(table, argc, argv, &at, target));
    }
    *rest = at;
    return TD_OK;
}

td_status td__flags_from_environment(const struct td__flag_table *table, void *target)
{
    for (size_t i = 0; i < table->count; i++) {
        const struct td__flag *flag = &table->flags[i];
        char variable[2 * NAME_ROOM];
        int size = snprintf(variable, sizeof variable, "%s%s", table->variable_prefix, flag->name);
        for (int c = 0; c < size; c++)
            variable[c] = variable[c] == '-' ? '_' : (char)toupper((unsigned char)variable[c]);
        const char *value = getenv(variable);
        if (!value || !*value)
            continue;
        if (!needs_value(flag) && !strcmp(value, "0"))
            continue;
        bool on = !needs_value(flag) && !strcmp(value, "1");
        if (!flag->argument && !on)
            return td_fail(TD_ERR_INVALID, "%s: \"%s\" is neither 0 nor 1", variable, value);
        TD_TRY(set(flag, on ? NULL : value, variable, target));
    }
    return TD_OK;
}

void td__flags_print(const struct td__flag_table *table, FILE *out)
{
    for (size_t i = 0; i < table->count; i++) {
        const struct td__flag *flag = &table->flags[i];
        char form[2 * NAME_ROOM];
        if (!flag->help)
            continue;
        int size = flag->letter
                       ? snprintf(form, sizeof form, "  -%c, --%s", flag->letter, flag->name)
                       : snprintf(form, sizeof form, "      --%s", flag->name);
        if (flag->argument)
            size += snprintf(form + size, sizeof form - (size_t)size, "%s%s",
                             needs_value(flag) ? " " : "", flag->argument);
        if (size < HELP_COLUMN)
            fprintf(out, "%-*s%s\n", HELP_COLUMN, form, flag->help);
        else
            fprintf(out, "%s\n%*s%s\n", form, HELP_COLUMN, "", flag->help);
    }
}

/* ---- Setters --------------------------------------------------------------------------------- */

td_status td__flag_set_bool(const struct td__flag *flag, const char *value, void *target)
{
    (void)value;
    *(bool *)((char *)target + flag->offset) = true;
    return TD_OK;
}

td_status td__flag_set_int(const struct td__flag *flag, const char *value, void *target)
{
    int number;
    if (!td__parse_int(value, flag->low, flag->high, &number))
        return td_fail(TD_ERR_INVALID, "\"%s\" is not a number from %d to %d", value, flag->low,
                       flag->high);
    *(int *)((char *)target + flag->offset) = number;
    return TD_OK;
}

td_status td__flag_set_text(const struct td__flag *flag, const char *value, void *target)
{
    *(const char **)((char *)target + flag->offset) = value;
    return TD_OK;
}

bool td__parse_seconds(const char *text, double *seconds)
{
    char *end;
    double number = strtod(text, &end);
    if (end == text || *end || !isfinite(number) || number < 0 || number > 1e9)
        return false;
    *seconds = number;
    return true;
}

td_status td__flag_set_seconds(const struct td__flag *flag, const char *value, void *target)
{
    double seconds;
    if (!td__parse_seconds(value, &seconds))
        return td_fail(TD_ERR_INVALID, "\"%s\" is not a number of seconds", value);
    *(double *)((char *)target + flag->offset) = seconds;
    return TD_OK;
}
