/* How a failure is reported inside the library: the first one to notice writes the sentence, those
 * above pass the status on (TD_TRY), or put a context in front of the sentence. */
#ifndef TD_BASE_FAIL_H
#define TD_BASE_FAIL_H

#include <tandem/base.h>

enum { TD__ERROR_TEXT = 2048 }; /* bytes of a last error */

/** The last error of a thread in full, kept while something else may fail. */
struct td__error {
    td_status status;
    bool was_read; /* by the program */
    char text[TD__ERROR_TEXT];
};

void td__error_save(struct td__error *error);

/** Makes it the last error again; returns its status. */
td_status td__error_restore(const struct td__error *error);

/** For a call that succeeds although something failed on its way: the last error is what it was when it was
 *  saved, and as if nothing had happened since. */
void td__error_undo(const struct td__error *error);

/** Counts the failures of this thread: whether a callback that failed has called td_fail(). */
uint64_t td__error_count(void);

/** The last error as td_last_error() and td_last_status() return it, for use inside the library: a program
 *  that calls those has seen the failure, and td__fail_null() does not pass it on any more. */
const char *td__error_text(void);
td_status td__error_status(void);

/** For a function that got NULL where it needs an object: the result of a call that failed, usually. A
 *  failure of this thread that the program has not looked at yet stays the last error; otherwise it is
 *  "<call>: an argument is NULL …". Returns TD_ERR_INVALID. */
td_status td__fail_null(const char *call);

/** The same for functions that return a pointer. */
static inline void *td__null(const char *call)
{
    td__fail_null(call);
    return NULL;
}

/** TD_ERR_NOMEM with the sentence "<what>: out of memory". */
td_status td__fail_nomem(const char *what);

/** The text of an errno, in a buffer of the thread's own. */
const char *td__errno_text(int error);

/** Puts "SIGSEGV" for 11, "signal 77" for a number without a name, into a buffer of the thread's. */
const char *td__signal_name(int signal);

#define TD_TRY(call)                                                                               \
    do {                                                                                           \
        td_status td_try_status = (call);                                                          \
        if (td_try_status)                                                                         \
            return td_try_status;                                                                  \
    } while (0)

#endif
