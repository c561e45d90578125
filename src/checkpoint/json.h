/* A strict one-pass JSON parser: the caller requests what must come next. No tree is built. The
 * first error is kept with its position, and every later call fails. */
#ifndef TD_CHECKPOINT_JSON_H
#define TD_CHECKPOINT_JSON_H

#include "base/buffer.h"

#include <tandem/tensor.h>

struct td__json {
    const char *begin, *at, *end;
    const char *wrong;    /* the error; NULL: none */
    const char *wrong_at; /* where */
    bool no_memory;
};

/** Sets the error at `at`, unless there is one. Always false. */
bool td__json_fail(struct td__json *json, const char *at, const char *wrong);

/** Consumes `expected` if it is the next character after white space; otherwise false. */
bool td__json_try(struct td__json *json, char expected);

/** The same; any other character is an error. */
bool td__json_take(struct td__json *json, char expected);

/** After an element of an object or array: true if another one follows, false at the end `close`
 *  (which is consumed) and on an error. */
bool td__json_more(struct td__json *json, char close);

/** A string as UTF-8, for free(). A NUL character in it is an error. *raw, if not NULL, is the
 *  text between the quotes. */
char *td__json_string(struct td__json *json, struct td__span *raw);

/** A whole number from 0 to 2^63 - 1, without sign, fraction and exponent. */
bool td__json_size(struct td__json *json, uint64_t *number);

/** A list of such numbers: the sizes of a tensor. */
bool td__json_shape(struct td__json *json, int64_t shape[TD_MAX_DIMS], int *ndim);

/** Skips one value of any kind; nesting deeper than a header needs is an error. */
bool td__json_skip(struct td__json *json);

/** True if only white space is left. */
bool td__json_end(struct td__json *json);

/** Appends a zeroed element of `width` bytes to a list that grows; NULL without memory. */
void *td__list_grow(void **list, size_t *count, size_t *capacity, size_t width);

/** The same for the list of a parser: without memory it fails. */
void *td__json_grow(struct td__json *json, void **list, size_t *count, size_t *capacity,
                    size_t width);

/** Appends `text` as a JSON string, with its quotes. False if it is not UTF-8. */
bool td__json_put(struct td__buffer *buffer, const char *text);

#endif
