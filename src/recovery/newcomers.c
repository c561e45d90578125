/* The store between newcomers and the first member of a group.
 *
 *     \1asking/NAME              the list: a line for each process that asks to be taken in
 *     \1mail/NAME/ID             the last message to a newcomer, which takes it away
 *     \1card/…/ROUND/ID          its card, in the round of which a message has given it a rank
 *     \1cards/NAME/ROUND         the cards of all
 *     \1read/NAME/ROUND          how many newcomers have read these: the last one deletes both
 *
 * A newcomer and a round have random numbers, so no key depends on what was there before: a store that has lost its keys
 * costs newcomers only the time until they look for themselves on the list. A newcomer stays on the list until it is
 * taken in, or has not answered. So if the first member dies, the next one finds it there, and its message replaces
 * that of the dead one. */
#include "recovery/newcomers.h"

#include "base/fail.h"
#include "base/text.h"
#include "store/store_ops.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { LINE = 96, PLACE = 'P', COMMIT = 'C', TEXT = 4096 };

static void list_key(const char *name, char key[TD__NEWCOMER_KEY])
{
    snprintf(key, TD__NEWCOMER_KEY, "\1asking/%.80s", name);
}

void td__newcomer_mail_key(const char *name, uint64_t id, char key[TD__NEWCOMER_KEY])
{
    snprintf(key, TD__NEWCOMER_KEY, "\1mail/%.80s/%016" PRIx64, name, id);
}

void td__newcomer_card_key(const char *name, uint64_t round, uint64_t id,
                           char key[TD__NEWCOMER_KEY])
{
    snprintf(key, TD__NEWCOMER_KEY, "\1newcomer/%.80s/%016" PRIx64 "/%016" PRIx64, name, round, id);
}

void td__newcomer_cards_key(const char *name, uint64_t round, char key[TD__NEWCOMER_KEY])
{
    snprintf(key, TD__NEWCOMER_KEY, "\1cards/%.80s/%016" PRIx64, name, round);
}

void td__newcomer_read_key(const char *name, uint64_t round, char key[TD__NEWCOMER_KEY])
{
    snprintf(key, TD__NEWCOMER_KEY, "\1read/%.80s/%016" PRIx64, name, round);
}

/* ---- The list -------------------------------------------------------------------------------- */

td_status td__newcomers_add(td_store *store, const char *name, const struct td__newcomer *newcomer)
{
    const struct td__process_id *process = &newcomer->process;
    char key[TD__NEWCOMER_KEY], line[LINE];
    list_key(name, key);
    int length = snprintf(line, sizeof line, "%016" PRIx64 " %016" PRIx64 " %d %" PRIu64 "\n",
                          newcomer->id, process->space, process->pid, process->started);
    return td_store_append(store, key, line, (size_t)length);
}

/* Reads the next line, and returns what follows it; a line that is not valid has the id 0. */
static const char *read_line(const char *at, struct td__newcomer *newcomer)
{
    const char *end = strchr(at, '\n');
    *newcomer = (struct td__newcomer){0};
    if (sscanf(at, "%16" SCNx64 " %16" SCNx64 " %d %" SCNu64, &newcomer->id,
               &newcomer->process.space, &newcomer->process.pid, &newcomer->process.started) != 4)
        newcomer->id = 0;
    return end ? end + 1 : at + strlen(at);
}

td_status td__newcomers_read(td_store *store, const char *name, struct td__newcomer **list_out,
                             int *count_out)
{
    char key[TD__NEWCOMER_KEY];
    td_bytes text = {0};
    bool found;
    *list_out = NULL;
    *count_out = 0;
    list_key(name, key);
    TD_TRY(td__store_look_up(store, key, &text, &found));
    if (!found || !text.size) {
        td_bytes_free(&text);
        return TD_OK;
    }
    struct td__newcomer *list = malloc(sizeof *list * (text.size / 8 + 1));
    int count = 0;
    for (const char *at = text.data; list && *at && count < TD__MOST_NEWCOMERS;) {
        at = read_line(at, &list[count]);
        count += list[count].id != 0;
    }
    td_bytes_free(&text);
    if (!list)
        return td__fail_nomem("newcomers");
    *list_out = list;
    *count_out = count;
    return TD_OK;
}

static bool is_on(const struct td__newcomer *list, int count, uint64_t id)
{
    for (int i = 0; i < count; i++)
        if (list[i].id == id)
            return true;
    return false;
}

/* The text without the lines of `list`, and those that are not valid, in place. */
static size_t strike(char *text, const struct td__newcomer *list, int count)
{
    struct td__newcomer newcomer;
    char *to = text;
    for (const char *at = text, *next; *at; at = next) {
        next = read_line(at, &newcomer);
        if (!newcomer.id || is_on(list, count, newcomer.id))
            continue;
        memmove(to, at, (size_t)(next - at));
        to += next - at;
    }
    *to = 0;
    return (size_t)(to - text);
}

/* Others may change the list meanwhile, so this tries until nobody has. */
td_status td__newcomers_remove(td_store *store, const char *name, const struct td__newcomer *list,
                               int count)
{
    char key[TD__NEWCOMER_KEY];
    td_bytes text = {0};
    bool found;
    list_key(name, key);
    td_status status = td__store_look_up(store, key, &text, &found);
    while (!status && found && text.size) {
        td_bytes after = {0};
        char *shorter = td__text_copy(text.data, text.size);
        size_t size = shorter ? strike(shorter, list, count) : 0;
        if (!shorter)
            status = td__fail_nomem("newcomers");
        else if (size != text.size)
            status = td_store_compare_set(store, key, text.data, text.size, shorter, size, &after);
        bool done = !shorter || status || size == text.size ||
                    (after.size == size && !memcmp(after.data, shorter, size));
        free(shorter);
        td_bytes_free(&text);
        text = after;
        if (done)
            break;
    }
    td_bytes_free(&text);
    return status;
}

bool td__newcomer_has_ended(const struct td__newcomer *newcomer)
{
    struct td__process_id own, now;
    struct td__process_stat stat;
    const struct td__process_id *process = &newcomer->process;
    if (!process->space || !td__process_identify((int)getpid(), &own) ||
        own.space != process->space)
        return false;
    return !td__process_identify(process->pid, &now) || !td__process_id_equal(&now, process) ||
           (td__process_stat(process->pid, &stat) && (stat.state == 'Z' || stat.state == 'X'));
}

/* ---- Messages -------------------------------------------------------------------------------- */

void td__newcomer_mail_put(const struct td__newcomer_mail *mail, struct td__buffer *buffer)
{
    td__buffer_put_u8(buffer, mail->commit ? COMMIT : PLACE);
    td__buffer_put_u64(buffer, mail->round);
    td__buffer_put_u32(buffer, (uint32_t)mail->rank);
    td__buffer_put_u32(buffer, (uint32_t)mail->size);
    td__buffer_put_u32(buffer, (uint32_t)mail->newcomers);
    td__buffer_put_u8(buffer, mail->named);
    td__buffer_put_string(buffer, mail->backend.data, mail->backend.size);
    td__buffer_put_string(buffer, mail->backend_options.data, mail->backend_options.size);
}

bool td__newcomer_mail_read(const void *bytes, size_t size, struct td__newcomer_mail *mail)
{
    struct td__reader reader = td__reader_of(bytes, size);
    uint8_t kind = td__reader_u8(&reader);
    mail->commit = kind == COMMIT;
    mail->round = td__reader_u64(&reader);
    mail->rank = (int)td__reader_u32(&reader);
    mail->size = (int)td__reader_u32(&reader);
    mail->newcomers = (int)td__reader_u32(&reader);
    mail->named = td__reader_u8(&reader);
    mail->backend = td__reader_string(&reader, TEXT);
    mail->backend_options = td__reader_string(&reader, TEXT);
    return td__reader_done(&reader) && (kind == COMMIT || kind == PLACE) && mail->size > 0 &&
           mail->rank >= 0 && mail->rank < mail->size;
}
