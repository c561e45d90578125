/* Files of choices (plugins/cuda/choice_file.h).
 *
 * Whatever bytes a file has, what is found in it lies inside; the end of the bytes that need not be read again is in
 * them as well. A record that is appended to them is found, whatever stands before it, and nothing is left to read
 * behind it; so it is when the bytes up to some place were read before. */
#include "cuda/choice_file.h"
#include "fuzz.h"

#include <stdlib.h>
#include <string.h>

struct seen {
    const uint8_t *from, *end;
    size_t count;
    uint64_t sum; /* of all records, in their order */
};

static void check(bool condition)
{
    if (!condition)
        abort();
}

static void note(void *arg, const uint8_t *key, size_t key_size, const uint8_t *value,
                 size_t value_size)
{
    struct seen *seen = arg;
    check(key >= seen->from && key_size <= CHOICE_MOST_KEY && key + key_size == value);
    check(value_size <= CHOICE_MOST_VALUE && value + value_size <= seen->end);
    seen->count++;
    for (const uint8_t *at = key; at < value + value_size; at++)
        seen->sum = seen->sum * 31 + *at + 1;
}

static size_t parse(struct seen *seen, const uint8_t *bytes, size_t size, int *wrong)
{
    seen->from = bytes;
    seen->end = bytes + size;
    size_t used = td__choice_parse(bytes, size, wrong, note, seen);
    check(used <= size);
    return used;
}

static void check_appended(const uint8_t *data, size_t size, size_t count)
{
    uint8_t *longer = malloc(size + CHOICE_MOST_RECORD);
    struct seen seen = {0};
    int wrong = 0;
    check(longer);
    if (size)
        memcpy(longer, data, size);
    size += td__choice_format(longer + size, "key", 3, "value", 5);
    size_t used = parse(&seen, longer, size, &wrong);
    check(wrong == CHOICE_MOST_WRONG || (seen.count == count + 1 && used == size));
    free(longer);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct seen whole = {0}, first = {0}, rest = {0};
    int wrong = 0, wrong_first = 0, wrong_rest = 0;
    if (size < 1 || size > 1 << 16)
        return 0;
    size_t cut = data[0] * (size - 1) / 255;
    data++;
    size--;
    parse(&whole, data, size, &wrong);
    check_appended(data, size, whole.count);
    size_t used = parse(&first, data, cut, &wrong_first);
    parse(&rest, data + used, size - used, &wrong_rest);
    check_appended(data + used, size - used, rest.count);
    return 0;
}
