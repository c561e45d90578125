/* A file of choices: pairs of a key and a value, bytes both, that processes append to and none rewrites.
 *
 *     record   "TDc1", size of the key (2 bytes), size of the value (2), checksum (8), key, value
 *
 * A record is appended by one write(), so several processes may append at once. What is not a record (torn by a full
 * disk, damaged, of another version) is skipped, byte by byte, up to the next one. The first record of a key counts:
 * two processes that chose differently agree from the next run on. */
#ifndef CHOICE_FILE_H
#define CHOICE_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    CHOICE_MOST_KEY = 1024,
    CHOICE_MOST_VALUE = 4096,
    CHOICE_MOST_FILE =
        8 << 20,              /* bytes that are read of a file, and up to which it is appended to */
    CHOICE_MOST_WRONG = 1000, /* records with a wrong checksum, after which a file is not read on */
};

struct choice_file;

/** Reads the choices of `path`; NULL: of memory only. File and directory are made when something is
 *  stored. A file that cannot be
 *  used costs speed only: it is logged, and what is chosen stays in memory. NULL without memory. All functions may be
 *  called from several threads. */
struct choice_file *td__choice_file_open(const char *path);
void td__choice_file_close(struct choice_file *file);

/** Copies the value of a key; false: there is none, or not of that size. */
bool td__choice_file_get(struct choice_file *file, const void *key, size_t key_size, void *value,
                         size_t value_size);

/** Stores one that is not there yet, in memory and on disk. */
void td__choice_file_put(struct choice_file *file, const void *key, size_t key_size,
                         const void *value, size_t value_size);

/** Waits until no other process holds the lock of the file, ten seconds at most, and reads what was appended since. The
 *  caller unlocks it in the same thread, and waits for no other process until then. */
void td__choice_file_lock(struct choice_file *file);
void td__choice_file_unlock(struct choice_file *file);

/** Calls found() for each record in `bytes`. Returns how many bytes need not be read again: all, or those before a
 *  record that is not complete. *wrong counts those with a wrong checksum. */
size_t td__choice_parse(const uint8_t *bytes, size_t size, int *wrong,
                        void (*found)(void *arg, const uint8_t *key, size_t key_size,
                                      const uint8_t *value, size_t value_size),
                        void *arg);

/** Writes a record, at most CHOICE_MOST_RECORD bytes, and returns its size. */
enum {
    CHOICE_HEADER = 16,
    CHOICE_MOST_RECORD = CHOICE_HEADER + CHOICE_MOST_KEY + CHOICE_MOST_VALUE
};
size_t td__choice_format(uint8_t *record, const void *key, size_t key_size, const void *value,
                         size_t value_size);

#endif
