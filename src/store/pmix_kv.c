/* PMIx, by the library that the launcher's MPI uses: libpmix.so.2, which is loaded when it is needed. Only what one
 * exchange needs is declared here, as in the standard of PMIx (versions 3 to 5 have the same layouts). */
#include "store/launcher_kv.h"

#include "base/fail.h"
#include "store/rendezvous_schemes.h"

#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum {
    PMIX_TEXT = 3,      /* PMIX_STRING */
    PMIX_NUMBER = 6,    /* PMIX_INT */
    PMIX_EVERYBODY = 3, /* PMIX_GLOBAL */
    PMIX_GET_S = 1,     /* how long one get waits */
    PAUSE_NS = 20000000,
};

struct pmix_process {
    char space[256];
    uint32_t rank;
};

struct pmix_item {
    uint16_t type;
    union {
        char *text;
        int number;
        char room[64]; /* of larger kinds, in other versions */
    } data;
};

/* The library reads the first 32 bytes of the item. */
struct pmix_option {
    char key[512];
    uint32_t flags;
    struct pmix_item value;
};

struct pmix_library {
    int (*init)(struct pmix_process *, void *, size_t);
    int (*finalize)(const void *, size_t);
    int (*put)(uint8_t, const char *, struct pmix_item *);
    int (*commit)(void);
    int (*get)(const struct pmix_process *, const char *, const void *, size_t,
               struct pmix_item **);
    const char *(*text)(int);
};

bool td__pmix_exists(void)
{
    return td__env("PMIX_NAMESPACE") && td__env("PMIX_RANK");
}

static td_status load(struct pmix_library *pmix)
{
    static const char *const names[] = {"PMIx_Init",   "PMIx_Finalize", "PMIx_Put",
                                        "PMIx_Commit", "PMIx_Get",      "PMIx_Error_string"};
    void *symbols[6], *library = dlopen("libpmix.so.2", RTLD_NOW | RTLD_GLOBAL);
    if (!library)
        return td_fail(TD_ERR_UNSUPPORTED,
                       "the launcher's key-value space is PMIx, but there is no libpmix.so.2 (%s); "
                       "install it, or set MASTER_ADDR to the host of rank 0",
                       dlerror());
    for (int i = 0; i < 6; i++)
        if (!(symbols[i] = dlsym(library, names[i])))
            return td_fail(TD_ERR_UNSUPPORTED, "libpmix.so.2 has no %s", names[i]);
    memcpy(pmix, symbols, sizeof symbols);
    return TD_OK;
}

static td_status fail_pmix(const struct pmix_library *pmix, const char *what, int result)
{
    return td_fail(TD_ERR_SYSTEM,
                   "the key-value space of the launcher: %s failed with %s; set MASTER_ADDR and "
                   "MASTER_PORT to do without it",
                   what, pmix->text(result));
}

static td_status put_value(const struct pmix_library *pmix, const char *key, char *value)
{
    struct pmix_item item = {.type = PMIX_TEXT, .data.text = value};
    int result = pmix->put(PMIX_EVERYBODY, key, &item);
    if (result)
        return fail_pmix(pmix, "PMIx_Put", result);
    result = pmix->commit();
    return result ? fail_pmix(pmix, "PMIx_Commit", result) : TD_OK;
}

/* Rank 0 may not have put it yet: the server waits for that for a while, or says at once that there is none. */
static td_status get_value(const struct pmix_library *pmix, const char *space, const char *key,
                           char value[TD__KV_VALUE], td__deadline deadline)
{
    struct pmix_process first = {.rank = 0};
    struct pmix_option limit = {.key = "pmix.timeout",
                                .value = {.type = PMIX_NUMBER, .data.number = PMIX_GET_S}};
    snprintf(first.space, sizeof first.space, "%s", space);
    for (;;) {
        struct pmix_item *item = NULL;
        int result = pmix->get(&first, key, &limit, 1, &item);
        bool found = !result && item && item->type == PMIX_TEXT && item->data.text;
        if (found)
            snprintf(value, TD__KV_VALUE, "%s", item->data.text);
        if (found)
            free(item->data.text);
        free(item);
        if (found)
            return TD_OK;
        if (td__deadline_passed(deadline))
            return td_fail(TD_ERR_TIMEOUT,
                           "the key-value space of the launcher: rank 0 has not put its address in "
                           "time (PMIx_Get: %s)",
                           pmix->text(result));
        td__sleep_ns(PAUSE_NS);
    }
}

/* Not at once: Open MPI 4 cannot begin again after that, and MPI_Init() counts its users. The launcher takes a process for
 * a failed one that ends without it. */
static int (*finalize)(const void *, size_t);
static pid_t user;

static void finalize_at_exit(void)
{
    if (getpid() == user) /* not in a fork */
        finalize(NULL, 0);
}

td_status td__pmix_exchange(const char *key, char value[TD__KV_VALUE], bool put,
                            td__deadline deadline)
{
    struct pmix_library pmix = {0};
    struct pmix_process self = {.rank = 0};
    TD_TRY(load(&pmix));
    int result = pmix.init(&self, NULL, 0);
    if (result)
        return fail_pmix(&pmix, "PMIx_Init", result);
    td_status status = put ? put_value(&pmix, key, value)
                           : get_value(&pmix, self.space, key, value, deadline);
    finalize = pmix.finalize;
    user = getpid();
    atexit(finalize_at_exit);
    return status;
}
