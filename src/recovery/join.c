/* Joining a running job: the side of the newcomer; admit.c has that of the members, newcomers.c the keys.
 *
 *     asks: adds itself to the list in the store                      ask()
 *     waits for a message; now and then looks whether it is still on the list
 *     "you are rank 4 of 6"    opens its endpoint, and sets its card       take_place()
 *     "all cards are there"    makes its first group; a barrier and a broadcast, after which the world stands
 *                                                                          enter()
 *     another message          the round has failed, or the first member has died: from there again
 *
 * If the world does not come about it asks again, under another number, until the timeout. */
#include "base/auth.h"
#include "base/fail.h"
#include "base/text.h"
#include "recovery/new_world.h"
#include "recovery/newcomers.h"
#include "store/spare.h"
#include "store/store_ops.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { LOOK_MS = 500, CARDS_MS = 5000, CONFIRM_MS = 10000 };

static const char *const what = "td_group_join";

struct asking {
    td_store *given, *store; /* the user's, and Tandem's part of it */
    const char *name;
    const td_group_options *options;
    bool world;
    struct td__newcomer self;
    struct td__root *fresh; /* NULL: it has no rank */
    uint64_t round;         /* of `fresh` */
    int newcomers;
};

/* ---- The list -------------------------------------------------------------------------------- */

static td_status ask(struct asking *asking)
{
    do
        TD_TRY(td__random(&asking->self.id, sizeof asking->self.id));
    while (!asking->self.id);
    return td__newcomers_add(asking->store, asking->name, &asking->self);
}

static bool has_mail(const struct asking *asking)
{
    char key[TD__NEWCOMER_KEY];
    const char *keys[] = {key};
    bool there;
    td__newcomer_mail_key(asking->name, asking->self.id, key);
    return !td_store_check(asking->store, keys, 1, &there) && there;
}

/* The store may have lost its keys, or a first member may have waited in vain for the card. */
static td_status stay_on_list(const struct asking *asking)
{
    struct td__newcomer *list;
    int count;
    bool there = false;
    TD_TRY(td__newcomers_read(asking->store, asking->name, &list, &count));
    for (int i = 0; i < count; i++)
        there |= list[i].id == asking->self.id;
    free(list);
    return there || has_mail(asking)
               ? TD_OK
               : td__newcomers_add(asking->store, asking->name, &asking->self);
}

static void withdraw(const struct asking *asking)
{
    char key[TD__NEWCOMER_KEY];
    struct td__error error;
    td__error_save(&error);
    td__newcomers_remove(asking->store, asking->name, &asking->self, 1);
    td__newcomer_mail_key(asking->name, asking->self.id, key);
    td_store_delete_key(asking->store, key, NULL);
    td__error_restore(&error);
}

/* ---- A round --------------------------------------------------------------------------------- */

static void leave_round(struct asking *asking)
{
    char key[TD__NEWCOMER_KEY];
    struct td__error error;
    if (!asking->fresh)
        return;
    td__error_save(&error);
    td__newcomer_card_key(asking->name, asking->round, asking->self.id, key);
    td_store_delete_key(asking->store, key, NULL);
    td__root_free(asking->fresh, TD_ERR_PEER);
    asking->fresh = NULL;
    td__error_restore(&error);
}

static char *text_of(const char *own, struct td__span theirs)
{
    return own ? strdup(own) : theirs.size ? td__text_copy(theirs.data, theirs.size) : NULL;
}

static td_status take_place(struct asking *asking, const struct td__newcomer_mail *mail)
{
    char key[TD__NEWCOMER_KEY];
    char *backend = text_of(asking->options->backend, mail->backend);
    char *more = text_of(asking->options->backend_options, mail->backend_options);
    td_group_options options = {.name = mail->named ? asking->name : NULL,
                                .backend = backend,
                                .backend_options = more,
                                .timeout_ms = asking->options->timeout_ms};
    leave_round(asking);
    td_status status = td__root_make(asking->given, mail->rank, mail->size, &options,
                                     &asking->fresh);
    free(backend);
    free(more);
    TD_TRY(status);
    asking->fresh->world = asking->world;
    asking->fresh->grown = asking->fresh->admitted = true;
    asking->round = mail->round;
    asking->newcomers = mail->newcomers;
    struct td__buffer card = {0};
    td__endpoint_card(asking->fresh->endpoint, &card);
    td__newcomer_card_key(asking->name, mail->round, asking->self.id, key);
    status = card.failed ? td__fail_nomem(what)
                         : td_store_set(asking->store, key, card.data, card.size);
    td__buffer_free(&card);
    return status;
}

/* Reads the cards of all; the last newcomer of the round deletes them. */
static td_status read_cards(const struct asking *asking, struct td__world_card *cards)
{
    char key[TD__NEWCOMER_KEY], count_key[TD__NEWCOMER_KEY];
    td_bytes all = {0};
    int64_t count;
    td__newcomer_cards_key(asking->name, asking->round, key);
    td__newcomer_read_key(asking->name, asking->round, count_key);
    TD_TRY(td_store_get(asking->store, key, CARDS_MS, &all));
    struct td__reader reader = td__reader_of(all.data, all.size);
    for (int r = 0; r < asking->fresh->size; r++) {
        struct td__span card = td__reader_string(&reader, TD__NEW_WORLD_CARD);
        if (card.data)
            td__world_card_set(&cards[r], card.data, card.size);
    }
    bool good = td__reader_done(&reader);
    td_bytes_free(&all);
    if (!good)
        return td_fail(TD_ERR_MISMATCH,
                       "%s: the cards of the members are not valid; all processes must run the "
                       "same version of Tandem",
                       what);
    if (asking->newcomers == 1)
        return td_store_delete_key(asking->store, key, NULL);
    TD_TRY(td_store_add(asking->store, count_key, 1, &count));
    if (count < asking->newcomers)
        return TD_OK;
    TD_TRY(td_store_delete_key(asking->store, key, NULL));
    return td_store_delete_key(asking->store, count_key, NULL);
}

static td_status confirm(td_group *group)
{
    uint8_t go = 0;
    int64_t before = td__swap_call_timeout(CONFIRM_MS);
    td_status status = td_group_barrier(group, NULL);
    if (!status)
        status = td_group_broadcast(&go, 1, TD_U8, 0, group, NULL);
    td__swap_call_timeout(before);
    if (status)
        td__root_discard(group);
    return status;
}

static td_status enter(struct asking *asking, td_group **group)
{
    char key[TD__NEWCOMER_KEY];
    struct td__world_card *cards = calloc((size_t)asking->fresh->size, sizeof *cards);
    struct td__root *fresh = asking->fresh;
    td_group *made;
    td_status status = cards ? read_cards(asking, cards) : td__fail_nomem(what);
    if (!status) {
        asking->fresh = NULL;
        status = td__new_world_connect(fresh, cards, &made);
    }
    free(cards);
    TD_TRY(status);
    TD_TRY(confirm(made));
    td__newcomer_card_key(asking->name, asking->round, asking->self.id, key);
    td_store_delete_key(asking->store, key, NULL);
    *group = made;
    return TD_OK;
}

/* ---- Members that admit newcomers ---------------------------------------------------------------- */

static void welcome_key(const char *name, char key[TD__NEWCOMER_KEY])
{
    snprintf(key, TD__NEWCOMER_KEY, "\1welcome/%.80s", name);
}

td_status td__root_welcome(const td_group *group, bool welcome)
{
    char key[TD__NEWCOMER_KEY];
    welcome_key(group->root->name, key);
    return td_store_set(group->root->store, key, welcome ? "1" : "0", 1);
}

/* *said: '1' or '0' as the members have, or 0 if they have not said anything. */
static td_status read_welcome(td_store *part, const char *name, char *said)
{
    char key[TD__NEWCOMER_KEY];
    td_bytes value = {0};
    bool found;
    welcome_key(name, key);
    TD_TRY(td__store_look_up(part, key, &value, &found));
    *said = found && value.size ? value.data[0] : 0;
    td_bytes_free(&value);
    return TD_OK;
}

td_status td__root_asks_newcomers(td_store *store, const char *name, bool *asks)
{
    td_store *part;
    char said = 0;
    TD_TRY(td_prefix_store_open("\1tandem", store, &part));
    td_status status = read_welcome(part, name ? name : "world", &said);
    td_store_close(part);
    *asks = said;
    return status;
}

static td_status check_welcome(const struct asking *asking)
{
    char said;
    TD_TRY(read_welcome(asking->store, asking->name, &said));
    return said != '0'
               ? TD_OK
               : td_fail(TD_ERR_PEER,
                         "%s \"%s\": the job has ended, or its members admit nobody any more", what,
                         asking->name);
}

/* ---- Waiting --------------------------------------------------------------------------------- */

/* Handles one message. *group is set when this process is in. */
static td_status handle(struct asking *asking, const td_bytes *bytes, td_group **group)
{
    struct td__newcomer_mail mail;
    if (!td__newcomer_mail_read(bytes->data, bytes->size, &mail))
        return td_fail(TD_ERR_MISMATCH,
                       "%s: a message of a member is not valid; all processes must run the same "
                       "version of Tandem",
                       what);
    if (!mail.commit)
        return take_place(asking, &mail);
    if (!asking->fresh || mail.round != asking->round)
        return TD_OK; /* of a round that has ended */
    td_status status = enter(asking, group);
    if (!status || (status != TD_ERR_PEER && status != TD_ERR_TIMEOUT))
        return status;
    leave_round(asking);
    return ask(asking);
}

static td_status wait_for_mail(struct asking *asking, td__deadline deadline, td_bytes *mail)
{
    char key[TD__NEWCOMER_KEY];
    td__newcomer_mail_key(asking->name, asking->self.id, key);
    int left = td__deadline_poll_ms(deadline);
    int64_t slice = left < 0 || left > LOOK_MS ? LOOK_MS : left > 0 ? left : 1;
    TD_TRY(td_store_get(asking->store, key, slice, mail));
    return td_store_delete_key(asking->store, key, NULL);
}

static td_status wait_to_be_admitted(struct asking *asking, int64_t timeout_ms, td_group **group)
{
    td__deadline deadline = td__deadline_in_ms(timeout_ms);
    struct td__error before;
    td__error_save(&before);
    TD_TRY(check_welcome(asking));
    TD_TRY(ask(asking));
    *group = NULL;
    while (!*group) {
        td_bytes mail = {0};
        td_status status = wait_for_mail(asking, deadline, &mail);
        if (!status)
            status = handle(asking, &mail, group);
        else if (status == TD_ERR_TIMEOUT && td__deadline_passed(deadline))
            status = td_fail(TD_ERR_TIMEOUT,
                             "%s \"%s\": not admitted within %lld ms: no member has called "
                             "td_group_admit(), or the members use another store or name",
                             what, asking->name, (long long)timeout_ms);
        else if (status == TD_ERR_TIMEOUT)
            status = check_welcome(asking) ? td__error_status() : stay_on_list(asking);
        td_bytes_free(&mail);
        if (status) {
            withdraw(asking);
            return status;
        }
    }
    td__error_undo(&before);
    return TD_OK;
}

/* ---- Joining -------------------------------------------------------------------------------------- */

td_status td__root_join(td_store *store, const td_group_options *options, bool world,
                        td_group **group)
{
    struct asking asking = {.given = store,
                            .name = options->name ? options->name : "world",
                            .options = options,
                            .world = world};
    td_group *made;
    TD_TRY(td__root_check_environment());
    if (td__endpoint_was_excluded())
        return td_fail(TD_ERR_STATE,
                       "%s \"%s\": this process was excluded from the job; start another one", what,
                       asking.name);
    if (!td__process_identify((int)getpid(), &asking.self.process))
        asking.self.process = (struct td__process_id){0};
    TD_TRY(td_prefix_store_open("\1tandem", store, &asking.store));
    td_status status = wait_to_be_admitted(
        &asking, options->timeout_ms ? options->timeout_ms : TD_GROUP_DEFAULT_TIMEOUT_MS, &made);
    leave_round(&asking);
    td_store_close(asking.store);
    if (!status)
        *group = made;
    return status;
}

td_status td_group_join(td_store *store, const td_group_options *options, td_group **group)
{
    td_group_options none = {0};
    options = options ? options : &none;
    if (!store || !group)
        return td_fail(TD_ERR_INVALID, "%s: the %s is NULL", what, store ? "result" : "store");
    TD_TRY(td__check_group_options(what, options, NULL));
    TD_TRY(td__spare_wait());
    return td__root_join(store, options, false, group);
}
