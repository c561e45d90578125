/* A tensor call: one td_call with the tensors that it is made for.
 *
 *     input tensors --pack--> buffer --td_call--> buffer --unpack--> output tensors
 *
 * A function of dist.h fills one in and hands it to td__tensor_call_run(), which does the rest, for a
 * blocking call and for one with a work. Each side is one buffer: the memory of the tensors
 * themselves where they are contiguous and follow each other, other memory of their device otherwise. */
#ifndef TD_DIST_TENSOR_CALL_H
#define TD_DIST_TENSOR_CALL_H

#include "call/operation.h"
#include "tensor/tensor_internal.h"

#include <tandem/backend.h>
#include <tandem/dist.h>

enum td__side_use {
    TD__READ = 1,  /* the tensors' elements are needed before */
    TD__WRITE = 2, /* the tensors get new elements */
};

struct td__side {
    const char *name; /* of the argument, for messages */
    td_tensor *const *tensors;
    int count; /* 0: this rank has no such side */
    int use;   /* of td__side_use */

    /* Set by td__tensor_call_run(). */
    size_t bytes;
    void *data;
    void *scratch;             /* the same as data, or NULL where the tensors' own memory is used */
    td_tensor *device_scratch; /* on an accelerator: it has the memory of `scratch` */
};

struct td__tensor_call {
    /* What the caller fills in. */
    const char *name; /* "all_gather_into_tensor", for messages */
    td_group *group;  /* as td__check_member() has left it */
    struct td__operation
        operation; /* its call, without the buffers; counts are from malloc(), and taken over */
    int peer;      /* root, source or destination: a rank of the world */
    struct td__side input; /* none in an operation in place */
    struct td__side output;

    /* Used while it is under way. */
    bool held; /* on the heap, with lists and references of its own */
    td_work *inner;
    struct td__tensor_call *next; /* of the operations that are one call together */
};

/** Packs, starts, unpacks, and frees; with `work` not NULL the latter two happen later. */
td_status td__tensor_call_run(struct td__tensor_call *x, td_work **work);

/** Packs, and moves the call to the heap, with references to its tensors. Frees it where it
 * fails. */
td_status td__tensor_call_hold(struct td__tensor_call *x, struct td__tensor_call **held);

/** Runs a chain of held calls one after another, as one call, and takes it over. */
td_status td__tensor_call_run_chain(struct td__tensor_call *first, td_work **work);

/** Frees a chain of held calls that was not started. */
void td__tensor_call_discard(struct td__tensor_call *first);

/* ---- Checks (dist_checks.c) ------------------------------------------------------------------
 *
 * `call` is the name of the operation, `name` that of the argument. */

struct td__member {
    int rank;   /* of this process in the group */
    int size;   /* of the group */
    int global; /* this process as a rank of the world */
};

/** TD_ERR_STATE where this process is not in the group, or there is no world. The world takes the place of
 *  NULL in *group. */
td_status td__check_member(const char *call, td_group **group, struct td__member *member);

/** The group of a call that is made of several operations, the world for NULL: between these it is not
 *  destroyed by another thread, until td__release_group(). NULL (and the last error set) as td__check_member().
 */
td_group *td__hold_group(const char *call, td_group *group);
void td__release_group(td_group *group);

/** Checks that it is not NULL, and for TD__WRITE that no two of its elements share memory. */
td_status td__check_tensor(const char *call, const char *name, const td_tensor *tensor, int use);

/** Checks a list of `expected` tensors, each of which must have the dtype and the number of
 * elements of `like`, which is called `like_name`; `like` NULL: they may be any. */
td_status td__check_list(const char *call, const char *name, td_tensor *const *tensors, int count,
                         int expected, int use, const char *like_name, const td_tensor *like);

/** Checks that `whole` has the dtype of `part`, and `size` times as many elements. */
td_status td__check_parts(const char *call, const char *whole_name, const td_tensor *whole,
                          const char *part_name, const td_tensor *part, int size);

/* ---- Byte strings in one buffer, one after another (dist_objects.c) ----------------------------- */

/** TD_ERR_INVALID where there is no list, or an object has a size and no data. */
td_status td__objects_check(const char *call, const char *name, const td_bytes *objects, int count);

/** The sum of sizes, which another rank may have sent: TD_ERR_MISMATCH where it is out of range. */
td_status td__objects_add_up(const char *call, const uint64_t *sizes, int count, size_t *total);

/** Puts the bytes of all of them to `body`. */
void td__objects_pack(char *body, const td_bytes *objects, int count);

/** Makes objects of the bytes at `body`, which stand one after another, or with a `stride` that is
 * not 0 at fixed distances. All are set, or none. */
td_status td__objects_unpack(const char *call, const char *body, const uint64_t *sizes,
                             size_t stride, int count, td_bytes *objects);

#endif
