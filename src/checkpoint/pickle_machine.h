/* The state of the machine that runs a pickle, for unpickle.c and pickle_calls.c. */
#ifndef TD_CHECKPOINT_PICKLE_MACHINE_H
#define TD_CHECKPOINT_PICKLE_MACHINE_H

#include "base/buffer.h"
#include "checkpoint/unpickle.h"

struct td__pickle_machine {
    const char *path;
    struct td__pickle *pickle;
    const uint8_t *begin;
    struct td__reader reader;
    struct td__pickle_value **stack;
    size_t depth, capacity;
    struct td__pickle_value mark; /* stands for a mark on the stack */
    struct td__pickle_value **memo;
    size_t memo_size, memo_count;
};

/** A value that the pickle owns; NULL without memory. */
struct td__pickle_value *td__pickle_new(struct td__pickle_machine *machine,
                                        enum td__pickle_kind kind);
td_status td__pickle_append(struct td__pickle_machine *machine, struct td__pickle_value *list,
                            struct td__pickle_value *item);

/** TD_ERR_INVALID, with the place. */
td_status td__pickle_damaged(const struct td__pickle_machine *machine, const char *what);

/* ---- What the machine knows (pickle_calls.c) ------------------------------------------------------- */

/** Whether the name of a function, class or dtype is known. */
bool td__pickle_knows(const char *name);

/** Makes the value of a call; `args` is a list. */
td_status td__pickle_call(struct td__pickle_machine *machine, const char *name,
                          struct td__pickle_value *args, struct td__pickle_value **result);

/** The storage of a persistent id. */
td_status td__pickle_find_storage(struct td__pickle_machine *machine,
                                  const struct td__pickle_value *id,
                                  struct td__pickle_value **storage);

#endif
