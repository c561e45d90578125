/* Which versions of the library and the headers are compatible; docs/versioning.md has the rules. */
#ifndef TD_BASE_VERSION_H
#define TD_BASE_VERSION_H

#include <tandem/base.h>

struct td__version {
    int major, minor, patch;
};

/** Checks that a program compiled with `headers` can use `library`; see td_check_version(). */
td_status td__check_version(struct td__version library, struct td__version headers);

#endif
