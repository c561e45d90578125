/* Sharded checkpoints: a directory with a safetensors file of each rank, and an index of them.
 *
 *     run/step-000000000123.sharded/
 *         shard-00000.safetensors     what rank 0 has written: its shards, and some of the tensors that several ranks have
 *         shard-00001.safetensors
 *         index.json
 *
 *     {"tandem.sharded": 1, "ranks": 2, "kind": "training",
 *      "notes": {"key": "value"},
 *      "files": [{"name": "shard-00000.safetensors", "size": 123456}, …],
 *      "tensors": {"model.0.weight": {"dtype": "F32", "shape": [10, 20],
 *                                     "pieces": [[file, first element, elements, offset in the file, "checksums"], …]}},
 *      "crc32c": "1a2b3c4d"}
 *
 * The pieces of a tensor cover it without overlap or gap, in the order of its elements. The checksums are 8 digits for each
 * TD__SUM_BLOCK bytes of the piece, so that a part of it can be verified, too; that of the index is of all bytes before
 * its comma. */
#ifndef TD_CHECKPOINT_SHARDED_H
#define TD_CHECKPOINT_SHARDED_H

#include "base/buffer.h"
#include "base/map.h"
#include "checkpoint/json.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/training.h"

enum {
    TD__SHARDED_VERSION = 1,
    TD__SUM_BLOCK = 1 << 16, /* bytes of a piece with a checksum of their own */
    TD__SHARD_CHUNK =
        1
        << 20, /* bytes that are written at once, or copied by way of the host; a multiple of it */
    TD__READ_CHUNK = 1 << 22,    /* bytes that are read at once */
    TD__INDEX_LONGEST = 1 << 30, /* bytes of an index */
    TD__SHARD_NAME = 40,         /* bytes of the name of a file */
};
#define TD__INDEX_NAME "index.json"

/* ---- The index (sharded_index.c, sharded_index_write.c) ------------------------------------------- */

struct td__shard_piece {
    int file;
    int64_t first, count; /* elements of the whole */
    uint64_t offset;      /* in the file */
    uint32_t *sums;       /* of each block */
    size_t sum_count;
};

struct td__sharded_tensor {
    struct td__map_node node;
    char *name;
    size_t number; /* in the index */
    td_dtype dtype;
    int ndim;
    int64_t shape[TD_MAX_DIMS];
    int64_t numel;
    struct td__shard_piece *pieces; /* in the order of their elements; none of 0 elements */
    size_t count, capacity;
};

struct td__shard_note {
    char *key, *value;
};

struct td__index {
    int ranks;
    bool is_training;
    uint64_t *sizes; /* of the files, one of each rank */
    size_t file_count, file_capacity;
    struct td__shard_note *notes;
    size_t note_count, note_capacity;
    struct td__sharded_tensor **tensors; /* in their order in the index */
    size_t count, capacity;
    struct td__map map;
};

/** Parses and checks an index; `path` is for errors. On failure *index holds nothing. */
td_status td__index_parse(const char *path, const char *text, size_t size, struct td__index *index);
void td__index_free(struct td__index *index);

/** The tensor of a name, or NULL. */
struct td__sharded_tensor *td__index_get(const struct td__index *index, const char *name);

/** Adds a tensor, and copies its name. NULL without memory. */
struct td__sharded_tensor *td__index_add(struct td__index *index, const char *name, size_t length);
/** Adds a zeroed piece. NULL without memory. */
struct td__shard_piece *td__index_add_piece(struct td__sharded_tensor *tensor);

/** The text of an index, which needs no map. */
td_status td__index_write(const char *call, const char *path, const struct td__index *index,
                          struct td__buffer *text);

/** How many blocks `bytes` of a piece have. */
static inline uint64_t td__sum_blocks(uint64_t bytes)
{
    return (bytes + TD__SUM_BLOCK - 1) / TD__SUM_BLOCK;
}

/** "shard-00003.safetensors" */
void td__shard_name(char name[static TD__SHARD_NAME], int rank);

/* ---- The plan (sharded_plan.c, sharded_claims.c) --------------------------------------------- */

/** What a rank has of a tensor, or is to write of it. */
struct td__shard_part {
    const char *name;  /* of the state, borrowed */
    td_tensor *tensor; /* of the state, borrowed */
    const void *data;  /* of a snapshot; NULL: the tensor's */
    td_dtype dtype;
    int ndim;
    int64_t shape[TD_MAX_DIMS]; /* of the whole */
    int64_t first, count;
    bool is_whole; /* not marked as a shard */
};

static inline uint64_t td__part_bytes(const struct td__shard_part *part)
{
    return (uint64_t)part->count * td_dtype_size(part->dtype);
}

/** Describes tensor number `number` of a state. */
void td__part_of(const td_state *state, int number, struct td__shard_part *part);

/** What a rank has of tensor `tensor`; rank 0's view. */
struct td__claim {
    struct td__sharded_tensor *tensor;
    int rank, number;
    int64_t first, count;
    bool is_whole, is_chosen;
};

/** Who writes what. */
struct td__shard_plan {
    struct td__index index;   /* on rank 0: all tensors, without pieces */
    struct td__claim *chosen; /* on rank 0: the pieces, by rank, in the order of its file */
    size_t chosen_count;
    struct td__shard_part *mine; /* what this rank writes, in the order of its file */
    int count;
};

/** Rank 0: merges the packed descriptions of all ranks. `to_root`: rank 0 prefers its own of equal claims. */
td_status td__plan_merge(const char *call, const td_bytes *all, int ranks, bool to_root,
                         struct td__shard_plan *plan);

/** Collective: each rank has a part of what no other writes. `mine` is the status so far of this rank, the same status
 *  is the result on all. On failure *plan holds nothing. */
td_status td__plan_shards(const char *call, const struct td__coordinator *coordinator,
                          const td_state *state, td_status mine, bool to_root,
                          struct td__shard_plan *plan);
void td__plan_shards_free(struct td__shard_plan *plan);

/** A status as td__coordinator_agree() sends it, followed by what the sender appends. */
void td__pack_status(struct td__buffer *packed, td_status status);
/** The status, and its error as the last one, from rank `rank` (negative: unnamed). */
td_status td__unpack_status(const char *call, struct td__reader *reader, int rank);

/* ---- Elements of tensors (shard_elements.c) --------------------------------------------------------- */

/** Reads the bytes of a part, of any device and strides, in order and in chunks of the host's memory. */
struct td__elements {
    const char *call;
    td_tensor *whole;
    struct td__place at;
    uint64_t left;
    bool is_bool, is_host;
    void *room, *pinned; /* for what is not the host's memory as it stands */
};

/** End it also on failure. */
td_status td__elements_begin(struct td__elements *elements, const char *call,
                             const struct td__shard_part *part);
/** The next bytes, at most TD__SHARD_CHUNK, valid until the next call. *size is 0 at the end. */
td_status td__elements_next(struct td__elements *elements, const void **data, size_t *size);
void td__elements_end(struct td__elements *elements);

/** Copies all parts to one new memory of the host, for td__snapshot_free(). */
struct td__snapshot {
    void *data;
    size_t size;
};
td_status td__snapshot_take(const char *call, struct td__shard_part *parts, int count,
                            struct td__snapshot *snapshot);
void td__snapshot_free(struct td__snapshot *snapshot);

/* ---- Headers of files that are written in one pass (stream_file.c) ------------------------------------ */

struct td__file_entry {
    const char *name;
    td_dtype dtype;
    int ndim;
    int64_t shape[TD_MAX_DIMS];
    uint64_t bytes;
};

/** The length and the header of a file whose data are `entries` in order; its size is a multiple of `align`. With
 *  `digest_at`, it has a version and 64 zeros for a checksum there. */
td_status td__entries_text(const char *call, const char *path, const struct td__file_entry *entries,
                           size_t count, const td_file_note *notes, int note_count, size_t align,
                           struct td__buffer *text, size_t *digest_at);

/** A safetensors file that is written in one pass, without its tensors in memory. */
struct td__stream_file {
    struct td__atomic_file file;
    void *digest;
    size_t digest_at;
};

/** Writes the header. On failure there is nothing to free. */
td_status td__stream_open(struct td__stream_file *stream, const char *call, const char *path,
                          const struct td__file_entry *entries, size_t count,
                          const td_file_note *notes, int note_count);
td_status td__stream_put(struct td__stream_file *stream, const void *data, size_t size);
/** Both free it. */
td_status td__stream_commit(struct td__stream_file *stream);
void td__stream_drop(struct td__stream_file *stream);

/* ---- Files of shards (shard_write.c, shard_read.c) --------------------------------------------------- */

/** Writes and syncs the file of a rank in a directory. Appends to `report` its size, and for each part its offset and the
 *  checksums. `path` is that of the checkpoint, for errors. */
td_status td__shard_write(const char *call, const char *directory, const char *path, int rank,
                          const struct td__shard_part *parts, int count, struct td__buffer *report);

/** Reads parts of tensors from the files of a checkpoint, and verifies them. */
struct td__shard_reader {
    const char *call, *directory;
    const struct td__index *index;
    int *fds;       /* of the files, or -1 */
    int open;       /* how many */
    uint8_t *block; /* for blocks of which only a part is needed */
};

td_status td__shard_reader_begin(struct td__shard_reader *reader, const char *call,
                                 const char *directory, const struct td__index *index);
/** Reads `count` elements from `first` on. */
td_status td__shard_read(struct td__shard_reader *reader, const struct td__sharded_tensor *tensor,
                         int64_t first, int64_t count, void *data);
void td__shard_reader_end(struct td__shard_reader *reader);

/** Bytes that this process has read from such files so far. */
uint64_t td__shard_bytes_read(void);

/* ---- Directories (sharded_directory.c) ---------------------------------------------------------------- */

/** A directory that is written under a temporary name, by rank 0. */
struct td__sharded_directory {
    const char *call;
    char *path, *parent, *temporary; /* NULL: there is none */
    int lock;                        /* by which others know that its writer lives */
};

/** On failure there is nothing to free. */
td_status td__sharded_directory_open(struct td__sharded_directory *directory, const char *call,
                                     const char *path);
/** Writes the index, syncs everything and renames it; on failure it is removed. Frees it. */
td_status td__sharded_directory_commit(struct td__sharded_directory *directory,
                                       const struct td__buffer *index);
/** Removes what was written, and frees it. */
void td__sharded_directory_drop(struct td__sharded_directory *directory);

/** Removes a checkpoint; a crash meanwhile leaves it complete, or one that is swept. 0, or an errno. */
int td__sharded_directory_remove(const char *path);

/** Removes temporary directories of dead processes from a directory. */
void td__sharded_directory_sweep(const char *parent);

/* ---- Saving (sharded_save.c, async_save.c) --------------------------------------------------------------- */

/** What follows a save on rank 0: pruning a directory of numbered checkpoints. */
struct td__sharded_after {
    char *directory; /* owned; NULL: nothing */
    int64_t step;
    int keep;
};

/** A save that has begun. It is finished perhaps by another thread and on another group. */
struct td__sharded_save {
    const char *call;
    struct td__coordinator coordinator;
    struct td__shard_plan plan;
    struct td__sharded_directory directory; /* on rank 0 */
    char *temporary, *path;                 /* of rank 0 */
    td_state *state;                        /* with the names of an asynchronous save */
    struct td__snapshot snapshot;
    struct td__sharded_after after;
};

struct td__save_request {
    const char *call, *path;
    const td_state *state;
    bool is_training;
    const td_file_note *notes;
    int note_count;
    struct td__sharded_after after; /* taken over */
};

/** Collective. `mine`: the status so far of this rank. With `async`, the save goes on in a thread, and *async is its
 *  handle. */
td_status td__save_sharded(struct td__save_request *request, td_group *group, td_status mine,
                           td_async_save **async);
/** Writes, commits, and frees what `save` holds. */
td_status td__sharded_finish(struct td__sharded_save *save);
/** A handle with a group of its own, which td__async_start() uses or td__async_cancel() frees. */
td_status td__async_create(const char *call, const struct td__coordinator *coordinator,
                           td_async_save **async);
void td__async_cancel(td_async_save *async);
/** Starts a thread that finishes a copy of *save, whose contents it takes over. */
void td__async_start(td_async_save *async, const struct td__sharded_save *save);
/** Waits until no save of this process is under way. */
void td__async_await_turn(void);

/** Rank 0: removes all numbered checkpoints but the newest (training_directory.c). */
void td__numbered_prune(const char *call, const char *directory, int64_t step, int keep);

/* ---- Loading (sharded_load.c, sharded_training.c) ------------------------------------------------------- */

/** Reads an index, and checks that the files are there. */
td_status td__index_open(const char *call, const char *directory, struct td__index *index,
                         td_bytes *text);

/** Collective: rank 0 reads the index of a directory, all get it. `mine`: the status so far. *directory: rank 0's, for
 *  free(). */
td_status td__index_share(const char *call, const struct td__coordinator *coordinator,
                          const char *path, td_status mine, struct td__index *index,
                          char **directory);

/** Reads what `target` has of `tensor` (its shard, or all) to a new tensor of the host; NULL: all of it. The shapes must be
 *  the same, and the dtypes unless `any_dtype`: the result has that of the checkpoint. */
td_tensor *td__shard_fetch(struct td__shard_reader *reader, const struct td__sharded_tensor *tensor,
                           const char *name, const td_tensor *target, bool any_dtype);

/** Collective: loads a training from the directory that rank 0 names. */
td_status td__training_load_sharded(const char *call, const char *path, td_training *training,
                                    const struct td__coordinator *coordinator);

#endif
