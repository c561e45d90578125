/* What comes from an MPI launcher: lines of PMI-1, and the card of rank 0 in its key-value space. */
#include "fuzz.h"

#include "store/launcher_kv.h"

#include <stdlib.h>
#include <string.h>

static void check(bool condition)
{
    if (!condition)
        abort();
}

/* What is read is written in the same words, but for zeros before the port. */
static void check_card(const char *text)
{
    struct td__launcher_card card, again;
    char written[TD__KV_VALUE];
    if (td__launcher_card_read(text, &card)) {
        check(strstr(td_last_error(), "malformed") != NULL);
        return;
    }
    check(card.port >= 1 && card.port <= 65535 && card.count >= 1 &&
          card.count <= TD__KV_ADDRESSES);
    check(!card.secret[0] || strlen(card.secret) == 64);
    td__launcher_card_write(&card, written);
    check(td__launcher_card_read(written, &again) == TD_OK);
    check(!memcmp(&card, &again, sizeof card));
}

static void check_line(const char *line)
{
    static const char *const names[] = {"cmd", "rc", "value", "kvsname"};
    char value[32], large[TD__KV_LINE];
    for (int i = 0; i < 4; i++) {
        bool fits = td__pmi_field(line, names[i], value, sizeof value);
        bool found = td__pmi_field(line, names[i], large, sizeof large);
        check(!fits || (found && !strcmp(value, large)));
        check(!found || (!strchr(large, ' ') && !strchr(large, '\n') && strstr(line, large)));
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size >= TD__KV_LINE)
        return 0;
    char *text = malloc(size + 1);
    memcpy(text, data, size);
    text[size] = '\0';
    check_card(text);
    check_line(text);
    free(text);
    return 0;
}
