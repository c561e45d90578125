/* The version of the library, and whether it is compatible with a program's headers. */
#include "base/version.h"

#include "base/fail.h"

#define STRING(x) #x
#define DOTTED(major, minor, patch) STRING(major) "." STRING(minor) "." STRING(patch)
#define THIS_LIBRARY ((struct td__version){TD_VERSION_MAJOR, TD_VERSION_MINOR, TD_VERSION_PATCH})

const char *td_version(void)
{
    return DOTTED(TD_VERSION_MAJOR, TD_VERSION_MINOR, TD_VERSION_PATCH);
}

/* Before 1.0 every minor version has an ABI of its own. */
static bool same_abi(struct td__version a, struct td__version b)
{
    return a.major == b.major && (a.major > 0 || a.minor == b.minor);
}

static bool older(struct td__version a, struct td__version b)
{
    return a.minor != b.minor ? a.minor < b.minor : a.patch < b.patch;
}

static enum td__version_fit fit(struct td__version library, struct td__version headers)
{
    return !same_abi(library, headers) ? TD__VERSION_OTHER_ABI
           : older(library, headers)   ? TD__VERSION_NEWER
                                       : TD__VERSION_FITS;
}

enum td__version_fit td__version_fit(struct td__version headers)
{
    return fit(THIS_LIBRARY, headers);
}

td_status td__check_version(struct td__version library, struct td__version headers)
{
    if (headers.major < 0 || headers.minor < 0 || headers.patch < 0)
        return td_fail(TD_ERR_INVALID,
                       "td_check_version(%d, %d, %d): the parts of a version must not be negative",
                       headers.major, headers.minor, headers.patch);
    enum td__version_fit found = fit(library, headers);
    if (found == TD__VERSION_FITS)
        return TD_OK;
    const char *why = found == TD__VERSION_NEWER
                          ? "the library is older; install a newer one"
                          : "these two have different ABIs; recompile the program";
    return td_fail(
        TD_ERR_UNSUPPORTED,
        "the program was compiled with the headers of Tandem %d.%d.%d, but libtandem.so %d.%d.%d "
        "is loaded: %s, or make the program load the library that it was compiled for",
        headers.major, headers.minor, headers.patch, library.major, library.minor, library.patch,
        why);
}

td_status td_check_version(int major, int minor, int patch)
{
    return td__check_version(THIS_LIBRARY, (struct td__version){major, minor, patch});
}
