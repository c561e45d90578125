/* What launchers tell each other (launch/node_link.h): frames, and in them rosters, introductions and reports.
 *
 *     byte 0     0: the rest is a stream of frames; 1, 2, 3: it is the body of a roster, an introduction, a report */
#include "fuzz.h"

#include "launch/node_link.h"
#include "launch/roster.h"

#include <stdlib.h>
#include <string.h>

static void check(bool condition)
{
    if (!condition)
        abort();
}

static void check_same(const struct td__buffer *a, const struct td__buffer *b)
{
    check(!a->failed && !b->failed && a->size == b->size && !memcmp(a->data, b->data, a->size));
}

/* What was written is read as it was. */
static void read_roster(struct td__span body)
{
    struct td__roster roster = {0}, again = {0};
    struct td__buffer first = {0}, second = {0};
    struct td__reader reader = td__reader_of(body.data, body.size);
    if (!td__roster_take(&reader, &roster))
        return;
    td__roster_put(&first, &roster);
    reader = td__reader_of(first.data, first.size);
    check(td__roster_take(&reader, &again));
    td__roster_put(&second, &again);
    check_same(&first, &second);
    uint8_t *lost = calloc((size_t)roster.count + 1, 1);
    for (int i = 0; i < roster.count; i++) {
        struct td__node_world world = {0};
        lost[i] = (uint8_t)(i % 3);
        check(td__roster_find(&roster, roster.at[i].id) != NULL);
        td__roster_world(&roster, roster.at[i].id, &world);
    }
    td__roster_has_quorum(&roster, lost);
    free(lost);
    td__buffer_free(&first);
    td__buffer_free(&second);
    td__roster_free(&roster);
    td__roster_free(&again);
}

static void read_introduction(struct td__span body)
{
    struct td__introduction introduction = {0}, again = {0};
    struct td__buffer first = {0}, second = {0};
    struct td__reader reader = td__reader_of(body.data, body.size);
    if (!td__introduction_read(&reader, &introduction))
        return;
    td__introduction_put(&first, &introduction);
    reader = td__reader_of(first.data, first.size);
    check(td__introduction_read(&reader, &again));
    td__introduction_put(&second, &again);
    check_same(&first, &second);
    check(!td__introduction_check(&again, 1, &introduction));
    again.nnodes++; /* the version, where it is another one, is compared first */
    snprintf(again.version, sizeof again.version, "0");
    check(td__introduction_check(&again, 1, &introduction) == TD_ERR_MISMATCH);
    check(strlen(td_last_error()) > 0);
    td__buffer_free(&first);
    td__buffer_free(&second);
}

static void read_report(struct td__span body)
{
    struct td__report report, again;
    struct td__buffer first = {0};
    if (!td__report_read(body, &report))
        return;
    check(strlen(report.text) < sizeof report.text);
    td__report_put(&first, &report);
    check(td__report_read((struct td__span){(const char *)first.data, first.size}, &again));
    check(again.node == report.node && again.round == report.round && again.code == report.code);
    check(!strcmp(again.text, report.text));
    td__buffer_free(&first);
}

static void read_frames(const uint8_t *data, size_t size)
{
    struct td__node_link link = {.fd = -1};
    enum td__node_message kind;
    struct td__span body;
    td__buffer_put(&link.in, data, size);
    while (td__node_link_next(&link, &kind, &body)) {
        check(kind < TD__MESSAGE_KINDS);
        read_roster(body);
        read_introduction(body);
        read_report(body);
    }
    td__node_link_close(&link);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 1)
        return 0;
    /* In memory of exactly its size, for the sanitizer. */
    char *copy = malloc(size);
    memcpy(copy, data + 1, size - 1);
    struct td__span body = {copy, size - 1};
    if (data[0] == 0)
        read_frames((const uint8_t *)copy, size - 1);
    else if (data[0] == 1)
        read_roster(body);
    else if (data[0] == 2)
        read_introduction(body);
    else
        read_report(body);
    free(copy);
    return 0;
}
