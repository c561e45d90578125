/* One suite for the calls of dist.h, which every backend passes. */
#ifndef TANDEM_TESTS_DIST_SUITE_H
#define TANDEM_TESTS_DIST_SUITE_H

#include <tandem/dist.h>

#define MOST_RANKS 16

/* How the suite makes its tensors, and whether it waits for works. */
struct variant {
    enum { PLAIN, TURNED, NARROWED, STEPPED, LAYOUTS } layout;
    bool async;
    int64_t rows, columns;
};

/** Makes every call in the world that there is, with tensors of all kinds. Collective. */
void dist_suite_run(void);

/* Its parts: tensors in and out (dist_suite.c), messages, objects and many at once. */
void dist_suite_messages(const struct variant *v);
void dist_suite_coalesced(const struct variant *v);
void dist_suite_objects(void);

/* ---- Tensors of the suite -------------------------------------------------------------------- */

/** A tensor of i32 of that shape; element i, in the order of the indices, is base + i. */
td_tensor *make_tensor(const struct variant *v, int64_t rows, int64_t columns, int64_t base);

/** Checks that element i is base + factor * i. */
void check_tensor(td_tensor *tensor, int64_t base, int64_t factor);

/** A list of tensors of the variant's shape, the bases of which are base, base + step, … */
td_tensor **make_tensors(const struct variant *v, int count, int64_t base, int64_t step);
void release_tensors(td_tensor **tensors, int count);

/** Makes the call, which uses `work`, and waits for its work where there is one. */
#define RUN(v, call)                                                                               \
    do {                                                                                           \
        td_work *started = NULL, **work = (v)->async ? &started : NULL;                            \
        CHECK_OK(call);                                                                            \
        if (work) {                                                                                \
            CHECK_OK(td_work_wait(started, 0));                                                    \
            CHECK(td_work_test(started));                                                          \
            td_work_release(started);                                                              \
        }                                                                                          \
    } while (0)

#endif
