/* Reading a file from front to back, through gzip where its first bytes say so. */
#ifndef TD_DATA_UNPACK_H
#define TD_DATA_UNPACK_H

#include <tandem/base.h>

struct td__unpack;

/** Opens a file. `path` must stay. */
td_status td__unpack_open(const char *path, struct td__unpack **unpack_out);

/** The same for a file that is in memory, which must stay; `path` is for messages. */
td_status td__unpack_memory(const char *path, const void *data, size_t size,
                            struct td__unpack **unpack_out);

void td__unpack_close(struct td__unpack *unpack);

/** Reads `size` bytes; fewer than that is TD_ERR_INVALID with the offset, and says that it was `what`
 *  that is missing. */
td_status td__unpack_read(struct td__unpack *unpack, void *data, size_t size, const char *what);

/** TD_ERR_INVALID where there are more bytes. */
td_status td__unpack_end(struct td__unpack *unpack);

/** TD_ERR_INVALID where the file cannot have `size` more bytes: exactly where it is not packed, by the
 *  best ratio of its compression where it is. `what` needs them. */
td_status td__unpack_expect(struct td__unpack *unpack, uint64_t size, const char *what);

/** The file's name and the place of the next byte, for messages: "x.gz, offset 4 of what is unpacked".
 *  Until the next call. */
const char *td__unpack_place(struct td__unpack *unpack);

#endif
