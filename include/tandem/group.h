/* Process groups: point-to-point messages and collectives on plain buffers.
 *
 *     td_init_process_group(NULL);                    rank, size, master: from the environment
 *     td_group_all_reduce(x, x, n, TD_F32, TD_SUM, NULL, NULL);
 *     td_destroy_process_group();
 *
 * dist.h has the same calls for tensors, of any device. Buffers here are host memory.
 *
 * Arguments stand in the order of dist.h and of torch.distributed: the output before the input, as in
 * memcpy() (MPI and NCCL have it the other way round), what the data are, the other rank, the operation,
 * and at the end the group and the work. Functions about a group itself have the group first.
 *
 * Groups. The world is the group of all ranks; td_new_group() makes others of some of them. Where a
 * call takes a group, NULL is the world of td_init_process_group(). td_group_open() opens a world that is an object:
 * a process may have any number of them, each over a store of its own. Different groups are independent of each
 * other and may overlap. Collectives on one group are called one after another, in the same order on all its
 * ranks; messages (send, recv) are not part of that order.
 *
 * Handles. A td_group that a function returned is the caller's until td_group_destroy(). The end of its world ends the
 * group: then every call on it is TD_ERR_STATE, while td_get_rank(), td_get_world_size(), td_group_name(),
 * td_get_backend(), td_get_process_group_ranks(), td_group_sequence() and the translations of ranks still answer, and
 * td_group_destroy() frees what is left, less than a kilobyte and its list of ranks. Works stay valid until they are
 * released, also when their group is gone. After fork() the groups and the works under way are the parent's: in the
 * child every call on them is TD_ERR_STATE, td_work_test() is true and no callback is called; it may open worlds of
 * its own, also by td_init_process_group().
 *
 * Threads. Different groups may be used by different threads at once. On one group:
 *   - collectives, td_group_split(), td_group_shrink(), td_group_grow(), td_group_admit() and monitored barriers: by any
 *     thread, one call at a time; with a work the call is over when it returns;
 *   - messages: by several threads at once, also during a collective;
 *   - td_group_abort(), td_group_exclude(), td_group_set_timeout() and what only answers: by any thread at any time;
 *   - td_group_destroy(): by one thread; it waits for the calls of other threads, and none may begin meanwhile.
 * Making groups (td_new_group(), td_new_subgroups()) is safe from several threads at once; groups of the same members
 * are made in the same order on all of them. One work may be waited for, tested, given callbacks, retained and released
 * by several threads at once. td_init_process_group() and td_destroy_process_group() wait for each other.
 * td_set_call_timeout() and td_set_call_label() are the calling thread's own. Reductions of one's own may be made at
 * any time, and destroyed when no call uses them.
 *
 * Ranks. A root, a source and a destination are given as ranks of the world, as in torch.distributed,
 * whatever the group; td_get_group_rank() and td_get_global_rank() translate. Where data of all ranks
 * stand in one buffer, they stand in the order of the ranks in the group.
 *
 * Blocking or not. The last argument of a call is a td_work **. NULL: it returns when its part is
 * done. Otherwise it returns at once with a work, the buffers are borrowed until that is complete,
 * and the caller releases it.
 *
 * Synchronisation. A barrier, all_reduce, all_gather, reduce_scatter and all_to_all return when
 * every rank has called them. A rank that only sends its data (the root of a broadcast or a scatter, the
 * others of a reduce or a gather) may return before the others have called. A rank that only receives waits for
 * the sender.
 *
 * Memory. Any memory of the host will do. Memory of td_alloc() is mapped by the other ranks of the host: then
 * nothing is copied twice, and large operations run at the speed of memory.
 *
 * In place. Input and output may be the same pointer where both have the same size, and the rank's own slice where
 * one of them has the slices of all ranks. Otherwise they must not overlap.
 *
 * Timeouts. 0 is the default: the group's, or the world's. Only functions that wait take TD_NOW, and say so.
 *
 * Errors of all calls here. TD_ERR_INVALID: an argument is wrong, and nothing was started.
 * TD_ERR_STATE: there is no world, the group has ended, or this rank is not in it. TD_ERR_PEER: another rank has
 * ended or left. TD_ERR_TIMEOUT: not complete within the group's timeout (td_group_set_timeout()).
 * TD_ERR_MISMATCH: the ranks called different operations, or one with different arguments. A rank that
 * has returned by then gets it from a later call, at the latest from td_destroy_process_group() or
 * td_group_destroy(). After one of the last three from a collective the group is broken: all further calls on it
 * fail with the same. A message that failed, or a monitored barrier that named missing ranks, does not break it. */
#ifndef TANDEM_GROUP_H
#define TANDEM_GROUP_H

#include <tandem/dtype.h>
#include <tandem/store.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct td_group td_group;
typedef struct td_work td_work;

#define TD_GROUP_DEFAULT_TIMEOUT_MS 1800000

/* ---- The world ------------------------------------------------------------------------------- */

typedef struct td_init_options {
    const char *backend;     /* NULL: "native", and for each kind of device the backend that is
                                registered for it, for CUDA "nccl" if it is there (docs/nccl.md);
                                see td_get_backend() */
    const char *init_method; /* a URL of rendezvous.h; NULL: from the environment */
    int64_t timeout_ms;      /* of the world's operations; 0: 1800 s */
    int world_size;          /* 0 (or -1): from the URL or the environment */
    int rank;                /* 0: from the URL or the environment, too; where these have none and
                                   world_size is given, and in a world of 1, it is rank 0. -1: from these alone */
    td_store *store;        /* instead of init_method; world_size and rank are needed then. It stays
                                the caller's, and open until td_destroy_process_group() */
    const char *group_name; /* NULL: "world". Two worlds in one store need different names */
    const char *backend_options; /* "name=value name=value"; see td_get_backend() */
    void *reserved[4];           /* must be zero */
} td_init_options;

/**
 * Finds the other processes of the job and makes the world. NULL: everything from the environment;
 * a world of one where that has nothing.
 *
 * Errors: TD_ERR_STATE (there is a world already), TD_ERR_INVALID, and those of td_rendezvous().
 */
TD_API td_status td_init_process_group(const td_init_options *options);

/**
 * Leaves the world: waits for the calls that were started, ends all groups that are left, and closes what was
 * opened. Other threads may still be in calls, as with td_group_destroy(). Handles of groups stay the caller's, see
 * above. Afterwards a process can initialise again.
 *
 * Where the last calls have not synchronised this rank with all others, it compares them now, and waits for
 * ranks that have not made them yet, for a second at most. It is no barrier: it does not wait for ranks to leave.
 *
 * Errors: TD_ERR_STATE (there is no world), TD_ERR_MISMATCH (ranks have made different calls, and no call
 * has returned it; the world has ended nevertheless).
 */
TD_API td_status td_destroy_process_group(void);

/** Whether there is a world: after td_init_process_group(), and before td_destroy_process_group(). */
TD_API bool td_is_initialized(void);

/** This rank in `group`; -1 where it is not in the group, or there is no world. */
TD_API int td_get_rank(const td_group *group);

/** The number of ranks in `group`; -1 where this rank is not in it, or there is no world. */
TD_API int td_get_world_size(const td_group *group);

/** This rank among those of its host in the world, and their number; -1 where there is no world. */
TD_API int td_get_local_rank(void);
TD_API int td_get_local_size(void);

/**
 * The backend of the group, as it can be given to another one; NULL where there is none:
 *
 *     "native"                 Tandem's own one; "gloo" is another name of it. It takes memory of any device:
 *                              accelerators' by way of the host
 *     "tcp"                    the same without shared memory
 *     a name                   of td_register_backend() (backend.h), for the host and all kinds of devices that it
 *                              takes. Where it does not take host memory, the host has "native"
 *     "cpu:native,cuda:nccl"   a backend for each kind of device; "*" is every kind that the list does not name. Where
 *                              "cpu" is missing, the host has "native"
 *
 * Barriers and the calls on objects use the backend of the host. A backend for a device is created with its group where
 * it is named in a list, else in the first call that needs it. Options of the native one:
 *
 *     transport=tcp        no shared memory (also TANDEM_TRANSPORT=tcp); default auto
 *     algorithm=NAME       for operations between hosts: a name of docs/algorithms.md where the
 *                          operation has one of that name
 */
TD_API const char *td_get_backend(const td_group *group);

/** The group's name, for error texts, the log and `tdrun status`. One that was given none is named by its ranks
 *  ("0-3", "0-3#1" for the next group of these ranks, "0-3@3f2a91" in an opened world): each has another name in a
 *  process, which is the same on all its ranks. */
TD_API const char *td_group_name(const td_group *group);

/* ---- More groups -----------------------------------------------------------------------------
 *
 * Making a group sends nothing, waits for no rank and starts no thread. All its members call the function with the
 * same list, in the same order relative to other groups of the same members; ranks that are not in the
 * list may call it too, and get a group in which every operation is TD_ERR_STATE. */

typedef struct td_group_options {
    const char *backend; /* NULL: the world's */
    int64_t timeout_ms;  /* 0: the world's */
    const char
        *name; /* for messages; NULL: made of its ranks, as no other group of the process has */
    const char *backend_options;
    td_group *world;   /* any group of the world whose ranks are meant; NULL: that of
                          td_init_process_group() */
    void *reserved[4]; /* must be zero */
} td_group_options;

/** Makes a group of ranks[0], ranks[1], … of the world (options->world), in that order; NULL: all of them, whatever
 *  `count` is. */
TD_API td_status td_new_group(const int *ranks, int count, const td_group_options *options,
                              td_group **group);

/** Cuts the world into groups of `group_size` consecutive ranks; *group is the one of this rank. The
 *  world's size must be a multiple of it. */
TD_API td_status td_new_subgroups(int group_size, const td_group_options *options,
                                  td_group **group);

/** Makes several groups, which do not overlap: group i has counts[i] ranks, and `ranks` holds one
 *  list after another. *group is the one that this rank is in, or NULL. */
TD_API td_status td_new_subgroups_by_enumeration(const int *ranks, const int *counts, int groups,
                                                 const td_group_options *options, td_group **group);

/** Collective on `parent`: ranks with the same `color` form a group, in the order of their `key`s, and
 *  of their ranks where these are equal. A negative color: in none of them, and *group is NULL. options->world is NULL
 *  or a group of the parent's world, here and for td_group_shrink() and td_group_grow(). */
TD_API td_status td_group_split(td_group *parent, int color, int key,
                                const td_group_options *options, td_group **group);

/** Waits for the calls that were started on the group and frees it. Not collective, and TD_ERR_MISMATCH, as
 *  td_destroy_process_group(). Of a world that td_group_open() opened it ends all groups, whose handles stay the
 *  caller's. NULL does nothing; the world of td_init_process_group() is td_destroy_process_group()'s.
 *
 *  It waits until the calls that other threads have begun, blocking ones and waits for works, return by
 *  themselves, at the latest after their timeout; td_group_abort() ends them before. No call may begin
 *  meanwhile, and a td_work_fn must not destroy its own group. A receive with a work that no thread
 *  waits for completes with TD_ERR_STATE; a send has a second to complete. */
TD_API td_status td_group_destroy(td_group *group);

/** The rank in `group` of a rank of the world, and the other way round; -1 where there is none. */
TD_API int td_get_group_rank(const td_group *group, int global_rank);
TD_API int td_get_global_rank(const td_group *group, int group_rank);

/** The world's ranks of all members, in order: fills in td_get_world_size() ints. */
TD_API td_status td_get_process_group_ranks(const td_group *group, int *ranks);

/** The number of collectives that this rank has begun on the group, the same on all ranks that have made the same
 *  calls. td_group_split() and the calls on objects are one or several; messages and monitored barriers are
 *  none. 0 where there is no world. */
TD_API uint64_t td_group_sequence(const td_group *group);

/** How long an operation of the group may take from now on. 0: 1800 s. */
TD_API td_status td_group_set_timeout(td_group *group, int64_t timeout_ms);

/** How long a call that this thread makes may take, over the group's timeout, until it is set again.
 *  0: the group's. */
TD_API td_status td_set_call_timeout(int64_t timeout_ms);

/** Labels the calls that this thread makes from now on, "ddp bucket 3", for `tdrun status` and the report of tdrun
 *  after a failure. Copied, and cut to 23 bytes; NULL ends it. */
TD_API void td_set_call_label(const char *label);

/** Opens a world without td_init_process_group(): the group of `size` processes (or threads) that share `store`,
 *  which stays the caller's and open until the group is destroyed. td_new_group() with options->world makes groups of
 *  its ranks. Two worlds in one store need different names. Collective. */
TD_API td_status td_group_open(td_store *store, int rank, int size, const td_group_options *options,
                               td_group **group);

/* ---- When something went wrong ---------------------------------------------------------------
 *
 * After a failure of a collective other than TD_ERR_INVALID the group is broken: its ranks are out of step.
 * The survivors agree on which ranks are left, and go on with a new group:
 *
 *     if (td_group_all_reduce(…, group, NULL) != TD_OK) {
 *         td_group *rest;
 *         td_group_shrink(group, NULL, &rest);          waits for all survivors
 *         …
 *     } */

/** Aborts the group: everything under way on it, on every rank, and every later call fails with
 *  TD_ERR_ABORTED and a sentence that names this rank; only td_group_shrink() goes on, and can still be
 *  called. From any thread. Not collective; other groups are not touched. It reaches ranks of other hosts
 *  within 50 ms; one that cannot be reached is left to its own timeout. */
TD_API td_status td_group_abort(td_group *group);

/**
 * For how many milliseconds the process of `rank`, a rank of the world, has shown no sign of life: 0 for one that runs,
 * also while it computes without making calls; more for one that is stopped, or whose host is cut off. For a member that
 * waits for that rank, from any thread. It looks when it is called: call it a few times within the silence that is to
 * be noticed; the first call finds 0 where the rank is on another machine. It does not wait, but for 50 ms if a host does
 * not answer.
 *
 * Errors: TD_ERR_INVALID (no rank of the world), TD_ERR_PEER (it has ended, left, or was excluded).
 */
TD_API td_status td_group_silence(td_group *group, int rank, int64_t *silence_ms);

/**
 * Excludes `rank`, another rank of the world, whose process lives but is of no use: it is stopped, computes without end,
 * or its numbers are wrong. From any thread of any member of a group; not collective. From then on it counts everywhere as a rank
 * that has ended ("was excluded by rank 0: <reason>"): all ranks that answer learn of it before this returns, every group
 * that it is in fails on them with TD_ERR_PEER and that text, and td_group_shrink() does not wait for it. Calls between
 * it and others in groups without it are not touched. An exclusion is not taken back.
 *
 * A process that shares memory with others (on their host, unless the transport is tcp) is ended by SIGKILL, also if it is
 * stopped, before td_group_shrink() returns on any rank of its host. On another host it may run on: its requests are
 * refused, and its own calls on groups with other ranks fail, td_group_shrink() with TD_ERR_STATE and who excluded it
 * and why. It should end then. Where two ranks exclude each other at the same time, at most one of them stays.
 *
 * `reason` is copied and cut to 199 bytes; NULL: none. TD_OK where the rank has ended or was excluded already.
 * Errors: TD_ERR_INVALID (this rank, or no rank of the world), TD_ERR_PEER (it has left), TD_ERR_STATE (this rank was
 * excluded itself), TD_ERR_UNSUPPORTED (it shares memory with a rank that cannot end its process: one in the same
 * process, or in another namespace of pids).
 */
TD_API td_status td_group_exclude(td_group *group, int rank, const char *reason);

/**
 * Collective on the survivors of `group`: aborts it (calls under way on it fail with
 * TD_ERR_PEER), agrees on the ranks that are left, also where more ranks die meanwhile, and makes a new group of them,
 * in the same order, with ranks from 0. Every member that is alive must call it; it does not wait for ranks that
 * have left the world.
 *
 * The ranks of the world stay what they are: in the new group, too, roots, sources and destinations are
 * ranks of the world. `options` as for td_new_group(); its timeout is also how long to wait for the others
 * (0: the group's). Should a survivor not call it: TD_ERR_TIMEOUT that names it, and it may be called
 * again. Where the network is cut into parts, the survivors of each part agree among themselves.
 */
TD_API td_status td_group_shrink(td_group *group, const td_group_options *options,
                                 td_group **survivors);

/**
 * Takes restarted ranks back. Collective on `group`, usually one of td_group_shrink(): waits until
 * every rank of the world that is not in it has rejoined, in a new process which calls
 * td_init_process_group() (or td_group_open()) with the rank, size, store and name that its predecessor
 * had, and makes a group of all of them. For those processes it is the world. Where `group` belongs to
 * the world of td_init_process_group(), it becomes the world here, too; groups made before stay until they are
 * destroyed, or until td_destroy_process_group(). Otherwise the caller destroys it.
 *
 * `options`: the timeout is how long to wait (0: the group's), the rest is not used. The store must
 * have outlived the ranks that died.
 */
TD_API td_status td_group_grow(td_group *group, const td_group_options *options, td_group **grown);

/**
 * Takes newcomers in: processes that have called td_group_join(), or td_init_process_group() with TANDEM_JOIN=1, over the
 * store and with the name of this world. Collective on `group`, usually one of td_group_shrink() or the world itself:
 * makes a new world of its members, in their order, from rank 0, and of all processes that have asked by now, after them
 * in the order in which they asked. Ranks are given out: those in the new world have nothing to do with those in the
 * old one. Where nobody has asked, *grown is NULL; that costs one look into the store by rank 0 of the group and one small
 * broadcast.
 *
 * Where `group` belongs to the world of td_init_process_group(), *grown becomes the world. The groups of the old world stay
 * until they are destroyed, and td_group_destroy() of what td_group_open(), td_group_join(), td_group_grow() or this
 * function returned ends that world with all its groups. Only the newcomers need the store; no key of an earlier
 * call needs to be there still.
 *
 * A newcomer that dies, or does not answer for 2 s, is left out. If one dies later, the members try again without it.
 * `options`: the timeout is how long to wait for the others (0: the group's), the rest is not used.
 *
 * Errors, on all members, after which `group` and its world are what they were: TD_ERR_PEER where newcomers have failed again
 * and again, those of the store, and as for a collective: where a member has died, td_group_shrink() goes on.
 */
TD_API td_status td_group_admit(td_group *group, const td_group_options *options, td_group **grown);

/** How many processes wait to be taken in by td_group_admit(), as the store says. Not collective. One that has ended
 *  counts until then. */
TD_API td_status td_group_waiting(td_group *group, int *count);

/**
 * Asks to be taken into the running job whose world was opened over `store` with the same name (options->name; NULL: the
 * default name), and waits until its members call td_group_admit(): *group is the new world of all of them. For
 * a new process, which has no rank yet; td_init_process_group() does this where the variable TANDEM_JOIN is 1, with
 * its store, or that of the environment, and without rank and size.
 *
 * `options` as for td_group_open(); the timeout is also how long to wait. A backend and its options that are not given
 * are the members'. If the world does not come about, it asks again until then.
 *
 * Errors: TD_ERR_TIMEOUT (not admitted), TD_ERR_STATE (this process was excluded, see td_group_exclude()), and those of
 * the store.
 */
TD_API td_status td_group_join(td_store *store, const td_group_options *options, td_group **group);

/* ---- Works ----------------------------------------------------------------------------------- */

/* A work of a call on an accelerator's tensors (dist.h) is complete when the result is enqueued on the device, behind
 * what was enqueued there before the call. */

/** Waits until the work is complete, at most `timeout_ms` (0: the group's timeout), and returns its status. Of a call on
 *  an accelerator's tensors: makes the thread's current stream of the device wait for the result; the host does not. If
 *  the group has broken before its device had all results, this returns its failure, with some backends (nccl.md).
 *  TD_ERR_TIMEOUT of this call leaves the work as it is; TD_NOW returns it at once where the work is not complete.
 *  May be called again. A collective that has not begun is carried out by the waiting thread, behind those queued before
 *  it: waiting at once costs no more than a blocking call. */
TD_API td_status td_work_wait(td_work *work, int64_t timeout_ms);

/** td_work_wait(), and on an accelerator's tensors it waits until the device has the result, too, in the same time
 *  (0: as long as that takes). Returns the device's failure, if there was one. */
TD_API td_status td_work_synchronize(td_work *work, int64_t timeout_ms);

/** td_work_wait() for all of them, `timeout_ms` in all (0: each one's group timeout; TD_NOW: not at all); the first
 *  failure's status and text. NULLs are passed over. */
TD_API td_status td_work_wait_all(td_work *const *works, int count, int64_t timeout_ms);

/** True when it is complete, successful or not. */
TD_API bool td_work_test(td_work *work);

/** Its status: TD_OK also while it is under way. Sets td_last_error() where it failed. */
TD_API td_status td_work_status(td_work *work);

/**
 * Calls `fn` once when the work is complete, in any thread. May be called any number of times, by several threads at
 * once: the functions are called one after another in the order in which they were added. Where the work is
 * complete already, `fn` has been called when this returns; where a td_work_fn adds it, when those before it have
 * returned. `fn` must not block, and not wait for other works; it may release the work.
 */
typedef void (*td_work_fn)(td_work *work, td_status status, void *arg);
TD_API td_status td_work_on_complete(td_work *work, td_work_fn fn, void *arg);

/** Of a complete recv: the rank of the world that sent the message, and its bytes. -1 and 0 for
 *  others. */
TD_API int td_work_source(const td_work *work);
TD_API size_t td_work_received(const td_work *work);

/** One more owner; one less. What is under way goes on without owners. NULL is fine. */
TD_API td_work *td_work_retain(td_work *work);
TD_API void td_work_release(td_work *work);

/* ---- Messages --------------------------------------------------------------------------------
 *
 * A message goes to the first fitting recv: the same group, sender (or TD_ANY_SOURCE) and tag (or
 * TD_ANY_TAG). Messages with the same tag from one sender arrive in the order in which they were sent.
 * A send is complete when its buffer may be used again: a small one at once, a large one when it was
 * received. A message shorter than the buffer fills its first part; a longer one is TD_ERR_MISMATCH on
 * the receiving side. Sending to oneself is TD_ERR_INVALID. Unlike collectives, messages of one group
 * may be sent and received by several threads at once. */

#define TD_ANY_SOURCE (-1)
#define TD_ANY_TAG (-1)

/** Sends `count` elements to rank `dst`, or receives up to `count` from rank `src`; see above. */
TD_API td_status td_group_send(const void *data, size_t count, td_dtype dtype, int dst, int tag,
                               td_group *group, td_work **work);
TD_API td_status td_group_recv(void *data, size_t count, td_dtype dtype, int src, int tag,
                               td_group *group, td_work **work);

/* ---- Collectives -----------------------------------------------------------------------------
 *
 * `count` is the number of elements in one rank's buffer, or one rank's part. It may be 0. `op` is a
 * td_reduce_op or one made by td_reduce_op_create(). */

/** data of rank `src` -> data of all. */
TD_API td_status td_group_broadcast(void *data, size_t count, td_dtype dtype, int src,
                                    td_group *group, td_work **work);

/** The reduced inputs of all -> output of all. */
TD_API td_status td_group_all_reduce(void *output, const void *input, size_t count, td_dtype dtype,
                                     td_reduce_op op, td_group *group, td_work **work);

/** The reduced inputs of all -> output of `dst`; the others' output is not touched, and may be NULL. */
TD_API td_status td_group_reduce(void *output, const void *input, size_t count, td_dtype dtype,
                                 int dst, td_reduce_op op, td_group *group, td_work **work);

/** Part r of the input of `src` (size * count elements; the others' may be NULL) -> output of rank r. */
TD_API td_status td_group_scatter(void *output, const void *input, size_t count, td_dtype dtype,
                                  int src, td_group *group, td_work **work);

/** Input of rank r -> part r of the output of `dst` (size * count; the others' may be NULL). */
TD_API td_status td_group_gather(void *output, const void *input, size_t count, td_dtype dtype,
                                 int dst, td_group *group, td_work **work);

/** Input of rank r -> part r of the output of every rank (size * count). */
TD_API td_status td_group_all_gather(void *output, const void *input, size_t count, td_dtype dtype,
                                     td_group *group, td_work **work);

/** The reduced parts r of all inputs (size * count) -> output of rank r (count). */
TD_API td_status td_group_reduce_scatter(void *output, const void *input, size_t count,
                                         td_dtype dtype, td_reduce_op op, td_group *group,
                                         td_work **work);

/** The two with uneven parts, one after another in the whole: counts[r] elements are rank r's, 0 for some
 *  ranks or for all of them. `counts` is the same list on every rank; a difference is TD_ERR_MISMATCH. It
 *  need not outlive the call. Equal counts give the same bits as the calls above. */
TD_API td_status td_group_all_gather_v(void *output, const void *input, const size_t *counts,
                                       td_dtype dtype, td_group *group, td_work **work);
TD_API td_status td_group_reduce_scatter_v(void *output, const void *input, const size_t *counts,
                                           td_dtype dtype, td_reduce_op op, td_group *group,
                                           td_work **work);

/** Part r of rank s's input -> part s of rank r's output (both size * count). */
TD_API td_status td_group_all_to_all(void *output, const void *input, size_t count, td_dtype dtype,
                                     td_group *group, td_work **work);

/** The same with uneven parts, one after another: input_counts[r] elements go to rank r, and
 *  output_counts[s] come from rank s, which must be what rank s sends. Not in place. */
TD_API td_status td_group_all_to_all_v(void *output, const void *input, const size_t *output_counts,
                                       const size_t *input_counts, td_dtype dtype, td_group *group,
                                       td_work **work);

/** Returns when all ranks have called it. */
TD_API td_status td_group_barrier(td_group *group, td_work **work);

/**
 * A barrier that names the ranks that are missing. Rank 0 of the group waits for the others, and sends them the
 * outcome. The group stays usable, but for TD_ERR_MISMATCH.
 *
 * `timeout_ms`: 0 is the group's; with TD_NOW rank 0 counts the ranks that have joined already, and the others fail
 * unless rank 0 has joined. Otherwise the others give rank 0 two seconds more to join, and ten to send the outcome, since
 * it waits for its own `timeout_ms` from when it joins. `missing` has room for td_get_world_size() ranks of the world; it
 * and `missing_count` may be NULL. With `wait_all_ranks` these are all missing ranks, else the first one: of those that
 * have ended or left, where there are any. *missing_count is 0 with any other status than TD_ERR_TIMEOUT and TD_ERR_PEER.
 *
 * Errors: TD_ERR_TIMEOUT on the ranks that have joined, where others have not; the sentence says what those do.
 * TD_ERR_PEER where a missing rank has ended or left, as soon as no other is waited for. A rank that joins after
 * rank 0 has stopped waiting gets TD_ERR_TIMEOUT at once, and is itself the missing one; where rank 0 does not
 * answer, rank 0 is. A rank that times out withdraws: rank 0, when it joins later, gets TD_ERR_TIMEOUT and names that
 * rank, so that rank 0 gets TD_OK only where all others do. TD_ERR_MISMATCH on every rank where one is in another
 * collective meanwhile.
 */
TD_API td_status td_group_monitored_barrier(td_group *group, int64_t timeout_ms,
                                            bool wait_all_ranks, int *missing, int *missing_count);

/* ---- Operations of one's own ----------------------------------------------------------------- */

/** A reduction by `fn` (dtype.h); *op is used wherever a td_reduce_op is. All ranks use the same
 *  function, and create theirs in the same order: by their number, counted from 1, it is noticed when two
 *  ranks use different ones. */
TD_API td_status td_reduce_op_create(td_reduce_fn fn, void *arg, td_reduce_op *op);

/** TD_PREMUL_SUM with this rank's own factor; by itself the factor is 1. */
TD_API td_status td_reduce_op_create_premul_sum(double factor, td_reduce_op *op);

/** Frees what one of these two made; others are left alone. */
TD_API void td_reduce_op_destroy(td_reduce_op op);

#ifdef __cplusplus
}
#endif

#endif
