/* Checkpoints: tensors in files, and resuming training.
 *
 *     td_save_module("net.safetensors", net);              the weights, for Python too
 *     td_load_module("net.safetensors", net, NULL);        to the devices of `net`
 *
 *     td_training training = {.model = net, .optimizer = sgd, .schedule = cosine, .sampler = sampler};
 *     td_training_load_latest("run", &training, NULL, &resumed);      all ranks call these
 *     …
 *         training.step++;
 *         td_training_save_numbered("run", &training, 3, NULL);       keeps the last three
 *
 * Models that are divided among ranks are saved to sharded checkpoints, see below.
 *
 * Files are in the safetensors format. Each is written to a temporary file, synced and renamed, so
 * that a crash at any moment leaves the former file or the new one complete. They have a checksum,
 * which is verified when they are read; files of other programs have none, and are read without.
 *
 * Errors of files. TD_ERR_SYSTEM: a system call failed; TD_ERR_INVALID: the file is no safetensors
 * file, or is damaged; the error has the file, the entry and the offset; TD_ERR_UNSUPPORTED: it is
 * of a later version, or has a dtype that this library lacks; TD_ERR_NOMEM.
 *
 * Threads. Any thread may call these, several at once with different modules and files. Objects
 * must not be changed while they are saved, or used while they are loaded. */
#ifndef TANDEM_CHECKPOINT_H
#define TANDEM_CHECKPOINT_H

#include <tandem/amp.h>
#include <tandem/data.h>
#include <tandem/dist.h>
#include <tandem/optim.h>
#include <tandem/random.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Devices -------------------------------------------------------------------------------------- */

/** What was on the device of this name goes to `device` (NULL: the current one). */
typedef struct td_device_mapping {
    const char *saved; /* "cuda:0" */
    td_device *device;
} td_device_mapping;

/** Where the tensors of a file go (torch.load()'s map_location); all zero: to the current device. At most one of the
 *  device, the mappings and the function may be given.
 *
 *      &(td_map_location){.device = td_device_get("cpu")}
 *      &(td_map_location){.mappings = &(td_device_mapping){"cuda:0", td_device_get("cuda:1")}, .count = 1}
 *
 *  A tensor that was saved on a device which is not here, and that is not sent elsewhere, is TD_ERR_INVALID; the
 *  error names both. Files that do not record devices count as saved on "cpu". */
typedef struct td_map_location {
    td_device *device;                 /* all tensors go there */
    const td_device_mapping *mappings; /* other tensors go to the device on which they were saved */
    int count;
    bool as_saved; /* each goes to the device on which it was saved, but for the mappings */

    /** Chooses the device of the tensor `name`; NULL: the device on which it was saved. */
    td_device *(*choose)(const char *name, const char *saved, void *arg);
    void *arg;
    void *reserved[4];
} td_map_location;

/* ---- Weights of a model -------------------------------------------------------------------------- */

/** td_save_safetensors() of td_module_state(). */
TD_API td_status td_save_module(const char *path, td_module *module);

/**
 * Loads a file into a module, which must have the same names and shapes. The module stays on its devices, whichever the
 * file was saved on: for another device, call td_module_to() first. The names of a module of td_ddp() or td_data_parallel()
 * begin with "module."; this prefix is added or removed as needed, so that the same file fits both. On failure nothing was
 * changed.
 *
 * Of a safetensors file each rank of td_fsdp() keeps, and without a checksum reads, the elements of its shards only. All
 * ranks make the call. Tensors on a meta device get their memory here, without initial values.
 *
 * `map_location` says where the tensors are until all of them are read and the checksum is verified; then they are copied
 * to those of the module. NULL: on the same devices, tensor by tensor through 2 MiB of the host, so that the devices need
 * the memory of the module once more. {.device = td_device_get("cpu")} needs it on the host instead.
 */
TD_API td_status td_load_module(const char *path, td_module *module,
                                const td_map_location *map_location);

/* ---- Any tensors --------------------------------------------------------------------------------- */

/** Metadata of a file. Keys that begin with "tandem." are reserved. */
typedef struct td_file_note {
    const char *key, *value;
} td_file_note;

/**
 * Writes the tensors of a state, of any device and strides, and `count` notes (NULL and 0: none). The note
 * "tandem.devices" records their devices. Names, keys and values must be UTF-8. An existing file is replaced, or left as it is on failure;
 * a symbolic link is replaced by the file. complex128 is TD_ERR_UNSUPPORTED, since the format has
 * no such dtype.
 */
TD_API td_status td_save_safetensors(const char *path, const td_state *state,
                                     const td_file_note *notes, int count);

/** The tensors of a file in the order of its header, on the devices of `map_location` (NULL: on the current device).
 *  They stream through 2 MiB of pinned memory to an accelerator. For td_state_destroy(). NULL on failure. */
TD_API td_state *td_load_safetensors(const char *path, const td_map_location *map_location);

/** Calls fn(key, value, arg) for each note of a file, in order, the reserved ones included. Reads
 *  only the header, and does not verify the checksum. */
typedef void (*td_file_note_fn)(const char *key, const char *value, void *arg);
TD_API td_status td_read_safetensors_notes(const char *path, td_file_note_fn fn, void *arg);

/* ---- Files of PyTorch ------------------------------------------------------------------------------ */

/**
 * The tensors and numbers of a file that torch.save() has written (PyTorch 1.6 or later), on the devices of `map_location`
 * as td_load_safetensors() does. Dictionaries and lists become names with dots: {"model": {"conv.weight": …}, "betas":
 * (0.9, 0.999)} has the entries "model.conv.weight", "betas.0" and "betas.1"; td_state_part(state, "model.") is the model's.
 * A file of one tensor has the entry "value". Texts and None are not in the state: td_read_torch_notes() has them.
 * td_load_module() reads such a file, too.
 *
 * Such a file is a program for Python's interpreter. It is not run: what is neither a tensor, a number, a text, a list nor
 * a dictionary is TD_ERR_UNSUPPORTED, with its name. For td_state_destroy(). NULL on failure.
 */
TD_API td_state *td_load_torch(const char *path, const td_map_location *map_location);

/** Calls fn(name, text, arg) for each text of such a file, in order; also for None, dtypes and devices, by their names. */
TD_API td_status td_read_torch_notes(const char *path, td_file_note_fn fn, void *arg);

/* ---- Training ------------------------------------------------------------------------------------
 *
 * All of these are collective: every rank of the group calls them, with its own parts in
 * `training`. Rank 0 of the group reads and writes: only its path is used, and only its host needs
 * the file. All ranks get the same status and the same error. NULL for `group` is the world, or
 * this process alone if there is none.
 *
 * A checkpoint has the parts that are not NULL, the two numbers, and of every rank the states of the
 * default generators (those of accelerators where they were used) and the position of its sampler; model and optimizer are those of rank 0.
 * Training resumes from it bit for bit, with dropout, shuffles and the rest of the epoch. */

typedef struct td_training {
    td_module *model;
    td_optimizer *optimizer;
    td_schedule *schedule;
    td_sampler *sampler; /* of the loader */
    td_grad_scaler *scaler;
    int64_t epoch, step; /* the program's own counts; loading sets them */
    const td_map_location
        *map_location; /* loading: as for td_load_module(), of model and optimizer; each rank its
                                            own. NULL: on the devices of these */
    bool any_size; /* loading: accept a checkpoint of another number of ranks. Generators are then
                      not restored, and the epoch starts over */
    void *reserved[4];
} td_training;

/** Writes a checkpoint. */
TD_API td_status td_training_save(const char *path, const td_training *training, td_group *group);

/**
 * Loads a checkpoint into parts of the same kinds and shapes. The parts stay on their devices, whichever the file was
 * saved on (see map_location); parts that are NULL are skipped, and what no rank needs is not kept in memory; parts that the
 * file lacks are TD_ERR_INVALID. A loader in the middle of an epoch must be reset first. TD_ERR_MISMATCH if the file is of
 * another number of ranks (see any_size).
 *
 * If it fails on any rank, nothing was changed on any. The former values are kept until the end, so it temporarily needs
 * the memory of the model and the optimizer twice more on their devices (once with a map_location to the host). Tensors of
 * accelerators get to other ranks one by one, through memory of the host for the largest one.
 */
TD_API td_status td_training_load(const char *path, td_training *training, td_group *group);

/** Writes directory/step-000000000123.safetensors, with the number training->step, and then
 *  removes all such files but the `keep` newest (0: removes none). Creates the directory if it is
 *  missing. */
TD_API td_status td_training_save_numbered(const char *directory, const td_training *training,
                                           int keep, td_group *group);

/**
 * Loads the complete checkpoint with the greatest number. Those that cannot be read are skipped,
 * which is logged; temporary files of dead processes are removed.
 *
 * *loaded is whether there was one: without any, and without the directory, it is false and the
 * result TD_OK; if `loaded` is NULL, that is TD_ERR_SYSTEM. If there are some and none can be read,
 * the result is the error of the newest.
 */
TD_API td_status td_training_load_latest(const char *directory, td_training *training,
                                         td_group *group, bool *loaded);

/* ---- Sharded checkpoints ---------------------------------------------------------------------------
 *
 *     td_training_load_latest("run", &training, NULL, &resumed);                  finds these, too
 *     …
 *         td_training_save_sharded_numbered("run", &training, 3, NULL, NULL);     all ranks write
 *
 * A sharded checkpoint is a directory: a safetensors file of each rank, and index.json, which says where each tensor is.
 * Tensors that are shards (td_tensor_set_shard(), FSDP) are written by the ranks that have them, in parallel; of others
 * that several ranks have, one rank writes each, so that all write about as many bytes. These are taken to be the same on
 * all ranks. It can be loaded by another number of ranks, into other shards, into whole tensors, and in one process.
 *
 * These calls are collective: every rank of the group makes them, NULL is the world, or this process alone if there is
 * none. Rank 0 names the directory, in a file system that all ranks share. It is written under a temporary name,
 * synced, and renamed when all ranks are done: a crash at any moment leaves the former checkpoint or the new one. All
 * ranks get the same status; the error has the rank, the file and the tensor, and what was written is removed.
 *
 * Errors: those of files above; TD_ERR_MISMATCH where the shards of the ranks do not fit together. Each 64 KiB have a
 * checksum (CRC-32C), which is verified when they are read. */

/** A save that goes on in a thread. */
typedef struct td_async_save td_async_save;

/**
 * Writes the tensors of the states of all ranks, and rank 0's `count` notes (NULL and 0: none). A sharded checkpoint and an
 * empty directory are replaced; anything else of this name is TD_ERR_SYSTEM.
 *
 * With `save` NULL it returns when the checkpoint is written. Otherwise the tensors are copied, a thread writes, and *save is
 * for td_async_save_wait() and td_async_save_release(); the tensors may change as soon as it returns. The thread has a group of its
 * own: the world must not end before it is done. Another save of this process, in any directory, waits for it first, and
 * the memory of the copy is kept for the next one.
 */
TD_API td_status td_save_sharded(const char *directory, const td_state *state,
                                 const td_file_note *notes, int count, td_group *group,
                                 td_async_save **save);

/**
 * Loads the tensors of `state`, each the part that it is a shard of, or all: they must be in the checkpoint with the same dtype and
 * (whole) shape; "module." in front of a name is added or removed as needed. What else is there is not read. Each
 * rank reads its own bytes: those of shards once over all ranks, but for 64 KiB around cuts that are elsewhere now.
 *
 * All ranks have read and verified all before a tensor is changed, so it needs the memory of this rank's tensors once
 * more on the host.
 */
TD_API td_status td_load_sharded(const char *directory, const td_state *state, td_group *group);

/** td_training_save() to a sharded checkpoint; `save` as above. */
TD_API td_status td_training_save_sharded(const char *directory, const td_training *training,
                                          td_group *group, td_async_save **save);

/** td_training_load() from one, also with any_size; map_location is not used. */
TD_API td_status td_training_load_sharded(const char *directory, td_training *training,
                                          td_group *group);

/** td_training_save_numbered() to directory/step-000000000123.sharded; `save` as above. It removes old checkpoints of both
 *  kinds, and td_training_load_latest() finds both. */
TD_API td_status td_training_save_sharded_numbered(const char *directory,
                                                   const td_training *training, int keep,
                                                   td_group *group, td_async_save **save);

/** Waits until the save is complete, at most `timeout_ms` (0: as long as it takes), and returns its status. May be called
 *  again. TD_ERR_TIMEOUT leaves it as it is. */
TD_API td_status td_async_save_wait(td_async_save *save, int64_t timeout_ms);

/** True when it is complete, successful or not. */
TD_API bool td_async_save_test(td_async_save *save);

/** Frees the handle; what is under way goes on. NULL is fine. */
TD_API void td_async_save_release(td_async_save *save);

/**
 * Writes the tensors of a sharded checkpoint whose names begin with `prefix`, without it, to one safetensors file, with a few MiB
 * of memory. NULL: "model." for a checkpoint of a training, else "". Not collective; `tdmerge` is the tool for it.
 */
TD_API td_status td_merge_sharded(const char *directory, const char *path, const char *prefix);

/* ---- Whole states of shards -------------------------------------------------------------------------- */

/** Collective: the whole tensors of the states of all ranks, on the host of rank 0 (*full, for td_state_destroy(); NULL on
 *  the others). They are gathered one after another: no other rank needs memory for them. */
TD_API td_status td_gather_state(const td_state *state, td_group *group, td_state **full);

/** Collective: the same, but rank 0 writes them to a safetensors file, with a MiB of memory. Only its path is used. */
TD_API td_status td_save_full(const char *path, const td_state *state, td_group *group);

/* ---- Stopping in time, and going on later ------------------------------------------------------------ */

/**
 * Has this process remember the signals of the list instead of ending by them; NULL and 0: SIGUSR1 and SIGTERM, by which
 * batch systems announce the end of a job's time, and tdrun ends its workers. Their handlers before are replaced. The
 * list is for the whole process; call it before training, also where td_should_stop() is called by another thread.
 *
 * TD_ERR_INVALID: a number that is no signal, or one that cannot be handled.
 */
TD_API td_status td_stop_on_signals(const int *signals, int count);

/**
 * Collective: whether a rank of the group has got one of these signals, so that all should save and end now. All ranks get
 * the same answer in the same call, whichever of them got the signal, and true from then on. It costs an all_reduce of
 * four bytes: call it once a step, or once in several.
 *
 *     td_stop_on_signals(NULL, 0);
 *     while (training.step < steps && !stop) {
 *         …
 *         if (td_should_stop(NULL, &stop)) return fail();
 *     }
 *     td_training_save_numbered(directory, &training, 2, NULL);
 *
 * TD_ERR_INVALID: `stop` is NULL; else as td_group_all_reduce().
 */
TD_API td_status td_should_stop(td_group *group, bool *stop);

#ifdef __cplusplus
}
#endif

#endif
