/* Pages of the flight recorder that other processes may have written to: whatever their bytes are, what is
 * read from them is in its range and printable, and the postmortem can be printed.
 *
 * A page has 28 KiB, most of it the same: an input is a list of changes to a book of two logs, each two
 * bytes of offset (in steps of 8), one byte of length, and the bytes. It begins with a byte of flags. */
#include "fuzz.h"

#include "launch/postmortem.h"

#include <stdlib.h>
#include <string.h>

enum { RAW = 1, PRINT = 2, JSON = 4, ELSEWHERE = 8, FILES = 16, SLOTS = 2 };
enum { SIZE = TD__FLIGHT_HEAD + SLOTS * sizeof(struct td__flight_bytes) };

static void check(bool condition)
{
    if (!condition)
        abort();
}

static void check_text(const char *text, size_t room)
{
    size_t length = strnlen(text, room);
    check(length < room);
    for (size_t i = 0; i < length; i++)
        check((unsigned char)text[i] >= 0x20 && text[i] != 0x7f);
}

static void check_call(const struct td__flight_call *call)
{
    char text[TD__FLIGHT_TEXT];
    check(call->kind < TD__FLIGHT_KINDS && call->group >= 0 && call->group < TD__FLIGHT_GROUPS);
    check(call->state > TD__FLIGHT_EMPTY && call->state <= TD__FLIGHT_FAILED);
    check(td_dtype_size(call->dtype) > 0 && call->rank >= -1);
    check(call->queued_ns >= 0 && call->started_ns >= 0 && call->ended_ns >= 0);
    check_text(call->label, sizeof call->label);
    td__flight_describe(call, text);
    check_text(text, sizeof text);
}

static void check_page(const struct td__flight_page *page)
{
    check(page->count >= 0 && page->count <= TD__FLIGHT_ENTRIES);
    check(page->phase <= TD__FLIGHT_LEFT && page->rank >= 0 && page->pid >= 0);
    check_text(page->host, sizeof page->host);
    check_text(page->sentence, sizeof page->sentence);
    check_text(page->ending, sizeof page->ending);
    for (int i = 0; i < TD__FLIGHT_GROUPS; i++)
        check_text(page->groups[i], sizeof page->groups[i]);
    for (int i = 0; i < page->count; i++) {
        check_call(&page->calls[i]);
        check(!i || page->calls[i].queued_ns >= page->calls[i - 1].queued_ns);
    }
}

static void read_all(const uint8_t *bytes, size_t size, const struct td__flight_now *now)
{
    static struct td__flight_page page;
    struct td__flight_book_info info;
    if (td__flight_read_head(bytes, size, &info))
        return;
    check(info.slots >= 0 && (size_t)info.slots <= size / sizeof(struct td__flight_bytes));
    check_text(info.host, sizeof info.host);
    check_text(info.command, sizeof info.command);
    for (int slot = 0; slot < info.slots && slot < 1; slot++) {
        td__flight_read_log(bytes, size, slot, now, &page);
        check_page(&page);
    }
}

static void print_postmortem(const uint8_t *bytes, const struct td__flight_now *now, unsigned flags)
{
    struct td__postmortem postmortem;
    struct td__buffer text = {0};
    struct td__postmortem_book *book = calloc(1, sizeof *book);
    check(book && (book->bytes = aligned_alloc(4096, SIZE)));
    memcpy(book->bytes, bytes, SIZE);
    book->size = SIZE;
    if (td__flight_read_head(book->bytes, SIZE, &book->info)) {
        free(book->bytes);
        free(book);
        return;
    }
    bool files = flags & FILES;
    check(td__postmortem_take(book, 1, now, !files, files ? -1 : 0, &postmortem) == TD_OK);
    if (flags & JSON)
        td__postmortem_print_json(&postmortem, true, &text);
    else
        td__postmortem_print(&postmortem, "  ", &text);
    for (size_t i = 0; i < text.size; i++)
        check(text.data[i] >= 0x20 || text.data[i] == '\n');
    td__buffer_free(&text);
    td__postmortem_free(&postmortem);
}

/* A valid book. */
static void make_book(uint8_t *bytes, const struct td__flight_now *now)
{
    struct td__flight_head head = {.magic = TD__FLIGHT_MAGIC,
                                   .version = TD__FLIGHT_VERSION,
                                   .slots = SLOTS,
                                   .log_size = sizeof(struct td__flight_bytes),
                                   .nnodes = 1,
                                   .world_size = SLOTS};
    memcpy(bytes, &head, sizeof head);
    for (int slot = 0; slot < SLOTS; slot++) {
        struct td__flight_bytes *log = (void *)(bytes + TD__FLIGHT_HEAD +
                                                (size_t)slot * sizeof(struct td__flight_bytes));
        log->phase = TD__FLIGHT_JOINED;
        log->boot = now->boot;
        log->clock = 1;
        log->rank = slot;
        log->size = SLOTS;
        log->ticks[1] = now->ticks;
        log->ns[1] = (uint64_t)now->ns;
        log->groups[0].key = 1;
        log->next = 4;
        for (int i = 0; i < 4; i++) {
            struct td__flight_entry *entry = &log->entries[i];
            entry->mark = (uint64_t)(i + 1) << 16 |
                          (i + slot < 4 ? TD__FLIGHT_DONE : TD__FLIGHT_RUNNING);
            entry->sequence = (uint64_t)i + 1;
            entry->queued = entry->ended = 1000u * (unsigned)i + 1;
        }
    }
}

static void change(uint8_t *bytes, const uint8_t *data, size_t size)
{
    while (size >= 3) {
        size_t place = (size_t)(data[0] | data[1] << 8) * 8 % SIZE, length = data[2];
        data += 3;
        size -= 3;
        length = length < size ? length : size;
        length = length < SIZE - place ? length : SIZE - place;
        memcpy(bytes + place, data, length);
        data += length;
        size -= length;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static _Alignas(4096) uint8_t book[SIZE], changed[SIZE];
    static struct td__flight_now now = {.ticks = 3000000000u, .ns = 1000000000, .boot = 42};
    if (!book[0])
        make_book(book, &now);
    if (!size)
        return 0;
    unsigned flags = *data++;
    size--;
    if (flags & RAW) {
        read_all(data, size, &now);
        return 0;
    }
    now.boot = flags & ELSEWHERE ? 43 : 42;
    memcpy(changed, book, SIZE);
    change(changed, data, size);
    if (flags & PRINT)
        print_postmortem(changed, &now, flags);
    else
        read_all(changed, SIZE, &now);
    return 0;
}
