/* Taking JSON text apart, strictly and in one pass: the caller says what must come next, and reads it.
 * No tree is built. The first thing that is wrong sticks, with its place, and every later call fails. */
#ifndef TD_CHECKPOINT_JSON_H
#define TD_CHECKPOINT_JSON_H

#include "base/buffer.h"

struct td__json {
    const char *begin, *at, *end;
    const char *wrong;    /* what is wrong, in words; NULL as long as nothing is */
    const char *wrong_at; /* where */
    bool no_memory;
};

/** Notes what is wrong at `at`, unless something was before. Always false. */
bool td__json_fail(struct td__json *json, const char *at, const char *wrong);

/** Whether the next character, behind white space, is `expected`; it is taken then. */
bool td__json_try(struct td__json *json, char expected);

/** The same, where anything else is wrong. */
bool td__json_take(struct td__json *json, char expected);

/** Behind an element of an object or array: true where another one follows, false at its end `close`
 *  (which is taken), and where something is wrong. */
bool td__json_more(struct td__json *json, char close);

/** A string, as UTF-8 for free(). One with a zero character is wrong, since it is none of C's. `raw`,
 *  where not NULL, is what stands between the quotes. */
char *td__json_string(struct td__json *json, struct td__span *raw);

/** A whole number from 0 to 2^63 - 1, without sign, fraction and exponent. */
bool td__json_size(struct td__json *json, uint64_t *number);

/** Passes over one value of any kind; those that are nested deeper than a header needs are wrong. */
bool td__json_skip(struct td__json *json);

/** True where nothing but white space is left. */
bool td__json_end(struct td__json *json);

/** The number of bytes of the character of UTF-8 at `at`, which ends before `end`; 0 where there is
 *  none: too long forms, surrogates, and what is behind the last character are none. */
size_t td__utf8_length(const char *at, const char *end);

/** Appends `text` as a JSON string, with its quotes. False where it is not UTF-8. */
bool td__json_put(struct td__buffer *buffer, const char *text);

#endif
