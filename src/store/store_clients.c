/* The clients of a replicated store, as all its servers remember them; see store_replica.h. */
#include "store/store_replica.h"

#include "base/fail.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct td__known_client *td__replica_find(const struct td__map *clients, uint64_t id)
{
    uint8_t key[8];
    td__store_u64(key, id);
    struct td__map_node *node = td__map_find(clients, (const char *)key, sizeof key);
    return node ? TD__CONTAINER(node, struct td__known_client, node) : NULL;
}

struct td__known_client *td__replica_know(struct td__map *clients, uint64_t id)
{
    struct td__known_client *known = td__replica_find(clients, id);
    if (known)
        return known;
    known = calloc(1, sizeof *known);
    if (!known)
        return NULL;
    known->id = id;
    td__store_u64(known->key, id);
    known->node = (struct td__map_node){.key = (char *)known->key, .key_size = sizeof known->key};
    if (td__map_insert(clients, &known->node))
        return known;
    free(known);
    return NULL;
}

void td__replica_forget(struct td__map *clients, struct td__known_client *known)
{
    td__map_remove(clients, &known->node);
    td_bytes_free(&known->will_key);
    td_bytes_free(&known->will_value);
    free(known);
}

void td__replica_forget_all(struct td__map *clients)
{
    for (struct td__map_node *node = td__map_next(clients, NULL), *next; node; node = next) {
        next = td__map_next(clients, node);
        td__replica_forget(clients, TD__CONTAINER(node, struct td__known_client, node));
    }
    td__map_free(clients);
    *clients = (struct td__map){0};
}

void td__replica_remember(struct td__known_client *known, uint64_t number, uint8_t op,
                          int64_t value)
{
    if (number > known->done)
        known->done = number;
    if (td__wire_is_silent(op))
        return;
    uint32_t at = known->answered++ % TD__REPLICA_WINDOW;
    known->answers[at].number = number;
    known->answers[at].value = value;
}

void td__replica_note(struct td__known_client *known, uint64_t number, uint8_t status,
                      const char *text, size_t size)
{
    if (number > known->done)
        known->done = number;
    known->failed = number;
    known->failed_status = status;
    snprintf(known->failed_text, sizeof known->failed_text, "%.*s", (int)size, text);
}

bool td__replica_recall(const struct td__known_client *known, uint64_t number, int64_t *value)
{
    for (uint32_t i = 0; i < TD__REPLICA_WINDOW && i < known->answered; i++)
        if (known->answers[i].number == number) {
            *value = known->answers[i].value;
            return true;
        }
    return false;
}

void td__replica_put_client(struct td__buffer *out, const struct td__known_client *known)
{
    size_t start = td__wire_begin(out, 0, TD__REPLICA_CLIENT);
    uint32_t count = known->answered < TD__REPLICA_WINDOW ? known->answered : TD__REPLICA_WINDOW;
    td__buffer_put_u64(out, known->id);
    td__buffer_put_u64(out, known->done);
    td__buffer_put_u8(out, known->gone);
    td__buffer_put_u8(out, known->will_key.data != NULL);
    td__buffer_put_string(out, known->will_key.data, known->will_key.size);
    td__buffer_put_string(out, known->will_value.data, known->will_value.size);
    td__buffer_put_u64(out, known->failed);
    td__buffer_put_u8(out, known->failed_status);
    td__buffer_put_string(out, known->failed_text, strlen(known->failed_text));
    td__buffer_put_u32(out, count);
    for (uint32_t i = 0; i < count; i++) { /* the oldest first */
        uint32_t at = (known->answered - count + i) % TD__REPLICA_WINDOW;
        td__buffer_put_u64(out, known->answers[at].number);
        td__buffer_put_u64(out, (uint64_t)known->answers[at].value);
    }
    td__wire_end(out, start);
}
