/* The version, status codes, the last error, timeouts, the log, and memory that other processes can map.
 *
 * Threads: every function here may be called from any thread at any time. The last error is each thread's own.
 * A sink of td_log_set_sink() is called by one thread at a time, which may be a thread of the library. */
#ifndef TANDEM_BASE_H
#define TANDEM_BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TD_VERSION_MAJOR 0
#define TD_VERSION_MINOR 1
#define TD_VERSION_PATCH 0

/** The version of these headers as one number, for #if: 0.1.0 is 100, 1.2.3 is 10203. */
#define TD_VERSION (TD_VERSION_MAJOR * 10000 + TD_VERSION_MINOR * 100 + TD_VERSION_PATCH)

#if defined(__GNUC__)
#define TD_API __attribute__((visibility("default")))
#else
#define TD_API
#endif

/* A name that stands nowhere else, for macros that declare something. */
#define TD_UNIQUE(name) TD_UNIQUE_WITH(name, __COUNTER__)
#define TD_UNIQUE_WITH(name, number) TD_UNIQUE_JOIN(name, number)
#define TD_UNIQUE_JOIN(name, number) name##number

/* ---- Errors ---------------------------------------------------------------------------------
 *
 * A function that can fail returns a td_status, or an object pointer that is NULL on failure. It
 * sets its outputs only on success, never prints and never exits. */

typedef enum td_status {
    TD_OK = 0,
    TD_ERR_INVALID,     /* an argument, a variable or a URL is wrong; nothing was started */
    TD_ERR_NOMEM,       /* out of memory */
    TD_ERR_SYSTEM,      /* the operating system refused; the message has its reason */
    TD_ERR_TIMEOUT,     /* the deadline passed; the message says what was missing */
    TD_ERR_PEER,        /* another process died, left, or closed the connection */
    TD_ERR_AUTH,        /* the job's secret is missing, or is not the same on both sides */
    TD_ERR_MISMATCH,    /* two processes disagree: both are named */
    TD_ERR_STATE,       /* not possible now: initialised twice, closed already, … */
    TD_ERR_UNSUPPORTED, /* not available in this build, or on this machine */
    TD_ERR_ABORTED,     /* the group was aborted, here or by another rank: td_group_abort() */
} td_status;

/** The name of a status, such as "TD_ERR_TIMEOUT"; "TD_ERR_UNKNOWN" for a number that is none. */
TD_API const char *td_status_name(td_status status);

/**
 * The calling thread's last failure in one sentence for a person: what was asked, what was wrong
 * with it, and what to do. Valid until the thread's next failing call; "" when there was none.
 * A successful call leaves it as it was.
 */
TD_API const char *td_last_error(void);

/** Its status: which kind of failure it was where a function has returned NULL. TD_OK when there was
 *  none. */
TD_API td_status td_last_status(void);

/** Sets td_last_error() of this thread, and returns `status`: for authors of backends, stores, datasets
 *  and other parts that the library calls. The last error itself may be an argument. */
TD_API td_status td_fail(td_status status, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 2, 3)))
#endif
    ;

/* ---- Timeouts --------------------------------------------------------------------------------
 *
 * In all headers, a timeout (`timeout_ms`) is a number of milliseconds:
 *
 *     0             the default: the declaration says which
 *     1 and above   waits that long at most; TD_ERR_TIMEOUT when the time is over
 *     TD_NOW        does not wait: TD_ERR_TIMEOUT at once where what is asked for is not there yet
 *     others        TD_ERR_INVALID
 *
 * A timeout that an object keeps for later calls (a member of options, td_store_set_timeout()) cannot be
 * TD_NOW: TD_ERR_INVALID. */

/** A timeout: look, and do not wait. */
#define TD_NOW (-1)

/* ---- Version --------------------------------------------------------------------------------
 *
 * A program is compiled with the headers of one version and may be loaded with the library of another
 * one. docs/versioning.md says which versions fit together. */

/** The version of the library that is loaded, such as "0.1.0". */
TD_API const char *td_version(void);

/**
 * Checks that the library that is loaded fits a program that was compiled with the headers of version
 * major.minor.patch; TD_CHECK_VERSION() passes those of the caller. It fits when it is not older and
 * has the same major number; before 1.0, when every minor version has an ABI of its own, it must have
 * the same minor number, too. May be called before everything else, by any thread.
 *
 * Errors: TD_ERR_UNSUPPORTED when it does not fit, with a sentence that names both versions;
 * TD_ERR_INVALID for a negative number.
 */
TD_API td_status td_check_version(int major, int minor, int patch);

/** td_check_version() with the version of the headers that the caller was compiled with. */
#define TD_CHECK_VERSION() td_check_version(TD_VERSION_MAJOR, TD_VERSION_MINOR, TD_VERSION_PATCH)

/* ---- Log ------------------------------------------------------------------------------------
 *
 * Lines for people on standard error, each with time, host and rank. TANDEM_LOG chooses the level:
 * error, warn (the default), info or debug. */

typedef enum td_log_level {
    TD_LOG_ERROR,
    TD_LOG_WARN,
    TD_LOG_INFO,
    TD_LOG_DEBUG,
} td_log_level;

/** Receives finished lines (without a line end) instead of standard error. Called by any thread. */
typedef void (*td_log_fn)(td_log_level level, const char *line, void *arg);

/** Sets the level, over TANDEM_LOG. */
TD_API void td_log_set_level(td_log_level level);

/** Sends the log to `fn`; NULL sends it to standard error again. Returns after the last call of the
 *  former function has returned, so that its `arg` may be freed. */
TD_API void td_log_set_sink(td_log_fn fn, void *arg);

/** Writes one line. Cheap when `level` is not shown. */
TD_API void td_log(td_log_level level, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 2, 3)))
#endif
    ;

/* ---- Byte strings ----------------------------------------------------------------------------
 *
 * Every text and byte string that a call returns and the caller owns is a td_bytes. td_bytes_free() frees it; free()
 * and td_free() do not. A `const char *` that a call returns belongs to the library. */

/** Bytes and their number. Behind those that the library returns stands a NUL that `size` does not count, so that a
 *  text can be printed as it is. */
typedef struct td_bytes {
    char *data;
    size_t size;
} td_bytes;

/** Sets *bytes to a copy of `size` bytes, followed by a NUL: for callbacks that return byte strings. What
 *  *bytes held before is not freed. Errors: TD_ERR_INVALID (`data` is NULL and `size` is not 0, or `bytes` is
 *  NULL), TD_ERR_NOMEM. */
TD_API td_status td_bytes_copy(const void *data, size_t size, td_bytes *bytes);

/** Frees the bytes and sets *bytes to zero. NULL and empty ones are fine. */
TD_API void td_bytes_free(td_bytes *bytes);

/* ---- Shareable memory -----------------------------------------------------------------------
 *
 * Memory that the other processes of a job on the same host can map, so that nothing needs to be
 * copied between them. It is backed by a memfd: /dev/shm and its limits play no part, and nothing
 * is left behind by a crash. After fork() the child still sees what the parent had allocated, and its
 * writes are its own; but a page that it has not written to yet still follows the parent's writes.
 * What it allocates comes from memory of its own. */

/** Allocates `size` bytes, aligned to 64, zeroed when fresh from the system but not when reused.
 *  NULL when memory is short (td_last_error() says so) or `size` is 0. */
TD_API void *td_alloc(size_t size);

/** Returns memory of td_alloc(). NULL is fine; any other pointer is reported as an error in the
 *  log and left alone. */
TD_API void td_free(void *memory);

#ifdef __cplusplus
}
#endif

#endif
