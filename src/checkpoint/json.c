/* A strict JSON parser for untrusted headers. RFC 8259 and nothing more: no comments, no NaN, no
 * trailing commas, no byte order mark. Recursion is bounded, and nothing behind `end` is read. */
#include "checkpoint/json.h"

#include "base/text.h"

#include <stdlib.h>
#include <string.h>

enum { DEEPEST = 32 };

bool td__json_fail(struct td__json *json, const char *at, const char *wrong)
{
    if (!json->wrong) {
        json->wrong = wrong;
        json->wrong_at = at;
    }
    return false;
}

static void skip_space(struct td__json *json)
{
    while (json->at < json->end && memchr(" \t\n\r", *json->at, 4))
        json->at++;
}

bool td__json_try(struct td__json *json, char expected)
{
    if (json->wrong)
        return false;
    skip_space(json);
    if (json->at == json->end || *json->at != expected)
        return false;
    json->at++;
    return true;
}

bool td__json_take(struct td__json *json, char expected)
{
    if (td__json_try(json, expected))
        return true;
    const char *wrong = expected == '{'   ? "an object must begin here"
                        : expected == '[' ? "an array must begin here"
                        : expected == ':' ? "there must be a colon here"
                        : expected == '"' ? "a string must begin here"
                                          : "there is a character that JSON does not allow here";
    return td__json_fail(json, json->at, wrong);
}

bool td__json_more(struct td__json *json, char close)
{
    if (td__json_try(json, ','))
        return true;
    if (!td__json_try(json, close))
        td__json_fail(json, json->at, "there must be a comma or a closing bracket here");
    return false;
}

bool td__json_end(struct td__json *json)
{
    if (json->wrong)
        return false;
    skip_space(json);
    return json->at == json->end || td__json_fail(json, json->at, "something follows the object");
}

/* ---- Strings ------------------------------------------------------------------------------------ */

static size_t put_utf8(char *to, uint32_t code)
{
    if (code < 0x80) {
        to[0] = (char)code;
        return 1;
    }
    if (code < 0x800) {
        to[0] = (char)(0xc0 | code >> 6);
        to[1] = (char)(0x80 | (code & 0x3f));
        return 2;
    }
    if (code < 0x10000) {
        to[0] = (char)(0xe0 | code >> 12);
        to[1] = (char)(0x80 | (code >> 6 & 0x3f));
        to[2] = (char)(0x80 | (code & 0x3f));
        return 3;
    }
    to[0] = (char)(0xf0 | code >> 18);
    to[1] = (char)(0x80 | (code >> 12 & 0x3f));
    to[2] = (char)(0x80 | (code >> 6 & 0x3f));
    to[3] = (char)(0x80 | (code & 0x3f));
    return 4;
}

/* Four hexadecimal digits. */
static bool take_hex(struct td__json *json, uint32_t *code)
{
    if (json->end - json->at < 4)
        return td__json_fail(json, json->at, "an escape sequence is cut off");
    *code = 0;
    for (int i = 0; i < 4; i++) {
        char c = *json->at++;
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : -1;
        if (digit < 0)
            return td__json_fail(json, json->at - 1, "there must be a hexadecimal digit here");
        *code = *code << 4 | (uint32_t)digit;
    }
    return true;
}

/* After "\u": a code point, or a pair of surrogates. */
static bool take_unicode(struct td__json *json, uint32_t *code)
{
    const char *start = json->at;
    if (!take_hex(json, code))
        return false;
    if (*code >= 0xd800 && *code < 0xdc00) {
        uint32_t second = 0;
        if (json->end - json->at < 2 || json->at[0] != '\\' || json->at[1] != 'u')
            return td__json_fail(json, start, "half of a pair of surrogates stands alone");
        json->at += 2;
        if (!take_hex(json, &second))
            return false;
        if (second < 0xdc00 || second > 0xdfff)
            return td__json_fail(json, start, "half of a pair of surrogates stands alone");
        *code = 0x10000 + ((*code - 0xd800) << 10) + (second - 0xdc00);
    } else if (*code >= 0xdc00 && *code < 0xe000) {
        return td__json_fail(json, start, "half of a pair of surrogates stands alone");
    }
    return *code != 0 || td__json_fail(json, start, "a string holds a zero character");
}

static bool take_escape(struct td__json *json, uint32_t *code)
{
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    if (json->at == json->end)
        return td__json_fail(json, json->at, "a string is cut off");
    char c = *json->at++;
    if (c == 'u')
        return take_unicode(json, code);
    const char *name = c ? strchr(names, c) : NULL;
    if (!name)
        return td__json_fail(json, json->at - 1, "there is no such escape sequence");
    *code = (unsigned char)values[name - names];
    return true;
}

/* Decodes a string to `to`, which has space for it, and returns the end. */
static char *copy_string(struct td__json *json, char *to)
{
    while (json->at < json->end && *json->at != '"') {
        size_t length = td__utf8_length(json->at, json->end);
        if (length == 0 || (unsigned char)*json->at < 0x20) {
            td__json_fail(json, json->at,
                          length ? "a string holds a control character" : "this is not UTF-8");
            return NULL;
        }
        if (*json->at == '\\') {
            uint32_t code = 0;
            json->at++;
            if (!take_escape(json, &code))
                return NULL;
            to += put_utf8(to, code);
            continue;
        }
        memcpy(to, json->at, length);
        to += length;
        json->at += length;
    }
    return to;
}

char *td__json_string(struct td__json *json, struct td__span *raw)
{
    if (!td__json_take(json, '"'))
        return NULL;
    const char *start = json->at, *close = start;
    while (close < json->end && *close != '"')
        close += *close == '\\' && close + 1 < json->end ? 2 : 1;
    if (close >= json->end) {
        td__json_fail(json, start, "a string is cut off");
        return NULL;
    }
    /* Decoding never makes a string longer. */
    char *text = malloc((size_t)(close - start) + 1);
    if (!text) {
        json->no_memory = true;
        td__json_fail(json, start, "out of memory");
        return NULL;
    }
    char *end = copy_string(json, text);
    if (!end) {
        free(text);
        return NULL;
    }
    *end = '\0';
    if (raw)
        *raw = (struct td__span){.data = start, .size = (size_t)(json->at - start)};
    json->at++;
    return text;
}

bool td__json_put(struct td__buffer *buffer, const char *text)
{
    const char *end = text + strlen(text);
    td__buffer_put_u8(buffer, '"');
    while (text < end) {
        static const char digits[] = "0123456789abcdef";
        size_t length = td__utf8_length(text, end);
        unsigned char c = (unsigned char)*text;
        if (length == 0)
            return false;
        if (c < 0x20)
            td__buffer_put(buffer, (char[]){'\\', 'u', '0', '0', digits[c >> 4], digits[c & 15]},
                           6);
        else if (c == '"' || c == '\\')
            td__buffer_put(buffer, (char[]){'\\', (char)c}, 2);
        else
            td__buffer_put(buffer, text, length);
        text += length;
    }
    td__buffer_put_u8(buffer, '"');
    return true;
}

/* ---- Numbers, and skipping values --------------------------------------------------------------- */

static bool is_digit(const struct td__json *json)
{
    return json->at < json->end && *json->at >= '0' && *json->at <= '9';
}

bool td__json_size(struct td__json *json, uint64_t *number)
{
    if (json->wrong)
        return false;
    skip_space(json);
    const char *start = json->at;
    uint64_t value = 0;
    if (!is_digit(json))
        return td__json_fail(json, start, "there must be a whole number of 0 or more here");
    for (; is_digit(json); json->at++) {
        uint64_t digit = (uint64_t)(*json->at - '0');
        if (value > ((uint64_t)INT64_MAX - digit) / 10)
            return td__json_fail(json, start, "a number is larger than 2^63 - 1");
        value = value * 10 + digit;
    }
    if (*start == '0' && json->at > start + 1)
        return td__json_fail(json, start, "a number begins with a zero");
    if (json->at < json->end && memchr(".eE", *json->at, 3))
        return td__json_fail(json, start, "there must be a whole number of 0 or more here");
    *number = value;
    return true;
}

static bool skip_number(struct td__json *json)
{
    const char *start = json->at;
    if (*json->at == '-')
        json->at++;
    const char *digits = json->at;
    while (is_digit(json))
        json->at++;
    bool good = json->at > digits && !(*digits == '0' && json->at > digits + 1);
    if (good && json->at < json->end && *json->at == '.') {
        digits = ++json->at;
        while (is_digit(json))
            json->at++;
        good = json->at > digits;
    }
    if (good && json->at < json->end && (*json->at | 0x20) == 'e') {
        json->at++;
        if (json->at < json->end && (*json->at == '+' || *json->at == '-'))
            json->at++;
        digits = json->at;
        while (is_digit(json))
            json->at++;
        good = json->at > digits;
    }
    return good || td__json_fail(json, start, "this is no value of JSON");
}

static bool skip_word(struct td__json *json)
{
    static const char *const words[] = {"true", "false", "null"};
    for (int i = 0; i < 3; i++) {
        size_t length = strlen(words[i]);
        if ((size_t)(json->end - json->at) >= length && !memcmp(json->at, words[i], length)) {
            json->at += length;
            return true;
        }
    }
    return skip_number(json);
}

static bool skip_string(struct td__json *json)
{
    char *text = td__json_string(json, NULL);
    free(text);
    return text != NULL;
}

static bool skip_value(struct td__json *json, int depth)
{
    if (json->wrong)
        return false;
    skip_space(json);
    if (json->at == json->end)
        return td__json_fail(json, json->at, "the text ends where a value must be");
    char open = *json->at, close = open == '{' ? '}' : ']';
    if (open == '"')
        return skip_string(json);
    if (open != '{' && open != '[')
        return skip_word(json);
    if (depth == DEEPEST)
        return td__json_fail(json, json->at, "values are nested too deep");
    json->at++;
    if (td__json_try(json, close))
        return true;
    do {
        if (open == '{' && (!skip_string(json) || !td__json_take(json, ':')))
            return false;
        if (!skip_value(json, depth + 1))
            return false;
    } while (td__json_more(json, close));
    return !json->wrong;
}

bool td__json_skip(struct td__json *json)
{
    return skip_value(json, 0);
}

void *td__list_grow(void **list, size_t *count, size_t *capacity, size_t width)
{
    if (*count == *capacity) {
        size_t more = *capacity ? *capacity * 2 : 16;
        void *grown = realloc(*list, more * width);
        if (!grown)
            return NULL;
        *list = grown;
        *capacity = more;
    }
    void *element = (char *)*list + *count * width;
    memset(element, 0, width);
    ++*count;
    return element;
}

void *td__json_grow(struct td__json *json, void **list, size_t *count, size_t *capacity,
                    size_t width)
{
    void *element = td__list_grow(list, count, capacity, width);
    if (element)
        return element;
    json->no_memory = true;
    td__json_fail(json, json->at, "out of memory");
    return NULL;
}

bool td__json_shape(struct td__json *json, int64_t shape[TD_MAX_DIMS], int *ndim)
{
    if (!td__json_take(json, '['))
        return false;
    if (td__json_try(json, ']'))
        return true;
    do {
        uint64_t size = 0;
        if (*ndim == TD_MAX_DIMS)
            return td__json_fail(
                json, json->at, "a tensor has more dimensions than this library knows, which is 8");
        if (!td__json_size(json, &size))
            return false;
        shape[(*ndim)++] = (int64_t)size;
    } while (td__json_more(json, ']'));
    return !json->wrong;
}
