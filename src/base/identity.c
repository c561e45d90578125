/* Rank and size in one atomic word, so that a reader never sees the rank of one world and the size of
 * another. */
#include "base/host.h"
#include "base/thread.h"

#include <tandem/base.h>

#include <stdatomic.h>

static atomic_uint_fast64_t identity; /* size above, rank below; 0: none */
static atomic_uint generation;        /* td__fork_generation() when it was set */

#define TEXT_OF(number) #number
#define DOTTED(major, minor, patch) TEXT_OF(major) "." TEXT_OF(minor) "." TEXT_OF(patch)
const char *td__job_version = DOTTED(TD_VERSION_MAJOR, TD_VERSION_MINOR, TD_VERSION_PATCH);

void td__identity_set(int rank, int size)
{
    atomic_store(&generation, td__fork_generation());
    atomic_store(&identity, size > 0 ? (uint64_t)size << 32 | (uint32_t)rank : 0);
}

bool td__identity(int *rank, int *size)
{
    uint64_t now = atomic_load(&identity);
    if (!now || atomic_load(&generation) != td__fork_generation())
        return false;
    *rank = (int)(uint32_t)now;
    *size = (int)(now >> 32);
    return true;
}
