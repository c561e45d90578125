/* The key-value space of an MPI launcher, for what the ranks need before they have a store: PMIx (Open MPI's mpirun), or
 * the wire protocol of PMI-1 (MPICH's hydra, and others). Each rank makes one call of the two that exchange a value. */
#ifndef TD_STORE_LAUNCHER_KV_H
#define TD_STORE_LAUNCHER_KV_H

#include "base/clock.h"

#include <tandem/base.h>

#include <stdbool.h>
#include <stddef.h>

enum { TD__KV_VALUE = 768, TD__KV_LINE = 4096, TD__KV_ADDRESSES = 8, TD__KV_HOST = 64 };

/** Whether a launcher with such a space has started this process. */
bool td__launcher_kv_exists(void);

/** Rank 0 of the launcher puts a value: letters, digits, and ".,:/-%". */
td_status td__launcher_kv_put(const char *key, const char *value, td__deadline deadline);

/** The others wait for it. */
td_status td__launcher_kv_get(const char *key, char value[TD__KV_VALUE], td__deadline deadline);

/* ---- Its two kinds (pmix_kv.c, pmi_kv.c): `value` is put where `put` is set ------------------------- */

bool td__pmix_exists(void);
td_status td__pmix_exchange(const char *key, char value[TD__KV_VALUE], bool put,
                            td__deadline deadline);
bool td__pmi_exists(void);
td_status td__pmi_exchange(const char *key, char value[TD__KV_VALUE], bool put,
                           td__deadline deadline);

/** The value of `name` in a line of PMI-1, "cmd=get_result rc=0 value=x\n". False if there is none, or no room. */
bool td__pmi_field(const char *line, const char *name, char *value, size_t room);

/* ---- What rank 0 puts (launcher_address.c) ----------------------------------------------------------- */

struct td__launcher_card {
    int port;
    char secret[65]; /* "": none */
    int count;
    char host[TD__KV_ADDRESSES][TD__KV_HOST]; /* its addresses, that of the default route first */
};

void td__launcher_card_write(const struct td__launcher_card *card, char text[TD__KV_VALUE]);

/** TD_ERR_MISMATCH says that it is malformed. */
td_status td__launcher_card_read(const char *text, struct td__launcher_card *card);

/** Where the ranks have found rank 0 by the launcher; false, and nothing is set, where they have not. */
bool td__launcher_host(char text[TD__KV_HOST]);

#endif
