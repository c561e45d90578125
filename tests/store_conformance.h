/* One suite for every kind of store: what store.h promises, checked on a fresh store a test. */
#ifndef TANDEM_TESTS_STORE_CONFORMANCE_H
#define TANDEM_TESTS_STORE_CONFORMANCE_H

#include <tandem/store.h>

struct store_factory {
    const char *name; /* the tests are called <name>/<what> */

    /** Opens a store over a fresh, empty space. */
    td_store *(*open)(void);

    /** Opens another handle on the same space, as another process would; NULL where there is no
     *  such thing, and threads share the one handle. */
    td_store *(*open_again)(void);

    bool minimal; /* it counts no keys, and sets many of them one by one */

    int prefix_size; /* what every key is longer by inside, for a prefix store */
};

/** Adds the suite for one kind of store to the tests; from a constructor. */
void store_conformance_register(const struct store_factory *factory);

/* ---- Inside the suite ------------------------------------------------------------------------ */

/* A test gets two handles on one space. They are the same where there is only one. */
struct store_case {
    const char *name;
    void (*run)(td_store *a, td_store *b);
    double deadline_s; /* 0: the runner's */
};

/* Each ends with a NULL name, and is in the file of that name. */
extern const struct store_case store_rule_cases[]; /* store_conformance.c */
extern const struct store_case store_refusal_cases[];
extern const struct store_case store_model_cases[];
extern const struct store_case store_thread_cases[];

/** The factory of the test that runs. */
const struct store_factory *store_factory_of_test(void);

/** Checks that `key` has that value, which must be there. */
void store_expect(td_store *store, const char *key, const void *value, size_t size);
void store_expect_text(td_store *store, const char *key, const char *value);

/** Sets `key` to a text. */
void store_set_text(td_store *store, const char *key, const char *value);

/** Returns when all that was set through this handle is there for other handles too. */
void store_settle(td_store *store);

/** Checks how many keys the store counts, where it counts them. In the suite only. */
void store_expect_count(td_store *store, int64_t expected);

/** How many keys the store counts. */
int64_t store_count(td_store *store);

/** Fills `data` with a pattern that depends on `seed`. */
void store_pattern(void *data, size_t size, uint32_t seed);

#endif
