/* Error reporting inside the library: the function that detects a failure writes the text, its callers pass
 * the status on (TD_TRY), or prepend context to the text. */
#ifndef TD_BASE_FAIL_H
#define TD_BASE_FAIL_H

#include <tandem/base.h>

enum { TD__ERROR_TEXT = 2048 }; /* bytes of a last error */

/** A thread's last error in full, saved while other calls may fail. */
struct td__error {
    td_status status;
    bool was_read; /* by the program */
    char text[TD__ERROR_TEXT];
};

void td__error_save(struct td__error *error);

/** Restores it as the last error; returns its status. */
td_status td__error_restore(const struct td__error *error);

/** For a call that succeeds although one of its steps failed: resets the last error to the saved one, as if
 *  nothing had failed since. */
void td__error_undo(const struct td__error *error);

/** The number of failures of this thread; shows whether a callback that failed has called td_fail(). */
uint64_t td__error_count(void);

/** What td_last_error() and td_last_status() return, for use inside the library: those also mark the error as
 *  read by the program, and td__fail_null() then does not keep it. */
const char *td__error_text(void);
td_status td__error_status(void);

/** For a function that got NULL instead of an object: usually the result of a call that failed. An error of
 *  this thread that the program has not read yet stays the last error; otherwise it becomes
 *  "<call>: an argument is NULL …". Returns the status of that one, TD_ERR_INVALID for the latter. */
td_status td__fail_null(const char *call);

/** The same for functions that return a pointer. */
static inline void *td__null(const char *call)
{
    td__fail_null(call);
    return NULL;
}

/** TD_ERR_NOMEM with the text "<what>: out of memory". */
td_status td__fail_nomem(const char *what);

/** The text of an errno, in a thread-local buffer. */
const char *td__errno_text(int error);

/** "SIGSEGV" for 11, "signal 77" for a number without a name, in a thread-local buffer. */
const char *td__signal_name(int signal);

#define TD_TRY(call)                                                                               \
    do {                                                                                           \
        td_status td_try_status = (call);                                                          \
        if (td_try_status)                                                                         \
            return td_try_status;                                                                  \
    } while (0)

#endif
