/* Which versions of the library and the headers are compatible; docs/versioning.md has the rules. */
#ifndef TD_BASE_VERSION_H
#define TD_BASE_VERSION_H

#include <tandem/base.h>

struct td__version {
    int major, minor, patch;
};

enum td__version_fit { TD__VERSION_FITS, TD__VERSION_OTHER_ABI, TD__VERSION_NEWER };

/** Whether code that was compiled with `headers` can use this library; TD__VERSION_NEWER: the headers are newer. */
enum td__version_fit td__version_fit(struct td__version headers);

/** Checks that a program compiled with `headers` can use `library`; see td_check_version(). */
td_status td__check_version(struct td__version library, struct td__version headers);

#endif
