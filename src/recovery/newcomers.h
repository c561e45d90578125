/* What newcomers and the first member of a group say to each other, through the store of the world; see newcomers.c. */
#ifndef TD_RECOVERY_NEWCOMERS_H
#define TD_RECOVERY_NEWCOMERS_H

#include "base/buffer.h"
#include "os/process.h"

#include <tandem/store.h>

enum { TD__NEWCOMER_KEY = 200, TD__MOST_NEWCOMERS = 4096 };

/** A process that asks to be taken in. */
struct td__newcomer {
    uint64_t id;                   /* random */
    struct td__process_id process; /* `space` 0: not known */
};

/** Adds the newcomer at the end of the list. */
td_status td__newcomers_add(td_store *store, const char *name, const struct td__newcomer *newcomer);

/** The newcomers on the list, in order, at most TD__MOST_NEWCOMERS; *list is for free(). */
td_status td__newcomers_read(td_store *store, const char *name, struct td__newcomer **list,
                             int *count);

/** Removes newcomers from the list; those that are not on it are passed over. */
td_status td__newcomers_remove(td_store *store, const char *name, const struct td__newcomer *list,
                               int count);

/** Whether its process is known to have ended: it is on this machine. */
bool td__newcomer_has_ended(const struct td__newcomer *newcomer);

/** The keys: where messages for a newcomer are put; where its card of a round is, and the cards of all; and how many
 *  newcomers have read these. */
void td__newcomer_mail_key(const char *name, uint64_t id, char key[TD__NEWCOMER_KEY]);
void td__newcomer_card_key(const char *name, uint64_t round, uint64_t id,
                           char key[TD__NEWCOMER_KEY]);
void td__newcomer_cards_key(const char *name, uint64_t round, char key[TD__NEWCOMER_KEY]);
void td__newcomer_read_key(const char *name, uint64_t round, char key[TD__NEWCOMER_KEY]);

/** A message to a newcomer. */
struct td__newcomer_mail {
    bool commit;    /* the cards of all are there; else: it gets this rank, and sets its card */
    uint64_t round; /* random */
    int rank, size;
    int newcomers;                            /* of this round */
    bool named;                               /* the world has the name by its program */
    struct td__span backend, backend_options; /* "": none */
};

void td__newcomer_mail_put(const struct td__newcomer_mail *mail, struct td__buffer *buffer);

/** False if it is not valid. The texts point into the bytes. */
bool td__newcomer_mail_read(const void *bytes, size_t size, struct td__newcomer_mail *mail);

#endif
