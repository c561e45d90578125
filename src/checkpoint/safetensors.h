/* Files in the safetensors format.
 *
 *     8 bytes      the length of the header, little-endian
 *     the header   {"__metadata__": {"key": "value", …},
 *                   "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, …}
 *     the data     of all tensors, without gaps; offsets count from their beginning
 *
 * The header is padded with spaces to a multiple of 8, and the data are sorted by the width of
 * their elements, widest first, so that each tensor is aligned to its element. Files of this
 * library have "tandem.version", in "tandem.sha256" the SHA-256 of the whole file with zeros
 * instead of these 64 digits, and in "tandem.devices" the devices of the tensors. */
#ifndef TD_CHECKPOINT_SAFETENSORS_H
#define TD_CHECKPOINT_SAFETENSORS_H

#include "base/buffer.h"
#include "base/map.h"
#include "tensor/tensor_internal.h"

#include <tandem/checkpoint.h>

enum {
    TD__FILE_VERSION = 1,
    TD__HEADER_AT = 8,              /* where the header begins */
    TD__HEADER_LONGEST = 100000000, /* the limit of the reference implementation */
    TD__DIGEST_DIGITS = 64,
};

/* ---- Headers (safetensors_header.c) -------------------------------------------------------------- */

struct td__file_tensor {
    struct td__map_node node;
    char *name;
    char *dtype_name;
    size_t at; /* offset of its description in the file */
    td_dtype dtype;
    int ndim;
    int64_t shape[TD_MAX_DIMS];
    uint64_t begin, end; /* in the data */
};

struct td__file_note {
    struct td__map_node node;
    char *key, *value;
    size_t value_at, value_size; /* of the value between its quotes, in the file */
};

struct td__file_header {
    struct td__file_tensor *tensors; /* in the order of the header */
    struct td__file_tensor **sorted; /* in the order of the data */
    size_t count, capacity;
    struct td__file_note *notes;
    size_t note_count, note_capacity;
    bool has_notes;
    struct td__map map;
    td_bytes text; /* of td__load_state(): the size of the data in 8 bytes, and the header */
};

/** Parses and checks a header of `size` bytes, of a file with `data_size` bytes of data. On
 *  failure *header holds nothing. */
td_status td__header_parse(const char *path, const char *text, size_t size, uint64_t data_size,
                           struct td__file_header *header);
void td__header_free(struct td__file_header *header);

/** The note of a key, or NULL. */
const struct td__file_note *td__header_note(const struct td__file_header *header, const char *key);

/** "F32" …; NULL for a dtype that the format does not have. */
const char *td__file_dtype(td_dtype dtype);
/** The dtype of such a name; false if there is none. */
bool td__file_dtype_of(const char *name, td_dtype *dtype);

/* ---- Writing (safetensors_write.c) ---------------------------------------------------------------- */

/** A file to be written: the header, and the tensors in the order of the data. */
struct td__file_plan {
    struct td__buffer text; /* its length, and the header */
    size_t digest_at;       /* of the 64 digits in `text` */
    int *order;             /* numbers of tensors in the state */
    uint64_t data_size;
};

/** Plans a file. `call` and `path` are for errors. On failure *plan holds nothing. */
td_status td__plan_file(const char *call, const char *path, const td_state *state,
                        const td_file_note *notes, int note_count, struct td__file_plan *plan);
void td__plan_free(struct td__file_plan *plan);

/** td_save_safetensors() for calls of other names, which may use keys with "tandem." */
td_status td__save_state(const char *call, const char *path, const td_state *state,
                         const td_file_note *notes, int note_count);

/* ---- Reading (safetensors_read.c) ----------------------------------------------------------------- */

/** Where the tensors of a file go. */
struct td__load_target {
    const td_map_location *map; /* NULL: to their home; without that, to the current device */
    /** The home of a tensor: where the tensor is that it will be copied to; NULL: it is not loaded. *fixed, which is
     *  false: that it goes there whatever the map says. */
    td_device *(*home)(const struct td__file_tensor *tensor, bool *fixed, void *arg);
    /** The part of it that is read, of *count elements; NULL: all. May be NULL. */
    const td_shard *(*part)(const struct td__file_tensor *tensor, int64_t *count, void *arg);
    void *arg;
    bool
        is_missing; /* set where the load has failed since a device is not there, or the map is invalid */
};

/** Reads those tensors of a file that have a target, and its header into *header unless that is NULL, for
 *  td__header_free(). */
td_status td__load_state(const char *call, const char *path, struct td__load_target *target,
                         td_state **state, struct td__file_header *header);

/** A state of uninitialised tensors as the header describes them, where `target` says. NULL on failure. */
td_state *td__state_of_header(const char *call, const char *path,
                              const struct td__file_header *header, struct td__load_target *target);

/* ---- Devices (map_location.c) ---------------------------------------------------------------------- */

/** Appends the value of the note "tandem.devices". */
void td__put_devices(struct td__buffer *text, const td_state *state);

/** Fails if a map contradicts itself. */
td_status td__check_map(const char *call, const td_map_location *map);

/** Where a checked map (NULL: the current device) sends the tensor `name`, which was saved on the device `saved`. NULL if
 *  that is not there. */
td_device *td__map_device(const char *call, const char *path, const td_map_location *map,
                          const char *name, const char *saved);

/** The devices to which the tensors of a file go, in the order of the header, open, or NULL; for free(). */
td_status td__map_devices(const char *call, const char *path, const struct td__file_header *header,
                          struct td__load_target *target, td_device ***devices);

/* ---- To an accelerator (device_upload.c) ----------------------------------------------------------- */

enum { TD__UPLOAD_PIECE = 1 << 20 };

struct td__upload {
    const char *call;
    td_device *device; /* NULL: none yet */
    struct td__upload_piece {
        void *data, *pinned;
        td_event *event; /* of the latest copy from it */
        bool is_sent;
    } pieces[2];
    int next;
};

/** Prepares for an open device, after what was sent to another one has arrived. End it also on failure. */
td_status td__upload_begin(struct td__upload *upload, const char *call, td_device *device);
/** Memory of TD__UPLOAD_PIECE bytes to be filled, and then sent. */
td_status td__upload_buffer(struct td__upload *upload, void **data);
td_status td__upload_send(struct td__upload *upload, const struct td__place *to, size_t bytes);
/** Waits until all has arrived. */
td_status td__upload_end(struct td__upload *upload);

/* ---- Names (module_file.c) ------------------------------------------------------------------------ */

/** The tensors of `state` with the names of `module`: adds or removes the prefix of a wrapper.
 *  NULL without memory. */
td_state *td__fit_names(const td_state *state, td_module *module);

/** The tensor of a module of this name, with or without that prefix, or NULL. `known` is its state. */
td_tensor *td__find_wrapped(const td_state *known, const char *name);

/** The device of a module's tensor `name`, with or without that prefix; the host if it has none. `known` is its state. */
td_device *td__home_in(const td_state *known, const char *name);

/* ---- Atomic files (atomic_file.c) ---------------------------------------------------------- */

/** A file that is written under a temporary name. */
struct td__atomic_file {
    const char *call, *path;
    char *directory, *temporary;
    int fd;
};

/** Opens one. On failure there is nothing to free. `call` and `path` must stay. */
td_status td__atomic_file_open(struct td__atomic_file *file, const char *call, const char *path);
td_status td__atomic_file_write(struct td__atomic_file *file, const void *data, size_t size);
/** Overwrites bytes. */
td_status td__atomic_file_rewrite(struct td__atomic_file *file, size_t at, const void *data,
                                  size_t size);
/** Syncs it, renames it, and syncs the directory; on failure it is removed. */
td_status td__atomic_file_commit(struct td__atomic_file *file);
/** Removes what was written. */
void td__atomic_file_drop(struct td__atomic_file *file);

/** Creates and syncs a directory, unless it exists. */
td_status td__atomic_file_directory(const char *call, const char *path);

/** Removes temporary files of dead processes from a directory. */
void td__atomic_file_sweep(const char *directory);

#endif
