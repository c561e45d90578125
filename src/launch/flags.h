/* Command line flags, driven by a table: parsing, defaults from the environment, and the help. */
#ifndef TD_LAUNCH_FLAGS_H
#define TD_LAUNCH_FLAGS_H

#include <stdio.h>
#include <tandem/base.h>

struct td__flag {
    const char *name;     /* as "nproc-per-node"; hyphens and underscores are the same */
    char letter;          /* for the short form, or 0 */
    const char *argument; /* what it takes, for people: "N|auto"; NULL for a switch; "[=NAME]" for a
                              switch that may have a value, which then stands in the same argument */
    const char *help;     /* one line; NULL keeps the flag out of the help */

    /** Takes the value (NULL for none) into `target`. A failure's sentence speaks of the value
     *  only; where it came from is put in front of it. */
    td_status (*set)(const struct td__flag *flag, const char *value, void *target);

    size_t offset; /* for `set`: where in the target */
    int low, high; /* for `set`: the range of a number */
};

struct td__flag_table {
    const struct td__flag *flags;
    size_t count;
    const char *variable_prefix; /* "PET_" lets PET_NPROC_PER_NODE give a default; may be NULL */
};

/** Takes the defaults that the environment has. A switch is on for 1 and off for 0. */
td_status td__flags_from_environment(const struct td__flag_table *table, void *target);

/**
 * Takes the flags in front of the first argument that is none, and after "--" none: *rest is the
 * index of that argument. Forms: --name value, --name=value, -x value, -xvalue, -x=value.
 *
 * TD_ERR_INVALID: an unknown flag (with the nearest that there is), a missing value, a wrong one.
 */
td_status td__flags_parse(const struct td__flag_table *table, int argc, char **argv, void *target,
                          int *rest);

/** Prints the flags with their help, one a line. */
void td__flags_print(const struct td__flag_table *table, FILE *out);

/* ---- Ready-made setters, by the type that is at `offset` ---------------------------------------- */

td_status td__flag_set_bool(const struct td__flag *flag, const char *value, void *target);
td_status td__flag_set_int(const struct td__flag *flag, const char *value, void *target);
td_status td__flag_set_text(const struct td__flag *flag, const char *value, void *target);

/** A double of seconds, 0 or more, fractions allowed. */
td_status td__flag_set_seconds(const struct td__flag *flag, const char *value, void *target);

/** Reads such a number of seconds. */
bool td__parse_seconds(const char *text, double *seconds);

#endif
