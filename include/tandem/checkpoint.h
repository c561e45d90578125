/* Checkpoints: tensors in files, and training that goes on where it was left.
 *
 *     td_save_module("net.safetensors", net);              the weights, for Python too
 *     td_load_module("net.safetensors", net);
 *
 *     td_training training = {.model = net, .optimizer = sgd, .schedule = cosine, .sampler = sampler};
 *     td_training_load_latest("run", &training, NULL, &resumed);      all ranks call these
 *     …
 *         training.step++;
 *         td_training_save_numbered("run", &training, 3, NULL);       keeps the last three
 *
 * Files are in the safetensors format. Each is written aside, synced to the disk and renamed, so that
 * at any moment, whatever happens to the process or the machine, the former file or the new one is
 * there, whole. Those written here hold a checksum of all their bytes, and one that does not agree is
 * an error when they are read; files from elsewhere have none, and are read all the same.
 *
 * Errors of files. TD_ERR_SYSTEM: the system refused; TD_ERR_INVALID: the file is no safetensors file,
 * or is damaged; the message has the file, the entry and the byte; TD_ERR_UNSUPPORTED: it is of a later
 * version, or has a dtype that this library lacks; TD_ERR_NOMEM.
 *
 * Threads. Any thread may call these, several at once with different modules and files. What is saved must not
 * be changed meanwhile, and what is loaded must not be used. */
#ifndef TANDEM_CHECKPOINT_H
#define TANDEM_CHECKPOINT_H

#include <tandem/data.h>
#include <tandem/dist.h>
#include <tandem/optim.h>
#include <tandem/random.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Weights of a model -------------------------------------------------------------------------- */

/** td_save_safetensors() of td_module_state(). */
TD_API td_status td_save_module(const char *path, td_module *module);

/** Reads a file into a module, which must have all its names and shapes, and no others; the module may
 *  be on any device. A module that td_ddp() or td_data_parallel() wraps has "module." in front of its
 *  names; that is added or taken away as it is needed, so that the same file fits both. Where this
 *  fails, nothing was changed. */
TD_API td_status td_load_module(const char *path, td_module *module);

/* ---- Any tensors --------------------------------------------------------------------------------- */

/** A text beside the tensors. Keys that begin with "tandem." are the library's own. */
typedef struct td_file_note {
    const char *key, *value;
} td_file_note;

/**
 * Writes the tensors of a state, of any device and strides, and `count` notes (NULL and 0: none). Names,
 * keys and values must be UTF-8. A file that is there is replaced, or left as it is where this fails;
 * a symbolic link is replaced by the file. complex128 is TD_ERR_UNSUPPORTED, since the format has no
 * such dtype.
 */
TD_API td_status td_save_safetensors(const char *path, const td_state *state,
                                     const td_file_note *notes, int count);

/** The tensors of a file in the order of its header, on `device` (NULL: "cpu"). For
 *  td_state_destroy(). NULL where it fails. */
TD_API td_state *td_load_safetensors(const char *path, const char *device);

/** Calls fn(key, value, arg) for each note of a file, in order, those of the library's own included.
 *  Reads only the header: the checksum is not looked at. */
typedef void (*td_file_note_fn)(const char *key, const char *value, void *arg);
TD_API td_status td_read_safetensors_notes(const char *path, td_file_note_fn fn, void *arg);

/* ---- Training ------------------------------------------------------------------------------------
 *
 * All of these are collective: every rank of the group calls them, with its own parts in `training`.
 * Rank 0 of the group reads and writes, so only its path counts, and only its host needs the file; the
 * others wait, and all get the same result and the same message. NULL for `group` is the world, or this
 * process alone where there is none.
 *
 * Saved are the parts that are not NULL, the two numbers, and of every rank the state of the default
 * generator and the position of its sampler; model and optimizer are those of rank 0. Training that
 * loads this goes on bit for bit: dropout, shuffles and the rest of the epoch included. */

typedef struct td_training {
    td_module *model;
    td_optimizer *optimizer;
    td_schedule *schedule;
    td_sampler *sampler; /* the one that the loader uses */
    int64_t epoch, step; /* the program's own counts; loading sets them */
    bool any_size; /* loading: take a checkpoint of another number of ranks too. Generators are
                            left as they are then, and the epoch begins anew */
    void *reserved[4];
} td_training;

/** Writes a checkpoint. */
TD_API td_status td_training_save(const char *path, const td_training *training, td_group *group);

/**
 * Reads one into parts of the same kinds and shapes, wherever they are; parts that are NULL are left
 * out, parts that the file lacks are TD_ERR_INVALID. A loader that is in the middle of an epoch must be
 * reset first. TD_ERR_MISMATCH where the file is of another number of ranks (see any_size).
 *
 * Where it fails on any rank, nothing was changed on any. The former values are kept until the end, so
 * it takes the memory of the model and the optimizer twice more for that time.
 */
TD_API td_status td_training_load(const char *path, td_training *training, td_group *group);

/** Writes directory/step-000000000123.safetensors, with the number training->step, and then removes all
 *  such files but the `keep` newest (0: none is removed). The directory is made where it is missing. */
TD_API td_status td_training_save_numbered(const char *directory, const td_training *training,
                                           int keep, td_group *group);

/**
 * Loads the one with the greatest number that is whole. Those that cannot be read are passed over, with
 * a line in the log; what processes that have died left half written is removed.
 *
 * *loaded tells whether there was one: without any, and without the directory, it is false and the
 * result TD_OK; NULL for `loaded` makes that TD_ERR_SYSTEM. Where there are some and none can be read,
 * the result is the error of the newest.
 */
TD_API td_status td_training_load_latest(const char *directory, td_training *training,
                                         td_group *group, bool *loaded);

#ifdef __cplusplus
}
#endif

#endif
