/* The roster as it is read from the store: each line is an entry, or is passed over, and none is read twice. */
#include "fuzz.h"

#include "store/peer_watch.h"

#include <stdlib.h>
#include <string.h>

static void check(bool condition)
{
    if (!condition)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct td__roster_entry entry;
    char *text = malloc(size + 1);
    size_t lines = 1, found = 0;
    memcpy(text, data, size);
    text[size] = 0;
    for (const char *c = text; *c; c++)
        lines += *c == '\n';
    const char *at = text, *before = at;
    for (; td__roster_next(&at, &entry); found++, before = at) {
        check(at > before);
        check(entry.process.pid > 0);
    }
    check(!*at && found <= lines);
    free(text);
    return 0;
}
