/* Memory of the host of which there is much, and which no other process maps: pages of this process, large ones where the
 * kernel has them; or a file, whose pages the kernel writes to the disk when others need the room. The file has no name, so
 * that it goes with the memory, also after SIGKILL. What is made beside such memory is of the same kind. */
#ifndef TD_TENSOR_FILE_MEMORY_H
#define TD_TENSOR_FILE_MEMORY_H

#include "tensor/tensor_internal.h"

/** A storage of the host of `bytes` zeros, in a file of `directory`, whose blocks are allocated on the disk. NULL, with
 *  the last error set: TD_ERR_NOMEM for a full disk, TD_ERR_SYSTEM for another failure; both name the directory. */
struct td__storage *td__storage_create_in_file(const char *directory, size_t bytes);

/** The descriptor of such a file, which other processes can map, too. -1, with the same errors. */
int td__file_of_memory(const char *directory, size_t bytes);

/** A storage of the host of `bytes` zeros, in pages of this process alone, which exist once they are used. Not for memory
 *  that comes and goes: its pages are new each time. NULL, with the last error set: TD_ERR_NOMEM. */
struct td__storage *td__storage_create_private(size_t bytes);

/** In a file beside that of `storage`, or in pages of this process, as that is; else as td__storage_create(), on the same
 *  device. */
struct td__storage *td__storage_create_beside(const struct td__storage *storage, size_t bytes);

/** As td__empty_like() and td__zeros_like(), but in memory as that of td__storage_create_beside(). */
td_tensor *td__empty_beside(const td_tensor *tensor);
td_tensor *td__zeros_beside(const td_tensor *tensor);

#endif
