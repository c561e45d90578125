/* The GPUs of this machine, and those of them that a CUDA program would see. */
#ifndef TD_LAUNCH_GPUS_H
#define TD_LAUNCH_GPUS_H

#include <tandem/base.h>

enum { TD__MAX_GPUS = 256 };

struct td__gpus {
    int count;
    struct {
        int minor;     /* of its device file, /dev/nvidia<minor> */
        char uuid[64]; /* "GPU-8932f937-…"; "" where the driver does not tell */
    } at[TD__MAX_GPUS];
};

/** Finds those that have a device file in `dev`, with what the driver tells about them in `driver`:
 *  "/dev" and "/proc/driver/nvidia/gpus" unless in a test. */
void td__gpus_find(const char *dev, const char *driver, struct td__gpus *gpus);

/**
 * How many of them a program sees with this CUDA_VISIBLE_DEVICES (NULL: it is not set), by CUDA's
 * rules: numbers, or UUIDs that begin with "GPU-" and may be cut short. The first entry that names no
 * GPU ends the list, a GPU that is named twice makes it empty, and so does the empty text. Of MIG
 * instances, "MIG-…", a program sees one.
 */
int td__gpus_visible(const struct td__gpus *gpus, const char *list);

#endif
