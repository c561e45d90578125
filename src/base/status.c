/* Status codes and the thread's last error. */
#include "base/fail.h"

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

static _Thread_local char last_error[TD__ERROR_TEXT];
static _Thread_local td_status last_status;
static _Thread_local bool was_read; /* by the program, since it was set */
static _Thread_local uint64_t count;

const char *td_status_name(td_status status)
{
    switch (status) {
    case TD_OK:
        return "TD_OK";
    case TD_ERR_INVALID:
        return "TD_ERR_INVALID";
    case TD_ERR_NOMEM:
        return "TD_ERR_NOMEM";
    case TD_ERR_SYSTEM:
        return "TD_ERR_SYSTEM";
    case TD_ERR_TIMEOUT:
        return "TD_ERR_TIMEOUT";
    case TD_ERR_PEER:
        return "TD_ERR_PEER";
    case TD_ERR_AUTH:
        return "TD_ERR_AUTH";
    case TD_ERR_MISMATCH:
        return "TD_ERR_MISMATCH";
    case TD_ERR_STATE:
        return "TD_ERR_STATE";
    case TD_ERR_UNSUPPORTED:
        return "TD_ERR_UNSUPPORTED";
    case TD_ERR_ABORTED:
        return "TD_ERR_ABORTED";
    }
    return "TD_ERR_UNKNOWN";
}

const char *td_last_error(void)
{
    was_read = true;
    return last_error;
}

td_status td_last_status(void)
{
    was_read = true;
    return last_status;
}

const char *td__error_text(void)
{
    return last_error;
}

td_status td__error_status(void)
{
    return last_status;
}

td_status td_fail(td_status status, const char *format, ...)
{
    char message[TD__ERROR_TEXT];
    va_list args;
    va_start(args, format);
    int length = vsnprintf(message, sizeof message, format, args);
    va_end(args);
    if (length >= (int)sizeof message)
        memcpy(message + sizeof message - 4, "...", 4);
    memcpy(last_error, message, sizeof message);
    last_status = status;
    was_read = false;
    count++;
    return status;
}

uint64_t td__error_count(void)
{
    return count;
}

void td__error_save(struct td__error *error)
{
    error->status = last_status;
    error->was_read = was_read;
    memcpy(error->text, last_error, sizeof last_error);
}

void td__error_undo(const struct td__error *error)
{
    td__error_restore(error);
    was_read = error->was_read;
}

td_status td__error_restore(const struct td__error *error)
{
    memcpy(last_error, error->text, sizeof last_error);
    was_read = false;
    count++;
    return last_status = error->status;
}

td_status td__fail_null(const char *call)
{
    if (last_status && !was_read)
        return last_status; /* the text is that of the call which has returned NULL */
    return td_fail(TD_ERR_INVALID, "%s: an argument is NULL, and no failed call has returned it",
                   call);
}

td_status td__fail_nomem(const char *what)
{
    return td_fail(TD_ERR_NOMEM, "%s: out of memory", what);
}

/* The resource limit behind an errno, and how to raise it. */
static const struct {
    int error, resource;
    const char *text;
} limits[] = {
    {EMFILE, RLIMIT_NOFILE, "the limit is %llu in this process: raise it with ulimit -n"},
    {EFBIG, RLIMIT_FSIZE, "files are limited to %llu bytes: raise that with ulimit -f"},
};

const char *td__errno_text(int error)
{
    static _Thread_local char text[128];
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        struct rlimit limit;
        char known[64], why[96];
        if (error != limits[i].error || getrlimit(limits[i].resource, &limit) ||
            limit.rlim_cur == RLIM_INFINITY)
            continue;
        snprintf(why, sizeof why, limits[i].text, (unsigned long long)limit.rlim_cur);
        snprintf(text, sizeof text, "%s (%s)", strerror_r(error, known, sizeof known), why);
        return text;
    }
    return strerror_r(error, text, sizeof text);
}

const char *td__signal_name(int signal)
{
    static _Thread_local char text[16];
    const char *name = sigabbrev_np(signal);
    if (name)
        snprintf(text, sizeof text, "SIG%s", name);
    else
        snprintf(text, sizeof text, "signal %d", signal);
    return text;
}
